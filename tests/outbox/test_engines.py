"""Outboxes on engines of applications: they connect as the engine does, or say why they cannot."""

from __future__ import annotations

import sqlite3
import ssl
from contextlib import closing
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace

import pytest
from psycopg.pq import Conninfo
from sqlalchemy import create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool, QueuePool, StaticPool

from tests.outbox.conftest import engine_url, plain_connection
from tests.outbox.steps import values
from txnstore import KafkaError, KafkaException, Outbox
from txnstore.db.backend import Limits
from txnstore.db.callers.engines import database_of_engine
from txnstore.db.opening import open_store
from txnstore.db.url import secret_option_names
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


def test_an_error_of_a_listener_is_as_if_the_database_were_away(txnstore_postgresql_url, monkeypatch):
    """On whichever connection, and again for each: a password that cannot be fetched now can be later."""
    monkeypatch.setattr(Limits, "__init__", partialmethod(Limits.__init__, retry_timeout_ms=0))
    engine = create_engine(engine_url(txnstore_postgresql_url))
    is_away = True

    @event.listens_for(engine, "do_connect")
    def fetch(*_):
        if is_away:
            raise PermissionError(SECRET)

    with Outbox(engine, sequencer=False) as outbox:
        with pytest.raises(KafkaException, match="PermissionError") as told:
            outbox.open()
        assert told.value.args[0].retriable()
        assert SECRET not in str(told.value)
        is_away = False
        store = outbox.open()._connection.store()
        is_away = True
        with pytest.raises(StoreUnavailable):
            store.reclaim()
        store._dispose()
        with pytest.raises(KafkaException, match="PermissionError"):
            outbox.sequence()
        is_away = False
        assert store.reclaim() == 0
        assert outbox.sequence() == 0


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
    # It might be one that the application uses.
    (connection,) = made
    assert not connection.closed
    connection.close()


def test_a_listener_is_given_something_to_keep_what_it_knows_in(txnstore_postgresql_url):
    """As the pool's records of connections have it; there is no such record here."""
    engine = create_engine(engine_url(txnstore_postgresql_url), poolclass=NullPool)

    @event.listens_for(engine, "do_connect")
    def fetch(_dialect, record, _arguments, options):
        record.info["name"] = options["application_name"] = "noted"

    with Outbox(engine, sequencer=False) as outbox:
        assert sends_a_record(outbox, engine, txnstore_postgresql_url)


def test_a_listener_that_awaits_is_refused_with_what_to_do(txnstore_postgresql_url):
    pytest.importorskip("greenlet")
    import asyncio

    from sqlalchemy.ext.asyncio import create_async_engine
    from sqlalchemy.util import await_only

    engine = create_async_engine(engine_url(txnstore_postgresql_url))

    @event.listens_for(engine.sync_engine, "do_connect")
    def fetch(*_):
        await_only(asyncio.sleep(0))

    with (
        Outbox(engine, sequencer=False) as outbox,
        pytest.raises(KafkaException, match=r"awaits.*from the database") as told,
    ):
        outbox.open()
    assert told.value.args[0].code() == KafkaError._INVALID_ARG


@pytest.mark.parametrize("way", ["creator", "pool"])
def test_a_creator_is_refused_with_what_to_do(txnstore_postgresql_url, way):
    def creator():
        raise AssertionError("it is not to be called")

    ways = {"creator": creator} if way == "creator" else {"pool": QueuePool(creator)}
    engine = create_engine(engine_url(txnstore_postgresql_url), **ways)
    with pytest.raises(KafkaException, match="by a do_connect listener of the engine") as told:
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
        ({"ssl": False}, {"sslmode": "disable"}),
        ({"dsn": "application_name=shop sslmode=require"}, {"application_name": "shop", "sslmode": "require"}),
        ({"host": ["a", "b"], "port": [1, None]}, {"host": "a,b", "port": "1,"}),
        ({"port": ""}, {"port": ""}),
    ],
    ids=["of no meaning", "other names", "protection", "no protection", "one text", "hosts", "no port"],
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


def test_several_ports_of_one_host_are_refused_as_such():
    url = f"postgresql+pg8000://me:{SECRET}@h/shop"
    engine = create_engine(url, module=NO_DRIVER, connect_args={"port": "5432,5433"})
    with pytest.raises(KafkaException, match="hosts and ports") as told:
        Outbox(engine)
    assert SECRET not in str(told.value)


def test_every_option_that_holds_a_secret_stays_out_of_the_url():
    names = sorted(secret_option_names() & {option.keyword.decode() for option in Conninfo.get_defaults()})
    secrets = {name: f"{SECRET}-{name}" for name in names if name != "password"}
    engine = create_engine("postgresql+psycopg://me@h/shop", connect_args={"password": SECRET, **secrets})
    outbox = Outbox(engine, sequencer=False)
    assert SECRET not in outbox._configuration["bootstrap.servers"]
    given = outbox._current_options()
    assert secrets.items() <= given.items()


def test_where_sqlalchemy_keeps_elsewhere_what_an_engine_gives_its_driver_that_is_said(monkeypatch):
    """A produce asks only for the database's name, and has that of the engine's URL."""
    engine = create_engine(f"postgresql+pg8000://me:{SECRET}@h/shop", module=NO_DRIVER)
    kept = SimpleNamespace(nonlocals={"arguments": ["x"]})
    monkeypatch.setattr("txnstore.db.callers.engines.inspect.getclosurevars", lambda _: kept)
    with pytest.raises(KafkaException, match="version of SQLAlchemy does not show") as told:
        Outbox(engine)
    assert told.value.args[0].code() == KafkaError._INVALID_ARG
    assert database_of_engine(engine) == "shop"


# --- SQLite -----------------------------------------------------------------------------------------------------------


def test_an_sqlite_engine_on_a_shared_connection_is_refused_and_that_is_left_alone(tmp_path):
    """What is open on it belongs to the application, which goes on."""
    shared = sqlite3.connect(tmp_path / "shop.db", check_same_thread=False)
    shared.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    shared.execute("INSERT INTO orders DEFAULT VALUES")
    creating = create_engine("sqlite://", creator=lambda: shared, poolclass=StaticPool)
    listening = create_engine("sqlite:///elsewhere.db", poolclass=StaticPool)
    event.listen(listening, "do_connect", lambda *_: shared)
    for engine in (creating, listening):
        with pytest.raises(KafkaException, match="from the file's URL, sqlite:////path") as told:
            Outbox(engine)
        assert told.value.args[0].code() == KafkaError._INVALID_ARG
    assert shared.in_transaction
    assert shared.execute("SELECT count(*) FROM orders").fetchone() == (1,)
    shared.close()


def test_a_listener_may_say_which_file_it_is(tmp_path):
    path = tmp_path / "shop.db"
    engine = create_engine("sqlite:///elsewhere.db", poolclass=NullPool)

    @event.listens_for(engine, "do_connect")
    def say(_dialect, record, arguments, _options):
        record.info["said"] = True
        arguments[0] = path

    with Outbox(engine, sequencer=False) as outbox:
        assert sends_a_record(outbox, engine, f"sqlite:///{path}")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("form", ["file:{}", "file://{}", "file://localhost{}"])
def test_an_sqlite_uri_is_where_it_leads(tmp_path, form):
    path = tmp_path / "the shop's.db"
    uri = form.format(str(path).replace(" ", "%20"))
    engine = create_engine(
        make_url("sqlite://").set(database=uri, query={"mode": "rwc", "uri": "true", "timeout": "3"})
    )
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
        ("sqlite:///file:/named?vfs=memdb&uri=true", {}),
    ],
)
def test_an_sqlite_engine_in_memory_is_refused(url, further):
    engine = create_engine(url, **further)
    with pytest.raises(KafkaException, match="is in memory") as told:
        Outbox(engine)
    assert told.value.args[0].code() == KafkaError._INVALID_ARG
    engine.dispose()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite://:memory:"])
@pytest.mark.parametrize("form", [lambda url: url, lambda url: {"bootstrap.servers": url}], ids=["url", "settings"])
def test_a_url_of_a_database_in_memory_is_refused_in_the_same_words(url, form):
    """Each connection would have one of its own there, the caller's too."""
    with pytest.raises(KafkaException, match="is in memory") as told:
        Outbox(form(url))
    assert told.value.args[0].code() == KafkaError._INVALID_ARG


def test_nothing_is_opened_to_know_where_a_relative_path_leads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outbox = Outbox(create_engine("sqlite:///shop.db"), sequencer=False)
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path / "shop.db") in repr(outbox)


@pytest.mark.slow_but_first
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


def test_an_async_sqlite_engine_with_a_way_of_its_own_is_refused_and_its_uri_is_understood(tmp_path):
    pytest.importorskip("greenlet")
    aiosqlite = pytest.importorskip("aiosqlite")
    from sqlalchemy.ext.asyncio import create_async_engine

    path = tmp_path / "shop.db"
    with pytest.raises(KafkaException, match="from the file's URL"):
        Outbox(create_async_engine("sqlite+aiosqlite://", async_creator=lambda: aiosqlite.connect(path)))
    assert str(path) in repr(Outbox(create_async_engine(f"sqlite+aiosqlite:///file:{path}?uri=true"), sequencer=False))
