"""Recovery: who has the rights ends what was left behind, as the coordinator has decided, and touches nothing else."""

from __future__ import annotations

import os
import threading
from contextlib import closing, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import delete, update

from tests.participants.bank import Bank
from txnstore.db.opening import open_store
from txnstore.db.postgresql import branches as postgresql_branches
from txnstore.db.postgresql.backend import PostgreSQLBackend
from txnstore.db.postgresql.branches import connect_participant, end_prepared, list_prepared
from txnstore.db.postgresql.exchange import AnswerKind, ServerAnswer, exchange
from txnstore.db.schema import transaction_branches, transactions
from txnstore.db.url import parse_url
from txnstore.errors import (
    BranchEndedOtherwise,
    BranchUnfinished,
    InvalidRequest,
    InvalidUrl,
    PermissionDenied,
    StoreBusy,
    StoreReadOnly,
    StoreUnavailable,
    TransactionAbortable,
    TxnStoreError,
)
from txnstore.model import ProducerIdentity
from txnstore.participants import branches, recovery
from txnstore.participants.branch_rules import (
    CURES,
    ENDS,
    ENTERED_FROM,
    BranchState,
    Cure,
    End,
    IllegalBranchMove,
    Standing,
    check_move,
    end_of,
)
from txnstore.participants.recovery import RecoveredBranches, raise_failed, recover_branches, recover_in_cluster
from txnstore.testing.manual_clock import ManualClock
from txnstore.testing.private_cluster import PrivateCluster, server_user
from txnstore.testing.servers import told_programs
from txnstore.transactions.branch_rows import decide_branches
from txnstore.transactions.coordinator import TransactionCoordinator


def test_what_is_decided_to_commit_is_committed(bank):
    transfer = bank.prepared()
    transfer.decide(commit=True)
    transfer.die()
    assert [(len(done.committed), len(done.rolled_back)) for done in bank.recover()] == [(1, 0), (1, 0)]
    bank.assert_whole(transfer.name, committed=True)
    assert bank.rows() == []


def test_what_is_decided_to_abort_is_rolled_back(bank):
    transfer = bank.prepared()
    own = transfer.producer
    for other in ProducerIdentity(own.producer_id + 1, own.epoch), ProducerIdentity(own.producer_id, own.epoch + 1):
        bank.store.write(partial(decide_branches, transactional_id=transfer.name, producer=other, commit=True))
    transfer.decide(commit=False)
    # It is decided once.
    bank.store.write(partial(decide_branches, transactional_id=transfer.name, producer=own, commit=True))
    transfer.die()
    assert [(len(done.committed), len(done.rolled_back)) for done in bank.recover()] == [(0, 1), (0, 1)]
    bank.assert_whole(transfer.name, committed=False)
    assert bank.rows() == []


def test_what_is_open_is_left_until_it_is_too_old_and_its_coordinator_comes_too_late_then(bank):
    transfer = bank.prepared()
    gids = [table.our_gids() for table in bank.tables]
    assert [done.open for done in bank.recover()] == gids
    bank.clock.advance(60_001)
    assert [done.rolled_back for done in bank.recover()] == gids
    with pytest.raises(TxnStoreError):
        transfer.decide(commit=True)
    transfer.branches.settle()
    bank.assert_whole(transfer.name, committed=False)


def test_one_whose_transaction_no_rule_can_abort_keeps_no_other_branch_from_its_end(sqlite_bank):
    bank = sqlite_bank
    damaged, free = bank.prepared(), bank.prepared()

    def begin_at(epoch, connection):
        row = update(transactions).where(transactions.c.transactional_id == damaged.name)
        connection.execute(row.values(begin_epoch=epoch))

    # No marker of the epochs that it has left would end records of this one.
    bank.store.write(partial(begin_at, 7))
    bank.clock.advance(60_001)
    for table in bank.tables:
        recovered = recover_branches(bank.store, table.url)
        assert len(recovered.rolled_back) == 1
        with pytest.raises(BranchUnfinished, match="is left as it is: no rule can abort its transaction"):
            raise_failed(recovered)
    bank.store.write(partial(begin_at, damaged.producer.epoch))
    bank.recover()
    for transfer in (damaged, free):
        transfer.die()
        bank.assert_whole(transfer.name, committed=False)


@pytest.mark.slow
def test_a_standby_that_has_not_heard_of_what_is_prepared_ends_nothing(tables):
    with (
        PrivateCluster(fsync=False, programs=told_programs()) as server,
        open_store(server.url("postgres")) as store,
        closing(Bank(store, ManualClock(), tables)) as bank,
    ):
        transfer = bank.prepared()
        gids = [table.our_gids() for table in tables]
        # The standby has come as far as to what was there before.
        store.write(lambda connection: connection.execute(delete(transaction_branches)))
        server.stop()
        marker = server.folder / "data" / "standby.signal"
        marker.touch()
        if (user := server_user()) is not None:
            os.chown(marker, user.user_id, user.group_id)
        server.start()
        for end in (bank.recover, transfer.branches.settle):
            with pytest.raises(StoreReadOnly, match="is a standby, which may lag behind"):
                end()
        assert [table.our_gids() for table in tables] == gids != [[], []]


def test_what_the_coordinator_does_not_know_was_never_decided_to_commit(bank):
    transfer = bank.prepared()
    bank.store.write(lambda connection: connection.execute(delete(transaction_branches)))
    transfer.die()
    assert [len(done.rolled_back) for done in bank.recover()] == [1, 1]
    assert [table.gids() for table in bank.tables] == [table.foreign_gids for table in bank.tables]


def test_what_is_not_decided_though_its_transaction_is_over_is_aborted_first(bank, monkeypatch):
    """Damage; a commit of the same branch later could not be taken back."""
    transfer = bank.prepared()
    transfer.decide(commit=False)
    bank.store.write(lambda connection: connection.execute(update(transaction_branches).values(outcome=None)))
    transfer.die()

    def end_decided(driver, gid, **how):
        assert [row.commit for row in bank.rows() if row.gid == gid] == [False]
        return end_prepared(driver, gid, **how)

    monkeypatch.setattr(recovery, "end_prepared", end_decided)
    assert [len(done.rolled_back) for done in bank.recover()] == [1, 1]
    bank.assert_whole(transfer.name, committed=False)


def test_what_was_decided_before_its_lock_came_is_not_taken_for_aborted(sqlite_bank):
    transfer = sqlite_bank.prepared()
    transfer.decide(commit=True)
    for branch in sqlite_bank.rows():
        assert (
            sqlite_bank.store.write(partial(recovery._abort_if_over, sqlite_bank.store, branch)) is Standing.COMMITTED
        )
    transfer.finish(commit=True)
    sqlite_bank.assert_whole(transfer.name, committed=True)


def test_what_is_not_decided_nor_prepared_though_its_transaction_is_over_is_forgotten(bank):
    transfer = bank.prepared()
    transfer.abort()
    bank.store.write(lambda connection: connection.execute(update(transaction_branches).values(outcome=None)))
    bank.recover()
    assert {row.commit for row in bank.rows()} == {False}
    bank.recover()
    assert bank.rows() == []


def test_a_transactional_id_that_is_forgotten_has_decided_nothing(bank):
    transfer = bank.prepared()
    forget = delete(transactions).where(transactions.c.transactional_id == transfer.name)
    bank.store.write(lambda connection: connection.execute(forget))
    transfer.die()
    assert [len(done.rolled_back) for done in bank.recover()] == [1, 1]
    assert bank.rows() == []


def test_rows_of_what_has_ended_are_forgotten_but_not_those_of_other_databases(bank):
    transfer = bank.written()
    transfer.commit()
    assert len(bank.rows()) == 2
    (done,) = [recover_branches(bank.store, bank.tables[0].url)]
    assert len(done.forgotten) == 1
    assert [row.database_label.rpartition("/")[2] for row in bank.rows()] == ["savings"]


def test_rows_that_have_to_stay_keep_no_younger_one_from_being_forgotten(bank, monkeypatch):
    monkeypatch.setattr(recovery, "FOUND_MAX", 2)
    staying = [bank.written() for _ in range(3)]
    for transfer in staying:
        transfer.branches._register(transfer.producer, list(transfer.branches._branches), 60_000)
    for _ in range(3):
        bank.written().commit()
    assert [len(done.forgotten) for done in bank.recover()] == [3, 3]
    assert {row.transactional_id for row in bank.rows()} == {transfer.name for transfer in staying}


def told(caplog):
    """Return what the log says of branches, and of whose."""
    found = [vars(record) for record in caplog.records if vars(record).get("event", "").startswith("branch_")]
    return [(fields["event"], fields["transactional_id"]) for fields in found]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("how", ["an administrator", "a failover", "so long ago that its server forgot"])
@pytest.mark.parametrize("commit", [False, True])
def test_a_branch_that_has_not_ended_as_was_decided_is_told_of_once_and_kept_if_it_is_a_commit(
    bank, commit, how, caplog
):
    transfer = bank.prepared()
    (gid,) = bank.tables[1].our_gids()
    is_unknown = how != "an administrator"
    bank.tables[1].watching.execute(f"{'ROLLBACK' if commit or is_unknown else 'COMMIT'} PREPARED '{gid}'")
    if is_unknown:
        # A standby that had not heard of the vote has taken over: it has not come to the transaction's number yet.
        number = "99999999999" if how == "a failover" else "0"
        begun = update(transaction_branches).where(transaction_branches.c.gid == gid)
        bank.store.write(lambda connection: connection.execute(begun.values(transaction_xid8=number)))
    transfer.decide(commit=commit)
    transfer.die()
    with pytest.raises(BranchEndedOtherwise, match=r"/savings: somebody else .* failover") if commit else nullcontext():
        bank.recover()
    # Whether it has voted is not known by now of one that was decided to abort.
    events = ["branch_ended_otherwise"] if commit else ["branch_perhaps_committed"] * (not is_unknown)
    kept = [(gid, True, True)] * commit
    for _ in range(2):
        assert told(caplog) == [(event, transfer.name) for event in events]
        assert [(row.gid, row.commit, row.is_missing) for row in bank.rows()] == kept
        assert [done.ended_count for done in bank.recover()] == [0, 0]
    assert bank.is_in(transfer.name) == [commit, commit, not commit and not is_unknown]


@pytest.mark.parametrize("commit", [False, True])
def test_a_branch_that_somebody_ends_otherwise_at_the_same_moment_is_told_of(sqlite_bank, monkeypatch, commit):
    bank, transfer = sqlite_bank, sqlite_bank.prepared()
    transfer.decide(commit=commit)
    transfer.die()

    def end_too_late(driver, gid, *, commit, timeout_seconds):
        assert end_prepared(driver, gid, commit=not commit, timeout_seconds=timeout_seconds).kind is AnswerKind.DONE
        return end_prepared(driver, gid, commit=commit, timeout_seconds=timeout_seconds)

    monkeypatch.setattr(recovery, "end_prepared", end_too_late)
    for table in bank.tables:
        with pytest.raises(BranchEndedOtherwise):
            raise_failed(recover_branches(bank.store, table.url))
    assert len(bank.rows()) == 2 * commit
    bank.recover()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_past", [False, True])
def test_a_copy_of_the_database_that_voted_loses_no_decision_to_commit(bank, monkeypatch, is_past):
    """As the same server has copied it before the vote: with its identity, and nothing prepared."""
    transfer = left_decided(bank)
    numbers = {row.gid: row.transaction_xid8 for row in bank.rows()}

    def number(of):
        for gid, number in of.items():
            row = update(transaction_branches).where(transaction_branches.c.gid == gid)
            row = row.values(transaction_xid8=number)
            bank.store.write(lambda connection, row=row: connection.execute(row))

    with monkeypatch.context() as patch:
        patch.setattr(recovery, "list_prepared", lambda *_: [])
        number(dict.fromkeys(numbers, "99999999999"))
        with pytest.raises(BranchEndedOtherwise, match="or is a copy of the one that voted"):
            bank.recover()
        if is_past:
            # The copy has come to the number meanwhile, for a transaction of its own.
            ((committed,),) = bank.tables[0].watching.execute("SELECT pg_current_xact_id()::text")
            number(dict.fromkeys(numbers, committed))
        assert [done.ended_count for done in bank.recover()] == [0, 0]
    number(numbers)
    assert [len(done.committed) for done in bank.recover()] == [1, 1]
    bank.assert_whole(transfer.name, committed=True)
    assert bank.rows() == []


def test_of_several_looks_at_once_one_tells_what_is_missing(sqlite_bank, monkeypatch, caplog):
    bank, transfer = sqlite_bank, left_decided(sqlite_bank)
    for table in bank.tables:
        table.watching.execute(f"ROLLBACK PREPARED '{table.our_gids()[0]}'")
    real = postgresql_branches.has_ended_otherwise

    def let_another_look_first(driver, number, **how):
        monkeypatch.undo()
        with pytest.raises(BranchEndedOtherwise):
            bank.recover()
        return real(driver, number, **how)

    monkeypatch.setattr(recovery, "has_ended_otherwise", let_another_look_first)
    assert [done.ended_count for done in bank.recover()] == [0, 0]
    assert told(caplog) == [("branch_ended_otherwise", transfer.name)] * 2


def test_a_branch_that_its_producer_ends_and_forgets_at_the_same_moment_is_not_told_of(bank, monkeypatch, caplog):
    """Who then looks for its row finds none, which does not say that it was decided to abort."""
    transfer = bank.prepared()
    gids = [table.our_gids() for table in bank.tables]

    def let_it_end(*_):
        transfer.decide(commit=True)
        transfer.finish(commit=True)
        transfer.branches.abandon()
        assert bank.rows() == []

    monkeypatch.setattr(recovery, "abort_if_timed_out", let_it_end)
    recovered = bank.recover()
    assert [(done.committed, done.rolled_back, done.forgotten) for done in recovered] == [
        ([], [], gids[0]),
        ([], [], []),
    ]
    assert told(caplog) == []
    bank.assert_whole(transfer.name, committed=True)


def test_a_number_that_comes_again_after_a_crash_is_no_proof_that_an_aborted_branch_has_committed(
    bank, monkeypatch, caplog
):
    """A server that crashes before a vote may not remember the number of its transaction."""
    transfer = bank.written()

    def lose(statements, _):
        transfer.die()
        return [ServerAnswer(AnswerKind.UNKNOWN, None, "the connection broke") for _ in statements]

    with monkeypatch.context() as patch:
        patch.setattr(branches, "exchange", lose)
        with pytest.raises(TransactionAbortable, match="its vote is not known"):
            transfer.prepare()
    for table, branch in zip(bank.tables, transfer.branches._branches, strict=True):
        ((branch.transaction_id,),) = table.watching.execute("SELECT pg_current_xact_id()::text")
        row = update(transaction_branches).where(transaction_branches.c.gid == branch.gid)
        row = row.values(transaction_xid8=branch.transaction_id)
        bank.store.write(lambda connection, row=row: connection.execute(row))
    transfer.abort()
    assert told(caplog) == []
    assert [len(done.forgotten) for done in bank.recover()] == [1, 1]
    assert told(caplog) == [("branch_perhaps_committed", transfer.name)] * 2
    assert bank.rows() == []
    bank.assert_whole(transfer.name, committed=False)


def test_a_branch_of_which_the_server_does_not_say_how_it_has_ended_is_not_forgotten(sqlite_bank, monkeypatch):
    bank, transfer = sqlite_bank, sqlite_bank.prepared()
    for table in bank.tables:
        table.watching.execute(f"ROLLBACK PREPARED '{table.our_gids()[0]}'")
    transfer.decide(commit=True)
    transfer.die()
    with monkeypatch.context() as patch:
        patch.setattr(
            postgresql_branches, "exchange", lambda *_: [ServerAnswer(AnswerKind.UNKNOWN, None, "it is gone")]
        )
        with pytest.raises(BranchUnfinished, match="how it has ended is not known: it is gone"):
            bank.recover()
    assert len(bank.rows()) == 2
    with pytest.raises(BranchEndedOtherwise):
        bank.recover()
    assert len(bank.rows()) == 2


def test_the_same_database_by_another_name_is_the_same(bank):
    transfer = bank.prepared()
    transfer.decide(commit=True)
    transfer.die()
    assert "127.0.0.1" in bank.tables[0].url
    for table in bank.tables:
        raise_failed(recover_branches(bank.store, table.url.replace("127.0.0.1", "localhost")))
    bank.assert_whole(transfer.name, committed=True)
    assert bank.rows() == []


@pytest.mark.slow
def test_another_database_by_the_same_name_is_another_one(bank, small_server):
    """Its silence about a branch must not be taken for the branch's end."""
    transfer = bank.prepared()
    transfer.decide(commit=True)
    transfer.die()
    recovered = recover_branches(bank.store, small_server.url)
    assert recovered.ended_count == 0
    assert len(bank.rows()) == 2
    bank.recover()
    bank.assert_whole(transfer.name, committed=True)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_known", [False, True])
def test_a_decision_between_two_looks_is_not_taken_for_an_end(bank, monkeypatch, is_known):
    """Decided and prepared after the server was asked: its row is all that says that it commits."""
    transfer = bank.written()
    real, has_committed = list_prepared, threading.Event()
    if is_known:
        transfer.branches._register(transfer.producer, list(transfer.branches._branches), 60_000)

    def list_then_let_commit(driver, prefix):
        found = real(driver, prefix)
        if not has_committed.is_set():
            has_committed.set()
            transfer.prepare()
            transfer.decide(commit=True)
            transfer.die()
        return found

    monkeypatch.setattr(recovery, "list_prepared", list_then_let_commit)
    assert bank.recover()[0].forgotten == []
    bank.recover()
    bank.assert_whole(transfer.name, committed=True)


def test_a_branch_that_is_made_known_between_two_looks_is_not_presumed_aborted(bank, monkeypatch):
    """Prepared after the coordinator was asked first: it is asked again."""
    transfer = bank.written()
    real = list_prepared

    def let_prepare_then_list(driver, prefix):
        if not transfer.branches.is_registered:
            transfer.prepare()
        return real(driver, prefix)

    monkeypatch.setattr(recovery, "list_prepared", let_prepare_then_list)
    assert [len(done.open) for done in bank.recover()] == [1, 1]
    transfer.decide(commit=True)
    transfer.finish(commit=True)
    bank.assert_whole(transfer.name, committed=True)


def left_decided(bank):
    """Leave a transfer behind whose commit is decided, and whose branches are prepared."""
    transfer = bank.prepared()
    transfer.decide(commit=True)
    transfer.die()
    return transfer


def test_what_somebody_else_is_ending_this_moment_is_waited_for(sqlite_bank, monkeypatch):
    bank, transfer = sqlite_bank, left_decided(sqlite_bank)
    asked: list[str] = []

    def busy_at_first(statements, timeout_seconds):
        (statement,) = statements
        asked.append(statement.text)
        if asked.count(statement.text) <= 2:
            return [ServerAnswer(AnswerKind.REFUSED, "55000", "prepared transaction with this identifier is busy")]
        return exchange(statements, timeout_seconds)

    monkeypatch.setattr(postgresql_branches, "exchange", busy_at_first)
    bank.recover()
    assert len(asked) == 3 * len(bank.tables)
    bank.assert_whole(transfer.name, committed=True)


@pytest.mark.slow
def test_what_stays_busy_is_left_as_it_is(sqlite_bank, monkeypatch):
    bank, transfer = sqlite_bank, left_decided(sqlite_bank)
    busy = ServerAnswer(AnswerKind.REFUSED, "55000", "prepared transaction with this identifier is busy")
    with monkeypatch.context() as patch:
        patch.setattr(recovery, "END_TIMEOUT_SECONDS", 0.05)
        patch.setattr(postgresql_branches, "exchange", lambda *_: [busy])
        with pytest.raises(BranchUnfinished, match=r"is left as it is for now .*is busy.*; try again"):
            bank.recover()
    bank.recover()
    bank.assert_whole(transfer.name, committed=True)


def test_two_recoveries_at_once_are_harmless(bank):
    transfers = [bank.prepared() for _ in range(6)]
    for number, transfer in enumerate(transfers):
        transfer.decide(commit=number % 2 == 0)
        transfer.die()
    start = threading.Barrier(4)
    errors: list[Exception] = []

    def recover(url):
        try:
            start.wait(60)
            raise_failed(recover_branches(bank.store, url))
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=recover, args=[table.url]) for table in bank.tables for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    for number, transfer in enumerate(transfers):
        bank.assert_whole(transfer.name, committed=number % 2 == 0)
    assert bank.rows() == []


def test_a_role_without_the_right_is_told_whose_it_is_and_other_branches_are_ended(bank, other_server):
    transfer = bank.prepared()
    transfer.decide(commit=True)
    transfer.die()
    other_server.create_role("onlooker", "secret")
    try:
        with other_server.connect("checking") as admin:
            admin.execute("GRANT ALL ON account TO onlooker")
        table = type(bank.tables[0])(other_server.url("checking", "onlooker", "secret"))
        with table.connect() as driver:
            own = bank.transfer()
            own.drivers.insert(0, driver)
            own.branches.enlist(driver)
            driver.execute("INSERT INTO account VALUES ('its own', 0)")
            own.prepare()
            own.decide(commit=True)
        recovered = recover_branches(bank.store, table.url)
        assert len(recovered.committed) == 1
        with pytest.raises(PermissionDenied, match="only the role 'postgres', which prepared it") as raised:
            raise_failed(recovered)
        assert "secret" not in str(raised.value)
        bank.recover()
        bank.assert_whole(transfer.name, committed=True)
        assert bank.tables[0].balances()["its own"] == 0
    finally:
        with other_server.connect("checking") as admin:
            admin.execute("DROP OWNED BY onlooker")
        other_server.drop_role("onlooker")


def test_a_member_of_the_role_that_prepared_it_may_end_it(sqlite_bank, other_server):
    other_server.create_role("owner_of_branches", "secret")
    other_server.create_role("operator", "secret")
    try:
        with other_server.connect("checking") as admin:
            admin.execute("GRANT owner_of_branches TO operator")
            admin.execute("GRANT ALL ON account TO owner_of_branches")
        table = type(sqlite_bank.tables[0])
        with table(other_server.url("checking", "owner_of_branches", "secret")).connect() as driver:
            transfer = sqlite_bank.transfer()
            transfer.branches.enlist(driver)
            driver.execute("INSERT INTO account VALUES ('a', 0)")
            transfer.prepare()
            transfer.decide(commit=True)
        url = other_server.url("checking", "operator", "secret")
        raise_failed(recover_branches(sqlite_bank.store, url))
        assert sqlite_bank.tables[0].balances() == {"a": 0}
    finally:
        with other_server.connect("checking") as admin:
            admin.execute("DROP OWNED BY owner_of_branches, operator")
            admin.execute("DROP ROLE owner_of_branches, operator")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("commit", [False, True])
def test_a_branch_whose_role_has_been_dropped_is_left_to_a_superuser(bank, other_server, commit):
    """DROP ROLE does not mind what the role has prepared, and nobody is its member afterwards."""
    other_server.create_role("short_lived", "secret")
    other_server.create_role("upkeep", "secret")
    table = bank.tables[0]
    with other_server.connect("checking") as admin:
        admin.execute("GRANT ALL ON account TO short_lived")
        admin.execute("GRANT short_lived TO upkeep")
    try:
        with closing(type(table)(other_server.url("checking", "short_lived", "secret")).connect()) as driver:
            transfer = bank.transfer()
            transfer.branches.enlist(driver)
            driver.execute("INSERT INTO account VALUES ('a', 0)")
            transfer.prepare()
            transfer.decide(commit=commit)
        with other_server.connect("checking") as admin:
            admin.execute("DROP OWNED BY short_lived")
            admin.execute("DROP ROLE short_lived")
        (gid,) = table.our_gids()
        recovered = recover_branches(bank.store, other_server.url("checking", "upkeep", "secret"))
        with pytest.raises(PermissionDenied, match=r"has been dropped: only a superuser may end it"):
            raise_failed(recovered)
        assert (recovered.ended_count, [row.gid for row in bank.rows()]) == (0, [gid])
        bank.recover()
        assert table.balances() == ({"a": 0} if commit else {})
        assert (table.our_gids(), bank.rows()) == ([], [])
    finally:
        other_server.drop_role("upkeep")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("commit", [False, True])
def test_what_is_in_progress_by_its_number_has_not_ended(sqlite_bank, monkeypatch, commit):
    bank, transfer = sqlite_bank, sqlite_bank.prepared()
    transfer.decide(commit=commit)
    transfer.die()
    with monkeypatch.context() as patch:
        # Its number says otherwise.
        patch.setattr(recovery, "end_prepared", lambda *_, **__: ServerAnswer(AnswerKind.REFUSED, "42704"))
        for table in bank.tables:
            recovered = recover_branches(bank.store, table.url)
            assert recovered.ended_count == 0
            with pytest.raises(BranchUnfinished, match="how it has ended is not known: it is in progress"):
                raise_failed(recovered)
    assert len(bank.rows()) == 2
    bank.recover()
    bank.assert_whole(transfer.name, committed=commit)


@pytest.mark.slow
def test_what_is_no_participant_is_refused(sqlite_bank, no_vote_server):
    with pytest.raises(InvalidUrl, match="not a PostgreSQL database"):
        recover_branches(sqlite_bank.store, "sqlite:///shop.db")
    with pytest.raises(InvalidRequest, match="max_prepared_transactions"):
        recover_branches(sqlite_bank.store, no_vote_server.url)
    with pytest.raises(StoreUnavailable) as raised:
        recover_branches(sqlite_bank.store, "postgresql://bank:secret@127.0.0.1:1/bank")
    assert "secret" not in str(raised.value)


def test_branches_of_another_store_are_left_to_it(bank, tmp_path):
    transfer = bank.prepared()
    with open_store(f"sqlite:///{tmp_path}/another.db") as another:
        for table in bank.tables:
            assert recover_branches(another, table.url).ended_count == 0
    transfer.decide(commit=True)
    transfer.finish(commit=True)
    bank.assert_whole(transfer.name, committed=True)


def test_a_new_producer_of_the_id_decides_and_anybody_ends(bank):
    transfer = bank.prepared()
    transfer.die()
    TransactionCoordinator(bank.store).init_producer_id(transfer.name)
    bank.recover()
    bank.assert_whole(transfer.name, committed=False)


# --- tables -----------------------------------------------------------------------------------------------------------


def test_what_has_ended_otherwise_is_told_though_a_database_of_the_cluster_refuses_afterwards(monkeypatch):
    def stores(left_out):
        yield SimpleNamespace(backend=PostgreSQLBackend(), url="postgresql://a/a")
        left_out[2] = StoreBusy("locked")

    store: Any = SimpleNamespace(read=lambda _: True)
    cluster: Any = SimpleNamespace(is_alone=False, stores=stores)
    once = BranchEndedOtherwise("told once")
    monkeypatch.setattr(recovery, "_recover_member", lambda *_: RecoveredBranches("a", failed=[once]))
    with pytest.raises(BranchEndedOtherwise, match="told once"):
        recover_in_cluster(store, cluster)


def test_a_database_of_the_cluster_that_is_away_is_still_to_be_recovered(monkeypatch):
    away = StoreUnavailable("it is away")

    def stores(left_out):
        yield SimpleNamespace(backend=PostgreSQLBackend(), url="postgresql://a/a")
        left_out[2] = away

    store: Any = SimpleNamespace(read=lambda _: True)
    cluster: Any = SimpleNamespace(is_alone=False, stores=stores)
    monkeypatch.setattr(recovery, "_recover_member", lambda *_: RecoveredBranches("a"))
    with pytest.raises(StoreUnavailable, match="it is away"):
        recover_in_cluster(store, cluster)


@pytest.mark.slow
def test_a_database_of_the_cluster_that_refuses_is_told_unless_it_can_prepare_nothing(
    monkeypatch, tables, no_vote_server
):
    connected = []

    def connect(url):
        connected.append(url)
        return connect_participant(url)

    def refuse(_):
        raise InvalidRequest("GRANT EXECUTE")

    monkeypatch.setattr(recovery, "connect_participant", connect)
    monkeypatch.setattr(recovery, "look_at_database", refuse)
    monkeypatch.setattr(recovery, "check_original", lambda _: None)
    store: Any = SimpleNamespace(read=lambda _: True)

    def cluster_of(url) -> Any:
        member = SimpleNamespace(backend=PostgreSQLBackend(), url=parse_url(url))
        return SimpleNamespace(is_alone=False, stores=lambda _: [member])

    assert recover_in_cluster(store, cluster_of(no_vote_server.url)) == 0
    with pytest.raises(InvalidRequest, match="GRANT EXECUTE"):
        recover_in_cluster(store, cluster_of(tables[0].url))
    # Each is asked on one connection.
    assert len(connected) == 2
    with pytest.raises(StoreUnavailable):
        recover_in_cluster(store, cluster_of("postgresql://bank:secret@127.0.0.1:1/bank"))


def test_every_state_of_a_branch_has_its_moves_and_its_end():
    assert set(ENTERED_FROM) == set(ENDS) == set(BranchState)
    for state, (abort, commit) in ENDS.items():
        assert end_of(state, commit=False) is abort
        if commit is None:
            with pytest.raises(IllegalBranchMove):
                end_of(state, commit=True)
    committable = {state for state, (_, commit) in ENDS.items() if commit is End.COMMIT_PREPARED}
    assert committable == {BranchState.PREPARED}


def test_moves_that_the_table_does_not_have_are_refused():
    for before in BranchState:
        for after in BranchState:
            if before in ENTERED_FROM[after]:
                check_move(before, after)
            else:
                with pytest.raises(IllegalBranchMove):
                    check_move(before, after)


def test_only_what_is_decided_to_commit_is_committed_by_recovery():
    assert set(CURES) == set(Standing)
    assert [standing for standing, cures in CURES.items() if Cure.COMMIT in cures] == [Standing.COMMITTED]
    assert all(unprepared not in (Cure.COMMIT, Cure.ROLL_BACK) for unprepared, _ in CURES.values())
