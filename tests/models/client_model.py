"""A model of what producers and consumers do, as simply as it can be said: lists, and a state for each producer.

A broker has what is stored, a client what one producer knows of it.  They differ: a producer whose transaction was
aborted from outside, or whose transactional id another one has taken, learns it from its next call that asks.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from txnstore import KafkaError


class State(enum.Enum):
    """What the next call of a producer depends on."""

    INIT = "Init"
    READY = "Ready"
    IN_TRANSACTION = "InTransaction"
    ABORTABLE = "AbortableError"
    FATAL = "FatalError"
    CLOSED = "closed"


class Refused(Exception):
    """The call is refused with one of these codes."""

    def __init__(self, *codes: int, is_fatal: bool = False, requires_abort: bool = False) -> None:
        super().__init__(codes, is_fatal, requires_abort)
        self.codes = codes
        self.is_fatal = is_fatal
        self.requires_abort = requires_abort


class End(enum.Enum):
    """How a transaction ended; None while it is open."""

    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(eq=False)
class Transaction:
    """What was written together."""

    owner: Client
    end: End | None = None
    partitions: set[int] = field(default_factory=set)
    #: By partition: when it was sent, and the offset.
    offsets: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """What stands at one offset: a record, or a marker if it has no value."""

    value: bytes | None
    transaction: Transaction | None = None


class Broker:
    """What is stored."""

    def __init__(self, partitions: Collection[int]) -> None:
        self.log: dict[int, list[Entry]] = {partition: [] for partition in partitions}
        #: The committed offsets: when each was sent, and the offset.
        self._offsets: dict[int, tuple[int, int]] = {}
        self._times = itertools.count()
        #: Who was the last to take each transactional id, and the open transaction of each.
        self.owners: dict[str, Client] = {}
        self.open: dict[str, Transaction] = {}

    def append_plain(self, partition: int, value: bytes) -> None:
        self.log[partition].append(Entry(value))

    def commit_plain(self, offsets: Mapping[int, int]) -> None:
        self._offsets |= self.sent_now(offsets)

    def sent_now(self, offsets: Mapping[int, int]) -> dict[int, tuple[int, int]]:
        """Return the offsets with the time: of two that are committed the one that was sent later counts."""
        return {partition: (next(self._times), offset) for partition, offset in offsets.items()}

    @property
    def offsets(self) -> dict[int, int]:
        """The committed offset of each partition that has one."""
        return {partition: offset for partition, (_, offset) in self._offsets.items()}

    def take(self, client: Client) -> None:
        self.abort_from_outside(client.name)
        self.owners[client.name] = client

    def transaction_of(self, client: Client) -> Transaction:
        return self.open.setdefault(client.name, Transaction(client))

    def end(self, partition: int, isolation: str) -> int:
        log = self.log[partition]
        if isolation == "read_uncommitted":
            return len(log)
        return next((offset for offset, entry in enumerate(log) if _is_open(entry)), len(log))

    def is_pending(self, partition: int) -> bool:
        """Whether an open transaction holds an offset of the partition."""
        return any(partition in transaction.offsets for transaction in self.open.values())

    def visible(self, partition: int, isolation: str, offset: int = 0) -> list[bytes | None]:
        """Return the values that a reader gets from the offset on."""
        entries = self.log[partition][offset : self.end(partition, isolation)]
        return [
            entry.value
            for entry in entries
            if entry.value is not None and not (isolation == "read_committed" and _is_aborted(entry))
        ]

    def finish(self, name: str, end: End) -> None:
        transaction = self.open.pop(name)
        transaction.end = end
        for partition in transaction.partitions:
            self.log[partition].append(Entry(None))
        if end is End.COMMITTED:
            for partition, sent in transaction.offsets.items():
                self._offsets[partition] = max(sent, self._offsets.get(partition, sent))

    def abort_from_outside(self, name: str) -> bool:
        """Abort what is open; whether anything was."""
        if name not in self.open:
            return False
        self.finish(name, End.ABORTED)
        return True


def _is_open(entry: Entry) -> bool:
    return entry.transaction is not None and entry.transaction.end is None


def _is_aborted(entry: Entry) -> bool:
    return entry.transaction is not None and entry.transaction.end is End.ABORTED


class Client:
    """One transactional producer."""

    def __init__(self, broker: Broker, name: str) -> None:
        self.name = name
        self.state = State.INIT
        self._broker = broker
        self._queue: list[tuple[int, bytes, bool]] = []
        #: The transaction as far as something of it was stored, and how many records were given up on the way there.
        self._transaction: Transaction | None = None
        self._given_up = 0
        #: Whether records were dropped that a commit would have brought along: the abort asks for a new epoch.
        self._has_dropped = False
        self._error: Refused | None = None

    def init(self) -> None:
        self._check_state(State.INIT)
        self._broker.take(self)
        self.state = State.READY

    def begin(self) -> None:
        self._check_state(State.READY)
        self.state = State.IN_TRANSACTION

    def produce(self, partition: int, value: bytes, *, is_refused: bool) -> None:
        """Queue a record; one that the topic does not take is refused when it is sent."""
        if self.state is State.FATAL:
            raise Refused(KafkaError._FATAL)
        if self.state is not State.IN_TRANSACTION:
            raise Refused(KafkaError._STATE)
        self._queue.append((partition, value, is_refused))

    def flush(self) -> None:
        """Send what is queued: what becomes of it is told by the reports, and by the next call."""
        if self.state is State.IN_TRANSACTION and self._queue:
            try:
                self._send()
            except Refused as refused:
                self._fail(refused)
        self._queue.clear()

    def purge(self) -> None:
        self._given_up += len(self._queue)
        self._queue.clear()

    def send_offsets(self, offsets: Mapping[int, int]) -> None:
        if not offsets:
            return
        self._check_state(State.IN_TRANSACTION)
        self._check_with_broker()
        self._stored().offsets |= self._broker.sent_now(offsets)

    def commit(self) -> None:
        self._check_state(State.IN_TRANSACTION)
        if self._given_up:
            # What is queued goes with the commit or not at all.
            self._has_dropped = bool(self._queue)
            self._queue.clear()
            self._fail(Refused(KafkaError._INCONSISTENT, requires_abort=True))
        self.flush()
        self._check_state(State.IN_TRANSACTION)
        if self._transaction is not None:
            self._check_with_broker()
            self._broker.finish(self.name, End.COMMITTED)
        self._is_over()

    def abort(self) -> None:
        self._check_state(State.IN_TRANSACTION, State.ABORTABLE)
        self._queue.clear()
        if self._transaction is not None or self._has_dropped:
            if self._broker.owners[self.name] is not self:
                self._be_fenced()
            self._broker.abort_from_outside(self.name)
        self._is_over()

    def close(self) -> None:
        if self.state is not State.CLOSED and self._transaction is not None:
            if self._broker.owners[self.name] is self:
                self._broker.abort_from_outside(self.name)
            self._transaction = None
        self.state = State.CLOSED

    def _send(self) -> None:
        self._check_with_broker()
        if any(is_refused for _, _, is_refused in self._queue):
            raise Refused(KafkaError.MSG_SIZE_TOO_LARGE, requires_abort=True)
        transaction = self._stored()
        for partition, value, _ in self._queue:
            transaction.partitions.add(partition)
            self._broker.log[partition].append(Entry(value, transaction))

    def _stored(self) -> Transaction:
        if self._transaction is None:
            self._transaction = self._broker.transaction_of(self)
        return self._transaction

    def _is_over(self) -> None:
        self._transaction = None
        self._given_up = 0
        self._has_dropped = False
        self._error = None
        self.state = State.READY

    def _check_state(self, *valid: State) -> None:
        if self.state in (State.ABORTABLE, State.FATAL) and self.state not in valid:
            assert self._error is not None
            raise self._error
        if self.state not in valid:
            raise Refused(KafkaError._STATE)

    def _check_with_broker(self) -> None:
        """Learn what has happened since the producer asked last."""
        if self._broker.owners[self.name] is not self:
            self._be_fenced()
        if self._transaction is not None and self._transaction.end is not None:
            refused = Refused(KafkaError.TRANSACTION_ABORTABLE, KafkaError.INVALID_PRODUCER_EPOCH, requires_abort=True)
            self._fail(refused)
            raise refused

    def _be_fenced(self) -> None:
        refused = Refused(KafkaError._FENCED, is_fatal=True)
        self._fail(refused)
        raise refused

    def _fail(self, refused: Refused) -> None:
        self._error = refused
        self.state = State.FATAL if refused.is_fatal else State.ABORTABLE
