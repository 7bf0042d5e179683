"""Trouble that lasts, changes, passes and comes again: when it is told."""

from __future__ import annotations

import math

import pytest

from txnstore.errors import StoreBusy, StoreUnavailable
from txnstore.trouble import RepeatedTrouble, defect_of, kind_of


class Now:
    seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def now():
    return Now()


@pytest.fixture
def trouble(now):
    return RepeatedTrouble(60.0, monotonic_seconds=now)


def test_trouble_that_lasts_is_told_at_once_and_then_once_in_a_period(trouble, now):
    told = []
    for now.seconds in range(150):
        if trouble.may_be_told("away"):
            told.append(now.seconds)
    assert told == [0, 60, 120]


def test_trouble_of_another_kind_is_told_at_once_and_hides_none(trouble, now):
    kinds = ["away", "busy", None, "away", "busy", None]
    assert [trouble.may_be_told(kind) for kind in kinds] == [True] * 3 + [False] * 3
    now.seconds = 59.9
    assert not trouble.may_be_told("busy")
    now.seconds = 60.0
    assert [trouble.may_be_told(kind) for kind in kinds] == [True] * 3 + [False] * 3


def test_its_end_is_told_once_and_only_if_it_was_told_itself(trouble):
    assert not trouble.passed()
    trouble.may_be_told()
    trouble.may_be_told()
    assert [trouble.passed(), trouble.passed()] == [True, False]


def test_what_begins_anew_is_told_again_once_in_a_period_and_coming_and_going_it_fills_no_log(trouble, now):
    told = []
    for now.seconds in range(0, 130, 10):
        if trouble.may_be_told("away"):
            told.append(now.seconds)
        assert trouble.passed() == (now.seconds in told)
    assert told == [0, 10, 70, 80]


def test_without_an_end_of_the_period_it_is_told_once_for_ever(now):
    trouble = RepeatedTrouble(math.inf, monotonic_seconds=now)
    assert trouble.may_be_told("host")
    now.seconds = 1e9
    assert not trouble.may_be_told("host")


def test_kinds_that_were_not_met_for_a_period_take_no_room(trouble, now):
    for now.seconds in range(1_000):
        trouble.may_be_told(now.seconds)
    assert len(trouble._told_seconds) == 60


def test_what_differs_by_a_measure_alone_is_of_one_kind():
    assert kind_of(StoreBusy("for 17 ms")) == kind_of(StoreBusy("for 4 ms"))
    assert kind_of(StoreBusy("for 17 ms")) != kind_of(StoreUnavailable("for 17 ms"))
    assert kind_of(StoreBusy("for 17 ms")) != kind_of(StoreBusy("for 17 s"))
    assert kind_of("after 0.25 seconds, 3 tries") == kind_of("after 1 seconds, 12 tries")
    deadlock = "Process {} waits for ShareLock on transaction {}; blocked by process {} (PID {})."
    assert kind_of(deadlock.format(17, 4, 18, 5)) == kind_of(deadlock.format(3, 123, 9, 6))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("db1: no answer", "db2: no answer"),
        ("db:5432 no", "db:5433 no"),
        ("10.1.0.5:5432 no", "10.2.0.5:5432 no"),
        ('host "10.1.0.5", port 5432', 'host "10.2.0.5", port 5432'),
        ("partition orders-1: no", "partition orders-2: no"),
        ("partition 1 of topic orders", "partition 2 of topic orders"),
    ],
)
def test_places_are_told_apart(one, other):
    assert kind_of(StoreUnavailable(one)) != kind_of(StoreUnavailable(other))


def test_an_error_without_a_text_has_a_kind():
    class Mute(Exception):
        def __str__(self):
            raise ValueError

    assert kind_of(Mute()) == kind_of(Mute()) != kind_of(StoreBusy(""))


def test_a_defect_is_known_by_the_place_that_it_comes_from():
    def caught(work):
        with pytest.raises(KeyError) as error:
            work()
        return defect_of(error.value)

    def one():
        raise KeyError(1)

    def other():
        raise KeyError(1)

    assert caught(one) == caught(one) != caught(other)
    assert defect_of(KeyError(1)) == defect_of(KeyError(2)) != defect_of(ValueError(1))
