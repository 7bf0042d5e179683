"""What a lost transaction holds of groups in other databases: nobody will end it, and an administrator may.

Consumers of the group wait for it (KIP-447).  What somebody knows, or may know, is left alone.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.conftest import Bench, Producer
from tests.cluster.lost_changes import backup_of
from txnstore import cli
from txnstore.clients.consumer.consumer import Consumer
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.db.schema import transactions
from txnstore.db.store import Store
from txnstore.errors import OutcomeUnknown, PermissionDenied, ProducerFenced, StoreReadOnly, StoreUnavailable
from txnstore.testing.invariants import assert_cluster_sound
from txnstore.transactions import administration
from txnstore.transactions.administration import LostOffsets, drop_lost_offsets, offsets_held_elsewhere
from txnstore.transactions.open_transactions import HeldOffsets, each_held
from txnstore.transactions.protocol import EPOCH_EXHAUSTED, TransactionState
from txnstore.transactions.transaction import complete_decided

S = TransactionState
PATIENCE_SECONDS = 30.0
EACH_DATABASE = pytest.mark.parametrize("database_id", [1, 2, 3])


def lose(bench: Bench, database_id: int, group_id: str, offsets: dict[int, int], *, starts: int = 0) -> Producer:
    """Let the transaction of a producer hold offsets, and its coordinator forget it and the last starts."""
    lost = bench.producer_at(database_id)
    restore = backup_of(bench.cluster.own(database_id))
    for _ in range(starts):
        lost.start()
    lost.send_offsets(group_id, offsets)
    restore()
    return lost


def held_by(bench: Bench, *producers: Producer) -> list[LostOffsets]:
    return offsets_held_elsewhere(bench.cluster, [each.identity.producer_id for each in producers], {})


def listed(bench: Bench) -> HeldOffsets:
    (found,) = each_held(bench.cluster, {})
    return found


@pytest.mark.slow_but_first
@EACH_DATABASE
@pytest.mark.parametrize("starts", [0, 1])
def test_what_a_lost_transaction_holds_of_a_group_is_dropped(bench: Bench, database_id: int, starts: int):
    group_id, number = bench.name_at(database_id % 3 + 1, "group"), bench.partition_at(1)
    lost = lose(bench, database_id, group_id, {number: 9}, starts=starts)
    newcomer = Producer(bench.cluster, lost.transactional_id).start()
    newcomer.send_offsets(group_id, {number: 1})
    newcomer.end(commit=True)
    assert bench.committed(group_id) == {number: 1}
    assert bench.offsets(group_id).unstable == {number}
    assert (listed(bench).is_hanging, listed(bench).producer_id) == (True, lost.identity.producer_id)
    assert drop_lost_offsets(bench.cluster, held_by(bench, lost)) == [
        LostOffsets(lost.identity.producer_id, database_id % 3 + 1, (group_id,))
    ]
    assert bench.committed(group_id) == {number: 1}
    assert bench.offsets(group_id).unstable == set()
    # What comes late finds that it is over, wherever it was when it fell asleep.
    with pytest.raises(ProducerFenced):
        lost.send_offsets(group_id, {number: 10})
    assert list(each_held(bench.cluster, {})) == []
    newcomer.send_offsets(group_id, {number: 2})
    newcomer.end(commit=True)
    assert bench.committed(group_id) == {number: 2}
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_groups_that_the_coordinator_has_forgotten_are_freed_where_others_were_ended(bench: Bench):
    known, forgotten = bench.name_at(2, "group"), bench.name_at(2, "group")
    producer, number = bench.producer_at(1), bench.partition_at(3)
    producer.send_offsets(known, {number: 9})
    restore = backup_of(bench.cluster.own(1))
    producer.send_offsets(forgotten, {number: 9})
    restore()
    # It ends what it knows there, with a newer epoch than the rest is held by.
    Producer(bench.cluster, producer.transactional_id).start()
    assert listed(bench).group_id == forgotten
    assert len(drop_lost_offsets(bench.cluster, held_by(bench, producer))) == 1
    assert bench.offsets(forgotten).unstable == set()
    assert_cluster_sound(bench.cluster, at_rest=True)


def run(capsys: pytest.CaptureFixture[str], bench: Bench, *arguments: Any) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["transactions", *map(str, arguments), "--url", ", ".join(bench.site.urls)])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["abort", "find-hanging"])
def test_a_consumer_of_the_group_goes_on_once_an_administrator_has_ended_it(
    bench: Bench, capsys: pytest.CaptureFixture[str], command: str
):
    group_id, held = bench.name_at(2, "group"), bench.partition_at(3)
    number = bench.topic.partition_ids.index(held)
    for value in (b"a", b"b"):
        sender = bench.producer_at(3)
        sender.send(held, value)
        sender.end(commit=True)
    lost = lose(bench, 1, group_id, {held: 2})
    lost_id = lost.identity.producer_id
    abort = ("abort", "--producer-id", lost_id, "--yes") if command == "abort" else ("find-hanging", "--abort", "--yes")
    # Nobody can say yet that the next one who writes under this id is another one.
    code, out, err = run(capsys, bench, *abort)
    if command == "abort":
        assert (code, out) == (1, "")
        assert "has no open transaction; nothing was changed" in err
        assert f"Start a producer with this id; then `txnstore transactions abort --producer-id {lost_id}`" in err
    else:
        assert code == 0
        assert group_id in out
        assert err.startswith("0 transactions were aborted\nleft, its transactional id is in use")
    assert bench.offsets(group_id).unstable == {held}
    newcomer = Producer(bench.cluster, lost.transactional_id).start()
    newcomer.send_offsets(group_id, {held: 1})
    newcomer.end(commit=True)
    code, out, err = run(capsys, bench, "list-open", "--json")
    assert (code, '"state": "hanging"' in out) == (0, True)
    assert f"transactions abort --producer-id {lost_id}" in out
    settings = {"bootstrap.servers": ", ".join(bench.site.urls), "group.id": group_id, "enable.auto.commit": False}
    with Consumer(settings | {"txnstore.clock": bench.clock}) as consumer:
        consumer.assign([TopicPartition(bench.topic.name, number)])
        assert consumer.poll(0.2) is None
        code, out, err = run(capsys, bench, *abort)
        assert code == 0, err
        assert group_id in out
        assert command == "abort" or err == "1 transaction was aborted\n"
        (message,) = consumer.consume(1, timeout=PATIENCE_SECONDS)
    assert message.value() == b"b"
    assert bench.offsets(group_id).unstable == set()
    # There is nothing left to end.
    code, out, err = run(capsys, bench, "abort", "--producer-id", lost_id, "--yes")
    assert (code, "no transactional id has the producer id" in err) == (1, True)
    assert_cluster_sound(bench.cluster, at_rest=True)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("commit", [None, True, False])
def test_what_a_transaction_holds_that_somebody_knows_is_never_dropped(bench: Bench, commit: bool | None):
    group_id, number = bench.name_at(2, "group"), bench.partition_at(3)
    producer = bench.producer_at(1)
    producer.send_offsets(group_id, {number: 7})
    found = held_by(bench, producer)
    if commit is not None:
        with bench.down(2), pytest.raises(OutcomeUnknown):
            producer.twin().end(commit=commit)
    state = {None: S.ONGOING, True: S.PREPARE_COMMIT, False: S.PREPARE_ABORT}[commit]
    assert bench.row(producer.transactional_id).state is state
    assert (listed(bench).state, listed(bench).is_hanging) == (state, False)
    assert drop_lost_offsets(bench.cluster, found) == []
    assert bench.offsets(group_id).unstable == {number}
    if commit is None:
        producer.end(commit=True)
    else:
        complete_decided(bench.cluster.own(1), producer.transactional_id, bench.cluster)
    assert bench.committed(group_id) == ({} if commit is False else {number: 7})
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_what_is_held_in_the_coordinators_own_database_is_its_own(bench: Bench):
    group_id, number = bench.name_at(1, "group"), bench.partition_at(3)
    producer = bench.producer_at(1)
    producer.send_offsets(group_id, {number: 7})
    assert held_by(bench, producer) == []
    assert (listed(bench).is_elsewhere, listed(bench).is_hanging) == (False, False)


def test_a_producer_id_that_a_transactional_id_is_about_to_get_is_known(bench: Bench):
    group_id, number = bench.name_at(2, "group"), bench.partition_at(3)
    producer, store = bench.producer_at(1), bench.cluster.own(1)
    last = {"producer_epoch": EPOCH_EXHAUSTED}
    of_id = transactions.c.transactional_id == producer.transactional_id
    store.write(lambda connection: connection.execute(transactions.update().where(of_id).values(last)))
    producer.become(bench.row(producer.transactional_id).identity)
    producer.send_offsets(group_id, {number: 7})
    with bench.down(2), pytest.raises(OutcomeUnknown):
        producer.twin().end(commit=True)
    # Its next transaction has begun elsewhere, and the coordinator is an older state of itself.
    restore = backup_of(store)
    producer.become(complete_decided(store, producer.transactional_id, bench.cluster))
    producer.send_offsets(group_id, {number: 8})
    restore()
    assert listed(bench).is_hanging
    assert drop_lost_offsets(bench.cluster, held_by(bench, producer)) == []
    producer.become(complete_decided(store, producer.transactional_id, bench.cluster))
    producer.send_offsets(group_id, {number: 8})
    producer.end(commit=True)
    assert bench.committed(group_id) == {number: 8}


def test_while_the_coordinator_is_away_nothing_is_dropped(bench: Bench):
    group_id, number = bench.name_at(2, "group"), bench.partition_at(3)
    lost = lose(bench, 1, group_id, {number: 9})
    Producer(bench.cluster, lost.transactional_id).start()
    found = held_by(bench, lost)
    with bench.down(1):
        assert (listed(bench).coordinator_is_away, listed(bench).is_hanging) == (True, False)
        with pytest.raises(StoreUnavailable):
            drop_lost_offsets(bench.cluster, found)
    assert bench.offsets(group_id).unstable == {number}


def test_what_a_standby_of_the_coordinator_does_not_know_is_not_taken_for_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    group_id, number = bench.name_at(2, "group"), bench.partition_at(3)
    producer = bench.producer_at(1)
    restore = backup_of(bench.cluster.own(1))
    producer.start()
    producer.send_offsets(group_id, {number: 7})
    newest = backup_of(bench.cluster.own(1))
    restore()
    found = held_by(bench, producer)
    with monkeypatch.context() as lagging:
        lagging.setattr(type(bench.cluster.own(1).backend), "is_standby", lambda *_: True)
        assert (listed(bench).coordinator_is_away, listed(bench).is_hanging) == (True, False)
        with pytest.raises(StoreReadOnly, match="is a standby, which may lag behind"):
            drop_lost_offsets(bench.cluster, found)
    newest()
    producer.end(commit=True)
    assert bench.committed(group_id) == {number: 7}
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_what_the_coordinator_might_not_show_to_this_role_is_not_taken_for_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    group_id, number = bench.name_at(2, "group"), bench.partition_at(3)
    lost = lose(bench, 1, group_id, {number: 9})
    Producer(bench.cluster, lost.transactional_id).start()
    # Row-level security that shows a role some transactional ids: see tests/db/roles/test_seen_in_part.py.
    monkeypatch.setattr(type(bench.cluster.own(1).backend), "narrowed_tables", lambda *_, **__: ["transactions"])
    assert (listed(bench).coordinator_is_away, listed(bench).is_hanging) == (True, False)
    with pytest.raises(PermissionDenied, match="only some rows of transactions"):
        drop_lost_offsets(bench.cluster, held_by(bench, lost))
    assert bench.offsets(group_id).unstable == {number}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("moment", ["before the look", "behind the look"])
def test_a_producer_that_starts_meanwhile_keeps_what_it_holds(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, moment: str
):
    """Who was seen to hold something has started before; that nobody knows it afterwards is final."""
    group_id, number = bench.name_at(2, "group"), bench.partition_at(3)
    lost = lose(bench, 1, group_id, {number: 9})
    newcomer = Producer(bench.cluster, lost.transactional_id)
    others = [bench.producer_at(1), bench.producer_at(1)]
    look = administration._producers_of_nobody

    def begin() -> None:
        newcomer.start()
        for each in (newcomer, *others):
            each.send_offsets(group_id, {number: 5})

    def looking(coordinator: Store, producer_ids: Any, connection: Any) -> Any:
        return look(coordinator, producer_ids, connection)

    read = Store.read

    def read_with_a_start(store: Store, work: Any, **options: Any) -> Any:
        if getattr(work, "func", None) is not looking:
            return read(store, work, **options)
        if moment == "before the look":
            begin()
        answer = read(store, work, **options)
        if moment == "behind the look":
            begin()
        return answer

    monkeypatch.setattr(administration, "_producers_of_nobody", looking)
    monkeypatch.setattr(Store, "read", read_with_a_start)
    # Of all ids that were, and that will be given out next: as if somebody had guessed them.
    first = lost.identity.producer_id
    held = offsets_held_elsewhere(bench.cluster, range(first, first + 10), {})
    dropped = drop_lost_offsets(bench.cluster, held)
    # Before the start it was somebody's still.
    assert [one.producer_id for one in dropped] == ([first] if moment == "before the look" else [])
    assert newcomer.identity.producer_id in range(first, first + 10)
    for each in (newcomer, *others):
        assert len(held_by(bench, each)) == 1
        each.end(commit=True)
    assert bench.committed(group_id) == {number: 5}
