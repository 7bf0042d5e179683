"""The relay to and from a real Kafka: what arrives, deaths of the relay, two at once, and a broker that dies.

This is the only file that needs a broker, so of several processes of a test run one starts it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.relay import relay_process
from tests.relay.kafka_side import SECONDS, Sent
from tests.relay.running import beside, wait_until
from tests.relay.store_side import begin, copy, make_topic, numbered, put, read, ship
from tests.relay.test_to_kafka_steps import NULLS
from tests.tools.program_forks import LIBRARIES, forks
from tests.tools.readmes import block_of
from txnstore.db.opening import open_store
from txnstore.relay.errors import RelayFailed, RelayFenced
from txnstore.relay.from_kafka import FromKafka
from txnstore.relay.kafka_cluster import KafkaCluster
from txnstore.relay.options import OnGap, RelayOptions
from txnstore.relay.to_kafka import ToKafka

pytestmark = pytest.mark.slow

TOP = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(txnstore_postgresql_url):
    """A fresh store; that both databases do is shown with a store in Kafka's place."""
    with open_store(txnstore_postgresql_url, pool_size=10) as store:
        yield store


@pytest.fixture
def cluster(bootstrap):
    return KafkaCluster(bootstrap, {})


@pytest.fixture
def topic(kafka):
    """The name of a topic that is nowhere yet."""
    return kafka.new_name()


def test_everything_of_a_record_arrives_there_and_back(store, kafka, cluster, topic, tmp_path):
    make_topic(store, topic, 3)
    put(store, topic, NULLS, partition=1)
    put(store, topic, numbered(50), partition=2)
    assert ship(store, cluster, topics=[topic]) == len(NULLS) + 50
    expected = {0: [], 1: NULLS, 2: numbered(50)}
    kafka.expect(topic, expected)
    with open_store(f"sqlite:///{tmp_path / 'copy.db'}") as other:
        assert copy(other, cluster, topics=[topic]) == len(NULLS) + 50
        assert read(other, topic) == expected
        assert copy(other, cluster, topics=[topic]) == 0
    assert ship(store, cluster, topics=[topic]) == 0


def test_what_is_aborted_never_arrives_there(store, kafka, cluster, topic):
    make_topic(store, topic)
    begin(store, f"{topic}-a", topic, numbered(3, 100))(False)
    begin(store, f"{topic}-b", topic, numbered(3))(True)
    end = begin(store, f"{topic}-c", topic, numbered(2, 3))
    put(store, topic, numbered(1, 5))
    assert ship(store, cluster, topics=[topic]) == 3
    end(True)
    assert ship(store, cluster, topics=[topic]) == 3
    kafka.expect(topic, {0: numbered(6)})


def test_what_is_aborted_in_kafka_never_arrives_here(store, kafka, cluster):
    topic = kafka.new_topic()
    producer = kafka.transactional("x")
    for records, commit in ((numbered(2), True), (numbered(2, 50), False), (numbered(2, 2), True)):
        producer.begin_transaction()
        kafka.send(topic, records, producer=producer)
        (producer.commit_transaction if commit else producer.abort_transaction)(SECONDS)
    assert copy(store, cluster, topics=[topic]) == 4
    assert read(store, topic) == {0: numbered(4)}
    # Nothing is left between the last record and the end: the marker is not waited for again.
    assert copy(store, cluster, topics=[topic]) == 0


def test_a_relay_that_is_killed_again_and_again_ships_everything_once(txnstore_postgresql_url, kafka, topic, bootstrap):
    arguments = [txnstore_postgresql_url, "--to", bootstrap, "--topic", topic]
    sent: dict[int, list[Sent]] = {0: [], 1: []}
    with open_store(txnstore_postgresql_url) as store:
        make_topic(store, topic, 2)

        def send(partition, records):
            if random.random() < 0.2:
                begin(store, f"{topic}-{len(sent[0])}-{len(sent[1])}", topic, records, partition=partition)(False)
            put(store, topic, records, partition=partition)

        be_killed(arguments, sent, send)
        assert relay_process.join(relay_process.start([*arguments, "--once"])) == 0
        kafka.expect(topic, sent)


def test_a_relay_that_is_killed_again_and_again_copies_everything_once(txnstore_sqlite_url, kafka, bootstrap):
    topic = kafka.new_topic(2)
    arguments = [txnstore_sqlite_url, "--from", bootstrap, "--topic", topic]
    sent: dict[int, list[Sent]] = {0: [], 1: []}
    be_killed(arguments, sent, lambda partition, records: kafka.send(topic, records, partition=partition))
    assert relay_process.join(relay_process.start([*arguments, "--once"])) == 0
    with open_store(txnstore_sqlite_url) as store:
        assert read(store, topic) == sent


def be_killed(arguments, sent, send) -> None:
    """Start a relay again and again, kill it, and send records all the while."""
    for run in range(4):
        process = relay_process.start(arguments)
        deadline = time.monotonic() + random.uniform(0.1, 0.8)
        while time.monotonic() < deadline:
            partition = int(len(sent[0]) > len(sent[1]))
            records = numbered(20, 10_000 * run + len(sent[partition]))
            send(partition, records)
            sent[partition] += records
        relay_process.kill(process)


@pytest.mark.parametrize("call", ["send_offsets_to_transaction", "commit_transaction"])
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_relay_that_is_killed_at_the_worst_moment_ships_everything_once(
    txnstore_sqlite_url, kafka, topic, bootstrap, cluster, call, side
):
    with open_store(txnstore_sqlite_url) as store:
        make_topic(store, topic)
        put(store, topic, numbered(10))
        process = relay_process.start([txnstore_sqlite_url, "--to", bootstrap, "--once"], (call, side))
        assert relay_process.join(process) == -signal.SIGKILL
        already = numbered(10) if (call, side) == ("commit_transaction", "after") else []
        kafka.expect(topic, {0: already})
        assert ship(store, cluster) == 10 - len(already)
        kafka.expect(topic, {0: numbered(10)})


def test_of_two_relays_to_kafka_the_newer_one_goes_on(store, kafka, cluster, topic):
    make_topic(store, topic)
    put(store, topic, numbered(5))
    options = RelayOptions(topics=[topic])
    older, newer = ToKafka(store, cluster, options), ToKafka(store, cluster, options)
    stop = threading.Event()
    told: list[Exception] = []

    def run(relay):
        try:
            relay.run(stop)
        except Exception as error:  # noqa: BLE001 - which one is asserted below
            told.append(error)

    first = threading.Thread(target=run, args=[older])
    first.start()
    wait_until(lambda: older.shipped_count == 5)
    second = threading.Thread(target=run, args=[newer])
    second.start()
    try:
        count = 5
        while first.is_alive() or newer.shipped_count == 0:
            put(store, topic, numbered(5, count))
            count += 5
            assert count < 5_000
            wait_until(lambda count=count: told or older.shipped_count + newer.shipped_count >= count)
        wait_until(lambda: older.shipped_count + newer.shipped_count >= count)
    finally:
        stop.set()
        first.join(60)
        second.join(60)
    assert [type(error) for error in told] == [RelayFenced], told
    assert f"{topic}-0" in str(told[0])
    kafka.expect(topic, {0: numbered(count)})


def test_two_relays_from_kafka_copy_everything_once(store, kafka, cluster):
    topic = kafka.new_topic(2)
    make_topic(store, topic, 2)
    options = RelayOptions(topics=[topic])
    relays = [FromKafka(store, cluster, options) for _ in range(2)]
    with beside(*[relay.run for relay in relays]):
        for first in range(0, 200, 10):
            kafka.send(topic, numbered(10, first), partition=first // 10 % 2)
        wait_until(lambda: sum(map(len, read(store, topic).values())) >= 200)
    for half, records in read(store, topic).items():
        assert records == [record for first in range(half * 10, 200, 20) for record in numbered(10, first)]
    assert sum(relay.copied_count for relay in relays) == 200


def test_a_broker_that_is_killed_and_comes_back_is_waited_for(
    txnstore_sqlite_url, kafka, kafka_broker, cluster, topic, tmp_path
):
    if kafka_broker is None:
        pytest.skip("needs a broker of its own: it is killed")
    back_url = f"sqlite:///{tmp_path / 'back.db'}"
    with open_store(txnstore_sqlite_url, pool_size=10) as store, open_store(back_url) as back:
        make_topic(store, topic)
        options = RelayOptions(topics=[topic])
        put(store, topic, numbered(20))
        there = ToKafka(store, cluster, options)
        here = FromKafka(back, cluster, options)
        with beside(there.run):
            # Only what is there can be copied back.
            wait_until(lambda: there.shipped_count == 20)
            with beside(here.run):
                wait_until(lambda: here.copied_count == 20)
                kafka_broker.kill()
                put(store, topic, numbered(20, 20))
                kafka_broker.start()
                put(store, topic, numbered(20, 40))
                wait_until(lambda: here.copied_count >= 60)
        kafka.expect(topic, {0: numbered(60)})
        assert read(back, topic) == {0: numbered(60)}


def test_a_record_that_kafka_will_not_have_ends_the_relay(store, kafka, cluster):
    topic = kafka.new_topic(config={"max.message.bytes": "1000"})
    make_topic(store, topic)
    put(store, topic, numbered(2))
    put(store, topic, [Sent(b"x" * 2_000)])
    with pytest.raises(RelayFailed, match=f"{topic}-0, from offset [0-2] on: .*too large"):
        ship(store, cluster, topics=[topic])
    assert kafka.read(topic) == {0: []}


def test_records_that_were_deleted_in_kafka_before_they_were_copied_are_missed(store, kafka, cluster):
    topic = kafka.new_topic()
    kafka.send(topic, numbered(2))
    copy(store, cluster, topics=[topic])
    kafka.send(topic, numbered(4, 2))
    (future,) = kafka.admin.delete_records([kafka.library.TopicPartition(topic, 0, 4)]).values()
    future.result(SECONDS)
    with pytest.raises(RelayFailed, match=f"{topic}-0: in Kafka it begins at 4, after the relay's position 2"):
        copy(store, cluster, topics=[topic])
    assert copy(store, cluster, topics=[topic], on_gap=OnGap.EARLIEST) == 2


def test_nothing_of_a_topic_made_anew_is_copied_at_the_position_in_the_one_before(store, kafka, cluster, monkeypatch):
    """Kafka's client goes on there by itself, with what it finds under the name."""
    monkeypatch.setattr("txnstore.relay.from_kafka.LOOK_AGAIN_SECONDS", 3_600.0)
    topic = kafka.new_topic()
    kafka.send(topic, numbered(3))
    relay = FromKafka(store, cluster, RelayOptions(topics=(topic,)))

    def run(stop):
        with pytest.raises(RelayFailed, match="has been deleted and recreated"):
            relay.run(stop)

    with beside(run) as (running,):
        wait_until(lambda: relay.copied_count == 3)
        kafka.delete(topic)
        wait_until(lambda: not kafka.has(topic))
        kafka.create(topic, 1)
        with kafka.library.Producer(kafka.settings) as producer:
            kafka.send(topic, numbered(20, 3), producer=producer)
        wait_until(lambda: running.done() or relay.copied_count > 3)
    assert read(store, topic) == {0: numbered(3)}


def test_the_command_ends_in_good_order_at_a_signal(txnstore_sqlite_url, kafka, topic, bootstrap):
    with open_store(txnstore_sqlite_url) as store:
        make_topic(store, topic)
        put(store, topic, numbered(3))
    process = relay_process.start([txnstore_sqlite_url, "--to", bootstrap, "--topic", topic])
    wait_until(lambda: kafka.has(topic) and len(kafka.read(topic)[0]) == 3)
    process.terminate()
    assert relay_process.join(process) == 0


def test_the_recipe_copies_an_order_there_and_back(bootstrap, tmp_path):
    program = tmp_path / "bin" / "txnstore"
    program.parent.mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TXNSTORE_URL"},
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(TOP),
        "BOOTSTRAP": bootstrap,
    }
    # Seven starts of one program: its imports would take most of the time.
    with forks([*LIBRARIES, "confluent_kafka.admin"]) as forked:
        program.write_text(f'#!/bin/sh\nexec {forked} -m txnstore "$@"\n')
        program.chmod(0o755)
        done = subprocess.run(
            ["bash", "-e", "-c", block_of(__file__, "Relay to Kafka", "sh").text],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "1 records were shipped" in done.stdout
    assert "1 records were copied" in done.stdout
    assert done.stdout.endswith("42 EUR\n")
