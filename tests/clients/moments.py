"""The moments of a call at which Ctrl-C may come, or a signal's handler run: a test tries one after the other."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import FrameType
from typing import Any

#: Says of a frame and what happens in it that no moment of it is to be tried.
LeftAlone = Callable[[FrameType, str], bool]


def interrupt() -> None:
    """Do what Python does when Ctrl-C comes, unless the program has a handler of its own."""
    raise KeyboardInterrupt


class Interrupt:
    """Calls a signal's handler where Python would: as a function begins, and as a call comes back."""

    def __init__(
        self, at: int, files: AbstractSet[str], is_left_alone: LeftAlone, handler: Callable[[], object]
    ) -> None:
        self.where: str | None = None
        self._handler = handler
        self._at = at
        self._files = files
        self._is_left_alone = is_left_alone
        self._count = 0

    def __enter__(self) -> None:
        sys.setprofile(self._look)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, function: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if "/".join(path.parts[-2:]) not in self._files or "txnstore" not in path.parts or event == "c_call":
            return
        if event == "return" and code.co_flags & inspect.CO_GENERATOR:
            # A generator that yields; no signal is looked for there.
            return
        if self._is_left_alone(frame, event):
            return
        self._count += 1
        if self._count == self._at:
            self.where = f"{path.name}:{frame.f_lineno} in {code.co_name}, {event}"
            sys.setprofile(None)
            self._handler()


def every_interrupt(
    files: AbstractSet[str],
    is_left_alone: LeftAlone = lambda frame, event: False,
    handler: Callable[[], object] = interrupt,
) -> Iterator[tuple[int, Interrupt]]:
    """Yield interrupts one moment after the other, until it comes to its end untouched.

    The moments are those of these files, each with its folder: what lies below is tried as one.
    """
    for at in itertools.count(1):
        moment = Interrupt(at, files, is_left_alone, handler)
        yield at, moment
        if moment.where is None:
            return


class TwoInterrupts(Interrupt):
    """Ctrl-C at one moment, and again so many moments later: while what the first one left is put in order."""

    def __init__(self, at: int, behind: int, files: AbstractSet[str], is_left_alone: LeftAlone) -> None:
        super().__init__(at, files, is_left_alone, interrupt)
        self.first: str | None = None
        self._behind = behind

    def __enter__(self) -> None:
        sys.settrace(self._go_on)
        super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        sys.settrace(None)
        if self.first is None:
            # Nobody was left whom it was on its way to.
            self.first, self.where = self.where, None

    def _go_on(self, frame: FrameType, event: str, argument: object) -> Any:
        """Look for the second moment once the first interrupt is on its way: what raises it looks no more."""
        frame.f_trace_lines = False
        if event == "exception" and self.first is None and self.where is not None:
            self.first, self.where = self.where, None
            self._at = self._count + self._behind
            sys.setprofile(self._look)
        return self._go_on


def every_two_interrupts(
    files: AbstractSet[str], is_left_alone: LeftAlone = lambda frame, event: False
) -> Iterator[TwoInterrupts]:
    """Yield pairs of interrupts, each first one with one second after the other, until none comes any more."""
    for at in itertools.count(1):
        for behind in itertools.count(1):
            moments = TwoInterrupts(at, behind, files, is_left_alone)
            yield moments
            if moments.where is None:
                break
        if moments.first is None and behind == 1:
            return


def is_no_moment_for_signals(frame: FrameType, event: str) -> bool:
    """Return whether Python looks for no signal then: it does as its functions begin and as those of C come back."""
    return event in {"return", "c_exception"}


def attempt(interrupt: Interrupt, call: Callable[[], object]) -> None:
    """Make the call; it is interrupted, or comes to its end."""
    try:
        with interrupt:
            call()
    except KeyboardInterrupt:
        where = interrupt.first if isinstance(interrupt, TwoInterrupts) else interrupt.where
        assert where is not None
