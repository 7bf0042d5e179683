"""Prepared transactions over several databases that one process after the other takes over (KIP-939)."""

from __future__ import annotations

from functools import partial

import pytest
from sqlalchemy import select, update

from tests.cluster.conftest import Bench, Producer
from tests.tools.cluster_changes import change_store_settings
from txnstore.db.schema import offset_producers, transactions
from txnstore.errors import InvalidProducerIdMapping, OutcomeUnknown, ProducerFenced, TransactionAbortable
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.model import ProducerIdentity, Record
from txnstore.testing.invariants import assert_cluster_sound
from txnstore.transactions.protocol import EPOCH_EXHAUSTED
from txnstore.transactions.recovery import abort_by_administrator, recover
from txnstore.transactions.writers import append_as_writer, join_transaction, report_writer

TWO_PHASE = {"enable_two_phase_commit": True}
KEEP = {**TWO_PHASE, "keep_prepared": True}
ENDS = pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])


def taken_over(bench: Bench, group_id: str, *, times: int) -> list[Producer]:
    """Return who prepared a transaction in every database at the last epoch, and those who took it over."""
    change_store_settings(bench.cluster, {"transaction.two.phase.commit.enable": "true"})
    first = Producer(bench.cluster, bench.name_at(1, "id")).start(**TWO_PHASE)
    row = update(transactions).where(transactions.c.transactional_id == first.transactional_id)
    bench.cluster.own(1).write(lambda connection: connection.execute(row.values(producer_epoch=EPOCH_EXHAUSTED)))
    first.become(ProducerIdentity(first.identity.producer_id, EPOCH_EXHAUSTED))
    for number in (1, 2, 3):
        first.send(bench.partition_at(number), b"a")
    first.send_offsets(group_id, {bench.partition_at(1): 4})
    store, name = bench.cluster.own(1), first.transactional_id
    writer = join_transaction(store, name, first.identity, cluster=bench.cluster)
    batch = encode([Record(b"w")], producer=writer.identity, base_sequence=0, is_transactional=True)
    appends = [Append(bench.partition_at(number, 1), batch) for number in (1, 3)]
    append_as_writer(store, writer, appends, cluster=bench.cluster)
    report_writer(store, writer, cluster=bench.cluster)
    processes = [first, *(Producer(bench.cluster, first.transactional_id).start(**KEEP) for _ in range(times))]
    assert len({process.identity for process in processes}) == times + 1
    return processes


def refuse_all(bench: Bench, processes: list[Producer]) -> None:
    for process in processes:
        late = process.twin().batch(bench.partition_at(2), b"late")
        for request in (
            partial(process.end, commit=True),
            partial(process.end, commit=False),
            partial(process.end, commit=True, appends=[late], is_repeated=True),
            partial(process.start, expected=process.identity, **KEEP),
        ):
            with pytest.raises((ProducerFenced, InvalidProducerIdMapping)):
                request()


@pytest.mark.slow
@ENDS
@pytest.mark.parametrize("is_away", [False, True], ids=["all there", "one away at the end"])
def test_who_took_it_over_last_ends_it_in_every_database(bench: Bench, is_away: bool, commit: bool):
    group_id = bench.name_at(2, "group")
    *zombies, last = taken_over(bench, group_id, times=3)
    refuse_all(bench, zombies)
    assert_cluster_sound(bench.cluster)
    end = partial(last.end, commit=commit)
    if is_away:
        with bench.down(2), pytest.raises(OutcomeUnknown):
            end()
        # It is decided, and not complete.
        assert_cluster_sound(bench.cluster)
        refuse_all(bench, zombies)
    again = last.twin()
    end()
    assert again.end(commit=commit).identity == last.identity
    refuse_all(bench, zombies)
    assert_cluster_sound(bench.cluster, at_rest=True)
    for number in (1, 2, 3):
        assert bench.markers(bench.partition_at(number)) == [(int(commit), 32767)]
        last.send(bench.partition_at(number), b"next")
    for number in (1, 3):
        assert bench.markers(bench.partition_at(number, 1)) == [(int(commit), 32767)]
        assert bench.read(bench.partition_at(number, 1)) == [b"w"] * commit
    of_producers = select(offset_producers.c.producer_epoch)
    known = bench.cluster.own(2).read(lambda connection: connection.execute(of_producers).scalars().all())
    assert known == [32767]
    last.send_offsets(group_id, {bench.partition_at(1): 5})
    last.end(commit=True)
    for number in (1, 2, 3):
        assert bench.read(bench.partition_at(number)) == ([b"a", b"next"] if commit else [b"next"])
    assert bench.committed(group_id) == {bench.partition_at(1): 5}
    assert_cluster_sound(bench.cluster, at_rest=True)


@pytest.mark.slow_but_first
@ENDS
def test_what_the_last_one_has_decided_is_completed_by_others(bench: Bench, commit: bool):
    group_id = bench.name_at(3, "group")
    *zombies, last = taken_over(bench, group_id, times=2)
    with bench.down(3), pytest.raises(OutcomeUnknown):
        last.end(commit=commit)
    recover(bench.cluster.own(1), bench.cluster)
    refuse_all(bench, zombies)
    assert_cluster_sound(bench.cluster, at_rest=True)
    new = Producer(bench.cluster, last.transactional_id).start(**KEEP)
    if commit:
        # It stands, though a newer one has come since.
        last.twin().end(commit=True, is_repeated=True)
    with pytest.raises((ProducerFenced, InvalidProducerIdMapping)):
        last.end(commit=commit)
    new.send(bench.partition_at(2), b"next")
    new.end(commit=True)
    assert bench.read(bench.partition_at(2)) == ([b"a", b"next"] if commit else [b"next"])
    assert bench.committed(group_id) == ({bench.partition_at(1): 4} if commit else {})


@pytest.mark.slow
def test_an_administrator_aborts_what_was_taken_over(bench: Bench):
    group_id = bench.name_at(2, "group")
    *zombies, last = taken_over(bench, group_id, times=2)
    assert abort_by_administrator(bench.cluster.own(1), last.transactional_id, cluster=bench.cluster)
    refuse_all(bench, zombies)
    with pytest.raises(TransactionAbortable):
        last.end(commit=True)
    last.end(commit=False)
    refuse_all(bench, zombies)
    last.send(bench.partition_at(3), b"next")
    last.end(commit=True)
    assert [bench.read(bench.partition_at(number)) for number in (1, 2, 3)] == [[], [], [b"next"]]
    assert bench.committed(group_id) == {}
    assert_cluster_sound(bench.cluster, at_rest=True)
