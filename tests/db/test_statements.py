"""Hot statements: what Core would have sent, values and rows, errors, and listeners that hear of every one."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import BigInteger, bindparam, case, delete, event, func, insert, literal, literal_column, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.exc import DBAPIError, IntegrityError

from tests.clients.consumer.log_writer import eventually
from txnstore.db.backend import Access
from txnstore.db.ddl import Flag, String
from txnstore.db.opening import open_store
from txnstore.db.schema import databases, partition_heads, producer_states, transaction_groups, transaction_log
from txnstore.db.statements import HotStatement, are_among, is_listed, run_on_driver
from txnstore.db.store import Store, server_now_ms
from txnstore.errors import StatementFailed, TransactionPoisoned, WriteConflict
from txnstore.testing.manual_clock import ManualClock

INSERT_HEADS = HotStatement(insert(partition_heads))
HEADS = HotStatement(select(partition_heads).order_by(partition_heads.c.partition_id))
THESE = HotStatement(
    select(partition_heads.c.partition_id, partition_heads.c.next_offset)
    .where(partition_heads.c.partition_id.in_(bindparam("partition_ids", expanding=True)))
    .where(partition_heads.c.next_offset >= bindparam("from_offset"))
    .order_by(partition_heads.c.partition_id)
)
PAIRS = HotStatement(
    select(partition_heads.c.partition_id).where(
        are_among("pairs", partition_heads.c.partition_id, partition_heads.c.next_offset)
    )
)
MOVE = HotStatement(
    update(partition_heads)
    .where(partition_heads.c.partition_id == bindparam("of_partition_id"))
    .values(next_offset=bindparam("new_next_offset"))
)
INSERT_GROUPS = HotStatement(insert(transaction_groups))
#: Of which many executions may be one statement.
INSERT_GROUPS_AT_ONCE = HotStatement(insert(transaction_groups), may_be_listed=True)
INSERT_STATES_AT_ONCE = HotStatement(insert(producer_states), may_be_listed=True)
MOVE_AT_ONCE = HotStatement(
    update(partition_heads)
    .where(partition_heads.c.partition_id == bindparam("of_partition_id"))
    .where(partition_heads.c.next_offset == bindparam("before_offset"))
    .values(next_offset=bindparam("new_next_offset"), running_max_timestamp_ms=server_now_ms()),
    may_be_listed=True,
)
FORGET_AT_ONCE = HotStatement(
    delete(transaction_groups).where(transaction_groups.c.transactional_id == bindparam("of_id")), may_be_listed=True
)
ARE_LISTED = is_listed("partition_ids", partition_heads.c.partition_id)
PAIRS_ARE_LISTED = is_listed("pairs", partition_heads.c.partition_id, partition_heads.c.next_offset)
LISTED = HotStatement(select(partition_heads.c.partition_id).where(ARE_LISTED).order_by(partition_heads.c.partition_id))
LISTED_PAIRS = HotStatement(select(partition_heads.c.partition_id).where(PAIRS_ARE_LISTED))
MOVE_LISTED = HotStatement(update(partition_heads).where(ARE_LISTED).values(next_offset=bindparam("new_next_offset")))
#: What all of its rows have in common stands in the statement.
INSERT_ALIKE_AT_ONCE = HotStatement(
    insert(transaction_groups).from_select(
        ["transactional_id", "group_id"], select(literal_column("'a'"), bindparam("of_group_id", type_=String))
    ),
    may_be_listed=True,
)
#: What an array's text has a meaning for.
AWKWARD_TEXTS = ["", " ", "NULL", "null", "{", "}", ",", '"', "\\", '\\"', "a\nb", "é😀", "'", "%s", "%(x)s", "{a,b}"]


def head(number: int, next_offset: int = 0) -> dict[str, int]:
    return {
        "partition_id": number,
        "log_start_offset": 0,
        "next_offset": next_offset,
        "running_max_timestamp_ms": -1,
        "segment": 1,
    }


@pytest.fixture
def heads(store: Store) -> Store:
    store.write(lambda connection: INSERT_HEADS.run_each(connection, [head(number, number) for number in range(1, 31)]))
    return store


@pytest.fixture(params=[False, True], ids=["directly", "with a listener"])
def listened(request: pytest.FixtureRequest, heads: Store) -> list[str] | None:
    """Every test of results runs both ways: None where nobody listens."""
    if not request.param:
        return None
    heard: list[str] = []
    event.listen(heads.engine, "before_cursor_execute", lambda *arguments: heard.append(arguments[2]))
    return heard


def test_rows_are_tuples_with_the_names_of_the_columns(heads: Store, listened: list[str] | None) -> None:
    rows = heads.read(HEADS.rows)
    assert [tuple(row) for row in rows] == [(number, 0, number, -1, 1) for number in range(1, 31)]
    assert (rows[4].partition_id, rows[4].next_offset) == (5, 5)
    assert listened is None or any(statement.startswith("SELECT") for statement in listened)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("ids", [[], [7], [9, 3], list(range(1, 31)), list(range(1, 1500))])
def test_a_list_of_any_length_is_found(heads: Store, listened: list[str] | None, ids: list[int]) -> None:
    for _ in range(2):
        rows = heads.read(lambda c: THESE.rows(c, {"partition_ids": ids, "from_offset": 4}))
        assert [row.partition_id for row in rows] == sorted(number for number in ids if 4 <= number <= 30)


def test_lists_of_more_lengths_than_are_kept(heads: Store) -> None:
    def work(connection) -> None:
        for count in range(100):
            found = THESE.values(connection, {"partition_ids": list(range(1, count + 1)), "from_offset": 0})
            assert len(found) == min(count, 30)

    heads.read(work)


def test_lists_of_pairs(heads: Store, listened: list[str] | None) -> None:
    for pairs in ([], [(3, 3)], [(3, 3), (4, 5), (6, 6)]):
        found = heads.read(lambda c, pairs=pairs: PAIRS.values(c, {"pairs": pairs}))
        assert sorted(found) == [first for first, second in pairs if first == second]


def test_counts_are_those_of_the_rows_that_were_hit(heads: Store, listened: list[str] | None) -> None:
    def work(connection) -> tuple[int, int, int]:
        move = [{"of_partition_id": number, "new_next_offset": 50} for number in (1, 2, 99)]
        return MOVE.run(connection, move[0]), MOVE.run(connection, move[2]), MOVE.run_each(connection, move)

    assert heads.write(work) == (1, 0, 2)


@pytest.mark.parametrize("count", [2, 30])
def test_many_executions_are_one_statement_on_a_server(heads: Store, count: int) -> None:
    """And hit the same rows as one by one: those that are as each says."""
    moves = [
        {"of_partition_id": number, "before_offset": number if number != 2 else 7, "new_next_offset": number + 100}
        for number in range(1, count + 1)
    ]
    texts: list[str] = []
    event.listen(heads.engine, "before_cursor_execute", lambda *arguments: texts.append(arguments[2]))
    assert heads.write(lambda connection: MOVE_AT_ONCE.run_each(connection, moves)) == count - 1
    is_one = count == 30 and heads.backend.name == "postgresql"
    assert sum("given" in text for text in texts) == is_one
    found = {row.partition_id: row.next_offset for row in heads.read(HEADS.rows)}
    assert found == {number: number + 100 * (number <= count and number != 2) for number in range(1, 31)}
    assert {row.running_max_timestamp_ms > 0 for row in heads.read(HEADS.rows)} == ({True, False})


@pytest.mark.parametrize("repeats", [1, 2])
def test_texts_and_what_is_not_there_are_the_same_in_lists(heads: Store, listened: list[str] | None, repeats: int):
    names = [f"{text}{number}"[number:] if number else text for number in range(repeats) for text in AWKWARD_TEXTS]
    groups = [{"transactional_id": f"{place}", "group_id": name} for place, name in enumerate(names)]
    states = [
        {
            "partition_id": place,
            "producer_id": -place,
            "producer_epoch": 0,
            "recent_batches": name,
            "coordinator_epoch": -1,
            "last_timestamp_ms": 2**63 - 1 - place,
            "transaction_first_offset": None if place % 3 else place,
        }
        for place, name in enumerate(names)
    ]

    def insert_all(connection) -> None:
        assert INSERT_GROUPS_AT_ONCE.run_each(connection, groups) == len(names)
        assert INSERT_STATES_AT_ONCE.run_each(connection, states) == len(names)

    heads.write(insert_all)
    found = heads.read(lambda connection: connection.execute(select(transaction_groups)).all())
    assert {row.transactional_id: row.group_id for row in found} == {
        str(place): name for place, name in enumerate(names)
    }
    ordered = select(producer_states).order_by(producer_states.c.partition_id)
    rows = heads.read(lambda connection: connection.execute(ordered).mappings().all())
    assert [{name: row[name] for name in states[0]} for row in rows] == states
    these = [{"of_id": f"{place}"} for place in range(1, len(names))]
    assert heads.write(lambda connection: FORGET_AT_ONCE.run_each(connection, these)) == len(names) - 1


@pytest.mark.slow_but_first
@pytest.mark.parametrize("ids", [[], [7], [9, 3], list(range(1, 31)), list(range(1, 700)), list(range(1, 1500))])
def test_what_is_listed_is_found_however_long_the_list(heads: Store, listened: list[str] | None, ids: list[int]):
    wanted = [number for number in sorted(ids) if number <= 30]
    assert heads.read(lambda connection: LISTED.values(connection, ARE_LISTED.parameters(ids))) == wanted
    pairs = [(number, number + (number == 9)) for number in ids]
    found = heads.read(lambda connection: LISTED_PAIRS.values(connection, PAIRS_ARE_LISTED.parameters(pairs)))
    assert sorted(found) == [number for number in wanted if number != 9]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("count", [1, 2, 25, 26, 60])
def test_so_many_rows_are_inserted_in_order(heads: Store, listened: list[str] | None, count: int) -> None:
    entries = [{"transactional_id": "a", "group_id": f"{number:03}"} for number in range(count)]
    assert heads.write(lambda connection: INSERT_GROUPS.run_each(connection, entries)) == count
    names = select(transaction_groups.c.group_id)
    assert sorted(heads.read(lambda c: c.execute(names).scalars().all())) == [entry["group_id"] for entry in entries]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("count", [1, 2, 30])
def test_rows_that_have_something_in_common_are_inserted(heads: Store, listened: list[str] | None, count: int) -> None:
    entries = [{"of_group_id": f"{number:03}"} for number in range(count)]
    assert heads.write(lambda connection: INSERT_ALIKE_AT_ONCE.run_each(connection, entries)) == count
    found = heads.read(lambda c: c.execute(select(transaction_groups)).all())
    assert sorted(found) == [("a", f"{number:03}") for number in range(count)]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("ids", [[], [7], list(range(1, 31)), list(range(1, 1500))])
def test_what_is_listed_is_changed_however_long_the_list(heads: Store, listened: list[str] | None, ids: list[int]):
    wanted = [number for number in ids if number <= 30]
    of = ARE_LISTED.parameters(ids)
    for new_offset in (70, 71):
        move = {**of, "new_next_offset": new_offset}
        assert heads.write(lambda connection, move=move: MOVE_LISTED.run(connection, move)) == len(wanted)
        moved = [row.partition_id for row in heads.read(HEADS.rows) if row.next_offset == new_offset]
        assert sorted(moved) == wanted


def test_a_key_that_the_database_gives_out_is_given_in_the_order_of_the_rows(
    heads: Store, listened: list[str] | None
) -> None:
    entry = {
        "transactional_id": "a",
        "producer_id": 1,
        "producer_epoch": 0,
        "state": 0,
        "first_state": 0,
        "timeout_ms": 1,
        "start_ms": -1,
        "update_ms": 0,
        "reason": "",
        "sent_offsets": None,
    }
    journal = HotStatement(insert(transaction_log))
    entries = [entry | {"transaction_number": number} for number in range(4)]
    heads.write(lambda connection: journal.run_each(connection, entries))
    numbers = select(transaction_log.c.transaction_number).order_by(transaction_log.c.entry_id)
    assert heads.read(lambda c: c.execute(numbers).scalars().all()) == [0, 1, 2, 3]


def test_values_that_stand_in_the_statement_and_types_that_differ(heads: Store, listened: list[str] | None) -> None:
    statement = HotStatement(
        select(
            literal(True, Flag).label("flag"),
            literal("50%", None).label("text"),
            func.max(bindparam("n", type_=BigInteger)),
        )
    )
    row = heads.read(lambda c: statement.row(c, {"n": 2**40}))
    assert row.flag is True
    assert tuple(row) == (True, "50%", 2**40)


def test_a_column_without_a_name_is_read_by_its_place(heads: Store, listened: list[str] | None) -> None:
    is_large = case((partition_heads.c.next_offset > 5, "yes"), else_="no")
    statement = HotStatement(
        select(is_large, partition_heads.c.next_offset, func.coalesce(None, 7)).where(
            partition_heads.c.partition_id == bindparam("of_partition_id")
        )
    )
    row = heads.read(lambda c: statement.row(c, {"of_partition_id": 6}))
    assert (row[0], row.next_offset, row[2]) == ("yes", 6, 7)


def test_an_upsert_and_what_it_returns(heads: Store, listened: list[str] | None) -> None:
    again = upsert(partition_heads)
    statement = HotStatement(
        again.on_conflict_do_update(
            index_elements=[partition_heads.c.partition_id], set_={"next_offset": again.excluded.next_offset}
        ).returning(partition_heads.c.partition_id, partition_heads.c.next_offset)
    )
    row = heads.write(lambda connection: statement.row(connection, head(3, 77)))
    assert (row.partition_id, row.next_offset) == (3, 77)


def test_a_row_that_is_not_there_is_none(heads: Store, listened: list[str] | None) -> None:
    of = {"partition_ids": [99], "from_offset": 0}
    assert heads.read(lambda c: (THESE.row(c, of), THESE.value(c, of), THESE.values(c, of))) == (None, None, [])


def test_the_clock_is_asked_at_each_execution(txnstore_url: str) -> None:
    now = HotStatement(select(server_now_ms()))
    clock = ManualClock()
    with open_store(txnstore_url, clock=clock) as store, open_store(txnstore_url) as other:
        for _ in range(2):
            clock.advance(1_000)
            assert store.read(now.value) == clock.now_ms()
        # What was rendered for one store is not what another one runs.
        assert other.read(now.value) != clock.now_ms()
        assert store.read(now.value) == clock.now_ms()


def test_errors_are_those_of_core_and_leave_the_rest_of_the_database_transaction_to_its_owner(
    heads: Store, listened: list[str] | None
) -> None:
    def work(connection) -> None:
        MOVE.run(connection, {"of_partition_id": 1, "new_next_offset": 50})
        with pytest.raises(IntegrityError) as raised:
            INSERT_HEADS.run(connection, head(1))
        assert isinstance(raised.value, DBAPIError)
        assert not connection.invalidated
        raise raised.value

    with pytest.raises((StatementFailed, WriteConflict)):
        heads.write(work)
    assert heads.read(lambda c: THESE.value(c, {"partition_ids": [1], "from_offset": 50})) is None


def test_on_sqlite_what_came_before_a_statement_that_failed_is_still_there(heads: Store) -> None:
    if heads.backend.name != "sqlite":
        pytest.skip("PostgreSQL takes no more statements then")

    def work(connection) -> None:
        MOVE.run(connection, {"of_partition_id": 1, "new_next_offset": 50})
        with pytest.raises(IntegrityError):
            INSERT_HEADS.run(connection, head(1))

    heads.write(work)
    assert heads.read(lambda c: THESE.value(c, {"partition_ids": [1], "from_offset": 50})) == 1


def test_no_statement_runs_by_itself_after_the_database_has_rolled_back(heads: Store) -> None:
    if heads.backend.name != "sqlite":
        pytest.skip("PostgreSQL refuses by itself")

    def work(connection) -> None:
        # As SQLite does when the disk is full.
        connection.connection.driver_connection.rollback()
        MOVE.run(connection, {"of_partition_id": 1, "new_next_offset": 50})

    with pytest.raises(TransactionPoisoned):
        heads.write(work)
    assert heads.read(lambda c: THESE.value(c, {"partition_ids": [1], "from_offset": 50})) is None


def test_a_connection_that_breaks_is_given_up_and_the_work_done_again(heads: Store) -> None:
    if heads.backend.name != "postgresql":
        pytest.skip("a file does not go away")
    tries: list[bool] = []

    def work(connection) -> int:
        tries.append(connection.invalidated)
        if len(tries) == 1:
            connection.connection.driver_connection.pgconn.finish()
        try:
            return MOVE.run(connection, {"of_partition_id": 1, "new_next_offset": 50})
        except DBAPIError as error:
            assert error.connection_invalidated  # noqa: PT017 - it goes on
            assert connection.invalidated
            with pytest.raises(Exception, match="roll"):
                # Nothing is said on a new connection, where no database transaction is open.
                MOVE.run(connection, {"of_partition_id": 2, "new_next_offset": 50})
            raise

    assert heads.write(work) == 1
    assert len(tries) == 2


def test_an_interrupt_gives_the_connection_up(heads: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    connections = []

    def work(connection) -> None:
        connections.append(connection)
        monkeypatch.setattr(heads.engine.dialect, "do_execute", interrupt)
        try:
            MOVE.run(connection, {"of_partition_id": 1, "new_next_offset": 50})
        finally:
            monkeypatch.undo()
            assert connection.invalidated

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        heads.write(work)
    assert heads.read(lambda c: THESE.value(c, {"partition_ids": [1], "from_offset": 50})) is None


def test_an_error_that_is_not_the_drivers_comes_out_as_it_is(heads: Store) -> None:
    def work(connection) -> None:
        THESE.rows(connection, {"partition_ids": [2**80], "from_offset": 0})

    with pytest.raises((OverflowError, StatementFailed)):
        heads.read(work)
    assert len(heads.read(HEADS.rows)) == 30


def test_listeners_of_the_engine_of_its_class_and_of_the_connection_hear_every_statement(heads: Store) -> None:
    heard: list[str] = []

    def hear(*arguments: object) -> None:
        heard.append(str(arguments[2]).split()[0])

    for target in (heads.engine, type(heads.engine)):
        event.listen(target, "after_cursor_execute", hear)
        try:
            heads.write(lambda connection: MOVE.run(connection, {"of_partition_id": 1, "new_next_offset": 50}))
        finally:
            event.remove(target, "after_cursor_execute", hear)
        assert heard == ["BEGIN", "UPDATE", "COMMIT"]
        heard.clear()
        heads.read(HEADS.rows)
        assert heard == []

    def work(connection) -> None:
        event.listen(connection, "before_cursor_execute", hear)
        HEADS.rows(connection)

    heads.read(work)
    assert heard[0] == "SELECT"


def test_a_read_leaves_nothing_open_on_the_connection(heads: Store) -> None:
    with heads.engine.connect() as connection:
        heads.backend.begin(connection, Access.READ, heads.limits)
        HEADS.rows(connection)
        heads.backend.commit(connection)
        # On SQLite a cursor that was not read to its end would still show the past.
        heads.write(lambda c: c.execute(delete(partition_heads)))
        heads.backend.begin(connection, Access.WRITE, heads.limits)
        assert HEADS.rows(connection) == []
        heads.backend.rollback(connection)


def test_the_drivers_own_words(heads: Store, listened: list[str] | None) -> None:
    answer = heads.read(lambda connection: run_on_driver(connection, "SELECT 1 AS one"))
    assert answer.rows == [(1,)]


def test_engines_that_render_alike_share_what_is_rendered(txnstore_url: str, tmp_path: Path) -> None:
    with (
        open_store(txnstore_url) as one,
        open_store(txnstore_url) as other,
        open_store(f"sqlite:///{tmp_path / 'third.db'}") as third,
    ):
        rendered = [HEADS.rendered(store.engine.dialect) for store in (one, other, third)]
        assert rendered[0] is rendered[1]
        assert (rendered[0] is rendered[2]) == (one.backend.name == "sqlite")


def test_each_engine_asks_its_own_clock(txnstore_url: str) -> None:
    now = HotStatement(select(server_now_ms()))
    early, late = ManualClock(1_000), ManualClock(2_000)
    with (
        open_store(txnstore_url, clock=early) as one,
        open_store(txnstore_url, clock=late) as other,
        open_store(txnstore_url) as third,
    ):
        assert [store.read(now.value) for store in (one, other, one)] == [1_000, 2_000, 1_000]
        assert third.read(now.value) > 1_000_000_000_000
        early.advance(5)
        assert [store.read(now.value) for store in (other, one)] == [2_000, 1_005]


def test_a_statement_is_sent_to_the_schema_of_its_engine(txnstore_postgresql_url: str) -> None:
    with open_store(txnstore_postgresql_url) as one, open_store(txnstore_postgresql_url, schema="second") as other:
        one.write(lambda connection: INSERT_HEADS.run(connection, head(1)))
        other.write(lambda connection: INSERT_HEADS.run(connection, head(2)))
        found = [[row.partition_id for row in store.read(HEADS.rows)] for store in (one, other)]
    assert found == [[1], [2]]


@pytest.mark.slow
def test_a_store_that_is_dropped_takes_its_connections_along(txnstore_url: str) -> None:
    store = open_store(txnstore_url)
    store.write(lambda connection: INSERT_HEADS.run(connection, head(1)))
    assert [row.partition_id for row in store.read(HEADS.rows)] == [1]
    engine = store.engine
    held: list[weakref.ref[Any]] = [weakref.ref(engine), weakref.ref(engine.pool)]
    if store.backend.name == "sqlite":
        held.append(weakref.ref(engine.checkpointer))  # type: ignore[attr-defined]  # our backend sets it
    store.close()
    del store, engine
    # A thread that ends may hold them for a moment.
    eventually(lambda: gc.collect() >= 0 and [reference() for reference in held] == [None] * len(held))


def test_an_insert_takes_the_columns_that_the_database_does_not_compute(heads: Store) -> None:
    entry = {"label": "a", "store_uuid": None, "coordinates": True, "catalogue_version": 0, "database_id": 2}
    with pytest.raises(KeyError, match="store_uuid"):
        heads.write(
            lambda connection: HotStatement(insert(databases)).run(
                connection, {"label": "a"} | {k: v for k, v in entry.items() if k != "store_uuid"}
            )
        )


def test_rows_come_in_binary_form_where_the_statement_says_so(
    listened: list[str] | None, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    do_execute = type(store.engine.dialect).do_execute

    def noting(dialect: Any, cursor: Any, text: str, values: Any, context: Any = None) -> None:
        asked.append(context is not None and bool(context.execution_options.get("binary_rows")))
        do_execute(dialect, cursor, text, values, context)

    for statement in (HEADS, HotStatement(HEADS.statement.execution_options(binary_rows=True))):
        with monkeypatch.context() as patched:
            patched.setattr(type(store.engine.dialect), "do_execute", noting)
            rows = store.read(statement.rows)
        assert [row.partition_id for row in rows] == list(range(1, 31))
    # BEGIN, the statement and COMMIT, twice.
    assert asked.count(True) == 1


def test_what_core_compiles_is_compiled_once_for_engines_that_render_alike(txnstore_url: str, tmp_path: Path) -> None:
    statement = select(partition_heads.c.next_offset).where(partition_heads.c.partition_id == 7).limit(99)
    with (
        open_store(txnstore_url) as one,
        open_store(txnstore_url) as other,
        open_store(f"sqlite:///{tmp_path / 'third.db'}") as third,
    ):
        found: list[Any] = [
            store.read(lambda connection: connection.execute(statement).context.compiled)
            for store in (one, other, third)
        ]
        assert found[0] is found[1]
        assert (found[0] is found[2]) == (one.backend.name == "sqlite")


def test_what_core_compiles_asks_the_clock_of_its_own_store(txnstore_url: str) -> None:
    early, late = ManualClock(1_000), ManualClock(2_000)
    with open_store(txnstore_url, clock=early) as one, open_store(txnstore_url, clock=late) as other:
        for store, now_ms in ((one, 1_000), (other, 2_000), (one, 1_000)):
            assert store.read(lambda connection: connection.execute(select(server_now_ms())).scalar_one()) == now_ms


def test_what_core_compiles_is_of_the_schema_and_the_clock_of_its_engine(txnstore_postgresql_url: str) -> None:
    with (
        open_store(txnstore_postgresql_url) as here,
        open_store(txnstore_postgresql_url, schema="elsewhere") as elsewhere,
        open_store(txnstore_postgresql_url, clock=ManualClock(1_000)) as of_clock,
    ):
        here.write(lambda connection: INSERT_HEADS.run(connection, head(1)))
        count = select(func.count()).select_from(partition_heads)
        assert [store.read(lambda c: c.execute(count).scalar_one()) for store in (here, elsewhere, here)] == [1, 0, 1]
        now = [store.read(lambda c: c.execute(select(server_now_ms())).scalar_one()) for store in (here, of_clock)]
        assert now[0] > now[1] == 1_000
