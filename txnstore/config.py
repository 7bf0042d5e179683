"""This file is the settings of a store and of a topic: Kafka's names, defaults and ranges, one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final

from txnstore.errors import InvalidConfiguration

_INT32_MAX: Final = 2**31 - 1
_INT64_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its name, its default, how its text is read, and what it is for."""

    name: str
    default: Any
    parse: Callable[[str, str], Any]
    about: str


def _integer(low: int, high: int) -> Callable[[str, str], int]:
    def parse(name: str, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise InvalidConfiguration(f"{name} takes a whole number, not {text[:40]!r}") from None
        if not low <= value <= high:
            raise InvalidConfiguration(f"{name} is outside its range {low}..{high}: {value}")
        return value

    return parse


def _one_of(*choices: str) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if text not in choices:
            raise InvalidConfiguration(f"{name} is one of {', '.join(choices)}, not {text[:40]!r}")
        return text

    return parse


def _text(name: str, text: str) -> str:
    if not text.isprintable():
        raise InvalidConfiguration(f"{name} takes text without control characters")
    return text


def _boolean(name: str, text: str) -> bool:
    return _one_of("true", "false")(name, text) == "true"


def _table(*settings: Setting) -> Mapping[str, Setting]:
    return MappingProxyType({setting.name: setting for setting in settings})


#: Settings of the whole store: what Kafka calls broker configuration.
STORE_SETTINGS: Final = _table(
    Setting(
        "transaction.max.timeout.ms",
        900_000,
        _integer(1, _INT32_MAX),
        "The longest transaction timeout that a producer may ask for.",
    ),
    Setting(
        "transactional.id.expiration.ms",
        604_800_000,
        _integer(1, _INT64_MAX),
        "How long a transactional id without an open transaction is remembered.",
    ),
    Setting(
        "producer.id.expiration.ms",
        86_400_000,
        _integer(1, _INT64_MAX),
        "How long a partition remembers the sequence numbers of a producer that is silent.",
    ),
    Setting(
        "transaction.abort.timed.out.transaction.cleanup.interval.ms",
        10_000,
        _integer(1, _INT32_MAX),
        "How often transactions that are open for too long are looked for.",
    ),
    Setting(
        "transaction.remove.expired.transaction.cleanup.interval.ms",
        3_600_000,
        _integer(1, _INT32_MAX),
        "How often transactional ids and producer ids that have expired are removed.",
    ),
    Setting(
        "transaction.two.phase.commit.enable",
        False,
        _boolean,
        "Whether producers may open transactions without a timeout (KIP-939).",
    ),
    Setting("num.partitions", 1, _integer(1, 100_000), "How many partitions an auto-created topic gets."),
    Setting("auto.create.topics.enable", True, _boolean, "Whether producers may create topics by writing to them."),
    Setting(
        "offset.metadata.max.bytes",
        4096,
        _integer(0, _INT32_MAX),
        "The largest metadata beside a committed offset, in bytes of UTF-8.",
    ),
    Setting(
        "offsets.retention.minutes",
        10_080,
        _integer(1, _INT32_MAX),
        "How long the offsets of an empty group are kept.",
    ),
    Setting(
        "offsets.retention.check.interval.ms",
        600_000,
        _integer(1, _INT32_MAX),
        "How often groups are searched for silent members and expired offsets.",
    ),
    Setting(
        "txnstore.transaction.log.retention.ms",
        604_800_000,
        _integer(1, _INT64_MAX),
        "How long the journal of completed transactions is kept.",
    ),
    Setting(
        "txnstore.placement",
        "hash",
        _one_of("hash", "roundrobin"),
        "In which of several databases a new partition lives: by the hash of its name, or dealt out in turn.",
    ),
)

#: Settings of one topic.
TOPIC_SETTINGS: Final = _table(
    Setting(
        "cleanup.policy",
        "delete",
        _one_of("delete", "compact", "compact,delete", "delete,compact"),
        "Whether old records are deleted, or all but the newest of each key.",
    ),
    Setting(
        "compression.type",
        "producer",
        _one_of("producer", "uncompressed", "none", "gzip", "snappy", "lz4", "zstd"),
        "The codec of new batches; `producer` keeps what the producer chose.",
    ),
    Setting("delete.retention.ms", 86_400_000, _integer(0, _INT64_MAX), "How long compaction keeps tombstones."),
    Setting(
        "max.message.bytes", 1_048_588, _integer(0, _INT32_MAX), "The largest record batch, in bytes of its payload."
    ),
    Setting(
        "message.timestamp.type",
        "CreateTime",
        _one_of("CreateTime", "LogAppendTime"),
        "Whether a record keeps its producer's timestamp or gets the store's.",
    ),
    Setting(
        "message.timestamp.before.max.ms",
        _INT64_MAX,
        _integer(0, _INT64_MAX),
        "How far a record's timestamp may lie before the store's time (KIP-937).",
    ),
    Setting(
        "message.timestamp.after.max.ms",
        3_600_000,
        _integer(0, _INT64_MAX),
        "How far a record's timestamp may lie after the store's time (KIP-937).",
    ),
    Setting("min.compaction.lag.ms", 0, _integer(0, _INT64_MAX), "How long a record is safe from compaction."),
    Setting(
        "txnstore.placement",
        "",
        _text,
        "Where new partitions of the topic live: hash, roundrobin, or the label of a database; empty: as the store.",
    ),
    Setting("retention.bytes", -1, _integer(-1, _INT64_MAX), "The size above which old batches are deleted; -1: none."),
    Setting("retention.ms", 604_800_000, _integer(-1, _INT64_MAX), "The age of batches to delete; -1: never."),
)


class Settings:
    """The values in force: what was set, over the defaults of one table."""

    __slots__ = ("_table", "_values")

    def __init__(self, table: Mapping[str, Setting], texts: Mapping[str, str]) -> None:
        """Read `texts` by `table`.

        Raises:
            InvalidConfiguration: a name is unknown, or a value is not one that the setting takes.
        """
        self._table = table
        self._values = {name: parse_setting(table, name, text) for name, text in texts.items()}

    def __getitem__(self, name: str) -> Any:
        """Return the value of the setting `name`."""
        return self._values.get(name, self._table[name].default)


def parse_setting(table: Mapping[str, Setting], name: str, text: object) -> Any:
    """Return the value that `text` stands for.

    Raises:
        InvalidConfiguration: the name is unknown (the nearest known one is named), or the value is out of range.
    """
    setting = check_setting_name(table, name)
    if not isinstance(text, str):
        raise InvalidConfiguration(f"{name} takes its value as text, not {type(text).__name__}")
    return setting.parse(name, text)


def check_setting_name(table: Mapping[str, Setting], name: str) -> Setting:
    """Return the setting of this name.

    Raises:
        InvalidConfiguration: the name is unknown; the nearest known one is named.
    """
    setting = table.get(name)
    if setting is None:
        near = get_close_matches(str(name), table, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidConfiguration(f"there is no setting {str(name)[:80]!r}{hint}")
    return setting
