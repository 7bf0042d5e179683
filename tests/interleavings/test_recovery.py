"""Recovery of a decided transaction, by two at once and beside its own producer: finished once, as it was decided."""

from __future__ import annotations

import pytest

from tests.tools.elsewhere import Elsewhere
from tests.tools.elsewhere import decide as end_without_delivery
from tests.tools.interleaving import explore
from tests.tools.recording import Caller
from txnstore.errors import OutcomeUnknown
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.recovery import complete_all_decided
from txnstore.transactions.rows import read_row
from txnstore.transactions.transaction import complete_decided

pytestmark = pytest.mark.slow_on_postgresql


def decide(setting, store, producer, transaction, *, commit):
    """Take the decision and go away, as a coordinator does that crashes then: nobody hears an answer."""

    def call():
        end_without_delivery(store, setting.transactional_id, producer.identity, commit=commit)
        raise OutcomeUnknown

    details = {"transaction": transaction, "transactional_id": setting.transactional_id, "commit": commit}
    identity = [producer.identity.producer_id, producer.identity.epoch]
    with pytest.raises(OutcomeUnknown):
        Caller(setting.recorder, "crashed").perform(
            "end", {**details, "producer": identity, "atomic": False}, call, lambda _: {}
        )


@pytest.mark.slow_but_first
def test_two_recoveries_of_one_decided_transaction_finish_it_once(world):
    def make():
        setting = world.setting()
        producer = setting.producer("producer", world.observer, writes_elsewhere=True)
        producer.init()
        producer.append("one", {"p0": ["one/1"], "p1": ["one/2"]})
        decide(setting, world.observer, producer, "one", commit=True)

        def decided_as_it_was(finished):
            assert finished["first"].result() == finished["second"].result()
            # The producer asks again, as it does after an answer that was lost.
            next_identity = producer.end("one", commit=True)
            assert next_identity == finished["first"].result()
            producer.append("two", {"p0": ["two/1"]})
            producer.end("two", commit=True)

        actors = {
            "first": lambda: complete_decided(world.first, setting.transactional_id, Elsewhere(world.first)),
            "second": lambda: complete_decided(world.second, setting.transactional_id, Elsewhere(world.second)),
        }
        return setting.scenario(actors, at_end=decided_as_it_was, alike=actors)

    assert explore(make).orders >= 10


@pytest.mark.slow
def test_recovery_and_the_producers_own_completion_may_meet_at_any_step(world, in_turn):
    def make():
        setting = world.setting(partition_count=1)
        producer = setting.producer("producer", world.first, writes_elsewhere=True)
        producer.init()
        producer.append("one", {"p0": ["one/1"]})
        states = []

        def decided_for_good():
            row = world.observer.read(lambda connection: read_row(connection, setting.transactional_id).row)
            states.append(row.state)

        def finished_in_order(finished):
            assert finished["producer"].result() == ["ok"]
            finished["recovery"].result()
            ranks = [TransactionState.ONGOING, TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT]
            assert [ranks.index(state) for state in states] == sorted(ranks.index(state) for state in states)
            assert states[-1] is TransactionState.COMPLETE_COMMIT

        return setting.scenario(
            {
                "producer": in_turn(lambda: producer.end("one", commit=True)),
                "recovery": lambda: complete_all_decided(world.second, Elsewhere(world.second)),
            },
            after_step=decided_for_good,
            at_end=finished_in_order,
        )

    assert explore(make).orders >= 20
