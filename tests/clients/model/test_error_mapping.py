"""Every error of txnstore has a row in the table to Kafka's errors, and its text arrives."""

from __future__ import annotations

import pytest

from txnstore import errors
from txnstore.clients.model.errors import (
    ERROR_CODES,
    ERROR_ROWS,
    KafkaError,
    KafkaException,
    kafka_error_of,
    kafka_exception_of,
)
from txnstore.errors import ERRORS, Recovery

#: librdkafka's name for a code that Kafka calls otherwise.
LIBRDKAFKA_NAMES = {"CORRUPT_MESSAGE": "INVALID_MSG"}

ALL_ERRORS = sorted(ERRORS.values(), key=lambda error: error.code)


def test_every_error_has_a_row():
    assert set(ERROR_ROWS) == set(ERRORS.values())


@pytest.mark.parametrize("error", ALL_ERRORS, ids=lambda error: error.__name__)
def test_no_text_is_lost(error):
    assert "what happened, and what to do" in kafka_error_of(error("what happened, and what to do")).str()
    assert str(error()) in kafka_error_of(error()).str()


@pytest.mark.parametrize("error", ALL_ERRORS, ids=lambda error: error.__name__)
def test_every_row_is_a_code_of_the_table(error):
    assert kafka_error_of(error()).code() in ERROR_CODES


@pytest.mark.parametrize(
    "error", [error for error in ALL_ERRORS if error.kafka_name is not None], ids=lambda error: error.__name__
)
def test_an_error_of_kafkas_keeps_its_code_and_its_name(error):
    kafka_error = kafka_error_of(error())
    assert kafka_error.code() == error.code
    assert kafka_error.name() == LIBRDKAFKA_NAMES.get(error.kafka_name, error.kafka_name)


@pytest.mark.parametrize("error", ALL_ERRORS, ids=lambda error: error.__name__)
def test_what_may_be_called_again_is_retriable_and_nothing_else(error):
    assert kafka_error_of(error()).retriable() is (error.recovery is Recovery.RETRY)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.StoreUnavailable, KafkaError._TRANSPORT),
        (errors.OutcomeUnknown, KafkaError._TIMED_OUT),
        (errors.StoreBusy, KafkaError._TIMED_OUT),
        (errors.StatementTimedOut, KafkaError._TIMED_OUT),
        (errors.WriteConflict, KafkaError._TIMED_OUT),
        (errors.TransactionPoisoned, KafkaError._TIMED_OUT),
        (errors.StoreFull, KafkaError.KAFKA_STORAGE_ERROR),
        (errors.StoreReadOnly, KafkaError.KAFKA_STORAGE_ERROR),
        (errors.StoreMoved, KafkaError._INVALID_ARG),
        (errors.StoreDamaged, KafkaError.KAFKA_STORAGE_ERROR),
        (errors.PermissionDenied, KafkaError.CLUSTER_AUTHORIZATION_FAILED),
        (errors.InvalidUrl, KafkaError._INVALID_ARG),
        (errors.SchemaOutdated, KafkaError.UNSUPPORTED_VERSION),
        (errors.SchemaTooNew, KafkaError.UNSUPPORTED_VERSION),
        (errors.ForeignSchema, KafkaError._INVALID_ARG),
        (errors.StatementFailed, KafkaError.UNKNOWN),
        (errors.StoreClosed, KafkaError._DESTROY),
    ],
)
def test_an_error_of_our_own_has_the_nearest_code(error, code):
    assert kafka_error_of(error()).code() == code


def test_an_unknown_outcome_is_said_to_be_one():
    assert "the outcome is unknown" in kafka_error_of(errors.OutcomeUnknown("the server went away")).str()
    said_already = kafka_error_of(errors.OutcomeUnknown("gone: the outcome is unknown"))
    assert said_already.str() == "gone: the outcome is unknown"


def test_an_error_is_neither_fatal_nor_abortable_unless_the_client_says_so():
    error = kafka_error_of(errors.ProducerFenced())
    assert (error.fatal(), error.txn_requires_abort()) == (False, False)
    error = kafka_error_of(errors.ProducerFenced(), fatal=True, txn_requires_abort=True)
    assert (error.fatal(), error.txn_requires_abort()) == (True, True)


def test_the_client_may_say_otherwise_about_retrying():
    assert kafka_error_of(errors.StoreBusy(), retriable=False).retriable() is False
    assert kafka_error_of(errors.OutcomeUnknown(), retriable=True).retriable() is True


def test_a_subclass_has_the_row_of_its_base():
    class _Special(errors.TxnStoreError, code=999_999, recovery=Recovery.RETRY):
        """For this test."""

    try:

        class _Rare(errors.StoreBusy, code=999_998, recovery=Recovery.RETRY):
            """For this test, too."""

        assert kafka_error_of(_Rare("rarely")).code() == KafkaError._TIMED_OUT
        assert kafka_error_of(_Special("very rarely")).code() == KafkaError._FAIL
        assert kafka_error_of(_Special("very rarely")).retriable() is True
        assert kafka_error_of(_Special("very rarely")).str() == "very rarely"
    finally:
        ERRORS.pop(999_999)
        ERRORS.pop(999_998, None)


def test_the_exception_carries_the_error():
    exception = kafka_exception_of(errors.StoreUnavailable("no server"), fatal=True)
    assert type(exception) is KafkaException
    error = exception.args[0]
    assert (error.code(), error.str(), error.fatal(), error.retriable()) == (-195, "no server", True, True)
