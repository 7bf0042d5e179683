"""The coordinator of a sink: each batch of a query is visible once, whatever attempts, runs and replays there are."""

from __future__ import annotations

import itertools
import pickle
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from sqlalchemy import func, select

from tests.tools.made_up_input import assert_sound_but_for_input
from tests.transactions.bench import Bench, bench_on
from txnstore.db.schema import sink_batches, sink_inputs, sink_runs
from txnstore.errors import InvalidRequest, InvalidTransactionTimeout, ProducerFenced
from txnstore.groups.offsets import commit_offsets
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.model import GroupMembership, IsolationLevel, OffsetAndMetadata, Record
from txnstore.spark.sink_coordination import BATCHES_KEPT, RUNS_REMEMBERED, abort, decide, last_batch, open_writer
from txnstore.spark.sink_inputs import NO_GROUP, SinkInput, note_inputs
from txnstore.spark.sink_run import SinkRun, run_of_job, run_of_query
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.recovery import expire_transactional_ids
from txnstore.transactions.sinks import OF_LAST_BATCH
from txnstore.transactions.transaction import abort_if_timed_out
from txnstore.transactions.writers import append_as_writer

_numbers = itertools.count()


@dataclass
class Query:
    """A run of a streaming query that reads one partition and writes into another."""

    bench: Bench
    query_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    transactional_id: str | None = None
    in_commit_order: bool = False
    reader_id: int = 0
    from_group: bool = False

    @property
    def run(self) -> SinkRun:
        return run_of_query(self.query_id, self.run_id, self.transactional_id)

    @property
    def target(self) -> int:
        return self.bench.partition_ids[1]

    @property
    def group_id(self) -> str:
        return f"group-{self.query_id}"

    def restarted(self) -> Query:
        return replace(self, run_id=uuid.uuid4().hex)

    def read(self, batch_id, start, end, partition_id=None, group_id=None):
        source = self.bench.partition_ids[0] if partition_id is None else partition_id
        of_batch = (self.query_id, self.run_id, batch_id, self.group_id if group_id is None else group_id)
        of_reader = (self.in_commit_order, self.reader_id, self.from_group)
        note_inputs(self.bench.store, [SinkInput(*of_batch, source, start, end, *of_reader)])

    def task(self, batch_id, *values, report=True):
        """Write as one attempt of a task does; return its writer's id, or None if there is nothing to write."""
        writer = open_writer(self.bench.store, self.run, batch_id)
        if writer is None:
            return None
        batch = encode(
            [Record(value) for value in values], producer=writer.identity, base_sequence=0, is_transactional=True
        )
        append_as_writer(self.bench.store, writer, [Append(self.target, batch)], report=report)
        return writer.writer_id

    def decide(self, batch_id, *writers):
        return decide(self.bench.store, self.run, batch_id, writers)

    def abort(self, batch_id):
        return abort(self.bench.store, self.run, batch_id)

    def batch(self, batch_id, *values):
        return self.decide(batch_id, self.task(batch_id, *values))

    @property
    def visible(self):
        return self.bench.read(self.target)

    @property
    def offset(self):
        found = self.bench.offsets(self.group_id).offsets.get(self.bench.partition_ids[0])
        if found is None:
            return None
        assert found.offset_in_transaction == (0 if self.in_commit_order else None)
        return found.offset

    @property
    def last(self):
        return self.bench.store.read(lambda connection: last_batch(connection, self.run.sink_id))

    def count(self, table):
        name = "transactional_id" if table is sink_runs else "sink_id"
        value = self.run.transactional_id if table is sink_runs else self.run.sink_id
        statement = select(func.count()).select_from(table).where(table.c[name] == value)
        if table is sink_inputs:
            # What the last batch has read is kept.
            statement = statement.where(table.c.run_id != OF_LAST_BATCH)
        return self.bench.store.read(lambda connection: connection.execute(statement).scalar_one())


@pytest.fixture
def bench(store, clock):
    """A store that nobody else uses: all of it has to be sound in the end."""
    return bench_on(store, clock)


@pytest.fixture
def query(bench, request):
    query = Query(bench, in_commit_order=getattr(request, "param", False))
    yield query
    query.restarted().task(10**6, b"the last one")
    assert_sound_but_for_input(bench.store, partition_ids=bench.partition_ids)


EITHER_ORDER = pytest.mark.parametrize("query", [False, True], indirect=True, ids=["offset", "commit"])


@pytest.mark.slow_but_first
@EITHER_ORDER
def test_a_batch_of_several_tasks_becomes_visible_with_its_offsets_at_once(query) -> None:
    query.read(0, 0, 100)
    first, second = query.task(0, b"a"), query.task(0, b"b")
    assert (query.visible, query.offset, query.last) == ([], None, None)
    assert query.decide(0, first, second)
    assert (query.visible, query.offset, query.last) == ([b"a", b"b"], 100, 0)
    query.read(1, 100, 150)
    assert query.batch(1, b"c")
    assert (query.visible, query.offset, query.last) == ([b"a", b"b", b"c"], 150, 1)
    assert query.count(sink_inputs) == 0


def test_failed_retried_and_speculative_attempts_leave_nothing(query) -> None:
    query.task(0, b"failed", report=False)
    query.task(0, b"lost the race")
    assert query.decide(0, query.task(0, b"won"))
    assert query.visible == [b"won"]
    bounds = query.bench.bounds(query.target)
    assert bounds.last_stable_offset == bounds.high_watermark


def test_a_replay_of_a_decided_batch_is_dropped_and_writes_nothing(query) -> None:
    query.read(0, 0, 10)
    assert query.batch(0, b"a")
    replaying = query.restarted()
    replaying.read(0, 0, 10)
    assert replaying.task(0, b"a") is None
    assert not replaying.decide(0)
    assert (query.visible, query.offset, replaying.count(sink_inputs)) == ([b"a"], 10, 1)
    assert len(query.bench.read(query.target, IsolationLevel.READ_UNCOMMITTED)) == 1
    replaying.read(1, 10, 20)
    assert replaying.batch(1, b"b")
    assert (query.visible, query.offset) == ([b"a", b"b"], 20)


def test_a_decision_whose_answer_was_lost_may_be_repeated_and_aborted(query) -> None:
    writer = query.task(0, b"a")
    assert query.decide(0, writer)
    assert not query.decide(0, writer)
    assert not query.abort(0)
    assert query.visible == [b"a"]
    assert query.restarted().batch(1, b"b")


@pytest.mark.slow_but_first
@EITHER_ORDER
@pytest.mark.parametrize("group_id", [NO_GROUP, None], ids=["no group", "group"])
def test_a_decision_that_is_repeated_is_still_known_by_what_its_batch_has_read(query, group_id) -> None:
    query.read(0, 0, 10, group_id=group_id)
    assert query.batch(0, b"a")
    assert not query.decide(0)
    # An attempt that was slower than the one that counts.
    query.read(0, 0, 5, group_id=group_id)
    assert not query.decide(0)
    replaying = query.restarted()
    replaying.read(0, 0, 10, group_id=group_id)
    assert replaying.task(0, b"a") is None
    # Dropped, and the answer to that may be lost as well.
    assert [replaying.decide(0), replaying.decide(0)] == [False, False]
    replaying.read(1, 10, 20, group_id=group_id)
    assert replaying.batch(1, b"b")
    assert not replaying.decide(1)
    assert query.visible == [b"a", b"b"]


@pytest.mark.slow_but_first
@EITHER_ORDER
@pytest.mark.parametrize("group_id", [NO_GROUP, None], ids=["no group", "group"])
def test_a_decision_of_a_batch_that_has_written_nothing_may_be_repeated(query, group_id) -> None:
    for batch_id in range(2):
        query.read(batch_id, batch_id * 10, batch_id * 10 + 10, group_id=group_id)
        assert [query.decide(batch_id), query.decide(batch_id)] == [True, False]
    query.read(2, 20, 30, group_id=group_id)
    assert query.batch(2, b"a")
    assert query.visible == [b"a"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("group_id", [NO_GROUP, None], ids=["no group", "group"])
def test_a_decision_that_a_dead_driver_left_on_its_way_takes_nothing_from_the_next_run(query, group_id) -> None:
    query.read(0, 0, 10, group_id=group_id)
    writer = query.task(0, b"a")
    query.bench.clock.advance(1)
    replaying = query.restarted()
    replaying.read(0, 0, 10, group_id=group_id)
    assert query.decide(0, writer)
    assert replaying.task(0, b"a") is None
    assert not replaying.decide(0)
    assert query.visible == [b"a"]


@pytest.mark.slow_but_first
@EITHER_ORDER
def test_what_a_dead_run_left_is_aborted_by_the_next_one(query) -> None:
    query.read(0, 0, 10)
    query.task(0, b"dead")
    assert query.bench.bounds(query.target).last_stable_offset == 0
    next_run = query.restarted()
    next_run.read(0, 0, 10)
    assert next_run.batch(0, b"alive")
    assert (query.visible, query.offset) == ([b"alive"], 10)
    assert query.count(sink_inputs) == 0


def test_a_superseded_run_is_fenced_in_all_it_does_and_changes_nothing(query) -> None:
    old_writer = open_writer(query.bench.store, query.run, 0)
    assert old_writer is not None
    written = query.task(0, b"old")
    new = query.restarted()
    new_writer = new.task(0, b"new")
    batch = encode([Record(b"x")], producer=old_writer.identity, base_sequence=0, is_transactional=True)
    for call in (
        lambda: query.task(0, b"late"),
        lambda: query.decide(0, written),
        lambda: query.decide(0),
        lambda: append_as_writer(query.bench.store, old_writer, [Append(query.target, batch)]),
    ):
        with pytest.raises(ProducerFenced):
            call()
    assert not query.abort(0)
    assert new.decide(0, new_writer)
    assert query.visible == [b"new"]


def test_an_empty_batch_is_remembered_and_moves_the_offsets(query) -> None:
    query.read(0, 0, 7)
    assert query.decide(0)
    assert (query.last, query.offset, query.visible) == (0, 7, [])
    assert query.decide(1)
    assert not query.restarted().decide(1)
    assert (query.last, query.offset) == (1, 7)


def test_a_decision_names_only_writers_that_reported_in_the_open_transaction(query) -> None:
    good, silent = query.task(0, b"good"), query.task(0, b"silent", report=False)
    for wrong in (silent, 10**12):
        with pytest.raises(ProducerFenced, match=r"1 of 2 writers of batch 0 .*nothing was changed"):
            query.decide(0, good, wrong)
    assert (query.visible, query.last) == ([], None)
    assert query.decide(0, good)
    assert query.visible == [b"good"]


def test_a_batch_that_took_too_long_is_fenced_and_may_begin_again(query) -> None:
    writer = query.task(0, b"slow")
    query.bench.clock.advance(900_001)
    assert abort_if_timed_out(query.bench.store, query.run.transactional_id)
    with pytest.raises(
        ProducerFenced, match=r"longer than its timeout.*\. A batch, and a whole batch write, .*max\.timeout\.ms first"
    ):
        query.decide(0, writer)
    assert (query.visible, query.last) == ([], None)
    late = query.task(0, b"a task that begins only now")
    with pytest.raises(ProducerFenced, match=r"1 of 2 writers .* too long\? .*transaction\.max\.timeout\.ms first"):
        query.decide(0, writer, late)
    assert query.abort(0)
    query = query.restarted()
    assert query.decide(0, query.task(0, b"restarted"))
    assert query.visible == [b"restarted"]


def test_a_task_that_is_tried_again_after_the_timeout_begins_again(query) -> None:
    query.task(0, b"slow")
    query.bench.clock.advance(900_001)
    assert abort_if_timed_out(query.bench.store, query.run.transactional_id)
    assert query.batch(0, b"again")
    assert query.visible == [b"again"]


def test_abort_touches_what_is_open_of_its_own_run_only(query) -> None:
    query.task(0, b"a")
    assert query.abort(0)
    assert not query.abort(0)
    second = query.restarted()
    assert second.batch(0, b"b")
    second.task(1, b"c")
    assert query.bench.row(query.run.transactional_id).state is TransactionState.ONGOING
    third = query.restarted()
    kept = third.task(1, b"d")
    assert not second.abort(1)
    assert not query.abort(1)
    assert third.decide(1, kept)
    assert query.visible == [b"b", b"d"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("has_begun", [True, False], ids=["which had begun", "which had not begun"])
def test_tasks_that_come_after_the_abort_of_their_run_leave_nothing_open(query, has_begun) -> None:
    writer = open_writer(query.bench.store, query.run, 0) if has_begun else None
    assert query.abort(0) is has_begun
    with pytest.raises(ProducerFenced, match="is over: its driver has aborted it; nothing was changed"):
        query.task(0, b"late")
    with pytest.raises(ProducerFenced, match="is over"):
        query.decide(0)
    if writer is not None:
        batch = encode([Record(b"x")], producer=writer.identity, base_sequence=0, is_transactional=True)
        with pytest.raises(ProducerFenced):
            append_as_writer(query.bench.store, writer, [Append(query.target, batch)])
    assert query.bench.row(query.run.transactional_id).state is not TransactionState.ONGOING
    bounds = query.bench.bounds(query.target)
    assert bounds.last_stable_offset == bounds.high_watermark
    assert query.restarted().batch(0, b"next")
    assert query.visible == [b"next"]
    with pytest.raises(ProducerFenced, match="is over"):
        query.task(1, b"later")


def test_a_run_that_is_over_before_it_began_has_superseded_nobody(query) -> None:
    left = query.task(0, b"a")
    assert not query.restarted().abort(0)
    assert query.decide(0, left)
    assert query.batch(1, b"b")
    assert query.visible == [b"a", b"b"]


def test_a_run_is_aborted_whatever_timeout_the_store_allows(query) -> None:
    query.bench.set_store({"transaction.max.timeout.ms": "1000"})
    assert not query.abort(0)
    with pytest.raises(ProducerFenced, match="is over"):
        open_writer(query.bench.store, query.run, 0, timeout_ms=1_000)
    query.bench.set_store({"transaction.max.timeout.ms": None})


def test_another_query_under_the_same_transactional_id_fences_the_first_and_begins_anew(query) -> None:
    name = f"{query.bench.prefix}-shared"
    first, second = replace(query, transactional_id=name), Query(query.bench, transactional_id=name)
    assert first.batch(0, b"first 0")
    left = first.task(1, b"first 1")
    assert second.batch(0, b"second 0")
    with pytest.raises(ProducerFenced, match="superseded"):
        first.decide(1, left)
    assert query.visible == [b"first 0", b"second 0"]
    # Its old checkpoint again: what it had committed is not committed twice.
    again = first.restarted()
    assert again.task(0, b"first 0") is None
    assert again.batch(1, b"first 1")
    assert query.visible == [b"first 0", b"second 0", b"first 1"]


def test_another_producer_with_the_transactional_id_fences_a_run(query) -> None:
    mine = replace(query, transactional_id=f"{query.bench.prefix}-shared")
    writer = mine.task(0, b"a")
    other = query.bench.producer(mine.transactional_id)
    other.start()
    for call in (lambda: mine.task(0, b"b"), lambda: mine.decide(0, writer)):
        with pytest.raises(ProducerFenced, match="another producer uses"):
            call()
    assert not mine.abort(0)
    assert query.visible == []


def test_numbers_that_an_older_checkpoint_has_had_dropped_are_not_missing(query) -> None:
    query.read(0, 0, 5, partition_id=query.target)
    for batch_id in range(3):
        query.read(batch_id, batch_id * 10, batch_id * 10 + 10)
        assert query.batch(batch_id, b"%d" % batch_id)
    older = query.restarted()
    # Its batches are cut otherwise: this one reads what is new elsewhere.
    older.read(1, 5, 10, partition_id=query.target)
    assert older.batch(1, b"new")
    older.read(2, 10, 30)
    assert not older.decide(2)
    assert older.last == 1
    # Of two tasks the one that reads on may be the first to note it.
    older.read(3, 35, 40)
    last = older.task(3, b"last")
    older.read(3, 30, 35)
    assert older.decide(3, last)
    older.read(5, 50, 60)
    with pytest.raises(ProducerFenced, match="comes after batch 3 in this store"):
        older.batch(5, b"past what is missing")


@pytest.mark.slow_but_first
@EITHER_ORDER
def test_an_older_checkpoint_drops_what_was_read_before_and_goes_on_with_the_rest(query) -> None:
    for batch_id in range(4):
        query.read(batch_id, batch_id * 10, batch_id * 10 + 10)
        assert query.batch(batch_id, b"%d" % batch_id)
    older = query.restarted()
    # Cut otherwise than before: 10 to 30, 30 to 40; the numbers are those of batches that were decided with others.
    older.read(1, 10, 30)
    assert older.task(1, b"1 2") is None
    assert not older.decide(1)
    older.read(2, 30, 40)
    assert not older.decide(2)
    older.read(3, 40, 50)
    assert older.batch(3, b"4")
    older.read(4, 50, 60)
    assert older.batch(4, b"5")
    assert (query.visible, query.offset) == ([b"0", b"1", b"2", b"3", b"4", b"5"], 60)


def test_more_batches_than_before_are_dropped_while_they_repeat(query) -> None:
    query.read(0, 0, 30)
    assert query.batch(0, b"a")
    older = query.restarted()
    for batch_id in range(3):
        older.read(batch_id, batch_id * 10, batch_id * 10 + 10)
        assert not older.decide(batch_id)
    assert query.offset == 30


@pytest.mark.slow_but_first
@pytest.mark.parametrize("batch_id", [0, 1])
def test_a_batch_that_repeats_only_a_part_is_refused(query, batch_id) -> None:
    query.read(0, 0, 30)
    assert query.batch(0, b"a")
    older = query.restarted()
    older.read(batch_id, 20, 40)
    for call in (lambda: older.task(batch_id, b"b"), lambda: older.decide(batch_id)):
        with pytest.raises(ProducerFenced, match="startingOffsets=group"):
            call()
    assert (query.visible, query.offset) == ([b"a"], 30)


def test_partitions_of_which_one_repeats_and_one_is_new_are_refused(query) -> None:
    query.read(0, 0, 30)
    assert query.batch(0, b"a")
    query.read(1, 20, 30)
    query.read(1, 0, 5, partition_id=query.target)
    with pytest.raises(ProducerFenced, match="startingOffsets=group"):
        query.decide(1)


@pytest.mark.slow_but_first
@EITHER_ORDER
def test_a_partition_read_by_several_tasks_is_committed_to_its_end(query) -> None:
    for start, end in ((5, 10), (0, 5), (10, 12), (12, 12)):
        query.read(0, start, end)
        query.read(0, start, end)
    assert query.batch(0, b"a")
    assert query.offset == 12


@pytest.mark.slow_but_first
@EITHER_ORDER
def test_a_group_that_has_committed_in_the_other_order_is_not_moved_until_a_reset_says_so(query) -> None:
    store, source = query.bench.store, query.bench.partition_ids[0]
    own, other = OffsetAndMetadata(3), OffsetAndMetadata(4, offset_in_transaction=2)
    if query.in_commit_order:
        own, other = other, own
    committer = GroupMembership(query.group_id)
    store.write(lambda connection: commit_offsets(connection, committer, {source: other}))
    query.read(0, 5, 9)
    writer = query.task(0, b"a")
    with pytest.raises(InvalidRequest, match="reset-offsets"):
        query.decide(0, writer)
    assert query.bench.offsets(query.group_id).offsets == {source: other}
    assert (query.visible, query.last, query.count(sink_inputs)) == ([], None, 1)
    store.write(lambda connection: commit_offsets(connection, committer, {source: own}, changes_order=True))
    assert query.decide(0, writer)
    assert (query.visible, query.offset, query.last) == ([b"a"], 9, 0)


@pytest.mark.slow_but_first
@EITHER_ORDER
@pytest.mark.parametrize("before", ["earlier", "same"])
def test_a_query_that_reads_a_partition_in_both_orders_is_refused(query, before) -> None:
    query.read(0, 0, 7)
    if before == "earlier":
        assert query.batch(0, b"a")
    visible, batch_id = query.visible, query.visible.count(b"a")
    # Where the one begins, too: neither takes the place of the other.
    both = replace(query, in_commit_order=not query.in_commit_order)
    both.read(batch_id, 7 * batch_id, 9)
    for call in (lambda: both.task(batch_id, b"b"), lambda: both.decide(batch_id)):
        with pytest.raises(InvalidRequest, match="in both orders of delivery"):
            call()
    assert (query.visible, query.last) == (visible, 0 if visible else None)


@pytest.mark.slow_but_first
@EITHER_ORDER
@pytest.mark.parametrize("end", [7, 9])
def test_two_readers_of_a_partition_as_one_group_are_refused(query, end) -> None:
    query.read(0, 0, 7)
    # The one that is behind would have its records taken for a replay.
    other = replace(query, reader_id=1)
    other.read(0, 0, end)
    for call in (lambda: other.task(0, b"b"), lambda: query.decide(0)):
        with pytest.raises(InvalidRequest, match=r"two readers .* kafka\.group\.id of its own"):
            call()
    assert (query.visible, query.last, query.offset) == ([], None, None)


def test_two_readers_as_one_group_may_read_partitions_of_their_own(query) -> None:
    query.read(0, 0, 7)
    replace(query, reader_id=1).read(0, 0, 5, partition_id=query.target)
    assert query.batch(0, b"a")
    assert query.visible == [b"a"]


def test_without_a_group_only_the_last_batch_is_a_replay_and_an_older_checkpoint_is_refused(query) -> None:
    for batch_id in range(3):
        assert query.batch(batch_id, b"%d" % batch_id)
    older = query.restarted()
    for call in (lambda: older.task(1, b"what came meanwhile"), lambda: older.decide(1)):
        with pytest.raises(ProducerFenced, match=r"batch 1 .* up to 2; .* checkpoint is older"):
            call()
    assert older.task(2, b"again") is None
    assert not older.decide(2)
    assert older.batch(3, b"3")
    assert query.visible == [b"0", b"1", b"2", b"3"]


@pytest.mark.slow_but_first
@EITHER_ORDER
def test_without_a_group_a_replay_of_the_last_batch_reads_what_that_has_read(query) -> None:
    query.read(0, 0, 10, group_id=NO_GROUP)
    query.read(0, 10, 20, group_id=NO_GROUP)
    query.read(0, 5, 5, partition_id=query.target, group_id=NO_GROUP)
    assert query.batch(0, b"a")
    # A checkpoint of one batch before: it has planned its next batch anew, with what came meanwhile.
    older = query.restarted()
    older.read(0, 0, 25, group_id=NO_GROUP)
    assert older.task(0, b"a and more") is None
    with pytest.raises(ProducerFenced, match="but read something else then; nothing was changed"):
        older.decide(0)
    another = query.restarted()
    another.read(0, 0, 20, group_id=NO_GROUP)
    another.read(0, 0, 5, partition_id=query.target, group_id=NO_GROUP)
    with pytest.raises(ProducerFenced, match="but read something else"):
        another.decide(0)
    with pytest.raises(ProducerFenced, match="but read something else"):
        query.restarted().decide(0)
    # However its tasks share it out, and as often as it comes.
    for edges in ((0, 20), (0, 7, 14, 20)):
        query = query.restarted()
        for start, end in itertools.pairwise(edges):
            query.read(0, start, end, group_id=NO_GROUP)
        assert query.task(0, b"a") is None
        assert not query.decide(0)
    older = query.restarted()
    older.read(0, 0, 25, group_id=NO_GROUP)
    with pytest.raises(ProducerFenced, match="but read something else"):
        older.decide(0)
    query = query.restarted()
    query.read(1, 20, 25, group_id=NO_GROUP)
    assert query.batch(1, b"more")
    assert (query.visible, query.offset) == ([b"a", b"more"], None)


def test_two_readers_without_a_group_may_read_one_partition(query) -> None:
    for batch_id in range(2):
        query.read(batch_id, 0, 10, group_id=NO_GROUP)
        replace(query, reader_id=1).read(batch_id, 0, 5 + batch_id, group_id=NO_GROUP)
        assert query.batch(batch_id, b"%d" % batch_id)
    again, older = query.restarted(), query.restarted()
    for replay, end in ((again, 6), (older, 7)):
        replace(replay, reader_id=2).read(1, 0, end, group_id=NO_GROUP)
        replace(replay, reader_id=3).read(1, 0, 10, group_id=NO_GROUP)
    with pytest.raises(ProducerFenced, match="but read something else"):
        older.decide(1)
    assert not again.decide(1)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("before", [NO_GROUP, "one"])
@pytest.mark.parametrize(("now", "from_group"), [(NO_GROUP, False), ("another", False), ("another", True)])
def test_a_query_that_reads_as_another_group_from_now_on_writes_its_last_batch_once(
    query, before, now, from_group
) -> None:
    query.read(0, 0, 10, group_id=before)
    assert query.batch(0, b"a")
    query = replace(query, from_group=from_group)
    again, older = query.restarted(), query.restarted()
    again.read(0, 0, 10, group_id=now)
    assert again.task(0, b"a") is None
    assert not again.decide(0)
    older.read(0, 0, 12, group_id=now)
    with pytest.raises(ProducerFenced, match="but read something else"):
        older.decide(0)
    again = again.restarted()
    again.read(1, 10, 20, group_id=now)
    assert again.batch(1, b"b")
    assert query.visible == [b"a", b"b"]


def test_where_nobody_knows_what_the_last_batch_has_read_its_number_says_it_but_for_a_group(query) -> None:
    assert query.batch(0, b"a")
    again, grouped = query.restarted(), query.restarted()
    again.read(0, 0, 10, group_id=NO_GROUP)
    assert not again.decide(0)
    grouped.read(0, 0, 10)
    with pytest.raises(ProducerFenced, match="but read something else"):
        grouped.decide(0)
    query = query.restarted()
    query.read(1, 0, 10)
    assert query.batch(1, b"b")
    assert query.decide(2)
    query = query.restarted()
    query.read(2, 10, 20)
    query.read(2, 0, 10, partition_id=query.target, group_id=NO_GROUP)
    with pytest.raises(ProducerFenced, match="but read something else"):
        query.decide(2)
    assert query.visible == [b"a", b"b"]


def test_of_readers_with_a_group_and_without_one_an_older_checkpoint_is_refused(query) -> None:
    def read(run, batch_id, grouped, other):
        run.read(batch_id, *grouped)
        run.read(batch_id, *other, partition_id=query.target, group_id=NO_GROUP)
        return run

    for batch_id in range(3):
        read(query, batch_id, (batch_id, batch_id + 1), (batch_id, batch_id + 1))
        assert query.batch(batch_id, b"%d" % batch_id)
    for batch_id, grouped, other in (
        (1, (1, 2), (1, 4)),
        (1, (1, 1), (1, 4)),
        (1, (3, 4), (1, 2)),
        (2, (2, 3), (2, 4)),
        (2, (2, 2), (2, 4)),
        (2, (3, 4), (2, 3)),
        (3, (2, 3), (3, 4)),
    ):
        older = read(query.restarted(), batch_id, grouped, other)
        with pytest.raises(ProducerFenced, match="older than what it has written"):
            older.decide(batch_id)
    assert not read(query.restarted(), 2, (2, 3), (2, 3)).decide(2)
    assert read(query.restarted(), 3, (3, 4), (3, 3)).batch(3, b"3")
    assert query.visible == [b"0", b"1", b"2", b"3"]


def test_a_batch_of_which_a_task_was_told_that_it_is_decided_is_not_committed_without_that_task(query) -> None:
    for batch_id in range(2):
        query.read(batch_id, batch_id, batch_id + 1)
        assert query.batch(batch_id, b"%d" % batch_id)
    older = query.restarted()
    # It reads what nobody knows of, and comes before those that say what they read.
    assert older.task(1, b"of another source") is None
    older.read(1, 2, 3)
    written = older.task(1, b"2")
    with pytest.raises(ProducerFenced, match="a task of batch 1 wrote nothing"):
        decide(older.bench.store, older.run, 1, [written], is_left_out=True)
    assert (query.visible, query.offset) == ([b"0", b"1"], 2)


def test_with_a_group_an_empty_batch_of_an_older_checkpoint_is_dropped(query) -> None:
    for batch_id in range(3):
        query.read(batch_id, batch_id, batch_id + 1)
        assert query.batch(batch_id, b"%d" % batch_id)
    older = query.restarted()
    assert not older.decide(1)
    older.read(2, 3, 4)
    assert older.batch(2, b"3")
    assert query.visible == [b"0", b"1", b"2", b"3"]


def test_batches_without_input_are_new_once_an_older_checkpoint_has_come_to_something_new(query) -> None:
    for batch_id in range(5):
        query.read(batch_id, batch_id * 10, batch_id * 10 + 10)
        assert query.batch(batch_id, b"%d" % batch_id)
    older = query.restarted()
    older.read(1, 10, 50)
    assert [older.decide(1), older.decide(2)] == [False, False]
    older.read(3, 50, 60)
    # The answer may be lost, and it is decided once more.
    assert [older.batch(3, b"5"), older.decide(3)] == [True, False]
    # Spark runs one for what a watermark lets out of the query's state.
    writer = older.task(4, b"of its state")
    assert writer is not None
    assert [older.decide(4, writer), older.restarted().decide(4)] == [True, False]
    assert query.visible[5:] == [b"5", b"of its state"]


def test_a_query_that_begins_anew_with_the_same_group_reads_and_writes_it_again(query) -> None:
    query.read(0, 0, 30)
    assert query.batch(0, b"a")
    note_inputs(
        query.bench.store,
        [SinkInput("another", "another run", 0, query.group_id, query.bench.partition_ids[0], 0, 20)],
    )
    another = run_of_query("another", "another run", f"{query.bench.prefix}-another")
    assert decide(query.bench.store, another, 0, ())
    assert query.offset == 20


def test_what_runs_note_is_not_kept_for_ever(query) -> None:
    for batch_id in range(5):
        query.read(batch_id, batch_id, batch_id + 1)
    assert query.count(sink_inputs) == 1


@pytest.mark.slow
def test_batches_and_runs_are_not_kept_for_ever(query) -> None:
    for batch_id in (0, 1, 2, BATCHES_KEPT + 1):
        assert query.decide(batch_id)
    assert query.count(sink_batches) == 2
    for _ in range(RUNS_REMEMBERED + 2):
        query = query.restarted()
        assert not query.decide(BATCHES_KEPT + 1)
    assert query.count(sink_runs) == RUNS_REMEMBERED


def test_a_version_of_an_application_is_written_once(bench) -> None:
    app = bench.prefix

    def write(version, *values):
        run = run_of_job(uuid.uuid4().hex, app_id=app)
        writer = open_writer(bench.store, run, version)
        if writer is not None:
            batch = encode(
                [Record(value) for value in values], producer=writer.identity, base_sequence=0, is_transactional=True
            )
            append_as_writer(bench.store, writer, [Append(bench.partition_ids[0], batch)], report=True)
        return decide(bench.store, run, version, [] if writer is None else [writer.writer_id])

    assert [write(3, b"3"), write(3, b"again"), write(2, b"older"), write(4, b"4")] == [True, False, False, True]
    assert bench.read(bench.partition_ids[0]) == [b"3", b"4"]


def test_jobs_of_their_own_are_written_each_and_forgotten_with_their_transactional_id(bench) -> None:
    store = bench.store
    runs = [run_of_job(uuid.uuid4().hex) for _ in range(2)]
    query = Query(bench)
    query.batch(0, b"a")
    for run in runs:
        assert decide(store, run, 0, [])
        assert not decide(store, run, 0, [])
    bench.clock.advance(8 * 24 * 3600 * 1000)
    expired = expire_transactional_ids(store)
    assert query.run.transactional_id in expired
    kept = store.read(lambda connection: connection.execute(select(sink_batches.c.sink_id)).scalars().all())
    assert kept == [query.run.sink_id]
    # A query that had nothing to do for long goes on, in the same run.
    assert query.batch(1, b"b")
    assert not query.restarted().decide(1)
    assert query.visible == [b"a", b"b"]
    left = store.read(lambda connection: connection.execute(select(sink_runs.c.transactional_id)).scalars().all())
    assert set(left) == {query.run.transactional_id}


def test_arguments_that_mean_nothing_are_refused_before_anything_happens(query) -> None:
    store: Any = query.bench.store
    run = query.run
    numbers: list[Any] = [-1, True, "0", None, 2**63]
    names_of_writers: list[Any] = ["1"]
    for batch_id in numbers:
        for call in (lambda: open_writer(store, run, batch_id), lambda: decide(store, run, batch_id, ())):  # noqa: B023
            with pytest.raises(InvalidRequest, match="a batch id is a whole number"):
                call()
    with pytest.raises(InvalidRequest, match="a writer id"):
        decide(store, run, 0, names_of_writers)
    with pytest.raises(InvalidTransactionTimeout):
        open_writer(store, run, 0, timeout_ms=0)
    with pytest.raises(InvalidRequest, match="begins at 5 and ends at 4"):
        query.read(0, 5, 4)
    with pytest.raises(InvalidRequest, match="a run"):
        replace(query, run_id="").read(0, 0, 1)
    for names in (("query", ""), ("query", "\0"), ("q" * 1201, "run"), ("\u20ac" * 401, "run"), ("query", "r" * 201)):
        with pytest.raises(InvalidRequest):
            run_of_query(*names, "transactional")
    assert (query.last, query.count(sink_runs)) == (None, 0)
    assert pickle.loads(pickle.dumps(run)) == run
