"""This file is the command that reads records: alone or as a member of a group, up to the end or for ever."""

from __future__ import annotations

import contextlib
import enum
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer
from sqlalchemy import Connection

from txnstore.cli.completion import complete_group, complete_topic
from txnstore.cli.consume_positions import Positions, Start, StartKind, read_positions
from txnstore.cli.options import Schema, Url, examples, opened
from txnstore.cli.produce import key_values
from txnstore.cli.record_output import DEFAULT_FORMAT, DIRECTIVES, Print, UnknownDirective, print_json, printer
from txnstore.cli.terminal import CommandFailed, hint
from txnstore.cli.times import FORMS, parse_time
from txnstore.clients.brokers import reads_at_leaders
from txnstore.clients.consumer.consumer import Consumer
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.model.message import Message
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.errors import TxnStoreError
from txnstore.model import IsolationLevel
from txnstore.transactions.recovery import abort_overdue

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
_OFFSET: Final = re.compile(r"-?\d{1,19}")


class Isolation(enum.Enum):
    """What is shown."""

    READ_COMMITTED = "read_committed"
    READ_UNCOMMITTED = "read_uncommitted"


def consume(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", autocompletion=complete_topic, help="Where from.")],
    *,
    from_beginning: Annotated[
        bool, typer.Option("--from-beginning", "-b", help="Begin with the first record there is.")
    ] = False,
    offset: Annotated[
        str | None,
        typer.Option("--offset", "-o", metavar="N", help="Begin there; -N: the last N records; or beginning, end."),
    ] = None,
    since: Annotated[
        int | None,
        typer.Option("--since", metavar="TIME", parser=parse_time, help=f"Begin with the first record since {FORMS}."),
    ] = None,
    partition: Annotated[
        list[int] | None, typer.Option("--partition", "-p", min=0, help="Only this one; repeatable.")
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", "-f", metavar="FORMAT", help=f"How a record is printed: {DIRECTIVES}.")
    ] = DEFAULT_FORMAT,
    as_json: Annotated[bool, typer.Option("--json", help="Print each record as a line of JSON.")] = False,
    isolation: Annotated[
        Isolation, typer.Option("--isolation", help="read_uncommitted: open and aborted transactions, too.")
    ] = Isolation.READ_COMMITTED,
    follow: Annotated[
        bool, typer.Option("--follow", "-F", help="At the end, wait for more until Ctrl-C; begin there by default.")
    ] = False,
    count: Annotated[int | None, typer.Option("--count", "-c", min=1, help="Stop after so many records.")] = None,
    group: Annotated[
        str | None,
        typer.Option(
            "--group", "-g", autocompletion=complete_group, help="As a member: go on where it is, and commit."
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option("--config", "-X", metavar="KEY=VALUE", help="A setting of the consumer; repeatable."),
    ] = None,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Read records from the first one up to the end, or from where the options say.

    What a group has read is committed once it is printed.  Nothing is committed without --group.
    """
    start = _start(from_beginning=from_beginning, offset=offset, since=since)
    if group is not None and partition:
        raise typer.BadParameter("a group deals out the partitions itself", param_hint="--partition")
    print_record = print_json if as_json else _printer(format_)
    level = IsolationLevel[isolation.name]
    with opened(url, schema) as cluster:
        where = start or Start(StartKind.END if follow else StartKind.BEGINNING)

        def look(connection: Connection) -> Positions:
            read = reads_at_leaders(cluster, cluster.controller, connection)
            return read_positions(read, connection, topic, partition, where, level)

        positions = cluster.controller.read(look)
        if positions.held_back():
            _end_overdue(cluster)
            positions = cluster.controller.read(look)
    settings: dict[str, Any] = {"auto.offset.reset": "earliest" if group is not None else "error"}
    if not follow:
        # Whoever reads to the end does not wait there for more.
        settings["fetch.wait.max.ms"] = 0
    settings |= key_values(config or [])
    settings |= {
        "bootstrap.servers": url,
        "txnstore.schema": schema,
        "group.id": _NO_GROUP if group is None else group,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "isolation.level": isolation.value,
    }
    reading = _Reading(topic, positions, print_record, follow=follow, count=count, commits=group is not None)
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


class _Reading:
    """One run: prints records until there is nothing left to print."""

    def __init__(
        self, topic: str, positions: Positions, print_record: Print, *, follow: bool, count: int | None, commits: bool
    ) -> None:
        self.count = 0
        self._topic = topic
        self._positions = positions
        self._print = print_record
        self._follow = follow
        self._count_max = count
        self._commits = commits
        self._output = sys.stdout.buffer
        #: The partitions that are read and not at their ends; None: none were dealt out yet.
        self._left: set[int] | None = None

    def assign(self, consumer: Consumer, start: Mapping[int, int]) -> None:
        consumer.assign([TopicPartition(self._topic, number, offset) for number, offset in start.items()])
        self._left = set(start) if self._follow else self._not_at_their_ends(start)

    def subscribe(self, consumer: Consumer, start: Mapping[int, int] | None) -> None:
        def assigned(consumer: Consumer, partitions: Sequence[TopicPartition]) -> None:
            self._left = {partition.partition for partition in partitions}
            if start is not None:
                consumer.assign(
                    [
                        TopicPartition(self._topic, partition.partition, start.get(partition.partition, 0))
                        for partition in partitions
                    ]
                )

        consumer.subscribe([self._topic], on_assign=assigned)

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


def _start(*, from_beginning: bool, offset: str | None, since: int | None) -> Start | None:
    """Return where the user wants to begin; None: wherever is usual."""
    if from_beginning + (offset is not None) + (since is not None) > 1:
        raise typer.BadParameter("begin at one place only: --from-beginning, --offset or --since")
    if from_beginning or offset == "beginning":
        return Start(StartKind.BEGINNING)
    if offset == "end":
        return Start(StartKind.END)
    if since is not None:
        return Start(StartKind.TIME, since)
    if offset is None:
        return None
    if not _OFFSET.fullmatch(offset):
        raise typer.BadParameter(f"{offset[:40]!r} is no offset: N, -N, beginning or end", param_hint="--offset")
    number = int(offset)
    return Start(StartKind.LAST, -number) if offset.startswith("-") else Start(StartKind.OFFSET, number)


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
