"""producer.enlist(connection) of other databases: one `with` block over the log and two PostgreSQL databases."""

from __future__ import annotations

import contextlib
import threading
import time

import psycopg
import pytest
from sqlalchemy import BigInteger, Text, create_engine, delete, event, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from tests.participants.bank import Table
from tests.participants.enlisting import *  # noqa: F403 - the fixtures
from tests.participants.enlisting import (
    TIMEOUT,
    assert_everywhere,
    assert_nowhere,
    move,
    records,
    topic_of,
    transfer,
)
from txnstore import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.opening import open_store
from txnstore.db.schema import transaction_branches
from txnstore.errors import BranchEndedOtherwise, BranchUnfinished
from txnstore.participants.branches import Branches
from txnstore.participants.recovery import recover_branches
from txnstore.transactions.branch_rows import all_branches
from txnstore.transactions.recovery import abort_by_administrator


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"
    name: Mapped[str] = mapped_column(Text, primary_key=True)
    balance: Mapped[int] = mapped_column(BigInteger)


@pytest.fixture
def engines(tables):
    engines = [create_engine(table.url) for table in tables]
    yield engines
    for engine in engines:
        engine.dispose()


def test_one_block_over_two_databases(url, producer, drivers, tables, name):
    with producer.transaction():
        for driver, amount in zip(drivers, (-1, 1), strict=True):
            producer.enlist(driver)
            move(driver, name, amount)
        producer.produce(topic_of(producer), name)
        assert [table.balances() for table in tables] == [{}, {}]
    assert_everywhere(tables, name)
    assert records(url, topic_of(producer)) == [name]


def test_a_connection_that_another_producer_has_enlisted_is_refused(url, producer, engines, tables, name):
    other = Producer({"bootstrap.servers": url, "transactional.id": f"{name} other"})
    other.init_transactions(TIMEOUT)
    with engines[0].connect() as connection, contextlib.closing(other):
        with producer.transaction():
            producer.enlist(connection)
            connection.execute(text("INSERT INTO account VALUES (:name, 1)"), {"name": name})
            producer.produce(topic_of(producer), name)
            other.begin_transaction()
            with pytest.raises(KafkaException, match="another producer"):
                other.enlist(connection)
        assert (tables[0].balances(), records(url, topic_of(producer))) == ({name: 1}, [name])
        # It is free again.
        other.enlist(connection)
        connection.execute(text("DELETE FROM account"))
        other.commit_transaction(TIMEOUT)
    assert_nowhere(tables)


@pytest.mark.slow
def test_a_consumer_s_offsets_are_not_locked_by_a_database_that_votes(producer, other_server, name):
    """The group's row would be locked until the transaction is decided, and nobody could join or leave the group."""
    other_server.create_database(name)
    log = Table(other_server.url(name))
    with Producer({"bootstrap.servers": log.url}) as seed:
        seed.produce("consumed", b"1", partition=0)
        assert seed.flush(TIMEOUT) == 0
    consumer = Consumer({"bootstrap.servers": log.url, "group.id": name, "enable.auto.commit": False})
    offsets = [TopicPartition("consumed", 0, 1)]
    with contextlib.closing(consumer), contextlib.closing(log.connect()) as connection:
        producer.begin_transaction()
        producer.enlist(connection)
        with pytest.raises(KafkaException, match="send_offsets_to_transaction") as caught:
            consumer.commit(offsets=offsets, connection=connection)
        assert caught.value.args[0].code() == KafkaError.INVALID_REQUEST
        producer.commit_transaction(TIMEOUT)
        # It is its owner's again.
        consumer.commit(offsets=offsets, connection=connection)
        connection.commit()
        assert consumer.committed(offsets, TIMEOUT)[0].offset == 1


@pytest.mark.slow
def test_a_connection_on_which_offsets_were_committed_does_not_vote_before_they_stand(producer, other_server, name):
    other_server.create_database(name)
    log = Table(other_server.url(name))
    with Producer({"bootstrap.servers": log.url}) as seed:
        seed.produce("consumed", b"1", partition=0)
        assert seed.flush(TIMEOUT) == 0
    consumer = Consumer({"bootstrap.servers": log.url, "group.id": name, "enable.auto.commit": False})
    offsets = [TopicPartition("consumed", 0, 1)]
    with contextlib.closing(consumer), contextlib.closing(log.connect()) as connection:
        for end in (connection.rollback, connection.commit):
            consumer.commit(offsets=offsets, connection=connection)
            producer.begin_transaction()
            with pytest.raises(KafkaException, match="send_offsets_to_transaction") as caught:
                producer.enlist(connection)
            assert caught.value.args[0].code() == KafkaError.INVALID_REQUEST
            end()
            producer.enlist(connection)
            producer.commit_transaction(TIMEOUT)
        assert consumer.committed(offsets, TIMEOUT)[0].offset == 1


def test_an_exception_in_the_block_leaves_nothing(producer, drivers, tables, name):

    def fail_within():
        with producer.transaction():
            for driver in drivers:
                producer.enlist(driver)
                move(driver, name, 1)
            producer.produce(topic_of(producer), name)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_within()
    assert_nowhere(tables)
    # Connections and producer go on.
    with producer.transaction():
        producer.enlist(drivers[0])
        move(drivers[0], "later", 1)
    assert tables[0].balances() == {"later": 1}


def test_databases_without_records_commit_together_as_well(producer, drivers, tables, name):
    transfer_without = zip(drivers, (-1, 1), strict=True)
    with producer.transaction():
        for driver, amount in transfer_without:
            producer.enlist(driver)
            move(driver, name, amount)
    assert_everywhere(tables, name)


def test_many_transactions_in_a_row_over_the_same_connections(url, producer, drivers, tables, name):
    for number in range(5):
        transfer(producer, drivers, f"number {number}")
        if number % 2:
            producer.abort_transaction(TIMEOUT)
        else:
            producer.commit_transaction(TIMEOUT)
    assert [sorted(table.balances()) for table in tables] == [["number 0", "number 2", "number 4"]] * 2
    assert records(url, topic_of(producer)) == ["number 0", "number 2", "number 4"]
    producer.close()
    with open_store(url) as store:
        assert [row for row in store.read(all_branches) if row.transactional_id == name] == []


def test_sqlalchemy_connections_and_sessions_take_part(producer, engines, tables, name):
    with engines[0].connect() as connection, Session(engines[1]) as session:
        with producer.transaction():
            producer.enlist(connection)
            producer.enlist(session)
            connection.execute(text("INSERT INTO account VALUES (:name, -1)"), {"name": name})
            # Not flushed: the commit does it.
            session.add(Account(name=name, balance=1))
        assert not connection.in_transaction()
        assert not session.in_transaction()
        assert_everywhere(tables, name)
        # They are their owners' again.
        connection.execute(text("DELETE FROM account"))
        connection.commit()
        session.execute(text("DELETE FROM account"))
        session.rollback()
    assert [table.balances() for table in tables] == [{}, {name: 1}]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("end", ["commit", "abort"])
@pytest.mark.parametrize("join", ["within", "around"])
def test_a_session_with_a_savepoint_is_its_owners_again_afterwards(producer, engines, tables, name, join, end):
    """Nothing of it can be released or rolled back to once the database transaction is prepared."""
    with (
        engines[0].connect() as connection,
        Session(connection, join_transaction_mode="create_savepoint")
        if join == "around"
        else Session(engines[0]) as session,
    ):
        if join == "around":
            connection.begin()
        producer.begin_transaction()
        producer.enlist(session)
        session.begin_nested()
        session.add(Account(name=name, balance=1))
        if end == "commit":
            producer.commit_transaction(TIMEOUT)
        else:
            producer.abort_transaction(TIMEOUT)
        session.add(Account(name="later", balance=2))
        session.commit()
        if join == "around":
            connection.commit()
    assert tables[0].balances() == ({name: 1} if end == "commit" else {}) | {"later": 2}
    assert tables[0].gids() == tables[0].foreign_gids


def test_a_two_phase_transaction_is_its_own_coordinators(producer, engines, drivers, tables, name):
    with Session(engines[0], twophase=True) as session, engines[1].connect() as connection, producer.transaction():
        connection.begin_twophase()
        for given in (session, connection):
            with pytest.raises(KafkaException, match="two-phase"):
                producer.enlist(given)
        producer.enlist(drivers[1])
        move(drivers[1], name, 1)
    assert [table.balances() for table in tables] == [{}, {name: 1}]


def test_hooks_of_the_session_are_called_once_it_is_committed(producer, engines, tables, name):
    seen = []
    with Session(engines[0]) as session:
        event.listen(session, "after_commit", lambda _: seen.append(tables[0].balances()))
        with producer.transaction():
            producer.enlist(session)
            session.add(Account(name=name, balance=1))
    assert seen == [{name: 1}]


def test_hooks_before_the_commit_are_called_once_and_before_the_vote(url, producer, engines, tables, name):
    """What they write and produce is part of it."""
    seen = []

    def write(session):
        session.add(Account(name=f"{name} audited", balance=0))
        producer.produce(topic_of(producer), "of the hook")
        seen.append([table.balances() for table in tables])

    with Session(engines[0]) as session:
        event.listen(session, "before_commit", write)
        event.listen(session, "after_commit", lambda _: seen.append(tables[0].balances()))
        with producer.transaction():
            producer.enlist(session)
            session.add(Account(name=name, balance=1))
    assert seen == [[{}, {}], {name: 1, f"{name} audited": 0}]
    assert records(url, topic_of(producer)) == ["of the hook"]


def test_a_session_is_one_branch_or_none(url, producer, engines, tables, name):
    with Session(engines[0]) as session:
        producer.begin_transaction()
        with pytest.raises(KafkaException, match="enlist the session itself"):
            producer.enlist(session.connection())
        producer.enlist(session)
        session.add(Account(name=name, balance=-1))
        session.execute(
            text("INSERT INTO account VALUES (:name, 1)"), {"name": name}, bind_arguments={"bind": engines[1]}
        )
        producer.produce(topic_of(producer), name)
        with pytest.raises(KafkaException, match=r"several connections \(binds\)"):
            producer.commit_transaction(TIMEOUT)
        producer.abort_transaction(TIMEOUT)
        session.rollback()
    assert_nowhere(tables)
    assert records(url, topic_of(producer)) == []


def test_a_hook_that_refuses_the_commit_leaves_nothing(url, producer, drivers, engines, tables, name):
    def refuse(_):
        raise ValueError("not valid")

    with Session(engines[0]) as session:
        event.listen(session, "before_commit", refuse)
        producer.begin_transaction()
        producer.enlist(session)
        producer.enlist(drivers[1])
        session.add(Account(name=name, balance=1))
        move(drivers[1], name, 1)
        producer.produce(topic_of(producer), name)
        with pytest.raises(KafkaException, match=r"flushing .* \(ValueError\); nothing was committed") as caught:
            producer.commit_transaction(TIMEOUT)
        assert isinstance(caught.value.__cause__, ValueError)
        assert caught.value.args[0].txn_requires_abort()
        producer.abort_transaction(TIMEOUT)
        assert not session.in_transaction()
    assert_nowhere(tables)
    assert records(url, topic_of(producer)) == []


def test_a_hook_that_raises_keeps_no_other_connection_from_its_owner(producer, engines, tables, name):
    def fail(_):
        raise ZeroDivisionError

    with Session(engines[0]) as session, engines[1].connect() as connection:
        event.listen(session, "after_commit", fail)
        producer.begin_transaction()
        producer.enlist(session)
        session.add(Account(name=name, balance=-1))
        producer.enlist(connection)
        connection.execute(text("INSERT INTO account VALUES (:name, 1)"), {"name": name})
        with pytest.raises(ZeroDivisionError):
            producer.commit_transaction(TIMEOUT)
        event.remove(session, "after_commit", fail)
        assert_everywhere(tables, name)
        assert not connection.in_transaction()
        connection.execute(text("DELETE FROM account"))
        connection.commit()
    assert [table.balances() for table in tables] == [{name: -1}, {}]


def test_what_a_session_cannot_write_aborts_it_all(producer, engines, drivers, tables, name):

    def write_nothing(session):
        with producer.transaction():
            producer.enlist(drivers[0])
            move(drivers[0], name, 1)
            producer.enlist(session)
            session.add_all([Account(name=name, balance=None)])

    with Session(engines[1]) as session, pytest.raises(KafkaException, match="IntegrityError"):
        write_nothing(session)
    assert_nowhere(tables)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_endings_of_the_owner_are_refused_within_and_not_afterwards(producer, drivers, engines, tables, name, ending):
    with engines[1].connect() as connection, producer.transaction():
        producer.enlist(drivers[0])
        producer.enlist(connection)
        for mine in (drivers[0], connection):
            with pytest.raises(KafkaException, match=f"{ending}.*refused"):
                getattr(mine, ending)()
        move(drivers[0], name, -1)
        connection.execute(text("INSERT INTO account VALUES (:name, 1)"), {"name": name})
    assert_everywhere(tables, name)
    getattr(drivers[0], ending)()


def test_a_block_of_psycopgs_that_ends_within_is_refused(producer, drivers, tables, name):
    with pytest.raises(KafkaException, match="belongs around"), drivers[0].transaction():
        transfer(producer, drivers, name)
    producer.abort_transaction(TIMEOUT)
    assert_nowhere(tables)


def test_a_commit_in_sql_aborts_the_rest(producer, drivers, tables, name):

    def commit_within():
        with producer.transaction():
            for driver in drivers:
                producer.enlist(driver)
                move(driver, name, 1)
            drivers[0].execute("COMMIT")

    with pytest.raises(KafkaException, match="by its owner") as raised:
        commit_within()
    assert raised.value.args[0].txn_requires_abort()
    assert [table.balances() for table in tables] == [{name: 1}, {}]


def test_a_connection_that_its_owner_gave_back_is_left_alone_and_the_rest_aborted(producer, engines, drivers, tables):
    engine = create_engine(tables[1].url, pool_size=1, max_overflow=0)
    strangers = []

    def give_back_within():
        with producer.transaction():
            producer.enlist(drivers[0])
            move(drivers[0], "a", 1)
            with engine.connect() as connection:
                producer.enlist(connection)
                connection.execute(text("INSERT INTO account VALUES ('b', 1)"))
            strangers.append(engine.connect())
            strangers[0].execute(text("INSERT INTO account VALUES ('stranger', 1)"))

    try:
        with pytest.raises(KafkaException, match="by its owner"):
            give_back_within()
        strangers[0].commit()
        strangers[0].close()
    finally:
        engine.dispose()
    assert [table.balances() for table in tables] == [{}, {"stranger": 1}]


def test_a_database_that_votes_against_it_aborts_it_all(url, producer, drivers, tables, name):
    transfer(producer, drivers, name)
    drivers[1].execute("NOTIFY somebody")
    with pytest.raises(KafkaException, match=r"savings.*NOTIFY.*outbox") as raised:
        producer.commit_transaction(TIMEOUT)
    assert raised.value.args[0].txn_requires_abort()
    producer.abort_transaction(TIMEOUT)
    assert_nowhere(tables)
    transfer(producer, drivers, "again")
    producer.commit_transaction(TIMEOUT)
    assert_everywhere(tables, "again")
    assert records(url, topic_of(producer)) == ["again"]


def test_an_aborted_transaction_cannot_be_committed_and_leaves_nothing(url, producer, drivers, tables, name):
    transfer(producer, drivers, name)
    producer.flush(TIMEOUT)
    with open_store(url) as store:
        assert abort_by_administrator(store, producer._transactions.transactional_id)
    with pytest.raises(KafkaException) as raised:
        producer.commit_transaction(TIMEOUT)
    assert raised.value.args[0].txn_requires_abort()
    producer.abort_transaction(TIMEOUT)
    assert_nowhere(tables)


def test_a_newer_producer_fences_and_nothing_is_left(url, producer, drivers, tables, name):
    transfer(producer, drivers, name)
    producer.flush(TIMEOUT)
    newer = Producer({"bootstrap.servers": url, "transactional.id": producer._transactions.transactional_id})
    newer.init_transactions(TIMEOUT)
    with pytest.raises(KafkaException) as raised:
        producer.commit_transaction(TIMEOUT)
    assert raised.value.args[0].fatal()
    assert_nowhere(tables)
    for driver in drivers:
        driver.rollback()
        driver.execute("SELECT 1")
    newer.close()


def test_a_producer_that_is_closed_rolls_back(producer, drivers, tables, name):
    transfer(producer, drivers, name)
    producer.close()
    assert_nowhere(tables)
    assert all(driver.info.transaction_status == psycopg.pq.TransactionStatus.IDLE for driver in drivers)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_who_ends_a_prepared_branch_the_other_way_is_told_of_and_the_producer_goes_on(
    producer, drivers, tables, name, monkeypatch, end
):
    real = Branches.finish if end == "commit" else Branches.settle

    def finish_after_the_administrator(branches, **options):
        for gid in tables[1].our_gids():
            tables[1].watching.execute(f"ROLLBACK PREPARED '{gid}'")
        real(branches, **options)

    transfer(producer, drivers, name)
    with monkeypatch.context() as patch:
        patch.setattr(Branches, real.__name__, finish_after_the_administrator)
        if end == "commit":
            with pytest.raises(KafkaException, match=r"/savings somebody else has ended") as raised:
                producer.commit_transaction(TIMEOUT)
            error: KafkaError = raised.value.args[0]
            assert (error.code(), error.retriable(), error.fatal()) == (KafkaError._INCONSISTENT, False, False)
            # Nor does a second try make it whole.
            with pytest.raises(KafkaException, match="not valid in state"):
                producer.commit_transaction(TIMEOUT)
        else:
            # As was decided: nobody need be told.
            producer.abort_transaction(TIMEOUT)
    assert [table.balances() for table in tables] == [{name: -1} if end == "commit" else {}, {}]
    with producer.transaction():
        for driver in drivers:
            producer.enlist(driver)
            move(driver, "later", 1)
    assert [table.balances().get("later") for table in tables] == [1, 1]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("end", ["commit_transaction", "abort_transaction"])
def test_a_callback_that_raises_leaves_no_branch_behind(producer, drivers, tables, name, end):
    def fail(*_):
        raise ZeroDivisionError

    producer.begin_transaction()
    for driver, amount in zip(drivers, (-1, 1), strict=True):
        producer.enlist(driver)
        move(driver, name, amount)
    producer.produce(topic_of(producer), name, on_delivery=fail)
    with pytest.raises(ZeroDivisionError):
        getattr(producer, end)(TIMEOUT)
    if end == "commit_transaction":
        assert_everywhere(tables, name)
    else:
        assert_nowhere(tables)
    # The next transaction begins with none of the last one's connections.
    transfer(producer, drivers, "next")
    producer.commit_transaction(TIMEOUT)
    assert [table.balances()["next"] for table in tables] == [-1, 1]


def recover_own(store, tables, producer):
    """Recover all branches; the store is shared, and other tests leave some that were ended by hand."""
    own = producer._transactions.transactional_id
    for table in tables:
        for error in recover_branches(store, table.url).failed:
            assert isinstance(error, BranchEndedOtherwise)
            assert own not in str(error)


def test_closing_in_another_thread_leaves_a_commit_its_branches(url, producer, drivers, tables, name, monkeypatch):
    """Without their votes the log would decide alone."""
    transactions, finished = producer._transactions, threading.Event()
    closer = threading.Thread(target=producer.close)
    prepare, finish = Branches.prepare, transactions.finish

    def finish_and_tell(timeout_seconds):
        try:
            finish(timeout_seconds)
        finally:
            finished.set()

    def close_and_prepare(*arguments, **options):
        closer.start()
        assert finished.wait(TIMEOUT)
        return prepare(*arguments, **options)

    monkeypatch.setattr(transactions, "finish", finish_and_tell)
    monkeypatch.setattr(Branches, "prepare", close_and_prepare)
    transfer(producer, drivers, name)
    with contextlib.suppress(RuntimeError):
        producer.commit_transaction(TIMEOUT)
    closer.join(TIMEOUT)
    with open_store(url) as store:
        recover_own(store, tables, producer)
    held = [table.balances().get(name) for table in tables]
    if records(url, topic_of(producer)) == [name]:
        assert held == [-1, 1]
    else:
        assert held == [None, None]
    for driver in drivers:
        driver.rollback()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("votes", ["for it", "against it"])
def test_closing_leaves_a_commit_in_the_background_its_branches(
    url, producer, drivers, tables, name, monkeypatch, votes
):
    """Its caller has not waited for it: without the votes the log would decide alone."""
    is_left, prepare = threading.Event(), Branches.prepare

    def prepare_late(*arguments, **options):
        assert is_left.wait(TIMEOUT)
        return prepare(*arguments, **options)

    monkeypatch.setattr(Branches, "prepare", prepare_late)
    transfer(producer, drivers, name)
    if votes == "against it":
        drivers[1].execute("NOTIFY somebody")
    try:
        for wait_at_last in (producer.commit_transaction, producer._transactions.finish):
            with pytest.raises(KafkaException, match="Timed out"):
                wait_at_last(0)
    finally:
        is_left.set()
    producer.close()
    if votes == "against it":
        for driver in drivers:
            driver.rollback()
        with open_store(url) as store:
            abort_by_administrator(store, producer._transactions.transactional_id)
            recover_own(store, tables, producer)
        assert_nowhere(tables)
        assert records(url, topic_of(producer)) == []
        return
    assert_everywhere(tables, name)
    assert records(url, topic_of(producer)) == [name]


def error_once_decided(producer) -> KafkaError:
    """Return the error of a commit that stands; on a slow machine the time may be over before it does."""
    deadline = time.monotonic() + 60
    while True:
        with pytest.raises(KafkaException) as raised:
            producer.commit_transaction(0.5)
        error: KafkaError = raised.value.args[0]
        if "decided: commit" in error.str() or time.monotonic() > deadline:
            return error


@pytest.mark.slow
def test_a_branch_that_is_away_delays_nothing_but_itself(url, producer, drivers, tables, name, monkeypatch):
    transfer(producer, drivers, name)
    branches = producer._transactions._branches._branches
    real = branches.finish

    def away(**options):
        branch = branches._branches[-1]
        branch.driver.close()
        monkeypatch.setitem(branch.address._parameters, "port", "1")
        real(**options)

    monkeypatch.setattr(branches, "finish", away)
    error = error_once_decided(producer)
    assert "savings" in str(error)
    assert error.retriable()
    assert error.code() == KafkaError._TIMED_OUT
    assert tables[0].balances() == {name: -1}
    assert records(url, topic_of(producer)) == [name]
    # Repeated, it is tried again; the next transaction need not wait for it.
    assert len(branches) == 1
    assert "decided: commit" in error_once_decided(producer).str()
    # Of writers that it was not asked for, nobody is told that they are committed.
    with pytest.raises(KafkaException, match="other writers"):
        producer.commit_transaction(TIMEOUT, writers=[1])
    monkeypatch.undo()
    other = tables[0].connect()
    with producer.transaction():
        producer.enlist(other)
        move(other, "next", 0)
    other.close()
    with open_store(url) as store:
        recover_own(store, tables[1:], producer)
    assert tables[1].balances() == {name: 1}
    assert tables[0].balances() == {name: -1, "next": 0}


def test_what_was_decided_stands_though_the_coordinator_has_lost_it(url, producer, drivers, tables, name, monkeypatch):
    """By a failover to a standby that lags, for example: what has heard of the decision ends by it."""

    def leave(*_, **__):
        raise BranchUnfinished("it is away")

    transfer(producer, drivers, name)
    with monkeypatch.context() as patch:
        patch.setattr(Branches, "finish", leave)
        with pytest.raises(KafkaException, match="it is away"):
            producer.commit_transaction(TIMEOUT)
    lose = delete(transaction_branches).where(transaction_branches.c.transactional_id == name)
    with open_store(url) as store:
        store.write(lambda connection: connection.execute(lose))
    producer.close()
    assert_everywhere(tables, name)


def test_a_commit_that_ran_out_of_time_is_taken_up_by_the_same_call(producer, drivers, tables, name):
    transfer(producer, drivers, name)
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            producer.commit_transaction(0)
        except KafkaException as error:
            if error.args[0].retriable() and time.monotonic() < deadline:
                continue
            raise
        break
    assert_everywhere(tables, name)


@pytest.mark.slow
def test_what_cannot_take_part_is_refused_at_once_and_the_transaction_goes_on(
    producer, drivers, tables, name, no_vote_server, tmp_path
):
    import sqlite3

    no_vote, of_sqlite = no_vote_server.connect(), sqlite3.connect(tmp_path / "other.db")
    autocommit = tables[0].connect(autocommit=True)
    with producer.transaction():
        with pytest.raises(KafkaException, match=r"max_prepared_transactions = 0.*outbox"):
            producer.enlist(no_vote)
        with pytest.raises(KafkaException, match="outbox"):
            producer.enlist(of_sqlite)
        with pytest.raises(KafkaException, match=r"autocommit|by itself"):
            producer.enlist(autocommit)
        with pytest.raises(TypeError):
            producer.enlist("postgresql://")
        for driver, amount in zip(drivers, (-1, 1), strict=True):
            producer.enlist(driver)
            move(driver, name, amount)
    for connection in (no_vote, of_sqlite, autocommit):
        connection.close()
    assert_everywhere(tables, name)


def test_a_producer_whose_transactions_never_time_out_takes_no_other_database_in(
    txnstore_sqlite_url, drivers, tables, name
):
    """What is prepared there would keep its locks for ever once it has died."""
    with open_store(txnstore_sqlite_url) as store:
        setting = {"transaction.two.phase.commit.enable": "true"}
        store.write(lambda connection: change_store_settings(connection, setting))
    settings = {"transactional.id": name, "transaction.two.phase.commit.enable": True}
    producer = Producer({"bootstrap.servers": txnstore_sqlite_url, **settings})
    try:
        producer.init_transactions(timeout=TIMEOUT)
        producer.begin_transaction()
        with pytest.raises(KafkaException, match=r"two\.phase.*cannot enlist.*never time out"):
            producer.enlist(drivers[0])
        # It is its owner's as before, and the transaction goes on.
        move(drivers[0], name, 1)
        drivers[0].commit()
        producer.produce(topic_of(producer), name)
        producer.commit_transaction(TIMEOUT)
    finally:
        producer.close()
    assert tables[0].balances() == {name: 1}
    assert records(txnstore_sqlite_url, topic_of(producer)) == [name]


# --- together with a connection to the log's own database -------------------------------------------------------------


def own_connection(store_url):
    connection = create_engine(store_url).connect()
    connection.execute(text("CREATE TABLE own (name text)"))
    connection.commit()
    return connection


def test_rows_beside_the_log_and_rows_elsewhere_commit_together(txnstore_postgresql_url, drivers, tables, name):
    producer = Producer({"bootstrap.servers": txnstore_postgresql_url, "transactional.id": name})
    producer.init_transactions(TIMEOUT)
    own = own_connection(txnstore_postgresql_url)
    try:
        for commit in (False, True):
            producer.begin_transaction()
            producer.enlist(own)
            own.execute(text("SET LOCAL synchronous_commit = off"))
            own.execute(text("INSERT INTO own VALUES (:name)"), {"name": name})
            for driver, amount in zip(drivers, (-1, 1), strict=True):
                producer.enlist(driver)
                move(driver, name, amount)
            producer.produce(topic_of(producer), name)
            if commit:
                producer.commit_transaction(TIMEOUT)
            else:
                producer.abort_transaction(TIMEOUT)
                assert_nowhere(tables)
        assert_everywhere(tables, name)
        assert own.execute(text("SELECT name FROM own")).scalars().all() == [name]
        own.rollback()
        assert records(txnstore_postgresql_url, topic_of(producer)) == [name]
        # One that votes against it keeps the rows beside the log out as well.
        producer.begin_transaction()
        producer.enlist(own)
        own.execute(text("INSERT INTO own VALUES ('no')"))
        producer.enlist(drivers[0])
        drivers[0].execute("NOTIFY somebody")
        producer.produce(topic_of(producer), "no")
        with pytest.raises(KafkaException, match="NOTIFY"):
            producer.commit_transaction(TIMEOUT)
        producer.abort_transaction(TIMEOUT)
        assert own.execute(text("SELECT name FROM own")).scalars().all() == [name]
        own.rollback()
    finally:
        own.close()
        own.engine.dispose()
        producer.close()


def test_a_snapshot_from_before_the_votes_decides_nothing_without_them(txnstore_postgresql_url, drivers, tables, name):
    """It does not show that there are branches, whose end would be decided as well."""
    producer = Producer({"bootstrap.servers": txnstore_postgresql_url, "transactional.id": name})
    producer.init_transactions(TIMEOUT)
    own = create_engine(txnstore_postgresql_url, isolation_level="REPEATABLE READ").connect()
    try:
        producer.begin_transaction()
        # It is open in the log before.
        producer.produce(topic_of(producer), name)
        producer.flush(TIMEOUT)
        producer.enlist(own)
        for driver, amount in zip(drivers, (-1, 1), strict=True):
            producer.enlist(driver)
            move(driver, name, amount)
        with pytest.raises(KafkaException) as raised:
            producer.commit_transaction(TIMEOUT)
        assert raised.value.args[0].txn_requires_abort()
        producer.abort_transaction(TIMEOUT)
        assert_nowhere(tables)
        assert records(txnstore_postgresql_url, topic_of(producer)) == []
    finally:
        own.close()
        own.engine.dispose()
        producer.close()


@pytest.mark.parametrize("own_first", [True, False])
def test_a_sqlite_log_takes_one_or_the_other(txnstore_sqlite_url, drivers, tables, name, own_first):
    producer = Producer({"bootstrap.servers": txnstore_sqlite_url, "transactional.id": name})
    producer.init_transactions(TIMEOUT)
    own = own_connection(txnstore_sqlite_url)
    try:
        with producer.transaction():
            first, second = (own, drivers[0]) if own_first else (drivers[0], own)
            producer.enlist(first)
            with pytest.raises(KafkaException, match=r"only write lock.*outbox"):
                producer.enlist(second)
    finally:
        own.close()
        own.engine.dispose()
        producer.close()
