"""The rules of rebalancing, request by request: who is let in, who is told what, and when a partition changes hands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from txnstore.errors import FencedInstance, IllegalGeneration, InconsistentGroupProtocol, UnknownMember
from txnstore.groups.group import (
    NEXT_STATES,
    AnswerStatus,
    Group,
    GroupMove,
    GroupState,
    IllegalGroupMove,
    MemberDetails,
    Report,
    check_move,
)
from txnstore.groups.rebalance_rules import choose_assignor, heartbeat, join, leave, remove, state_of
from txnstore.model import NO_GENERATION, GroupMembership, PartitionName

COUNTS = {"t": 4}
ALL = frozenset(PartitionName("t", number) for number in range(4))
OWN, REVOKE, WAIT = AnswerStatus.OWN, AnswerStatus.REVOKE, AnswerStatus.WAIT


def some(*numbers):
    return frozenset(PartitionName("t", number) for number in numbers)


def details(*assignors, topics=("t",)):
    return MemberDetails("client", 10_000, tuple(topics), frozenset(topics), assignors or ("range",))


def report(member_id, step=0, generation=NO_GENERATION, owned=(), instance_id=None):
    return Report(GroupMembership("g", generation, member_id, instance_id), step, frozenset(owned))


def group_of(*names, assignors=("range",), counts=COUNTS):
    """A group that these have joined one after the other, at rest."""
    group, answers, step = None, {}, 0
    for name in names:
        reply = join(group, report(name), details(*assignors), counts, members_expired=False)
        group, answers[name] = reply.group, reply.answer
        while state_of(group) is not GroupState.STABLE:
            step += 1
            for member_id, answer in answers.items():
                said = report(member_id, step, answer.membership.generation, answer.partitions)
                reply = heartbeat(group, said, counts)
                group, answers[member_id] = reply.group, reply.answer
    assert group is not None
    return group, step


def beat(group, name, step, generation, owned=(), counts=COUNTS, instance_id=None, **options):
    reply = heartbeat(group, report(name, step, generation, owned, instance_id), counts, **options)
    return reply.group, reply.answer


def told(answer):
    return answer.status, frozenset(answer.partitions), frozenset(answer.revoke)


# --- one member after the other --------------------------------------------------------------------------------------


def test_the_first_member_gets_everything_at_once():
    reply = join(None, report("a"), details(), COUNTS, members_expired=False)
    assert told(reply.answer) == (OWN, ALL, frozenset())
    assert reply.answer.membership == GroupMembership("g", 1, "a")
    assert reply.answer.is_settled
    assert (reply.answer.assignor, reply.answer.is_cooperative) == ("range", False)
    assert state_of(reply.group) is GroupState.STABLE


def test_an_eager_group_gives_back_everything_before_anybody_gets_anything():
    group, step = group_of("a")
    reply = join(group, report("b"), details(), COUNTS, members_expired=False)
    assert told(reply.answer) == (WAIT, frozenset(), frozenset())
    assert state_of(reply.group) is GroupState.PREPARING_REBALANCE
    group, answer = beat(reply.group, "a", step + 1, 1, ALL)
    assert told(answer) == (REVOKE, frozenset(), ALL)
    assert answer.membership.generation == 2
    group, answer = beat(group, "b", 1, 2)
    assert told(answer)[0] is WAIT
    group, answer = beat(group, "a", step + 2, 2)
    assert told(answer) == (OWN, some(0, 1), frozenset())
    assert answer.is_settled
    assert state_of(group) is GroupState.COMPLETING_REBALANCE
    group, answer = beat(group, "b", 2, 2)
    assert told(answer) == (OWN, some(2, 3), frozenset())
    assert state_of(group) is GroupState.STABLE


def test_a_cooperative_group_gives_back_only_what_moves():
    group, step = group_of("a", assignors=("cooperative-sticky",))
    reply = join(group, report("b"), details("cooperative-sticky"), COUNTS, members_expired=False)
    assert told(reply.answer)[0] is WAIT
    group, answer = beat(reply.group, "a", step + 1, 1, ALL)
    assert told(answer) == (REVOKE, some(0, 1), some(2, 3))
    # Until it has said that it gave them back, they are its own.
    group, answer = beat(group, "b", 1, 2)
    assert told(answer) == (WAIT, frozenset(), frozenset())
    group, answer = beat(group, "a", step + 2, 2, some(0, 1))
    assert told(answer) == (OWN, some(0, 1), frozenset())
    assert answer.is_settled
    group, answer = beat(group, "b", 2, 2)
    assert told(answer) == (OWN, some(2, 3), frozenset())
    assert state_of(group) is GroupState.STABLE


def test_what_is_free_does_not_wait_for_the_rest():
    counts = {"t": 4, "u": 1}
    group, _ = group_of("a", assignors=("cooperative-sticky",), counts=counts)
    wants_both = details("cooperative-sticky", topics=("t", "u"))
    reply = join(group, report("b"), wants_both, counts, members_expired=False)
    assert told(reply.answer) == (WAIT, frozenset({PartitionName("u", 0)}), frozenset())


def test_who_leaves_lets_the_others_assign_what_it_had():
    group, step = group_of("a", "b", assignors=("cooperative-sticky",))
    group = leave(group, "b")
    assert (group.generation, group.assignor, state_of(group)) == (3, None, GroupState.PREPARING_REBALANCE)
    assert group.members["a"].assignment == some(0, 1)
    group, answer = beat(group, "a", step + 1, 2, some(0, 1))
    assert (group.generation, answer.assignor, told(answer)) == (3, "cooperative-sticky", (OWN, ALL, frozenset()))
    # It has yet to say that it has heard.
    assert not answer.is_settled
    empty = leave(group, "a")
    assert (empty.generation, empty.assignor, state_of(empty)) == (4, None, GroupState.EMPTY)
    reply = join(empty, report("c"), details(), COUNTS, members_expired=False)
    assert (reply.group.generation, told(reply.answer)) == (5, (OWN, ALL, frozenset()))


def test_all_who_leave_before_anybody_asks_count_once_each():
    group, step = group_of("a", "b", "c", "d")
    for name in ("b", "c", "d"):
        group = leave(group, name)
    assert (group.generation, state_of(group)) == (7, GroupState.PREPARING_REBALANCE)
    group, answer = beat(group, "a", step + 1, 4, some(0))
    assert (group.generation, told(answer)) == (7, (REVOKE, frozenset(), some(0)))
    group, answer = beat(group, "a", step + 2, 7)
    assert told(answer) == (OWN, ALL, frozenset())


def test_after_a_leave_whoever_comes_first_assigns_anew():
    group, _ = group_of("a", "b", assignors=("cooperative-sticky",))
    reply = join(leave(group, "b"), report("c"), details("cooperative-sticky"), COUNTS, members_expired=False)
    assert (reply.group.generation, state_of(reply.group)) == (3, GroupState.COMPLETING_REBALANCE)
    assert reply.group.members["a"].assignment | reply.group.members["c"].assignment == ALL
    static, _ = group_of("a", assignors=("cooperative-sticky",))
    named = join(
        static, report("s", instance_id="one"), details("cooperative-sticky"), COUNTS, members_expired=False
    ).group
    successor = report("s2", instance_id="one")
    reply = join(leave(named, "a"), successor, details("cooperative-sticky"), COUNTS, members_expired=False)
    assert (reply.group.generation, reply.group.members["s2"].assignment) == (3, ALL)


def test_who_had_nothing_leaves_an_assignor_to_be_chosen_anew():
    group, step = group_of(*"abcd")
    idle = join(group, report("e"), details("range", "cooperative-sticky"), COUNTS, members_expired=False).group
    present = {name: member for name, member in idle.members.items() if name != "e"}
    assert frozenset().union(*(member.assignment for member in present.values())) == ALL
    group, _ = beat(leave(idle, "e"), "a", step + 1, 5, some(0))
    assert (group.generation, group.assignor) == (6, "range")


@pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])
def test_a_member_that_was_told_of_a_generation_without_an_assignor_is_told_of_the_next_one(assignor):
    """Clients of the version before find that everything is assigned if who has left had nothing, and settle."""
    group, _ = group_of("a", assignors=(assignor,))
    idle = join(group, report("b"), details(assignor, topics=("u",)), COUNTS, members_expired=False).group
    group = leave(idle, "b")
    settled = replace(group.members["a"], generation=group.generation)
    group = replace(group, members={"a": settled})
    joined = join(group, report("c"), details(assignor), COUNTS, members_expired=False).group
    assert joined.members["c"].assignment
    assert joined.generation > settled.generation, "it would never ask, and never give back what is another's now"


def test_who_is_removed_frees_what_it_had():
    group, step = group_of("a", "b", assignors=("cooperative-sticky",))
    group = remove(group, ["b"], COUNTS)
    assert (group.generation, state_of(group)) == (3, GroupState.COMPLETING_REBALANCE)
    group, answer = beat(group, "a", step + 1, 2, some(0, 1))
    assert told(answer) == (OWN, ALL, frozenset())
    # It has yet to say that it has heard.
    assert not answer.is_settled
    group, answer = beat(group, "a", step + 2, 3, ALL)
    assert answer.is_settled
    assert state_of(group) is GroupState.STABLE
    empty = remove(group, ["a"], COUNTS)
    assert (empty.generation, empty.assignor, state_of(empty)) == (4, None, GroupState.EMPTY)


@pytest.mark.parametrize("later", [0, 1], ids=["the same request", "the next one"])
@pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])
def test_a_lost_answer_is_given_again(assignor, later):
    group, step = group_of("a", "b", assignors=(assignor,))
    group = remove(group, ["b"], COUNTS)
    owned = some(0, 1) if assignor == "cooperative-sticky" else frozenset()
    group, first = beat(group, "a", step + 1, 3, owned)
    group, again = beat(group, "a", step + 1 + later, 3, owned)
    assert told(first) == told(again) == (OWN, ALL, frozenset())


def test_a_member_that_has_nothing_may_take_its_time_to_take_over_an_answer():
    group, step = group_of("a")
    group = join(group, report("b"), details(), COUNTS, members_expired=False).group
    group = remove(group, ["a"], COUNTS)
    for step in (1, 2):
        group, answer = beat(group, "b", step, 2)
        assert told(answer) == (OWN, ALL, frozenset())
        assert answer.membership.generation == 3


def test_a_grant_that_nobody_heard_of_is_taken_back_when_the_group_changes():
    group, step = group_of("a", "b", assignors=("cooperative-sticky",))
    group = remove(group, ["b"], COUNTS)
    group, _ = beat(group, "a", step + 1, 2, some(0, 1))
    assert group.members["a"].owned == ALL
    group = join(group, report("c"), details("cooperative-sticky"), COUNTS, members_expired=False).group
    group, answer = beat(group, "a", step + 2, 2, some(0, 1))
    assert told(answer) == (OWN, some(0, 1), frozenset())
    group, answer = beat(group, "c", 1, 4)
    assert told(answer) == (OWN, some(2, 3), frozenset())


def test_what_a_member_claims_without_having_been_given_it_is_taken_away():
    group, step = group_of("a", "b", assignors=("cooperative-sticky",))
    group, answer = beat(group, "a", step + 1, 2, ALL)
    assert told(answer) == (REVOKE, some(0, 1), some(2, 3))
    assert group.members["b"].owned == some(2, 3)


def test_a_generation_that_was_confirmed_stays_so():
    """What the member sends in an older one, however late, is no commit of the present."""
    group, step = group_of("a", "b", assignors=("cooperative-sticky",))
    group, _ = beat(group, "a", step + 1, 1, some(0, 1))
    assert group.members["a"].generation == group.generation == 2


def test_what_has_not_left_its_owner_yet_need_not_leave_it_after_all():
    group, step = group_of("b", assignors=("cooperative-sticky",))
    group = join(group, report("a"), details("cooperative-sticky"), COUNTS, members_expired=False).group
    assert len(group.members["a"].assignment) == 2
    group, answer = beat(group, "b", step + 1, 1, ALL, {"t": 8})
    assert told(answer) == (OWN, ALL, frozenset())


@pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])
def test_what_is_its_share_but_still_anothers_is_taken_away_too(assignor):
    group, _ = group_of("a", assignors=(assignor,))
    group = join(group, report("b"), details(assignor), COUNTS, members_expired=False).group
    assert group.members["b"].assignment == some(2, 3)
    group, answer = beat(group, "b", 1, 2, some(2, 3))
    assert told(answer) == (REVOKE, frozenset(), some(2, 3))
    assert (group.members["a"].owned, group.members["b"].owned) == (ALL, frozenset())


def test_an_eager_member_gives_back_even_what_stays_its_own():
    counts = {"t": 4, "u": 1}
    group, step = group_of("a", counts=counts)
    group = join(group, report("b"), details(topics=("u",)), counts, members_expired=False).group
    assert group.members["a"].assignment == ALL
    group, answer = beat(group, "a", step + 1, 1, ALL, counts)
    assert told(answer) == (REVOKE, frozenset(), ALL)
    _, answer = beat(group, "a", step + 2, 2, frozenset(), counts)
    assert told(answer) == (OWN, ALL, frozenset())


def test_members_that_expired_without_having_anything_raise_the_generation_too():
    group, step = group_of("a")
    group, answer = beat(group, "a", step + 1, 1, ALL, members_expired=True)
    assert (group.generation, answer.status) == (2, REVOKE)
    again = join(group, report("a", step + 2, 2), details(), COUNTS, members_expired=True)
    assert again.group.generation == 3


def test_a_topic_that_has_grown_is_assigned_anew():
    grown = {"t": 5}
    group, step = group_of("a", "b", assignors=("cooperative-sticky",))
    group, answer = beat(group, "a", step + 1, 2, some(0, 1), grown)
    assert (group.generation, told(answer)) == (3, (OWN, some(0, 1, 4), frozenset()))
    group, answer = beat(group, "b", step + 1, 2, some(2, 3), grown)
    assert (group.generation, answer.is_settled) == (3, False)


def test_another_subscription_is_assigned_anew_and_the_same_is_not():
    counts = {"t": 4, "u": 2}
    group, step = group_of("a", "b", assignors=("cooperative-sticky",), counts=counts)
    cooperative = details("cooperative-sticky")
    same = join(group, report("a", step + 1, 2, some(0, 1)), cooperative, counts, members_expired=False)
    assert (same.group.generation, same.answer.is_settled) == (2, True)
    other = join(
        group,
        report("a", step + 1, 2, some(0, 1)),
        details("cooperative-sticky", topics=("u",)),
        counts,
        members_expired=False,
    )
    assert other.group.generation == 3
    assert told(other.answer) == (REVOKE, frozenset(), some(0, 1))


# --- static members --------------------------------------------------------------------------------------------------


def static_group():
    reply = join(None, report("old", instance_id="one"), details(), COUNTS, members_expired=False)
    group, _ = beat(reply.group, "old", 1, 1, ALL, instance_id="one")
    return group


def test_a_static_member_that_is_back_has_what_it_had_and_the_former_one_is_fenced():
    reply = join(static_group(), report("new", instance_id="one"), details(), COUNTS, members_expired=False)
    assert told(reply.answer) == (OWN, ALL, frozenset())
    assert (reply.group.generation, list(reply.group.members)) == (1, ["new"])
    assert state_of(reply.group) is GroupState.STABLE
    with pytest.raises(FencedInstance):
        beat(reply.group, "old", 9, 1, ALL, instance_id="one")
    with pytest.raises(FencedInstance):
        join(reply.group, report("old", 9, 1, ALL, instance_id="one"), details(), COUNTS, members_expired=False)


def test_a_static_member_that_is_back_with_another_subscription_makes_the_group_rebalance():
    reply = join(
        static_group(),
        report("new", instance_id="one"),
        details(topics=("u",)),
        {**COUNTS, "u": 1},
        members_expired=False,
    )
    assert (reply.group.generation, told(reply.answer)[1]) == (2, frozenset({PartitionName("u", 0)}))


# --- refusals --------------------------------------------------------------------------------------------------------

REFUSALS = {
    "nobody": (report("z", 9, 2), UnknownMember),
    "under a lasting name that nobody has": (report("a", 9, 2, instance_id="i"), UnknownMember),
    "in a generation to come": (report("a", 99, 3), IllegalGeneration),
    "after a later request": (report("a", 0, 2), IllegalGeneration),
}


@pytest.mark.parametrize(("said", "error"), REFUSALS.values(), ids=REFUSALS)
def test_who_is_no_member_is_told_so(said, error):
    group, _ = group_of("a", "b")
    with pytest.raises(error):
        heartbeat(group, said, COUNTS)
    with pytest.raises(error):
        join(group, said, details(), COUNTS, members_expired=False)


def test_there_is_nobody_in_a_group_without_members():
    for nobody in (None, Group("g")):
        with pytest.raises(UnknownMember):
            heartbeat(nobody, report("a", 9, 0), COUNTS)


def test_a_member_that_has_yet_to_take_over_the_answer_to_its_joining_may_report():
    group, _ = group_of("a")
    _, answer = beat(group, "a", 9, NO_GENERATION)
    assert (answer.membership.generation, told(answer)) == (1, (OWN, ALL, frozenset()))


# --- assignors -------------------------------------------------------------------------------------------------------

NEGOTIATIONS = [
    ([("range", "roundrobin"), ("roundrobin", "range")], "range"),
    ([("range", "roundrobin"), ("roundrobin",)], "roundrobin"),
    ([("range", "roundrobin"), ("roundrobin", "range"), ("roundrobin", "range")], "roundrobin"),
    ([("cooperative-sticky", "range"), ("range",)], "range"),
    ([("mine", "range"), ("mine", "range")], "range"),
]


@pytest.mark.parametrize(("lists", "chosen"), NEGOTIATIONS)
def test_the_group_takes_what_all_support_and_most_like_best(lists, chosen):
    members = [replace(group_of("a")[0].members["a"], details=details(*names)) for names in lists]
    assert choose_assignor(members) == chosen


@pytest.mark.parametrize("names", [("cooperative-sticky",), ("mine",), ()])
def test_who_has_no_assignor_in_common_is_not_let_in(names):
    group, _ = group_of("a", assignors=("range", "roundrobin"))
    nameless = MemberDetails("client", 1, ("t",), frozenset("t"), names)
    with pytest.raises(InconsistentGroupProtocol):
        join(group, report("b"), nameless, COUNTS, members_expired=False)


def test_an_only_member_may_change_its_assignors():
    group, step = group_of("a")
    said = report("a", step + 1, 1, ALL)
    reply = join(group, said, details("cooperative-sticky"), COUNTS, members_expired=False)
    assert (reply.answer.assignor, told(reply.answer)) == ("cooperative-sticky", (OWN, ALL, frozenset()))


def test_one_member_that_knows_no_cooperation_makes_the_others_give_back_everything():
    group, step = group_of("a", assignors=("cooperative-sticky", "range"))
    reply = join(group, report("b"), details("range"), COUNTS, members_expired=False)
    group, answer = beat(reply.group, "a", step + 1, 1, ALL)
    assert (answer.is_cooperative, told(answer)) == (False, (REVOKE, frozenset(), ALL))


# --- the table of states ---------------------------------------------------------------------------------------------


def test_the_table_has_every_state_that_can_be_left():
    assert {before for before, _ in NEXT_STATES} == set(GroupState)
    reached = {after for afters in NEXT_STATES.values() for after in afters}
    assert reached == set(GroupState) - {GroupState.DEAD}


@pytest.mark.parametrize("before", GroupState)
@pytest.mark.parametrize("move", GroupMove)
@pytest.mark.parametrize("after", GroupState)
def test_a_move_that_the_table_does_not_have_is_refused(before, move, after):
    if after in NEXT_STATES.get((before, move), ()):
        check_move(before, move, after)
    else:
        with pytest.raises(IllegalGroupMove, match=f"{before.value} -> {after.value}"):
            check_move(before, move, after)
