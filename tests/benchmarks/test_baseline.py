"""The closed loop and its figures, on a scripted server and on answers whose times are known."""

import asyncio
import json

import httpx
import pytest

from benchmarks.baseline import NUM_TOKENS, Figures, Round, figures_of, load_of, median_figures, run_round
from benchmarks.completion_stream import TimedAnswer
from benchmarks.local_server import ServerDidNotStart, local_server


def answer(first: float, gap: float, num_tokens: int = 64) -> TimedAnswer:
    return TimedAnswer(tuple(first + gap * i for i in range(num_tokens)), 100, num_tokens)


def test_figures_of_known_times():
    answers = tuple(answer(first=0.1 * i, gap=0.02 if i <= 8 else 0.06) for i in range(1, 12))
    figures = figures_of(Round(8.0, answers, ()))
    assert figures.output_tokens_per_second == 11 * 64 / 8
    assert (figures.ttft_p50, figures.ttft_p90) == pytest.approx((0.6, 1.0))
    assert (figures.inter_token_p50, figures.inter_token_p90) == pytest.approx((0.02, 0.06))


def test_tokens_that_failed_requests_never_brought_do_not_count():
    figures = figures_of(Round(2.0, (answer(0.1, 0.01),), ("refused",)))
    assert figures.output_tokens_per_second == 32


def test_medians_are_taken_figure_by_figure():
    rounds = [Figures(10, 1, 9, 3, 4), Figures(30, 2, 8, 1, 6), Figures(20, 3, 7, 2, 5)]
    assert median_figures(rounds) == Figures(20, 2, 8, 2, 5)


def test_load_counts_errors_and_leaves_out_rounds_without_answers():
    good = Round(1.0, (answer(0.1, 0.01),), ("broke off",))
    bad = Round(1.0, (), ("broke off", "refused"))
    load = load_of(1, [good, bad])
    assert load.rounds == (figures_of(good),)
    assert load.median == figures_of(good)
    assert load.errors == {"broke off": 2, "refused": 1}
    assert load_of(1, [bad]).median is None


@pytest.mark.parametrize("num_clients", [1, 3, 8])
async def test_each_client_has_one_request_open_at_a_time(num_clients):
    num_open = most_open = 0
    prompts = []

    async def handle(request: httpx.Request) -> httpx.Response:
        nonlocal num_open, most_open
        prompt = json.loads(request.content)["prompt"]
        prompts.append(prompt)
        num_open += 1
        most_open = max(most_open, num_open)
        await asyncio.sleep(0.001 * (len(prompts) % 3))
        num_open -= 1
        if prompt == "bad":
            return httpx.Response(503, text="busy")
        usage = {"prompt_tokens": 1, "completion_tokens": NUM_TOKENS}
        events = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}, {"choices": [], "usage": usage}]
        return httpx.Response(200, text="".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n")

    num_done = 0

    def on_answer() -> None:
        nonlocal num_done
        num_done += 1

    sent = ["bad", *(f"prompt {i}" for i in range(20))]
    async with httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://server") as client:
        one_round = await run_round(client, "m", sent, num_clients, on_answer)
    assert sorted(prompts) == sorted(sent)
    assert most_open == num_clients
    assert (len(one_round.answers), len(one_round.errors), num_done) == (20, 1, 21)


def test_server_that_ends_at_once_is_reported_with_its_own_words():
    with (
        pytest.raises(ServerDidNotStart, match="There is no flag --no-such-flag"),
        local_server(["--no-such-flag"]),
    ):
        pass
