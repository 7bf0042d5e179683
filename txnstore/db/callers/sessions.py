"""A session of the ORM whose database transaction is ended by others: what it does before, as at its own commit.

    prepare_session(callers)                   # its hooks run, and what it holds back is written
    ...                                        # others decide
    callers.session.commit()                   # what is left to do: the COMMIT, and the hooks after it

In between it runs no statement, as SQLAlchemy has it for a session that is prepared for a two-phase commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from txnstore.db.callers.connections import CallersConnection


def prepare_session(callers: CallersConnection) -> None:
    """Let the session, if one was handed over, do all that comes before a COMMIT; a second call does nothing.

    Its `before_commit` hooks are called and what it holds back is written, also within its savepoints, which end.

    Raises:
        Exception: of a hook of the application's, or SQLAlchemyError: what is to be written was refused.
    """
    session = callers.session
    outermost = None if session is None else session.get_transaction()
    if session is None or outermost is None:
        return
    # Only who has a session has imported it.
    from sqlalchemy.orm.session import SessionTransactionState

    if outermost._state is SessionTransactionState.PREPARED:  # noqa: SLF001 - it is shown nowhere else
        return
    # Savepoints cannot be released any more once their database transaction is prepared.
    while (savepoint := session.get_nested_transaction()) is not None:
        savepoint.commit()
    # Its own commit() goes on from there.
    outermost._prepare_impl()  # noqa: SLF001 - prepare() is for two-phase sessions only
