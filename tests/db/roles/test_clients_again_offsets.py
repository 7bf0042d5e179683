"""Some tests of `tests/clients/consumer/test_consumer_offsets.py` once more, as a role with few rights."""

from __future__ import annotations

from tests.clients.consumer.test_consumer_offsets import (
    reader,
    test_committed_waits_for_a_transaction_that_may_change_it,
    test_offsets_are_committed_by_themselves,
    test_only_what_was_stored_is_committed,
    topic,
)
from tests.db.roles.again import log, make_consumer, make_producer, roles, url

__all__ = [
    "log",
    "make_consumer",
    "make_producer",
    "reader",
    "roles",
    "test_committed_waits_for_a_transaction_that_may_change_it",
    "test_offsets_are_committed_by_themselves",
    "test_only_what_was_stored_is_committed",
    "topic",
    "url",
]
