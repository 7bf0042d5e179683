"""This file is the admin client as confluent-kafka's users know it: topics, configurations, offsets, records, and more.

Its calls about groups and transactions, and those that a database has no use for, are in files of their own.
"""

from __future__ import annotations

import functools
import warnings
from concurrent.futures import Future
from typing import Any, Final

from txnstore.clients.admin import configs as admin_configs
from txnstore.clients.admin import offsets as admin_offsets
from txnstore.clients.admin import records as admin_records
from txnstore.clients.admin import topics as admin_topics
from txnstore.clients.admin.calls import check_flag
from txnstore.clients.admin.cluster import DescribeClusterResult, describe
from txnstore.clients.admin.group_calls import GroupCalls
from txnstore.clients.admin.handle import check_wait
from txnstore.clients.admin.new_topics import NewPartitions, NewTopic, check_new_partitions, check_new_topics
from txnstore.clients.admin.offsets import ListOffsetsResultInfo, OffsetSpec
from txnstore.clients.admin.records import DeletedRecords
from txnstore.clients.admin.resources import ConfigEntry, ConfigResource
from txnstore.clients.admin.topics import TopicDescription
from txnstore.clients.admin.transaction_calls import TransactionCalls
from txnstore.clients.admin.unsupported import RefusedCalls
from txnstore.clients.model.kafka_error import HANDLE_CLOSED_TEXT, KafkaError, KafkaException
from txnstore.clients.model.metadata import ClusterMetadata, TopicCollection
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.db.store import Store
from txnstore.model import IsolationLevel

_CLUSTER: Final = "cluster"


class AdminClient(GroupCalls, TransactionCalls, RefusedCalls):
    """Looks after topics, records, groups and transactions; safe to share between threads.

    What changes or describes something returns a future for each item at once; `result()` returns when it is done and
    raises KafkaException if it failed.  `request_timeout` is in seconds, from 0 to 3600; default: `socket.timeout.ms`.
    What is not answered by then fails with `_TIMED_OUT`.  `operation_timeout` is checked and has no effect: what is
    done is done everywhere.

    Nothing is opened before the first call.  `with` closes the client at its end; every later call raises RuntimeError.

    Args:
        conf: configuration keys, `bootstrap.servers` among them: the URL of the database.
        kwargs: more keys; `logger` among them.

    Raises:
        TypeError: `conf` is no dict.
        KafkaException: `_INVALID_ARG`: a key or its value is wrong.
    """

    # --- topics -------------------------------------------------------------------------------------------------------

    def create_topics(
        self,
        new_topics: list[NewTopic],
        *,
        operation_timeout: float | None = None,
        request_timeout: float | None = None,
        validate_only: bool = False,
    ) -> dict[str, Future[None]]:
        """Create topics; with `validate_only` only find out whether they could be created.

        A future fails with TOPIC_ALREADY_EXISTS, TOPIC_EXCEPTION (the name), INVALID_PARTITIONS,
        INVALID_REPLICATION_FACTOR, INVALID_REPLICA_ASSIGNMENT or INVALID_CONFIG.

        Raises:
            TypeError, ValueError: an argument is wrong; nothing was created.
        """
        self._check_call(operation_timeout, request_timeout, validate_only=validate_only)
        wanted: dict[str, list[NewTopic]] = {}
        for topic in check_new_topics(new_topics):
            wanted.setdefault(topic.topic, []).append(topic)
        return self._calls.for_each(
            self,
            "create_topics",
            wanted,
            lambda store, call, name: admin_topics.create(
                store, call, wanted[name], validate_only=validate_only, logger=self._configuration.logger
            ),
            request_timeout,
        )

    def delete_topics(
        self, topics: list[str], *, operation_timeout: float | None = None, request_timeout: float | None = None
    ) -> dict[str, Future[None]]:
        """Delete topics with their records and what groups have committed for them.

        A future fails with UNKNOWN_TOPIC_OR_PART, or INVALID_TXN_STATE while an open transaction has written to the
        topic.

        Raises:
            TypeError, ValueError: an argument is wrong; nothing was deleted.
        """
        self._check_call(operation_timeout, request_timeout)
        names = admin_topics.check_topic_names(topics)
        return self._calls.for_each(self, "delete_topics", names, admin_topics.delete, request_timeout)

    def create_partitions(
        self,
        new_partitions: list[NewPartitions],
        *,
        operation_timeout: float | None = None,
        request_timeout: float | None = None,
        validate_only: bool = False,
    ) -> dict[str, Future[None]]:
        """Give topics more partitions; with `validate_only` only find out whether they could get them.

        A future fails with UNKNOWN_TOPIC_OR_PART, INVALID_PARTITIONS or INVALID_REPLICA_ASSIGNMENT.

        Raises:
            TypeError, ValueError: an argument is wrong; nothing was changed.
        """
        self._check_call(operation_timeout, request_timeout, validate_only=validate_only)
        wanted: dict[str, list[NewPartitions]] = {}
        for topic in check_new_partitions(new_partitions):
            wanted.setdefault(topic.topic, []).append(topic)
        return self._calls.for_each(
            self,
            "create_partitions",
            wanted,
            lambda store, call, name: admin_topics.grow(store, call, wanted[name], validate_only=validate_only),
            request_timeout,
        )

    def describe_topics(
        self,
        topics: TopicCollection,
        *,
        include_authorized_operations: bool = False,
        request_timeout: float | None = None,
    ) -> dict[str, Future[TopicDescription]]:
        """Describe topics.

        A future fails with UNKNOWN_TOPIC_OR_PART, and all of them with `_INVALID_ARG` if a topic was given twice.

        Raises:
            TypeError, ValueError: an argument is wrong.
        """
        self._check_call(None, request_timeout)
        check_flag("include_authorized_operations", include_authorized_operations)
        if not isinstance(topics, TopicCollection):
            raise TypeError("Expected input to be instance of TopicCollection")
        names = admin_topics.check_described_names(topics.topic_names)
        twice = len(set(names)) < len(names)

        def work(store: Store, call: Any, name: str) -> TopicDescription:
            if twice:
                raise KafkaException(KafkaError(KafkaError._INVALID_ARG, "Duplicate topics not allowed"))
            return admin_topics.describe(store, call, name)

        return self._calls.for_each(self, "describe_topics", names, work, request_timeout)

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> ClusterMetadata:
        """Return the cluster with all topics, or with this one; a negative timeout (seconds) waits for ever.

        The entry of a topic that there is not has an error.  It is created only if `allow.auto.create.topics` is set:
        unlike librdkafka's, this admin client makes nothing by looking at it.

        Raises:
            KafkaException: `_TIMED_OUT`, or the database cannot be reached or refuses.
        """
        self._refuse_if_closed(HANDLE_CLOSED_TEXT)
        if topic is not None and not isinstance(topic, str):
            raise TypeError(f"argument 1 must be str or None, not {type(topic).__name__}")
        check_wait(timeout)
        return self._calls.run(self, "list_topics", lambda _: self._directory.cluster_metadata(topic or None), timeout)

    # --- the cluster --------------------------------------------------------------------------------------------------

    def describe_cluster(
        self, *, include_authorized_operations: bool = False, request_timeout: float | None = None
    ) -> Future[DescribeClusterResult]:
        """Describe the cluster: a node for each database, and the identity of the controller.

        Raises:
            TypeError, ValueError: an argument is wrong.
        """
        self._check_call(None, request_timeout)
        check_flag("include_authorized_operations", include_authorized_operations)
        return self._calls.for_each(self, "describe_cluster", [_CLUSTER], describe, request_timeout)[_CLUSTER]

    def cluster_id(self, timeout: float = -1) -> str:
        """Return the identity of the store; a negative timeout (seconds) waits for ever.

        Raises:
            KafkaException: `_TIMED_OUT`, or the database cannot be reached or refuses.
        """
        self._refuse_if_closed(HANDLE_CLOSED_TEXT)
        check_wait(timeout)
        return self._calls.run(self, "cluster_id", lambda store: store.store_uuid, timeout)

    # --- configurations -----------------------------------------------------------------------------------------------

    def describe_configs(
        self, resources: list[ConfigResource], *, request_timeout: float | None = None
    ) -> dict[ConfigResource, Future[dict[str, ConfigEntry]]]:
        """Return the configuration entries of topics, or of the broker 0: of the store.

        A future fails with UNKNOWN_TOPIC_OR_PART, or INVALID_REQUEST for what has no configuration.

        Raises:
            TypeError, ValueError: an argument is wrong.
        """
        self._check_call(None, request_timeout)
        wanted = admin_configs.check_resources(resources)
        return self._calls.for_each(self, "describe_configs", wanted, admin_configs.describe, request_timeout)

    def incremental_alter_configs(
        self,
        resources: list[ConfigResource],
        *,
        request_timeout: float | None = None,
        validate_only: bool = False,
    ) -> dict[ConfigResource, Future[None]]:
        """Change the entries of each resource's `incremental_configs`, and no others.

        A future fails with UNKNOWN_TOPIC_OR_PART, INVALID_CONFIG or INVALID_REQUEST; nothing of its resource was
        changed then.

        Raises:
            TypeError, ValueError: an argument is wrong; nothing was changed.
        """
        self._check_call(None, request_timeout, validate_only=validate_only)
        wanted = admin_configs.check_incremental(resources)
        return self._calls.for_each(
            self,
            "incremental_alter_configs",
            wanted,
            functools.partial(admin_configs.change, validate_only=validate_only, logger=self._configuration.logger),
            request_timeout,
        )

    def alter_configs(
        self,
        resources: list[ConfigResource],
        *,
        request_timeout: float | None = None,
        validate_only: bool = False,
    ) -> dict[ConfigResource, Future[None]]:
        """Give each resource the values of its `set_config`, and every other entry its default; deprecated.

        A future fails as that of `incremental_alter_configs`.

        Raises:
            TypeError, ValueError: an argument is wrong; nothing was changed.
        """
        warnings.warn(
            "alter_configs has been deprecated. Use incremental_alter_configs instead.",
            DeprecationWarning,
            stacklevel=2,
        )
        self._check_call(None, request_timeout, validate_only=validate_only)
        wanted = admin_configs.check_resources(resources)
        return self._calls.for_each(
            self,
            "alter_configs",
            wanted,
            functools.partial(admin_configs.replace, validate_only=validate_only, logger=self._configuration.logger),
            request_timeout,
        )

    # --- offsets ------------------------------------------------------------------------------------------------------

    def list_offsets(
        self,
        topic_partition_offsets: dict[TopicPartition, OffsetSpec],
        *,
        isolation_level: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
        request_timeout: float | None = None,
    ) -> dict[TopicPartition, Future[ListOffsetsResultInfo]]:
        """Find offsets: the beginning, the end, or by time; READ_COMMITTED ends at the last stable offset.

        A future fails with UNKNOWN_TOPIC_OR_PART.  Where there is no such record the offset is -1.

        Raises:
            TypeError, ValueError: an argument is wrong.
        """
        self._check_call(None, request_timeout)
        specs = dict(admin_offsets.check_offset_specs(topic_partition_offsets, isolation_level))
        return self._calls.for_each(
            self,
            "list_offsets",
            specs,
            lambda store, call, partition: admin_offsets.find_offset(
                store, call, partition, specs[partition], isolation_level
            ),
            request_timeout,
        )

    def delete_records(
        self,
        topic_partition_offsets: list[TopicPartition],
        *,
        operation_timeout: float | None = None,
        request_timeout: float | None = None,
    ) -> dict[TopicPartition, Future[DeletedRecords]]:
        """Delete the records below the offset of each partition; OFFSET_END (-1) deletes all.

        Nobody reads them from then on.  Whole batches of them leave the database; records that share a batch with one
        that stays are kept with it, out of reach.  An open transaction that began below goes on.

        A future fails with UNKNOWN_TOPIC_OR_PART, OFFSET_OUT_OF_RANGE for an offset beyond the high watermark,
        POLICY_VIOLATION for a topic that is compacted only, and all of them with `_INVALID_ARG` if a partition was
        given twice; nothing of the partition was deleted then.

        Raises:
            TypeError, ValueError: an argument is wrong; nothing was deleted.
        """
        self._check_call(operation_timeout, request_timeout)
        wanted, twice = admin_records.check_offsets(topic_partition_offsets)

        def work(store: Store, call: Any, partition: TopicPartition) -> DeletedRecords:
            if twice:
                raise KafkaException(KafkaError(KafkaError._INVALID_ARG, "Duplicate partitions not allowed"))
            return admin_records.delete(store, call, partition)

        return self._calls.for_each(self, "delete_records", wanted, work, request_timeout)
