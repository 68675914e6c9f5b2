"""Runs every client against a server and prints a table; exits with 1 if a call failed.

`python -m tests.clients [--server-python PATH] [--model NAME] [--url URL] [--only WORD ...]`. Runs in an environment
that holds the clients; the server runs in its own, with the Python that is named.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version

from tests.clients.calls import Outcome, Target, line_of, run_calls
from tests.end_to_end.server_process import ServerProcess

SERVED_NAME = "smollm2"
QUIET_AND_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TQDM_DISABLE": "1",
}
# Package -> our module with its calls.
CLIENTS = {
    "openai": "openai_calls",
    "anthropic": "anthropic_calls",
    "litellm": "litellm_calls",
    "langchain-openai": "langchain_calls",
    "lm-eval": "lm_eval_calls",
}


def main() -> int:
    """Run them all; 0 if every call passed."""
    arguments = _arguments()
    os.environ.update(QUIET_AND_OFFLINE)  # before the clients are imported, which is when they read it
    server = nullcontext(arguments.url) if arguments.url else _server(arguments.server_python, arguments.model)
    outcomes: list[Outcome] = []
    with server as url:
        for outcome in _outcomes(Target(url, SERVED_NAME), arguments.only):
            print(line_of(outcome), flush=True)
            outcomes.append(outcome)
    failures = [outcome for outcome in outcomes if not outcome.passed]
    for failure in failures:
        print(f"\n--- {failure.client}: {failure.call}\n{failure.trace}")
    print(f"\n{len(outcomes) - len(failures)} passed, {len(failures)} failed")
    return 1 if failures or not outcomes else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.clients", description=__doc__)
    parser.add_argument("--server-python", default=sys.executable, help="the Python that has the server installed")
    parser.add_argument("--model", default="smollm2", help="what the server shall serve")
    parser.add_argument("--url", help="a server that runs already, and serves its model as smollm2")
    parser.add_argument("--only", nargs="*", default=list(CLIENTS), choices=list(CLIENTS), help="these clients")
    return parser.parse_args()


@contextmanager
def _server(python: str, model: str) -> Iterator[str]:
    with ServerProcess(model, "--served-model-name", SERVED_NAME, python=python) as server:
        yield server.url


def _outcomes(target: Target, packages: list[str]) -> Iterator[Outcome]:
    for package in packages:
        calls = importlib.import_module(f"tests.clients.{CLIENTS[package]}").CALLS
        yield from run_calls(f"{package} {version(package)}", calls, target)


if __name__ == "__main__":
    sys.exit(main())
