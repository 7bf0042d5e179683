"""The subscription of a consumer that gets each transaction from all of its partitions at once, in one strict order.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from txnstore.clients.consumer.opening import Chunk, Committed, PageRead
from txnstore.clients.consumer.subscription import AssignedPartition, FetchPosition, Subscription, Wanted
from txnstore.clients.model.errors import KafkaError
from txnstore.clients.model.message import Message
from txnstore.errors import TxnStoreError

#: What is said of a partition that is not there: no transaction has a share in it.
_NOT_THERE: Final = (
    KafkaError._UNKNOWN_PARTITION,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
)


class AtomicSubscription(Subscription):
    """The assigned partitions of one consumer; of all that are ready, one alone may hand something out."""

    def __init__(self, *, on_transaction_end: Callable[[], None], **options: Any) -> None:
        """Call back when a transaction is complete; the other arguments are those of `Subscription`."""
        super().__init__(**options)
        self._on_transaction_end = on_transaction_end
        self._last: AssignedPartition | None = None
        self._is_begun = False
        """Whether something of the transaction has been handed out here."""
        self._is_cut = False
        self._partners: Sequence[AssignedPartition] = ()
        """Among which the transaction is whole: what was assigned of its database when it began."""
        self._added: list[AssignedPartition] = []
        """What has been assigned since, and counts as its database's until it is known to be of another one."""
        self._leader: int | None = None
        """The number of its database."""
        self._expected: set[AssignedPartition] = set()
        """Those whose next transaction, from where they begin, is not known yet."""
        self._awaited: set[AssignedPartition] = set()
        """Those that are to be read once more before the next transaction is handed out."""
        self._not_there: set[AssignedPartition] = set()
        self._in_trouble: set[AssignedPartition] = set()
        """Those that could not be read; what the application was told of that is handed out."""
        self.transaction: Committed | None = None
        """What is being handed out; None between two transactions."""
        self.completed: Committed | None = None
        """The last transaction of which everything was handed out in one go."""
        self.handed_out: Committed | None = None
        """What the last record belongs to; None: no transaction."""
        self.kept: list[Message] = []
        """The last records that were handed out, if a call has gathered them that goes on when it is made again.

        They have not reached the application: before anything else is done here, they are given back."""
        self._begins: dict[AssignedPartition, int] = {}
        self._begins_known = 0
        """Of how many of them the positions are among these."""

    # --- what changes what comes next --------------------------------------------------------------------------------

    def add(self, topic: str, number: int, position: int) -> None:
        """Assign a partition; until it is known what comes next there, no transaction begins, and none ends."""
        self.return_kept()
        super().add(topic, number, position)
        added = self._partitions[topic, number]
        if self.transaction is not None:
            self._added.append(added)
        self._expect(added)

    def remove(self, topic: str, number: int) -> AssignedPartition | None:
        """Remove a partition; a transaction that is being handed out goes on in the others, and is not whole."""
        self.return_kept()
        self._is_cut = True
        removed = super().remove(topic, number)
        if removed is not None:
            for known in (self._expected, self._awaited, self._not_there, self._in_trouble):
                known.discard(removed)
        self._arrange()
        return removed

    def seek(self, partition: AssignedPartition, position: int) -> None:
        """Continue from `position`; a transaction that is being handed out ends here, and starts over."""
        self.return_kept()
        super().seek(partition, position)
        self.transaction = None
        self._expect(partition)

    def pause(self, partition: AssignedPartition, by: str = "application") -> None:
        """Stop handing out records of the partition, and with them all transactions from its next one on."""
        self.return_kept()
        super().pause(partition, by)
        self._arrange()

    def resume(self, partition: AssignedPartition, by: str = "application") -> None:
        """Hand out records of the partition again."""
        self.return_kept()
        super().resume(partition, by)

    def resolved(
        self, position: FetchPosition, start: int, partition_id: int | None = None, last_commit: int | None = None
    ) -> None:
        """Read from this position on; the partition has this id, and that commit is the last one behind it."""
        super().resolved(position, start, partition_id, last_commit)
        self._arrange()

    def out_of_range(self, position: FetchPosition) -> None:
        """Resolve the start again: the log does not hold the offset, or no longer."""
        if not position.partition.is_current(position):
            return
        super().out_of_range(position)
        self._expect(position.partition)

    def fail(self, position: FetchPosition, error: KafkaError | None, now: float, *, offset: int | None = None) -> None:
        """Report the error, and let records go on that are in no transaction: what comes next here is not known."""
        partition = position.partition
        if not partition.is_current(position):
            return
        if error is not None:
            self._expected.discard(partition)
            self._in_trouble.add(partition)
            if error.code() in _NOT_THERE:
                self._not_there.add(partition)
        super().fail(position, error, now, offset=offset)
        self._arrange()

    def stop(self, position: FetchPosition, error: KafkaError, now: float, *, offset: int | None = None) -> None:
        """Report the error, and let others go on: nothing comes here until the application seeks."""
        if not position.partition.is_current(position):
            return
        self._expected.discard(position.partition)
        self._in_trouble.add(position.partition)
        super().stop(position, error, now, offset=offset)
        self._arrange()

    def deliver(
        self, position: FetchPosition, page: PageRead, now: float = 0.0, *, brought_nothing: bool = False
    ) -> None:
        """Buffer what was read, and take note of when that was."""
        partition = position.partition
        is_wanted = partition.start is None and partition.fetch_position == position.position
        if partition.is_current(position) and is_wanted:
            is_end = page.next_position >= page.end_position
            partition.ended_in = page.snapshot if is_end else -1
            for known in (self._awaited, self._not_there, self._in_trouble):
                known.discard(partition)
        super().deliver(position, page, now, brought_nothing=brought_nothing)
        if partition.is_current(position) and (_head(partition) is not None or partition.is_at_end):
            self._expected.discard(partition)
        self._arrange()

    def to_read(self, now: float, is_wanted: Wanted | None = None) -> list[FetchPosition]:
        """Return what to read next.

        That is also a partition of which nothing is buffered: with the others, so that its end is of the same snapshot;
        or, if something waits for it, whether there is room for more or not.
        """
        positions = super().to_read(now, is_wanted)
        chosen = {position.partition for position in positions}
        more = (
            partition
            for partition in self
            if partition.start is None
            and partition not in chosen
            and _head(partition) is None
            and partition.retry_at <= now
            and (
                partition in self._expected
                or partition in self._awaited
                or not (partition.paused_by or (partition.is_at_end and not positions))
            )
            and (is_wanted is None or is_wanted(partition))
        )
        positions += [FetchPosition(partition, partition.version, partition.fetch_position) for partition in more]
        return positions

    def _expect(self, partition: AssignedPartition) -> None:
        self._expected.add(partition)
        self._arrange()

    def _await(self, partition: AssignedPartition) -> None:
        """Let the partition be read once more, although everything may have been read."""
        self._awaited.add(partition)
        partition.is_at_end = False

    # --- what is kept ------------------------------------------------------------------------------------------------

    def next_message(self) -> Message | None:
        """Return the next message, a record or an event, and move the position past it."""
        if self.kept:
            self.return_kept()
        return super().next_message()

    def take(self, messages: list[Message], count: int) -> None:
        """Add what is at hand to `messages`, up to `count` of them: the fast way to many."""
        self.return_kept()
        super().take(messages, count)

    def keep_next(self) -> Message | None:
        """Return the next message; a record is kept with those before it, and not stored."""
        self._stores_at_once = False
        message = super().next_message()
        try:
            if message is not None and message.error() is None:
                self.kept.append(message)
        except BaseException:
            self.give_back([] if message is None else [message])
            raise
        return message

    def return_kept(self) -> None:
        """Give back what is kept: it comes again, and positions are those before it."""
        if self.kept:
            self.give_back(self.let_go_kept())
            self.let_go()

    def let_go_kept(self) -> list[Message]:
        """Return what is kept, and keep nothing any more."""
        kept, self.kept, self._begins, self._begins_known = self.kept, [], {}, 0
        return kept

    def begins_of_kept(self) -> Mapping[AssignedPartition, int]:
        """Return where partitions go on once what is kept is given back."""
        self._begins = self._begins_of(self.kept[self._begins_known :]) | self._begins
        self._begins_known = len(self.kept)
        return self._begins

    # --- what comes next ---------------------------------------------------------------------------------------------

    def _make_ready(self, partition: AssignedPartition) -> None:
        self._arrange()

    def _rotate(self, partition: AssignedPartition) -> None:
        self._last = partition
        self._arrange()

    def _next_chunk(self, partition: AssignedPartition) -> Message | None:
        message = super()._next_chunk(partition)
        chunk = partition.chunk
        if chunk is not None and chunk.source is not None:
            # Not the chunk's own, which says the same: each page brings one.
            self.handed_out = transaction = None if _transaction_of(chunk) is None else self.transaction
            partition.last_commit = None if transaction is None else transaction.number
            self._is_begun = True
        return message

    def _stop_at_damage(self, partition: AssignedPartition, chunk: Chunk, error: TxnStoreError) -> Message:
        message = super()._stop_at_damage(partition, chunk, error)
        self._in_trouble.add(partition)
        self._arrange()
        return message

    def _arrange(self) -> None:
        """Let that partition be ready which is to hand out what comes next."""
        self._close_outlet()
        for partition in self._ready:
            partition.is_ready = False
        self._ready.clear()
        if not self._is_begun:
            # Nothing of it was handed out: it may be another one's turn by now.
            self.transaction = None
        chosen = None if self.transaction is None else self._next_of(self.transaction)
        if self.transaction is None:
            chosen = self._next_of_all()
        if chosen is not None:
            chosen.is_ready = True
            self._ready.append(chosen)

    def _begin(self, transaction: Committed, partners: Sequence[AssignedPartition], *, is_begun: bool = False) -> None:
        self.transaction, self._is_begun, self._is_cut = transaction, is_begun, False
        self._partners, self._added, self._leader = partners, [], partners[0].leader

    def _next_of(self, transaction: Committed) -> AssignedPartition | None:
        """Return where the transaction goes on; it is over if that is nowhere and nothing is awaited."""
        is_over = True
        partners = self._partners
        if self._added:
            partners = [*partners, *(one for one in self._added if one.leader in (None, self._leader))]
        for partition in partners:
            head = _head(partition)
            if head is not None and not _is_same(_commit_of(head), transaction):
                continue
            if self.find(partition.topic, partition.number) is not partition:
                continue
            if head is None and self._has_ended(partition, transaction):
                continue
            is_over = False
            # What has gone wrong with one that is awaited is told at once.
            if not partition.paused_by and (head is not None or partition.waiting):
                return partition
        if is_over:
            self.transaction, self.completed = None, None if self._is_cut else transaction
            self._on_transaction_end()
        return None

    def _next_of_all(self) -> AssignedPartition | None:
        in_turn = list(self._in_turn())
        for partition in in_turn:
            is_event = partition.chunk is None and partition.waiting and isinstance(partition.waiting[0], Message)
            if is_event and not partition.paused_by:
                return partition
        expected = {partition.leader for partition in self._expected}
        if None in expected:
            return None
        for leader in dict.fromkeys(partition.leader for partition in in_turn):
            if leader in expected:
                continue
            found = self._next_in_database([partition for partition in in_turn if partition.leader == leader])
            if found is not None or self.transaction is not None:
                return found
        return None

    def _next_in_database(self, partitions: Sequence[AssignedPartition]) -> AssignedPartition | None:
        """Return what comes next of the partitions of one database."""
        commits = {partition: _commit_of(head) for partition in partitions if (head := _head(partition)) is not None}
        behind = {partition.last_commit for partition in partitions}
        begun = [one for one in commits.values() if one.number in behind and one.producer is not None]
        half = min(begun, key=_number_of, default=None)
        if half is not None:
            # Others may be assigned before the first record of it is taken.
            is_begun = any(one.chunk is not None and _is_same(commit, half) for one, commit in commits.items())
            self._begin(half, partitions, is_begun=is_begun)
            return self._next_of(half)
        for partition in partitions:
            if partition.waiting and partition not in commits and not partition.paused_by:
                # No record.
                return partition
        transactions_wait = False
        for partition in sorted(commits, key=lambda partition: commits[partition].number):
            commit = commits[partition]
            is_transaction = commit.producer is not None
            if partition.paused_by:
                transactions_wait = True
            elif not (is_transaction and transactions_wait):
                # In which something that comes before it may still be found.
                unread = {one for one in partitions if one not in commits and not self._has_ended(one, commit)}
                if unread - self._in_trouble:
                    return None
                if not is_transaction:
                    return partition
                is_shared = any(one.paused_by and _is_same(other, commit) for one, other in commits.items())
                if not unread and not is_shared:
                    self._begin(commit, partitions)
                    return self._next_of(commit)
                transactions_wait = True
        return None

    def _has_ended(self, partition: AssignedPartition, commit: Committed) -> bool:
        """Return whether nothing comes in the partition that its snapshot has; ask if it is not known."""
        if partition in self._not_there or partition.ended_in >= commit.snapshot:
            return True
        self._await(partition)
        return False

    def _in_turn(self) -> Iterator[AssignedPartition]:
        """Return the partitions; the last one that has handed out something comes last."""
        partitions = list(self)
        first = 0 if self._last not in partitions else partitions.index(self._last) + 1
        yield from partitions[first:]
        yield from partitions[:first]


def _head(partition: AssignedPartition) -> Chunk | None:
    """Return the records that come next; events, and stretches that are stepped over, do not count."""
    if partition.chunk is not None:
        return partition.chunk
    for item in partition.waiting:
        if isinstance(item, Chunk) and item.source is not None:
            return item
    return None


def _transaction_of(chunk: Chunk) -> Committed | None:
    """Return what its records belong to; None: no transaction."""
    commit = _commit_of(chunk)
    return None if commit.producer is None else commit


def _is_same(commit: Committed, transaction: Committed) -> bool:
    return commit.number == transaction.number and commit.producer is not None


def _commit_of(chunk: Chunk) -> Committed:
    assert chunk.commit is not None, "the reader knows that all partitions have one order"
    return chunk.commit


def _number_of(commit: Committed) -> int:
    return commit.number
