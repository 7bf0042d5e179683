"""The duties: what is done again and again, a portion at a time, and which setting of the store says how often.

Each is imported when it is due, because a client that lives only a moment has no time for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from txnstore.db.portions import FOUND_MAX
from txnstore.db.url import parse_url
from txnstore.errors import InvalidUrl
from txnstore.maintenance.turns import MaintenanceDuty, Portion, Work

#: Kafka's names for the intervals.
COMPACTION_INTERVAL: Final = "log.cleaner.backoff.ms"
LOG_INTERVAL: Final = "log.retention.check.interval.ms"
ABORT_INTERVAL: Final = "transaction.abort.timed.out.transaction.cleanup.interval.ms"
PRODUCERS_INTERVAL: Final = "producer.id.expiration.check.interval.ms"
REMOVE_INTERVAL: Final = "transaction.remove.expired.transaction.cleanup.interval.ms"
RETENTION_INTERVAL: Final = "offsets.retention.check.interval.ms"


def _outbox() -> Work:
    from txnstore.log.outbox.sequencer import drain_outbox

    return lambda portion: drain_outbox(portion.store, portion.portions, portion.cluster)


def _decided() -> Work:
    from txnstore.transactions.recovery import complete_all_decided

    return lambda portion: len(complete_all_decided(portion.store, portion.cluster, portion.portions))


def _timed_out() -> Work:
    from txnstore.transactions.recovery import abort_timed_out, begin_anew, next_timeout_ms

    def work(portion: Portion) -> int:
        count = len(abort_timed_out(portion.store, portion.cluster, portion.portions))
        begin_anew(portion.store, portion.portions)
        left_ms = next_timeout_ms(portion.store)
        # What could not be aborted is looked at again when it is its time, as everything is.
        portion.again_seconds = None if left_ms is None or left_ms <= 0 else left_ms / 1000
        return count

    return work


def _cluster_branches() -> Work:
    def work(portion: Portion) -> int:
        if portion.cluster is None or portion.cluster.is_alone:
            return 0
        # It brings the driver of PostgreSQL with it.
        from txnstore.participants.recovery import recover_in_cluster

        return recover_in_cluster(portion.store, portion.cluster)

    return work


def _transactional_ids() -> Work:
    from txnstore.transactions.recovery import expire_transactional_ids

    return lambda portion: len(expire_transactional_ids(portion.store, portion.portions))


def _producers() -> Work:
    from txnstore.transactions.recovery import expire_producers

    return lambda portion: expire_producers(portion.store, portion.portions)


def _journal() -> Work:
    from txnstore.transactions.recovery import trim_journal

    return lambda portion: trim_journal(portion.store, portion.portions)


def _refused() -> Work:
    from txnstore.log.outbox.sequencer import delete_refused

    return lambda portion: delete_refused(portion.store, portion.portions)


def _sinks() -> Work:
    from txnstore.transactions.sinks import forget_silent_sinks

    return lambda portion: forget_silent_sinks(portion.store, portion.portions)


def _deleted_topics() -> Work:
    from txnstore.log.deleting import purge_deleted_partitions

    return lambda portion: purge_deleted_partitions(portion.store, portion.portions, rows_max=FOUND_MAX)


def _retention() -> Work:
    from txnstore.log.retention import delete_expired_batches

    return lambda portion: delete_expired_batches(
        portion.store, portion.cluster, portion.portions, batches_max=FOUND_MAX
    )


def _compaction() -> Work:
    from txnstore.log.compaction import compact_portion

    return lambda portion: compact_portion(portion.store, portion.portions, batches_max=FOUND_MAX)


def _members() -> Work:
    from txnstore.groups.expiration import expire_silent_members

    return lambda portion: expire_silent_members(portion.store, portion.portions, groups_max=FOUND_MAX)


def _offsets() -> Work:
    from txnstore.groups.expiration import expire_offsets

    def work(portion: Portion) -> int:
        count, portion.position = expire_offsets(
            portion.store, portion.portions, groups_max=FOUND_MAX, after_group_id=portion.position or ""
        )
        return count

    return work


def _newest_topics() -> Work:
    return _bring_up_to_date


def _bring_up_to_date(portion: Portion) -> int:
    if portion.cluster is None or portion.cluster.is_alone or portion.has_newest_settings:
        return 0
    from txnstore.log.cluster_topics import bring_up_to_date

    brought = bring_up_to_date(portion.store, portion.cluster)
    portion.has_newest_settings = True
    return brought


def _by_newest_settings(load: Callable[[], Work]) -> Callable[[], Work]:
    """Return the same for what forgets and deletes: not by settings from before the database was away.

    While the controller cannot tell what holds now, nothing is forgotten.
    """

    def load_it() -> Work:
        work = load()

        def up_to_date(portion: Portion) -> int:
            _bring_up_to_date(portion)
            return work(portion)

        return up_to_date

    return load_it


DUTIES: Final = (
    # First: what others wait for.
    MaintenanceDuty("rows of the outbox moved into topics", ABORT_INTERVAL, _outbox),
    MaintenanceDuty("decided transactions completed", ABORT_INTERVAL, _decided),
    # It is one look at an index, and readers wait.
    MaintenanceDuty("timed out transactions aborted", ABORT_INTERVAL, _timed_out, interval_max_seconds=1.0),
    MaintenanceDuty("branches ended in the databases of the cluster", ABORT_INTERVAL, _cluster_branches),
    MaintenanceDuty("expired transactional ids forgotten", REMOVE_INTERVAL, _by_newest_settings(_transactional_ids)),
    MaintenanceDuty("silent producers forgotten", PRODUCERS_INTERVAL, _by_newest_settings(_producers)),
    MaintenanceDuty("journal entries deleted", REMOVE_INTERVAL, _by_newest_settings(_journal)),
    MaintenanceDuty("refused rows of the outbox deleted", REMOVE_INTERVAL, _by_newest_settings(_refused)),
    MaintenanceDuty("silent sinks of Spark forgotten", REMOVE_INTERVAL, _by_newest_settings(_sinks)),
    MaintenanceDuty("rows of deleted topics deleted", ABORT_INTERVAL, _deleted_topics),
    MaintenanceDuty("batches past their retention deleted", LOG_INTERVAL, _by_newest_settings(_retention)),
    MaintenanceDuty("batches read by the compaction", COMPACTION_INTERVAL, _by_newest_settings(_compaction)),
    # In this order: offsets expire once the group has no members any more.
    MaintenanceDuty("silent members of groups removed", RETENTION_INTERVAL, _members),
    MaintenanceDuty("groups cleared of expired offsets", RETENTION_INTERVAL, _by_newest_settings(_offsets)),
    MaintenanceDuty("databases given the newest topics", ABORT_INTERVAL, _newest_topics),
)

#: What takes longer than a client has for it: for a process, or a thread, of its own.
LONG_DUTIES: Final = (
    # After what deletes.
    MaintenanceDuty("tables freed of deleted rows", LOG_INTERVAL, lambda: lambda portion: portion.store.reclaim()),
)

#: What every process knows, whichever of these it does itself.
KNOWN: Final = frozenset(duty.name for duty in (*DUTIES, *LONG_DUTIES))


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
        duties.append(MaintenanceDuty(f"branches ended in {label}", ABORT_INTERVAL, partial(_branches, participant)))
    return tuple(duties)


def _branches(participant: str) -> Work:
    from txnstore.participants.recovery import raise_failed, recover_branches

    def work(portion: Portion) -> int:
        recovered = recover_branches(portion.store, participant, portion.cluster)
        raise_failed(recovered)
        return recovered.ended_count

    return work
