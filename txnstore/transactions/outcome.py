"""The answer to "did my commit land?", and the commit whose answer nobody else can repeat.

Reading alone cannot tell how a transaction ended: a COMMIT that seemed to fail may still become durable, on SQLite even
after the next crash. So the epoch is raised first, durably. After that nothing of the old one can happen any more, and
what the coordinator's rows say is final.

    store.write(...)                      the coordinator's own way: see `coordinator`
    end_within(connection, request)       here: the owner of `connection` commits, and the application's rows with it

The answer to such a COMMIT may be lost, and nobody can repeat it: its other rows were not ours.  So `resolve_end` asks
what became of it, and sees to it that the answer holds: what is not committed then never will be.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Connection, and_, bindparam, exists, func, not_, or_, select, union_all

from txnstore.db.cluster.cluster import Cluster
from txnstore.db.cluster.locality import Locality
from txnstore.db.schema import transaction_log, transactions
from txnstore.db.store import Store
from txnstore.errors import (
    ConcurrentTransactions,
    InvalidProducerIdMapping,
    InvalidTransactionState,
    OutcomeForgotten,
    OutcomeUnknown,
    ProducerFenced,
    StoreDamaged,
    StoreReadOnly,
    TransactionalIdNotFound,
)
from txnstore.log.append import Append, Appended, find_appended
from txnstore.log.partition_rows import may_be_given_out
from txnstore.log.topics import names_of_partitions
from txnstore.model import ProducerIdentity
from txnstore.transactions import protocol, rows
from txnstore.transactions.protocol import (
    DECIDED,
    FenceReason,
    TransactionMetadata,
    TransactionState,
)
from txnstore.transactions.transaction import LockedTransaction, SentOffsets, complete_if_possible

_ONGOING: Final = TransactionState.ONGOING
_OF_PRODUCER: Final = and_(
    transaction_log.c.producer_id == bindparam("of_producer_id"),
    transaction_log.c.transactional_id == bindparam("of_transactional_id"),
)
_OF_EPOCH: Final = transaction_log.c.producer_epoch == bindparam("of_epoch")
_OF_NEXT_EPOCH: Final = transaction_log.c.producer_epoch == bindparam("of_epoch") + 1
_IS_ONGOING: Final = transaction_log.c.state == int(TransactionState.ONGOING)
# An entry for several changes has the epoch after the last of them.
_BEGAN: Final = (
    select(transaction_log.c.transaction_number)
    .where(_OF_PRODUCER)
    .where(transaction_log.c.producer_epoch.between(bindparam("of_epoch"), bindparam("of_epoch") + 1))
    .where(transaction_log.c.first_state == int(TransactionState.ONGOING))
    .where(or_(and_(_IS_ONGOING, _OF_EPOCH), and_(not_(_IS_ONGOING), _OF_NEXT_EPOCH)))
    .order_by(transaction_log.c.entry_id)
    .limit(1)
)
# An identity is given out before it begins anything, and the journal is trimmed from its old end: while it is here,
# what it began would be as well.
_GIVEN_OUT: Final = select(exists().where(_OF_PRODUCER, _OF_EPOCH))
# A decision has the epoch after that of the producer who asked for it, and a commit is asked for by nobody else.
_OWN_DECISION: Final = (
    select(transaction_log.c.state)
    .where(_OF_PRODUCER, _OF_NEXT_EPOCH, rows.HOLDS_DECISION)
    .order_by(transaction_log.c.entry_id)
    .limit(1)
)
_DECISION: Final = (
    select(transaction_log.c.state)
    .where(_OF_PRODUCER, transaction_log.c.transaction_number == bindparam("of_number"), rows.HOLDS_DECISION)
    .order_by(transaction_log.c.entry_id)
    .limit(1)
)
# There is one at most: producer ids are never given out twice. The journal, which knows of former ones, is asked in any
# case, and for all epochs, by its index: a role with limits may have made up what the rows, and some entries, say.
_OWNERS: Final = union_all(
    select(transactions.c.transactional_id).where(transactions.c.producer_id == bindparam("of_producer_id")),
    select(transactions.c.transactional_id).where(
        transactions.c.previous_producer_id == bindparam("of_producer_id"),
        # For the partial index.
        transactions.c.previous_producer_id >= 0,
    ),
    *(
        select(of_some(transaction_log.c.transactional_id)).where(
            transaction_log.c.producer_id == bindparam("of_producer_id")
        )
        for of_some in (func.min, func.max)
    ),
)


class Outcome(enum.Enum):
    """How a transaction ended, for good, or that it has not."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    OPEN = "open"
    """Nothing is decided: it may still go either way."""


#: By the state after an entry that holds the decision.
_OUTCOMES: Final = {
    TransactionState.PREPARE_COMMIT: Outcome.COMMITTED,
    TransactionState.COMPLETE_COMMIT: Outcome.COMMITTED,
    TransactionState.PREPARE_ABORT: Outcome.ABORTED,
    TransactionState.COMPLETE_ABORT: Outcome.ABORTED,
}


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer to an EndTxn that brought the last records along."""

    identity: ProducerIdentity
    """Who the producer is for its next transaction."""

    appended: Sequence[Appended] = field(default=())


def read_outcome(connection: Connection, producer: ProducerIdentity) -> Outcome:
    """Return how the transaction that `producer` began has ended, or that it has not; changes nothing.

    For a caller that has "producer id:epoch" left and nothing else.  OPEN promises nothing: the next moment may decide
    it.

    Raises:
        TransactionalIdNotFound: nothing is remembered of such a producer.
    """
    found = owner_of(connection, producer)
    row = rows.read_row(connection, found).row
    if row is not None and (row.identity == producer or (row.state is _ONGOING and row.begin_identity == producer)):
        return Outcome.OPEN
    outcome = remembered_outcome(connection, found, producer)
    if outcome is None:
        raise _not_remembered(producer, found)
    return outcome


def owner_of(connection: Connection, producer: ProducerIdentity) -> str:
    """Return the transactional id that the producer has, or had.

    Raises:
        TransactionalIdNotFound: nothing is remembered of such a producer.
        StoreDamaged: several transactional ids say that they have it.
    """
    found = only_owner(_owners(connection, producer.producer_id), producer.producer_id)
    if found is None:
        raise _not_remembered(producer, None)
    return found


def _owners(connection: Connection, producer_id: int) -> set[str]:
    """Return the transactional ids that say they have the producer, or had it; of many that had it, two."""
    found = connection.execute(_OWNERS, {"of_producer_id": producer_id}).scalars()
    return {transactional_id for transactional_id in found if transactional_id is not None}


def only_owner(transactional_ids: Iterable[str], producer_id: int) -> str | None:
    """Return the transactional id that says it has a producer; None: there is none.

    Raises:
        StoreDamaged: there are several, and what is asked for by the producer might be done to the wrong one.
    """
    owners = sorted(set(transactional_ids))
    if len(owners) > 1:
        raise StoreDamaged(
            f"the transactional ids {owners[0][:80]!r} and {owners[1][:80]!r} both say that they have producer"
            f" {producer_id}, which no client writes: name the one that is meant, not its producer"
        )
    return owners[0] if owners else None


def remembered_outcome(connection: Connection, transactional_id: str, producer: ProducerIdentity) -> Outcome | None:
    """Return what the journal says of the transaction that `producer` began; None if it says nothing any more.

    One that never began counts as aborted.
    """
    of = _parameters(transactional_id, producer)
    number = connection.execute(_BEGAN, of).scalar_one_or_none()
    if number is not None:
        state = connection.execute(_DECISION, {**of, "of_number": number}).scalar_one_or_none()
        return Outcome.OPEN if state is None else _OUTCOMES[state]
    # It may have been open for longer than the journal goes back.
    state = connection.execute(_OWN_DECISION, of).scalar_one_or_none()
    if state is not None:
        return _OUTCOMES[state]
    return Outcome.ABORTED if connection.execute(_GIVEN_OUT, of).scalar_one() else None


_PUT_RIGHT: Final = 'Put that right by hand; complete_transaction("") then goes on'
_WHY_NOT: Final[dict[Outcome | None, str]] = {
    Outcome.ABORTED: f"it is aborted: what was produced with it is not in the log. {_PUT_RIGHT}",
    Outcome.OPEN: (
        "it is open: a process of this id is at work that has taken it over or begun it; start again with"
        " init_transactions(keep_prepared_txn=True) to complete it"
    ),
    None: (
        "no transaction of this id has this name as far as this store knows: is it another store, or restored from an"
        f" older state? What was produced with it may not be in the log. {_PUT_RIGHT}"
    ),
}


def check_remembered(connection: Connection, transactional_id: str, producer: ProducerIdentity) -> None:
    """Refuse what an application remembers as a transaction of the id that commits, none being open, if it did not.

    What the journal does not know any more, as far as anybody can tell, has ended long ago.

    Raises:
        InvalidTransactionState: it was aborted, is open, or is a name that this id has never given.
    """
    outcome = remembered_outcome(connection, transactional_id, producer)
    if outcome is None:
        row = rows.read_row(connection, transactional_id).row
        owners = _owners(connection, producer.producer_id)
        is_to_come = row is not None and row.producer_id == producer.producer_id and row.producer_epoch < producer.epoch
        if not (is_to_come or owners - {transactional_id}) and may_be_given_out(connection, producer.producer_id):
            return
    if outcome is not Outcome.COMMITTED:
        name = transactional_id[:80]
        raise InvalidTransactionState(
            f"{producer} is remembered as a transaction of {name!r} that commits, but {_WHY_NOT[outcome]}"
        )


def has_committed(connection: Connection, transactional_id: str, producer: ProducerIdentity) -> bool:
    """Return whether the journal says that `producer` itself has committed: with all that it sent along."""
    state = connection.execute(_OWN_DECISION, _parameters(transactional_id, producer)).scalar_one_or_none()
    return state is not None and _OUTCOMES[state] is Outcome.COMMITTED


def _parameters(transactional_id: str, producer: ProducerIdentity) -> dict[str, str | int]:
    return {
        "of_transactional_id": transactional_id,
        "of_producer_id": producer.producer_id,
        "of_epoch": producer.epoch,
    }


def _not_remembered(producer: ProducerIdentity, transactional_id: str | None) -> TransactionalIdNotFound:
    whose = "" if transactional_id is None else f" of {transactional_id[:80]!r}"
    return TransactionalIdNotFound(
        f"nothing is remembered of producer {producer}{whose}: it began no transaction, or its journal has been trimmed"
    )


def recall_commit(
    store: Store,
    *,
    transactional_id: str,
    producer: ProducerIdentity,
    appends: Sequence[Append],
    is_alone: bool,
    retry_timeout_ms: int | None,
) -> Ended | None:
    """Return the answer to a commit that stands although it is refused by now; None if it was never made.

    Whatever its producer asks for next is refused.  One that `is_alone` brings nothing along, so it stands too if a
    newer producer has committed what was prepared (KIP-939).

    Raises:
        OutcomeForgotten: the journal does not go back far enough.
        OutcomeUnknown: this is a standby, which may not have heard of the commit yet.
        TxnStoreError: the database cannot be asked.
    """

    def work(connection: Connection) -> Ended | None:
        # First: one that is promoted in between has heard of it by the time it is asked.
        is_standby = store.backend.is_standby(connection)
        try:
            ended = _recall(connection, transactional_id, producer, appends, is_alone=is_alone)
        except OutcomeForgotten:
            if not is_standby:
                raise
            ended = None
        if ended is None and is_standby:
            raise OutcomeUnknown(f"{store.url} is a standby, which may not have heard of the commit yet")
        return ended

    return store.read(work, retry_timeout_ms=retry_timeout_ms)


def _recall(
    connection: Connection,
    transactional_id: str,
    producer: ProducerIdentity,
    appends: Sequence[Append],
    *,
    is_alone: bool,
) -> Ended | None:
    if has_committed(connection, transactional_id, producer):
        # Not the same again: what it begins under the name of this transaction would be taken for committed.
        following = ProducerIdentity(producer.producer_id, producer.epoch + 1)
        return Ended(following, find_appended(connection, appends))
    row = rows.read_row(connection, transactional_id).row
    if row is not None and row.identity == producer:
        # A commit would have raised the epoch: it was refused for another reason.
        return None
    outcome = remembered_outcome(connection, transactional_id, producer)
    if outcome is None:
        raise OutcomeForgotten(
            f"the answer to a commit of {transactional_id[:80]!r} was lost, another producer has taken over since, and"
            " the journal has been trimmed: it is no longer known whether it was committed"
        )
    return Ended(producer) if is_alone and outcome is Outcome.COMMITTED else None


def resolve_outcome(
    store: Store, transactional_id: str, producer: ProducerIdentity, cluster: Cluster | None = None
) -> Outcome:
    """Return how the transaction that `producer` began ended; one that is still open is aborted by the question.

    `producer` is fenced: its own process must be gone, or have given up.  The answer does not change any more.

    Raises:
        ConcurrentTransactions: the producer's last transaction is decided, but not complete in other databases.
        TransactionalIdNotFound: nothing is remembered of such a producer.
    """
    outcome = store.write(
        lambda connection: _resolve(transactional_id, producer, Locality.of(store, cluster), connection),
        wakes_readers=True,
    )
    complete_if_possible(store, cluster, transactional_id)
    return outcome


def _resolve(
    transactional_id: str, producer: ProducerIdentity, locality: Locality | None, connection: Connection
) -> Outcome:
    transaction = LockedTransaction.lock(connection, transactional_id, locality)
    transaction.finish()
    row = transaction.row
    if row is not None:
        if row.state is _ONGOING and _may_end(row, producer):
            transaction.fence_and_abort(FenceReason.INIT, "its outcome was asked for")
        elif row.identity == producer:
            if row.state in DECIDED:
                raise ConcurrentTransactions
            # Nothing began under this epoch, or nothing durable; nothing will.
            transaction.step(protocol.fence_at_rest(row, now_ms=transaction.now_ms, allocate=transaction.allocate))
        is_fenced = transaction.row is not row
        transaction.save("outcome")
        if is_fenced:
            return Outcome.ABORTED
    outcome = remembered_outcome(connection, transactional_id, producer)
    if outcome is None:
        raise _not_remembered(producer, transactional_id)
    return outcome


def _may_end(row: TransactionMetadata, producer: ProducerIdentity) -> bool:
    """Return whether the open transaction is one that the producer began, or took over as it was prepared."""
    return producer.producer_id == row.producer_id and row.begin_epoch <= producer.epoch <= row.producer_epoch


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """A commit of a transaction, with everything that was not sent before."""

    transactional_id: str
    producer: ProducerIdentity
    appends: Sequence[Append] = ()
    offsets: Sequence[SentOffsets] = ()
    writers: Collection[int] | None = None
    transaction_group: str | None = None

    def names_what_is_there(self, store: Store) -> bool:
        """Return whether there are, by now, the transactional id and all partitions that it names."""
        partition_ids = {item.partition_id for item in self.appends}.union(*(sent.offsets for sent in self.offsets))

        def work(connection: Connection) -> bool:
            names = names_of_partitions(connection, partition_ids)
            return names.keys() == partition_ids and rows.read_row(connection, self.transactional_id).row is not None

        return store.read(work, retry_timeout_ms=0)


@dataclass(frozen=True, slots=True)
class ResolvedEnd:
    """What became of an end whose answer was lost."""

    ended: Ended
    """Who the producer is for its next transaction, and if it was committed, where the records stand."""

    is_committed: bool


def end_within(connection: Connection, request: CommitRequest) -> Ended:
    """Commit the transaction with the database transaction that is open on `connection`; its owner commits that.

    A transaction that holds nothing is committed all the same, so that there is a trace of the COMMIT.  The locks of
    the coordinator's row, of the partitions and of the groups are held until then: let nothing else follow.

    Raises:
        TxnStoreError: see `coordinator.end_transaction`; the database transaction has to be rolled back.
    """
    transaction = LockedTransaction.lock(connection, request.transactional_id)
    transaction.begin(request.producer)
    if request.appends:
        transaction.append(request.producer, request.appends)
    for sent in request.offsets:
        transaction.send_offsets(request.producer, sent)
    transaction.follow(request.transaction_group)
    transaction.end(request.producer, commit=True, writers=request.writers)
    appended = transaction.save("EndTxn")
    return Ended(transaction.known.next_identity, appended)


def resolve_end(store: Store, request: CommitRequest, *, retry_timeout_ms: int | None = None) -> ResolvedEnd:
    """Return what became of the COMMIT after `end_within`; what had not been committed by now is aborted.

    It waits for the row that the database transaction had locked, so that one is over when it is looked at.  Safe to
    repeat after `OutcomeUnknown`.

    Raises:
        TransactionAbortable: it was not committed, and somebody has aborted it from outside since.
        ProducerFenced, InvalidProducerIdMapping: it was not committed, and a newer producer has taken over.
        OutcomeForgotten: a newer producer has taken over, and nothing is remembered of this one.
    """

    def work(connection: Connection) -> ResolvedEnd:
        transaction = LockedTransaction.lock(connection, request.transactional_id)
        row = transaction.row
        is_committed = (
            row is not None
            and row.is_repetition(request.producer)
            and row.state in (TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT)
        )
        # Not committed: the epoch goes up, durably. A COMMIT that SQLite could not sync may otherwise come back after
        # a crash, and one that the server has not seen yet must find nothing to commit.
        transaction.end(request.producer, commit=is_committed)
        transaction.save("EndTxn")
        found = find_appended(connection, request.appends) if is_committed else ()
        return ResolvedEnd(Ended(transaction.known.next_identity, found), is_committed)

    try:
        return store.write(work, wakes_readers=True, retry_timeout_ms=retry_timeout_ms)
    except (ProducerFenced, InvalidProducerIdMapping, StoreReadOnly):
        # The newer producer, or the failover, may have come after the COMMIT: the journal knows.
        ended = recall_commit(
            store,
            transactional_id=request.transactional_id,
            producer=request.producer,
            appends=request.appends,
            is_alone=False,
            retry_timeout_ms=retry_timeout_ms,
        )
        if ended is None:
            raise
        return ResolvedEnd(ended, is_committed=True)
