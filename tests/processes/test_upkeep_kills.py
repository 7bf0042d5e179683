"""Clients that live a moment and are killed in their turns: all that was acknowledged is there, what is due is done."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import func, select

from tests.tools.campaigns import times
from tests.tools.workload import Job
from txnstore import Producer
from txnstore.clients import upkeep
from txnstore.config import STORE_SETTINGS
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.opening import open_store
from txnstore.db.schema import maintenance_duties, producer_states, record_batches, transaction_log, transactions
from txnstore.log.fetch import fetch
from txnstore.log.topics import create_topic, get_topic
from txnstore.maintenance.duties import DUTIES
from txnstore.testing.invariants import assert_sound

#: So many lives end on SQLite, and fewer where each takes longer: the turns are the same code.
KILLS = {"sqlite": times(40), "postgresql": times(15)}
NAMES = ("client-0", "client-1", "client-2")
KEYS = 7
STATES = len(NAMES) * KEYS
PATIENCE_SECONDS = 120
#: Somewhere in the lives of a few clients; after all kills a little later each time, for clients of a slow machine.
LATER_SECONDS_MAX = 0.3
SLOWER = 1.1
#: Everything is due all the time, and old as soon as it is written.
INTERVALS = {duty.interval_setting: "1" for duty in DUTIES}
AGES = {"producer.id.expiration.ms": "300", "txnstore.transaction.log.retention.ms": "300"}
COMPACTED = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0", "delete.retention.ms": "0"}


class _Never(dict[str, float]):
    """What a process remembers that forgets at once that it has looked."""

    def get(self, key, default=None):
        return default


def come_and_go(job, pipe):
    """Produce a record in each of two topics, as a client that is there for a moment, again and again; tell of each."""
    # However slow the machine is, they have their turns.
    vars(upkeep).update(_next_looks=_Never(), PARTING_WAIT_SECONDS=PATIENCE_SECONDS)
    number = 0
    while True:
        name = f"{job.name}-{job.life}-{number}"
        # What it leaves open as it is killed is aborted soon.
        short = {"transactional.id": job.name, "transaction.timeout.ms": 2_000}
        with Producer({"bootstrap.servers": job.url, **short}) as producer:
            producer.init_transactions()
            with producer.transaction():
                producer.produce("events", name)
                producer.produce("states", str(number), key=f"{job.name}-{number % KEYS}")
            pipe.send(name)
        number += 1


def records(store, topic):
    (partition_id,) = store.read(lambda c: get_topic(c, topic)).partition_ids
    position, found = 0, []
    while True:
        page = store.read(lambda c, at=position: fetch(c, {partition_id: at}))[partition_id]
        found += [record for batch in page.batches for record in batch.records(position)]
        if page.next_offset == position:
            return found
        position = page.next_offset


def count(store, table):
    return store.read(lambda connection: connection.execute(select(func.count()).select_from(table)).scalar_one())


@pytest.mark.slow
@pytest.mark.campaign
def test_clients_that_are_killed_in_their_turns_lose_nothing_and_leave_nothing_undone(
    url, tmp_path, processes, monkeypatch
):
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    assert STORE_SETTINGS.keys() >= INTERVALS.keys() | AGES.keys()
    with open_store(url) as store:
        kills_min = KILLS[store.backend.name]
        store.write(lambda c: change_store_settings(c, INTERVALS | AGES))
        store.write(lambda c: create_topic(c, "events"))
        store.write(lambda c: create_topic(c, "states", config=COMPACTED))
        running: dict[str, Any] = {}
        acknowledged: list[str] = []
        kill, deadline = 0, math.inf
        # It is looked after all the time, by whoever comes; on a busy machine fewer of them come between two kills.
        while kill < kills_min or len(acknowledged) <= kills_min or not is_looked_after(store):
            assert time.monotonic() < deadline, f"seed {seed}"
            for name in NAMES:
                if name not in running:
                    running[name] = processes.start_with_pipe(come_and_go, Job(url, tmp_path, name, kill, {}))
            for _, pipe in running.values():
                assert pipe.poll(PATIENCE_SECONDS), f"seed {seed}"
            time.sleep(chance.uniform(0.0, LATER_SECONDS_MAX * SLOWER ** max(0, kill - kills_min)))
            name = chance.choice(sorted(running))
            process, pipe = running.pop(name)
            processes.kill(process)
            acknowledged += told(pipe)
            for _, others in running.values():
                acknowledged += told(others)
            kill += 1
            if kill == kills_min:
                deadline = time.monotonic() + 5 * PATIENCE_SECONDS
        for process, pipe in running.values():
            processes.kill(process)
            acknowledged += told(pipe)
        assert_sound(store)
        # What a killed one has left open hides what others have committed after it; and the server may still be at what
        # it was asked last.
        for name in NAMES:
            with Producer({"bootstrap.servers": url, "transactional.id": name}) as producer:
                producer.init_transactions()
        found = [record.value.decode() for record in records(store, "events")]
        assert max(Counter(found).values()) == 1, f"seed {seed}"
        assert set(acknowledged) <= set(found), f"seed {seed}"
        # What a compaction has left of each key is what was written last, in the same transactions.
        states = {record.key.decode(): record.value.decode() for record in records(store, "states")}
        assert states == newest_of(found), f"seed {seed}"
        # Who comes last does the rest, once the leases of those that were killed are over.
        deadline = time.monotonic() + PATIENCE_SECONDS
        monkeypatch.setattr(upkeep, "PARTING_WAIT_SECONDS", PATIENCE_SECONDS)
        # A portion at a time it would take a thousand of them.
        monkeypatch.setattr(upkeep, "PARTING_TURN_SECONDS", PATIENCE_SECONDS)
        while count(store, producer_states) or count(store, transaction_log) or stored_states(store) > STATES:
            assert time.monotonic() < deadline, f"seed {seed}"
            upkeep._next_looks.clear()
            with Producer({"bootstrap.servers": url}) as producer:
                producer.list_topics(timeout=PATIENCE_SECONDS)
        assert count(store, transactions) == len(NAMES)
        assert_sound(store)


def told(pipe):
    names = []
    try:
        while pipe.poll():
            names.append(pipe.recv())
    except EOFError:
        pass
    return names


def newest_of(names):
    """Return by key what was written to it last."""
    newest = {}
    for name in names:
        client, _, number = name.rsplit("-", 2)
        newest[f"{client}-{int(number) % KEYS}"] = number
    return newest


def is_looked_after(store):
    """Return whether somebody has had a turn of each duty, and most of what the journal ever had is gone."""
    left, newest = store.read(
        lambda connection: connection.execute(
            select(func.count(), func.max(transaction_log.c.entry_id)).select_from(transaction_log)
        ).one()
    )
    return count(store, maintenance_duties) == len(DUTIES) and left <= (newest or 0) / 2


def stored_states(store):
    (partition_id,) = store.read(lambda c: get_topic(c, "states")).partition_ids
    statement = select(func.sum(record_batches.c.record_count)).where(
        record_batches.c.partition_id == partition_id, record_batches.c.control_type.is_(None)
    )
    return store.read(lambda connection: connection.execute(statement).scalar_one()) or 0
