"""Names of prepared transactions against a dict: prepared, completed, asked about, whatever process dies in between."""

from __future__ import annotations

import uuid
from typing import ClassVar
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.clients.steps import create_topic, error_of, read_to_end, values
from tests.tools.campaigns import times
from txnstore import Outcome, Producer, outcome
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.opening import open_store
from txnstore.errors import OutcomeUnknown
from txnstore.transactions.coordinator import TransactionCoordinator

#: About 3 seconds a database.
EXAMPLES, STEPS = times(8), 20
PATIENCE_SECONDS = 60.0

RECORD_COUNTS = st.sampled_from([0, 0, 1, 2])


class Names(RuleBasedStateMachine):
    """One transactional id, the application that remembers names, and processes that come and go."""

    url: ClassVar[str]

    @initialize()
    def begin(self) -> None:
        self.transactional_id = uuid.uuid4().hex[:12]
        self.topic = create_topic(self.url, f"topic-{self.transactional_id}")
        #: How each transaction ended that was given a name; and what is committed, named or not.
        self.outcomes: dict[str, Outcome] = {}
        self.committed: list[bytes] = []
        self.written = 0
        #: What is open: its name, if it was prepared, and its records.
        self.name: str | None = None
        self.records: list[bytes] = []
        self.producer = self._started()

    def teardown(self) -> None:
        if hasattr(self, "producer"):
            self._look()
            self.producer._close_now(PATIENCE_SECONDS, [])

    @precondition(lambda self: self.name is None)
    @rule(count=RECORD_COUNTS, ends=st.sampled_from(["prepare", "prepare", "prepare", "commit", "abort", "die"]))
    def work(self, count: int, ends: str) -> None:
        self.producer.begin_transaction()
        self.records = [b"%d" % (self.written + number) for number in range(count)]
        self.written += count
        for value in self.records:
            self.producer.produce(self.topic, value, partition=0)
        if ends == "prepare":
            self.name = str(self.producer.prepare_transaction(PATIENCE_SECONDS))
            assert self.name not in self.outcomes, "a name was given out twice"
            self.outcomes[self.name] = Outcome.OPEN
        elif ends == "commit":
            self.producer.commit_transaction(PATIENCE_SECONDS)
            self._ended(Outcome.COMMITTED)
        elif ends == "abort":
            self.producer.abort_transaction(PATIENCE_SECONDS)
            self._ended(Outcome.ABORTED)
        else:
            self.producer.flush(PATIENCE_SECONDS)
            self._die(keep=True)
            self._ended(Outcome.ABORTED)

    @precondition(lambda self: self.name is not None)
    @rule(remembers=st.booleans(), which=st.integers(0, 1_000))
    def complete(self, remembers: bool, which: int) -> None:
        others = ["", *(name for name in self.outcomes if name != self.name)]
        remembered = self.name if remembers else others[which % len(others)]
        assert remembered is not None
        self.producer.complete_transaction(remembered, PATIENCE_SECONDS)
        self._ended(Outcome.COMMITTED if remembers else Outcome.ABORTED)

    @precondition(lambda self: self.name is not None)
    @rule(arrives=st.booleans(), keep=st.booleans())
    def complete_without_an_answer(self, arrives: bool, keep: bool) -> None:
        """Another process starts before it is asked for again."""
        end = TransactionCoordinator.end_transaction
        newer: list[Producer] = []

        def end_once(*arguments: object, **keywords: object) -> object:
            if newer:
                return end(*arguments, **keywords)  # type: ignore[arg-type]
            if arrives:
                end(*arguments, **keywords)  # type: ignore[arg-type]
            newer.append(self._started(keep=keep))
            raise OutcomeUnknown

        assert self.name is not None
        with mock.patch.object(TransactionCoordinator, "end_transaction", end_once):
            if arrives:
                self.producer.complete_transaction(self.name, PATIENCE_SECONDS)
            else:
                assert error_of(self.producer.complete_transaction, self.name, PATIENCE_SECONDS).fatal()
        self.producer._close_now(PATIENCE_SECONDS, [])
        (self.producer,) = newer
        if arrives:
            self._ended(Outcome.COMMITTED)
        elif not keep:
            self._ended(Outcome.ABORTED)

    @rule(keep=st.sampled_from([True, True, False]))
    def die(self, keep: bool) -> None:
        self._die(keep=keep)
        if self.name is not None and not keep:
            self._ended(Outcome.ABORTED)

    @rule()
    def ask(self) -> None:
        self._look()

    @rule(which=st.integers(0, 1_000))
    def ask_and_fence(self, which: int) -> None:
        if not self.outcomes:
            return
        name = list(self.outcomes)[which % len(self.outcomes)]
        asked = outcome(name, self.url, fence=True)
        if name == self.name:
            assert asked is Outcome.ABORTED
            self._die(keep=True)
            self._ended(Outcome.ABORTED)
        else:
            assert asked is self.outcomes[name]

    def _started(self, *, keep: bool = True) -> Producer:
        producer = Producer(
            {
                "bootstrap.servers": self.url,
                "transactional.id": self.transactional_id,
                "transaction.two.phase.commit.enable": True,
                "linger.ms": 9_000,
            }
        )
        producer.init_transactions(PATIENCE_SECONDS, keep_prepared_txn=keep)
        return producer

    def _die(self, *, keep: bool) -> None:
        """End as a killed process does, and start another one; what was open and had no name is aborted by that."""
        self.producer._close_now(PATIENCE_SECONDS, [])
        self.producer = self._started(keep=keep)
        if keep and self.name is None:
            self.producer.complete_transaction("", PATIENCE_SECONDS)

    def _ended(self, how: Outcome) -> None:
        if self.name is not None:
            self.outcomes[self.name] = how
        if how is Outcome.COMMITTED:
            self.committed += self.records
        self.name, self.records = None, []

    def _look(self) -> None:
        assert {name: outcome(name, self.url) for name in self.outcomes} == self.outcomes
        assert values(read_to_end(self.url, self.topic)) == self.committed


@pytest.mark.slow
@pytest.mark.campaign
def test_a_name_is_one_transaction_and_its_outcome_is_what_became_of_it(url: str) -> None:
    class OnThisStore(Names):
        pass

    OnThisStore.url = url
    with open_store(url) as store:
        allowed = {"transaction.two.phase.commit.enable": "true"}
        store.write(lambda connection: change_store_settings(connection, allowed))
    run_state_machine_as_test(
        OnThisStore,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
