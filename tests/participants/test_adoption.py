"""Copies: a restored dump or a copied file leaves alone what its original has in other databases."""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager

import pytest
from sqlalchemy import select, update

from tests.copies import copy_file, copy_schema, restore_dump
from tests.participants.bank import Bank
from txnstore.db import identity
from txnstore.db.callers.connections import callers_connection
from txnstore.db.callers.on_caller_connection import is_same_store, run_joined
from txnstore.db.cluster.cluster import open_cluster
from txnstore.db.cluster.membership import read_databases
from txnstore.db.opening import connect_store, open_store, upgrade
from txnstore.db.schema import SCHEMA_VERSION, outbox, stores
from txnstore.errors import InvalidRequest, PermissionDenied, StoreCopied, TxnStoreError, WrongCluster
from txnstore.participants.adoption import adopt
from txnstore.participants.recovery import recover_branches, recover_in_cluster
from txnstore.transactions.branch_rows import all_branches
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.outcome import Outcome, read_outcome


@pytest.fixture
def copied(request, tmp_path):
    """Copy the database at a URL; return the copy's."""
    names = iter(range(1, 100))
    made = []

    def copy(url):
        if url.startswith("sqlite"):
            target_url = f"sqlite:///{tmp_path / f'copy-{next(names)}.db'}"
            copy_file(url, target_url)
            return target_url
        server = request.getfixturevalue("txnstore_postgres_server")
        name = f"{url.rpartition('/')[2]}_copy_{next(names)}"
        server.create_database(name)
        made.append((server, name))
        restore_dump(url, server.url(name))
        return server.url(name)

    yield copy
    for server, name in made:
        server.drop_database(name)


@pytest.fixture
def original(txnstore_empty_url, clock):
    """A store that knows which database it was made in."""
    with open_store(txnstore_empty_url, clock=clock) as store:
        yield store


@pytest.fixture
def bank(original, clock, tables):
    """A bank whose log is in it."""
    with closing(Bank(original, clock, tables)) as made:
        yield made


@contextmanager
def opened(url, clock=None):
    with open_store(url, clock=clock, create=False) as store:
        yield store


def uuid_in(store):
    return store.read(lambda connection: connection.execute(select(stores.c.store_uuid)).scalar_one())


@pytest.mark.slow
def test_recovery_on_a_copy_leaves_the_originals_branches_alone(bank, clock, copied, txnstore_empty_url):
    transfer = bank.prepared()
    with opened(copied(txnstore_empty_url), clock) as copy:
        transfer.decide(commit=True)
        transfer.die()
        # For the copy it is open, and too old by now: it would be aborted, and rolled back in both databases.
        clock.advance(60_001)
        for table in bank.tables:
            with pytest.raises(StoreCopied, match="txnstore adopt"):
                recover_branches(copy, table.url)
        adopt([copy])
    with opened(str(copy.url.url.render_as_string(hide_password=False)), clock) as adopted:
        assert adopted.store_uuid != bank.store.store_uuid
        assert adopted.read(all_branches) == []
        assert [recover_branches(adopted, table.url).ended_count for table in bank.tables] == [0, 0]
    assert [len(table.our_gids()) for table in bank.tables] == [1, 1]
    bank.recover()
    bank.assert_whole(transfer.name, committed=True)


@pytest.mark.slow
def test_recovery_on_a_copy_in_the_originals_database_leaves_its_branches_alone(txnstore_empty_url, clock, tables):
    """Under another name in the same database, as `pg_dump --schema` and a changed name in its text make one."""
    if txnstore_empty_url.startswith("sqlite"):
        pytest.skip("a file holds one store")
    with (
        open_store(txnstore_empty_url, schema="the_original", clock=clock) as original,
        closing(Bank(original, clock, tables)) as bank,
    ):
        transfer = bank.prepared()
        copy_schema(txnstore_empty_url, "the_original", "the_copy")
        with open_store(txnstore_empty_url, schema="the_copy", clock=clock, create=False) as copy:
            assert copy.store_uuid == original.store_uuid
            transfer.decide(commit=True)
            transfer.die()
            clock.advance(60_001)
            for table in bank.tables:
                with pytest.raises(StoreCopied, match="txnstore adopt"):
                    recover_branches(copy, table.url)
            adopt([copy])
            assert uuid_in(copy) != original.store_uuid == uuid_in(original)
        bank.recover()
        bank.assert_whole(transfer.name, committed=True)


@pytest.mark.slow
def test_a_copy_makes_no_branches_in_its_originals_name(bank, clock, copied, txnstore_empty_url):
    """The original would not know them, and roll them back although the copy has decided to commit."""
    with opened(copied(txnstore_empty_url), clock) as copy:
        with pytest.raises(StoreCopied):
            bank.written(store=copy)
        adopt([copy])
    with opened(str(copy.url.url.render_as_string(hide_password=False)), clock) as adopted:
        transfer = bank.written(store=adopted)
        transfer.prepare()
        assert [recovered.ended_count for recovered in bank.recover()] == [0, 0]
        assert sum(len(table.our_gids()) for table in bank.tables) == 2
        transfer.branches.settle()
        for table in bank.tables:
            recover_branches(adopted, table.url)
        transfer.branches.finish(commit=False)


@pytest.mark.slow
def test_who_began_before_an_adoption_makes_no_branches_after_it(bank, txnstore_empty_url):
    transfer = bank.written()
    with opened(txnstore_empty_url) as again:
        adopt([again], force=True)
    with pytest.raises(StoreCopied, match="restart the program"):
        transfer.prepare()
    assert [table.our_gids() for table in bank.tables] == [[], []]
    transfer.branches.abandon()


@pytest.mark.slow
def test_what_the_copy_has_open_with_branches_is_aborted_there(bank, clock, copied, txnstore_empty_url):
    transfer = bank.prepared()
    with opened(copied(txnstore_empty_url), clock) as copy:
        adopt([copy])
        producer = transfer.producer
        assert copy.read(lambda connection: read_outcome(connection, producer)) is Outcome.ABORTED
        with pytest.raises(TxnStoreError):
            TransactionCoordinator(copy).end_transaction(transfer.name, producer, commit=True)
    transfer.decide(commit=True)
    transfer.finish(commit=True)
    bank.assert_whole(transfer.name, committed=True)


@pytest.mark.slow
def test_everything_else_goes_on_without_adoption(original, clock, copied, txnstore_empty_url):
    with opened(copied(txnstore_empty_url), clock) as copy:
        coordinator = TransactionCoordinator(copy)
        producer = coordinator.init_producer_id("t", 60_000).identity
        assert producer.epoch == 0
        assert copy.store_uuid == original.store_uuid
        assert recover_in_cluster(copy, None) == 0


@pytest.mark.slow
def test_the_original_is_recognised_and_adopted_by_force_only(original, clock, txnstore_empty_url):
    identity.check_original(original)
    with pytest.raises(InvalidRequest, match="--force"):
        adopt([original])
    assert uuid_in(original) == original.store_uuid
    (adopted,) = adopt([original], force=True)
    assert adopted.uuid_before == original.store_uuid != adopted.uuid_after == uuid_in(original)
    with opened(txnstore_empty_url) as again:
        identity.check_original(again)
        (database,) = again.read(read_databases)
        assert database.is_own


@pytest.mark.slow
def test_an_original_that_has_moved_keeps_its_identity(bank, clock, copied, txnstore_empty_url):
    transfer = bank.prepared()
    transfer.decide(commit=True)
    transfer.die()
    with opened(copied(txnstore_empty_url), clock) as moved:
        with pytest.raises(StoreCopied):
            recover_branches(moved, bank.tables[0].url)
        adopt([moved], same=True)
        assert uuid_in(moved) == bank.store.store_uuid
        assert [len(recover_branches(moved, table.url).committed) for table in bank.tables] == [1, 1]
    bank.assert_whole(transfer.name, committed=True)


def test_a_moved_or_vacuumed_file_is_still_the_original(txnstore_sqlite_url, tmp_path):
    with open_store(txnstore_sqlite_url) as store:
        identity.check_original(store)
        store.engine.dispose()
        with closing(sqlite3.connect(txnstore_sqlite_url.removeprefix("sqlite:///"))) as connection:
            connection.execute("VACUUM")
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / "moved.db"
    (tmp_path / txnstore_sqlite_url.rpartition("/")[2]).rename(moved)
    with open_store(f"sqlite:///{moved}") as store:
        identity.check_original(store)


def test_a_database_made_from_a_template_is_a_copy(txnstore_postgres_server, txnstore_postgresql_url):
    with open_store(txnstore_postgresql_url) as store:
        identity.check_original(store)
    name = txnstore_postgresql_url.rpartition("/")[2]
    txnstore_postgres_server.create_database(f"{name}_t", template=name)
    try:
        with open_store(txnstore_postgres_server.url(f"{name}_t")) as copy, pytest.raises(StoreCopied):
            identity.check_original(copy)
    finally:
        txnstore_postgres_server.drop_database(f"{name}_t")


def test_a_role_that_may_not_ask_is_told_which_right_it_lacks(txnstore_postgresql_url, monkeypatch):
    with open_store(txnstore_postgresql_url) as store:
        identity.check_original(store)
        monkeypatch.setattr(type(store.backend), "identity", lambda *_: None)
        with pytest.raises(StoreCopied, match="GRANT EXECUTE"):
            identity.check_original(store)
        store.write(lambda connection: connection.execute(update(stores).values(database_identity=None)))
        with pytest.raises(StoreCopied, match="GRANT EXECUTE"):
            identity.check_original(store)
        with pytest.raises(PermissionDenied, match="GRANT EXECUTE"):
            adopt([store])


def test_a_store_that_does_not_know_where_it_is_learns_it_when_it_is_upgraded(txnstore_url, code_of_version):
    def recorded(store):
        return store.read(lambda c: c.execute(select(stores.c.database_identity)).scalar_one())

    with connect_store(txnstore_url) as store:
        assert recorded(store) is None
        code_of_version(SCHEMA_VERSION + 1)
        upgrade(store)
        assert recorded(store) == store.read(store.backend.identity)


@pytest.mark.slow
def test_rows_of_the_outbox_are_not_taken_for_those_of_a_later_transaction(original, copied, txnstore_empty_url):
    """Servers number their transactions each by itself."""
    original.write(lambda c: c.execute(outbox.insert().values(topic="t", value=b"x")))
    with opened(copied(txnstore_empty_url)) as copy:
        ask = select(outbox.c.transaction_id)
        (before,) = copy.read(lambda c: c.execute(ask).scalars().all())
        adopt([copy])
        (after,) = copy.read(lambda c: c.execute(ask).scalars().all())
    assert after == (None if before is None else -before)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("same", [False, True])
def test_nor_are_those_of_several_servers_taken_for_one_another(original, same):
    """The second server has come to the numbers of the first one, and a caller has written two rows."""

    def insert_rows(connection, *numbers):
        connection.execute(outbox.insert(), [{"topic": "t", "transaction_id": number} for number in numbers])

    def read_numbers(connection):
        return connection.execute(select(outbox.c.transaction_id).order_by(outbox.c.outbox_id)).scalars().all()

    original.write(lambda connection: insert_rows(connection, 5, 5, 7))
    with opened(str(original.url.url.render_as_string(hide_password=False))) as once:
        adopt([once], same=same, force=True)
    with opened(str(original.url.url.render_as_string(hide_password=False))) as twice:
        twice.write(lambda connection: insert_rows(connection, 5, 7))
        adopt([twice], same=same, force=True)
        first, again, second, third, fourth = twice.read(read_numbers)
    assert first == again
    assert len({first, second, third, fourth}) == 4
    assert max(first, second, third, fourth) < 0


@pytest.mark.slow
def test_a_connection_to_a_copy_is_none_to_the_store(original, clock, copied, txnstore_empty_url):
    """What the producer commits on it would be in the copy, and nowhere else."""
    with opened(copied(txnstore_empty_url), clock) as copy:
        ask = select(stores.c.store_uuid)
        for store in (original, copy):
            driver = store.engine.raw_connection()
            try:
                driver.cursor().execute("BEGIN")
                callers = callers_connection(driver.driver_connection)
                assert is_same_store(original, callers) is (store is original)
                if store is copy:
                    with pytest.raises(InvalidRequest, match="another database"):
                        run_joined(original, callers, lambda connection: connection.execute(ask))
            finally:
                driver.cursor().execute("ROLLBACK")
                driver.close()


def test_a_server_that_has_started_anew_is_the_same(original):
    """What was known of it before is asked again, before a connection is refused."""
    driver = original.engine.raw_connection()
    try:
        driver.cursor().execute("BEGIN")
        callers = callers_connection(driver.driver_connection)
        original.running = "before:1"
        assert is_same_store(original, callers)
        assert original.running == original.read(original.backend.running)
    finally:
        driver.cursor().execute("ROLLBACK")
        driver.close()


# --- clusters ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster_urls(tmp_path):
    """The databases of a cluster of two files."""
    urls = [f"sqlite:///{tmp_path / name}.db" for name in ("one", "two")]
    open_cluster(urls).close()
    return urls


@pytest.mark.slow
def test_a_copied_controller_does_not_reach_the_members_of_the_original(cluster_urls, copied):
    copy = copied(cluster_urls[0])
    with pytest.raises(StoreCopied):
        open_cluster([copy, cluster_urls[1]])
    with opened(copy) as store, pytest.raises(WrongCluster, match="all their URLs"):
        adopt([store])
    with opened(copy) as one, opened(cluster_urls[1]) as two, pytest.raises(WrongCluster, match="is not a copy"):
        adopt([one, two])


@pytest.mark.slow
def test_a_cluster_is_adopted_as_a_whole_also_after_a_crash_in_the_middle(cluster_urls, copied, monkeypatch):
    copies = [copied(url) for url in cluster_urls]
    with opened(copies[0]) as one, opened(copies[1]) as two:

        def die(*_, **__):
            raise KeyboardInterrupt

        monkeypatch.setattr(two, "write", die)
        with pytest.raises(KeyboardInterrupt):
            adopt([one, two])
    with pytest.raises((StoreCopied, WrongCluster)), open_cluster(copies) as cluster:
        cluster.own(2)
    with opened(copies[0]) as one, opened(copies[1]) as two:
        (adopted,) = adopt([one, two])
        assert adopted.store is two
    with open_cluster(copies) as cluster, open_cluster(cluster_urls) as originals:
        found = [[member.store_uuid for member in each.databases] for each in (cluster, originals)]
        assert cluster.own(2).store_uuid == found[0][1]
        assert not set(found[0]) & set(found[1])
    with pytest.raises(WrongCluster), open_cluster([copies[0], cluster_urls[1]]) as mixed:
        mixed.own(2)


@pytest.mark.slow
def test_a_member_that_has_moved_is_taken_in_again(cluster_urls, copied):
    moved = copied(cluster_urls[1])
    with pytest.raises(StoreCopied), open_cluster([cluster_urls[0], moved]) as cluster:
        cluster.own(2)
    with opened(moved) as store:
        adopt([store], same=True)
    with open_cluster([cluster_urls[0], moved]) as cluster:
        assert cluster.own(2).backend.name == "sqlite"
