"""An application's own rows beside a log in several databases: the outbox of each, and connections to members."""

from __future__ import annotations

import contextlib
import sqlite3

import psycopg
import pytest
from sqlalchemy import insert
from typer.testing import CliRunner

from tests.clients.steps import PATIENCE_SECONDS, create_topic, error_of
from txnstore import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from txnstore.cli.program import NAMES, program_with
from txnstore.db.schema import outbox
from txnstore.db.url import parse_url
from txnstore.log.topics import find_topics
from txnstore.participants.branches import Branches
from txnstore.testing.postgres_server import connection_string
from txnstore.transactions.coordinator import TransactionCoordinator


def records(urls, topic, count):
    with Consumer({"bootstrap.servers": urls, "group.id": "readers", "auto.offset.reset": "earliest"}) as consumer:
        consumer.subscribe([topic])
        return sorted(message.value() for message in consumer.consume(count, PATIENCE_SECONDS))


@pytest.mark.slow
def test_a_consumer_helps_the_outbox_of_each_database_that_it_reads(site):
    urls = ", ".join(site.urls)
    create_topic(urls, "orders", 3, txnstore_placement="roundrobin")
    with site.open() as cluster:
        (topic,) = cluster.controller.read(lambda connection: find_topics(connection, ["orders"]))
        for number, leader in enumerate(topic.leaders):
            row = {"topic": "orders", "partition_number": number, "value": b"%d" % leader}
            cluster.own(leader).write(lambda connection, row=row: connection.execute(insert(outbox), row))
    assert records(urls, "orders", 3) == [b"1", b"2", b"3"]


def test_a_commit_on_a_connection_to_another_database_says_why_it_has_to_be_the_groups(sqlite_site):
    urls = ", ".join(sqlite_site.urls)
    create_topic(urls, "orders", 1)
    group_id = name_at(sqlite_site, 2)
    settings = {"bootstrap.servers": urls, "group.id": group_id, "enable.auto.commit": False}
    first, second = (str(parse_url(url).url.database) for url in sqlite_site.urls[:2])
    for file, refusal in ((first, rf"second\.db, where group '{group_id}' lives: its name decides"), (second, None)):
        with (
            Consumer(settings) as consumer,
            contextlib.closing(sqlite3.connect(file, isolation_level=None)) as connection,
        ):
            connection.execute("BEGIN")
            offsets = [TopicPartition("orders", 0, 0)]
            if refusal is None:
                assert consumer.commit(offsets=offsets, connection=connection)
                connection.execute("COMMIT")
            else:
                with pytest.raises(KafkaException, match=refusal):
                    consumer.commit(offsets=offsets, connection=connection)
                connection.execute("ROLLBACK")


@pytest.fixture
def ledgers(postgresql_site):
    """The three databases with a table of the application's in each."""
    create_topic(", ".join(postgresql_site.urls), "orders", 3, txnstore_placement="roundrobin")
    addresses = [connection_string(url) for url in postgresql_site.urls]
    for address in addresses:
        with psycopg.connect(address) as connection:
            connection.execute("CREATE TABLE ledger (entry text)")
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(psycopg.connect(address))) for address in addresses]


PREPARED = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"


def name_at(site, coordinator_id):
    """Return a transactional id that the database of this number coordinates."""
    with site.open() as cluster:
        return next(name for name in map(str, range(1_000)) if cluster.coordinator_id_of(name) == coordinator_id)


@pytest.mark.slow
@pytest.mark.parametrize("coordinator_id", [1, 2, 3])
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_the_controller_and_members_vote_like_any_other_database(postgresql_site, ledgers, commit, coordinator_id):
    urls = ", ".join(postgresql_site.urls)
    with Producer(
        {"bootstrap.servers": urls, "transactional.id": name_at(postgresql_site, coordinator_id)}
    ) as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        for ledger in ledgers:
            producer.enlist(ledger)
            ledger.execute("INSERT INTO ledger VALUES ('one')")
        for number in range(3):
            producer.produce("orders", b"%d" % number, partition=number)
        (producer.commit_transaction if commit else producer.abort_transaction)(PATIENCE_SECONDS)
        for ledger in ledgers:
            assert ledger.execute("SELECT entry FROM ledger").fetchall() == ([("one",)] if commit else [])
            ledger.rollback()
            assert ledger.execute(PREPARED).fetchall() == []
    if commit:
        assert records(urls, "orders", 3) == [b"0", b"1", b"2"]


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
def test_a_role_that_may_not_read_the_log_votes_from_the_controller_and_from_members(
    postgresql_site, ledgers, txnstore_postgres_server, place
):
    server, urls, role = txnstore_postgres_server, ", ".join(postgresql_site.urls), "ledger_only"
    server.create_role(role, "secret")
    try:
        ledgers[place].execute(f"GRANT SELECT, INSERT ON ledger TO {role}")
        ledgers[place].commit()
        address = connection_string(server.url(ledgers[place].info.dbname, role, "secret"))
        with (
            contextlib.closing(psycopg.connect(address)) as teller,
            Producer({"bootstrap.servers": urls, "transactional.id": "anna"}) as producer,
        ):
            producer.init_transactions(PATIENCE_SECONDS)
            with producer.transaction():
                producer.enlist(teller)
                teller.execute("INSERT INTO ledger VALUES ('one')")
                producer.produce("orders", b"one", partition=0)
            assert teller.execute("SELECT entry FROM ledger").fetchall() == [("one",)]
        assert records(urls, "orders", 1) == [b"one"]
    finally:
        ledgers[place].execute(f"REVOKE ALL ON ledger FROM {role}")
        ledgers[place].commit()
        server.drop_role(role)


@pytest.mark.slow
@pytest.mark.parametrize("coordinator_id", [1, 2, 3])
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_what_a_coordinator_left_prepared_in_each_database_is_ended_by_the_maintenance(
    postgresql_site, ledgers, commit, coordinator_id
):
    site, name = postgresql_site, name_at(postgresql_site, coordinator_id)
    with site.open() as cluster:
        coordinator = TransactionCoordinator(cluster.coordinator_of(name), cluster)
        producer = coordinator.init_producer_id(name).identity
        branches = Branches(cluster.coordinator_of(name), name)
        for ledger in ledgers:
            branches.enlist(ledger)
            ledger.execute("INSERT INTO ledger VALUES ('one')")
        branches.prepare(producer)
        coordinator.end_transaction(name, producer, commit=commit)
    for ledger in ledgers:
        assert len(ledger.execute(PREPARED).fetchall()) == 1
        ledger.rollback()
    done = CliRunner().invoke(program_with(NAMES), ["maintain", "--once", ", ".join(site.urls)])
    assert done.exit_code == 0, done.output
    assert "3 branches ended in the databases of the cluster" in done.output
    for ledger in ledgers:
        assert ledger.execute(PREPARED).fetchall() == []
        assert ledger.execute("SELECT entry FROM ledger").fetchall() == ([("one",)] if commit else [])
        ledger.rollback()


def test_a_file_of_sqlite_cannot_vote_on_what_others_hold(sqlite_site):
    urls = ", ".join(sqlite_site.urls)
    create_topic(urls, "orders", 3, txnstore_placement="roundrobin")
    with (
        Producer({"bootstrap.servers": urls, "transactional.id": "anna"}) as producer,
        contextlib.closing(sqlite3.connect(sqlite_site.urls[0].removeprefix("sqlite:///"))) as controller,
    ):
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        error = error_of(producer.enlist, controller)
        assert error.code() == KafkaError.INVALID_REQUEST
        assert "several SQLite files" in error.str()
        producer.produce("orders", b"one", partition=0)
        producer.commit_transaction(PATIENCE_SECONDS)
    assert records(urls, "orders", 1) == [b"one"]
