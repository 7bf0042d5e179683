"""Clients and processes: one made before a fork refuses every call in the child, and the parent's goes on as before."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import inspect
import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import Counter

import pytest

from tests.clients.steps import NO_MEMBER, PATIENCE_SECONDS, create_topic, read_to_end, values
from txnstore import Consumer, KafkaError, KafkaException, Producer, SerializingProducer, TopicPartition
from txnstore.admin import AdminClient
from txnstore.aio import AIOConsumer, AIOProducer
from txnstore.outbox import Outbox

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
    # In a child it would copy all of it.
    pytest.mark.usefixtures("collects_little"),
]

#: What is named in a child, where nothing comes of it.
TOPIC = "elsewhere"
HERE = [TopicPartition(TOPIC, 0, 0)]

_numbers = itertools.count(1)

PRODUCER_CALLS = {
    "produce": lambda producer: producer.produce(TOPIC, b"stolen"),
    "produce_batch": lambda producer: producer.produce_batch(TOPIC, [{"value": b"stolen"}]),
    "poll": lambda producer: producer.poll(-1),
    "flush": lambda producer: producer.flush(),
    "purge": lambda producer: producer.purge(),
    "list_topics": lambda producer: producer.list_topics(),
    "cluster_id": lambda producer: producer.cluster_id(),
    "set_sasl_credentials": lambda producer: producer.set_sasl_credentials("u", "p"),
    "init_transactions": lambda producer: producer.init_transactions(),
    "begin_transaction": lambda producer: producer.begin_transaction(),
    "send_offsets_to_transaction": lambda producer: producer.send_offsets_to_transaction(HERE, NO_MEMBER),
    "commit_transaction": lambda producer: producer.commit_transaction(),
    "commit_transaction_async": lambda producer: producer.commit_transaction_async(),
    "abort_transaction": lambda producer: producer.abort_transaction(),
    "enlist": lambda producer: producer.enlist(object()),
    "transaction": lambda producer: producer.transaction().__enter__(),
    "transaction_token": lambda producer: producer.transaction_token(),
    "prepare_transaction": lambda producer: producer.prepare_transaction(),
    "complete_transaction": lambda producer: producer.complete_transaction(""),
    "report_writer": lambda producer: producer.report_writer(),
    "__enter__": lambda producer: producer.__enter__(),
}
CONSUMER_CALLS = {
    "poll": lambda consumer: consumer.poll(),
    "consume": lambda consumer: consumer.consume(5),
    "__iter__": lambda consumer: next(iter(consumer)),
    "consume_transaction": lambda consumer: consumer.consume_transaction(0),
    "subscribe": lambda consumer: consumer.subscribe([TOPIC]),
    "unsubscribe": lambda consumer: consumer.unsubscribe(),
    "memberid": lambda consumer: consumer.memberid(),
    "consumer_group_metadata": lambda consumer: consumer.consumer_group_metadata(),
    "assign": lambda consumer: consumer.assign(HERE),
    "unassign": lambda consumer: consumer.unassign(),
    "incremental_assign": lambda consumer: consumer.incremental_assign(HERE),
    "incremental_unassign": lambda consumer: consumer.incremental_unassign(HERE),
    "assignment": lambda consumer: consumer.assignment(),
    "seek": lambda consumer: consumer.seek(HERE[0]),
    "position": lambda consumer: consumer.position(HERE),
    "pause": lambda consumer: consumer.pause(HERE),
    "resume": lambda consumer: consumer.resume(HERE),
    "store_offsets": lambda consumer: consumer.store_offsets(offsets=HERE),
    "commit": lambda consumer: consumer.commit(offsets=HERE, asynchronous=False),
    "committed": lambda consumer: consumer.committed(HERE),
    "get_watermark_offsets": lambda consumer: consumer.get_watermark_offsets(HERE[0]),
    "offsets_for_times": lambda consumer: consumer.offsets_for_times(HERE),
    "list_topics": lambda consumer: consumer.list_topics(),
    "cluster_id": lambda consumer: consumer.cluster_id(),
    "set_sasl_credentials": lambda consumer: consumer.set_sasl_credentials("u", "p"),
}


@pytest.fixture(scope="module")
def url(module_url):
    """One store of each database for all these tests."""
    return module_url


@pytest.fixture
def topic(url):
    return create_topic(url, f"orders-{next(_numbers)}")


def in_fork(work):
    """Return what `work` returns in a forked child, which ends as programs do."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        # Whatever hangs here is ended by the clock.
        signal.alarm(int(PATIENCE_SECONDS))
        code = 1
        try:
            os.write(theirs, pickle.dumps(work()))
            code = 0
        except BaseException:  # noqa: BLE001 - the parent is told
            os.write(theirs, pickle.dumps(traceback.format_exc()))
        finally:
            os._exit(code)
    os.close(theirs)
    with os.fdopen(ours, "rb") as answer:
        told = answer.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, pickle.loads(told) if told else status
    return pickle.loads(told)


@contextlib.contextmanager
def held(lock):
    """Let another thread hold the lock, as one does at any moment: in a child nobody would ever release it."""
    taken, over = threading.Event(), threading.Event()

    def hold():
        with lock:
            taken.set()
            over.wait(PATIENCE_SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(PATIENCE_SECONDS)
    try:
        yield
    finally:
        over.set()
        thread.join()


def refused(client, calls):
    """Return the calls that are not refused as those of another process's client, with what came of them."""
    wrong = {}
    for name, call in calls.items():
        try:
            wrong[name] = repr(call(client))
        except KafkaException as exception:
            error = exception.args[0]
            if error.code() != KafkaError._STATE or str(os.getppid()) not in error.str():
                wrong[name] = repr(error)
    return wrong


def what_a_child_can_do(client, calls):
    wrong = refused(client, calls)
    client.close()
    client.close()
    del client
    gc.collect()
    return wrong


def test_every_public_method_is_tried():
    for kind, calls in ((Producer, PRODUCER_CALLS), (Consumer, CONSUMER_CALLS)):
        public = {name for name in vars(kind) if not name.startswith("_") and callable(getattr(kind, name))}
        for base in kind.__mro__[1:-1]:
            public |= {name for name in vars(base) if not name.startswith("_") and callable(getattr(base, name))}
        assert public - calls.keys() == {"close"}


@pytest.mark.slow
@pytest.mark.variants_on_sqlite
@pytest.mark.parametrize("is_held", [False, True], ids=["idle", "in use"])
@pytest.mark.parametrize("kind", ["plain", "transactional"])
def test_a_producer_is_refused_in_a_child_and_goes_on_in_its_parent(make_producer, topic, url, kind, is_held):
    producer = make_producer({"transactional.id": "x"} if kind == "transactional" else {})
    reports = Counter[str]()
    if kind == "transactional":
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
    count = lambda error, message: reports.update([f"{message.value()} {error}"])  # noqa: E731 - a callback
    producer.produce(topic, b"before", on_delivery=count)
    assert producer.flush(PATIENCE_SECONDS) == 0
    producer.produce(topic, b"queued", on_delivery=count)
    with held(producer._changed) if is_held else contextlib.nullcontext():
        assert in_fork(lambda: what_a_child_can_do(producer, PRODUCER_CALLS)) == {}
    producer.produce(topic, b"after", on_delivery=count)
    if kind == "transactional":
        producer.commit_transaction(PATIENCE_SECONDS)
    assert producer.flush(PATIENCE_SECONDS) == 0
    expected = [b"before", b"queued", b"after"]
    assert values(read_to_end(url, topic)) == expected
    assert reports == Counter(f"{value!r} None" for value in expected)


@pytest.mark.slow_but_first
@pytest.mark.variants_on_sqlite
@pytest.mark.parametrize("is_held", [False, True], ids=["idle", "in use"])
@pytest.mark.parametrize("how", ["assigned", "subscribed"])
def test_a_consumer_is_refused_in_a_child_and_goes_on_in_its_parent(make_consumer, make_producer, topic, how, is_held):
    producer = make_producer()
    producer.produce(topic, b"before")
    assert producer.flush(PATIENCE_SECONDS) == 0
    consumer = make_consumer()
    if how == "assigned":
        consumer.assign([TopicPartition(topic, 0, 0)])
    else:
        consumer.subscribe([topic])
    assert consumer.poll(PATIENCE_SECONDS).value() == b"before"
    with held(consumer._core.arrived) if is_held else contextlib.nullcontext():
        assert in_fork(lambda: what_a_child_can_do(consumer, CONSUMER_CALLS)) == {}
    producer.produce(topic, b"after")
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert consumer.poll(PATIENCE_SECONDS).value() == b"after"
    assert consumer.commit(asynchronous=False)[0].offset == 2
    # Still the member that it was: the child has not left the group for it.
    assert (consumer.memberid() is not None) == (how == "subscribed")


def use_own_clients(url, topic, name):
    """Produce, in a transaction and without, and read: all with clients of this process."""
    with Producer({"bootstrap.servers": url, "linger.ms": 0}) as plain:
        plain.produce(topic, name + b" plain")
        assert plain.flush(PATIENCE_SECONDS) == 0
    with Producer({"bootstrap.servers": url, "transactional.id": name.decode()}) as transactional:
        transactional.init_transactions(PATIENCE_SECONDS)
        with transactional.transaction():
            transactional.produce(topic, name + b" in a transaction")
    return [value for value in values(read_to_end(url, topic)) if value is not None and value.startswith(name)]


def expected_of(name):
    return [name + b" plain", name + b" in a transaction"]


@pytest.mark.slow
def test_clients_made_in_a_forked_child_work_beside_those_of_the_parent(make_producer, topic, url):
    mine = make_producer({"linger.ms": 0})
    mine.produce(topic, b"parent")
    assert mine.flush(PATIENCE_SECONDS) == 0
    assert in_fork(lambda: use_own_clients(url, topic, b"child")) == expected_of(b"child")
    assert in_fork(lambda: in_fork(lambda: use_own_clients(url, topic, b"grandchild"))) == expected_of(b"grandchild")
    mine.produce(topic, b"parent again")
    assert mine.flush(PATIENCE_SECONDS) == 0
    in_log = values(read_to_end(url, topic))
    assert in_log == [b"parent", *expected_of(b"child"), *expected_of(b"grandchild"), b"parent again"]


def _work(pipe, url, topic, name):
    pipe.send(use_own_clients(url, topic, name))
    pipe.close()


@pytest.mark.slow
@pytest.mark.variants_on_sqlite
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_of_multiprocessing_work_at_the_same_time(make_producer, topic, url, method):
    context = multiprocessing.get_context(method)
    mine = make_producer()
    mine.produce(topic, b"parent")
    assert mine.flush(PATIENCE_SECONDS) == 0
    started = []
    for name in (b"one", b"two"):
        ours, theirs = context.Pipe()
        # A topic for each: an open transaction of one would hold back the other's reader.
        process = context.Process(target=_work, args=(theirs, url, f"{topic}-{name.decode()}", name), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours, name))
    try:
        for process, ours, name in started:
            assert ours.poll(PATIENCE_SECONDS)
            assert ours.recv() == expected_of(name)
            process.join(PATIENCE_SECONDS)
            assert process.exitcode == 0
    finally:
        for process, ours, _ in started:
            process.kill()
            process.join()
            ours.close()
    mine.produce(topic, b"parent again")
    assert mine.flush(PATIENCE_SECONDS) == 0
    assert values(read_to_end(url, topic)) == [b"parent", b"parent again"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "kind", [Producer, SerializingProducer, Consumer, AdminClient, AIOProducer, AIOConsumer, Outbox]
)
@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_client_is_neither_sent_to_another_process_nor_copied(url, kind, way):
    async def on_a_loop():
        settings = {"bootstrap.servers": url, "error_cb": lambda error: None, "logger": logging.getLogger("own")}
        client = kind({**settings, "group.id": "readers"} if "Consumer" in kind.__name__ else settings)
        with pytest.raises(
            TypeError, match=f"cannot pickle or copy '{kind.__name__}' object: make a client of its own"
        ):
            way(client)
        if hasattr(client, "close"):
            closing = client.close()
            if inspect.isawaitable(closing):
                await closing

    asyncio.run(on_a_loop())


@pytest.mark.slow
def test_a_child_that_ends_as_programs_do_leaves_the_parents_sessions_alone(url, make_producer, make_consumer, topic):
    """Its finalizers run: none of them may end what is the parent's."""
    producer, consumer = make_producer({"linger.ms": 0}), make_consumer()
    consumer.assign([TopicPartition(topic, 0, 0)])
    producer.produce(topic, b"before")
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert consumer.poll(PATIENCE_SECONDS).value() == b"before"
    admin = AdminClient({"bootstrap.servers": url})
    others = AdminClient({"bootstrap.servers": url}), Outbox(url)
    assert admin.list_topics(topic, PATIENCE_SECONDS).topics[topic].error is None
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE_SECONDS))
        code = 1
        try:
            import weakref

            # What the interpreter does at its end, without pytest's own doings.
            for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
                _, function, arguments, _ = finalizer.peek()
                called = [getattr(each, "__module__", None) or "" for each in (function, *arguments)]
                if finalizer.atexit and any(module.startswith("txnstore.") for module in called):
                    finalizer()
            sys.stdout.flush()
            code = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    producer.produce(topic, b"after")
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert consumer.poll(PATIENCE_SECONDS).value() == b"after"
    assert admin.list_topics(topic, PATIENCE_SECONDS).topics[topic].error is None
    del others
