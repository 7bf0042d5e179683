"""The text of the view `records` for SQLite.

SQLite has no LATERAL and reads a large column again whenever an expression names it.  Were records cut straight out of
their batch, each would cost a copy of the batch.  So the view cuts in two steps: a batch into chunks of a number of
records near the square root of the batch's, a chunk into records.  Each step is a subquery that runs as a co-routine
and hands its rows up one by one; nothing is ever stored aside.

* `UNION ALL SELECT NULL, ... WHERE 0` adds no row.  It keeps SQLite from merging the subquery into the one around it,
  which would undo the steps, and still lets it push conditions down, which LIMIT and MATERIALIZED do not
  (https://www.sqlite.org/optoverview.html, subquery flattening and the push-down optimization).
* The numbers of an array all have the same width, so the n-th is cut out of the text; as a BLOB, where SQLite finds
  the place without counting characters.  `character_bytes` is 2 in a database of encoding UTF-16.
* Positions are numbers of four bytes.  What a byte stands for is where it is among all bytes in their order.  Within
  a chunk of less than 64 KiB the last two bytes tell positions apart.
* json_each over an array of nulls counts: the chunks of a batch, the records of a chunk.  Where there are headers,
  the array holds them instead.
* Null keys and values are found by their index: an object with a list of indexes for each chunk that has any.
* The headers of a chunk keep their order because SQLite sorts groups with a sort that is stable.

Everything is within SQLite 3.40, and within what a view may call where `PRAGMA trusted_schema` is off: of the JSON
functions that is json_each alone.
"""

# ruff: noqa: S608 - what is put into the text is the prefix of our tables and expressions from this file

from __future__ import annotations

from typing import Final

from txnstore.db.names import SQLITE_PREFIX
from txnstore.db.records_view import CODEC, STATUS

#: How many records make a chunk.  Opening a chunk takes a copy of its batch and about as long as copying 64 KiB takes;
#: opening a record takes a copy of its chunk.  The sum is least at the square root of this number.
_CHUNK_SIZE_SQUARED: Final = "(batch.record_count + 65536 * batch.record_count / batch.size_bytes)"
_CHUNK_SIZE: Final = (
    f"CASE WHEN {_CHUNK_SIZE_SQUARED} <= 256 THEN 16"
    f" WHEN {_CHUNK_SIZE_SQUARED} <= 1024 THEN 32"
    f" WHEN {_CHUNK_SIZE_SQUARED} <= 4096 THEN 64"
    f" WHEN {_CHUNK_SIZE_SQUARED} <= 16384 THEN 128"
    f" WHEN {_CHUNK_SIZE_SQUARED} <= 65536 THEN 256"
    " ELSE 1024 END"
)


def _null_array(count: str) -> str:
    """Return the expression of a JSON array of `count` nulls."""
    return f"'[' || substr(replace(hex(zeroblob({count})), '00', ',null'), 2) || ']'"


def _stride(array: str) -> str:
    """Return the expression of the bytes that each of the numbers of a batch's array takes, its comma included."""
    return f"(length(CAST({array} AS BLOB)) - length(CAST('[' AS BLOB))) / (batch.record_count)"


def _position(blob: str, index: str, all_bytes: str, *, byte_count: int = 4) -> str:
    """Return the expression of the last bytes of the position with this index, as a number."""
    number = ""
    for byte in range(5 - byte_count, 5):
        digit = f"instr({all_bytes}, substr({blob}, {byte} + 4 * ({index}), 1)) - 1"
        number = f"({number} * 256 + {digit})" if number else f"({digit})"
    return number


def _number(blob: str, place: str, stride: str, character_bytes: str) -> str:
    """Return the expression of the number that begins at byte `place` of an array."""
    return f"CAST(CAST(substr({blob}, {place}, {stride} - {character_bytes}) AS TEXT) AS INTEGER)"


def _nulls_by_chunk(indexes: str) -> str:
    """Return the expression of an object: the number of a chunk to its part of an array, as ",1,2,"."""
    return f"""CASE WHEN {indexes} IS NOT NULL THEN (
            SELECT '{{' || group_concat('"' || part.chunk_number || '":"' || part.indexes || '"') || '}}'
            FROM (
                SELECT value / ({_CHUNK_SIZE}) AS chunk_number, ',' || group_concat(value) || ',' AS indexes
                FROM json_each({indexes}) GROUP BY chunk_number
            ) AS part
        ) END"""


def _opened_batches(prefix: str) -> str:
    """Return the subquery with one row a batch; without positions its keys and values stay closed."""
    return f"""
        SELECT
            topics.name AS topic,
            partitions.partition_number AS partition,
            batch.base_offset,
            batch.last_offset,
            batch.record_count,
            batch.base_timestamp_ms,
            batch.max_timestamp_ms,
            batch.running_max_timestamp_ms,
            batch.producer_id,
            batch.producer_epoch,
            batch.is_transactional,
            {STATUS} AS status,
            {CODEC} AS codec,
            {_CHUNK_SIZE} AS chunk_size,
            length(CAST('[' AS BLOB)) AS character_bytes,
            CAST(batch.offset_deltas AS BLOB) AS offset_deltas,
            {_stride("batch.offset_deltas")} AS offset_stride,
            CAST(batch.timestamp_deltas_ms AS BLOB) AS timestamp_deltas_ms,
            {_stride("batch.timestamp_deltas_ms")} AS timestamp_stride,
            x'{bytes(range(256)).hex()}' AS all_bytes,
            CASE WHEN batch.codec = 0 THEN batch.key_positions END AS key_positions,
            CASE WHEN batch.codec = 0 THEN batch.value_positions END AS value_positions,
            {_nulls_by_chunk("batch.null_keys")} AS null_keys,
            {_nulls_by_chunk("batch.null_values")} AS null_values,
            CASE WHEN batch.headers IS NOT NULL THEN (
                SELECT '[' || group_concat(part.headers) || ']'
                FROM (
                    SELECT
                        key / ({_CHUNK_SIZE}) AS chunk_number,
                        '[' || group_concat(coalesce(value, 'null')) || ']' AS headers
                    FROM json_each(batch.headers) GROUP BY chunk_number
                ) AS part
            ) END AS headers,
            batch.key_data,
            batch.value_data
        FROM {prefix}topics AS topics
        JOIN {prefix}partitions AS partitions ON partitions.topic_id = topics.topic_id
        JOIN {prefix}record_batches AS batch ON batch.partition_id = partitions.partition_id
        LEFT JOIN {prefix}finished_transactions AS finished
            ON finished.partition_id = batch.partition_id
            AND finished.producer_id = batch.producer_id
            AND finished.producer_epoch = batch.producer_epoch
        WHERE batch.control_type IS NULL
        {_no_row(27)}"""


def _no_row(columns: int) -> str:
    """Return what keeps a subquery of so many columns apart from the query around it."""
    return f"UNION ALL SELECT {', '.join(['NULL'] * columns)} WHERE 0"


#: The chunk's first record, counted from the batch's first, and how many records it has.
_FIRST: Final = "chunk.key * batch.chunk_size"
_COUNT: Final = f"min(batch.chunk_size, batch.record_count - {_FIRST})"
_END: Final = f"min({_FIRST} + batch.chunk_size, batch.record_count)"


def _array_of_chunk(array: str, stride: str) -> str:
    """Return the expression of a chunk's part of an array of deltas."""
    first_byte = f"1 + batch.character_bytes + {_FIRST} * batch.{stride}"
    return f"substr(batch.{array}, {first_byte}, (batch.chunk_size + 1) * batch.{stride}) AS {array}, batch.{stride}"


def _cells_of_chunk(what: str) -> str:
    """Return the columns of a chunk's keys or values."""
    # Most batches are one chunk: nothing is to be looked up.
    start, end = (_position(f"batch.{what}_positions", index, "batch.all_bytes") for index in (_FIRST, _END))
    start = f"CASE chunk.key WHEN 0 THEN 0 ELSE {start} END"
    end = f"CASE {_END} WHEN batch.record_count THEN length(batch.{what}_data) ELSE {end} END"
    return f"""substr(batch.{what}_positions, 1 + 4 * {_FIRST}, 4 * (batch.chunk_size + 1)) AS {what}_positions,
            {start} AS {what}_start,
            substr(batch.{what}_data, 1 + {start}, {end} - {start}) AS {what}_data,
            (
                SELECT part.value FROM json_each(batch.null_{what}s) AS part WHERE part.key = CAST(chunk.key AS TEXT)
            ) AS null_{what}s"""


def _opened_chunks(prefix: str) -> str:
    """Return the subquery with one row a chunk."""
    chunks = _null_array("(batch.record_count + batch.chunk_size - 1) / batch.chunk_size")
    return f"""
    SELECT
        batch.topic,
        batch.partition,
        batch.base_offset,
        batch.last_offset,
        batch.base_timestamp_ms,
        batch.max_timestamp_ms,
        batch.running_max_timestamp_ms,
        batch.producer_id,
        batch.producer_epoch,
        batch.is_transactional,
        batch.status,
        batch.codec,
        batch.character_bytes,
        batch.all_bytes,
        {_FIRST} AS first_index,
        {_COUNT} AS record_count,
        chunk.value AS headers,
        {_array_of_chunk("offset_deltas", "offset_stride")},
        {_array_of_chunk("timestamp_deltas_ms", "timestamp_stride")},
        {_cells_of_chunk("key")},
        {_cells_of_chunk("value")}
    FROM ({_opened_batches(prefix)}
    ) AS batch
    CROSS JOIN json_each(coalesce(batch.headers, {chunks})) AS chunk
    {_no_row(29)}"""


def _number_of_record(array: str, stride: str) -> str:
    return _number(f"chunk.{array}", f"1 + record.key * chunk.{stride}", f"chunk.{stride}", "chunk.character_bytes")


def _cell_of_record(what: str) -> str:
    """Return the expression of a record's key or value."""
    data, first = f"chunk.{what}_data", f"chunk.{what}_start"
    short = _cut(what, f"1 + (cell.place - {first} & 65535), cell.behind - cell.place & 65535", byte_count=2)
    # substr() of an empty BLOB is NULL, but an empty key is not.
    return f"""CASE
        WHEN chunk.{what}_positions IS NULL THEN NULL
        WHEN instr(chunk.null_{what}s, ',' || (chunk.first_index + record.key) || ',') THEN NULL
        ELSE coalesce(CASE
            WHEN chunk.record_count = 1 THEN {data}
            WHEN length({data}) < 65536 THEN {short}
            ELSE {_cut(what, f"1 + cell.place - {first}, cell.behind - cell.place", byte_count=4)}
        END, x'')
    END"""


def _cut(what: str, place_and_length: str, *, byte_count: int) -> str:
    """Return the subquery that cuts a key or value out of its chunk, and so looks each position up once."""
    place, behind = (
        _position(f"chunk.{what}_positions", index, "chunk.all_bytes", byte_count=byte_count)
        for index in ("record.key", "record.key + 1")
    )
    return f"""(
                SELECT substr(chunk.{what}_data, {place_and_length})
                FROM (SELECT {place} AS place, {behind} AS behind {_no_row(2)}) AS cell
            )"""


def create_view(prefix: str = SQLITE_PREFIX) -> str:
    """Return the statement that makes the view; `prefix` begins its name and those of the tables."""
    return f"""\
CREATE VIEW {prefix}records AS
SELECT
    chunk.topic,
    chunk.partition,
    chunk.base_offset
        + coalesce({_number_of_record("offset_deltas", "offset_stride")}, chunk.first_index + record.key) AS "offset",
    chunk.base_timestamp_ms
        + coalesce({_number_of_record("timestamp_deltas_ms", "timestamp_stride")}, 0) AS timestamp_ms,
    {_cell_of_record("key")} AS key,
    {_cell_of_record("value")} AS value,
    record.value AS headers,
    chunk.producer_id,
    chunk.producer_epoch,
    chunk.is_transactional,
    chunk.status,
    chunk.codec,
    chunk.base_offset AS batch_base_offset,
    chunk.last_offset AS batch_last_offset,
    chunk.max_timestamp_ms AS batch_max_timestamp_ms,
    chunk.running_max_timestamp_ms AS batch_running_max_timestamp_ms
FROM ({_opened_chunks(prefix)}
) AS chunk
CROSS JOIN json_each(coalesce(chunk.headers, {_null_array("chunk.record_count")})) AS record
"""


def index_by_time(prefix: str = SQLITE_PREFIX) -> str:
    """Return the statement that makes the index for conditions on `batch_running_max_timestamp_ms`, and for no other.

    It goes with its table.  Markers are not shown: of a small transaction they are half of what would be entered.
    """
    return (
        f"CREATE INDEX {prefix}record_batches_time ON {prefix}record_batches"
        " (partition_id, running_max_timestamp_ms, last_offset) WHERE control_type IS NULL"
    )


def drop_view(prefix: str = SQLITE_PREFIX) -> str:
    """Return the statement that removes the view, if it is there."""
    return f"DROP VIEW IF EXISTS {prefix}records"
