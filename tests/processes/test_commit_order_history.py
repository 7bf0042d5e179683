"""Readers in commit order beside writers of transactions, all of them killed: what they noted against the log itself.

Each transaction comes whole, in the order of the markers, once over all lives of a reader, and no aborted one; and what
is read of several partitions in one snapshot is a cut: of each transaction all or nothing, and whatever had committed.
Who gets transactions whole gets all in one strict order: behind what they have read, or what had committed before, also
outside transactions.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.clients.consumer.log_writer import LogWriter
from tests.processes.ordering import LAST, TOPIC, notes_of, read, read_cuts, write_plainly, write_transactions
from tests.processes.ordering_checks import ReaderCheck, check_cuts, check_order, check_writers, in_order_of_markers
from tests.tools.campaigns import times
from tests.tools.workload import Job
from txnstore.log.fetch import fetch

PARTITIONS = 3
WRITERS = ("transactions-1", "transactions-2", "transactions-3")
READERS = ("assigned", "member", "whole", "whole member")
#: How many transactions each writer begins; the campaign is made of rounds, each of which ends in time on any machine.
FEW, MANY, ROUNDS = 60, 600, times(1)
#: There they take ten times as long, for the same statements of the same code.
MANY_ON_POSTGRESQL = FEW if ROUNDS == 1 else MANY
#: How long nobody is killed.
CALM_SECONDS = {FEW: (0.1, 0.5), MANY: (0.3, 1.5)}
#: How long the readers may take for the rest.
PATIENCE_SECONDS = 60


class Campaign:
    """The processes, and what came of them."""

    def __init__(self, url, store, folder, processes, lives, wait_for, count):
        self.seed = random.randrange(2**32)
        self.kills: Counter[str] = Counter()
        self._calm_seconds = CALM_SECONDS[count]
        self._chance = random.Random(self.seed)
        self._store, self._log = store, LogWriter(store)
        self._folder, self._processes, self._lives, self._wait_for = folder, processes, lives, wait_for
        self._ids = self._log.topic(TOPIC, PARTITIONS).partition_ids
        names = {f"{TOPIC}-{number}": partition_id for number, partition_id in enumerate(self._ids)}
        self._job = Job(url, folder, "", 0, names, self.seed)
        self._programs: dict[str, tuple[Any, ...]] = dict.fromkeys(WRITERS, (write_transactions, count))
        self._programs |= {"plain": (write_plainly, count // 4), "cuts": (read_cuts,)}
        self._programs |= {name: (read, name.endswith("member"), name.startswith("whole")) for name in READERS}
        self._jobs, self._newest = {}, {}
        # One is open from before the first of them to the end.
        self._open = self._log.transaction(600_000)
        self._open_values = {number: [f"open/{index}" for index in range(4)] for number in range(PARTITIONS)}

    def run(self):
        self._write_open(0)
        for name in self._programs:
            self._start(name)
        while running := self._running(*WRITERS, "plain"):
            self._wait_for(running, self._chance.uniform(*self._calm_seconds))
            self._kill(self._chance.choice([*WRITERS, *READERS, *READERS, "cuts"]))
        self._write_open(2)
        self._open.end(commit=True)
        self._ended_ns = time.monotonic_ns()
        for number in range(PARTITIONS):
            self._log.write(TOPIC, number, LAST.encode())
        deadline = time.monotonic() + PATIENCE_SECONDS
        while running := self._running(*READERS, "cuts"):
            assert time.monotonic() < deadline, f"{running} have not got the rest"
            self._wait_for(running, 1.0)

    def check(self):
        partitions = [
            self._store.read(lambda connection, number=number: in_order_of_markers(connection, number))
            for number in self._ids
        ]
        written = [note for name in (*WRITERS, "plain") for life in self._notes(name) for note in life]
        written += [[0, "asks", "open", self._open_values], [self._ended_ns, "committed", "open"]]
        facts = check_writers(partitions, written)
        for name in READERS:
            check = ReaderCheck(partitions)
            check.check(self._notes(name))
            facts["again"] += check.again
            if name.startswith("whole"):
                facts["reads"] += check_order(self._notes(name), written)
        acknowledged = {note[2]: note[0] for note in written if note[1] == "committed"}
        facts["cuts"] = sum(check_cuts(partitions, life, acknowledged) for life in self._notes("cuts"))
        return facts

    def _write_open(self, first):
        for number, values in self._open_values.items():
            self._open.write(TOPIC, number, *(value.encode() for value in values[first : first + 2]))

    def _start(self, name):
        self._jobs[name] = replace(self._job, name=name, life=self._lives(name))
        program, *arguments = self._programs[name]
        self._newest[name] = self._processes.start(program, self._jobs[name], *arguments)

    def _kill(self, name):
        process = self._newest[name]
        if process.exitcode is None:
            self._processes.kill(process)
        if process.exitcode != 0:
            self.kills[name] += 1
            self._start(name)

    def _running(self, *names):
        errors = {path.name: path.read_text() for path in self._folder.glob("*.error")}
        assert not errors, "\n".join(errors.values())
        return [self._newest[name] for name in names if self._newest[name].exitcode is None]

    def _notes(self, name):
        return notes_of(self._jobs[name])


@pytest.mark.parametrize(
    ("txnstore_url", "count"),
    [
        # What is there for whoever does not run the campaign, in which all of it happens, too.
        pytest.param("sqlite", FEW, id="sqlite-few"),
        *(
            pytest.param(
                database, count, id=f"{database}-round {number}", marks=[pytest.mark.slow, pytest.mark.campaign]
            )
            for database, count in (("sqlite", MANY), ("postgresql", MANY_ON_POSTGRESQL))
            for number in range(ROUNDS)
        ),
    ],
    indirect=["txnstore_url"],
)
def test_each_transaction_comes_whole_and_once_in_the_order_of_the_markers_whoever_is_killed(
    url, txnstore_open, tmp_path, processes, lives, wait_for, count
):
    campaign = Campaign(url, txnstore_open(url, clock=None), tmp_path, processes, lives, wait_for, count)
    try:
        campaign.run()
        facts = campaign.check()
    except AssertionError as error:
        error.add_note(f"seed {campaign.seed}: {campaign.kills}")
        raise
    # Of three writers' transactions four in five are committed, but for those that a kill has ended.
    assert facts["committed"] > 2 * count
    assert min(facts["aborted"], facts["cuts"], facts["reads"], campaign.kills.total()) > 0


@pytest.mark.slow
def test_offset_order_is_no_cut_while_others_are_open(store):
    """What is committed to two partitions shows in one of them alone, and the check says so."""
    log = LogWriter(store)
    ids = log.topic(TOPIC, 2).partition_ids
    other, both = log.transaction(), log.transaction()
    other.write(TOPIC, 0, b"other/0")
    for number in range(2):
        both.write(TOPIC, number, b"both/0")
    both.end(commit=True)
    pages = store.read(lambda connection: fetch(connection, dict.fromkeys(ids, 0)))
    got = [
        (number, record.offset, record.value.decode())
        for number, partition_id in enumerate(ids)
        for batch in pages[partition_id].batches
        for record in batch.records()
    ]
    assert got == [(1, 0, "both/0")]
    other.end(commit=False)
    partitions = [
        store.read(lambda connection, number=number: in_order_of_markers(connection, number)) for number in ids
    ]
    ends = [(number, pages[partition_id].next_offset) for number, partition_id in enumerate(ids)]
    with pytest.raises(AssertionError, match=r"both appears in cuts \{0, 1\}"):
        check_cuts(partitions, [[0, "begins", [(0, 0), (1, 0)]], [0, "looked", 0, got, ends]], {})


@pytest.mark.parametrize(
    ("order", "written", "wrong"),
    [
        (["a", "b"], [], None),
        (["b", "a"], [], r"b comes before a"),
        (["c", "a", "b"], [[0, "reads", "c", ["a"]]], r"c has read a"),
        (["a", "c", "a"], [], r"\('a', 2\)"),
        (["a", "plain"], [[3, "asks", "plain", {}]], None),
        (["plain", "a"], [[3, "asks", "plain", {}]], r"plain comes before a"),
    ],
    ids=["as acknowledged", "the later one first", "read and not there", "in two pieces", "plain", "plain one first"],
)
def test_an_order_that_is_not_strict_is_found(order, written, wrong):
    """Of the three, b was asked for once a was acknowledged; c is beside both."""
    notes = [[0, "begins", name] for name in "abc"]
    notes += [[at, "asks", name, {}] for at, name in ((1, "a"), (3, "b"), (1, "c"))]
    notes += [[at, "committed", name] for at, name in ((2, "a"), (4, "b"), (5, "c"))]
    lives = [[[0, "begins", []], [0, "got", [(0, index, f"{name}/0") for index, name in enumerate(order)]]]]
    if wrong is None:
        check_order(lives, notes + written)
        return
    with pytest.raises(AssertionError, match=wrong):
        check_order(lives, notes + written)
