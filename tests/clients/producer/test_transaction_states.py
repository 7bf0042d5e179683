"""The tables of a transactional producer's states fit together."""

from __future__ import annotations

from txnstore.clients.model.errors import KafkaError
from txnstore.clients.producer.state import (
    ALLOWED_IN,
    ENTERED_FROM,
    RESUMABLE,
    TransactionCall,
    TransactionStage,
    transaction_error_of,
)
from txnstore.errors import ERRORS, ProducerFenced, TransactionAbortable


def test_every_state_has_its_row_and_every_call_its_states():
    assert set(ENTERED_FROM) == set(TransactionStage)
    assert set(ALLOWED_IN) == set(TransactionCall)
    assert set(TransactionCall) >= RESUMABLE


def test_every_state_is_reached_from_the_first_and_the_fatal_one_is_never_left():
    reached = {TransactionStage.INIT}
    while True:
        more = {
            state for state, sources in ENTERED_FROM.items() if sources & (reached - {TransactionStage.FATAL_ERROR})
        }
        if more <= reached:
            break
        reached |= more
    assert reached == set(TransactionStage)
    left_to = {state for state, sources in ENTERED_FROM.items() if TransactionStage.FATAL_ERROR in sources}
    assert left_to == {TransactionStage.FATAL_ERROR}


def test_an_error_of_the_store_is_either_fatal_or_takes_an_abort():
    for call in (None, *TransactionCall):
        for error in ERRORS.values():
            kafka_error = transaction_error_of(error(), call)
            assert kafka_error.fatal() != kafka_error.txn_requires_abort(), error
            assert not kafka_error.retriable()


def test_only_a_newer_producer_is_called_fenced():
    assert transaction_error_of(ProducerFenced(), TransactionCall.COMMIT).code() == KafkaError._FENCED
    aborted = transaction_error_of(TransactionAbortable("aborted for its age"), TransactionCall.COMMIT)
    assert (aborted.txn_requires_abort(), aborted.str()) == (True, "aborted for its age")
