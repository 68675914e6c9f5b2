"""What the person who starts the server sees until it serves: a bar for each stage of loading, then what it serves."""

import logging
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from kernels import __version__
from server.config import Settings
from server.log_lines import LogLine
from server.logging_setup import CONSOLE
from server.messages import EngineInfo, LoadProgress

console = logging.getLogger(CONSOLE)


class StartupDisplay:
    """A bar per stage on a terminal; elsewhere, and in a log for collectors, one plain line per stage."""

    def __init__(self, log_format: str) -> None:
        """Draw on stderr."""
        terminal = Console(stderr=True)
        self._has_bars = terminal.is_terminal and log_format == "human"
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=terminal,
            disable=not self._has_bars,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "StartupDisplay":
        """Begin to draw."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the bars as they are."""
        self._progress.stop()

    def show(self, progress: LoadProgress) -> None:
        """Take the news of one stage."""
        if progress.stage not in self._tasks:
            self._tasks[progress.stage] = self._progress.add_task(f"Loading {progress.stage}", total=progress.total)
            if not self._has_bars:
                console.info("Loading %s ...", progress.stage)
        self._progress.update(self._tasks[progress.stage], completed=progress.done, total=progress.total)


def print_ready(settings: Settings, model_path: Path, info: EngineInfo, port: int) -> None:
    """Say what is served, on what, and where."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    needs_key = bool(settings.api_key or settings.api_key_file)
    keys = "a key is needed" if needs_key else "no key is needed"
    types = info.dtype if info.quantization == "none" else f"{info.quantization} weights, {info.dtype} KV cache"
    lines = (
        f"Octavo {__version__} serves {', '.join(settings.served_names)}, loaded in {info.load_seconds:.1f} s",
        f"  model      {model_path}",
        f"  device     {info.device}, {types}, {info.attention_backend} attention",
        f"  KV cache   {info.num_blocks} blocks of {info.block_size} tokens ({_mebibytes(info.kv_cache_bytes)}); "
        f"up to {info.max_model_len} tokens a sequence",
        f"  API        http://{host}:{port}/v1 ({keys})",
    )
    fields = {
        "version": __version__,
        "served_models": settings.served_names,
        "model_path": str(model_path),
        "url": f"http://{host}:{port}/v1",
        "needs_key": needs_key,
        "load_seconds": round(info.load_seconds, 3),
        "device": info.device,
        "attention_backend": info.attention_backend,
        "quantization": info.quantization,
        "kv_cache_dtype": info.dtype,
        "num_kv_blocks": info.num_blocks,
        "block_size": info.block_size,
        "max_model_len": info.max_model_len,
    }
    console.info(LogLine(lines[0], fields, "\n".join(lines)))


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
