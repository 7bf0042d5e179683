"""The duties: what is done again and again, a portion at a time, and which setting of the store says how often."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from txnstore.db.cluster.cluster import Cluster
from txnstore.db.store import Store
from txnstore.db.url import parse_url
from txnstore.errors import InvalidUrl
from txnstore.groups import expiration
from txnstore.log.cluster_topics import bring_up_to_date
from txnstore.log.compaction import compact_portion
from txnstore.log.deleting import purge_deleted_partitions
from txnstore.log.outbox.sequencer import drain_outbox
from txnstore.log.retention import delete_expired_batches
from txnstore.participants.recovery import raise_failed, recover_branches, recover_in_cluster
from txnstore.transactions import recovery
from txnstore.transactions.recovery import FOUND_MAX

#: Kafka's names for the intervals.
COMPACTION_INTERVAL: Final = "log.cleaner.backoff.ms"
LOG_INTERVAL: Final = "log.retention.check.interval.ms"
ABORT_INTERVAL: Final = "transaction.abort.timed.out.transaction.cleanup.interval.ms"
REMOVE_INTERVAL: Final = "transaction.remove.expired.transaction.cleanup.interval.ms"
RETENTION_INTERVAL: Final = "offsets.retention.check.interval.ms"


@dataclass(frozen=True, slots=True)
class MaintenanceDuty:
    """One thing to do."""

    name: str
    """What was done, said of a number: "3 {name}"."""

    interval_setting: str
    """The setting of the store that says, in milliseconds, how often."""

    do: Callable[[Store, Cluster | None], int]
    """Do a portion of it and return how much was done: FOUND_MAX or more, or all that there was."""

    interval_max_seconds: float = math.inf
    """It is done at least so often, whatever the setting says."""


DUTIES: Final = (
    # First: what others wait for.
    MaintenanceDuty("rows of the outbox moved into topics", ABORT_INTERVAL, lambda store, _: drain_outbox(store)),
    MaintenanceDuty(
        "decided transactions completed",
        ABORT_INTERVAL,
        lambda store, cluster: len(recovery.complete_all_decided(store, cluster)),
    ),
    MaintenanceDuty(
        "timed out transactions aborted",
        ABORT_INTERVAL,
        lambda store, cluster: len(recovery.abort_timed_out(store, cluster)),
        # It is one look at an index, and readers wait.
        interval_max_seconds=1.0,
    ),
    MaintenanceDuty("branches ended in the databases of the cluster", ABORT_INTERVAL, recover_in_cluster),
    MaintenanceDuty(
        "expired transactional ids forgotten",
        REMOVE_INTERVAL,
        lambda store, _: len(recovery.expire_transactional_ids(store)),
    ),
    MaintenanceDuty("silent producers forgotten", REMOVE_INTERVAL, lambda store, _: recovery.expire_producers(store)),
    MaintenanceDuty("journal entries deleted", REMOVE_INTERVAL, lambda store, _: recovery.trim_journal(store)),
    MaintenanceDuty(
        "rows of deleted topics deleted",
        ABORT_INTERVAL,
        lambda store, _: purge_deleted_partitions(store, rows_max=FOUND_MAX),
    ),
    MaintenanceDuty(
        "batches past their retention deleted",
        LOG_INTERVAL,
        lambda store, cluster: delete_expired_batches(store, cluster, batches_max=FOUND_MAX),
    ),
    MaintenanceDuty(
        "batches read by the compaction",
        COMPACTION_INTERVAL,
        lambda store, _: compact_portion(store, batches_max=FOUND_MAX),
    ),
    # In this order: offsets expire once the group has no members any more.
    MaintenanceDuty(
        "silent members of groups removed",
        RETENTION_INTERVAL,
        lambda store, _: expiration.expire_silent_members(store, groups_max=FOUND_MAX),
    ),
    MaintenanceDuty(
        "groups cleared of expired offsets",
        RETENTION_INTERVAL,
        lambda store, _: expiration.expire_offsets(store, groups_max=FOUND_MAX),
    ),
    MaintenanceDuty("databases given the newest topics", ABORT_INTERVAL, bring_up_to_date),
)

#: What takes longer than a client has for it: for a process, or a thread, of its own.
LONG_DUTIES: Final = (
    # Behind what deletes.
    MaintenanceDuty("tables freed of deleted rows", LOG_INTERVAL, lambda store, _: store.reclaim()),
)


def branch_duties(participants: Sequence[str]) -> tuple[MaintenanceDuty, ...]:
    """Return a duty for each participating database, at its URL; nothing is connected to yet.

    Raises:
        InvalidUrl: one is not the URL of a PostgreSQL database.
    """
    duties = []
    for participant in participants:
        url = parse_url(participant)
        if url.kind != "postgresql":
            raise InvalidUrl(
                f"{url} is not a PostgreSQL database: databases of other kinds cannot vote on transactions"
            )
        label = f"{url.url.host or 'localhost'}:{url.url.port or 5432}/{url.url.database}"
        duties.append(
            MaintenanceDuty(f"branches ended in {label}", ABORT_INTERVAL, partial(_end_branches, participant))
        )
    return tuple(duties)


def _end_branches(participant: str, store: Store, cluster: Cluster | None) -> int:
    recovered = recover_branches(store, participant, cluster)
    raise_failed(recovered)
    return recovered.ended_count
