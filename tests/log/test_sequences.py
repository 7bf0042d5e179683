"""The rules of idempotent appends, pure and through the database: Kafka's eight, and what the log checks."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

import pytest

from tests.tools.markers import encode_control
from txnstore.db.store import Store
from txnstore.errors import (
    InvalidProducerEpoch,
    InvalidRecord,
    InvalidTransactionState,
    OutOfOrderSequence,
    TxnStoreError,
)
from txnstore.log.append import Append, Appended, append
from txnstore.log.codec import EncodedBatch, encode
from txnstore.log.fetch import fetch
from txnstore.log.locked_partitions import Marker, write_markers
from txnstore.log.partition_rows import allocate_producer_id, forget_producers, producers_of_partition
from txnstore.log.sequences import (
    BATCHES_REMEMBERED,
    ProducerInPartition,
    RecentBatch,
    check_append,
    find_duplicate,
    increment_sequence,
    last_sequence_of,
    remember,
)
from txnstore.log.topics import create_topic
from txnstore.model import SEQUENCE_MAX, ControlType, IsolationLevel, ProducerIdentity, Record

P = ProducerIdentity


@pytest.mark.parametrize(
    ("sequence", "count", "expected"),
    [
        (0, 1, 1),
        (0, 0, 0),
        (5, 10, 15),
        (SEQUENCE_MAX - 1, 1, SEQUENCE_MAX),
        (SEQUENCE_MAX, 1, 0),
        (SEQUENCE_MAX, 2, 1),
        (SEQUENCE_MAX - 3, 10, 6),
        (0, SEQUENCE_MAX, SEQUENCE_MAX),
        (SEQUENCE_MAX, SEQUENCE_MAX, SEQUENCE_MAX - 1),
        (-1, 1, 0),
    ],
)
def test_rule_6_after_2147483647_comes_0(sequence: int, count: int, expected: int) -> None:
    assert increment_sequence(sequence, count) == expected


@pytest.mark.parametrize(
    ("first", "records", "last"),
    [(0, 1, 0), (0, 3, 2), (SEQUENCE_MAX, 1, SEQUENCE_MAX), (SEQUENCE_MAX, 2, 0), (SEQUENCE_MAX - 1, 5, 2)],
)
def test_the_last_sequence_of_a_batch_wraps_as_well(first: int, records: int, last: int) -> None:
    assert last_sequence_of(first, records) == last


def batch(first: int, last: int) -> RecentBatch:
    return RecentBatch(first, last, 100 + first, 100 + last, 1_000)


def state(*batches: RecentBatch, epoch: int = 3, open_from: int | None = None) -> ProducerInPartition:
    return ProducerInPartition(7, epoch, batches, -1, 1_000, open_from)


RECENT = [batch(first, first + 1) for first in (0, 2, 4, 6, 8)]


@pytest.mark.parametrize("number", range(5))
def test_rule_1_each_of_the_last_five_batches_is_recognised(number: int) -> None:
    known = RECENT[number]
    assert find_duplicate(state(*RECENT), 3, known.first_sequence, known.last_sequence) is known


@pytest.mark.parametrize(
    ("epoch", "first", "last"),
    [
        pytest.param(4, 8, 9, id="a newer epoch"),
        pytest.param(2, 8, 9, id="an older epoch"),
        pytest.param(3, 8, 8, id="the first half"),
        pytest.param(3, 9, 9, id="the second half"),
        pytest.param(3, 6, 9, id="two batches in one"),
        pytest.param(3, 10, 11, id="the next batch"),
    ],
)
def test_rule_1_only_the_whole_batch_of_the_same_epoch_is_a_repetition(epoch: int, first: int, last: int) -> None:
    assert find_duplicate(state(*RECENT), epoch, first, last) is None


def test_rule_1_of_an_unknown_producer_nothing_is_a_repetition() -> None:
    assert find_duplicate(None, 3, 0, 0) is None
    assert find_duplicate(state(), 3, 0, 0) is None


def test_a_batch_across_the_wrap_is_recognised() -> None:
    across = batch(SEQUENCE_MAX - 1, 1)
    assert find_duplicate(state(across), 3, SEQUENCE_MAX - 1, 1) is across


def test_five_batches_are_remembered() -> None:
    assert BATCHES_REMEMBERED == 5
    assert remember(RECENT, batch(10, 11)) == (*RECENT[1:], batch(10, 11))
    assert remember((), batch(0, 0)) == (batch(0, 0),)


@pytest.mark.parametrize(
    ("known", "epoch", "first", "is_transactional", "error"),
    [
        pytest.param(state(*RECENT), 2, 0, False, InvalidProducerEpoch, id="rule 2: epoch lower"),
        pytest.param(state(*RECENT), 2, 10, True, InvalidProducerEpoch, id="rule 2: lower, its sequence would fit"),
        pytest.param(state(*RECENT), 4, 0, False, None, id="rule 3: epoch higher, from 0"),
        pytest.param(state(*RECENT), 4, 10, False, OutOfOrderSequence, id="rule 3: epoch higher, not from 0"),
        pytest.param(state(*RECENT), 3, 10, False, None, id="rule 4: the next"),
        pytest.param(state(*RECENT), 3, 11, False, OutOfOrderSequence, id="rule 4: a gap"),
        pytest.param(state(*RECENT), 3, 9, False, OutOfOrderSequence, id="rule 4: an overlap"),
        pytest.param(state(*RECENT), 3, 0, False, OutOfOrderSequence, id="rule 4: from 0 again"),
        pytest.param(state(batch(SEQUENCE_MAX, SEQUENCE_MAX)), 3, 0, False, None, id="rule 4: 0 after 2147483647"),
        pytest.param(state(batch(SEQUENCE_MAX, SEQUENCE_MAX)), 3, 1, False, OutOfOrderSequence, id="rule 4: 1 after"),
        pytest.param(state(batch(SEQUENCE_MAX - 1, 1)), 3, 2, False, None, id="rule 4: after a batch across the wrap"),
        pytest.param(None, 3, 0, False, None, id="rule 4: unknown producer, from 0"),
        pytest.param(None, 3, 77, False, None, id="rule 4: unknown producer, from anywhere"),
        pytest.param(None, 3, 0, True, None, id="rule 4: unknown producer, transactional, from 0"),
        pytest.param(None, 3, 77, True, OutOfOrderSequence, id="rule 4: unknown producer, transactional, not from 0"),
        pytest.param(state(), 3, 0, True, None, id="rule 5: after a marker, from 0"),
        pytest.param(state(), 3, 1, True, OutOfOrderSequence, id="rule 5: after a marker, not from 0"),
        pytest.param(state(*RECENT, open_from=50), 3, 10, True, None, id="transactional in an open transaction"),
        pytest.param(state(*RECENT, open_from=50), 3, 10, False, InvalidTransactionState, id="plain in an open one"),
        pytest.param(state(*RECENT, open_from=50), 4, 0, False, InvalidTransactionState, id="plain, newer epoch"),
    ],
)
def test_rules_2_to_5(
    known: ProducerInPartition | None,
    epoch: int,
    first: int,
    is_transactional: bool,
    error: type[TxnStoreError] | None,
) -> None:
    if error is None:
        check_append(known, P(7, epoch), first, is_transactional=is_transactional)
        return
    with pytest.raises(error):
        check_append(known, P(7, epoch), first, is_transactional=is_transactional)


class Partition:
    """A partition that nobody else uses, and an idempotent producer of it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        name = uuid.uuid4().hex
        self.id = store.write(lambda connection: create_topic(connection, name)).partition_ids[0]
        self.producer_id = store.write(allocate_producer_id)

    def encode(
        self, first: int, values: Sequence[bytes], *, epoch: int = 0, is_transactional: bool = False
    ) -> EncodedBatch:
        return encode(
            [Record(value) for value in values],
            producer=P(self.producer_id, epoch),
            base_sequence=first,
            is_transactional=is_transactional,
        )

    def append(self, first: int, *values: bytes, epoch: int = 0, is_transactional: bool = False) -> Appended:
        item = Append(self.id, self.encode(first, values, epoch=epoch, is_transactional=is_transactional))
        return self.store.write(lambda connection: append(connection, [item], coordinated=True))[0]

    def mark(self, kind: ControlType, *, epoch: int) -> None:
        marker = Marker(self.id, P(self.producer_id, epoch), kind)
        self.store.write(lambda connection: write_markers(connection, [marker]))

    def values(self) -> list[bytes | None]:
        pages = self.store.read(
            lambda connection: fetch(connection, {self.id: 0}, isolation=IsolationLevel.READ_UNCOMMITTED)
        )
        return [record.value for found in pages[self.id].batches for record in found.records()]

    def state(self) -> ProducerInPartition:
        (found,) = self.store.read(lambda connection: producers_of_partition(connection, self.id))
        return found


@pytest.fixture
def partition(shared_store: Store) -> Partition:
    return Partition(shared_store)


def test_rule_1_any_of_the_last_five_batches_may_come_again_and_keeps_its_offset_and_time(
    partition: Partition, shared_clock
) -> None:
    for number in range(6):
        partition.append(2 * number, b"%d" % number, b"+")
    shared_clock.advance(1_000)
    before = partition.state()
    for number in (5, 1, 3, 2, 4):
        answer = partition.append(2 * number, b"%d" % number, b"+")
        assert (answer.base_offset, answer.last_offset, answer.is_duplicate) == (2 * number, 2 * number + 1, True)
    assert partition.state() == before
    assert len(partition.values()) == 12


def test_rule_8_an_older_one_comes_back_as_out_of_order(partition: Partition) -> None:
    for number in range(6):
        partition.append(number, b"%d" % number)
    with pytest.raises(OutOfOrderSequence):
        partition.append(0, b"0")
    assert len(partition.values()) == 6


def test_rule_1_a_repetition_that_is_cut_differently_is_refused(partition: Partition) -> None:
    partition.append(0, b"a", b"b")
    for first, values in ((0, [b"a"]), (1, [b"b"]), (0, [b"a", b"b", b"c"]), (1, [b"b", b"c"])):
        with pytest.raises(OutOfOrderSequence):
            partition.append(first, *values)
    assert partition.values() == [b"a", b"b"]


def test_rules_2_3_and_5_a_newer_epoch_begins_at_0_and_ends_the_older_one(partition: Partition) -> None:
    partition.append(0, b"a")
    partition.append(1, b"a")
    with pytest.raises(OutOfOrderSequence):
        partition.append(2, b"b", epoch=1)
    partition.append(0, b"b", epoch=1)
    for first in (0, 2):
        with pytest.raises(InvalidProducerEpoch):
            partition.append(first, b"late")
    # The same sequence numbers in the new epoch are other batches.
    assert partition.append(0, b"b", epoch=1).is_duplicate
    assert not partition.append(1, b"c", epoch=1).is_duplicate
    assert partition.values() == [b"a", b"a", b"b", b"c"]


def test_rule_4_sequences_wrap_from_2147483647_to_0(partition: Partition) -> None:
    answers = [
        partition.append(SEQUENCE_MAX - 2, b"a", b"b"),
        partition.append(SEQUENCE_MAX, b"c"),
        partition.append(0, b"d"),
        partition.append(1, b"e"),
    ]
    assert [answer.base_offset for answer in answers] == [0, 2, 3, 4]
    assert partition.append(SEQUENCE_MAX, b"c").base_offset == 2


def test_rule_4_a_batch_may_lie_across_the_wrap_and_come_again(partition: Partition) -> None:
    partition.append(SEQUENCE_MAX - 1, b"a", b"b", b"c")
    assert partition.append(SEQUENCE_MAX - 1, b"a", b"b", b"c").is_duplicate
    with pytest.raises(OutOfOrderSequence):
        partition.append(0, b"c")
    partition.append(1, b"d")
    assert partition.values() == [b"a", b"b", b"c", b"d"]
    assert partition.state().last_sequence == 1


@pytest.mark.slow
def test_rule_4_a_forgotten_producer_goes_on_where_it_was(partition: Partition, shared_clock) -> None:
    partition.append(0, b"a", b"b")
    now_ms = shared_clock.advance(1)
    forget_producers(partition.store, before_ms=now_ms, rows_max=100)
    assert partition.append(2, b"c").base_offset == 2


@pytest.mark.parametrize("kind", list(ControlType))
def test_rule_5_after_a_marker_sequences_begin_at_0_again(partition: Partition, kind: ControlType) -> None:
    partition.append(0, b"a", b"b", is_transactional=True)
    partition.mark(kind, epoch=1)
    assert partition.state().recent_batches == ()
    with pytest.raises(OutOfOrderSequence):
        partition.append(2, b"c", epoch=1, is_transactional=True)
    with pytest.raises(InvalidProducerEpoch):
        partition.append(2, b"late", epoch=0, is_transactional=True)
    assert partition.append(0, b"c", epoch=1, is_transactional=True).begins_transaction


def test_a_plain_record_of_a_producer_with_an_open_transaction_is_refused(partition: Partition) -> None:
    partition.append(0, b"a", is_transactional=True)
    with pytest.raises(InvalidTransactionState):
        partition.append(1, b"b")
    partition.append(1, b"b", is_transactional=True)


def test_a_transactional_record_needs_an_open_transaction_that_somebody_will_end(partition: Partition) -> None:
    """The coordinator says that it holds the partition; nobody else may begin a transaction here (KIP-890)."""

    def append_uncoordinated(first: int, value: bytes, *, epoch: int = 0) -> Appended:
        item = Append(partition.id, partition.encode(first, [value], epoch=epoch, is_transactional=True))
        return partition.store.write(lambda connection: append(connection, [item]))[0]

    with pytest.raises(InvalidTransactionState, match="not part of an open transaction"):
        append_uncoordinated(0, b"a")
    partition.append(0, b"a", is_transactional=True)
    assert append_uncoordinated(0, b"a").is_duplicate
    assert append_uncoordinated(1, b"b").base_offset == 1
    # What is open is an older transaction: of both together only one would find how it has ended.
    with pytest.raises(InvalidTransactionState):
        append_uncoordinated(0, b"c", epoch=1)
    partition.mark(ControlType.COMMIT, epoch=1)
    with pytest.raises(InvalidTransactionState):
        append_uncoordinated(0, b"c", epoch=1)
    assert partition.values() == [b"a", b"b"]


def test_producers_and_partitions_have_sequences_of_their_own(partition: Partition) -> None:
    other = Partition(partition.store)
    partition.append(0, b"a")
    other.append(0, b"b")
    other.id = partition.id
    other.append(0, b"c")
    assert partition.append(1, b"d").base_offset == 2


def test_several_batches_of_one_producer_in_one_call_are_checked_one_after_the_other(partition: Partition) -> None:
    items = [
        Append(partition.id, partition.encode(first, values)) for first, values in ((0, [b"a", b"b"]), (2, [b"c"]))
    ]
    answers = partition.store.write(lambda connection: append(connection, [*items, items[0]]))
    assert [(answer.base_offset, answer.is_duplicate) for answer in answers] == [(0, False), (2, False), (0, True)]
    gap = [Append(partition.id, partition.encode(first, [b"x"])) for first in (3, 5)]
    with pytest.raises(OutOfOrderSequence):
        partition.store.write(lambda connection: append(connection, gap))
    assert partition.values() == [b"a", b"b", b"c"]
    assert partition.state().last_sequence == 2


MALFORMED: dict[str, Callable[[Partition], EncodedBatch]] = {
    "a producer without a sequence number": lambda partition: partition.encode(-1, [b"a"]),
    "a producer without an epoch": lambda partition: partition.encode(0, [b"a"], epoch=-1),
    "a sequence number without a producer": lambda partition: encode([Record(b"a")], base_sequence=0),
    "an epoch without a producer": lambda partition: encode([Record(b"a")], producer=P(-1, 0)),
    "a transactional batch without a producer": lambda partition: encode([Record(b"a")], is_transactional=True),
    "a marker": lambda partition: encode_control(
        ControlType.COMMIT, coordinator_epoch=0, producer=P(partition.producer_id, 1), timestamp_ms=0
    ),
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("malform", MALFORMED.values(), ids=MALFORMED)
def test_a_batch_that_no_producer_may_send_is_refused(
    partition: Partition, malform: Callable[[Partition], EncodedBatch]
) -> None:
    item = Append(partition.id, malform(partition))
    with pytest.raises(InvalidRecord):
        partition.store.write(lambda connection: append(connection, [item]))
    assert partition.values() == []
