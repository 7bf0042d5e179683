"""The README of the transactions: several writers in one, and one that the application's database decides."""

from __future__ import annotations

import pytest
import sqlalchemy
from sqlalchemy import text

from tests.clients.steps import read_to_end, values
from tests.tools.readmes import block_of
from txnstore import Producer
from txnstore.db.cluster.catalogue import change_store_settings


def run(heading, **names):
    exec(compile(block_of(__file__, heading).text, "README.md", "exec"), {"Producer": Producer, **names})


def test_what_a_writer_reported_is_committed(url):
    with Producer({"bootstrap.servers": url, "transactional.id": "bank"}) as producer:
        producer.init_transactions()
        run("Several writers in one transaction", producer=producer, url=url)
    assert values(read_to_end(url, "accounts")) == [b"..."]


@pytest.fixture
def shop(url, store, tmp_path):
    """What the example of an application's database takes for granted."""
    setting = "transaction.two.phase.commit.enable"
    store.write(lambda connection: change_store_settings(connection, {setting: "true"}))
    database = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'application.db'}")
    with database.begin() as connection:
        connection.execute(text("CREATE TABLE orders (item TEXT)"))
        connection.execute(text("CREATE TABLE remembered (state TEXT)"))
        connection.execute(text("CREATE TABLE workers (id TEXT PRIMARY KEY, number INTEGER)"))
        connection.execute(text("INSERT INTO workers VALUES ('shop', 0)"))

    def remembered(engine):
        with engine.connect() as connection:
            return connection.scalar(text("SELECT max(state) FROM remembered")) or "-1:-1"

    def insert_order(connection):
        connection.execute(text("INSERT INTO orders VALUES ('tea')"))

    def remember(connection, state):
        connection.execute(text("INSERT INTO remembered VALUES (:state)"), {"state": state})

    yield {
        "url": url,
        "database": database,
        "remembered": remembered,
        "insert_order": insert_order,
        "remember": remember,
        "text": text,
    }
    database.dispose()


def orders_in(database):
    with database.connect() as connection:
        return connection.scalar(text("SELECT count(*) FROM orders"))


def test_the_database_of_the_application_decides(url, shop):
    run("Transactions that your own database decides", **shop)
    assert shop["remembered"](shop["database"]) != "-1:-1"
    assert orders_in(shop["database"]) == 1
    assert values(read_to_end(url, "orders")) == [b"..."]


def test_who_is_replaced_between_prepare_and_the_commit_of_the_application_commits_nothing(url, shop):
    class Replaced(Producer):
        def prepare_transaction(self, timeout=-1):
            state = super().prepare_transaction(timeout)
            run("Transactions that your own database decides", **shop)
            return state

    with pytest.raises(RuntimeError, match="taken over"):
        run("Transactions that your own database decides", **{**shop, "Producer": Replaced})
    assert orders_in(shop["database"]) == 1
    assert values(read_to_end(url, "orders")) == [b"..."]


def test_producers_of_a_group_commit_one_after_the_other(url):
    found: dict[str, Producer] = {}
    block = block_of(__file__, "Transaction groups").text
    exec(compile(block, "README.md", "exec"), {"Producer": Producer, "url": url}, found)
    for number, producer in enumerate((found["first"], found["second"])):
        with producer:
            producer.init_transactions()
            with producer.transaction():
                producer.produce("ledger", str(number))
    assert set(values(read_to_end(url, "ledger"))) == {b"0", b"1"}
