"""A transactional call that fails in this process itself, for want of memory say: the transaction can be ended then."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext

import pytest

from tests.clients.callers import calling, ledger_of, make_ledger
from tests.clients.steps import PATIENCE_SECONDS, bring_to_an_end, create_topic, read_to_end, values
from txnstore import Producer
from txnstore.clients.producer.sender import Sender
from txnstore.clients.producer.thread import SenderThread
from txnstore.transactions.coordinator import TransactionCoordinator

TOPIC = "orders"

HANDED_OVER = (SenderThread, "submit")
GATHERED = (Sender, "last_request")
GATHERED_TO_WAIT = (Sender, "take_everything")
SETTLED = (Sender, "settle")
REPORTED = (Sender, "report")
ENDED = (TransactionCoordinator, "end_transaction")
INITIALIZED = (TransactionCoordinator, "init_producer_id")


@pytest.fixture
def bank(url):
    create_topic(url, TOPIC)
    make_ledger(url)
    return url


@pytest.fixture
def out_of_memory(monkeypatch):
    """Let a step fail once, in the block."""

    @contextmanager
    def failing(step):
        owner, name = step
        work: Callable[..., object] = getattr(owner, name)
        failed: list[bool] = []

        def fail(*arguments, **named):
            if not failed:
                failed.append(True)
                raise MemoryError
            return work(*arguments, **named)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            yield
        assert failed

    return failing


@pytest.mark.parametrize(
    ("name", "step", "is_enlisted"),
    [
        ("commit", HANDED_OVER, False),
        ("commit", GATHERED, False),
        ("commit", ENDED, False),
        ("commit", HANDED_OVER, True),
        ("commit", GATHERED_TO_WAIT, True),
        ("abort", HANDED_OVER, False),
        ("abort", SETTLED, False),
        ("abort", ENDED, False),
        ("abort", SETTLED, True),
    ],
)
def test_a_transaction_can_be_ended_and_the_next_one_begun(bank, out_of_memory, name, step, is_enlisted):
    with Producer({"bootstrap.servers": bank, "transactional.id": "anna", "linger.ms": 9_000}) as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        call = producer.commit_transaction if name == "commit" else producer.abort_transaction
        producer.begin_transaction()
        with calling(bank, "core") if is_enlisted else nullcontext() as caller:
            if caller is not None:
                producer.enlist(caller.given)
                caller.write("first")
            producer.produce(TOPIC, "first", partition=0)
            if step is ENDED:
                # So that an abort has anything to end.
                producer.flush(PATIENCE_SECONDS)
            with out_of_memory(step), pytest.raises(MemoryError):
                call(PATIENCE_SECONDS)
            bring_to_an_end(producer)
        with producer.transaction(PATIENCE_SECONDS):
            producer.produce(TOPIC, "next", partition=0)
    assert [value for value in values(read_to_end(bank, TOPIC)) if value] == [b"next"]
    assert ledger_of(bank) == []


@pytest.mark.parametrize("step", [HANDED_OVER, GATHERED, ENDED])
def test_a_block_whose_commit_fails_aborts_its_transaction(bank, out_of_memory, step):
    with Producer({"bootstrap.servers": bank, "transactional.id": "anna"}) as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        with out_of_memory(step), pytest.raises(MemoryError), producer.transaction(PATIENCE_SECONDS):
            producer.produce(TOPIC, "first", partition=0)
        with producer.transaction(PATIENCE_SECONDS):
            producer.produce(TOPIC, "next", partition=0)
    assert [value for value in values(read_to_end(bank, TOPIC)) if value] == [b"next"]


@pytest.mark.parametrize("step", [HANDED_OVER, INITIALIZED])
def test_a_producer_can_be_initialized_again(bank, out_of_memory, step):
    with Producer({"bootstrap.servers": bank, "transactional.id": "anna"}) as producer:
        with out_of_memory(step), pytest.raises(MemoryError):
            producer.init_transactions(PATIENCE_SECONDS)
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()


def test_what_an_enlisted_connection_has_committed_is_reported_by_the_commit_that_is_made_again(bank, out_of_memory):
    with Producer({"bootstrap.servers": bank, "transactional.id": "anna"}) as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        reports = []
        with calling(bank, "core") as caller:
            producer.begin_transaction()
            producer.enlist(caller.given)
            caller.write("first")
            producer.produce(TOPIC, "first", partition=0, on_delivery=lambda error, _: reports.append(error))
            with out_of_memory(REPORTED), pytest.raises(MemoryError):
                producer.commit_transaction(PATIENCE_SECONDS)
            producer.commit_transaction(PATIENCE_SECONDS)
        with producer.transaction(PATIENCE_SECONDS):
            producer.produce(TOPIC, "next", partition=0)
    assert reports == [None]
    assert [value for value in values(read_to_end(bank, TOPIC)) if value] == [b"first", b"next"]
    assert ledger_of(bank) == ["first"]
