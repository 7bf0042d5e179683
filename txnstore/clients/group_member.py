"""This file is a consumer's life in its group: joining, being assigned partitions, giving them back, and leaving.

Everything that waits for the database runs on the worker; everything that the application has a say in becomes an
event for its next poll().  A group has one member for now (see `txnstore.groups.membership`): whoever joins gets all
partitions of its topics, and the former member finds out by its heartbeat or its next commit.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable, Sequence
from threading import Condition
from typing import Final

from txnstore.clients.consumer_events import Inbox, Listener, MessageEvent, RebalanceEvent, RebalanceKind
from txnstore.clients.consumer_options import ConsumerOptions
from txnstore.clients.error_messages import error_message
from txnstore.clients.group_requests import GroupRequests
from txnstore.clients.group_topics import SubscribedTopics
from txnstore.clients.kafka_error import KafkaError
from txnstore.clients.partition_reader import unknown_topic
from txnstore.clients.worker import Worker
from txnstore.errors import FencedInstance, IllegalGeneration, TxnStoreError, UnknownMember
from txnstore.model import NO_GENERATION, GroupMembership

#: A joining that failed is tried again after this long at first, and at last.
JOIN_PAUSE_FIRST_SECONDS: Final = 0.2
JOIN_PAUSE_LAST_SECONDS: Final = 10.0
#: A subscribed topic that there is not is looked for this often.
LOOK_FOR_TOPICS_SECONDS: Final = 1.0

#: The answers that say that somebody else is the group's member now.
FENCED: Final = (UnknownMember, FencedInstance, IllegalGeneration)

Partitions = tuple[tuple[str, int], ...]


class Stage(enum.Enum):
    """Where a consumer stands in its group."""

    OUT = "not subscribed"
    JOINING = "asking for its partitions"
    ASSIGNING = "the application has yet to be told of its partitions"
    MEMBER = "at work"
    REVOKING = "the application has yet to give its partitions back"
    LAPSED = "out of the group because the application did not poll"
    REPLACED = "out of the group because another consumer took it over"


#: Where a consumer has a place in the group that it must keep.
_HAS_PLACE: Final = frozenset({Stage.ASSIGNING, Stage.MEMBER, Stage.REVOKING})


class GroupMember:
    """One consumer as a member of its group; guarded by the consumer's lock."""

    def __init__(
        self,
        *,
        lock: Condition,
        inbox: Inbox,
        worker: Worker,
        requests: GroupRequests,
        options: ConsumerOptions,
        on_error: Callable[[BaseException], None],
    ) -> None:
        """Begin outside of the group."""
        self._lock = lock
        self._inbox = inbox
        self._worker = worker
        self._requests = requests
        self._options = options
        self._on_error = on_error
        self.stage = Stage.OUT
        self._topics: tuple[str, ...] = ()
        self._listener = Listener()
        self._join_number = 0
        self._membership: GroupMembership | None = None
        self._owned: Partitions = ()
        """What the application has been given, or is being given; not what it is being asked to give back."""
        self._missing: frozenset[str] = frozenset()
        self._heartbeat_under_way = False
        self._refresh_under_way = False
        self._refreshed_at = time.monotonic()
        self._join_at: float | None = None
        self._join_pause_seconds = JOIN_PAUSE_FIRST_SECONDS
        self._polled_at = time.monotonic()
        self.waiting = 0
        """How many calls of the application are waiting for records: whoever waits has polled."""

    # --- what the application asks -----------------------------------------------------------------------------------

    @property
    def membership(self) -> GroupMembership:
        """Who the consumer is to the group; one that lost its place keeps its old name, so that it is refused."""
        with self._lock:
            return self._membership or GroupMembership(
                self._options.group_id, NO_GENERATION, "", self._options.group_instance_id
            )

    @property
    def member_id(self) -> str | None:
        """The consumer's id in the group, while it has one."""
        with self._lock:
            return self._membership.member_id if self._membership and self.stage in _HAS_PLACE else None

    @property
    def owned(self) -> Partitions:
        """The partitions that the group has given to the consumer."""
        return self._owned

    @property
    def is_subscribed(self) -> bool:
        """Whether the consumer is in the group or on its way."""
        return self.stage is not Stage.OUT

    def subscribe(self, topics: Sequence[str], listener: Listener) -> None:
        """Be in the group for these topics and patterns; the partitions come with a later poll()."""
        with self._lock:
            self._topics = tuple(topics)
            self._missing = frozenset()
            former, self._listener = self._listener, listener
            self._polled_at = time.monotonic()
            self._rejoin(former)

    def unsubscribe(self) -> None:
        """Give everything back at the next poll(), then leave."""
        with self._lock:
            if self.stage is Stage.OUT:
                return
            self._topics = ()
            self._join_number += 1
            if self._owned:
                self._give_back(RebalanceKind.REVOKE, self._owned, self._listener)
                self.stage = Stage.REVOKING
            elif self.stage is not Stage.REVOKING:
                self._leave()

    def polled(self) -> None:
        """Note that the application asks for records; the lock is held."""
        self._polled_at = time.monotonic()
        if self.stage is Stage.LAPSED:
            self._join()

    def is_stale(self, event: RebalanceEvent) -> bool:
        """Return whether the event is about an assignment that has been superseded."""
        return event.kind is RebalanceKind.ASSIGN and event.join_number != self._join_number

    def begin_serving(self, event: RebalanceEvent) -> None:
        """Note that the application is being told now."""
        with self._lock:
            if event.kind is RebalanceKind.ASSIGN:
                self._owned = (*self._owned, *(key for key in event.partitions if key not in self._owned))

    def served(self, event: RebalanceEvent) -> None:
        """Go on after the application was told of the event and has done what it had to do."""
        with self._lock:
            if event.kind is RebalanceKind.ASSIGN and self.stage is Stage.ASSIGNING:
                self.stage = Stage.MEMBER
            elif event.kind is RebalanceKind.REVOKE and self.stage is Stage.REVOKING:
                if self._topics:
                    self._join()
                else:
                    self._leave()

    def leave_now(self) -> None:
        """Leave for good, without asking the application."""
        with self._lock:
            self._topics = ()
            self._owned = ()
            self._join_number += 1
            self._leave()

    def noticed(self, error: TxnStoreError, membership: GroupMembership) -> None:
        """Draw the conclusion from an error that the group has answered to a commit or a heartbeat of `membership`."""
        with self._lock:
            if isinstance(error, FENCED) and self.stage in _HAS_PLACE and membership == self._membership:
                self._replaced(error)

    # --- from time to time -------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Send a heartbeat unless one is under way."""
        with self._lock:
            membership = self._membership
            if self.stage not in _HAS_PLACE or membership is None or self._heartbeat_under_way:
                return
            self._heartbeat_under_way = True
        self._submit(lambda: self._heartbeat(membership))

    def look_after(self) -> None:
        """Leave if the application does not poll, join again if joining failed, look for new topics and partitions."""
        now = time.monotonic()
        with self._lock:
            if self._lapses(now):
                self._lapse(now)
            elif self.stage is Stage.JOINING and self._join_at is not None and self._join_at <= now:
                self._join()
            elif self.stage is Stage.MEMBER and not self._refresh_under_way and self._refresh_is_due(now):
                self._refresh_under_way = True
                self._submit(lambda number=self._join_number: self._refresh(number))  # type: ignore[misc]

    def _lapses(self, now: float) -> bool:
        late = now - self._polled_at > self._options.max_poll_seconds
        return late and not self.waiting and self.stage in _HAS_PLACE

    def _refresh_is_due(self, now: float) -> bool:
        if self._missing:
            return now - self._refreshed_at >= LOOK_FOR_TOPICS_SECONDS
        interval_ms = self._options.metadata_refresh_ms
        return interval_ms > 0 and now - self._refreshed_at >= interval_ms / 1000

    # --- transitions; the lock is held -------------------------------------------------------------------------------

    def _rejoin(self, former: Listener) -> None:
        """Join with the topics as they are now; what must be given back first is."""
        self._join_number += 1
        if self.stage is Stage.REVOKING:
            return
        if self._owned and not self._options.is_cooperative and self.stage in _HAS_PLACE:
            self._give_back(RebalanceKind.REVOKE, self._owned, former)
            self.stage = Stage.REVOKING
        else:
            self._join()

    def _join(self) -> None:
        self.stage = Stage.JOINING
        self._join_at = None
        self._join_number += 1
        number = self._join_number
        self._submit(lambda: self._join_group(number))

    def _leave(self) -> None:
        membership = self._membership if self.stage in _HAS_PLACE or self.stage is Stage.JOINING else None
        self.stage = Stage.OUT
        self._membership = None
        if membership is not None:
            self._submit(lambda: self._leave_group(membership))

    def _lapse(self, now: float) -> None:
        membership = self._membership
        interval_ms = int(self._options.max_poll_seconds * 1000)
        late_ms = int((now - self._polled_at) * 1000) - interval_ms
        text = f"Application maximum poll interval ({interval_ms}ms) exceeded by {late_ms}ms"
        self._lose(Stage.LAPSED, KafkaError(KafkaError._MAX_POLL_EXCEEDED, text))
        if membership is not None:
            self._submit(lambda: self._leave_group(membership))

    def _replaced(self, error: TxnStoreError) -> None:
        text = (
            f"another consumer has taken over group {self._options.group_id!r}: a group has one member for now, and"
            " the last one to join is it; groups of several members are not supported yet"
        )
        self._lose(Stage.REPLACED, KafkaError(error.code, text, fatal=isinstance(error, FencedInstance)))

    def _lose(self, stage: Stage, error: KafkaError) -> None:
        self.stage = stage
        self._join_number += 1
        if self._owned:
            self._give_back(RebalanceKind.LOST, self._owned, self._listener)
        self._inbox.put(MessageEvent(error_message(error)))

    def _give_back(self, kind: RebalanceKind, partitions: Partitions, listener: Listener) -> None:
        self._owned = tuple(key for key in self._owned if key not in partitions)
        self._put(kind, partitions, listener)

    def _put(self, kind: RebalanceKind, partitions: Partitions, listener: Listener) -> None:
        self._inbox.put(RebalanceEvent(kind, partitions, listener, self._join_number))

    # --- on the worker -----------------------------------------------------------------------------------------------

    def _submit(self, work: Callable[[], None]) -> None:
        # Where the worker takes no more, the consumer has been closed.
        with contextlib.suppress(RuntimeError):
            self._worker.submit(work)

    def _join_group(self, number: int) -> None:
        with self._lock:
            if number != self._join_number:
                return
            topics = self._topics
            member_id = self._membership.member_id if self._membership else ""
        try:
            found = self._requests.find(topics)
            membership = self._requests.join(topics, found, member_id)
        except Exception as error:  # noqa: BLE001 - the application is told, and it is tried again
            self._join_failed(number, error)
            return
        with self._lock:
            has_left = self.stage is Stage.OUT
            if not has_left:
                # If it has subscribed anew meanwhile, the next joining goes by this name.
                self._membership = membership
                self._join_pause_seconds = JOIN_PAUSE_FIRST_SECONDS
                self._refreshed_at = time.monotonic()
                if number == self._join_number:
                    self._assign(found)
        if has_left:
            self._leave_group(membership)

    def _assign(self, found: SubscribedTopics) -> None:
        """Tell the application what the group has given it; the lock is held."""
        gone = tuple(key for key in self._owned if key not in found.partitions)
        if gone:
            self._give_back(RebalanceKind.REVOKE, gone, self._listener)
        new = tuple(key for key in found.partitions if key not in self._owned)
        self.stage = Stage.ASSIGNING
        self._put(RebalanceKind.ASSIGN, new if self._options.is_cooperative else found.partitions, self._listener)
        self._say_missing(found)

    def _say_missing(self, found: SubscribedTopics) -> None:
        for name in sorted(found.missing - self._missing):
            self._inbox.put(MessageEvent(error_message(unknown_topic(name), name, 0)))
        self._missing = found.missing

    def _join_failed(self, number: int, error: Exception) -> None:
        self._on_error(error)
        with self._lock:
            if number == self._join_number and self.stage is Stage.JOINING:
                self._join_at = time.monotonic() + self._join_pause_seconds
                self._join_pause_seconds = min(self._join_pause_seconds * 2, JOIN_PAUSE_LAST_SECONDS)

    def _heartbeat(self, membership: GroupMembership) -> None:
        try:
            self._requests.heartbeat(membership)
        except FENCED as error:
            self.noticed(error, membership)
        except Exception as error:  # noqa: BLE001 - the application is told, and the next one is sent in its time
            self._on_error(error)
        finally:
            with self._lock:
                self._heartbeat_under_way = False

    def _refresh(self, number: int) -> None:
        """Join anew if there are other partitions than those the consumer has."""
        try:
            found = self._requests.find(self._topics)
        except Exception as error:  # noqa: BLE001 - the application is told, and it is looked again in a while
            self._on_error(error)
            found = None
        with self._lock:
            self._refresh_under_way = False
            self._refreshed_at = time.monotonic()
            if found is None or number != self._join_number or self.stage is not Stage.MEMBER:
                return
            self._say_missing(found)
            if set(found.partitions) != set(self._owned):
                self._rejoin(self._listener)

    def _leave_group(self, membership: GroupMembership) -> None:
        try:
            self._requests.leave(membership)
        except Exception as error:  # noqa: BLE001 - whoever joins next replaces this member anyway
            self._on_error(error)
