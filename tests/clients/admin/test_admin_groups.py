"""The admin client's calls about groups: listed, described, deleted."""

from __future__ import annotations

import pytest

from tests.clients.admin.groups import *  # noqa: F403 - the fixtures
from tests.clients.admin.groups import SESSION_TIMEOUT_MS, T0, T1, at, listed, partitions
from tests.clients.admin.help import HOSTILE_TEXTS, UNUSUAL_TEXTS, error_of, result
from txnstore import (
    ConsumerGroupState,
    ConsumerGroupType,
    KafkaError,
    KafkaException,
    TopicCollection,
)
from txnstore.errors import IllegalGeneration
from txnstore.testing.invariants import assert_sound

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


def test_what_was_found_shows_itself_to_a_programmer(admin, log):
    log.join_alone("g", assignment={"t": [1, 0]}, instance="first")
    (group,) = result(admin.list_consumer_groups()).valid
    assert repr(group).startswith("ConsumerGroupListing(group_id='g', is_simple_consumer_group=False, state=")
    found = repr(result(admin.describe_consumer_groups(["g"])["g"]))
    assert "MemberDescription(member_id=" in found
    assert "assignment=MemberAssignment(topic_partitions=[TopicPartition{topic=t,partition=0" in found
    assert "coordinator=Node(id=0" in found
    topic = repr(result(admin.describe_topics(TopicCollection(["t"]))["t"]))
    assert topic.startswith("TopicDescription(name='t', topic_id=")
    assert "TopicPartitionInfo(id=1, leader=Node(id=0" in topic
    assert "object at 0x" not in repr(result(admin.list_consumer_groups())) + found + topic


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
        assert [error_of(future).code() for future in futures.values()] == [KafkaError.INVALID_GROUP_ID] * len(
            HOSTILE_TEXTS
        )
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
