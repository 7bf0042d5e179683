"""Some tests of `tests/clients/consumer/test_commit_on_connection.py` once more, as a role with few rights."""

from __future__ import annotations

from tests.clients.consumer.test_commit_on_connection import (
    caller,
    connect,
    test_a_savepoint_that_is_rolled_back_takes_the_offsets_with_it,
    test_a_stale_generation_is_refused,
    test_the_callers_rollback_takes_both_back_and_the_next_commit_has_both,
    worker,
)
from tests.db.roles.again import crew, log, make_consumer, roles, url

__all__ = [
    "caller",
    "connect",
    "crew",
    "log",
    "make_consumer",
    "roles",
    "test_a_savepoint_that_is_rolled_back_takes_the_offsets_with_it",
    "test_a_stale_generation_is_refused",
    "test_the_callers_rollback_takes_both_back_and_the_next_commit_has_both",
    "url",
    "worker",
]
