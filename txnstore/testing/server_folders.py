"""This file is the temporary folders of private clusters, and how those of killed runs are found and removed.

A folder belongs to the run that holds the lock on its file `owner`.  The kernel releases the lock when that run ends
in whatever way, so a folder whose lock is free is a left-over.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from txnstore.testing.server_programs import User

# Directly below /tmp: the path of a Unix socket has at most 107 bytes.
_PARENT: Final = Path("/tmp")  # noqa: S108
#: Files here are in memory on Linux: a database, some hundred files, is made ten times as fast.
_MEMORY: Final = Path("/dev/shm")  # noqa: S108
#: What has to be free there: in containers it is often 64 MB for all.
_MEMORY_BYTES_MIN: Final = 2 * 1024**3
_PREFIX: Final = "txnstore-postgres-"
_OWNER: Final = "owner"


class ServerFolder:
    """A new folder below /tmp that only `user` (and root) can enter."""

    def __init__(self, user: User | None, *, in_memory: bool = False) -> None:
        """Create the folder and take its lock; with `in_memory` it is in /dev/shm, if there is room enough."""
        remove_abandoned_folders()
        parent = _MEMORY if in_memory and has_room(_MEMORY, _MEMORY_BYTES_MIN) else _PARENT
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = self._take_lock()
        if user is not None:
            os.chown(self.path, user.user_id, user.group_id)

    def _take_lock(self) -> int:
        # Renamed when it is locked: nobody sees a file `owner` of a living run without its lock.
        unlocked = self.path / "new-owner"
        lock = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / _OWNER)
        return lock

    def remove(self) -> None:
        """Remove the folder with all that is in it; may be called again."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_abandoned_folders() -> list[Path]:
    """Remove the folders whose runs are gone, and return them; those of other users are left alone."""
    folders = (folder for parent in (_PARENT, _MEMORY) for folder in parent.glob(f"{_PREFIX}*"))
    return [folder for folder in folders if _remove_if_abandoned(folder)]


def has_room(folder: Path, bytes_min: int) -> bool:
    """Return whether files can be made in the folder, so many bytes of them, and programs be run there."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    is_for_programs = not found.f_flag & os.ST_NOEXEC
    return is_for_programs and found.f_bavail * found.f_frsize >= bytes_min and os.access(folder, os.W_OK | os.X_OK)


def _remove_if_abandoned(folder: Path) -> bool:
    try:
        lock = os.open(folder / _OWNER, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()
    finally:
        os.close(lock)
