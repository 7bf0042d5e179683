"""KafkaError is a value that compares like its code, and KafkaException carries it."""

from __future__ import annotations

import copy
import csv
import os
import pickle
from pathlib import Path

import pytest

from txnstore.clients.model.errors import ERROR_CODES, KafkaError, KafkaException, error_code

REFERENCE = Path(__file__).resolve().parents[3].parent / "shared" / "reference"


def test_an_error_has_the_name_and_the_text_of_its_code():
    error = KafkaError(KafkaError._STATE)
    assert (error.code(), error.name(), error.str()) == (-172, "_STATE", "Local: Erroneous state")


def test_a_reason_takes_the_place_of_the_text():
    assert KafkaError(3, "why").str() == "why"
    assert KafkaError(3, "").str() == ""
    assert KafkaError(3, None).str() == "Broker: Unknown topic or partition"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KafkaError(-172), 'KafkaError{code=_STATE,val=-172,str="Local: Erroneous state"}'),
        (KafkaError(90, "why", fatal=True), 'KafkaError{FATAL,code=PRODUCER_FENCED,val=90,str="why"}'),
        (KafkaError(999), 'KafkaError{code=ERR_999?,val=999,str="Err-999?"}'),
        (KafkaError(0), 'KafkaError{code=NO_ERROR,val=0,str="Success"}'),
    ],
)
def test_the_text_of_an_error_is_librdkafkas(error, text):
    assert str(error) == repr(error) == text


def test_an_error_compares_with_numbers_and_errors_by_its_code():
    error = KafkaError(3, "why")
    assert error == 3
    assert error == KafkaError(3, "because", fatal=True)
    assert error == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert error != KafkaError._STATE
    assert error != 4
    assert not error != 3  # noqa: SIM202 - __ne__ has its own method
    assert -172 < error < 4
    assert 3 <= error <= KafkaError(3)
    assert error > KafkaError(2)
    assert error >= 3


def test_an_error_is_never_equal_to_what_is_neither_number_nor_error():
    assert KafkaError(3) != "UNKNOWN_TOPIC_OR_PART"
    assert KafkaError(3) is not None
    assert (KafkaError(3) == None) is False  # noqa: E711 - users compare so
    with pytest.raises(TypeError):
        KafkaError(3) < "x"  # type: ignore[operator]  # noqa: B015 - comparing is the test


def test_an_error_has_the_hash_of_its_code():
    assert hash(KafkaError(3, "why")) == hash(3)
    by_code: dict[object, str] = {KafkaError(-172): "state"}
    assert by_code[-172] == "state"


def test_an_error_is_true_even_without_an_error():
    assert KafkaError(0)
    assert bool(KafkaError(3)) is True


def test_an_error_without_flags_is_neither_fatal_nor_retriable_nor_abortable():
    error = KafkaError(3)
    assert (error.fatal(), error.retriable(), error.txn_requires_abort()) == (False, False, False)


@pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("flags", [(True, False, False), (False, True, False), (False, False, True)])
def test_a_copy_keeps_reason_and_flags(copied, flags):
    error = copied(KafkaError(3, "why", *flags))
    assert (error.code(), error.str()) == (3, "why")
    assert (error.fatal(), error.retriable(), error.txn_requires_abort()) == flags


@pytest.mark.parametrize("code", ["a", 3.5, None])
def test_a_code_that_is_no_integer_is_refused(code):
    with pytest.raises(TypeError):
        KafkaError(code)


def test_a_code_beyond_32_bits_is_refused():
    with pytest.raises(OverflowError):
        KafkaError(2**31)
    assert KafkaError(2**31 - 1).code() == 2**31 - 1
    assert KafkaError(-(2**31)).code() == -(2**31)


def test_a_reason_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match="argument 2 must be str or None, not int"):
        KafkaError(3, 5)  # type: ignore[arg-type]


def test_an_error_takes_no_other_attributes():
    with pytest.raises(AttributeError):
        KafkaError(3).reason = "x"  # type: ignore[attr-defined]


def test_an_exception_carries_its_error_as_first_argument():
    error = KafkaError(3, "why", retriable=True)
    exception = KafkaException(error)
    assert exception.args == (error,)
    assert exception.args[0] is error
    assert str(exception) == str(error)
    assert repr(exception) == f"KafkaException({error})"


def test_an_exception_survives_pickling():
    exception = pickle.loads(pickle.dumps(KafkaException(KafkaError(3, "why", fatal=True))))
    assert type(exception) is KafkaException
    assert (exception.args[0].code(), exception.args[0].str(), exception.args[0].fatal()) == (3, "why", True)


def test_every_code_is_an_attribute_with_its_name():
    assert {code: getattr(KafkaError, row.name) for code, row in ERROR_CODES.items()} == {
        code: code for code in ERROR_CODES
    }
    assert KafkaError.TRANSACTIONAL_ID_NOT_FOUND == 105


def test_no_two_codes_have_the_same_name():
    names = [row.name for row in ERROR_CODES.values()]
    assert len(set(names)) == len(names)


def test_codes_below_minus_one_and_no_others_begin_with_an_underscore():
    assert {code for code, row in ERROR_CODES.items() if row.name.startswith("_")} == {
        code for code in ERROR_CODES if code < -1
    }


def test_an_unknown_code_has_librdkafkas_placeholders():
    assert error_code(-999) == ("ERR_-999?", "Err--999?")


def test_the_codes_are_those_of_confluent_kafka():
    lines = Path(__file__).with_name("kafka_error_codes.txt").read_text(encoding="utf-8").splitlines()
    expected = {int(code): name for code, name in (line.split() for line in lines)}
    assert {code: row.name for code, row in ERROR_CODES.items() if code != 105} == expected


def test_the_table_of_codes_is_that_of_confluent_kafka_with_its_texts():
    path = Path(os.environ.get("TXNSTORE_REFERENCE", REFERENCE)) / "kafka-error-codes.tsv"
    if not path.exists():
        pytest.skip(f"confluent-kafka's texts are not on this machine ({path.name})")
    with path.open(encoding="utf-8", newline="") as lines:
        expected = {int(code): (name, text) for code, name, _, text in csv.reader(lines, delimiter="\t")}
    assert {code: tuple(row) for code, row in ERROR_CODES.items() if code != 105} == expected
