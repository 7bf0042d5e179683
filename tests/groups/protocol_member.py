"""A member that keeps to the protocol in `txnstore.groups.coordinator`, step by step, for tests."""

from __future__ import annotations

import itertools

from txnstore.errors import FencedInstance, InconsistentGroupProtocol, UnknownMember
from txnstore.groups.group import AnswerStatus, MemberDetails, Report
from txnstore.model import NO_GENERATION, GroupMembership, PartitionName

_numbers = itertools.count(1)


class ProtocolMember:
    """One process with one consumer. What it tells its application stands in `told`."""

    def __init__(self, server, group_id, topics, *, instance_id=None, assignors=("range",), timeout_ms=10_000):
        self.server = server
        self.instance_id = instance_id
        self.group_id = group_id
        self.details = MemberDetails("client", timeout_ms, tuple(sorted(topics)), frozenset(topics), tuple(assignors))
        self.told: list[tuple[str, list[str]]] = []
        self.is_stopped = False
        self.is_out = False
        """Whether it has given up: another consumer has its group.instance.id, or no group works with its assignors."""
        self.sent: list[Report] = []
        self.memberships: list[GroupMembership] = []
        """All that it has been."""
        self.had: list[PartitionName] = []
        """All that it was given."""
        self._begin_anew()

    def _begin_anew(self):
        self.membership = GroupMembership(self.group_id, NO_GENERATION, f"m{next(_numbers):06}", self.instance_id)
        self.step = 0
        self.owned: frozenset[PartitionName] = frozenset()
        self.pending = None
        self.is_settled = False
        self.has_joined = False
        self.deadline_ms = 0
        self.assigned_generation = NO_GENERATION
        """The one in which on_assign was called last."""

    def believed(self):
        """What it would go on working on at this moment."""
        in_time = self.server.clock.now_ms() < self.deadline_ms
        return self.owned if in_time and not self.is_out else frozenset()

    # --- requests

    def send(self, *, is_lost=False, joins=False):
        """Send a heartbeat, or a join; `is_lost`: it is done, but no answer arrives."""
        if self.is_out:
            return
        self.step += 1
        self.pending = None
        report = Report(self.membership, self.step, self.owned)
        sent_ms = self.server.clock.now_ms()
        try:
            if joins or not self.has_joined:
                answer = self.server.join(report, self.details)
            else:
                answer = self.server.heartbeat(report)
        except (FencedInstance, InconsistentGroupProtocol):
            if self.has_joined:
                self.lose()
            self.is_out = True
            return
        except UnknownMember:
            if not is_lost:
                self.lose()
            return
        self.sent.append(report)
        if not is_lost:
            self.has_joined = True
            self.deadline_ms = sent_ms + self.details.session_timeout_ms
            self.pending = answer

    def lose(self):
        if self.owned:
            self._tell("lost", self.owned)
        self._begin_anew()

    def beat(self, *, is_lost=False):
        """Do what the background does every heartbeat.interval.ms."""
        if self.is_settled and self.pending is None:
            sent_ms = self.server.clock.now_ms()
            if self.server.renew(self.membership):
                self.deadline_ms = sent_ms + self.details.session_timeout_ms
                return
        self.send(is_lost=is_lost)

    def resubscribe(self, topics):
        self.details = MemberDetails(
            "client", self.details.session_timeout_ms, tuple(topics), frozenset(topics), self.details.assignors
        )
        self.is_settled = False
        if self.has_joined:
            self.send(joins=True)

    def leave(self):
        self._tell("revoke", self.owned)
        self.owned = frozenset()
        self.server.leave(self.membership)

    # --- the application's thread

    def act(self):
        """Take over the answer that waits; return whether anything changed."""
        answer, self.pending = self.pending, None
        if answer is None:
            return False
        assert answer.step == self.step
        is_new_generation = answer.membership != self.membership
        if is_new_generation:
            self.memberships.append(answer.membership)
        self.membership = answer.membership
        self.is_settled = answer.is_settled
        if answer.status is AnswerStatus.REVOKE:
            assert frozenset(answer.revoke) | frozenset(answer.partitions) == self.owned
            self._tell("revoke", answer.revoke)
            self.owned = frozenset(answer.partitions)
            return True
        new = frozenset(answer.partitions) - self.owned
        assert self.owned <= frozenset(answer.partitions)
        self.owned |= new
        self.had += sorted(new)
        is_first_of_generation = self.assigned_generation != answer.membership.generation
        if new or (is_first_of_generation and (answer.is_cooperative or answer.status is AnswerStatus.OWN)):
            self.assigned_generation = answer.membership.generation
            self._tell("assign", new)
        return bool(new) or is_new_generation

    def poll(self):
        """Hear of news, act, and report until nothing changes at once."""
        if self.pending is None and (not self.is_settled or self.server.has_news(self.membership)):
            self.send()
        while self.act() and not self.is_settled:
            self.send()

    def _tell(self, what, partitions):
        self.told.append((what, [str(partition) for partition in sorted(partitions)]))
