"""The orders of delivery among the partitions of a consumer: which of them hands out what comes next.

`RoundRobin` is Kafka's: each partition by itself, and they take turns.  The rest is about `AtomicOrder`, for a consumer
that gets each transaction from all of its partitions at once, in one strict order.

All that was committed in a database has one order, that of the numbers which the commits have drawn: see
`log.partition_rows`.  Of what comes next in some partition that with the lowest number is handed out; a transaction
from one partition after the other, and nothing else in between.  It waits until nothing that belongs before it can
come any more: until each partition has been read up to what comes next there, or to its end in a snapshot that shows
it.  For whatever was committed before it is in each snapshot that shows it.

Where that cannot be known, as a partition is paused or cannot be read, transactions wait, and records that are in none
go on.

Where a reader begins in the middle of a transaction, that one comes first: so positions that were committed at any
moment are enough to go on from.  It is the one whose number is that of the last commit behind some partition's
beginning.  Each database has an order of its own; a transaction of several databases is one in each of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Protocol

from txnstore.clients.consumer.opening import Chunk, Committed
from txnstore.clients.model.errors import KafkaError
from txnstore.clients.model.message import Message

if TYPE_CHECKING:
    from txnstore.clients.consumer.assigned_partition import AssignedPartition

    Assigned = Mapping[tuple[str, int], AssignedPartition]
    """The assigned partitions by topic and number, in the order in which they were assigned."""

#: What is said of a partition that is not there: no transaction has a share in it.
_NOT_THERE: Final = (
    KafkaError._UNKNOWN_PARTITION,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
)


class DeliveryOrder(Protocol):
    """Decides which partition is next, by what is buffered and known of each of them."""

    @property
    def ready(self) -> Sequence[AssignedPartition]:
        """Those that may hand something out, first the one whose turn it is; the same object for ever."""

    def arrange(self, changed: AssignedPartition, assigned: Assigned) -> None:
        """Decide anew: something has changed about one of the assigned partitions, or it is not among them any more."""

    def end_turn(self, partition: AssignedPartition, assigned: Assigned) -> None:
        """Decide anew: this one has handed out a batch or an event, and others come first."""

    def begin(self, partition: AssignedPartition, commit: Committed) -> bool:
        """Take note that records of the commit are handed out now, if the reader has told what they belong to.

        False: nothing is noted. It is not their turn, or that has not been decided to the end: it is to be arranged.
        """

    def start_over(self) -> None:
        """Take note that a partition goes on elsewhere, so that what is being handed out may come again."""

    def keeps_turn(self, partition: AssignedPartition) -> bool:
        """Return whether this one, which is in the middle of a batch, goes on, whatever has changed since it began."""

    def more_to_read(
        self, chosen: Sequence[AssignedPartition], readable: Iterable[AssignedPartition]
    ) -> Sequence[AssignedPartition]:
        """Return which of the readable partitions are to be read beside the chosen ones, for which there is room."""


class RoundRobin:
    """Each partition hands out a batch or an event, and goes to the end of the queue."""

    def __init__(self) -> None:
        self.ready: deque[AssignedPartition] = deque()

    def arrange(self, changed: AssignedPartition, assigned: Assigned) -> None:
        """Let the partition join the queue if it has something and is not paused, else leave it."""
        may_be_ready = (changed.chunk is not None or changed.waiting) and not changed.paused_by
        if may_be_ready and not changed.is_ready:
            changed.is_ready = True
            self.ready.append(changed)
        elif changed.is_ready and not may_be_ready:
            changed.is_ready = False
            self.ready.remove(changed)

    def end_turn(self, partition: AssignedPartition, assigned: Assigned) -> None:
        """Let the partition join the queue again, if it has more."""
        if partition.is_ready:
            partition.is_ready = False
            self.ready.remove(partition)
            self.arrange(partition, assigned)

    def begin(self, partition: AssignedPartition, commit: Committed) -> bool:
        """Nothing is handed out together."""
        return True

    def start_over(self) -> None:
        """Nothing was handed out together."""

    def keeps_turn(self, partition: AssignedPartition) -> bool:
        """Return whether it is not paused: others wait for the end of its batch."""
        return not partition.paused_by

    def more_to_read(
        self, chosen: Sequence[AssignedPartition], readable: Iterable[AssignedPartition]
    ) -> Sequence[AssignedPartition]:
        """Return none: nobody waits for another one."""
        return ()


class AtomicOrder:
    """One commit after the other: of all that have something, one partition alone may hand something out."""

    def __init__(self, on_transaction_end: Callable[[], object]) -> None:
        """Call back when a transaction is complete."""
        self.ready: list[AssignedPartition] = []
        self._on_transaction_end = on_transaction_end
        self._last: AssignedPartition | None = None
        """The one that had the last turn."""
        self._is_decided = True
        """Whether the last decision has come to its end: an interrupt leaves the one before it."""
        self._is_begun = False
        """Whether something of the transaction has been handed out here."""
        self._partners: dict[AssignedPartition, bool] = {}
        """Among which the transaction is whole: what was assigned of its database when it began, or has been since.

        True: when it began."""
        self._known: set[AssignedPartition] = set()
        """What was assigned when it began, of any database, or has been since."""
        self._leader: int | None = None
        """The number of its database."""
        self._awaited: set[AssignedPartition] = set()
        """Those that are to be read once more before anything comes next."""
        self.transaction: Committed | None = None
        """What is being handed out; None between two transactions."""
        self.completed: Committed | None = None
        """The last transaction of which everything was handed out in one go."""
        self.handed_out: Committed | None = None
        """What the last record belongs to; None: no transaction."""

    def arrange(self, changed: AssignedPartition, assigned: Assigned) -> None:
        """Let that partition be ready which is to hand out what comes next."""
        self._is_decided = False
        self._awaited.clear()
        if not self._is_begun:
            # Nothing of it was handed out: it may be another one's turn by now.
            self.transaction = None
        chosen = None
        if self.transaction is not None:
            if changed not in self._known:
                # In this order: what an interrupt leaves out is done the next time.
                self._partners[changed] = False
                self._known.add(changed)
            chosen = self._next_of(self.transaction, assigned)
        if self.transaction is None:
            chosen = self._next_of_all(assigned)
        # No interrupt comes between these.
        self.ready[:] = [] if chosen is None else [chosen]
        self._is_decided = True

    def end_turn(self, partition: AssignedPartition, assigned: Assigned) -> None:
        """Decide who is next; where there is a choice, this one comes last."""
        self._last = partition
        self.arrange(partition, assigned)

    def begin(self, partition: AssignedPartition, commit: Committed) -> bool:
        """Take note of what records belong to that are handed out from now on, if it is their turn."""
        number = commit.number if commit.is_transaction else None
        transaction = self.transaction
        # No interrupt comes from here on: all of it is noted, or nothing.
        if not self._is_decided or number != (None if transaction is None else transaction.number):
            return False
        # Not their own commit, which says the same: each page brings one.
        self.handed_out = transaction
        partition.last_commit = number
        self._is_begun = True
        return True

    def start_over(self) -> None:
        """End the transaction that is being handed out: it is to be found anew."""
        self.transaction, self._is_decided = None, False

    def keeps_turn(self, partition: AssignedPartition) -> bool:
        """Return False: what has changed may come first."""
        return False

    def more_to_read(
        self, chosen: Sequence[AssignedPartition], readable: Iterable[AssignedPartition]
    ) -> Sequence[AssignedPartition]:
        """Return those of which nothing is buffered: to be read with the others, so that all ends are of one snapshot.

        If something waits for one of them, it is read whether there is room for more or not.
        """
        known = set(chosen)
        return [
            partition
            for partition in readable
            if partition not in known
            and partition.head is None
            and (
                partition.is_unknown
                or partition in self._awaited
                or not (partition.paused_by or (partition.is_at_end and not chosen))
            )
        ]

    # --- what comes next ---------------------------------------------------------------------------------------------

    def _begin(
        self, transaction: Committed, partners: Sequence[AssignedPartition], assigned: Assigned, *, is_begun: bool
    ) -> AssignedPartition | None:
        own, known, leader = dict.fromkeys(partners, True), set(assigned.values()), partners[0].leader
        # No interrupt comes between these: it would go on among the partners of the one before.
        self._partners, self._known, self._leader = own, known, leader
        self.transaction, self._is_begun = transaction, is_begun
        return self._next_of(transaction, assigned)

    def _next_of(self, transaction: Committed, assigned: Assigned) -> AssignedPartition | None:
        """Return where the transaction goes on; it is over if that is nowhere and nothing is awaited."""
        is_over = is_whole = True
        for partition, was_there in list(self._partners.items()):
            head = partition.head
            is_part = head is not None and _is_part(head, transaction)
            if partition.leader not in (None, self._leader):
                # What is left of it there is another database's by now.
                is_whole = is_whole and not (was_there or is_part)
                continue
            if head is not None and not is_part:
                continue
            if assigned.get((partition.topic, partition.number)) is not partition:
                is_whole = False
                continue
            if head is None and self._has_ended(partition, transaction):
                continue
            is_over = False
            # What has gone wrong with one that is awaited is told at once.
            if not partition.paused_by and partition.has_something:
                return partition
        if is_over:
            self.transaction, self.completed = None, transaction if is_whole else None
            self._on_transaction_end()
        return None

    def _next_of_all(self, assigned: Assigned) -> AssignedPartition | None:
        in_turn = list(assigned.values())
        if self._last in in_turn:
            behind_last = in_turn.index(self._last) + 1
            in_turn = in_turn[behind_last:] + in_turn[:behind_last]
        for partition in in_turn:
            is_event = partition.chunk is None and partition.waiting and isinstance(partition.waiting[0], Message)
            if is_event and not partition.paused_by:
                return partition
        unknown = {partition.leader for partition in in_turn if partition.is_unknown}
        if None in unknown:
            return None
        for leader in dict.fromkeys(partition.leader for partition in in_turn):
            if leader in unknown:
                continue
            of_leader = [partition for partition in in_turn if partition.leader == leader]
            found = self._next_in_database(of_leader, assigned)
            if found is not None or self.transaction is not None:
                return found
        return None

    def _next_in_database(
        self, partitions: Sequence[AssignedPartition], assigned: Assigned
    ) -> AssignedPartition | None:
        """Return what comes next of the partitions of one database."""
        heads = {partition: head for partition in partitions if (head := partition.head) is not None}
        commits = {partition: _commit_of(head) for partition, head in heads.items()}
        behind = {partition.last_commit for partition in partitions}
        begun = [commit for commit in commits.values() if commit.is_transaction and commit.number in behind]
        half = min(begun, key=attrgetter("number"), default=None)
        if half is not None:
            # Others may be assigned before the first record of it is taken.
            is_begun = any(one.chunk is head and _is_part(head, half) for one, head in heads.items())
            return self._begin(half, partitions, assigned, is_begun=is_begun)
        for partition in partitions:
            if partition.has_something and partition not in commits and not partition.paused_by:
                # No record.
                return partition
        transactions_wait = False
        for partition in sorted(commits, key=lambda partition: commits[partition].number):
            commit = commits[partition]
            if partition.paused_by:
                transactions_wait = True
            elif not (commit.is_transaction and transactions_wait):
                # In which something that comes before it may still be found.
                unread = [one for one in partitions if one not in commits and not self._has_ended(one, commit)]
                if any(one.trouble is None for one in unread):
                    return None
                if not commit.is_transaction:
                    return partition
                is_shared = any(one.paused_by and _is_part(head, commit) for one, head in heads.items())
                if not unread and not is_shared:
                    return self._begin(commit, partitions, assigned, is_begun=False)
                transactions_wait = True
        return None

    def _has_ended(self, partition: AssignedPartition, commit: Committed) -> bool:
        """Return whether nothing comes in the partition that its snapshot has; if that is not known, await it."""
        if partition.trouble in _NOT_THERE or partition.ended_in >= commit.snapshot:
            return True
        self._awaited.add(partition)
        partition.is_at_end = False
        return False


def _commit_of(chunk: Chunk) -> Committed:
    assert chunk.commit is not None, "the reader knows that all partitions have one order"
    return chunk.commit


def _is_part(chunk: Chunk, transaction: Committed) -> bool:
    commit = _commit_of(chunk)
    return commit.number == transaction.number and commit.is_transaction
