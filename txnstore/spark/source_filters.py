"""The filters of a query that the source applies itself, so that what they drop is not even read.

Conditions on topic, partition and offset are the source's from then on.  Those on the timestamp only say from where on
to read: timestamps of a partition need not ascend, so Spark goes on checking each record.  So it is with those on the
offset in commit order, where a record comes at its own offset or later.

Spark hands filters over only with spark.sql.python.filterPushdown.enabled, and refuses a source that could take some
when that is off, as it is by default.  What it compares is the function behind the method: `FilterPush` shows it the
one of the base class, so that a query runs with either setting.
"""

from __future__ import annotations

import datetime as dt
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceReader, Filter

from txnstore.log.commit_order import CommitPosition
from txnstore.model import OFFSET_MAX
from txnstore.spark.source_ranges import OffsetRange

_COMPARISONS: Final[dict[type[Filter], Callable[[Any, Any], bool]]] = {
    datasource.EqualTo: operator.eq,
    datasource.EqualNullSafe: operator.eq,
    datasource.GreaterThan: operator.gt,
    datasource.GreaterThanOrEqual: operator.ge,
    datasource.LessThan: operator.lt,
    datasource.LessThanOrEqual: operator.le,
}
#: Columns of which no record has a null.
_NEVER_NULL: Final = frozenset({"topic", "partition", "offset"})
_VALUE_TYPES: Final[dict[str, type]] = {"topic": str, "partition": int, "offset": int}


@dataclass(slots=True)
class SourceFilters:
    """The filters that a query has handed over; all of them hold for the records it wants."""

    in_commit_order: bool = False
    _partitions: list[tuple[str, Callable[[Any, Any], bool], Any]] = field(default_factory=list)
    """Conditions on the partition: what of it, how it is compared, and with what."""

    first_offset: int = 0
    last_offset: int = OFFSET_MAX
    first_timestamp_ms: int = 0
    """No record with an earlier timestamp is wanted."""

    def take(self, filters: Iterable[Filter]) -> list[Filter]:
        """Take over what the source can apply; return the filters that Spark still has to."""
        return [each for each in filters if not self._take(each)]

    def clip(self, whole: OffsetRange) -> OffsetRange | None:
        """Return what can be left of the range after the filters on partitions and offsets; None if nothing."""
        if not all(holds(getattr(whole.partition, name), value) for name, holds, value in self._partitions):
            return None
        begin = max(whole.begin, CommitPosition(self.first_offset))
        end = whole.end_offset if self.in_commit_order else min(whole.end_offset, self.last_offset + 1)
        return None if begin.place >= end else replace(whole, begin=begin, end_offset=end)

    def _take(self, condition: Filter) -> bool:
        path: tuple[str, ...] = getattr(condition, "attribute", ())
        if len(path) != 1:
            return False
        column = path[0]
        if isinstance(condition, datasource.IsNotNull):
            return column in _NEVER_NULL
        if isinstance(condition, datasource.In):
            return self._take_in(column, condition.value)
        if column == "timestamp":
            self._narrow_time(condition)
            return False
        comparison = _COMPARISONS.get(type(condition))
        value: Any = getattr(condition, "value", None)
        if comparison is None or type(value) is not _VALUE_TYPES.get(column):
            return False
        if column == "offset":
            self._narrow_offsets(comparison, value)
        else:
            self._partitions.append((column, comparison, value))
        # In commit order places are clipped, and Spark looks again.
        return not (column == "offset" and self.in_commit_order)

    def _take_in(self, column: str, values: Sequence[Any]) -> bool:
        wanted: set[Any] = {value for value in values if type(value) is _VALUE_TYPES.get(column)}
        if not wanted or len(wanted) != len(set(values)):
            return False
        if column == "offset":
            # Between the first and the last one there may be others: Spark looks again.
            self._narrow_offsets(operator.ge, min(wanted))
            self._narrow_offsets(operator.le, max(wanted))
            return False
        self._partitions.append((column, _is_in, wanted))
        return True

    def _narrow_offsets(self, comparison: Callable[[Any, Any], bool], value: Any) -> None:
        if comparison in (operator.eq, operator.ge, operator.gt):
            self.first_offset = max(self.first_offset, value + (comparison is operator.gt))
        if comparison in (operator.eq, operator.le, operator.lt):
            self.last_offset = min(self.last_offset, value - (comparison is operator.lt))

    def _narrow_time(self, condition: Filter) -> None:
        value = getattr(condition, "value", None)
        if not isinstance(value, dt.datetime) or value.tzinfo is None:
            return
        if _COMPARISONS.get(type(condition)) in (operator.eq, operator.ge, operator.gt):
            # Rounded down: timestamps of records are whole milliseconds, the one compared with need not be.
            self.first_timestamp_ms = max(self.first_timestamp_ms, math.floor(value.timestamp() * 1000))


def _is_in(value: Any, wanted: set[Any]) -> bool:
    return value in wanted


class FilterPush:
    """What a reader has for the method `pushFilters`."""

    #: What Spark takes for "this reader has no such method of its own".
    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, filters: SourceFilters) -> None:
        """Let `filters` take what Spark hands over."""
        self._filters = filters

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        """Return the filters that Spark has to apply."""
        return self._filters.take(filters)
