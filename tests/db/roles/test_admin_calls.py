"""Which role may make which call of the admin client; what is refused changes nothing, and the client goes on."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pytest

from tests.db.roles.shop import PATIENCE_SECONDS
from txnstore import ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicCollection, TopicPartition
from txnstore.admin import (
    AbortTransactionSpec,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
)

_NUMBERS = itertools.count(1)
PARTITION = TopicPartition("others", 0)
#: The owner connects as the superuser does: everything is his.
OWNER = "owner"
MANAGES = (OWNER, "upkeep")
SEES = (*MANAGES, "watcher")
READS = (*SEES, "reader", "worker")
WRITES = (*MANAGES, "writer", "worker")
OF_GROUPS = (*MANAGES, "reader", "worker")
OF_TRANSACTIONS = (*SEES, "writer", "worker")
ALL = (*READS, "writer")


@dataclass(frozen=True)
class Call:
    """A call of the admin client, and who may make it."""

    make: Callable[[AdminClient, str], Any]
    allowed: Collection[str]
    prepare: Callable[[AdminClient, str], Any] = lambda owner, name: None
    """What has to be there; every role has a name of its own."""


def each(futures: Any) -> list[Any]:
    return [future.result(PATIENCE_SECONDS) for future in futures.values()]


def make_topic(admin: AdminClient, name: str) -> Any:
    return each(admin.create_topics([NewTopic(name, 1)]))


def make_group(admin: AdminClient, name: str) -> Any:
    offsets = ConsumerGroupTopicPartitions(name, [TopicPartition("others", 0, 1)])
    return each(admin.alter_consumer_group_offsets([offsets]))


def use_id(admin: AdminClient, name: str) -> Any:
    return each(admin.fence_producers([name]))


def resource(*entries: ConfigEntry, **settings: str) -> ConfigResource:
    return ConfigResource(ConfigResource.Type.TOPIC, "others", set_config=settings, incremental_configs=list(entries))


_SET = ConfigEntry("retention.ms", "86400000", incremental_operation=AlterConfigOpType.SET)
CALLS = {
    "create_topics": Call(make_topic, MANAGES),
    "delete_topics": Call(lambda admin, name: each(admin.delete_topics([name])), MANAGES, make_topic),
    "create_partitions": Call(
        lambda admin, name: each(admin.create_partitions([NewPartitions(name, 2)])), MANAGES, make_topic
    ),
    "describe_topics": Call(lambda admin, _: each(admin.describe_topics(TopicCollection(["others"]))), ALL),
    "list_topics": Call(lambda admin, _: admin.list_topics(timeout=PATIENCE_SECONDS), ALL),
    "describe_cluster": Call(lambda admin, _: admin.describe_cluster().result(PATIENCE_SECONDS), ALL),
    "cluster_id": Call(lambda admin, _: admin.cluster_id(PATIENCE_SECONDS), ALL),
    "describe_configs": Call(lambda admin, _: each(admin.describe_configs([resource()])), ALL),
    "incremental_alter_configs": Call(
        lambda admin, _: each(admin.incremental_alter_configs([resource(_SET)])), MANAGES
    ),
    "list_offsets": Call(lambda admin, _: each(admin.list_offsets({PARTITION: OffsetSpec.latest()})), ALL),
    "delete_records": Call(lambda admin, _: each(admin.delete_records([TopicPartition("others", 0, 1)])), MANAGES),
    "list_consumer_groups": Call(
        lambda admin, _: admin.list_consumer_groups().result(PATIENCE_SECONDS), (*OF_GROUPS, "watcher")
    ),
    "describe_consumer_groups": Call(
        lambda admin, name: each(admin.describe_consumer_groups([name])), (*OF_GROUPS, "watcher"), make_group
    ),
    "delete_consumer_groups": Call(lambda admin, name: each(admin.delete_consumer_groups([name])), MANAGES, make_group),
    "list_consumer_group_offsets": Call(
        lambda admin, name: each(admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(name)])),
        (*OF_GROUPS, "watcher"),
        make_group,
    ),
    "alter_consumer_group_offsets": Call(make_group, OF_GROUPS),
    "delete_consumer_group_offsets": Call(
        lambda admin, name: each(
            admin.delete_consumer_group_offsets([ConsumerGroupTopicPartitions(name, [PARTITION])])
        ),
        OF_GROUPS,
        make_group,
    ),
    "list_transactions": Call(lambda admin, _: admin.list_transactions().result(PATIENCE_SECONDS), OF_TRANSACTIONS),
    "describe_transactions": Call(
        lambda admin, name: each(admin.describe_transactions([name])), OF_TRANSACTIONS, use_id
    ),
    "describe_producers": Call(lambda admin, _: each(admin.describe_producers([PARTITION])), ALL),
    "fence_producers": Call(use_id, WRITES),
    "force_terminate_transaction": Call(
        lambda admin, name: admin.force_terminate_transaction(name).result(PATIENCE_SECONDS), WRITES, use_id
    ),
    "find_hanging_transactions": Call(
        lambda admin, _: admin.find_hanging_transactions().result(PATIENCE_SECONDS), OF_TRANSACTIONS
    ),
    "list_open_transactions": Call(lambda admin, _: admin.list_open_transactions().result(PATIENCE_SECONDS), SEES),
    "list_pending_offsets": Call(lambda admin, _: admin.list_pending_offsets().result(PATIENCE_SECONDS), SEES),
}
#: Deprecated, and shown by the calls that took their places; the ones that nobody makes are refused to all.
ELSEWHERE = {"alter_configs", "list_groups", "abort_transaction", "poll"}


@pytest.fixture(scope="module")
def admins(shop):
    """A client of each role, the same for all calls: one that was refused goes on."""
    urls = {OWNER: shop.server.url(shop.name)} | {role: shop.url(role) for role in shop.roles}
    with contextlib.ExitStack() as opened:
        yield {role: opened.enter_context(AdminClient({"bootstrap.servers": url})) for role, url in urls.items()}


def everything(shop) -> Any:
    """Return what the tables hold that a call may change; nobody else works on these names meanwhile."""
    names = ("topics", "partitions", "topic_configs", "transaction_log", "group_offsets", "groups")
    rows = "md5(coalesce(string_agg(t::text, ',' ORDER BY t::text), ''))"
    text = " UNION ALL ".join(f"SELECT '{name}', {rows} FROM txnstore.{name} t" for name in names)
    with shop.connect() as connection:
        return connection.execute(text).fetchall()


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_it_is_allowed_to_those_who_need_it_and_refused_to_others_before_it_changes_anything(shop, admins, name):
    call = CALLS[name]
    roles = [role for role in admins if role != "tenant"]
    assert set(call.allowed) <= set(roles)
    targets = {role: f"called-{next(_NUMBERS)}" for role in roles}
    for role in roles:
        call.prepare(admins[OWNER], targets[role])
    before = everything(shop)
    for role in sorted(set(roles) - set(call.allowed)):
        with pytest.raises(KafkaException) as refused:
            call.make(admins[role], targets[role])
        error = refused.value.args[0]
        assert error.code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED, role
        assert "permission denied for" in error.str(), role
        assert not error.retriable()
    assert everything(shop) == before
    for role in call.allowed:
        call.make(admins[role], targets[role])
    # Refused or not, a client goes on.
    for admin in admins.values():
        assert admin.cluster_id(PATIENCE_SECONDS) is not None


@pytest.mark.slow
@pytest.mark.parametrize("role", [*MANAGES, "worker", "writer", "reader", "watcher"])
def test_who_may_write_may_abort_what_is_open_and_others_leave_it_open(shop, admins, role):
    topic = f"opened-{next(_NUMBERS)}"
    make_topic(admins[OWNER], topic)
    partition = TopicPartition(topic, 0)
    with shop.producer("worker", transactional_id=topic) as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        producer.produce(topic, "a")
        assert producer.flush(PATIENCE_SECONDS) == 0
        (described,) = each(admins[OWNER].describe_producers([partition]))
        (open_,) = described.active_producers
        spec = AbortTransactionSpec(partition, open_.producer_id, open_.producer_epoch, 0)
        if role in WRITES:
            admins[role].abort_transaction(spec).result(PATIENCE_SECONDS)
            with pytest.raises(KafkaException) as aborted:
                producer.commit_transaction(PATIENCE_SECONDS)
            assert aborted.value.args[0].txn_requires_abort()
            producer.abort_transaction(PATIENCE_SECONDS)
            return
        with pytest.raises(KafkaException) as refused:
            admins[role].abort_transaction(spec).result(PATIENCE_SECONDS)
        assert refused.value.args[0].code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED
        producer.commit_transaction(PATIENCE_SECONDS)


def test_the_table_has_every_call():
    calls = {name for name in vars(AdminClient) if not name.startswith("_")}
    assert calls >= CALLS.keys() | ELSEWHERE
    # Those that no role may make: they have no meaning here.
    refused_to_all = calls - CALLS.keys() - ELSEWHERE
    assert all("acl" in name or "scram" in name or "sasl" in name or name == "elect_leaders" for name in refused_to_all)
