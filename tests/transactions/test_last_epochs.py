"""Producers at the end of their 16 bits of epochs: the producer id is replaced and nothing is lost or done twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from txnstore.errors import InvalidProducerIdMapping, ProducerFenced, TransactionAbortable
from txnstore.model import ControlType, ProducerIdentity
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.recovery import abort_by_administrator
from txnstore.transactions.transaction import abort_if_timed_out

S = TransactionState
WAYS = pytest.mark.parametrize("writes_elsewhere", [False, True], ids=["in one database", "over several databases"])
ENDS = pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])


def at_epoch(bench, epoch: int, *, writes_elsewhere: bool = False):
    producer = bench.started(writes_elsewhere=writes_elsewhere)
    bench.set_row(producer.transactional_id, producer_epoch=epoch)
    producer.become(ProducerIdentity(producer.identity.producer_id, epoch))
    return producer


@pytest.mark.slow_but_first
@WAYS
@ENDS
def test_two_transactions_around_the_last_epoch(bench, writes_elsewhere: bool, commit: bool) -> None:
    producer = at_epoch(bench, 32765, writes_elsewhere=writes_elsewhere)
    old_id = producer.identity.producer_id
    partition_id = bench.partition_ids[0]

    producer.send(partition_id, b"a")
    producer.end(commit=commit)
    assert producer.identity == ProducerIdentity(old_id, 32766)

    producer.send(partition_id, b"b")
    producer.end(commit=commit)
    assert producer.identity.epoch == 0
    assert producer.identity.producer_id != old_id
    row = bench.row(producer.transactional_id)
    assert (row.previous_producer_id, row.next_producer_id) == (old_id, -1)

    producer.send(partition_id, b"c")
    producer.end(commit=commit)
    assert producer.identity.epoch == 1
    assert bench.read(partition_id) == ([b"a", b"b", b"c"] if commit else [])
    kind = ControlType.COMMIT if commit else ControlType.ABORT
    assert bench.markers(partition_id) == [(1, kind, 32766), (3, kind, 32767), (5, kind, 1)]


@pytest.mark.slow_but_first
@WAYS
@ENDS
def test_the_end_at_the_last_epoch_can_be_repeated(bench, writes_elsewhere: bool, commit: bool) -> None:
    producer = at_epoch(bench, 32766, writes_elsewhere=writes_elsewhere)
    producer.send(bench.partition_ids[0], b"a")
    again = producer.twin()
    first = producer.end(commit=commit)
    for _ in range(2):
        answer = again.twin().end(commit=commit)
        assert answer.identity == first.identity
    assert bench.bounds(bench.partition_ids[0]).high_watermark == 2


@ENDS
def test_the_end_at_the_last_epoch_can_be_repeated_while_it_is_not_complete(bench, commit: bool) -> None:
    producer = at_epoch(bench, 32766, writes_elsewhere=True)
    old_id = producer.identity.producer_id
    producer.send(bench.partition_ids[0], b"a")
    producer.decide(commit=commit)
    row = bench.row(producer.transactional_id)
    assert (row.identity, row.next_producer_id > old_id) == (ProducerIdentity(old_id, 32767), True)
    producer.end(commit=commit)
    assert producer.identity == ProducerIdentity(row.next_producer_id, 0)
    assert bench.read(bench.partition_ids[0]) == ([b"a"] if commit else [])


def test_a_commit_with_its_records_at_the_last_epoch_can_be_repeated(bench) -> None:
    producer = at_epoch(bench, 32766)
    append = producer.batch(bench.partition_ids[0], b"a")
    again = producer.twin()
    first, second = producer.commit(appends=[append]), again.commit(appends=[append])
    assert first.identity == second.identity
    assert [answer.appended[0].base_offset for answer in (first, second)] == [0, 0]
    assert bench.read(bench.partition_ids[0]) == [b"a"]


def test_the_old_producer_id_can_do_nothing_once_the_new_one_works(bench) -> None:
    producer = at_epoch(bench, 32766)
    producer.send(bench.partition_ids[0], b"a")
    old = producer.twin()
    producer.commit()
    with pytest.raises(InvalidProducerIdMapping):
        old.twin().send(bench.partition_ids[0], b"late")
    producer.send(bench.partition_ids[0], b"b")
    with pytest.raises(ProducerFenced):
        old.twin().commit()
    producer.commit()
    for late in (old.commit, old.abort, lambda: old.send(bench.partition_ids[0], b"late")):
        with pytest.raises(InvalidProducerIdMapping):
            late()
    assert bench.read(bench.partition_ids[0]) == [b"a", b"b"]


def time_out(bench, transactional_id: str) -> None:
    bench.clock.advance(60_001)
    assert abort_if_timed_out(bench.store, transactional_id)


def administer(bench, transactional_id: str) -> None:
    assert abort_by_administrator(bench.store, transactional_id)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("abort_from_outside", [time_out, administer], ids=["timeout", "administrator"])
@pytest.mark.parametrize("epoch", [32765, 32766])
def test_an_abort_from_outside_raises_the_epoch_or_replaces_the_producer_id(
    bench, abort_from_outside: Callable, epoch: int
) -> None:
    producer = at_epoch(bench, epoch)
    old_id = producer.identity.producer_id
    producer.send(bench.partition_ids[0], b"a")
    abort_from_outside(bench, producer.transactional_id)
    row = bench.row(producer.transactional_id)
    if epoch == 32765:
        assert row.identity == ProducerIdentity(old_id, 32766)
    else:
        assert row.producer_epoch == 0
        assert row.producer_id != old_id
    assert bench.markers(bench.partition_ids[0]) == [(1, ControlType.ABORT, epoch + 1)]

    with pytest.raises(TransactionAbortable):
        producer.twin().send(bench.partition_ids[0], b"late")
    with pytest.raises(TransactionAbortable):
        producer.twin().commit()
    producer.abort()
    assert producer.identity == row.identity
    producer.send(bench.partition_ids[0], b"b")
    producer.commit()
    assert bench.read(bench.partition_ids[0]) == [b"b"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("expects_itself", [False, True], ids=["nobody expected", "itself expected"])
@pytest.mark.parametrize("is_open", [False, True], ids=["at rest", "over an open transaction"])
def test_a_start_at_the_last_epoch_replaces_the_producer_id_and_can_be_repeated(
    bench, is_open: bool, expects_itself: bool
) -> None:
    producer = at_epoch(bench, 32766)
    old = producer.identity
    if is_open:
        producer.send(bench.partition_ids[0], b"a")
    expected = old if expects_itself else None
    producer.start(expected=expected)
    assert producer.identity.epoch == 0
    assert producer.identity.producer_id != old.producer_id
    if expects_itself:
        assert producer.twin().start(expected=old).identity == producer.identity
    assert bench.read(bench.partition_ids[0]) == []
    producer.send(bench.partition_ids[0], b"b")
    producer.commit()
    assert bench.read(bench.partition_ids[0]) == [b"b"]


def test_the_last_start_before_the_end_gives_out_epoch_32766(bench) -> None:
    producer = at_epoch(bench, 32765)
    old_id = producer.identity.producer_id
    assert producer.start().identity == ProducerIdentity(old_id, 32766)
    assert producer.start().identity.producer_id != old_id


def test_an_empty_abort_at_the_last_epoch_replaces_the_producer_id(bench) -> None:
    producer = at_epoch(bench, 32766)
    old = producer.twin()
    producer.abort()
    assert producer.identity.epoch == 0
    assert old.abort().identity == producer.identity
    producer.send(bench.partition_ids[0], b"a")
    producer.commit()
    assert bench.read(bench.partition_ids[0]) == [b"a"]


def test_a_decided_transaction_at_the_last_epoch_is_completed_by_a_start(bench) -> None:
    producer = at_epoch(bench, 32766, writes_elsewhere=True)
    producer.send(bench.partition_ids[0], b"a")
    producer.decide(commit=True)
    next_id = bench.row(producer.transactional_id).next_producer_id
    # Over several databases a start gives out no epoch of a producer id that somebody may have had.
    assert producer.start().identity == ProducerIdentity(next_id + 1, 0)
    assert bench.read(bench.partition_ids[0]) == [b"a"]
