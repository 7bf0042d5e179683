"""A year of use by clients that come and go, and nobody else: the tables are as large in its last months as before."""

from __future__ import annotations

from functools import partial

import pytest
from sqlalchemy import func, insert, select

from scripts.table_growth import GROWTH
from tests.tools.made_up_input import assert_sound_but_for_input
from txnstore import Consumer, Producer, TopicPartition
from txnstore.admin import AdminClient, NewTopic
from txnstore.clients import upkeep
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.opening import open_store
from txnstore.db.schema import metadata, outbox, outbox_sequencers
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.log.topics import get_topic
from txnstore.model import Record
from txnstore.spark import sink_coordination
from txnstore.spark.sink_coordination import decide, last_batch, open_writer
from txnstore.spark.sink_inputs import SinkInput, note_inputs
from txnstore.spark.sink_run import run_of_job, run_of_query
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.writers import append_as_writer

YEAR_DAYS = 364
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
PATIENCE_SECONDS = 60
KEYS = 5
#: What grows with what the application itself makes, or only counts.
COUNTERS = {"outbox_sequencers"}


class Application:
    """Programs that run for a moment each, some of them under a new name every time."""

    def __init__(self, url, clock, store):
        self.url = url
        self.clock = clock
        self.store = store
        self.configuration = {"bootstrap.servers": url, "txnstore.clock": clock}

    def live(self, number):
        """Do what is done between two looks at the tables."""
        programs = (
            self.new_producer,
            self.steady_producer,
            self.plain_producer,
            self.readers,
            self.topics,
            self.rows,
            self.sinks,
            self.crash,
            self.plain_producer,
        )
        for program in programs:
            program(number)
            self.clock.advance(HOUR_MS)

    def produce(self, producer, number):
        now_ms = self.clock.now_ms()
        producer.produce("events", str(number), timestamp=now_ms)
        value = None if number % 3 == 0 else str(number)
        producer.produce("states", value, key=str(number % KEYS), timestamp=now_ms)

    def new_producer(self, number):
        with Producer({**self.configuration, "transactional.id": f"new-{number}"}) as producer:
            producer.init_transactions(PATIENCE_SECONDS)
            with producer.transaction():
                self.produce(producer, number)

    def steady_producer(self, number):
        with Producer({**self.configuration, "transactional.id": "steady"}) as producer:
            producer.init_transactions(PATIENCE_SECONDS)
            with producer.transaction():
                self.produce(producer, number + 1)
            producer.begin_transaction()
            self.produce(producer, number + 2)
            producer.flush(PATIENCE_SECONDS)
            producer.abort_transaction(PATIENCE_SECONDS)

    def plain_producer(self, number):
        with Producer(self.configuration) as producer:
            self.produce(producer, number)

    def readers(self, number):
        for group_id in ("steady", f"group-{number}"):
            usual = {"group.id": group_id, "auto.offset.reset": "earliest", "enable.auto.commit": False}
            with Consumer({**self.configuration, **usual}) as consumer:
                consumer.subscribe(["events"])
                message = consumer.poll(PATIENCE_SECONDS)
                assert message is not None
                consumer.commit(message, asynchronous=False)

    def topics(self, number):
        admin = AdminClient(self.configuration)
        name = f"topic-{number}"
        admin.create_topics([NewTopic(name, 2)])[name].result(PATIENCE_SECONDS)
        with Producer(self.configuration) as producer:
            producer.produce(name, b"v", partition=1, timestamp=self.clock.now_ms())
        with Consumer({**self.configuration, "group.id": "steady-by-hand"}) as consumer:
            consumer.commit(offsets=[TopicPartition(name, 1, 1)], asynchronous=False)
        (partition_id, _) = self.store.read(partial(get_topic, name=name)).partition_ids
        note_inputs(self.store, [SinkInput("steady", "run", number, "steady-query", partition_id, 0, 1)])
        if number >= 2:
            old = f"topic-{number - 2}"
            admin.delete_topics([old])[old].result(PATIENCE_SECONDS)

    def rows(self, number):
        # In database transactions of their own: those of one are refused together.
        for topic in ("events", "no/topic"):
            row = {"topic": topic, "value": b"row"}
            self.store.write(lambda connection, row=row: connection.execute(insert(outbox), [row]))

    def sinks(self, number):
        self.commit(run_of_query("steady", "run"), number)
        self.commit(run_of_query(f"query-{number}", "run"), 0)
        self.commit(run_of_job(f"job-{number}"), 0)

    def commit(self, run, batch_id):
        writer = open_writer(self.store, run, batch_id)
        assert writer is not None
        batch = encode(
            [Record(b"sink", timestamp_ms=self.clock.now_ms())],
            producer=writer.identity,
            base_sequence=0,
            is_transactional=True,
        )
        append_as_writer(self.store, writer, [Append(self.events, batch)], report=True)
        assert decide(self.store, run, batch_id, [writer.writer_id])

    def crash(self, number):
        """Leave a transaction open."""
        coordinator = TransactionCoordinator(self.store)
        name = f"crashed-{number}"
        producer = coordinator.init_producer_id(name, 60_000).identity
        record = Record(b"abandoned", timestamp_ms=self.clock.now_ms())
        batch = encode([record], producer=producer, base_sequence=0, is_transactional=True)
        coordinator.append(name, producer, [Append(self.events, batch)])

    @property
    def events(self):
        return self.store.read(partial(get_topic, name="events")).partition_ids[0]

    def sizes(self):
        def count(connection):
            return {
                str(table.name): connection.execute(select(func.count()).select_from(table)).scalar_one()
                for table in metadata.tables.values()
            }

        return self.store.read(count)


@pytest.mark.slow
# Each step begins fifty sessions.
@pytest.mark.crashes
@pytest.mark.parametrize(
    ("txnstore_url", "step_days"),
    # What is due at which age is the same statements' on both: that it is done is seen by months.
    [pytest.param("sqlite", 14, id="sqlite-by fortnights"), pytest.param("postgresql", 28, id="postgresql-by months")],
    indirect=["txnstore_url"],
)
def test_in_a_year_of_clients_that_come_and_go_no_table_grows(url, clock, monkeypatch, step_days):
    # There is time for what is due, however slow the machine is; with less of it more clients would have to come.
    monkeypatch.setattr(upkeep, "_next_looks", {})
    monkeypatch.setattr(upkeep, "PARTING_WAIT_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(upkeep, "PARTING_TURN_SECONDS", PATIENCE_SECONDS)
    # As many as a query that goes on leaves, or it would come to them late in the year.
    monkeypatch.setattr(sink_coordination, "BATCHES_KEPT", 4)
    with open_store(url, clock=clock) as store:
        texts = {"txnstore.sink.retention.ms": str(30 * DAY_MS)}
        store.write(lambda connection: change_store_settings(connection, texts))
        application = Application(url, clock, store)
        admin = AdminClient(application.configuration)
        compacted = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.1"}
        topics = [NewTopic("events", 1), NewTopic("states", 1, config=compacted)]
        for future in admin.create_topics(topics).values():
            future.result(PATIENCE_SECONDS)
        sizes = []
        for number in range(YEAR_DAYS // step_days):
            application.live(number)
            sizes.append(application.sizes())
            clock.advance(step_days * DAY_MS - 9 * HOUR_MS)
        assert_sound_but_for_input(store)
        assert store.read(partial(last_batch, sink_id="query:steady")) == len(sizes) - 1
        moved = store.read(lambda connection: connection.execute(select(outbox_sequencers.c.sequenced_count)).scalar())
        assert moved is not None
        assert moved >= len(sizes) - 1
    # After two months the oldest of everything has gone.
    first, half = 60 // step_days + 1, len(sizes) // 2
    grown = {}
    for table in GROWTH:
        early = max(size[table] for size in sizes[first : half + 1])
        late = max(size[table] for size in sizes[half + 1 :])
        if late > early:
            grown[table] = (early, late, [size[table] for size in sizes])
    assert grown == {}
    used = {table for table in GROWTH if any(size[table] for size in sizes)}
    assert used >= {
        "record_batches", "producer_states", "finished_transactions", "partition_storage", "transactions", "groups",
        "transaction_log", "group_offsets", "outbox", "sink_batches", "sink_runs", "sink_positions", "topics",
        "maintenance_duties",
    }  # fmt: skip


def test_what_nobody_looks_after_grows(url, clock):
    """The test above would see it."""
    with open_store(url, clock=clock) as store:
        application = Application(url, clock, store)
        application.configuration["txnstore.maintenance"] = False
        sizes = []
        for number in range(2):
            application.new_producer(number)
            sizes.append(application.sizes())
            clock.advance(14 * DAY_MS)
    assert all(sizes[1][table] > sizes[0][table] for table in ("record_batches", "transactions", "transaction_log"))
