"""Keys that were seen, and where: in memory while they are few, then in a file without a name."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Final

#: What they take in memory at most.
CACHE_KIB: Final = 16 * 1024


class SeenKeys:
    """Keys of one length, each with the place where it was seen first; for one thread, and closed after use."""

    def __init__(self) -> None:
        """Begin with none."""
        # An empty name: a file of its own that is written to only if need be, and goes when it is closed.
        self._file = sqlite3.connect("", isolation_level=None)
        self._file.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        self._file.execute("PRAGMA journal_mode = OFF")
        self._file.execute("PRAGMA synchronous = OFF")
        self._file.execute("CREATE TABLE keys (key BLOB PRIMARY KEY, place INTEGER) WITHOUT ROWID")

    def close(self) -> None:
        """Forget them."""
        self._file.close()

    def repeated(self, keyed: Sequence[tuple[bytes, int]]) -> Iterable[tuple[int, int]]:
        """Remember keys with their places; return the places of those that were seen before, and where that was."""
        with closing(self._file.cursor()) as cursor:
            before = self._file.total_changes
            cursor.execute("BEGIN")
            cursor.executemany("INSERT OR IGNORE INTO keys VALUES (?, ?)", keyed)
            cursor.execute("COMMIT")
            if self._file.total_changes - before == len(keyed):
                return ()
            first = "SELECT place FROM keys WHERE key = ?"
            found = [(place, cursor.execute(first, (key,)).fetchone()[0]) for key, place in keyed]
        return [(place, seen) for place, seen in found if seen != place]
