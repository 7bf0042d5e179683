"""The history of what clients of a store did and saw: one event a line, and what can be told from all.

Each process appends its events to a file of its own, outside the database under test: an `invoke` before a call, and
after it `ok`, `fail` (nothing was changed) or `info` (unknown).  A process that is killed leaves an `invoke` alone.
Every value is written once only and is known by its text; so a value that is read names its writer.

What is wrong with a history is found by `tests.tools.anomalies`; nothing here or there touches a database.

Functions, and what their events tell ("partition" is a name like "orders-0"):

    init     transactional_id; ok: producer
    append   transaction, transactional_id or null, producer, values by partition; ok: base_offsets by partition
    end      as append, and commit, atomic (whether it becomes visible at one instant); ok: producer, base_offsets
    resolve  transaction; ok: committed
    poll     isolation ("rc" or "ru"), final (whether all is quiet); ok: pages by partition
    dump     ok: batches by partition
"""

from __future__ import annotations

import enum
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Self


class Kind(enum.StrEnum):
    """What an event says of its operation."""

    INVOKE = "invoke"
    OK = "ok"
    FAIL = "fail"
    UNKNOWN = "info"


class Decision(enum.Enum):
    """How a transaction ended."""

    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a history."""

    time_ns: int
    """CLOCK_MONOTONIC: one clock for all processes of a machine."""

    process: str
    kind: Kind
    function: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_line(self) -> str:
        """Return the event as a line of JSON."""
        return json.dumps([self.time_ns, self.process, self.kind, self.function, self.details]) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Return the event of a line.

        Raises:
            ValueError: it is not one, as the last line of a killed process may be.
        """
        time_ns, process, kind, function, details = json.loads(line)
        return cls(time_ns, process, Kind(kind), function, details)


def read_lines(text: str) -> list[Event]:
    """Return the events of a file; what a killed process wrote of a last line is left out."""
    events = []
    for line in text.splitlines():
        try:
            events.append(Event.from_line(line))
        except ValueError:
            continue
    return events


@dataclass(frozen=True, slots=True)
class Operation:
    """A call with its answer."""

    process: str
    function: str
    kind: Kind
    """Of the answer; UNKNOWN if there was none."""

    invoked_ns: int
    completed_ns: float
    """Infinity if there was no answer: it may take effect at any later time."""

    details: Mapping[str, Any]

    @property
    def writer(self) -> str:
        """Who it was, over all of its lives: the process without what follows "#"."""
        return self.process.partition("#")[0]

    @property
    def producer(self) -> tuple[int, int]:
        """The producer id and the epoch that the call used, or was given."""
        producer_id, epoch = self.details["producer"]
        return producer_id, epoch


@dataclass
class Transaction:
    """What became visible, or did not, as one: a transaction, or one append outside of any."""

    name: str
    appends: list[Operation] = field(default_factory=list)
    ends: list[Operation] = field(default_factory=list)
    resolved: list[Decision] = field(default_factory=list)
    records: dict[tuple[str, str], Kind] = field(default_factory=dict)
    """By partition and value: whether the append was acknowledged (OK), refused (FAIL) or neither."""

    @cached_property
    def is_atomic(self) -> bool:
        """Whether all of it becomes visible at one instant."""
        return all(end.details.get("atomic", True) for end in self.ends)

    @cached_property
    def commit_invoked_ns(self) -> float:
        """When it was first asked to commit; infinity if never."""
        return min((end.invoked_ns for end in self.ends if end.details.get("commit", True)), default=math.inf)

    @cached_property
    def ended_ns(self) -> float:
        """When it was known to be over; infinity if that was never known."""
        return min((end.completed_ns for end in self.ends if end.kind is Kind.OK), default=math.inf)

    @cached_property
    def decision(self) -> Decision | None:
        """How it ended, by the answers to its clients alone; None if nobody knows."""
        answers = {(end.details.get("commit", True), end.kind) for end in self.ends}
        if (True, Kind.OK) in answers:
            return Decision.COMMITTED
        if self.resolved:
            return self.resolved[0]
        # Without a commit that may have happened it can only abort.
        return None if (True, Kind.UNKNOWN) in answers else Decision.ABORTED


@dataclass(frozen=True, slots=True)
class Page:
    """What one poll got of one partition: everything from `from_offset` up to `next_offset`."""

    partition: str
    from_offset: int
    next_offset: int
    last_stable_offset: int
    high_watermark: int
    records: Sequence[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class Poll:
    """One successful poll."""

    operation: Operation
    is_committed: bool
    """Whether it reads committed records only."""

    is_final: bool
    pages: Sequence[Page]


@dataclass(frozen=True, slots=True)
class Batch:
    """A stored record batch, as a dump shows it."""

    base_offset: int
    last_offset: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    is_transactional: bool
    marker: str | None
    """ "COMMIT" or "ABORT" """


@dataclass
class History:
    """All operations in the order of their calls, and what follows from them."""

    operations: list[Operation]
    transactions: dict[str, Transaction] = field(default_factory=dict)
    polls: list[Poll] = field(default_factory=list)
    writers: dict[tuple[str, str], Transaction] = field(default_factory=dict)
    """By partition and value."""

    log: dict[str, dict[int, set[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))
    """By partition and offset: the values that clients were told to stand there."""

    offsets: dict[tuple[str, str], set[int]] = field(default_factory=lambda: defaultdict(set))
    """By partition and value."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        """Make a history of events, given in any order."""
        history = cls(_paired(events))
        for operation in history.operations:
            _TAKE_IN.get(operation.function, _nothing)(history, operation)
        return history

    def of_function(self, *functions: str) -> list[Operation]:
        """Return the operations of these functions, in the order of their calls."""
        return [operation for operation in self.operations if operation.function in functions]

    def is_committed(self, partition: str, value: str) -> bool:
        """Return whether the value's transaction committed, as far as its clients know."""
        writer = self.writers.get((partition, value))
        return writer is not None and writer.decision is Decision.COMMITTED

    def stands_at(self, partition: str, offset: int) -> Transaction | None:
        """Return whose value stands at the offset, if one is known."""
        for value in self.log[partition].get(offset, ()):
            return self.writers.get((partition, value))
        return None

    def batches(self) -> dict[str, list[Batch]]:
        """Return every partition as the last dump shows it."""
        dumps = [operation for operation in self.of_function("dump") if operation.kind is Kind.OK]
        if not dumps:
            return {}
        return {name: [Batch(*row) for row in rows] for name, rows in dumps[-1].details["batches"].items()}


def _paired(events: Iterable[Event]) -> list[Operation]:
    waiting: dict[str, Event] = {}
    operations = []
    for event in sorted(events, key=lambda event: event.time_ns):
        if event.kind is Kind.INVOKE:
            assert event.process not in waiting, f"{event.process} has two calls at once"
            waiting[event.process] = event
            continue
        call = waiting.pop(event.process)
        details = {**call.details, **event.details}
        operations.append(Operation(event.process, event.function, event.kind, call.time_ns, event.time_ns, details))
    operations.extend(
        Operation(call.process, call.function, Kind.UNKNOWN, call.time_ns, math.inf, call.details)
        for call in waiting.values()
    )
    return sorted(operations, key=lambda operation: operation.invoked_ns)


def _nothing(history: History, operation: Operation) -> None:
    pass


def _take_in_append(history: History, operation: Operation) -> None:
    transaction = _transaction_of(history, operation)
    transaction.appends.append(operation)
    if operation.details.get("transactional_id") is None:
        transaction.ends.append(operation)
    _take_in_records(history, transaction, operation)


def _take_in_end(history: History, operation: Operation) -> None:
    transaction = _transaction_of(history, operation)
    transaction.ends.append(operation)
    _take_in_records(history, transaction, operation)


def _take_in_records(history: History, transaction: Transaction, operation: Operation) -> None:
    base_offsets = operation.details.get("base_offsets", {}) if operation.kind is Kind.OK else {}
    for partition, values in operation.details.get("values", {}).items():
        for index, value in enumerate(values):
            record = (partition, value)
            history.writers[record] = transaction
            before = transaction.records.get(record, Kind.FAIL)
            transaction.records[record] = max(before, operation.kind, key=_CERTAINTY.index)
            if partition in base_offsets:
                _place(history, partition, base_offsets[partition] + index, value)


def _take_in_resolve(history: History, operation: Operation) -> None:
    if operation.kind is Kind.OK:
        decision = Decision.COMMITTED if operation.details["committed"] else Decision.ABORTED
        _transaction_of(history, operation).resolved.append(decision)


def _take_in_poll(history: History, operation: Operation) -> None:
    if operation.kind is not Kind.OK:
        return
    pages = [
        Page(name, page[0], page[1], page[2], page[3], [(offset, value) for offset, value in page[4]])
        for name, page in operation.details["pages"].items()
    ]
    is_committed = operation.details["isolation"] == "rc"
    history.polls.append(Poll(operation, is_committed, operation.details.get("final", False), pages))
    for page in pages:
        for offset, value in page.records:
            _place(history, page.partition, offset, value)


#: What was refused once and taken another time was taken.
_CERTAINTY: Final = (Kind.FAIL, Kind.UNKNOWN, Kind.OK)


def _transaction_of(history: History, operation: Operation) -> Transaction:
    name = operation.details["transaction"]
    return history.transactions.setdefault(name, Transaction(name))


def _place(history: History, partition: str, offset: int, value: str) -> None:
    history.log[partition][offset].add(value)
    history.offsets[partition, value].add(offset)


_TAKE_IN: Final = {
    "append": _take_in_append,
    "end": _take_in_end,
    "resolve": _take_in_resolve,
    "poll": _take_in_poll,
}
