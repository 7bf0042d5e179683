"""The partitioners: which partition a key belongs to, as librdkafka and Java's producer compute it, and the choice.

The hashes are part of Kafka's contract with its users: records of one key go to one partition, no matter which client
writes them.
"""

from __future__ import annotations

import operator
import random
import zlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

Partitioner = Callable[[bytes | None, int, random.Random], int]

_UINT32: Final = 0xFFFFFFFF
_INT32_MAX: Final = 0x7FFFFFFF
_MURMUR2_SEED: Final = 0x9747B28C
_MURMUR2_FACTOR: Final = 0x5BD1E995
_MURMUR2_SHIFT: Final = 24
_FNV1A_BASIS: Final = 0x811C9DC5
_FNV1A_PRIME: Final = 0x01000193


def murmur2(key: bytes, partition_count: int) -> int:
    """Return the partition of `key` as Java's default partitioner does.

    Raises:
        TypeError: the key is not bytes, or the count not an integer.
        ValueError: there are no partitions to choose from.
    """
    _check(key, partition_count)
    return _positive_murmur2_hash(key) % partition_count


def consistent(key: bytes, partition_count: int) -> int:
    """Return the partition of `key` by its CRC-32, as librdkafka's default partitioner does.

    Raises:
        TypeError, ValueError: as `murmur2`.
    """
    _check(key, partition_count)
    return zlib.crc32(key) % partition_count


def fnv1a(key: bytes, partition_count: int) -> int:
    """Return the partition of `key` by its FNV-1a hash, as Sarama's default partitioner does.

    Raises:
        TypeError, ValueError: as `murmur2`.
    """
    _check(key, partition_count)
    return _fnv1a_hash(key) % partition_count


def key_hash_of(partitioner: str) -> Callable[[bytes], int] | None:
    """Return the hash by which, modulo their number, it chooses the partition of a key; "random" has none."""
    return _HASHES.get(partitioner.removesuffix("_random"))


def partitions_of_keys(partitioner: str, keys: Iterable[bytes], partition_count: int) -> list[int]:
    """Return the partition of each key, as the partitioner of this name hashes them: any but "random".

    Raises:
        TypeError: a key is not bytes, or the count not an integer.
        ValueError: there are no partitions to choose from.
    """
    _check(b"", partition_count)
    hash_ = _HASHES[partitioner.removesuffix("_random")]
    return [hash_(key) % partition_count for key in keys]


def _check(key: object, partition_count: int) -> None:
    if not isinstance(key, bytes):
        raise TypeError(f"a key is bytes, not {type(key).__name__}")
    if operator.index(partition_count) < 1:
        raise ValueError(f"partition_count must be > 0, got {partition_count}")


def _murmur2_hash(key: bytes) -> int:
    value = _MURMUR2_SEED ^ len(key)
    whole = len(key) & ~3
    for start in range(0, whole, 4):
        word = (int.from_bytes(key[start : start + 4], "little") * _MURMUR2_FACTOR) & _UINT32
        word = ((word ^ (word >> _MURMUR2_SHIFT)) * _MURMUR2_FACTOR) & _UINT32
        value = ((value * _MURMUR2_FACTOR) & _UINT32) ^ word
    if whole < len(key):
        value = ((value ^ int.from_bytes(key[whole:], "little")) * _MURMUR2_FACTOR) & _UINT32
    value = ((value ^ (value >> 13)) * _MURMUR2_FACTOR) & _UINT32
    return value ^ (value >> 15)


def _positive_murmur2_hash(key: bytes) -> int:
    return _murmur2_hash(key) & _INT32_MAX


def _fnv1a_hash(key: bytes) -> int:
    value = _FNV1A_BASIS
    for byte in key:
        value = ((value ^ byte) * _FNV1A_PRIME) & _UINT32
    # The hash is taken for a signed number, and its sign dropped.
    return value if value <= _INT32_MAX else 2**32 - value


_HASHES: Final[Mapping[str, Callable[[bytes], int]]] = MappingProxyType(
    {"consistent": zlib.crc32, "murmur2": _positive_murmur2_hash, "fnv1a": _fnv1a_hash}
)


def _at_random(key: bytes | None, partition_count: int, random_: random.Random) -> int:
    return random_.randrange(partition_count)


def _hashed(hash_: Callable[[bytes, int], int]) -> Partitioner:
    """Hash every key; no key is hashed like an empty one."""

    def partition(key: bytes | None, partition_count: int, random_: random.Random) -> int:
        return hash_(key or b"", partition_count)

    return partition


def _hashed_or_random(hash_: Callable[[bytes, int], int], *, empty_is_none: bool) -> Partitioner:
    """Hash keys; a record without a key goes anywhere."""

    def partition(key: bytes | None, partition_count: int, random_: random.Random) -> int:
        if key is None or (empty_is_none and not key):
            return random_.randrange(partition_count)
        return hash_(key, partition_count)

    return partition


#: The values of the configuration key `partitioner`: each returns the partition of a key, or of a record without one.
PARTITIONERS: Final[Mapping[str, Partitioner]] = MappingProxyType(
    {
        "random": _at_random,
        "consistent": _hashed(consistent),
        # librdkafka takes an empty key for a missing one here, and only here.
        "consistent_random": _hashed_or_random(consistent, empty_is_none=True),
        "murmur2": _hashed(murmur2),
        "murmur2_random": _hashed_or_random(murmur2, empty_is_none=False),
        "fnv1a": _hashed(fnv1a),
        "fnv1a_random": _hashed_or_random(fnv1a, empty_is_none=False),
    }
)


#: The partitioners that treat an empty key as no key.
_EMPTY_IS_NONE: Final = frozenset({"consistent_random"})


class PartitionChoice:
    """Chooses partitions for one producer.

    Records without a key stay together for `sticky_seconds`, so that they make full batches (KIP-480); with 0 each
    of them goes where the partitioner says.  A partitioner that hashes them too sends them all to one partition.
    """

    def __init__(self, partitioner: str, *, sticky_seconds: float) -> None:
        """Choose by the partitioner of this name."""
        self._partition_of = PARTITIONERS[partitioner]
        self.key_hash = key_hash_of(partitioner)
        """What a key's partition is by, modulo how many there are; None: it is not by the key."""

        self.empty_is_none = partitioner in _EMPTY_IS_NONE
        """Whether an empty key counts as no key."""

        self.sticky_seconds = 0.0 if partitioner in _HASHES else sticky_seconds
        """For how long those without a key stay together; with 0 each is placed by itself, also if asked again."""

        self._random = random.Random()
        #: By topic: the partition of the moment, and until when.
        self._sticky: dict[str, tuple[int, float]] = {}

    def choose(self, topic: str, key: bytes | None, partition_count: int, now_seconds: float) -> int:
        """Return the partition of a record; `now_seconds` is of the monotonic clock."""
        if partition_count == 1:
            return 0
        if key or (key is not None and not self.empty_is_none) or self.sticky_seconds <= 0:
            return self._partition_of(key, partition_count, self._random)
        partition, until_seconds = self._sticky.get(topic, (-1, 0.0))
        if now_seconds >= until_seconds or not 0 <= partition < partition_count:
            partition = self._random.randrange(partition_count)
            self._sticky[topic] = (partition, now_seconds + self.sticky_seconds)
        return partition
