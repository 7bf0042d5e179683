"""The admin client's calls about groups and their offsets."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import delete, insert, select
from sqlalchemy.dialects.postgresql import insert as upsert

from tests.clients.admin.help import HOSTILE_TEXTS, UNUSUAL_TEXTS, error_of, result
from tests.clients.consumer.log_writer import LogWriter
from txnstore import (
    OFFSET_INVALID,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    ConsumerGroupType,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from txnstore.admin import AdminClient
from txnstore.db.opening import open_store
from txnstore.db.schema import group_members, group_offsets, groups
from txnstore.db.statements import server_now_ms
from txnstore.errors import IllegalGeneration, UnknownMember
from txnstore.groups import coordinator
from txnstore.groups.group import MemberDetails, Report
from txnstore.groups.offsets import commit_offsets
from txnstore.model import NO_GENERATION, GroupMembership, OffsetAndMetadata
from txnstore.testing.invariants import assert_sound

SESSION_TIMEOUT_MS = 10_000
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


class Groups(LogWriter):
    """A topic `t` of two partitions, and groups that read it."""

    def __init__(self, store):
        super().__init__(store)
        self.topic("t", 2)

    def commit(self, group_id, offset=5, number=0, metadata=None, member=None):
        partition_id = self.partition_id("t", number)
        committed = {partition_id: OffsetAndMetadata(offset, -1, metadata)}
        committer = member or GroupMembership(group_id)
        self.store.write(lambda connection: commit_offsets(connection, committer, committed))

    def join_alone(self, group_id, *, subscription=("t",), assignment=None, instance=None):
        """Be the one member of a group, whatever the group would have given it."""
        given = {"t": [0, 1]} if assignment is None else assignment
        topics = [name for name in subscription if not name.startswith("^")]
        owned_ids = [self.partition_id(topic, number) for topic in given.keys() & {"t"} for number in given[topic]]
        stored = {"subscribed": subscription, "topics": topics, "assignors": ["range"], "owned": given, "step": 0}
        stored["owned_ids"] = owned_ids
        member = GroupMembership(group_id, 1, f"{group_id}-1", instance)
        group = upsert(groups).values(group_id=group_id, generation=1, assignor="range", commit_number=0)
        group = group.values(last_update_ms=server_now_ms()).on_conflict_do_update(
            index_elements=[groups.c.group_id], set_={"generation": 1, "assignor": "range"}
        )
        row = insert(group_members).values(
            group_id=group_id,
            member_id=member.member_id,
            group_instance_id=instance,
            client_id="worker",
            generation=1,
            session_timeout_ms=SESSION_TIMEOUT_MS,
            deadline_ms=server_now_ms() + SESSION_TIMEOUT_MS,
            subscription=json.dumps(stored),
            assignment=json.dumps(given),
        )
        self.store.write(lambda connection: [connection.execute(statement) for statement in (group, row)])
        return member

    def leave(self, member):
        row = group_members.c.member_id == member.member_id
        self.store.write(lambda connection: connection.execute(delete(group_members).where(row)))

    def join(self, group_id, member_id, *, topics=("t",), instance=None):
        """Join as one of several, with nothing owned."""
        report = Report(GroupMembership(group_id, NO_GENERATION, member_id, instance), 0)
        details = MemberDetails("worker", SESSION_TIMEOUT_MS, topics, frozenset(topics), ("range",))
        return self.store.write(lambda connection: coordinator.join(connection, report, details))

    def heartbeat(self, answer, owned=None):
        partitions = answer.partitions if owned is None else owned
        report = Report(answer.membership, answer.step + 1, frozenset(partitions))
        return self.store.write(lambda connection: coordinator.heartbeat(connection, report))

    def committed(self, group_id):
        statement = select(group_offsets.c.partition_id, group_offsets.c.committed_offset).where(
            group_offsets.c.group_id == group_id
        )
        rows = self.store.read(lambda connection: connection.execute(statement).all())
        numbers = {self.partition_id("t", number): number for number in (0, 1)}
        return {numbers[row[0]]: row[1] for row in rows}

    def ids(self):
        statement = select(groups.c.group_id).order_by(groups.c.group_id)
        return self.store.read(lambda connection: connection.execute(statement).scalars().all())


@pytest.fixture
def log(url, clock):
    with open_store(url, clock=clock) as store:
        yield Groups(store)


@pytest.fixture
def admin(url, clock):
    with AdminClient({"bootstrap.servers": url, "txnstore.clock": clock}) as admin:
        yield admin


@pytest.fixture
def idle_admin(tmp_path):
    """A client that has no reason to open its database."""
    with AdminClient({"bootstrap.servers": f"sqlite:///{tmp_path}/log.db"}) as admin:
        yield admin
        assert admin._connection.opened is None


def partitions(group_id, *partitions):
    return ConsumerGroupTopicPartitions(group_id, list(partitions) or None)


def at(number, offset, topic="t", metadata=None):
    return TopicPartition(topic, number, offset, metadata)


def listed(admin, **filters):
    found = result(admin.list_consumer_groups(**filters))
    assert found.errors == []
    return {group.group_id: group.state for group in found.valid}


def offsets_of(admin, group_id, *wanted, **keywords):
    """Return offset, or the code of the error, by partition."""
    found = result(admin.list_consumer_group_offsets([partitions(group_id, *wanted)], **keywords)[group_id])
    assert found.group_id == group_id
    return {
        (item.topic, item.partition): item.error.code() if item.error else item.offset
        for item in found.topic_partitions
    }


# --- list, describe -----------------------------------------------------------------------------------------------


def test_groups_are_listed_with_their_states(admin, log):
    assert listed(admin) == {}
    log.commit("simple")
    log.join_alone("busy")
    gone = log.join_alone("gone")
    log.leave(gone)
    stable, empty = ConsumerGroupState.STABLE, ConsumerGroupState.EMPTY
    assert listed(admin) == {"busy": stable, "gone": empty, "simple": empty}
    assert listed(admin, states={stable}).keys() == {"busy"}
    assert listed(admin, states={stable, empty}).keys() == {"busy", "gone", "simple"}
    assert listed(admin, states={ConsumerGroupState.DEAD}) == {}
    assert listed(admin, types={ConsumerGroupType.CLASSIC}, states={empty}).keys() == {"gone", "simple"}
    assert listed(admin, types={ConsumerGroupType.CONSUMER}) == {}
    found = {group.group_id: group for group in result(admin.list_consumer_groups()).valid}
    assert {name: group.is_simple_consumer_group for name, group in found.items()} == {
        "busy": False,
        "gone": False,
        "simple": True,
    }
    assert {group.type for group in found.values()} == {ConsumerGroupType.CLASSIC}


def test_a_group_of_one_member_is_described(admin, log):
    joined = log.join_alone("g", assignment={"t": [1, 0]}, instance="first")
    found = result(admin.describe_consumer_groups(["g"])["g"])
    assert (found.group_id, found.state, found.type) == ("g", ConsumerGroupState.STABLE, ConsumerGroupType.CLASSIC)
    assert (found.is_simple_consumer_group, found.partition_assignor) == (False, "range")
    assert (found.authorized_operations, found.coordinator.id) == (None, 0)
    (member,) = found.members
    assert (member.member_id, member.client_id, member.host) == (joined.member_id, "worker", "")
    assert member.group_instance_id == "first"
    assert member.assignment.topic_partitions == member.target_assignment.topic_partitions == [T0, T1]


def test_a_group_that_rebalances_shows_who_has_what(admin, log):
    first = log.heartbeat(log.join("g", "a"))
    assert [partition.partition for partition in first.partitions] == [0, 1]
    assert listed(admin) == {"g": ConsumerGroupState.STABLE}
    second = log.join("g", "b")
    assert listed(admin) == {"g": ConsumerGroupState.PREPARING_REBALANCING}
    found = result(admin.describe_consumer_groups(["g"])["g"])
    a, b = found.members
    assert (a.member_id, a.assignment.topic_partitions, a.target_assignment.topic_partitions) == ("a", [T0, T1], [T0])
    assert (b.member_id, b.assignment.topic_partitions, b.target_assignment.topic_partitions) == ("b", [], [T1])
    given_back = log.heartbeat(first, owned=())
    assert listed(admin) == {"g": ConsumerGroupState.COMPLETING_REBALANCING}
    given_back = log.heartbeat(given_back)
    second = log.heartbeat(second, owned=())
    log.heartbeat(second)
    assert listed(admin) == {"g": ConsumerGroupState.STABLE}
    found = result(admin.describe_consumer_groups(["g"])["g"])
    assert [member.assignment.topic_partitions for member in found.members] == [[T0], [T1]]


def test_members_that_have_died_are_not_shown(admin, log, clock):
    log.join_alone("g")
    clock.advance(SESSION_TIMEOUT_MS - 1)
    assert listed(admin) == {"g": ConsumerGroupState.STABLE}
    clock.advance(1)
    assert listed(admin) == {"g": ConsumerGroupState.EMPTY}
    found = result(admin.describe_consumer_groups(["g"])["g"])
    assert (found.state, found.members, found.is_simple_consumer_group) == (ConsumerGroupState.EMPTY, [], False)
    assert [(group.state, group.members) for group in list_groups(admin, "g")] == [("Empty", [])]


def test_a_group_that_nobody_has_used_is_dead(admin, log):
    for name, future in admin.describe_consumer_groups([*UNUSUAL_TEXTS]).items():
        found = result(future)
        assert (found.group_id, found.state, found.members) == (name, ConsumerGroupState.DEAD, [])
    for future in admin.delete_consumer_groups([*UNUSUAL_TEXTS]).values():
        assert error_of(future) == KafkaError.GROUP_ID_NOT_FOUND
    assert listed(admin) == {}


def test_unusual_names_are_names(admin, log):
    for number, name in enumerate(UNUSUAL_TEXTS):
        result(admin.alter_consumer_group_offsets([partitions(name, at(0, number, metadata=name))])[name])
    assert listed(admin) == dict.fromkeys(UNUSUAL_TEXTS, ConsumerGroupState.EMPTY)
    for number, name in enumerate(UNUSUAL_TEXTS):
        (found,) = result(admin.list_consumer_group_offsets([partitions(name)])[name]).topic_partitions
        assert (found.offset, found.metadata) == (number, name)
    assert result(admin.delete_consumer_groups([UNUSUAL_TEXTS[0]])[UNUSUAL_TEXTS[0]]) is None
    assert listed(admin).keys() == set(UNUSUAL_TEXTS[1:])


def test_a_name_that_is_none_fails_by_itself(admin, log):
    log.commit("g")
    for call in (admin.describe_consumer_groups, admin.delete_consumer_groups):
        futures = call([*HOSTILE_TEXTS])
        assert [error_of(future).code() for future in futures.values()] == [KafkaError.INVALID_GROUP_ID] * 4
    for name in HOSTILE_TEXTS[1:]:
        wanted = [partitions(name, at(0, 1))]
        assert error_of(admin.alter_consumer_group_offsets(wanted)[name]) == KafkaError.INVALID_GROUP_ID
        assert error_of(admin.delete_consumer_group_offsets(wanted)[name]) == KafkaError.INVALID_GROUP_ID
        assert error_of(admin.list_consumer_group_offsets([partitions(name)])[name]) == KafkaError.INVALID_GROUP_ID
    assert log.ids() == ["g"]


# --- delete -------------------------------------------------------------------------------------------------------


def test_an_empty_group_is_deleted_with_its_offsets(admin, log):
    log.commit("g")
    log.commit("other")
    futures = admin.delete_consumer_groups(["g", "nobody"])
    assert result(futures["g"]) is None
    assert error_of(futures["nobody"]) == KafkaError.GROUP_ID_NOT_FOUND
    assert (log.ids(), log.committed("g"), log.committed("other")) == (["other"], {}, {0: 5})
    assert error_of(admin.delete_consumer_groups(["g"])["g"]) == KafkaError.GROUP_ID_NOT_FOUND


def test_a_group_with_members_is_not_deleted(admin, log):
    member = log.join_alone("g")
    log.commit("g", 7, member=member)
    error = error_of(admin.delete_consumer_groups(["g"])["g"])
    assert error == KafkaError.NON_EMPTY_GROUP
    assert "has 1 members" in error.str()
    assert log.committed("g") == {0: 7}
    log.commit("g", 8, member=member)


def test_members_that_have_died_keep_no_group_alive(admin, log, clock):
    member = log.join_alone("g")
    log.commit("g", 7, member=member)
    clock.advance(SESSION_TIMEOUT_MS)
    assert result(admin.delete_consumer_groups(["g"])["g"]) is None
    assert log.ids() == []
    with pytest.raises(IllegalGeneration):
        log.commit("g", 8, member=member)


def test_a_group_whose_offsets_an_open_transaction_holds_is_not_deleted(admin, log):
    transaction = log.transaction()
    transaction.send_offset("g", "t", 0, 3)
    error = error_of(admin.delete_consumer_groups(["g"])["g"])
    assert error == KafkaError.NON_EMPTY_GROUP
    assert "open transaction" in error.str()
    transaction.end(commit=True)
    assert log.committed("g") == {0: 3}
    assert result(admin.delete_consumer_groups(["g"])["g"]) is None
    assert_sound(log.store, at_rest=True)


# --- offsets: list ------------------------------------------------------------------------------------------------


def test_offsets_of_several_groups_are_listed_in_one_call(admin, log):
    log.commit("g", 5, metadata="note")
    log.commit("g", 6, number=1)
    log.commit("h", 7)
    futures = admin.list_consumer_group_offsets([partitions("g"), partitions("h", T1, T0), partitions("nobody")])
    assert futures.keys() == {"g", "h", "nobody"}
    found = result(futures["g"]).topic_partitions
    assert [(item.partition, item.offset, item.metadata, item.leader_epoch, item.error) for item in found] == [
        (0, 5, "note", None, None),
        (1, 6, None, None, None),
    ]
    assert [(item.partition, item.offset) for item in result(futures["h"]).topic_partitions] == [
        (0, 7),
        (1, OFFSET_INVALID),
    ]
    assert result(futures["nobody"]).topic_partitions == []


def test_partitions_without_an_offset_and_unknown_ones_say_so(admin, log):
    log.commit("g", 5)
    unknown = KafkaError.UNKNOWN_TOPIC_OR_PART
    wanted = [T0, T1, TopicPartition("t", 2), TopicPartition("nobody", 0), TopicPartition("a b\n", 0)]
    assert offsets_of(admin, "g", *wanted) == {
        ("t", 0): 5,
        ("t", 1): OFFSET_INVALID,
        ("t", 2): unknown,
        ("nobody", 0): unknown,
        ("a b\n", 0): unknown,
    }
    assert offsets_of(admin, "nobody", T0) == {("t", 0): OFFSET_INVALID}


@pytest.mark.parametrize("commit", [True, False])
def test_offsets_that_are_to_be_stable_say_where_a_transaction_holds_one(admin, log, commit):
    log.commit("g", 5)
    transaction = log.transaction()
    transaction.send_offset("g", "t", 0, 9)
    transaction.send_offset("g", "t", 1, 4)
    unstable = KafkaError.UNSTABLE_OFFSET_COMMIT
    assert offsets_of(admin, "g") == {("t", 0): 5}
    assert offsets_of(admin, "g", T0, T1) == {("t", 0): 5, ("t", 1): OFFSET_INVALID}
    for wanted in ((), (T0, T1)):
        assert offsets_of(admin, "g", *wanted, require_stable=True) == {("t", 0): unstable, ("t", 1): unstable}
    transaction.end(commit=commit)
    expected = {("t", 0): 9, ("t", 1): 4} if commit else {("t", 0): 5}
    assert offsets_of(admin, "g", require_stable=True) == expected


# --- offsets: alter -----------------------------------------------------------------------------------------------


def test_offsets_of_an_empty_group_are_altered(admin, log):
    log.commit("g", 5)
    futures = admin.alter_consumer_group_offsets(
        [partitions("g", at(1, 0, metadata="m"), at(0, 2)), partitions("new", at(0, 2**63 - 1))]
    )
    found = result(futures["g"])
    assert [(item.topic, item.partition, item.offset, item.error) for item in found.topic_partitions] == [
        ("t", 0, 2, None),
        ("t", 1, 0, None),
    ]
    assert result(futures["new"]).topic_partitions[0].error is None
    assert (log.committed("g"), log.committed("new")) == ({0: 2, 1: 0}, {0: 2**63 - 1})


def test_unknown_partitions_are_told_and_the_others_altered(admin, log):
    wanted = [at(0, 2), at(9, 2), at(0, 2, topic="nobody")]
    found = result(admin.alter_consumer_group_offsets([partitions("g", *wanted)])["g"])
    codes = {(item.topic, item.partition): item.error and item.error.code() for item in found.topic_partitions}
    unknown = KafkaError.UNKNOWN_TOPIC_OR_PART
    assert codes == {("t", 0): None, ("t", 9): unknown, ("nobody", 0): unknown}
    assert log.committed("g") == {0: 2}
    result(admin.alter_consumer_group_offsets([partitions("h", at(0, 2, topic="nobody"))])["h"])
    assert log.ids() == ["g"]


def test_offsets_of_a_group_with_members_stay_as_they_are(admin, log, clock):
    member = log.join_alone("g")
    log.commit("g", 7, member=member)
    wanted = [partitions("g", at(0, 1), at(1, 1), at(0, 1, topic="nobody"))]
    found = result(admin.alter_consumer_group_offsets(wanted)["g"])
    assert [item.error.code() for item in found.topic_partitions] == [
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.UNKNOWN_MEMBER_ID,
    ]
    assert "stop them first" in found.topic_partitions[1].error.str()
    assert log.committed("g") == {0: 7}
    # Those that have died are no members any more, and stay so.
    clock.advance(SESSION_TIMEOUT_MS)
    found = result(admin.alter_consumer_group_offsets([partitions("g", at(0, 1))])["g"])
    assert found.topic_partitions[0].error is None
    assert log.committed("g") == {0: 1}
    with pytest.raises(UnknownMember):
        log.commit("g", 8, member=member)


def test_an_altered_offset_outlives_one_that_a_transaction_held_before(admin, log):
    transaction = log.transaction()
    transaction.send_offset("g", "t", 0, 9)
    result(admin.alter_consumer_group_offsets([partitions("g", at(0, 1))])["g"])
    transaction.end(commit=True)
    assert log.committed("g") == {0: 1}


def test_metadata_that_is_too_large_is_refused(admin, log):
    wanted = [partitions("g", at(0, 1), at(1, 1, metadata="x" * 4097))]
    assert error_of(admin.alter_consumer_group_offsets(wanted)["g"]) == KafkaError.OFFSET_METADATA_TOO_LARGE
    assert log.ids() == []


# --- offsets: delete ----------------------------------------------------------------------------------------------


def test_offsets_are_deleted(admin, log):
    log.commit("g", 5)
    log.commit("g", 6, number=1)
    wanted = [partitions("g", T0, TopicPartition("t", 9)), partitions("nobody", T0)]
    futures = admin.delete_consumer_group_offsets(wanted)
    found = result(futures["g"]).topic_partitions
    assert [(item.partition, item.error and item.error.code()) for item in found] == [
        (0, None),
        (9, KafkaError.UNKNOWN_TOPIC_OR_PART),
    ]
    assert error_of(futures["nobody"]) == KafkaError.GROUP_ID_NOT_FOUND
    assert log.committed("g") == {1: 6}
    assert result(admin.delete_consumer_group_offsets([partitions("g", T0)])["g"]).topic_partitions[0].error is None


@pytest.mark.parametrize(
    ("subscription", "assignment", "is_refused"),
    [(("t",), {}, True), (("^t.*",), {}, True), (("u",), {"t": [1]}, True), (("u", "^x"), {"u": [0]}, False)],
    ids=str,
)
def test_offsets_of_topics_that_members_use_are_not_deleted(admin, log, subscription, assignment, is_refused):
    log.commit("g", 5)
    log.join_alone("g", subscription=subscription, assignment=assignment)
    (found,) = result(admin.delete_consumer_group_offsets([partitions("g", T0)])["g"]).topic_partitions
    if is_refused:
        assert found.error == KafkaError.GROUP_SUBSCRIBED_TO_TOPIC
        assert log.committed("g") == {0: 5}
    else:
        assert found.error is None
        assert log.committed("g") == {}


def test_members_of_several_are_asked_for_their_topics_too(admin, log):
    log.commit("g", 5)
    log.join("g", "a", topics=("u",))
    log.join("g", "b", topics=("t", "u"))
    (found,) = result(admin.delete_consumer_group_offsets([partitions("g", T0)])["g"]).topic_partitions
    assert found.error == KafkaError.GROUP_SUBSCRIBED_TO_TOPIC
    assert log.committed("g") == {0: 5}


def test_what_a_transaction_would_commit_is_dropped_too(admin, log):
    transaction = log.transaction()
    transaction.send_offset("g", "t", 0, 9)
    transaction.send_offset("g", "t", 1, 4)
    result(admin.delete_consumer_group_offsets([partitions("g", T0)])["g"])
    transaction.end(commit=True)
    assert log.committed("g") == {1: 4}
    assert_sound(log.store, at_rest=True)


# --- the oldest call ----------------------------------------------------------------------------------------------


def list_groups(admin, *arguments):
    with pytest.warns(DeprecationWarning, match=r"^list_groups"):
        return admin.list_groups(*arguments)


def test_groups_are_listed_as_librdkafka_lists_them(admin, log):
    log.commit("simple")
    log.join_alone("g", subscription=("t", "u"), assignment={"t": [0, 1]})
    busy, simple = list_groups(admin, None, 30)
    assert (busy.id, busy.state, busy.protocol_type, busy.protocol) == ("g", "Stable", "consumer", "range")
    assert (simple.id, simple.state, simple.protocol_type, simple.members) == ("simple", "Empty", "", [])
    assert (busy.broker.id, busy.error) == (0, None)
    (member,) = busy.members
    assert (member.id, member.client_id, member.client_host) == ("g-1", "worker", "")
    assert member.metadata == b"\0\0" + b"\0\0\0\2" + b"\0\1t" + b"\0\1u" + b"\xff\xff\xff\xff"
    assert member.assignment == (
        b"\0\0" + b"\0\0\0\1" + b"\0\1t" + b"\0\0\0\2" + b"\0\0\0\0" + b"\0\0\0\1" + b"\xff\xff\xff\xff"
    )
    assert [group.id for group in list_groups(admin, "simple")] == ["simple"]
    assert list_groups(admin, "nobody") == []
    with pytest.raises(KafkaException) as raised:
        list_groups(admin, "a\0")
    assert raised.value.args[0] == KafkaError.INVALID_GROUP_ID


def test_list_groups_refuses_wrong_arguments(idle_admin):
    with pytest.raises(TypeError, match="argument 1 must be str or None"):
        list_groups(idle_admin, 5)
    with pytest.raises(TypeError, match="must be real number"):
        list_groups(idle_admin, "g", "soon")


# --- arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filters", "error", "text"),
    [
        ({"states": []}, TypeError, r"^'states' must be a set$"),
        ({"states": {"Stable"}}, TypeError, r"^All elements of states must be of type ConsumerGroupState$"),
        ({"types": "CLASSIC"}, TypeError, r"^'types' must be a set$"),
        ({"types": {2}}, TypeError, r"^All elements of types must be of type ConsumerGroupType$"),
        ({"types": {ConsumerGroupType.UNKNOWN}}, ValueError, r"^UNKNOWN type is not allowed$"),
        ({"request_timeout": float("nan")}, ValueError, r"request_timeout"),
    ],
    ids=str,
)
def test_list_consumer_groups_refuses_what_is_no_condition(idle_admin, filters, error, text):
    with pytest.raises(error, match=text):
        idle_admin.list_consumer_groups(**filters)


@pytest.mark.parametrize(("call", "purpose"), [("describe", "described"), ("delete", "deleted")])
@pytest.mark.parametrize(
    ("ids", "error", "text"),
    [
        (None, TypeError, "Expected input to be list of group ids to be {}"),
        ("g", TypeError, "Expected input to be list of group ids to be {}"),
        (("g",), TypeError, "Expected input to be list of group ids to be {}"),
        ([], ValueError, "Expected at least one group to be {}"),
        ([None], ValueError, "Expected list of group strings, not NoneType"),
        ([5], ValueError, "Expected list of group strings, not int"),
    ],
    ids=str,
)
def test_what_is_no_list_of_groups_is_refused(idle_admin, call, purpose, ids, error, text):
    with pytest.raises(error, match=f"^{text.format(purpose)}$"):
        getattr(idle_admin, f"{call}_consumer_groups")(ids)


def test_what_is_given_twice_is_refused_and_nothing_done(admin, log):
    log.commit("g")
    log.commit("h")
    for call in (admin.describe_consumer_groups, admin.delete_consumer_groups):
        futures = call(["g", "h", "g"])
        assert [error_of(future).code() for future in futures.values()] == [KafkaError._INVALID_ARG] * 2
    for twice in ([partitions("g", at(0, 1), at(0, 2)), partitions("h", at(0, 1))], [partitions("g", at(0, 1))] * 2):
        for name in ("alter", "delete"):
            for future in getattr(admin, f"{name}_consumer_group_offsets")(twice).values():
                assert error_of(future) == KafkaError._INVALID_ARG
    for future in admin.list_consumer_group_offsets([partitions("g"), partitions("g")]).values():
        assert error_of(future) == KafkaError._INVALID_ARG
    assert (log.committed("g"), log.committed("h")) == ({0: 5}, {0: 5})


BAD_REQUESTS = [
    (None, TypeError, "request cannot be None"),
    ("g", TypeError, "request must be a list"),
    ([], ValueError, "Expected at least one consumer group"),
    (["g"], TypeError, "Expected list of 'ConsumerGroupTopicPartitions'"),
    ([ConsumerGroupTopicPartitions(None, [at(0, 1)])], TypeError, "'group_id' cannot be None"),  # type: ignore[arg-type]
    ([ConsumerGroupTopicPartitions(5, [at(0, 1)])], TypeError, "'group_id' must be a string"),  # type: ignore[arg-type]
    ([ConsumerGroupTopicPartitions("", [at(0, 1)])], ValueError, "'group_id' cannot be empty"),
    ([ConsumerGroupTopicPartitions("g", "t")], TypeError, "'topic_partitions' must be a list or None"),  # type: ignore[arg-type]
    ([ConsumerGroupTopicPartitions("g", [])], ValueError, "'topic_partitions' cannot be empty"),
    ([ConsumerGroupTopicPartitions("g", [5])], TypeError, "must be of type TopicPartition"),  # type: ignore[list-item]
    ([partitions("g", at(0, 1, topic=""))], ValueError, "must not have 'topic' attribute as Empty"),
    ([partitions("g", at(-1, 1))], ValueError, "must not have negative 'partition' value"),
]


@pytest.mark.parametrize("call", ["list", "alter", "delete"])
@pytest.mark.parametrize(("request_", "error", "text"), BAD_REQUESTS, ids=[text for *_, text in BAD_REQUESTS])
def test_what_is_no_list_of_offsets_is_refused(idle_admin, call, request_, error, text):
    with pytest.raises(error, match=text):
        getattr(idle_admin, f"{call}_consumer_group_offsets")(request_)


def test_offsets_are_given_where_they_are_needed_and_nowhere_else(idle_admin):
    with pytest.raises(ValueError, match="must not have 'offset' value"):
        idle_admin.list_consumer_group_offsets([partitions("g", at(0, 1))])
    for offset in (-1, -2, OFFSET_INVALID):
        with pytest.raises(ValueError, match="must not have negative value for 'offset' field"):
            idle_admin.alter_consumer_group_offsets([partitions("g", at(0, offset))])
    for call in (idle_admin.alter_consumer_group_offsets, idle_admin.delete_consumer_group_offsets):
        with pytest.raises(ValueError, match="'topic_partitions' cannot be null"):
            call([partitions("g")])
    with pytest.raises(TypeError, match=r"^Expected require_stable to be bool type, not int$"):
        idle_admin.list_consumer_group_offsets([partitions("g")], require_stable=1)
    with pytest.raises(TypeError, match=r"^Expected include_authorized_operations to be bool"):
        idle_admin.describe_consumer_groups(["g"], include_authorized_operations=1)
