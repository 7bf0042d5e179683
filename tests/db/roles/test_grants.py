"""Grants: printed or applied, twice as well as once, replaced, taken back, and only where they can hold."""

from __future__ import annotations

import json
from contextlib import closing

import psycopg
import pytest
from psycopg import sql
from typer.testing import CliRunner

from tests.clients.consumer.log_writer import eventually
from tests.db.roles.shop import PATIENCE_SECONDS, ROLES, TENANT, TENANTS_OWN
from txnstore import Outbox, TopicPartition
from txnstore.cli.program import NAMES, program_with
from txnstore.db.cluster.cluster import open_cluster
from txnstore.db.opening import open_store, upgrade
from txnstore.db.postgresql import rotation
from txnstore.db.postgresql.backend import connect_driver
from txnstore.db.postgresql.segments import SEGMENT_TABLES
from txnstore.db.roles import grants
from txnstore.db.roles.grants import RoleScope
from txnstore.db.roles.rights import Kind
from txnstore.db.url import parse_url
from txnstore.errors import InvalidRequest, PermissionDenied
from txnstore.log.append import Append, append_at_once
from txnstore.log.codec import encode
from txnstore.log.topics import create_topic, list_topics
from txnstore.model import NO_PRODUCER, Record
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.listing import describe_transaction
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.recovery import abort_overdue


def catalogue(shop):
    """Return all that grants change: access lists, policies, switches, owners."""
    with shop.connect() as connection:
        return [
            connection.execute(statement).fetchall()
            for statement in (
                (
                    "SELECT relname, relrowsecurity, relowner, reloptions,"
                    " (SELECT array_agg(item::text ORDER BY item::text) FROM unnest(relacl) AS item) FROM pg_class"
                    " WHERE relnamespace = 'txnstore'::regnamespace AND relkind IN ('r', 'p', 'v') ORDER BY 1"
                ),
                (
                    "SELECT attrelid::regclass::text, attname, attacl::text FROM pg_catalog.pg_attribute"
                    " WHERE attacl IS NOT NULL AND attrelid::regclass::text LIKE 'txnstore.%' ORDER BY 1, 2"
                ),
                (
                    "SELECT tablename, policyname, permissive, roles::text, cmd, qual, with_check"
                    " FROM pg_catalog.pg_policies ORDER BY 1, 2"
                ),
                (
                    "SELECT proname, proowner FROM pg_catalog.pg_proc WHERE pronamespace = 'txnstore'::regnamespace"
                    " ORDER BY 1"
                ),
                "SELECT nspacl::text FROM pg_catalog.pg_namespace WHERE nspname = 'txnstore'",
            )
        ]


def run(*arguments):
    done = CliRunner().invoke(program_with(NAMES), ["roles", *arguments], prog_name="txnstore", env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


@pytest.mark.slow
def test_the_same_again_changes_nothing_and_revoking_leaves_nothing(bare):
    empty = catalogue(bare)
    bare.grant_all()
    once = catalogue(bare)
    assert once != empty
    bare.grant_all()
    assert catalogue(bare) == once
    for role in bare.roles.values():
        for _ in range(2):
            grants.apply(bare.store, grants.revoke(bare.store, role))
    left = catalogue(bare)
    # An access list that was empty once says now that nobody is on it.
    assert [row[:4] for row in left[0]] == [row[:4] for row in empty[0]]
    assert left[2:4] == empty[2:4]
    assert "txnstore_shop" not in str([row[4] for row in left[0]]) + str(left[1]) + str(left[4])


@pytest.mark.slow
def test_nothing_is_secured_by_row_until_a_role_is_limited_nor_after_the_last_one(bare):
    def secured():
        return {row[1] for row in catalogue(bare)[0] if not row[0].startswith(("store", "databases", "deleted"))}

    bare.grant(Kind.PRODUCER, "writer")
    assert secured() == {False}
    bare.grant(Kind.CONSUMER, TENANT, TENANTS_OWN)
    assert True in secured()
    # A limited role becomes one without limits; others keep theirs.
    bare.grant(Kind.PRODUCER, "worker", RoleScope(topics=("*",)))
    bare.grant(Kind.CONSUMER, TENANT)
    grants.apply(bare.store, grants.revoke(bare.store, bare.roles["writer"]))
    assert True in secured()
    grants.apply(bare.store, grants.revoke(bare.store, bare.roles["worker"]))
    assert secured() == {False}


def test_who_may_only_produce_aborts_many_that_others_have_left_open(bare):
    """What their groups have pending is not shown to it."""
    bare.grant(Kind.PRODUCER, "writer")
    partition_id = bare.store.write(lambda connection: create_topic(connection, "orders")).partition_ids[0]
    coordinator, names = TransactionCoordinator(bare.store), ["a", "b", "c"]
    for name in names:
        producer = coordinator.init_producer_id(name, 1).identity
        batch = encode([Record(b"v")], producer=producer, base_sequence=0, is_transactional=True)
        coordinator.append(name, producer, [Append(partition_id, batch)])
    with open_store(bare.url("writer"), create=False) as store:
        eventually(lambda: abort_overdue(store) is None)
    rows = bare.store.read(lambda connection: [describe_transaction(connection, name).row for name in names])
    assert {row.state for row in rows} == {TransactionState.COMPLETE_ABORT}


@pytest.mark.slow
def test_a_policy_of_somebody_else_keeps_it_on(bare):
    bare.grant(Kind.CONSUMER, TENANT, TENANTS_OWN)
    with bare.connect() as connection:
        connection.execute("CREATE POLICY mine ON txnstore.topics USING (true)")
    grants.apply(bare.store, grants.revoke(bare.store, bare.roles[TENANT]))
    assert dict(row[:2] for row in catalogue(bare)[0])["topics"]


def test_who_loses_its_rows_is_named(bare):
    with bare.connect() as connection:
        statement = sql.SQL("GRANT SELECT ON txnstore.topics TO {}").format(sql.Identifier(bare.roles["reader"]))
        connection.execute(statement)
    assert not [each for each in grants.grant(bare.store, Kind.PRODUCER, bare.roles["writer"]) if "--" in each]
    told = grants.grant(bare.store, Kind.CONSUMER, bare.roles[TENANT], TENANTS_OWN)
    assert [each for each in told if each.startswith("-- From now on")] == [
        f"-- From now on '{bare.roles['reader']}' sees no row: it has rights that were not granted this way."
    ]


@pytest.mark.slow
def test_rights_on_the_segments_of_the_log_are_no_way_around_limits(bare):
    (partition_id,) = bare.store.write(lambda connection: create_topic(connection, "others")).partition_ids
    append_at_once(bare.store, [Append(partition_id, encode([Record(b"secret")]))], NO_PRODUCER)
    role = sql.Identifier(bare.roles[TENANT])
    with bare.connect() as connection:
        connection.execute(sql.SQL("GRANT SELECT ON ALL TABLES IN SCHEMA txnstore TO {}").format(role))
        bare.grant(Kind.CONSUMER, TENANT, TENANTS_OWN)
        with bare.connect(TENANT) as limited:
            for table in ("record_batches", *SEGMENT_TABLES):
                assert limited.execute(f"SELECT count(*) FROM txnstore.{table}").fetchone() == (0,)
        grants.apply(bare.store, grants.revoke(bare.store, bare.roles[TENANT]))
        connection.execute(sql.SQL("GRANT USAGE ON SCHEMA txnstore TO {}").format(role))
    with bare.connect(TENANT) as limited:
        for table in SEGMENT_TABLES:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                limited.execute(f"SELECT FROM txnstore.{table}")


@pytest.mark.slow
def test_a_segment_whose_rows_its_owner_does_not_see_is_not_emptied(bare):
    (partition_id,) = bare.store.write(lambda connection: create_topic(connection, "orders")).partition_ids
    append_at_once(bare.store, [Append(partition_id, encode([Record(b"kept")]))], NO_PRODUCER)
    bare.grant(Kind.OWNER, "upkeep")
    with bare.connect() as connection:
        connection.execute("ALTER TABLE txnstore.record_batches_1 ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
        with connect_driver(parse_url(bare.url("upkeep"))) as owner:
            segments = rotation._Segments(owner, bare.store.schema, rotation._Seen())
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                segments._emptied(1, 10**9)
        assert connection.execute("SELECT count(*) FROM txnstore.record_batches_1").fetchone() == (1,)
        connection.execute(sql.SQL("REASSIGN OWNED BY {} TO postgres").format(sql.Identifier(bare.roles["upkeep"])))


@pytest.mark.slow
def test_what_is_printed_does_the_same_in_psql(bare, sql_program):
    wanted = [grants.grant(bare.store, Kind.PRODUCER, bare.roles["writer"])]
    wanted += [
        grants.grant(bare.store, kind, bare.roles[TENANT], TENANTS_OWN) for kind in (Kind.PRODUCER, Kind.CONSUMER)
    ]
    # Access lists that are empty come to say so.
    grants.apply(bare.store, grants.revoke(bare.store, bare.roles["writer"]))
    for statements in wanted:
        sql_program(bare.server.url(bare.name), grants.printed(statements))
    by_psql = catalogue(bare)
    for role in (TENANT, "writer"):
        sql_program(bare.server.url(bare.name), grants.printed(grants.revoke(bare.store, bare.roles[role])))
    for statements in wanted:
        grants.apply(bare.store, statements)
    assert catalogue(bare) == by_psql


@pytest.mark.slow
def test_names_that_look_like_sql_are_names(bare):
    odd = "o'brien\\\"; DROP TABLE txnstore.topics; --%s $$"
    bare.server.create_role(odd, "secret")
    bare.roles["odd"] = odd
    names = (odd, odd + "*", "50%", "a\\'b*")
    bare.grant(Kind.PRODUCER, "odd", RoleScope((), (), names))
    bare.grant(Kind.CONSUMER, "odd", RoleScope((), names))
    with bare.connect("odd") as connection:
        insert = (
            "INSERT INTO txnstore.groups (group_id, generation, commit_number, last_update_ms) VALUES (%s, 0, 0, 0)"
        )
        for allowed in (odd, odd + "more", "50%", "a\\'b", "a\\'bc"):
            connection.execute(insert, [allowed])
        for refused in ("o'brien", "50%1", "a'b", "50"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(insert, [refused])
    assert [each.bounds for each in grants.list_grants(bare.store) if each.role == odd]
    grants.apply(bare.store, grants.revoke(bare.store, odd))


@pytest.mark.slow
def test_long_names_of_roles_have_policies_of_their_own(bare):
    for letter in "ab":
        bare.roles[letter] = "r" * 62 + letter
        bare.server.create_role(bare.roles[letter], "secret")
        bare.grant(Kind.CONSUMER, letter, RoleScope((letter,)))
    assert [each.bounds for each in grants.list_grants(bare.store) if each.kind == "consumer"] == [
        "topics: a",
        "topics: b",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bounds", "why"),
    [
        (Kind.COORDINATOR, RoleScope(("a",)), "sees all topics"),
        (Kind.MONITOR, RoleScope(("a",)), "sees all topics"),
        (Kind.PRODUCER, RoleScope(("a*b",)), "a limit is a name"),
        (Kind.PRODUCER, RoleScope(("",)), "a limit is a name"),
        (Kind.CONSUMER, RoleScope((), ("a\nb",)), "a limit is a name"),
    ],
)
def test_what_cannot_be_granted_is_refused(bare, kind, bounds, why):
    with pytest.raises(InvalidRequest, match=why):
        grants.grant(bare.store, kind, bare.roles["writer"], bounds)


@pytest.mark.slow
def test_roles_for_whom_nothing_can_be_done_are_refused(bare):
    for call, otherwise in (
        (lambda role: grants.grant(bare.store, Kind.PRODUCER, role), "make it first"),
        (lambda role: grants.revoke(bare.store, role), "there is nothing to take from it"),
    ):
        with pytest.raises(InvalidRequest, match=f"has no role 'nobody-there'; {otherwise}"):
            call("nobody-there")
        with pytest.raises(InvalidRequest, match="superuser"):
            call("postgres")
    bare.grant(Kind.OWNER, "upkeep")
    with pytest.raises(InvalidRequest, match="the role's own"):
        grants.revoke(bare.store, bare.roles["upkeep"])


@pytest.mark.slow
def test_who_does_not_own_the_tables_grants_nothing(bare):
    bare.grant(Kind.COORDINATOR, "upkeep")
    before = catalogue(bare)
    with open_store(bare.url("upkeep")) as store, pytest.raises(PermissionDenied):
        grants.apply(store, grants.grant(store, Kind.PRODUCER, bare.roles["writer"]))
    assert catalogue(bare) == before


@pytest.mark.slow
def test_an_owner_migrates_and_grants(bare):
    bare.grant(Kind.OWNER, "upkeep")
    with open_store(bare.url("upkeep")) as store:
        upgrade(store)
        store.write(lambda connection: create_topic(connection, "made"))
        grants.apply(store, grants.grant(store, Kind.CONSUMER, bare.roles["reader"], RoleScope(("made",))))
        assert [(each.kind, each.role) for each in grants.list_grants(store)] == [
            ("owner", bare.roles["upkeep"]),
            ("consumer", bare.roles["reader"]),
        ]
    with open_store(bare.url("reader")) as store:
        assert store.read(list_topics) == ["made"]
    with bare.connect() as connection:
        # The segments of the log with it: who empties them has to own them.
        others = connection.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = 'txnstore'::regnamespace"
            " AND relkind IN ('r', 'p', 'v', 'S') AND pg_get_userbyid(relowner) <> %s",
            [bare.roles["upkeep"]],
        ).fetchall()
        assert others == []
        connection.execute(sql.SQL("REASSIGN OWNED BY {} TO postgres").format(sql.Identifier(bare.roles["upkeep"])))


@pytest.mark.slow
def test_limits_are_for_stores_of_one_database(bare, new_database, txnstore_postgres_server):
    urls = f"{txnstore_postgres_server.url(bare.name)},{txnstore_postgres_server.url(new_database())}"
    with open_cluster(urls) as cluster:
        for store in cluster.stores():
            grants.apply(store, grants.grant(store, Kind.PRODUCER, bare.roles["writer"]))
            with pytest.raises(InvalidRequest, match="several databases"):
                grants.grant(store, Kind.PRODUCER, bare.roles["writer"], TENANTS_OWN)
            grants.apply(store, grants.revoke(store, bare.roles["writer"]))


@pytest.mark.slow
def test_who_sees_a_transaction_but_not_its_group_cannot_end_it_without_the_group(bare):
    """Its offsets would stay pending, or be lost: who sees all of it ends it."""
    bare.grant_all()
    bare.create_topics("tenant.orders")
    for kind in (Kind.PRODUCER, Kind.CONSUMER):
        bare.grant(kind, "reader", RoleScope(("tenant.*",), (), ("tenant-*",)))
    producer, consumer = bare.work(TENANT, "tenant.orders", "tenant")
    with producer, consumer:
        with open_store(bare.url("reader")) as store, pytest.raises(PermissionDenied):
            TransactionCoordinator(store).init_producer_id("tenant-id")
        producer.commit_transaction(PATIENCE_SECONDS)
        wanted = consumer.position([TopicPartition("tenant.orders", 0)])[0].offset
        with bare.consumer(TENANT, "tenant-alone") as alone:
            (committed,) = alone.committed([TopicPartition("tenant.orders", 0)], PATIENCE_SECONDS)
        assert committed.offset == wanted


@pytest.mark.slow
def test_a_coordinator_does_all_that_clients_do(bare, client_path):
    bare.grant(Kind.COORDINATOR, "upkeep")
    with open_store(bare.url("upkeep")) as store:
        client_path(store)


@pytest.mark.slow
@pytest.mark.parametrize("may_call", [True, False], ids=["may call the functions", "may not"])
def test_who_may_not_call_the_functions_commits_by_statements(bare, may_call):
    bare.grant_all()
    bare.create_topics("orders")
    with bare.connect() as connection:
        for name in () if may_call else ("commit_transaction", "commit_transaction_within"):
            for role in ("PUBLIC", bare.roles["worker"]):
                connection.execute(f"REVOKE EXECUTE ON FUNCTION txnstore.{name} FROM {role}")
        calls = (
            "SELECT count(*) FROM pg_catalog.pg_proc WHERE proname = 'commit_transaction'"
            " AND pg_catalog.has_function_privilege(%s, oid, 'execute')"
        )
        assert connection.execute(calls, [bare.roles["worker"]]).fetchone() == (int(may_call),)
    with bare.producer("worker", transactional_id="worker") as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        for number in range(2):
            producer.begin_transaction()
            producer.produce("orders", str(number))
            producer.commit_transaction(PATIENCE_SECONDS)
    with bare.consumer("worker", "readers") as consumer:
        consumer.subscribe(["orders"])
        assert [message.value() for message in consumer.consume(2, PATIENCE_SECONDS)] == [b"0", b"1"]


@pytest.mark.slow
def test_one_refused_transaction_takes_the_short_way_from_no_other(bare):
    """What was refused within the function says nothing of whether the role may call it."""
    bare.grant_all()
    (partition_id,) = bare.store.write(lambda connection: create_topic(connection, "orders")).partition_ids
    with open_store(bare.url("reader")) as store:
        with pytest.raises(PermissionDenied):
            append_at_once(store, [Append(partition_id, encode([Record(b"forged")]))], NO_PRODUCER)
        assert store.has_commit_function


@pytest.mark.slow
def test_the_outbox_of_a_writer_leaves_its_rows_to_others_and_says_so_once(bare, caplog):
    bare.grant_all()
    bare.create_topics("orders")
    with closing(Outbox(bare.url("writer"))) as outbox, bare.connect("writer") as connection:
        for _ in range(2):
            with connection.transaction():
                outbox.produce(connection, "orders", "row")
    assert sum("may not move rows of the outbox" in record.getMessage() for record in caplog.records) == 1
    with bare.consumer("upkeep", "readers") as consumer:
        consumer.subscribe(["orders"])
        assert len(consumer.consume(2, PATIENCE_SECONDS)) == 2


@pytest.mark.slow
def test_the_command_prints_applies_lists_and_takes_back(bare):
    url = ["--url", bare.server.url(bare.name)]
    granting = ["grant", "producer", bare.roles[TENANT], "--topic", "tenant.*", "--transactional-id", "tenant-*", *url]
    before = catalogue(bare)
    code, printed = run(*granting)
    assert code == 0
    assert printed == grants.printed(
        grants.grant(bare.store, Kind.PRODUCER, bare.roles[TENANT], RoleScope(("tenant.*",), (), ("tenant-*",)))
    )
    assert catalogue(bare) == before
    code, told = run(*granting, "--apply")
    assert code == 0
    assert f"the role {bare.roles[TENANT]} is a producer, limited to topics: tenant.*" in told
    assert catalogue(bare) != before
    code, listed = run("list", "--json", *url)
    assert json.loads(listed)[1] == {
        "role": bare.roles[TENANT],
        "kind": "producer",
        "bounds": "topics: tenant.*; transactional ids: tenant-*",
    }
    assert run("revoke", bare.roles[TENANT], "--apply", *url)[0] == 0
    assert len(json.loads(run("list", "--json", *url)[1])) == 1


def test_an_sqlite_file_has_no_roles(txnstore_sqlite_url):
    with pytest.raises(InvalidRequest, match="has no roles"):
        run("list", "--url", txnstore_sqlite_url)


def test_a_roles_names_are_those_of_its_kinds():
    assert {kind for kinds in ROLES.values() for kind in kinds} == set(Kind) - {Kind.OWNER}
