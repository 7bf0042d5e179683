"""A log with its coordinator and groups in memory: dicts and lists that do what Kafka's tables say, and nothing else.

Every method either changes the model and returns what the caller is to be told, or raises `Refused` with the errors
that are right, and changes nothing; but whoever is `Late` has decided to abort the transaction.  A producer id that is
new is not known to the model: it is FRESH until `learn`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from txnstore.errors import (
    ConcurrentTransactions,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidTransactionState,
    OutOfOrderSequence,
    ProducerFenced,
    TransactionAbortable,
    TxnStoreError,
)
from txnstore.model import ProducerIdentity

FRESH: Final = -2
LAST_EPOCH: Final = 32766
FENCING_EPOCH: Final = 32767


class Refused(Exception):
    """The call fails with one of these errors."""

    def __init__(self, *errors: type[TxnStoreError]) -> None:
        super().__init__(errors)
        self.errors = errors


class Late(Refused):
    """The call comes after the transaction's deadline, and has decided to abort it: `Model.deliver` is to follow."""


@dataclass(eq=False)
class Transaction:
    begin: ProducerIdentity
    start_ms: int
    #: True to commit, False to abort, None while it is open.
    decision: bool | None = None
    #: Where it begins in each partition, and where its marker is still missing.
    first_offsets: dict[int, int] = field(default_factory=dict)
    unmarked: set[int] = field(default_factory=set)
    #: By group and partition: the number of the group's commit, and the offset.
    pending: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict)


@dataclass
class Entry:
    """One offset of a partition; a marker has no value."""

    value: bytes | None
    transaction: Transaction | None = None


@dataclass
class Memory:
    """What a partition remembers of a producer."""

    epoch: int
    recent: list[tuple[int, int, int]] = field(default_factory=list)
    last_ms: int = 0


@dataclass
class Batch:
    partition_id: int
    producer: ProducerIdentity
    first_sequence: int
    values: list[bytes]

    @property
    def sequences(self) -> tuple[int, int]:
        return self.first_sequence, self.first_sequence + len(self.values) - 1


@dataclass
class Group:
    commits: int = 0
    committed: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass
class Id:
    """A transactional id."""

    identity: ProducerIdentity
    timeout_ms: int | None
    state: str = "Empty"
    #: Who may repeat an InitProducerId, and who an EndTxn.
    last: ProducerIdentity | None = None
    ended: ProducerIdentity | None = None
    aborted_from_outside: bool = False
    gets_new_producer_id: bool = False
    transaction: Transaction | None = None
    rested_ms: int = 0

    @property
    def is_decided(self) -> bool:
        return self.state.startswith("Prepare")


class Model:
    def __init__(self, partition_ids: Iterable[int], *, delivers_elsewhere: bool) -> None:
        self.now_ms = 0
        self.delivers_elsewhere = delivers_elsewhere
        self.partitions: dict[int, list[Entry]] = {partition_id: [] for partition_id in partition_ids}
        self.memories: dict[tuple[int, int], Memory] = {}
        self.groups: dict[str, Group] = {}
        self.ids: dict[str, Id] = {}
        #: What every identity that was given out has begun.
        self.begun: dict[tuple[str, ProducerIdentity], Transaction | None] = {}

    # What readers see.

    def last_stable_offset(self, partition_id: int) -> int:
        entries = self.partitions[partition_id]
        open_ = {entry.transaction for entry in entries if entry.transaction is not None}
        begins = [one.first_offsets[partition_id] for one in open_ if partition_id in one.unmarked]
        return min(begins, default=len(entries))

    def committed(self, partition_id: int) -> list[tuple[int, bytes]]:
        return [
            (offset, entry.value)
            for offset, entry in enumerate(self.partitions[partition_id][: self.last_stable_offset(partition_id)])
            if entry.value is not None and (entry.transaction is None or entry.transaction.decision)
        ]

    def uncommitted(self, partition_id: int) -> list[tuple[int, bytes]]:
        entries = enumerate(self.partitions[partition_id])
        return [(offset, entry.value) for offset, entry in entries if entry.value is not None]

    def offsets(self, group_id: str) -> dict[int, int]:
        group = self.groups.get(group_id, Group())
        return {partition_id: offset for partition_id, (_, offset) in group.committed.items()}

    def unstable(self, group_id: str) -> set[int]:
        transactions = [id_.transaction for id_ in self.ids.values() if id_.transaction is not None]
        return {partition_id for one in transactions for partition_id in one.pending.get(group_id, {})}

    # Producers.

    def learn(self, transactional_id: str, identity: ProducerIdentity) -> None:
        """Take the identity that the real coordinator gave out for the one that the model expects."""
        id_ = self.ids[transactional_id]
        if id_.identity.producer_id == FRESH:
            known = {identity.producer_id for _, identity in self.begun}
            assert identity.producer_id not in known, "a producer id was given out twice"
            id_.identity = replace(id_.identity, producer_id=identity.producer_id)
        assert identity == id_.identity
        self.begun.setdefault((transactional_id, identity), None)

    def init(
        self,
        transactional_id: str,
        expected: ProducerIdentity | None,
        timeout_ms: int | None,
        *,
        keep_prepared: bool,
    ) -> ProducerIdentity | None:
        """Return the identity of the transaction that was kept."""
        id_ = self.ids.get(transactional_id)
        if id_ is None:
            self.ids[transactional_id] = Id(ProducerIdentity(FRESH, 0), timeout_ms, rested_ms=self.now_ms)
            return None
        if expected is not None and id_.state == "Ongoing" and expected != id_.identity:
            raise Refused(ProducerFenced)
        if expected is not None and id_.state != "Ongoing":
            identity = ProducerIdentity(FRESH, 0) if id_.gets_new_producer_id else id_.identity
            if expected == id_.last and expected != identity:
                self._complete(id_)
                return None
            if expected != identity:
                raise Refused(ProducerFenced)
        if id_.state == "Ongoing" and keep_prepared:
            assert id_.transaction is not None
            id_.identity = replace(id_.identity, epoch=id_.identity.epoch + 1)
            id_.last = id_.ended = None
            self.begun[transactional_id, id_.identity] = id_.transaction
            return id_.transaction.begin
        old = id_.identity
        if id_.state == "Ongoing":
            assert id_.transaction is not None
            was_interrupted = self.delivers_elsewhere and len(id_.transaction.unmarked) > 0
            self._fence(id_)
            if was_interrupted:
                # Whoever was fenced may have asked for the abort once more before all markers were there.
                old = id_.identity
                id_.identity = _next(old)
        else:
            self._complete(id_)
            old = id_.identity
            id_.identity = _next(old)
        if self.delivers_elsewhere and expected is None:
            # A start of its own has a producer id of its own.
            id_.identity = ProducerIdentity(FRESH, 0)
        id_.state, id_.timeout_ms, id_.rested_ms = "Empty", timeout_ms, self.now_ms
        id_.last = old if expected is not None else None
        id_.ended, id_.aborted_from_outside = None, False
        return None

    def append(self, transactional_id: str, producer: ProducerIdentity, batches: list[Batch]) -> list[tuple[int, bool]]:
        """Return the base offset of each batch, and whether it was there already."""
        transaction = self._writable(transactional_id, producer)
        for batch in batches:
            self._check(batch, is_transactional=True)
        return [self._place(batch, self._begin(transactional_id, transaction)) for batch in batches]

    def append_plain(self, batch: Batch | None, partition_id: int, values: list[bytes]) -> tuple[int, bool]:
        """Append outside of any transaction, with an idempotent producer or without."""
        if batch is not None:
            self._check(batch, is_transactional=False)
            return self._place(batch, None)
        offset = len(self.partitions[partition_id])
        self.partitions[partition_id] += [Entry(value) for value in values]
        return offset, False

    def send_offsets(
        self, transactional_id: str, producer: ProducerIdentity, group_id: str, offsets: Mapping[int, int]
    ) -> None:
        transaction = self._begin(transactional_id, self._writable(transactional_id, producer))
        group = self.groups.setdefault(group_id, Group())
        group.commits += 1
        pending = transaction.pending.setdefault(group_id, {})
        pending |= {partition_id: (group.commits, offset) for partition_id, offset in offsets.items()}

    def commit_offsets(self, group_id: str, offsets: Mapping[int, int]) -> None:
        group = self.groups.setdefault(group_id, Group())
        group.commits += 1
        group.committed |= {partition_id: (group.commits, offset) for partition_id, offset in offsets.items()}

    def end(self, transactional_id: str, producer: ProducerIdentity, *, commit: bool) -> bool:
        """Return whether a transaction is decided by it, and to be completed; else it is answered, or done at once."""
        id_ = self._known(transactional_id)
        done, other = ("Commit", "Abort") if commit else ("Abort", "Commit")
        if producer == id_.identity and not id_.is_decided:
            if id_.state != "Ongoing" and commit:
                raise Refused(InvalidTransactionState)
            if commit:
                self._check_in_time(id_)
            self._decide(id_, commit=commit)
            return True
        if producer != id_.ended or not id_.state.endswith((done, other)):
            raise self._stale(id_, producer)
        if id_.state.endswith(done):
            return id_.is_decided
        if id_.state.endswith("Abort"):
            raise Refused(TransactionAbortable if id_.aborted_from_outside else ProducerFenced)
        raise Refused(InvalidTransactionState)

    def deliver(self, transactional_id: str, partition_ids: Iterable[int] | None = None) -> None:
        """Finish all groups, and write the markers of these partitions; by default all, which completes it."""
        id_ = self.ids[transactional_id]
        transaction = id_.transaction
        if partition_ids is None:
            self._complete(id_)
        elif transaction is not None:
            for partition_id in sorted(transaction.unmarked & set(partition_ids)):
                self._mark(id_, transaction, partition_id)
            for group_id in sorted(transaction.pending):
                self._finish(transaction, group_id)

    # From outside.

    def complete_all(self) -> None:
        for id_ in self.ids.values():
            self._complete(id_)

    def abort_timed_out(self) -> set[str]:
        late = {name for name, id_ in self.ids.items() if self._is_late(id_)}
        for name in late:
            self.abort_from_outside(name)
        return late

    def abort_from_outside(self, transactional_id: str) -> bool:
        id_ = self.ids.get(transactional_id)
        if id_ is None or id_.state != "Ongoing":
            return False
        self._decide_from_outside(id_)
        self._complete(id_)
        return True

    def expire_ids(self, age_ms: int) -> set[str]:
        at_rest = {name: id_ for name, id_ in self.ids.items() if id_.state != "Ongoing" and not id_.is_decided}
        old = {name for name, id_ in at_rest.items() if id_.rested_ms <= self.now_ms - age_ms}
        for name in old:
            del self.ids[name]
        return old

    def expire_producers(self, age_ms: int) -> None:
        transactions = [id_.transaction for id_ in self.ids.values() if id_.transaction is not None]
        open_ = {(number, one.begin.producer_id) for one in transactions for number in one.unmarked}
        for key, memory in list(self.memories.items()):
            if key not in open_ and memory.last_ms <= self.now_ms - age_ms:
                del self.memories[key]

    def resolve(self, transactional_id: str, producer: ProducerIdentity) -> bool:
        """Return whether what the producer began is committed."""
        transaction = self.begun[transactional_id, producer]
        id_ = self.ids.get(transactional_id)
        if id_ is not None and id_.is_decided:
            self._complete(id_)
        elif id_ is not None and id_.transaction is not None:
            if id_.transaction is transaction:
                self._fence(id_)
        elif id_ is not None and id_.identity == producer:
            id_.identity = _next(producer)
            id_.state, id_.last, id_.ended, id_.rested_ms = "Empty", None, None, self.now_ms
        return transaction is not None and bool(transaction.decision)

    # The steps that these are made of.

    def _known(self, transactional_id: str) -> Id:
        if transactional_id not in self.ids:
            raise Refused(InvalidProducerIdMapping)
        return self.ids[transactional_id]

    def _stale(self, id_: Id, producer: ProducerIdentity) -> Refused:
        if producer.producer_id == id_.identity.producer_id:
            return Refused(ProducerFenced)
        return Refused(ProducerFenced, InvalidProducerIdMapping)

    def _writable(self, transactional_id: str, producer: ProducerIdentity) -> Transaction | None:
        id_ = self._known(transactional_id)
        if producer == id_.ended and id_.aborted_from_outside:
            raise Refused(TransactionAbortable)
        if producer != id_.identity:
            raise self._stale(id_, producer)
        if id_.is_decided:
            raise Refused(ConcurrentTransactions)
        if id_.transaction is not None and id_.transaction.begin != producer:
            raise Refused(InvalidTransactionState)
        self._check_in_time(id_)
        return id_.transaction

    def _is_late(self, id_: Id) -> bool:
        if id_.state != "Ongoing" or id_.transaction is None or id_.timeout_ms is None:
            return False
        return id_.transaction.start_ms + id_.timeout_ms < self.now_ms

    def _check_in_time(self, id_: Id) -> None:
        if self._is_late(id_):
            self._decide_from_outside(id_)
            raise Late(TransactionAbortable)

    def _begin(self, transactional_id: str, transaction: Transaction | None) -> Transaction:
        id_ = self.ids[transactional_id]
        if id_.transaction is None:
            id_.transaction = Transaction(id_.identity, self.now_ms)
            id_.state, id_.ended, id_.aborted_from_outside = "Ongoing", None, False
            self.begun[transactional_id, id_.identity] = id_.transaction
        return id_.transaction

    def _check(self, batch: Batch, *, is_transactional: bool) -> None:
        memory = self.memories.get((batch.partition_id, batch.producer.producer_id))
        if self._repeated(batch) is not None:
            return
        if memory is None:
            if is_transactional and batch.first_sequence != 0:
                raise Refused(OutOfOrderSequence)
            return
        if batch.producer.epoch < memory.epoch:
            raise Refused(InvalidProducerEpoch)
        follows = memory.recent[-1][1] + 1 if batch.producer.epoch == memory.epoch and memory.recent else 0
        if batch.first_sequence != follows:
            raise Refused(OutOfOrderSequence)

    def _repeated(self, batch: Batch) -> int | None:
        memory = self.memories.get((batch.partition_id, batch.producer.producer_id))
        if memory is None or memory.epoch != batch.producer.epoch:
            return None
        same = [offset for first, last, offset in memory.recent[-5:] if (first, last) == batch.sequences]
        return same[0] if same else None

    def _place(self, batch: Batch, transaction: Transaction | None) -> tuple[int, bool]:
        repeated = self._repeated(batch)
        if repeated is not None:
            return repeated, True
        entries = self.partitions[batch.partition_id]
        offset = len(entries)
        entries += [Entry(value, transaction) for value in batch.values]
        key = (batch.partition_id, batch.producer.producer_id)
        memory = self.memories.get(key)
        if memory is None or memory.epoch != batch.producer.epoch:
            memory = self.memories[key] = Memory(batch.producer.epoch)
        memory.recent.append((*batch.sequences, offset))
        memory.last_ms = self.now_ms
        if transaction is not None and batch.partition_id not in transaction.first_offsets:
            transaction.first_offsets[batch.partition_id] = offset
            transaction.unmarked.add(batch.partition_id)
        return offset, False

    def _decide(self, id_: Id, *, commit: bool) -> None:
        if id_.transaction is not None:
            id_.transaction.decision = commit
        id_.ended = id_.last = id_.identity
        id_.aborted_from_outside = False
        id_.gets_new_producer_id = id_.identity.epoch >= LAST_EPOCH
        id_.identity = replace(id_.identity, epoch=id_.identity.epoch + 1)
        id_.state = "PrepareCommit" if commit else "PrepareAbort"

    def _decide_from_outside(self, id_: Id) -> None:
        self._decide(id_, commit=False)
        id_.last, id_.aborted_from_outside = None, True

    def _fence(self, id_: Id) -> None:
        self._decide(id_, commit=False)
        id_.last = None
        self._complete(id_)

    def _complete(self, id_: Id) -> None:
        if not id_.is_decided:
            return
        transaction = id_.transaction
        if transaction is not None:
            for partition_id in sorted(transaction.unmarked):
                self._mark(id_, transaction, partition_id)
            for group_id in sorted(transaction.pending):
                self._finish(transaction, group_id)
        if id_.gets_new_producer_id:
            id_.identity, id_.gets_new_producer_id = ProducerIdentity(FRESH, 0), False
        id_.state = id_.state.replace("Prepare", "Complete")
        id_.transaction, id_.rested_ms = None, self.now_ms

    def _mark(self, id_: Id, transaction: Transaction, partition_id: int) -> None:
        self.partitions[partition_id].append(Entry(None))
        transaction.unmarked.discard(partition_id)
        # Those who take over a prepared transaction have any epoch, markers have no higher one.
        epoch = min(id_.identity.epoch, FENCING_EPOCH)
        self.memories[partition_id, transaction.begin.producer_id] = Memory(epoch, last_ms=self.now_ms)

    def _finish(self, transaction: Transaction, group_id: str) -> None:
        committed = self.groups[group_id].committed
        for partition_id, (number, offset) in transaction.pending.pop(group_id).items():
            if transaction.decision and committed.get(partition_id, (0, 0))[0] < number:
                committed[partition_id] = (number, offset)


def _next(identity: ProducerIdentity) -> ProducerIdentity:
    if identity.epoch >= LAST_EPOCH:
        return ProducerIdentity(FRESH, 0)
    return replace(identity, epoch=identity.epoch + 1)
