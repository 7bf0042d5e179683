"""Durability: commits of the store's own wait for the disk although the database is set not to."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace

import psycopg
import pytest

from tests.tools.sqlite_faults import FailingDisk, NoSQLiteLibraryError
from txnstore import KafkaException, Producer
from txnstore.db.backend import Durability, Limits
from txnstore.db.opening import open_store
from txnstore.db.statements import run_on_driver
from txnstore.testing.postgres_server import connection_string
from txnstore.testing.private_cluster import PrivateCluster

TIMEOUT = 60.0
#: Of SQLite's synchronous: the highest.
EXTRA = 3

# Deferred: it runs within COMMIT or PREPARE TRANSACTION, and sees what these go by.
WATCH = """
CREATE TABLE public.seen (setting text);
CREATE FUNCTION public.see() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO public.seen VALUES (pg_catalog.current_setting('synchronous_commit'));
  RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER watch AFTER INSERT OR UPDATE ON {table}
  DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.see()
"""


def connect(url):
    return psycopg.connect(connection_string(url), autocommit=True)


def name_of(connection):
    return psycopg.sql.Identifier(connection.info.dbname)


def set_for_database(url, setting):
    with closing(connect(url)) as connection:
        statement = psycopg.sql.SQL("ALTER DATABASE {} SET synchronous_commit = {}")
        connection.execute(statement.format(name_of(connection), psycopg.sql.Literal(setting)))


def watch(url, table):
    with closing(connect(url)) as connection:
        connection.execute(WATCH.format(table=table))


def watch_also(url, table):
    with closing(connect(url)) as connection:
        connection.execute("CREATE" + WATCH.rpartition("CREATE")[2].format(table=table))


def seen(url):
    """Return what the commits since the last look went by."""
    with closing(connect(url)) as connection:
        return {setting for (setting,) in connection.execute("DELETE FROM public.seen RETURNING setting")}


@pytest.fixture
def watched_url(txnstore_postgresql_url):
    open_store(txnstore_postgresql_url).close()
    watch(txnstore_postgresql_url, "txnstore.partition_heads")
    return txnstore_postgresql_url


def produce(url, **further):
    with Producer({"bootstrap.servers": url, "transactional.id": "t", **further}) as producer:
        producer.init_transactions(TIMEOUT)
        with producer.transaction():
            producer.produce("topic", "x")


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("setting", "expected"),
    [("off", "on"), ("on", "on"), ("local", "local"), ("remote_write", "remote_write"), ("remote_apply",) * 2],
)
def test_commits_wait_for_the_disk_whatever_the_database_has_set(watched_url, setting, expected):
    """And what it has set that is as strong, or waits for standbys besides, stays."""
    set_for_database(watched_url, setting)
    produce(watched_url)
    assert seen(watched_url) == {expected}


def test_who_wants_the_risk_sets_it(watched_url):
    set_for_database(watched_url, "off")
    produce(watched_url, **{"txnstore.durability": "database"})
    assert seen(watched_url) == {"off"}
    limits = Limits(durability=Durability.DATABASE)
    with open_store(watched_url, limits=limits) as store:
        shown = store.write(lambda connection: connection.exec_driver_sql("SHOW synchronous_commit").scalar_one())
    assert shown == "off"
    with pytest.raises(KafkaException, match="durability"):
        Producer({"bootstrap.servers": watched_url, "txnstore.durability": "some"})


def test_a_connection_of_a_pool_keeps_no_setting(watched_url):
    """A pooler may give it to somebody else."""
    set_for_database(watched_url, "off")
    with open_store(watched_url, pool_size=1) as store:
        ask = "SHOW synchronous_commit"
        assert store.write(lambda connection: connection.exec_driver_sql(ask).scalar_one()) == "on"
        with store.engine.connect() as connection:
            assert connection.exec_driver_sql(ask).scalar_one() == "off"


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("durability", "expected"), [("full", "on"), ("database", "off")])
def test_a_commit_on_the_callers_connection_is_as_lasting_and_his_settings_stay(watched_url, durability, expected):
    set_for_database(watched_url, "off")
    with (
        closing(psycopg.connect(connection_string(watched_url))) as own,
        Producer(
            {"bootstrap.servers": watched_url, "transactional.id": "t", "txnstore.durability": durability}
        ) as producer,
    ):
        producer.init_transactions(TIMEOUT)
        producer.begin_transaction()
        producer.produce("topic", "x")
        producer.flush(TIMEOUT)
        seen(watched_url)
        producer.enlist(own)
        own.execute("CREATE TABLE public.own (name text)")
        producer.commit_transaction(TIMEOUT)
        assert own.execute("SHOW synchronous_commit").fetchone() == ("off",)
    assert seen(watched_url) == {expected}


@pytest.fixture(scope="module")
def voting_server():
    with PrivateCluster(fsync=False, settings={"synchronous_commit": "off"}) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["full", "database"])
def test_a_vote_of_another_database_and_the_decision_are_as_lasting(watched_url, voting_server, durability):
    """Whatever risk is taken otherwise: of a decision that is lost the other database would keep its share."""
    elsewhere = voting_server.url("postgres")
    set_for_database(watched_url, "off")
    with closing(connect(elsewhere)) as connection:
        connection.execute("DROP TABLE IF EXISTS public.own, public.seen; CREATE TABLE public.own (name text)")
        connection.execute("DROP FUNCTION IF EXISTS public.see")
    watch(elsewhere, "public.own")
    watch_also(watched_url, "txnstore.transaction_branches")
    produce(watched_url)
    settings = {"bootstrap.servers": watched_url, "transactional.id": "t", "txnstore.durability": durability}
    with closing(psycopg.connect(connection_string(elsewhere))) as driver, Producer(settings) as producer:
        producer.init_transactions(TIMEOUT)
        seen(watched_url)
        with producer.transaction():
            producer.enlist(driver)
            driver.execute("INSERT INTO public.own VALUES ('x')")
            producer.produce("topic", "x")
    assert seen(elsewhere) == {"on"}
    # The branch's registration, and the decision.
    assert seen(watched_url) == {"on"}


@pytest.fixture
def disk_without_log(tmp_path):
    """The path of a file on a disk without shared memory, and so without a write-ahead log."""
    try:
        with FailingDisk.install() as disk:
            disk.lacks_shared_memory = True
            yield tmp_path / "old.db"
    except NoSQLiteLibraryError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("mode", ["OFF", "NORMAL"])
def test_a_sqlite_connection_that_does_not_wait_for_the_disk_is_not_enlisted(txnstore_sqlite_url, mode):
    path = txnstore_sqlite_url.removeprefix("sqlite:///")
    for durability in ("full", "database"):
        settings = {
            "bootstrap.servers": txnstore_sqlite_url,
            "transactional.id": "t",
            "txnstore.durability": durability,
        }
        with closing(sqlite3.connect(path)) as own, Producer(settings) as producer:
            own.execute(f"PRAGMA synchronous = {mode}")
            producer.init_transactions(TIMEOUT)
            producer.begin_transaction()
            if durability == "full":
                with pytest.raises(KafkaException, match=r"synchronous.*FULL.*txnstore\.durability=database"):
                    producer.enlist(own)
                own.execute("PRAGMA synchronous = FULL")
            producer.enlist(own)
            producer.produce("topic", "x")
            producer.commit_transaction(TIMEOUT)


def test_without_a_write_ahead_log_an_enlisted_connection_waits_until_the_journal_is_gone(disk_without_log):
    settings = {"bootstrap.servers": f"sqlite:///{disk_without_log}", "transactional.id": "t"}
    with closing(sqlite3.connect(disk_without_log)) as own, Producer(settings) as producer:
        assert own.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        own.execute("PRAGMA synchronous = FULL")
        producer.init_transactions(TIMEOUT)
        producer.begin_transaction()
        with pytest.raises(KafkaException, match=r"less than EXTRA"):
            producer.enlist(own)
        own.execute("PRAGMA synchronous = EXTRA")
        producer.enlist(own)
        producer.produce("topic", "x")
        producer.commit_transaction(TIMEOUT)


def test_every_connection_of_a_sqlite_store_waits_for_the_disk(txnstore_sqlite_url):
    limits = Limits(durability=Durability.DATABASE)
    with open_store(txnstore_sqlite_url, limits=limits) as store:
        ask = "PRAGMA synchronous"
        assert store.write(lambda connection: connection.exec_driver_sql(ask).scalar_one()) == EXTRA
        assert store.read(lambda connection: connection.exec_driver_sql(ask).scalar_one()) == EXTRA


def synchronous(connection):
    return connection.exec_driver_sql("PRAGMA synchronous").scalar_one()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("end", ["as usual", "by an error", "by an interrupt"])
def test_who_need_not_wait_for_the_disk_leaves_the_next_one_waiting(txnstore_sqlite_url, monkeypatch, end):
    """Also on the same connection, whatever became of it."""
    with open_store(txnstore_sqlite_url, pool_size=1) as store:
        unwaited = replace(store.limits, waits_for_disk=False)
        assert store.write(synchronous, limits=unwaited) == 1
        if end == "by an error":
            with pytest.raises(ZeroDivisionError):
                store.write(lambda _: 1 / 0, limits=unwaited)
        elif end == "by an interrupt":
            assert store.write(synchronous) == EXTRA

            def interrupted(connection, text, *arguments):
                run_on_driver(connection, text, *arguments)
                if text == "PRAGMA synchronous = NORMAL":
                    raise KeyboardInterrupt

            with monkeypatch.context() as patched:
                patched.setattr("txnstore.db.sqlite.backend.run_on_driver", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    store.write(synchronous, limits=unwaited)
        assert store.write(synchronous) == EXTRA
        assert store.write(synchronous, limits=unwaited) == 1
