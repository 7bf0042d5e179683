"""`txnstore verify`: proves a sound store, finds what is wrong, and watches a live one."""

from __future__ import annotations

import json
import signal

import pytest
from sqlalchemy import delete, func, select, update

from txnstore.cli import verify as command
from txnstore.cli.output import CommandFailed
from txnstore.db.cluster.cluster import open_cluster
from txnstore.db.opening import open_store
from txnstore.db.schema import partition_heads, producer_states, record_batches, transactions
from txnstore.errors import StoreUnavailable
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.topics import create_topic, delete_topic
from txnstore.model import Record
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.verification import verify as verification
from txnstore.verification.invariants import Invariant, Violation
from txnstore.verification.invariants import Place as InStore
from txnstore.verification.partitions import partition_violations
from txnstore.verification.verify import find_violations, verify


@pytest.fixture
def opened(url):
    """A store with two partitions, each with a committed transaction."""
    with open_store(url) as store:
        ids = store.write(lambda connection: create_topic(connection, "orders", partition_count=2)).partition_ids
        for number, partition_id in enumerate(ids):
            write(store, partition_id, f"worker-{number}")
        yield store


def write(store, partition_id, transactional_id):
    coordinator = TransactionCoordinator(store)
    producer = coordinator.init_producer_id(transactional_id, 60_000).identity
    records = [Record(b"a", timestamp_ms=5), Record(b"b", timestamp_ms=6)]
    batch = encode(records, producer=producer, base_sequence=0, is_transactional=True)
    coordinator.append(transactional_id, producer, [Append(partition_id, batch)])
    coordinator.end_transaction(transactional_id, producer, commit=True)


def damage(store):
    """Break a checksum in the second partition."""
    ids = store.read(lambda c: sorted(c.execute(select(partition_heads.c.partition_id)).scalars()))
    first = (record_batches.c.partition_id == ids[1]) & (record_batches.c.base_offset == 0)
    store.write(lambda c: c.execute(update(record_batches).where(first).values(crc=1)))


def write_damaged(store, partition):
    """Write a batch that does not agree with its checksum: what was found right is not read again so soon."""
    ids = store.read(lambda c: sorted(c.execute(select(partition_heads.c.partition_id)).scalars()))

    def work(connection):
        append(connection, [Append(ids[partition], encode([Record(b"a", timestamp_ms=5)]))])
        last = select(func.max(record_batches.c.last_offset)).where(record_batches.c.partition_id == ids[partition])
        here = (record_batches.c.partition_id == ids[partition]) & (
            record_batches.c.last_offset == last.scalar_subquery()
        )
        connection.execute(update(record_batches).where(here).values(crc=1))

    store.write(work)


def test_a_sound_store_is_found_sound(run, opened):
    ended = run("verify")
    assert (ended.code, ended.out) == (0, "")
    assert ended.err.endswith(": nothing is wrong\n")
    assert json.loads(run("verify", "--json").out) == []


def test_what_is_wrong_is_said_with_place_and_remedy(run, opened):
    damage(opened)
    ended = run("verify")
    assert ended.code == 1
    first, broken, remedy, *_ = ended.out.splitlines()
    assert first.startswith("orders-1, offset 0: ")
    assert broken.startswith("  broken: a batch agrees with its checksum")
    assert remedy.startswith("  remedy: stop its writers")
    assert ended.err.endswith("1 thing is wrong\n")
    ended = run("verify", "--json")
    assert ended.code == 1
    (found,) = json.loads(ended.out)
    assert {**found, "seen": "", "holds": "", "remedy": ""} == {
        "invariant": "BATCHES_WHOLE",
        "holds": "",
        "database": None,
        "topic": "orders",
        "partition": 1,
        "partition_id": found["partition_id"],
        "offset": 0,
        "transactional_id": None,
        "group": None,
        "gid": None,
        "seen": "",
        "remedy": "",
    }


def test_a_large_partition_may_be_read_for_long(txnstore, txnstore_postgresql_url, monkeypatch):
    seen = {}
    check = partition_violations

    def noting(connection, partition_id, **options):
        names = ("transaction_timeout", "statement_timeout", "idle_in_transaction_session_timeout")
        for name in names:
            text = connection.exec_driver_sql("SELECT setting FROM pg_settings WHERE name = %s", (name,)).scalar()
            # Servers before version 17 do not limit a whole transaction.
            seen[name] = 3_600_000 if text is None else int(text)
        return check(connection, partition_id, **options)

    with open_store(txnstore_postgresql_url) as store:
        store.write(lambda connection: create_topic(connection, "orders"))
    monkeypatch.setattr(verification, "partition_violations", noting)
    assert txnstore("verify", txnstore_postgresql_url).code == 0
    assert len(seen) == 3
    assert all(milliseconds >= 3_600_000 for milliseconds in seen.values()), seen


def test_the_coordinators_tables_are_read_too(run, opened):
    opened.write(lambda c: c.execute(delete(transactions).where(transactions.c.transactional_id == "worker-0")))
    ended = run("verify")
    assert ended.code == 1
    assert "transactional id 'worker-0'" in ended.out
    assert "JOURNAL_CURRENT" in ended.out


def test_a_producer_that_was_forgotten_with_age_is_not_wrong(run, opened):
    producer = TransactionCoordinator(opened).init_producer_id(None).identity
    (partition_id,) = opened.write(lambda c: create_topic(c, "plain")).partition_ids
    for number in (0, 1):
        batch = encode([Record(b"a", timestamp_ms=5)], producer=producer, base_sequence=number)
        opened.write(lambda c, batch=batch: append(c, [Append(partition_id, batch)]))
        opened.write(lambda c, left=number: None if left else c.execute(delete(producer_states)))
    assert find_violations(opened) != []
    assert run("verify").code == 0


def test_a_topic_that_is_deleted_meanwhile_is_not_wrong(opened, url):
    looked = []

    def told(done, total):
        looked.append((done, total))
        if done == 1:
            opened.write(lambda c: delete_topic(c, "orders"))

    with open_cluster(url, create=False) as cluster:
        assert verify(cluster, told=told) == []
    assert looked == [(1, 2), (2, 2)]


def test_an_interval_without_watching_is_refused(txnstore, url):
    ended = txnstore("verify", url, "--interval", "5")
    assert (ended.code, "goes with --watch alone" in ended.err) == (2, True)


def test_watching_tells_once_of_a_place_and_goes_on_when_the_database_was_away(run, opened, monkeypatch):
    def at(offset, seen):
        return Violation(Invariant.OFFSETS_FOLLOW, InStore(1, offset), seen)

    away = StoreUnavailable("the server is away")
    looks = iter(
        [
            [at(3, "first")],
            [at(3, "second"), at(4, "third"), at(4, "beside it")],
            away,
            [],
            [at(3, "fourth")],
            CommandFailed("enough"),
        ]
    )

    def look(*_):
        found = next(looks)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(command, "_look", look)
    ended = run("verify", "--watch", "--interval", "0.1")
    assert [line.split(": ")[1] for line in ended.out.splitlines() if line.startswith("partition")] == [
        "first",
        "third",
        "beside it",
        "fourth",
    ]
    assert ended.code == 1
    assert [line.rsplit(": ", 1)[1] for line in ended.err.splitlines()] == [
        "1 thing is wrong",
        "3 things are wrong",
        "the server is away; trying again",
        "nothing is wrong",
        "1 thing is wrong",
        "enough",
    ]


@pytest.mark.slow
@pytest.mark.slow_on_postgresql
@pytest.mark.parametrize("as_json", [False, True])
def test_watching_prints_what_is_new_and_ends_with_a_signal(start, opened, url, as_json):
    process = start("verify", url, "--watch", "--interval", "0.1", *(["--json"] if as_json else []))
    assert process.stderr.readline().endswith(": nothing is wrong\n")
    write_damaged(opened, 1)
    line = process.stdout.readline()
    assert (json.loads(line)["topic"] == "orders") if as_json else line.startswith("orders-1, offset 3: ")
    assert process.stderr.readline().endswith(": 1 thing is wrong\n")
    write_damaged(opened, 0)
    lines = [process.stdout.readline() for _ in range(1 if as_json else 3)]
    assert any("orders" in line for line in lines)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    assert out.count("orders") == 0
    assert "Traceback" not in err
