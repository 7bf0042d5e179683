"""The command line: one noun a file."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that `arguments`, or those of the process, name; this is the program `txnstore`.

    It exits with 0 when all is done, 1 for an error, 2 for a wrong call, 75 if the same call may succeed later, 130
    after Ctrl-C and 143 after SIGTERM.
    """
    with _ended_by_signals() as terminated:
        try:
            # Here, because it takes a moment in which Ctrl-C may come.
            from txnstore.cli.program import run

            run(arguments)
        except (KeyboardInterrupt, SystemExit) as end:
            code = _INTERRUPTED if isinstance(end, KeyboardInterrupt) else end.code
            # Also where something has made another end of it, as a question does.
            sys.exit(_TERMINATED if terminated.has_come and code else code)


#: As a shell tells of a process that a signal has ended: 128 and the signal's number.
_INTERRUPTED = 130
_TERMINATED = 143


class EndedBySignal:
    """What ends a command, by SIGTERM, as Ctrl-C does: in good order."""

    def __init__(self) -> None:
        self.has_come = False

    def __call__(self, *_: object) -> None:
        """Note that the signal has come, and interrupt."""
        self.has_come = True
        raise KeyboardInterrupt


@contextmanager
def _ended_by_signals() -> Iterator[EndedBySignal]:
    """Let SIGTERM end a command as Ctrl-C does; yield what notes that it came.

    Commands that run until they are stopped have handlers of their own in its place.
    """
    end = EndedBySignal()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield end
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield end
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
