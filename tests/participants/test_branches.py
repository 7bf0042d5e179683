"""The branches of a transaction as the process sees them that coordinates it: votes, decisions, ends, refusals."""

from __future__ import annotations

import selectors
import threading
import time
from contextlib import closing, nullcontext, suppress
from functools import partial

import psycopg
import pytest

from tests.clients.moments import attempt, every_interrupt, is_no_moment_for_signals
from tests.participants.bank import Bank
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.opening import open_store
from txnstore.db.postgresql import branches as postgresql_branches
from txnstore.db.postgresql import exchange as postgresql_exchange
from txnstore.db.postgresql.branches import BranchAddress, connect_participant
from txnstore.db.postgresql.exchange import AnswerKind, ServerAnswer, Statement
from txnstore.db.url import parse_url
from txnstore.errors import (
    BranchEndedOtherwise,
    BranchUnfinished,
    InvalidProducerEpoch,
    InvalidRequest,
    ProducerFenced,
    StoreUnavailable,
    TransactionAbortable,
    TxnStoreError,
)
from txnstore.participants import branches
from txnstore.participants.branch_rules import gid_prefix, new_gid
from txnstore.testing.postgres_server import connection_string
from txnstore.transactions.branch_rows import mark_missing
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.recovery import abort_by_administrator, abort_timed_out

PATIENCE_SECONDS = 60


def test_a_commit_is_in_the_log_and_in_both_databases(bank):
    transfer = bank.written()
    assert bank.is_in(transfer.name) == [False, False, False]
    transfer.commit()
    bank.assert_whole(transfer.name, committed=True)
    assert bank.tables[0].balances() == {transfer.name: -1}
    assert bank.tables[1].balances() == {transfer.name: 1}


def test_an_abort_is_nowhere(bank):
    transfer = bank.written()
    transfer.abort()
    bank.assert_whole(transfer.name, committed=False)


def test_an_abort_of_prepared_branches_is_nowhere(bank):
    transfer = bank.prepared()
    assert [len(table.our_gids()) for table in bank.tables] == [1, 1]
    transfer.abort()
    bank.assert_whole(transfer.name, committed=False)


def test_branches_are_known_to_the_coordinator_before_they_are_prepared_and_visible_only_when_it_is_decided(bank):
    transfer = bank.written()
    assert bank.rows() == []
    transfer.prepare()
    rows = bank.rows()
    assert sorted(row.gid for row in rows) == sorted(gid for table in bank.tables for gid in table.our_gids())
    assert {row.commit for row in rows} == {None}
    assert {row.transactional_id for row in rows} == {transfer.name}
    assert bank.is_in(transfer.name) == [False, False, False]
    transfer.decide(commit=True)
    assert {row.commit for row in bank.rows()} == {True}
    assert bank.is_in(transfer.name) == [True, False, False]
    transfer.finish(commit=True)
    bank.assert_whole(transfer.name, committed=True)


@pytest.mark.slow
def test_connections_are_their_owners_again_afterwards_and_take_part_in_the_next_transaction(bank):
    transfer = bank.written()
    transfer.commit()
    first_gids = {row.gid for row in bank.rows()}
    assert all(driver.info.transaction_status == psycopg.pq.TransactionStatus.IDLE for driver in transfer.drivers)
    transfer.drivers[0].commit()
    transfer.drivers[1].rollback()
    name, transfer.name = transfer.name, transfer.name
    transfer.producer = TransactionCoordinator(bank.store).init_producer_id(name).identity
    for driver in transfer.drivers:
        driver.execute("DELETE FROM account")
        transfer.branches.enlist(driver)
    transfer.prepare()
    # What has ended goes with the next registration.
    assert first_gids.isdisjoint({row.gid for row in bank.rows()})
    transfer.decide(commit=True)
    transfer.finish(commit=True)
    assert [table.balances() for table in bank.tables] == [{}, {}]
    transfer.branches.forget_ended()
    assert bank.rows() == []


def test_a_gid_says_whose_it_is_and_nothing_else(bank):
    transfer = bank.prepared(name="tenant-7/secret")
    gids = [gid for table in bank.tables for gid in table.our_gids()]
    assert all(gid.startswith(gid_prefix(bank.store.store_uuid)) for gid in gids)
    assert len(set(gids)) == 2
    assert all(len(gid.encode()) < 200 and "secret" not in gid and "tenant" not in gid for gid in gids)
    assert new_gid(bank.store.store_uuid) != new_gid(bank.store.store_uuid)
    labels = {row.database_label for row in bank.rows()}
    assert all("postgres" not in label.replace("postgresql", "") and "@" not in label for label in labels)
    assert {label.rpartition("/")[2] for label in labels} == {"checking", "savings"}
    transfer.abort()


# --- votes ------------------------------------------------------------------------------------------------------------


def spoil_with_notify(driver):
    driver.execute("NOTIFY somebody")


def spoil_with_a_temporary_table(driver):
    driver.execute("CREATE TEMPORARY TABLE notes (note text)")


def spoil_with_a_cursor(driver):
    driver.execute("DECLARE later CURSOR WITH HOLD FOR SELECT 1")


def spoil_with_a_snapshot(driver):
    driver.execute("SELECT pg_export_snapshot()")


def spoil_with_an_error(driver):
    with pytest.raises(psycopg.errors.DivisionByZero):
        driver.execute("SELECT 1 / 0")


def spoil_with_a_deferred_constraint(driver):
    driver.execute("CREATE TABLE once (a int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    driver.execute("INSERT INTO once VALUES (4711), (4711)")


def spoil_with_a_commit(driver):
    driver.commit()


def spoil_with_a_rollback(driver):
    driver.rollback()


def spoil_with_a_commit_in_sql(driver):
    driver.execute("COMMIT")
    driver.execute("INSERT INTO account VALUES ('later', 0)")


def spoil_by_closing(driver):
    driver.close()


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (spoil_with_notify, "NOTIFY.*outbox"),
        (spoil_with_a_temporary_table, "temporary.*outbox"),
        (spoil_with_a_cursor, "WITH HOLD.*outbox"),
        (spoil_with_a_snapshot, "snapshots.*outbox"),
        (spoil_with_an_error, "25P02"),
        (spoil_with_a_deferred_constraint, "23505.*once_a_key"),
        (spoil_with_a_commit, "committed or rolled back by its owner"),
        (spoil_with_a_rollback, "committed or rolled back by its owner"),
        (spoil_with_a_commit_in_sql, "committed or rolled back by its owner"),
        (spoil_by_closing, "closed before"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_vote_against_it_aborts_the_transaction_everywhere(sqlite_bank, spoil, told):
    transfer = sqlite_bank.written()
    spoil(transfer.drivers[1])
    with pytest.raises(TransactionAbortable, match=f"savings: .*{told}") as raised:
        transfer.prepare()
    assert "4711" not in str(raised.value)
    assert len(sqlite_bank.tables[0].our_gids()) == 1
    transfer.abort()
    spoilt_by_owner = spoil in {spoil_with_a_commit, spoil_with_a_commit_in_sql}
    assert sqlite_bank.is_in(transfer.name) == [False, False, spoilt_by_owner]
    assert [table.our_gids() for table in sqlite_bank.tables] == [[], []]


def test_who_gives_branches_up_while_they_vote_takes_no_vote_away(sqlite_bank, monkeypatch):
    """Another thread that closes the producer; what is left without votes would be decided alone."""
    transfer = sqlite_bank.written()
    real = postgresql_exchange.exchange

    def give_up_before(statements, timeout_seconds):
        transfer.branches.abandon()
        return real(statements, timeout_seconds)

    with monkeypatch.context() as patch:
        patch.setattr(branches, "exchange", give_up_before)
        with pytest.raises(TransactionAbortable, match="by its owner"):
            transfer.prepare()
    transfer.decide(commit=False)
    sqlite_bank.recover()
    sqlite_bank.assert_whole(transfer.name, committed=False)


@pytest.mark.slow
def test_a_vote_that_does_not_come_is_in_doubt_and_rolled_back_once_it_is_aborted(sqlite_bank, monkeypatch):
    transfer = sqlite_bank.written()
    # A trigger that is deferred to the vote keeps the server busy for longer than is waited.
    transfer.drivers[1].execute(
        "CREATE FUNCTION nap() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(6); RETURN NULL; END'"
    )
    transfer.drivers[1].execute("CREATE TABLE naps (name text)")
    transfer.drivers[1].execute(
        "CREATE CONSTRAINT TRIGGER nap AFTER INSERT ON naps DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
        " EXECUTE FUNCTION nap()"
    )
    transfer.drivers[1].execute("INSERT INTO naps VALUES ('slow')")
    with pytest.raises(TransactionAbortable, match=r"savings: its vote is not known \(no answer came in time\)"):
        transfer.branches.prepare(transfer.producer, timeout_ms=2_500)
    transfer.abort()
    # Somebody looks until it has come, or never will.
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline, "the vote is still under way"
        # Until then it is said that it has not ended.
        with suppress(BranchUnfinished):
            sqlite_bank.recover()
        with sqlite_bank.tables[1].connect() as watching:
            if not watching.execute(
                "SELECT 1 FROM pg_stat_activity WHERE query LIKE '%PREPARE TRANSACTION%' AND pid <> pg_backend_pid()"
                " AND datname = current_database() AND state = 'active'"
            ).fetchall():
                break
    sqlite_bank.recover()
    sqlite_bank.assert_whole(transfer.name, committed=False)
    assert sqlite_bank.rows() == []


def test_a_vote_whose_answer_is_lost_is_rolled_back_with_the_abort_and_not_left_to_recovery(sqlite_bank, monkeypatch):
    transfer = sqlite_bank.written()
    real = postgresql_exchange.exchange

    def lose_the_second(statements, timeout_seconds):
        answers = real(statements, timeout_seconds)
        if len(statements) == 2 and statements[1].tag == "PREPARE TRANSACTION":
            statements[1].driver.close()
            answers[1] = ServerAnswer(AnswerKind.UNKNOWN, None, "the connection broke")
        return answers

    monkeypatch.setattr(branches, "exchange", lose_the_second)
    with pytest.raises(TransactionAbortable, match="savings: its vote is not known"):
        transfer.prepare()
    assert [len(table.our_gids()) for table in sqlite_bank.tables] == [1, 1]
    transfer.abort()
    sqlite_bank.assert_whole(transfer.name, committed=False)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_answered", [True, False])
def test_a_vote_that_is_interrupted_is_rolled_back_with_the_abort(sqlite_bank, monkeypatch, is_answered):
    """Ctrl-C on the thread that asks: the answers may have come, or are still on their way."""
    transfer = sqlite_bank.written()
    real_exchange = postgresql_exchange.exchange

    def interrupt_after(statements, timeout_seconds):
        real_exchange(statements, timeout_seconds)
        raise KeyboardInterrupt

    class InterruptedSelector(selectors.DefaultSelector):
        def select(self, timeout=None):
            deadline = time.monotonic() + PATIENCE_SECONDS
            while [len(table.our_gids()) for table in sqlite_bank.tables] != [1, 1]:
                assert time.monotonic() < deadline, "the votes do not come"
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if is_answered:
            patch.setattr(branches, "exchange", interrupt_after)
        else:
            patch.setattr(selectors, "DefaultSelector", InterruptedSelector)
        with pytest.raises(KeyboardInterrupt):
            transfer.prepare()
    assert [driver.closed for driver in transfer.drivers] == [not is_answered] * 2
    transfer.abort()
    sqlite_bank.assert_whole(transfer.name, committed=False)


@pytest.mark.parametrize("end", ["abort", "abandon"])
def test_an_interrupt_before_anything_was_asked_leaves_connections_that_are_rolled_back(sqlite_bank, monkeypatch, end):
    transfer = sqlite_bank.written()

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(postgresql_exchange._Conversation, "lock", interrupt)
        with pytest.raises(KeyboardInterrupt):
            transfer.prepare()
    # They may be in the hands of another thread.
    assert [driver.closed for driver in transfer.drivers] == [False, False]
    if end == "abort":
        transfer.abort()
    else:
        transfer.branches.abandon()
    for driver in transfer.drivers:
        assert driver.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    sqlite_bank.assert_whole(transfer.name, committed=False)


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_connection_is_its_owners_again_wherever_an_exchange_on_it_is_interrupted(txnstore_postgresql_url, is_closed):
    """Its answers come in as many pieces as they may; a closed one gives none, at moments that are always the same."""
    for _, moment in every_interrupt({"postgresql/exchange.py"}, is_no_moment_for_signals):
        with closing(psycopg.connect(connection_string(txnstore_postgresql_url))) as driver:
            if is_closed:
                driver.close()
            begin = postgresql_exchange.Statement(driver, "BEGIN", "BEGIN")
            attempt(moment, partial(postgresql_exchange.exchange, [begin], PATIENCE_SECONDS))
            assert driver.lock.acquire(blocking=False), moment.where
            driver.lock.release()


@pytest.mark.slow
def test_no_room_for_another_prepared_transaction_is_a_vote_against_it(sqlite_bank, small_server):
    table = small_server
    other = sqlite_bank.transfer()
    with table.connect(autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute("PREPARE TRANSACTION 'the only one'")
        try:
            driver = table.connect()
            other.branches.enlist(driver)
            with pytest.raises(TransactionAbortable, match=r"53200.*; perhaps all of its max_prepared_transactions"):
                other.prepare()
            other.abort()
            driver.close()
        finally:
            connection.execute("ROLLBACK PREPARED 'the only one'")


# --- refusals, before any effect --------------------------------------------------------------------------------------


def autocommit(table):
    return table.connect(autocommit=True)


def closed(table):
    connection = table.connect()
    connection.close()
    return connection


def failed(table):
    connection = table.connect()
    with pytest.raises(psycopg.errors.UndefinedTable):
        connection.execute("SELECT * FROM nothing")
    return connection


def no_connection(table):
    return "postgresql://"


def of_sqlite(table):
    import sqlite3

    return sqlite3.connect(":memory:")


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (autocommit, "autocommit"),
        (closed, "closed"),
        (failed, "roll it back"),
        (no_connection, r"builtins\.str.*outbox"),
        (of_sqlite, r"sqlite3\.Connection.*outbox"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_connection_that_cannot_take_part_is_refused_at_once(sqlite_bank, make, told):
    transfer = sqlite_bank.transfer()
    connection = make(sqlite_bank.tables[0])
    try:
        with pytest.raises(InvalidRequest, match=told):
            transfer.branches.enlist(connection)
    finally:
        getattr(connection, "close", lambda: None)()
    assert len(transfer.branches) == 0


def test_a_connection_in_pipeline_mode_is_refused(sqlite_bank):
    transfer = sqlite_bank.transfer()
    with transfer.drivers[0].pipeline(), pytest.raises(InvalidRequest, match="pipeline"):
        transfer.branches.enlist(transfer.drivers[0])


@pytest.mark.slow
def test_a_server_without_prepared_transactions_is_refused_with_what_to_do_instead(sqlite_bank, no_vote_server):
    transfer = sqlite_bank.transfer()
    driver = no_vote_server.connect()
    with driver, pytest.raises(InvalidRequest, match=r"max_prepared_transactions = 0.*outbox"):
        transfer.branches.enlist(driver)


def test_a_role_that_may_not_ask_which_database_it_is_is_told(sqlite_bank, other_server):
    other_server.create_role("blind", "secret")
    with other_server.connect("checking") as admin:
        admin.execute("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
        try:
            with sqlite_bank.tables[0].__class__(other_server.url("checking", "blind", "secret")).connect() as driver:
                transfer = sqlite_bank.transfer()
                with pytest.raises(InvalidRequest, match=r"GRANT EXECUTE ON FUNCTION pg_control_system"):
                    transfer.branches.enlist(driver)
                # Nothing of the owner's is spoilt.
                assert driver.execute("SELECT 1").fetchone() == (1,)
        finally:
            admin.execute("GRANT EXECUTE ON FUNCTION pg_control_system() TO PUBLIC")
            other_server.drop_role("blind")


def test_a_connection_with_rows_and_cursors_of_its_own_kind_takes_part(sqlite_bank):
    transfer = sqlite_bank.transfer()
    for driver in transfer.drivers:
        driver.row_factory = psycopg.rows.dict_row
        driver.cursor_factory = psycopg.ClientCursor
    transfer.write()
    transfer.commit()
    sqlite_bank.assert_whole(transfer.name, committed=True)


# --- fences -----------------------------------------------------------------------------------------------------------


def by_a_newer_producer(bank, transfer):
    TransactionCoordinator(bank.store).init_producer_id(transfer.name)


def by_its_age(bank, transfer):
    bank.clock.advance(60_001)
    assert transfer.name in abort_timed_out(bank.store)


def by_an_administrator(bank, transfer):
    assert abort_by_administrator(bank.store, transfer.name)


FENCES = [by_a_newer_producer, by_its_age, by_an_administrator]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("fence", FENCES)
def test_whoever_aborts_the_transaction_decides_its_branches(bank, fence):
    transfer = bank.prepared()
    fence(bank, transfer)
    assert {row.commit for row in bank.rows()} == {False}
    with pytest.raises(TxnStoreError):
        transfer.decide(commit=True)
    assert {row.commit for row in bank.rows()} == {False}
    transfer.branches.settle()
    bank.assert_whole(transfer.name, committed=False)


@pytest.mark.slow
def test_a_fenced_producer_registers_nothing_and_prepares_nothing(bank):
    transfer = bank.written()
    TransactionCoordinator(bank.store).init_producer_id(transfer.name)
    with pytest.raises((ProducerFenced, InvalidProducerEpoch)):
        transfer.prepare()
    assert bank.rows() == []
    assert bank.tables[0].our_gids() == []
    transfer.branches.settle()
    bank.assert_whole(transfer.name, committed=False)


def test_the_next_transaction_of_the_id_leaves_the_branches_of_the_last_one_alone(bank):
    transfer = bank.prepared()
    transfer.decide(commit=True)
    transfer.die()
    again = bank.transfer(name=transfer.name)
    again.branches.enlist(again.drivers[0])
    again.prepare()
    again.decide(commit=False)
    outcomes = {row.producer.epoch: row.commit for row in bank.rows()}
    assert outcomes == {transfer.producer.epoch: True, again.producer.epoch: False}
    bank.recover()
    assert bank.is_in(transfer.name) == [True, True, True]
    again.finish(commit=False)


@pytest.mark.parametrize("commit", [False, True])
def test_settling_what_recovery_has_ended_and_forgotten_accuses_nobody(sqlite_bank, commit):
    transfer = sqlite_bank.prepared()
    transfer.decide(commit=commit)
    sqlite_bank.recover()
    assert sqlite_bank.rows() == []
    transfer.branches.settle()
    sqlite_bank.assert_whole(transfer.name, committed=commit)


def test_who_takes_a_transaction_over_does_not_commit_it_without_its_votes(txnstore_sqlite_url, shared_clock, tables):
    """What is kept (KIP-939) may be what its producer died of before all had voted for it."""
    clock = shared_clock
    with open_store(txnstore_sqlite_url, clock=clock) as store, closing(Bank(store, clock, tables)) as bank:
        allow = {"transaction.two.phase.commit.enable": "true"}
        store.write(lambda connection: change_store_settings(connection, allow))
        transfer = bank.written()
        spoil_with_notify(transfer.drivers[1])
        with pytest.raises(TransactionAbortable):
            transfer.prepare()
        transfer.die()
        coordinator = TransactionCoordinator(store)
        kept = coordinator.init_producer_id(transfer.name, enable_two_phase_commit=True, keep_prepared=True)
        assert kept.ongoing == transfer.producer
        with pytest.raises(TransactionAbortable, match="shares in other databases"):
            coordinator.end_transaction(transfer.name, kept.identity, commit=True)
        coordinator.end_transaction(transfer.name, kept.identity, commit=False)
        bank.recover()
        bank.assert_whole(transfer.name, committed=False)


def test_settling_an_undecided_transaction_leaves_it_prepared(bank):
    transfer = bank.prepared()
    transfer.branches.settle()
    assert [len(table.our_gids()) for table in bank.tables] == [1, 1]
    transfer.decide(commit=True)
    transfer.branches.settle()
    bank.assert_whole(transfer.name, committed=True)


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_branch_whose_connection_broke_is_ended_on_a_new_one(sqlite_bank):
    transfer = sqlite_bank.prepared()
    transfer.decide(commit=True)
    transfer.die()
    transfer.finish(commit=True)
    sqlite_bank.assert_whole(transfer.name, committed=True)


def test_a_branch_is_not_taken_for_ended_because_another_database_answers_in_its_place(bank, small_server, monkeypatch):
    """A list of hosts, or a name that leads elsewhere by now: nothing is prepared there."""
    transfer = bank.prepared()
    transfer.decide(commit=True)
    transfer.die()
    with monkeypatch.context() as patch:
        patch.setattr(BranchAddress, "connect", lambda *_: connect_participant(parse_url(small_server.url)))
        told = r"another database answers there now; .*`txnstore transactions forget txnstore_\w+`"
        with pytest.raises(BranchUnfinished, match=told):
            transfer.finish(commit=True, timeout_ms=100)
        transfer.branches.abandon()
    assert len(bank.rows()) == 2
    bank.recover()
    bank.assert_whole(transfer.name, committed=True)


@pytest.mark.slow
@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.parametrize("commit", [False, True])
def test_an_administrator_who_ends_a_branch_the_other_way_is_told_of(bank, commit, is_broken):
    transfer = bank.prepared()
    table = bank.tables[1]
    for gid in table.our_gids():
        table.watching.execute(f"{'ROLLBACK' if commit else 'COMMIT'} PREPARED '{gid}'")
    transfer.decide(commit=commit)
    if is_broken:
        transfer.die()
    with pytest.raises(BranchEndedOtherwise, match=r"in [^ ]*/savings somebody else") as told:
        transfer.finish(commit=commit)
    # On a new connection: a server that has taken over may have given the number of a branch that it lost to another.
    assert ("see first whether it is there" in str(told.value)) == (is_broken and not commit)
    # Told once; the rest has ended as was decided.
    transfer.finish(commit=commit)
    assert bank.is_in(transfer.name) == [commit, commit, not commit]
    assert [table.our_gids() for table in bank.tables] == [[], []]


@pytest.mark.parametrize("commit", [False, True])
def test_a_commit_that_a_failover_has_lost_is_told_of_once(sqlite_bank, commit, caplog):
    """A standby that had not heard of the vote has taken over: it has not come to the transaction's number yet."""
    transfer = sqlite_bank.prepared()
    table = sqlite_bank.tables[1]
    for gid in table.our_gids():
        table.watching.execute(f"ROLLBACK PREPARED '{gid}'")
    transfer.branches._branches[1].transaction_id = "99999999999"
    transfer.decide(commit=commit)
    with pytest.raises(BranchEndedOtherwise, match=r"savings .*a failover") if commit else nullcontext():
        transfer.finish(commit=commit)
    assert sqlite_bank.is_in(transfer.name) == [commit, commit, False]
    # It may be a copy of the database that voted: there its row decides.
    transfer.branches.forget_ended()
    kept = sqlite_bank.rows()
    assert [(row.database_label.rpartition("/")[2], row.is_missing) for row in kept] == [("savings", True)] * commit
    # Once, in the log as well: recovery has nothing to add.
    sqlite_bank.recover()
    assert sqlite_bank.rows() == kept
    events = [vars(record).get("event") for record in caplog.records if record.levelname == "ERROR"]
    assert events == ["branch_ended_otherwise"] * commit


def test_a_loss_that_the_log_cannot_take_note_of_is_told_of_all_the_same(sqlite_bank, monkeypatch):
    transfer = sqlite_bank.prepared()
    for gid in sqlite_bank.tables[1].our_gids():
        sqlite_bank.tables[1].watching.execute(f"ROLLBACK PREPARED '{gid}'")
    transfer.decide(commit=True)

    def refuse(*_):
        raise StoreUnavailable

    with monkeypatch.context() as patch:
        patch.setattr(branches, "mark_missing", refuse)
        with pytest.raises(BranchEndedOtherwise, match=rf"transactions forget {gid} --force`"):
            transfer.finish(commit=True)
    transfer.branches.forget_ended()
    with pytest.raises(BranchEndedOtherwise):
        sqlite_bank.recover()


def test_a_loss_is_told_of_by_the_call_that_is_repeated_after_an_interrupt(sqlite_bank, monkeypatch):
    transfer = sqlite_bank.prepared()
    for gid in sqlite_bank.tables[1].our_gids():
        sqlite_bank.tables[1].watching.execute(f"ROLLBACK PREPARED '{gid}'")
    transfer.decide(commit=True)

    def interrupt(connection, gid):
        assert mark_missing(connection, gid)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(branches, "mark_missing", interrupt)
        with pytest.raises(KeyboardInterrupt):
            transfer.finish(commit=True)
    with pytest.raises(BranchEndedOtherwise, match="savings"):
        transfer.finish(commit=True)
    assert [row.is_missing for row in sqlite_bank.rows() if row.gid == gid] == [True]


def test_whether_a_branch_has_ended_as_decided_is_asked_until_it_is_known(sqlite_bank, monkeypatch):
    transfer = sqlite_bank.prepared()
    table = sqlite_bank.tables[1]
    for gid in table.our_gids():
        table.watching.execute(f"ROLLBACK PREPARED '{gid}'")
    transfer.decide(commit=True)

    def break_first(driver, *_, **__):
        monkeypatch.undo()
        return Statement(driver, "SELECT pg_terminate_backend(pg_backend_pid())", "SELECT 1")

    monkeypatch.setattr(postgresql_branches, "check_end_statement", break_first)
    with pytest.raises(BranchEndedOtherwise, match="savings"):
        transfer.finish(commit=True)


def test_the_end_waits_for_standbys_as_the_vote_does(sqlite_bank, small_server):
    """The coordinator forgets it afterwards: a standby that knew the vote alone would roll it back."""
    watching = small_server.connect(autocommit=True)

    def wait_until(is_met):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_met():
            assert time.monotonic() < deadline

    def name_standbys(names):
        watching.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
        watching.execute("SELECT pg_reload_conf()")

    def is_anybody_waiting():
        return bool(watching.execute("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'").fetchall())

    is_over = threading.Event()

    def go_on_committing():
        with small_server.connect(autocommit=True) as connection:
            connection.execute("SET synchronous_commit = on")
            while not is_over.is_set():
                connection.execute("SELECT pg_logical_emit_message(true, 'probe', '')")

    committing = threading.Thread(target=go_on_committing)
    transfer = sqlite_bank.transfer()
    # For every connection to it, those of ours too.
    watching.execute("ALTER DATABASE postgres SET synchronous_commit = off")
    with small_server.connect() as driver:
        try:
            name_standbys("nobody")
            wait_until(lambda: driver.execute("SHOW synchronous_standby_names").fetchone() == ("nobody",))
            transfer.branches.enlist(driver)
            name_standbys("")
            transfer.prepare()
            transfer.decide(commit=True)
            name_standbys("nobody")
            committing.start()
            wait_until(is_anybody_waiting)
            with pytest.raises(BranchUnfinished):
                transfer.finish(commit=True, timeout_ms=100)
        finally:
            is_over.set()
            name_standbys("")
            watching.execute("ALTER DATABASE postgres RESET synchronous_commit")
        committing.join(PATIENCE_SECONDS)
        transfer.finish(commit=True, timeout_ms=1000 * PATIENCE_SECONDS)
    assert watching.execute("SELECT gid FROM pg_prepared_xacts").fetchall() == []
    watching.close()


def test_a_branch_that_its_owner_has_begun_to_use_again_is_ended_on_a_new_connection(sqlite_bank):
    transfer = sqlite_bank.prepared()
    transfer.drivers[0].execute("SELECT 1")
    transfer.decide(commit=True)
    transfer.finish(commit=True)
    sqlite_bank.assert_whole(transfer.name, committed=True)
    assert transfer.drivers[0].info.transaction_status == psycopg.pq.TransactionStatus.INTRANS


def test_a_branch_prepared_as_another_role_is_ended_as_that_role(sqlite_bank, other_server):
    other_server.create_role("clerk", "secret")
    other_server.create_role("teller", "secret")
    with other_server.connect("checking") as admin:
        admin.execute("GRANT clerk TO teller")
        admin.execute("GRANT ALL ON account TO clerk")
    driver = type(sqlite_bank.tables[0])(other_server.url("checking", "teller", "secret")).connect()
    try:
        transfer = sqlite_bank.transfer()
        driver.execute("SET LOCAL ROLE clerk")
        transfer.branches.enlist(driver)
        driver.execute("INSERT INTO account VALUES ('by the clerk', 0)")
        transfer.prepare()
        transfer.decide(commit=True)
        transfer.finish(commit=True)
        assert sqlite_bank.tables[0].balances() == {"by the clerk": 0}
        assert sqlite_bank.tables[0].our_gids() == []
    finally:
        driver.close()
        with other_server.connect("checking") as admin:
            admin.execute("DROP OWNED BY clerk, teller")
            admin.execute("DROP ROLE clerk, teller")


def test_somebody_else_may_have_ended_a_branch_already(sqlite_bank):
    transfer = sqlite_bank.prepared()
    transfer.decide(commit=True)
    sqlite_bank.recover()
    sqlite_bank.assert_whole(transfer.name, committed=True)
    transfer.finish(commit=True)
    sqlite_bank.assert_whole(transfer.name, committed=True)


@pytest.mark.slow
def test_a_branch_that_cannot_be_ended_in_time_says_what_is_decided_and_the_next_call_ends_it(sqlite_bank, monkeypatch):
    transfer = sqlite_bank.prepared()
    transfer.decide(commit=True)
    branch = transfer.branches._branches[1]
    transfer.drivers[1].close()
    with monkeypatch.context() as patch:
        patch.setitem(branch.address._parameters, "port", "1")
        with pytest.raises(BranchUnfinished, match=r"decided: commit;.*savings .*repeat the call.*recovery") as raised:
            transfer.finish(commit=True, timeout_ms=2_500)
    assert "secret" not in str(raised.value)
    assert raised.value.retriable
    # Only its own branch waits: the log and the other database have it.
    assert sqlite_bank.is_in(transfer.name) == [True, True, False]
    transfer.finish(commit=True)
    sqlite_bank.assert_whole(transfer.name, committed=True)


def test_abandoned_branches_are_rolled_back_or_left_to_recovery(sqlite_bank):
    prepared, written = sqlite_bank.prepared(), sqlite_bank.written()
    prepared.branches.abandon()
    written.branches.abandon()
    assert written.drivers[0].info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert [len(table.our_gids()) for table in sqlite_bank.tables] == [1, 1]
    by_its_age(sqlite_bank, prepared)
    sqlite_bank.recover()
    sqlite_bank.assert_whole(prepared.name, committed=False)


def test_an_owner_in_another_thread_keeps_the_vote_waiting_no_longer_than_allowed(sqlite_bank):
    transfer = sqlite_bank.written()
    held, release = threading.Event(), threading.Event()

    def use():
        with transfer.drivers[1].lock:
            held.set()
            release.wait(10)

    thread = threading.Thread(target=use)
    thread.start()
    held.wait(10)
    try:
        with pytest.raises(TransactionAbortable, match="another thread"):
            transfer.branches.prepare(transfer.producer, timeout_ms=1_000)
    finally:
        release.set()
        thread.join()
    transfer.abort()
    sqlite_bank.assert_whole(transfer.name, committed=False)
