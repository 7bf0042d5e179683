"""What the tests of the admin client share."""

from __future__ import annotations

import pytest

from txnstore.admin import AdminClient


@pytest.fixture
def idle_admin(tmp_path):
    """A client that has no reason to open its database."""
    with AdminClient({"bootstrap.servers": f"sqlite:///{tmp_path}/log.db"}) as admin:
        yield admin
        assert admin._connection.opened is None
