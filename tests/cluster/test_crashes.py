"""A process dies at any step of a transaction over several databases: whoever comes next ends it everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.cluster.conftest import Bench, Producer, read, row_of
from tests.tools.crashes import Crashed, CrashPoint, When, crash_at, every_crash, every_second_crash, noting, steps_of
from txnstore.db.cluster.cluster import Cluster
from txnstore.errors import InvalidProducerIdMapping
from txnstore.groups.offsets import read_offsets
from txnstore.testing.invariants import assert_cluster_sound
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.recovery import recover

pytestmark = [pytest.mark.slow, pytest.mark.crashes]

S = TransactionState
COMMITS = {S.PREPARE_COMMIT, S.COMPLETE_COMMIT}


@dataclass
class World:
    """One transaction, of an id that nobody else has."""

    producer: Producer
    value: bytes
    group: str


@dataclass
class Victims:
    """Who dies, who helps and dies as well, and who is left to look."""

    bench: Bench
    caller: Cluster
    helper: Cluster
    others: Cluster
    commit: bool

    def make(self) -> World:
        name = self.bench.name_at(1, "id")
        producer = Producer(self.caller, name).start()
        return World(producer, name.encode(), self.bench.name_at(2, "group"))

    def run(self, world: World) -> None:
        producer = world.producer
        producer.send(self.bench.partition_at(2), world.value)
        producer.send(self.bench.partition_at(1), world.value)
        producer.send_offsets(world.group, {self.bench.partition_at(1): 5})
        producer.end(commit=self.commit)

    def recover(self, _: object = None) -> None:
        """Come so late that what is open is aborted."""
        self.bench.clock.advance(60_001)
        for store in self.helper.stores():
            recover(store, self.helper)

    def check(self, world: World, decided: TransactionState, place: object) -> bool:
        """Return whether it is committed, which must be so everywhere or nowhere."""
        name = world.producer.transactional_id
        with noting(place):
            seen = {world.value in read(self.others, self.bench.partition_at(number)) for number in (1, 2)}
            number = self.bench.partition_at(1)
            found = self.others.coordinator_of(world.group).read(
                lambda connection: read_offsets(connection, world.group, [number])
            )
            assert not found.unstable
            seen.add(number in found.offsets)
            assert len(seen) == 1, f"torn: {seen}"
            assert row_of(self.others, name).state in (S.EMPTY, S.COMPLETE_ABORT, S.COMPLETE_COMMIT)
            (committed,) = seen
            assert committed == (decided in COMMITS), f"it was {decided.kafka_name}, and is committed: {committed}"
        return committed

    def state(self, world: World) -> TransactionState:
        try:
            return row_of(self.others, world.producer.transactional_id).state
        except (InvalidProducerIdMapping, AssertionError):
            return S.EMPTY


def _victims(bench: Bench, *, commit: bool) -> Iterator[Victims]:
    with bench.site.open() as caller, bench.site.open() as helper, bench.site.open() as others:
        for cluster in (caller, helper, others):
            cluster.parallel = False
            for number in (1, 2, 3):
                cluster.own(number)
        yield Victims(bench, caller, helper, others, commit)


@pytest.fixture(params=[True, False], ids=["commit", "abort"])
def victims(bench: Bench, request: pytest.FixtureRequest) -> Iterator[Victims]:
    yield from _victims(bench, commit=request.param)


@pytest.fixture
def sqlite_victims(sqlite_bench: Bench) -> Iterator[Victims]:
    yield from _victims(sqlite_bench, commit=True)


def crashes(victims: Victims) -> Iterator[Crashed[World]]:
    """Yield all crashes of the commit on SQLite; elsewhere those around the ends of database transactions."""
    if victims.bench.site.kind == "sqlite" and victims.commit:
        yield from every_crash(victims.make, victims.run, statements_are_all=True)
        return
    # Once before: it opens connections, and learns where partitions live.
    victims.run(victims.make())
    for point in steps_of(victims.run, victims.make()):
        if point.statement == "COMMIT":
            crash = crash_at(point.step, point.when, victims.run, victims.make())
            assert crash is not None, f"it does not come to {point} any more"
            assert crash.point == point, "its first time took other steps"
            yield crash


def test_every_crash_is_ended_the_same_in_all_databases(victims: Victims):
    outcomes = set()
    count = 0
    for crash in crashes(victims):
        crash.revive()
        count += 1
        world = crash.subject
        decided = victims.state(world)
        # By turns: a newer producer, the reaper, and recovery twice.
        if count % 3 == 0:
            Producer(victims.others, world.producer.transactional_id).start()
        else:
            for _ in range(count % 3):
                victims.recover()
        outcomes.add(victims.check(world, decided, crash))
    assert outcomes == ({True, False} if victims.commit else {False})
    assert count >= 12
    assert_cluster_sound(victims.others, at_rest=True)


def test_the_same_call_again_goes_on_where_the_crash_was(victims: Victims):
    """The client lives, and only its answer is lost: its next try has the same numbers."""
    bench = victims.bench
    numbers = itertools.count()

    def make() -> World:
        world = victims.make()
        next(numbers)
        for number in (1, 2, 3):
            world.producer.send(bench.partition_at(number), world.value)
        world.producer.send_offsets(world.group, {bench.partition_at(1): 5})
        return world

    def end(world: World) -> None:
        world.producer.twin().end(commit=victims.commit)

    end(make())
    for point in steps_of(end, make()):
        if point.statement != "COMMIT":
            continue
        world = make()
        crash = crash_at(point.step, point.when, end, world)
        assert crash is not None
        assert crash.point == point, "its first time took other steps"
        crash.revive()
        again = Producer(victims.others, world.producer.transactional_id, world.producer.identity)
        before = again.identity
        with noting(crash):
            ended = again.end(commit=victims.commit)
            assert (ended.identity.producer_id, ended.identity.epoch) == (before.producer_id, before.epoch + 1)
            victims.check(world, S.COMPLETE_COMMIT if victims.commit else S.COMPLETE_ABORT, crash)
    assert next(numbers) >= 8
    assert_cluster_sound(victims.others, at_rest=True)


def test_a_second_crash_in_the_recovery_leaves_nothing_that_the_next_one_does_not_mend(sqlite_victims: Victims):
    victims = sqlite_victims
    victims.run(victims.make())
    commits = [point for point in steps_of(victims.run, victims.make()) if point.statement == "COMMIT"]
    after = [point.step for point in commits if point.when is When.AFTER]
    # Added, announced, verified and appended in each, offsets added and sent; decided; delivered; complete.
    assert len(after) == 12
    firsts = {after[-4], after[-3]}
    outcomes = set()
    pairs = 0

    def is_first(point: CrashPoint) -> bool:
        return point.when is When.AFTER and point.step in firsts

    def recover_there(_: World) -> None:
        victims.bench.clock.advance(60_001)
        recover(victims.helper.own(1), victims.helper)

    for crash in every_second_crash(
        victims.make, victims.run, recover_there, is_first=is_first, statements_are_all=True
    ):
        pairs += 1
        crash.revive()
        world = crash.subject
        decided = victims.state(world)
        victims.recover()
        outcomes.add(victims.check(world, decided, crash))
    assert outcomes == {True, False}
    assert pairs > 90
    assert_cluster_sound(victims.others, at_rest=True)


@dataclass
class ManyOverdue:
    """Transactions over two databases, of which the time is up."""

    bench: Bench
    group: str

    def make(self) -> list[Producer]:
        producers = [self.bench.producer_at(1) for _ in range(3)]
        for producer in producers:
            for number in (1, 2):
                producer.send(self.bench.partition_at(number), b"a")
            producer.send_offsets(self.group, {self.bench.partition_at(1): 5})
        self.bench.clock.advance(60_001)
        return producers

    def recover(self, helper: Cluster) -> None:
        for store in helper.stores():
            recover(store, helper)

    def states(self, others: Cluster, producers: list[Producer]) -> set[TransactionState]:
        return {row_of(others, producer.transactional_id).state for producer in producers}

    def check_ended(self, others: Cluster, producers: list[Producer]) -> None:
        for producer in producers:
            row = row_of(others, producer.transactional_id)
            assert (row.state, row.producer_epoch) == (S.COMPLETE_ABORT, producer.identity.epoch + 1)
        assert all(read(others, self.bench.partition_at(number)) == [] for number in (1, 2))
        assert not self.bench.offsets(self.group).unstable

    def go_on(self, producers: list[Producer]) -> None:
        for producer in producers:
            producer.end(commit=False)
            producer.send(self.bench.partition_at(2), b"next")
            producer.end(commit=True)
        assert self.bench.read(self.bench.partition_at(2)) == [b"next"] * len(producers)
        assert self.bench.committed(self.group) == {}


def test_a_helper_that_dies_while_it_aborts_many_together_leaves_none_that_the_next_one_does_not_end(bench: Bench):
    many = ManyOverdue(bench, bench.name_at(2, "group"))
    with bench.site.open() as helper, bench.site.open() as others:
        for cluster in (helper, others):
            cluster.parallel = False
            for number in (1, 2, 3):
                cluster.own(number)

        def abort(_: object) -> None:
            many.recover(helper)

        abort(many.make())
        seen = set()
        points = steps_of(abort, many.make())
        if bench.site.kind == "postgresql":
            points = [point for point in points if point.statement == "COMMIT"]
        for count, point in enumerate(points):
            producers = many.make()
            crash = crash_at(point.step, point.when, abort, producers)
            assert crash is not None, f"it does not come to {point} any more"
            assert crash.point == point, "its first time took other steps"
            crash.revive()
            with noting(crash):
                states = many.states(others, producers)
                assert len(states) == 1, "one database transaction decides them all, and another one completes them"
                seen |= states
                for _ in range(1 + count % 2):
                    many.recover(others)
                many.check_ended(others, producers)
        assert seen == {S.ONGOING, S.PREPARE_ABORT, S.COMPLETE_ABORT}
        many.go_on(producers)
        assert_cluster_sound(others, at_rest=True)
