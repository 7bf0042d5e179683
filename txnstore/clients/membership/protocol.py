"""This file is the member's side of the groups' protocol, pure: what it reports, which answers count, what it owns.

The protocol itself is described in `txnstore.groups.coordinator`.  An answer waits until the application has been told
of it.  While it is being told, and until the group has heard what came of it, other answers are dropped: they know
nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from txnstore.groups.group import AnswerStatus, MemberAnswer, Report
from txnstore.model import NO_GENERATION, GroupMembership, TopicPartition

Partitions = frozenset[TopicPartition]

_NONE: Partitions = frozenset()


@dataclass(frozen=True, slots=True)
class Request:
    """A request that is made now."""

    report: Report
    life: int
    acts: int


@dataclass(frozen=True, slots=True)
class Change:
    """What the application has to be told."""

    is_revocation: bool
    partitions: Partitions
    """Those that it has to give back, or else those that are new; there may be none of them."""


class MemberProtocol:
    """One consumer as its group knows it; not for several threads at once."""

    def __init__(self, new_seat: Callable[[], GroupMembership]) -> None:
        """Begin as what `new_seat` returns: somebody whom the group does not know."""
        self._new_seat = new_seat
        self.life = 0
        """How many member ids there were before this one."""
        self._step = 0
        self._acts = 0
        self._reset()

    def _reset(self) -> None:
        self.seat = self._new_seat()
        """Who the member is, and the generation that it has taken over last."""
        self.owned = _NONE
        """What the application has been given, or is being given, and what the group does not know to be free."""
        self.going = _NONE
        """What of it the application is giving back, or has given back."""
        self.is_settled = False
        """Whether there is nothing to do until the group changes."""
        self.is_acting = False
        """Whether the application is being told, or the group has yet to hear of what came of it."""
        self.has_missed_news = False
        """Whether there may be a newer answer than the one that the application was told of."""
        self._answer: MemberAnswer | None = None
        self._assigned_generation = NO_GENERATION

    def begin_life(self) -> None:
        """Be somebody new, who owns nothing: what was owned is lost."""
        self.life += 1
        self._reset()

    # --- requests ----------------------------------------------------------------------------------------------------

    def request(self) -> Request:
        """Return what to report now; only the answer to the newest request counts."""
        self._step += 1
        self.has_missed_news = False
        return Request(Report(self.seat, self._step, self.owned), self.life, self._acts)

    @property
    def may_renew(self) -> bool:
        """Whether it is enough to say that the member is alive."""
        return self.is_settled and self._answer is None and not self.is_acting

    @property
    def waits_for_others(self) -> bool:
        """Whether the member has something to ask for, and to get from the group alone."""
        return not self.is_settled and self._answer is None and not self.is_acting

    @property
    def waits_for_application(self) -> bool:
        """Whether news of the group would have to wait."""
        return self.is_acting or self._answer is not None

    @property
    def has_answer(self) -> bool:
        """Whether an answer waits for the application."""
        return self._answer is not None

    def drop_answer(self) -> None:
        """Forget the answer that waits: another request is about to be made."""
        self._answer = None

    def take_in(self, request: Request, answer: MemberAnswer) -> bool:
        """Keep the answer to the newest request; return whether the application has to be told of it from now on."""
        if self.is_acting or request.acts != self._acts:
            self.has_missed_news = True
            return False
        if not self._concerns_application(answer):
            self._answer = None
            self.is_settled = answer.is_settled
            return False
        was_waiting = self._answer is not None
        self._answer = answer
        return not was_waiting

    # --- the application's part --------------------------------------------------------------------------------------

    def act(self) -> Change | None:
        """Take the answer that waits over; return what the application is to be told, which `acted` ends."""
        answer, self._answer = self._answer, None
        if answer is None:
            return None
        self.seat = answer.membership
        self.is_settled = answer.is_settled
        if answer.status is AnswerStatus.REVOKE:
            self.going = frozenset(answer.revoke)
            return self._begin(Change(is_revocation=True, partitions=self.going))
        new = frozenset(answer.partitions) - self.owned
        if not new and not self._is_told_anew(answer):
            return None
        self._assigned_generation = answer.membership.generation
        self.owned |= new
        return self._begin(Change(is_revocation=False, partitions=new))

    def acted(self) -> None:
        """End what `act` has begun: what is reported from now on is true."""
        self.is_acting = False
        self._acts += 1

    def give_back(self, partitions: Collection[TopicPartition]) -> None:
        """Note that the application has given these back; the group does not know it yet."""
        self.going |= frozenset(partitions)

    def release(self, partitions: Collection[TopicPartition]) -> None:
        """Let the next report say that these are free."""
        self.owned -= frozenset(partitions)
        self.going -= frozenset(partitions)
        self.is_settled = False
        self.acted()

    def _begin(self, change: Change) -> Change:
        self.is_acting = True
        self._acts += 1
        return change

    def _concerns_application(self, answer: MemberAnswer) -> bool:
        return (
            answer.status is AnswerStatus.REVOKE
            or answer.membership.generation != self.seat.generation
            or not self.owned.issuperset(answer.partitions)
            or self._is_told_anew(answer)
        )

    def _is_told_anew(self, answer: MemberAnswer) -> bool:
        """Return whether the application hears of it even if nothing is new: once in each generation."""
        is_told = answer.is_cooperative or answer.status is AnswerStatus.OWN
        return is_told and self._assigned_generation != answer.membership.generation
