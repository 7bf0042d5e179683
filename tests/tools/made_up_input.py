"""Stores whose queries say that they have read what nobody has written: all else in them has to be right."""

from __future__ import annotations

from collections.abc import Collection

from txnstore.db.store import Store
from txnstore.testing.invariants import Invariant, find_violations


def assert_sound_but_for_input(
    store: Store, *, at_rest: bool = False, partition_ids: Collection[int] | None = None
) -> None:
    """Return if nothing is wrong in the store but that queries have read beyond the end of a partition."""
    found = find_violations(store, at_rest=at_rest, partition_ids=partition_ids)
    assert [each for each in found if each.invariant is not Invariant.PROGRESS_IN_LOG] == []
