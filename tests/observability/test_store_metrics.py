"""The metrics of a store: exact after a known history, bounded in number, and told whatever becomes of the store."""

from __future__ import annotations

import logging
import threading
from functools import partial

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import event, insert, text, update

from tests.observability.conftest import PATIENCE_SECONDS, scraped
from tests.tools.proxy import Proxy, upstream_of
from tests.transactions.bench import Producer
from txnstore import Consumer
from txnstore import Producer as Client
from txnstore.db.portions import Portions
from txnstore.db.schema import maintenance_duties, outbox, partition_heads, stores
from txnstore.groups.administration import alter_offsets
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.outbox.sequencer import drain_outbox
from txnstore.log.topics import create_topic
from txnstore.maintenance.duties import ABORT_INTERVAL, DUTIES
from txnstore.maintenance.turns import take_turn
from txnstore.model import OffsetAndMetadata, Record
from txnstore.observability import metrics
from txnstore.observability.metric_table import STORE_METRICS
from txnstore.observability.metrics import StoreCollector
from txnstore.observability.store_figures import FigureLimits, read_cluster_figures
from txnstore.transactions.coordinator import TransactionCoordinator


@pytest.fixture
def store(url, txnstore_open):
    return txnstore_open(url)


@pytest.fixture
def orders(store):
    """The partitions of a topic."""
    return store.write(lambda connection: create_topic(connection, "orders", partition_count=2)).partition_ids


@pytest.fixture
def started(store):
    def started(transactional_id, *arguments, **options):
        producer = Producer(TransactionCoordinator(store), transactional_id)
        producer.start(*arguments, **options)
        return producer

    return started


def write(store, partition_id, *values):
    batch = encode([Record(value) for value in values])
    store.write(lambda connection: append(connection, [Append(partition_id, batch)]))


def commit_offsets(store, group_id, offsets):
    by_partition = {partition_id: OffsetAndMetadata(offset) for partition_id, offset in offsets.items()}
    store.write(lambda connection: alter_offsets(connection, group_id, by_partition))


def test_a_new_store_has_nothing_to_tell_of_but_that_it_is_up(collect):
    told = collect()
    assert told["txnstore_up"] == {(): 1}
    assert told["txnstore_open_transactions"] == {("Decided",): 0, ("Ongoing",): 0}
    assert told["txnstore_series_left_out"] == {("group_partitions",): 0, ("partitions",): 0}
    assert all(size > 0 for what, size in told["txnstore_storage_bytes"].items() if what != ("wal_file",))
    silent = {metric.name for metric in STORE_METRICS} - told.keys()
    assert all(name.startswith(("txnstore_partition_", "txnstore_group_")) for name in silent)


def test_who_holds_back_readers_and_for_how_long(collect, store, orders, started, clock):
    write(store, orders[0], b"a", b"b")
    first, second = started("first", 600_000), started("second", 600_000)
    first.send(orders[0], b"c")
    clock.advance(30_000)
    second.send(orders[0], b"d", b"e")
    clock.advance(12_500)
    # It is as old as its beginning, whatever it has written since.
    first.send(orders[1], b"f")
    told = collect()
    place = ("0", "orders")
    assert told["txnstore_partition_log_start_offset"][place] == 0
    assert told["txnstore_partition_high_watermark"] == {("0", "orders"): 5, ("1", "orders"): 1}
    assert told["txnstore_partition_lso_lag_offsets"] == {("0", "orders"): 3, ("1", "orders"): 1}
    assert told["txnstore_partition_lso_age_seconds"] == {("0", "orders"): 42.5, ("1", "orders"): 42.5}
    holders = {(number, str(first.identity.producer_id), "orders", "first"): 42.5 for number in ("0", "1")}
    assert told["txnstore_partition_lso_holder_age_seconds"] == holders
    assert told["txnstore_open_transactions"] == {("Decided",): 0, ("Ongoing",): 2}
    assert told["txnstore_oldest_transaction_age_seconds"] == {("Decided",): 0, ("Ongoing",): 42.5}

    first.abort()
    told = collect()
    assert told["txnstore_partition_lso_age_seconds"] == {("0", "orders"): 12.5, ("1", "orders"): 0}
    assert [labels[-1] for labels in told["txnstore_partition_lso_holder_age_seconds"]] == ["second"]

    second.decide(commit=True)
    clock.advance(1_000)
    told = collect()
    assert told["txnstore_open_transactions"] == {("Decided",): 1, ("Ongoing",): 0}
    assert told["txnstore_oldest_transaction_age_seconds"][("Decided",)] == 13.5
    assert [labels[-1] for labels in told["txnstore_partition_lso_holder_age_seconds"]] == ["second"]


def test_a_transaction_without_a_deadline_is_the_oldest_once_it_has_written(collect, orders, started, clock):
    started("slow", enable_two_phase_commit=False).send(orders[1], b"a")
    clock.advance(5_000)
    assert collect()["txnstore_oldest_transaction_age_seconds"][("Ongoing",)] == 5


def test_an_open_transaction_that_no_coordinator_knows_is_told_without_a_name(collect, store, orders, started, clock):
    producer = started("lost", 600_000)
    producer.send(orders[0], b"a")
    clock.advance(9_000)
    store.write(lambda connection: connection.execute(text(f"DELETE FROM {_table(store, 'transactions')}")))
    told = collect()
    assert told["txnstore_partition_lso_holder_age_seconds"] == {
        ("0", str(producer.identity.producer_id), "orders", ""): 9
    }
    assert told["txnstore_open_transactions"][("Ongoing",)] == 0
    assert told["txnstore_oldest_transaction_age_seconds"][("Ongoing",)] == 9


def _table(store, name):
    return f"txnstore_{name}" if store.backend.name == "sqlite" else f"{store.schema}.{name}"


def overdue(told):
    """Return how long and how many."""
    return tuple(told[f"txnstore_maintenance_overdue_{what}"][()] for what in ("seconds", "duties"))


def test_maintenance_that_nobody_does_is_told_by_the_duty_that_has_waited_longest(collect, store, clock):
    store.write(lambda connection: connection.execute(update(stores).values(created_ms=clock.now_ms())))
    clock.advance(10_000)
    assert overdue(collect()) == (0, 0)
    clock.advance(2_500)
    assert overdue(collect()) == (2.5, sum(duty.interval_setting == ABORT_INTERVAL for duty in DUTIES))
    take_turn(store, None, DUTIES, Portions())
    # What else stands there is for others: a participant that is given up, or a duty of a later version.
    store.write(
        lambda connection: connection.execute(
            insert(maintenance_duties).values(duty="branches ended in db9", begun_ms=0, is_unfinished=False, turn_ms=0)
        )
    )
    assert overdue(collect()) == (0, 0)
    # Each by its own interval: that of the compaction, which was not due yet, is 15 seconds.
    clock.advance(3_600_000)
    assert overdue(collect()) == (3612.5 - 15, len(DUTIES))


def test_the_lag_of_a_group_is_in_records_that_its_readers_get(collect, store, orders, started):
    write(store, orders[0], *[b"x"] * 5)  # 0 to 4
    producer = started("payments", 600_000)
    for commit in (True, False):
        producer.send(orders[0], b"y", b"y", b"y")  # 5 to 7 and a marker, 9 to 11 and a marker
        producer.end(commit=commit)
    producer.send(orders[0], b"z")  # 13, open
    commit_offsets(store, "behind", {orders[0]: 2})
    commit_offsets(store, "ahead", {orders[0]: 13, orders[1]: 0})
    told = collect()
    assert told["txnstore_group_lag_offsets"] == {
        ("ahead", "0", "orders"): 0,
        ("ahead", "1", "orders"): 0,
        ("behind", "0", "orders"): 11,
    }
    # Three of the five, and three that were committed: no marker, and nothing that was aborted.
    assert told["txnstore_group_lag_records"][("behind", "0", "orders")] == 6
    assert told["txnstore_group_lag_records"][("ahead", "0", "orders")] == 0
    assert set(told["txnstore_group_lag_is_exact"].values()) == {1}
    assert told["txnstore_group_members"] == {("ahead",): 0, ("behind",): 0}


def test_the_lag_of_a_group_in_commit_order_is_in_places_and_at_most_so_many_records(collect, store, orders, started):
    write(store, orders[0], b"x")  # 0
    producer = started("payments", 600_000)
    producer.send(orders[0], b"y", b"y", b"y")  # 1 to 3
    write(store, orders[0], b"x")  # 4
    producer.commit()  # 5
    write(store, orders[0], b"x")  # 6
    started("other", 600_000).send(orders[0], b"open")  # 7
    for group_id, place in (("behind", 5), ("ahead", 6), ("at the end", 8)):
        placed = {orders[0]: OffsetAndMetadata(place, offset_in_transaction=0)}
        store.write(lambda connection, name=group_id, placed=placed: alter_offsets(connection, name, placed))

    def lags(limits):
        told = collect(limits=limits)
        return [
            {group_id: value for (group_id, _, _), value in told[f"txnstore_group_lag_{name}"].items()}
            for name in ("offsets", "records", "is_exact")
        ]

    offsets = {"behind": 3, "ahead": 2, "at the end": 0}
    is_exact = {"behind": 0, "ahead": 0, "at the end": 1}
    # What is committed behind the place may have begun before it; the end is what is open, too.
    assert lags(FigureLimits()) == [offsets, {"behind": 7, "ahead": 2, "at the end": 0}, is_exact]
    # Where not even the markers may be looked at it is all of the log.
    assert lags(FigureLimits(lag_batches=2)) == [offsets, {"behind": 8, "ahead": 2, "at the end": 0}, is_exact]


def test_what_is_far_behind_is_told_in_offsets_from_some_batch_on(collect, store, orders, started):
    producer = started("payments", 600_000)
    for _ in range(5):
        producer.send(orders[0], b"a")
        producer.abort()
    for _ in range(3):
        write(store, orders[1], b"a")
    commit_offsets(store, "far", {orders[0]: 0})
    commit_offsets(store, "near", {orders[1]: 1})
    # Who is nearer is counted first, by two of the six batches; of the other, four of ten are known to be nothing.
    told = collect(limits=FigureLimits(lag_batches=6))
    assert told["txnstore_group_lag_records"] == {("far", "0", "orders"): 6, ("near", "1", "orders"): 2}
    assert told["txnstore_group_lag_is_exact"] == {("far", "0", "orders"): 0, ("near", "1", "orders"): 1}
    assert told["txnstore_group_lag_offsets"][("far", "0", "orders")] == 10


def test_what_was_deleted_is_nothing_to_read(collect, store, orders):
    for _ in range(5):
        write(store, orders[0], b"a", b"b")
    commit_offsets(store, "group", {orders[0]: 0})
    cut = update(partition_heads).where(partition_heads.c.partition_id == orders[0]).values(log_start_offset=7)
    store.write(lambda connection: connection.execute(cut))
    told = collect()
    assert told["txnstore_group_lag_records"] == told["txnstore_group_lag_offsets"] == {("group", "0", "orders"): 3}
    assert told["txnstore_partition_log_start_offset"][("0", "orders")] == 7


def test_an_upper_bound_of_the_lag_counts_what_was_aborted_only_behind_the_batches_looked_at(
    collect, store, orders, started
):
    producer = started("payments", 600_000)
    for _ in range(3):
        producer.send(orders[0], b"a")
        producer.abort()
    write(store, orders[0], b"b")
    commit_offsets(store, "group", {orders[0]: 0})
    told = [
        collect(limits=FigureLimits(lag_batches=batches))["txnstore_group_lag_records"][("group", "0", "orders")]
        for batches in (0, 2, 4, 6, 7, 8)
    ]
    assert told == [7, 5, 3, 1, 1, 1]


def test_the_outbox(collect, store, orders):
    def put(connection, topic, count):
        connection.execute(insert(outbox), [{"topic": topic, "value": b"v"}] * count)

    store.write(lambda connection: put(connection, "orders", 3))
    store.write(lambda connection: put(connection, "not a topic", 2))
    assert drain_outbox(store) > 0
    store.write(lambda connection: put(connection, "orders", 4))
    told = collect()
    assert told["txnstore_outbox_waiting_rows"] == {(): 4}
    assert told["txnstore_outbox_refused_rows"] == {(): 2}
    assert told["txnstore_outbox_sequenced_rows_total"] == {(): 3}
    assert collect(limits=FigureLimits(counted_rows=3))["txnstore_outbox_waiting_rows"] == {(): 3}


def test_series_are_bounded_and_those_come_first_that_somebody_is_held_back_in(collect, store, started, clock):
    names = [f"topic-{number}" for number in range(3)]
    topics = [store.write(partial(create_topic, name=name, partition_count=4)) for name in names]
    for number, topic in enumerate(topics):
        started(f"open-{number}" + "x" * 300, 600_000).send(topic.partition_ids[3], b"a")
        clock.advance(1_000)
    commit_offsets(store, "group", {topics[0].partition_ids[number]: 0 for number in range(4)})
    told = collect(limits=FigureLimits(partitions=4, group_partitions=3), holders_max=2)
    assert sorted(told["txnstore_partition_high_watermark"]) == [
        *((str(number), "topic-0") for number in range(4)),
        *(("3", f"topic-{number}") for number in (1, 2)),
    ]
    assert told["txnstore_series_left_out"] == {("group_partitions",): 1, ("partitions",): 6}
    assert len(told["txnstore_group_lag_records"]) == 3
    holders = {labels[-1][:6] for labels in told["txnstore_partition_lso_holder_age_seconds"]}
    assert holders == {"open-0", "open-1"}
    assert max(len(label) for labels in told["txnstore_partition_lso_holder_age_seconds"] for label in labels) == 120


def test_long_names_that_begin_alike_are_series_of_their_own(collect, store):
    topics = [store.write(partial(create_topic, name="a" * 200 + end)) for end in ("-orders", "-refunds")]
    for group_id in ("g" * 200 + "-1", "g" * 200 + "-2"):
        commit_offsets(store, group_id, {topic.partition_ids[0]: 0 for topic in topics})
    told = collect()
    names = {("0", topic.name) for topic in topics}
    assert told["txnstore_partition_high_watermark"].keys() == names
    lags = told["txnstore_group_lag_records"].keys()
    assert {labels[1:] for labels in lags} == names
    assert len(lags) == 4
    # What tells them apart is the same in each process.
    assert {group for group, *_ in lags} == {"g" * 111 + "~" + digest for digest in ("dca053e3", "9c694d74")}


def test_members_of_a_group_are_counted(url):
    with Consumer({"bootstrap.servers": url, "group.id": "readers", "auto.offset.reset": "earliest"}) as consumer:
        with Client({"bootstrap.servers": url}) as producer:
            producer.produce("orders", b"a")
            assert producer.flush(60) == 0
        consumer.subscribe(["orders"])
        assert consumer.poll(60) is not None
        consumer.commit(asynchronous=False)
        collector = StoreCollector(url, timeout_seconds=PATIENCE_SECONDS)
        registry = CollectorRegistry()
        registry.register(collector)
        # Beside the client, and by the server's own clock.
        assert scraped(registry)["txnstore_group_members"] == {("readers",): 1}
        assert scraped(registry)["txnstore_group_lag_records"] == {("readers", "0", "orders"): 0}
        collector.close()


def test_a_registry_knows_the_names_and_prints_them(url):
    registry = CollectorRegistry()
    collector = StoreCollector(url)
    registry.register(collector)
    with pytest.raises(ValueError, match="txnstore_up"):
        registry.register(StoreCollector(url))
    printed = generate_latest(registry).decode()
    assert all(f"# HELP {metric.name} {metric.about}" in printed for metric in STORE_METRICS)
    collector.close()


def test_a_store_that_is_away_is_not_up_and_is_again_when_it_is_back(url, tmp_path, caplog, request):
    missing = url.replace("/store", "/no-store").replace("txnstore_test", "no_database")
    collector = StoreCollector(missing)
    registry = CollectorRegistry()
    registry.register(collector)
    with caplog.at_level(logging.INFO, "txnstore"):
        for _ in range(2):
            told = scraped(registry)
            assert told.pop("txnstore_scrape_seconds")
            assert told == {"txnstore_up": {(): 0}}
        collector._url, collector._timeout_seconds = url, PATIENCE_SECONDS
        for _ in range(2):
            assert scraped(registry)["txnstore_up"] == {(): 1}
    # Threads of other tests may say something too.
    told = [record.event for record in caplog.records if getattr(record, "event", "").startswith("metrics_")]
    assert told == ["metrics_unavailable", "metrics_available"]
    collector.close()
    assert scraped(registry)["txnstore_up"] == {(): 0}
    # It opens nothing again.
    assert collector._cluster is None


def test_figures_that_come_too_late_are_no_sign_that_all_is_well(url, monkeypatch, caplog):
    let_go = threading.Event()

    def late(*arguments):
        assert let_go.wait(PATIENCE_SECONDS)
        return read_cluster_figures(*arguments)

    collector = StoreCollector(url, timeout_seconds=PATIENCE_SECONDS)
    registry = CollectorRegistry()
    registry.register(collector)
    assert scraped(registry)["txnstore_up"] == {(): 1}
    monkeypatch.setattr(metrics, "read_cluster_figures", late)
    collector._timeout_seconds = 0.01
    with caplog.at_level(logging.INFO, "txnstore"):
        assert scraped(registry)["txnstore_up"] == {(): 0}
        thread = collector._thread
        let_go.set()
        assert thread is not None
        thread.join(PATIENCE_SECONDS)
        told = [record.event for record in caplog.records if getattr(record, "event", "").startswith("metrics_")]
        assert told == ["metrics_unavailable"]
        collector._timeout_seconds = PATIENCE_SECONDS
        assert scraped(registry)["txnstore_up"] == {(): 1}
    told = [record.event for record in caplog.records if getattr(record, "event", "").startswith("metrics_")]
    assert told == ["metrics_unavailable", "metrics_available"]
    collector.close()


@pytest.mark.slow
def test_a_server_that_goes_away_is_not_up_until_it_is_back(txnstore_postgresql_url):
    """First it refuses connections, then it answers nothing at all, which no socket notices."""
    with Proxy(upstream_of(txnstore_postgresql_url)) as proxy:
        collector = StoreCollector(proxy.url(txnstore_postgresql_url), timeout_seconds=1)
        registry = CollectorRegistry()
        registry.register(collector)

        def is_up():
            return scraped(registry)["txnstore_up"] == {(): 1}

        # However busy the machine is, one of them has its answer in time.
        assert any(is_up() for _ in range(60))
        proxy.refuse_connections()
        proxy.cut_connections()
        assert not is_up()
        proxy.accept_connections()
        assert any(is_up() for _ in range(60))
        proxy.swallow_everything()
        assert not is_up()
        assert not is_up()
        proxy.heal()
        assert any(is_up() for _ in range(60))
        collector.close()


def test_a_scrape_does_not_wait_for_a_database_that_does_not_answer(url, monkeypatch):
    """The reading stands still until the test lets it go on; the scrapes do not."""
    goes_on, has_begun, began = threading.Event(), threading.Event(), []

    def stand_still(*arguments):
        began.append(threading.current_thread())
        has_begun.set()
        assert goes_on.wait(60)
        return read_cluster_figures(*arguments)

    monkeypatch.setattr("txnstore.observability.metrics.read_cluster_figures", stand_still)
    collector = StoreCollector(url, timeout_seconds=0.2)
    registry = CollectorRegistry()
    registry.register(collector)
    assert scraped(registry)["txnstore_up"] == {(): 0}
    assert has_begun.wait(PATIENCE_SECONDS)
    assert scraped(registry)["txnstore_up"] == {(): 0}
    # The second scrape has begun nothing beside the first.
    assert len(began) == 1
    goes_on.set()
    began[0].join(60)
    collector._timeout_seconds = PATIENCE_SECONDS
    assert scraped(registry)["txnstore_up"] == {(): 1}
    collector.close()


def test_a_defect_is_told_in_the_log_and_not_raised_into_the_scrape(url, monkeypatch, caplog):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("txnstore.observability.metrics.read_cluster_figures", fail)
    collector = StoreCollector(url)
    registry = CollectorRegistry()
    registry.register(collector)
    for _ in range(2):
        assert scraped(registry)["txnstore_up"] == {(): 0}
    assert [getattr(record, "event", "") for record in caplog.records].count("metrics_failed") == 1
    assert "cannot be read" in caplog.text
    collector.close()


@pytest.mark.slow
def test_what_is_read_of_one_database_is_of_one_snapshot(url, collect, store, orders, started):
    """While it is read, another client commits between every two statements: nobody's lag is below zero."""
    producer = started("busy", 600_000)
    collect()  # opens the store
    commit_offsets(store, "group", {orders[0]: 0})
    is_on, times = False, []

    def interfere(*_):
        nonlocal is_on
        if is_on:
            is_on = False
            times.append(1)
            producer.send(orders[0], b"a")
            producer.commit()
            commit_offsets(store, "group", {orders[0]: 2 * len(times)})
            is_on = True

    from txnstore.db.store import _opened

    own = [other for other in _opened if str(other.url) == str(store.url) and other is not store]
    for other in own:
        event.listen(other.engine, "after_cursor_execute", interfere)
    is_on = True
    told = collect()
    is_on = False
    for other in own:
        event.remove(other.engine, "after_cursor_execute", interfere)
    # The group is at the end of the log whenever it is looked at, and was at many ends meanwhile.
    assert len(times) > 5
    assert told["txnstore_group_lag_offsets"][("group", "0", "orders")] == 0


def test_an_url_shows_no_password(txnstore_postgresql_url, capsys, caplog):
    from sqlalchemy.engine import make_url

    url = make_url(txnstore_postgresql_url).set(password="geheim", username="nobody-of-that-name")
    collector = StoreCollector(url.render_as_string(hide_password=False))
    registry = CollectorRegistry()
    registry.register(collector)
    printed = generate_latest(registry).decode()
    assert "txnstore_up{" in printed
    assert "geheim" not in printed + caplog.text
    collector.close()


def test_a_relative_path_is_one_in_the_folder_in_which_the_collector_was_made(
    txnstore_sqlite_url, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    registry = CollectorRegistry()
    name = txnstore_sqlite_url.rpartition("/")[2]
    collector = StoreCollector(f"sqlite:///{name}")
    registry.register(collector)
    monkeypatch.chdir("/")
    try:
        assert registry.get_sample_value("txnstore_up", {"database": name}) == 1
    finally:
        collector.close()
