"""A bank over two PostgreSQL servers and the log, whose tellers, servers and recovery are killed all the time.

Sums are zero in every consistent read of the log, and in the databases once all is over; nothing acknowledged is lost,
nothing aborted is there, and every transfer is in all three places or in none.  TXNSTORE_BANK_SECONDS makes it longer;
scripts/soak-bank sets it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack, closing

import psycopg
import pytest

from tests.participants.bank import Table
from tests.participants.tellers import ACCOUNTS, PARTITIONS, TOPIC, Job, end_what_was_left, move_money
from tests.tools.campaigns import times
from tests.tools.fork_server import fork_server
from txnstore.db.backend import Limits
from txnstore.db.opening import open_store
from txnstore.errors import TxnStoreError
from txnstore.log.bounds import read_bounds
from txnstore.log.fetch import fetch
from txnstore.log.topics import create_topic
from txnstore.model import IsolationLevel
from txnstore.participants.recovery import raise_failed, recover_branches
from txnstore.testing.private_cluster import PrivateCluster
from txnstore.transactions.branch_rows import all_branches
from txnstore.transactions.recovery import recover

pytestmark = [pytest.mark.slow, pytest.mark.campaign]

SOAK_SECONDS = float(os.environ.get("TXNSTORE_BANK_SECONDS", "0"))
RUN_SECONDS = times(6)
SEED = int(os.environ.get("TXNSTORE_BANK_SEED") or random.randrange(2**32))
TELLERS = 3
#: What happens to which process, how often; and how long nothing happens.
FAULTS = {"teller killed": 8, "recovery killed": 2, "first server killed": 1, "second server killed": 1, "stopped": 1}
PAUSE_SECONDS = (0.1, 0.5)
SLOWER = 10
STOPPED_SECONDS = 2.5
QUIET_SECONDS = 60


class Processes:
    """The bank's processes; each is started again when it is gone."""

    def __init__(self, jobs):
        self._context = fork_server()
        self._jobs = jobs
        self._running = {}
        self._lives = 0

    def keep_running(self):
        for name, (work, job) in self._jobs.items():
            process = self._running.get(name)
            if process is not None and process.is_alive():
                continue
            self._lives += 1
            # Each life has numbers of its own.
            life = Job(job.name, job.log_url, job.table_urls, job.notes, job.seed + 1000 * self._lives)
            self._running[name] = process = self._context.Process(target=work, args=[life], daemon=True)
            process.start()

    def kill(self, name):
        process = self._running.pop(name)
        process.kill()
        process.join()

    def stop(self, name):
        os.kill(self._running[name].pid, signal.SIGSTOP)

    def go_on(self, name):
        process = self._running.get(name)
        if process is not None:
            os.kill(process.pid, signal.SIGCONT)

    def close(self):
        for name in list(self._running):
            self.kill(name)


class LogReader:
    """Reads both partitions of the log in one snapshot after the other, each where the last one ended."""

    def __init__(self, store, partition_ids):
        self._store = store
        self._positions = dict.fromkeys(partition_ids, 0)
        self.halves_max = 0
        self._changes: Counter[tuple[int, str]] = Counter()
        self.entries: Counter[str] = Counter()
        self.reads = 0

    @property
    def halves(self):
        """The transfers of which only a part can be read yet."""
        return dict(self._changes)

    def read_on(self):
        self._positions, found, beyond = self._store.read(self._read)
        for key, change in found:
            self.entries[key[1]] += 1
            self._changes[key] += change
        self.reads += 1
        # A transaction may be committed whose second half stands behind the start of one that is open: nobody gets
        # past that.  Where all of a transfer could be read, its sum is zero.
        halves = {key: change for key, change in self._changes.items() if change}
        rest: Counter[tuple[int, str]] = Counter()
        for key, change in beyond:
            rest[key] += change
        torn = [key for key, change in halves.items() if change + rest[key]]
        assert torn == [], f"the log holds halves of transfers in read {self.reads}"
        self.halves_max = max(self.halves_max, len(halves))
        self._changes = Counter(halves)

    def _read(self, connection):
        positions, found = self._from(connection, self._positions, IsolationLevel.READ_COMMITTED)
        _, beyond = self._from(connection, positions, IsolationLevel.READ_UNCOMMITTED)
        return positions, found, beyond

    def _from(self, connection, positions, isolation):
        found = []
        while True:
            pages = fetch(connection, positions, isolation=isolation)
            for number, page in pages.items():
                for batch in page.batches:
                    found += [
                        ((number, (each.key or b"").decode()), int(each.value or b"0")) for each in batch.records()
                    ]
            moved = {number: page.next_offset for number, page in pages.items()}
            if moved == positions:
                return positions, found
            positions = moved


@pytest.fixture(params=["sqlite", "postgresql"])
def world(request, tmp_path):
    """Two servers with a database of accounts each, and a log beside the first or in a file."""
    with PrivateCluster(fsync=False) as first, PrivateCluster(fsync=False) as second, ExitStack() as stack:
        tables = []
        for server, name in ((first, "checking"), (second, "savings")):
            server.create_database(name)
            with server.connect(name) as connection:
                connection.execute("CREATE TABLE account (name text PRIMARY KEY, balance bigint NOT NULL)")
                connection.execute("CREATE TABLE entry (name text PRIMARY KEY, change bigint NOT NULL)")
                connection.execute("INSERT INTO account SELECT n::text, 0 FROM generate_series(0, %s) n", [ACCOUNTS])
            table = Table(server.url(name))
            stack.callback(table.close)
            for gid in table.foreign_gids:
                table.watching.execute("BEGIN")
                table.watching.execute("INSERT INTO entry VALUES (%s, 1)", [gid])
                table.watching.execute(f"PREPARE TRANSACTION '{gid}'")
            tables.append(table)
        if request.param == "sqlite":
            log_url = f"sqlite:///{tmp_path}/log.db"
        else:
            first.create_database("log")
            log_url = first.url("log")
        yield log_url, (first, second), tables


def test_sums_are_zero_whoever_is_killed(world, tmp_path):
    log_url, servers, tables = world
    chance = random.Random(SEED)
    notes = tmp_path / "notes"
    notes.touch()
    urls = tuple(table.url for table in tables)
    jobs = {f"teller-{n}": (move_money, Job(f"teller-{n}", log_url, urls, str(notes), n)) for n in range(TELLERS)}
    jobs["recovery"] = (end_what_was_left, Job("recovery", log_url, urls, str(notes), TELLERS))
    befallen: Counter[str] = Counter()
    print(f"seed {SEED}")  # noqa: T201 - repeats a run that failed
    with open_store(log_url, limits=Limits(retry_timeout_ms=20_000)) as store, closing(Processes(jobs)) as processes:
        topic = store.write(lambda connection: create_topic(connection, TOPIC, partition_count=PARTITIONS))
        reader = LogReader(store, topic.partition_ids)
        end = time.monotonic() + (SOAK_SECONDS or RUN_SECONDS)
        processes.keep_running()
        stopped: tuple[str, float] | None = None
        # On a machine where tellers are killed before they get anywhere, it goes on for longer and more slowly.
        while not (late := time.monotonic() >= end) or (
            time.monotonic() < end + QUIET_SECONDS and "committed " not in notes.read_text()
        ):
            time.sleep(chance.uniform(*PAUSE_SECONDS) * (SLOWER if late else 1))
            fault = chance.choices(list(FAULTS), list(FAULTS.values()))[0]
            teller = f"teller-{chance.randrange(TELLERS)}"
            if stopped is not None and time.monotonic() > stopped[1]:
                processes.go_on(stopped[0])
                stopped = None
            if fault == "teller killed":
                processes.kill(teller)
            elif fault == "recovery killed":
                processes.kill("recovery")
            elif fault == "stopped" and stopped is None:
                processes.stop(teller)
                stopped = (teller, time.monotonic() + STOPPED_SECONDS)
            elif "server" in fault:
                server = servers[fault.startswith("second")]
                server.kill()
                server.start()
            befallen[fault] += 1
            processes.keep_running()
            reader.read_on()
        processes.close()
        _come_to_rest(store, tables, topic.partition_ids)
        reader.read_on()
        assert not reader.halves
        left = store.read(all_branches)
    told = notes.read_text().splitlines()
    kinds = Counter(line if line.startswith("recovered") else line.split()[0] for line in told)
    print(json.dumps({"seed": SEED, **befallen, "reads": reader.reads, **kinds}))  # noqa: T201 - for people
    _check(reader, tables, told)
    assert left == []


def _come_to_rest(store, tables, partition_ids):
    """End everything that was left, as a recovery does that nobody kills."""

    def is_open(connection):
        # A teller that was killed before it had made its branches known: its records wait for the timeout.
        bounds = read_bounds(connection, partition_ids).values()
        return any(found.last_stable_offset < found.high_watermark for found in bounds)

    deadline = time.monotonic() + QUIET_SECONDS
    while True:
        try:
            recover(store)
            for table in tables:
                raise_failed(recover_branches(store, table.url))
            has_branches = any(table.our_gids() for table in tables) or store.read(all_branches)
            if not has_branches and not store.read(is_open):
                return
        except (TxnStoreError, psycopg.OperationalError):
            pass
        assert time.monotonic() < deadline, "it does not come to rest"
        time.sleep(0.1)


def _check(reader, tables, told):
    entries = [dict(table.watching.execute("SELECT name, change FROM entry").fetchall()) for table in tables]
    committed = {line.split(" ", 1)[1] for line in told if line.startswith("committed ")}
    aborted = {line.split(" ", 1)[1] for line in told if line.startswith("aborted ")}
    # D1: everywhere or nowhere.
    assert set(entries[0]) == set(entries[1])
    assert set(entries[0]) == set(reader.entries)
    assert set(reader.entries.values()) == {2 * PARTITIONS}
    assert all(entries[0][name] == -entries[1][name] for name in entries[0])
    balances = [table.watching.execute("SELECT sum(balance) FROM account").fetchone()[0] for table in tables]
    assert sum(balances) == 0
    assert balances[1] == sum(entries[1].values())
    # What was acknowledged is there, and what was aborted is not.
    assert committed <= set(entries[0])
    assert not aborted & set(entries[0])
    # D4 and D5.
    assert [table.gids() for table in tables] == [table.foreign_gids for table in tables]
    assert committed
