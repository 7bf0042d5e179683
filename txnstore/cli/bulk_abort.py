"""The abort of many transactions at once, and the question before any abort."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import typer

from txnstore.cli.output import hint, say, tell_and_exit
from txnstore.db.cluster.cluster import Cluster, LeftOut
from txnstore.errors import TxnStoreError
from txnstore.transactions.administration import AbortedAsShown, abort_shown_transactions
from txnstore.transactions.listing import TransactionFilter, list_transactions
from txnstore.transactions.protocol import TIMEOUT_NEVER_MS, TransactionMetadata

#: So many transactions are named in a question about all of them.
_NAMED_MAX: Final = 5


def abort_many(cluster: Cluster, wanted: TransactionFilter, *, yes: bool) -> None:
    """Abort all that are wanted and have a timeout, after a question unless `yes`; the others are for their programs.

    What one database refuses keeps nothing in another one open, and is told after what was done.

    Raises:
        TxnStoreError: the only database refuses.
    """
    left_out: LeftOut = {}
    found: dict[int, list[TransactionMetadata]] = {}
    prepared_count = 0
    for store, rows_there in cluster.read_all(partial(list_transactions, wanted=wanted), left_out):
        found[store.database_id] = [row for row in rows_there if row.timeout_ms != TIMEOUT_NEVER_MS]
        prepared_count += len(rows_there) - len(found[store.database_id])
    if prepared_count:
        hint(
            "1 is left out: its program completes it"
            if prepared_count == 1
            else f"{prepared_count} are left out: their programs complete them"
        )
    errors: list[Exception] = list(left_out.values())
    names = [row.transactional_id for rows_there in found.values() for row in rows_there]
    if names:
        some = ", ".join(names[:_NAMED_MAX]) + (", ..." if len(names) > _NAMED_MAX else "")
        ask_to_abort(f"{_transactions(len(names), 'open ')}: {some}", yes=yes)
        errors += _abort_shown(cluster, {number: shown for number, shown in found.items() if shown})
    elif not left_out:
        say(f"no {'other ' if prepared_count else ''}such transaction is open; nothing was changed")
    tell_and_exit(errors)


def _abort_shown(cluster: Cluster, found: Mapping[int, Sequence[TransactionMetadata]]) -> list[Exception]:
    """Abort them and tell how many were; return what else is to be told."""
    errors: list[Exception] = []
    aborted = left = ended = 0
    for database_id, shown in found.items():
        try:
            done = abort_shown_transactions(cluster.own(database_id), shown, cluster)
        except TxnStoreError as error:
            done = AbortedAsShown(left=len(shown), error=error)
        aborted += done.aborted
        left += done.left
        ended += len(shown) - done.aborted - done.left
        if done.error is not None:
            errors.append(done.error)
    say(f"{_transactions(aborted)} {'was' if aborted == 1 else 'were'} aborted")
    if ended:
        hint(f"{ended} had ended meanwhile")
    if left:
        hint(f"{left} may still be open")
    return errors


def _transactions(count: int, which: str = "") -> str:
    return f"{count} {which}{'transaction' if count == 1 else 'transactions'}"


def ask_to_abort(what: str, *, yes: bool) -> None:
    """Ask unless `yes`; who says no ends the program."""
    if not yes:
        # Not among the results, which a program may read.
        typer.confirm(f"Abort {what}?", abort=True, err=True)
