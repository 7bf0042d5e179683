"""Every call of a producer in every state: what goes through, and what is refused with which code, text and flags.

Codes, texts and flags are those that confluent-kafka 2.16.1 was seen to answer with.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest

from tests.clients.steps import (
    NO_MEMBER,
    PATIENCE_SECONDS,
    Refusal,
    create_topic,
    error_of,
    read_to_end,
    refusal_of,
    time_out,
    values,
)
from tests.tools.silent_port import silent_port
from txnstore import KafkaError, Producer, TopicPartition
from txnstore.deadline import Deadline
from txnstore.testing.manual_clock import ManualClock
from txnstore.transactions.recovery import abort_by_administrator

TOPIC = "orders"
#: How long a call waits that cannot succeed.
SHORT_SECONDS = 0.3

CALLS = {
    "init": lambda producer, seconds=PATIENCE_SECONDS: producer.init_transactions(seconds),
    "begin": lambda producer: producer.begin_transaction(),
    "produce": lambda producer: producer.produce(TOPIC, b"refused", partition=0),
    "send_offsets": lambda producer, seconds=PATIENCE_SECONDS: producer.send_offsets_to_transaction(
        [TopicPartition(TOPIC, 0, 1)], NO_MEMBER, seconds
    ),
    "commit": lambda producer, seconds=PATIENCE_SECONDS: producer.commit_transaction(seconds),
    "abort": lambda producer, seconds=PATIENCE_SECONDS: producer.abort_transaction(seconds),
}
#: Calls that answer with the last error once a transaction cannot go on.
NOT_PRODUCE = tuple(name for name in CALLS if name != "produce")

NOT_CONFIGURED = Refusal(KafkaError._NOT_CONFIGURED, "The Transactional API requires transactional.id to be configured")
CANNOT_PRODUCE = Refusal(KafkaError._STATE, "Unable to produce message: Local: Erroneous state")
CANNOT_PRODUCE_ANY_MORE = Refusal(KafkaError._FATAL, "Unable to produce message: Local: Fatal error")
TIMED_OUT = Refusal(
    KafkaError._TIMED_OUT, "Timed out waiting for operation to finish, retry call to resume", is_retriable=True
)


def said(call, *arguments):
    """Return what a refused call says, without why the database is tried again, if a first try has ended by then."""
    refusal = refusal_of(call, *arguments)
    return None if refusal is None else refusal._replace(text=(refusal.text or "").partition(": ")[0])


def not_valid_in(state):
    return Refusal(KafkaError._STATE, f"Operation not valid in state {state}")


def conflicting(call):
    return Refusal(KafkaError._CONFLICT, f"Conflicting {call} API call is already in progress", is_retriable=True)


def calls_of(producer, *names):
    """Make the calls, one after the other, and return what each says."""
    return {name: refusal_of(CALLS[name], producer) for name in names}


@pytest.fixture
def topic(url):
    return create_topic(url, TOPIC, max_message_bytes="1000")


@pytest.fixture
def producer(make_producer):
    return make_producer({"transactional.id": "anna"})


@pytest.fixture
def in_transaction(producer):
    producer.init_transactions(PATIENCE_SECONDS)
    producer.begin_transaction()
    return producer


@pytest.fixture
def abortable(in_transaction, topic):
    """A producer whose record was refused: it is larger than the topic allows."""
    in_transaction.produce(topic, b"x" * 2000, partition=0)
    assert in_transaction.flush(PATIENCE_SECONDS) == 0
    return in_transaction


@pytest.fixture
def fenced(in_transaction, make_producer):
    """A producer whose transactional id another one has taken, and that has not noticed yet."""
    make_producer({"transactional.id": "anna"}).init_transactions(PATIENCE_SECONDS)
    return in_transaction


@pytest.fixture
def fatal(fenced, topic):
    fenced.produce(topic, b"late", partition=0)
    assert fenced.flush(PATIENCE_SECONDS) == 0
    return fenced


@pytest.mark.slow_but_first
@pytest.mark.parametrize("configuration", [{}, {"transactional.id": ""}, {"transactional.id": None}])
def test_without_a_transactional_id_there_are_no_transactions(make_producer, url, topic, configuration):
    producer = make_producer(configuration)

    assert calls_of(producer, *NOT_PRODUCE) == dict.fromkeys(NOT_PRODUCE, NOT_CONFIGURED)
    assert refusal_of(producer.send_offsets_to_transaction, [], NO_MEMBER) == NOT_CONFIGURED
    producer.produce(topic, b"plain")
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert values(read_to_end(url, topic)) == [b"plain"]


def test_before_init_only_init_is_valid(producer):
    refused = ("begin", "produce", "send_offsets", "commit", "abort")

    assert calls_of(producer, *refused) == dict.fromkeys(refused, not_valid_in("Init")) | {"produce": CANNOT_PRODUCE}
    producer.init_transactions(PATIENCE_SECONDS)


@pytest.mark.parametrize("how", ["init", "commit", "abort"])
def test_when_ready_only_begin_is_valid(producer, how):
    producer.init_transactions(PATIENCE_SECONDS)
    if how != "init":
        producer.begin_transaction()
        CALLS[how](producer)
    refused = ("init", "produce", "send_offsets", "commit", "abort")

    assert calls_of(producer, *refused) == dict.fromkeys(refused, not_valid_in("Ready")) | {"produce": CANNOT_PRODUCE}
    producer.begin_transaction()


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_in_a_transaction_neither_init_nor_begin_is_valid(in_transaction, topic, end):
    refused = ("init", "begin")

    assert calls_of(in_transaction, *refused) == dict.fromkeys(refused, not_valid_in("InTransaction"))
    in_transaction.produce(topic, b"valid", partition=0)
    in_transaction.send_offsets_to_transaction([TopicPartition(topic, 0, 1)], NO_MEMBER, PATIENCE_SECONDS)
    getattr(in_transaction, f"{end}_transaction")(PATIENCE_SECONDS)
    in_transaction.begin_transaction()


def test_after_a_failed_delivery_everything_but_abort_says_why(abortable, topic):
    why = error_of(abortable.commit_transaction, PATIENCE_SECONDS)

    assert why.code() == KafkaError.MSG_SIZE_TOO_LARGE
    assert topic in why.str()
    last_error = Refusal(why.code(), why.str(), requires_abort=True)
    refused = ("init", "begin", "produce", "send_offsets", "commit")
    assert calls_of(abortable, *refused) == dict.fromkeys(refused, last_error) | {"produce": CANNOT_PRODUCE}
    abortable.abort_transaction(PATIENCE_SECONDS)
    assert calls_of(abortable, "begin", "produce", "commit") == {"begin": None, "produce": None, "commit": None}


def test_a_commit_that_finds_the_failed_delivery_itself_is_refused_as_well(in_transaction, topic, url):
    in_transaction.produce(topic, b"small", partition=0)
    in_transaction.produce(topic, b"x" * 2000, partition=0)

    error = error_of(in_transaction.commit_transaction, PATIENCE_SECONDS)

    assert (error.txn_requires_abort(), error.fatal(), error.retriable()) == (True, False, False)
    assert error.code() in (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError._INCONSISTENT)
    in_transaction.abort_transaction(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == []


def test_a_commit_after_a_delivery_that_the_client_itself_gave_up_counts_the_messages(in_transaction, topic):
    in_transaction.produce(topic, b"purged", partition=0)
    in_transaction.purge()

    expected = Refusal(
        KafkaError._INCONSISTENT,
        "1 message(s) failed delivery (see individual delivery reports): Local: Purged in queue",
        requires_abort=True,
    )
    assert refusal_of(in_transaction.commit_transaction, PATIENCE_SECONDS) == expected
    assert refusal_of(in_transaction.commit_transaction, PATIENCE_SECONDS) == expected
    in_transaction.abort_transaction(PATIENCE_SECONDS)
    in_transaction.begin_transaction()


def test_once_fenced_every_call_says_so(fatal):
    why = error_of(fatal.commit_transaction, PATIENCE_SECONDS)

    assert why.code() == KafkaError._FENCED
    last_error = Refusal(why.code(), why.str(), is_fatal=True)
    assert calls_of(fatal, *CALLS) == dict.fromkeys(CALLS, last_error) | {"produce": CANNOT_PRODUCE_ANY_MORE}


@pytest.mark.parametrize("call", ["send_offsets", "commit"])
def test_a_fenced_producer_finds_out_at_its_next_call(fenced, topic, url, call):
    fenced.produce(topic, b"late", partition=0)

    error = error_of(CALLS[call], fenced)

    assert (error.code(), error.fatal()) == (KafkaError._FENCED, True)
    assert not error.retriable()
    assert not error.txn_requires_abort()
    assert values(read_to_end(url, topic, isolation="read_uncommitted")) == []


def test_an_abort_of_what_is_in_the_log_finds_the_newer_producer(in_transaction, make_producer, topic):
    in_transaction.produce(topic, b"aborted by the newer one", partition=0)
    assert in_transaction.flush(PATIENCE_SECONDS) == 0
    make_producer({"transactional.id": "anna"}).init_transactions(PATIENCE_SECONDS)

    error = error_of(in_transaction.abort_transaction, PATIENCE_SECONDS)

    assert (error.code(), error.fatal()) == (KafkaError._FENCED, True)


def test_a_fatal_error_is_raised_from_poll_where_errors_are_called_back(make_producer, topic):
    """confluent-kafka 2.16.1 raises a fatal error instead of calling error_cb."""
    called_back: list[KafkaError] = []
    producer = make_producer({"transactional.id": "anna", "error_cb": called_back.append})
    producer.init_transactions(PATIENCE_SECONDS)
    producer.begin_transaction()
    producer.produce(topic, b"aborted by the newer one", partition=0)
    assert producer.flush(PATIENCE_SECONDS) == 0
    make_producer({"transactional.id": "anna"}).init_transactions(PATIENCE_SECONDS)
    assert error_of(producer.commit_transaction, PATIENCE_SECONDS).fatal()

    error = error_of(producer.poll, 0)

    assert (error.code(), error.fatal()) == (KafkaError._FENCED, True)
    assert called_back == []


@pytest.mark.slow_but_first
@pytest.mark.parametrize("call", ["produce", "send_offsets", "commit"])
def test_a_transaction_aborted_by_an_administrator_can_be_aborted_and_begun_anew(
    store, url, in_transaction, topic, call
):
    in_transaction.produce(topic, b"lost", partition=0)
    assert in_transaction.flush(PATIENCE_SECONDS) == 0
    assert abort_by_administrator(store, "anna", "by the operator on duty")

    if call == "produce":
        in_transaction.produce(topic, b"late", partition=0)
        assert in_transaction.flush(PATIENCE_SECONDS) == 0
        call = "commit"
    error = error_of(CALLS[call], in_transaction)

    assert error.code() in (KafkaError.TRANSACTION_ABORTABLE, KafkaError.INVALID_PRODUCER_EPOCH)
    assert (error.txn_requires_abort(), error.fatal(), error.retriable()) == (True, False, False)
    assert "by the operator on duty" in error.str()
    assert refusal_of(in_transaction.begin_transaction) == Refusal.of(error)
    _assert_goes_on(in_transaction, url, topic)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("call", ["produce", "send_offsets", "commit"])
def test_a_transaction_that_timed_out_can_be_aborted_and_begun_anew(store, url, clock, make_producer, topic, call):
    """Abortable, with reason and age in the text; only a newer producer is fatal."""
    producer = make_producer({"transactional.id": "anna", "transaction.timeout.ms": 60_000, "txnstore.clock": clock})
    producer.init_transactions(PATIENCE_SECONDS)
    producer.begin_transaction()
    producer.produce(topic, b"lost", partition=0)
    assert producer.flush(PATIENCE_SECONDS) == 0
    clock.advance(61_234)
    time_out(store)

    if call == "produce":
        producer.produce(topic, b"late", partition=0)
        assert producer.flush(PATIENCE_SECONDS) == 0
        call = "commit"
    error = error_of(CALLS[call], producer)

    assert error.code() in (KafkaError.TRANSACTION_ABORTABLE, KafkaError.INVALID_PRODUCER_EPOCH)
    assert (error.txn_requires_abort(), error.fatal(), error.retriable()) == (True, False, False)
    assert "61234" in error.str()
    assert "60000" in error.str()
    _assert_goes_on(producer, url, topic)


def test_an_abort_of_a_transaction_that_timed_out_goes_through(store, url, clock, make_producer, topic):
    producer = make_producer({"transactional.id": "anna", "txnstore.clock": clock})
    producer.init_transactions(PATIENCE_SECONDS)
    producer.begin_transaction()
    producer.produce(topic, b"lost", partition=0)
    assert producer.flush(PATIENCE_SECONDS) == 0
    clock.advance(60_001)
    time_out(store)

    _assert_goes_on(producer, url, topic)


def _assert_goes_on(producer, url, topic):
    """Abort, then commit a transaction of which readers see everything and of the old one nothing."""
    producer.abort_transaction(PATIENCE_SECONDS)
    producer.begin_transaction()
    producer.produce(topic, b"kept", partition=0)
    producer.commit_transaction(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"kept"]


def test_the_newer_producer_fences_the_older_one_that_timed_out(store, clock, make_producer, topic):
    configuration = {"transactional.id": "anna", "txnstore.clock": clock}
    older = make_producer(configuration)
    older.init_transactions(PATIENCE_SECONDS)
    older.begin_transaction()
    older.produce(topic, b"lost", partition=0)
    assert older.flush(PATIENCE_SECONDS) == 0
    clock.advance(60_001)
    time_out(store)
    make_producer(configuration).init_transactions(PATIENCE_SECONDS)

    error = error_of(older.commit_transaction, PATIENCE_SECONDS)

    assert (error.code(), error.fatal()) == (KafkaError._FENCED, True)


def test_once_closed_everything_but_close_is_refused(in_transaction, topic):
    in_transaction.produce(topic, b"dropped", partition=0)
    assert in_transaction.close() is True

    calls = dict(CALLS)
    calls |= {
        "poll": lambda producer: producer.poll(0),
        "flush": lambda producer: producer.flush(0),
        "purge": lambda producer: producer.purge(),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=r"^Producer has been closed$"):
            pytest.fail(f"{name} returned {call(in_transaction)!r}")
    for call in (in_transaction.list_topics, in_transaction.cluster_id):
        with pytest.raises(RuntimeError, match=r"has been closed$"):
            call(timeout=SHORT_SECONDS)
    assert in_transaction.close() is True
    assert len(in_transaction) == 0
    assert bool(in_transaction) is True


def test_an_init_that_timed_out_is_resumed_by_the_same_call_only(producer, url, hold_database):
    others = ("begin", "produce", "send_offsets", "commit", "abort")
    with hold_database(url):
        assert said(CALLS["init"], producer, SHORT_SECONDS) == TIMED_OUT
        assert calls_of(producer, *others) == dict.fromkeys(others, conflicting("init_transactions")) | {
            "produce": CANNOT_PRODUCE
        }
        assert refusal_of(producer.send_offsets_to_transaction, [], NO_MEMBER) == conflicting("init_transactions")
        assert said(CALLS["init"], producer, SHORT_SECONDS) == TIMED_OUT

    producer.init_transactions(PATIENCE_SECONDS)
    producer.begin_transaction()


def test_an_init_that_nobody_answers_times_out():
    nowhere = "postgresql://nobody@127.0.0.1:1/nothing"
    producer = Producer({"bootstrap.servers": nowhere, "transactional.id": "anna"})

    assert said(producer.init_transactions, SHORT_SECONDS) == TIMED_OUT
    assert refusal_of(producer.begin_transaction) == conflicting("init_transactions")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert producer.close() is True


def cause_of(call, producer):
    """Return what a call whose time is up says beside that, once a first try has ended."""
    deadline = Deadline(PATIENCE_SECONDS)
    while (refusal := refusal_of(call, producer, 0.01)) == TIMED_OUT:
        assert deadline.left_seconds() > 0
    assert refusal is not None
    assert refusal.text is not None
    text, _, cause = refusal.text.partition(": ")
    assert refusal._replace(text=text) == TIMED_OUT
    return cause


@pytest.mark.slow
@pytest.mark.parametrize("call", ["init", "commit", "abort"])
def test_what_timed_out_says_why_the_database_is_tried_again(url, make_producer, topic, hold_database, call):
    producer = make_producer({"transactional.id": "anna"})
    if call != "init":
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        producer.produce(topic, b"once", partition=0)
        assert producer.flush(PATIENCE_SECONDS) == 0
    with hold_database(url):
        assert cause_of(CALLS[call], producer) == str(producer._thread.backoff.trouble)
    CALLS[call](producer)
    # That is over: it is not said of what takes long afterwards.
    assert producer._thread.backoff.trouble is None


def test_the_password_is_no_part_of_why_the_database_is_tried_again():
    with silent_port() as port:
        url = f"postgresql://nobody:secret@127.0.0.1:{port}/none"
        with Producer({"bootstrap.servers": url, "transactional.id": "anna"}) as producer:
            cause = cause_of(CALLS["init"], producer)
    assert cause.startswith("no connection to PostgreSQL could be made: is the server there and the address right?")
    assert "secret" not in cause


@pytest.mark.slow_but_first
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_an_end_that_timed_out_is_resumed_by_the_same_call_only(in_transaction, url, topic, hold_database, end):
    in_transaction.produce(topic, b"once", partition=0)
    assert in_transaction.flush(PATIENCE_SECONDS) == 0
    others = tuple(name for name in CALLS if name != end)
    with hold_database(url):
        assert said(CALLS[end], in_transaction, SHORT_SECONDS) == TIMED_OUT
        assert calls_of(in_transaction, *others) == dict.fromkeys(others, conflicting(f"{end}_transaction")) | {
            "produce": CANNOT_PRODUCE
        }
        assert said(CALLS[end], in_transaction, SHORT_SECONDS) == TIMED_OUT

    getattr(in_transaction, f"{end}_transaction")(PATIENCE_SECONDS)
    in_transaction.begin_transaction()
    assert values(read_to_end(url, topic)) == ([b"once"] if end == "commit" else [])


def test_an_end_that_went_through_after_its_time_still_has_to_be_called_again(
    in_transaction, url, topic, hold_database
):
    in_transaction.produce(topic, b"once", partition=0)
    assert in_transaction.flush(PATIENCE_SECONDS) == 0
    with hold_database(url):
        assert said(CALLS["commit"], in_transaction, SHORT_SECONDS) == TIMED_OUT

    assert refusal_of(in_transaction.begin_transaction) == conflicting("commit_transaction")
    in_transaction.commit_transaction(PATIENCE_SECONDS)
    in_transaction.begin_transaction()
    assert values(read_to_end(url, topic)) == [b"once"]


def test_a_commit_that_cannot_flush_in_time_is_resumed(in_transaction, url, topic, hold_database):
    in_transaction.produce(topic, b"once", partition=0)
    with hold_database(url):
        refusal = refusal_of(CALLS["commit"], in_transaction, SHORT_SECONDS)
        assert refusal is not None
        assert (refusal.code, refusal.is_retriable) == (KafkaError._TIMED_OUT, True)
        assert refusal_of(CALLS["abort"], in_transaction) == conflicting("commit_transaction")

    in_transaction.commit_transaction(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic)) == [b"once"]


def test_the_same_call_from_two_threads_is_refused_to_the_second(producer, url, hold_database):
    simultaneous = Refusal(
        KafkaError._PREV_IN_PROGRESS, "Simultaneous init_transactions API calls not allowed", is_retriable=True
    )
    answers: list[Refusal | None] = []

    def first():
        # Of the two it is this one that is refused if it comes while the other one has not timed out yet.
        while (answer := refusal_of(producer.init_transactions, PATIENCE_SECONDS)) == simultaneous:
            answers.append(answer)
        answers.append(answer)

    thread = threading.Thread(target=first)
    with hold_database(url):
        thread.start()
        seen = [said(producer.init_transactions, 0.01)]
        while seen[-1] != simultaneous and len(seen) < 500:
            seen.append(said(producer.init_transactions, 0.01))
    thread.join(PATIENCE_SECONDS)

    assert seen[-1] == simultaneous
    assert set(seen) <= {simultaneous, TIMED_OUT}
    assert answers[-1] is None
    producer.begin_transaction()


def test_a_delivery_callback_may_not_end_the_transaction_that_is_being_committed(in_transaction, url, topic):
    answers = {}

    def misuse(error, message):
        answers.update(calls_of(in_transaction, "begin", "abort"))

    in_transaction.produce(topic, b"once", partition=0, on_delivery=misuse)
    in_transaction.commit_transaction(PATIENCE_SECONDS)

    assert answers == dict.fromkeys(("begin", "abort"), conflicting("commit_transaction"))
    assert values(read_to_end(url, topic)) == [b"once"]


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_an_empty_transaction_ends_either_way(in_transaction, end):
    getattr(in_transaction, f"{end}_transaction")(PATIENCE_SECONDS)

    assert refusal_of(CALLS["commit"], in_transaction) == not_valid_in("Ready")


@pytest.mark.parametrize(
    "positions",
    [[], [TopicPartition(TOPIC, 0)], [TopicPartition(TOPIC, 0, -5)]],
    ids=["none", "invalid", "negative"],
)
def test_offsets_that_say_nothing_are_not_sent_in_any_state(producer, positions):
    producer.send_offsets_to_transaction(positions, NO_MEMBER)
    producer.init_transactions(PATIENCE_SECONDS)
    producer.send_offsets_to_transaction(positions, NO_MEMBER)
    producer.begin_transaction()
    producer.send_offsets_to_transaction(positions, NO_MEMBER)
    producer.commit_transaction(PATIENCE_SECONDS)


def test_no_offsets_are_not_refused_even_where_only_an_abort_is_valid(abortable):
    abortable.send_offsets_to_transaction([], NO_MEMBER)


def test_no_offsets_are_not_refused_even_where_nothing_is_valid(fatal):
    fatal.send_offsets_to_transaction([], NO_MEMBER)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((None, NO_MEMBER), "TopicPartition"),
        ((["orders"], NO_MEMBER), "TopicPartition"),
        (([TopicPartition(TOPIC, 0, 1)], "readers"), "expected bytes, str found"),
        (([TopicPartition(TOPIC, 0, 1)], None), "expected bytes, NoneType found"),
    ],
)
def test_offsets_of_another_type_are_a_type_error_before_anything_happens(in_transaction, arguments, text):
    with pytest.raises(TypeError, match=text):
        in_transaction.send_offsets_to_transaction(*arguments)
    in_transaction.commit_transaction(PATIENCE_SECONDS)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("metadata", [b"", b"garbage", b"CGMDv2:", NO_MEMBER[:-4]])
def test_group_metadata_that_is_none_is_refused_and_harms_nothing(in_transaction, metadata):
    error = error_of(in_transaction.send_offsets_to_transaction, [TopicPartition(TOPIC, 0, 1)], metadata)

    assert error.code() == KafkaError._BAD_MSG
    assert not error.txn_requires_abort()
    in_transaction.commit_transaction(PATIENCE_SECONDS)


def test_an_abort_drops_what_was_not_sent(in_transaction, url, topic, hold_database):
    reports = []
    with hold_database(url):
        for value in (b"1", b"2"):
            in_transaction.produce(topic, value, on_delivery=lambda error, message: reports.append(error))
    in_transaction.abort_transaction(PATIENCE_SECONDS)
    in_transaction.poll(0)

    # What was on its way already may have arrived; nothing of it is ever committed.
    assert {report.code() for report in reports if report} <= {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}
    assert len(reports) == 2
    assert values(read_to_end(url, topic)) == []


def test_an_abort_before_anything_could_be_sent_reports_it_as_purged(make_producer, topic):
    producer = make_producer({"transactional.id": "anna", "linger.ms": 50_000})
    producer.init_transactions(PATIENCE_SECONDS)
    producer.begin_transaction()
    reports = []
    producer.produce(topic, b"dropped", on_delivery=lambda error, message: reports.append((error, message.offset())))

    producer.abort_transaction(PATIENCE_SECONDS)
    producer.poll(0)

    assert reports == [(KafkaError._PURGE_QUEUE, None)]


def test_an_abort_after_a_flush_leaves_its_good_reports(in_transaction, url, topic):
    reports = []
    in_transaction.produce(topic, b"aborted", on_delivery=lambda error, message: reports.append(error))
    assert in_transaction.flush(PATIENCE_SECONDS) == 0
    in_transaction.abort_transaction(PATIENCE_SECONDS)

    assert reports == [None]
    assert values(read_to_end(url, topic)) == []
    assert values(read_to_end(url, topic, isolation="read_uncommitted")) == [b"aborted"]


def test_a_timeout_that_the_store_does_not_allow_is_fatal(make_producer):
    producer = make_producer({"transactional.id": "anna", "transaction.timeout.ms": 900_001})

    error = error_of(producer.init_transactions, PATIENCE_SECONDS)

    assert (error.code(), error.fatal()) == (KafkaError.INVALID_TRANSACTION_TIMEOUT, True)
    assert Refusal.of(error_of(producer.begin_transaction)) == Refusal.of(error)


def test_an_abort_that_waits_while_a_newer_producer_is_heard_of_says_so(in_transaction, topic):
    in_transaction.produce(topic, b"sent", partition=0)
    assert in_transaction.flush(PATIENCE_SECONDS) == 0
    progress = in_transaction._progress
    is_held = threading.Event()
    thread = in_transaction._thread
    thread.submit(is_held.wait)
    thread.submit(lambda: progress.fail(KafkaError(KafkaError._FENCED, "a newer producer", fatal=True)))
    assert code_of(in_transaction.abort_transaction, 0.05) == KafkaError._TIMED_OUT
    is_held.set()
    assert code_of(in_transaction.abort_transaction, PATIENCE_SECONDS) == KafkaError._FENCED
    assert code_of(in_transaction.begin_transaction) == KafkaError._FENCED


def code_of(call, *arguments):
    refusal = refusal_of(call, *arguments)
    assert refusal is not None
    return refusal.code


class ClosingClock(ManualClock):
    """Closes a producer as the program asks what time it is, once."""

    def __init__(self) -> None:
        super().__init__()
        self.closes: Any = None

    def now_ms(self) -> int:
        if self.closes is not None and threading.current_thread() is threading.main_thread():
            closes, self.closes = self.closes, None
            closes()
        return super().now_ms()


@pytest.mark.variants_on_sqlite
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_record_whose_producer_is_closed_as_it_is_produced_is_refused(make_producer, url, is_known, is_first):
    """Another thread closes it, or a signal's handler: nobody would ever send the record or report it."""
    topic = create_topic(url, "orders")
    clock = ClosingClock()
    producer = make_producer({"txnstore.clock": clock, "allow.auto.create.topics": True})
    if is_known:
        producer._directory.find([topic])
    if not is_first:
        producer.produce(topic, b"before")
    clock.closes = producer.close
    with pytest.raises(RuntimeError, match="closed"):
        producer.produce(topic, b"late")
    assert len(producer) == 0
    assert values(read_to_end(url, topic)) == ([] if is_first else [b"before"])
