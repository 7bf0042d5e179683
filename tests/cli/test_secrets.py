"""Passwords in malformed URLs: no command, no client and no outbox repeats them, whatever is wrong."""

from __future__ import annotations

import asyncio
import logging
import traceback

import pytest
from typer.testing import CliRunner

from tests.db.test_urls import MALFORMED, SECRET
from txnstore import Consumer, KafkaException, Outbox, Producer
from txnstore.admin import AdminClient
from txnstore.aio import AIOConsumer, AIOProducer
from txnstore.cli.output import report
from txnstore.cli.program import NAMES, program_with
from txnstore.db.backend import Limits
from txnstore.db.opening import connect_store, open_store
from txnstore.errors import StoreUnavailable, TxnStoreError
from txnstore.observability.metrics import StoreCollector
from txnstore.spark.options import Side, read_options
from txnstore.spark.stores import store_address

#: Those, and a list of a cluster's.
URLS = (*MALFORMED, f"postgresql://alice:{SECRET}@host:port/shop,postgresql://bob:{SECRET}@other/shop")
#: One of each way that commands come to their database, by --url or the environment.
COMMANDS = (["topics", "list"], ["migrate", "--sql"], ["roles", "list"])
#: Commands that take a URL in another place, which stands there as None.
PLACES = (
    ["copy", None, "sqlite:///to.db"],
    ["copy", "sqlite:///store.db", None],
    ["copy", "--cancel", None],
    ["info", None],
    ["doctor", None],
    ["doctor", "--url", None],
    ["adopt", None],
    ["databases", "add", None],
    ["relay", None, "--once"],
    ["relay", None, "--to", "127.0.0.1:1", "--once"],
    ["maintain", None, "--once"],
    ["maintain", "--once", "--participant", None],
    ["verify", "--participant", None],
    ["transactions", "recover", "--participant", None],
)
CLIENTS = {
    "producer": lambda url: Producer({"bootstrap.servers": url}),
    "consumer": lambda url: Consumer({"bootstrap.servers": url, "group.id": "g"}),
    "admin": lambda url: AdminClient({"bootstrap.servers": url}),
    "outbox": Outbox,
    "asynchronous producer": lambda url: within_a_loop(lambda: AIOProducer({"bootstrap.servers": url})),
    "asynchronous consumer": lambda url: within_a_loop(
        lambda: AIOConsumer({"bootstrap.servers": url, "group.id": "g"})
    ),
    "collector": StoreCollector,
    "spark": lambda url: store_address(read_options({"url": url}, Side.SOURCE)),
}


def within_a_loop(make):
    """Make an asynchronous client where its calls would run."""

    async def run():
        make()

    asyncio.run(run())


def all_of(error):
    """Return all that a program may print of an error, and of those behind it."""
    seen = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "".join(f"{each}{each!r}{each.args}{''.join(traceback.format_exception(each))}" for each in seen)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_repeats_the_password_of_a_malformed_url(command, caplog, capsys):
    assert len(URLS) >= 50
    program = program_with(NAMES)
    for url in URLS:
        tried: list[tuple[list[str], dict[str, str]]] = [([*command, "--url", url], {})]
        if url.isprintable():
            # No environment holds some of the others.
            tried.append((command, {"TXNSTORE_URL": url}))
        for arguments, environment in tried:
            assert SECRET not in shown_by(program, arguments, environment, capsys, caplog), url


@pytest.mark.slow
@pytest.mark.parametrize("command", PLACES, ids=lambda command: " ".join(word or "URL" for word in command))
def test_no_command_repeats_the_password_of_a_malformed_url_in_another_place(command, caplog, capsys):
    open_store("sqlite:///store.db").close()
    program = program_with(NAMES)
    for url in URLS:
        arguments = [url if word is None else word for word in command]
        shown = shown_by(program, arguments, {"TXNSTORE_URL": "sqlite:///store.db"}, capsys, caplog)
        assert SECRET not in shown, url


def shown_by(program, arguments, environment, capsys, caplog):
    """Return all that a command shows that fails."""
    caplog.clear()
    done = CliRunner().invoke(program, arguments, prog_name="txnstore", env={"COLUMNS": "500", **environment})
    assert done.exception is not None, arguments
    assert not isinstance(done.exception, SystemExit) or done.exception.code, arguments
    if isinstance(done.exception, Exception):
        # As the program's own end does it.
        report(done.exception)
    return done.output + all_of(done.exception) + "".join(capsys.readouterr()) + caplog.text


@pytest.mark.slow_but_first
@pytest.mark.parametrize("make", CLIENTS.values(), ids=CLIENTS)
def test_no_client_repeats_the_password_of_a_malformed_url(make, caplog):
    for url in URLS:
        with pytest.raises((KafkaException, TxnStoreError)) as caught:
            make(url)
        assert SECRET not in all_of(caught.value) + caplog.text, url


def test_a_client_whose_database_is_away_repeats_no_password(caplog):
    """The password was right in the URL, and is in no text about the connection."""
    url = f"postgresql://alice:{SECRET}@127.0.0.1:1/shop?connect_timeout=1"
    with connect_store(url, limits=Limits(retry_timeout_ms=0)) as store, pytest.raises(StoreUnavailable) as caught:
        store.read(lambda connection: connection)
    assert SECRET not in all_of(caught.value) + caplog.text + repr(store) + str(store.url)
    with Producer({"bootstrap.servers": url, "message.timeout.ms": 100}) as producer:
        told = []
        producer.produce("t", "v", on_delivery=lambda error, message: told.append((error, message)))
        producer.flush(60)
        assert SECRET not in f"{producer!r}{producer}{told}{caplog.text}"
        assert told
