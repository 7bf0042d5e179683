"""What befalls a whole PostgreSQL server: killed, full of connections, made read-only, a standby, its disk full.

The server is the tests' own, and it syncs what it commits to disk.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import event, update

from txnstore import KafkaError, KafkaException, Producer
from txnstore.db.backend import NOTHING, Limits
from txnstore.db.opening import open_store
from txnstore.db.schema import topics
from txnstore.db.statements import HotStatement
from txnstore.errors import OutcomeUnknown, StoreFull, StoreReadOnly, StoreUnavailable
from txnstore.log.append import append_at_once
from txnstore.model import NO_PRODUCER
from txnstore.testing.postgres_server import connection_string
from txnstore.testing.private_cluster import NoServerProgramsError, PrivateCluster, server_user
from txnstore.transactions.coordinator import TransactionCoordinator

MAX_CONNECTIONS = 8
RESERVED_CONNECTIONS = 3


@pytest.fixture(scope="module")
def cluster():
    try:
        cluster = PrivateCluster(
            settings={
                "max_connections": str(MAX_CONNECTIONS),
                "superuser_reserved_connections": str(RESERVED_CONNECTIONS),
            }
        )
    except NoServerProgramsError as error:
        pytest.skip(str(error))
    with cluster:
        cluster.create_role("shop", "secret")
        with cluster.connect() as connection:
            connection.execute("CREATE DATABASE shop OWNER shop")
        yield cluster


@pytest.fixture
def url(cluster):
    return cluster.url("shop", "shop", "secret")


@pytest.fixture
def orders(url, orders_of, topic):
    """The topic on this server, for clients that try again for long enough."""
    with open_store(url, limits=Limits(retry_timeout_ms=60_000)) as store:
        yield orders_of(store, topic)


@pytest.fixture
def impatient(url, orders_of, orders):
    with open_store(url, limits=Limits(retry_timeout_ms=0)) as store:
        yield orders_of(store, orders.name)


def change_setting(cluster, orders, name, value):
    """Change a setting of the whole server; return when new database transactions go by it."""
    with cluster.connect() as connection:
        connection.execute(f"ALTER SYSTEM SET {name} = {value}")
        connection.execute("SELECT pg_reload_conf()")
    shown = f"SHOW {name}"
    for _ in range(1000):
        orders.store.engine.dispose()
        if orders.store.write(lambda connection: connection.exec_driver_sql(shown).scalar_one()) == value:
            return
    raise AssertionError(f"{name} is still not {value}")


@pytest.mark.slow_but_first
def test_nothing_acknowledged_is_lost_when_the_server_is_killed_and_clients_go_on_by_themselves(
    cluster, orders, impatient, in_background, until
):
    """One client writes all the time, one only before and after; the server is killed twice in the middle."""
    producer = TransactionCoordinator(orders.store).init_producer_id(None).identity
    acknowledged: list[bytes] = []
    unknown: list[bytes] = []
    stop = threading.Event()

    def write():
        sequence = 0
        while not stop.is_set():
            batch = orders.batch(b"%d" % sequence, producer=producer, sequence=sequence)
            try:
                orders.append(batch)
            except OutcomeUnknown:
                unknown.append(b"%d" % sequence)
                continue  # the same batch again: it recognises itself
            acknowledged.append(b"%d" % sequence)
            sequence += 1

    running = in_background(write)
    for _ in range(2):
        known = len(acknowledged)
        until(lambda known=known: len(acknowledged) > known + 20)
        cluster.kill()
        cluster.start()
        known = len(acknowledged)
        until(lambda known=known: len(acknowledged) > known + 20)
    stop.set()
    running.result()
    # The other client's connections died twice without its noticing.
    impatient.add(b"the end", retry_timeout_ms=60_000)
    assert orders.values() == [*acknowledged, b"the end"]
    assert acknowledged == [b"%d" % number for number in range(len(acknowledged))]


def test_a_server_that_is_away_for_longer_than_allowed_is_unavailable(cluster, orders, impatient):
    cluster.stop()
    try:
        with pytest.raises(StoreUnavailable):
            impatient.add(b"a book")
    finally:
        cluster.start()
    impatient.add(b"a pen", retry_timeout_ms=60_000)
    assert orders.values() == [b"a pen"]


def connect_or_none(url):
    try:
        return psycopg.connect(connection_string(url))
    except psycopg.OperationalError:
        return None


@pytest.mark.slow
def test_a_server_without_a_connection_left_is_unavailable_until_there_is_one(
    cluster, url, orders, impatient, in_background, until
):
    for store in (orders.store, impatient.store):
        store.engine.dispose()
    with cluster.connect() as connection:
        # A store keeps one connection beside its engine's, which would be another one's when it is given up.
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'shop'")
    others = []

    def all_are_taken():
        # The server counts a connection until the process that served it has ended.
        connection = connect_or_none(url)
        if connection is not None:
            others.append(connection)
        return len(others) == MAX_CONNECTIONS - RESERVED_CONNECTIONS

    try:
        until(all_are_taken)
        with pytest.raises(StoreUnavailable, match="no connection left"):
            impatient.add(b"a book")
        waiting = in_background(lambda: orders.add(b"a pen"))
        others.pop().close()
        waiting.result()
        assert orders.values() == [b"a pen"]
    finally:
        for connection in others:
            connection.close()


def test_a_server_made_read_only_refuses_writes_until_it_is_not(cluster, orders):
    orders.add(b"a book")
    change_setting(cluster, orders, "default_transaction_read_only", "on")
    try:
        with pytest.raises(StoreReadOnly):
            orders.add(b"a pen")
        assert orders.values() == [b"a book"]
    finally:
        change_setting(cluster, orders, "default_transaction_read_only", "off")
    orders.add(b"a pen")
    assert orders.values() == [b"a book", b"a pen"]


@contextmanager
def as_standby(cluster):
    """The server follows another one, which is not there; what this gives promotes it, at the end at the latest."""
    cluster.stop()
    marker = cluster.folder / "data" / "standby.signal"
    marker.touch()
    user = server_user()
    if user is not None:
        os.chown(marker, user.user_id, user.group_id)
    cluster.start()

    def promote():
        with cluster.connect() as connection:
            assert connection.execute("SELECT NOT pg_is_in_recovery() OR pg_promote()").fetchone() == (True,)

    try:
        yield promote
    finally:
        promote()


@pytest.mark.slow
def test_a_standby_is_read_and_not_written_until_it_is_promoted(cluster, orders, monkeypatch):
    monkeypatch.setattr("txnstore.db.store.STANDBY_SECONDS", 0.0)
    orders.add(b"a book")
    with as_standby(cluster) as promote:
        assert orders.values() == [b"a book"]
        with pytest.raises(StoreReadOnly, match=r"25006.*nothing was changed: the server is a standby"):
            orders.add(b"a pen")
        with pytest.raises(StoreReadOnly, match="nothing was changed: the server is a standby"):
            append_at_once(orders.store, [orders.batch(b"a pen")], NO_PRODUCER)
        promote()
        orders.store.engine.dispose()
        orders.add(b"a pen")
    assert orders.values() == [b"a book", b"a pen"]


def add_generally(store, orders):
    orders.append(orders.batch(b"a pen"))


def add_by_function(store, orders):
    store.commits_whole = True
    append_at_once(store, [orders.batch(b"a pen")], NO_PRODUCER)


def add_by_one_message(store, orders):
    statement = HotStatement(update(topics).where(topics.c.name == orders.name).values(name=topics.c.name))
    store.write_at_once([(statement, {})], NOTHING)


@pytest.mark.slow
@pytest.mark.parametrize("add", [add_generally, add_by_function, add_by_one_message])
def test_what_a_standby_refuses_is_tried_on_new_connections_until_it_is_promoted(
    cluster, url, orders, orders_of, in_background, until, add
):
    told: list[StoreUnavailable] = []
    limits = Limits(retry_timeout_ms=60_000, on_unavailable=told.append)
    with as_standby(cluster) as promote, open_store(url, limits=limits) as store:
        own_orders = orders_of(store, orders.name)
        made = []
        event.listen(store.engine, "connect", lambda *_: made.append(1))
        refused = in_background(lambda: add(store, own_orders))
        until(lambda: len(told) > 4)
        assert len(made) > 3
        promote()
        refused.result()
        for error in told:
            assert isinstance(error, StoreUnavailable)
            assert "25006" in str(error)
            assert "nothing was changed: the server is a standby" in str(error)


@pytest.mark.slow
def test_a_producer_goes_on_after_the_standby_that_answers_is_promoted(cluster, url, orders, until):
    settings = {"bootstrap.servers": url, "transactional.id": "failover"}
    heard: list[KafkaError] = []
    with Producer(settings | {"error_cb": heard.append}) as producer:
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(orders.name, b"a book")
        producer.flush(30)
        with as_standby(cluster) as promote:
            producer.produce(orders.name, b"a pen")
            with pytest.raises(KafkaException) as late:
                producer.commit_transaction(0.5)
            assert late.value.args[0].retriable()
            until(lambda: producer.poll(0) or any("the server is a standby" in error.str() for error in heard))
            promote()
            producer.commit_transaction(30)
    assert {error.code() for error in heard} <= {KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}
    assert orders.committed() == [b"a book", b"a pen"]


@pytest.mark.slow
def test_a_producer_of_a_server_that_stays_a_standby_is_told_so(cluster, url, orders, monkeypatch):
    monkeypatch.setattr("txnstore.db.store.STANDBY_SECONDS", 0.5)
    failed = []
    with Producer({"bootstrap.servers": url}) as producer, as_standby(cluster):
        producer.produce(orders.name, b"a pen", on_delivery=lambda error, _: failed.append(error))
        producer.flush(30)
    (error,) = failed
    assert error.code() == KafkaError.KAFKA_STORAGE_ERROR
    assert not error.retriable()
    assert "nothing was changed: the server is a standby, which takes no writes" in error.str()
    assert orders.values() == []


@pytest.fixture
def small_disk():
    """A disk of 4 MiB that the server may write to."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    # Not in the test's own folder, which the server's user cannot enter.
    folder = Path(tempfile.mkdtemp(prefix="txnstore-small-disk-"))
    options = "size=4m,mode=0700"
    user = server_user()
    if user is not None:
        options += f",uid={user.user_id},gid={user.group_id}"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False, capture_output=True, text=True
    )
    if mounted.returncode != 0:
        folder.rmdir()
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)
    folder.rmdir()


def append_until_it_fails(coordinator, transactional_id, producer, batches):
    for batch in batches:
        coordinator.append(transactional_id, producer, [batch])


@pytest.mark.slow
@pytest.mark.needs_root
def test_a_full_disk_leaves_nothing_half_done_and_goes_on_when_there_is_room(cluster, url, orders_of, small_disk):
    with cluster.connect() as connection:
        connection.execute("CREATE DATABASE full_shop")
        connection.execute(f"CREATE TABLESPACE small LOCATION '{small_disk}'")
    with open_store(cluster.url("full_shop"), limits=Limits(retry_timeout_ms=0)) as store:
        orders = orders_of(store)
        store.write(
            lambda connection: connection.exec_driver_sql("ALTER TABLE txnstore.record_batches_1 SET TABLESPACE small")
        )
        coordinator, producer = orders.transaction(orders.name)
        batches = (
            orders.batch(os.urandom(100_000), producer=producer, sequence=number, transactional=True)
            for number in range(100)
        )
        (small_disk / "ballast").write_bytes(bytes(1_000_000))
        with pytest.raises(StoreFull) as refusal:
            append_until_it_fails(coordinator, orders.name, producer, batches)
        assert not refusal.value.outcome_unknown
        written = orders.next_offset()
        assert 0 < written == len(orders.values())
        rest = orders.batch(os.urandom(100_000), producer=producer, sequence=written, transactional=True)
        # Full is full for everybody, and for a whole transaction: nothing of this one is there.
        with pytest.raises(StoreFull):
            coordinator.end_transaction(orders.name, producer, commit=True, appends=[rest])
        assert orders.committed() == []
        (small_disk / "ballast").unlink()
        ended = coordinator.end_transaction(orders.name, producer, commit=True, appends=[rest])
        assert ended.appended[0].base_offset == written
        assert len(orders.committed()) == written + 1
    cluster.drop_database("full_shop")
    with cluster.connect() as connection:
        connection.execute("DROP TABLESPACE small")


@pytest.mark.slow
def test_an_older_server_understands_every_limit(orders_of):
    with PrivateCluster(fsync=False, major_version=16) as old, open_store(old.url("postgres")) as store:
        orders = orders_of(store)
        orders.add(b"a book")
        assert orders.values() == [b"a book"]
