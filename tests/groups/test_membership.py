"""A group of one member: joining replaces the former one, which heartbeats and commits then tell."""

from __future__ import annotations

import threading
import uuid
from dataclasses import replace

import pytest

from txnstore.errors import FencedInstance, IllegalGeneration, InvalidGroupId, UnknownMember
from txnstore.groups.membership import JoinRequest, heartbeat, join, leave, read_members, remove_expired_members
from txnstore.groups.offsets import commit_offsets, read_offsets
from txnstore.model import GroupMembership, OffsetAndMetadata


@pytest.fixture
def group_id():
    return f"group-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def request_of(group_id):
    def make(member_id="first", **changes):
        request = JoinRequest(group_id, member_id, None, "client", 10_000, "range", ["t"], {"t": [0, 1]})
        return replace(request, **changes)

    return make


@pytest.fixture
def joined(shared_store, request_of):
    return lambda *arguments, **changes: shared_store.write(
        lambda connection: join(connection, request_of(*arguments, **changes))
    )


def beat(store, membership):
    store.write(lambda connection: heartbeat(connection, membership))


def commit(store, membership, offset=3):
    store.write(lambda connection: commit_offsets(connection, membership, {1: OffsetAndMetadata(offset)}))


def members_of(store, group_id):
    return store.read(lambda connection: read_members(connection, group_id))


def test_the_first_to_join_is_the_member_of_generation_one(shared_store, joined, group_id):
    first = joined()
    assert first.membership == GroupMembership(group_id, 1, "first")
    assert first.replaced == ()
    (member,) = members_of(shared_store, group_id)
    assert (member.member_id, member.generation, member.client_id, member.is_expired) == ("first", 1, "client", False)
    assert member.assignment == {"t": [0, 1]}
    commit(shared_store, first.membership)
    beat(shared_store, first.membership)


def test_joining_again_raises_the_generation(shared_store, joined):
    first, again = joined(), joined()
    assert (again.membership.generation, again.replaced) == (2, ())
    with pytest.raises(IllegalGeneration):
        commit(shared_store, first.membership)
    with pytest.raises(IllegalGeneration):
        beat(shared_store, first.membership)
    commit(shared_store, again.membership)


def test_who_joins_replaces_the_member_which_can_do_nothing_more(shared_store, joined, group_id):
    first, second = joined(), joined("second")
    assert second.replaced == ("first",)
    assert [member.member_id for member in members_of(shared_store, group_id)] == ["second"]
    for do in (commit, beat):
        with pytest.raises(UnknownMember):
            do(shared_store, first.membership)
    assert not shared_store.write(lambda connection: leave(connection, first.membership))
    commit(shared_store, second.membership)


def test_a_static_member_that_is_replaced_by_its_like_is_fenced(shared_store, joined):
    first = joined(group_instance_id="worker-1")
    second = joined("second", group_instance_id="worker-1")
    assert second.membership.group_instance_id == "worker-1"
    for do in (commit, beat):
        with pytest.raises(FencedInstance):
            do(shared_store, first.membership)
    beat(shared_store, second.membership)


def test_who_leaves_is_no_member_and_frees_the_group(shared_store, joined, group_id):
    first = joined()
    simple = GroupMembership(group_id)
    with pytest.raises(UnknownMember):
        commit(shared_store, simple)
    assert shared_store.write(lambda connection: leave(connection, first.membership))
    assert members_of(shared_store, group_id) == []
    for do in (commit, beat):
        with pytest.raises(UnknownMember):
            do(shared_store, first.membership)
    commit(shared_store, simple)
    assert joined().membership.generation == 3


def test_a_heartbeat_moves_the_deadline(shared_store, shared_clock, joined, group_id):
    first = joined()
    for _ in range(3):
        shared_clock.advance(6_000)
        beat(shared_store, first.membership)
    assert not members_of(shared_store, group_id)[0].is_expired
    shared_clock.advance(10_000)
    assert members_of(shared_store, group_id)[0].is_expired


def test_a_silent_member_can_be_removed_and_only_a_silent_one(shared_store, shared_clock, joined, group_id):
    first = joined()
    assert shared_store.write(lambda connection: remove_expired_members(connection, group_id)) == 0
    shared_clock.advance(10_000)
    assert shared_store.write(lambda connection: remove_expired_members(connection, group_id)) == 1
    with pytest.raises(UnknownMember):
        beat(shared_store, first.membership)
    commit(shared_store, GroupMembership(group_id), offset=9)
    offsets = shared_store.read(lambda connection: read_offsets(connection, group_id, [1])).offsets
    assert offsets[1].offset == 9


def test_a_silent_member_that_nobody_removed_goes_on_with_its_next_heartbeat(shared_store, shared_clock, joined):
    first = joined()
    shared_clock.advance(60_000)
    beat(shared_store, first.membership)
    commit(shared_store, first.membership)


@pytest.mark.parametrize("group_id", ["", "nul\0", "x" * 1001])
def test_what_is_no_group_is_refused(shared_store, joined, group_id):
    with pytest.raises(InvalidGroupId):
        joined()


def test_of_many_that_join_at_once_one_is_left_and_each_has_its_own_generation(shared_store, joined, group_id):
    found = []

    def work(name):
        found.append(joined(name).membership)

    threads = [threading.Thread(target=work, args=(f"member-{number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(membership.generation for membership in found) == [1, 2, 3, 4, 5, 6]
    (member,) = members_of(shared_store, group_id)
    last = max(found, key=lambda membership: membership.generation)
    assert (member.member_id, member.generation) == (last.member_id, 6)
