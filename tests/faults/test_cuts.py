"""A connection to PostgreSQL that is cut at each message of an operation: before it arrives, and before its answer.

The loop ends when the operation has come through untouched, so no message is left out. How many there are varies by one
or two, for the driver sends several rows without waiting for their answers; so once is not enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.tools.proxy import Proxy
from txnstore.db.store import Store
from txnstore.errors import OutcomeUnknown, StoreUnavailable, TxnStoreError
from txnstore.model import ProducerIdentity
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.outcome import Outcome, resolve_outcome

UNTOUCHED_AT_THE_END = 2
SIDES = pytest.mark.parametrize("side", ["before", "after"])


def each_cut(
    proxy: Proxy,
    store: Store,
    side: str,
    prepare: Callable[[int], Any],
    run: Callable[[Any], object],
    *,
    messages_min: int = 10,
) -> Iterator[tuple[Any, TxnStoreError | None]]:
    """Cut the n-th message of `run`, for n = 1, 2, ... until none is cut; yield what was prepared, and the error."""
    # Hints for readers come from a thread of their own; their messages would be counted as well.
    store._announcer = None
    untouched = 0
    for number in itertools.count(1):
        prepared = prepare(number)
        # A connection is there, so that the messages are those of the operation alone.
        store.read(lambda connection: None, retry_timeout_ms=10_000)
        cut = proxy.cut(**{side: number})
        error: TxnStoreError | None = None
        try:
            run(prepared)
        except TxnStoreError as raised:
            error = raised
        if error is not None:
            assert cut.wait(), f"{error} without a cut"
        untouched = 0 if cut.fired else untouched + 1
        if untouched:
            assert error is None
            assert number > messages_min, "an operation takes more messages than that"
            proxy.heal()
        yield prepared, error
        if untouched == UNTOUCHED_AT_THE_END:
            return


def check_few(unknown, *, count_max=3):
    """Check that hardly more than the COMMIT's own message leaves it open: nothing is called unknown for ease."""
    assert len(unknown) <= count_max


@pytest.mark.slow_but_first
@SIDES
def test_an_append_cut_at_any_message_is_not_done_or_unknown_and_done_once_when_repeated(direct, proxied, proxy, side):
    coordinator = TransactionCoordinator(direct.store)
    producer = coordinator.init_producer_id(None).identity
    sequences = itertools.count()

    def prepare(number):
        return proxied.batch(b"%d" % number, producer=producer, sequence=next(sequences))

    unknown = []
    expected: list[bytes] = []
    for batch, error in each_cut(proxy, proxied.store, side, prepare, proxied.append):
        value = b"%d" % (len(expected) + 1)
        found = direct.values()
        was_done = found == [*expected, value]
        assert was_done or found == expected
        if error is None:
            assert was_done
        elif isinstance(error, OutcomeUnknown):
            unknown.append(was_done)
        else:
            assert isinstance(error, StoreUnavailable)
            assert not was_done
        (appended,) = proxied.append(batch, retry_timeout_ms=10_000)
        assert appended.is_duplicate == was_done
        expected.append(value)
        assert direct.values() == expected
    check_few(unknown)


@pytest.mark.slow
@SIDES
def test_an_end_of_a_transaction_cut_at_any_message_is_resolved_to_what_is_true(direct, proxied, proxy, side):
    coordinator = TransactionCoordinator(proxied.store)
    healthy = TransactionCoordinator(direct.store)

    def prepare(number):
        producer = healthy.init_producer_id(direct.name).identity
        batch = direct.batch(b"%d" % number, producer=producer, transactional=True)
        healthy.append(direct.name, producer, [batch])
        return b"%d" % number, producer

    def run(prepared):
        coordinator.end_transaction(direct.name, prepared[1], commit=True)

    unknown = []
    expected: list[bytes] = []
    for number, ((value, producer), error) in enumerate(each_cut(proxy, proxied.store, side, prepare, run)):
        was_done = direct.committed() == [*expected, value]
        assert was_done or direct.committed() == expected
        if isinstance(error, OutcomeUnknown):
            unknown.append(was_done)
        else:
            assert was_done == (error is None)
        if number % 2:
            healthy.end_transaction(direct.name, producer, commit=True)
            expected.append(value)
        else:
            outcome = resolve_outcome(direct.store, direct.name, producer)
            assert outcome is (Outcome.COMMITTED if was_done else Outcome.ABORTED), error
            expected += [value] * was_done
        assert direct.committed() == expected
    check_few(unknown)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [True, False], ids=["by the function", "by statements"])
def test_a_small_transaction_in_one_commit_cut_at_any_message_is_all_or_nothing(direct, proxied, proxy, at_once):
    proxied.store.commits_whole = at_once
    coordinator = TransactionCoordinator(proxied.store)
    healthy = TransactionCoordinator(direct.store)

    def prepare(number):
        producer = healthy.init_producer_id(direct.name).identity
        return direct.batch(b"%d" % number, producer=producer, transactional=True), producer

    def run(prepared):
        batch, producer = prepared
        coordinator.end_transaction(direct.name, producer, commit=True, appends=[batch])

    expected: list[bytes] = []
    unknown = []
    cuts = each_cut(proxy, proxied.store, "after", prepare, run, messages_min=1 if at_once else 10)
    for number, ((batch, producer), error) in enumerate(cuts, start=1):
        expected.append(b"%d" % number)
        if isinstance(error, OutcomeUnknown):
            unknown.append(direct.committed() == expected)
        else:
            assert direct.committed() == (expected if error is None else expected[:-1])
        healthy.end_transaction(direct.name, producer, commit=True, appends=[batch])
        assert direct.committed() == expected
    # A call of the function commits by itself: each of its five messages may be the last.
    check_few(unknown, count_max=5 if at_once else 3)


@pytest.mark.slow_but_first
@SIDES
def test_an_init_cut_at_any_message_can_be_repeated_and_gives_no_epoch_twice(direct, proxied, proxy, side):
    coordinator = TransactionCoordinator(proxied.store)
    given: list[ProducerIdentity] = []

    def run(prepared):
        given.append(coordinator.init_producer_id(direct.name).identity)

    for _, error in each_cut(proxy, proxied.store, side, lambda number: None, run):
        assert error is None or isinstance(error, StoreUnavailable | OutcomeUnknown)
        given.append(TransactionCoordinator(direct.store).init_producer_id(direct.name).identity)
    epochs = [identity.epoch for identity in given]
    assert epochs == sorted(set(epochs))
    assert len({identity.producer_id for identity in given}) == 1


@pytest.mark.slow
@SIDES
def test_opening_a_store_cut_at_any_message_says_that_it_cannot_be_reached(
    direct, proxy, open_proxied, postgresql_url, side
):
    for number in itertools.count(1):
        cut = proxy.cut(**{side: number})
        try:
            open_proxied().store.close()
        except StoreUnavailable:
            assert cut.wait()
        # The topic is made when a store is open, in a database transaction that may be cut at its COMMIT.
        except OutcomeUnknown:
            assert cut.wait()
        if not cut.fired:
            proxy.heal()
            break
    assert number > 10
