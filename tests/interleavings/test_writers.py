"""Two writers and who ends their transaction, in every order: what counts counts whole, and late ones are fenced."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from tests.tools.elsewhere import Elsewhere
from tests.tools.interleaving import Scenario, before_locks, explore, stop_here
from txnstore.errors import ProducerFenced, TxnStoreError
from txnstore.log.append import Append
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import encode
from txnstore.log.fetch import fetch
from txnstore.log.topics import create_topic
from txnstore.model import Record
from txnstore.spark.sink_coordination import decide, open_writer
from txnstore.spark.sink_run import run_of_query
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.recovery import recover
from txnstore.transactions.transaction import abort_if_timed_out
from txnstore.transactions.writers import append_as_writer, begin_transaction, join_transaction, report_writer

pytestmark = pytest.mark.slow_on_postgresql

TIMEOUT_MS = 1_000


def is_for_two(world):
    """Return whether there are two writers beside whoever ends the transaction.

    Whole database transactions come one after the other, whichever database it is: all orders of three actors, a
    thousand, are SQLite's, and those of one writer PostgreSQL's as well.
    """
    return world.observer.backend.name == "sqlite"


@dataclass
class Shared:
    """A transaction that several processes write in, on two partitions of their own."""

    world: Any
    name: str
    partition_ids: tuple[int, ...]
    producer: Any = None
    seen: set = field(default_factory=set)

    @classmethod
    def begun(cls, world, number):
        topic = world.observer.write(lambda connection: create_topic(connection, f"shared{number}", partition_count=2))
        shared = cls(world, f"shared-{number}", topic.partition_ids)
        coordinator = TransactionCoordinator(world.observer)
        shared.producer = coordinator.init_producer_id(shared.name, TIMEOUT_MS).identity
        begin_transaction(world.observer, shared.name, shared.producer)
        return shared

    def writer(self):
        return join_transaction(self.world.observer, self.name, self.producer)

    def batches(self, writer, value, sequence=0):
        return [
            Append(
                partition_id,
                encode([Record(value)], producer=writer.identity, base_sequence=sequence, is_transactional=True),
            )
            for partition_id in self.partition_ids
        ]

    def visible(self):
        """Return what readers of committed records see in each partition, which is the same in both."""

        def read(connection):
            pages = fetch(connection, dict.fromkeys(self.partition_ids, 0))
            return [
                tuple(record.value for batch in pages[number].batches for record in batch.records())
                for number in self.partition_ids
            ]

        first, second = self.world.observer.read(read)
        assert first == second, "a transaction is seen whole or not at all"
        self.seen.add(first)
        return first

    def check(self, *, at_rest):
        """Check what is left at the end."""
        assert_sound(self.world.observer, partition_ids=self.partition_ids)
        if at_rest:
            bounds = self.world.observer.read(lambda connection: read_bounds(connection, self.partition_ids))
            assert all(bound.last_stable_offset == bound.high_watermark for bound in bounds.values())
        self.world.journal.done(self.name)


def tried(call):
    """Return what a call came to."""
    try:
        call()
    except TxnStoreError as error:
        return type(error).__name__
    return "ok"


def writes_and_reports(shared, store, writer, value):
    def run():
        return [
            tried(lambda: append_as_writer(store, writer, shared.batches(writer, value))),
            tried(lambda: report_writer(store, writer)),
        ]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("separately", [False, True], ids=["at once", "separately"])
def test_a_commit_counts_exactly_the_writers_that_have_reported_before_it(world, separately):
    numbers = iter(range(10_000))
    outcomes = set()
    # Delivered separately it takes many steps: one writer is enough then.
    is_alone = separately or not is_for_two(world)

    def make():
        shared = Shared.begun(world, f"{separately}-{next(numbers)}")
        one, two = shared.writer(), shared.writer()

        def commit():
            coordinator = TransactionCoordinator(world.observer, Elsewhere(world.observer) if separately else None)
            return tried(lambda: coordinator.end_transaction(shared.name, shared.producer, commit=True))

        def at_end(finished):
            answers = {name: finished[name].result() for name in ("one", "two") if name in finished}
            assert finished["committer"].result() == "ok"
            recover(world.observer)
            visible = shared.visible()
            for name, (append, report) in answers.items():
                # Who was told that the report stands counts, and nobody else does.
                assert (name.encode() in visible) is (report == "ok")
                assert append in {"ok", "ProducerFenced"}
                assert report in {"ok", "ProducerFenced"}
            outcomes.add(visible)
            shared.check(at_rest=True)

        return Scenario(
            {
                "one": writes_and_reports(shared, world.first, one, b"one"),
                **({} if is_alone else {"two": writes_and_reports(shared, world.second, two, b"two")}),
                "committer": commit,
            },
            after_step=lambda: None if separately else shared.visible(),
            at_end=at_end,
        )

    explore(make)
    both = set() if is_alone else {(b"two",), (b"one", b"two"), (b"two", b"one")}
    assert outcomes == {(), (b"one",)} | both


@pytest.mark.slow
@pytest.mark.parametrize("end", ["abort", "start", "reaper"])
def test_what_ends_the_transaction_otherwise_leaves_nothing_of_any_writer(world, end):
    numbers = iter(range(10_000))

    def make():
        shared = Shared.begun(world, f"{end}-{next(numbers)}")
        one, two = shared.writer(), shared.writer()

        def ends():
            if end == "reaper":
                stop_here("time passes")
                world.clock.advance(TIMEOUT_MS + 1)
                return abort_if_timed_out(world.observer, shared.name)
            coordinator = TransactionCoordinator(world.observer)
            if end == "abort":
                return coordinator.end_transaction(shared.name, shared.producer, commit=False)
            return coordinator.init_producer_id(shared.name, TIMEOUT_MS)

        def reports_at_once():
            return tried(lambda: append_as_writer(world.second, two, shared.batches(two, b"two"), report=True))

        def at_end(finished):
            finished["end"].result()
            for writer in (one, two):
                with pytest.raises(ProducerFenced):
                    append_as_writer(world.observer, writer, shared.batches(writer, b"late", 1))
            assert shared.visible() == ()
            shared.check(at_rest=True)

        return Scenario(
            {
                "one": writes_and_reports(shared, world.first, one, b"one"),
                **({"two": reports_at_once} if is_for_two(world) else {}),
                "end": ends,
            },
            after_step=shared.visible,
            at_end=at_end,
        )

    explore(make)


def test_a_writer_that_joins_while_the_transaction_ends_is_in_it_or_fenced(world):
    numbers = iter(range(10_000))
    outcomes = set()

    def make():
        shared = Shared.begun(world, f"join-{next(numbers)}")

        def join():
            try:
                writer = join_transaction(world.first, shared.name, shared.producer)
                append_as_writer(world.first, writer, shared.batches(writer, b"one"), report=True)
            except ProducerFenced:
                return "fenced"
            return "in"

        def commit():
            coordinator = TransactionCoordinator(world.second)
            ended = coordinator.end_transaction(shared.name, shared.producer, commit=True)
            # The next transaction of the same producer: no writer of the last one gets into it.
            begin_transaction(world.second, shared.name, ended.identity)

        def at_end(finished):
            finished["committer"].result()
            answer = finished["joining"].result()
            assert (shared.visible() == (b"one",)) is (answer == "in")
            outcomes.add(answer)
            shared.check(at_rest=False)

        return Scenario({"joining": join, "committer": commit}, after_step=shared.visible, at_end=at_end)

    explore(make)
    assert outcomes == {"in", "fenced"}


@pytest.mark.slow
def test_two_runs_of_a_query_and_their_decisions_in_every_order_commit_a_batch_once(world):
    numbers = iter(range(10_000))
    outcomes = set()

    def make():
        shared = Shared.begun(world, f"sink-{next(numbers)}")
        first, second = (run_of_query(shared.name, run_id, f"sink-of-{shared.name}") for run_id in "12")

        def batch(store, run, value):
            def work():
                writer = open_writer(store, run, 0)
                if writer is None:
                    return decide(store, run, 0, ())
                append_as_writer(store, writer, shared.batches(writer, value), report=True)
                return decide(store, run, 0, [writer.writer_id])

            try:
                return work()
            except ProducerFenced:
                return "fenced"

        def at_end(finished):
            answers = tuple(finished[name].result() for name in ("old", "new"))
            committed = [value for answer, value in zip(answers, (b"old", b"new"), strict=True) if answer is True]
            assert list(shared.visible()) == committed
            # Whichever run came last has done the batch, or found it done.
            assert sorted(map(str, answers)) in (["True", "fenced"], ["False", "True"])
            outcomes.add(answers)

        return Scenario(
            {
                "old": partial(batch, world.first, first, b"old"),
                "new": partial(batch, world.second, second, b"new"),
            },
            after_step=shared.visible,
            at_end=at_end,
        )

    explore(make)
    assert outcomes == {("fenced", True), (True, "fenced"), (True, False), (False, True)}


def test_tasks_that_are_the_first_ones_of_a_run_do_not_fence_each_other(world):
    numbers = iter(range(10_000))

    def make():
        number = next(numbers)
        topic = world.observer.write(lambda connection: create_topic(connection, f"tasks{number}", partition_count=2))
        shared = Shared(world, f"tasks-{number}", topic.partition_ids)
        run = run_of_query(shared.name, "run")

        def task(store, value):
            writer = open_writer(store, run, 0)
            assert writer is not None
            append_as_writer(store, writer, shared.batches(writer, value), report=True)
            return writer.writer_id

        def at_end(finished):
            writers = [finished[name].result() for name in ("one", "two")]
            assert decide(world.observer, run, 0, writers)
            assert sorted(shared.visible()) == [b"one", b"two"]

        actors = {"one": partial(task, world.first, b"one"), "two": partial(task, world.second, b"two")}
        return Scenario(actors, at_end=at_end, alike=actors)

    explored = explore(make, stops=before_locks, preemptions_max=1, store=world.observer)
    assert explored.orders > 3


def test_a_writer_and_the_committer_may_meet_at_any_statement(world):
    numbers = iter(range(10_000))
    outcomes = set()

    def make():
        shared = Shared.begun(world, f"statements-{next(numbers)}")
        writer = shared.writer()

        def write():
            return tried(lambda: append_as_writer(world.first, writer, shared.batches(writer, b"one"), report=True))

        def commit():
            TransactionCoordinator(world.second).end_transaction(shared.name, shared.producer, commit=True)

        def at_end(finished):
            finished["committer"].result()
            answer = finished["writer"].result()
            assert (shared.visible() == (b"one",)) is (answer == "ok")
            outcomes.add(answer)
            shared.check(at_rest=True)

        return Scenario({"writer": write, "committer": commit}, after_step=shared.visible, at_end=at_end)

    explore(make, stops=before_locks, preemptions_max=1, store=world.observer)
    assert outcomes == {"ok", "ProducerFenced"}
