"""Transactions that are wholly in the client: the short ways to commit them do what the general way does.

Each history runs on two stores whose clocks show the same. One of them commits whole transactions at once where it
can, by a function of the database or by statements of its own; the other never. Answers, errors and rows are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import make_url

from tests.log.histories import EXAMPLES
from tests.tools.least_privilege import as_owner
from tests.tools.markers import encode_control
from tests.transactions.whole_steps import STEPS
from tests.transactions.whole_worlds import (
    World,
    Worlds,
    assert_same,
    assert_same_rows,
    happens,
    lived_through,
    noted_places,
    worlds,
)
from txnstore.db.backend import Limits
from txnstore.db.opening import open_store
from txnstore.db.postgresql import commit_function
from txnstore.db.schema import group_members
from txnstore.db.store import FUNCTION_AGAIN_SECONDS, Store
from txnstore.errors import StoreBusy, UnknownTopicOrPartition
from txnstore.groups.offsets import commit_offsets, commit_offsets_at_once
from txnstore.log.topics import create_topic
from txnstore.model import ControlType, GroupMembership, OffsetAndMetadata, ProducerIdentity
from txnstore.testing.invariants import assert_sound
from txnstore.testing.postgres_server import connection_string

__all__ = ["worlds"]


@pytest.mark.slow
@pytest.mark.campaign
@settings(max_examples=EXAMPLES)
@given(steps=st.lists(STEPS, min_size=1, max_size=12))
def test_both_ways_answer_the_same_and_write_the_same_rows(worlds: Worlds, steps: list[tuple[Any, ...]]) -> None:
    assert_same(lived_through(worlds, steps))


@pytest.fixture
def pair(worlds: Worlds) -> tuple[World, World]:
    """Two worlds with a producer that has started."""
    pair = worlds.new_pair()
    assert happens(pair, "give_members") is None
    happens(pair, "start", pair[0].names[0])
    worlds.places.clear()
    return pair


USUAL = [
    pytest.param([(0, 0, 1)], [], id="one record"),
    pytest.param([(2, 0, 1), (0, 0, 3), (2, 5, 0)], [], id="several batches"),
    # Their markers are younger.
    pytest.param([(0, 5_000, 1), (2, 6_000, 0)], [], id="old records"),
    pytest.param([(0, 0, 1)], [(0, [0, 1, 2], None)], id="offsets of nobody in particular"),
    pytest.param([(0, 0, 1)], [(2, [0, 1], "")], id="offsets of a member"),
    pytest.param([], [(6, [1], None)], id="only offsets, of a member with a lasting name"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("cells", "committers"), USUAL)
def test_what_is_usual_is_committed_at_once(worlds: Worlds, pair, cells, committers) -> None:
    name = pair[0].names[0]
    for _ in range(3):
        happens(pair, "commit", name, cells, 0, committers, 0)
        worlds.clock.advance(1_234_567)
    assert len(worlds.places) == 3
    assert None not in worlds.places
    assert_same(pair)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("text", [None, "within"], ids=["offset order", "commit order"])
@pytest.mark.parametrize("cells", [[], [(0, 0, 1), (2, 0, 2)]], ids=["only offsets", "records"])
def test_offsets_that_cannot_wait_begin_a_transaction_and_are_committed_with_it(
    worlds: Worlds, pair, cells, text
) -> None:
    name = pair[0].names[0]
    for number in range(3):
        happens(pair, "send", name, (0, [0, number], text))
        assert_same(pair)
        worlds.places.clear()
        worlds.clock.advance(60_000)
        happens(pair, "commit", name, cells, 0, [], 0, "readers")
        assert None not in worlds.places
        assert_same(pair)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("committer", "is_usual"),
    [
        ((2, [0, 1], None), True),
        ((2, [1], ""), True),
        ((6, [1, 0], None), True),
        # It may be behind the group, not ahead, and has confirmed a generation.
        ((3, [0], None), True),
        ((4, [0], None), False),
        ((12, [0], None), False),
        ((2, [0, 2], None), False),
        ((5, [0], None), False),
        ((7, [0], None), False),
        ((0, [0], None), False),
        ((2, [0], "text"), False),
        ((2, [0], "within"), False),
        ((2, [], None), False),
    ],
)
def test_offsets_of_a_member_are_committed_by_one_statement_if_nothing_is_unusual(pair, committer, is_usual) -> None:
    for _ in range(2):
        happens(pair, "commit_offsets", committer)
    has_function = pair[0].store.has_commit_function
    assert pair[0].were_at_once == [is_usual and has_function] * 2
    assert_same(pair)


def test_offsets_of_nobody_in_particular_are_committed_by_one_statement_where_there_are_no_members(worlds) -> None:
    pair = worlds.new_pair()
    # The group is made by the first, in the general way, if nobody has used it.
    for number in range(3):
        happens(pair, "commit_offsets", (1, [0, number], None))
        worlds.clock.advance(1_000)
    happens(pair, "commit_offsets", (1, [0], "within"))
    assert pair[0].were_at_once[1:] == [worlds.at_once.has_commit_function] * 2 + [False]
    assert_same(pair)


def test_offsets_in_a_deleted_topic_are_refused_and_none_is_committed(pair) -> None:
    happens(pair, "commit_offsets", (2, [0, 1], None))
    before = [world.rows()["group_offsets"] for world in pair]
    happens(pair, "delete_topic")
    answer = happens(pair, "commit_offsets", (2, [0, 1], None))
    assert isinstance(answer, tuple)
    assert answer[0] is UnknownTopicOrPartition
    assert not pair[0].were_at_once[-1]
    assert [world.rows()["group_offsets"] for world in pair] == before
    assert_same(pair)


def test_a_function_that_knows_of_no_offsets_by_themselves_leaves_them_to_the_general_way(
    txnstore_postgresql_url, monkeypatch
) -> None:
    with open_store(txnstore_postgresql_url) as store:
        store.commits_whole = True
        topic = store.write(lambda connection: create_topic(connection, "sales"))
        committer, offsets = GroupMembership("readers"), {topic.partition_ids[0]: OffsetAndMetadata(5)}
        store.write(lambda connection: commit_offsets(connection, committer, offsets))
        assert commit_offsets_at_once(store, committer, offsets)
        # What one of before answers: it has appended nothing.
        monkeypatch.setattr(store, "commit_whole", lambda *_, **__: [])
        assert not commit_offsets_at_once(store, committer, offsets)


def test_a_later_commit_of_another_outlives_pending_offsets(worlds: Worlds, pair) -> None:
    name, other = pair[0].names
    happens(pair, "start", other)
    happens(pair, "send", name, (0, [0, 1], None))
    happens(pair, "commit", other, [], 0, [(0, [1], None)], 0)
    worlds.places.clear()
    happens(pair, "commit", name, [(0, 0, 1)], 0, [], 0, "readers")
    assert None not in worlds.places
    assert_same(pair)


OPEN_BUT_UNUSUAL = [
    pytest.param([("append", [(1, 0, 1)])], id="it has records"),
    pytest.param([("send", (1, [0], None))], id="it has offsets of another group"),
    pytest.param([("advance", 60_001)], id="its time is up"),
    pytest.param([("abort",)], id="it is over"),
    pytest.param([("start",)], id="a newer producer has come"),
    pytest.param([("join",)], id="it has a further writer"),
    pytest.param([("register",)], id="it has a branch"),
    pytest.param([("take_over",)], id="it was prepared before"),
]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("steps", OPEN_BUT_UNUSUAL)
def test_what_is_open_and_not_as_the_client_believes_goes_the_general_way(worlds: Worlds, pair, steps) -> None:
    name = pair[0].names[0]
    happens(pair, "send", name, (0, [0], None))
    producers = [world.producers[name] for world in pair]
    for step, *arguments in steps:
        if step == "advance":
            worlds.clock.advance(*arguments)
        else:
            happens(pair, step, name, *arguments)
    if steps[0][0] == "start":
        for world, producer in zip(pair, producers, strict=True):
            world.producers[name] = producer
    worlds.places.clear()
    happens(pair, "commit", name, [(0, 0, 1)], 0, [], 0, "readers")
    assert worlds.places
    assert not any(worlds.places)
    assert_same(pair)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([("commit", [], 0, [], 0, "readers"), ("lose_branch",)], id="missing"),
        pytest.param([("commit", [], 0, [], 0, "readers")], id="committed"),
        pytest.param([("abort",)], id="aborted"),
    ],
)
def test_a_branch_of_an_earlier_transaction_is_in_nobodys_way(worlds: Worlds, pair, steps) -> None:
    name = pair[0].names[0]
    happens(pair, "send", name, (0, [0], None))
    happens(pair, "register", name)
    for step, *arguments in steps:
        happens(pair, step, name, *arguments)
    happens(pair, "start", name)
    happens(pair, "send", name, (0, [0, 1], None))
    worlds.places.clear()
    happens(pair, "commit", name, [(0, 0, 1)], 0, [], 0, "readers")
    assert worlds.places
    assert None not in worlds.places
    assert_same(pair)


UNUSUAL = [
    pytest.param([("append", [(0, 0, 1)])], [(1, 0, 1)], id="it is open already"),
    pytest.param([("exhaust", 32_766)], [(0, 0, 1)], id="no epoch is left"),
    pytest.param([("configure", 2)], [(0, 5_000, 1)], id="records too old"),
    pytest.param([("configure", 3)], [(0, -5_000, 1)], id="records too new"),
    pytest.param([("configure", 0)], [(0, 0, 1)], id="times given by the log"),
    pytest.param([("be_known", {"coordinator_epoch": 1})], [(0, 0, 1)], id="a newer coordinator was there"),
    pytest.param([("be_known", {"producer_epoch": 32_000})], [(0, 0, 1)], id="a newer epoch was there"),
    pytest.param([("be_known", {"recent_batches": "[0,0,0,0,0]"})], [(0, 0, 1)], id="this epoch was there"),
    pytest.param([("be_known", {"transaction_first_offset": 0})], [(0, 0, 1)], id="a transaction was left there"),
]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("steps", "cells"), UNUSUAL)
def test_what_is_unusual_goes_the_general_way(worlds: Worlds, pair, steps, cells) -> None:
    name = pair[0].names[0]
    try:
        for step, *arguments in steps:
            happens(pair, step, *([] if step == "configure" else [name]), *arguments)
        worlds.places.clear()
        happens(pair, "commit", name, cells, 0, [], 0)
        # What the client knows to be unusual is not even tried.
        assert worlds.places == [None]
        assert_same_rows(pair[0].rows(), pair[1].rows())
    finally:
        happens(pair, "forget", name)


@pytest.mark.slow
@pytest.mark.parametrize("committer", [4, 12], ids=["that is to come", "that it has left"])
def test_a_member_in_another_generation_has_nothing_committed_at_once(worlds: Worlds, pair, committer) -> None:
    happens(pair, "commit", pair[0].names[0], [(0, 0, 1)], 0, [(committer, [0, 1], None)], 0)
    assert worlds.places == [None]
    assert_same_rows(pair[0].rows(), pair[1].rows())


@pytest.mark.slow_but_first
@pytest.mark.parametrize("committer", [9, 10], ids=["a generation", "a lasting name"])
@pytest.mark.parametrize("has_members", [True, False], ids=["beside members", "where nobody is"])
@pytest.mark.parametrize("step", ["commit", "send", "commit_offsets"])
def test_who_has_no_member_id_but_says_who_it_is_has_nothing_committed_at_once(
    worlds: Worlds, pair, monkeypatch, committer, has_members, step
) -> None:
    """Also if the client takes that for usual: whoever has left a group is refused what it had there."""
    for module in "transactions.whole", "groups.offsets":
        monkeypatch.setattr(f"txnstore.{module}.are_usual", lambda *_: True)
    if not has_members:
        for world in pair:
            world.store.write(lambda connection: connection.execute(group_members.delete()))
    name, sent = pair[0].names[0], (committer, [0, 1], None)
    if step == "commit":
        happens(pair, "commit", name, [(0, 0, 1)], 0, [sent], 0)
    elif step == "send":
        happens(pair, "send", name, sent)
    else:
        happens(pair, "commit_offsets", sent)
        assert not pair[0].were_at_once[-1]
    if worlds.at_once.has_commit_function:
        assert not any(worlds.places)
    assert_same_rows(pair[0].rows(), pair[1].rows())


ELSEWHERE = [
    pytest.param([(1, 0, 1)], [], id="a record of another partition"),
    pytest.param([], [(0, [1], None)], id="only offsets"),
    pytest.param([], [(2, [1], None)], id="only offsets of a member"),
]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("cells", "committers"), ELSEWHERE)
def test_an_old_epoch_commits_nothing(worlds: Worlds, pair, cells, committers) -> None:
    name = pair[0].names[0]
    happens(pair, "commit", name, [(0, 0, 1)], 0, [], 0)
    for started in range(2):
        happens(pair, "commit", name, cells, 0, committers, 1)
        assert worlds.places[-1] is None
        if not started:
            happens(pair, "start", name)
    assert_same(pair)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("cells", "committers"), ELSEWHERE)
def test_what_has_begun_before_is_committed_with_all_that_it_has(worlds: Worlds, pair, cells, committers) -> None:
    name = pair[0].names[0]
    happens(pair, "append", name, [(0, 0, 1)])
    happens(pair, "commit", name, cells, 0, committers, 0)
    assert worlds.places == [None]
    assert_same(pair)


@pytest.mark.slow_but_first
def test_the_oldest_open_transaction_of_other_producers_holds_the_last_stable_offset(worlds: Worlds, pair) -> None:
    name, other = pair[0].names
    for each in (other, f"{other}-too"):
        happens(pair, "start", each)
        happens(pair, "append", each, [(0, 0, 1)])
    happens(pair, "commit", name, [(0, 0, 1), (1, 0, 1)], 0, [], 0)
    assert None not in worlds.places
    assert_same(pair)
    happens(pair, "abort", other)
    assert_same(pair)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("time_ms", [0, 1, 0xFFFF, 1_700_000_000_123, 2**48 - 1])
def test_the_checksum_of_a_marker_is_made_from_its_time(time_ms: int) -> None:
    producer = ProducerIdentity(7, 3)

    def crc(at_ms: int) -> int:
        return encode_control(ControlType.COMMIT, coordinator_epoch=0, producer=producer, timestamp_ms=at_ms).crc

    added = crc(0)
    for table in range(12):
        digit = time_ms >> 4 * table & 15
        added ^= commit_function.crc_at(digit << 4 * table) ^ commit_function.crc_at(0)
    assert added == crc(time_ms)


def test_a_time_that_no_marker_can_have_goes_the_general_way(worlds: Worlds, pair) -> None:
    now_ms = worlds.clock.now_ms()
    try:
        worlds.clock.advance(2**48)
        happens(pair, "commit", pair[0].names[0], [(0, 0, 1)], 0, [], 0)
    finally:
        worlds.clock.advance(now_ms - worlds.clock.now_ms())
    # The function makes the marker's checksum by itself; statements leave it to the codec.
    assert worlds.places == [None if worlds.at_once.has_commit_function else [0]]
    assert_same(pair)


def run_all(store: Store, statements: Sequence[str]) -> None:
    for statement in statements:
        store.write(lambda connection, statement=statement: connection.exec_driver_sql(statement))


def let_a_minute_pass(store: Store) -> None:
    store.general_until_seconds -= FUNCTION_AGAIN_SECONDS


@pytest.mark.takes_more_rights("drops functions and makes them")
def test_a_store_without_the_function_commits_by_statements_until_it_is_there(
    txnstore_postgresql_url, worlds: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(txnstore_postgresql_url) as store:
        store.commits_whole = True
        run_all(store, commit_function.drop_functions("txnstore"))
        world = World(store, ["payments"], store.write(lambda connection: create_topic(connection, "sales")))
        store.clock = worlds.clock
        world.start("payments")
        known: list[bool] = []
        for _ in range(2):
            known.append(store.has_commit_function)
            world.commit("payments", [(0, 0, 1)], 0, [], 0)
            known.append(store.has_commit_function)
            let_a_minute_pass(store)
        assert known == [True, False, True, False]
        told = [record for record in caplog.records if vars(record).get("event") == "commit_function_missing"]
        assert [vars(record)["store"] for record in told] == [str(store.url)]
        run_all(store, commit_function.create_functions("txnstore"))
        found: list[list[int] | None] = []
        with noted_places(store, found):
            world.commit("payments", [(0, 0, 1)], 0, [], 0)
        assert found == [[6]]
        assert store.has_commit_function
        assert_sound(store, at_rest=True)


def test_a_role_that_may_not_call_the_function_commits_by_statements(
    txnstore_postgresql_url, txnstore_postgres_server, worlds: Worlds
) -> None:
    role, database = "txnstore_test_not_at_once", make_url(txnstore_postgresql_url).database
    with open_store(txnstore_postgresql_url) as owner:
        topic = owner.write(lambda connection: create_topic(connection, "sales"))
    txnstore_postgres_server.create_role(role, "secret")
    with txnstore_postgres_server.connect(database) as administrator:
        administrator.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA txnstore FROM PUBLIC")
        administrator.execute(f"GRANT USAGE ON SCHEMA txnstore TO {role}")
        administrator.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA txnstore TO {role}")
        try:
            with open_store(txnstore_postgres_server.url(database, role, "secret")) as store:
                store.commits_whole = True
                world = World(store, ["payments"], topic)
                store.clock = worlds.clock
                world.start("payments")
                world.commit("payments", [(0, 0, 1)], 0, [], 0)
                assert not store.has_commit_function
                assert_sound(store, at_rest=True)
        finally:
            administrator.execute(f"DROP OWNED BY {role}")
            txnstore_postgres_server.drop_role(role)


@pytest.mark.takes_more_rights("makes a schema")
def test_nothing_of_a_stranger_is_called_by_the_function(txnstore_postgresql_url, worlds: Worlds) -> None:
    with open_store(txnstore_postgresql_url) as store:
        store.commits_whole = True
        world = World(store, ["payments"], store.write(lambda connection: create_topic(connection, "sales")))
        store.clock = worlds.clock
        world.start("payments")
        with closing(psycopg.connect(connection_string(txnstore_postgresql_url), autocommit=True)) as stranger:
            stranger.execute("CREATE SCHEMA evil")
            stranger.execute(
                "CREATE FUNCTION evil.greatest_of_all(bigint, bigint) RETURNS boolean LANGUAGE plpgsql"
                " AS $$ BEGIN RAISE 'caught'; END $$"
            )
            for operator in ("<", "=", "<=", ">="):
                stranger.execute(
                    f"CREATE OPERATOR evil.{operator}"
                    " (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = evil.greatest_of_all)"
                )
        with open_store(f"{txnstore_postgresql_url}?options=-c%20search_path%3Devil%2Cpg_catalog") as fooled:
            fooled.commits_whole = True
            fooled.clock = worlds.clock
            world.store = fooled
            found: list[list[int] | None] = []
            with noted_places(fooled, found):
                world.commit("payments", [(0, 0, 1)], 0, [], 0)
            assert fooled.has_commit_function
        assert found == [[0]]
        assert_sound(store, at_rest=True)


def test_a_lock_that_is_not_given_is_waited_for_as_long_as_the_limits_say(txnstore_postgresql_url, worlds) -> None:
    limits = Limits(lock_timeout_ms=50, retry_timeout_ms=0)
    with open_store(txnstore_postgresql_url, limits=limits) as store:
        store.commits_whole = True
        world = World(store, ["payments"], store.write(lambda connection: create_topic(connection, "sales")))
        store.clock = worlds.clock
        world.start("payments")
        with closing(psycopg.connect(connection_string(as_owner(txnstore_postgresql_url)))) as other:
            other.execute("SELECT FROM txnstore.partition_heads FOR UPDATE")
            with pytest.raises(StoreBusy):
                world.commit("payments", [(0, 0, 1)], 0, [], 0)
            other.rollback()
        world.repeat("payments")
        assert_sound(store, at_rest=True)


def test_a_deleted_topic_is_told_by_the_general_way(worlds: Worlds, pair) -> None:
    happens(pair, "delete_topic")
    answer = happens(pair, "commit", pair[0].names[0], [(0, 0, 1)], 0, [], 0)
    assert isinstance(answer, tuple)
    assert answer[0] is UnknownTopicOrPartition
    assert worlds.places == [None]
    assert_same(pair)


def test_a_connection_that_the_server_has_ended_is_noticed_before_anything_is_sent(
    txnstore_postgresql_url, worlds
) -> None:
    with open_store(txnstore_postgresql_url) as store:
        store.commits_whole = True
        world = World(store, ["payments"], store.write(lambda connection: create_topic(connection, "sales")))
        store.clock = worlds.clock
        world.start("payments")
        with closing(psycopg.connect(connection_string(as_owner(txnstore_postgresql_url)), autocommit=True)) as other:
            other.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        world.commit("payments", [(0, 0, 1)], 0, [], 0)
        assert_sound(store, at_rest=True)


def test_the_connection_of_a_commit_serves_whoever_comes_next_and_is_closed_with_the_store(
    txnstore_postgresql_url, worlds: Worlds
) -> None:
    def session(connection: Any) -> Any:
        return connection.connection.driver_connection

    with open_store(txnstore_postgresql_url) as store:
        store.commits_whole = True
        world = World(store, ["payments"], store.write(lambda connection: create_topic(connection, "sales")))
        store.clock = worlds.clock
        world.start("payments")
        first = store.read(session)
        for _ in range(3):
            world.commit("payments", [(0, 0, 1)], 0, [], 0)
        assert store.engine.pool.checkedout() == 1  # type: ignore[attr-defined]  # a pool of SQLAlchemy's usual kind
        assert store.write(session) is store.read(session) is first
        assert store.engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # as above
        world.commit("payments", [(0, 0, 1)], 0, [], 0)
        # What is believed of the database may be wrong: all connections are made anew.
        store.engine.dispose()
        second = store.read(session)
        assert (first.closed, second.closed, second is first) == (True, False, False)
        world.commit("payments", [(0, 0, 1)], 0, [], 0)
        store.close()
        assert second.closed
