"""How much one portion of maintenance does while it keeps other writers of SQLite waiting, however much is due."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Connection, event, func, insert, select

from tests.tools.elsewhere import Elsewhere
from txnstore.db import portions as portions_module
from txnstore.db.backend import Backend
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.portions import FOUND_MAX, Portions, write_without_a_break
from txnstore.db.schema import (
    deleted_partitions,
    group_members,
    group_offsets,
    groups,
    offset_producers,
    outbox,
    pending_group_offsets,
    pending_markers,
    producer_states,
    relay_positions,
    sink_batches,
    sink_inputs,
    sink_positions,
    sink_runs,
    transaction_groups,
    transaction_log,
    transaction_partitions,
    transactions,
)
from txnstore.db.store import Store
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.deleting import HIGH_WATERMARK, advance_log_start
from txnstore.log.outbox.sequencer import drain_outbox
from txnstore.log.topics import create_topic, delete_topic
from txnstore.maintenance.duties import DUTIES
from txnstore.maintenance.turns import Portion
from txnstore.model import ControlType, Record
from txnstore.testing.manual_clock import ManualClock
from txnstore.transactions import recovery, together
from txnstore.transactions.protocol import TransactionState

DAY_MS = 86_400_000
YEARS_MS = 10 * 365 * DAY_MS
#: More than a hundred portions.
DUE = 20_000
#: The same of batches, which take longer to be written.
BATCHES = 1_000
#: Of what has nothing to do with a portion: who passes it takes as many steps, and more.
OTHERS = 20_000
#: Of transactions that are large: how many there are, and in how many partitions each.
WIDE_ONES, WIDE = 200, 20
#: What has few rows in any store, or none where nothing waits.
SMALL = {"databases", "maintenance_duties", "outbox_sequencers", "store_configs", "stores"}
NO_TIMEOUT_MS = 2**31 - 1
#: SQLite tells of its instructions in steps of so many.
STEP = 10


@dataclass(frozen=True)
class Held:
    """What one database transaction may do: rows that it changes, and instructions of SQLite.

    Measured on a machine of two cores, by the time of the thread between BEGIN IMMEDIATE and the end of COMMIT: a
    portion of 200 rows of one table takes about 1 ms (2 at most) and 6,400 instructions; of 200 batches that are
    deleted or rewritten 4 (7), and as many instructions; 100 transactions that are aborted together 5 (10), and
    55,000.  So what is allowed here is not above 25 ms, half of what a writer is to wait for.
    """

    rows: int = 250
    instructions: int = 15_000


@dataclass(frozen=True)
class Backlog:
    """What is put into a store for a duty."""

    fill: Callable[[Connection, int], object]
    """With the present time."""

    held: Held = Held()


def state(partition_id: int, producer_id: int, last_ms: int, first_offset: int | None = None) -> dict[str, object]:
    return {
        "partition_id": partition_id,
        "producer_id": producer_id,
        "producer_epoch": 0,
        "recent_batches": "[]",
        "coordinator_epoch": -1,
        "last_timestamp_ms": last_ms,
        "transaction_first_offset": first_offset,
    }


def transaction(number: int, now_ms: int, *, is_open: bool) -> dict[str, object]:
    return {
        "transactional_id": f"id {number}",
        "producer_id": number,
        "previous_producer_id": -1,
        "next_producer_id": -1,
        "producer_epoch": 0,
        "last_producer_epoch": -1,
        "timeout_ms": 1,
        "state": int(is_open),
        "start_ms": now_ms if is_open else -1,
        "last_update_ms": now_ms,
        "deadline_ms": now_ms + 1 if is_open else None,
        "transaction_number": int(is_open),
        "begin_epoch": 0 if is_open else -1,
    }


def group(name: str, now_ms: int, generation: int) -> dict[str, object]:
    return {"group_id": name, "generation": generation, "commit_number": 1, "last_update_ms": now_ms}


def new_partition(connection: Connection, name: str, **config: str) -> int:
    config = {key.replace("_", "."): value for key, value in config.items()}
    return create_topic(connection, name, config=config).partition_ids[0]


def wide_topic(connection: Connection, now_ms: int) -> tuple[int, ...]:
    """Make a topic of many partitions, each with some batches."""
    partition_ids = create_topic(connection, "t", partition_count=WIDE).partition_ids
    for partition_id in partition_ids:
        write_batches(connection, partition_id, now_ms, count=50)
    return partition_ids


def write_batches(connection: Connection, partition_id: int, now_ms: int, count: int = BATCHES) -> None:
    """Append batches of two records, whose keys come again and again."""
    for first in range(0, count, 50):
        batches = [
            encode([Record(b"v", key=b"%d" % (key % 100), timestamp_ms=now_ms) for key in (number, 100 + number // 2)])
            for number in range(first, first + 50)
        ]
        append(connection, [Append(partition_id, batch) for batch in batches])


def open_late(connection: Connection, now_ms: int) -> None:
    partition_id = new_partition(connection, "t")
    write_batches(connection, partition_id, now_ms, count=50)
    connection.execute(insert(transactions), [transaction(number, now_ms, is_open=True) for number in range(DUE)])
    participants = [{"transactional_id": f"id {number}", "partition_id": partition_id} for number in range(DUE)]
    connection.execute(insert(transaction_partitions), participants)
    states = [state(partition_id, number, now_ms, 10) for number in range(DUE)]
    states += [state(partition_id, DUE + number, now_ms) for number in range(OTHERS)]
    connection.execute(insert(producer_states), states)
    others = [{"transactional_id": f"other {number}", "group_id": "g"} for number in range(OTHERS)]
    connection.execute(insert(transaction_groups), others)


def open_wide(connection: Connection, now_ms: int) -> None:
    """Let each of the transactions have written to many partitions, or hold offsets of many."""
    partition_ids = wide_topic(connection, now_ms)
    late = [transaction(number, now_ms, is_open=True) for number in range(2 * WIDE_ONES)]
    connection.execute(insert(transactions), late)
    written = [(number, partition_id) for number in range(0, len(late), 2) for partition_id in partition_ids]
    participants = [{"transactional_id": f"id {number}", "partition_id": id_} for number, id_ in written]
    connection.execute(insert(transaction_partitions), participants)
    connection.execute(insert(producer_states), [state(id_, number, now_ms, 0) for number, id_ in written])
    connection.execute(insert(groups), [group("g", now_ms, 0)])
    sent = [(number, partition_id) for number in range(1, len(late), 2) for partition_id in partition_ids]
    in_groups = [{"transactional_id": f"id {number}", "group_id": "g"} for number in range(1, len(late), 2)]
    connection.execute(insert(transaction_groups), in_groups)
    connection.execute(insert(pending_group_offsets), [pending("g", number, id_, now_ms) for number, id_ in sent])


def pending(group_id: str, producer_id: int, partition_id: int, now_ms: int) -> dict[str, object]:
    return {
        "group_id": group_id,
        "partition_id": partition_id,
        "producer_id": producer_id,
        "producer_epoch": 0,
        "pending_offset": 1,
        "leader_epoch": -1,
        "commit_ms": now_ms,
        "commit_number": 1,
    }


def decide(connection: Connection, now_ms: int) -> None:
    """Let each of the transactions wait for many markers to be delivered."""
    partition_ids = wide_topic(connection, now_ms)
    decided = {"state": int(TransactionState.PREPARE_ABORT), "deadline_ms": None, "producer_epoch": 1}
    rows = [{**transaction(number, now_ms, is_open=True), **decided} for number in range(WIDE_ONES)]
    rows += [transaction(number, now_ms, is_open=False) for number in range(WIDE_ONES, WIDE_ONES + OTHERS)]
    connection.execute(insert(transactions), rows)
    written = [(number, partition_id) for number in range(WIDE_ONES) for partition_id in partition_ids]
    participants = [{"transactional_id": f"id {number}", "partition_id": id_} for number, id_ in written]
    connection.execute(insert(transaction_partitions), participants)
    marker = {"producer_epoch": 1, "outcome": int(ControlType.ABORT)}
    producers = [{**marker, "producer_id": number} for number, _ in written]
    markers = [{**each, **producer} for each, producer in zip(participants, producers, strict=True)]
    connection.execute(insert(pending_markers), markers)
    connection.execute(insert(producer_states), [state(id_, number, now_ms, 0) for number, id_ in written])


def leave_transactional_ids(connection: Connection, now_ms: int) -> None:
    connection.execute(insert(transactions), [transaction(number, now_ms, is_open=False) for number in range(BATCHES)])
    batches = [
        {"sink_id": f"query:{number // 100}", "batch_id": number, "transactional_id": "id", "commit_ms": now_ms}
        for number in range(OTHERS)
    ]
    connection.execute(insert(sink_batches), batches)


def leave_jobs(connection: Connection, now_ms: int) -> None:
    """Let the jobs of one transactional id have left more than a portion takes, and those of others still more."""
    ids = [transaction(number, now_ms, is_open=False) for number in range(BATCHES)]
    connection.execute(insert(transactions), ids)
    for name, count in (("id 0", DUE), ("other", OTHERS)):
        batches = [
            {"sink_id": f"job:{name} {number}", "batch_id": 0, "transactional_id": name, "commit_ms": now_ms}
            for number in range(count)
        ]
        connection.execute(insert(sink_batches), batches)


def leave_producers(connection: Connection, now_ms: int) -> None:
    connection.execute(insert(producer_states), [state(1, number, now_ms) for number in range(DUE)])
    producers = [{"producer_id": number, "producer_epoch": 0, "last_update_ms": now_ms} for number in range(DUE)]
    connection.execute(insert(offset_producers), producers)


def leave_journal(connection: Connection, now_ms: int) -> None:
    entry = {"transaction_number": 1, "producer_epoch": 0, "state": 4, "first_state": 1, "timeout_ms": 1, "start_ms": 1}
    entries = [
        {**entry, "transactional_id": f"id-{number % 7}", "producer_id": number, "update_ms": now_ms, "reason": "test"}
        for number in range(DUE)
    ]
    connection.execute(insert(transaction_log), entries)


def leave_refused(connection: Connection, now_ms: int) -> None:
    rows = [{"topic": "gone", "value": b"v", "refusal": "no such topic", "refused_ms": now_ms}] * DUE
    connection.execute(insert(outbox), rows)


def inputs(now_ms: int, partition_id: int, count: int) -> list[dict[str, object]]:
    note = {"run_id": "r", "group_id": "g", "partition_id": partition_id, "in_commit_order": False, "reader_id": 0}
    return [
        {
            **note,
            "sink_id": f"going on {number % 7}",
            "batch_id": number,
            "start_offset": 0,
            "end_offset": DUE,
            "from_group": False,
            "fails_on_loss": False,
            "noted_ms": now_ms,
        }
        for number in range(count)
    ]


def leave_sinks(connection: Connection, now_ms: int) -> None:
    batches = [
        {"sink_id": f"query:{number}", "batch_id": 1, "transactional_id": f"t {number}", "commit_ms": now_ms}
        for number in range(100)
    ]
    connection.execute(insert(sink_batches), batches)
    connection.execute(insert(sink_inputs), inputs(now_ms, 1, DUE))
    connection.execute(insert(sink_inputs), inputs(now_ms + YEARS_MS, 2, OTHERS))
    run = {"run_id": "r", "producer_id": -1, "producer_epoch": -1, "begin_ms": now_ms + YEARS_MS}
    runs = [
        {**run, "transactional_id": f"going on {n}", "run_number": 1, "sink_id": f"going on {n}"} for n in range(OTHERS)
    ]
    connection.execute(insert(sink_runs), runs)


def leave_deleted_topics(connection: Connection, now_ms: int) -> None:
    partition_id = new_partition(connection, "gone")
    write_batches(connection, partition_id, now_ms)
    connection.execute(insert(producer_states), [state(partition_id, number, now_ms) for number in range(DUE)])
    offsets = [offset(f"group {number}", partition_id, now_ms) for number in range(DUE)]
    connection.execute(insert(group_offsets), offsets)
    position = {"group_id": "g", "partition_id": partition_id + 1, "in_commit_order": False, "next_offset": 1}
    connection.execute(insert(sink_positions), [{**position, "sink_id": f"query:{n}"} for n in range(OTHERS)])
    connection.execute(insert(sink_inputs), inputs(now_ms, partition_id, DUE))
    connection.execute(insert(sink_inputs), inputs(now_ms, partition_id + 1, OTHERS))
    stands = {"topic": "gone", "topic_uuid": "gone", "next_offset": 1}
    for relay_id, count in (("to/kafka/relay", BATCHES), ("from/kafka/relay", OTHERS)):
        relay = [{**stands, "relay_id": relay_id, "partition_number": number} for number in range(count)]
        connection.execute(insert(relay_positions), relay)
    delete_topic(connection, "gone")
    connection.execute(insert(deleted_partitions), [{"partition_id": 1_000 + number} for number in range(DUE)])


def offset(group_id: str, partition_id: int, now_ms: int) -> dict[str, object]:
    return {
        "group_id": group_id,
        "partition_id": partition_id,
        "committed_offset": 1,
        "leader_epoch": -1,
        "commit_ms": now_ms,
        "commit_number": 1,
        "producer_id": -1,
        "producer_epoch": -1,
    }


def leave_batches(connection: Connection, now_ms: int) -> None:
    write_batches(connection, new_partition(connection, "by-age"), now_ms)
    # All of it has to be counted first.
    by_size = new_partition(connection, "by-size", retention_ms="-1", retention_bytes="1000")
    write_batches(connection, by_size, now_ms, count=3 * BATCHES)
    # Somebody began to delete it, and went away.
    left = new_partition(connection, "left")
    write_batches(connection, left, now_ms)
    advance_log_start(connection, left, HIGH_WATERMARK)


def leave_old_keys(connection: Connection, now_ms: int) -> None:
    write_batches(connection, new_partition(connection, "t", cleanup_policy="compact"), now_ms)


def leave_members(connection: Connection, now_ms: int, *, group_count: int = BATCHES, alive_count: int = 0) -> None:
    names = [f"group {number}" for number in range(group_count)]
    connection.execute(insert(groups), [group(name, now_ms, 1) for name in names])
    subscription = {
        "subscribed": ["t"],
        "topics": ["t"],
        "assignors": ["range"],
        "owned": {},
        "owned_ids": [],
        "step": 0,
    }
    member = {"client_id": "c", "generation": 1, "session_timeout_ms": 1, "deadline_ms": now_ms}
    texts = {"subscription": json.dumps(subscription), "assignment": "{}"}
    silent = [
        {**member, **texts, "group_id": names[number % group_count], "member_id": f"silent {number}"}
        for number in range(BATCHES if group_count > 1 else DUE)
    ]
    alive = {**member, **texts, "group_id": names[0], "deadline_ms": now_ms + YEARS_MS}
    alive_ones = [{**alive, "member_id": f"alive {number}"} for number in range(alive_count)]
    connection.execute(insert(group_members), silent + alive_ones)


def leave_members_of_one_group(connection: Connection, now_ms: int) -> None:
    leave_members(connection, now_ms, group_count=1, alive_count=OTHERS)


def leave_offsets(connection: Connection, now_ms: int) -> None:
    names = [f"group {number:04}" for number in range(BATCHES // 2)]
    connection.execute(insert(groups), [group(name, now_ms, 1) for name in ["a wide one", *names]])
    offsets = [offset(name, 1, now_ms) for name in names]
    offsets += [offset("a wide one", number, now_ms) for number in range(1, 1 + DUE)]
    connection.execute(insert(group_offsets), offsets)
    # In a group without members each offset has a time of its own: the last ones are due here.
    connection.execute(insert(groups), [group("a young one", now_ms, 0)])
    young = [offset("a young one", number, now_ms + YEARS_MS) for number in range(OTHERS)]
    old = [offset("a young one", OTHERS + number, now_ms) for number in range(BATCHES)]
    connection.execute(insert(group_offsets), young + old)


def leave_rows(connection: Connection, now_ms: int) -> None:
    new_partition(connection, "t")
    others = [{"topic": "gone", "value": b"v", "refusal": "no such topic", "refused_ms": now_ms}] * OTHERS
    connection.execute(insert(outbox), others)
    last_id: int = connection.execute(select(func.max(outbox.c.outbox_id))).scalar_one()
    # As callers produce them, ten in each database transaction.
    rows = [
        {
            "topic": "t",
            "key": b"%d" % number,
            "value": b"v",
            "timestamp_ms": now_ms,
            "committed_id": last_id + number // 10 * 10,
        }
        for number in range(DUE)
    ]
    connection.execute(insert(outbox), rows)


BACKLOGS = {
    "rows of the outbox moved into topics": Backlog(leave_rows, Held(rows=510, instructions=45_000)),
    "timed out transactions aborted": Backlog(open_late, Held(rows=650, instructions=65_000)),
    "timed out transactions of many partitions aborted": Backlog(open_wide, Held(rows=400, instructions=30_000)),
    "decided transactions completed": Backlog(decide),
    "expired transactional ids forgotten": Backlog(leave_transactional_ids),
    "expired transactional ids of jobs forgotten": Backlog(leave_jobs),
    "silent producers forgotten": Backlog(leave_producers),
    "journal entries deleted": Backlog(leave_journal),
    "refused rows of the outbox deleted": Backlog(leave_refused),
    "silent sinks of Spark forgotten": Backlog(leave_sinks),
    "rows of deleted topics deleted": Backlog(leave_deleted_topics),
    "batches past their retention deleted": Backlog(leave_batches),
    "batches read by the compaction": Backlog(leave_old_keys),
    "silent members of groups removed": Backlog(leave_members),
    "silent members of one group removed": Backlog(leave_members_of_one_group),
    # Of each is asked which queries and topics keep it.
    "groups cleared of expired offsets": Backlog(leave_offsets, Held(instructions=20_000)),
}
#: What is left for a duty in another way.
ALSO = {
    "timed out transactions of many partitions aborted": "timed out transactions aborted",
    "expired transactional ids of jobs forgotten": "expired transactional ids forgotten",
    "silent members of one group removed": "silent members of groups removed",
}
#: They have work only in clusters, in databases that are not the store's own.
OTHER_DUTIES = {
    "branches ended in the databases of the cluster",
    "databases given the newest topics",
}


def test_every_duty_is_looked_at():
    assert {duty.name for duty in DUTIES} == (set(BACKLOGS) - set(ALSO)) | OTHER_DUTIES


@pytest.mark.slow
@pytest.mark.parametrize("left", BACKLOGS)
def test_a_portion_does_so_much_while_others_wait(
    txnstore_sqlite_store: Store, txnstore_clock: ManualClock, monkeypatch: pytest.MonkeyPatch, left: str
):
    store, backlog = txnstore_sqlite_store, BACKLOGS[left]
    (duty,) = (duty for duty in DUTIES if duty.name == ALSO.get(left, left))
    cluster = Elsewhere(store) if duty.name == "decided transactions completed" else None
    store.write(lambda connection: backlog.fill(connection, txnstore_clock.now_ms()))
    store.write(lambda connection: change_store_settings(connection, {"transaction.max.timeout.ms": "1000"}))
    txnstore_clock.advance(3 * 365 * DAY_MS)
    # However slow or fast the machine is: as large as portions become.
    monkeypatch.setattr(Portions, "_adapt", lambda *_: None)
    for module in (portions_module, recovery, together):
        monkeypatch.setattr(module, "pause_after_portion", lambda _: None)
    found: list[Held] = []
    write = Store.write

    def write_and_count(self: Store, work: Callable[[Connection], object], **options: object) -> object:
        return write(self, lambda connection: counted(connection, work), **options)  # type: ignore[arg-type]

    def counted(connection: Connection, work: Callable[[Connection], object]) -> object:
        driver = connection.connection.driver_connection
        assert driver is not None
        steps, changed = 0, driver.total_changes

        def step() -> None:
            nonlocal steps
            steps += STEP

        driver.set_progress_handler(step, STEP)
        try:
            return work(connection)
        finally:
            driver.set_progress_handler(None, 0)
            found.append(Held(driver.total_changes - changed, steps))

    monkeypatch.setattr(Store, "write", write_and_count)
    done, position = 0, None
    for _ in range(400):
        portion = Portion(store, cluster, Portions(), position)
        count, position = duty.load()(portion), portion.position
        done += count
        if count < FOUND_MAX and position is None:
            break
    assert done >= WIDE_ONES
    assert max(held.rows for held in found) <= backlog.held.rows
    assert max(held.instructions for held in found) <= backlog.held.instructions


@pytest.mark.parametrize("left", BACKLOGS)
def test_a_portion_finds_by_an_index_what_it_is_about(
    txnstore_sqlite_store: Store, txnstore_clock: ManualClock, monkeypatch: pytest.MonkeyPatch, left: str
):
    store, backlog = txnstore_sqlite_store, BACKLOGS[left]
    (duty,) = (duty for duty in DUTIES if duty.name == ALSO.get(left, left))
    for name in ("DUE", "BATCHES", "OTHERS"):
        monkeypatch.setitem(globals(), name, 50)
    monkeypatch.setitem(globals(), "WIDE_ONES", 5)
    store.write(lambda connection: backlog.fill(connection, txnstore_clock.now_ms()))
    store.write(lambda connection: change_store_settings(connection, {"transaction.max.timeout.ms": "1000"}))
    txnstore_clock.advance(3 * 365 * DAY_MS)
    plans: dict[str, list[str]] = {}
    write = Store.write

    def explain(connection: Connection, cursor: Any, statement: str, parameters: Any, _: Any, many: bool) -> None:
        if statement.startswith(("SELECT", "INSERT", "UPDATE", "DELETE")) and statement not in plans:
            cursor.execute(f"EXPLAIN QUERY PLAN {statement}", parameters[0] if many else parameters)
            plans[statement] = [row[-1] for row in cursor.fetchall()]

    def write_and_explain(self: Store, work: Callable[[Connection], object], **options: object) -> object:
        return write(self, lambda connection: explained(connection, work), **options)  # type: ignore[arg-type]

    def explained(connection: Connection, work: Callable[[Connection], object]) -> object:
        event.listen(store.engine, "before_cursor_execute", explain)
        try:
            return work(connection)
        finally:
            event.remove(store.engine, "before_cursor_execute", explain)

    monkeypatch.setattr(Store, "write", write_and_explain)
    cluster = Elsewhere(store) if duty.name == "decided transactions completed" else None
    assert duty.load()(Portion(store, cluster, Portions())) > 0
    assert any(statement.startswith(("DELETE", "UPDATE")) for statement in plans)
    scans = {
        statement: step
        for statement, plan in plans.items()
        for step in plan
        if (table := re.match(r"SCAN txnstore_(\w+)", step)) and table[1] not in SMALL
    }
    assert scans == {}


@pytest.mark.parametrize("write", [Portions().write, write_without_a_break])
def test_no_garbage_is_looked_for_while_all_writers_wait(
    store: Store, monkeypatch: pytest.MonkeyPatch, write: Callable[..., object]
):
    collects: list[bool] = []
    commit = type(store.backend).commit

    def note_and_commit(self: Backend, connection: Connection) -> None:
        collects.append(gc.isenabled())
        commit(self, connection)

    monkeypatch.setattr(type(store.backend), "commit", note_and_commit)
    assert gc.isenabled()
    for _ in range(2):
        write(store, lambda _: collects.append(gc.isenabled()))
        assert gc.isenabled()
    assert collects == [not store.backend.has_one_writer] * 4


def test_the_outbox_is_moved_without_a_break(store: Store, monkeypatch: pytest.MonkeyPatch):
    for name in ("DUE", "OTHERS"):
        monkeypatch.setitem(globals(), name, BATCHES)
    store.write(lambda connection: leave_rows(connection, 0))
    collects: list[bool] = []

    def append_and_note(connection: Connection, appends: list[Append]) -> None:
        collects.append(gc.isenabled())
        append(connection, appends)

    monkeypatch.setattr("txnstore.log.outbox.sequencer.append", append_and_note)
    assert drain_outbox(store) == BATCHES
    assert set(collects) == {not store.backend.has_one_writer}
