"""The demonstration's first stage: transactional producers, one transaction for each invoice."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from threading import Event
from typing import Final

from scripts.demo_lines import Rejected, Settlement
from scripts.demo_totals import Refunds
from txnstore import Producer

SETTLEMENTS: Final = "settlements"
REJECTED: Final = "settlements-rejected"

#: How many transactions wait for a producer that is busy, at most.
_WAITING_MAX: Final = 200
_LOOK_SECONDS: Final = 0.2

Lines = list[Settlement] | list[Rejected]


@dataclass
class Input:
    """What was in the input, counted while it was read."""

    settlements: int = 0
    invoices: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """How many lines were rejected for each reason."""

    refunds: Refunds = field(default_factory=Refunds)

    @property
    def rejected(self) -> int:
        """How many lines are not settlements."""
        return sum(self.reasons.values())

    def counting(self, transactions: Iterable[Lines]) -> Iterator[Lines]:
        """Pass lines on, and count them."""
        for lines in transactions:
            for line in lines:
                if isinstance(line, Rejected):
                    self.reasons[line.reason] = self.reasons.get(line.reason, 0) + 1
                    continue
                self.settlements += 1
                if line.is_refund:
                    self.refunds.add(line.invoice, line.country, line.refund_amount)
            self.invoices += isinstance(lines[0], Settlement)
            yield lines


def produce(url: str, transactions: Iterable[Lines], producers: int, on_sent: Callable[[int], None]) -> None:
    """Write each of the transactions, by so many producers at a time; a customer's are always the same producer's.

    After each, `on_sent` is called from the producer's thread with the number of its records.

    Raises:
        KafkaException: one of the producers failed; what the others had committed stays.
    """
    queues: list[Queue[Lines | None]] = [Queue(_WAITING_MAX) for _ in range(producers)]
    has_stopped = Event()
    with ThreadPoolExecutor(producers) as pool:
        sending = [
            pool.submit(_send, url, f"settlements-{number}", queue, has_stopped, on_sent)
            for number, queue in enumerate(queues)
        ]
        try:
            for lines in transactions:
                if not _put(queues[zlib.crc32(lines[0].key().encode()) % producers], lines, has_stopped):
                    break  # one of them failed: its result says how
            for queue in queues:
                _put(queue, None, has_stopped)
            for future in sending:
                future.result()
        finally:
            has_stopped.set()


def _put(queue: Queue[Lines | None], lines: Lines | None, has_stopped: Event) -> bool:
    while not has_stopped.is_set():
        try:
            queue.put(lines, timeout=_LOOK_SECONDS)
        except Full:
            continue
        return True
    return False


def _send(url: str, name: str, queue: Queue[Lines | None], has_stopped: Event, on_sent: Callable[[int], None]) -> None:
    try:
        with Producer({"bootstrap.servers": url, "transactional.id": name}) as producer:
            producer.init_transactions()
            while (lines := _next(queue, has_stopped)) is not None:
                with producer.transaction():
                    for line in lines:
                        _queue_record(producer, line)
                on_sent(len(lines))
    except BaseException:
        has_stopped.set()
        raise


def _next(queue: Queue[Lines | None], has_stopped: Event) -> Lines | None:
    while not has_stopped.is_set():
        try:
            return queue.get(timeout=_LOOK_SECONDS)
        except Empty:
            continue
    return None


def _queue_record(producer: Producer, line: Settlement | Rejected) -> None:
    topic = REJECTED if isinstance(line, Rejected) else SETTLEMENTS
    while True:
        try:
            return producer.produce(topic, line.value(), key=line.key())
        except BufferError:  # an invoice of more lines than a producer queues
            producer.poll(_LOOK_SECONDS)
