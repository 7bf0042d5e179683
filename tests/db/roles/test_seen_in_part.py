"""What a role that is shown some rows must not conclude from the others: that nobody has what it does not see."""

from __future__ import annotations

import itertools

import pytest

from tests.db.roles.shop import PATIENCE_SECONDS
from txnstore import KafkaError, KafkaException, TopicPartition
from txnstore.admin import AbortTransactionSpec, AdminClient
from txnstore.db.roles.grants import RoleScope
from txnstore.db.roles.rights import Kind

_NUMBERS = itertools.count(1)
#: May write to the topics of all, as no transactional id but its own.
GUEST = "guest"


@pytest.fixture(scope="module")
def guest(shop):
    name = shop.roles[GUEST] = f"{shop.name}_{GUEST}"
    shop.server.create_role(name, "secret")
    for kind in (Kind.PRODUCER, Kind.CONSUMER):
        shop.grant(kind, GUEST, RoleScope(("shared-*",), ("guest-*",), ("guest-*",)))
    return GUEST


@pytest.fixture
def open_one(shop, guest):
    """A transaction of somebody else's, open in two partitions: its producer, and the numbers of one of them."""
    topic = f"shared-{next(_NUMBERS)}"
    shop.create_topics(topic, f"{topic}-more")
    with shop.producer("worker", transactional_id=topic) as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        for written in (topic, f"{topic}-more"):
            producer.produce(written, "a")
        assert producer.flush(PATIENCE_SECONDS) == 0
        with AdminClient({"bootstrap.servers": shop.url(guest)}) as admin:
            (described,) = (
                future.result(PATIENCE_SECONDS)
                for future in admin.describe_producers([TopicPartition(topic, 0)]).values()
            )
        yield producer, topic, described.active_producers[0]


def assert_it_commits_as_a_whole(shop, producer, topic):
    producer.commit_transaction(PATIENCE_SECONDS)
    for written in (topic, f"{topic}-more"):
        with shop.consumer("reader", f"whole-{next(_NUMBERS)}") as consumer:
            consumer.assign([TopicPartition(written, 0, 0)])
            assert consumer.poll(PATIENCE_SECONDS).value() == b"a", written


def test_an_abort_by_partition_and_producer_is_refused(shop, guest, open_one):
    producer, topic, state = open_one
    spec = AbortTransactionSpec(TopicPartition(topic, 0), state.producer_id, state.producer_epoch, 0)
    with AdminClient({"bootstrap.servers": shop.url(guest)}) as admin, pytest.raises(KafkaException) as refused:
        admin.abort_transaction(spec).result(PATIENCE_SECONDS)
    assert refused.value.args[0].code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED
    assert "some rows of transaction_writers, transactions" in refused.value.args[0].str()
    assert str(state.producer_id) in refused.value.args[0].str()
    assert_it_commits_as_a_whole(shop, producer, topic)
