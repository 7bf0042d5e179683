"""The README of the transactions: several writers in one, and one that the application's database decides."""

from __future__ import annotations

import sqlalchemy

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


def test_the_database_of_the_application_decides(url, store, tmp_path):
    setting = "transaction.two.phase.commit.enable"
    store.write(lambda connection: change_store_settings(connection, {setting: "true"}))
    database = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'application.db'}")
    with database.begin() as connection:
        connection.execute(sqlalchemy.text("CREATE TABLE orders (item TEXT)"))
        connection.execute(sqlalchemy.text("CREATE TABLE remembered (state TEXT)"))

    def remembered(engine):
        with engine.connect() as connection:
            return connection.scalar(sqlalchemy.text("SELECT state FROM remembered")) or "-1:-1"

    def insert_order(connection):
        connection.execute(sqlalchemy.text("INSERT INTO orders VALUES ('tea')"))

    def remember(connection, state):
        connection.execute(sqlalchemy.text("INSERT INTO remembered VALUES (:state)"), {"state": state})

    run(
        "Transactions that your own database decides",
        url=url,
        database=database,
        remembered=remembered,
        insert_order=insert_order,
        remember=remember,
    )
    assert remembered(database) != "-1:-1"
    database.dispose()
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
