"""Some tests of `tests/clients/producer/test_transaction_writers.py` once more, as a role with few rights."""

from __future__ import annotations

from tests.clients.producer.test_transaction_writers import (
    make_writer,
    producer,
    seen,
    test_a_writer_that_is_closed_without_a_report_does_not_count,
    test_an_abort_aborts_what_writers_wrote,
    test_the_committer_names_who_counts,
    token,
    topic,
)
from tests.db.roles.again import make_producer, roles, url

__all__ = [
    "make_producer",
    "make_writer",
    "producer",
    "roles",
    "seen",
    "test_a_writer_that_is_closed_without_a_report_does_not_count",
    "test_an_abort_aborts_what_writers_wrote",
    "test_the_committer_names_who_counts",
    "token",
    "topic",
    "url",
]
