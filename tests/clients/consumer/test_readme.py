"""The workers of the consumer's README take nothing twice and leave nothing out, also where an error ends them."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import sqlalchemy

from tests.clients.steps import read_to_end, values
from tests.tools.readmes import TOP, blocks
from txnstore import Consumer, KafkaError, KafkaException, Producer

#: How long the server is at a commit whose connection is lost: the worker ends and is started again meanwhile.
LATE_SECONDS = 1.0
WORKER = "\nwith Consumer("
"""Where the worker itself begins, behind what is made for it."""


def run(heading, url, error):
    """Run the program, which ends with the error, and start its worker again; return what it prints in all."""
    (program,) = (block for block in blocks(TOP / "txnstore/clients/consumer/README.md") if block.heading == heading)
    (line,) = (line for line in program.text.splitlines() if line.startswith("URL = "))
    text = program.text.replace(line, f"URL = {url!r}")
    names: dict[str, Any] = {}
    try:
        with pytest.raises(error, match="tried"):
            exec(compile(text, "README.md", "exec"), names)
        exec(compile(text[text.index(WORKER) :], "README.md", "exec"), names)
    finally:
        if "engine" in names:
            names["engine"].dispose()
    return program.printed


@pytest.fixture
def fails(monkeypatch):
    """Return what has a method fail at its second call, by this error, before it does anything."""

    def fails_(of_class, name, error):
        calls = []
        original = getattr(of_class, name)

        def call(self, *arguments, **named):
            calls.append(name)
            if len(calls) == 2:
                raise error
            return original(self, *arguments, **named)

        monkeypatch.setattr(of_class, name, call)
        return calls

    return fails_


@pytest.mark.slow
@pytest.mark.parametrize("call", ["send_offsets_to_transaction", "commit_transaction"])
def test_an_order_whose_transaction_is_aborted_is_invoiced_once(url, fails, capsys, call):
    refused = KafkaException(KafkaError(KafkaError.TRANSACTION_ABORTABLE, "tried", txn_requires_abort=True))
    calls = fails(Producer, call, refused)
    printed = run("An exactly-once worker", url, KafkaException)
    assert len(calls) == 4
    assert capsys.readouterr().out == printed
    assert values(read_to_end(url, "invoices")) == [b"3.00 EUR", b"4.50 EUR", b"2.50 EUR"]


def test_a_payment_whose_rows_are_rolled_back_is_added_once(url, fails, capsys):
    refused = KafkaException(KafkaError(KafkaError._TIMED_OUT, "tried"))
    calls = fails(Consumer, "commit", refused)
    printed = run("A worker with tables of its own", url, KafkaException)
    assert len(calls) == 4
    assert capsys.readouterr().out == printed


@pytest.mark.slow
def test_a_payment_of_which_nobody_knows_whether_its_commit_came_about_is_added_once(url, capsys, monkeypatch):
    """Its connection is lost in the commit, which the server goes on with: the worker that comes next waits for it."""
    begun, late = [], []

    class LosesAnAnswer(sqlalchemy.Engine):
        @contextlib.contextmanager
        def begin(self):
            begun.append(self)
            if len(begun) != 3:
                with super().begin() as connection:
                    yield connection
                return
            connection = self.connect()
            connection.begin()
            yield connection

            def commit():
                with connection:
                    connection.commit()

            late.append(threading.Timer(LATE_SECONDS, commit))
            late[0].start()
            raise sqlalchemy.exc.OperationalError("COMMIT", {}, Exception("tried"))

    def create_engine(address):
        engine = made(address)
        engine.__class__ = LosesAnAnswer
        return engine

    made = sqlalchemy.create_engine
    monkeypatch.setattr(sqlalchemy, "create_engine", create_engine)
    try:
        printed = run("A worker with tables of its own", url, sqlalchemy.exc.OperationalError)
    finally:
        for timer in late:
            timer.join()
    assert len(begun) == 4
    assert capsys.readouterr().out == printed
