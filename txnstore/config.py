"""The settings of a store and of a topic: Kafka's names, defaults and ranges, one row each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final

from txnstore.errors import InvalidConfiguration

_INT32_MAX: Final = 2**31 - 1
_INT64_MIN: Final = -(2**63)
_INT64_MAX: Final = 2**63 - 1
#: No number of 64 bits has more digits.
_WHOLE_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,19}")
#: Partition and broker (ThrottledReplicaListValidator.java).
_REPLICA: Final = re.compile(r"[0-9]+:[0-9]+")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its name, its default, how its text is read, and what it is for."""

    name: str
    default: Any
    parse: Callable[[str, str], Any]
    about: str = ""
    """Empty: it is about brokers' files and copies; kept and shown, and without effect."""
    is_list: bool = False
    """Whether its value is words with commas between them."""

    @property
    def default_text(self) -> str:
        """The default as text."""
        return _text_of(self.default)


def _text_of(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _integer(low: int, high: int) -> Callable[[str, str], int]:
    def parse(name: str, text: str) -> int:
        # int() alone would take 1_000, too.
        if _WHOLE_NUMBER.fullmatch(text.strip()) is None:
            raise InvalidConfiguration(f"{name} takes a whole number, not {text[:40]!r}")
        value = int(text)
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
    return _one_of("true", "false")(name, text.strip().lower()) == "true"


def _fraction(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise InvalidConfiguration(f"{name} takes a number from 0 to 1, not {text[:40]!r}")
    return value


def _gzip_level(name: str, text: str) -> int:
    # -1 is the codec's own default.
    return -1 if text.strip() == "-1" else _integer(1, 9)(name, text)


def _words(name: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(words):
        raise InvalidConfiguration(f"{name} takes words separated by single commas, not {text[:40]!r}")
    return list(dict.fromkeys(words))


def _some_of(*choices: str) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        return ",".join(_one_of(*choices)(name, word) for word in _words(name, text))

    return parse


def _replicas(name: str, text: str) -> str:
    words = _words(name, text)
    if words != ["*"] and not all(_REPLICA.fullmatch(word) for word in words):
        raise InvalidConfiguration(f"{name} takes * or a list partition:broker,partition:broker, not {text[:40]!r}")
    return ",".join(words)


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
        "producer.id.expiration.check.interval.ms",
        600_000,
        _integer(1, _INT32_MAX),
        "How often silent producers are looked for that are to be forgotten.",
    ),
    Setting(
        "transaction.abort.timed.out.transaction.cleanup.interval.ms",
        10_000,
        _integer(1, _INT32_MAX),
        "How often unfinished transactions are looked for; timed-out ones at least once a second.",
    ),
    Setting(
        "transaction.remove.expired.transaction.cleanup.interval.ms",
        3_600_000,
        _integer(1, _INT32_MAX),
        "How often transactional ids that have expired are removed, and what else is old: entries of the journal,"
        " refused rows of the outbox, silent sinks of Spark.",
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
        "How long the offsets of an empty group are kept; where txnstore.retention.unread.ms is more, as long as that.",
    ),
    Setting(
        "offsets.retention.check.interval.ms",
        600_000,
        _integer(1, _INT32_MAX),
        "How often groups are searched for silent members and expired offsets.",
    ),
    Setting(
        "log.retention.check.interval.ms",
        300_000,
        _integer(1, _INT64_MAX),
        "How often the store looks for batches that retention.ms or retention.bytes no longer keeps.",
    ),
    Setting(
        "log.cleaner.backoff.ms",
        15_000,
        _integer(1, _INT64_MAX),
        "How often the store looks for partitions to compact.",
    ),
    Setting(
        "txnstore.transaction.log.retention.ms",
        604_800_000,
        _integer(1, _INT64_MAX),
        "How long the journal of completed transactions is kept.",
    ),
    Setting(
        "txnstore.outbox.refused.retention.ms",
        2_592_000_000,
        _integer(-1, _INT64_MAX),
        "How long a row of the outbox that cannot become a record is kept for people to see; -1: until they delete it.",
    ),
    Setting(
        "txnstore.sink.retention.ms",
        31_536_000_000,
        _integer(-1, _INT64_MAX),
        "How long the store remembers what an idle streaming query has committed; -1: for ever.",
    ),
    Setting(
        "txnstore.placement",
        "hash",
        _one_of("hash", "roundrobin"),
        "In which of several databases a new partition lives: by the hash of its name, or by taking turns.",
    ),
)

#: Settings of one topic.
TOPIC_SETTINGS: Final = _table(
    Setting(
        "cleanup.policy",
        "delete",
        # An empty list is allowed since KIP-1161.
        _some_of("delete", "compact"),
        "Whether old records are deleted, or all but the newest of each key; empty: neither.",
        is_list=True,
    ),
    Setting(
        "compression.type",
        "producer",
        _one_of("producer", "uncompressed", "none", "gzip", "snappy", "lz4", "zstd"),
        "The codec of new batches; `producer` keeps what the producer chose.",
    ),
    Setting(
        "delete.retention.ms",
        86_400_000,
        _integer(0, _INT64_MAX),
        "How long compaction keeps tombstones, and the markers of transactions without records.",
    ),
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
    Setting(
        "max.compaction.lag.ms",
        _INT64_MAX,
        _integer(1, _INT64_MAX),
        "How long a record may wait for compaction, however little has been appended.",
    ),
    Setting(
        "min.cleanable.dirty.ratio",
        0.5,
        _fraction,
        "What share of a partition, by size, must be new before it is compacted.",
    ),
    Setting("min.compaction.lag.ms", 0, _integer(0, _INT64_MAX), "How long a record is safe from compaction."),
    Setting(
        "txnstore.placement",
        "",
        _text,
        "Where new partitions of the topic live: hash, roundrobin, or a database's label; empty: as for the store.",
    ),
    Setting(
        "retention.bytes",
        -1,
        _integer(_INT64_MIN, _INT64_MAX),
        "The size of a partition above which old batches are deleted; -1: no limit.",
    ),
    Setting("retention.ms", 604_800_000, _integer(-1, _INT64_MAX), "The age of batches to delete; -1: never."),
    Setting(
        "txnstore.retention.unread.ms",
        0,
        _integer(-1, _INT64_MAX),
        "How old a batch may become that a group has not read, unless the group has been away for longer; 0: groups"
        " hold nothing back; -1: any age.",
    ),
    # The rest of Kafka's (LogConfig.java), so that tools that compare what they have set find it again.
    Setting("compression.gzip.level", -1, _gzip_level),
    Setting("compression.lz4.level", 9, _integer(1, 17)),
    Setting("compression.zstd.level", 3, _integer(-131_072, 22)),
    Setting("errors.deadletterqueue.group.enable", False, _boolean),
    Setting("file.delete.delay.ms", 60_000, _integer(0, _INT64_MAX)),
    Setting("flush.messages", _INT64_MAX, _integer(1, _INT64_MAX)),
    Setting("flush.ms", _INT64_MAX, _integer(0, _INT64_MAX)),
    Setting("follower.replication.throttled.replicas", "", _replicas, is_list=True),
    Setting("index.interval.bytes", 4096, _integer(0, _INT32_MAX)),
    Setting("leader.replication.throttled.replicas", "", _replicas, is_list=True),
    Setting("local.retention.bytes", -2, _integer(-2, _INT64_MAX)),
    Setting("local.retention.ms", -2, _integer(-2, _INT64_MAX)),
    Setting("max.decompressed.message.bytes", 2_147_483_639, _integer(1, 2_147_483_639)),
    Setting("min.insync.replicas", 1, _integer(1, _INT32_MAX)),
    Setting("preallocate", False, _boolean),
    Setting("remote.copy.lag.bytes", -1, _integer(-1, _INT64_MAX)),
    Setting("remote.copy.lag.ms", 0, _integer(-1, _INT64_MAX)),
    Setting("remote.log.copy.disable", False, _boolean),
    Setting("remote.log.delete.on.disable", False, _boolean),
    Setting("remote.storage.enable", False, _boolean),
    # From 14 on as before KIP-1030, so that older configurations stay good; Kafka 4 wants a MiB.
    Setting("segment.bytes", 1_073_741_824, _integer(14, _INT32_MAX)),
    Setting("segment.index.bytes", 10_485_760, _integer(4, _INT32_MAX)),
    Setting("segment.jitter.ms", 0, _integer(0, _INT64_MAX)),
    Setting("segment.ms", 604_800_000, _integer(1, _INT64_MAX)),
    Setting("unclean.leader.election.enable", False, _boolean),
    # Kafka's until version 4.
    Setting("message.downconversion.enable", True, _boolean),
    Setting("message.format.version", "3.0-IV1", _text),
    Setting("message.timestamp.difference.max.ms", _INT64_MAX, _integer(0, _INT64_MAX)),
)

#: What Kafka's brokers have for topics that say nothing themselves (ServerTopicConfigSynonyms.java): a store has none.
_DEFAULTS_OF_BROKERS: Final = MappingProxyType(
    {
        "log.cleanup.policy": "cleanup.policy",
        "compression.type": "compression.type",
        "log.cleaner.delete.retention.ms": "delete.retention.ms",
        "message.max.bytes": "max.message.bytes",
        "log.message.timestamp.type": "message.timestamp.type",
        "log.message.timestamp.before.max.ms": "message.timestamp.before.max.ms",
        "log.message.timestamp.after.max.ms": "message.timestamp.after.max.ms",
        "log.cleaner.max.compaction.lag.ms": "max.compaction.lag.ms",
        "log.cleaner.min.cleanable.ratio": "min.cleanable.dirty.ratio",
        "log.cleaner.min.compaction.lag.ms": "min.compaction.lag.ms",
        "log.retention.bytes": "retention.bytes",
        "log.retention.ms": "retention.ms",
        "log.retention.minutes": "retention.ms",
        "log.retention.hours": "retention.ms",
    }
)

#: The values in force, by name.
Settings = Mapping[str, Any]


def settings_in_force(table: Mapping[str, Setting], texts: Mapping[str, str]) -> Settings:
    """Return what was set, read by `table`, over the defaults of the table.

    Raises:
        InvalidConfiguration: a name is unknown, or a value is not one that the setting takes.
    """
    defaults = {name: setting.default for name, setting in table.items()}
    return defaults | {name: parse_setting(table, name, text) for name, text in texts.items()}


def parse_setting(table: Mapping[str, Setting], name: str, text: object) -> Any:
    """Return the value that `text` stands for.

    Raises:
        InvalidConfiguration: the name is unknown (the nearest known one is named), or the value is out of range.
    """
    setting = check_setting_name(table, name)
    if not isinstance(text, str):
        raise InvalidConfiguration(f"{name} takes its value as text, not {type(text).__name__}")
    return setting.parse(name, text)


def setting_text(table: Mapping[str, Setting], name: str, text: object) -> str:
    """Return the text that a value is kept as: without spaces around it, words in the case that Kafka shows.

    Raises:
        InvalidConfiguration: as `parse_setting`.
    """
    return _text_of(parse_setting(table, name, text))


def check_topic_config(config: Mapping[str, str]) -> None:
    """Refuse settings of a topic that contradict each other.

    Raises:
        InvalidConfiguration: two do, or one of them is unknown or out of range.
    """
    settings = settings_in_force(TOPIC_SETTINGS, config)
    least_ms, most_ms = settings["min.compaction.lag.ms"], settings["max.compaction.lag.ms"]
    if least_ms > most_ms:
        raise InvalidConfiguration(
            f"conflict topic config setting min.compaction.lag.ms ({least_ms}) > max.compaction.lag.ms ({most_ms})"
        )


def check_setting_name(table: Mapping[str, Setting], name: str) -> Setting:
    """Return the setting of this name.

    Raises:
        InvalidConfiguration: the name is unknown; the nearest known one is named.
    """
    setting = table.get(name)
    if setting is None:
        near = get_close_matches(str(name), table, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if table is TOPIC_SETTINGS:
            # The text that tools look for; without the line breaks of something that is not a name.
            raise InvalidConfiguration(f"Unknown topic config name: {ascii(str(name)[:80])[1:-1]}{hint}")
        if (of_topics := _DEFAULTS_OF_BROKERS.get(name)) is not None:
            hint = f": a store has no defaults for topics, each has a {of_topics} of its own"
        raise InvalidConfiguration(f"there is no setting {str(name)[:80]!r}{hint}")
    return setting


def is_compacted(settings: Settings) -> bool:
    """Whether a topic with these settings keeps the newest record of each key."""
    return "compact" in settings["cleanup.policy"]
