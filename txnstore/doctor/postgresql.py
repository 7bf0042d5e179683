"""The checks of a PostgreSQL database, its server, the role that clients use, and the way there."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Final

from txnstore.db.backend import Limits
from txnstore.db.names import VERSION_TABLE, VIEWS
from txnstore.db.postgresql.backend import OLDEST_SERVER_VERSION
from txnstore.db.postgresql.commit_function import NAME, NAME_WITHIN
from txnstore.db.postgresql.facts import PostgreSQLFacts, Relation
from txnstore.db.roles.grants import kind_of_policy, views_for
from txnstore.db.roles.rights import CALLS_FUNCTIONS, Kind, Right, rights_of
from txnstore.db.schema import metadata
from txnstore.doctor.checks import (
    COPY_CONSEQUENCE,
    COPY_REMEDY,
    UNMAINTAINED_CONSEQUENCE,
    UNMAINTAINED_REMEDY,
    UNMAINTAINED_SECONDS_MAX,
    VERSION_CONSEQUENCE,
    VERSION_REMEDY,
    Check,
    Grade,
    check,
    known,
    other_place,
    seconds_text,
    size_text,
    unmaintained,
    wrong_version,
)

#: What is older may be forgotten; nothing of ours takes a minute.
LONG_SECONDS: Final = 300
#: A standby that is there answers within milliseconds.
STANDBY_SECONDS_MAX: Final = 10
DEAD_ROWS_MAX: Final = 10_000
UNUSED_BYTES_MAX: Final = 256 << 20
#: So many times what rows take may stand empty: tables of rows that change are made half full, and a segment of the log
#: is emptied once its last rows have gone.
ROOM_OF_ROWS_MAX: Final = 10
#: The header of a row, and where it stands.
_ROW_HEADER_BYTES: Final = 32
KEPT_WAL_BYTES_MAX: Final = 1 << 30
FREE_CONNECTIONS_MIN: Final = 10
#: PostgreSQL refuses new transactions at about 2,100 million.
XID_AGE_MAX: Final = 1_000_000_000
CLOCK_AHEAD_MS_MAX: Final = 5_000
#: What a producer's transaction may take by default, as long as an enlisted connection may be idle.
_TRANSACTION_MS: Final = 60_000
#: When PostgreSQL's versions get their last fixes, by their own plan.
LAST_FIXES: Final = {
    14: date(2026, 11, 12),
    15: date(2027, 11, 11),
    16: date(2028, 11, 9),
    17: date(2029, 11, 8),
    18: date(2030, 11, 14),
}
_OURS: Final = frozenset(str(table.name) for table in metadata.tables.values())
_READ_ONLY: Final = ("SELECT",)
_ROLE_SETTING: Final = "ALTER ROLE ... IN DATABASE ..., or ALTER DATABASE"
_RIGHTS_OF: Final = _OURS | {VERSION_TABLE, *VIEWS}


@check(
    "old-postgresql",
    Grade.PROBLEM,
    "the server's version",
    "The store refuses to open there.",
    "Upgrade the server.",
)
def _version(facts: PostgreSQLFacts) -> Iterator[str]:
    if facts.server_version < OLDEST_SERVER_VERSION:
        oldest = OLDEST_SERVER_VERSION // 10_000
        yield f"the server is PostgreSQL {facts.server_version // 10_000}, txnstore needs {oldest}"


@check(
    "end-of-life",
    Grade.ADVICE,
    "the server's version, and its clock: after the last fixes, as of "
    + ", ".join(f"{major} on {last}" for major, last in LAST_FIXES.items()),
    "Defects of the server that are found from then on stay, also those that damage data or let others in.",
    "Upgrade the server to a newer major version.",
    needs=("server_ms",),
)
def _end_of_life(facts: PostgreSQLFacts) -> Iterator[str]:
    major = facts.server_version // 10_000
    today = datetime.fromtimestamp(known(facts.server_ms) / 1000, UTC).date()
    if (last := LAST_FIXES.get(major)) is not None and today > last:
        yield f"PostgreSQL {major} has had no fixes since {last}"


@check(
    "index-defect",
    Grade.ADVICE,
    "the server's version: 14.0 to 14.3",
    "CREATE INDEX CONCURRENTLY and REINDEX CONCURRENTLY may leave an index that lacks rows.",
    "Upgrade to 14.4 or newer, and REINDEX what was made so.",
)
def _index_defect(facts: PostgreSQLFacts) -> Iterator[str]:
    if 140_000 <= facts.server_version < 140_004:  # noqa: PLR2004 - the versions with the defect
        yield f"the server is PostgreSQL 14.{facts.server_version % 10_000}"


@check(
    "encoding",
    Grade.PROBLEM,
    "server_encoding",
    "It does not hold all text, and the store refuses to open there.",
    "CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0.",
)
def _encoding(facts: PostgreSQLFacts) -> Iterator[str]:
    if facts.encoding != "UTF8":
        yield f"the database has the encoding {facts.encoding}"


@check(
    "replica",
    Grade.PROBLEM,
    "pg_is_in_recovery()",
    "Nothing can be written; readers see commits later, and their groups cannot be kept.",
    "Name the primary in the URL, or all hosts, of which libpq finds it:"
    " postgresql://user@one,two/database?target_session_attrs=read-write.",
    needs=("is_replica",),
)
def _replica(facts: PostgreSQLFacts) -> Iterator[str]:
    if facts.is_replica:
        yield "the server is in recovery: a standby"


def _is_on(facts: PostgreSQLFacts, name: str) -> bool:
    return _settings(facts).get(name, "on") != "off"


def _settings(facts: PostgreSQLFacts) -> Mapping[str, str]:
    return known(facts.settings)


def _number(facts: PostgreSQLFacts, name: str) -> int:
    return int(_settings(facts).get(name, "0"))


@check(
    "read-only",
    Grade.PROBLEM,
    "default_transaction_read_only",
    "Every write is refused (StoreReadOnly).",
    f"Take the setting back: {_ROLE_SETTING}.",
    needs=("settings",),
)
def _read_only(facts: PostgreSQLFacts) -> Iterator[str]:
    if _settings(facts).get("default_transaction_read_only") == "on":
        yield "default_transaction_read_only is on for this role in this database"


@check(
    "fsync",
    Grade.PROBLEM,
    "fsync, full_page_writes",
    "A crash of the machine may damage the database, whatever was acknowledged.",
    "Switch it on in postgresql.conf.",
    needs=("settings",),
)
def _fsync(facts: PostgreSQLFacts) -> Iterator[str]:
    for name in ("fsync", "full_page_writes"):
        if not _is_on(facts, name):
            yield f"{name} is off"


@check(
    "synchronous-commit",
    Grade.PROBLEM,
    "synchronous_commit",
    "txnstore's own commits wait for the disk all the same. What an application commits itself does not: rows of"
    " the outbox, offsets that are committed with its rows. A crash may lose them after they were acknowledged.",
    f"Leave it on for what writes to the store: {_ROLE_SETTING}.",
    needs=("settings",),
)
def _synchronous_commit(facts: PostgreSQLFacts) -> Iterator[str]:
    if not _is_on(facts, "synchronous_commit"):
        yield "synchronous_commit is off for this role in this database"


@check(
    "limits",
    Grade.PROBLEM,
    "statement_timeout, lock_timeout, idle_in_transaction_session_timeout, transaction_timeout",
    "txnstore sets limits of its own, but cannot lengthen transaction_timeout once it runs; there are none for a"
    " transaction that is one statement, nor on connections of the application's (enlist, outbox): these are ended"
    " in the middle, and the transaction is aborted.",
    f"Let it be longer, at least 10 s for statements and locks and 60 s for transactions: {_ROLE_SETTING}.",
    needs=("settings",),
)
def _limits(facts: PostgreSQLFacts) -> Iterator[str]:
    ours = Limits()
    enough = {
        "statement_timeout": ours.lock_timeout_ms,
        "lock_timeout": ours.idle_timeout_ms,
        "idle_in_transaction_session_timeout": _TRANSACTION_MS,
        "transaction_timeout": _TRANSACTION_MS,
    }
    for name, enough_ms in enough.items():
        if 0 < _number(facts, name) < enough_ms:
            yield f"{name} is {_number(facts, name)} ms for this role in this database"


@check(
    "cut-off",
    Grade.PROBLEM,
    "whether statement_timeout, transaction_timeout or idle_session_timeout ends a question of the doctor's",
    "What could not be asked is unknown. Clients are ended in the same way, but for what has a limit of its own.",
    f"Let the limit be longer, see limits: {_ROLE_SETTING}.",
)
def _cut_off(facts: PostgreSQLFacts) -> Iterator[str]:
    if facts.cut_off is not None:
        yield f"the server has ended a question of the doctor's: {facts.cut_off}"


@check(
    "idle-sessions",
    Grade.ADVICE,
    "idle_session_timeout",
    "Connections that wait for work or for news are ended, and made again: readers hear of commits later then.",
    f"Switch it off for this role: {_ROLE_SETTING}.",
    needs=("settings",),
)
def _idle_limit(facts: PostgreSQLFacts) -> Iterator[str]:
    if _number(facts, "idle_session_timeout"):
        yield f"idle_session_timeout is {_number(facts, 'idle_session_timeout')} ms for this role in this database"


@check(
    "isolation",
    Grade.ADVICE,
    "default_transaction_isolation",
    "txnstore says what it needs, but a commit then takes several requests instead of one. Transactions of an"
    " application that write to the outbox, or are enlisted, fail with 40001 where others write at the same time.",
    f"Leave it at read committed, also for txnstore's own role: {_ROLE_SETTING}.",
    needs=("settings",),
)
def _isolation(facts: PostgreSQLFacts) -> Iterator[str]:
    isolation = _settings(facts).get("default_transaction_isolation", "read committed")
    if isolation != "read committed":
        yield f"default_transaction_isolation is {isolation!r} for this role in this database"


@check(
    "no-prepared-transactions",
    Grade.ADVICE,
    "max_prepared_transactions: 0, as PostgreSQL comes",
    "The database cannot take part in transactions of a store elsewhere: enlist() refuses its connections.",
    "Where it is to: set it to the number of connections that are enlisted at once, and restart the server.",
    needs=("settings",),
)
def _no_votes(facts: PostgreSQLFacts) -> Iterator[str]:
    if _number(facts, "max_prepared_transactions") == 0:
        yield "max_prepared_transactions is 0"


@check(
    "prepared-transactions-used-up",
    Grade.PROBLEM,
    "max_prepared_transactions, and pg_prepared_xacts",
    "The next transaction with a share in this database is aborted.",
    "End those that were left behind (`txnstore maintain --participant URL`); set it higher.",
    needs=("settings", "prepared"),
)
def _few_votes(facts: PostgreSQLFacts) -> Iterator[str]:
    allowed = _number(facts, "max_prepared_transactions")
    if allowed and len(known(facts.prepared)) >= allowed:
        yield f"all {allowed} of max_prepared_transactions are in use"


@check(
    "autovacuum",
    Grade.PROBLEM,
    "autovacuum, track_counts, and the options of the store's tables",
    "Dead rows stay: tables grow with every commit, and each one becomes slower.",
    "Switch it on.",
    needs=("settings",),
)
def _autovacuum(facts: PostgreSQLFacts) -> Iterator[str]:
    for name in ("autovacuum", "track_counts"):
        if not _is_on(facts, name):
            yield f"{name} is off"
    for relation in facts.relations or ():
        if relation.is_not_vacuumed and relation.name in _OURS:
            yield f"autovacuum is switched off for {relation.name}"


@check(
    "pooler",
    Grade.ADVICE,
    "which process of the server answers, on two connections in turn",
    "A pooler gives sessions out for a transaction. Everything works, but nobody is woken by commits: readers look"
    " by themselves, up to 200 ms later.",
    "Give consumers a URL without the pooler, or one in session mode.",
    needs=("sessions_are_shared",),
)
def _pooler(facts: PostgreSQLFacts) -> Iterator[str]:
    if facts.sessions_are_shared:
        yield "two clients were given the same session of the server, one after the other"


@check(
    "connections",
    Grade.PROBLEM,
    f"max_connections, CONNECTION LIMIT of database and role: less than {FREE_CONNECTIONS_MIN} left",
    "Clients cannot connect (StoreUnavailable): each has up to three connections at work, and one that listens.",
    "Set the limit higher, or put a pooler before the server.",
    needs=("settings", "connections"),
)
def _connections(facts: PostgreSQLFacts) -> Iterator[str]:
    reserved = 0 if facts.is_superuser else _number(facts, "superuser_reserved_connections")
    reserved += 0 if facts.is_superuser else _number(facts, "reserved_connections")
    limits = (
        ("the server", _number(facts, "max_connections") - reserved, facts.connections),
        ("the database", facts.connection_limit, facts.database_connections),
        ("the role", facts.role_connection_limit, facts.role_connections),
    )
    for whose, limit, used in limits:
        if limit is not None and used is not None and limit >= 0 and limit - used < FREE_CONNECTIONS_MIN:
            yield f"{max(0, limit - used)} of {limit} connections of {whose} are free"


@check(
    "wraparound",
    Grade.PROBLEM,
    f"age(datfrozenxid): more than {XID_AGE_MAX:,}",
    "PostgreSQL takes no more writes at about 2,100 million.",
    "End what keeps old rows (see snapshots, prepared-transactions, replication-slots), and VACUUM FREEZE.",
    needs=("oldest_xid_age",),
)
def _wraparound(facts: PostgreSQLFacts) -> Iterator[str]:
    if (age := known(facts.oldest_xid_age)) > XID_AGE_MAX:
        yield f"the oldest transaction id of the database is {age:,} transactions old"


@check(
    "clock",
    Grade.ADVICE,
    f"clock_timestamp(), beside this machine's clock: more than {CLOCK_AHEAD_MS_MAX // 1000} s apart",
    "Timeouts and retention go by the server's clock, timestamps of records by their producer's. Records may go too"
    " early or too late, and those that are an hour ahead are refused.",
    "Let both keep time by NTP.",
    needs=("clock_ahead_ms",),
)
def _clock(facts: PostgreSQLFacts) -> Iterator[str]:
    ahead_ms = known(facts.clock_ahead_ms)
    if abs(ahead_ms) > CLOCK_AHEAD_MS_MAX:
        way = "ahead of" if ahead_ms > 0 else "behind"
        yield f"the server's clock is {seconds_text(abs(ahead_ms) // 1000)} {way} this machine's"


@check(
    "tls",
    Grade.PROBLEM,
    "the host, and sslmode",
    "Whoever is on the way can read and change what is sent, and pose as the server.",
    "Add ?sslmode=verify-full&sslrootcert=FILE to the URL.",
)
def _tls(facts: PostgreSQLFacts) -> Iterator[str]:
    if is_remote(facts.host) and facts.sslmode != "verify-full":
        yield f"the server is on another machine, and sslmode is {facts.sslmode}"


def is_remote(host: str) -> bool:
    """Return whether a host, as libpq knows it, is another machine than this one."""
    if not host or host.startswith(("/", "@")) or host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


@check(
    "snapshots",
    Grade.ADVICE,
    f"pg_stat_activity: a snapshot for more than {seconds_text(LONG_SECONDS)}",
    "What was deleted or replaced since keeps its room: tables grow by all that is written; commits become slower.",
    "Find out what it is. A backup (pg_dump) or a vacuum ends by itself; of what is stuck or forgotten, SELECT"
    " pg_terminate_backend(PID) ends the session, and idle_in_transaction_session_timeout those that idle.",
    needs=("long_sessions",),
)
def _snapshots(facts: PostgreSQLFacts) -> Iterator[str]:
    for session in known(facts.long_sessions):
        if session.age_seconds > LONG_SECONDS:
            yield (
                f"session {session.pid} of {session.role or 'the server'} ({session.application or 'no name'},"
                f" {session.state}) keeps a snapshot for {seconds_text(session.age_seconds)}"
            )


@check(
    "prepared-transactions",
    Grade.PROBLEM,
    f"pg_prepared_xacts: for more than {seconds_text(LONG_SECONDS)}",
    "It keeps its locks, and dead rows, until somebody ends it, also after a restart of the server.",
    "Of txnstore (txnstore_STORE_...): `txnstore maintain --participant URL` of that store; by hand only where it"
    " is a copy that was adopted; others: ask their owner.",
    needs=("prepared",),
)
def _prepared(facts: PostgreSQLFacts) -> Iterator[str]:
    for one in known(facts.prepared):
        if one.age_seconds > LONG_SECONDS:
            owner = one.owner or "a role that was dropped"
            yield (
                f"{one.gid!r} of {owner}, in the database {one.database}, is prepared for"
                f" {seconds_text(one.age_seconds)}"
            )


@check(
    "replication-slots",
    Grade.ADVICE,
    f"pg_replication_slots that nobody uses, with dead rows or more than {size_text(KEPT_WAL_BYTES_MAX)}",
    "The disk fills with what is kept for a reader that does not come.",
    "pg_drop_replication_slot(NAME), if it will not come again.",
    needs=("slots",),
)
def _slots(facts: PostgreSQLFacts) -> Iterator[str]:
    for slot in known(facts.slots):
        kept = slot.kept_wal_bytes or 0
        if not slot.is_active and (slot.keeps_rows or kept > KEPT_WAL_BYTES_MAX):
            what = "dead rows and " if slot.keeps_rows else ""
            yield f"the replication slot {slot.name} is used by nobody and keeps {what}{size_text(kept)} of the log"


@check(
    "standby-not-awaited",
    Grade.ADVICE,
    "pg_stat_replication, synchronous_commit",
    "After a failover to it the last commits may be missing that were acknowledged here.",
    "Where that must not be: name it in synchronous_standby_names, and leave synchronous_commit on.",
    needs=("standbys", "settings"),
)
def _standbys(facts: PostgreSQLFacts) -> Iterator[str]:
    # Of one that says off, the check of synchronous_commit tells.
    standbys = known(facts.standbys)
    is_local = _settings(facts).get("synchronous_commit") == "local"
    names = ", ".join(standby.name for standby in standbys)
    if is_local and names:
        yield f"a standby follows ({names}), and synchronous_commit is local"
    elif names and not any(standby.sync_state in ("sync", "quorum") for standby in standbys):
        yield f"a standby follows ({names}), and none is named in synchronous_standby_names"


@check(
    "standby-awaited",
    Grade.PROBLEM,
    f"pg_stat_activity: a commit that waits for a standby for more than {seconds_text(STANDBY_SECONDS_MAX)}",
    "Commits return when the standby has them. Until then they keep their locks, and all others wait for those.",
    "Bring the standby back, or take it out of synchronous_standby_names and reload. Do not cancel what waits: it"
    " would be acknowledged without the standby.",
    needs=("standby_wait_seconds",),
)
def _standby_wait(facts: PostgreSQLFacts) -> Iterator[str]:
    if (wait_seconds := known(facts.standby_wait_seconds)) > STANDBY_SECONDS_MAX:
        yield f"a commit waits for a standby for {seconds_text(wait_seconds)}"


@check(
    "dead-rows",
    Grade.ADVICE,
    f"pg_stat_all_tables: more than {DEAD_ROWS_MAX:,}, and more than that live",
    "Statements pass over them: commits and reads become slower.",
    "VACUUM the table; see that nothing keeps them (snapshots, prepared-transactions, replication-slots).",
    needs=("relations",),
)
def _dead_rows(facts: PostgreSQLFacts) -> Iterator[str]:
    for relation in known(facts.relations):
        if relation.dead_rows > DEAD_ROWS_MAX and relation.dead_rows > relation.live_rows:
            yield f"{relation.name} has {relation.dead_rows:,} dead rows, and {relation.live_rows:,} that live"


@check(
    "unused-room",
    Grade.ADVICE,
    f"pg_relation_size of tables and indexes: more than {size_text(UNUSED_BYTES_MAX)}, and {ROOM_OF_ROWS_MAX} times"
    " what their rows take",
    "It is empty: new rows use it, but it is not given back, and whoever reads the whole passes over it.",
    "If the disk needs it: REINDEX INDEX CONCURRENTLY; of a table VACUUM FULL when no client is at work, for it"
    " locks the table. See that nothing keeps dead rows (snapshots, prepared-transactions, replication-slots).",
    needs=("rooms",),
)
def _unused(facts: PostgreSQLFacts) -> Iterator[str]:
    for room in known(facts.rooms):
        needed_bytes = room.rows * (room.row_bytes + _ROW_HEADER_BYTES)
        if room.size_bytes > UNUSED_BYTES_MAX and room.size_bytes > ROOM_OF_ROWS_MAX * needed_bytes:
            yield (
                f"{room.name} takes {size_text(room.size_bytes)}, where {room.rows:,} rows need"
                f" {size_text(needed_bytes)} at most"
            )


@check(
    "no-schema",
    Grade.PROBLEM,
    "CREATE on the database, where there is no store yet",
    "No store can be made there by this role.",
    "Run `txnstore migrate` as a role that may, or CREATE SCHEMA ... AUTHORIZATION for this one.",
    needs=("relations", "may_create"),
)
def _may_make(facts: PostgreSQLFacts) -> Iterator[str]:
    if not facts.may_create and not (facts.relations or facts.may_use_schema):
        yield f"there is no schema {facts.schema}, and this role may make none in the database"


@check(
    "rights",
    Grade.PROBLEM,
    "USAGE on the schema, rights on tables and views, EXECUTE on functions, as far as what `txnstore roles grant`"
    " has made of the role needs them",
    "What needs them is refused (PermissionDenied).",
    "Of a kind of `txnstore roles`: grant that again, as after a migration. Otherwise GRANT them to the role, if"
    " its programs are to do more than it may.",
    needs=("relations", "policies"),
)
def _rights(facts: PostgreSQLFacts) -> Iterator[str]:
    if facts.may_use_schema is False:
        yield f"this role may not use the schema {facts.schema}"
        return
    kinds = kinds_of(facts)
    who = f"this role, {kinds_text(kinds)}," if kinds else "this role"
    refused: dict[str, list[str]] = {}
    for relation in facts.relations or ():
        # Only the owner of the tables migrates them.
        everything: Sequence[Right] = _READ_ONLY if relation.name == VERSION_TABLE else relation.missing_rights
        wanted: Iterable[Right] = _granted(facts, relation.name) if kinds else everything
        missing = ", ".join(_missing(relation, wanted))
        if relation.name in _RIGHTS_OF and missing:
            refused.setdefault(missing, []).append(relation.name)
    for rights, names in refused.items():
        yield f"{who} has no right to {rights} on {', '.join(names)}"
    refused_functions = facts.refused_functions or ()
    if kinds:
        called = () if kinds.isdisjoint(CALLS_FUNCTIONS) else (NAME, NAME_WITHIN)
        refused_functions = [name for name in refused_functions if name in called]
    if refused_functions:
        yield f"{who} may not call {', '.join(refused_functions)}"


def kinds_of(facts: PostgreSQLFacts) -> frozenset[Kind]:
    """Return what this role was granted to be; it is meant to lack the rest."""
    return frozenset(kind for name, _ in facts.policies if (kind := kind_of_policy(name)) is not None)


def kinds_text(kinds: frozenset[Kind]) -> str:
    """Return kinds of a role for people."""
    return f"a {' and '.join(sorted(kinds))}"


def _granted(facts: PostgreSQLFacts, name: str) -> Iterator[Right]:
    """Return what the kinds of this role may do with a table or view."""
    for policy, limits in facts.policies:
        kind = kind_of_policy(policy)
        if kind is None:
            continue
        yield from rights_of(kind).get(name, ())
        if name in views_for(kind, facts.server_version, is_limited=limits is not None):
            yield from _READ_ONLY


def _missing(relation: Relation, wanted: Iterable[Right]) -> Iterable[str]:
    """Return those of the rights that this role does not have, once each."""
    missing = []
    for right in wanted:
        name, columns = right if isinstance(right, tuple) else (right, ())
        lacking = [column for column in columns if f"{name} {column}" not in relation.column_rights]
        if name in relation.missing_rights and (lacking or not columns):
            missing.append(f"{name} ({', '.join(lacking)})" if lacking else name)
    return dict.fromkeys(missing)


@check(
    "tables",
    Grade.PROBLEM,
    "the version table and the names of tables",
    VERSION_CONSEQUENCE,
    VERSION_REMEDY,
    needs=("relations",),
)
def _tables(facts: PostgreSQLFacts) -> Iterator[str]:
    names = [relation.name for relation in known(facts.relations)]
    yield from wrong_version(names, _OURS, facts.table_version, VERSION_TABLE in names)


@check(
    "nobody-maintains",
    Grade.ADVICE,
    f"maintenance_duties: when any was last done, or one that fails: {seconds_text(UNMAINTAINED_SECONDS_MAX)} ago",
    UNMAINTAINED_CONSEQUENCE,
    UNMAINTAINED_REMEDY,
    needs=("unmaintained_seconds",),
)
def _unmaintained(facts: PostgreSQLFacts) -> Iterator[str]:
    yield from unmaintained(facts.unmaintained_seconds, facts.failing_duties)


@check(
    "copy",
    Grade.ADVICE,
    "where the tables were made, and where they are: system identifier, database and table",
    COPY_CONSEQUENCE,
    COPY_REMEDY,
)
def _copy(facts: PostgreSQLFacts) -> Iterator[str]:
    yield from other_place(facts.recorded_identity, facts.identity)


POSTGRESQL_CHECKS: Final = tuple(each for each in vars().values() if isinstance(each, Check))
