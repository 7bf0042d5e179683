"""The tests of transactions in `tests/clients/producer/` once more, over a cluster of two SQLite files."""

from __future__ import annotations

import pytest

from tests.clients.producer.test_transaction_programs import *  # noqa: F403 - the tests
from tests.clients.producer.test_transactions import *  # noqa: F403 - the tests; their own fixtures come last
from tests.cluster.again import *  # noqa: F403 - the fixtures

pytestmark = pytest.mark.slow
