"""lm-eval's local-completions on small tasks of our own: scores of given answers, whole texts, and generated text.

A server that scores prompts wrongly does not fail here, it makes the model look like a guesser; so the tasks are
easy enough for the default model to stand far above chance.
"""

from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from tests.clients.calls import Call, Target

TASKS = Path(__file__).parent / "lm_eval_tasks"


def _evaluate(target: Target, task: str, model: str = "local-completions", **model_args: object) -> dict[str, float]:
    route = "chat/completions" if model == "local-chat-completions" else "completions"
    arguments = {
        "model": target.model,
        "base_url": f"{target.url}/v1/{route}",
        "max_retries": 1,
        "max_length": 2048,
        "num_concurrent": 4,
        **model_args,
    }
    found = simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[task],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        apply_chat_template=model == "local-chat-completions",
        bootstrap_iters=0,
        log_samples=False,
    )
    return {name.split(",")[0]: value for name, value in found["results"][task].items() if "," in name}


def _choices(target: Target) -> str:
    results = [
        _evaluate(target, "octavo_capitals"),  # the tokenizer of the server, over HTTP; prompts as token ids
        _evaluate(target, "octavo_capitals", batch_size=8),
    ]
    assert results[0] == results[1], results
    assert results[0]["acc"] >= 0.75, results  # chance is 0.25
    return f"accuracy {results[0]['acc']:.2f}, chance 0.25"


def _rolling(target: Target) -> str:
    results = _evaluate(target, "octavo_perplexity")
    assert 1 < results["word_perplexity"] < 500, results
    return f"word perplexity {results['word_perplexity']:.1f}"


def _generation(target: Target) -> str:
    results = _evaluate(target, "octavo_capitals_written")
    assert results["exact_match"] >= 0.75, results
    return f"exact match {results['exact_match']:.2f}"


def _chat_generation(target: Target) -> str:
    results = _evaluate(target, "octavo_capitals_asked", "local-chat-completions")
    assert results["exact_match"] >= 0.5, results
    return f"exact match {results['exact_match']:.2f}"


CALLS = (
    Call("local-completions, multiple choice", _choices),
    Call("local-completions, perplexity", _rolling),
    Call("local-completions, generation", _generation),
    Call("local-chat-completions, generation", _chat_generation),
)
