"""The file of a write-ahead log, looked at beside SQLite: which log it holds by now, and whether it is still there."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from txnstore.errors import StoreUnavailable

#: Before the frames of the log, and before the page in each.
_WAL_HEAD_BYTES: Final = 32
_FRAME_HEAD_BYTES: Final = 24


class CheckpointProgress(NamedTuple):
    """How far a checkpoint came; frames are pages of the log."""

    log_frames: int
    moved_frames: int

    @property
    def is_all(self) -> bool:
        """Whether all of the log is in the file."""
        return self.moved_frames == self.log_frames


class LogFile:
    """A write-ahead log that is open for reading, until nobody has it any more; SQLite keeps no locks on it."""

    #: Whether SQLite may delete the file meanwhile.
    MAY_STAY_OPEN: Final = hasattr(os, "pread")

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
        self._stat = os.fstat(self._file)

    def __del__(self) -> None:
        # Without it the file was not opened.
        if "_file" in self.__dict__:
            os.close(self._file)

    def is_same(self, found: os.stat_result) -> bool:
        """Return whether this is the file that was found; SQLite deletes the log with its last connection."""
        return found.st_ino == self._stat.st_ino and found.st_dev == self._stat.st_dev

    def salt(self, length_bytes: int) -> int | None:
        """Return the number that this log has and the one before had not; None if it does not fill its file that far.

        After its end lies what is left of earlier logs.  https://www.sqlite.org/fileformat.html#walformat
        """
        head = self._read(_WAL_HEAD_BYTES, 0)
        frame_bytes = _FRAME_HEAD_BYTES + int.from_bytes(head[8:12], "big")
        last_frame = (length_bytes - _WAL_HEAD_BYTES) // frame_bytes - 1
        salts = self._read(_FRAME_HEAD_BYTES, _WAL_HEAD_BYTES + last_frame * frame_bytes)[8:16]
        return int.from_bytes(salts[:4], "big") if salts == head[16:24] != b"" else None

    def _read(self, count: int, position: int) -> bytes:
        if self.MAY_STAY_OPEN:
            return os.pread(self._file, count, position)
        os.lseek(self._file, position, os.SEEK_SET)
        return os.read(self._file, count)


def file_has_gone(path: str) -> StoreUnavailable:
    """Return the error of a caller whose path leads to another file than before, or to no file."""
    return StoreUnavailable(
        f"the SQLite file {path!r} was moved, deleted or replaced while it was open; nothing was changed"
    )


def log_has_gone(path: str) -> StoreUnavailable:
    """Return the error of a caller whose connections to the file at `path` have lost its log."""
    return StoreUnavailable(
        f"the write-ahead log of the SQLite file {path!r} was removed or replaced while this program had the file open:"
        " restart the program, and leave alone what lies beside the file; nothing was changed"
    )
