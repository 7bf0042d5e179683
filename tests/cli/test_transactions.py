"""`txnstore transactions`: shows who holds up readers, and ends it."""

from __future__ import annotations

import json
import os
import re
import socket
from contextlib import closing
from unittest.mock import ANY

import psycopg
import pytest
from sqlalchemy import delete, insert, select, update

from tests.clients.producer.transactional import allow_two_phase_commit
from tests.tools.hanging import plant
from tests.transactions.bench import sent_offsets
from txnstore.clients.model.errors import KafkaException
from txnstore.clients.producer.producer import Producer
from txnstore.db.cluster.cluster import Cluster, open_cluster
from txnstore.db.opening import open_store
from txnstore.db.schema import producer_states, transaction_branches, transactions
from txnstore.db.store import server_now_ms
from txnstore.errors import StoreBusy, StoreUnavailable
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.partition_rows import allocate_producer_id
from txnstore.log.topics import get_topic
from txnstore.model import ProducerIdentity, Record
from txnstore.testing.postgres_server import connection_string
from txnstore.transactions.administration import abort_shown_transactions
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.protocol import TIMEOUT_NEVER_MS


@pytest.fixture
def opened(url, done):
    """A producer in the middle of a transaction that has written to orders-1."""
    done("topics", "create", "orders", "-p", "2")
    with Producer({"bootstrap.servers": url, "transactional.id": "load"}) as producer:
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce("orders", b"open", partition=1)
        assert producer.flush(30) == 0
        yield producer


@pytest.mark.slow
def test_transactions_are_listed_and_described(opened, done, answer):
    done("produce", "orders", "-t", "done", stdin=b"x\n")
    listed = answer("transactions", "list")
    assert [(row["transactional_id"], row["state"]) for row in listed] == [
        ("done", "CompleteCommit"),
        ("load", "Ongoing"),
    ]
    assert [row["transactional_id"] for row in answer("transactions", "list", "--state", "Ongoing")] == ["load"]
    assert [row["transactional_id"] for row in answer("transactions", "list", "--pattern", "d.*")] == ["done"]
    by_id = answer("transactions", "list", "--producer-id", listed[1]["producer_id"])
    assert [row["transactional_id"] for row in by_id] == ["load"]
    assert answer("transactions", "list", "--longer-than", "3600000") == []
    assert done("transactions", "list").splitlines()[0].split("  ") == [
        "TRANSACTIONAL ID",
        "COORDINATOR",
        "PRODUCER ID",
        "STATE",
    ]
    (described,) = answer("transactions", "describe", "load")
    assert described["partitions"] == ["orders-1"]
    assert described["duration_ms"] >= 0
    assert described["timeout_ms"] == 60_000
    assert "CompleteCommit" in done("transactions", "describe", "load", "done")


def test_the_producers_of_a_partition_are_described(opened, answer, done):
    (row,) = answer("transactions", "describe-producers", "orders")
    assert (row["partition"], row["transaction_start_offset"], row["last_sequence"]) == (1, 0, 0)
    assert answer("transactions", "describe-producers", "orders", "-p", "0") == []
    assert done("transactions", "describe-producers", "orders").splitlines()[0].split()[0] == "PARTITION"


@pytest.mark.slow
def test_a_transaction_is_aborted_by_its_id(opened, run, done, answer):
    refused = run("transactions", "abort", "load", stdin=b"n\n")
    assert refused.code == 1
    assert refused.out.strip() == ""
    assert "Abort the open transaction of load, in orders-1?" in refused.err
    assert answer("transactions", "list")[0]["state"] == "Ongoing"
    assert "was aborted" in done("transactions", "abort", "load", "--yes")
    assert "nothing was changed" in done("transactions", "abort", "load", "--yes")
    with pytest.raises(KafkaException):
        opened.commit_transaction(30)
    assert done("consume", "orders") == ""


@pytest.mark.slow_but_first
@pytest.mark.parametrize("by", ["id", "producer"])
@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("outcome", ["committed", "aborted"])
def test_what_has_ended_before_the_answer_is_told_of_and_what_came_after_it_is_left_alone(
    opened, run, done, answer, monkeypatch, outcome, goes_on, by
):
    """Who is told that what was committed is aborted writes it once more."""

    def confirm(*_, **__):
        opened.commit_transaction(30) if outcome == "committed" else opened.abort_transaction(30)
        if goes_on:
            opened.begin_transaction()
            opened.produce("orders", b"newer", partition=1)
            assert opened.flush(30) == 0
        return True

    (row,) = answer("transactions", "list")
    monkeypatch.setattr("typer.confirm", confirm)
    ended = run("transactions", "abort", *(["load"] if by == "id" else ["--producer-id", row["producer_id"]]))
    assert (ended.code, ended.out) == (1, "")
    newer = ", and a newer one of load is open" if goes_on else ""
    by_whom = ", by somebody else" if outcome == "aborted" else ""
    assert ended.err == (
        f"txnstore: the transaction of load was {outcome} meanwhile{by_whom}{newer}; nothing was changed\n"
    )
    if goes_on:
        opened.commit_transaction(30)
    assert done("consume", "orders").split() == ["open"] * (outcome == "committed") + ["newer"] * goes_on


def test_what_its_program_completes_is_aborted_by_nobody_who_did_not_say_so(url, run, done, answer):
    """The database of the program may have committed its part already."""
    done("topics", "create", "orders")
    allow_two_phase_commit(url)
    with Producer(
        {"bootstrap.servers": url, "transactional.id": "bank", "transaction.two.phase.commit.enable": True}
    ) as producer:
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce("orders", b"paid")
        producer.prepare_transaction(30)
        (row,) = answer("transactions", "list-open")
        assert row["freed_by"] is None
        place = ["--topic", "orders", "--partition", "0"]
        producer_id, epoch = row["producer_id"], row["producer_epoch"]
        for by in (
            ["bank"],
            ["--producer-id", producer_id],
            [*place, "--start-offset", "0"],
            [*place, "--producer-id", producer_id, "--producer-epoch", epoch],
        ):
            refused = run("transactions", "abort", *by, "--yes")
            assert (refused.code, refused.out) == (1, "")
            assert "may have committed its part already" in refused.err
            assert "nothing was changed" in refused.err
        assert answer("transactions", "list-open") == [row | {"open_for_ms": ANY}]
        assert "was aborted" in done("transactions", "abort", "bank", "--even-if-prepared", "--yes")
    assert done("consume", "orders") == ""


def test_what_another_producer_has_taken_over_before_the_answer_is_left_open(url, opened, run, answer, monkeypatch):
    def confirm(*_, **__):
        with open_store(url) as store:
            epoch = transactions.c.producer_epoch
            store.write(lambda c: c.execute(update(transactions).values(producer_epoch=epoch + 1)))
        return True

    monkeypatch.setattr("typer.confirm", confirm)
    ended = run("transactions", "abort", "load")
    assert ended.code == 1
    assert "the transaction of load is still open, and another producer has taken it over meanwhile" in ended.err
    assert ended.err.endswith("; nothing was changed\n")
    assert answer("transactions", "list")[0]["state"] == "Ongoing"


@pytest.mark.slow_but_first
@pytest.mark.parametrize("by", ["offset", "producer"])
def test_a_transaction_is_aborted_by_where_it_holds_up(opened, run, done, answer, by):
    (row,) = answer("transactions", "describe-producers", "orders")
    where = ["transactions", "abort", "--topic", "orders", "-p", "1", "--yes"]
    assert run(*where, "--start-offset", "7").code == 1
    unknown = run(*where, "--producer-id", "99", "--producer-epoch", "0")
    assert (unknown.code, "`txnstore transactions describe-producers`" in unknown.err) == (1, True), unknown
    assert answer("info")["counts"]["open_transactions"] == 1
    if by == "offset":
        done(*where, "--start-offset", row["transaction_start_offset"])
    else:
        done(*where, "--producer-id", row["producer_id"], "--producer-epoch", row["producer_epoch"])
    assert answer("info")["counts"]["open_transactions"] == 0
    assert "endTxnMarker: ABORT" in done("dump", "log", "orders", "-p", "1")
    with pytest.raises(KafkaException):
        opened.commit_transaction(30)


def test_what_holds_readers_back_is_shown_with_who_it_is_and_what_ends_it(opened, run, done, answer):
    (row,) = answer("transactions", "list-open")
    assert (row["topic"], row["partition"], row["first_offset"], row["state"]) == ("orders", 1, 0, "Ongoing")
    assert (row["client_id"], row["client_process_id"]) == ("rdkafka", os.getpid())
    heading, line = done("transactions", "list-open", "orders").splitlines()
    assert heading.split("  ")[0] == "TOPIC"
    assert f"rdkafka ({socket.gethostname()}, process {os.getpid()})" in line
    assert line.endswith("txnstore transactions abort load")
    assert answer("transactions", "list-open", "orders", "-p", "0") == []
    assert run("transactions", "list-open", "-p", "0").code == 2
    assert run("transactions", "list-open", "unknown").code == 1


def shown(text):
    """Return the cells of a table's only line by their headings."""
    heading, line = (re.split(" {2,}", each.strip()) for each in text.splitlines())
    return dict(zip(heading, line, strict=True))


def test_who_writes_is_shown_with_its_shares_elsewhere_and_the_session_at_work_if_there_are_any(opened, url, done):
    always = ["TOPIC", "PARTITION", "SINCE OFFSET", "OPEN FOR", "TRANSACTIONAL ID", "PRODUCER ID", "CLIENT", "STATE"]
    cells = shown(done("transactions", "list-open"))
    assert list(cells) == [*always, "FREED BY"]
    with open_store(url) as store:
        (row,) = store.read(lambda connection: connection.execute(select(transactions)).all())
        assert cells["PRODUCER ID"] == str(row.producer_id)
        share = {
            "transactional_id": "load",
            "producer_id": row.producer_id,
            "producer_epoch": row.producer_epoch,
            "database_label": "db2:5432/bank",
            "database_identity": "1:1",
            "transaction_xid8": "3",
            "registered_ms": 1,
        }
        shares = [{**share, "gid": gid} for gid in ("txnstore_a", "txnstore_b")]
        store.write(lambda connection: connection.execute(insert(transaction_branches), shares))
        cells = shown(done("transactions", "list-open"))
        assert list(cells) == [*always, "PREPARED AS", "FREED BY"]
        assert cells["PREPARED AS"] == "txnstore_a, txnstore_b"
        if store.backend.name == "postgresql":
            with closing(psycopg.connect(connection_string(url))) as stuck:
                stuck.execute("SELECT * FROM txnstore.transactions FOR UPDATE")
                cells = shown(done("transactions", "list-open"))
                assert list(cells) == [*always, "PREPARED AS", "BACKEND PID", "FREED BY"]
                assert cells["BACKEND PID"] == str(stuck.info.backend_pid)
        # What was made up is no share that anybody would end.
        store.write(lambda connection: connection.execute(delete(transaction_branches)))


def test_a_group_has_a_column_where_one_waits(url, done):
    done("topics", "create", "orders")
    with open_store(url) as store:
        (partition_id,) = store.read(lambda connection: get_topic(connection, "orders")).partition_ids
        coordinator = TransactionCoordinator(store)
        producer = coordinator.init_producer_id("load").identity
        coordinator.send_offsets("load", producer, sent_offsets("billing", {partition_id: 3}))
    cells = shown(done("transactions", "list-open"))
    assert (list(cells)[3], cells["GROUP"], cells["SINCE OFFSET"]) == ("GROUP", "billing", "-")


@pytest.mark.slow
def test_what_hangs_is_ended_in_one_go(url, done, run):
    done("topics", "create", "orders", "-p", "2")
    with open_store(url) as store:
        for partition_id in store.read(lambda connection: get_topic(connection, "orders")).partition_ids:
            producer = ProducerIdentity(store.write(allocate_producer_id), 0)
            # Of no transaction that a coordinator knows, as only damage leaves it; and then it is old.
            batch = encode([Record(b"x")], producer=producer, base_sequence=0, is_transactional=True)
            items = [Append(partition_id, batch)]
            store.write(lambda c, items=items: append(c, items, coordinated=True))
        # What is younger than 20 minutes is only ended by its own command.
        assert len(done("transactions", "find-hanging", "--abort", "--yes").splitlines()) == 1
        assert len(done("transactions", "list-open").splitlines()) == 3
        for minutes, code in ((19, 0), (21, 1)):
            moment_ms = store.read(lambda c: c.execute(select(server_now_ms())).scalar_one()) - minutes * 60_000
            store.write(lambda c, then=moment_ms: c.execute(producer_states.update().values(last_timestamp_ms=then)))
            found = run("transactions", "find-hanging", "--abort", "--json", stdin=b"n\n")
            # The question is not among the results.
            assert (found.code, len(json.loads(found.out))) == (code, 2 * code)
    ended = run("transactions", "find-hanging", "--abort", "--yes")
    assert (ended.code, ended.err) == (0, "2 transactions were aborted\n")
    assert len(ended.out.splitlines()) == 3
    assert len(done("transactions", "find-hanging").splitlines()) == 1
    assert len(done("transactions", "list-open").splitlines()) == 1


def test_many_are_aborted_by_name_and_age(url, opened, run, done, answer):
    with open_store(url) as store:
        partition_ids = store.read(lambda connection: get_topic(connection, "orders")).partition_ids
        names = plant(store, partition_ids, 7, timeout_ms=60_000)
        prepared = transactions.c.transactional_id == names[0]
        never = transactions.update().where(prepared).values(timeout_ms=TIMEOUT_NEVER_MS, deadline_ms=None)
        store.write(lambda connection: connection.execute(never))
    refused = run("transactions", "abort", "--pattern", "hanging-.*", stdin=b"n\n")
    assert refused.code == 1
    assert "1 is left out: its program completes it\n" in refused.err
    assert f"Abort 6 open transactions: {', '.join(names[1:6])}, ...?" in refused.err
    nothing = done("transactions", "abort", "--pattern", "hanging-.*", "--longer-than", "3600000", "--yes")
    assert nothing == "no such transaction is open; nothing was changed\n"
    assert len(answer("transactions", "list", "--state", "Ongoing")) == 8
    ended = done("transactions", "abort", "--pattern", "hanging-.*", "--longer-than", "0", "--yes")
    assert ended == "6 transactions were aborted\n"
    # The one that another database decides stays.
    left = {row["transactional_id"] for row in answer("transactions", "list", "--state", "Ongoing")}
    assert left == {"load", names[0]}
    again = run("transactions", "abort", "--pattern", "hanging-.*", "--yes")
    assert (again.code, again.out) == (0, "no other such transaction is open; nothing was changed\n")
    assert again.err == "1 is left out: its program completes it\n"
    (described,) = answer("transactions", "describe", names[1])
    assert (described["state"], described["fenced"]) == ("CompleteAbort", "admin: by an administrator")
    opened.commit_transaction(30)


@pytest.mark.parametrize("refusing", [1, 2])
def test_what_one_database_refuses_keeps_nothing_in_another_one_open(url, txnstore, tmp_path, monkeypatch, refusing):
    """What was done is told before what was not."""
    monkeypatch.setenv("TXNSTORE_URL", f"{url},sqlite:///{tmp_path}/second.db")
    with open_cluster(os.environ["TXNSTORE_URL"]) as cluster:
        assert txnstore("topics", "create", "orders").code == 0
        partition_ids = cluster.controller.read(lambda connection: get_topic(connection, "orders")).partition_ids
        names = {
            database_id: plant(cluster.own(database_id), partition_ids, database_id, timeout_ms=60_000, cluster=cluster)
            for database_id in (1, 2)
        }

    def abort(store, *rest):
        if store.database_id == refusing:
            raise StoreBusy("somebody is at work")
        return abort_shown_transactions(store, *rest)

    monkeypatch.setattr("txnstore.cli.bulk_abort.abort_shown_transactions", abort)
    ended = txnstore("transactions", "abort", "--longer-than", "0", "--yes")
    was = {1: "2 transactions were aborted\n", 2: "1 transaction was aborted\n"}[refusing]
    assert (ended.code, ended.out) == (75, was)
    assert ended.err == f"{refusing} may still be open\ntxnstore: somebody is at work\n"
    listed = json.loads(txnstore("transactions", "list", "--state", "Ongoing", "--json").out)
    assert sorted(row["transactional_id"] for row in listed) == sorted(names[refusing])


def test_a_producer_of_a_database_that_is_away_is_not_another_ones(url, txnstore, tmp_path, monkeypatch):
    monkeypatch.setenv("TXNSTORE_URL", f"{url},sqlite:///{tmp_path}/second.db")
    with open_cluster(os.environ["TXNSTORE_URL"]) as cluster:
        (name,) = plant(cluster.controller, [], 1, timeout_ms=60_000, cluster=cluster)
        producer_id = cluster.own(2).write(allocate_producer_id)
        made_up = update(transactions).where(transactions.c.transactional_id == name).values(producer_id=producer_id)
        cluster.controller.write(lambda connection: connection.execute(made_up))
    own = Cluster.own

    def find(cluster, database_id):
        if database_id == 2:
            raise StoreUnavailable("it is away")
        return own(cluster, database_id)

    monkeypatch.setattr(Cluster, "own", find)
    ended = txnstore("transactions", "abort", "--producer-id", producer_id, "--yes")
    assert ended == (75, "", "txnstore: it is away\n")
    assert json.loads(txnstore("transactions", "list", "--json").out)[0]["state"] == "Ongoing"


@pytest.mark.parametrize("by", ["its producer", "where it is open"])
def test_where_two_say_that_they_have_a_producer_neither_is_aborted_by_it(url, opened, run, done, answer, by):
    """The first one by name is not the one that is meant."""
    (row,) = answer("transactions", "list")
    with open_store(url) as store:
        partition_ids = store.read(lambda connection: get_topic(connection, "orders")).partition_ids
        (name,) = plant(store, partition_ids, 1, timeout_ms=60_000)
        of_name = transactions.c.transactional_id == name
        made_up = update(transactions).where(of_name).values(producer_id=row["producer_id"])
        store.write(lambda connection: connection.execute(made_up))
    where = ["--topic", "orders", "-p", "1", "--producer-epoch", row["producer_epoch"]] if by != "its producer" else []
    ended = run("transactions", "abort", "--producer-id", row["producer_id"], *where, "--yes")
    assert (ended.code, ended.out) == (1, "")
    assert (
        f"the transactional ids '{name}' and 'load' both say that they have producer {row['producer_id']}" in ended.err
    )
    opened.commit_transaction(30)
    assert done("consume", "orders").split() == ["open"]


def test_nothing_hangs_that_a_coordinator_knows(opened, answer, done):
    assert answer("transactions", "find-hanging", "--max-transaction-timeout", "0") == []
    assert answer("transactions", "find-hanging", "--topic", "orders", "-p", "1") == []
    assert done("transactions", "find-hanging").split()[0] == "TOPIC"


@pytest.mark.slow
def test_bad_calls_change_nothing(opened, run, answer):
    for arguments, code in (
        (["list", "--state", "ongoing"], 2),
        (["list", "--pattern", "("], 2),
        (["list", "--longer-than", "-1"], 2),
        (["list", "--producer-id", "9" * 20], 2),
        (["describe"], 2),
        (["describe", "nobody"], 1),
        (["describe", ""], 1),
        (["describe", "\ud800"], 1),
        (["describe", "a\0b"], 1),
        (["describe-producers", "nothing"], 1),
        (["describe-producers", "orders", "-p", "2"], 1),
        (["abort"], 2),
        (["abort", "load", "--topic", "orders"], 2),
        (["abort", "--topic", "orders"], 2),
        (["abort", "--topic", "orders", "-p", "1"], 2),
        (["abort", "--topic", "orders", "-p", "1", "--start-offset", "0", "--producer-id", "1"], 2),
        (["abort", "--topic", "orders", "-p", "1", "--producer-id", "1"], 2),
        (["abort", "--topic", "nothing", "-p", "1", "--start-offset", "0"], 1),
        (["abort", "nobody", "--yes"], 1),
        (["abort", "load"], 1),  # nobody is there to answer
        (["abort", "load", "--pattern", "l.*"], 2),
        (["abort", "--topic", "orders", "--longer-than", "0"], 2),
        (["abort", "--pattern", "("], 2),
        (["abort", "--pattern", "l.*", "--even-if-prepared", "--yes"], 2),
        (["abort", "--longer-than", "0", "--coordinator-epoch", "0", "--yes"], 2),
        (["abort", "--longer-than", "-1"], 2),
        (["abort", "--pattern", "l.*"], 1),
        (["find-hanging", "-p", "1"], 2),
        (["find-hanging", "--topic", "nothing"], 1),
    ):
        ended = run("transactions", *arguments)
        assert ended.code == code, (arguments, ended)
        assert "Traceback" not in ended.err
    assert [row["state"] for row in answer("transactions", "list")] == ["Ongoing"]
