"""What the tests of the coordinator share: benches on each database, and the coordinator's row in each state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.transactions.bench import Bench, bench_on, sent_offsets
from txnstore.db.store import Store
from txnstore.testing.manual_clock import ManualClock
from txnstore.transactions.protocol import DECIDED, TransactionMetadata, TransactionState
from txnstore.transactions.transaction import SentOffsets

pytest.register_assert_rewrite("tests.transactions.whole_worlds")


@pytest.fixture
def bench(shared_store: Store, shared_clock: ManualClock) -> Bench:
    """A topic of its own in a store that other tests use too: quick, on each database."""
    return bench_on(shared_store, shared_clock)


@pytest.fixture
def own_bench(store: Store, clock: ManualClock) -> Bench:
    """A store that nobody else uses, on each database: for what concerns a store as a whole."""
    return bench_on(store, clock)


@pytest.fixture
def new_row() -> Callable[..., TransactionMetadata]:
    """Makes the coordinator's row of producer 7 with epoch 5, for the pure rules."""

    def make(state: TransactionState, **changes: Any) -> TransactionMetadata:
        row = TransactionMetadata("payments", 7, 5, 60_000, state, last_update_ms=1_000)
        if state is not TransactionState.EMPTY:
            row = replace(row, start_ms=900, transaction_number=1)
        if state is TransactionState.ONGOING:
            row = replace(row, begin_epoch=5)
        if state in DECIDED:
            row = replace(row, begin_epoch=4, last_producer_epoch=4)
        return replace(row, **changes)

    return make


@pytest.fixture
def offsets_of() -> Callable[[str, Mapping[int, int]], SentOffsets]:
    return sent_offsets
