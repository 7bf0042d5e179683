"""A batch is opened in C as in Python: the same messages, and the same errors for what is damaged."""

from __future__ import annotations

import gc
import itertools
import weakref
from array import array
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clients.bulk_paths import all_spare_messages, everything, needs_c, opened_both_ways
from tests.tools.markers import encode_control
from tests.tools.memory import assert_nothing_is_kept, called_as_garbage_is_collected
from txnstore import bulk
from txnstore.clients.consumer.opening import open_batch
from txnstore.clients.model.message import NO_DETAILS, NO_MARKER, Message, RecordSource
from txnstore.errors import CorruptBatch
from txnstore.log.codec import checksum, decode, encode
from txnstore.log.columns import Codec
from txnstore.model import ControlType, ProducerIdentity, Record

SOURCE = RecordSource("orders", 3, 1)
cells = st.none() | st.binary(max_size=40) | st.binary(min_size=1, max_size=1) | st.just(b"x" * 100_000)
texts = st.text(st.characters(codec="utf-8"), max_size=8)
headers = st.lists(st.tuples(texts | st.just("trace"), st.none() | st.binary(max_size=9)), max_size=3)
timestamps = st.integers(0, 2**63 - 1) | st.integers(1_700_000_000_000, 1_700_000_000_003)
records = st.builds(Record, value=cells, key=cells, timestamp_ms=timestamps, headers=headers)
#: Also such in which a column is the same for all records, as it mostly is.
batches = st.lists(records, min_size=1, max_size=20) | st.lists(
    st.builds(Record, value=st.binary(max_size=5), timestamp_ms=st.just(1_700_000_000_000)), min_size=1, max_size=20
)
gaps = st.lists(st.integers(0, 5), min_size=20, max_size=20)


def row_of(batch: Any, base_offset: int = 5000, last_offset: int | None = None, **columns: Any) -> Any:
    last_offset = base_offset + batch.record_count + 200 if last_offset is None else last_offset
    place = {"partition_id": 77, "base_offset": base_offset, "last_offset": last_offset}
    return SimpleNamespace(**{**place, **batch.columns(), **columns})


def same(*arguments: Any) -> Any:
    in_c, in_python = opened_both_ways(*arguments)
    assert in_c == in_python
    return in_c


@pytest.mark.slow
@needs_c
@given(batches, gaps, st.booleans(), st.sampled_from(Codec), st.integers(-3, 130), st.none() | st.just(NO_MARKER))
def test_the_messages_are_the_same(
    batch: list[Record], steps: list[int], has_gaps: bool, codec: Codec, behind: int, marker_offset: int | None
) -> None:
    deltas = [index + sum(steps[: index + 1]) for index in range(len(batch))] if has_gaps else None
    source = RecordSource("orders", 3, 2, marker_offset)
    opened = decode(row_of(encode(batch, codec=codec, offset_deltas=deltas)))
    found = same(source, opened, 5000 + behind)
    offsets = [5000 + delta for delta in deltas or range(len(batch))]
    assert [told[2] for told in found] == [offset for offset in offsets if offset >= 5000 + behind]


@needs_c
@pytest.mark.parametrize(("base_offset", "last_offset"), [(0, 1), (2**63 - 2, 2**63 - 1), (2**63 - 3, 2**63 - 1)])
def test_the_first_and_the_last_offsets_that_there_are(base_offset, last_offset):
    batch = encode([Record(b"a", timestamp_ms=2**63 - 1), Record(b"b", timestamp_ms=2**63 - 1)])
    found = same(SOURCE, decode(row_of(batch, base_offset, last_offset)), base_offset)
    assert [told[2] for told in found] == [base_offset, base_offset + 1]


@needs_c
def test_a_marker_has_no_messages():
    marker = encode_control(ControlType.COMMIT, coordinator_epoch=1, producer=ProducerIdentity(1, 1), timestamp_ms=1)
    assert same(SOURCE, decode(row_of(marker)), 0) == []


POSITIONS = [0, 3, 3, 7]


def packed(*positions: int) -> bytes:
    return b"".join(position.to_bytes(4, "big", signed=True) for position in positions)


@needs_c
@pytest.mark.parametrize(
    "damage",
    [
        {"value_positions": b""},
        {"value_positions": packed(*POSITIONS)[:-1]},
        {"value_positions": packed(*POSITIONS, 7)},
        {"value_positions": packed(1, 3, 3, 7)},
        {"value_positions": packed(0, 3, 2, 7)},
        {"value_positions": packed(0, -1, 3, 7)},
        {"value_positions": packed(0, 3, 3, 8)},
        {"value_positions": packed(0, 3, 3, 6)},
        {"value_positions": packed(0, 3, 99, 7)},
        {"value_positions": packed(0, 3, 3, 2**31 - 1)},
        {"value_positions": packed(0, -(2**31), 3, 7)},
        {"value_positions": None},
        {"value_positions": "0000"},
        {"value_data": None},
        {"value_data": "text"},
        {"value_data": b""},
        {"null_values": "[3]"},
        {"null_values": "[-1]"},
        {"null_values": "[1e3]"},
        {"null_values": "[18446744073709551616]"},
        {"null_values": "nonsense"},
        {"null_values": "[1,1,0]"},
        {"key_data": b"k"},
        {"key_positions": packed(0, 0, 0, 0)},
        {"headers": "[]"},
        {"headers": "[null,null,null,null]"},
        {"headers": "[null,[1,2],null]"},
        {"headers": '[null,{"a":1},null]'},
        {"offset_deltas": "[0,1]"},
        {"offset_deltas": "[0,1,1]"},
        {"offset_deltas": "[0,1,9999]"},
        {"offset_deltas": "[-1,1,2]"},
        {"timestamp_deltas_ms": "[1,2]"},
        {"timestamp_deltas_ms": "[1,2,1e400]"},
        {"timestamp_deltas_ms": "[1,2,99999999999999999999999]"},
        {"record_count": 2},
        {"record_count": 2**31 - 1},
        {"codec": Codec.GZIP},
        {"codec": Codec.ZSTD},
    ],
    ids=str,
)
def test_what_is_damaged_is_told_alike(damage):
    batch = encode([Record(b"abc"), Record(b""), Record(b"wxyz")])
    row = row_of(batch, **damage)
    row.crc = checksum(row)
    same(SOURCE, decode(row), 0)


@pytest.mark.slow
@needs_c
@given(batches, st.sampled_from(Codec), st.data())
def test_whatever_is_damaged_is_told_alike(batch: list[Record], codec: Codec, data: st.DataObject) -> None:
    columns = encode(batch, codec=codec).columns()
    held = [name for name in ("key_positions", "value_positions", "key_data", "value_data") if columns[name]]
    held += [name for name in ("null_keys", "null_values", "headers", "offset_deltas") if columns[name]]
    if not held:
        return
    name = data.draw(st.sampled_from(held))
    damaged = bytearray(columns[name] if isinstance(columns[name], bytes) else columns[name].encode())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    column = bytes(damaged) if isinstance(columns[name], bytes) else damaged.decode(errors="replace")
    row = row_of(encode(batch, codec=codec))
    setattr(row, name, column)
    row.crc = checksum(row)
    same(SOURCE, decode(row), 0)


def test_damage_comes_out_when_the_batch_is_opened():
    row = row_of(encode([Record(b"abc"), Record(b"")]), value_positions=packed(0, 4, 3))
    row.crc = checksum(row)
    with pytest.raises(CorruptBatch, match="value_positions is not 3 ascending numbers from 0 on"):
        open_batch(SOURCE, decode(row), 0)


def arguments(**changed: Any) -> dict[str, Any]:
    usual = {
        "message_type": Message,
        "source": SOURCE,
        "details": NO_DETAILS,
        "index": 0,
        "count": 2,
        "first_offset": 7,
        "offsets": None,
        "timestamp_ms": 1,
        "timestamps_ms": None,
        "keys": None,
        "values": (b"abc", array("i", [0, 1, 3]), ()),
        "headers": None,
    }
    return {**usual, **changed}


class Marked(list[Any]):
    """Shows that it has gone."""


class WithAttributes(Message):
    """Has room for anything."""


@needs_c
def test_each_message_is_taken_once_also_if_memory_is_collected_meanwhile():
    """Where a message is made, Python may collect garbage, and that may take the next one."""
    count = 900
    positions = array("i", range(count + 1))
    messages = bulk.core.Messages(**arguments(count=count, values=(bytes(count), positions, ())))
    taken: list[int] = []
    kept: list[Any] = all_spare_messages()

    def take_next() -> None:
        for each in itertools.islice(messages, 1):
            kept.append(each)
            taken.append(each.offset())

    with called_as_garbage_is_collected(take_next):
        for message in messages:
            kept.append(message)
            taken.append(message.offset())
    assert sorted(taken) == list(range(7, 7 + count))


@needs_c
@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"message_type": object}, TypeError),
        ({"message_type": WithAttributes}, TypeError),
        ({"message_type": 5}, TypeError),
        ({"source": ("t", 1)}, TypeError),
        ({"source": ["t", 1, 1]}, TypeError),
        ({"details": (None,)}, TypeError),
        ({"index": -1}, ValueError),
        ({"count": -1}, ValueError),
        ({"count": 0}, ValueError),
        ({"count": 1}, ValueError),
        ({"count": 3}, ValueError),
        ({"count": 2**31}, ValueError),
        ({"count": 2**62}, ValueError),
        ({"first_offset": -1}, ValueError),
        ({"first_offset": 2**63 - 1}, ValueError),
        ({"first_offset": 2**63}, OverflowError),
        ({"offsets": (1, 2)}, TypeError),
        ({"timestamps_ms": (1, 2)}, TypeError),
        ({"timestamps_ms": bytearray(16)}, TypeError),
        ({"timestamps_ms": b""}, ValueError),
        ({"timestamps_ms": bytes(15)}, ValueError),
        ({"timestamps_ms": bytes(24)}, ValueError),
        ({"timestamps_ms": bytes(16), "count": 2**62}, ValueError),
        ({"headers": ((), ())}, TypeError),
        ({"values": (b"abc",)}, TypeError),
        ({"values": ("abc", array("i", [0, 1, 3]), ())}, TypeError),
        ({"values": (b"abc", [0, 1, 3], ())}, TypeError),
        ({"values": (b"abc", array("i", [0, 1, 3]), [1])}, TypeError),
        ({"values": (b"abc", array("i", [0, 1, 3]), (2,))}, ValueError),
        ({"values": (b"abc", array("i", [0, 1, 3]), (-1,))}, ValueError),
        ({"values": (b"abc", array("i", [0, 1, 3]), ("1",))}, TypeError),
        ({"values": (b"abc", array("i", [0, 1, 3]), (2**70,))}, OverflowError),
    ],
    ids=str,
)
def test_nothing_is_made_of_arguments_that_do_not_fit(changed, kind):
    with pytest.raises(kind):
        bulk.core.Messages(**arguments(**changed))


@needs_c
@pytest.mark.parametrize("positions", [[-1, 1, 3], [2, 1, 3], [4, 5, 5], [0, 4, 4], [-(2**31), 2**31 - 1, 2**31 - 1]])
def test_nothing_is_read_beyond_the_data(positions):
    messages = bulk.core.Messages(**arguments(values=(b"abc", array("i", positions), ())))
    with pytest.raises(ValueError, match="positions"):
        list(messages)


@needs_c
def test_nothing_is_read_beyond_what_has_changed_meanwhile():
    positions, offsets = array("i", [0, 1, 3]), [7, 8]
    messages = bulk.core.Messages(**arguments(values=(b"abc", positions, ()), offsets=offsets))
    assert next(messages).value() == b"a"
    with pytest.raises(BufferError):
        positions.append(4)
    positions[2] = 99
    with pytest.raises(ValueError, match="positions"):
        next(messages)
    positions[2] = 3
    offsets.clear()
    with pytest.raises(ValueError, match="shorter"):
        next(messages)
    offsets += [7, 8]
    assert (next(messages).value(), next(messages, None), next(messages, None)) == (b"bc", None, None)


@needs_c
def test_packed_timestamps_are_any_of_64_bits():
    packed_ = array("q", [-(2**63), 2**63 - 1]).tobytes()
    first, second = bulk.core.Messages(**arguments(timestamps_ms=packed_))
    assert (first.timestamp(), second.timestamp()) == ((1, -(2**63)), (1, 2**63 - 1))
    assert (first._record[:2], second._record[:2]) == ((7, -(2**63)), (8, 2**63 - 1))
    second.set_value(b"")
    assert everything(second)[7] == (1, 2**63 - 1)


class WithFinalizer(Message):
    """Says when it goes."""

    __slots__ = ()
    gone: ClassVar[list[int]] = []

    def __del__(self) -> None:
        self.gone.append(self.offset())  # type: ignore[arg-type]  # it has one


@needs_c
def test_memory_of_messages_that_are_gone_is_used_again_with_nothing_left_in_it():
    spare, marked = all_spare_messages(), Marked()
    gone = weakref.ref(marked)
    for message_type in (Message, WithFinalizer, Message, WithFinalizer):
        first, second = bulk.core.Messages(**arguments(message_type=message_type, values=None))
        first.set_headers(marked)
        first.set_error(marked)
        address = id(first)
        del first, second
        again = list(bulk.core.Messages(**arguments()))
        assert address in map(id, again) or message_type is not Message
        assert [everything(each)[:8] for each in again] == [
            ("orders", 3, 7, None, b"a", None, None, (1, 1)),
            ("orders", 3, 8, None, b"bc", None, None, (1, 1)),
        ]
        assert not any(map(gc.is_tracked, again))
        del again
    # Memory that is marked for its finalizer having been called would keep the next one from it.
    assert sorted(WithFinalizer.gone) == [7, 7, 8, 8]
    del marked, spare
    assert gone() is None


@needs_c
def test_an_index_behind_the_last_record_leaves_nothing():
    assert list(bulk.core.Messages(**arguments(index=2))) == []
    assert list(bulk.core.Messages(**arguments(index=2**62))) == []


@needs_c
def test_what_is_opened_is_collected_with_the_circle_that_it_is_part_of():
    headers = Marked([(), ()])
    messages = bulk.core.Messages(**arguments(headers=headers))
    headers[0] = (messages,)
    gone = weakref.ref(headers)
    assert gc.is_tracked(messages)
    del messages, headers
    gc.collect()
    assert gone() is None


@needs_c
def test_a_message_is_tracked_once_it_may_hold_anything():
    (message, other) = bulk.core.Messages(**arguments())
    assert not gc.is_tracked(message)
    marked = Marked([message])
    message.set_value(marked)
    gone = weakref.ref(marked)
    assert gc.is_tracked(message)
    del message, marked
    assert gone() is not None
    gc.collect()
    assert gone() is None
    assert everything(other)[2] == 8


@pytest.mark.slow
@needs_c
def test_memory_and_counts_stay_as_they_are_over_many_messages():
    batch = encode([Record(b"v" * 50, b"k", timestamp_ms=number, headers=[("h", b"1")]) for number in range(100)])
    damaged = row_of(batch, value_positions=bytes(404))
    damaged.crc = checksum(damaged)

    def turn() -> None:
        opened = decode(row_of(batch))
        messages = list(open_batch(SOURCE, opened, 5010))
        for message in messages:
            message.set_key([message])
        partial = open_batch(SOURCE, opened, 0)
        next(partial).set_headers(None)
        assert len({(message.offset(), message.value(), str(message.headers())) for message in messages}) == 90
        for failing in ({"values": (b"abc", array("i", [0, 9, 9]), (1,))}, {"count": 3}, {"source": ()}):
            with pytest.raises((ValueError, TypeError)):
                list(bulk.core.Messages(**arguments(**failing)))
        with pytest.raises(CorruptBatch):
            open_batch(SOURCE, decode(damaged), 0)

    # One reference that was lost for each message, or in each turn, would be thousands, or fifty.
    assert_nothing_is_kept(turn, (None, SOURCE, NO_DETAILS, Message, ()), turns=50, references_max=40, bytes_max=20_000)
