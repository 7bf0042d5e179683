"""Ctrl-C at every moment of a transactional call: producer and connection can be used again, whatever it hits."""

from __future__ import annotations

import inspect
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import txnstore
from tests.clients.callers import calling, ledger_of, make_ledger
from tests.clients.moments import attempt, every_interrupt
from tests.clients.steps import (
    PATIENCE_SECONDS,
    bring_to_an_end,
    create_topic,
    error_of,
    read_to_end,
    refusal_of,
    values,
)
from txnstore import KafkaError, Producer
from txnstore.clients.producer.enlistment import Enlistment
from txnstore.clients.producer.progress import TransactionProgress
from txnstore.clients.producer.state import TransactionStage
from txnstore.db.callers.enlisted import EnlistedConnection
from txnstore.transactions.coordinator import TransactionCoordinator

TOPIC = "orders"
#: Whose moments are tried: what lies below is tried as one.
FILES = {
    "callers/enlisted.py",
    "producer/enlistment.py",
    "producer/pipeline.py",
    "producer/producer.py",
    "producer/progress.py",
    "producer/thread.py",
    "producer/transactions.py",
}


def test_the_files_whose_moments_are_tried_are_there():
    present = {"/".join(path.parts[-2:]) for path in Path(txnstore.__file__).parent.rglob("*.py")}
    assert present >= FILES


def is_left_alone(frame, event):
    # Called from below, where records are being dropped from the queue.
    return frame.f_code.co_name == "delivery_failed"


CALLS = {
    "enlist": lambda producer, given: producer.enlist(given),
    "commit": lambda producer, given: producer.commit_transaction(PATIENCE_SECONDS),
    "abort": lambda producer, given: producer.abort_transaction(PATIENCE_SECONDS),
}


@pytest.fixture
def bank(url):
    create_topic(url, TOPIC)
    make_ledger(url)
    return url


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_an_enlisted_transaction_that_is_interrupted_anywhere_can_be_ended_and_the_next_one_begun(bank, name):
    producer = Producer({"bootstrap.servers": bank, "transactional.id": "anna", "linger.ms": 9_000})
    producer.init_transactions(PATIENCE_SECONDS)
    with calling(bank, "core") as caller:
        for at, interrupt in every_interrupt(FILES, is_left_alone):
            producer.begin_transaction()
            if name != "enlist":
                producer.enlist(caller.given)
                caller.write(str(at))
                producer.produce(TOPIC, str(at), partition=0)
            attempt(interrupt, lambda: CALLS[name](producer, caller.given))
            if interrupt.where is not None or name == "enlist":
                bring_to_an_end(producer)
            # The connection is its owner's again.
            caller.rollback()
            producer.begin_transaction()
            producer.enlist(caller.given)
            caller.write(f"next {at}")
            producer.produce(TOPIC, f"next {at}", partition=0)
            producer.commit_transaction(PATIENCE_SECONDS)
    producer.close()
    entries = ledger_of(bank)
    assert sorted(value.decode() for value in values(read_to_end(bank, TOPIC)) if value) == sorted(entries)
    assert {f"next {number}" for number in range(1, at + 1)} <= set(entries)


def test_a_commit_that_is_settled_as_it_is_asked_for_again_is_done(bank, monkeypatch):
    may_settle = threading.Event()
    ask, commit = Enlistment._ask, Enlistment._commit_enlisted

    def interrupted(enlistment, ending, deadline):
        ask(enlistment, ending, deadline)
        enlistment._progress.submit(partial(may_settle.wait, PATIENCE_SECONDS))
        raise KeyboardInterrupt

    def settled(enlistment, deadline, writers):
        may_settle.set()
        enlistment._progress.work.result(PATIENCE_SECONDS)
        return commit(enlistment, deadline, writers)

    with closing(Producer({"bootstrap.servers": bank, "transactional.id": "anna"})) as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        with calling(bank, "core") as caller:
            producer.begin_transaction()
            producer.enlist(caller.given)
            caller.write("first")
            producer.produce(TOPIC, "first", partition=0)
            monkeypatch.setattr(Enlistment, "_ask", interrupted)
            with pytest.raises(KeyboardInterrupt):
                producer.commit_transaction(PATIENCE_SECONDS)
            monkeypatch.setattr(Enlistment, "_commit_enlisted", settled)
            producer.commit_transaction(PATIENCE_SECONDS)
            monkeypatch.undo()
            producer.begin_transaction()
            producer.enlist(caller.given)
            caller.write("next")
            producer.produce(TOPIC, "next", partition=0)
            producer.commit_transaction(PATIENCE_SECONDS)
    found = [value.decode() for value in values(read_to_end(bank, TOPIC)) if value]
    assert found == ["first", "next"] == sorted(ledger_of(bank))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["commit", "abort"])
def test_a_transaction_that_is_interrupted_anywhere_can_be_ended_and_the_next_one_begun(bank, name):
    producer = Producer({"bootstrap.servers": bank, "transactional.id": "anna", "linger.ms": 9_000})
    producer.init_transactions(PATIENCE_SECONDS)
    for at, interrupt in every_interrupt(FILES, is_left_alone):
        producer.begin_transaction()
        producer.produce(TOPIC, str(at), partition=0)
        attempt(interrupt, lambda: CALLS[name](producer, None))
        if interrupt.where is not None:
            bring_to_an_end(producer)
        with producer.transaction(PATIENCE_SECONDS):
            producer.produce(TOPIC, f"next {at}", partition=0)
    producer.close()
    found = [value.decode() for value in values(read_to_end(bank, TOPIC)) if value]
    assert [entry for entry in found if entry.startswith("next")] == [f"next {number}" for number in range(1, at + 1)]


@pytest.mark.slow
def test_a_commit_that_nobody_waits_for_is_left_or_not_wherever_it_is_interrupted(bank):
    producer = Producer({"bootstrap.servers": bank, "transactional.id": "anna", "linger.ms": 9_000})
    producer.init_transactions(PATIENCE_SECONDS)
    wanted: list[str] = []
    futures = []
    for at, interrupt in every_interrupt(FILES, is_left_alone):
        producer.begin_transaction()
        producer.produce(TOPIC, str(at), partition=0)
        attempt(interrupt, lambda: futures.append(producer.commit_transaction_async()))
        refused = None
        if interrupt.where is not None:
            refused = refusal_of(producer.abort_transaction, PATIENCE_SECONDS)
            assert refused is None or str(refused.text).endswith("state Ready"), (interrupt.where, refused)
        if interrupt.where is None or refused is not None:
            wanted.append(str(at))
        producer.begin_transaction()
        producer.produce(TOPIC, f"next {at}", partition=0)
        wanted.append(f"next {at}")
        futures.append(producer.commit_transaction_async())
    for future in futures:
        assert future.result(PATIENCE_SECONDS) is None
    assert producer.flush(PATIENCE_SECONDS) == 0
    producer.close()
    assert values(read_to_end(bank, TOPIC)) == [value.encode() for value in wanted]


@pytest.mark.slow
def test_a_start_that_is_interrupted_anywhere_can_be_made_again(bank):
    for _, interrupt in every_interrupt(FILES, is_left_alone):
        with Producer({"bootstrap.servers": bank, "transactional.id": "anna"}) as producer:
            attempt(interrupt, lambda: producer.init_transactions(PATIENCE_SECONDS))
            refused = refusal_of(producer.init_transactions, PATIENCE_SECONDS)
            assert refused is None or str(refused.text).endswith("state Ready")
            assert error_of(producer.commit_transaction).str().endswith("state Ready")
            producer.begin_transaction()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["commit", "abort"])
def test_an_interrupt_as_the_work_is_handed_over_leaves_it_to_the_next_call_while_it_is_under_way(
    bank, name, monkeypatch
):
    is_asked, may_go_on = threading.Event(), threading.Event()
    end_transaction = TransactionCoordinator.end_transaction

    def slowly(*arguments, **keywords):
        is_asked.set()
        assert may_go_on.wait(PATIENCE_SECONDS)
        return end_transaction(*arguments, **keywords)

    with Producer({"bootstrap.servers": bank, "transactional.id": "anna"}) as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        producer.produce(TOPIC, "one", partition=0)
        assert producer.flush(PATIENCE_SECONDS) == 0
        monkeypatch.setattr(TransactionCoordinator, "end_transaction", slowly)
        submit = producer._thread.submit

        def interrupted(job):
            submit(job)
            assert is_asked.wait(PATIENCE_SECONDS)
            monkeypatch.setattr(producer._thread, "submit", submit)
            raise KeyboardInterrupt

        monkeypatch.setattr(producer._thread, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            CALLS[name](producer, None)
        call = producer.commit_transaction if name == "commit" else producer.abort_transaction
        refused = refusal_of(call, 0)
        assert refused is not None
        assert refused.is_retriable
        may_go_on.set()
        call(PATIENCE_SECONDS)
        with producer.transaction(PATIENCE_SECONDS):
            producer.produce(TOPIC, "two", partition=0)
    expected = [b"one", b"two"] if name == "commit" else [b"two"]
    assert [value for value in values(read_to_end(bank, TOPIC)) if value] == expected


def test_what_an_enlisted_commit_has_gathered_as_it_is_interrupted_is_reported(bank, monkeypatch):
    reports = []
    with Producer({"bootstrap.servers": bank, "transactional.id": "anna", "linger.ms": 9_000}) as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        progress: Any = producer._progress
        check = progress.check_delivered

        def interrupted_before(request):
            # The interrupt is noted on the caller's thread, in between.
            progress.fail(KafkaError(KafkaError._FAIL, "interrupted", txn_requires_abort=True))
            check(request)

        with calling(bank, "core") as caller:
            producer.begin_transaction()
            producer.enlist(caller.given)
            producer.produce(TOPIC, "one", partition=0, on_delivery=lambda error, _: reports.append(error.code()))
            monkeypatch.setattr(progress, "check_delivered", interrupted_before)
            assert error_of(producer.commit_transaction, PATIENCE_SECONDS).txn_requires_abort()
            producer.abort_transaction(PATIENCE_SECONDS)
        assert len(producer) == 0
        assert reports == [KafkaError._PURGE_QUEUE]


#: Steps of a commit behind which the first Ctrl-C comes; the last three are made on the caller's thread only where a
#: connection is enlisted.  Before the COMMIT was asked for nothing is decided, behind it may stand.
STEPS = {
    "submit": (TransactionProgress, "submit", False),
    "wait": (TransactionProgress, "wait", False),
    "is about to ask": (TransactionProgress, "enter", False),
    "before the COMMIT": (EnlistedConnection, "_send_commit", True),
    "behind the COMMIT": (EnlistedConnection, "_send_commit", False),
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("name", "is_enlisted"), [("submit", False), ("wait", False), *((name, True) for name in STEPS)]
)
def test_a_commit_that_is_interrupted_twice_can_be_ended_and_the_next_one_begun(bank, monkeypatch, name, is_enlisted):
    """Ctrl-C comes at a step of the commit, and again at every moment from then on."""
    producer = Producer({"bootstrap.servers": bank, "transactional.id": "anna", "linger.ms": 9_000})
    producer.init_transactions(PATIENCE_SECONDS)
    owner, method, is_before_it = STEPS[name]
    step: Any = getattr(owner, method)
    was_interrupted = False

    def interrupted(*arguments, **keywords):
        nonlocal was_interrupted
        if was_interrupted or (method == "enter" and arguments[1] is not TransactionStage.COMMITTING):
            return step(*arguments, **keywords)
        if not is_before_it:
            step(*arguments, **keywords)
        was_interrupted = True
        raise KeyboardInterrupt

    def is_before(frame, event):
        # A generator that an error is thrown into looks for no signal before it handles that.
        is_thrown_into = event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR
        return not was_interrupted or is_thrown_into or is_left_alone(frame, event)

    monkeypatch.setattr(owner, method, interrupted)
    with calling(bank, "core") as caller:
        for at, moment in every_interrupt(FILES, is_before):
            was_interrupted = True
            producer.begin_transaction()
            if is_enlisted:
                producer.enlist(caller.given)
                caller.write(str(at))
            producer.produce(TOPIC, str(at), partition=0)
            was_interrupted = False
            with pytest.raises(KeyboardInterrupt), moment:
                producer.commit_transaction(PATIENCE_SECONDS)
            bring_to_an_end(producer)
            assert producer.flush(PATIENCE_SECONDS) == 0, moment.where
            caller.rollback()
            with producer.transaction(PATIENCE_SECONDS):
                producer.produce(TOPIC, f"next {at}", partition=0)
    producer.close()
    assert at > 2
    found = [value.decode() for value in values(read_to_end(bank, TOPIC)) if value]
    assert [entry for entry in found if entry.startswith("next")] == [f"next {number}" for number in range(1, at + 1)]
    if is_enlisted:
        assert sorted(entry for entry in found if not entry.startswith("next")) == sorted(ledger_of(bank))
