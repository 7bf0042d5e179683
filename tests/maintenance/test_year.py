"""A year of use by clients that come and go, and nobody else: the tables are as large in its last months as before."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import psycopg
import pytest
from sqlalchemy import LargeBinary, Text, func, insert, select

from scripts.table_growth import GROWTH
from tests.tools.elsewhere import Elsewhere
from tests.tools.elsewhere import decide as decide_alone
from tests.tools.made_up_input import assert_sound_but_for_input
from tests.transactions.bench import sent_offsets
from txnstore import Consumer, Producer, TopicPartition
from txnstore.admin import AdminClient, NewTopic
from txnstore.clients import upkeep
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.opening import open_store
from txnstore.db.schema import metadata, outbox, outbox_sequencers
from txnstore.groups.coordinator import join
from txnstore.groups.group import MemberDetails, Report
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.log.topics import delete_topic, get_topic
from txnstore.maintenance.duties import branch_duties
from txnstore.maintenance.loop import Maintenance
from txnstore.model import NO_GENERATION, GroupMembership, PartitionName, Record
from txnstore.participants.branches import Branches
from txnstore.relay.options import relay_id_from, relay_id_to
from txnstore.relay.positions import RelayPosition, begin_relay_positions, move_relay_positions
from txnstore.spark import sink_coordination
from txnstore.spark.sink_coordination import decide, last_batch, open_writer
from txnstore.spark.sink_inputs import SinkInput, note_inputs
from txnstore.spark.sink_run import run_of_job, run_of_query
from txnstore.testing.postgres_server import connection_string
from txnstore.testing.store_databases import name_of_database
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.writers import append_as_writer, join_transaction

YEAR_DAYS = 364
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
PATIENCE_SECONDS = 60
KEYS = 5
#: Offsets and producer ids get another digit, in texts that hold some of them.
DIGITS = 1.1
#: How many rows each table has, and what those of its columns take whose values may grow.
SIZES = {
    str(table.name): select(
        func.count().label("rows"),
        *(
            func.coalesce(func.sum(func.length(column)), 0).label(column.name)
            for column in table.c
            if isinstance(column.type, Text | LargeBinary)
        ),
    ).select_from(table)
    for table in metadata.tables.values()
}


class Application:
    """Programs that run for a moment each, some of them under a new name every time."""

    def __init__(self, url, clock, store, participant=None):
        self.url = url
        self.clock = clock
        self.store = store
        self.participant = participant
        self.configuration = {"bootstrap.servers": url, "txnstore.clock": clock}
        self.used = set()

    def live(self, number):
        """Do what is done between two looks at the tables."""
        programs = (
            self.steady_producer,
            self.plain_producer,
            self.reader,
            self.mover,
            self.topics,
            self.rows,
            self.sinks,
            self.relay,
            self.silent_members,
            self.elsewhere,
            self.crash,
            self.decided,
            self.bank,
            self.plain_producer,
            self.recovery,
        )
        for program in programs:
            program(number)
            self.used |= {table for (table, column), size in self.sizes().items() if column == "rows" and size}
            self.clock.advance(HOUR_MS)

    def produce(self, producer, number):
        now_ms = self.clock.now_ms()
        producer.produce("events", f"{number:03}", timestamp=now_ms)
        value = None if number % 3 == 0 else f"{number:03}"
        producer.produce("states", value, key=str(number % KEYS), timestamp=now_ms)

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

    def reader(self, number):
        usual = {"group.id": "steady", "auto.offset.reset": "earliest", "enable.auto.commit": False}
        with Consumer({**self.configuration, **usual}) as consumer:
            consumer.subscribe(["events"])
            message = consumer.poll(PATIENCE_SECONDS)
            assert message is not None
            consumer.commit(message, asynchronous=False)

    def mover(self, number):
        """Write and consume in one transaction, as a group and a producer that nobody knows yet."""
        name = f"mover-{number:03}"
        usual = {"group.id": name, "auto.offset.reset": "earliest", "enable.auto.commit": False}
        with (
            Consumer({**self.configuration, **usual}) as consumer,
            Producer({**self.configuration, "transactional.id": name}) as producer,
        ):
            consumer.subscribe(["events"])
            assert consumer.poll(PATIENCE_SECONDS) is not None
            producer.init_transactions(PATIENCE_SECONDS)
            with producer.transaction():
                self.produce(producer, number)
                producer.send_offsets_to_transaction(
                    consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), PATIENCE_SECONDS
                )

    def topics(self, number):
        admin = AdminClient(self.configuration)
        name = f"topic-{number:03}"
        admin.create_topics([NewTopic(name, 2)])[name].result(PATIENCE_SECONDS)
        with Producer(self.configuration) as producer:
            producer.produce(name, b"v", partition=1, timestamp=self.clock.now_ms())
        with Consumer({**self.configuration, "group.id": "steady-by-hand"}) as consumer:
            consumer.commit(offsets=[TopicPartition(name, 1, 1)], asynchronous=False)
        topic = self.store.read(partial(get_topic, name=name))
        (partition_id, _) = topic.partition_ids
        # A relay to Kafka, whose positions go with the topic.
        copied = {PartitionName(name, 1): RelayPosition(topic.topic_uuid, 1)}
        self.store.write(lambda connection: begin_relay_positions(connection, relay_id_to("kafka", "steady"), copied))
        note_inputs(self.store, [SinkInput("steady", "run", number, "steady-query", partition_id, 0, 1)])
        if number >= 2:
            old = f"topic-{number - 2:03}"
            if number % 2 == 0:
                admin.delete_topics([old])[old].result(PATIENCE_SECONDS)
            else:
                # It goes away before it has deleted the records.
                self.store.write(partial(delete_topic, name=old))

    def rows(self, number):
        # In database transactions of their own: those of one are refused together.
        for topic in ("events", "no/topic"):
            row = {"topic": topic, "value": b"row"}
            self.store.write(lambda connection, row=row: connection.execute(insert(outbox), [row]))

    def sinks(self, number):
        self.commit(run_of_query("steady", "run"), number)
        self.commit(run_of_query(f"query-{number:03}", "run"), 0)
        self.commit(run_of_job(f"job-{number:03}"), 0)

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

    def relay(self, number):
        """Copy from a topic of Kafka's that stays."""
        relay_id, copied = relay_id_from("kafka", "steady"), PartitionName("copied", 0)
        begun = {copied: RelayPosition("0" * 36, 0)}
        self.store.write(lambda connection: begin_relay_positions(connection, relay_id, begun))
        moves = {copied: (number, number + 1)}
        self.store.write(lambda connection: move_relay_positions(connection, relay_id, moves))

    def silent_members(self, number):
        """Die as a member, without a word."""
        details = MemberDetails("client", 45_000, ("events",), frozenset({"events"}), ("range",))
        for group_id in ("steady", f"silent-{number:03}"):
            joining = Report(GroupMembership(group_id, NO_GENERATION, f"member-{number:03}"), 1)
            self.store.write(lambda connection, joining=joining: join(connection, joining, details))

    def elsewhere(self, number):
        """Send offsets as to a group that lives in another database."""
        coordinator = TransactionCoordinator(self.store, Elsewhere(self.store))
        name = f"elsewhere-{number:03}"
        producer = coordinator.init_producer_id(name, 60_000).identity
        coordinator.send_offsets(name, producer, sent_offsets(name, {self.events: 1}))
        coordinator.end_transaction(name, producer, commit=True)

    def begin(self, name):
        """Begin a transaction with a record."""
        coordinator = TransactionCoordinator(self.store)
        producer = coordinator.init_producer_id(name, 60_000).identity
        coordinator.append(name, producer, [self.append(producer)])
        return coordinator, producer

    def append(self, producer):
        record = Record(b"abandoned", timestamp_ms=self.clock.now_ms())
        return Append(self.events, encode([record], producer=producer, base_sequence=0, is_transactional=True))

    def crash(self, number):
        """Leave a transaction open, of several writers and with offsets."""
        name = f"crashed-{number:03}"
        coordinator, producer = self.begin(name)
        coordinator.send_offsets(name, producer, sent_offsets(name, {self.events: 1}))
        writer = join_transaction(self.store, name, producer)
        append_as_writer(self.store, writer, [self.append(writer.identity)])

    def decided(self, number):
        """Go away between the decision and the markers."""
        name = f"decided-{number:03}"
        _, producer = self.begin(name)
        decide_alone(self.store, name, producer, commit=True)

    def bank(self, number):
        """Let another database take part, once to the end, and once until it has voted."""
        if self.participant is None:
            return
        statement = f"INSERT INTO account VALUES ({number})"
        conninfo = connection_string(self.participant)
        with (
            closing(psycopg.connect(conninfo)) as driver,
            Producer({**self.configuration, "transactional.id": f"bank-{number:03}"}) as producer,
        ):
            producer.init_transactions(PATIENCE_SECONDS)
            with producer.transaction():
                producer.enlist(driver)
                driver.execute(statement)
                self.produce(producer, number)
        name = f"voted-{number:03}"
        identity = TransactionCoordinator(self.store).init_producer_id(name, 60_000).identity
        with closing(psycopg.connect(conninfo)) as driver:
            branches = Branches(self.store, name)
            branches.enlist(driver)
            driver.execute(statement)
            branches.prepare(identity)

    def recovery(self, number):
        """Do what `txnstore maintain --participant` does."""
        if self.participant is not None:
            maintenance = Maintenance(self.store, duties=branch_duties([self.participant]))
            assert list(maintenance.run_once().values()) == [1]
            assert maintenance.failed == {}

    @property
    def events(self):
        return self.store.read(partial(get_topic, name="events")).partition_ids[0]

    def sizes(self):
        """Return the number of rows by table, and what is in its columns by table and column."""

        def count(connection):
            return {
                (table, column): size
                for table, statement in SIZES.items()
                for column, size in connection.execute(statement).mappings().one().items()
            }

        return self.store.read(count)


@pytest.fixture
def participant(url, request):
    """Another database, where the store is in PostgreSQL."""
    if url.startswith("sqlite"):
        yield None
        return
    server = request.getfixturevalue("txnstore_postgres_server")
    name = name_of_database("test_year")
    server.create_database(name)
    with server.connect(name) as connection:
        connection.execute("CREATE TABLE account (number int)")
    yield server.url(name)
    server.drop_database(name)


@pytest.mark.slow
# Each step begins fifty sessions.
@pytest.mark.crashes
@pytest.mark.parametrize(
    ("txnstore_url", "step_days"),
    # What is due at which age is the same statements' on both: that it is done is seen by months.
    [pytest.param("sqlite", 14, id="sqlite-by fortnights"), pytest.param("postgresql", 28, id="postgresql-by months")],
    indirect=["txnstore_url"],
)
def test_in_a_year_of_clients_that_come_and_go_no_table_grows(url, clock, monkeypatch, participant, step_days):
    # There is time for what is due, however slow the machine is; with less of it more clients would have to come.
    monkeypatch.setattr(upkeep, "_next_looks", {})
    monkeypatch.setattr(upkeep, "PARTING_WAIT_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(upkeep, "PARTING_TURN_SECONDS", PATIENCE_SECONDS)
    # As many as a query that goes on leaves, or it would come to them late in the year.
    monkeypatch.setattr(sink_coordination, "BATCHES_KEPT", 4)
    with open_store(url, clock=clock) as store:
        texts = {"txnstore.sink.retention.ms": str(30 * DAY_MS)}
        store.write(lambda connection: change_store_settings(connection, texts))
        application = Application(url, clock, store, participant)
        admin = AdminClient(application.configuration)
        compacted = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.1"}
        topics = [NewTopic("events", 1), NewTopic("states", 1, config=compacted)]
        for future in admin.create_topics(topics).values():
            future.result(PATIENCE_SECONDS)
        sizes = []
        for number in range(YEAR_DAYS // step_days):
            began_ms = clock.now_ms()
            application.live(number)
            sizes.append(application.sizes())
            clock.advance(step_days * DAY_MS - (clock.now_ms() - began_ms))
        assert_sound_but_for_input(store)
        assert store.read(partial(last_batch, sink_id="query:steady")) == len(sizes) - 1
        moved = store.read(lambda connection: connection.execute(select(outbox_sequencers.c.sequenced_count)).scalar())
        assert moved is not None
        assert moved >= len(sizes) - 1
    # After two months the oldest of everything has gone.
    first, half = 60 // step_days + 1, len(sizes) // 2
    grown = {}
    for what in sizes[0]:
        early = max(size[what] for size in sizes[first : half + 1])
        late = max(size[what] for size in sizes[half + 1 :])
        if late > early * (1 if what[1] == "rows" else DIGITS):
            grown[what] = (early, late, [size[what] for size in sizes])
    assert grown == {}
    # A database alone notes no deleted numbers, and SQLite has no branches of others.
    unused = {"deleted_numbers"} | ({"transaction_branches"} if participant is None else set())
    assert set(GROWTH) - application.used == unused


def test_what_nobody_looks_after_grows(url, clock):
    """The test above would see it."""
    with open_store(url, clock=clock) as store:
        application = Application(url, clock, store)
        application.configuration["txnstore.maintenance"] = False
        sizes = []
        application.steady_producer(0)
        for number in range(2):
            application.mover(number)
            sizes.append(application.sizes())
            clock.advance(14 * DAY_MS)
    grown = [
        ("record_batches", "rows"),
        ("transactions", "rows"),
        ("transaction_log", "rows"),
        ("producer_states", "recent_batches"),
    ]
    assert all(sizes[1][what] > sizes[0][what] for what in grown)
