"""The recovery of branches that were left behind: anybody with the rights ends them as was decided.

    recovered = recover_branches(store, "postgresql://bank@db2/bank")

What a database has prepared under this store's gids is looked up at the coordinator: what was decided to
commit is committed, all else is rolled back (presumed abort), but for transactions that are open and not yet too old.
Gids of others are never touched.  May be run at any time, by several at once, and again after a crash in the middle.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from sqlalchemy import Connection

from txnstore.db.cluster.cluster import Cluster, LeftOut, several
from txnstore.db.identity import check_original
from txnstore.db.postgresql.branches import (
    INSUFFICIENT_PRIVILEGE,
    UNDEFINED_OBJECT,
    can_prepare,
    connect_participant,
    database_of_prepared,
    end_prepared,
    has_ended_otherwise,
    list_prepared,
    look_at_database,
)
from txnstore.db.postgresql.connections import PostgreSQLConnection
from txnstore.db.postgresql.exchange import AnswerKind, ServerAnswer
from txnstore.db.store import Store
from txnstore.db.url import DatabaseUrl, parse_url
from txnstore.errors import (
    BranchEndedOtherwise,
    BranchUnfinished,
    InvalidRequest,
    InvalidUrl,
    PermissionDenied,
    TxnStoreError,
)
from txnstore.participants.branch_rules import CURES, Cure, Standing, gid_prefix
from txnstore.transactions import rows
from txnstore.transactions.branch_rows import (
    RegisteredBranch,
    branches_by_gid,
    branches_in_database,
    check_sees_branches,
    decide_branches,
    forget_branches,
    has_branches,
    known_branches,
    mark_missing,
)
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.transaction import abort_if_timed_out

_log = logging.getLogger(__name__)

#: How many rows of the coordinator are read, or deleted, at once.
FOUND_MAX: Final = 500
#: How long the database may take to end one branch.
END_TIMEOUT_SECONDS: Final = 10.0


@dataclass(slots=True)
class RecoveredBranches:
    """What one look at a participating database has done; gids."""

    database_label: str
    committed: list[str] = field(default_factory=list)
    rolled_back: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    """Prepared, and their transactions are open: they are decided by their producers, or aborted once too old."""

    forgotten: list[str] = field(default_factory=list)
    """Ended before; the coordinator did not know it yet."""

    failed: list[TxnStoreError] = field(default_factory=list)
    """Why others are left: `PermissionDenied`, too, of all whose transactions row-level security may hide."""

    @property
    def ended_count(self) -> int:
        """How many branches were ended or found to have ended."""
        return len(self.committed) + len(self.rolled_back) + len(self.forgotten)


def recover_branches(store: Store, participant: str | DatabaseUrl, cluster: Cluster | None = None) -> RecoveredBranches:
    """End what is prepared in the database at the URL `participant` and belongs to transactions of `store`.

    One branch that cannot be ended keeps no other one from it: `raise_failed` tells of it.

    Raises:
        InvalidUrl: it is not the URL of a PostgreSQL database.
        InvalidRequest: the database is a standby, or has max_prepared_transactions = 0.
        StoreCopied: the store is a copy, and what is prepared there may be its original's.
        StoreReadOnly: the store is a standby, which may not have heard yet of what is prepared there.
        TxnStoreError: the database, or the store, cannot be reached.
    """
    check_original(store)
    url = parse_url(participant) if isinstance(participant, str) else participant
    with contextlib.closing(connect_participant(url)) as driver:
        return _DatabaseRecovery(store, cluster, driver).run()


def recover_in_cluster(store: Store, cluster: Cluster | None) -> int:
    """End what is prepared in any database of the cluster for transactions of `store`; return how much.

    Raises:
        TxnStoreError: one of them cannot be ended; the others are.
    """
    others = several(cluster)
    if others is None or not store.read(has_branches):
        return 0
    ended_count = 0
    failed: list[TxnStoreError] = []
    left_out: LeftOut = {}
    for member in others.stores(left_out):
        if not member.backend.keeps_prepared:
            continue
        try:
            recovered = _recover_member(store, member.url, others)
        except TxnStoreError as error:
            failed.append(error)
        else:
            ended_count += recovered.ended_count
            failed += recovered.failed
    # What is prepared in one that is away, or refuses, is still to be ended.
    failed += left_out.values()
    if failed:
        raise _gravest(failed)
    return ended_count


def forget_branch(
    store: Store,
    gid: str,
    participants: Sequence[str | DatabaseUrl] = (),
    cluster: Cluster | None = None,
    *,
    force: bool = False,
) -> list[TxnStoreError]:
    """Delete what `store` knows of a branch that nobody can end any more, for its database is gone or has lost it.

    The servers of `store`, of its cluster and of `participants` are asked whether it is prepared; returned is why some
    of the store's own did not say.  If it is prepared elsewhere, who finds it there afterwards rolls it back.

    Raises:
        InvalidRequest: it is not known, or prepared; its transaction is open, or decided to commit without `force`.
        TxnStoreError: one of `participants` does not say, or the store cannot be reached.
        InvalidUrl: one of `participants` is not the URL of a PostgreSQL database.
        StoreCopied: the store is a copy.
        PermissionDenied: row-level security may hide its transaction from this role.
    """
    check_original(store)
    # Before anybody is asked: what is decided later is prepared meanwhile.
    store.read(partial(_check_forgettable, store, gid, force=force))
    left_out: LeftOut = {}
    others = several(cluster)
    members = [store] if others is None else list(others.stores(left_out))
    urls = [member.url for member in members if member.backend.keeps_prepared]
    named = [parse_url(each) if isinstance(each, str) else each for each in participants]
    unasked = list(left_out.values())
    silent: list[TxnStoreError] = []
    for url, silences in (*((url, unasked) for url in urls), *((url, silent) for url in named)):
        try:
            database = _database_of_prepared(url, gid)
        except InvalidUrl:
            raise
        except TxnStoreError as error:
            silences.append(error)
            continue
        if database is not None:
            raise InvalidRequest(
                f"the branch {gid} is prepared in {database}: `txnstore transactions recover --participant URL` ends it"
            )
    if silent:
        # Named, for the branch may be there: who finds it once that database is back would roll back what is committed.
        told = "; ".join(str(error) for error in silent)
        raise type(_gravest(silent))(
            f"the branch {gid} may still be prepared in a database that did not answer ({told}): try again, or leave"
            " out a participant that is gone for good"
        )

    def work(connection: Connection) -> None:
        # Nobody decides it meanwhile.
        rows.lock_row(connection, _known_branch(connection, gid).transactional_id)
        _check_forgettable(store, gid, connection, force=force)
        forget_branches(connection, [gid])

    store.write(work)
    return unasked


def _known_branch(connection: Connection, gid: str) -> RegisteredBranch:
    found = branches_by_gid(connection, [gid]).get(gid)
    if found is None:
        raise InvalidRequest(f"no branch {gid} is known")
    return found


def _check_forgettable(store: Store, gid: str, connection: Connection, *, force: bool) -> None:
    branch = _known_branch(connection, gid)
    standing = _standing_of(store, branch, connection)
    if standing is Standing.OPEN:
        transactional_id = branch.transactional_id[:80]
        raise InvalidRequest(
            f"the transaction of the branch {gid} is open, and the branch ends with it:"
            f" `txnstore transactions list-open` shows what ends the transaction of {transactional_id}"
        )
    if standing is Standing.COMMITTED and not force:
        raise InvalidRequest(
            f"the transaction of the branch {gid} is decided to commit, and nothing shows that the branch has, in"
            f" {branch.database_label}: recover it there, or see that what it wrote is there; --force forgets it"
        )


def _database_of_prepared(url: DatabaseUrl, gid: str) -> str | None:
    driver = connect_participant(url)
    try:
        return database_of_prepared(driver, gid)
    finally:
        driver.close()


def _recover_member(store: Store, url: DatabaseUrl, cluster: Cluster) -> RecoveredBranches:
    check_original(store)
    with contextlib.closing(connect_participant(url)) as driver:
        # Where nothing can be prepared nothing is; of a standby, or where this role is refused, that is not known.
        return _DatabaseRecovery(store, cluster, driver).run() if can_prepare(driver) else RecoveredBranches("")


def raise_failed(recovered: RecoveredBranches) -> None:
    """Return if nothing failed.

    Raises:
        TxnStoreError: the first failure, of those that trying again does not cure if there are any.
    """
    if recovered.failed:
        raise _gravest(recovered.failed)


def _gravest(failed: Sequence[TxnStoreError]) -> TxnStoreError:
    return min(failed, key=lambda error: error.retriable or error.outcome_unknown)


class _DatabaseRecovery:
    """One look at one database."""

    def __init__(self, store: Store, cluster: Cluster | None, driver: PostgreSQLConnection) -> None:
        self._store = store
        self._cluster = cluster
        self._driver = driver
        self._database = look_at_database(driver)
        self._done = RecoveredBranches(self._database.label)

    def run(self) -> RecoveredBranches:
        """Look three times, in this order: the coordinator, the database, the coordinator again.

        A branch may be forgotten if it was decided *before* it was seen not to be prepared: one that is decided
        later was prepared in between.  And it may be presumed aborted if the coordinator does not know it *after* it
        was seen prepared: it is made known before.
        """
        before = self._registered()
        prepared = [branch.gid for branch in list_prepared(self._driver, gid_prefix(self._store.store_uuid))]
        is_prepared = set(prepared)
        try:
            known = known_branches(self._store, prepared)
        except PermissionDenied as error:
            # What this role sees is ended all the same; of the rest it cannot tell.
            self._done.failed.append(error)
            known = self._store.read(partial(branches_by_gid, gids=prepared))
            prepared = [gid for gid in prepared if gid in known]
        for gid in prepared:
            self._attempt(partial(self._cure_prepared, gid, known.get(gid)))
        for branch in before:
            if branch.gid not in is_prepared:
                self._attempt(partial(self._cure_unprepared, branch))
        for first in range(0, len(self._done.forgotten), FOUND_MAX):
            ended = self._done.forgotten[first : first + FOUND_MAX]
            self._store.write(partial(forget_branches, gids=ended))
        return self._done

    def _registered(self) -> list[RegisteredBranch]:
        # All: those that cannot be cured would keep others from it.
        found: list[RegisteredBranch] = []
        while True:
            after_gid = found[-1].gid if found else ""
            page = partial(
                branches_in_database,
                database_identity=self._database.identity,
                after_gid=after_gid,
                count_max=FOUND_MAX,
            )
            found += (read := self._store.read(page))
            if len(read) < FOUND_MAX:
                return found

    def _attempt(self, cure: Callable[[], None]) -> None:
        try:
            cure()
        except TxnStoreError as error:
            self._done.failed.append(error)

    def _cure_prepared(self, gid: str, branch: RegisteredBranch | None) -> None:
        standing = Standing.UNKNOWN if branch is None else self._standing(branch)
        if branch is not None and CURES[standing][True] is Cure.ABORT_FIRST:
            standing = self._store.write(partial(_abort_if_over, self._store, branch))
        cure = CURES[standing][True]
        if cure is Cure.LEAVE:
            self._done.open.append(gid)
        else:
            # One whose row has gone meanwhile has ended, and nobody says how that was decided.
            self._end(gid, None if standing is Standing.UNKNOWN else branch, commit=cure is Cure.COMMIT)

    def _cure_unprepared(self, branch: RegisteredBranch) -> None:
        # As it stood before the database was asked: what was decided since then was prepared meanwhile.
        standing = _standing_by_outcome(branch) or self._store.read(partial(_standing_of, self._store, branch))
        cure = CURES[standing][False]
        if cure is Cure.ABORT_FIRST:
            # The next look forgets it.
            self._store.write(partial(_abort_if_over, self._store, branch))
        elif cure is Cure.FORGET and branch.commit is not None:
            # Nobody says whether one that was decided to abort has ever voted.
            self._forget_ended(branch, commit=branch.commit, has_voted=branch.commit)

    def _forget_ended(self, branch: RegisteredBranch, *, commit: bool, has_voted: bool) -> None:
        try:
            otherwise = has_ended_otherwise(
                self._driver, branch.transaction_xid8, commit=commit, timeout_seconds=END_TIMEOUT_SECONDS
            )
        except BranchUnfinished as error:
            raise _left(branch.gid, self._database.label, str(error)) from None
        label = self._database.label
        if otherwise and commit:
            self._tell_missing(branch)
            return
        self._done.forgotten.append(branch.gid)
        if otherwise and not has_voted:
            _log.warning(
                "the transaction of %r is decided: abort; its branch in %s is not prepared, and there a transaction of"
                " its number has committed: somebody else has ended the branch, or the server crashed before the branch"
                " voted and gave its number to another transaction; see whether what it wrote is there",
                branch.transactional_id[:80],
                label,
                extra={
                    "event": "branch_perhaps_committed",
                    "database": label,
                    "transactional_id": branch.transactional_id,
                },
            )
        elif otherwise:
            # Told once: its row is all that is left of it.
            raise self._ended_otherwise(
                branch,
                f"the transaction of {branch.transactional_id[:80]!r} is decided: abort; but in {label} somebody else"
                " has committed its branch: what it wrote there has to be put right by hand",
            )

    def _tell_missing(self, branch: RegisteredBranch) -> None:
        """Tell once of a branch that was to commit, and keep its row: this may not be the database that voted."""
        if self._store.write(lambda connection: mark_missing(connection, branch.gid)):
            raise self._ended_otherwise(
                branch,
                f"the transaction of {branch.transactional_id[:80]!r} is decided: commit; but its branch {branch.gid}"
                f" is not known to have committed in {self._database.label}: somebody else has ended its branch the"
                " other way, a failover has lost it, or its server does not remember, or is a copy of the one that"
                " voted. See whether what it wrote is there, and put it right by hand; then"
                f" `txnstore transactions forget {branch.gid} --force`",
            )

    def _ended_otherwise(self, branch: RegisteredBranch, told: str) -> BranchEndedOtherwise:
        fields = {"database": self._database.label, "transactional_id": branch.transactional_id}
        _log.error("%s", told, extra={"event": "branch_ended_otherwise", **fields})
        return BranchEndedOtherwise(told)

    def _standing(self, branch: RegisteredBranch) -> Standing:
        standing = _standing_by_outcome(branch)
        if standing is None:
            try:
                abort_if_timed_out(self._store, branch.transactional_id, self._cluster)
            except AssertionError as error:
                # Its row is damaged: that keeps no other branch from its end.
                raise BranchUnfinished(
                    f"the branch {branch.gid} in {self._database.label} is left as it is: no rule can abort its"
                    f" transaction ({error})"
                ) from error
            standing = self._store.read(partial(_standing_of, self._store, branch))
        return standing

    def _end(self, gid: str, branch: RegisteredBranch | None, *, commit: bool) -> None:
        answer = end_prepared(self._driver, gid, commit=commit, timeout_seconds=END_TIMEOUT_SECONDS)
        if answer.sqlstate == UNDEFINED_OBJECT:
            # Somebody else has just ended it.
            if branch is None:
                self._done.forgotten.append(gid)
            else:
                self._forget_ended(branch, commit=commit, has_voted=True)
            return
        if answer.kind is not AnswerKind.DONE:
            raise _error_of(answer, gid, self._database.label)
        (self._done.committed if commit else self._done.rolled_back).append(gid)
        self._store.write(lambda connection: forget_branches(connection, [gid]))


def _standing_by_outcome(branch: RegisteredBranch) -> Standing | None:
    if branch.commit is None:
        return None
    return Standing.COMMITTED if branch.commit else Standing.ABORTED


def _standing_of(store: Store, branch: RegisteredBranch, connection: Connection) -> Standing:
    """Return how a branch stands by now."""
    found = branches_by_gid(connection, [branch.gid]).get(branch.gid)
    row = rows.read_row(connection, branch.transactional_id).row
    if row is None:
        check_sees_branches(store, connection, branch.gid)
    if found is None:
        return Standing.UNKNOWN
    is_open = row is not None and row.state is TransactionState.ONGOING and row.begin_identity == branch.producer
    return _standing_by_outcome(found) or (Standing.OPEN if is_open else Standing.STRANDED)


def _abort_if_over(store: Store, branch: RegisteredBranch, connection: Connection) -> Standing:
    """Decide a stranded branch, so that nobody can commit it later; return how it stands then."""
    # The lock of its transaction's row: nobody decides it meanwhile.
    rows.lock_row(connection, branch.transactional_id)
    standing = _standing_of(store, branch, connection)
    if standing is not Standing.STRANDED:
        return standing
    decide_branches(connection, branch.transactional_id, branch.producer, commit=False)
    return Standing.ABORTED


def _error_of(answer: ServerAnswer, gid: str, label: str) -> TxnStoreError:
    if answer.sqlstate == INSUFFICIENT_PRIVILEGE:
        return PermissionDenied(f"the branch {gid} in {label} is left as it is: {answer.detail}")
    return _left(gid, label, answer.told)


def _left(gid: str, label: str, why: str) -> BranchUnfinished:
    return BranchUnfinished(f"the branch {gid} in {label} is left as it is for now ({why}); try again")
