"""Rows of the outbox that cannot become records are there for people to see for as long as they were told, then go."""

from __future__ import annotations

import pytest
from sqlalchemy import insert, select, update

from scripts.table_growth import GROWTH
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.portions import Portions
from txnstore.db.schema import metadata, outbox
from txnstore.log.outbox.sequencer import delete_refused, drain_outbox
from txnstore.log.topics import create_topic

DAY_MS = 86_400_000
SETTING = "txnstore.outbox.refused.retention.ms"


def put(store, topic):
    store.write(lambda connection: connection.execute(insert(outbox).values(topic=topic, value=b"v")))


def left(store):
    return store.read(lambda connection: connection.execute(select(outbox).order_by(outbox.c.outbox_id)).all())


@pytest.fixture
def refused(store):
    """A row that was refused now."""
    put(store, "no/topic")
    assert drain_outbox(store) == 0
    (row,) = left(store)
    assert row.refusal
    return row


def test_a_refused_row_goes_once_it_was_there_for_as_long_as_the_setting_says(store, clock, refused, caplog):
    assert refused.refused_ms == clock.now_ms()
    clock.advance(30 * DAY_MS - 1)
    assert delete_refused(store) == 0
    assert "deleted" not in caplog.text
    put(store, "no/topic")
    drain_outbox(store)
    clock.advance(1)
    assert delete_refused(store) == 1
    assert "1 refused rows that nobody asked to retry were deleted" in caplog.text
    assert len(left(store)) == 1


def test_it_may_be_told_to_stay(store, clock, refused):
    store.write(lambda connection: change_store_settings(connection, {SETTING: "-1"}))
    clock.advance(10_000 * DAY_MS)
    assert delete_refused(store) == 0
    store.write(lambda connection: change_store_settings(connection, {SETTING: "0"}))
    assert delete_refused(store) == 1


def test_one_that_is_to_be_tried_again_stays_and_counts_anew_if_it_is_refused_again(store, clock, refused):
    clock.advance(31 * DAY_MS)
    store.write(lambda connection: connection.execute(update(outbox).values(refusal=None)))
    assert delete_refused(store) == 0
    assert drain_outbox(store) == 0
    assert left(store)[0].refused_ms == clock.now_ms()
    assert delete_refused(store) == 0


def test_one_that_is_told_so_while_it_is_about_to_be_deleted_stays(store, clock, refused, monkeypatch):
    clock.advance(31 * DAY_MS)
    write = Portions.write

    def write_behind_its_owner(portions, store, work):
        store.write(lambda connection: connection.execute(update(outbox).values(refusal=None)))
        return write(portions, store, work)

    monkeypatch.setattr(Portions, "write", write_behind_its_owner)
    assert delete_refused(store) == 0
    assert len(left(store)) == 1


def test_rows_that_wait_are_not_touched_however_old(store, clock, refused):
    store.write(lambda connection: create_topic(connection, "t"))
    put(store, "t")
    clock.advance(31 * DAY_MS)
    assert delete_refused(store) == 1
    (row,) = left(store)
    assert (row.topic, row.refusal, row.refused_ms) == ("t", None, None)
    assert drain_outbox(store) == 1


def test_somebody_with_no_time_deletes_a_portion(store, clock):
    for _ in range(30):
        put(store, "no/topic")
    drain_outbox(store)
    assert all(row.refusal for row in left(store))
    clock.advance(31 * DAY_MS)
    assert delete_refused(store, Portions(seconds=0.0)) == 25
    assert delete_refused(store, Portions(seconds=0.0)) == 5


def test_the_reference_says_of_every_table_what_goes():
    assert set(GROWTH) == {str(table.name) for table in metadata.tables.values()}
    assert all(text.endswith(".") for text in GROWTH.values())
