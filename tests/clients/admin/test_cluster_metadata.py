"""The metadata classes have confluent-kafka's attributes, defaults and texts."""

from __future__ import annotations

import copy
import pickle

import pytest

from txnstore.admin import DescribeClusterResult, ListOffsetsResultInfo
from txnstore.clients.model.errors import KafkaError
from txnstore.clients.model.metadata import (
    BrokerMetadata,
    ClusterMetadata,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    ConsumerGroupType,
    ElectionType,
    GroupMember,
    GroupMetadata,
    IsolationLevel,
    Node,
    PartitionMetadata,
    ThrottleEvent,
    TopicCollection,
    TopicMetadata,
    TopicPartitionInfo,
    Uuid,
)
from txnstore.clients.model.topic_partition import TopicPartition

UNKNOWN_TOPIC = 'KafkaError{code=UNKNOWN_TOPIC_OR_PART,val=3,str="Broker: Unknown topic or partition"}'


def make(kind, **attributes):
    made = kind()
    for name, value in attributes.items():
        assert hasattr(made, name)
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        (
            ClusterMetadata,
            {
                "cluster_id": None,
                "controller_id": -1,
                "brokers": {},
                "topics": {},
                "orig_broker_id": -1,
                "orig_broker_name": None,
            },
        ),
        (BrokerMetadata, {"id": -1, "host": None, "port": -1}),
        (TopicMetadata, {"topic": None, "partitions": {}, "error": None}),
        (PartitionMetadata, {"id": -1, "leader": -1, "replicas": [], "isrs": [], "error": None}),
        (
            GroupMetadata,
            {
                "broker": None,
                "id": None,
                "error": None,
                "state": None,
                "protocol_type": None,
                "protocol": None,
                "members": [],
            },
        ),
        (GroupMember, {"id": None, "client_id": None, "client_host": None, "metadata": None, "assignment": None}),
    ],
)
def test_the_defaults_of_the_metadata(kind, attributes):
    assert vars(kind()) == attributes


def test_no_two_objects_share_their_collections():
    assert TopicMetadata().partitions is not TopicMetadata().partitions
    assert PartitionMetadata().replicas is not PartitionMetadata().replicas


@pytest.mark.parametrize(
    ("metadata", "representation", "text"),
    [
        (make(ClusterMetadata, cluster_id="c"), "ClusterMetadata(c)", "c"),
        (make(BrokerMetadata, id=1, host="h", port=9), "BrokerMetadata(1, h:9)", "h:9/1"),
        (make(TopicMetadata, topic="t", partitions={0: None}), "TopicMetadata(t, 1 partitions)", "t"),
        (
            make(TopicMetadata, topic="t", error=KafkaError(3)),
            f"TopicMetadata(t, 0 partitions, {UNKNOWN_TOPIC})",
            "t",
        ),
        (make(PartitionMetadata, id=3), "PartitionMetadata(3)", "3"),
        (make(PartitionMetadata, id=3, error=KafkaError(3)), f"PartitionMetadata(3, {UNKNOWN_TOPIC})", "3"),
        (make(GroupMetadata, id="g"), "GroupMetadata(g)", "g"),
        (make(GroupMetadata, id="g", error=KafkaError(3)), f"GroupMetadata(g, {UNKNOWN_TOPIC})", "g"),
    ],
)
def test_the_texts_of_the_metadata(metadata, representation, text):
    assert (repr(metadata), str(metadata)) == (representation, text)


def test_answers_of_the_admin_client_show_what_they_hold():
    cluster = DescribeClusterResult(Node(1, "h", 2), [Node(1, "h", 2), Node(2, "i", 3, "r")], "c")
    assert repr(cluster) == "DescribeClusterResult(cluster_id=c,nodes=[(1) h:2, (2) i:3 (Rack - r)])"
    assert repr(ListOffsetsResultInfo(3, -1, -1)) == "ListOffsetsResultInfo(offset=3,timestamp=-1)"
    assert repr(ListOffsetsResultInfo(3, 5, 0)) == "ListOffsetsResultInfo(offset=3,timestamp=5,leader_epoch=0)"


def test_a_node_has_its_address():
    node = Node(1, "h", 2, "r")
    assert vars(node) == {"id": 1, "id_string": "1", "host": "h", "port": 2, "rack": "r"}
    assert str(node) == "(1) h:2 (Rack - r)"
    assert Node(1, "h", 2).rack is None


def test_the_holders_hold_what_they_are_given():
    node = Node(0, "h", 1)
    partition = TopicPartitionInfo(1, node, [node], [])
    assert (partition.id, partition.leader, partition.replicas, partition.isr) == (1, node, [node], [])
    assert TopicCollection(["a"]).topic_names == ["a"]
    group = ConsumerGroupTopicPartitions("g", [TopicPartition("t", 0)])
    assert (group.group_id, group.topic_partitions) == ("g", [TopicPartition("t", 0)])
    assert ConsumerGroupTopicPartitions("g").topic_partitions is None


def test_a_throttle_event_tells_milliseconds():
    event = ThrottleEvent("b", 1, 0.5)
    assert (event.broker_name, event.broker_id, event.throttle_time) == ("b", 1, 0.5)
    assert str(event) == "b/1 throttled for 500 ms"


@pytest.mark.parametrize(
    ("halves", "text", "number"),
    [
        ((1, 2), "AAAAAAAAAAEAAAAAAAAAAg", (1 << 64) + 2),
        ((0, 0), "AAAAAAAAAAAAAAAAAAAAAA", 0),
        ((-1, -1), "/////////////////////w", 2**128 - 1),
        ((2**63 - 1, -(2**63)), "f/////////+AAAAAAAAAAA", (2**63 - 1 << 64) + 2**63),
    ],
)
def test_a_uuid_is_its_128_bits(halves, text, number):
    uuid = Uuid(*halves)
    assert (uuid.get_most_significant_bits(), uuid.get_least_significant_bits()) == halves
    assert (str(uuid), repr(uuid), int(uuid)) == (text, text, number)
    assert uuid == Uuid(*halves)
    assert hash(uuid) == hash(Uuid(*halves))
    assert pickle.loads(pickle.dumps(uuid)) == copy.copy(uuid) == uuid


def test_a_uuid_differs_from_another_one_and_from_numbers():
    assert Uuid(1, 2) != Uuid(2, 1)
    assert Uuid(1, 2) != int(Uuid(1, 2))


@pytest.mark.parametrize(
    ("halves", "error"), [(("a", 2), TypeError), ((1.0, 2), TypeError), ((2**63, 0), OverflowError)]
)
def test_a_uuid_of_wrong_halves_is_refused(halves, error):
    with pytest.raises(error):
        Uuid(*halves)


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (
            ConsumerGroupState,
            {
                "UNKNOWN": 0,
                "UNKOWN": 0,
                "PREPARING_REBALANCING": 1,
                "COMPLETING_REBALANCING": 2,
                "STABLE": 3,
                "DEAD": 4,
                "EMPTY": 5,
            },
        ),
        (ConsumerGroupType, {"UNKNOWN": 0, "CONSUMER": 1, "CLASSIC": 2}),
        (ElectionType, {"PREFERRED": 0, "UNCLEAN": 1}),
        (IsolationLevel, {"READ_UNCOMMITTED": 0, "READ_COMMITTED": 1}),
    ],
)
def test_the_enumerations_have_kafkas_numbers_and_their_order(kind, numbers):
    assert {name: member.value for name, member in kind.__members__.items()} == numbers
    assert sorted(kind, reverse=True) == sorted(kind, key=lambda member: -member.value)


def test_members_of_different_enumerations_are_not_ordered():
    with pytest.raises(TypeError):
        ConsumerGroupState.STABLE < ConsumerGroupType.CLASSIC  # noqa: B015 - comparing is the test
