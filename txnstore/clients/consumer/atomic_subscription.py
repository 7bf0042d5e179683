"""The subscription of a consumer that gets each transaction from all of its partitions at once.

Each partition has its own order of commits, and those of two partitions never contradict each other: whoever commits
holds the ends of all the partitions that he has written to.  So among the transactions that come next in some partition
there always is one that comes next in every partition that it was committed in; it is handed out from one of them after
the other, and nothing else in between.  A transaction of several databases is one in each of them.

Where a reader begins in the middle of one, that one comes first: so positions that were committed at any moment are
enough to go on from.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Any

from txnstore.clients.consumer.subscription import (
    AssignedPartition,
    Chunk,
    FetchPosition,
    PageRead,
    Subscription,
    Wanted,
)
from txnstore.clients.model.errors import KafkaError
from txnstore.clients.model.message import Message
from txnstore.errors import TxnStoreError
from txnstore.log.commit_shares import CommittedShares


class _Share(enum.Enum):
    """What a partition has to do with a transaction that was committed in it."""

    AT_HAND = "its records come next"
    AWAITED = "what comes next is not known yet"
    BLOCKED = "something else comes first"
    DONE = "all of it is handed out, or the reader began behind it"


class AtomicSubscription(Subscription):
    """The assigned partitions of one consumer; of all that are ready, one alone may hand something out."""

    def __init__(self, *, on_transaction_end: Callable[[], None], **options: Any) -> None:
        """Call back when a transaction is complete; the other arguments are those of `Subscription`."""
        super().__init__(**options)
        self._on_transaction_end = on_transaction_end
        self._last: AssignedPartition | None = None
        self._is_begun = False
        self._is_cut = False
        self._expected: set[AssignedPartition] = set()
        """Those of which it is not known yet what comes next where they begin."""
        self._evens_out = True
        """Whether some transaction may be handed out in a part of its partitions, because the reader begins there."""
        self.transaction: CommittedShares | None = None
        """What is being handed out; None between two transactions."""
        self.completed: CommittedShares | None = None
        """The last transaction of which everything was handed out in one go."""
        self.handed_out: CommittedShares | None = None
        """What the last record belongs to; None: no transaction."""

    @property
    def partition_ids(self) -> frozenset[int]:
        """The partitions among which transactions are whole: those whose ids are known."""
        return frozenset(partition.partition_id for partition in self if partition.partition_id is not None)

    # --- what changes what comes next --------------------------------------------------------------------------------

    def add(self, topic: str, number: int, position: int) -> None:
        """Assign a partition; until it is known what comes next there, nothing is handed out."""
        super().add(topic, number, position)
        self._expect(self._partitions[topic, number])

    def remove(self, topic: str, number: int) -> AssignedPartition | None:
        """Remove a partition; a transaction that is being handed out goes on in the others, and is not whole."""
        self._is_cut = True
        removed = super().remove(topic, number)
        if removed is not None:
            self._expected.discard(removed)
        self._arrange()
        return removed

    def seek(self, partition: AssignedPartition, position: int) -> None:
        """Continue from `position`; a transaction that is being handed out ends here, and begins anew."""
        super().seek(partition, position)
        self.transaction = None
        self._expect(partition)

    def pause(self, partition: AssignedPartition) -> None:
        """Stop handing out records of the partition, and with them all transactions that have a share in it."""
        super().pause(partition)
        self._arrange()

    def resolved(self, position: FetchPosition, start: int, partition_id: int | None = None) -> None:
        """Read from this position on; what others have buffered does not tell of shares in a partition that is new."""
        partition = position.partition
        known_id = partition.partition_id
        super().resolved(position, start, partition_id)
        if partition.partition_id != known_id:
            for other in self:
                if other is not partition:
                    self._read_again(other)
        self._arrange()

    def out_of_range(self, position: FetchPosition) -> None:
        """Resolve the start again: the log does not hold the offset, or no longer."""
        super().out_of_range(position)
        self._expect(position.partition)

    def fail(self, position: FetchPosition, error: KafkaError | None, now: float, *, offset: int | None = None) -> None:
        """Report the error, and let others go on: what comes next here is not known for a while."""
        if error is not None:
            self._expected.discard(position.partition)
        super().fail(position, error, now, offset=offset)
        self._arrange()

    def stop(self, position: FetchPosition, error: KafkaError, now: float, *, offset: int | None = None) -> None:
        """Report the error, and let others go on: nothing comes here until the application seeks."""
        self._expected.discard(position.partition)
        super().stop(position, error, now, offset=offset)
        self._arrange()

    def deliver(
        self, position: FetchPosition, page: PageRead, now: float = 0.0, *, brought_nothing: bool = False
    ) -> None:
        """Buffer what was read; whoever is awaited for a transaction that it tells of is not at his end any more."""
        super().deliver(position, page, now, brought_nothing=brought_nothing)
        partition = position.partition
        if partition.is_current(position) and (_first_chunk(partition) is not None or partition.is_at_end):
            self._expected.discard(partition)
        by_id = self._by_id()
        for shares in {id(chunk.shares): chunk.shares for chunk in page.chunks if chunk.shares is not None}.values():
            for partition_id, place in shares.places.items():
                other = by_id.get(partition_id)
                if other is not None and self._share(other, shares, place) is _Share.AWAITED:
                    other.is_at_end = False
        self._arrange()

    def to_read(self, now: float, is_wanted: Wanted | None = None) -> list[FetchPosition]:
        """Return what to read next, and what others wait for: although enough is buffered, or it is paused."""
        positions = super().to_read(now, is_wanted)
        chosen = {position.partition for position in positions}
        awaited = (
            partition
            for partition in self
            if partition.start is None
            and partition.chunk is None
            and not partition.waiting
            and partition.retry_at <= now
            and (partition in self._expected or not (positions or partition.is_paused or partition.is_at_end))
            and (is_wanted is None or is_wanted(partition))
        )
        positions += [
            FetchPosition(partition, partition.version, partition.fetch_position)
            for partition in awaited
            if partition not in chosen
        ]
        return positions

    def _expect(self, partition: AssignedPartition) -> None:
        self._expected.add(partition)
        self._evens_out = True
        self._arrange()

    def _read_again(self, partition: AssignedPartition) -> None:
        """Drop what is buffered, to read it again."""
        first = partition.chunk or _first_chunk(partition)
        if first is None or partition.start is not None:
            return
        is_begun = partition.chunk is not None and partition.position > first.start
        self._drop_buffer(partition)
        partition.fetch_position = partition.position if is_begun else first.start
        partition.eof_reported_at = None
        self._expected.add(partition)
        self._evens_out = True

    # --- what comes next ---------------------------------------------------------------------------------------------

    def _make_ready(self, partition: AssignedPartition) -> None:
        self._arrange()

    def _rotate(self, partition: AssignedPartition) -> None:
        self._last = partition
        self._arrange()

    def _next_chunk(self, partition: AssignedPartition) -> Message | None:
        message = super()._next_chunk(partition)
        if partition.chunk is not None and partition.chunk.source is not None:
            # Not the chunk's own, which says the same: each page brings one.
            self.handed_out = None if partition.chunk.shares is None else self.transaction
            self._is_begun = True
        return message

    def _stop_at_damage(self, partition: AssignedPartition, chunk: Chunk, error: TxnStoreError) -> Message:
        message = super()._stop_at_damage(partition, chunk, error)
        self._arrange()
        return message

    def _arrange(self) -> None:
        """Let that partition be ready which is to hand out what comes next."""
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

    def _next_of(self, transaction: CommittedShares) -> AssignedPartition | None:
        """Return where the transaction goes on; it is over if that is nowhere and nothing is awaited."""
        by_id = self._by_id()
        is_over = True
        for partition_id, place in transaction.places.items():
            partition = by_id.get(partition_id)
            share = _Share.DONE if partition is None else self._share(partition, transaction, place)
            if partition is None or share is _Share.DONE:
                continue
            is_over = False
            # What has gone wrong with one that is awaited is told at once.
            if not partition.is_paused and (share is _Share.AT_HAND or partition.waiting):
                return partition
        if is_over:
            self.transaction, self.completed = None, None if self._is_cut else transaction
            self._on_transaction_end()
        return None

    def _next_of_all(self) -> AssignedPartition | None:
        in_turn = list(self._in_turn())
        for partition in in_turn:
            is_event = partition.chunk is None and partition.waiting and isinstance(partition.waiting[0], Message)
            if is_event and not partition.is_paused:
                return partition
        leaders = {partition.leader for partition in self._expected}
        in_turn = [partition for partition in in_turn if leaders.isdisjoint({None, partition.leader})]
        if self._evens_out:
            found, is_awaited = self._next_half(in_turn)
            if found is not None or is_awaited:
                return found
            self._evens_out = bool(leaders)
        for partition in in_turn:
            first = partition.chunk or _first_chunk(partition)
            if partition.is_paused or (first is None and not partition.waiting):
                continue
            if first is None or first.shares is None:
                return partition
            if self._share_of_all(first.shares) is _Share.AT_HAND:
                self._begin(first.shares, is_begun=False)
                return partition
        return None

    def _begin(self, transaction: CommittedShares, *, is_begun: bool) -> None:
        self.transaction, self._is_begun, self._is_cut = transaction, is_begun, False

    def _next_half(self, in_turn: list[AssignedPartition]) -> tuple[AssignedPartition | None, bool]:
        """Return where to go on with a transaction of which a part was handed out before, and whether one is awaited.

        One that cannot go on because something else comes first in a partition of it is left alone.
        """
        is_awaited = False
        for partition in in_turn:
            first = partition.chunk or _first_chunk(partition)
            if first is None:
                is_awaited |= bool(self._positions.offset_in_transaction(partition.fetch_position))
            elif first.shares is not None and self._is_half(partition, first, first.shares):
                share = self._share_of_all(first.shares)
                if share is _Share.AT_HAND:
                    self._begin(first.shares, is_begun=True)
                    return partition, False
                is_awaited |= share is _Share.AWAITED
        return None, is_awaited

    def _share_of_all(self, transaction: CommittedShares) -> _Share:
        """Return whether the transaction can be handed out from all of its partitions: AT_HAND, AWAITED or BLOCKED."""
        by_id = self._by_id()
        found = _Share.AT_HAND
        for partition_id, place in transaction.places.items():
            partition = by_id.get(partition_id)
            if partition is None:
                continue
            share = self._share(partition, transaction, place)
            if share is _Share.BLOCKED:
                return share
            if share is _Share.AWAITED or (share is _Share.AT_HAND and partition.is_paused):
                found = _Share.AWAITED
        return found

    def _is_half(self, partition: AssignedPartition, first: Chunk, transaction: CommittedShares) -> bool:
        """Return whether a part of the transaction was handed out before."""
        within = self._positions.offset_in_transaction(first.start) or 0
        if partition.chunk is not None or within > transaction.first_offsets.get(partition.partition_id or 0, 0):
            return True
        by_id = self._by_id()
        return any(
            other is not None and self._share(other, transaction, place) is _Share.DONE
            for partition_id, place in transaction.places.items()
            for other in (by_id.get(partition_id),)
        )

    def _share(self, partition: AssignedPartition, transaction: CommittedShares, place: int) -> _Share:
        first = partition.chunk or _first_chunk(partition)
        if first is None:
            is_behind = partition.start is None and self._positions.place(partition.fetch_position) > place
            return _Share.DONE if is_behind else _Share.AWAITED
        comes_at = self._positions.place(first.start)
        if comes_at == place and first.shares is not None and first.shares.producer == transaction.producer:
            return _Share.AT_HAND
        return _Share.DONE if comes_at > place else _Share.BLOCKED

    def _in_turn(self) -> Iterator[AssignedPartition]:
        """Return the partitions; the last one that has handed out something comes last."""
        partitions = list(self)
        first = 0 if self._last not in partitions else partitions.index(self._last) + 1
        yield from partitions[first:]
        yield from partitions[:first]

    def _by_id(self) -> dict[int | None, AssignedPartition]:
        return {partition.partition_id: partition for partition in self}


def _first_chunk(partition: AssignedPartition) -> Chunk | None:
    """Return the first records that wait; events, and stretches that are stepped over, do not count."""
    return next((item for item in partition.waiting if isinstance(item, Chunk) and item.source is not None), None)
