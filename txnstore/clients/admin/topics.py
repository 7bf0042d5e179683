"""This file is what the admin client does with topics: make them, delete them, give them partitions, describe them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection

from txnstore.clients.admin.calls import Call, write
from txnstore.clients.admin.configs import known_topic_config
from txnstore.clients.admin.new_topics import DEFAULT, NewPartitions, NewTopic
from txnstore.clients.brokers import BROKER_ID, broker_nodes, broker_of, publish
from txnstore.clients.model.kafka_error import KafkaError, KafkaException
from txnstore.clients.model.metadata import TopicPartitionInfo, Uuid
from txnstore.db.settings import read_store_settings
from txnstore.db.store import Store
from txnstore.log.deleting import purge_soon
from txnstore.log.topics import (
    Topic,
    create_topic,
    delete_topic,
    get_topic,
    grow_topic,
)


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


# --- arguments --------------------------------------------------------------------------------------------------------


def check_topic_names(topics: object) -> list[str]:
    """Return the names of the topics to delete, as text.

    Raises:
        TypeError: it is no list.
        ValueError: it is empty, or holds a None.
    """
    if not isinstance(topics, list):
        raise TypeError(f"argument 1 must be list, not {type(topics).__name__}")
    if not topics:
        raise ValueError("Expected non-empty list of topic strings")
    if None in topics:
        raise ValueError("Expected list of topic strings, not NoneType")
    return [str(topic) for topic in topics]


def check_described_names(names: object) -> list[str]:
    """Return the names of the topics to describe.

    Raises:
        TypeError: it is no list of text.
        ValueError: a name is empty.
    """
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
    store: Store, call: Call[str, None], wanted: list[NewTopic], *, validate_only: bool, logger: logging.Logger
) -> None:
    """Create the topic that `wanted` asks for; it holds several if the same name was given several times."""
    new_topic = wanted[0]
    if len(wanted) > 1:
        raise _refusal(KafkaError.INVALID_REQUEST, f"topic {new_topic.topic!r} was given {len(wanted)} times")
    _check_copies(new_topic.topic, new_topic.replication_factor, new_topic.replica_assignment or ())
    if new_topic.replication_factor > 1:
        logger.info(
            "topic %s: the database looks after copies; the replication factor %s is ignored",
            new_topic.topic,
            new_topic.replication_factor,
        )
    config = known_topic_config(new_topic.topic, new_topic.config or {}, logger)

    def work(connection: Connection) -> None:
        count = new_topic.num_partitions
        if count == DEFAULT:
            count = read_store_settings(connection)["num.partitions"]
        create_topic(connection, new_topic.topic, partition_count=count, config=config)

    write(store, call, work, validate_only=validate_only)
    publish(store)


def delete(store: Store, call: Call[str, None], name: str) -> None:
    """Delete the topic."""
    if store.cluster is not None:
        from txnstore.log.cluster_topics import refuse_if_in_use

        topic = store.read(lambda connection: get_topic(connection, name), retry_timeout_ms=call.retry_ms(store))
        refuse_if_in_use(store.cluster, topic.partition_ids)
    write(store, call, lambda connection: delete_topic(connection, name))
    publish(store)
    purge_soon(store)


def grow(store: Store, call: Call[str, None], wanted: list[NewPartitions], *, validate_only: bool) -> None:
    """Give the topic that `wanted` asks for more partitions."""
    new_partitions = wanted[0]
    name, count = new_partitions.topic, new_partitions.new_total_count
    if len(wanted) > 1:
        raise _refusal(KafkaError.INVALID_REQUEST, f"topic {name!r} was given {len(wanted)} times")
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

    write(store, call, work, validate_only=validate_only)
    publish(store)


def describe(store: Store, call: Call[str, TopicDescription], name: str) -> TopicDescription:
    """Return the topic's description."""
    topic = store.read(lambda connection: get_topic(connection, name), retry_timeout_ms=call.retry_ms(store))
    return _description(store, topic)


def _description(store: Store, topic: Topic) -> TopicDescription:
    nodes = broker_nodes(store)
    leaders = [broker_of(nodes, home) for home in topic.leaders]
    number = uuid.UUID(topic.topic_uuid).int
    return TopicDescription(
        topic.name,
        Uuid(_signed(number >> 64), _signed(number % 2**64)),
        False,
        [TopicPartitionInfo(index, leader, [leader], [leader]) for index, leader in enumerate(leaders)],
    )


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _check_copies(name: str, replication_factor: int, assignment: Sequence[Sequence[int]]) -> None:
    """Refuse what no Kafka cluster takes, and partitions on brokers that are not there.

    A replication factor that needs more brokers than one is none of the topic's business: programs say how many
    copies *their* cluster keeps, and here the database keeps them.
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
