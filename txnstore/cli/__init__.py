"""The command line: one noun a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that `arguments`, or those of the process, name; this is the program `txnstore`.

    It exits with 0 when all is done, 1 for an error, 2 for a wrong call, 75 if the same call may succeed later, and
    130 after Ctrl-C.
    """
    try:
        # Here, because it takes a moment in which Ctrl-C may come.
        from txnstore.cli.program import run

        run(arguments)
    except KeyboardInterrupt:
        sys.exit(130)
