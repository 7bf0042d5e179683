"""The group coordinator over rows: joining, heartbeats, leaving and expiry; each locks the group's row first.

The protocol, for those who write a member.  A member has a member id of its own choice (a new one each time it has lost
its place), the set `owned` (partitions that it works on or has yet to revoke), the generation it was told last, and a
`step` that it increases with every request but `renew`.  It has ONE request under way at a time, and acts on an answer
only if `answer.step` is the step that it sent last; whatever a failed request may have done, the next reports again.

1. `subscribe()`: `join` with NO_GENERATION and nothing owned.  A changed subscription, or patterns that match other
   topics now: `join` again, with generation and owned.  Repeating a `join` or `heartbeat` is harmless.
2. At every answer, on the application's thread, within poll(): adopt `answer.membership` (its generation), then
   - REVOKE: on_revoke(answer.revoke); offsets may still be committed in it, with the new generation.  Then remove
     them from `owned` and send `heartbeat` at once: only then can another member get them.  Eager (`is_cooperative`
     False): they are all that the member owns.
   - OWN, WAIT: what is new in `answer.partitions` goes into `owned` first, then on_assign(new ones).  Cooperative: also
     at WAIT (some are free already), and once in each generation even if nothing is new; eager: at OWN, all at once,
     even if it is nothing.  Not `is_settled`: send `heartbeat` at once if anything changed, else after 50 to 100 ms.
   An answer that has not been acted on is replaced by the next one.
3. While settled: `has_news` every heartbeat.interval.ms, from the background, and `renew` instead often enough
   within session.timeout.ms.  There is news: send `heartbeat`.
   Not settled, or poll() is late: `heartbeat` from the background keeps the place; its answer waits for poll().
   At wake-ups from the database, now and then: `has_news`; True: `heartbeat`.  Topics have other partition counts:
   `heartbeat`.  Write `join`, `leave`, and `heartbeat` after a revoke with `wakes_readers=True`, and idle
   members hear at once.
4. From `join` and `heartbeat`: UnknownMember, IllegalGeneration: the place is lost: on_lost(owned) (on_revoke if there
   is no on_lost), owned := nothing, a new member id, `join` anew.  FencedInstance: another consumer has the
   group.instance.id now: on_lost, and a fatal error.  InconsistentGroupProtocol: an error for the application; the
   configuration is wrong.  The same errors from a commit: send `heartbeat`, which tells how things stand.
5. The local deadline: session.timeout.ms after the last request that succeeded was *sent* (monotonic clock).  Past it
   deliver nothing: send `heartbeat` first; if it succeeds the place was kept, else on_lost.
6. `close()`, max.poll.interval.ms: on_revoke (on_lost), then `leave`; a static member (group.instance.id) does not
   leave when it closes: its successor joins under the same name and has its partitions back at once.

Commits: a member may commit what it owns, in any generation from the one that it has confirmed (with a heartbeat, or
by joining with nothing) to the group's: a rebalance disturbs no member that loses nothing.  An older generation,
a partition not owned, or one that it got in a later generation: ILLEGAL_GENERATION; removed: UNKNOWN_MEMBER_ID;
replaced: FENCED_INSTANCE_ID; in a transaction all three are abortable.  A member that `commits_unowned` may, in the
group's own generation, commit what others own, too.  `commit_rules.check_member_commit` is that check.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from sqlalchemy import Connection, bindparam, exists, or_, select, update

from txnstore.db.backend import Subjects
from txnstore.db.schema import group_members, groups
from txnstore.db.statements import HotStatement
from txnstore.db.store import Store, note_change, server_now_ms
from txnstore.errors import InvalidRequest
from txnstore.groups import rebalance_rules, rows
from txnstore.groups.commit_rules import check_group_id
from txnstore.groups.group import MemberAnswer, MemberDetails, Report
from txnstore.model import GroupMembership, is_storable_text

#: Kafka's group.max.session.timeout.ms is 30 minutes; librdkafka's own limit is an hour.
SESSION_TIMEOUT_MS_MAX: Final = 3_600_000

_others: Final = group_members.alias("others")
_NOBODY_ELSE_EXPIRED: Final = ~exists().where(
    _others.c.group_id == bindparam("of_group_id"),
    _others.c.member_id != bindparam("of_member_id"),
    # Whoever finds one of these sets its deadline anew with the next heartbeat, so that it expires in time.
    or_(_others.c.deadline_ms <= server_now_ms(), rows.is_from_before_set_back(_others)),
)
# Without the group's lock, in one statement: a heartbeat in a group in which nothing happens waits for nobody.
_RENEW: Final = HotStatement(
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
_IS_CURRENT: Final = HotStatement(
    select(groups.c.generation)
    .join(group_members, group_members.c.group_id == groups.c.group_id)
    .where(
        groups.c.group_id == bindparam("of_group_id"),
        groups.c.generation == bindparam("of_generation"),
        group_members.c.member_id == bindparam("of_member_id"),
        _NOBODY_ELSE_EXPIRED,
    )
)


def join(connection: Connection, report: Report, details: MemberDetails) -> MemberAnswer:
    """Enter the group, or change the subscription as a member; the answer says what to do first.

    The group rebalances if that changes the assignment, if members have expired, and if a topic has grown.

    Raises:
        InvalidGroupId, InvalidRequest: an argument is not of the documented form.
        InconsistentGroupProtocol: the member supports none of the assignors that the others have in common.
        UnknownMember, FencedInstance, IllegalGeneration: it reports as a member and is no longer one.
    """
    _check(report)
    _check_details(details)
    group_id, member_id = report.membership.group_id, report.membership.member_id
    if not rows.lock_group(connection, group_id):
        rows.ensure_group(connection, group_id)
        rows.lock_group(connection, group_id)
    expired = rows.remove_expired(connection, group_id, member_id)
    group = rows.read_group(connection, group_id)
    known = rows.read_known_partitions(connection, group.members.values() if group else (), details.topics)
    reply = rebalance_rules.join(group, report, details, known.counts, members_expired=bool(expired))
    rows.save_group(connection, group, reply.group, known, speaker=member_id)
    return reply.answer


def renew(connection: Connection, membership: GroupMembership) -> bool:
    """Extend the deadline of a settled member; False if nothing was done because there is news: send a heartbeat."""
    return _RENEW.run(connection, _of(membership)) > 0


def has_news(connection: Connection, membership: GroupMembership) -> bool:
    """Return whether the group has rebalanced or removed the member since it was told its generation, or has to.

    It has to rebalance if another member was silent for longer than its session timeout.  There is news as well if the
    clock was set back since another one was heard of.
    """
    return not _IS_CURRENT.rows(connection, _of(membership))


def heartbeat(connection: Connection, report: Report) -> MemberAnswer:
    """Report what the member owns, extend its deadline, and be told what it may have now.

    Members that have expired are removed first, but not the one that is speaking: it is late, and was not replaced.

    Raises:
        InvalidGroupId, InvalidRequest: an argument is not of the documented form.
        UnknownMember, FencedInstance, IllegalGeneration: it is no longer a member.
    """
    _check(report)
    group_id, member_id = report.membership.group_id, report.membership.member_id
    rows.lock_group(connection, group_id)
    expired = rows.remove_expired(connection, group_id, member_id)
    group = rows.read_group(connection, group_id)
    known = rows.read_known_partitions(connection, group.members.values() if group else ())
    reply = rebalance_rules.heartbeat(group, report, known.counts, members_expired=bool(expired))
    rows.save_group(connection, group, reply.group, known, speaker=member_id)
    return reply.answer


def leave(store: Store, membership: GroupMembership, *, retry_timeout_ms: int | None = None) -> bool:
    """Remove the member, whose partitions are free from now on; False if it was no longer a member.

    It assigns nothing, which those left do with the next request: of many that leave at once none waits long.
    """
    check_group_id(membership.group_id)
    group_id = membership.group_id
    hits = store.write_at_once(
        rows.removal(group_id, membership.member_id),
        Subjects(group_ids=frozenset([group_id])),
        retry_timeout_ms=retry_timeout_ms,
    )
    return hits[-1] > 0


def make_ready_to_leave(store: Store) -> None:
    """Render what `leave` runs, which is done once in a process: not while many of a group leave at once."""
    for statement, parameters in rows.removal("", ""):
        statement.rendered(store.engine.dialect, parameters)


def expire_members(connection: Connection, group_id: str) -> list[str]:
    """Remove the members that were silent for longer than their session timeout; return their ids.

    Every heartbeat does this for its own group; this function is for groups whose members are all silent.
    """
    check_group_id(group_id)
    rows.lock_group(connection, group_id)
    expired = rows.remove_expired(connection, group_id)
    if expired:
        _remove(connection, group_id, expired)
    return expired


def remove_silent_members(connection: Connection, group_id: str, member_ids: Collection[str]) -> int:
    """Remove those of these members that are silent for longer than their session timeout; return how many.

    It assigns nothing, which those left do with the next request: so it takes no longer in a group of many members.
    """
    # Without a change there is nothing to tell.
    note_change(connection)
    rows.lock_group(connection, group_id)
    return rows.remove_silent(connection, group_id, member_ids)


def _remove(connection: Connection, group_id: str, member_ids: list[str]) -> None:
    group = rows.read_group(connection, group_id)
    if group is not None:
        known = rows.read_known_partitions(connection, group.members.values())
        after = rebalance_rules.remove(group, member_ids, known.counts)
        rows.save_group(connection, group, after, known)


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
        raise InvalidRequest("a member's id has to be text, not empty, without NUL or half of a surrogate pair")
    name = who.group_instance_id
    if name is not None and (not isinstance(name, str) or not name or not is_storable_text(name)):
        raise InvalidRequest("a group.instance.id has to be text, not empty, without NUL or half of a surrogate pair")


def _check_details(details: MemberDetails) -> None:
    timeout_ms = details.session_timeout_ms
    if type(timeout_ms) is not int or not 1 <= timeout_ms <= SESSION_TIMEOUT_MS_MAX:
        raise InvalidRequest(f"session.timeout.ms has to be from 1 to {SESSION_TIMEOUT_MS_MAX}, not {timeout_ms!r}")
    if not all(map(is_storable_text, (details.client_id, *details.subscription, *details.topics))):
        raise InvalidRequest("a client.id or a topic holds a NUL or half of a surrogate pair, which no database stores")
