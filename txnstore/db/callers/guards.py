"""Guards that keep a caller from ending a database transaction that txnstore is to commit.

His commit() and rollback() are refused while the guards are set, by whichever of his objects he calls them.  What a
guard cannot reach, SQL's own COMMIT for example, shows when txnstore looks at the database transaction again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final, NoReturn

from sqlalchemy import Connection, event

from txnstore.db.callers.connections import CallersConnection

Refuse = Callable[[str], BaseException]

#: What would end the database transaction, by the names of the methods.
ENDINGS: Final = ("commit", "rollback")


class CallerGuards:
    """The guards of one connection."""

    def __init__(self, callers: CallersConnection, refuse: Refuse) -> None:
        """Guard `callers`; `refuse` makes the error of an ending, given its name."""
        self._callers = callers
        self._refuse = refuse
        self._guarded: list[tuple[Any, str]] = []
        self.at_commit: Callable[[], None] | None = None
        """What to do right before SQLAlchemy commits, instead of refusing."""

        self.was_rolled_back = False
        """Whether SQLAlchemy has rolled back, as it does when the connection or session is closed."""

    def set(self) -> None:
        """Refuse from now on."""
        callers = self._callers
        for holder in (callers.session, callers.owner, callers.driver if callers.owner is None else None):
            for ending in ENDINGS if holder is not None else ():
                # SQLite's own type takes no attributes, nor do SQLAlchemy's asynchronous ones.
                with contextlib.suppress(AttributeError):
                    # Noted first, and struck off last below: an interrupt in between leaves none behind.
                    self._guarded.append((holder, ending))
                    setattr(holder, ending, self._refusing(ending))
        if callers.owner is not None:
            # Whichever of SQLAlchemy's objects was asked, it comes by here.
            event.listen(callers.owner, "commit", self._on_commit)
            event.listen(callers.owner, "rollback", self._on_rollback)

    def open_methods(self) -> None:
        """Let the methods work again; SQLAlchemy's events are still guarded."""
        while self._guarded:
            holder, ending = self._guarded[-1]
            with contextlib.suppress(AttributeError):
                delattr(holder, ending)
            self._guarded.pop()

    def remove(self) -> None:
        """Refuse nothing any more; a second call does nothing."""
        self.open_methods()
        owner = self._callers.owner
        if owner is not None:
            for name, listener in (("commit", self._on_commit), ("rollback", self._on_rollback)):
                if event.contains(owner, name, listener):
                    event.remove(owner, name, listener)

    def _refusing(self, ending: str) -> Callable[..., NoReturn]:
        def refuse(*_: object, **__: object) -> NoReturn:
            raise self._refuse(ending)

        return refuse

    def _on_commit(self, _: Connection) -> None:
        if self.at_commit is None:
            raise self._refuse("commit")
        self.at_commit()

    def _on_rollback(self, _: Connection) -> None:
        self.was_rolled_back = True
