"""The branches of a transaction in the process that coordinates it: registered, prepared, ended.

    branches = Branches(store, "transfer-1")
    branches.enlist(driver)                    # as often as there are databases; their owners write meanwhile
    branches.prepare(producer)                 # all vote
    coordinator.end_transaction("transfer-1", producer, commit=True)
    branches.finish(commit=True)

Whatever happens to this process, recovery finds the branches by their gids, and the decision at the coordinator.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Final

from sqlalchemy import Connection

from txnstore.backoff import Backoff
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.identity import check_not_adopted, check_original_once
from txnstore.db.postgresql.branches import (
    DIVISION_BY_ZERO,
    OUTBOX_INSTEAD,
    UNDEFINED_OBJECT,
    BranchAddress,
    Driver,
    ParticipatingDatabase,
    begin_branch,
    check_no_offsets,
    check_usable,
    end_prepared,
    end_statement,
    has_ended_otherwise,
    is_idle,
    look_at_database,
    prepare_statement,
    roll_back,
)
from txnstore.db.postgresql.exchange import AnswerKind, ServerAnswer, exchange
from txnstore.db.store import Store
from txnstore.errors import BranchEndedOtherwise, BranchUnfinished, TransactionAbortable, TxnStoreError
from txnstore.model import ProducerIdentity
from txnstore.participants.branch_rules import BranchState, End, check_move, end_of, new_gid
from txnstore.transactions import rows
from txnstore.transactions.branch_rows import (
    RegisteredBranch,
    forget_branches,
    insert_branches,
    known_branches,
    mark_missing,
)
from txnstore.transactions.transaction import LockedTransaction, write_in_time

_log = logging.getLogger(__name__)

#: How long the databases may take to prepare: constraints that were deferred are checked now.
VOTE_TIMEOUT_MS: Final = 30_000
#: How long it is tried to end the branches before that is left to recovery.
FINISH_TIMEOUT_MS: Final = 10_000
#: Between two tries: the first pause, and the longest.
_PAUSE_FIRST_SECONDS: Final = 0.02
_PAUSE_LAST_SECONDS: Final = 0.5

_S = BranchState

#: By SQLSTATE: what to do about a database that votes against its branch.
ADVICE: Final[dict[str, str]] = {
    "0A000": (
        "a transaction with LISTEN or NOTIFY, temporary tables, WITH HOLD cursors or exported snapshots cannot be"
        f" prepared: leave these out of it, or {OUTBOX_INSTEAD}"
    ),
    # Also of a full table of locks, and of memory; what tells them apart is in the server's own language.
    "53200": (
        "perhaps all of its max_prepared_transactions are in use: end those that were left behind (txnstore maintain"
        " --participant)"
    ),
    "55000": f"its max_prepared_transactions is 0: {OUTBOX_INSTEAD}",
}
OWN_END: Final = (
    "its database transaction was committed or rolled back by its owner; within the producer's transaction that is the"
    " producer's to do"
)


class Branch:
    """The share of one database in a transaction: what is done on one connection of its owner."""

    def __init__(
        self, gid: str, driver: Driver, database: ParticipatingDatabase, transaction_id: str, *, is_hasty: bool
    ) -> None:
        """Be enlisted; `is_hasty` says whether its end on the owner's connection would not wait for standbys."""
        self.gid = gid
        self.driver = driver
        self.database = database
        self.transaction_id = transaction_id
        self.is_hasty = is_hasty
        self.address = BranchAddress(driver)
        self.state = _S.ENLISTED
        self.trouble = ""
        #: Whether the connection is still in our hands; its owner may have given it to somebody else.
        self.is_held = True
        #: Whether the coordinator does not know it any more, so that nobody says how its end was decided.
        self.is_forgotten = False

    def move(self, after: BranchState, trouble: str = "") -> None:
        """Enter a state."""
        check_move(self.state, after)
        self.state = after
        self.trouble = trouble


class Branches:
    """The branches of the open transaction of one transactional id; for one thread at a time."""

    def __init__(self, store: Store, transactional_id: str, cluster: Cluster | None = None) -> None:
        """Coordinate in `store`, the coordinator of the transactional id in its cluster."""
        self._store = store
        self._cluster = cluster
        self._transactional_id = transactional_id
        self._branches: list[Branch] = []
        #: Ended, and still in the coordinator's table: they go with the next registration.
        self._ended_gids: list[str] = []
        #: The databases where somebody has ended a branch otherwise than was decided, until it was told, and whether
        #: that is sure.
        self._ended_otherwise: dict[str, bool] = {}
        #: The labels of those of them that were to commit, by gid.
        self._missing: dict[str, str] = {}

    def __len__(self) -> int:
        """Return how many databases take part in the open transaction."""
        return len(self._branches)

    @property
    def is_registered(self) -> bool:
        """Whether the transaction may be open at its coordinator because of them."""
        return any(branch.state is not _S.ENLISTED for branch in self._branches)

    @property
    def has_leftovers(self) -> bool:
        """Whether branches have not ended, or have and the coordinator does not know it yet."""
        return bool(self._branches or self._ended_gids)

    def enlist(self, driver: object) -> None:
        """Let what is done on the connection, from its last commit on, be a branch of the transaction.

        A connection that is enlisted already stays so.

        Raises:
            InvalidRequest: the connection or its database cannot take part; says what to do instead.
            StoreCopied: the coordinator is a copy of another store, which would take the branch for its own.
            StoreUnavailable: the connection broke.
        """
        usable = check_usable(driver)
        if any(branch.driver is usable for branch in self._branches):
            return
        # The original would not know the branches of a copy, and roll them back.
        check_original_once(self._store)
        database = look_at_database(usable)
        check_no_offsets(usable)
        transaction_id, is_hasty = begin_branch(usable)
        gid = new_gid(self._store.store_uuid)
        self._branches.append(Branch(gid, usable, database, transaction_id, is_hasty=is_hasty))

    def dismiss(self, driver: object) -> None:
        """Take back what was enlisted a moment ago: the connection is its owner's, as it is."""
        self._branches = [
            branch for branch in self._branches if branch.driver is not driver or branch.state is not _S.ENLISTED
        ]

    def lose(self, driver: object) -> None:
        """Take note that the owner has closed the connection, or given it to somebody else: its branch is lost."""
        for branch in self._branches:
            if branch.driver is driver:
                branch.is_held = False

    def release(self) -> None:
        """Let the owners have their connections back; what has not ended yet is ended on others."""
        for branch in self._branches:
            branch.is_held = False

    def prepare(self, producer: ProducerIdentity, *, timeout_ms: int = VOTE_TIMEOUT_MS) -> None:
        """Let all databases vote; when it returns each of its branches survives any crash, and keeps its locks.

        All are made known at the coordinator before, in one database transaction, which begins the producer's
        transaction if nothing else did.  Safe to repeat after an error of the coordinator.

        Raises:
            TransactionAbortable: a database voted against it or did not answer; abort the transaction.
            StoreCopied: the coordinator was adopted meanwhile; no database was asked.
            TxnStoreError: the coordinator does not let the producer go on, see `protocol.add_to_transaction`; no
                database was asked.
        """
        # Giving them up in another thread meanwhile takes away none of the votes that are needed.
        needed = list(self._branches)
        lost = [branch for branch in needed if not branch.is_held]
        if lost:
            raise TransactionAbortable("; ".join(f"{branch.database.label}: {OWN_END}" for branch in lost))
        enlisted = [branch for branch in needed if branch.state is _S.ENLISTED]
        if enlisted:
            self._register(producer, enlisted, timeout_ms)
        registered = [branch for branch in needed if branch.state is _S.REGISTERED]
        statements = [prepare_statement(branch.driver, branch.gid, branch.transaction_id) for branch in registered]
        try:
            answers = exchange(statements, timeout_ms / 1000)
            for branch, answer in zip(registered, answers, strict=True):
                _take_vote(branch, answer)
        finally:
            # Interrupted: some may have voted, and some may come to it yet.
            for branch in registered:
                if branch.state is _S.REGISTERED:
                    branch.move(_S.IN_DOUBT, "its vote is not known (the call was interrupted)")
        against = [branch for branch in needed if branch.state is not _S.PREPARED]
        if against:
            raise TransactionAbortable("; ".join(f"{branch.database.label}: {branch.trouble}" for branch in against))

    def finish(self, *, commit: bool, timeout_ms: int = FINISH_TIMEOUT_MS) -> None:
        """End every branch as the coordinator has decided; the coordinator must have answered before.

        Safe to repeat.  Branches that were never prepared are rolled back on their connections.

        Raises:
            BranchEndedOtherwise: somebody has ended one the other way; told once.
            BranchUnfinished: some could not be ended in time; the others are.
        """
        self._finish(dict.fromkeys((branch.gid for branch in self._branches), commit), timeout_ms)

    def settle(self, *, timeout_ms: int = FINISH_TIMEOUT_MS) -> None:
        """End every branch as the coordinator says that it was decided; what is not decided yet is left as it is.

        Raises:
            BranchEndedOtherwise, BranchUnfinished: as `finish`.
            TxnStoreError: the coordinator cannot be asked, or a standby would have to answer for it.
        """
        gids = [branch.gid for branch in self._branches if branch.state is not _S.ENLISTED]
        known = known_branches(
            self._store, gids, of_transactional_id=self._transactional_id, retry_timeout_ms=timeout_ms
        )
        # Nobody knows of one that is enlisted only; and one that was registered is not forgotten before it has ended.
        decided: dict[str, bool] = {}
        for branch in self._branches:
            found = known.get(branch.gid)
            branch.is_forgotten = found is None
            if found is None or found.commit is not None:
                decided[branch.gid] = found is not None and bool(found.commit)
        self._finish(decided, timeout_ms)

    def abandon(self) -> None:
        """Leave what is prepared to recovery, and roll back the rest: the producer is closed."""
        for branch in self._branches:
            if branch.is_held and branch.state is not _S.PREPARED:
                roll_back(branch.driver, _PAUSE_LAST_SECONDS)
        self._branches.clear()
        self.forget_ended()

    def forget_ended(self) -> None:
        """Remove what has ended from the coordinator's table now; if that fails, recovery does it."""
        gids, self._ended_gids = self._ended_gids, []
        if gids:
            try:
                self._store.write(lambda connection: forget_branches(connection, gids), retry_timeout_ms=0)
            except TxnStoreError:
                self._ended_gids = gids

    def _register(self, producer: ProducerIdentity, enlisted: Sequence[Branch], timeout_ms: int) -> None:
        ended, self._ended_gids = self._ended_gids, []
        registered = [
            RegisteredBranch(
                branch.gid,
                self._transactional_id,
                producer,
                branch.database.label,
                branch.database.identity,
                branch.transaction_id,
            )
            for branch in enlisted
        ]

        def work(connection: Connection) -> None:
            # Recovery would look for the branches under the new identity.
            check_not_adopted(self._store, connection)
            register_branches(self._transactional_id, producer, registered, ended, connection)

        try:
            write_in_time(self._store, self._cluster, self._transactional_id, work, retry_timeout_ms=timeout_ms)
        except TxnStoreError as error:
            self._ended_gids = ended
            if error.outcome_unknown:
                # It may be registered, which does no harm: nothing is prepared.  The same gids are sent again.
                self._ended_gids = []
            raise
        for branch in enlisted:
            branch.move(_S.REGISTERED)

    def _finish(self, decided: dict[str, bool], timeout_ms: int) -> None:
        deadline = time.monotonic() + timeout_ms / 1000
        backoff = Backoff(_PAUSE_FIRST_SECONDS, _PAUSE_LAST_SECONDS)
        while True:
            self._try_to_end(decided, max(0.1, deadline - time.monotonic()))
            left = [branch for branch in self._branches if branch.gid in decided]
            if not left:
                break
            pause_seconds = backoff.back_off()
            if time.monotonic() + pause_seconds >= deadline:
                commit = decided[left[0].gid]
                where = "; ".join(f"{branch.database.label} ({branch.trouble})" for branch in left)
                raise BranchUnfinished(
                    f"the transaction of {self._transactional_id[:80]!r} is decided: {'commit' if commit else 'abort'};"
                    f" its branch has not ended yet in {where}: repeat the call, or leave it to recovery (txnstore"
                    " maintain --participant)"
                )
            time.sleep(pause_seconds)
        for gid, label in self._missing.items():
            self._mark_missing(gid, label)
        labels, self._ended_otherwise = self._ended_otherwise, {}
        missing, self._missing = self._missing, {}
        if labels:
            by_hand = "".join(f"; then `txnstore transactions forget {gid} --force`" for gid in missing)
            unsure = ""
            if not all(labels.values()):
                unsure = (
                    "; see first whether it is there: a server that has taken over, and has lost the branch, may have"
                    " given its number to another transaction"
                )
            raise BranchEndedOtherwise(
                f"the transaction of {self._transactional_id[:80]!r} has ended, but in {', '.join(labels)} somebody"
                " else has ended its branch, or a failover has lost it, and not as was decided: what it wrote there has"
                f" to be put right by hand{unsure}{by_hand}"
            )

    def _mark_missing(self, gid: str, label: str) -> None:
        """Take note that this branch is told of, so that recovery does not tell of it again, and keep its row."""
        try:
            is_new = self._store.write(lambda connection: mark_missing(connection, gid), retry_timeout_ms=0)
        except TxnStoreError:
            # Recovery does it.
            return
        if is_new:
            _log.error(
                "the transaction of %r is decided: commit; but its branch %s is not known to have committed in %s",
                self._transactional_id[:80],
                gid,
                label,
                extra={
                    "event": "branch_ended_otherwise",
                    "database": label,
                    "transactional_id": self._transactional_id,
                },
            )

    def _try_to_end(self, decided: dict[str, bool], timeout_seconds: float) -> None:
        on_own: list[Branch] = []
        elsewhere: list[Branch] = []
        for branch in self._branches:
            if branch.gid not in decided:
                continue
            end = end_of(branch.state, commit=decided[branch.gid])
            if end is End.ROLLBACK:
                if branch.is_held:
                    roll_back(branch.driver, timeout_seconds)
                self._ended(branch)
            elif end is not End.NOTHING:
                if branch.is_held and branch.state is _S.IN_DOUBT:
                    # Interrupted before it was asked: it is open still.
                    roll_back(branch.driver, timeout_seconds)
                is_at_hand = branch.is_held and branch.state is _S.PREPARED and is_idle(branch.driver)
                is_at_hand = is_at_hand and not branch.is_hasty
                (on_own if is_at_hand else elsewhere).append(branch)
        statements = [end_statement(branch.driver, branch.gid, commit=decided[branch.gid]) for branch in on_own]
        for branch, answer in zip(on_own, exchange(statements, timeout_seconds), strict=True):
            if not self._take_end(branch, branch.driver, answer, decided[branch.gid], timeout_seconds):
                elsewhere.append(branch)
        for branch in elsewhere:
            self._end_elsewhere(branch, decided[branch.gid], timeout_seconds)
        self._branches = [branch for branch in self._branches if branch.state is not _S.ENDED]

    def _end_elsewhere(self, branch: Branch, commit: bool, timeout_seconds: float) -> None:
        """End a branch whose own connection is broken, or not let to."""
        try:
            driver = branch.address.connect(timeout_seconds)
        except TxnStoreError as error:
            branch.trouble = str(error)
            return
        try:
            # Under the same name: a server that was replaced, or the next one of several, knows nothing of it.
            if look_at_database(driver).identity != branch.database.identity:
                branch.trouble = (
                    "another database answers there now; if the one that voted is gone for good, `txnstore transactions"
                    f" forget {branch.gid}` gives the branch up"
                )
                return
            answer = end_prepared(driver, branch.gid, commit=commit, timeout_seconds=timeout_seconds)
            self._take_end(branch, driver, answer, commit, timeout_seconds)
        except TxnStoreError as error:
            branch.trouble = str(error)
        finally:
            driver.close()

    def _take_end(
        self, branch: Branch, driver: Driver, answer: ServerAnswer, commit: bool, timeout_seconds: float
    ) -> bool:
        # It is decided, and was prepared or is rolled back: if it is gone, somebody else has ended it, recovery as was
        # decided, an administrator perhaps not. Of one in doubt that cannot be told: see `has_ended_otherwise`.
        if answer.kind is not AnswerKind.DONE and answer.sqlstate != UNDEFINED_OBJECT:
            branch.trouble = answer.told
            return False
        is_kept = False
        if answer.kind is not AnswerKind.DONE and branch.state is _S.PREPARED and not branch.is_forgotten:
            try:
                if has_ended_otherwise(driver, branch.transaction_id, commit=commit, timeout_seconds=timeout_seconds):
                    # The server that has taken the vote knows its number; another one may have given it out again.
                    is_sure = commit or driver is branch.driver
                    self._ended_otherwise[branch.database.label] = is_sure
                    # A copy of that server may have answered in its place: without its row it would be rolled back.
                    is_kept = commit
                    if commit:
                        self._missing[branch.gid] = branch.database.label
            except BranchUnfinished as error:
                branch.trouble = str(error)
                return False
        self._ended(branch, is_kept=is_kept)
        return True

    def _ended(self, branch: Branch, *, is_kept: bool = False) -> None:
        # One in doubt may still come to be prepared: its row stays for the next look.
        if not is_kept and branch.state not in (_S.ENLISTED, _S.IN_DOUBT):
            self._ended_gids.append(branch.gid)
        branch.move(_S.ENDED)


def register_branches(
    transactional_id: str,
    producer: ProducerIdentity,
    branches: Iterable[RegisteredBranch],
    ended_gids: Sequence[str],
    connection: Connection,
) -> None:
    """Make branches known in the producer's transaction, which is open afterwards, and forget those that have ended."""
    # The lock of its row: a decision from elsewhere comes before, and is found, or after, and knows of them.
    transaction = LockedTransaction.lock(connection, transactional_id)
    transaction.begin(producer)
    transaction.save("AddBranches")
    # Also where it was open before: a decision by a snapshot that does not know of them is refused.
    rows.touch_row(connection, transactional_id, transaction.now_ms)
    insert_branches(connection, branches)
    forget_branches(connection, ended_gids)


def _take_vote(branch: Branch, answer: ServerAnswer) -> None:
    if answer.kind is AnswerKind.DONE:
        branch.move(_S.PREPARED)
    elif answer.kind is AnswerKind.UNKNOWN:
        branch.move(_S.IN_DOUBT, f"its vote is not known ({answer.told})")
    elif answer.sqlstate == DIVISION_BY_ZERO:
        branch.move(_S.REFUSED, OWN_END)
    else:
        advice = ADVICE.get(answer.sqlstate or "")
        branch.move(_S.REFUSED, f"it voted against the transaction ({answer.told}){f'; {advice}' if advice else ''}")
