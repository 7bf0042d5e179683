"""This file is the consumer's calls that ask the database something beside records."""

from __future__ import annotations

from txnstore.clients.consumer.arguments import (
    check_partition,
    check_partitions,
    check_timeout,
    deadline_of,
    failure,
)
from txnstore.clients.consumer.base import ConsumerBase
from txnstore.clients.model.constants import OFFSET_INVALID
from txnstore.clients.model.kafka_error import HANDLE_CLOSED_TEXT, KafkaError
from txnstore.clients.model.metadata import ClusterMetadata
from txnstore.clients.model.topic_partition import TopicPartition


class AskingCalls(ConsumerBase):
    """Asks for watermarks, offsets by time, topics and the cluster."""

    def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float = -1, cached: bool = False
    ) -> tuple[int, int]:
        """Return the first offset of the partition and the one behind the last that this consumer may read.

        With `isolation.level=read_committed` the latter is the last stable offset.  `cached`: as the last reading
        found them, with the high watermark; OFFSET_INVALID before the first one.

        Raises:
            KafkaException: `_UNKNOWN_PARTITION`, `_TIMED_OUT`, and what the database answers.
        """
        self._check()
        wanted = check_partition(partition)
        deadline = deadline_of(check_timeout(timeout))
        if cached:
            with self._parts.arrived:
                assigned = self._parts.subscription.find(wanted.topic, wanted.partition)
                bounds = None if assigned is None else assigned.bounds
            return (
                (OFFSET_INVALID, OFFSET_INVALID)
                if bounds is None
                else (
                    bounds.log_start_offset,
                    bounds.high_watermark,
                )
            )
        lookups = self._parts.lookups
        return self._ask(lambda: lookups.watermarks(wanted), deadline, "Failed to get watermark offsets")

    def offsets_for_times(self, partitions: list[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        """Return for each partition the first offset at or after the time that stands in its `offset`.

        Times are milliseconds since 1970; OFFSET_END: there is no such record yet.

        Raises:
            KafkaException: `_INVALID_ARG`: the list is empty; `_UNKNOWN_PARTITION`, `_TIMED_OUT`, and what the
                database answers.
        """
        self._check()
        chosen = check_partitions(partitions)
        deadline = deadline_of(check_timeout(timeout))
        if not chosen:
            raise failure(KafkaError._INVALID_ARG, "Failed to get offsets")
        lookups = self._parts.lookups
        return self._ask(lambda: lookups.offsets_for_times(chosen), deadline, "Failed to get offsets")

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> ClusterMetadata:
        """Return the cluster with all topics, or with this one.

        Raises:
            TypeError: the topic is no text.
            KafkaException: `_TRANSPORT`: the database did not answer in time; and what it answers.
        """
        self._check(HANDLE_CLOSED_TEXT)
        if topic is not None and not isinstance(topic, str):
            raise TypeError(f"argument 1 must be str or None, not {type(topic).__name__}")
        directory = self._parts.directory
        return self._ask(
            lambda: directory.cluster_metadata(topic),
            deadline_of(check_timeout(timeout)),
            "Failed to get metadata",
            late_code=KafkaError._TRANSPORT,
        )

    def cluster_id(self, timeout: float = -1) -> str:
        """Return the identity of the store.

        Raises:
            KafkaException: `_TIMED_OUT`, and what the database answers.
        """
        self._check(HANDLE_CLOSED_TEXT)
        connection = self._parts.connection
        return self._ask(
            lambda: connection.store().store_uuid, deadline_of(check_timeout(timeout)), "Failed to retrieve cluster id"
        )

    def set_sasl_credentials(self, username: str, password: str) -> None:
        """Do nothing: the database's URL holds the credentials."""
        self._check(HANDLE_CLOSED_TEXT)
        for value in (username, password):
            if not isinstance(value, str):
                raise TypeError(f"must be str, not {type(value).__name__}")
