"""This file is a consumer's life in its group: joining, being given partitions, giving them back, and leaving.

It keeps to the protocol that `txnstore.groups.coordinator` describes.  Requests are made one after the other by the
group's own thread (`next_work`), so that a member which is busy keeps its place.  An answer waits for the next poll(),
where the application has its say (`take_answer`, then `served`); until that is done later answers are dropped, for
they know nothing of it.  What was taken back is told to the group only behind all commits that were submitted before:
by the worker, which runs them in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from txnstore.clients.consumer.events import AnswerEvent, Listener, RebalanceEvent, RebalanceKind
from txnstore.clients.membership.conversation import LOST_PLACE, GroupConversation
from txnstore.clients.membership.lease import lease_seconds
from txnstore.clients.membership.state import HAS_PLACE, Stage
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.errors import TxnStoreError
from txnstore.model import NO_GENERATION, GroupMembership, TopicPartition


class GroupMember(GroupConversation):
    """One consumer as a member of its group; guarded by the consumer's lock."""

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
            return self._place.seat.member_id if self.stage in HAS_PLACE else None

    @property
    def is_subscribed(self) -> bool:
        """Whether the consumer is in the group or on its way."""
        return self.stage is not Stage.OUT

    def polled(self) -> bool:
        """Note that the application asks for records; return `may_deliver`. The lock is held."""
        self._polled_at = now = lease_seconds()
        if self.stage is Stage.LAPSED:
            self._enter()
        return now < self._lease.ends_at

    def subscribe(self, topics: Sequence[str], listener: Listener) -> None:
        """Be in the group for these topics and patterns; the partitions come with a later poll().

        Raises:
            KafkaException: `_FATAL`: another consumer has this one's group.instance.id.
        """
        with self._lock:
            if self.stage is Stage.FENCED:
                raise KafkaException(KafkaError(KafkaError._FATAL, self._fenced_text(), fatal=True))
            self._topics = tuple(topics)
            self._subscription_number += 1
            if self._place.owned and self._former_listener is None:
                self._former_listener = self._listener
            self._listener = listener
            self._found = None
            self._polled_at = lease_seconds()
            if self.stage is Stage.LEAVING:
                return
            if self.stage is Stage.MEMBER:
                self._place.drop_answer()
                self._join_again()
            else:
                self._enter()

    def unsubscribe(self) -> None:
        """Give everything back at the next poll(), then leave."""
        with self._lock:
            if self.stage is Stage.OUT:
                return
            self._topics = ()
            self._place.drop_answer()
            if self.stage is Stage.LEAVING:
                return
            kept = self._place.owned - self._place.going
            if self.stage is Stage.MEMBER and kept:
                self.stage = Stage.LEAVING
                self._put(RebalanceKind.REVOKE, kept)
            else:
                self._leave()

    def leave_now(self) -> None:
        """Leave for good, without asking the application."""
        with self._lock:
            self._topics = ()
            self._leave()

    def noticed(self, error: TxnStoreError, membership: GroupMembership) -> None:
        """Ask the group how things stand: it has refused a commit of `membership`."""
        with self._lock:
            if isinstance(error, LOST_PLACE) and self.stage is Stage.MEMBER and membership == self._membership:
                self.request_heartbeat()

    # --- what the application is told; on its thread -----------------------------------------------------------------

    def take_answer(self, event: AnswerEvent) -> RebalanceEvent | None:
        """Take over what the group has answered; return what the application has to do with it, if anything."""
        with self._lock:
            if event.life != self._place.life or self.stage is not Stage.MEMBER:
                # What was lost since, or is to be given back, is told first.
                return None
            if not self.may_deliver:
                # Too late to believe it.
                self._place.drop_answer()
                self.request_heartbeat()
                return None
            if not self._place.has_answer:
                return None
            former_generation = self._place.seat.generation
            change = self._place.act()
            self._membership = self._place.seat
            if change is None:
                is_new = former_generation != self._place.seat.generation
                self._plan(at_once=self._place.has_missed_news or (is_new and not self._place.is_settled))
                return None
            if change.is_revocation:
                return self._event(RebalanceKind.REVOKE, change.partitions)
            self._former_listener = None
            return self._event(RebalanceKind.ASSIGN, change.partitions)

    def served(self, event: RebalanceEvent) -> None:
        """Go on after the application was told of the event and has done what it had to do."""
        with self._lock:
            if event.life != self._place.life:
                return
            if event.kind is RebalanceKind.ASSIGN:
                self._place.acted()
                changed = bool(event.partitions) and not self._place.is_settled
                self._plan(at_once=self._place.has_missed_news or changed)
            elif event.kind is RebalanceKind.REVOKE:
                self._given_back(event)

    def _given_back(self, event: RebalanceEvent) -> None:
        # Behind the commits, on the worker: whoever gets the partitions begins where this consumer ended.
        self._place.give_back(_partitions(event))
        if self.stage is Stage.LEAVING and not self._topics and self._place.owned <= self._place.going:
            self._leave()
        else:
            self._submit(lambda: self._release(event))

    def _release(self, event: RebalanceEvent) -> None:
        """Let the group have what the application gave back; on the worker."""
        with self._lock:
            if event.life != self._place.life:
                return
            self._place.release(_partitions(event))
            if self.stage is Stage.LEAVING and self._topics and not self._place.owned:
                # Subscribed anew since.
                self.stage = Stage.MEMBER
                self._has_to_join = True
            self._wakes_others = True
            self.request_heartbeat()


def _partitions(event: RebalanceEvent) -> frozenset[TopicPartition]:
    return frozenset(TopicPartition(topic, number) for topic, number in event.partitions)
