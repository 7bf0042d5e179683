"""Programs that leave their commits to themselves and are killed: what is there is a beginning of what they did."""

from __future__ import annotations

import contextlib
import itertools
import random
from concurrent.futures import Future

import pytest

import txnstore as confluent_kafka
from tests.clients.steps import create_topic, read_to_end
from tests.tools.workload import Job
from txnstore.db.opening import open_store
from txnstore.testing.invariants import assert_sound

TOPIC, PARTITIONS = "orders", 3
KILLS = 5
PATIENCE_SECONDS = 60.0
#: How many commits are made before the program is killed, at most.
COMMITS_MAX = 400
#: How many commits may be left at a time.
LEFT_MAX = 40


def leave_commits(job: Job, pipe) -> None:
    """Write numbered transactions, one record to each partition, and say of each that it is committed once it is."""
    producer = confluent_kafka.Producer({"bootstrap.servers": job.url, "transactional.id": job.name})
    producer.init_transactions(PATIENCE_SECONDS)
    left: list[tuple[int, Future[None]]] = []
    for number in itertools.count():
        producer.begin_transaction()
        for partition in range(PARTITIONS):
            producer.produce(TOPIC, b"%d" % number, b"%d" % job.life, partition=partition)
        left.append((number, producer.commit_transaction_async()))
        while left and (left[0][1].done() or len(left) > LEFT_MAX):
            done, future = left.pop(0)
            assert future.result(PATIENCE_SECONDS) is None
            pipe.send(done)


@pytest.mark.slow
def test_what_was_told_is_there_and_what_is_there_is_whole_and_in_order(url, tmp_path, processes):
    create_topic(url, TOPIC, PARTITIONS)
    chance = random.Random(seed := random.randrange(2**32))
    told: dict[int, int] = {}
    for life in range(KILLS):
        process, pipe = processes.start_with_pipe(leave_commits, Job(url, tmp_path, "till", life, {}))
        wanted = chance.randrange(COMMITS_MAX)
        told[life] = -1
        while told[life] < wanted:
            assert pipe.poll(PATIENCE_SECONDS), [path.read_text() for path in tmp_path.glob("*.error")]
            assert pipe.recv() == told[life] + 1
            told[life] += 1
        processes.kill(process)
        with contextlib.suppress(EOFError):
            # What it had said before it was killed.
            while pipe.poll():
                told[life] = pipe.recv()
    # Whoever comes next ends what was left, if anything was.
    with confluent_kafka.Producer({"bootstrap.servers": url, "transactional.id": "till"}) as producer:
        producer.init_transactions(PATIENCE_SECONDS)
    messages = read_to_end(url, TOPIC, partitions=tuple(range(PARTITIONS)))
    found = [
        [
            (int(message.key() or b""), int(message.value() or b""))
            for message in messages
            if message.partition() == number
        ]
        for number in range(PARTITIONS)
    ]
    first = found[0]
    assert found == [first] * PARTITIONS, seed
    for life, last in told.items():
        numbers = [number for of_life, number in first if of_life == life]
        assert numbers == list(range(len(numbers))), seed
        assert len(numbers) > last, seed
    assert [life for life, _ in first] == sorted(life for life, _ in first), seed
    with open_store(url) as store:
        assert_sound(store, at_rest=True)


@pytest.fixture(autouse=True)
def _no_errors(tmp_path):
    yield
    assert [path.read_text() for path in tmp_path.glob("*.error")] == []
