"""What the tests of crashes share: a database to make worlds in, one after another."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.crash.afterlives", "tests.crash.everywhere")

# Only now, so that a failed assertion there shows what it saw.
from tests.crash.worlds import Place  # noqa: E402
from txnstore.testing.manual_clock import ManualClock  # noqa: E402


@pytest.fixture
def place(url: str, clock: ManualClock) -> Place:
    """A fresh database, on each kind of it."""
    return Place(url, clock)
