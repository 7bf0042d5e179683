"""The member's side of the groups' protocol, pure: what it reports, which answers count, what it owns.

`txnstore.groups.coordinator` describes the protocol.  An answer waits until the application is told of it.  While the
application is being told, and until the group has heard the result, other answers are dropped: they do not take it
into account.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from txnstore.groups.group import NO_PARTITIONS, AnswerStatus, MemberAnswer, Partitions, Report
from txnstore.model import NO_GENERATION, GroupMembership, PartitionName

Told = tuple[GroupMembership, Partitions, Partitions, int]


@dataclass(frozen=True, slots=True)
class MemberRequest:
    """A request that is made now."""

    report: Report
    incarnation: int
    changes: int


@dataclass(frozen=True, slots=True)
class AssignmentChange:
    """What the application has to be told."""

    is_revocation: bool
    partitions: Partitions
    """Those that it has to give back, or those that are new, which may be empty."""


class MemberProtocol:
    """One consumer as its group knows it; not for several threads at once."""

    def __init__(self, new_identity: Callable[[], GroupMembership]) -> None:
        """Begin as what `new_identity` returns: a member that the group does not know."""
        self._new_identity = new_identity
        self.incarnation = 0
        """How many member ids the consumer had before this one."""
        self._step = 0
        self._changes = 0
        """How often what is reported changed: an answer to a request from before a change is dropped."""
        self._reset()

    def _reset(self) -> None:
        self.identity = self._new_identity()
        """Who the member is, and the newest generation that it has accepted."""
        self.owned = NO_PARTITIONS
        """What the application has, or is being given, and what the group does not know to be free yet."""
        self._owned_since: dict[PartitionName, int] = {}
        """The generation in which each came, if it is owned."""
        self.revoked = NO_PARTITIONS
        """The part of it that the application is giving back, or has given back."""
        self.is_settled = False
        """Whether there is nothing to do until the group changes."""
        self.is_changing = False
        """Whether the application is being told of a change, or the group has yet to hear the result."""
        self.has_missed_news = False
        """Whether there may be a newer answer than the one that the application was told of."""
        self._answer: MemberAnswer | None = None
        self._assigned_generation = NO_GENERATION

    def begin_anew(self) -> None:
        """Become a new member, which owns nothing: what was owned is lost."""
        self.incarnation += 1
        self._reset()

    # --- requests ----------------------------------------------------------------------------------------------------

    def request(self) -> MemberRequest:
        """Return what to report now; only the answer to the newest request counts."""
        self._step += 1
        self.has_missed_news = False
        return MemberRequest(Report(self.identity, self._step, self.owned), self.incarnation, self._changes)

    @property
    def may_renew(self) -> bool:
        """Whether it is enough to tell the group that the member is alive."""
        return self.is_settled and not self.waits_for_application

    @property
    def waits_for_others(self) -> bool:
        """Whether the member lacks something that only the group can give it."""
        return not self.is_settled and not self.waits_for_application

    @property
    def waits_for_application(self) -> bool:
        """Whether news of the group would have to wait."""
        return self.is_changing or self.has_answer

    @property
    def has_answer(self) -> bool:
        """Whether an answer waits for the application."""
        return self._answer is not None

    @property
    def is_overtaken(self) -> bool:
        """Whether a later report was sent than the one that the waiting answer is about: it has nothing of that."""
        return self._answer is not None and self._answer.step != self._step

    def drop_answer(self) -> None:
        """Forget the answer that waits: another request is about to be made."""
        self._answer = None

    def receive(self, request: MemberRequest, answer: MemberAnswer) -> bool:
        """Keep the answer to the newest request; return whether the application now has to be told of one."""
        if self.is_changing or request.changes != self._changes:
            self.has_missed_news = True
            return False
        if not self._concerns_application(answer):
            self._answer = None
            self.is_settled = answer.is_settled
            return False
        was_waiting = self.has_answer
        self._answer = answer
        return not was_waiting

    # --- the application's part --------------------------------------------------------------------------------------

    def accept(self) -> AssignmentChange | None:
        """Adopt the answer that waits; return what the application is to be told, until `complete` or `release`."""
        answer, self._answer = self._answer, None
        if answer is None:
            return None
        self.identity = answer.membership
        self.is_settled = answer.is_settled
        if answer.status is AnswerStatus.REVOKE:
            self.revoked = frozenset(answer.revoke)
            return self._begin(AssignmentChange(is_revocation=True, partitions=self.revoked))
        new = frozenset(answer.partitions) - self.owned
        if not new and not self._is_first_assignment(answer):
            return None
        self._assigned_generation = answer.membership.generation
        self.owned |= new
        self._owned_since.update(dict.fromkeys(new, self._assigned_generation))
        return self._begin(AssignmentChange(is_revocation=False, partitions=new))

    @property
    def told(self) -> Told:
        """Who the member is, and what it has, as far as the application knows: for `put_off`."""
        return self.identity, self.owned, self.revoked, self._assigned_generation

    def put_off(self, told: Told) -> None:
        """Be as before `accept`, which the application has not been told of; the group has to be asked again."""
        # No call in between: a second Ctrl-C finds all of this done, or nothing.
        self.identity, self.owned, self.revoked, self._assigned_generation = told
        self._answer = None
        self.is_changing = self.is_settled = False
        self._changes += 1

    def complete(self) -> None:
        """End the change that `accept` has begun: from now on the reports take it into account."""
        self.is_changing = False
        self._changes += 1

    def has_come_since(self, partitions: Iterable[PartitionName], generation: int) -> bool:
        """Return whether one of these came in a later generation: what was made in that one may be another's by now."""
        return any(self._owned_since.get(partition, NO_GENERATION) > generation for partition in partitions)

    def give_back(self, partitions: Collection[PartitionName]) -> None:
        """Note that the application has given these back; the group does not know it yet."""
        self.revoked |= frozenset(partitions)

    def release(self, partitions: Collection[PartitionName]) -> None:
        """Let the next report say that these are free."""
        self.owned -= frozenset(partitions)
        self.revoked -= frozenset(partitions)
        self.is_settled = False
        self.complete()

    def _begin(self, change: AssignmentChange) -> AssignmentChange:
        self.is_changing = True
        self._changes += 1
        return change

    def _concerns_application(self, answer: MemberAnswer) -> bool:
        return (
            answer.status is AnswerStatus.REVOKE
            or answer.membership.generation != self.identity.generation
            or not self.owned.issuperset(answer.partitions)
            or self._is_first_assignment(answer)
        )

    def _is_first_assignment(self, answer: MemberAnswer) -> bool:
        """Return whether the application hears of it even if nothing is new: once in each generation."""
        is_assignment = answer.is_cooperative or answer.status is AnswerStatus.OWN
        return is_assignment and self._assigned_generation != answer.membership.generation
