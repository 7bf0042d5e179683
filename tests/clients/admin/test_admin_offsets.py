"""The offsets that the admin client finds: the beginning, the end, and by time."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from txnstore import IsolationLevel, KafkaError, KafkaException, TopicPartition
from txnstore.admin import AdminClient, EarliestSpec, LatestSpec, MaxTimestampSpec, OffsetSpec, TimestampSpec
from txnstore.clients.admin import records
from txnstore.db.opening import open_store
from txnstore.db.schema import partition_heads
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.locked_partitions import Marker, write_markers
from txnstore.log.partition_rows import allocate_producer_id
from txnstore.log.topics import create_topic
from txnstore.model import ControlType, ProducerIdentity, Record

PATIENCE_SECONDS = 60
COMMITTED, UNCOMMITTED = IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED


class Log:
    """A topic `a` of two partitions whose first one is written behind the client's back."""

    def __init__(self, store):
        self.store = store
        topic = store.write(lambda connection: create_topic(connection, "a", partition_count=2))
        self.partition_ids = topic.partition_ids
        self.partition_id = topic.partition_ids[0]
        self.producer = ProducerIdentity(store.write(allocate_producer_id), 0)

    def write(self, *timestamps_ms, transactional=False):
        records = [Record(b"", timestamp_ms=timestamp_ms) for timestamp_ms in timestamps_ms]
        if transactional:
            batch = encode(records, producer=self.producer, base_sequence=0, is_transactional=True)
        else:
            batch = encode(records)
        item = Append(self.partition_id, batch)
        self.store.write(lambda connection: append(connection, [item], coordinated=True))

    def write_both(self):
        items = [Append(partition_id, encode([Record(b"")])) for partition_id in self.partition_ids]
        self.store.write(lambda connection: append(connection, items, coordinated=True))

    def end(self, kind):
        self.producer = ProducerIdentity(self.producer.producer_id, self.producer.epoch + 1)
        marker = Marker(self.partition_id, self.producer, kind)
        self.store.write(lambda connection: write_markers(connection, [marker]))

    def cut(self, offset):
        statement = update(partition_heads).where(partition_heads.c.partition_id == self.partition_id)
        self.store.write(lambda connection: connection.execute(statement.values(log_start_offset=offset)))


@pytest.fixture
def log(url):
    with open_store(url) as store:
        yield Log(store)


@pytest.fixture
def admin(url):
    with AdminClient({"bootstrap.servers": url}) as admin:
        yield admin


def ask(admin, spec, isolation=UNCOMMITTED):
    """Return what is found in the first partition: offset and timestamp."""
    futures = admin.list_offsets({TopicPartition("a", 0): spec}, isolation_level=isolation)
    found = futures[TopicPartition("a", 0)].result(PATIENCE_SECONDS)
    assert found.leader_epoch is None
    return found.offset, found.timestamp


def test_an_empty_partition_begins_and_ends_at_0_and_has_no_record(admin, log):
    for isolation in (COMMITTED, UNCOMMITTED):
        assert ask(admin, OffsetSpec.earliest(), isolation) == (0, -1)
        assert ask(admin, OffsetSpec.latest(), isolation) == (0, -1)
        assert ask(admin, OffsetSpec.max_timestamp(), isolation) == (-1, -1)
        assert ask(admin, OffsetSpec.for_timestamp(0), isolation) == (-1, -1)


def test_the_end_of_a_reader_of_committed_records_is_the_last_stable_offset(admin, log):
    log.write(10, 20)
    log.write(30, 40, transactional=True)
    log.write(50)
    assert ask(admin, OffsetSpec.latest()) == (5, -1)
    assert ask(admin, OffsetSpec.latest(), UNCOMMITTED) == (5, -1)
    assert ask(admin, OffsetSpec.latest(), COMMITTED) == (2, -1)
    log.end(ControlType.COMMIT)
    assert ask(admin, OffsetSpec.latest(), COMMITTED) == (6, -1)


def test_the_beginning_moves_with_the_log(admin, log):
    log.write(10, 20, 30)
    log.cut(2)
    assert ask(admin, OffsetSpec.earliest()) == (2, -1)
    assert ask(admin, OffsetSpec.for_timestamp(0)) == (2, 30)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("timestamp", "found"), [(-1, (0, 10)), (0, (0, 10)), (10, (0, 10)), (11, (1, 30)), (30, (1, 30)), (31, (-1, -1))]
)
def test_a_time_finds_the_first_record_of_it_or_later(admin, log, timestamp, found):
    log.write(10, 30)
    log.write(20)
    assert ask(admin, OffsetSpec.for_timestamp(timestamp)) == found


def test_the_largest_timestamp_is_a_records_and_not_a_markers(admin, log):
    log.write(10, 70)
    log.write(70, 20)
    assert ask(admin, OffsetSpec.max_timestamp()) == (1, 70)
    log.write(90, transactional=True)
    assert ask(admin, OffsetSpec.max_timestamp()) == (4, 90)
    assert ask(admin, OffsetSpec.max_timestamp(), COMMITTED) == (1, 70)
    # The marker has the store's time, which is later than all of them.
    log.end(ControlType.ABORT)
    assert ask(admin, OffsetSpec.max_timestamp(), COMMITTED) == (4, 90)


def test_the_largest_timestamp_is_of_what_can_still_be_read(admin, log):
    log.write(90)
    log.write(50, 10)
    log.cut(1)
    assert ask(admin, OffsetSpec.max_timestamp()) == (1, 50)
    log.cut(2)
    assert ask(admin, OffsetSpec.max_timestamp()) == (2, 10)
    # Below the 50 that its batch once had, which nobody reads any more.
    log.write(30)
    assert ask(admin, OffsetSpec.max_timestamp()) == (3, 30)
    log.write(30)
    assert ask(admin, OffsetSpec.max_timestamp()) == (3, 30)


def test_several_partitions_are_asked_for_at_once_and_fail_alone(admin, log):
    log.write(10)
    wanted = {
        TopicPartition("a", 0): OffsetSpec.latest(),
        TopicPartition("a", 1): OffsetSpec.latest(),
        TopicPartition("a", 2): OffsetSpec.latest(),
        TopicPartition("nobody", 0): OffsetSpec.earliest(),
        TopicPartition("a b", 0): OffsetSpec.earliest(),
    }
    futures = admin.list_offsets(wanted)
    assert futures.keys() == wanted.keys()
    assert futures[TopicPartition("a", 0)].result(PATIENCE_SECONDS).offset == 1
    assert futures[TopicPartition("a", 1)].result(PATIENCE_SECONDS).offset == 0
    for partition in list(wanted)[2:]:
        error = futures[partition].exception(PATIENCE_SECONDS)
        assert isinstance(error, KafkaException)
        assert error.args[0] == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert admin.list_offsets({}) == {}


def test_offsets_of_several_partitions_are_of_one_instant(admin, log, monkeypatch):
    partitions = [TopicPartition("a", number) for number in range(2)]
    asked: list[object] = []

    def find(connection, *arguments):
        found = original(connection, *arguments)
        if not asked:
            # Both get a record at once, after the first one has been asked.
            log.write_both()
        asked.append(found)
        return found

    original = records._find
    monkeypatch.setattr(records, "_find", find)
    ends = admin.list_offsets({partition: OffsetSpec.latest() for partition in partitions})
    assert [ends[partition].result(PATIENCE_SECONDS).offset for partition in partitions] == [0, 0]
    ends = admin.list_offsets({partition: OffsetSpec.latest() for partition in partitions})
    assert [ends[partition].result(PATIENCE_SECONDS).offset for partition in partitions] == [1, 1]
    assert len(asked) == 4


@pytest.mark.variants_on_sqlite
@pytest.mark.parametrize("timestamp", [-2, "5", None, 1.5, True, 2**63], ids=ascii)
def test_what_is_no_timestamp_is_refused(admin, log, timestamp):
    partition = TopicPartition("a", 0)
    futures = admin.list_offsets({partition: OffsetSpec.for_timestamp(timestamp)})
    with pytest.raises(KafkaException) as raised:
        futures[partition].result(PATIENCE_SECONDS)
    assert raised.value.args[0].code() in {KafkaError._INVALID_ARG, KafkaError.INVALID_TIMESTAMP}


@pytest.mark.parametrize(
    ("offsets", "keywords", "error", "text"),
    [
        (None, {}, TypeError, "^Expected topic_partition_offsets to be dict"),
        ([], {}, TypeError, "^Expected topic_partition_offsets to be dict"),
        ({"a": OffsetSpec.latest()}, {}, TypeError, "^partition must be a TopicPartition$"),
        ({TopicPartition("a", 0): 5}, {}, TypeError, "^Value must be a OffsetSpec$"),
        ({TopicPartition("", 0): OffsetSpec.latest()}, {}, ValueError, "^partition topic name cannot be empty$"),
        ({TopicPartition("a", -1): OffsetSpec.latest()}, {}, ValueError, "^partition index must be non-negative$"),
        (
            {TopicPartition("a", 0): OffsetSpec.latest()},
            {"isolation_level": 1},
            TypeError,
            "^isolation_level argument should be an IsolationLevel$",
        ),
    ],
)
def test_list_offsets_refuses_wrong_arguments(tmp_path, offsets, keywords, error, text):
    with AdminClient({"bootstrap.servers": f"sqlite:///{tmp_path}/log.db"}) as admin:
        with pytest.raises(error, match=text):
            admin.list_offsets(offsets, **keywords)
        assert admin._connection.opened is None


def test_specs_are_what_confluent_kafkas_are():
    assert OffsetSpec.earliest() is OffsetSpec.earliest()
    kinds = [OffsetSpec.earliest(), OffsetSpec.latest(), OffsetSpec.max_timestamp(), OffsetSpec.for_timestamp(7)]
    assert [type(spec) for spec in kinds] == [EarliestSpec, LatestSpec, MaxTimestampSpec, TimestampSpec]
    assert [spec._value for spec in kinds] == [-2, -1, -3, 7]
    assert sorted(kinds) == [kinds[2], kinds[0], kinds[1], kinds[3]]
    assert OffsetSpec.for_timestamp(7).timestamp == 7
    with pytest.raises(TypeError, match="for_timestamp"):
        OffsetSpec()
    with pytest.raises(TypeError):
        assert OffsetSpec.latest() < 5
