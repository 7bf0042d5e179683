"""The tests of `tests/clients/producer/test_transactions.py` once more, as a role with no more rights than it needs."""

from __future__ import annotations

from tests.clients.producer.test_transactions import *  # noqa: F403 - the tests; their own fixtures come last
from tests.db.roles.again import *  # noqa: F403 - the fixtures
