"""What a consumer knows of its partitions: positions, buffers and what to read next, without thread and database."""

from __future__ import annotations

from functools import partial

import pytest

from tests.clients.moments import attempt, every_interrupt, is_no_moment_for_signals
from txnstore.clients.consumer.opening import Chunk, PageRead
from txnstore.clients.consumer.orders import RoundRobin
from txnstore.clients.consumer.subscription import Subscription
from txnstore.clients.model.errors import KafkaError
from txnstore.clients.model.message import RecordSource, message_of
from txnstore.clients.model.topic_partition import OFFSET_INVALID, OFFSET_STORED
from txnstore.errors import CorruptBatch
from txnstore.log.bounds import Bounds


def records(source, first, last):
    rows = ((offset, 1000, None, b"%d" % offset, ()) for offset in range(first, last + 1))
    return iter([message_of(source, row) for row in rows])


def chunk(first, last, *, next_offset=None, topic="t", number=0, size_bytes=1, open_=None):
    source = RecordSource(topic, number, 1)
    return Chunk(
        source,
        open_ or partial(records, source, first, last),
        last - first + 1,
        size_bytes,
        first,
        last,
        last + 1 if next_offset is None else next_offset,
        first,
    )


def page(*chunks, next_offset, end_offset=None):
    end_offset = next_offset if end_offset is None else end_offset
    return PageRead(chunks, next_offset, Bounds(1, 0, max(end_offset, next_offset), end_offset), end_offset)


@pytest.fixture
def make():
    def make_(*numbers, offset=0, **options):
        usual = {"stores_offsets": True, "reports_eof": False, "records_low": 10, "bytes_low": 1000}
        subscription = Subscription(**{**usual, **options})
        for number in numbers:
            subscription.add("t", number, offset)
            subscription.resolved(subscription.to_resolve(0.0)[0], offset)
        return subscription

    return make_


def fill(subscription, number, *chunks, **rest):
    positions = {position.partition.number: position for position in subscription.to_read(0.0)}
    subscription.deliver(positions[number], page(*chunks, **rest))


def offsets(messages):
    return [message.offset() for message in messages]


def taken(subscription, count):
    messages: list = []
    subscription.take(messages, count)
    return messages


def one_by_one(subscription, count):
    found = (subscription.next_message() for _ in range(count))
    return [message for message in found if message is not None]


@pytest.mark.parametrize("take", [taken, one_by_one])
def test_records_come_in_order_and_the_position_goes_behind_them(make, take):
    subscription = make(0)
    fill(subscription, 0, chunk(0, 3), chunk(4, 5), next_offset=6)
    partition = subscription.find("t", 0)
    assert partition.position == OFFSET_INVALID
    assert offsets(take(subscription, 3)) == [0, 1, 2]
    assert (partition.position, partition.stored) == (3, 3)
    assert offsets(take(subscription, 9)) == [3, 4, 5]
    assert (partition.position, partition.stored) == (6, 6)
    assert not subscription.has_messages
    assert (subscription.buffered_records, subscription.buffered_bytes) == (0, 0)


@pytest.mark.parametrize("take", [taken, one_by_one])
def test_the_position_steps_over_markers_with_the_last_record_before_them(make, take):
    subscription = make(0)
    fill(subscription, 0, chunk(0, 1, next_offset=3), chunk(3, 4, next_offset=7), next_offset=7)
    partition = subscription.find("t", 0)
    take(subscription, 2)
    assert partition.position == 3
    take(subscription, 2)
    assert partition.position == 7


def test_markers_that_come_later_are_stepped_over_at_once_or_behind_what_is_buffered(make):
    subscription = make(0)
    partition = subscription.find("t", 0)
    fill(subscription, 0, next_offset=2)
    assert (partition.position, partition.stored) == (2, 2)
    fill(subscription, 0, chunk(2, 3), next_offset=4)
    fill(subscription, 0, next_offset=5)
    assert partition.position == 2
    assert offsets(taken(subscription, 9)) == [2, 3]
    assert partition.position == 5


def test_without_storing_offsets_only_the_position_moves(make):
    subscription = make(0, stores_offsets=False)
    fill(subscription, 0, chunk(0, 3), next_offset=4)
    taken(subscription, 2)
    subscription.next_message()
    assert subscription.find("t", 0).position == 3
    assert subscription.find("t", 0).stored == OFFSET_INVALID


def test_nothing_that_a_call_still_gathers_is_stored_whoever_else_returns(make):
    subscription = make(0, 1, records_low=100)
    zero, one = subscription.find("t", 0), subscription.find("t", 1)
    fill(subscription, 0, chunk(0, 3), next_offset=4)
    first: list = []
    subscription.withhold(first)
    subscription.take(first, 2)
    second: list = []
    subscription.withhold(second)
    subscription.take(second, 2)
    fill(subscription, 1, chunk(0, 3, number=1), next_offset=4)
    subscription.take(second, 4)
    assert [(message.partition(), message.offset()) for message in second] == [(0, 2), (0, 3), (1, 0), (1, 1)]
    subscription.gathered.pop(id(second))
    subscription.let_go()
    assert (zero.position, zero.stored) == (4, 0)
    assert (one.position, one.stored) == (2, 2)
    # What is returned one by one meanwhile, too.
    subscription.next_message()
    assert (one.position, one.stored) == (3, 2)
    subscription.gathered.pop(id(first))
    subscription.let_go()
    assert (zero.stored, one.stored) == (4, 3)
    subscription.next_message()
    assert one.stored == 4


def test_what_is_given_back_is_not_stored_any_more_also_while_another_call_gathers(make):
    subscription = make(0)
    partition = subscription.find("t", 0)
    fill(subscription, 0, chunk(0, 9), next_offset=10)
    messages = taken(subscription, 4)
    subscription.withhold([])
    subscription.give_back(messages[2:])
    assert (partition.position, partition.stored) == (2, 2)


def test_a_partition_has_its_turn_again_after_an_interrupt_that_came_between_two(make, monkeypatch):
    order = RoundRobin()
    subscription = make(0, order=order)
    fill(subscription, 0, chunk(0, 0), chunk(1, 1), next_offset=2)

    def interrupted(partition, assigned):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(order, "arrange", interrupted)
        with pytest.raises(KeyboardInterrupt):
            subscription.take([], 1)
    subscription.give_back([])
    assert offsets(taken(subscription, 1)) == [1]


def test_a_partition_goes_with_all_that_is_buffered_of_it_or_stays_with_it_whenever_an_interrupt_comes(make):
    for _, interrupt in every_interrupt({"consumer/subscription.py"}, is_no_moment_for_signals):
        subscription = make(0, 1)
        fill(subscription, 0, chunk(0, 4), next_offset=5)
        attempt(interrupt, partial(subscription.remove, "t", 0))
        if subscription.find("t", 0) is not None:
            subscription.remove("t", 0)
        assert subscription.buffered_records == subscription.buffered_bytes == 0, interrupt.where
        assert taken(subscription, 1) == [], interrupt.where


def test_while_enough_is_buffered_no_partition_is_looked_at(make):
    subscription = make(0, 1, records_low=2)
    fill(subscription, 0, chunk(0, 9), next_offset=10)
    assert subscription.to_read(0.0, is_wanted=lambda partition: pytest.fail("nothing can come of it")) == []


def test_partitions_take_turns(make):
    subscription = make(0, 1, records_low=100)
    fill(subscription, 0, chunk(0, 1), chunk(2, 3), next_offset=4)
    fill(subscription, 1, chunk(0, 1, number=1), chunk(2, 3, number=1), next_offset=4)
    assert [message.partition() for message in taken(subscription, 8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_seek_drops_what_is_buffered_and_what_is_on_its_way(make):
    subscription = make(0)
    (position,) = subscription.to_read(0.0)
    fill(subscription, 0, chunk(0, 3), next_offset=4)
    partition = subscription.find("t", 0)
    subscription.seek(partition, 9)
    assert partition.position == OFFSET_INVALID
    assert subscription.next_message() is None
    subscription.deliver(position, page(chunk(4, 5), next_offset=6))
    assert subscription.next_message() is None
    assert subscription.buffered_records == 0
    (again,) = subscription.to_resolve(0.0)
    assert again.position == 9


def test_what_was_read_for_a_partition_that_is_gone_is_dropped_even_if_it_is_back(make):
    subscription = make(0)
    (position,) = subscription.to_read(0.0)
    subscription.clear()
    subscription.add("t", 0, 0)
    subscription.deliver(position, page(chunk(0, 3), next_offset=4))
    assert subscription.next_message() is None
    assert subscription.buffered_records == 0
    assert (subscription.traffic.requests, subscription.traffic.records) == (0, 0)


def test_what_two_have_read_counts_once(make):
    subscription = make(0)
    first, second = subscription.to_read(0.0) + subscription.to_read(0.0)
    for position in (first, second):
        subscription.deliver(position, page(chunk(0, 3), next_offset=4))
    assert offsets(taken(subscription, 9)) == [0, 1, 2, 3]
    subscription.seek(subscription.find("t", 0), 9)
    first, second = subscription.to_resolve(0.0) + subscription.to_resolve(0.0)
    for position in (first, second):
        subscription.stop(position, KafkaError(KafkaError._AUTO_OFFSET_RESET), 0.0)
    assert len(taken(subscription, 9)) == 1


def test_a_paused_partition_keeps_its_buffer_and_asks_for_nothing(make):
    subscription = make(0, 1)
    fill(subscription, 0, chunk(0, 3), next_offset=4)
    partition = subscription.find("t", 0)
    assert subscription.next_message().offset() == 0
    subscription.pause(partition)
    assert subscription.next_message() is None
    assert [position.partition.number for position in subscription.to_read(0.0)] == [1]
    subscription.resume(partition)
    subscription.resume(partition)
    assert offsets(taken(subscription, 9)) == [1, 2, 3]


@pytest.mark.parametrize("limits", [{"records_low": 9}, {"bytes_low": 9}], ids=["records", "bytes"])
def test_what_is_paused_leaves_others_all_the_room(make, limits):
    subscription = make(0, 1, 2, **limits)
    for number in (0, 1):
        fill(subscription, number, chunk(0, 4, number=number, size_bytes=5), next_offset=5, end_offset=99)
    assert subscription.to_read(0.0) == []
    for number in (0, 1):
        subscription.pause(subscription.find("t", number))
    assert [position.partition.number for position in subscription.to_read(0.0)] == [2]
    fill(subscription, 2, chunk(0, 9, number=2, size_bytes=10), next_offset=10, end_offset=99)
    assert subscription.to_read(0.0) == []
    assert len(taken(subscription, 99)) == 10
    for number in (0, 1):
        subscription.resume(subscription.find("t", number))
    assert len(taken(subscription, 99)) == 10


def test_a_partition_that_is_resumed_may_have_more_than_it_had_when_it_was_paused(make):
    subscription = make(0)
    fill(subscription, 0, next_offset=0)
    partition = subscription.find("t", 0)
    subscription.resume(partition)
    assert partition.is_at_end
    subscription.pause(partition)
    subscription.resume(partition)
    assert not partition.is_at_end


def test_the_end_is_said_once_for_each_arrival_at_it(make):
    subscription = make(0, reports_eof=True)
    fill(subscription, 0, chunk(0, 1), next_offset=2)
    fill(subscription, 0, next_offset=2)
    messages = taken(subscription, 9)
    assert offsets(messages) == [0, 1, 2]
    assert messages[2].error().code() == KafkaError._PARTITION_EOF
    fill(subscription, 0, next_offset=2)
    assert taken(subscription, 9) == []
    fill(subscription, 0, chunk(2, 2), next_offset=3)
    assert [message.error() is None for message in taken(subscription, 9)] == [True, False]
    subscription.seek(subscription.find("t", 0), 3)
    subscription.resolved(subscription.to_resolve(0.0)[0], 3)
    fill(subscription, 0, next_offset=3)
    assert offsets(taken(subscription, 9)) == [3]


def test_reading_ahead_is_bounded_by_records_and_by_bytes(make):
    subscription = make(0, records_low=4)
    fill(subscription, 0, chunk(0, 3), next_offset=4, end_offset=10)
    assert subscription.to_read(0.0) == []
    taken(subscription, 4)
    assert subscription.wants_more
    assert subscription.to_read(0.0)
    subscription = make(0, bytes_low=50)
    fill(subscription, 0, chunk(0, 0, size_bytes=50), next_offset=1, end_offset=10)
    assert subscription.to_read(0.0) == []


def test_nobody_fills_the_buffer_alone_and_who_got_nothing_comes_first(make):
    subscription = make(0, 1, 2, records_low=9)
    positions = {position.partition.number: position for position in subscription.to_read(0.0)}
    subscription.deliver(positions[0], page(chunk(0, 2), next_offset=3, end_offset=9))
    subscription.deliver(positions[1], page(next_offset=0, end_offset=9))
    subscription.deliver(positions[2], page(next_offset=0))
    assert [position.partition.number for position in subscription.to_read(0.0)] == [1]
    fill(subscription, 1, chunk(0, 0, number=1), next_offset=1, end_offset=9)
    assert [position.partition.number for position in subscription.to_read(0.0)] == [1, 2]


def test_an_error_is_said_once_in_a_while_and_reading_is_tried_ever_more_rarely(make):
    subscription = make(0)
    error = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
    now, said, tries = 0.0, 0, 0
    while now < 29:
        for position in subscription.to_read(now):
            tries += 1
            subscription.fail(position, error, now)
        said += len(taken(subscription, 9))
        now += 0.01
    assert said == 1
    assert 14 < tries < 25
    (position,) = subscription.to_read(40.0)
    subscription.fail(position, error, 40.0)
    assert [message.error().code() for message in taken(subscription, 9)] == [error.code()]
    assert 0 < subscription.next_retry(40.0) <= 2


def test_a_failure_that_nobody_needs_to_know_is_not_said(make):
    subscription = make(0)
    (position,) = subscription.to_read(0.0)
    subscription.fail(position, None, 0.0)
    assert subscription.next_message() is None
    assert subscription.to_read(0.0) == []
    assert len(subscription.to_read(1.0)) == 1


def test_a_partition_that_is_stopped_is_read_again_after_a_seek_only(make):
    subscription = make(0)
    (position,) = subscription.to_read(0.0)
    subscription.stop(position, KafkaError(KafkaError._AUTO_OFFSET_RESET), 0.0, offset=99)
    assert subscription.next_message().offset() == 99
    assert subscription.to_read(1e9) == []
    subscription.seek(subscription.find("t", 0), 1)
    assert [found.position for found in subscription.to_resolve(0.0)] == [1]


def test_a_batch_that_cannot_be_opened_is_said_and_the_position_stays(make):
    def damaged():
        raise CorruptBatch

    subscription = make(0)
    fill(subscription, 0, chunk(0, 1), chunk(2, 3, open_=damaged), chunk(4, 5), next_offset=6)
    messages = taken(subscription, 9)
    assert offsets(messages) == [0, 1, 2]
    assert messages[2].error().code() == CorruptBatch.code
    partition = subscription.find("t", 0)
    assert (partition.position, partition.fetch_position) == (2, 2)
    assert subscription.buffered_records == 0
    assert subscription.to_read(0.0) == []


def test_messages_that_did_not_reach_the_application_come_again(make):
    subscription = make(0)
    fill(subscription, 0, chunk(0, 3), next_offset=4)
    subscription.next_message()
    messages = taken(subscription, 2)
    subscription.give_back(messages)
    partition = subscription.find("t", 0)
    assert (partition.position, partition.stored) == (1, 1)
    assert [position.position for position in subscription.to_resolve(0.0)] == [1]


def test_what_is_stored_is_to_be_committed_only_above_what_is_committed(make):
    subscription = make(0, 1, 2)
    for number, stored, committed in ((0, 5, 4), (1, 5, 5), (2, 5, 9)):
        partition = subscription.find("t", number)
        partition.stored, partition.committed = stored, committed
    assert [partition.uncommitted for partition in subscription] == [5, OFFSET_INVALID, OFFSET_INVALID]


def test_an_assignment_without_offset_begins_at_the_committed_one(make):
    subscription = make()
    subscription.add("t", 0, OFFSET_INVALID)
    assert [position.position for position in subscription.to_resolve(0.0)] == [OFFSET_STORED]
    assert subscription.find("t", 0).assigned_position == OFFSET_STORED


def test_an_offset_that_has_left_the_log_is_resolved_anew(make):
    subscription = make(0, offset=5)
    (position,) = subscription.to_read(0.0)
    subscription.out_of_range(position)
    assert subscription.to_read(0.0) == []
    assert [found.position for found in subscription.to_resolve(0.0)] == [5]


def test_of_a_partition_made_anew_nothing_counts_as_read_that_an_interrupted_call_gave_back(make):
    """The application may still commit what it has read of the deleted one."""
    subscription = make(0)
    partition = subscription.find("t", 0)
    subscription._begin_anew(partition)
    subscription.resolved(subscription.to_resolve(0.0)[0], 0)

    def interrupted():
        raise KeyboardInterrupt

    for open_ in (lambda: iter(interrupted, None), None):
        fill(subscription, 0, chunk(0, 2, open_=open_), next_offset=3)
        if open_ is None:
            subscription.give_back([subscription.next_message()])
        else:
            with pytest.raises(KeyboardInterrupt):
                subscription.next_message()
        assert partition.is_unread
        assert partition.stored <= 0
        subscription.resolved(subscription.to_resolve(0.0)[0], 0)
    fill(subscription, 0, chunk(0, 2), next_offset=3)
    assert subscription.next_message().offset() == 0
    assert not partition.is_unread
    assert partition.stored == 1


@pytest.mark.parametrize("sought", [False, True])
def test_an_offset_that_has_left_the_log_is_none_of_a_partition_made_anew_unless_it_is_sought_there(make, sought):
    subscription = make()
    subscription.add("t", 0, 5)
    subscription.resolved(subscription.to_resolve(0.0)[0], 5, partition_id=1)
    (position,) = subscription.to_read(0.0)
    subscription.out_of_range(position)
    if sought:
        subscription.seek(subscription.find("t", 0), 5)
    (found,) = subscription.to_resolve(0.0)
    subscription.resolved(found, 5, partition_id=2)
    assert [found.position for found in subscription.to_resolve(0.0)] == ([] if sought else [OFFSET_STORED])
    assert subscription.find("t", 0).is_unread is not sought


@pytest.mark.parametrize("is_recreated", [False, True])
def test_what_is_given_back_comes_again_or_the_partition_made_anew_from_where_it_begins(make, is_recreated):
    subscription = make()
    subscription.add("t", 0, 0)
    subscription.resolved(subscription.to_resolve(0.0)[0], 0, partition_id=1)
    fill(subscription, 0, chunk(0, 9), next_offset=10)
    taken(subscription, 5)
    subscription.give_back(taken(subscription, 5))
    (found,) = subscription.to_resolve(0.0)
    assert found.position == 5
    subscription.resolved(found, 5, partition_id=2 if is_recreated else 1)
    if is_recreated:
        assert [found.position for found in subscription.to_resolve(0.0)] == [OFFSET_STORED]
    else:
        assert [position.position for position in subscription.to_read(0.0)] == [5]


@pytest.mark.parametrize("call", ["poll", "consume"])
@pytest.mark.parametrize("comes_again", [False, True])
def test_what_is_given_back_of_a_deleted_partition_passes_over_nothing_of_the_one_made_anew(make, call, comes_again):
    """It has begun anew already, and its offsets are low; the call may have gathered a record of it as well."""
    subscription = make()
    subscription.add("t", 0, 3)
    subscription.resolved(subscription.to_resolve(0.0)[0], 3, partition_id=1)
    fill(subscription, 0, chunk(3, 9), next_offset=10)
    gathered: list = []
    if call == "consume":
        subscription.withhold(gathered)
        subscription.take(gathered, 2)
    else:
        gathered.append(subscription.next_message())
    (position,) = subscription.to_read(0.0)
    subscription.recreated(position)
    subscription.resolved(subscription.to_resolve(0.0)[0], 0, partition_id=2)
    if comes_again and call == "consume":
        fill(subscription, 0, chunk(0, 2), next_offset=3)
        subscription.take(gathered, 1)
        assert offsets(gathered) == [0]
    subscription.give_back(gathered)
    positions = [*subscription.to_read(0.0), *subscription.to_resolve(0.0)]
    assert [position.position for position in positions] == [0]
    assert subscription.find("t", 0).stored <= 0


def test_what_goes_back_in_a_partition_made_anew_does_so_however_often_that_is_interrupted(make, monkeypatch):
    subscription = make(0)
    partition = subscription.find("t", 0)
    subscription._begin_anew(partition)
    subscription.resolved(subscription.to_resolve(0.0)[0], 0)
    fill(subscription, 0, chunk(0, 2), next_offset=3)
    message = subscription.next_message()
    assert partition.stored == 1

    def interrupted(partition):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(subscription, "_forgive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            subscription.give_back([message])
    subscription.give_back([message])
    assert [position.position for position in subscription.to_resolve(0.0)] == [0]
    assert partition.stored == 0


def test_what_is_paused_keeps_no_more_than_its_first_records_once_all_is_twice_as_much_as_is_read_ahead(make):
    subscription = make(0, 1, 2, records_low=10, reports_eof=True)
    fill(subscription, 0, chunk(0, 3), chunk(4, 7, next_offset=9), next_offset=9)
    assert offsets(taken(subscription, 1)) == [0]
    subscription.pause(subscription.find("t", 0))
    fill(subscription, 1, chunk(0, 3, number=1), chunk(4, 7, number=1), chunk(8, 11, number=1), next_offset=12)
    subscription.pause(subscription.find("t", 1))
    assert subscription.buffered_records == 20
    # Somebody reads on who has nothing.
    assert [position.partition.number for position in subscription.to_read(0.0)] == [2]
    assert (subscription.buffered_records, subscription.buffered_bytes) == (8, 2)
    for number in (0, 1):
        subscription.resume(subscription.find("t", number))
    found = taken(subscription, 100)
    wanted = {position.partition.number: position.position for position in subscription.to_read(0.0)}
    assert wanted == {0: 4, 1: 4, 2: 0}
    fill(subscription, 0, chunk(4, 7, next_offset=9), next_offset=9)
    fill(subscription, 1, chunk(4, 7, number=1), chunk(8, 11, number=1), next_offset=12)
    found += taken(subscription, 100)
    for number, last, first in ((0, 7, 1), (1, 11, 0)):
        of_partition = [message for message in found if message.partition() == number]
        assert offsets(of_partition)[:-1] == list(range(first, last + 1))
        assert of_partition[-1].error().code() == KafkaError._PARTITION_EOF
    assert (subscription.buffered_records, subscription.buffered_bytes) == (0, 0)


@pytest.mark.parametrize(("others", "records_low"), [([], 5), ([1], 10)], ids=["nobody else reads", "there is room"])
def test_what_is_paused_keeps_everything_while_nobody_else_reads_or_there_is_room(make, others, records_low):
    subscription = make(0, *others, records_low=records_low)
    fill(subscription, 0, chunk(0, 5), chunk(6, 11), next_offset=12)
    subscription.pause(subscription.find("t", 0))
    assert [position.partition.number for position in subscription.to_read(0.0)] == others
    assert subscription.buffered_records == 12


@pytest.mark.parametrize("call", ["poll", "consume"])
@pytest.mark.parametrize("handler", ["poll", "consume"])
def test_no_record_is_left_out_if_a_signals_handler_reads_meanwhile(make, call, handler):
    seen: list[int] = []
    subscription = make(0)

    def poll() -> None:
        message = subscription.next_message()
        if message is not None:
            seen.append(message.offset())

    calls = {"poll": poll, "consume": lambda: seen.extend(offsets(taken(subscription, 2)))}
    for begin in range(5):
        for _, moment in every_interrupt({"consumer/subscription.py"}, is_no_moment_for_signals, calls[handler]):
            subscription = make(0)
            fill(subscription, 0, *(chunk(first, first + 1) for first in range(0, 8, 2)), next_offset=8)
            del seen[:]
            for _ in range(begin):
                poll()
            attempt(moment, calls[call])
            while subscription.has_messages:
                poll()
            assert sorted(seen) == list(range(8)), (begin, moment.where)
            assert (subscription.buffered_records, subscription.buffered_bytes) == (0, 0), moment.where
