"""The proxy's reading of PostgreSQL's protocol: a statement is found where it is executed, and nowhere else."""

from __future__ import annotations

import pytest

from tests.tools.proxy import (
    CANCEL,
    ENCRYPTION,
    STARTUP,
    Message,
    MessageReader,
    StatementTracker,
    contains_statement,
)


def typed(kind, body):
    return Message(kind, kind.encode() + (len(body) + 4).to_bytes(4, "big") + body)


def untyped(code):
    return b"\0\0\0\x08" + code.to_bytes(4, "big")


SSL_REQUEST = untyped(80877103)
CANCEL_REQUEST = untyped(80877102)
STARTUP_3_0 = untyped(3 << 16)
STARTUP_3_2 = untyped((3 << 16) + 2)


@pytest.mark.parametrize(
    ("text", "beginning"),
    [
        ("COMMIT", "COMMIT"),
        ("commit;", "COMMIT"),
        ("  \n COMMIT WORK", "COMMIT"),
        ("/* why; */ COMMIT -- done", "COMMIT"),
        ("-- COMMIT later;\nCOMMIT", "COMMIT"),
        ("INSERT INTO a VALUES (';'); COMMIT", "COMMIT"),
        ("COMMIT PREPARED 'a'", "COMMIT PREPARED"),
        ("ROLLBACK", "ROLLBACK"),
        ('insert  into\n"Orders" values (1)', 'INSERT INTO "Orders"'),
    ],
)
def test_a_statement_is_found_by_its_first_words(text, beginning):
    assert contains_statement(text, beginning)


@pytest.mark.parametrize(
    ("text", "beginning"),
    [
        ("", "COMMIT"),
        ("COMMITTED", "COMMIT"),
        ("COMMIT PREPARED 'a'", "COMMIT"),
        ("ROLLBACK TO here", "ROLLBACK"),
        ("ROLLBACK PREPARED 'a'", "ROLLBACK"),
        ("SAVEPOINT commit", "COMMIT"),
        ("SELECT ';COMMIT'", "COMMIT"),
        ('SELECT 1 AS ";COMMIT"', "COMMIT"),
        ("DO $$ BEGIN; COMMIT; END $$", "COMMIT"),
        ("DO $a$ $$; COMMIT; $$ $a$", "COMMIT"),
        ("SELECT 1 /* ; COMMIT */ -- ; COMMIT", "COMMIT"),
        ('INSERT INTO "Invoices"', 'INSERT INTO "Orders"'),
    ],
)
def test_a_statement_is_not_found_inside_text_or_by_other_words(text, beginning):
    assert not contains_statement(text, beginning)


def test_messages_are_cut_the_same_however_their_bytes_arrive():
    stream = SSL_REQUEST + STARTUP_3_2 + typed("Q", b"SELECT 1\0").raw + typed("X", b"").raw
    whole = MessageReader(from_client=True).feed(stream)
    reader = MessageReader(from_client=True)
    byte_by_byte = [message for byte in stream for message in reader.feed(bytes([byte]))]
    assert [message.kind for message in whole] == [ENCRYPTION, STARTUP, "Q", "X"]
    assert byte_by_byte == whole
    assert b"".join(message.raw for message in whole) == stream


def test_a_cancel_request_is_known_from_a_startup():
    assert [message.kind for message in MessageReader(from_client=True).feed(CANCEL_REQUEST)] == [CANCEL]
    assert [message.kind for message in MessageReader(from_client=True).feed(STARTUP_3_0)] == [STARTUP]


def test_a_prepared_statement_is_executed_whenever_its_portal_is():
    tracker = StatementTracker()
    assert tracker.executed_by(typed("P", b"end\0COMMIT\0\0\0")) is None
    assert tracker.executed_by(typed("P", b"\0SELECT 1\0\0\0")) is None
    for _ in range(2):
        assert tracker.executed_by(typed("B", b"portal\0end\0")) is None
        assert tracker.executed_by(typed("E", b"portal\0\0\0\0\0")) == "COMMIT"
    assert tracker.executed_by(typed("B", b"\0\0")) is None
    assert tracker.executed_by(typed("E", b"\0\0\0\0\0")) == "SELECT 1"


def test_a_portal_of_an_unknown_statement_executes_nothing_that_could_match():
    tracker = StatementTracker()
    assert tracker.executed_by(typed("E", b"unknown\0\0\0\0\0")) is None
    tracker.executed_by(typed("B", b"portal\0unknown\0"))
    assert tracker.executed_by(typed("E", b"portal\0\0\0\0\0")) == ""
