"""What it costs that other databases vote: a transaction over one and over two of them, against a plain commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from sqlalchemy.engine import make_url

from scripts.bench_support import VALUE, Bench, Raw, Result
from txnstore import Producer
from txnstore.log.topics import ensure_topic

TRANSACTIONS = 50
PATIENCE_SECONDS = 30.0
#: Four commits, one after the other, where a plain one is one: registered, prepared, decided, committed; and two of
#: them are more than a row.
REACH_PLAIN = 30.0
#: Against what it replaces, which may tear: the transaction and the rows in commits of their own.
REACH_APART = 2.5


def bench_branches(bench: Bench) -> Iterator[Result]:
    """A row in each database and a record in the log, against the row alone in a commit of its own."""
    if bench.raw.is_sqlite:
        return
    if bench.raw.run("SHOW max_prepared_transactions").fetchone() == ("0",):
        return
    bench.store.write(lambda connection: ensure_topic(connection, "bench-branches"))
    with ExitStack() as stack:
        others = []
        for number in range(2):
            name = f"txnstore_bench_{number}"
            bench.raw.run(f"CREATE DATABASE {name}")
            stack.callback(bench.raw.run, f"DROP DATABASE {name} WITH (FORCE)")
            other = Raw(make_url(bench.url).set(database=name).render_as_string(hide_password=False))
            stack.callback(other.close)
            other.run("CREATE TABLE entry (id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, value BYTEA)")
            others.append(other)
        producer = Producer({"bootstrap.servers": bench.url, "transactional.id": "bench-branches"})
        stack.callback(producer.close)
        producer.init_transactions(PATIENCE_SECONDS)
        for count in (1, 2):
            yield from _over(bench, producer, others[:count])


def _over(bench: Bench, producer: Producer, others: list[Raw]) -> Iterator[Result]:
    def write(other: Raw) -> None:
        other.run("INSERT INTO entry (value) VALUES (?)", (VALUE,))

    def ours() -> None:
        for _ in range(TRANSACTIONS):
            for other in others:
                other.run("BEGIN")
            with producer.transaction(PATIENCE_SECONDS):
                for other in others:
                    producer.enlist(other.connection)
                    write(other)
                producer.produce("bench-branches", VALUE, partition=0)

    def plain(*, with_record: bool = False) -> None:
        for _ in range(TRANSACTIONS):
            for other in others if with_record else others[:1]:
                other.run("BEGIN")
                write(other)
                other.run("COMMIT")
            if with_record:
                with producer.transaction(PATIENCE_SECONDS):
                    producer.produce("bench-branches", VALUE, partition=0)

    databases = "one other database" if len(others) == 1 else f"{len(others)} other databases"
    what = (f"a record, and a row in {databases}: enlist()", "one row, a plain commit")
    yield bench.latency(what, TRANSACTIONS, bench.compare(ours, plain), reach=REACH_PLAIN)
    seconds = bench.compare(ours, lambda: plain(with_record=True))
    yield bench.latency(("the same", "the same in commits of their own"), TRANSACTIONS, seconds, reach=REACH_APART)


BENCHES = (bench_branches,)
