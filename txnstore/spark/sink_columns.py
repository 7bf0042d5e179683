"""This file is which columns a DataFrame may bring to the sink, checked while the query is planned.

They are those of Spark's Kafka sink, and `timestamp` besides.  As there, other columns are left out; but one whose name
is nearly that of a column which is missing is refused, for it is a misspelling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from txnstore.errors import InvalidConfiguration

#: The types that each column may have, by its name, and how the documentation spells them.
_TYPES: Final[Mapping[str, tuple[tuple[type[DataType], ...], str]]] = MappingProxyType(
    {
        "key": ((StringType, BinaryType), "string or binary"),
        "value": ((StringType, BinaryType), "string or binary"),
        "topic": ((StringType,), "string"),
        "partition": ((IntegerType, ShortType, ByteType, LongType), "int"),
        "headers": ((ArrayType,), "array<struct<key:string,value:binary>>"),
        "timestamp": ((TimestampType,), "timestamp"),
    }
)


@dataclass(frozen=True, slots=True)
class SinkColumns:
    """Where each column stands in the DataFrame; None: it has none of this name."""

    value: int
    key: int | None = None
    topic: int | None = None
    partition: int | None = None
    headers: int | None = None
    timestamp: int | None = None


def find_columns(schema: StructType, *, topic: str | None) -> SinkColumns:
    """Return where the sink's columns are; `topic` is the option of this name.

    Names are compared without regard to case, as Spark does.

    Raises:
        InvalidConfiguration: there is no value, no topic, a column is there twice, is not of its type or seems to be
            misspelt.
    """
    places: dict[str, int] = {}
    others = []
    for place, field in enumerate(schema.fields):
        name = field.name.lower()
        if name not in _TYPES:
            others.append(field.name)
            continue
        if name in places:
            raise InvalidConfiguration(f"the DataFrame has two columns {name!r}; the sink takes one")
        _check_type(name, field.dataType)
        places[name] = place
    missing = _TYPES.keys() - places.keys()
    for other in others:
        near = get_close_matches(other.lower(), sorted(missing), n=1, cutoff=0.8)
        if near:
            raise InvalidConfiguration(
                f"the sink has no column {other[:80]!r} (did you mean {near[0]!r}?); rename the column, or leave it out"
            )
    if "value" in missing:
        raise InvalidConfiguration(
            "the DataFrame has no column 'value'; the sink takes the columns"
            " value, and key, topic, partition, headers and timestamp if they are there"
        )
    if "topic" in missing and topic is None:
        raise InvalidConfiguration(
            "there is neither an option 'topic' nor a column 'topic': say where the records are to go"
        )
    return SinkColumns(**places)


def _check_type(name: str, type_: DataType) -> None:
    types, spelt = _TYPES[name]
    if not isinstance(type_, types) or (isinstance(type_, ArrayType) and not _are_headers(type_)):
        raise InvalidConfiguration(f"the column {name!r} is {type_.simpleString()[:80]}, but the sink takes {spelt}")


def _are_headers(array: ArrayType) -> bool:
    header = array.elementType
    return (
        isinstance(header, StructType)
        and header.names == ["key", "value"]
        and isinstance(header["key"].dataType, StringType)
        and isinstance(header["value"].dataType, BinaryType)
    )
