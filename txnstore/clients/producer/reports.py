"""This file is the delivery reports of a producer: made by the sender, served by the caller's poll, flush or close."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from txnstore.clients.model.errors import KafkaError
from txnstore.clients.model.message import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME, Message
from txnstore.clients.model.topic_partition import OFFSET_INVALID
from txnstore.clients.producer.queue import (
    CALLBACK,
    PARTITION_UNASSIGNED,
    SIZE_BYTES,
    Accumulator,
    DeliveryCallback,
    QueuedRecord,
)
from txnstore.model import NO_TIMESTAMP_MS

#: A base offset so far below zero that no record of the batch gets an offset.
NOWHERE: Final = -(2**62)


@dataclass(slots=True)
class DeliveryReport:
    """What became of records that travelled together."""

    topic: str
    partition: int
    records: Sequence[QueuedRecord]
    error: KafkaError | None = None
    base_offset: int = 0
    log_append_time_ms: int = NO_TIMESTAMP_MS
    done_seconds: float = field(default_factory=time.monotonic)
    served: int = 0

    def message(self, index: int) -> Message:
        """Return one record as its producer's callback gets it: without headers, and without an offset if it failed."""
        value, key, timestamp_ms, _, _, queued_seconds, _, asked_for = self.records[index]
        stamped = self.log_append_time_ms != NO_TIMESTAMP_MS
        return Message.delivered(
            self.topic,
            # What was never given a partition has the one that was asked for.
            asked_for if self.partition == PARTITION_UNASSIGNED else self.partition,
            self.base_offset + index if self.error is None else OFFSET_INVALID,
            key,
            value,
            TIMESTAMP_LOG_APPEND_TIME if stamped else TIMESTAMP_CREATE_TIME,
            self.log_append_time_ms if stamped else timestamp_ms,
            self.done_seconds - queued_seconds,
            self.error,
        )


class DeliveryReports:
    """Reports that wait to be served, and other events for the caller's thread, in order."""

    def __init__(
        self,
        changed: threading.Condition,
        accumulator: Accumulator,
        *,
        default_callback: DeliveryCallback | None,
        only_errors: bool,
    ) -> None:
        """Keep reports; `default_callback` gets those of records that came without a callback of their own."""
        self._changed = changed
        self._accumulator = accumulator
        self._default_callback = default_callback
        self._only_errors = only_errors
        self._reports: deque[DeliveryReport] = deque()
        self._serving = threading.RLock()
        self._events: deque[Callable[[], object]] = deque()

    def add(self, report: DeliveryReport) -> None:
        """Let a report wait until it is served."""
        with self._changed:
            if self._only_errors and report.error is None:
                self._accumulator.release(len(report.records), _size_bytes(report))
            else:
                self._reports.append(report)
            self._changed.notify_all()

    def add_event(self, event: Callable[[], object]) -> None:
        """Let a call of another callback wait until it is served."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    @property
    def are_waiting(self) -> bool:
        """Whether something can be served; under the lock."""
        return bool(self._reports or self._events)

    def serve(self) -> int:
        """Call the callbacks of everything that waits, in order, and return how many events that were.

        An exception of a callback comes out at once; what follows is served by the next call.  A callback may produce
        and may serve reports itself.
        """
        served = 0
        while True:
            with self._changed:
                event = self._events.popleft() if self._events else None
            if event is not None:
                served += 1
                event()
                continue
            count = self.serve_reports()
            if count == 0:
                return served
            served += count

    def serve_reports(self) -> int:
        """Call the callbacks of delivery reports alone.

        One thread serves at a time, so that they come in order; another one has nothing to do meanwhile.
        """
        if not self._serving.acquire(blocking=False):
            return 0
        served = 0
        try:
            while True:
                with self._changed:
                    report = self._reports[0] if self._reports else None
                if report is None:
                    return served
                served += self._serve(report)
        finally:
            self._serving.release()

    def _serve(self, report: DeliveryReport) -> int:
        """Serve what is left of a report; a callback that serves reports itself goes on where this one is."""
        default_callback = self._default_callback
        accumulator, records, error = self._accumulator, report.records, report.error
        count = len(records)
        first = report.served
        released = released_bytes = 0
        try:
            if default_callback is None and first == 0 and all(record[CALLBACK] is None for record in records):
                # Nobody wants to hear of any of them.
                report.served = released = count
                released_bytes = _size_bytes(report)
                return count
            while report.served < count:
                index = report.served
                report.served = index + 1
                record = records[index]
                released += 1
                released_bytes += record[SIZE_BYTES]
                if accumulator.record_count >= accumulator.records_max:
                    # The callback may want to produce.
                    with self._changed:
                        accumulator.release(released, released_bytes)
                    released = released_bytes = 0
                callback = record[CALLBACK]
                if callback is None:
                    callback = default_callback
                if callback is not None:
                    callback(error, report.message(index))
            return count - first
        finally:
            with self._changed:
                accumulator.release(released, released_bytes)
                if report.served == count and self._reports and self._reports[0] is report:
                    self._reports.popleft()


def _size_bytes(report: DeliveryReport) -> int:
    return sum(record[SIZE_BYTES] for record in report.records)
