"""Markers: what they check, what they leave in the index of ended transactions, and what that does to the bounds."""

from __future__ import annotations

import uuid
from random import Random
from typing import Any

import pytest
from sqlalchemy import Connection, delete, select

from tests.tools.lists import be_many
from txnstore.db.schema import finished_transactions, producer_states, record_batches
from txnstore.db.store import Store
from txnstore.errors import InvalidProducerEpoch, TransactionCoordinatorFenced, UnknownTopicOrPartition
from txnstore.log import partition_rows
from txnstore.log.append import Append, append, finished_since
from txnstore.log.bounds import Bounds, read_bounds
from txnstore.log.codec import decode, encode
from txnstore.log.locked_partitions import Marker, write_markers
from txnstore.log.partition_rows import allocate_producer_id, producers_of_partition, read_marked_producers
from txnstore.log.sequences import ProducerInPartition
from txnstore.log.topics import create_topic
from txnstore.model import ControlType, ProducerIdentity, Record
from txnstore.testing.invariants import Invariant, partition_violations

ABORT, COMMIT = ControlType.ABORT, ControlType.COMMIT


class Partition:
    """A partition that nobody else uses, with producers 0, 1, 2 that write transactions into it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        name = uuid.uuid4().hex
        self.ids = store.write(lambda connection: create_topic(connection, name, partition_count=2)).partition_ids
        self.id = self.ids[0]
        self.producer_ids = [store.write(allocate_producer_id) for _ in range(3)]
        self.sequences: dict[tuple[int, int], int] = {}

    def write(self, producer: int, count: int = 1, *, epoch: int = 0) -> None:
        """Append records of an open transaction."""
        first = self.sequences.get((producer, epoch), 0)
        self.sequences[producer, epoch] = first + count
        batch = encode(
            [Record(b"x")] * count,
            producer=ProducerIdentity(self.producer_ids[producer], epoch),
            base_sequence=first,
            is_transactional=True,
        )
        self.store.write(lambda connection: append(connection, [Append(self.id, batch)], coordinated=True))

    def write_plain(self) -> None:
        self.store.write(lambda connection: append(connection, [Append(self.id, encode([Record(b"p")]))]))

    def marker(self, producer: int, kind: ControlType, *, epoch: int = 1, coordinator_epoch: int = 0) -> Marker:
        return Marker(self.id, ProducerIdentity(self.producer_ids[producer], epoch), kind, coordinator_epoch)

    def mark(self, producer: int, kind: ControlType, **options: int) -> None:
        marker = self.marker(producer, kind, **options)
        self.store.write(lambda connection: write_markers(connection, [marker]))

    def forget_producers(self) -> None:
        forgotten = delete(producer_states).where(producer_states.c.partition_id == self.id)
        self.store.write(lambda connection: connection.execute(forgotten))

    def violations(self) -> list[Invariant]:
        found = self.store.read(lambda connection: partition_violations(connection, self.id, producers_expire=True))
        return [violation.invariant for violation in found]

    @property
    def bounds(self) -> Bounds:
        return self.store.read(lambda connection: read_bounds(connection, [self.id]))[self.id]

    @property
    def last_stable_offset(self) -> int:
        return self.bounds.last_stable_offset

    def finished(self) -> list[tuple[int, int, int, int, int]]:
        """Return producer, first offset, marker offset, outcome and last stable offset of each ended transaction."""
        found = self.store.read(lambda connection: finished_since(connection, self.id, 0))
        return [
            (
                self.producer_ids.index(row.producer_id),
                row.first_offset,
                row.marker_offset,
                row.outcome,
                row.last_stable_offset,
            )
            for row in found
        ]

    def state(self, producer: int) -> ProducerInPartition:
        states = self.store.read(lambda connection: producers_of_partition(connection, self.id))
        return next(state for state in states if state.producer_id == self.producer_ids[producer])

    def batches(self) -> list[Any]:
        statement = (
            select(record_batches)
            .where(record_batches.c.partition_id == self.id)
            .order_by(record_batches.c.last_offset)
        )
        return list(self.store.read(lambda connection: connection.execute(statement).all()))


@pytest.fixture
def partition(shared_store: Store) -> Partition:
    return Partition(shared_store)


@pytest.mark.parametrize("kind", [COMMIT, ABORT])
def test_a_marker_takes_an_offset_and_ends_the_transaction(partition: Partition, kind: ControlType) -> None:
    partition.write(0, 3)
    partition.mark(0, kind)
    assert partition.finished() == [(0, 0, 3, int(kind), 4)]
    assert (partition.bounds.high_watermark, partition.last_stable_offset) == (4, 4)
    marker = decode(partition.batches()[-1])
    assert (marker.control_type, marker.base_offset, marker.last_offset, marker.record_count) == (kind, 3, 3, 1)
    assert (marker.producer.epoch, marker.coordinator_epoch, marker.is_transactional) == (1, 0, True)
    assert marker.size_bytes == 0


@pytest.mark.parametrize("kind", [COMMIT, ABORT])
def test_a_marker_with_the_epoch_of_the_open_records_is_refused(partition: Partition, kind: ControlType) -> None:
    partition.write(0, epoch=5)
    with pytest.raises(InvalidProducerEpoch):
        partition.mark(0, kind, epoch=5)
    assert partition.last_stable_offset == 0


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "ended"])
def test_a_marker_with_an_older_epoch_is_refused(partition: Partition, is_open: bool) -> None:
    partition.write(0, epoch=5)
    if not is_open:
        partition.mark(0, COMMIT, epoch=6)
    before = partition.bounds
    with pytest.raises(InvalidProducerEpoch):
        partition.mark(0, ABORT, epoch=4)
    assert partition.bounds == before


def test_a_marker_may_skip_epochs(partition: Partition) -> None:
    partition.write(0)
    partition.mark(0, COMMIT, epoch=4)
    assert partition.state(0).epoch == 4
    assert partition.finished() == [(0, 0, 1, 1, 2)]


@pytest.mark.parametrize("kind", [COMMIT, ABORT])
def test_a_marker_that_comes_again_is_not_written_again(partition: Partition, kind: ControlType) -> None:
    partition.write(0)
    partition.mark(0, kind)
    before = (partition.bounds, partition.finished(), partition.state(0))
    for again in (kind, COMMIT, ABORT):
        partition.mark(0, again)
    assert (partition.bounds, partition.finished(), partition.state(0)) == before


def test_the_same_marker_twice_in_one_call_is_written_once(partition: Partition) -> None:
    partition.write(0)
    marker = partition.marker(0, COMMIT)
    partition.store.write(lambda connection: write_markers(connection, [marker, marker]))
    assert partition.bounds.high_watermark == 2


def test_a_marker_comes_once_more_where_its_producer_has_been_forgotten_and_does_no_harm(partition: Partition) -> None:
    """Its transaction was decided, and nobody completed it until the producer had expired."""
    partition.write(0)
    partition.mark(0, COMMIT)
    before = partition.finished()
    partition.forget_producers()
    partition.mark(0, COMMIT)
    assert partition.finished() == before
    assert (partition.bounds.high_watermark, partition.last_stable_offset) == (3, 3)
    assert partition.violations() == []
    partition.write(0, epoch=1)
    assert partition.violations() == []
    partition.forget_producers()
    partition.mark(0, COMMIT)
    assert Invariant.EPOCHS_RISE in partition.violations()


@pytest.mark.parametrize("is_known", [True, False], ids=["a producer that wrote before", "a producer never seen"])
def test_a_marker_where_nothing_is_open_makes_no_entry_and_does_not_move_the_last_stable_offset_on(
    partition: Partition, is_known: bool
) -> None:
    partition.write(1)
    if is_known:
        partition.write(0)
        partition.mark(0, COMMIT)
    before = partition.finished()
    partition.mark(0, ABORT, epoch=2)
    assert partition.finished() == before
    assert partition.last_stable_offset == 0
    assert partition.state(0).epoch == 2
    partition.mark(1, COMMIT)
    assert partition.last_stable_offset == partition.bounds.high_watermark


def test_a_marker_of_an_older_coordinator_is_refused(partition: Partition) -> None:
    partition.write(0)
    partition.mark(0, COMMIT, coordinator_epoch=5)
    partition.write(0, epoch=1)
    with pytest.raises(TransactionCoordinatorFenced):
        partition.mark(0, ABORT, epoch=2, coordinator_epoch=4)
    assert partition.last_stable_offset == 2
    partition.mark(0, COMMIT, epoch=2, coordinator_epoch=5)
    partition.write(0, epoch=2)
    partition.mark(0, COMMIT, epoch=3, coordinator_epoch=6)
    assert partition.state(0).coordinator_epoch == 6


def test_after_a_marker_the_producers_batches_are_forgotten(partition: Partition) -> None:
    partition.write(0, 2)
    assert len(partition.state(0).recent_batches) == 1
    partition.mark(0, COMMIT)
    state = partition.state(0)
    assert (state.recent_batches, state.transaction_first_offset, state.epoch) == ((), None, 1)


def test_the_entry_keeps_the_last_stable_offset_at_the_moment_of_the_end(partition: Partition) -> None:
    """The first offset of the oldest transaction that is still open, or the marker's own offset and one."""
    partition.write(0)  # 0
    partition.write(1)  # 1
    partition.write(2)  # 2
    partition.write_plain()  # 3
    partition.mark(1, ABORT)  # 4
    partition.mark(0, COMMIT)  # 5
    partition.write(0, epoch=1)  # 6
    partition.mark(2, ABORT)  # 7
    partition.mark(0, ABORT, epoch=2)  # 8
    assert partition.finished() == [
        (1, 1, 4, 0, 0),
        (0, 0, 5, 1, 2),
        (2, 2, 7, 0, 6),
        (0, 6, 8, 0, 9),
    ]
    assert partition.last_stable_offset == 9


@pytest.fixture(params=[False, True], ids=["few", "as many"])
def as_many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few go the way of many, too, whose values go to a server in lists."""
    if request.param:
        be_many(monkeypatch)


@pytest.mark.usefixtures("as_many")
def test_markers_of_several_producers_in_one_call_see_each_other(partition: Partition) -> None:
    for producer in (0, 1, 2):
        partition.write(producer)
    markers = [partition.marker(producer, COMMIT) for producer in (0, 2, 1)]
    partition.store.write(lambda connection: write_markers(connection, markers))
    assert partition.finished() == [(0, 0, 3, 1, 1), (2, 2, 4, 1, 1), (1, 1, 5, 1, 6)]


@pytest.mark.usefixtures("as_many")
def test_markers_for_several_partitions_stand_in_each(partition: Partition) -> None:
    partition.write(0)
    other = partition.ids[1]
    partition.id = other
    partition.sequences.clear()
    partition.write_plain()
    partition.write(0)
    identity = ProducerIdentity(partition.producer_ids[0], 1)
    markers = [Marker(partition_id, identity, ABORT) for partition_id in partition.ids]
    partition.store.write(lambda connection: write_markers(connection, markers))
    assert partition.finished() == [(0, 1, 2, 0, 3)]
    partition.id = partition.ids[0]
    assert partition.finished() == [(0, 0, 1, 0, 2)]


@pytest.mark.usefixtures("as_many")
def test_markers_of_producers_that_are_not_known_and_two_of_one_that_is_stand_in_one_call(partition: Partition) -> None:
    partition.write(0)
    partition.write(1)
    markers = [
        partition.marker(0, ABORT),
        partition.marker(2, COMMIT),
        partition.marker(0, ABORT, epoch=2),
        partition.marker(1, COMMIT),
    ]
    partition.store.write(lambda connection: write_markers(connection, markers))
    assert partition.finished() == [(0, 0, 2, 0, 1), (1, 1, 5, 1, 6)]
    assert partition.violations() == []
    states = partition.store.read(lambda connection: producers_of_partition(connection, partition.id))
    assert {(state.producer_id, state.epoch, state.recent_batches) for state in states} == {
        (partition.producer_ids[0], 2, ()),
        (partition.producer_ids[1], 1, ()),
        (partition.producer_ids[2], 1, ()),
    }


def test_no_markers_are_nothing(partition: Partition) -> None:
    partition.store.write(lambda connection: write_markers(connection, []))
    assert partition.bounds.high_watermark == 0


def test_a_marker_for_a_partition_that_is_not_there_is_refused_and_none_is_written(partition: Partition) -> None:
    partition.write(0)
    identity = ProducerIdentity(partition.producer_ids[0], 1)
    markers = [partition.marker(0, COMMIT), Marker(10**12, identity, COMMIT)]
    with pytest.raises(UnknownTopicOrPartition):
        partition.store.write(lambda connection: write_markers(connection, markers))
    assert partition.last_stable_offset == 0


def test_the_index_is_read_from_an_offset_on(partition: Partition) -> None:
    for epoch in range(3):
        partition.write(0, epoch=epoch)
        partition.mark(0, COMMIT, epoch=epoch + 1)
    found = partition.store.read(lambda connection: finished_since(connection, partition.id, 3))
    assert [row.marker_offset for row in found] == [3, 5]
    everything = select(finished_transactions).where(finished_transactions.c.partition_id == partition.id)
    assert len(partition.store.read(lambda connection: connection.execute(everything).all())) == 3


@pytest.mark.slow_but_first
@pytest.mark.usefixtures("as_many")
def test_the_ends_of_few_of_many_transactions_read_few_and_still_know_what_is_oldest(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In random order, one by one and several at once: it costs the same however many are open."""
    random = Random(7)
    read: list[int] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        found = read_marked_producers(*arguments, **options)
        read.append(len(found))
        return found

    partition.producer_ids = partition.store.write(lambda c: [allocate_producer_id(c) for _ in range(40)])
    for producer in range(40):
        partition.write(producer)
    opened = dict(enumerate(range(40)))
    order = random.sample(range(40), 40)
    monkeypatch.setattr("txnstore.log.locked_partitions.read_marked_producers", noted)
    wanted = []
    while order:
        ended, order = order[: (count := random.choice([1, 1, 3]))], order[count:]
        markers = [partition.marker(producer, random.choice([ABORT, COMMIT])) for producer in ended]
        high_watermark = partition.bounds.high_watermark
        read.clear()
        partition.store.write(lambda connection, markers=markers: write_markers(connection, markers))
        assert read[-1] <= 2 * len(ended) + 1
        for number, producer in enumerate(ended):
            del opened[producer]
            wanted.append(min(opened.values(), default=high_watermark + number + 1))
        assert partition.bounds.last_stable_offset == min(opened.values(), default=high_watermark + len(ended))
    entries = partition.store.read(
        lambda connection: (
            connection.execute(
                select(finished_transactions.c.last_stable_offset)
                .where(finished_transactions.c.partition_id == partition.id)
                .order_by(finished_transactions.c.marker_offset)
            )
            .scalars()
            .all()
        )
    )
    assert entries == wanted


@pytest.mark.usefixtures("as_many")
def test_ends_in_several_partitions_read_no_more_of_each_than_ends_in_one(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        found = read_marked_producers(*arguments, **options)
        read.append(len(found))
        return found

    partition.producer_ids = partition.store.write(lambda c: [allocate_producer_id(c) for _ in range(12)])
    for partition_id in partition.ids:
        partition.id = partition_id
        partition.sequences.clear()
        for producer in range(12):
            partition.write(producer)
    monkeypatch.setattr("txnstore.log.locked_partitions.read_marked_producers", noted)
    ended = [
        Marker(partition_id, ProducerIdentity(partition.producer_ids[producer], 1), ABORT)
        for partition_id, producers in zip(partition.ids, ((0, 2), (11, 0, 1)), strict=True)
        for producer in producers
    ]
    partition.store.write(lambda connection: write_markers(connection, ended))
    # Those that end, and of each partition one more than ends there, some of which are the same.
    assert read == [len({(0, 0), (0, 2), (0, 1)}) + len({(1, 11), (1, 0), (1, 1), (1, 2), (1, 3)})]
    partition.id = partition.ids[0]
    assert [entry[4] for entry in partition.finished()] == [1, 1]
    partition.id = partition.ids[1]
    assert [entry[4] for entry in partition.finished()] == [0, 1, 2]


@pytest.mark.parametrize("of_markers", [False, True])
def test_what_is_open_in_several_partitions_is_found_by_its_index(shared_store: Store, of_markers: bool) -> None:
    statement = partition_rows._states_and_oldest(3, is_many=False, of_markers=of_markers)
    of: dict[str, Any] = {"keys": [(1, 2), (2, 3)]}
    for place in range(3):
        of |= {f"of_partition_id_{place}": place, f"open_max_{place}": 2}

    def explain(connection: Connection) -> str:
        is_sqlite = shared_store.backend.name == "sqlite"
        if not is_sqlite:
            # Of a few rows PostgreSQL reads them all.
            connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
            connection.exec_driver_sql("SET LOCAL enable_sort = off")
        found = statement.rendered(connection.dialect, of)
        assert found is not None
        text = f"EXPLAIN {'QUERY PLAN ' if is_sqlite else ''}{found.text}"
        return str(connection.exec_driver_sql(text, found.values_from(of, connection.dialect)).all())

    plan = shared_store.read(explain)
    assert plan.count("producer_states_open") == 3, plan
    assert "TEMP B-TREE" not in plan, "the oldest come first in the index"
    assert "Sort" not in plan
