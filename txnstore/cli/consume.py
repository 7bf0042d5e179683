"""The command that reads records: alone or as a member of a group, up to the end or for ever."""

from __future__ import annotations

import contextlib
import enum
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer
from sqlalchemy import Connection, bindparam, exists, not_, select

from txnstore.cli.options import (
    FORMS,
    Schema,
    Url,
    complete_group,
    complete_topic,
    examples,
    key_values,
    opened,
    parse_time,
)
from txnstore.cli.output import CommandFailed, hint
from txnstore.cli.records import DEFAULT_FORMAT, DIRECTIVES, Print, UnknownDirective, print_json, printer
from txnstore.clients.brokers import Reads, reads_at_leaders
from txnstore.clients.consumer.consumer import Consumer
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.model.message import Message
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.schema import finished_transactions, record_batches
from txnstore.errors import TxnStoreError
from txnstore.log.bounds import Bounds, offset_for_time, read_bounds
from txnstore.log.fetch import PAGE_BATCHES_MAX
from txnstore.log.topics import get_topic
from txnstore.model import ControlType, IsolationLevel
from txnstore.transactions.recovery import abort_overdue

_LAST_BATCHES: Final = (
    select(record_batches.c.last_offset, record_batches.c.record_count)
    .where(record_batches.c.partition_id == bindparam("of_partition_id"))
    .where(record_batches.c.last_offset < bindparam("end_offset"))
    .where(record_batches.c.control_type.is_(None))
    .order_by(record_batches.c.last_offset.desc())
    .limit(PAGE_BATCHES_MAX)
)
_NOT_ABORTED: Final = not_(
    exists()
    .where(finished_transactions.c.partition_id == record_batches.c.partition_id)
    .where(finished_transactions.c.producer_id == record_batches.c.producer_id)
    .where(finished_transactions.c.producer_epoch == record_batches.c.producer_epoch)
    .where(finished_transactions.c.outcome == int(ControlType.ABORT))
    .where(record_batches.c.is_transactional)
)


class StartKind(enum.Enum):
    """How the place is named where a reading begins."""

    BEGINNING = "beginning"
    END = "end"
    OFFSET = "offset"
    LAST = "the last records"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class ReadingStart:
    """Where a reading begins, in every partition."""

    kind: StartKind
    number: int = 0
    """The offset, how many records, or the time in milliseconds since 1970."""


@dataclass(frozen=True, slots=True)
class ReadingBounds:
    """The bounds of a reading when it began, by partition number."""

    topic: str
    start: dict[int, int]
    end: dict[int, int]
    """What the reader cannot see, or what came later, begins here."""

    high_watermark: dict[int, int]

    def held_back(self) -> list[str]:
        """Return for people what was not shown because its transaction is open."""
        return [
            f"{self.topic}-{number}: the offsets {end} to {self.high_watermark[number] - 1} wait for an open"
            " transaction; --isolation read_uncommitted shows them"
            for number, end in self.end.items()
            if end < self.high_watermark[number]
        ]


def read_positions(  # noqa: PLR0917 - where, and what
    read: Reads,
    connection: Connection,
    topic: str,
    numbers: Sequence[int] | None,
    start: ReadingStart,
    isolation: IsolationLevel,
) -> ReadingBounds:
    """Return where a reading of these partitions, or of all, begins and ends.

    Raises:
        UnknownTopicOrPartition: there is no such topic, or no such partition in it.
        CommandFailed: the offset is outside the bounds of a partition.
    """
    found = get_topic(connection, topic)
    chosen = range(len(found.partition_ids)) if numbers is None else list(dict.fromkeys(numbers))
    ids = {number: found.partition_id(number) for number in chosen}
    names = {partition_id: f"{topic}-{number}" for number, partition_id in ids.items()}

    def look(opened: Connection, partition_ids: list[int]) -> dict[int, tuple[Bounds, int]]:
        return {
            partition_id: (bounds, _start_offset(opened, names[partition_id], bounds, start, isolation))
            for partition_id, bounds in read_bounds(opened, partition_ids).items()
        }

    found_at = read(list(names), look)
    of = {number: found_at[partition_id][0] for number, partition_id in ids.items()}
    return ReadingBounds(
        topic,
        {number: found_at[partition_id][1] for number, partition_id in ids.items()},
        {number: of[number].end(isolation) for number in ids},
        {number: of[number].high_watermark for number in ids},
    )


def _start_offset(
    connection: Connection, name: str, bounds: Bounds, start: ReadingStart, isolation: IsolationLevel
) -> int:
    end = bounds.end(isolation)
    if start.kind is StartKind.BEGINNING:
        return bounds.log_start_offset
    if start.kind is StartKind.END:
        return end
    if start.kind is StartKind.LAST:
        return _start_of_last(connection, bounds, start.number, isolation)
    if start.kind is StartKind.TIME:
        found = offset_for_time(connection, bounds.partition_id, start.number, isolation)
        return end if found is None else found.offset
    if not bounds.log_start_offset <= start.number <= bounds.high_watermark:
        raise CommandFailed(
            f"{name} has the offsets {bounds.log_start_offset} to {bounds.high_watermark}, not {start.number};"
            " choose a partition with --partition"
        )
    return start.number


def _start_of_last(connection: Connection, bounds: Bounds, count: int, isolation: IsolationLevel) -> int:
    """Return the offset from which on the reader sees this many records; markers and aborted records do not count."""
    end = bounds.end(isolation)
    if count == 0:
        return end
    statement = _LAST_BATCHES if isolation is IsolationLevel.READ_UNCOMMITTED else _LAST_BATCHES.where(_NOT_ABORTED)
    missing = count
    while True:
        rows = connection.execute(statement, {"of_partition_id": bounds.partition_id, "end_offset": end}).all()
        for row in rows:
            if row.record_count >= missing:
                # Within a batch that compaction has thinned out a few more may come.
                return max(bounds.log_start_offset, int(row.last_offset) - missing + 1)
            missing -= row.record_count
        if len(rows) < PAGE_BATCHES_MAX or rows[-1].last_offset < bounds.log_start_offset:
            return bounds.log_start_offset
        end = rows[-1].last_offset


EXAMPLES: Final = examples(
    "txnstore consume orders",
    r"txnstore consume orders --since 15m -f '%p:%o %k = %s\n'",
    "txnstore consume orders --offset -10 --follow --json",
    "txnstore consume orders --group billing --count 100",
)

#: Written and, with a group, committed together.
_PAGE_RECORDS: Final = 500
_POLL_SECONDS: Final = 0.2
#: A consumer needs a group; this one commits nothing.
_NO_GROUP: Final = "txnstore-cli"
_ORDER: Final = "txnstore.delivery.order"
_OFFSET: Final = re.compile(r"-?\d{1,19}")


class Isolation(enum.Enum):
    """What is shown."""

    READ_COMMITTED = "read_committed"
    READ_UNCOMMITTED = "read_uncommitted"


def consume(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", autocompletion=complete_topic, help="The topic to read.")],
    *,
    from_beginning: Annotated[
        bool, typer.Option("--from-beginning", "-b", help="Begin with the first record.")
    ] = False,
    offset: Annotated[
        str | None,
        typer.Option(
            "--offset", "-o", metavar="N", help="Begin at this offset; -N: the last N records; or: beginning, end."
        ),
    ] = None,
    since: Annotated[
        int | None,
        typer.Option("--since", metavar="TIME", parser=parse_time, help=f"Begin with the first record since {FORMS}."),
    ] = None,
    partition: Annotated[
        list[int] | None, typer.Option("--partition", "-p", min=0, help="Only this partition; repeatable.")
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", "-f", metavar="FORMAT", help=f"How a record is printed: {DIRECTIVES}.")
    ] = DEFAULT_FORMAT,
    as_json: Annotated[bool, typer.Option("--json", help="Print each record as a line of JSON.")] = False,
    isolation: Annotated[
        Isolation, typer.Option("--isolation", help="read_uncommitted shows open and aborted transactions, too.")
    ] = Isolation.READ_COMMITTED,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-F", help="Begin at the end, unless told otherwise, and wait for more until Ctrl-C."),
    ] = False,
    count: Annotated[int | None, typer.Option("--count", "-c", min=1, help="Stop after this many records.")] = None,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            "-g",
            autocompletion=complete_group,
            help="Read as a member of this group: go on where it is, and commit.",
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option("--config", "-X", metavar="KEY=VALUE", help="A setting of the consumer; repeatable."),
    ] = None,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Read records from the first one up to the end, or as the options say.

    What a group has read is committed once it is printed, and where it is told to begin at once.  Nothing is committed
    without --group.
    """
    start = _start(from_beginning=from_beginning, offset=offset, since=since)
    if group is not None and partition:
        raise typer.BadParameter("a group assigns the partitions itself", param_hint="--partition")
    wanted = key_values(config or [])
    if group is not None and wanted.get(_ORDER, "offset") != "offset":
        # The ends of a reading are offsets, and what is committed is one: in commit order neither would be true.
        raise typer.BadParameter(
            f"a group is read in the order of offsets here; {_ORDER} is for programs", param_hint="--config"
        )
    print_record = print_json if as_json else _printer(format_)
    level = IsolationLevel[isolation.name]
    with opened(url, schema) as cluster:
        where = start or ReadingStart(StartKind.END if follow else StartKind.BEGINNING)

        def look(connection: Connection) -> ReadingBounds:
            read = reads_at_leaders(cluster, cluster.controller, connection)
            return read_positions(read, connection, topic, partition, where, level)

        positions = cluster.controller.read(look)
        if positions.held_back():
            _end_overdue(cluster)
            positions = cluster.controller.read(look)
    settings: dict[str, Any] = {"auto.offset.reset": "earliest" if group is not None else "error"}
    if not follow:
        # A reading up to the end does not wait there for more.
        settings["fetch.wait.max.ms"] = 0
    settings |= wanted
    settings |= {
        "bootstrap.servers": url,
        "txnstore.schema": schema,
        "group.id": _NO_GROUP if group is None else group,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "isolation.level": isolation.value,
    }
    reading = _ConsumeRun(topic, positions, print_record, follow=follow, count=count, commits=group is not None)
    consumer = _consumer(settings)
    try:
        if group is None:
            reading.assign(consumer, positions.start)
        else:
            reading.subscribe(consumer, positions.start if start is not None else None)
        reading.run(consumer)
    finally:
        consumer.close()
    if not follow and (count is None or reading.count < count):
        for line in positions.held_back():
            hint(line)


def _end_overdue(cluster: Cluster) -> None:
    """End transactions whose time is up: this reader is gone before anybody could tell it of their ends."""
    for store in cluster.stores():
        with contextlib.suppress(TxnStoreError):
            while abort_overdue(store, cluster) == 0:
                pass


class _ConsumeRun:
    """One run: prints records until there is nothing left to print."""

    def __init__(
        self,
        topic: str,
        positions: ReadingBounds,
        print_record: Print,
        *,
        follow: bool,
        count: int | None,
        commits: bool,
    ) -> None:
        self.count = 0
        self._topic = topic
        self._positions = positions
        self._print = print_record
        self._follow = follow
        self._count_max = count
        self._commits = commits
        self._output = sys.stdout.buffer
        #: The partitions that are read and not at their ends; None: not assigned yet.
        self._left: set[int] | None = None
        #: Those of a group that this run has begun: where it was to begin is of no account any more.
        self._begun: set[int] = set()

    def assign(self, consumer: Consumer, start: Mapping[int, int]) -> None:
        consumer.assign([TopicPartition(self._topic, number, offset) for number, offset in start.items()])
        self._left = set(start) if self._follow else self._not_at_their_ends(start)

    def subscribe(self, consumer: Consumer, start: Mapping[int, int] | None) -> None:
        def assigned(consumer: Consumer, partitions: Sequence[TopicPartition]) -> None:
            self._left = {partition.partition for partition in partitions}
            if start is None:
                return
            new = [
                TopicPartition(self._topic, partition.partition, start.get(partition.partition, 0))
                for partition in partitions
                if partition.partition not in self._begun
            ]
            # Once: what this or another member commits after that counts.
            consumer.assign([*new, *(partition for partition in partitions if partition.partition in self._begun)])
            if new:
                self._begin(consumer, new)

        consumer.subscribe([self._topic], on_assign=assigned)

    def _begin(self, consumer: Consumer, new: list[TopicPartition]) -> None:
        """Commit where partitions begin: whoever has them next goes on there, though nothing was printed of them."""
        try:
            consumer.commit(offsets=new, asynchronous=False)
        except KafkaException as error:
            if error.args[0] != KafkaError.ILLEGAL_GENERATION:
                raise
            # They are about to go to somebody else, and are not begun.
        else:
            self._begun.update(partition.partition for partition in new)

    def run(self, consumer: Consumer) -> None:
        while not self._is_done():
            first = consumer.poll(_POLL_SECONDS)
            if first is None:
                continue
            room = _PAGE_RECORDS if self._count_max is None else min(_PAGE_RECORDS, self._count_max - self.count)
            messages = [first, *consumer.consume(room - 1, 0)] if room > 1 else [first]
            try:
                printed = self._print_page(messages)
            finally:
                self._output.flush()
            if self._commits and printed:
                consumer.commit(
                    offsets=[TopicPartition(self._topic, number, offset) for number, offset in printed.items()],
                    asynchronous=False,
                )

    def _is_done(self) -> bool:
        if self._count_max is not None and self.count >= self._count_max:
            return True
        return not self._follow and self._left is not None and not self._left

    def _print_page(self, messages: Sequence[Message]) -> dict[int, int]:
        """Print records; return where each partition goes on."""
        printed: dict[int, int] = {}
        for message in messages:
            error = message.error()
            number = message.partition()
            if error is not None:
                if error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                self._ended(number)
                continue
            offset = message.offset()
            assert number is not None
            assert offset is not None
            if not self._follow and offset >= self._positions.end.get(number, offset + 1):
                # It came after the command began: otherwise a busy topic would have no end.
                self._ended(number)
                continue
            self._output.write(self._print(message))
            self.count += 1
            printed[number] = offset + 1
        return printed

    def _ended(self, number: int | None) -> None:
        if self._left is not None and number is not None:
            self._left.discard(number)

    def _not_at_their_ends(self, start: Mapping[int, int]) -> set[int]:
        return {number for number, offset in start.items() if offset < self._positions.end[number]}


def _start(*, from_beginning: bool, offset: str | None, since: int | None) -> ReadingStart | None:
    """Return where the user wants to begin; None: wherever is usual."""
    if from_beginning + (offset is not None) + (since is not None) > 1:
        raise typer.BadParameter("begin at one place only: --from-beginning, --offset or --since")
    if from_beginning or offset == "beginning":
        return ReadingStart(StartKind.BEGINNING)
    if offset == "end":
        return ReadingStart(StartKind.END)
    if since is not None:
        return ReadingStart(StartKind.TIME, since)
    if offset is None:
        return None
    if not _OFFSET.fullmatch(offset):
        raise typer.BadParameter(
            f"{offset[:40]!r} is not an offset: give N, -N, beginning or end", param_hint="--offset"
        )
    number = int(offset)
    return ReadingStart(StartKind.LAST, -number) if offset.startswith("-") else ReadingStart(StartKind.OFFSET, number)


def _printer(format_: str) -> Print:
    try:
        return printer(format_)
    except UnknownDirective as error:
        raise typer.BadParameter(str(error), param_hint="--format") from None


def _consumer(settings: dict[str, Any]) -> Consumer:
    try:
        return Consumer(settings)
    except (TypeError, ValueError) as error:
        raise CommandFailed(str(error)) from None
