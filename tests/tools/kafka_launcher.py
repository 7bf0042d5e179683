"""The program that becomes a Kafka broker: it is run by its path and imports nothing of ours.

It asks the kernel to kill the broker when the process that wanted it is gone, in whatever way (on Linux).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Become the broker: PARENT PROGRAM ARGUMENT..."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(arguments[0]):
        sys.exit("the process that wanted a Kafka broker is gone")
    os.execv(arguments[1], arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
