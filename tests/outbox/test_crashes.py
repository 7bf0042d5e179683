"""The sequencer dies at any of its steps, and so does the next one: every row becomes a record, once."""

from __future__ import annotations

import itertools
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import pytest

from tests.outbox.conftest import plain_connection
from tests.outbox.steps import Caller, records, refusals, values, waiting
from tests.tools.crashes import CrashPoint, When, every_crash, every_second_crash, noting
from txnstore import Outbox
from txnstore.db.opening import open_store
from txnstore.db.sqlite import committed_rows
from txnstore.db.store import Store
from txnstore.log.outbox import rows as outbox_rows
from txnstore.log.outbox import sequencer as outbox_sequencer
from txnstore.log.outbox.sequencer import drain_outbox, sequence_outbox
from txnstore.log.partition_rows import draw_commit_number
from txnstore.testing.invariants import assert_sound

pytestmark = [pytest.mark.slow, pytest.mark.crashes]

numbers = itertools.count()


@dataclass
class Round:
    """A round that is about to die: rows of two callers wait for a topic of its own."""

    store: Store
    topic: str
    wanted: list[bytes] = field(default_factory=lambda: [b"1a", b"1b", b"2a", b"2b", b"2c"])


@pytest.fixture
def victims(url):
    """Open stores as processes do that die."""
    with ExitStack() as opened:
        yield lambda: opened.enter_context(open_store(url, pool_size=1))


@pytest.fixture
def make(url, store, victims):
    """Make rounds, in a store that they share; what is left of one is moved before the next."""
    victim = victims()
    # The first number of a database's commits takes SQLite one statement more than those behind it.
    store.write(draw_commit_number)

    def make_one() -> Round:
        drain_outbox(store)
        topic = f"topic-{next(numbers)}"
        caller = Caller(plain_connection(url))
        caller.insert(b"1a", b"1b", topic=topic).commit()
        caller.insert(b"2a", b"2b", b"2c", topic=topic).commit()
        caller.connection.close()
        return Round(victim, topic)

    return make_one


def die(round_: Round) -> None:
    assert sequence_outbox(round_.store).moved_count == 5


def dies_once(subject: Round, store: Store) -> None:
    """Check what a crash has left, and that the next sequencer makes it whole."""
    held = values(store, subject.topic)
    # On one commit hangs all of it.
    assert held in ([], subject.wanted)
    assert waiting(store) == len(subject.wanted) - len(held)
    drain_outbox(store)
    assert values(store, subject.topic) == subject.wanted
    assert waiting(store) == 0


@pytest.mark.parametrize("rows_max", [5_000, 2], ids=["in a page", "in pages"])
def test_a_crash_at_any_step_leaves_all_or_nothing(store, make, monkeypatch, rows_max):
    monkeypatch.setattr(outbox_rows, "PAGE_ROWS_MAX", rows_max)
    steps = 0
    seen = set()

    def die_in_rounds(round_: Round) -> None:
        drain_outbox(round_.store)

    for crash in every_crash(make, die if rows_max > 5 else die_in_rounds, statements_are_all=True):
        crash.revive()
        with noting(crash):
            held = values(store, crash.subject.topic)
            seen.add(len(held))
            if rows_max > 5:
                dies_once(crash.subject, store)
            else:
                assert held in ([], [b"1a", b"1b"], crash.subject.wanted)
                drain_outbox(store)
                assert values(store, crash.subject.topic) == crash.subject.wanted
        steps += 1
    assert steps > 20
    assert {0, 5} <= seen
    assert_sound(store, at_rest=True)


def test_a_crash_in_any_of_several_rounds_tears_no_caller_apart(url, store, victims, monkeypatch):
    """Rows that were produced, between which SQLite ends a round, and plain SQL in their database transactions."""
    monkeypatch.setattr(outbox_sequencer, "ROUND_ROWS_MAX", 2)
    monkeypatch.setattr(committed_rows, "LOOK_AGAIN_SECONDS", 0.0)
    victim = victims()
    store.write(draw_commit_number)
    callers = [[b"1a", b"1b"], [b"2a", b"plain 2b", b"2c"], [b"plain 3a", b"3b"]]

    def make() -> Round:
        drain_outbox(store)
        round_ = Round(victim, f"topic-{next(numbers)}", [value for caller in callers for value in caller])
        with closing(plain_connection(url)) as connection, Outbox(url, sequencer=False) as outbox:
            for caller in callers:
                for value in caller:
                    if value.startswith(b"plain"):
                        Caller(connection).insert(value, topic=round_.topic)
                    else:
                        outbox.produce(connection, round_.topic, value)
                connection.commit()
        return round_

    seen = set()
    for crash in every_crash(make, lambda round_: drain_outbox(round_.store), statements_are_all=True):
        crash.revive()
        with noting(crash):
            held = values(store, crash.subject.topic)
            seen.add(len(held))
            drain_outbox(store)
            assert values(store, crash.subject.topic) == crash.subject.wanted
    # The last two together: before the first of one's rows nobody has looked.
    assert seen == ({0, 2, 7} if store.backend.has_one_writer else {0, 7})
    assert_sound(store, at_rest=True)


def test_a_second_crash_is_no_worse_than_the_first(url, store, make, victims):
    helper = victims()

    def recover(subject: Round) -> None:
        # The server may not have noticed yet that the first one is dead.
        sequence_outbox(helper, waits=True)

    def matters(point: CrashPoint) -> bool:
        # The others leave no traces, as the test before shows; on PostgreSQL a crash takes longer.
        return point.statement == "COMMIT" and (point.when is When.BEFORE or url.startswith("sqlite"))

    pairs = 0
    for crashed in every_second_crash(make, die, recover, is_first=matters, statements_are_all=True):
        crashed.revive()
        with noting(crashed):
            dies_once(crashed.subject, store)
        pairs += 1
    assert pairs >= 20
    assert_sound(store, at_rest=True)


def test_a_crash_while_rows_are_marked_leaves_them_to_be_marked(url, store, victims):
    victim = victims()

    def make() -> Round:
        caller = Caller(plain_connection(url))
        topic = f"topic-{next(numbers)}"
        caller.insert(b"good", topic=topic).commit()
        caller.insert(b"%d" % next(numbers), topic="no topic").commit()
        caller.connection.close()
        return Round(victim, topic)

    for crash in every_crash(make, lambda round_: sequence_outbox(round_.store), statements_are_all=True):
        crash.revive()
        with noting(crash):
            drain_outbox(store)
            assert values(store, crash.subject.topic) == [b"good"]
            assert waiting(store) == 0
    assert len(refusals(store)) > 10
    assert all(why.startswith("a topic's name") for why in refusals(store).values())
    assert records(store, "no topic") == []
