"""Transactions that take part in two-phase commit (KIP-939): what the coordinator has of it."""

from __future__ import annotations

from functools import partial

import pytest

from txnstore.errors import (
    InvalidProducerIdMapping,
    InvalidTransactionState,
    ProducerFenced,
    TransactionAbortable,
    TransactionalIdAuthorizationFailed,
)
from txnstore.model import ControlType, ProducerIdentity
from txnstore.transactions.outcome import Outcome, read_outcome, resolve_outcome
from txnstore.transactions.protocol import TIMEOUT_NEVER_MS, TransactionState
from txnstore.transactions.recovery import abort_by_administrator
from txnstore.transactions.tokens import PreparedTxnState
from txnstore.transactions.transaction import abort_if_timed_out

S = TransactionState
TWO_PHASE = {"enable_two_phase_commit": True}
KEEP = {"enable_two_phase_commit": True, "keep_prepared": True}
ENDS = pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
TIMES = pytest.mark.parametrize("times", [1, 2, 3], ids=["one takes over", "two take over", "three take over"])
WAYS = pytest.mark.parametrize("writes_elsewhere", [False, True], ids=["in one database", "over several databases"])


@pytest.fixture
def open_bench(bench):
    """A store that allows two-phase commit."""
    bench.set_store({"transaction.two.phase.commit.enable": "true"})
    return bench


def prepared(bench):
    """Return a producer whose transaction is prepared, and what its application has remembered of it."""
    producer = bench.started(**TWO_PHASE)
    producer.send(bench.partition_ids[0], b"a")
    producer.send_offsets(bench.prefix, {bench.partition_ids[1]: 4})
    return producer, str(PreparedTxnState(producer.identity.producer_id, producer.identity.epoch))


def committed_offsets(bench) -> dict[int, int]:
    return {number: offset.offset for number, offset in bench.offsets(bench.prefix).offsets.items()}


@pytest.mark.parametrize("options", [TWO_PHASE, KEEP], ids=["enable", "enable and keep"])
def test_a_store_that_does_not_allow_it_refuses_two_phase_commit(own_bench, options: dict) -> None:
    producer = own_bench.producer()
    with pytest.raises(TransactionalIdAuthorizationFailed):
        producer.start(**options)
    assert not own_bench.is_known(producer.transactional_id)


def test_its_transactions_have_no_deadline_and_the_reaper_leaves_them(open_bench) -> None:
    producer, _ = prepared(open_bench)
    row = open_bench.row(producer.transactional_id)
    assert (row.timeout_ms, row.deadline_ms) == (TIMEOUT_NEVER_MS, None)
    open_bench.clock.advance(TIMEOUT_NEVER_MS + 1)
    assert not abort_if_timed_out(open_bench.store, producer.transactional_id)
    producer.commit()
    assert open_bench.read(open_bench.partition_ids[0]) == [b"a"]


@ENDS
def test_a_new_process_ends_what_the_old_one_prepared(open_bench, commit: bool) -> None:
    zombie, remembered = prepared(open_bench)
    new = zombie.twin()
    initialized = new.start(**KEEP)
    assert str(initialized.ongoing) == remembered
    assert initialized.identity == ProducerIdentity(zombie.identity.producer_id, 1)
    # It is not aborted by the start; nobody sees it yet.
    assert open_bench.row(new.transactional_id).state is S.ONGOING
    assert open_bench.read(open_bench.partition_ids[0]) == []

    new.end(commit=commit)
    assert open_bench.read(open_bench.partition_ids[0]) == ([b"a"] if commit else [])
    assert committed_offsets(open_bench) == ({open_bench.partition_ids[1]: 4} if commit else {})
    kind = ControlType.COMMIT if commit else ControlType.ABORT
    assert open_bench.markers(open_bench.partition_ids[0]) == [(1, kind, 2)]
    (finished,) = open_bench.finished(open_bench.partition_ids[0])
    assert (finished.producer_epoch, finished.first_offset) == (0, 0)


def test_the_process_that_prepared_it_is_fenced_by_the_new_one(open_bench) -> None:
    zombie, _ = prepared(open_bench)
    zombie.twin().start(**KEEP)
    for late in (
        zombie.commit,
        zombie.abort,
        lambda: zombie.send(open_bench.partition_ids[0], b"late"),
        lambda: zombie.send_offsets(open_bench.prefix, {open_bench.partition_ids[1]: 9}),
    ):
        with pytest.raises(ProducerFenced):
            late()
    assert open_bench.row(zombie.transactional_id).state is S.ONGOING


def test_the_new_process_adds_nothing_to_what_was_prepared(open_bench, offsets_of) -> None:
    zombie, _ = prepared(open_bench)
    new = zombie.twin()
    new.start(**KEEP)
    rest = [
        lambda: new.send(open_bench.partition_ids[0], b"more"),
        lambda: new.send(open_bench.partition_ids[1], b"more"),
        lambda: new.send_offsets(open_bench.prefix, {open_bench.partition_ids[1]: 9}),
        lambda: new.commit(appends=[new.batch(open_bench.partition_ids[0], b"more")]),
        lambda: new.commit(offsets=[offsets_of(open_bench.prefix, {open_bench.partition_ids[1]: 9})]),
    ]
    for more in rest:
        with pytest.raises(InvalidTransactionState):
            more()
    new.become(new.identity)
    new.commit()
    assert open_bench.read(open_bench.partition_ids[0]) == [b"a"]
    new.send(open_bench.partition_ids[0], b"next")
    new.commit()
    assert open_bench.read(open_bench.partition_ids[0]) == [b"a", b"next"]


def test_several_restarts_in_a_row_each_fence_the_one_before(open_bench) -> None:
    producer, remembered = prepared(open_bench)
    processes = [producer]
    for epoch in (1, 2, 3):
        process = processes[-1].twin()
        initialized = process.start(**KEEP)
        assert (str(initialized.ongoing), initialized.identity.epoch) == (remembered, epoch)
        processes.append(process)
    for zombie in processes[:-1]:
        with pytest.raises(ProducerFenced):
            zombie.commit()
    last = processes[-1]
    last.commit()
    assert open_bench.read(open_bench.partition_ids[0]) == [b"a"]
    assert open_bench.markers(open_bench.partition_ids[0]) == [(1, ControlType.COMMIT, 4)]
    assert committed_offsets(open_bench) == {open_bench.partition_ids[1]: 4}


def test_a_commit_of_what_was_prepared_can_be_repeated(open_bench) -> None:
    zombie, _ = prepared(open_bench)
    new = zombie.twin()
    new.start(**KEEP)
    again = new.twin()
    assert new.commit().identity == again.commit().identity
    assert open_bench.bounds(open_bench.partition_ids[0]).high_watermark == 2


def test_where_nothing_is_open_there_is_nothing_to_keep(open_bench) -> None:
    producer = open_bench.started(**TWO_PHASE)
    initialized = producer.start(**KEEP)
    assert (initialized.ongoing, initialized.identity.epoch) == (None, 1)
    producer.send(open_bench.partition_ids[0], b"a")
    producer.commit()
    assert producer.start(**KEEP).ongoing is None
    assert open_bench.read(open_bench.partition_ids[0]) == [b"a"]


def test_a_decided_transaction_is_completed_and_not_kept(open_bench) -> None:
    dead, _ = prepared(open_bench)
    dead.decide(commit=True)
    new = dead.twin()
    assert new.start(**KEEP).ongoing is None
    assert open_bench.read(open_bench.partition_ids[0]) == [b"a"]


@pytest.mark.parametrize("options", [{}, TWO_PHASE], ids=["without two-phase commit", "with it"])
def test_a_start_that_keeps_nothing_aborts_what_was_prepared(open_bench, options: dict) -> None:
    """This is how an administrator ends a transaction that nobody will: forced termination (KAFKA-19003)."""
    zombie, _ = prepared(open_bench)
    new = zombie.twin()
    assert new.start(**options).ongoing is None
    assert open_bench.read(open_bench.partition_ids[0]) == []
    assert open_bench.bounds(open_bench.partition_ids[0]).last_stable_offset == 2
    assert committed_offsets(open_bench) == {}
    with pytest.raises(ProducerFenced):
        zombie.commit()


def test_an_expected_producer_that_was_replaced_does_not_take_over_what_was_prepared(open_bench) -> None:
    zombie, _ = prepared(open_bench)
    new = zombie.twin()
    new.start(**KEEP)
    with pytest.raises(ProducerFenced):
        zombie.start(expected=zombie.identity, **KEEP)
    assert new.start(expected=new.identity, **KEEP).identity.epoch == 2


@ENDS
def test_at_the_last_epoch_a_prepared_transaction_can_still_be_taken_over_and_ended(open_bench, commit: bool) -> None:
    producer = open_bench.started(**TWO_PHASE)
    open_bench.set_row(producer.transactional_id, producer_epoch=32766)
    producer.become(ProducerIdentity(producer.identity.producer_id, 32766))
    producer.send(open_bench.partition_ids[0], b"a")
    new = producer.twin()
    assert new.start(**KEEP).identity.epoch == 32767
    with pytest.raises(ProducerFenced):
        producer.end(commit=commit)
    again = new.twin()
    ended = new.end(commit=commit)
    assert ended.identity.epoch == 0
    assert ended.identity.producer_id != producer.identity.producer_id
    assert again.end(commit=commit).identity == ended.identity
    assert open_bench.read(open_bench.partition_ids[0]) == ([b"a"] if commit else [])


def prepared_at_the_last_epoch(bench, *, writes_elsewhere: bool):
    """Return who has prepared a transaction at epoch 32766."""
    producer = bench.started(writes_elsewhere=writes_elsewhere, **TWO_PHASE)
    bench.set_row(producer.transactional_id, producer_epoch=32766)
    producer.become(ProducerIdentity(producer.identity.producer_id, 32766))
    producer.send(bench.partition_ids[0], b"a")
    producer.send_offsets(bench.prefix, {bench.partition_ids[1]: 4})
    return producer


def taken_over_at_the_last_epoch(bench, *, writes_elsewhere: bool, times: int = 1):
    """Return those who were replaced over a transaction that was prepared at epoch 32766, and who has it."""
    processes = [prepared_at_the_last_epoch(bench, writes_elsewhere=writes_elsewhere)]
    for _ in range(times):
        processes.append(processes[-1].twin())
        assert processes[-1].start(**KEEP).ongoing == processes[0].identity
    *zombies, new = processes
    return zombies, new


def refuse(*requests) -> None:
    for request in requests:
        with pytest.raises((ProducerFenced, InvalidProducerIdMapping)):
            request()


def refuse_all(bench, zombies) -> None:
    """See that these can do nothing, though an answer may have been lost."""
    for zombie in zombies:
        refuse(
            zombie.commit,
            zombie.abort,
            partial(zombie.commit, appends=[zombie.batch(bench.partition_ids[0], b"late")], is_repeated=True),
            partial(zombie.send, bench.partition_ids[1], b"late"),
            partial(zombie.send_offsets, bench.prefix, {bench.partition_ids[1]: 9}),
            partial(zombie.start, expected=zombie.identity, **KEEP),
            partial(zombie.start, expected=zombie.identity),
        )


@pytest.mark.slow_but_first
@WAYS
@TIMES
@ENDS
def test_at_the_last_epochs_each_who_takes_over_fences_all_before(
    open_bench, writes_elsewhere: bool, times: int, commit: bool
) -> None:
    """Two would write as the same producer: records of one would be taken for repetitions of the other one's."""
    zombies, new = taken_over_at_the_last_epoch(open_bench, writes_elsewhere=writes_elsewhere, times=times)
    identities = {process.identity for process in (*zombies, new)}
    assert len(identities) == times + 1
    refuse_all(open_bench, zombies)
    if writes_elsewhere:
        new.decide(commit=commit)
        refuse_all(open_bench, zombies)
    again = new.twin()
    ended = new.end(commit=commit)
    # Its answer was lost: it asks again, and is answered as long as nobody else begins.
    for _ in range(2):
        assert again.twin().end(commit=commit).identity == ended.identity
    assert ended.identity.epoch == 0
    assert {ended.identity.producer_id}.isdisjoint(identity.producer_id for identity in identities)
    refuse_all(open_bench, zombies)
    new.send(open_bench.partition_ids[0], b"next")
    refuse_all(open_bench, zombies)
    refuse(again.commit, again.abort, partial(again.start, expected=again.identity))
    new.commit()
    refuse_all(open_bench, zombies)
    refuse(again.commit, again.abort)
    assert open_bench.read(open_bench.partition_ids[0]) == ([b"a", b"next"] if commit else [b"next"])
    assert committed_offsets(open_bench) == ({open_bench.partition_ids[1]: 4} if commit else {})
    kind = ControlType.COMMIT if commit else ControlType.ABORT
    assert open_bench.markers(open_bench.partition_ids[0]) == [(1, kind, 32767), (3, ControlType.COMMIT, 1)]


@pytest.mark.slow_but_first
@TIMES
@ENDS
def test_the_end_of_what_was_taken_over_at_the_last_epochs_can_be_repeated_while_it_is_not_complete(
    open_bench, times: int, commit: bool
) -> None:
    _, new = taken_over_at_the_last_epoch(open_bench, writes_elsewhere=True, times=times)
    new.decide(commit=commit)
    next_id = open_bench.row(new.transactional_id).next_producer_id
    assert new.end(commit=commit).identity == ProducerIdentity(next_id, 0)
    assert open_bench.read(open_bench.partition_ids[0]) == ([b"a"] if commit else [])


@pytest.mark.slow_but_first
@ENDS
def test_what_was_decided_of_it_is_completed_by_whoever_comes_next(open_bench, commit: bool) -> None:
    zombies, dead = taken_over_at_the_last_epoch(open_bench, writes_elsewhere=True, times=3)
    dead.decide(commit=commit)
    next_id = open_bench.row(dead.transactional_id).next_producer_id
    new = dead.twin()
    assert new.start(**KEEP).ongoing is None
    assert new.identity == ProducerIdentity(next_id + 1, 0)
    refuse_all(open_bench, [*zombies, dead] if not commit else zombies)
    if commit:
        # It stands, and is the last thing that it is told.
        dead.twin().commit(is_repeated=True)
        refuse(dead.commit)
    assert open_bench.read(open_bench.partition_ids[0]) == ([b"a"] if commit else [])


@pytest.mark.slow_but_first
@WAYS
@TIMES
def test_of_an_abort_by_an_administrator_at_the_last_epochs_hears_who_had_taken_over_last(
    open_bench, writes_elsewhere: bool, times: int
) -> None:
    zombies, new = taken_over_at_the_last_epoch(open_bench, writes_elsewhere=writes_elsewhere, times=times)
    cluster = new.coordinator.cluster
    assert abort_by_administrator(open_bench.store, new.transactional_id, cluster=cluster)
    refuse_all(open_bench, zombies)
    with pytest.raises(TransactionAbortable, match="by an administrator"):
        new.twin().commit()
    new.abort()
    refuse_all(open_bench, zombies)
    new.send(open_bench.partition_ids[0], b"next")
    new.commit()
    assert open_bench.read(open_bench.partition_ids[0]) == [b"next"]


@pytest.mark.slow_but_first
@WAYS
def test_a_start_that_keeps_nothing_aborts_what_was_taken_over_at_the_last_epochs(
    open_bench, writes_elsewhere: bool
) -> None:
    zombies, last = taken_over_at_the_last_epoch(open_bench, writes_elsewhere=writes_elsewhere, times=2)
    new = last.twin()
    assert new.start(**TWO_PHASE).ongoing is None
    refuse_all(open_bench, [*zombies, last])
    new.commit(appends=[new.batch(open_bench.partition_ids[0], b"next")])
    assert open_bench.read(open_bench.partition_ids[0]) == [b"next"]
    assert committed_offsets(open_bench) == {}


def test_at_the_last_epochs_an_expected_start_over_it_can_be_repeated(open_bench) -> None:
    zombies, last = taken_over_at_the_last_epoch(open_bench, writes_elsewhere=False, times=2)
    new = last.twin()
    new.start(expected=last.identity, **TWO_PHASE)
    assert last.twin().start(expected=last.identity, **TWO_PHASE).identity == new.identity
    refuse_all(open_bench, zombies)


@pytest.mark.parametrize("commits_whole", [True, False], ids=["the short way", "the general way"])
def test_whoever_took_over_at_the_last_epochs_adds_nothing_and_goes_on_afterwards(
    open_bench, monkeypatch, commits_whole: bool
) -> None:
    monkeypatch.setattr(open_bench.store, "commits_whole", commits_whole)
    zombies, new = taken_over_at_the_last_epoch(open_bench, writes_elsewhere=False, times=2)
    for process in (*zombies, new):
        with pytest.raises((ProducerFenced, InvalidTransactionState)):
            process.twin().commit(appends=[process.twin().batch(open_bench.partition_ids[0], b"more")])
    new.commit()
    for value in (b"b", b"c"):
        for zombie in zombies:
            refuse(partial(zombie.commit, appends=[zombie.twin().batch(open_bench.partition_ids[0], b"more")]))
        new.commit(appends=[new.batch(open_bench.partition_ids[0], value)])
    assert open_bench.read(open_bench.partition_ids[0]) == [b"a", b"b", b"c"]


def test_many_more_take_it_over_than_there_are_epochs(open_bench) -> None:
    """A process that dies at each start takes it over each time."""
    zombies, new = taken_over_at_the_last_epoch(open_bench, writes_elsewhere=False, times=2)
    open_bench.set_row(new.transactional_id, producer_epoch=99_999)
    new.start(**KEEP)
    assert new.identity.epoch == 100_000
    refuse_all(open_bench, zombies)
    new.commit()
    assert open_bench.read(open_bench.partition_ids[0]) == [b"a"]


@ENDS
def test_the_outcome_of_what_was_taken_over_at_the_last_epochs_is_known_by_its_name(open_bench, commit: bool) -> None:
    zombies, new = taken_over_at_the_last_epoch(open_bench, writes_elsewhere=False, times=2)
    name = zombies[0].identity

    def is_told(outcome: Outcome) -> bool:
        return open_bench.store.read(lambda connection: read_outcome(connection, name)) is outcome

    assert is_told(Outcome.OPEN)
    new.end(commit=commit)
    assert is_told(Outcome.COMMITTED if commit else Outcome.ABORTED)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("asks", range(3), ids=["who prepared it", "who was replaced", "who has it"])
def test_the_question_that_fences_ends_what_was_taken_over_at_the_last_epochs(open_bench, asks: int) -> None:
    zombies, new = taken_over_at_the_last_epoch(open_bench, writes_elsewhere=False, times=2)
    identity = [*zombies, new][asks].identity
    answers = {resolve_outcome(open_bench.store, new.transactional_id, identity) for _ in range(2)}
    assert answers == {Outcome.ABORTED}
    refuse_all(open_bench, zombies)
    refuse(new.commit)
