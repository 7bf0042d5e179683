"""The cluster as the clients describe it: brokers, topics, groups, the enumerations that go with them, and versions.

The database plays the whole cluster: there is one broker, number 0, which leads every partition.
"""

from __future__ import annotations

import base64
import operator
from collections.abc import Sequence
from typing import Final, SupportsIndex

from txnstore.clients.model.errors import KafkaError
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.model import IsolationLevel, OrderedEnum

__all__ = [
    "BrokerMetadata",
    "ClusterMetadata",
    "ConsumerGroupState",
    "ConsumerGroupTopicPartitions",
    "ConsumerGroupType",
    "ElectionType",
    "GroupMember",
    "GroupMetadata",
    "IsolationLevel",
    "Node",
    "PartitionMetadata",
    "ThrottleEvent",
    "TopicCollection",
    "TopicMetadata",
    "TopicPartitionInfo",
    "Uuid",
]

#: What a reader may see: the numbers of `IsolationLevel`.
ISOLATION_LEVEL_READ_UNCOMMITTED: Final = 0
ISOLATION_LEVEL_READ_COMMITTED: Final = 1

_SIGNED_64_BITS: Final = range(-(2**63), 2**63)


class ClusterMetadata:
    """The cluster, from `list_topics()`."""

    def __init__(self) -> None:
        self.cluster_id: str | None = None
        self.controller_id = -1
        self.brokers: dict[int, BrokerMetadata] = {}
        self.topics: dict[str, TopicMetadata] = {}
        self.orig_broker_id = -1
        self.orig_broker_name: str | None = None

    def __repr__(self) -> str:
        return f"ClusterMetadata({self.cluster_id})"

    def __str__(self) -> str:
        return str(self.cluster_id)


class BrokerMetadata:
    """A broker: its number, and host and port of the database."""

    def __init__(self) -> None:
        self.id = -1
        self.host: str | None = None
        self.port = -1

    def __repr__(self) -> str:
        return f"BrokerMetadata({self.id}, {self.host}:{self.port})"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/{self.id}"


class TopicMetadata:
    """A topic with its partitions by number; `error` says why there are none."""

    def __init__(self) -> None:
        self.topic: str | None = None
        self.partitions: dict[int, PartitionMetadata] = {}
        self.error: KafkaError | None = None

    def __repr__(self) -> str:
        return f"TopicMetadata({self.topic}, {len(self.partitions)} partitions{_after_comma(self.error)})"

    def __str__(self) -> str:
        return str(self.topic)


class PartitionMetadata:
    """A partition with the number of its leader and of those that hold copies."""

    def __init__(self) -> None:
        self.id = -1
        self.leader = -1
        self.replicas: list[int] = []
        self.isrs: list[int] = []
        self.error: KafkaError | None = None

    def __repr__(self) -> str:
        return f"PartitionMetadata({self.id}{_after_comma(self.error)})"

    def __str__(self) -> str:
        return str(self.id)


class GroupMetadata:
    """A consumer group, from `list_groups()`."""

    def __init__(self) -> None:
        self.broker: BrokerMetadata | None = None
        self.id: str | None = None
        self.error: KafkaError | None = None
        self.state: str | None = None
        self.protocol_type: str | None = None
        self.protocol: str | None = None
        self.members: list[GroupMember] = []

    def __repr__(self) -> str:
        return f"GroupMetadata({self.id}{_after_comma(self.error)})"

    def __str__(self) -> str:
        return str(self.id)


class GroupMember:
    """A member of a consumer group; `metadata` and `assignment` are bytes of the assignor's own format."""

    def __init__(self) -> None:
        self.id: str | None = None
        self.client_id: str | None = None
        self.client_host: str | None = None
        self.metadata: bytes | None = None
        self.assignment: bytes | None = None


def with_fields(described: object) -> str:
    """Return the text of an answer's object for a programmer: its class and all that it holds."""
    fields = ", ".join(f"{name}={value!r}" for name, value in vars(described).items())
    return f"{type(described).__name__}({fields})"


class Node:
    """A broker, from the calls of the admin client."""

    def __init__(self, id: int, host: str, port: int, rack: str | None = None) -> None:  # noqa: A002 - Kafka's name
        self.id = id
        self.id_string = str(id)
        self.host = host
        self.port = port
        self.rack = rack

    __repr__ = with_fields

    def __str__(self) -> str:
        rack = f"(Rack - {self.rack})" if self.rack else ""
        return f"({self.id}) {self.host}:{self.port} {rack}"


class TopicPartitionInfo:
    """A partition of a described topic: its number, its leader, and the nodes that hold copies."""

    def __init__(
        self,
        id: int,  # noqa: A002 - Kafka's name
        leader: Node,
        replicas: list[Node],
        isr: list[Node],
    ) -> None:
        self.id = id
        self.leader = leader
        self.replicas = replicas
        self.isr = isr

    __repr__ = with_fields


class TopicCollection:
    """The topics that `describe_topics()` is about, by name."""

    def __init__(self, topic_names: Sequence[str]) -> None:
        self.topic_names = topic_names


class ConsumerGroupTopicPartitions:
    """A consumer group and partitions, as the calls about a group's offsets take and return them.

    Args:
        group_id: the group.
        topic_partitions: the partitions, with offsets where they are known; None: all that have one.
    """

    def __init__(self, group_id: str, topic_partitions: list[TopicPartition] | None = None) -> None:
        self.group_id = group_id
        self.topic_partitions = topic_partitions

    __repr__ = with_fields


class Uuid:
    """128 bits, as two signed numbers of 64; its text is base64 without padding.

    Args:
        most_significant_bits: the upper half.
        least_significant_bits: the lower half.

    Raises:
        TypeError: a half is not an integer.
        OverflowError: a half does not fit into 64 bits.
    """

    __slots__ = ("_least", "_most")

    def __init__(self, most_significant_bits: SupportsIndex, least_significant_bits: SupportsIndex) -> None:
        self._most = operator.index(most_significant_bits)
        self._least = operator.index(least_significant_bits)
        if self._most not in _SIGNED_64_BITS or self._least not in _SIGNED_64_BITS:
            raise OverflowError("half of a Uuid does not fit into 64 bits")

    def get_most_significant_bits(self) -> int:
        """Return the upper half, a signed number."""
        return self._most

    def get_least_significant_bits(self) -> int:
        """Return the lower half, a signed number."""
        return self._least

    def __int__(self) -> int:
        return (self._most % 2**64 << 64) | self._least % 2**64

    def __str__(self) -> str:
        return base64.b64encode(int(self).to_bytes(16)).decode().rstrip("=")

    __repr__ = __str__

    def __hash__(self) -> int:
        return hash((self._most, self._least))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Uuid):
            return NotImplemented
        return (self._most, self._least) == (other._most, other._least)


class ConsumerGroupState(OrderedEnum):
    """What a consumer group is doing."""

    UNKNOWN = 0
    UNKOWN = 0
    """A misspelling that programs use."""
    PREPARING_REBALANCING = 1
    COMPLETING_REBALANCING = 2
    STABLE = 3
    DEAD = 4
    EMPTY = 5


class ConsumerGroupType(OrderedEnum):
    """Which of Kafka's two protocols a consumer group speaks."""

    UNKNOWN = 0
    CONSUMER = 1
    CLASSIC = 2


class ElectionType(OrderedEnum):
    """Which replica is to become the leader; a database has no elections."""

    PREFERRED = 0
    UNCLEAN = 1


class ThrottleEvent:
    """What `throttle_cb` would be called with: a broker slowed this client down, for so many seconds."""

    def __init__(self, broker_name: str, broker_id: int, throttle_time: float) -> None:
        self.broker_name = broker_name
        self.broker_id = broker_id
        self.throttle_time = throttle_time

    def __str__(self) -> str:
        return f"{self.broker_name}/{self.broker_id} throttled for {int(self.throttle_time * 1000)} ms"


def _after_comma(error: KafkaError | None) -> str:
    return "" if error is None else f", {error}"


# --- versions ---------------------------------------------------------------------------------------------------------

VERSION: Final = "0.1.0"

#: As text and as librdkafka's number: programs ask before they use a feature.
_LIBRDKAFKA_VERSION: Final = ("2.16.0", 0x021000FF)


def version() -> str:
    """Return the version of txnstore."""
    return VERSION


def libversion() -> tuple[str, int]:
    """Return the version of librdkafka whose behaviour the clients have, as text and as librdkafka's number."""
    return _LIBRDKAFKA_VERSION
