"""The states of a transaction: Kafka's table of moves, numbers and names, written down a second time."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from txnstore.transactions.protocol import (
    AT_REST,
    DECIDED,
    EXPIRABLE,
    PREVIOUS_STATES,
    STORED,
    IllegalTransition,
    TransactionState,
    check_transition,
)

#: Number, name, the names of the states before it, and whether the transactional id may expire in it.
KAFKA = [
    (0, "Empty", "Empty CompleteCommit CompleteAbort", True),
    (1, "Ongoing", "Ongoing Empty CompleteCommit CompleteAbort", False),
    (2, "PrepareCommit", "Ongoing", False),
    (3, "PrepareAbort", "Ongoing PrepareEpochFence Empty CompleteCommit CompleteAbort", False),
    (4, "CompleteCommit", "PrepareCommit", True),
    (5, "CompleteAbort", "PrepareAbort", True),
    (6, "Dead", "Empty CompleteAbort CompleteCommit", False),
    (7, "PrepareEpochFence", "Ongoing", False),
]
NAMES = [name for _, name, _, _ in KAFKA]
ALLOWED = {(before, after) for _, after, befores, _ in KAFKA for before in befores.split()}
BY_NAME = {state.kafka_name: state for state in TransactionState}


@pytest.mark.parametrize(("number", "name"), [pytest.param(row[0], row[1], id=row[1]) for row in KAFKA])
def test_a_state_has_kafkas_number_and_name(number: int, name: str) -> None:
    assert TransactionState(number).kafka_name == name


def test_there_are_no_other_states() -> None:
    assert [state.kafka_name for state in TransactionState] == NAMES


@pytest.mark.parametrize(
    ("before", "after"), [pytest.param(*pair, id=f"{pair[0]}-to-{pair[1]}") for pair in product(NAMES, NAMES)]
)
def test_a_move_is_allowed_exactly_if_kafkas_table_has_it(before: str, after: str) -> None:
    if (before, after) in ALLOWED:
        check_transition(BY_NAME[before], BY_NAME[after])
        return
    with pytest.raises(IllegalTransition, match=f"^{before} -> {after}$"):
        check_transition(BY_NAME[before], BY_NAME[after])


@pytest.mark.parametrize(("name", "expires"), [pytest.param(row[1], row[3], id=row[1]) for row in KAFKA])
def test_an_id_may_expire_exactly_in_the_states_that_kafka_says(name: str, expires: bool) -> None:
    assert (BY_NAME[name] in EXPIRABLE) is expires


def test_every_state_is_open_decided_at_rest_or_never_stored() -> None:
    groups = [{TransactionState.ONGOING}, DECIDED, AT_REST, set(TransactionState) - STORED]
    assert sorted(state for group in groups for state in group) == sorted(TransactionState)


def test_a_decision_is_never_reversed() -> None:
    """From a decision every way leads to its own completion, whatever comes after."""
    for decided, complete in [("PrepareCommit", "CompleteCommit"), ("PrepareAbort", "CompleteAbort")]:
        followers = {after for after, befores in PREVIOUS_STATES.items() if BY_NAME[decided] in befores}
        assert followers == {BY_NAME[complete]}


def test_a_transaction_can_go_the_whole_way_and_begin_again() -> None:
    way = "Empty Ongoing PrepareCommit CompleteCommit Ongoing PrepareEpochFence PrepareAbort CompleteAbort Empty Dead"
    for before, after in pairwise(way.split()):
        check_transition(BY_NAME[before], BY_NAME[after])
