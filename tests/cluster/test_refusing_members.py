"""A member that refuses, for it was replaced or restored elsewhere: nothing that is asked of all waits for it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, select, update
from typer.testing import CliRunner

from tests.cluster.conftest import Bench, Site
from txnstore import KafkaException
from txnstore.admin import AdminClient
from txnstore.cli.output import FAILED
from txnstore.cli.program import NAMES, program_with
from txnstore.db.cluster.membership import read_databases
from txnstore.db.opening import open_store
from txnstore.db.schema import databases, stores
from txnstore.db.store import Store
from txnstore.errors import StoreClosed, StoreCopied, TxnStoreError, WrongCluster
from txnstore.groups.offsets import commit_offsets
from txnstore.log.append import Append, append
from txnstore.log.cluster_topics import create_topic, delete_topic
from txnstore.log.codec import encode
from txnstore.model import GroupMembership, OffsetAndMetadata, ProducerIdentity, Record
from txnstore.transactions.listing import hanging_in_cluster
from txnstore.transactions.open_transactions import each_held, each_open
from txnstore.transactions.recovery import recover

PATIENCE_SECONDS = 60


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
Happens = Callable[[Connection], None]


@REFUSALS
def test_what_is_asked_of_all_is_answered_by_the_others_and_names_the_one_that_refuses(
    bench: Bench, happens: Happens, refusal: type[TxnStoreError], what_to_do: str, caplog: pytest.LogCaptureFixture
):
    other, hers = bench.producer_at(3), bench.producer_at(2)
    group_id = bench.name_at(1, "group")
    for producer in (other, hers):
        producer.send(bench.partition_at(1), b"a")
        producer.send_offsets(group_id, {bench.partition_at(1): 1})
    bench.cluster.own(2).write(happens)
    with bench.site.open() as cluster:
        for _ in range(2):
            assert [store.database_id for store, _ in cluster.read_all(read_databases)] == [1, 3]
            assert list(cluster.left_out) == [2]
            with pytest.raises(refusal, match=what_to_do):
                raise cluster.left_out[2]
        found = {one.producer_id: one for one in each_open(cluster)}
        assert {number: one.coordinator_is_away for number, one in found.items()} == {
            other.identity.producer_id: False,
            hers.identity.producer_id: True,
        }
        assert {one.producer_id for one in each_held(cluster)} == found.keys()
        # Only its coordinator could tell that hers does not hang.
        bench.clock.advance(3_600_000_000)
        assert {one.producer_id for one in hanging_in_cluster(cluster, 0)} <= {other.identity.producer_id}
        recover(cluster.own(1), cluster)
        recover(cluster.own(3), cluster)
        assert [one.producer_id for one in each_open(cluster)] == [hers.identity.producer_id]
    told = {getattr(record, "database", None) for record in caplog.records}
    assert told == {bench.cluster.label_of(2)}
    with pytest.raises(StoreClosed):
        list(cluster.stores())


@REFUSALS
def test_lists_show_what_the_others_have_and_say_who_refuses(
    bench: Bench, happens: Happens, refusal: type[TxnStoreError], what_to_do: str
):
    del refusal
    groups = {number: bench.name_at(number, "group") for number in (1, 2, 3)}
    for number, group_id in groups.items():
        offsets = {bench.partition_at(number): OffsetAndMetadata(0)}
        bench.cluster.own(number).write(
            lambda connection, group_id=group_id, offsets=offsets: commit_offsets(
                connection, GroupMembership(group_id), offsets
            )
        )
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


def lead_elsewhere(monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    """Let the second URL lead to a stranger for whoever opens the list from now on; nobody else notices."""
    stranger, (_, second, _) = site.new("stranger"), site.urls

    def open_what_is_there(url: str, **options: Any) -> Store:
        return open_store(stranger if url == second else url, **options)

    monkeypatch.setattr("txnstore.db.cluster.cluster.open_store", open_what_is_there)


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
    delete_topic(bench.cluster, "shop")
