"""This file is the group coordinator over rows: joining, heartbeats, leaving, expiry; each locks the group's row first.

The protocol, for whoever writes a member.  A member has a member id of its own choice (a fresh one for each life), the
set `owned` (partitions that it works on or has yet to revoke), the generation it was told last, and a `step` that it
counts up with every request but `renew`.  It has ONE request under way at a time, and acts on an answer only if
`answer.step` is the step that it sent last; if a request failed, whatever it may have done, the next says what is true.

1. `subscribe()`: `join` with NO_GENERATION and nothing owned.  A changed subscription, or patterns that match other
   topics now: `join` again, with generation and owned.  Repeating a `join` or `heartbeat` is harmless.
2. At every answer, on the application's thread, within poll(): take over `answer.membership` (its generation), then
   - REVOKE: on_revoke(answer.revoke); offsets may still be committed in there, with the new generation.  Then remove
     them from `owned` and send `heartbeat` at once: only that lets anybody else have them.  Eager (`is_cooperative`
     False): it is all that the member owns.
   - OWN, WAIT: what is new in `answer.partitions` goes into `owned` first, then on_assign(new ones).  Cooperative: also
     under WAIT (some are free already), and once in each generation even if there are none; eager: at OWN, all at once,
     even none.  Not `is_settled`: send `heartbeat` at once if anything changed, else after 50 to 100 ms.
   An answer that has not been acted on is replaced by the next one.
3. While settled: `has_news` every heartbeat.interval.ms, from the background, and `renew` in its place often enough
   within session.timeout.ms.  There is news: send `heartbeat`.
   Not settled, or poll() is late: `heartbeat` from the background keeps the place; its answer waits for poll().
   When a database wake-up comes, now and then: `has_news`; True: `heartbeat`.  The directory shows other partition
   counts: `heartbeat`.  Write `join`, `leave`, and `heartbeat` after a revoke with `wakes_readers=True`, and idle
   members hear at once.
4. From `join` and `heartbeat`: UnknownMember, IllegalGeneration: the place is lost: on_lost(owned) (on_revoke if there
   is none), owned := nothing, a new member id, `join` anew.  FencedInstance: the same lasting name lives elsewhere:
   on_lost, and a fatal error.  InconsistentGroupProtocol: an error for the application; the configuration is wrong.
   The same errors from a commit: send `heartbeat`, which says how things stand.
5. The local deadline: session.timeout.ms after the last request that succeeded was *sent* (monotonic clock).  Past it
   deliver nothing: send `heartbeat` first; if it is answered the place was kept, else on_lost.
6. `close()`, max.poll.interval.ms: on_revoke (on_lost), then `leave`; a static member (group.instance.id) does not
   leave when it closes: its next life joins under the same name and has its partitions back at once.

Commits: a member may commit what it owns, in any generation from the one that it has confirmed (with a heartbeat, or
by joining with nothing) to the group's: that others rebalance disturbs nobody who loses nothing.  An older generation,
or a partition not owned: ILLEGAL_GENERATION; removed: UNKNOWN_MEMBER_ID; replaced: FENCED_INSTANCE_ID; in a transaction
all three are abortable.  One that `commits_unowned` may, in the group's own generation, commit what others own, too.
`groups/member_commits.py` is that check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, bindparam, exists, select, update

from txnstore.db.schema import group_members, groups
from txnstore.db.server_time import server_now_ms
from txnstore.errors import InvalidRequest
from txnstore.groups import group_rows, rebalance_rules
from txnstore.groups.commit_rules import check_group_id, is_storable_text
from txnstore.groups.group_image import Answer, GroupMember, MemberDetails, Report
from txnstore.groups.group_states import GroupState
from txnstore.model import GroupMembership

#: Kafka's group.max.session.timeout.ms is 30 minutes; librdkafka's own limit is an hour.
SESSION_TIMEOUT_MS_MAX: Final = 3_600_000

_others: Final = group_members.alias("others")
_NOBODY_ELSE_EXPIRED: Final = ~exists().where(
    _others.c.group_id == bindparam("of_group_id"),
    _others.c.member_id != bindparam("of_member_id"),
    _others.c.deadline_ms <= server_now_ms(),
)
# Without the group's lock, in one statement: a heartbeat of a group in which nothing happens waits for nobody.
_RENEW: Final = (
    update(group_members)
    .where(
        group_members.c.group_id == bindparam("of_group_id"),
        group_members.c.member_id == bindparam("of_member_id"),
        group_members.c.generation == bindparam("of_generation"),
        exists().where(
            groups.c.group_id == bindparam("of_group_id"), groups.c.generation == bindparam("of_generation")
        ),
        _NOBODY_ELSE_EXPIRED,
    )
    .values(deadline_ms=server_now_ms() + group_members.c.session_timeout_ms)
)
_IS_CURRENT: Final = (
    select(groups.c.generation)
    .join(group_members, group_members.c.group_id == groups.c.group_id)
    .where(
        groups.c.group_id == bindparam("of_group_id"),
        groups.c.generation == bindparam("of_generation"),
        group_members.c.member_id == bindparam("of_member_id"),
        _NOBODY_ELSE_EXPIRED,
    )
)


@dataclass(frozen=True, slots=True)
class MemberDescription:
    """A member, for people."""

    member: GroupMember
    deadline_ms: int
    is_expired: bool
    """Whether it has been silent for longer than its session timeout, and nobody has removed it yet."""


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group, for people."""

    group_id: str
    state: GroupState
    generation: int
    assignor: str | None
    members: tuple[MemberDescription, ...]


def join(connection: Connection, report: Report, details: MemberDetails) -> Answer:
    """Enter the group, or change the subscription as a member; the answer says what to do first.

    The group rebalances if that changes who is to have what, if members have expired, and if a topic has grown.

    Raises:
        InvalidGroupId, InvalidRequest: an argument is not of the documented form.
        InconsistentGroupProtocol: the member supports none of the assignors that the others have in common.
        UnknownMember, FencedInstance, IllegalGeneration: it takes itself for a member and is none any more.
    """
    _check(report)
    _check_details(details)
    group_id, member_id = report.membership.group_id, report.membership.member_id
    if not group_rows.lock_group(connection, group_id):
        group_rows.ensure_group(connection, group_id)
        group_rows.lock_group(connection, group_id)
    expired = group_rows.remove_expired(connection, group_id, member_id)
    group = group_rows.read_group(connection, group_id)
    catalogue = group_rows.read_catalogue(connection, group.members.values() if group else (), details.topics)
    reply = rebalance_rules.join(group, report, details, catalogue.counts, has_lost=bool(expired))
    group_rows.save_group(connection, group, reply.group, catalogue, speaker=member_id)
    return reply.answer


def renew(connection: Connection, membership: GroupMembership) -> bool:
    """Move the deadline of a settled member on; False, and nothing was done: there is news, send a heartbeat."""
    return connection.execute(_RENEW, _of(membership)).rowcount > 0


def has_news(connection: Connection, membership: GroupMembership) -> bool:
    """Return whether the group has rebalanced or removed the member since it was told its generation, or has to.

    It has to if another member was silent for longer than its session timeout.
    """
    return connection.execute(_IS_CURRENT, _of(membership)).one_or_none() is None


def heartbeat(connection: Connection, report: Report) -> Answer:
    """Say what the member owns, move its deadline on, and be told what it may have now.

    Members that have expired are removed first, but not the one that is speaking: it is late, and nobody took over.

    Raises:
        InvalidGroupId, InvalidRequest: an argument is not of the documented form.
        UnknownMember, FencedInstance, IllegalGeneration: it is not a member any more.
    """
    _check(report)
    group_id, member_id = report.membership.group_id, report.membership.member_id
    group_rows.lock_group(connection, group_id)
    expired = group_rows.remove_expired(connection, group_id, member_id)
    group = group_rows.read_group(connection, group_id)
    catalogue = group_rows.read_catalogue(connection, group.members.values() if group else ())
    reply = rebalance_rules.heartbeat(group, report, catalogue.counts, has_lost=bool(expired))
    group_rows.save_group(connection, group, reply.group, catalogue, speaker=member_id)
    return reply.answer


def leave(connection: Connection, membership: GroupMembership) -> bool:
    """Remove the member, whose partitions are free from here on; False if it was none any more."""
    check_group_id(membership.group_id)
    group_rows.lock_group(connection, membership.group_id)
    group = group_rows.read_group(connection, membership.group_id)
    if group is None or membership.member_id not in group.members:
        return False
    _remove(connection, membership.group_id, [membership.member_id])
    return True


def expire_members(connection: Connection, group_id: str) -> list[str]:
    """Remove the members that were silent for longer than their session timeout; return their ids.

    Every heartbeat does that for its own group; this is for groups whose members are all silent.
    """
    check_group_id(group_id)
    group_rows.lock_group(connection, group_id)
    expired = group_rows.remove_expired(connection, group_id)
    if expired:
        _remove(connection, group_id, expired)
    return expired


def describe(connection: Connection, group_id: str) -> GroupDescription:
    """Return the group as it is; one that there is not is Dead."""
    check_group_id(group_id)
    group = group_rows.read_group(connection, group_id)
    state = rebalance_rules.state_of(group)
    if group is None:
        return GroupDescription(group_id, state, 0, None, ())
    leases = group_rows.read_leases(connection, group_id)
    members = tuple(
        MemberDescription(member, leases[name].deadline_ms, leases[name].is_expired)
        for name, member in group.members.items()
        if name in leases
    )
    return GroupDescription(group_id, state, group.generation, group.assignor, members)


def _remove(connection: Connection, group_id: str, member_ids: list[str]) -> None:
    group = group_rows.read_group(connection, group_id)
    if group is not None:
        catalogue = group_rows.read_catalogue(connection, group.members.values())
        after = rebalance_rules.remove(group, member_ids, catalogue.counts)
        group_rows.save_group(connection, group, after, catalogue)


def _of(membership: GroupMembership) -> dict[str, object]:
    return {
        "of_group_id": membership.group_id,
        "of_member_id": membership.member_id,
        "of_generation": membership.generation,
    }


def _check(report: Report) -> None:
    who = report.membership
    check_group_id(who.group_id)
    if not isinstance(who.member_id, str) or not who.member_id or not is_storable_text(who.member_id):
        raise InvalidRequest("a member's id is text, not empty, without NUL and half surrogate pairs")
    name = who.group_instance_id
    if name is not None and (not isinstance(name, str) or not name or not is_storable_text(name)):
        raise InvalidRequest("a group.instance.id is text, not empty, without NUL and half surrogate pairs")


def _check_details(details: MemberDetails) -> None:
    timeout_ms = details.session_timeout_ms
    if type(timeout_ms) is not int or not 1 <= timeout_ms <= SESSION_TIMEOUT_MS_MAX:
        raise InvalidRequest(f"session.timeout.ms is a number from 1 to {SESSION_TIMEOUT_MS_MAX}, not {timeout_ms!r}")
    if not all(map(is_storable_text, (details.client_id, *details.subscription, *details.topics))):
        raise InvalidRequest("a client.id or a topic holds a NUL or half of a surrogate pair, which no database stores")
