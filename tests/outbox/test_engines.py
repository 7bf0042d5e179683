"""Outboxes on engines of applications: they connect as the engine does, or say why they cannot."""

from __future__ import annotations

import sqlite3
import ssl
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool, QueuePool, StaticPool

from tests.outbox.conftest import engine_url, plain_connection
from tests.outbox.steps import values
from txnstore import KafkaError, KafkaException, Outbox
from txnstore.db.opening import open_store
from txnstore.errors import StoreUnavailable

SECRET = "hunter2"


def parts_of(url):
    """What psycopg is given for a URL, by its names."""
    _, options = create_engine(engine_url(url)).dialect.create_connect_args(make_url(engine_url(url)))
    return {name: value for name, value in options.items() if name != "context"}


def names_of_connections(url):
    with closing(plain_connection(url)) as connection:
        return connection.execute(
            "SELECT application_name FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid() ORDER BY 1"
        ).fetchall()


def sends_a_record(outbox, engine, url):
    outbox.open()
    with engine.begin() as connection:
        outbox.produce(connection, "t", b"v")
    assert outbox.sequence() == 1
    with open_store(url) as store:
        return values(store) == [b"v"]


# --- PostgreSQL -------------------------------------------------------------------------------------------------------


def test_what_connect_args_say_counts(txnstore_postgresql_url):
    parts = parts_of(txnstore_postgresql_url) | {
        "application_name": "shop",
        "prepare_threshold": 3,
        "autocommit": False,
    }
    engine = create_engine("postgresql+psycopg://", connect_args=parts, poolclass=NullPool)
    with Outbox(engine, sequencer=False) as outbox:
        assert sends_a_record(outbox, engine, txnstore_postgresql_url)
        assert ("shop",) in names_of_connections(txnstore_postgresql_url)
        assert f"/{parts['dbname']}" in repr(outbox)


def test_connect_args_stand_above_the_url(txnstore_postgresql_url):
    parts = parts_of(txnstore_postgresql_url)
    nowhere = f"postgresql+psycopg://nobody:{SECRET}@localhost:1/nowhere?application_name=url"
    engine = create_engine(nowhere, connect_args={"password": None, **parts}, poolclass=NullPool)
    with Outbox(engine, sequencer=False) as outbox:
        assert sends_a_record(outbox, engine, txnstore_postgresql_url)
        assert SECRET not in repr(outbox)
        assert SECRET not in str(vars(outbox))


def test_listeners_to_do_connect_are_asked_for_each_connection(txnstore_postgresql_url):
    """As those do that fetch a password which is soon over."""
    parts = parts_of(txnstore_postgresql_url)
    engine = create_engine(
        make_url(engine_url(txnstore_postgresql_url)).set(username="nobody", password=SECRET), poolclass=NullPool
    )
    asked = []

    @event.listens_for(engine, "do_connect")
    def fetch(_dialect, _record, _arguments, options):
        asked.append(dict(options))
        options["application_name"] = f"token {len(asked)}"
        options.update({"password": None, **{name: parts[name] for name in ("user", "password") if name in parts}})

    with Outbox(engine, sequencer=False) as outbox:
        assert asked == []
        assert sends_a_record(outbox, engine, txnstore_postgresql_url)
        # Of each the listener has got what it is to change, not what it made of it before.
        assert len(asked) > 1
        assert all(options["user"] == "nobody" for options in asked)
        # Those for notifications as well.
        names = {name for (name,) in names_of_connections(txnstore_postgresql_url)}
        assert names
        assert all(name.startswith("token ") for name in names)
        store = outbox._connection.store()
        before = len(asked)
        store._dispose()
        outbox.sequence()
        store.reclaim()
        assert len(asked) >= before + 2


def test_an_error_of_a_listener_comes_out_as_it_is_and_our_own_connections_are_made_later(txnstore_postgresql_url):
    engine = create_engine(engine_url(txnstore_postgresql_url))
    is_away = True

    @event.listens_for(engine, "do_connect")
    def fetch(*_):
        if is_away:
            raise PermissionError("no token for you")

    with Outbox(engine, sequencer=False) as outbox:
        with pytest.raises(PermissionError, match="no token"):
            outbox.open()
        is_away = False
        store = outbox.open()._connection.store()
        is_away = True
        with pytest.raises(StoreUnavailable):
            store.reclaim()
        is_away = False
        assert store.reclaim() == 0


def test_a_listener_that_connects_itself_is_refused(txnstore_postgresql_url):
    engine = create_engine(engine_url(txnstore_postgresql_url))
    made = []

    @event.listens_for(engine, "do_connect")
    def connect(_dialect, _record, _arguments, _options):
        made.append(plain_connection(txnstore_postgresql_url))
        return made[-1]

    with Outbox(engine, sequencer=False) as outbox, pytest.raises(KafkaException, match="do_connect listener") as told:
        outbox.open()
    assert told.value.args[0].code() == KafkaError._INVALID_ARG
    assert made
    assert all(connection.closed for connection in made)


@pytest.mark.parametrize("way", ["creator", "pool"])
def test_a_creator_is_refused_with_what_to_do(txnstore_postgresql_url, way):
    def creator():
        raise AssertionError("it is not to be called")

    ways = {"creator": creator} if way == "creator" else {"pool": QueuePool(creator)}
    engine = create_engine(engine_url(txnstore_postgresql_url), **ways)
    with pytest.raises(KafkaException, match="let a do_connect listener of the engine") as told:
        Outbox(engine)
    assert told.value.args[0].code() == KafkaError._INVALID_ARG


def test_an_async_creator_is_refused_and_an_async_engines_arguments_count(txnstore_postgresql_url):
    pytest.importorskip("greenlet")
    from sqlalchemy.ext.asyncio import create_async_engine

    async def creator():
        raise AssertionError("it is not to be called")

    with pytest.raises(KafkaException, match="async_creator"):
        Outbox(create_async_engine(engine_url(txnstore_postgresql_url), async_creator=creator))
    parts = parts_of(txnstore_postgresql_url) | {"application_name": "shop"}
    engine = create_async_engine("postgresql+psycopg://", connect_args=parts)
    with Outbox(engine, sequencer=False) as outbox:
        outbox.open()
        assert ("shop",) in names_of_connections(txnstore_postgresql_url)


#: What SQLAlchemy asks of a driver that is not there.
NO_DRIVER = SimpleNamespace(__version__="1.31.0", paramstyle="format", Error=Exception)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"password": SECRET, "timeout": 3, "tcp_keepalive": True}, {}),
        ({"database": "other", "application_name": "shop", "port": 7}, {"dbname": "other", "application_name": "shop"}),
        ({"ssl": "verify-full", "sslrootcert": Path("/ca.pem")}, {"sslmode": "verify-full", "sslrootcert": "/ca.pem"}),
        ({"dsn": "application_name=shop sslmode=require"}, {"application_name": "shop", "sslmode": "require"}),
        ({"host": ["a", "b"], "port": [1, None]}, {"host": "a,b", "port": "1,"}),
    ],
    ids=["of no meaning", "other names", "protection", "one text", "hosts"],
)
def test_what_other_drivers_are_given_is_translated(arguments, wanted):
    url = f"postgresql+pg8000://me:{SECRET}@db.example:5433/shop"
    outbox = Outbox(create_engine(url, module=NO_DRIVER, connect_args=arguments), sequencer=False)
    given = outbox._current_options()
    expected = {"user": "me", "host": "db.example", "port": str(arguments.get("port", 5433)), "dbname": "shop"}
    assert given == expected | {"password": SECRET} | wanted
    assert SECRET not in outbox._configuration["bootstrap.servers"]
    shown = make_url(outbox._configuration["bootstrap.servers"])
    assert shown.database == given["dbname"]
    assert shown.host == (None if "," in given["host"] else given["host"])


@pytest.mark.parametrize(
    "arguments",
    [{"ssl_context": ssl.create_default_context()}, {"ssl": True}, {"password": lambda: SECRET}],
    ids=["a context", "a flag", "a function"],
)
def test_what_only_another_driver_understands_is_refused(arguments):
    engine = create_engine(f"postgresql+pg8000://me:{SECRET}@h/shop", module=NO_DRIVER, connect_args=arguments)
    with pytest.raises(KafkaException, match=f"an argument '{next(iter(arguments))}'.*sslmode") as told:
        Outbox(engine)
    assert SECRET not in str(told.value)


# --- SQLite -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///elsewhere.db", "sqlite:////elsewhere.db"])
def test_an_sqlite_engine_with_a_creator_is_where_that_leads(tmp_path, url):
    path = tmp_path / "shop.db"
    engine = create_engine(url, creator=lambda: sqlite3.connect(f"file:{path}", uri=True), poolclass=NullPool)
    with Outbox(engine, sequencer=False) as outbox:
        assert sends_a_record(outbox, engine, f"sqlite:///{path}")


def test_an_sqlite_uri_is_where_it_leads(tmp_path):
    path = tmp_path / "shop.db"
    engine = create_engine(f"sqlite:///file:{path}?mode=rwc&uri=true&timeout=3")
    with Outbox(engine, sequencer=False) as outbox:
        assert sends_a_record(outbox, engine, f"sqlite:///{path}")
    engine.dispose()


def test_options_of_the_driver_in_an_sqlite_url_do_not_matter(tmp_path):
    path = tmp_path / "shop.db"
    engine = create_engine(f"sqlite:///{path}?timeout=3", connect_args={"detect_types": 1})
    with Outbox(engine, sequencer=False) as outbox:
        assert sends_a_record(outbox, engine, f"sqlite:///{path}")
    engine.dispose()


@pytest.mark.parametrize(
    ("url", "further"),
    [
        ("sqlite://", {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}),
        ("sqlite:///:memory:", {}),
        ("sqlite:///file::memory:?cache=shared&uri=true", {}),
        ("sqlite:///file:named?mode=memory&cache=shared&uri=true", {"poolclass": StaticPool}),
        ("sqlite:///looks/like/a/file.db", {"creator": lambda: sqlite3.connect(":memory:")}),
    ],
)
def test_an_sqlite_engine_in_memory_is_refused(url, further):
    engine = create_engine(url, **further)
    with pytest.raises(KafkaException, match="own memory") as told:
        Outbox(engine)
    assert told.value.args[0].code() == KafkaError._INVALID_ARG
    engine.dispose()


def test_an_sqlite_engine_that_does_not_say_where_it_leads_is_refused(tmp_path):
    missing = tmp_path / "missing" / "shop.db"
    engine = create_engine("sqlite:///shop.db", creator=lambda: sqlite3.connect(missing))
    with pytest.raises(KafkaException, match="from the file's URL"):
        Outbox(engine)


def test_nothing_is_opened_to_know_where_a_relative_path_leads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outbox = Outbox(create_engine("sqlite:///shop.db"), sequencer=False)
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path / "shop.db") in repr(outbox)


@pytest.mark.parametrize("is_moved_before", [True, False])
def test_an_async_engines_relative_path_leads_to_the_same_file_wherever_the_process_goes(
    tmp_path, monkeypatch, is_moved_before
):
    pytest.importorskip("greenlet")
    pytest.importorskip("aiosqlite")
    import asyncio

    from sqlalchemy.ext.asyncio import create_async_engine

    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    engine = create_async_engine("sqlite+aiosqlite:///shop.db")
    if is_moved_before:
        monkeypatch.chdir(tmp_path / "there")
    outbox = Outbox(engine, sequencer=False)
    monkeypatch.chdir(tmp_path / "there")

    async def run():
        async with engine.begin() as connection:
            await connection.run_sync(outbox.produce, "t", b"v")
        await engine.dispose()

    with outbox.open():
        asyncio.run(run())
        assert outbox.sequence() == 1
    assert list(Path().iterdir()) == []


def test_an_async_sqlite_engine_with_a_way_of_its_own_is_refused(tmp_path):
    pytest.importorskip("greenlet")
    aiosqlite = pytest.importorskip("aiosqlite")
    from sqlalchemy.ext.asyncio import create_async_engine

    for engine in (
        create_async_engine("sqlite+aiosqlite://", async_creator=lambda: aiosqlite.connect(tmp_path / "shop.db")),
        create_async_engine(f"sqlite+aiosqlite:///file:{tmp_path / 'shop.db'}?uri=true"),
    ):
        with pytest.raises(KafkaException, match="from the file's URL"):
            Outbox(engine)
