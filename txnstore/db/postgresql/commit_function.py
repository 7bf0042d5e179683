"""The function `commit_transaction`: a transaction that is wholly in the client, committed by one statement.

The offsets of a consumer that belongs to no group's generation cannot wait for the commit.  So it also begins a
transaction that holds nothing but such offsets, and commits one that does (`stays_open`, `open_group_id`).
Without a transactional id it appends batches that belong to no transaction, or commits offsets by themselves.

It takes the same locks in the same order as the statements of the coordinator, and writes the same rows. It does so
only if nothing about the transaction is unusual. Otherwise it changes nothing and says so: the coordinator's
statements then explain, wait or refuse. So it has no message of its own, and it never decides what they would not.

It is the whole database transaction: what BEGIN sets for others, it sets for itself.  `commit_transaction_within` is
the same as a part of a database transaction that an application has begun, after a savepoint.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final

from txnstore.clock import Clock
from txnstore.db.backend import Durability, Limits, WholeTransaction
from txnstore.db.names import identifier

NAME: Final = "commit_transaction"
NAME_WITHIN: Final = "commit_transaction_within"
#: The sequence behind the journal's key, which PostgreSQL has named.
JOURNAL_NUMBERS: Final = "transaction_log_entry_id_seq"
#: The SQLSTATE by which the function undoes what it has begun: the transaction is not usual.
NOT_USUAL: Final = "TXN01"
#: The numbers by which a partition remembers a producer's last batches: five numbers for each of five batches.
_RECENT_NUMBERS: Final = 5 * 5
#: The bytes of a batch's checksum around the eight of its time, where there is no payload: see `log.codec.checksum`.
_BYTES_BEFORE_TIME: Final = 5
_BYTES_BEHIND_TIME: Final = 95
#: So many of the lowest bits of a time may be set: enough for some thousands of years.
_TIME_BITS: Final = 48

_TEXT, _BYTEA, _INT4, _INT8, _BOOL = 25, 17, 23, 20, 16
_ARRAY_OF: Final = {_TEXT: 1009, _BYTEA: 1001, _INT4: 1007, _INT8: 1016}
_INT4_OF: Final = struct.Struct(">i").pack
_INT8_OF: Final = struct.Struct(">q").pack
_NULL_LENGTH: Final = b"\xff\xff\xff\xff"
_ARRAY_HEAD: Final = struct.Struct(">iii").pack
_HEAD_OF_CELLS: Final = struct.Struct(">iiiii").pack
_ONE_CELL: Final = struct.Struct(">iiiiii").pack
_ONE_INT4: Final = struct.Struct(">iiiiiii").pack
_ONE_INT8: Final = struct.Struct(">iiiiiiq").pack
_NO_TEXT: Final = (None,)
_ARRAY_OF_NULL: Final = _HEAD_OF_CELLS(1, 1, _TEXT, 1, 1) + _NULL_LENGTH

_PARAMETERS: Final = """
    of_transactional_id text,
    of_producer_id bigint,
    of_producer_epoch integer,
    given_now_ms bigint,
    earliest_ms bigint,
    latest_ms bigint,
    marker_crc bigint,
    statement_timeout_ms bigint,
    lock_timeout_ms bigint,
    transaction_timeout_ms bigint,
    is_lasting boolean,
    partition_ids bigint[],
    batch_counts integer[],
    record_counts integer[],
    base_timestamps_ms bigint[],
    max_timestamps_ms bigint[],
    base_sequences integer[],
    codecs integer[],
    crcs bigint[],
    sizes_bytes integer[],
    batch_timestamp_deltas_ms text[],
    batch_key_positions bytea[],
    batch_null_keys text[],
    batch_value_positions bytea[],
    batch_null_values text[],
    batch_headers text[],
    batch_key_data bytea[],
    batch_value_data bytea[],
    of_group_id text,
    of_generation integer,
    of_member_id text,
    of_group_instance_id text,
    offset_partition_ids bigint[],
    committed_offsets bigint[],
    leader_epochs integer[],
    offset_texts text[],
    open_group_id text,
    stays_open boolean
"""
_CREATE: Final = """\
CREATE FUNCTION {schema}.commit_transaction({parameters}) RETURNS bigint[] LANGUAGE plpgsql SECURITY INVOKER
-- Plans are kept as long as the session: one that was made while a table was small would read all of a large one.
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $function$
DECLARE
    now_ms bigint := coalesce(given_now_ms, CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint));
    log_now_ms bigint;
    began record;
    head record;
    consumers record;
    member record;
    batch integer := 0;
    last_batch integer;
    next_offset_now bigint;
    marker_offset_now bigint;
    first_offset bigint;
    offset_count bigint;
    largest_ms bigint;
    setting text;
    recent bigint[];
    recent_text text;
    commit_number_now bigint;
    sent text := '';
    places bigint[] := '{}';
BEGIN
    -- A statement that waited for a row must see what the holder of its lock committed.
    IF current_setting('transaction_isolation') <> 'read committed'
        OR now_ms NOT BETWEEN greatest(earliest_ms, 0) AND least(latest_ms, {latest_time}) THEN
        RETURN NULL;
    END IF;
    IF lock_timeout_ms IS NOT NULL THEN
        setting := set_config('lock_timeout', CAST(lock_timeout_ms AS text), true);
    END IF;
    IF transaction_timeout_ms IS NOT NULL THEN
        setting := set_config('transaction_timeout', CAST(transaction_timeout_ms AS text), true);
    END IF;
    IF is_lasting AND current_setting('synchronous_commit') = 'off' THEN
        setting := set_config('synchronous_commit', 'on', true);
    END IF;

    -- Locked and changed in one: whoever had the lock has left the row as the condition wants it, or nothing happens.
    IF stays_open THEN
        UPDATE {schema}.transactions
        SET state = 1,
            start_ms = now_ms,
            last_update_ms = now_ms,
            deadline_ms = CASE WHEN timeout_ms < 2147483647 THEN now_ms + timeout_ms END,
            transaction_number = transaction_number + 1,
            begin_epoch = of_producer_epoch,
            fence_reason = NULL,
            fence_detail = NULL
        WHERE {this_producer}
            AND state IN (0, 4, 5)
        RETURNING transaction_number, timeout_ms, start_ms INTO began;
    ELSIF of_transactional_id IS NOT NULL THEN
        UPDATE {schema}.transactions
        SET producer_epoch = of_producer_epoch + 1,
            last_producer_epoch = of_producer_epoch,
            next_producer_id = -1,
            state = 4,
            start_ms = CASE state WHEN 1 THEN start_ms ELSE now_ms END,
            last_update_ms = now_ms,
            deadline_ms = NULL,
            transaction_number = CASE state WHEN 1 THEN transaction_number ELSE transaction_number + 1 END,
            begin_epoch = -1,
            fence_reason = NULL,
            fence_detail = NULL
        WHERE {this_producer}
            AND CASE
                WHEN open_group_id IS NULL THEN state IN (0, 4, 5)
                ELSE state = 1 AND begin_epoch = of_producer_epoch AND coalesce(deadline_ms >= now_ms, true)
            END
        RETURNING transaction_number, timeout_ms, start_ms INTO began;
    END IF;
    IF of_transactional_id IS NOT NULL AND NOT FOUND THEN
        RETURN NULL;
    END IF;
    -- In statements of their own, which see what the last holder of the row's lock has committed.
    IF open_group_id IS NOT NULL THEN
        DELETE FROM {schema}.transaction_groups
        WHERE transactional_id = of_transactional_id AND group_id = open_group_id;
        IF NOT FOUND
            OR EXISTS (SELECT FROM {schema}.transaction_groups WHERE transactional_id = of_transactional_id)
            OR EXISTS (SELECT FROM {schema}.transaction_partitions WHERE transactional_id = of_transactional_id)
            OR EXISTS (SELECT FROM {schema}.transaction_writers WHERE transactional_id = of_transactional_id)
            OR EXISTS (
                SELECT FROM {schema}.transaction_branches
                WHERE transactional_id = of_transactional_id AND outcome IS NULL
            )
        THEN
            RAISE 'the transaction is not usual' USING ERRCODE = '{not_usual}';
        END IF;
    END IF;

    -- The partitions come in the order of their ids: everybody locks heads in it.
    IF cardinality(partition_ids) > 1 THEN
        -- The number of the commit is drawn once all of them are locked, and the first one's rows need it.
        PERFORM FROM {schema}.partition_heads WHERE partition_id = ANY (partition_ids) ORDER BY partition_id FOR UPDATE;
    END IF;
    FOR place IN 1 .. cardinality(partition_ids) LOOP
        IF statement_timeout_ms > 0
            AND clock_timestamp() > statement_timestamp() + statement_timeout_ms * INTERVAL '1 millisecond' THEN
            RAISE 'it took too long' USING ERRCODE = 'query_canceled';
        END IF;
        log_now_ms := coalesce(given_now_ms, CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint));
        last_batch := batch + batch_counts[place];
        IF batch_counts[place] = 1 THEN
            offset_count := record_counts[last_batch];
            largest_ms := max_timestamps_ms[last_batch];
        ELSE
            SELECT sum(record_count), max(max_ms) INTO offset_count, largest_ms
            FROM unnest(record_counts[batch + 1:last_batch], max_timestamps_ms[batch + 1:last_batch])
                AS these (record_count, max_ms);
        END IF;
        IF of_transactional_id IS NOT NULL THEN
            -- The marker's.
            offset_count := offset_count + 1;
        END IF;
        -- Locked and moved in one: a lock of its own would be written to the server's log as well.
        UPDATE {schema}.partition_heads
        SET next_offset = next_offset + offset_count,
            running_max_timestamp_ms = greatest(running_max_timestamp_ms, largest_ms)
        WHERE partition_id = partition_ids[place]
        RETURNING log_start_offset, next_offset, running_max_timestamp_ms, segment INTO head;
        IF NOT FOUND THEN
            RAISE 'the transaction is not usual' USING ERRCODE = '{not_usual}';
        END IF;
        commit_number_now := coalesce(commit_number_now, nextval('{numbers}'));
        marker_offset_now := head.next_offset - 1;
        first_offset := head.next_offset - offset_count;
        next_offset_now := first_offset;
        recent := NULL;
        IF of_transactional_id IS NULL AND of_producer_id >= 0 THEN
            -- In a statement of its own, which sees what the last holder of the head's lock has committed.
            SELECT CAST(string_to_array(btrim(recent_batches, '[]'), ',') AS bigint[]) INTO recent
            FROM {schema}.producer_states
            WHERE partition_id = partition_ids[place] AND producer_id = of_producer_id;
            -- No row: the partition does not know the producer.  Five numbers stand for a batch.
            IF coalesce(recent[cardinality(recent) - 3], -1) + 1 <> base_sequences[batch + 1] THEN
                RAISE 'the transaction is not usual' USING ERRCODE = '{not_usual}';
            END IF;
        END IF;
        LOOP
            batch := batch + 1;
            places := places || next_offset_now || head.log_start_offset;
            IF batch = last_batch AND of_transactional_id IS NOT NULL THEN
                EXIT;
            END IF;
            INSERT INTO {schema}.record_batches ({columns}) VALUES {batch};
            IF of_producer_id >= 0 THEN
                recent := recent || ARRAY[
                    base_sequences[batch], base_sequences[batch] + (record_counts[batch] - 1),
                    next_offset_now, next_offset_now + (record_counts[batch] - 1), max_timestamps_ms[batch]
                ];
            END IF;
            next_offset_now := next_offset_now + record_counts[batch];
            IF batch = last_batch THEN
                EXIT;
            END IF;
        END LOOP;
        IF of_transactional_id IS NULL THEN
            IF of_producer_id >= 0 THEN
                recent := recent[greatest(1, cardinality(recent) - {recent_numbers} + 1):];
                recent_text := '[' || array_to_string(recent, ',') || ']';
                UPDATE {schema}.producer_states
                SET recent_batches = recent_text, last_timestamp_ms = log_now_ms
                WHERE partition_id = partition_ids[place]
                    AND producer_id = of_producer_id
                    AND producer_epoch = of_producer_epoch
                    AND transaction_first_offset IS NULL;
                IF NOT FOUND THEN
                    INSERT INTO {schema}.producer_states (
                        partition_id, producer_id, producer_epoch, recent_batches, coordinator_epoch, last_timestamp_ms
                    ) VALUES (
                        partition_ids[place], of_producer_id, of_producer_epoch, recent_text, -1, log_now_ms
                    )
                    ON CONFLICT DO NOTHING;
                    IF NOT FOUND THEN
                        RAISE 'the transaction is not usual' USING ERRCODE = '{not_usual}';
                    END IF;
                END IF;
            END IF;
            CONTINUE;
        END IF;
        -- One statement for both: to begin one takes longer than to insert a row.
        INSERT INTO {schema}.record_batches ({columns}) VALUES {batch}, {marker};
        -- In a statement of its own, which sees what the last holder of the head's lock has committed.
        UPDATE {schema}.producer_states
        SET producer_epoch = of_producer_epoch + 1,
            recent_batches = '[]',
            coordinator_epoch = 0,
            last_timestamp_ms = log_now_ms
        WHERE partition_id = partition_ids[place]
            AND producer_id = of_producer_id
            AND transaction_first_offset IS NULL
            AND coordinator_epoch <= 0
            AND (producer_epoch < of_producer_epoch OR producer_epoch = of_producer_epoch AND recent_batches = '[]');
        IF NOT FOUND THEN
            INSERT INTO {schema}.producer_states (
                partition_id, producer_id, producer_epoch, recent_batches, coordinator_epoch, last_timestamp_ms
            ) VALUES (partition_ids[place], of_producer_id, of_producer_epoch + 1, '[]', 0, log_now_ms)
            ON CONFLICT DO NOTHING;
            IF NOT FOUND THEN
                RAISE 'the transaction is not usual' USING ERRCODE = '{not_usual}';
            END IF;
        END IF;
        INSERT INTO {schema}.finished_transactions (
            partition_id, marker_offset, producer_id, producer_epoch, first_offset, outcome, last_stable_offset,
            commit_number
        ) VALUES (
            partition_ids[place], marker_offset_now, of_producer_id, of_producer_epoch, first_offset, 1,
            coalesce(
                (
                    SELECT min(transaction_first_offset) FROM {schema}.producer_states
                    WHERE partition_id = partition_ids[place] AND transaction_first_offset >= 0
                ),
                marker_offset_now + 1
            ),
            commit_number_now
        );
    END LOOP;
    IF of_transactional_id IS NULL AND of_group_id IS NULL THEN
        RETURN places;
    END IF;

    -- Behind the heads of partitions, never before.
    IF open_group_id IS NOT NULL THEN
        PERFORM FROM {schema}.groups WHERE group_id = open_group_id FOR UPDATE;
        IF NOT FOUND THEN
            RAISE 'the transaction is not usual' USING ERRCODE = '{not_usual}';
        END IF;
        -- What was pending becomes committed, unless a plain commit came after it: the later commit holds.
        INSERT INTO {schema}.group_offsets AS known (
            group_id, partition_id, committed_offset, offset_in_transaction, leader_epoch, offset_metadata, commit_ms,
            commit_number, producer_id, producer_epoch
        )
        SELECT group_id, partition_id, pending_offset, offset_in_transaction, leader_epoch, offset_metadata,
            coalesce(given_now_ms, CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)), commit_number,
            producer_id, producer_epoch
        FROM {schema}.pending_group_offsets
        WHERE group_id = open_group_id AND producer_id = of_producer_id
        ON CONFLICT (group_id, partition_id) DO UPDATE
        SET committed_offset = excluded.committed_offset,
            offset_in_transaction = excluded.offset_in_transaction,
            leader_epoch = excluded.leader_epoch,
            offset_metadata = excluded.offset_metadata,
            commit_ms = excluded.commit_ms,
            commit_number = excluded.commit_number,
            producer_id = excluded.producer_id,
            producer_epoch = excluded.producer_epoch
        WHERE known.commit_number < excluded.commit_number;
        WITH finished AS (
            DELETE FROM {schema}.pending_group_offsets WHERE group_id = open_group_id AND producer_id = of_producer_id
            RETURNING partition_id, pending_offset, offset_in_transaction
        )
        SELECT string_agg(concat(',[', concat_ws(',', partition_id, pending_offset, offset_in_transaction), ']'), ''
            ORDER BY partition_id) INTO sent
        FROM finished;
    END IF;
    IF of_group_id IS NOT NULL THEN
        UPDATE {schema}.groups
        SET commit_number = commit_number + 1,
            last_update_ms = coalesce(given_now_ms, CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint))
        WHERE group_id = of_group_id
        RETURNING generation, commit_number, last_update_ms INTO consumers;
        IF NOT FOUND THEN
            RAISE 'the transaction is not usual' USING ERRCODE = '{not_usual}';
        END IF;
        IF of_member_id IS NOT NULL THEN
            SELECT generation, group_instance_id, subscription INTO member
            FROM {schema}.group_members WHERE group_id = of_group_id AND member_id = of_member_id;
            IF NOT FOUND
                OR of_generation NOT BETWEEN greatest(member.generation, 0) AND consumers.generation
                OR of_group_instance_id <> coalesce(member.group_instance_id, '')
                OR (CAST(member.subscription AS jsonb) -> 'owned_ids' @> to_jsonb(offset_partition_ids)) IS NOT TRUE
            THEN
                RAISE 'the transaction is not usual' USING ERRCODE = '{not_usual}';
            END IF;
        -- Nobody in particular: who has a generation or a lasting name all the same was a member, or may still be one.
        ELSIF of_generation <> -1
            OR of_group_instance_id IS NOT NULL
            OR of_transactional_id IS NULL
                AND EXISTS (SELECT FROM {schema}.group_members WHERE group_id = of_group_id)
        THEN
            RAISE 'the transaction is not usual' USING ERRCODE = '{not_usual}';
        END IF;
        IF stays_open THEN
            INSERT INTO {schema}.transaction_groups (transactional_id, group_id)
            VALUES (of_transactional_id, of_group_id) ON CONFLICT DO NOTHING;
            IF NOT FOUND THEN
                RAISE 'the transaction is not usual' USING ERRCODE = '{not_usual}';
            END IF;
        END IF;
        FOR place IN 1 .. cardinality(offset_partition_ids) LOOP
            sent := concat(sent, ',[', offset_partition_ids[place], ',', committed_offsets[place], ']');
            IF stays_open THEN
                INSERT INTO {schema}.pending_group_offsets (
                    group_id, partition_id, pending_offset, leader_epoch, offset_metadata, commit_ms, commit_number,
                    producer_id, producer_epoch
                )
                SELECT of_group_id, partition_id, committed_offsets[place], leader_epochs[place], offset_texts[place],
                    consumers.last_update_ms, consumers.commit_number, of_producer_id, of_producer_epoch
                FROM {schema}.partitions WHERE partition_id = offset_partition_ids[place]
                    -- An offset in commit order is another thing, here or pending: see groups.offsets.
                    AND NOT EXISTS (
                        SELECT FROM {schema}.group_offsets
                        WHERE group_id = of_group_id AND partition_id = offset_partition_ids[place]
                            AND offset_in_transaction IS NOT NULL
                    )
                    AND NOT EXISTS (
                        SELECT FROM {schema}.pending_group_offsets
                        WHERE group_id = of_group_id AND partition_id = offset_partition_ids[place]
                            AND offset_in_transaction IS NOT NULL
                    )
                ON CONFLICT DO NOTHING;
                IF NOT FOUND THEN
                    RAISE 'the transaction is not usual' USING ERRCODE = '{not_usual}';
                END IF;
                CONTINUE;
            END IF;
            UPDATE {schema}.group_offsets
            SET committed_offset = committed_offsets[place],
                leader_epoch = leader_epochs[place],
                offset_metadata = offset_texts[place],
                commit_ms = consumers.last_update_ms,
                commit_number = consumers.commit_number,
                producer_id = of_producer_id,
                producer_epoch = of_producer_epoch
            WHERE group_id = of_group_id
                AND partition_id = offset_partition_ids[place]
                AND offset_in_transaction IS NULL
                AND EXISTS (SELECT FROM {schema}.partitions WHERE partition_id = offset_partition_ids[place]);
            IF FOUND THEN
                CONTINUE;
            END IF;
            INSERT INTO {schema}.group_offsets (
                group_id, partition_id, committed_offset, leader_epoch, offset_metadata, commit_ms, commit_number,
                producer_id, producer_epoch
            )
            SELECT of_group_id, partition_id, committed_offsets[place], leader_epochs[place], offset_texts[place],
                consumers.last_update_ms, consumers.commit_number, of_producer_id, of_producer_epoch
            FROM {schema}.partitions WHERE partition_id = offset_partition_ids[place]
            ON CONFLICT DO NOTHING;
            IF NOT FOUND THEN
                RAISE 'the transaction is not usual' USING ERRCODE = '{not_usual}';
            END IF;
        END LOOP;
    END IF;

    IF of_transactional_id IS NULL THEN
        RETURN ARRAY[CAST(cardinality(offset_partition_ids) AS bigint)];
    END IF;
    -- Begun, decided and complete: one entry of the journal stands for all that happens here.
    INSERT INTO {schema}.transaction_log (
        entry_id, transactional_id, transaction_number, producer_id, producer_epoch, state, first_state, timeout_ms,
        start_ms, update_ms, reason, sent_offsets
    ) VALUES (
        coalesce(commit_number_now, nextval('{numbers}')), of_transactional_id, began.transaction_number,
        of_producer_id,
        CASE WHEN stays_open THEN of_producer_epoch ELSE of_producer_epoch + 1 END,
        CASE WHEN stays_open THEN 1 ELSE 4 END,
        CASE WHEN open_group_id IS NULL THEN 1 ELSE 2 END,
        began.timeout_ms, began.start_ms, now_ms, CASE WHEN stays_open THEN 'TxnOffsetCommit' ELSE 'EndTxn' END,
        -- As `groups.offsets.journal_text` writes it.
        CASE
            WHEN NOT stays_open AND sent <> '' THEN
                concat('{', to_json(coalesce(of_group_id, open_group_id)), ':[', substr(sent, 2), ']}')
        END
    );
    RETURN places;
END
$function$
"""

# The number of the database transaction is looked at first: its owner may have ended it, and begun another one.
# The handler makes the block a savepoint: what was begun of an unusual transaction is undone, and nothing else.
_CREATE_WITHIN: Final = """\
CREATE FUNCTION {schema}.commit_transaction_within(
    of_database_transaction text,{parameters}) RETURNS bigint[] LANGUAGE plpgsql SECURITY INVOKER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF CAST(pg_current_xact_id_if_assigned() AS text) IS DISTINCT FROM of_database_transaction THEN
        RETURN NULL;
    END IF;
    BEGIN
        RETURN {schema}.commit_transaction({names});
    EXCEPTION
        WHEN SQLSTATE '{not_usual}' OR undefined_function OR insufficient_privilege THEN
            RETURN NULL;
    END;
END
$function$
"""

_COLUMNS: Final = """
                partition_id, last_offset, base_offset, record_count, base_timestamp_ms, max_timestamp_ms,
                running_max_timestamp_ms, commit_number, timestamp_type, producer_id, producer_epoch, base_sequence,
                is_transactional, control_type, coordinator_epoch, codec, segment, crc, size_bytes,
                timestamp_deltas_ms, key_positions, null_keys, value_positions, null_values, headers, key_data,
                value_data
            """
_BATCH: Final = """(
                partition_ids[place], next_offset_now + record_counts[batch] - 1, next_offset_now,
                record_counts[batch], base_timestamps_ms[batch], max_timestamps_ms[batch],
                head.running_max_timestamp_ms, CASE WHEN of_transactional_id IS NULL THEN commit_number_now END,
                0, of_producer_id, of_producer_epoch, base_sequences[batch],
                of_transactional_id IS NOT NULL, NULL, NULL, codecs[batch], head.segment, crcs[batch],
                sizes_bytes[batch], batch_timestamp_deltas_ms[batch], batch_key_positions[batch],
                batch_null_keys[batch], batch_value_positions[batch], batch_null_values[batch],
                batch_headers[batch], batch_key_data[batch], batch_value_data[batch]
            )"""
_THIS_PRODUCER: Final = """transactional_id = of_transactional_id
            AND producer_id = of_producer_id
            AND producer_epoch = of_producer_epoch
            AND producer_epoch < 32766"""
_MARKER: Final = """(
                partition_ids[place], marker_offset_now, marker_offset_now, 1, log_now_ms, log_now_ms,
                head.running_max_timestamp_ms, NULL, 0, of_producer_id, of_producer_epoch + 1, -1, true,
                1, 0, 0, head.segment,
                -- The checksum of a marker of the time 0 came along; each bit of the time turns some of its bits over.
                marker_crc{crc_of_time}, 0,
                NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
            )"""


def create_functions(schema: str) -> list[str]:
    """Return the statements that make the functions in `schema`, where the tables are, and say there what they are."""
    quoted = identifier(schema)
    function = (
        _CREATE.replace("{parameters}", _PARAMETERS)
        .replace("{columns}", _COLUMNS)
        .replace("{batch}", _BATCH)
        .replace("{marker}", _MARKER)
        .replace("{this_producer}", _THIS_PRODUCER)
        .replace("{numbers}", f"{quoted}.{JOURNAL_NUMBERS}".replace("'", "''"))
        .replace("{schema}", quoted)
        .replace("{not_usual}", NOT_USUAL)
        .replace("{recent_numbers}", str(_RECENT_NUMBERS))
        .replace("{latest_time}", str(2**_TIME_BITS - 1))
        .replace("{crc_of_time}", _crc_of_time())
    )
    within = (
        _CREATE_WITHIN.replace("{parameters}", _PARAMETERS)
        .replace("{names}", ", ".join(_names_within()))
        .replace("{schema}", quoted)
        .replace("{not_usual}", NOT_USUAL)
    )
    about = "Commits a transaction that is wholly in the client, or appends batches; NULL: nothing was changed."
    about_within = "The same within a database transaction of the caller, which is still to be committed."
    return [
        function,
        f"COMMENT ON FUNCTION {quoted}.{NAME} IS '{about}'",
        within,
        f"COMMENT ON FUNCTION {quoted}.{NAME_WITHIN} IS '{about_within}'",
    ]


def drop_functions(schema: str) -> list[str]:
    """Return the statements that remove the functions from `schema`, if they are there."""
    return [f"DROP FUNCTION IF EXISTS {identifier(schema)}.{name}" for name in (NAME_WITHIN, NAME)]


def _names_within() -> list[str]:
    """Return what `commit_transaction` gets in a database transaction of others, whose limits it leaves as they are."""
    given = {
        "statement_timeout_ms": "0",
        "lock_timeout_ms": "CASE WHEN current_setting('lock_timeout') = '0' THEN lock_timeout_ms END",
        "transaction_timeout_ms": "NULL",
    }
    names = [line.split()[0] for line in _PARAMETERS.strip().splitlines()]
    return [given.get(name, name) for name in names]


@cache
def call_function(schema: str) -> str:
    """Return the statement that calls it, with parameters as `arguments` returns them."""
    return _call(schema, NAME, len(TYPES))


@cache
def call_function_within(schema: str) -> str:
    """Return the statement that calls it in a database transaction of others: its number comes before the rest."""
    return _call(schema, NAME_WITHIN, len(TYPES_WITHIN))


def _call(schema: str, name: str, count: int) -> str:
    numbers = ", ".join(f"${number}" for number in range(1, count + 1))
    return f"SELECT {identifier(schema)}.{name}({numbers})"


#: The types of the payload's columns, in order.
_PAYLOAD_TYPES: Final = (_TEXT, _BYTEA, _TEXT, _BYTEA, _TEXT, _TEXT, _BYTEA, _BYTEA)
#: The types of the parameters, in order.
TYPES: Final = (
    *(_TEXT, _INT8, _INT4, *[_INT8] * 4, *[_INT8] * 3, _BOOL),
    *(_ARRAY_OF[kind] for kind in (_INT8, _INT4, _INT4, _INT8, _INT8, _INT4, _INT4, _INT8, _INT4)),
    *(_ARRAY_OF[kind] for kind in _PAYLOAD_TYPES),
    *(_TEXT, _INT4, _TEXT, _TEXT),
    *(_ARRAY_OF[kind] for kind in (_INT8, _INT8, _INT4, _TEXT)),
    *(_TEXT, _BOOL),
)
TYPES_WITHIN: Final = (_TEXT, *TYPES)
#: All of them are sent in PostgreSQL's binary form.
FORMATS: Final = (1,) * len(TYPES)


def arguments(
    whole: WholeTransaction, limits: Limits, *, now_ms: int | None, has_transaction_timeout: bool, is_lasting: bool
) -> list[bytes | None]:
    """Return the parameters; `now_ms` stands in for the server's clock.

    Raises:
        ValueError, struct.error: one of them is not of the type that it has in the database.
    """
    counts, base_ms, max_ms, sequences, codecs, crcs, sizes, *payloads = (
        zip(*whole.batches, strict=True) if whole.batches else [()] * 15
    )
    group = whole.group
    offsets = zip(*whole.offsets, strict=True) if whole.offsets else [()] * 4
    partition_ids, committed, leader_epochs, texts = offsets
    return [
        None if whole.transactional_id is None else whole.transactional_id.encode(),
        _INT8_OF(whole.producer_id),
        _INT4_OF(whole.producer_epoch),
        None if now_ms is None else _INT8_OF(now_ms),
        _INT8_OF(whole.earliest_ms),
        _INT8_OF(whole.latest_ms),
        _INT8_OF(whole.marker_crc),
        _INT8_OF(limits.statement_timeout_ms),
        _INT8_OF(limits.lock_timeout_ms),
        _INT8_OF(limits.transaction_timeout_ms) if has_transaction_timeout else None,
        b"\1" if is_lasting else b"\0",
        _integers(_INT8, [partition_id for partition_id, _ in whole.partitions]),
        _integers(_INT4, [count for _, count in whole.partitions]),
        _integers(_INT4, counts),
        _integers(_INT8, base_ms),
        _integers(_INT8, max_ms),
        _integers(_INT4, sequences),
        _integers(_INT4, codecs),
        _integers(_INT8, crcs),
        _integers(_INT4, sizes),
        *[
            _texts(column) if kind == _TEXT else _array(_BYTEA, column)
            for kind, column in zip(_PAYLOAD_TYPES, payloads, strict=True)
        ],
        None if group is None else group.group_id.encode(),
        None if group is None else _INT4_OF(group.generation),
        None if group is None or not group.member_id else group.member_id.encode(),
        None if group is None or group.group_instance_id is None else group.group_instance_id.encode(),
        _integers(_INT8, partition_ids),
        _integers(_INT8, committed),
        _integers(_INT4, leader_epochs),
        _texts(texts),
        None if whole.open_group_id is None else whole.open_group_id.encode(),
        b"\1" if whole.stays_open else b"\0",
    ]


def arguments_within(name: str, whole: WholeTransaction, limits: Limits, clock: Clock | None) -> list[bytes | None]:
    """Return the parameters of `commit_transaction_within`, in the database transaction of this number.

    Raises:
        ValueError, struct.error: see `arguments`.
    """
    return [
        name.encode(),
        *arguments(
            whole,
            limits,
            now_ms=None if clock is None else clock.now_ms(),
            has_transaction_timeout=False,
            is_lasting=limits.durability is Durability.FULL,
        ),
    ]


def places_of(answer: bytes) -> list[int]:
    """Return the numbers of an array as PostgreSQL writes it."""
    return [int(number) for number in answer[1:-1].split(b",")] if len(answer) > len("{}") else []


def _integers(kind: int, numbers: Sequence[int]) -> bytes:
    width = 8 if kind == _INT8 else 4
    if len(numbers) == 1:
        # As a rule: one batch, one partition.
        return (_ONE_INT8 if kind == _INT8 else _ONE_INT4)(1, 0, kind, 1, 1, width, numbers[0])
    pack = _INT8_OF if kind == _INT8 else _INT4_OF
    return _array(kind, [pack(number) for number in numbers])


def _texts(texts: Sequence[str | None]) -> bytes:
    if texts == _NO_TEXT:
        return _ARRAY_OF_NULL
    return _array(_TEXT, [None if text is None else text.encode() for text in texts])


def _array(kind: int, cells: Sequence[bytes | None]) -> bytes:
    """Return an array of one dimension in PostgreSQL's binary form."""
    if not cells:
        return _ARRAY_HEAD(0, 0, kind)
    if len(cells) == 1 and cells[0] is not None:
        return _ONE_CELL(1, 0, kind, 1, 1, len(cells[0])) + cells[0]
    return _HEAD_OF_CELLS(1, None in cells, kind, len(cells), 1) + b"".join(_cells(cells))


def _cells(cells: Iterable[bytes | None]) -> Iterable[bytes]:
    for cell in cells:
        if cell is None:
            yield _NULL_LENGTH
        else:
            yield _INT4_OF(len(cell))
            yield cell


def _crc_of_time() -> str:
    """Return the SQL for what a marker's time adds to its checksum.

    CRC-32 is linear: every bit of the time turns the same bits of the checksum over, whatever else is in the batch.
    Four bits at a time are looked up.
    """
    looked_up = []
    for shift in range(0, _TIME_BITS, 4):
        changes = ",".join(str(crc_at(number << shift) ^ crc_at(0)) for number in range(16))
        looked_up.append(
            f"\n                    # (CAST('{{{changes}}}' AS bigint[]))[(log_now_ms >> {shift} & 15) + 1]"
        )
    return "".join(looked_up)


def crc_at(time_ms: int) -> int:
    """Return the checksum of as many bytes as a marker has, all 0 but for its time."""
    return zlib.crc32(bytes(_BYTES_BEFORE_TIME) + time_ms.to_bytes(8, "big") + bytes(_BYTES_BEHIND_TIME))
