"""What a process imports before its first record: by name, for what is not imported costs nothing anywhere."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: What neither the first record nor the first message needs, on any database.
NEVER = {
    "alembic",
    "concurrent.futures.process",
    "confluent_kafka",
    "mako",
    "multiprocessing",
    "pyspark",
    "rich",
    "sqlalchemy.orm",
    "txnstore.cli",
    "txnstore.clients.admin",
    "txnstore.clients.aio",
    "txnstore.db.callers",
    "txnstore.db.open_transactions_view",
    "txnstore.db.postgresql.records_view",
    "txnstore.db.postgresql.rotation",
    "txnstore.db.postgresql.vacuuming",
    "txnstore.db.sqlite.records_view",
    "txnstore.maintenance",
    "txnstore.outbox",
    "txnstore.participants",
    "txnstore.relay",
    "txnstore.spark",
    "txnstore.testing",
    "txnstore.transactions.listing",
    "txnstore.transactions.recovery",
    "typer",
}
#: What a producer without transactions does not need.
OF_TRANSACTIONS = {
    "txnstore.clients.producer.enlistment",
    "txnstore.clients.producer.progress",
    "txnstore.clients.producer.transactions",
    "txnstore.clients.producer.writer",
    "txnstore.groups",
    "txnstore.transactions.coordinator",
    "txnstore.transactions.rows",
    "txnstore.transactions.writers",
}
#: What only the one or the other database needs.
OF_OTHERS = {
    "sqlite": {"psycopg", "psycopg_binary", "sqlalchemy.dialects.postgresql", "txnstore.db.postgresql.backend"},
    "postgresql": {"txnstore.db.sqlite.backend"},
}

#: Where this takes longer than a second, a producer asks who holds its readers back, and imports more: not here.
ASK_NOBODY = """
import sys
from txnstore import Producer
from txnstore.clients.producer import thread

thread.WRITER_ASKS_SECONDS = 3600
"""
PRODUCE = (
    ASK_NOBODY
    + """
producer = Producer({"bootstrap.servers": sys.argv[1]})
producer.produce("started", b"value")
assert producer.flush(60) == 0
print(*sys.modules)
producer.close()
"""
)
PRODUCE_IN_TRANSACTION = (
    ASK_NOBODY
    + """
producer = Producer({"bootstrap.servers": sys.argv[1], "transactional.id": "starts"})
producer.init_transactions(60)
producer.begin_transaction()
producer.produce("started", b"value")
producer.commit_transaction(60)
print(*sys.modules)
producer.close()
"""
)
CONSUME = """
import sys
import txnstore.admin
from txnstore import Consumer, TopicPartition

consumer = Consumer({"bootstrap.servers": sys.argv[1], "group.id": "starts", "enable.auto.commit": False})
consumer.assign([TopicPartition("started", 0, 0)])
assert consumer.poll(60).value() == b"value"
consumer.commit(asynchronous=False)
print(*sys.modules)
consumer.close()
"""


def imported_by(program, url):
    run = [sys.executable, "-c", program, url]
    return set(subprocess.run(run, capture_output=True, text=True, check=True, timeout=120).stdout.split())


@pytest.fixture
def database(txnstore_url):
    return "sqlite" if txnstore_url.startswith("sqlite") else "postgresql"


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("program", "of_others"),
    [(PRODUCE, OF_TRANSACTIONS), (PRODUCE_IN_TRANSACTION, set())],
    ids=["plain", "transaction"],
)
def test_a_producer_imports_what_its_first_record_needs(program, of_others, txnstore_url, database):
    needless = NEVER | OF_OTHERS[database] | of_others
    needless |= {"txnstore.clients.consumer", "txnstore.clients.membership.member"}
    assert imported_by(program, txnstore_url) & needless == set()


@pytest.mark.slow
def test_a_consumer_imports_what_its_first_message_needs(txnstore_url, database):
    imported_by(PRODUCE, txnstore_url)
    needless = NEVER | OF_OTHERS[database] | {"txnstore.clients.producer.producer"}
    assert imported_by(CONSUME, txnstore_url) & needless == set()


@pytest.mark.slow
def test_garbage_is_collected_again_after_a_client_was_imported():
    program = "import gc; from txnstore import Producer; print(gc.isenabled())"
    assert imported_by(program, "") == {"True"}
    assert imported_by(f"import gc; gc.disable(); {program}", "") == {"False"}
