"""Groups seen from elsewhere: asyncio and deserializing consumers as members, the admin client, the command line."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.clients.admin.help import error_of, result
from tests.clients.consumer.log_writer import PATIENCE_SECONDS
from tests.clients.membership.steps import COOPERATIVE, EAGER_AND_COOPERATIVE, STRATEGY_NAMES, TP, Crew
from txnstore import ConsumerGroupState, ConsumerGroupTopicPartitions, DeserializingConsumer, KafkaError, cli
from txnstore.admin import AdminClient
from txnstore.aio import AIOConsumer
from txnstore.serialization import StringDeserializer

both_strategies = pytest.mark.parametrize("strategy", EAGER_AND_COOPERATIVE, ids=STRATEGY_NAMES)
RECORDS = 5


@pytest.fixture
def four(log):
    log.topic(partition_count=4)
    for number in range(4):
        log.write("t", number, *(b"%d-%d" % (number, offset) for offset in range(RECORDS)))


@pytest.fixture
def admin(url):
    with AdminClient({"bootstrap.servers": url}) as admin:
        yield admin


@pytest.fixture
def trio(four, crew):
    members = crew.members("abc")
    crew.until(members, lambda: [member.partitions for member in members] == [[0, 1], [2], [3]])
    crew.until(members, lambda: sum(len(member.records) for member in members) >= 4 * RECORDS)
    return members


# --- other consumers ----------------------------------------------------------------------------------------------


class Pollers:
    """Consumers of asyncio that are polled at the same time."""

    def __init__(self):
        self.seen = []

    async def until(self, consumers, shares):
        """Poll until they have that many partitions each."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while [len(await consumer.assignment()) for consumer in consumers] != shares:
                await self.turn(consumers)

    async def until_all_are_read(self, consumers):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(self.seen) < 4 * RECORDS:
                await self.turn(consumers)

    async def turn(self, consumers):
        for message in await asyncio.gather(*(consumer.poll(0.01) for consumer in consumers)):
            if message is not None:
                assert message.error() is None
                self.seen.append((message.partition(), message.offset()))


@pytest.mark.slow_but_first
@both_strategies
def test_asyncio_consumers_share_a_group(four, url, strategy):
    told = []
    pollers = Pollers()

    async def write_down(name, kind, partitions):
        told.append((name, kind, tuple(partition.partition for partition in partitions)))

    async def subscribe(consumer, name):
        await consumer.subscribe(
            ["t"],
            on_assign=lambda _, partitions: write_down(name, "assign", partitions),
            on_revoke=lambda _, partitions: write_down(name, "revoke", partitions),
        )

    async def scenario():
        usual = {"bootstrap.servers": url, "group.id": "readers", "auto.offset.reset": "earliest", **strategy}
        async with AIOConsumer({**usual, "client.id": "a"}) as a:
            await subscribe(a, "a")
            await pollers.until([a], [4])
            async with AIOConsumer({**usual, "client.id": "b"}) as b:
                await subscribe(b, "b")
                await pollers.until([a, b], [2, 2])
                await pollers.until_all_are_read([a, b])
                everything = {tp.partition for consumer in (a, b) for tp in await consumer.assignment()}
                assert everything == {0, 1, 2, 3}
                assert await a.memberid() != await b.memberid()
            await pollers.until([a], [4])

    asyncio.run(scenario())
    # Both commit by themselves what they give back.
    assert sorted(pollers.seen) == [(number, offset) for number in range(4) for offset in range(RECORDS)]
    assert {kind for name, kind, numbers in told if name == "b" and numbers} == {"assign", "revoke"}


@pytest.mark.slow_but_first
@both_strategies
def test_deserializing_consumers_share_a_group(four, url, strategy):
    usual = {
        "bootstrap.servers": url,
        "group.id": "readers",
        "auto.offset.reset": "earliest",
        "value.deserializer": StringDeserializer(),
    }
    opened = []

    def make(configuration):
        opened.append(DeserializingConsumer({**usual, **configuration}))
        return opened[-1]

    crew = Crew(make)
    try:
        a, b = crew.members("ab", **strategy)
        crew.until([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)
        crew.until([a, b], lambda: len(a.records) + len(b.records) >= 4 * RECORDS)
    finally:
        for consumer in opened:
            consumer.close()
    texts = [f"{number}-{offset}" for number in range(4) for offset in range(RECORDS)]
    assert sorted(map(str, a.values + b.values)) == texts


# --- the admin client ---------------------------------------------------------------------------------------------


def test_a_group_of_three_is_listed_and_described(trio, admin, crew):
    # They have what they get a heartbeat before the group knows that.
    crew.until(trio, lambda: result(admin.list_consumer_groups()).valid[0].state == ConsumerGroupState.STABLE)
    (listed,) = result(admin.list_consumer_groups()).valid
    assert (listed.group_id, listed.state, listed.is_simple_consumer_group) == (
        "readers",
        ConsumerGroupState.STABLE,
        False,
    )
    found = result(admin.describe_consumer_groups(["readers"])["readers"])
    assert (found.state, found.partition_assignor) == (ConsumerGroupState.STABLE, "range")
    assert {
        member.client_id: (member.member_id, [tp.partition for tp in member.assignment.topic_partitions])
        for member in found.members
    } == {member.name: (member.consumer.memberid(), member.partitions) for member in trio}
    assert {member.group_instance_id for member in found.members} == {None}
    for member in trio:
        member.close()
    found = result(admin.describe_consumer_groups(["readers"])["readers"])
    assert (found.state, found.members) == (ConsumerGroupState.EMPTY, [])


def test_a_group_that_rebalances_says_so(four, admin, crew):
    (a,) = crew.members("a")
    crew.until_shared([a], [0, 1, 2, 3])
    (b,) = crew.members("b")
    states = set()

    def state():
        found = result(admin.describe_consumer_groups(["readers"])["readers"])
        states.add(found.state)
        return found.state

    crew.until([b], lambda: state() == ConsumerGroupState.PREPARING_REBALANCING)
    crew.until_shared([a, b], [0, 1], [2, 3])
    crew.until([a, b], lambda: state() == ConsumerGroupState.STABLE)


def test_offsets_of_a_group_with_members_are_not_altered_and_it_is_not_deleted(trio, admin, crew):
    a = trio[0]
    a.consumer.commit(offsets=[TP("t", 0, 4)], asynchronous=False)
    wanted = [ConsumerGroupTopicPartitions("readers", [TP("t", 0, 1)])]
    answer = admin.alter_consumer_group_offsets(wanted)["readers"]
    error = answer.exception(PATIENCE_SECONDS)
    codes = {error.args[0].code()} if error else {tp.error.code() for tp in answer.result().topic_partitions}
    assert codes == {KafkaError.UNKNOWN_MEMBER_ID}
    assert error_of(admin.delete_consumer_groups(["readers"])["readers"]).code() == KafkaError.NON_EMPTY_GROUP
    assert a.consumer.committed([TP("t", 0)])[0].offset == 4
    a.consumer.commit(offsets=[TP("t", 0, 5)], asynchronous=False)
    assert [member.partitions for member in trio] == [[0, 1], [2], [3]]
    assert [member.errors for member in trio] == [[], [], []]
    for member in trio:
        member.close()
    result(admin.alter_consumer_group_offsets(wanted)["readers"])
    again = crew.members("d")[0]
    crew.until([again], lambda: again.records)
    assert min(place for place in again.places() if place[1] == 0)[2] == 1


# --- the command line ---------------------------------------------------------------------------------------------


def run_program(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.mark.slow
def test_the_command_line_shows_who_has_what(trio, url, capsys):
    for member in trio:
        member.consumer.commit(offsets=[TP("t", number, 3) for number in member.partitions], asynchronous=False)
    code, out, _ = run_program(capsys, "groups", "describe", "readers", "--url", url, "--json")
    assert code == 0
    (described,) = json.loads(out)
    assert (described["state"], described["assignor"]) == ("Stable", "range")
    ids = {member.name: member.consumer.memberid() for member in trio}
    assert {member["client_id"]: member["partitions"] for member in described["members"]} == {
        "a": ["t-0", "t-1"],
        "b": ["t-2"],
        "c": ["t-3"],
    }
    assert {
        row["partition"]: (row["committed_offset"], row["lag"], row["member_id"]) for row in described["offsets"]
    } == {
        0: (3, 2, ids["a"]),
        1: (3, 2, ids["a"]),
        2: (3, 2, ids["b"]),
        3: (3, 2, ids["c"]),
    }
    code, out, _ = run_program(capsys, "groups", "describe", "readers", "--url", url)
    assert code == 0
    for member in trio:
        assert any(str(member.consumer.memberid()) in line and "t-" in line for line in out.splitlines()), out
    code, out, _ = run_program(capsys, "groups", "list", "--url", url)
    assert ["readers", "Stable", str(described["generation"]), "range", "3"] in [
        line.split() for line in out.splitlines()
    ]


def test_the_command_line_changes_nothing_of_a_group_with_members(trio, url, capsys):
    trio[0].consumer.commit(offsets=[TP("t", 0, 4)], asynchronous=False)
    for arguments in (("reset-offsets", "readers", "--to-earliest", "--execute"), ("delete", "readers", "--yes")):
        code, _, error = run_program(capsys, "groups", *arguments, "--url", url)
        assert code != 0
        assert "readers" in error
        assert "member" in error
    assert trio[0].consumer.committed([TP("t", 0)])[0].offset == 4


def test_consuming_on_the_command_line_in_a_group_shares_with_its_members(four, url, crew, capsys):
    (a,) = crew.members("a", **COOPERATIVE)
    crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    a.close()
    code, out, _ = run_program(capsys, "consume", "t", "-g", "readers", "--url", url)
    assert (code, out) == (0, "")
