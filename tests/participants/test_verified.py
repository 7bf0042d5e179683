"""The verification of branches: those that nobody knows, and those that contradict their transaction; no others."""

from __future__ import annotations

import threading
from contextlib import closing

import psycopg
import pytest
from sqlalchemy import delete, update

from txnstore.db.opening import open_store
from txnstore.db.schema import stores, transaction_branches, transactions
from txnstore.db.url import parse_url
from txnstore.participants.branch_rules import new_gid
from txnstore.testing.invariants import Invariant
from txnstore.testing.postgres_server import connection_string
from txnstore.verification import branches as branches_module
from txnstore.verification.branches import branch_violations

UNKNOWN = "it is prepared, and nobody knows its transaction"


def found(bank, *, asked=True):
    violations = branch_violations(bank.store, [parse_url(table.url) for table in bank.tables] if asked else ())
    assert {violation.invariant for violation in violations} <= {Invariant.BRANCHES_KNOWN}
    return [(violation.place.gid, violation.seen) for violation in violations]


def gids(bank):
    return sorted(gid for table in bank.tables for gid in table.our_gids())


def change(bank, statement):
    bank.store.write(lambda connection: connection.execute(statement))


@pytest.mark.slow
def test_branches_of_transactions_that_go_on_or_were_decided_are_right(bank):
    open_, committed, aborted = bank.prepared(), bank.prepared(), bank.prepared()
    assert found(bank) == []
    committed.decide(commit=True)
    aborted.decide(commit=False)
    assert found(bank) == []
    committed.finish(commit=True)
    aborted.finish(commit=False)
    assert found(bank) == []
    open_.commit()
    assert found(bank) == []
    bank.recover()
    assert found(bank) == []


def test_what_is_prepared_and_not_known_is_found_where_it_is_asked_for(bank):
    transfer = bank.prepared()
    change(bank, delete(transaction_branches))
    assert found(bank) == [(gid, UNKNOWN) for gid in gids(bank)]
    assert found(bank, asked=False) == []
    transfer.die()
    bank.recover()
    assert found(bank) == []


def test_what_may_go_either_way_though_its_transaction_is_over_is_found(bank):
    transfer = bank.prepared()
    transfer.decide(commit=False)
    assert found(bank) == []
    change(bank, update(transaction_branches).values(outcome=None))
    seen = "it may go either way, and its transaction is over"
    assert found(bank) == [(gid, seen) for gid in gids(bank)]
    change(bank, delete(transactions).where(transactions.c.transactional_id == transfer.name))
    assert found(bank, asked=False) == [(gid, seen) for gid in gids(bank)]


def test_what_is_to_end_otherwise_than_was_decided_is_found(bank):
    transfer = bank.prepared()
    transfer.decide(commit=True)
    change(bank, update(transaction_branches).values(outcome=0))
    assert [seen for _, seen in found(bank)] == ["it is to ABORT, and its transaction is decided to COMMIT"] * 2
    other = bank.prepared()
    of_other = transaction_branches.c.transactional_id == other.name
    change(bank, delete(transaction_branches).where(~of_other))
    change(bank, update(transaction_branches).values(outcome=1))
    left = [seen for _, seen in found(bank, asked=False)]
    assert left == ["it is to COMMIT, and its transaction is not decided"] * 2


def test_who_prepares_or_ends_between_two_looks_is_not_wrong(bank, monkeypatch):
    """One that is prepared after the rows were read is not in the first look, one that has ended not in the last."""
    read, early = branches_module._read_known, bank.prepared()
    transfers: list[object] = []

    def others_go_on(connection):
        known = read(connection)
        early.die()
        return known

    monkeypatch.setattr(branches_module, "_read_known", others_go_on)
    prepared = branches_module._prepared

    def looked(store, participants):
        seen = prepared(store, participants)
        if not transfers:
            # Between the first look and the rows: this one ends, is forgotten, and another one begins.
            early.decide(commit=True)
            bank.recover()
            transfers.append(bank.prepared())
        return seen

    monkeypatch.setattr(branches_module, "_prepared", looked)
    assert found(bank) == []


@pytest.mark.slow
def test_transfers_that_go_on_meanwhile_are_never_wrong(bank):
    stop = threading.Event()

    def transfer_on():
        while not stop.is_set():
            bank.written().commit()
            bank.written().abort()
            bank.recover()

    thread = threading.Thread(target=transfer_on)
    thread.start()
    try:
        assert [found(bank) for _ in range(30)] == [[]] * 30
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def orphan(txnstore_postgres_server, txnstore_postgresql_url):
    """A store, and something prepared under its name in another database of the same server."""
    server = txnstore_postgres_server
    url = connection_string(server.url(server.maintenance_database))
    with open_store(txnstore_postgresql_url) as store, closing(psycopg.connect(url, autocommit=True)) as connection:
        gid = new_gid(store.store_uuid)
        connection.execute("BEGIN")
        connection.execute("SELECT pg_current_xact_id()")
        connection.execute(f"PREPARE TRANSACTION '{gid}'")
        yield store, gid
        connection.execute(f"ROLLBACK PREPARED '{gid}'")


def test_the_databases_of_the_stores_own_server_are_looked_at_by_themselves(orphan):
    store, gid = orphan
    (violation,) = branch_violations(store)
    assert (violation.place.gid, violation.seen) == (gid, UNKNOWN)


def test_a_copy_leaves_alone_what_is_its_originals(orphan):
    store, _ = orphan
    store.write(lambda connection: connection.execute(update(stores).values(database_identity="1:1")))
    assert branch_violations(store) == []
