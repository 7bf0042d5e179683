"""Tests of the clock that tests set by hand."""

from __future__ import annotations

import threading

from txnstore.clock import Clock
from txnstore.testing.manual_clock import ManualClock


def test_time_passes_only_when_the_clock_is_moved():
    clock = ManualClock(now_ms=1_000)
    assert [clock.now_ms(), clock.now_ms()] == [1_000, 1_000]
    assert clock.advance(milliseconds=250) == 1_250
    assert clock.now_ms() == 1_250


def test_the_clock_can_be_set_back():
    clock = ManualClock(now_ms=1_000)
    clock.advance(-400)
    assert clock.now_ms() == 600


def test_no_step_is_lost_when_several_threads_move_the_clock():
    clock = ManualClock(now_ms=0)

    def advance_often() -> None:
        for _ in range(1_000):
            clock.advance(1)

    threads = [threading.Thread(target=advance_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.now_ms() == 4_000


def test_it_serves_wherever_a_clock_is_asked_for():
    def read(clock: Clock) -> int:
        return clock.now_ms()

    assert read(ManualClock(now_ms=5)) == 5


def test_a_failed_test_shows_the_time():
    assert repr(ManualClock(now_ms=5)) == "ManualClock(now_ms=5)"
