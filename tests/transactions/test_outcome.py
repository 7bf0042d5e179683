"""What became of a transaction, for whoever has only its transactional id and "pid:epoch" left."""

from __future__ import annotations

import pytest

from txnstore.errors import ProducerFenced, TransactionalIdNotFound
from txnstore.model import ProducerIdentity
from txnstore.transactions.outcome import Outcome, resolve_outcome
from txnstore.transactions.recovery import abort_if_timed_out, expire_transactional_ids, trim_journal
from txnstore.transactions.states import TransactionState

S = TransactionState


def ask_thrice(bench, producer, identity: ProducerIdentity) -> Outcome:
    """Return the answer, which is always the same one."""
    answers = {resolve_outcome(bench.store, producer.transactional_id, identity) for _ in range(3)}
    assert len(answers) == 1
    return answers.pop()


@pytest.mark.parametrize("separate_delivery", [False, True], ids=["one transaction", "separate delivery"])
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_a_transaction_that_has_ended_is_answered_and_nothing_is_changed(
    bench, separate_delivery: bool, commit: bool
) -> None:
    producer = bench.started(separate_delivery=separate_delivery)
    identity = producer.identity
    producer.send(bench.partition_ids[0], b"a")
    producer.end(commit=commit)
    before = bench.row(producer.transactional_id)
    assert ask_thrice(bench, producer, identity) is (Outcome.COMMITTED if commit else Outcome.ABORTED)
    assert bench.row(producer.transactional_id) == before


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_a_decided_transaction_is_completed_and_answered(bench, commit: bool) -> None:
    producer = bench.started(separate_delivery=True)
    producer.send(bench.partition_ids[0], b"a")
    producer.decide(commit=commit)
    assert ask_thrice(bench, producer, producer.identity) is (Outcome.COMMITTED if commit else Outcome.ABORTED)
    assert bench.read(bench.partition_ids[0]) == ([b"a"] if commit else [])


def test_an_open_transaction_is_aborted_by_the_question_and_its_commit_comes_too_late(bench) -> None:
    producer = bench.started()
    producer.send(bench.partition_ids[0], b"a")
    assert ask_thrice(bench, producer, producer.identity) is Outcome.ABORTED
    with pytest.raises(ProducerFenced):
        producer.commit()
    assert bench.read(bench.partition_ids[0]) == []


def test_a_transaction_whose_first_request_was_lost_can_not_be_committed_any_more(bench) -> None:
    """The whole transaction went in one request, and nobody knows whether it arrived."""
    producer = bench.started()
    late = producer.twin()
    assert ask_thrice(bench, producer, producer.identity) is Outcome.ABORTED
    with pytest.raises(ProducerFenced):
        late.commit(appends=[late.batch(bench.partition_ids[0], b"late")])
    producer.start()
    assert ask_thrice(bench, producer, late.identity) is Outcome.ABORTED


def test_the_answer_stays_the_same_whatever_the_id_does_afterwards(bench) -> None:
    producer = bench.started()
    outcomes = {}
    for number, commit in enumerate([True, False, True]):
        outcomes[producer.identity] = Outcome.COMMITTED if commit else Outcome.ABORTED
        producer.send(bench.partition_ids[0], b"%d" % number)
        producer.end(commit=commit)
    producer.send(bench.partition_ids[0], b"open")
    for identity, outcome in outcomes.items():
        assert ask_thrice(bench, producer, identity) is outcome
    # Questions about the past leave the open transaction alone.
    producer.commit()
    assert bench.read(bench.partition_ids[0]) == [b"0", b"2", b"open"]


def test_a_transaction_that_was_aborted_for_its_age_is_answered(bench) -> None:
    producer = bench.started(timeout_ms=1_000)
    producer.send(bench.partition_ids[0], b"a")
    bench.clock.advance(1_001)
    abort_if_timed_out(bench.store, producer.transactional_id)
    assert ask_thrice(bench, producer, producer.identity) is Outcome.ABORTED


def test_at_the_last_epoch_the_answer_is_found_by_the_old_producer_id(bench) -> None:
    producer = bench.started()
    bench.set_row(producer.transactional_id, producer_epoch=32766)
    identity = ProducerIdentity(producer.identity.producer_id, 32766)
    producer.become(identity)
    producer.send(bench.partition_ids[0], b"a")
    producer.commit()
    assert ask_thrice(bench, producer, identity) is Outcome.COMMITTED


def test_who_goes_on_after_a_timeout_and_is_then_asked_about_is_fenced_and_not_told_to_abort_again(bench) -> None:
    producer = bench.started(timeout_ms=1_000)
    producer.send(bench.partition_ids[0], b"a")
    bench.clock.advance(1_001)
    abort_if_timed_out(bench.store, producer.transactional_id)
    producer.abort()
    assert ask_thrice(bench, producer, producer.identity) is Outcome.ABORTED
    for late in (lambda: producer.send(bench.partition_ids[0], b"b"), producer.commit, producer.abort):
        with pytest.raises(ProducerFenced):
            late()


@pytest.mark.parametrize("epoch", [0, 1, 2, 3])
def test_a_prepared_transaction_is_known_by_every_epoch_that_could_have_ended_it(bench, epoch: int) -> None:
    bench.set_store({"transaction.two.phase.commit.enable": "true"})
    producer = bench.started(enable_two_phase_commit=True)
    producer.send(bench.partition_ids[0], b"a")
    for _ in range(3):
        producer.start(enable_two_phase_commit=True, keep_prepared=True)
    identity = ProducerIdentity(producer.identity.producer_id, epoch)
    assert ask_thrice(bench, producer, identity) is Outcome.ABORTED
    assert bench.row(producer.transactional_id).state is S.COMPLETE_ABORT


@pytest.mark.parametrize("identity", [(10**12, 0), (0, 1), (0, 7)], ids=["another producer id", "next epoch", "later"])
def test_of_a_producer_that_there_never_was_nothing_is_known(bench, identity: tuple[int, int]) -> None:
    producer = bench.started()
    producer.send(bench.partition_ids[0], b"a")
    unknown = ProducerIdentity(producer.identity.producer_id + identity[0], identity[1])
    with pytest.raises(TransactionalIdNotFound):
        resolve_outcome(bench.store, producer.transactional_id, unknown)
    producer.commit()
    assert bench.read(bench.partition_ids[0]) == [b"a"]


def test_of_an_id_that_nobody_used_nothing_is_known(bench) -> None:
    with pytest.raises(TransactionalIdNotFound):
        resolve_outcome(bench.store, bench.new_id(), ProducerIdentity(0, 0))


def test_the_answer_outlives_the_id_and_ends_with_the_journal(own_bench) -> None:
    own_bench.set_store({"transactional.id.expiration.ms": "1000"})
    producer = own_bench.started()
    identity = producer.identity
    producer.send(own_bench.partition_ids[0], b"a")
    producer.commit()
    own_bench.clock.advance(1_000)
    assert expire_transactional_ids(own_bench.store)
    assert ask_thrice(own_bench, producer, identity) is Outcome.COMMITTED
    own_bench.clock.advance(604_800_001)
    trim_journal(own_bench.store)
    with pytest.raises(TransactionalIdNotFound):
        resolve_outcome(own_bench.store, producer.transactional_id, identity)
