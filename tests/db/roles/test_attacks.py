"""What roles try with what is not theirs, in plain SQL and through the clients: refused, or listed as possible.

The README of `txnstore/db/roles` says which of it table rights refuse, which row-level security, and which nothing.
"""

from __future__ import annotations

import contextlib

import psycopg
import pytest
from psycopg import sql

from tests.db.roles.shop import INTO_TRANSACTIONS, PATIENCE_SECONDS, metadata_of_nobody_in
from txnstore import KafkaError, KafkaException, TopicPartition
from txnstore.db.opening import open_store
from txnstore.db.postgresql.segments import SEGMENT_TABLES
from txnstore.db.roles.rights import BELONGING, Kind, rights_of
from txnstore.db.schema import metadata
from txnstore.errors import InvalidProducerIdMapping
from txnstore.transactions.transaction import abort_if_timed_out, complete_decided

PARTITION = "(SELECT partition_id FROM txnstore.partitions JOIN txnstore.topics USING (topic_id) WHERE name = '{}')"
A_BATCH = (
    "INSERT INTO txnstore.record_batches (partition_id, last_offset, base_offset, record_count, base_timestamp_ms,"
    " max_timestamp_ms, running_max_timestamp_ms, timestamp_type, producer_id, producer_epoch, base_sequence,"
    " is_transactional, control_type, coordinator_epoch, codec, segment, crc, size_bytes)"
    " VALUES ({partition}, 1000, 1000, 1, 0, 0, 0, 0, 7, 0, 0, true, {control}, 0, 0, 1, 0, 0)"
)
AS_PRODUCER = (
    "INSERT INTO txnstore.producer_states (partition_id, producer_id, producer_epoch, recent_batches,"
    " coordinator_epoch, last_timestamp_ms) VALUES ({partition}, 4711, 0, '[]', -1, 0)"
)
AN_END = (
    "INSERT INTO txnstore.finished_transactions (partition_id, marker_offset, producer_id, producer_epoch,"
    " first_offset, outcome, last_stable_offset) VALUES ({partition}, 900, 7, 0, 899, 0, 0)"
)
A_TRANSACTION = (
    INTO_TRANSACTIONS + "VALUES ('{id}', 4711, -1, -1, 0, -1, 1000, 0, -1, 0, 0, -1, NULL) ON CONFLICT DO NOTHING"
)
INTO_JOURNAL = (
    "INSERT INTO txnstore.transaction_log ({columns}transactional_id, transaction_number, producer_id, producer_epoch,"
    " state, first_state, timeout_ms, start_ms, update_ms, reason) VALUES ({values}'tenant-id', 1, 1, 1, 4, 1, 1, 1, 1,"
    " 'forged')"
)
A_GROUP = (
    "INSERT INTO txnstore.groups (group_id, generation, commit_number, last_update_ms) VALUES ('{id}', 0, 0, 0)"
    " ON CONFLICT DO NOTHING"
)
AN_OFFSET = (
    "INSERT INTO txnstore.{table} (group_id, partition_id, {column}, leader_epoch, commit_ms, commit_number,"
    " producer_id, producer_epoch) VALUES ('others-group', {partition}, 0, -1, 0, 9, -1, -1)"
)
A_MEMBER = (
    "INSERT INTO txnstore.group_members (group_id, member_id, client_id, generation, session_timeout_ms,"
    " deadline_ms, subscription, assignment) VALUES ('{id}', 'me', 'me', 1, 1, 1, '{{}}', '[]')"
)

#: By role: what the rights of tables refuse, whoever's topic it is.
REFUSED = {
    "reader": [
        A_BATCH.format(partition=1, control="NULL"),
        A_TRANSACTION.format(id="mine"),
        AS_PRODUCER.format(partition=1),
        "SELECT * FROM txnstore.partition_heads FOR UPDATE",
        "SELECT * FROM txnstore.transactions",
        "SELECT value FROM txnstore.outbox",
        "SELECT * FROM txnstore.open_transactions",
        "SELECT * FROM txnstore.partition_storage",
        "DELETE FROM txnstore.groups",
    ],
    "writer": [
        "SELECT value_data FROM txnstore.record_batches",
        "SELECT * FROM txnstore.records",
        A_BATCH.format(partition=1, control="NULL") + " RETURNING value_data",
        "UPDATE txnstore.partition_heads SET log_start_offset = next_offset",
        "DELETE FROM txnstore.producer_states",
        "DELETE FROM txnstore.transactions",
        "DELETE FROM txnstore.transaction_log",
        "UPDATE txnstore.transaction_log SET reason = 'forged'",
        "DELETE FROM txnstore.sink_positions",
        "SELECT * FROM txnstore.group_offsets",
        "UPDATE txnstore.group_offsets SET committed_offset = 0",
        A_GROUP.format(id="mine"),
        "SELECT value FROM txnstore.outbox",
        "INSERT INTO txnstore.outbox (topic, transaction_id) VALUES ('others', 1)",
    ],
    "watcher": [
        "SELECT value_data FROM txnstore.record_batches",
        "SELECT headers FROM txnstore.record_batches",
        "SELECT * FROM txnstore.record_batches",
        "SELECT key FROM txnstore.outbox",
        "SELECT * FROM txnstore.records",
        A_TRANSACTION.format(id="mine"),
        A_GROUP.format(id="mine"),
        "SELECT * FROM txnstore.groups FOR UPDATE",
    ],
    "upkeep": [],
}
#: What nobody may but the owner, and, behind it, only coordinators.
OWNERS_OWN = [
    "CREATE TABLE txnstore.mine (n int)",
    "DROP TABLE txnstore.record_batches",
    "TRUNCATE txnstore.record_batches",
    "ALTER TABLE txnstore.topics DISABLE ROW LEVEL SECURITY",
    "CREATE POLICY mine ON txnstore.topics USING (true)",
    "CREATE FUNCTION txnstore.coalesce(bigint) RETURNS bigint LANGUAGE sql AS 'SELECT 1'",
    "CREATE TRIGGER mine BEFORE INSERT ON txnstore.topics EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    "CREATE RULE mine AS ON INSERT TO txnstore.topics DO INSTEAD NOTHING",
    "DROP FUNCTION txnstore.commit_transaction",
    "UPDATE txnstore.store_version SET version_num = '9999'",
    "ALTER ROLE CURRENT_USER BYPASSRLS",
]
COORDINATORS_OWN = [
    "UPDATE txnstore.record_batches SET value_data = NULL",
    "DELETE FROM txnstore.record_batches",
    "INSERT INTO txnstore.topics (name, topic_uuid, created_ms) VALUES ('mine', gen_random_uuid(), 0)",
    "DELETE FROM txnstore.topics",
    "UPDATE txnstore.topic_configs SET value = '1'",
    "UPDATE txnstore.stores SET store_uuid = gen_random_uuid()",
    # Who may draw the next producer id neither gives out again what others have, nor all that are left.
    "UPDATE txnstore.stores SET next_producer_id = 0",
    "UPDATE txnstore.stores SET next_producer_id = next_producer_id - 1",
    "UPDATE txnstore.stores SET next_producer_id = next_producer_id",
    "UPDATE txnstore.stores SET next_producer_id = 9223372036854775807",
    "UPDATE txnstore.stores SET next_producer_id = next_producer_id + (1::bigint << 39)",
    "INSERT INTO txnstore.databases VALUES (2, 'mine', gen_random_uuid(), true, 0)",
    "DELETE FROM txnstore.outbox",
    "UPDATE txnstore.outbox_sequencers SET sequenced_count = 0",
    "DELETE FROM txnstore.deleted_partitions",
]

OTHERS = PARTITION.format("others")
#: What a tenant's table rights would allow, and row-level security refuses with an error.
REFUSED_BY_ROWS = [
    A_BATCH.format(partition="{others}", control="NULL"),
    A_BATCH.format(partition="{others}", control="1"),
    AS_PRODUCER.format(partition="{others}"),
    AN_END.format(partition="{others}"),
    # Whether there is such an id or group must not show.
    A_TRANSACTION.format(id="others-id"),
    A_TRANSACTION.format(id="nobodys-id"),
    A_GROUP.format(id="others-group"),
    A_GROUP.format(id="nobodys-group"),
    "INSERT INTO txnstore.transaction_partitions VALUES ('others-id', {others})",
    "INSERT INTO txnstore.transaction_groups VALUES ('others-id', 'others-group')",
    "INSERT INTO txnstore.pending_markers VALUES ('others-id', {others}, 0, 0, 1)",
    # What maintenance would do in the name of the tenant's own transaction.
    "INSERT INTO txnstore.transaction_partitions VALUES ('tenant-id', {others})",
    "INSERT INTO txnstore.transaction_writer_partitions VALUES ('tenant-id', 7, {others})",
    "INSERT INTO txnstore.transaction_groups VALUES ('tenant-id', 'others-group')",
    "INSERT INTO txnstore.transaction_groups VALUES ('tenant-id', 'nobodys-group')",
    "INSERT INTO txnstore.pending_markers VALUES ('tenant-id', {others}, 0, 0, 1)",
    # The numbers of others' commits: theirs would not fit in any more, or would be told of what is the tenant's.
    INTO_JOURNAL.format(columns="entry_id, ", values="1000000, "),
    INTO_JOURNAL.format(columns="entry_id, ", values="-1, "),
    A_BATCH.replace("segment, ", "segment, commit_number, ", 1)
    .replace("0, 0, 1, 0, 0)", "0, 0, 1, 1, 0, 0)")
    .format(partition="{own}", control="NULL"),
    AN_END.replace("last_stable_offset)", "last_stable_offset, commit_number)")
    .replace("0, 0)", "1, 0, 1)")
    .format(partition="{own}"),
    # No other database coordinates anything as long as there are tenants; one day it may.
    "INSERT INTO txnstore.offset_producers (producer_id, producer_epoch, last_update_ms) VALUES (1, 32767, 0)",
    AN_OFFSET.format(table="group_offsets", column="committed_offset", partition="{others}"),
    AN_OFFSET.format(table="pending_group_offsets", column="pending_offset", partition="{others}"),
    A_MEMBER.replace("{id}", "others-group"),
    "UPDATE txnstore.groups SET group_id = 'others-2'",
    "UPDATE txnstore.transactions SET transactional_id = 'others-2'",
    "INSERT INTO txnstore.outbox (topic, value) VALUES ('others', 'forged')",
    "INSERT INTO txnstore.sink_runs VALUES ('others-id', 1, 'run', 'sink', 1, 0, 0)",
]
#: What finds no row of another tenant's.
MISSING_BY_ROWS = [
    "UPDATE txnstore.partition_heads SET next_offset = next_offset + 1 WHERE partition_id = {others}",
    "SELECT * FROM txnstore.partition_heads WHERE partition_id = {others}",
    "SELECT * FROM txnstore.record_batches WHERE partition_id = {others}",
    "SELECT * FROM txnstore.producer_states WHERE partition_id = {others}",
    "UPDATE txnstore.producer_states SET producer_epoch = 32767 WHERE partition_id = {others}",
    "SELECT * FROM txnstore.finished_transactions WHERE partition_id = {others}",
    "SELECT outbox_id FROM txnstore.outbox WHERE refusal IS NULL",
    "SELECT * FROM txnstore.topics WHERE name = 'others'",
    "SELECT * FROM txnstore.partitions WHERE partition_id = {others}",
    "SELECT * FROM txnstore.transactions WHERE transactional_id = 'others-id'",
    "UPDATE txnstore.transactions SET producer_epoch = producer_epoch + 1 WHERE transactional_id = 'others-id'",
    "SELECT * FROM txnstore.transactions WHERE transactional_id = 'others-id' FOR UPDATE",
    "SELECT * FROM txnstore.transaction_log WHERE transactional_id = 'others-id'",
    "DELETE FROM txnstore.transaction_partitions WHERE transactional_id = 'others-id'",
    "DELETE FROM txnstore.transaction_groups WHERE transactional_id = 'others-id'",
    "SELECT * FROM txnstore.groups WHERE group_id NOT LIKE 'tenant-%'",
    "UPDATE txnstore.groups SET generation = generation + 1 WHERE group_id = 'others-group'",
    "DELETE FROM txnstore.group_members WHERE group_id = 'others-group'",
    "SELECT * FROM txnstore.group_offsets WHERE group_id = 'others-group'",
    "UPDATE txnstore.group_offsets SET committed_offset = 0 WHERE group_id = 'others-group'",
    "DELETE FROM txnstore.pending_group_offsets WHERE group_id = 'others-alone'",
    "UPDATE txnstore.offset_producers SET producer_epoch = 32767",
]
#: What remains: by a writer without limits anywhere, by a tenant in its own topics and groups.
POSSIBLE = [
    ("writer", "UPDATE txnstore.partition_heads SET next_offset = next_offset + 1"),
    ("writer", A_BATCH.format(partition="{others}", control="1")),
    ("writer", "UPDATE txnstore.transactions SET producer_epoch = producer_epoch + 1 WHERE state = 1"),
    ("reader", "UPDATE txnstore.group_offsets SET committed_offset = 0"),
    ("reader", "DELETE FROM txnstore.group_members"),
    ("tenant", A_BATCH.format(partition="{own}", control="1")),
    ("tenant", "UPDATE txnstore.partition_heads SET next_offset = next_offset + 1"),
    ("tenant", INTO_JOURNAL.format(columns="", values="")),
    ("tenant", "UPDATE txnstore.producer_states SET producer_epoch = 32767, recent_batches = '[]'"),
    ("tenant", "UPDATE txnstore.transactions SET producer_id = 0"),
    ("tenant", "UPDATE txnstore.transactions SET state = 3, deadline_ms = NULL, begin_epoch = -1 WHERE state = 1"),
    ("tenant", "INSERT INTO txnstore.sink_batches VALUES ('app::of others', 9, 'tenant-id', 0)"),
    ("tenant", A_MEMBER.replace("{id}", "tenant-group").replace("{{}}", "broken")),
    (
        "tenant",
        AN_OFFSET.replace("others-group", "tenant-group").format(
            table="group_offsets", column="committed_offset", partition="{others}"
        ),
    ),
    ("tenant", "SELECT 1 FROM pg_catalog.pg_policies WHERE schemaname = 'txnstore' AND roles::text LIKE '%worker%'"),
    ("tenant", "SELECT pg_catalog.pg_advisory_xact_lock(42)"),
    ("tenant", "SELECT pg_catalog.pg_notify('txnstore', '')"),
]


@pytest.fixture(scope="module")
def places(shop):
    """The partitions that statements name."""
    with shop.connect() as connection:
        of = dict(
            connection.execute(
                "SELECT name, partition_id FROM txnstore.topics JOIN txnstore.partitions USING (topic_id)"
            ).fetchall()
        )
    return {"others": of["others"], "own": of["tenant.orders"]}


@pytest.fixture(scope="module")
def sessions(shop):
    """A connection of each role."""
    opened = {role: shop.connect(role) for role in shop.roles}
    yield opened
    for connection in opened.values():
        connection.close()


def hits(connection, statement, places):
    """Run a statement and take it back; return how many rows it has hit."""
    with connection.transaction(force_rollback=True):
        return connection.execute(statement.format(**places) if "{" in statement else statement).rowcount


def rights_refused(role):
    shared = OWNERS_OWN if role == "upkeep" else [*OWNERS_OWN, *COORDINATORS_OWN]
    return [*REFUSED.get(role, ()), *shared]


@pytest.mark.parametrize("role", ["reader", "writer", "worker", "watcher", "upkeep", "tenant"])
def test_the_rights_of_tables_refuse(role, sessions, places):
    for statement in rights_refused(role):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            pytest.fail(f"{statement} hit {hits(sessions[role], statement, places)} rows")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.OWNER])
def test_a_kind_has_the_rights_that_it_needs_and_no_other(kind, shop):
    role = {"producer": "writer", "consumer": "reader", "coordinator": "upkeep", "monitor": "watcher"}[kind]
    rights = rights_of(kind)
    with shop.connect() as connection:
        for table in [str(table.name) for table in metadata.tables.values()]:
            whole = {right for right in rights.get(table, ()) if isinstance(right, str)}
            parts = {right[0] for right in rights.get(table, ()) if not isinstance(right, str)}
            name = f"txnstore.{table}"
            for right in ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER"):
                ask = sql.SQL("SELECT pg_catalog.has_table_privilege(%s, %s, %s)")
                (has,) = connection.execute(ask, [shop.roles[role], name, right]).fetchone()
                assert has == (right in whole), (table, right)
            for right in ("SELECT", "INSERT", "UPDATE"):
                ask = sql.SQL("SELECT pg_catalog.has_any_column_privilege(%s, %s, %s)")
                (has,) = connection.execute(ask, [shop.roles[role], name, right]).fetchone()
                assert has == (right in whole | parts), (table, right)


def test_row_level_security_refuses_what_is_written_for_others(sessions, places):
    told = set()
    # Who has drawn no number yet is refused for that.
    hits(sessions["tenant"], "SELECT pg_catalog.nextval('txnstore.transaction_log_entry_id_seq')", places)
    for statement in REFUSED_BY_ROWS:
        with pytest.raises(psycopg.errors.InsufficientPrivilege) as caught:
            pytest.fail(f"{statement} hit {hits(sessions['tenant'], statement, places)} rows")
        assert "row-level security" in str(caught.value), statement
        told.add(str(caught.value))
    # One message a table: none tells a thing that is there from one that is not.
    assert len(told) < len(REFUSED_BY_ROWS)


def test_row_level_security_hides_what_is_others(sessions, places):
    with psycopg.connect(sessions["tenant"].info.dsn, password="secret", autocommit=True) as again:
        assert again.execute("SHOW row_security").fetchone() == ("on",)
    for statement in MISSING_BY_ROWS:
        # The same finds something for who may, or the test would look at nothing.
        assert hits(sessions["tenant"], statement, places) == 0, statement


def test_what_is_hidden_is_there(shop, places):
    with shop.connect() as connection:
        assert [each for each in MISSING_BY_ROWS if hits(connection, each, places) == 0] == []


def test_row_level_security_cannot_be_turned_off_by_a_session(sessions):
    with sessions["tenant"].transaction(force_rollback=True):
        sessions["tenant"].execute("SET LOCAL row_security = off")
        with pytest.raises(psycopg.errors.InsufficientPrivilege), sessions["tenant"].transaction():
            sessions["tenant"].execute("SELECT * FROM txnstore.topics")
    for role in ("worker", "upkeep"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            sessions["tenant"].execute(sql.SQL("SET ROLE {}").format(sql.Identifier(sessions[role].info.user)))


def test_the_view_of_records_shows_a_tenant_its_own(shop, sessions):
    statement = "SELECT DISTINCT topic FROM txnstore.records ORDER BY topic"
    # Other tests may have written to topics of their own.
    assert {("others",), ("tenant.orders",)} <= set(sessions["worker"].execute(statement).fetchall())
    if shop.server.version < 150_000:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            sessions["tenant"].execute(statement)
    else:
        assert sessions["tenant"].execute(statement).fetchall() == [("tenant.orders",)]


#: An append of one batch outside transactions, as clients make it.
CALLED_WITH = {
    "of_producer_id": "-1",
    "of_producer_epoch": "-1",
    "earliest_ms": "0",
    "latest_ms": "4000000000000",
    "marker_crc": "0",
    "statement_timeout_ms": "0",
    "is_lasting": "true",
    "stays_open": "false",
    **dict.fromkeys(("batch_counts", "record_counts"), "'{1}'"),
    **dict.fromkeys(("base_timestamps_ms", "max_timestamps_ms", "codecs", "crcs", "sizes_bytes"), "'{0}'"),
    "base_sequences": "'{-1}'",
}


def test_the_view_of_open_transactions_is_for_who_sees_all(sessions):
    statement = "SELECT DISTINCT transactional_id FROM txnstore.open_transactions ORDER BY 1"
    for role in ("watcher", "upkeep"):
        assert sessions[role].execute(statement).fetchall() == [("others-id",), ("tenant-id",)]
    for role in ("writer", "tenant"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            sessions[role].execute(statement)


def test_the_short_way_to_a_commit_is_as_closed_as_the_long_one(shop, sessions, places):
    """The functions run with the rights of whoever calls them."""
    with shop.connect() as connection:
        (names,) = connection.execute(
            "SELECT proargnames FROM pg_catalog.pg_proc WHERE proname = 'commit_transaction' AND NOT prosecdef"
        ).fetchone()

    def call(role, partition_id):
        given = {**CALLED_WITH, "partition_ids": f"'{{{partition_id}}}'"}
        given |= {name: "'{NULL}'" for name in names if name.startswith("batch_") and name not in given}
        arguments = ", ".join(f"{name} => {given.get(name, 'NULL')}" for name in names)
        return hits(
            sessions[role],
            "SELECT txnstore.commit_transaction(" + arguments.replace("{", "{{").replace("}", "}}") + ")",
            places,
        )

    assert call("tenant", places["own"]) == call("writer", places["others"]) == 1
    # What is hidden is not usual, whether or not it is there.
    for partition_id in (places["others"], 4711):
        with pytest.raises(psycopg.Error, match="the transaction is not usual"):
            call("tenant", partition_id)
    for role in ("reader", "watcher"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            call(role, places["others"])


@pytest.mark.slow
@pytest.mark.parametrize(("role", "statement"), POSSIBLE)
def test_what_is_said_to_remain_possible_is(role, statement, sessions, places):
    """A row of the README's list that is refused by now is to be taken out of it."""
    assert hits(sessions[role], statement, places) >= 1


def test_every_table_with_rows_of_somebody_has_row_level_security(shop):
    with shop.connect() as connection:
        secured = {
            name
            for (name,) in connection.execute(
                "SELECT c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
                " WHERE nspname = 'txnstore' AND relrowsecurity"
            )
        }
    assert secured == {*BELONGING, *SEGMENT_TABLES}
    shared = {"stores", "store_configs", "databases", "deleted_partitions", "outbox_sequencers"}
    shared |= {"relay_positions", "maintenance_duties", "deleted_numbers"}
    assert {str(table.name) for table in metadata.tables.values()} - secured == shared


#: What a tenant writes of a transaction of its own that says it has the other's producer, and the state of that.
IN_ANOTHERS_NAME = {
    "a marker that is missing": (
        "3, 1, 1, 1, {epoch}, NULL",
        "INSERT INTO txnstore.pending_markers VALUES ('tenant-forged', {others}, {producer_id}, {epoch} + 1, 0)",
    ),
    "a partition": (
        "1, 1, 1, 1, {epoch}, 1",
        "INSERT INTO txnstore.transaction_partitions VALUES ('tenant-forged', {others})",
    ),
    "a partition of a writer": (
        "1, 1, 1, 1, {epoch}, 1",
        "INSERT INTO txnstore.transaction_writer_partitions VALUES ('tenant-forged', {producer_id}, {others})",
    ),
    "a group": (
        "1, 1, 1, 1, {epoch}, 1",
        "INSERT INTO txnstore.transaction_groups VALUES ('tenant-forged', 'others-alone')",
    ),
}


@pytest.mark.parametrize("forged", IN_ANOTHERS_NAME)
def test_maintenance_ends_nothing_of_others_in_the_name_of_a_tenant(forged, shop, places):
    """It has rights on all rows: what it is told to do has to be within those of whoever says so."""
    state, statement = IN_ANOTHERS_NAME[forged]
    before = rows_of_others(shop, places)
    with shop.connect() as connection:
        producer_id, epoch = connection.execute(
            "SELECT producer_id, producer_epoch FROM txnstore.transactions WHERE transactional_id = 'others-id'"
        ).fetchone()
    of = {**places, "producer_id": producer_id, "epoch": epoch}
    with (
        shop.connect("tenant") as tenant,
        contextlib.suppress(psycopg.errors.InsufficientPrivilege),
        tenant.transaction(),
    ):
        row = "VALUES ('tenant-forged', {producer_id}, -1, -1, {epoch}, -1, 1, " + state + ")"
        tenant.execute((INTO_TRANSACTIONS + row).format(**of))
        if "writer" in forged:
            writer = "INSERT INTO txnstore.transaction_writers VALUES ('tenant-forged', {producer_id}, {epoch}, true)"
            tenant.execute(writer.format(**of))
        tenant.execute(statement.format(**of))
    with open_store(shop.url("upkeep")) as store, contextlib.suppress(InvalidProducerIdMapping):
        abort_if_timed_out(store, "tenant-forged")
        complete_decided(store, "tenant-forged")
    assert rows_of_others(shop, places) == before


def error_of(call):
    with pytest.raises(KafkaException) as caught:
        call()
    return caught.value.args[0]


@pytest.mark.slow
def test_a_transaction_tells_its_offsets_to_whoever_may_read_the_journal(shop):
    shop.create_topics("told")
    with shop.producer("worker", transactional_id="told-id") as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        for _ in range(2):
            # The group is made by the first one, in the general way.
            with producer.transaction():
                producer.produce("told", "payload")
                producer.send_offsets_to_transaction(
                    [TopicPartition("told", 0, 1)], metadata_of_nobody_in("told-group")
                )
    whole = {"txnstore_delivery_order": "commit", "txnstore_delivery_atomic": True}
    for role, told in (("worker", ("told-id", {"told-group": [("told", 0, 1)]})), ("reader", (None, {}))):
        with shop.consumer(role, f"told-{role}", **whole) as consumer:
            consumer.assign([TopicPartition("told", 0, 0)])
            for _ in range(2):
                found = consumer.consume_transaction(PATIENCE_SECONDS)
                offsets = {
                    name: [(p.topic, p.partition, p.offset) for p in sent] for name, sent in found.offsets.items()
                }
                assert (found.transactional_id, offsets) == told


def test_a_tenants_clients_are_refused_what_is_others(shop, places):
    before = rows_of_others(shop, places)
    told = []
    with shop.producer("tenant") as producer:
        producer.produce("others", "forged", on_delivery=lambda error, _: told.append(error))
        producer.flush(PATIENCE_SECONDS)
    assert [error.code() for error in told] == [KafkaError.CLUSTER_AUTHORIZATION_FAILED]
    with shop.producer("tenant", transactional_id="others-id") as producer:
        error = error_of(lambda: producer.init_transactions(PATIENCE_SECONDS))
        assert (error.code(), error.fatal()) == (KafkaError.CLUSTER_AUTHORIZATION_FAILED, True)
    with shop.consumer("tenant", "others-group") as consumer:
        consumer.assign([TopicPartition("tenant.orders", 0, 0)])
        error = error_of(lambda: consumer.commit(offsets=[TopicPartition("tenant.orders", 0, 1)], asynchronous=False))
        assert error.code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED
        assert set(consumer.list_topics(timeout=PATIENCE_SECONDS).topics) == {"tenant.orders"}
    with shop.consumer("tenant", "others-group") as consumer:
        consumer.subscribe(["tenant.orders"])
        assert consumer.poll(PATIENCE_SECONDS).error().code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED
    with shop.consumer("tenant", "tenant-spare") as consumer:
        consumer.assign([TopicPartition("others", 0, 0)])
        assert consumer.poll(PATIENCE_SECONDS).error().code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert rows_of_others(shop, places) == before


def test_a_readers_clients_write_nothing_and_a_writers_read_nothing(shop):
    told = []
    with shop.producer("reader") as producer:
        producer.produce("others", "forged", on_delivery=lambda error, _: told.append(error))
        producer.flush(PATIENCE_SECONDS)
    assert [error.code() for error in told] == [KafkaError.CLUSTER_AUTHORIZATION_FAILED]
    with shop.consumer("writer", "others-group") as consumer:
        consumer.assign([TopicPartition("others", 0, 0)])
        assert consumer.poll(PATIENCE_SECONDS).error().code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED


def rows_of_others(shop, places):
    """Return what belongs to the other tenant, but for times."""
    with shop.connect() as connection:
        return [
            connection.execute(statement, [places["others"]]).fetchall()
            for statement in (
                "SELECT partition_id, next_offset FROM txnstore.partition_heads WHERE partition_id = %s",
                "SELECT last_offset, crc FROM txnstore.record_batches WHERE partition_id = %s ORDER BY 1",
                (
                    "SELECT transactional_id, producer_epoch, state FROM txnstore.transactions"
                    " WHERE %s > 0 AND transactional_id = 'others-id'"
                ),
                "SELECT * FROM txnstore.group_offsets WHERE partition_id = %s",
                "SELECT * FROM txnstore.pending_group_offsets WHERE partition_id = %s",
            )
        ]
