"""What a transaction costs in commits and statements: the numbers are pinned, so that they go up only on purpose."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from sqlalchemy import Engine, event, insert

from tests.tools.crashes import is_commit
from txnstore.db.schema import group_members
from txnstore.transactions.transaction import SentOffsets


@dataclass
class Counted:
    commits: int = 0
    statements: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([f"{self.commits} commits", *(statement[:100] for statement in self.statements)])


@contextmanager
def counted(engine: Engine) -> Iterator[Counted]:
    counts = Counted()
    this_thread = threading.get_ident()

    def note(connection, cursor, statement: str, *_: object) -> None:
        # What a client of an earlier test still does with the shared store is not counted.
        if threading.get_ident() != this_thread:
            return
        # A BEGIN that finds the file locked for a moment is tried again.
        if not (statement.startswith("BEGIN") and counts.statements[-1:] == [statement]):
            counts.statements.append(statement)
        counts.commits += is_commit(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield counts
    finally:
        event.remove(engine, "before_cursor_execute", note)


def warm_up(bench, producer, offsets_of: Callable, *, with_offsets: bool) -> None:
    """Run a transaction of the same kind, so that group and producer are known."""
    offsets = [offsets_of(bench.prefix, {bench.partition_ids[1]: 1})] if with_offsets else []
    producer.commit(appends=[producer.batch(bench.partition_ids[0], b"a")], offsets=offsets)


def give_a_member_to(bench, producer, sent: SentOffsets) -> None:
    """Let a group that has committed offsets have a member."""
    producer.commit(offsets=[sent])
    member = {
        "group_id": sent.committer.group_id,
        "member_id": "member",
        "client_id": "client",
        "generation": 0,
        "session_timeout_ms": 45_000,
        "deadline_ms": 0,
        "subscription": "{}",
        "assignment": "{}",
    }
    bench.store.write(lambda connection: connection.execute(insert(group_members), member))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("with_offsets", [False, True], ids=["records", "records and offsets"])
def test_a_small_transaction_that_is_still_buffered_costs_one_commit(
    bench, offsets_of: Callable, monkeypatch: pytest.MonkeyPatch, with_offsets: bool
) -> None:
    monkeypatch.setattr(bench.store, "commits_whole", False)
    producer = bench.started()
    warm_up(bench, producer, offsets_of, with_offsets=with_offsets)
    # Who is in other groups is looked up only for them.
    give_a_member_to(bench, producer, offsets_of(f"{bench.prefix}-other", {bench.partition_ids[1]: 1}))
    appends = [producer.batch(bench.partition_ids[0], b"b")]
    offsets = [offsets_of(bench.prefix, {bench.partition_ids[1]: 2})] if with_offsets else []
    with counted(bench.store.engine) as counts:
        producer.commit(appends=appends, offsets=offsets)
    assert counts.commits == 1, str(counts)
    # BEGIN, coordinator's row, head, producers; batch and marker, head, producer, the commit's number, index of ended
    # transactions, with offsets the group and its offsets, coordinator's row, journal; COMMIT.
    assert len(counts.statements) == (14 if with_offsets else 12), str(counts)
    assert bench.read(bench.partition_ids[0])[-1] == b"b"


@pytest.mark.parametrize("with_offsets", [False, True], ids=["records", "records and offsets"])
def test_where_the_database_commits_it_at_once_it_costs_one_statement(
    bench, offsets_of: Callable, monkeypatch: pytest.MonkeyPatch, with_offsets: bool
) -> None:
    if bench.store.backend.commit_whole is None:
        pytest.skip("this database has no statement for whole transactions")
    monkeypatch.setattr(bench.store, "commits_whole", True)
    producer = bench.started()
    warm_up(bench, producer, offsets_of, with_offsets=with_offsets)
    appends = [producer.batch(number, b"b") for number in bench.partition_ids]
    offsets = [offsets_of(bench.prefix, {bench.partition_ids[1]: 2})] if with_offsets else []
    with counted(bench.store.engine) as counts:
        producer.commit(appends=appends, offsets=offsets)
    assert (counts.commits, len(counts.statements)) == (1, 1), str(counts)
    assert [bench.read(number)[-1] for number in bench.partition_ids] == [b"b", b"b"]


@pytest.mark.parametrize("with_offsets", [False, True], ids=["records", "records and offsets"])
def test_where_the_database_has_no_such_function_nothing_is_read_but_the_heads(
    bench, offsets_of: Callable, monkeypatch: pytest.MonkeyPatch, with_offsets: bool
) -> None:
    monkeypatch.setattr(bench.store, "commits_whole", True)
    monkeypatch.setattr(bench.store, "general_until_seconds", math.inf)
    producer = bench.started()
    warm_up(bench, producer, offsets_of, with_offsets=with_offsets)
    appends = [producer.batch(bench.partition_ids[0], b"b")]
    offsets = [offsets_of(bench.prefix, {bench.partition_ids[1]: 2})] if with_offsets else []
    with counted(bench.store.engine) as counts:
        producer.commit(appends=appends, offsets=offsets)
    # BEGIN, coordinator's row, head, the commit's number; batch and marker, head, producer, index of ended
    # transactions, with offsets the group and its offsets, journal; COMMIT. And the time, if it is a server's.
    asks_server = bench.store.backend.name != "sqlite" and bench.store.clock is None
    assert (counts.commits, len(counts.statements)) == (1, (12 if with_offsets else 10) + asks_server), str(counts)


def test_offsets_that_cannot_wait_and_the_commit_behind_them_read_nothing_but_the_head(
    bench, offsets_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.store, "commits_whole", True)
    monkeypatch.setattr(bench.store, "general_until_seconds", math.inf)
    producer = bench.started()
    asks_server = bench.store.backend.name != "sqlite" and bench.store.clock is None
    for offset in range(3):
        appends = [producer.batch(bench.partition_ids[0], b"b")]
        with counted(bench.store.engine) as sent:
            producer.coordinator.send_offsets(
                producer.transactional_id,
                producer.identity,
                offsets_of(bench.prefix, {bench.partition_ids[1]: offset}),
                has_begun=False,
            )
        with counted(bench.store.engine) as ended:
            producer.commit(appends=appends, has_begun=True, open_group_id=bench.prefix)
    # BEGIN, the coordinator's row with its group, the group and its offsets, the journal; COMMIT.
    assert (sent.commits, len(sent.statements)) == (1, 7 + asks_server), str(sent)
    # BEGIN, coordinator's row, its group, and that there is no more; head, the commit's number; batch and marker, head,
    # producer, index of ended transactions; group, its offsets, those that waited; journal; COMMIT.
    assert (ended.commits, len(ended.statements)) == (1, 15 + asks_server), str(ended)
    assert bench.offsets(bench.prefix).offsets[bench.partition_ids[1]].offset == 2


@pytest.mark.slow_but_first
@pytest.mark.parametrize("batches", [1, 5, 20])
def test_more_batches_and_partitions_cost_no_more_statements(bench, offsets_of: Callable, batches: int) -> None:
    producer = bench.started()
    warm_up(bench, producer, offsets_of, with_offsets=False)
    warm_up(bench, producer, offsets_of, with_offsets=False)
    with counted(bench.store.engine) as one:
        producer.commit(appends=[producer.batch(bench.partition_ids[0], b"b")])
    appends = [producer.batch(bench.partition_ids[0], b"b") for _ in range(batches)]
    with counted(bench.store.engine) as many:
        producer.commit(appends=appends)
    assert (many.commits, len(many.statements)) == (1, len(one.statements))


def test_a_further_append_of_an_open_transaction_does_not_write_the_coordinators_row(bench) -> None:
    producer = bench.started()
    producer.send(bench.partition_ids[0], b"a")
    with counted(bench.store.engine) as counts:
        producer.send(bench.partition_ids[0], b"b")
    assert counts.commits == 1
    # BEGIN, the coordinator's row, the head, the producer; the batch, the head, the producer; COMMIT.
    assert len(counts.statements) == 8, str(counts)
    assert not any("transaction_log" in statement for statement in counts.statements)


#: What a transaction of one record of 100 bytes writes to PostgreSQL's log at least, with its COMMIT: a new lock, a new
#: index or a wider row on the way is to be seen here.
LOG_BYTES_MAX = 1_424


def test_a_transaction_of_one_record_writes_little_to_the_log_of_the_database(
    own_bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = own_bench.store
    if store.backend.commit_whole is None:
        pytest.skip("nothing says what this database has written")
    monkeypatch.setattr(store, "commits_whole", True)
    producer = own_bench.started()

    def written() -> int:
        asked = "SELECT pg_current_wal_insert_lsn() - '0/0'"
        return int(store.read(lambda connection: connection.exec_driver_sql(asked).scalar_one()))

    sizes = []
    for _ in range(40):
        appends = [producer.batch(own_bench.partition_ids[0], b"x" * 100)]
        before = written()
        producer.commit(appends=appends)
        sizes.append(written() - before)
    # Others write to the same log, and pages are split and written as a whole now and then.
    assert min(sizes) <= LOG_BYTES_MAX, sorted(sizes)
