"""This file is what a member and its group say to each other, one request after the other, by the group's thread.

So a member whose application is busy keeps its place.  The protocol is described in `txnstore.groups.coordinator`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from txnstore.clients.consumer.events import AnswerEvent, MessageEvent, error_message, unknown_topic
from txnstore.clients.membership.lease import lease_seconds
from txnstore.clients.membership.protocol import Request
from txnstore.clients.membership.state import (
    HAS_PLACE,
    IS_INSIDE,
    PAUSE_FIRST_SECONDS,
    PAUSE_LAST_SECONDS,
    GroupState,
    Stage,
)
from txnstore.clients.membership.topics import SubscribedTopics
from txnstore.clients.model.errors import KafkaError
from txnstore.errors import FencedInstance, IllegalGeneration, UnknownMember
from txnstore.groups.group import MemberAnswer

#: A heartbeat that failed is not waited for that long: the place is at stake.
HEARTBEAT_PAUSE_SECONDS: Final = 0.5
#: A subscribed topic that there is not is looked for this often.
LOOK_FOR_TOPICS_SECONDS: Final = 1.0
#: A member that nobody disturbs renews its lease after this part of it, and looks at its group in between: a look
#: disturbs nobody, where a write wakes every reader of an SQLite file.
RENEW_AFTER: Final = 1 / 3

#: The answers that say that the consumer is not the member that it takes itself for.
LOST_PLACE: Final = (UnknownMember, FencedInstance, IllegalGeneration)


class GroupConversation(GroupState):
    """Asks, and understands the answers."""

    # --- the thread's work -------------------------------------------------------------------------------------------

    def next_work(self) -> tuple[Callable[[], None] | None, float]:  # noqa: PLR0911 - a case for each reason to act
        """Return what the group's thread has to do now, or None and in how many seconds there may be something.

        The lock is held; the work is done without it.
        """
        now = lease_seconds()
        if self.stage is Stage.JOINING:
            if self._is_leaving_under_way:
                return None, math.inf
            return (self._join, 0.0) if now >= self._next_request_at else (None, self._next_request_at - now)
        if self.stage not in HAS_PLACE:
            return None, math.inf
        lapses_at = self._polled_at + self._options.max_poll_seconds
        if now > lapses_at and not self.waiting:
            self._lapse(now)
            return None, 0.0
        if now >= self._next_request_at or self._has_news:
            # One that is about to leave has nothing to tell of its subscription; it only keeps its place until then.
            joins = self._has_to_join and self.stage is Stage.MEMBER
            return (self._join if joins else self._beat), 0.0
        refresh_at = self._refresh_at()
        if now >= refresh_at:
            return self._refresh, 0.0
        # While the application waits its deadline moves on; so it is looked at again after at most that long.
        lapse_seconds = self._options.max_poll_seconds if self.waiting else lapses_at - now
        return None, min(self._next_request_at - now, refresh_at - now, lapse_seconds) + 0.001

    @property
    def listens(self) -> bool:
        """Whether the consumer wants to hear of rebalances that others set off."""
        return self.stage in IS_INSIDE

    def look_for_news(self) -> None:
        """Find out whether the group has rebalanced; on the thread that is woken by commits of others."""
        with self._lock:
            seat = self._place.seat
            if self.stage is not Stage.MEMBER:
                return
            if self._place.waits_for_application:
                self._place.has_missed_news = True
                return
            if not self._place.is_settled:
                # It has something to ask for, and may get it now.
                self.request_heartbeat()
                return
        if self._requests.has_news(seat):
            with self._lock:
                if self.stage is Stage.MEMBER:
                    self.request_heartbeat()

    def _refresh_at(self) -> float:
        if self.stage is not Stage.MEMBER or self._has_to_join or self._found is None:
            return math.inf
        if self._found.missing:
            return self._refreshed_at + LOOK_FOR_TOPICS_SECONDS
        interval_ms = self._options.metadata_refresh_ms
        return self._refreshed_at + interval_ms / 1000 if interval_ms > 0 else math.inf

    def _join(self) -> None:
        with self._lock:
            number, topics = self._subscription_number, self._topics
            self._has_news = False
        try:
            found = self._requests.find(topics)
        except Exception as error:  # noqa: BLE001 - the application is told, and it is tried again
            self._failed(error)
            return
        with self._lock:
            if self.stage not in IS_INSIDE:
                return
            request = self._place.request()
        sent_at = lease_seconds()
        try:
            answer = self._requests.join(topics, found, request.report)
        except Exception as error:  # noqa: BLE001 - the application is told, and it is tried again
            self._refused(error, request.life)
            return
        with self._lock:
            has_left = request.life != self._place.life
            if not has_left:
                if self.stage is Stage.JOINING:
                    self.stage = Stage.MEMBER
                if number == self._subscription_number:
                    self._has_to_join = False
                    self._refreshed_at = lease_seconds()
                    self._say_missing(found)
                self._answered(answer, sent_at, request)
        if has_left and request.report.membership.group_instance_id is None:
            self._leave_group(request.report.membership)

    def _beat(self) -> None:
        with self._lock:
            if self.stage not in HAS_PLACE:
                return
            is_quiet = self._place.may_renew and not self._has_news
            may_only_look = is_quiet and lease_seconds() < self._renew_at
            request = self._place.request()
            wakes_others, self._wakes_others = self._wakes_others, False
            self._has_news = False
        sent_at = lease_seconds()
        answer, is_renewed = None, False
        try:
            if may_only_look:
                is_quiet = not self._requests.has_news(request.report.membership)
            elif is_quiet:
                is_quiet = is_renewed = self._requests.renew(request.report.membership)
            if not is_quiet:
                answer = self._requests.heartbeat(request.report, wakes_readers=wakes_others)
        except Exception as error:  # noqa: BLE001 - the application is told, and the next one is sent in its time
            with self._lock:
                self._wakes_others |= wakes_others
            self._refused(error, request.life)
            return
        with self._lock:
            if request.life != self._place.life:
                return
            if answer is not None:
                self._answered(answer, sent_at, request)
                return
            if is_renewed:
                self._renewed(sent_at)
            self._plan(at_once=False)

    def _refresh(self) -> None:
        """Tell the group if there are other topics than when it was told, or other partitions."""
        with self._lock:
            number, topics = self._subscription_number, self._topics
        try:
            found = self._requests.find(topics)
        except Exception as error:  # noqa: BLE001 - the application is told, and it is looked again in a while
            self._on_error(error)
            found = None
        with self._lock:
            self._refreshed_at = lease_seconds()
            if found is None or number != self._subscription_number or self.stage is not Stage.MEMBER:
                return
            before = self._found
            self._say_missing(found)
            if before is None or before.names != found.names:
                self._join_again()
            elif before.partitions != found.partitions:
                self.request_heartbeat()

    # --- answers; the lock is held -----------------------------------------------------------------------------------

    def _renewed(self, sent_at: float) -> None:
        was_over = not self.may_deliver
        self._lease.renew(sent_at)
        self._renew_at = sent_at + max(self._options.heartbeat_seconds, self._lease.duration_seconds * RENEW_AFTER)
        self._pause_seconds = PAUSE_FIRST_SECONDS
        if was_over:
            # Whoever waits may have records that were held back.
            self._lock.notify_all()

    def _answered(self, answer: MemberAnswer, sent_at: float, request: Request) -> None:
        self._renewed(sent_at)
        if self.stage is Stage.MEMBER and self._place.take_in(request, answer):
            self._inbox.put(AnswerEvent(self._place.life))
        # An answer that was dropped may have had news.
        self._plan(at_once=self._place.has_missed_news and not self._place.is_acting)

    def _failed(self, error: Exception) -> None:
        """Try again after a while."""
        self._on_error(error)
        with self._lock:
            pause_seconds = self._pause_seconds
            if self.stage in HAS_PLACE:
                pause_seconds = min(pause_seconds, HEARTBEAT_PAUSE_SECONDS, self._options.heartbeat_seconds)
            self._next_request_at = lease_seconds() + pause_seconds
            self._pause_seconds = min(self._pause_seconds * 2, PAUSE_LAST_SECONDS)

    def _refused(self, error: Exception, life: int) -> None:
        if not isinstance(error, LOST_PLACE):
            self._failed(error)
            return
        with self._lock:
            if life != self._place.life:
                return
            if isinstance(error, FencedInstance):
                self._say(KafkaError(error.code, self._fenced_text(), fatal=True))
                self._lose(Stage.FENCED)
            elif self.stage is Stage.LEAVING and not self._topics:
                # It had only to go, and it is gone.
                self._lose(Stage.OUT)
            else:
                self._lose(Stage.JOINING)
                self._enter()

    def _say_missing(self, found: SubscribedTopics) -> None:
        said = frozenset[str]() if self._found is None else self._found.missing
        for name in sorted(found.missing - said):
            self._inbox.put(MessageEvent(error_message(unknown_topic(name), name, 0)))
        self._found = found
