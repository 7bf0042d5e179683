"""The comparison with other queues: a topic as a queue, and those that need no package of their own."""

from __future__ import annotations

from scripts import bench_queues
from scripts.comparison.other_queues import PUT_MANY, PUT_ONE, TAKE_MANY, TAKE_ONE, LikePgmq
from scripts.comparison.sides import OURS, POSTGRESQL, SQLITE, Side
from txnstore.testing.postgres_server import connection_string


def side_of(url: str) -> Side:
    return Side(SQLITE if url.startswith("sqlite:") else POSTGRESQL, OURS, url)


def test_a_topic_is_measured_as_a_queue(url: str) -> None:
    rates = bench_queues.of_topic(side_of(url), seconds=0.02, records=1_000)
    assert set(rates) == {PUT_ONE, TAKE_ONE, PUT_MANY, TAKE_MANY}


def test_sql_like_pgmqs_gives_out_each_item_once(txnstore_postgresql_url: str) -> None:
    queue = LikePgmq(connection_string(txnstore_postgresql_url))
    with queue.connection:
        queue.put(5)
        assert [queue.take(2) for _ in range(4)] == [2, 2, 1, 0]


def test_the_table_says_how_much_more_txnstore_does() -> None:
    rows = [
        bench_queues.Row(SQLITE, PUT_ONE, OURS, 300, 300, 300, None),
        bench_queues.Row(SQLITE, PUT_ONE, "huey", 200, 200, 200, 1.5),
    ]
    assert bench_queues.markdown(rows).splitlines()[-1] == f"| SQLite | {PUT_ONE} | 300 | huey 200 (1.50 x) |"
