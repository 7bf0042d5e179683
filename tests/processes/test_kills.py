"""Writers and readers in processes of their own, killed all the time: nothing lost, twice, aborted or half there.

TXNSTORE_SOAK_SECONDS makes the runs longer; scripts/soak sets it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sqlite3
import time
from collections import Counter
from dataclasses import replace

import pytest
from sqlalchemy import update

from tests.tools.anomalies import find_anomalies
from tests.tools.campaigns import times
from tests.tools.histories import Decision, History, Kind
from tests.tools.recording import LineRecorder, dump, read_to_end
from tests.tools.workload import (
    Job,
    PlainWriter,
    TransactionalWriter,
    help_out,
    read_all,
    read_events,
    write_plainly,
    write_transactions,
)
from txnstore.db.schema import transactions
from txnstore.log.topics import create_topic
from txnstore.model import IsolationLevel
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.protocol import EPOCH_EXHAUSTED

SOAK_SECONDS = float(os.environ.get("TXNSTORE_SOAK_SECONDS", "0"))
RUN_SECONDS = times(9)
#: Longer runs are made of rounds, so that a history stays of a size that is checked in seconds.
ROUND_SECONDS = 30
#: How long a process lives, from its first call on, before it is killed; and how often it does not come so far.
LIFE_SECONDS = (0.0, 0.5)
DIES_YOUNG_CHANCE = 0.1
TICK_SECONDS = 0.02
#: How often a writer of transactions is stopped instead, while its next life takes over.
ZOMBIE_CHANCE = 0.05
STOPPED_SECONDS = 0.5
LAST_LIFE = 1_000_000
MUST_BE_SEEN = ("kills", "committed", "aborted", "unknown, then resolved", "sent again, recognised")

_rounds = itertools.count(1)


class Round:
    """One run of writers, readers and a helper on topics of their own, and what came of it."""

    def __init__(self, store, url, folder, processes, lives, seed):
        self.store = store
        self.processes = processes
        self.folder = folder
        self.kills = 0
        self.zombies = []
        self._chance = random.Random(seed)
        self._lives = lives
        self._running = {}
        number = next(_rounds)
        self.partitions: dict[str, int] = {}
        for name in (f"orders{number}", f"payments{number}"):
            topic = store.write(lambda connection, name=name: create_topic(connection, name, partition_count=3))
            self.partitions |= {f"{name}-{index}": partition for index, partition in enumerate(topic.partition_ids)}
        job = Job(url, folder, "", 0, self.partitions, seed, timeout_ms=2_000)
        plain, transactional = [f"plain{number}-{index}" for index in (1, 2)], [f"txn{number}-1", f"txn{number}-2"]
        self.writers = {name: (write_plainly, replace(job, name=name)) for name in plain} | {
            # One transactional id takes the steps of several databases; its epochs run out during the run.
            name: (write_transactions, replace(job, name=name, writes_elsewhere=name.endswith("-2")))
            for name in transactional
        }
        self.others = {
            f"helper{number}": (help_out, replace(job, name=f"helper{number}")),
            f"committed{number}": (read_all, replace(job, name=f"committed{number}")),
            f"uncommitted{number}": (
                read_all,
                replace(job, name=f"uncommitted{number}", isolation=IsolationLevel.READ_UNCOMMITTED),
            ),
        }
        self._mortal = [*self.writers, f"helper{number}"]
        self._transactional = transactional
        self._begun = {}
        self._left = {}
        age_epochs(store, transactional[1])

    def run(self, seconds, wait_for):
        for name in {**self.writers, **self.others}:
            self._start(name)
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            wait_for(self._running.values(), TICK_SECONDS)
            self._assert_no_errors()
            for name in self._mortal:
                if now >= self._death_of(name):
                    self._end_life(name)
                    self._start(name)
            self._revive_fenced()
            self._wake_zombies()
        self._wake_zombies(all_of_them=True)
        # A writer that was replaced while it was stopped finds that out by itself and ends; one that was stopped
        # before it became the producer may have replaced its successor instead.
        wait_for([zombie for zombie, _ in self.zombies], TICK_SECONDS)
        for process in [*self._running.values(), *(zombie for zombie, _ in self.zombies)]:
            self.processes.kill(process)
        self._assert_no_errors()

    def settle(self):
        """Find out what is still unknown, then read everything and look at what is stored."""
        for name, (program, job) in self.writers.items():
            last = replace(job, life=LAST_LIFE, is_mortal=False)
            writer = (PlainWriter if program is write_plainly else TransactionalWriter)(last, self.store)
            writer.take_up()
            assert last.process.startswith(name)
        recorder = LineRecorder(self.folder / "final#1.jsonl")
        read_to_end(recorder, "final#1", self.store, self.partitions)
        dump(recorder, "final#1", self.store, self.partitions)
        recorder.close()
        return History.of(read_events(self.folder))

    def _start(self, name):
        program, job = {**self.writers, **self.others}[name]
        self._running[name] = self.processes.start(program, replace(job, life=self._lives(name)))
        self._begun[name] = time.monotonic() if self._chance.random() < DIES_YOUNG_CHANCE else None
        self._left[name] = self._chance.uniform(*LIFE_SECONDS)

    def _death_of(self, name):
        """Return when the process is to be killed: some time after it has begun to work."""
        if self._begun[name] is None and self._has_begun(name):
            self._begun[name] = time.monotonic()
        begun = self._begun[name]
        return float("inf") if begun is None else begun + self._left[name]

    def _has_begun(self, name):
        if name not in self.writers:
            return True
        history = self.folder / f"{self._running[name].name}.jsonl"
        return history.exists() and history.stat().st_size > 0

    def _end_life(self, name):
        process = self._running[name]
        may_be_stopped = name in self._transactional and self._has_begun(name)
        if may_be_stopped and self._chance.random() < ZOMBIE_CHANCE:
            self.processes.stop(process)
            self.zombies.append((process, time.monotonic() + STOPPED_SECONDS))
        else:
            self.processes.kill(process)
            self.kills += 1

    def _revive_fenced(self):
        """Start those again that a woken life has fenced: it was stopped before it became the producer."""
        for name, process in list(self._running.items()):
            if process.exitcode is not None:
                self._start(name)

    def _wake_zombies(self, *, all_of_them=False):
        for zombie, until in self.zombies:
            if all_of_them or time.monotonic() >= until:
                self.processes.go_on(zombie)

    def _assert_no_errors(self):
        errors = {path.name: path.read_text() for path in self.folder.glob("*.error")}
        assert not errors, "\n".join(errors.values())


def age_epochs(store, transactional_id):
    """Bring the transactional id close to the last epoch of its producer id."""
    TransactionCoordinator(store).init_producer_id(transactional_id)
    store.write(
        lambda connection: connection.execute(
            update(transactions)
            .where(transactions.c.transactional_id == transactional_id)
            .values(producer_epoch=EPOCH_EXHAUSTED - 40)
        )
    )


def tell(history, kills, zombies, seed):
    """Print what a run went through."""
    decisions = Counter(transaction.decision for transaction in history.transactions.values())
    unknown = [
        operation
        for operation in history.of_function("append", "end")
        if operation.kind is Kind.UNKNOWN and operation.details.get("commit", True)
    ]
    told = {
        "seed": seed,
        "kills": kills,
        "zombies": zombies,
        "transactions": len(history.transactions),
        "committed": decisions[Decision.COMMITTED],
        "aborted": decisions[Decision.ABORTED],
        "unknown, then resolved": len(unknown),
        "sent again, recognised": sum(
            operation.details.get("repeated", False) for operation in history.of_function("append")
        ),
        "refused": sum(operation.kind is Kind.FAIL for operation in history.operations),
        "polls": len(history.polls),
        "records": sum(len(offsets) for offsets in history.log.values()),
    }
    print(json.dumps(told))  # noqa: T201 - the figures of a run are for people
    return told


@pytest.mark.slow
@pytest.mark.campaign
def test_whoever_is_killed_nothing_is_lost_twice_or_half_there(
    url, txnstore_open, tmp_path, processes, lives, wait_for
):
    store = txnstore_open(url, clock=None)
    total_seconds = SOAK_SECONDS or RUN_SECONDS
    started = time.monotonic()
    seen: Counter[str] = Counter()
    # A run that did not get to see everything shows nothing: a slow machine gets more time for it.
    while (elapsed := time.monotonic() - started) < total_seconds or (
        min(seen[what] for what in MUST_BE_SEEN) == 0 and elapsed < 4 * total_seconds
    ):
        seed = random.randrange(2**32)
        folder = tmp_path / f"history-{seed}"
        folder.mkdir()
        run = Round(store, url, folder, processes, lives, seed)
        run.run(min(max(total_seconds - elapsed, RUN_SECONDS), ROUND_SECONDS), wait_for)
        history = run.settle()
        told = tell(history, run.kills, len({zombie for zombie, _ in run.zombies}), seed)
        assert find_anomalies(history) == []
        seen.update({key: number for key, number in told.items() if key != "seed"})
    assert min(seen[what] for what in MUST_BE_SEEN) > 0, seen
    if url.startswith("sqlite"):
        with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.close()
