"""The process that coordinates a transaction over two databases dies at any step, and so does the recovery: D1-D8."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import pytest

from tests.participants.bank import Bank, Transfer
from tests.participants.dying import die_at, places_of
from tests.tools.crashes import cut_at_times, noting
from txnstore.db.opening import open_store
from txnstore.db.store import Store
from txnstore.errors import TxnStoreError
from txnstore.participants.recovery import raise_failed, recover_branches
from txnstore.transactions import rows
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.recovery import abort_timed_out

pytestmark = [pytest.mark.slow, pytest.mark.crashes]


class Left(NamedTuple):
    """What is left after a death."""

    state: TransactionState
    outcomes: tuple[str, ...]
    """Of the branches that the coordinator knows of."""

    prepared: tuple[int, ...]
    """How many branches are, in each database."""

    visible: tuple[bool, ...]
    """Whether the transfer is: in the log, in each database."""


@pytest.fixture
def victims(bank) -> Iterator[Store]:
    """The store as processes see it that die."""
    url = bank.store.url.url.render_as_string(hide_password=False)
    with open_store(url, clock=bank.clock) as store:
        yield store


def look(bank: Bank, name: str) -> Left:
    row = bank.store.read(lambda connection: rows.read_row(connection, name)).row
    assert row is not None
    outcomes = sorted(str(found.commit) for found in bank.rows() if found.transactional_id == name)
    prepared = tuple(len(table.our_gids()) for table in bank.tables)
    return Left(row.state, tuple(outcomes), prepared, tuple(bank.is_in(name)))


def is_committed(left: Left) -> bool:
    return left.state is TransactionState.COMPLETE_COMMIT


def check(left: Left) -> None:
    # D2: nothing is visible anywhere without the decision; D3: one decision.
    in_log, *in_tables = left.visible
    assert in_log == is_committed(left)
    assert not any(in_tables) or is_committed(left)
    assert len(set(left.outcomes)) <= 1
    # Whatever is prepared is known to the coordinator.
    assert sum(left.prepared) <= len(left.outcomes)


def by_age(bank: Bank, transfer: Transfer) -> None:
    bank.recover()
    bank.clock.advance(60_001)
    bank.recover()
    abort_timed_out(bank.store)


def by_a_new_producer(bank: Bank, transfer: Transfer) -> None:
    TransactionCoordinator(bank.store).init_producer_id(transfer.name)


def by_both(bank: Bank, transfer: Transfer) -> None:
    by_a_new_producer(bank, transfer)
    by_age(bank, transfer)


AFTERLIVES = itertools.cycle([by_age, by_a_new_producer, by_both])


def commit_late(bank: Bank, transfer: Transfer, *, committed: bool) -> None:
    """The old coordinator was not dead: it decides now, and finds it decided (D3, D6)."""
    try:
        TransactionCoordinator(bank.store).end_transaction(transfer.name, transfer.producer, commit=True)
    except TxnStoreError:
        return
    assert committed


def resolve(bank: Bank, transfer: Transfer, left: Left, afterlife: Callable[[Bank, Transfer], None]) -> None:
    afterlife(bank, transfer)
    bank.recover()
    bank.assert_whole(transfer.name, committed=is_committed(left))
    commit_late(bank, transfer, committed=is_committed(left))
    # D8: again, nothing is left to do.
    assert all(done.ended_count == 0 and not done.open for done in bank.recover())
    bank.assert_whole(transfer.name, committed=is_committed(left))
    assert bank.rows() == []


def commit(transfer: Transfer) -> None:
    transfer.commit()


def abort_after_the_vote(transfer: Transfer) -> None:
    transfer.prepare()
    transfer.abort()


ACTIONS = [commit, abort_after_the_vote]


def deaths(bank: Bank, victims: Store, action: Callable[[Transfer], None]) -> Iterator[tuple[str, Transfer, Left]]:
    trial = bank.written(store=victims)
    places = places_of(lambda: action(trial))
    bank.assert_whole(trial.name, committed=action is commit)
    trial.die()
    victims.engine.dispose()
    for number, (last, place) in enumerate(pairwise(["", *places]), 1):
        if last.startswith("after") and place.startswith("before"):
            # All is as it was after the last one.
            continue
        transfer = bank.written(store=victims)
        with cut_at_times(number), noting(place):
            assert die_at(number, lambda transfer=transfer: action(transfer)) == place
            transfer.die()
            victims.engine.dispose()
        with noting(place):
            left = look(bank, transfer.name)
            check(left)
            yield place, transfer, left


@pytest.mark.parametrize("action", ACTIONS)
def test_a_death_anywhere_leaves_what_recovery_makes_whole(bank, victims, action):
    seen: list[Left] = []
    places: list[str] = []
    for place, transfer, left in deaths(bank, victims, action):
        places.append(place)
        if seen.count(left) < 3:
            resolve(bank, transfer, left, next(AFTERLIVES))
        else:
            # Most statements change nothing: what is left is as before, and what comes of it as well.
            by_a_new_producer(bank, transfer)
            bank.recover()
            bank.assert_whole(transfer.name, committed=is_committed(left))
        seen.append(left)
    # All of it was come by: registration, both votes, decision, both ends.
    assert sum(place.startswith(("after 1 of PREPARE", "after 2 of PREPARE")) for place in places) == 2
    ends = "COMMIT PREPARED" if action is commit else "ROLLBACK PREPARED"
    assert sum(f" of {ends}" in place for place in places) == 2
    assert sum("(COMMIT)" in place for place in places) == 2
    assert {sum(left.prepared) for left in seen} == {0, 1, 2}
    assert {left.state for left in seen} >= {TransactionState.EMPTY, TransactionState.ONGOING}
    assert any(is_committed(left) for left in seen) == (action is commit)


@pytest.mark.parametrize("first", ["after 2 of PREPARE", "before COMMIT PREPARED"])
def test_a_second_death_in_the_recovery_leaves_what_the_next_one_makes_whole(sqlite_bank, first):
    """Both branches are prepared, and nothing is decided, or all; then each place of the recovery of one of them."""
    bank = sqlite_bank
    trial = bank.written()
    number = next(n for n, place in enumerate(places_of(trial.commit), 1) if place.startswith(first))
    with open_store(str(bank.store.url), clock=bank.clock) as victims:
        for second in itertools.count(1):
            transfer = bank.written(store=victims)
            assert die_at(number, transfer.commit) is not None
            transfer.die()
            victims.engine.dispose()
            left = look(bank, transfer.name)
            assert left.prepared == (1, 1)
            bank.clock.advance(60_001)
            with cut_at_times(second):
                place = die_at(second, lambda: raise_failed(recover_branches(victims, bank.tables[0].url)))
                victims.engine.dispose()
            with noting(f"{place}, in the recovery"):
                check(look(bank, transfer.name))
                bank.recover()
                bank.assert_whole(transfer.name, committed=is_committed(left))
                commit_late(bank, transfer, committed=is_committed(left))
                assert bank.rows() == []
            if place is None:
                assert second > 20
                break


def test_the_steps_of_a_transaction_over_two_databases_are_few(bank):
    """Two database transactions on the log, and two statements to each of the others, sent to all of them at once."""
    transfer = bank.written()
    places = places_of(transfer.commit)
    assert [place for place in places if place.startswith("before") and "PREPARE" in place] == [
        "before PREPARE TRANSACTION | PREPARE TRANSACTION",
        "before COMMIT PREPARED | COMMIT PREPARED",
    ]
    assert sum(place.startswith("before") and "(COMMIT)" in place for place in places) == 2
