"""Configurations in the hands of the admin client: of topics, and of the store."""

from __future__ import annotations

import pytest

from txnstore import KafkaError, KafkaException
from txnstore.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    NewTopic,
    ResourceType,
)
from txnstore.config import _DEFAULTS_OF_BROKERS, STORE_SETTINGS, TOPIC_SETTINGS

PATIENCE_SECONDS = 60
SET, DELETE = AlterConfigOpType.SET, AlterConfigOpType.DELETE
APPEND, SUBTRACT = AlterConfigOpType.APPEND, AlterConfigOpType.SUBTRACT
TOPIC = ConfigResource("topic", "a")
BROKER = ConfigResource("broker", "0")


@pytest.fixture
def admin(url):
    with AdminClient({"bootstrap.servers": url}) as admin:
        admin.create_topics([NewTopic("a", config={"retention.ms": "5"})])["a"].result(PATIENCE_SECONDS)
        yield admin


def only(futures: dict):
    (future,) = futures.values()
    return future.result(PATIENCE_SECONDS)


def code_of(futures: dict) -> int:
    (future,) = futures.values()
    error = future.exception(PATIENCE_SECONDS)
    assert isinstance(error, KafkaException), error
    code: int = error.args[0].code()
    return code


def changed(resource: ConfigResource, *changes: tuple) -> ConfigResource:
    return ConfigResource(
        resource.restype,
        resource.name,
        incremental_configs=[
            ConfigEntry(name, value, incremental_operation=operation) for name, value, operation in changes
        ],
    )


def values(admin: AdminClient, resource: ConfigResource) -> dict[str, str]:
    """Return what differs from the defaults."""
    entries = only(admin.describe_configs([resource]))
    return {name: entry.value for name, entry in entries.items() if not entry.is_default}


# --- describe ---------------------------------------------------------------------------------------------------------


def test_every_setting_of_a_topic_is_shown_with_its_source(admin):
    entries = only(admin.describe_configs([TOPIC]))
    assert entries.keys() == TOPIC_SETTINGS.keys()
    assert all(name == entry.name for name, entry in entries.items())
    assert str(entries["retention.ms"]) == 'retention.ms="5"'
    assert entries["retention.ms"].source is ConfigSource.DYNAMIC_TOPIC_CONFIG
    assert not entries["retention.ms"].is_default
    default = entries["cleanup.policy"]
    assert (default.value, default.is_default, default.source) == ("delete", True, ConfigSource.DEFAULT_CONFIG)
    assert [default.is_read_only, default.is_sensitive, default.is_synonym] == [False] * 3
    assert default.synonyms == {}


def test_the_broker_is_the_store(admin):
    entries = only(admin.describe_configs([BROKER]))
    assert entries.keys() == STORE_SETTINGS.keys()
    assert (entries["num.partitions"].value, entries["auto.create.topics.enable"].value) == ("1", "true")
    only(admin.incremental_alter_configs([changed(BROKER, ("num.partitions", "3", SET))]))
    entry = only(admin.describe_configs([BROKER]))["num.partitions"]
    assert (entry.value, entry.source) == ("3", ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG)
    admin.create_topics([NewTopic("b")])["b"].result(PATIENCE_SECONDS)
    assert len(admin.list_topics("b").topics["b"].partitions) == 3


def test_several_resources_are_described_at_once(admin):
    nobody = ConfigResource(ResourceType.TOPIC, "nobody")
    futures = admin.describe_configs([TOPIC, BROKER, nobody, TOPIC])
    assert futures.keys() == {TOPIC, BROKER, nobody}
    assert "retention.ms" in futures[TOPIC].result(PATIENCE_SECONDS)
    assert "num.partitions" in futures[BROKER].result(PATIENCE_SECONDS)
    assert code_of({nobody: futures[nobody]}) == KafkaError.UNKNOWN_TOPIC_OR_PART


@pytest.mark.parametrize(
    "resource", [ConfigResource("group", "g"), ConfigResource("any", "a"), ConfigResource("broker", "1")], ids=ascii
)
def test_what_has_no_configuration_is_refused(admin, resource):
    assert code_of(admin.describe_configs([resource])) == KafkaError.INVALID_REQUEST
    wanted = changed(resource, ("num.partitions", "3", SET))
    assert code_of(admin.incremental_alter_configs([wanted])) == KafkaError.INVALID_REQUEST


# --- change -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([("retention.bytes", "7", SET)], {"retention.ms": "5", "retention.bytes": "7"}),
        ([("retention.ms", "6", SET)], {"retention.ms": "6"}),
        ([("retention.ms", None, DELETE)], {}),
        ([("retention.ms", "ignored", DELETE)], {}),
        ([("retention.bytes", None, DELETE)], {"retention.ms": "5"}),
        ([("cleanup.policy", "compact", APPEND)], {"retention.ms": "5", "cleanup.policy": "delete,compact"}),
        ([("cleanup.policy", "delete", APPEND)], {"retention.ms": "5", "cleanup.policy": "delete"}),
        ([("retention.ms", None, DELETE), ("cleanup.policy", "compact", SET)], {"cleanup.policy": "compact"}),
        ([("segment.ms", "7", SET)], {"retention.ms": "5", "segment.ms": "7"}),
        ([("retention.ms", " 7 ", SET)], {"retention.ms": "7"}),
        ([("preallocate", "TRUE", SET)], {"retention.ms": "5", "preallocate": "true"}),
        ([("min.cleanable.dirty.ratio", "3e-1", SET)], {"retention.ms": "5", "min.cleanable.dirty.ratio": "0.3"}),
        ([("cleanup.policy", "delete, compact", SET)], {"retention.ms": "5", "cleanup.policy": "delete,compact"}),
        ([("cleanup.policy", "", SET)], {"retention.ms": "5", "cleanup.policy": ""}),
        (
            [("leader.replication.throttled.replicas", "0:1", APPEND)],
            {"retention.ms": "5", "leader.replication.throttled.replicas": "0:1"},
        ),
    ],
    ids=ascii,
)
def test_entries_are_changed_and_no_others(admin, changes, expected):
    assert only(admin.incremental_alter_configs([changed(TOPIC, *changes)])) is None
    assert values(admin, TOPIC) == expected


def test_a_word_is_taken_from_a_list(admin):
    only(admin.incremental_alter_configs([changed(TOPIC, ("cleanup.policy", "compact,delete", SET))]))
    only(admin.incremental_alter_configs([changed(TOPIC, ("cleanup.policy", "delete", SUBTRACT))]))
    assert values(admin, TOPIC)["cleanup.policy"] == "compact"
    only(admin.incremental_alter_configs([changed(TOPIC, ("cleanup.policy", "compact", SUBTRACT))]))
    assert values(admin, TOPIC)["cleanup.policy"] == ""
    only(admin.incremental_alter_configs([changed(TOPIC, ("cleanup.policy", "delete", APPEND))]))
    assert values(admin, TOPIC)["cleanup.policy"] == "delete"


#: As a broker of Kafka 4 describes a fresh topic: settings that a database has no use for.
WITHOUT_A_MEANING = {
    "compression.gzip.level": "-1",
    "compression.lz4.level": "9",
    "compression.zstd.level": "3",
    "errors.deadletterqueue.group.enable": "false",
    "file.delete.delay.ms": "60000",
    "flush.messages": "9223372036854775807",
    "flush.ms": "9223372036854775807",
    "follower.replication.throttled.replicas": "",
    "index.interval.bytes": "4096",
    "leader.replication.throttled.replicas": "",
    "local.retention.bytes": "-2",
    "local.retention.ms": "-2",
    "max.compaction.lag.ms": "9223372036854775807",
    "max.decompressed.message.bytes": "2147483639",
    "min.cleanable.dirty.ratio": "0.5",
    "min.insync.replicas": "1",
    "preallocate": "false",
    "remote.copy.lag.bytes": "-1",
    "remote.copy.lag.ms": "0",
    "remote.log.copy.disable": "false",
    "remote.log.delete.on.disable": "false",
    "remote.storage.enable": "false",
    "segment.bytes": "1073741824",
    "segment.index.bytes": "10485760",
    "segment.jitter.ms": "0",
    "segment.ms": "604800000",
    "unclean.leader.election.enable": "false",
}


def test_settings_without_a_meaning_are_kept_and_described(admin):
    """Tools that compare what they have set with what there is find no difference."""
    entries = only(admin.describe_configs([TOPIC]))
    assert {name: entries[name].value for name in WITHOUT_A_MEANING} == WITHOUT_A_MEANING
    other = {"false": "true", "": "0:1", "0.5": "0.25"}
    wanted = {name: other.get(value, "7") for name, value in WITHOUT_A_MEANING.items()}
    wanted["segment.bytes"] = "1048576"
    admin.create_topics([NewTopic("b", config=wanted)])["b"].result(PATIENCE_SECONDS)
    assert values(admin, ConfigResource("topic", "b")) == wanted
    only(admin.incremental_alter_configs([changed(TOPIC, *((name, value, SET) for name, value in wanted.items()))]))
    assert values(admin, TOPIC) == {"retention.ms": "5", **wanted}
    only(admin.incremental_alter_configs([changed(TOPIC, *((name, None, DELETE) for name in wanted))]))
    assert values(admin, TOPIC) == {"retention.ms": "5"}


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retention.ms", "1_000"),
        ("flush.messages", "0"),
        ("flush.ms", "-1"),
        ("min.insync.replicas", "0"),
        ("min.cleanable.dirty.ratio", "1.5"),
        ("min.cleanable.dirty.ratio", "nan"),
        ("compression.gzip.level", "0"),
        ("preallocate", "yes"),
        ("leader.replication.throttled.replicas", "1:2,*"),
        ("cleanup.policy", "delete,"),
        ("cleanup.policy", "none"),
    ],
)
def test_a_value_that_kafka_refuses_is_refused(admin, name, value):
    assert code_of(admin.incremental_alter_configs([changed(TOPIC, (name, value, SET))])) == KafkaError.INVALID_CONFIG
    assert code_of(admin.create_topics([NewTopic("b", config={name: value})])) == KafkaError.INVALID_CONFIG


def test_settings_that_contradict_each_other_are_refused(admin):
    only(admin.incremental_alter_configs([changed(TOPIC, ("min.compaction.lag.ms", "10", SET))]))
    (future,) = admin.incremental_alter_configs([changed(TOPIC, ("max.compaction.lag.ms", "5", SET))]).values()
    text = "conflict topic config setting min.compaction.lag.ms (10) > max.compaction.lag.ms (5)"
    assert future.exception(PATIENCE_SECONDS).args[0].str() == text


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("operation", "name", "text"),
    [
        (SET, "xyz", "Unknown topic config name: xyz"),
        (SET, "retension.ms", "Unknown topic config name: retension.ms; did you mean 'retention.ms'?"),
        (APPEND, "xyz", "Unknown topic config name: xyz"),
        (APPEND, "retention.ms", "Can't APPEND to key retention.ms because its type is not LIST."),
    ],
)
def test_an_error_says_what_kafkas_says(admin, operation, name, text):
    (future,) = admin.incremental_alter_configs([changed(TOPIC, (name, "1", operation))]).values()
    assert future.exception(PATIENCE_SECONDS).args[0].str() == text


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("name", "of_topics"), _DEFAULTS_OF_BROKERS.items())
def test_what_a_broker_has_for_its_topics_is_named_as_topics_have_it(admin, name, of_topics):
    assert of_topics in TOPIC_SETTINGS
    assert name not in STORE_SETTINGS
    (future,) = admin.incremental_alter_configs([changed(BROKER, (name, "1", SET))]).values()
    told = f"there is no setting {name!r}: a store has no defaults for topics, each has a {of_topics} of its own"
    assert future.exception(PATIENCE_SECONDS).args[0].str() == told


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("resource", "changes", "code"),
    [
        (TOPIC, [("retention.bytes", "7", SET), ("retention.ms", "soon", SET)], KafkaError.INVALID_CONFIG),
        (TOPIC, [("retention.bytes", "7", SET), ("retension.ms", "7", SET)], KafkaError.INVALID_CONFIG),
        (TOPIC, [("retention.bytes", "7", SET), ("no.such", None, DELETE)], KafkaError.INVALID_CONFIG),
        (TOPIC, [("retention.bytes", "7", SET), ("retention.ms", "6", APPEND)], KafkaError.INVALID_CONFIG),
        (TOPIC, [("retention.ms", "6", SET), ("retention.ms", "7", SET)], KafkaError.INVALID_REQUEST),
        (TOPIC, [("", "6", SET)], KafkaError.INVALID_CONFIG),
        (TOPIC, [("x\n\0'; DROP", "6", SET)], KafkaError.INVALID_CONFIG),
        (BROKER, [("num.partitions", "7", SET), ("num.partitions", "8", SET)], KafkaError.INVALID_REQUEST),
        (
            BROKER,
            [("auto.create.topics.enable", "false", SET), ("num.partitions", "0", SET)],
            KafkaError.INVALID_CONFIG,
        ),
        (BROKER, [("num.partitions", "7", SET), ("no.such", None, DELETE)], KafkaError.INVALID_CONFIG),
        (BROKER, [("num.partitions", "7", SUBTRACT)], KafkaError.INVALID_CONFIG),
        (ConfigResource("topic", "nobody"), [("retention.ms", "6", SET)], KafkaError.UNKNOWN_TOPIC_OR_PART),
    ],
    ids=ascii,
)
def test_a_wrong_change_changes_nothing_of_its_resource(admin, resource, changes, code):
    assert code_of(admin.incremental_alter_configs([changed(resource, *changes)])) == code
    assert values(admin, TOPIC) == {"retention.ms": "5"}
    assert values(admin, BROKER) == {}


def test_validate_only_finds_the_same_errors_and_changes_nothing(admin):
    good = changed(TOPIC, ("retention.ms", "6", SET))
    assert only(admin.incremental_alter_configs([good], validate_only=True)) is None
    bad = changed(TOPIC, ("retention.ms", "soon", SET))
    assert code_of(admin.incremental_alter_configs([bad], validate_only=True)) == KafkaError.INVALID_CONFIG
    assert values(admin, TOPIC) == {"retention.ms": "5"}


def test_two_changes_of_one_resource_in_a_call_are_refused_together(admin):
    """As by librdkafka and by a broker: one of them would get lost."""
    changes = [changed(TOPIC, ("retention.bytes", text, SET)) for text in ("1", "2")]
    assert code_of(admin.incremental_alter_configs(changes)) == KafkaError._INVALID_ARG
    wanted = [ConfigResource("topic", "a", set_config={"retention.bytes": text}) for text in ("1", "2")]
    with pytest.warns(DeprecationWarning, match="alter_configs"):
        assert code_of(admin.alter_configs(wanted)) == KafkaError._INVALID_ARG
    assert values(admin, TOPIC) == {"retention.ms": "5"}


def test_settings_of_the_store_are_given_their_defaults_back(admin):
    only(admin.incremental_alter_configs([changed(BROKER, ("num.partitions", "3", SET))]))
    assert values(admin, BROKER) == {"num.partitions": "3"}
    only(admin.incremental_alter_configs([changed(BROKER, ("num.partitions", None, DELETE))]))
    assert values(admin, BROKER) == {}


def test_alter_configs_replaces_everything_and_is_deprecated(admin):
    wanted = ConfigResource("topic", "a", set_config={"retention.bytes": "9"})
    with pytest.warns(DeprecationWarning, match=r"^alter_configs has been deprecated\. Use incremental_alter_configs"):
        futures = admin.alter_configs([wanted], validate_only=True)
    assert only(futures) is None
    assert values(admin, TOPIC) == {"retention.ms": "5"}
    with pytest.warns(DeprecationWarning, match="alter_configs"):
        assert only(admin.alter_configs([wanted])) is None
    assert values(admin, TOPIC) == {"retention.bytes": "9"}
    with pytest.warns(DeprecationWarning, match="alter_configs"):
        assert only(admin.alter_configs([TOPIC])) is None
    assert values(admin, TOPIC) == {}


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resources", "error", "text"),
    [
        ([], ValueError, "^Expected non-empty list of ConfigResource objects$"),
        (None, TypeError, "not iterable"),
        (TOPIC, TypeError, "not a list of ConfigResource"),
        ("topic", None, "not a list of ConfigResource"),
        (["topic"], None, "Expected list of .*ConfigResource"),
        ([TOPIC, 5], None, "Expected list of .*ConfigResource"),
        ([ConfigResource("topic", "")], ValueError, r"^Invalid ConfigResource\(2,\)$"),
    ],
    ids=ascii,
)
def test_wrong_resources_are_refused(idle_admin, resources, error, text):
    """Of what is no resource confluent-kafka's older calls say ValueError, and the newer one TypeError."""
    with pytest.raises(error or ValueError, match=text):
        idle_admin.describe_configs(resources)
    with pytest.raises(error or ValueError, match=text), pytest.warns(DeprecationWarning, match="alter_configs"):
        idle_admin.alter_configs(resources)
    with pytest.raises(error or TypeError, match=text):
        idle_admin.incremental_alter_configs(resources)


@pytest.mark.parametrize(
    ("entries", "error", "text"),
    [
        ([], ValueError, "expected non-empty list of ConfigEntry"),
        (["x"], TypeError, "expected ConfigEntry"),
        ([ConfigEntry("retention.ms", "6")], TypeError, "incremental_operation"),
        ([ConfigEntry("retention.ms", None, incremental_operation=SET)], TypeError, "Expected .value to be str type"),
        ([ConfigEntry("retention.ms", 6, incremental_operation=SET)], TypeError, "not int"),  # type: ignore[arg-type]
        ([ConfigEntry(6, "6", incremental_operation=SET)], TypeError, ".name to be str"),  # type: ignore[arg-type]
    ],
    ids=ascii,
)
def test_wrong_entries_are_refused(idle_admin, entries, error, text):
    with pytest.raises(error, match=text):
        idle_admin.incremental_alter_configs([ConfigResource("topic", "a", incremental_configs=entries)])


def test_a_resource_is_a_value_of_its_type_and_name():
    same = [ConfigResource(kind, "t") for kind in ("topic", "TOPIC", 2, ResourceType.TOPIC, ConfigResource.Type.TOPIC)]
    assert len(set(same)) == 1
    assert ConfigResource("topic", "t", set_config={"a": "1"}) == ConfigResource("topic", "t")
    assert ConfigResource("topic", "t") != ConfigResource("broker", "t")
    assert ConfigResource("topic", "t") < ConfigResource("topic", "u") < ConfigResource("broker", "a")
    assert ConfigResource("topic", "t") != 5
    assert repr(ConfigResource("topic", "t")) == str(same[0]) == "ConfigResource(ResourceType.TOPIC,t)"
    assert repr(ConfigResource("topic", "t", error=5)) == "ConfigResource(ResourceType.TOPIC,t,5)"
    assert (same[0].restype_int, same[0].configs, same[0].error) == (2, None, None)
    assert ConfigResource("topic", 5).name == "5"  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "name"), [("nope", "t"), (99, "t"), (None, "t"), ("topic", None)])
def test_a_resource_of_no_kind_or_without_a_name_is_refused(kind, name):
    with pytest.raises(ValueError, match=r"resource type|ResourceType|resource name"):
        ConfigResource(kind, name)


def test_values_are_collected_in_a_resource():
    resource = ConfigResource("topic", "t")
    assert bool(resource)
    resource.set_config("a", "1")
    resource.set_config("a", "2", overwrite=False)
    assert (len(resource), resource.set_config_dict) == (1, {"a": "1"})
    resource.set_config("a", "3")
    assert resource.set_config_dict == {"a": "3"}
    entry = ConfigEntry("a", "1", incremental_operation=SET)
    resource.add_incremental_config(entry)
    assert resource.incremental_configs == [entry]
    assert (repr(entry), str(entry)) == ('ConfigEntry(a="1")', 'a="1"')


def test_the_enumerations_have_kafkas_numbers():
    assert {kind.name: kind.value for kind in ResourceType} == {
        "UNKNOWN": 0, "ANY": 1, "TOPIC": 2, "GROUP": 3, "BROKER": 4, "TRANSACTIONAL_ID": 5,
    }  # fmt: skip
    assert {source.name: source.value for source in ConfigSource} == {
        "UNKNOWN_CONFIG": 0, "DYNAMIC_TOPIC_CONFIG": 1, "DYNAMIC_BROKER_CONFIG": 2, "DYNAMIC_DEFAULT_BROKER_CONFIG": 3,
        "STATIC_BROKER_CONFIG": 4, "DEFAULT_CONFIG": 5, "GROUP_CONFIG": 8,
    }  # fmt: skip
    assert [operation.value for operation in (SET, DELETE, APPEND, SUBTRACT)] == [0, 1, 2, 3]
    assert ResourceType.TOPIC < ResourceType.GROUP
