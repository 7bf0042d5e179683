"""The metrics of clients: exact after what they did, and the clients' classes are their own again afterwards."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from sqlalchemy import update

from tests.observability.conftest import scraped
from txnstore import Consumer, KafkaError, KafkaException, Producer
from txnstore.clients.membership.member import ConsumerMember
from txnstore.clients.producer.progress import TransactionProgress
from txnstore.clients.producer.queue import DeliveryReports
from txnstore.db.opening import open_store
from txnstore.db.schema import transactions
from txnstore.observability.client_metrics import BUCKETS_SECONDS, ClientCollector
from txnstore.observability.wrapping import Onlooker
from txnstore.transactions.recovery import abort_by_administrator

PATIENCE_SECONDS = 60


@pytest.fixture
def told():
    """Return what is told of the clients, but for what is 0."""
    collector = ClientCollector(names_max=2)
    registry = CollectorRegistry()
    registry.register(collector)

    def told(name):
        return {labels: value for labels, value in scraped(registry).get(name, {}).items() if value}

    yield told
    collector.close()


@pytest.fixture
def make(url):
    """Make a client on the test's store; it is closed after the test."""
    with contextlib.ExitStack() as opened:

        def make(kind, **keys):
            own = {"group.id": "readers", "auto.offset.reset": "earliest"} if kind is Consumer else {}
            configuration = {"bootstrap.servers": url, **own, **{k.replace("_", "."): v for k, v in keys.items()}}
            return opened.enter_context(kind(configuration))

        yield make


def test_records_are_counted_as_they_are_delivered_and_handed_out(told, make):
    producer = make(Producer, linger_ms=60_000)
    for number in range(5):
        producer.produce("orders" if number else "others", b"%d" % number)
    assert told("txnstore_client_queued_records") == {(): 5}
    assert told("txnstore_client_records_produced_total") == {}
    assert producer.flush(PATIENCE_SECONDS) == 0
    producer.produce("orders", b"given up")
    producer.purge()
    producer.poll(0)
    # In the order of the labels' names: outcome, topic.
    assert told("txnstore_client_records_produced_total") == {
        ("delivered", "orders"): 4,
        ("delivered", "others"): 1,
        ("failed", "orders"): 1,
    }
    assert told("txnstore_client_queued_records") == {}
    consumer = make(Consumer, enable_partition_eof=True)
    consumer.subscribe(["orders", "others"])
    # An end of a partition is no record.
    is_record: list[bool] = []
    while is_record.count(True) < 2:
        is_record.append(consumer.poll(PATIENCE_SECONDS).error() is None)
    while len(is_record) < 7:
        is_record += [message.error() is None for message in consumer.consume(7 - len(is_record), PATIENCE_SECONDS)]
    assert is_record.count(True) == 5
    assert told("txnstore_client_records_consumed_total") == {("readers", "orders"): 4, ("readers", "others"): 1}
    assert told("txnstore_client_open") == {("producer",): 1, ("consumer",): 1}
    consumer.close()
    assert told("txnstore_client_open") == {("producer",): 1}


def test_topics_beyond_the_limit_share_a_count(told, make):
    producer = make(Producer)
    for topic in ("a", "other", "c", "d", "other"):
        producer.produce(topic, b"x")
        assert producer.flush(PATIENCE_SECONDS) == 0
    assert told("txnstore_client_records_produced_total") == {
        ("delivered", "a"): 1,
        ("delivered", "other"): 2,
        ("delivered", "(other)"): 2,
    }


def test_commits_and_aborts(told, make):
    producer = make(Producer, transactional_id="till")
    producer.init_transactions()
    for _ in range(2):
        with producer.transaction():
            producer.produce("orders", b"a")
    producer.begin_transaction()
    producer.produce("orders", b"a")
    producer.commit_transaction_async().result(PATIENCE_SECONDS)
    with pytest.raises(ZeroDivisionError), producer.transaction():
        producer.produce("orders", 1 // 0)
    with pytest.raises(KafkaException):
        producer.commit_transaction()
    assert told("txnstore_client_commit_seconds_count") == {("committed",): 3, ("failed",): 1}
    buckets = told("txnstore_client_commit_seconds_bucket")
    # By bound and outcome; each counts what was no slower.
    assert {float(bound) for bound, _ in buckets} <= {*BUCKETS_SECONDS, float("inf")}
    assert buckets["+Inf", "committed"] == 3
    assert told("txnstore_client_commit_seconds_sum")[("committed",)] > 0
    assert told("txnstore_client_aborts_total") == {(): 1}


def test_a_commit_that_goes_on_is_counted_when_its_answer_is_taken(told, make, monkeypatch):
    producer = make(Producer, transactional_id="till")
    producer.init_transactions()
    producer.begin_transaction()
    timed_out = KafkaException(KafkaError(KafkaError._TIMED_OUT, retriable=True))
    transactions_of_producer = producer._transactions
    commit = transactions_of_producer.commit
    answers = [timed_out, None]

    def answer(*arguments):
        error = answers.pop(0)
        if error is not None:
            raise error
        commit(*arguments)

    monkeypatch.setattr(transactions_of_producer, "commit", answer)
    with pytest.raises(KafkaException):
        producer.commit_transaction(0)
    producer.commit_transaction()
    assert told("txnstore_client_commit_seconds_count") == {("committed",): 1, ("unfinished",): 1}


def _open_transaction(make, transactional_id):
    producer = make(Producer, transactional_id=transactional_id)
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce("orders", b"a")
    assert producer.flush(PATIENCE_SECONDS) == 0
    return producer


def test_fences_by_reason(told, make, url):
    overtaken, late, aborted = (_open_transaction(make, name) for name in ("overtaken", "late", "aborted"))
    make(Producer, transactional_id="overtaken").init_transactions()
    with open_store(url) as store:
        long_ago = update(transactions).where(transactions.c.transactional_id == "late")
        long_ago = long_ago.values(start_ms=1, deadline_ms=2)
        store.write(lambda connection: connection.execute(long_ago))
        assert abort_by_administrator(store, "aborted")
    assert told("txnstore_client_fences_total") == {}
    for producer in (overtaken, late, aborted):
        with pytest.raises(KafkaException):
            producer.commit_transaction()
    # Whoever hears of it again has lost nothing more.
    progress = overtaken._transactions._progress
    progress.fail(progress.error)
    assert told("txnstore_client_fences_total") == {("administrator",): 1, ("newer_producer",): 1, ("timeout",): 1}
    late.abort_transaction()
    with late.transaction():
        late.produce("orders", b"b")
    assert sum(told("txnstore_client_fences_total").values()) == 3


def test_records_of_transactions_that_come_whole_are_counted(told, make):
    producer = make(Producer)
    for _ in range(3):
        producer.produce("orders", b"a")
    assert producer.flush(PATIENCE_SECONDS) == 0
    consumer = make(
        Consumer, auto_offset_reset="earliest", txnstore_delivery_order="commit", txnstore_delivery_atomic=True
    )
    consumer.subscribe(["orders"])
    for _ in range(3):
        assert consumer.consume_transaction(PATIENCE_SECONDS) is not None
    assert told("txnstore_client_records_consumed_total") == {("readers", "orders"): 3}


def test_a_consumer_whose_instance_came_anew_is_counted(told, make):
    producer = make(Producer)
    producer.produce("orders", b"a")
    assert producer.flush(PATIENCE_SECONDS) == 0
    first = make(Consumer, group_instance_id="one")
    first.subscribe(["orders"])
    assert first.poll(PATIENCE_SECONDS) is not None
    second = make(Consumer, group_instance_id="one")
    second.subscribe(["orders"])
    second.poll(1)
    for _ in range(100):
        if told("txnstore_client_fences_total"):
            break
        first.poll(0.3)
        second.poll(0.1)
    assert told("txnstore_client_fences_total") == {("newer_instance",): 1}


def test_counts_that_fail_change_nothing_that_the_application_is_told(told, make, monkeypatch):
    def fails(*_):
        raise ValueError("no such label")

    for method in (Counter, "labels"), (Counter, "inc"), (Histogram, "labels"):
        monkeypatch.setattr(*method, fails)
    producer, heard = make(Producer, transactional_id="till"), []
    producer.init_transactions()
    for value in (b"a", b"b"):
        with producer.transaction():
            producer.produce("orders", value, on_delivery=lambda error, _: heard.append(error))
    producer.begin_transaction()
    producer.produce("orders", b"c")
    producer.commit_transaction_async().result(PATIENCE_SECONDS)
    with pytest.raises(ZeroDivisionError), producer.transaction():
        producer.produce("orders", 1 // 0)
    make(Producer, transactional_id="till").init_transactions()
    with pytest.raises(KafkaException) as caught, producer.transaction():
        producer.produce("orders", b"d")
    assert caught.value.args[0].name() == "_FENCED"
    assert heard == [None, None]
    consumer = make(Consumer)
    consumer.subscribe(["orders"])
    messages = [consumer.poll(PATIENCE_SECONDS), *consumer.consume(2, PATIENCE_SECONDS)]
    assert [message.value() for message in messages] == [b"a", b"b", b"c"]
    monkeypatch.undo()
    assert told("txnstore_client_records_produced_total") == {}


def test_the_classes_are_their_own_before_and_after():
    watched = {
        Producer: ("__init__", "commit_transaction", "commit_transaction_async", "abort_transaction"),
        DeliveryReports: ("add",),
        TransactionProgress: ("fail",),
        Consumer: ("__init__", "poll", "consume", "consume_transaction"),
        ConsumerMember: ("_lose",),
    }

    def methods():
        return [vars(owner)[name] for owner, names in watched.items() for name in names]

    before = methods()
    first, second = ClientCollector(), ClientCollector()
    assert not set(before) & set(methods())
    first.close()
    assert not set(before) & set(methods())
    second.close()
    assert methods() == before


def test_an_onlooker_that_has_gone_is_not_called_though_others_came_since():
    class Client:
        def call(self, number):
            return [number]

    own, seen = vars(Client)["call"], []

    def looking(name):
        def around(original, client, number):
            seen.append(name)
            return [*original(client, number), name]

        onlooker = Onlooker()
        onlooker.look_at(Client, "call", around)
        return onlooker

    first, second = looking("first"), looking("second")
    assert Client().call(1) == [1, "first", "second"]
    first.go()
    assert Client().call(2) == [2, "second"]
    second.go()
    assert Client().call(number=3) == [3]
    assert seen == ["second", "first", "second"]
    assert vars(Client)["call"] is own


@pytest.mark.slow
def test_a_program_that_asks_for_no_metrics_imports_nothing_of_them(tmp_path):
    program = f"""
import sys
from txnstore import Consumer, Producer
with Producer({{"bootstrap.servers": "sqlite:///{tmp_path}/s.db", "transactional.id": "t"}}) as producer:
    producer.init_transactions()
    with producer.transaction():
        producer.produce("t", b"a")
Consumer({{"bootstrap.servers": "sqlite:///{tmp_path}/s.db", "group.id": "g"}}).close()
found = [name for name in sys.modules if name.startswith(("prometheus_client", "opentelemetry", "txnstore.observ"))]
assert found == [], found
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["metrics", "client_metrics"])
def test_without_the_package_the_import_names_the_extra(module):
    program = f"import sys; sys.modules['prometheus_client'] = None; import txnstore.observability.{module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: metrics need the package prometheus-client: pip install 'txnstore[metrics]'"
    )
