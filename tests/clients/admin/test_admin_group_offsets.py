"""The admin client's calls about the offsets of groups: listed, altered, deleted."""

from __future__ import annotations

import pytest

from tests.clients.admin.groups import *  # noqa: F403 - the fixtures
from tests.clients.admin.groups import SESSION_TIMEOUT_MS, T0, T1, at, offsets_of, partitions
from tests.clients.admin.help import error_of, result
from txnstore import (
    OFFSET_INVALID,
    ConsumerGroupTopicPartitions,
    KafkaError,
    TopicPartition,
)
from txnstore.clients.admin import group_offsets
from txnstore.errors import PermissionDenied, StoreBusy, StoreUnavailable, UnknownMember, WriteConflict
from txnstore.testing.invariants import assert_sound

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


@pytest.mark.parametrize("error", [StoreUnavailable, StoreBusy, WriteConflict, PermissionDenied])
def test_offsets_are_listed_though_the_newest_topics_cannot_be_copied(admin, log, monkeypatch, error):
    log.commit("g", 5)

    def refuse(*_, **__):
        raise error("no")

    monkeypatch.setattr(group_offsets, "bring_up_to_date", refuse)
    assert offsets_of(admin, "g", T0) == {("t", 0): 5}


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


@pytest.mark.slow_but_first
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
    # Those that have died are not members any more, and stay out.
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


@pytest.mark.slow_but_first
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


# --- arguments ----------------------------------------------------------------------------------------------------


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
