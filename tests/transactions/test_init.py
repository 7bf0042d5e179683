"""InitProducerId as clients call it: each row of Kafka's table, through the database."""

from __future__ import annotations

import pytest

from txnstore.errors import (
    InvalidProducerIdMapping,
    InvalidRequest,
    InvalidTransactionTimeout,
    ProducerFenced,
    TxnStoreError,
)
from txnstore.model import ControlType, ProducerIdentity
from txnstore.transactions.protocol import TransactionState

S = TransactionState


def test_without_a_transactional_id_every_producer_gets_an_id_of_its_own_with_epoch_0(bench) -> None:
    coordinator = bench.producer().coordinator
    identities = [coordinator.init_producer_id(None).identity for _ in range(3)]
    assert len({identity.producer_id for identity in identities}) == 3
    assert {identity.epoch for identity in identities} == {0}


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("transactional_id", "options", "error"),
    [
        pytest.param("", {}, InvalidRequest, id="empty id"),
        pytest.param(7, {}, InvalidRequest, id="id that is not text"),
        pytest.param("a\0b", {}, InvalidRequest, id="id with NUL"),
        pytest.param("a\ud800", {}, InvalidRequest, id="id with half a surrogate pair"),
        pytest.param("x" * 1001, {}, InvalidRequest, id="id of 1001 characters"),
        pytest.param("\U0001f600" * 301, {}, InvalidRequest, id="id of 1204 bytes"),
        pytest.param("pay", {"timeout_ms": 0}, InvalidTransactionTimeout, id="timeout of 0"),
        pytest.param("pay", {"timeout_ms": 900_001}, InvalidTransactionTimeout, id="timeout above the maximum"),
        pytest.param("pay", {"expected": ProducerIdentity(-1, 5)}, InvalidRequest, id="epoch without producer id"),
        pytest.param("pay", {"expected": ProducerIdentity(5, -1)}, InvalidRequest, id="producer id without epoch"),
        pytest.param("pay", {"keep_prepared": True}, InvalidRequest, id="keep_prepared without two-phase commit"),
    ],
)
def test_a_wrong_request_is_refused_and_leaves_nothing_behind(
    bench, transactional_id: object, options: dict, error: type[TxnStoreError]
) -> None:
    if transactional_id == "pay":
        transactional_id = bench.new_id()
    with pytest.raises(error):
        bench.producer().coordinator.init_producer_id(transactional_id, **options)
    if isinstance(transactional_id, str) and transactional_id.startswith(bench.prefix):
        assert not bench.is_known(transactional_id)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "name",
    [
        " ",
        "x" * 1000,
        "\U0001f600" * 290,
        "ä",
        "a\u0308",
        "\u202eevil",
        "😀",
        "'; DROP TABLE topics; --",
        "%s {} $1 :name ?",
        "a\n\x1b[31m",
    ],
    ids=lambda name: ascii(name)[:30],
)
def test_any_other_text_is_a_transactional_id_of_its_own(bench, name: str) -> None:
    transactional_id = (bench.prefix + name)[-1000:]
    producer = bench.producer(transactional_id)
    producer.start()
    producer.send(bench.partition_ids[0], b"a")
    producer.commit()
    assert bench.row(transactional_id).transactional_id == transactional_id
    assert bench.read(bench.partition_ids[0]) == [b"a"]


def test_the_maximum_of_the_timeout_is_a_setting_of_the_store(own_bench) -> None:
    own_bench.set_store({"transaction.max.timeout.ms": "5000"})
    with pytest.raises(InvalidTransactionTimeout, match="1 to 5000"):
        own_bench.producer().start(5001)
    assert own_bench.producer().start(5000).identity.epoch == 0


def test_the_largest_timeout_ends_all_the_same(own_bench) -> None:
    """The same number means without a limit where another database decides (KIP-939)."""
    own_bench.set_store({"transaction.max.timeout.ms": str(2**31 - 1)})
    producer = own_bench.producer()
    producer.start(2**31 - 1)
    assert own_bench.row(producer.transactional_id).timeout_ms == 2**31 - 2


def test_an_id_that_nobody_used_gets_epoch_0(bench) -> None:
    producer = bench.started(timeout_ms=12_345)
    assert producer.identity.epoch == 0
    row = bench.row(producer.transactional_id)
    assert (row.state, row.timeout_ms, row.start_ms) == (S.EMPTY, 12_345, -1)


def test_an_expected_producer_of_an_id_that_has_expired_starts_anew(bench) -> None:
    producer = bench.producer()
    assert producer.start(expected=ProducerIdentity(10**12, 3)).identity.epoch == 0
    assert producer.identity.producer_id != 10**12


@pytest.mark.parametrize("expects_itself", [False, True], ids=["nobody expected", "itself expected"])
def test_each_start_raises_the_epoch_by_one_and_replaces_the_timeout(bench, expects_itself: bool) -> None:
    producer = bench.started()
    first = producer.identity
    producer.start(30_000, expected=first if expects_itself else None)
    assert producer.identity == ProducerIdentity(first.producer_id, 1)
    row = bench.row(producer.transactional_id)
    assert (row.timeout_ms, row.last_producer_epoch) == (30_000, 0 if expects_itself else -1)


def test_a_start_that_is_repeated_because_its_answer_was_lost_is_answered_alike(bench) -> None:
    producer = bench.started()
    first = producer.identity
    answers = [producer.start(expected=first).identity for _ in range(3)]
    assert answers == [ProducerIdentity(first.producer_id, 1)] * 3


@pytest.mark.slow_but_first
@pytest.mark.parametrize("state", ["Empty", "Ongoing", "CompleteCommit", "CompleteAbort"])
def test_an_expected_producer_that_somebody_has_replaced_is_fenced_and_changes_nothing(bench, state: str) -> None:
    old = bench.started()
    producer = old.twin()
    producer.start()
    if state != "Empty":
        producer.send(bench.partition_ids[0], b"a")
    if state.startswith("Complete"):
        producer.end(commit=state == "CompleteCommit")
    before = bench.row(producer.transactional_id)
    assert before.state.kafka_name == state
    with pytest.raises(ProducerFenced):
        old.start(expected=old.identity)
    with pytest.raises(ProducerFenced):
        old.start(expected=ProducerIdentity(old.identity.producer_id + 10**9, before.producer_epoch))
    assert bench.row(producer.transactional_id) == before


@pytest.mark.parametrize("expects_itself", [False, True], ids=["nobody expected", "itself expected"])
def test_an_open_transaction_is_aborted_in_the_same_step_and_its_producer_fenced(bench, expects_itself: bool) -> None:
    old = bench.started()
    first = old.identity
    old.send(bench.partition_ids[0], b"a", b"b")
    old.send(bench.partition_ids[1], b"c")
    old.send_offsets("readers", {bench.partition_ids[0]: 7})
    new = old.twin()
    new.start(expected=first if expects_itself else None)
    assert new.identity == ProducerIdentity(first.producer_id, 1)
    assert [bench.read(partition_id) for partition_id in bench.partition_ids] == [[], []]
    assert bench.markers(bench.partition_ids[0]) == [(2, ControlType.ABORT, 1)]
    assert bench.markers(bench.partition_ids[1]) == [(1, ControlType.ABORT, 1)]
    assert bench.offsets("readers").offsets == {}
    assert bench.offsets("readers").unstable == frozenset()
    assert bench.participants(new.transactional_id) == ([], [])
    assert bench.journal(new.transactional_id) == [
        (S.EMPTY, 0),
        *[(S.ONGOING, 0)] * 3,
        (S.PREPARE_ABORT, 1),
        (S.COMPLETE_ABORT, 1),
        (S.EMPTY, 1),
    ]
    for late in (lambda: old.send(bench.partition_ids[0], b"late"), old.commit, old.abort):
        with pytest.raises(ProducerFenced):
            late()


def test_a_start_over_an_open_transaction_that_is_repeated_is_answered_alike(bench) -> None:
    producer = bench.started()
    first = producer.identity
    producer.send(bench.partition_ids[0], b"a")
    answers = [producer.start(expected=first).identity for _ in range(2)]
    assert answers == [ProducerIdentity(first.producer_id, 1)] * 2


@pytest.mark.slow_but_first
@pytest.mark.parametrize("commit", [True, False], ids=["PrepareCommit", "PrepareAbort"])
@pytest.mark.parametrize("expected_epoch", [None, 0, 1], ids=["nobody", "epoch before the decision", "epoch after it"])
def test_a_decided_transaction_is_completed_as_it_was_decided(bench, commit: bool, expected_epoch: int | None) -> None:
    dead = bench.started()
    producer_id = dead.identity.producer_id
    dead.send(bench.partition_ids[0], b"a")
    dead.send_offsets("readers", {bench.partition_ids[0]: 7})
    dead.decide(commit=commit)
    assert bench.row(dead.transactional_id).state is (S.PREPARE_COMMIT if commit else S.PREPARE_ABORT)
    new = dead.twin()
    new.start(expected=None if expected_epoch is None else ProducerIdentity(producer_id, expected_epoch))
    # A producer that expects the epoch before asks for what the decision gave it already.
    assert new.identity == ProducerIdentity(producer_id, 1 if expected_epoch == 0 else 2)
    assert bench.read(bench.partition_ids[0]) == ([b"a"] if commit else [])
    assert {number: offset.offset for number, offset in bench.offsets("readers").offsets.items()} == (
        {bench.partition_ids[0]: 7} if commit else {}
    )
    assert bench.participants(new.transactional_id) == ([], [])


def test_a_producer_that_was_never_started_can_do_nothing(bench) -> None:
    producer = bench.producer()
    producer.become(ProducerIdentity(1, 0))
    for call in (
        lambda: producer.send(bench.partition_ids[0], b"a"),
        lambda: producer.send_offsets("readers", {bench.partition_ids[0]: 1}),
        producer.commit,
        producer.abort,
    ):
        with pytest.raises(InvalidProducerIdMapping):
            call()
    assert not bench.is_known(producer.transactional_id)
