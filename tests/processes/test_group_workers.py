"""A group of workers that come, leave, are killed and stopped all the time: every record comes out once, in order.

TXNSTORE_GROUP_RUNS says how many runs are made in a row, TXNSTORE_GROUP_SEED with which seed the first one begins;
scripts/soak-groups sets them.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Self

import pytest

import txnstore as confluent_kafka
from tests.databases import an_assignor_on_each_database
from tests.processes.group_transforming import GroupPlan, transform_in_group
from tests.processes.remote_members import make_topic
from tests.tools.campaigns import times
from tests.tools.workload import Job

RUNS = int(os.environ.get("TXNSTORE_GROUP_RUNS") or times(1))
FIRST_SEED = os.environ.get("TXNSTORE_GROUP_SEED") or None
WORKERS = ("worker-1", "worker-2", "worker-3", "worker-4")
PARTITIONS, RECORDS = 6, 1_500
SESSION_TIMEOUT_MS, TRANSACTION_TIMEOUT_MS = 2_000, 3_000
#: How long there is trouble, at first; how long the rest may take once everybody is left alone.
TROUBLE_SECONDS, PATIENCE_SECONDS = 11.0, 60.0
#: A run that did not get to see everything shows nothing: a slow machine gets some more.
FURTHER_RUNS_MAX = 5
MUST_BE_SEEN = ("kill", "leave", "stop", "commits", "aborts", "rebalanced", "lost")
#: Takes a member that loses its partitions between two calls: many runs see it, one need not; test_stopped_members.py
#: brings it about.
MANY_RUNS_SEE = ("refused",)
MANY_RUNS = 5
#: How often somebody is chosen who has not even been given partitions yet.
DIES_YOUNG = 0.15
CALM_SECONDS = (0.2, 1.2)
AWAY_SECONDS = (0.0, 0.6)
#: Up to more than twice the session.
STOPPED_SECONDS = (0.5, 5.0)
ACTIONS = ("kill", "leave", "stop")
#: How much is written while there is trouble; how often the writer aborts.
WRITTEN_IN_TROUBLE, WRITER_ABORTS = 0.9, 0.2
BATCH = 20

_runs = itertools.count(1)


@dataclass(frozen=True)
class Output:
    """A record that came out, and what it says of where it comes from."""

    partition: int
    offset: int
    value: int
    transaction: str
    interval: tuple[int, int]
    source_partition: int
    source_offset: int

    @classmethod
    def of(cls, message) -> Self:
        headers = {name: value.decode() for name, value in message.headers()}
        first, end = headers["interval"].split("-")
        source_partition, source_offset = message.key().decode().split("/")
        return cls(
            message.partition(),
            message.offset(),
            int(message.value()),
            headers["transaction"],
            (int(first), int(end)),
            int(source_partition),
            int(source_offset),
        )


class Reader:
    """Reads what is committed of a topic, from its beginning and all the while, in a thread."""

    def __init__(self, url, topic, make):
        self.records = []
        self._make = make
        self._consumer = confluent_kafka.Consumer({"bootstrap.servers": url, "group.id": "reader"})
        beginning = confluent_kafka.OFFSET_BEGINNING
        self._consumer.assign(
            [confluent_kafka.TopicPartition(topic, number, beginning) for number in range(PARTITIONS)]
        )
        self._has_more = threading.Condition()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        while not self._is_over.is_set():
            message = self._consumer.poll(0.1)
            if message is not None and message.error() is None:
                with self._has_more:
                    self.records.append(self._make(message))
                    self._has_more.notify()

    def wait_for(self, count, timeout_seconds):
        with self._has_more:
            return self._has_more.wait_for(lambda: len(self.records) >= count, timeout_seconds)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join(PATIENCE_SECONDS)
        self._consumer.close()


class Writer:
    """Writes the numbers to be transformed in transactions, some of which abort; in a thread."""

    def __init__(self, url, topic, name, seed):
        self._producer = confluent_kafka.Producer({"bootstrap.servers": url, "transactional.id": name})
        self._topic = topic
        self._chance = random.Random(f"{seed}/writer")
        self._wanted = 0
        self._written = 0
        self._stirred = threading.Condition()
        self._thread = threading.Thread(target=self._run)
        self.error = None

    def want(self, count):
        with self._stirred:
            self._wanted = max(self._wanted, count)
            self._stirred.notify()

    def _run(self):
        try:
            self._call(self._producer.init_transactions)
            while self._written < RECORDS:
                with self._stirred:
                    assert self._stirred.wait_for(lambda: self._wanted > self._written, PATIENCE_SECONDS)
                    numbers = range(self._written, min(self._wanted, self._written + BATCH))
                if self._is_committed(numbers):
                    self._written = numbers.stop
        except Exception as error:  # noqa: BLE001 - the test's own thread raises it
            self.error = error

    def _is_committed(self, numbers):
        aborts = self._chance.random() < WRITER_ABORTS
        self._producer.begin_transaction()
        for number in numbers:
            self._producer.produce(self._topic, b"%d" % number, partition=number % PARTITIONS)
        try:
            if not aborts:
                self._call(self._producer.commit_transaction)
                return True
        except confluent_kafka.KafkaException as exception:
            # A stopped worker may hold the database for longer than the records have.
            if not exception.args[0].txn_requires_abort():
                raise
        self._call(self._producer.abort_transaction)
        return False

    @staticmethod
    def _call(call):
        while True:
            try:
                return call(10.0)
            except confluent_kafka.KafkaException as exception:
                if not exception.args[0].retriable():
                    raise

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.want(RECORDS)
        self._thread.join(PATIENCE_SECONDS)
        self._producer.close()
        if self.error is not None:
            raise self.error


class Crew:
    """The workers by name, and what befalls them."""

    def __init__(self, processes, url, folder, lives, run, assignor, seed):
        self._processes = processes
        self._job = Job(url, folder, "", 0, {}, seed, timeout_ms=TRANSACTION_TIMEOUT_MS)
        self._lives = lives
        self._run = run
        self._assignor = assignor
        self._chance = random.Random(f"{seed}/crew")
        self._at_work = {}
        self._away_until = dict.fromkeys(WORKERS, 0.0)
        self._stopped_until = {}
        self._leaving = []
        self.seen: Counter[str] = Counter()

    def _start(self, name):
        life = self._lives(f"{self._run}-{name}")
        # One is a new producer in each life, and leaves its transactions to their timeouts; the others clean up.
        keeps_id = name != WORKERS[-1]
        plan = GroupPlan(
            f"input{self._run}",
            f"output{self._run}",
            f"workers{self._run}",
            self._assignor,
            SESSION_TIMEOUT_MS,
            f"{self._run}-{name}" if keeps_id else f"{self._run}-{name}-{life}",
        )
        job = replace(self._job, name=f"{self._run}-{name}", life=life)
        self._at_work[name] = self._processes.start(transform_in_group, job, plan)

    def look(self):
        """Start those whose time has come, and wake those who were stopped for long enough."""
        now = time.monotonic()
        for name, until in list(self._stopped_until.items()):
            if now >= until:
                self._processes.go_on(self._at_work[name])
                del self._stopped_until[name]
        for name, process in list(self._at_work.items()):
            if process.exitcode is not None:
                # Its producer was fenced.
                self._send_away(name)
        for name, until in list(self._away_until.items()):
            if now >= until:
                del self._away_until[name]
                self._start(name)

    def _send_away(self, name):
        del self._at_work[name]
        self._away_until[name] = time.monotonic() + self._chance.uniform(*AWAY_SECONDS)

    def trouble(self):
        """Let something befall one of those that are at work."""
        names = sorted(self._at_work.keys() - self._stopped_until.keys())
        if self._chance.random() >= DIES_YOUNG:
            names = [name for name in names if self._has_begun(name)]
        if not names:
            return
        name, action = self._chance.choice(names), self._chance.choice(ACTIONS)
        process = self._at_work[name]
        self.seen[action] += 1
        if action == "stop":
            self._processes.stop(process)
            self._stopped_until[name] = time.monotonic() + self._chance.uniform(*STOPPED_SECONDS)
            return
        if action == "kill":
            self._processes.kill(process)
        else:
            self._ask_to_leave(process)
        self._send_away(name)

    def _has_begun(self, name):
        return (self._job.folder / f"{self._at_work[name].name}.count").exists()

    def _ask_to_leave(self, process):
        if process.is_alive():
            os.kill(process.pid, signal.SIGTERM)
        self._leaving.append(process)

    def calm(self):
        """Wake everybody."""
        for name in self._stopped_until:
            self._processes.go_on(self._at_work[name])
        self._stopped_until.clear()

    def part(self):
        """Let everybody leave in good order."""
        for process in self._at_work.values():
            self._ask_to_leave(process)
        for process in self._leaving:
            process.join(PATIENCE_SECONDS)
            # One that had just been started could not do so in good order yet.
            assert process.exitcode in {0, -signal.SIGTERM}, f"{process.name} ended with {process.exitcode}"

    def told(self, folder):
        """Return what was done to them, and what they went through."""
        told = Counter(self.seen)
        for path in folder.glob(f"{self._run}-*.count"):
            told.update(json.loads(path.read_text()))
        return told


def committed(url, group, topic):
    with closing(confluent_kafka.Consumer({"bootstrap.servers": url, "group.id": group})) as consumer:
        partitions = [confluent_kafka.TopicPartition(topic, number) for number in range(PARTITIONS)]
        return [position.offset for position in consumer.committed(partitions, PATIENCE_SECONDS)]


def check_each_once_in_order(inputs, outputs):
    times = Counter(output.value for output in outputs)
    assert {value: count for value, count in times.items() if count > 1} == {}
    assert sorted(set(range(RECORDS)) - times.keys()) == []
    assert {(output.source_partition, output.source_offset): output.value for output in outputs} == inputs
    for number in range(PARTITIONS):
        of_partition = sorted(
            (output for output in outputs if output.partition == number), key=lambda output: output.offset
        )
        assert {output.source_partition for output in of_partition} == {number}
        sources = [output.source_offset for output in of_partition]
        assert sources == sorted(sources), f"partition {number} is out of order"


def check_intervals_tile(inputs, outputs, committed_offsets):
    """Check that the intervals of each partition neither overlap nor leave anything out, up to what is committed."""
    for number, end_committed in enumerate(committed_offsets):
        intervals: dict[str, tuple[int, int]] = {}
        for output in outputs:
            if output.source_partition == number:
                assert intervals.setdefault(output.transaction, output.interval) == output.interval
                assert output.interval[0] <= output.source_offset < output.interval[1], output
        visible = sorted(offset for partition, offset in inputs if partition == number)
        next_offset = visible[0]
        for transaction, (first, end) in sorted(intervals.items(), key=lambda item: item[1]):
            assert first >= next_offset, f"{transaction} has consumed {first}-{end} of {number} again"
            left_out = [offset for offset in visible if next_offset <= offset < first]
            assert left_out == [], f"nobody has consumed {left_out} of {number} before {transaction}"
            next_offset = end
        assert next_offset == end_committed
        assert not [offset for offset in visible if offset >= next_offset]


def check_no_errors(folder):
    errors = {path.name: path.read_text() for path in folder.glob("*.error")}
    assert not errors, "\n".join(errors.values())


@pytest.mark.slow
@pytest.mark.campaign
@an_assignor_on_each_database
def test_whatever_befalls_its_members_a_group_transforms_each_record_once_and_in_order(
    url, tmp_path, processes, lives, assignor
):
    chance = random.Random(FIRST_SEED)
    seen: Counter[str] = Counter()
    must_be_seen = MUST_BE_SEEN + (MANY_RUNS_SEE if RUNS >= MANY_RUNS else ())
    for number in range(RUNS + FURTHER_RUNS_MAX):
        if number >= RUNS and all(seen[what] for what in must_be_seen):
            break
        seed = int(FIRST_SEED) if FIRST_SEED and number == 0 else chance.randrange(2**32)
        try:
            seen.update(run_once(url, tmp_path, processes, lives, assignor, seed))
        except BaseException as error:
            # At once, for whoever has many more runs before him.
            print(f"run {number + 1}, seed {seed}: {error!r}")  # noqa: T201
            raise
    assert all(seen[what] for what in must_be_seen), seen


def run_once(url, folder, processes, lives, assignor, seed):
    run = next(_runs)
    source, target = f"input{run}", f"output{run}"
    make_topic(url, PARTITIONS, source)
    make_topic(url, PARTITIONS, target)
    chance = random.Random(f"{seed}/trouble")
    crew = Crew(processes, url, folder, lives, run, assignor, seed)
    pause = threading.Event()
    began = time.monotonic()
    with Reader(url, target, Output.of) as reader:
        with Writer(url, source, f"writer{run}", seed) as writer:
            while (elapsed := time.monotonic() - began) < TROUBLE_SECONDS:
                # There is always some work left, to the end of the trouble.
                writer.want(int(RECORDS * WRITTEN_IN_TROUBLE * min(1.0, elapsed / TROUBLE_SECONDS)))
                crew.look()
                pause.wait(chance.uniform(*CALM_SECONDS))
                crew.trouble()
                check_no_errors(folder)
            crew.calm()
        left_alone_at = time.monotonic()
        deadline, read = time.monotonic() + PATIENCE_SECONDS, 0
        while not reader.wait_for(RECORDS, 0.1) and time.monotonic() < deadline:
            if len(reader.records) > read:
                # As long as it goes on, however slowly.
                deadline, read = time.monotonic() + PATIENCE_SECONDS, len(reader.records)
            crew.look()
            check_no_errors(folder)
        rest_seconds = time.monotonic() - left_alone_at
        crew.part()
        check_no_errors(folder)
    told = crew.told(folder)
    described = {"seed": seed, "assignor": assignor, "rest_seconds": round(rest_seconds, 1), **told}
    print(json.dumps(described))  # noqa: T201 - the figures of a run are for people
    try:
        check(url, run, sorted(reader.records, key=lambda output: (output.partition, output.offset)))
    except AssertionError as error:
        error.add_note(f"in the run {described}")
        raise
    return told


def check(url, run, live):
    """Compare what came out, to a reader who was there all the while and to one that comes late, with what went in."""
    source, target = f"input{run}", f"output{run}"
    with Reader(url, target, Output.of) as late, Reader(url, source, lambda message: message) as originals:
        assert late.wait_for(RECORDS, PATIENCE_SECONDS), f"{len(late.records)} of {RECORDS} records came out"
        assert originals.wait_for(RECORDS, PATIENCE_SECONDS)
        # There are no more.
        assert not late.wait_for(RECORDS + 1, 0.5)
    inputs = {(message.partition(), message.offset()): int(message.value()) for message in originals.records}
    assert sorted(late.records, key=lambda output: (output.partition, output.offset)) == live
    check_each_once_in_order(inputs, live)
    check_intervals_tile(inputs, live, committed(url, f"workers{run}", source))
