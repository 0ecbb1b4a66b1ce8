"""Progress bars for the loops that report (what, done, total)."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class ProgressBars:
    """Draw one bar for each name that reports; nothing where the output is no terminal.

    Use as a context manager; call it as `bars(what, done, total)`.
    """

    def __init__(self, enabled: bool = True):
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not enabled or not console.is_terminal,
        )
        self._tasks: dict[str, int] = {}

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Move the bar of `what` to `done` of `total` (None: unknown)."""
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)

    def __enter__(self) -> "ProgressBars":
        self._progress.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._progress.__exit__(*error)
