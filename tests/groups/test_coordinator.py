"""The group coordinator over rows: what members are told, what it costs, and which of their commits count."""

from __future__ import annotations

import threading
import uuid
from dataclasses import replace

import pytest
from sqlalchemy import event

from tests.groups.group_servers import StoreServer
from tests.groups.protocol_member import ProtocolMember
from txnstore.db.backend import Subjects
from txnstore.errors import (
    FencedInstance,
    IllegalGeneration,
    InconsistentGroupProtocol,
    InvalidGroupId,
    InvalidRequest,
    UnknownMember,
)
from txnstore.groups import coordinator, rows
from txnstore.groups.group import AnswerStatus, GroupState, MemberDetails, Report
from txnstore.groups.offsets import add_pending_offsets, check_committer, commit_offsets, commit_offsets_at_once
from txnstore.log.topics import delete_topic, find_topics
from txnstore.model import NO_GENERATION, GroupMembership, OffsetAndMetadata, PartitionName, ProducerIdentity

TIMEOUT_MS = 10_000
ASSIGNORS = pytest.mark.parametrize("assignor", ["range", "roundrobin", "cooperative-sticky"])


@pytest.fixture
def server(shared_store, shared_clock):
    return StoreServer(shared_store, shared_clock, f"group-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def topic(server):
    name = f"topic-{uuid.uuid4().hex[:8]}"
    server.create_topic(name, 4)
    return name


@pytest.fixture
def member(server, topic):
    def start(assignor="cooperative-sticky", **options):
        return ProtocolMember(server, server.group_id, [topic], assignors=(assignor,), timeout_ms=TIMEOUT_MS, **options)

    return start


def numbers(member):
    return sorted(partition.partition for partition in member.owned)


def told(member, since=0):
    """What the application was told: (callback, partition numbers)."""
    return [(what, [int(name.rsplit("-", 1)[1]) for name in names]) for what, names in member.told[since:]]


def settled(*members, rounds=4):
    for _ in range(rounds):
        for each in members:
            each.poll()
    return members


# --- the callbacks in Kafka's order ----------------------------------------------------------------------------------


def test_eager_callbacks_come_in_kafkas_order(member):
    first, second = member("range"), member("range")
    first.poll()
    assert told(first) == [("assign", [0, 1, 2, 3])]
    second.poll()
    assert told(second) == []
    settled(first, second)
    assert told(first)[1:] == [("revoke", [0, 1, 2, 3]), ("assign", [0, 1])]
    assert told(second) == [("assign", [2, 3])]
    second.leave()
    assert told(second)[1:] == [("revoke", [2, 3])]
    settled(first)
    assert told(first)[3:] == [("revoke", [0, 1]), ("assign", [0, 1, 2, 3])]
    first.leave()
    assert told(first)[5:] == [("revoke", [0, 1, 2, 3])]


def test_cooperative_callbacks_name_only_what_moves(member):
    first, second = member(), member()
    settled(first)
    settled(second, first)
    assert told(first) == [("assign", [0, 1, 2, 3]), ("revoke", [2, 3]), ("assign", [])]
    assert told(second) == [("assign", []), ("assign", [2, 3])]
    second.leave()
    settled(first)
    assert told(first)[3:] == [("assign", [2, 3])]


@pytest.mark.slow_but_first
@ASSIGNORS
def test_a_clean_join_or_leave_settles_within_two_polls_of_each_member(server, member, assignor):
    members = [member(assignor) for _ in range(3)]
    settled(*members)
    newcomer = member(assignor)
    newcomer.poll()
    settled(*members, newcomer, rounds=2)
    assert sorted(len(each.owned) for each in (*members, newcomer)) == [1, 1, 1, 1]
    assert server.state() is GroupState.STABLE
    newcomer.leave()
    settled(*members, rounds=2)
    assert sorted(len(each.owned) for each in members) == [1, 1, 2]
    assert server.state() is GroupState.STABLE


# --- silence and static members --------------------------------------------------------------------------------------


def test_a_silent_member_is_replaced_after_its_session_timeout_and_the_next_heartbeat(server, shared_clock, member):
    first, second = settled(member(), member())
    shared_clock.advance(TIMEOUT_MS - 1)
    second.beat()
    second.poll()
    assert numbers(second) == [2, 3]
    shared_clock.advance(1)
    assert first.believed() == frozenset()
    second.beat()
    second.poll()
    assert numbers(second) == [0, 1, 2, 3]
    first.send()
    assert told(first)[-1] == ("lost", [0, 1])


def test_a_late_member_that_nobody_has_replaced_keeps_its_place(server, shared_clock, member):
    (alone,) = settled(member())
    shared_clock.advance(TIMEOUT_MS * 10)
    alone.beat()
    assert numbers(alone) == [0, 1, 2, 3]
    assert len(alone.believed()) == 4


def test_a_group_whose_members_are_all_silent_can_be_emptied(server, shared_clock, member):
    first, second = settled(member(), member())
    assert server.expire() == []
    shared_clock.advance(TIMEOUT_MS)
    assert sorted(server.expire()) == sorted([first.membership.member_id, second.membership.member_id])
    assert (server.state(), server.read().members) == (GroupState.EMPTY, {})
    assert server.expire() == []


def test_a_static_member_is_back_without_a_rebalance(server, member):
    first, second = settled(member(instance_id="one"), member(instance_id="two"))
    generation = second.membership.generation
    back = member(instance_id="one")
    back.poll()
    second.poll()
    assert (numbers(back), numbers(second)) == ([0, 1], [2, 3])
    assert back.membership.generation == second.membership.generation == generation
    first.send()
    assert first.is_out
    assert told(first)[-1] == ("lost", [0, 1])


def test_a_look_finds_that_another_was_silent_for_too_long(server, shared_clock, member):
    first, _ = settled(member(), member())

    def looks():
        return server.store.read(lambda connection: coordinator.has_news(connection, first.membership))

    assert not looks()
    shared_clock.advance(TIMEOUT_MS)
    assert looks()


SET_BACK_MS = 3_600_000


def test_after_the_clock_was_set_back_a_dead_member_is_replaced_in_time_and_the_living_keep_what_they_have(
    server, shared_clock, member
):
    first, second, dead = settled(*(member() for _ in range(3)))
    had = numbers(first), numbers(second)
    shared_clock.advance(-SET_BACK_MS)
    # Who has not been heard of since is taken for alive: nothing goes.
    first.beat()
    assert server.renew(first.membership)
    first.poll()
    shared_clock.advance(TIMEOUT_MS - 1)
    for each in (second, first):
        each.beat()
        each.poll()
    assert (numbers(first), numbers(second)) == had
    assert server.read().members.keys() == {each.membership.member_id for each in (first, second, dead)}
    shared_clock.advance(1)
    settled(first, second)
    assert sorted(numbers(first) + numbers(second)) == [0, 1, 2, 3]
    assert [what for what, _ in told(first) + told(second)].count("lost") == 0
    dead.send()
    assert told(dead)[-1][0] == "lost"


def test_who_comes_after_the_clock_was_set_back_has_what_the_dead_had_in_time(server, shared_clock, member):
    settled(member(), member(instance_id="one"))
    shared_clock.advance(-SET_BACK_MS)
    (newcomer,) = settled(member())
    shared_clock.advance(TIMEOUT_MS)
    settled(newcomer)
    assert numbers(newcomer) == [0, 1, 2, 3]


def test_a_clock_that_is_put_right_by_little_is_no_news(server, shared_clock, member):
    first, _ = settled(member(), member())
    shared_clock.advance(-1_000)
    assert server.renew(first.membership)
    shared_clock.advance(-1)
    assert not server.renew(first.membership)
    assert server.has_news(first.membership)
    first.beat()
    assert server.renew(first.membership)
    assert not server.has_news(first.membership)


def test_a_member_that_has_not_confirmed_a_generation_does_not_renew_in_it(server, member):
    (first,) = settled(member())
    member().poll()
    first.send()
    told = replace(first.membership, generation=first.membership.generation + 1)
    assert not server.store.write(lambda connection: coordinator.renew(connection, told))


# --- commits ---------------------------------------------------------------------------------------------------------


def in_a_transaction(server, membership, partition):
    def work(connection):
        (topic,) = find_topics(connection, [partition.topic])
        check_committer(connection, membership)
        offsets = {topic.partition_id(partition.partition): OffsetAndMetadata(1)}
        add_pending_offsets(connection, membership, offsets, ProducerIdentity(1, 0))

    server.store.write(work)


def by_itself(server, membership, partition):
    if not server.commit(membership, partition):
        raise IllegalGeneration


def by_one_statement(server, membership, partition):
    """Commit as consumers do: at once where the database can, and what that leaves in the general way."""
    (topic,) = server.store.read(lambda connection: find_topics(connection, [partition.topic]))
    offsets = {topic.partition_id(partition.partition): OffsetAndMetadata(1)}
    if not commit_offsets_at_once(server.store, membership, offsets):
        by_itself(server, membership, partition)


COMMITS = pytest.mark.parametrize("commit", [by_itself, by_one_statement, in_a_transaction])


@COMMITS
def test_a_member_commits_what_it_keeps_while_others_come_and_go(server, topic, member, commit):
    (first,) = settled(member())
    before = first.membership
    second = member()
    second.poll()
    kept, moved = PartitionName(topic, 0), PartitionName(topic, 3)
    for partition in (kept, moved):
        commit(server, before, partition)
    first.send()
    # It has been told to give back two, and has not done so: the last chance to commit, in the new generation.
    for membership in (before, replace(before, generation=before.generation + 1)):
        commit(server, membership, moved)
    first.poll()
    commit(server, first.membership, kept)
    with pytest.raises(IllegalGeneration):
        commit(server, first.membership, moved)
    # It has confirmed the new generation, so what it sent in the old one comes too late.
    with pytest.raises(IllegalGeneration):
        commit(server, before, kept)
    with pytest.raises(IllegalGeneration):
        commit(server, second.membership, moved)
    second.poll()
    commit(server, second.membership, moved)


@pytest.mark.slow_but_first
@COMMITS
def test_what_a_member_has_lost_and_got_back_it_commits_only_once_it_has_heard_of_that(server, topic, member, commit):
    """What it kept from before is older than what others have committed meanwhile."""
    first, second = settled(member(), member())
    before = first.membership
    kept, moved = PartitionName(topic, numbers(first)[0]), PartitionName(topic, numbers(second)[0])
    second.leave()
    # In the background: it has the partition back, and its application does not know.
    first.send()
    assert moved in server.read().members[before.member_id].owned
    commit(server, before, kept)
    with pytest.raises(IllegalGeneration):
        commit(server, before, moved)
    first.act()
    for partition in (kept, moved):
        commit(server, first.membership, partition)
    first.poll()
    for partition in (kept, moved):
        commit(server, first.membership, partition)


@pytest.mark.slow_but_first
@COMMITS
def test_that_holds_too_if_the_topic_was_recreated_since(server, topic, member, commit):
    first, second = settled(member(), member())
    before = first.membership
    kept, moved = PartitionName(topic, numbers(first)[0]), PartitionName(topic, numbers(second)[0])
    second.leave()
    first.send()
    server.store.write(lambda connection: delete_topic(connection, topic))
    server.create_topic(topic, 4)
    commit(server, before, kept)
    with pytest.raises(IllegalGeneration):
        commit(server, before, moved)
    first.act()
    commit(server, first.membership, moved)


@pytest.mark.slow_but_first
@COMMITS
def test_who_was_removed_or_replaced_commits_nothing(server, topic, shared_clock, member, commit):
    first, second = settled(member(), member(instance_id="one"))
    back = member(instance_id="one")
    back.poll()
    with pytest.raises(FencedInstance):
        commit(server, second.membership, PartitionName(topic, numbers(second)[0]))
    commit(server, back.membership, PartitionName(topic, numbers(back)[0]))
    shared_clock.advance(TIMEOUT_MS)
    back.beat()
    with pytest.raises(UnknownMember):
        commit(server, first.membership, PartitionName(topic, numbers(first)[0]))


def test_a_simple_consumer_commits_only_while_the_group_has_no_members(server, topic, member):
    simple = GroupMembership(server.group_id)
    assert server.commit(simple, PartitionName(topic, 0))
    (alone,) = settled(member())
    with pytest.raises(UnknownMember):
        server.commit(simple, PartitionName(topic, 0))
    alone.leave()
    assert server.commit(simple, PartitionName(topic, 0))


def test_an_empty_commit_is_checked_all_the_same(server, member):
    (alone,) = settled(member())
    server.store.write(lambda connection: commit_offsets(connection, alone.membership, {}))
    with pytest.raises(IllegalGeneration):
        server.store.write(lambda connection: commit_offsets(connection, replace(alone.membership, generation=9), {}))


# --- topics ----------------------------------------------------------------------------------------------------------


def test_partitions_that_a_topic_grows_by_are_assigned_at_the_next_heartbeat(server, topic, member):
    first, second = settled(member(), member())
    server.grow_topic(topic, 6)
    assert server.renew(first.membership)
    first.send()
    settled(first, second)
    assert (numbers(first), numbers(second)) == ([0, 1, 4], [2, 3, 5])


def test_a_topic_that_is_not_there_yet_and_one_that_is_gone(server, topic, member):
    (alone,) = settled(member())
    later = f"{topic}-later"
    alone.resubscribe([topic, later])
    settled(alone)
    assert len(alone.owned) == 4
    server.create_topic(later, 1)
    server.store.write(lambda connection: delete_topic(connection, topic))
    alone.send()
    settled(alone)
    assert alone.owned == {PartitionName(later, 0)}


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_an_idle_member_costs_one_statement_a_heartbeat(server, member):
    members = settled(*(member() for _ in range(10)))
    statements = []
    this_thread = threading.get_ident()

    def note(connection, cursor, statement, *_):
        if threading.get_ident() == this_thread:
            statements.append(statement)

    event.listen(server.store.engine, "before_cursor_execute", note)
    try:
        for each in members:
            each.beat()
    finally:
        event.remove(server.store.engine, "before_cursor_execute", note)
    # BEGIN, UPDATE, COMMIT; every three seconds by default: ten a second for ten members.
    assert len(statements) == 30
    assert sum(statement.startswith("UPDATE") for statement in statements) == 10


def test_a_leave_is_one_message_to_a_server_and_locks_sqlite_for_three_statements(server, member):
    first, second = settled(member(), member())
    statements = []
    this_thread = threading.get_ident()

    def note(connection, cursor, statement, *_):
        if threading.get_ident() == this_thread:
            statements.append(statement)

    event.listen(server.store.engine, "before_cursor_execute", note)
    try:
        second.leave()
    finally:
        event.remove(server.store.engine, "before_cursor_execute", note)
    steps = statements
    if server.store.backend.name == "postgresql":
        (message,) = statements
        steps = [step for step in message.split(";") if not step.startswith(("SET LOCAL", "SELECT pg_catalog.set"))]
    # The lock of the group comes first, as in every other request.
    assert [step.split()[0] for step in steps] == ["BEGIN", "SELECT", "UPDATE", "DELETE", "COMMIT"]
    assert steps[1].endswith("FOR UPDATE") or server.store.backend.name == "sqlite"
    settled(first)
    assert numbers(first) == [0, 1, 2, 3]


def test_who_stays_commits_as_before_until_it_hears_that_another_has_left(server, topic, member):
    first, second = settled(member(), member())
    second.leave()
    (found,) = server.store.read(lambda connection: find_topics(connection, [topic]))
    offsets = {found.partition_ids[number]: OffsetAndMetadata(7) for number in numbers(first)}
    server.store.write(lambda connection: commit_offsets(connection, first.membership, offsets))
    with pytest.raises(UnknownMember):
        server.store.write(lambda connection: commit_offsets(connection, second.membership, offsets))


# --- many at once ----------------------------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@ASSIGNORS
def test_many_join_at_once(server, member, assignor):
    members = [member(assignor) for _ in range(6)]
    at_once = threading.Barrier(len(members))

    def start(each):
        at_once.wait(timeout=60)
        each.send()

    threads = [threading.Thread(target=start, args=(each,)) for each in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    settled(*members)
    assert sorted(number for each in members for number in numbers(each)) == [0, 1, 2, 3]
    assert server.state() is GroupState.STABLE


def test_members_that_all_leave_at_once_leave_an_empty_group(server, member):
    members = settled(*(member() for _ in range(6)))
    generation = server.read().generation
    at_once = threading.Barrier(len(members))

    def end(each):
        at_once.wait(timeout=60)
        each.leave()

    threads = [threading.Thread(target=end, args=(each,)) for each in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    group = server.read()
    assert (group.members, group.assignor, server.state()) == ({}, None, GroupState.EMPTY)
    # Each has left once, and nobody was in the way of another so that it had to do so again.
    assert group.generation == generation + len(members)
    (newcomer,) = settled(member())
    assert numbers(newcomer) == [0, 1, 2, 3]


def test_renewing_and_expiring_at_once_never_gives_a_partition_two_owners(server, shared_clock, member):
    first, second = settled(member(), member())
    shared_clock.advance(TIMEOUT_MS - 1)
    assert server.renew(second.membership)
    shared_clock.advance(1)
    outcome = {}
    at_once = threading.Barrier(2)

    def renew():
        at_once.wait(timeout=60)
        outcome["renewed"] = server.renew(first.membership)

    def expire():
        at_once.wait(timeout=60)
        outcome["expired"] = server.expire()

    threads = [threading.Thread(target=renew), threading.Thread(target=expire)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert outcome["renewed"] == (outcome["expired"] == [])


# --- for people, and what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("assignor", "between"),
    [("range", GroupState.PREPARING_REBALANCE), ("cooperative-sticky", GroupState.COMPLETING_REBALANCE)],
)
def test_a_group_is_listed_in_the_state_in_which_its_members_are_answered(server, member, assignor, between):
    (first,) = settled(member(assignor))
    assert server.state() is server.listed().state is GroupState.STABLE
    passing = member(assignor)
    passing.poll()
    assert server.state() is server.listed().state is GroupState.PREPARING_REBALANCE
    # What the first has is its own again; an eager member gives it back all the same, as the generation is another.
    passing.leave()
    # As in Kafka it stays so until the first one asks.
    assert server.state() is server.listed().state is GroupState.PREPARING_REBALANCE
    first.beat()
    assert server.state() is server.listed().state is between
    settled(first)
    assert server.state() is server.listed().state is GroupState.STABLE


def test_a_report_extends_the_deadline_as_a_renewal_does(server, shared_clock, member):
    first, second = settled(member(), member())
    shared_clock.advance(TIMEOUT_MS - 1)
    first.send()
    by_id = {each.member_id: each.deadline_ms for each in server.listed().members}
    now_ms = shared_clock.now_ms()
    assert by_id == {first.membership.member_id: now_ms + TIMEOUT_MS, second.membership.member_id: now_ms + 1}


def test_what_a_group_is_and_what_is_listed_of_it(server, topic, shared_clock, member):
    assert server.state() is GroupState.DEAD
    first, second = settled(member(), member(instance_id="one"))
    group, listed = server.read(), server.listed()
    assert (server.state(), group.assignor, listed.assignor) == (GroupState.STABLE, *["cooperative-sticky"] * 2)
    assert group.generation == listed.generation == first.membership.generation
    static = group.members[second.membership.member_id]
    assert static.group_instance_id == "one"
    assert static.details == MemberDetails("client", TIMEOUT_MS, (topic,), frozenset({topic}), ("cooperative-sticky",))
    assert static.owned == static.assignment == second.owned
    shown = next(each for each in listed.members if each.member_id == static.member_id)
    assert (shown.group_instance_id, shown.owned) == (static.group_instance_id, static.owned)
    assert (shown.deadline_ms, shown.is_expired) == (shared_clock.now_ms() + TIMEOUT_MS, False)
    shared_clock.advance(TIMEOUT_MS)
    assert all(each.is_expired for each in server.listed().members)
    third = member()
    third.send()
    assert server.state() is GroupState.STABLE
    assert third.pending.status is AnswerStatus.OWN


REPORT = Report(GroupMembership("g", NO_GENERATION, "m"), 1)
DETAILS = MemberDetails("client", 10_000, ("t",), frozenset("t"), ("range",))
WRONG = {
    "no group": (replace(REPORT, membership=GroupMembership("", member_id="m")), DETAILS, InvalidGroupId),
    "no member id": (replace(REPORT, membership=GroupMembership("g")), DETAILS, InvalidRequest),
    "NUL in the member id": (replace(REPORT, membership=GroupMembership("g", -1, "\0")), DETAILS, InvalidRequest),
    "empty lasting name": (replace(REPORT, membership=GroupMembership("g", -1, "m", "")), DETAILS, InvalidRequest),
    "half a surrogate pair": (
        replace(REPORT, membership=GroupMembership("g", -1, "m", "\ud800")),
        DETAILS,
        InvalidRequest,
    ),
    "no time": (REPORT, replace(DETAILS, session_timeout_ms=0), InvalidRequest),
    "too much time": (REPORT, replace(DETAILS, session_timeout_ms=3_600_001), InvalidRequest),
    "no number as a time": (REPORT, replace(DETAILS, session_timeout_ms=True), InvalidRequest),
    "NUL in a topic": (REPORT, replace(DETAILS, topics=frozenset({"t\0"})), InvalidRequest),
}


# On SQLite alone: they are refused before any statement.
@pytest.mark.parametrize("shared_store", ["sqlite"], indirect=True)
@pytest.mark.parametrize(("report", "details", "error"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_refused_and_changes_nothing(shared_store, report, details, error):
    group_id = f"refused-{uuid.uuid4().hex}"
    if report.membership.group_id:
        report = replace(report, membership=replace(report.membership, group_id=group_id))
    with pytest.raises(error):
        shared_store.write(lambda connection: coordinator.join(connection, report, details))
    assert shared_store.read(lambda connection: rows.read_group(connection, group_id)) is None


def test_a_member_that_the_rules_refuse_leaves_no_group_behind(shared_store):
    report = replace(REPORT, membership=replace(REPORT.membership, group_id=f"refused-{uuid.uuid4().hex}"))
    with pytest.raises(InconsistentGroupProtocol):
        shared_store.write(
            lambda connection: coordinator.join(connection, report, replace(DETAILS, assignors=("uniform",)))
        )
    assert shared_store.read(lambda connection: rows.read_group(connection, report.membership.group_id)) is None


def test_the_others_are_told_of_who_leaves_and_of_nothing_else(server, member, monkeypatch):
    (alone,) = settled(member())
    told_of: list[Subjects] = []
    monkeypatch.setattr(server.store, "announce", told_of.append)
    assert not server.leave(replace(alone.membership, member_id="somebody else"))
    assert told_of == []
    assert server.leave(alone.membership)
    assert not server.leave(alone.membership)
    assert told_of == [Subjects(group_ids=frozenset([server.group_id]))]


def test_who_is_no_member_leaves_nothing(server, member):
    (alone,) = settled(member())
    assert not server.leave(replace(alone.membership, member_id="somebody else"))
    assert not server.leave(GroupMembership(f"{server.group_id}-other", 1, "nobody"))
    assert server.read().generation == 1
