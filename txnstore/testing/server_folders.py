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
_PREFIX: Final = "txnstore-postgres-"
_OWNER: Final = "owner"


class ServerFolder:
    """A new folder below /tmp that only `user` (and root) can enter."""

    def __init__(self, user: User | None) -> None:
        """Create the folder and take its lock."""
        remove_abandoned_folders()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_PARENT))
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
    return [folder for folder in _PARENT.glob(f"{_PREFIX}*") if _remove_if_abandoned(folder)]


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
