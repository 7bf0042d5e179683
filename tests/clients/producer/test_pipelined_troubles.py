"""Commits that nobody waits for, in trouble: no future is done too early or never, and what follows a failure waits."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import sqlalchemy
from sqlalchemy import update

from tests.clients.consumer.log_writer import eventually
from tests.clients.producer.pipelined import *  # noqa: F403 - the fixtures
from tests.clients.producer.pipelined import ABORTABLE, begun, delete_for_good, failure_of, flags_of, left
from tests.clients.producer.transactional import allow_two_phase_commit, committed, read, seen
from tests.clients.steps import NO_MEMBER, PATIENCE_SECONDS, create_topic, error_of, read_to_end, refusal_of, values
from txnstore import KafkaError, KafkaException, Outcome, TopicPartition, outcome
from txnstore.clients.producer import pipeline as pipeline_module
from txnstore.clients.producer import producer as producer_module
from txnstore.clients.producer.pipeline import CommitPipeline
from txnstore.clients.producer.progress import TransactionOffsets
from txnstore.clients.producer.queue import DeliveryReports
from txnstore.clients.producer.requests import ProduceRequest, ProducerSession
from txnstore.clients.producer.sender import Sender
from txnstore.clients.producer.state import TransactionStage
from txnstore.db.opening import open_store
from txnstore.db.schema import transactions
from txnstore.errors import InvalidTopic, OutcomeUnknown, StoreBusy
from txnstore.log.append import Appended
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.protocol import EPOCH_EXHAUSTED


@pytest.fixture
def make_refused(url):
    """Make topics that a producer knows and that are deleted behind its back."""

    def make(producer, name):
        topic = create_topic(url, name)
        left(producer, topic, b"before").result(PATIENCE_SECONDS)
        delete_for_good(url, topic)
        return topic

    return make


# --- no future is done too early -----------------------------------------------------------------------------------


def test_a_commit_with_an_enlisted_connection_that_takes_too_long_is_no_future(
    make_transactional, monkeypatch, url, topic
):
    may_go_on = threading.Event()
    take_everything = Sender.take_everything

    def slowly(self):
        assert may_go_on.wait(PATIENCE_SECONDS)
        return take_everything(self)

    monkeypatch.setattr(Sender, "take_everything", slowly)
    ready = make_transactional(transaction_timeout_ms=1_000)
    engine = sqlalchemy.create_engine(url)
    with engine.connect() as connection:
        ready.begin_transaction()
        ready.enlist(connection)
        ready.produce(topic, b"1", partition=0)
        error = error_of(ready.commit_transaction_async)
        assert (error.code(), error.retriable()) == (KafkaError._TIMED_OUT, True)
        may_go_on.set()
        assert ready.commit_transaction_async().result(0) is None
        assert values(read_to_end(url, topic)) == [b"1"]
    engine.dispose()


# --- what has failed is aborted before anything else ---------------------------------------------------------------


def test_a_commit_in_the_background_that_has_failed_can_be_aborted(ready, url, topic):
    begun(ready, topic, b"written")
    assert ready.flush(PATIENCE_SECONDS) == 0
    ready.produce("unheard-of", b"at fault", partition=7)
    future = ready.commit_transaction_async()
    assert flags_of(failure_of(future)) == ABORTABLE
    ready.abort_transaction(PATIENCE_SECONDS)
    left(ready, topic, b"after").result(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before", b"after"]


def test_a_commit_in_the_background_that_stands_cannot_be_aborted(ready, hold_database, url, topic):
    begun(ready, topic, b"written")
    assert ready.flush(PATIENCE_SECONDS) == 0
    with hold_database(url):
        future = ready.commit_transaction_async()
        assert error_of(ready.abort_transaction, 0.05).code() == KafkaError._TIMED_OUT
    assert error_of(ready.abort_transaction, PATIENCE_SECONDS).code() == KafkaError._STATE
    assert future.result(PATIENCE_SECONDS) is None
    left(ready, topic, b"after").result(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before", b"written", b"after"]


def test_what_a_refused_commit_has_left_in_the_store_is_aborted(ready, monkeypatch, url, topic):
    end_transaction = TransactionCoordinator.end_transaction

    def halfway(self, transactional_id, producer, *, commit, appends=(), **named):
        # As over several databases, of which one refuses its part.
        self.append(transactional_id, producer, appends)
        monkeypatch.setattr(TransactionCoordinator, "end_transaction", end_transaction)
        raise InvalidTopic

    monkeypatch.setattr(TransactionCoordinator, "end_transaction", halfway)
    assert flags_of(failure_of(left(ready, topic, b"half"))) == ABORTABLE
    ready.abort_transaction(PATIENCE_SECONDS)
    left(ready, topic, b"after").result(PATIENCE_SECONDS)
    assert seen(url, topic) == ([b"before", b"after"], [b"before", b"half", b"after"])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("call", ["commit", "offsets", "enlist", "leave"])
def test_no_call_of_the_next_transaction_outlives_a_refused_commit(
    ready, make_refused, hold_database, url, topic, call
):
    refused = make_refused(ready, "passing")
    engine = sqlalchemy.create_engine(url)
    with engine.connect() as connection:
        calls = {
            "commit": ready.commit_transaction,
            "offsets": lambda: ready.send_offsets_to_transaction([], b""),
            "enlist": lambda: ready.enlist(connection),
            "leave": lambda: ready.commit_transaction_async().result(PATIENCE_SECONDS),
        }
        with hold_database(url):
            future = left(ready, refused, b"at fault")
            begun(ready, topic, b"next")
        failure_of(future)
        if call != "offsets":
            assert error_of(calls[call]).code() == KafkaError.UNKNOWN_TOPIC_OR_PART
        assert error_of(ready.produce, topic, b"more").code() == KafkaError._STATE
        ready.abort_transaction(PATIENCE_SECONDS)
    engine.dispose()
    assert values(read_to_end(url, topic)) == [b"before"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("call", ["send_offsets_to_transaction", "transaction_token"])
def test_a_call_that_waits_behind_a_refused_commit_fails_as_it_does(
    ready, make_refused, hold_database, monkeypatch, url, topic, call
):
    refused = make_refused(ready, "passing")
    submit, is_submitted = ready._thread.submit, threading.Event()

    def submit_and_tell(job):
        try:
            return submit(job)
        finally:
            is_submitted.set()

    arguments = [[TopicPartition(topic, 0, 1)], NO_MEMBER] if call.startswith("send") else []
    with ThreadPoolExecutor() as threads:
        with hold_database(url):
            future = left(ready, refused, b"at fault")
            begun(ready, topic, b"next")
            monkeypatch.setattr(ready._thread, "submit", submit_and_tell)
            calling = threads.submit(error_of, getattr(ready, call), *arguments)
            assert is_submitted.wait(PATIENCE_SECONDS)
        failure_of(future)
        assert calling.result(PATIENCE_SECONDS).code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    ready.abort_transaction(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before"]


def test_a_block_after_a_refused_commit_is_refused_until_somebody_aborts(ready, make_refused, url, topic):
    failure_of(left(ready, make_refused(ready, "passing"), b"at fault"))
    for _ in range(2):
        with pytest.raises(KafkaException), ready.transaction():
            pytest.fail("the block was entered")
    ready.abort_transaction(PATIENCE_SECONDS)
    with ready.transaction():
        ready.produce(topic, b"after", partition=0)
    assert values(read_to_end(url, topic)) == [b"before", b"after"]


def test_a_block_whose_earlier_commit_is_refused_meanwhile_is_aborted(ready, make_refused, hold_database, url, topic):
    refused = make_refused(ready, "passing")

    def program():
        future = left(ready, refused, b"at fault")
        with ready.transaction():
            ready.produce(topic, b"given up", partition=0)
            held.close()
        return future

    held = contextlib.ExitStack()
    held.enter_context(hold_database(url))
    with held, pytest.raises(KafkaException):
        program()
    # The block has aborted it already.
    left(ready, topic, b"after").result(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before", b"after"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_written", [False, True], ids=["sealed", "in the background"])
def test_a_block_that_fails_behind_its_own_commit_says_that_it_was_not_aborted(
    ready, hold_database, url, topic, is_written
):
    futures: list[Future[None]] = []

    def program():
        with ready.transaction():
            ready.produce(topic, b"1", partition=0)
            if is_written:
                assert ready.flush(PATIENCE_SECONDS) == 0
            held.enter_context(hold_database(url))
            futures.append(ready.commit_transaction_async())
            if is_written:
                # The block waits for it.
                held.close()
            raise ZeroDivisionError

    with contextlib.ExitStack() as held, pytest.raises(ZeroDivisionError) as caught:
        program()
    assert caught.value.__notes__ == ["The transaction was not aborted: the block has asked for its commit itself"]
    assert futures.pop().result(PATIENCE_SECONDS) is None
    left(ready, topic, b"after").result(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before", b"1", b"after"]


def test_records_that_the_look_up_refuses_fail_their_commit(ready, hold_database, url, topic):
    with hold_database(url):
        kept = left(ready, topic, b"kept")
        begun(ready, topic, b"1")
        ready.produce("unheard-of", b"2", partition=7)
        future = ready.commit_transaction_async()
    assert kept.result(PATIENCE_SECONDS) is None
    assert failure_of(future).code() == KafkaError._INCONSISTENT
    ready.abort_transaction(PATIENCE_SECONDS)
    left(ready, topic, b"after").result(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before", b"kept", b"after"]


def test_what_was_purged_is_missed_by_its_own_commit_and_no_other(ready, hold_database, url, topic):
    with hold_database(url):
        kept = left(ready, topic, b"kept")
        begun(ready, topic, b"purged")
        ready.purge(in_flight=False)
        future = ready.commit_transaction_async()
        ready.purge(blocking=False)
    assert kept.result(PATIENCE_SECONDS) is None
    assert failure_of(future).code() == KafkaError._INCONSISTENT
    ready.abort_transaction(PATIENCE_SECONDS)
    left(ready, topic, b"after").result(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before", b"kept", b"after"]


def test_no_other_thread_commits_without_what_is_being_purged(ready, monkeypatch, url, topic):
    done_in_between = []
    lock = ready._thread.alarm.lock
    fail_waiting = DeliveryReports.fail_waiting

    def commit_in_between():
        # Without waiting for the lock: the purge waits for this thread.
        if lock.acquire(blocking=False):
            lock.release()
            done_in_between.append(ready.commit_transaction_async().result(PATIENCE_SECONDS))

    def slowly(reports, count_failed):
        with ThreadPoolExecutor() as threads:
            threads.submit(commit_in_between).result(PATIENCE_SECONDS)
        fail_waiting(reports, count_failed)

    begun(ready, topic, b"purged")
    with monkeypatch.context() as patched:
        patched.setattr(DeliveryReports, "fail_waiting", slowly)
        ready.purge(in_flight=False)
    assert done_in_between == []
    assert error_of(ready.commit_transaction, PATIENCE_SECONDS).code() == KafkaError._INCONSISTENT
    ready.abort_transaction(PATIENCE_SECONDS)
    left(ready, topic, b"after").result(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before", b"after"]


@pytest.mark.slow
def test_what_is_sealed_does_not_expire(make_transactional, hold_database, url, topic):
    # Long enough for a busy machine to come from the record to its commit.
    ready = make_transactional(message_timeout_ms=1_500, linger_ms=0)
    left(ready, topic, b"before").result(PATIENCE_SECONDS)
    with hold_database(url):
        futures = [left(ready, topic, b"%d" % number) for number in range(3)]
        assert ready.flush(1.7) == 3
    for future in futures:
        assert future.result(PATIENCE_SECONDS) is None
    assert values(read_to_end(url, topic)) == [b"before", b"0", b"1", b"2"]


# --- a producer that is closed before its commits are done ----------------------------------------------------------


@pytest.mark.slow
def test_commits_that_close_could_not_wait_for_are_told(ready, hold_database, monkeypatch, caplog, url, topic):
    monkeypatch.setattr(producer_module, "CLOSE_TIMEOUT_SECONDS", 0.05)
    with hold_database(url):
        futures = [left(ready, topic, b"%d" % number) for number in range(2)]
        assert ready.close()
    assert "2 commits of 'anna' that nobody waits for are not done" in caplog.text
    # One that the database has in hand may be made once it is let go of.
    stand = [number for number, future in enumerate(futures) if is_told_committed(future, url)]
    assert values(read_to_end(url, topic)) == [b"before", *(b"%d" % number for number in stand)]


def is_told_committed(future, url):
    error = future.exception(PATIENCE_SECONDS)
    if error is None:
        return True
    assert "closed" in str(error)
    names = [] if isinstance(error, RuntimeError) else names_in(error.args[0])
    return bool(names) and all(outcome(name, url) is Outcome.COMMITTED for name in names)


def names_in(error):
    return list(dict.fromkeys(re.findall('outcome."([0-9]+:[0-9]+)"', error.str())))


def test_a_commit_that_was_lost_with_those_before_it_is_not_told_by_a_name_of_the_next_process(
    ready, make_transactional, monkeypatch, url, topic
):
    def lose(*_, **__):
        raise OutcomeUnknown("it was lost on its way")

    with monkeypatch.context() as patches:
        patches.setattr(producer_module, "CLOSE_TIMEOUT_SECONDS", 0.05)
        patches.setattr(TransactionCoordinator, "commit_several", lose)
        patches.setattr(TransactionCoordinator, "end_transaction", lose)
        with ready._changed:
            futures = [left(ready, topic, b"lost %d" % number) for number in range(3)]
        eventually(lambda: ready._transactions._pipeline._pending[0].asked_as is not None)
        ready.close()
    following = make_transactional()
    for _ in range(3):
        left(following, topic, b"other").result(PATIENCE_SECONDS)
    following.close()
    names = [names_in(failure_of(future)) for future in futures]
    assert outcome(names[1][-1], url) is Outcome.COMMITTED  # Of another one's records.
    assert [len(of_one) for of_one in names] == [1, 2, 2]
    assert {outcome(of_one[0], url) for of_one in names} == {Outcome.ABORTED}
    assert not any(is_told_committed(future, url) for future in futures)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("count", [0, 1, 3], ids=["in the background", "alone", "together"])
def test_a_commit_whose_answer_close_did_not_wait_for_is_told_by_its_name(ready, monkeypatch, url, topic, count):
    def losing(method):
        asked: list[object] = []

        def lose(self, *arguments, **named):
            if not asked:
                asked.append(method(self, *arguments, **named))
            raise OutcomeUnknown("its answer was lost")

        return lose

    monkeypatch.setattr(producer_module, "CLOSE_TIMEOUT_SECONDS", 0.05)
    if count != 3:
        monkeypatch.setattr(TransactionCoordinator, "end_transaction", losing(TransactionCoordinator.end_transaction))
    else:
        several = losing(TransactionCoordinator.commit_several)
        monkeypatch.setattr(TransactionCoordinator, "commit_several", several)
        monkeypatch.setattr(TransactionCoordinator, "end_transaction", several)
    if not count:
        begun(ready, topic, b"0")
        assert ready.flush(PATIENCE_SECONDS) == 0
        futures = [ready.commit_transaction_async()]
        eventually(lambda: ready._transactions.progress.stage is TransactionStage.COMMITTING)
    else:
        with ready._changed:
            futures = [left(ready, topic, b"%d" % number) for number in range(count)]
        eventually(lambda: ready._transactions._pipeline._pending[0].asked_as is not None)
    ready.close()
    for future in futures:
        error = failure_of(future)
        assert (error.code(), error.retriable(), "closed" in error.str()) == (KafkaError._TIMED_OUT, False, True)
        assert {outcome(name, url) for name in names_in(error)} == {Outcome.COMMITTED}
    assert len({str(failure_of(future)) for future in futures}) == len(futures)
    assert values(read_to_end(url, topic)) == [b"before", *(b"%d" % number for number in range(len(futures)))]


# --- in order, all of them -----------------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@pytest.mark.parametrize("before", [1, 10, 19, 20, 21])
def test_the_last_epochs_are_passed_on_the_way(make_transactional, hold_database, url, topic, before):
    make_transactional().close()
    with open_store(url) as store:
        epoch = EPOCH_EXHAUSTED - before
        store.write(lambda connection: connection.execute(update(transactions).values(producer_epoch=epoch)))
    ready = make_transactional()
    left(ready, topic, b"before").result(PATIENCE_SECONDS)
    with hold_database(url):
        futures = [left(ready, topic, b"%d" % number) for number in range(20)]
    for future in futures:
        future.result(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before", *(b"%d" % number for number in range(20))]
    with open_store(url) as store:
        assert_sound(store, at_rest=True)


def test_a_transaction_s_records_are_not_sent_before_the_commits_before_it(ready, url, topic):
    # The producer's thread comes to know of both at the same moment.
    with ready._changed:
        future = left(ready, topic, b"1")
        begun(ready, topic, b"given up")
        ready._sender.begin_flush()
    assert future.result(PATIENCE_SECONDS) is None
    ready._sender.end_flush()
    ready.abort_transaction(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before", b"1"]


def test_offsets_of_the_next_transaction_wait_for_the_commit_before_though_something_pauses(
    ready, make_consumer, topic
):
    consumer = make_consumer({"group.id": "copiers", "enable.auto.commit": False})
    consumer.subscribe([topic])
    read(consumer, 1)

    def send(offset):
        metadata = consumer.consumer_group_metadata()
        ready.send_offsets_to_transaction([TopicPartition(topic, 0, offset)], metadata, PATIENCE_SECONDS)

    begun(ready, topic, b"1")
    send(1)
    ready.commit_transaction(PATIENCE_SECONDS)
    # As after a topic that could not be looked up; and what is sent now lingers for less.
    ready._thread.backoff.not_before_seconds = time.monotonic() + 1
    ready._transactions.progress.delayed._delay_seconds = 0
    future = left(ready, topic, b"2")
    begun(ready, topic, b"given up")
    send(2)
    assert future.result(PATIENCE_SECONDS) is None
    ready.abort_transaction(PATIENCE_SECONDS)
    assert committed(consumer, topic) == 1


@pytest.mark.slow_but_first
@pytest.mark.parametrize("records", [(), (b"3",)], ids=["empty", "with a record"])
def test_a_call_that_came_too_late_prepares_no_later_transaction(
    make_transactional, hold_database, url, topic, records
):
    allow_two_phase_commit(url)
    ready = make_transactional(transaction_two_phase_commit_enable=True)
    left(ready, topic, b"before").result(PATIENCE_SECONDS)
    with hold_database(url):
        futures = [left(ready, topic, b"1")]
        begun(ready, topic, b"2")
        # It waits for the first commit; and the transaction goes on without it.
        assert error_of(ready.prepare_transaction, 0.05).code() == KafkaError._TIMED_OUT
        futures.append(ready.commit_transaction_async())
        begun(ready, topic, *records)
    for future in futures:
        assert future.result(PATIENCE_SECONDS) is None
    # Behind the call that came too late.
    ready.list_topics(timeout=PATIENCE_SECONDS)
    assert not ready._transactions.progress.is_written
    ready.produce(topic, b"last", partition=0)
    ready.commit_transaction_async().result(PATIENCE_SECONDS)
    begun(ready, topic, b"prepared")
    state = ready.prepare_transaction(PATIENCE_SECONDS)
    assert outcome(state, url) is Outcome.OPEN
    ready.complete_transaction(state, PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before", b"1", b"2", *records, b"last", b"prepared"]


def test_what_has_left_the_queue_and_could_not_be_sent_yet_is_not_sealed(ready, monkeypatch, url, topic):
    prepare, is_asked, may_go_on = ProducerSession.prepare, threading.Event(), threading.Event()

    def later(self, batches):
        is_asked.set()
        if not may_go_on.is_set():
            raise StoreBusy
        return prepare(self, batches)

    monkeypatch.setattr(ProducerSession, "prepare", later)
    begun(ready, topic, b"1")
    ready._sender.begin_flush()
    assert is_asked.wait(PATIENCE_SECONDS)
    future = ready.commit_transaction_async()
    may_go_on.set()
    assert future.result(PATIENCE_SECONDS) is None
    ready._sender.end_flush()
    assert values(read_to_end(url, topic)) == [b"before", b"1"]


def test_the_next_ones_are_sealed_while_the_database_has_the_first(make_transactional, monkeypatch, url, topic):
    ready = make_transactional(transaction_timeout_ms=1_000)
    left(ready, topic, b"before").result(PATIENCE_SECONDS)
    end_transaction, is_asked, may_go_on = TransactionCoordinator.end_transaction, threading.Event(), threading.Event()

    def slowly(*arguments, **named):
        is_asked.set()
        assert may_go_on.wait(PATIENCE_SECONDS)
        return end_transaction(*arguments, **named)

    monkeypatch.setattr(TransactionCoordinator, "end_transaction", slowly)
    futures = [left(ready, topic, b"0")]
    assert is_asked.wait(PATIENCE_SECONDS)
    futures += [left(ready, topic, b"%d" % number) for number in range(1, 5)]
    begun(ready, topic, b"open")
    assert not any(future.done() for future in futures)
    may_go_on.set()
    for future in futures:
        assert future.result(PATIENCE_SECONDS) is None
    assert values(read_to_end(url, topic)) == [b"before", *(b"%d" % number for number in range(5))]


def test_a_connection_is_enlisted_behind_the_commits_before(ready, hold_database, url, topic):
    engine = sqlalchemy.create_engine(url)
    with engine.connect() as connection:
        with hold_database(url):
            future = left(ready, topic, b"1")
            begun(ready, topic, b"2")
            error = error_of(ready.enlist, connection, 0.05)
            assert (error.code(), error.retriable()) == (KafkaError._TIMED_OUT, True)
            assert "the commits before" in error.str()
        ready.enlist(connection, PATIENCE_SECONDS)
        assert future.result(PATIENCE_SECONDS) is None
        ready.commit_transaction(PATIENCE_SECONDS)
    engine.dispose()
    assert values(read_to_end(url, topic)) == [b"before", b"1", b"2"]


def test_close_waits_for_commits_without_records(make_transactional, make_consumer, hold_database, url, topic):
    consumer = make_consumer({"group.id": "copiers", "enable.auto.commit": False})
    consumer.subscribe([topic])
    ready = make_transactional()
    left(ready, topic, b"before").result(PATIENCE_SECONDS)
    read(consumer, 1)

    def leave(offset):
        ready.begin_transaction()
        positions = [TopicPartition(topic, 0, offset)]
        ready.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), PATIENCE_SECONDS)
        return ready.commit_transaction_async()

    leave(1).result(PATIENCE_SECONDS)
    with hold_database(url):
        futures = [leave(2), leave(3)]
        closing = threading.Thread(target=ready.close)
        closing.start()
        # Longer than one try of the database.
        closing.join(0.8)
    closing.join(PATIENCE_SECONDS)
    assert [future.result(0) for future in futures] == [None] * 2
    assert committed(consumer, topic) == 3


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["commit_several", "end_transaction"])
def test_a_mistake_of_ours_loses_no_commit_and_no_order(ready, hold_database, monkeypatch, url, topic, name):
    method = getattr(TransactionCoordinator, name)
    tries = itertools.count()

    def mistaken(self, *arguments, **named):
        if next(tries) < 2:
            raise ZeroDivisionError
        return method(self, *arguments, **named)

    with hold_database(url):
        futures = [left(ready, topic, b"first")]
        monkeypatch.setattr(TransactionCoordinator, name, mistaken)
        futures += [left(ready, topic, b"%d" % number) for number in range(5)]
        if name == "end_transaction":
            monkeypatch.setattr(TransactionCoordinator, "commit_several", lambda *_, **__: None)
    for future in futures:
        future.result(PATIENCE_SECONDS)
    # Whether several stand is asked of each by itself, at once.
    assert next(tries) > (2 if name == "end_transaction" else 0)
    assert values(read_to_end(url, topic)) == [b"before", b"first", *(b"%d" % number for number in range(5))]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("at_once", [True, False])
def test_what_stands_is_not_committed_again_though_its_reports_fail(
    ready, hold_database, monkeypatch, url, topic, at_once
):
    report = Sender.report
    failed: list[tuple[Sender, ProduceRequest, Sequence[Appended]]] = []

    def failing(self, request, appended):
        if not failed:
            failed.append((self, request, appended))
            raise MemoryError
        report(self, request, appended)

    if not at_once:
        monkeypatch.setattr(TransactionCoordinator, "commit_several", lambda *_, **__: None)
    with hold_database(url):
        futures = [left(ready, topic, b"first")]
        futures += [left(ready, topic, b"%d" % number) for number in range(3)]
        monkeypatch.setattr(Sender, "report", failing)
    for future in futures:
        assert future.result(PATIENCE_SECONDS) is None
    assert failed
    left(ready, topic, b"after").result(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before", b"first", b"0", b"1", b"2", b"after"]
    # close() would wait for it.
    report(*failed[0])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(ProducerSession, "begin_transaction"), (TransactionOffsets, "took"), (ProducerSession, "note_places")],
)
@pytest.mark.parametrize("number", range(3))
def test_what_was_answered_is_not_committed_again_wherever_there_is_no_memory(
    make_consumer, ready, hold_database, monkeypatch, url, topic, at_once, owner, name, number
):
    consumer = make_consumer({"group.id": "copiers", "enable.auto.commit": False})
    consumer.subscribe([topic])
    read(consumer, 1)
    metadata, step, calls = consumer.consumer_group_metadata(), getattr(owner, name), itertools.count()
    commits = TransactionCoordinator.commit_several if at_once else TransactionCoordinator.end_transaction
    is_answered = threading.Event()
    reports: list[object] = []

    def leave(value):
        ready.begin_transaction()
        ready.produce(topic, value, partition=0, on_delivery=lambda error, _: reports.append(error))
        ready.send_offsets_to_transaction([TopicPartition(topic, 0, 1)], metadata, PATIENCE_SECONDS)
        return ready.commit_transaction_async()

    def answer(*arguments, **named):
        ended = commits(*arguments, **named)
        is_answered.set()
        return ended

    def fail_once(*arguments):
        is_sender = threading.current_thread() is not threading.main_thread()
        if is_answered.is_set() and is_sender and next(calls) == number:
            raise MemoryError
        return step(*arguments)

    if not at_once:
        monkeypatch.setattr(TransactionCoordinator, "commit_several", lambda *_, **__: None)
    leave(b"known").result(PATIENCE_SECONDS)
    with hold_database(url):
        futures = [left(ready, topic, b"first")]
        monkeypatch.setattr(TransactionCoordinator, commits.__name__, answer)
        monkeypatch.setattr(owner, name, fail_once)
        futures += [leave(b"%d" % place) for place in range(3)]
    for future in futures:
        assert future.result(PATIENCE_SECONDS) is None
    left(ready, topic, b"after").result(PATIENCE_SECONDS)
    assert ready.flush(PATIENCE_SECONDS) == 0
    assert next(calls) > number
    assert reports == [None] * 4
    assert values(read_to_end(url, topic)) == [
        b"before",
        b"known",
        b"first",
        *(b"%d" % place for place in range(3)),
        b"after",
    ]


def test_a_database_that_commits_nothing_at_once_commits_them_one_by_one(
    make_transactional, hold_database, monkeypatch, url, topic
):
    monkeypatch.setenv("TXNSTORE_COMMITS_WHOLE", "0")
    ready = make_transactional()
    left(ready, topic, b"before").result(PATIENCE_SECONDS)
    with hold_database(url):
        futures = [left(ready, topic, b"%d" % number) for number in range(5)]
    for future in futures:
        future.result(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"before", *(b"%d" % number for number in range(5))]


def test_what_is_too_much_for_one_request_is_not_sealed(ready, hold_database, monkeypatch, url, topic):
    monkeypatch.setattr(pipeline_module, "REQUEST_BYTES_MAX", 1_000)
    with hold_database(url):
        small = left(ready, topic, b"a" * 600)
        also_small = left(ready, topic, b"b" * 600)
        begun(ready, topic, b"c" * 600, b"d" * 600)
        large = ready.commit_transaction_async()
        # It is under way, so nothing may be added, and the next one waits for it.
        assert error_of(ready.abort_transaction, 0.05).code() == KafkaError._TIMED_OUT
    for future in (small, also_small, large):
        assert future.result(PATIENCE_SECONDS) is None
    left(ready, topic, b"after").result(PATIENCE_SECONDS)
    assert [value[:1] for value in values(read_to_end(url, topic)) if value] == [b"b", b"a", b"b", b"c", b"d", b"a"]


def test_two_threads_that_begin_to_leave_commits_share_one_line(ready, monkeypatch, url, topic):
    made = []
    meet = threading.Barrier(2)
    make = CommitPipeline.__init__

    def slowly(self, *arguments):
        made.append(self)
        with contextlib.suppress(threading.BrokenBarrierError):
            meet.wait(1)
        make(self, *arguments)

    monkeypatch.setattr(CommitPipeline, "__init__", slowly)
    begun(ready, topic, b"1")
    told: list[object] = []

    def leave():
        try:
            told.append(ready.commit_transaction_async())
        except KafkaException as error:
            told.append(error.args[0].code())

    threads = [threading.Thread(target=leave) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert len(made) == 1
    futures = [each for each in told if isinstance(each, Future)]
    assert [future.result(PATIENCE_SECONDS) for future in futures] == [None]
    assert {each for each in told if not isinstance(each, Future)} <= {KafkaError._PREV_IN_PROGRESS, KafkaError._STATE}


#: How many records wait at most for those who serve them.
OTHERS_MAX = 1_000


def test_one_thread_leaves_commits_while_others_produce_and_serve(make_transactional, url):
    topic = create_topic(url, "shared", 3)
    producer = make_transactional()
    numbers, accepted = itertools.count(), []
    reports: list[tuple[None, bytes]] = []
    futures: list[Future[None]] = []
    is_over = threading.Event()

    def note(error, message):
        reports.append((error, message.value()))

    def produce():
        if len(producer) >= OTHERS_MAX:
            # How many would wait while a commit takes long is chance, and there may be more than the queue takes.
            producer.poll(0.01)
            return
        value = b"other %d" % next(numbers)
        refused = refusal_of(producer.produce, topic, value, partition=2, on_delivery=note)
        if refused is None:
            accepted.append(value)
        else:
            # Between two transactions, or while one is being sealed.
            assert refused.code == KafkaError._STATE

    def repeat(work):
        while not is_over.is_set():
            work()

    with ThreadPoolExecutor() as others:
        repeated = [
            others.submit(repeat, work) for work in (produce, lambda: producer.poll(0), lambda: producer.flush(0.01))
        ]
        try:
            for number in range(60):
                begun(producer, topic, b"%d" % number)
                producer.produce(topic, b"%d" % number, partition=1, on_delivery=note)
                futures.append(producer.commit_transaction_async())
        finally:
            is_over.set()
        for future in futures + repeated:
            future.result(PATIENCE_SECONDS)
    assert producer.flush(PATIENCE_SECONDS) == 0
    found = read_to_end(url, topic, partitions=(0, 1, 2))
    own = [b"%d" % number for number in range(60)]
    assert [[m.value() for m in found if m.partition() == number] for number in range(3)] == [own, own, accepted]
    assert sorted(reports) == sorted((None, value) for value in accepted + own)
