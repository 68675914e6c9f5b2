"""How one stream of events is read: what is text and when it came, whose count of tokens is taken, what fails."""

import json

import pytest

from server.load_test.answer import Answer
from server.load_test.exchange_errors import ExchangeFailed
from server.load_test.record import Record


def read(events, *, keeps_text=True):
    """The answer of events that come a second apart, the first at 1."""
    answer = Answer(keeps_text=keeps_text)
    for second, event in enumerate(events, start=1):
        data = event if isinstance(event, str) else json.dumps(event)
        answer.take(200, "text/event-stream", float(second), f"data: {data}\n\n".encode())
    answer.end(200)
    return answer


def said(finish_reason=None, **delta):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], "usage": None}


def usage(**counts):
    return {"choices": [], "usage": counts}


def test_frames_without_text_have_no_time_and_thoughts_have_one():
    answer = read(
        [
            said(role="assistant", content=""),
            said(reasoning_content="hm"),
            said(content=" a b c"),  # several tokens
            said(content=""),  # a token without text
            said(content="d"),
            said("stop"),
            usage(prompt_tokens=10, completion_tokens=6),
            "[DONE]",
        ]
    )
    assert list(answer.piece_times) == [2.0, 3.0, 5.0] and answer.text == " a b cd"
    assert (answer.num_prompt_tokens, answer.num_output_tokens, answer.finish_reason) == (10, 6, "stop")
    record = Record(0, 0, 0.5, 6, ended=8.0, piece_times=answer.piece_times, num_counted_tokens=6)
    assert (record.ttft, record.gaps, record.tpot, record.end_to_end) == (1.5, [1.0, 2.0], 3.0 / 5, 7.5)


@pytest.mark.parametrize("delta", [{"reasoning": "x"}, {"tool_calls": [{"index": 0}]}, {"content": [{"type": "text"}]}])
def test_whatever_the_model_says_is_text(delta):
    assert list(read([said(role="assistant", content=None), said("stop", **delta)]).piece_times) == [2.0]


def test_parts_of_a_text_are_put_together():
    parts = [{"type": "thinking", "thinking": [{"text": "hm"}]}, {"type": "text", "text": "yes"}]
    assert read([said(content=parts), said("stop", content=" no")]).text == "yes no"


def test_without_a_count_pieces_count():
    answer = read([said(content="a"), said("length", content="b"), usage(prompt_tokens=None, completion_tokens=None)])
    assert (answer.num_prompt_tokens, answer.num_output_tokens) == (None, None)
    record = Record(0, 0, 0.0, 2, ended=2.0, piece_times=answer.piece_times)
    assert (record.num_output_tokens, record.tpot) == (2, 1.0)


def test_the_last_count_counts():
    events = [{**said(content="a"), "usage": {"prompt_tokens": 5, "completion_tokens": number}} for number in (1, 2)]
    assert read([*events, "[DONE]"]).num_output_tokens == 2


def test_an_answer_may_come_byte_by_byte():
    answer = Answer(keeps_text=True)
    event = json.dumps({"choices": [{"text": "\u00e9 x", "finish_reason": "length"}]}, ensure_ascii=False)
    for number, byte in enumerate(f": hello\r\nevent: message\r\ndata:{event}\r\n\r\ndata: [DONE]\n".encode()):
        answer.take(200, "text/event-stream", float(number), bytes([byte]))
    answer.end(200)
    assert answer.text == "\u00e9 x" and len(answer.piece_times) == 1


@pytest.mark.parametrize(
    ("last", "kind", "words"),
    [
        ({"error": {"message": "it broke"}}, "error event", "it broke"),
        ({"object": "error", "message": "it broke", "code": 500}, "error event", "it broke"),
        (said("abort"), "broken off", "'abort'"),
        (said(content="more"), "broken off", "without a finish_reason"),
        ("{", "bad answer", "not as OpenAI's API has it"),
    ],
)
def test_what_is_no_whole_answer(last, kind, words):
    with pytest.raises(ExchangeFailed, match=words) as caught:
        read([said(content="a"), last, *["[DONE]"] * (kind != "broken off" or "abort" in words)])
    assert caught.value.kind == kind
