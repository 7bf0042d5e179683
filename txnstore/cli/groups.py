"""The commands about consumer groups: how far they are, and where they go on."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

import typer
from sqlalchemy import Connection

from txnstore.cli.options import FORMS, Json, Schema, Url, complete_group, examples, opened, parse_time
from txnstore.cli.output import (
    Column,
    CommandFailed,
    each_described,
    hint,
    list_text,
    say,
    show_facts,
    show_rows,
    tell_and_exit,
)
from txnstore.clients.brokers import Reads, reads_at_leaders
from txnstore.db.cluster.cluster import Cluster, LeftOut
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.store import Store
from txnstore.errors import GroupIdNotFound, GroupNotEmpty
from txnstore.groups.administration import (
    ListedGroup,
    alter_offsets,
    delete_group,
    find_group,
    list_groups,
    list_offsets,
)
from txnstore.groups.commit_rules import check_group_id
from txnstore.groups.unread import count_unread
from txnstore.log.bounds import Bounds, offset_for_time, read_bounds
from txnstore.log.cluster_topics import bring_up_to_date
from txnstore.log.topics import Topic, find_topics, get_topic
from txnstore.model import IsolationLevel, OffsetAndMetadata, PartitionName


class Order(enum.Enum):
    """The orders of delivery, as txnstore.delivery.order names them."""

    OFFSET = "offset"
    COMMIT = "commit"


def topics_by_name(connection: Connection, names: set[str]) -> dict[str, Topic]:
    """Return those of the topics that exist."""
    return {topic.name: topic for topic in find_topics(connection, sorted(names))}


def group_facts(group: ListedGroup) -> dict[str, Any]:
    """Return a group without its offsets."""
    return {
        "group": group.group_id,
        "state": group.state.value,
        "generation": group.generation,
        "assignor": group.assignor,
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.group_instance_id,
                "client_id": member.client_id,
                "generation": member.generation,
                "expired": member.is_expired,
                "deadline_ms": member.deadline_ms,
                "subscribed": list(member.subscribed),
                "partitions": [str(partition) for partition in sorted(member.owned)],
            }
            for member in group.members
        ],
    }


def offset_rows(cluster: Cluster, store: Store, connection: Connection, group: ListedGroup) -> list[dict[str, Any]]:
    """Return a row for each partition that the group has committed for, or that a member has.

    `connection` is one to `store`, which coordinates the group; partitions are read at their leaders, those of one
    database in one snapshot.
    """
    read = reads_at_leaders(cluster, store, connection)
    committed = list_offsets(connection, group.group_id)
    owners = {partition: member.member_id for member in group.members for partition in member.owned}
    wanted = sorted(committed.offsets.keys() | committed.unstable | owners.keys())
    topics = topics_by_name(connection, {partition.topic for partition in wanted})
    ids = {
        partition: topics[partition.topic].partition_ids[partition.partition]
        for partition in wanted
        if partition.topic in topics and partition.partition < len(topics[partition.topic].partition_ids)
    }
    positions = {partition_id: committed.offsets.get(partition) for partition, partition_id in ids.items()}
    # A topic that the group's database still has may be deleted by now.
    distances = read(list(cluster.leaders_of(positions)), partial(_distances, positions))
    return [
        {
            "topic": partition.topic,
            "partition": partition.partition,
            **_position(positions[partition_id]),
            "pending": partition in committed.unstable,
            "member_id": owners.get(partition),
            **distances.get(partition_id, _DISTANCE_UNKNOWN),
        }
        for partition, partition_id in ids.items()
    ]


def _position(committed: OffsetAndMetadata | None) -> Mapping[str, Any]:
    """Return the names of the columns with where a group stands."""
    if committed is None:
        return {"committed_offset": None, "order": None, "offset_in_transaction": None}
    within = committed.offset_in_transaction
    order = Order.OFFSET if within is None else Order.COMMIT
    return {"committed_offset": committed.offset, "order": order.value, "offset_in_transaction": within}


def _distances(
    positions: Mapping[int, OffsetAndMetadata | None], connection: Connection, partition_ids: list[int]
) -> dict[int, Mapping[str, Any]]:
    """Return how far a group is in these partitions: one call for all of them, so they are of one snapshot."""
    return {
        partition_id: _distance(connection, bounds, positions[partition_id])
        for partition_id, bounds in read_bounds(connection, partition_ids).items()
    }


def _distance(connection: Connection, bounds: Bounds, committed: OffsetAndMetadata | None) -> Mapping[str, Any]:
    lag, open_records = (None, None) if committed is None else count_unread(connection, bounds, committed)
    return {
        "log_start_offset": bounds.log_start_offset,
        "last_stable_offset": bounds.last_stable_offset,
        "high_watermark": bounds.high_watermark,
        "lag": lag,
        "open_records": open_records,
    }


#: That of a partition which is not there.
_DISTANCE_UNKNOWN: Final = dict.fromkeys(
    ("log_start_offset", "last_stable_offset", "high_watermark", "lag", "open_records")
)

app: Final = typer.Typer(name="groups", no_args_is_help=True, help="List, describe, reset and delete consumer groups.")

_COLUMNS: Final = (
    Column("group", "GROUP"),
    Column("state", "STATE"),
    Column("generation", "GENERATION"),
    Column("assignor", "ASSIGNOR"),
    Column("members", "MEMBERS", lambda members: str(len(members))),
)
_FACTS: Final = (*_COLUMNS[:4],)
_MEMBER_COLUMNS: Final = (
    Column("member_id", "MEMBER"),
    Column("group_instance_id", "INSTANCE"),
    Column("client_id", "CLIENT"),
    Column("expired", "EXPIRED"),
    Column("subscribed", "SUBSCRIBED", list_text),
    Column("partitions", "PARTITIONS", list_text),
)
_OFFSET_COLUMNS: Final = (
    Column("topic", "TOPIC"),
    Column("partition", "PARTITION"),
    Column("committed_offset", "COMMITTED"),
    Column("offset_in_transaction", "IN TRANSACTION"),
    Column("last_stable_offset", "LAST STABLE"),
    Column("high_watermark", "HIGH WATERMARK"),
    Column("lag", "LAG"),
    Column("open_records", "OPEN"),
    Column("pending", "PENDING"),
    Column("member_id", "MEMBER"),
)
_RESET_COLUMNS: Final = (
    Column("group", "GROUP"),
    Column("topic", "TOPIC"),
    Column("partition", "PARTITION"),
    Column("committed_offset", "COMMITTED"),
    Column("new_offset", "NEW OFFSET"),
    Column("order", "ORDER"),
)
#: What a row of a reset holds besides.
_NOT_SHOWN: Final = frozenset({"partition_id", "wanted_offset"})


@dataclass(frozen=True, slots=True)
class _Aim:
    """A partition that is to go on elsewhere."""

    partition: PartitionName
    committed: int | None
    order: Order


_Group = Annotated[str, typer.Argument(metavar="GROUP", autocompletion=complete_group, help="The group.")]
#: Where a partition is to go on: from its bounds and what is committed now; None: it is left as it is.
_Target = Callable[[Connection, Bounds, "int | None", Order], "int | None"]
#: How far readers see: in commit order nothing open holds them back.
_ISOLATION_OF: Final = {Order.OFFSET: IsolationLevel.READ_COMMITTED, Order.COMMIT: IsolationLevel.READ_UNCOMMITTED}


@app.command(name="list", epilog=examples("txnstore groups list", "txnstore groups list --json | jq -r '.[].group'"))
def list_(*, as_json: Json = False, url: Url = None, schema: Schema = DEFAULT_SCHEMA) -> None:
    """List the groups with their states and members."""
    left_out: LeftOut = {}
    with opened(url, schema) as cluster:
        found = [group for _, groups in cluster.read_all(list_groups, left_out) for group in groups]
    rows = [group_facts(group) for group in sorted(found, key=lambda group: group.group_id)]
    show_rows(rows, _COLUMNS, as_json=as_json)
    tell_and_exit(left_out.values())


@app.command(name="describe", epilog=examples("txnstore groups describe billing"))
def describe(
    groups: Annotated[list[str], typer.Argument(metavar="GROUP", autocompletion=complete_group, help="The groups.")],
    *,
    as_json: Json = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Describe groups: their members, and how far they are.

    LAG counts the records that a reader of committed records has yet to read: no markers, nothing aborted, and
    nothing at or past the last stable offset; OPEN those after it, of transactions that may still abort.  PENDING:
    an open transaction holds an offset of the group.

    With txnstore.delivery.order=commit COMMITTED is a place, IN TRANSACTION the next record of the transaction there;
    LAG counts all that is committed, and OPEN what is in open transactions.
    """
    with opened(url, schema) as cluster:
        found = _described_all(cluster, groups)
    for facts in each_described(found, as_json=as_json):
        show_facts(facts, [column._replace(heading=column.heading.lower()) for column in _FACTS])
        if facts["members"]:
            say("")
            show_rows(facts["members"], _MEMBER_COLUMNS, as_json=False)
        say("")
        in_commit_order = any(row["offset_in_transaction"] is not None for row in facts["offsets"])
        columns = [column for column in _OFFSET_COLUMNS if in_commit_order or column.key != "offset_in_transaction"]
        show_rows(facts["offsets"], columns, as_json=False)


@app.command(
    name="reset-offsets",
    epilog=examples(
        "txnstore groups reset-offsets billing --to-earliest",
        "txnstore groups reset-offsets billing --topic orders:0,2 --to-datetime 2026-01-31T12:00:00 --execute",
        "txnstore groups reset-offsets billing --shift-by -10 --execute",
        "txnstore groups reset-offsets billing --to-earliest --order commit --execute",
    ),
)
def reset_offsets(
    group: _Group,
    *,
    topics: Annotated[
        list[str] | None,
        typer.Option(
            "--topic",
            metavar="TOPIC[:N,N]",
            help="Only these partitions; repeatable. Default: wherever it has committed.",
        ),
    ] = None,
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="To the first record.")] = False,
    to_latest: Annotated[
        bool, typer.Option("--to-latest", help="To the last stable offset; in commit order the high watermark.")
    ] = False,
    to_datetime: Annotated[
        int | None,
        typer.Option("--to-datetime", metavar="TIME", parser=parse_time, help=f"To the first record since {FORMS}."),
    ] = None,
    to_offset: Annotated[
        int | None, typer.Option("--to-offset", metavar="N", min=0, max=2**63 - 1, help="To this offset.")
    ] = None,
    shift_by: Annotated[
        int | None,
        typer.Option("--shift-by", metavar="N", min=-(2**63), max=2**63 - 1, help="Forward by N, or back if negative."),
    ] = None,
    order: Annotated[
        Order | None,
        typer.Option(
            "--order",
            help="The order of delivery that they are meant for (txnstore.delivery.order). Default: as they are.",
        ),
    ] = None,
    execute: Annotated[bool, typer.Option("--execute", help="Do it; otherwise only show what would be done.")] = False,
    as_json: Json = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Move a group without members to other offsets; without --execute nothing is changed.

    An offset outside the log becomes its nearest end, with a warning: the log start or the last stable offset, in
    commit order the high watermark.
    """
    given = (to_earliest, to_latest, to_datetime is not None, to_offset is not None, shift_by is not None)
    if sum(given) != 1:
        raise typer.BadParameter(
            "say where to, exactly once: --to-earliest, --to-latest, --to-datetime, --to-offset or --shift-by"
        )
    if order is not None and shift_by is not None:
        raise typer.BadParameter("--shift-by keeps the order of delivery: say where to instead", param_hint="--order")
    target = _target(to_earliest=to_earliest, to_datetime=to_datetime, to_offset=to_offset, shift_by=shift_by)
    chosen = _chosen(topics or ())
    check_group_id(group)

    def plan(store: Store, connection: Connection) -> list[dict[str, Any]]:
        return _plan(reads_at_leaders(cluster, store, connection), connection, group, chosen, target, order=order)

    def change(store: Store, connection: Connection) -> list[dict[str, Any]]:
        rows = plan(store, connection)
        offsets = {
            row["partition_id"]: OffsetAndMetadata(
                row["new_offset"], offset_in_transaction=0 if row["order"] == Order.COMMIT.value else None
            )
            for row in rows
        }
        if offsets:
            alter_offsets(connection, group, offsets, changes_order=order is not None)
        return rows

    def reset(store: Store) -> list[dict[str, Any]]:
        # It may not have heard yet of all partitions that a topic has.
        bring_up_to_date(store, cluster)
        return store.write(partial(change, store), wakes_readers=True) if execute else store.read(partial(plan, store))

    with opened(url, schema) as cluster:
        rows = cluster.at_coordinator(group, reset)
    shown = [{name: value for name, value in row.items() if name not in _NOT_SHOWN} for row in rows]
    names_order = order is not None or any(row["order"] == Order.COMMIT.value for row in rows)
    columns = [column for column in _RESET_COLUMNS if names_order or column.key != "order"]
    show_rows(shown, columns, as_json=as_json)
    for row in rows:
        wanted, new_offset = row["wanted_offset"], row["new_offset"]
        if wanted != new_offset:
            beyond = "past the end" if wanted > new_offset else "before the log start"
            name = PartitionName(row["topic"], row["partition"])
            hint(f"warning: {name}: offset {wanted} is {beyond}; {new_offset} takes its place")
    if not execute:
        hint("nothing was changed: this is what --execute would do")


@app.command(name="delete", epilog=examples("txnstore groups delete billing --yes"))
def delete(
    groups: Annotated[list[str], typer.Argument(metavar="GROUP", autocompletion=complete_group, help="The groups.")],
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")] = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Delete groups without members, and what they have committed: in each database all of them, or none."""
    names = sorted(dict.fromkeys(groups))
    with opened(url, schema) as cluster:
        by_coordinator = _by_coordinator(cluster, names)
        for store, own in by_coordinator:
            store.read(partial(_found_all, own))
        if not yes:
            typer.confirm(f"Delete {list_text(names)}, with the committed offsets?", abort=True, err=True)

        for store, own in by_coordinator:
            store.write(partial(_delete_all, own))
    for name in names:
        say(f"group {name} was deleted")


def _found(connection: Connection, group_id: str) -> ListedGroup:
    check_group_id(group_id)
    group = find_group(connection, group_id)
    if group is None:
        raise GroupIdNotFound(f"there is no group {group_id[:80]!r}")
    return group


def _by_coordinator(cluster: Cluster, group_ids: Iterable[str]) -> list[tuple[Store, list[str]]]:
    """Return the stores that coordinate the groups, each with those of its own."""
    found: dict[int, tuple[Store, list[str]]] = {}
    for group_id in group_ids:
        store = cluster.coordinator_of(group_id)
        found.setdefault(store.database_id, (store, []))[1].append(group_id)
    return list(found.values())


def _found_all(group_ids: Iterable[str], connection: Connection) -> None:
    for group_id in group_ids:
        _found(connection, group_id)


def _delete_all(group_ids: Iterable[str], connection: Connection) -> None:
    for group_id in group_ids:
        delete_group(connection, group_id)


def _described_all(cluster: Cluster, group_ids: list[str]) -> list[dict[str, Any]]:
    described: dict[str, dict[str, Any]] = {}
    for store, own in _by_coordinator(cluster, group_ids):
        described |= store.read(partial(_described, cluster, store, own))
    return [described[group_id] for group_id in group_ids]


def _described(
    cluster: Cluster, store: Store, group_ids: list[str], connection: Connection
) -> dict[str, dict[str, Any]]:
    found = {group_id: _found(connection, group_id) for group_id in group_ids}
    return {
        group_id: {**group_facts(group), "offsets": offset_rows(cluster, store, connection, group)}
        for group_id, group in found.items()
    }


def _plan(
    read: Reads,
    connection: Connection,
    group_id: str,
    chosen: dict[str, list[int] | None],
    target: _Target,
    *,
    order: Order | None,
) -> list[dict[str, Any]]:
    """Return where each partition is to go on; those that stay as they are are left out."""
    group = find_group(connection, group_id)
    if group is not None and (count := sum(not member.is_expired for member in group.members)):
        raise GroupNotEmpty(f"group {group_id} has {count} member{'s' if count > 1 else ''}; stop them first")
    committed = list_offsets(connection, group_id).offsets
    if chosen:
        partitions = [
            PartitionName(name, number)
            for name, numbers in chosen.items()
            for number in numbers or range(len(get_topic(connection, name).partition_ids))
        ]
    elif committed:
        partitions = sorted(committed)
    else:
        raise CommandFailed(f"group {group_id} has committed nothing; say with --topic where it is to begin")
    topics = topics_by_name(connection, {partition.topic for partition in partitions})
    aims: dict[int, _Aim] = {}
    for partition in partitions:
        topic = topics.get(partition.topic) or get_topic(connection, partition.topic)
        now = committed.get(partition)
        own_order = order or Order(_position(now)["order"] or Order.OFFSET.value)
        aims[topic.partition_id(partition.partition)] = _Aim(partition, None if now is None else now.offset, own_order)
    # One call for all partitions, so those of one database are of one snapshot.
    found = read(list(aims), partial(_aimed, target, aims))
    if not any(found.values()):
        raise CommandFailed(f"group {group_id} has committed nothing there; say where it is to begin: --to-earliest?")
    return [
        {
            "group": group_id,
            "topic": aim.partition.topic,
            "partition": aim.partition.partition,
            "partition_id": partition_id,
            "committed_offset": aim.committed,
            "new_offset": offsets[0],
            "wanted_offset": offsets[1],
            "order": aim.order.value,
        }
        for partition_id, aim in aims.items()
        if (offsets := found[partition_id]) is not None
    ]


def _end_offset(bounds: Bounds, order: Order) -> int:
    return bounds.end(_ISOLATION_OF[order])


def _aimed(
    target: _Target, aims: Mapping[int, _Aim], connection: Connection, partition_ids: list[int]
) -> dict[int, tuple[int, int] | None]:
    """Return where each partition is to go on, within its log and as it was asked for; None: it is left as it is."""
    found: dict[int, tuple[int, int] | None] = {}
    for partition_id, bounds in read_bounds(connection, partition_ids).items():
        aim = aims[partition_id]
        wanted = target(connection, bounds, aim.committed, aim.order)
        found[partition_id] = None
        if wanted is not None:
            within = min(max(wanted, bounds.log_start_offset), _end_offset(bounds, aim.order))
            found[partition_id] = (within, wanted)
    return found


def _target(*, to_earliest: bool, to_datetime: int | None, to_offset: int | None, shift_by: int | None) -> _Target:
    def target(connection: Connection, bounds: Bounds, committed: int | None, order: Order) -> int | None:
        if to_earliest:
            return bounds.log_start_offset
        if to_datetime is not None:
            found = offset_for_time(connection, bounds.partition_id, to_datetime, _ISOLATION_OF[order])
            return _end_offset(bounds, order) if found is None else found.offset
        if to_offset is not None:
            return to_offset
        if shift_by is not None:
            return None if committed is None else committed + shift_by
        return _end_offset(bounds, order)

    return target


def _chosen(texts: Iterable[str]) -> dict[str, list[int] | None]:
    """Return the numbers of the partitions by topic, of all that was given; None: all of them."""
    chosen: dict[str, list[int] | None] = {}
    for name, numbers in map(_parsed_topic, texts):
        before = chosen.get(name, [])
        chosen[name] = None if before is None or numbers is None else list(dict.fromkeys([*before, *numbers]))
    return chosen


def _parsed_topic(text: str) -> tuple[str, list[int] | None]:
    name, colon, numbers = text.partition(":")
    if not colon:
        return name, None
    if not all(re.fullmatch(r"[0-9]{1,9}", number) for number in numbers.split(",")):
        raise typer.BadParameter(f"{text[:80]!r} is not TOPIC or TOPIC:N,N", param_hint="--topic")
    return name, [int(number) for number in numbers.split(",")]
