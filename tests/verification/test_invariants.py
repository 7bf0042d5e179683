"""The checker of invariants can fail: whatever somebody breaks by hand is reported, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import ColumnElement, Connection, Table, and_, delete, func, insert, not_, select, true, update

from tests.cluster import test_copies, test_transactions
from tests.crash.scenarios import FIRST
from tests.crash.worlds import NEW_OFFSET, OLD_OFFSET
from tests.crash.worlds import Place as Worlds
from tests.participants import test_verified
from tests.verification import (
    test_compacted,
    test_indexes,
    test_membership,
    test_numbers,
    test_progress,
    test_tables,
    test_watching,
)
from tests.verification.busy import Busy, append_plainly, make_busy
from txnstore.db.schema import (
    deleted_partitions,
    finished_transactions,
    group_offsets,
    partition_heads,
    partition_storage,
    partitions,
    pending_group_offsets,
    pending_markers,
    producer_states,
    record_batches,
    store_configs,
    stores,
    topic_configs,
    topics,
    transaction_groups,
    transaction_log,
    transaction_partitions,
    transaction_writer_partitions,
    transaction_writers,
    transactions,
)
from txnstore.db.statements import HotStatement
from txnstore.groups.offsets import commit_offsets, journal_text
from txnstore.log.fetch import fetch
from txnstore.log.partition_storage import BATCH_HEADER_BYTES
from txnstore.model import GroupMembership, IsolationLevel, OffsetAndMetadata
from txnstore.testing.invariants import Invariant, Violation, assert_sound, find_violations, violations_on
from txnstore.testing.manual_clock import ManualClock
from txnstore.testing.postgres_server import PostgresServer
from txnstore.transactions.protocol import TransactionState
from txnstore.verification import partitions as partition_rules
from txnstore.verification import reading, visibility


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def busy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    if request.param == "sqlite":
        with Worlds(f"sqlite:///{tmp_path_factory.mktemp('busy') / 'store.db'}", ManualClock()).open() as store:
            yield make_busy(store)
        return
    server: PostgresServer = request.getfixturevalue("txnstore_postgres_server")
    server.create_database("txnstore_test_busy")
    with Worlds(server.url("txnstore_test_busy"), ManualClock()).open() as store:
        yield make_busy(store)
    server.drop_database("txnstore_test_busy")


Damage = Callable[[Connection, Busy], object]
_I = Invariant


def change(table: Table, where: Callable[[Busy], ColumnElement[bool]], **values: Any) -> Damage:
    """Return the damage that changes one row, the first of those found."""
    key = list(table.primary_key)

    def damage(connection: Connection, busy: Busy) -> None:
        first = connection.execute(select(*key).where(where(busy)).order_by(*key).limit(1)).one()
        these = and_(*(column == value for column, value in zip(key, first, strict=True)))
        statement = update(table).values(**values) if values else delete(table)
        assert connection.execute(statement.where(these)).rowcount == 1

    return damage


def remove(table: Table, where: Callable[[Busy], ColumnElement[bool]]) -> Damage:
    """Return the damage that removes one row, the first of those found."""
    return change(table, where)


def in_partition(table: Table, of: str) -> Callable[[Busy], ColumnElement[bool]]:
    return lambda busy: table.c.partition_id == getattr(busy, of).partition_ids[0]


def outside_transactions(busy: Busy) -> ColumnElement[bool]:
    return and_(in_partition(record_batches, "plain")(busy), not_(record_batches.c.is_transactional))


def is_marker(busy: Busy) -> ColumnElement[bool]:
    return record_batches.c.control_type.is_not(None)


def of_id(table: Table, of: str) -> Callable[[Busy], ColumnElement[bool]]:
    return lambda busy: table.c.transactional_id == getattr(busy, of).transactional_id


def both(*conditions: Callable[[Busy], ColumnElement[bool]]) -> Callable[[Busy], ColumnElement[bool]]:
    return lambda busy: and_(*(condition(busy) for condition in conditions))


def entry(of: str, state: TransactionState, *, last: bool = False) -> Callable[[Busy], ColumnElement[bool]]:
    """Return what finds the first, or the last, entry of a state in the journal."""

    def where(busy: Busy) -> ColumnElement[bool]:
        these = and_(of_id(transaction_log, of)(busy), transaction_log.c.state == int(state))
        pick = func.max if last else func.min
        return transaction_log.c.entry_id == select(pick(transaction_log.c.entry_id)).where(these).scalar_subquery()

    return where


def forget_and_append(flush: str, *, epoch: int) -> Damage:
    """Return the damage of a partition that has forgotten its producer, and takes what it should refuse."""

    def damage(connection: Connection, busy: Busy) -> None:
        connection.execute(
            delete(producer_states).where(producer_states.c.producer_id == busy.plain.producer.producer_id)
        )
        append_plainly(busy.plain, flush, connection, epoch=epoch)

    return damage


def keep_of_storage(**values: int) -> Damage:
    """Return the damage of a row that says what is not so of a partition's stored batches."""
    return lambda connection, busy: connection.execute(
        insert(partition_storage).values(
            partition_id=busy.over.partition_ids[0],
            **{"first_stored_offset": 0, "counted_offset": 0, "size_bytes": 0, "compacted_offset": 0}
            | {"compacted_bytes": 0, "horizons": "[]"}
            | values,
        )
    )


def count_storage_and_begin_behind(connection: Connection, busy: Busy) -> None:
    (partition_id, *_) = busy.over.partition_ids
    size_bytes = (
        select(func.sum(record_batches.c.size_bytes + BATCH_HEADER_BYTES))
        .where(record_batches.c.partition_id == partition_id, record_batches.c.last_offset < 100)
        .scalar_subquery()
    )
    keep_of_storage(counted_offset=100, size_bytes=connection.execute(select(size_bytes)).scalar_one())(
        connection, busy
    )
    at_head = update(partition_storage).values(
        counted_offset=select(partition_heads.c.next_offset)
        .where(partition_heads.c.partition_id == partition_id)
        .scalar_subquery()
    )
    connection.execute(at_head)
    assert violations_on(connection) == []
    connection.execute(update(partition_storage).values(first_stored_offset=2))


def tell_of_one_partition_less(connection: Connection, busy: Busy) -> None:
    sent = busy.over.offsets()
    text = journal_text({sent.committer.group_id: {busy.over.partition_ids[1]: OffsetAndMetadata(NEW_OFFSET)}})
    last = entry("over", TransactionState.COMPLETE_COMMIT, last=True)
    change(transaction_log, last, sent_offsets=text)(connection, busy)


def leave_an_offset_without_record(connection: Connection, busy: Busy) -> None:
    last = in_partition(record_batches, "plain")(busy), record_batches.c.base_offset == 7
    moved = update(record_batches).where(*last).values(last_offset=record_batches.c.last_offset + 1)
    assert connection.execute(moved).rowcount == 1
    change(partition_heads, in_partition(partition_heads, "plain"), next_offset=partition_heads.c.next_offset + 1)(
        connection, busy
    )


def index_what_nobody_wrote(connection: Connection, busy: Busy) -> None:
    row = {"partition_id": busy.plain.partition_ids[0], "marker_offset": 4, "first_offset": 3, "last_stable_offset": 5}
    of_nobody = {"producer_id": busy.plain.producer.producer_id, "producer_epoch": 0, "outcome": 0}
    connection.execute(insert(finished_transactions).values(**row, **of_nobody))


def take_part(table: Table, of: str, **values: Any) -> Damage:
    """Return the damage of a participant that a transaction is said to have; `of` is a world, or a stranger's id."""

    def damage(connection: Connection, busy: Busy) -> None:
        row: dict[str, Any] = {
            "partition_id": busy.plain.partition_ids[0],
            "group_id": "strangers",
            "writer_producer_id": busy.plain.producer.producer_id,
            "producer_epoch": 0,
            "reported": False,
        }
        row = {name: value for name, value in row.items() if name in table.c} | values
        world = getattr(busy, of, None)
        row["transactional_id"] = of if world is None else world.transactional_id
        connection.execute(insert(table).values(**row))

    return damage


PARTICIPANTS = (transaction_partitions, transaction_groups, transaction_writers, transaction_writer_partitions)

#: What is broken, where that is found, with words of what is said there, and how it is done.
DAMAGES: dict[str, tuple[Invariant, str, Damage]] = {
    "a batch is lost": (_I.OFFSETS_FOLLOW, "over/0@2", remove(record_batches, in_partition(record_batches, "over"))),
    "the head is ahead of the log": (
        _I.OFFSETS_FOLLOW,
        "over/0",
        change(partition_heads, in_partition(partition_heads, "over"), next_offset=partition_heads.c.next_offset + 1),
    ),
    "the head is gone": (_I.OFFSETS_FOLLOW, "over/0", remove(partition_heads, in_partition(partition_heads, "over"))),
    "a value is another": (
        _I.BATCHES_WHOLE,
        "over/0@0: it does not match its checksum",
        change(record_batches, in_partition(record_batches, "over"), value_data=b"12345678"),
    ),
    "an offset has no record": (
        _I.BATCHES_WHOLE,
        "plain/0@7: 2 records up to offset 9",
        leave_an_offset_without_record,
    ),
    "the time index is wrong": (
        _I.TIMES_RUN,
        # More than there is up to the first batch could be of what came at once with it: up to the marker.
        "over/0@2",
        change(record_batches, in_partition(record_batches, "over"), running_max_timestamp_ms=5),
    ),
    "the head's time is wrong": (
        _I.TIMES_RUN,
        "over/0",
        change(partition_heads, in_partition(partition_heads, "over"), running_max_timestamp_ms=5),
    ),
    "a batch is there twice": (_I.SEQUENCES_FOLLOW, "plain/0@9", forget_and_append(FIRST, epoch=1)),
    "an old epoch has written": (_I.EPOCHS_RISE, "plain/0@9", forget_and_append(FIRST, epoch=0)),
    "a producer's sequence is forgotten": (
        _I.PRODUCERS_KNOWN,
        "plain/0",
        change(
            producer_states,
            lambda busy: producer_states.c.producer_id == busy.plain.producer.producer_id,
            recent_batches="[]",
        ),
    ),
    "what is known of a producer cannot be read": (
        _I.PRODUCERS_KNOWN,
        "plain/0",
        change(producer_states, in_partition(producer_states, "plain"), recent_batches="[1,2"),
    ),
    "what is known of a producer is cut off": (
        _I.PRODUCERS_KNOWN,
        "plain/0",
        change(producer_states, in_partition(producer_states, "plain"), recent_batches="[1,2]"),
    ),
    "a topic lacks its last partition": (
        _I.TOPICS_COMPLETE,
        "topic-1",
        remove(partitions, in_partition(partitions, "over")),
    ),
    "a topic lacks a partition between others": (
        _I.TOPICS_COMPLETE,
        "topic-1",
        change(partitions, in_partition(partitions, "over"), partition_number=1_000),
    ),
    "a partition of a topic is to be deleted": (
        _I.TOPICS_COMPLETE,
        "over/0",
        lambda connection, busy: connection.execute(
            insert(deleted_partitions).values(partition_id=busy.over.partition_ids[0])
        ),
    ),
    "a topic is gone": (_I.TOPICS_COMPLETE, "over/0", remove(topics, lambda busy: true())),
    "a topic has no partition": (
        _I.TOPICS_COMPLETE,
        "empty",
        lambda connection, busy: connection.execute(
            insert(topics).values(name="empty", topic_uuid=str(UUID(int=0)), created_ms=0)
        ),
    ),
    "a topic has a setting with a value that it does not take": (
        _I.SETTINGS_UNDERSTOOD,
        "topic-1",
        lambda connection, busy: connection.execute(
            insert(topic_configs).values(
                topic_id=select(func.min(topics.c.topic_id)).scalar_subquery(), name="retention.bytes", value="much"
            )
        ),
    ),
    "a setting is left of a topic that is gone": (
        _I.SETTINGS_UNDERSTOOD,
        "the store",
        lambda connection, busy: connection.execute(
            insert(topic_configs).values(
                topic_id=select(func.max(topics.c.topic_id) + 1).scalar_subquery(), name="retention.ms", value="1"
            )
        ),
    ),
    "the store has a setting that nobody knows": (
        _I.SETTINGS_UNDERSTOOD,
        "the store",
        lambda connection, busy: connection.execute(insert(store_configs).values(name="speed", value="high")),
    ),
    "an open transaction is forgotten": (
        _I.PRODUCERS_KNOWN,
        "opened/0",
        change(producer_states, in_partition(producer_states, "opened"), transaction_first_offset=None),
    ),
    "an open transaction's producer is forgotten": (
        _I.PRODUCERS_KNOWN,
        "opened/0@3",
        remove(producer_states, in_partition(producer_states, "opened")),
    ),
    "a finished transaction is not in the index": (
        _I.INDEX_KNOWN,
        "over/0@2",
        remove(finished_transactions, in_partition(finished_transactions, "over")),
    ),
    "the index has a transaction without a marker": (
        _I.INDEX_KNOWN,
        "plain/0@4: where the log says None",
        index_what_nobody_wrote,
    ),
    "the index has another last stable offset": (
        _I.INDEX_KNOWN,
        "over/0@2",
        change(finished_transactions, in_partition(finished_transactions, "over"), last_stable_offset=1),
    ),
    "commits have numbers against their order": (
        _I.COMMITS_NUMBERED,
        "over/0@7",
        change(finished_transactions, in_partition(finished_transactions, "over"), commit_number=10**9),
    ),
    "a batch outside transactions has no number": (
        _I.COMMITS_NUMBERED,
        "plain/0@3",
        change(record_batches, outside_transactions, commit_number=None),
    ),
    "a batch of a transaction has a number": (
        _I.COMMITS_NUMBERED,
        "over/0@0",
        change(record_batches, in_partition(record_batches, "over"), commit_number=1),
    ),
    "batches outside transactions have numbers against their order": (
        _I.COMMITS_NUMBERED,
        "plain/0@6",
        change(record_batches, outside_transactions, commit_number=10**9),
    ),
    "committed records are not visible": (
        _I.COMMITTED_VISIBLE,
        "over/0@0",
        remove(finished_transactions, in_partition(finished_transactions, "over")),
    ),
    "a batch lies below where the stored ones begin": (_I.STORAGE_KNOWN, "over/0@0", count_storage_and_begin_behind),
    "a batch has another size than it says": (
        _I.STORAGE_KNOWN,
        "plain/0@3",
        change(record_batches, outside_transactions, size_bytes=record_batches.c.size_bytes + 1),
    ),
    "a marker has a size": (
        _I.STORAGE_KNOWN,
        "over/0@2",
        change(record_batches, both(in_partition(record_batches, "over"), is_marker), size_bytes=1),
    ),
    "batches are counted that are not there": (
        _I.STORAGE_KNOWN,
        "over/0",
        keep_of_storage(counted_offset=1, size_bytes=5),
    ),
    "more is counted than there is": (
        _I.STORAGE_KNOWN,
        "over/0",
        keep_of_storage(counted_offset=1_000, compacted_offset=1_000),
    ),
    "the journal has a move that the table does not have": (
        _I.MOVES_LEGAL,
        "over",
        change(
            transaction_log,
            entry("over", TransactionState.COMPLETE_COMMIT),
            first_state=int(TransactionState.PREPARE_COMMIT),
        ),
    ),
    "the journal lacks the last change": (
        _I.JOURNAL_CURRENT,
        "over",
        remove(transaction_log, entry("over", TransactionState.COMPLETE_COMMIT, last=True)),
    ),
    "a transactional id is gone without a word": (
        _I.JOURNAL_CURRENT,
        "over",
        remove(transactions, of_id(transactions, "over")),
    ),
    "an epoch began two transactions": (
        _I.IDENTITIES_UNIQUE,
        "over",
        change(transaction_log, entry("over", TransactionState.COMPLETE_COMMIT, last=True), producer_epoch=1),
    ),
    "a producer id was not given out": (
        _I.PRODUCER_IDS_GIVEN,
        "the store",
        change(stores, lambda busy: true(), next_producer_id=1),
    ),
    "two ids have one producer id": (
        _I.PRODUCER_IDS_GIVEN,
        "plain",
        change(
            transactions,
            of_id(transactions, "over"),
            producer_id=select(func.max(transactions.c.producer_id)).scalar_subquery(),
        ),
    ),
    "a decision was reversed": (
        _I.DECISION_STANDS,
        "over/0@2",
        change(
            transaction_log,
            entry("over", TransactionState.COMPLETE_COMMIT),
            state=int(TransactionState.COMPLETE_ABORT),
        ),
    ),
    "a transaction ended before it was decided": (
        _I.DECISION_STANDS,
        "aborted/0@5",
        remove(transaction_log, entry("aborted", TransactionState.COMPLETE_ABORT)),
    ),
    "offsets of an aborted transaction count": (
        _I.DECISION_STANDS,
        "aborted/0",
        lambda connection, busy: connection.execute(
            update(group_offsets)
            .where(group_offsets.c.group_id == busy.aborted.group_id)
            .values(producer_epoch=busy.aborted.producer.epoch)
        ),
    ),
    "an abort tells of consumed offsets": (
        _I.OFFSETS_TOLD,
        "aborted",
        change(transaction_log, entry("aborted", TransactionState.COMPLETE_ABORT), sent_offsets='{"another":[[1,1]]}'),
    ),
    "a group's offset is not the one that its commit tells of": (
        _I.OFFSETS_TOLD,
        "over/0",
        change(group_offsets, in_partition(group_offsets, "over"), committed_offset=NEW_OFFSET + 1),
    ),
    "a group's offset is of another order than its commit tells of": (
        _I.OFFSETS_TOLD,
        "over/0",
        change(group_offsets, in_partition(group_offsets, "over"), offset_in_transaction=0),
    ),
    "a commit does not tell of a group's offset": (_I.OFFSETS_TOLD, "over/0", tell_of_one_partition_less),
    "what a group's last commit has done is undone": (
        _I.OFFSETS_TOLD,
        "over/0",
        change(
            group_offsets,
            in_partition(group_offsets, "over"),
            committed_offset=OLD_OFFSET,
            producer_epoch=group_offsets.c.producer_epoch - 1,
        ),
    ),
    "a transaction counts in one partition only": (
        _I.ALL_OR_NOTHING,
        "over/1@2",
        change(finished_transactions, in_partition(finished_transactions, "over"), outcome=0, commit_number=None),
    ),
    "an open transaction lacks a partition": (
        _I.PARTICIPANTS_KNOWN,
        "opened: hold records of it",
        remove(transaction_partitions, of_id(transaction_partitions, "opened")),
    ),
    "an open transaction lacks its group": (
        _I.PARTICIPANTS_KNOWN,
        "opened: hold offsets of it",
        remove(transaction_groups, of_id(transaction_groups, "opened")),
    ),
    "a writer of an open transaction has another epoch": (
        _I.PARTICIPANTS_KNOWN,
        "opened: whose epoch is not 1",
        take_part(transaction_writers, "opened", producer_epoch=7),
    ),
    "a writer has partitions in a transaction that it has not joined": (
        _I.PARTICIPANTS_KNOWN,
        "opened: which have not all joined",
        take_part(transaction_writer_partitions, "opened"),
    ),
    "an open transaction lists a partition that it has not written to": (
        _I.PARTICIPANTS_KNOWN,
        "opened: hold records of it",
        take_part(transaction_partitions, "opened"),
    ),
    "a decided marker is lost": (
        _I.OUTBOX_RIGHT,
        "decided",
        remove(pending_markers, of_id(pending_markers, "decided")),
    ),
    "a marker is queued against the decision": (
        _I.OUTBOX_RIGHT,
        "decided",
        change(pending_markers, of_id(pending_markers, "decided"), outcome=0),
    ),
    "a transaction is over and left its records open": (
        _I.NOTHING_HANGS,
        "opened/0@3",
        change(
            transactions,
            of_id(transactions, "opened"),
            state=int(TransactionState.COMPLETE_ABORT),
            begin_epoch=-1,
            deadline_ms=None,
        ),
    ),
    "offsets are pending for nobody": (
        _I.NOTHING_HANGS,
        "opened/0",
        change(
            pending_group_offsets,
            lambda busy: pending_group_offsets.c.group_id == busy.opened.group_id,
            producer_epoch=7,
        ),
    ),
}


#: What nobody writes of consumed offsets into the journal.
STRANGE_TEXTS = (
    "nothing",
    "[]",
    "{}",
    '{"group":[]}',
    '{"group":[[1]]}',
    '{"group":[[1,2,3,4]]}',
    '{"group":[[1,true]]}',
    '{"group":[[1,-1]]}',
    '{"group":[[1,2.0]]}',
    '{"group":[[0,1]]}',
    '{"group":[["1",1]]}',
    '{"group":[[[],1]]}',
    '{"group": [[1,1]]}',
    '{"group":[[1,1],[1,2]]}',
    '{"group":[[2,1],[1,1]]}',
    '{"group b":[[1,1]],"group a":[[1,1]]}',
    '{"":[[1,1]]}',
    '{"\\u0000":[[1,1]]}',
)
# Of the commit before the last: what the group has now does not depend on it.
DAMAGES |= {
    f"the journal tells of consumed offsets as {text}": (
        _I.OFFSETS_TOLD,
        "over: cannot be read",
        change(transaction_log, entry("over", TransactionState.COMPLETE_COMMIT), sent_offsets=text),
    )
    for text in STRANGE_TEXTS
}


for _table in PARTICIPANTS:
    DAMAGES |= {
        f"nobody has a row in {_table.name}": (
            _I.PARTICIPANTS_KNOWN,
            "transactional id 'nobody': it has participants and no row",
            take_part(_table, "nobody"),
        ),
        f"what is over has a row in {_table.name}": (
            _I.PARTICIPANTS_KNOWN,
            "over: is CompleteCommit and has",
            take_part(_table, "over"),
        ),
    }


#: What else a damage breaks, of necessity.
FOLLOWS = {
    "a batch is there twice": {_I.PRODUCERS_KNOWN},
    "an open transaction is forgotten": {_I.PARTICIPANTS_KNOWN},
    "an open transaction's producer is forgotten": {_I.PARTICIPANTS_KNOWN},
    "a finished transaction is not in the index": {_I.COMMITTED_VISIBLE},
    "committed records are not visible": {_I.INDEX_KNOWN},
    "an epoch began two transactions": {_I.JOURNAL_CURRENT},
    "two ids have one producer id": {_I.JOURNAL_CURRENT},
    "a decision was reversed": {_I.OFFSETS_TOLD},
    "a transaction ended before it was decided": {_I.JOURNAL_CURRENT},
    "a transaction counts in one partition only": {_I.COMMITTED_VISIBLE, _I.DECISION_STANDS, _I.INDEX_KNOWN},
    "a transaction is over and left its records open": {_I.JOURNAL_CURRENT, _I.PARTICIPANTS_KNOWN},
}


class Undone(Exception):
    """Rolls the damage back."""


@pytest.mark.slow_but_first
@pytest.mark.slow_on_postgresql
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_reported_by_name(busy: Busy, name: str):
    invariant, expected, damage = DAMAGES[name]
    found: list[Violation] = []

    def work(connection: Connection) -> None:
        damage(connection, busy)
        found.extend(violations_on(connection))
        raise Undone

    with pytest.raises(Undone):
        busy.store.write(work)
    assert {each.invariant for each in found} == {invariant} | FOLLOWS.get(name, set())
    where, _, words = expected.partition(": ")
    assert where in {busy.name_of(each.place) for each in found if each.invariant is invariant and words in each.seen}


AT_REST = {Invariant.NOTHING_OPEN, Invariant.NOTHING_QUEUED, Invariant.ALL_STABLE}


#: What is broken in other files by other means than a table of damages, and by which test.
ELSEWHERE: dict[Invariant, Callable[..., None]] = {
    _I.INDEXES_WHOLE: test_indexes.test_an_index_that_lacks_a_row_is_found_until_it_is_made_anew,
    _I.TABLES_WHOLE: test_tables.test_what_a_table_has_lost_is_found,
    _I.NUMBERS_AHEAD: test_numbers.test_numbers_that_would_come_again_are_found,
    _I.BRANCHES_KNOWN: test_verified.test_what_is_prepared_and_not_known_is_found_where_it_is_asked_for,
    _I.GROUPS_SOUND: test_membership.test_damage_to_a_group_is_reported,
    _I.OUTBOX_MOVES: test_watching.test_an_outbox_that_nobody_can_move_is_told,
    _I.COPIES_CURRENT: test_copies.test_the_checker_sees_copies_that_are_wrong,
    _I.OFFSETS_FENCED: test_transactions.test_the_checker_sees_offsets_that_nothing_guards,
    _I.AT_COORDINATOR: test_copies.test_the_checker_sees_what_is_not_in_the_database_that_its_name_selects,
}


def test_every_invariant_can_be_broken():
    broken = {entry[0] for entry in DAMAGES.values()}
    broken |= {entry[1] for entry in test_compacted.DAMAGES.values()}
    broken |= {entry[0] for entry in test_progress.DAMAGES.values()}
    assert broken | AT_REST | ELSEWHERE.keys() == set(Invariant)
    # A table is enough.
    assert ELSEWHERE.keys().isdisjoint(broken | AT_REST)


def test_a_busy_store_is_sound_and_not_at_rest(busy: Busy):
    assert find_violations(busy.store) == []
    assert {violation.invariant for violation in find_violations(busy.store, at_rest=True)} == AT_REST


def change_nothing(connection: Connection, busy: Busy) -> None:
    """Leave it to the commits that there were."""


def commit_plainly(connection: Connection, busy: Busy) -> None:
    commit_offsets(
        connection, GroupMembership(busy.over.group_id), {busy.over.partition_ids[0]: OffsetAndMetadata(OLD_OFFSET)}
    )


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(change_nothing, id="nothing"),
        pytest.param(
            lambda connection, busy: connection.execute(update(transaction_log).values(sent_offsets=None)),
            id="stores of before tell of no offsets",
        ),
        pytest.param(
            lambda connection, busy: connection.execute(delete(transaction_log)), id="the journal was shortened"
        ),
        pytest.param(commit_plainly, id="a later commit of nobody goes back"),
        pytest.param(
            remove(group_offsets, in_partition(group_offsets, "over")), id="an offset was deleted, or has expired"
        ),
    ],
)
def test_what_the_journal_tells_of_offsets_is_not_held_against_what_it_does_not_know(busy: Busy, damage: Damage):
    found: list[str] = []

    def work(connection: Connection) -> None:
        damage(connection, busy)
        found.extend(str(each) for each in violations_on(connection) if each.invariant is Invariant.OFFSETS_TOLD)
        raise Undone

    with pytest.raises(Undone):
        busy.store.write(work)
    assert found == []


def test_a_reader_that_gets_aborted_records_is_noticed(busy: Busy, monkeypatch: pytest.MonkeyPatch):
    dirty = partial(fetch, isolation=IsolationLevel.READ_UNCOMMITTED)
    monkeypatch.setattr(visibility, "fetch", dirty)
    found = find_violations(busy.store)
    assert {violation.invariant for violation in found} == {Invariant.COMMITTED_VISIBLE}


@pytest.fixture
def pages_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, statement in (
        (reading, "PAGE_BATCHES_MAX", "_SIZES"),
        (visibility, "PAGE_ROWS", "_BACKWARDS"),
    ):
        monkeypatch.setattr(module, name, 1)
        monkeypatch.setattr(module, statement, HotStatement(getattr(module, statement).statement.limit(1)))
    monkeypatch.setattr(partition_rules, "PAGE_ROWS", 1)


@pytest.mark.usefixtures("pages_of_one")
def test_what_stands_on_a_later_page_is_read_too(busy: Busy, monkeypatch: pytest.MonkeyPatch):
    assert find_violations(busy.store) == []
    found: list[Invariant] = []

    def work(connection: Connection) -> None:
        invariant, _, damage = DAMAGES["a producer's sequence is forgotten"]
        damage(connection, busy)
        found.extend(each.invariant for each in violations_on(connection))
        assert invariant in found
        raise Undone

    with pytest.raises(Undone):
        busy.store.write(work)
    monkeypatch.setattr(visibility, "fetch", partial(fetch, isolation=IsolationLevel.READ_UNCOMMITTED))
    assert {each.invariant for each in find_violations(busy.store)} == {Invariant.COMMITTED_VISIBLE}


@pytest.mark.slow
def test_pages_end_where_they_are_full_of_bytes(busy: Busy, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "PAGE_BYTES_MAX", 1)
    assert find_violations(busy.store) == []


def test_a_failed_check_says_what_is_broken_and_where(busy: Busy):
    with pytest.raises(AssertionError, match=r"NOTHING_OPEN .*'id-\d+': it is Ongoing"):
        assert_sound(busy.store, at_rest=True)
