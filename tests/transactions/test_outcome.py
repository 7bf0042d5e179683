"""What became of a transaction, for whoever has only its transactional id and "pid:epoch" left."""

from __future__ import annotations

from functools import partial

import pytest
from sqlalchemy import update

from txnstore.db.schema import transaction_log
from txnstore.db.store import Store
from txnstore.errors import (
    InvalidProducerIdMapping,
    OutcomeForgotten,
    OutcomeUnknown,
    ProducerFenced,
    RecordTooLarge,
    StoreDamaged,
    StoreReadOnly,
    TransactionalIdNotFound,
)
from txnstore.model import ProducerIdentity
from txnstore.transactions.outcome import CommitRequest, Outcome, read_outcome, resolve_end, resolve_outcome
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.recovery import expire_transactional_ids, trim_journal
from txnstore.transactions.transaction import abort_if_timed_out

S = TransactionState


def ask_thrice(bench, producer, identity: ProducerIdentity) -> Outcome:
    """Return the answer, which is always the same one."""
    answers = {resolve_outcome(bench.store, producer.transactional_id, identity) for _ in range(3)}
    assert len(answers) == 1
    return answers.pop()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("writes_elsewhere", [False, True], ids=["in one database", "over several databases"])
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_a_transaction_that_has_ended_is_answered_and_nothing_is_changed(
    bench, writes_elsewhere: bool, commit: bool
) -> None:
    producer = bench.started(writes_elsewhere=writes_elsewhere)
    identity = producer.identity
    producer.send(bench.partition_ids[0], b"a")
    producer.end(commit=commit)
    before = bench.row(producer.transactional_id)
    assert ask_thrice(bench, producer, identity) is (Outcome.COMMITTED if commit else Outcome.ABORTED)
    assert bench.row(producer.transactional_id) == before


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_a_decided_transaction_is_completed_and_answered(bench, commit: bool) -> None:
    producer = bench.started(writes_elsewhere=True)
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


@pytest.mark.slow_but_first
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


@pytest.mark.parametrize("says_so", ["its row", "its journal"])
def test_what_another_id_says_of_a_producer_whose_id_has_expired_is_no_answer(own_bench, says_so: str) -> None:
    """Who is told that what was aborted is committed never writes it again."""
    own_bench.set_store({"transactional.id.expiration.ms": "1000"})
    producer = own_bench.started()
    aborted = producer.identity
    producer.send(own_bench.partition_ids[0], b"a")
    producer.abort()
    own_bench.clock.advance(1_000)
    assert expire_transactional_ids(own_bench.store)
    ask = partial(read_outcome, producer=aborted)
    assert own_bench.store.read(ask) is Outcome.ABORTED
    other = own_bench.producer(f"a {own_bench.prefix}")
    other.start()
    other_id = other.identity.producer_id
    other.send(own_bench.partition_ids[0], b"b")
    other.commit()
    if says_so == "its row":
        own_bench.set_row(other.transactional_id, previous_producer_id=aborted.producer_id)
    made_up = {"producer_id": aborted.producer_id}
    of_other = transaction_log.c.producer_id == other_id
    own_bench.store.write(lambda c: c.execute(update(transaction_log).where(of_other).values(made_up)))
    with pytest.raises(StoreDamaged, match=f"both say that they have producer {aborted.producer_id}"):
        own_bench.store.read(ask)


# --- a commit whose answer was lost, and a newer producer that comes before it is asked for again -----------------


def successor(bench, late) -> None:
    """Start another process, which goes on with transactions of its own."""
    newer = bench.producer(late.transactional_id)
    newer.start()
    for end in (newer.commit, newer.abort):
        newer.send(bench.partition_ids[0], b"newer")
        end()


def expire(bench, late) -> None:
    bench.clock.advance(1_000)
    assert late.transactional_id in expire_transactional_ids(bench.store)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("writes_elsewhere", [False, True], ids=["in one database", "over several databases"])
@pytest.mark.parametrize("since", ["a start", "a successor", "a new producer id", "an expiry"])
def test_a_commit_that_stands_is_answered_whoever_has_come_since(own_bench, writes_elsewhere: bool, since: str) -> None:
    own_bench.set_store({"transactional.id.expiration.ms": "1000"})
    producer = own_bench.started(writes_elsewhere=writes_elsewhere)
    if since == "a new producer id":
        own_bench.set_row(producer.transactional_id, producer_epoch=32766)
        producer.become(ProducerIdentity(producer.identity.producer_id, 32766))
    producer.send(own_bench.partition_ids[0], b"a")
    late = producer.twin()
    riding = {"appends": [late.batch(own_bench.partition_ids[1], b"b", b"c")]}
    (first,) = producer.commit(**riding).appended
    if since == "an expiry":
        expire(own_bench, late)
    elif since == "a successor":
        successor(own_bench, late)
    else:
        own_bench.producer(late.transactional_id).start()
    for _ in range(2):
        (again,) = late.twin().commit(**riding, is_repeated=True).appended
        assert (again.base_offset, again.last_offset) == (first.base_offset, first.last_offset)
    late.commit(**riding, is_repeated=True)
    for too_late in (late.commit, late.abort, lambda: late.send(own_bench.partition_ids[0], b"too late")):
        with pytest.raises((ProducerFenced, InvalidProducerIdMapping)):
            too_late()
    assert own_bench.read(own_bench.partition_ids[1]) == [b"b", b"c"]


def test_a_commit_that_never_came_is_refused_after_a_newer_producer(bench) -> None:
    producer = bench.started()
    producer.send(bench.partition_ids[0], b"a")
    late = producer.twin()
    successor(bench, late)
    for options in ({}, {"appends": [late.batch(bench.partition_ids[0], b"b")]}):
        with pytest.raises(ProducerFenced):
            late.commit(**options, is_repeated=True)
    assert bench.read(bench.partition_ids[0]) == [b"newer"]


def test_a_commit_that_another_one_has_made_is_answered_but_not_for_what_it_did_not_hold(bench) -> None:
    bench.set_store({"transaction.two.phase.commit.enable": "true"})
    producer = bench.started(enable_two_phase_commit=True)
    producer.send(bench.partition_ids[0], b"a")
    newer = bench.producer(producer.transactional_id)
    newer.start(enable_two_phase_commit=True, keep_prepared=True)
    with pytest.raises(ProducerFenced):
        producer.twin().commit(is_repeated=True)
    late_newer = newer.twin()
    newer.commit()
    bench.producer(producer.transactional_id).start(enable_two_phase_commit=True)
    late_newer.commit(is_repeated=True)
    late = producer.twin()
    with pytest.raises(ProducerFenced):
        late.commit(appends=[late.batch(bench.partition_ids[0], b"b")], is_repeated=True)
    producer.commit(is_repeated=True)
    assert bench.read(bench.partition_ids[0]) == [b"a"]


def test_a_commit_that_the_journal_does_not_remember_is_said_to_be_unknown(own_bench, monkeypatch) -> None:
    producer = own_bench.started()
    producer.send(own_bench.partition_ids[0], b"a")
    late = producer.twin()
    producer.commit()
    own_bench.clock.advance(604_800_001)
    trim_journal(own_bench.store)
    own_bench.producer(late.transactional_id).start()
    with monkeypatch.context() as failover:
        # Its journal may lack the end alone, which comes yet.
        failover.setattr(type(own_bench.store.backend), "is_standby", lambda *_: True)
        with pytest.raises(OutcomeUnknown):
            late.commit(is_repeated=True)
    with pytest.raises(OutcomeForgotten):
        late.commit(is_repeated=True)
    # One that was never asked for before was not made.
    with pytest.raises(ProducerFenced):
        late.commit()


def test_a_commit_that_a_standby_has_not_heard_of_is_said_to_be_unknown(bench, monkeypatch) -> None:
    """Connections may lead to one in the middle of a failover: an abort and a new try would be the second commit."""
    producer = bench.started()
    producer.send(bench.partition_ids[0], b"a")
    late = producer.twin()

    def refuse(*_: object, **__: object) -> None:
        raise StoreReadOnly("a standby")

    with monkeypatch.context() as failover:
        failover.setattr(Store, "write", refuse)
        failover.setattr(Store, "commit_whole", refuse)
        with pytest.raises(StoreReadOnly):
            late.commit(is_repeated=True)
        failover.setattr(type(bench.store.backend), "is_standby", lambda *_: True)
        with pytest.raises(OutcomeUnknown):
            late.commit(is_repeated=True)
        request = CommitRequest(late.transactional_id, late.identity)
        with pytest.raises(OutcomeUnknown):
            resolve_end(bench.store, request)
    producer.commit()
    with monkeypatch.context() as failover:
        failover.setattr(Store, "write", refuse)
        failover.setattr(Store, "commit_whole", refuse)
        late.commit(is_repeated=True)


def test_a_transaction_that_was_open_for_longer_than_the_journal_goes_back_is_answered(own_bench) -> None:
    own_bench.set_store({"transaction.two.phase.commit.enable": "true"})
    producer = own_bench.started(enable_two_phase_commit=True)
    identity = producer.identity
    producer.send(own_bench.partition_ids[0], b"a")
    own_bench.clock.advance(604_800_001)
    trim_journal(own_bench.store)
    assert own_bench.store.read(lambda connection: read_outcome(connection, identity)) is Outcome.OPEN
    producer.commit()
    trim_journal(own_bench.store)
    assert own_bench.store.read(lambda connection: read_outcome(connection, identity)) is Outcome.COMMITTED
    assert ask_thrice(own_bench, producer, identity) is Outcome.COMMITTED


def test_who_may_begin_after_a_decision_that_is_not_complete_is_fenced_by_the_question(bench) -> None:
    producer = bench.started(writes_elsewhere=True)
    producer.send(bench.partition_ids[0], b"a")
    producer.decide(commit=True)
    late = producer.twin()
    late.become(ProducerIdentity(late.identity.producer_id, late.identity.epoch + 1))
    assert ask_thrice(bench, late, late.identity) is Outcome.ABORTED
    with pytest.raises(ProducerFenced):
        late.send(bench.partition_ids[0], b"b")
    assert bench.read(bench.partition_ids[0]) == [b"a"]


def test_a_commit_of_a_producer_that_is_still_the_newest_was_not_made_however_short_the_journal(own_bench) -> None:
    producer = own_bench.started()
    own_bench.clock.advance(604_800_001)
    trim_journal(own_bench.store)
    append = producer.batch(own_bench.partition_ids[0], b"a" * 2_000_000)
    with pytest.raises(RecordTooLarge):
        producer.commit(appends=[append], is_repeated=True)
