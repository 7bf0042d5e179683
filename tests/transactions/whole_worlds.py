"""Two worlds that the same happens to: one commits whole transactions at once where it can, the other never does."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from sqlalchemy import func, insert, select, update

from tests.log.histories import SETTINGS, VALUES
from tests.tools.tables import Rows, all_tables
from tests.transactions.whole_steps import COMMITTERS
from txnstore.db.opening import open_store
from txnstore.db.schema import (
    group_members,
    group_offsets,
    groups,
    partition_heads,
    pending_group_offsets,
    producer_states,
    transactions,
)
from txnstore.db.store import Store
from txnstore.errors import TxnStoreError
from txnstore.groups.offsets import commit_offsets, commit_offsets_at_once
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.log.topics import Topic, change_topic_configs, create_topic, delete_topic, lock_topic_configs
from txnstore.model import NO_PRODUCER, OffsetAndMetadata, ProducerIdentity, Record
from txnstore.testing.invariants import assert_sound
from txnstore.testing.manual_clock import ManualClock
from txnstore.transactions import rows
from txnstore.transactions.branch_rows import RegisteredBranch, insert_branches, mark_missing
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.outcome import Ended
from txnstore.transactions.protocol import AT_REST, TransactionState
from txnstore.transactions.transaction import LockedTransaction, SentOffsets
from txnstore.transactions.writers import append_as_writer, join_transaction

#: What differs from store to store, whatever was done there.
NOT_COMPARED = {"stores", "databases", "topics", "store_version"}


#: Each commit draws its numbers.
NUMBERS = {"entry_id", "commit_number"}
ALL = all_tables(but=NOT_COMPARED, columns_but=NUMBERS)
OF_WORLD = all_tables(but=NOT_COMPARED, columns_but=NUMBERS, of=("partition_id", "transactional_id"))


def rows_of(store: Store, world: World | None = None) -> Rows:
    """Return what is in each table, or of a world what is in its tables, and of tables that are not of worlds all."""
    if world is None:
        return store.read(ALL.rows)
    ours = {"partition_id": world.topic.partition_ids, "transactional_id": world.names}
    return store.read(lambda connection: OF_WORLD.rows(connection, ours))


def assert_same_rows(at_once: Rows, general: Rows) -> None:
    for table, expected in general.items():
        assert at_once[table] == expected, table


@dataclass
class World:
    """A store, and producers with what they remember."""

    store: Store
    names: list[str]
    topic: Topic
    producers: dict[str, ProducerIdentity] = field(default_factory=dict)
    last: dict[str, tuple[ProducerIdentity, list[Append], list[SentOffsets]]] = field(default_factory=dict)
    were_at_once: list[bool] = field(default_factory=list)
    """Of each commit of offsets by themselves, whether one statement did it."""

    @property
    def coordinator(self) -> TransactionCoordinator:
        return TransactionCoordinator(self.store)

    def start(self, name: str) -> object:
        initialized = self.coordinator.init_producer_id(name, 60_000)
        self.producers[name] = initialized.identity
        return initialized

    def batches(
        self, producer: ProducerIdentity, cells: Sequence[tuple[int, int, int]], first_sequence: int
    ) -> list[Append]:
        """Return a batch for each cell: the place of a partition, how old its records are, the place of a value."""
        sequences: dict[int, int] = {}
        appends = []
        for place, age_ms, value in cells:
            partition_id = self.topic.partition_ids[place]
            clock = self.store.clock
            assert clock is not None
            records = [Record(VALUES[value], b"key", clock.now_ms() - age_ms + number) for number in range(value + 1)]
            sequence = sequences.get(partition_id, first_sequence)
            sequences[partition_id] = sequence + len(records)
            batch = encode(records, producer=producer, base_sequence=sequence, is_transactional=True)
            appends.append(Append(partition_id, batch, self.topic.settings))
        return appends

    def offsets(self, committers: Sequence[tuple[int, Sequence[int], str | None]]) -> list[SentOffsets]:
        """Return an offset in each place, with a text; in commit order with the text "within"."""
        return [
            SentOffsets(
                COMMITTERS[number],
                {
                    self.topic.partition_ids[place]: OffsetAndMetadata(place + 5, offset_in_transaction=1)
                    if text == "within"
                    else OffsetAndMetadata(place + 5, metadata=text)
                    for place in places
                },
            )
            for number, places, text in committers
        ]

    def append(self, name: str, cells: Sequence[tuple[int, int, int]]) -> object:
        producer = self.producers.get(name, NO_PRODUCER)
        return self.coordinator.append(name, producer, self.batches(producer, cells, 0))

    def send(self, name: str, committer: tuple[int, Sequence[int], str | None], epochs_before: int = 0) -> None:
        identity = self.producers.get(name, NO_PRODUCER)
        producer = ProducerIdentity(identity.producer_id, identity.epoch - epochs_before)
        self.coordinator.send_offsets(name, producer, *self.offsets([committer]), has_begun=False)

    def commit_offsets(self, committer: tuple[int, Sequence[int], str | None]) -> None:
        """Commit offsets by themselves, at once where that is usual."""
        [sent] = self.offsets([committer])
        is_done = commit_offsets_at_once(self.store, sent.committer, sent.offsets)
        self.were_at_once.append(is_done)
        if not is_done:
            self.store.write(lambda connection: commit_offsets(connection, sent.committer, sent.offsets))

    def commit(
        self,
        name: str,
        cells: Sequence[tuple[int, int, int]],
        first_sequence: int,
        committers: Sequence[tuple[int, Sequence[int], str | None]],
        epochs_before: int,
        open_group_id: str | None = None,
    ) -> object:
        """Commit; with an open group the caller believes that nothing but its offsets is there."""
        identity = self.producers.get(name, NO_PRODUCER)
        producer = ProducerIdentity(identity.producer_id, identity.epoch - epochs_before)
        self.last[name] = producer, self.batches(producer, cells, first_sequence), self.offsets(committers)
        return self._end(name, open_group_id=open_group_id)

    def repeat(self, name: str) -> object:
        return self._end(name, is_repeated=True) if name in self.last else None

    def join(self, name: str) -> object:
        """Let a further writer have its share, which is not reported."""
        writer = join_transaction(self.store, name, self.producers[name])
        batch = self.batches(self.producers[name], [(1, 0, 1)], 0)[0].batch
        batch = replace(batch, producer_id=writer.identity.producer_id, producer_epoch=writer.identity.epoch)
        append_as_writer(self.store, writer, [Append(self.topic.partition_ids[1], batch, self.topic.settings)])
        return None

    def abort(self, name: str) -> object:
        ended = self.coordinator.end_transaction(name, self.producers.get(name, NO_PRODUCER), commit=False)
        self.producers[name] = ended.identity
        return ended

    def configure(self, number: int) -> None:
        def work(connection: Any) -> Topic:
            topic = lock_topic_configs(connection, self.topic.name)
            change_topic_configs(connection, topic, SETTINGS[number])
            return lock_topic_configs(connection, self.topic.name)

        self.topic = self.store.write(work)

    def delete_topic(self) -> None:
        # The producers go on with what they know of the old one.
        self.store.write(lambda connection: delete_topic(connection, self.topic.name))

    def exhaust(self, name: str, epoch: int) -> None:
        """Bring a producer near its last epoch."""

        def work(connection: Any) -> None:
            row = rows.read_row(connection, name).row
            assert row is not None
            # Nobody else takes an epoch back: two transactions would have the same.
            if row.state not in AT_REST or row.producer_epoch > epoch:
                return
            after = replace(
                row, state=TransactionState.EMPTY, start_ms=-1, producer_epoch=epoch, last_producer_epoch=-1
            )
            changes = {"state": 0, "start_ms": -1, "producer_epoch": epoch, "last_producer_epoch": -1}
            connection.execute(update(transactions).where(transactions.c.transactional_id == name).values(changes))
            rows.journal(connection, [after], reason="the test")

            self.producers[name] = ProducerIdentity(self.producers[name].producer_id, epoch)

        self.store.write(work)

    def register(self, name: str) -> None:
        """Let another database have a share in the transaction."""
        branch = RegisteredBranch(f"branch of {name}", name, self.producers[name], "away/one", "1:1", "7")
        self.store.write(lambda connection: insert_branches(connection, [branch]))

    def lose_branch(self, name: str) -> None:
        """Let that database have lost its share, which was to commit."""
        assert self.store.write(lambda connection: mark_missing(connection, f"branch of {name}"))

    def take_over(self, name: str) -> None:
        """Be the next process, which is to end what was prepared, and may add nothing (KIP-939)."""

        def work(connection: Any) -> ProducerIdentity:
            transaction = LockedTransaction.lock(connection, name)
            transaction.step(replace(transaction.known, producer_epoch=transaction.known.producer_epoch + 1))
            transaction.save("InitProducerId")
            return transaction.known.identity

        self.producers[name] = self.store.write(work)

    def be_known(self, name: str, changes: dict[str, Any]) -> None:
        """Let the first partition know something of the producer that it cannot know."""
        producer = self.producers[name]
        known = {
            "partition_id": self.topic.partition_ids[0],
            "producer_id": producer.producer_id,
            "producer_epoch": producer.epoch,
            "recent_batches": "[]",
            "coordinator_epoch": 0,
            "last_timestamp_ms": 0,
            **changes,
        }
        self.store.write(lambda connection: connection.execute(insert(producer_states), known))

    def forget(self, name: str) -> None:
        """Undo what `be_known` has done."""
        this = producer_states.c.producer_id == self.producers[name].producer_id
        self.store.write(lambda connection: connection.execute(producer_states.delete().where(this)))

    def give_members(self) -> None:
        """Let the group be in generation 3, with a member and one that has a lasting name."""

        def work(connection: Any) -> None:
            owned = str(list(self.topic.partition_ids[:2]))
            row = {"client_id": "", "session_timeout_ms": 45_000, "deadline_ms": 2**60, "assignment": "{}"}
            subscription = '{"subscribed": [], "topics": [], "assignors": [], "step": 0, "owned": {}, '
            subscription += f'"owned_ids": {owned}}}'
            row |= {"group_id": "readers", "generation": 2, "subscription": subscription}
            members = [
                {**row, "member_id": "member", "group_instance_id": None},
                {**row, "member_id": "lasting member", "group_instance_id": "lasting"},
            ]
            # Offsets of worlds before have such numbers as well.
            highest = select(func.max(groups.c.commit_number)).where(groups.c.group_id == "readers")
            commit_number = max(connection.execute(highest).scalar() or 0, 4)
            connection.execute(group_members.delete())
            connection.execute(group_offsets.delete())
            # The others are unknown again, but for those that worlds before have offsets pending in.
            is_needed = groups.c.group_id.in_(select(pending_group_offsets.c.group_id))
            connection.execute(groups.delete().where((groups.c.group_id == "readers") | ~is_needed))
            known = {"group_id": "readers", "generation": 3, "commit_number": commit_number, "last_update_ms": 1}
            connection.execute(insert(groups), known)
            connection.execute(insert(group_members), members)

        self.store.write(work)

    def rows(self) -> Rows:
        return rows_of(self.store, self)

    def _end(self, name: str, *, is_repeated: bool = False, open_group_id: str | None = None) -> object:
        producer, appends, offsets = self.last[name]
        ended = self.coordinator.end_transaction(
            name,
            producer,
            commit=True,
            appends=appends,
            offsets=offsets,
            is_repeated=is_repeated,
            has_begun=open_group_id is not None,
            open_group_id=open_group_id,
        )
        self.producers[name] = ended.identity
        return ended


@dataclass
class Worlds:
    """Two worlds that the same happens to."""

    clock: ManualClock
    at_once: Store
    general: Store
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    places: list[list[int] | None] = field(default_factory=list)
    """The base offsets that came back, if the transaction was committed at once."""

    def new_pair(self) -> tuple[World, World]:
        """Return worlds with a new topic and producers of new names; the group is known from before, or is not."""
        name = f"topic-{next(self.numbers)}"
        topics = [
            store.write(lambda connection: create_topic(connection, name, partition_count=3))
            for store in (self.at_once, self.general)
        ]
        assert topics[0].partition_ids == topics[1].partition_ids
        names = [f"{name}-{number}" for number in range(2)]
        return World(self.at_once, names, topics[0]), World(self.general, names, topics[1])


@pytest.fixture(scope="module", params=["function on postgresql", "statements on postgresql", "statements on sqlite"])
def worlds(request, tmp_path_factory) -> Iterator[Worlds]:
    with contextlib.ExitStack() as stack:
        clock, urls = ManualClock(), []
        for name in "txnstore_at_once", "txnstore_general":
            if request.param.endswith("sqlite"):
                urls.append(f"sqlite:///{tmp_path_factory.mktemp(name)}/store.db")
            else:
                urls.append(stack.enter_context(request.getfixturevalue("lent_postgresql")()))
        at_once, general = (stack.enter_context(open_store(url, clock=clock)) for url in urls)
        general.commits_whole, at_once.commits_whole = False, True
        if not request.param.startswith("function"):
            at_once.general_until_seconds = math.inf
        found = Worlds(clock, at_once, general)
        stack.enter_context(noted_places(at_once, found.places))
        yield found
        assert_all_are_the_same(found)


@contextmanager
def noted_places(store: Store, found: list[list[int] | None]) -> Iterator[None]:
    """Note what comes back where the store commits at once, by either way."""
    patch = pytest.MonkeyPatch()
    end_at_once = TransactionCoordinator._end_at_once

    def noted(coordinator: TransactionCoordinator, *arguments: Any) -> Ended | None:
        ended = end_at_once(coordinator, *arguments)
        if coordinator.store is store:
            found.append(None if ended is None else [place.base_offset for place in ended.appended])
        return ended

    patch.setattr(TransactionCoordinator, "_end_at_once", noted)
    yield
    patch.undo()


def told(call: Callable[[], object]) -> object:
    try:
        return call()
    except TxnStoreError as error:
        return type(error), str(error)


def happens(pair: tuple[World, World], step: str, *arguments: Any) -> object:
    """Do the same in both worlds; what comes back is the same."""
    answers = [told(lambda world=world: getattr(world, step)(*arguments)) for world in pair]
    assert answers[0] == answers[1], (step, arguments)
    return answers[0]


def assert_same(pair: tuple[World, World]) -> None:
    at_once, general = (world.rows() for world in pair)
    assert_same_rows(at_once, general)
    # Of all worlds of the database these alone have changed; the others are read once, at the end.
    assert_sound(pair[0].store, partition_ids=[partition_id for partition_id, *_ in at_once[partition_heads.name]])


def assert_all_are_the_same(worlds: Worlds) -> None:
    """Compare what each test has compared of its own worlds, of all of them."""
    assert_same_rows(rows_of(worlds.at_once), rows_of(worlds.general))
    assert_sound(worlds.at_once)


def lived_through(worlds: Worlds, steps: list[tuple[Any, ...]]) -> tuple[World, World]:
    """Return a new pair of worlds in which all of this has happened."""
    pair = worlds.new_pair()
    happens(pair, "give_members")
    for name in pair[0].names:
        happens(pair, "start", name)
    for step, *arguments in steps:
        if step == "advance":
            worlds.clock.advance(*arguments)
            continue
        if step in ("start", "send", "commit", "append", "abort", "repeat", "exhaust"):
            arguments[0] = pair[0].names[arguments[0]]
        happens(pair, step, *arguments)
    return pair
