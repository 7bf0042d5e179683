"""The numbers of commits: they grow along each partition, and with the time at which commits are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, not_, select, text, union_all

from tests.clients.consumer.log_writer import eventually
from tests.log.histories import Log
from tests.transactions.bench import Bench
from txnstore.db.opening import open_store
from txnstore.db.schema import finished_transactions, record_batches, transaction_log
from txnstore.db.store import Store
from txnstore.log.append import Append, append_at_once
from txnstore.log.codec import encode
from txnstore.log.partition_rows import draw_commit_number, draw_commit_numbers, lock_heads, number_of_entry
from txnstore.model import NO_PRODUCER, Record

Result = TypeVar("Result")
PATIENCE_SECONDS = 60


def numbers_in(store: Store, partition_id: int) -> list[int | None]:
    """Return the numbers of what is in no transaction, and of those that ended in the partition, in their order."""
    ends = select(finished_transactions.c.marker_offset.label("place"), finished_transactions.c.commit_number).where(
        finished_transactions.c.partition_id == partition_id
    )
    plain = select(record_batches.c.last_offset, record_batches.c.commit_number).where(
        record_batches.c.partition_id == partition_id, not_(record_batches.c.is_transactional)
    )
    found = union_all(ends, plain).order_by("place")
    return store.read(lambda connection: [row.commit_number for row in connection.execute(found)])


def append_plainly(store: Store, *partition_ids: int) -> None:
    append_at_once(
        store, [Append(partition_id, encode([Record(b"plain")])) for partition_id in partition_ids], NO_PRODUCER
    )


def test_a_number_is_above_all_before_it_also_where_nothing_was_written_into_the_journal(store: Store) -> None:
    numbers = [store.write(draw_commit_number) for _ in range(3)]
    assert numbers == sorted(set(numbers))


def test_numbers_that_are_drawn_together_rise_and_are_above_all_before_them(store: Store) -> None:
    following = store.write(number_of_entry)
    drawn = [store.write(partial(draw_commit_numbers, count=count)) for count in (3, 1, 2)]
    assert [len(some) for some in drawn] == [3, 1, 2]
    numbers = [number for some in drawn for number in some]
    assert numbers == sorted(set(numbers))
    assert following <= numbers[0]


def test_numbers_of_transactions_and_of_what_is_in_none_are_of_one_row(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.store, "general_until_seconds", math.inf)
    producer, partition_id = bench.started(), bench.partition_ids[0]
    for _ in range(3):
        append_plainly(bench.store, partition_id)
        producer.commit(appends=[producer.batch(partition_id, b"a")])
    numbers = [number for number in numbers_in(bench.store, partition_id) if number is not None]
    assert len(numbers) == 6
    assert numbers == sorted(set(numbers))


def test_aborted_transactions_have_none(shared_store: Store) -> None:
    log = Log(shared_store)
    for name, end in (("A", log.commit), ("B", log.abort), ("C", log.commit)):
        log.write(name, b"x", partition_id=log.partition_ids[0])
        end(name, log.partition_ids[0])
    first, second, third = numbers_in(log.store, log.partition_ids[0])
    assert first is not None
    assert second is None
    assert third is not None
    assert first < third


@pytest.mark.parametrize("way", ["general", "whole", "statements"])
def test_on_every_way_a_transaction_has_one_number_which_is_that_of_its_entry_in_the_journal(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(bench.store, "commits_whole", way != "general")
    monkeypatch.setattr(bench.store, "general_until_seconds", 0.0 if way == "whole" else math.inf)
    producers = [bench.started(), bench.started()]
    for number in range(6):
        producer = producers[number % 2]
        of = bench.partition_ids[number % 2 :] if number % 3 else bench.partition_ids
        producer.commit(appends=[producer.batch(partition_id, b"a") for partition_id in of])
    one, two = (numbers_in(bench.store, partition_id) for partition_id in bench.partition_ids)
    assert (len(one), len(two)) == (4, 6)
    assert one == sorted(set(one))  # type: ignore[type-var]  # none of them is None
    assert two == sorted(set(two))  # type: ignore[type-var]
    assert set(one) < set(two)
    written = select(transaction_log.c.transactional_id).where(transaction_log.c.entry_id.in_(two))
    names = bench.store.read(
        lambda connection: list(connection.execute(written.order_by(transaction_log.c.entry_id)).scalars())
    )
    assert names == [producer.transactional_id for producer in producers] * 3


@pytest.mark.parametrize("way", ["general", "whole"])
def test_on_every_way_what_is_in_no_transaction_has_a_number_among_those_of_transactions(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(bench.store, "commits_whole", way != "general")
    producer = bench.started()
    for number in range(4):
        append_plainly(bench.store, *bench.partition_ids[number % 2 :])
        producer.commit(appends=[producer.batch(bench.partition_ids[1], b"a")])
    one, two = (numbers_in(bench.store, partition_id) for partition_id in bench.partition_ids)
    assert (len(one), len(two)) == (2, 8)
    assert two == sorted(set(two))  # type: ignore[type-var]  # none of them is None
    # What is appended at once is committed at once.
    assert one == [two[0], two[4]]


KINDS = pytest.mark.parametrize("is_plain", [False, True], ids=["transaction", "plain"])


@pytest.fixture(params=["general", "whole", "statements"])
def waited_for(own_bench: Bench, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Bench:
    """Return a store where a commit goes one of its ways, and may have to wait for a partition."""
    if own_bench.store.backend.name == "sqlite":
        pytest.skip("one writer at a time: nobody waits for a partition")
    monkeypatch.setattr(own_bench.store, "commits_whole", request.param != "general")
    monkeypatch.setattr(own_bench.store, "general_until_seconds", 0.0 if request.param == "whole" else math.inf)
    return own_bench


def while_it_waits(
    bench: Bench, other: Store, locked_id: int, do: Callable[[Connection], Result], *, is_plain: bool
) -> Result:
    """Let a commit to both partitions wait for one of them; return what is done by whoever has locked that."""
    waiting = bench.started()
    appends = [waiting.batch(partition_id, b"a") for partition_id in bench.partition_ids]
    locks = text("SELECT count(*) FROM pg_locks WHERE NOT granted")

    def hold(connection: Connection) -> tuple[Result, Future[Any]]:
        lock_heads(connection, [locked_id])
        if is_plain:
            commit: Future[Any] = pool.submit(append_plainly, bench.store, *bench.partition_ids)
        else:
            commit = pool.submit(waiting.commit, appends=appends)
        eventually(lambda: other.read(lambda inner: inner.execute(locks).scalar_one()) > 0)
        return do(connection), commit

    with ThreadPoolExecutor() as pool:
        done, commit = other.write(hold)
        commit.result(PATIENCE_SECONDS)
    return done


@pytest.mark.slow_but_first
@KINDS
def test_who_waits_for_a_partition_draws_behind_the_one_that_holds_it(
    waited_for: Bench, url: str, is_plain: bool
) -> None:
    """A commit that has begun earlier, and has locked one of two partitions, comes behind the one that it waits for."""
    first, second = waited_for.partition_ids
    with open_store(url) as other:
        number = while_it_waits(waited_for, other, second, draw_commit_number, is_plain=is_plain)
    (last,) = numbers_in(waited_for.store, second)
    assert last is not None
    assert last > number
    assert numbers_in(waited_for.store, first) == [last]


@pytest.mark.slow_but_first
@KINDS
def test_who_waits_for_the_first_of_two_partitions_does_not_hold_the_second(
    waited_for: Bench, url: str, is_plain: bool
) -> None:
    """Everybody locks them in the order of their ids: nobody waits in a circle."""
    first, second = waited_for.partition_ids
    with open_store(url) as other:
        # For a third one, who waits in no circle.
        limits = replace(other.limits, lock_timeout_ms=1_000)

        def take(_: Connection) -> list[int]:
            work = partial(lock_heads, partition_ids=[second])
            return list(other.write(work, limits=limits, retry_timeout_ms=0).heads)

        assert while_it_waits(waited_for, other, first, take, is_plain=is_plain) == [second]
