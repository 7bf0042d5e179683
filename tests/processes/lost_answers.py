"""Answers to COMMIT that are lost again and again: what was asked for is done, and whoever asked does not know it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final
from unittest import mock

from sqlalchemy import Engine, event

from tests.processes.upkeep_ledger import Ledger
from tests.tools.proxy import Effect, Fault, Proxy, contains_statement, upstream_of
from tests.tools.workload import Job
from txnstore.log.sequences import find_duplicate

#: How many of the answers are lost.
SHARE: Final = 0.12
LOST, RECOGNISED = "answers lost", "repetitions recognised"


def work_without_answers(job: Job, program: Callable[..., object], *arguments: object) -> None:
    """Run a program that the answers to some of its COMMITs do not reach; note which batches are recognised."""
    ledger = Ledger(job.folder, job.process)
    chance = job.chance()

    def is_lost() -> bool:
        if chance.random() >= SHARE:
            return False
        ledger.note(LOST)
        return True

    def find_and_note(*told: Any) -> Any:
        found = find_duplicate(*told)
        if found is not None:
            ledger.note(RECOGNISED)
        return found

    url = job.url
    if url.startswith("sqlite"):
        _doubt_syncs(is_lost)
    else:
        url = _CuttingProxy(url, is_lost).url(url)
    # The append runs here, in the process of its producer.
    with mock.patch("txnstore.log.append.find_duplicate", find_and_note):
        program(replace(job, url=url), *arguments)


class _CuttingProxy(Proxy):
    """PostgreSQL: the connection is cut when the COMMIT has been forwarded, and the server still carries it out."""

    def __init__(self, url: str, is_lost: Callable[[], bool]) -> None:
        self._is_lost = is_lost
        super().__init__(upstream_of(url))

    def fault_at(self, statement: str | None) -> Fault | None:
        if statement is not None and contains_statement(statement, "COMMIT") and self._is_lost():
            return Fault(Effect.CUT, before=None, after="COMMIT")
        return super().fault_at(statement)


def _doubt_syncs(is_lost: Callable[[], bool]) -> None:
    """SQLite: let a COMMIT that others see already be said to have failed, as where the disk does not confirm it.

    Whether what could not be synced is there shows later in reality too; here it always is.
    """

    def executed(connection: Any, cursor: Any, statement: str, *_: object) -> None:
        if statement == "COMMIT" and is_lost():
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorname = "SQLITE_IOERR_FSYNC"
            raise error

    event.listen(Engine, "after_cursor_execute", executed)
