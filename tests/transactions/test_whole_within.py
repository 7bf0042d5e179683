"""Transactions that are wholly in the client, committed with rows of an application: both ways do the same.

As in `test_whole`, each history runs on two stores. Every commit is one on a connection of an application that has a
row of its own in it. On one store it is tried at once first, behind a savepoint, and on the other never: records,
offsets, answers, errors and the application's rows are the same.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError

from tests.clients.callers import ledger_of, make_ledger, open_driver
from tests.log.histories import EXAMPLES
from tests.tools.least_privilege import as_owner
from tests.transactions.test_whole import ELSEWHERE, UNUSUAL, USUAL
from tests.transactions.whole_steps import STEPS
from tests.transactions.whole_worlds import (
    World,
    Worlds,
    assert_all_are_the_same,
    assert_same,
    assert_same_rows,
    happens,
    lived_through,
)
from txnstore.db.backend import Limits
from txnstore.db.callers.connections import callers_connection
from txnstore.db.callers.enlisted import EnlistedConnection
from txnstore.db.callers.on_caller_connection import is_same_store
from txnstore.db.opening import open_store
from txnstore.db.postgresql import commit_function
from txnstore.errors import InvalidRequest, StoreBusy, TransactionPoisoned, TxnStoreError, WriteConflict
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.log.topics import create_topic
from txnstore.model import NO_PRODUCER, ProducerIdentity, Record
from txnstore.participants.branches import register_branches
from txnstore.testing.invariants import assert_sound
from txnstore.testing.manual_clock import ManualClock
from txnstore.testing.postgres_server import connection_string
from txnstore.transactions.branch_rows import RegisteredBranch
from txnstore.transactions.outcome import CommitRequest, Ended, end_within
from txnstore.transactions.whole_statements import end_whole_within
from txnstore.transactions.writers import (
    TransactionWriter,
    append_as_writer,
    begin_transaction,
    join_transaction,
    report_writer,
)


@dataclass
class Application:
    """An application on the database of one store: a table, and a connection."""

    url: str
    commits_at_once: bool
    driver: Any = None
    places: list[list[int] | None] = field(default_factory=list)
    """The base offsets that came back where it was tried at once; None: it went the general way."""

    entries: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """The numbers of the rows that are next."""

    def __post_init__(self) -> None:
        make_ledger(self.url)
        self.driver = open_driver(self.url)

    def commit(self, world: World, request: CommitRequest) -> Ended:
        """Commit a row of the application's together with the transaction; after an error nothing of it is there."""
        taken = self.begin(world)
        try:
            return self.end(taken, request)
        except TxnStoreError:
            taken.roll_back()
            raise

    def begin(self, world: World) -> EnlistedConnection:
        """Begin a database transaction with a row of the application's."""
        callers = callers_connection(self.driver)
        assert is_same_store(world.store, callers)
        self.driver.execute(f"INSERT INTO ledger VALUES ('{world.topic.name} {next(self.entries)}')")
        taken = EnlistedConnection(world.store, callers, AssertionError)
        taken.take()
        return taken

    def end(self, taken: EnlistedConnection, request: CommitRequest) -> Ended:
        """Commit."""

        def at_once(connection: Any, commit_whole: Any) -> Ended | None:
            ended = end_whole_within(connection, request, commit_whole)
            self.places.append(None if ended is None else [place.base_offset for place in ended.appended])
            return ended

        def last(connection: Any) -> Ended:
            return end_within(connection, request)

        if self.commits_at_once:
            return taken.commit(last, at_once=at_once, timeout_seconds=30)
        return taken.commit(last, timeout_seconds=30)


@dataclass
class WorldWithRows(World):
    """A store whose commits are those of an application."""

    application: Application = field(kw_only=True)

    def _end(self, name: str, *, is_repeated: bool = False, open_group_id: str | None = None) -> object:
        producer, appends, offsets = self.last[name]
        ended = self.application.commit(self, CommitRequest(name, producer, appends, offsets))
        self.producers[name] = ended.identity
        return ended


@dataclass
class WorldsWithRows(Worlds):
    """Two worlds with an application each."""

    applications: tuple[Application, ...] = ()

    def new_pair(self) -> tuple[World, World]:
        for application in self.applications:
            application.entries = itertools.count(1)
        one, other = (
            WorldWithRows(world.store, world.names, world.topic, application=application)
            for world, application in zip(super().new_pair(), self.applications, strict=True)
        )
        return one, other


@pytest.fixture(scope="module", params=["postgresql", "sqlite"])
def worlds(request, tmp_path_factory) -> Iterator[WorldsWithRows]:
    with contextlib.ExitStack() as stack:
        clock, urls = ManualClock(), []
        for name in "txnstore_within", "txnstore_general_within":
            if request.param == "sqlite":
                urls.append(f"sqlite:///{tmp_path_factory.mktemp(name)}/store.db")
            else:
                urls.append(stack.enter_context(request.getfixturevalue("lent_postgresql")()))
        at_once, general = (stack.enter_context(open_store(url, clock=clock)) for url in urls)
        applications = Application(urls[0], True), Application(urls[1], False)
        for application in applications:
            stack.enter_context(closing(application.driver))
        # What is no commit takes the general way in both: their own functions are compared by `test_whole`.
        general.commits_whole = at_once.commits_whole = False
        found = WorldsWithRows(clock, at_once, general, applications=applications)
        found.places = applications[0].places
        yield found
        assert_all_are_the_same(found)


def assert_rows_and_records_are_the_same(worlds: WorldsWithRows, pair: tuple[World, World]) -> None:
    assert_same(pair)
    assert_rows_are_the_same(worlds, pair)


def assert_rows_are_the_same(worlds: WorldsWithRows, pair: tuple[World, World]) -> None:
    one, other = (rows_of(application, pair[0]) for application in worlds.applications)
    assert one == other


def rows_of(application: Application, world: World) -> list[str]:
    """Return the application's rows that were written beside records of the world's topic."""
    return [entry for entry in ledger_of(application.url) if entry.startswith(f"{world.topic.name} ")]


@pytest.mark.slow
@pytest.mark.slow_on_postgresql
@pytest.mark.campaign
@settings(max_examples=EXAMPLES)
@given(steps=st.lists(STEPS, min_size=1, max_size=12))
def test_both_ways_answer_the_same_and_write_the_same_rows(
    worlds: WorldsWithRows, steps: list[tuple[Any, ...]]
) -> None:
    assert_rows_and_records_are_the_same(worlds, lived_through(worlds, steps))


@pytest.fixture
def pair(worlds: WorldsWithRows) -> tuple[World, World]:
    """Two worlds with a producer that has started."""
    pair = worlds.new_pair()
    happens(pair, "give_members")
    happens(pair, "start", pair[0].names[0])
    worlds.places.clear()
    return pair


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("cells", "committers"), USUAL)
def test_what_is_usual_is_committed_at_once(worlds: WorldsWithRows, pair, cells, committers) -> None:
    name = pair[0].names[0]
    for _ in range(3):
        happens(pair, "commit", name, cells, 0, committers, 0)
        worlds.clock.advance(1_234_567)
    assert len(worlds.places) == 3
    assert None not in worlds.places
    assert_rows_and_records_are_the_same(worlds, pair)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("steps", "cells"), UNUSUAL)
def test_what_is_unusual_goes_the_general_way_and_keeps_the_applications_row(
    worlds: WorldsWithRows, pair, steps, cells
) -> None:
    name = pair[0].names[0]
    try:
        for step, *arguments in steps:
            happens(pair, step, *([] if step == "configure" else [name]), *arguments)
        worlds.places.clear()
        happens(pair, "commit", name, cells, 0, [], 0)
        assert worlds.places == [None]
        assert_same_rows(pair[0].rows(), pair[1].rows())
        assert_rows_are_the_same(worlds, pair)
    finally:
        happens(pair, "forget", name)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("cells", "committers"), ELSEWHERE)
def test_an_old_epoch_commits_nothing(worlds: WorldsWithRows, pair, cells, committers) -> None:
    name = pair[0].names[0]
    happens(pair, "commit", name, [(0, 0, 1)], 0, [], 0)
    for started in range(2):
        happens(pair, "commit", name, cells, 0, committers, 1)
        assert worlds.places[-1] is None
        if not started:
            happens(pair, "start", name)
    assert rows_of(worlds.applications[0], pair[0]) == [f"{pair[0].topic.name} 1"]
    assert_rows_and_records_are_the_same(worlds, pair)


def test_what_was_begun_of_an_unusual_transaction_is_undone_alone(worlds: WorldsWithRows, pair) -> None:
    """A group that nobody has used yet shows last: behind the locks and the rows of all partitions."""
    name = pair[0].names[0]
    for _ in range(2):
        happens(pair, "commit", name, [(0, 0, 1), (1, 0, 2)], 0, [(-1, [0], None)], 0)
    is_sqlite = worlds.at_once.backend.name == "sqlite"
    # The statements make the group; the function leaves that to the general way.
    assert worlds.places == [[0, 0] if is_sqlite else None, [3, 4]]
    assert_rows_and_records_are_the_same(worlds, pair)


# --- the database transaction ---------------------------------------------------------------------------------------


def request_of(world: WorldWithRows, committers: Any = ()) -> CommitRequest:
    name = world.names[0]
    producer = world.producers.get(name, NO_PRODUCER)
    return CommitRequest(name, producer, world.batches(producer, [(0, 0, 1)], 0), world.offsets(committers))


def test_a_lock_that_is_not_given_is_waited_for_as_long_as_the_limits_say(txnstore_postgresql_url) -> None:
    limits = Limits(lock_timeout_ms=50, retry_timeout_ms=0)
    with open_store(txnstore_postgresql_url, limits=limits) as store:
        world = started(store, txnstore_postgresql_url)
        with closing(psycopg.connect(connection_string(as_owner(txnstore_postgresql_url)))) as other:
            other.execute("SELECT FROM txnstore.partition_heads FOR UPDATE")
            with pytest.raises(StoreBusy):
                world.application.commit(world, request_of(world))
            other.rollback()
        assert world.application.places == []
        world.application.commit(world, request_of(world))
        assert world.application.places == [[0]]
        world.application.driver.close()
        assert_sound(store, at_rest=True)


def started(store: Any, url: str) -> WorldWithRows:
    """Return a world with a producer that has started, and an application that commits at once."""
    store.clock = ManualClock()
    topic = store.write(lambda connection: create_topic(connection, "sales"))
    world = WorldWithRows(store, ["payments"], topic, application=Application(url, True))
    world.start("payments")
    return world


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
def test_nothing_is_committed_in_another_database_transaction(url, ending) -> None:
    with open_store(url) as store:
        world = started(store, url)
        taken = world.application.begin(world)
        with closing(world.application.driver) as driver:
            driver.execute(ending)
            driver.execute("BEGIN IMMEDIATE" if url.startswith("sqlite") else "BEGIN")
            driver.execute("INSERT INTO ledger VALUES ('another one')")
            with pytest.raises(InvalidRequest, match="by its owner"):
                world.application.end(taken, request_of(world))
            taken.roll_back()
        assert ledger_of(url) == (["sales 1"] if ending == "COMMIT" else [])
        assert world.rows()["record_batches"] == []


SETTINGS = {
    "lock_timeout": ("7s", "7s"),
    "statement_timeout": ("9s", "9s"),
    "transaction_timeout": ("0", "0"),
    "search_path": ("elsewhere", "elsewhere"),
    "synchronous_commit": ("off", "on"),
}


def test_the_callers_settings_are_left_as_they_are(txnstore_postgresql_url, monkeypatch) -> None:
    """But for the commit, which is as lasting as the producer's own ones."""
    with open_store(txnstore_postgresql_url) as store:
        world = started(store, txnstore_postgresql_url)
        driver = world.application.driver
        names = [name for name in SETTINGS if name != "transaction_timeout" or driver.info.server_version >= 170_000]
        for name in names:
            driver.execute(f"SET {name} = '{SETTINGS[name][0]}'")
        driver.execute("SET search_path = elsewhere, public")
        driver.commit()
        found = {}
        send = EnlistedConnection._send_commit

        def look(taken: EnlistedConnection, *arguments: Any) -> None:
            found.update({name: driver.execute(f"SHOW {name}").fetchone()[0] for name in names})
            send(taken, *arguments)

        monkeypatch.setattr(EnlistedConnection, "_send_commit", look)
        world.application.commit(world, request_of(world))
        assert world.application.places == [[0]]
        assert found == {name: SETTINGS[name][1] for name in names} | {"search_path": "elsewhere, public"}
        assert driver.execute("SHOW synchronous_commit").fetchone() == ("off",)
        driver.close()


def test_a_failed_statement_that_nobody_told_of_is_noticed_before_the_commit(txnstore_postgresql_url) -> None:
    """PostgreSQL answers such a COMMIT without an error, and rolls back."""
    with open_store(txnstore_postgresql_url) as store:
        world = started(store, txnstore_postgresql_url)
        taken = world.application.begin(world)

        def last(connection: Any) -> None:
            with contextlib.suppress(DBAPIError):
                connection.exec_driver_sql("SELECT 1 / 0")

        with pytest.raises(TransactionPoisoned):
            taken.commit(last, timeout_seconds=1)
        assert not taken.is_committed
        assert not taken.outcome_unknown
        taken.let_go()
        world.application.driver.close()


def test_a_repeatable_read_goes_the_general_way(txnstore_postgresql_url) -> None:
    with open_store(txnstore_postgresql_url) as store:
        world = started(store, txnstore_postgresql_url)
        world.application.driver.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        world.application.commit(world, request_of(world))
        assert world.application.places == [None]
        world.application.driver.close()
        assert_sound(store, at_rest=True)


def write_as(world: WorldWithRows, writer: TransactionWriter) -> None:
    batch = encode([Record(b"a writer's")], producer=writer.identity, base_sequence=0, is_transactional=True)
    append_as_writer(world.store, writer, [Append(world.topic.partition_ids[0], batch)])


def register_a_branch(world: WorldWithRows, writer: TransactionWriter) -> None:
    branch = RegisteredBranch("gid", "payments", writer.transaction, "elsewhere:5432/bank", "7:1", "7")
    work = partial(register_branches, "payments", writer.transaction, [branch], [])
    world.store.write(work)


#: What changes who takes part in the open transaction of a producer, one writer of which was there before.
CHANGES = {
    "joins": lambda world, writer: join_transaction(world.store, "payments", writer.transaction),
    "writes": write_as,
    "reports": lambda world, writer: report_writer(world.store, writer),
    "is to vote": register_a_branch,
}


def test_a_snapshot_that_does_not_know_who_takes_part_by_now_commits_nothing(txnstore_postgresql_url) -> None:
    """What it has not seen would stay open for ever, or end otherwise than the transaction."""
    with open_store(txnstore_postgresql_url) as store:
        world = started(store, txnstore_postgresql_url)
        driver = world.application.driver
        for change in CHANGES.values():
            producer = world.producers["payments"]
            begin_transaction(store, "payments", producer)
            writer = join_transaction(store, "payments", producer)
            driver.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            taken = world.application.begin(world)
            change(world, writer)
            with pytest.raises(WriteConflict):
                world.application.end(taken, CommitRequest("payments", producer))
            taken.roll_back()
            driver.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            ended = world.application.commit(world, CommitRequest("payments", producer))
            world.producers["payments"] = ended.identity
        store.write(lambda connection: connection.exec_driver_sql("DELETE FROM txnstore.transaction_branches"))
        assert_sound(store, at_rest=True)
        driver.close()


@pytest.mark.slow
def test_a_store_without_the_function_takes_the_general_way(txnstore_postgresql_url) -> None:
    with open_store(txnstore_postgresql_url) as store:
        world = started(store, txnstore_postgresql_url)
        for statement in commit_function.drop_functions("txnstore"):
            store.write(lambda connection, statement=statement: connection.exec_driver_sql(statement))
        for _ in range(2):
            world.application.commit(world, request_of(world))
            world.producers["payments"] = ProducerIdentity(
                world.producers["payments"].producer_id, world.producers["payments"].epoch + 1
            )
        assert world.application.places == [None, None]
        assert len(ledger_of(txnstore_postgresql_url)) == 2
        world.application.driver.close()
        assert_sound(store, at_rest=True)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("which", ["commit_transaction", "commit_transaction_within"])
def test_a_role_that_may_not_call_a_function_takes_the_general_way(
    txnstore_postgresql_url, txnstore_postgres_server, which
) -> None:
    role, database = "txnstore_test_not_within", make_url(txnstore_postgresql_url).database
    with open_store(txnstore_postgresql_url) as store:
        world = started(store, txnstore_postgresql_url)
        world.application.driver.close()
        txnstore_postgres_server.create_role(role, "secret")
        with txnstore_postgres_server.connect(database) as administrator:
            (signature,) = administrator.execute(
                "SELECT oid::regprocedure::text FROM pg_proc WHERE proname = %s", (which,)
            ).fetchone()
            administrator.execute(f"REVOKE EXECUTE ON FUNCTION {signature} FROM PUBLIC")
            administrator.execute(f"GRANT USAGE ON SCHEMA txnstore TO {role}")
            administrator.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA txnstore TO {role}")
            administrator.execute(f"GRANT ALL ON ledger TO {role}")
            try:
                url = txnstore_postgres_server.url(database, role, "secret")
                world.application.driver = open_driver(url)
                world.application.commit(world, request_of(world))
                world.application.driver.close()
                assert world.application.places == [None]
                assert_sound(store, at_rest=True)
            finally:
                administrator.execute(f"DROP OWNED BY {role}")
                txnstore_postgres_server.drop_role(role)


@pytest.mark.takes_more_rights("makes a role, and becomes it")
def test_a_role_that_changes_is_asked_anew_what_it_may_call(txnstore_postgresql_url, txnstore_postgres_server) -> None:
    role = "txnstore_test_changes"
    with open_store(txnstore_postgresql_url) as store:
        world = started(store, txnstore_postgresql_url)
        driver = world.application.driver
        world.application.commit(world, request_of(world))
        txnstore_postgres_server.create_role(role, "secret")
        try:
            driver.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA txnstore FROM PUBLIC")
            driver.execute(f"GRANT USAGE ON SCHEMA txnstore TO {role}")
            driver.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA txnstore TO {role}")
            driver.execute(f"GRANT ALL ON ledger TO {role}")
            driver.execute(f"SET ROLE {role}")
            driver.commit()
            world.producers["payments"] = ProducerIdentity(
                world.producers["payments"].producer_id, world.producers["payments"].epoch + 1
            )
            with pytest.raises(TxnStoreError):
                world.application.commit(world, request_of(world))
            world.application.commit(world, request_of(world))
            assert world.application.places == [[0], None]
            assert_sound(store, at_rest=True)
        finally:
            driver.execute("RESET ROLE")
            driver.execute(f"DROP OWNED BY {role}")
            driver.commit()
            driver.close()
            txnstore_postgres_server.drop_role(role)


def test_a_value_that_the_function_cannot_take_goes_the_general_way(txnstore_postgresql_url, monkeypatch) -> None:
    def refuse(*_: object) -> list[bytes]:
        raise ValueError

    with open_store(txnstore_postgresql_url) as store:
        world = started(store, txnstore_postgresql_url)
        monkeypatch.setattr(commit_function, "arguments_within", refuse)
        with closing(world.application.driver):
            world.application.commit(world, request_of(world))
        assert world.application.places == [None]
