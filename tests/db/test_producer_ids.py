"""Producer ids that a store's age lets come, to a role that may only draw the next one."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest

from tests.tools.least_privilege import as_owner
from txnstore import KafkaException, Producer
from txnstore.db.cluster.membership import PRODUCER_ID_BITS
from txnstore.db.postgresql import producer_ids
from txnstore.log import partition_rows
from txnstore.testing.postgres_server import connection_string

#: Elsewhere in the tests ids come in turn, whatever a store's age.
(PRODUCER_ID_MS,) = map(
    int, re.findall(r"^PRODUCER_ID_MS = (\d+)$", Path(partition_rows.__file__).read_text(), re.MULTILINE)
)
HOUR_MS = 3_600_000


def test_the_guard_counts_as_those_who_draw():
    assert producer_ids._MS_EACH == PRODUCER_ID_MS
    assert producer_ids._RANGE_BITS == PRODUCER_ID_BITS


@pytest.mark.least_privilege
def test_a_worker_draws_what_the_age_of_the_store_lets_come_and_no_more(txnstore_postgresql_url, monkeypatch):
    """The first hour of a store gives them in turn; so at double rate the third hour comes to more than its age."""

    def draw(name):
        producer = Producer({"bootstrap.servers": txnstore_postgresql_url, "transactional.id": name})
        producer.init_transactions(60)

    with psycopg.connect(connection_string(as_owner(txnstore_postgresql_url)), autocommit=True) as owner:
        following = "SELECT next_producer_id FROM txnstore.stores"
        owner.execute("UPDATE txnstore.stores SET created_ms = created_ms - %s", [3 * HOUR_MS])
        monkeypatch.setattr(partition_rows, "PRODUCER_ID_MS", PRODUCER_ID_MS)
        draw("first")
        (drawn,) = owner.execute(following).fetchone()
        assert 2 * HOUR_MS // PRODUCER_ID_MS <= drawn < 3 * HOUR_MS // PRODUCER_ID_MS
        monkeypatch.setattr(partition_rows, "PRODUCER_ID_MS", PRODUCER_ID_MS // 2)
        with pytest.raises(KafkaException, match="next producer id, and no other"):
            draw("second")
        assert owner.execute(following).fetchone() == (drawn,)
