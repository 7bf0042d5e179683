"""The lanes of a sender: what is on its way to each database, in order, with pauses of its own.

A cluster of one has one lane, and the sender's thread writes by itself.  With several databases each has a thread that
writes, from its first request on: one that is away, or slow, holds up nothing but its own records.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

from txnstore.clients.backoff import Backoff
from txnstore.clients.producer.queue import Batch
from txnstore.clients.producer.requests import ProduceRequest
from txnstore.clients.producer.thread import SenderStopped, SenderThread
from txnstore.clients.worker import Worker

#: The home that stands for all while there is one database.
ALONE: Final = -1


@dataclass(slots=True, eq=False)
class InFlight:
    """Batches that have left the queue and are not reported yet."""

    lane: Lane
    batches: Sequence[Batch]
    request: ProduceRequest | None = None
    is_uncertain: bool = False
    """Whether the log may have them."""

    has_fresh_topics: bool = False
    has_fresh_identity: bool = False
    is_given_up: bool = False
    """Whether a purge named them: they are dropped as soon as nobody writes them."""


@dataclass(slots=True, eq=False)
class Lane:
    """The requests to one database; everything here is done under the producer's lock, but for the write itself."""

    home: int
    backoff: Backoff
    _helper: Worker | None = None
    in_flight: deque[InFlight] = field(default_factory=deque)
    _written: InFlight | None = None
    _answer: Future[Any] | None = None

    @property
    def is_inline(self) -> bool:
        """Whether the sender's thread writes by itself."""
        return self._helper is None

    @property
    def is_writing(self) -> bool:
        """Whether its thread is at work."""
        return self._answer is not None

    @property
    def has_answer(self) -> bool:
        """Whether its thread has done what it was given."""
        return self._answer is not None and self._answer.done()

    def is_being_written(self, in_flight: InFlight) -> bool:
        """Return whether the lane's thread has the request, or its answer is not looked at yet."""
        return in_flight is self._written

    def write(self, in_flight: InFlight, work: Callable[[], Any], changed: threading.Condition) -> None:
        """Let the lane's thread do `work`; `changed` is notified once it is done.

        Raises:
            SenderStopped: the producer was closed.
        """
        assert self._helper is not None
        assert self._answer is None, "one request at a time, so that nothing overtakes"

        def notify(_: object) -> None:
            with changed:
                changed.notify_all()

        try:
            answer = self._helper.submit(work)
        except RuntimeError:
            # Its thread has been closed, and with it the producer.
            raise SenderStopped from None
        self._written, self._answer = in_flight, answer
        answer.add_done_callback(notify)

    def take_answer(self) -> tuple[InFlight, Future[Any]]:
        """Return what was written, and the answer that has come."""
        assert self._written is not None
        assert self._answer is not None
        taken = self._written, self._answer
        self._written = self._answer = None
        return taken


class Lanes:
    """The lanes of one sender, made as they are needed."""

    def __init__(self, thread: SenderThread) -> None:
        """Begin with the lane of a cluster of one, whose pauses are the thread's own."""
        self._thread = thread
        self.alone = Lane(ALONE, thread.backoff)
        self._lanes: dict[int, Lane] = {}

    def __iter__(self) -> Iterator[Lane]:
        """Return all lanes."""
        yield self.alone
        yield from self._lanes.values()

    def of(self, home: int) -> Lane:
        """Return the lane to a database of several."""
        lane = self._lanes.get(home)
        if lane is None:
            lane = self._lanes[home] = Lane(
                home, self._thread.backoff.another(), self._thread.new_helper(f"home-{home}")
            )
        return lane

    @property
    def busy(self) -> set[int]:
        """The leaders whose lanes have something in flight."""
        return {lane.home for lane in self if lane.in_flight}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in flight."""
        return not self.alone.in_flight and not any(lane.in_flight for lane in self._lanes.values())

    @property
    def all_in_flight(self) -> list[InFlight]:
        """Everything that is in flight."""
        return [in_flight for lane in self for in_flight in lane.in_flight]

    @property
    def is_giving_up(self) -> bool:
        """Whether something that a purge named is not dropped yet."""
        return any(in_flight.is_given_up for lane in self for in_flight in lane.in_flight)

    def take_out(self, in_flight: InFlight) -> None:
        """It is in flight no more; nothing happens if it was not."""
        with contextlib.suppress(ValueError):
            in_flight.lane.in_flight.remove(in_flight)
