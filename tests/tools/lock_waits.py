"""This file is the database's own view of who waits for whose lock, for the scheduler of interleavings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from txnstore.db.postgresql.backend import connect_driver
from txnstore.db.store import Store

#: Whether a session waits for a lock that one of these sessions holds or has asked for before it.
LockWaits = Callable[[int, Sequence[int]], bool]


@contextmanager
def lock_waits_of(store: Store | None) -> Iterator[LockWaits]:
    """Give a function that asks PostgreSQL; on SQLite nobody ever waits, for it refuses instead."""
    if store is None or store.backend.name != "postgresql":
        yield _nobody_waits
        return
    with connect_driver(store.url) as connection:

        def waits(backend: int, for_any_of: Sequence[int]) -> bool:
            row = connection.execute("SELECT pg_blocking_pids(%s) && %s::int[]", [backend, list(for_any_of)]).fetchone()
            return row is not None and bool(row[0])

        yield waits


def _nobody_waits(backend: int, for_any_of: Sequence[int]) -> bool:
    del backend, for_any_of
    return False
