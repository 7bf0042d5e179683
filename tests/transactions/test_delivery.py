"""The way after a decision, one step at a time: whoever goes on, and however often, it ends the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, cast

import pytest
from sqlalchemy import event, select, update

from tests.tools.elsewhere import Elsewhere
from txnstore.db.schema import pending_markers
from txnstore.errors import InvalidProducerIdMapping, StoreDamaged, StoreUnavailable, UnknownTopicOrPartition
from txnstore.log.locked_partitions import write_markers
from txnstore.model import ControlType
from txnstore.transactions import delivery, recovery
from txnstore.transactions.delivery import PendingDelivery, deliver
from txnstore.transactions.protocol import EPOCH_MAX, TransactionState
from txnstore.transactions.recovery import complete_all_decided
from txnstore.transactions.rows import marker_of
from txnstore.transactions.transaction import complete_decided

if TYPE_CHECKING:
    from txnstore.db.cluster.cluster import Cluster

S = TransactionState


def outbox(bench, producer) -> list[tuple]:
    statement = (
        select(
            pending_markers.c.partition_id,
            pending_markers.c.producer_id,
            pending_markers.c.producer_epoch,
            pending_markers.c.outcome,
        )
        .where(pending_markers.c.transactional_id == producer.transactional_id)
        .order_by(pending_markers.c.partition_id)
    )
    return [tuple(row) for row in bench.store.read(lambda connection: connection.execute(statement).all())]


@pytest.fixture
def decided(bench):
    """A transaction that is decided to commit, with two partitions and two groups."""
    producer = bench.started(writes_elsewhere=True)
    for partition_id in bench.partition_ids:
        producer.send(partition_id, b"a")
    for group in ("0", "1"):
        producer.send_offsets(bench.prefix + group, {bench.partition_ids[0]: 5})
    producer.decide(commit=True)
    return producer


def check_delivered(bench, producer) -> None:
    for partition_id in bench.partition_ids:
        assert bench.read(partition_id) == [b"a"]
        assert bench.markers(partition_id) == [(1, ControlType.COMMIT, 1)]
        assert bench.bounds(partition_id).last_stable_offset == 2
    for group in ("0", "1"):
        committed = bench.offsets(bench.prefix + group)
        assert committed.offsets[bench.partition_ids[0]].offset == 5
        assert committed.unstable == frozenset()
    assert outbox(bench, producer) == []
    assert bench.participants(producer.transactional_id) == ([], [])


def test_the_decision_queues_a_marker_for_each_partition_with_its_own_epoch(bench, decided) -> None:
    producer_id = decided.identity.producer_id
    assert outbox(bench, decided) == [(partition_id, producer_id, 1, 1) for partition_id in bench.partition_ids]
    assert [bench.bounds(partition_id).last_stable_offset for partition_id in bench.partition_ids] == [0, 0]
    assert bench.offsets(bench.prefix + "0").unstable == {bench.partition_ids[0]}


def test_completing_it_once_or_more_often_gives_what_was_decided(bench, decided) -> None:
    for _ in range(3):
        assert complete_decided(bench.store, decided.transactional_id, Elsewhere(bench.store)).epoch == 1
        check_delivered(bench, decided)
        assert bench.row(decided.transactional_id).state is S.COMPLETE_COMMIT


@pytest.mark.slow_but_first
@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize(
    "go_on",
    [
        pytest.param(lambda bench, producer: complete_all_decided(bench.store, Elsewhere(bench.store)), id="recovery"),
        pytest.param(lambda bench, producer: producer.commit(), id="the commit again"),
        pytest.param(lambda bench, producer: producer.twin().start(), id="a start"),
    ],
)
def test_after_any_number_of_steps_somebody_else_goes_on(bench, decided, go_on: Callable, steps: int) -> None:
    """A look, two markers, the offsets of both groups, the completion: it dies before each of them, and after."""
    commits = 0

    class Died(Exception):
        pass

    def die(connection, cursor, statement: str, *_: object) -> None:
        nonlocal commits
        if statement == "COMMIT":
            commits += 1
            if commits > steps:
                raise Died

    event.listen(bench.store.engine, "before_cursor_execute", die)
    try:
        if steps < 5:
            with pytest.raises(Died):
                complete_decided(bench.store, decided.transactional_id, Elsewhere(bench.store))
        else:
            complete_decided(bench.store, decided.transactional_id, Elsewhere(bench.store))
    finally:
        event.remove(bench.store.engine, "before_cursor_execute", die)
    go_on(bench, decided)
    check_delivered(bench, decided)
    assert bench.row(decided.transactional_id).state in (S.COMPLETE_COMMIT, S.EMPTY)
    assert (S.COMPLETE_COMMIT, 1) in bench.journal(decided.transactional_id)


def test_who_knows_of_no_other_database_leaves_no_marker_queued(bench, decided) -> None:
    complete_decided(bench.store, decided.transactional_id)
    check_delivered(bench, decided)


def test_a_decision_to_abort_drops_records_and_offsets(bench) -> None:
    producer = bench.started(writes_elsewhere=True)
    producer.send(bench.partition_ids[0], b"a")
    producer.send_offsets(bench.prefix, {bench.partition_ids[0]: 5})
    producer.decide(commit=False)
    complete_decided(bench.store, producer.transactional_id, Elsewhere(bench.store))
    assert bench.read(bench.partition_ids[0]) == []
    assert bench.offsets(bench.prefix).offsets == {}
    assert bench.offsets(bench.prefix).unstable == frozenset()
    assert bench.row(producer.transactional_id).state is S.COMPLETE_ABORT


def test_completing_what_is_not_decided_leaves_it_alone(bench) -> None:
    producer = bench.started()
    producer.send(bench.partition_ids[0], b"a")
    before = bench.row(producer.transactional_id)
    assert complete_decided(bench.store, producer.transactional_id, Elsewhere(bench.store)) == producer.identity
    assert bench.row(producer.transactional_id) == before


def test_completing_an_unknown_id_is_refused(bench) -> None:
    with pytest.raises(InvalidProducerIdMapping):
        complete_decided(bench.store, bench.new_id())


def test_recovery_says_what_it_completed(own_bench) -> None:
    producers = [own_bench.started(writes_elsewhere=True) for _ in range(3)]
    for producer in producers:
        producer.send(own_bench.partition_ids[0], producer.transactional_id.encode())
    producers[0].decide(commit=True)
    producers[2].decide(commit=False)
    assert complete_all_decided(own_bench.store, Elsewhere(own_bench.store)) == tuple(
        sorted([producers[0].transactional_id, producers[2].transactional_id])
    )
    assert complete_all_decided(own_bench.store, Elsewhere(own_bench.store)) == ()
    assert own_bench.row(producers[1].transactional_id).state is S.ONGOING


@pytest.mark.parametrize("page_rows", [1, 500])
def test_an_id_that_cannot_be_completed_keeps_no_other_one_from_it(own_bench, monkeypatch, page_rows) -> None:
    """Nor do so many of them that they fill a page."""
    monkeypatch.setattr(recovery, "_DECIDED", recovery._DECIDED.limit(page_rows))
    producers = [own_bench.started(writes_elsewhere=True) for _ in range(2)]
    broken, sound = sorted(producers, key=lambda producer: producer.transactional_id)
    for producer, partition_id in zip((broken, sound), own_bench.partition_ids, strict=False):
        producer.send(partition_id, b"a")
        producer.decide(commit=True)
    nowhere = (
        update(pending_markers)
        .where(pending_markers.c.transactional_id == broken.transactional_id)
        .values(partition_id=10**9)
    )
    own_bench.store.write(lambda connection: connection.execute(nowhere))
    with pytest.raises(UnknownTopicOrPartition):
        complete_all_decided(own_bench.store)
    assert own_bench.read(own_bench.partition_ids[1]) == [b"a"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
def test_one_whose_row_says_what_this_version_does_not_know_keeps_no_other_one_open(own_bench, elsewhere: bool) -> None:
    """As a newer version may write it; nor one whose time is up."""
    bench = own_bench
    cluster = Elsewhere(bench.store) if elsewhere else None
    producers = [bench.started(writes_elsewhere=True) for _ in range(3)]
    first, damaged, last = sorted(producer.transactional_id for producer in producers)
    late = bench.started(timeout_ms=1_000)
    for producer in (*producers, late):
        producer.send(bench.partition_ids[0], b"a")
    for producer in producers:
        producer.decide(commit=True)
    bench.set_row(damaged, fence_reason="boredom")
    bench.clock.advance(1_001)
    with pytest.raises(StoreDamaged, match=f"{damaged}.*boredom"):
        recovery.recover(bench.store, cluster)
    for sound in (first, last):
        assert bench.row(sound).state is S.COMPLETE_COMMIT
    assert bench.row(late.transactional_id).state is S.COMPLETE_ABORT
    bench.set_row(damaged, fence_reason=None)
    recovery.recover(bench.store, cluster)
    assert bench.row(damaged).state is S.COMPLETE_COMMIT


def test_one_whose_rows_elsewhere_are_damaged_keeps_no_other_one_open(own_bench, monkeypatch) -> None:
    """A row that is not there is told by an assertion; nor does it keep one open whose time is up."""
    bench = own_bench
    cluster = Elsewhere(bench.store)
    producers = sorted((bench.started(writes_elsewhere=True) for _ in range(3)), key=lambda each: each.transactional_id)
    late = bench.started(timeout_ms=1_000)
    for producer in (*producers, late):
        producer.send(bench.partition_ids[0], b"a")
    for producer in producers:
        producer.decide(commit=True)
    first, damaged, last = producers
    bench.clock.advance(1_001)

    def write(connection, markers, begun_with):
        assert damaged.identity.producer_id not in {marker.producer.producer_id for marker in markers}, "it is damaged"
        return write_markers(connection, markers, begun_with)

    with monkeypatch.context() as patched:
        patched.setattr(delivery, "write_markers", write)
        with pytest.raises(AssertionError, match="it is damaged"):
            recovery.recover(bench.store, cluster)
    for sound in (first, last):
        assert bench.row(sound.transactional_id).state is S.COMPLETE_COMMIT
    assert bench.row(late.transactional_id).state is S.COMPLETE_ABORT
    assert bench.row(damaged.transactional_id).state is S.PREPARE_COMMIT
    recovery.recover(bench.store, cluster)
    assert bench.row(damaged.transactional_id).state is S.COMPLETE_COMMIT


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
def test_one_that_the_rules_cannot_complete_keeps_no_other_one_open(own_bench, elsewhere: bool) -> None:
    """Nor one whose time is up."""
    bench = own_bench
    cluster = Elsewhere(bench.store) if elsewhere else None
    producers = [bench.started(writes_elsewhere=True) for _ in range(2)]
    damaged, sound = sorted(producer.transactional_id for producer in producers)
    late = bench.started(timeout_ms=1_000)
    for producer in (*producers, late):
        producer.send(bench.partition_ids[0], b"a")
    for producer in producers:
        producer.decide(commit=True)
    # The next transaction would have no epoch, nor a new producer id.
    bench.set_row(damaged, producer_epoch=EPOCH_MAX + 1)
    bench.clock.advance(1_001)
    with pytest.raises(AssertionError, match=f"epoch {EPOCH_MAX + 1}"):
        recovery.recover(bench.store, cluster)
    assert bench.row(damaged).state is S.PREPARE_COMMIT
    assert bench.row(sound).state is S.COMPLETE_COMMIT
    assert bench.row(late.transactional_id).state is S.COMPLETE_ABORT


class Unreachable:
    """A cluster whose controller is away, of a client that has looked up nothing yet."""

    def own(self, _: int) -> NoReturn:
        raise StoreUnavailable

    def leaders_of(self, _: object) -> NoReturn:
        raise StoreUnavailable("the controller is away")

    def known_leaders(self, _: object) -> dict[int, int]:
        return {}

    def each(self, calls: dict[int, Callable[[], None]]) -> dict[int, None]:
        return dict.fromkeys(calls)


def test_a_marker_for_nobody_knows_where_is_not_taken_for_delivered(new_row) -> None:
    decided = new_row(S.PREPARE_COMMIT)
    left = PendingDelivery(decided, [marker_of(decided, 1)], [])
    (delivered,) = deliver(cast("Cluster", Unreachable()), 1, [left])
    assert not delivered.is_news
    assert isinstance(delivered.error, StoreUnavailable)
