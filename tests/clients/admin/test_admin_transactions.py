"""The admin client's calls about transactions."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from tests.clients.admin.help import HOSTILE_TEXTS, UNUSUAL_TEXTS, error_of, result
from tests.clients.consumer.log_writer import LogWriter
from tests.tools.elsewhere import Elsewhere
from txnstore import KafkaError, TopicPartition
from txnstore.admin import (
    AbortTransactionSpec,
    AdminClient,
    ProducerIdAndEpoch,
    ProducerState,
    TransactionListing,
    TransactionState,
)
from txnstore.db.opening import open_store
from txnstore.db.schema import transactions
from txnstore.errors import ProducerFenced, TransactionAbortable
from txnstore.log.append import Append, append
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import encode
from txnstore.log.partition_rows import allocate_producer_id
from txnstore.model import ProducerIdentity, Record
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.coordinator import TransactionCoordinator

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
FIFTEEN_MINUTES_MS = 15 * 60 * 1000
FIVE_MINUTES_MS = 5 * 60 * 1000


@pytest.fixture
def log(url, clock):
    with open_store(url, clock=clock) as store:
        log = LogWriter(store)
        log.topic("t", 2)
        yield log


@pytest.fixture
def admin(url, clock):
    with AdminClient({"bootstrap.servers": url, "txnstore.clock": clock}) as admin:
        yield admin


def begun(log, partition=0, timeout_ms=60_000):
    transaction = log.transaction(timeout_ms)
    transaction.write("t", partition, b"x")
    return transaction


def hang(log, number=0, epoch=0):
    """Write records of a transaction that no coordinator knows, as only damage does."""
    producer = ProducerIdentity(log.store.write(allocate_producer_id), epoch)
    batch = encode([Record(b"x", timestamp_ms=1_000)], producer=producer, base_sequence=0, is_transactional=True)
    item = Append(log.partition_id("t", number), batch)
    log.store.write(lambda connection: append(connection, [item], coordinated=True))
    return producer


def stable_offset(log, number=0):
    partition_id = log.partition_id("t", number)
    return log.store.read(lambda connection: read_bounds(connection, [partition_id]))[partition_id].last_stable_offset


def listed(admin, **filters):
    return {item.transactional_id: item.state for item in result(admin.list_transactions(**filters))}


# --- list ---------------------------------------------------------------------------------------------------------


def test_a_store_without_transactions_lists_none(admin, log):
    assert result(admin.list_transactions()) == []


def test_a_row_that_says_what_this_version_does_not_know_keeps_none_from_being_listed(admin, log):
    """As a newer version may write it; whoever asks about that one is told."""
    damaged, sound = begun(log), begun(log)

    def set_reason(reason):
        this = update(transactions).where(transactions.c.transactional_id == damaged.transactional_id)
        log.store.write(lambda connection: connection.execute(this.values(fence_reason=reason)))

    set_reason("boredom")
    assert listed(admin) == dict.fromkeys((damaged.transactional_id, sound.transactional_id), TransactionState.ONGOING)
    described = admin.describe_transactions([damaged.transactional_id, sound.transactional_id])
    assert "boredom" in error_of(described[damaged.transactional_id]).str()
    assert result(described[sound.transactional_id]).state is TransactionState.ONGOING
    set_reason(None)


def test_transactions_are_listed_by_name_with_their_states(admin, log):
    idle = log.transaction()
    open_, committed, aborted = begun(log), begun(log), begun(log)
    committed.end(commit=True)
    aborted.end(commit=False)
    assert listed(admin) == {
        idle.transactional_id: TransactionState.EMPTY,
        open_.transactional_id: TransactionState.ONGOING,
        committed.transactional_id: TransactionState.COMPLETE_COMMIT,
        aborted.transactional_id: TransactionState.COMPLETE_ABORT,
    }
    found = result(admin.list_transactions())
    assert [item.transactional_id for item in found] == sorted(listed(admin))
    assert TransactionListing(open_.transactional_id, open_.identity.producer_id, TransactionState.ONGOING) in found


def test_every_condition_given_must_be_met(admin, log):
    one, two = begun(log), begun(log)
    two.end(commit=True)
    ongoing = TransactionState.ONGOING
    assert listed(admin, states={ongoing}).keys() == {one.transactional_id}
    assert listed(admin, states={ongoing, TransactionState.COMPLETE_COMMIT}).keys() == listed(admin).keys()
    assert listed(admin, states=set(), producer_ids=set()).keys() == listed(admin).keys()
    assert listed(admin, producer_ids={two.identity.producer_id}).keys() == {two.transactional_id}
    assert listed(admin, producer_ids={two.identity.producer_id}, states={ongoing}) == {}
    assert listed(admin, producer_ids={2**63 - 1}) == {}


def test_a_duration_asks_for_transactions_that_run_for_longer(admin, log, clock):
    begun(log).end(commit=True)
    old = begun(log)
    clock.advance(1_000)
    begun(log)
    assert listed(admin, duration_ms=999).keys() == {old.transactional_id}
    assert listed(admin, duration_ms=1_000) == {}
    assert len(listed(admin, duration_ms=-1)) == 3
    assert len(listed(admin)) == 3


def test_a_pattern_matches_the_whole_transactional_id(admin, log):
    for name in ("pay-1", "pay-2", "repay-1"):
        log.coordinator.init_producer_id(name)
    assert listed(admin, transactional_id_pattern="pay-.").keys() == {"pay-1", "pay-2"}
    assert listed(admin, transactional_id_pattern=".*pay-1").keys() == {"pay-1", "repay-1"}
    assert listed(admin, transactional_id_pattern="pay") == {}
    assert len(listed(admin, transactional_id_pattern="")) == 3


@pytest.mark.parametrize(
    ("filters", "error", "text"),
    [
        ({"states": "Ongoing"}, TypeError, "^'states' must be a set$"),
        ({"states": {"Ongoing"}}, TypeError, "^All elements of states must be of type TransactionState$"),
        ({"states": {1}}, TypeError, "^All elements of states must be of type TransactionState$"),
        ({"producer_ids": 5}, TypeError, "^'producer_ids' must be a set$"),
        ({"producer_ids": {"5"}}, TypeError, "^a producer id must be int, not str$"),
        ({"producer_ids": {True}}, TypeError, "^a producer id must be int, not bool$"),
        ({"producer_ids": {-1}}, ValueError, "^a producer id must be from 0 to"),
        ({"producer_ids": {2**63}}, ValueError, "^a producer id must be from 0 to"),
        ({"duration_ms": -2}, ValueError, "^duration_ms must be from -1 to"),
        ({"duration_ms": 1.5}, TypeError, "^duration_ms must be int, not float$"),
        ({"duration_ms": None}, TypeError, "^duration_ms must be int, not NoneType$"),
        ({"duration_ms": 2**63}, ValueError, "^duration_ms must be from -1 to"),
        ({"transactional_id_pattern": "("}, ValueError, "^transactional_id_pattern is not a regular expression"),
        ({"transactional_id_pattern": 5}, TypeError, "^transactional_id_pattern must be str, not int$"),
        ({"request_timeout": -1}, ValueError, "request_timeout"),
    ],
    ids=str,
)
def test_list_transactions_refuses_what_is_no_condition(idle_admin, filters, error, text):
    with pytest.raises(error, match=text):
        idle_admin.list_transactions(**filters)


# --- describe -----------------------------------------------------------------------------------------------------


def test_a_running_transaction_is_described(admin, log, clock):
    start_ms = clock.now_ms()
    transaction = begun(log, timeout_ms=7_000)
    transaction.write("t", 1, b"y")
    transaction.send_offset("g", "t", 0, 1)
    clock.advance(250)
    found = result(admin.describe_transactions([transaction.transactional_id])[transaction.transactional_id])
    assert found.state is TransactionState.ONGOING
    assert (found.producer_id, found.producer_epoch) == (transaction.identity.producer_id, transaction.identity.epoch)
    assert (found.transaction_timeout_ms, found.coordinator_id) == (7_000, 0)
    assert (found.transaction_start_time_ms, found.transaction_duration_ms) == (start_ms, 250)
    assert found.topic_partitions == {T0, T1}
    assert found.consumer_group_ids == {"g"}


def test_a_transaction_that_is_over_has_no_start_and_no_partitions(admin, log):
    transaction = begun(log)
    transaction.end(commit=True)
    found = result(admin.describe_transactions([transaction.transactional_id])[transaction.transactional_id])
    assert found.state is TransactionState.COMPLETE_COMMIT
    assert (found.transaction_start_time_ms, found.transaction_duration_ms) == (None, None)
    assert found.topic_partitions == found.consumer_group_ids == frozenset()


def test_a_decided_transaction_that_is_not_complete_shows_what_it_has(admin, log, monkeypatch):
    transaction = begun(log)
    separate = TransactionCoordinator(log.store, Elsewhere(log.store))
    # It goes away before the markers are written.
    monkeypatch.setattr(separate, "_complete", lambda *_: None)
    separate.end_transaction(transaction.transactional_id, transaction.identity, commit=True)
    found = result(admin.describe_transactions([transaction.transactional_id])[transaction.transactional_id])
    assert found.state is TransactionState.PREPARE_COMMIT
    assert found.topic_partitions == {T0}
    spec = AbortTransactionSpec(T0, transaction.identity.producer_id, transaction.identity.epoch)
    error = error_of(admin.abort_transaction(spec))
    assert error == KafkaError.INVALID_TXN_STATE
    assert "decided to commit" in error.str()
    assert result(admin.find_hanging_transactions()) == []


def test_a_transactional_id_that_nobody_has_used_is_not_found(admin, log):
    for name, future in admin.describe_transactions([*UNUSUAL_TEXTS]).items():
        assert error_of(future) == KafkaError.TRANSACTIONAL_ID_NOT_FOUND == 105
        assert error_of(admin.force_terminate_transaction(name)) == KafkaError.TRANSACTIONAL_ID_NOT_FOUND
    assert listed(admin) == {}


def test_each_transactional_id_is_answered_by_itself(admin, log):
    known = log.transaction().transactional_id
    futures = admin.describe_transactions([known, "nobody", *HOSTILE_TEXTS])
    assert result(futures[known]).state is TransactionState.EMPTY
    assert error_of(futures["nobody"]) == KafkaError.TRANSACTIONAL_ID_NOT_FOUND
    for name in HOSTILE_TEXTS:
        assert error_of(futures[name]) == KafkaError.INVALID_REQUEST
        assert error_of(admin.fence_producers([name])[name]) == KafkaError.INVALID_REQUEST
        assert error_of(admin.force_terminate_transaction(name)) == KafkaError.INVALID_REQUEST


@pytest.mark.parametrize("call", ["describe_transactions", "fence_producers"])
@pytest.mark.parametrize(
    ("ids", "error"),
    [(None, TypeError), ("a", TypeError), ({"a"}, TypeError), ([], ValueError), ([None], TypeError), ([5], TypeError)],
    ids=str,
)
def test_what_is_no_list_of_transactional_ids_is_refused(idle_admin, call, ids, error):
    with pytest.raises(error):
        getattr(idle_admin, call)(ids)


# --- producers ----------------------------------------------------------------------------------------------------


def test_the_producers_of_a_partition_are_described(admin, log, clock):
    assert result(admin.describe_producers([T1])[T1]).active_producers == []
    log.write("t", 0, b"plain")
    done, open_ = begun(log), begun(log)
    done.end(commit=True)
    open_.write("t", 0, b"y", b"z")
    futures = admin.describe_producers([T0, TopicPartition("t", 2), TopicPartition("nobody", 0)])
    assert result(futures[T0]).active_producers == [
        ProducerState(done.identity.producer_id, done.identity.epoch + 1, -1, clock.now_ms(), 0, None),
        ProducerState(open_.identity.producer_id, open_.identity.epoch, 2, clock.now_ms(), None, 2),
    ]
    assert error_of(futures[TopicPartition("t", 2)]) == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert error_of(futures[TopicPartition("nobody", 0)]) == KafkaError.UNKNOWN_TOPIC_OR_PART


@pytest.mark.parametrize("call", ["describe_producers", "find_hanging_transactions"])
@pytest.mark.parametrize(
    ("partitions", "error"),
    [
        ("t", TypeError),
        ([], ValueError),
        (["t"], TypeError),
        ([TopicPartition("", 0)], ValueError),
        ([TopicPartition("t")], ValueError),
    ],
    ids=str,
)
def test_what_is_no_list_of_partitions_is_refused(idle_admin, call, partitions, error):
    with pytest.raises(error):
        getattr(idle_admin, call)(partitions)


# --- abort, fence -------------------------------------------------------------------------------------------------


def spec_of(admin, partition=T0):
    """Return the spec of the transaction that is open in the partition, from what the admin client shows."""
    (state,) = [
        state
        for state in result(admin.describe_producers([partition])[partition]).active_producers
        if state.current_transaction_start_offset is not None
    ]
    return AbortTransactionSpec(partition, state.producer_id, state.producer_epoch, state.coordinator_epoch or 0)


def test_a_known_transaction_is_aborted_as_a_whole(admin, log):
    transaction = begun(log)
    transaction.write("t", 1, b"y")
    transaction.send_offset("g", "t", 0, 1)
    assert result(admin.abort_transaction(spec_of(admin))) is None
    assert listed(admin) == {transaction.transactional_id: TransactionState.COMPLETE_ABORT}
    assert (stable_offset(log, 0), stable_offset(log, 1)) == (2, 2)
    with pytest.raises(TransactionAbortable, match="administrator"):
        transaction.write("t", 0, b"late")
    assert_sound(log.store, at_rest=True)


def test_what_an_open_transaction_holds_of_a_groups_offsets_is_listed_with_what_ends_it(admin, log, clock):
    transaction = log.transaction(timeout_ms=FIFTEEN_MINUTES_MS)
    sent_ms = clock.now_ms()
    transaction.send_offset("g", "t", 1, 7)
    clock.advance(1_000)
    (held,) = result(admin.list_pending_offsets())
    assert (held.group_id, held.topic_partition, held.topic_partition.offset) == ("g", T1, 7)
    assert (held.transactional_id, held.state) == (transaction.transactional_id, TransactionState.ONGOING)
    assert (held.producer_id, held.producer_epoch) == (transaction.identity.producer_id, transaction.identity.epoch)
    assert (held.last_timestamp, held.open_for_ms) == (sent_ms, 1_000)
    assert (held.transaction_start_time_ms, held.transaction_timeout_ms) == (sent_ms, FIFTEEN_MINUTES_MS)
    assert held.freed_by == f"txnstore transactions abort {transaction.transactional_id}"
    assert result(admin.list_pending_offsets([T1])) == [held]
    assert result(admin.list_pending_offsets([T0])) == []
    assert error_of(admin.list_pending_offsets([TopicPartition("t", 9)])) == KafkaError.UNKNOWN_TOPIC_OR_PART
    # It has no record anywhere.
    assert result(admin.list_open_transactions()) == []
    transaction.end(commit=True)
    assert result(admin.list_pending_offsets()) == []


def test_an_abort_that_was_decided_is_completed(admin, log, monkeypatch):
    transaction = begun(log)
    transaction.write("t", 1, b"y")
    separate = TransactionCoordinator(log.store, Elsewhere(log.store))
    # It goes away before the markers are written.
    monkeypatch.setattr(separate, "_complete", lambda *_: None)
    separate.end_transaction(transaction.transactional_id, transaction.identity, commit=False)
    assert stable_offset(log) == 0
    assert result(admin.abort_transaction(spec_of(admin))) is None
    assert listed(admin) == {transaction.transactional_id: TransactionState.COMPLETE_ABORT}
    assert_sound(log.store, at_rest=True)


def test_a_hanging_transaction_is_found_and_ended_in_its_partition(admin, log, clock):
    producer = hang(log, 0, epoch=3)
    known = begun(log, 1, timeout_ms=2 * FIFTEEN_MINUTES_MS // 2)
    began_ms = clock.now_ms()
    clock.advance(FIFTEEN_MINUTES_MS + FIVE_MINUTES_MS)
    assert result(admin.find_hanging_transactions()) == []
    clock.advance(1)
    (found,) = result(admin.find_hanging_transactions())
    assert (found.topic_partition, found.producer_id, found.producer_epoch) == (T0, producer.producer_id, 3)
    assert (found.start_offset, found.last_timestamp, found.coordinator_epoch) == (0, began_ms, None)
    assert found.duration_ms == FIFTEEN_MINUTES_MS + FIVE_MINUTES_MS + 1
    assert result(admin.find_hanging_transactions([T0])) == [found]
    (opened,) = result(admin.list_open_transactions([T0]))
    assert (opened.topic_partition, opened.first_offset, opened.is_oldest, opened.is_hanging) == (T0, 0, True, True)
    assert (opened.transactional_id, opened.state, opened.client_id, opened.backend_pid) == (None, None, None, None)
    assert opened.open_for_ms == found.duration_ms
    assert opened.abort_spec == found.abort_spec
    assert opened.freed_by == "txnstore transactions abort --topic t --partition 0 --start-offset 0"
    assert [each.is_hanging for each in result(admin.list_open_transactions())] == [True, False]
    assert error_of(admin.list_open_transactions([TopicPartition("t", 9)])) == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert result(admin.find_hanging_transactions([T1])) == []
    assert result(admin.find_hanging_transactions(max_transaction_timeout_ms=FIFTEEN_MINUTES_MS + 1)) == []
    error = error_of(admin.find_hanging_transactions([TopicPartition("t", 9)]))
    assert error == KafkaError.UNKNOWN_TOPIC_OR_PART

    assert result(admin.abort_transaction(found.abort_spec)) is None
    assert stable_offset(log) == 2
    assert result(admin.find_hanging_transactions()) == []
    assert error_of(admin.abort_transaction(found.abort_spec)) == KafkaError.INVALID_TXN_STATE
    known.end(commit=False)
    assert_sound(log.store, at_rest=True)


def test_a_running_transaction_is_aborted_where_its_coordinator_forgot_it_as_well(admin, log, clock):
    transaction = begun(log, 1)
    batch = encode(
        [Record(b"x", timestamp_ms=1_000)], producer=transaction.identity, base_sequence=0, is_transactional=True
    )
    item = Append(log.partition_id("t", 0), batch)
    log.store.write(lambda connection: append(connection, [item], coordinated=True))
    clock.advance(FIFTEEN_MINUTES_MS)
    (found,) = result(admin.find_hanging_transactions(max_transaction_timeout_ms=0))
    assert found.topic_partition == T0
    result(admin.abort_transaction(found.abort_spec))
    assert listed(admin) == {transaction.transactional_id: TransactionState.COMPLETE_ABORT}
    assert (stable_offset(log, 0), stable_offset(log, 1)) == (2, 2)
    assert_sound(log.store, at_rest=True)


def test_an_abort_of_anything_else_is_refused_and_changes_nothing(admin, log):
    transaction = begun(log)
    spec = spec_of(admin)
    refused = [
        (AbortTransactionSpec(T1, spec.producer_id, spec.producer_epoch), KafkaError.INVALID_TXN_STATE),
        (AbortTransactionSpec(T0, spec.producer_id + 9, spec.producer_epoch), KafkaError.INVALID_TXN_STATE),
        (AbortTransactionSpec(T0, spec.producer_id, spec.producer_epoch + 1), KafkaError.INVALID_PRODUCER_EPOCH),
        (AbortTransactionSpec(TopicPartition("t", 2), spec.producer_id, 0), KafkaError.UNKNOWN_TOPIC_OR_PART),
        (AbortTransactionSpec(TopicPartition("a\nb", 0), spec.producer_id, 0), KafkaError.UNKNOWN_TOPIC_OR_PART),
    ]
    for wrong, code in refused:
        assert error_of(admin.abort_transaction(wrong)) == code
    transaction.write("t", 0, b"still there")
    transaction.end(commit=True)
    assert stable_offset(log) == 3


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((None, 1, 1), TypeError),
        (("t", 1, 1), TypeError),
        ((TopicPartition("t"), 1, 1), ValueError),
        ((TopicPartition("", 0), 1, 1), ValueError),
        ((T0, -1, 1), ValueError),
        ((T0, 2**63, 1), ValueError),
        ((T0, "1", 1), TypeError),
        ((T0, True, 1), TypeError),
        ((T0, 1, -1), ValueError),
        ((T0, 1, 2**15), ValueError),
        ((T0, 1, 1.0), TypeError),
        ((T0, 1, 1, -1), ValueError),
        ((T0, 1, 1, 2**31), ValueError),
    ],
    ids=str,
)
def test_a_spec_that_names_no_transaction_is_refused(arguments, error):
    with pytest.raises(error):
        AbortTransactionSpec(*arguments)


def test_wrong_arguments_of_the_calls_of_one_thing_are_refused(idle_admin):
    with pytest.raises(TypeError, match=r"^Expected an AbortTransactionSpec, not dict$"):
        idle_admin.abort_transaction({})
    with pytest.raises(TypeError, match=r"^a transactional id must be str, not list$"):
        idle_admin.force_terminate_transaction(["a"])
    with pytest.raises(ValueError, match=r"^max_transaction_timeout_ms must be from 0"):
        idle_admin.find_hanging_transactions(max_transaction_timeout_ms=-1)


def test_fenced_producers_never_write_again(admin, log):
    transaction = begun(log)
    name = transaction.transactional_id
    fenced = result(admin.fence_producers([name, "nobody"])[name])
    assert fenced == ProducerIdAndEpoch(transaction.identity.producer_id, transaction.identity.epoch + 1)
    assert stable_offset(log) == 2
    with pytest.raises(ProducerFenced):
        transaction.write("t", 0, b"late")
    assert listed(admin) == {name: TransactionState.EMPTY, "nobody": TransactionState.EMPTY}
    assert_sound(log.store, at_rest=True)


def test_a_terminated_transaction_is_aborted_and_its_producer_fenced(admin, log):
    transaction = begun(log, timeout_ms=9_000)
    name = transaction.transactional_id
    assert result(admin.force_terminate_transaction(name)) is None
    assert result(admin.force_terminate_transaction(name)) is None
    assert listed(admin) == {name: TransactionState.EMPTY}
    assert stable_offset(log) == 2
    with pytest.raises(ProducerFenced):
        transaction.end(commit=True)
    assert_sound(log.store, at_rest=True)
