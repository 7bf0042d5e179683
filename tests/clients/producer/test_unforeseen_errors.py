"""An error that nobody foresees, at every step of a commit: what its program is told is what readers see."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from concurrent.futures import Future
from typing import Any

import pytest

from tests.clients.callers import calling, ledger_of, make_ledger
from tests.clients.producer.pipelined import (
    records_wait_for_their_commit,
    the_thread_is_done_with_what_was_answered,
)
from tests.clients.producer.transactional import allow_two_phase_commit
from tests.clients.steps import PATIENCE_SECONDS, create_topic, error_of, read_to_end, refusal_of, values
from txnstore import KafkaError, KafkaException
from txnstore.background_thread import BackgroundThread
from txnstore.clients.producer import enlistment, pipeline, progress, thread
from txnstore.clients.producer import sender as sender_module
from txnstore.clients.producer.enlistment import Enlistment
from txnstore.clients.producer.pipeline import CommitPipeline
from txnstore.clients.producer.progress import TransactionOffsets, TransactionProgress
from txnstore.clients.producer.queue import Accumulator, Batch
from txnstore.clients.producer.requests import ProducerSession
from txnstore.clients.producer.sender import Sender
from txnstore.clients.producer.thread import Alarm, DelayedJob, SenderStopped, SenderThread
from txnstore.clients.producer.transactions import ProducerTransactions
from txnstore.db.callers.enlisted import EnlistedConnection
from txnstore.errors import OutcomeUnknown
from txnstore.transactions.coordinator import TransactionCoordinator

__all__ = ["records_wait_for_their_commit", "the_thread_is_done_with_what_was_answered"]

TOPIC, PARTITIONS = "orders", (0, 1)
#: So often a program makes a call again at most.
TRIES_MAX = 5
#: At so many calls of one function in one commit the error is tried.
CALLS_MAX = 12

#: What is on the way of every commit, by where it stands and its name.
ALWAYS = [
    (DelayedJob, "forget"),
    (ProducerSession, "become"),
    (ProducerSession, "begin_transaction"),
    (ProducerSession, "note_places"),
    (ProducerSession, "prepare"),
    (Sender, "report"),
    (TransactionOffsets, "stop_lingering"),
]
#: In a cluster the answer of another database rings as well, and a sleeper that does not hear of it sleeps for long.
OF_ONE_DATABASE = [(Alarm, "ring")]
#: What is on the way of one that is waited for, or is done in the background.
IN_A_CALL = [
    (progress, "result_within"),
    (thread, "new_future"),
    (sender_module, "InFlight"),
    (Accumulator, "take_batches"),
    (ProducerTransactions, "_answer_of_commit"),
    (ProducerTransactions, "_ask_to_commit"),
    (ProducerTransactions, "_commit_work"),
    (ProducerTransactions, "_work_once"),
    (Sender, "_can_be_prepared"),
    (Sender, "_last_requests"),
    (Sender, "begin_flush"),
    (Sender, "last_requests"),
    (SenderThread, "submit"),
    (SenderThread, "until_answered"),
    (TransactionCoordinator, "end_transaction"),
    (TransactionOffsets, "clear"),
    (TransactionOffsets, "committed"),
    (TransactionOffsets, "were_committed"),
    (TransactionProgress, "asked_to_commit"),
    (TransactionProgress, "at_coordinator"),
    (TransactionProgress, "check_delivered"),
    (TransactionProgress, "enter"),
    (TransactionProgress, "reset"),
    (TransactionProgress, "submit"),
    (TransactionProgress, "wait"),
]
OF_SEALED = [
    (CommitPipeline, "_commit"),
    (CommitPipeline, "_commit_each"),
    (CommitPipeline, "_done"),
    (CommitPipeline, "_next"),
    (CommitPipeline, "_prepared"),
    (CommitPipeline, "_seal"),
    (CommitPipeline, "seal"),
    (SenderThread, "until_answered"),
    (TransactionCoordinator, "end_transaction"),
    (TransactionProgress, "asked_to_commit"),
    (TransactionProgress, "at_coordinator"),
    (pipeline, "SealedTransaction"),
]
OF_ENLISTED = [
    (EnlistedConnection, "_send_commit"),
    (EnlistedConnection, "check"),
    (EnlistedConnection, "commit"),
    (Enlistment, "_ask"),
    (Enlistment, "_begin_ending"),
    (Enlistment, "_commit_enlisted"),
    (Enlistment, "_gather"),
    (Enlistment, "_gather_work"),
    (Enlistment, "_settle_work"),
    (Enlistment, "_wait_until"),
    (Enlistment, "release"),
    (Sender, "_can_be_prepared"),
    (Sender, "take_everything"),
    (SenderThread, "submit"),
    (TransactionOffsets, "committed"),
    (TransactionOffsets, "were_committed"),
    (TransactionProgress, "check_delivered"),
    (TransactionProgress, "enter"),
    (TransactionProgress, "reset"),
    (TransactionProgress, "submit"),
    (TransactionProgress, "wait"),
    (enlistment, "CommitRequest"),
    (enlistment, "end_whole_within"),
    (enlistment, "take_changes"),
]
#: Of these only one side: else records are lost to their reports, between two instructions that want no memory.
ONLY_BEHIND = {"_settle_work", "committed", "report"}
ONLY_AT = {"take_everything"}


#: What there is to be told whatever fails there: the answer is known, or nothing has been asked for.
BEHIND_THE_ANSWER = dict.fromkeys(("clear", "release", "reset", "were_committed"), "committed")
BEFORE_IT_IS_ASKED_FOR = dict.fromkeys(
    ("_can_be_prepared", "_last_requests", "begin_flush", "check_delivered", "last_requests", "new_future", "submit"),
    "aborted",
)
OUTCOMES = BEHIND_THE_ANSWER | BEFORE_IT_IS_ASKED_FOR
OUTCOMES_OF_SEALED = dict.fromkeys(("_commit", "_commit_each", "_done", "_next", "_prepared", "become"), "committed")


class Fault:
    """Lets one call of a function fail, by its number, while it is set; `behind` it has done its work then."""

    def __init__(self, patch, owner, name, *, behind=False):
        self.has_come = False
        self._number = -1
        self._calls = itertools.count()
        function = getattr(owner, name)

        def failing(*arguments, **named):
            is_the_one = self._number >= 0 and next(self._calls) == self._number
            self.has_come |= is_the_one
            if is_the_one and not behind:
                raise MemoryError(name)
            result = function(*arguments, **named)
            if is_the_one:
                raise MemoryError(name)
            return result

        patch.setattr(owner, name, failing)

    def set(self, number=0):
        self.has_come, self._calls, self._number = False, itertools.count(), number

    def clear(self):
        self._number = -1


class Program:
    """A program that commits in one way, does what errors tell it, and remembers what it was told."""

    def __init__(self, make_producer, url, *, before=None, commit, after=lambda: None):
        self._make_producer = make_producer
        self.url = url
        self._before, self._commit, self._after = before, commit, after
        self.told: dict[bytes, str] = {}
        self.to_be_aborted: set[bytes] = set()
        self.reports: dict[bytes, list[object]] = {}
        self.producer: Any = None
        create_topic(url, TOPIC, len(PARTITIONS))

    def ready(self):
        """Have a producer that knows the topic, a new one if the last is finished."""
        if self.producer is None:
            self.producer = self._make_producer({"transactional.id": "anna", "linger.ms": 50_000})
            self.producer.init_transactions(PATIENCE_SECONDS)
            self.transact(b"first of %d" % len(self.told), commit=commit_and_wait)

    def transact(self, value, fault=None, number=0, *, commit=None):
        """Write a transaction, and end it as the errors want it."""
        self.ready()
        producer, reports = self.producer, self.reports.setdefault(value, [])
        producer.begin_transaction()
        for partition in PARTITIONS:
            producer.produce(TOPIC, value, partition=partition, on_delivery=lambda error, _: reports.append(error))
        if commit is None and self._before is not None:
            self._before(producer, value)
        if fault is not None:
            fault.set(number)
        self.told[value] = told = self._end(value, commit or self._commit, fault)
        self._after()
        if told == "unknown":
            producer.close()
            self.producer = None
        else:
            assert producer.flush(PATIENCE_SECONDS) == 0

    def _end(self, value, commit, fault):
        for _ in range(TRIES_MAX):
            try:
                commit(self.producer)
            except KafkaException as exception:
                error: KafkaError = exception.args[0]
                assert error.fatal() + error.txn_requires_abort() + error.retriable() == 1, error
                if error.fatal():
                    return "unknown"
                may_abort = error.txn_requires_abort()
                if may_abort:
                    self.to_be_aborted.add(value)
            except MemoryError:
                may_abort = True
            else:
                return "committed"
            finally:
                if fault is not None:
                    fault.clear()
            told = self._abort() if may_abort else None
            if told is not None:
                return told
        return "nothing"

    def _abort(self):
        """Return what is told, or None: the commit has to be asked for again."""
        refused = refusal_of(self.producer.abort_transaction, PATIENCE_SECONDS)
        if refused is None:
            return "aborted"
        if refused.is_fatal:
            return "unknown"
        if str(refused.text).endswith("state Ready"):
            # There is nothing left to be aborted.
            return "committed"
        assert refused.code == KafkaError._CONFLICT, refused
        return None

    def check(self):
        """Compare what was told with what there is, which is returned; the producer is closed."""
        self.transact(b"at last", commit=commit_and_wait)
        self.producer.close()
        found = Counter(values(read_to_end(self.url, TOPIC, partitions=PARTITIONS)))
        wrong = [
            (value, told, found[value], self.reports[value])
            for value, told in self.told.items()
            if not self._is_right(told, found[value], self.reports[value])
        ]
        assert wrong == []
        # An error that asks for an abort says that nothing stands, whatever the abort says.
        assert [value for value in self.to_be_aborted if found[value]] == []
        assert set(self.told.values()) >= {"committed", "aborted"}
        return found

    def _is_right(self, told, there, reports):
        answers = {len(PARTITIONS): {"committed", "unknown"}, 0: {"aborted", "unknown"}}
        if len(reports) != len(PARTITIONS) or told not in answers.get(there, ()):
            return False
        if self._before is flush_a_part or "," in self.url:
            # Those that were sent before, to another database for one, are durable whatever became of the commit.
            return True
        return told == "unknown" or all((error is None) == (told == "committed") for error in reports)


def commit_and_wait(producer):
    producer.commit_transaction(PATIENCE_SECONDS)


def leave_and_wait(producer):
    producer.commit_transaction_async().result(PATIENCE_SECONDS)


def flush_a_part(producer, _):
    assert producer.flush(PATIENCE_SECONDS) == 0
    producer.produce(TOPIC, b"more", partition=0)


def fail_at_every_step(program, steps, monkeypatch, outcomes):
    """Let each call of each function fail in a transaction of its own, before it and behind it.

    `outcomes`: by name of a function what has to be told.
    """
    steps = [*steps, *ALWAYS, *(() if "," in program.url else OF_ONE_DATABASE)]
    for (owner, name), behind in itertools.product(steps, (False, True)):
        if name in (ONLY_AT if behind else ONLY_BEHIND):
            continue
        with monkeypatch.context() as patched:
            fault = Fault(patched, owner, name, behind=behind)
            for number in range(CALLS_MAX):
                side = "behind" if behind else "at"
                value = f"{side} call {number} of {owner.__name__}.{name}".encode()
                program.transact(value, fault, number)
                if not fault.has_come:
                    break
                assert name not in outcomes or program.told[value] == outcomes[name], value
            assert number > 0, f"{name} is not on the way"
    return program.check()


@pytest.mark.slow
def test_at_every_step_of_a_commit(make_producer, url, monkeypatch):
    fail_at_every_step(Program(make_producer, url, commit=commit_and_wait), IN_A_CALL, monkeypatch, OUTCOMES)


@pytest.mark.slow
def test_at_every_step_of_a_commit_in_the_background(make_producer, url, monkeypatch):
    program = Program(make_producer, url, before=flush_a_part, commit=leave_and_wait)
    fail_at_every_step(program, IN_A_CALL, monkeypatch, OUTCOMES)


@pytest.mark.slow
def test_at_every_step_of_a_commit_that_is_wholly_in_the_client(make_producer, url, monkeypatch):
    fail_at_every_step(Program(make_producer, url, commit=leave_and_wait), OF_SEALED, monkeypatch, OUTCOMES_OF_SEALED)


@pytest.mark.slow
def test_at_every_step_of_a_commit_with_an_enlisted_connection(make_producer, url, monkeypatch):
    make_ledger(url)
    callers = contextlib.ExitStack()

    def enlist(producer, value):
        caller = callers.enter_context(calling(url, "core"))
        producer.enlist(caller.given)
        caller.write(value.decode())

    with callers:
        program = Program(make_producer, url, before=enlist, commit=commit_and_wait, after=callers.close)
        found = fail_at_every_step(program, OF_ENLISTED, monkeypatch, BEHIND_THE_ANSWER)
    assert ledger_of(url) == sorted(value.decode() for value in program.told if b" call " in value and found[value])


# --- what no new try mends -------------------------------------------------------------------------------------------


def begun(producer, value, reports=None):
    producer.begin_transaction()
    report = None if reports is None else lambda error, _: reports.append(error)
    producer.produce(TOPIC, value, partition=0, on_delivery=report)


def end_mistakenly(make_producer, url, monkeypatch, *, stands, leaves=0):
    """Let each answer to a commit get lost by a mistake, and the first commit stand or not; return what is told."""
    create_topic(url, TOPIC)
    reports: list[object] = []
    made: list[object] = []

    def mistaken(real):
        def ask(*arguments, **named):
            if stands and not made:
                made.append(real(*arguments, **named))
            raise ZeroDivisionError

        return ask

    producer = make_producer(
        {"transactional.id": "anna", "linger.ms": 50_000, "transaction.timeout.ms": 1_000, "retry.backoff.max.ms": 100}
    )
    producer.init_transactions(PATIENCE_SECONDS)
    begun(producer, b"before")
    producer.commit_transaction(PATIENCE_SECONDS)
    for name in ("end_transaction", "commit_several"):
        monkeypatch.setattr(TransactionCoordinator, name, mistaken(getattr(TransactionCoordinator, name)))
    futures = []
    # The producer's thread comes to know of all of them at once.
    with producer._changed if leaves > 1 else contextlib.nullcontext():
        for number in range(leaves or 1):
            begun(producer, b"%d" % number, reports)
            if leaves:
                futures.append(producer.commit_transaction_async())
    errors = [error_of(future.result, PATIENCE_SECONDS) for future in futures]
    for _ in range(TRIES_MAX):
        if errors and not errors[0].retriable():
            break
        # Its own time may be up a moment earlier.
        errors = [error_of(producer.commit_transaction, PATIENCE_SECONDS)]
    assert error_of(producer.abort_transaction, PATIENCE_SECONDS).fatal()
    producer.poll(0)
    assert len(reports) == len(errors)
    assert None not in reports
    producer.close()
    there = [b"%d" % number for number in range(len(errors))] if stands else []
    assert values(read_to_end(url, TOPIC)) == [b"before", *there]
    return [(error.fatal(), error.code(), "the outcome is unknown" in error.str()) for error in errors]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("stands", [False, True])
@pytest.mark.parametrize("leaves", [0, 1])
def test_a_lasting_mistake_ends_the_producer_and_the_outcome_is_unknown(
    make_producer, url, monkeypatch, stands, leaves
):
    told = end_mistakenly(make_producer, url, monkeypatch, stands=stands, leaves=leaves)
    assert told == [(True, KafkaError._TIMED_OUT, True)]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("stands", [False, True])
def test_a_lasting_mistake_leaves_no_commit_without_an_answer(make_producer, url, monkeypatch, stands):
    told = end_mistakenly(make_producer, url, monkeypatch, stands=stands, leaves=2)
    assert told == [(True, KafkaError._TIMED_OUT, True)] * 2


def test_an_enlisted_commit_whose_fate_cannot_be_asked_for_ends_the_producer(make_producer, url, monkeypatch):
    create_topic(url, TOPIC)
    make_ledger(url)
    send = EnlistedConnection._send_commit

    def lose(*arguments):
        send(*arguments)
        raise OutcomeUnknown

    def mistaken(*_, **__):
        raise ZeroDivisionError

    producer = make_producer({"transactional.id": "anna", "transaction.timeout.ms": 1_000, "retry.backoff.max.ms": 100})
    producer.init_transactions(PATIENCE_SECONDS)
    monkeypatch.setattr(EnlistedConnection, "_send_commit", lose)
    monkeypatch.setattr(enlistment, "resolve_end", mistaken)
    with calling(url, "core") as caller:
        producer.begin_transaction()
        producer.enlist(caller.given)
        caller.write("1")
        producer.produce(TOPIC, b"1", partition=0)
        for _ in range(TRIES_MAX):
            error = error_of(producer.commit_transaction, PATIENCE_SECONDS)
            if not error.retriable():
                break
    assert (error.fatal(), "the outcome is unknown" in error.str()) == (True, True)
    assert error_of(producer.abort_transaction, PATIENCE_SECONDS).fatal()
    assert (ledger_of(url), values(read_to_end(url, TOPIC))) == (["1"], [b"1"])


# --- single steps ----------------------------------------------------------------------------------------------------


@pytest.fixture
def producer(make_producer, url):
    create_topic(url, TOPIC)
    producer = make_producer({"transactional.id": "anna", "linger.ms": 50_000})
    producer.init_transactions(PATIENCE_SECONDS)
    return producer


def fail_once(monkeypatch, owner, name):
    Fault(monkeypatch, owner, name).set()


@pytest.mark.parametrize(("owner", "name"), [(TransactionCoordinator, "init_producer_id"), (SenderThread, "submit")])
def test_the_claim_of_the_id_is_made_again(make_producer, url, monkeypatch, owner, name):
    create_topic(url, TOPIC)
    producer = make_producer({"transactional.id": "anna"})
    fail_once(monkeypatch, owner, name)
    with pytest.raises(MemoryError):
        producer.init_transactions(PATIENCE_SECONDS)
    producer.init_transactions(PATIENCE_SECONDS)
    begun(producer, b"1")
    producer.commit_transaction(PATIENCE_SECONDS)
    assert values(read_to_end(url, TOPIC)) == [b"1"]


def test_a_call_for_which_no_thread_can_be_started_is_made_again(make_producer, url, monkeypatch):
    create_topic(url, TOPIC)
    producer = make_producer({"transactional.id": "anna"})

    def refuse(*_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(BackgroundThread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            producer.init_transactions(PATIENCE_SECONDS)
    producer.init_transactions(PATIENCE_SECONDS)
    begun(producer, b"1")
    producer.commit_transaction(PATIENCE_SECONDS)
    assert values(read_to_end(url, TOPIC)) == [b"1"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Sender, "drop_in_flight"),
        (Sender, "purge"),
        (Sender, "settle"),
        (SenderThread, "submit"),
        (TransactionCoordinator, "end_transaction"),
        (TransactionOffsets, "clear"),
        (TransactionProgress, "reset"),
    ],
)
def test_an_abort_that_fails_half_way_is_made_again(producer, url, monkeypatch, owner, name):
    reports: list[object] = []
    begun(producer, b"in vain", reports)
    producer.flush(PATIENCE_SECONDS)
    fail_once(monkeypatch, owner, name)
    assert error_of(producer.abort_transaction, PATIENCE_SECONDS).retriable()
    producer.abort_transaction(PATIENCE_SECONDS)
    begun(producer, b"1")
    producer.commit_transaction(PATIENCE_SECONDS)
    assert values(read_to_end(url, TOPIC)) == [b"1"]


def test_what_is_prepared_stays_so_if_its_commit_fails_before_it_is_asked_for(make_producer, url, monkeypatch):
    allow_two_phase_commit(url)
    create_topic(url, TOPIC)
    producer = make_producer({"transactional.id": "anna", "transaction.two.phase.commit.enable": True})
    producer.init_transactions(PATIENCE_SECONDS)
    begun(producer, b"1")
    remembered = producer.prepare_transaction(PATIENCE_SECONDS)
    fail_once(monkeypatch, Sender, "last_requests")
    # Whoever remembers it has decided already: it is not to be aborted.
    refused = error_of(producer.complete_transaction, remembered, PATIENCE_SECONDS)
    assert (refused.retriable(), refused.txn_requires_abort()) == (True, False)
    producer.complete_transaction(remembered, PATIENCE_SECONDS)
    assert values(read_to_end(url, TOPIC)) == [b"1"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("owner", "name"), [(Accumulator, "put_assigned"), (Batch, "of")])
@pytest.mark.parametrize("number", range(1, 4))
def test_all_records_of_a_topic_that_is_looked_up_are_committed_or_none(
    make_producer, url, monkeypatch, owner, name, number
):
    producer = make_producer({"transactional.id": "anna"})
    producer.init_transactions(PATIENCE_SECONDS)
    original, calls, reports = getattr(owner, name), itertools.count(1), []

    def fail_at_this_one(*arguments):
        if next(calls) == number:
            raise MemoryError
        return original(*arguments)

    monkeypatch.setattr(owner, name, fail_at_this_one)
    producer.begin_transaction()
    for value in b"1", b"2", b"3":
        producer.produce(TOPIC, value, partition=0, on_delivery=lambda error, _: reports.append(error))
    try:
        producer.commit_transaction(PATIENCE_SECONDS)
        expected = [b"1", b"2", b"3"]
    except KafkaException as refusal:
        assert refusal.args[0].txn_requires_abort()  # noqa: PT017 - which of the two it is depends on the way taken
        producer.abort_transaction(PATIENCE_SECONDS)
        expected = []
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert [error is None for error in reports] == [bool(expected)] * 3
    monkeypatch.undo()
    assert values(read_to_end(url, TOPIC)) == expected


def test_a_block_without_memory_for_its_commit_is_aborted(producer, url, monkeypatch):
    def refuse(*_):
        raise MemoryError

    def program(patched):
        with producer.transaction():
            producer.produce(TOPIC, b"in vain", partition=0)
            patched.setattr(TransactionProgress, "check_writers", refuse)

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        program(patched)
    with producer.transaction():
        producer.produce(TOPIC, b"1", partition=0)
    assert values(read_to_end(url, TOPIC)) == [b"1"]


def test_who_closes_between_an_answer_and_its_reports_hears_that_it_stands(producer, url, monkeypatch):
    reports: list[object] = []
    is_stopped = threading.Event()
    done = CommitPipeline._done

    def stop(self, sealed):
        if not is_stopped.is_set():
            is_stopped.set()
            raise SenderStopped
        done(self, sealed)

    begun(producer, b"known")
    producer.commit_transaction(PATIENCE_SECONDS)
    monkeypatch.setattr(CommitPipeline, "_done", stop)
    begun(producer, b"1", reports)
    assert producer.commit_transaction_async().result(PATIENCE_SECONDS) is None
    assert is_stopped.is_set()
    producer.poll(0)
    assert reports == [None]
    assert values(read_to_end(url, TOPIC)) == [b"known", b"1"]


def test_a_commit_that_stands_is_told_although_its_future_cannot_be_ended_at_first(producer, url, monkeypatch):
    begun(producer, b"known")
    producer.commit_transaction(PATIENCE_SECONDS)
    fault = Fault(monkeypatch, Future, "set_result")
    begun(producer, b"1")
    fault.set()
    assert producer.commit_transaction_async().result(PATIENCE_SECONDS) is None
    assert fault.has_come
    assert values(read_to_end(url, TOPIC)) == [b"known", b"1"]


def test_a_transaction_is_sealed_as_a_whole_or_not_at_all(producer, url, monkeypatch):
    """A list that does not grow: the records are still its transaction's."""

    class Full(list):
        def __iadd__(self, _):
            raise MemoryError

    begun(producer, b"known")
    producer.commit_transaction_async().result(PATIENCE_SECONDS)
    begun(producer, b"1")
    pipeline_of = producer._transactions._pipeline
    pending, pipeline_of._pending = pipeline_of._pending, Full()
    with pytest.raises(MemoryError):
        producer.commit_transaction_async()
    pipeline_of._pending = pending
    producer.commit_transaction(PATIENCE_SECONDS)
    assert values(read_to_end(url, TOPIC)) == [b"known", b"1"]
