"""What a transaction leaves behind in PostgreSQL: dead versions of rows, all of them where the next update is."""

from __future__ import annotations

from sqlalchemy import text

from tests.tools.counted import count_now
from tests.transactions.bench import Producer, sent_offsets
from txnstore.db.store import Store
from txnstore.log.topics import create_topic
from txnstore.transactions.coordinator import TransactionCoordinator

COUNT = 100
HOT_ROWS = ("group_offsets", "groups", "partition_heads", "producer_states", "transactions")
UPDATES = text(
    "SELECT relname, n_tup_upd, n_tup_hot_upd FROM pg_catalog.pg_stat_user_tables WHERE n_tup_upd > 0 ORDER BY relname"
)


def test_a_transaction_in_one_commit_makes_one_version_of_each_hot_row_and_no_index_entry(
    txnstore_postgresql_store: Store,
) -> None:
    store = txnstore_postgresql_store
    (partition_id,) = store.write(lambda connection: create_topic(connection, "t")).partition_ids
    producer = Producer(TransactionCoordinator(store), "id")
    producer.start()

    def updates() -> dict[str, tuple[int, int]]:
        # There is one connection.
        count_now(store)
        rows = store.read(lambda connection: connection.execute(UPDATES).all())
        return {name: (updated, hot) for name, updated, hot in rows}

    def commit() -> None:
        offsets = [sent_offsets("group", {partition_id: 1})]
        producer.commit(appends=[producer.batch(partition_id, b"v")], offsets=offsets)

    commit()
    before = updates()
    for _ in range(COUNT):
        commit()
    for name, (updated, hot) in updates().items():
        updated_before, hot_before = before.get(name, (0, 0))
        made, on_their_page = updated - updated_before, hot - hot_before
        assert name in HOT_ROWS or made == 0, f"{name} is new among the rows that every transaction updates"
        assert made <= COUNT, name
        # Now and then a page is full.
        assert on_their_page >= 0.9 * made, name
