"""A worker in commit order that is killed again and again in the middle of a transaction: each record comes once."""

from __future__ import annotations

import random

import pytest

from tests.clients.consumer.log_writer import LogWriter
from tests.processes.placing import PATIENCE_SECONDS, copy
from tests.tools.workload import Job
from txnstore import Consumer, TopicPartition

LONG, KILLS = 24, 8


@pytest.mark.slow
def test_who_is_killed_within_a_transaction_is_followed_by_one_that_goes_on_there(
    url, txnstore_open, tmp_path, processes, wait_for
):
    log = LogWriter(txnstore_open(url, clock=None))
    log.topic("in")
    log.topic("out")
    long_one, open_one = log.transaction(), log.transaction()
    open_one.write("in", 0, b"open 0")
    expected = []
    for number in range(LONG):
        long_one.write("in", 0, b"long %d" % number)
        if number % 4 == 0:
            short = log.transaction()
            short.write("in", 0, b"short %d a" % number, b"short %d b" % number)
            short.end(commit=True)
            expected += [b"short %d a" % number, b"short %d b" % number]
    long_one.end(commit=True)
    log.write("in", 0, b"plain")
    open_one.write("in", 0, b"open 1")
    open_one.end(commit=True)
    expected += [*(b"long %d" % number for number in range(LONG)), b"plain", b"open 0", b"open 1"]

    chance, told = random.Random(7), 0
    for life in range(1, KILLS + 2):
        job = Job(url, tmp_path, "placing", life, {})
        process, pipe = processes.start_with_pipe(copy, job)
        records = len(expected) - told if life > KILLS else chance.randint(1, 6)
        for _ in range(min(records, len(expected) - told)):
            assert wait_for([pipe, process], PATIENCE_SECONDS) == [pipe]
            told = expected.index(pipe.recv()) + 1
        processes.kill(process)
        if told == len(expected):
            break
    with Consumer({"bootstrap.servers": url, "group.id": "reader"}) as reader:
        reader.assign([TopicPartition("out", 0, 0)])
        found = [message.value() for message in reader.consume(len(expected) + 1, 2.0)]
    assert found == expected
