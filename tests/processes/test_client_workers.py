"""Workers that consume, transform and produce, killed and stopped at any moment: each record comes out exactly once."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any, Self

import pytest

import txnstore as confluent_kafka
from tests.processes.transforming import GROUP, Plan, transform
from tests.tools.workload import Job
from txnstore.admin import AdminClient, NewTopic

SOURCE, TARGET = "input", "output"
SOURCE_PARTITIONS, TARGET_PARTITIONS = 4, 2
RECORDS = 2_000
#: How long workers are killed and stopped, and how long they may take for the rest once they are left alone.
TROUBLE_SECONDS = 7.0
PATIENCE_SECONDS = 30.0
#: How long until the next one is killed or stopped.
CALM_SECONDS = {"assigned": (0.1, 0.5), "subscribed": (0.3, 1.0)}
STOPPED_INSTEAD = 0.3
#: Longer than the session of a member, so that a group goes on without it.
STOPPED_SECONDS = (0.1, 0.9)
SESSION_TIMEOUT_MS = 600
#: How much is written while there is trouble, so that those who are killed are at work; the rest comes afterwards.
WRITTEN_IN_TROUBLE = 0.9


class Reader:
    """Reads what is committed of the target all the while, in a thread."""

    def __init__(self, url: str) -> None:
        self.records: list[tuple[Any, ...]] = []
        self._consumer = confluent_kafka.Consumer({"bootstrap.servers": url, "group.id": "reader"})
        self._consumer.assign(
            [
                confluent_kafka.TopicPartition(TARGET, number, confluent_kafka.OFFSET_BEGINNING)
                for number in range(TARGET_PARTITIONS)
            ]
        )
        self._has_more = threading.Condition()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._is_over.is_set():
            message = self._consumer.poll(0.1)
            if message is not None:
                assert message.error() is None, message.error()
                with self._has_more:
                    self.records.append((message.partition(), message.offset(), message.key(), message.value()))
                    self._has_more.notify()

    def wait_for_all(self, timeout_seconds: float) -> bool:
        """Wait until as many have come as were written; whether they have."""
        with self._has_more:
            return self._has_more.wait_for(lambda: len(self.records) >= RECORDS, timeout_seconds)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(PATIENCE_SECONDS)
        self._consumer.close()


class Writer:
    """Writes the numbers to be transformed; it waits for nobody, for a stopped worker may hold the database."""

    def __init__(self, url: str) -> None:
        self._producer = confluent_kafka.Producer({"bootstrap.servers": url})
        self._written = 0

    def write_up_to(self, wanted: int) -> None:
        for number in range(self._written, wanted):
            self._producer.produce(SOURCE, b"%d" % number, partition=number % SOURCE_PARTITIONS)
        self._written = max(self._written, wanted)
        self._producer.poll(0)

    def finish(self) -> None:
        self.write_up_to(RECORDS)
        assert self._producer.flush(PATIENCE_SECONDS) == 0
        self._producer.close()


class Workers:
    """Worker processes by name; of each name the newest is the one that is to do the work."""

    def __init__(self, processes, lives, jobs, plans):
        self._processes = processes
        self._lives = lives
        self._jobs = jobs
        self._plans = plans
        self._newest = {}
        self._zombies = []
        self.kills = self.stops = 0

    @property
    def newest(self):
        return self._newest.values()

    def start_all(self):
        for name in self._jobs:
            self._start(name)

    def _start(self, name):
        job = replace(self._jobs[name], life=self._lives(name))
        self._newest[name] = self._processes.start(transform, job, self._plans[name])

    def trouble(self, chance):
        """Kill or stop one of them, whatever it does right now, and start the next of its name."""
        name = chance.choice(sorted(self._jobs))
        # Some of either, on a slow machine too: the first is killed, the next one stopped.
        if self.kills and (not self.stops or chance.random() < STOPPED_INSTEAD):
            self._processes.stop(self._newest[name])
            self._zombies.append((time.monotonic() + chance.uniform(*STOPPED_SECONDS), self._newest[name]))
            self.stops += 1
        else:
            self._processes.kill(self._newest[name])
            self.kills += 1
        self._start(name)

    def wake(self, *, all_of_them=False):
        for until, zombie in self._zombies:
            if all_of_them or time.monotonic() >= until:
                self._processes.go_on(zombie)

    def revive(self):
        """Start those again that a woken zombie has fenced: it had not become the producer yet when it was stopped."""
        for name, process in list(self._newest.items()):
            if process.exitcode is not None:
                self._start(name)

    def kill_all(self):
        for process in [*self._newest.values(), *(zombie for _, zombie in self._zombies)]:
            self._processes.kill(process)


def _make_topics(url):
    admin = AdminClient({"bootstrap.servers": url})
    topics = [NewTopic(SOURCE, SOURCE_PARTITIONS, 1), NewTopic(TARGET, TARGET_PARTITIONS, 1)]
    for future in admin.create_topics(topics).values():
        future.result(PATIENCE_SECONDS)


def _finish(url, names):
    """Let nothing stay open that the last killed ones left."""
    for name in names:
        with contextlib.closing(
            confluent_kafka.Producer({"bootstrap.servers": url, "transactional.id": name})
        ) as producer:
            producer.init_transactions(PATIENCE_SECONDS)


def _committed(url):
    with contextlib.closing(confluent_kafka.Consumer({"bootstrap.servers": url, "group.id": GROUP})) as consumer:
        partitions = [confluent_kafka.TopicPartition(SOURCE, number) for number in range(SOURCE_PARTITIONS)]
        return [position.offset for position in consumer.committed(partitions, PATIENCE_SECONDS)]


def _assert_no_errors(folder):
    errors = {path.name: path.read_text() for path in folder.glob("*.error")}
    assert not errors, "\n".join(errors.values())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["assigned", "subscribed"])
def test_each_record_comes_out_exactly_once_whoever_is_killed(url, tmp_path, processes, lives, wait_for, how):
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    _make_topics(url)
    half = SOURCE_PARTITIONS // 2
    shares = {"worker-1": tuple(range(half)), "worker-2": tuple(range(half, SOURCE_PARTITIONS))}
    plans = {
        name: Plan(SOURCE, TARGET, TARGET_PARTITIONS, share if how == "assigned" else None, SESSION_TIMEOUT_MS)
        for name, share in shares.items()
    }
    jobs = {name: Job(url, tmp_path, name, 0, {}, seed, timeout_ms=2_000) for name in shares}
    workers = Workers(processes, lives, jobs, plans)
    writer = Writer(url)
    with Reader(url) as reader:
        workers.start_all()
        began = time.monotonic()
        # A run in which nobody was killed or stopped shows nothing: a slow machine gets more time for it.
        while (elapsed := time.monotonic() - began) < TROUBLE_SECONDS or (
            not (workers.kills and workers.stops) and elapsed < 4 * TROUBLE_SECONDS
        ):
            # There is always some work left, to the end of the trouble.
            writer.write_up_to(int(RECORDS * WRITTEN_IN_TROUBLE * min(1.0, elapsed / TROUBLE_SECONDS)))
            wait_for(workers.newest, chance.uniform(*CALM_SECONDS[how]))
            workers.revive()
            workers.trouble(chance)
            workers.wake()
            _assert_no_errors(tmp_path)
        workers.wake(all_of_them=True)
        writer.finish()
        deadline, seen = time.monotonic() + PATIENCE_SECONDS, 0
        while not reader.wait_for_all(0.1) and time.monotonic() < deadline:
            if len(reader.records) > seen:
                # As long as it goes on, however slowly.
                deadline, seen = time.monotonic() + PATIENCE_SECONDS, len(reader.records)
            workers.revive()
        workers.kill_all()
        _finish(url, jobs)
        _assert_no_errors(tmp_path)
    live = sorted(reader.records)

    told = f"seed {seed}: {workers.kills} kills, {workers.stops} stops"
    assert workers.kills > 0, told
    assert workers.stops > 0, told
    with Reader(url) as late:
        late.wait_for_all(PATIENCE_SECONDS)
    numbers = Counter(int(value) for *_, value in late.records)
    assert [number for number, count in numbers.items() if count > 1] == [], told
    assert sorted(set(range(RECORDS)) - set(numbers)) == [], told
    assert live == sorted(late.records), told
    assert _committed(url) == [RECORDS // SOURCE_PARTITIONS] * SOURCE_PARTITIONS, told
    assert {key.decode(): int(value) for _, _, key, value in late.records} == {
        f"{number % SOURCE_PARTITIONS}/{number // SOURCE_PARTITIONS}": number for number in range(RECORDS)
    }, told
