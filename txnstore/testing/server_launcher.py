"""The program that becomes a PostgreSQL server: it is run by its path and imports nothing of ours.

It gives up root, asks the kernel to end the server when the test run ends in whatever way, and then executes the
server in its own place.  Doing so in a program of its own needs no `preexec_fn`, which is unsafe beside threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_KEEP_USER = -1


def _become_user(user_id: int, group_id: int) -> None:
    os.setgroups([])
    os.setgid(group_id)
    os.setuid(user_id)


def _end_with_parent(parent: int) -> None:
    # SIGQUIT is PostgreSQL's immediate shutdown: it also ends its own children and frees its shared memory.
    # Set after the change of user, which clears it. Elsewhere than on Linux, nothing ends with its parent.
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)
    if os.getppid() != parent:
        sys.exit("the process that wanted a PostgreSQL server is gone")


def main(arguments: list[str]) -> None:
    """Become the server: PARENT USER_ID GROUP_ID PROGRAM ARGUMENT..., with USER_ID -1 for no change of user."""
    parent, user_id, group_id = (int(argument) for argument in arguments[:3])
    if user_id != _KEEP_USER:
        _become_user(user_id, group_id)
    _end_with_parent(parent)
    os.execv(arguments[3], arguments[3:])  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
