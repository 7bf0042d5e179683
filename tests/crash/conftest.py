"""What the tests of crashes share: a database to make worlds in, one after another."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.crash.afterlives", "tests.crash.everywhere", "tests.crash.worlds")

# Only now, so that a failed assertion there shows what it saw.
from tests.crash.worlds import Place  # noqa: E402
from txnstore.testing.manual_clock import ManualClock  # noqa: E402

#: Where each scenario dies at each of its steps: seconds on SQLite, minutes on PostgreSQL.
EVERY_STEP = ("test_sink.py", "test_starts.py", "test_transactions.py", "test_writers.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave what takes minutes to those who run all tests; the same steps on SQLite are taken by everybody."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name in EVERY_STEP and "[postgresql" in item.name:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def place(url: str, clock: ManualClock) -> Place:
    """A fresh database, on each kind of it."""
    return Place(url, clock)
