"""Topics as the admin client makes, grows, deletes and describes them, and the description of the cluster."""

from __future__ import annotations

import logging
import operator
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, SupportsIndex, TypeVar

from sqlalchemy import Connection

from txnstore.clients.admin.calls import Call, write
from txnstore.clients.admin.configs import known_topic_config
from txnstore.clients.brokers import BROKER_ID, broker_nodes, broker_of
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.model.metadata import Node, TopicCollection, TopicPartitionInfo, Uuid, with_fields
from txnstore.db.cluster.catalogue import read_store_settings
from txnstore.db.cluster.cluster import Cluster
from txnstore.log.cluster_topics import delete_topics
from txnstore.log.topics import (
    PARTITIONS_MAX,
    Topic,
    create_topic,
    get_topic,
    grow_topic,
)

_Wanted = TypeVar("_Wanted", "NewTopic", "NewPartitions")

#: The number that stands for the store's default.
DEFAULT: Final = -1

_INT32: Final = range(-(2**31), 2**31)
_REPLICATION_FACTOR_MAX: Final = 10_000


class DescribeClusterResult:
    """The cluster, from `describe_cluster()`: a node for each database, the controller first.

    `authorized_operations` is None: the database decides who may do what.
    """

    def __init__(
        self,
        controller: Node,
        nodes: list[Node],
        cluster_id: str | None = None,
        authorized_operations: list[Any] | None = None,
    ) -> None:
        self.cluster_id = cluster_id
        self.controller = controller
        self.nodes = nodes
        self.authorized_operations = authorized_operations

    def __repr__(self) -> str:
        nodes = ", ".join(str(node).rstrip() for node in self.nodes)
        return f"DescribeClusterResult(cluster_id={self.cluster_id},nodes=[{nodes}])"


class NewTopic:
    """A topic to create.

    Args:
        topic: its name.
        num_partitions: how many partitions it gets; -1: as many as the store's num.partitions says.
        replication_factor: how many copies there are to be, at least 1; ignored: the database looks after copies.
        replica_assignment: the numbers of the brokers for each partition, instead of a replication factor.
        config: its settings as text, by Kafka's names.

    Raises:
        TypeError: an argument has the wrong type.
        OverflowError: a number does not fit into 32 bits.
    """

    def __init__(
        self,
        topic: str,
        num_partitions: SupportsIndex = DEFAULT,
        replication_factor: SupportsIndex = DEFAULT,
        replica_assignment: Sequence[Sequence[int]] | None = None,
        config: Mapping[str, str] | None = None,
    ) -> None:
        self.topic = _text(topic)
        self.num_partitions = _int32(num_partitions)
        self.replication_factor = _int32(replication_factor)
        self.replica_assignment = replica_assignment
        if config is not None and not isinstance(config, dict):
            raise TypeError("config must be a dict of strings")
        self.config = config

    def __repr__(self) -> str:
        count = "" if self.num_partitions == DEFAULT else f",num_partitions={self.num_partitions}"
        return f"NewTopic(topic={self.topic}{count})"

    def __hash__(self) -> int:
        return hash((self.topic, self.num_partitions))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NewTopic):
            return NotImplemented
        return (self.topic, self.num_partitions) == (other.topic, other.num_partitions)

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, NewTopic):
            return NotImplemented
        return (self.topic, self.num_partitions) < (other.topic, other.num_partitions)


class NewPartitions:
    """More partitions for a topic.

    Args:
        topic: its name.
        new_total_count: how many partitions it is to have in all.
        replica_assignment: the numbers of the brokers for each partition that is new.

    Raises:
        TypeError: an argument has the wrong type.
        OverflowError: the number does not fit into 32 bits.
    """

    def __init__(
        self,
        topic: str,
        new_total_count: SupportsIndex,
        replica_assignment: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.topic = _text(topic)
        self.new_total_count = _int32(new_total_count)
        self.replica_assignment = replica_assignment

    def __repr__(self) -> str:
        return f"NewPartitions(topic={self.topic},new_total_count={self.new_total_count})"

    def __hash__(self) -> int:
        return hash((self.topic, self.new_total_count))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NewPartitions):
            return NotImplemented
        return (self.topic, self.new_total_count) == (other.topic, other.new_total_count)

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, NewPartitions):
            return NotImplemented
        return (self.topic, self.new_total_count) < (other.topic, other.new_total_count)


class TopicDescription:
    """A topic, from `describe_topics()`.

    `authorized_operations` is None: the database decides who may do what.
    """

    def __init__(
        self,
        name: str,
        topic_id: Uuid,
        is_internal: bool,
        partitions: list[TopicPartitionInfo],
        authorized_operations: list[Any] | None = None,
    ) -> None:
        self.name = name
        self.topic_id = topic_id
        self.is_internal = is_internal
        self.partitions = partitions
        self.authorized_operations = authorized_operations

    __repr__ = with_fields


# --- arguments --------------------------------------------------------------------------------------------------------


def check_new_topics(new_topics: Iterable[NewTopic]) -> dict[str, list[NewTopic]]:
    """Return the topics to create, by name; a name has several if it was given several times."""
    topics = _list_of(new_topics, NewTopic)
    for topic in topics:
        if topic.num_partitions != DEFAULT and not 0 <= topic.num_partitions <= PARTITIONS_MAX:
            raise ValueError(
                f"Invalid NewTopic({topic.topic}): num_partitions out of expected range 1..{PARTITIONS_MAX} or -1 for"
                " broker default"
            )
        if not DEFAULT <= topic.replication_factor <= _REPLICATION_FACTOR_MAX:
            raise ValueError(
                f"Invalid NewTopic({topic.topic}): replication_factor out of expected range -1.."
                f"{_REPLICATION_FACTOR_MAX}"
            )
        if topic.replica_assignment:
            if topic.replication_factor != DEFAULT:
                raise ValueError("replication_factor and replica_assignment are mutually exclusive")
            if not _is_assignment(topic.replica_assignment) or len(topic.replica_assignment) != topic.num_partitions:
                raise ValueError("replica_assignment must be a list of int lists with an outer size of num_partitions")
    return _by_name(topics)


def check_new_partitions(new_partitions: Iterable[NewPartitions]) -> dict[str, list[NewPartitions]]:
    """Return the topics that get more partitions, by name; a name has several if it was given several times."""
    topics = _list_of(new_partitions, NewPartitions)
    for topic in topics:
        if not 1 <= topic.new_total_count <= PARTITIONS_MAX:
            raise ValueError(
                f"Invalid NewPartitions({topic.topic}): new_total_cnt out of expected range 1..{PARTITIONS_MAX}"
            )
        if topic.replica_assignment and not _is_assignment(topic.replica_assignment):
            raise ValueError(
                "replica_assignment must be a list of int lists with an outer size of new_total_count - existing"
                " partition count"
            )
    return _by_name(topics)


def _by_name(topics: list[_Wanted]) -> dict[str, list[_Wanted]]:
    wanted: dict[str, list[_Wanted]] = {}
    for topic in topics:
        wanted.setdefault(topic.topic, []).append(topic)
    return wanted


def _is_assignment(assignment: object) -> bool:
    return isinstance(assignment, list) and all(
        isinstance(replicas, list) and replicas and all(type(replica) is int for replica in replicas)
        for replicas in assignment
    )


def _list_of(given: Iterable[Any], kind: type[Any]) -> list[Any]:
    found = list(given) if isinstance(given, list | tuple | set | frozenset) else None
    if found is None:
        raise TypeError(f"Expected list of {kind.__name__} objects, not {type(given).__name__}")
    if not found:
        raise ValueError(f"Expected non-empty list of {kind.__name__} objects")
    for item in found:
        if not isinstance(item, kind):
            raise TypeError(f"Expected list of {kind.__name__} objects, not of {type(item).__name__}")
    return found


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"argument 1 must be str, not {type(value).__name__ if value is not None else None}")
    return value


def _int32(value: SupportsIndex) -> int:
    number = operator.index(value)
    if number not in _INT32:
        raise OverflowError(f"{number} does not fit into 32 bits")
    return number


def check_topic_names(topics: object) -> list[str]:
    """Return the names of the topics to delete, as text."""
    if not isinstance(topics, list):
        raise TypeError(f"argument 1 must be list, not {type(topics).__name__}")
    if not topics:
        raise ValueError("Expected non-empty list of topic strings")
    if None in topics:
        raise ValueError("Expected list of topic strings, not NoneType")
    return [str(topic) for topic in topics]


def check_described_names(topics: object) -> list[str]:
    """Return the names of the topics to describe."""
    if not isinstance(topics, TopicCollection):
        raise TypeError("Expected input to be instance of TopicCollection")
    names: object = topics.topic_names
    if not isinstance(names, list):
        raise TypeError("Expected list of topic names to be described")
    for index, name in enumerate(names):
        if not isinstance(name, str):
            raise TypeError(f"Expected list of topics strings, not {type(name).__name__}")
        if not name:
            raise ValueError(f"Empty topic name at index {index} isn't allowed")
    return names


# --- what is done -----------------------------------------------------------------------------------------------------


def create(
    wanted: dict[str, list[NewTopic]],
    cluster: Cluster,
    call: Call[str, None],
    name: str,
    *,
    validate_only: bool,
    logger: logging.Logger,
) -> None:
    """Create the topic of this name as it is wanted."""
    new_topic = _given_once(wanted[name])
    _check_copies(new_topic.topic, new_topic.replication_factor, new_topic.replica_assignment or ())
    if new_topic.replication_factor > 1:
        logger.info(
            "topic %s: the database looks after copies; the replication factor %s is ignored",
            new_topic.topic,
            new_topic.replication_factor,
            extra={"event": "setting_without_effect", "setting": "replication_factor", "topic": new_topic.topic},
        )
    config = known_topic_config(new_topic.topic, new_topic.config or {}, logger)

    def work(connection: Connection) -> None:
        count = new_topic.num_partitions
        if count == DEFAULT:
            count = read_store_settings(connection)["num.partitions"]
        create_topic(connection, new_topic.topic, partition_count=count, config=config)

    write(cluster.controller, call, work, validate_only=validate_only)
    cluster.publish()


def delete(cluster: Cluster, call: Call[str, None], name: str) -> None:
    """Delete the topic."""
    delete_topics(cluster, [name], retry_ms=call.retry_ms)


def grow(
    wanted: dict[str, list[NewPartitions]], cluster: Cluster, call: Call[str, None], name: str, *, validate_only: bool
) -> None:
    """Give the topic of this name as many partitions as are wanted."""
    new_partitions = _given_once(wanted[name])
    count = new_partitions.new_total_count
    assignment = new_partitions.replica_assignment or ()
    _check_copies(name, DEFAULT, assignment)

    def work(connection: Connection) -> None:
        present = len(get_topic(connection, name).partition_ids)
        grow_topic(connection, name, partition_count=count)
        if assignment and len(assignment) != count - present:
            raise _refusal(
                KafkaError.INVALID_REPLICA_ASSIGNMENT,
                f"topic {name}: the replica assignment is for {len(assignment)} partitions, and {count - present} are"
                " new",
            )

    write(cluster.controller, call, work, validate_only=validate_only)
    cluster.publish()


def describe(cluster: Cluster, call: Call[str, TopicDescription], name: str) -> TopicDescription:
    """Return the topic's description."""
    topic = cluster.controller.read(
        lambda connection: get_topic(connection, name), retry_timeout_ms=call.retry_ms(cluster.controller)
    )
    return _description(cluster, topic)


def describe_cluster(cluster: Cluster, call: Call[str, DescribeClusterResult]) -> DescribeClusterResult:
    """Return the cluster's description."""
    nodes = broker_nodes(cluster)
    return DescribeClusterResult(nodes[0], nodes, cluster.controller.store_uuid)


def _description(cluster: Cluster, topic: Topic) -> TopicDescription:
    nodes = broker_nodes(cluster)
    leaders = [broker_of(nodes, leader) for leader in topic.leaders]
    number = uuid.UUID(topic.topic_uuid).int
    return TopicDescription(
        topic.name,
        Uuid(_signed(number >> 64), _signed(number % 2**64)),
        False,
        [TopicPartitionInfo(index, leader, [leader], [leader]) for index, leader in enumerate(leaders)],
    )


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _given_once(wanted: list[_Wanted]) -> _Wanted:
    if len(wanted) > 1:
        raise _refusal(KafkaError.INVALID_REQUEST, f"topic {wanted[0].topic!r} was given {len(wanted)} times")
    return wanted[0]


def _check_copies(name: str, replication_factor: int, assignment: Sequence[Sequence[int]]) -> None:
    """Refuse what no Kafka cluster takes, and partitions on brokers that are not there.

    A replication factor that needs more brokers than one is accepted: programs say how many copies *their* cluster
    keeps, and here the database keeps them.
    """
    if replication_factor == 0:
        raise _refusal(
            KafkaError.INVALID_REPLICATION_FACTOR,
            f"topic {name}: the replication factor is 0; give 1 or -1, and let the database look after copies",
        )
    if any(list(replicas) != [BROKER_ID] for replicas in assignment):
        raise _refusal(
            KafkaError.INVALID_REPLICA_ASSIGNMENT,
            f"topic {name}: the only broker is {BROKER_ID}, so each partition is assigned to [{BROKER_ID}]",
        )


def _refusal(code: int, text: str) -> KafkaException:
    return KafkaException(KafkaError(code, text))
