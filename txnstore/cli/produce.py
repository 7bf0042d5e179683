"""The command that writes records: from files or the standard input, in one transaction if wanted."""

from __future__ import annotations

import functools
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, NamedTuple

import typer

from txnstore.cli.options import Schema, Url, complete_topic, examples, key_values, opened
from txnstore.cli.output import FAILED, CommandFailed, error_text, exit_code, hint, records_were
from txnstore.cli.progress import ProgressBar, progress_bar
from txnstore.cli.records import InputRecord, NotARecord, Parse, line_parser, parse_json_line, unescape
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.model.message import Message
from txnstore.clients.producer.producer import Producer
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.log.topics import check_topic_name, find_topics
from txnstore.model import Header

EXAMPLES: Final = examples(
    "echo hello | txnstore produce greetings",
    r"txnstore produce users users.tsv --key-separator '\t'",
    "txnstore produce orders day.jsonl --json-lines --transactional-id load-day",
)

#: The name of the standard input among files.
_STDIN: Final = "-"
#: How long the queue is waited for before it is looked at again.
_QUEUE_SECONDS: Final = 0.1
#: How long the calls of a transaction, and what is queued when the user gives up, may take.
_CALL_SECONDS: Final = 60.0
_DELIVERY_MS: Final = 60_000
#: After these a record may be in the log all the same: its write was under way, and the answer did not come.
_MAY_BE_WRITTEN: Final = frozenset({KafkaError._MSG_TIMED_OUT, KafkaError._TIMED_OUT, KafkaError._PURGE_INFLIGHT})
#: So many places are named in a message.
_PLACES_MAX: Final = 20
#: What of the settings is the command's own.
_INSTEAD: Final = {
    "delivery.report.only.error": "this command counts what is delivered, and needs all reports",
    "transactional.id": "give --transactional-id, which writes all of the input in one transaction",
}
_NOTHING_COMMITTED: Final = "nothing was committed"
#: How often, in lines, the bar is moved and delivery reports are served.
_LINES_BETWEEN_LOOKS: Final = 100


class _InputPlace(NamedTuple):
    """Where a record was read."""

    name: str
    line: int

    def __str__(self) -> str:
        return f"{self.name}, line {self.line}"


class _NotWritten(Exception):
    """A record was not written."""

    def __init__(self, place: _InputPlace, error: KafkaError, partition: int | None) -> None:
        super().__init__(str(place))
        self.place, self.error, self.partition = place, error, partition


class _Reports:
    """What became of the records."""

    def __init__(self) -> None:
        self.delivered = 0
        self.failed = 0
        self.unknown = 0
        """How many records have an unknown outcome."""

        self._trouble = ""
        self._delivered_since: set[int | None] = set()
        """The partitions for which the last trouble has passed."""
        self._failure: _NotWritten | None = None
        self._places: list[_InputPlace] = []
        """Of the first that were not delivered, or may not have been."""

    def note_trouble(self, error: KafkaError) -> None:
        # That all brokers are down comes after why.
        if error != KafkaError._ALL_BROKERS_DOWN:
            self._trouble = error.str()
            self._delivered_since.clear()

    def add(self, place: _InputPlace, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.delivered += 1
            self._delivered_since.add(message.partition())
            return
        if error.code() in _MAY_BE_WRITTEN:
            self.unknown += 1
        else:
            self.failed += 1
        if len(self._places) < _PLACES_MAX:
            self._places.append(place)
        if self._failure is None:
            has_passed = not self._trouble or message.partition() in self._delivered_since
            if error == KafkaError._MSG_TIMED_OUT and not has_passed:
                # What it may have waited for: which of several databases is away, for example.
                error = KafkaError(error.code(), f"{error.str()}; the last trouble was: {self._trouble}")
            self._failure = _NotWritten(place, error, message.partition())

    def places(self) -> str:
        """Return where they were read, by their files."""
        lines: dict[str, list[int]] = {}
        for place in sorted(self._places):
            lines.setdefault(place.name, []).append(place.line)
        named = [
            f"{name}, line{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
            for name, numbers in lines.items()
        ]
        more = self.failed + self.unknown - len(self._places)
        return "; ".join(named) + (f", and {more} more" if more else "")

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def produce(
    topic: Annotated[
        str, typer.Argument(metavar="TOPIC", autocompletion=complete_topic, help="The topic to write to.")
    ],
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE]...", help="The files to read; without one, or for -, the standard input."),
    ] = None,
    *,
    json_lines: Annotated[
        bool,
        typer.Option(
            "--json-lines",
            "-j",
            help="Each line is a JSON object with key, value, headers, partition and timestamp (milliseconds; 0: now),"
            ' all optional; bytes that are not text are {"base64": "..."}. `consume --json` prints such lines.',
        ),
    ] = False,
    key_separator: Annotated[
        str | None,
        typer.Option("--key-separator", "-K", metavar="TEXT", help=r"What ends a key and begins a value; \t is a tab."),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header of every record; repeatable."),
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option("--partition", "-p", min=0, max=2**31 - 1, help="The partition; default: chosen by the key."),
    ] = None,
    transactional_id: Annotated[
        str | None,
        typer.Option(
            "--transactional-id", "-t", metavar="ID", help="Write all of the input in one transaction, or nothing."
        ),
    ] = None,
    transaction_timeout: Annotated[
        int,
        typer.Option("--transaction-timeout", metavar="SECONDS", min=1, max=2_147_483, help="How long it may take."),
    ] = 60,
    config: Annotated[
        list[str] | None,
        typer.Option("--config", "-X", metavar="KEY=VALUE", help="A setting of the producer; repeatable."),
    ] = None,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Write records: one for each line, as it is, or with a key, or as JSON.

    A record counts as written once it is durable; the number of them is printed at the end, to the standard error.
    Without a transaction what was written by the time that an error is seen stays written.
    """
    parse = _parser(json_lines=json_lines, key_separator=key_separator, headers=header or [])
    timeout_ms = transaction_timeout * 1000
    # A record is tried for no longer than its transaction may take.
    delivery_ms = _DELIVERY_MS if transactional_id is None else min(_DELIVERY_MS, timeout_ms)
    wanted = key_values(config or [])
    for name in _INSTEAD.keys() & wanted.keys():
        raise typer.BadParameter(f"{name}: {_INSTEAD[name]}", param_hint="--config")
    settings: dict[str, Any] = {"message.timeout.ms": delivery_ms} | wanted
    settings |= {"bootstrap.servers": url, "txnstore.schema": schema}
    if transactional_id is not None:
        settings |= {"transactional.id": transactional_id, "transaction.timeout.ms": timeout_ms}
    check_topic_name(topic)
    # So that neither a wrong URL nor an empty database gets tables.
    with opened(url, schema) as cluster:
        if not cluster.controller.read(lambda connection: find_topics(connection, [topic])):
            # A misspelt name makes a topic, as everywhere in Kafka; it should not do so unseen.
            hint(f"there is no topic {topic} yet; the first record creates it")
    with ExitStack() as stack:
        sources = _sources(files or [_STDIN], stack)
        reports = _Reports()
        producer = _producer(settings | {"error_cb": reports.note_trouble})
        try:
            is_transactional = transactional_id is not None
            _Writing(producer, topic, parse, partition, reports, is_transactional=is_transactional).write(sources)
        finally:
            producer.close()


class _Writing:
    """One run: reads every line, queues its record, and brings it to an end that the user understands."""

    def __init__(
        self,
        producer: Producer,
        topic: str,
        parse: Parse,
        partition: int | None,
        reports: _Reports,
        *,
        is_transactional: bool,
    ) -> None:
        self._producer = producer
        self._topic = topic
        self._parse = parse
        self._partition = partition
        self._is_transactional = is_transactional
        self._is_committing = False
        self._reports = reports
        self._last: _InputPlace | None = None

    def write(self, sources: list[tuple[str, BinaryIO, int | None]]) -> None:
        producer = self._producer
        try:
            if self._is_transactional:
                producer.init_transactions(_CALL_SECONDS)
                producer.begin_transaction()
            sizes = [size for _, _, size in sources if size is not None]
            is_known = len(sizes) == len(sources)
            with progress_bar("writing", total=sum(sizes), in_bytes=True, is_shown=is_known) as bar:
                for name, source, _ in sources:
                    self._read(name, source, bar)
            self._flush()
            if self._is_transactional:
                self._is_committing = True
                producer.commit_transaction(_CALL_SECONDS)
        except KeyboardInterrupt:
            hint(self._given_up()[0])
            raise
        except _NotWritten as failed:
            reason = f"{failed.place}: {self._reason(failed)}"
            raise self._failure(reason, exit_code(KafkaException(failed.error))) from None
        except (CommandFailed, KafkaException) as error:
            raise self._failure(error_text(error), exit_code(error)) from None
        hint(f"{records_were(self._reports.delivered)} written to {self._topic}")

    def _read(self, name: str, source: BinaryIO, bar: ProgressBar) -> None:
        read_bytes = 0
        try:
            for number, line in enumerate(source, 1):
                read_bytes += len(line)
                self._queue(line.removesuffix(b"\n"), _InputPlace(name, number))
                if number % _LINES_BETWEEN_LOOKS == 0:
                    self._look()
                    bar.advance(read_bytes)
                    read_bytes = 0
        except OSError as error:
            raise CommandFailed(f"{name}: {error.strerror}") from None
        bar.advance(read_bytes)
        self._look()

    def _queue(self, line: bytes, place: _InputPlace) -> None:
        self._last = place
        if self._parse is parse_json_line and not line.strip():
            # As the end of a file may be that was put together.
            return
        try:
            record = self._parse(line)
        except NotARecord as error:
            raise CommandFailed(f"{place}: {error}") from None
        while True:
            try:
                self._produce(record, place)
            except BufferError:
                self._producer.poll(_QUEUE_SECONDS)
                self._reports.raise_failure()
            except KafkaException as error:
                raise _NotWritten(place, error.args[0], self._partition_of(record)) from None
            else:
                return

    def _partition_of(self, record: InputRecord) -> int | None:
        return self._partition if record.partition is None else record.partition

    def _produce(self, record: InputRecord, place: _InputPlace) -> None:
        options: dict[str, Any] = {}
        partition = self._partition_of(record)
        if partition is not None:
            options["partition"] = partition
        if record.timestamp_ms is not None:
            options["timestamp"] = record.timestamp_ms
        self._producer.produce(
            self._topic,
            record.value,
            record.key,
            on_delivery=functools.partial(self._reports.add, place),
            headers=list(record.headers) or None,
            **options,
        )

    def _look(self) -> None:
        self._producer.poll(0)
        self._reports.raise_failure()

    def _flush(self) -> None:
        while self._producer.flush(1.0):
            self._reports.raise_failure()
        self._reports.raise_failure()

    def _reason(self, failed: _NotWritten) -> str:
        if failed.error == KafkaError._UNKNOWN_PARTITION:
            with suppress(KafkaException):
                if count := len(self._producer.list_topics(self._topic, _CALL_SECONDS).topics[self._topic].partitions):
                    partitions = "1 partition" if count == 1 else f"{count} partitions"
                    return (
                        f"topic {self._topic} has {partitions}, numbered from 0: there is no partition"
                        f" {failed.partition}"
                    )
        return failed.error.str()

    def _failure(self, reason: str, code: int) -> CommandFailed:
        what_became, is_nothing_written = self._given_up()
        # The same call may only be made again if it writes nothing twice.
        return CommandFailed(f"{reason}; {what_became}", code=code if is_nothing_written else FAILED)

    def _given_up(self) -> tuple[str, bool]:
        """Say what came of what was begun, and whether it is known that nothing is in the log.

        Closing the producer aborts a transaction, and waits for that.
        """
        producer = self._producer
        if self._is_transactional:
            if self._is_committing:
                try:
                    producer.abort_transaction(_CALL_SECONDS)
                except (KafkaException, KeyboardInterrupt):
                    # Its end was asked for already, or the user does not wait for it.
                    return "it is not known whether it was committed", False
            return _NOTHING_COMMITTED, True
        try:
            left = producer.flush(_CALL_SECONDS)
        except KeyboardInterrupt:
            # Once more: the user does not wait, but is told.
            left = len(producer)
        unknown = left + self._reports.unknown
        written, failed = f"{records_were(self._reports.delivered)} written", self._reports.failed
        # Records of other partitions go on while one fails: what was written may stand behind it.
        if failed:
            written += f", and {failed} {'was' if failed == 1 else 'were'} not"
        if unknown:
            written += f", and of {unknown} that is not known"
        if failed + self._reports.unknown and self._last is not None:
            written += f" ({self._reports.places()}); {self._last} was the last to be read"
        return written if failed or unknown else f"{written} before", not (self._reports.delivered or unknown)


def _parser(*, json_lines: bool, key_separator: str | None, headers: list[str]) -> Parse:
    if json_lines:
        if key_separator is not None or headers:
            raise typer.BadParameter("with --json-lines, key and headers are in the line", param_hint="--json-lines")
        return parse_json_line
    separator = None if key_separator is None else unescape(key_separator)
    if separator is not None and (not separator or b"\n" in separator):
        raise typer.BadParameter("a separator must not be empty or contain a line break", param_hint="--key-separator")
    pairs: list[Header] = []
    for text in headers:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--header")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise typer.BadParameter("the name of a header is not UTF-8", param_hint="--header") from None
        pairs.append((name, value.encode("utf-8", "surrogateescape")))
    return line_parser(separator, tuple(pairs))


def _producer(settings: dict[str, Any]) -> Producer:
    try:
        return Producer(settings)
    except (TypeError, ValueError) as error:
        raise CommandFailed(str(error)) from None


def _sources(files: list[str], stack: ExitStack) -> list[tuple[str, BinaryIO, int | None]]:
    """Open all of the input before anything is written: name, lines, and size if it is known."""
    sources: list[tuple[str, BinaryIO, int | None]] = []
    for name in files:
        if name == _STDIN:
            if sys.stdin is None:
                raise CommandFailed("standard input is closed")
            sources.append(("standard input", sys.stdin.buffer, None))
            continue
        try:
            path = Path(name)
            source = stack.enter_context(path.open("rb"))
            sources.append((name, source, path.stat().st_size if path.is_file() else None))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "this is not a path"
            raise CommandFailed(f"{name}: {reason}") from None
    return sources
