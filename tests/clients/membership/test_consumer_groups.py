"""Subscriptions: callbacks in the order that was seen, takeovers, new topics and partitions, and late applications."""

from __future__ import annotations

import pytest

from tests.clients.consumer.log_writer import PATIENCE_SECONDS, error_code, eventually, polled_until, texts
from txnstore import OFFSET_INVALID, KafkaError, KafkaException, TopicPartition
from txnstore.clients.membership.metadata import parse_group_metadata
from txnstore.testing.manual_clock import ManualClock

pytestmark = pytest.mark.least_privilege

TP = TopicPartition
COOPERATIVE = {"partition.assignment.strategy": "cooperative-sticky"}


class Listener:
    """Writes down what the callbacks are told."""

    def __init__(self):
        self.calls = []

    def named(self, name, do=None):
        def callback(consumer, partitions):
            self.calls.append((name, [(tp.topic, tp.partition, tp.offset) for tp in partitions]))
            if do is not None:
                do(consumer, partitions)

        return callback

    def subscribe(self, consumer, *topics, **callbacks):
        usual = {name: self.named(name) for name in ("on_assign", "on_revoke", "on_lost")}
        consumer.subscribe(list(topics), **{**usual, **callbacks})

    def taken(self):
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def listener():
    return Listener()


@pytest.fixture
def two(log):
    """A topic t of two partitions with one record each."""
    log.topic(partition_count=2)
    log.write("t", 0, b"0")
    log.write("t", 1, b"1")


def told(name, *numbers, topic="t"):
    return (name, [(topic, number, OFFSET_INVALID) for number in numbers])


def membership_of(consumer):
    return parse_group_metadata(consumer.consumer_group_metadata())


def raised(call, *arguments, **named):
    with pytest.raises(KafkaException) as caught:
        call(*arguments, **named)
    return caught.value.args[0]


def crash(consumer):
    """Let nobody speak for the consumer any more, as if its process had been killed."""
    assert consumer._core.group.close(PATIENCE_SECONDS)
    assert consumer._core.fetcher.close(PATIENCE_SECONDS)


def test_the_application_is_told_of_its_partitions_when_it_polls_and_when_it_closes(two, make_consumer, listener, log):
    consumer = make_consumer({"client.id": "worker"})
    assert consumer.memberid() is None
    listener.subscribe(consumer, "t")
    assert sorted(texts(consumer.consume(2, PATIENCE_SECONDS))) == [b"0", b"1"]
    assert listener.taken() == [told("on_assign", 0, 1)]
    assert [(tp.partition, tp.offset) for tp in consumer.assignment()] == [(0, -1000), (1, -1000)]
    assert consumer.memberid().startswith("worker-")
    (member,) = log.members("readers")
    assert member.member_id == consumer.memberid()
    assert sorted(partition.partition for partition in member.assignment) == [0, 1]
    assert membership_of(consumer).generation == member.generation == 1
    consumer.close()
    assert listener.taken() == [told("on_revoke", 0, 1)]
    assert log.members("readers") == []


def test_a_callback_may_assign_by_itself(two, make_consumer, listener):
    consumer = make_consumer()
    assign = listener.named("on_assign", lambda consumer, partitions: consumer.assign([TP("t", 1, 0)]))
    listener.subscribe(consumer, "t", on_assign=assign)
    assert consumer.poll(PATIENCE_SECONDS).value() == b"1"
    assert [(tp.partition, tp.offset) for tp in consumer.assignment()] == [(1, 0)]


def test_offsets_can_be_committed_while_partitions_are_revoked(two, make_consumer, listener):
    consumer = make_consumer({"enable.auto.commit": False})
    answers = []
    commit = listener.named("on_revoke", lambda c, partitions: answers.append(c.commit(asynchronous=False)))
    listener.subscribe(consumer, "t", on_revoke=commit)
    consumer.consume(2, PATIENCE_SECONDS)
    consumer.close()
    assert [(tp.partition, tp.offset) for tp in answers[0]] == [(0, 1), (1, 1)]
    reader = make_consumer()
    assert [tp.offset for tp in reader.committed([TP("t", 0), TP("t", 1)])] == [1, 1]


def test_unsubscribing_gives_everything_back_at_the_next_poll_and_leaves(two, make_consumer, listener, log):
    consumer = make_consumer()
    listener.subscribe(consumer, "t")
    consumer.consume(2, PATIENCE_SECONDS)
    listener.taken()
    consumer.unsubscribe()
    assert len(consumer.assignment()) == 2
    assert listener.taken() == []
    consumer.poll(0)
    assert listener.taken() == [told("on_revoke", 0, 1)]
    assert consumer.assignment() == []
    assert consumer.memberid() is None
    eventually(lambda: log.members("readers") == [])
    assert [tp.offset for tp in consumer.committed([TP("t", 0), TP("t", 1)])] == [1, 1]
    assert (membership_of(consumer).generation, membership_of(consumer).member_id) == (1, "")


def test_subscribing_anew_revokes_and_assigns(two, make_consumer, listener, log):
    log.topic("u")
    log.write("u", 0, b"u")
    consumer = make_consumer()
    listener.subscribe(consumer, "t")
    consumer.consume(2, PATIENCE_SECONDS)
    listener.taken()
    again = Listener()
    again.subscribe(consumer, "u")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"u"
    # As in confluent_kafka: the newest subscription's callbacks are told, of what was given under another one, too.
    assert listener.taken() == []
    assert again.taken() == [told("on_revoke", 0, 1), told("on_assign", 0, topic="u")]
    assert membership_of(consumer).generation == 2


def test_what_a_callback_raises_comes_out_of_poll_and_of_close(two, make_consumer):
    def refuse(consumer, partitions):
        raise ZeroDivisionError

    consumer = make_consumer()
    consumer.subscribe(["t"], on_assign=refuse, on_revoke=refuse)
    with pytest.raises(ZeroDivisionError):
        consumer.poll(PATIENCE_SECONDS)
    assert len(consumer.assignment()) == 2
    assert consumer.poll(PATIENCE_SECONDS) is not None
    with pytest.raises(ZeroDivisionError):
        consumer.close()
    with pytest.raises(RuntimeError, match="Consumer closed"):
        consumer.poll(0)


def test_the_assignment_of_an_eager_group_is_changed_as_a_whole(two, make_consumer, listener):
    consumer = make_consumer()
    listener.subscribe(consumer, "t")
    consumer.consume(2, PATIENCE_SECONDS)
    for call in (consumer.incremental_assign, consumer.incremental_unassign):
        error = raised(call, [TP("t", 1)])
        assert error.code() == KafkaError._STATE
        assert error.str() == (
            "Changes to the current assignment must be made using assign() when rebalance protocol type is EAGER"
        )


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("configuration", "expected"),
    [({}, [told("on_revoke", 0, 1), told("on_assign", 0, 1, 2)]), (COOPERATIVE, [told("on_assign", 2)])],
)
def test_partitions_that_are_added_are_picked_up(two, make_consumer, listener, log, configuration, expected):
    consumer = make_consumer({"topic.metadata.refresh.interval.ms": 10, **configuration})
    listener.subscribe(consumer, "t")
    consumer.consume(2, PATIENCE_SECONDS)
    listener.taken()
    log.grow("t", 3)
    log.write("t", 2, b"2")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"2"
    assert listener.taken() == expected
    assert sorted(tp.partition for tp in consumer.assignment()) == [0, 1, 2]
    assert membership_of(consumer).generation == 2


def test_a_pattern_takes_the_topics_there_are_and_those_that_come(two, make_consumer, listener, log):
    log.topic("other")
    consumer = make_consumer({"topic.metadata.refresh.interval.ms": 10, **COOPERATIVE})
    listener.subscribe(consumer, "^t.*")
    consumer.consume(2, PATIENCE_SECONDS)
    assert listener.taken() == [told("on_assign", 0, 1)]
    log.topic("tango")
    log.write("tango", 0, b"new")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"new"
    assert listener.taken() == [told("on_assign", 0, topic="tango")]


def test_a_missing_topic_is_reported_once_and_picked_up_when_it_comes(make_consumer, listener, log):
    consumer = make_consumer()
    listener.subscribe(consumer, "nope")
    message = consumer.poll(PATIENCE_SECONDS)
    assert error_code(message) == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert (message.topic(), message.offset()) == ("nope", None)
    assert message.error().str() == "Subscribed topic not available: nope: Broker: Unknown topic or partition"
    assert consumer.poll(0.3) is None
    log.topic("nope")
    log.write("nope", 0, b"there")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"there"


@pytest.mark.slow_but_first
@pytest.mark.parametrize("has_on_lost", [True, False])
def test_a_consumer_whose_name_another_one_has_is_told_and_does_nothing_more(two, make_consumer, listener, has_on_lost):
    usual = {"heartbeat.interval.ms": 20, "enable.auto.commit": False, "group.instance.id": "w1"}
    first, second = make_consumer(usual), make_consumer(usual)
    listener.subscribe(first, "t", **({} if has_on_lost else {"on_lost": None}))
    first.consume(2, PATIENCE_SECONDS)
    listener.taken()
    second.subscribe(["t"])
    assert len(second.consume(2, PATIENCE_SECONDS)) == 2
    message = first.poll(PATIENCE_SECONDS)
    assert error_code(message) == KafkaError.FENCED_INSTANCE_ID
    assert message.error().fatal()
    assert "another consumer has joined group 'readers' under the group.instance.id 'w1'" in message.error().str()
    assert first.poll(0) is None
    assert listener.taken() == [told("on_lost" if has_on_lost else "on_revoke", 0, 1)]
    assert first.assignment() == []
    assert first.memberid() is None
    assert first.poll(0.2) is None
    code = raised(first.commit, offsets=[TP("t", 0, 1)], asynchronous=False).code()
    assert code == KafkaError.FENCED_INSTANCE_ID
    for forgets in (lambda: None, first.unsubscribe):
        forgets()
        error = raised(first.subscribe, ["t"])
        assert (error.code(), error.fatal()) == (KafkaError._FATAL, True)
    assert len(second.commit(asynchronous=False)) == 2
    first.close()
    assert listener.taken() == []
    assert second.memberid() is not None


def test_a_successor_goes_on_where_the_crashed_one_had_committed(two, make_consumer, log):
    log.write("t", 0, b"next")
    clock = ManualClock()
    crashed = make_consumer({"enable.auto.commit": False, "session.timeout.ms": 9_000, "txnstore.clock": clock})
    crashed.subscribe(["t"])
    crashed.consume(3, PATIENCE_SECONDS)
    crashed.commit(offsets=[TP("t", 0, 1), TP("t", 1, 1)], asynchronous=False)
    crash(crashed)
    clock.advance(9_000)
    successor = make_consumer({"txnstore.clock": clock})
    successor.subscribe(["t"])
    assert successor.poll(PATIENCE_SECONDS).value() == b"next"


def test_the_instance_id_is_kept(two, make_consumer, log):
    consumer = make_consumer({"group.instance.id": "worker-7"})
    assert membership_of(consumer).group_instance_id == "worker-7"
    consumer.subscribe(["t"])
    consumer.consume(2, PATIENCE_SECONDS)
    assert membership_of(consumer).group_instance_id == "worker-7"
    assert log.members("readers")[0].group_instance_id == "worker-7"


@pytest.mark.slow
def test_an_application_that_does_not_poll_leaves_and_comes_back_with_its_next_poll(two, make_consumer, listener, log):
    consumer = make_consumer(
        {
            "max.poll.interval.ms": 1_500,
            "session.timeout.ms": 1_500,
            "heartbeat.interval.ms": 50,
            "enable.auto.commit": False,
        }
    )
    listener.subscribe(consumer, "t")
    consumer.consume(2, PATIENCE_SECONDS)
    listener.taken()
    eventually(lambda: log.members("readers") == [])
    error = raised(consumer.commit, asynchronous=False)
    assert error.code() == KafkaError.UNKNOWN_MEMBER_ID
    message = consumer.poll(PATIENCE_SECONDS)
    assert error_code(message) == KafkaError._MAX_POLL_EXCEEDED
    assert "Application maximum poll interval (1500ms) exceeded by" in message.error().str()
    # As librdkafka does: the partitions are taken away by the next poll.
    assert (listener.taken(), len(consumer.assignment())) == ([], 2)
    assert sorted(texts(consumer.consume(2, PATIENCE_SECONDS))) == [b"0", b"1"]
    assert listener.taken() == [told("on_lost", 0, 1), told("on_assign", 0, 1)]


@pytest.mark.slow
def test_an_application_that_waits_in_poll_is_not_late(two, make_consumer, log):
    consumer = make_consumer({"max.poll.interval.ms": 1_500, "session.timeout.ms": 1_500, "heartbeat.interval.ms": 50})
    consumer.subscribe(["t"])
    consumer.consume(2, PATIENCE_SECONDS)
    assert consumer.poll(2.5) is None
    assert len(log.members("readers")) == 1


def test_manual_assignment_is_possible_while_subscribed(two, make_consumer, listener):
    consumer = make_consumer()
    listener.subscribe(consumer, "t")
    consumer.consume(2, PATIENCE_SECONDS)
    consumer.assign([TP("t", 1, 0)])
    assert [tp.partition for tp in consumer.assignment()] == [1]
    consumer.unsubscribe()
    listener.taken()
    polled_until(consumer, lambda: not consumer.assignment())
    assert listener.taken() == [told("on_revoke", 0, 1)]


def test_a_consumer_without_membership_commits_once_a_crashed_member_is_expired(make_consumer, two, log):
    clock = ManualClock()
    crashed = make_consumer({"session.timeout.ms": 9_000, "enable.auto.commit": False, "txnstore.clock": clock})
    crashed.subscribe(["t"])
    crashed.consume(2, PATIENCE_SECONDS)
    simple = make_consumer({"txnstore.clock": clock})
    offsets = [TP("t", 0, 1)]
    assert raised(simple.commit, offsets=offsets, asynchronous=False).code() == KafkaError.UNKNOWN_MEMBER_ID
    crash(crashed)
    clock.advance(9_000)
    assert simple.commit(offsets=offsets, asynchronous=False)[0].offset == 1


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["half\ud800", "nul\0", "..", "a b", "'; DROP TABLE topics; --", "x" * 300])
def test_what_cannot_name_a_topic_is_a_missing_topic(two, make_consumer, name):
    consumer = make_consumer()
    consumer.subscribe([name, "t"])
    messages = consumer.consume(1, PATIENCE_SECONDS) + consumer.consume(2, PATIENCE_SECONDS)
    codes = {message.error().code() for message in messages if message.error() is not None}
    assert codes == {KafkaError.UNKNOWN_TOPIC_OR_PART}
    assert sorted(message.value() for message in messages if message.error() is None) == [b"0", b"1"]
