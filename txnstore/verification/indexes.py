"""The rule of the indexes: they have what their tables have. All other rules read tables by them."""

from __future__ import annotations

from functools import partial

from txnstore.db.store import Store
from txnstore.errors import StoreDamaged
from txnstore.verification.invariants import Invariant, Place, Violation


def index_violations(store: Store) -> list[Violation]:
    """Return which indexes do not agree with their tables, as far as the database can tell; each in a snapshot."""
    found = []
    for name in store.read(lambda connection: store.backend.checked_relations(connection, store.schema)):
        try:
            store.read(partial(store.backend.check_relation, schema=store.schema, name=name))
        except StoreDamaged as error:
            found.append(Violation(Invariant.INDEXES_WHOLE, Place(), f"{name}: {error}"))
    return found
