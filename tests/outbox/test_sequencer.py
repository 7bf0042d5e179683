"""The sequencer: what callers committed becomes records, together, in order, once; who is slow holds nobody up."""

from __future__ import annotations

import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import insert, select, update

from tests.outbox.steps import records, refusals, values, waiting
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.opening import open_store
from txnstore.db.schema import databases, outbox, outbox_sequencers, partitions
from txnstore.errors import WriteConflict
from txnstore.log import topics
from txnstore.log.append import append
from txnstore.log.outbox import rows as outbox_rows
from txnstore.log.outbox import sequencer as outbox_sequencer
from txnstore.log.outbox.rows import lock_outbox
from txnstore.log.outbox.sequencer import PAUSE_LAST_SECONDS, OutboxPoller, Sequenced, drain_outbox, sequence_outbox
from txnstore.log.partition_rows import lock_heads
from txnstore.log.partitioners import consistent
from txnstore.log.topics import create_topic, delete_topic, list_topics
from txnstore.testing.invariants import assert_sound

only_postgresql = pytest.mark.parametrize("txnstore_url", ["postgresql"], indirect=True)
only_sqlite = pytest.mark.parametrize("txnstore_url", ["sqlite"], indirect=True)


@pytest.fixture
def small_pages(monkeypatch):
    """Pages of three rows."""
    monkeypatch.setattr(outbox_rows, "PAGE_ROWS_MAX", 3)


def topic_of(store, partition_count=1, name="t", **config):
    found = {key.replace("_", "."): value for key, value in config.items()}
    return store.write(lambda c: create_topic(c, name, partition_count=partition_count, config=found))


# --- rows become records ----------------------------------------------------------------------------------------------


def test_committed_rows_become_records_in_the_order_of_their_numbers(store, caller):
    caller().insert(b"a", b"b", b"c").commit()
    caller().insert(b"d").commit()
    assert sequence_outbox(store) == Sequenced(moved_count=4)
    assert values(store) == [b"a", b"b", b"c", b"d"]
    assert waiting(store) == 0
    assert store.read(lambda c: c.execute(select(outbox_sequencers.c.sequenced_count)).scalar_one()) == 4
    assert_sound(store, at_rest=True)


def test_an_empty_outbox_is_left_alone(store):
    assert sequence_outbox(store) == Sequenced()
    assert drain_outbox(store) == 0


def test_every_column_arrives(store, caller):
    topic_of(store, 3)
    one = caller()
    headers = '["a","1","b",null,"c",["ff00"]]'
    one.insert_row(topic="t", key=b"k", value=b"v", partition_number=2, timestamp_ms=1_700_000_000_123, headers=headers)
    one.insert_row(topic="t", partition_number=2)
    one.commit()
    sequence_outbox(store)
    _, _, (first, second) = records(store)
    assert (first.key, first.value, first.timestamp_ms) == (b"k", b"v", 1_700_000_000_123)
    assert first.headers == (("a", b"1"), ("b", None), ("c", b"\xff\x00"))
    assert (second.key, second.value, second.headers) == (None, None, ())
    now_ms = store.write(lambda c: lock_outbox(c, waits=True)).now_ms
    assert 0 <= now_ms - second.timestamp_ms < 60_000


def test_a_key_goes_where_producers_send_it(store, caller):
    topic_of(store, 5)
    one = caller()
    for number in range(40):
        one.insert(b"v", key=str(number).encode())
    one.commit()
    sequence_outbox(store)
    for number, partition in enumerate(records(store)):
        assert {consistent(record.key or b"", 5) for record in partition} <= {number}


def test_rows_without_a_key_stay_together_and_in_order(store, caller):
    topic_of(store, 50)
    wanted = [str(number).encode() for number in range(20)]
    caller().insert(*wanted).commit()
    sequence_outbox(store)
    assert [[record.value for record in partition] for partition in records(store) if partition] == [wanted]


@pytest.mark.takes_a_coordinator
@pytest.mark.parametrize("later_rows", [0, 5], ids=["in one page", "in several"])
def test_a_row_with_a_number_of_the_callers_own_becomes_a_record_too(store, caller, small_pages, later_rows):
    one = caller()
    # What moves rows began behind 0, and saw that others wait.
    for number in (-(2**63), -1, 0):
        one.insert_row(topic="t", outbox_id=number, value=b"%d" % number)
    one.insert(*[b"later"] * later_rows).commit()
    assert drain_outbox(store) == 3 + later_rows
    assert values(store) == [b"%d" % -(2**63), b"-1", b"0", *[b"later"] * later_rows]


def test_large_rows_fill_several_batches(store, caller):
    topic_of(store, max_message_bytes="1000")
    wanted = [bytes([65 + number]) * 300 for number in range(10)]
    caller().insert(*wanted, headers='["a","' + "x" * 200 + '"]').commit()
    assert sequence_outbox(store).moved_count == 10
    assert values(store) == wanted


def test_a_topic_that_is_not_there_is_made_as_its_use_makes_it(store, caller):
    store.write(lambda c: change_store_settings(c, {"num.partitions": "3"}))
    caller().insert(b"v", topic="new").commit()
    sequence_outbox(store)
    assert len(records(store, "new")) == 3
    assert values(store, "new") == [b"v"]


def test_a_topic_with_times_of_its_own_stamps_the_rows(store, caller):
    topic_of(store, message_timestamp_type="LogAppendTime")
    caller().insert(b"v", timestamp_ms=5).commit()
    sequence_outbox(store)
    assert records(store)[0][0].timestamp_ms > 5


# --- together, and in the order of causes -----------------------------------------------------------------------------


@only_postgresql
def test_a_row_that_is_committed_late_is_not_skipped(store, caller):
    slow, fast = caller(), caller()
    slow.insert(b"first number, last commit")
    fast.insert(b"last number, first commit").commit()
    assert sequence_outbox(store).moved_count == 1
    assert sequence_outbox(store).moved_count == 0
    slow.commit()
    assert sequence_outbox(store).moved_count == 1
    assert values(store) == [b"last number, first commit", b"first number, last commit"]


@only_postgresql
def test_an_effect_comes_after_its_cause_though_its_transaction_is_older(store, caller):
    older, younger = caller(), caller()
    # It has an id before it inserts anything.
    older.connection.execute("SELECT pg_current_xact_id()")
    younger.insert(b"created").commit()
    older.insert(b"paid: saw created").commit()
    sequence_outbox(store)
    assert values(store) == [b"created", b"paid: saw created"]


@only_postgresql
def test_pages_keep_the_rows_of_a_caller_together(store, caller, small_pages):
    first, second, third = caller(), caller(), caller()
    first.insert(b"1a")
    second.insert(b"2a", b"2b")
    first.insert(b"1b")
    third.insert(b"3a")
    for one in (first, second, third):
        one.commit()
    # Three rows are read: of the first caller there is one more, so it waits.
    assert sequence_outbox(store) == Sequenced(moved_count=2, has_more=True)
    assert values(store) == [b"2a", b"2b"]
    assert drain_outbox(store) == 3
    assert values(store) == [b"2a", b"2b", b"1a", b"1b", b"3a"]


@only_postgresql
def test_a_caller_with_more_rows_than_a_page_goes_in_one_piece_with_what_it_has_seen(store, caller, small_pages):
    large, cause, later = caller(), caller(), caller()
    large.insert(*(b"large %d" % number for number in range(4)))
    cause.insert(b"cause").commit()
    large.insert(*(b"effect %d" % number for number in range(4)))
    later.insert(b"later")
    large.insert(b"end").commit()
    later.insert(b"later end").commit()
    assert sequence_outbox(store) == Sequenced(moved_count=10, has_more=True)
    held = values(store)
    assert held[:4] == [b"large %d" % number for number in range(4)]
    assert held[4] == b"cause"
    assert held[5:] == [*(b"effect %d" % number for number in range(4)), b"end"]
    assert drain_outbox(store) == 2
    assert values(store)[10:] == [b"later", b"later end"]


def test_many_rows_go_page_by_page_in_one_database_transaction(store, caller, small_pages):
    topic_of(store, 3, "u")
    wanted = [str(number).encode() for number in range(20)]
    one = caller()
    for number, value in enumerate(wanted):
        one.insert(value, topic="u", partition_number=(20 - number) % 3)
        one.insert(value)
    one.commit()
    assert sequence_outbox(store) == Sequenced(moved_count=40, has_more=True)
    assert values(store) == wanted
    assert {*values(store, "u")} == {*wanted}
    assert len(values(store, "u")) == 20
    assert_sound(store, at_rest=True)


def test_heads_are_locked_in_one_go_before_the_first_page(store, caller, small_pages, monkeypatch):
    """Page by page they would be locked out of order, and producers that write to both wait in a circle."""
    first, second = topic_of(store, 2, "a"), topic_of(store, 2, "b")
    locked = []

    def lock(connection, ids):
        locked.append(ids)
        return lock_heads(connection, ids)

    monkeypatch.setattr(outbox_sequencer, "lock_heads", lock)
    one = caller()
    one.insert(*(b"b" for _ in range(4)), topic="b", partition_number=1)
    one.insert(*(b"a" for _ in range(4)), topic="a").commit()
    assert sequence_outbox(store).moved_count == 8
    assert locked == [[*first.partition_ids, second.partition_ids[1]]]


@only_postgresql
def test_who_commits_during_a_round_is_for_the_next_one(store, caller, small_pages, monkeypatch):
    large, late = caller(), caller()
    late.insert(b"late 1")
    large.insert(*(b"large" for _ in range(7)))
    late.insert(b"late 2")
    large.insert(b"end").commit()
    take = outbox_rows.take_rows

    def take_and_commit(connection, ids):
        late.commit()
        return take(connection, ids)

    monkeypatch.setattr("txnstore.log.outbox.sequencer.take_rows", take_and_commit)
    assert sequence_outbox(store).moved_count == 8
    assert b"late 1" not in values(store)
    assert drain_outbox(store) == 2
    assert values(store)[8:] == [b"late 1", b"late 2"]


@pytest.mark.takes_a_coordinator
@only_postgresql
@pytest.mark.parametrize("how", ["DELETE FROM txnstore.outbox", "UPDATE txnstore.outbox SET refusal = 'not yet'"])
def test_a_row_that_its_owner_takes_back_during_a_round_is_no_record(store, caller, monkeypatch, how):
    one = caller()
    one.insert(b"a", b"back", b"c").commit()
    take = outbox_rows.take_rows
    taken: list[list[int]] = []

    def take_back_first(connection, ids):
        if not taken:
            one.connection.execute(f"{how} WHERE value = %s", (b"back",))
            one.commit()
        taken.append(ids)
        return take(connection, ids)

    monkeypatch.setattr("txnstore.log.outbox.sequencer.take_rows", take_back_first)
    assert sequence_outbox(store).moved_count == 2
    assert values(store) == [b"a", b"c"]
    assert [len(ids) for ids in taken] == [3, 2]
    assert refusals(store) == ({} if how.startswith("DELETE") else {b"back": "not yet"})


def test_a_row_that_is_no_more_found_ends_the_round(store, caller, monkeypatch):
    """As by a role whose policies let it see the row, but not delete it."""
    caller().insert(b"a", b"b", b"c").commit()
    with monkeypatch.context() as patch:
        patch.setattr(outbox_rows, "_TAKE", outbox_rows._TAKE.where(outbox.c.value != b"b"))
        with pytest.raises(WriteConflict):
            sequence_outbox(store, retry_timeout_ms=0)
    assert sequence_outbox(store).moved_count == 3
    assert values(store) == [b"a", b"b", b"c"]


@pytest.mark.slow_but_first
@pytest.mark.takes_a_coordinator
@only_postgresql
@pytest.mark.parametrize(
    ("how", "moved"),
    [
        ("UPDATE txnstore.outbox SET value = 'new'", [b"a", b"new", b"c"]),
        ("UPDATE txnstore.outbox SET refusal = 'not yet'", [b"a", b"c"]),
        ("DELETE FROM txnstore.outbox", [b"a", b"c"]),
    ],
)
def test_what_its_owner_changes_during_a_round_is_not_lost(store, caller, connect, how, moved):
    """The statement that takes the row waits for the change."""
    owner, beside = caller(), connect()
    beside.autocommit = True
    owner.insert(b"a", b"old", b"c").commit()
    owner.connection.execute(f"{how} WHERE value = 'old'")
    waiting_for = "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))"
    with ThreadPoolExecutor(1) as threads:
        sequencing = threads.submit(sequence_outbox, store)
        until = time.monotonic() + 30
        while beside.execute(waiting_for, [owner.connection.info.backend_pid]).fetchone() != (1,):
            assert time.monotonic() < until
        owner.commit()
        assert sequencing.result(60).moved_count == len(moved)
    assert values(store) == moved
    assert waiting(store) == 0
    assert refusals(store) == ({b"old": "not yet"} if "refusal" in how else {})


@pytest.mark.takes_a_coordinator
@only_postgresql
def test_a_row_between_that_is_not_to_go_yet_is_not_waited_for(store, caller, small_pages):
    first, second = caller(), caller()
    first.insert(b"1a")
    second.insert(b"2a")
    first.insert(b"1b")
    second.insert(b"2b")
    for one in (first, second):
        one.commit()
    second.connection.execute("UPDATE txnstore.outbox SET value = 'new' WHERE value = '2a'")
    assert sequence_outbox(store, retry_timeout_ms=0) == Sequenced(moved_count=2, has_more=True)
    second.commit()
    assert drain_outbox(store) == 2
    assert values(store) == [b"1a", b"1b", b"new", b"2b"]


@only_postgresql
def test_who_commits_between_the_list_and_the_choice_goes_as_a_whole(store, caller, small_pages, monkeypatch):
    """The list that the choice began with has not all of its rows."""
    large, late = caller(), caller()
    late.insert(b"late 1")
    large.insert(*(b"large" for _ in range(7)))
    late.insert(b"late 2")
    large.insert(b"end").commit()
    last_ids = outbox_rows.last_ids_of_callers

    def commit_and_look(connection):
        late.commit()
        return last_ids(connection)

    monkeypatch.setattr("txnstore.log.outbox.sequencer.last_ids_of_callers", commit_and_look)
    assert sequence_outbox(store).moved_count == 10
    assert values(store) == [b"late 1", *[b"large"] * 7, b"late 2", b"end"]


@pytest.mark.takes_a_coordinator
@only_postgresql
def test_who_takes_everything_back_between_the_list_and_the_choice_stops_nobody(
    store, caller, small_pages, monkeypatch
):
    large = caller()
    large.insert(*(b"large" for _ in range(5))).commit()
    caller().insert(b"after").commit()
    last_ids = outbox_rows.last_ids_of_callers

    def take_back_and_look(connection):
        large.connection.execute("DELETE FROM txnstore.outbox WHERE value = %s", (b"large",))
        large.commit()
        return last_ids(connection)

    monkeypatch.setattr("txnstore.log.outbox.sequencer.last_ids_of_callers", take_back_and_look)
    assert sequence_outbox(store) == Sequenced(has_more=True)
    assert drain_outbox(store) == 1
    assert values(store) == [b"after"]


# --- who is slow, or at it already ------------------------------------------------------------------------------------


@only_postgresql
def test_a_caller_that_stays_open_blocks_nobody(store, caller):
    topic_of(store)
    idle = caller().insert(b"of a caller that does not end")
    for number in range(3):
        caller().insert(b"%d" % number).commit()
        assert sequence_outbox(store, retry_timeout_ms=0).moved_count == 1
    assert values(store) == [b"0", b"1", b"2"]
    idle.rollback()
    assert sequence_outbox(store).moved_count == 0


@only_postgresql
def test_a_caller_that_was_prepared_and_forgotten_blocks_nobody(store, caller, connect):
    caller().insert(b"prepared").connection.execute("PREPARE TRANSACTION 'forgotten-outbox'")
    other = connect()
    other.autocommit = True
    try:
        caller().insert(b"other").commit()
        assert sequence_outbox(store, retry_timeout_ms=0).moved_count == 1
        assert values(store) == [b"other"]
    finally:
        other.execute("COMMIT PREPARED 'forgotten-outbox'")
    assert sequence_outbox(store).moved_count == 1
    assert values(store) == [b"other", b"prepared"]


@only_sqlite
def test_a_caller_with_the_write_lock_is_waited_for_no_longer_than_asked(store, caller):
    caller().insert(b"a").commit()
    writer = caller().insert(b"b")
    poller = OutboxPoller(store)
    assert 0.0 < poller.turn() <= PAUSE_LAST_SECONDS
    assert poller.moved_count == 0
    writer.commit()
    assert poller.turn() > 0
    assert poller.moved_count == 2


@only_postgresql
def test_who_finds_another_sequencer_at_work_goes_away_or_waits(store, url, caller):
    caller().insert(b"v").commit()
    with open_store(url) as other:

        def while_locked(connection):
            assert lock_outbox(connection, waits=False) is not None
            return sequence_outbox(other)

        assert store.write(while_locked) == Sequenced(is_busy=True)
        assert sequence_outbox(other).moved_count == 1


@only_postgresql
def test_without_the_lock_a_later_row_would_pass_an_earlier_one(store, url, caller, monkeypatch):
    """The second sequencer comes while the first one has taken the cause and not committed yet."""
    topic_of(store)
    caller().insert(b"cause").commit()
    with open_store(url) as other:

        def during(connection, moved_count):
            monkeypatch.undo()
            caller().insert(b"effect").commit()
            assert sequence_outbox(other, retry_timeout_ms=0).is_busy

        monkeypatch.setattr("txnstore.log.outbox.sequencer.count_moved", during)
        monkeypatch.setattr("txnstore.log.outbox.sequencer.append", lambda *_: None)
        sequence_outbox(store)
        assert sequence_outbox(other).moved_count == 1


def test_readers_are_told_of_what_was_moved_and_of_nothing_else(store, caller, monkeypatch):
    told = []
    monkeypatch.setattr(store, "announce", lambda _: told.append(values(store)))
    sequence_outbox(store)
    assert told == []
    caller().insert(b"v").commit()
    sequence_outbox(store)
    assert told == [[b"v"]]


def test_a_drain_ends_with_what_was_committed_when_it_began(store, caller, small_pages, monkeypatch):
    # By two callers, so that the first round leaves some.
    caller().insert(b"0", b"1", b"2").commit()
    caller().insert(b"3").commit()
    rounds = []

    def sequence_and_commit(*args, **options):
        done = sequence_outbox(*args, **options)
        rounds.append(done)
        if len(rounds) < 20:
            caller().insert(*[b"later"] * 4).commit()
        return done

    monkeypatch.setattr(outbox_sequencer, "sequence_outbox", sequence_and_commit)
    moved_count = drain_outbox(store)
    assert len(rounds) < 20
    assert len(values(store)) == moved_count
    assert values(store)[:4] == [b"0", b"1", b"2", b"3"]
    assert waiting(store) > 0


def test_the_poller_looks_often_while_rows_come_and_rarely_while_none_do(store, caller):
    poller = OutboxPoller(store)
    pauses = [poller.turn() for _ in range(8)]
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.01
    assert pauses[-1] == PAUSE_LAST_SECONDS
    caller().insert(b"v").commit()
    assert poller.turn() < 0.01
    assert poller.moved_count == 1
    assert poller.turn() < 0.01


# --- what cannot become a record --------------------------------------------------------------------------------------

BAD = {
    "a topic's name": ({"topic": "no topic"}, "a topic's name has only the characters"),
    "a name like another's": ({"topic": "t_x"}, "differs from the topic t.x only in dots"),
    "a partition that is not there": ({"partition_number": 1}, "topic t has partitions 0 to 0, not 1"),
    "a partition below 0": ({"partition_number": -1}, "topic t has partitions 0 to 0, not -1"),
    "no JSON": ({"headers": "a=1"}, r"its headers are not \[name, value, ...\].*not JSON"),
    "an object": ({"headers": '{"a": "1"}'}, "neither null nor a list"),
    "half a pair": ({"headers": '["a"]'}, "pairs of text"),
    "a number": ({"headers": '["a", 1]'}, "pairs of text"),
    "half a letter as a name": ({"headers": '["\\ud800", null]'}, "surrogates"),
    "half a letter as a value": ({"headers": '["a", "\\ud800"]'}, "pairs of text"),
    "a time before all times": ({"timestamp_ms": -5}, "its timestamp is -5"),
    "a time to come": ({"timestamp_ms": 2**62}, "message.timestamp.after.max.ms"),
    "too many bytes": ({"value": b"x" * 2_000_000}, "it takes 20000.. bytes, above the max.message.bytes of topic t"),
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("columns", "why"), BAD.values(), ids=list(BAD))
def test_a_row_that_can_be_no_record_is_marked_and_stops_nobody(store, caller, caplog, columns, why):
    topic_of(store)
    topic_of(store, name="t.x")
    caller().insert(b"before").commit()
    bad = caller()
    bad.insert_row(**{"topic": "t", "value": b"bad"} | columns)
    bad.commit()
    caller().insert(b"after").commit()
    with caplog.at_level(logging.ERROR):
        assert sequence_outbox(store) == Sequenced(has_more=True)
    assert "row 2" in caplog.text
    assert "xxxx" not in caplog.text
    assert drain_outbox(store) == 2
    assert values(store) == [b"before", b"after"]
    ((_, told),) = refusals(store).items()
    assert re.search(why, told)
    assert not store.read(outbox_rows.has_outbox_rows)


def test_a_row_that_is_too_large_to_be_read_is_marked_unread_and_stops_nobody(store, caller, monkeypatch):
    monkeypatch.setattr(outbox_sequencer, "ROW_BYTES_MAX", 1000)
    taken = []

    def take(connection, outbox_ids):
        taken.extend(outbox_ids)
        return outbox_rows.take_rows(connection, outbox_ids)

    monkeypatch.setattr(outbox_sequencer, "take_rows", take)
    caller().insert(b"x" * 1000).commit()
    # With a row before it, if the database knows that they belong together.
    caller().insert(b"with it").insert(b"x" * 1001).commit()
    caller().insert(b"after").commit()
    with_it = [] if store.backend.name == "postgresql" else [b"with it"]
    assert drain_outbox(store) == 2 + len(with_it)
    assert values(store) == [b"x" * 1000, *with_it, b"after"]
    assert 3 not in taken
    assert refusals(store)[b"x" * 1001].startswith("it takes more than")


@only_sqlite
@pytest.mark.parametrize(
    ("column", "raw", "why"),
    [
        ("topic", b"\xff", "a topic's name has only"),
        ("headers", b'["\xff", null]', "headers"),
        ("headers", b'["a", "\xff"]', "headers"),
        ("headers", b"\xff", "headers"),
    ],
    ids=["topic", "name", "value", "no JSON"],
)
def test_text_that_is_no_utf8_is_marked_and_stops_nobody(store, caller, column, raw, why):
    """SQLite keeps whatever it is given as text."""
    bad, columns = caller(), {"topic": "'t'", "value": "x'00'", column: f"CAST(x'{raw.hex()}' AS TEXT)"}
    names, marks = ", ".join(columns), ", ".join(columns.values())
    bad.connection.execute(f"INSERT INTO txnstore_outbox ({names}) VALUES ({marks})")
    bad.commit()
    caller().insert(b"after").commit()
    assert drain_outbox(store) == 1
    assert values(store) == [b"after"]
    ((_, told),) = refusals(store).items()
    assert re.search(why, told)


@pytest.mark.slow_but_first
@only_postgresql
@pytest.mark.parametrize("rows_after", [1, 5], ids=["in one page", "in several"])
def test_with_a_row_all_of_its_callers_database_transaction_is_refused(store, caller, small_pages, rows_after):
    bad = caller().insert(b"good")
    bad.insert(b"bad", topic="no topic").insert(*(b"good %d" % number for number in range(rows_after))).commit()
    caller().insert(b"other").commit()
    assert drain_outbox(store) == 1
    assert values(store) == [b"other"]
    told = refusals(store)
    assert len(told) == 2 + rows_after
    assert told[b"bad"].startswith("a topic's name has only the characters")
    assert told[b"good 0"] == f"row 2 of the same database transaction was refused: {told[b'bad']}"


def test_a_refused_row_may_be_tried_again(store, caller):
    store.write(lambda c: change_store_settings(c, {"auto.create.topics.enable": "false"}))
    caller().insert(b"v").commit()
    assert drain_outbox(store) == 0
    assert refusals(store) == {b"v": "there is no topic t, and the store does not create topics on first use"}
    topic_of(store)
    store.write(lambda c: c.execute(update(outbox).values(refusal=None)))
    assert drain_outbox(store) == 1
    assert values(store) == [b"v"]


def test_a_row_that_is_tried_again_comes_after_later_ones_of_its_key(store, caller):
    topic_of(store)
    caller().insert(b"older", key=b"k", partition_number=1).commit()
    caller().insert(b"newer", key=b"k").commit()
    assert drain_outbox(store) == 1
    store.write(lambda c: c.execute(update(outbox).values(refusal=None, partition_number=None)))
    assert drain_outbox(store) == 1
    assert values(store) == [b"newer", b"older"]


@pytest.mark.takes_a_coordinator
@pytest.mark.slow_but_first
@pytest.mark.parametrize("limit", ["before", "after"])
def test_a_row_refused_for_its_time_says_what_makes_it_a_record(store, caller, limit):
    topic_of(store, **{f"message_timestamp_{limit}_max_ms": "60000"})
    now_ms = time.time_ns() // 1_000_000
    far_ms = now_ms - 3_600_000 if limit == "before" else now_ms + 3_600_000
    caller().insert(b"v", timestamp_ms=far_ms).commit()
    assert drain_outbox(store) == 0
    told = re.search("SET .* NULL", refusals(store)[b"v"])
    assert told
    one = caller()
    table = "txnstore_outbox" if store.backend.name == "sqlite" else "txnstore.outbox"
    one.connection.execute(f"UPDATE {table} {told[0]}")
    one.commit()
    assert drain_outbox(store) == 1
    ((record,),) = records(store)
    assert (record.value, abs(record.timestamp_ms - now_ms) < 60_000) == (b"v", True)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("older_ms", "is_taken"), [(0, True), (1_000, True), (1_001, False)])
def test_how_old_a_row_is_is_judged_by_when_it_was_inserted(store, caller, older_ms, is_taken):
    """However long nothing has moved rows."""
    topic_of(store, message_timestamp_before_max_ms="1000")
    begun_ms = time.time_ns() // 1_000_000
    caller().insert(b"v").commit()
    inserted_ms = store.read(lambda c: c.execute(select(outbox.c.inserted_ms)).scalar_one())
    assert begun_ms - 60_000 < inserted_ms < begun_ms + 60_000
    day_ago_ms = inserted_ms - 86_400_000
    then = update(outbox).values(inserted_ms=day_ago_ms, timestamp_ms=day_ago_ms - older_ms)
    store.write(lambda c: c.execute(then))
    assert drain_outbox(store) == int(is_taken)
    if is_taken:
        assert [record.timestamp_ms for record in records(store)[0]] == [day_ago_ms - older_ms]
    else:
        assert refusals(store)[b"v"].startswith("its timestamp lies 1001 ms before its INSERT, more than the topic's")


@pytest.mark.takes_a_coordinator
def test_a_row_without_the_time_of_its_insertion_is_judged_by_the_clock(store, caller):
    topic_of(store, message_timestamp_before_max_ms="3600000")
    now_ms = time.time_ns() // 1_000_000
    caller().insert(b"old", timestamp_ms=now_ms - 7_200_000, inserted_ms=None).commit()
    caller().insert(b"young", timestamp_ms=now_ms - 1_800_000, inserted_ms=None).commit()
    assert drain_outbox(store) == 1
    assert values(store) == [b"young"]


def test_a_partition_in_another_database_is_refused_for_now(store, caller):
    topic = topic_of(store, 2)

    def move(connection):
        other = dict(connection.execute(select(databases)).mappings().one()) | {
            "database_id": 2,
            "label": "second",
            "store_uuid": "00000000-0000-0000-0000-000000000002",
        }
        connection.execute(insert(databases), other)
        connection.execute(
            update(partitions).where(partitions.c.partition_id == topic.partition_ids[1]).values(leader_database_id=2)
        )

    store.write(move)
    caller().insert(b"here", partition_number=0).commit()
    # What may go anywhere stays here.
    caller().insert(b"keyless").commit()
    caller().insert(b"away", partition_number=1).commit()
    caller().insert(b"keyless").commit()
    assert drain_outbox(store) == 3
    assert values(store)[:3] == [b"here", b"keyless", b"keyless"]
    assert "lives in another database" in refusals(store)[b"away"]


@only_postgresql
def test_a_topic_that_is_deleted_while_it_is_looked_up_is_made_anew(store, caller, monkeypatch):
    """Between two statements: the first one still finds it, the second one none of its partitions."""
    topic_of(store)
    caller().insert(b"v", key=b"k").commit()
    real = topics._PARTITIONS

    class Deleting:
        def rows(self, connection, parameters):
            monkeypatch.undo()
            store.write(lambda c: delete_topic(c, "t"))
            return real.rows(connection, parameters)

    monkeypatch.setattr(topics, "_PARTITIONS", Deleting())
    assert drain_outbox(store) == 1
    assert values(store) == [b"v"]
    assert refusals(store) == {}


def test_a_topic_that_is_deleted_in_between_is_made_anew(store, caller, monkeypatch):
    topic_of(store)
    caller().insert(b"v").commit()
    if store.backend.name == "sqlite":
        store.write(lambda c: delete_topic(c, "t"))
        assert drain_outbox(store) == 1
        return
    real = append

    def append_after_deletion(connection, appends):
        monkeypatch.undo()
        store.write(lambda c: delete_topic(c, "t"))
        return real(connection, appends)

    monkeypatch.setattr(outbox_sequencer, "append", append_after_deletion)
    assert drain_outbox(store) == 1
    assert values(store) == [b"v"]
    assert store.read(list_topics) == ["t"]
