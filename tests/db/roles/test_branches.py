"""Transactions with branches by roles: a producer's rights do for those of the log, its own for the other database."""

from __future__ import annotations

import contextlib
import itertools

import psycopg
import pytest

from tests.db.roles.shop import PATIENCE_SECONDS, TENANT
from txnstore import KafkaError, KafkaException, TopicPartition
from txnstore.db.opening import open_store
from txnstore.errors import PermissionDenied
from txnstore.participants.recovery import raise_failed, recover_branches
from txnstore.testing.postgres_server import connection_string
from txnstore.transactions.branch_rows import all_branches, known_branches

_NUMBERS = itertools.count(1)
#: Whose the topic is that each of them writes to.
TOPICS = {"writer": "others", "worker": "others", TENANT: "tenant.orders"}


@pytest.fixture(scope="module")
def bank(shop):
    """A database beside the log, in which the shop's roles may only add entries."""
    if not shop.server.keeps_prepared_transactions:
        pytest.skip("the server keeps no prepared transactions")
    name = f"{shop.name}_bank"
    shop.server.create_database(name)
    with shop.server.connect(name) as connection:
        connection.execute("CREATE TABLE account (name text PRIMARY KEY)")
        for role in shop.roles.values():
            connection.execute(f'GRANT INSERT ON account TO "{role}"')
    yield name
    with shop.server.connect(name) as connection:
        for role in shop.roles.values():
            connection.execute(f'REVOKE ALL ON account FROM "{role}"')
    shop.server.drop_database(name)


@pytest.fixture
def entries(shop, bank):
    """Returns what is in the bank."""

    def read():
        with shop.server.connect(bank) as connection:
            return {name for (name,) in connection.execute("SELECT name FROM account")}

    return read


@pytest.fixture
def open_teller(shop, bank):
    """Connects to the bank as a role."""
    with contextlib.ExitStack() as opened:

        def open_as(role):
            url = shop.server.url(bank, shop.roles[role], "secret")
            return opened.enter_context(contextlib.closing(psycopg.connect(connection_string(url))))

        yield open_as


@pytest.fixture
def make_producer(shop):
    with contextlib.ExitStack() as opened:

        def make(role):
            transactional_id = f"tenant-branches-{next(_NUMBERS)}"
            return opened.enter_context(shop.producer(role, transactional_id=transactional_id))

        yield make


def pay(producer, teller, role, name):
    producer.begin_transaction()
    producer.enlist(teller)
    teller.execute("INSERT INTO account VALUES (%s)", [name])
    producer.produce(TOPICS[role], name)


@pytest.mark.slow
@pytest.mark.parametrize("role", TOPICS)
def test_log_and_database_commit_together(shop, make_producer, open_teller, entries, role):
    name = f"paid {next(_NUMBERS)}"
    producer, teller = make_producer(role), open_teller(role)
    producer.init_transactions(PATIENCE_SECONDS)
    pay(producer, teller, role, f"not {name}")
    producer.abort_transaction(PATIENCE_SECONDS)
    pay(producer, teller, role, name)
    if role != "writer":
        # With a consumer's rights, too, offsets are a part of it.
        metadata = b"CGMDv2:\xff\xff\xff\xfftenant-bank\x00\x00\x01"
        producer.send_offsets_to_transaction([TopicPartition(TOPICS[role], 0, 1)], metadata)
    producer.commit_transaction(PATIENCE_SECONDS)
    assert entries() & {name, f"not {name}"} == {name}
    statement = (
        "SELECT convert_from(value, 'UTF8') FROM txnstore.records"
        " WHERE topic = %s AND status = 'committed' AND convert_from(value, 'UTF8') LIKE '%%' || %s"
    )
    with shop.connect() as connection:
        assert connection.execute(statement, [TOPICS[role], name]).fetchall() == [(name,)]
    # The connection is the role's again.
    teller.execute("INSERT INTO account VALUES (%s)", [f"after {name}"])
    teller.rollback()
    producer.close()
    assert shop.store.read(all_branches) == []


@pytest.mark.parametrize("role", ["reader", "watcher"])
def test_who_may_not_write_to_the_log_is_refused_before_anything_is_prepared(
    shop, make_producer, open_teller, entries, role
):
    before, teller = entries(), open_teller(role)
    producer = make_producer(role)
    with pytest.raises(KafkaException) as refused:
        producer.init_transactions(PATIENCE_SECONDS)
    assert refused.value.args[0].code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED
    with pytest.raises(KafkaException):
        producer.begin_transaction()
    # It was never enlisted: it is the role's own.
    teller.execute("INSERT INTO account VALUES ('alone')")
    teller.rollback()
    assert entries() == before
    assert shop.store.read(all_branches) == []


def test_what_a_producer_left_prepared_is_ended_by_a_coordinator_that_may_be_its_role_there(
    shop, bank, make_producer, open_teller, entries, monkeypatch
):
    name = f"left {next(_NUMBERS)}"
    producer, teller = make_producer("writer"), open_teller("writer")
    producer.init_transactions(PATIENCE_SECONDS)
    pay(producer, teller, "writer", name)

    with monkeypatch.context() as patched:
        patched.setattr("txnstore.participants.branches.Branches._finish", lambda *_: None)
        producer.commit_transaction(PATIENCE_SECONDS)
        producer.close()
    teller.close()
    there = shop.server.url(bank, shop.roles["upkeep"], "secret")
    with open_store(shop.url("upkeep")) as store:
        with pytest.raises(PermissionDenied, match=shop.roles["writer"]):
            raise_failed(recover_branches(store, there))
        assert name not in entries()
        with shop.server.connect() as connection:
            connection.execute(f'GRANT "{shop.roles["writer"]}" TO "{shop.roles["upkeep"]}"')
        raise_failed(recover_branches(store, there))
        assert name in entries()
        assert store.read(all_branches) == []


def test_who_does_not_see_the_transaction_of_what_is_prepared_does_not_presume_that_it_was_aborted(
    shop, bank, open_teller, entries, monkeypatch
):
    """Its own is ended all the same."""
    number = next(_NUMBERS)
    ids = {"writer": f"others-hidden-{number}", TENANT: f"tenant-own-{number}"}
    for role, transactional_id in ids.items():
        with (
            contextlib.closing(open_teller(role)) as teller,
            shop.producer(role, transactional_id=transactional_id) as producer,
            monkeypatch.context() as patched,
        ):
            producer.init_transactions(PATIENCE_SECONDS)
            pay(producer, teller, role, transactional_id)
            patched.setattr("txnstore.participants.branches.Branches._finish", lambda *_: None)
            producer.commit_transaction(PATIENCE_SECONDS)
    # The superuser there, who may end whatever is prepared.
    there = shop.server.url(bank)
    with open_store(shop.url(TENANT)) as store:
        done = recover_branches(store, there)
    with pytest.raises(PermissionDenied, match="some rows of transaction_branches, transactions"):
        raise_failed(done)
    assert (len(done.failed), len(done.committed), len(done.rolled_back)) == (1, 1, 0)
    assert entries() & set(ids.values()) == {ids[TENANT]}
    raise_failed(recover_branches(shop.store, there))
    assert entries() >= set(ids.values())


def test_who_sees_a_transactional_id_may_say_that_it_has_no_such_branch(shop):
    with open_store(shop.url(TENANT)) as store:
        assert known_branches(store, ["of nobody"], of_transactional_id="tenant-id") == {}
        with pytest.raises(PermissionDenied, match="the branch of nobody is open"):
            known_branches(store, ["of nobody"], of_transactional_id="others-id")
    with open_store(shop.url("writer")) as store:
        assert known_branches(store, ["of nobody"]) == {}


@pytest.mark.slow
def test_who_may_not_read_the_logs_own_tables_is_told_so_and_is_no_branch(shop, make_producer):
    stranger = f"{shop.name}_stranger"
    shop.server.create_role(stranger, "secret")
    try:
        producer = make_producer("writer")
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        url = connection_string(shop.server.url(shop.name, stranger, "secret"))
        with contextlib.closing(psycopg.connect(url)) as connection:
            with pytest.raises(KafkaException, match=r"may not read txnstore\.stores.*roles grant producer") as refused:
                producer.enlist(connection)
            assert refused.value.args[0].code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED
            # It is its owner's as before, and the transaction goes on.
            connection.execute("SELECT 1")
            connection.commit()
        producer.abort_transaction(PATIENCE_SECONDS)
    finally:
        shop.server.drop_role(stranger)


def test_a_store_in_the_other_database_that_its_role_may_not_read_is_no_obstacle(
    shop, bank, make_producer, open_teller, entries
):
    name = f"beside a store {next(_NUMBERS)}"
    open_store(shop.server.url(bank)).close()
    producer, teller = make_producer("writer"), open_teller("writer")
    producer.init_transactions(PATIENCE_SECONDS)
    pay(producer, teller, "writer", name)
    producer.commit_transaction(PATIENCE_SECONDS)
    assert name in entries()
