"""Configurations as the admin client describes and changes them: of topics and of the store, which plays the broker."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

from sqlalchemy import Connection

from txnstore.clients.admin.calls import Call, write
from txnstore.clients.brokers import BROKER_ID
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.config import STORE_SETTINGS, TOPIC_SETTINGS, Setting, check_setting_name
from txnstore.db.cluster.catalogue import change_store_settings, read_store_config
from txnstore.db.cluster.cluster import Cluster
from txnstore.errors import InvalidConfiguration
from txnstore.log.topics import change_topic_configs, get_topic, lock_topic_configs

#: The kinds of things that have a configuration: the numbers of `ResourceType`.
RESOURCE_UNKNOWN: Final = 0
RESOURCE_ANY: Final = 1
RESOURCE_TOPIC: Final = 2
RESOURCE_GROUP: Final = 3
RESOURCE_BROKER: Final = 4
RESOURCE_TRANSACTIONAL_ID: Final = 5
CONFIG_SOURCE_UNKNOWN_CONFIG: Final = 0
CONFIG_SOURCE_DYNAMIC_TOPIC_CONFIG: Final = 1
CONFIG_SOURCE_DYNAMIC_BROKER_CONFIG: Final = 2
CONFIG_SOURCE_DYNAMIC_DEFAULT_BROKER_CONFIG: Final = 3
CONFIG_SOURCE_STATIC_BROKER_CONFIG: Final = 4
CONFIG_SOURCE_DEFAULT_CONFIG: Final = 5
CONFIG_SOURCE_GROUP_CONFIG: Final = 8


class ResourceType(enum.Enum):
    """The kinds of things that have a configuration; Kafka's numbers."""

    UNKNOWN = RESOURCE_UNKNOWN
    ANY = RESOURCE_ANY
    TOPIC = RESOURCE_TOPIC
    GROUP = RESOURCE_GROUP
    BROKER = RESOURCE_BROKER
    """The store as a whole; its name is 0."""
    TRANSACTIONAL_ID = RESOURCE_TRANSACTIONAL_ID

    def __lt__(self, other: object) -> bool:
        return bool(self.value < other.value) if isinstance(other, ResourceType) else NotImplemented


class ConfigSource(enum.Enum):
    """Where the value of a configuration entry comes from; Kafka's numbers."""

    UNKNOWN_CONFIG = CONFIG_SOURCE_UNKNOWN_CONFIG
    DYNAMIC_TOPIC_CONFIG = CONFIG_SOURCE_DYNAMIC_TOPIC_CONFIG
    DYNAMIC_BROKER_CONFIG = CONFIG_SOURCE_DYNAMIC_BROKER_CONFIG
    DYNAMIC_DEFAULT_BROKER_CONFIG = CONFIG_SOURCE_DYNAMIC_DEFAULT_BROKER_CONFIG
    STATIC_BROKER_CONFIG = CONFIG_SOURCE_STATIC_BROKER_CONFIG
    DEFAULT_CONFIG = CONFIG_SOURCE_DEFAULT_CONFIG
    GROUP_CONFIG = CONFIG_SOURCE_GROUP_CONFIG


class AlterConfigOpType(enum.Enum):
    """What `incremental_alter_configs()` does to an entry; Kafka's numbers."""

    SET = 0
    DELETE = 1
    """Gives the entry its default back."""
    APPEND = 2
    """Adds words to an entry that is a list."""
    SUBTRACT = 3


class ConfigEntry:
    """One entry of a configuration.

    Args:
        name: Kafka's name of the setting.
        value: its value as text.
        source: where the value comes from.
        is_read_only: whether nobody can change it.
        is_default: whether it has its default.
        is_sensitive: whether its value is a secret, and not shown.
        is_synonym: whether it is one of the entries that another one falls back to.
        synonyms: what the entry falls back to, by name.
        incremental_operation: what `incremental_alter_configs()` is to do with it.
    """

    def __init__(  # noqa: PLR0917 - confluent-kafka's signature
        self,
        name: str,
        value: str | None,
        source: ConfigSource = ConfigSource.UNKNOWN_CONFIG,
        is_read_only: bool = False,
        is_default: bool = False,
        is_sensitive: bool = False,
        is_synonym: bool = False,
        synonyms: Mapping[str, ConfigEntry] | None = None,
        incremental_operation: AlterConfigOpType | None = None,
    ) -> None:
        self.name = name
        self.value = value
        self.source = source
        self.is_read_only = bool(is_read_only)
        self.is_default = bool(is_default)
        self.is_sensitive = bool(is_sensitive)
        self.is_synonym = bool(is_synonym)
        self.synonyms = dict(synonyms or {})
        self.incremental_operation = incremental_operation

    def __repr__(self) -> str:
        return f"ConfigEntry({self})"

    def __str__(self) -> str:
        return f'{self.name}="{self.value}"'


class ConfigResource:
    """A topic or the store, with the configuration that it has or is to get; it is equal to others by type and name.

    Args:
        restype: the type, its name in any case, or its number.
        name: the topic's name, or the broker's number.
        set_config: the values that `alter_configs()` is to set.
        described_configs: the entries that it has.
        error: why they are not known.
        incremental_configs: the entries that `incremental_alter_configs()` is to change.

    Raises:
        ValueError: there is no such type, or no name.
    """

    Type: ClassVar = ResourceType

    def __init__(  # noqa: PLR0917 - confluent-kafka's signature
        self,
        restype: ResourceType | str | int,
        name: str,
        set_config: Mapping[str, str] | None = None,
        described_configs: dict[str, ConfigEntry] | None = None,
        error: Any = None,
        incremental_configs: Sequence[ConfigEntry] | None = None,
    ) -> None:
        if name is None:
            raise ValueError("Expected resource name to be a string")
        self.restype = _resource_type(restype)
        self.restype_int: int = self.restype.value
        self.name = str(name)
        self.set_config_dict: dict[str, str] = dict(set_config or {})
        self.incremental_configs: list[ConfigEntry] = list(incremental_configs or ())
        self.configs = described_configs
        self.error = error

    def __repr__(self) -> str:
        error = "" if self.error is None else f",{self.error}"
        return f"ConfigResource({self.restype},{self.name}{error})"

    def __hash__(self) -> int:
        return hash((self.restype, self.name))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ConfigResource):
            return NotImplemented
        return (self.restype, self.name) == (other.restype, other.name)

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, ConfigResource):
            return NotImplemented
        return (self.restype.value, self.name) < (other.restype.value, other.name)

    def __len__(self) -> int:
        """Return how many values are to be set by `alter_configs()`."""
        return len(self.set_config_dict)

    def __bool__(self) -> bool:
        """Return True, also if nothing is to be set."""
        return True

    def set_config(self, name: str, value: str, overwrite: bool = True) -> None:
        """Have `alter_configs()` set the value; without `overwrite`, only if none was given before."""
        if overwrite or name not in self.set_config_dict:
            self.set_config_dict[name] = value

    def add_incremental_config(self, config_entry: ConfigEntry) -> None:
        """Have `incremental_alter_configs()` change the entry."""
        self.incremental_configs.append(config_entry)


def _resource_type(given: object) -> ResourceType:
    if isinstance(given, ResourceType):
        return given
    if isinstance(given, str):
        try:
            return ResourceType[given.upper()]
        except KeyError:
            raise ValueError(f'Unknown resource type "{given[:80]}": should be a ConfigResource.Type') from None
    return ResourceType(given)


Changes = dict[str, str | None]
"""The new text of each setting; None: its default."""


def known_topic_config(topic: str, config: Mapping[str, Any], logger: logging.Logger) -> dict[str, str]:
    """Return the settings that a topic is created with, as text; the log tells of those that have no effect."""
    for name, value in config.items():
        if value is None:
            raise InvalidConfiguration(f"topic {topic}: the setting {str(name)[:80]!r} has no value")
    _tell_of_meaningless(map(str, config), logger)
    return {str(name): str(value) for name, value in config.items()}


def _tell_of_meaningless(names: Iterable[str], logger: logging.Logger) -> None:
    for name in names:
        if name in TOPIC_SETTINGS and not TOPIC_SETTINGS[name].about:
            logger.info(
                "topic setting %s has no meaning for a database: it is kept, and has no effect",
                name,
                extra={"event": "setting_without_effect", "setting": name},
            )


# --- arguments --------------------------------------------------------------------------------------------------------


def check_resources(
    resources: Iterable[ConfigResource], refusal: type[TypeError | ValueError] = ValueError
) -> list[ConfigResource]:
    """Return the resources of a call, or raise `refusal` for anything else: ValueError in older calls."""
    if isinstance(resources, str | bytes | ConfigResource):
        error = TypeError if isinstance(resources, ConfigResource) else refusal
        raise error(f"{type(resources).__name__!r} object is not a list of ConfigResource objects")
    found = list(resources)
    if not found:
        raise ValueError("Expected non-empty list of ConfigResource objects")
    for resource in found:
        if not isinstance(resource, ConfigResource):
            raise refusal(f"Expected list of {ConfigResource}, not of {type(resource).__name__}")
        if not resource.name:
            raise ValueError(f"Invalid ConfigResource({resource.restype_int},)")
    return found


def check_incremental(resources: Iterable[ConfigResource]) -> list[ConfigResource]:
    """Return the resources whose entries are to be changed."""
    found = check_resources(resources, TypeError)
    for resource in found:
        if not resource.incremental_configs:
            raise ValueError(
                "expected non-empty list of ConfigEntry to alter incrementally in incremental_configs field"
            )
        for entry in resource.incremental_configs:
            if not isinstance(entry, ConfigEntry):
                raise TypeError(f"expected ConfigEntry in incremental_configs field, not {type(entry).__name__}")
            if not isinstance(entry.incremental_operation, AlterConfigOpType):
                raise TypeError("expected .incremental_operation to be one of AlterConfigOpType")
            if not isinstance(entry.name, str):
                raise TypeError(f"Expected .name to be str type, not {type(entry.name).__name__}")
            if entry.incremental_operation is not AlterConfigOpType.DELETE and not isinstance(entry.value, str):
                raise TypeError(f"Expected .value to be str type, not {type(entry.value).__name__}")
    return found


# --- what is done -----------------------------------------------------------------------------------------------------


def describe(
    cluster: Cluster, call: Call[ConfigResource, dict[str, ConfigEntry]], resource: ConfigResource
) -> dict[str, ConfigEntry]:
    """Return all entries of the resource by name, those with their default included."""
    if _is_topic(resource):
        topic = cluster.controller.read(
            lambda connection: get_topic(connection, resource.name), retry_timeout_ms=call.retry_ms(cluster.controller)
        )
        return _entries(TOPIC_SETTINGS, topic.config, ConfigSource.DYNAMIC_TOPIC_CONFIG)
    config = cluster.controller.read(read_store_config, retry_timeout_ms=call.retry_ms(cluster.controller))
    return _entries(STORE_SETTINGS, config, ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG)


def replace(
    cluster: Cluster,
    call: Call[ConfigResource, None],
    resource: ConfigResource,
    *,
    validate_only: bool,
    logger: logging.Logger,
) -> None:
    """Give the resource the values of `set_config`, and every other entry its default."""
    wanted = known_topic_config(resource.name, resource.set_config_dict, logger)

    def changes(present: Mapping[str, str]) -> Changes:
        return dict.fromkeys(present) | wanted

    _change(cluster, call, resource, changes, validate_only=validate_only)


def change(
    cluster: Cluster,
    call: Call[ConfigResource, None],
    resource: ConfigResource,
    *,
    validate_only: bool,
    logger: logging.Logger,
) -> None:
    """Change the entries of `incremental_configs`, and no others."""
    entries = resource.incremental_configs
    names = [entry.name for entry in entries]
    _tell_of_meaningless(names, logger)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise KafkaException(
            KafkaError(KafkaError.INVALID_REQUEST, f"{resource.name}: the setting {twice[:80]!r} was given twice")
        )

    table = TOPIC_SETTINGS if _is_topic(resource) else STORE_SETTINGS

    def changes(present: Mapping[str, str]) -> Changes:
        return {entry.name: _changed(entry, present, table) for entry in entries}

    _change(cluster, call, resource, changes, validate_only=validate_only)


def _change(
    cluster: Cluster,
    call: Call[ConfigResource, None],
    resource: ConfigResource,
    changes: Callable[[Mapping[str, str]], Changes],
    *,
    validate_only: bool,
) -> None:
    of_topic = _is_topic(resource)

    def work(connection: Connection) -> None:
        if of_topic:
            topic = lock_topic_configs(connection, resource.name)
            change_topic_configs(connection, topic, changes(topic.config))
        else:
            change_store_settings(connection, changes(read_store_config(connection)))

    write(cluster.controller, call, work, validate_only=validate_only)
    cluster.publish()


def _is_topic(resource: ConfigResource) -> bool:
    """Return whether it is a topic; otherwise it is the broker, which is the store."""
    if resource.restype is ResourceType.TOPIC:
        return True
    if resource.restype is not ResourceType.BROKER:
        text = f"{resource.restype.name} has no configuration here; TOPIC and BROKER have one"
        raise KafkaException(KafkaError(KafkaError.INVALID_REQUEST, text))
    if resource.name != str(BROKER_ID):
        text = f"the only broker is {BROKER_ID}, not {resource.name[:80]!r}"
        raise KafkaException(KafkaError(KafkaError.INVALID_REQUEST, text))
    return False


def _entries(table: Mapping[str, Setting], config: Mapping[str, str], source: ConfigSource) -> dict[str, ConfigEntry]:
    return {
        name: ConfigEntry(
            name,
            config.get(name, setting.default_text),
            source if name in config else ConfigSource.DEFAULT_CONFIG,
            is_default=name not in config,
        )
        for name, setting in table.items()
    }


def _changed(entry: ConfigEntry, present: Mapping[str, str], table: Mapping[str, Setting]) -> str | None:
    """Return the text that the entry has after its operation."""
    operation = entry.incremental_operation
    if operation is AlterConfigOpType.DELETE:
        return None
    assert entry.value is not None
    if operation is AlterConfigOpType.SET:
        return entry.value
    assert operation is not None
    setting = check_setting_name(table, entry.name)
    if not setting.is_list:
        raise InvalidConfiguration(f"Can't {operation.name} to key {entry.name} because its type is not LIST.")
    words = _words(present.get(entry.name, setting.default_text))
    given = _words(entry.value)
    if operation is AlterConfigOpType.APPEND:
        return ",".join(dict.fromkeys(words + given))
    return ",".join(word for word in words if word not in given)


def _words(text: str) -> list[str]:
    # The text of an empty list has one word, which is empty.
    return [word.strip() for word in text.split(",") if word.strip()]
