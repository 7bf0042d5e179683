"""A query whose checkpoint is lost begins where its group is, while the driver before it may live still."""

from __future__ import annotations

from functools import partial

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows
from sqlalchemy import update

from tests.spark.source_log import SourceLog
from tests.spark.source_queries import Pipeline, all_again
from txnstore.db.schema import transactions
from txnstore.errors import InvalidConfiguration, InvalidRequest, ProducerFenced
from txnstore.groups.expiration import expire_offsets
from txnstore.groups.offsets import commit_offsets, read_offsets
from txnstore.log.partition_rows import allocate_producer_id
from txnstore.model import GroupMembership, OffsetAndMetadata, ProducerIdentity
from txnstore.spark.sink_coordination import abort, open_writer
from txnstore.transactions.protocol import EPOCH_EXHAUSTED
from txnstore.transactions.recovery import expire_transactional_ids


@pytest.fixture
def log(store):
    return SourceLog(store)


@pytest.fixture(params=["offset", "commit"])
def driver(log, request):
    """Make a driver of the query with a checkpoint of its own."""
    return partial(Pipeline, log, transactional_id="pipeline", **{"txnstore.delivery.order": request.param})


#: What is said of a group that a transaction of the same transactional id has moved on.
OWN = r"of the query's own transactional id 'pipeline' has advanced the group .*startingOffsets=group"


def offsets_of(log):
    found = log.store.read(partial(read_offsets, group_id=log.name, partition_ids=log.partition_ids)).offsets
    return [found[partition_id].offset for partition_id in log.partition_ids]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("killed", [False, True])
def test_what_the_old_driver_commits_before_it_is_fenced_is_not_written_again(log, driver, killed):
    old, new = driver(), driver()
    log.plain(0, b"a")
    assert old.batch() == [b"a"]
    # Where it begins is in its checkpoint; nothing of it has run yet.
    assert new.write_down()
    log.plain(0, b"b")
    log.plain(1, b"x")
    assert old.batch() == [b"b", b"x"]
    with pytest.raises(ProducerFenced, match=OWN):
        new.sink()
    if killed:
        new.restart()
        with pytest.raises(ProducerFenced, match=OWN):
            new.sink()
    assert offsets_of(log) == [2, 1]
    new.begin_anew()
    log.plain(0, b"c")
    assert [new.batch(), new.batch()] == [[b"c"], None]
    with pytest.raises(ProducerFenced, match="superseded"):
        old.batch()
    assert old.output + new.output == [b"a", b"b", b"x", b"c"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("start", ["group", "earliest"])
def test_a_batch_that_both_drivers_have_planned_is_written_once(log, driver, start):
    old, new = driver(startingOffsets=start), driver(startingOffsets=start)
    log.plain(0, b"a")
    log.plain(1, b"x")
    assert old.write_down()
    assert new.write_down()
    assert old.sink() == [b"a", b"x"]
    new.run()
    with pytest.raises(ProducerFenced, match=OWN):
        open_writer(log.store, new.sink_run, 0)
    with pytest.raises(ProducerFenced, match=OWN):
        new.sink()
    new.options["startingOffsets"] = "group"
    new.begin_anew()
    log.plain(1, b"y")
    assert new.batch() == [b"y"]
    assert offsets_of(log) == [1, 2]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("partition", [0, 1])
def test_a_batch_of_which_the_old_driver_has_written_a_part_is_refused(log, driver, partition):
    old, new = driver(), driver()
    log.plain(0, b"a")
    assert old.write_down()
    log.plain(partition, b"b")
    assert new.write_down()
    assert old.sink() == [b"a"]
    with pytest.raises(ProducerFenced, match=OWN):
        new.sink()
    assert offsets_of(log) == [1, 0]
    new.begin_anew()
    assert new.batch() == [b"b"]


@pytest.mark.slow_but_first
def test_a_query_that_is_told_to_begin_elsewhere_writes_again_what_its_group_has_read(log, driver):
    log.plain(0, b"a")
    assert driver().batch() == [b"a"]
    with pytest.raises(InvalidConfiguration, match="startingOffsets=earliest the query would read"):
        driver(startingOffsets="earliest").batch()
    assert driver(startingOffsets=all_again(log)).batch() == [b"a"]


@pytest.mark.slow_but_first
def test_a_query_that_begins_at_the_latest_by_default_leaves_out_nothing_that_its_group_has_not_read(log, driver):
    query = driver(startingOffsets=None)
    assert query.batch() == []
    log.plain(0, b"a")
    assert query.batch() == [b"a"]
    query.begin_anew()
    # Nothing lies between.
    assert query.batch() == []
    log.plain(0, b"b", b"c")
    query.begin_anew()
    with pytest.raises(InvalidConfiguration, match=r"without startingOffsets .* latest offset, 3, .* come to 1 only"):
        query.batch()
    assert offsets_of(log) == [1, 0]
    query.options["startingOffsets"] = "group"
    query.restart()
    assert query.batch() == [b"b", b"c"]


def test_a_query_that_begins_at_the_latest_by_default_leaves_out_no_partition_that_is_newer_than_its_group(log, driver):
    query = driver(startingOffsets=None)
    assert query.batch() == []
    log.grow(3)
    query.begin_anew()
    assert query.batch() == []
    log.grow(4)
    log.plain(3, b"a")
    query.begin_anew()
    with pytest.raises(InvalidConfiguration, match="without startingOffsets"):
        query.batch()


def test_a_query_that_begins_at_the_latest_by_default_is_not_refused_for_a_marker(log, driver):
    log.commit(log.begin(0, b"a"), 0)
    order = driver.keywords["txnstore.delivery.order"]
    # As with commit(message): at the marker, which in commit order is the place of the transaction itself.
    commit_by_hand(log, 1 if order == "offset" else 2, order)
    log.abort(log.begin(0, b"b"), 0)
    query = driver(startingOffsets=None)
    assert query.batch() == []
    commit_by_hand(log, 0, order)
    query.begin_anew()
    with pytest.raises(InvalidConfiguration, match="has come to 0 only"):
        query.batch()


def test_a_group_that_has_committed_nothing_in_a_partition_is_not_said_to_have_come_to_its_beginning(log, driver):
    log.plain(0, b"a")
    log.plain(1, b"x")
    commit_by_hand(log, 1, driver.keywords["txnstore.delivery.order"])
    with pytest.raises(
        InvalidConfiguration, match=r"committed nothing there: .*at the earliest where it has committed"
    ):
        driver(startingOffsets=None).batch()


def test_a_query_that_is_told_to_begin_at_the_latest_says_what_it_leaves_out(log, driver, caplog):
    query = driver(startingOffsets="latest")
    assert query.batch() == []
    log.plain(0, b"a")
    assert query.batch() == [b"a"]
    query.begin_anew()
    assert query.batch() == []
    assert not caplog.records
    log.plain(0, b"b", b"c")
    query.begin_anew()
    assert query.batch() == []
    (warning,) = caplog.records
    assert warning.event == "source_begins_past_group"
    assert "leaves out" in warning.getMessage()
    log.plain(0, b"d")
    assert query.batch() == [b"d"]


@pytest.mark.slow_but_first
def test_what_was_read_of_a_partition_that_has_been_idle_for_long_is_not_written_again(log, driver, clock):
    query = driver()
    log.plain(0, b"a")
    log.plain(1, b"x")
    assert query.batch() == [b"a", b"x"]
    for value in (b"b", b"c", b"d"):
        # The offsets of a group without members expire each by itself, after a week.
        clock.advance(3 * 24 * 3600 * 1000)
        log.plain(0, value)
        assert query.batch() == [value]
        assert expire_offsets(log.store, groups_max=1) == (0, None)
    query.begin_anew()
    log.plain(1, b"y")
    assert query.batch() == [b"y"]


def commit_by_hand(log, offset, order):
    position = OffsetAndMetadata(offset, offset_in_transaction=0 if order == "commit" else None)
    of_first = {log.partition_ids[0]: position}
    log.store.write(lambda connection: commit_offsets(connection, GroupMembership(log.name), of_first))


@pytest.mark.slow_but_first
def test_what_nobody_has_written_is_written_once_the_group_is_set_back_by_hand(log, driver):
    """A driver that began elsewhere has moved the group past it: it is not taken for written, and so is never lost."""
    order = driver.keywords["txnstore.delivery.order"]
    query = driver()
    log.plain(0, b"a")
    assert query.batch() == [b"a"]
    log.plain(0, b"b", b"c")
    assert query.write_down()
    commit_by_hand(log, 3, order)
    log.plain(0, b"d")
    other = driver()
    assert other.batch() == [b"d"]
    query.restart()
    with pytest.raises(ProducerFenced, match=OWN):
        query.sink()
    assert offsets_of(log) == [4, 0]
    commit_by_hand(log, 1, order)
    assert query.sink() == [b"b", b"c"]


@pytest.mark.slow
def test_the_old_driver_that_comes_back_does_not_write_again_what_the_new_one_has_written(log, driver):
    old, new = driver(), driver()
    log.plain(0, b"a")
    assert old.batch() == [b"a"]
    assert new.batch() == []
    log.plain(0, b"b", b"c")
    assert new.batch() == [b"b", b"c"]
    log.plain(0, b"d")
    old.restart()
    with pytest.raises(ProducerFenced, match=OWN):
        old.batch(ReadMaxRows(1))
    old.begin_anew()
    assert old.batch() == [b"d"]


@pytest.mark.slow_but_first
def test_what_a_driver_has_written_itself_is_known_without_its_group(log, driver):
    old, new = driver(), driver()
    log.plain(0, b"a")
    assert old.batch() == [b"a"]
    assert new.batch() == []
    log.plain(0, b"b")
    assert new.batch() == [b"b"]
    old.committed -= 1
    old.restart()
    assert old.sink() is None


@pytest.mark.parametrize("start", [None, "latest"])
def test_an_empty_batch_of_a_query_that_began_at_the_end_does_not_move_a_group_back(log, driver, start):
    old, new = driver(startingOffsets=start), driver(startingOffsets=start)
    assert old.batch() == []
    assert new.write_down()
    log.plain(0, b"a", b"b")
    assert old.batch() == [b"a", b"b"]
    with pytest.raises(ProducerFenced, match=OWN):
        new.sink()
    assert offsets_of(log) == [2, 0]
    new.begin_anew()
    assert new.batch() == []
    log.plain(0, b"c")
    assert new.batch() == [b"c"]


def test_an_empty_batch_does_not_move_a_group_back(log, driver):
    old, new = driver(), driver()
    log.plain(0, b"a")
    assert old.batch() == [b"a"]
    assert new.write_down()
    log.plain(0, b"b")
    assert old.batch() == [b"b"]
    with pytest.raises(ProducerFenced, match=OWN):
        new.sink()
    assert offsets_of(log) == [2, 0]


def take_over(log, driver, *, is_known):
    """Let a new driver take the place of an old one, and return this; `is_known`: their runs say who they were."""
    old, new = driver(), driver()
    log.plain(0, b"a")
    assert old.batch() == [b"a"]
    if not is_known:
        abort(log.store, old.sink_run, 1)
    assert new.batch() == []
    log.plain(0, b"b", b"c")
    assert new.batch() == [b"b", b"c"]
    if not is_known:
        abort(log.store, new.sink_run, 2)
    log.plain(0, b"d")
    old.restart()
    return old


def forget_transactional_id(log, clock):
    clock.advance(8 * 24 * 3600 * 1000)
    assert "pipeline" in expire_transactional_ids(log.store)


@pytest.mark.slow_but_first
def test_the_old_driver_that_comes_back_once_its_transactional_id_is_forgotten_is_known_by_its_runs(log, driver, clock):
    old = take_over(log, driver, is_known=True)
    forget_transactional_id(log, clock)
    with pytest.raises(ProducerFenced, match=OWN):
        old.batch()
    old.begin_anew()
    assert old.batch() == [b"d"]


@pytest.mark.slow_but_first
def test_the_old_driver_that_comes_back_is_refused_if_nobody_knows_what_has_moved_its_group(log, driver, clock):
    old = take_over(log, driver, is_known=False)
    forget_transactional_id(log, clock)
    with pytest.raises(ProducerFenced, match=r"is forgotten, .* has advanced .*from offset 1 to 3\)"):
        old.batch()
    old.begin_anew()
    assert old.batch() == [b"d"]


@pytest.mark.parametrize("start", ["latest", None])
def test_a_query_that_shares_its_group_is_told_so_once_the_other_program_is_forgotten(log, driver, start):
    query = driver(startingOffsets=start)
    assert query.batch() == []
    log.plain(0, b"a", b"b")
    order = driver.keywords["txnstore.delivery.order"]
    position = OffsetAndMetadata(2, offset_in_transaction=0 if order == "commit" else None)
    nobody = ProducerIdentity(log.store.write(allocate_producer_id), 0)
    of_first = {log.partition_ids[0]: position}
    log.store.write(lambda connection: commit_offsets(connection, GroupMembership(log.name), of_first, producer=nobody))
    assert query.write_down()
    with pytest.raises(ProducerFenced, match=r"is forgotten, .* queries or programs .* must each have their own group"):
        query.sink()
    commit_by_hand(log, 0, order)
    assert query.sink() == [b"a", b"b"]


@pytest.mark.slow_but_first
def test_the_old_driver_that_comes_back_once_the_epochs_are_exhausted_does_not_write_again(log, driver):
    old = take_over(log, driver, is_known=False)
    exhausted = update(transactions).values(producer_epoch=EPOCH_EXHAUSTED)
    log.store.write(lambda connection: connection.execute(exhausted))
    with pytest.raises(ProducerFenced, match=OWN):
        old.batch()
    old.begin_anew()
    assert old.batch() == [b"d"]


@pytest.mark.slow_but_first
def test_a_query_that_was_silent_until_its_transactional_id_was_forgotten_goes_on(log, driver, clock):
    query = driver()
    log.plain(0, b"a")
    assert query.batch() == [b"a"]
    abort(log.store, query.sink_run, query.committed)
    forget_transactional_id(log, clock)
    query.committed -= 1
    query.restart()
    assert query.sink() is None
    query.committed += 1
    log.plain(0, b"b")
    assert query.batch() == [b"b"]


@pytest.mark.slow_but_first
def test_a_group_that_was_brought_back_does_not_make_new_what_the_query_has_written(log, driver):
    query = driver()
    log.plain(0, b"a", b"b")
    assert query.batch() == [b"a", b"b"]
    assert driver(startingOffsets=all_again(log)).batch(ReadMaxRows(1)) == [b"a"]
    # It was killed before the batch was over for Spark.
    query.committed -= 1
    query.restart()
    assert query.sink() is None


@pytest.mark.slow_but_first
def test_what_the_old_driver_has_read_of_a_new_partition_is_not_written_again(log, driver):
    old, new = driver(), driver()
    assert old.batch() == []
    assert new.write_down()
    log.grow(3)
    log.plain(2, b"a")
    assert old.batch() == [b"a"]
    assert new.sink() == []
    new.committed += 1
    log.plain(2, b"b")
    with pytest.raises(ProducerFenced, match=OWN):
        new.batch()
    new.begin_anew()
    assert new.batch() == [b"b"]
    assert offsets_of(log) == [0, 0, 2]


@pytest.mark.slow_but_first
def test_two_queries_of_one_group_that_have_begun_stop_each_other_at_no_new_partition(log, driver):
    queries = driver(transactional_id="one"), driver(transactional_id="another")
    assert [query.batch() for query in queries] == [[], []]
    log.grow(3)
    log.plain(2, b"a")
    assert [query.batch() for query in queries] == [[b"a"], [b"a"]]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("writes", [True, False])
def test_what_lies_before_a_group_that_another_transactional_id_has_moved_is_neither_written_nor_dropped(
    log, driver, writes
):
    new = driver()
    if writes:
        log.plain(1, b"x")
    assert new.write_down()
    log.plain(0, b"a")
    other = driver(transactional_id="other")
    assert other.batch() is not None
    with pytest.raises(ProducerFenced, match=r"another transactional id, 'other', has advanced .*from offset 0 to 1\)"):
        new.sink()
    assert offsets_of(log)[0] == 1
    new.begin_anew()
    log.plain(0, b"b")
    assert new.batch() == [b"b"]


@pytest.mark.slow_but_first
def test_what_is_committed_by_itself_takes_nothing_from_a_batch_that_is_planned(log, driver):
    """A consumer of the group has read it, or it was set by hand: the batch was written down before."""
    log.plain(0, b"a", b"b")
    query = driver()
    assert query.write_down()
    commit_by_hand(log, 1, driver.keywords["txnstore.delivery.order"])
    assert query.sink() == [b"a", b"b"]
    assert offsets_of(log) == [2, 0]


@pytest.mark.slow_but_first
def test_a_group_in_the_other_order_of_delivery_says_nothing_of_what_is_new(log, driver):
    (other,) = {"offset", "commit"} - {driver.keywords["txnstore.delivery.order"]}
    log.plain(0, b"a", b"b")
    new = driver()
    assert new.write_down()
    assert driver(**{"txnstore.delivery.order": other}).batch() == [b"a", b"b"]
    with pytest.raises(InvalidRequest, match="reset-offsets"):
        new.sink()


@pytest.fixture(params=[None, "before"])
def query(driver, request):
    """A query that reads as no group, or as another one than later."""
    return driver(**{"kafka.group.id": request.param, "startingOffsets": "earliest"})


def restart_as_group(query):
    query.options |= {"kafka.group.id": query.log.name, "startingOffsets": "group"}
    query.restart()


def repeat_as_group(query):
    """Run the last batch once more, as a query does that was killed before the batch was over for Spark."""
    query.committed -= 1
    restart_as_group(query)
    values = query.sink()
    query.committed += 1
    return values


@pytest.mark.slow_but_first
def test_a_query_that_reads_as_a_new_group_from_now_on_does_not_write_its_last_batch_again(log, query):
    log.plain(0, b"a")
    assert query.batch() == [b"a"]
    assert [repeat_as_group(query), repeat_as_group(query)] == [None, None]
    log.plain(0, b"b")
    assert query.batch() == [b"b"]
    assert repeat_as_group(query) is None


@pytest.mark.slow_but_first
@pytest.mark.parametrize("batches", [1, 2])
def test_an_older_checkpoint_of_a_query_that_reads_as_a_new_group_from_now_on_is_refused(log, query, batches):
    for value in (b"a", b"b", b"c"):
        log.plain(0, value)
        assert query.batch() == [value]
    query.go_back(batches)
    restart_as_group(query)
    log.plain(0, b"d")
    assert query.write_down()
    with pytest.raises(ProducerFenced, match="checkpoint is older than what it has written"):
        query.sink()


@pytest.mark.slow_but_first
def test_where_another_query_has_brought_the_new_group_does_not_make_new_what_this_one_has_written(log, driver, query):
    log.plain(0, b"a", b"b")
    assert [query.batch(ReadMaxRows(1)), query.batch(ReadMaxRows(1))] == [[b"a"], [b"b"]]
    assert driver().batch(ReadMaxRows(1)) == [b"a"]
    assert [repeat_as_group(query), repeat_as_group(query)] == [None, None]


@pytest.mark.slow_but_first
def test_what_another_query_has_written_as_the_new_group_is_not_written_again(log, driver, query):
    log.plain(0, b"a")
    assert query.batch() == [b"a"]
    new = driver()
    log.plain(0, b"b")
    assert new.batch() == [b"a", b"b"]
    restart_as_group(query)
    with pytest.raises(ProducerFenced, match=OWN):
        query.batch()
    query.begin_anew()
    log.plain(0, b"c")
    assert query.batch() == [b"c"]


@pytest.mark.slow_but_first
def test_an_older_checkpoint_does_not_write_again_what_another_query_has_written_as_the_new_group(log, driver, query):
    log.plain(0, b"a")
    assert query.batch() == [b"a"]
    log.plain(0, b"b")
    assert query.batch() == [b"b"]
    log.plain(0, b"c")
    assert driver().batch() == [b"a", b"b", b"c"]
    query.go_back(1)
    restart_as_group(query)
    with pytest.raises(ProducerFenced, match=OWN):
        query.batch()
    query.begin_anew()
    log.plain(0, b"d")
    assert query.batch() == [b"d"]


@pytest.mark.slow_but_first
def test_what_was_read_before_the_new_group_is_not_written_again_where_nothing_has_been_read_since(log, query):
    log.plain(0, b"a")
    assert query.batch() == [b"a"]
    log.plain(1, b"x")
    assert query.batch() == [b"x"]
    restart_as_group(query)
    log.plain(0, b"b")
    # As the first one after a start it says where the query stands in the other partition, too.
    assert query.batch() == [b"b"]
    query.go_back(2)
    assert query.batch() is None
    assert query.write_down() is False
    log.plain(1, b"y")
    assert query.batch() == [b"y"]
