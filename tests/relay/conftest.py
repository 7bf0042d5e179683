"""What the tests of the relay share: a real Kafka where there is one, and a store that stands in for it."""

from __future__ import annotations

import os

import pytest

from tests.relay.kafka_side import KafkaSide
from tests.relay.stand_in import StandIn
from tests.relay.store_side import partition_id_of
from txnstore.db.opening import open_store
from txnstore.log import deleting, topics


@pytest.fixture
def store(url):
    """A fresh store, on each database, by the time of day: Kafka goes by it, too."""
    with open_store(url, pool_size=10) as store:
        yield store


@pytest.fixture(scope="session")
def kafka_broker():
    """The broker of this process; None if the tests were given the address of another one."""
    if os.environ.get("TXNSTORE_TEST_KAFKA_BOOTSTRAP"):
        yield None
        return
    from tests.tools.kafka_broker import KafkaBroker
    from tests.tools.kafka_jars import NoKafkaError

    try:
        broker = KafkaBroker()
    except NoKafkaError as error:
        pytest.skip(f"no Kafka broker: {' '.join(str(error).split())}")
    yield broker
    broker.close()


@pytest.fixture(scope="session")
def bootstrap(request):
    """The address of a real Kafka: TXNSTORE_TEST_KAFKA_BOOTSTRAP, or a broker from its Maven jars."""
    pytest.importorskip("confluent_kafka", reason="needs confluent-kafka: pip install 'txnstore[kafka]'")
    broker = request.getfixturevalue("kafka_broker")
    return os.environ["TXNSTORE_TEST_KAFKA_BOOTSTRAP"] if broker is None else broker.bootstrap


@pytest.fixture
def kafka(bootstrap):
    """The Kafka side of a test."""
    side = KafkaSide(bootstrap)
    yield side
    side.close()


@pytest.fixture
def stand_in(tmp_path, make_sqlite_store):
    """A store with confluent-kafka's names in place of a Kafka cluster."""
    url = make_sqlite_store(tmp_path / "kafka.db")
    with open_store(url):
        yield StandIn(url)


@pytest.fixture
def delete_records():
    """Delete a partition's first records from a store."""

    def delete(store, topic, before):
        deleting.delete_records(store, partition_id_of(store, topic, 0), before)

    return delete


@pytest.fixture
def delete_topic():
    """Delete a topic from a store."""
    return lambda store, topic: store.write(lambda connection: topics.delete_topic(connection, topic))
