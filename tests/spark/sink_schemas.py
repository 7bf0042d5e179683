"""Schemas for tests of the sink, without the JVM that `StructType.fromDDL` asks."""

from __future__ import annotations

import re

from pyspark.sql import types as t


def _headers(*fields):
    return t.ArrayType(t.StructType([t.StructField(name, type_) for name, type_ in fields]))


_TYPES = {
    "string": t.StringType(),
    "binary": t.BinaryType(),
    "int": t.IntegerType(),
    "bigint": t.LongType(),
    "timestamp": t.TimestampType(),
    "timestamp_ntz": t.TimestampNTZType(),
    "map<string,binary>": t.MapType(t.StringType(), t.BinaryType()),
    "array<int>": t.ArrayType(t.IntegerType()),
    "array<struct<key:string,value:binary>>": _headers(("key", t.StringType()), ("value", t.BinaryType())),
    "array<struct<key:string,value:string>>": _headers(("key", t.StringType()), ("value", t.StringType())),
    "array<struct<value:binary,key:string>>": _headers(("value", t.BinaryType()), ("key", t.StringType())),
}


def schema_of(ddl: str) -> t.StructType:
    """The schema of "name type, name type"."""
    fields = re.findall(r"(?:`([^`]+)`|(\w+)) (\S+?)(?:, |$)", ddl)
    return t.StructType([t.StructField(quoted or name, _TYPES[type_]) for quoted, name, type_ in fields])
