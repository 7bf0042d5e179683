"""This file is the command that looks after a store all the time."""

from __future__ import annotations

import logging
import signal
import threading
from typing import Annotated, Final

import typer

from txnstore.cli.options import Schema, UrlArgument, UrlBesideArgument, examples, one_url
from txnstore.cli.terminal import TRY_AGAIN_LATER, say
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.store import open_store
from txnstore.maintenance.duties import DUTIES
from txnstore.maintenance.loop import Maintenance

EXAMPLES: Final = examples("txnstore maintain sqlite:///shop.db", "txnstore maintain --once")


def maintain(
    context: typer.Context,
    url: UrlArgument = None,
    *,
    url_option: UrlBesideArgument = None,
    once: Annotated[bool, typer.Option("--once", help="Do everything once and exit.")] = False,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Finish decided transactions, abort timed out ones and forget what has expired, until stopped by Ctrl-C."""
    url = one_url(context, url, url_option)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with open_store(url, schema=schema, create=False) as store:
        maintenance = Maintenance(store)
        if once:
            done = maintenance.run_once()
            for name, count in done.items():
                say(f"{count} {name}")
            raise typer.Exit(0 if len(done) == len(DUTIES) else TRY_AGAIN_LATER)
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            _stop_at(number, stop)
        maintenance.run(stop)


def _stop_at(number: signal.Signals, stop: threading.Event) -> None:
    """Let the first signal end the loop after the duty that runs, the second one do what it always does."""
    usual = signal.getsignal(number)

    def handle(*_: object) -> None:
        signal.signal(number, usual)
        stop.set()

    signal.signal(number, handle)
