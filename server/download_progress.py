"""Shows a download on the terminal. Knows only stages and byte counts, not what is downloaded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from server.wheel_download import ProgressCallback


@contextmanager
def terminal_progress(tell: Callable[[str], object] | None = None) -> Iterator[ProgressCallback]:
    """Yield a callback that draws one bar per stage on stderr; without a terminal, one plain line per stage.

    With `tell`, nothing is drawn: it is given the name of each stage.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal or tell is not None) as progress:

        def on_progress(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
                if tell is not None:
                    tell(stage)
                elif not console.is_terminal:
                    console.print(stage, highlight=False)
            progress.update(tasks[stage], completed=done, total=total)

        yield on_progress
