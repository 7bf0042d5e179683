"""Ctrl-C in a transaction over other databases: it ends as a whole, and the connections are their owners'."""

from __future__ import annotations

import contextlib

import pytest

from tests.clients.moments import attempt, every_interrupt
from tests.clients.steps import bring_to_an_end
from tests.participants.enlisting import *  # noqa: F403 - the fixtures
from tests.participants.enlisting import TIMEOUT, assert_everywhere, assert_nowhere, move, records, topic_of, transfer
from txnstore import KafkaException
from txnstore.db.opening import open_store
from txnstore.errors import BranchUnfinished
from txnstore.participants.branches import Branches
from txnstore.participants.recovery import raise_failed, recover_branches

#: Whose moments are tried: what lies below is tried as one.
FILES = {"participants/branches.py", "producer/enlistment.py", "producer/transactions.py"}

CALLS = {
    "begin": lambda producer, driver: producer.begin_transaction(),
    "enlist": lambda producer, driver: producer.enlist(driver),
    "commit": lambda producer, driver: producer.commit_transaction(TIMEOUT),
    "abort": lambda producer, driver: producer.abort_transaction(TIMEOUT),
}


def interrupted(*_, **__):
    raise KeyboardInterrupt


def commit_without_branches(producer, monkeypatch):
    """Commit; Ctrl-C comes before the branches are ended."""
    with monkeypatch.context() as patch:
        patch.setattr(producer._transactions._branches, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            producer.commit_transaction(TIMEOUT)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_anywhere_leaves_whole_transactions_and_the_owners_their_connections(
    url, producer, tables, name, monkeypatch, call
):
    table = tables[0]
    driver = table.connect()
    for at, interrupt in every_interrupt(FILES):
        producer.begin_transaction()
        if call != "enlist":
            producer.enlist(driver)
            move(driver, f"{at}", 0)
            producer.produce(topic_of(producer), f"{at}")
        if call == "begin":
            commit_without_branches(producer, monkeypatch)
        attempt(interrupt, lambda driver=driver: CALLS[call](producer, driver))
        if interrupt.where is not None or call in {"begin", "enlist"}:
            bring_to_an_end(producer)
        if driver.closed:
            driver = table.connect()
        # What its owner does by himself is not ended by what was left of the transaction before.
        driver.rollback()
        move(driver, f"own {at}", 0)
        producer.begin_transaction()
        driver.commit()
        producer.enlist(driver)
        move(driver, f"next {at}", 0)
        producer.produce(topic_of(producer), f"next {at}")
        producer.commit_transaction(TIMEOUT)
    driver.close()
    with open_store(url) as store:
        raise_failed(recover_branches(store, table.url))
    assert table.our_gids() == []
    held = set(table.balances())
    own = {f"own {number}" for number in range(1, at + 1)}
    assert own <= held
    assert {f"next {number}" for number in range(1, at + 1)} <= held
    assert held - own == set(records(url, topic_of(producer)))


def test_after_an_interrupt_behind_the_commit_the_next_transaction_has_its_own_branches(
    producer, drivers, tables, name, monkeypatch
):
    transfer(producer, drivers, name)
    commit_without_branches(producer, monkeypatch)
    transfer(producer, drivers, "next")
    producer.commit_transaction(TIMEOUT)
    assert [table.balances() for table in tables] == [{name: -1, "next": -1}, {name: 1, "next": 1}]


def test_an_abort_behind_an_interrupted_commit_leaves_that_to_be_repeated(producer, drivers, tables, name, monkeypatch):
    def leave(*_, **__):
        raise BranchUnfinished("it is away")

    transfer(producer, drivers, name)
    commit_without_branches(producer, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(Branches, "finish", leave)
        patch.setattr(Branches, "settle", leave)
        # Each time: it is decided.
        for _ in range(2):
            with pytest.raises(KafkaException, match="state Ready"):
                producer.abort_transaction(TIMEOUT)
    producer.commit_transaction(TIMEOUT)
    assert_everywhere(tables, name)


def test_a_begin_that_is_interrupted_takes_nothing_of_the_last_transaction_along(
    producer, drivers, tables, name, monkeypatch
):
    transfer(producer, drivers, name)
    with monkeypatch.context() as patch:
        # Aborted, but the branches are not ended yet.
        patch.setattr(producer._transactions._branches, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            producer.abort_transaction(TIMEOUT)
        patch.setattr(producer._transactions._branches, "settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            producer.begin_transaction()
    with contextlib.suppress(KafkaException):
        producer.produce(topic_of(producer), "next")
        producer.commit_transaction(TIMEOUT)
    with producer.transaction():
        producer.produce(topic_of(producer), "last")
    assert_nowhere(tables)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["commit_transaction", "abort_transaction"])
def test_what_was_decided_before_an_interrupted_begin_says_nothing_of_what_has_begun(
    url, producer, drivers, tables, name, monkeypatch, call
):
    def leave(*_, **__):
        raise BranchUnfinished("it is away")

    end, is_commit = getattr(producer, call), call == "commit_transaction"
    transfer(producer, drivers, name)
    with monkeypatch.context() as patch:
        patch.setattr(Branches, "finish", leave)
        patch.setattr(Branches, "settle", leave)
        with pytest.raises(KafkaException, match="it is away"):
            end(TIMEOUT)
        # In the middle of giving them up.
        patch.setattr(Branches, "forget_ended", interrupted)
        with pytest.raises(KeyboardInterrupt):
            producer.begin_transaction()
    producer.begin_transaction()
    producer.produce(topic_of(producer), "next")
    end(TIMEOUT)
    with producer.transaction():
        producer.produce(topic_of(producer), "last")
    assert records(url, topic_of(producer)) == [*([name, "next"] if is_commit else []), "last"]
    for driver in drivers:
        driver.rollback()
    with open_store(url) as store:
        for table in tables:
            raise_failed(recover_branches(store, table.url))
    assert [bool(table.balances()) for table in tables] == [is_commit] * 2
