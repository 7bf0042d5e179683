"""The answer to an end whose markers go to other databases: who the producer is, and what is known for certain."""

from __future__ import annotations

import pytest

from tests.tools.elsewhere import Elsewhere
from txnstore.errors import OutcomeUnknown, StoreBusy
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.log.topics import create_topic
from txnstore.model import ProducerIdentity, Record
from txnstore.transactions import coordinator as coordinating
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.outcome import Outcome, resolve_outcome
from txnstore.transactions.transaction import complete_delivered


@pytest.fixture
def coordinator(store):
    return TransactionCoordinator(store, Elsewhere(store))


@pytest.fixture
def begin(store, coordinator):
    """Begin a transaction and return its producer."""
    topic = store.write(lambda connection: create_topic(connection, "orders"))

    def begin(transactional_id):
        identity = coordinator.init_producer_id(transactional_id).identity
        batch = encode([Record(b"a")], producer=identity, base_sequence=0, is_transactional=True)
        coordinator.append(transactional_id, identity, [Append(topic.partition_ids[0], batch)])
        return identity

    return begin


def test_an_end_that_is_decided_but_not_delivered_is_not_said_to_have_changed_nothing(
    store, coordinator, begin, monkeypatch
):
    identity = begin("payments")
    with monkeypatch.context() as patch:

        def busy(*_):
            raise StoreBusy

        patch.setattr(coordinating, "complete_delivered", busy)
        with pytest.raises(OutcomeUnknown, match="is decided"):
            coordinator.end_transaction("payments", identity, commit=True)
    # The same call again is answered, and so is who has only the identity left.
    ended = coordinator.end_transaction("payments", identity, commit=True)
    assert ended.identity == ProducerIdentity(identity.producer_id, identity.epoch + 1)
    assert resolve_outcome(store, "payments", identity) is Outcome.COMMITTED


def test_an_end_never_tells_its_producer_that_it_is_a_newer_one(coordinator, begin, monkeypatch):
    identity = begin("payments")
    newer = []

    def be_replaced_and_complete(store, cluster, left):
        monkeypatch.setattr(coordinating, "complete_delivered", complete_delivered)
        newer.append(coordinator.init_producer_id("payments").identity)
        return complete_delivered(store, cluster, left)

    monkeypatch.setattr(coordinating, "complete_delivered", be_replaced_and_complete)
    ended = coordinator.end_transaction("payments", identity, commit=True)
    # It was given up to the newer one in the meantime, and will find that out.
    assert ended.identity == ProducerIdentity(identity.producer_id, identity.epoch + 1)
    # Over several databases a start has a producer id of its own.
    assert (newer[0].producer_id > identity.producer_id, newer[0].epoch) == (True, 0)
