"""The columns of the source: their names and types are those of Spark's Kafka source."""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from txnstore.errors import InvalidConfiguration

HEADERS: Final = StructField(
    "headers", ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
)
COLUMNS: Final = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("timestampType", IntegerType()),
    ]
)


def source_schema(*, include_headers: bool) -> StructType:
    """Return the columns that a read gives."""
    return StructType([*COLUMNS.fields, *([HEADERS] if include_headers else [])])


def check_schema(schema: StructType, *, include_headers: bool) -> None:
    """Refuse a schema of the user's that asks for other columns; some of ours, in any order, are fine.

    Columns that are left out are not even made: Spark tells a Python source of no other projection.

    Raises:
        InvalidConfiguration: a column is not one of the source's, or of another type.
    """
    ours = {column.name: column for column in source_schema(include_headers=True)}
    for column in schema:
        known = ours.get(column.name)
        if known is None:
            raise InvalidConfiguration(
                f"the schema asks for a column {column.name[:80]!r}; the source has {', '.join(ours)}"
            )
        if column.dataType != known.dataType or not column.nullable:
            raise InvalidConfiguration(
                f"the schema asks for the column {column.name} as {column.dataType.simpleString()}"
                f"{'' if column.nullable else ' not null'}; it is {known.dataType.simpleString()}"
            )
        if column.name == HEADERS.name and not include_headers:
            raise InvalidConfiguration("the schema asks for the column headers, which needs includeHeaders=true")
    if len({column.name for column in schema}) != len(schema):
        raise InvalidConfiguration("the schema names a column twice")
