"""What each call touches of a store that has been in use for years: no more than of a new one.

The calls are made as always, and every statement that they come to is measured: one that is added later is measured,
too.  What a call may touch does not depend on how much there is.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, update

from tests.clients.steps import PATIENCE_SECONDS
from tests.plans.big_store import (
    ABORTED,
    COPIES,
    FORMER_PRODUCER_ID,
    OPEN_OFFSET,
    OPEN_PRODUCER_ID,
    PENDING_GROUP,
    BigStore,
)
from tests.plans.measuring import Touched, measured
from tests.tools.elsewhere import Elsewhere
from tests.transactions.bench import Producer as CoreProducer
from tests.transactions.bench import sent_offsets
from txnstore import Consumer, ConsumerGroupTopicPartitions, Producer, TopicCollection, TopicPartition
from txnstore.admin import AdminClient, OffsetSpec
from txnstore.db.backend import Subjects
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.cluster.locality import Locality
from txnstore.db.portions import Portions
from txnstore.db.schema import transactions
from txnstore.db.statements import HotStatement
from txnstore.db.store import Store
from txnstore.errors import TxnStoreError
from txnstore.groups import coordinator as group_coordinator
from txnstore.groups.administration import find_group, list_offsets
from txnstore.groups.group import MemberDetails, Report
from txnstore.groups.offsets import commit_offsets, read_offsets
from txnstore.log.append import Append, append, find_appended
from txnstore.log.bounds import offset_for_time, offset_of_max_timestamp, read_bounds
from txnstore.log.codec import encode
from txnstore.log.commit_order import (
    STRETCH_BATCHES,
    CommitPosition,
    fetch_in_commit_order,
    first_cut,
    last_commit_number,
)
from txnstore.log.fetch import PAGE_OFFSETS_MAX, Page, Room, fetch
from txnstore.log.news import OFFSETS_MAX, read_news, read_news_in_commit_order
from txnstore.log.outbox.rows import has_outbox_rows
from txnstore.log.topics import create_topic
from txnstore.maintenance.duties import DUTIES
from txnstore.maintenance.turns import MaintenanceDuty, Portion
from txnstore.model import NO_GENERATION, GroupMembership, IsolationLevel, OffsetAndMetadata, ProducerIdentity, Record
from txnstore.observability.store_figures import FigureLimits, read_cluster_figures
from txnstore.transactions.administration import OpenInPartition, abort_open_transaction
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.listing import describe_transaction, hanging_transactions
from txnstore.transactions.open_transactions import each_open_in
from txnstore.transactions.outcome import read_outcome, resolve_outcome
from txnstore.transactions.recovery import abort_timed_out, begin_anew, complete_all_decided
from txnstore.transactions.together import abort_together, complete_together
from txnstore.transactions.writers import append_as_writer, join_transaction, report_writer
from txnstore.verification.numbers import number_violations

pytestmark = pytest.mark.slow

COMMITTED, UNCOMMITTED = IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED
#: Gets ready, and returns what is measured.
_Call = Callable[[BigStore], Callable[[], object]]
_numbers = itertools.count(1)
#: How many transactions end together.
TOGETHER = 20
_OF_A_SEGMENT = "Relation Name: record_batches_"


@dataclass(frozen=True)
class Call:
    """A call that is measured, and what each of its statements may touch."""

    name: str
    run: _Call
    rows: int = 30
    """Rows or blocks on PostgreSQL."""
    instructions: int = 500
    """On SQLite."""


def _read(work: Callable[[BigStore, Connection], object]) -> _Call:
    return lambda big: lambda: big.store.read(partial(work, big))


def _write(work: Callable[[BigStore, Connection], object]) -> _Call:
    return lambda big: lambda: big.store.write(partial(work, big))


def _page(of: Callable[[BigStore], int], position: int, isolation: IsolationLevel = COMMITTED, **options: Any) -> _Call:
    return _read(lambda big, connection: fetch(connection, {of(big): position}, isolation=isolation, **options))


def _places(of: Callable[[BigStore], int], *position: int) -> _Call:
    """Read a page in commit order."""
    return _read(lambda big, connection: fetch_in_commit_order(connection, {of(big): CommitPosition(*position)}))


def _places_between(of: Callable[[BigStore], int], places: range) -> _Call:
    """Read a page that ends at a place."""

    def work(big: BigStore, connection: Connection) -> None:
        position, end_places = {of(big): CommitPosition(places.start)}, {of(big): places.stop}
        page = fetch_in_commit_order(connection, position, end_places=end_places)[of(big)]
        assert page.next_position == CommitPosition(places.stop)

    return _read(work)


def _cut(big: BigStore, connection: Connection) -> None:
    bounds = read_bounds(connection, [big.transactions])[big.transactions]
    assert first_cut(connection, bounds, range(50_000, 50_100), 0) is None


def _last_commit(*position: int) -> _Call:
    """Ask for the last transaction behind a reader of whole ones."""
    return _read(lambda big, connection: last_commit_number(connection, big.transactions, CommitPosition(*position)))


def _producer(big: BigStore) -> CoreProducer:
    producer = CoreProducer(TransactionCoordinator(big.store), f"producer {next(_numbers)}")
    producer.start()
    return producer


def _begun(big: BigStore) -> CoreProducer:
    producer = _producer(big)
    producer.send(big.transactions, b"a")
    producer.send_offsets("group 1", {big.plain: 1})
    return producer


def _first_append(big: BigStore) -> Callable[[], object]:
    return partial(_producer(big).send, big.transactions, b"a")


def _append_to_several(big: BigStore) -> Callable[[], object]:
    producer = _producer(big)
    batches = [producer.batch(partition_id, b"a") for partition_id in (big.transactions, big.plain)]
    return lambda: producer.coordinator.append(producer.transactional_id, producer.identity, batches)


def _further_append(big: BigStore) -> Callable[[], object]:
    return partial(_begun(big).send, big.transactions, b"b")


def _append(big: BigStore, connection: Connection) -> None:
    append(connection, [Append(big.plain, encode([Record(b"a")]))])


def _sent_offsets(big: BigStore) -> Callable[[], object]:
    return partial(_producer(big).send_offsets, "group 2", {big.plain: 1})


def _transaction_at_once(big: BigStore) -> Callable[[], object]:
    producer = _producer(big)
    return lambda: producer.commit(
        appends=[producer.batch(big.transactions, b"a")], offsets=[sent_offsets("group 3", {big.plain: 1})]
    )


def _init_again(big: BigStore) -> Callable[[], object]:
    return _begun(big).twin().start


def _decided(big: BigStore) -> Callable[[], object]:
    producer = _begun(big)
    producer.decide(commit=True)
    return lambda: complete_all_decided(big.store)


def _resolved(big: BigStore) -> Callable[[], object]:
    producer = _begun(big)
    return lambda: resolve_outcome(big.store, producer.transactional_id, producer.identity)


def _aborted_by_administrator(big: BigStore) -> Callable[[], object]:
    producer = _begun(big)
    return lambda: abort_open_transaction(big.store, OpenInPartition(big.transactions, producer.identity))


def _open_some(big: BigStore) -> list[CoreProducer]:
    """Open as many transactions as end together: each has a writer, and all have offsets of one group."""
    producers = [_producer(big) for _ in range(TOGETHER)]
    for producer in producers:
        producer.send(big.ended, b"a")
        producer.send_offsets(PENDING_GROUP, {big.plain: 1})
        writer = join_transaction(big.store, producer.transactional_id, producer.identity)
        batch = encode([Record(b"w")], producer=writer.identity, base_sequence=0, is_transactional=True)
        append_as_writer(big.store, writer, [Append(big.ended, batch)])
        report_writer(big.store, writer)
    return producers


def _aborted_together(big: BigStore, *, elsewhere: bool) -> Callable[[], object]:
    """Abort them for their age; with `elsewhere` their markers are for other databases, and then delivered there."""
    names = [producer.transactional_id for producer in _open_some(big)]
    be_old = update(transactions).where(transactions.c.transactional_id.in_(names)).values(start_ms=1)
    big.store.write(lambda connection: connection.execute(be_old))
    cluster = Elsewhere(big.store, sends_here=True) if elsewhere else None
    locality = Locality.of(big.store, cluster)

    def run() -> None:
        done = big.store.write(lambda connection: abort_together(names, locality, connection))
        assert list(done.aborted) == names
        assert list(done.pending) == (names if elsewhere else [])
        if elsewhere:
            assert list(complete_together(big.store, cluster, names).completed) == names

    return run


def _completed_together(big: BigStore, *, commit: bool) -> Callable[[], object]:
    """Deliver to other databases what decided transactions have left to them, and complete them."""
    producers = _open_some(big)
    for producer in producers:
        producer.decide(commit=commit)
    names = [producer.transactional_id for producer in producers]

    def run() -> None:
        assert list(complete_together(big.store, Elsewhere(big.store), names).completed) == names

    return run


def _found_again(big: BigStore) -> Callable[[], object]:
    producer = _producer(big)
    item = producer.batch(big.transactions, b"a")
    producer.commit(appends=[item])

    def look(connection: Connection) -> None:
        (found,) = find_appended(connection, [item])
        assert found.is_duplicate

    return lambda: big.store.read(look)


def _outcome_of(producer_id: int) -> _Call:
    return _read(lambda _, connection: read_outcome(connection, ProducerIdentity(producer_id, 0)))


def _unknown_outcome(big: BigStore) -> Callable[[], object]:
    def ask() -> None:
        with pytest.raises(TxnStoreError):
            _outcome_of(900_000)(big)()

    return ask


def _committed(big: BigStore, connection: Connection) -> None:
    offsets = {big.plain: OffsetAndMetadata(5), big.held_back: OffsetAndMetadata(6)}
    commit_offsets(connection, GroupMembership("simple"), offsets)


def _append_to(store: Store, partition_id: int) -> None:
    store.write(lambda connection: append(connection, [Append(partition_id, encode([Record(b"a")]))]))


def _report(group_id: str) -> Report:
    return Report(GroupMembership(group_id, NO_GENERATION, uuid.uuid4().hex), 1, frozenset())


_DETAILS = MemberDetails("client", 45_000, ("big",), frozenset({"big"}), ("range",))


def _joined(big: BigStore, connection: Connection) -> None:
    group_coordinator.join(connection, _report("group 4"), _DETAILS)


def _heartbeat(big: BigStore) -> Callable[[], object]:
    report = _report("group 5")
    answer = big.store.write(lambda connection: group_coordinator.join(connection, report, _DETAILS))
    again = Report(answer.membership, 2, frozenset())
    return lambda: big.store.write(lambda connection: group_coordinator.heartbeat(connection, again))


def _renewed(big: BigStore) -> Callable[[], object]:
    member = GroupMembership("group 6", 1, "member")

    def work(connection: Connection) -> None:
        assert group_coordinator.renew(connection, member)
        assert not group_coordinator.has_news(connection, member)

    return lambda: big.store.write(work)


def _of_time(behind_ms: int, of: Callable[[BigStore], int], isolation: IsolationLevel = COMMITTED) -> _Call:
    return _read(lambda big, connection: offset_for_time(connection, of(big), big.first_ms + behind_ms, isolation))


def _duty(duty: MaintenanceDuty, big: BigStore) -> Callable[[], object]:
    return lambda: duty.load()(Portion(big.store, None, Portions()))


def _wait(answers: Mapping[Any, Any]) -> None:
    for answer in answers.values():
        answer.result(PATIENCE_SECONDS)


def _client_of_producer(big: BigStore) -> Callable[[], object]:
    def run() -> None:
        name = f"client {next(_numbers)}"
        with Producer({"bootstrap.servers": big.url, "transactional.id": name}) as producer:
            producer.init_transactions(PATIENCE_SECONDS)
            for ends in (producer.commit_transaction, producer.abort_transaction):
                producer.begin_transaction()
                producer.produce(big.topic, b"v", partition=0)
                producer.flush(PATIENCE_SECONDS)
                ends(PATIENCE_SECONDS)

    return run


def _consumer(big: BigStore) -> Callable[[], object]:
    def run() -> None:
        usual = {"bootstrap.servers": big.url, "auto.offset.reset": "latest", "enable.partition.eof": True}
        with Consumer({**usual, "group.id": f"client {next(_numbers)}"}) as consumer:
            consumer.subscribe([big.topic])
            message = consumer.poll(PATIENCE_SECONDS)
            while message is not None and message.error() is None:
                message = consumer.poll(PATIENCE_SECONDS)
            consumer.commit(asynchronous=False, offsets=[TopicPartition(big.topic, 1, 5)])
            consumer.offsets_for_times([TopicPartition(big.topic, 1, big.first_ms + 200_000)], PATIENCE_SECONDS)
            consumer.get_watermark_offsets(TopicPartition(big.topic, 1), PATIENCE_SECONDS)

    return run


def _administrator(big: BigStore) -> Callable[[], object]:
    def run() -> None:
        admin = AdminClient({"bootstrap.servers": big.url})
        partition = TopicPartition(big.topic, 1)
        for spec in (OffsetSpec.earliest(), OffsetSpec.latest(), OffsetSpec.for_timestamp(big.first_ms + 77_000)):
            _wait(admin.list_offsets({partition: spec}))
        _wait(admin.describe_consumer_groups(["group 8"]))
        _wait(admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions("group 8")]))
        _wait(admin.describe_transactions(["id 0"]))
        _wait(admin.describe_topics(TopicCollection([big.topic])))

    return run


def _transactions(big: BigStore) -> int:
    return big.transactions


def _plain(big: BigStore) -> int:
    return big.plain


def _held_back(big: BigStore) -> int:
    return big.held_back


def _news(ends: Callable[[BigStore], Mapping[int, int]], isolation: IsolationLevel = COMMITTED) -> _Call:
    """Ask as a reader that waits does, but where statements are measured."""

    def work(big: BigStore, connection: Connection) -> None:
        def run(statement: HotStatement, parameters: Mapping[str, int]) -> list[Any]:
            return statement.rows(connection, parameters)

        assert read_news(run, ends(big), isolation, Room(10_000, 8 * 1024 * 1024)) is not None

    return _read(work)


def _news_by_place(ends: Callable[[BigStore], Mapping[int, int]], *, is_whole: bool = True) -> _Call:
    def work(big: BigStore, connection: Connection) -> None:
        def run(statement: HotStatement, parameters: Mapping[str, int]) -> list[Any]:
            return statement.rows(connection, parameters)

        positions = {partition_id: CommitPosition(place) for partition_id, place in ends(big).items()}
        found = read_news_in_commit_order(run, positions, Room(10_000, 8 * 1024 * 1024))
        assert (found is not None) is is_whole

    return _read(work)


def _all_ends(big: BigStore) -> dict[int, int]:
    return {big.transactions: 299_998, big.plain: 499_998, big.held_back: OPEN_OFFSET}


#: A page of 100 batches: their sizes, then they themselves.
PAGE = {"rows": 500, "instructions": 10_000}
#: The batches of as many offsets as one page looks at.
LONG_PAGE = {"rows": 5 * PAGE_OFFSETS_MAX, "instructions": 50 * PAGE_OFFSETS_MAX}
#: In commit order: the batches of a stretch, and those before it, each with a look at its transaction; and one more at
#: the number of its commit for each that comes.
STRETCH = {"rows": 5 * 2 * STRETCH_BATCHES, "instructions": 200 * STRETCH_BATCHES}

#: A time is found by halving the log: as many looks as its offsets have binary digits, one into each segment.
HALVING = {"rows": 900, "instructions": 3_000}

CALLS = [
    Call("append", _write(_append)),
    Call("first append of a transaction", _first_append),
    Call("first append of a transaction to several partitions", _append_to_several),
    Call("further append of a transaction", _further_append),
    Call("send offsets to a transaction", _sent_offsets),
    Call("commit", lambda big: _begun(big).commit),
    Call("abort", lambda big: _begun(big).abort),
    Call("a whole transaction in one commit", _transaction_at_once),
    Call("initialize a new producer", lambda big: partial(_producer, big)),
    Call("initialize a producer with an open transaction", _init_again),
    Call("bounds", _read(lambda big, connection: read_bounds(connection, [big.transactions, big.held_back]))),
    Call("page in the middle", _page(_plain, 250_000, records_max=100), **PAGE),
    Call("page of transactions", _page(_transactions, 50_000, records_max=100), **PAGE),
    Call("page of a reader that sees all", _page(_transactions, 50_000, UNCOMMITTED, records_max=100), **PAGE),
    Call("page of what was aborted", _page(_transactions, ABORTED.start * COPIES), **LONG_PAGE),
    Call("page below an open transaction", _page(_held_back, OPEN_OFFSET - 10)),
    Call("page at the last stable offset", _page(_held_back, OPEN_OFFSET)),
    Call("page at the end", _page(_plain, 499_990)),
    Call("places in the middle", _places(_plain, 250_000), **STRETCH),
    Call("places of transactions", _places(_transactions, 50_500), **STRETCH),
    Call("places where nothing was committed", _places(_transactions, ABORTED.start * COPIES + 1), **STRETCH),
    Call("places behind an open transaction", _places(_held_back, OPEN_OFFSET), **STRETCH),
    Call("places at the end", _places(_plain, 499_990), **STRETCH),
    Call("places within a transaction", _places(_transactions, 50_000, 49_500), **STRETCH),
    Call("few places", _places_between(_plain, range(250_000, 250_020)), rows=200, instructions=5_000),
    Call("what does not come at some places", _read(_cut), rows=200, instructions=5_000),
    Call("the commit behind a reader", _last_commit(50_000), rows=1_000, instructions=10_000),
    Call("news at the end", _news(lambda big: {big.plain: 499_998}), **PAGE),
    Call("news at the end of transactions", _news(lambda big: {big.transactions: 299_998}), **PAGE),
    Call("news of several partitions", _news(_all_ends), rows=OFFSETS_MAX + 100, instructions=50 * OFFSETS_MAX),
    Call("news of a reader that sees all", _news(lambda big: {big.plain: 499_998}, UNCOMMITTED), **PAGE),
    Call("news in commit order", _news_by_place(lambda big: {big.plain: 499_998}), **PAGE),
    Call(
        "news of a transaction that began long ago",
        _news_by_place(lambda big: {big.transactions: 299_998}, is_whole=False),
        rows=5 * OFFSETS_MAX,
        instructions=100 * OFFSETS_MAX,
    ),
    Call(
        "news in commit order of several partitions",
        _news_by_place(lambda big: {big.plain: 499_998, big.held_back: 199_998}),
        rows=OFFSETS_MAX + 50,
        instructions=50 * OFFSETS_MAX,
    ),
    Call("offset at the earliest time", _of_time(0, _plain), **HALVING),
    Call("offset at a time in the middle", _of_time(250_000, _plain), **HALVING),
    Call("offset at a time of the last records", _of_time(499_000, _plain), **HALVING),
    Call("offset at a time that held back records have", _of_time(100_000, _held_back), **HALVING),
    Call("the same for a reader that sees all", _of_time(100_000, _held_back, UNCOMMITTED), **HALVING),
    Call(
        "offset of the largest timestamp",
        _read(lambda big, connection: offset_of_max_timestamp(connection, big.held_back, UNCOMMITTED)),
        rows=900,
        instructions=5_000,
    ),
    Call("commit offsets", _write(_committed)),
    Call("committed offsets", _read(lambda big, connection: read_offsets(connection, "group 1", [big.plain]))),
    Call("join a group", _write(_joined)),
    Call("heartbeat", _heartbeat),
    Call("renewed lease and look for news", _renewed),
    Call("search for transactions that timed out", lambda big: partial(abort_timed_out, big.store)),
    # It reads the last 500.
    Call(
        "search for transactions of the future",
        lambda big: partial(begin_anew, big.store),
        rows=1_100,
        instructions=20_000,
    ),
    # A page further on may read the few that are left of the calls before by their names; there are 10,000.
    Call("search for decided transactions", _decided, rows=100),
    Call("batch whose answer was lost", _found_again),
    Call("outcome of an open transaction", _outcome_of(OPEN_PRODUCER_ID)),
    Call("outcome that only the journal knows", _outcome_of(FORMER_PRODUCER_ID + 5)),
    Call("outcome that nobody knows", _unknown_outcome),
    Call("outcome for good", _resolved),
    Call("abort by an administrator", _aborted_by_administrator),
    Call(
        "search for hanging transactions", _read(lambda big, connection: hanging_transactions(big.store, connection, 0))
    ),
    # A row joins seven tables, and there are those of the calls before, one each at most.
    Call("what holds readers back", lambda big: lambda: list(each_open_in(big.store)), rows=1_000, instructions=20_000),
    Call(
        "what holds readers of a partition back",
        lambda big: lambda: list(each_open_in(big.store, [big.held_back])),
        rows=60,
    ),
    Call("describe a transaction", _read(lambda _, connection: describe_transaction(connection, "id 0"))),
    Call("describe a group", _read(lambda _, connection: find_group(connection, "group 7"))),
    Call("producer", _client_of_producer),
    Call("administrator", _administrator, **HALVING),
    Call("offsets of a group", _read(lambda _, connection: list_offsets(connection, "group 7"))),
]


def _figures(big: BigStore) -> Callable[[], object]:
    limits = FigureLimits(partitions=100, group_partitions=100, lag_batches=100, counted_rows=100)
    with_cluster = Cluster(big.store, [], lambda *_: big.store)
    with_cluster.refresh()
    return lambda: read_cluster_figures(with_cluster, limits)


def _numbers_given_out(big: BigStore, connection: Connection) -> None:
    if big.store.backend.name == "postgresql":
        # As where there are so many partitions that it would take joining them with all batches for cheaper.
        connection.exec_driver_sql("SET LOCAL enable_nestloop = off")
    number_violations(big.store, connection)


CALLS += [
    # A duty looks at a few portions, however much is due.
    *(
        Call(duty.name, partial(_duty, duty), rows=5_000, instructions=100_000)
        for duty in DUTIES
        if "database" not in duty.name
    ),
    *(
        # Each has three rows of participants, and is found by its keys.
        Call(name, run, rows=20 * TOGETHER, instructions=300 * TOGETHER)
        for name, run in {
            "abort of many for their age": partial(_aborted_together, elsewhere=False),
            "abort of many over several databases": partial(_aborted_together, elsewhere=True),
            "completion of many commits over several databases": partial(_completed_together, commit=True),
            "completion of many aborts over several databases": partial(_completed_together, commit=False),
        }.items()
    ),
    # With the limits there are; a scrape touches a partition, an open transaction or a position once.
    Call("figures for a scrape", _figures, rows=500, instructions=20_000),
    # Each of six partitions may have its last batch in any segment.
    Call("numbers given out", _read(_numbers_given_out), rows=100),
    Call("look into the outbox", _read(lambda _, connection: has_outbox_rows(connection))),
    Call("consumer", _consumer, **HALVING),
]


@pytest.mark.parametrize(
    "known_after", [1_000, 301, None], ids=["with statistics", "of a third", "before there are any"]
)
def test_the_plan_that_a_waiting_reader_keeps_goes_by_the_key(
    txnstore_postgresql_store: Store, known_after: int | None
) -> None:
    """It is made once, mostly while the tables are still empty, and kept for what comes."""
    store = txnstore_postgresql_store
    (partition_id,) = store.write(lambda connection: create_topic(connection, "t")).partition_ids
    with closing(store.waiter(Subjects(frozenset([partition_id])))) as waiter:

        def ask(position: int) -> Page:
            found = read_news(waiter.rows, {partition_id: position}, COMMITTED, Room(100, 100_000))
            assert found is not None
            return found[partition_id]

        ask(0)
        listening: psycopg.Connection[Any] = vars(waiter)["_connection"]
        for number in range(1_000):
            _append_to(store, partition_id)
            if number % 100 == 0:
                ask(number)
            if number + 1 == known_after:
                listening.execute("VACUUM ANALYZE")
        assert len(ask(998).batches) == 2
        (name,) = vars(waiter)["_prepared"]
        kept = listening.execute("SELECT generic_plans, custom_plans FROM pg_prepared_statements").fetchall()
        assert kept == [(12, 0)]
        count = listening.execute("SELECT cardinality(parameter_types) FROM pg_prepared_statements").fetchone()
        assert count is not None
        listening.execute("SET plan_cache_mode = force_generic_plan")
        listening.execute("SET search_path = pg_catalog, pg_temp")
        rows = listening.execute(f"EXPLAIN EXECUTE {name}({', '.join(['0'] * count[0])})").fetchall()
        plan = "\n".join(row[0] for row in rows)
        # Over a bitmap where the server takes the table for small, as it may at any time: the key bounds that, too.
        assert len(re.findall(r"Index Scan (?:using|on) record_batches_\d_pk ", plan)) == 4, plan
        assert re.search(r"Index Cond: .*partition_id = \$\d.*last_offset >= \$\d.*last_offset < \$\d", plan)
        for index in ("finished_transactions_producer", "producer_states_open", "outbox_waiting"):
            assert f"using {index} " in plan, plan
        assert "Seq Scan on record_batches" not in plan


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_call_touches_what_it_is_about_and_nothing_else(big: BigStore, call: Call) -> None:
    database = big.store.backend.name
    run = call.run(big)
    with measured(database) as found:
        run()
    assert found
    limit = call.rows if database == "postgresql" else call.instructions
    # Who opens a file reads the list of its tables, which no log makes longer.
    assert_at_most(limit, [touched for touched in found if "FROM sqlite_master" not in touched.statement])


def assert_at_most(limit: int, found: list[Touched]) -> None:
    # On the way into the index of each segment there are three blocks, of those with many rows.
    beyond = [touched for touched in found if touched.count > limit + 3 * touched.plan.count(_OF_A_SEGMENT)]
    assert not beyond, "\n".join(f"more than {limit}: {touched}" for touched in beyond)
