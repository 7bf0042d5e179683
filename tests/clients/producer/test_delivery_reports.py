"""What delivery reports tell of each record, and what callbacks find counted while they are served."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.clients.callers import calling
from tests.clients.consumer.log_writer import eventually
from tests.clients.moments import attempt, every_interrupt, is_no_moment_for_signals
from tests.clients.producer.reporting import NEVER_MS, Reports, poll_until
from tests.clients.steps import PATIENCE_SECONDS, create_topic, error_of, read_to_end, values
from tests.databases import on_sqlite_alone
from txnstore import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME, KafkaError
from txnstore.clients.callbacks import Callbacks
from txnstore.clients.model.message import messages_in_python
from txnstore.clients.producer import queue as queue_module
from txnstore.clients.producer.queue import PARTITION_UNASSIGNED, Accumulator, Batch, DeliveryReport, DeliveryReports
from txnstore.clients.producer.requests import InFlight, ProduceRequest, ProducerSession, UnassignedTopics
from txnstore.clients.producer.thread import Alarm, SenderThread
from txnstore.deadline import WAIT_SECONDS_MAX
from txnstore.errors import OutcomeUnknown, RecordTooLarge, StoreBusy, StoreClosed, TxnStoreError


@pytest.fixture
def reported(monkeypatch):
    """The batches of which there were reports; a second one of a batch is noted, and not counted out once more."""
    batches: list[Batch] = []
    add, add_instead = DeliveryReports.add, DeliveryReports.add_instead

    def add_once(reports, report):
        is_first = not any(known is report.batch for known in batches)
        batches.append(report.batch)
        if is_first:
            add(reports, report)

    def note(reports, several, item, held):
        is_added = add_instead(reports, several, item, held)
        if is_added:
            batches.extend(report.batch for report in several)
        return is_added

    monkeypatch.setattr(DeliveryReports, "add", add_once)
    monkeypatch.setattr(DeliveryReports, "add_instead", note)
    return batches


def test_what_fails_behind_the_reports_of_a_request_has_none_reported_twice(make_producer, monkeypatch, url):
    topic = create_topic(url, "orders")
    producer = make_producer({"enable.idempotence": True, "linger.ms": 0})
    note_places, failed = ProducerSession.note_places, threading.Event()

    def failing(session, appended):
        noted = note_places(session, appended)
        if not failed.is_set():
            failed.set()
            raise MemoryError
        return noted

    monkeypatch.setattr(ProducerSession, "note_places", failing)
    reports = Reports()
    producer.produce(topic, b"first", on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0
    producer.produce(topic, b"second", on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert failed.is_set()
    assert [(error, message.value()) for error, message in reports] == [(None, b"first"), (None, b"second")]
    assert values(read_to_end(url, topic)) == [b"first", b"second"]


def test_each_report_tells_of_its_own_record(make_producer, url):
    topic = create_topic(url, "orders", partition_count=3)
    producer = make_producer({"linger.ms": NEVER_MS})
    reports, others = Reports(), Reports()
    for number in range(30):
        producer.produce(
            topic,
            None if number % 5 == 0 else b"v" * number,
            f"k{number}" if number % 2 else None,
            partition=number % 3,
            timestamp=1_000 + number if number % 7 else 0,
            headers={"h": "x"} if number % 4 == 0 else None,
            on_delivery=others if number % 6 == 0 else reports,
        )
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert others.errors + reports.errors == [None] * 30
    assert {message.partition() for _, message in others} == {0}
    for partition in range(3):
        expected = [number for number in range(30) if number % 3 == partition]
        told = sorted(
            (message for _, message in reports + others if message.partition() == partition),
            key=lambda message: message.offset(),
        )
        assert [message.offset() for message in told] == list(range(10))
        for number, message in zip(expected, told, strict=True):
            assert message.value() == (None if number % 5 == 0 else b"v" * number)
            assert message.key() == (b"k%d" % number if number % 2 else None)
            kind, timestamp_ms = message.timestamp()
            assert kind == TIMESTAMP_CREATE_TIME
            assert timestamp_ms == 1_000 + number if number % 7 else timestamp_ms > 1_000_000
            assert message.headers() is None
            assert 0 <= message.latency() < PATIENCE_SECONDS


def test_a_topic_that_stamps_its_records_tells_the_stamp(make_producer, url):
    topic = create_topic(url, "stamped", message_timestamp_type="LogAppendTime")
    producer = make_producer({"linger.ms": NEVER_MS})
    reports = Reports()
    for number in range(3):
        producer.produce(topic, timestamp=1_000 + number, on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0
    kinds, stamps = zip(*(message.timestamp() for _, message in reports), strict=True)
    assert set(kinds) == {TIMESTAMP_LOG_APPEND_TIME}
    assert len(set(stamps)) == 1
    assert stamps[0] > 1_000_000


def test_a_record_that_never_got_a_partition_has_the_one_that_was_asked_for(make_producer):
    producer = make_producer({"linger.ms": NEVER_MS})
    reports = Reports()
    for partition in (7, -1, 3):
        producer.produce("unknown", partition=partition, on_delivery=reports)
    producer.purge()
    producer.poll(0)
    assert reports.errors == [KafkaError._PURGE_QUEUE] * 3
    assert [message.partition() for _, message in reports] == [7, None, 3]


@on_sqlite_alone
@pytest.mark.parametrize("is_refused", [False, True], ids=["written", "refused"])
def test_what_was_given_up_while_it_was_being_written_is_reported_once(
    make_producer, url, monkeypatch, reported, is_refused
):
    """As of a producer that is closed while a database is silent, which answers in that very moment."""
    producer = make_producer({"linger.ms": 0})
    write = ProducerSession.write

    def write_late(session, request):
        appended = write(session, request)
        producer._sender.drop_in_flight(KafkaError(KafkaError._PURGE_INFLIGHT))
        if is_refused:
            raise StoreClosed
        return appended

    monkeypatch.setattr(ProducerSession, "write", write_late)
    reports = Reports()
    producer.produce(create_topic(url, "orders"), b"x", on_delivery=reports)
    poll_until(producer, lambda: len(reports) == 1)
    # Behind all that the sender has to say.
    producer.list_topics(timeout=PATIENCE_SECONDS)
    producer.poll(0)
    assert [error.code() for error in reports.errors] == [KafkaError._PURGE_INFLIGHT]
    assert len(reported) == 1
    assert len(producer) == 0


@on_sqlite_alone
def test_what_fails_with_the_record_before_it_is_reported_once(make_producer, url, monkeypatch, reported):
    """A purge names two requests of a transaction, and the log may have the first: the transaction fails with it."""
    producer = make_producer({"transactional.id": "anna", "linger.ms": NEVER_MS})
    topic = create_topic(url, "orders")
    # Twice, for the topic is read again in between.
    answers = [*[RecordTooLarge("both together")] * 2, OutcomeUnknown("of the first")]

    def refuse(session, request):
        if len(answers) == 1:
            producer.purge(in_queue=False, blocking=False)
        raise answers.pop(0)

    producer.init_transactions(PATIENCE_SECONDS)
    producer.begin_transaction()
    monkeypatch.setattr(ProducerSession, "write", refuse)
    reports = Reports()
    producer.produce(topic, b"first", partition=0, on_delivery=reports)
    producer.produce(topic, b"second", partition=0, on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0
    producer.abort_transaction(PATIENCE_SECONDS)
    assert [error.code() for error in reports.errors] == [KafkaError._PURGE_INFLIGHT] * 2
    assert len(reported) == 2


@on_sqlite_alone
def test_what_an_interrupt_fails_while_its_commit_is_gathered_is_reported_once(
    make_producer, url, monkeypatch, reported
):
    """The commit of an application's connection: its thread notes the interrupt while the sender's encodes records."""
    producer = make_producer({"transactional.id": "anna", "linger.ms": NEVER_MS})
    topic = create_topic(url, "orders")
    prepare = ProducerSession.prepare

    def prepare_while_interrupted(session, batches):
        request = prepare(session, batches)
        producer._progress.fail(KafkaError(KafkaError._FAIL, "interrupted", txn_requires_abort=True))
        return request

    producer.init_transactions(PATIENCE_SECONDS)
    reports = Reports()
    with calling(url, "core") as caller, monkeypatch.context() as patched:
        patched.setattr(ProducerSession, "prepare", prepare_while_interrupted)
        producer.begin_transaction()
        producer.enlist(caller.given)
        producer.produce(topic, b"in vain", partition=0, on_delivery=reports)
        assert error_of(producer.commit_transaction, PATIENCE_SECONDS).txn_requires_abort()
        producer.abort_transaction(PATIENCE_SECONDS)
    assert [error.code() for error in reports.errors] == [KafkaError._PURGE_INFLIGHT]
    assert len(reported) == 1
    # Whatever sequence numbers were used up in vain.
    with producer.transaction(PATIENCE_SECONDS):
        producer.produce(topic, b"next", partition=0)
    assert [value for value in values(read_to_end(url, topic)) if value] == [b"next"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("bounds", [{"queue.buffering.max.messages": 8}, {"queue.buffering.max.kbytes": 1}])
def test_a_callback_may_produce_though_the_queue_was_full(make_producer, url, bounds):
    topic = create_topic(url, "orders")
    producer = make_producer({"linger.ms": NEVER_MS, **bounds})
    served = []

    def again(error, message):
        served.append(message.value())
        if len(served) <= 8:
            producer.produce(topic, b"y" * 128, on_delivery=again)

    for _ in range(8):
        producer.produce(topic, b"x" * 128, on_delivery=again)
    with pytest.raises(BufferError):
        producer.produce(topic, b"z" * 128)
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert served == [b"x" * 128] * 8 + [b"y" * 128] * 8


def test_the_length_of_a_producer_counts_down_while_callbacks_are_called(make_producer, url):
    topic = create_topic(url, "orders")
    producer = make_producer({"linger.ms": NEVER_MS})
    lengths = []
    for _ in range(5):
        producer.produce(topic, b"v", on_delivery=lambda error, message: lengths.append(len(producer)))
    assert len(producer) == 5
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert lengths == [4, 3, 2, 1, 0]


class Queue:
    """An accumulator and the reports of what leaves it."""

    def __init__(self, *, default_callback=None, only_errors=False):
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        self.accumulator = Accumulator(
            self.changed,
            Alarm(lock),
            linger_seconds=0.005,
            records_max=100,
            size_bytes_max=10_000,
            batch_records_max=100,
            batch_bytes_max=10_000,
        )
        self.reports = DeliveryReports(
            self.changed, self.accumulator, default_callback=default_callback, only_errors=only_errors
        )

    def add(self, *callbacks) -> None:
        for number, callback in enumerate(callbacks):
            self.accumulator.add("t", 0, None, b"%d" % number, None, 0, None, callback, 0.0, 1, PARTITION_UNASSIGNED)

    def take(self) -> Batch:
        (batch,) = self.accumulator.take_batches(1, 10_000)
        return batch


def test_what_is_left_after_an_exception_is_served_by_the_next_call_once():
    queue, served = Queue(), Reports()

    def fail(error, message):
        served(error, message)
        raise KeyboardInterrupt

    queue.add(served, fail, served, fail, served)
    queue.reports.add(DeliveryReport(queue.take(), base_offset=10))
    for left_count in (3, 1):
        with pytest.raises(KeyboardInterrupt):
            queue.reports.serve()
        assert (queue.accumulator.record_count, queue.accumulator.size_bytes) == (left_count, left_count)
    assert queue.reports.serve() == 1
    assert served.values == [b"0", b"1", b"2", b"3", b"4"]
    assert [message.offset() for _, message in served] == [10, 11, 12, 13, 14]
    assert (queue.accumulator.record_count, queue.accumulator.size_bytes) == (0, 0)
    assert not queue.reports.are_waiting


def test_a_callback_that_serves_reports_itself_goes_on_where_the_outer_one_is():
    queue, served = Queue(), Reports()

    def nested(error, message):
        served(error, message)
        queue.reports.serve()

    queue.add(served, nested, served)
    first = DeliveryReport(queue.take(), base_offset=0)
    queue.add(nested, served)
    second = DeliveryReport(queue.take(), base_offset=3)
    queue.reports.add(first)
    queue.reports.add(second)
    queue.reports.serve()
    assert [message.offset() for _, message in served] == [0, 1, 2, 3, 4]
    assert queue.accumulator.record_count == 0
    assert not queue.reports.are_waiting


@pytest.mark.parametrize("with_default", [False, True])
def test_records_without_a_callback_are_counted_and_go_to_the_default_one_if_there_is_one(with_default):
    default, own = Reports(), Reports()
    queue = Queue(default_callback=default if with_default else None)
    queue.add(None, own, None)
    queue.reports.add(DeliveryReport(queue.take(), base_offset=0))
    queue.add(None, None)
    queue.reports.add(DeliveryReport(queue.take(), KafkaError(KafkaError._PURGE_QUEUE)))
    assert queue.reports.serve() == 5
    assert own.values == [b"1"]
    assert default.values == ([b"0", b"2", b"0", b"1"] if with_default else [])
    assert queue.accumulator.record_count == 0


def test_failures_alone_are_reported_if_that_is_asked_for_and_all_are_counted_out():
    queue, served = Queue(only_errors=True), Reports()
    queue.add(served, served)
    queue.reports.add(DeliveryReport(queue.take(), base_offset=0))
    assert queue.accumulator.record_count == 0
    queue.add(served)
    queue.reports.add(DeliveryReport(queue.take(), KafkaError(KafkaError._PURGE_QUEUE)))
    assert queue.reports.serve() == 1
    assert served.errors == [KafkaError._PURGE_QUEUE]
    assert (queue.accumulator.record_count, queue.accumulator.size_bytes) == (0, 0)


@pytest.mark.parametrize("handler", ["serve", "count"])
def test_each_record_is_counted_out_once_also_if_a_signals_handler_serves_reports_meanwhile(handler):
    queue = Queue()

    def handle() -> None:
        if handler == "serve":
            queue.reports.serve()
        else:
            queue.accumulator.settled_count()

    for _, moment in every_interrupt({"producer/queue.py"}, is_no_moment_for_signals, handle):
        queue, served = Queue(), Reports()
        queue.add(served, served, served)
        queue.reports.add(DeliveryReport(queue.take(), base_offset=0))
        queue.add(served)
        queue.reports.add(DeliveryReport(queue.take(), base_offset=3))
        queue.add(served)
        attempt(moment, queue.reports.serve)
        assert sorted(message.offset() for _, message in served) == [0, 1, 2, 3], moment.where
        assert (queue.accumulator.record_count, queue.accumulator.size_bytes) == (1, 1), moment.where


@pytest.mark.parametrize("with_default", [False, True])
def test_each_record_is_reported_once_wherever_serving_is_interrupted(monkeypatch, with_default):
    """Also where messages are made in Python, and where the callback is known weakly."""
    monkeypatch.setattr(queue_module, "messages_of", messages_in_python)
    files = {"clients/callbacks.py", "producer/queue.py", "model/message.py"}
    for _, moment in every_interrupt(files, is_no_moment_for_signals):
        served = Reports()
        callbacks = Callbacks(on_delivery=served)
        queue = Queue(default_callback=callbacks.weakly("on_delivery") if with_default else None)
        queue.add(*[None if with_default else served] * 3)
        queue.reports.add(DeliveryReport(queue.take(), base_offset=0))
        attempt(moment, queue.reports.serve)
        queue.reports.serve()
        assert [message.offset() for _, message in served] == [0, 1, 2], moment.where
        assert (queue.accumulator.record_count, queue.accumulator.size_bytes) == (0, 0), moment.where


FILES = {"producer/producer.py", "producer/queue.py", "producer/sender.py"}


@on_sqlite_alone
@pytest.mark.parametrize("with_transactions", [False, True])
def test_what_a_purge_takes_is_reported_once_wherever_it_is_interrupted(make_producer, url, with_transactions):
    topic = create_topic(url, "orders", partition_count=2)
    producer = make_producer({"linger.ms": NEVER_MS, **({"transactional.id": "anna"} if with_transactions else {})})
    if with_transactions:
        producer.init_transactions(PATIENCE_SECONDS)
    for _, moment in every_interrupt(FILES, is_no_moment_for_signals):
        if with_transactions:
            producer.begin_transaction()
        reports = Reports()
        for number in range(3):
            producer.produce(topic, b"%d" % number, partition=number % 2, on_delivery=reports)
        producer.produce("unknown", b"3", on_delivery=reports)
        attempt(moment, lambda: producer.purge(in_flight=False))
        if with_transactions:
            producer.poll(0)
            if len(reports) > 0:
                assert error_of(producer.commit_transaction, PATIENCE_SECONDS).txn_requires_abort(), moment.where
            producer.abort_transaction(PATIENCE_SECONDS)
        assert producer.flush(PATIENCE_SECONDS) == 0, moment.where
        assert sorted(reports.values) == [b"0", b"1", b"2", b"3"], moment.where
        assert len(producer) == 0


def test_an_event_is_told_once_wherever_that_is_interrupted():
    told: list[int] = []
    for number, moment in every_interrupt({"producer/queue.py", "clients/callbacks.py"}, is_no_moment_for_signals):
        queue = Queue()
        queue.reports.events.put(lambda number=number: told.append(number))
        attempt(moment, queue.reports.serve)
        queue.reports.serve()
        assert told == list(range(1, number + 1)), moment.where
        assert not queue.reports.are_waiting


@on_sqlite_alone
@pytest.mark.parametrize("with_transactions", [False, True])
def test_what_is_dropped_in_flight_is_reported_once_wherever_that_is_interrupted(
    make_producer, url, monkeypatch, with_transactions
):
    """As of a producer that is closed; the commit of an application's connection drops what it has gathered as well."""
    topic = create_topic(url, "orders", partition_count=2)
    producer = make_producer({"linger.ms": NEVER_MS, **({"transactional.id": "anna"} if with_transactions else {})})
    sender = producer._sender
    error = KafkaError(KafkaError._PURGE_INFLIGHT)
    if with_transactions:
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
    producer.produce(topic, b"known", partition=0)
    assert producer.flush(PATIENCE_SECONDS) == 0

    def be_busy(session, request):
        raise StoreBusy

    monkeypatch.setattr(ProducerSession, "write", be_busy)

    def drop(gathered: list[ProduceRequest]) -> None:
        sender.fail_requests(gathered, error)
        sender.drop_in_flight(error)

    for _, moment in every_interrupt(FILES, is_no_moment_for_signals):
        reports, gathered = Reports(), []
        for number in range(4):
            producer.produce(topic, b"%d" % number, partition=number % 2, on_delivery=reports)
            if number == 1:
                with producer._changed:
                    gathered.append(ProduceRequest(producer._accumulator.take_batches(1, 1_000), []))
        with producer._changed:
            sender._distribute()
        assert not sender._accumulator.waiting_count
        attempt(moment, lambda: drop(gathered))  # noqa: B023 - called here
        drop(gathered)
        assert producer.flush(PATIENCE_SECONDS) == 0
        assert sorted(reports.values) == [b"0", b"1", b"2", b"3"], moment.where
        assert {report.code() for report in reports.errors} == {KafkaError._PURGE_INFLIGHT}
        assert len(producer) == 0


@on_sqlite_alone
def test_a_second_interrupt_of_closing_leaves_no_record_without_its_report(make_producer, url, monkeypatch):
    producer = make_producer({"linger.ms": NEVER_MS})
    reports = Reports()
    stop = producer._thread.stop

    def interrupt(*_):
        raise KeyboardInterrupt

    def stop_and_interrupt(timeout_seconds):
        stop(timeout_seconds)
        interrupt()

    monkeypatch.setattr(producer, "_flush", interrupt)
    monkeypatch.setattr(producer._thread, "stop", stop_and_interrupt)
    producer.produce(create_topic(url, "orders"), b"x", on_delivery=reports)
    with pytest.raises(KeyboardInterrupt):
        producer.close()
    assert reports.errors == [KafkaError._PURGE_QUEUE]


def test_what_a_callback_that_raises_leaves_is_another_threads_to_serve_at_once():
    queue, served = Queue(), Reports()
    waits, heard = threading.Event(), []

    def wait() -> None:
        with queue.changed:
            waits.set()
            heard.append((queue.changed.wait(PATIENCE_SECONDS), queue.reports.are_waiting))

    waiter = threading.Thread(target=wait)

    def fail(error, message):
        waiter.start()
        assert waits.wait(PATIENCE_SECONDS)
        # Not before it waits: until then it has the lock.
        with queue.changed:
            raise KeyboardInterrupt

    queue.add(fail, served)
    queue.reports.add(DeliveryReport(queue.take(), base_offset=0))
    with pytest.raises(KeyboardInterrupt):
        queue.reports.serve()
    waiter.join()
    assert heard == [(True, True)]
    assert queue.reports.serve() == 1
    assert served.values == [b"1"]


@on_sqlite_alone
def test_a_flush_sleeps_while_another_thread_serves_a_slow_callback(make_producer, url, monkeypatch):
    producer = make_producer({"linger.ms": 0})
    is_called, may_return = threading.Event(), threading.Event()

    def be_slow(error, message):
        is_called.set()
        assert may_return.wait(PATIENCE_SECONDS)

    producer.produce(create_topic(url, "orders"), b"x", on_delivery=be_slow)
    looks: list[None] = []
    serve = producer._reports.serve

    def look():
        looks.append(None)
        assert len(looks) < 10, "it looks again and again"
        return serve()

    with ThreadPoolExecutor(2) as pool:
        polling = pool.submit(poll_until, producer, is_called.is_set)
        assert is_called.wait(PATIENCE_SECONDS)
        try:
            monkeypatch.setattr(producer._reports, "serve", look)
            flushing = pool.submit(producer.flush, PATIENCE_SECONDS)
            eventually(lambda: producer._changed._waiters or flushing.done())
            assert not flushing.done()
        finally:
            may_return.set()
        assert flushing.result(PATIENCE_SECONDS) == 0
        polling.result(PATIENCE_SECONDS)


@on_sqlite_alone
def test_what_goes_with_a_commit_and_cannot_be_encoded_is_reported_and_can_be_aborted(make_producer, url, monkeypatch):
    """For lack of memory, for one."""
    producer = make_producer({"transactional.id": "anna", "linger.ms": NEVER_MS})
    topic = create_topic(url, "orders")
    producer.init_transactions(PATIENCE_SECONDS)
    reports = Reports()

    def refuse(*_):
        raise MemoryError

    producer.begin_transaction()
    producer.produce(topic, b"1", on_delivery=reports)
    monkeypatch.setattr(ProducerSession, "prepare", refuse)
    assert error_of(producer.commit_transaction, PATIENCE_SECONDS).txn_requires_abort()
    producer.abort_transaction(PATIENCE_SECONDS)
    assert [error.code() for error in reports.errors] == [KafkaError._PURGE_INFLIGHT]
    assert len(producer) == 0


@on_sqlite_alone
def test_a_commit_that_waits_for_a_topic_drops_what_a_purge_names_and_pauses_meanwhile(make_producer, url, monkeypatch):
    """As an enlisted one of what was tried before, while the database is away."""
    producer = make_producer({"linger.ms": NEVER_MS})
    topic = create_topic(url, "orders")
    producer.list_topics(topic, timeout=PATIENCE_SECONDS)
    reports, sender = Reports(), producer._sender
    sender.hold_until_commit(math.inf)
    tries: list[TxnStoreError] = [StoreBusy("it is away")]
    look_up, pause = UnassignedTopics.look_up, SenderThread.pause
    pauses: list[bool] = []

    def try_to_look_up(topics, retry_later):
        if tries:
            retry_later(tries.pop())
            return iter(())
        return look_up(topics, retry_later)

    def note(thread, until):
        pauses.append(until())
        pause(thread, until)

    def gather():
        lane = sender._lanes.alone
        producer.produce(topic, b"tried", partition=0, on_delivery=reports)
        with sender._lock:
            sender._topics.directory.ensure(topic)
        for batch, _ in look_up(sender._topics, tries.append):
            pytest.fail(f"{batch} is refused")
        with sender._lock:
            lane.in_flight.append(InFlight(lane, sender._accumulator.take_batches(5, 1 << 20)))
        producer.produce("unknown", b"new", on_delivery=reports)
        producer.purge(in_queue=False, blocking=False)
        return sender.take_everything()

    monkeypatch.setattr(UnassignedTopics, "look_up", try_to_look_up)
    monkeypatch.setattr(SenderThread, "pause", note)
    (request,) = sender.thread.submit(gather).result(PATIENCE_SECONDS)
    assert [batch.topic for batch in request.batches] == ["unknown"]
    assert pauses == [False]
    producer.poll(0)
    assert [error.code() for error in reports.errors] == [KafkaError._PURGE_INFLIGHT]
    sender.fail_requests([request], KafkaError(KafkaError._PURGE_QUEUE))
    assert producer.flush(PATIENCE_SECONDS) == 0


@on_sqlite_alone
def test_a_purge_that_waits_hears_an_interrupt_just_before_it_waits(make_producer, monkeypatch):
    """In pieces, as `test_waits` has it."""
    sender, waits = make_producer()._sender, []

    def wait_for(_is_there, timeout):
        waits.append(timeout)
        return len(waits) == 3

    monkeypatch.setattr(sender._changed, "wait_for", wait_for)
    sender.wait_until_dropped(3600)
    assert waits == [WAIT_SECONDS_MAX] * 3
