"""This file is where a consumer stands in its group, and how it gets from one stage to the next."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable
from threading import Condition
from typing import Final

from txnstore.clients.consumer.arguments import ConsumerOptions
from txnstore.clients.consumer.events import Inbox, Listener, MessageEvent, RebalanceEvent, RebalanceKind, error_message
from txnstore.clients.membership.lease import Lease, lease_seconds
from txnstore.clients.membership.protocol import MemberProtocol
from txnstore.clients.membership.requests import GroupRequests
from txnstore.clients.membership.topics import SubscribedTopics
from txnstore.clients.model.errors import KafkaError
from txnstore.clients.worker import Worker
from txnstore.model import GroupMembership, TopicPartition

#: A request that failed is made again after this long at first, and at last.
PAUSE_FIRST_SECONDS: Final = 0.2
PAUSE_LAST_SECONDS: Final = 10.0
#: Who waits for partitions that others have yet to give back asks this often; mostly he is woken before.
ASK_AGAIN_SECONDS: Final = 0.075


class Stage(enum.Enum):
    """Where a consumer stands in its group."""

    OUT = "not subscribed"
    JOINING = "on its way into the group"
    MEMBER = "in the group"
    LEAVING = "the application has yet to give its partitions back, then it is out"
    LAPSED = "out of the group because the application did not poll; the next poll() joins again"
    FENCED = "out of the group for good: another consumer has its group.instance.id"


#: Where a consumer is to stay in its group, or to come into it.
IS_INSIDE: Final = frozenset({Stage.JOINING, Stage.MEMBER})
#: Where a consumer has a place in the group that it must keep.
HAS_PLACE: Final = frozenset({Stage.MEMBER, Stage.LEAVING})


class GroupState:
    """One consumer's place in its group; guarded by the consumer's lock, which whoever calls a transition holds."""

    def __init__(
        self,
        *,
        lock: Condition,
        stirred: Condition,
        inbox: Inbox,
        worker: Worker,
        requests: GroupRequests,
        options: ConsumerOptions,
        on_error: Callable[[BaseException], None],
    ) -> None:
        """Begin outside of the group; `stirred`, of the same lock, is notified when there is work for the thread."""
        self._lock = lock
        self._stirred = stirred
        self._inbox = inbox
        self._worker = worker
        self._requests = requests
        self._options = options
        self._on_error = on_error
        self.stage = Stage.OUT
        self._topics: tuple[str, ...] = ()
        self._subscription_number = 0
        self._listener = Listener()
        self._former_listener: Listener | None = None
        """Of the subscription under which the partitions were given, if there is a newer one."""
        self._membership: GroupMembership | None = None
        """Who the consumer is in commits: as it was told last, also once it has lost its place."""
        self._place = MemberProtocol(requests.new_seat)
        self._lease = Lease(options.session_timeout_ms / 1000)
        self._has_to_join = False
        self._has_news = False
        self._wakes_others = False
        self._next_request_at = 0.0
        self._renew_at = 0.0
        self._pause_seconds = PAUSE_FIRST_SECONDS
        self._is_leaving_under_way = False
        self._found: SubscribedTopics | None = None
        self._refreshed_at = 0.0
        self._polled_at = 0.0
        self.waiting = 0
        """How many calls of the application are waiting for records: whoever waits has polled."""

    @property
    def may_deliver(self) -> bool:
        """Whether the records at hand are the consumer's: not once the group may have given them to others."""
        return lease_seconds() < self._lease.ends_at

    # --- transitions; the lock is held -------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Join, as somebody new."""
        self.stage = Stage.JOINING
        self._begin_life()
        self._next_request_at = 0.0
        self._pause_seconds = PAUSE_FIRST_SECONDS
        self._stirred.notify_all()

    def _join_again(self) -> None:
        """Tell the group of what the consumer is subscribed to now."""
        self._has_to_join = True
        self.request_heartbeat()

    def _leave(self) -> None:
        seat = self._place.seat if self.stage in HAS_PLACE else None
        self.stage = Stage.OUT
        self._begin_life()
        # Commits of one that manages its partitions itself bear no name.
        self._membership = None
        self._depart(seat)

    def _lapse(self, now: float) -> None:
        seat = self._place.seat
        interval_ms = int(self._options.max_poll_seconds * 1000)
        late_ms = int((now - self._polled_at) * 1000) - interval_ms
        text = f"Application maximum poll interval ({interval_ms}ms) exceeded by {late_ms}ms"
        # The error comes from the poll that is too late, the loss with the one after it: as librdkafka does.
        self._say(KafkaError(KafkaError._MAX_POLL_EXCEEDED, text))
        self._lose(Stage.LAPSED)
        self._depart(seat)

    def _lose(self, stage: Stage) -> None:
        """Have no partitions any more: they are somebody else's, or will be."""
        kept = self._place.owned - self._place.going
        if kept and self.stage is not Stage.LEAVING:
            self._put(RebalanceKind.LOST, kept)
        self.stage = stage
        self._begin_life()

    def _begin_life(self) -> None:
        self._place.begin_life()
        self._has_to_join = False
        self._has_news = False
        self._wakes_others = False
        self._former_listener = None
        self._lease.drop()

    def _depart(self, seat: GroupMembership | None) -> None:
        """Tell the group that the member is gone; one with a lasting name is not until its session ends (KIP-345)."""
        if seat is not None and seat.group_instance_id is None:
            self._is_leaving_under_way = self._submit(lambda: self._leave_group(seat))

    def _plan(self, *, at_once: bool) -> None:
        """Set when the next request is due."""
        if at_once:
            self.request_heartbeat()
            return
        interval_seconds = self._options.heartbeat_seconds
        if self._place.waits_for_others:
            interval_seconds = min(ASK_AGAIN_SECONDS, interval_seconds)
        self._next_request_at = lease_seconds() + interval_seconds

    def request_heartbeat(self) -> None:
        """Have the next request made at once."""
        self._has_news = True
        self._stirred.notify_all()

    def _fenced_text(self) -> str:
        return (
            f"another consumer has joined group {self._options.group_id!r} under the group.instance.id"
            f" {self._options.group_instance_id!r}: give each consumer one of its own, and make a new consumer"
        )

    def _say(self, error: KafkaError) -> None:
        self._inbox.put(MessageEvent(error_message(error)))

    def _put(self, kind: RebalanceKind, partitions: Iterable[TopicPartition]) -> None:
        self._inbox.put(self._event(kind, partitions))

    def _event(self, kind: RebalanceKind, partitions: Iterable[TopicPartition]) -> RebalanceEvent:
        keys = tuple((partition.topic, partition.partition) for partition in sorted(partitions))
        is_former = kind is not RebalanceKind.ASSIGN and self._former_listener is not None
        listener = self._former_listener if is_former and self._former_listener else self._listener
        return RebalanceEvent(kind, keys, listener, self._place.life)

    # --- on the worker -----------------------------------------------------------------------------------------------

    def _submit(self, work: Callable[[], None]) -> bool:
        # Where the worker takes no more, the consumer has been closed.
        with contextlib.suppress(RuntimeError):
            self._worker.submit(work)
            return True
        return False

    def _leave_group(self, membership: GroupMembership) -> None:
        try:
            self._requests.leave(membership)
        except Exception as error:  # noqa: BLE001 - its session ends by itself
            self._on_error(error)
        finally:
            with self._lock:
                self._is_leaving_under_way = False
                self._stirred.notify_all()
