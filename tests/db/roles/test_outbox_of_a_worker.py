"""An outbox of a role with a producer's rights and no limits: its rows wait for somebody who may move them."""

from __future__ import annotations

from contextlib import closing

import psycopg
import pytest

from tests.outbox.steps import values, waiting
from tests.tools.least_privilege import as_coordinator
from txnstore import Outbox
from txnstore.db.opening import open_store
from txnstore.log.outbox.sequencer import drain_outbox
from txnstore.testing.postgres_server import connection_string

pytestmark = pytest.mark.least_privilege


def test_what_a_worker_commits_waits_for_a_coordinator(txnstore_postgresql_url, caplog):
    with (
        open_store(as_coordinator(txnstore_postgresql_url)) as store,
        psycopg.connect(connection_string(txnstore_postgresql_url)) as connection,
    ):
        with closing(Outbox(txnstore_postgresql_url)) as outbox, connection.transaction():
            outbox.produce(connection, "t", b"v")
        assert [record.event for record in caplog.records] == ["outbox_not_permitted"]
        assert waiting(store) == 1
        assert drain_outbox(store) == 1
        assert values(store) == [b"v"]
