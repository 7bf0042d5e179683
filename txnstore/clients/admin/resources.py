"""This file is what has a configuration, and the entries of one, as the admin client takes and shows them."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from txnstore.clients.model import constants


class ResourceType(enum.Enum):
    """The kinds of things that have a configuration; Kafka's numbers."""

    UNKNOWN = constants.RESOURCE_UNKNOWN
    ANY = constants.RESOURCE_ANY
    TOPIC = constants.RESOURCE_TOPIC
    GROUP = constants.RESOURCE_GROUP
    BROKER = constants.RESOURCE_BROKER
    """The store as a whole; its name is 0, or empty."""
    TRANSACTIONAL_ID = constants.RESOURCE_TRANSACTIONAL_ID

    def __lt__(self, other: object) -> bool:
        return bool(self.value < other.value) if isinstance(other, ResourceType) else NotImplemented


class ConfigSource(enum.Enum):
    """Where the value of a configuration entry comes from; Kafka's numbers."""

    UNKNOWN_CONFIG = 0
    DYNAMIC_TOPIC_CONFIG = 1
    DYNAMIC_BROKER_CONFIG = 2
    DYNAMIC_DEFAULT_BROKER_CONFIG = 3
    STATIC_BROKER_CONFIG = 4
    DEFAULT_CONFIG = 5
    GROUP_CONFIG = 8


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
