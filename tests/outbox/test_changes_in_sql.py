"""Changes whose new value only the database knows: SQL expressions, versions, and what others do before the UPDATE."""

from __future__ import annotations

import gc
import json
import weakref
from datetime import datetime

import pytest
from sqlalchemy import ForeignKey, Integer, event, func, inspect, select, text, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship, sessionmaker

from tests.outbox.conftest import engine_url
from tests.outbox.steps import values
from txnstore import Outbox
from txnstore.outbox import Change


class Base(DeclarativeBase):
    """The application's own tables."""


class Account(Base):
    """What is watched."""

    __tablename__ = "accounts"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(default="plain")
    balance: Mapped[int] = mapped_column(default=0)
    note: Mapped[str | None]
    opened: Mapped[datetime | None]
    seen: Mapped[int | None] = mapped_column(onupdate=text("coalesce(seen, 0) + 1"))
    entries: Mapped[list[Entry]] = relationship(back_populates="account")
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "plain"}  # noqa: RUF012 - SQLAlchemy's way


class SavingsAccount(Account):
    """A subclass of it, with a table of its own."""

    __tablename__ = "savings_accounts"
    id: Mapped[int] = mapped_column(ForeignKey("accounts.id"), primary_key=True)
    interest: Mapped[int] = mapped_column(default=1)
    __mapper_args__ = {"polymorphic_identity": "savings"}  # noqa: RUF012 - SQLAlchemy's way


class Entry(Base):
    """What is not watched."""

    __tablename__ = "account_entries"
    id: Mapped[int] = mapped_column(primary_key=True)
    account_id: Mapped[int] = mapped_column(ForeignKey("accounts.id"))
    account: Mapped[Account] = relationship(back_populates="entries")


class Fetched(Base):
    """Its new values come with the statement, where the database can do that."""

    __tablename__ = "fetched"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]
    __mapper_args__ = {"eager_defaults": True}  # noqa: RUF012 - SQLAlchemy's way


class Versioned(Base):
    """Its version is the application's to count."""

    __tablename__ = "versioned"
    id: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str | None]
    version = mapped_column(Integer, nullable=False)
    __mapper_args__ = {"version_id_col": version, "version_id_generator": False}  # noqa: RUF012 - SQLAlchemy's way


def as_json(account: Account, change: Change) -> str:
    return json.dumps([change.kind, account.balance, sorted(change.attributes - {"id", "kind"})])


@pytest.fixture
def sessions(engine):
    Base.metadata.create_all(engine)
    made = sessionmaker(engine)
    with made.begin() as session:
        session.add_all([Account(id=1, balance=100), SavingsAccount(id=2, balance=50)])
    return made


@pytest.fixture
def outbox(engine):
    with Outbox(engine, sequencer=False) as found:
        yield found


@pytest.fixture
def watch(outbox, sessions):
    return outbox.watch(Account, topic="accounts", value=as_json, sessions=sessions)


@pytest.fixture
def hook(request):
    """Listen to events of SQLAlchemy until the test ends."""

    def listen(*arguments):
        event.listen(*arguments)
        request.addfinalizer(lambda: event.remove(*arguments))

    return listen


def made(outbox, store, topic="accounts"):
    outbox.sequence()
    return [json.loads(value or b"") for value in values(store, topic)]


def test_an_attribute_that_is_set_to_an_expression_has_changed(store, outbox, sessions, watch):
    """As SQLAlchemy counts up without a lock; the value function reads what the database has made of it."""
    with sessions.begin() as session:
        session.get(Account, 1).balance = Account.balance - 30
    with sessions.begin() as session:
        account = session.get(Account, 1)
        account.balance, account.note = Account.balance - 30, "twice"
    with sessions.begin() as session:
        account = session.get(Account, 1)
        session.expire(account)
        account.balance = Account.balance - 30
    assert made(outbox, store) == [
        ["update", 70, ["balance"]],
        ["update", 40, ["balance", "note"]],
        ["update", 10, ["balance"]],
    ]


def test_a_watch_is_not_kept_by_the_class_that_it_watches(engine, sessions):
    """The class is there as long as the process; an outbox may be made for each request."""

    def watch_and_forget():
        forgotten = Outbox(engine, sequencer=False)
        with Session(engine) as session:
            forgotten.watch(Account, topic="accounts", value=as_json, sessions=session)
        return weakref.ref(forgotten)

    forgotten = watch_and_forget()
    gc.collect()
    assert forgotten() is None
    with sessions.begin() as session:
        session.get(Account, 1).balance = Account.balance - 30


def test_each_flush_of_a_transaction_has_its_own_changes(store, outbox, sessions, watch):
    with sessions.begin() as session:
        account = session.get(Account, 1)
        account.balance = Account.balance - 30
        session.flush()
        account.note = "one"
        session.flush()
        account.balance = Account.balance - 30
        session.flush()
        account.note = "last"
        session.delete(account)
    assert made(outbox, store) == [
        ["update", 70, ["balance"]],
        ["update", 70, ["note"]],
        ["update", 40, ["balance"]],
        ["delete", 40, []],
    ]


def test_a_flush_that_fails_leaves_nothing_to_the_next_one(store, outbox, sessions, watch):
    with sessions() as session:
        account = session.get(Account, 1)
        account.balance = Account.balance - 30
        entry = Entry(account_id=None)
        session.add(entry)
        with pytest.raises(Exception, match=r"(?i)not.null"):
            session.flush()
        session.rollback()
        session.get(Account, 1).note = "after it"
        session.commit()
    assert made(outbox, store) == [["update", 100, ["note"]]]


def test_when_is_told_which_attribute_was_set_to_an_expression(store, outbox, sessions):
    outbox.watch(
        Account,
        "accounts",
        value=as_json,
        when=lambda account, change: "balance" in change.attributes,
        sessions=sessions,
    )
    with sessions.begin() as session:
        account = session.get(Account, 1)
        account.balance, account.note = Account.balance - 30, "why"
        session.get(Account, 2).note = "no matter"
    assert made(outbox, store) == [["update", 70, ["balance", "note"]]]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_expression", [True, False])
@pytest.mark.parametrize("time", ["before_flush", "before_update"])
def test_what_listeners_of_the_application_set_counts(store, outbox, sessions, hook, time, is_expression):
    def set_balance(account):
        account.balance = Account.balance + 1 if is_expression else 101

    if time == "before_flush":
        hook(sessions, time, lambda session, *_: [set_balance(account) for account in session.dirty])
    else:
        hook(Account, time, lambda mapper, connection, account: set_balance(account))
    outbox.watch(Account, "accounts", value=as_json, sessions=sessions)
    with sessions.begin() as session:
        session.get(Account, 1).note = None
    assert made(outbox, store) == [["update", 101, ["balance"]]]


def test_what_a_listener_behind_the_watch_sets_back_is_no_change(store, outbox, sessions, watch, hook):
    def set_back(_, __, account):
        account.note = None

    hook(Account, "before_update", set_back)
    with sessions.begin() as session:
        session.get(Account, 1).note = "soon gone"
    assert made(outbox, store) == []


def test_an_object_whose_row_stays_as_it_is_becomes_no_record(store, outbox, sessions, watch):
    with sessions.begin() as session:
        account = session.get(Account, 1)
        account.balance = 100
        session.add(Entry(account_id=1))
        session.merge(SavingsAccount(id=2, balance=50))
    assert made(outbox, store) == []


def test_a_collection_that_changes_beside_an_expression_counts_as_ever(store, outbox, sessions, watch):
    with sessions.begin() as session:
        first = session.get(Account, 1)
        first.entries.append(Entry())
        session.flush()
        account = session.get(Account, 2)
        account.entries.append(Entry())
        account.balance = Account.balance * 2
    assert made(outbox, store) == [["update", 100, ["entries"]], ["update", 100, ["balance", "entries"]]]


def test_what_the_database_adds_by_itself_is_not_named(store, outbox, sessions, watch):
    """`seen` counts up at each UPDATE, and expires as what was set to an expression does."""
    with sessions.begin() as session:
        session.get(Account, 1).balance = 7
    with sessions() as session:
        assert session.get(Account, 1).seen == 1
    assert made(outbox, store) == [["update", 7, ["balance"]]]


def test_expressions_of_a_table_of_a_subclass_count(store, outbox, sessions, watch):
    with sessions.begin() as session:
        session.get(SavingsAccount, 2).interest = SavingsAccount.interest + 1
        session.flush()
        session.get(SavingsAccount, 2).balance = Account.balance + 1
    assert made(outbox, store) == [["update", 50, ["interest"]], ["update", 51, ["balance"]]]


def test_a_subclass_that_is_watched_leaves_the_others_alone(store, outbox, sessions):
    outbox.watch(SavingsAccount, "accounts", value=as_json, sessions=sessions)
    with sessions.begin() as session:
        for number in (1, 2):
            session.get(Account, number).balance = Account.balance + 1
    assert made(outbox, store) == [["update", 51, ["balance"]]]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("eager_defaults", ["auto", False])
def test_an_insert_names_what_was_set_to_an_expression(store, outbox, sessions, watch, monkeypatch, eager_defaults):
    """Whether its value comes with the INSERT or not."""
    monkeypatch.setattr(inspect(Account), "eager_defaults", eager_defaults)
    with sessions.begin() as session:
        session.add(Account(id=3, balance=select(func.max(Account.balance) + 1).scalar_subquery(), opened=func.now()))
    assert made(outbox, store) == [["insert", 101, ["balance", "opened"]]]


def test_a_value_that_comes_with_the_update_counts(store, outbox, sessions):
    outbox.watch(Fetched, "fetched", value=as_json, sessions=sessions)
    with sessions.begin() as session:
        session.add(Fetched(id=1, balance=100))
    with sessions.begin() as session:
        session.get(Fetched, 1).balance = Fetched.balance - 30
    assert made(outbox, store, "fetched")[1:] == [["update", 70, ["balance"]]]


def test_a_version_that_the_application_counts_is_a_change(store, outbox, sessions):
    def value(versioned, change):
        return json.dumps([change.kind, versioned.version, sorted(change.attributes)])

    outbox.watch(Versioned, "versioned", value=value, sessions=sessions)
    with sessions.begin() as session:
        session.add(Versioned(id=1, version=1))
    with sessions.begin() as session:
        session.get(Versioned, 1).version = 2
    with sessions.begin() as session:
        found = session.get(Versioned, 1)
        found.note, found.version = func.lower("A"), 3
    assert made(outbox, store, "versioned")[1:] == [["update", 2, ["version"]], ["update", 3, ["note", "version"]]]


def test_what_is_merged_and_what_passes_by_the_session(store, outbox, sessions, watch):
    with sessions.begin() as session:
        session.merge(Account(id=1, balance=Account.balance - 30))
        session.flush()
        session.execute(update(Account).values(balance=Account.balance - 30))
        session.bulk_update_mappings(Account, [{"id": 1, "note": "in bulk"}])
    assert made(outbox, store) == [["update", 70, ["balance"]]]


def test_sessions_that_are_not_watched_and_a_stopped_watch_leave_nothing_behind(store, outbox, engine, sessions, watch):
    def count_up(sessions):
        with sessions.begin() as session:
            session.get(Account, 1).balance = Account.balance + 1

    count_up(sessionmaker(engine))
    count_up(sessions)
    watch.stop()
    count_up(sessions)
    assert made(outbox, store) == [["update", 102, ["balance"]]]
    outbox.watch(Account, topic="accounts", value=as_json, sessions=sessions)
    count_up(sessions)
    assert len(made(outbox, store)) == 2


def test_an_asynchronous_session_reads_the_new_value_within_its_flush(store, outbox, url, sessions):
    pytest.importorskip("greenlet")
    pytest.importorskip("aiosqlite")
    import asyncio

    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    class WatchedSession(Session):
        """Only those of this test."""

    class WatchedAsyncSession(AsyncSession):
        """The same for asynchronous code."""

        sync_session_class = WatchedSession

    async def run():
        engine = create_async_engine(engine_url(url).replace("sqlite:", "sqlite+aiosqlite:"))
        async with WatchedAsyncSession(engine) as session, session.begin():
            account = await session.get_one(Account, 1)
            account.balance = Account.balance - 30
        await engine.dispose()

    outbox.watch(Account, topic="accounts", value=as_json, sessions=WatchedSession)
    asyncio.run(run())
    assert made(outbox, store) == [["update", 70, ["balance"]]]
