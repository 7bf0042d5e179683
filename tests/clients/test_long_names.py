"""The longest names that are taken are kept by both databases; no entry of an index is too long for one of them."""

from __future__ import annotations

import random

import pytest
from sqlalchemy import Index, PrimaryKeyConstraint, UniqueConstraint

from tests.clients.steps import PATIENCE_SECONDS, create_topic
from txnstore import Consumer, KafkaError, KafkaException, Producer
from txnstore.admin import AdminClient
from txnstore.db.schema import metadata
from txnstore.model import NAME_BYTES_MAX
from txnstore.spark.sink_run import RUN_ID_BYTES_MAX

#: What an entry of an index may have on PostgreSQL.
ENTRY_BYTES_MAX = 2_704
_HEAD_BYTES = 8
_ALIGNMENT_BYTES = 8
#: By column: how long its text may be. A member's id is a client's with a UUID.
BYTES_MAX = {
    "transactional_id": NAME_BYTES_MAX,
    "group_id": NAME_BYTES_MAX,
    "member_id": NAME_BYTES_MAX + 37,
    "sink_id": NAME_BYTES_MAX + len("query:"),
    "run_id": RUN_ID_BYTES_MAX,
    "topic": 249,
    # A Kafka cluster's id is a UUID.
    "relay_id": 200,
    # A host and a port with a database's name, or that of a file.
    "label": 600,
    # Names of our own.
    **dict.fromkeys(("duty", "name", "gid", "database_identity"), 300),
}


def name_of(bytes_max: int) -> str:
    """Return a name of so many bytes that cannot be compressed."""
    chosen = random.Random(bytes_max)
    return "".join(chr(chosen.randrange(0x10000, 0x110000)) for _ in range(bytes_max // 4))


@pytest.mark.parametrize("table", metadata.sorted_tables, ids=str)
def test_every_entry_of_an_index_fits(table):
    keys = [each for each in table.constraints if isinstance(each, PrimaryKeyConstraint | UniqueConstraint)]
    for index in [*keys, *(each for each in table.indexes if isinstance(each, Index))]:
        size = _HEAD_BYTES
        for column in index.columns:
            kind = column.type.compile().upper()
            text_bytes = 4 + BYTES_MAX[column.name] if kind in ("TEXT", "VARCHAR") else 16
            size += -(-text_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        assert size <= ENTRY_BYTES_MAX, index.name


def test_the_longest_names_are_kept(url):
    create_topic(url, "t")
    longest = name_of(NAME_BYTES_MAX)
    assert len(longest.encode()) == NAME_BYTES_MAX
    usual = {"bootstrap.servers": url, "client.id": longest}
    transactional = {"transactional.id": longest, "txnstore.transaction.group": name_of(NAME_BYTES_MAX - 100)}
    with (
        Producer({**usual, **transactional}) as producer,
        Consumer(
            {**usual, "group.id": longest, "auto.offset.reset": "earliest", "enable.auto.commit": False}
        ) as consumer,
    ):
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        producer.produce("t", b"a")
        producer.commit_transaction(PATIENCE_SECONDS)
        consumer.subscribe(["t"])
        message = consumer.poll(PATIENCE_SECONDS)
        assert message is not None
        assert message.value() == b"a"
        producer.begin_transaction()
        producer.produce("t", b"b")
        # What is sent before the commit is listed: both names stand in one entry.
        assert producer.flush(PATIENCE_SECONDS) == 0
        producer.send_offsets_to_transaction(
            consumer.position(consumer.assignment()), consumer.consumer_group_metadata()
        )
        producer.commit_transaction(PATIENCE_SECONDS)
        (committed,) = consumer.committed(consumer.assignment(), PATIENCE_SECONDS)
        assert committed.offset == 2


def test_a_byte_more_is_refused_where_it_is_given(url):
    longer = f"{name_of(NAME_BYTES_MAX)}a"
    for key in ("client.id", "transactional.id"):
        with pytest.raises(KafkaException, match=f'"{key}": longer than 1200 bytes of UTF-8') as refused:
            Producer({"bootstrap.servers": url, key: longer})
        assert refused.value.args[0].code() == KafkaError._INVALID_ARG
    for key in ("group.id", "group.instance.id"):
        with pytest.raises(KafkaException, match=f'"{key}": longer than 1200 bytes of UTF-8'):
            Consumer({"bootstrap.servers": url, "group.id": "g", key: longer})
    with AdminClient({"bootstrap.servers": url}) as admin:
        for future, code in (
            (admin.fence_producers([longer])[longer], KafkaError.INVALID_REQUEST),
            (admin.describe_consumer_groups([longer])[longer], KafkaError.INVALID_GROUP_ID),
        ):
            with pytest.raises(KafkaException, match="1200 bytes of UTF-8, not 1201") as refused:
                future.result(PATIENCE_SECONDS)
            assert refused.value.args[0].code() == code
