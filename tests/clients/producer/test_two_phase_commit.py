"""Transactions that an application's own database decides (KIP-939): states, completion, the recipe with SIGKILL."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from sqlalchemy import delete, update

from tests.clients.producer import two_phase_recipe
from tests.clients.producer.transactional import allow_two_phase_commit
from tests.clients.steps import NO_MEMBER, PATIENCE_SECONDS, create_topic, error_of, read_to_end, values
from tests.tools.fork_server import fork_server
from tests.tools.killed_children import every_kill
from txnstore import KafkaError, KafkaException, Outcome, PreparedTxnState, Producer, TopicPartition, outcome
from txnstore.admin import AdminClient
from txnstore.clients.producer import sender as sender_module
from txnstore.clients.producer import transactions
from txnstore.db.opening import open_store
from txnstore.db.schema import transaction_log
from txnstore.db.schema import transactions as rows_of_ids
from txnstore.errors import StoreBusy
from txnstore.transactions.protocol import EPOCH_EXHAUSTED
from txnstore.transactions.recovery import abort_by_administrator, abort_timed_out
from txnstore.transactions.writers import begin_transaction

TOPIC = "orders"
TWO_PHASE = {"transactional.id": "anna", "transaction.two.phase.commit.enable": True}
YEAR_MS = 365 * 24 * 3600 * 1000


@pytest.fixture
def topic(url):
    allow_two_phase_commit(url)
    return create_topic(url, TOPIC)


@pytest.fixture
def start(make_producer, topic):
    """Start another process of the application."""

    def start(**options):
        producer = make_producer(TWO_PHASE)
        producer.init_transactions(PATIENCE_SECONDS, **options)
        return producer

    return start


def prepared(producer, *records):
    producer.begin_transaction()
    for record in records:
        producer.produce(TOPIC, record, partition=0)
    return producer.prepare_transaction(PATIENCE_SECONDS)


def refuse_for_now(*arguments, **named):
    raise StoreBusy


def seen(url):
    return values(read_to_end(url, TOPIC))


def test_what_is_remembered_is_committed_and_anything_else_aborted(url, start):
    producer = start()
    state = prepared(producer, b"a", b"b")
    assert str(state) == f"{state.producer_id}:{state.epoch}"
    assert seen(url) == []
    producer.complete_transaction(str(state), PATIENCE_SECONDS)
    assert seen(url) == [b"a", b"b"]
    for other in ("", PreparedTxnState(state.producer_id, state.epoch), str(state)):
        assert prepared(producer, b"lost") != other
        producer.complete_transaction(other, PATIENCE_SECONDS)
    assert seen(url) == [b"a", b"b"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_the_next_process_completes_what_the_last_one_has_prepared(url, start, commit):
    zombie = start()
    state = prepared(zombie, b"a")
    producer = start(keep_prepared_txn=True)
    assert seen(url) == []
    assert producer.prepare_transaction(PATIENCE_SECONDS) == state
    assert error_of(zombie.commit_transaction).code() == KafkaError._FENCED
    producer.complete_transaction(state if commit else "", PATIENCE_SECONDS)
    assert seen(url) == ([b"a"] if commit else [])
    producer.begin_transaction()
    producer.produce(TOPIC, b"next", partition=0)
    producer.commit_transaction(PATIENCE_SECONDS)
    assert seen(url) == ([b"a", b"next"] if commit else [b"next"])


def age(url, transactional_id, *, left=0):
    """Let its producer id have so many epochs left once the next process has started."""
    row = update(rows_of_ids).where(rows_of_ids.c.transactional_id == transactional_id)
    with open_store(url) as store:
        store.write(lambda connection: connection.execute(row.values(producer_epoch=EPOCH_EXHAUSTED - left - 1)))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
@pytest.mark.parametrize("left", [0, 1, 2])
def test_of_all_processes_that_take_it_over_the_last_one_completes_it(url, start, commit, left):
    start()
    age(url, "anna", left=left)
    prepares = start()
    state = prepared(prepares, b"a")
    first, second, last = (start(keep_prepared_txn=True) for _ in range(3))
    assert last.prepare_transaction(PATIENCE_SECONDS) == state
    for early in (prepares, second):
        assert error_of(early.complete_transaction, state, PATIENCE_SECONDS).code() == KafkaError._FENCED
    last.complete_transaction(state if commit else "", PATIENCE_SECONDS)
    late = error_of(first.complete_transaction, state if commit else "", PATIENCE_SECONDS)
    assert (late.fatal(), late.retriable()) == (True, False)
    for value in (b"b", b"c"):
        last.begin_transaction()
        last.produce(TOPIC, value, partition=0)
        last.commit_transaction(PATIENCE_SECONDS)
    assert seen(url) == [b"a"] * commit + [b"b", b"c"]
    assert outcome(state, url) is (Outcome.COMMITTED if commit else Outcome.ABORTED)


def test_a_process_that_is_started_without_keeping_aborts_it(url, start):
    zombie = start()
    state = prepared(zombie, b"a")
    start()
    assert seen(url) == []
    assert outcome(state, url) is Outcome.ABORTED
    assert error_of(zombie.complete_transaction, state).code() == KafkaError._FENCED


def test_where_nothing_was_prepared_completion_is_done_already(url, start):
    earlier = start()
    state = prepared(earlier)
    earlier.commit_transaction(PATIENCE_SECONDS)
    producer = start(keep_prepared_txn=True)
    for end in (
        lambda: producer.complete_transaction(state, PATIENCE_SECONDS),
        producer.commit_transaction,
        producer.abort_transaction,
        lambda: producer.complete_transaction(""),
    ):
        assert end() is None
    producer.begin_transaction()
    producer.produce(TOPIC, b"a", partition=0)
    assert error_of(producer.complete_transaction, "").code() == KafkaError.INVALID_TXN_STATE
    producer.commit_transaction(PATIENCE_SECONDS)
    # What was true at the start is not any more.
    assert error_of(producer.commit_transaction).code() == KafkaError._STATE
    assert error_of(producer.complete_transaction, "").code() == KafkaError.INVALID_TXN_STATE
    assert seen(url) == [b"a"]


def test_what_is_remembered_as_committed_and_was_aborted_is_not_done_already(url, start):
    state = prepared(start(), b"a")
    AdminClient({"bootstrap.servers": url}).force_terminate_transaction("anna").result(PATIENCE_SECONDS)
    for _ in range(2):
        producer = start(keep_prepared_txn=True)
        error = error_of(producer.complete_transaction, str(state), PATIENCE_SECONDS)
        assert (error.code(), error.fatal(), error.retriable()) == (KafkaError.INVALID_TXN_STATE, False, False)
        assert f"{state} is remembered" in error.str()
        assert "it is aborted: what was produced with it is not in the log" in error.str()
    # Somebody has put it right.
    producer.complete_transaction("", PATIENCE_SECONDS)
    producer.complete_transaction(prepared(producer, b"b"), PATIENCE_SECONDS)
    assert seen(url) == [b"b"]


def test_names_that_no_transaction_of_the_id_ever_had_are_not_done_already(url, start, make_producer):
    other = make_producer({**TWO_PHASE, "transactional.id": "otto"})
    other.init_transactions(PATIENCE_SECONDS)
    state = prepared(other, b"a")
    other.commit_transaction(PATIENCE_SECONDS)
    first = start()
    own = prepared(first)
    first.commit_transaction(PATIENCE_SECONDS)
    producer = start(keep_prepared_txn=True)
    for unknown in (str(state), f"{own.producer_id}:{own.epoch + 50}", f"{own.producer_id + 10}:0"):
        error = error_of(producer.complete_transaction, unknown, PATIENCE_SECONDS)
        assert error.code() == KafkaError.INVALID_TXN_STATE
        assert "no transaction of this id" in error.str()
        assert "is it another store" in error.str()
        assert "is not in the log" not in error.str()
    producer.complete_transaction(own, PATIENCE_SECONDS)


def test_what_is_remembered_and_open_in_the_hands_of_another_process_is_not_called_lost(url, start):
    producer = start(keep_prepared_txn=True)
    state = prepared(start(), b"a")
    error = error_of(producer.complete_transaction, str(state), PATIENCE_SECONDS)
    assert error.code() == KafkaError.INVALID_TXN_STATE
    assert "it is open" in error.str()
    assert "in the log" not in error.str()
    assert outcome(state, url) is Outcome.OPEN


def test_what_the_journal_does_not_know_any_more_has_ended(url, start):
    first = start()
    state = prepared(first, b"a")
    first.commit_transaction(PATIENCE_SECONDS)
    producer = start(keep_prepared_txn=True)
    with open_store(url) as store:
        store.write(lambda connection: connection.execute(delete(transaction_log)))
    producer.complete_transaction(state, PATIENCE_SECONDS)
    assert seen(url) == [b"a"]


def test_what_is_remembered_is_asked_for_until_the_database_answers(url, start):
    producer = start(keep_prepared_txn=True)
    store = producer._sender.session.connection.store()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(store), "read", refuse_for_now)
        assert error_of(producer.complete_transaction, "7:7", 0.1).code() == KafkaError._TIMED_OUT
    assert error_of(producer.complete_transaction, "7:7", PATIENCE_SECONDS).code() == KafkaError.INVALID_TXN_STATE


def test_what_is_remembered_is_not_asked_for_any_more_once_nobody_waits(url, start):
    producer = start(keep_prepared_txn=True)
    store = producer._sender.session.connection.store()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(store), "read", refuse_for_now)
        assert error_of(producer.complete_transaction, "7:7", 0.1).code() == KafkaError._TIMED_OUT
        assert producer._transactions.progress.submit(lambda: "its turn").result(PATIENCE_SECONDS) == "its turn"


def test_nothing_begins_while_it_is_asked_what_became_of_what_is_remembered(url, start):
    producer = start(keep_prepared_txn=True)
    store = producer._sender.session.connection.store()
    is_asked, may_answer = threading.Event(), threading.Event()
    read = type(store).read

    def read_slowly(self, *arguments, **named):
        is_asked.set()
        assert may_answer.wait(PATIENCE_SECONDS)
        return read(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patched, ThreadPoolExecutor() as threads:
        patched.setattr(type(store), "read", read_slowly)
        answer = threads.submit(error_of, producer.complete_transaction, "7:7", PATIENCE_SECONDS)
        assert is_asked.wait(PATIENCE_SECONDS)
        assert error_of(producer.begin_transaction).code() == KafkaError._CONFLICT
        may_answer.set()
        assert answer.result().code() == KafkaError.INVALID_TXN_STATE
    producer.begin_transaction()
    producer.abort_transaction()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("records", [(), (b"a", b"b")], ids=["empty", "with records"])
def test_what_is_written_to_be_prepared_is_not_begun_once_more(url, start, monkeypatch, records):
    begun = []

    def begin(*arguments, **named):
        begun.append(arguments)
        return begin_transaction(*arguments, **named)

    # However long a busy machine takes: all of it is sent by prepare_transaction().
    monkeypatch.setattr(sender_module, "COMMIT_COMES_SECONDS", 3_600.0)
    monkeypatch.setattr(transactions, "begin_transaction", begin)
    producer = start()
    state = prepared(producer, *records)
    assert len(begun) == (0 if records else 1)
    assert outcome(state, url) is Outcome.OPEN
    producer.complete_transaction(state, PATIENCE_SECONDS)
    assert seen(url) == list(records)


def test_a_token_that_came_too_late_does_not_keep_it_from_being_prepared(url, start, hold_database, monkeypatch):
    monkeypatch.setattr(transactions, "TRY_TIMEOUT_MS", 0)
    producer = start()
    producer.begin_transaction()
    with hold_database(url):
        assert error_of(producer.transaction_token, 0.1).code() == KafkaError._TIMED_OUT
    producer.produce(TOPIC, b"a", partition=0)
    state = producer.prepare_transaction(PATIENCE_SECONDS)
    producer.complete_transaction(state, PATIENCE_SECONDS)
    assert seen(url) == [b"a"]


def test_an_empty_transaction_is_prepared_and_completed_too(url, start):
    state = prepared(start())
    producer = start(keep_prepared_txn=True)
    producer.complete_transaction(state, PATIENCE_SECONDS)
    assert seen(url) == []


def dies_with_one_prepared(url, pipe):
    """Be a process that ends an empty transaction, prepares the next one and is killed."""
    producer = Producer({"bootstrap.servers": url, **TWO_PHASE})
    producer.init_transactions(PATIENCE_SECONDS)
    empty = str(prepared(producer))
    producer.complete_transaction(empty, PATIENCE_SECONDS)
    pipe.send((empty, str(prepared(producer, b"rolled back"))))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_the_name_of_an_empty_transaction_does_not_commit_the_next_one(url, start):
    context = fork_server()
    ours, theirs = context.Pipe()
    child = context.Process(target=dies_with_one_prepared, args=(url, theirs), daemon=True)
    child.start()
    child.join(PATIENCE_SECONDS)
    assert child.exitcode == -signal.SIGKILL
    remembered, forgotten = ours.recv()
    # The application's database has committed the first one, and rolled back the second.
    assert remembered != forgotten
    assert (outcome(remembered, url), outcome(forgotten, url)) == (Outcome.COMMITTED, Outcome.OPEN)
    start(keep_prepared_txn=True).complete_transaction(remembered, PATIENCE_SECONDS)
    assert seen(url) == []
    assert (outcome(remembered, url), outcome(forgotten, url)) == (Outcome.COMMITTED, Outcome.ABORTED)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("end", ["commit_transaction", "abort_transaction"])
def test_a_transaction_that_is_prepared_empty_is_open_until_it_is_ended_by_its_name(url, start, end):
    producer = start()
    state = prepared(producer)
    assert outcome(state, url) is Outcome.OPEN
    assert producer.prepare_transaction(PATIENCE_SECONDS) == state
    getattr(producer, end)(PATIENCE_SECONDS)
    assert outcome(state, url) is (Outcome.COMMITTED if end == "commit_transaction" else Outcome.ABORTED)
    assert prepared(producer) != state


def test_a_name_that_came_too_late_is_written_when_it_is_asked_for_again(url, start, hold_database):
    producer = start()
    producer.begin_transaction()
    with hold_database(url):
        assert error_of(producer.prepare_transaction, 0.1).code() == KafkaError._TIMED_OUT
    state = producer.prepare_transaction(PATIENCE_SECONDS)
    producer = start(keep_prepared_txn=True)
    assert producer.prepare_transaction(PATIENCE_SECONDS) == state
    producer.complete_transaction(state, PATIENCE_SECONDS)
    assert outcome(state, url) is Outcome.COMMITTED


@pytest.mark.slow_but_first
@pytest.mark.parametrize("call", ["prepare_transaction", "transaction_token"])
@pytest.mark.parametrize("end", ["commit_transaction", "abort_transaction"])
def test_an_empty_transaction_whose_begin_came_too_late_can_be_ended(url, start, hold_database, monkeypatch, call, end):
    # Each attempt to begin is given up at once: none is still waiting when the database is let go of.
    monkeypatch.setattr(transactions, "TRY_TIMEOUT_MS", 0)
    producer = start()
    producer.begin_transaction()
    with hold_database(url):
        assert error_of(getattr(producer, call), 0.1).code() == KafkaError._TIMED_OUT
    getattr(producer, end)(PATIENCE_SECONDS)
    producer.begin_transaction()
    producer.produce(TOPIC, b"a", partition=0)
    producer.commit_transaction(PATIENCE_SECONDS)
    assert seen(url) == [b"a"]


def test_nothing_is_added_to_what_is_prepared(url, start):
    producer = start()
    state = prepared(producer, b"a")
    for call in (
        producer.begin_transaction,
        producer.init_transactions,
        producer.transaction_token,
        lambda: producer.produce(TOPIC, b"late", partition=0),
        lambda: producer.send_offsets_to_transaction([TopicPartition(TOPIC, 0, 1)], NO_MEMBER),
    ):
        assert error_of(call).code() == KafkaError._STATE
    assert producer.prepare_transaction() == state
    producer.commit_transaction(PATIENCE_SECONDS)
    assert seen(url) == [b"a"]


def test_what_others_may_write_to_is_not_prepared(url, start, make_producer):
    producer = start()
    producer.begin_transaction()
    token = producer.transaction_token(PATIENCE_SECONDS)
    writer = make_producer({"txnstore.transaction.token": token})
    writer.produce(TOPIC, b"a", partition=0)
    writer_id = writer.report_writer(PATIENCE_SECONDS)
    error = error_of(producer.prepare_transaction, PATIENCE_SECONDS)
    assert (error.code(), error.retriable(), error.txn_requires_abort()) == (KafkaError._STATE, False, False)
    assert "transaction_token" in error.str()
    producer.commit_transaction(PATIENCE_SECONDS, writers=[writer_id])
    # The next one has no writers.
    producer.complete_transaction(prepared(producer, b"b"), PATIENCE_SECONDS)
    assert seen(url) == [b"a", b"b"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_it_holds_consumed_offsets_too(url, start, make_consumer, commit):
    producer = start()
    producer.begin_transaction()
    producer.produce(TOPIC, b"a", partition=0)
    producer.send_offsets_to_transaction([TopicPartition(TOPIC, 0, 1)], NO_MEMBER, PATIENCE_SECONDS)
    state = producer.prepare_transaction(PATIENCE_SECONDS)
    start(keep_prepared_txn=True).complete_transaction(state if commit else "", PATIENCE_SECONDS)
    (committed,) = make_consumer().committed([TopicPartition(TOPIC, 0)], PATIENCE_SECONDS)
    assert committed.offset == (1 if commit else -1001)


def test_closing_the_producer_leaves_it_prepared(url, start, recwarn):
    producer = start()
    state = prepared(producer, b"a")
    assert producer.close()
    # What others have left may be found by the garbage collector just then.
    assert not [warning for warning in recwarn.list if not issubclass(warning.category, ResourceWarning)]
    assert outcome(state, url) is Outcome.OPEN
    start(keep_prepared_txn=True).complete_transaction(state, PATIENCE_SECONDS)
    assert seen(url) == [b"a"]
    assert outcome(state, url) is Outcome.COMMITTED


def test_an_error_after_it_was_prepared_does_not_abort_it(url, start):
    producer = start()
    states = []

    def work():
        with producer.transaction():
            producer.produce(TOPIC, b"a", partition=0)
            states.append(producer.prepare_transaction(PATIENCE_SECONDS))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        work()
    (note,) = caught.value.__notes__
    assert "is prepared" in note
    (state,) = states
    producer.complete_transaction(state, PATIENCE_SECONDS)
    assert seen(url) == [b"a"]


def test_a_record_that_is_refused_keeps_it_from_being_prepared(url, start):
    producer = start()
    producer.begin_transaction()
    producer.produce(TOPIC, b"a", partition=7)
    error = error_of(producer.prepare_transaction, PATIENCE_SECONDS)
    assert error.txn_requires_abort()
    producer.abort_transaction(PATIENCE_SECONDS)
    prepared(producer, b"b")
    producer.commit_transaction(PATIENCE_SECONDS)
    assert seen(url) == [b"b"]


def test_it_has_no_deadline_but_an_administrator_can_end_it(url, make_producer, topic, clock):
    producer = make_producer({**TWO_PHASE, "txnstore.clock": clock})
    producer.init_transactions(PATIENCE_SECONDS)
    state = prepared(producer, b"a")
    with open_store(url, clock=clock) as store:
        clock.advance(YEAR_MS)
        assert abort_timed_out(store) == ()
        assert abort_by_administrator(store, "anna")
    error = error_of(producer.complete_transaction, state, PATIENCE_SECONDS)
    assert error.txn_requires_abort()
    producer.abort_transaction(PATIENCE_SECONDS)
    prepared(producer, b"b")
    with open_store(url, clock=clock) as store:
        # Its successor still has no deadline.
        clock.advance(YEAR_MS)
        assert abort_timed_out(store) == ()
    producer.commit_transaction(PATIENCE_SECONDS)
    assert seen(url) == [b"b"]


def test_forced_termination_fences_the_producer(url, start):
    producer = start()
    state = prepared(producer, b"a")
    AdminClient({"bootstrap.servers": url}).force_terminate_transaction("anna").result(PATIENCE_SECONDS)
    assert error_of(producer.complete_transaction, state).code() == KafkaError._FENCED
    assert outcome(state, url) is Outcome.ABORTED


@pytest.mark.slow_but_first
@pytest.mark.parametrize("who", ["an administrator", "a newer producer"])
def test_what_somebody_else_has_aborted_is_not_prepared(url, start, who):
    producer = start()
    producer.begin_transaction()
    producer.produce(TOPIC, b"a", partition=0)
    assert producer.flush(PATIENCE_SECONDS) == 0
    if who == "a newer producer":
        start()
    else:
        AdminClient({"bootstrap.servers": url}).force_terminate_transaction("anna").result(PATIENCE_SECONDS)
    error = error_of(producer.prepare_transaction, PATIENCE_SECONDS)
    assert (error.code(), error.fatal()) == (KafkaError._FENCED, True)
    assert seen(url) == []


def test_what_was_aborted_for_an_administrator_is_not_prepared_and_can_be_begun_anew(url, start):
    producer = start()
    producer.begin_transaction()
    producer.produce(TOPIC, b"a", partition=0)
    assert producer.flush(PATIENCE_SECONDS) == 0
    with open_store(url) as store:
        assert abort_by_administrator(store, "anna")
    assert error_of(producer.prepare_transaction, PATIENCE_SECONDS).txn_requires_abort()
    producer.abort_transaction(PATIENCE_SECONDS)
    producer.complete_transaction(prepared(producer, b"b"), PATIENCE_SECONDS)
    assert seen(url) == [b"b"]


def test_it_takes_the_configuration_and_the_store(url, make_producer):
    create_topic(url, TOPIC)
    plain = make_producer({"transactional.id": "anna"})
    assert error_of(plain.init_transactions, keep_prepared_txn=True).code() == KafkaError.INVALID_REQUEST
    plain.init_transactions(PATIENCE_SECONDS)
    plain.begin_transaction()
    assert error_of(plain.prepare_transaction).code() == KafkaError.INVALID_TXN_STATE
    refused = make_producer({**TWO_PHASE, "transactional.id": "otto"})
    error = error_of(refused.init_transactions, PATIENCE_SECONDS)
    assert (error.code(), error.fatal()) == (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, True)
    assert "transaction.two.phase.commit.enable" in error.str()


@pytest.mark.parametrize(
    "configuration",
    [
        {"transaction.two.phase.commit.enable": True},
        {**TWO_PHASE, "transaction.timeout.ms": 60_000},
        {**TWO_PHASE, "transaction.two.phase.commit.enable": "perhaps"},
    ],
    ids=["without a transactional id", "with a timeout", "no truth value"],
)
def test_configurations_that_do_not_fit_are_refused(url, configuration):
    with pytest.raises(KafkaException) as caught:
        Producer({"bootstrap.servers": url, **configuration})
    assert caught.value.args[0].code() == KafkaError._INVALID_ARG


@pytest.mark.slow_but_first
@pytest.mark.variants_on_sqlite
@pytest.mark.parametrize(
    ("state", "kind"),
    [("1", ValueError), ("1:x", ValueError), ("-1:0", ValueError), (b"1:1", TypeError), (None, TypeError)],
    ids=["a number", "letters", "half of it", "bytes", "nothing"],
)
def test_what_is_no_state_is_refused_before_anything_is_done(url, start, state, kind):
    producer = start()
    prepared(producer, b"a")
    with pytest.raises(kind):
        producer.complete_transaction(state)
    with pytest.raises(kind):
        outcome(state, url)
    producer.commit_transaction(PATIENCE_SECONDS)
    assert seen(url) == [b"a"]


def test_the_outcome_of_what_nobody_has_begun_is_not_known(url, start):
    state = prepared(start(), b"a")
    for unknown in (f"{state.producer_id + 100}:0", f"{state.producer_id}:{state.epoch + 7}"):
        assert error_of(outcome, unknown, url).code() == KafkaError.TRANSACTIONAL_ID_NOT_FOUND
    with pytest.raises(ValueError, match="names no transaction"):
        outcome("", url)


def test_the_outcome_of_every_transaction_of_a_producer_is_its_own(url, start):
    producer = start()
    states = []
    for number, commit in enumerate((True, False, True, True, False)):
        states.append((str(prepared(producer, b"%d" % number)), commit))
        producer.complete_transaction(states[-1][0] if commit else "", PATIENCE_SECONDS)
    for state, commit in states:
        assert outcome(state, {"bootstrap.servers": url}) is (Outcome.COMMITTED if commit else Outcome.ABORTED)
    assert outcome(prepared(producer, b"open"), url) is Outcome.OPEN


def test_a_name_under_which_nothing_was_written_ends_as_aborted(url, start):
    """As versions before have given out."""
    identity = prepared(start())
    AdminClient({"bootstrap.servers": url}).force_terminate_transaction("anna").result(PATIENCE_SECONDS)
    unused = PreparedTxnState(identity.producer_id, identity.epoch + 1)
    assert outcome(unused, url) is Outcome.OPEN
    error = error_of(start(keep_prepared_txn=True).complete_transaction, unused, PATIENCE_SECONDS)
    assert error.code() == KafkaError.INVALID_TXN_STATE
    assert outcome(unused, url) is Outcome.ABORTED


@pytest.mark.slow_but_first
@pytest.mark.parametrize("records", [(b"a",), ()], ids=["with a record", "empty"])
def test_the_outcome_is_final_if_the_question_fences(url, start, records):
    producer = start()
    states = {str(prepared(producer, *records)): Outcome.COMMITTED}
    producer.commit_transaction(PATIENCE_SECONDS)
    states[str(prepared(producer, *records))] = Outcome.ABORTED
    for _ in range(2):
        assert {state: outcome(state, url, fence=True) for state in states} == states
    assert error_of(producer.commit_transaction, PATIENCE_SECONDS).fatal()
    assert {state: outcome(state, url) for state in states} == states
    assert seen(url) == list(records)


@pytest.mark.slow
@pytest.mark.parametrize("is_aged", [False, True], ids=["a new producer id", "its last epochs"])
def test_the_recipe_keeps_both_databases_together_whatever_dies(url, tmp_path, is_aged):
    if url.startswith("postgresql"):
        pytest.skip("a killed client leaves the same on PostgreSQL as one whose connection is cut, and takes longer")
    counter = iter(range(10_000))

    def make():
        folder = tmp_path / str(next(counter))
        folder.mkdir()
        task = f"sqlite:///{folder / 'log.db'}", f"sqlite:///{folder / 'shop.db'}"
        allow_two_phase_commit(task[0])
        create_topic(task[0], TOPIC)
        if is_aged:
            two_phase_recipe.start(*task).close()
            age(task[0], "shop", left=1)
        return task

    orders_left = set()
    for kill in every_kill(make, two_phase_recipe.run):
        log_url, shop_url = kill.argument
        # Others come in between, and only want to end it once somebody else has.
        slow = [two_phase_recipe.take_over(log_url) for _ in range(2)]
        with two_phase_recipe.start(log_url, shop_url):
            orders = two_phase_recipe.orders_in(shop_url)
            assert [int(value) for value in seen(log_url)] == orders, kill
            for remembered in ("", two_phase_recipe.remembered_in(shop_url)):
                with slow.pop() as late, suppress(KafkaException):
                    late.complete_transaction(remembered)
            assert [int(value) for value in seen(log_url)] == orders, kill
        orders_left.add(len(orders))
    assert orders_left == {0, 1, 2}
