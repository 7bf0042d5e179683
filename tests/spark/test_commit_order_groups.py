"""Groups in commit order whose sink's batches commit for them, without Spark: each record once, whoever reads it."""

from __future__ import annotations

import json
import logging
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadMaxRows
from typer.testing import CliRunner

from tests.clients.steps import PATIENCE_SECONDS
from tests.log.histories import Log
from tests.log.places import FIGURE, STEPS, Model, take, write_figure
from tests.spark.source_queries import Pipeline, all_again, reader, url_of, values_of
from tests.tools.campaigns import times
from txnstore import Consumer, KafkaError
from txnstore.cli.program import NAMES, program_with
from txnstore.errors import InvalidRequest, OffsetOutOfRange
from txnstore.groups.offsets import commit_offsets, read_offsets
from txnstore.log.deleting import advance_log_start
from txnstore.model import GroupMembership, OffsetAndMetadata


@pytest.fixture
def log(shared_store):
    return Log(shared_store)


def position_of(log):
    """Return what the group has committed in the first partition."""
    return log.store.read(partial(read_offsets, group_id=log.name, partition_ids=[log.id])).offsets.get(log.id)


def commit(log, *position, changes_order=False):
    """Commit for the group: an offset, or a place and the next record of the transaction there."""
    offset, within = (*position, None)[:2]
    offsets = {log.id: OffsetAndMetadata(offset, offset_in_transaction=within)}
    work = partial(commit_offsets, committer=GroupMembership(log.name), offsets=offsets, changes_order=changes_order)
    log.store.write(work)


def placed(place, within=0):
    return OffsetAndMetadata(place, offset_in_transaction=within)


ENDS = ["runs", "runs", "dies before", "dies noted", "dies decided"]
BATCHES = st.tuples(st.just("batch"), st.sampled_from(ENDS), st.integers(1, 9))
HANDOVERS = st.tuples(st.just("hand over"), st.integers(0, 4))
BACKUPS = st.tuples(st.just("older"), st.integers(0, 3))


def run_batch(pipeline, ends, limit):
    """Run the next batch, if there is one, or the one that was written down before, as far as it comes."""
    if len(pipeline.written) == pipeline.committed and not pipeline.write_down(ReadMaxRows(limit)):
        return
    if ends == "dies noted":
        pipeline.run()
    elif ends != "dies before" and pipeline.sink() is not None:
        # It ends between transactions, whatever it began in.
        assert position_of(pipeline.log).offset_in_transaction == 0
    if ends == "runs":
        pipeline.committed += 1
    else:
        pipeline.restart()


def hand_over(pipeline, model, count):
    """Let a consumer of the group read so many records, and then a query that has no checkpoint."""
    taken = left_of(pipeline.log, model)[:count]
    if taken:
        commit(pipeline.log, *taken[-1].behind)
        pipeline.output += [one.value for one in taken]
    pipeline.begin_anew()


def left_of(log, model):
    """Return what is behind the group's position, as a consumer would get it."""
    position = position_of(log)
    start = (0, 0) if position is None else (position.offset, position.offset_in_transaction)
    return [one for one in model.delivered if one.behind > start]


TO_THE_END = [("batch", "runs", 99)] * 2
#: In the end somebody stops within a transaction, and the next one goes on there.
IN_THE_END = [*TO_THE_END, ("write", "C", 3), ("end", "C", True), ("hand over", 2), *TO_THE_END]


@pytest.mark.slow
@pytest.mark.campaign
@settings(max_examples=times(20), suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEPS | BATCHES | HANDOVERS | BACKUPS, max_size=30), parts=st.integers(1, 4))
def test_each_record_comes_once_and_in_order_whoever_reads_for_the_group(shared_store, steps, parts):
    """Queries that die with their batch, or have an old checkpoint or none; consumers that stop in a transaction."""
    log, model = Log(shared_store), Model()
    pipeline = Pipeline(log, minPartitions=str(parts))
    for kind, *of in [*steps, *IN_THE_END]:
        if kind == "batch":
            run_batch(pipeline, *of)
        elif kind == "hand over":
            hand_over(pipeline, model, *of)
        elif kind == "older":
            pipeline.go_back(*of)
        else:
            take(log, model, (kind, *of))
        rest = [one.value for one in left_of(log, model)]
        assert pipeline.output + rest == [one.value for one in model.delivered]
    assert rest == []


def consumed(log, count, order="commit"):
    """Return what the next ordinary consumer of the group gets, which commits it."""
    settings = {"bootstrap.servers": url_of(log), "group.id": log.name, "auto.offset.reset": "earliest"}
    with Consumer({**settings, "enable.auto.commit": False, "txnstore.delivery.order": order}) as consumer:
        consumer.subscribe([log.name])
        messages = consumer.consume(count, PATIENCE_SECONDS)
        for error in filter(None, (message.error() for message in messages)):
            return error
        consumer.commit(message=messages[-1], asynchronous=False)
        return [message.value() for message in messages]


def described(log):
    arguments = ["groups", "describe", log.name, "--json", "--url", url_of(log)]
    (facts,) = json.loads(CliRunner().invoke(program_with(NAMES), arguments).stdout)
    return [
        (row["committed_offset"], row["offset_in_transaction"], row["order"], row["lag"]) for row in facts["offsets"]
    ]


def test_consumers_and_queries_of_one_group_take_over_from_each_other(log):
    write_figure(log)
    assert consumed(log, 5) == FIGURE[:5]
    assert position_of(log) == placed(7, 1)
    pipeline = Pipeline(log, maxOffsetsPerTrigger="1")
    assert pipeline.batch() == [b"X1 b"]
    assert described(log) == [(8, 0, "commit", 1), (0, 0, "commit", 0), (0, 0, "commit", 0)]
    log.write("A", b"X3")
    log.plain(b"N4")
    log.commit("A")
    log.plain(b"N5")
    assert consumed(log, 3) == [b"N3", b"N4", b"X3"]
    assert consumed(log, 1, order="offset").code() == KafkaError.INVALID_REQUEST
    pipeline.begin_anew()
    # The group does not know that nothing of X3 is left.
    assert [pipeline.batch() for _ in range(3)] == [[], [b"N5"], None]


def test_a_batch_read_begins_where_the_group_is_and_leaves_it_there(log):
    write_figure(log)
    commit(log, 7, 1)
    options = {"txnstore__delivery__order": "commit", "startingOffsets": "group", "group__id": log.name}
    assert values_of(reader(log, **options)) == FIGURE[5:]
    assert values_of(reader(log, **options, minPartitions="3")) == FIGURE[5:]
    ends = json.dumps({log.name: {"0": 7, "1": 0, "2": 0}})
    assert values_of(reader(log, **options, endingOffsets=ends)) == []
    assert position_of(log) == placed(7, 1)


@pytest.mark.parametrize("killed", ["before_the_batch", "before_the_decision"])
def test_a_batch_that_began_within_a_transaction_begins_there_again(log, killed):
    write_figure(log)
    commit(log, 7, 1)
    pipeline = Pipeline(log)
    pipeline.write_down()
    if killed == "before_the_decision":
        pipeline.run()
    # Whatever becomes of the group meanwhile.
    commit(log, 8, 0)
    log.plain(b"N4")
    pipeline.restart()
    assert pipeline.sink() == FIGURE[5:]
    assert position_of(log) == placed(9)
    pipeline.committed += 1
    assert pipeline.batch() == [b"N4"]
    assert [json.loads(offset).get("$in_transaction") for offset in pipeline.written] == [{log.name: {"0": 1}}, None]
    assert all("$commit_order" in json.loads(offset) for offset in pipeline.written)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("limit", [None, "1"])
def test_a_batch_reads_the_transaction_to_its_end_in_which_it_begins(log, limit):
    """Even where its query is to end before: no batch ends within a transaction, so no checkpoint has to say that."""
    log.write("A", b"A0", b"A1")
    log.plain(b"plain")
    pipeline = Pipeline(log, maxOffsetsPerTrigger=limit)
    pipeline.reader.prepareForTriggerAvailableNow()
    log.commit("A")
    log.plain(b"late")
    commit(log, 3, 1)
    assert pipeline.batch() == [b"A1"]
    assert position_of(log) == placed(4)
    assert pipeline.batch() is None
    pipeline.restart()
    assert pipeline.batch() == [b"late"]


def test_a_batch_ends_where_the_group_has_come_to_or_before_the_transaction_there(log):
    write_figure(log)
    commit(log, 7, 1)
    pipeline = Pipeline(log, startingOffsets=all_again(log))
    assert pipeline.batch() == FIGURE[:4]
    # It goes by its checkpoint, and takes the group along.
    assert position_of(log) == placed(7)
    assert pipeline.batch() == FIGURE[4:]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("own", "other"), [("commit", (1,)), ("offset", (1, 0))], ids=["commit", "offset"])
def test_a_group_that_reads_in_the_other_order_is_told_what_to_do(log, own, other):
    """A place is no offset: where one is taken for the other, records are lost."""
    log.plain(b"a", b"b")
    commit(log, *other)
    pipeline = Pipeline(log, **{"txnstore.delivery.order": own})
    with pytest.raises(InvalidRequest, match=rf"reset it \(txnstore groups reset-offsets \.\.\. --order {own}\)"):
        pipeline.write_down()
    reset = ["groups", "reset-offsets", log.name, "--to-offset", "1", "--order", own, "--topic", log.name]
    CliRunner().invoke(program_with(NAMES), [*reset, "--execute", "--url", url_of(log)])
    assert pipeline.batch() == [b"b"]
    # Who changes the order behind the back of a query stops it.
    commit(log, *other, changes_order=True)
    log.plain(b"c")
    with pytest.raises(InvalidRequest, match="reset-offsets"):
        pipeline.write_down()


def test_a_position_within_a_transaction_that_is_not_there_is_that_of_its_place(log):
    """As a restored database has it; what is committed there later is another transaction."""
    log.write("A", b"A0")
    commit(log, 1, 1)
    pipeline = Pipeline(log)
    assert pipeline.batch() == []
    assert position_of(log) == placed(1)
    log.commit("A")
    assert pipeline.batch() == [b"A0"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("when", ["before_planning", "before_reading"])
@pytest.mark.parametrize("before_offset", [2, 4], ids=["within", "all"])
def test_the_rest_of_a_transaction_that_was_deleted_is_a_loss(log, when, before_offset, caplog):
    for number in range(3):
        log.write("A", b"A%d" % number)
    log.commit("A")
    log.plain(b"behind")
    commit(log, 3, 1)
    pipeline = Pipeline(log)
    # Who is past what is deleted loses nothing.
    log.store.write(lambda connection: advance_log_start(connection, log.id, 1))
    if when == "before_reading":
        pipeline.write_down()
        assert [value for *_, value in pipeline.run()] == [b"A1", b"A2", b"behind"]
    log.store.write(lambda connection: advance_log_start(connection, log.id, before_offset))
    text = rf"from offset 1 to {before_offset - 1} are gone: .* when the group had read .* transaction, .* at 3"
    with pytest.raises(OffsetOutOfRange, match=text):
        pipeline.write_down() if when == "before_planning" else pipeline.run()
    pipeline.options["failOnDataLoss"] = "false"
    pipeline.restart()
    with caplog.at_level(logging.WARNING, "txnstore"):
        assert (pipeline.batch() if when == "before_planning" else pipeline.sink()) == [b"behind"]
    assert "the query leaves out the rest of it" in caplog.text
    assert position_of(log) == placed(5)
