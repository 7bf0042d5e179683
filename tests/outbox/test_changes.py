"""Objects of the ORM as records: what a session's commit has changed, in the same commit."""

from __future__ import annotations

import gc
import json
import multiprocessing
import subprocess
import sys
import warnings

import pytest
from sqlalchemy import ForeignKey, create_engine, select, update
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship, sessionmaker

from tests.outbox.conftest import engine_url
from tests.outbox.steps import records, values, waiting
from txnstore import KafkaException, Outbox
from txnstore.outbox import Change, ChangeKind

PATIENCE_SECONDS = 60.0
#: Commits once all else has ended: what is registered first runs last.
PROGRAM_THAT_ENDS = """
import atexit, sys

@atexit.register
def commit():
    with Session(engine) as session, session.begin():
        session.add(Order(amount=1))

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from txnstore import Outbox

class Base(DeclarativeBase):
    pass

class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int]

engine = create_engine(sys.argv[1])
Base.metadata.create_all(engine)
Outbox(sys.argv[2]).open().watch(Order, "orders", value=lambda order, change: str(order.amount))
"""


class Base(DeclarativeBase):
    """The application's own tables."""


class Order(Base):
    """What is watched."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(default="plain")
    amount: Mapped[int]
    lines: Mapped[list[Line]] = relationship(back_populates="order", cascade="all, delete-orphan")
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "plain"}  # noqa: RUF012 - SQLAlchemy's way


class LargeOrder(Order):
    """A subclass of it."""

    __mapper_args__ = {"polymorphic_identity": "large"}  # noqa: RUF012 - SQLAlchemy's way


class Line(Base):
    """What is not watched."""

    __tablename__ = "order_lines"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"))
    order: Mapped[Order] = relationship(back_populates="lines")


def as_json(order: Order, change: Change) -> str:
    return json.dumps([change.kind, order.id, order.amount, sorted(change.attributes & {"amount"})])


@pytest.fixture
def sessions(engine):
    Base.metadata.create_all(engine)
    return sessionmaker(engine)


@pytest.fixture
def outbox(engine, sessions):
    with Outbox(engine, sequencer=False) as found:
        yield found


@pytest.fixture
def watch(outbox, sessions):
    return outbox.watch(Order, topic="orders", key=lambda order: str(order.id), value=as_json, sessions=sessions)


def made(outbox, store, topic="orders"):
    outbox.sequence()
    return [json.loads(value or b"") for value in values(store, topic)]


def test_inserts_updates_and_deletions_become_records(store, outbox, sessions, watch):
    with sessions.begin() as session:
        session.add_all([Order(amount=5), Order(amount=6)])
    with sessions.begin() as session:
        session.get(Order, 1).amount = 7
        session.delete(session.get(Order, 2))
    assert made(outbox, store) == [
        ["insert", 1, 5, ["amount"]],
        ["insert", 2, 6, ["amount"]],
        ["update", 1, 7, ["amount"]],
        ["delete", 2, 6, []],
    ]
    ((first, *_),) = records(store, "orders")
    assert first.key == b"1"


def test_what_is_rolled_back_leaves_nothing_nor_does_a_savepoint(store, outbox, sessions, watch):
    with sessions() as session:
        session.add(Order(amount=1))
        session.flush()
        session.rollback()
        session.add(Order(amount=2))
        savepoint = session.begin_nested()
        session.add(Order(amount=3))
        session.flush()
        savepoint.rollback()
        with session.begin_nested():
            session.add(Order(amount=4))
        assert waiting(store) == 0
        session.commit()
    assert [amount for _, _, amount, _ in made(outbox, store)] == [2, 4]


def test_several_flushes_are_several_records_in_one_transaction(store, outbox, sessions, watch):
    with sessions.begin() as session:
        order = Order(amount=1)
        session.add(order)
        session.flush()
        order.amount = 2
        session.execute(select(Order)).all()
        order.amount = 3
    assert [(kind, amount) for kind, _, amount, _ in made(outbox, store)] == [
        ("insert", 1),
        ("update", 2),
        ("update", 3),
    ]


def test_an_object_that_is_only_touched_becomes_no_record(store, outbox, sessions, watch):
    with sessions.begin() as session:
        session.add(Order(amount=1))
    with sessions.begin() as session:
        order = session.get(Order, 1)
        order.amount = 1
        session.add(Line(order_id=1))
    assert len(made(outbox, store)) == 1


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_loaded", [True, False])
@pytest.mark.parametrize("way", ["append", "remove", "its other end"])
def test_an_object_whose_collection_changes_is_updated_and_says_so_and_may_be_left_out(
    store, outbox, sessions, is_loaded, way
):
    """As SQLAlchemy's own after_update is called for it, though its row stays as it is."""

    def names(order: Order, change: Change) -> str:
        return json.dumps([change.kind, sorted(change.attributes - {"id", "kind"})])

    outbox.watch(Order, "orders", value=names, sessions=sessions)
    outbox.watch(
        Order,
        "rows",
        value=names,
        when=lambda order, change: change.attributes != {"lines"},
        sessions=sessions,
    )
    with sessions.begin() as session:
        session.add(Order(amount=1, lines=[Line()]))
    with sessions.begin() as session:
        order = session.get(Order, 1)
        if is_loaded:
            assert len(order.lines) == 1
        if way == "append":
            order.lines.append(Line())
        elif way == "remove":
            order.lines.remove(session.get(Line, 1))
        else:
            session.add(Line(order=order))
    with sessions.begin() as session:
        session.get(Order, 1).amount = 2
    inserted = ["insert", ["amount", "lines"]]
    # What is not loaded, nobody can tell from what it was; append() and remove() load it.
    by_collection = [] if way == "its other end" and not is_loaded else [["update", ["lines"]]]
    assert made(outbox, store) == [inserted, *by_collection, ["update", ["amount"]]]
    assert made(outbox, store, "rows") == [inserted, ["update", ["amount"]]]


def test_an_orphan_is_deleted_for_the_records_as_it_is_for_the_database(store, outbox, sessions):
    outbox.watch(Line, "lines", value=lambda line, change: json.dumps([change.kind, line.id]), sessions=sessions)
    with sessions.begin() as session:
        session.add(Order(amount=1, lines=[Line(), Line(), Line()]))
    with sessions.begin() as session:
        order = session.get(Order, 1)
        session.delete(order.lines[2])
        del order.lines[0]
    with sessions() as session:
        assert [line.id for line in session.scalars(select(Line))] == [2]
    assert made(outbox, store, "lines") == [["insert", 1], ["insert", 2], ["insert", 3], ["delete", 3], ["delete", 1]]


def test_what_is_added_in_the_place_of_what_is_deleted_is_not_deleted_behind_it(store, outbox, sessions, watch):
    with sessions.begin() as session:
        session.add(Order(id=1, amount=5))
    with sessions.begin() as session:
        session.delete(session.get(Order, 1))
        session.add(Order(id=1, amount=6))
    with sessions() as session:
        assert session.get(Order, 1).amount == 6
    assert made(outbox, store) == [["insert", 1, 5, ["amount"]], ["insert", 1, 6, ["amount"]]]


def test_a_flush_of_some_objects_makes_no_records_of_the_others(store, outbox, sessions, watch):
    with sessions.begin() as session:
        session.add_all([Order(id=1, amount=1), Order(id=2, amount=2)])
    with sessions.begin() as session, warnings.catch_warnings():
        # It is to go; who asks for it gets it until then.
        warnings.simplefilter("ignore", DeprecationWarning)
        one, other = session.get(Order, 1), session.get(Order, 2)
        session.delete(other)
        new = [Order(id=3, amount=3), Order(id=4, amount=4)]
        session.add_all(new)
        one.amount = 7
        session.flush([new[1]])
        session.flush([one])
    assert [(kind, number) for kind, number, _, _ in made(outbox, store)[2:]] == [
        ("insert", 4),
        ("update", 1),
        ("insert", 3),
        ("delete", 2),
    ]


def test_subclasses_count_and_other_models_do_not(store, outbox, sessions, watch):
    with sessions.begin() as session:
        session.add(LargeOrder(amount=1, lines=[Line(), Line()]))
    assert made(outbox, store) == [["insert", 1, 1, ["amount"]]]


def test_a_change_may_be_left_out_or_be_a_tombstone_with_headers(store, outbox, sessions):
    outbox.watch(
        Order,
        "orders",
        key=lambda order: str(order.id),
        value=lambda order, change: None if change.kind is ChangeKind.DELETE else str(order.amount),
        headers=lambda order, change: {"change": change.kind},
        when=lambda order, change: order.amount > 1,
        sessions=sessions,
    )
    with sessions.begin() as session:
        session.add_all([Order(amount=1), Order(amount=2)])
    with sessions.begin() as session:
        session.delete(session.get(Order, 2))
    outbox.sequence()
    ((first, second),) = records(store, "orders")
    assert (first.key, first.value, first.headers) == (b"2", b"2", (("change", b"insert"),))
    assert (second.key, second.value, second.headers) == (b"2", None, (("change", b"delete"),))


def test_an_error_in_a_function_ends_the_flush_and_nothing_is_committed(store, outbox, sessions):
    outbox.watch(Order, "orders", value=lambda order, change: 1 / 0, sessions=sessions)
    with pytest.raises(ZeroDivisionError), sessions.begin() as session:
        session.add(Order(amount=1))
    with sessions() as session:
        assert session.scalars(select(Order)).all() == []
    assert waiting(store) == 0


def test_what_passes_by_the_session_is_not_seen(store, outbox, sessions, watch):
    with sessions.begin() as session:
        session.add(Order(amount=1))
    with sessions.begin() as session:
        session.execute(update(Order).values(amount=2))
    assert len(made(outbox, store)) == 1


def committed(sessions):
    with sessions() as session:
        return [order.amount for order in session.scalars(select(Order).order_by(Order.id))]


def add(sessions, amount, **columns):
    with sessions.begin() as session:
        session.add(Order(amount=amount, **columns))


def test_a_watch_that_was_stopped_makes_no_records_nor_asks_for_any(store, outbox, sessions, watch):
    watch.stop()
    watch.stop()
    add(sessions, 1)
    outbox.close()
    add(sessions, 2)
    assert (committed(sessions), waiting(store)) == ([1, 2], 0)


@pytest.mark.parametrize("way", ["close", "with"])
def test_once_the_outbox_is_closed_nothing_is_committed_without_its_record(store, engine, sessions, way):
    outbox = Outbox(engine, sequencer=False)
    arguments = {"value": as_json, "when": lambda order, change: order.amount < 10, "sessions": sessions}
    watch = outbox.watch(Order, "orders", **arguments)
    add(sessions, 1)
    if way == "close":
        outbox.close()
    else:
        with outbox:
            pass
    with sessions() as session:
        session.add(Order(amount=2))
        with pytest.raises(RuntimeError, match=r"records of Order .*'orders' has been closed.*insert.*stop\(\)"):
            session.commit()
        session.rollback()
        # What would have become no record is flushed as ever.
        session.add_all([Order(amount=10), Line(order_id=1)])
        session.commit()
    with pytest.raises(RuntimeError, match="this delete is not committed"), sessions.begin() as session:
        session.delete(session.get(Order, 1))
    assert (committed(sessions), waiting(store)) == ([1, 10], 1)
    watch.stop()
    add(sessions, 3)
    assert (committed(sessions), waiting(store)) == ([1, 10, 3], 1)


def test_who_watches_the_same_again_takes_over_from_an_outbox_that_is_closed(store, engine, sessions):
    """One watch for one: of two, the other one still wants its records."""
    first, second = (Outbox(engine, sequencer=False) for _ in range(2))
    for _ in range(2):
        first.watch(Order, "orders", value=as_json, sessions=sessions)
    first.close()
    with second:
        second.watch(Order, "elsewhere", value=as_json, sessions=sessions)
        second.watch(LargeOrder, "orders", value=as_json, sessions=sessions)
        second.watch(Order, "orders", value=as_json, sessions=sessionmaker(engine))
        watches = [second.watch(Order, "orders", value=as_json, sessions=sessions)]
        with pytest.raises(RuntimeError, match="has been closed"):
            add(sessions, 1)
        watches.append(second.watch(Order, "orders", value=as_json, sessions=sessions))
        add(sessions, 2)
        assert (committed(sessions), len(made(second, store))) == ([2], 2)
        for watch in watches:
            watch.stop()
        add(sessions, 3)
        assert (committed(sessions), len(made(second, store))) == ([2, 3], 2)


def test_whoever_watches_the_same_already_takes_over_from_an_outbox_that_is_closed(store, engine, sessions):
    """As where an application makes its outbox anew, and closes the old one then; one watch for one here, too."""
    first, second = (Outbox(engine, sequencer=False) for _ in range(2))
    for _ in range(2):
        first.watch(Order, "orders", value=as_json, sessions=sessions)
    with second:
        second.watch(LargeOrder, "orders", value=as_json, sessions=sessions).stop()
        watch = second.watch(Order, "orders", value=as_json, sessions=sessions)
        first.close()
        first.close()
        with pytest.raises(RuntimeError, match="has been closed"):
            add(sessions, 1)
        other = second.watch(Order, "orders", value=as_json, sessions=sessions)
        add(sessions, 2)
        assert (committed(sessions), len(made(second, store))) == ([2], 2)
        watch.stop()
        other.stop()


def test_an_interrupted_close_is_made_up_for_by_the_next_one(engine, sessions, monkeypatch):
    outbox = Outbox(engine, sequencer=False)
    watch = outbox.watch(Order, "orders", value=as_json, sessions=sessions)

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(watch, "refuse", interrupted)
        with pytest.raises(KeyboardInterrupt):
            outbox.close()
    outbox.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        add(sessions, 1)
    watch.stop()


def test_an_outbox_that_is_closed_between_flush_and_commit_has_its_record(store, engine, sessions):
    outbox = Outbox(engine, sequencer=False)
    outbox.watch(Order, "orders", value=as_json, sessions=sessions)
    with sessions.begin() as session:
        session.add(Order(amount=1))
        session.flush()
        outbox.close()
    assert (committed(sessions), waiting(store)) == ([1], 1)


def test_an_outbox_that_nobody_holds_goes_on_watching(store, engine, sessions):
    Outbox(engine, sequencer=False).watch(Order, "orders", value=as_json, sessions=sessions)
    gc.collect()
    add(sessions, 1)
    assert (committed(sessions), waiting(store)) == ([1], 1)


def closes_it(outbox, sessions):
    add(sessions, 2)
    outbox.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        add(sessions, 3)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_child_of_a_fork_that_closes_the_outbox_closes_it_for_itself(store, outbox, engine, sessions, watch):
    add(sessions, 1)
    engine.dispose()
    child = multiprocessing.get_context("fork").Process(target=closes_it, args=(outbox, sessions))
    child.start()
    child.join(PATIENCE_SECONDS)
    assert child.exitcode == 0
    add(sessions, 4)
    assert (committed(sessions), waiting(store)) == ([1, 2, 4], 3)


@pytest.mark.slow
def test_what_is_committed_while_the_program_ends_has_its_record(url, store):
    """Its finalizers have run by then."""
    program = [sys.executable, "-c", PROGRAM_THAT_ENDS, engine_url(url), url]
    subprocess.run(program, check=True, timeout=PATIENCE_SECONDS)
    assert waiting(store) == 1


def test_all_sessions_are_watched_unless_told(store, outbox, sessions, engine):
    watch = outbox.watch(Order, "orders", value=as_json)
    try:
        with Session(engine) as session, session.begin():
            session.add(Order(amount=1))
    finally:
        # Sessions of other tests would be refused once the outbox is closed.
        watch.stop()
    assert made(outbox, store) == [["insert", 1, 1, ["amount"]]]


def test_a_session_on_several_engines_uses_the_one_of_the_object(store, outbox, engine, sessions, watch, tmp_path):
    other = create_engine(f"sqlite:///{tmp_path / 'other.db'}")
    Base.metadata.create_all(other)
    both = sessionmaker(binds={Order: engine, Line: other})
    outbox.watch(Order, "orders", value=as_json, sessions=both)
    with both.begin() as session:
        session.add_all([Order(amount=1), Line(order_id=1)])
    assert made(outbox, store) == [["insert", 1, 1, ["amount"]]]
    other.dispose()


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"model": str}, TypeError, "not a mapped class"),
        ({"model": 5}, TypeError, "not a mapped class"),
        ({"topic": "a b"}, KafkaException, "a-z A-Z 0-9"),
        ({"value": None}, TypeError, "value must be a function"),
        ({"key": "id"}, TypeError, "key must be a function"),
        ({"sessions": async_sessionmaker()}, TypeError, "sync_session_class.*not async_sessionmaker"),
    ],
    ids=["no model", "a number", "a bad topic", "no value", "text for a key", "asynchronous sessions"],
)
def test_bad_arguments_are_refused(outbox, arguments, error, text):
    with pytest.raises(error, match=text):
        outbox.watch(**{"model": Order, "topic": "orders", "value": as_json} | arguments)
