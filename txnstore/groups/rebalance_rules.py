"""The rules of rebalancing, pure: what joining, reporting and leaving do to a group, and who gets what when.

Each generation of a group is a target: an assignment of all its partitions to its members.  The members reach it one
by one: a member that owns more than its assignment is told to give it back, and what is free goes to the member that it
is assigned to.  `MemberState.owned` only grows by partitions that no other member owns, and only shrinks when its
member reports that or is removed; so no partition ever has two owners.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

from txnstore.errors import FencedInstance, IllegalGeneration, InconsistentGroupProtocol, UnknownMember
from txnstore.groups.assignors import ASSIGNORS, Subscriber, in_order, subscribed_partitions
from txnstore.groups.group import (
    NO_PARTITIONS,
    AnswerStatus,
    Group,
    GroupMove,
    GroupState,
    MemberAnswer,
    MemberDetails,
    MemberState,
    Partitions,
    Report,
    check_move,
)
from txnstore.model import NO_GENERATION, PartitionName

#: How many characters of a group id, for example, an error's text repeats.
_SHOWN: Final = 80


class HasPartitions(Protocol):
    """A member, as far as the state of its group depends on it."""

    @property
    def generation(self) -> int:
        """The generation that it has confirmed."""

    @property
    def assignment(self) -> Partitions:
        """What it is to own."""

    @property
    def owned(self) -> Partitions:
        """What it owns."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The group after a request, and what the member is told."""

    group: Group
    answer: MemberAnswer


# --- the requests ----------------------------------------------------------------------------------------------------


def join(
    group: Group | None,
    report: Report,
    details: MemberDetails,
    partition_counts: Mapping[str, int],
    *,
    members_expired: bool,
) -> Reply:
    """Let a consumer into the group, or let a member change its subscription.

    `members_expired`: others have just been removed because they were silent.

    Raises:
        InconsistentGroupProtocol: it supports none of the assignors that the others have in common.
        UnknownMember, FencedInstance, IllegalGeneration: it reports as a member and is no longer one.
    """
    before = state_of(group)
    present = group or Group(report.membership.group_id)
    former = _former_self(present, report)
    others = [member for member in present.members.values() if member is not former]
    check_assignors(details.assignors, others)
    if former is not None and former.member_id == report.membership.member_id:
        member = replace(former, details=details)
    else:
        member = MemberState(
            report.membership.member_id,
            report.membership.group_instance_id,
            details,
            assignment=former.assignment if former else NO_PARTITIONS,
        )
    entered = _with(present, others, member)
    is_same = former is not None and _wants(former) == _wants(member)
    if members_expired or not is_same or not is_assigned(entered, partition_counts):
        entered = _rebalance(before, entered, partition_counts)
    elif member.member_id != getattr(former, "member_id", None):
        check_move(before, GroupMove.TAKE_OVER, state_of(entered))
    return _reply(entered, report)


def heartbeat(
    group: Group | None, report: Report, partition_counts: Mapping[str, int], *, members_expired: bool = False
) -> Reply:
    """Take a member's report and answer what it may own now; `members_expired` as for `join`.

    Raises:
        UnknownMember, FencedInstance, IllegalGeneration: it is no longer a member, or a newer request of it came
            first.
    """
    if group is None:
        raise UnknownMember(f"there is no group {report.membership.group_id[:_SHOWN]!r}")
    check_member(group, report)
    if members_expired or not is_assigned(group, partition_counts):
        group = _rebalance(state_of(group), group, partition_counts)
    return _reply(group, report)


def leave(group: Group, member_id: str) -> Group:
    """Remove a member; those left assign its partitions again with the next request; until then they are nobody's.

    Where all leave at once, nothing is assigned that nobody would hear of.
    """
    remaining = {name: member for name, member in group.members.items() if name != member_id}
    left = replace(group, generation=group.generation + 1, assignor=None, members=remaining)
    check_move(state_of(group), GroupMove.LEAVE, state_of(left))
    return left


def remove(group: Group, member_ids: Collection[str], partition_counts: Mapping[str, int]) -> Group:
    """Remove members, and assign what they had to the others."""
    remaining = {name: member for name, member in group.members.items() if name not in member_ids}
    return _rebalance(state_of(group), replace(group, members=remaining), partition_counts)


# --- who may ask -----------------------------------------------------------------------------------------------------


def check_member(group: Group, report: Report) -> MemberState:
    """Return the member that reports.

    Raises:
        FencedInstance: another member has its group.instance.id now (KIP-345).
        UnknownMember: the group does not have the member: it left, or was silent for longer than its session timeout.
        IllegalGeneration: the group was never in that generation, or a later request of the member came first.
    """
    who = report.membership
    if who.group_instance_id is not None:
        static = group.static_member(who.group_instance_id)
        if static is not None and static.member_id != who.member_id:
            raise FencedInstance
    member = group.members.get(who.member_id)
    if member is None or member.group_instance_id != who.group_instance_id:
        raise UnknownMember(f"group {who.group_id[:_SHOWN]!r} does not know the member {who.member_id[:_SHOWN]!r}")
    if report.step < member.step:
        raise IllegalGeneration(f"request {report.step} came after request {member.step} of the same member")
    if who.generation > group.generation:
        raise IllegalGeneration(
            f"group {who.group_id[:_SHOWN]!r} is in generation {group.generation}, so the member cannot be in"
            f" {who.generation}"
        )
    return member


def check_assignors(names: Collection[str], others: Iterable[MemberState]) -> None:
    """Return if a member with these assignors can be in a group with the others.

    Raises:
        InconsistentGroupProtocol: no assignor is supported by all of them.
    """
    common = ASSIGNORS.keys() & set(names)
    for other in others:
        common = common & set(other.details.assignors)
    if not common:
        raise InconsistentGroupProtocol(
            f"partition.assignment.strategy {','.join(names)[:_SHOWN]!r} has no assignor that all members of the group"
            f" support; there are {', '.join(ASSIGNORS)}"
        )


def _former_self(group: Group, report: Report) -> MemberState | None:
    """Return the member whose place the joining consumer takes: itself, or its predecessor as a static member."""
    who = report.membership
    if report.joins_anew:
        static = None if who.group_instance_id is None else group.static_member(who.group_instance_id)
        if static is not None and static.member_id != who.member_id:
            return static
        if who.member_id not in group.members:
            return None
    return check_member(group, report)


# --- rebalancing -----------------------------------------------------------------------------------------------------


def _rebalance(before: GroupState, group: Group, partition_counts: Mapping[str, int]) -> Group:
    """Return the group, which was in the state `before`, its partitions reassigned, in a generation of its own.

    The one in which a member has left is taken if nobody has settled in it: who has, as clients of the version before
    may, would not ask again.
    """
    is_unused = before is GroupState.PREPARING_REBALANCE and group.assignor is None
    is_unused = is_unused and all(member.generation != group.generation for member in group.members.values())
    rebalanced = _assigned_anew(group, group.generation + (not is_unused), partition_counts)
    check_move(before, GroupMove.REBALANCE, state_of(rebalanced))
    return rebalanced


def _assigned_anew(group: Group, generation: int, partition_counts: Mapping[str, int]) -> Group:
    members = [group.members[member.member_id] for member in in_order(_subscribers(group))]
    if not members:
        return replace(group, generation=generation, assignor=None)
    assignor = choose_assignor(members)
    assigned = ASSIGNORS[assignor].assign(_subscribers(group), partition_counts)
    return replace(
        group,
        generation=generation,
        assignor=assignor,
        members={member.member_id: replace(member, assignment=assigned[member.member_id]) for member in members},
    )


def choose_assignor(members: Collection[MemberState]) -> str:
    """Return the assignor that most members prefer among those that all support; the first member breaks ties."""
    common = ASSIGNORS.keys() & frozenset.intersection(*(frozenset(member.details.assignors) for member in members))
    choices = [next(name for name in member.details.assignors if name in common) for member in members]
    votes = Counter(choices)
    return max(votes, key=lambda name: votes[name])


def is_assigned(group: Group, partition_counts: Mapping[str, int]) -> bool:
    """Return whether nobody has left since, and exactly the existing partitions are assigned.

    They are not once a topic has grown, is new, or is gone.
    """
    if group.assignor is None:
        return False
    assigned = frozenset[PartitionName]().union(*(member.assignment for member in group.members.values()))
    return assigned == frozenset(subscribed_partitions(_subscribers(group), partition_counts))


def state_of(group: Group | None) -> GroupState:
    """Return the state of the group; None is a group that does not exist."""
    if group is None:
        return GroupState.DEAD
    return state_among(group.members.values(), group.generation, group.assignor)


def state_among(members: Collection[HasPartitions], generation: int, assignor: str | None) -> GroupState:
    """Return the state of a group that exists and has these members."""
    if not members:
        return GroupState.EMPTY
    if assignor is None:
        return GroupState.PREPARING_REBALANCE
    if _is_cooperative(assignor):
        must_give_back = any(not member.owned <= member.assignment for member in members)
    else:
        must_give_back = any(member.generation != generation and member.owned for member in members)
    if must_give_back:
        return GroupState.PREPARING_REBALANCE
    if any(member.generation != generation or member.owned != member.assignment for member in members):
        return GroupState.COMPLETING_REBALANCE
    return GroupState.STABLE


def _is_cooperative(assignor: str | None) -> bool:
    return assignor is not None and ASSIGNORS[assignor].is_cooperative


def _wants(member: MemberState) -> tuple[frozenset[str], tuple[str, ...]]:
    return member.details.topics, member.details.assignors


def _with(group: Group, others: Iterable[MemberState], member: MemberState) -> Group:
    return replace(group, members={each.member_id: each for each in (*others, member)})


def _subscribers(group: Group) -> list[Subscriber]:
    members = group.members.values()
    owned_by_all = frozenset[PartitionName]().union(*(member.owned for member in members))
    return [
        Subscriber(
            member.member_id,
            member.details.topics,
            member.group_instance_id,
            # What it owns, and what is on its way to it: no member has to give that back again.
            member.owned | (member.assignment - owned_by_all),
        )
        for member in members
    ]


# --- answering a report ----------------------------------------------------------------------------------------------


def _reply(group: Group, report: Report) -> Reply:
    before = state_of(group)
    member = group.members[report.membership.member_id]
    others = [other for other in group.members.values() if other is not member]
    owned_by_others = frozenset[PartitionName]().union(*(other.owned for other in others))
    decide = _answer_cooperative if _is_cooperative(group.assignor) else _answer_eager
    status, partitions, revoke = decide(group, member, report, owned_by_others)
    # A member that owns nothing begins afresh in this generation; others confirm it with their next report.
    confirmed = group.generation if not report.owned else max(member.generation, report.membership.generation)
    granted = partitions - report.owned if confirmed < group.generation else NO_PARTITIONS
    reported = replace(
        member,
        generation=confirmed,
        step=report.step,
        # It still owns what it has to give back, but nothing that it claims without ever having been given it.
        owned=partitions | (revoke & member.owned),
        granted=granted,
        granted_in=group.generation if granted else NO_GENERATION,
    )
    after = _with(group, others, reported)
    check_move(before, GroupMove.REPORT, state_of(after))
    answer = MemberAnswer(
        status=status,
        membership=replace(report.membership, generation=group.generation),
        step=report.step,
        partitions=tuple(sorted(partitions)),
        revoke=tuple(sorted(revoke)),
        assignor=group.assignor or "",
        is_cooperative=_is_cooperative(group.assignor),
        is_settled=status is AnswerStatus.OWN and confirmed == group.generation,
    )
    return Reply(after, answer)


_Decision = tuple[AnswerStatus, Partitions, Partitions]


def _answer_cooperative(group: Group, member: MemberState, report: Report, owned_by_others: Partitions) -> _Decision:
    """Let it keep what stays its own; take the rest back first, then give it what is free."""
    kept = report.owned & member.owned & member.assignment
    revoke = report.owned - kept
    if revoke:
        return AnswerStatus.REVOKE, kept, revoke
    partitions = kept | (member.assignment - owned_by_others)
    status = AnswerStatus.OWN if partitions == member.assignment else AnswerStatus.WAIT
    return status, partitions, NO_PARTITIONS


def _answer_eager(group: Group, member: MemberState, report: Report, owned_by_others: Partitions) -> _Decision:
    """Take everything back after each rebalance; then give it its assignment at once, when all of it is free."""
    if not report.owned:
        if member.assignment & owned_by_others:
            return AnswerStatus.WAIT, NO_PARTITIONS, NO_PARTITIONS
        return AnswerStatus.OWN, member.assignment, NO_PARTITIONS
    is_current = report.membership.generation == group.generation
    if is_current and report.owned == member.assignment and report.owned <= member.owned:
        return AnswerStatus.OWN, member.assignment, NO_PARTITIONS
    return AnswerStatus.REVOKE, NO_PARTITIONS, report.owned
