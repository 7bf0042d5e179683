"""This file is the duty that ends branches in other databases, for those whose URLs the maintenance was given."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from txnstore.db.store import Store
from txnstore.db.url import parse_url
from txnstore.errors import InvalidUrl
from txnstore.maintenance.duties import ABORT_INTERVAL, Duty
from txnstore.participants.recovery import raise_failed, recover_branches


def branch_duties(participants: Sequence[str]) -> tuple[Duty, ...]:
    """Return a duty for each participating database, at its URL; nothing is connected to yet.

    Raises:
        InvalidUrl: one is no URL of a PostgreSQL database.
    """
    duties = []
    for participant in participants:
        url = parse_url(participant)
        if url.kind != "postgresql":
            raise InvalidUrl(f"{url} is no PostgreSQL database: no other kind votes on transactions")
        label = f"{url.url.host or 'localhost'}:{url.url.port or 5432}/{url.url.database}"
        duties.append(Duty(f"branches ended in {label}", ABORT_INTERVAL, partial(_end_branches, participant)))
    return tuple(duties)


def _end_branches(participant: str, store: Store) -> int:
    recovered = recover_branches(store, participant)
    raise_failed(recovered)
    return recovered.ended_count
