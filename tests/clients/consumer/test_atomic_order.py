"""What a consumer hands out that gets transactions whole, without thread and database: any schedule, any beginning."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from functools import partial

import pytest

from txnstore.clients.consumer.assigned_partition import FetchPosition
from txnstore.clients.consumer.opening import Chunk, Committed, PageRead
from txnstore.clients.consumer.orders import AtomicOrder
from txnstore.clients.consumer.positions import Positions
from txnstore.clients.consumer.subscription import Subscription
from txnstore.clients.model.errors import KafkaError
from txnstore.clients.model.message import NO_MARKER, Message, RecordSource, message_of
from txnstore.errors import CorruptBatch
from txnstore.log.bounds import Bounds
from txnstore.model import ProducerIdentity

POSITIONS = Positions(in_commit_order=True)
Batch = tuple[int, int, int, int, bool]
"""Place, first and last offset, the number of the commit, and whether it is that of a transaction."""


def records(source: RecordSource, first: int, last: int):
    rows = ((offset, 1000, None, b"", ()) for offset in range(first, last + 1))
    return iter([message_of(source, row) for row in rows])


@dataclass
class Log:
    """Partitions in memory; what is committed appears in all of them at once."""

    partition_count: int
    batches: list[list[Batch]] = field(init=False)
    ends: list[int] = field(init=False)
    #: Of each record the number of its commit.
    unit_of: dict[tuple[int, int], int] = field(default_factory=dict)
    count: int = 0
    plain_ones: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.batches = [[] for _ in range(self.partition_count)]
        self.ends = [0] * self.partition_count

    def plain(self, number: int) -> None:
        self.count += 1
        end = self.ends[number]
        self.batches[number].append((end, end, end, self.count, False))
        self.unit_of[number, end] = self.count
        self.plain_ones.add(self.count)
        self.ends[number] += 1

    def commit(self, sizes: dict[int, list[int]]) -> None:
        """Commit a transaction: the sizes of its batches by partition."""
        self.count += 1
        for number, batch_sizes in sizes.items():
            place = self.ends[number] + sum(batch_sizes)
            for size in batch_sizes:
                first = self.ends[number]
                self.ends[number] += size
                self.batches[number].append((place, first, first + size - 1, self.count, True))
                self.unit_of.update({(number, offset): self.count for offset in range(first, first + size)})
            self.ends[number] += 1

    def begun(self, number: int, position: int) -> int:
        """Return the same position, within a transaction only if a part of it is behind it."""
        place, within = POSITIONS.pair(position)
        first = next((batch[1] for batch in self.batches[number] if batch[0] == place), 0)
        return position if within > first else POSITIONS.at(place)

    def last_commit(self, number: int, position: int) -> int | None:
        """Return the number of the last transaction of which something lies behind the position."""
        place, within = POSITIONS.pair(position)
        behind = [batch for batch in self.batches[number] if batch[0] < place + (within > 0)]
        return next((batch[3] for batch in reversed(behind) if batch[4]), None)

    def page(self, number: int, position: int, batches_max: int, snapshot: int) -> PageRead:
        place, within = POSITIONS.pair(position)
        left = [
            batch
            for batch in self.batches[number]
            if batch[0] > place or (batch[0] == place and (not batch[4] or batch[2] >= within))
        ]
        end = POSITIONS.at(self.ends[number])
        chosen, rest = left[:batches_max], left[batches_max:]
        if not batches_max:
            return PageRead([], position, self._bounds(number), end, snapshot)
        next_position = end
        if rest or (chosen and len(chosen) == batches_max):
            last = chosen[-1]
            next_position = POSITIONS.at(last[0], last[2] + 1) if last[4] else POSITIONS.at(last[2] + 1)
        chunks: list[Chunk] = []
        starts = [self._start(batch, chosen[:index], (place, within)) for index, batch in enumerate(chosen)]
        for batch, start, behind in zip(chosen, starts, [*starts[1:], next_position], strict=False):
            chunks.append(self._chunk(number, batch, start, behind, snapshot))
        return PageRead(chunks, next_position, self._bounds(number), end, snapshot)

    def _bounds(self, number: int) -> Bounds:
        return Bounds(number, 0, self.ends[number], self.ends[number])

    def _start(self, batch: Batch, before: list[Batch], asked: tuple[int, int]) -> int:
        if not batch[4]:
            return POSITIONS.at(batch[0])
        if before and before[-1][0] == batch[0]:
            return POSITIONS.at(batch[0], before[-1][2] + 1)
        return POSITIONS.at(batch[0], asked[1] if not before and asked[0] == batch[0] else 0)

    def _chunk(self, number: int, batch: Batch, start: int, behind: int, snapshot: int) -> Chunk:
        place, base, last, number_of_commit, is_within = batch
        first = max(base, POSITIONS.pair(start).offset_in_transaction) if is_within else base
        source = RecordSource("t", number, 1, place if is_within else NO_MARKER)
        return Chunk(
            source=source,
            open=partial(records, source, first, last),
            record_count=last - first + 1,
            size_bytes=1,
            first_offset=first,
            last_offset=last,
            next_position=behind,
            start=start,
            base=POSITIONS.at(place) if is_within else 0,
            unit=1 if is_within else POSITIONS.unit,
            commit=Committed(number_of_commit, snapshot, ProducerIdentity(number_of_commit, 0) if is_within else None),
        )


_snapshots = itertools.count(1)


class Reader:
    """A consumer of all or some partitions: it reads, and hands out, when it is told to."""

    def __init__(self, log: Log, positions: dict[int, int], *, records_low: int = 6) -> None:
        self.log = log
        self.ended = 0
        self.order = AtomicOrder(self._end)
        self.subscription = Subscription(
            stores_offsets=True,
            reports_eof=False,
            records_low=records_low,
            bytes_low=1000,
            positions=POSITIONS,
            order=self.order,
        )
        self.seen: list[tuple[int, int]] = []
        for number, position in positions.items():
            self.subscription.add("t", number, position)

    def _end(self) -> None:
        self.ended += 1

    def resolve(self) -> None:
        for position in self.subscription.to_resolve(0.0):
            number = position.partition.number
            start = self.log.begun(number, position.position)
            self.subscription.resolved(position, start, number, self.log.last_commit(number, start))

    def wanted(self) -> list[FetchPosition]:
        """What a reader does not wait for: it rests once everything was read to its end."""
        positions = self.subscription.to_read(0.0)
        return [] if all(position.partition.is_at_end for position in positions) else positions

    def read(self, batches_max: int, positions: list[FetchPosition] | None = None) -> None:
        """Read one page, which the partitions share."""
        pages = []
        positions = self.subscription.to_read(0.0) if positions is None else positions
        snapshot = next(_snapshots)
        for position in positions:
            number = position.partition.number
            page = self.log.page(number, position.position, batches_max, snapshot)
            batches_max -= len(page.chunks)
            pages.append((position, page))
        for position, page in pages:
            self.subscription.deliver(position, page)

    def take(self, count: int) -> list[Message]:
        messages: list[Message] = []
        if count == 1:
            message = self.subscription.next_message()
            messages += [] if message is None else [message]
        else:
            self.subscription.take(messages, count)
        self.seen += [(message.partition(), message.offset()) for message in messages]
        return messages

    def keep(self, count: int) -> None:
        """Gather records of what comes next, as a call that has no time for all of them."""
        subscription, order = self.subscription, self.order
        for _ in range(count):
            goes_on = order.handed_out is not None and order.handed_out is order.transaction
            if subscription.kept and not goes_on:
                self.seen += [(message.partition(), message.offset()) for message in subscription.let_go_kept()]
            elif subscription.keep_next() is None:
                break
        subscription.let_go()

    def positions(self) -> dict[int, int]:
        """Where the next reader begins."""
        kept = self.subscription.begins_of_kept()
        positions = {partition: kept.get(partition, partition.position) for partition in self.subscription}
        return {
            partition.number: position if position >= 0 else partition.assigned_position
            for partition, position in positions.items()
        }

    def check_stored(self) -> None:
        """Nothing is stored that has not been handed out for good."""
        kept = self.subscription.begins_of_kept()
        for partition in self.subscription:
            position = kept.get(partition, partition.position)
            assert partition.stored <= position or position < 0

    def finish(self) -> None:
        """Read and hand out all that there is, without being told of anything new."""
        while True:
            self.resolve()
            took = self.take(100)
            wanted = self.wanted()
            if wanted:
                self.read(100, wanted)
            elif not took:
                return


def check(log: Log, seen: list[tuple[int, int]], *, were_paused: bool) -> None:
    """Each partition in its order, transactions whole, in that of their commits, and behind what was there then.

    Unless a partition was paused, all of it is in one order.
    """
    for number, batches in enumerate(log.batches):
        expected = [offset for _, first, last, *_ in batches for offset in range(first, last + 1)]
        assert [offset for partition, offset in seen if partition == number] == expected
    runs = [unit for unit, _ in itertools.groupby(seen, key=log.unit_of.__getitem__)]
    assert len(runs) == len(set(runs)), seen
    assert were_paused or runs == sorted(runs), seen
    commits = [unit for unit in runs if unit not in log.plain_ones]
    assert commits == sorted(commits), seen
    at = {unit: index for index, unit in enumerate(runs)}
    for unit in log.plain_ones:
        assert all(at[unit] < at[commit] for commit in commits if commit > unit), seen


def grow(log: Log, chance: random.Random) -> None:
    numbers = range(log.partition_count)
    if chance.random() < 0.3:
        log.plain(chance.choice(numbers))
    else:
        partitions = chance.sample(numbers, chance.randint(1, min(3, log.partition_count)))
        log.commit({number: [chance.randint(1, 2) for _ in range(chance.randint(1, 3))] for number in partitions})


@pytest.mark.slow_but_first
@pytest.mark.parametrize("seed", range(150))
def test_transactions_are_whole_whatever_is_read_when_and_wherever_readers_stop(seed):
    chance = random.Random(seed)
    were_paused = chance.random() < 0.5
    log = Log(chance.randint(2, 4))
    start = dict.fromkeys(range(log.partition_count), 0)
    for _ in range(chance.randint(0, 8)):
        grow(log, chance)
    reader = Reader(log, start, records_low=chance.choice([1, 4, 20]))
    seen: list[tuple[int, int]] = []
    for _ in range(60):
        step = chance.random()
        partition = chance.choice(list(reader.subscription))
        if step < 0.15:
            grow(log, chance)
        elif step < 0.5:
            reader.resolve()
            reader.read(chance.randint(1, 4))
        elif step < 0.8:
            chance.choice([reader.take, reader.keep])(chance.randint(1, 3))
        elif step < 0.87:
            seen += reader.seen
            reader = Reader(log, reader.positions(), records_low=chance.choice([1, 4, 20]))
        elif step < 0.92 and were_paused:
            reader.subscription.pause(partition)
        elif step < 0.96:
            reader.subscription.resume(partition)
        else:
            messages = reader.take(2)
            reader.subscription.give_back(messages)
            del reader.seen[len(reader.seen) - len(messages) :]
        reader.check_stored()
    for partition in reader.subscription:
        reader.subscription.resume(partition)
        # As if something had been committed there.
        partition.is_at_end = False
    reader.finish()
    check(log, seen + reader.seen, were_paused=were_paused)
    assert reader.order.transaction is None


@pytest.mark.parametrize(
    "does",
    [
        Subscription.return_kept,
        Subscription.next_message,
        lambda subscription: subscription.take([], 5),
        lambda subscription: subscription.add("t", 2, 0),
        lambda subscription: subscription.remove("t", 1),
        lambda subscription: subscription.seek(subscription.find("t", 1), 0),
        lambda subscription: subscription.pause(subscription.find("t", 1)),
        lambda subscription: subscription.resume(subscription.find("t", 1)),
    ],
    ids=["return", "next", "take", "add", "remove", "seek", "pause", "resume"],
)
def test_what_is_kept_is_not_stored_and_is_given_back_before_anything_else_is_done(does):
    log = Log(2)
    log.plain(0)
    log.commit({0: [1, 1], 1: [1]})
    reader = Reader(log, {0: 0, 1: 0})
    subscription = reader.subscription
    reader.resolve()
    reader.read(10)
    assert len(reader.take(1)) == 1
    reader.keep(2)
    kept = list(subscription.kept)
    assert [(message.partition(), message.offset()) for message in kept] == [(1, 0), (0, 1)]
    # An aborted transaction behind it is stepped over.
    log.ends[1] += 3
    reader.read(10)
    first, second = subscription
    begins = [POSITIONS.of_message(message) for message in kept]
    for _ in range(2):
        assert second.position == POSITIONS.at(log.ends[1])
        assert reader.positions() == {1: begins[0], 0: begins[1]}
        assert [second.stored, first.stored] == begins
        subscription.let_go()
    does(subscription)
    assert subscription.kept == []
    assert second.stored == begins[0]
    reader.check_stored()
    if does is Subscription.return_kept:
        assert [second.position, first.position] == begins
        reader.finish()
        assert sorted(reader.seen) == [(0, 0), (0, 1), (0, 2), (1, 0)]
        assert second.stored == second.position == POSITIONS.at(log.ends[1])


def test_a_partition_that_is_assigned_later_counts_from_then_on():
    log = Log(2)
    log.commit({0: [1], 1: [1]})
    log.plain(1)
    for _ in range(2):
        log.commit({0: [1], 1: [1]})
    reader = Reader(log, {0: 0})
    reader.resolve()
    reader.read(3)
    reader.take(1)
    reader.subscription.add("t", 1, POSITIONS.at(2))
    assert reader.take(5) == []
    reader.resolve()
    reader.read(5)
    reader.read(5)
    reader.take(2)
    assert [log.unit_of[at] for at in reader.seen] == [1, 2, 3]
    assert reader.order.transaction is not None
    assert reader.ended == 1
    reader.finish()
    assert [log.unit_of[at] for at in reader.seen] == [1, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("outcome", ["out of range", "fails", "stops"])
@pytest.mark.parametrize("since", ["removed", "sought"])
def test_what_was_read_before_a_partition_went_elsewhere_says_nothing_of_it(since, outcome):
    log = Log(2)
    reader = Reader(log, {0: 0, 1: 0})
    subscription = reader.subscription
    reader.resolve()
    two = subscription.to_read(0.0)[1]
    if since == "removed":
        subscription.remove("t", 1)
    else:
        subscription.seek(two.partition, 0)
    error = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
    if outcome == "out of range":
        subscription.out_of_range(two)
    else:
        subscription.fail(two, error, 0.0) if outcome == "fails" else subscription.stop(two, error, 0.0)
    log.plain(0)
    log.commit({0: [1], 1: [1]})
    reader.read(5, subscription.to_read(0.0)[:1])
    # What comes next in a partition that was sought is still to be found out.
    assert len(reader.take(9)) == (2 if since == "removed" else 0)
    reader.finish()
    assert [log.unit_of[at] for at in reader.seen] == ([1, 2] if since == "removed" else [1, 2, 2])


def test_what_goes_wrong_with_one_partition_is_told_while_others_wait_for_it():
    log = Log(2)
    log.plain(0)
    log.commit({0: [1], 1: [1]})
    reader = Reader(log, {0: 0, 1: 0})
    reader.resolve()
    one, two = reader.subscription.to_read(0.0)
    reader.read(2, [one])
    assert reader.take(2) == []
    reader.subscription.fail(two, KafkaError(KafkaError._BAD_MSG), 0.0)
    told = reader.subscription.next_message()
    assert told is not None
    assert told.error() is not None
    # What is in no transaction does not wait any longer.
    assert len(reader.take(2)) == 1
    two.partition.retry_at = 0.0
    reader.finish()
    assert len(reader.seen) == 3


@pytest.mark.parametrize("way", ["fails", "stops", "is damaged"])
def test_what_is_in_no_transaction_does_not_wait_for_a_partition_that_cannot_be_read(way):
    log = Log(2)
    log.plain(1)
    reader = Reader(log, {0: 0, 1: 0})
    reader.resolve()
    reader.read(2)
    log.plain(0)
    log.commit({0: [1]})
    one, two = reader.subscription.to_read(0.0)
    error = KafkaError(KafkaError._BAD_MSG)
    if way == "is damaged":
        head = two.partition.waiting[0]
        assert isinstance(head, Chunk)
        head.open = damaged
    else:
        reader.take(1)
        reader.subscription.fail(two, error, 0.0) if way == "fails" else reader.subscription.stop(two, error, 0.0)
    # Its error comes first.
    assert [message.error() is not None for message in reader.take(2)] == [True]
    reader.read(2, [one])
    assert len(reader.take(1)) == 1
    assert log.unit_of[reader.seen[-1]] == 2
    # The transaction waits.
    assert reader.take(1) == []


def damaged():
    raise CorruptBatch("it is damaged")


def test_what_could_be_read_again_is_waited_for_as_before():
    log = Log(2)
    reader = Reader(log, {0: 0, 1: 0})
    reader.resolve()
    _, two = reader.subscription.to_read(0.0)
    reader.subscription.fail(two, KafkaError(KafkaError._BAD_MSG), 0.0)
    assert len(reader.take(1)) == 1
    two.partition.retry_at = 0.0
    reader.read(2)
    log.plain(1)
    log.plain(0)
    one = next(position for position in reader.subscription.to_read(0.0) if position.partition.number == 0)
    reader.read(2, [one])
    assert reader.take(1) == []
    reader.finish()
    assert [log.unit_of[at] for at in reader.seen[-2:]] == [1, 2]


def test_what_goes_wrong_in_the_middle_of_a_transaction_is_told_there():
    log = Log(2)
    log.commit({0: [1], 1: [1, 1]})
    reader = Reader(log, {0: 0, 1: 0})
    reader.resolve()
    reader.read(2)
    assert len(reader.take(3)) == 2
    _, rest = reader.wanted()
    reader.subscription.fail(rest, KafkaError(KafkaError._BAD_MSG), 0.0)
    told = reader.subscription.next_message()
    assert told is not None
    assert told.error() is not None
    rest.partition.retry_at = 0.0
    reader.finish()
    assert (len(reader.seen), reader.ended) == (3, 1)


def test_a_transaction_of_which_a_partition_is_taken_away_goes_on_and_does_not_count_as_whole():
    log = Log(2)
    log.plain(0)
    log.commit({0: [1, 1], 1: [1]})
    for takes_away in (False, True):
        reader = Reader(log, {0: 0, 1: 0})
        reader.resolve()
        reader.read(10)
        reader.take(1)
        reader.take(1)
        transaction = reader.order.handed_out
        assert transaction is reader.order.transaction is not None
        assert reader.seen == [(0, 0), (1, 0)]
        if takes_away:
            reader.subscription.remove("t", 0)
        else:
            reader.take(1)
            assert reader.order.handed_out is transaction
        reader.finish()
        assert len(reader.seen) == (2 if takes_away else 4)
        assert (reader.order.completed is transaction) is not takes_away
        assert reader.ended == 1


@pytest.mark.parametrize("share", ["is read", "is not read", "of one that is added", "of no other"])
def test_a_transaction_of_which_a_partition_goes_to_another_database_does_not_count_as_whole(share):
    was_there = share.startswith("is")
    log = Log(2)
    log.commit({0: [1, 1], 1: [1, 1]})
    reader = Reader(log, {0: 0, 1: 0} if was_there else {0: 0})
    reader.resolve()
    next(iter(reader.subscription)).leader = 0
    if not was_there:
        reader.read(1)
        assert len(reader.take(1)) == 1
        reader.subscription.add("t", 1, 0)
        reader.resolve()
    *_, second = reader.subscription
    second.leader = 0
    if share != "of no other":
        reader.read(3)
    if was_there:
        assert len(reader.take(1 if share == "is read" else 3)) == (1 if share == "is read" else 3)
    transaction = reader.order.transaction
    assert transaction is not None
    second.leader = 1
    while not reader.ended:
        reader.read(10, [position for position in reader.subscription.to_read(0.0) if position.partition is not second])
        reader.take(1)
    assert (reader.order.completed is transaction) is (share == "of no other")


def test_a_transaction_that_is_interrupted_at_its_last_record_ends_all_the_same():
    log = Log(3)
    log.commit({0: [1], 1: [2]})
    reader = Reader(log, {0: 0, 1: 0, 2: 0})
    reader.resolve()
    reader.read(10)
    assert len(reader.take(2)) == 2
    partition = reader.subscription.find("t", 2)
    assert partition is not None
    reader.subscription.seek(partition, 0)
    assert reader.take(1) == []
    reader.finish()
    assert (len(reader.seen), reader.ended) == (3, 1)


def test_a_transaction_of_which_the_rest_is_not_read_yet_comes_before_another_one_after_a_seek():
    log = Log(2)
    log.commit({0: [1, 1]})
    log.commit({1: [1]})
    reader = Reader(log, {0: 0, 1: 0})
    reader.resolve()
    one, two = reader.subscription.to_read(0.0)
    reader.read(1, [one])
    reader.read(1, [two])
    assert len(reader.take(1)) == 1
    assert reader.seen == [(0, 0)]
    reader.subscription.seek(two.partition, 0)
    reader.resolve()
    _, two = reader.subscription.to_read(0.0)
    reader.read(1, [two])
    assert reader.take(1) == []
    reader.finish()
    assert reader.seen == [(0, 0), (0, 1), (1, 0)]


def test_of_what_is_given_back_that_comes_first_which_began_before():
    log = Log(2)
    log.plain(1)
    log.commit({0: [1, 1]})
    log.commit({1: [1]})
    log.plain(0)
    reader = Reader(log, {1: 0, 0: 0})
    reader.resolve()
    reader.read(10)
    reader.take(2)
    given_back = reader.take(3)
    assert sorted(reader.seen[-3:]) == [(0, 1), (0, 3), (1, 1)]
    del reader.seen[-3:]
    reader.subscription.give_back(given_back)
    reader.finish()
    assert sorted(reader.seen) == [(0, 0), (0, 1), (0, 3), (1, 0), (1, 1)]
    assert reader.seen[2] == (0, 1)


def test_a_partition_that_is_paused_from_the_beginning_keeps_nothing_from_others_but_what_it_shares():
    log = Log(2)
    log.plain(0)
    log.commit({1: [1]})
    log.commit({0: [1], 1: [1]})
    reader = Reader(log, {0: 0, 1: 0})
    partition = reader.subscription.find("t", 1)
    assert partition is not None
    reader.subscription.pause(partition)
    reader.finish()
    assert reader.seen == [(0, 0)]
    reader.subscription.resume(partition)
    assert len(reader.take(1)) == 1
    reader.subscription.pause(partition)
    # It has been read, and nothing of it is begun.
    assert reader.take(1) == []
    reader.subscription.resume(partition)
    reader.finish()
    assert reader.seen == [(0, 0), (1, 0), (0, 1), (1, 2)]


def test_records_outside_transactions_that_never_end_keep_no_transaction_back_for_ever():
    log = Log(2)
    for _ in range(4):
        log.plain(0)
    reader = Reader(log, {0: 0, 1: 0}, records_low=4)
    reader.resolve()
    reader.read(4)
    log.commit({1: [1]})
    # So much is buffered of the first partition that it is not asked for when the transaction is read.
    reader.read(4, [position for position in reader.subscription.to_read(0.0) if position.partition.number == 1])
    while (1, 0) not in reader.seen:
        assert len(reader.take(1)) == 1
        log.plain(0)
        reader.read(4)
        assert len(reader.seen) < 20
    # What was there when the transaction was committed came before it.
    assert len(reader.seen) > 4


def test_who_had_read_everything_reads_again_what_another_partition_tells_of():
    log = Log(2)
    reader = Reader(log, {0: 0, 1: 0})
    reader.finish()
    assert reader.wanted() == []
    log.commit({0: [1], 1: [1]})
    one, two = reader.subscription.to_read(0.0)
    reader.read(10, [one])
    assert [position.partition for position in reader.wanted()] == [one.partition, two.partition]
    reader.finish()
    assert len(reader.seen) == 2


def test_a_paused_partition_is_read_again_for_a_transaction_that_waits_for_what_comes_next_in_it():
    log = Log(2)
    reader = Reader(log, {0: 0, 1: 0})
    reader.resolve()
    reader.read(2)
    one, two = reader.subscription
    reader.subscription.pause(two)
    log.commit({0: [1]})
    one.is_at_end = False
    reader.read(2)
    assert (len(reader.take(9)), reader.ended) == (0, 0)
    reader.finish()
    assert (reader.seen, reader.ended) == ([(0, 0)], 1)
