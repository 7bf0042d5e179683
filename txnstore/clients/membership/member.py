"""The consumer as a member of its group: joining, being given partitions, giving them back, leaving, and its thread.

It keeps to the protocol that `txnstore.groups.coordinator` describes.  Requests are made one after the other by the
member's own thread (`next_work`), so that it keeps its place in the group while the application is busy.  An answer
waits for the next poll(), where the application is told of it (`take_answer`, then `served`); until that is done later
answers are dropped, because they do not take it into account.  What was given back is reported to the group only after
all commits that were submitted before: by the worker, which runs them in order.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from threading import Condition
from typing import Final

from txnstore.background_thread import BackgroundThread
from txnstore.backoff import Backoff
from txnstore.clients.callbacks import EventQueue
from txnstore.clients.consumer.arguments import ConsumerOptions
from txnstore.clients.consumer.events import (
    AnswerEvent,
    Event,
    MessageEvent,
    RebalanceEvent,
    RebalanceKind,
)
from txnstore.clients.membership.protocol import MemberProtocol, MemberRequest
from txnstore.clients.membership.requests import GroupRequests, SubscribedTopics
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.model.message import error_message
from txnstore.clients.outlet import Lease, Outlet, lease_seconds
from txnstore.clients.worker import Worker
from txnstore.errors import FencedInstance, IllegalGeneration, TxnStoreError, UnknownMember
from txnstore.groups.group import MemberAnswer, Partitions
from txnstore.model import NO_GENERATION, GroupMembership, PartitionName
from txnstore.trouble import RepeatedTrouble, defect_of

#: A request that failed is repeated after a pause, which grows from the first to the second of these.
PAUSE_FIRST_SECONDS: Final = 0.2
PAUSE_LAST_SECONDS: Final = 10.0
#: A heartbeat that failed is repeated sooner: the place in the group is at stake.
HEARTBEAT_PAUSE_SECONDS: Final = 0.5
#: A member that waits for partitions of others asks this often; mostly it is woken before.
ASK_AGAIN_SECONDS: Final = 0.075
#: How often a subscribed topic that does not exist is looked for.
LOOK_FOR_TOPICS_SECONDS: Final = 1.0
#: A settled member renews its lease after this part of it, and only looks for news in between: a look disturbs nobody,
#: where a write wakes every reader of an SQLite file.
RENEW_AFTER: Final = 1 / 3
#: After a defect of ours the thread goes on, but not in a hot loop.
DEFECT_PAUSE_SECONDS: Final = 1.0

#: The errors that say that the consumer is not the member that it reports as.
NOT_THE_MEMBER: Final = (UnknownMember, FencedInstance, IllegalGeneration)


class MemberStage(enum.Enum):
    """Where a consumer stands in its group."""

    OUT = "not subscribed"
    JOINING = "joining the group"
    MEMBER = "in the group"
    LEAVING = "leaving the group once the application has given its partitions back"
    LAPSED = "out of the group because the application did not poll; the next poll() joins again"
    FENCED = "out of the group for good: another consumer has its group.instance.id"


#: Bound once: each poll() looks, and Python 3.11 takes its time to find the value of an enumeration.
_OUT: Final = MemberStage.OUT
_LAPSED: Final = MemberStage.LAPSED
#: The stages in which a consumer is to stay in its group, or to come into it.
WANTS_IN: Final = frozenset({MemberStage.JOINING, MemberStage.MEMBER})
#: The stages in which a consumer has a place in the group that it must keep.
HAS_PLACE: Final = frozenset({MemberStage.MEMBER, MemberStage.LEAVING})


class ConsumerMember:
    """One consumer in its group, or outside; guarded by the consumer's lock."""

    def __init__(
        self,
        name: str,
        *,
        lock: Condition,
        work_due: Condition,
        outlet: Outlet,
        inbox: EventQueue[Event],
        worker: Worker,
        requests: GroupRequests,
        options: ConsumerOptions,
        on_error: Callable[[BaseException], None],
        logger: logging.Logger,
    ) -> None:
        """Begin outside of the group; `work_due`, of the same lock, wakes the thread, which will have this name."""
        self._lock = lock
        self._work_due = work_due
        self._outlet = outlet
        self._inbox = inbox
        self._worker = worker
        self._requests = requests
        self._options = options
        self._on_error = on_error
        self._logger = logger
        self._thread = BackgroundThread(name)
        self._is_closing = False
        self._stage = MemberStage.OUT
        self._topics: tuple[str, ...] = ()
        self._subscription_number = 0
        self.alone: Final = GroupMembership(options.group_id, NO_GENERATION, "", options.group_instance_id)
        """Who a consumer is in commits that manages its partitions itself."""
        self._membership = self.alone
        """Who the consumer is in commits: what it was told last, also after it has lost its place."""
        self._untold: tuple[RebalanceEvent, ...] = ()
        """What takes partitions away, until the application was told of it: they are committed by no other name."""
        self._revoking: RebalanceEvent | None = None
        """What the group wants back, while the application is told: it may close the consumer within that."""
        self._protocol = MemberProtocol(requests.new_identity)
        self._lease = Lease(options.session_timeout_ms / 1000, outlet)
        self._has_to_join = False
        self._has_news = False
        self._renews_now = False
        self._wakes_others = False
        self._next_request_at = 0.0
        self._renew_at = 0.0
        self._backoff = Backoff(PAUSE_FIRST_SECONDS, PAUSE_LAST_SECONDS)
        self._defects = RepeatedTrouble()
        self._is_leaving_under_way = False
        self._found: SubscribedTopics | None = None
        self._refreshed_at = 0.0
        self.waiting = 0
        """How many calls of the application are waiting for records: while one waits, it counts as polling."""

    # --- what the application asks -----------------------------------------------------------------------------------

    @property
    def membership(self) -> GroupMembership:
        """Who the consumer is to the group; one that lost its place keeps its old name, so that it is refused.

        One that has left keeps its generation, without a member's id, until it is a member again: what it has read is
        others' now, and without a generation a transaction would be let commit it, and an empty group anybody.
        """
        with self._lock:
            return self._membership

    @property
    def has_left(self) -> bool:
        """Whether the consumer was in the group, is out of it, and has none of its partitions left."""
        with self._lock:
            return self._stage is MemberStage.OUT and not self._untold and self._membership != self.alone

    def membership_now(self, then: GroupMembership, partitions: Iterable[PartitionName]) -> GroupMembership:
        """Return who the consumer is now to a commit of these partitions that waited since it was `then`.

        It stays what it was if it has lost its place, or got one of them since: others may have committed further.
        """
        with self._lock:
            # Who has lost its place is still called the same in commits, but has forgotten since when it had what.
            is_same = self._protocol.identity.member_id == then.member_id
            has_come = self._protocol.has_come_since(partitions, then.generation)
            return self._membership if is_same and not has_come else then

    @property
    def member_id(self) -> str | None:
        """The consumer's id in the group, while it has one."""
        with self._lock:
            return self._protocol.identity.member_id if self._stage in HAS_PLACE else None

    @property
    def is_subscribed(self) -> bool:
        """Whether the consumer is in the group, on its way, or to come back."""
        return self._stage is not MemberStage.OUT

    @property
    def wants_topics(self) -> bool:
        """Whether the application is subscribed to any: not since it has unsubscribed, even if it has yet to leave."""
        return bool(self._topics)

    @property
    def may_deliver(self) -> bool:
        """Whether the records at hand are the consumer's: not once the group may have given them to others."""
        return lease_seconds() < self._outlet.lease_ends_at

    def polled(self) -> bool:
        """Note that the application asks for records; return whether it may have some. The lock is held."""
        stage = self._stage
        if stage is _OUT:
            return True
        self._outlet.polled_at = now = lease_seconds()
        if stage is _LAPSED:
            self._enter()
        return now < self._outlet.lease_ends_at

    def subscribe(self, topics: Sequence[str]) -> None:
        """Be in the group for these topics and patterns; the partitions come with a later poll().

        Raises:
            KafkaException: `_FATAL`: another consumer has this one's group.instance.id.
        """
        with self._lock:
            if self._stage is MemberStage.FENCED:
                raise KafkaException(KafkaError(KafkaError._FATAL, self._fenced_text(), fatal=True))
            self._topics = tuple(topics)
            self._subscription_number += 1
            self._found = None
            self._outlet.polled_at = lease_seconds()
            if self._stage is MemberStage.MEMBER:
                self._protocol.drop_answer()
                self._join_again()
            elif self._stage is not MemberStage.LEAVING:
                self._enter()
            if not self._is_closing:
                self._thread.start(self._run)

    def unsubscribe(self) -> None:
        """Give everything back at the next poll(), then leave."""
        with self._lock:
            if self._stage is MemberStage.OUT:
                return
            self._protocol.drop_answer()
            if self._stage in (MemberStage.LEAVING, MemberStage.FENCED):
                # A fenced consumer stays so: another subscription would fence the one that has the name now.
                self._topics = ()
                return
            if self._stage is not MemberStage.MEMBER or not self._protocol.owned:
                self._topics = ()
                self._leave()
                return
            # What is being given back is the group's once that is done, and it leaves then.
            kept = self._protocol.owned - self._protocol.revoked
            events, told = self._inbox.events, (self._event(RebalanceKind.REVOKE, kept),) if kept else ()
            untold = self._untold + told
            self._lock.notify_all()
            # No call in between: an interrupt finds all of this done, or nothing. What takes memory comes first.
            events += told
            self._topics, self._stage, self._untold = (), MemberStage.LEAVING, untold

    def leave_now(self) -> None:
        """Leave for good, without asking the application."""
        with self._lock:
            self._topics = ()
            self._leave()

    def noticed(self, error: TxnStoreError, membership: GroupMembership) -> None:
        """Ask the group how things stand: it has refused a commit of `membership`."""
        with self._lock:
            is_current = self._stage is MemberStage.MEMBER and membership == self._membership
            if is_current and isinstance(error, NOT_THE_MEMBER):
                self._request_heartbeat()

    # --- what the application is told; on its thread -----------------------------------------------------------------

    def take_answer(self, event: AnswerEvent) -> None:
        """Adopt what the group has answered; what the application has to do about it, if anything, is served next."""
        with self._lock:
            if event.incarnation != self._protocol.incarnation or self._stage is not MemberStage.MEMBER:
                # What was lost since, or is to be given back, is told first.
                return
            if not self.may_deliver:
                # Too late to believe it.
                self._protocol.drop_answer()
                self._request_heartbeat()
                return
            if self._untold or not self._protocol.has_answer:
                # While on_lost runs, it or another thread polls: what comes again would go with what is lost.
                return
            if self._protocol.is_overtaken:
                # By now the group may have given to others what it was about to give; the answer to that report counts.
                self._protocol.drop_answer()
                return
            told, membership, untold = self._protocol.told, self._membership, self._untold
            events, first = self._inbox.events, self._inbox.events[0] if self._inbox.events else None
            try:
                self._adopt_answer()
            except BaseException:
                # An interrupt: the group would wait for ever for what the application is never told.
                if not events or events[0] is first:
                    self._protocol.put_off(told)
                    self._membership, self._revoking, self._untold = membership, None, untold
                    self._request_heartbeat()
                raise

    def _adopt_answer(self) -> None:
        former_generation = self._protocol.identity.generation
        change = self._protocol.accept()
        self._membership = self._protocol.identity
        if change is None:
            is_new = former_generation != self._protocol.identity.generation
            self._plan(at_once=self._protocol.has_missed_news or (is_new and not self._protocol.is_settled))
        elif change.is_revocation:
            self._revoking = event = self._event(RebalanceKind.REVOKE, change.partitions)
            self._untold = (event,)
            self._inbox.events.appendleft(event)
        else:
            self._inbox.events.appendleft(self._event(RebalanceKind.ASSIGN, change.partitions))

    def is_current(self, event: RebalanceEvent) -> bool:
        """Return whether the consumer is still the member that the event is about. The lock is held."""
        return event.incarnation == self._protocol.incarnation

    def served(self, event: RebalanceEvent) -> None:
        """Go on after the application was told of the event and has done what it had to do."""
        with self._lock:
            self._untold = tuple(untold for untold in self._untold if untold is not event)
            if event is self._revoking:
                self._revoking = None
            if not self._untold and self._protocol.has_answer:
                # Its event may have been served too early.
                self._inbox.put(AnswerEvent(self._protocol.incarnation))
            if event.incarnation != self._protocol.incarnation:
                if self._stage is MemberStage.OUT:
                    self._forget_name()
                return
            if event.kind is RebalanceKind.ASSIGN:
                self._protocol.complete()
                has_changed = bool(event.partitions) and not self._protocol.is_settled
                self._plan(at_once=self._protocol.has_missed_news or has_changed)
            elif event.kind is RebalanceKind.REVOKE:
                self._protocol.give_back(_partitions(event))
                if self._is_done_leaving():
                    self._leave()
                else:
                    # After the commits, on the worker: the next owner of the partitions begins where this one ended.
                    self._submit(lambda: self._release(event))

    def _is_done_leaving(self) -> bool:
        is_unsubscribed = self._stage is MemberStage.LEAVING and not self._topics
        return is_unsubscribed and self._revoking is None and self._protocol.owned <= self._protocol.revoked

    def _release(self, event: RebalanceEvent) -> None:
        """Let the group have what the application gave back; on the worker."""
        with self._lock:
            if event.incarnation != self._protocol.incarnation:
                return
            self._protocol.release(_partitions(event))
            if self._is_done_leaving():
                self._leave()
                return
            if self._stage is MemberStage.LEAVING and self._topics and not self._protocol.owned:
                # The application has subscribed again since.
                self._stage = MemberStage.MEMBER
                self._has_to_join = True
            self._wakes_others = True
            self._request_heartbeat()

    # --- the thread, which starts with the first subscription ---------------------------------------------------------

    def stop(self) -> None:
        """Let the thread end as soon as it can."""
        with self._lock:
            self._is_closing = True
            self._work_due.notify_all()

    def close(self, timeout_seconds: float) -> bool:
        """Let the thread end, and wait for it; return whether it has ended."""
        self.stop()
        return self._thread.close(timeout_seconds)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._is_closing:
                    return
                work, wait_seconds = self.next_work()
                if work is None:
                    self._work_due.wait(min(wait_seconds, threading.TIMEOUT_MAX))
                    continue
            try:
                work()
            except Exception as error:
                # Requests handle their own errors; a thread that died would lose the place in the group silently.
                if self._defects.may_be_told(defect_of(error)):
                    self._logger.exception(
                        "keeping up the membership in the group failed", extra={"event": "background_work_failed"}
                    )
                with self._lock:
                    if not self._is_closing:
                        self._work_due.wait(DEFECT_PAUSE_SECONDS)

    def next_work(self) -> tuple[Callable[[], None] | None, float]:  # noqa: PLR0911 - a case for each reason to act
        """Return what the thread has to do now, or None and in how many seconds there may be something.

        The lock is held; the work is done without it.
        """
        now = lease_seconds()
        if self._stage is MemberStage.JOINING:
            if self._is_leaving_under_way:
                return None, math.inf
            return (self._join, 0.0) if now >= self._next_request_at else (None, self._next_request_at - now)
        if self._stage not in HAS_PLACE:
            return None, math.inf
        lapses_at = self._outlet.polled_at + self._options.max_poll_seconds
        if now > lapses_at and not self.waiting:
            self._lapse(now)
            return None, 0.0
        # A member that is about to leave only keeps its place until then: its subscription does not matter.
        joins = self._has_to_join and self._stage is MemberStage.MEMBER
        # Not while an answer waits, which another report would overtake: where much is new it never came to the end.
        has_news = self._has_news and (joins or not self._protocol.has_answer)
        if now >= self._next_request_at or has_news or self._renews_now:
            return (self._join if joins else self._heartbeat), 0.0
        refresh_at = self._refresh_at()
        if now >= refresh_at:
            return self._refresh, 0.0
        # While the application waits its deadline moves on; so it is checked again after at most that long.
        lapse_seconds = self._options.max_poll_seconds if self.waiting else lapses_at - now
        return None, min(self._next_request_at - now, refresh_at - now, lapse_seconds) + 0.001

    def _refresh_at(self) -> float:
        if self._stage is not MemberStage.MEMBER or self._has_to_join or self._found is None:
            return math.inf
        if self._found.missing:
            return self._refreshed_at + LOOK_FOR_TOPICS_SECONDS
        interval_ms = self._options.metadata_refresh_ms
        return self._refreshed_at + interval_ms / 1000 if interval_ms > 0 else math.inf

    # --- news from others; on the thread that is woken by their commits -----------------------------------------------

    @property
    def listens(self) -> bool:
        """Whether the consumer wants to hear of rebalances that others set off."""
        return self._stage in WANTS_IN

    def look_for_news(self) -> None:
        """Find out whether the group has rebalanced."""
        with self._lock:
            identity = self._protocol.identity
            if self._stage is not MemberStage.MEMBER:
                return
            if self._protocol.waits_for_application:
                self._protocol.has_missed_news = True
                return
            if not self._protocol.is_settled:
                # It has something to ask for, and may get it now.
                self._request_heartbeat()
                return
            if self._is_renewal_near():
                # That tells as well; and what is under way now may have been answered before there was news.
                self._renews_now = True
                self._work_due.notify_all()
                return
        has_news = self._requests.has_news(identity)
        with self._lock:
            # It may have left since.
            is_member = self._stage is MemberStage.MEMBER
            if is_member and has_news:
                self._request_heartbeat()
            elif is_member and self._protocol.may_renew and identity == self._protocol.identity:
                # The member's own thread need not look so soon after.
                self._next_request_at = max(
                    self._next_request_at, min(lease_seconds() + self._options.heartbeat_seconds, self._renew_at)
                )

    def _is_renewal_near(self) -> bool:
        """Whether to renew the lease with the next request, rather than to look now and renew a little later."""
        return self._protocol.may_renew and lease_seconds() >= self._renew_at - self._options.heartbeat_seconds / 2

    # --- requests; on the member's thread, without the lock -----------------------------------------------------------

    def _join(self) -> None:
        with self._lock:
            number, topics = self._subscription_number, self._topics
            self._has_news = self._renews_now = False
        try:
            found = self._requests.find(topics)
        except Exception as error:  # noqa: BLE001 - the application is told, and it is tried again
            self._failed(error)
            self._keep_place()
            return
        with self._lock:
            if self._stage not in WANTS_IN:
                return
            request = self._protocol.request()
        sent_at = lease_seconds()
        try:
            answer = self._requests.join(topics, found, request.report)
        except Exception as error:  # noqa: BLE001 - the application is told, and it is tried again
            self._refused(error, request)
            return
        with self._lock:
            has_left = request.incarnation != self._protocol.incarnation
            if not has_left:
                if self._stage is MemberStage.JOINING:
                    self._stage = MemberStage.MEMBER
                if number == self._subscription_number:
                    self._has_to_join = False
                    self._refreshed_at = lease_seconds()
                    self._report_missing(found)
                self._answered(answer, sent_at, request)
        if has_left and request.report.membership.group_instance_id is None:
            self._leave_group(request.report.membership)

    def _keep_place(self) -> None:
        """Say that the member is there, as the group knows it: what it subscribes to now cannot be looked up yet."""
        again_at = self._next_request_at
        self._heartbeat()
        with self._lock:
            self._next_request_at = min(self._next_request_at, again_at)

    def _heartbeat(self) -> None:
        with self._lock:
            if self._stage not in HAS_PLACE:
                return
            is_quiet = self._protocol.may_renew and not self._has_news
            may_only_look = is_quiet and not self._is_renewal_near()
            request = self._protocol.request()
            wakes_others, self._wakes_others = self._wakes_others, False
            self._has_news = self._renews_now = False
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
            self._refused(error, request)
            return
        with self._lock:
            if request.incarnation != self._protocol.incarnation:
                return
            if answer is not None:
                self._answered(answer, sent_at, request)
                return
            if is_renewed:
                self._renewed(sent_at)
            self._plan(at_once=False)

    def _refresh(self) -> None:
        """Tell the group if the subscription matches other topics than it was told, or other partitions."""
        with self._lock:
            number, topics = self._subscription_number, self._topics
        try:
            found = self._requests.find(topics)
        except Exception as error:  # noqa: BLE001 - the application is told, and the topics are read again in a while
            self._on_error(error)
            found = None
        with self._lock:
            self._refreshed_at = lease_seconds()
            if found is None or number != self._subscription_number or self._stage is not MemberStage.MEMBER:
                return
            before = self._found
            self._report_missing(found)
            if before is None or before.names != found.names:
                self._join_again()
            elif before.partitions != found.partitions:
                self._request_heartbeat()

    def _leave_group(self, membership: GroupMembership) -> None:
        try:
            self._requests.leave(membership)
        except Exception as error:  # noqa: BLE001 - its session ends by itself
            self._on_error(error)
        finally:
            self._gone()

    def _gone(self) -> None:
        """Let the consumer join again."""
        with self._lock:
            self._is_leaving_under_way = False
            self._work_due.notify_all()

    # --- answers and failures -----------------------------------------------------------------------------------------

    def _answered(self, answer: MemberAnswer, sent_at: float, request: MemberRequest) -> None:
        self._renewed(sent_at)
        if self._stage is MemberStage.MEMBER and self._protocol.receive(request, answer):
            self._inbox.put(AnswerEvent(self._protocol.incarnation))
        # An answer that was dropped may have had news.
        self._plan(at_once=self._protocol.has_missed_news and not self._protocol.is_changing)

    def _renewed(self, sent_at: float) -> None:
        was_over = not self.may_deliver
        self._lease.renew(sent_at)
        self._renew_at = sent_at + max(self._options.heartbeat_seconds, self._lease.duration_seconds * RENEW_AFTER)
        self._backoff.succeeded()
        if was_over:
            # Records may have been held back from a call that waits.
            self._lock.notify_all()

    def _refused(self, error: Exception, request: MemberRequest) -> None:
        if not isinstance(error, NOT_THE_MEMBER):
            self._failed(error)
            return
        with self._lock:
            if request.incarnation != self._protocol.incarnation:
                return
            if isinstance(error, FencedInstance):
                self._report(KafkaError(error.code, self._fenced_text(), fatal=True))
                self._lose(MemberStage.FENCED)
            elif self._stage is MemberStage.LEAVING and not self._topics:
                # It only had to leave, and it is out.
                self._lose(MemberStage.OUT)
            else:
                self._lose(MemberStage.JOINING)
                self._enter()

    def _failed(self, error: Exception) -> None:
        """Try again after a while."""
        self._on_error(error)
        with self._lock:
            pause_seconds = self._backoff.back_off()
            if self._stage in HAS_PLACE:
                pause_seconds = min(pause_seconds, HEARTBEAT_PAUSE_SECONDS, self._options.heartbeat_seconds)
            self._next_request_at = lease_seconds() + pause_seconds

    # --- transitions; the lock is held -------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Join, as a new member."""
        self._stage = MemberStage.JOINING
        self._begin_anew()
        self._next_request_at = 0.0
        self._backoff.succeeded()
        self._work_due.notify_all()

    def _join_again(self) -> None:
        """Tell the group what the consumer is subscribed to now."""
        self._has_to_join = True
        self._request_heartbeat()

    def _leave(self) -> None:
        identity = self._protocol.identity if self._stage in HAS_PLACE else None
        self._stage = MemberStage.OUT
        self._begin_anew()
        self._forget_name()
        self._depart(identity)

    def _forget_name(self) -> None:
        """Stop committing as a member, once the consumer has none of the group's partitions."""
        if not self._untold:
            self._membership = replace(self._membership, member_id="")

    def _lapse(self, now: float) -> None:
        identity = self._protocol.identity
        if self._stage is MemberStage.LEAVING and not self._topics:
            # It only had to leave, and no poll() is to bring it back.
            self._lose(MemberStage.OUT)
            self._depart(identity)
            return
        interval_ms = int(self._options.max_poll_seconds * 1000)
        late_ms = int((now - self._outlet.polled_at) * 1000) - interval_ms
        text = f"Application maximum poll interval ({interval_ms}ms) exceeded by {late_ms}ms"
        # The error comes from the poll that is too late, the loss with the one after it: as librdkafka does.
        self._report(KafkaError(KafkaError._MAX_POLL_EXCEEDED, text))
        self._lose(MemberStage.LAPSED)
        self._depart(identity)

    def _lose(self, stage: MemberStage) -> None:
        """Own no partitions from now on: they are another member's, or will be."""
        kept = self._protocol.owned - self._protocol.revoked
        if kept and self._stage is not MemberStage.LEAVING:
            self._take_away(RebalanceKind.LOST, kept)
        self._stage = stage
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._protocol.begin_anew()
        self._has_to_join = False
        self._has_news = self._renews_now = False
        self._wakes_others = False
        self._lease.drop()
        # The next poll() looks where the consumer stands.
        self._outlet.close()

    def _depart(self, identity: GroupMembership | None) -> None:
        """Tell the group that the member is gone; a static one stays in it until its session ends (KIP-345).

        Either comes after the commits that were submitted before, and the next join after that: the next member id of
        a static one would fence them.
        """
        if identity is not None:
            is_static = identity.group_instance_id is not None
            self._is_leaving_under_way = self._submit(self._gone if is_static else lambda: self._leave_group(identity))

    def _plan(self, *, at_once: bool) -> None:
        """Set when the next request is due."""
        interval_seconds = self._options.heartbeat_seconds
        if self._protocol.waits_for_others:
            interval_seconds = min(ASK_AGAIN_SECONDS, interval_seconds)
        self._next_request_at = lease_seconds() + interval_seconds
        if at_once or self._has_news:
            self._request_heartbeat()

    def _request_heartbeat(self) -> None:
        """Have the next request made at once."""
        self._has_news = True
        self._work_due.notify_all()

    def _submit(self, work: Callable[[], None]) -> bool:
        # A worker that takes no more work belongs to a consumer that has been closed.
        with contextlib.suppress(RuntimeError):
            self._worker.submit(work)
            return True
        return False

    # --- what goes to the inbox ---------------------------------------------------------------------------------------

    def _event(self, kind: RebalanceKind, partitions: Iterable[PartitionName]) -> RebalanceEvent:
        keys = tuple((partition.topic, partition.partition) for partition in sorted(partitions))
        return RebalanceEvent(kind, keys, self._protocol.incarnation)

    def _take_away(self, kind: RebalanceKind, kept: Partitions) -> None:
        """Tell the application that this, which is all that it still has of the group, goes."""
        event = self._event(kind, kept)
        self._untold += (event,)
        self._inbox.put(event)

    def _report(self, error: KafkaError) -> None:
        self._inbox.put(MessageEvent(error_message(error)))

    def _report_missing(self, found: SubscribedTopics) -> None:
        reported = set[str]() if self._found is None else self._found.missing.keys()
        for name in sorted(found.missing.keys() - reported):
            self._inbox.put(MessageEvent(error_message(found.missing[name], name, 0)))
        self._found = found

    def _fenced_text(self) -> str:
        return (
            f"another consumer has joined group {self._options.group_id!r} under the group.instance.id"
            f" {self._options.group_instance_id!r}: give each consumer one of its own, and make a new consumer"
        )


def _partitions(event: RebalanceEvent) -> frozenset[PartitionName]:
    return frozenset(PartitionName(topic, number) for topic, number in event.partitions)
