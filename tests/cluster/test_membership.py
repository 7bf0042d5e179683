"""Which databases a cluster has: fresh ones join, known ones are found again, and wrong ones are refused by name."""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Connection, delete

from tests.cluster.conftest import Producer, Site, down, read
from tests.tools.crashes import crash_at, noting, steps_of
from txnstore.db.cluster import cluster as cluster_module
from txnstore.db.cluster.cluster import Cluster, open_cluster
from txnstore.db.cluster.membership import (
    Address,
    Database,
    claim,
    coordinator_of_name,
    hash_of_name,
    label_of_address,
    read_databases,
    reserve,
    split_urls,
)
from txnstore.db.opening import open_store
from txnstore.db.schema import databases
from txnstore.db.store import Store
from txnstore.db.url import parse_url
from txnstore.errors import (
    ConcurrentTransactions,
    InvalidUrl,
    MissingMember,
    NotCoordinator,
    OutcomeUnknown,
    StoreCopied,
    StoreUnavailable,
    TransactionAbortable,
    WrongCluster,
)
from txnstore.groups.offsets import commit_offsets, read_offsets
from txnstore.log import topics
from txnstore.log.append import Append, append
from txnstore.log.cluster_topics import create_topic
from txnstore.log.codec import encode
from txnstore.model import GroupMembership, OffsetAndMetadata, Record
from txnstore.testing.invariants import assert_cluster_sound
from txnstore.testing.postgres_server import PostgresServer
from txnstore.transactions.administration import OpenInPartition, abort_open_transaction
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.outcome import Outcome, resolve_outcome
from txnstore.transactions.recovery import abort_by_administrator, abort_overdue, abort_timed_out, recover

PATIENCE_SECONDS = 60.0


def ids(cluster) -> list[tuple[int, bool]]:
    return [(member.database_id, member.coordinates) for member in cluster.databases]


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("sqlite:///a.db", ["sqlite:///a.db"]),
        ("sqlite:///a.db, sqlite:///b.db", ["sqlite:///a.db", "sqlite:///b.db"]),
        ("postgresql://h,i/x,postgresql://j/y", ["postgresql://h,i/x", "postgresql://j/y"]),
        ("sqlite:///a,b.db,postgres://j/y?host=k,l", ["sqlite:///a,b.db", "postgres://j/y?host=k,l"]),
    ],
)
def test_a_comma_parts_urls_only_before_a_scheme(text, urls):
    assert split_urls(text) == urls


@pytest.mark.parametrize(
    ("url", "label"),
    [
        ("postgresql://user:secret@db.example:6000/shop", "db.example:6000/shop"),
        ("postgresql://user:secret@db.example/shop", "db.example:5432/shop"),
        ("postgresql:///shop?host=/run/postgresql&sslpassword=secret", "localhost:5432/shop"),
        ("sqlite:////var/lib/shop/events.db", "events.db"),
    ],
)
def test_a_label_is_the_address_without_anything_that_could_be_secret(url, label):
    assert label_of_address(parse_url(url)) == label


def test_names_have_their_homes_for_ever():
    members = [Database(number, "", "", coordinates=number != 3) for number in (1, 2, 3, 4)]
    assert {coordinator_of_name(f"t{number}", members) for number in range(50)} == {1, 2, 4}
    # Written down: another answer would give names a second coordinator.
    assert hash_of_name("transfer-1") % 1_000_003 == 867_581
    assert [coordinator_of_name(f"t{number}", members) for number in range(8)] == [1, 4, 4, 4, 1, 1, 2, 1]


@pytest.mark.slow
def test_fresh_databases_join_and_are_found_again(site: Site):
    with site.open() as cluster:
        assert ids(cluster) == [(1, True), (2, True), (3, True)]
        labels = [member.label for member in cluster.databases]
        assert labels == [label_of_address(parse_url(url)) for url in site.urls]
        create_topic(cluster, "orders")
        assert_cluster_sound(cluster, at_rest=True)
    # In any order but for the first, and without looking at all of them.
    with site.open(site.urls[0], site.urls[2], site.urls[1]) as cluster:
        assert [member.label for member in cluster.databases] == labels
        assert [store.database_id for store in cluster.opened()] == [1]
        assert [str(cluster.own(number).url) for number in (1, 2, 3)] == [str(parse_url(url)) for url in site.urls]
        assert cluster.own(2) is cluster.own(2)


def test_producer_ids_are_of_a_range_for_each_database(sqlite_site: Site):
    with sqlite_site.open() as cluster:
        given = []
        for number in (1, 2, 3):
            coordinator = TransactionCoordinator(cluster.own(number), cluster)
            given.append(coordinator.init_producer_id(None).identity.producer_id)
            assert cluster.coordinator_of_producer(given[-1]).database_id == number
        assert given == [0, 1 << 40, 2 << 40]


def test_a_cluster_of_one_is_asked_nothing_more(sqlite_site: Site):
    with sqlite_site.open(sqlite_site.urls[0]) as cluster:
        assert cluster.is_alone
        assert cluster.controller.label is None
        assert cluster.coordinator_of("x") is cluster.coordinator_of("y") is cluster.controller
        assert cluster.own(cluster.leader_of_partition(7)) is cluster.coordinator_of_producer(1) is cluster.controller
        assert cluster.by_leader([5, 4]) == {1: [5, 4]}
        cluster.publish()
        assert not cluster.reconcile(1)


@pytest.mark.parametrize("used", ["a transactional id", "a group"])
def test_databases_that_come_once_something_is_coordinated_hold_partitions_only(sqlite_site: Site, used: str):
    with sqlite_site.open(sqlite_site.urls[0]) as cluster:
        if used == "a group":
            cluster.controller.write(lambda connection: commit_offsets(connection, GroupMembership("g"), {}))
        else:
            Producer(cluster, "t").start()
        member = cluster.add_database(sqlite_site.urls[1])
        assert member == Database(2, "second.db", member.store_uuid, coordinates=False)
        assert {cluster.coordinator_id_of(f"t{number}") for number in range(50)} == {1}
        topic = create_topic(cluster, "orders", partition_count=20)
        assert set(topic.leaders) == {1, 2}


def test_a_third_database_never_moves_a_name(sqlite_site: Site):
    with sqlite_site.open(*sqlite_site.urls[:2]) as cluster:
        before = [cluster.coordinator_id_of(f"t{number}") for number in range(50)]
        assert set(before) == {1, 2}
        # Nothing is coordinated yet at the controller; but who knows of the second one?
        assert not cluster.add_database(sqlite_site.urls[2]).coordinates
        assert [cluster.coordinator_id_of(f"t{number}") for number in range(50)] == before


def test_adding_a_database_again_changes_nothing(sqlite_site: Site):
    with sqlite_site.open() as cluster:
        before = cluster.databases
        assert cluster.add_database(sqlite_site.urls[2]).database_id == 3
        assert cluster.databases == before
        # And whoever has added it can use it.
        assert cluster.own(3).database_id == 3


@pytest.mark.slow
def test_files_of_one_name_are_told_apart_by_what_is_in_them(sqlite_site: Site, tmp_path: Path):
    urls = [sqlite_site.urls[0]]
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        urls.append(f"sqlite:///{tmp_path / folder / 'second.db'}")
    with sqlite_site.open(*urls) as cluster:
        labels = [member.label for member in cluster.databases]
        assert labels == ["first.db", "second.db", "second.db-2", "second.db-3"]
    for order in itertools.permutations(urls[1:]):
        with sqlite_site.open(urls[0], *order) as cluster:
            assert [str(cluster.own(number).url) for number in (2, 3, 4)] == [str(parse_url(url)) for url in urls[1:]]
            assert len(cluster.databases) == 4


def test_files_that_have_changed_their_names_are_told_apart_by_what_is_in_them(sqlite_site: Site, tmp_path: Path):
    sqlite_site.open().close()
    second, third, between = (tmp_path / f"{name}.db" for name in ("second", "third", "between"))
    for path, name in ((second, between), (third, second), (between, third)):
        path.replace(name)
    for wanted in (2, 3):
        with sqlite_site.open() as cluster:
            assert cluster.own(wanted).database_id == wanted
            paths = [str(cluster.own(number).url) for number in (2, 3)]
            assert paths == [str(parse_url(url)) for url in (sqlite_site.urls[2], sqlite_site.urls[1])]


def test_a_controller_that_does_not_know_a_member_any_more_is_an_older_state_of_itself(
    sqlite_site: Site, monkeypatch: pytest.MonkeyPatch
):
    with sqlite_site.open() as cluster:
        cluster.controller.write(
            lambda connection: connection.execute(delete(databases).where(databases.c.database_id == 3))
        )
        with monkeypatch.context() as patch:
            patch.setattr(cluster.controller.backend, "is_standby", lambda _: True)
            with pytest.raises(StoreUnavailable, match="the standby in"):
                cluster.refresh()
        for _ in range(2):
            with pytest.raises(StoreCopied, match=r"'third\.db' was in its cluster.*Restart the program"):
                cluster.refresh()
    with sqlite_site.open(*sqlite_site.urls[:2]) as cluster:
        assert [number for number, _ in ids(cluster)] == [1, 2]


def test_the_first_must_be_the_controller(sqlite_site: Site):
    sqlite_site.open().close()
    for wrong in ([sqlite_site.urls[1], sqlite_site.urls[0]], [sqlite_site.urls[2]]):
        with pytest.raises(WrongCluster, match=r"the first database of the list is .*the controller comes first"):
            sqlite_site.open(*wrong)


def test_the_same_database_twice_is_refused(sqlite_site: Site, tmp_path: Path):
    with pytest.raises(WrongCluster, match="two URLs of the list are the same"):
        sqlite_site.open(sqlite_site.urls[0], sqlite_site.urls[1], sqlite_site.urls[1])
    (tmp_path / "link.db").symlink_to(tmp_path / "second.db")
    link = f"sqlite:///{tmp_path / 'link.db'}"
    for urls in ([*sqlite_site.urls, link], [sqlite_site.urls[0], link, *sqlite_site.urls[1:]]):
        with pytest.raises(WrongCluster, match="two URLs of the list lead to the database"):
            sqlite_site.open(*urls)
    sqlite_site.open().close()
    # Once it is a member, one more way to it does no harm.
    with sqlite_site.open(*sqlite_site.urls, link) as cluster:
        assert [cluster.own(number).database_id for number in (2, 3)] == [2, 3]


def test_a_database_in_use_or_of_another_cluster_cannot_join(sqlite_site: Site):
    others = [sqlite_site.new("other"), sqlite_site.new("mate")]
    sqlite_site.open(*others).close()
    with pytest.raises(WrongCluster, match=r"the database .*mate.* cannot join .* belongs to another cluster"):
        sqlite_site.open(sqlite_site.urls[0], others[1])
    with pytest.raises(WrongCluster, match=r"the database .*other.* cannot join .* belongs to another cluster"):
        sqlite_site.open(sqlite_site.urls[0], others[0])
    with sqlite_site.open(sqlite_site.urls[1]) as alone:
        create_topic(alone, "mine")
    with pytest.raises(WrongCluster, match=r"the database .*second.* cannot join .* has topics of its own"):
        sqlite_site.open()
    with sqlite_site.open(sqlite_site.urls[2]) as alone:
        Producer(alone, "t").start()
    with pytest.raises(WrongCluster, match=r"the database .*third.* cannot join .* has transactional ids or groups"):
        sqlite_site.open(sqlite_site.urls[0], sqlite_site.urls[2])
    # What was refused is as it was.
    with sqlite_site.open(sqlite_site.urls[1]) as alone:
        assert alone.is_alone
        create_topic(alone, "mine-too")


def test_a_database_cannot_join_while_somebody_makes_a_topic_of_its_own(
    postgresql_site: Site, txnstore_postgres_server: PostgresServer
):
    made, over = threading.Event(), threading.Event()
    controller, own = postgresql_site.urls[:2]
    waiting = "SELECT pg_sleep(0.01), count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = %s"

    def make(connection: Connection) -> None:
        topics.create_topic(connection, "mine")
        made.set()
        assert over.wait(PATIENCE_SECONDS)

    with open_store(own) as store, ThreadPoolExecutor(2) as threads, txnstore_postgres_server.connect() as observer:
        making = threads.submit(store.write, make)
        try:
            assert made.wait(PATIENCE_SECONDS)
            joining = threads.submit(postgresql_site.open, controller, own)
            looks = (observer.execute(waiting, [store.url.url.database]).fetchone() for _ in range(6_000))
            assert any(joining.done() or (look and look[1]) for look in looks), "it neither waits nor ends"
        finally:
            over.set()
        making.result(PATIENCE_SECONDS)
        with pytest.raises(WrongCluster, match="has topics of its own"):
            joining.result(PATIENCE_SECONDS).close()
        assert store.read(topics.list_topics) == ["mine"]


def test_who_lacks_a_member_works_for_everything_else(sqlite_site: Site):
    with sqlite_site.open() as cluster:
        topic = create_topic(cluster, "orders", partition_count=3, config={"txnstore.placement": "roundrobin"})
    with sqlite_site.open(*sqlite_site.urls[:2]) as cluster:
        label = cluster.label_of(3)
        assert [store.database_id for store in cluster.stores()] == [1, 2]
        for number in topic.partition_ids[:2]:
            batch = encode([Record(b"a")])
            cluster.own(cluster.leader_of_partition(number)).write(
                lambda connection, number=number, batch=batch: append(connection, [Append(number, batch)])
            )
        with pytest.raises(MissingMember, match=r"add its URL to bootstrap.servers") as raised:
            cluster.own(cluster.leader_of_partition(topic.partition_ids[2]))
        assert label in str(raised.value)
        create_topic(cluster, "more", partition_count=3)
    with sqlite_site.open() as cluster:
        assert cluster.reconcile(3)
        assert_cluster_sound(cluster, at_rest=True)


def test_a_url_that_leads_somewhere_else_by_now_is_refused_by_name(sqlite_site: Site, tmp_path: Path):
    sqlite_site.open().close()
    (tmp_path / "second.db").replace(tmp_path / "gone.db")
    sqlite_site.new("second")
    with sqlite_site.open() as cluster:
        with pytest.raises(WrongCluster, match=r"the database at the address of .*second.* is not the one"):
            cluster.own(2)
        assert cluster.own(3).database_id == 3


def test_a_member_whose_file_is_gone_is_named_and_not_made_anew(sqlite_site: Site, tmp_path: Path):
    sqlite_site.open().close()
    (tmp_path / "second.db").unlink()
    with sqlite_site.open() as cluster:
        with pytest.raises(Exception, match=r"the database 'second\.db'") as raised:
            cluster.own(2)
        assert str(tmp_path) not in str(raised.value)
    assert not (tmp_path / "second.db").exists()


def test_a_member_that_is_away_is_named_never_by_its_url_and_left_alone_for_a_while(sqlite_site: Site):
    seconds = [0.0]
    with sqlite_site.open() as cluster:
        pass
    with sqlite_site.open() as cluster:
        cluster._monotonic_seconds = lambda: seconds[0]
        tries = []
        opener = cluster._open

        def refuse(url: str, create: bool):
            tries.append(url)
            raise StoreUnavailable("cannot reach sqlite:///secret")

        cluster._open = refuse
        for expected in (1, 1, 1):
            with pytest.raises(StoreUnavailable, match=r"^the database 'second\.db' cannot be reached"):
                cluster.own(2)
            assert len(tries) == expected
        seconds[0] = cluster_module.PAUSE_FIRST_SECONDS
        with pytest.raises(StoreUnavailable) as raised:
            cluster.own(2)
        assert len(tries) == 2
        assert "secret" not in str(raised.value)
        seconds[0] += cluster_module.PAUSE_FIRST_SECONDS
        with pytest.raises(StoreUnavailable):
            cluster.own(2)
        assert len(tries) == 2, "the second pause is longer"
        cluster._open = opener
        seconds[0] += cluster_module.PAUSE_FIRST_SECONDS
        assert cluster.own(2).database_id == 2


def test_of_a_listed_database_that_is_away_it_is_said_when_it_joins(sqlite_site: Site, caplog):
    # Nobody listens on this port.
    with sqlite_site.open(sqlite_site.urls[0], "postgresql://u@127.0.0.1:1/x?connect_timeout=1") as cluster:
        assert cluster.is_alone
    (record,) = [it for it in caplog.records if getattr(it, "event", None) == "database_unavailable"]
    assert record.getMessage().endswith("it joins when a client opens this list while it can be reached")


def test_the_pause_has_an_upper_bound(sqlite_site: Site):
    seconds = [0.0]
    with sqlite_site.open() as cluster:
        store = cluster.own(2)
        cluster._monotonic_seconds = lambda: seconds[0]
        with down(cluster, store):
            for _ in range(12):
                with pytest.raises(StoreUnavailable):
                    cluster.write_at(2, lambda _: None)
                seconds[0] += cluster_module.PAUSE_LAST_SECONDS
        assert cluster.write_at(2, lambda _: 7) == 7


@pytest.mark.slow
def test_two_that_make_the_cluster_at_once_make_one(site: Site):
    found: list[list[tuple[int, str]]] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with site.open() as cluster:
                cluster.own(2), cluster.own(3)
                found.append([(member.database_id, member.store_uuid) for member in cluster.databases])
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert len(found) == 4
    assert all(entry == found[0] for entry in found)
    with site.open() as cluster:
        assert_cluster_sound(cluster, at_rest=True)


@pytest.mark.slow
def test_a_crash_at_any_step_of_joining_is_followed_by_whoever_comes_next(sqlite_site: Site):
    numbers = itertools.count(1)

    def make() -> list[str]:
        number = next(numbers)
        return [sqlite_site.new(f"{name}-{number}") for name in ("a", "b")]

    def join(urls: list[str]) -> None:
        cluster = open_cluster(urls, clock=sqlite_site.clock)
        cluster.parallel = False
        cluster.own(2)
        cluster.close()

    urls = make()
    for url in urls:
        # The tables are there, and looked at: that is not what is tried here.
        open_store(url).close()
    points = [point for point in steps_of(join, urls) if point.statement == "COMMIT"]
    assert len(points) > 10
    for point in points:
        urls = make()
        crash = crash_at(point.step, point.when, join, urls)
        assert crash is not None
        assert crash.point == point, "its first time took other steps"
        with noting(crash), open_cluster(urls, clock=sqlite_site.clock) as cluster:
            assert ids(cluster) == [(1, True), (2, True)]
            cluster.own(2)
            assert_cluster_sound(cluster, at_rest=True)


def test_an_interrupted_joining_leaves_the_database_to_nobody_else(sqlite_site: Site):
    with sqlite_site.open(sqlite_site.urls[0]) as cluster:
        controller = cluster.controller.read(read_databases)[0]
    with open_store(sqlite_site.urls[1]) as store:
        store.write(lambda connection: claim(connection, controller))
    with pytest.raises(WrongCluster, match="it was about to join"):
        sqlite_site.open(sqlite_site.urls[1])
    with pytest.raises(WrongCluster, match="belongs to another cluster"):
        sqlite_site.open(sqlite_site.urls[2], sqlite_site.urls[1])
    with sqlite_site.open(*sqlite_site.urls[:2]) as cluster:
        assert cluster.own(2).database_id == 2


def test_two_lists_of_another_order_at_once_wedge_nothing(sqlite_site: Site):
    first, second = sqlite_site.urls[:2]
    with open_store(second) as other:
        # The other one has looked, and reserved its own controller; it claims when the first one has done so.
        other.write(lambda connection: reserve(connection, "second.db"))
        with pytest.raises(WrongCluster, match="list with another order"):
            sqlite_site.open(first, second)
        with open_store(first) as store:
            controller = other.read(read_databases)[0]
            store.write(lambda connection: claim(connection, controller))
            with pytest.raises(WrongCluster, match="only the controller"):
                store.write(lambda connection: reserve(connection, "first.db"))
    with sqlite_site.open(second, first) as cluster:
        assert ids(cluster) == [(1, True), (2, True)]


def test_who_has_not_heard_of_the_second_database_gives_no_name_a_second_home(site: Site):
    with site.open(site.urls[0]) as stale, site.open() as cluster:
        assert stale.is_alone
        away = next(name for name in map(str, range(99)) if cluster.coordinator_id_of(name) == 2)
        here = next(name for name in map(str, range(99)) if cluster.coordinator_id_of(name) == 1)
        label = re.escape(cluster.label_of(2))
        with pytest.raises(NotCoordinator, match=rf"{label}.*nothing was changed"):
            TransactionCoordinator(stale.controller, stale).init_producer_id(away)
        with pytest.raises(NotCoordinator):
            stale.controller.write(
                lambda connection: commit_offsets(connection, GroupMembership(away), {1: OffsetAndMetadata(1)})
            )
        TransactionCoordinator(stale.controller, stale).init_producer_id(here)
        # It looks again, and knows what it lacks.
        stale.refresh()
        with pytest.raises(MissingMember):
            stale.coordinator_of(away)
        # A topic in a database that it has not heard of is learned of just so.
    with site.open() as cluster:
        assert_cluster_sound(cluster, at_rest=True)


def test_who_has_no_url_of_the_second_database_decides_and_others_deliver(site: Site):
    with site.open(site.urls[0]) as stale, site.open() as cluster:
        group_id = next(name for name in map(str, range(99)) if cluster.coordinator_id_of(name) == 2)
        name = next(name for name in map(str, range(99)) if cluster.coordinator_id_of(name) == 1)
        (number,) = create_topic(cluster, "orders").partition_ids
        producer = Producer(cluster, name).start()
        producer.send_offsets(group_id, {number: 5})
        assert stale.is_alone

        def found():
            return cluster.own(2).read(lambda connection: read_offsets(connection, group_id, [number]))

        assert abort_by_administrator(stale.controller, name, cluster=stale)
        assert len(stale.databases) > 1
        with pytest.raises(ConcurrentTransactions, match="no URL of the list leads there"):
            TransactionCoordinator(stale.controller, stale).init_producer_id(name)
        assert found().unstable
        assert recover(cluster.controller, cluster).completed == (name,)
        assert not found().unstable
        assert not found().offsets
        assert_cluster_sound(cluster, at_rest=True)


def expire(site: Site, stale: Cluster, producer: Producer) -> None:
    site.clock.advance(60_001)
    assert abort_timed_out(stale.controller, stale) == (producer.transactional_id,)


def meet_expired(site: Site, stale: Cluster, producer: Producer) -> None:
    site.clock.advance(60_001)
    assert abort_overdue(stale.controller, stale) is None


def commit_late(site: Site, stale: Cluster, producer: Producer) -> None:
    site.clock.advance(60_001)
    with pytest.raises(TransactionAbortable):
        TransactionCoordinator(stale.controller, stale).end_transaction(
            producer.transactional_id, producer.identity, commit=True
        )


def abort_in_partition(site: Site, stale: Cluster, producer: Producer) -> None:
    here = next(number for number, leader in stale.leaders_of(producer.sequences).items() if leader == 1)
    abort_open_transaction(stale.controller, OpenInPartition(here, producer.identity), stale)


def ask_for_outcome(site: Site, stale: Cluster, producer: Producer) -> None:
    outcome = resolve_outcome(stale.controller, producer.transactional_id, producer.identity, stale)
    assert outcome is Outcome.ABORTED


def complete(site: Site, stale: Cluster, producer: Producer) -> None:
    with down(producer.cluster, producer.cluster.own(2)), pytest.raises(OutcomeUnknown):
        producer.twin().end(commit=False)
    assert recover(stale.controller, stale).completed == (producer.transactional_id,)


ABORTS: dict[str, Callable[[Site, Cluster, Producer], object]] = {
    "recovery of one that is too old": expire,
    "a reader that meets one that is too old": meet_expired,
    "a commit that comes too late": commit_late,
    "recovery of what is decided": complete,
    "an administrator": lambda site, stale, producer: abort_by_administrator(
        stale.controller, producer.transactional_id, cluster=stale
    ),
    "an administrator, by the partition": abort_in_partition,
    "a new producer": lambda site, stale, producer: TransactionCoordinator(stale.controller, stale).init_producer_id(
        producer.transactional_id
    ),
    "a question": ask_for_outcome,
    "its own abort": lambda site, stale, producer: TransactionCoordinator(stale.controller, stale).end_transaction(
        producer.transactional_id, producer.identity, commit=False
    ),
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("abort", ABORTS.values(), ids=ABORTS)
def test_who_knew_one_database_ends_what_has_a_part_in_the_second(site: Site, abort, monkeypatch) -> None:
    def away(*_: object, **__: object) -> Store:
        raise StoreUnavailable

    with monkeypatch.context() as patched:
        # The second database was not to be had as this client began.
        patched.setattr(Address, "open", away)
        stale = site.open(*site.urls[:2])
    with stale, site.open(*site.urls[:2]) as cluster:
        topic = create_topic(cluster, "orders", partition_count=2, config={"txnstore.placement": "roundrobin"})
        name = next(name for name in map(str, range(99)) if cluster.coordinator_id_of(name) == 1)
        group_id = next(name for name in map(str, range(99)) if cluster.coordinator_id_of(name) == 2)
        producer = Producer(cluster, name).start()
        for number in topic.partition_ids:
            producer.send(number, b"a")
        producer.send_offsets(group_id, {topic.partition_ids[0]: 5})
        assert stale.is_alone
        abort(site, stale, producer)
        assert len(stale.databases) > 1
        assert [read(cluster, number) for number in topic.partition_ids] == [[], []]
        found = cluster.own(2).read(lambda connection: read_offsets(connection, group_id, topic.partition_ids))
        assert (found.unstable, dict(found.offsets)) == (frozenset(), {})
        assert_cluster_sound(cluster, at_rest=True)


def test_a_topic_elsewhere_tells_a_client_of_the_new_database(sqlite_site: Site):
    with sqlite_site.open(sqlite_site.urls[0]) as stale, sqlite_site.open() as cluster:
        stale.learn(create_topic(cluster, "orders", config={"txnstore.placement": "second.db"}))
        assert len(stale.databases) > 1


def test_nothing_joins_at_a_member(sqlite_site: Site):
    with (
        sqlite_site.open() as cluster,
        pytest.raises(WrongCluster, match=r"changed in the controller of the cluster, the database 'first\.db'"),
    ):
        cluster.own(2).write(lambda connection: topics.create_topic(connection, "orders"))


@pytest.mark.parametrize("text", ["", " ", "nonsense,sqlite:///a.db"])
def test_what_is_no_list_is_refused(text):
    with pytest.raises(InvalidUrl):
        open_cluster(text)


def test_the_number_of_a_bad_url_is_told_and_nothing_of_it(sqlite_site: Site):
    with pytest.raises(InvalidUrl, match="URL 2 of the list") as raised:
        sqlite_site.open(sqlite_site.urls[0], "postgresql:/user:secret@host/x")
    assert "secret" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_uses_the_cluster_with_connections_and_threads_of_its_own(sqlite_site: Site):
    with sqlite_site.open() as cluster:
        create_topic(cluster, "orders", partition_count=3)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                create_topic(cluster, "of-the-child", partition_count=3)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        create_topic(cluster, "of-the-parent")
        assert_cluster_sound(cluster, at_rest=True)
