"""Processes are killed, SIGKILL: the one that coordinates, and either server, at each step of a commit."""

from __future__ import annotations

import signal
import uuid
from contextlib import ExitStack, closing

import pytest

from tests.participants.bank import DATABASES, Bank, Table, Transfer, make_table
from tests.participants.children import Task, transfer_and_be_killed
from tests.participants.dying import at_each_place, places_of
from tests.participants.test_crashes import check, is_committed, look
from tests.tools.crashes import noting
from tests.tools.fork_server import fork_server
from txnstore.db.opening import open_store
from txnstore.errors import TransactionAbortable, TxnStoreError
from txnstore.testing.manual_clock import ManualClock
from txnstore.testing.private_cluster import PrivateCluster
from txnstore.transactions.coordinator import TransactionCoordinator

pytestmark = pytest.mark.slow

CHILD_TIMEOUT_SECONDS = 180


def decisive(places: list[str]) -> list[int]:
    """Return the numbers of the places around what is durable: commits of the coordinator, votes and ends elsewhere."""
    return [n for n, place in enumerate(places, 1) if "PREPARE" in place or "(COMMIT)" in place]


def test_a_coordinator_that_is_killed_leaves_what_recovery_makes_whole(bank):
    places = places_of(bank.written().commit)
    context = fork_server()
    log_url = bank.store.url.url.render_as_string(hide_password=False)
    tables = tuple(table.url for table in bank.tables)
    outcomes = set()
    bank.recover()
    for number in decisive(places):
        name = f"killed-{uuid.uuid4().hex[:8]}"
        task = Task(log_url, tables, bank.clock.now_ms(), bank.partition_id, name, number)
        child = context.Process(target=transfer_and_be_killed, args=[task])
        child.start()
        child.join(CHILD_TIMEOUT_SECONDS)
        with noting(places[number - 1]):
            assert child.exitcode == -signal.SIGKILL
            left = look(bank, name)
            check(left)
            TransactionCoordinator(bank.store).init_producer_id(name)
            bank.recover()
            bank.assert_whole(name, committed=is_committed(left))
            assert bank.rows() == []
            outcomes.add((is_committed(left), left.prepared))
    assert outcomes == {
        (False, (0, 0)),
        (False, (1, 0)),
        (False, (1, 1)),
        (True, (1, 1)),
        (True, (0, 1)),
        (True, (0, 0)),
    }


@pytest.fixture
def two_servers():
    """The server of the log, and that of the accounts; both are killed."""
    with PrivateCluster(fsync=False) as log_server, PrivateCluster(fsync=False) as other_server:
        log_server.create_database("log")
        for name in DATABASES:
            other_server.create_database(name)
            make_table(other_server, name)
        yield log_server, other_server


def commit_whatever_comes(transfer: Transfer) -> bool:
    """Do as a producer does; return what it believes."""
    try:
        _until_answered(transfer.prepare)
    except TransactionAbortable:
        _until_answered(lambda: transfer.decide(commit=False))
        _until_answered(lambda: transfer.finish(commit=False))
        return False
    _until_answered(lambda: transfer.decide(commit=True))
    _until_answered(lambda: transfer.finish(commit=True))
    return True


def _until_answered(call):
    for _ in range(20):
        try:
            return call()
        except TxnStoreError as error:
            if not (error.retriable or error.outcome_unknown):
                raise
    raise AssertionError("never answered")


def test_servers_that_are_killed_at_any_step_delay_a_transaction_and_do_not_tear_it(two_servers):
    log_server, other_server = two_servers
    clock = ManualClock()
    believed: dict[tuple[bool, str], bool] = {}
    tables = [Table(other_server.url(name)) for name in DATABASES]
    with open_store(log_server.url("log"), clock=clock) as store, ExitStack() as stack:
        for table in tables:
            stack.callback(table.close)
            table.begin_test()
        bank = stack.enter_context(closing(Bank(store, clock, tables)))
        places = places_of(bank.written().commit)
        for number in decisive(places):
            place = places[number - 1]
            # The log's server is killed around its commits, the other around its votes and ends; both when all have
            # voted.
            servers = [log_server] if "(COMMIT)" in place else [other_server]
            if place.startswith("after 2 of PREPARE"):
                servers = [other_server, log_server]
            transfer = bank.written()
            with noting(f"killed {place}"):
                committed = commit_whatever_comes_when(number, servers, transfer)
                believed["(COMMIT)" in place, place] = committed
                bank.recover()
                bank.assert_whole(transfer.name, committed=committed)
                assert bank.rows() == []
    # Without a vote there is no commit; a server that comes back after its vote only delays it.
    assert [place for (_, place), committed in believed.items() if not committed] == [
        "before PREPARE TRANSACTION | PREPARE TRANSACTION",
        "after 1 of PREPARE TRANSACTION | PREPARE TRANSACTION",
    ]


def commit_whatever_comes_when(number: int, servers: list[PrivateCluster], transfer: Transfer) -> bool:
    seen = 0

    def arrive(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            for server in servers:
                server.kill()
            for server in servers:
                server.start()

    with at_each_place(arrive):
        return commit_whatever_comes(transfer)
