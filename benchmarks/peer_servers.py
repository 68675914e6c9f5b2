"""The servers that peers.py compares: how each is started at its best on this machine, and what it says it is.

Knows the servers' flags, no load.
"""

import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.machine import ROOT
from benchmarks.server_process import ServerDidNotStart, ServerProcess, free_port, server_process

OCTAVO = "octavo"
MAX_TOKENS = 2048  # of a prompt of 1,024 words (at most 1,600 tokens) and its answer
START_SECONDS = 600.0  # vLLM may compile for minutes
_RESUME_SECONDS = 30.0  # for a server that was held still to say that it is ready
_IDLE_SECONDS = 1.0
_SETTLE_SECONDS = 20.0  # within which a server that is ready ends what it has begun at its start
_MOST_IDLE_PROCESSORS = 0.05  # what a server may take for itself while another one is measured


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """How one server is started and asked who it is. A port is added to the command."""

    name: str
    program: tuple[str, ...]  # what is run
    shown_program: str  # the same for people on another machine
    flags: tuple[str, ...]
    ready_path: str
    version_path: str
    version_key: str
    why: str  # these settings
    environment: Mapping[str, str] = field(default_factory=dict)
    version: str | None = None  # instead of what it says itself

    @property
    def shown_command(self) -> str:
        """The command for a page: the names of files without their folders, and no port."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        flags = [Path(flag).name if flag.startswith("/") else flag for flag in self.flags]
        return " ".join([*variables, self.shown_program, shlex.join(flags)]).rstrip()


def octavo_plan(model: str, extra: Sequence[str]) -> ServerPlan:
    """This checkout's server, as it is without flags."""
    flags = [] if model == "smollm2" else ["--model", model]
    return ServerPlan(
        name=OCTAVO,
        program=(sys.executable, "-m", "server.cli", "serve"),
        shown_program="octavo serve",
        flags=(*flags, *extra),
        ready_path="/health/ready",
        version_path="/version",
        version_key="version",
        why="the defaults",
    )


def llama_plan(program: Path, gguf: Path, num_slots: int, extra: Sequence[str]) -> ServerPlan:
    """llama.cpp's server on the same file, with a slot for every client."""
    cores = str(_num_cores())
    flags = ["--model", str(gguf), "--threads", cores, "--threads-batch", cores, "--parallel", str(num_slots)]
    flags += ["--no-kv-unified", "--ctx-size", str(num_slots * MAX_TOKENS)]
    return ServerPlan(
        name="llama.cpp",
        program=(str(program),),
        shown_program=program.name,
        flags=(*flags, *extra),
        ready_path="/health",
        version_path="/props",
        version_key="build_info",
        why="a thread for each core; a slot for each client with a KV cache of its own, so that no request attends "
        "over the others' keys; room for every slot's longest request",
    )


def vllm_plan(program: Path, model: Path, num_seqs: int, extra: Sequence[str]) -> ServerPlan:
    """The same weights, as a directory in Hugging Face layout, on vLLM."""
    flags = ["serve", str(model), "--max-model-len", str(MAX_TOKENS), "--max-num-seqs", str(num_seqs)]
    flags += ["--enable-prompt-tokens-details"]
    if "--dtype" not in extra:
        flags += ["--dtype", "bfloat16"]
    return ServerPlan(
        name="vllm",
        program=(str(program),),
        shown_program=program.name,
        flags=(*flags, *extra),
        ready_path="/health",
        version_path="/version",
        version_key="version",
        why="a thread for each core (it leaves one free otherwise); room for every client's request, in GiB; prefix "
        "caching and chunked prefill are on by default",
        environment={
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "VLLM_CPU_KVCACHE_SPACE": "3",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        },
    )


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class LoadedServer:
    """A server that was started and got ready."""

    plan: ServerPlan
    process: ServerProcess
    port: int
    model: str  # the name by which requests ask for it
    version: str
    start_seconds: float
    idle_processors: float  # processors that it keeps busy with nothing to do

    @property
    def is_held(self) -> bool:
        """Whether its processes are held still while it is not its turn: it takes too much where it has nothing to do.

        Others are left alone, for a server may take an engine that was held still for one that hangs.
        """
        return self.idle_processors > _MOST_IDLE_PROCESSORS

    def begin_turn(self) -> None:
        """Let it run. Raises ServerDidNotStart where it is not ready any more."""
        if self.is_held:
            self.process.resume()
        self.process.wait_until_ready(self.plan.ready_path, _RESUME_SECONDS, {})

    def end_turn(self) -> None:
        """Let the others have the processors."""
        if self.is_held:
            self.process.pause()


@contextmanager
def loaded_server(plan: ServerPlan) -> Iterator[LoadedServer]:
    """Start a server, wait until it is ready, and ask it who it is.

    Raises:
        ServerDidNotStart: with the server's own output.
    """
    port = free_port()
    command = [*plan.program, *plan.flags, "--port", str(port)]
    begin = time.perf_counter()
    # What a program brings in its own environment is found beside it.
    path = os.pathsep.join((str(Path(plan.program[0]).parent), os.environ.get("PATH", os.defpath)))
    with server_process(command, f"http://127.0.0.1:{port}", ROOT, {**plan.environment, "PATH": path}) as process:
        process.wait_until_ready(plan.ready_path, START_SECONDS, {})
        start_seconds = time.perf_counter() - begin
        try:
            model, version = _identity(plan, process.url)
        except (httpx.HTTPError, KeyError, IndexError) as error:
            raise ServerDidNotStart(f"{plan.name} did not say what it is: {error}") from error
        yield LoadedServer(plan, process, port, model, version, start_seconds, _idle_processors(process))


def _idle_processors(process: ServerProcess) -> float:
    """Processors that it keeps busy with nothing to do: the first second that is quiet, or the last that was waited."""
    end = time.monotonic() + _SETTLE_SECONDS
    while True:
        before = process.processor_seconds()
        time.sleep(_IDLE_SECONDS)
        idle = (process.processor_seconds() - before) / _IDLE_SECONDS
        if idle <= _MOST_IDLE_PROCESSORS or time.monotonic() > end:
            return idle


def _identity(plan: ServerPlan, url: str) -> tuple[str, str]:
    """The model's name and the server's version."""
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        models = client.get("/v1/models").raise_for_status().json()
        version = plan.version or client.get(plan.version_path).raise_for_status().json()[plan.version_key]
    return models["data"][0]["id"], version
