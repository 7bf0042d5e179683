"""This file is the way of batches into the log for one producer: who it is, its sequence numbers, and the write.

A request is written in one database transaction.  It may be written again after an answer was lost: the sequence
numbers are given once, so the log recognises what it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from txnstore.clients.accumulator import HEADERS, KEY, TIMESTAMP_MS, VALUE, Batch
from txnstore.clients.connection import StoreConnection
from txnstore.log.append import Append, Appended, append
from txnstore.log.codec import RecordColumns, encode_columns
from txnstore.log.compression import Codec, codec_for_topic
from txnstore.log.sequences import increment_sequence
from txnstore.log.topics import Topic
from txnstore.model import NO_PRODUCER, NO_SEQUENCE, ProducerIdentity
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.tokens import TransactionToken
from txnstore.transactions.writers import TransactionWriter, append_as_writer, join_transaction

#: How long one try of the database goes on by itself; then the sender looks whether it is still wanted.
TRY_TIMEOUT_MS: Final = 500


@dataclass(frozen=True, slots=True)
class ProduceRequest:
    """Batches that are written together, with their sequence numbers."""

    batches: Sequence[Batch]
    appends: Sequence[Append]


class ProducerSession:
    """Who a producer is to the log; for the sender's thread only."""

    def __init__(
        self,
        connection: StoreConnection,
        *,
        is_idempotent: bool,
        transactional_id: str | None,
        codec: Codec,
        token: TransactionToken | None = None,
    ) -> None:
        """Begin without an identity: it is asked for with the first request, or by `init_transactions`.

        With a `token` it is that of a further writer in the transaction of another producer.
        """
        self.connection = connection
        self.writer: TransactionWriter | None = None
        self._token = token
        self.is_idempotent = is_idempotent
        self.transactional_id = transactional_id
        self.identity = NO_PRODUCER
        self._codec = codec
        self._sequences: dict[int, int] = {}

    def become(self, identity: ProducerIdentity) -> None:
        """Take an identity; with a new one sequence numbers begin at 0."""
        if identity != self.identity:
            self.identity = identity
            self._sequences.clear()

    def forget_identity(self) -> None:
        """Ask for a new identity before the next request: it is not known what the log has of the old one."""
        self.become(NO_PRODUCER)

    def obtain_identity(self) -> None:
        """Ask for a producer id if one is needed and there is none; with a token, join its transaction.

        Raises:
            TxnStoreError: the database refused or cannot be reached, or the transaction is over.
        """
        if self._token is not None:
            if self.writer is None:
                self.writer = self._join(self._token)
                self.become(self.writer.identity)
            return
        if self.is_idempotent and self.identity == NO_PRODUCER and self.transactional_id is None:
            coordinator = TransactionCoordinator(self.connection.store())
            self.become(coordinator.init_producer_id(None, retry_timeout_ms=TRY_TIMEOUT_MS).identity)

    def prepare(self, batches: Sequence[tuple[Batch, Topic]]) -> ProduceRequest:
        """Return batches with their sequence numbers, ready to be written.

        Raises:
            TxnStoreError: a record cannot be stored; no sequence number was used.
        """
        sequences = dict(self._sequences)
        appends = [self._prepare(batch, topic, sequences) for batch, topic in batches]
        self._sequences = sequences
        return ProduceRequest([batch for batch, _ in batches], appends)

    def take_back(self, request: ProduceRequest) -> None:
        """Give the sequence numbers of a request again that is known not to be in the log."""
        for item in reversed(request.appends):
            if item.batch.base_sequence != NO_SEQUENCE:
                self._sequences[item.partition_id] = item.batch.base_sequence

    def write(self, request: ProduceRequest) -> list[Appended]:
        """Append the request's batches, all or none.

        Raises:
            OutcomeUnknown: they may or may not be in the log; write the same request again.
            TxnStoreError: they are not.
        """
        store = self.connection.store()
        if self.writer is not None:
            return append_as_writer(store, self.writer, request.appends, retry_timeout_ms=TRY_TIMEOUT_MS)
        if self.transactional_id is not None:
            return TransactionCoordinator(store).append(
                self.transactional_id, self.identity, request.appends, retry_timeout_ms=TRY_TIMEOUT_MS
            )
        return store.write(
            lambda connection: append(connection, request.appends),
            wakes_readers=True,
            retry_timeout_ms=TRY_TIMEOUT_MS,
        )

    def _join(self, token: TransactionToken) -> TransactionWriter:
        store = self.connection.store()
        token.check_store(store)
        return join_transaction(store, token.transactional_id, token.transaction, retry_timeout_ms=TRY_TIMEOUT_MS)

    def _prepare(self, batch: Batch, topic: Topic, sequences: dict[int, int]) -> Append:
        partition_id = topic.partition_id(batch.partition)
        base_sequence = NO_SEQUENCE
        if self.is_idempotent:
            base_sequence = sequences.get(partition_id, 0)
            sequences[partition_id] = increment_sequence(base_sequence, len(batch.records))
        # Not zip(*records): an iterator for each record would keep the collector of garbage busy.
        records = batch.records
        encoded = encode_columns(
            RecordColumns(
                [record[KEY] for record in records],
                [record[VALUE] for record in records],
                [record[TIMESTAMP_MS] for record in records],
                [record[HEADERS] for record in records],
            ),
            codec=codec_for_topic(topic.settings["compression.type"], self._codec),
            producer=self.identity,
            base_sequence=base_sequence,
            is_transactional=self.transactional_id is not None or self._token is not None,
        )
        return Append(partition_id, encoded, topic.settings)
