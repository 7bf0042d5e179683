"""The partitioners: the partitions that Kafka's other clients choose, for any key."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import txnstore
from txnstore.log.partitioners import PARTITIONERS, PartitionChoice, _murmur2_hash, consistent, fnv1a, murmur2

#: As confluent-kafka 2.16.1 computes them: (murmur2, consistent, fnv1a) for 3 and for 12 partitions.
VECTORS = {
    b"": ((0, 0, 0), (9, 0, 3)),
    b"a": ((1, 0, 0), (4, 3, 0)),
    b"abc": ((0, 0, 2), (3, 6, 11)),
    b"hello": ((0, 1, 0), (9, 10, 3)),
    b"kafka-key-123": ((0, 1, 2), (0, 7, 2)),
    b"\xff\x00": ((1, 0, 2), (7, 9, 2)),
}
#: As the tests of Kafka's Java client have them, as signed numbers.
JAVA_HASHES = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}
KEYED = {"consistent": consistent, "murmur2": murmur2, "fnv1a": fnv1a}


class NoRandom(random.Random):
    """Fails the test that asks it for a number."""

    def randrange(self, *arguments, **keywords):
        pytest.fail("a key was given, and its partition was left to chance")


@pytest.mark.parametrize("key", VECTORS, ids=ascii)
@pytest.mark.parametrize(("index", "partition_count"), [(0, 3), (1, 12)])
def test_keys_get_the_partitions_that_confluent_kafka_chooses(key, index, partition_count):
    found = tuple(hash_(key, partition_count) for hash_ in (murmur2, consistent, fnv1a))
    assert found == VECTORS[key][index]


@pytest.mark.parametrize("key", JAVA_HASHES, ids=ascii)
def test_murmur2_is_javas(key):
    assert _murmur2_hash(key) == JAVA_HASHES[key] % 2**32


@pytest.mark.parametrize("hash_", KEYED.values())
def test_what_is_no_key_or_no_number_of_partitions_is_refused(hash_):
    key: object
    for key in (None, "text", bytearray(b"a"), memoryview(b"a"), 5):
        with pytest.raises(TypeError, match=f"bytes, not {type(key).__name__}"):
            hash_(key, 3)
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"^partition_count must be > 0, got {count}$"):
            hash_(b"a", count)
    no_count: object
    for no_count in ("3", None, 3.0):
        with pytest.raises(TypeError, match="integer"):
            hash_(b"a", no_count)


def test_the_hashes_are_public():
    assert (txnstore.murmur2, txnstore.consistent, txnstore.fnv1a) == (murmur2, consistent, fnv1a)


@given(key=st.binary(max_size=100), partition_count=st.integers(1, 1000), name=st.sampled_from(sorted(PARTITIONERS)))
def test_a_partition_is_one_that_there_is(key, partition_count, name):
    for key_or_none in (key, None):
        assert 0 <= PARTITIONERS[name](key_or_none, partition_count, random.Random(1)) < partition_count


@pytest.mark.slow_but_first
@given(key=st.binary(min_size=1, max_size=100), partition_count=st.integers(1, 1000))
@pytest.mark.parametrize("name", KEYED)
def test_a_key_always_gets_the_partition_of_its_hash(name, key, partition_count):
    expected = KEYED[name](key, partition_count)
    for variant in (name, f"{name}_random"):
        assert PARTITIONERS[variant](key, partition_count, NoRandom()) == expected


@pytest.mark.parametrize(
    ("name", "keys_by_chance"),
    [
        ("random", {None, b"", b"key"}),
        ("consistent", set()),
        ("consistent_random", {None, b""}),
        ("murmur2", set()),
        ("murmur2_random", {None}),
        ("fnv1a", set()),
        ("fnv1a_random", {None}),
    ],
)
def test_which_keys_are_left_to_chance(name, keys_by_chance):
    for key in (None, b"", b"key"):
        random_ = random.Random(7)
        found = {PARTITIONERS[name](key, 5, random_) for _ in range(200)}
        assert found == (
            set(range(5)) if key in keys_by_chance else {PARTITIONERS[name](b"" if key is None else key, 5, random_)}
        )


def test_every_partitioner_of_librdkafka_is_there():
    assert set(PARTITIONERS) == {"random", *KEYED, *(f"{name}_random" for name in KEYED)}


@given(key=st.binary(max_size=300), partition_count=st.integers(1, 2**31 - 1))
def test_hashes_are_those_of_confluent_kafka(key, partition_count):
    theirs = pytest.importorskip("confluent_kafka", reason="compares with confluent-kafka where it is there")
    for name, hash_ in KEYED.items():
        assert hash_(key, partition_count) == getattr(theirs, name)(key, partition_count)


@pytest.mark.parametrize("name", sorted(KEYED))
@pytest.mark.parametrize("suffix", ["", "_random"])
def test_keys_go_where_librdkafka_sends_them(name, suffix):
    theirs = pytest.importorskip("confluent_kafka", reason="compares with confluent-kafka where it is there")
    variant = name + suffix
    # Without chance there is nothing that would keep records together for a while.
    sticky = {"sticky.partitioning.linger.ms": 0} if suffix else {}
    producer = theirs.Producer({"test.mock.num.brokers": 1, "partitioner": variant, "log_level": 0, **sticky})
    sent: list = []
    keys = [b"", b"a", b"abc", b"hello", b"kafka-key-123", b"\xff\x00", None]
    for key in keys * 30:
        # The report of a message may leave out its key.
        producer.produce("t", b"", key, on_delivery=lambda _, message, key=key: sent.append((key, message.partition())))
    assert producer.flush(30) == 0
    for key in keys:
        partitions = {partition for of_key, partition in sent if of_key == key}
        if len(partitions) == 1:
            assert partitions == {PARTITIONERS[variant](key, 4, NoRandom())}
            choice = PartitionChoice(variant, sticky_seconds=0.01)
            assert partitions == {choice.choose("t", key, 4, now_seconds) for now_seconds in range(20)}
        else:
            assert {PARTITIONERS[variant](key, 4, random.Random(seed)) for seed in range(99)} == {0, 1, 2, 3}
