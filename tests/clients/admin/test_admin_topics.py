"""Topics in the hands of the admin client: made, deleted, given partitions, described."""

from __future__ import annotations

import logging
import uuid

import pytest

from txnstore import KafkaError, KafkaException, TopicCollection
from txnstore.admin import AdminClient, NewPartitions, NewTopic
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.opening import open_store
from txnstore.log.topics import get_topic, list_topics

PATIENCE_SECONDS = 60


def named(value: object) -> str:
    """Return an id for a parameter that shows all that is in it."""
    if isinstance(value, list):
        return ascii([named(item) for item in value])
    return ascii(vars(value)) if isinstance(value, NewTopic | NewPartitions) else ascii(value)


@pytest.fixture
def admin(url):
    with AdminClient({"bootstrap.servers": url}) as admin:
        yield admin


@pytest.fixture
def database(url):
    """The store behind the client's back."""
    with open_store(url) as store:
        yield store


def results(futures: dict) -> dict:
    return {name: future.result(PATIENCE_SECONDS) for name, future in futures.items()}


def error_of(futures: dict, name: str = "a") -> KafkaError:
    error = futures[name].exception(PATIENCE_SECONDS)
    assert isinstance(error, KafkaException), error
    found = error.args[0]
    assert isinstance(found, KafkaError)
    return found


# --- create -----------------------------------------------------------------------------------------------------------


def test_topics_are_there_when_their_futures_are_done(admin, database):
    wanted = [NewTopic("a", 3, 1), NewTopic("b", config={"cleanup.policy": "compact", "retention.ms": 5})]  # type: ignore[dict-item]
    assert results(admin.create_topics(wanted)) == {"a": None, "b": None}
    found = {name: database.read(lambda connection, name=name: get_topic(connection, name)) for name in "ab"}
    assert [len(topic.partition_ids) for topic in found.values()] == [3, 1]
    assert found["b"].config == {"cleanup.policy": "compact", "retention.ms": "5"}


def test_the_stores_number_of_partitions_is_the_default(admin, database):
    database.write(lambda connection: change_store_settings(connection, {"num.partitions": "4"}))
    results(admin.create_topics([NewTopic("a"), NewTopic("b", -1, -1), NewTopic("c", 1)]))
    counts = {name: len(topic.partitions) for name, topic in admin.list_topics().topics.items()}
    assert counts == {"a": 4, "b": 4, "c": 1}


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("topic", "code"),
    [
        (NewTopic("a b"), KafkaError.TOPIC_EXCEPTION),
        (NewTopic(""), KafkaError.TOPIC_EXCEPTION),
        (NewTopic("x" * 250), KafkaError.TOPIC_EXCEPTION),
        (NewTopic("'; DROP TABLE topics --"), KafkaError.TOPIC_EXCEPTION),
        (NewTopic("a", 0), KafkaError.INVALID_PARTITIONS),
        (NewTopic("a", 1, 0), KafkaError.INVALID_REPLICATION_FACTOR),
        (NewTopic("a", 1, replica_assignment=[[0, 1]]), KafkaError.INVALID_REPLICA_ASSIGNMENT),
        (NewTopic("a", 2, replica_assignment=[[0], [1]]), KafkaError.INVALID_REPLICA_ASSIGNMENT),
        (NewTopic("a", config={"no.such.setting": "1"}), KafkaError.INVALID_CONFIG),
        (NewTopic("a", config={"retention.ms": "soon"}), KafkaError.INVALID_CONFIG),
        (NewTopic("a", config={"retention.ms": None}), KafkaError.INVALID_CONFIG),  # type: ignore[dict-item]
        (NewTopic("a", config={"cleanup.policy": "none"}), KafkaError.INVALID_CONFIG),
    ],
    ids=named,
)
def test_what_cannot_be_created_fails_alone_with_its_reason(admin, database, topic, code):
    futures = admin.create_topics([topic, NewTopic("good")])
    error = error_of(futures, topic.topic)
    assert error.code() == code
    assert error.str().isprintable()
    assert not error.retriable()
    assert futures["good"].result(PATIENCE_SECONDS) is None
    assert database.read(list_topics) == ["good"]


def test_a_topic_is_created_once(admin):
    results(admin.create_topics([NewTopic("a")]))
    assert error_of(admin.create_topics([NewTopic("a", 2)])).code() == KafkaError.TOPIC_ALREADY_EXISTS
    assert error_of(admin.create_topics([NewTopic("b", 1), NewTopic("b", 2)]), "b") == KafkaError.INVALID_REQUEST
    assert list(admin.list_topics().topics) == ["a"]


def test_one_copy_on_the_one_broker_is_accepted(admin):
    wanted = [NewTopic("a", 2, replica_assignment=[[0], [0]]), NewTopic("b", 1, 1), NewTopic("c", 1, -1)]
    results(admin.create_topics(wanted))
    assert sorted(admin.list_topics().topics) == ["a", "b", "c"]


def test_copies_are_the_databases_business_and_asking_for_more_is_logged(url, caplog):
    caplog.set_level(logging.INFO)
    logger = logging.getLogger("the.users")
    with AdminClient({"bootstrap.servers": url}, logger=logger) as admin:
        results(admin.create_topics([NewTopic("a", 2, 3)]))
        (partition, _) = results(admin.describe_topics(TopicCollection(["a"])))["a"].partitions
        assert len(partition.replicas) == 1
    assert [(record.name, record.args) for record in caplog.records if record.name == "the.users"] == [
        ("the.users", ("a", 3))
    ]


def test_settings_about_brokers_files_are_told_of(url, caplog):
    caplog.set_level(logging.INFO)
    logger = logging.getLogger("the.users")
    with AdminClient({"bootstrap.servers": url}, logger=logger) as admin:
        results(admin.create_topics([NewTopic("a", config={"segment.ms": "5", "min.insync.replicas": "2"})]))
    assert [(record.name, record.args) for record in caplog.records if record.name == "the.users"] == [
        ("the.users", ("segment.ms",)),
        ("the.users", ("min.insync.replicas",)),
    ]


def test_validate_only_finds_the_same_errors_and_makes_nothing(admin):
    assert results(admin.create_topics([NewTopic("a", 2)], validate_only=True)) == {"a": None}
    assert admin.list_topics().topics == {}
    assert error_of(admin.create_topics([NewTopic("a", 1, 0)], validate_only=True)) == (
        KafkaError.INVALID_REPLICATION_FACTOR
    )
    results(admin.create_topics([NewTopic("a")]))
    assert error_of(admin.create_topics([NewTopic("a")], validate_only=True)) == KafkaError.TOPIC_ALREADY_EXISTS


@pytest.mark.parametrize(
    ("topics", "error", "text"),
    [
        ([], ValueError, "^Expected non-empty list of NewTopic objects$"),
        (None, TypeError, "NoneType"),
        ("a", TypeError, "list of NewTopic"),
        (["a"], TypeError, "list of NewTopic"),
        ([NewTopic("a", -2)], ValueError, r"num_partitions out of expected range 1\.\.100000 or -1"),
        ([NewTopic("a", 100_001)], ValueError, "num_partitions out of expected range"),
        ([NewTopic("a", 1, -2)], ValueError, r"replication_factor out of expected range -1\.\.10000"),
        ([NewTopic("a", 1, 10_001)], ValueError, "replication_factor out of expected range"),
        ([NewTopic("a", 1, 1, [[0]])], ValueError, "replication_factor and replica_assignment are mutually exclusive"),
        ([NewTopic("a", 2, replica_assignment=[[0]])], ValueError, "outer size of num_partitions"),
        ([NewTopic("a", 1, replica_assignment=[["0"]])], ValueError, "list of int lists"),  # type: ignore[list-item]
        ([NewTopic("a", 1, replica_assignment=[[]])], ValueError, "list of int lists"),
        ([NewTopic("a", 1, replica_assignment=[0])], ValueError, "list of int lists"),  # type: ignore[list-item]
        ([NewTopic("a", 1, replica_assignment=5)], ValueError, "list of int lists"),  # type: ignore[arg-type]
    ],
    ids=named,
)
def test_create_topics_refuses_wrong_arguments_before_anything_is_done(idle_admin, topics, error, text):
    with pytest.raises(error, match=text):
        idle_admin.create_topics(topics)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), TypeError),
        ((5,), TypeError),
        ((None,), TypeError),
        (("a", "x"), TypeError),
        (("a", 1.5), TypeError),
        (("a", 1, "x"), TypeError),
        (("a", 2**40), OverflowError),
        (("a", 1, 1, None, 5), TypeError),
    ],
    ids=named,
)
def test_a_new_topic_refuses_what_confluent_kafka_refuses(arguments, error):
    with pytest.raises(error):
        NewTopic(*arguments)


def test_new_topics_and_partitions_are_values():
    assert repr(NewTopic("a")) == str(NewTopic("a")) == "NewTopic(topic=a)"
    assert repr(NewTopic("a", 2, 1)) == "NewTopic(topic=a,num_partitions=2)"
    assert repr(NewPartitions("a", 2)) == "NewPartitions(topic=a,new_total_count=2)"
    for kind in (NewTopic, NewPartitions):
        assert kind("a", 1) == kind("a", 1) != kind("a", 2)
        assert hash(kind("a", 1)) == hash(kind("a", 1))
        assert kind("a", 1) < kind("a", 2) < kind("b", 1)
        assert kind("a", 1) != "a"
        with pytest.raises(TypeError):
            assert kind("a", 1) < "a"
    new = NewTopic("a", num_partitions=2, replication_factor=1, config={"x": "y"})
    assert (new.topic, new.num_partitions, new.replication_factor) == ("a", 2, 1)
    assert (new.replica_assignment, new.config) == (None, {"x": "y"})


# --- delete -----------------------------------------------------------------------------------------------------------


def test_deleted_topics_are_gone_and_can_be_made_again(admin):
    results(admin.create_topics([NewTopic("a", 2), NewTopic("b")]))
    futures = admin.delete_topics(["a", "nobody", "a"], operation_timeout=-1)
    assert futures["a"].result(PATIENCE_SECONDS) is None
    assert error_of(futures, "nobody") == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert list(admin.list_topics().topics) == ["b"]
    results(admin.create_topics([NewTopic("a", 1)]))
    assert len(admin.list_topics("a").topics["a"].partitions) == 1


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["", "a b", "a\0b", "\ud800", "x" * 300, 5], ids=named)
def test_deleting_what_is_no_name_says_that_there_is_none(admin, name):
    assert error_of(admin.delete_topics([name]), str(name)) == KafkaError.UNKNOWN_TOPIC_OR_PART


@pytest.mark.parametrize(
    ("topics", "error", "text"),
    [
        ([], ValueError, "^Expected non-empty list of topic strings$"),
        ([None], ValueError, "^Expected list of topic strings, not NoneType$"),
        ("abc", TypeError, "^argument 1 must be list, not str$"),
        (("a",), TypeError, "^argument 1 must be list, not tuple$"),
        (None, TypeError, "not NoneType"),
    ],
    ids=named,
)
def test_delete_topics_refuses_wrong_arguments(idle_admin, topics, error, text):
    with pytest.raises(error, match=text):
        idle_admin.delete_topics(topics)


# --- partitions -------------------------------------------------------------------------------------------------------


def test_a_topic_gets_more_partitions(admin):
    results(admin.create_topics([NewTopic("a", 2)]))
    assert results(admin.create_partitions([NewPartitions("a", 5)], validate_only=True)) == {"a": None}
    assert len(admin.list_topics("a").topics["a"].partitions) == 2
    assert results(admin.create_partitions([NewPartitions("a", 5, [[0], [0], [0]])])) == {"a": None}
    assert len(admin.list_topics("a").topics["a"].partitions) == 5


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        ([NewPartitions("a", 2)], KafkaError.INVALID_PARTITIONS),
        ([NewPartitions("a", 1)], KafkaError.INVALID_PARTITIONS),
        ([NewPartitions("a", 3), NewPartitions("a", 4)], KafkaError.INVALID_REQUEST),
        ([NewPartitions("a", 3, [[1]])], KafkaError.INVALID_REPLICA_ASSIGNMENT),
        ([NewPartitions("a", 3, [[0], [0]])], KafkaError.INVALID_REPLICA_ASSIGNMENT),
        ([NewPartitions("nobody", 3)], KafkaError.UNKNOWN_TOPIC_OR_PART),
    ],
    ids=named,
)
def test_partitions_that_cannot_be_had_change_nothing(admin, wanted, code):
    results(admin.create_topics([NewTopic("a", 2)]))
    assert error_of(admin.create_partitions(wanted), wanted[0].topic) == code
    assert len(admin.list_topics("a").topics["a"].partitions) == 2


@pytest.mark.parametrize(
    ("wanted", "error", "text"),
    [
        ([], ValueError, "^Expected non-empty list of NewPartitions objects$"),
        (["a"], TypeError, "NewPartitions"),
        (None, TypeError, "NewPartitions"),
        ([NewPartitions("a", 0)], ValueError, r"new_total_cnt out of expected range 1\.\.100000"),
        ([NewPartitions("a", 100_001)], ValueError, "new_total_cnt out of expected range"),
        ([NewPartitions("a", 2, [["x"]])], ValueError, "replica_assignment must be"),  # type: ignore[list-item]
    ],
    ids=named,
)
def test_create_partitions_refuses_wrong_arguments(idle_admin, wanted, error, text):
    with pytest.raises(error, match=text):
        idle_admin.create_partitions(wanted)


# --- describe ---------------------------------------------------------------------------------------------------------


def test_a_description_has_the_topics_identity_and_the_one_broker_everywhere(admin, database):
    results(admin.create_topics([NewTopic("a", 2)]))
    futures = admin.describe_topics(TopicCollection(["a", "nobody"]))
    described = futures["a"].result(PATIENCE_SECONDS)
    topic = database.read(lambda connection: get_topic(connection, "a"))
    assert (described.name, described.is_internal, described.authorized_operations) == ("a", False, None)
    assert int(described.topic_id) == uuid.UUID(topic.topic_uuid).int
    assert [partition.id for partition in described.partitions] == [0, 1]
    for partition in described.partitions:
        assert [node.id for node in (partition.leader, *partition.replicas, *partition.isr)] == [0, 0, 0]
    assert error_of(futures, "nobody") == KafkaError.UNKNOWN_TOPIC_OR_PART


def test_descriptions_of_no_topics_and_of_one_given_twice(admin):
    assert admin.describe_topics(TopicCollection([])) == {}
    futures = admin.describe_topics(TopicCollection(["a", "b", "a"]))
    for name in "ab":
        assert error_of(futures, name) == KafkaError._INVALID_ARG
        assert error_of(futures, name).str() == "Duplicate topics not allowed"


@pytest.mark.parametrize(
    ("topics", "error", "text"),
    [
        (["a"], TypeError, "^Expected input to be instance of TopicCollection$"),
        (None, TypeError, "TopicCollection"),
        (TopicCollection("a"), TypeError, "^Expected list of topic names to be described$"),
        (TopicCollection([5]), TypeError, "^Expected list of topics strings, not int$"),  # type: ignore[list-item]
        (TopicCollection(["a", ""]), ValueError, "^Empty topic name at index 1 isn't allowed$"),
    ],
    ids=lambda value: ascii(getattr(value, "topic_names", value)),
)
def test_describe_topics_refuses_wrong_arguments(idle_admin, topics, error, text):
    with pytest.raises(error, match=text):
        idle_admin.describe_topics(topics)
