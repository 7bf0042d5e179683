"""The relay from Kafka: what it reads and from where, and how records and positions are written together.

It belongs to no consumer group: its positions are rows of the store, written in the same database transaction as the
records before them.  Two relays of one name may read the same; the one that comes second finds that the position has
moved, drops what it has read, and goes on from there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from sqlalchemy import Connection

from txnstore.db.store import Store
from txnstore.errors import InvalidRecord, InvalidTimestamp, RecordTooLarge
from txnstore.log.append import Append, append
from txnstore.log.codec import EncodedBatch, RecordColumns, encode_columns
from txnstore.log.columns import Codec, codec_at_hand
from txnstore.log.topics import Topic, ensure_topic
from txnstore.model import PartitionName
from txnstore.relay.errors import Failing, KafkaUnavailable, Patience, RelayFailed, may_pass
from txnstore.relay.kafka_cluster import ANSWER_SECONDS, KafkaCluster, KafkaTopic
from txnstore.relay.options import (
    OnGap,
    RelayOptions,
    RelayStart,
    check_leaders,
    check_relay_name,
    group_of,
    relay_id_from,
)
from txnstore.relay.positions import (
    PositionMoved,
    RelayPosition,
    begin_relay_positions,
    check_one_way,
    forget_gone_topics,
    move_relay_positions,
    read_relay_positions,
)

#: What a topic of the store will not have.
_REFUSALS: Final = (InvalidRecord, InvalidTimestamp, RecordTooLarge)
#: A record of Kafka's oldest formats has no timestamp.
_NO_TIMESTAMP: Final = 0


@dataclass(frozen=True, slots=True)
class Arrived:
    """What was read of one partition: from the relay's position up to where it goes on."""

    messages: Sequence[Any]
    from_offset: int
    next_offset: int


def copy_into_store(
    store: Store, relay_id: str, topics: Mapping[str, Topic], arrived: Mapping[PartitionName, Arrived]
) -> None:
    """Append what has arrived, in at least one partition, and move the positions past it.

    Raises:
        PositionMoved: another relay has copied some of it; nothing was copied.
        RecordTooLarge, InvalidTimestamp, InvalidRecord: the topic in the store refuses a record; nothing was copied.
        TxnStoreError: the database refuses; after `OutcomeUnknown` the positions tell what happened.
    """
    appends: list[Append] = []
    for partition, item in arrived.items():
        topic = topics[partition.topic]
        partition_id = topic.partition_id(partition.partition)
        appends += [
            Append(partition_id, batch, topic.settings)
            for batch in batches_of(
                item.messages, topic.settings["max.message.bytes"], codec_at_hand(topic.settings["compression.type"])
            )
        ]
    moves = {partition: (item.from_offset, item.next_offset) for partition, item in arrived.items()}

    def copy(connection: Any) -> None:
        # The positions' rows before the heads': of two relays the second waits here, and appends nothing.
        move_relay_positions(connection, relay_id, moves)
        if appends:
            append(connection, appends)

    store.write(copy, wakes_readers=bool(appends))


def batches_of(messages: Sequence[Any], size_bytes_max: int, codec: Codec) -> list[EncodedBatch]:
    """Return messages as batches that the topic takes; a single one that is too large stays so."""
    if not messages:
        return []
    batch = encode_columns(
        RecordColumns(
            [message.key() for message in messages],
            [message.value() for message in messages],
            [_timestamp_ms(message) for message in messages],
            [message.headers() or () for message in messages],
        ),
        codec=codec,
    )
    if batch.size_bytes <= size_bytes_max or len(messages) == 1:
        return [batch]
    middle = len(messages) // 2
    return batches_of(messages[:middle], size_bytes_max, codec) + batches_of(messages[middle:], size_bytes_max, codec)


def _timestamp_ms(message: Any) -> int:
    _, timestamp_ms = message.timestamp()
    return timestamp_ms if timestamp_ms >= 0 else _NO_TIMESTAMP


_log = logging.getLogger(__name__)

#: What is copied in one database transaction at most.
RECORDS_MAX: Final = 1_000
#: How often the relay looks for new topics and partitions.
LOOK_AGAIN_SECONDS: Final = 5.0
_WAIT_SECONDS: Final = 0.1
#: How many partitions a message names.
_NAMED_MAX: Final = 5


class FromKafka:
    """Copies topics of a Kafka cluster into a store, each record once."""

    def __init__(self, store: Store, cluster: KafkaCluster, options: RelayOptions) -> None:
        """Nothing happens before `run`.

        Raises:
            RelayFailed: the relay cannot have this name.
        """
        self._store = store
        self._cluster = cluster
        self._options = options
        self._name = options.name if options.name is None else check_relay_name(options.name)
        self._relay_id = ""
        #: What Kafka has told of, and what of it is read; None until it reads.
        self._listed: Mapping[str, KafkaTopic] = {}
        self._found: Mapping[str, KafkaTopic] | None = None
        #: The topics of the first look in which it is to begin at ends that it could not be told of, with identities.
        self._unbegun: Mapping[str, str] = {}
        #: Of their partitions those ends that it could be told of then.
        self._first_ends: Mapping[PartitionName, int] = {}
        self._topics: dict[str, Topic] = {}
        self._positions: dict[PartitionName, int] = {}
        #: They are left out until they have a leader again.
        self._leaderless: set[PartitionName] = set()
        self._without_leader = Patience("partitions without a leader", None)
        #: With `once`: where each partition ends.
        self._ends: dict[PartitionName, int] = {}
        self._looked_at = 0.0
        self._heard_at = time.monotonic()
        self.copied_count = 0

    def run(self, stop: threading.Event, failing: Failing = lambda _: None) -> int:
        """Copy until `stop` is set, or with `once` up to the ends of now; return how many records were copied.

        `failing` hears of the error that ends it, before it closes its client.

        Raises:
            RelayFailed: Kafka cannot be reached at the start, a topic or a record does not fit, or records are gone,
                for example.
            TxnStoreError: the store refuses.
        """
        cluster = self._cluster
        try:
            cluster_id = cluster.cluster_id()
        except KafkaUnavailable as error:
            raise RelayFailed(str(error), may_pass=True) from None
        name = self._name or cluster_id
        self._relay_id = relay_id_from(cluster_id, name)
        patience_seconds = self._options.patience_seconds if self._options.once else None
        trouble = Patience("copying from Kafka", patience_seconds)
        consumer: Any = None
        try:
            while not stop.is_set():
                try:
                    if consumer is None:
                        consumer = cluster.consumer(group_of(name))
                        self._assign(consumer)
                    if self._options.once and self._has_reached():
                        self._check_leaders()
                        break
                    self._copy(consumer)
                    trouble.passed()
                    if self._has_changed():
                        consumer = _closed(consumer)
                except Exception as error:
                    has_moved = isinstance(error, PositionMoved)
                    if not (has_moved or may_pass(error)):
                        failing(error)
                        raise
                    # Whatever was read and is still under way is dropped with the consumer; where to go on stands in
                    # the store.
                    consumer = _closed(consumer)
                    if has_moved:
                        _log.info("%s; going on from there", error, extra={"event": "relay_position_moved"})
                        continue
                    trouble.met(error)
                    stop.wait(trouble.left_seconds())
        finally:
            _closed(consumer)
        return self.copied_count

    def _has_changed(self) -> bool:
        """Return whether topics or partitions have come up in Kafka; looks only now and then."""
        if self._options.once or time.monotonic() - self._looked_at < LOOK_AGAIN_SECONDS:
            return False
        self._looked_at = time.monotonic()
        self._tell_of_leaderless()
        return self._cluster.topics(self._options.topics or None) != self._listed

    def _assign(self, consumer: Any) -> None:
        """Read from where the store says."""
        self._looked_at = time.monotonic()
        listed = self._cluster.topics(self._options.topics or None)
        missing = sorted(set(self._options.topics) - listed.keys())
        if missing:
            raise RelayFailed(f"there is no topic {', '.join(missing)} in Kafka")
        self._topics = self._store.write(lambda connection: _have_in_store(connection, self._relay_id, listed))
        for topic in self._topics.values():
            check_leaders(topic, self._store.database_id)
        known = self._store.read(lambda connection: read_relay_positions(connection, self._relay_id))
        found = self._with_known_ends(listed, {partition.topic for partition in known})
        if self._found is None and self._unbegun:
            unbegun = {name: listed[name] for name in self._unbegun}
            self._first_ends = {partition: high for partition, (_, high) in self._bounds(consumer, unbegun).items()}
        bounds = self._bounds(consumer, found)
        leaderless = {PartitionName(name, number) for name, topic in listed.items() for number in topic.leaderless}
        self._check_not_forgotten(self._positions.keys() & (bounds.keys() | leaderless), known)
        # What comes up while somebody relays, or beside what was relayed, has records that nobody has seen.
        seen = {partition.topic for partition in known}
        begun = seen if self._found is None else found.keys() - self._unbegun.keys()
        new = {
            partition: RelayPosition(
                found[partition.topic].topic_uuid,
                low if self._is_earliest or partition.topic in begun else self._first_ends.get(partition, high),
            )
            for partition, (low, high) in bounds.items()
            if partition not in known
        }
        if not self._is_earliest:
            # They have come up meanwhile; the next relay would take them for some that were there.
            new |= {
                partition: RelayPosition(found[partition.topic].topic_uuid, 0)
                for partition in leaderless
                if partition.topic in found and partition.topic not in seen
            }
        if new:
            self._store.write(lambda connection: _begin(connection, self._relay_id, new))
            known = self._store.read(lambda connection: read_relay_positions(connection, self._relay_id))
            # After the positions: another relay may have begun, and copied beyond what were the ends.
            bounds = self._bounds(consumer, found)
            self._check_not_forgotten(bounds, known)
        self._check_identities(found, known)
        # Another relay of this name may have copied more of what is gone, or have forgotten it already.
        self._tell_of_gone(
            {
                partition: known[partition].next_offset if partition in known else position
                for partition, position in self._positions.items()
                if partition not in bounds and partition not in leaderless
            }
        )
        self._positions = {
            partition: known[partition].next_offset for partition in bounds.keys() | (leaderless & known.keys())
        }
        self._forget_gone(found, known)
        self._close_gaps(bounds)
        if self._options.once:
            # And of those that it could not be asked of before.
            unseen = bounds.keys() if self._found is None else self._leaderless - self._ends.keys()
            self._ends |= {partition: bounds[partition][1] for partition in bounds.keys() & unseen}
        self._listed, self._found, self._leaderless = listed, found, leaderless
        self._tell_of_leaderless()
        # From here on: what came before, the store's work for example, was no silence of the cluster.
        self._heard_at = time.monotonic()
        kafka = self._cluster.library.TopicPartition
        consumer.assign(
            [
                kafka(partition.topic, partition.partition, position)
                for partition, position in self._positions.items()
                if partition in bounds and not self._is_at_end(partition)
            ]
        )

    def _with_known_ends(self, listed: Mapping[str, KafkaTopic], begun: Collection[str]) -> dict[str, KafkaTopic]:
        """Return the topics without those that `--start latest` cannot begin in yet: where they end, nobody knows.

        One is without all of its partitions until they have leaders: those that had one at first begin where they
        ended then.  What comes up while the relay runs is begun at the first record, whoever leads it.
        """
        if self._found is None and not self._is_earliest:
            self._unbegun = {name: topic.topic_uuid for name, topic in listed.items() if topic.leaderless}
        self._unbegun = {
            name: topic_uuid
            for name, topic_uuid in self._unbegun.items()
            if name not in begun and name in listed and listed[name].topic_uuid == topic_uuid
        }
        return {name: topic for name, topic in listed.items() if not (topic.leaderless and name in self._unbegun)}

    @property
    def _is_earliest(self) -> bool:
        return self._options.start is RelayStart.EARLIEST

    def _bounds(self, consumer: Any, found: Mapping[str, KafkaTopic]) -> dict[PartitionName, tuple[int, int]]:
        """Return the first offset of each partition with a leader, and the one after the last a reader may see."""
        library = self._cluster.library
        bounds = {}
        for name, topic in found.items():
            for number in range(topic.partition_count):
                if number in topic.leaderless:
                    continue
                with self._cluster.translated(f"the bounds of {name}-{number} in Kafka"):
                    asked = library.TopicPartition(name, number)
                    try:
                        low_and_high = consumer.get_watermark_offsets(asked, timeout=ANSWER_SECONDS)
                    except library.KafkaException as exception:
                        if exception.args[0] != library.KafkaError._UNKNOWN_PARTITION:
                            raise
                        # It is there: librdkafka says so of one that has lost its leader, or is not known yet.
                        raise KafkaUnavailable(f"{name}-{number} has no leader in Kafka") from None
                if low_and_high is None:
                    raise KafkaUnavailable(f"the bounds of {name}-{number} in Kafka: no answer")
                bounds[PartitionName(name, number)] = low_and_high
        return bounds

    def _check_identities(self, found: Mapping[str, KafkaTopic], known: Mapping[PartitionName, RelayPosition]) -> None:
        for partition, position in known.items():
            topic = found.get(partition.topic)
            if topic is not None and topic.topic_uuid != position.topic_uuid:
                raise _made_anew(partition.topic)

    def _check_not_forgotten(self, begun: Iterable[PartitionName], known: Collection[PartitionName]) -> None:
        """Refuse to begin once more in what it has begun: somebody has forgotten it, who took it for given up."""
        for partition in begun:
            if partition not in known:
                raise RelayFailed(f"{partition}: the relay's position was forgotten while it ran")

    def _forget_gone(self, found: Collection[str], known: Collection[PartitionName]) -> None:
        """Delete positions in topics that neither Kafka nor the store has: nothing of them can come twice.

        Where only some topics are asked for, nobody knows of the others; and a broker that has just started may know
        of none.
        """
        names = {partition.topic for partition in known} - set(found)
        if names and found and not self._options.topics:
            self._store.write(lambda connection: forget_gone_topics(connection, self._relay_id, names))

    def _close_gaps(self, bounds: Mapping[PartitionName, tuple[int, int]]) -> None:
        """Refuse, or skip, what is no longer in Kafka."""
        moves = {}
        for partition, (low, high) in bounds.items():
            position = self._positions[partition]
            if position > high:
                raise RelayFailed(
                    f"{partition}: the relay has copied up to {position}, but in Kafka it ends at {high}: has the"
                    " cluster lost records?"
                )
            if position >= low:
                continue
            what = f"{partition}: in Kafka it begins at {low}, after the relay's position {position}"
            if self._options.on_gap is OnGap.ERROR:
                raise RelayFailed(f"{what}; --on-gap earliest goes on with the first record that is left")
            _log.warning(
                "%s; going on at %s",
                what,
                low,
                extra={"event": "relay_gap", "partition": str(partition), "offset": low},
            )
            moves[partition] = (position, low)
        if moves:
            self._store.write(lambda connection: move_relay_positions(connection, self._relay_id, moves))
            self._positions |= {partition: low for partition, (_, low) in moves.items()}

    def _tell_of_gone(self, gone: Mapping[PartitionName, int]) -> None:
        """Warn of what was deleted in Kafka meanwhile, at its position; with `once` wait for no end in it."""
        for partition, position in sorted(gone.items(), key=str):
            end = self._ends.pop(partition, None)
            if end is None or position < end:
                _log.warning(
                    "%s: deleted in Kafka when the relay had come to %s%s",
                    partition,
                    position,
                    "" if end is None else f", before its end, {end}",
                    extra={"event": "relay_topic_gone", "partition": str(partition), "offset": position},
                )

    def _tell_of_leaderless(self) -> None:
        """Tell of partitions that are left out, now and then, and once there are none any more."""
        if self._leaderless:
            self._without_leader.met(_no_leader(self._leaderless))
        else:
            self._without_leader.passed()

    def _check_leaders(self) -> None:
        """Refuse to end by itself before what has no leader."""
        left = {partition for partition in self._leaderless if not self._is_at_end(partition)}
        if left:
            raise _no_leader(left)

    def _copy(self, consumer: Any) -> None:
        """Copy what comes within a moment."""
        with self._cluster.translated("reading from Kafka"):
            # The first is waited for, the others are those that are there.
            first = consumer.poll(_WAIT_SECONDS)
            if first is None:
                self._lose_patience()
                return
            self._heard_at = time.monotonic()
            messages = [first, *consumer.consume(RECORDS_MAX - 1, 0)]
        arrived = self._arrived(messages)
        if not arrived:
            return
        self._check_unchanged(arrived)
        try:
            copy_into_store(self._store, self._relay_id, self._topics, arrived)
        except _REFUSALS:
            self._copy_up_to_refused(arrived)
        for partition, item in arrived.items():
            self._positions[partition] = item.next_offset
            self.copied_count += len(item.messages)
        self._heard_at = time.monotonic()

    def _check_unchanged(self, arrived: Iterable[PartitionName]) -> None:
        """Refuse what was read of a recreated topic: Kafka's client goes on in it where it was in the one before.

        Asked after what was read: a topic that still is the one that was found has been so until then, but for the
        moment by which the broker that is asked may be behind.
        """
        assert self._found is not None, "it reads"
        for name, topic in self._cluster.described(sorted({partition.topic for partition in arrived})).items():
            if topic.topic_uuid != self._found[name].topic_uuid:
                raise _made_anew(name)

    def _copy_up_to_refused(self, arrived: Mapping[PartitionName, Arrived]) -> NoReturn:
        """Copy record by record up to the one that its topic refuses, so that it can be named in RelayFailed.

        PositionMoved if the topic no longer refuses any.
        """
        for partition, item in arrived.items():
            position = item.from_offset
            for message in item.messages:
                one = Arrived([message], position, message.offset() + 1)
                try:
                    copy_into_store(self._store, self._relay_id, self._topics, {partition: one})
                except _REFUSALS as error:
                    raise RelayFailed(f"{partition}, offset {message.offset()} in Kafka: {error}") from None
                position = one.next_offset
                self.copied_count += 1
        raise PositionMoved("the store now accepts what it refused a moment ago")

    def _lose_patience(self) -> None:
        """Give up, with `once`, on a cluster that says nothing at all for too long."""
        if self._options.once and time.monotonic() - self._heard_at > self._options.patience_seconds:
            raise RelayFailed("copying from Kafka: neither records nor the end of a partition arrived", may_pass=True)

    def _arrived(self, messages: Sequence[Any]) -> dict[PartitionName, Arrived]:
        kinds = self._cluster.library.KafkaError
        records: dict[PartitionName, list[Any]] = {}
        ends: dict[PartitionName, int] = {}
        for message in messages:
            error = message.error()
            if error is None:
                partition = PartitionName(message.topic(), message.partition())
                records.setdefault(partition, []).append(message)
                ends[partition] = message.offset() + 1
            elif error.code() == kinds._PARTITION_EOF:
                # After the last record come markers: what is read is read up to here.
                partition = PartitionName(message.topic(), message.partition())
                ends[partition] = max(message.offset(), ends.get(partition, 0))
            elif error.code() in (kinds._AUTO_OFFSET_RESET, kinds.OFFSET_OUT_OF_RANGE):
                # What the position is missing is found, and said, where positions are assigned.
                raise KafkaUnavailable(f"{message.topic()}-{message.partition()}: {error.str()}")
            else:
                raise self._cluster.error(error, "reading from Kafka")
        return {
            partition: Arrived(records.get(partition, ()), self._positions[partition], end)
            for partition, end in ends.items()
            if end > self._positions[partition]
        }

    def _has_reached(self) -> bool:
        return all(self._is_at_end(partition) for partition in self._ends if partition not in self._leaderless)

    def _is_at_end(self, partition: PartitionName) -> bool:
        end = self._ends.get(partition)
        return end is not None and self._positions[partition] >= end


def _made_anew(topic: str) -> RelayFailed:
    return RelayFailed(
        f"topic {topic} has been deleted and recreated in Kafka since this relay read it; a relay with --topic {topic}"
        " --name OTHER copies it from its first record, and this one goes on with --topic for each of the other topics"
    )


def _no_leader(partitions: Collection[PartitionName]) -> KafkaUnavailable:
    names = sorted(map(str, partitions))
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return KafkaUnavailable(f"{', '.join(names[:_NAMED_MAX])}{more} cannot be read until a leader is elected")


def _closed(consumer: Any) -> Any:
    """Close a consumer, if there is one, and return None."""
    if consumer is not None:
        consumer.close()
    return None


def _have_in_store(connection: Connection, relay_id: str, found: Mapping[str, KafkaTopic]) -> dict[str, Topic]:
    """Return the topics of the store, created if they do not exist."""
    topics = {}
    for name, kafka_topic in sorted(found.items()):
        topic = ensure_topic(connection, name, partition_count=kafka_topic.partition_count)
        if len(topic.partition_ids) < kafka_topic.partition_count:
            raise RelayFailed(
                f"topic {name} has {kafka_topic.partition_count} partitions in Kafka, but only"
                f" {len(topic.partition_ids)} in the store: give it as many there"
            )
        topics[name] = topic
    # After they are there: whoever locks topics creates none, for others lock the catalogue first.
    check_one_way(connection, relay_id, found)
    return topics


def _begin(connection: Connection, relay_id: str, new: Mapping[PartitionName, RelayPosition]) -> None:
    """Write where the relay begins in partitions, at least one."""
    # Once more: another relay may have begun in the other direction meanwhile.
    check_one_way(connection, relay_id, {partition.topic for partition in new})
    begin_relay_positions(connection, relay_id, new)
