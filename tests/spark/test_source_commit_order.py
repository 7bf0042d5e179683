"""Reads in commit order without Spark: whole transactions at their markers, once, whatever is open and who restarts."""

from __future__ import annotations

import datetime as dt
import json
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import EqualTo, GreaterThan, GreaterThanOrEqual, LessThan
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from tests.log.histories import Log
from tests.log.places import FIGURE, STEPS, Model, take, write_figure
from tests.spark.source_log import SourceLog, consume_all
from tests.spark.source_queries import Query, reader, rows_of, url_of, values_of
from tests.tools.campaigns import times
from txnstore.errors import InvalidConfiguration, OffsetOutOfRange
from txnstore.log import commit_order
from txnstore.log.commit_order import fetch_in_commit_order
from txnstore.log.deleting import advance_log_start, delete_records
from txnstore.log.partition_rows import allocate_producer_id
from txnstore.log.topics import create_topic, delete_topic
from txnstore.model import ProducerIdentity
from txnstore.spark import source_ranges


@pytest.fixture
def log(shared_store):
    return Log(shared_store)


def ordered(log, **options):
    """A batch read of the topic in commit order."""
    return reader(log, txnstore__delivery__order="commit", **options)


def query(log, **options):
    """A stream of the topic in commit order."""
    return Query(log, **{"txnstore__delivery__order": "commit", "startingOffsets": "earliest", **options})


def at(log, *places):
    """The text of places of the first partitions; the others are at their beginning."""
    return json.dumps({log.name: {str(number): place for number, place in enumerate((*places, 0, 0, 0)[:3])}})


def test_the_transaction_that_commits_first_comes_first(log):
    write_figure(log)
    assert values_of(ordered(log)) == FIGURE
    assert query(log).batch() == FIGURE
    assert values_of(reader(log)) == sorted(FIGURE, key=[b"X1 a", b"X2 a", b"N1", b"X1 b", b"X2 b", b"N2", b"N3"].index)
    messages = consume_all(url_of(log), log.name, 0, order="commit")
    assert [message.value() for message in messages] == FIGURE


def test_what_is_open_delays_nobody_and_what_was_aborted_never_comes(log):
    log.write("A", b"open")
    log.write("B", b"aborted")
    log.write("C", b"committed")
    log.abort("B")
    log.plain(b"plain")
    stream = query(log)
    assert stream.batch() == [b"plain"]
    log.commit("C")
    assert values_of(ordered(log)) == [b"plain", b"committed"]
    assert stream.batch() == [b"committed"]
    assert stream.batch() is None
    assert values_of(reader(log)) == []
    log.commit("A")
    assert stream.batch() == [b"open"]


def test_a_transaction_is_in_the_batch_of_its_marker_in_all_partitions(log):
    one, two, _ = log.partition_ids
    stream = query(log)
    log.write("A", b"open", partition_id=one)
    for partition_id in (one, two):
        log.write("B", b"B", partition_id=partition_id)
    assert stream.batch() == []
    log.commit("B", one, two)
    assert stream.batch() == [b"B", b"B"]
    assert values_of(ordered(log)) == [b"B", b"B"]


def test_a_transaction_larger_than_a_page_comes_by_pages(log, monkeypatch):
    monkeypatch.setattr(source_ranges, "PAGE_RECORDS_MAX", 4)
    pages = []

    def noted(*of, **by):
        found = fetch_in_commit_order(*of, **by)
        pages.append(found)
        return found

    monkeypatch.setattr(source_ranges, "fetch_in_commit_order", noted)
    for number in range(10):
        log.write("A", b"%d" % number, b"and")
        log.plain(b"plain")
    log.commit("A")
    values = [b"plain"] * 10 + [value for number in range(10) for value in (b"%d" % number, b"and")]
    stream = query(log, maxOffsetsPerTrigger="3")
    found = []
    while (batch := stream.batch()) is not None:
        # At one place there may be many records, and they stay together.
        assert len(batch) <= 3 or batch == values[10:]
        found += batch
    assert found == values
    pages.clear()
    assert values_of(ordered(log)) == values
    sizes = [sum(placed.batch.record_count for placed in page.batches) for of in pages for page in of.values()]
    assert max(sizes) == 4
    assert sum(sizes) == 30


BATCHES = st.tuples(st.just("batch"), st.sampled_from(["runs", "dies before", "dies after"]), st.integers(1, 9))


@pytest.mark.slow
@pytest.mark.campaign
@settings(max_examples=times(20), suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(STEPS | BATCHES, max_size=30),
    page_records=st.sampled_from([1, 4, 50_000]),
    parts=st.integers(1, 7),
    stretch=st.integers(1, 5),
)
def test_each_record_comes_once_and_in_order_whatever_dies(shared_store, steps, page_records, parts, stretch):
    log, model = Log(shared_store), Model()
    options = {"minPartitions": str(parts)}
    stream, found = query(log, **options), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_ranges, "PAGE_RECORDS_MAX", page_records)
        patch.setattr(commit_order, "STRETCH_BATCHES", stretch)
        for kind, *of in [*steps, ("batch", "runs", 50), ("batch", "runs", 50)]:
            if kind != "batch":
                take(log, model, (kind, *of))
                continue
            if len(stream.written) == stream.committed and not stream.write_down(ReadMaxRows(of[1])):
                continue
            if of[0] != "dies before":
                rows = [value for *_, value in stream.run()]
            if of[0] == "runs":
                found += rows
                stream.committed += 1
            else:
                stream.restart()
        expected = [one.value for one in model.delivered]
        while (rows := stream.batch(ReadAllAvailable())) is not None:
            found += rows
        assert found == expected
        assert values_of(ordered(log, **options)) == expected
        middle, end = model.end_offset // 3, model.end_offset * 2 // 3
        part = ordered(log, startingOffsets=at(log, middle), endingOffsets=at(log, end), **options)
        assert values_of(part) == [one.value for one in model.delivered if middle <= one.place < end]
    messages = consume_all(url_of(log), log.name, 0, order="commit")
    assert [message.value() for message in messages] == expected


@pytest.mark.parametrize("orders", [("commit", "offset"), ("offset", "commit")])
@pytest.mark.parametrize("when", ["before_planning", "before_reading"])
def test_a_checkpoint_of_the_other_order_is_refused(log, orders, when):
    own, other = orders
    log.plain(b"a")
    stream = query(log, txnstore__delivery__order=own)
    stream.write_down()
    if when == "before_planning":
        stream.committed += 1
        log.plain(b"b")
    stream.options["txnstore.delivery.order"] = other
    stream.restart()
    text = f"checkpoint holds offsets in {own} order, .* txnstore.delivery.order={own}, or .* checkpointLocation"
    with pytest.raises(InvalidConfiguration, match=text):
        stream.write_down() if when == "before_planning" else stream.run()
    # A query that was started before there was a partition has said which order it reads in, too.
    stream = query(log, txnstore__delivery__order=own, subscribe=None, subscribePattern="none")
    assert stream.batch() == []
    stream.options |= {"txnstore.delivery.order": other, "subscribePattern": log.name}
    stream.restart()
    with pytest.raises(InvalidConfiguration, match=text):
        stream.write_down()


def test_what_a_query_has_written_down_can_be_where_another_one_in_the_same_order_begins(log):
    write_figure(log)
    stream = query(log, maxOffsetsPerTrigger="6")
    first = stream.batch()
    (written,) = stream.written
    begin = json.dumps({name: ends for name, ends in json.loads(written).items() if name != "$from"})
    assert first + values_of(ordered(log, startingOffsets=begin)) == FIGURE
    assert first + query(log, startingOffsets=begin).batch() == FIGURE
    for option in ("startingOffsets", "endingOffsets"):
        with pytest.raises(InvalidConfiguration, match=f"{option} has offsets in commit order .*delivery.order=commit"):
            reader(log, **{option: begin})


def test_available_now_ends_at_what_was_there(log):
    log.write("A", b"A")
    log.plain(b"plain")
    stream = query(log, maxOffsetsPerTrigger="1")
    stream.reader.prepareForTriggerAvailableNow()
    log.commit("A")
    found = []
    while (rows := stream.batch()) is not None:
        found += rows
    assert found == [b"plain"]
    stream.restart()
    assert stream.batch() == [b"A"]


def test_latest_is_the_end_of_the_log_and_is_kept(log):
    log.write("A", b"open before")
    log.plain(b"before")
    stream = query(log, startingOffsets="latest")
    stream.write_down()
    log.plain(b"behind")
    stream.restart()
    assert stream.run() == []
    stream.committed += 1
    assert stream.batch() == [b"behind"]
    log.commit("A")
    assert stream.batch() == [b"open before"]


def test_from_a_time_on_nothing_of_it_is_missed(log):
    times = SourceLog(log.store, f"{log.name}-times")
    opened, begun = times.begin(0, b"open"), times.begin(0, b"begun at 0")
    for at_ms in (10, 20):
        times.plain(0, b"at %d" % at_ms, timestamp_ms=at_ms)
    times.commit(begun, 0)
    times.plain(0, b"at 30", timestamp_ms=30)
    behind = [b"at 20", b"begun at 0", b"at 30"]
    # Behind what is open, too, where the offset of a time is not asked for in offset order.
    assert values_of(ordered(times, startingTimestamp="20", startingOffsetsByTimestampStrategy="latest")) == behind
    assert values_of(ordered(times, endingTimestamp="20")) == [b"at 10"]
    read = ordered(times)
    condition = GreaterThanOrEqual(("timestamp",), dt.datetime.fromtimestamp(0.02, dt.UTC))
    assert list(read.pushFilters([condition])) == [condition]
    # Spark looks again at those of the batches that are left.
    assert values_of(read) == [b"at 20", b"at 30"]
    stream = query(times, startingTimestamp="20", startingOffsetsByTimestampStrategy="latest")
    assert stream.batch() == behind
    times.commit(opened, 0)
    assert stream.batch() == [b"open"]
    with pytest.raises(InvalidConfiguration, match="no record with the timestamp 31 or a later one"):
        ordered(times, startingTimestamp="31").partitions()


def test_conditions_on_the_offset_are_looked_at_again(log):
    write_figure(log)
    read = ordered(log)
    conditions = [LessThan(("offset",), 6), GreaterThan(("offset",), 1), EqualTo(("partition",), 0)]
    assert list(read.pushFilters(conditions)) == conditions[:2]
    found = {row["offset"]: row["value"] for row in rows_of(read)}
    wanted = {2: b"N1", 3: b"X1 b", 4: b"X2 b"}
    assert {offset: value for offset, value in found.items() if 1 < offset < 6} == wanted
    assert [part.wanted.start_offset for part in read.partitions()] == [2]


def delete(log, before_offset):
    delete_records(log.store, log.id, before_offset)


def test_what_began_before_the_log_does_is_no_loss_for_who_begins_there(log):
    """What was deleted before a query began is none of its losses; half of a transaction never comes."""
    log.write("A", b"A0", b"A1")
    log.plain(b"plain")
    log.commit("A")
    log.plain(b"behind")
    delete(log, 1)
    stream = query(log, maxOffsetsPerTrigger="1")
    assert values_of(ordered(log)) == [b"plain", b"behind"]
    found = []
    while (rows := stream.batch()) is not None:
        found += rows
    assert found == [b"plain", b"behind"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("when", ["before_planning", "before_reading"])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_transaction_of_which_a_part_was_deleted_before_it_was_read_is_an_error(log, caplog, when, restarts):
    stream = query(log)
    log.write("A", b"A0", b"A1")
    log.plain(b"plain")
    assert stream.batch() == [b"plain"]
    log.commit("A")
    log.plain(b"behind")
    if when == "before_reading":
        stream.write_down()
    # Behind it lies where the query stands.
    log.store.write(lambda connection: advance_log_start(connection, log.id, 1))
    if when == "before_planning":
        stream.write_down()
    if restarts:
        stream.restart()
    with pytest.raises(OffsetOutOfRange, match=rf"{log.name}-0 that begins at offset 0 and was committed at 3 is not"):
        stream.run()
    stream.options["failOnDataLoss"] = "false"
    stream.restart()
    with caplog.at_level(logging.WARNING, "txnstore"):
        assert [value for *_, value in stream.run()] == [b"behind"]
    assert "committed at 3 is not whole any more" in caplog.text


def test_a_task_warns_once_of_what_does_not_come(log, monkeypatch, caplog):
    monkeypatch.setattr(source_ranges, "PAGE_RECORDS_MAX", 1)
    log.write("A", b"A")
    log.write("B", b"B")
    log.plain(b"plain")
    log.commit("A")
    stream = query(log, failOnDataLoss="false")
    stream.write_down()
    log.commit("B")
    log.store.write(lambda connection: advance_log_start(connection, log.id, 1))
    with caplog.at_level(logging.WARNING, "txnstore"):
        assert [value for *_, value in stream.run()] == [b"plain"]
    assert caplog.text.count("is not whole any more") == 1
    stream.committed += 1
    assert stream.batch() == [b"B"]


def test_a_batch_read_that_begins_at_a_place_is_told_of_what_does_not_come_there(log):
    log.write("A", b"A0", b"A1")
    log.plain(b"plain")
    log.commit("A")
    log.plain(b"behind")
    read = ordered(log, startingOffsets=at(log, 3))
    parts = read.partitions()
    delete(log, 1)
    for planned in (parts, read.partitions()):
        with pytest.raises(OffsetOutOfRange, match="committed at 3 is not whole any more"):
            values_of(read, planned)
    lenient = ordered(log, startingOffsets=at(log, 3), failOnDataLoss="false")
    assert values_of(lenient) == [b"behind"]
    delete(log, 4)
    with pytest.raises(OffsetOutOfRange, match=f"{log.name}-0 from offset 3 to 3 are gone"):
        values_of(read, parts)
    assert values_of(lenient, parts) == [b"behind"]


@pytest.mark.parametrize("before_offset", [2, 5], ids=["within", "all"])
def test_half_of_a_transaction_never_comes_of_a_task_that_goes_on(log, monkeypatch, before_offset):
    """Who has read the first half and is overtaken fails, whatever the query chose; its next try reads none of it."""
    monkeypatch.setattr(source_ranges, "PAGE_RECORDS_MAX", 1)
    for number in range(3):
        log.write("A", b"A%d" % number)
    log.commit("A")
    log.plain(b"behind", b"last")
    read = ordered(log, failOnDataLoss="false")
    (part,) = read.partitions()
    batches = read.read(part)
    assert next(batches).to_pylist()[0]["value"] == b"A0"
    delete(log, before_offset)
    with pytest.raises(OffsetOutOfRange, match="while their transaction, which was committed at 3, was read"):
        list(batches)
    assert values_of(read, [part]) == [b"behind", b"last"][before_offset // 5 :]


def test_who_reads_a_transaction_past_what_is_deleted_goes_on(log, monkeypatch):
    monkeypatch.setattr(source_ranges, "PAGE_RECORDS_MAX", 1)
    for number in range(3):
        log.write("A", b"A%d" % number)
    log.commit("A")
    read = ordered(log)
    (part,) = read.partitions()
    batches = read.read(part)
    first = next(batches)
    delete(log, 1)
    assert [row["value"] for batch in (first, *batches) for row in batch.to_pylist()] == [b"A0", b"A1", b"A2"]


def test_a_topic_that_was_made_anew_begins_anew(log):
    """Its transactions are its own: those of the topic before it are no loss."""
    log.write("A", b"A")
    log.plain(b"0", b"1", b"2", b"3")
    stream = query(log, failOnDataLoss="false")
    assert len(stream.batch()) == 4
    log.store.write(lambda connection: delete_topic(connection, log.name))
    log.store.write(lambda connection: create_topic(connection, log.name, partition_count=3))
    assert stream.batch() == []
    assert stream.batch() is None
    assert json.loads(stream.written[-1])["$commit_order"] == {log.name: {"0": 0, "1": 0, "2": 0}}


def test_a_hanging_transaction_delays_no_stream(log):
    """One whose producer nobody knows, as a broken client leaves it: no reader waits for what ends it."""
    log.producers["A"] = ProducerIdentity(log.store.write(allocate_producer_id), 7)
    log.write("A", b"hanging")
    stream = query(log)
    for number in range(3):
        log.write("B", b"%d" % number)
        log.commit("B")
        assert stream.batch() == [b"%d" % number]
