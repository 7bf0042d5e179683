"""An application's own rows beside a log in several databases: the outbox of each, and connections to members."""

from __future__ import annotations

import contextlib

import psycopg
import pytest
from sqlalchemy import insert

from tests.clients.steps import PATIENCE_SECONDS, create_topic, error_of
from txnstore import Consumer, KafkaError, Producer
from txnstore.db.schema import outbox
from txnstore.testing.postgres_server import connection_string


def records(urls, topic, count):
    with Consumer({"bootstrap.servers": urls, "group.id": "readers", "auto.offset.reset": "earliest"}) as consumer:
        consumer.subscribe([topic])
        return sorted(message.value() for message in consumer.consume(count, PATIENCE_SECONDS))


def test_a_consumer_helps_the_outbox_of_each_database_that_it_reads(site):
    urls = ", ".join(site.urls)
    create_topic(urls, "orders", 3, txnstore_placement="roundrobin")
    with site.open() as cluster:
        for number, home in enumerate(cluster.by_home(range(1, 4))):
            row = {"topic": "orders", "partition_number": number, "value": b"%d" % home}
            cluster.own(home).write(lambda connection, row=row: connection.execute(insert(outbox), row))
    assert records(urls, "orders", 3) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_members_vote_like_any_other_database_and_the_controller_is_refused(postgresql_site, commit):
    site = postgresql_site
    urls = ", ".join(site.urls)
    create_topic(urls, "orders", 3, txnstore_placement="roundrobin")
    addresses = [connection_string(url) for url in site.urls]
    for address in addresses:
        with psycopg.connect(address) as connection:
            connection.execute("CREATE TABLE ledger (entry text)")
    with (
        Producer({"bootstrap.servers": urls, "transactional.id": "anna"}) as producer,
        contextlib.closing(psycopg.connect(addresses[0])) as controller,
        contextlib.closing(psycopg.connect(addresses[1])) as second,
        contextlib.closing(psycopg.connect(addresses[2])) as third,
    ):
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        error = error_of(producer.enlist, controller)
        assert error.code() == KafkaError.INVALID_REQUEST
        assert "several databases" in error.str()
        for member in (second, third):
            producer.enlist(member)
            member.execute("INSERT INTO ledger VALUES ('one')")
        for number in range(3):
            producer.produce("orders", b"%d" % number, partition=number)
        (producer.commit_transaction if commit else producer.abort_transaction)(PATIENCE_SECONDS)
        for member in (second, third):
            assert member.execute("SELECT entry FROM ledger").fetchall() == ([("one",)] if commit else [])
            member.rollback()
            assert member.execute("SELECT gid FROM pg_prepared_xacts").fetchall() == []
    if commit:
        assert records(urls, "orders", 3) == [b"0", b"1", b"2"]
