"""The class of every error that a driver raises: both databases, at each stage of a database transaction."""

from __future__ import annotations

import sqlite3
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg.pq import DiagnosticField, ExecStatus
from sqlalchemy.exc import DBAPIError

from txnstore.db.backend import Stage
from txnstore.db.postgresql import backend as postgresql
from txnstore.db.postgresql.backend import PostgreSQLBackend
from txnstore.db.postgresql.connecting import connecting_error
from txnstore.db.postgresql.exchange import AnswerKind, ServerAnswer, Statement, _Conversation
from txnstore.db.sqlite import backend as sqlite
from txnstore.db.sqlite.backend import SQLiteBackend
from txnstore.errors import (
    ForeignSchema,
    InvalidUrl,
    OutcomeUnknown,
    PermissionDenied,
    Recovery,
    StatementFailed,
    StatementTimedOut,
    StoreBusy,
    StoreDamaged,
    StoreFull,
    StoreMoved,
    StoreReadOnly,
    StoreUnavailable,
    TransactionPoisoned,
    TxnStoreError,
    WriteConflict,
)

#: SQLSTATE, the error before COMMIT, and whether the same at COMMIT leaves the outcome open.
POSTGRESQL: list[tuple[str, type[TxnStoreError], bool]] = [
    ("08000", StoreUnavailable, True),
    ("08003", StoreUnavailable, True),
    ("08006", StoreUnavailable, True),
    ("08007", StoreUnavailable, True),
    ("08P01", StoreUnavailable, True),
    ("0A000", StatementFailed, False),
    ("22003", StatementFailed, False),
    ("22P05", StatementFailed, False),
    ("23505", StatementFailed, False),
    ("23514", StatementFailed, False),
    ("25001", StatementFailed, False),
    ("25006", StoreReadOnly, False),
    ("25P02", TransactionPoisoned, False),
    ("25P03", StoreUnavailable, True),
    ("25P04", StoreUnavailable, True),
    ("28000", PermissionDenied, False),
    ("28P01", PermissionDenied, False),
    ("3D000", InvalidUrl, False),
    ("3F000", ForeignSchema, False),
    ("40001", WriteConflict, False),
    ("40003", StoreUnavailable, True),
    ("40P01", WriteConflict, False),
    ("42501", PermissionDenied, False),
    ("42703", ForeignSchema, False),
    ("42P01", ForeignSchema, False),
    ("53100", StoreFull, False),
    ("53200", StoreUnavailable, False),
    ("53300", StoreUnavailable, False),
    ("53400", StoreUnavailable, False),
    ("55P03", StoreBusy, False),
    ("TXN02", StoreMoved, False),
    ("57014", StatementTimedOut, False),
    ("57P01", StoreUnavailable, True),
    ("57P02", StoreUnavailable, True),
    ("57P03", StoreUnavailable, True),
    ("57P05", StoreUnavailable, True),
    ("58000", StoreUnavailable, True),
    ("58030", StoreUnavailable, True),
    ("99999", StatementFailed, False),
    ("XX000", StatementFailed, True),
    ("XX001", StoreDamaged, True),
    ("XX002", StoreDamaged, True),
]
#: SQLite's name, the error before COMMIT, and whether the same at COMMIT leaves the outcome open.
SQLITE: list[tuple[str, type[TxnStoreError], bool]] = [
    ("SQLITE_AUTH", PermissionDenied, False),
    ("SQLITE_BUSY", StoreBusy, False),
    ("SQLITE_BUSY_RECOVERY", StoreBusy, False),
    ("SQLITE_BUSY_SNAPSHOT", StoreBusy, False),
    ("SQLITE_CANTOPEN", StoreUnavailable, True),
    ("SQLITE_CONSTRAINT_CHECK", StatementFailed, False),
    ("SQLITE_CONSTRAINT_FOREIGNKEY", StatementFailed, False),
    ("SQLITE_CORRUPT", StoreDamaged, True),
    ("SQLITE_CORRUPT_INDEX", StoreDamaged, True),
    ("SQLITE_ERROR", StatementFailed, False),
    ("SQLITE_FULL", StoreFull, False),
    ("SQLITE_INTERRUPT", StatementTimedOut, False),
    ("SQLITE_IOERR", StoreUnavailable, True),
    ("SQLITE_IOERR_FSYNC", StoreUnavailable, True),
    ("SQLITE_IOERR_WRITE", StoreUnavailable, True),
    ("SQLITE_LOCKED", StoreBusy, False),
    ("SQLITE_MISUSE", StatementFailed, False),
    ("SQLITE_NOMEM", StoreUnavailable, True),
    ("SQLITE_NOTADB", StoreDamaged, True),
    ("SQLITE_PERM", PermissionDenied, False),
    ("SQLITE_PROTOCOL", StoreBusy, False),
    ("SQLITE_READONLY", StoreReadOnly, False),
    ("SQLITE_READONLY_DBMOVED", StoreReadOnly, False),
    ("SQLITE_TOOBIG", StatementFailed, False),
]
RETRIABLE = {StoreBusy, StoreUnavailable, WriteConflict, StatementTimedOut, TransactionPoisoned}
BEFORE_COMMIT = pytest.mark.parametrize("stage", [Stage.CONNECT, Stage.STATEMENT])


def from_postgresql(sqlstate: str | None, kind: type[psycopg.Error] = psycopg.OperationalError) -> DBAPIError:
    error = kind("a text of the driver")
    error.sqlstate = sqlstate
    return DBAPIError("SELECT secret", None, error)


def from_sqlite(name: str | None) -> DBAPIError:
    error = sqlite3.OperationalError("a text of the driver")
    if name is not None:
        error.sqlite_errorname = name
    return DBAPIError("SELECT secret", None, error)


@BEFORE_COMMIT
@pytest.mark.parametrize(("sqlstate", "kind"), [(sqlstate, kind) for sqlstate, kind, _ in POSTGRESQL])
def test_before_commit_postgresql_has_changed_nothing(sqlstate, kind, stage):
    translated = PostgreSQLBackend().translate(from_postgresql(sqlstate), stage)
    assert type(translated) is kind
    assert not translated.outcome_unknown
    assert translated.retriable == (kind in RETRIABLE)
    assert "nothing was changed" in str(translated)


@pytest.mark.parametrize(("sqlstate", "kind", "is_unknown"), POSTGRESQL)
def test_at_commit_some_answers_of_postgresql_leave_the_outcome_open(sqlstate, kind, is_unknown):
    translated = PostgreSQLBackend().translate(from_postgresql(sqlstate), Stage.COMMIT)
    assert type(translated) is (OutcomeUnknown if is_unknown else kind)
    assert translated.outcome_unknown == is_unknown
    assert translated.recovery is (Recovery.RESOLVE if is_unknown else kind.recovery)
    assert ("nothing was changed" in str(translated)) == (not is_unknown)


@pytest.mark.parametrize(("severity", "is_unknown"), [(b"PANIC", True), (b"FATAL", True), (b"ERROR", False)])
@pytest.mark.parametrize(("sqlstate", "kind"), [("53100", StoreFull), ("42501", PermissionDenied)])
def test_a_server_that_stops_at_commit_may_have_written_it(sqlstate, kind, severity, is_unknown):
    """A log that cannot be extended, for the disk is full or the file not its own, ends the server: PANIC."""
    error = psycopg.OperationalError("", info={DiagnosticField.SEVERITY_NONLOCALIZED: severity})
    error.sqlstate = sqlstate
    backend = PostgreSQLBackend()
    assert type(backend.translate_driver_error(error, Stage.COMMIT)) is (OutcomeUnknown if is_unknown else kind)
    assert type(backend.translate_driver_error(error, Stage.STATEMENT)) is kind


@pytest.mark.parametrize(
    ("severity", "kind"),
    [(b"PANIC", AnswerKind.UNKNOWN), (b"FATAL", AnswerKind.UNKNOWN), (b"ERROR", AnswerKind.REFUSED)],
)
def test_a_server_that_stops_may_have_ended_a_prepared_transaction(severity, kind):
    told = {DiagnosticField.SQLSTATE: b"53100", DiagnosticField.SEVERITY_NONLOCALIZED: severity}
    # What libpq makes of the server's answer.
    result = SimpleNamespace(status=ExecStatus.FATAL_ERROR, error_field=told.get)
    driver: Any = SimpleNamespace(pgconn=None)
    conversation = _Conversation(Statement(driver, "COMMIT PREPARED 'a'", "COMMIT PREPARED"))
    conversation._take(result)
    conversation._conclude()
    assert conversation.answer == ServerAnswer(kind, "53100")


def test_a_connection_that_ends_without_a_word_is_unknown_only_at_commit():
    backend = PostgreSQLBackend()
    for kind in (psycopg.OperationalError, psycopg.InterfaceError):
        assert type(backend.translate(from_postgresql(None, kind), Stage.STATEMENT)) is StoreUnavailable
        assert type(backend.translate(from_postgresql(None, kind), Stage.COMMIT)) is OutcomeUnknown


def test_what_the_driver_refuses_to_send_is_no_broken_connection():
    translated = PostgreSQLBackend().translate(from_postgresql(None, psycopg.DataError), Stage.STATEMENT)
    assert type(translated) is StatementFailed


@pytest.mark.parametrize(
    "text",
    [
        "FATAL:  sorry, too many clients already",
        "FATAL:  remaining connection slots are reserved for roles with the SUPERUSER attribute",
        'FATAL:  too many connections for role "shop"',
        'FATAL:  too many connections for database "shop"',
        "FATAL:  the database system is starting up",
        "FATAL:  the database system is shutting down",
        "Connection refused",
    ],
)
def test_a_server_that_takes_no_connection_now_may_take_one_later(text):
    assert type(not_connected(text)) is StoreUnavailable


def not_connected(text):
    error = psycopg.OperationalError(f'connection failed: connection to server at "role" failed: {text}')
    return PostgreSQLBackend().translate(DBAPIError(None, None, error), Stage.CONNECT)


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        ("session is read-only", StoreUnavailable, "target_session_attrs"),
        ("session is not read-only", StoreUnavailable, "target_session_attrs"),
        ("server is in hot standby mode", StoreUnavailable, "target_session_attrs"),
        ("server is not in hot standby mode", StoreUnavailable, "target_session_attrs"),
        ("FATAL:  the database system is starting up", StoreUnavailable, "is starting, stopping or recovering"),
        ("FATAL:  the database system is in recovery mode", StoreUnavailable, "is starting, stopping or recovering"),
        ("FATAL:  the database system is not yet accepting connections", StoreUnavailable, "starting, stopping"),
        ("FATAL:  the database system is not accepting connections", StoreUnavailable, "starting, stopping"),
        ("FATAL:  connection requires a valid client certificate", PermissionDenied, "does not let this user in"),
        ('private key file "/k" has group or world access', InvalidUrl, "an option of the PostgreSQL URL"),
        ("Connection refused", StoreUnavailable, "is the server there and the address right"),
    ],
)
def test_who_gets_no_connection_is_told_why(text, kind, told):
    error = not_connected(text)
    assert type(error) is kind
    assert told in str(error)


ASKED = 'connection failed: connection to server at "db" (10.0.0.1), port 5432 failed: '


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f'{ASKED}FATAL:  password authentication failed for user "too many clients"', PermissionDenied),
        (f'{ASKED}FATAL:  database "role "a" is not permitted" does not exist', InvalidUrl),
        (f'{ASKED}FATAL:  role "database "a" does not exist" does not exist', PermissionDenied),
        (
            'connection to server at "unsupported.example" (10.0.0.1), port 5 failed: Connection refused',
            StoreUnavailable,
        ),
        ('connection to server on socket "/certificate file/.s.PGSQL.5" failed: No such file', StoreUnavailable),
        ("failed to resolve host 'unsupported.example': [Errno -2] Name or service not known", StoreUnavailable),
        # What a login trigger of the database raises.
        (f"{ASKED}FATAL:  shop: invalid licence number\nCONTEXT:  PL/pgSQL function", StoreUnavailable),
        (f"{ASKED}FATAL:  closed on Sundays\nDETAIL:  no such user then", StoreUnavailable),
        (f"{ASKED}FATAL:  closed\nno pg_hba.conf entry helps", StoreUnavailable),
    ],
)
def test_names_and_texts_of_others_are_not_why_there_is_no_connection(text, kind):
    assert type(connecting_error(text)) is kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f'{ASKED}FATAL:  Peer authentication failed for user "a"', PermissionDenied),
        (f"{ASKED}FATAL:  SASL authentication failed", PermissionDenied),
        (f"{ASKED}fe_sendauth: no password supplied", PermissionDenied),
        (f'{ASKED}FATAL:  role "a" is not permitted to log in', PermissionDenied),
        (f'{ASKED}FATAL:  no pg_hba.conf entry for host "b", user "a", database "c", no encryption', PermissionDenied),
        (f'{ASKED}FATAL:  permission denied for database "c"\nDETAIL:  User does not have CONNECT.', PermissionDenied),
        (f"{ASKED}FATAL:  server login failed: FATAL password authentication failed for user", PermissionDenied),
        (f"{ASKED}FATAL:  no such user: a", PermissionDenied),
        (f"{ASKED}FATAL:  no such database: c", InvalidUrl),
        (f'{ASKED}FATAL:  database "c" does not exist', InvalidUrl),
        (f"{ASKED}server does not support SSL, but SSL was required", InvalidUrl),
        (f'{ASKED}server certificate for "b" (and 1 other name) does not match host name "d"', InvalidUrl),
        (f'{ASKED}server certificate for "b" does not match host name "d"', InvalidUrl),
        ('invalid integer value "x" for connection option "port"', InvalidUrl),
        ('connection is bad: invalid sslmode value: "x"', InvalidUrl),
        ('definition of service "x" not found', InvalidUrl),
        ("connection failed: FATAL:  password authentication failed", PermissionDenied),
        (
            f"Failures:\n- host: 'unsupported': {ASKED}Connection refused\n- host: 'b': {ASKED}FATAL:  no such user",
            PermissionDenied,
        ),
    ],
)
def test_each_reason_for_no_connection_is_known_in_its_place(text, kind):
    assert type(connecting_error(text)) is kind


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{ASKED}Connection refused\n\tIs the server running?", "address right? (db:5432: refused)"),
        (f"{ASKED}timeout expired", "(db:5432: no answer in time)"),
        (f"{ASKED}something else", "address right? (db:5432)"),
        ("failed to resolve host 'nowhere': [Errno -2] Name or service not known", "(nowhere: there is no host of th"),
        (
            'connection is bad: connection to server on socket "/run/.s.PGSQL.5432" failed: No such file or directory',
            "(/run/.s.PGSQL.5432: there is no such socket)",
        ),
        (f'{ASKED}FATAL:  database "c" does not exist', 'has no database "c"; create it first (db:5432)'),
        (f"{ASKED}FATAL:  no such database: c", "has no database c; create it first (db:5432)"),
        (f"{ASKED}server does not support SSL, but SSL was required", "the server offers no TLS"),
        (f'{ASKED}root certificate file "/r" does not exist\nEither provide the file', "there is no root certificate"),
        (f'{ASKED}FATAL:  password authentication failed for user "refused"', "does not let this user in (db:5432)"),
        (f'{ASKED}FATAL:  unrecognized configuration parameter "a"', "does not take a setting among the URL's options"),
        (
            f"failed: Failures:\n- host: 'b': {ASKED}Connection refused\n- host: 'b': {ASKED}timeout expired",
            "(db:5432: refused)",
        ),
        (
            (
                'connection to server at "::1", port 5432 failed: Connection refused\n'
                'connection to server at "b" (10.0.0.2), port 5433 failed: timeout expired\n'
                'connection to server at "c", port 5434 failed: something else'
            ),
            "([::1]:5432: refused, b:5433: no answer in time, c:5434)",
        ),
    ],
)
def test_who_gets_no_connection_is_told_where_and_why(text, told):
    assert told in str(connecting_error(text))


@BEFORE_COMMIT
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kind, _ in SQLITE])
def test_before_commit_sqlite_has_changed_nothing(name, kind, stage):
    translated = SQLiteBackend().translate(from_sqlite(name), stage)
    assert type(translated) is kind
    assert not translated.outcome_unknown
    assert translated.retriable == (kind in RETRIABLE)
    assert "nothing was changed" in str(translated)


@pytest.mark.parametrize(("name", "kind", "is_unknown"), SQLITE)
def test_at_commit_some_answers_of_sqlite_leave_the_outcome_open(name, kind, is_unknown):
    translated = SQLiteBackend().translate(from_sqlite(name), Stage.COMMIT)
    assert type(translated) is (OutcomeUnknown if is_unknown else kind)
    assert translated.recovery is (Recovery.RESOLVE if is_unknown else kind.recovery)
    assert ("nothing was changed" in str(translated)) == (not is_unknown)


@pytest.mark.parametrize("stage", Stage)
def test_an_error_of_sqlite_without_a_name_is_a_failed_statement(stage):
    assert type(SQLiteBackend().translate(from_sqlite(None), stage)) is StatementFailed


@pytest.mark.parametrize("stage", Stage)
def test_no_error_repeats_the_statement_or_its_values(stage):
    for name, *_ in SQLITE:
        assert "secret" not in str(SQLiteBackend().translate(from_sqlite(name), stage))
    for sqlstate, *_ in POSTGRESQL:
        assert "secret" not in str(PostgreSQLBackend().translate(from_postgresql(sqlstate), stage))


def test_only_a_lock_of_sqlite_is_asked_for_again_at_once():
    contended = {name for name, *_ in SQLITE if SQLiteBackend().is_contended(from_sqlite(name))}
    assert contended == {name for name, kind, _ in SQLITE if kind is StoreBusy}
    assert not any(PostgreSQLBackend().is_contended(from_postgresql(sqlstate)) for sqlstate, *_ in POSTGRESQL)


def test_every_row_of_the_tables_is_tested_here():
    for known in postgresql.ERRORS_BY_SQLSTATE:
        assert any(sqlstate.startswith(known) for sqlstate, *_ in POSTGRESQL), known
    for known in postgresql.UNKNOWN_AT_COMMIT:
        assert any(sqlstate.startswith(known) and unknown for sqlstate, _, unknown in POSTGRESQL), known
    for known in sqlite.ERRORS_BY_NAME:
        assert any(name.startswith(known) for name, *_ in SQLITE), known
    for known in sqlite.UNKNOWN_AT_COMMIT:
        assert any(name.startswith(known) and unknown for name, _, unknown in SQLITE), known
