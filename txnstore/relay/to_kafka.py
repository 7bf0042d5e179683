"""The relay to Kafka: which partitions have news, their turns, and pages of records shipped with the position.

Each partition has a producer with a transactional id of its own, so partitions take their turns side by side, and a
relay that is started while another one works fences it partition by partition.  The position is the store's offset of
the next record, committed for the relay's group in the Kafka transaction that holds the records before it.  So Kafka
has both or neither, and the next relay reads it back after `init_transactions`, which has fenced the relay before
and ended what it had left open.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection

from txnstore.clients.overdue_help import OverdueHelp
from txnstore.db.backend import Waiter
from txnstore.db.identity import check_original
from txnstore.db.store import Store
from txnstore.errors import InvalidConfiguration, OffsetOutOfRange, UnknownTopicOrPartition
from txnstore.log.bounds import Bounds, read_bounds
from txnstore.log.fetch import Page, fetch
from txnstore.log.topics import Topic, find_topics, list_topics
from txnstore.model import IsolationLevel, PartitionName
from txnstore.relay.errors import Failing, KafkaUnavailable, Patience, RelayFailed, RelayFenced, may_pass
from txnstore.relay.kafka_cluster import ANSWER_SECONDS, TRANSACTION_TIMEOUT_MS, KafkaCluster, is_own
from txnstore.relay.options import (
    IsStopped,
    OnGap,
    RelayOptions,
    RelayStart,
    check_leaders,
    check_relay_name,
    group_of,
    relay_id_to,
    start_id_of,
    transactional_id_of,
)
from txnstore.relay.positions import (
    RelayPosition,
    begin_relay_positions,
    check_one_way,
    forget_former_position,
    read_relay_positions,
)
from txnstore.relay.turns import Turns

_log = logging.getLogger(__name__)

#: What one Kafka transaction holds at most, but for a single batch that is larger.
PAGE_RECORDS_MAX: Final = 5_000
PAGE_BYTES_MAX: Final = 4 * 1024 * 1024
#: Kafka forgets positions that nobody has committed for a week (offsets.retention.minutes).
REFRESH_SECONDS: Final = 12 * 3600.0

_TRANSACTION_SECONDS: Final = TRANSACTION_TIMEOUT_MS / 1000
_POLL_EVERY: Final = 1_000
_QUEUE_FULL_SECONDS: Final = 0.1


class ShippedPartition:
    """One partition; for one thread at a time."""

    def __init__(
        self,
        store: Store,
        cluster: KafkaCluster,
        partition: PartitionName,
        *,
        partition_id: int,
        topic_uuid: str,
        name: str,
        relay_id: str,
        first_offset: int | None,
        on_gap: OnGap,
        is_stopped: IsStopped,
    ) -> None:
        """Connect to nothing yet. Without a position in Kafka it begins at `first_offset`, or at the first record."""
        self.partition = partition
        self.partition_id = partition_id
        #: The offset of the next record; None until it was read back from Kafka.
        self.position: int | None = None
        self._store = store
        self._cluster = cluster
        self.topic_uuid = topic_uuid
        self._name = name
        self._relay_id = relay_id
        self._first_offset = first_offset
        self._on_gap = on_gap
        self._is_stopped = is_stopped
        self._producer: Any = None
        #: The first record that Kafka has refused, or whose batch it has, and why.
        self._refused: tuple[int, Any] | None = None
        self._committed_at = 0.0

    def is_due(self, end_offset: int) -> bool:
        """Return whether there is something to do up to this offset."""
        if self.position is None or self.position < end_offset:
            return True
        return time.monotonic() - self._committed_at > REFRESH_SECONDS

    def turn(self, end_offset: int, consumer: Any) -> int:
        """Ship a page that ends about there; return how many records that were.

        Raises:
            RelayFenced, RelayFailed: it cannot go on.
            KafkaUnavailable, TxnStoreError: call `forget`, then try again.
        """
        if self.position is None:
            self.position = self._open(consumer)
        page = self._page(self.position, end_offset)
        count = self._commit(page, page.next_offset, consumer)
        self.position = page.next_offset
        return count

    def forget(self) -> None:
        """Drop the producer, whatever it was doing: Kafka knows the position."""
        # Not `close`, which would first end what is open, and complain if it cannot.
        self._producer = None
        self.position = None

    def close(self) -> None:
        """Close the producer between two turns."""
        if self._producer is not None and self.position is not None:
            self._producer.close()
        self.forget()

    def _open(self, consumer: Any) -> int:
        cluster = self._cluster
        self._producer = cluster.producer(transactional_id_of(self._name, *_pair(self.partition)))
        with cluster.translated(f"taking over {self.partition}"):
            cluster.in_slices(self._producer.init_transactions, _TRANSACTION_SECONDS, self._is_stopped)
        (answer,) = cluster.committed(consumer, [_pair(self.partition)])
        self._committed_at = time.monotonic()
        bounds = self._bounds()
        known = self._store.read(lambda connection: read_relay_positions(connection, self._relay_id))
        if answer.offset < 0:
            position = self._first_position(bounds, consumer, has_begun=self.partition in known)
        elif topic_uuid_of(answer, self._store.store_uuid, self._name) == self.topic_uuid:
            position = int(answer.offset)
        else:
            position = self._after_gap(bounds, "its topic has been deleted and recreated in the store")
        if self.partition not in known or known[self.partition].topic_uuid != self.topic_uuid:
            # After Kafka has it, and also for a relay that died in between: a position that is lost later is noticed.
            self._store.write(partial(self._begin, position))
        return self._within(bounds, position)

    def _begin(self, position: int, connection: Connection) -> None:
        # That of the topic before goes with that one: it does not stand for this one.
        forget_former_position(connection, self._relay_id, self.partition, self.topic_uuid)
        begun = {self.partition: RelayPosition(self.topic_uuid, position)}
        begin_relay_positions(connection, self._relay_id, begun)

    def _first_position(self, bounds: Bounds, consumer: Any, *, has_begun: bool) -> int:
        """Return where the relay begins, and have Kafka know it."""
        if has_begun:
            raise RelayFailed(
                f"{self.partition}: this relay has worked before, but Kafka has lost its position, the committed"
                f" offset of group {group_of(self._name)}: it is forgotten after offsets.retention.minutes without a"
                " relay, and when the topic is deleted in Kafka. A relay with --topic"
                f" {self.partition.topic} --name OTHER ships it from its first record, and this one goes on with"
                " --topic for each of the other topics"
            )
        # One that was written earlier is not moved on to what is left: that is a gap, which `_within` finds.
        position = bounds.log_start_offset if self._first_offset is None else self._first_offset
        self._commit(None, position, consumer)
        return position

    def _within(self, bounds: Bounds, position: int) -> int:
        if position < bounds.log_start_offset:
            why = f"its log begins at {bounds.log_start_offset}, after the relay's position {position}"
            return self._after_gap(bounds, why)
        self.check_end(position, bounds.high_watermark)
        return position

    def check_end(self, position: int, end_offset: int) -> None:
        """Return if the log goes on from the position.

        Raises:
            RelayFailed: it ends before: what comes there next would be taken for what was copied.
        """
        if position > end_offset:
            raise RelayFailed(
                f"{self.partition}: the relay has copied up to {position}, but the log ends at {end_offset}: is this an"
                " older copy of the store?"
            )

    def _after_gap(self, bounds: Bounds, why: str) -> int:
        if self._on_gap is OnGap.ERROR:
            raise RelayFailed(f"{self.partition}: {why}; --on-gap earliest goes on with the first record that is left")
        _log.warning(
            "%s: %s; going on at %s",
            self.partition,
            why,
            bounds.log_start_offset,
            extra={"event": "relay_gap", "partition": str(self.partition), "offset": bounds.log_start_offset},
        )
        return bounds.log_start_offset

    def _page(self, position: int, end_offset: int) -> Page:
        try:
            return self._fetch(position, end_offset)
        except OffsetOutOfRange:
            self.position = self._within(self._bounds(), position)
            return self._fetch(self.position, end_offset)

    def _fetch(self, position: int, end_offset: int) -> Page:
        pages = self._store.read(
            lambda connection: fetch(
                connection,
                {self.partition_id: position},
                records_max=PAGE_RECORDS_MAX,
                bytes_max=PAGE_BYTES_MAX,
                end_offsets={self.partition_id: end_offset},
            )
        )
        return pages[self.partition_id]

    def _bounds(self) -> Bounds:
        bounds = self._store.read(lambda connection: read_bounds(connection, [self.partition_id]))
        return bounds[self.partition_id]

    def _commit(self, page: Page | None, next_offset: int, consumer: Any) -> int:
        """Give Kafka the records and the position after them; return how many records."""
        cluster, producer = self._cluster, self._producer
        self._refused = None
        count = 0
        began = time.time()
        try:
            producer.begin_transaction()
            if page is not None and self.position is not None:
                count = self._produce(page, self.position)
            position = cluster.library.TopicPartition(
                *_pair(self.partition), next_offset, metadata=f"{self._store.store_uuid} {self.topic_uuid}"
            )
            group = consumer.consumer_group_metadata()
            cluster.in_slices(
                lambda timeout: producer.send_offsets_to_transaction([position], group, timeout),
                _TRANSACTION_SECONDS,
                self._is_stopped,
            )
            cluster.in_slices(producer.commit_transaction, _TRANSACTION_SECONDS, self._is_stopped)
        except cluster.library.KafkaException as exception:
            error = self._error(exception.args[0], next_offset)
            # By the clock that goes on while the machine sleeps.
            open_seconds = time.time() - began
            if isinstance(error, RelayFenced) and open_seconds > _TRANSACTION_SECONDS:
                error = RelayFailed(
                    f"{self.partition}: a transaction was open for {open_seconds:.0f} seconds, and Kafka aborts one"
                    f" after {_TRANSACTION_SECONDS:.0f}: something kept the relay from working. It ends, because"
                    " another one of this name may have taken over; started again, it goes on from what was committed",
                    may_pass=True,
                )
            raise error from None
        self._committed_at = time.monotonic()
        return count

    def _error(self, error: Any, next_offset: int) -> Exception:
        """Return why a transaction failed: the report of a record says more than the call that came after it."""
        # What is fatal, poll raises, too.
        with suppress(self._cluster.library.KafkaException):
            self._producer.poll(0)
        if self._refused is None:
            return self._cluster.error(error, f"{self.partition}, up to offset {next_offset}")
        offset, why = self._refused
        return self._cluster.error(why, f"{self.partition}, from offset {offset} on")

    def _produce(self, page: Page, position: int) -> int:
        count = 0
        for batch in page.batches:
            for offset, timestamp_ms, key, value, headers in batch.rows(position):
                record: dict[str, Any] = {
                    "key": key,
                    "partition": self.partition.partition,
                    # librdkafka takes 0 as the present time.
                    "timestamp": timestamp_ms or 1,
                    "headers": list(headers) or None,
                    "on_delivery": partial(self._delivered, offset),
                }
                self._produce_one(value, record)
                count += 1
                if count % _POLL_EVERY == 0:
                    self._producer.poll(0)
        return count

    def _produce_one(self, value: bytes | None, record: dict[str, Any]) -> None:
        deadline = time.monotonic() + _TRANSACTION_SECONDS
        while True:
            try:
                self._producer.produce(self.partition.topic, value, **record)
            except BufferError:
                if self._is_stopped() or time.monotonic() > deadline:
                    raise KafkaUnavailable(f"{self.partition}: Kafka accepts no more records") from None
                self._producer.poll(_QUEUE_FULL_SECONDS)
            else:
                return

    def _delivered(self, offset: int, error: Any, _: Any) -> None:
        """Note why Kafka refused a record: the transaction says only that it did."""
        kinds = self._cluster.library.KafkaError
        purged = kinds._PURGE_QUEUE, kinds._PURGE_INFLIGHT
        if error is not None and self._refused is None and error.code() not in purged:
            self._refused = offset, error


def topic_uuid_of(position: Any, store_uuid: str, name: str) -> str:
    """Return which topic of the store a position is of that was committed under this name.

    Raises:
        RelayFailed: another store's relay has committed it.
    """
    of_store, _, topic_uuid = (position.metadata or "").partition(" ")
    if of_store != store_uuid:
        raise RelayFailed(
            f"{PartitionName(position.topic, position.partition)}: the committed offset of group {group_of(name)} in"
            " Kafka was not written by a relay of this store; choose another --name"
        )
    return str(topic_uuid)


def _pair(partition: PartitionName) -> tuple[str, int]:
    return partition.topic, partition.partition


def _find_each(connection: Connection, names: Sequence[str]) -> tuple[list[Topic], dict[str, Exception]]:
    found: list[Topic] = []
    errors: dict[str, Exception] = {}
    for name in names:
        try:
            found += find_topics(connection, [name])
        except InvalidConfiguration as error:
            errors[name] = InvalidConfiguration(f"its settings in the store cannot be read: {error}")
    return found, errors


#: How long turns are waited for, together, before it looks for news of partitions that have none.
_ROUND_SECONDS: Final = 0.1
#: How often the relay looks for new topics and partitions.
LOOK_AGAIN_SECONDS: Final = 5.0
#: How long a topic that comes up is waited for until Kafka has it; after that the next look sees whether it is there.
_CREATION_SECONDS: Final = 2.0
#: How long it waits for news before it looks whether it is to end.
_WAIT_MS: Final = 250


class ToKafka:
    """Ships topics of a store to a Kafka cluster, each record once."""

    def __init__(self, store: Store, cluster: KafkaCluster, options: RelayOptions) -> None:
        """Nothing happens before `run`.

        Raises:
            RelayFailed: the relay cannot have this name.
        """
        self._store = store
        self._cluster = cluster
        self._options = options
        self._name = check_relay_name(options.name or store.store_uuid)
        self._relay_id = ""
        self._shipped: dict[PartitionName, ShippedPartition] = {}
        self._trouble: dict[PartitionName, Patience] = {}
        self._looking = Patience("looking for news", self._patience_seconds)
        self._asking = Patience("asking Kafka for new topics", None)
        self._looked_at: float | None = None
        #: Why which topics are left out for now, and what is told of it.
        self._left_out: dict[str, Exception] = {}
        self._without: dict[str, Patience] = {}
        self._overdue = OverdueHelp(lambda: store)
        self._turns = Turns()
        self._stop = threading.Event()
        self._is_over = False
        self.shipped_count = 0

    def run(self, stop: threading.Event, failing: Failing = lambda _: None) -> int:
        """Ship until `stop` is set, or with `once` up to the ends of now; return how many records were shipped.

        `failing` hears of the error that ends it, before it waits for turns and closes its clients.

        Raises:
            RelayFenced: another relay of this name has taken over.
            RelayFailed: Kafka cannot be reached at the start, it refuses a record, or records or a topic are gone, for
                example.
            StoreCopied: the store is a copy, whose relay would take the place of the original's.
            TxnStoreError: the store refuses.
        """
        self._stop = stop
        check_original(self._store)
        try:
            self._relay_id = relay_id_to(self._cluster.cluster_id(), self._name)
            self._look(must_be_there=True)
        except KafkaUnavailable as error:
            raise RelayFailed(str(error), may_pass=True) from None
        ends = None
        if self._options.once:
            # The second look comes after the end of transactions whose time is up.
            self._ends()
            ends = self._ends()
        consumer = self._cluster.consumer(group_of(self._name))
        waiter = self._store.waiter()
        try:
            try:
                with self._telling(failing):
                    self._ship(consumer, waiter, ends)
            finally:
                # The turns that are under way need not wait for Kafka any more.
                self._is_over = True
                self._turns.close()
            with self._telling(failing):
                self._finish_turns()
        finally:
            waiter.close()
            for shipped in self._shipped.values():
                shipped.close()
            consumer.close()
        return self.shipped_count

    @contextmanager
    def _telling(self, failing: Failing) -> Iterator[None]:
        try:
            yield
        except UnknownTopicOrPartition as error:
            told = self._about_deleted_topics() or error
            failing(told)
            raise told from None
        except Exception as error:
            failing(error)
            raise

    def _ship(self, consumer: Any, waiter: Waiter, ends: Mapping[int, int] | None) -> None:
        while not self._stop.is_set():
            is_busy = self._round(consumer, ends)
            if ends is not None and not len(self._turns) and self._has_reached(ends):
                self._check_none_left_out()
                break
            if not is_busy:
                waiter.wait(_WAIT_MS)

    def _is_ending(self) -> bool:
        return self._is_over or self._stop.is_set()

    def _about_deleted_topics(self) -> RelayFailed | None:
        """Return which topics are gone; None if all are there."""
        topics, unknown = self._topics()
        there = {topic.topic_uuid for topic in topics}
        gone = sorted(
            {
                shipped.partition.topic
                for shipped in self._shipped.values()
                if shipped.topic_uuid not in there and shipped.partition.topic not in unknown
            }
        )
        if not gone:
            return None
        return RelayFailed(
            f"topic {', '.join(gone)} was deleted in the store while it was shipped; started again, the relay ships the"
            " others",
            may_pass=True,
        )

    def _round(self, consumer: Any, ends: Mapping[int, int] | None) -> bool:
        """Give each partition that has news, and no turn, a turn; return whether to look again at once."""
        shipped_before = self.shipped_count
        self._finish_turns()
        try:
            if ends is None:
                self._look_again()
            reached = self._ends()
        except Exception as error:
            if not may_pass(error):
                raise
            self._looking.met(error)
            self._stop.wait(self._looking.left_seconds())
            return False
        self._looking.passed()
        # Not those whose turns have ended since the look: they may have read of an end that comes after it.
        idle = [shipped for partition, shipped in self._shipped.items() if not self._turns.has(partition)]
        for shipped in idle:
            # A store that was put back to an earlier state may have grown beyond the position by the next start.
            shipped.check_end(shipped.position or 0, reached[shipped.partition_id])
        limits = reached if ends is None else {id_: min(reached[id_], end) for id_, end in ends.items()}
        due = [
            (shipped, limits[shipped.partition_id])
            for shipped in idle
            if shipped.partition_id in limits
            and self._trouble[shipped.partition].is_over()
            and shipped.is_due(limits[shipped.partition_id])
        ]
        for shipped, limit in due:
            self._begin_turn(shipped, limit, consumer)
        self._turns.wait(_ROUND_SECONDS, for_all=True)
        self._finish_turns()
        return self.shipped_count > shipped_before or bool(self._turns.brisk())

    def _finish_turns(self) -> None:
        self.shipped_count += self._turns.finish()

    def _begin_turn(self, shipped: ShippedPartition, end_offset: int, consumer: Any) -> None:
        """Begin a turn once there is a place for it, or leave it to the next round."""
        partition = shipped.partition
        is_in_trouble = self._trouble[partition].is_on
        turn = partial(self._turn, shipped, end_offset, consumer)
        while not self._stop.is_set():
            if self._turns.begin(partition, turn, is_in_trouble=is_in_trouble):
                # The others come first in the next round: there may not be places for all.
                self._shipped[partition] = self._shipped.pop(partition)
                return
            if is_in_trouble or not self._turns.brisk():
                return
            self._turns.wait(_ROUND_SECONDS, for_all=False)
            self._finish_turns()

    def _turn(self, shipped: ShippedPartition, end_offset: int, consumer: Any) -> int:
        trouble = self._trouble[shipped.partition]
        try:
            count = shipped.turn(end_offset, consumer)
        except Exception as error:
            shipped.forget()
            if not may_pass(error):
                raise
            if not self._is_ending():
                trouble.met(error)
            return 0
        trouble.passed()
        return count

    def _has_reached(self, ends: Mapping[int, int]) -> bool:
        return all(
            shipped.position is not None and shipped.position >= ends[shipped.partition_id]
            for shipped in self._shipped.values()
            if shipped.partition_id in ends
        )

    def _ends(self) -> dict[int, int]:
        ids = [shipped.partition_id for shipped in self._shipped.values()]
        if not ids:
            return {}
        self._overdue.help()
        bounds = self._store.read(lambda connection: read_bounds(connection, ids))
        for of in bounds.values():
            if of.last_stable_offset < of.high_watermark:
                self._overdue.held_back(of.partition_id, of.last_stable_offset)
            else:
                self._overdue.let_go(of.partition_id)
        return {id_: bounds[id_].end(IsolationLevel.READ_COMMITTED) for id_ in ids}

    def _look_again(self) -> None:
        """Look for what is new; that Kafka does not answer is in the way of nothing that is shipped already."""
        if self._asking.is_over():
            try:
                self._look(must_be_there=False)
            except KafkaUnavailable as error:
                self._asking.met(error)
            else:
                self._asking.passed()

    def _look(self, *, must_be_there: bool) -> None:
        """Find topics and partitions that are new in the store, and have them in Kafka."""
        now = time.monotonic()
        if self._looked_at is not None and now - self._looked_at < LOOK_AGAIN_SECONDS:
            return
        topics, unknown = self._topics()
        if must_be_there:
            gone = sorted(set(self._options.topics) - {topic.name for topic in topics} - unknown.keys())
            if gone:
                raise RelayFailed(f"there is no topic {', '.join(gone)} in the store")
        new = [topic for topic in topics if self._is_new(topic)]
        for topic in new:
            check_leaders(topic, self._store.database_id)
        if new:
            counts, errors = self._cluster.partition_counts([topic.name for topic in new])
            self._check_fit(new, counts)
            self._check_name([topic for topic in new if topic.name in counts])
            # Before anything of it is in Kafka, where a relay from Kafka would find it.
            try:
                first_offsets = self._store.write(partial(self._begin, new))
            except UnknownTopicOrPartition:
                if must_be_there:
                    raise
                # One was deleted a moment after it came up. The next look does not find it.
                return
            missing = [topic for topic in new if topic.name not in counts and topic.name not in errors]
            errors |= self._created(missing, ANSWER_SECONDS * 2 if must_be_there else _CREATION_SECONDS)
            for topic in new:
                if topic.name not in errors:
                    self._add(topic, first_offsets)
            unknown |= errors
        found = {topic.name for topic in topics}
        self._leave_out(unknown, found, are_asked_for=must_be_there and bool(self._options.topics))
        self._looked_at = now

    def _leave_out(self, errors: Mapping[str, Exception], found: Collection[str], *, are_asked_for: bool) -> None:
        """Go on without topics in which something is wrong, and tell of them."""
        for name in self._left_out.keys() - errors.keys():
            del self._left_out[name]
            trouble = self._without.pop(name)
            if name in found:
                # Else it was deleted.
                trouble.passed()
        self._left_out.update(errors)
        if are_asked_for:
            self._check_none_left_out()
        for name, error in errors.items():
            self._without.setdefault(name, Patience(f"topic {name}", None)).met(error)

    def _check_none_left_out(self) -> None:
        """Raise RelayFailed for a topic that is left out, if there is one: rather for one that stays so."""
        for name, error in sorted(self._left_out.items(), key=lambda item: (may_pass(item[1]), item[0])):
            hint = ""
            if isinstance(error, RelayFailed):
                # Another one of this name may have it in Kafka by now, so nothing is taken back.
                hint = (
                    ". Started again, this relay goes on with it; if it is given up, a relay from Kafka may copy the"
                    f" topic after: txnstore relay --forget {self._relay_id} --topic {name}"
                )
            raise RelayFailed(f"topic {name}: {error}{hint}", may_pass=may_pass(error))

    def _check_name(self, topics: Sequence[Topic]) -> None:
        """Refuse a name under which another store's relay ships one of the topics, before that relay is fenced."""
        pairs = [(topic.name, number) for topic in topics for number in range(len(topic.partition_ids))]
        if not pairs:
            return
        # Not waiting for the end of a transaction that a relay has left open: taking over ends it.
        consumer = self._cluster.consumer(group_of(self._name), isolation="read_uncommitted")
        try:
            for position in self._cluster.committed(consumer, pairs):
                if position.offset >= 0:
                    topic_uuid_of(position, self._store.store_uuid, self._name)
        finally:
            consumer.close()

    def _topics(self) -> tuple[list[Topic], dict[str, Exception]]:
        """Return the topics of the store, and why others cannot be read."""

        def find(connection: Connection) -> tuple[list[Topic], dict[str, Exception]]:
            # Kafka takes no records for its own topics.
            names = self._options.topics or [name for name in list_topics(connection) if not is_own(name)]
            try:
                return find_topics(connection, names), {}
            except InvalidConfiguration:
                return _find_each(connection, names)

        return self._store.read(find)

    def _is_new(self, topic: Topic) -> bool:
        return any(PartitionName(topic.name, number) not in self._shipped for number in range(len(topic.partition_ids)))

    def _check_fit(self, topics: Sequence[Topic], counts: Mapping[str, int]) -> None:
        """Refuse what would not fit into Kafka, which has this many partitions of what it has."""
        for topic in topics:
            count = len(topic.partition_ids)
            if counts.get(topic.name, count) < count:
                raise RelayFailed(
                    f"topic {topic.name} has {count} partitions, but only {counts[topic.name]} in Kafka: give it as"
                    " many there, or choose another topic"
                )

    def _created(self, topics: Sequence[Topic], wait_seconds: float) -> dict[str, Exception]:
        """Create what is missing in Kafka; return what is in the way of which."""
        counts = {topic.name: len(topic.partition_ids) for topic in topics}
        errors = self._cluster.create_topics(counts, wait_seconds) if counts else {}
        for name in counts.keys() - errors.keys():
            _log.info(
                "topic %s was created in Kafka with %s partitions",
                name,
                counts[name],
                extra={"event": "relay_topic_created", "topic": name, "count": counts[name]},
            )
        return errors

    @property
    def _patience_seconds(self) -> float | None:
        return self._options.patience_seconds if self._options.once else None

    def _begin(self, topics: Sequence[Topic], connection: Connection) -> dict[PartitionName, int]:
        """Write where the partitions begin, and return it for those that have no position in Kafka yet.

        It is written for all of them before Kafka has the topic, or is asked for a position: a relay from Kafka sees
        that this one has begun; and one that dies in between, or waits long for one of them, leaves out what the topic
        held then, no more and no less.
        """
        check_one_way(connection, self._relay_id, {topic.name for topic in topics})
        start_id = start_id_of(self._relay_id)
        begun = read_relay_positions(connection, start_id)
        former = {partition.topic for partition in begun}
        shipped = {position.topic_uuid for position in read_relay_positions(connection, self._relay_id).values()}
        is_latest = self._options.start is RelayStart.LATEST
        # What comes up while somebody relays, or beside what was relayed, has records that nobody has seen.
        bounds = read_bounds(connection, [id_ for topic in topics for id_ in topic.partition_ids])
        new = {}
        for topic in topics:
            is_unread = self._looked_at is not None or topic.name in former or topic.topic_uuid in shipped
            for number, partition_id in enumerate(topic.partition_ids):
                partition = PartitionName(topic.name, number)
                if partition in begun and begun[partition].topic_uuid == topic.topic_uuid:
                    continue
                if partition in begun:
                    forget_former_position(connection, start_id, partition, topic.topic_uuid)
                of = bounds[partition_id]
                first = of.log_start_offset if is_unread else of.last_stable_offset
                new[partition] = RelayPosition(topic.topic_uuid, first)
        if new:
            begin_relay_positions(connection, start_id, new)
        begun |= new
        return {partition: position.next_offset for partition, position in begun.items()} if is_latest else {}

    def _add(self, topic: Topic, first_offsets: Mapping[PartitionName, int]) -> None:
        for number, partition_id in enumerate(topic.partition_ids):
            partition = PartitionName(topic.name, number)
            if partition in self._shipped:
                continue
            self._trouble[partition] = Patience(str(partition), self._patience_seconds)
            self._shipped[partition] = ShippedPartition(
                self._store,
                self._cluster,
                partition,
                partition_id=partition_id,
                topic_uuid=topic.topic_uuid,
                name=self._name,
                relay_id=self._relay_id,
                first_offset=first_offsets.get(partition),
                on_gap=self._options.on_gap,
                is_stopped=self._is_ending,
            )
