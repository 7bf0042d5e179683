"""A coordinator that has gone back to where a transaction was open, which has ended in other databases since.

Wherever it goes back to, and however much was lost, the next producer of the transactional id starts at once, nothing
that anybody holds there is ended by what comes too late, and an administrator ends the rest.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import shlex
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import delete

from tests.cluster.conftest import Bench, Producer
from tests.cluster.lost_changes import Survivor, backup_of, end_what_hangs
from txnstore import cli
from txnstore.db.schema import record_batches
from txnstore.errors import ConcurrentTransactions, OutcomeUnknown, ProducerFenced, WriteConflict
from txnstore.model import IsolationLevel
from txnstore.testing.invariants import assert_cluster_sound, cluster_violations
from txnstore.transactions import together, transaction
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.recovery import complete_all_decided, recover
from txnstore.transactions.transaction import complete_decided

S = TransactionState
#: What a producer does, again and again; "decide" leaves to others what is in database 2.
STEPS = ("send", "send offsets", "decide", "complete", "send", "decide", "complete", "send", "send offsets")
#: From where to where is lost.
LOSSES = tuple(itertools.combinations_with_replacement(range(len(STEPS) + 1), 2))


def outrun_events(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "event", None) == "decision_outrun"]


class History:
    """One producer, coordinated in database 1, that writes to a partition of database 2, and to a group there."""

    def __init__(self, bench: Bench, outcomes: tuple[bool, ...]) -> None:
        self.bench = bench
        self.producer = bench.producer_at(1)
        self.group_id, self.partition_id = bench.name_at(2, "group"), bench.partition_at(2)
        self._outcomes = iter(outcomes)
        self.open: list[bytes] = []
        self.committed: list[bytes] = []
        self.decision = False

    def go(self, step: str) -> None:
        producer, name = self.producer, self.producer.transactional_id
        if step == "send":
            value = f"{name} {len(self.committed)} {len(self.open)} {producer.identity}".encode()
            producer.send(self.partition_id, value)
            self.open.append(value)
        elif step == "send offsets":
            producer.send_offsets(self.group_id, {self.partition_id: 7})
        elif step == "decide":
            self.decision = next(self._outcomes)
            with self.bench.down(2), pytest.raises(OutcomeUnknown):
                producer.twin().end(commit=self.decision)
        else:
            producer.become(complete_decided(self.bench.cluster.own(1), name, self.bench.cluster))
            self.committed += self.open if self.decision else []
            self.open = []


@pytest.mark.slow
@pytest.mark.parametrize("outcomes", [(True, False), (False, True)], ids=str)
def test_the_next_producer_starts_at_once_whatever_was_lost(
    bench: Bench, outcomes: tuple[bool, bool], caplog: pytest.LogCaptureFixture
):
    expected: list[bytes] = []
    outrun: set[tuple[int, int]] = set()
    for first, last in LOSSES:
        history = History(bench, outcomes)
        for step in STEPS[:first]:
            history.go(step)
        restore = backup_of(bench.cluster.own(1))
        for step in STEPS[first:last]:
            history.go(step)
        restore()
        caplog.clear()
        newcomer = Producer(bench.cluster, history.producer.transactional_id).start()
        if outrun_events(caplog):
            outrun.add((first, last))
        value = f"{first} {last}".encode()
        newcomer.send(history.partition_id, value)
        newcomer.send_offsets(history.group_id, {history.partition_id: 1})
        newcomer.end(commit=True)
        end_what_hangs(bench)
        if first == last and STEPS[:first][-1:] == ("decide",) and history.decision:
            # Nothing was lost: the start has completed what was decided.
            history.committed += history.open
        expected += [*history.committed, value]
        assert bench.offsets(history.group_id).unstable == set()
        assert bench.committed(history.group_id) == {history.partition_id: 1}
        assert bench.row(newcomer.transactional_id).state is S.COMPLETE_COMMIT
    assert sorted(filter(None, bench.read(history.partition_id))) == sorted(expected)
    assert len(bench.read(history.partition_id, IsolationLevel.READ_UNCOMMITTED)) > len(expected)
    # Where the producer has written something in the next epoch.
    assert outrun == {
        (first, last) for first, last in LOSSES if (0 < first <= 3 and last >= 5) or (4 < first <= 6 and last >= 8)
    }
    # Nothing but this can be wrong: what was open in the backup and committed is aborted where it is coordinated.
    found = cluster_violations(bench.cluster, at_rest=True)
    assert {violation.invariant.name for violation in found} == ({"DECISION_STANDS"} if any(outcomes) else set())


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_what_is_aborted_for_its_age_is_over_where_it_was_outrun(
    bench: Bench, count: int, caplog: pytest.LogCaptureFixture
):
    """One by itself, and several together."""
    histories = [History(bench, (True, True)) for _ in range(count)]
    for history in histories:
        history.go("send")
    restore = backup_of(bench.cluster.own(1))
    for history in histories:
        for step in ("decide", "complete", "send", "decide", "complete"):
            history.go(step)
    restore()
    bench.clock.advance(60_001)
    recover(bench.cluster.own(1), bench.cluster)
    for history in histories:
        assert bench.row(history.producer.transactional_id).state is S.COMPLETE_ABORT
    told = outrun_events(caplog)
    assert {record.__dict__["transactional_id"] for record in told} == {
        history.producer.transactional_id for history in histories
    }
    for record in told:
        assert record.__dict__["partition_ids"] == [histories[0].partition_id]
        assert record.__dict__["open_partition_ids"] == []
        assert "nothing of it is open there" in record.getMessage()
    committed = [value for history in histories for value in history.committed]
    assert sorted(filter(None, bench.read(histories[0].partition_id))) == sorted(committed)
    # `verify` names those that are committed there all the same.
    with pytest.raises(AssertionError, match="is decided to ABORT, and ended with COMMIT here"):
        assert_cluster_sound(bench.cluster, at_rest=True)


@pytest.mark.slow
@pytest.mark.parametrize("is_decided", [False, True])
def test_who_has_gone_on_is_fenced_by_the_end_of_what_it_has_outrun(
    bench: Bench, is_decided: bool, caplog: pytest.LogCaptureFixture
):
    survivor = Survivor(bench, in_same_partition=True, is_decided=is_decided)
    producer, lost_id = survivor.producer, survivor.producer.identity.producer_id
    if is_decided:
        # By itself, as each start does; recovery completes those that it finds together.
        complete_decided(bench.cluster.own(1), survivor.name, bench.cluster)
    else:
        survivor.time_out()
    row = bench.row(survivor.name)
    assert row.state is (S.COMPLETE_COMMIT if is_decided else S.COMPLETE_ABORT)
    assert (row.previous_producer_id, row.producer_epoch) == (lost_id, 0)
    (told,) = outrun_events(caplog)
    assert told.__dict__["open_partition_ids"] == [survivor.old]
    assert "`txnstore transactions find-hanging --abort` ends" in told.getMessage()
    for request in (
        lambda: producer.twin().send(bench.partition_at(3), b"more"),
        lambda: producer.twin().send(bench.partition_at(1), b"more"),
        lambda: producer.send_offsets(survivor.group_id, {survivor.old: 1}),
        lambda: producer.twin().end(commit=True),
        lambda: producer.twin().end(commit=False),
        lambda: producer.twin().start(expected=producer.identity),
    ):
        with pytest.raises(ProducerFenced):
            request()
    end_what_hangs(bench)
    assert survivor.read() == [b"old"]
    newcomer = Producer(bench.cluster, survivor.name).start()
    newcomer.send(survivor.old, b"new")
    newcomer.end(commit=True)
    assert survivor.read() == [b"old", b"new"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("answer", ["refused", "lost"])
@pytest.mark.parametrize("completion", [transaction, together])
def test_it_is_told_once_it_stands_however_often_that_was_tried(
    bench: Bench,
    completion: ModuleType,
    answer: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    survivor = Survivor(bench, in_same_partition=True, is_decided=True)
    store, tries = bench.cluster.own(1), itertools.count(1)
    strike_off, write = completion._strike_off, store.write

    def refuse_once(*arguments: Any) -> Any:
        struck_off = strike_off(*arguments)
        if answer == "refused" and next(tries) == 1:
            raise WriteConflict
        assert not outrun_events(caplog)
        return struck_off

    def lose_once(work: Any, **options: Any) -> Any:
        written = write(work, **options)
        if answer == "lost" and getattr(work, "func", None) is refuse_once and next(tries) == 1:
            raise OutcomeUnknown
        return written

    monkeypatch.setattr(completion, "_strike_off", refuse_once)
    monkeypatch.setattr(store, "write", lose_once)
    if completion is together:
        complete_all_decided(store, bench.cluster)
    else:
        with contextlib.suppress(OutcomeUnknown):
            complete_decided(store, survivor.name, bench.cluster)
        complete_decided(store, survivor.name, bench.cluster)
    assert bench.row(survivor.name).state is S.COMPLETE_COMMIT
    assert next(tries) > 1
    (told,) = outrun_events(caplog)
    assert told.__dict__["transactional_id"] == survivor.name


@pytest.mark.slow
def test_that_a_group_was_outrun_is_noticed_as_well(bench: Bench, caplog: pytest.LogCaptureFixture):
    producer, number, group_id = bench.producer_at(1), bench.partition_at(3), bench.name_at(2, "group")
    lost_id = producer.identity.producer_id
    producer.send_offsets(group_id, {number: 1})
    restore = backup_of(bench.cluster.own(1))
    producer.end(commit=True)
    producer.send_offsets(group_id, {number: 2})
    restore()
    bench.clock.advance(60_001)
    recover(bench.cluster.own(1), bench.cluster)
    assert bench.row(producer.transactional_id).previous_producer_id == lost_id
    (told,) = outrun_events(caplog)
    assert (told.__dict__["group_ids"], told.__dict__["open_group_ids"]) == ([group_id], [group_id])
    with pytest.raises(ProducerFenced):
        producer.end(commit=True)
    end_what_hangs(bench)
    assert bench.committed(group_id) == {number: 1}
    assert bench.offsets(group_id).unstable == set()


@pytest.mark.slow
def test_where_a_database_is_away_it_is_found_again_that_another_one_was_outrun(bench: Bench):
    producer = bench.producer_at(1)
    name = producer.transactional_id
    for number in (bench.partition_at(2), bench.partition_at(3)):
        producer.send(number, b"old")
    restore = backup_of(bench.cluster.own(1))
    producer.end(commit=True)
    producer.send(bench.partition_at(2), b"lost")
    restore()
    lost_id = producer.identity.producer_id
    with bench.down(3), pytest.raises(ConcurrentTransactions):
        Producer(bench.cluster, name).start()
    assert bench.queued(name) == {bench.partition_at(2), bench.partition_at(3)}
    recover(bench.cluster.own(1), bench.cluster)
    assert (bench.row(name).previous_producer_id, bench.row(name).state) == (lost_id, S.COMPLETE_ABORT)
    assert bench.queued(name) == set()


@pytest.mark.slow
@pytest.mark.parametrize("leaves", ["nothing", "another producer's"])
def test_an_open_transaction_of_which_the_log_does_not_tell_where_it_began_is_left_alone(bench: Bench, leaves: str):
    survivor = Survivor(bench, in_same_partition=True)
    lost_id = survivor.producer.identity.producer_id
    if leaves != "nothing":
        other = bench.producer_at(1)
        for _ in range(3):
            other.end(commit=False)
        other.send(survivor.old, b"other")
    of_lost = (record_batches.c.producer_id == lost_id) & (record_batches.c.partition_id == survivor.old)
    bench.cluster.own(2).write(lambda connection: connection.execute(delete(record_batches).where(of_lost)))
    with pytest.raises(ConcurrentTransactions, match="is not newer than epoch"):
        Producer(bench.cluster, survivor.name).start()
    assert bench.row(survivor.name).state is S.PREPARE_ABORT


@pytest.mark.slow
def test_the_commands_that_the_list_names_end_what_was_lost(bench: Bench, capsys: pytest.CaptureFixture[str]):
    survivor = Survivor(bench, in_same_partition=True, everywhere=True)
    Producer(bench.cluster, survivor.name).start()

    def run(command: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main([*shlex.split(command), "--url", ", ".join(bench.site.urls)])
        captured = capsys.readouterr()
        assert not ended.value.code, captured.err
        return captured.out

    def listed() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(run("transactions list-open --json"))
        return found

    groups: list[str | None] = []
    # What holds offsets of a group as well is listed with its records first.
    for _ in range(2):
        for one in listed():
            assert (one["state"], one["producer_id"]) == ("hanging", survivor.producer.identity.producer_id)
            groups.append(one["group"])
            run(one["freed_by"].removeprefix("txnstore ") + " --yes")
    assert groups == [None, None, survivor.group_id]
    assert listed() == []
    assert survivor.read() == [b"old"]
    assert bench.offsets(survivor.group_id).unstable == set()
