"""This file is the admin client's calls about transactions; confluent-kafka has none of them, Java's Admin has."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import Final

from txnstore.clients.admin import transactions as admin_transactions
from txnstore.clients.admin.arguments import check_number, check_partitions
from txnstore.clients.admin.handle import AdminHandle
from txnstore.clients.admin.transaction_results import (
    AbortTransactionSpec,
    HangingTransaction,
    PartitionProducerState,
    ProducerIdAndEpoch,
    TransactionDescription,
    TransactionListing,
)
from txnstore.clients.admin.transactions import MAX_TIMEOUT_MS_DEFAULT, NO_DURATION_MS
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.model import OFFSET_MAX
from txnstore.transactions.states import TransactionState

_ALL: Final = "all"


class TransactionCalls(AdminHandle):
    """The calls of `AdminClient` about transactions and their producers."""

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

        Raises:
            TypeError, ValueError: an argument is wrong.
        """
        self._check_call(None, request_timeout)
        wanted = admin_transactions.transaction_filter(states, producer_ids, duration_ms, transactional_id_pattern)
        return self._calls.for_each(
            self,
            "list_transactions",
            [_ALL],
            lambda store, call, _: admin_transactions.find(store, call.retry_ms(store), wanted),
            request_timeout,
        )[_ALL]

    def describe_transactions(
        self, transactional_ids: list[str], *, request_timeout: float | None = None
    ) -> dict[str, Future[TransactionDescription]]:
        """Describe the newest transaction of each transactional id.

        A future fails with TRANSACTIONAL_ID_NOT_FOUND, or INVALID_REQUEST for what is no transactional id.

        Raises:
            TypeError, ValueError: an argument is wrong.
        """
        self._check_call(None, request_timeout)
        wanted = admin_transactions.check_ids(transactional_ids)
        return self._calls.for_each(self, "describe_transactions", wanted, admin_transactions.describe, request_timeout)

    def describe_producers(
        self, partitions: list[TopicPartition], *, request_timeout: float | None = None
    ) -> dict[TopicPartition, Future[PartitionProducerState]]:
        """Return which producers each partition remembers, and where their open transactions begin.

        A future fails with UNKNOWN_TOPIC_OR_PART.

        Raises:
            TypeError, ValueError: an argument is wrong.
        """
        self._check_call(None, request_timeout)
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
            TypeError, ValueError: an argument is wrong.
        """
        self._check_call(None, request_timeout)
        if not isinstance(spec, AbortTransactionSpec):
            raise TypeError(f"Expected an AbortTransactionSpec, not {type(spec).__name__}")
        return self._calls.for_each(self, "abort_transaction", [spec], admin_transactions.abort, request_timeout)[spec]

    def fence_producers(
        self, transactional_ids: list[str], *, request_timeout: float | None = None
    ) -> dict[str, Future[ProducerIdAndEpoch]]:
        """Fence the producers of these transactional ids: an open transaction is aborted, and they never write again.

        As in Kafka, a transactional id that nobody has used is made.  A future fails with INVALID_REQUEST for what is
        no transactional id.

        Raises:
            TypeError, ValueError: an argument is wrong; nobody was fenced.
        """
        self._check_call(None, request_timeout)
        wanted = admin_transactions.check_ids(transactional_ids)
        return self._calls.for_each(self, "fence_producers", wanted, admin_transactions.fence, request_timeout)

    def force_terminate_transaction(
        self, transactional_id: str, *, request_timeout: float | None = None
    ) -> Future[None]:
        """Abort the open transaction of the id, one that was prepared for two-phase commit too (KIP-939), and fence.

        Nothing being open is no error.  The future fails with TRANSACTIONAL_ID_NOT_FOUND, or INVALID_REQUEST for what
        is no transactional id.

        Raises:
            TypeError, ValueError: an argument is wrong.
        """
        self._check_call(None, request_timeout)
        admin_transactions.check_id(transactional_id)
        return self._calls.for_each(
            self, "force_terminate_transaction", [transactional_id], admin_transactions.terminate, request_timeout
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

        Raises:
            TypeError, ValueError: an argument is wrong.
        """
        self._check_call(None, request_timeout)
        wanted = None if partitions is None else check_partitions(partitions)
        check_number("max_transaction_timeout_ms", max_transaction_timeout_ms, OFFSET_MAX // 2)
        return self._calls.for_each(
            self,
            "find_hanging_transactions",
            [_ALL],
            lambda store, call, _: admin_transactions.find_hanging(
                store, call.retry_ms(store), wanted, max_transaction_timeout_ms
            ),
            request_timeout,
        )[_ALL]
