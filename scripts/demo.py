"""The refunds of a web shop, exactly once: settlement lines in, Spark in between, killed halfway, every cent counted.

Without --input, a year of an invented shop is made.  Without --url, all is in SQLite, in a folder that is printed and
stays.  The exit code is 0 only if every refund was written exactly once.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from sqlalchemy.engine import make_url

from scripts.demo_lines import COLUMNS, InputError, by_invoice, open_input, read_lines
from scripts.demo_produce import REJECTED, SETTLEMENTS, Input, produce
from scripts.demo_query import BATCH_OFFSETS_MAX, BATCHES, GROUP, Driver, batches_in
from scripts.demo_query import Progress as QueryProgress
from scripts.demo_totals import NoAnswerError, Refunds, differences, read_topic
from scripts.demo_year import write_year
from txnstore import KafkaException
from txnstore.admin import AdminClient, NewTopic
from txnstore.db.url import parse_url
from txnstore.errors import TxnStoreError
from txnstore.spark.local_spark import NoJavaError, local_environment

EMITTED: Final = "refunds-emitted"
AUDIT: Final = "refund-audit"
TOPICS: Final = (SETTLEMENTS, REJECTED, EMITTED, AUDIT)
PARTITIONS: Final = 4

#: Countries that the closing table has a line for.
_SHOWN_COUNTRIES: Final = 5
_FAILED: Final = 1
_WRONG_CALL: Final = 2
_INTERRUPTED: Final = 130
#: How long a database is waited for that does not answer, and how long topics take.
_ANSWER_SECONDS: Final = 15.0
_ADMIN_SECONDS: Final = 60.0


class DemoError(Exception):
    """The demonstration cannot be held; its text is what the user reads."""


@dataclass(frozen=True)
class Found:
    """What the consumers counted at the end."""

    settlements: int
    rejected: int
    emitted: Refunds
    audit: Refunds

    def differences_from(self, given: Input) -> list[str]:
        """Return in what it is not the input, a line each."""
        counts = (
            (SETTLEMENTS, self.settlements, given.settlements),
            (REJECTED, self.rejected, given.rejected),
        )
        lines = [f"{topic}: {ours:,} records and not {theirs:,}" for topic, ours, theirs in counts if ours != theirs]
        for topic, refunds in ((EMITTED, self.emitted), (AUDIT, self.audit)):
            lines += [f"{topic}: {line}" for line in differences(given.refunds, refunds)]
        return lines


class Demo:
    """One run of the demonstration."""

    def __init__(self, url: str, folder: Path, console: Console) -> None:
        """Keep what Spark needs in `folder`."""
        self.url = url
        self.folder = folder
        self.console = console
        self._admin = AdminClient({"bootstrap.servers": url})

    def make_topics(self, *, replace: bool) -> None:
        """Create the topics; those of an earlier run are deleted first, if that was asked for."""
        existing = sorted(set(TOPICS) & set(self._admin.list_topics(timeout=_ANSWER_SECONDS).topics))
        if existing and not replace:
            raise DemoError(
                f"the database has the topics {', '.join(existing)} already; --replace deletes them, and what the"
                f" group {GROUP} has read of them"
            )
        if existing:
            for topic_deleted in self._admin.delete_topics(existing).values():
                topic_deleted.result(_ADMIN_SECONDS)
        for created in self._admin.create_topics([NewTopic(topic, PARTITIONS) for topic in TOPICS]).values():
            created.result(_ADMIN_SECONDS)

    def produce(self, path: Path, producers: int) -> Input:
        """Write the settlement lines, an invoice a transaction."""
        given = Input()
        with open_input(path) as stream, self._bar("1  settlement lines", None) as (bar, task):
            transactions = given.counting(by_invoice(read_lines(stream)))
            produce(self.url, transactions, producers, lambda count: bar.advance(task, count))
        self.console.print(
            f"   {given.settlements:,} settlements of {given.invoices:,} invoices, a transaction each;"
            f" {given.rejected:,} lines rejected"
        )
        return given

    def run_query(self, *, crash: bool) -> None:
        """Run the refunds processor to the end of its input, with or without a violent death halfway."""
        environment = local_environment(self.folder)
        checkpoint = self.folder / "checkpoint"
        progress = QueryProgress(self.url)
        batch = max(1, min(BATCH_OFFSETS_MAX, -(-progress.end // BATCHES)))
        try:
            with self._bar("2  refunds, on Spark", progress.end) as (bar, task):

                def run(until: int | None) -> bool:
                    with Driver(
                        self.url, checkpoint, batch, environment=environment, log=self.folder / "spark.log"
                    ) as driver:
                        return driver.run(progress, until, lambda offsets: bar.update(task, completed=offsets))

                # Leaving the driver kills it.
                if crash and progress.end and run(-(-progress.end // 2)):
                    bar.update(task, description="3  killed; once more")
                    planned, finished = batches_in(checkpoint, "offsets"), batches_in(checkpoint, "commits")
                    self.console.print(
                        f"   SIGKILL at offset {progress.offsets():,} of {progress.end:,}; Spark had begun micro-batch"
                        f" {planned} and noted the end of {finished if finished >= 0 else 'none'}",
                        soft_wrap=True,
                    )
                run(None)
        finally:
            progress.close()

    def count(self, given: Input) -> Found:
        """Count what a reader of committed records sees."""
        total = given.settlements + given.rejected + 2 * given.refunds.count
        emitted, audit = Refunds(), Refunds()
        with self._bar("4  what was committed", total) as (bar, task):

            def read(topic: str) -> Iterator[bytes]:
                return read_topic(self.url, topic, lambda count: bar.advance(task, count))

            for topic, refunds in ((EMITTED, emitted), (AUDIT, audit)):
                for value in read(topic):
                    refunds.add_record(value)
            return Found(sum(1 for _ in read(SETTLEMENTS)), sum(1 for _ in read(REJECTED)), emitted, audit)

    @contextmanager
    def _bar(self, title: str, total: int | None) -> Iterator[tuple[Progress, TaskID]]:
        columns = (
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description:<22}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task(title, total=total)
            yield bar, task
            completed = bar.tasks[task].completed
            bar.update(task, total=total or completed)


def closing_table(given: Input, found: Found) -> Table:
    """Return the table of what was given and what was found."""
    table = Table(title="Refunds: what was cancelled, and what was committed", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for heading in ("input", EMITTED, AUDIT):
        table.add_column(heading, justify="right", no_wrap=True)
    columns = (given.refunds, found.emitted, found.audit)
    table.add_row("refunds", *(f"{refunds.count:,}" for refunds in columns))
    table.add_row("invoices", *(f"{len(refunds.invoices):,}" for refunds in columns))
    table.add_row("amount", *(_money(refunds.amount) for refunds in columns), end_section=True)
    countries = given.refunds.countries()
    for country in countries[:_SHOWN_COUNTRIES]:
        table.add_row(
            escape(country),
            *(f"{refunds.counts[country]:,} / {_money(refunds.amounts.get(country))}" for refunds in columns),
        )
    rest = countries[_SHOWN_COUNTRIES:]
    if rest:
        table.add_row(
            f"{len(rest)} others",
            *(
                f"{sum(refunds.counts[country] for country in rest):,} / "
                f"{_money(sum((refunds.amounts.get(country, Decimal(0)) for country in rest), Decimal(0)))}"
                for refunds in columns
            ),
        )
    return table


def _money(amount: Decimal | None) -> str:
    return f"{amount or Decimal(0):,.2f}"


def next_steps(url: str, folder: Path) -> list[str]:
    """Return the commands that show more; none of them has the password in it."""
    parsed = make_url(url)
    address = shlex.quote(str(parse_url(url)))
    if parsed.drivername.startswith("sqlite"):
        view, program = "txnstore_records", f"sqlite3 {shlex.quote(parsed.database or '')}"
    else:
        view, program = "txnstore.records", "psql " + address.replace("+psycopg", "")
    statement = f"SELECT \\\"offset\\\", key, value FROM {view} WHERE topic = '{EMITTED}' LIMIT 5"  # noqa: S608  # names of ours
    return [
        f'{program} "{statement}"',
        f".venv/bin/txnstore topics list --url {address}",
        f".venv/bin/txnstore timeline {EMITTED} --url {address}",
        f"less {shlex.quote(str(folder / 'spark.log'))}",
        "less scripts/refunds.py",
    ]


def read_arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--input", type=Path, metavar="FILE", help=f"CSV, also .gz, with {', '.join(COLUMNS)}")
    parser.add_argument("--rows", type=_number, default=50_000, help="settlement lines to make (50,000)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed makes the same lines (1)")
    parser.add_argument("--url", help="another database: postgresql://user@host/database or sqlite:///path")
    parser.add_argument("--replace", action="store_true", help="delete the topics of an earlier run first")
    parser.add_argument("--no-crash", action="store_true", help="let the query live")
    parser.add_argument("--producers", type=_number, default=2, help="producers at a time (2)")
    return parser.parse_args()


def _number(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def demonstrate(options: argparse.Namespace, console: Console) -> bool:
    """Hold the demonstration; True if every refund was written exactly once."""
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="txnstore-demo-"))
    url = options.url or f"sqlite:///{folder / 'shop.db'}"
    console.print(f"Database {parse_url(url)}, everything else in {folder}", soft_wrap=True, markup=False)
    path = options.input
    if path is None:
        path = folder / "settlements.csv.gz"
        write_year(path, options.rows, options.seed)
    with open_input(path) as stream:
        next(read_lines(stream), None)  # what is not an input is refused before anything is made
    demo = Demo(url, folder, console)
    demo.make_topics(replace=options.replace)
    given = demo.produce(path, options.producers)
    demo.run_query(crash=not options.no_crash)
    found = demo.count(given)
    wrong = found.differences_from(given)
    console.print(closing_table(given, found))
    console.print(f"{found.settlements:,} settlements, {found.rejected:,} rejected lines, ", end="")
    console.print(f"{time.monotonic() - started:.0f} s")
    for reason, count in sorted(given.reasons.items()):
        console.print(f"   rejected: {count:,} {'line' if count == 1 else 'lines'}: {escape(reason)}")
    if wrong:
        console.print("NOT exactly once:", style="bold red")
        for line in wrong:
            console.print(f"   {escape(line)}")
    else:
        console.print("exactly once", style="bold green")
    console.print("\nWhere to look next:")
    for command in next_steps(url, folder):
        console.print(f"   {command}", soft_wrap=True, markup=False)
    return not wrong


def main() -> None:
    """Hold the demonstration that the command line asks for."""
    options = read_arguments()
    # Whoever ends this ends the query with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    console = Console(highlight=False)
    try:
        is_exact = demonstrate(options, console)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except InputError as error:
        console.print(str(error), style="red", markup=False)
        sys.exit(_WRONG_CALL)
    except (DemoError, NoAnswerError, NoJavaError, TxnStoreError) as error:
        console.print(str(error), style="red", markup=False)
        sys.exit(_FAILED)
    except KafkaException as error:
        console.print(error.args[0].str(), style="red", markup=False)
        sys.exit(_FAILED)
    sys.exit(0 if is_exact else _FAILED)


if __name__ == "__main__":
    main()
