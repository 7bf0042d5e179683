"""The place of a file, and the other names by which it could be reached."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

#: proc(5), /proc/pid/mountinfo.
_MOUNTS: Final = Path("/proc/self/mountinfo")
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


def read_mounts() -> str:
    """Return where Linux says what is mounted.

    Raises:
        OSError: this system does not say so there.
    """
    return _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")


def file_system_of(folder: Path, mounts: str) -> str | None:
    """Return the type of the file system that a folder is in, by the text of /proc/self/mountinfo."""
    found: tuple[int, str] | None = None
    for place, kind in _mounted(mounts):
        mounted_at = Path(place)
        # Of several at one place, the last one lies on top.
        if folder.is_relative_to(mounted_at) and (found is None or len(mounted_at.parts) >= found[0]):
            found = (len(mounted_at.parts), kind)
    return None if found is None else found[1]


def other_names(path: Path) -> str | None:
    """Return how the file can be reached by another name, beside which its write-ahead log would not be looked for.

    Its directory entries are counted; of mounts, only Linux tells whether the file itself is one.
    """
    try:
        names = path.stat().st_nlink
        if names > 1:
            return f"the file has {names} names (hard links)"
        mounts = read_mounts()
    except OSError:
        return None
    is_mounted = any(place == str(path.resolve()) for place, _ in _mounted(mounts))
    return "the file is mounted by itself, without its folder" if is_mounted else None


def _mounted(mounts: str) -> Iterator[tuple[str, str]]:
    """Yield where something is mounted, and the type of its file system."""
    for line in mounts.splitlines():
        before, _, behind = line.partition(" - ")
        # A blank in a name is written \\040.
        yield _ESCAPED.sub(lambda match: chr(int(match[1], 8)), before.split(" ")[4]), behind.split(" ")[0]
