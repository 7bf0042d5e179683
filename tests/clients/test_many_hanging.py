"""Ten thousand transactions that time out at once hold readers back for a second at most, by the store's clock.

All is a hundred times smaller than it is, and time passes as it is counted here: for each portion, for each transaction
in it, and where somebody waits.  So what is tested is who looks when, and how much they do at once; how long it takes
on a machine `scripts/bench_hanging.py` measures.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tools.hanging import plant
from txnstore.clients.overdue_help import OverdueHelp
from txnstore.clients.producer.thread import SPREAD_SECONDS, Alarm, WriterHelp
from txnstore.db.cluster.cluster import Cluster, open_cluster
from txnstore.db.portions import Portions
from txnstore.db.store import Store
from txnstore.log.bounds import Bounds, read_bounds
from txnstore.log.cluster_topics import create_topic
from txnstore.maintenance import loop
from txnstore.maintenance.duties import DUTIES
from txnstore.testing.invariants import assert_sound
from txnstore.testing.manual_clock import ManualClock
from txnstore.transactions import recovery
from txnstore.transactions.listing import TransactionFilter, list_transactions
from txnstore.transactions.open_transactions import each_open
from txnstore.transactions.protocol import FenceReason, TransactionState
from txnstore.transactions.together import AbortedTogether, abort_together

SCALE = 100
COUNT = 10_000 // SCALE
TIMEOUT_MS = 60_000
#: What a portion takes, and each of its transactions: of those that are a hundred times as many 0.05 ms.
PORTION_MS = 2
ABORT_MS = 5
#: How long after their time is up the first is aborted, and the last; and how long a portion may hold its locks.
FIRST_MS_MAX = 150
#: Producers all know of the same moment, and each looks a little later.
OF_PRODUCERS_MS_MAX = FIRST_MS_MAX + int(SPREAD_SECONDS * 1000)
LAST_MS_MAX = 1_000
HELD_MS_MAX = 50


@dataclass
class Scaled:
    """A store whose portions take time of its clock alone, and when each of them was done."""

    cluster: Cluster
    clock: ManualClock
    partition_ids: tuple[int, ...]
    held_ms: list[int] = field(default_factory=list)
    done_at_ms: list[int] = field(default_factory=list)

    @property
    def store(self) -> Store:
        return self.cluster.controller

    def seconds(self) -> float:
        return self.clock.now_ms() / 1000

    def pass_by(self, seconds: float) -> None:
        # Who has nothing to wait for any more waits for ever.
        self.clock.advance(max(1, math.ceil(min(seconds, TIMEOUT_MS / 1000) * 1000)))

    def bounds(self) -> list[Bounds]:
        return list(self.store.read(partial(read_bounds, partition_ids=self.partition_ids)).values())

    def is_free(self) -> bool:
        return all(of.last_stable_offset == of.high_watermark for of in self.bounds())

    def abort(self, some: Any, locality: Any, connection: Any) -> AbortedTogether:
        done = abort_together(some, locality, connection)
        self.held_ms.append(PORTION_MS + ABORT_MS * len(done.aborted))
        self.done_at_ms.append(self.clock.advance(self.held_ms[-1]))
        return done


@pytest.fixture
def scaled(url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scaled]:
    with open_cluster(url, clock=clock) as cluster:
        topic = create_topic(cluster, "orders", partition_count=2)
        scaled = Scaled(cluster, clock, topic.partition_ids)
        portions = partial(Portions, monotonic_seconds=scaled.seconds)
        for module in (recovery, loop):
            monkeypatch.setattr(module, "Portions", portions)
        for name in ("ABORTED_FIRST", "ABORTED_MIN", "ABORTED_MAX", "ABORTED_IN_A_ROW", "FOUND_MAX"):
            monkeypatch.setattr(recovery, name, getattr(recovery, name) // SCALE)
        monkeypatch.setattr(recovery, "abort_together", scaled.abort)
        yield scaled


class Stop(threading.Event):
    """Time that passes while the maintenance waits, until readers are free."""

    def __init__(self, scaled: Scaled, is_over: Callable[[], bool]) -> None:
        super().__init__()
        self.scaled, self.is_over = scaled, is_over

    def is_set(self) -> bool:
        return self.is_over()

    def wait(self, timeout: float | None = None) -> bool:
        self.scaled.pass_by(timeout or 0.0)
        return self.is_set()


def maintain(scaled: Scaled, is_over: Callable[[], bool]) -> None:
    """Be `txnstore maintain`."""
    duties = [duty for duty in DUTIES if duty.name.startswith("timed out")]
    loop.Maintenance(scaled.store, duties=duties, monotonic_seconds=scaled.seconds).run(Stop(scaled, is_over))


def wait_for_records(scaled: Scaled, is_over: Callable[[], bool]) -> None:
    """Be a reader whom nobody wakes."""
    overdue = OverdueHelp(lambda: scaled.store, monotonic_seconds=scaled.seconds)
    while not is_over():
        for of in scaled.bounds():
            if of.last_stable_offset < of.high_watermark:
                overdue.held_back(of.partition_id, of.last_stable_offset)
            else:
                overdue.let_go(of.partition_id)
        scaled.pass_by(overdue.help())


def write(scaled: Scaled, is_over: Callable[[], bool], *, goes_on: bool) -> None:
    """Be the only producer."""
    here: Any = SimpleNamespace(submit=lambda work: work())
    alarm = Alarm(threading.RLock())
    helps = WriterHelp(lambda: scaled.cluster, lambda _: here, lambda: None, alarm, monotonic_seconds=scaled.seconds)
    helps.wrote(scaled.partition_ids)
    while not is_over():
        scaled.pass_by((helps.due_seconds(scaled.seconds()) or math.inf) - scaled.seconds())
        helps.run()
        if goes_on:
            helps.wrote(scaled.partition_ids)


HELPERS = {
    "txnstore maintain": (maintain, FIRST_MS_MAX),
    "a reader": (wait_for_records, FIRST_MS_MAX),
    "a producer": (partial(write, goes_on=True), OF_PRODUCERS_MS_MAX),
    "a producer that has nothing more to write": (partial(write, goes_on=False), OF_PRODUCERS_MS_MAX),
}


@pytest.mark.parametrize(("help_", "first_ms_max"), HELPERS.values(), ids=HELPERS)
def test_readers_go_on_a_second_after_the_timeout(
    scaled: Scaled, help_: Callable[..., None], first_ms_max: int
) -> None:
    names = plant(scaled.store, scaled.partition_ids[:1], COUNT, timeout_ms=TIMEOUT_MS)
    deadline_ms = scaled.clock.now_ms() + TIMEOUT_MS
    help_(scaled, lambda: scaled.is_free() or scaled.clock.now_ms() > deadline_ms + 10 * LAST_MS_MAX)
    assert scaled.is_free()
    ends = [at_ms for at_ms, held_ms in zip(scaled.done_at_ms, scaled.held_ms, strict=True) if held_ms > PORTION_MS]
    assert ends[0] - deadline_ms <= first_ms_max
    assert ends[-1] - deadline_ms <= LAST_MS_MAX
    assert max(scaled.held_ms) <= HELD_MS_MAX
    wanted = TransactionFilter([TransactionState.COMPLETE_ABORT])
    ended = scaled.store.read(partial(list_transactions, wanted=wanted))
    assert [row.transactional_id for row in ended] == names
    assert {(row.fence_reason, row.producer_epoch) for row in ended} == {(FenceReason.TIMEOUT, 1)}
    assert_sound(scaled.store, at_rest=True)


@pytest.mark.slow
def test_ten_thousand_are_listed_and_aborted(url: str, clock: ManualClock) -> None:
    with open_cluster(url, clock=clock) as cluster:
        topic = create_topic(cluster, "orders", partition_count=1)
        store = cluster.controller
        names = plant(store, topic.partition_ids, SCALE * COUNT, timeout_ms=TIMEOUT_MS)
        found = list(each_open(cluster, {}))
        assert [one.transactional_id for one in found] == names
        assert [one.is_oldest for one in found] == [True] + [False] * (len(names) - 1)
        open_ones = TransactionFilter([TransactionState.ONGOING])
        assert len(store.read(partial(list_transactions, wanted=open_ones))) == len(names)
        clock.advance(TIMEOUT_MS + 1)
        assert sorted(recovery.abort_timed_out(store)) == names
        assert list(each_open(cluster, {})) == []
        assert store.read(partial(list_transactions, wanted=open_ones)) == []
        assert_sound(store, at_rest=True)
