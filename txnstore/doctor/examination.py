"""The examination of one database: its facts are read, and the checks of its kind look at them.

It changes nothing and makes nothing, and works in a database in which there is no store yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from txnstore.db.names import DEFAULT_SCHEMA, VERSION_TABLE
from txnstore.db.opening import check_schema_name
from txnstore.db.url import DatabaseUrl, parse_url
from txnstore.doctor.checks import Finding, Grade, findings
from txnstore.errors import TxnStoreError

_UNREACHABLE_REMEDY: Final = "See that the server is up, and that host, port, database, user and password are right."


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found in one database."""

    url: DatabaseUrl
    """Its text forms show no password."""

    findings: Sequence[Finding]
    """Problems and advice, and last what could not be looked at."""

    has_store: bool | None
    """Whether tables of txnstore are there; None: nobody could look."""

    role: str = ""
    """What `txnstore roles grant` has made of the role that looked, as `a producer`; empty: nothing."""

    def count(self, grade: Grade) -> int:
        """Return how many findings there are of this grade."""
        return sum(finding.grade is grade for finding in self.findings)


def examine(url: str, *, schema: str = DEFAULT_SCHEMA) -> Examination:
    """Return what would bite a store in the database at `url`, in the `schema` on PostgreSQL.

    A database that cannot be connected to is a finding.

    Raises:
        InvalidUrl: the URL cannot be understood, or no store has a schema of this name.
    """
    address = parse_url(url)
    check_schema_name(schema)
    if address.kind == "sqlite":
        return _examine_sqlite(address)
    return _examine_postgresql(address, schema)


def _examine_sqlite(address: DatabaseUrl) -> Examination:
    from txnstore.db.sqlite.facts import read_sqlite_facts
    from txnstore.doctor.sqlite import SQLITE_CHECKS

    facts = read_sqlite_facts(address, version_table=VERSION_TABLE)
    is_dark = facts.tables is None and bool(facts.size_bytes or facts.damage or "file" in facts.unknown)
    has_store = None if is_dark else "stores" in (facts.tables or ())
    return Examination(address, findings(SQLITE_CHECKS, facts), has_store)


def _examine_postgresql(address: DatabaseUrl, schema: str) -> Examination:
    # Its driver is slow to import.
    from txnstore.db.postgresql.facts import read_postgresql_facts
    from txnstore.doctor.postgresql import POSTGRESQL_CHECKS, kinds_of, kinds_text

    try:
        facts = read_postgresql_facts(address, schema, version_table=VERSION_TABLE)
    except TxnStoreError as error:
        consequence = "No client comes to the store."
        found = [Finding("connection", Grade.PROBLEM, str(error), consequence, _UNREACHABLE_REMEDY)]
        return Examination(address, found, has_store=None)
    known = facts.relations
    has_store = None if known is None else any(relation.name == "stores" for relation in known)
    role = kinds_text(kinds) if (kinds := kinds_of(facts)) else ""
    return Examination(address, findings(POSTGRESQL_CHECKS, facts), has_store, role)
