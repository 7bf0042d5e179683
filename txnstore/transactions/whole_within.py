"""The end of a transaction that is wholly in the client, in a database transaction that an application has begun.

It is `outcome.end_within` on the short way: all of it at once, or nothing.  The application's rows, which came before,
stay as they are, and so does its database transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sqlalchemy import Connection

from txnstore.db.backend import WholeTransaction
from txnstore.db.statements import run_on_driver
from txnstore.db.store import note_change
from txnstore.transactions.outcome import Ended, EndRequest
from txnstore.transactions.whole import whole_request
from txnstore.transactions.whole_statements import UnusualError, write_whole

_SAVEPOINT: Final = "txnstore_whole"


def end_whole_within(
    connection: Connection, request: EndRequest, commit_whole: Callable[[WholeTransaction], list[int] | None] | None
) -> Ended | None:
    """Commit the transaction with the database transaction that is open on `connection`; its owner commits that.

    By the database's own function; without one by statements.  None: nothing was changed, for it is not a usual one.

    Raises:
        DBAPIError: the database transaction has to be rolled back.
    """
    whole = whole_request(request.transactional_id, request.producer, request.appends, request.offsets, request.writers)
    if whole is None:
        return None
    if commit_whole is not None:
        places = commit_whole(whole.transaction())
        if places is None:
            return None
        note_change(connection, partition_ids=[partition_id for partition_id, _ in whole.batches.partitions])
        return whole.ended(places)
    run_on_driver(connection, f"SAVEPOINT {_SAVEPOINT}")
    try:
        return whole.ended(write_whole(connection, whole))
    except UnusualError:
        run_on_driver(connection, f"ROLLBACK TO {_SAVEPOINT}")
        return None
