"""This file is which commits of a member count while its group rebalances, pure: its generations, what it owns."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from txnstore.errors import IllegalGeneration
from txnstore.groups.commit_rules import GroupView, Member, check_commit
from txnstore.model import GroupMembership


@dataclass(frozen=True, slots=True)
class CommittingMember:
    """A row of the group's members, as a commit needs it."""

    member_id: str
    group_instance_id: str | None
    generation: int
    """The one that the member has confirmed."""

    subscription: str | None
    """The row's JSON, which tells what the member owns; only of the member that commits."""


def check_member_commit(
    generation: int,
    members: Sequence[CommittingMember],
    committer: GroupMembership,
    partition_ids: Collection[int],
    *,
    is_transactional: bool,
) -> None:
    """Return if `committer` may commit offsets of these partitions of a group that is in `generation`.

    A member may be behind the group: it commits in any generation from the one it has confirmed, for nobody else gets
    what it owns before it has given it back.

    Raises:
        IllegalGeneration: the generation is none of these, or the member does not own one of the partitions, which
            one that `commits_unowned` need not in the group's generation.
        UnknownMember, FencedInstance: see `commit_rules.check_commit`.
    """
    own = next((member for member in members if member.member_id == committer.member_id), None)
    view = GroupView(generation, [Member(member.member_id, member.group_instance_id) for member in members])
    if own is not None and max(own.generation, 0) <= committer.generation <= generation:
        view = replace(view, generation=committer.generation)
    check_commit(view, committer, is_transactional=is_transactional)
    if own is None or own.subscription is None:
        return
    owned = frozenset(json.loads(own.subscription)["owned_ids"])
    if owned.issuperset(partition_ids):
        return
    if committer.commits_unowned:
        # Kafka's own rule, which knows no owners: only in the generation that the group is in, for another member may
        # have got the partition with it (GroupCoordinator, validateOffsetCommit).
        check_commit(replace(view, generation=generation), committer, is_transactional=is_transactional)
    else:
        raise IllegalGeneration(
            f"the member does not own {len(set(partition_ids) - owned)} of the {len(partition_ids)} partitions that it"
            " commits offsets of: the group has given them to others, or nobody has given them to it"
        )
