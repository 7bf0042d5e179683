"""The options of the source, and the JSON that some of them hold: checked before anything is asked of a database."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from txnstore.errors import InvalidConfiguration, InvalidTopic
from txnstore.log.topics import check_topic_name
from txnstore.model import OFFSET_MAX, IsolationLevel, PartitionName
from txnstore.spark.options import Side, boolean, one_of, read_options, whole_number
from txnstore.spark.stores import StoreAddress, store_address

#: In place of an offset; Kafka's numbers.
LATEST: Final = -1
EARLIEST: Final = -2
#: In 1973: what is less, down to a thousandth of it, are rather the seconds of a time since then.
_MILLISECONDS_MIN: Final = 10**11
#: What says in a query's offsets that they are places: no topic can be called so.
COMMIT_ORDER: Final = "$commit_order"
#: Where a batch of a query begins, beside where it ends; and within which transactions.
FROM: Final = "$from"
IN_TRANSACTION: Final = "$in_transaction"
#: What says in a query's offsets which topics they are of: one that is recreated under its name is another one.
TOPICS: Final = "$topics"
_PARTITION_MAX: Final = 2**31 - 1
_PARTITION: Final = re.compile(r"[0-9]{1,10}")
#: How long a stream waits for minOffsetsPerTrigger before it takes what there is: Spark's default, 15 minutes.
MAX_TRIGGER_DELAY_MS: Final = 15 * 60_000
_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_ISOLATION: Final = {
    "read_committed": IsolationLevel.READ_COMMITTED,
    "read_uncommitted": IsolationLevel.READ_UNCOMMITTED,
}
#: What says where to begin: the first one that is given.
_STARTS: Final = ("startingTimestamp", "startingOffsetsByTimestamp", "startingOffsets")
_SELECTIONS: Final = ("subscribe", "subscribePattern", "assign")


def read_offsets(text: str, option: str, *, in_commit_order: bool) -> dict[PartitionName, int]:
    """Return the offsets of {"topic": {"0": 23, "1": -2}}; -2 stands for the earliest, -1 for the latest one.

    In commit order they are places, and may be what a query in that order has written down.

    Raises:
        InvalidConfiguration: the text is something else.
    """
    example = f'{option} is JSON like {{"topic": {{"0": 23, "1": -2}}}}, with -2 for earliest and -1 for latest'
    topics = _topics(text, option, example)
    # Offsets that a user names mean the topics of now.
    topics.pop(TOPICS, None)
    # A batch that is over has been read from there.
    topics.pop(FROM, None)
    if IN_TRANSACTION in topics:
        raise InvalidConfiguration(
            f"{option} has offsets of a batch that begins within a transaction ({IN_TRANSACTION}): take those of a"
            " later batch"
        )
    if topics.pop(COMMIT_ORDER, None) is not None and not in_commit_order:
        raise InvalidConfiguration(
            f"{option} has offsets in commit order ({COMMIT_ORDER}), which mean nothing in offset order: read them with"
            " txnstore.delivery.order=commit"
        )
    return _numbers_by_partition(topics, example, at_least=EARLIEST)


def read_timestamps(text: str, option: str) -> dict[PartitionName, int]:
    """Return the times, in milliseconds, of {"topic": {"0": 1700000000000}}.

    Raises:
        InvalidConfiguration: the text is something else.
    """
    example = f'{option} is JSON like {{"topic": {{"0": 1700000000000}}}}, in milliseconds'
    times = _numbers_by_partition(_topics(text, option, example), example, at_least=0)
    for timestamp_ms in times.values():
        _check_milliseconds(option, timestamp_ms)
    return times


def _timestamp_ms(values: Mapping[str, str], option: str) -> int | None:
    timestamp_ms = whole_number(values, option, at_least=0)
    if timestamp_ms is not None:
        _check_milliseconds(option, timestamp_ms)
    return timestamp_ms


def _check_milliseconds(option: str, timestamp_ms: int) -> None:
    """Refuse seconds since 1970, as Unix counts them: that early in 1970 nobody has a log from, and all of it is read.

    What is smaller is no time of today in either unit.
    """
    if _MILLISECONDS_MIN // 1000 <= timestamp_ms < _MILLISECONDS_MIN:
        raise InvalidConfiguration(
            f"{option} is in milliseconds since 1970, and {timestamp_ms} of them end in that year or soon after; if"
            f" seconds are meant, write {timestamp_ms}000"
        )


def _assigned(text: str) -> frozenset[PartitionName]:
    """Return the partitions of {"topic": [0, 1]}."""
    example = 'assign is JSON like {"topic": [0, 1]}'
    found = set()
    for topic, numbers in _topics(text, "assign", example).items():
        if type(numbers) is not list or not numbers:
            raise InvalidConfiguration(f"{example}; topic {topic[:80]!r} has no list of partitions")
        for number in numbers:
            if type(number) is not int or not 0 <= number <= _PARTITION_MAX:
                raise InvalidConfiguration(f"{example}; topic {topic[:80]!r} has a partition that is not a number")
            found.add(PartitionName(topic, number))
    return frozenset(found)


def _numbers_by_partition(topics: Mapping[str, Any], example: str, *, at_least: int) -> dict[PartitionName, int]:
    found: dict[PartitionName, int] = {}
    for topic, by_partition in topics.items():
        if type(by_partition) is not dict or not by_partition:
            raise InvalidConfiguration(f"{example}; topic {topic[:80]!r} has no partitions")
        for key, number in by_partition.items():
            if not _PARTITION.fullmatch(key) or int(key) > _PARTITION_MAX:
                raise InvalidConfiguration(f"{example}; {key[:20]!r} is not the number of a partition")
            if type(number) is not int or not at_least <= number <= OFFSET_MAX:
                raise InvalidConfiguration(
                    f"{example}; partition {key} of topic {topic[:80]!r} has {str(number)[:20]!r}"
                )
            found[PartitionName(topic, int(key))] = number
    return found


def _topics(text: str, option: str, example: str) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_without_repetitions)
    except (ValueError, RecursionError):
        raise InvalidConfiguration(f"{example}; this is not JSON, or it names the same thing twice") from None
    if type(found) is not dict or not found:
        raise InvalidConfiguration(example)
    return found


def _without_repetitions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


class Edge(enum.Enum):
    """Where a read begins or ends, if not at offsets or times of its own for each partition."""

    EARLIEST = "earliest"
    LATEST = "latest"
    GROUP = "group"
    """Where the group of `group.id` has come to; at the earliest record where it has committed nothing."""


_EDGES: Final = frozenset(edge.value for edge in Edge)


@dataclass(frozen=True, slots=True)
class AtTime:
    """Each partition at its first record with this timestamp or a later one."""

    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class AtTimes:
    """As `AtTime`, with a timestamp for each partition."""

    option: str
    timestamps_ms: Mapping[PartitionName, int]


@dataclass(frozen=True, slots=True)
class AtOffsets:
    """An offset for each partition; EARLIEST and LATEST stand for what they are called."""

    option: str
    offsets: Mapping[PartitionName, int]


Limit = Edge | AtTime | AtTimes | AtOffsets


@dataclass(frozen=True, slots=True)
class PartitionSelection:
    """Which partitions are read: of these topics, of those that a pattern matches as a whole, or these alone."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    partitions: frozenset[PartitionName] | None = None


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What a query asks of the source; picklable, and shown without the password."""

    address: StoreAddress
    selection: PartitionSelection
    start: Limit
    end: Limit
    start_is_given: bool = True
    """Whether an option says where to begin; a stream begins at the latest offsets otherwise."""

    time_not_found: str = "error"
    """What a starting time after the last record means: an error, or the latest offset."""

    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED
    in_commit_order: bool = False
    """Whether offsets that say where to read are places: see `log.commit_order`."""

    group_id: str | None = None
    max_offsets_per_trigger: int | None = None
    min_offsets_per_trigger: int | None = None
    max_trigger_delay_ms: int = MAX_TRIGGER_DELAY_MS
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    fail_on_data_loss: bool = True
    include_headers: bool = False

    @property
    def bounding_isolation(self) -> IsolationLevel:
        """The isolation level that bounds what is read: in commit order nothing open holds it back."""
        return IsolationLevel.READ_UNCOMMITTED if self.in_commit_order else self.isolation


def read_source_options(given: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    """Return the options of a batch read or of a stream, checked.

    Raises:
        InvalidConfiguration: an option is unknown, missing, not one that this kind of read takes, or has a value that
            it does not take; the message names it.
    """
    values = read_options(given, Side.SOURCE)
    address = store_address(values)
    selection = _selection(values)
    group_id = values.get("group.id")
    if group_id == "":
        raise InvalidConfiguration("group.id is empty: the query would read as no group; leave the option out for that")
    isolation = _ISOLATION[one_of(values, "isolation.level", tuple(_ISOLATION), "read_committed")]
    in_commit_order = one_of(values, "txnstore.delivery.order", ("offset", "commit"), "offset") == "commit"
    start = _start(values, streaming=streaming, in_commit_order=in_commit_order)
    if in_commit_order:
        _check_commit_order(values, isolation)
    if start is Edge.GROUP and not group_id:
        raise InvalidConfiguration("startingOffsets=group takes the group's name in the option kafka.group.id")
    if streaming:
        _refuse(
            values,
            ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"),
            "is for batch reads; a stream goes on until it is stopped",
        )
    min_offsets = whole_number(values, "minOffsetsPerTrigger", at_least=1)
    max_offsets = whole_number(values, "maxOffsetsPerTrigger", at_least=1)
    if min_offsets is not None and max_offsets is not None and min_offsets > max_offsets:
        raise InvalidConfiguration(
            f"minOffsetsPerTrigger is {min_offsets}, above maxOffsetsPerTrigger, which is {max_offsets}"
        )
    return SourceOptions(
        address=address,
        selection=selection,
        start=start,
        end=_end(values, in_commit_order=in_commit_order),
        start_is_given=not values.keys().isdisjoint(_STARTS),
        time_not_found=one_of(values, "startingOffsetsByTimestampStrategy", ("error", "latest"), "error"),
        isolation=isolation,
        in_commit_order=in_commit_order,
        group_id=group_id,
        max_offsets_per_trigger=max_offsets,
        min_offsets_per_trigger=min_offsets,
        max_trigger_delay_ms=_max_trigger_delay_ms(values),
        min_partitions=whole_number(values, "minPartitions", at_least=1),
        max_records_per_partition=whole_number(values, "maxRecordsPerPartition", at_least=1),
        fail_on_data_loss=boolean(values, "failOnDataLoss", default=True),
        include_headers=boolean(values, "includeHeaders", default=False),
    )


def _selection(values: Mapping[str, str]) -> PartitionSelection:
    given = [name for name in _SELECTIONS if name in values]
    if len(given) != 1:
        found = f"{' and '.join(given)} are given together" if given else "none is given"
        raise InvalidConfiguration(f"one of the options {', '.join(_SELECTIONS)} says what to read; {found}")
    if "subscribe" in values:
        names = tuple(dict.fromkeys(name.strip() for name in values["subscribe"].split(",") if name.strip()))
        if not names:
            raise InvalidConfiguration("subscribe does not name a topic")
        for name in names:
            _check_topic(name, "subscribe")
        return PartitionSelection(topics=names)
    if "subscribePattern" in values:
        pattern = values["subscribePattern"].strip()
        try:
            re.compile(pattern)
        except re.error as error:
            raise InvalidConfiguration(f"subscribePattern is not a regular expression: {error}") from None
        if not pattern:
            raise InvalidConfiguration("subscribePattern is empty")
        return PartitionSelection(pattern=pattern)
    partitions = _assigned(values["assign"])
    for partition in partitions:
        _check_topic(partition.topic, "assign")
    return PartitionSelection(partitions=partitions)


def _check_topic(name: str, option: str) -> None:
    try:
        check_topic_name(name)
    except InvalidTopic as error:
        raise InvalidConfiguration(f"{option}: {error}") from None


def _check_commit_order(values: Mapping[str, str], isolation: IsolationLevel) -> None:
    if isolation is IsolationLevel.READ_UNCOMMITTED:
        raise InvalidConfiguration(
            "txnstore.delivery.order=commit requires isolation.level=read_committed: what is not committed has no place"
            " in that order"
        )
    _refuse(
        values,
        ("maxRecordsPerPartition",),
        "does not go with txnstore.delivery.order=commit: a transaction is read whole by one task, however many records"
        " it has; minPartitions splits between transactions",
    )


def _start(values: Mapping[str, str], *, streaming: bool, in_commit_order: bool) -> Limit:
    # Only the option that wins is read, as in Spark: a time for all, times, offsets.
    of_all, by_partition, name = _STARTS
    timestamp_ms = _timestamp_ms(values, of_all)
    if timestamp_ms is not None:
        return AtTime(timestamp_ms)
    if by_partition in values:
        return AtTimes(by_partition, read_timestamps(values[by_partition], by_partition))
    text = values.get(name)
    if text is None:
        return Edge.LATEST if streaming else Edge.EARLIEST
    word = text.strip().lower()
    if word in _EDGES:
        if word == "latest" and not streaming:
            raise InvalidConfiguration("startingOffsets=latest is for streams: a batch read would be empty")
        return Edge(word)
    _check_is_json(text, f"{name} is earliest, {'latest, ' if streaming else ''}group, or offsets as JSON")
    offsets = read_offsets(text, name, in_commit_order=in_commit_order)
    if not streaming and LATEST in offsets.values():
        raise InvalidConfiguration("startingOffsets: -1 (latest) is for streams: a batch read would be empty")
    return AtOffsets(name, offsets)


def _end(values: Mapping[str, str], *, in_commit_order: bool) -> Limit:
    timestamp_ms = _timestamp_ms(values, "endingTimestamp")
    if timestamp_ms is not None:
        return AtTime(timestamp_ms)
    name = "endingOffsetsByTimestamp"
    if name in values:
        return AtTimes(name, read_timestamps(values[name], name))
    name = "endingOffsets"
    text = values.get(name, "latest")
    word = text.strip().lower()
    if word == "latest":
        return Edge.LATEST
    _check_is_json(text, "endingOffsets is latest or offsets as JSON")
    offsets = read_offsets(text, name, in_commit_order=in_commit_order)
    if EARLIEST in offsets.values():
        raise InvalidConfiguration("endingOffsets: -2 (earliest) is not an end; use an offset, or -1 for the latest")
    return AtOffsets(name, offsets)


def _check_is_json(text: str, forms: str) -> None:
    """Refuse a misspelt word, for which an example in JSON would be no help."""
    if not text.lstrip().startswith(("{", "[")):
        raise InvalidConfiguration(f"{forms}, not {text[:80]!r}")


def _refuse(values: Mapping[str, str], names: tuple[str, ...], why: str) -> None:
    for name in names:
        if name in values:
            raise InvalidConfiguration(f"{name} {why}")


def _max_trigger_delay_ms(values: Mapping[str, str]) -> int:
    """Return a time as Spark writes it, such as 15m; a number alone is of milliseconds."""
    text = values.get("maxTriggerDelay")
    if text is None:
        return MAX_TRIGGER_DELAY_MS
    match = re.fullmatch(r"\s*(\d{1,12})\s*([a-z]*)\s*", text.lower())
    unit_ms = _UNITS_MS.get(match[2] or "ms") if match else None
    if match is None or unit_ms is None:
        raise InvalidConfiguration(
            f"maxTriggerDelay is a time such as 500ms, 30s, 15m (or 15min), 2h or 1d, not {text[:40]!r}"
        )
    return int(match[1]) * unit_ms
