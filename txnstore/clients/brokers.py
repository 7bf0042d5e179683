"""The databases as brokers: calls on the leaders of partitions, and the broker that each database plays.

A cluster of one has one store, and no question is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from sqlalchemy import Connection

from txnstore.clients.model.metadata import BrokerMetadata, Node
from txnstore.db.cluster.cluster import Cluster, repaired
from txnstore.db.cluster.membership import CONTROLLER_ID
from txnstore.db.store import Store
from txnstore.db.url import DatabaseUrl
from txnstore.log.topics import get_topic

Result = TypeVar("Result")

#: Reads of partitions, by id, what the work finds of those that live in one database.
Reads = Callable[[Collection[int], Callable[[Connection, list[int]], dict[int, Any]]], dict[int, Any]]


def at_leader_of(cluster: Cluster, topic: str, number: int, call: Callable[[Store], Result]) -> Result:
    """Make a call on the store that holds the partition of this number; the topic is known there too.

    Raises:
        UnknownTopicOrPartition: there is no such topic or partition.
        TxnStoreError: see `Cluster.at_partition`.
    """
    if cluster.is_alone:
        return call(cluster.controller)
    partition_id = cluster.controller.read(lambda connection: get_topic(connection, topic).partition_id(number))
    return cluster.at_partition(partition_id, call)


def reads_at_leaders(cluster: Cluster, store: Store, connection: Connection) -> Reads:
    """Return what reads of partitions where they live, for a call that reads `store` on `connection`.

    In a cluster of one, and of what lives in `store`, it is the same snapshot; elsewhere one of its own.
    """

    def read(partition_ids: Collection[int], work: Callable[[Connection, list[int]], dict[int, Any]]) -> dict[int, Any]:
        if not partition_ids:
            return {}
        if cluster.is_alone:
            return work(connection, list(partition_ids))
        found: dict[int, Any] = {}
        for leader, own in cluster.by_leader(partition_ids).items():
            if leader == store.database_id:
                found |= work(connection, own)
            else:
                found |= repaired(cluster, leader, partial(Store.read, work=partial(_with_ids, work, own)))
        return found

    return read


def _with_ids(
    work: Callable[[Connection, list[int]], dict[int, Any]], partition_ids: list[int], connection: Connection
) -> dict[int, Any]:
    return work(connection, partition_ids)


#: The broker that is the controller: the only one of a cluster of one.
BROKER_ID: Final = 0

_LOCAL: Final = "localhost"
_PORT_POSTGRESQL: Final = 5432


def broker_id_of(database_id: int) -> int:
    """Return the number of the broker that a database plays: they count from 0."""
    return database_id - CONTROLLER_ID + BROKER_ID


def brokers_metadata(cluster: Cluster) -> list[BrokerMetadata]:
    """Return the brokers as `list_topics()` shows them."""
    return [_metadata(node) for node in broker_nodes(cluster)]


def broker_metadata(store: Store) -> BrokerMetadata:
    """Return the broker that the store plays as `list_topics()` shows it."""
    return _metadata(broker_node(store))


def broker_nodes(cluster: Cluster) -> list[Node]:
    """Return the brokers as the admin client shows them, the controller first; asks no database.

    Of a database that this client has not opened the address is the one that it was registered with.
    """
    opened = {store.database_id: store for store in cluster.opened()}
    return [
        broker_node(opened[member.database_id])
        if member.database_id in opened
        else Node(broker_id_of(member.database_id), *_labelled_address(member.label))
        for member in cluster.databases
    ]


def broker_of(nodes: Sequence[Node], database_id: int) -> Node:
    """Return which of the brokers one of the databases plays."""
    wanted = broker_id_of(database_id)
    return next((node for node in nodes if node.id == wanted), Node(wanted, _LOCAL, 0))


def broker_node(store: Store) -> Node:
    """Return the broker that the store plays as the admin client shows it."""
    return Node(broker_id_of(store.database_id), *broker_address(store.url))


def _metadata(node: Node) -> BrokerMetadata:
    broker = BrokerMetadata()
    broker.id, broker.host, broker.port = node.id, node.host, node.port
    return broker


def _labelled_address(label: str) -> tuple[str, int]:
    """Return host and port of a label `host:port/name`; a file's are `localhost` and 0."""
    address, slash, _ = label.rpartition("/")
    host, colon, port = address.rpartition(":")
    return (host, int(port)) if slash and colon and port.isdecimal() else (_LOCAL, 0)


def broker_address(url: DatabaseUrl) -> tuple[str, int]:
    """Return host and port of the database, and nothing else of its URL; a file's are `localhost` and 0.

    Of several hosts, one is named: the first.
    """
    if url.kind == "sqlite":
        return _LOCAL, 0
    host = url.url.host or url.option("host")
    port = url.url.port or url.option("port")
    if host.count(":") == 1:
        # SQLAlchemy's form of several servers: ?host=one:5432&host=two:5432; an IPv6 address has more colons.
        name, _, behind = host.rpartition(":")
        if behind.isdecimal():
            host, port = name, behind
    # A folder is where the socket of a server on this machine is.
    host = _LOCAL if not host or host.startswith(("/", "@")) else host.partition(",")[0]
    number = str(port).partition(",")[0]
    return host, int(number) if number.isdecimal() else _PORT_POSTGRESQL
