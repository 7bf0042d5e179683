"""A worker in commit order that is killed again and again within transactions: each record comes once, in its place."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.clients.consumer.log_writer import LogWriter
from tests.clients.steps import read_to_end, values
from tests.processes.placing import PATIENCE_SECONDS, copy, copy_whole
from tests.tools.workload import Job

LONG, KILLS, RECORDS_MAX = 24, 8, 5


def copy_and_kill(url, folder, processes, wait_for, program, chance, count):
    """Kill the worker where it has told of some records, and maybe is at the next one; let the last one end."""
    for life in range(1, KILLS + 2):
        told = chance.randint(1, RECORDS_MAX) if life <= KILLS else count
        process, pipe = processes.start_with_pipe(program, Job(url, folder, "placing", life, {}), told + 1)
        while told > 0 and (life <= KILLS or len(read_to_end(url, "out")) < count):
            assert wait_for([pipe, process], PATIENCE_SECONDS) == [pipe]
            pipe.recv()
            told -= 1
        processes.kill(process)


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

    copy_and_kill(url, tmp_path, processes, wait_for, copy, random.Random(7), len(expected))
    assert [value for value in values(read_to_end(url, "out")) if value is not None] == expected


@pytest.mark.slow
def test_who_is_killed_within_a_transaction_of_two_partitions_is_followed_by_one_that_ends_it_first(
    url, txnstore_open, tmp_path, processes, wait_for
):
    log = LogWriter(txnstore_open(url, clock=None))
    log.topic("in", partition_count=2)
    log.topic("out")
    foreign = log.transaction()
    foreign.write("in", 0, b"foreign 0")
    expected = {b"foreign": [b"foreign 0", b"foreign 1"]}
    for number in range(LONG):
        both = log.transaction()
        # What is in one partition alone comes next there while the other one has the rest of the one before.
        log.write("in", number % 2, b"plain-%d" % number)
        expected[b"plain-%d" % number] = [b"plain-%d" % number]
        records = [(partition, b"%d %d%c" % (number, partition, letter)) for partition in (0, 1) for letter in b"ab"]
        for partition, value in records[:: -1 if number % 2 else 1]:
            both.write("in", partition, value)
        both.end(commit=number % 4 != 3)
        if number % 4 != 3:
            expected[b"%d" % number] = sorted(value for _, value in records)
    foreign.write("in", 1, b"foreign 1")
    foreign.end(commit=True)

    count = sum(map(len, expected.values()))
    copy_and_kill(url, tmp_path, processes, wait_for, copy_whole, random.Random(11), count)
    found = [value for value in values(read_to_end(url, "out")) if value is not None]
    # Each comes in one piece, whoever was killed within it, and once.
    pieces = [(name, sorted(piece)) for name, piece in itertools.groupby(found, lambda value: value.split()[0])]
    assert dict(pieces) == expected
    assert len(pieces) == len(expected)
