"""A group whose database does not answer for a while: shorter and longer than its members' sessions.

Nothing is handed out once the local deadline is past and the group has not answered; nothing is lost; and once it
answers, nobody hands out what another has been given.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time

import psycopg
import pytest

from tests.clients.consumer.log_writer import LogWriter
from tests.clients.membership.steps import (
    EAGER_AND_COOPERATIVE,
    RARE_HEARTBEATS,
    STRATEGY_NAMES,
    TP,
    TURN_SECONDS,
    Crew,
)
from txnstore import Consumer, KafkaError, KafkaException
from txnstore.db.opening import open_store
from txnstore.testing.postgres_server import connection_string
from txnstore.testing.private_cluster import NoServerProgramsError, PrivateCluster

pytestmark = pytest.mark.slow_on_postgresql

both_strategies = pytest.mark.parametrize("strategy", EAGER_AND_COOPERATIVE, ids=STRATEGY_NAMES)
RECORDS = 1_000
PARTITIONS = 4
SESSION_SECONDS = 1.5
SETTINGS = {
    "heartbeat.interval.ms": 200,
    "session.timeout.ms": int(SESSION_SECONDS * 1000),
    "enable.auto.commit": False,
}
#: Much longer than it does not answer, for members that a busy machine keeps waiting.
LONG_SESSION_SECONDS, DEAF_SECONDS = 9.0, 1.5
WORK_SECONDS = 0.005
#: What comes about within a second or two takes longer on a machine that is busy.
PATIENCE_SECONDS = 40.0
#: Said to a member that has not heard of it yet.
GROUP_HAS_CHANGED = (KafkaError.UNKNOWN_MEMBER_ID, KafkaError.ILLEGAL_GENERATION, KafkaError.REBALANCE_IN_PROGRESS)


def fill(log, name="t"):
    log.topic(name, partition_count=PARTITIONS)
    for number in range(PARTITIONS):
        log.write(name, number, *(b"%d-%d" % (number, offset) for offset in range(RECORDS)))


@contextlib.contextmanager
def deaf_group(url):
    """Let nobody write to the group while the context lasts: readers go on."""
    connection: sqlite3.Connection | psycopg.Connection
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, timeout=60)
        connection.execute("BEGIN IMMEDIATE")
    else:
        connection = psycopg.connect(connection_string(url))
        connection.execute("LOCK TABLE txnstore.groups, txnstore.group_members IN EXCLUSIVE MODE")
    try:
        yield
    finally:
        connection.rollback()
        connection.close()


class Reading:
    """Members that read record by record, and when each record was asked for that came."""

    def __init__(self, crew, strategy, names="ab"):
        self.crew = crew
        self.members = [crew.member(name, {**SETTINGS, **strategy}).subscribe() for name in names]
        self.asked_at = []
        self.works_slowly = True
        """Whether there is always something left to read: each record takes a moment."""
        self._pause = threading.Event()
        for member in self.members:
            member.actions["revoke"] = commit_position

    def turn(self):
        for member in self.members:
            for number in range(1 if self.works_slowly else 100):
                asked_at = time.monotonic()
                if member.poll(0 if number else TURN_SECONDS) is None:
                    break
                self.asked_at.append(asked_at)
                if self.works_slowly:
                    self._pause.wait(WORK_SECONDS)
            # The database may be away: that is said as a message too.
            assert not any(error.fatal() for error in member.errors), member
            del member.errors[:]

    def until(self, found, seconds=PATIENCE_SECONDS):
        deadline = time.monotonic() + seconds
        while not found():
            assert time.monotonic() < deadline, f"it did not happen: {self.members}"
            self.turn()

    def is_shared(self):
        return [len(member.partitions) for member in self.members] == [2, 2]

    def seen(self):
        return [place for member in self.members for place in member.places()]


def commit_position(consumer, partitions):
    positions = [position for position in consumer.position(partitions) if position.offset >= 0]
    with contextlib.suppress(Exception):
        consumer.commit(offsets=positions, asynchronous=False)


def positions_of(member):
    return [tp for tp in member.consumer.position(member.consumer.assignment()) if tp.offset >= 0]


def commits_position(member):
    positions = positions_of(member)
    try:
        return bool(positions) and bool(member.consumer.commit(offsets=positions, asynchronous=False))
    except KafkaException as error:
        if error.args[0].code() not in GROUP_HAS_CHANGED:
            raise
        return False


def has_all(reading):
    return len(set(reading.seen())) == PARTITIONS * RECORDS


def kinds(reading):
    return {kind for member in reading.members for kind, _ in member.moves}


@pytest.mark.slow_but_first
@both_strategies
def test_a_group_that_does_not_answer_for_less_than_a_session_loses_nobody(url, crew, log, strategy):
    fill(log)
    reading = Reading(crew, {**strategy, "session.timeout.ms": int(LONG_SESSION_SECONDS * 1000)})
    reading.until(reading.is_shared)
    for member in reading.members:
        member.taken()
    generation = reading.members[0].generation
    count = len(reading.asked_at)
    with deaf_group(url):
        until = time.monotonic() + DEAF_SECONDS
        reading.until(lambda: time.monotonic() > until)
        deadlines = [member.deadline_ms for member in log.members()]
    assert len(reading.asked_at) > count
    # Each is heard again.
    reading.until(lambda: min(member.deadline_ms for member in log.members()) > max(deadlines))
    assert kinds(reading) == set()
    assert reading.is_shared()
    assert {member.generation for member in reading.members} == {generation}


@pytest.mark.slow
@both_strategies
def test_nothing_is_handed_out_past_the_local_deadline_until_the_group_has_answered(url, crew, log, strategy):
    fill(log)
    crew.may_be_late = True
    reading = Reading(crew, strategy)
    reading.until(reading.is_shared)
    reading.until(lambda: all(len(member.records) > 10 for member in reading.members))
    with deaf_group(url):
        began = time.monotonic()
        reading.until(lambda: time.monotonic() > began + 2 * SESSION_SECONDS)
        # Readers were not hindered, and records were at hand.
        assert not has_all(reading)
        assert max(reading.asked_at) < began + SESSION_SECONDS
        count = len(reading.asked_at)
    reading.until(lambda: len(reading.asked_at) > count)
    reading.until(reading.is_shared)
    # The commits of their new places count, once each has heard which these are.
    reading.until(lambda: reading.is_shared() and all(map(commits_position, reading.members)))


@pytest.mark.slow
@both_strategies
def test_a_member_alone_keeps_its_place_if_nobody_took_it(url, crew, log, strategy):
    """The one that is late is not removed by itself: what it had is still its own."""
    fill(log)
    reading = Reading(crew, strategy, "a")
    (a,) = reading.members
    reading.until(lambda: len(a.records) > 10)
    member_id = a.consumer.memberid()
    with deaf_group(url):
        began = time.monotonic()
        reading.until(lambda: time.monotonic() > began + 2 * SESSION_SECONDS)
        count = len(a.records)
    reading.until(lambda: len(a.records) > count + 10)
    assert [kind for kind, _ in a.moves] == ["assign"]
    assert a.consumer.memberid() == member_id
    a.consumer.commit(asynchronous=False)
    assert len(set(a.places())) == len(a.places())


# --- a server that is killed --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    try:
        cluster = PrivateCluster(fsync=False)
    except NoServerProgramsError as error:
        pytest.skip(str(error))
    with cluster:
        yield cluster


@pytest.fixture(params=EAGER_AND_COOPERATIVE, ids=STRATEGY_NAMES)
def killed(request, cluster):
    """The store of a server that can be killed, and two members on it that read."""
    name = f"group_{len(cluster_databases)}"
    cluster_databases.append(name)
    cluster.create_database(name)
    opened = []

    def make(configuration):
        usual = {"bootstrap.servers": cluster.url(name), "group.id": "readers", "auto.offset.reset": "earliest"}
        opened.append(Consumer({**usual, "error_cb": lambda error: None, **configuration}))
        return opened[-1]

    with open_store(cluster.url(name)) as store:
        fill(LogWriter(store))
    try:
        yield lambda **settings: make_reading(make, {**request.param, **settings})
    finally:
        for consumer in opened:
            with contextlib.suppress(Exception):
                consumer.close()


cluster_databases: list[str] = []


def make_reading(make, settings):
    crew = Crew(make)
    crew.may_be_late = True
    reading = Reading(crew, settings)
    reading.until(reading.is_shared)
    reading.until(lambda: all(len(member.records) > 10 for member in reading.members))
    return reading


@pytest.mark.slow
def test_a_server_that_is_back_within_the_session_costs_nobody_his_place(cluster, killed):
    reading = killed(**{**RARE_HEARTBEATS, "heartbeat.interval.ms": 200})
    for member in reading.members:
        member.taken()
    generation = reading.members[0].generation
    cluster.kill()
    try:
        reading.turn()
    finally:
        cluster.start()
    reading.works_slowly = False
    reading.until(lambda: has_all(reading))
    assert kinds(reading) == set()
    assert {member.generation for member in reading.members} == {generation}
    assert len(reading.seen()) == PARTITIONS * RECORDS
    for member in reading.members:
        assert member.consumer.commit(asynchronous=False)


@pytest.mark.slow
def test_a_server_that_is_away_for_longer_than_the_session(cluster, killed):
    reading = killed()
    for member in reading.members:
        member.consumer.commit(asynchronous=False)
    cluster.kill()
    began = time.monotonic()
    try:
        reading.until(lambda: time.monotonic() > began + 2 * SESSION_SECONDS)
        assert not has_all(reading)
        assert max(reading.asked_at) < began + SESSION_SECONDS
    finally:
        cluster.start()
    reading.works_slowly = False
    reading.until(lambda: has_all(reading))
    reading.until(reading.is_shared)
    # What one was handed and had not committed came again to the other; the commits of their new places count.
    for member in reading.members:
        reading.until(lambda member=member: positions_of(member) or has_read_to_the_end(member))
        if positions_of(member):
            member.consumer.commit(offsets=positions_of(member), asynchronous=False)
    committed = reading.members[0].consumer.committed([TP("t", number) for number in range(PARTITIONS)], 20)
    assert all(tp.offset <= RECORDS for tp in committed)


def has_read_to_the_end(member):
    """Whether the group had committed all of what the member has now, so that nothing is left to read."""
    return all(tp.offset == RECORDS for tp in member.consumer.committed(member.consumer.assignment(), 20))
