"""Batches of no transaction by one statement of PostgreSQL: the short way to the log does what the general way does.

Each history runs on two stores whose clocks show the same; one of them takes the short way where it can, the other
never does.  Answers, errors and rows are the same.  SQLite has no such statement.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import insert, update

from tests.log.histories import EXAMPLES, SETTINGS, VALUES
from tests.tools.tables import Rows, all_tables
from txnstore.db.backend import WholeTransaction
from txnstore.db.opening import open_store
from txnstore.db.postgresql import commit_function
from txnstore.db.schema import producer_states
from txnstore.db.store import Store
from txnstore.errors import InvalidProducerEpoch, OutOfOrderSequence, TxnStoreError, UnknownTopicOrPartition
from txnstore.log.append import PAYLOAD_BYTES_MAX, Append, Appended, WholeAppend, append_at_once
from txnstore.log.codec import encode
from txnstore.log.topics import Topic, change_topic_configs, create_topic, delete_topic, lock_topic_configs
from txnstore.model import NO_PRODUCER, NO_SEQUENCE, SEQUENCE_MAX, ProducerIdentity, Record
from txnstore.testing.invariants import Invariant, partition_violations
from txnstore.testing.manual_clock import ManualClock
from txnstore.transactions.coordinator import TransactionCoordinator

#: What differs from store to store, whatever was done there.
NOT_COMPARED = {"stores", "databases", "topics", "store_version", "transaction_log"}
#: What was drawn for something that was undone is drawn no more.
DRAWN = {"commit_number"}
ALL = all_tables(but=NOT_COMPARED, columns_but=DRAWN)
OF_TOPIC = all_tables(but=NOT_COMPARED, columns_but=DRAWN, of=["partition_id"])


@dataclass
class World:
    """A store, and producers with what they remember."""

    store: Store
    topic: Topic
    #: The first has no sequence numbers, the others have.
    producers: list[ProducerIdentity]
    sequences: list[dict[int, int]] = field(default_factory=lambda: [{}, {}, {}])
    last: dict[int, list[Append]] = field(default_factory=dict)

    def append(self, number: int, cells: Sequence[tuple[int, int, int]], shift: int = 0) -> list[Appended]:
        """Append a batch for each cell: the place of a partition, how old its records are, the place of a value."""
        appends, sequences = [], dict(self.sequences[number])
        for place, age_ms, value in cells:
            partition_id = self.topic.partition_ids[place]
            assert self.store.clock is not None
            now_ms = self.store.clock.now_ms()
            records = [Record(VALUES[value], b"key", now_ms - age_ms + count) for count in range(value + 1)]
            sequence = sequences.get(partition_id, 0) + shift if number else NO_SEQUENCE
            sequences[partition_id] = sequence + len(records)
            batch = encode(records, producer=self.producers[number], base_sequence=sequence)
            appends.append(Append(partition_id, batch, self.topic.settings))
        self.last[number] = appends
        appended = append_at_once(self.store, appends, self.producers[number])
        self.sequences[number] = sequences
        return appended

    def repeat(self, number: int) -> list[Appended] | None:
        appends = self.last.get(number)
        return append_at_once(self.store, appends, self.producers[number]) if appends else None

    def set_epoch(self, number: int, difference: int) -> None:
        producer = self.producers[number]
        self.producers[number] = ProducerIdentity(producer.producer_id, producer.epoch + difference)
        self.sequences[number] = {}

    def forget(self, number: int) -> None:
        this = producer_states.c.producer_id == self.producers[number].producer_id
        self.store.write(lambda connection: connection.execute(producer_states.delete().where(this)))

    def be_known(self, number: int, changes: dict[str, Any]) -> None:
        """Let the first partition know something of the producer."""
        producer = self.producers[number]
        known = {
            "partition_id": self.topic.partition_ids[0],
            "producer_id": producer.producer_id,
            "producer_epoch": producer.epoch,
            "recent_batches": "[]",
            "coordinator_epoch": -1,
            "last_timestamp_ms": 0,
            **changes,
        }
        self.store.write(lambda connection: connection.execute(insert(producer_states), known))

    def open_transaction(self, number: int, offset: int | None) -> None:
        this = producer_states.c.producer_id == self.producers[number].producer_id
        change = update(producer_states).where(this).values(transaction_first_offset=offset)
        self.store.write(lambda connection: connection.execute(change))

    def configure(self, number: int) -> None:
        def work(connection: Any) -> Topic:
            topic = lock_topic_configs(connection, self.topic.name)
            change_topic_configs(connection, topic, SETTINGS[number])
            return lock_topic_configs(connection, self.topic.name)

        self.topic = self.store.write(work)

    def delete_topic(self) -> None:
        self.store.write(lambda connection: delete_topic(connection, self.topic.name))

    def rows(self) -> Rows:
        """Return what is in each table of this topic, and of tables that are not of topics all."""
        ours = {"partition_id": self.topic.partition_ids}
        return self.store.read(lambda connection: OF_TOPIC.rows(connection, ours))


@dataclass
class Worlds:
    """Two stores that the same happens to."""

    clock: ManualClock
    at_once: Store
    general: Store
    names: Iterator[str] = field(default_factory=lambda: (f"topic-{number}" for number in itertools.count(1)))
    answers: list[list[int] | None] = field(default_factory=list)
    """What the statement answered."""

    def new_pair(self) -> tuple[World, World]:
        name = next(self.names)
        found = []
        for store in (self.at_once, self.general):
            topic = store.write(lambda connection: create_topic(connection, name, partition_count=3))
            coordinator = TransactionCoordinator(store)
            producers = [NO_PRODUCER, *(coordinator.init_producer_id(None).identity for _ in range(2))]
            found.append(World(store, topic, producers))
        first, second = found
        assert (first.topic.partition_ids, first.producers) == (second.topic.partition_ids, second.producers)
        return first, second


@pytest.fixture(scope="module")
def worlds(lent_postgresql) -> Iterator[Worlds]:
    with contextlib.ExitStack() as stack:
        clock = ManualClock()
        urls = [stack.enter_context(lent_postgresql()) for _ in range(2)]
        at_once, general = (stack.enter_context(open_store(url, clock=clock)) for url in urls)
        general.commits_whole, at_once.commits_whole = False, True
        found = Worlds(clock, at_once, general)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        commit_whole = at_once.commit_whole

        def noted(whole: WholeTransaction, **options: Any) -> list[int] | None:
            found.answers.append(None)
            found.answers[-1] = commit_whole(whole, **options)
            return found.answers[-1]

        patch.setattr(at_once, "commit_whole", noted)
        yield found
        # What each test has compared of its own topic, of all of them.
        assert at_once.read(ALL.rows) == general.read(ALL.rows)


@pytest.fixture
def pair(worlds: Worlds) -> tuple[World, World]:
    worlds.answers.clear()
    return worlds.new_pair()


def happens(pair: tuple[World, World], step: str, *arguments: Any) -> object:
    """Do the same in both worlds; what comes back is the same."""
    answers: list[object] = []
    for world in pair:
        try:
            answers.append(getattr(world, step)(*arguments))
        except TxnStoreError as error:
            answers.append((type(error), str(error)))
    assert answers[0] == answers[1], (step, arguments)
    return answers[0]


def assert_same(pair: tuple[World, World]) -> None:
    at_once, general = (world.rows() for world in pair)
    for table, expected in general.items():
        assert at_once[table] == expected, table
    for world in pair:
        for partition_id in world.topic.partition_ids:
            found = world.store.read(lambda c, of=partition_id: partition_violations(c, of))
            assert not [one for one in found if one.invariant is Invariant.COMMITS_NUMBERED]


NUMBERS = st.integers(0, 2)
CELLS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([0, 0, 0, 5_000, -5_000]), st.integers(0, 3)), min_size=1, max_size=4
)
#: What goes the short way, if nothing that happened before is in its way.
USUAL_APPEND = st.tuples(
    st.just("append"),
    NUMBERS,
    st.lists(st.tuples(st.integers(0, 2), st.just(0), st.integers(0, 3)), min_size=1, max_size=4),
    st.just(0),
)
#: What stands here more than once comes as much more often; Hypothesis by itself takes equal ones for one.
STEPS = st.sampled_from(
    [
        *[USUAL_APPEND] * 6,
        *[st.tuples(st.just("append"), NUMBERS, CELLS, st.sampled_from([0, 0, 0, 0, 1, -1]))] * 4,
        st.tuples(st.just("repeat"), NUMBERS),
        st.tuples(st.just("set_epoch"), st.integers(1, 2), st.sampled_from([1, 1, -1])),
        st.tuples(st.just("forget"), NUMBERS),
        st.tuples(st.just("open_transaction"), st.integers(1, 2), st.sampled_from([0, None])),
        st.tuples(st.just("configure"), st.integers(0, len(SETTINGS) - 1)),
        st.tuples(st.just("advance"), st.sampled_from([1, 500])),
    ]
).flatmap(lambda step: step)


@pytest.mark.slow
@pytest.mark.campaign
@settings(max_examples=EXAMPLES)
@given(steps=st.lists(STEPS, min_size=1, max_size=16))
def test_both_ways_answer_the_same_and_write_the_same_rows(worlds: Worlds, steps: list[tuple[Any, ...]]) -> None:
    pair = worlds.new_pair()
    for step, *arguments in steps:
        if step == "advance":
            worlds.clock.advance(*arguments)
        else:
            happens(pair, step, *arguments)
    # What is repeated by a producer that was forgotten meanwhile is there twice, whichever way it went.
    assert_same(pair)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2), ids=["without sequence numbers", "with"])
@pytest.mark.parametrize(
    "cells", [[(0, 0, 1)], [(2, 0, 1), (0, 0, 3), (2, 5, 0), (0, 0, 2)]], ids=["one batch", "several"]
)
def test_what_is_usual_is_appended_at_once(worlds: Worlds, pair, number, cells) -> None:
    # More often than batches are remembered.
    for _ in range(7):
        happens(pair, "append", number, cells)
        assert_same(pair)
        worlds.clock.advance(1_000)
    assert len(worlds.answers) == 7
    assert None not in worlds.answers


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_repetition_is_recognised(worlds: Worlds, pair, count) -> None:
    for _ in range(count):
        happens(pair, "append", 1, [(0, 0, 1), (0, 0, 0)])
    answer = happens(pair, "repeat", 1)
    assert isinstance(answer, list)
    assert [place.is_duplicate for place in answer] == [True, True]
    assert worlds.answers == [*worlds.answers[:-1], None]
    assert_same(pair)


UNUSUAL = [
    pytest.param([("be_known", 1, {"producer_epoch": 5})], [(0, 0, 1)], InvalidProducerEpoch, id="a newer epoch"),
    pytest.param([("append", 1, [(0, 0, 1)]), ("set_epoch", 1, 1)], [(0, 0, 1)], None, id="an older epoch"),
    pytest.param([("be_known", 1, {"recent_batches": "[0,2,0,2,0]"})], [(0, 0, 1)], OutOfOrderSequence, id="a gap"),
    pytest.param(
        [("append", 1, [(0, 0, 1)]), ("open_transaction", 1, 0)], [(0, 0, 1)], TxnStoreError, id="a transaction"
    ),
    pytest.param([("delete_topic",)], [(1, 0, 1)], UnknownTopicOrPartition, id="no such partition"),
    pytest.param([("configure", 2)], [(0, 5_000, 1)], TxnStoreError, id="records too old"),
    pytest.param([("configure", 3)], [(0, -5_000, 1)], TxnStoreError, id="records too new"),
    pytest.param([("configure", 0)], [(0, 0, 1)], None, id="times given by the log"),
    pytest.param([("configure", 4)], [(0, 0, 3)], TxnStoreError, id="a batch too large"),
]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("steps", "cells", "expected"), UNUSUAL)
def test_what_is_unusual_goes_the_general_way(worlds: Worlds, pair, steps, cells, expected) -> None:
    try:
        for step, *arguments in steps:
            happens(pair, step, *arguments)
        worlds.answers.clear()
        answer = happens(pair, "append", 1, cells)
        if expected is None:
            assert isinstance(answer, list)
        else:
            assert isinstance(answer, tuple)
            assert issubclass(answer[0], expected)
        assert not any(worlds.answers)
        assert_same(pair)
    finally:
        happens(pair, "forget", 1)


def test_where_one_partition_refuses_nothing_is_appended_to_the_others(worlds: Worlds, pair) -> None:
    happens(pair, "be_known", 1, {"recent_batches": "[0,2,0,2,0]"})
    before = pair[0].rows()
    answer = happens(pair, "append", 1, [(1, 0, 1), (0, 0, 1), (2, 0, 1)])
    assert isinstance(answer, tuple)
    assert pair[0].rows() == before
    happens(pair, "forget", 1)


def test_after_the_last_sequence_number_it_goes_on_at_zero(worlds: Worlds, pair) -> None:
    for world in pair:
        world.sequences[1] = {world.topic.partition_ids[0]: SEQUENCE_MAX - 1}
    happens(pair, "append", 1, [(0, 0, 1)])
    for world in pair:
        world.sequences[1] = {}
    answer = happens(pair, "append", 1, [(0, 0, 1)])
    assert isinstance(answer, list)
    assert_same(pair)


def test_much_goes_the_general_way() -> None:
    records = [Record(b"x" * (PAYLOAD_BYTES_MAX // 5))]
    appends = [Append(1, encode(records, producer=NO_PRODUCER, base_sequence=NO_SEQUENCE))] * 5
    assert WholeAppend(NO_PRODUCER, appends[:4], is_transactional=False).is_usual()
    assert not WholeAppend(NO_PRODUCER, appends, is_transactional=False).is_usual()


@pytest.mark.takes_more_rights("drops functions and makes them")
def test_a_store_without_the_function_takes_the_general_way(txnstore_postgresql_url) -> None:
    with open_store(txnstore_postgresql_url, clock=ManualClock()) as store:
        store.commits_whole = True
        for statement in commit_function.drop_functions("txnstore"):
            store.write(lambda connection, statement=statement: connection.exec_driver_sql(statement))
        world = World(store, store.write(lambda connection: create_topic(connection, "sales")), [NO_PRODUCER])
        for number in range(2):
            assert [place.base_offset for place in world.append(0, [(0, 0, 1)])] == [2 * number]
        assert not store.has_commit_function
