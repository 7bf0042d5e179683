"""A member that refuses, for it was replaced or restored elsewhere: nothing that is asked of all waits for it."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import Connection, select, update
from typer.testing import CliRunner

from tests.cluster.conftest import Bench, Site, down
from tests.tools.cluster_changes import delete_topic
from txnstore import KafkaException
from txnstore.admin import AdminClient
from txnstore.cli.output import FAILED
from txnstore.cli.program import NAMES, program_with
from txnstore.db.cluster.cluster import PAUSE_FIRST_SECONDS, Cluster, LeftOut
from txnstore.db.cluster.membership import PRODUCER_ID_BITS, read_databases
from txnstore.db.opening import open_store
from txnstore.db.schema import databases, stores
from txnstore.db.store import Store
from txnstore.errors import (
    InvalidTransactionState,
    PermissionDenied,
    StoreBusy,
    StoreClosed,
    StoreCopied,
    StoreUnavailable,
    TxnStoreError,
    WrongCluster,
)
from txnstore.groups.offsets import commit_offsets
from txnstore.log.append import Append, append
from txnstore.log.cluster_topics import create_topic
from txnstore.log.codec import encode
from txnstore.log.retention import delete_expired_batches
from txnstore.model import GroupMembership, OffsetAndMetadata, ProducerIdentity, Record
from txnstore.transactions.listing import hanging_in_cluster
from txnstore.transactions.open_transactions import each_held, each_open
from txnstore.transactions.recovery import recover

PATIENCE_SECONDS = 60
Happens = Callable[[Connection], None]


def replaced(connection: Connection) -> None:
    """Let another store be in the place of the member."""
    own = select(stores.c.store_uuid).scalar_subquery()
    other = str(uuid.uuid4())
    connection.execute(update(databases).where(databases.c.store_uuid == own).values(store_uuid=other))
    connection.execute(update(stores).values(store_uuid=other))


def restored_elsewhere(connection: Connection) -> None:
    """Let the member's tables have been made in another place."""
    connection.execute(update(stores).values(database_identity="elsewhere"))


REFUSALS = pytest.mark.parametrize(
    ("happens", "refusal", "what_to_do"),
    [
        (replaced, WrongCluster, r"'[^']*second.*is not the one that is registered.*bring that one back, or change"),
        (restored_elsewhere, StoreCopied, r"second.*made in another place.*txnstore adopt --same"),
    ],
)


def groups_everywhere(bench: Bench) -> dict[int, str]:
    """Return a group with an offset in each database."""
    groups = {number: bench.name_at(number, "group") for number in (1, 2, 3)}
    for number, group_id in groups.items():
        offsets = {bench.partition_at(number): OffsetAndMetadata(0)}
        bench.cluster.own(number).write(
            lambda connection, group_id=group_id, offsets=offsets: commit_offsets(
                connection, GroupMembership(group_id), offsets
            )
        )
    return groups


@pytest.mark.slow
@REFUSALS
def test_what_is_asked_of_all_is_answered_by_the_others_and_names_the_one_that_refuses(
    bench: Bench, happens: Happens, refusal: type[TxnStoreError], what_to_do: str
):
    other, hers = bench.producer_at(3), bench.producer_at(2)
    group_id = bench.name_at(1, "group")
    for producer in (other, hers):
        producer.send(bench.partition_at(1), b"a")
        producer.send_offsets(group_id, {bench.partition_at(1): 1})
    bench.cluster.own(2).write(happens)
    with bench.site.open() as cluster:
        for _ in range(2):
            left_out: LeftOut = {}
            assert [store.database_id for store, _ in cluster.read_all(read_databases, left_out)] == [1, 3]
            assert list(left_out) == [2]
            with pytest.raises(refusal, match=what_to_do):
                raise left_out[2]
        found = {one.producer_id: one for one in each_open(cluster, {})}
        assert {number: one.coordinator_is_away for number, one in found.items()} == {
            other.identity.producer_id: False,
            hers.identity.producer_id: True,
        }
        assert {one.producer_id for one in each_held(cluster, {})} == found.keys()
        # Only its coordinator could tell that hers does not hang.
        bench.clock.advance(3_600_000_000)
        assert {one.producer_id for one in hanging_in_cluster(cluster, {}, 0)} <= {other.identity.producer_id}
        recover(cluster.own(1), cluster)
        recover(cluster.own(3), cluster)
        assert [one.producer_id for one in each_open(cluster, {})] == [hers.identity.producer_id]
    with pytest.raises(StoreClosed):
        list(cluster.stores())


@pytest.mark.slow
@REFUSALS
def test_lists_show_what_the_others_have_and_say_who_refuses(
    bench: Bench, happens: Happens, refusal: type[TxnStoreError], what_to_do: str
):
    del refusal
    groups = groups_everywhere(bench)
    batch = encode([Record(b"a")], producer=ProducerIdentity(5, 0), base_sequence=0)
    bench.cluster.own(3).write(lambda connection: append(connection, [Append(bench.partition_at(3), batch)]))
    bench.cluster.own(2).write(happens)
    urls = ",".join(bench.site.urls)
    with AdminClient({"bootstrap.servers": urls}) as admin:
        listed = admin.list_consumer_groups().result(PATIENCE_SECONDS)
        assert {group.group_id for group in listed.valid or ()} == {groups[1], groups[3]}
        (error,) = listed.errors or ()
        with pytest.raises(type(error), match=what_to_do):
            raise error
        assert admin.list_transactions().result(PATIENCE_SECONDS) == []
    for command, count in {("groups", "list"): 2, ("topics", "list"): 1, ("transactions", "list"): 0}.items():
        shown = CliRunner().invoke(program_with(NAMES), ["--url", urls, *command, "--json"])
        assert shown.exit_code == FAILED, (command, shown.output)
        assert len(json.loads(shown.stdout)) == count, command
        assert "second" in shown.stderr
    shown = CliRunner().invoke(program_with(NAMES), ["--url", urls, "info", "--json"])
    assert (shown.exit_code, "second" in shown.stderr) == (FAILED, True)
    assert [each["counted"] for each in json.loads(shown.stdout)["databases"]] == [True, False, True]


def lead_elsewhere(monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    """Let the second URL lead to a stranger for whoever opens the list from now on; nobody else notices."""
    stranger, (_, second, _) = site.new("stranger"), site.urls

    def open_what_is_there(url: str, **options: Any) -> Store:
        return open_store(stranger if url == second else url, **options)

    monkeypatch.setattr("txnstore.db.cluster.cluster.open_store", open_what_is_there)


@pytest.mark.slow
def test_a_topic_in_use_is_not_deleted_by_a_client_that_only_its_own_wrong_url_keeps_from_knowing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    topic = create_topic(bench.cluster, "shop", config={"txnstore.placement": bench.cluster.label_of(1)})
    producer = bench.producer_at(2)
    producer.send(topic.partition_ids[0], b"a")
    lead_elsewhere(monkeypatch, bench.site)
    urls = ",".join(bench.site.urls)
    with bench.site.open() as cluster, pytest.raises(WrongCluster, match=r"second.*is not the one"):
        delete_topic(cluster, "shop")
    shown = CliRunner().invoke(program_with(NAMES), ["--url", urls, "topics", "delete", "shop", "--yes"])
    assert isinstance(shown.exception, WrongCluster)
    with AdminClient({"bootstrap.servers": urls}) as admin, pytest.raises(KafkaException, match="second"):
        admin.delete_topics(["shop"])["shop"].result(PATIENCE_SECONDS)
    producer.end(commit=True)
    assert bench.read(topic.partition_ids[0]) == [b"a"]
    # One that is away has nobody to disturb.
    producer.send(topic.partition_ids[0], b"b")
    with pytest.raises(InvalidTransactionState):
        delete_topic(bench.cluster, "shop")
    with bench.down(2):
        delete_topic(bench.cluster, "shop")


@contextmanager
def gone_back(cluster: Cluster, store: Store) -> Iterator[None]:
    """Let a database that is open be found to be an older state of itself."""
    del cluster
    store.gone_back = f"{store.label}: it has gone back to an older state"
    try:
        yield
    finally:
        store.gone_back = None


Trouble = Callable[[Cluster, Store], AbstractContextManager[None]]
TROUBLES = pytest.mark.parametrize("trouble", [down, gone_back])


@pytest.mark.slow
@TROUBLES
def test_the_lists_of_a_client_that_lives_long_go_on_without_a_member_that_was_open(
    bench: Bench, trouble: Trouble, caplog: pytest.LogCaptureFixture
):
    groups = groups_everywhere(bench)
    theirs, hers = bench.producer_at(3), bench.producer_at(2)
    for producer in (theirs, hers):
        producer.send(bench.partition_at(1), b"a")
        producer.send_offsets(groups[1], {bench.partition_at(1): 1})
    with AdminClient({"bootstrap.servers": ",".join(bench.site.urls)}) as admin:
        cluster = admin._connection.cluster()
        assert [store.database_id for store in cluster.stores()] == [1, 2, 3]
        with trouble(cluster, cluster.own(2)):
            listed = admin.list_consumer_groups().result(PATIENCE_SECONDS)
            assert {group.group_id for group in listed.valid or ()} == {groups[1], groups[3]}
            assert len(listed.errors or ()) == 1
            assert [record for record in caplog.records if "left out" in record.getMessage()] == []
            with pytest.deprecated_call():
                assert {group.id for group in admin.list_groups(timeout=PATIENCE_SECONDS)} == {groups[1], groups[3]}
            transactions = admin.list_transactions().result(PATIENCE_SECONDS)
            assert [one.transactional_id for one in transactions] == [theirs.transactional_id]
            opened = admin.list_open_transactions().result(PATIENCE_SECONDS)
            assert {one.transactional_id: one.is_hanging for one in opened} == {
                theirs.transactional_id: False,
                None: False,
            }
            held = admin.list_pending_offsets().result(PATIENCE_SECONDS)
            assert {one.transactional_id for one in held} == {theirs.transactional_id, None}
            assert admin.find_hanging_transactions().result(PATIENCE_SECONDS) == []
        told = [getattr(record, "database", None) for record in caplog.records if "left out" in record.getMessage()]
        assert told == [cluster.label_of(2)] * 5


@contextmanager
def silent(store: Store, waited_ms: list[int]) -> Iterator[None]:
    """Let a database be away, and note how long each caller would have tried it."""

    def wait(_: object, retry_timeout_ms: int | None) -> None:
        waited_ms.append(store.limits.retry_timeout_ms if retry_timeout_ms is None else retry_timeout_ms)
        raise StoreUnavailable(f"the database {store.label!r}: it is away")

    store._attempt = wait  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del store._attempt


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", ["list_transactions", "list_open_transactions", "list_pending_offsets", "find_hanging_transactions"]
)
@pytest.mark.parametrize("timeout_seconds", [None, 6])
def test_members_that_were_open_and_are_away_leave_a_listing_the_time_to_come(
    bench: Bench, call: str, timeout_seconds: float | None, caplog: pytest.LogCaptureFixture
):
    """Each is asked once, be it for what it coordinates, and they share what the call may take."""
    group_id = bench.name_at(1, "group")
    for producer in (bench.producer_at(2), bench.producer_at(3)):
        producer.send(bench.partition_at(1), b"a")
        producer.send_offsets(group_id, {bench.partition_at(1): 1})
    bench.clock.advance(3_600_000_000)
    waited_ms: list[int] = []
    with AdminClient({"bootstrap.servers": ",".join(bench.site.urls)}) as admin:
        _, second, third = admin._connection.cluster().stores()
        with silent(second, waited_ms), silent(third, waited_ms):
            getattr(admin, call)(request_timeout=timeout_seconds).result(PATIENCE_SECONDS)
    assert len(waited_ms) == 2
    assert sum(waited_ms) <= 1000 * (timeout_seconds or 30)
    assert {getattr(record, "database", None) for record in caplog.records} >= {second.label, third.label}


@pytest.mark.slow_but_first
@TROUBLES
def test_where_no_database_can_be_asked_that_is_the_answer(sqlite_bench: Bench, trouble: Trouble):
    with AdminClient({"bootstrap.servers": ",".join(sqlite_bench.site.urls)}) as admin:
        cluster = admin._connection.cluster()
        first, second, third = cluster.stores()
        with trouble(cluster, first), trouble(cluster, second), trouble(cluster, third):
            assert len(admin.list_consumer_groups().result(PATIENCE_SECONDS).errors or ()) == 3
            with pytest.raises(KafkaException):
                admin.list_transactions().result(PATIENCE_SECONDS)


@pytest.mark.slow
@TROUBLES
def test_retention_goes_on_beside_a_member_that_was_open_but_where_its_groups_may_still_read(
    bench: Bench, trouble: Trouble
):
    for name, more in {"plain": {}, "waits": {"txnstore.retention.unread.ms": "60000"}}.items():
        config = {"txnstore.placement": bench.cluster.label_of(3), "retention.ms": "1000", **more}
        (partition_id,) = create_topic(bench.cluster, name, config=config).partition_ids
        added = Append(partition_id, encode([Record(b"a", timestamp_ms=bench.clock.now_ms())]))
        bench.cluster.own(3).write(lambda connection, added=added: append(connection, [added]))
    bench.clock.advance(2_000)
    with trouble(bench.cluster, bench.cluster.own(2)):
        assert delete_expired_batches(bench.cluster.own(3), bench.cluster, batches_max=10) == 1
    assert delete_expired_batches(bench.cluster.own(3), bench.cluster, batches_max=10) == 1


def test_each_who_asks_is_told_what_was_left_out_for_him_whoever_asks_beside(bench: Bench):
    cluster, mine, others = bench.cluster, LeftOut(), LeftOut()
    with bench.down(2):
        assert [store.database_id for store, _ in cluster.read_all(read_databases, mine)] == [1, 3]
    assert len(cluster.read_all(read_databases, others)) == 3
    assert (list(mine), list(others)) == ([2], [])


@contextmanager
def answering_once(store: Store, error: TxnStoreError | None) -> Iterator[None]:
    """Let a database answer what it is asked first, and refuse with the error what it is asked then."""
    attempt, calls = store._attempt, itertools.count()

    def once(*arguments: Any) -> Any:
        if next(calls) and error is not None:
            raise error
        return attempt(*arguments)

    store._attempt = once  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del store._attempt


@pytest.mark.slow_but_first
@pytest.mark.parametrize("error", [StoreBusy("busy"), PermissionDenied("no right"), None])
def test_what_cannot_be_explained_is_not_taken_for_hanging_and_that_is_said(bench: Bench, error: TxnStoreError | None):
    """Its coordinator cannot be asked, or is of a number that the cluster does not have."""
    producer, number = bench.producer_at(2), 2 if error is not None else 99
    producer.become(ProducerIdentity(((number - 1) << PRODUCER_ID_BITS) + 7, 0))
    added = producer.batch(bench.partition_at(3), b"x")
    bench.cluster.own(3).write(lambda connection: append(connection, [added], coordinated=True))
    bench.clock.advance(3_600_000)

    hanging, opened = LeftOut(), LeftOut()
    with answering_once(bench.cluster.own(2), error):
        assert hanging_in_cluster(bench.cluster, hanging, 0) == []
    with answering_once(bench.cluster.own(2), error):
        (one,) = each_open(bench.cluster, opened)
    assert one.coordinator_is_away
    for left_out in (hanging, opened):
        assert list(left_out) == [number]
        with pytest.raises(WrongCluster if error is None else type(error), match=r"99|busy|right"):
            raise left_out[number]
    if error is not None:
        # Now its coordinator says that it knows nothing of it.
        (one,) = each_open(bench.cluster, {})
        assert one.is_hanging
        # A standby may not have heard of it yet.
        with patch.object(type(bench.cluster.own(2).backend), "is_standby", lambda *_: True):
            (one,) = each_open(bench.cluster, {})
        assert (one.coordinator_is_away, one.is_hanging) == (True, False)


def test_a_store_that_was_closed_is_no_reason_to_go_on(bench: Bench):
    bench.cluster.own(2).close()
    for ask in (each_open, each_held):
        with pytest.raises(StoreClosed):
            list(ask(bench.cluster, {}))
    with pytest.raises(StoreClosed):
        hanging_in_cluster(bench.cluster, {}, 0)


@pytest.mark.slow_but_first
@REFUSALS
def test_one_that_refuses_is_left_alone_for_a_while_as_one_that_is_away_is(
    bench: Bench, happens: Happens, refusal: type[TxnStoreError], what_to_do: str, caplog: pytest.LogCaptureFixture
):
    bench.cluster.own(2).write(happens)
    seconds = [0.0]
    tries: list[str] = []
    with bench.site.open() as cluster:
        opener = cluster._open

        def counted(url: str, create: bool) -> Store:
            tries.append(url)
            return opener(url, create)

        cluster._open, cluster._monotonic_seconds = counted, lambda: seconds[0]
        for later_seconds, expected in ((0, 1), (PAUSE_FIRST_SECONDS / 3, 1), (PAUSE_FIRST_SECONDS, 2)):
            seconds[0] = later_seconds
            left_out: LeftOut = {}
            assert [store.database_id for store in cluster.stores(left_out)] == [1, 3]
            with pytest.raises(refusal, match=what_to_do):
                cluster.own(2)
            with pytest.raises(refusal, match=what_to_do):
                raise left_out[2]
            assert tries.count(bench.site.urls[1]) == expected
        cluster.warn_of(left_out)
    told = [vars(record) for record in caplog.records if "left out" in record.getMessage()]
    assert [(each["event"], each["database"]) for each in told] == [("database_refuses", bench.cluster.label_of(2))]


def test_a_member_that_was_only_busy_is_no_half_answer_and_is_asked_again_at_once(
    sqlite_bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    """Where nobody is told what was left out, who is busy is an error; and the next one does not hear of it."""
    sqlite_bench.cluster.warn_of({2: StoreUnavailable("away"), 3: WrongCluster("another one")})
    with pytest.raises(StoreBusy, match="busy"):
        sqlite_bench.cluster.warn_of({2: StoreUnavailable("away"), 3: StoreBusy("busy")})

    with sqlite_bench.site.open() as cluster:

        def busy(_: object) -> None:
            raise StoreBusy("busy")

        with monkeypatch.context() as patch:
            patch.setattr(cluster, "_open_member", busy)
            with pytest.raises(StoreBusy):
                cluster.own(2)
        assert cluster.own(2).database_id == 2


def test_of_several_addresses_the_one_that_refuses_says_more_than_those_that_are_away(
    sqlite_bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    with sqlite_bench.site.open() as cluster:
        errors = iter([StoreUnavailable("away"), WrongCluster("another one"), StoreUnavailable("away")])

        def fail(_: object) -> None:
            raise next(errors)

        monkeypatch.setattr(cluster, "_addresses", [cluster._addresses[0]] * 4)
        for address in cluster._addresses:
            monkeypatch.setattr(address, "database_id", None)
        monkeypatch.setattr(cluster, "_open_member", fail)
        with pytest.raises(WrongCluster, match="another one"):
            cluster.own(2)
