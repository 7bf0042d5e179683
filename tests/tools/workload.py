"""Processes that work on one store until they are killed, and go on in their next life where they were.

All that a writer knows of its past is its own history: the lines that its earlier lives wrote before and after each
call.  From them it does what a real client does: it sends the batch again whose answer is missing, or it becomes the
producer anew and asks how the transaction ended that it was committing.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeVar

from tests.tools.elsewhere import Elsewhere
from tests.tools.histories import Event, History, Kind, Operation, read_lines
from tests.tools.recording import LineRecorder, RecordedProducer, RecordedReader, Values
from txnstore.db.backend import Limits
from txnstore.db.opening import open_store
from txnstore.db.store import Store
from txnstore.errors import InvalidProducerIdMapping, ProducerFenced, Recovery, TransactionAbortable, TxnStoreError
from txnstore.model import IsolationLevel, ProducerIdentity
from txnstore.transactions.recovery import recover

Result = TypeVar("Result")

_PR_SET_PDEATHSIG: Final = 1
#: A process that was stopped in the middle of a database transaction loses it after this long (PostgreSQL).
_LIMITS: Final = Limits(idle_timeout_ms=1_000)
_PAUSE_SECONDS: Final = 0.05
#: How often an answer is noted late, and how late at most.
_DELAYED: Final = 0.15
_DELAY_SECONDS: Final = 0.1
_PAGE_RECORDS: Final = (2, 10, 10_000)
#: How often a writer of transactions does what.
_COMMITS: Final = 0.75
_SENDS_REST_WITH_COMMIT: Final = 0.5
_ASKS_BEFORE_INIT: Final = 0.5


@dataclass(frozen=True)
class Job:
    """What one process is to do, in one of its lives."""

    url: str
    folder: Path
    name: str
    life: int
    partitions: Mapping[str, int]
    seed: int = 0
    timeout_ms: int = 60_000
    writes_elsewhere: bool = False
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED
    is_mortal: bool = True
    """Whether the life may be ended at any moment."""

    @property
    def process(self) -> str:
        """The name of this life in the history."""
        return f"{self.name}#{self.life}"

    def recorder(self) -> LineRecorder:
        """Return where this life writes its history, of the last life without a delay."""
        path = self.folder / f"{self.process}.jsonl"
        return DelayedRecorder(path, self.chance()) if self.is_mortal else LineRecorder(path)

    def chance(self) -> random.Random:
        """Return what this life draws from; the same for the same seed."""
        return random.Random(f"{self.seed}/{self.process}")

    def past(self) -> list[Operation]:
        """Return what the earlier lives did."""
        return History.of(read_events(self.folder, self.name)).operations


class DelayedRecorder(LineRecorder):
    """Sometimes notes an answer late: whoever is killed until then does not know what has happened."""

    def __init__(self, path: Path, chance: random.Random) -> None:
        """Go on with the file, or begin it."""
        super().__init__(path)
        self._chance = chance

    def record(self, event: Event) -> None:
        """Write the line in one call, maybe after a while."""
        if event.kind is Kind.OK and self._chance.random() < _DELAYED:
            time.sleep(self._chance.random() * _DELAY_SECONDS)
        super().record(event)


def read_events(folder: Path, name: str = "*") -> list[Event]:
    """Return the events that all lives of the process, or of all processes, have written."""
    return [event for path in sorted(folder.glob(f"{name}#*.jsonl")) for event in read_lines(path.read_text())]


def run_job(program: Callable[..., object], job: Job, *arguments: object) -> None:
    """Run the program in this process, which ends with the one that started it; an error is left in a file."""
    _end_with_parent()
    try:
        program(job, *arguments)
    except BaseException:
        (job.folder / f"{job.process}.error").write_text(traceback.format_exc())
        raise


class PlainWriter:
    """An idempotent producer without transactions, over all of its lives."""

    def __init__(self, job: Job, store: Store) -> None:
        """Make a writer that has not looked at its past yet."""
        self._job = job
        self._random = job.chance()
        self._producer = RecordedProducer(job.recorder(), job.process, store, job.partitions)
        self._count = 0

    def take_up(self) -> None:
        """Go on as the producer of the last life; send the batch again whose answer is missing."""
        past = self._job.past()
        mine = [operation for operation in past if operation.function == "init" and operation.kind is Kind.OK]
        appends = [operation for operation in past if operation.function == "append"]
        if not mine:
            again(self._producer.init)
            return
        sequences: dict[str, int] = {}
        for operation in appends:
            sequences = _sequences_after(operation) if operation.kind is Kind.OK else operation.details["sequences"]
        self._producer.become(ProducerIdentity(*mine[-1].producer), sequences)
        if appends and appends[-1].kind is not Kind.OK:
            self._append(appends[-1].details["transaction"], appends[-1].details["values"])

    def work(self) -> None:
        """Append one batch to some partitions."""
        self._count += 1
        name = f"{self._job.process}/{self._count}"
        self._append(name, _values(self._random, self._job.partitions, name))

    def _append(self, name: str, values: Values) -> None:
        again(partial(self._producer.append, name, values))


class TransactionalWriter:
    """A producer of transactions, over all of its lives; its transactional id is its name."""

    def __init__(self, job: Job, store: Store) -> None:
        """Make a writer that has not looked at its past yet."""
        self._job = job
        self._random = job.chance()
        self._producer = RecordedProducer(
            job.recorder(),
            job.process,
            store,
            job.partitions,
            transactional_id=job.name,
            timeout_ms=job.timeout_ms,
            writes_elsewhere=job.writes_elsewhere,
        )
        self._count = 0

    def take_up(self) -> None:
        """Become the producer, and ask how the commits ended whose answers are missing, before or after."""
        asks_first = self._random.random() < _ASKS_BEFORE_INIT
        if asks_first:
            self._resolve_past()
        again(self._producer.init)
        if not asks_first:
            self._resolve_past()

    def work(self) -> None:
        """Run one transaction: some batches, then a commit or an abort."""
        self._count += 1
        name = f"{self._job.process}/{self._count}"
        batches = [
            _values(self._random, self._job.partitions, f"{name}/{index}")
            for index in range(self._random.randint(1, 3))
        ]
        commit = self._random.random() < _COMMITS
        rest = batches.pop() if commit and self._random.random() < _SENDS_REST_WITH_COMMIT else None
        try:
            for values in batches:
                self._append(name, values)
            again(lambda: self._producer.end(name, commit=commit, values=rest))
        except TransactionAbortable:
            # It was open for too long and somebody aborted it: nothing but an abort is left to say.
            again(lambda: self._producer.end(name, commit=False))

    def _append(self, name: str, values: Values) -> None:
        again(partial(self._producer.append, name, values))

    def _resolve_past(self) -> None:
        past = self._job.past()
        resolved = {
            operation.details["transaction"]
            for operation in past
            if operation.kind is Kind.OK
            and (operation.function == "resolve" or (operation.function == "end" and operation.details["commit"]))
        }
        for operation in past:
            if operation.function == "end" and operation.details["commit"] and operation.kind is Kind.UNKNOWN:
                name = operation.details["transaction"]
                if name not in resolved:
                    again(partial(self._producer.resolve, name, ProducerIdentity(*operation.producer)))
                    resolved.add(name)


def write_plainly(job: Job) -> None:
    """Append until killed."""
    with _open(job) as store:
        writer = PlainWriter(job, store)
        writer.take_up()
        while True:
            writer.work()


def write_transactions(job: Job) -> None:
    """Run transactions until killed, or until a newer life has taken over."""
    with _open(job) as store:
        writer = TransactionalWriter(job, store)
        try:
            writer.take_up()
            while True:
                writer.work()
        except (ProducerFenced, InvalidProducerIdMapping):
            return


def write_late(job: Job, pipe: Connection) -> None:
    """Open a transaction, say so, and go on only when told how: by an append, or by the commit."""
    with _open(job) as store:
        producer = RecordedProducer(
            job.recorder(),
            job.process,
            store,
            job.partitions,
            transactional_id=job.name,
            timeout_ms=job.timeout_ms,
        )
        producer.init()
        values = {partition: [f"{job.process}/{partition}"] for partition in job.partitions}
        producer.append(job.process, values)
        pipe.send("open")
        late = pipe.recv()
        try:
            if late == "append":
                producer.append(job.process, {partition: [f"{of[0]}/late"] for partition, of in values.items()})
            else:
                producer.end(job.process, commit=True)
        except TxnStoreError as error:
            pipe.send(type(error).__name__)
        else:
            pipe.send("ok")


def read_all(job: Job) -> None:
    """Read everything from the start and then what comes, until killed."""
    chance = job.chance()
    with _open(job) as store:
        reader = RecordedReader(job.recorder(), job.process, store, job.partitions, job.isolation)
        waiter = store.waiter()
        while True:
            if not reader.poll(records_max=chance.choice(_PAGE_RECORDS)):
                waiter.wait(100)


def help_out(job: Job) -> None:
    """Complete what is decided and abort what is open for too long, until killed."""
    chance = job.chance()
    with _open(job) as store:
        while True:
            # By turns as if all were in one database, and as if it went to others.
            recover(store, chance.choice((None, Elsewhere(store))))
            time.sleep(_PAUSE_SECONDS)


def again(call: Callable[[], Result]) -> Result:
    """Make the very same call until it has an answer that will not change."""
    while True:
        try:
            return call()
        except TxnStoreError as error:
            if error.recovery not in (Recovery.RETRY, Recovery.RESOLVE):
                raise


def _open(job: Job) -> Store:
    return open_store(job.url, limits=_LIMITS, pool_size=1, create=False)


def _sequences_after(operation: Operation) -> dict[str, int]:
    sequences: dict[str, int] = dict(operation.details["sequences"])
    for partition, values in operation.details["values"].items():
        sequences[partition] = sequences.get(partition, 0) + len(values)
    return sequences


def _values(chance: random.Random, partitions: Mapping[str, int], name: str) -> Values:
    chosen = chance.sample(sorted(partitions), chance.randint(1, 3))
    return {partition: [f"{name}/{partition}/{index}" for index in range(chance.randint(1, 4))] for partition in chosen}


def _end_with_parent() -> None:
    """Let the kernel end this process with its parent: even one that is stopped and could not end by itself."""
    _let_fork_server_end()
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")


def _let_fork_server_end() -> None:
    """Let the fork server, our parent, end as soon as the process that started it does.

    It stays for as long as anybody holds the other end of a pipe, which it hands to its children too; they would keep
    it, and themselves, for ever.
    """
    server: Any = getattr(forkserver, "_forkserver", None)
    alive = getattr(server, "_forkserver_alive_fd", None)
    if alive is not None:
        server._forkserver_alive_fd = None
        os.close(alive)
