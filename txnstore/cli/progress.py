"""The progress bar: what a command is doing, and how much of it is done, if somebody is looking."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)


class ProgressBar:
    """A bar on the standard error, as long as `progress_bar` lasts."""

    def __init__(self, progress: Progress, task: TaskID, what: str) -> None:
        self._progress = progress
        self._task = task
        self._what = what

    def show(self, done: int, total: int) -> None:
        """Show that so many are done of all."""
        self._progress.update(self._task, completed=done, total=total)

    def show_step(self, what: str, done: int, total: int) -> None:
        """Show it of a step; the time that is left is estimated again with each."""
        if what != self._what:
            self._progress.reset(self._task, description=what)
            self._what = what
        self.show(done, total)

    def advance(self, count: int) -> None:
        """Show that so many more are done."""
        self._progress.advance(self._task, count)


@contextmanager
def progress_bar(
    what: str, *, total: int | None = None, in_bytes: bool = False, is_shown: bool = True
) -> Iterator[ProgressBar]:
    """Show a bar after these words, gone at the end; nothing where the standard error is no terminal."""
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if in_bytes else MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (console.is_terminal and is_shown),
    )
    with progress:
        yield ProgressBar(progress, progress.add_task(what, total=total), what)
