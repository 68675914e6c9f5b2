"""`octavo load-test`: reads the options, meets the server, runs the load, prints and writes what came of it."""

import argparse
import asyncio
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import uvloop
from rich.console import Console

from scheduler.simulate.traces import UnreadableTrace
from server.load_test.client import BadUrl, Client, read_target
from server.load_test.exchange_errors import ExchangeFailed
from server.load_test.html_report import build_html
from server.load_test.load import Load, TooLate
from server.load_test.options import DEFAULT_START_RATE, least_rate, parse
from server.load_test.plan import Plan
from server.load_test.preparation import counts_words, headers_of, meet, prepare
from server.load_test.prompt_files import BadPromptFile
from server.load_test.prompt_maker import Calibration
from server.load_test.record import Record
from server.load_test.request_form import RequestForm
from server.load_test.result import Result, write_json
from server.load_test.screen import Progress, error_table, latency_table, search_table, summary_table
from server.load_test.search import Found, find_rate
from server.load_test.summary import warnings_of
from server.load_test.trace_prompts import BadTraceOptions
from server.load_test.trials import Outcome, Trials
from server.load_test.workload import BadPlan, Workload, objective_of, workload_of
from server.settings_error import SettingsError

DEFAULT_GOAL = 0.9
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_USAGE_ERRORS = (SettingsError, BadUrl, BadPlan, BadPromptFile, BadTraceOptions, UnreadableTrace, TooLate)


def main(arguments: Sequence[str], prog: str = "octavo load-test") -> int:
    """Run the command line; the exit code that it documents."""
    errors = Console(stderr=True)
    try:
        options = parse(arguments, prog)
        _raise_file_limit()
        return uvloop.run(_Command(options, errors).run())
    except _USAGE_ERRORS as error:
        errors.print(f"octavo: {error}", markup=False, highlight=False, soft_wrap=True)
        return EXIT_USAGE
    except ExchangeFailed as failure:
        errors.print(f"octavo: {failure.kind}: {failure.message}", markup=False, highlight=False, soft_wrap=True)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


class _Command:
    """One run of the command."""

    def __init__(self, options: argparse.Namespace, errors: Console) -> None:
        self._options = options
        self._errors = errors
        self._console = Console(stderr=str(options.json) == "-")
        self._seed = options.seed if options.seed is not None else time.time_ns() % 2**31
        self._goal = options.slo_share or DEFAULT_GOAL
        self._began = datetime.now(UTC)
        self._is_interrupted = False

    async def run(self) -> int:
        options = self._options
        target, headers = read_target(options.url), headers_of(options)
        client = Client(target, timeout=options.timeout, headers=headers, verifies=not options.insecure)
        try:
            model, max_model_len = await meet(client, options)
            workload = workload_of(options, self._seed, max_model_len)
            form = RequestForm(
                model,
                options.endpoint,
                options.max_tokens_field,
                not options.no_usage,
                options.ignore_eos,
                options.temperature,
                options.extra_body,
            )
            maker = await prepare(client, form, options, str(self._seed))
            trials = Trials(client, form, workload, maker, objective_of(options), self._goal, self._follow)
            self._say(f"{target.url}, model {model}: {workload.source.name}; {workload.describe()}; seed {self._seed}")
            with self._interruptible(trials):
                found = await self._search(trials) if options.find_rate else None
                outcome = await trials.run() if found is None else _chosen(found, trials.outcomes)
        finally:
            client.close()
        if outcome is None:
            self._say("Interrupted before a trial was over.")
            return EXIT_INTERRUPTED
        server = {
            "url": target.url,
            "model": model,
            "endpoint": options.endpoint,
            "max_model_len": max_model_len,
        }
        result = self._result(workload, form, maker.calibration, server, outcome, found, trials)
        self._write(result)  # first: whoever reads what is printed may stop reading
        self._print(result)
        return self._exit_code(result)

    async def _search(self, trials: Trials) -> Found:
        options = self._options
        return await find_rate(
            trials.attempt,
            start=options.rate or DEFAULT_START_RATE,
            least=least_rate(options),
            most=options.most_rate or 10_000.0,
            precision=options.precision or 0.1,
        )

    def _follow(
        self, title: str, plan: Plan
    ) -> tuple[Callable[[Record], None], Callable[[Load], AbstractAsyncContextManager[None]]]:
        progress = Progress(title, plan.num_requests, self._options.duration)
        is_shown = not self._options.no_progress
        return progress.take, lambda load: progress.shown(load, self._errors, is_shown=is_shown)

    @contextmanager
    def _interruptible(self, trials: Trials) -> Iterator[None]:
        """The first Ctrl-C stops the load or search, and what came of it so far is reported; the second ends all."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            self._is_interrupted = True
            loop.remove_signal_handler(signal.SIGINT)
            trials.stop()

        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    def _result(
        self,
        workload: Workload,
        form: RequestForm,
        calibration: Calibration,
        server: dict[str, Any],
        outcome: Outcome,
        found: Found | None,
        trials: Trials,
    ) -> Result:
        fields = {
            "ignore_eos": form.ignore_eos,
            "temperature": form.temperature,
            "max_tokens_field": form.max_tokens_field,
            "extra": dict(form.extra),
        }
        is_guessed = counts_words(self._options) and not calibration.is_measured
        uncounted = ("the server did not say how many tokens a prompt has: a word was taken for a token",) * is_guessed
        interrupted = "the load was interrupted: requests that were open count as failed"
        if found is not None:
            interrupted = "the search was interrupted: the trial that ran does not count"
        ends = [interrupted] * self._is_interrupted
        if trials.failure is not None:
            ends.append(f"the search ended: the server answers no more ({trials.failure.message})")
        return Result(
            began=self._began,
            server=server,
            load=workload.describe(),
            prompts=outcome.plan.name,
            seed=self._seed,
            notes=(*outcome.plan.notes, *uncounted, *ends, *warnings_of(outcome.summary)),
            request_fields=fields,
            calibration=asdict(calibration),
            outcome=outcome,
            goal=self._goal,
            search=found,
            trials=tuple(trials.outcomes) if found else (),
        )

    def _print(self, result: Result) -> None:
        console, summary = self._console, result.outcome.summary
        if result.search is not None:
            console.print(search_table(result.search))
        rate = result.outcome.rate
        console.print(summary_table(summary, "Load" if rate is None else f"Load at {rate:.4g} sessions/s"))
        console.print(latency_table(summary))
        if summary.errors:
            console.print(error_table(summary))
        for note in result.notes:
            console.print(f"Note: {note}.", markup=False, highlight=False)
        if result.search is not None:
            console.print(_verdict(result.search, summary.objective), markup=False, highlight=False)

    def _write(self, result: Result) -> None:
        options = self._options
        has_records = not options.no_records
        try:
            if options.json is not None:
                write_json(result, options.json, has_records=has_records)
            if options.html is not None:
                options.html.parent.mkdir(parents=True, exist_ok=True)
                options.html.write_text(build_html(result), encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"The result cannot be written: {error}.") from None

    def _exit_code(self, result: Result) -> int:
        summary, options = result.outcome.summary, self._options
        if self._is_interrupted:
            return EXIT_INTERRUPTED
        if result.search is not None:
            return 0 if result.search.rate is not None else EXIT_FAILURE
        is_missed = options.fail_under and (summary.kept_share or 0.0) < self._goal
        return EXIT_FAILURE if is_missed or not summary.num_answered else 0

    def _say(self, text: str) -> None:
        self._errors.print(text, markup=False, highlight=False, soft_wrap=True)


def _chosen(found: Found, outcomes: Sequence[Outcome]) -> Outcome | None:
    """The last trial that kept the rate that was found, or the last of all; None without any."""
    kept = [
        outcome
        for trial, outcome in zip(found.trials, outcomes, strict=True)
        if trial.is_kept and trial.rate == found.rate
    ]
    return next(reversed(kept or outcomes), None)


def _verdict(found: Found, objective: str) -> str:
    if found.rate is None:
        tried = f"the lowest tried was {found.broken_rate:.4g} sessions/s. Lower ones may need a longer --duration."
        return f"No rate keeps the objective ({objective}): {tried}"
    if found.broken_rate is None:
        return (
            f"{found.rate:.4g} sessions/s keep the objective ({objective}), and it may go on: nothing higher was tried."
        )
    end = "" if found.is_complete else " The search ended before it was as precise as asked for."
    return (
        f"{found.rate:.4g} sessions/s keep the objective ({objective}); {found.broken_rate:.4g} sessions/s do not.{end}"
    )


def _raise_file_limit() -> None:
    """Each open request is an open file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems do not allow what they name as the limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
