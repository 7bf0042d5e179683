"""The tests of `tests/clients/membership/test_consumer_groups.py` once more, as a role with few rights."""

from __future__ import annotations

import pytest

from tests.clients.membership.test_consumer_groups import *  # noqa: F403 - the tests; their own fixtures come last
from tests.db.roles.again import *  # noqa: F403 - the fixtures

pytestmark = pytest.mark.slow
