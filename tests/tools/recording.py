"""Clients that write down what they do: producers and readers of a store whose calls make a history.

They call the log and the coordinator as real clients do and keep to one rule: the `invoke` is written before the
call, the answer after it, and each reaches the operating system before the next step.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from sqlalchemy import Connection, select

from tests.tools.elsewhere import Elsewhere
from tests.tools.histories import Event, Kind
from txnstore.db.schema import record_batches
from txnstore.db.store import Store
from txnstore.errors import OutcomeUnknown, TxnStoreError
from txnstore.log.append import Append, Appended, append
from txnstore.log.codec import encode
from txnstore.log.fetch import PAGE_RECORDS_MAX, Page, fetch
from txnstore.model import ControlType, IsolationLevel, ProducerIdentity, Record, StoredRecord
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.outcome import Outcome, resolve_outcome

Result = TypeVar("Result")

#: Values by the name of their partition.
Values = Mapping[str, Sequence[str]]

_HEADER: Final = "written-by"
_STORED: Final = select(
    record_batches.c.base_offset,
    record_batches.c.last_offset,
    record_batches.c.producer_id,
    record_batches.c.producer_epoch,
    record_batches.c.base_sequence,
    record_batches.c.is_transactional,
    record_batches.c.control_type,
).order_by(record_batches.c.last_offset)


class Recorder(Protocol):
    """Where events go."""

    def record(self, event: Event) -> None:
        """Keep the event; when it returns, the event outlives this process."""
        ...


class LineRecorder:
    """Events as lines at the end of a file, without a buffer."""

    def __init__(self, path: Path) -> None:
        """Go on with the file, or begin it."""
        # What a killed process left of a line becomes a line of its own, which nobody can read.
        is_cut = path.exists() and not path.read_bytes().endswith(b"\n")
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        if is_cut:
            os.write(self._file, b"\n")

    def record(self, event: Event) -> None:
        """Write the line in one call."""
        os.write(self._file, event.to_line().encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


@dataclass(frozen=True)
class Caller:
    """One process of the history, which records its calls."""

    recorder: Recorder
    process: str

    def perform(
        self,
        function: str,
        details: Mapping[str, Any],
        call: Callable[[], Result],
        answer: Callable[[Result], Mapping[str, Any]],
    ) -> Result:
        """Record the call and what came of it, and return its result or raise its error."""
        self._record(Kind.INVOKE, function, details)
        try:
            result = call()
        except OutcomeUnknown as error:
            self._record(Kind.UNKNOWN, function, {"error": str(error)})
            raise
        except TxnStoreError as error:
            self._record(Kind.FAIL, function, {"error": type(error).__name__})
            raise
        self._record(Kind.OK, function, answer(result))
        return result

    def _record(self, kind: Kind, function: str, details: Mapping[str, Any]) -> None:
        self.recorder.record(Event(time.monotonic_ns(), self.process, kind, function, details))


class RecordedProducer:
    """An idempotent producer; with a transactional id, one of transactions.

    `name` is its process in the history.  It remembers its sequence numbers; what it wrote before it was killed
    somebody else has to tell it.
    """

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        store: Store,
        partitions: Mapping[str, int],
        *,
        transactional_id: str | None = None,
        timeout_ms: int = 60_000,
        writes_elsewhere: bool = False,
    ) -> None:
        """Make a producer that writes to `partitions`, whose ids are given by their names."""
        self.identity = ProducerIdentity(-1, -1)
        self.sequences: dict[str, int] = defaultdict(int)
        self._caller = Caller(recorder, name)
        self._store = store
        self._partitions = partitions
        self._transactional_id = transactional_id
        self._timeout_ms = timeout_ms
        self._writes_elsewhere = writes_elsewhere
        self._coordinator = TransactionCoordinator(store, Elsewhere(store) if writes_elsewhere else None)

    def init(self) -> ProducerIdentity:
        """Become the one producer of the transactional id."""
        initialized = self._caller.perform(
            "init",
            {"transactional_id": self._transactional_id},
            lambda: self._coordinator.init_producer_id(self._transactional_id, self._timeout_ms),
            lambda initialized: {"producer": _pair(initialized.identity)},
        )
        self.become(initialized.identity)
        return initialized.identity

    def become(self, identity: ProducerIdentity, sequences: Mapping[str, int] | None = None) -> None:
        """Go on as this producer, with these next sequence numbers."""
        self.identity = identity
        self.sequences = defaultdict(int, sequences or {})

    def append(self, transaction: str, values: Values) -> list[Appended]:
        """Append to the transaction of this name; without a transactional id the append is a transaction of its own."""
        identity, transactional_id = self.identity, self._transactional_id
        appends = self._appends(values)
        details = {**self._details(transaction, values), "sequences": dict(self.sequences)}
        appended = self._caller.perform(
            "append",
            details,
            lambda: (
                self._coordinator.append(transactional_id, identity, appends)
                if transactional_id is not None
                else self._store.write(lambda connection: append(connection, appends), wakes_readers=True)
            ),
            lambda appended: {
                "base_offsets": self._base_offsets(appended),
                "repeated": any(place.is_duplicate for place in appended),
            },
        )
        for partition, of in values.items():
            self.sequences[partition] += len(of)
        return appended

    def end(self, transaction: str, *, commit: bool, values: Values | None = None) -> ProducerIdentity:
        """Commit or abort; `values` go into the same database transaction."""
        assert self._transactional_id is not None
        transactional_id, identity = self._transactional_id, self.identity
        appends = self._appends(values or {})
        ended = self._caller.perform(
            "end",
            {**self._details(transaction, values or {}), "commit": commit, "atomic": not self._writes_elsewhere},
            lambda: self._coordinator.end_transaction(transactional_id, identity, commit=commit, appends=appends),
            lambda ended: {
                "base_offsets": self._base_offsets(ended.appended),
                "next_producer": _pair(ended.identity),
            },
        )
        self.become(ended.identity)
        return ended.identity

    def resolve(self, transaction: str, identity: ProducerIdentity) -> Outcome:
        """Ask how the transaction that `identity` began has ended."""
        assert self._transactional_id is not None
        transactional_id = self._transactional_id
        return self._caller.perform(
            "resolve",
            {"transaction": transaction, "producer": _pair(identity)},
            lambda: resolve_outcome(self._store, transactional_id, identity),
            lambda outcome: {"committed": outcome is Outcome.COMMITTED},
        )

    def _appends(self, values: Values) -> list[Append]:
        is_transactional = self._transactional_id is not None
        return [
            Append(
                self._partitions[partition],
                encode(
                    [_record(value) for value in of],
                    producer=self.identity,
                    base_sequence=self.sequences[partition],
                    is_transactional=is_transactional,
                ),
            )
            for partition, of in values.items()
        ]

    def _details(self, transaction: str, values: Values) -> dict[str, Any]:
        return {
            "transaction": transaction,
            "transactional_id": self._transactional_id,
            "producer": _pair(self.identity),
            "values": {partition: list(of) for partition, of in values.items()},
        }

    def _base_offsets(self, appended: Sequence[Appended]) -> dict[str, int]:
        names = {number: name for name, number in self._partitions.items()}
        return {names[place.partition_id]: place.base_offset for place in appended}


class RecordedReader:
    """A reader of all partitions at once, which goes on from where its last poll came to."""

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        store: Store,
        partitions: Mapping[str, int],
        isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
    ) -> None:
        """Begin at the start of every partition; ids are given by names."""
        self.positions = dict.fromkeys(partitions, 0)
        self._is_at_end = False
        self._caller = Caller(recorder, name)
        self._store = store
        self._partitions = partitions
        self._isolation = isolation

    @property
    def is_at_end(self) -> bool:
        """Whether the last poll came to the end of every partition."""
        return self._is_at_end

    def poll(self, *, records_max: int = PAGE_RECORDS_MAX, final: bool = False) -> int:
        """Fetch one page and return how many records it had; `final` says that nobody writes any more."""
        positions = {self._partitions[name]: offset for name, offset in self.positions.items()}
        pages: dict[int, Page] = self._caller.perform(
            "poll",
            {"isolation": "rc" if self._isolation is IsolationLevel.READ_COMMITTED else "ru", "final": final},
            lambda: self._store.read(
                lambda connection: fetch(connection, positions, isolation=self._isolation, records_max=records_max)
            ),
            lambda pages: {
                "pages": {name: _page(self.positions[name], pages[number]) for name, number in self._partitions.items()}
            },
        )
        self.positions = {name: pages[number].next_offset for name, number in self._partitions.items()}
        self._is_at_end = all(page.next_offset == page.bounds.high_watermark for page in pages.values())
        return sum(batch.record_count for page in pages.values() for batch in page.batches)


def read_to_end(recorder: Recorder, name: str, store: Store, partitions: Mapping[str, int]) -> None:
    """Record what can be read of everything, by readers of both kinds, now that nobody writes."""
    for isolation, suffix in ((IsolationLevel.READ_COMMITTED, "rc"), (IsolationLevel.READ_UNCOMMITTED, "ru")):
        reader = RecordedReader(recorder, f"{name}-{suffix}", store, partitions, isolation)
        while reader.poll(final=True) and not reader.is_at_end:
            pass


def dump(recorder: Recorder, name: str, store: Store, partitions: Mapping[str, int]) -> None:
    """Record every stored batch, markers included."""

    def read(connection: Connection) -> dict[str, list[list[Any]]]:
        return {
            partition: [
                [*row[:5], bool(row[5]), None if row[6] is None else ControlType(row[6]).name]
                for row in connection.execute(_STORED.where(record_batches.c.partition_id == number))
            ]
            for partition, number in partitions.items()
        }

    Caller(recorder, name).perform("dump", {}, lambda: store.read(read), lambda batches: {"batches": batches})


def _record(value: str) -> Record:
    data = value.encode()
    return Record(data, key=data[::-1], timestamp_ms=len(data), headers=[(_HEADER, data), (_HEADER, None)])


def _text(record: StoredRecord) -> str:
    """Return the value, or what no writer ever wrote if anything else of the record is not as it was written."""
    value = (record.value or b"").decode(errors="replace")
    written = _record(value)
    if (record.key, record.timestamp_ms, list(record.headers)) != (
        written.key,
        written.timestamp_ms,
        list(written.headers),
    ):
        return f"damaged: {record!r}"
    return value


def _page(from_offset: int, page: Page) -> list[Any]:
    records = [[record.offset, _text(record)] for batch in page.batches for record in batch.records(from_offset)]
    bounds = page.bounds
    return [from_offset, page.next_offset, bounds.last_stable_offset, bounds.high_watermark, records]


def _pair(identity: ProducerIdentity) -> list[int]:
    return [identity.producer_id, identity.epoch]
