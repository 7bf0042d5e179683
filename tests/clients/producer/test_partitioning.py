"""Which partition a record without one goes to."""

from __future__ import annotations

import random

import pytest

from txnstore.log.partitioners import PARTITIONERS, PartitionChoice

MANY = 64


@pytest.mark.parametrize("partitioner", sorted(PARTITIONERS.keys() - {"random"}))
def test_a_key_always_goes_to_the_same_partition(partitioner):
    choice = PartitionChoice(partitioner, sticky_seconds=10)
    chosen = {choice.choose("t", b"key", MANY, now_seconds) for now_seconds in range(100)}
    assert len(chosen) == 1


def test_records_without_a_key_stay_together_for_a_while_and_then_move_on():
    choice = PartitionChoice("consistent_random", sticky_seconds=1.0)
    for round_ in range(20):
        # A round ends just before the partition of the moment does.
        assert len({choice.choose("t", None, MANY, round_ + step) for step in (0.0, 0.5, 0.99)}) == 1
    assert len({choice.choose("t", None, MANY, 100.0 + round_) for round_ in range(50)}) > 5


@pytest.mark.parametrize("partitioner", ["consistent", "murmur2", "fnv1a"])
def test_records_without_a_key_go_where_the_empty_key_goes_if_they_are_hashed_too(partitioner):
    choice = PartitionChoice(partitioner, sticky_seconds=1.0)
    expected = PARTITIONERS[partitioner](b"", MANY, random.Random())
    assert {choice.choose("t", None, MANY, now_seconds) for now_seconds in range(100)} == {expected}


def test_an_empty_key_is_none_for_the_default_partitioner_alone():
    default = PartitionChoice("consistent_random", sticky_seconds=1000.0)
    together = default.choose("t", None, MANY, 0.0)
    assert default.choose("t", b"", MANY, 0.0) == together
    hashed = PartitionChoice("murmur2_random", sticky_seconds=1000.0)
    assert hashed.choose("t", b"", MANY, 0.0) == PARTITIONERS["murmur2"](b"", MANY, random.Random())


def test_topics_have_partitions_of_the_moment_of_their_own():
    choice = PartitionChoice("consistent_random", sticky_seconds=1000.0)
    assert len({choice.choose(f"t{number}", None, MANY, 0.0) for number in range(50)}) > 5


def test_a_partition_of_the_moment_that_is_gone_is_chosen_anew():
    choice = PartitionChoice("consistent_random", sticky_seconds=1000.0)
    while choice.choose("t", None, MANY, 0.0) < 2:
        choice = PartitionChoice("consistent_random", sticky_seconds=1000.0)
    assert choice.choose("t", None, 2, 0.0) < 2


def test_without_stickiness_every_record_is_chosen_for():
    choice = PartitionChoice("consistent_random", sticky_seconds=0.0)
    assert len({choice.choose("t", None, MANY, 0.0) for _ in range(200)}) > 20
