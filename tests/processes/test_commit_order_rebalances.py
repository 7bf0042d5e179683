"""Members of a group that get transactions whole, come and go and are killed: what they noted against the log itself.

Each gets a transaction in one piece as far as its own partitions go, in one strict order; whoever is given a partition
goes on where its last owner had committed, with the half of a transaction first; nothing is left out, and nothing below
what was committed comes again.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.clients.consumer.log_writer import LogWriter
from tests.processes.group_ordering import GO_ON, GROUP, LEAVE, read_in_group
from tests.processes.group_ordering_checks import GroupCheck
from tests.processes.ordering import LAST, TOPIC, notes_of, positions_of, write_plainly, write_transactions
from tests.processes.ordering_checks import Partition, check_writers, in_order_of_markers
from tests.tools.campaigns import times
from tests.tools.workload import Job
from txnstore import Consumer, TopicPartition
from txnstore.log.bounds import read_bounds

PARTITIONS = 4
WRITERS = ("transactions-1", "transactions-2", "transactions-3")
MEMBERS = ("member-1", "member-2", "member-3")
#: How many rounds there are; in each everybody writes a little, and all of this befalls some member.
FEW, MANY = 2, times(8)
ACTIONS = ("kill", "kill", "leave", "leave", "leave")
TRANSACTIONS, PLAIN = 5, 10
#: How many records come at most before the next of these.
PROGRESS_MAX = 4
#: After how long without any the campaign writes some itself: whoever takes many at once leaves none for later.
NOTHING_SECONDS = 0.5
#: How often it befalls another one than who has just got something.
BEFALLS_ANOTHER = 0.3
PATIENCE_SECONDS = 60


class Campaign:
    """The processes, and what came of them."""

    def __init__(self, url, store, folder, processes, lives, wait_for, assignor):
        self.seed = random.randrange(2**32)
        self._chance = random.Random(self.seed)
        self._url, self._store, self._log, self._assignor = url, store, LogWriter(store), assignor
        self._folder, self._processes, self._lives, self._wait_for = folder, processes, lives, wait_for
        self._ids = self._log.topic(TOPIC, PARTITIONS).partition_ids
        names = {f"{TOPIC}-{number}": partition_id for number, partition_id in enumerate(self._ids)}
        self._job = Job(url, folder, "", 0, names, self.seed)
        self._jobs: dict[str, Job] = {}
        self._writing = {}
        self._at_work = {}
        self._leaving = []
        self._own_notes: list[Any] = []

    def run(self, rounds):
        for name in MEMBERS[1:]:
            self._join(name)
        for number in range(1, rounds + 1):
            self._write(number)
            for action in self._chance.sample(ACTIONS, len(ACTIONS)):
                self._befall(action, self._receive(self._chance.randint(1, PROGRESS_MAX)))
        for name in sorted(set(MEMBERS) - self._at_work.keys()):
            self._join(name)
        for process in self._writing.values():
            self._end(process)
        for number in range(PARTITIONS):
            self._log.write(TOPIC, number, LAST.encode())
        self._receive_rest()
        for name in list(self._at_work):
            self._leave(name)
        for process, _ in self._leaving:
            self._end(process)

    def check(self):
        partitions = [
            self._store.read(lambda connection, number=number: in_order_of_markers(connection, number))
            for number in self._ids
        ]
        written = [note for name in (*WRITERS, "plain") for life in self._notes(name) for note in life]
        written += self._own_notes
        facts = check_writers(partitions, written)
        check = GroupCheck(partitions, written)
        check.check([life for name in MEMBERS for life in self._notes(name)], positions_of(self._committed()))
        return facts + check.facts

    def _next_job(self, name):
        self._jobs[name] = replace(self._job, name=name, life=self._lives(name))
        return self._jobs[name]

    def _write(self, number):
        """Let everybody write some more; who has not yet ended is killed."""
        for name in WRITERS:
            if name in self._writing:
                self._processes.kill(self._writing[name])
            job = self._next_job(name)
            self._writing[name] = self._processes.start(write_transactions, job, number * TRANSACTIONS)
        if "plain" in self._writing:
            self._end(self._writing["plain"])
        self._writing["plain"] = self._processes.start(write_plainly, self._next_job("plain"), PLAIN)

    def _write_own(self):
        """Write one more record to each partition."""
        for number in range(PARTITIONS):
            name = f"campaign/{len(self._own_notes)}"
            self._own_notes.append((time.monotonic_ns(), "asks", name, {number: [f"{name}/0"]}))
            self._log.write(TOPIC, number, f"{name}/0".encode())
            self._own_notes.append((time.monotonic_ns(), "committed", name))

    def _befall(self, action, name):
        """Let this member end, which waits to be told to go on, or any other one; and one come, or the same again."""
        if self._chance.random() < BEFALLS_ANOTHER:
            self._tell(name, GO_ON)
            name = self._chance.choice(sorted(self._at_work))
        if action == "kill":
            process, _ = self._at_work.pop(name)
            self._processes.kill(process)
        else:
            self._leave(name)
        absent = sorted(set(MEMBERS) - self._at_work.keys())
        for name in self._chance.sample(absent, self._chance.randint(not self._at_work, len(absent))):
            self._join(name)

    def _join(self, name):
        process, pipe = self._processes.start_with_pipe(read_in_group, self._next_job(name), self._assignor)
        self._at_work[name] = process, pipe

    def _tell(self, name, what):
        self._at_work[name][1].send(what)

    def _leave(self, name):
        self._tell(name, LEAVE)
        self._leaving.append(self._at_work.pop(name))

    def _end(self, process):
        process.join(PATIENCE_SECONDS)
        self._check_no_errors()
        assert process.exitcode is not None, f"{process.name} has not ended"

    def _receive(self, count):
        """Wait until the members have got so many records, and return who has got the last one of them."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            name, got = self._next_report()
            count -= got
            if got and count <= 0:
                return name
            if got:
                self._tell(name, GO_ON)
            else:
                assert time.monotonic() < deadline, "nothing comes any more"
                self._write_own()

    def _receive_rest(self):
        """Let the members go on until they have committed all that there is."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        bounds = self._store.read(partial(read_bounds, partition_ids=self._ids))
        ends = [bounds[number].high_watermark for number in self._ids]
        while True:
            name, got = self._next_report()
            if got:
                self._tell(name, GO_ON)
            elif [one.offset for one in self._committed()] == ends:
                return
            assert time.monotonic() < deadline, "not all is committed"

    def _next_report(self):
        """Return a member and how much it has got; nothing if nobody gets anything for a while."""
        names = {pipe: name for name, (_, pipe) in self._at_work.items()}
        found = self._wait_for(names, NOTHING_SECONDS)
        self._check_no_errors()
        if not found:
            return None, 0
        pipe = self._chance.choice(found)
        return names[pipe], pipe.recv()

    def _committed(self):
        with Consumer({"bootstrap.servers": self._url, "group.id": GROUP}) as consumer:
            return consumer.committed([TopicPartition(TOPIC, number) for number in range(PARTITIONS)], PATIENCE_SECONDS)

    def _check_no_errors(self):
        errors = {path.name: path.read_text() for path in self._folder.glob("*.error")}
        assert not errors, "\n".join(errors.values())

    def _notes(self, name):
        return notes_of(self._jobs[name])


@pytest.mark.parametrize(
    ("txnstore_url", "assignor", "rounds"),
    [
        # What is there for whoever does not run the campaign, in which all of it happens, too.
        pytest.param("sqlite", "cooperative-sticky", FEW, id="sqlite-cooperative-sticky-few"),
        *(
            pytest.param(*values, MANY, id="-".join((*values, "many")), marks=[pytest.mark.slow, pytest.mark.campaign])
            for values in (("sqlite", "range"), ("postgresql", "cooperative-sticky"))
        ),
    ],
    indirect=["txnstore_url"],
)
def test_whoever_comes_goes_or_is_killed_each_member_gets_transactions_whole_and_goes_on_where_the_last_one_was(
    url, txnstore_open, tmp_path, processes, lives, wait_for, assignor, rounds
):
    campaign = Campaign(url, txnstore_open(url, clock=None), tmp_path, processes, lives, wait_for, assignor)
    try:
        campaign.run(rounds)
        facts = campaign.check()
    except AssertionError as error:
        error.add_note(f"seed {campaign.seed}")
        raise
    assert min(facts["committed"], facts["given"]) > 0


@pytest.mark.parametrize("asks_at", [1, 8])
def test_where_a_member_begins_counts_from_when_it_has_asked_for_it(asks_at):
    """Until it notes the answer it may have lost the partition to one that has committed more."""
    partition = Partition(keys=[(0, 0), (1, 0)], records=[(0, "a/0"), (1, "a/1")])
    late = [[asks_at, "asks for", [0]], [9, "is given", [0], []], [10, "loses", [0]]]
    other = [
        [2, "asks for", [0]],
        [3, "is given", [0], []],
        [4, "got", [[0, 0, "a/0"], [0, 1, "a/1"]], False],
        [5, "commits", [[0, 2, 0]]],
        [6, "has committed", [[0, 2, 0]]],
    ]
    check = GroupCheck([partition], [[0, "asks", "a", {}], [1, "committed", "a"]])
    if asks_at == 1:
        check.check([late, other], [(0, 2, 0)])
        return
    with pytest.raises(AssertionError, match="0 goes on at 0, below what was committed"):
        check.check([late, other], [(0, 2, 0)])
