"""Some tests of `tests/clients/producer/test_enlist.py` once more, as a role with no more rights than it needs."""

from __future__ import annotations

import contextlib

import pytest

from tests.clients.callers import make_ledger, open_driver
from tests.clients.producer.enlisting import caller, entry, make_producer, producer, topic
from tests.clients.producer.test_enlist import (
    test_it_is_one_commit,
    test_offsets_are_committed_with_it,
    test_one_with_block,
    test_what_was_sent_before_is_part_of_it,
)
from tests.db.roles.again import roles, url

__all__ = [
    "caller",
    "entry",
    "make_producer",
    "producer",
    "roles",
    "test_it_is_one_commit",
    "test_offsets_are_committed_with_it",
    "test_one_with_block",
    "test_what_was_sent_before_is_part_of_it",
    "topic",
    "url",
]


@pytest.fixture(autouse=True)
def ledger(url):
    make_ledger(url)
    with contextlib.closing(open_driver(url)) as driver:
        driver.execute("CREATE UNIQUE INDEX ledger_of_one ON ledger (entry)")
        driver.commit()
