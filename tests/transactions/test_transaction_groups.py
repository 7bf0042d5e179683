"""Transaction groups: those who commit in one do so one after the other, whatever partitions they have written to."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from sqlalchemy import Connection, select, text

from tests.clients.consumer.log_writer import eventually
from tests.transactions.bench import Bench, Producer
from txnstore.db.opening import open_store
from txnstore.db.schema import finished_transactions
from txnstore.db.store import Store
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.outcome import CommitRequest, Ended, end_within
from txnstore.transactions.recovery import expire_transactional_ids
from txnstore.transactions.transaction import GROUP_ROW_PREFIX

PATIENCE_SECONDS = 60
_WAITING = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
_NUMBERS = select(finished_transactions.c.commit_number).order_by(finished_transactions.c.commit_number)


def member(bench: Bench, group: str | None = "ledger") -> Producer:
    producer = Producer(TransactionCoordinator(bench.store, None, group), bench.new_id())
    producer.start()
    return producer


def numbers_of(store: Store, *partition_ids: int) -> list[int]:
    """Return the numbers of what has been committed in these partitions, in order."""
    found = _NUMBERS.where(finished_transactions.c.partition_id.in_(partition_ids))
    return store.read(lambda connection: [number for number in connection.execute(found).scalars() if number])


def test_who_commits_waits_for_another_one_of_the_group_and_keeps_nobody_else_waiting(
    own_bench: Bench, url: str
) -> None:
    if own_bench.store.backend.name == "sqlite":
        pytest.skip("one writer at a time: whoever commits is alone")
    first, second, stranger = member(own_bench), member(own_bench), member(own_bench, None)
    one, two = own_bench.partition_ids
    # Their row is there.
    first.commit(appends=[first.batch(one, b"a")])
    with open_store(url) as other, ThreadPoolExecutor() as pool:

        def hold(connection: Connection) -> Future[Ended]:
            end_within(
                connection,
                CommitRequest(
                    first.transactional_id, first.identity, [first.batch(one, b"b")], transaction_group="ledger"
                ),
            )
            commit = pool.submit(second.commit, appends=[second.batch(two, b"c")])
            eventually(lambda: own_bench.store.read(lambda inner: inner.execute(_WAITING).scalar_one()) > 0)
            # The one who waits has not locked his partition.
            stranger.commit(appends=[stranger.batch(two, b"d")])
            assert not commit.done()
            return commit

        other.write(hold).result(PATIENCE_SECONDS)
    assert own_bench.read(two) == [b"d", b"c"]
    assert numbers_of(own_bench.store, one)[-1] < numbers_of(own_bench.store, two)[-1]
    assert_sound(own_bench.store)


def test_two_that_make_the_row_of_their_group_at_once_share_it_and_it_is_made_again(own_bench: Bench) -> None:
    own_bench.set_store({"transactional.id.expiration.ms": "1000"})
    for _ in range(2):
        members = [member(own_bench) for _ in range(4)]
        with ThreadPoolExecutor() as pool:
            commits = [
                pool.submit(each.commit, appends=[each.batch(own_bench.partition_ids[number % 2], b"a")])
                for number, each in enumerate(members)
            ]
            for commit in commits:
                commit.result(PATIENCE_SECONDS)
        # The journal ends with what the row says, or with its expiry.
        assert_sound(own_bench.store)
        own_bench.clock.advance(1_000)
        assert f"{GROUP_ROW_PREFIX}ledger" in expire_transactional_ids(own_bench.store)
    numbers = numbers_of(own_bench.store, *own_bench.partition_ids)
    assert len(set(numbers)) == 8
    assert_sound(own_bench.store)


def test_an_abort_waits_for_nobody_of_the_group(own_bench: Bench) -> None:
    first, second = member(own_bench), member(own_bench)
    second.send(own_bench.partition_ids[0], b"a")
    first.commit(appends=[first.batch(own_bench.partition_ids[1], b"b")])
    row = own_bench.row(f"{GROUP_ROW_PREFIX}ledger")
    own_bench.clock.advance(1)
    second.abort()
    assert own_bench.row(f"{GROUP_ROW_PREFIX}ledger") == row


def test_whoever_looks_sees_a_beginning_of_the_groups_order_at_any_moment(own_bench: Bench) -> None:
    """Over partitions that none of them shares with another one."""
    looks: list[list[int]] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            looks.append(numbers_of(own_bench.store, *own_bench.partition_ids))

    def write(number: int) -> None:
        producer = member(own_bench)
        for count in range(20):
            if count % 3 == 0:
                producer.send(own_bench.partition_ids[number], b"first")
            producer.commit(appends=[producer.batch(own_bench.partition_ids[number], b"a")])

    with ThreadPoolExecutor() as pool:
        looking = pool.submit(look)
        try:
            for writer in [pool.submit(write, number) for number in range(2)]:
                writer.result(2 * PATIENCE_SECONDS)
        finally:
            is_over.set()
        looking.result(PATIENCE_SECONDS)
    numbers = numbers_of(own_bench.store, *own_bench.partition_ids)
    assert len(numbers) == 40
    assert all(seen == numbers[: len(seen)] for seen in looks)
    assert all(len(before) <= len(after) for before, after in itertools.pairwise(looks))
