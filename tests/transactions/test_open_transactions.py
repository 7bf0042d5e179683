"""What holds readers back: the view, the listing and the commands that they name, on a store and its shell."""

from __future__ import annotations

import json
import math
import os
import shlex
import socket
from collections import Counter
from contextlib import closing
from unittest.mock import patch

import psycopg
import pytest
from sqlalchemy import delete, event, insert, select, text, update

from tests.clients.producer.transactional import allow_two_phase_commit
from tests.tools.crashes import is_commit
from tests.tools.elsewhere import Elsewhere, decide
from tests.tools.least_privilege import as_owner
from tests.transactions.bench import sent_offsets
from txnstore import Producer
from txnstore.cli.program import program_with
from txnstore.db.cluster.cluster import LeftOut, open_cluster
from txnstore.db.cluster.membership import PRODUCER_ID_BITS
from txnstore.db.open_transactions_view import OPEN_TRANSACTIONS_COLUMNS, PENDING_OFFSETS_COLUMNS, pending_offsets
from txnstore.db.opening import open_store
from txnstore.db.portions import FOUND_MAX
from txnstore.db.schema import (
    partition_heads,
    producer_states,
    transaction_branches,
    transaction_groups,
    transaction_partitions,
    transactions,
)
from txnstore.errors import InvalidProducerEpoch, InvalidTransactionState, ProducerFenced, TransactionAbortable
from txnstore.log.append import Append, append
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import encode
from txnstore.log.partition_rows import allocate_producer_id
from txnstore.log.topics import create_topic, get_topic
from txnstore.maintenance.loop import Maintenance
from txnstore.model import ClientProcess, ProducerIdentity, Record
from txnstore.testing.invariants import assert_sound
from txnstore.testing.postgres_server import connection_string
from txnstore.transactions import listing, open_transactions, recovery
from txnstore.transactions.administration import OpenInPartition, abort_open_transaction, abort_open_transactions
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.listing import hanging_in_cluster
from txnstore.transactions.open_transactions import each_held, each_open, each_open_in
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.writers import append_as_writer, join_transaction

pytestmark = pytest.mark.takes_a_coordinator

PATIENCE_SECONDS = 60.0
HOUR_MS = 3_600_000
#: Of a transaction, and of what a partition knows of it.
MOMENTS = {"last_timestamp_ms", "start_ms", "last_update_ms", "deadline_ms"}


@pytest.fixture
def partition_id(store):
    return store.write(lambda connection: create_topic(connection, "orders")).partition_ids[0]


def batch_of(identity, value=b"x"):
    return encode([Record(value)], producer=identity, base_sequence=0, is_transactional=True)


def begin(store, partition_id, transactional_id, client=None, **options):
    """Begin a transaction with one record and return its coordinator and producer."""
    coordinator = TransactionCoordinator(store)
    producer = coordinator.init_producer_id(transactional_id, client=client, **options).identity
    coordinator.append(transactional_id, producer, [Append(partition_id, batch_of(producer))])
    return coordinator, producer


def hang(store, partition_id, epoch=0):
    """Write a record of a transaction that no coordinator knows, as only damage does."""
    producer = ProducerIdentity(store.write(allocate_producer_id), epoch)
    item = Append(partition_id, batch_of(producer))
    store.write(lambda connection: append(connection, [item], coordinated=True))
    return producer


def stable_offset(store, partition_id):
    return store.read(lambda connection: read_bounds(connection, [partition_id]))[partition_id].last_stable_offset


def rows_of_view(store):
    name = "txnstore.open_transactions" if store.backend.name == "postgresql" else "txnstore_open_transactions"
    statement = text(f"SELECT * FROM {name} ORDER BY partition_id, first_offset")
    return store.read(lambda connection: connection.execute(statement).mappings().all())


def command(url, line):
    """Run a command as it stands in a listing."""
    program, *arguments = shlex.split(line)
    assert program == "txnstore"
    if "abort" in arguments:
        arguments.append("--yes")
    names = frozenset(arguments[:1])
    with pytest.raises(SystemExit) as ended:
        program_with(names)(args=["--url", url, *arguments], prog_name=program)
    assert ended.value.code == 0


def test_a_producer_is_named_with_its_process_and_what_frees_its_readers(url):
    options = {"bootstrap.servers": url, "transactional.id": "load-day", "client.id": "loader"}
    with Producer(options) as producer, open_cluster(url) as cluster:
        producer.init_transactions(PATIENCE_SECONDS)
        assert list(each_open(cluster, {})) == []
        producer.begin_transaction()
        producer.produce("orders", b"a")
        assert producer.flush(PATIENCE_SECONDS) == 0
        store = cluster.controller
        (one,) = each_open(cluster, {})
        (row,) = rows_of_view(store)
        assert tuple(row) == tuple(OPEN_TRANSACTIONS_COLUMNS)
        assert one.client == ClientProcess("loader", socket.gethostname(), os.getpid())
        assert (row["client_id"], row["client_host"], row["client_process_id"]) == (
            "loader",
            socket.gethostname(),
            os.getpid(),
        )
        assert (str(one.partition), one.first_offset, one.is_oldest) == ("orders-0", 0, True)
        assert (row["transactional_id"], row["state"], row["timeout_ms"]) == ("load-day", "Ongoing", 60_000)
        assert one.freed_by == row["freed_by"] == "txnstore transactions abort load-day"
        assert 0 <= one.age_ms <= row["open_for_ms"] < PATIENCE_SECONDS * 1000
        assert row["started_ms"] == one.started_ms <= row["last_write_ms"] == one.last_write_ms
        command(url, one.freed_by)
        assert list(each_open(cluster, {})) == []


def test_a_database_that_is_alone_finds_what_hangs_whoever_gave_out_the_producer_id(url):
    with open_cluster(url) as cluster:
        store = cluster.controller
        partition_id = store.write(lambda connection: create_topic(connection, "orders")).partition_ids[0]
        producer = ProducerIdentity((1 << PRODUCER_ID_BITS) + 7, 0)
        item = Append(partition_id, batch_of(producer))
        store.write(lambda connection: append(connection, [item], coordinated=True))
        assert hanging_in_cluster(cluster, {}, 0) == []
        store.write(lambda connection: connection.execute(update(producer_states).values(last_timestamp_ms=0)))
        left_out: LeftOut = {}
        (one,) = hanging_in_cluster(cluster, left_out, 0)
        assert (one.producer_id, str(one.partition), left_out) == (producer.producer_id, "orders-0", {})


def test_a_further_writer_is_named_by_its_own_process(store, partition_id):
    coordinator, producer = begin(store, partition_id, "load", ClientProcess("one", "here", 1))
    writer = join_transaction(store, "load", producer, client=ClientProcess("two", "there", 2))
    append_as_writer(store, writer, [Append(partition_id, batch_of(writer.identity))])
    found = list(each_open_in(store))
    assert [(one.first_offset, one.client, one.is_oldest) for one in found] == [
        (0, ClientProcess("one", "here", 1), True),
        (1, ClientProcess("two", "there", 2), False),
    ]
    assert {one.transactional_id for one in found} == {"load"}
    assert [row["client_host"] for row in rows_of_view(store)] == ["here", "there"]
    # Whoever starts next is named; who does not say who he is, is not taken for somebody else.
    coordinator.init_producer_id("load")
    coordinator, producer = begin(store, partition_id, "load")
    assert [one.client for one in each_open_in(store)] == [None]


@pytest.mark.slow
@pytest.mark.parametrize("transactional_id", ["-rf", "it's; rm *", "a\nb", "ä", ".x", "nightly:7.load_a-b"])
def test_the_command_that_is_named_frees_readers_whatever_the_transactional_id(url, transactional_id):
    with open_store(url) as store:
        partition_id = store.write(lambda connection: create_topic(connection, "orders")).partition_ids[0]
        begin(store, partition_id, transactional_id)
        (one,), (row,) = each_open_in(store), rows_of_view(store)
        assert one.freed_by == row["freed_by"]
        assert ("--start-offset 0" in (one.freed_by or "")) == (transactional_id != "nightly:7.load_a-b")
        command(url, one.freed_by)
        assert stable_offset(store, partition_id) == 2
        assert_sound(store, at_rest=True)


def test_one_that_its_program_completes_is_freed_by_no_command(url):
    """The program's database may have committed it: who aborts what is listed would lose half of it."""
    allow_two_phase_commit(url)
    with open_store(url) as store, open_cluster(url) as cluster:
        partition_id = store.write(lambda connection: create_topic(connection, "orders")).partition_ids[0]
        coordinator, producer = begin(store, partition_id, "bank", enable_two_phase_commit=True)
        coordinator.send_offsets("bank", producer, sent_offsets("billing", {partition_id: 1}))
        (held,) = each_held(cluster, {})
        (one,) = each_open_in(store)
        (row,) = rows_of_view(store)
        (pending,) = held_of_view(store)
        assert (one.timeout_ms, one.freed_by, row["freed_by"]) == (2**31 - 1, None, None)
        assert (held.timeout_ms, held.freed_by, pending["freed_by"]) == (2**31 - 1, None, None)


@pytest.mark.slow
def test_one_that_hangs_and_one_that_is_decided_are_freed_by_what_is_named_too(url, monkeypatch):
    with open_store(url) as store:
        partition_id = store.write(lambda connection: create_topic(connection, "orders")).partition_ids[0]
        hang(store, partition_id, epoch=3)
        _, producer = begin(store, partition_id, "decided")
        separate = TransactionCoordinator(store, Elsewhere(store))
        # It goes away before the markers are written.
        monkeypatch.setattr(separate, "_complete", lambda *_: None)
        separate.end_transaction("decided", producer, commit=True)
        hanging, decided = each_open_in(store)
        assert (hanging.is_hanging, hanging.transactional_id, hanging.producer_epoch) == (True, None, 3)
        assert (decided.is_hanging, decided.state) == (False, TransactionState.PREPARE_COMMIT)
        rows = rows_of_view(store)
        assert [row["state"] for row in rows] == [None, "PrepareCommit"]
        assert [row["freed_by"] for row in rows] == [hanging.freed_by, decided.freed_by]
        monkeypatch.undo()
        for one in (hanging, decided):
            command(url, one.freed_by)
        assert stable_offset(store, partition_id) == 4
        assert_sound(store, at_rest=True)


def test_only_what_its_coordinator_lists_in_the_partition_is_its_transaction(store, partition_id):
    """A transactional id whose own transaction runs elsewhere is not taken for the owner of what hangs here."""
    other = store.write(lambda connection: create_topic(connection, "others")).partition_ids[0]
    _, producer = begin(store, other, "load")
    item = Append(partition_id, batch_of(producer))
    store.write(lambda connection: append(connection, [item], coordinated=True))
    found = {str(one.partition): one.transactional_id for one in each_open_in(store)}
    assert found == {"others-0": "load", "orders-0": None}
    assert [str(one.partition) for one in each_open_in(store, [partition_id])] == ["orders-0"]


def test_its_shares_in_other_databases_are_named(store, partition_id):
    _, producer = begin(store, partition_id, "load")
    shares = [
        {
            "gid": gid,
            "transactional_id": "load",
            "producer_id": producer.producer_id,
            "producer_epoch": producer.epoch,
            "database_label": "db2:5432/bank",
            "database_identity": "1:1",
            "transaction_xid8": "3",
            "registered_ms": 1,
        }
        for gid in ("txnstore_a", "txnstore_b")
    ]
    store.write(lambda connection: connection.execute(insert(transaction_branches), shares))
    (one,), (row,) = each_open_in(store), rows_of_view(store)
    assert tuple(one.prepared_gids) == ("txnstore_a", "txnstore_b")
    assert set(row["prepared_gids"].split(", ")) == {"txnstore_a", "txnstore_b"}


def test_the_session_that_keeps_its_lock_is_named(txnstore_postgresql_url):
    with open_store(txnstore_postgresql_url) as store:
        partition_id = store.write(lambda connection: create_topic(connection, "orders")).partition_ids[0]
        begin(store, partition_id, "load")
        assert [one.backend_pid for one in each_open_in(store)] == [None]
        with closing(psycopg.connect(connection_string(as_owner(txnstore_postgresql_url)))) as stuck:
            stuck.execute("SELECT * FROM txnstore.transactions FOR UPDATE")
            assert [one.backend_pid for one in each_open_in(store)] == [stuck.info.backend_pid]
            stuck.rollback()
            assert [one.backend_pid for one in each_open_in(store)] == [None]


def held_of_view(store):
    return store.read(lambda c: [dict(row) for row in c.execute(select(pending_offsets)).mappings()])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("transactional_id", ["load-day", "it's mine; rm -rf"])
def test_one_that_holds_offsets_alone_is_named_with_what_frees_its_group(url, capsys, transactional_id):
    with open_store(url) as store:
        partition_id = store.write(lambda connection: create_topic(connection, "orders")).partition_ids[0]
        coordinator = TransactionCoordinator(store)
        client = ClientProcess("loader", "here", 7)
        producer = coordinator.init_producer_id(transactional_id, client=client).identity
        coordinator.send_offsets(transactional_id, producer, sent_offsets("billing", {partition_id: 3}))
        # This one has a record, and is named for that.
        other = begin(store, partition_id, "other")[1]
        coordinator.send_offsets("other", other, sent_offsets("shipping", {partition_id: 4}))
    with open_cluster(url) as cluster:
        store = cluster.controller
        one, with_record = each_held(cluster, {})
        row, _ = held_of_view(store)
        assert tuple(row) == tuple(PENDING_OFFSETS_COLUMNS)
        assert (one.group_id, str(one.partition), one.pending_offset) == ("billing", "orders-0", 3)
        assert (row["group_id"], row["topic"], row["partition"], row["pending_offset"]) == ("billing", "orders", 0, 3)
        assert one.transactional_id == row["transactional_id"] == transactional_id
        assert (one.client, row["client_process_id"], row["state"]) == (client, 7, "Ongoing")
        assert one.freed_by == row["freed_by"]
        assert with_record.group_id == "shipping"
        assert [each.group_id for each in each_held(cluster, {}, [partition_id + 1])] == []
        command(url, "txnstore transactions list-open orders --json")
        listed = json.loads(capsys.readouterr().out)
        assert [(each["group"], each["first_offset"], each["freed_by"]) for each in listed] == [
            (None, 0, "txnstore transactions abort other"),
            ("billing", None, one.freed_by),
        ]
        command(url, one.freed_by)
        assert [each.group_id for each in each_held(cluster, {})] == ["shipping"]
        with pytest.raises(ProducerFenced):
            TransactionCoordinator(store).end_transaction(transactional_id, producer, commit=True)
        assert_sound(store)


def test_only_a_group_that_its_coordinator_lists_is_its_transactions(store, partition_id):
    coordinator = TransactionCoordinator(store)
    producer = coordinator.init_producer_id("load").identity
    coordinator.send_offsets("load", producer, sent_offsets("billing", {partition_id: 3}))
    store.write(lambda connection: connection.execute(delete(transaction_groups)))
    (row,) = held_of_view(store)
    assert (row["transactional_id"], row["state"]) == (None, None)
    assert row["freed_by"] == f"txnstore transactions abort --producer-id {producer.producer_id}"
    store.write(lambda c: c.execute(insert(transaction_groups), {"transactional_id": "load", "group_id": "billing"}))
    decide(store, "load", producer, commit=False)
    (row,) = held_of_view(store)
    assert (row["state"], row["freed_by"]) == ("PrepareAbort", "txnstore maintain --once")


def test_pages_of_what_is_held_leave_nothing_out(url, monkeypatch):
    with open_store(url) as store:
        topic = store.write(lambda connection: create_topic(connection, "orders", partition_count=3))
        coordinator = TransactionCoordinator(store)
        for number in range(3):
            producer = coordinator.init_producer_id(f"load {number}").identity
            for group in ("a", "b"):
                coordinator.send_offsets(
                    f"load {number}", producer, sent_offsets(group, dict.fromkeys(topic.partition_ids, number))
                )
    monkeypatch.setattr(open_transactions, "PAGE_ROWS", 4)
    monkeypatch.setattr(open_transactions, "_NEXT_HELD", open_transactions._NEXT_HELD.limit(4))
    with open_cluster(url) as cluster:
        found = [(each.group_id, str(each.partition), each.pending_offset) for each in each_held(cluster, {})]
    assert len(set(found)) == len(found) == 18


def plant(store, hanging_count, abandoned_count):
    """Leave so many transactions open in two partitions that no coordinator knows, and so many that are abandoned.

    All of them are an hour old, behind one that is young.  Returns the topic, and what ends the young one.
    """
    topic = store.write(lambda connection: create_topic(connection, "planted", partition_count=2))
    coordinator, producer = begin(store, topic.partition_ids[0], "young")
    state, row = (
        {
            name: value - HOUR_MS if name in MOMENTS else value
            for name, value in store.read(lambda c, table=table: c.execute(select(table)).mappings().one()).items()
            if table.c[name].computed is None
        }
        for table in (producer_states, transactions)
    )
    states = [
        state
        | {
            "partition_id": topic.partition_ids[number % 2],
            "producer_id": 1_000 + number,
            "transaction_first_offset": 1 + number,
        }
        for number in range(hanging_count + abandoned_count)
    ]
    # Those of which there are few are spread over the others, in both partitions.
    few = states[:: len(states) // min(hanging_count, abandoned_count)][: min(hanging_count, abandoned_count)]
    known = few if abandoned_count <= hanging_count else [each for each in states if each not in few]
    ids = {f"abandoned {each['producer_id']}": each for each in known}
    rows = [row | {"transactional_id": name, "producer_id": each["producer_id"]} for name, each in ids.items()]
    listed = [{"transactional_id": name, "partition_id": each["partition_id"]} for name, each in ids.items()]

    def work(connection):
        connection.execute(insert(producer_states), states)
        connection.execute(insert(transactions), rows)
        connection.execute(insert(transaction_partitions), listed)
        connection.execute(partition_heads.update().values(next_offset=len(states) + 1))

    store.write(work)
    return topic, lambda: coordinator.end_transaction("young", producer, commit=True)


def commits_of(store, work):
    """Return how many database transactions the work takes."""
    commits = 0

    def note(connection, cursor, statement, *_):
        nonlocal commits
        commits += is_commit(statement)

    event.listen(store.engine, "before_cursor_execute", note)
    try:
        work()
    finally:
        event.remove(store.engine, "before_cursor_execute", note)
    return commits


def check_found_and_ended(url, hanging_count, abandoned_count, page_rows, capsys):
    """Find everything by pages of so many rows, know what hangs from what is known, and end all that is old."""
    with open_store(url) as store:
        topic, end_the_young_one = plant(store, hanging_count, abandoned_count)
        longest = 0
        original = store.read

        def read(work, **options):
            nonlocal longest
            page, through = original(work, **options)
            longest = max(longest, len(page))
            return page, through

        with patch.object(store, "read", read):
            found = list(each_open_in(store))
            of_first = list(each_open_in(store, topic.partition_ids[:1]))
        assert 0 < longest <= page_rows
        assert list(map(keys_of, of_first)) == [keys_of(one) for one in found if one.partition.partition == 0]
        assert len(found) == len({(one.partition, one.first_offset) for one in found})
        assert sum(one.is_oldest for one in found) == 2
        rows = rows_of_view(store)
        assert Counter(row["state"] for row in rows) == {None: hanging_count, "Ongoing": abandoned_count + 1}
        assert list(map(keys_of, found)) == list(map(keys_of_row, rows))

        command(url, "txnstore transactions find-hanging --abort --yes --json")
        told = capsys.readouterr()
        listed = [(each["partition"], each["start_offset"], each["producer_id"]) for each in json.loads(told.out)]
        assert listed == [(r["partition"], r["first_offset"], r["producer_id"]) for r in rows if r["state"] is None]
        assert f"{hanging_count} transactions were aborted" in told.err
        left = [keys_of(one) for one in found if not one.is_hanging]
        assert list(map(keys_of_row, rows_of_view(store))) == left

        maintenance, done = Maintenance(store), {}
        commits = commits_of(store, lambda: done.update(maintenance.run_once()))
        commits -= commits_of(store, maintenance.run_once)
        assert done["timed out transactions aborted"] == abandoned_count
        # A look at each page of those that are due, what is aborted of it together, and a last turn.
        portions_of_page = 1 + math.ceil(FOUND_MAX / recovery.ABORTED_MIN)
        assert commits <= (abandoned_count // FOUND_MAX + 1) * portions_of_page + 4
        (young,) = each_open_in(store)
        assert young.transactional_id == "young"
        first, second = topic.partition_ids
        bounds = store.read(lambda connection: read_bounds(connection, [first, second]))
        assert bounds[first].last_stable_offset == young.first_offset
        assert bounds[second].last_stable_offset == bounds[second].high_watermark
        end_the_young_one()
        bounds = store.read(lambda connection: read_bounds(connection, [first]))
        assert bounds[first].last_stable_offset == bounds[first].high_watermark


def keys_of(one):
    return one.partition.partition, one.first_offset, one.transactional_id, one.freed_by


def keys_of_row(row):
    return row["partition"], row["first_offset"], row["transactional_id"], row["freed_by"]


@pytest.mark.slow
def test_pages_leave_nothing_out(url, capsys, monkeypatch):
    monkeypatch.setattr(open_transactions, "_END", open_transactions._END.offset(2))
    monkeypatch.setattr(listing, "PAGE_ROWS", 3)
    monkeypatch.setattr(listing, "_HANGING", listing._HANGING.limit(3))
    check_found_and_ended(url, 10, 5, 3, capsys)


def test_a_page_reads_no_more_than_is_on_it(txnstore_postgresql_url, monkeypatch):
    """Else each page of so many would take as long as all of them."""
    monkeypatch.setattr(open_transactions, "_END", open_transactions._END.offset(99))
    explained = []

    def explain(connection, cursor, statement, parameters, *_):
        if "open_transactions" in statement:
            cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters)
            explained.append(cursor.fetchone()[0][0]["Plan"])

    with open_store(txnstore_postgresql_url) as store:
        plant(store, 500, 500)
        # Else the plan is by what was counted before, if anything was.
        store.write(lambda connection: connection.exec_driver_sql("ANALYZE"))
        event.listen(store.engine, "before_cursor_execute", explain)
        assert len(list(each_open_in(store))) == 1_001
        event.remove(store.engine, "before_cursor_execute", explain)
    looks = [node for plan in explained for node in nodes_of(plan) if node.get("Alias") == "opened"]
    assert sum(node["Actual Rows"] * node["Actual Loops"] for node in looks) == 1_001


def nodes_of(plan):
    yield plan
    for each in plan.get("Plans", ()):
        yield from nodes_of(each)


@pytest.mark.slow
@pytest.mark.parametrize(("hanging_count", "abandoned_count"), [(10_000, 10), (10, 10_000)])
def test_ten_thousand_are_found_and_ended(url, capsys, hanging_count, abandoned_count):
    check_found_and_ended(url, hanging_count, abandoned_count, listing.PAGE_ROWS, capsys)


def test_of_many_that_are_to_be_ended_those_that_are_known_or_over_go_by_themselves(store, partition_id):
    hanging, over, newer = (hang(store, partition_id) for _ in range(3))
    coordinator, known = begin(store, partition_id, "known")
    joined = join_transaction(store, "known", known)
    append_as_writer(store, joined, [Append(partition_id, batch_of(joined.identity))])
    abort_open_transaction(store, OpenInPartition(partition_id, over))
    alone = [hanging, over, known, joined.identity]
    targets = [OpenInPartition(partition_id, producer) for producer in alone]
    assert stable_offset(store, partition_id) == 0
    # The writer's is over with its transaction.
    assert abort_open_transactions(store, [*targets, targets[0]]) == 2
    (left,) = each_open_in(store)
    assert (left.producer_id, left.is_hanging) == (newer.producer_id, True)
    with pytest.raises(TransactionAbortable, match="administrator"):
        coordinator.end_transaction("known", known, commit=True)
    with pytest.raises(InvalidProducerEpoch):
        # As an old listing says.
        abort_open_transactions(store, [OpenInPartition(partition_id, ProducerIdentity(newer.producer_id, 7))])
    assert [one.producer_id for one in each_open_in(store)] == [newer.producer_id]
    assert abort_open_transactions(store, [OpenInPartition(partition_id, newer)]) == 1
    bounds = store.read(lambda connection: read_bounds(connection, [partition_id]))[partition_id]
    assert bounds.last_stable_offset == bounds.high_watermark


def test_what_the_coordinator_does_not_list_is_aborted_with_the_rest_and_nothing_by_what_is_not_open(
    store, partition_id
):
    listed, idle = store.write(lambda connection: create_topic(connection, "others", partition_count=2)).partition_ids
    coordinator, producer = begin(store, listed, "known")
    store.write(lambda connection: append(connection, [Append(partition_id, batch_of(producer))], coordinated=True))
    with pytest.raises(InvalidTransactionState):
        abort_open_transaction(store, OpenInPartition(idle, producer))
    coordinator.append("known", producer, [])
    abort_open_transaction(store, OpenInPartition(partition_id, producer))
    assert_sound(store, at_rest=True)


def test_the_end_of_what_a_producer_left_hanging_leaves_its_next_transaction_open(store, partition_id):
    other_id = store.write(lambda connection: create_topic(connection, "others")).partition_ids[0]
    coordinator = TransactionCoordinator(store)
    old = coordinator.init_producer_id("known").identity
    store.write(lambda connection: append(connection, [Append(partition_id, batch_of(old))], coordinated=True))
    coordinator, new = begin(store, other_id, "known")
    assert (new.producer_id, new.epoch) == (old.producer_id, old.epoch + 1)
    abort_open_transaction(store, OpenInPartition(partition_id, old))
    assert stable_offset(store, partition_id) == 2
    coordinator.end_transaction("known", new, commit=True)
    assert_sound(store, at_rest=True)


def test_many_that_hang_are_ended_by_as_many_database_transactions_as_a_few(store, partition_id):
    counts = []
    for count in (2, 20):
        targets = [OpenInPartition(partition_id, hang(store, partition_id)) for _ in range(count)]
        commits: list[str] = []

        def note(connection, cursor, statement, *_, commits=commits):
            commits += [statement] if is_commit(statement) else []

        event.listen(store.engine, "before_cursor_execute", note)
        assert abort_open_transactions(store, targets) == count
        event.remove(store.engine, "before_cursor_execute", note)
        counts.append(len(commits))
    assert counts[0] == counts[1] > 0


def test_a_producer_that_was_aborted_by_its_command_learns_of_it(url):
    with Producer({"bootstrap.servers": url, "transactional.id": "load"}) as producer, open_store(url) as store:
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        producer.produce("orders", b"a")
        assert producer.flush(PATIENCE_SECONDS) == 0
        (one,) = each_open_in(store)
        coordinator = TransactionCoordinator(store)
        target = OpenInPartition(
            store.read(lambda connection: get_topic(connection, "orders")).partition_ids[0],
            ProducerIdentity(one.producer_id, one.producer_epoch),
        )
        abort_open_transaction(store, target)
        with pytest.raises(TransactionAbortable):
            coordinator.end_transaction("load", ProducerIdentity(one.producer_id, one.producer_epoch), commit=True)
        producer.abort_transaction(PATIENCE_SECONDS)
        assert [each.client for each in each_open_in(store)] == []
