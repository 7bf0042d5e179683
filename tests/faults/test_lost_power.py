"""A machine that loses its power: of an SQLite file there is what was made durable, and all of its clients are gone."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.steps import NO_MEMBER, PATIENCE_SECONDS, create_topic
from tests.tools.sqlite_faults import FailingDisk, NoSQLiteLibraryError
from txnstore import Producer, TopicPartition
from txnstore.db import store as stores
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.opening import open_store
from txnstore.transactions.protocol import TransactionState

TOPIC = "orders"


@dataclass(frozen=True)
class State:
    """What a file says of the one transactional id and the one group, by SQLite's own means."""

    state: int
    pending: list[tuple[int]]
    committed: list[tuple[int]]

    @classmethod
    def of(cls, path):
        with closing(sqlite3.connect(path)) as connection:
            ((state,),) = connection.execute("SELECT state FROM txnstore_transactions").fetchall()
            pending = connection.execute("SELECT pending_offset FROM txnstore_pending_group_offsets").fetchall()
            committed = connection.execute("SELECT committed_offset FROM txnstore_group_offsets").fetchall()
            return cls(state, pending, committed)


class Machine:
    """An SQLite file on a disk of which is known what it would have after a loss of power."""

    def __init__(self, disk, path, folder):
        self.path = path
        self._durable = folder / "durable"
        self._durable.mkdir()
        self.syncs_count = 0
        disk.when_synced = self._keep

    def _keep(self):
        self.syncs_count += 1
        # In a process of its own: whoever closes a file that SQLite has open takes its locks from it.
        subprocess.run(["cp", *self.path.parent.glob(f"{self.path.name}*"), self._durable], check=True)

    def after_loss(self, folder):
        """Return what the file would say."""
        shutil.copytree(self._durable, folder)
        # The memory of the processes is lost with them.
        (folder / f"{self.path.name}-shm").unlink()
        return State.of(folder / self.path.name)


@pytest.fixture
def machine(txnstore_sqlite_url, tmp_path, monkeypatch):
    # The general way waits for each step.
    monkeypatch.setattr(stores, "COMMITS_WHOLE", True)
    try:
        with FailingDisk.install() as disk:
            path = Path(txnstore_sqlite_url.removeprefix("sqlite:///"))
            yield Machine(disk, path, tmp_path)
    except NoSQLiteLibraryError as error:
        pytest.skip(str(error))


def begin_with_offset(producer, offset):
    producer.begin_transaction()
    producer.send_offsets_to_transaction([TopicPartition(TOPIC, 0, offset)], NO_MEMBER, PATIENCE_SECONDS)


def test_offsets_of_an_open_transaction_wait_for_no_disk_and_it_is_lost_as_a_whole(
    machine, txnstore_sqlite_url, tmp_path
):
    create_topic(txnstore_sqlite_url, TOPIC)
    with Producer({"bootstrap.servers": txnstore_sqlite_url, "transactional.id": "anna"}) as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        for offset in (1, 2):
            before = machine.syncs_count
            begin_with_offset(producer, offset)
            assert machine.syncs_count == before
            committed = [(1,)] if offset == 2 else []
            # Others see it, and wait for its end.
            assert State.of(machine.path) == State(TransactionState.ONGOING, [(offset,)], committed)
            lost = machine.after_loss(tmp_path / f"before {offset}")
            assert lost.state in (TransactionState.EMPTY, TransactionState.COMPLETE_COMMIT)
            assert (lost.pending, lost.committed) == ([], committed)
            producer.produce(TOPIC, str(offset), partition=0)
            producer.commit_transaction(PATIENCE_SECONDS)
            assert machine.syncs_count > before
            kept = machine.after_loss(tmp_path / f"behind {offset}")
            assert kept == State(TransactionState.COMPLETE_COMMIT, [], [(offset,)])


def test_what_somebody_else_may_commit_later_waits_for_the_disk(machine, txnstore_sqlite_url, tmp_path):
    create_topic(txnstore_sqlite_url, TOPIC)
    with open_store(txnstore_sqlite_url) as store:
        allowed = {"transaction.two.phase.commit.enable": "true"}
        store.write(lambda connection: change_store_settings(connection, allowed))
    configuration = {
        "bootstrap.servers": txnstore_sqlite_url,
        "transactional.id": "anna",
        "transaction.two.phase.commit.enable": True,
    }
    with Producer(configuration) as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        begin_with_offset(producer, 1)
        producer.prepare_transaction(PATIENCE_SECONDS)
        kept = machine.after_loss(tmp_path / "prepared")
        assert kept == State(TransactionState.ONGOING, [(1,)], [])
        producer.commit_transaction(PATIENCE_SECONDS)
