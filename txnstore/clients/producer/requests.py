"""A producer's requests: batches with sequence numbers, the session that writes them, and the lanes they travel on.

A request is written in one database transaction, to one database.  It may be written again after an answer was lost:
the sequence numbers are given once, so the log recognises what it has.  A cluster of one has one lane, and the
sender's thread writes by itself.  With several databases each has a thread that writes, from its first request on: one
that is away, or slow, holds up nothing but its own records.

Records of a topic that nobody has looked up yet get their partition first: the topic is asked for, or created.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from txnstore.backoff import Backoff
from txnstore.clients.connection import RECENT_SECONDS, StoreConnection
from txnstore.clients.model.errors import KafkaError, KafkaException, kafka_error_of
from txnstore.clients.producer.queue import (
    KEY,
    PARTITION_UNASSIGNED,
    PLACES,
    SIZE_BYTES,
    Accumulator,
    Batch,
    PartitionQueue,
)
from txnstore.clients.producer.thread import Alarm, SenderStopped, SenderThread
from txnstore.clients.statistics import Traffic, traffic_facts
from txnstore.clients.worker import Worker, WorkerClosed
from txnstore.db.cluster.cluster import Cluster, repaired
from txnstore.db.identity import going_back
from txnstore.db.store import Store
from txnstore.errors import TxnStoreError, UnsupportedCompression
from txnstore.log.append import Append, Appended, append_at_once
from txnstore.log.codec import PackedColumns, encode_packed
from txnstore.log.columns import Codec, codec_for_topic, join_headers, pack_bytes, require_codec
from txnstore.log.partition_rows import new_producer
from txnstore.log.sequences import increment_sequence
from txnstore.log.topics import Topic
from txnstore.model import NO_PRODUCER, NO_SEQUENCE, ClientProcess, ProducerIdentity
from txnstore.transactions.tokens import TransactionToken

# What transactions take is imported with the producer that has them: `Producer` sees to that.
if TYPE_CHECKING:
    from txnstore.clients.configuration.configuration import Configuration
    from txnstore.clients.topic_directory import TopicDirectory
    from txnstore.log.partitioners import PartitionChoice
    from txnstore.transactions.coordinator import TransactionCoordinator
    from txnstore.transactions.writers import TransactionWriter

#: How long one try of the database goes on by itself; then the sender looks whether it is still wanted.
TRY_TIMEOUT_MS: Final = 500

#: Records that will not be delivered, and why.
Refused = tuple[Batch, KafkaError]


@dataclass(slots=True)
class AddedPartitions:
    """The partitions in other databases that the coordinator knows to be in the transaction; for several threads."""

    known: set[int] = field(default_factory=set)
    expected: set[int] = field(default_factory=set)
    """What is about to be written to: added together with the first of it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    written: set[int] = field(default_factory=set)
    """The partitions that records of the transaction are in, where there are several databases."""

    has_begun: bool = False
    """Whether the transaction is known to be open in the store."""
    asked_from: float = math.inf
    """From when on, by the monotonic clock, the coordinator is asked before each write: the time may be up."""


@dataclass(frozen=True, slots=True)
class ProduceRequest:
    """Batches that are written together, with their sequence numbers."""

    batches: Sequence[Batch]
    appends: Sequence[Append]
    producer: ProducerIdentity = NO_PRODUCER
    added: AddedPartitions = field(default_factory=AddedPartitions)
    """What the transaction of the request has; that of the next one is another."""

    @property
    def partition_ids(self) -> set[int]:
        """The partitions that it writes to."""
        return {item.partition_id for item in self.appends}


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
        client_id: str = "",
    ) -> None:
        """Begin without an identity: it is asked for with the first request, or by `init_transactions`.

        With a `token` it is that of a further writer in the transaction of another producer.  The `client_id` is for
        people.
        """
        self.connection = connection
        self.writer: TransactionWriter | None = None
        self._token = token
        self.is_idempotent = is_idempotent
        self.transactional_id = transactional_id
        self.identity = NO_PRODUCER
        self._codec = codec
        self._client_id = client_id
        self._sequences: dict[int, int] = {}
        self._added = AddedPartitions()
        self._last_offsets: dict[int, int] = {}
        self._written = Traffic()
        self.transaction_timeout_seconds = math.inf
        """How long a transaction may stay open."""

    @property
    def coordinator_database_id(self) -> int:
        """The number of the database that coordinates the producer's transactions."""
        name = self.transactional_id if self._token is None else self._token.transactional_id
        return self.connection.cluster().coordinator_id_of(name)

    @property
    def client(self) -> ClientProcess:
        """Who the producer is, for people who look for it."""
        return ClientProcess.here(self._client_id)

    @property
    def has_begun(self) -> bool:
        """Whether the transaction is known to be open in the store."""
        return self._added.has_begun

    @has_begun.setter
    def has_begun(self, has_begun: bool) -> None:
        self._added.has_begun = has_begun

    @property
    def written(self) -> set[int]:
        """The partitions that records of the transaction are in, where there are several databases."""
        return self._added.written

    def begin_transaction(self) -> None:
        """Take note that nothing has been added to the transaction that begins."""
        # In the store it begins later: a request from then on comes in time.
        self._added = AddedPartitions(asked_from=time.monotonic() + self.transaction_timeout_seconds)

    def become(self, identity: ProducerIdentity) -> None:
        """Take an identity; with a new one sequence numbers begin at 0."""
        if identity != self.identity:
            self.identity = identity
            self._sequences.clear()
            self.begin_transaction()

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
            controller = self.connection.cluster().controller
            self.become(controller.write(new_producer, retry_timeout_ms=TRY_TIMEOUT_MS))

    def prepare(self, batches: Sequence[tuple[Batch, Topic]]) -> ProduceRequest:
        """Return batches with their sequence numbers, ready to be written.

        Raises:
            TxnStoreError: a record cannot be stored; no sequence number was used.
        """
        sequences = dict(self._sequences)
        appends = [self._prepare(batch, topic, sequences) for batch, topic in batches]
        self._sequences = sequences
        return ProduceRequest([batch for batch, _ in batches], appends, self.identity, self._added)

    def expect(self, partition_ids: Collection[int]) -> None:
        """Let these partitions be added to the transaction at once, with the first request that writes to one."""
        self._added.expected.update(partition_ids)

    def take_back(self, request: ProduceRequest) -> None:
        """Give the sequence numbers of a request again that is known not to be in the log."""
        if request.producer != self.identity:
            return
        for item in reversed(request.appends):
            if item.batch.base_sequence != NO_SEQUENCE:
                self._sequences[item.partition_id] = item.batch.base_sequence

    def write(self, request: ProduceRequest) -> list[Appended]:
        """Append the request's batches, all or none, to the database where all of their partitions live.

        Raises:
            OutcomeUnknown: they may or may not be in the log; write the same request again.
            TxnStoreError: they are not.
        """
        cluster = self.connection.cluster()
        if cluster.is_alone:
            appended = self._write(cluster, cluster.controller, request)
        else:
            database_id = cluster.leader_of_partition(request.appends[0].partition_id)
            appended = repaired(cluster, database_id, lambda store: self._write(cluster, store, request))
            request.added.written.update(request.partition_ids)
        request.added.has_begun = True
        return appended

    def note_written(self, request: ProduceRequest) -> None:
        """Count a request that is in the log."""
        written = self._written
        written.requests += 1
        for item in request.appends:
            written.records += item.batch.record_count
            written.size_bytes += item.batch.size_bytes

    def facts(self) -> dict[str, Any]:
        """Return what the producer's statistics say of what it has written, and as whom."""
        return {
            **traffic_facts(written=self._written),
            "eos": {
                "idemp_state": "Assigned" if self.identity != NO_PRODUCER else "Init",
                "producer_id": self.identity.producer_id,
                "producer_epoch": self.identity.epoch,
            },
        }

    def note_places(self, appended: Sequence[Appended]) -> TxnStoreError | None:
        """Take note of where batches stand now, each once.

        Returns an error where an offset was given out before, for another record: the store has gone back to an older
        state, and does nothing more for this client.
        """
        last_offsets = self._last_offsets
        for place in appended:
            last_offset = last_offsets.get(place.partition_id, -1)
            if place.base_offset <= last_offset:
                cluster = self.connection.cluster()
                store = cluster.own(cluster.leader_of_partition(place.partition_id))
                return going_back(
                    store,
                    f"a record got the offset {place.base_offset} of partition id {place.partition_id}, where an"
                    f" earlier one of this producer had got {last_offset}",
                )
            last_offsets[place.partition_id] = place.last_offset
        return None

    def _write(self, cluster: Cluster, leader: Store, request: ProduceRequest) -> list[Appended]:
        if self.writer is not None:
            from txnstore.transactions.writers import append_as_writer

            store = cluster.coordinator_of(self.writer.transactional_id)
            return append_as_writer(store, self.writer, request.appends, cluster, retry_timeout_ms=TRY_TIMEOUT_MS)
        if self.transactional_id is None:
            return append_at_once(leader, request.appends, request.producer, retry_timeout_ms=TRY_TIMEOUT_MS)
        from txnstore.transactions.coordinator import TransactionCoordinator

        coordinator = TransactionCoordinator(cluster.coordinator_of(self.transactional_id), cluster)
        if cluster.is_alone:
            return coordinator.append(
                self.transactional_id, request.producer, request.appends, retry_timeout_ms=TRY_TIMEOUT_MS
            )
        self._add(coordinator, self.transactional_id, request)
        return coordinator.append(
            self.transactional_id,
            request.producer,
            request.appends,
            added=request.added.known,
            retry_timeout_ms=TRY_TIMEOUT_MS,
        )

    @staticmethod
    def _add(coordinator: TransactionCoordinator, transactional_id: str, request: ProduceRequest) -> None:
        """Let the coordinator know of all partitions that are about to be written to, in one database transaction."""
        added = request.added
        # Of several databases that are written to at once, one asks for all of them.
        with added.lock:
            if request.partition_ids <= added.known:
                if time.monotonic() > added.asked_from:
                    coordinator.check_in_time(transactional_id, request.producer, retry_timeout_ms=TRY_TIMEOUT_MS)
                return
            wanted = sorted(added.expected | request.partition_ids)
            coordinator.add_partitions(
                transactional_id, request.producer, wanted, added=added.known, retry_timeout_ms=TRY_TIMEOUT_MS
            )

    def _join(self, token: TransactionToken) -> TransactionWriter:
        from txnstore.transactions.writers import join_transaction

        cluster = self.connection.cluster()
        store = cluster.coordinator_of(token.transactional_id)
        token.check_store(store)
        return join_transaction(
            store,
            token.transactional_id,
            token.transaction,
            cluster,
            client=self.client,
            retry_timeout_ms=TRY_TIMEOUT_MS,
        )

    def _prepare(self, batch: Batch, topic: Topic, sequences: dict[int, int]) -> Append:
        partition_id = topic.partition_id(batch.partition)
        base_sequence = NO_SEQUENCE
        if self.is_idempotent:
            base_sequence = sequences.get(partition_id, 0)
            sequences[partition_id] = increment_sequence(base_sequence, batch.record_count)
        codec = codec_for_topic(topic.settings["compression.type"], self._codec)
        require_codec(codec)
        encoded = encode_packed(
            PackedColumns(
                pack_bytes(batch.keys, "key"),
                pack_bytes(batch.values, "value"),
                batch.timestamps_ms,
                join_headers(batch.packed_headers),
            ),
            codec=codec,
            producer=self.identity,
            base_sequence=base_sequence,
            is_transactional=self.transactional_id is not None or self._token is not None,
        )
        return Append(partition_id, encoded, topic.settings)


def make_session(configuration: Configuration, connection: StoreConnection) -> ProducerSession:
    """Return the session of a producer with this configuration."""
    return ProducerSession(
        connection,
        is_idempotent=configuration["enable.idempotence"],
        transactional_id=configuration["transactional.id"] or None,
        codec=_usable_codec(configuration),
        token=configuration["txnstore.transaction.token"],
        client_id=configuration["client.id"],
    )


def _usable_codec(configuration: Configuration) -> Codec:
    """Return the configured codec, or none where its package is missing: the records are the same."""
    codec = Codec[configuration["compression.type"].upper()]
    try:
        require_codec(codec)
    except UnsupportedCompression as error:
        configuration.logger.warning(
            "compression.type=%s: %s; records are not compressed",
            codec.label,
            error,
            extra={"event": "setting_without_effect", "setting": "compression.type"},
        )
        return Codec.NONE
    return codec


#: The number that stands for all while there is one database.
ALONE: Final = -1


@dataclass(slots=True, eq=False)
class InFlight:
    """Batches that have left the queue and are not reported yet."""

    lane: Lane
    batches: Sequence[Batch]
    request: ProduceRequest | None = None
    is_uncertain: bool = False
    """Whether the log may have them."""

    has_fresh_topics: bool = False
    has_fresh_identity: bool = False
    is_given_up: bool = False
    """Whether a purge named them: they are dropped as soon as nobody writes them."""

    @property
    def queued_seconds(self) -> float:
        """When the first of their records was queued, by the monotonic clock."""
        return self.batches[0].queued_seconds[0]

    def part(self, batches: Sequence[Batch]) -> InFlight:
        """Return some of the batches, or parts of them, which were refused together and go by themselves."""
        return InFlight(self.lane, batches, has_fresh_topics=self.has_fresh_topics, is_given_up=self.is_given_up)


@dataclass(slots=True, eq=False)
class Lane:
    """The requests to one database; everything here is done under the producer's lock, but for the write itself."""

    database_id: int
    backoff: Backoff
    _helper: Worker | None = None
    in_flight: deque[InFlight] = field(default_factory=deque)
    _written: InFlight | None = None
    _answer: Future[Any] | None = None

    @property
    def is_inline(self) -> bool:
        """Whether the sender's thread writes by itself."""
        return self._helper is None

    @property
    def is_writing(self) -> bool:
        """Whether its thread is at work."""
        return self._answer is not None

    @property
    def has_answer(self) -> bool:
        """Whether its thread has done what it was given."""
        return self._answer is not None and self._answer.done()

    def is_being_written(self, in_flight: InFlight) -> bool:
        """Return whether the lane's thread has the request, or its answer is not looked at yet."""
        return in_flight is self._written

    def write(self, in_flight: InFlight, work: Callable[[], Any], alarm: Alarm) -> None:
        """Let the lane's thread do `work`; the `alarm` rings once it is done.

        Raises:
            SenderStopped: the producer was closed.
        """
        assert self._helper is not None
        assert self._answer is None, "one request at a time, so that none overtakes another"

        def notify(_: object) -> None:
            with alarm.lock:
                alarm.ring()

        try:
            answer = self._helper.submit(work)
        except WorkerClosed:
            # And with it the producer.
            raise SenderStopped from None
        except Exception:
            # No thread can be started, for one.
            self.backoff.back_off()
            raise
        self._written, self._answer = in_flight, answer
        answer.add_done_callback(notify)

    def take_answer(self) -> tuple[InFlight, Future[Any]]:
        """Return what was written, and the answer that has come."""
        assert self._written is not None
        assert self._answer is not None
        taken = self._written, self._answer
        self._written = self._answer = None
        return taken


class Lanes:
    """The lanes of one sender, made as they are needed."""

    def __init__(self, thread: SenderThread) -> None:
        """Begin with the lane of a cluster of one, whose pauses are the thread's own."""
        self._thread = thread
        self.alone = Lane(ALONE, thread.backoff)
        self._lanes: dict[int, Lane] = {}

    def __iter__(self) -> Iterator[Lane]:
        """Return all lanes."""
        yield self.alone
        yield from self._lanes.values()

    def of(self, database_id: int) -> Lane:
        """Return the lane to a database of several."""
        lane = self._lanes.get(database_id)
        if lane is None:
            lane = self._lanes[database_id] = Lane(
                database_id, self._thread.backoff.another(), self._thread.new_helper(f"database-{database_id}")
            )
        return lane

    @property
    def busy(self) -> set[int]:
        """The leaders whose lanes have something in flight."""
        return {lane.database_id for lane in self if lane.in_flight}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in flight."""
        return not self.alone.in_flight and not any(lane.in_flight for lane in self._lanes.values())

    @property
    def all_in_flight(self) -> list[InFlight]:
        """Everything that is in flight."""
        return [in_flight for lane in self for in_flight in lane.in_flight]

    @property
    def is_giving_up(self) -> bool:
        """Whether something that a purge named is not dropped yet."""
        return any(in_flight.is_given_up for lane in self for in_flight in lane.in_flight)

    def take_out(self, in_flight: InFlight) -> None:
        """It is in flight no more; nothing happens if it was not."""
        with contextlib.suppress(ValueError):
            in_flight.lane.in_flight.remove(in_flight)


class DeliveryListener(Protocol):
    """Who hears of deliveries: the producer's transaction, if it has one."""

    def writing(self) -> None:
        """Records are about to be written: from now on the transaction may be open in the store."""
        ...

    def delivery_failed(self, record_count: int, error: KafkaError) -> None:
        """Records will not be delivered, for this reason."""
        ...

    def records_refused(self, error: KafkaError) -> None:
        """The store does not take a record."""
        ...

    def transaction_failed(self, error: TxnStoreError) -> None:
        """The transaction of the records cannot go on."""
        ...


class UnassignedTopics:
    """Looks up topics of records without a partition, which creates them if allowed; for one thread at a time."""

    def __init__(self, accumulator: Accumulator, directory: TopicDirectory, choice: PartitionChoice) -> None:
        """Move records within `accumulator` from their topic to their partition."""
        self.directory = directory
        self._accumulator = accumulator
        self._choice = choice

    def look_up(self, retry_later: Callable[[TxnStoreError], None]) -> Iterator[Refused]:
        """Look up every topic that records wait for; yield those that will not be delivered, with the reason.

        What cannot be looked up now is told to `retry_later`.
        """
        with self._accumulator.changed:
            names = self._accumulator.unknown_topics
        for name in names:
            try:
                topic = self.directory.ensure(name)
            except TxnStoreError as error:
                if error.retriable:
                    retry_later(error)
                    continue
                yield from self._refuse_all(name, kafka_error_of(error))
            else:
                yield from self._assign(topic)

    def _refuse_all(self, name: str, error: KafkaError) -> Iterator[Refused]:
        with self._accumulator.changed:
            queue = self._accumulator.unassigned(name)
            batch = None if queue is None else queue.first(queue.record_count)
            self._accumulator.take_unassigned(name)
        if batch is not None:
            yield batch, error

    def _assign(self, topic: Topic) -> Iterator[Refused]:
        refused: list[Batch] = []
        failure: Exception | None = None
        moved_count = 0
        now_seconds = time.monotonic()
        partition_count = len(topic.partition_ids)
        with self._accumulator.changed:
            queue = self._accumulator.unassigned(topic.name)
            if queue is None:
                return
            try:
                for index, asked_for in enumerate(queue.asked_for):
                    following = index + 1
                    places = queue.places[index * PLACES : following * PLACES]
                    partition = asked_for
                    if partition == PARTITION_UNASSIGNED:
                        partition = self._choice.choose(topic.name, places[KEY], partition_count, now_seconds)
                    if 0 <= partition < partition_count:
                        self._accumulator.put_assigned(topic, partition, places)
                    else:
                        refused.append(Batch.of(topic.name, asked_for, places))
                    moved_count = following
            except Exception as error:  # noqa: BLE001 - the rest stays where it was, and is tried again
                failure = error
                _drop(queue, moved_count)
            else:
                self._accumulator.take_unassigned(topic.name)
        for batch in refused:
            yield batch, KafkaError(KafkaError._UNKNOWN_PARTITION)
        if failure is not None:
            raise failure


class LookUp:
    """A look-up in the background, so that a controller that is away holds up nothing but what it is asked."""

    def __init__(self, thread: SenderThread) -> None:
        """Look up for the sender on `thread`, which is woken by the answer."""
        self.backoff = thread.backoff.another()
        self._thread = thread
        self._helper: Worker | None = None
        self._answer: Future[list[Refused]] | None = None
        self._trouble: list[TxnStoreError] = []

    @property
    def is_running(self) -> bool:
        """Whether one is under way, or its answer is not taken yet."""
        return self._answer is not None

    @property
    def has_answer(self) -> bool:
        """Whether one has come to its end."""
        return self._answer is not None and self._answer.done()

    def start(self, topics: UnassignedTopics) -> None:
        """Begin to look up whatever records wait for."""

        def notify(_: object) -> None:
            with self._thread.alarm.lock:
                self._thread.alarm.ring()

        if self._helper is None:
            self._helper = self._thread.new_helper("topics")
        self._trouble = []
        self._answer = self._helper.submit(lambda: list(topics.look_up(self._trouble.append)))
        self._answer.add_done_callback(notify)

    def take_answer(self) -> list[Refused]:
        """Return what will not be delivered, if an answer has come; a pause follows where one could not be had."""
        if not self.has_answer:
            return []
        assert self._answer is not None
        answer, self._answer = self._answer, None
        if self._trouble:
            self.backoff.retry_later(self._trouble[0])
        else:
            self.backoff.succeeded()
        return answer.result()


def timed_out(thread: SenderThread, connection: StoreConnection, hint: str = "retry call to resume") -> KafkaException:
    """Return what a call raises whose time is up: librdkafka's text, and why the database is tried again, if it is."""
    recent_seconds = time.monotonic() - RECENT_SECONDS
    trouble = thread.backoff.trouble or connection.trouble_since(recent_seconds)
    cause = "" if trouble is None else f": {trouble}"
    reason = f"Timed out waiting for operation to finish, {hint}{cause}"
    return KafkaException(KafkaError(KafkaError._TIMED_OUT, reason, retriable=True))


def _drop(queue: PartitionQueue, record_count: int) -> None:
    """Take out the first records, one by one: that takes no memory."""
    for _ in range(record_count):
        queue.size_bytes -= queue.places[SIZE_BYTES]
        del queue.places[:PLACES]
        del queue.asked_for[:1]
