"""The admin client as confluent-kafka's users know it: topics, configurations, records, groups and transactions.

The class has every call's arguments and promises; what a call does is in the module of its subject.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final, Self

from txnstore.clients.admin import configs as admin_configs
from txnstore.clients.admin import group_offsets, unsupported
from txnstore.clients.admin import groups as admin_groups
from txnstore.clients.admin import records as admin_records
from txnstore.clients.admin import topics as admin_topics
from txnstore.clients.admin import transactions as admin_transactions
from txnstore.clients.admin.calls import (
    AdminCalls,
    check_call_timeout,
    check_flag,
    check_number,
    check_partitions,
    each_once,
)
from txnstore.clients.admin.configs import ConfigEntry, ConfigResource
from txnstore.clients.admin.groups import ConsumerGroupDescription, ListConsumerGroupsResult
from txnstore.clients.admin.records import DeletedRecords, ListOffsetsResultInfo, OffsetSpec
from txnstore.clients.admin.topics import DescribeClusterResult, NewPartitions, NewTopic, TopicDescription
from txnstore.clients.admin.transactions import (
    MAX_TIMEOUT_MS_DEFAULT,
    NO_DURATION_MS,
    AbortTransactionSpec,
    HangingTransaction,
    OpenTransactionListing,
    PartitionProducerState,
    PendingOffsetsListing,
    ProducerIdAndEpoch,
    TransactionDescription,
    TransactionListing,
)
from txnstore.clients.admin.unsupported import AclBinding, AclBindingFilter, UserScramCredentialAlteration
from txnstore.clients.callbacks import Callbacks, ErrorReporter, EventQueue, call_first
from txnstore.clients.configuration.configuration import admin_configuration
from txnstore.clients.connection import DatabaseLook, OfOneProcess, StoreConnection
from txnstore.clients.model.errors import HANDLE_CLOSED_TEXT, KafkaException, kafka_error_of
from txnstore.clients.model.metadata import (
    ClusterMetadata,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    ConsumerGroupType,
    ElectionType,
    GroupMetadata,
    TopicCollection,
)
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.clients.topic_directory import TopicDirectory
from txnstore.deadline import Condition, Deadline, check_timeout, wait_within
from txnstore.model import OFFSET_MAX, IsolationLevel
from txnstore.transactions.protocol import TransactionState

#: How long the end of a client waits for the call that is running.
_CLOSE_SECONDS: Final = 10.0


class AdminClient(OfOneProcess):
    """Looks after topics, records, groups and transactions; safe to share between threads.

    What changes or describes something returns a future for each item at once; `result()` returns when it is done and
    raises KafkaException if it failed.  `request_timeout` is in seconds, from 0 to 3600; default: `socket.timeout.ms`.
    What is not answered by then fails with `_TIMED_OUT`.  `operation_timeout` is checked and has no effect: what is
    done is done everywhere.

    A call with a wrong argument raises TypeError or ValueError at once, and nothing is done.

    No database is opened before the first call.  `with` closes the client at its end; every later call raises
    RuntimeError.

    Args:
        conf: configuration keys, `bootstrap.servers` among them: the URL of the database.
        kwargs: more keys; `logger` among them.

    Raises:
        TypeError: `conf` is not a dict.
        KafkaException: `_INVALID_ARG`: a key or its value is wrong.
    """

    def __init__(self, conf: dict[str, Any], **kwargs: Any) -> None:
        self._configuration = admin_configuration((conf,), kwargs)
        self._connection = StoreConnection(self._configuration)
        self._directory = TopicDirectory(
            self._connection,
            refresh_ms=self._configuration["topic.metadata.refresh.interval.ms"],
            allow_create=self._configuration["allow.auto.create.topics"],
        )
        self._changed = Condition()
        self._events: EventQueue[Callable[[], object]] = EventQueue(self._changed)
        # What outlives a client that its program has forgotten holds neither it nor its callback.
        connection = self._connection
        self._callbacks = Callbacks(error_cb=self._configuration["error_cb"])
        trouble = ErrorReporter(
            self._callbacks.weakly("error_cb") or (lambda _: None), self._events.put, lambda: connection.is_alone
        )
        self._calls = AdminCalls(
            self._connection,
            default_timeout_seconds=self._configuration["socket.timeout.ms"] / 1000,
            report=trouble.report,
        )
        # In a thread of its own: closing the client does not wait for a database that is away.
        self._look = (
            None
            if self._configuration["error_cb"] is None
            else DatabaseLook(self._connection, _in_thread, lambda error: trouble.report(kafka_error_of(error)))
        )
        # A client that its program has forgotten is closed, at the program's end without waiting for anything.
        self._forgotten = weakref.finalize(self, self._calls.close, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._forgotten.detach() is not None:
            self._calls.close(_CLOSE_SECONDS)

    def __len__(self) -> int:
        """Return 0: an admin client sends no messages."""
        return 0

    def __bool__(self) -> bool:
        return True

    def poll(self, timeout: float = -1) -> int:
        """Call `error_cb` for what went wrong, and return how often; wait up to `timeout` seconds if nothing did.

        A negative timeout waits until something goes wrong.  Calls need no polling to be carried out.
        """
        self._refuse_if_closed()
        deadline = Deadline(check_timeout(timeout))
        if self._look is not None:
            self._look.polled()
        served = 0
        while True:
            if self._events.events:
                served += self._events.serve_first(call_first)
                continue
            with self._changed:
                # What comes after the first one is served if it is there.
                if served or not wait_within(self._changed, lambda: self._events.events, deadline.left_seconds()):
                    return served

    def _check_call(
        self, request_timeout: float | None, operation_timeout: float | None = None, **flags: object
    ) -> None:
        self._refuse_if_closed()
        check_call_timeout("operation_timeout", operation_timeout, low_seconds=-1)
        check_call_timeout("request_timeout", request_timeout)
        for name, value in flags.items():
            check_flag(name, value)

    def _refuse_if_closed(self, text: str = "AdminClient has been closed") -> None:
        if not self._forgotten.alive:
            raise RuntimeError(text)
        self._connection.check_process()

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
        """
        self._check_call(request_timeout, operation_timeout, validate_only=validate_only)
        wanted = admin_topics.check_new_topics(new_topics)
        work = functools.partial(
            admin_topics.create, wanted, validate_only=validate_only, logger=self._configuration.logger
        )
        return self._calls.for_each(self, "create_topics", wanted, work, request_timeout)

    def delete_topics(
        self, topics: list[str], *, operation_timeout: float | None = None, request_timeout: float | None = None
    ) -> dict[str, Future[None]]:
        """Delete topics with their records and what groups have committed for them.

        A future fails with UNKNOWN_TOPIC_OR_PART, or INVALID_TXN_STATE while an open transaction has written to the
        topic.
        """
        self._check_call(request_timeout, operation_timeout)
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
        """
        self._check_call(request_timeout, operation_timeout, validate_only=validate_only)
        wanted = admin_topics.check_new_partitions(new_partitions)
        work = functools.partial(admin_topics.grow, wanted, validate_only=validate_only)
        return self._calls.for_each(self, "create_partitions", wanted, work, request_timeout)

    def describe_topics(
        self,
        topics: TopicCollection,
        *,
        include_authorized_operations: bool = False,
        request_timeout: float | None = None,
    ) -> dict[str, Future[TopicDescription]]:
        """Describe topics.

        A future fails with UNKNOWN_TOPIC_OR_PART, and all of them with `_INVALID_ARG` if a topic was given twice.
        """
        self._check_call(request_timeout, include_authorized_operations=include_authorized_operations)
        names = admin_topics.check_described_names(topics)
        work = each_once(admin_topics.describe, "topics", twice=len(set(names)) < len(names))
        return self._calls.for_each(self, "describe_topics", names, work, request_timeout)

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> ClusterMetadata:
        """Return the cluster with all topics, or with this one; a negative timeout (seconds) waits for ever.

        The entry of a topic that does not exist has an error.  It is created only if `allow.auto.create.topics` is
        set: unlike librdkafka's, this admin client makes nothing by looking at it.

        Raises:
            KafkaException: `_TIMED_OUT`, or the database cannot be reached or refuses.
        """
        self._refuse_if_closed(HANDLE_CLOSED_TEXT)
        if topic is not None and not isinstance(topic, str):
            raise TypeError(f"argument 1 must be str or None, not {type(topic).__name__}")
        timeout = check_timeout(timeout)
        return self._calls.run(self, "list_topics", lambda _: self._directory.cluster_metadata(topic or None), timeout)

    # --- the cluster --------------------------------------------------------------------------------------------------

    def describe_cluster(
        self, *, include_authorized_operations: bool = False, request_timeout: float | None = None
    ) -> Future[DescribeClusterResult]:
        """Describe the cluster: a node for each database, and the identity of the controller."""
        self._check_call(request_timeout, include_authorized_operations=include_authorized_operations)
        return self._calls.once(self, "describe_cluster", admin_topics.describe_cluster, request_timeout)

    def cluster_id(self, timeout: float = -1) -> str:
        """Return the identity of the store; a negative timeout (seconds) waits for ever.

        Raises:
            KafkaException: `_TIMED_OUT`, or the database cannot be reached or refuses.
        """
        self._refuse_if_closed(HANDLE_CLOSED_TEXT)
        timeout = check_timeout(timeout)
        return self._calls.run(self, "cluster_id", lambda cluster: cluster.controller.store_uuid, timeout)

    # --- configurations -----------------------------------------------------------------------------------------------

    def describe_configs(
        self, resources: list[ConfigResource], *, request_timeout: float | None = None
    ) -> dict[ConfigResource, Future[dict[str, ConfigEntry]]]:
        """Return the configuration entries of topics, or of the broker 0: of the store.

        A future fails with UNKNOWN_TOPIC_OR_PART, or INVALID_REQUEST for what has no configuration.
        """
        self._check_call(request_timeout)
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
        changed then.  All fail with _INVALID_ARG if a resource is there twice.
        """
        self._check_call(request_timeout, validate_only=validate_only)
        wanted = admin_configs.check_incremental(resources)
        change = functools.partial(admin_configs.change, validate_only=validate_only, logger=self._configuration.logger)
        work = each_once(change, "ConfigResources", twice=len(set(wanted)) < len(wanted))
        return self._calls.for_each(self, "incremental_alter_configs", wanted, work, request_timeout)

    def alter_configs(
        self,
        resources: list[ConfigResource],
        *,
        request_timeout: float | None = None,
        validate_only: bool = False,
    ) -> dict[ConfigResource, Future[None]]:
        """Give each resource the values of its `set_config`, and every other entry its default; deprecated.

        A future fails as that of `incremental_alter_configs`.
        """
        warnings.warn(
            "alter_configs has been deprecated. Use incremental_alter_configs instead.",
            DeprecationWarning,
            stacklevel=2,
        )
        self._check_call(request_timeout, validate_only=validate_only)
        wanted = admin_configs.check_resources(resources)
        replace = functools.partial(
            admin_configs.replace, validate_only=validate_only, logger=self._configuration.logger
        )
        work = each_once(replace, "ConfigResources", twice=len(set(wanted)) < len(wanted))
        return self._calls.for_each(self, "alter_configs", wanted, work, request_timeout)

    # --- records ------------------------------------------------------------------------------------------------------

    def list_offsets(
        self,
        topic_partition_offsets: dict[TopicPartition, OffsetSpec],
        *,
        isolation_level: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
        request_timeout: float | None = None,
    ) -> dict[TopicPartition, Future[ListOffsetsResultInfo]]:
        """Find offsets: the beginning, the end, or by time; READ_COMMITTED ends at the last stable offset.

        Offsets of partitions in one database are of one snapshot: of a transaction over several partitions they show
        all or nothing.  A future fails with UNKNOWN_TOPIC_OR_PART.  Where there is no such record the offset is -1.
        """
        self._check_call(request_timeout)
        specs = admin_records.check_offset_specs(topic_partition_offsets, isolation_level)
        work = functools.partial(admin_records.find_offsets, specs, isolation_level)
        return self._calls.together(self, "list_offsets", specs, work, request_timeout)

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
        """
        self._check_call(request_timeout, operation_timeout)
        wanted, twice = admin_records.check_offsets(topic_partition_offsets)
        work = each_once(admin_records.delete, "partitions", twice=twice)
        return self._calls.for_each(self, "delete_records", wanted, work, request_timeout)

    # --- groups -------------------------------------------------------------------------------------------------------

    def list_consumer_groups(
        self,
        *,
        states: set[ConsumerGroupState] | None = None,
        types: set[ConsumerGroupType] | None = None,
        request_timeout: float | None = None,
    ) -> Future[ListConsumerGroupsResult]:
        """List the groups that are in one of these states and of one of these types; if not given: all.

        Every group is of type CLASSIC.
        """
        self._check_call(request_timeout)
        wanted_states = admin_groups.check_kinds("states", states, ConsumerGroupState)
        wanted_types = admin_groups.check_kinds("types", types, ConsumerGroupType)
        work = functools.partial(admin_groups.find, states=wanted_states, types=wanted_types)
        return self._calls.once(self, "list_consumer_groups", work, request_timeout)

    def describe_consumer_groups(
        self,
        group_ids: list[str],
        *,
        include_authorized_operations: bool = False,
        request_timeout: float | None = None,
    ) -> dict[str, Future[ConsumerGroupDescription]]:
        """Describe groups; one that nobody has used is DEAD.

        A future fails with INVALID_GROUP_ID, and all of them with `_INVALID_ARG` if a group was given twice.
        """
        self._check_call(request_timeout, include_authorized_operations=include_authorized_operations)
        wanted = admin_groups.check_group_ids(group_ids, "described")
        work = each_once(admin_groups.describe, "groups", twice=len(set(wanted)) < len(wanted))
        return self._calls.for_each(self, "describe_consumer_groups", wanted, work, request_timeout)

    def delete_consumer_groups(
        self, group_ids: list[str], *, request_timeout: float | None = None
    ) -> dict[str, Future[None]]:
        """Delete groups without members, and their offsets.

        A future fails with GROUP_ID_NOT_FOUND, INVALID_GROUP_ID, or NON_EMPTY_GROUP if the group has members or an
        open transaction holds offsets of it; and all of them with `_INVALID_ARG` if a group was given twice.
        """
        self._check_call(request_timeout)
        wanted = admin_groups.check_group_ids(group_ids, "deleted")
        work = each_once(admin_groups.delete, "groups", twice=len(set(wanted)) < len(wanted))
        return self._calls.for_each(self, "delete_consumer_groups", wanted, work, request_timeout)

    def list_groups(self, group: str | None = None, timeout: float = -1) -> list[GroupMetadata]:
        """Return all groups, or the one of this id; deprecated.  A negative timeout (seconds) waits for ever.

        `metadata` and `assignment` of a member are in the format of Kafka's consumer protocol.

        Raises:
            KafkaException: `_TIMED_OUT`, INVALID_GROUP_ID, or the database cannot be reached or refuses.
        """
        warnings.warn(
            "list_groups() is deprecated, use list_consumer_groups() and describe_consumer_groups() instead.",
            DeprecationWarning,
            stacklevel=2,
        )
        self._refuse_if_closed(HANDLE_CLOSED_TEXT)
        if group is not None and not isinstance(group, str):
            raise TypeError(f"argument 1 must be str or None, not {type(group).__name__}")
        timeout = check_timeout(timeout)
        return self._calls.run(self, "list_groups", lambda cluster: admin_groups.list_metadata(cluster, group), timeout)

    # --- offsets of groups --------------------------------------------------------------------------------------------

    def list_consumer_group_offsets(
        self,
        list_consumer_group_offsets_request: list[ConsumerGroupTopicPartitions],
        *,
        require_stable: bool = False,
        request_timeout: float | None = None,
    ) -> dict[str, Future[ConsumerGroupTopicPartitions]]:
        """Return what groups have committed in these partitions; without partitions, all that each has committed.

        A partition without a committed offset has OFFSET_INVALID, one that does not exist has the error
        UNKNOWN_TOPIC_OR_PART.  With `require_stable`, one whose offset an open transaction may still change has
        UNSTABLE_OFFSET_COMMIT: ask again.

        A future fails with INVALID_GROUP_ID, and all of them with `_INVALID_ARG` if something was given twice.
        """
        self._check_call(request_timeout, require_stable=require_stable)
        requests, twice = group_offsets.check_requests(
            list_consumer_group_offsets_request, with_offsets=False, may_be_all=True
        )
        work = functools.partial(group_offsets.find, requests, require_stable=require_stable)
        return self._calls.for_each(
            self,
            "list_consumer_group_offsets",
            requests,
            each_once(work, "partitions", twice=twice),
            request_timeout,
        )

    def alter_consumer_group_offsets(
        self,
        alter_consumer_group_offsets_request: list[ConsumerGroupTopicPartitions],
        *,
        request_timeout: float | None = None,
    ) -> dict[str, Future[ConsumerGroupTopicPartitions]]:
        """Commit offsets for groups without members; a group that does not exist is made.

        Look at the `error` of each partition: UNKNOWN_TOPIC_OR_PART, or UNKNOWN_MEMBER_ID in all of them if the group
        has members, and nothing was changed then.

        A future fails with INVALID_GROUP_ID or OFFSET_METADATA_TOO_LARGE, and all of them with `_INVALID_ARG` if
        something was given twice.
        """
        self._check_call(request_timeout)
        requests, twice = group_offsets.check_requests(alter_consumer_group_offsets_request, with_offsets=True)
        work = each_once(functools.partial(group_offsets.alter, requests), "partitions", twice=twice)
        return self._calls.for_each(self, "alter_consumer_group_offsets", requests, work, request_timeout)

    def delete_consumer_group_offsets(
        self,
        delete_consumer_group_offsets_request: list[ConsumerGroupTopicPartitions],
        *,
        request_timeout: float | None = None,
    ) -> dict[str, Future[ConsumerGroupTopicPartitions]]:
        """Delete what groups have committed in these partitions; confluent-kafka has no such call, Java's Admin has.

        What open transactions would commit there is dropped too.  Look at the `error` of each partition:
        GROUP_SUBSCRIBED_TO_TOPIC if members of the group use the topic, UNKNOWN_TOPIC_OR_PART.

        A future fails with GROUP_ID_NOT_FOUND or INVALID_GROUP_ID, and all of them with `_INVALID_ARG` if something
        was given twice.
        """
        self._check_call(request_timeout)
        requests, twice = group_offsets.check_requests(delete_consumer_group_offsets_request, with_offsets=None)
        work = each_once(functools.partial(group_offsets.delete, requests), "partitions", twice=twice)
        return self._calls.for_each(self, "delete_consumer_group_offsets", requests, work, request_timeout)

    # --- transactions: confluent-kafka has none of these calls, Java's Admin has --------------------------------------

    def list_transactions(
        self,
        *,
        states: Collection[TransactionState] | None = None,
        producer_ids: Collection[int] | None = None,
        duration_ms: int = NO_DURATION_MS,
        transactional_id_pattern: str | None = None,
        request_timeout: float | None = None,
    ) -> Future[list[TransactionListing]]:
        """List the transactional ids that meet every condition given, by name, each with its newest transaction.

        Args:
            states: only transactions in one of these states.
            producer_ids: only those of these producers.
            duration_ms: only those that run, and have for longer than this; -1: all.
            transactional_id_pattern: a regular expression that the whole transactional id matches (KIP-1152).
            request_timeout: in seconds.
        """
        self._check_call(request_timeout)
        wanted = admin_transactions.transaction_filter(states, producer_ids, duration_ms, transactional_id_pattern)
        work = functools.partial(admin_transactions.find, wanted=wanted)
        return self._calls.once(self, "list_transactions", work, request_timeout)

    def describe_transactions(
        self, transactional_ids: list[str], *, request_timeout: float | None = None
    ) -> dict[str, Future[TransactionDescription]]:
        """Describe the newest transaction of each transactional id.

        A future fails with TRANSACTIONAL_ID_NOT_FOUND, or INVALID_REQUEST for what cannot be a transactional id.
        """
        self._check_call(request_timeout)
        wanted = admin_transactions.check_ids(transactional_ids)
        return self._calls.for_each(self, "describe_transactions", wanted, admin_transactions.describe, request_timeout)

    def describe_producers(
        self, partitions: list[TopicPartition], *, request_timeout: float | None = None
    ) -> dict[TopicPartition, Future[PartitionProducerState]]:
        """Return which producers each partition remembers, and where their open transactions begin.

        A future fails with UNKNOWN_TOPIC_OR_PART.
        """
        self._check_call(request_timeout)
        wanted = check_partitions(partitions)
        return self._calls.for_each(
            self, "describe_producers", wanted, admin_transactions.describe_producers, request_timeout
        )

    def abort_transaction(self, spec: AbortTransactionSpec, *, request_timeout: float | None = None) -> Future[None]:
        """Abort the transaction that a producer has open in a partition.

        Unlike Kafka's, it never tears a transaction apart: one that its coordinator knows is aborted as a whole, in
        all partitions and groups, and its producer gets an abortable error.  One that hangs, which nobody else would
        end, is ended in this partition.

        The future fails with UNKNOWN_TOPIC_OR_PART, INVALID_TXN_STATE (nothing is open there, or it is decided to
        commit), INVALID_PRODUCER_EPOCH or TRANSACTION_COORDINATOR_FENCED; nothing was changed then.

        Raises:
            TypeError: `spec` is not an AbortTransactionSpec.
        """
        self._check_call(request_timeout)
        if not isinstance(spec, AbortTransactionSpec):
            raise TypeError(f"Expected an AbortTransactionSpec, not {type(spec).__name__}")
        return self._calls.for_each(self, "abort_transaction", [spec], admin_transactions.abort, request_timeout)[spec]

    def fence_producers(
        self, transactional_ids: list[str], *, request_timeout: float | None = None
    ) -> dict[str, Future[ProducerIdAndEpoch]]:
        """Fence the producers of these transactional ids: an open transaction is aborted, and they never write again.

        As in Kafka, a transactional id that nobody has used is made.  A future fails with INVALID_REQUEST for what
        cannot be a transactional id.
        """
        self._check_call(request_timeout)
        wanted = admin_transactions.check_ids(transactional_ids)
        return self._calls.for_each(self, "fence_producers", wanted, admin_transactions.fence, request_timeout)

    def force_terminate_transaction(
        self, transactional_id: str, *, request_timeout: float | None = None
    ) -> Future[None]:
        """Abort the open transaction of the id, one that was prepared for two-phase commit too (KIP-939), and fence.

        It is not an error if nothing is open. The future fails with TRANSACTIONAL_ID_NOT_FOUND, or INVALID_REQUEST for
        what cannot be a transactional id.
        """
        self._check_call(request_timeout)
        wanted = admin_transactions.check_ids([transactional_id])
        return self._calls.for_each(
            self, "force_terminate_transaction", wanted, admin_transactions.terminate, request_timeout
        )[transactional_id]

    def find_hanging_transactions(
        self,
        partitions: list[TopicPartition] | None = None,
        *,
        max_transaction_timeout_ms: int = MAX_TIMEOUT_MS_DEFAULT,
        request_timeout: float | None = None,
    ) -> Future[list[HangingTransaction]]:
        """Return the transactions that hold up these partitions, or any, and that no coordinator will end.

        They are open there for longer than `max_transaction_timeout_ms` and five minutes, as Kafka's tool has it.
        The future fails with UNKNOWN_TOPIC_OR_PART.
        """
        self._check_call(request_timeout)
        wanted = None if partitions is None else check_partitions(partitions)
        check_number("max_transaction_timeout_ms", max_transaction_timeout_ms, OFFSET_MAX // 2)
        work = functools.partial(
            admin_transactions.find_hanging, partitions=wanted, max_timeout_ms=max_transaction_timeout_ms
        )
        return self._calls.once(self, "find_hanging_transactions", work, request_timeout)

    def list_open_transactions(
        self, partitions: list[TopicPartition] | None = None, *, request_timeout: float | None = None
    ) -> Future[list[OpenTransactionListing]]:
        """Return what is open in these partitions, or in any, and so holds their readers back: the oldest first.

        Each names the process that writes and the command that ends it.  The future fails with UNKNOWN_TOPIC_OR_PART.
        """
        self._check_call(request_timeout)
        wanted = None if partitions is None else check_partitions(partitions)
        work = functools.partial(admin_transactions.find_open, partitions=wanted)
        return self._calls.once(self, "list_open_transactions", work, request_timeout)

    def list_pending_offsets(
        self, partitions: list[TopicPartition] | None = None, *, request_timeout: float | None = None
    ) -> Future[list[PendingOffsetsListing]]:
        """Return what open transactions hold of groups' offsets in these partitions, or in any, by group.

        It is what keeps a group's consumers waiting where no record does: `list_open_transactions()` tells of those.
        The future fails with UNKNOWN_TOPIC_OR_PART.
        """
        self._check_call(request_timeout)
        wanted = None if partitions is None else check_partitions(partitions)
        work = functools.partial(admin_transactions.find_pending_offsets, partitions=wanted)
        return self._calls.once(self, "list_pending_offsets", work, request_timeout)

    # --- what is not supported: every future fails with `_UNSUPPORTED_FEATURE` ----------------------------------------

    def create_acls(
        self, acls: list[AclBinding], *, request_timeout: float | None = None
    ) -> dict[AclBinding, Future[None]]:
        """Refuse: the database decides who may do what."""
        self._check_call(request_timeout)
        return unsupported.refused(unsupported.check_list(acls, AclBinding), unsupported.ACLS)

    def describe_acls(
        self, acl_binding_filter: AclBindingFilter, *, request_timeout: float | None = None
    ) -> Future[list[AclBinding]]:
        """Refuse: the database decides who may do what.

        Raises:
            TypeError: this is not an AclBindingFilter.
        """
        self._check_call(request_timeout)
        if not isinstance(acl_binding_filter, AclBindingFilter):
            raise TypeError("Expected an AclBindingFilter object")
        return unsupported.failed(unsupported.ACLS)

    def delete_acls(
        self, acl_binding_filters: list[AclBindingFilter], *, request_timeout: float | None = None
    ) -> dict[AclBindingFilter, Future[list[AclBinding]]]:
        """Refuse: the database decides who may do what."""
        self._check_call(request_timeout)
        return unsupported.refused(unsupported.check_list(acl_binding_filters, AclBindingFilter), unsupported.ACLS)

    def describe_user_scram_credentials(
        self, users: list[str] | None = None, *, request_timeout: float | None = None
    ) -> Future[Any] | dict[str, Future[Any]]:
        """Refuse, for all users or for each of these: users are the database's own."""
        self._check_call(request_timeout)
        if users is None:
            return unsupported.failed(unsupported.CREDENTIALS)
        return unsupported.refused(unsupported.check_users(users), unsupported.CREDENTIALS)

    def alter_user_scram_credentials(
        self, alterations: list[UserScramCredentialAlteration], *, request_timeout: float | None = None
    ) -> dict[str, Future[None]]:
        """Refuse, for each user: users are the database's own."""
        self._check_call(request_timeout)
        return unsupported.refused(unsupported.check_alterations(alterations), unsupported.CREDENTIALS)

    def set_sasl_credentials(self, username: str, password: str) -> None:
        """Do nothing, as `Producer.set_sasl_credentials`."""
        self._refuse_if_closed(HANDLE_CLOSED_TEXT)
        for position, text in enumerate((username, password), start=1):
            if not isinstance(text, str):
                raise TypeError(f"argument {position} must be str, not {type(text).__name__}")

    def elect_leaders(
        self,
        election_type: ElectionType,
        partitions: list[TopicPartition] | None = None,
        *,
        operation_timeout: float | None = None,
        request_timeout: float | None = None,
    ) -> Future[dict[TopicPartition, KafkaException | None]]:
        """Refuse: there are no elections."""
        self._check_call(request_timeout, operation_timeout)
        unsupported.check_election(election_type, partitions)
        return unsupported.failed(unsupported.ELECTIONS)


def _in_thread(look: Callable[[], None]) -> None:
    threading.Thread(target=look, name="txnstore-admin-look", daemon=True).start()
