"""Producers with one transactional id, and requests that come late: fenced in every order of database transactions."""

from __future__ import annotations

import pytest

from tests.tools.interleaving import explore
from txnstore.db.store import Store
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.rows import read_row

pytestmark = pytest.mark.slow_on_postgresql


def transaction_of(store: Store, transactional_id: str):
    row = store.read(lambda connection: read_row(connection, transactional_id).row)
    assert row is not None
    return row


def test_of_two_producers_with_one_transactional_id_the_one_that_came_last_wins(world, in_turn):
    def make():
        setting = world.setting()

        def life(name, store):
            producer = setting.producer(name, store)
            return in_turn(
                producer.init,
                lambda: producer.append(name, {"p0": [f"{name}/1"], "p1": [f"{name}/2", f"{name}/3"]}),
                lambda: producer.end(name, commit=True),
            )

        def winner_committed(finished):
            *_, winner = setting.order_of("init")
            assert finished[winner].result() == ["ok"] * 3

        actors = {"first": life("first", world.first), "second": life("second", world.second)}
        return setting.scenario(actors, at_end=winner_committed, alike=actors)

    assert explore(make).orders == 10


@pytest.mark.slow
@pytest.mark.parametrize("writes_elsewhere", [False, True])
def test_a_producer_that_comes_during_the_commit_of_another_finds_it_committed_or_aborts_it(
    world, in_turn, writes_elsewhere
):
    def make():
        setting = world.setting()
        old = setting.producer("old", world.first, writes_elsewhere=writes_elsewhere)
        new = setting.producer("new", world.second)
        old.init()
        old.append("old", {"p0": ["old/1"], "p1": ["old/2"]})
        identity = old.identity

        def new_one_works(finished):
            assert finished["new"].result() == ["ok"] * 2
            new.append("new", {"p0": ["new/1"], "p1": ["new/2"]})
            new.end("new", commit=True)

        return setting.scenario(
            {
                "old": in_turn(lambda: old.end("old", commit=True)),
                "new": in_turn(new.init, lambda: new.resolve("old", identity)),
            },
            at_end=new_one_works,
        )

    # One commit is one database transaction, or at most five: the decision, two markers, nothing left, completion.
    orders = explore(make).orders
    assert orders >= 10 if writes_elsewhere else orders == 3


@pytest.mark.slow_but_first
@pytest.mark.parametrize("commit", [True, False])
def test_an_end_that_comes_late_ends_no_other_transaction_than_its_own(world, in_turn, commit):
    def make():
        setting = world.setting()
        producer = setting.producer("producer", world.first)
        producer.init()
        producer.append("one", {"p0": ["one/1"], "p1": ["one/2"]})
        late = setting.producer("late", world.second)
        late.become(producer.identity)

        def second_one_goes_on():
            row = transaction_of(world.observer, setting.transactional_id)
            if row.transaction_number == 2 and setting.order_of("end").count("producer") < 2:
                assert row.state is TransactionState.ONGOING

        def producer_was_not_disturbed(finished):
            assert finished["producer"].result() == ["ok"] * 3
            answers.update(finished["late"].result())

        return setting.scenario(
            {
                "producer": in_turn(
                    lambda: producer.end("one", commit=commit),
                    lambda: producer.append("two", {"p0": ["two/1"], "p1": ["two/2"]}),
                    lambda: producer.end("two", commit=not commit),
                ),
                "late": in_turn(lambda: late.end("one", commit=commit)),
            },
            after_step=second_one_goes_on,
            at_end=producer_was_not_disturbed,
        )

    answers: set[str] = set()
    assert explore(make).orders == 4
    # In time, or as a repetition, it is answered; later it is refused.
    assert answers == {"ok", "ProducerFenced"}


def test_a_batch_that_comes_after_its_transaction_was_aborted_begins_no_other_one(world, in_turn):
    def make():
        setting = world.setting()
        producer = setting.producer("producer", world.first)
        producer.init()
        producer.append("one", {"p0": ["one/1"]})
        late = setting.producer("late", world.second)
        late.become(producer.identity, producer.sequences)

        def no_other_one_begins():
            row = transaction_of(world.observer, setting.transactional_id)
            if setting.order_of("end") == ["producer"] and setting.order_of("append").count("producer") < 2:
                assert row.state is TransactionState.COMPLETE_ABORT

        def producer_was_not_disturbed(finished):
            assert finished["producer"].result() == ["ok"] * 3
            answers.update(finished["late"].result())

        return setting.scenario(
            {
                "producer": in_turn(
                    lambda: producer.end("one", commit=False),
                    lambda: producer.append("two", {"p0": ["two/1"], "p1": ["two/2"]}),
                    lambda: producer.end("two", commit=True),
                ),
                "late": in_turn(lambda: late.append("one", {"p0": ["one/late"], "p1": ["one/late"]})),
            },
            after_step=no_other_one_begins,
            at_end=producer_was_not_disturbed,
        )

    answers: set[str] = set()
    assert explore(make).orders == 4
    assert answers == {"ok", "ProducerFenced"}
