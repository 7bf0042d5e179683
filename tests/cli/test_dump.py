"""`txnstore dump`: the log, its index, the producers and the journal, as kafka-dump-log prints them."""

from __future__ import annotations

import json
import re

from txnstore import Consumer, Producer, TopicPartition
from txnstore.db.opening import open_store
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.topics import get_topic
from txnstore.model import Record


def test_the_log_is_printed_as_kafka_prints_it(done):
    done("topics", "create", "orders")
    line = b'{"key": "k", "value": "v", "headers": {"h": "x"}, "timestamp": 1700000000000}\n{"value": "\\u001b[31m"}\n'
    done("produce", "orders", "-j", "-t", "load", stdin=line)
    out = done("dump", "log", "orders").splitlines()
    assert out[:2] == ["Dumping orders-0", "Log starting offset: 0"]
    assert re.fullmatch(
        r"baseOffset: 0 lastOffset: 1 count: 2 baseSequence: 0 lastSequence: 1 producerId: 0 producerEpoch: 0"
        r" partitionLeaderEpoch: 0 isTransactional: true isControl: false deleteHorizonMs: OptionalLong.empty"
        r" position: 0 CreateTime: \d+ size: \d+ magic: 2 compresscodec: none crc: \d+ isvalid: true",
        out[2],
    )
    assert out[3] == (
        "| offset: 0 CreateTime: 1700000000000 keySize: 1 valueSize: 1 sequence: 0 headerKeys: [h] key: k payload: v"
    )
    assert re.fullmatch(
        r"\| offset: 1 CreateTime: \d+ keySize: -1 valueSize: 5 sequence: 1 headerKeys: \[\] payload:  \[31m", out[4]
    )
    assert "isControl: true" in out[5]
    assert re.fullmatch(
        r"\| offset: 2 CreateTime: \d+ keySize: 4 valueSize: 6 sequence: -1 headerKeys: \[\]"
        r" endTxnMarker: COMMIT coordinatorEpoch: 0",
        out[6],
    )
    assert len(out) == 7
    assert len(done("dump", "log", "orders", "--batches").splitlines()) == 4
    assert len(done("dump", "log", "orders", "--from", "2").splitlines()) == 4
    batches = [json.loads(line) for line in done("dump", "log", "orders", "--json").splitlines()]
    assert [record["offset"] for batch in batches for record in batch["records"]] == [0, 1, 2]
    assert batches[0]["records"][0]["headers"] == [["h", "x"]]
    assert batches[1]["position"] == batches[0]["size"] > 0
    for offset in range(4):
        later = [json.loads(line) for line in done("dump", "log", "orders", "--json", "--from", offset).splitlines()]
        assert later == batches[(0, 0, 1, 2)[offset] :]


def test_index_producers_and_journal(done):
    done("produce", "orders", "-t", "load", stdin=b"a\nb\n")
    assert done("dump", "index", "orders") == (
        "version: 0 producerId: 0 producerEpoch: 0 firstOffset: 0 lastOffset: 2 lastStableOffset: 3 outcome: COMMIT\n"
    )
    done("produce", "orders", stdin=b"c\n")
    with_batches, without = sorted(done("dump", "producers", "orders").splitlines(), key=len, reverse=True)
    assert re.fullmatch(
        r"producerId: 1 producerEpoch: 0 coordinatorEpoch: -1 currentTxnFirstOffset: OptionalLong.empty"
        r" lastTimestamp: \d+ firstSequence: 0 lastSequence: 0 lastOffset: 3 offsetDelta: 0 timestamp: \d+",
        with_batches,
    )
    assert without.startswith("producerId: 0 producerEpoch: 1 coordinatorEpoch: 0 ")
    states = [json.loads(line)["state"] for line in done("dump", "journal", "--json").splitlines()]
    assert states == ["Empty", "Ongoing", "PrepareCommit", "CompleteCommit"]
    second = done("dump", "journal", "-t", "load").splitlines()[1]
    assert second.startswith("| offset: 2 key: transaction_metadata::transactionalId=load payload: producerId=0,")
    assert "state=Ongoing" in second
    assert done("dump", "journal", "-t", "nobody") == ""
    assert "sentOffsets" not in done("dump", "journal")
    for part in ("index", "producers"):
        assert all(json.loads(line) for line in done("dump", part, "orders", "--json").splitlines())


def test_the_journal_tells_which_offsets_a_commit_made_take_effect(url, done):
    done("topics", "create", "orders")
    with Producer({"bootstrap.servers": url, "transactional.id": "load"}) as producer:
        producer.init_transactions()
        with Consumer({"bootstrap.servers": url, "group.id": "g"}) as consumer, producer.transaction():
            producer.send_offsets_to_transaction([TopicPartition("orders", 0, 7)], consumer.consumer_group_metadata())
    entries = [json.loads(line) for line in done("dump", "journal", "--json").splitlines()]
    told = {entry["state"]: entry["sentOffsets"] for entry in entries if "sentOffsets" in entry}
    assert told == {"CompleteCommit": {"g": [[1, 7]]}}
    assert done("dump", "journal").splitlines()[-1].endswith(',reason=EndTxn,sentOffsets={"g": [[1, 7]]}')


def test_a_long_log_is_printed_whole(url, done):
    done("topics", "create", "orders")
    with open_store(url) as store:
        partition_id = store.read(lambda connection: get_topic(connection, "orders")).partition_id(0)
        batch = encode([Record(b"v")])
        store.write(lambda connection: append(connection, [Append(partition_id, batch) for _ in range(120)]))
    offsets = [json.loads(line)["baseOffset"] for line in done("dump", "log", "orders", "--json").splitlines()]
    assert offsets == list(range(120))


def test_a_damaged_batch_is_told_of_and_the_rest_is_printed(url, run, done):
    done("produce", "orders", stdin=b"a\n")
    done("produce", "orders", stdin=b"b\n")
    with open_store(url) as store:
        table = "txnstore_record_batches" if store.backend.name == "sqlite" else "txnstore.record_batches"
        store.write(
            lambda connection: connection.exec_driver_sql(f"UPDATE {table} SET crc = crc + 1 WHERE last_offset = 0")
        )
    ended = run("dump", "log", "orders")
    assert ended.code == 1
    assert "isvalid: false" in ended.out
    assert "payload: b" in ended.out
    assert ended.err == "txnstore: orders-0: 1 record batches are damaged\n"


def test_bad_calls(run, done):
    done("topics", "create", "orders")
    for arguments, code in (
        (["log"], 2),
        (["log", "nothing"], 1),
        (["log", "orders", "-p", "1"], 1),
        (["log", "orders", "-p", "-1"], 2),
        (["log", "orders", "--from", "-1"], 2),
        (["log", "orders", "--from", str(2**63)], 2),
        (["index", "nothing"], 1),
        (["producers", "\ud800"], 1),
        (["journal", "-t", "\ud800"], 1),
    ):
        ended = run("dump", *arguments)
        assert ended.code == code, (arguments, ended)
        assert "Traceback" not in ended.err
