"""The recipe of KIP-939, as an application writes it: its own database decides, whatever process dies."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, create_engine, text

from txnstore import Producer

CONFIGURATION = {"transactional.id": "shop", "transaction.two.phase.commit.enable": True, "linger.ms": 0}


def open_shop(url: str) -> Any:
    """Return the application's own database, which is not the log's."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY)"))
        connection.execute(text("CREATE TABLE IF NOT EXISTS prepared (only INTEGER PRIMARY KEY, state TEXT)"))
    return engine


def orders_in(url: str) -> list[int]:
    with open_shop(url).connect() as connection:
        return list(connection.execute(text("SELECT number FROM orders ORDER BY number")).scalars())


def remembered_in(url: str) -> str:
    with open_shop(url).connect() as connection:
        return connection.execute(text("SELECT state FROM prepared")).scalar() or ""


def take_over(log_url: str) -> Producer:
    """Return a producer that has got hold of what the last process has left, and has not ended it yet."""
    producer = Producer({"bootstrap.servers": log_url, **CONFIGURATION})
    producer.init_transactions(keep_prepared_txn=True)
    return producer


def start(log_url: str, shop_url: str) -> Producer:
    """Return a producer that has ended what the last process has left."""
    producer = take_over(log_url)
    producer.complete_transaction(remembered_in(shop_url))
    return producer


def take_order(producer: Producer, shop_url: str, number: int) -> None:
    """Write the order into the shop's database and into the log: both or neither."""
    producer.begin_transaction()
    producer.produce("orders", str(number), partition=0)
    state = str(producer.prepare_transaction())
    with open_shop(shop_url).connect() as connection:
        connection.execute(text("BEGIN IMMEDIATE"))
        _write(connection, number, state)
        connection.execute(text("COMMIT"))
    producer.complete_transaction(state)


def _write(connection: Connection, number: int, state: str) -> None:
    connection.execute(text("INSERT INTO orders VALUES (:number)"), {"number": number})
    connection.execute(text("INSERT OR REPLACE INTO prepared VALUES (1, :state)"), {"state": state})


def run(task: tuple[str, str]) -> None:
    """Be a process of the shop: start, take two orders, end."""
    log_url, shop_url = task
    with start(log_url, shop_url) as producer:
        for number in (1, 2):
            take_order(producer, shop_url, number)
