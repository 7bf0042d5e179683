"""The messages of delivery reports are the same in C as in Python."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clients.bulk_paths import everything, message_module, needs_c
from tests.tools.memory import assert_nothing_is_kept, called_as_garbage_is_collected
from txnstore import KafkaError, bulk
from txnstore.clients.model.message import Message, RecordSource, messages_in_python
from txnstore.clients.model.topic_partition import OFFSET_INVALID

pytestmark = needs_c

SOURCE = RecordSource("orders", 3, 1)
FAILED = KafkaError(KafkaError._MSG_TIMED_OUT)
cells = st.none() | st.binary(max_size=9)
timestamps = st.integers(0, 2**63 - 1)
sources = st.builds(RecordSource, st.text(max_size=3), st.integers(-1, 9), st.integers(1, 2))
records = st.lists(st.tuples(cells, cells, timestamps, sources, st.floats(0, 1e9), st.sampled_from([None, print, len])))


def columns(records: Any, **changed: Any) -> dict[str, Any]:
    values, keys, timestamps_ms, _, queued_seconds, callbacks = map(list, zip(*records, strict=True))
    usual = {
        "message_type": Message,
        "callbacks": callbacks,
        "sources": SOURCE,
        "offset": 7,
        "timestamps_ms": timestamps_ms,
        "keys": keys,
        "values": values,
        "queued_seconds": queued_seconds,
        "error": None,
        "done_seconds": 1e9 + 0.5,
    }
    return {**usual, **changed}


def deliveries(given_: dict[str, Any]) -> Any:
    return bulk.core.Deliveries(**{**given_, "callbacks": iter(given_["callbacks"])})


def in_python(given_: dict[str, Any]) -> Any:
    own = message_module(in_c=False).Message
    return messages_in_python(**{**given_, "callbacks": iter(given_["callbacks"]), "message_type": own})


@pytest.mark.slow
@given(
    records.filter(bool),
    st.booleans(),
    st.booleans(),
    st.sampled_from([OFFSET_INVALID, 0, 5, 2**62]),
    st.sampled_from([None, FAILED]),
)
def test_the_messages_are_the_same(
    records: Any, has_own_sources: bool, is_stamped: bool, offset: int, error: KafkaError | None
) -> None:
    given_ = columns(records, offset=offset, error=error)
    if has_own_sources:
        given_["sources"] = [record[3] for record in records]
    if is_stamped:
        given_["timestamps_ms"] = 1_700_000_000_000
    found = [[(callback, everything(message)) for callback, message in of(given_)] for of in (deliveries, in_python)]
    assert found[0] == found[1]
    assert len(found[0]) == len(records)


RECORDS: Any = [(b"v%d" % number, None, number, SOURCE, 1.5, print) for number in range(5)]


def test_each_callback_gets_its_own_message_also_if_memory_is_collected_meanwhile():
    """Where a message is made, Python may collect garbage, and that may serve the next report."""
    count = 900
    taken: list[tuple[int, bytes | None]] = []
    rows = [(b"%d" % number, None, 1, SOURCE, 0.0, number) for number in range(count)]
    reports = deliveries(columns(rows))
    kept: list[list[object]] = []

    def serve_next() -> None:
        taken.extend((number, message.value()) for number, message in itertools.islice(reports, 1))

    with called_as_garbage_is_collected(serve_next):
        for number, message in reports:
            kept.append([])
            taken.append((number, message.value()))
    assert sorted(taken) == [(number, b"%d" % number) for number in range(count)]


def test_what_others_take_of_the_callbacks_ends_the_messages():
    callbacks = iter([print] * 5)
    messages = bulk.core.Deliveries(**columns(RECORDS, callbacks=callbacks))
    assert next(messages)[1].offset() == 7
    assert len(list(callbacks)) == 4
    assert next(messages, None) is None


def test_a_message_is_kept_and_changed_like_any_other():
    given_ = columns(RECORDS)
    (first, second, *_) = [message for _, message in deliveries(given_)]
    # Unlike those of a batch they hold an error, which may hold anything.
    assert gc.is_tracked(second)
    first.set_value([first])
    assert (first.key(), second.value(), second.latency()) == (None, b"v1", 1e9 - 1.0)
    assert gc.is_tracked(first)


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"message_type": object}, TypeError),
        ({"message_type": type("Own", (Message,), {})}, TypeError),
        ({"message_type": 5}, TypeError),
        ({"sources": ("t", 1)}, TypeError),
        ({"sources": 5}, TypeError),
        ({"sources": [5] * 5}, TypeError),
        ({"sources": [SOURCE] * 4}, ValueError),
        ({"offset": None}, TypeError),
        ({"offset": 2**63}, OverflowError),
        ({"offset": 2**63 - 2}, OverflowError),
        ({"timestamps_ms": (1,) * 5}, TypeError),
        ({"timestamps_ms": None}, TypeError),
        ({"timestamps_ms": [1] * 4}, ValueError),
        ({"keys": (None,) * 5}, TypeError),
        ({"keys": [None] * 4}, ValueError),
        ({"values": [None] * 4}, ValueError),
        ({"values": None}, TypeError),
        ({"queued_seconds": [1.0] * 4}, ValueError),
        ({"queued_seconds": ["x"] * 5}, TypeError),
        ({"done_seconds": "x"}, TypeError),
    ],
    ids=str,
)
def test_nothing_is_made_of_columns_that_do_not_fit(changed, kind):
    with pytest.raises(kind):
        list(deliveries(columns(RECORDS, **changed)))


def test_callbacks_are_an_iterator():
    with pytest.raises(TypeError, match="iterator"):
        bulk.core.Deliveries(**columns(RECORDS))


class Owner:
    """Holds something that holds it."""

    held: Any


@pytest.mark.slow
def test_what_is_not_taken_is_collected_with_the_circle_that_it_is_part_of():
    owner = Owner()
    owner.held = deliveries(columns(RECORDS, callbacks=[owner] * 5))
    next(owner.held)
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None


FAILING: list[dict[str, Any]] = [
    {"sources": ()},
    {"offset": 2**63},
    {"keys": []},
    {"queued_seconds": ["x"]},
    {"sources": [()]},
]


@pytest.mark.slow
def test_memory_and_counts_stay_as_they_are_over_many_messages():
    kept = (None, SOURCE, Message, print, FAILED, -1)

    def turn() -> None:
        records = [(b"v" * 50, b"k", number, SOURCE, 1.5, print) for number in range(100)]
        for changed in (
            {},
            {"error": FAILED, "offset": OFFSET_INVALID},
            {"sources": [SOURCE] * 100, "timestamps_ms": 5},
        ):
            given_: dict[str, Any] = columns(records, **changed)
            assert len([message.set_key(message) for _, message in deliveries(given_)]) == 100
            next(deliveries(given_))
        for failing in FAILING:
            with pytest.raises((TypeError, ValueError, OverflowError)):
                list(deliveries(columns(records, **failing)))

    assert_nothing_is_kept(turn, kept, turns=30, references_max=25, bytes_max=20_000)
