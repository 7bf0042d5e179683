"""This file is the consumer's calls about offsets that the group has consumed."""

from __future__ import annotations

import time
from typing import Final

from txnstore.clients.consumer.arguments import (
    check_partitions,
    check_timeout,
    chosen_offsets,
    deadline_of,
    failure,
    seconds_left,
)
from txnstore.clients.consumer.base import ConsumerBase
from txnstore.clients.consumer.error_messages import prefixed
from txnstore.clients.consumer.events import (
    CommitEvent,
)
from txnstore.clients.model.error_mapping import joined_error_of
from txnstore.clients.model.kafka_error import KafkaError, KafkaException
from txnstore.clients.model.message import Message
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.db.callers.connections import callers_connection
from txnstore.errors import TxnStoreError, UnstableOffsetCommit

#: How often committed() asks again while an open transaction holds the offsets.
UNSTABLE_PAUSE_SECONDS: Final = 0.02


class CommittingCalls(ConsumerBase):
    """Commits offsets, and asks for committed ones."""

    def store_offsets(self, message: Message | None = None, offsets: list[TopicPartition] | None = None) -> None:
        """Let a later commit without arguments commit the offset behind the message, or these offsets.

        Raises:
            ValueError: neither or both are given.
            KafkaException: `_INVALID_ARG`: `enable.auto.offset.store` is set, or the message is no record;
                `_UNKNOWN_PARTITION`: no partition of them is assigned.
        """
        self._check()
        chosen = chosen_offsets(message, offsets, "store")
        if chosen is None:
            raise ValueError("expected either message or offsets")
        if self._parts.options.stores_offsets:
            raise failure(KafkaError._INVALID_ARG, "StoreOffsets failed")
        with self._parts.arrived:
            found = [
                (assigned, partition.offset)
                for partition in chosen
                if (assigned := self._parts.subscription.find(partition.topic, partition.partition)) is not None
                and not assigned.is_unread
            ]
            if chosen and not found:
                raise failure(KafkaError._UNKNOWN_PARTITION, "StoreOffsets failed")
            for assigned, offset in found:
                if offset >= 0:
                    assigned.stored = offset

    def commit(
        self,
        message: Message | None = None,
        offsets: list[TopicPartition] | None = None,
        asynchronous: bool = True,
        *,
        connection: object = None,
    ) -> list[TopicPartition] | None:
        """Commit the offset behind the message, these offsets, or what is stored and not committed yet.

        Asynchronously nothing is returned, and `on_commit` hears of it from a later `poll()`.  Otherwise the committed
        partitions are returned, each with its own error.

        With a `connection` to the same database the offsets become part of the database transaction that is open on
        it: they are committed with the caller's rows, by the caller's own commit, or not at all.  The connection is a
        `Connection` or `Session` of SQLAlchemy, a `psycopg.Connection` or a `sqlite3.Connection`; the call runs on the
        caller's thread and returns the partitions.  Others that commit for the group wait until the caller commits.
        After an error the caller rolls back.  After his rollback the consumer reads on where it was: `seek()` back, or
        make a new consumer.  Offsets without arguments are all that are stored, for the consumer does not learn what
        became of them.

        Raises:
            TypeError: the connection is none.
            ValueError: both message and offsets are given.
            KafkaException: `_INVALID_ARG`: the message is no record; if not asynchronous also `_NO_OFFSET`: there is
                nothing to commit; UNKNOWN_MEMBER_ID, ILLEGAL_GENERATION, FENCED_INSTANCE_ID: the group is another
                consumer's now; and what the database answers.  With a connection also `_INVALID_ARG`:
                `enable.auto.commit` is set, and `_STATE`: its database transaction has failed before.
        """
        self._check()
        chosen = chosen_offsets(message, offsets, "commit")
        parts = self._parts
        if chosen is None:
            chosen = parts.commits.stored()
        if connection is not None:
            return self._commit_on(connection, chosen)
        if all(partition.offset < 0 for partition in chosen):
            if not asynchronous:
                raise failure(KafkaError._NO_OFFSET, "Commit failed")
            if self._callbacks["on_commit"] is not None:
                parts.inbox.put(CommitEvent(KafkaError(KafkaError._NO_OFFSET), []))
            return None
        if asynchronous:
            parts.submit_commit(chosen)
            return None
        deadline = time.monotonic() + parts.options.request_timeout_seconds
        result = self._answer(lambda: parts.commits.submit(chosen), deadline, "Commit failed")
        if result.error is not None:
            raise KafkaException(prefixed("Commit failed", result.error))
        return list(result.partitions)

    def _commit_on(self, connection: object, chosen: list[TopicPartition]) -> list[TopicPartition]:
        parts = self._parts
        if parts.options.commits_by_itself:
            reason = (
                "Commit failed: with a connection, enable.auto.commit must be false: offsets that are committed by"
                " themselves would stand when the connection's database transaction is rolled back"
            )
            raise KafkaException(KafkaError(KafkaError._INVALID_ARG, reason))
        if all(partition.offset < 0 for partition in chosen):
            raise failure(KafkaError._NO_OFFSET, "Commit failed")
        try:
            return parts.commits.commit_on(callers_connection(connection), chosen)
        except TxnStoreError as error:
            raise KafkaException(prefixed("Commit failed", joined_error_of(error))) from error

    def committed(self, partitions: list[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        """Return what the group has committed for each partition, or OFFSET_INVALID if nothing.

        With `isolation.level=read_committed` it waits while an open transaction may still change the offsets.

        Raises:
            KafkaException: `_TIMED_OUT`, and what the database answers.
        """
        self._check()
        chosen = check_partitions(partitions)
        deadline = deadline_of(check_timeout(timeout))
        prefix = "Failed to get committed offsets"
        if not chosen:
            return []
        while True:
            try:
                return self._answer(
                    lambda: self._parts.commits.read(chosen), deadline, prefix, unless=UnstableOffsetCommit
                )
            except UnstableOffsetCommit:
                self._parts.held_back()
                left_seconds = seconds_left(deadline)
                if left_seconds <= 0:
                    raise failure(KafkaError._TIMED_OUT, prefix) from None
            time.sleep(min(UNSTABLE_PAUSE_SECONDS, left_seconds))
            self._check()
