"""A store that has moved: everything is where it was, and its clients go on there, and only there."""

from __future__ import annotations

import uuid
from contextlib import closing as closing_after

import pytest
from sqlalchemy import delete, insert, select, update

from tests.clients.consumer.log_writer import PATIENCE_SECONDS, LogWriter, texts
from tests.copies import copy_file
from tests.crash.worlds import look
from tests.moving.histories import (
    TOPICS,
    all_rows,
    append_batch,
    committed,
    messages,
    sink_batch,
)
from txnstore import Consumer, KafkaException, Producer, TopicPartition
from txnstore.admin import AdminClient, NewTopic
from txnstore.db import closing, migrating
from txnstore.db.closing import Move, MoveState, close, read_cancelled_moves, read_move
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.identity import check_original
from txnstore.db.opening import open_store
from txnstore.db.schema import (
    databases,
    maintenance_duties,
    outbox,
    partition_heads,
    partitions,
    record_batches,
    stores,
    topics,
    transaction_branches,
)
from txnstore.errors import (
    InvalidRequest,
    OutcomeUnknown,
    ProducerFenced,
    SchemaTooNew,
    StoreCopied,
    StoreDamaged,
    StoreMoved,
)
from txnstore.groups.offsets import commit_offsets
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.topics import create_topic, get_topic
from txnstore.model import GroupMembership, OffsetAndMetadata, Record
from txnstore.moving import move as moving
from txnstore.moving.move import cancel, move
from txnstore.participants.adoption import adopt
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.recovery import recover
from txnstore.transactions.transaction import SentOffsets
from txnstore.verification.verify import verify_store

# Clients come and go on both sides.
pytestmark = pytest.mark.crashes

DUTY = {"duty": "some", "begun_ms": 5, "is_unfinished": True, "position": "here", "turn_ms": 6}


def store_row(store):
    return store.read(lambda connection: connection.execute(select(stores)).one())


@pytest.mark.slow
def test_everything_is_where_it_was_and_clients_go_on_there(history, urls, opened) -> None:
    source, target = map(opened, urls)
    before, old = all_rows(source), store_row(source)
    assert {name for name, rows in before.items() if not rows} - {"maintenance_duties"} == {
        "offset_producers",
        "transaction_branches",
    }
    seen = {topic: without_outbox(messages(urls[0], topic)) for topic in TOPICS}
    # A producer of before: what it has open, and what it would still send, is the old store's.
    zombie = Producer({"bootstrap.servers": urls[0], "transactional.id": "payments"})
    zombie.init_transactions()
    if not before["maintenance_duties"]:
        source.write(lambda connection: connection.execute(insert(maintenance_duties), DUTY))
    target.write(lambda connection: connection.execute(insert(maintenance_duties), DUTY | {"duty": "there"}))

    moved = move(source, target)
    # As it stands since nobody can write to it any more.
    before = all_rows(source)
    assert before["maintenance_duties"]

    assert moved.store_uuid == old.store_uuid
    assert sum(digest.row_count for digest in moved.tables.values()) == sum(map(len, before.values()))
    after = all_rows(target)
    # The old server's numbers of database transactions say nothing on the new one.
    for row in before["outbox"]:
        before["outbox"][before["outbox"].index(row)] = tuple(
            -value if name == "transaction_id" and value else value
            for name, value in zip(_columns("outbox"), row, strict=True)
        )
    assert after == before
    new = store_row(target)
    assert (new.store_uuid, new.next_producer_id, new.created_ms) == (
        old.store_uuid,
        before_ids(old, source),
        old.created_ms,
    )
    gone = store_row(source)
    assert (new.move_state, new.move_uuid, new.move_position) == (None, gone.move_uuid, None)
    assert new.database_identity != old.database_identity
    assert verify_store(target) == []

    assert {topic: without_outbox(messages(urls[1], topic)) for topic in TOPICS} == seen
    assert committed(urls[1], "accounting", "orders", 0) == 7
    zombie.begin_transaction()
    zombie.produce("orders", b"late")
    with pytest.raises(KafkaException, match="is closed"):
        zombie.commit_transaction()
    zombie.close()
    go_on(history, urls[1], opened)


def without_outbox(found):
    """Leave out what was in the outbox: whoever reads first makes records of it, here or there."""
    return [each for each in found if each[4] != b"waits"]


def before_ids(old, source):
    # The zombie's start gave none out: its transactional id had one.
    return store_row(source).next_producer_id


def _columns(name):
    from txnstore.db.schema import metadata

    return [column.name for column in metadata.tables[f"txnstore.{name}"].c if column.computed is None]


def go_on(history, url, opened):
    """Do what clients do next, each from where it was."""
    with open_store(url) as store:
        partition_id, producer = history.retried
        again = append_batch(store, partition_id, producer)
        assert again.is_duplicate
        # The epoch goes on: what began before is aborted by whoever comes back.
        assert look(store, history.open).is_pending
        name = history.open.transactional_id
        epoch = history.open.producer.epoch
        began = TransactionCoordinator(store).init_producer_id(name).identity
        assert (began.producer_id, began.epoch > epoch) == (history.open.producer.producer_id, True)
        with pytest.raises(ProducerFenced):
            TransactionCoordinator(store).end_transaction(name, history.open.producer, commit=True)
        recover(store)
        assert look(store, history.decided).committed[0][:3] == (b"old-0", b"old-1", b"first-0")
        assert not sink_batch(store, history.query_id, history.sink_partition, 1)
        assert sink_batch(store, history.query_id, history.sink_partition, 2)
        assert verify_store(store) == []
        known = store.read(lambda connection: connection.execute(select(topics.c.topic_id)).scalars().all())
        made = store.write(lambda connection: create_topic(connection, name="made-there", partition_count=1))
        assert made.topic_id == max(known) + 2, "the number of a deleted topic was given out again"
    with Producer({"bootstrap.servers": url, "transactional.id": "payments"}) as payments:
        payments.init_transactions()
        payments.begin_transaction()
        payments.produce("orders", b"there", partition=0)
        payments.commit_transaction()
    with Consumer(
        {"bootstrap.servers": url, "group.id": "accounting", "auto.offset.reset": "error", "enable.auto.commit": False}
    ) as consumer:
        consumer.assign([TopicPartition("orders", 0)])
        message = consumer.poll(60)
        assert message is not None
        assert message.offset() == 7
    assert messages(url, "orders")[-1][0] == 2
    assert any(value == b"there" for _, _, _, _, value, _ in messages(url, "orders"))
    assert any(value == b"waits" for _, _, _, _, value, _ in messages(url, "orders")), "the outbox was forgotten"


def filled(url):
    """Put a little into a store."""
    with open_store(url) as store:
        store.write(lambda connection: create_topic(connection, name="t", partition_count=2))
    with Producer({"bootstrap.servers": url}) as producer:
        for number in range(20):
            producer.produce("t", str(number), partition=number % 2)
    return url


@pytest.mark.slow
def test_a_group_in_commit_order_goes_on_within_its_transaction_and_one_that_is_open_commits_it(
    urls_across, opened
) -> None:
    source, target = map(opened, urls_across)
    log = LogWriter(source)
    log.topic()
    transaction, worker = log.transaction(), log.transaction()
    for value in (b"a", b"b", b"c"):
        transaction.write("t", 0, value)
    log.write("t", 0, b"N")
    transaction.end(commit=True)  # 4
    log.write("t", 0, b"end")
    partition_id = log.partition_id("t", 0)
    done, pending = (OffsetAndMetadata(4, offset_in_transaction=offset) for offset in (1, 2))
    for group_id in ("plain", "worker"):
        source.write(
            lambda connection, of=group_id: commit_offsets(connection, GroupMembership(of), {partition_id: done})
        )
    sent = SentOffsets(GroupMembership("worker"), {partition_id: pending})
    worker.writer.coordinator.send_offsets(worker.transactional_id, worker.identity, sent)

    move(source, target)

    assert verify_store(target) == []
    TransactionCoordinator(target).end_transaction(worker.transactional_id, worker.identity, commit=True)
    assert verify_store(target) == []
    for group_id, values in (("plain", [b"b", b"c", b"end"]), ("worker", [b"c", b"end"])):
        settings = {"bootstrap.servers": urls_across[1], "group.id": group_id, "txnstore.delivery.order": "commit"}
        with Consumer({**settings, "enable.auto.commit": False}) as consumer:
            consumer.assign([TopicPartition("t", 0)])
            assert texts(consumer.consume(len(values), PATIENCE_SECONDS)) == values


@pytest.mark.slow_but_first
@pytest.mark.parametrize("commit", [True, False])
def test_a_prepared_transaction_is_ended_where_the_store_went_and_only_there(urls_across, opened, commit) -> None:
    """KIP-939: nobody but its producer decides, however long that takes."""
    urls = urls_across
    source, target = map(opened, urls)
    source.write(lambda connection: change_store_settings(connection, {"transaction.two.phase.commit.enable": "true"}))
    settings = {"transactional.id": "prepares", "transaction.two.phase.commit.enable": True}
    with closing_after(Producer({**settings, "bootstrap.servers": urls[0]})) as before:
        before.init_transactions()
        before.begin_transaction()
        before.produce("t", b"prepared")
        state = before.prepare_transaction()
        move(source, target)
        with pytest.raises(KafkaException, match="is closed"):
            before.complete_transaction(state)
    with closing_after(Producer({**settings, "bootstrap.servers": urls[1]})) as after:
        after.init_transactions(keep_prepared_txn=True)
        assert messages(urls[1], "t") == []
        if commit:
            after.complete_transaction(str(state))
        else:
            after.abort_transaction()
    assert [value for *_, value, _ in messages(urls[1], "t")] == ([b"prepared"] if commit else [])
    assert_sound(target)


def test_a_second_call_changes_nothing_and_a_third_target_gets_nothing(urls_up, fresh_url, opened) -> None:
    source, target = opened(filled(urls_up[0])), opened(urls_up[1])
    assert not move(source, target).was_there
    before = all_rows(target)
    assert move(source, target).was_there
    assert all_rows(target) == before
    for kind in ("sqlite", "postgresql"):
        third = opened(fresh_url(kind))
        with pytest.raises(StoreMoved, match="it has moved to"):
            move(source, third)
        assert third.read(read_move) is None
    with pytest.raises(StoreMoved):
        cancel(source)


@pytest.mark.slow
def test_it_moves_on_and_back_to_another_database_of_the_first_kind(urls_up, fresh_url, opened) -> None:
    source, target = opened(filled(urls_up[0])), opened(urls_up[1])
    seen = messages(urls_up[0], "t")
    move(source, target)
    back_url = fresh_url(source.backend.name)
    move(opened(urls_up[1]), opened(back_url))
    assert messages(back_url, "t") == seen


@pytest.mark.slow
@pytest.mark.parametrize("is_filled", [False, True])
def test_a_call_that_wakes_when_the_target_is_another_moves_is_refused(
    urls_up, fresh_url, opened, monkeypatch, is_filled
) -> None:
    source, target = opened(filled(urls_up[0])), opened(urls_up[1])
    open_target = moving._open

    def sleep_first(*arguments):
        # Another call ends the move, and the store goes on from there, or the target is emptied and taken once more.
        open_target(*arguments)
        position = moving.FillPosition(is_complete=True, is_verified=True).to_json() if is_filled else None
        state = MoveState.ARRIVING if is_filled else MoveState.CLOSED
        others = Move(state, str(uuid.uuid4()), "sqlite:///other.db", position)
        target.write(lambda connection: close(connection, others))
        open_target(*arguments)

    monkeypatch.setattr(moving, "_open", sleep_first)
    with pytest.raises(StoreMoved, match=r"other\.db"):
        move(source, target)
    assert target.read(read_move).peer == "sqlite:///other.db"


@pytest.mark.slow
def test_a_target_that_is_not_empty_is_refused_and_nothing_is_closed(urls_up, opened) -> None:
    source, target = opened(filled(urls_up[0])), opened(urls_up[1])
    for spoil in (
        lambda connection: connection.execute(update(stores).values(next_producer_id=1)),
        lambda connection: create_topic(connection, name="used", partition_count=1),
    ):
        target.write(spoil)
        with pytest.raises(InvalidRequest, match="is not empty"):
            move(source, target)
        assert source.read(read_move) is target.read(read_move) is None
    filled(urls_up[1])


def test_a_store_does_not_move_onto_itself(url, opened) -> None:
    with pytest.raises(InvalidRequest, match="the same store"):
        move(opened(url), opened(url))


def test_a_target_of_another_version_is_refused(urls_up, opened) -> None:
    with open_store(urls_up[1]) as target, target.engine.connect() as connection:
        connection.execute(update(migrating.version_table).values(version_num="0099"))
        connection.execute(update(stores).values(schema_version=99))
    with pytest.raises(SchemaTooNew):
        opened(urls_up[1])


@pytest.mark.slow
def test_branches_in_other_databases_are_listed_and_nothing_is_closed(urls_up, opened) -> None:
    source, target = opened(filled(urls_up[0])), opened(urls_up[1])
    branch = {
        "gid": "txnstore-1",
        "transactional_id": "transfer",
        "producer_id": 4,
        "producer_epoch": 0,
        "database_label": "bank:5432/bank",
        "database_identity": "1:2",
        "transaction_xid8": "3",
        "registered_ms": 1,
    }
    source.write(lambda connection: connection.execute(insert(transaction_branches), branch))
    with pytest.raises(InvalidRequest, match=r"transactions forget GID.*txnstore-1 of transfer in bank:5432/bank"):
        move(source, target, even_if_damaged=True)
    assert source.read(read_move) is None
    filled_again = Producer({"bootstrap.servers": urls_up[0]})
    filled_again.produce("t", b"still")
    assert filled_again.flush(60) == 0
    filled_again.close()
    source.write(lambda connection: connection.execute(transaction_branches.delete()))
    move(source, target)
    assert b"still" in {value for _, _, _, _, value, _ in messages(urls_up[1], "t")}


def test_a_database_of_a_cluster_is_refused(urls_up, opened) -> None:
    source, target = opened(filled(urls_up[0])), opened(urls_up[1])
    other = {
        "database_id": 2,
        "label": "second",
        "store_uuid": "00000000-0000-0000-0000-000000000002",
        "coordinates": False,
        "catalogue_version": 0,
    }
    source.write(lambda connection: connection.execute(insert(databases), other))
    # Of what lives in the other one this one has no log, which is no damage.
    topic = source.write(lambda connection: create_topic(connection, "elsewhere"))
    elsewhere = partition_heads.c.partition_id == topic.partition_ids[0]
    source.write(lambda connection: connection.execute(delete(partition_heads).where(elsewhere)))
    with pytest.raises(InvalidRequest, match=r"of a cluster \(main, second\)"):
        move(source, target)
    assert source.read(read_move) is target.read(read_move) is None


def test_a_damaged_source_is_refused_before_anything_is_closed(urls_up, opened) -> None:
    source, target = opened(filled(urls_up[0])), opened(urls_up[1])
    source.write(lambda connection: connection.execute(update(record_batches).values(crc=record_batches.c.crc + 1)))
    with pytest.raises(StoreDamaged, match="is not sound"):
        move(source, target)
    assert source.read(read_move) is target.read(read_move) is None
    before = all_rows(source)
    move(source, target, even_if_damaged=True)
    assert all_rows(target) == before


@pytest.mark.slow
def test_what_a_stranger_changes_in_the_target_is_found_and_nothing_is_opened(urls_across, opened, monkeypatch) -> None:
    source, target = opened(filled(urls_across[0])), opened(urls_across[1])
    compare = moving._compare

    def change_first(*arguments):
        # As somebody may who turns the triggers off: by itself the database refuses.
        mark = target.read(read_move)

        def work(connection):
            closing.admit(connection, mark)
            connection.execute(update(partitions).where(partitions.c.partition_number == 1).values(topic_id=77))
            closing.set_move(connection, mark)

        target.write(work)
        return compare(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(moving, "_compare", change_first)
        with pytest.raises(StoreDamaged, match="do not hold the same, and nothing was opened: partitions"):
            move(source, target)
    assert source.read(read_move).state is MoveState.CLOSED
    assert target.read(read_move).state is MoveState.ARRIVING
    with pytest.raises(StoreMoved, match="being filled by a copy of"):
        open_store(urls_across[1])


@pytest.mark.slow
@pytest.mark.parametrize("urls_across", ["postgresql-sqlite"], indirect=True)
def test_who_is_refused_meanwhile_makes_no_difference(urls_across, opened, monkeypatch) -> None:
    """PostgreSQL does not take back the numbers that he had drawn."""
    source, target = opened(filled(urls_across[0])), opened(urls_across[1])
    partition_id = source.read(lambda connection: get_topic(connection, "t")).partition_id(0)
    late = [Append(partition_id, encode([Record(b"late")]))]
    compare = moving._compare

    def write_first(*arguments):
        with pytest.raises(StoreMoved):
            source.write(lambda connection: append(connection, late))
        return compare(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(moving, "_compare", write_first)
        move(source, target)
    with open_store(urls_across[1]) as moved:
        assert moved.write(lambda connection: append(connection, late))[0].base_offset == 10
        assert_sound(moved)


@pytest.mark.slow
def test_a_target_that_gives_out_numbers_anew_is_not_opened(fresh_url, opened, monkeypatch) -> None:
    target = opened(fresh_url("sqlite"))
    source = opened(filled(fresh_url("sqlite")))
    monkeypatch.setattr(target.backend, "set_next_key", lambda *_: None)
    with pytest.raises(StoreDamaged, match="and nothing was opened: the next entry_id"):
        move(source, target)


@pytest.mark.slow
def test_a_copy_that_is_cancelled_leaves_the_source_open_and_a_target_that_is_never_opened(
    urls_across, fresh_url, opened, monkeypatch
) -> None:
    source, target = opened(filled(urls_across[0])), opened(urls_across[1])

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(moving, "_compare", stop)
        with pytest.raises(KeyboardInterrupt):
            move(source, target)
    with pytest.raises(StoreMoved, match="it is being copied to"):
        open_store(urls_across[0])
    assert cancel(source)
    assert not cancel(source)
    admin = AdminClient({"bootstrap.servers": urls_across[0]})
    admin.create_topics([NewTopic("after", 1)])["after"].result()
    with pytest.raises(InvalidRequest, match="a copy that was cancelled"):
        move(source, target)
    with pytest.raises(StoreMoved):
        open_store(urls_across[1])
    third_url = fresh_url(target.backend.name)
    move(source, opened(third_url))
    assert set(AdminClient({"bootstrap.servers": third_url}).list_topics().topics) == {"t", "after"}


def test_who_is_cancelled_at_the_end_opens_nothing(urls_up, opened, monkeypatch) -> None:
    source, target = opened(filled(urls_up[0])), opened(urls_up[1])
    leave = moving._leave

    def cancel_first(*arguments):
        assert cancel(source)
        leave(*arguments)

    monkeypatch.setattr(moving, "_leave", cancel_first)
    with pytest.raises(StoreMoved, match="the copy was cancelled"):
        move(source, target)
    assert source.read(read_move) is None
    assert target.read(read_move).state is MoveState.ARRIVING


@pytest.mark.slow
def test_what_is_written_to_a_source_whose_copy_was_cancelled_is_no_damage(urls_up, opened, monkeypatch) -> None:
    source, target = opened(filled(urls_up[0])), opened(urls_up[1])
    compare = moving._compare

    def cancel_first(*arguments):
        assert cancel(source)
        source.write(lambda connection: create_topic(connection, "since", partition_count=1))
        return compare(*arguments)

    monkeypatch.setattr(moving, "_compare", cancel_first)
    with pytest.raises(StoreMoved, match="the copy was cancelled"):
        move(source, target)
    assert source.read(read_move) is None


@pytest.mark.slow
def test_a_copy_that_is_cancelled_before_its_first_page_is_over_too(urls_across, opened, monkeypatch) -> None:
    """Its call may still be there: it would go on, and hand over what the source held before the last writes."""
    source, target = opened(filled(urls_across[0])), opened(urls_across[1])
    still_there = []

    def stop(self, *_):
        still_there.append(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(moving._Filling, "run", stop)
        with pytest.raises(KeyboardInterrupt):
            move(source, target)
    closed = source.read(read_move)
    assert cancel(source)
    with pytest.raises(InvalidRequest, match="a copy that was cancelled"):
        move(source, target)
    assert source.read(read_move) is None
    # It has seen all that there is; then something comes, and somebody tries once more.
    still_there.pop().run(lambda *_: None)
    AdminClient({"bootstrap.servers": urls_across[0]}).create_topics([NewTopic("after", 1)])["after"].result()
    with pytest.raises(InvalidRequest, match="a copy that was cancelled"):
        move(source, target)
    with pytest.raises(StoreMoved, match="was cancelled"):
        moving._leave(source, closed)
    assert target.read(read_move).state is MoveState.ARRIVING


@pytest.mark.slow
def test_none_of_several_copies_that_were_cancelled_is_taken_up_again(
    urls_across, fresh_url, opened, monkeypatch
) -> None:
    """A call of the first may still be there, too: what it has read and compared is from before the last writes."""
    source = opened(filled(urls_across[0]))
    targets = [opened(urls_across[1]), *(opened(fresh_url("sqlite")) for _ in range(2))]
    still_there, closed = [], []

    def stop(self, *_):
        still_there.append(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(moving._Filling, "run", stop)
        for target in targets:
            with pytest.raises(KeyboardInterrupt):
                move(source, target)
            closed.append(source.read(read_move))
            assert cancel(source)
    for target in targets:
        with pytest.raises(InvalidRequest, match="a copy that was cancelled"):
            move(source, target)
        assert source.read(read_move) is None
    for filling, mark in zip(still_there, closed, strict=True):
        filling.run(lambda *_: None)
        with pytest.raises(StoreMoved, match="was cancelled"):
            moving._leave(source, mark)
    AdminClient({"bootstrap.servers": urls_across[0]}).create_topics([NewTopic("after", 1)])["after"].result()
    last_url = fresh_url("sqlite")
    move(source, opened(last_url))
    assert set(AdminClient({"bootstrap.servers": last_url}).list_topics().topics) == {"t", "after"}
    # Of those there it knows nothing: they are not its own.
    assert opened(last_url).read(read_cancelled_moves) == []


@pytest.mark.slow
def test_of_two_calls_at_once_one_gives_up_and_nothing_is_there_twice(urls_across, opened, monkeypatch) -> None:
    source, target = opened(filled(urls_across[0])), opened(urls_across[1])
    write_page = moving._Filling._write_page
    others = [(opened(urls_across[0]), opened(urls_across[1]))]

    def let_another_first(self, *arguments):
        if others:
            move(*others.pop())
        write_page(self, *arguments)

    monkeypatch.setattr(moving._Filling, "_write_page", let_another_first)
    before = all_rows(source)
    with pytest.raises(InvalidRequest, match="another call"):
        move(source, target)
    assert all_rows(target) == before
    assert move(source, target).was_there


@pytest.mark.slow
@pytest.mark.parametrize("step", ["_compare", "_check_sound"])
def test_what_clients_do_in_a_target_that_another_call_has_opened_is_no_damage(
    urls_across, opened, monkeypatch, step
) -> None:
    source, target = opened(filled(urls_across[0])), opened(urls_across[1])
    others = [(opened(urls_across[0]), opened(urls_across[1]))]
    do_step = getattr(moving, step)

    def let_another_first(*arguments):
        # Of the verification it is the second one: the source is verified before.
        if others and (step == "_compare" or arguments[0] is target):
            move(*others.pop())
            target.write(lambda connection: create_topic(connection, name="new", partition_count=1))
            target.write(lambda connection: connection.execute(update(record_batches).values(crc=1)))
        return do_step(*arguments)

    monkeypatch.setattr(moving, step, let_another_first)
    with pytest.raises(InvalidRequest, match="another call of `txnstore copy` has gone on with"):
        move(source, target)
    assert not others
    assert move(source, target).was_there


def test_text_that_the_other_database_cannot_hold_is_named(
    txnstore_sqlite_url, txnstore_postgresql_url, opened
) -> None:
    source, target = opened(filled(txnstore_sqlite_url)), opened(txnstore_postgresql_url)
    with source.engine.connect() as connection:
        connection.exec_driver_sql("INSERT INTO txnstore_outbox (topic, value) VALUES ('t' || char(0), x'00')")
    with pytest.raises(InvalidRequest, match=r"column topic of table outbox .* outbox_id 1"):
        move(source, target)
    cancel(source)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
def test_a_number_that_the_other_database_cannot_hold_is_named(urls_up, opened, number) -> None:
    """SQLite has one type for all of them, and a row of the outbox is whatever somebody has inserted."""
    source, target = map(opened, urls_up)
    with source.engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO txnstore_outbox (topic, partition_number) VALUES ('t', ?)", (number,))
    with pytest.raises(InvalidRequest, match=r"column partition_number of table outbox .* outbox_id 1"):
        move(source, target)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("was_done", [True, False], ids=["done", "not done"])
def test_a_page_whose_commit_is_unknown_is_there_once(urls_up, opened, monkeypatch, was_done) -> None:
    source, target = opened(filled(urls_up[0])), opened(urls_up[1])
    before = all_rows(source)
    write = target.write
    unknown: list[object] = []

    def write_once(work, **options):
        if len(unknown) < 3 and "settle" in work.__qualname__:
            unknown.append(work)
            if was_done:
                write(work, **options)
            raise OutcomeUnknown
        return write(work, **options)

    monkeypatch.setattr(target, "write", write_once)
    move(source, target)
    assert len(unknown) == 3
    assert all_rows(target) == before


@pytest.mark.slow
def test_a_copy_of_a_store_does_not_move_in_its_originals_name(urls_up, fresh_url, opened) -> None:
    filled(urls_up[0])
    with open_store(urls_up[0]) as original:
        check_original(original)
    copy_url = fresh_url("sqlite")
    copy_file(urls_up[0], copy_url)
    source, target = opened(copy_url), opened(urls_up[1])
    with pytest.raises(StoreCopied, match="txnstore adopt"):
        move(source, target)
    assert source.read(read_move) is target.read(read_move) is None
    adopt([source])
    assert move(opened(copy_url), target).store_uuid != store_row(opened(urls_up[0])).store_uuid


def stopped(urls, opened, monkeypatch, step):
    """Begin to move, and die at this step."""

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(moving, step, die)
        with pytest.raises(KeyboardInterrupt):
            move(opened(urls[0]), opened(urls[1]))


def test_a_copy_of_a_target_is_not_opened_beside_it(fresh_url, opened, monkeypatch) -> None:
    urls, copy_url = (filled(fresh_url("sqlite")), fresh_url("sqlite")), fresh_url("sqlite")
    stopped(urls, opened, monkeypatch, "_open")
    copy_file(urls[1], copy_url)
    move(opened(urls[0]), opened(urls[1]))
    with pytest.raises(StoreCopied):
        move(opened(urls[0]), opened(copy_url))
    assert opened(copy_url).read(read_move).state is MoveState.ARRIVING


def test_a_copy_of_a_closed_source_opens_no_target_beside_the_source(fresh_url, opened, monkeypatch) -> None:
    urls, copy_url = (filled(fresh_url("sqlite")), fresh_url("sqlite")), fresh_url("sqlite")
    stopped(urls, opened, monkeypatch, "_leave")
    copy_file(urls[0], copy_url)
    assert cancel(opened(urls[0]))
    with pytest.raises(StoreCopied):
        move(opened(copy_url), opened(urls[1]))
    assert opened(urls[1]).read(read_move).state is MoveState.ARRIVING


def test_what_waits_in_the_outbox_of_a_source_that_is_opened_again_may_be_another_servers(
    txnstore_postgresql_url, fresh_url, opened, monkeypatch
) -> None:
    """It may have been restored on another one while it was closed."""
    urls = filled(txnstore_postgresql_url), fresh_url("sqlite")
    with open_store(urls[0]) as store:
        store.write(lambda connection: connection.execute(insert(outbox).values(topic="t", value=b"waits")))
    stopped(urls, opened, monkeypatch, "_leave")
    source = opened(urls[0])
    with pytest.raises(StoreMoved):
        adopt([source], same=True)
    assert cancel(source)
    assert source.read(lambda connection: connection.execute(select(outbox.c.transaction_id)).scalar_one()) < 0


@pytest.mark.slow
def test_schemas_of_one_server_are_two_databases(txnstore_postgresql_url, opened) -> None:
    filled(txnstore_postgresql_url)
    open_store(txnstore_postgresql_url, schema="Second").close()
    source, target = opened(txnstore_postgresql_url), opened(txnstore_postgresql_url, schema="Second")
    before = all_rows(source)
    move(source, target)
    assert all_rows(target) == before
    with pytest.raises(StoreMoved, match=r"\(schema Second\)"):
        open_store(txnstore_postgresql_url)
    with open_store(txnstore_postgresql_url, schema="Second") as store:
        store.write(lambda connection: create_topic(connection, name="there", partition_count=1))
