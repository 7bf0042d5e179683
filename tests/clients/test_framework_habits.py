"""What frameworks and test suites do with confluent-kafka's classes: import, extend, build, patch, configure them."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any
from unittest import mock

import pytest

from tests.clients.framework import *  # noqa: F403 - the fixtures
from tests.clients.framework import received, run
from tests.clients.steps import PATIENCE_SECONDS
from txnstore import (
    TIMESTAMP_CREATE_TIME,
    Consumer,
    DeserializingConsumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    SerializingProducer,
    TopicPartition,
)
from txnstore.admin import AdminClient, NewTopic
from txnstore.error import ConsumeError, KeySerializationError, ProduceError, ValueDeserializationError
from txnstore.serialization import SerializationError


class TestImports:
    @pytest.mark.parametrize(
        ("module", "names"),
        [
            ("cimpl", "Consumer Producer Message TopicPartition KafkaError KafkaException NewTopic NewPartitions Uuid"),
            ("admin", "AdminClient NewTopic NewPartitions ConfigResource KafkaError KafkaException RESOURCE_TOPIC"),
            ("admin", "ClusterMetadata TopicMetadata PartitionMetadata BrokerMetadata GroupMetadata"),
            ("error", "ConsumeError ProduceError KafkaError KafkaException SerializationError"),
            ("serialization", "SerializationContext MessageField StringSerializer SerializationError"),
            ("serializing_producer", "SerializingProducer"),
            ("deserializing_consumer", "DeserializingConsumer"),
            ("_model", "TopicCollection ConsumerGroupTopicPartitions ConsumerGroupState Node IsolationLevel"),
        ],
    )
    def test_names_are_found_where_programs_look_for_them(self, module, names):
        found = importlib.import_module(f"txnstore.{module}")
        for name in names.split():
            assert hasattr(found, name), name

    def test_a_class_is_the_same_under_each_of_its_names(self):
        cimpl = importlib.import_module("txnstore.cimpl")
        error = importlib.import_module("txnstore.error")
        admin = importlib.import_module("txnstore.admin")
        assert cimpl.KafkaException is error.KafkaException is admin.KafkaException is KafkaException
        assert cimpl.Message is Message
        assert cimpl.NewTopic is admin.NewTopic is NewTopic

    @pytest.mark.slow
    def test_submodules_are_attributes_after_a_plain_import(self):
        """`import confluent_kafka` and then `confluent_kafka.cimpl.KafkaException` needs no further import."""
        program = """
            import txnstore as confluent_kafka
            names = ["admin.NewTopic", "aio.AIOProducer", "cimpl.KafkaException", "error.ProduceError",
                     "serialization.StringSerializer", "serializing_producer.SerializingProducer",
                     "deserializing_consumer.DeserializingConsumer"]
            for name in names:
                module, attribute = name.split(".")
                getattr(getattr(confluent_kafka, module), attribute)
            print("found")
        """
        assert run(program) == "found"

    @pytest.mark.slow
    def test_a_framework_that_imports_confluent_kafka_gets_ours(self):
        """The alias that lets an installed framework run unchanged."""
        program = """
            import importlib, sys
            import txnstore
            sys.modules["confluent_kafka"] = txnstore
            for name in ("admin", "aio", "cimpl", "error", "serialization"):
                sys.modules["confluent_kafka." + name] = importlib.import_module("txnstore." + name)

            import confluent_kafka
            import confluent_kafka.admin
            from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, cimpl
            from confluent_kafka.admin import AdminClient
            from confluent_kafka.serialization import StringSerializer
            assert confluent_kafka.admin.AdminClient is AdminClient
            assert cimpl.Consumer is Consumer is txnstore.Consumer
            print(Consumer.__module__.split(".")[0])
        """
        assert run(program) == "txnstore"


class TestSubclasses:
    def test_a_producer_with_a_constructor_and_defaults_of_its_own(self, url):
        class TopicProducer(Producer):
            def __init__(self, configuration, topic):
                super().__init__(configuration)
                self.topic = topic
                self.reports = []

            def produce(self, value, **named):  # type: ignore[override]  # as such subclasses do
                super().produce(self.topic, value, on_delivery=self.on_report, **named)

            def on_report(self, error, message):
                self.reports.append((error, message.offset()))

        with TopicProducer({"bootstrap.servers": url}, "mine") as producer:
            assert isinstance(producer, TopicProducer)
            producer.produce("a")
            producer.produce(value="b", key="k")
            assert producer.flush(PATIENCE_SECONDS) == 0
            assert producer.reports == [(None, 0), (None, 1)]

    def test_a_consumer_that_changes_what_poll_returns(self, url, produced):
        class Values(Consumer):
            def poll(self, timeout=-1):
                message = super().poll(timeout)
                return None if message is None else message.value()

        with Values({"bootstrap.servers": url, "group.id": "g", "auto.offset.reset": "earliest"}) as consumer:
            consumer.subscribe([produced])
            assert consumer.poll(PATIENCE_SECONDS) == b"0"

    def test_constructor_arguments_as_tracing_wrappers_pass_them_on(self, url):
        """OpenTelemetry's subclass takes anything and hands it up as it came."""

        class Traced(Producer):
            def __init__(self, config, *args, **kwargs):
                super().__init__(config, *args, **kwargs)

            def produce(self, topic, value=None, *args, **kwargs):
                super().produce(topic, value, *args, **kwargs)

        with Traced({"bootstrap.servers": url}, **{"client.id": "traced"}) as producer:
            outcomes = []
            producer.produce("t", b"value", b"key", 0, None, lambda *report: outcomes.append(report))
            producer.produce("t", value="value", key="key", headers=[("traceparent", b"00")])
            assert producer.flush(PATIENCE_SECONDS) == 0
            assert [error for error, _ in outcomes] == [None]

    def test_a_wrapper_that_delegates(self, url, produced):
        class Wrapper:
            def __init__(self, inner):
                self._inner = inner

            def __getattr__(self, name):
                return getattr(self._inner, name)

        consumer = Wrapper(Consumer({"bootstrap.servers": url, "group.id": "g", "auto.offset.reset": "earliest"}))
        consumer.subscribe([produced])
        assert received(consumer, 10)[-1].value() == b"9"
        consumer.close()

    def test_exceptions_of_ones_own(self):
        class LostError(KafkaException):
            pass

        with pytest.raises(KafkaException) as caught:
            raise LostError(KafkaError(KafkaError._ALL_BROKERS_DOWN))
        assert caught.value.args[0].code() == KafkaError._ALL_BROKERS_DOWN


class TestObjects:
    def test_a_message_is_built_for_a_test(self):
        message = Message(
            topic="t",
            partition=3,
            offset=42,
            key=b"key",
            value=b"value",
            headers=[("h", b"1")],
            error=None,
            timestamp=(TIMESTAMP_CREATE_TIME, 1_700_000_000_000),
            latency=0.5,
            leader_epoch=7,
        )
        assert (message.topic(), message.partition(), message.offset()) == ("t", 3, 42)
        assert (message.key(), message.value(), message.headers()) == (b"key", b"value", [("h", b"1")])
        assert (message.timestamp(), message.latency()) == ((TIMESTAMP_CREATE_TIME, 1_700_000_000_000), 0.5)
        assert (message.error(), message.leader_epoch()) == (None, 7)
        for twin in (copy.copy(message), copy.deepcopy(message), pickle.loads(pickle.dumps(message))):
            assert twin == message

    def test_a_message_in_the_place_of_a_partition(self):
        """Frameworks fill in what they decoded."""
        message: Any = Message(topic="t", value=b"1")
        message.set_value({"decoded": 1})
        message.set_key("key")
        message.set_headers([("h", b"2")])
        assert (message.value(), message.key(), message.headers()) == ({"decoded": 1}, "key", [("h", b"2")])

    def test_a_message_with_an_error_is_built_for_a_test(self):
        message: Any = Message(topic="t", partition=0, error=KafkaError(KafkaError._PARTITION_EOF))
        assert message.error()
        assert message.error().code() == KafkaError._PARTITION_EOF
        assert message.error() == KafkaError._PARTITION_EOF

    def test_an_error_is_built_in_every_way(self):
        for error in (KafkaError(-196, "why"), KafkaError(error=KafkaError._FAIL, reason="why")):
            assert (error.code(), error.name(), error.str()) == (KafkaError._FAIL, "_FAIL", "why")
            assert (error.fatal(), error.retriable(), error.txn_requires_abort()) == (False, False, False)
        full = KafkaError(KafkaError._FENCED, "who", fatal=True, retriable=True, txn_requires_abort=True)
        assert (full.fatal(), full.retriable(), full.txn_requires_abort()) == (True, True, True)
        assert str(KafkaException(full)) == str(full)

    def test_errors_are_looked_up_in_sets_and_dictionaries(self):
        error: Any = KafkaError(KafkaError._TIMED_OUT)
        assert error.code() in {KafkaError._TIMED_OUT, KafkaError._TRANSPORT}
        assert error in (KafkaError._TIMED_OUT, KafkaError._TRANSPORT)
        assert {KafkaError._TIMED_OUT: "wait"}[error.code()] == "wait"
        assert {KafkaError._TIMED_OUT: "wait"}[error] == "wait"

    def test_partitions_are_keys_and_are_sorted(self):
        partitions = [TopicPartition("b", 0), TopicPartition("a", 1, 5), TopicPartition("a", 0)]
        assert [(one.topic, one.partition) for one in sorted(partitions)] == [("a", 0), ("a", 1), ("b", 0)]
        assert {TopicPartition("a", 1): "owned"}[TopicPartition("a", 1, 99)] == "owned"
        assert TopicPartition("a", 1) in partitions
        kept = partitions[1]
        kept.offset = 7
        assert (kept.offset, pickle.loads(pickle.dumps(kept)).offset) == (7, 7)

    @pytest.mark.parametrize("cls", [Producer, Consumer, Message, AdminClient, TopicPartition])
    def test_classes_have_specs_for_mocks(self, cls):
        double = mock.create_autospec(cls, instance=True)
        with pytest.raises(AttributeError):
            double.no_such_method()
        for name in ("poll", "value", "list_topics"):
            assert hasattr(double, name) == hasattr(cls, name)

    def test_clients_are_patched_with_mocks(self):
        with mock.patch("txnstore.Consumer", autospec=True) as patched:
            patched.return_value.poll.return_value = Message(topic="t", value=b"v")
            consumer = importlib.import_module("txnstore").Consumer({"group.id": "g"})
            assert consumer.poll(1.0).value() == b"v"


class TestConfiguration:
    def test_the_configuration_of_a_cloud_cluster_is_taken_whole(self, url):
        """Deployed programs carry settings for brokers; those without a meaning here do no harm."""
        common = {
            "bootstrap.servers": url,
            "client.id": "service-1",
            "security.protocol": "SASL_SSL",
            "sasl.mechanisms": "PLAIN",
            "sasl.username": "user",
            "sasl.password": "secret",
            "ssl.ca.location": "/etc/ssl/certs/ca-certificates.crt",
            "ssl.endpoint.identification.algorithm": "https",
            "socket.keepalive.enable": True,
            "socket.timeout.ms": "60000",
            "api.version.request": "true",
            "broker.address.family": "v4",
            "metadata.max.age.ms": 180000,
            "topic.metadata.refresh.interval.ms": 10000,
            "reconnect.backoff.max.ms": 10000,
            "statistics.interval.ms": 0,
            "log_level": 3,
            "debug": "",
        }
        before = dict(common)
        with Producer(
            common
            | {
                "acks": "all",
                "enable.idempotence": "true",
                "compression.type": "none",
                "linger.ms": 5.0,
                "batch.num.messages": 1000,
                "queue.buffering.max.messages": 1000,
                "queue.buffering.max.kbytes": 1024,
                "message.max.bytes": 1_000_000,
                "message.timeout.ms": 30000,
                "retries": 10,
                "retry.backoff.ms": 100,
                "max.in.flight.requests.per.connection": 5,
                "partitioner": "murmur2_random",
                "delivery.report.only.error": False,
            }
        ) as producer:
            producer.produce("t", "v", "k")
            assert producer.flush(PATIENCE_SECONDS) == 0
        with Consumer(
            common
            | {
                "group.id": "g",
                "group.instance.id": "g-1",
                "auto.offset.reset": "smallest",
                "enable.auto.commit": "false",
                "auto.commit.interval.ms": 1000,
                "enable.auto.offset.store": False,
                "session.timeout.ms": 10000,
                "heartbeat.interval.ms": 1000,
                "max.poll.interval.ms": 300000,
                "partition.assignment.strategy": "cooperative-sticky",
                "fetch.min.bytes": 1,
                "fetch.wait.max.ms": 100,
                "max.partition.fetch.bytes": 1048576,
                "queued.max.messages.kbytes": 1024,
                "isolation.level": "read_committed",
                "check.crcs": True,
                "allow.auto.create.topics": True,
            }
        ) as consumer:
            consumer.subscribe(["t"])
            assert received(consumer, 1)[0].value() == b"v"
        assert AdminClient(common).list_topics(timeout=PATIENCE_SECONDS).topics.keys() == {"t"}
        assert common == before

    def test_a_client_without_any_configuration_is_refused(self):
        for make in (Producer, Consumer):
            with pytest.raises(TypeError, match=r"^expected configuration dict$"):
                make()

    def test_a_key_of_the_other_client_gives_no_odd_advice(self, url):
        for make, key in ((Producer, "on_commit"), (Consumer, "on_delivery")):
            with pytest.raises(KafkaException) as caught:
                make({"bootstrap.servers": url, "group.id": "g", key: print})
            assert caught.value.args[0].str() == f'No such configuration property: "{key}"'

    def test_a_logger_like_object_takes_part(self, url):
        """Structured loggers are not subclasses of logging.Logger."""
        logger = mock.Mock(spec=["log", "debug", "info", "warning", "error", "isEnabledFor"])
        with Producer({"bootstrap.servers": url}, logger=logger) as producer:
            assert producer.poll(0) == 0


REFUSED_BY_A_PRODUCER = {
    "no topic": (TypeError, lambda producer: producer.produce(None)),
    "a number": (TypeError, lambda producer: producer.produce("t", 5)),
    "a dictionary": (TypeError, lambda producer: producer.produce("t", {"not": "bytes"})),
    "a header that is a number": (TypeError, lambda producer: producer.produce("t", "v", headers={"number": 1})),
    "a header without value": (TypeError, lambda producer: producer.produce("t", "v", headers=["malformed"])),
    "an unknown argument": (TypeError, lambda producer: producer.produce("t", "v", no_such_argument=1)),
    "a batch that is not a list": (TypeError, lambda producer: producer.produce_batch("t", "not a list")),
    "too large": (KafkaException, lambda producer: producer.produce("t", b"x" * 2_000_000)),
    "not transactional": (KafkaException, lambda producer: producer.begin_transaction()),
}
REFUSED_BY_A_CONSUMER = {
    "subscribing to text": (TypeError, lambda consumer: consumer.subscribe("t")),
    "assigning text": (TypeError, lambda consumer: consumer.assign(["t"])),
    "seeking text": (TypeError, lambda consumer: consumer.seek("t")),
    "fewer than none": (ValueError, lambda consumer: consumer.consume(-1)),
    "more than a million": (ValueError, lambda consumer: consumer.consume(1_000_001)),
    "message and offsets": (ValueError, lambda consumer: consumer.commit(message=Message(topic="t"), offsets=[])),
    "storing nothing": (ValueError, lambda consumer: consumer.store_offsets()),
    "subscribing to nothing": (KafkaException, lambda consumer: consumer.subscribe([])),
    "seeking what is not assigned": (KafkaException, lambda consumer: consumer.seek(TopicPartition("t", 0, 0))),
    "committing nothing": (KafkaException, lambda consumer: consumer.commit(asynchronous=False)),
}


class TestExceptionTypes:
    @pytest.mark.slow_but_first
    @pytest.mark.parametrize(("error", "call"), REFUSED_BY_A_PRODUCER.values(), ids=REFUSED_BY_A_PRODUCER)
    def test_of_a_producer(self, url, error, call):
        with Producer({"bootstrap.servers": url}) as producer, pytest.raises(error) as caught:
            call(producer)
        assert type(caught.value) is error
        assert len(producer) == 0

    @pytest.mark.slow_but_first
    @pytest.mark.parametrize(("error", "call"), REFUSED_BY_A_CONSUMER.values(), ids=REFUSED_BY_A_CONSUMER)
    def test_of_a_consumer(self, url, error, call):
        with Consumer({"bootstrap.servers": url, "group.id": "g"}) as consumer, pytest.raises(error) as caught:
            call(consumer)
        assert type(caught.value) is error

    def test_of_a_full_queue(self, url):
        with Producer({"bootstrap.servers": url, "queue.buffering.max.messages": 1, "linger.ms": 60_000}) as producer:
            producer.produce("t", "fits")
            with pytest.raises(BufferError, match="Local: Queue full"):
                producer.produce("t", "does not")

    def test_of_serializers(self, url):
        def fail(*_):
            raise ValueError("no")

        with SerializingProducer({"bootstrap.servers": url, "key.serializer": fail}) as producer:
            with pytest.raises(KeySerializationError) as caught:
                producer.produce("t", key="k")
            assert isinstance(caught.value, ProduceError)
            assert isinstance(caught.value, KafkaException)
            assert caught.value.code == KafkaError._KEY_SERIALIZATION
        with Producer({"bootstrap.servers": url}) as plain:
            plain.produce("t", "v", partition=0)
            plain.flush()
        settings = {"bootstrap.servers": url, "group.id": "g", "auto.offset.reset": "earliest"}
        with DeserializingConsumer(settings | {"value.deserializer": fail}) as consumer:
            consumer.subscribe(["t"])
            with pytest.raises(ValueDeserializationError) as refused:
                consumer.poll(PATIENCE_SECONDS)
            assert isinstance(refused.value, ConsumeError)
            message = refused.value.kafka_message
            assert message is not None
            assert message.value() == b"v"
        assert issubclass(SerializationError, KafkaException)
