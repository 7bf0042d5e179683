"""The rules of a branch, pure tables: what it is called, how it moves, how it ends, and what recovery does about it.

Every role of a server may list all gids.  So one holds a fixed prefix, the identity of the store that coordinates it,
and a random number; neither a transactional id nor a tenant.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

#: Foreign gids do not begin with it.
PREFIX: Final = "txnstore_"
_RANDOM_BYTES: Final = 16


def gid_prefix(store_uuid: str) -> str:
    """Return what the gids of a store begin with, and those of no other."""
    return f"{PREFIX}{store_uuid.replace('-', '')}_"


def new_gid(store_uuid: str) -> str:
    """Return a gid that nobody has used: 74 characters; PostgreSQL takes up to 199."""
    return gid_prefix(store_uuid) + secrets.token_hex(_RANDOM_BYTES)


class BranchState(enum.Enum):
    """Where a branch is, as the process that coordinates it knows."""

    ENLISTED = "enlisted"
    """Its owner works in it; nobody else knows of it."""

    REGISTERED = "registered"
    """The coordinator knows of it, durably."""

    PREPARED = "prepared"
    """It has voted for the transaction, and may go either way."""

    REFUSED = "refused"
    """It has voted against it: it is not prepared."""

    IN_DOUBT = "in doubt"
    """Its vote is not known: it may be prepared, now or later."""

    ENDED = "ended"
    """It is committed or rolled back."""


_B = BranchState


#: By state: the states that it may be entered from.
ENTERED_FROM: Final[Mapping[BranchState, frozenset[BranchState]]] = MappingProxyType(
    {
        _B.ENLISTED: frozenset(),
        _B.REGISTERED: frozenset({_B.ENLISTED}),
        _B.PREPARED: frozenset({_B.REGISTERED}),
        _B.REFUSED: frozenset({_B.REGISTERED}),
        _B.IN_DOUBT: frozenset({_B.REGISTERED}),
        _B.ENDED: frozenset(_B) - {_B.ENDED},
    }
)


class IllegalBranchMove(AssertionError):
    """A branch was about to make a move that the table does not have: a defect of ours, never of a caller."""


def check_move(before: BranchState, after: BranchState) -> None:
    """Return if the table has the move.

    Raises:
        IllegalBranchMove: it has not.
    """
    if before not in ENTERED_FROM[after]:
        raise IllegalBranchMove(f"{before.value} -> {after.value}")


class End(enum.Enum):
    """How a branch is ended."""

    COMMIT_PREPARED = "COMMIT PREPARED"
    ROLLBACK_PREPARED = "ROLLBACK PREPARED"
    ROLLBACK = "ROLLBACK"
    """On its owner's connection."""

    NOTHING = "nothing"


#: By state, once it is decided to (abort, commit): how the branch is ended.  A transaction commits only if all of its
#: branches are prepared, so the moves that are not here are defects.
ENDS: Final[Mapping[BranchState, tuple[End, End | None]]] = MappingProxyType(
    {
        _B.ENLISTED: (End.ROLLBACK, None),
        _B.REGISTERED: (End.ROLLBACK, None),
        _B.PREPARED: (End.ROLLBACK_PREPARED, End.COMMIT_PREPARED),
        _B.REFUSED: (End.ROLLBACK, None),
        _B.IN_DOUBT: (End.ROLLBACK_PREPARED, None),
        _B.ENDED: (End.NOTHING, End.NOTHING),
    }
)


def end_of(state: BranchState, *, commit: bool) -> End:
    """Return how a branch in this state is ended.

    Raises:
        IllegalBranchMove: the table has no such end.
    """
    end = ENDS[state][commit]
    if end is None:
        raise IllegalBranchMove(f"a branch that is {state.value} cannot be committed")
    return end


# --- recovery ---------------------------------------------------------------------------------------------------------


class Standing(enum.Enum):
    """What the coordinator knows of a branch."""

    COMMITTED = "committed"
    """Its transaction is decided to commit."""

    ABORTED = "aborted"
    """Its transaction is decided to abort."""

    OPEN = "open"
    """Its transaction is open and may still be decided either way."""

    STRANDED = "stranded"
    """Nothing is decided, and its transaction is over or unknown: damage, or somebody changed the tables."""

    UNKNOWN = "unknown"
    """The coordinator does not know it (any more): it was never decided to commit, or it has ended."""


class Cure(enum.Enum):
    """What recovery does about a branch."""

    COMMIT = "commit"
    ROLL_BACK = "roll back"
    LEAVE = "leave"
    ABORT_FIRST = "abort first"
    """Decide durably that it aborts, so that nobody commits it later; then look again."""

    FORGET = "forget"
    """Its row is all that is left of it."""


_S = Standing


#: By what the coordinator knows: what is done if the branch is (not prepared, prepared) in its database.
CURES: Final[Mapping[Standing, tuple[Cure, Cure]]] = MappingProxyType(
    {
        _S.COMMITTED: (Cure.FORGET, Cure.COMMIT),
        _S.ABORTED: (Cure.FORGET, Cure.ROLL_BACK),
        _S.OPEN: (Cure.LEAVE, Cure.LEAVE),
        _S.STRANDED: (Cure.ABORT_FIRST, Cure.ABORT_FIRST),
        # Presumed abort.
        _S.UNKNOWN: (Cure.LEAVE, Cure.ROLL_BACK),
    }
)
