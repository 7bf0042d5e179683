"""Partitions that are assigned while a transaction is handed out whole, or was read and is not handed out yet."""

from __future__ import annotations

import random

import pytest

from tests.clients.consumer.log_writer import PATIENCE_SECONDS, eventually
from tests.clients.consumer.test_atomic import ATOMIC
from tests.clients.consumer.test_atomic_order import POSITIONS, Log, Reader, grow
from txnstore import OFFSET_BEGINNING, TopicPartition
from txnstore.clients.model.message import Message


def whole(reader: Reader) -> list[Message]:
    """Take what comes next if all of it is there, as `consume_transaction` does."""
    subscription, order = reader.subscription, reader.order
    while True:
        transaction = order.handed_out
        if subscription.kept and (transaction is None or order.transaction is not transaction):
            if transaction is not None and order.completed is not transaction:
                subscription.return_kept()
                return []
            messages = subscription.let_go_kept()
            subscription.let_go()
            reader.seen += [(message.partition(), message.offset()) for message in messages]
            return messages
        if subscription.keep_next() is None:
            subscription.let_go()
            return []


def test_half_a_transaction_that_is_read_and_not_handed_out_waits_for_what_is_assigned_meanwhile():
    log = Log(4)
    log.commit({0: [1], 1: [3], 2: [1, 2], 3: [2]})
    # Whoever came before has got the first record of one of them.
    reader = Reader(log, {1: 0, 2: POSITIONS.at(3, 1)})
    reader.resolve()
    reader.read(10)
    for number in (0, 3):
        reader.subscription.add("t", number, 0)
    assert whole(reader) == []
    reader.resolve()
    reader.read(10)
    assert sorted((message.partition(), message.offset()) for message in whole(reader)) == [
        *((0, 0), (1, 0), (1, 1), (1, 2), (2, 1), (2, 2), (3, 0), (3, 1))
    ]
    assert reader.ended == 1


def test_of_two_halves_that_comes_first_which_was_committed_first_whatever_was_assigned_first():
    log = Log(3)
    log.commit({0: [1, 1]})
    log.commit({1: [1], 2: [1, 1]})
    reader = Reader(log, {1: 0, 2: POSITIONS.at(2, 1)})
    reader.resolve()
    reader.read(10)
    reader.subscription.add("t", 0, POSITIONS.at(2, 1))
    reader.finish()
    assert [log.unit_of[at] for at in reader.seen] == [1, 2, 2]


@pytest.mark.parametrize("takes_whole", [False, True])
def test_a_transaction_that_is_being_handed_out_does_not_end_before_the_share_of_what_is_assigned_meanwhile(
    takes_whole,
):
    log = Log(4)
    log.commit({0: [1, 1], 1: [1], 2: [1]})
    log.plain(3)
    reader = Reader(log, {0: 0, 1: 0})
    reader.resolve()
    reader.read(10)
    assert len(reader.take(1)) == 1
    transaction = reader.order.transaction
    assert transaction is not None
    for number in (2, 3):
        reader.subscription.add("t", number, 0)
    if takes_whole:
        reader.resolve()
        reader.read(10)
        assert len(whole(reader)) == 3
    else:
        assert len(reader.take(9)) == 2
        assert (reader.order.transaction, reader.ended) == (transaction, 0)
    reader.finish()
    assert [log.unit_of[at] for at in reader.seen] == [1, 1, 1, 1, 2]
    assert (reader.order.completed, reader.ended) == (transaction, 1)


def test_what_is_assigned_meanwhile_and_is_of_another_database_has_no_share():
    log = Log(2)
    log.commit({0: [1, 1]})
    # The other database has a transaction of the same number.
    log.count = 0
    log.commit({1: [1]})
    reader = Reader(log, {0: 0})
    (one,) = reader.subscription
    one.leader = 7
    reader.resolve()
    reader.read(1)
    assert len(reader.take(1)) == 1
    reader.subscription.add("t", 1, 0)
    two = reader.subscription.find("t", 1)
    assert two is not None
    reader.read(9)
    assert len(reader.take(9)) == 1
    # Nobody knows yet where it is.
    assert reader.ended == 0
    two.leader = 8
    reader.resolve()
    reader.read(9)
    assert reader.ended == 1
    assert len(reader.take(9)) == 1
    assert reader.ended == 2


def next_transaction(log: Log, number: int, position: int) -> int | None:
    """Return the number of the transaction that comes next in this partition; None if something else does."""
    place, within = POSITIONS.pair(position)
    for batch_place, _, last, number_of_commit, is_within in log.batches[number]:
        if batch_place > place or (batch_place == place and (not is_within or last >= within)):
            return number_of_commit if is_within else None
    return None


class Member:
    """A reader that is given partitions and gives them back, and takes transactions whole or record by record."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.log = Log(chance.randint(2, 4))
        self.reader = Reader(self.log, {}, records_low=chance.choice([1, 4, 20]))
        self._subscription = self.reader.subscription
        self._positions = dict.fromkeys(range(self.log.partition_count), 0)

    def grow(self) -> None:
        grow(self.log, self._chance)

    def read(self) -> None:
        self.reader.resolve()
        self.reader.read(self._chance.randint(1, 4))

    def take(self) -> None:
        self.reader.take(self._chance.randint(1, 3))

    def take_whole(self) -> None:
        before = len(self.reader.seen)
        whole(self.reader)
        units = {self.log.unit_of[at] for at in self.reader.seen[before:]}
        assert len(units) <= 1
        for number, position in self.reader.positions().items():
            assert not units or next_transaction(self.log, number, position) not in units

    def be_given(self) -> None:
        number = self._chance.choice(list(self._positions))
        if self._subscription.find("t", number) is None:
            self._subscription.add("t", number, self._positions[number])

    def give_back(self) -> None:
        number = self._chance.choice(list(self._positions))
        self._positions |= self.reader.positions()
        self._subscription.remove("t", number)

    def take_rest(self) -> None:
        self._subscription.return_kept()
        for number, position in self._positions.items():
            if self._subscription.find("t", number) is None:
                self._subscription.add("t", number, position)
        for partition in self._subscription:
            partition.is_at_end = False
        self.reader.finish()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("seed", range(100))
def test_what_is_handed_out_whole_is_so_in_all_that_is_assigned_then_whatever_comes_and_goes(seed):
    chance = random.Random(seed)
    member = Member(chance)
    for _ in range(chance.randint(2, 8)):
        member.grow()
    steps = {
        member.grow: 2,
        member.read: 7,
        member.take: 2,
        member.take_whole: 4,
        member.be_given: 4,
        member.give_back: 1,
    }
    for step in chance.choices(list(steps), list(steps.values()), k=150):
        step()
        member.reader.check_stored()
    member.take_rest()
    for number, batches in enumerate(member.log.batches):
        expected = [offset for _, first, last, *_ in batches for offset in range(first, last + 1)]
        assert [offset for partition, offset in member.reader.seen if partition == number] == expected


def test_a_consumer_that_is_given_one_partition_and_a_moment_later_another_one_gets_half_a_transaction_from_both(
    log, make_consumer
):
    log.topic(partition_count=2)
    both = log.transaction()
    for partition in (0, 1):
        both.write("t", partition, b"begun", b"rest")
    both.end(commit=True)
    consumer = make_consumer(ATOMIC)
    # Whoever had them before has got one record of it.
    consumer.assign([TopicPartition("t", 0, 2, offset_in_transaction=1)])
    eventually(lambda: consumer._core.subscription.buffered_records)
    consumer.incremental_assign([TopicPartition("t", 1, OFFSET_BEGINNING)])
    transaction = consumer.consume_transaction(PATIENCE_SECONDS)
    assert sorted(message.value() for message in transaction.messages) == [b"begun", b"rest", b"rest"]
