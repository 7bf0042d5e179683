"""Changes of topics and settings in a cluster: made at the controller, then copied to the members.

A member that is away gets its copies later: from a client that finds them missing, or from the maintenance.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from sqlalchemy import Connection

from txnstore.db.cluster import catalogue as settings
from txnstore.db.cluster.cluster import Cluster, LeftOut
from txnstore.db.cluster.membership import CONTROLLER_ID
from txnstore.db.store import Store
from txnstore.errors import InvalidTransactionState, MissingMember, StoreUnavailable
from txnstore.log import topics
from txnstore.log.deleting import purge_soon
from txnstore.log.topics import Topic

Result = TypeVar("Result")


def change(
    cluster: Cluster,
    work: Callable[[Connection], Result],
    *,
    wakes_readers: bool = False,
    retry_timeout_ms: int | None = None,
) -> Result:
    """Run `work` in one database transaction of the controller, and copy to the members what it has changed.

    Raises:
        TxnStoreError: what `work` raises, or the controller; it is not an error if members are away.
    """
    result = cluster.controller.write(work, wakes_readers=wakes_readers, retry_timeout_ms=retry_timeout_ms)
    cluster.publish()
    return result


def create_topic(
    cluster: Cluster,
    name: str,
    *,
    partition_count: int = 1,
    config: Mapping[str, str] = MappingProxyType({}),
    retry_timeout_ms: int | None = None,
) -> Topic:
    """Create a topic, as `topics.create_topic`."""

    def work(connection: Connection) -> Topic:
        return topics.create_topic(connection, name, partition_count=partition_count, config=config)

    topic = change(cluster, work, retry_timeout_ms=retry_timeout_ms)
    cluster.learn(topic)
    return topic


def delete_topics(
    cluster: Cluster, names: Collection[str], *, retry_ms: Callable[[Store], int | None] = lambda _: None
) -> None:
    """Delete the topics, all or none, as `topics.delete_topic`; other databases drop what they have of them.

    `retry_ms` is asked before each step how long it may be tried again.

    Raises:
        InvalidTransactionState: an open transaction has written to one, as far as coordinators can be asked.
        TxnStoreError: one of them refuses; see also `topics.delete_topic`.
    """
    if not cluster.is_alone:
        for topic in cluster.controller.read(
            lambda connection: topics.find_topics(connection, list(names)),
            retry_timeout_ms=retry_ms(cluster.controller),
        ):
            refuse_if_in_use(cluster, topic.partition_ids)

    def work(connection: Connection) -> None:
        # By name, so that two who delete the same ones do not wait for each other.
        for name in sorted(names):
            topics.delete_topic(connection, name)

    change(cluster, work, wakes_readers=True, retry_timeout_ms=retry_ms(cluster.controller))
    purge_soon(cluster.controller)


def bring_up_to_date(store: Store, cluster: Cluster | None, *, retry_timeout_ms: int | None = None) -> int:
    """Give a member the topics and settings of its controller if they have changed since; return 1 if they had.

    A member that is away is waited for so long.
    """
    if cluster is None or cluster.is_alone or store is cluster.controller:
        return 0
    version = store.read(settings.read_version, retry_timeout_ms=retry_timeout_ms)
    # A caller looks again and again: it does not wait for a controller that is away.
    if version == cluster.controller.read(settings.read_version, retry_timeout_ms=0):
        return 0
    return int(cluster.reconcile(store.database_id))


def refuse_if_in_use(cluster: Cluster, partition_ids: Collection[int]) -> None:
    """Refuse to delete partitions that open transactions of other databases than the controller have written to.

    One that comes meanwhile, or whose database is away, loses what it wrote there, and ends as it would.

    Raises:
        InvalidTransactionState: there is such a transaction.
        TxnStoreError: a database refuses to be asked.
    """
    left_out: LeftOut = {}
    for store, holder in cluster.read_all(partial(topics.holder_of, partition_ids=list(partition_ids)), left_out):
        # The controller looks by itself, under its locks.
        if holder is not None and store.database_id != CONTROLLER_ID:
            raise InvalidTransactionState(
                f"an open transaction of {holder[:80]!r} has written to the topic; end it first, then delete the topic"
            )
    cluster.warn_of(left_out)
    for error in left_out.values():
        # It may refuse this client alone, whose list has a wrong URL, while everybody else works with it.
        if not isinstance(error, StoreUnavailable | MissingMember):
            raise error
