"""Administration of several databases: what the admin client and the commands see and do, wherever it lives."""

from __future__ import annotations

import itertools
import json
import os

import pytest
from typer.testing import CliRunner

from txnstore import OFFSET_BEGINNING, OFFSET_INVALID, Consumer, KafkaError, KafkaException, Producer, TopicPartition
from txnstore.admin import (
    AbortTransactionSpec,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)
from txnstore.cli import maintenance
from txnstore.cli.output import FAILED, CommandFailed
from txnstore.cli.program import NAMES, program_with
from txnstore.clients.admin.calls import Call
from txnstore.clients.model.metadata import ConsumerGroupTopicPartitions, TopicCollection
from txnstore.db.cluster.membership import label_of_address
from txnstore.db.opening import open_store
from txnstore.db.store import Store
from txnstore.db.url import parse_url
from txnstore.errors import StoreUnavailable
from txnstore.log.topics import create_topic, delete_topic, grow_topic
from txnstore.maintenance.loop import Maintenance

PATIENCE_SECONDS = 60.0
TOPIC = "orders"
PARTITIONS = 6


@pytest.fixture
def urls(site):
    return ", ".join(site.urls)


@pytest.fixture
def admin(urls):
    with AdminClient({"bootstrap.servers": urls}) as admin:
        yield admin


@pytest.fixture
def topic(admin):
    """A topic with partitions in all databases by turns, a record in each."""
    new = NewTopic(TOPIC, PARTITIONS, config={"txnstore.placement": "roundrobin"})
    admin.create_topics([new])[TOPIC].result(PATIENCE_SECONDS)
    return TOPIC


@pytest.fixture
def make(urls, request):
    def make(kind, **settings):
        client = kind({"bootstrap.servers": urls} | {name.replace("_", "."): value for name, value in settings.items()})
        request.addfinalizer(client.close)
        return client

    return make


def leaders_of(client, prefix):
    """Return a name that lives in each of the databases, by broker."""
    cluster = client._connection.cluster()
    found: dict[int, str] = {}
    for name in (f"{prefix}-{number}" for number in itertools.count()):
        found.setdefault(cluster.coordinator_id_of(name) - 1, name)
        if len(found) == len(cluster.databases):
            return found
    raise AssertionError


def open_transactions(make, admin, topic):
    """Leave a transaction open in every partition, coordinated in each database; return producers by id."""
    producers = {}
    admin.list_topics(timeout=PATIENCE_SECONDS)
    for broker, name in leaders_of(admin, "id").items():
        producer = make(Producer, transactional_id=name)
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        for number in range(PARTITIONS):
            producer.produce(topic, b"%d" % broker, partition=number)
        assert producer.flush(PATIENCE_SECONDS) == 0
        producers[name] = broker, producer
    return producers


def test_each_database_is_a_broker_that_leads_what_lives_there(admin, topic):
    described = admin.describe_cluster().result(PATIENCE_SECONDS)
    assert [node.id for node in described.nodes] == [0, 1, 2]
    assert described.controller.id == 0
    listed = admin.list_topics(timeout=PATIENCE_SECONDS)
    assert sorted(listed.brokers) == [0, 1, 2]
    assert [each.leader for each in listed.topics[topic].partitions.values()] == [0, 1, 2, 0, 1, 2]
    topics = admin.describe_topics(TopicCollection([topic]))[topic].result(PATIENCE_SECONDS)
    assert [partition.leader.id for partition in topics.partitions] == [0, 1, 2, 0, 1, 2]
    assert {node.port for node in described.nodes} == {topics.partitions[0].leader.port}


@pytest.mark.slow
def test_topics_grow_change_and_go_everywhere(admin, topic, make, urls):
    producer = make(Producer)
    admin.create_partitions([NewPartitions(topic, 9)])[topic].result(PATIENCE_SECONDS)
    for number in range(9):
        producer.produce(topic, b"a", partition=number)
    assert producer.flush(PATIENCE_SECONDS) == 0
    change = ConfigEntry("max.message.bytes", "1000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[change])
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(PATIENCE_SECONDS)
    producer = make(Producer)
    failed = []
    for number in range(9):
        producer.produce(topic, b"b" * 1001, partition=number, on_delivery=lambda error, _: failed.append(error.code()))
    producer.flush(PATIENCE_SECONDS)
    assert failed == [KafkaError.MSG_SIZE_TOO_LARGE] * 9
    admin.delete_topics([topic])[topic].result(PATIENCE_SECONDS)
    assert admin.list_topics(timeout=PATIENCE_SECONDS).topics == {}
    settings = ConfigResource(
        ResourceType.BROKER,
        "0",
        incremental_configs=[
            ConfigEntry("txnstore.placement", "roundrobin", incremental_operation=AlterConfigOpType.SET)
        ],
    )
    for future in admin.incremental_alter_configs([settings]).values():
        future.result(PATIENCE_SECONDS)
    admin.create_topics([NewTopic("next", 3)])["next"].result(PATIENCE_SECONDS)
    leaders = admin.list_topics("next", PATIENCE_SECONDS).topics["next"].partitions.values()
    assert {each.leader for each in leaders} == {0, 1, 2}


@pytest.mark.slow
def test_a_topic_that_an_open_transaction_elsewhere_has_written_to_is_not_deleted(admin, topic, make):
    for _, producer in open_transactions(make, admin, topic).values():
        with pytest.raises(KafkaException) as caught:
            admin.delete_topics([topic])[topic].result(PATIENCE_SECONDS)
        assert caught.value.args[0].code() == KafkaError.INVALID_TXN_STATE
        producer.abort_transaction(PATIENCE_SECONDS)
    admin.delete_topics([topic])[topic].result(PATIENCE_SECONDS)


def test_each_step_of_deleting_a_topic_has_what_is_left_of_the_calls_time(admin, topic, monkeypatch):
    left_ms, written, write = iter([9_000, 4_000]), [], Store.write

    def noting(store, work, **options):
        written.append(options.get("retry_timeout_ms"))
        return write(store, work, **options)

    monkeypatch.setattr(Call, "retry_ms", lambda *_: next(left_ms))
    monkeypatch.setattr(Store, "write", noting)
    admin.delete_topics([topic])[topic].result(PATIENCE_SECONDS)
    assert (4_000 in written, 9_000 in written) == (True, False)


@pytest.mark.slow
def test_transactions_are_listed_described_and_aborted_wherever_they_are_coordinated(admin, topic, make):
    producers = open_transactions(make, admin, topic)
    groups = leaders_of(admin, "group")
    for group_id in groups.values():
        metadata = make(Consumer, group_id=group_id).consumer_group_metadata()
        for broker, producer in producers.values():
            offsets = [TopicPartition(topic, broker + 3, broker + 1)]
            producer.send_offsets_to_transaction(offsets, metadata, PATIENCE_SECONDS)
    listed = admin.list_transactions().result(PATIENCE_SECONDS)
    assert [each.transactional_id for each in listed] == sorted(producers)
    for name, future in admin.describe_transactions(list(producers)).items():
        described = future.result(PATIENCE_SECONDS)
        assert described.coordinator_id == producers[name][0]
        assert len(described.topic_partitions) == PARTITIONS
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    for future in admin.describe_producers(partitions).values():
        states = future.result(PATIENCE_SECONDS).active_producers
        assert len(states) == 3
        assert all(state.current_transaction_start_offset is not None for state in states)
    assert admin.find_hanging_transactions().result(PATIENCE_SECONDS) == []
    opened = admin.list_open_transactions().result(PATIENCE_SECONDS)
    assert len(opened) == 3 * PARTITIONS
    for each in opened:
        assert each.coordinator_id == producers[each.transactional_id][0]
        assert (each.client_process_id, each.is_hanging) == (os.getpid(), False)
        assert each.freed_by == f"txnstore transactions abort {each.transactional_id}"
    # Each holds offsets of a group in each database.
    held = admin.list_pending_offsets().result(PATIENCE_SECONDS)
    assert sorted((each.group_id, each.transactional_id) for each in held) == sorted(
        itertools.product(groups.values(), producers)
    )
    for each in held:
        broker = producers[each.transactional_id][0]
        assert each.coordinator_id == broker
        assert (each.topic_partition, each.topic_partition.offset) == (TopicPartition(topic, broker + 3), broker + 1)
        assert (each.state.kafka_name, each.client_process_id) == ("Ongoing", os.getpid())
        assert each.freed_by == f"txnstore transactions abort {each.transactional_id}"
    here = admin.list_pending_offsets([TopicPartition(topic, 4)]).result(PATIENCE_SECONDS)
    assert sorted(each.group_id for each in here) == sorted(groups.values())
    assert {producers[each.transactional_id][0] for each in here} == {1}
    # Any of its partitions will do to abort the whole.
    states = admin.describe_producers([partitions[1]])[partitions[1]].result(PATIENCE_SECONDS).active_producers
    for state in states:
        spec = AbortTransactionSpec(partitions[1], state.producer_id, state.producer_epoch, 0)
        admin.abort_transaction(spec).result(PATIENCE_SECONDS)
    assert {each.state.kafka_name for each in admin.list_transactions().result(PATIENCE_SECONDS)} == {"CompleteAbort"}
    assert admin.list_pending_offsets().result(PATIENCE_SECONDS) == []
    for _, producer in producers.values():
        with pytest.raises(KafkaException) as caught:
            producer.commit_transaction(PATIENCE_SECONDS)
        assert caught.value.args[0].txn_requires_abort()
        producer.abort_transaction(PATIENCE_SECONDS)
    for name in producers:
        admin.fence_producers([name])[name].result(PATIENCE_SECONDS)


@pytest.mark.slow
def test_offsets_and_records_are_looked_up_and_deleted_where_they_live(admin, topic, make):
    producer = make(Producer)
    for number in range(PARTITIONS):
        for value in range(number + 1):
            producer.produce(topic, b"%d" % value, partition=number)
    assert producer.flush(PATIENCE_SECONDS) == 0
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    ends = admin.list_offsets({partition: OffsetSpec.latest() for partition in partitions})
    assert [ends[each].result(PATIENCE_SECONDS).offset for each in partitions] == [1, 2, 3, 4, 5, 6]
    wanted = [TopicPartition(topic, number, 1) for number in range(PARTITIONS)]
    low = admin.delete_records(wanted)
    assert [low[each].result(PATIENCE_SECONDS).low_watermark for each in wanted] == [1] * PARTITIONS
    starts = admin.list_offsets({partition: OffsetSpec.earliest() for partition in partitions})
    assert [starts[each].result(PATIENCE_SECONDS).offset for each in partitions] == [1] * PARTITIONS


@pytest.mark.slow
def test_groups_are_listed_altered_and_deleted_wherever_they_live(admin, topic, make):
    admin.list_topics(timeout=PATIENCE_SECONDS)
    groups = leaders_of(admin, "group")
    partitions = [TopicPartition(topic, number, number) for number in range(PARTITIONS)]
    for group_id in groups.values():
        consumer = make(Consumer, group_id=group_id, auto_offset_reset="earliest")
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(PARTITIONS)])
        consumer.commit(offsets=partitions, asynchronous=False)
        consumer.close()
    listed = admin.list_consumer_groups().result(PATIENCE_SECONDS)
    assert sorted(each.group_id for each in listed.valid) == sorted(groups.values())
    for broker, group_id in groups.items():
        described = admin.describe_consumer_groups([group_id])[group_id].result(PATIENCE_SECONDS)
        assert described.coordinator.id == broker
        altered = ConsumerGroupTopicPartitions(group_id, [TopicPartition(topic, 1, 17)])
        admin.alter_consumer_group_offsets([altered])[group_id].result(PATIENCE_SECONDS)
        asked = ConsumerGroupTopicPartitions(group_id)
        found = admin.list_consumer_group_offsets([asked])[group_id].result(PATIENCE_SECONDS).topic_partitions
        assert [each.offset for each in found] == [0, 17, 2, 3, 4, 5]
        admin.delete_consumer_groups([group_id])[group_id].result(PATIENCE_SECONDS)
    assert admin.list_consumer_groups().result(PATIENCE_SECONDS).valid == []


def value_of(consumer):
    message = consumer.poll(PATIENCE_SECONDS)
    assert message is not None
    return message.value()


# --- one more database ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_old_clients_work_on_when_a_database_joins_and_new_ones_use_it(site, make, admin, topic, urls):
    old = make(Producer)
    old.produce(topic, b"before", partition=1)
    assert old.flush(PATIENCE_SECONDS) == 0
    reader = make(Consumer, group_id="readers", auto_offset_reset="earliest")
    reader.subscribe([topic])
    assert reader.poll(PATIENCE_SECONDS).value() == b"before"
    added = site.new("fourth")
    result = CliRunner().invoke(program_with(NAMES), ["--url", urls, "databases", "add", added])
    assert result.exit_code == 0, result.output
    with AdminClient({"bootstrap.servers": f"{urls}, {added}"}) as new_admin:
        label = new_admin._connection.cluster().databases[-1].label
        new = NewTopic("there", 1, config={"txnstore.placement": label})
        new_admin.create_topics([new])["there"].result(PATIENCE_SECONDS)
        assert new_admin.list_topics("there", PATIENCE_SECONDS).topics["there"].partitions[0].leader == 3
    with Producer({"bootstrap.servers": f"{urls}, {added}", "transactional.id": "both"}) as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        producer.produce("there", b"new")
        producer.produce(topic, b"new", partition=1)
        producer.commit_transaction(PATIENCE_SECONDS)
    assert reader.poll(PATIENCE_SECONDS).value() == b"new"
    failed = []
    old.produce("there", b"unreachable", on_delivery=lambda error, _: failed.append(error))
    old.produce(topic, b"after", partition=1)
    assert old.flush(PATIENCE_SECONDS) == 0
    assert "bootstrap.servers" in failed[0].str()
    assert reader.poll(PATIENCE_SECONDS).value() == b"after"


def test_clients_of_one_database_work_on_when_a_second_one_joins(site):
    alone, second = site.urls[:2]
    settings = {"bootstrap.servers": alone}
    with Producer(settings) as producer, Consumer({**settings, "group.id": "g", "auto.offset.reset": "earliest"}) as c:
        producer.produce("t", b"0")
        assert producer.flush(PATIENCE_SECONDS) == 0
        c.subscribe(["t"])
        assert value_of(c) == b"0"
        with AdminClient({"bootstrap.servers": f"{alone},{second}"}) as admin:
            label = admin._connection.cluster().databases[1].label
            new = NewTopic("there", 1, config={"txnstore.placement": label})
            admin.create_topics([new])["there"].result(PATIENCE_SECONDS)
        producer.produce("t", b"1")
        failed = []
        producer.produce("there", b"unreachable", on_delivery=lambda error, _: failed.append(error))
        assert producer.flush(PATIENCE_SECONDS) == 0
        assert "bootstrap.servers" in failed[0].str()
        assert value_of(c) == b"1"
        with Producer({**settings, "transactional.id": "later"}) as later:
            later.init_transactions(PATIENCE_SECONDS)
            later.begin_transaction()
            later.produce("t", b"2")
            later.commit_transaction(PATIENCE_SECONDS)
        assert value_of(c) == b"2"
        c.commit(asynchronous=False)


# --- a database whose copies lag --------------------------------------------------------------------------------------


@pytest.fixture
def lagging(admin):
    """A group of the second database, which was away while topics changed at the controller."""
    cluster = admin._connection.cluster()
    here = cluster.label_of(1)
    placed = {"txnstore.placement": here}
    topics = [
        NewTopic("again", 1, config=placed),
        NewTopic("grown", 1, config=placed),
        NewTopic("gone", 1, config=placed),
    ]
    for future in admin.create_topics(topics).values():
        future.result(PATIENCE_SECONDS)
    group_id = leaders_of(admin, "lagging")[1]
    requests = [ConsumerGroupTopicPartitions(group_id, [TopicPartition(name, 0, 0) for name in ("again", "gone")])]
    admin.alter_consumer_group_offsets(requests)[group_id].result(PATIENCE_SECONDS)

    def change(connection):
        delete_topic(connection, "again")
        create_topic(connection, "again", config=placed)
        grow_topic(connection, "grown", partition_count=3)
        delete_topic(connection, "gone")
        create_topic(connection, "new", config=placed)

    cluster.controller.write(change)
    return group_id


def test_offsets_are_set_in_what_a_topics_name_stands_for_at_the_controller(admin, lagging, make):
    wanted = [TopicPartition("again", 0, 5), TopicPartition("new", 0, 5), TopicPartition("gone", 0, 5)]
    requests = [ConsumerGroupTopicPartitions(lagging, wanted)]
    altered = admin.alter_consumer_group_offsets(requests)[lagging].result(PATIENCE_SECONDS)
    errors = {it.topic: it.error for it in altered.topic_partitions}
    assert {name: error and error.code() for name, error in errors.items()} == {
        "again": None,
        "new": None,
        "gone": KafkaError.UNKNOWN_TOPIC_OR_PART,
    }
    producer = make(Producer)
    for number in range(8):
        producer.produce("again", b"%d" % number)
        assert producer.flush(PATIENCE_SECONDS) == 0
    consumer = make(Consumer, group_id=lagging)
    consumer.assign([TopicPartition("again", 0)])
    assert value_of(consumer) == b"5"


def test_offsets_are_listed_of_what_a_topics_name_stands_for_at_the_controller(admin, lagging):
    wanted = [TopicPartition("again", 0), TopicPartition("new", 0)]
    request = [ConsumerGroupTopicPartitions(lagging, wanted)]
    listed = admin.list_consumer_group_offsets(request)[lagging].result(PATIENCE_SECONDS)
    assert [(it.topic, it.offset, it.error) for it in listed.topic_partitions] == [
        ("again", OFFSET_INVALID, None),
        ("new", OFFSET_INVALID, None),
    ]


def test_a_group_is_reset_in_all_partitions_that_a_topic_has_at_the_controller(urls, lagging):
    arguments = ["groups", "reset-offsets", lagging, "--topic", "grown", "--to-earliest", "--execute", "--json"]
    result = CliRunner().invoke(program_with(NAMES), ["--url", urls, *arguments])
    assert result.exit_code == 0, result.output
    assert [row["partition"] for row in json.loads(result.stdout)] == [0, 1, 2]


def test_a_group_is_described_with_what_it_has_committed_in_a_topic_that_is_deleted_elsewhere(urls, lagging):
    result = CliRunner().invoke(program_with(NAMES), ["--url", urls, "groups", "describe", lagging, "--json"])
    assert result.exit_code == 0, result.output
    (described,) = json.loads(result.stdout)
    (gone,) = [row for row in described["offsets"] if row["topic"] == "gone"]
    assert (gone["committed_offset"], gone["high_watermark"], gone["lag"]) == (0, None, None)
    result = CliRunner().invoke(program_with(NAMES), ["--url", urls, "groups", "describe", lagging])
    assert result.exit_code == 0, result.output


# --- the commands -----------------------------------------------------------------------------------------------------


def test_a_drawing_shows_groups_and_transactional_ids_of_all_databases(urls, site, admin, make):
    cluster = admin._connection.cluster()
    new = NewTopic("drawn", 1, config={"txnstore.placement": cluster.label_of(1)})
    admin.create_topics([new])["drawn"].result(PATIENCE_SECONDS)
    groups, names = leaders_of(admin, "group"), leaders_of(admin, "name")
    for broker, name in names.items():
        producer = make(Producer, transactional_id=name)
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        producer.produce("drawn", b"record")
        producer.commit_transaction(PATIENCE_SECONDS)
        request = [ConsumerGroupTopicPartitions(groups[broker], [TopicPartition("drawn", 0, broker)])]
        admin.alter_consumer_group_offsets(request)[groups[broker]].result(PATIENCE_SECONDS)

    def drawn(url):
        result = CliRunner().invoke(program_with(NAMES), ["--url", url, "timeline", "drawn", "--json"])
        timeline = json.loads(result.stdout)
        pointers = {it["name"]: it["offset"] for it in timeline["pointers"] if it["name"].startswith("group")}
        return result, [it["name"].rpartition(" ")[0] for it in timeline["lanes"]], pointers

    result, lanes, pointers = drawn(urls)
    assert (result.exit_code, lanes) == (0, list(names.values()))
    assert pointers == {f"group {name}": broker for broker, name in sorted(groups.items(), key=lambda item: item[1])}
    # What is not asked is said.
    result, lanes, pointers = drawn(", ".join(site.urls[:2]))
    assert result.exit_code == FAILED
    assert lanes == ["" if broker == 2 else name for broker, name in names.items()]
    assert cluster.label_of(3) in result.stderr
    assert len(pointers) == 2


@pytest.mark.slow
@pytest.mark.slow_on_postgresql
def test_the_commands_show_and_do_everything_over_all_databases(urls, admin, topic, make):
    def run(*arguments, **named):
        result = CliRunner().invoke(program_with(NAMES), ["--url", urls, *arguments], catch_exceptions=False, **named)
        assert result.exit_code == 0, (arguments, result.output)
        return result.stdout

    def rows(*arguments):
        return json.loads(run(*arguments, "--json"))

    assert [row["state"] for row in rows("databases", "list")] == ["reached"] * 3
    producers = open_transactions(make, admin, topic)
    assert [row["open_transactions"] for row in rows("topics", "list")] == [3 * PARTITIONS]
    described = rows("topics", "describe", topic)[0]["partitions"]
    assert [row["high_watermark"] for row in described] == [3] * PARTITIONS
    assert len({row["database"] for row in described}) == 3
    assert {row["transactional_id"]: row["coordinator"] for row in rows("transactions", "list")} == {
        name: broker for name, (broker, _) in producers.items()
    }
    assert len(rows("transactions", "describe-producers", topic)) == 3 * PARTITIONS
    for name, (broker, producer) in producers.items():
        assert rows("transactions", "describe", name)[0]["coordinator"] == broker
        if broker:
            run("transactions", "abort", name, "--yes")
        else:
            producer.commit_transaction(PATIENCE_SECONDS)
    values = run("consume", topic).split()
    assert values == ["0"] * PARTITIONS
    assert run("consume", topic, "--group", "billing").split() == values
    assert [row["group"] for row in rows("groups", "list")] == ["billing"]
    assert [row["lag"] for row in rows("groups", "describe", "billing")[0]["offsets"]] == [0] * PARTITIONS
    moved = rows("groups", "reset-offsets", "billing", "--to-earliest", "--execute")
    assert [row["new_offset"] for row in moved] == [0] * PARTITIONS
    run("groups", "delete", "billing", "--yes")
    for number in range(PARTITIONS):
        assert f"Dumping {topic}-{number}" in run("dump", "log", topic, "--partition", str(number))
        assert run("dump", "index", topic, "--partition", str(number)).count("outcome") == 3
        assert "COMMIT marker" in run("timeline", topic, "--partition", str(number))
    assert all(name in run("dump", "journal") for name in producers)
    assert rows("info")["counts"]["transactional_ids"] == 3
    assert run("maintain", "--once")
    run("topics", "alter", topic, "--partitions", "7")
    run("topics", "delete", topic, "--yes")
    assert rows("topics", "list") == []


@pytest.mark.slow
def test_a_record_that_waited_in_vain_for_a_database_names_it(site, monkeypatch):
    def open_unless_away(url, **options):
        if url == site.urls[1]:
            raise StoreUnavailable("it is away")
        return open_store(url, **options)

    urls = ", ".join(site.urls)
    with AdminClient({"bootstrap.servers": urls}) as admin:
        new = NewTopic(TOPIC, 3, config={"txnstore.placement": "roundrobin"})
        admin.create_topics([new])[TOPIC].result(PATIENCE_SECONDS)
    monkeypatch.setattr("txnstore.db.cluster.cluster.open_store", open_unless_away)
    written = {}
    for partition in ("0", "1"):
        arguments = ["--url", urls, "produce", TOPIC, "--partition", partition, "-X", "message.timeout.ms=1500"]
        written[partition] = CliRunner().invoke(program_with(NAMES), arguments, input="a\n")
    failed = written["1"].exception
    assert isinstance(failed, CommandFailed)
    assert (written["0"].exit_code, failed.code) == (0, FAILED)
    label = label_of_address(parse_url(site.urls[1]))
    told = f"line 1: Local: Message timed out; the last trouble was: the database '{label}' cannot be reached"
    assert told in str(failed)
    assert "0 records were written, and of 1 that is not known" in str(failed)


def test_the_maintenance_of_a_cluster_of_one_hears_of_databases_that_join(sqlite_site, monkeypatch):
    looked_after = []

    def run_one(cluster, database_id, duties, stop, observer, *, moved):
        looked_after.append(database_id)
        if database_id == 1:
            sqlite_site.open().close()
        else:
            stop.set()

    monkeypatch.setattr(maintenance, "_run_one", run_one)
    monkeypatch.setattr(maintenance, "_LOOK_AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(maintenance, "stop_at_signals", lambda stop: None)
    monkeypatch.setattr(Maintenance, "run", lambda self, stop: None)
    assert CliRunner().invoke(program_with(NAMES), ["maintain", sqlite_site.urls[0]]).exit_code == 0
    assert set(looked_after) == {1, 2, 3}
