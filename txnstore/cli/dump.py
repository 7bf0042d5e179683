"""The commands that print what the tables hold, in the form of kafka-dump-log."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final

import typer
from sqlalchemy import Connection, bindparam, func, select

from txnstore.cli.options import (
    PartitionShown,
    Schema,
    Url,
    complete_topic,
    complete_transactional_id,
    examples,
    opened,
    partition_shown,
)
from txnstore.cli.output import CommandFailed, json_text, printable, tell_and_exit
from txnstore.cli.records import as_json as json_bytes
from txnstore.cli.records import headers_as_json
from txnstore.clients.brokers import at_leader_of
from txnstore.db.cluster.cluster import Cluster, LeftOut
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.schema import record_batches, transaction_log
from txnstore.db.store import Store, pages
from txnstore.errors import CorruptBatch
from txnstore.log.append import finished_since
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import RecordBatch, decode
from txnstore.log.partition_rows import producers_of_partition
from txnstore.log.topics import get_topic
from txnstore.model import NO_PRODUCER_ID, ControlType, StoredRecord
from txnstore.transactions.coordinator import check_transactional_id
from txnstore.transactions.rows import JournalEntry, changes_of

app: Final = typer.Typer(
    name="dump", no_args_is_help=True, help="Print what the tables hold, as kafka-dump-log prints it."
)

#: How many batches are read in one go; so few that a page of the largest ones fits into memory.
_PAGE_BATCHES: Final = 50
_PAGE_ENTRIES: Final = 1_000
#: Of a control record in Kafka's form: the sizes of its key and value.
_MARKER_SIZES: Final = "keySize: 4 valueSize: 6"
_TIMESTAMP_NAMES: Final = ("CreateTime", "LogAppendTime")
_NO_SEQUENCE: Final = -1
_SEQUENCES: Final = 2**31

#: What a page prints, and where the next one begins; None: this is the last one.
_FactsAndNext = tuple[list[dict[str, Any]], int | None]

_BATCHES: Final = (
    select(record_batches)
    .where(record_batches.c.partition_id == bindparam("of_partition_id"))
    .where(record_batches.c.last_offset > bindparam("after_last_offset"))
    .order_by(record_batches.c.last_offset)
    .limit(_PAGE_BATCHES)
)
_SIZE_BEFORE: Final = (
    select(func.coalesce(func.sum(record_batches.c.size_bytes), 0))
    .where(record_batches.c.partition_id == bindparam("of_partition_id"))
    .where(record_batches.c.last_offset < bindparam("from_offset"))
)
_JOURNAL: Final = (
    select(transaction_log)
    .where(transaction_log.c.entry_id > bindparam("after_entry_id"))
    .order_by(transaction_log.c.entry_id)
    .limit(_PAGE_ENTRIES)
)
_JOURNAL_OF: Final = _JOURNAL.where(transaction_log.c.transactional_id == bindparam("of_transactional_id"))

_Topic = Annotated[str, typer.Argument(metavar="TOPIC", autocompletion=complete_topic, help="The topic.")]
_FromOffset = Annotated[
    int, typer.Option("--from", metavar="OFFSET", min=0, max=2**63 - 1, help="The offset to begin with.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print each as a line of JSON, for programs.")]


@app.command(name="log", epilog=examples("txnstore dump log orders", "txnstore dump log orders -p 2 --records"))
def log(
    topic: _Topic,
    *,
    partition: PartitionShown = None,
    records: Annotated[
        bool, typer.Option("--records/--batches", help="Print every record, or only the batches.")
    ] = True,
    from_offset: _FromOffset = 0,
    as_json: _Json = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Print the log of a partition: its record batches, their records, and the markers that end transactions."""
    with opened(url, schema) as cluster:
        number = partition_shown(cluster, topic, partition)
        store = at_leader_of(cluster, topic, number, lambda leader: leader)
        partition_id, bounds = store.read(lambda connection: _found(connection, topic, number))
        if not as_json:
            _print(f"Dumping {topic}-{number}")
            _print(f"Log starting offset: {bounds.log_start_offset}")
        position = store.read(lambda connection: _size_before(connection, partition_id, from_offset))
        damaged = 0
        for row in _batches(store, partition_id, from_offset):
            try:
                facts, found = _batch(decode(row), position, records=records)
            except CorruptBatch as error:
                damaged += 1
                facts = {"baseOffset": row.base_offset, "lastOffset": row.last_offset, "position": position}
                facts |= {"size": row.size_bytes, "crc": row.crc, "isvalid": False, "damage": str(error)}
                found = []
            if as_json:
                _print_json(facts | ({"records": found} if records else {}))
            else:
                _print(_joined(facts))
                for record in found:
                    _print(f"| {_record_line(record)}")
            position += row.size_bytes
    if damaged:
        raise CommandFailed(f"{topic}-{number}: {damaged} record batches are damaged")


@app.command(name="index", epilog=examples("txnstore dump index orders --partition 1"))
def index(
    topic: _Topic,
    *,
    partition: PartitionShown = None,
    from_offset: _FromOffset = 0,
    as_json: _Json = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Print the index of finished transactions of a partition: aborted ones, as Kafka's does, and committed ones."""

    def page(connection: Connection, partition_id: int, position: int) -> _FactsAndNext:
        rows = finished_since(connection, partition_id, position)
        facts = [
            {
                "version": 0,
                "producerId": row.producer_id,
                "producerEpoch": row.producer_epoch,
                "firstOffset": row.first_offset,
                "lastOffset": row.marker_offset,
                "lastStableOffset": row.last_stable_offset,
                "outcome": ControlType(row.outcome).name,
            }
            for row in rows
        ]
        return facts, rows[-1].marker_offset + 1 if rows else None

    _print_all(url, schema, topic, partition, page, from_offset, as_json=as_json)


@app.command(name="producers", epilog=examples("txnstore dump producers orders --partition 1"))
def producers(
    topic: _Topic,
    *,
    partition: PartitionShown = None,
    as_json: _Json = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Print what a partition remembers of its producers, as Kafka's producer snapshot does."""

    def page(connection: Connection, partition_id: int, after_id: int) -> _FactsAndNext:
        states = producers_of_partition(connection, partition_id, after_id=after_id, count_max=_PAGE_ENTRIES)
        facts = [
            {
                "producerId": state.producer_id,
                "producerEpoch": state.epoch,
                "coordinatorEpoch": state.coordinator_epoch,
                "currentTxnFirstOffset": state.transaction_first_offset,
                "lastTimestamp": state.last_timestamp_ms,
                "batches": [
                    {
                        "firstSequence": batch.first_sequence,
                        "lastSequence": batch.last_sequence,
                        "lastOffset": batch.last_offset,
                        "offsetDelta": batch.last_offset - batch.base_offset,
                        "timestamp": batch.timestamp_ms,
                    }
                    for batch in state.recent_batches
                ],
            }
            for state in states
        ]
        return facts, states[-1].producer_id if states else None

    _print_all(url, schema, topic, partition, page, NO_PRODUCER_ID, as_json=as_json)


@app.command(
    name="journal", epilog=examples("txnstore dump journal", "txnstore dump journal --transactional-id load-day")
)
def journal(
    *,
    transactional_id: Annotated[
        str | None,
        typer.Option(
            "--transactional-id",
            "-t",
            metavar="ID",
            autocompletion=complete_transactional_id,
            help="Only of this transactional id.",
        ),
    ] = None,
    as_json: _Json = False,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Print the journal of transactions: every change of state, in order, one database after the other."""
    if transactional_id is not None:
        check_transactional_id(transactional_id)
    left_out: LeftOut = {}
    with opened(url, schema) as cluster:
        for entry in _entries_of_all(cluster, left_out, transactional_id):
            facts = {
                "producerId": entry.producer_id,
                "producerEpoch": entry.producer_epoch,
                "state": entry.state.kafka_name,
                "txnStartTimestamp": entry.start_ms,
                "txnLastUpdateTimestamp": entry.update_ms,
                "txnTimeoutMs": entry.timeout_ms,
                "transaction": entry.transaction_number,
                "reason": entry.reason,
            }
            if entry.sent_offsets is not None:
                facts["sentOffsets"] = json.loads(entry.sent_offsets)
            if as_json:
                _print_json({"transactionalId": entry.transactional_id, "entry": entry.entry_id} | facts)
                continue
            payload = ",".join(f"{name}={_shown(value)}" for name, value in facts.items())
            _print(
                f"| offset: {entry.entry_id} key: transaction_metadata::transactionalId={entry.transactional_id}"
                f" payload: {payload}"
            )
    tell_and_exit(left_out.values())


def _found(connection: Connection, topic: str, partition: int) -> tuple[int, Any]:
    partition_id = get_topic(connection, topic).partition_id(partition)
    return partition_id, read_bounds(connection, [partition_id])[partition_id]


def _size_before(connection: Connection, partition_id: int, from_offset: int) -> int:
    """Return the position of the first batch that is printed: so many bytes of the log are before it."""
    if not from_offset:
        return 0
    found = connection.execute(_SIZE_BEFORE, {"of_partition_id": partition_id, "from_offset": from_offset})
    return int(found.scalar_one())


def _batches(store: Store, partition_id: int, from_offset: int) -> Iterator[Any]:
    """Return the rows of batches page by page: a reader that takes long holds no snapshot of the database."""
    first = {"of_partition_id": partition_id, "after_last_offset": from_offset - 1}
    return itertools.chain.from_iterable(pages(store.read, _BATCHES, first, _PAGE_BATCHES))


def _entries_of_all(cluster: Cluster, left_out: LeftOut, transactional_id: str | None) -> Iterator[JournalEntry]:
    for store in cluster.stores(left_out):
        with cluster.leaving_out(store.database_id, left_out):
            yield from _entries(store, transactional_id)


def _entries(store: Store, transactional_id: str | None) -> Iterator[JournalEntry]:
    statement, first = _JOURNAL, dict[str, Any](after_entry_id=0)
    if transactional_id is not None:
        statement, first["of_transactional_id"] = _JOURNAL_OF, transactional_id
    for rows in pages(store.read, statement, first, _PAGE_ENTRIES):
        for row in rows:
            yield from changes_of(row)


def _batch(batch: RecordBatch, position: int, *, records: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    has_sequence = batch.base_sequence != _NO_SEQUENCE
    last_sequence = (batch.base_sequence + batch.last_offset - batch.base_offset) % _SEQUENCES
    facts = {
        "baseOffset": batch.base_offset,
        "lastOffset": batch.last_offset,
        "count": batch.record_count,
        "baseSequence": batch.base_sequence,
        "lastSequence": last_sequence if has_sequence else _NO_SEQUENCE,
        "producerId": batch.producer.producer_id,
        "producerEpoch": batch.producer.epoch,
        "partitionLeaderEpoch": 0,
        "isTransactional": batch.is_transactional,
        "isControl": batch.is_control,
        "deleteHorizonMs": None,
        "position": position,
        _TIMESTAMP_NAMES[batch.timestamp_type]: batch.max_timestamp_ms,
        "size": batch.size_bytes,
        "magic": 2,
        "compresscodec": batch.codec.name.lower(),
        "crc": batch._row.crc,  # noqa: SLF001 - shown nowhere else
        "isvalid": True,
    }
    if not records:
        return facts, []
    if batch.control_type is not None:
        return facts, [_marker(batch, batch.control_type)]
    return facts, [_record(batch, record) for record in batch.records()]


def _marker(batch: RecordBatch, control_type: ControlType) -> dict[str, Any]:
    return {
        "offset": batch.last_offset,
        _TIMESTAMP_NAMES[batch.timestamp_type]: batch.max_timestamp_ms,
        "sequence": _NO_SEQUENCE,
        "headerKeys": [],
        "endTxnMarker": control_type.name,
        "coordinatorEpoch": batch.coordinator_epoch,
    }


def _record(batch: RecordBatch, record: StoredRecord) -> dict[str, Any]:
    sequence = _NO_SEQUENCE
    if batch.base_sequence != _NO_SEQUENCE:
        sequence = (batch.base_sequence + record.offset - batch.base_offset) % _SEQUENCES
    return {
        "offset": record.offset,
        _TIMESTAMP_NAMES[batch.timestamp_type]: record.timestamp_ms,
        "keySize": -1 if record.key is None else len(record.key),
        "valueSize": -1 if record.value is None else len(record.value),
        "sequence": sequence,
        "headers": headers_as_json(record.headers),
        "key": json_bytes(record.key),
        "payload": json_bytes(record.value),
    }


def _record_line(record: dict[str, Any]) -> str:
    if "endTxnMarker" in record:
        offset, stamp = list(record.items())[:2]
        return (
            f"offset: {offset[1]} {stamp[0]}: {stamp[1]} {_MARKER_SIZES} sequence: {record['sequence']} headerKeys: []"
            f" endTxnMarker: {record['endTxnMarker']} coordinatorEpoch: {record['coordinatorEpoch']}"
        )
    facts = {name: value for name, value in record.items() if name not in {"headers", "key", "payload"}}
    facts["headerKeys"] = f"[{','.join(name for name, _ in record['headers'])}]"
    facts |= {name: record[name] for name in ("key", "payload") if record[name] is not None}
    return _joined(facts)


def _print_all(  # noqa: PLR0917 - where, and what
    url: str | None,
    schema: str,
    topic: str,
    partition: int | None,
    page: Callable[[Connection, int, int], _FactsAndNext],
    position: int,
    *,
    as_json: bool,
) -> None:
    """Print page after page, from a position on; each one says where the next begins, or that it is the last."""
    with opened(url, schema) as cluster:
        number = partition_shown(cluster, topic, partition)
        store = at_leader_of(cluster, topic, number, lambda leader: leader)
        partition_id, _ = store.read(lambda connection: _found(connection, topic, number))
        for facts in _facts_of_pages(store, lambda connection, here: page(connection, partition_id, here), position):
            if as_json:
                _print_json(facts)
                continue
            flat = dict(facts)
            # As Kafka does: the first and the last of the batches that are remembered of a producer.
            batches = flat.pop("batches", None)
            if batches:
                flat |= {"firstSequence": batches[0]["firstSequence"]} | {
                    name: value for name, value in batches[-1].items() if name != "firstSequence"
                }
            _print(_joined(flat))


def _facts_of_pages(
    store: Store, page: Callable[[Connection, int], _FactsAndNext], position: int | None
) -> Iterator[dict[str, Any]]:
    while position is not None:
        facts, position = store.read(lambda connection, here=position: page(connection, here))  # type: ignore[misc]
        yield from facts


def _joined(facts: dict[str, Any]) -> str:
    return " ".join(f"{name}: {_shown(value)}" for name, value in facts.items())


def _shown(value: Any) -> str:
    if value is None:
        return "OptionalLong.empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    return json_text(value) if isinstance(value, dict) else str(value)


def _print(line: str) -> None:
    # Not by rich: a log has very many lines.
    typer.echo(printable(line))


def _print_json(facts: dict[str, Any]) -> None:
    typer.echo(json_text(facts))
