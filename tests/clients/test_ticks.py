"""Milliseconds for who needs them very often: the clock is asked once in each of them, and never late."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from txnstore import deadline
from txnstore.deadline import Ticks


@pytest.fixture
def wall(monkeypatch):
    """The system's time in seconds, and how often it was asked."""
    state = SimpleNamespace(seconds=1_000.0, asked=0)

    def ask():
        state.asked += 1
        return state.seconds

    monkeypatch.setattr(deadline, "time", SimpleNamespace(time=ask))
    return state


def test_one_question_is_good_until_the_next_millisecond_begins(wall):
    ticks = Ticks(None)
    assert ticks.until_seconds < 5.0
    wall.seconds = 1_000.00025
    assert ticks.next(5.0) == ticks.now_ms == 1_000_000
    assert ticks.until_seconds == pytest.approx(5.00075, abs=1e-6)
    wall.seconds = 1_000.0015
    assert ticks.next(5.00125) == ticks.now_ms == 1_000_001
    assert ticks.until_seconds == pytest.approx(5.00175, abs=1e-6)
    assert wall.asked == 2


def test_a_clock_that_is_set_back_is_believed_within_a_millisecond(wall):
    ticks = Ticks(None)
    ticks.next(5.0)
    wall.seconds = 900.0
    assert ticks.next(ticks.until_seconds) == ticks.now_ms == 900_000


def test_a_clock_of_the_tests_is_asked_every_time(wall):
    class Counting:
        now = 0

        def now_ms(self):
            self.now += 1
            return self.now

    ticks = Ticks(Counting())
    assert [ticks.next(5.0), ticks.next(5.0), ticks.until_seconds < 5.0] == [1, 2, True]
    assert wall.asked == 0
