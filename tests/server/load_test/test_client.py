"""One request at a time: what is read of answers, by what kind failures are counted, and how connections are used."""

import asyncio
import shutil
import ssl
import subprocess
import time

import pytest

from server.load_test.answer import Answer
from server.load_test.client import BadUrl, Client, read_target
from server.load_test.command import main
from server.load_test.exchange_errors import ExchangeFailed, error_text
from server.load_test.preparation import ask, calibrate
from server.load_test.request_form import RequestForm
from tests.server.load_test.stand_in import stand_in

FORM = RequestForm("a-model")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://host/v1/", "http://host"),
        ("host:81", "http://host:81"),
        ("https://api.example.com/v1", "https://api.example.com"),
        ("http://[::1]:9/llm/v1", "http://[::1]:9/llm"),
    ],
)
def test_urls_are_understood_with_and_without_the_version(url, shown):
    assert read_target(url).url == shown


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://host", "is not the URL of a server"),
        ("http://", "is not the URL of a server"),
        ("http://host:x", "is not the URL of a server"),
        ("http://host?a=b", "is not the URL of a server"),
        ("http://me:secret@host", "give --api-key"),
        ("http://host/v1/chat/completions", "give --endpoint chat and http://host/v1"),
        ("host:8/llm/v1/completions/", "give --endpoint completions and host:8/llm/v1"),
    ],
)
def test_what_is_no_url_of_a_server_is_refused(url, words):
    with pytest.raises(BadUrl, match=words) as caught:
        read_target(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_an_answer_is_read_piece_by_piece(endpoint):
    async with stand_in(first_delay=0.03, delay=0.01) as served:
        client = Client(read_target(served.url), timeout=60)
        begin = time.perf_counter()
        answer = Answer(keeps_text=True)
        form = RequestForm("a-model", endpoint)
        answer.end(await client.post(form.path, form.body(" one two", 4), answer.take))
        client.close()
    assert answer.text == " t0 t1 t2 t3"
    assert len(answer.piece_times) == 4 and answer.piece_times[0] - begin >= 0.03
    assert answer.piece_times[-1] - answer.piece_times[0] >= 0.03
    assert (answer.num_output_tokens, answer.num_cached_tokens) == (4, 5)


async def test_nothing_is_sent_that_was_not_asked_for():
    async with stand_in() as served:
        client = Client(read_target(served.url), timeout=60)
        await ask(client, FORM, "x", 1)
        form = RequestForm("m", "chat", "max_completion_tokens", False, True, 0.5, {"top_k": 3, "max_tokens": 1})
        await ask(client, form, " x", 7)
        client.close()
    assert served.bodies == [
        {
            "model": "a-model",
            "prompt": "x",
            "max_tokens": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {
            "model": "m",
            "messages": [{"role": "user", "content": "x"}],
            "max_completion_tokens": 7,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0.5,
            "top_k": 3,
            "max_tokens": 1,
        },
    ]


@pytest.mark.parametrize(
    ("failure", "kind", "words"),
    [
        ("busy", "http 429", "too many requests"),
        ("drop", "broken off", "before the answer"),
        ("break", "broken off", "during the answer"),
        ("error event", "error event", "the engine died"),
        ("junk", "bad answer", "not as OpenAI's API has it"),
        ("html", "bad answer", "text/html"),
        ("no http", "bad answer", "not HTTP"),
        ("silent", "no tokens", "no text"),
        ("compressed", "bad answer", "gzip"),
        ("moved", "http 307", "https://elsewhere"),
        ("never", "timeout", "within 1 s"),
    ],
)
async def test_failures_are_told_by_kind(failure, kind, words):
    async with stand_in(fails=lambda number, body: failure if not number else None) as served:
        client = Client(read_target(served.url), timeout=1 if failure == "never" else 60)
        with pytest.raises(ExchangeFailed, match=words) as caught:
            await ask(client, FORM, "x", 3)
        assert caught.value.kind == kind
        await ask(client, FORM, "x", 3)  # and the client goes on
        client.close()


async def test_a_server_that_does_not_listen():
    async with stand_in() as served:
        url = served.url
    client = Client(read_target(url), timeout=60)
    with pytest.raises(ExchangeFailed, match="cannot be reached") as caught:
        await ask(client, FORM, "x", 1)
    assert caught.value.kind == "connect"


async def test_connections_are_used_again_and_those_closed_meanwhile_replaced():
    async with stand_in() as served:
        client = Client(read_target(served.url), timeout=60)
        for _ in range(3):
            await ask(client, FORM, "x", 2)
        assert served.num_connections == 1
        await asyncio.gather(*(ask(client, FORM, "x", 2) for _ in range(3)))
        assert served.num_connections == 3
        served.fails = lambda number, body: "drop" if number == 6 else None
        await ask(client, FORM, "x", 2)
        client.close()
    # The dropped one was sent again; what comes before the first answer of a new connection would not be.
    assert client.num_sent_again == 1 and len(served.bodies) == 8


async def test_answers_that_end_with_the_connection():
    async with stand_in(keeps_alive=False) as served:
        client = Client(read_target(served.url), timeout=60)
        for _ in range(2):
            assert (await ask(client, FORM, "x", 2)).num_output_tokens == 2
        client.close()
    assert served.num_connections == 2


async def test_a_stream_without_its_type_is_read_all_the_same():
    async with stand_in(fails=lambda number, body: "untyped") as served:
        client = Client(read_target(served.url), timeout=60)
        assert len((await ask(client, FORM, "x", 3)).piece_times) == 3
        client.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate, and is not installed")
async def test_tls_with_certificates_that_are_trusted_and_not(tmp_path):
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "certificate"))
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, *files]
    subprocess.run(command, check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    async with stand_in(tls) as served:
        assert served.url.startswith("https://")
        wary = Client(read_target(served.url), timeout=60)
        with pytest.raises(ExchangeFailed, match="certificate") as caught:
            await ask(wary, FORM, "x", 2)
        assert caught.value.kind == "connect" and not served.bodies
        client = Client(read_target(served.url), timeout=60, verifies=False)
        assert (await ask(client, FORM, "x", 2)).num_output_tokens == 2
        arguments = [served.url, "--insecure", "--num-requests", "2", "--no-progress"]
        assert await asyncio.to_thread(main, arguments) == 0  # in the event loop that people have
        wary.close()
        client.close()


async def test_keys_and_other_headers_go_with_each_request():
    async with stand_in() as served:
        client = Client(read_target(served.url), timeout=60, headers={"Authorization": "Bearer secret"})
        await ask(client, FORM, "x", 1)
        client.close()
    assert "Authorization: Bearer secret\r\n" in served.heads[0]
    assert "Accept-Encoding: identity\r\n" in served.heads[0]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_calibration_finds_the_line_that_the_server_counts_by(endpoint):
    async with stand_in() as served:
        client = Client(read_target(served.url), timeout=60)
        calibration = await calibrate(client, RequestForm("a-model", endpoint), "s")
        client.close()
    num_more = {"completions": 0, "chat": 3}[endpoint]  # the words of the message around it, twice
    assert calibration.is_measured and calibration.per_word == 2.0
    assert calibration.fixed == 5 + 2 * num_more
    assert 2 * calibration.num_words(105) + calibration.fixed in (104, 105, 106)


async def test_without_a_count_a_word_is_taken_for_a_token():
    async with stand_in(has_usage=False) as served:
        client = Client(read_target(served.url), timeout=60)
        calibration = await calibrate(client, FORM, "s")
        client.close()
    assert not calibration.is_measured and calibration.num_words(77) == 77


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "no room", "code": 1}}', "no room"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"a\n b", "a b"),
        (b"x" * 500, "x" * 297 + "..."),
    ],
)
def test_errors_are_shown_in_one_line(body, text):
    assert error_text(body) == text
