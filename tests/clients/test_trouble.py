"""Trouble that lasts, changes, passes and comes again: when it is told."""

from __future__ import annotations

import math

import pytest

from txnstore.errors import StoreBusy, StoreUnavailable
from txnstore.trouble import RepeatedTrouble, kind_of


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


def test_its_end_is_told_once_and_only_if_it_was_told_itself(trouble, now):
    assert not trouble.passed()
    trouble.may_be_told()
    trouble.may_be_told()
    assert [trouble.passed(), trouble.passed()] == [True, False]
    # Coming and going, it fills no log either.
    for now.seconds in range(1, 60):
        assert not trouble.may_be_told()
        assert not trouble.passed()
    now.seconds = 60
    assert trouble.may_be_told()
    now.seconds = 90
    assert not trouble.may_be_told()
    assert trouble.passed()


def test_without_an_end_of_the_period_it_is_told_once_for_ever(now):
    trouble = RepeatedTrouble(math.inf, monotonic_seconds=now)
    assert trouble.may_be_told("host")
    now.seconds = 1e9
    assert not trouble.may_be_told("host")


def test_kinds_that_were_not_met_for_a_period_take_no_room(trouble, now):
    for now.seconds in range(1_000):
        trouble.may_be_told(now.seconds)
    assert len(trouble._told_seconds) == 60


def test_what_differs_by_a_number_alone_is_of_one_kind():
    assert kind_of(StoreBusy("for 17 ms")) == kind_of(StoreBusy("for 4 ms"))
    assert kind_of(StoreBusy("for 17 ms")) != kind_of(StoreUnavailable("for 17 ms"))
    assert kind_of(StoreBusy("for 17 ms")) != kind_of(StoreBusy("for 17 s"))
