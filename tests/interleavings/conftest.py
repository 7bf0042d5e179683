"""What the tests of interleavings share: stores for the actors, and a fresh, recorded setting for each order."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import pytest

from tests.tools.anomalies import find_anomalies
from tests.tools.histories import Event, History, Kind
from tests.tools.interleaving import Finished, Scenario
from tests.tools.journal import ShortJournal
from tests.tools.recording import RecordedProducer, RecordedReader, dump, read_to_end
from txnstore.db.store import Store
from txnstore.errors import TxnStoreError
from txnstore.log.partition_rows import draw_commit_number
from txnstore.log.topics import create_topic
from txnstore.model import IsolationLevel
from txnstore.testing.manual_clock import ManualClock

_numbers = itertools.count(1)


class MemoryRecorder:
    """Events in a list; a call counts as made when its actor is let go, not when it stops before its first step."""

    def __init__(self):
        self.events: list[Event] = []
        self._standing: dict[str, int] = {}
        self._lock = threading.Lock()

    def record(self, event):
        with self._lock:
            if event.kind is Kind.INVOKE:
                self._standing[event.process] = len(self.events)
            else:
                self._standing.pop(event.process, None)
            self.events.append(event)

    def let_go(self, process):
        with self._lock:
            index = self._standing.pop(process, None)
            if index is not None:
                self.events[index] = replace(self.events[index], time_ns=time.monotonic_ns())


@dataclass
class Setting:
    """A topic and a transactional id of their own, and everything that is done with them."""

    observer: Store
    transactional_id: str
    topic: str
    partitions: Mapping[str, int]
    recorder: MemoryRecorder = field(default_factory=MemoryRecorder)

    def producer(self, name, store, **options):
        """Return a producer of this setting's transactional id, unless another one is given."""
        options = {"transactional_id": self.transactional_id, **options}
        return RecordedProducer(self.recorder, name, store, self.partitions, **options)

    def reader(self, name, store, isolation=IsolationLevel.READ_COMMITTED):
        return RecordedReader(self.recorder, name, store, self.partitions, isolation)

    def scenario(
        self,
        actors: Mapping[str, Callable[[], object]],
        *,
        after_step: Callable[[], object] = lambda: None,
        at_end: Callable[[Mapping[str, Finished]], object] = lambda finished: None,
        alike: Collection[str] = (),
    ) -> Scenario:
        """Return the scenario: at each step all that is committed is read, and in the end nothing was wrong."""

        def look():
            self.look()
            after_step()

        def conclude(finished):
            at_end(finished)
            self.look(final=True)
            self.check()

        return Scenario(actors, self.recorder.let_go, look, conclude, alike)

    def look(self, *, final=False):
        name = f"observer#{next(_numbers)}"
        if final:
            read_to_end(self.recorder, name, self.observer, self.partitions)
            dump(self.recorder, name, self.observer, self.partitions)
            return
        self.reader(name, self.observer).poll()

    def history(self) -> History:
        return History.of(self.recorder.events)

    def check(self):
        assert find_anomalies(self.history()) == []

    def order_of(self, function) -> list[str]:
        """Return the processes whose calls of the function succeeded, in the order of their answers."""
        return [event.process for event in self.recorder.events if (event.function, event.kind) == (function, Kind.OK)]


@dataclass
class World:
    """One database, stores of two or three actors on it, and one of an observer."""

    first: Store
    second: Store
    observer: Store
    clock: ManualClock
    journal: ShortJournal = field(init=False)

    def __post_init__(self):
        self.journal = ShortJournal(self.observer)

    def setting(self, partition_count=2) -> Setting:
        number = next(_numbers)
        topic = self.observer.write(
            lambda connection: create_topic(connection, f"topic{number}", partition_count=partition_count)
        )
        partitions = {f"p{index}": partition_id for index, partition_id in enumerate(topic.partition_ids)}
        return Setting(self.observer, f"transactions-{number}", topic.name, partitions)


@pytest.fixture
def world(url, txnstore_open, clock):
    first, second, observer = (txnstore_open(url, pool_size=1) for _ in range(3))
    # The first number of a database's commits takes SQLite one statement more than those behind it.
    observer.write(draw_commit_number)
    return World(first, second, observer, clock)


@pytest.fixture
def in_turn():
    """Make an actor of calls: it makes one after the other, refused or not, and returns what each came to."""

    def actor(*calls):
        def run():
            answers = []
            for call in calls:
                try:
                    call()
                except TxnStoreError as error:
                    answers.append(type(error).__name__)
                else:
                    answers.append("ok")
            return answers

        return run

    return actor
