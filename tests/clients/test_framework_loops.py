"""The loops, threads and endings of programs around confluent-kafka's clients, as frameworks write them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from typing import Any

import pytest

from tests.clients.framework import *  # noqa: F403 - the fixtures
from tests.clients.framework import received, run
from tests.clients.steps import PATIENCE_SECONDS, create_topic
from txnstore import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from txnstore.admin import AdminClient, ConfigResource, NewTopic


class TestLoops:
    def test_a_queue_is_drained_by_its_length(self, url):
        with Producer({"bootstrap.servers": url}) as producer:
            served = 0
            for number in range(50):
                producer.produce("t", str(number), on_delivery=lambda *_: None)
                served += producer.poll(0)
            deadline = time.monotonic() + PATIENCE_SECONDS
            while len(producer) > 0 and time.monotonic() < deadline:
                served += producer.poll(0.1)
            assert (len(producer), producer.flush(0), served) == (0, 0, 50)
            assert producer, "an idle producer is true"

    def test_a_failed_delivery_is_produced_again_from_its_report(self, url):
        attempts = []
        producer = Producer({"bootstrap.servers": url})

        def on_delivery(error, message):
            assert error is None
            attempts.append(message.value())
            if len(attempts) < 3:
                producer.produce("t", message.value(), on_delivery=on_delivery)

        producer.produce("t", "again", on_delivery=on_delivery)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(attempts) < 3 and time.monotonic() < deadline:
            producer.poll(0.1)
        assert attempts == [b"again"] * 3
        producer.close()

    def test_list_topics_is_a_health_check(self, url):
        create_topic(url, "t", 3)
        with (
            Producer({"bootstrap.servers": url}) as producer,
            Consumer({"bootstrap.servers": url, "group.id": "g"}) as consumer,
        ):
            for client in (producer, consumer, AdminClient({"bootstrap.servers": url})):
                metadata = client.list_topics(timeout=PATIENCE_SECONDS)
                assert metadata.brokers[metadata.controller_id].port >= 0
                assert set(metadata.topics["t"].partitions) == {0, 1, 2}
                assert "t" in metadata.topics
                assert metadata.topics["t"].error is None
            missing = consumer.list_topics("missing", timeout=PATIENCE_SECONDS).topics["missing"]
            assert missing.error == KafkaError.UNKNOWN_TOPIC_OR_PART

    def test_topics_are_made_unless_they_are_there(self, url):
        admin = AdminClient({"bootstrap.servers": url})
        outcomes = []
        for _ in range(2):
            for future in admin.create_topics([NewTopic("t", 2, 3)]).values():
                try:
                    future.result(timeout=PATIENCE_SECONDS)
                    outcomes.append("made")
                except KafkaException as error:
                    outcomes.append(error.args[0].name())
        assert outcomes == ["made", "TOPIC_ALREADY_EXISTS"]
        (described,) = admin.describe_configs([ConfigResource("topic", "t")]).values()
        assert described.result(timeout=PATIENCE_SECONDS)["retention.ms"].value == "604800000"

    def test_a_consumer_of_a_topic_that_comes_later(self, url):
        configuration = {
            "bootstrap.servers": url,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            "topic.metadata.refresh.interval.ms": 100,
        }
        with Consumer(configuration) as consumer:
            consumer.subscribe(["later"])
            early = consumer.poll(PATIENCE_SECONDS)
            assert early is not None
            assert early.error() == KafkaError.UNKNOWN_TOPIC_OR_PART
            with Producer({"bootstrap.servers": url}) as producer:
                producer.produce("later", "here")
                producer.flush()
            assert received(consumer, 1)[0].value() == b"here"

    def test_a_consumer_reads_again_after_a_failed_handler(self, url, produced):
        """Negative acknowledgement: seek back to the message, as FastStream does."""
        configuration = {
            "bootstrap.servers": url,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
        with Consumer(configuration) as consumer:
            consumer.subscribe([produced])
            first, second = received(consumer, 2)
            consumer.seek(TopicPartition(second.topic(), second.partition(), second.offset()))
            assert received(consumer, 1)[0].offset() == second.offset()
            consumer.commit(first, asynchronous=False)
            assert consumer.committed([TopicPartition(produced, 0)])[0].offset == 1

    def test_the_position_is_set_when_partitions_come_and_committed_when_they_go(self, url, produced):
        """What Quix Streams does: incremental assignment, paused until its state is there, a commit on the way out."""
        went = []

        def on_assign(consumer, partitions):
            for partition in partitions:
                partition.offset = 3
            consumer.incremental_assign(partitions)
            consumer.pause(partitions)

        def on_revoke(consumer, partitions):
            went.extend(partitions)
            consumer.commit(offsets=[TopicPartition(produced, 0, 7)], asynchronous=False)

        configuration = {
            "bootstrap.servers": url,
            "group.id": "g",
            "enable.auto.commit": False,
            "partition.assignment.strategy": "cooperative-sticky",
        }
        consumer = Consumer(configuration)
        consumer.subscribe([produced], on_assign=on_assign, on_revoke=on_revoke, on_lost=on_revoke)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not consumer.assignment() and time.monotonic() < deadline:
            assert consumer.poll(0.1) is None
        assert consumer.poll(0) is None, "it is paused"
        consumer.resume(consumer.assignment())
        assert received(consumer, 1)[0].offset() == 3
        consumer.close()
        assert went == [TopicPartition(produced, 0)]
        with Consumer(configuration) as successor:
            assert successor.committed([TopicPartition(produced, 0)])[0].offset == 7


class TestThreads:
    def test_callbacks_run_on_the_thread_that_polls(self, url, produced):
        threads: dict[str, set[int]] = {}

        def note(name):
            return lambda *_: threads.setdefault(name, set()).add(threading.get_ident())

        with Producer({"bootstrap.servers": url, "on_delivery": note("report")}) as producer:
            producer.produce("t", "v")
            assert producer.flush(PATIENCE_SECONDS) == 0
        consumer = Consumer(
            {
                "bootstrap.servers": url,
                "group.id": "g",
                "auto.offset.reset": "earliest",
                "on_commit": note("commit"),
            }
        )
        consumer.subscribe([produced], on_assign=note("assign"), on_revoke=note("revoke"))
        consumer.commit(received(consumer, 1)[0])
        deadline = time.monotonic() + PATIENCE_SECONDS
        while "commit" not in threads and time.monotonic() < deadline:
            consumer.poll(0.1)
        consumer.close()
        here = {threading.get_ident()}
        assert threads == {"report": here, "assign": here, "commit": here, "revoke": here}

    def test_a_thread_polls_for_reports_that_an_event_loop_awaits(self, url):
        """The pattern of web services: produce() on the loop, poll() on a thread, a future for each message."""

        async def service():
            loop = asyncio.get_running_loop()
            producer = Producer({"bootstrap.servers": url})
            stopped = threading.Event()

            def poll():
                while not stopped.is_set():
                    producer.poll(0.05)

            thread = threading.Thread(target=poll)
            thread.start()

            def send(value):
                delivered = loop.create_future()

                def on_delivery(error, message):
                    assert error is None
                    loop.call_soon_threadsafe(delivered.set_result, message.offset())

                producer.produce("t", value, partition=0, on_delivery=on_delivery)
                return delivered

            try:
                return await asyncio.gather(*[send(str(number)) for number in range(20)])
            finally:
                stopped.set()
                thread.join()
                producer.close()

        assert asyncio.run(asyncio.wait_for(service(), PATIENCE_SECONDS)) == list(range(20))

    def test_a_client_is_used_from_the_threads_of_a_pool(self, url, produced):
        """Frameworks on asyncio call each method in an executor, whichever thread is free."""
        configuration = {"bootstrap.servers": url, "group.id": "g", "auto.offset.reset": "earliest"}

        async def service():
            loop = asyncio.get_running_loop()
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                consumer = await loop.run_in_executor(pool, Consumer, configuration)
                await loop.run_in_executor(pool, consumer.subscribe, [produced])
                values: list[bytes | None] = []
                while len(values) < 10:
                    message = await loop.run_in_executor(pool, consumer.poll, 0.2)
                    if message is not None:
                        values.append(message.value())
                        await loop.run_in_executor(pool, lambda one=message: consumer.commit(one, asynchronous=False))
                await loop.run_in_executor(pool, consumer.close)
                return values

        values = asyncio.run(asyncio.wait_for(service(), PATIENCE_SECONDS))
        assert values == [str(number).encode() for number in range(10)]

    def test_a_thread_polls_while_another_runs_transactions(self, url):
        """A record store that waits for each report, which its poll thread serves, and then commits."""
        producer = Producer({"bootstrap.servers": url, "transactional.id": "store"})
        producer.init_transactions(PATIENCE_SECONDS)
        stopped = threading.Event()

        def poll():
            while not stopped.is_set():
                producer.poll(0.005)

        thread = threading.Thread(target=poll)
        thread.start()
        try:
            for number in range(6):
                producer.begin_transaction()
                stored: concurrent.futures.Future[Message] = concurrent.futures.Future()
                producer.produce("t", str(number), on_delivery=lambda _, message, one=stored: one.set_result(message))
                assert stored.result(PATIENCE_SECONDS).error() is None
                if number % 2:
                    producer.abort_transaction(PATIENCE_SECONDS)
                else:
                    producer.commit_transaction(PATIENCE_SECONDS)
        finally:
            stopped.set()
            thread.join()
            producer.close()
        with Consumer({"bootstrap.servers": url, "group.id": "g", "auto.offset.reset": "earliest"}) as consumer:
            consumer.subscribe(["t"])
            assert [message.value() for message in received(consumer, 3)] == [b"0", b"2", b"4"]

    def test_many_threads_share_a_producer(self, url):
        offsets = []
        with Producer({"bootstrap.servers": url}) as producer:

            def work(_):
                for _ in range(50):
                    producer.produce("t", "v", partition=0, on_delivery=lambda _, one: offsets.append(one.offset()))
                    producer.poll(0)

            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                list(pool.map(work, range(4)))
            assert producer.flush(PATIENCE_SECONDS) == 0
        assert sorted(offsets) == list(range(200))

    def test_an_error_of_a_callback_comes_out_where_it_was_served(self, url, produced):
        def fail(*_):
            raise ZeroDivisionError("of the program")

        with Producer({"bootstrap.servers": url}) as producer:
            producer.produce("t", "v", on_delivery=fail)
            with pytest.raises(ZeroDivisionError):
                producer.flush(PATIENCE_SECONDS)
            assert producer.flush(PATIENCE_SECONDS) == 0
        with Consumer({"bootstrap.servers": url, "group.id": "g"}) as consumer:
            consumer.subscribe([produced], on_assign=fail)
            with pytest.raises(ZeroDivisionError):
                consumer.poll(PATIENCE_SECONDS)


class TestEndings:
    @pytest.mark.slow
    def test_a_program_that_closes_nothing_ends_all_the_same(self, url, produced):
        program = """
            import sys
            from txnstore import Consumer, Producer
            from txnstore.admin import AdminClient
            url, topic = sys.argv[1:]
            producer = Producer({"bootstrap.servers": url})
            producer.produce(topic, "more")
            producer.flush()
            consumer = Consumer({"bootstrap.servers": url, "group.id": "g", "auto.offset.reset": "earliest"})
            consumer.subscribe([topic])
            message = None
            while message is None:
                message = consumer.poll(1)
            AdminClient({"bootstrap.servers": url}).list_topics(timeout=10)
            print(message.value())
        """
        assert run(program, url, produced) == "b'0'"

    def test_what_was_closed_is_closed_once_more(self, url):
        producer: Any = Producer({"bootstrap.servers": url})
        consumer: Any = Consumer({"bootstrap.servers": url, "group.id": "g"})
        for _ in range(2):
            assert producer.close() is True
            assert consumer.close() is None
        for call in (producer.poll, producer.flush, lambda: producer.produce("t")):
            with pytest.raises(RuntimeError, match="Producer has been closed"):
                call()
        for call in (consumer.poll, consumer.consume, consumer.commit, lambda: consumer.subscribe(["t"])):
            with pytest.raises(RuntimeError, match="Consumer closed"):
                call()


def test_a_subclass_that_does_not_initialise_its_base_has_a_client_that_is_closed():
    class ProxiedProducer(Producer):
        def __init__(self):
            """Delegate to another producer."""

    class ProxiedConsumer(Consumer):
        def __init__(self):
            """Delegate to another consumer."""

    assert len(ProxiedProducer()) == 0
    with pytest.raises(RuntimeError, match="Producer has been closed"):
        ProxiedProducer().produce("payments")
    with pytest.raises(RuntimeError, match="Consumer closed"):
        ProxiedConsumer().poll(0)
