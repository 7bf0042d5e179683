"""The transaction coordinator as its clients call it: each request is one database transaction.

There is no process behind it. Every client holds this code, and the lock of the coordinator's row makes requests of
one transactional id follow each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from sqlalchemy import Connection

from txnstore.db.cluster.catalogue import read_deleted, read_store_settings
from txnstore.db.cluster.cluster import Cluster, several
from txnstore.db.cluster.locality import Locality
from txnstore.db.cluster.membership import check_lives_here
from txnstore.db.identity import check_not_standby
from txnstore.db.store import Store
from txnstore.errors import (
    ConcurrentTransactions,
    InvalidRequest,
    OutcomeUnknown,
    ProducerFenced,
    StoreReadOnly,
    StoreUnavailable,
    TxnStoreError,
)
from txnstore.log.append import Append, Appended, find_appended
from txnstore.log.partition_rows import allocate_producer_id, new_producer
from txnstore.model import NAME_BYTES_MAX, ClientProcess, ProducerIdentity, is_storable_text
from txnstore.transactions import initialization, rows
from txnstore.transactions.delivery import PendingDelivery
from txnstore.transactions.distributed import RemoteTransaction
from txnstore.transactions.initialization import InitAction, InitRequest
from txnstore.transactions.outcome import Ended, recall_commit
from txnstore.transactions.protocol import TransactionMetadata, TransactionState
from txnstore.transactions.transaction import (
    NOTHING_IN_STORE,
    InStore,
    LockedTransaction,
    SentOffsets,
    complete_delivered,
    write_in_time,
)
from txnstore.transactions.whole import WholeRequest, whole_request
from txnstore.transactions.whole_group import WholeCommit, commit_group
from txnstore.transactions.whole_statements import UnusualError, write_whole

#: How often a start waits for the last transaction of its id; each time somebody else has begun another one.
INIT_TRIES: Final = 5
#: A longer name fits no index of PostgreSQL.
TRANSACTIONAL_ID_LENGTH_MAX = 1000


@dataclass(frozen=True, slots=True)
class Initialized:
    """Who a producer is from now on."""

    identity: ProducerIdentity
    ongoing: ProducerIdentity | None = None
    """The transaction that was prepared before and is still open, if it was to be kept (KIP-939)."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A start that has to wait until the last transaction is complete in other databases."""

    left: PendingDelivery
    is_own_abort: bool
    """Whether it is this start that has aborted the transaction."""


class TransactionCoordinator:
    """The coordinator of the transactional ids that one store coordinates; safe to share between threads.

    `retry_timeout_ms` of each request is how long it is tried while the database is busy or away (`Store.write`).
    """

    def __init__(self, store: Store, cluster: Cluster | None = None, transaction_group: str | None = None) -> None:
        """Coordinate in `store`, which belongs to `cluster`; None: it is by itself.

        Those that commit in the same `transaction_group` do so one after the other.
        """
        self.store = store
        self.cluster = cluster
        self.transaction_group = transaction_group

    def init_producer_id(
        self,
        transactional_id: str | None,
        timeout_ms: int = 60_000,
        *,
        expected: ProducerIdentity | None = None,
        enable_two_phase_commit: bool = False,
        keep_prepared: bool = False,
        client: ClientProcess | None = None,
        retry_timeout_ms: int | None = None,
    ) -> Initialized:
        """Return who the producer is; nothing of an older epoch of its transactional id takes effect any more.

        An open transaction is aborted, a decided one completed.  Without a transactional id the answer is a new
        producer id with epoch 0; so it is over several databases, unless the producer says whom it `expected` to be or
        an open transaction is kept.  `timeout_ms` is how long a transaction may stay open.  With `expected` a producer
        asks for its next epoch (KIP-360); the answer is the same if it asks again.  `client` is told to who asks what
        holds up readers.

        Raises:
            InvalidRequest, InvalidTransactionTimeout, TransactionalIdAuthorizationFailed: see
                `initialization.check_init_request`; or there is a transaction group, and several databases.
            ProducerFenced: the producer is not `expected` any more.
        """
        self._check_group()
        if transactional_id is None:
            return Initialized(self.store.write(new_producer, retry_timeout_ms=retry_timeout_ms))
        check_transactional_id(transactional_id)

        def work(expected: ProducerIdentity | None, connection: Connection) -> Initialized | Interrupted:
            settings = read_store_settings(connection)
            return try_to_initialize(
                connection,
                InitRequest(
                    transactional_id,
                    timeout_ms,
                    settings["transaction.max.timeout.ms"],
                    expected,
                    enable_two_phase_commit=enable_two_phase_commit,
                    keep_prepared=keep_prepared,
                    two_phase_commit_allowed=settings["transaction.two.phase.commit.enable"],
                    client=client,
                    has_several_databases=several(self.cluster) is not None,
                ),
                Locality.of(self.store, self.cluster),
            )

        for _ in range(INIT_TRIES):
            found = self.store.write(partial(work, expected), wakes_readers=True, retry_timeout_ms=retry_timeout_ms)
            if isinstance(found, Initialized):
                return found
            self._complete_before_init(found.left)
            if found.is_own_abort and expected is not None:
                expected = found.left.decided.next_identity
        raise ConcurrentTransactions

    def abort_as_shown(self, shown: TransactionMetadata, timeout_ms: int) -> bool:
        """Abort the running transaction that somebody was shown, and fence its producer; False: it has gone on since.

        Then nothing was changed: neither it, nor what the id has begun after it.

        Raises:
            ConcurrentTransactions: it is aborted, but not all of its markers are written.
            TxnStoreError: the database cannot be reached or refuses.
        """
        is_aborted = False

        def work(connection: Connection) -> Initialized | Interrupted | None:
            locality = Locality.of(self.store, self.cluster)
            # The lock is the one that a commit takes: whichever comes first is seen by the other.
            row = LockedTransaction.lock(connection, shown.transactional_id, locality).row
            if row is None or row.transaction_number != shown.transaction_number:
                return None
            if is_aborted:
                if row.state not in {TransactionState.PREPARE_ABORT, TransactionState.COMPLETE_ABORT}:
                    return None
            elif (row.identity, row.state) != (shown.identity, shown.state):
                return None
            timeout_max_ms = read_store_settings(connection)["transaction.max.timeout.ms"]
            has_several = several(self.cluster) is not None
            request = InitRequest(shown.transactional_id, timeout_ms, timeout_max_ms, has_several_databases=has_several)
            return try_to_initialize(connection, request, locality)

        for _ in range(INIT_TRIES):
            found = self.store.write(work, wakes_readers=True)
            if not isinstance(found, Interrupted):
                # Once it is aborted, whoever has come since has fenced its producer as well.
                return found is not None or is_aborted
            is_aborted = True
            self._complete_before_init(found.left)
        raise ConcurrentTransactions

    def append(
        self,
        transactional_id: str,
        producer: ProducerIdentity,
        appends: Sequence[Append],
        *,
        added: set[int] | None = None,
        retry_timeout_ms: int | None = None,
    ) -> list[Appended]:
        """Append batches to the producer's transaction, which begins with the first of them.

        Safe to repeat after `OutcomeUnknown`: a batch that is there already is recognised.  `added` as in
        `add_partitions`.

        Raises:
            InvalidRequest: see `check_transactional_id`, or a batch is not one of this producer's transaction, or the
                batches go to several databases: they are appended by a call for each.
            TxnStoreError: see `protocol.add_to_transaction`, `log.append.append` and `Cluster.own`.
        """
        check_transactional_id(transactional_id)
        cluster = several(self.cluster)
        if cluster is not None:
            leaders = cluster.by_leader(appends)
            if len(leaders) > 1:
                raise InvalidRequest("the batches of one append live in one database: make a call for each")
            if appends and self.store.database_id not in leaders:
                remote = RemoteTransaction(self.store, cluster, transactional_id, producer, retry_timeout_ms)
                return remote.append(*leaders.popitem(), added)

        def work(connection: Connection) -> list[Appended]:
            transaction = LockedTransaction.lock(connection, transactional_id)
            transaction.append(producer, appends)
            return transaction.save("Produce")

        return write_in_time(
            self.store, self.cluster, transactional_id, work, wakes_readers=True, retry_timeout_ms=retry_timeout_ms
        )

    def add_partitions(
        self,
        transactional_id: str,
        producer: ProducerIdentity,
        partition_ids: Iterable[int],
        *,
        added: set[int] | None = None,
        retry_timeout_ms: int | None = None,
    ) -> None:
        """Let partitions that live in other databases take part in the producer's transaction (AddPartitionsToTxn).

        It must be durable before anything is appended there: `append` does it by itself, this does it for several in
        one database transaction.  `added` holds what the caller knows to be in this very transaction, and gets what is
        new.  Safe to repeat; nothing happens to partitions of the coordinator's own database.

        Raises:
            UnknownTopicOrPartition: there is no such partition.
            TxnStoreError: see `protocol.add_to_transaction`.
        """
        check_transactional_id(transactional_id)
        cluster = several(self.cluster)
        if cluster is not None:
            remote = RemoteTransaction(self.store, cluster, transactional_id, producer, retry_timeout_ms)
            remote.add_partitions(partition_ids, added)

    def check_in_time(
        self, transactional_id: str, producer: ProducerIdentity, *, retry_timeout_ms: int | None = None
    ) -> None:
        """Return if more may be written to the producer's open transaction; one whose time is up is aborted.

        For partitions of other databases that take part already: nobody else asks the coordinator about those.

        Raises:
            TxnStoreError: see `protocol.add_to_transaction`.
        """
        check_transactional_id(transactional_id)

        def work(connection: Connection) -> None:
            LockedTransaction.lock(connection, transactional_id).begin(producer)

        write_in_time(self.store, self.cluster, transactional_id, work, retry_timeout_ms=retry_timeout_ms)

    def send_offsets(
        self,
        transactional_id: str,
        producer: ProducerIdentity,
        sent: SentOffsets,
        *,
        has_begun: bool = True,
        is_lasting: bool = True,
        retry_timeout_ms: int | None = None,
    ) -> None:
        """Let the producer's transaction hold consumed offsets of a group, which begins it if nothing else did.

        Safe to repeat after `OutcomeUnknown`.  `has_begun`: something of it is in the store already, or may be.  What
        is not `is_lasting` may be gone after a loss of power that has ended the producer as well.

        Raises:
            InvalidRequest: see `check_transactional_id`.
            TxnStoreError: see `protocol.add_to_transaction` and `groups.offsets.add_pending_offsets`.
        """
        check_transactional_id(transactional_id)
        cluster = several(self.cluster)
        if cluster is not None and cluster.coordinator_id_of(sent.committer.group_id) != self.store.database_id:
            remote = RemoteTransaction(self.store, cluster, transactional_id, producer, retry_timeout_ms)
            remote.add((), [sent.committer.group_id])
            remote.send_offsets(sent)
            return

        if not has_begun and self._send_at_once(
            transactional_id, producer, sent, retry_timeout_ms, is_lasting=is_lasting
        ):
            return

        def work(connection: Connection) -> None:
            transaction = LockedTransaction.lock(connection, transactional_id)
            transaction.send_offsets(producer, sent)
            transaction.save("TxnOffsetCommit")

        write_in_time(self.store, self.cluster, transactional_id, work, retry_timeout_ms=retry_timeout_ms)

    def end_transaction(
        self,
        transactional_id: str,
        producer: ProducerIdentity,
        *,
        commit: bool,
        appends: Sequence[Append] = (),
        offsets: Sequence[SentOffsets] = (),
        writers: Collection[int] | None = None,
        is_repeated: bool = False,
        has_begun: bool = False,
        open_group_id: str | None = None,
        in_store: InStore = NOTHING_IN_STORE,
        retry_timeout_ms: int | None = None,
    ) -> Ended:
        """Commit or abort the producer's transaction; when it returns, every reader sees that it is over.

        `appends` and `offsets` that were not sent yet go into the same database transaction, or first into the other
        databases that they belong to.  With a commit, the records of the further writers that `writers` names count, by
        default those of all that have reported; the records of all others are aborted by the same decision.

        The same call may be repeated after `OutcomeUnknown`: it recognises a transaction that it has ended, and whose
        answer was lost.  With `is_repeated`, a commit does so also if a newer producer has come since: it is the next
        call that is refused then.  `has_begun` spares the question whether this is the whole transaction;
        with `open_group_id` all that has begun is that it holds offsets of this group, as far as the caller knows.
        Over several databases nothing is committed unless all that the caller knows to be `in_store` is a part of it.

        Raises:
            InvalidRequest: see `check_transactional_id`, or records, offsets or writers come with an abort, or a
                writer is named that is not in the transaction or has not reported.
            OutcomeForgotten: a newer producer has come since, and the journal does not go back to the lost answer.
            OutcomeUnknown: also if the transaction is decided, but its markers could not all be delivered.
            ProducerFenced: also if the coordinator has lost what is `in_store`.
            TxnStoreError: see `protocol.end_transaction`, `protocol.add_to_transaction` and `log.append.append`.
        """
        check_transactional_id(transactional_id)
        if not commit and (appends or offsets or writers):
            raise InvalidRequest("an abort takes no records, offsets or writers")
        if commit:
            self._check_group()
        request = _EndRequest(
            transactional_id,
            producer,
            commit,
            appends,
            offsets,
            writers,
            is_repeated,
            has_begun,
            open_group_id,
            self.transaction_group if commit else None,
            in_store if commit and several(self.cluster) is not None else NOTHING_IN_STORE,
        )
        try:
            return self._end(request, retry_timeout_ms)
        except TxnStoreError as error:
            if not (commit and is_repeated) or error.retriable or error.outcome_unknown:
                raise
            # It may have been decided by the earlier try, whose answer was lost.
            ended = recall_commit(
                self.store,
                transactional_id=transactional_id,
                producer=producer,
                appends=appends,
                is_alone=not (appends or offsets or writers),
                retry_timeout_ms=retry_timeout_ms,
            )
            if ended is None:
                raise
            return ended

    def commit_several(
        self, transactional_id: str, commits: Sequence[WholeCommit], *, retry_timeout_ms: int | None = None
    ) -> list[Ended] | None:
        """Commit transactions of one producer, each wholly in the client, in this order: all of them, or none.

        Each begins where the one before has ended, with its next epoch.  None: nothing was changed, for one of them
        is not a usual one; `end_transaction` commits each by itself, or says why not.

        Raises:
            InvalidRequest: see `check_transactional_id`.
            OutcomeUnknown: all may have been committed, or none; `end_transaction(is_repeated=True)` of each knows.
            TxnStoreError: the database is busy or away; nothing was changed.
        """
        check_transactional_id(transactional_id)
        if not self.store.commits_whole or several(self.cluster) is not None or self.transaction_group is not None:
            return None
        return commit_group(self.store, transactional_id, commits, retry_timeout_ms=retry_timeout_ms)

    def _end(self, request: _EndRequest, retry_timeout_ms: int | None) -> Ended:
        cluster = several(self.cluster)
        if cluster is None or not (request.appends or request.offsets):
            return self._end_here(request, retry_timeout_ms)
        transactional_id, producer = request.transactional_id, request.producer
        remote = RemoteTransaction(self.store, cluster, transactional_id, producer, retry_timeout_ms)
        sent_elsewhere, appends, offsets = remote.send_rest(request.appends, request.offsets)
        ended = self._end_here(replace(request, appends=appends, offsets=offsets), retry_timeout_ms)
        if sent_elsewhere is None:
            # By their markers, which may have been delivered only just now.
            sent_elsewhere = remote.find(request.appends)
        return replace(ended, appended=[*sent_elsewhere, *ended.appended])

    def _end_here(self, request: _EndRequest, retry_timeout_ms: int | None) -> Ended:
        at_once = self._end_at_once(request, retry_timeout_ms)
        if at_once is not None:
            return at_once
        found = write_in_time(
            self.store,
            self.cluster,
            request.transactional_id,
            lambda connection: _end(request, Locality.of(self.store, self.cluster), connection),
            wakes_readers=True,
            retry_timeout_ms=retry_timeout_ms,
        )
        if isinstance(found, InStore):
            return self._end_here(self._without_deleted(request, found, retry_timeout_ms), retry_timeout_ms)
        ended, left = found
        if left is not None:
            self._complete(left)
        # Not who the producer is by now: a newer one may have come since.
        return ended

    def _without_deleted(self, request: _EndRequest, missing: InStore, retry_timeout_ms: int | None) -> _EndRequest:
        """Return a request that was refused because parts are missing without those of topics that were deleted."""
        assert self.cluster is not None, "what is in the store is looked at where there are several databases"
        controller = self.cluster.controller

        def find(connection: Connection) -> tuple[set[int], set[int]]:
            deleted = read_deleted(connection, missing.partition_ids)
            if lost := set(missing.partition_ids) - deleted:
                check_not_standby(controller, connection)
            return deleted, lost

        try:
            deleted, lost = controller.read(find, retry_timeout_ms=retry_timeout_ms)
        except StoreReadOnly as error:
            # Nothing is wrong with the producer: once the primary answers, or is heard of, the same call tells.
            raise StoreUnavailable(f"{error}; this call committed nothing") from error
        if lost or missing.group_ids:
            raise ProducerFenced(
                f"the coordinator of {request.transactional_id[:80]!r} does not know that this transaction has written"
                f" to {len(lost)} partitions and {len(missing.group_ids)} groups: was an older state restored, or did a"
                " standby take over without the last commits? This call committed nothing. Start the producer again;"
                " `txnstore transactions list-open` shows what stays open, and what ends it"
            )
        in_store = InStore(set(request.in_store.partition_ids) - deleted, request.in_store.group_ids)
        return replace(request, in_store=in_store)

    def _end_at_once(self, request: _EndRequest, retry_timeout_ms: int | None) -> Ended | None:
        """Commit at once what is wholly in the client; None: nothing was changed, go the general way."""
        if not (self.store.commits_whole and request.commit) or several(self.cluster) is not None:
            return None
        if request.is_repeated or (request.has_begun and request.open_group_id is None):
            return None
        if request.transaction_group is not None:
            # A transaction that waits for others of the group must not hold partitions meanwhile.
            return None
        whole = whole_request(
            request.transactional_id,
            request.producer,
            request.appends,
            request.offsets,
            request.writers,
            open_group_id=request.open_group_id,
        )
        if whole is None:
            return None
        places = self._write_whole(whole, retry_timeout_ms)
        return None if places is None else whole.ended(places)

    def _send_at_once(
        self,
        transactional_id: str,
        producer: ProducerIdentity,
        sent: SentOffsets,
        retry_timeout_ms: int | None,
        *,
        is_lasting: bool,
    ) -> bool:
        """Begin a transaction with these offsets at once; False: nothing was changed, go the general way."""
        if not self.store.commits_whole or several(self.cluster) is not None:
            return False
        whole = WholeRequest(transactional_id, producer, (), [sent], stays_open=True)
        return whole.is_usual() and self._write_whole(whole, retry_timeout_ms, is_lasting=is_lasting) is not None

    def _write_whole(
        self, whole: WholeRequest, retry_timeout_ms: int | None, *, is_lasting: bool = True
    ) -> list[int] | None:
        """Write it by the database's function, or by statements; None: nothing was changed."""
        if self.store.has_commit_function:
            return self.store.commit_whole(whole.transaction(), retry_timeout_ms=retry_timeout_ms)
        try:
            return self.store.write(
                lambda connection: write_whole(connection, whole),
                wakes_readers=True,
                retry_timeout_ms=retry_timeout_ms,
                limits=None if is_lasting else replace(self.store.limits, waits_for_disk=False),
            )
        except UnusualError:
            return None

    def _check_group(self) -> None:
        if self.transaction_group is not None and several(self.cluster) is not None:
            # Each database has an order of commits of its own.
            raise InvalidRequest("a transaction group (txnstore.transaction.group) needs a store of one database")

    def _complete_before_init(self, left: PendingDelivery) -> None:
        assert self.cluster is not None, "nothing can be left to other databases where there are no others"
        try:
            complete_delivered(self.store, self.cluster, left)
        except TxnStoreError as error:
            raise ConcurrentTransactions(
                f"the last transaction of {left.decided.transactional_id[:80]!r} is decided, but not all of its markers"
                f" are written ({error}); try again"
            ) from error

    def _complete(self, left: PendingDelivery) -> None:
        assert self.cluster is not None, "nothing is left to other databases where there are no others"
        try:
            complete_delivered(self.store, self.cluster, left)
        except TxnStoreError as error:
            # The decision is durable: "nothing was changed" would not be true any more.
            raise OutcomeUnknown(
                f"the transaction of {left.decided.transactional_id[:80]!r} is decided, but not all of its markers are"
                f" written ({error}); repeat the call, or leave the rest to recovery"
            ) from error


def check_transactional_id(transactional_id: object) -> None:
    """Refuse what is not a transactional id.

    Raises:
        InvalidRequest: it is not text, is empty or too long, or has characters that no database keeps.
    """
    if not isinstance(transactional_id, str) or not transactional_id:
        raise InvalidRequest("a transactional id is text and not empty")
    if len(transactional_id) > TRANSACTIONAL_ID_LENGTH_MAX:
        raise InvalidRequest(
            f"a transactional id has at most {TRANSACTIONAL_ID_LENGTH_MAX} characters, not {len(transactional_id)}"
        )
    if not is_storable_text(transactional_id):
        raise InvalidRequest("a transactional id holds a NUL or half of a surrogate pair, which no database stores")
    if (size := len(transactional_id.encode())) > NAME_BYTES_MAX:
        raise InvalidRequest(f"a transactional id has at most {NAME_BYTES_MAX} bytes of UTF-8, not {size}")


@dataclass(frozen=True, slots=True)
class _EndRequest:
    transactional_id: str
    producer: ProducerIdentity
    commit: bool
    appends: Sequence[Append]
    offsets: Sequence[SentOffsets]
    writers: Collection[int] | None
    is_repeated: bool
    """Whether it may have been carried out already."""

    has_begun: bool
    """Whether something of the transaction is known to be in the store, or may be."""

    open_group_id: str | None
    """The one group whose offsets it holds, if the caller knows of nothing else."""

    transaction_group: str | None
    in_store: InStore


def _end(
    request: _EndRequest, locality: Locality | None, connection: Connection
) -> tuple[Ended, PendingDelivery | None] | InStore:
    """End the transaction; if it lacks what the producer has written, say what, and change nothing."""
    transaction = LockedTransaction.lock(connection, request.transactional_id, locality)
    row = transaction.row
    if row is not None and row.is_repetition(request.producer):
        # The answer was lost: the rest was sent already, and is not sent again.
        try:
            transaction.end(request.producer, commit=request.commit)
        except ConcurrentTransactions:
            if transaction.pending_delivery is None:
                raise
            # Decided, and waiting for other databases: there is nothing to write here.
        else:
            transaction.save("EndTxn")
        ended = Ended(transaction.known.next_identity, find_appended(connection, request.appends))
        return ended, transaction.pending_delivery
    if request.appends:
        transaction.append(request.producer, request.appends)
    for sent in request.offsets:
        transaction.send_offsets(request.producer, sent)
    transaction.follow(request.transaction_group)
    transaction.end(request.producer, commit=request.commit, writers=request.writers)
    if missing := transaction.lacks(request.in_store, request.producer):
        return missing
    appended = transaction.save("EndTxn")
    return Ended(transaction.known.next_identity, appended), transaction.pending_delivery


def lock_or_insert(connection: Connection, request: InitRequest, locality: Locality | None = None) -> LockedTransaction:
    """Lock the row of a transactional id, which is made if nobody has used the id.

    Raises:
        NotCoordinator: it is new, and another database of the cluster coordinates it.
    """
    transaction = LockedTransaction.lock(connection, request.transactional_id, locality)
    if transaction.row is None:
        initialization.check_init_request(request)
        producer_id = allocate_producer_id(connection)
        check_lives_here(connection, request.transactional_id, is_locked=True)
        rows.insert_row(connection, initialization.new_transactional_id(request, producer_id, transaction.now_ms))
        transaction = LockedTransaction.lock(connection, request.transactional_id, locality)
    return transaction


def initialize(connection: Connection, request: InitRequest) -> Initialized:
    """Make the producer a new one within the database transaction that is open: see `init_producer_id`.

    For transactions that have everything in this database.
    """
    found = try_to_initialize(connection, request, None)
    assert isinstance(found, Initialized), "without a locality, nothing is left to other databases"
    return found


def try_to_initialize(
    connection: Connection, request: InitRequest, locality: Locality | None
) -> Initialized | Interrupted:
    """Do the same, as far as this database can: an open transaction that has a part in others is aborted first."""
    initialization.check_init_request(request)
    transaction = lock_or_insert(connection, request, locality)
    try:
        action, row = _decide_init(transaction, request)
    except ConcurrentTransactions:
        transaction.finish()
        if transaction.pending_delivery is not None:
            return Interrupted(transaction.pending_delivery, is_own_abort=False)
        action, row = _decide_init(transaction, request)
    ongoing = None
    if action is InitAction.ABORT_FIRST:
        before = transaction.known
        transaction.step(row)
        transaction.finish()
        if transaction.pending_delivery is not None:
            transaction.save("InitProducerId")
            return Interrupted(transaction.pending_delivery, is_own_abort=True)
        transaction.step(
            initialization.init_after_abort(before, transaction.known, request, allocate=transaction.allocate)
        )
    else:
        transaction.step(row)
        if action is InitAction.KEEP_ONGOING:
            ongoing = row.begin_identity
    transaction.introduce(request.client)
    transaction.save("InitProducerId")
    return Initialized(transaction.known.identity, ongoing)


def _decide_init(transaction: LockedTransaction, request: InitRequest) -> tuple[InitAction, TransactionMetadata]:
    return initialization.init_producer_id(
        transaction.known, request, now_ms=transaction.now_ms, allocate=transaction.allocate
    )
