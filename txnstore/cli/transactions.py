"""The commands about transactions: who writes, what holds up readers, and how to end it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated, Any, Final

import typer
from sqlalchemy import Connection

from txnstore.cli import branches
from txnstore.cli.bulk_abort import abort_many, ask_to_abort
from txnstore.cli.options import (
    Json,
    Schema,
    Url,
    complete_topic,
    complete_transactional_id,
    examples,
    opened,
)
from txnstore.cli.output import (
    Column,
    CommandFailed,
    Row,
    duration_text,
    each_described,
    hint,
    list_text,
    say,
    show_facts,
    show_rows,
    tell_and_exit,
    time_text,
)
from txnstore.clients.brokers import BROKER_ID, broker_id_of, reads_at_leaders
from txnstore.db.cluster.cluster import Cluster, LeftOut, repaired
from txnstore.db.cluster.membership import coordinator_of_producer
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.store import Store
from txnstore.log.partition_rows import producers_of_partition
from txnstore.log.sequences import ProducerInPartition
from txnstore.log.topics import get_topic
from txnstore.model import ClientProcess, ProducerIdentity
from txnstore.transactions.administration import (
    LostOffsets,
    OpenInPartition,
    abort_open_transaction,
    abort_open_transactions,
    drop_lost_offsets,
    offsets_held_elsewhere,
)
from txnstore.transactions.coordinator import TransactionCoordinator, check_transactional_id
from txnstore.transactions.listing import (
    HANGING_MARGIN_MS,
    HangingInPartition,
    TransactionFilter,
    describe_transaction,
    hanging_in_cluster,
    list_transactions,
)
from txnstore.transactions.open_transactions import HeldOffsets, OpenTransaction, each_held, each_open
from txnstore.transactions.outcome import Outcome, only_owner, remembered_outcome
from txnstore.transactions.protocol import STORED, TIMEOUT_NEVER_MS, TransactionMetadata, TransactionState

app: Final = typer.Typer(name="transactions", no_args_is_help=True, help="List, describe and abort transactions.")
app.add_typer(branches.app)

_MINUTE_MS: Final = 60_000
#: As Kafka's: the timeout is for a producer that will never write.
_FENCING_TIMEOUT_MS: Final = 1
_STATES: Final = {state.kafka_name: state for state in sorted(STORED)}

# The columns of kafka-transactions.sh.
_COLUMNS: Final = (
    Column("transactional_id", "TRANSACTIONAL ID"),
    Column("coordinator", "COORDINATOR"),
    Column("producer_id", "PRODUCER ID"),
    Column("state", "STATE"),
)
_FACTS: Final = (
    Column("coordinator", "coordinator"),
    Column("transactional_id", "transactional id"),
    Column("producer_id", "producer id"),
    Column("producer_epoch", "producer epoch"),
    Column("state", "state"),
    Column("timeout_ms", "timeout", duration_text),
    Column("start_ms", "started", time_text),
    Column("duration_ms", "open for", duration_text),
    Column("partitions", "partitions", list_text),
    Column("groups", "groups", list_text),
    Column("fenced", "fenced"),
)
_PRODUCER_COLUMNS: Final = (
    Column("partition", "PARTITION"),
    Column("producer_id", "PRODUCER ID"),
    Column("producer_epoch", "PRODUCER EPOCH"),
    Column("coordinator_epoch", "COORDINATOR EPOCH"),
    Column("last_sequence", "LAST SEQUENCE"),
    Column("last_timestamp_ms", "LAST TIMESTAMP", time_text),
    Column("transaction_start_offset", "OPEN SINCE OFFSET"),
)
_HANGING_COLUMNS: Final = (
    Column("topic", "TOPIC"),
    Column("partition", "PARTITION"),
    Column("group", "GROUP"),
    Column("producer_id", "PRODUCER ID"),
    Column("producer_epoch", "PRODUCER EPOCH"),
    Column("coordinator_epoch", "COORDINATOR EPOCH"),
    Column("start_offset", "START OFFSET"),
    Column("last_timestamp_ms", "LAST TIMESTAMP", time_text),
    Column("duration_ms", "OPEN FOR", duration_text),
)

_OPEN_COLUMNS: Final = (
    Column("topic", "TOPIC"),
    Column("partition", "PARTITION"),
    Column("first_offset", "SINCE OFFSET"),
    Column("group", "GROUP"),
    Column("open_for_ms", "OPEN FOR", duration_text),
    Column("transactional_id", "TRANSACTIONAL ID"),
    Column("producer_id", "PRODUCER ID"),
    Column("client", "CLIENT"),
    Column("state", "STATE"),
    Column("prepared_gids", "PREPARED AS", list_text),
    Column("backend_pid", "BACKEND PID"),
    Column("freed_by", "FREED BY"),
)

#: Only where there is one.
_RARE: Final = frozenset({"group", "prepared_gids", "backend_pid"})

_Topic = Annotated[str, typer.Argument(metavar="TOPIC", autocompletion=complete_topic, help="The topic.")]
_Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")]


@app.command(
    name="list",
    epilog=examples("txnstore transactions list --state Ongoing", "txnstore transactions list --longer-than 60000"),
)
def list_(
    *,
    states: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="STATE", help=f"Only in this state: {', '.join(_STATES)}; repeatable."),
    ] = None,
    producer_ids: Annotated[
        list[int] | None,
        typer.Option("--producer-id", metavar="ID", min=0, max=2**63 - 1, help="Only this producer; repeatable."),
    ] = None,
    longer_than: Annotated[
        int | None,
        typer.Option("--longer-than", metavar="MS", min=0, help="Only transactions open for longer than this."),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option("--pattern", metavar="REGEX", help="Only transactional ids that match this as a whole."),
    ] = None,
    as_json: Json = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """List the transactional ids, each with the state of its newest transaction."""
    wanted = TransactionFilter(_parsed_states(states or []), producer_ids or (), longer_than, _compiled(pattern))
    left_out: LeftOut = {}
    with opened(url, schema) as cluster:
        found = [
            (broker_id_of(store.database_id), row)
            for store, rows_there in cluster.read_all(partial(list_transactions, wanted=wanted), left_out)
            for row in rows_there
        ]
    rows = [
        {
            "transactional_id": row.transactional_id,
            "coordinator": coordinator,
            "producer_id": row.producer_id,
            "producer_epoch": row.producer_epoch,
            "state": row.state.kafka_name,
        }
        for coordinator, row in sorted(found, key=lambda each: each[1].transactional_id)
    ]
    show_rows(rows, _COLUMNS, as_json=as_json)
    tell_and_exit(left_out.values())


@app.command(name="describe", epilog=examples("txnstore transactions describe load-day"))
def describe(
    transactional_ids: Annotated[
        list[str], typer.Argument(metavar="ID", autocompletion=complete_transactional_id, help="Transactional ids.")
    ],
    *,
    as_json: Json = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Describe the newest transaction of transactional ids."""
    with opened(url, schema) as cluster:
        found = [cluster.at_coordinator(name, partial(_described_at, name)) for name in transactional_ids]
    for facts in each_described(found, as_json=as_json):
        show_facts(facts, _FACTS)


@app.command(
    name="describe-producers",
    epilog=examples("txnstore transactions describe-producers orders", "... describe-producers orders --partition 0"),
)
def describe_producers(
    topic: _Topic,
    *,
    partitions: Annotated[
        list[int] | None, typer.Option("--partition", "-p", min=0, help="Only this partition; repeatable.")
    ] = None,
    as_json: Json = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Show which producers the partitions of a topic remember, and at which offset each open transaction begins."""
    with opened(url, schema) as cluster:

        def work(connection: Connection) -> list[dict[str, Any]]:
            found = get_topic(connection, topic)
            numbers = range(len(found.partition_ids)) if partitions is None else dict.fromkeys(partitions)
            ids = {found.partition_id(number): number for number in numbers}
            states = reads_at_leaders(cluster, cluster.controller, connection)(list(ids), _producers)
            return [
                {"topic": topic, "partition": number, **_producer(state)}
                for partition_id, number in ids.items()
                for state in states[partition_id]
            ]

        show_rows(cluster.controller.read(work), _PRODUCER_COLUMNS, as_json=as_json)


@app.command(
    name="abort",
    epilog=examples(
        "txnstore transactions abort load-day",
        "txnstore transactions abort --topic orders --partition 0 --start-offset 17",
        "... abort --topic orders --partition 0 --producer-id 4 --producer-epoch 2",
        "txnstore transactions abort --longer-than 600000 --pattern 'load-.*'",
    ),
)
def abort(
    transactional_id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", autocompletion=complete_transactional_id, help="The transactional id."),
    ] = None,
    *,
    topic: Annotated[str | None, typer.Option("--topic", autocompletion=complete_topic, help="Where it is open.")] = (
        None
    ),
    partition: Annotated[
        int | None, typer.Option("--partition", "-p", min=0, help="The partition of the topic.")
    ] = None,
    start_offset: Annotated[
        int | None, typer.Option("--start-offset", min=0, max=2**63 - 1, help="Where it begins there.")
    ] = None,
    producer_id: Annotated[
        int | None, typer.Option("--producer-id", min=0, max=2**63 - 1, help="Its producer.")
    ] = None,
    producer_epoch: Annotated[
        int | None, typer.Option("--producer-epoch", min=0, max=2**15 - 1, help="Goes with --producer-id.")
    ] = None,
    coordinator_epoch: Annotated[
        int | None,
        typer.Option("--coordinator-epoch", min=0, max=2**31 - 1, help="Goes with --producer-id; 0 by default."),
    ] = None,
    even_if_prepared: Annotated[
        bool,
        typer.Option(
            "--even-if-prepared", help="Also one of a program whose own database decides, and may have committed."
        ),
    ] = False,
    longer_than: Annotated[
        int | None,
        typer.Option("--longer-than", metavar="MS", min=0, help="All that are open for longer than this."),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option("--pattern", metavar="REGEX", help="All whose transactional id matches this as a whole."),
    ] = None,
    yes: _Yes = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Abort an open transaction as a whole, wherever it wrote; its producer learns of this with its next request.

    Give its transactional id; or --topic and --partition with --start-offset, or with --producer-id and
    --producer-epoch; or --producer-id alone, for one that its coordinator knows, or that holds offsets of groups in
    another database and that its coordinator has lost. Or give --longer-than, --pattern or both for all that are open
    and meet them, except those without a timeout, which another database decides: their producers may go on.
    """
    by_offset = start_offset is not None
    by_producer = producer_id is not None or producer_epoch is not None
    in_partition = topic is not None or partition is not None or by_offset or by_producer
    are_many = longer_than is not None or pattern is not None
    if (transactional_id is not None) + in_partition + are_many != 1:
        raise typer.BadParameter("give a transactional id, or --topic and --partition, or --longer-than or --pattern")
    not_for_many = {"--even-if-prepared": even_if_prepared, "--coordinator-epoch": coordinator_epoch is not None}
    many = _many(longer_than, pattern, not_for_many) if are_many else None
    with opened(url, schema) as cluster:
        if many is not None:
            abort_many(cluster, many, yes=yes)
            return
        if transactional_id is not None:
            _abort_id(cluster, transactional_id, even_if_prepared=even_if_prepared, yes=yes)
            return
        if producer_id is not None and topic is None and partition is None and not by_offset and producer_epoch is None:
            _abort_producer(cluster, producer_id, even_if_prepared=even_if_prepared, yes=yes)
            return
        if topic is None or partition is None or by_offset == by_producer:
            raise typer.BadParameter(
                "give --topic and --partition, and either --start-offset or --producer-id with --producer-epoch"
            )
        if by_producer and (producer_id is None or producer_epoch is None):
            raise typer.BadParameter("--producer-id and --producer-epoch go together")

        def work(connection: Connection) -> OpenInPartition:
            partition_id = get_topic(connection, topic).partition_id(partition)
            if start_offset is not None:
                states = reads_at_leaders(cluster, cluster.controller, connection)([partition_id], _producers)[
                    partition_id
                ]
                return _open_at(states, partition_id, f"{topic}-{partition}", start_offset)
            assert producer_id is not None
            assert producer_epoch is not None
            return OpenInPartition(partition_id, ProducerIdentity(producer_id, producer_epoch), coordinator_epoch or 0)

        target = cluster.controller.read(work)
        # If who coordinates it is away, the abort says so.
        owner = None if even_if_prepared else _transactional_id_of(cluster, target.producer.producer_id, {})
        if owner is not None:
            describe_it = partial(describe_transaction, transactional_id=owner)
            cluster.at_coordinator(owner, lambda store: _refuse_prepared(store.read(describe_it).row))
        ask_to_abort(f"the open transaction of producer {target.producer} in {topic}-{partition}", yes=yes)
        cluster.at_partition(target.partition_id, lambda leader: abort_open_transaction(leader, target, cluster))
        say(f"the transaction of producer {target.producer} was aborted")


@app.command(
    name="list-open",
    epilog=examples(
        "txnstore transactions list-open orders",
        "txnstore transactions list-open --json | jq -r '.[] | select(.open_for_ms > 3600000) | .freed_by // empty'",
    ),
)
def list_open(
    topic: Annotated[
        str | None,
        typer.Argument(metavar="[TOPIC]", autocompletion=complete_topic, help="Only in this topic."),
    ] = None,
    *,
    partition: Annotated[int | None, typer.Option("--partition", "-p", min=0, help="Only in this partition.")] = None,
    as_json: Json = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Show what holds readers back: the open transactions of each partition, the oldest first, and what ends each.

    CLIENT is what the process that writes says of itself. Readers of a partition wait for its first transaction. One
    without a record there that holds offsets of a GROUP keeps the group's consumers waiting; these come last. PREPARED
    AS names its shares in other databases, BACKEND PID the session of PostgreSQL that works on it now.
    """
    ids_of = _partition_ids(topic, partition)
    left_out: LeftOut = {}
    with opened(url, schema) as cluster:
        partition_ids = cluster.controller.read(ids_of)
        found = [_open_row(each) for each in each_open(cluster, left_out, partition_ids)]
        named = {row["producer_id"] for row in found}
        every_held = each_held(cluster, left_out, partition_ids)
        held = [_held_row(each) for each in every_held if each.producer_id not in named]
    rows = [*found, *held]
    show_rows(rows, _filled(_OPEN_COLUMNS, rows), as_json=as_json)
    tell_and_exit(left_out.values())


@app.command(
    name="find-hanging",
    epilog=examples("txnstore transactions find-hanging", "... find-hanging --json", "... find-hanging --abort --yes"),
)
def find_hanging(
    *,
    topic: Annotated[
        str | None, typer.Option("--topic", autocompletion=complete_topic, help="Only in this topic.")
    ] = None,
    partition: Annotated[int | None, typer.Option("--partition", "-p", min=0, help="Only in this partition.")] = None,
    max_timeout: Annotated[
        int,
        typer.Option(
            "--max-transaction-timeout",
            metavar="MINUTES",
            min=0,
            max=2**31 - 1,
            help="It hangs if open five minutes longer than this and unknown to its coordinator.",
        ),
    ] = 15,
    abort: Annotated[bool, typer.Option("--abort", help="End what is found.")] = False,
    yes: _Yes = False,
    as_json: Json = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Find transactions that hold up readers and that nobody will ever end; `abort` ends them.

    One with a GROUP holds offsets of it, which consumers of the group wait for.
    """
    ids_of = _partition_ids(topic, partition)
    longest_ms = max_timeout * _MINUTE_MS
    left_out: LeftOut = {}
    with opened(url, schema) as cluster:
        partition_ids = cluster.controller.read(ids_of)
        found = hanging_in_cluster(cluster, left_out, longest_ms, partition_ids)
        # A database alone coordinates all that its groups wait for, and a role may be shown no view.
        every_held = () if cluster.is_alone else each_held(cluster, left_out, partition_ids)
        held = [one for one in every_held if one.is_hanging and one.age_ms > longest_ms + HANGING_MARGIN_MS]
        shown = [*map(_hanging_row, found), *map(_hanging_offsets_row, held)]
        show_rows(shown, _filled(_HANGING_COLUMNS, shown), as_json=as_json)
        if abort and shown:
            ask_to_abort(f"the {len(shown)} transactions above" if len(shown) > 1 else "the transaction above", yes=yes)
            _abort_hanging(cluster, found, held, left_out)
    tell_and_exit(left_out.values())


def _producers(connection: Connection, partition_ids: list[int]) -> dict[int, list[ProducerInPartition]]:
    return {number: list(producers_of_partition(connection, number)) for number in partition_ids}


def _described_at(transactional_id: str, store: Store) -> dict[str, Any]:
    described = store.read(lambda connection: _described(connection, transactional_id))
    return {**described, "coordinator": broker_id_of(store.database_id)}


def _described(connection: Connection, transactional_id: str) -> dict[str, Any]:
    check_transactional_id(transactional_id)
    found = describe_transaction(connection, transactional_id)
    row = found.row
    return {
        "coordinator": BROKER_ID,
        "transactional_id": row.transactional_id,
        "producer_id": row.producer_id,
        "producer_epoch": row.producer_epoch,
        "state": row.state.kafka_name,
        "timeout_ms": row.timeout_ms,
        "start_ms": row.start_ms if found.is_running else None,
        "duration_ms": max(0, found.now_ms - row.start_ms) if found.is_running else None,
        "partitions": [str(partition) for partition in found.partitions] if found.is_running else [],
        "groups": list(found.group_ids) if found.is_running else [],
        "fenced": None if row.fence_reason is None else f"{row.fence_reason}: {row.fence_detail or ''}".rstrip(": "),
    }


def _producer(state: ProducerInPartition) -> dict[str, Any]:
    return {
        "producer_id": state.producer_id,
        "producer_epoch": state.epoch,
        "coordinator_epoch": state.coordinator_epoch,
        "last_sequence": state.last_sequence,
        "last_timestamp_ms": state.last_timestamp_ms,
        "transaction_start_offset": state.transaction_first_offset,
    }


def _abort_producer(cluster: Cluster, producer_id: int, *, even_if_prepared: bool, yes: bool) -> None:
    away: LeftOut = {}
    transactional_id = _transactional_id_of(cluster, producer_id, away)
    if transactional_id is None or coordinator_of_producer(producer_id) in away:
        # Perhaps it is known there, and who says here that they have it is another one.
        tell_and_exit(away.values())
    else:
        _abort_id(cluster, transactional_id, even_if_prepared=even_if_prepared, yes=yes, producer_id=producer_id)
        return
    left_out: LeftOut = {}
    held = offsets_held_elsewhere(cluster, [producer_id], left_out)
    if held:
        names = _names_of_groups(held)
        ask_to_abort(f"what producer {producer_id}, which its coordinator does not know, holds of {names}", yes=yes)
        lost = drop_lost_offsets(cluster, held)
        if not lost:
            raise CommandFailed(f"the producer id {producer_id} is in use by now, or will be; nothing was changed")
        say(f"what producer {producer_id} held of {_names_of_groups(lost)} was dropped")
    tell_and_exit(left_out.values())
    if not held:
        raise CommandFailed(
            f"no transactional id has the producer id {producer_id} now; what does `txnstore verify` say?"
        )


def _many(longer_than: int | None, pattern: str | None, not_for_many: Mapping[str, bool]) -> TransactionFilter:
    for option, is_given in not_for_many.items():
        if is_given:
            raise typer.BadParameter("this does not go with --longer-than or --pattern", param_hint=option)
    return TransactionFilter([TransactionState.ONGOING], (), longer_than, _compiled(pattern))


def _names_of_groups(held: Iterable[LostOffsets]) -> str:
    return "the offsets of " + list_text(sorted(group_id for one in held for group_id in one.group_ids))


def _transactional_id_of(cluster: Cluster, producer_id: int, left_out: LeftOut) -> str | None:
    wanted = TransactionFilter(producer_ids=[producer_id])
    found = cluster.read_all(partial(list_transactions, wanted=wanted), left_out)
    # All of them: the one whose name comes first is not the one that is meant because of that.
    return only_owner((row.transactional_id for _, rows_there in found for row in rows_there), producer_id)


def _abort_id(
    cluster: Cluster, transactional_id: str, *, even_if_prepared: bool, yes: bool, producer_id: int | None = None
) -> None:
    check_transactional_id(transactional_id)
    abort_at = partial(_abort_at, even_if_prepared=even_if_prepared, yes=yes)
    cluster.at_coordinator(transactional_id, lambda store: abort_at(store, cluster, transactional_id, producer_id))


def _abort_at(
    store: Store,
    cluster: Cluster,
    transactional_id: str,
    producer_id: int | None,
    *,
    even_if_prepared: bool,
    yes: bool,
) -> None:
    found = store.read(lambda connection: describe_transaction(connection, transactional_id))
    if producer_id not in {None, found.row.producer_id, *(writer.producer_id for writer in found.writers)}:
        raise CommandFailed(f"{transactional_id} has another producer id than {producer_id} now; nothing was changed")
    if not found.is_running:
        held = offsets_held_elsewhere(cluster, [found.row.producer_id], {})
        if held:
            raise CommandFailed(
                f"{transactional_id} has no open transaction; nothing was changed. Its producer held"
                f" {_names_of_groups(held)}: if it still does, a coordinator that was restored no longer knows"
                f" it. Start a producer with this id; then `txnstore transactions abort --producer-id"
                f" {found.row.producer_id}` drops them"
            )
        say(f"{transactional_id} has no open transaction; nothing was changed")
        return
    if found.row.state is TransactionState.PREPARE_COMMIT:
        raise CommandFailed(
            f"the transaction of {transactional_id} is decided to commit; `txnstore maintain --once` completes it"
        )
    if not even_if_prepared:
        _refuse_prepared(found.row)
    ask_to_abort(f"the open transaction of {transactional_id}, in {list_text(found.partitions)}", yes=yes)
    if not TransactionCoordinator(store, cluster).abort_as_shown(found.row, _FENCING_TIMEOUT_MS):
        raise CommandFailed(store.read(partial(_what_became_of, found.row)) + "; nothing was changed")
    say(f"the transaction of {transactional_id} was aborted, and its producer is fenced")


def _refuse_prepared(row: TransactionMetadata) -> None:
    if row.state is TransactionState.ONGOING and row.timeout_ms == TIMEOUT_NEVER_MS:
        raise CommandFailed(
            f"the transaction of {row.transactional_id} is for its program to complete (KIP-939): the program's own"
            " database decides, and may have committed its part already. Only if the program never will, add"
            " --even-if-prepared; nothing was changed"
        )


def _what_became_of(shown: TransactionMetadata, connection: Connection) -> str:
    """Return what a transaction has come to that is not as it was shown any more."""
    name = f"the transaction of {shown.transactional_id}"
    now = describe_transaction(connection, shown.transactional_id)
    row = now.row
    if row.transaction_number == shown.transaction_number and row.state is TransactionState.ONGOING:
        return f"{name} is still open, and another producer has taken it over meanwhile"
    outcome = remembered_outcome(connection, shown.transactional_id, shown.begin_identity)
    ended = {
        Outcome.COMMITTED: f"{name} was committed meanwhile",
        Outcome.ABORTED: f"{name} was aborted meanwhile, by somebody else",
    }.get(outcome or Outcome.OPEN, f"{name} has ended meanwhile, and how is not remembered")
    is_newer = now.is_running and row.transaction_number != shown.transaction_number
    return f"{ended}, and a newer one of {shown.transactional_id} is open" if is_newer else ended


def _abort_hanging(
    cluster: Cluster, found: Iterable[HangingInPartition], held: Iterable[HeldOffsets], left_out: LeftOut
) -> None:
    targets: list[OpenInPartition] = []
    for topic, those in itertools.groupby(found, key=lambda one: one.partition.topic):
        partition_ids = cluster.controller.read(partial(get_topic, name=topic)).partition_ids
        targets += (
            OpenInPartition(
                partition_ids[one.partition.partition],
                ProducerIdentity(one.producer_id, one.producer_epoch),
                max(0, one.coordinator_epoch),
            )
            for one in those
        )
    count = sum(
        repaired(cluster, database_id, partial(abort_open_transactions, targets=some, cluster=cluster))
        for database_id, some in cluster.by_leader(targets).items()
    )
    groups_held = offsets_held_elsewhere(cluster, {one.producer_id for one in held}, left_out)
    lost = {one.producer_id for one in drop_lost_offsets(cluster, groups_held)}
    count += sum(one.producer_id in lost for one in held)
    hint(f"{count} {'transaction was' if count == 1 else 'transactions were'} aborted")
    for producer_id in sorted({one.producer_id for one in groups_held} - lost):
        hint(f"left, its transactional id is in use: see `txnstore transactions abort --producer-id {producer_id}`")


def _partition_ids(topic: str | None, partition: int | None) -> Callable[[Connection], list[int] | None]:
    """Return what finds the partitions that are asked about; None: all."""
    if topic is None and partition is not None:
        raise typer.BadParameter("this needs a topic", param_hint="--partition")

    def find(connection: Connection) -> list[int] | None:
        if topic is None:
            return None
        found = get_topic(connection, topic)
        return list(found.partition_ids) if partition is None else [found.partition_id(partition)]

    return find


def _hanging_row(one: HangingInPartition) -> dict[str, Any]:
    return {
        "topic": one.partition.topic,
        "partition": one.partition.partition,
        "group": None,
        "producer_id": one.producer_id,
        "producer_epoch": one.producer_epoch,
        "coordinator_epoch": one.coordinator_epoch,
        "start_offset": one.start_offset,
        "last_timestamp_ms": one.last_timestamp_ms,
        "duration_ms": one.age_ms,
    }


def _hanging_offsets_row(one: HeldOffsets) -> dict[str, Any]:
    return {
        "topic": one.partition.topic,
        "partition": one.partition.partition,
        "group": one.group_id,
        "producer_id": one.producer_id,
        "producer_epoch": one.producer_epoch,
        "coordinator_epoch": None,
        "start_offset": None,
        "last_timestamp_ms": one.sent_ms,
        "duration_ms": one.age_ms,
    }


def _open_row(one: OpenTransaction) -> dict[str, Any]:
    return _row(one) | {
        "first_offset": one.first_offset,
        "is_oldest": one.is_oldest,
        "last_write_ms": one.last_write_ms,
        "prepared_gids": list(one.prepared_gids),
        "backend_pid": one.backend_pid,
        "coordinator_epoch": one.coordinator_epoch,
        **({"state": "hanging"} if one.is_hanging else {}),
    }


def _held_row(one: HeldOffsets) -> dict[str, Any]:
    return _row(one) | {
        "group": one.group_id,
        "pending_offset": one.pending_offset,
        "last_write_ms": one.sent_ms,
        **({"state": "hanging"} if one.is_hanging else {}),
    }


def _row(one: OpenTransaction | HeldOffsets) -> dict[str, Any]:
    """Return what both have, and nothing for what only one of them has."""
    client = one.client
    return {
        "topic": one.partition.topic,
        "partition": one.partition.partition,
        "first_offset": None,
        "group": None,
        "pending_offset": None,
        "is_oldest": False,
        "transactional_id": one.transactional_id,
        "state": None if one.state is None else one.state.kafka_name,
        "client": _client_text(client),
        "client_id": None if client is None else client.client_id,
        "client_host": None if client is None else client.host,
        "client_process_id": None if client is None else client.process_id,
        "open_for_ms": one.age_ms,
        "timeout_ms": one.timeout_ms,
        "started_ms": one.started_ms,
        "last_write_ms": None,
        "prepared_gids": [],
        "backend_pid": None,
        "freed_by": one.freed_by,
        "producer_id": one.producer_id,
        "producer_epoch": one.producer_epoch,
        "coordinator_epoch": None,
        "coordinator": broker_id_of(one.coordinator_database_id),
    }


def _filled(columns: Iterable[Column], rows: Iterable[Row]) -> list[Column]:
    """Leave out what no row has, of that which few have."""
    filled = {name for row in rows for name in _RARE if row.get(name) not in (None, [])}
    return [column for column in columns if column.key not in _RARE - filled]


def _client_text(client: ClientProcess | None) -> str | None:
    return None if client is None else f"{client.client_id} ({client.host}, process {client.process_id})"


def _open_at(states: Iterable[ProducerInPartition], partition_id: int, name: str, start_offset: int) -> OpenInPartition:
    for state in states:
        if state.transaction_first_offset == start_offset:
            identity = ProducerIdentity(state.producer_id, state.epoch)
            return OpenInPartition(partition_id, identity, max(0, state.coordinator_epoch))
    raise CommandFailed(
        f"no open transaction of {name} begins at offset {start_offset}; `describe-producers` lists those that are open"
    )


def _parsed_states(names: list[str]) -> list[TransactionState]:
    unknown = [name for name in names if name not in _STATES]
    if unknown:
        raise typer.BadParameter(f"{unknown[0][:40]!r} is not one of {', '.join(_STATES)}", param_hint="--state")
    return [_STATES[name] for name in names]


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        return re.compile(pattern)
    except re.error as error:
        raise typer.BadParameter(f"this is not a regular expression: {error}", param_hint="--pattern") from None
