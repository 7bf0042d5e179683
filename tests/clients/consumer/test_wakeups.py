"""Consumers that wait: woken by a commit of another process, at the price of one statement, and by nothing else."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.clients.consumer.log_writer import PATIENCE_SECONDS, eventually
from tests.clients.membership.steps import RARE_HEARTBEATS
from txnstore import TopicPartition
from txnstore.clients.consumer import core, fetcher, subscription
from txnstore.clients.consumer.assigned_partition import RETRY_FIRST_SECONDS, FetchPosition
from txnstore.clients.consumer.reader import PartitionFailed, PartitionReader
from txnstore.db.postgresql import connections as postgresql_connections
from txnstore.db.sqlite import waiter as sqlite_waiter
from txnstore.errors import StoreUnavailable
from txnstore.log import news

CHILDREN = Path(__file__).parents[2] / "faults" / "children.py"
#: Longer than any test waits.
NEVER_SECONDS = 3_600.0


@pytest.fixture
def nobody_looks(monkeypatch):
    """Let readers look only when they are woken."""
    if sys.platform != "linux":
        pytest.skip("readers of a file look by themselves where there are no stamps")
    monkeypatch.setattr(postgresql_connections, "SILENCE_MS", int(NEVER_SECONDS * 1000))
    monkeypatch.setattr(sqlite_waiter, "POLL_LAST_MS", int(NEVER_SECONDS * 1000))
    monkeypatch.setattr(sqlite_waiter, "STAMPED_LAST_MS", int(NEVER_SECONDS * 1000))
    monkeypatch.setattr(fetcher, "OUTBOX_LOOK_SECONDS", NEVER_SECONDS)
    monkeypatch.setattr(fetcher, "LISTEN_SECONDS_MAX", NEVER_SECONDS)
    for name in ("HELP_AFTER_SECONDS", "FIRST_LOOK_SECONDS", "LOOK_SECONDS"):
        monkeypatch.setattr(core, name, NEVER_SECONDS)


@pytest.fixture
def waiting(make_consumer, log):
    """Make a consumer that has read all there is of partitions of a topic, and waits."""

    def make(topic="t", numbers=(0,), configuration=()):
        usual = {"fetch.wait.max.ms": 300_000, "enable.auto.commit": False}
        consumer = make_consumer({**usual, **dict(configuration)})
        consumer.assign([TopicPartition(topic, number, 0) for number in numbers])
        for number in numbers:
            log.write(topic, number, b"first")
        for _ in numbers:
            assert consumer.poll(PATIENCE_SECONDS).value() == b"first"
        assert consumer.poll(0.5) is None
        return consumer

    return make


@pytest.fixture
def fetches(monkeypatch):
    """Those that went to a database transaction of the store."""
    found = []
    read = PartitionReader._read

    def counted(reader, work):
        found.append(work)
        return read(reader, work)

    monkeypatch.setattr(PartitionReader, "_read", counted)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("nobody_looks")
def test_a_consumer_is_woken_by_a_commit_of_another_process_alone(url, log, waiting):
    with subprocess.Popen(
        [sys.executable, str(CHILDREN), "commit_when_told", url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "ready\n"
        consumer = waiting("orders")
        for _ in range(3):
            child.stdin.write("\n")
            child.stdin.flush()
            assert consumer.poll(PATIENCE_SECONDS).value() == b"news"
        child.communicate("end\n")


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "configuration",
    [
        {"isolation.level": "read_committed"},
        {"isolation.level": "read_uncommitted"},
        {"txnstore.delivery.order": "commit"},
    ],
    ids=lambda configuration: next(iter(configuration.values())),
)
def test_what_is_new_for_a_waiting_consumer_costs_no_database_transaction(log, waiting, fetches, configuration):
    log.topic("t", 3)
    consumer = waiting("t", range(3), configuration)
    fetches.clear()
    for number in (0, 2, 1):
        log.write("t", number, b"one")
        assert consumer.poll(PATIENCE_SECONDS).value() == b"one"
        transaction = log.transaction()
        transaction.write("t", number, b"two")
        transaction.end(commit=True)
        assert consumer.poll(PATIENCE_SECONDS).value() == b"two"
    assert fetches == []


@pytest.mark.slow
@pytest.mark.usefixtures("nobody_looks")
def test_a_consumer_that_nothing_holds_back_is_not_woken_to_help(log, waiting, monkeypatch):
    monkeypatch.setattr(core, "HELP_AFTER_SECONDS", 0.02)
    monkeypatch.setattr(core, "HELP_INTERVAL_SECONDS", 0.02)
    helped, turns = threading.Event(), []
    turn = fetcher.FetchThread._turn

    def counted(thread):
        turns.append(thread)
        turn(thread)

    monkeypatch.setattr(core.ConsumerCore, "_recover", lambda _: helped.set())
    monkeypatch.setattr(fetcher.FetchThread, "_turn", counted)
    log.topic()
    consumer = waiting()
    assert comes_to_rest(consumer, turns)
    transaction = log.transaction()
    transaction.write("t", 0, b"held back")
    assert helped.wait(PATIENCE_SECONDS)
    transaction.end(commit=True)
    assert consumer.poll(PATIENCE_SECONDS).value() == b"held back"
    helped.clear()
    log.write("t", 0, b"the next")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"the next"
    assert comes_to_rest(consumer, turns)


def comes_to_rest(consumer, turns):
    """Return whether its thread has no turn in half a second, once those are over that it still had before it."""
    for _ in range(20):
        turns.clear()
        assert consumer.poll(0.5) is None
        if not turns:
            return True
    return False


def test_of_several_databases_the_first_ones_thread_wakes_to_help_the_others():
    # It does not hear of what holds back another one.
    several = fetcher.Fetcher.__new__(fetcher.Fetcher)
    several.__dict__.update(_first=SimpleNamespace(held_back_since=None), _further={})
    assert not several.may_be_held_back
    several.__dict__["_further"] = {2: SimpleNamespace(held_back_since=None)}
    assert several.may_be_held_back


def test_more_than_one_statement_brings_is_fetched(log, waiting, fetches):
    log.topic()
    consumer = waiting()
    fetches.clear()
    values = [b"%d" % number for number in range(news.OFFSETS_MAX + 1)]
    log.write("t", 0, *values)
    assert [consumer.poll(PATIENCE_SECONDS).value() for _ in values] == values
    assert fetches
    fetches.clear()
    log.write("t", 0, b"the next")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"the next"
    assert fetches == []


def test_where_no_statement_can_be_run_alone_the_consumer_fetches(log, waiting, fetches, monkeypatch):
    log.topic()
    consumer = waiting()
    for kind in (postgresql_connections.ListenWaiter, sqlite_waiter.FileWaiter):
        monkeypatch.setattr(kind, "rows", lambda *_: None)
    fetches.clear()
    log.write("t", 0, b"one")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"one"
    assert fetches


@pytest.fixture
def order(monkeypatch):
    """What happens: "found" by a thread that has read records, its next "turn", and the "call" that lets it go on."""
    happened = []

    def noting(of, name, what):
        function = getattr(of, name)

        def noted(*arguments, **options):
            happened.append(what)
            return function(*arguments, **options)

        monkeypatch.setattr(of, name, noted)

    deliver = subscription.Subscription.deliver

    def noting_records(of, position, page, *arguments, **options):
        # A page without any tells a call nothing: a busy machine reads one more of them at times.
        if page.chunks:
            happened.append("found")
        return deliver(of, position, page, *arguments, **options)

    monkeypatch.setattr(subscription.Subscription, "deliver", noting_records)
    noting(fetcher.FetchThread, "_turn", "turn")
    noting(fetcher.Fetcher, "start", "call")
    # As long as the call takes.
    monkeypatch.setattr(fetcher, "LET_GO_FIRST_SECONDS", NEVER_SECONDS)
    return happened


@pytest.mark.slow_but_first
@pytest.mark.parametrize("has_failed", [False, True])
def test_a_call_that_waits_takes_what_has_come_before_the_thread_goes_on(log, waiting, order, has_failed):
    """Of what cannot be read, and is not tried for now, there is no more to read."""
    log.topic("t", 2)
    consumer = waiting(numbers=(0, 1))
    if has_failed:
        failed = consumer._core.subscription.find("t", 1)
        failed.retry_at, failed.is_at_end = math.inf, False
    with ThreadPoolExecutor(1) as pool:
        for _ in range(5):
            call = pool.submit(consumer.poll, PATIENCE_SECONDS)
            eventually(lambda: consumer._core.group.waiting)
            order.clear()
            log.write("t", 0, b"one")
            assert call.result(PATIENCE_SECONDS).value() == b"one"
            assert "call" in order
            last_found = len(order) - order[::-1].index("found")
            assert order[last_found] == "call"


def test_where_trouble_lasts_that_is_not_told_of_the_partition_it_is_tried_ever_more_rarely(log, waiting):
    log.topic()
    fetching: Any = SimpleNamespace(_subscription=waiting()._core.subscription)
    (partition,) = fetching._subscription
    for trouble, pauses in ((StoreUnavailable("away"), [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]), (None, [0.1, 0.1])):
        partition.retry_seconds = RETRY_FIRST_SECONDS
        found = []
        for _ in pauses:
            position = FetchPosition(partition, partition.version, 1)
            failed = PartitionFailed(position, None, trouble=trouble)
            fetcher.FetchThread._apply_one(fetching, failed, 0.0, brought_nothing=True)
            found.append(partition.retry_at)
        assert found == pauses


def test_a_thread_that_nobody_waits_for_goes_on(log, waiting, order):
    log.topic()
    consumer = waiting()
    for count in (1, 2, 3):
        log.write("t", 0, b"one")
        eventually(lambda: consumer._core.subscription.buffered_records == count)  # noqa: B023 - called here
    assert [consumer.poll(PATIENCE_SECONDS).value() for _ in range(3)] == [b"one"] * 3
    assert "found" in order


def test_a_thread_that_has_more_to_read_goes_on(log, waiting, order, monkeypatch):
    log.topic()
    consumer = waiting(configuration={"fetch.max.bytes": 1_000, "message.max.bytes": 1_000})
    for _ in range(5):
        log.write("t", 0, bytes(900))
        assert consumer.poll(PATIENCE_SECONDS).value() == bytes(900)
    # The call is on its way, and does not come.
    monkeypatch.setattr(consumer._core.fetcher, "is_awaited", lambda: True)
    order.clear()
    consumer.seek(TopicPartition("t", 0, 0))
    eventually(lambda: consumer._core.subscription.buffered_records == 6)
    assert order.count("found") > 1


def test_a_consumer_is_closed_although_its_thread_lets_a_call_go_first(log, waiting, order, monkeypatch):
    log.topic()
    consumer = waiting()
    # The call is on its way, and does not come.
    monkeypatch.setattr(consumer._core.fetcher, "is_awaited", lambda: True)
    order.clear()
    log.write("t", 0, b"one")
    eventually(lambda: "found" in order)
    assert consumer._core.fetcher.close(PATIENCE_SECONDS)


@pytest.mark.slow
@pytest.mark.usefixtures("nobody_looks")
def test_a_reader_in_commit_order_is_woken_by_the_commit_of_what_is_there_for_long(log, waiting, fetches):
    """Others' open transactions may grow as they like: one statement finds that there is nothing new."""
    log.topic()
    open_ = log.transaction()
    open_.write("t", 0, b"early")
    consumer = waiting(configuration={"txnstore.delivery.order": "commit"})
    fetches.clear()
    for number in range(60):
        open_.write("t", 0, b"%d" % number)
        assert consumer.poll(0) is None
    open_.end(commit=True)
    assert consumer.poll(PATIENCE_SECONDS).value() == b"early"
    assert fetches == []


@pytest.mark.usefixtures("nobody_looks")
def test_what_is_heard_of_while_something_else_is_due_is_not_forgotten(log, waiting, monkeypatch):
    log.topic()
    consumer = waiting()
    due: list[str] = []
    has_fresh_work = fetcher.FetchThread._has_fresh_work

    def due_meanwhile(thread):
        # Once, as it has heard of the commit; it comes to nothing.
        if threading.current_thread() is not threading.main_thread() and due:
            due.pop()
            return True
        return has_fresh_work(thread)

    monkeypatch.setattr(fetcher.FetchThread, "_has_fresh_work", due_meanwhile)
    for _ in range(3):
        eventually(lambda: consumer._core.fetcher._first._is_listening)
        due.append("a partition that cannot be resolved")
        log.write("t", 0, b"news")
        assert consumer.poll(PATIENCE_SECONDS).value() == b"news"
        assert due == []


@pytest.mark.slow_but_first
@pytest.mark.usefixtures("nobody_looks")
@pytest.mark.parametrize(
    ("is_member", "is_full"),
    [
        pytest.param(True, True, id="listens-for-its-group"),
        pytest.param(True, False, id="listens-for-its-group-and-another-partition"),
        pytest.param(False, False, id="listens-for-another-partition"),
    ],
)
def test_what_is_committed_while_enough_is_buffered_comes_once_that_is_taken(
    log, make_consumer, fetches, is_member, is_full
):
    log.topic("t", 2)
    rests = {"fetch.wait.max.ms": 300_000, "enable.auto.commit": False, **RARE_HEARTBEATS}
    consumer = make_consumer({"queued.min.messages": 4, **rests})
    if is_member:
        consumer.subscribe(["t"])
    else:
        consumer.assign([TopicPartition("t", number, 0) for number in range(2)])
    log.write("t", 0, b"first")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"first"
    assert consumer.poll(0.5) is None
    # More than the share of one partition, or enough for both.
    values = [b"one", b"two", b"three", b"four"][: 4 if is_full else 3]
    thread, known = consumer._core.fetcher._first, consumer._core.subscription
    fetches.clear()
    for _ in range(3):
        log.write("t", 0, *values)
        eventually(lambda: thread._is_listening and known.buffered_records == len(values))
        log.write("t", 0, b"meanwhile")
        eventually(lambda: thread._is_listening and thread._news_due_at == math.inf)
        taken = [consumer.poll(PATIENCE_SECONDS) for _ in range(len(values) + 1)]
        assert [message and message.value() for message in taken] == [*values, b"meanwhile"]
        eventually(lambda: thread._is_listening and known.buffered_records == 0)
    assert fetches == []


@pytest.mark.usefixtures("nobody_looks")
def test_what_came_before_it_began_to_listen_is_read_although_the_database_is_away_at_first(
    log, make_consumer, monkeypatch
):
    log.topic()
    away: list[str] = []
    begin, read = PartitionReader.waiter, PartitionReader.read

    def begin_late(reader, subjects):
        log.write("t", 0, b"before", wakes_readers=False)
        away.append("once")
        return begin(reader, subjects)

    def read_if_not_away(reader, positions, **options):
        if away:
            raise StoreUnavailable(away.pop())
        return read(reader, positions, **options)

    monkeypatch.setattr(PartitionReader, "waiter", begin_late)
    monkeypatch.setattr(PartitionReader, "read", read_if_not_away)
    consumer = make_consumer({"fetch.wait.max.ms": 300_000, "enable.auto.commit": False})
    consumer.assign([TopicPartition("t", 0, 0)])
    messages = iter(lambda: consumer.poll(PATIENCE_SECONDS), None)
    assert next((message.value() for message in messages if message.error() is None), None) == b"before"
    assert away == []


@pytest.mark.slow_but_first
@pytest.mark.usefixtures("nobody_looks")
@pytest.mark.parametrize("numbers", [(0,), (0, 1)], ids=["alone", "beside-another"])
def test_a_partition_that_could_not_be_read_is_read_after_a_while(log, waiting, monkeypatch, numbers):
    log.topic("t", len(numbers))
    consumer = waiting("t", numbers)
    failing: list[str] = []
    read = PartitionReader.read

    def fail_once(reader, positions, **options):
        outcomes = read(reader, positions, **options)
        if failing and any(position.partition.number == 0 for position in positions):
            failing.pop()
            return [
                PartitionFailed(outcome.position, None) if outcome.position.partition.number == 0 else outcome
                for outcome in outcomes
            ]
        return outcomes

    monkeypatch.setattr(PartitionReader, "read", fail_once)
    failing.append("once")
    log.write("t", 0, b"news")
    # Without a call, which would look for what is due.
    eventually(lambda: consumer._core.subscription.buffered_records)
    assert consumer.poll(0).value() == b"news"
    assert failing == []


@pytest.mark.usefixtures("nobody_looks")
def test_what_is_heard_of_while_only_another_partition_is_read_is_not_forgotten(log, waiting, monkeypatch):
    log.topic("t", 2)
    consumer = waiting("t", (0, 1))
    due: list[str] = []
    has_fresh_work = fetcher.FetchThread._has_fresh_work

    def due_meanwhile(thread):
        # Once, as it has heard of the commit: the last page had no room for the other one.
        if threading.current_thread() is not threading.main_thread() and due:
            due.pop()
            other = thread._subscription.find("t", 1)
            other.is_hungry, other.is_at_end = True, False
            return True
        return has_fresh_work(thread)

    monkeypatch.setattr(fetcher.FetchThread, "_has_fresh_work", due_meanwhile)
    for _ in range(3):
        eventually(lambda: consumer._core.fetcher._first._is_listening)
        due.append("another partition")
        log.write("t", 0, b"news")
        message = consumer.poll(PATIENCE_SECONDS)
        assert message is not None
        assert message.value() == b"news"
        assert due == []
