"""Producers that come back about when they are forgotten, for many days, beside maintenance that never stops."""

from __future__ import annotations

import random
import threading
import time

import pytest

from tests.tools.campaigns import times
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.opening import open_store
from txnstore.errors import TxnStoreError
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.log.fetch import fetch
from txnstore.log.topics import create_topic
from txnstore.maintenance.loop import Maintenance
from txnstore.model import Record
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.coordinator import TransactionCoordinator

DAY_MS = 86_400_000
#: How long a day takes.
DAY_SECONDS = 0.25
DAYS = times(12)
#: No transaction is too old.
NEVER_MS = 2**31 - 2
PRODUCERS = 12


class FastClock:
    """A clock on which a day is soon over."""

    def __init__(self):
        self._began = time.monotonic()

    def now_ms(self):
        return 1_700_000_000_000 + int((time.monotonic() - self._began) / DAY_SECONDS * DAY_MS)


class Job:
    """What a producer has done each day."""

    def __init__(self, url, clock, partition_id, name):
        self.committed: list[bytes] = []
        self.unknown: list[bytes] = []
        self.refused = 0
        self._url, self._clock, self._partition_id, self._name = url, clock, partition_id, name
        self._pause = threading.Event()

    def run(self):
        chance = random.Random(self._name)
        with open_store(self._url, clock=self._clock) as store:
            coordinator = TransactionCoordinator(store)
            identity = coordinator.init_producer_id(self._name, NEVER_MS).identity
            for day in range(DAYS):
                value = f"{self._name}/{day}".encode()
                try:
                    identity = self._work(coordinator, identity, value, in_one=bool(day % 2))
                except TxnStoreError as error:
                    # Forgotten whole, on a machine that was busy for days.
                    self.refused += 1
                    self.unknown.extend([value] if error.outcome_unknown else [])
                    identity = coordinator.init_producer_id(self._name, NEVER_MS).identity
                else:
                    self.committed.append(value)
                # About a day later, by the store's clock: some a moment before they are forgotten, some after.
                due_ms = self._clock.now_ms() + DAY_MS * chance.uniform(0.96, 1.06)
                while (left_ms := due_ms - self._clock.now_ms()) > 0:
                    self._pause.wait(left_ms / DAY_MS * DAY_SECONDS)

    def _work(self, coordinator, identity, value, *, in_one):
        batch = encode([Record(value)], producer=identity, base_sequence=0, is_transactional=True)
        appends = [Append(self._partition_id, batch)]
        if not in_one:
            coordinator.append(self._name, identity, appends)
            appends = []
        return coordinator.end_transaction(self._name, identity, commit=True, appends=appends).identity


@pytest.mark.slow
@pytest.mark.campaign
def test_a_daily_job_is_read_every_day_once(url):
    clock = FastClock()
    stop, forgotten = threading.Event(), []

    def maintain():
        with open_store(url, clock=clock) as own:
            maintenance = Maintenance(own)
            while not stop.is_set():
                forgotten.append(maintenance.run_once().get("silent producers forgotten", 0))

    with open_store(url, clock=clock) as store:
        settings = {"transaction.max.timeout.ms": str(NEVER_MS)}
        store.write(lambda connection: change_store_settings(connection, settings))
        keeps = {"retention.ms": "-1"}
        topic = store.write(lambda connection: create_topic(connection, "days", partition_count=3, config=keeps))
        ids = topic.partition_ids
        jobs = [Job(url, clock, ids[number % 3], f"job-{number}") for number in range(PRODUCERS)]
        threads = [threading.Thread(target=job.run) for job in jobs]
        maintainer = threading.Thread(target=maintain)
        for thread in (*threads, maintainer):
            thread.start()
        for thread in threads:
            thread.join(120)
        stop.set()
        maintainer.join(60)
        assert not any(thread.is_alive() for thread in (*threads, maintainer))
        pages = store.read(lambda connection: fetch(connection, dict.fromkeys(ids, 0)))
        refused = sum(job.refused for job in jobs)
        assert_sound(store, at_rest=not refused, partition_ids=ids)
    seen = [record.value for page in pages.values() for batch in page.batches for record in batch.records()]
    committed = {value for job in jobs for value in job.committed}
    assert len(seen) == len(set(seen))
    assert committed <= set(seen) <= {*committed, *(value for job in jobs for value in job.unknown)}
    assert len(committed) + refused == PRODUCERS * DAYS
    assert len(committed) > PRODUCERS * DAYS // 2
    assert sum(forgotten) > 0
