"""The checker of a store, and of a cluster, for tests: `txnstore.verification` with an assertion in front of it.

It looks at tables only and asks nobody what has happened, so a store may be checked at any moment: while others write,
after a crash, after a recovery.  Of a cluster nobody may be at work meanwhile; what is half done may be.  What clients
were told is not known here; that is for the test to compare.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from typing import Final

from txnstore.db.cluster.cluster import Cluster
from txnstore.db.opening import open_store
from txnstore.db.store import Store
from txnstore.verification.invariants import Invariant, Place, Violation
from txnstore.verification.partitions import partition_violations
from txnstore.verification.verify import cluster_violations, find_violations, violations_on

__all__: Final = [
    "Invariant",
    "Place",
    "Violation",
    "assert_cluster_sound",
    "assert_sound",
    "cluster_violations",
    "find_violations",
    "partition_violations",
    "violations_on",
]


def assert_sound(store: Store | str, *, at_rest: bool = False, partition_ids: Collection[int] | None = None) -> None:
    """Return if the store, or the one at a URL, which is opened for this, is as `find_violations` wants it.

    What `txnstore verify` asks beside that, it does not: whether tables and indexes are whole, the numbers that would
    be given out next, and branches in other databases.

    Raises:
        AssertionError: it is not; the text names each violated invariant.
        TxnStoreError: the database refused or cannot be reached, or holds no store.
    """
    with nullcontext(store) if isinstance(store, Store) else open_store(store, create=False) as opened:
        found = find_violations(opened, at_rest=at_rest, partition_ids=partition_ids)
    _fail_of("the store", found)


def assert_cluster_sound(
    cluster: Cluster, *, at_rest: bool = False, copies: bool = True, producers_expire: bool = False
) -> None:
    """Return if the cluster is as `cluster_violations` wants it.

    Raises:
        AssertionError: it is not; the text names each violated invariant.
    """
    found = cluster_violations(cluster, at_rest=at_rest, copies=copies, producers_expire=producers_expire)
    _fail_of("the cluster", found)


def _fail_of(what: str, found: Collection[Violation]) -> None:
    # No `assert`: under `python -O` it would find nothing.
    if found:
        raise AssertionError("\n".join([f"{what} breaks its invariants:", *map(str, found)]))
