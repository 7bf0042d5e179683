"""A branch is forgotten by hand: if its database is gone, and never where anybody could still commit it."""

from __future__ import annotations

import pytest
from sqlalchemy import make_url

from txnstore.db.postgresql.branches import connect_participant
from txnstore.errors import BranchEndedOtherwise, InvalidRequest, InvalidUrl, StoreUnavailable
from txnstore.participants import recovery
from txnstore.participants.recovery import forget_branch


@pytest.fixture
def gone(bank):
    """A transfer that is decided to commit, and what is known of its branch in a database that has lost it."""
    transfer = bank.prepared()
    transfer.decide(commit=True)
    transfer.die()
    table = bank.tables[1]
    table.watching.execute(f"ROLLBACK PREPARED '{table.our_gids()[0]}'")
    (found,) = [row for row in bank.rows() if row.database_label.endswith("/savings")]
    assert found.transactional_id == transfer.name
    return found


def test_a_branch_whose_commit_is_lost_is_forgotten_by_force_only(bank, gone):
    urls = [table.url for table in bank.tables]
    with pytest.raises(InvalidRequest, match=r"is decided to commit.*--force"):
        forget_branch(bank.store, gone.gid, urls)
    with pytest.raises(BranchEndedOtherwise, match=rf"`txnstore transactions forget {gone.gid} --force`"):
        bank.recover()
    assert [row.is_missing for row in bank.rows()] == [True]
    with pytest.raises(InvalidRequest, match=r"is decided to commit.*--force"):
        forget_branch(bank.store, gone.gid, urls)
    assert forget_branch(bank.store, gone.gid, urls, force=True) == []
    assert bank.rows() == []
    with pytest.raises(InvalidRequest, match=f"no branch {gone.gid} is known"):
        forget_branch(bank.store, gone.gid, urls, force=True)


def test_what_is_prepared_anywhere_on_a_server_that_can_be_asked_is_not_forgotten(bank, gone):
    (gid,) = bank.tables[0].our_gids()
    # In another database of the same server.
    with pytest.raises(InvalidRequest, match=r"is prepared in [^ ]*/checking.*transactions recover --participant"):
        forget_branch(bank.store, gid, [bank.tables[1].url], force=True)
    away = "postgresql://bank:secret@127.0.0.1:1/bank"
    with pytest.raises(InvalidRequest, match="is prepared in"):
        forget_branch(bank.store, gid, [away, bank.tables[0].url], force=True)
    assert len(bank.rows()) == 2
    with pytest.raises(InvalidUrl):
        forget_branch(bank.store, gid, ["sqlite:///shop.db"], force=True)
    # Whose database is gone leaves it out.
    assert forget_branch(bank.store, gone.gid, force=True) == []
    assert [row.gid for row in bank.rows()] == [gid]
    bank.recover()
    assert bank.rows() == []


@pytest.mark.parametrize("commit", [True, False])
def test_a_branch_is_not_forgotten_while_a_database_that_was_named_is_away(bank, monkeypatch, commit):
    transfer = bank.prepared()
    transfer.decide(commit=commit)
    transfer.die()
    (gid,) = bank.tables[1].our_gids()

    def find_its_server_restarting(url):
        if url == bank.store.url:
            return connect_participant(url)
        raise StoreUnavailable("it restarts")

    with monkeypatch.context() as patched:
        patched.setattr(recovery, "connect_participant", find_its_server_restarting)
        with pytest.raises(StoreUnavailable, match=rf"{gid}.*it restarts.*leave out a participant that is gone"):
            forget_branch(bank.store, gid, [bank.tables[1].url], force=True)
    bank.recover()
    bank.assert_whole(transfer.name, committed=commit)


def test_a_branch_that_was_to_abort_is_forgotten_without_force(bank):
    transfer = bank.prepared()
    for table in bank.tables:
        table.watching.execute(f"ROLLBACK PREPARED '{table.our_gids()[0]}'")
    transfer.decide(commit=False)
    transfer.die()
    for row in bank.rows():
        assert forget_branch(bank.store, row.gid, [table.url for table in bank.tables]) == []
    assert bank.rows() == []


def test_a_branch_whose_transaction_may_still_commit_is_not_forgotten(bank, monkeypatch):
    transfer = bank.written()
    transfer.branches._register(transfer.producer, list(transfer.branches._branches), 60_000)
    gids = [row.gid for row in bank.rows()]

    def commit_then_say_what_was(*_):
        transfer.prepare()
        transfer.decide(commit=True)

    # It votes, and is decided, after the databases were asked.
    monkeypatch.setattr(recovery, "database_of_prepared", commit_then_say_what_was)
    for gid in gids:
        with pytest.raises(InvalidRequest, match=f"is open, and .* what ends the transaction of {transfer.name}"):
            forget_branch(bank.store, gid, [bank.tables[0].url], force=True)
    transfer.branches.prepare(transfer.producer)
    transfer.decide(commit=True)
    transfer.finish(commit=True)
    bank.assert_whole(transfer.name, committed=True)


def test_who_cannot_say_what_is_prepared_is_named_the_stores_own_server_too(bank, monkeypatch, gone):
    asked = []

    def refuse_standby(driver, _):
        asked.append(driver.info.dbname)
        raise InvalidRequest("it is a standby")

    monkeypatch.setattr(recovery, "database_of_prepared", refuse_standby)
    keeps = bank.store.backend.keeps_prepared
    own = [make_url(bank.store.url.url).database] * keeps
    with pytest.raises(InvalidRequest, match=r"prepared in a database that did not answer \(it is a standby\)"):
        forget_branch(bank.store, gone.gid, [bank.tables[0].url], force=True)
    assert asked == [*own, "checking"]
    told = forget_branch(bank.store, gone.gid, force=True)
    assert asked == [*own, "checking", *own]
    assert [str(error) for error in told] == ["it is a standby"] * keeps
