"""A check: what it looks at, what it means if it finds something, and what to do; and how checks are run over facts."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from txnstore.db.schema import SCHEMA_VERSION


class Grade(enum.Enum):
    """How much a finding matters."""

    PROBLEM = "problem"
    """Something fails, stands still or may be lost."""

    ADVICE = "advice"
    """Something is slower than it has to be, or will be a problem by and by."""

    UNKNOWN = "unknown"
    """A check could not look."""


class Facts(Protocol):
    """What is known of a database."""

    @property
    def unknown(self) -> dict[str, str]:
        """Why facts are missing, or not complete, by their names."""
        ...


F = TypeVar("F", bound=Facts)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Check(Generic[F]):
    """One row of the table of checks."""

    name: str
    grade: Grade
    looks_at: str
    """What is looked at, and where it is found."""

    consequence: str
    remedy: str
    needs: tuple[str, ...]
    """The facts without which it cannot look."""

    find: Callable[[F], Iterable[str]]
    """Say what was seen, once for each finding."""


def check(
    name: str, grade: Grade, looks_at: str, consequence: str, remedy: str, *, needs: tuple[str, ...] = ()
) -> Callable[[Callable[[F], Iterable[str]]], Check[F]]:
    """Make a check of the function below, which says what was seen; its module's checks are a table in their order."""
    return lambda find: Check(name, grade, looks_at, consequence, remedy, needs, find)


def known(fact: V | None) -> V:
    """Return a fact that a check needs: without it, it is not asked."""
    assert fact is not None
    return fact


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found in one database, or why it could not look."""

    check: str
    grade: Grade
    seen: str
    consequence: str = ""
    remedy: str = ""


def findings(checks: Sequence[Check[F]], facts: F) -> list[Finding]:
    """Return what the checks find in the facts, in their order; after them, what could not be looked at.

    What is known in part is looked at, and told of as such.
    """
    found: list[Finding] = []
    unseen: list[Finding] = []
    for check in checks:
        for name in check.needs:
            if name in facts.unknown:
                unseen.append(Finding(check.name, Grade.UNKNOWN, facts.unknown[name]))
                break
        if all(getattr(facts, name, True) is not None for name in check.needs):
            found += [
                Finding(check.name, check.grade, seen, check.consequence, check.remedy) for seen in check.find(facts)
            ]
    return found + unseen


# --- what both kinds of database have ---------------------------------------------------------------------------------

VERSION_CONSEQUENCE: Final = "Clients of this version refuse to open the store."
VERSION_REMEDY: Final = (
    "Older tables: run `txnstore migrate`. Newer ones: upgrade txnstore. If some are missing: restore a backup."
    " Others of these names: use another database, or another schema (--schema)."
)
COPY_CONSEQUENCE: Final = "The copy would act for its original on other databases, so it refuses to."
COPY_REMEDY: Final = (
    "`txnstore adopt` makes it a store of its own; `txnstore adopt --same` says that it is the original, moved."
)
#: Short enough for a `txnstore maintain --once` of each hour; all clients look every ten seconds.
UNMAINTAINED_SECONDS_MAX: Final = 7_200
UNMAINTAINED_CONSEQUENCE: Final = (
    "Once clients are at work: nothing that is old is deleted or compacted, and what a client that died has left open"
    " or decided holds readers back until somebody who may end it comes."
)
UNMAINTAINED_REMEDY: Final = (
    "If clients are at work there, they may not (their roles are limited), or were told not to"
    " (txnstore.maintenance=false): keep `txnstore maintain` running, on PostgreSQL as the role that owns the tables."
    " One of `txnstore roles grant coordinator` may do it too, and leaves the room of what was deleted to autovacuum."
    " Why something fails stands in the log of clients, and of `txnstore maintain --once`."
)


def wrong_version(names: Iterable[str], ours: frozenset[str], version: str | None, has_version: bool) -> Iterable[str]:
    """Say what is wrong with tables of these names, of which the version table says this."""
    present = ours & set(names)
    if not present:
        return
    if not has_version or "stores" not in present:
        yield f"tables of txnstore's names that txnstore did not make: {_some(present)}"
    elif version is not None and version != f"{SCHEMA_VERSION:04}":
        yield f"the tables are of version {version[:40]!r}, this txnstore is for {SCHEMA_VERSION:04}"
    elif version is not None and present != ours:
        yield f"tables are missing: {_some(ours - present)}"


def other_place(recorded: str | None, actual: str | None) -> Iterable[str]:
    """Say that the tables were made elsewhere, by the identities of the databases."""
    if recorded is not None and actual is not None and recorded != actual:
        yield f"the tables were made in {recorded}, and this is {actual}"


def unmaintained(seconds: int | None, failing: Iterable[Sequence[Any]]) -> Iterable[str]:
    """Say that nobody has done a duty of the maintenance for so long, or one of those that fail, each with its time."""
    if seconds is not None and seconds > UNMAINTAINED_SECONDS_MAX:
        yield f"nobody has done any of the maintenance for {seconds_text(seconds)}"
    for duty, failing_seconds in failing:
        if failing_seconds > UNMAINTAINED_SECONDS_MAX:
            yield f"it failed when it was last tried, and was last done {seconds_text(failing_seconds)} ago: {duty}"


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")  # noqa: PLR2004


def seconds_text(seconds: int) -> str:
    """Return a length of time for people."""
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} seconds"


def size_text(size_bytes: int) -> str:
    """Return a number of bytes for people."""
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= length:
            return f"{size_bytes / length:.1f} {unit}"
    return f"{size_bytes} bytes"
