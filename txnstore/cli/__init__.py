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
    with _ended_by_signals() as came:
        try:
            # Here, because it takes a moment in which Ctrl-C may come.
            from txnstore.cli.program import run

            run(arguments)
        except (KeyboardInterrupt, SystemExit) as end:
            if isinstance(end, KeyboardInterrupt) or end.code == _INTERRUPTED:
                sys.exit(_TERMINATED if came else _INTERRUPTED)
            raise


#: As a shell tells of a process that a signal has ended: 128 and the signal's number.
_INTERRUPTED = 130
_TERMINATED = 143


@contextmanager
def _ended_by_signals() -> Iterator[list[int]]:
    """Let SIGTERM end a command as Ctrl-C does, in good order; yield where it is noted that it came.

    Commands that run until they are stopped have handlers of their own in its place.
    """
    came: list[int] = []

    def handle(number: int, _: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield came
        return
    signal.signal(signal.SIGTERM, handle)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
