"""Members that stand still for longer than their session timeout: others have their partitions, and they know it."""

from __future__ import annotations

from contextlib import closing

import pytest

import txnstore as confluent_kafka
from tests.databases import an_assignor_on_each_database
from tests.processes.remote_member import Refused
from tests.processes.remote_members import PATIENCE_SECONDS, TOPIC, Member, callbacks, make_topic, records, write

PARTITIONS, RECORDS = 4, 25
ALL = tuple(range(PARTITIONS))
SESSION_TIMEOUT_MS, HEARTBEAT_INTERVAL_MS = 2_000, 300
TRANSACTION_TIMEOUT_MS = 3_000
#: Whose answer says that a member is no longer one.
REFUSALS = {"ILLEGAL_GENERATION", "UNKNOWN_MEMBER_ID"}

pytestmark = pytest.mark.slow


@pytest.fixture
def pair(url, tmp_path, processes):
    """Two members: the first has everything, the second is not in the group yet; records wait in each partition."""
    make_topic(url, PARTITIONS)
    make_topic(url, 1, "output")
    write(url, [(partition, f"{number}") for number in range(RECORDS) for partition in ALL])
    first, second = (Member(processes, url, tmp_path, name) for name in ("first", "second"))

    def begin(assignor):
        join(first, assignor)
        assert first.call("poll_until_owned", PARTITIONS, PATIENCE_SECONDS)
        # It has taken a few of those that it has fetched.
        assert first.call("poll_until_records", 5, PATIENCE_SECONDS) == 5
        return first, second

    yield begin
    errors = {path.name: path.read_text() for path in tmp_path.glob("*.error")}
    assert not errors, "\n".join(errors.values())


def join(member, assignor):
    member.join(assignor, SESSION_TIMEOUT_MS, HEARTBEAT_INTERVAL_MS, **{"isolation.level": "read_committed"})


def take_over(second, assignor):
    """Let the second member take everything that the first has, who is stopped, and read it to its end."""
    join(second, assignor)
    assert second.call("poll_until_owned", PARTITIONS, PATIENCE_SECONDS)
    assert second.call("poll_until_records", PARTITIONS * RECORDS, PATIENCE_SECONDS) == PARTITIONS * RECORDS
    told = second.told()
    assert sorted(records(told)) == [(partition, offset) for partition in ALL for offset in range(RECORDS)]
    second.call("commit", TOPIC, dict.fromkeys(ALL, RECORDS))


def share(first, second):
    """Poll both until each has its half."""
    for _ in range(40):
        for member in (first, second):
            member.ask("poll_for", 0.2)
        for member in (first, second):
            member.answer(0.2)
        owned = [member.call("owned") for member in (first, second)]
        if [len(each) for each in owned] == [PARTITIONS // 2] * 2:
            break
    assert sorted(owned[0] + owned[1]) == list(ALL), owned
    assert [first.call("assignment"), second.call("assignment")] == owned
    return owned


def check_afterwards(first, second, told_first):
    """Check that the woken member heard of its loss before anything else, and that both work in peace from then on."""
    owned, _ = share(first, second)
    told = told_first + first.told()
    assert callbacks(told)[0] == ("lost", ALL)
    # Nothing of what it had fetched is handed out, and nothing that the second has done already.
    assert records(told) == []
    assert [what for what, _ in callbacks(told)].count("lost") == 1
    assert sorted(number for what, numbers in callbacks(told) if what == "assign" for number in numbers) == owned


@an_assignor_on_each_database
@pytest.mark.parametrize("then", ["poll", "commit"])
def test_a_stopped_member_hands_out_nothing_more_and_commits_nothing_when_it_goes_on(pair, assignor, then):
    first, second = pair(assignor)
    handed = records(first.told())
    assert len(handed) == 5
    first.stop()
    take_over(second, assignor)
    first.go_on()
    told = []
    if then == "poll":
        # Its first look comes at once: what it has fetched is at hand, and the group has not been asked yet.
        first.call("poll", 0)
        told = first.told()
        assert records(told) == []
    refused = first.call("commit", TOPIC, {handed[0][0]: 1})
    assert isinstance(refused, Refused), refused
    assert refused.name in REFUSALS
    assert second.call("committed", TOPIC, list(ALL)) == [RECORDS] * PARTITIONS
    check_afterwards(first, second, told)
    assert second.call("committed", TOPIC, list(ALL)) == [RECORDS] * PARTITIONS


@an_assignor_on_each_database
def test_a_member_that_is_stopped_while_it_waits_for_records_gets_none_of_those_that_came_meanwhile(
    pair, url, assignor
):
    first, second = pair(assignor)
    assert first.call("poll_until_records", PARTITIONS * RECORDS, PATIENCE_SECONDS) == PARTITIONS * RECORDS
    first.told()
    # Nothing is left: it waits within poll().
    first.ask("poll", 3.0)
    assert first.process.exitcode is None
    first.process.join(0.3)
    first.stop()
    take_over(second, assignor)
    write(url, [(partition, "late") for partition in ALL])
    assert second.call("poll_until_records", PARTITIONS, PATIENCE_SECONDS) == PARTITIONS
    second.call("commit", TOPIC, dict.fromkeys(ALL, RECORDS + 1))
    first.go_on()
    # The second one polls meanwhile, so that the first may even get partitions within the same poll().
    second.call("poll_for", 1.0)
    assert first.answer(3.0) is False
    check_afterwards(first, second, first.told())


@an_assignor_on_each_database
@pytest.mark.parametrize("stopped", ["before its offsets are sent", "before its commit"])
def test_the_transaction_of_a_stopped_member_aborts(pair, url, assignor, stopped):
    first, second = pair(assignor)
    handed = records(first.told())
    first.call("begin", "first", TRANSACTION_TIMEOUT_MS)
    first.call("produce", "output", "of the stopped member")
    offsets = {partition: offset + 1 for partition, offset in handed}
    if stopped == "before its commit":
        assert first.call("send_offsets", TOPIC, offsets) is None
    first.stop()
    take_over(second, assignor)
    first.go_on()
    late = ("commit_transaction",) if stopped == "before its commit" else ("send_offsets", TOPIC, offsets)
    refused = first.call(*late)
    assert isinstance(refused, Refused), refused
    assert refused.requires_abort, refused
    assert not refused.is_fatal, refused
    assert first.call("abort_transaction") is None
    assert second.call("committed", TOPIC, list(ALL)) == [RECORDS] * PARTITIONS
    check_afterwards(first, second, [])
    assert outputs(url) == []
    # It is a member again, and a producer all the time.
    partition = first.call("owned")[0]
    first.call("begin", "first", TRANSACTION_TIMEOUT_MS)
    first.call("produce", "output", "of the member that is back")
    assert first.call("send_offsets", TOPIC, {partition: RECORDS}) is None
    assert first.call("commit_transaction") is None
    assert outputs(url) == [b"of the member that is back"]


@an_assignor_on_each_database
def test_a_transaction_that_lives_longer_than_its_member_is_refused_its_offsets(pair, url, assignor):
    first, second = pair(assignor)
    handed = records(first.told())
    first.call("begin", "first", 60_000)
    first.call("produce", "output", "of the stopped member")
    first.stop()
    take_over(second, assignor)
    first.go_on()
    refused = first.call("send_offsets", TOPIC, {partition: offset + 1 for partition, offset in handed})
    assert isinstance(refused, Refused), refused
    assert refused.name in REFUSALS
    assert refused.requires_abort
    assert not refused.is_fatal
    # To commit in spite of it is refused too.
    assert isinstance(first.call("commit_transaction"), Refused)
    assert first.call("abort_transaction") is None
    check_afterwards(first, second, [])
    assert outputs(url) == []


@an_assignor_on_each_database
def test_offsets_that_a_dead_member_left_in_a_transaction_hold_its_partitions_no_longer_than_its_timeout(
    pair, assignor
):
    first, second = pair(assignor)
    handed = records(first.told())
    first.call("begin", "first", TRANSACTION_TIMEOUT_MS)
    # No record of the transaction stands in the way of any reader: its offsets are all that there is of it.
    assert first.call("send_offsets", TOPIC, {partition: offset + 1 for partition, offset in handed}) is None
    first.kill()
    take_over(second, assignor)


def outputs(url):
    """Return what is committed of the output, up to its end."""
    settings = {"bootstrap.servers": url, "group.id": "look", "enable.partition.eof": True}
    with closing(confluent_kafka.Consumer(settings)) as consumer:
        consumer.assign([confluent_kafka.TopicPartition("output", 0, confluent_kafka.OFFSET_BEGINNING)])
        found = []
        while True:
            message = consumer.poll(PATIENCE_SECONDS)
            assert message is not None, "nothing comes, not even the end"
            error = message.error()
            if error is None:
                found.append(message.value())
            elif error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
                return found
