"""Some tests of `tests/outbox/test_outbox.py` once more, as a role with no more rights than it needs."""

from __future__ import annotations

from tests.db.roles.again import clock, roles, store, url
from tests.outbox.conftest import connect, engine
from tests.outbox.test_outbox import (
    outbox,
    test_one_statement_and_nothing_else_runs_on_the_callers_connection,
    test_without_its_thread_the_rows_wait,
)

__all__ = [
    "clock",
    "connect",
    "engine",
    "outbox",
    "roles",
    "store",
    "test_one_statement_and_nothing_else_runs_on_the_callers_connection",
    "test_without_its_thread_the_rows_wait",
    "url",
]
