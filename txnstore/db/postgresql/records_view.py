"""The text of the view `records` for PostgreSQL.

The arrays of a batch become PostgreSQL arrays, whose elements are found by arithmetic, once a batch: OFFSET 0 keeps
the planner from moving that to each record.  Positions and data are copied once a batch for the same reason: a value
out of line (TOAST) would be fetched again for each record.  So the time for a record does not depend on the size of its
batch.
"""

from __future__ import annotations

from typing import Final

from txnstore.db.names import identifier, literal
from txnstore.db.records_view import CODEC, RECORDS_COLUMNS, STATUS

_CREATE: Final = """\
CREATE VIEW {schema}.records AS
SELECT
    topics.name AS topic,
    partitions.partition_number AS partition,
    batch.base_offset + coalesce(opened.offset_deltas[record.number], record.number - 1) AS "offset",
    batch.base_timestamp_ms + coalesce(opened.timestamp_deltas_ms[record.number], 0) AS timestamp_ms,
    CASE
        -- How many null keys have an index up to this record's, found by bisection: the last of them may be its own.
        WHEN opened.null_keys[width_bucket(record.number - 1, opened.null_keys)] = record.number - 1 THEN NULL
        ELSE substr(
            opened.key_data,
            {key_start} + 1,
            {key_end} - {key_start}
        )
    END AS key,
    CASE
        WHEN opened.null_values[width_bucket(record.number - 1, opened.null_values)] = record.number - 1 THEN NULL
        ELSE substr(
            opened.value_data,
            {value_start} + 1,
            {value_end} - {value_start}
        )
    END AS value,
    nullif(opened.headers -> (record.number - 1), CAST('null' AS jsonb)) AS headers,
    batch.producer_id,
    batch.producer_epoch,
    batch.is_transactional,
    {status} AS status,
    {codec} AS codec,
    batch.base_offset AS batch_base_offset,
    batch.last_offset AS batch_last_offset,
    batch.max_timestamp_ms AS batch_max_timestamp_ms,
    batch.running_max_timestamp_ms AS batch_running_max_timestamp_ms
FROM {schema}.topics AS topics
JOIN {schema}.partitions AS partitions ON partitions.topic_id = topics.topic_id
JOIN {schema}.record_batches AS batch ON batch.partition_id = partitions.partition_id
LEFT JOIN {schema}.finished_transactions AS finished
    ON finished.partition_id = batch.partition_id
    AND finished.producer_id = batch.producer_id
    AND finished.producer_epoch = batch.producer_epoch
CROSS JOIN LATERAL (
    SELECT
        batch.record_count,
        CAST(translate(batch.offset_deltas, '[]', '{}') AS integer[]) AS offset_deltas,
        CAST(translate(batch.timestamp_deltas_ms, '[]', '{}') AS bigint[]) AS timestamp_deltas_ms,
        batch.key_positions || CAST('' AS bytea) AS key_positions,
        batch.value_positions || CAST('' AS bytea) AS value_positions,
        CAST(translate(batch.null_keys, '[]', '{}') AS integer[]) AS null_keys,
        CAST(translate(batch.null_values, '[]', '{}') AS integer[]) AS null_values,
        CAST(batch.headers AS jsonb) AS headers,
        CASE WHEN batch.codec = 0 THEN batch.key_data || CAST('' AS bytea) END AS key_data,
        CASE WHEN batch.codec = 0 THEN batch.value_data || CAST('' AS bytea) END AS value_data
    OFFSET 0
) AS opened
CROSS JOIN LATERAL generate_series(1, opened.record_count) AS record (number)
WHERE batch.control_type IS NULL
"""


def _position(positions: str, index: str) -> str:
    """Return the expression of the position with this index."""
    # The highest byte brings the sign along.
    shifted = (f"(get_byte({positions}, 4 * ({index}) + {place}) << {24 - 8 * place})" for place in range(4))
    return f"({' | '.join(shifted)})"


def create_view(schema: str) -> str:
    """Return the statement that makes the view in `schema`, where the tables are."""
    text = _CREATE.replace("{status}", STATUS).replace("{codec}", CODEC).replace("{schema}", identifier(schema))
    for what in ("key", "value"):
        positions = f"opened.{what}_positions"
        text = text.replace(f"{{{what}_start}}", _position(positions, "record.number - 1"))
        text = text.replace(f"{{{what}_end}}", _position(positions, "record.number"))
    return text


def comment_on_view(schema: str) -> tuple[str, ...]:
    """Return the statements that say in the database what each column of the view holds."""
    view = f"{identifier(schema)}.records"
    about_columns = (
        f"COMMENT ON COLUMN {view}.{identifier(name)} IS {literal(about)}" for name, about in RECORDS_COLUMNS.items()
    )
    return (f"COMMENT ON VIEW {view} IS 'The log, one row a record; markers are left out.'", *about_columns)


def drop_view(schema: str) -> str:
    """Return the statement that removes the view from `schema`, if it is there."""
    return f"DROP VIEW IF EXISTS {identifier(schema)}.records"
