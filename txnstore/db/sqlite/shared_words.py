"""Words of memory that all processes share, beside a database file, and the call by which they wait at one."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import stat
import sys
from collections.abc import Callable
from typing import Final

from txnstore.db.backend import SUBJECT_BUCKETS

WORD_BYTES: Final = 4
WORD_MASK: Final = 2**32 - 1
#: The first ones are those of the line of writers, the others those of `CommitStamps`: three, and one for each bucket.
LINE_WORDS: Final = 2
_ALL_BYTES: Final = WORD_BYTES * (LINE_WORDS + 3 + 2 * SUBJECT_BUCKETS)
NANOSECONDS: Final = 1_000_000_000
#: Of Linux: the number of the system call, where it is known and times have 64 bits, and its operations.
_FUTEX_CALLS: Final = {"x86_64": 202, "aarch64": 98}
FUTEX_WAIT: Final = 0
FUTEX_WAKE: Final = 1
FUTEX_WAIT_BITSET: Final = 9
FUTEX_WAKE_BITSET: Final = 10
#: What it says to one who was not woken: the word is another one by now, the time is up, a signal came.
NOT_WOKEN: Final = (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR)


class Timespec(ctypes.Structure):
    """How long somebody waits at most."""

    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


def _futex_of_system() -> Callable[..., int] | None:
    """Return the call by which processes wait at a word of shared memory; None where there is none."""
    number = _FUTEX_CALLS.get(os.uname().machine) if sys.platform == "linux" and sys.maxsize > WORD_MASK else None
    if number is None:
        return None
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    )
    call.restype = ctypes.c_long
    return functools.partial(call, number)


futex: Final = _futex_of_system()


def mapped_words(path: str) -> mmap.mmap:
    """Map the file `-line` beside the database file at `path`, and make it if there is none.

    It gets the owner and the permissions of the database, as SQLite gives them to its own files.  By whichever symbolic
    link they come, all find the same one.
    """
    database, line = os.stat(path), os.path.realpath(path) + "-line"  # noqa: PTH116 - as everywhere here
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        file = os.open(line, flags | os.O_CREAT | os.O_EXCL, 0o600)
        is_new = True
    except FileExistsError:
        file = os.open(line, flags)
        is_new = False
    try:
        if is_new:
            if os.geteuid() == 0:
                os.fchown(file, database.st_uid, database.st_gid)
            os.fchmod(file, stat.S_IMODE(database.st_mode))
        found_bytes = os.fstat(file).st_size
        if found_bytes < _ALL_BYTES:
            # Written, not only made longer: a full disk has to show now.
            os.pwrite(file, bytes(_ALL_BYTES - found_bytes), found_bytes)
        return mmap.mmap(file, _ALL_BYTES)
    finally:
        os.close(file)


def word_at(memory: mmap.mmap, number: int) -> ctypes.c_uint32:
    """Return the word of this number, which keeps the memory mapped."""
    return ctypes.c_uint32.from_buffer(memory, number * WORD_BYTES)
