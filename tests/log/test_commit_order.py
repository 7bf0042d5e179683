"""The fetch in commit order: whole transactions at their markers, in whatever pages and from wherever it begins."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, event

from tests.log.compacted_log import CompactedLog, Transaction
from tests.log.histories import Log
from tests.log.places import FIGURE, STEPS, Model, take, write_figure
from tests.tools.campaigns import times
from txnstore.db.schema import record_batches
from txnstore.db.store import Store
from txnstore.errors import OffsetOutOfRange, UnknownTopicOrPartition
from txnstore.log import commit_order
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import decode
from txnstore.log.commit_order import CommitPage, CommitPosition, CutTransaction, fetch_in_commit_order, first_cut
from txnstore.log.deleting import advance_log_start
from txnstore.testing.manual_clock import ManualClock

START = CommitPosition(0)


def page_of(log: Log | CompactedLog, position: CommitPosition, **options: Any) -> CommitPage:
    partition_id = log.id if isinstance(log, Log) else log.partition
    read = partial(fetch_in_commit_order, positions={partition_id: position}, **options)
    return log.store.read(read)[partition_id]


def records_of(page: CommitPage) -> list[tuple[int, bytes | None]]:
    return [
        (record.offset, record.value) for placed in page.batches for record in placed.batch.records(placed.from_offset)
    ]


def read_all(
    log: Log | CompactedLog, position: CommitPosition = START, **options: Any
) -> list[tuple[int, bytes | None]]:
    """Return all records behind the position, page after page; the last page leaves the reader at the end."""
    found: list[tuple[int, bytes | None]] = []
    while True:
        page = page_of(log, position, **options)
        for placed in page.batches:
            assert position.place <= placed.start.place
            assert placed.start < page.next_position
        found += records_of(page)
        if page.next_position == position:
            assert position == CommitPosition(page.bounds.high_watermark)
            return found
        assert page.next_position > position
        position = page.next_position


def read_places(log: Log, places: range, **options: Any) -> list[tuple[int, bytes | None]]:
    """Return all records at these places, from pages that end there."""
    found: list[tuple[int, bytes | None]] = []
    position = CommitPosition(places.start)
    while position.place < places.stop:
        page = page_of(log, position, end_places={log.id: places.stop}, **options)
        assert all(placed.start.place < places.stop for placed in page.batches)
        found += records_of(page)
        assert page.next_position > position
        position = page.next_position
    # Of a batch outside transactions the rest comes along.
    return [(offset, value) for offset, value in found if offset < places.stop]


@pytest.fixture
def log(shared_store: Store) -> Log:
    return Log(shared_store)


def test_the_transaction_that_commits_first_comes_first_and_what_is_in_none_at_its_own_place(log: Log) -> None:
    write_figure(log)
    assert [value for _, value in read_all(log)] == FIGURE


def test_an_open_transaction_holds_nobody_back_and_an_aborted_one_never_comes(log: Log) -> None:
    log.write("A", b"open")
    log.write("B", b"aborted")
    log.write("C", b"committed")
    log.abort("B")
    log.commit("C")
    log.plain(b"plain")
    page = page_of(log, CommitPosition(0))
    assert [value for _, value in records_of(page)] == [b"committed", b"plain"]
    assert page.next_position == CommitPosition(page.bounds.high_watermark)
    log.commit("A")
    assert read_all(log, page.next_position) == [(0, b"open")]
    # One that begins just before the reader's place comes, too.
    at = log.write("B", b"just before")
    log.commit("B")
    assert read_all(log, CommitPosition(at + 1)) == [(at, b"just before")]


def test_what_was_open_comes_at_its_marker_however_long_ago_it_began(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_order, "STRETCH_BATCHES", 2)
    monkeypatch.setattr(commit_order, "WALK_BATCHES", 3)
    monkeypatch.setattr(commit_order, "WALKS_MAX", 2)
    monkeypatch.setattr(commit_order, "PAGE_OFFSETS_MAX", 3)
    first = log.write("A", b"first")
    for number in range(20):
        log.plain(b"%d" % number)
    last = log.write("A", b"last")
    position = CommitPosition(log.plain(b"before"))
    log.commit("A")
    log.plain(b"behind")
    values = [b"before", b"first", b"last", b"behind"]
    assert [value for _, value in read_all(log, position)] == values
    assert [value for _, value in read_all(log, CommitPosition(position.place + 1, first + 1))] == values[2:]
    assert [value for _, value in read_all(log, CommitPosition(position.place + 1, last + 1))] == values[3:]


def test_of_two_that_were_open_for_long_the_first_to_commit_comes_first_and_whole(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_order, "STRETCH_BATCHES", 2)
    log.write("A", b"A")
    log.write("B", b"B first")
    for number in range(20):
        log.plain(b"%d" % number)
    log.write("B", b"B last")
    position = CommitPosition(log.plain(b"before"))
    log.commit("B")
    log.commit("A")
    assert [value for _, value in read_all(log, position)] == [b"before", b"B first", b"B last", b"A"]


@pytest.mark.slow
def test_a_position_within_something_that_is_no_committed_transaction_is_that_of_its_place(log: Log) -> None:
    log.plain(b"0", b"1")
    log.write("A", b"aborted")
    log.abort("A")
    log.plain(b"4")
    for position in (CommitPosition(1, 1), CommitPosition(1, 99)):
        assert [value for _, value in read_all(log, position)] == [b"1", b"4"]
    assert [value for _, value in read_all(log, CommitPosition(3, 3))] == [b"4"]
    page = page_of(log, CommitPosition(5, 3))
    assert (page.batches, page.next_position) == ((), CommitPosition(5))


def test_a_transaction_of_which_a_part_is_deleted_is_left_out_unless_the_reader_is_in_it(log: Log) -> None:
    for value in (b"a0", b"a1", b"a2"):
        log.write("A", value)
    log.commit("A")  # 3
    log.plain(b"4")
    log.store.write(lambda connection: advance_log_start(connection, log.id, 2))
    assert read_all(log, CommitPosition(2)) == [(4, b"4")]
    assert read_all(log, CommitPosition(3)) == [(4, b"4")]
    # Who had not begun it does not begin it now.
    assert read_all(log, CommitPosition(3, 0)) == [(4, b"4")]
    # Who has read the first two goes on; who has read one would miss the second.
    assert read_all(log, CommitPosition(3, 2)) == [(2, b"a2"), (4, b"4")]
    with pytest.raises(OffsetOutOfRange, match="offset 1 of the transaction at place 3 lies before the log start 2"):
        page_of(log, CommitPosition(3, 1))
    # Deleted before it was committed, it is not whole either, and who stands before its first record has not begun it.
    first = log.write("B", b"b0")
    log.store.write(lambda connection: advance_log_start(connection, log.id, first + 1))
    log.write("B", b"b1")
    log.commit("B")
    marker_offset = first + 2
    assert read_all(log, CommitPosition(first + 1)) == []
    assert read_all(log, CommitPosition(marker_offset, first)) == []
    assert read_all(log, CommitPosition(marker_offset, first + 1)) == [(first + 1, b"b1")]


def test_each_batch_comes_with_the_position_at_which_it_is_read_again(log: Log) -> None:
    log.plain(b"0", b"1")
    for value in (b"2", b"3", b"4"):
        log.write("A", value)
    log.commit("A")  # 5
    log.plain(b"6")
    page = page_of(log, CommitPosition(1))
    starts = [CommitPosition(1), *(CommitPosition(5, offset) for offset in (0, 3, 4)), CommitPosition(6)]
    assert [placed.start for placed in page.batches] == starts
    assert [placed.start for placed in page_of(log, CommitPosition(5, 3)).batches] == starts[2:4]
    for number, start in enumerate(starts):
        assert read_all(log, start) == [(offset, b"%d" % offset) for offset in (1, 2, 3, 4, 6)][number:]


def test_what_does_not_come_because_a_part_of_it_is_deleted_can_be_asked_for(log: Log) -> None:
    for name in ("A", "B", "C"):
        log.write(name, name.encode())
    log.plain(b"plain")
    log.abort("A")  # 4
    log.commit("B")
    log.commit("C")  # 6

    def cut(places: range, from_offset: int) -> CutTransaction | None:
        def ask(connection: Connection) -> CutTransaction | None:
            return first_cut(connection, read_bounds(connection, [log.id])[log.id], places, from_offset)

        return log.store.read(ask)

    assert cut(range(7), 0) is None
    log.store.write(lambda connection: advance_log_start(connection, log.id, 3))
    assert cut(range(7), 0) == cut(range(5, 6), 1) == CutTransaction(5, 1)
    assert cut(range(6, 7), 0) == cut(range(7), 2) == CutTransaction(6, 2)
    assert cut(range(5), 0) is cut(range(6), 2) is cut(range(7), 3) is None


@pytest.mark.parametrize("place", [-1, 1, 5, 2**63 - 1])
def test_a_place_outside_the_log_is_refused(log: Log, place: int) -> None:
    log.plain(b"0", b"1", b"2", b"3")
    log.store.write(lambda connection: advance_log_start(connection, log.id, 2))
    with pytest.raises(OffsetOutOfRange, match=rf"partition id {log.id}: place {place} is not within 2 to 4"):
        page_of(log, CommitPosition(place))
    assert page_of(log, CommitPosition(4)).batches == ()
    with pytest.raises(UnknownTopicOrPartition):
        log.store.read(lambda connection: fetch_in_commit_order(connection, {10**12: CommitPosition(0)}))


def test_the_bounds_of_a_page_hold_for_all_partitions_together_and_one_batch_comes_at_least(log: Log) -> None:
    for partition_id in log.partition_ids:
        for _ in range(2):
            log.write("A", b"x", b"y", partition_id=partition_id)
    log.commit("A", *log.partition_ids)
    start = dict.fromkeys(log.partition_ids, CommitPosition(0))

    def counts(**options: Any) -> list[int]:
        pages = log.store.read(lambda connection: fetch_in_commit_order(connection, start, **options))
        return [len(pages[partition_id].batches) for partition_id in log.partition_ids]

    assert counts(records_max=1) == [1, 0, 0]
    assert counts(records_max=5) == [2, 1, 0]
    assert counts(bytes_max=1) == [1, 0, 0]
    assert counts() == [2, 2, 2]
    assert counts(records_max=0) == [0, 0, 0]


def test_a_commit_in_the_middle_of_a_fetch_shows_all_of_the_transaction_or_nothing_of_it(log: Log) -> None:
    """Whatever statement of the fetch somebody commits before: what is read is of one snapshot."""
    one, two, _ = log.partition_ids
    step, steps = 0, 0

    def commit_meanwhile(connection: Any, cursor: Any, statement: str, *_: object) -> None:
        nonlocal steps
        if statement.startswith("SELECT") and ("record_batches" in statement or "partition_heads" in statement):
            steps += 1
            if steps == step:
                log.commit("A", one, two)

    while steps >= step:
        for partition_id in (one, two):
            log.write("A", b"A", partition_id=partition_id)
            log.plain(b"p", partition_id=partition_id)
        start = {
            partition_id: CommitPosition(log.plain(b"q", partition_id=partition_id)) for partition_id in (one, two)
        }
        step, steps = step + 1, 0
        event.listen(log.store.engine, "before_cursor_execute", commit_meanwhile)
        try:
            pages = log.store.read(lambda connection, start=start: fetch_in_commit_order(connection, start))
        finally:
            event.remove(log.store.engine, "before_cursor_execute", commit_meanwhile)
        seen = [[value for _, value in records_of(pages[partition_id])] for partition_id in (one, two)]
        assert seen in ([[b"q"], [b"q"]], [[b"q", b"A"], [b"q", b"A"]]), step
        if steps < step:
            log.commit("A", one, two)
    assert step > 4


LONG = [("write", "A", 2), ("plain", 1), ("write", "B", 1), ("write", "A", 3)] * 2 + [("end", "A", True)]


@pytest.mark.slow
@pytest.mark.slow_on_postgresql
@pytest.mark.campaign
@settings(max_examples=times(20), suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(STEPS, max_size=25),
    deleted=st.integers(0, 4),
    stretch=st.integers(1, 5),
    walk=st.integers(1, 4),
    walks=st.integers(1, 2),
    offsets=st.sampled_from([1, 2, 5, 50_000]),
    width=st.integers(1, 30),
    options=st.sampled_from([{}, {"records_max": 1}, {"records_max": 4}, {"bytes_max": 1}]),
)
@example(steps=LONG, deleted=0, stretch=1, walk=1, walks=1, offsets=2, width=3, options={"records_max": 1})
@example(steps=[*LONG, ("end", "B", True)], deleted=1, stretch=2, walk=2, walks=1, offsets=2, width=9, options={})
def test_every_record_comes_once_and_in_order_from_wherever_the_reader_begins(
    shared_store: Store,
    steps: list[tuple[Any, ...]],
    deleted: int,
    stretch: int,
    walk: int,
    walks: int,
    offsets: int,
    width: int,
    options: dict[str, int],
) -> None:
    log, model = Log(shared_store), Model()
    for step in steps:
        take(log, model, step)
    everything = model.delivered
    if deleted:
        model.delete_before(min(deleted * 3, model.end_offset))
        log.store.write(lambda connection: advance_log_start(connection, log.id, model.log_start))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_order, "STRETCH_BATCHES", stretch)
        patch.setattr(commit_order, "WALK_BATCHES", walk)
        patch.setattr(commit_order, "WALKS_MAX", walks)
        patch.setattr(commit_order, "PAGE_OFFSETS_MAX", offsets)
        expected = [(one.offset, one.value) for one in model.delivered]
        assert read_all(log, CommitPosition(model.log_start), **options) == expected
        for place in range(model.log_start, model.end_offset + 1):
            start = max(model.log_start, place - width)
            behind = [(one.offset, one.value) for one in model.delivered if one.place >= place]
            assert read_all(log, CommitPosition(place), **options) == behind
            between = [(one.offset, one.value) for one in model.delivered if start <= one.place < place]
            assert start == place or read_places(log, range(start, place), **options) == between
        for placed in page_of(log, CommitPosition(model.log_start), **options).batches:
            # Who begins there again gets that batch first.
            again = page_of(log, placed.start, **options).batches[0]
            assert (again.batch.base_offset, again.from_offset) == (placed.batch.base_offset, placed.from_offset)
        for number, one in enumerate(everything):
            position = one.behind
            if position.place < model.log_start:
                continue
            if 0 < position.offset_in_transaction < model.log_start:
                with pytest.raises(OffsetOutOfRange):
                    page_of(log, position, **options)
                continue
            rest = everything[number + 1 :]
            # Those of the reader's own transaction still come, for he has begun it; of others only whole ones.
            kept = [later for later in rest if later.place == one.place or later in model.delivered]
            assert read_all(log, position, **options) == [(later.offset, later.value) for later in kept]


KEYED = st.one_of(
    st.tuples(st.just("plain"), st.lists(st.sampled_from("abc"), min_size=1, max_size=4)),
    st.tuples(st.just("write"), st.sampled_from("AB"), st.lists(st.sampled_from("abc"), min_size=1, max_size=3)),
    st.tuples(st.just("end"), st.sampled_from("AB"), st.sampled_from([True, True, False])),
    st.tuples(st.just("compact"), st.sampled_from([0, 1_000])),
)


@pytest.mark.slow
@pytest.mark.slow_on_postgresql
@pytest.mark.campaign
def test_what_compaction_leaves_comes_in_the_same_order_from_wherever_the_reader_stands(
    store: Store, clock: ManualClock
) -> None:
    """Positions of before too: in transactions of which records have gone, or the marker."""

    # PostgreSQL takes ten times as long for the same statements.
    @settings(
        max_examples=times(20 if store.backend.name == "sqlite" else 8),
    )
    @example(
        # Of the transaction there is nothing for a while, and then one record.
        steps=[
            ("write", "A", ["a"]),
            *(("plain", [key]) for key in "defghijk"),
            ("write", "A", ["c"]),
            ("end", "A", True),
            ("write", "B", ["b"]),
            ("end", "B", True),
            ("plain", ["a", "b"]),
        ],
        stretch=1,
        offsets=2,
    )
    @given(
        steps=st.lists(KEYED, min_size=6, max_size=25), stretch=st.integers(1, 4), offsets=st.sampled_from([2, 50_000])
    )
    def histories(steps: list[tuple[Any, ...]], stretch: int, offsets: int) -> None:
        read_what_is_left(CompactedLog(store, clock, delete_retention_ms=1_000), steps, stretch, offsets)

    histories()


def read_what_is_left(log: CompactedLog, steps: list[tuple[Any, ...]], stretch: int, offsets: int) -> None:
    model = Model()
    open_: dict[str, Transaction] = {}
    for kind, *of in [*steps, ("compact", 0), ("compact", 1_000), ("compact", 1_000)]:
        match kind, *of:
            case "plain", keys:
                values = [value for _, value in model.values(len(keys))]
                log.put(*zip(map(str.encode, keys), values, strict=True))
                model.plain(len(keys))
            case "write", name, keys:
                values = [value for _, value in model.values(len(keys))]
                open_.setdefault(name, log.begin()).put(*zip(map(str.encode, keys), values, strict=True))
                model.write(name, len(keys))
            case "end", name, commit:
                if name in open_:
                    open_.pop(name).end(commit=commit)
                    model.end(name, commit=commit)
            case _, milliseconds:
                log.clock.advance(milliseconds)
                log.run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_order, "STRETCH_BATCHES", stretch)
        patch.setattr(commit_order, "WALK_BATCHES", stretch)
        patch.setattr(commit_order, "WALKS_MAX", 1)
        patch.setattr(commit_order, "PAGE_OFFSETS_MAX", offsets)
        left = {
            record.offset
            for row in log.rows(record_batches)
            if row.control_type is None
            for record in decode(row).records()
        }
        starts = [CommitPosition(0), *(one.behind for one in model.delivered)]
        starts += [CommitPosition(place) for place in range(model.end_offset + 1)]
        for start in starts:
            behind = [one for one in model.delivered if one.behind > start]
            assert read_all(log, start) == [(one.offset, one.value) for one in behind if one.offset in left]
