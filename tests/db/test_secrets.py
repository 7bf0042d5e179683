"""The password is in no text: no error, no repr, no log, however the connection fails."""

from __future__ import annotations

import logging
import pickle
import traceback

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from txnstore.db.backend import Limits
from txnstore.db.opening import connect_store, open_store
from txnstore.errors import InvalidUrl, PermissionDenied, StoreUnavailable, TxnStoreError

SECRET = "Hunter2SecretWord"
#: As it might stand in a text that quotes, encodes or cuts it.
FORMS = (SECRET, SECRET[:8], SECRET.encode().hex())
QUICKLY = Limits(retry_timeout_ms=300)


@pytest.fixture
def url(new_database, new_role, granted, txnstore_postgres_server):
    """The URL of an empty database for a role whose password is the secret."""
    name, role = new_database(), new_role()
    granted(name, role, f"ALTER ROLE {{role}} PASSWORD '{SECRET}'", f"GRANT CREATE ON DATABASE {name} TO {{role}}")
    return make_url(txnstore_postgres_server.url(name, role, SECRET))


@pytest.fixture
def told(caplog):
    """Everything that was told of an error, and logged at the most talkative level."""
    loggers = [logging.getLogger(name) for name in (None, "txnstore", "sqlalchemy", "psycopg", "alembic")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.DEBUG)
    # SQLAlchemy's engines ask their loggers once.
    for name in ("sqlalchemy.engine", "sqlalchemy.pool"):
        caplog.set_level(logging.DEBUG, logger=name)

    def tell(*things):
        texts = [caplog.text]
        for thing in things:
            texts += [repr(thing), str(thing)]
            if isinstance(thing, BaseException):
                texts += traceback.format_exception(thing)
                texts += all_behind(thing)
        return "\n".join(texts)

    yield tell
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def all_behind(error):
    """The texts of every error that this one came from, also of those that `from None` hides."""
    seen, waiting = [], [error]
    while waiting:
        one = waiting.pop()
        if one is None or one in seen:
            continue
        seen.append(one)
        waiting += [one.__cause__, one.__context__, getattr(one, "orig", None)]
    return [text for one in seen for text in (repr(one), str(one), repr(one.args), *traceback.format_exception(one))]


def rendered(url):
    return url.render_as_string(hide_password=False)


def with_wrong_password(url):
    return url.set(password=SECRET + "x")


def with_wrong_port(url):
    # Nobody listens there.
    return url.set(port=1)


def with_wrong_host(url):
    return url.set(host="no-such-host.invalid")


def with_wrong_database(url):
    return url.set(database="no_such_database")


def with_wrong_user(url):
    return url.set(username="no_such_user")


def with_tls(url):
    return url.update_query_dict({"sslmode": "require"})


def with_wrong_socket(url):
    return url._replace(host=None, port=None).update_query_dict({"host": "/no/such/folder"})


def with_password_among_the_options(url):
    return url._replace(password=None).update_query_dict({"password": SECRET + "x"})


def with_two_hosts(url):
    hosts = ["127.0.0.1:1", f"{url.host}:{url.port}"]
    return url._replace(host=None, port=None, password=SECRET + "x").update_query_dict({"host": hosts})


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (with_wrong_password, PermissionDenied),
        (with_wrong_port, StoreUnavailable),
        (with_wrong_host, StoreUnavailable),
        (with_wrong_database, InvalidUrl),
        (with_wrong_user, PermissionDenied),
        (with_tls, InvalidUrl),
        (with_wrong_socket, StoreUnavailable),
        (with_password_among_the_options, PermissionDenied),
        (with_two_hosts, PermissionDenied),
    ],
)
def test_a_connection_that_fails_tells_no_password(spoil, kind, url, told, txnstore_postgres_server):
    if kind is InvalidUrl and spoil is with_tls:
        with txnstore_postgres_server.connect() as connection:
            if connection.execute("SHOW ssl").fetchone() == ("on",):
                pytest.skip("needs a server without TLS")
    with pytest.raises(kind) as caught:
        open_store(rendered(spoil(url)), limits=QUICKLY)
    text = told(caught.value)
    assert "\n" not in str(caught.value)
    assert [form for form in FORMS if form in text] == []


@pytest.mark.slow
def test_a_store_and_its_engine_tell_no_password(url, told):
    options = url.update_query_dict({"sslpassword": SECRET})
    with open_store(rendered(options)) as store:
        store.read(lambda connection: connection.execute(text("SELECT 1")))
        with store.engine.connect() as connection:
            things = [store, store.url, store.engine, store.engine.url, store.engine.pool, connection]
            things += [connection.connection, connection.connection.driver_connection, store.engine.pool.status()]
            shown = told(*things)
    assert [form for form in FORMS if form in shown] == []
    assert "SELECT 1" in shown, "nothing was logged: the test looks at nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement", ["SELECT 1/0", "SELECT * FROM no_such_table", "SELEKT", "SELECT :value ::text::integer"]
)
def test_a_statement_that_fails_tells_neither_the_password_nor_its_values(statement, url, told):
    parameters = {"value": "PrivatePayload"} if ":value" in statement else {}
    with open_store(rendered(url)) as store, pytest.raises(TxnStoreError) as caught:
        store.write(lambda connection: connection.execute(text(statement), parameters))
    assert "PrivatePayload" not in "".join(traceback.format_exception(caught.value))
    shown = told(caught.value)
    assert [form for form in FORMS if form in shown] == []


def test_an_error_can_be_sent_to_another_process(url):
    with pytest.raises(PermissionDenied) as caught:
        open_store(rendered(with_wrong_password(url)), limits=QUICKLY)
    sent = pickle.dumps(caught.value)
    assert SECRET.encode() not in sent
    assert isinstance(pickle.loads(sent), PermissionDenied)


@pytest.mark.slow
def test_waiting_and_announcing_tell_no_password_when_the_server_is_gone(url, told):
    with open_store(rendered(url)) as store:
        spoilt = connect_store(rendered(with_wrong_password(url)), limits=QUICKLY)
        spoilt.store_uuid = store.store_uuid
        spoilt.prepare_announcements()
        spoilt.announce()
        waiter = spoilt.waiter()
        assert isinstance(waiter.wait(10), bool)
        shown = told(waiter, spoilt, spoilt._announcer)
        waiter.close()
        spoilt.close()
    assert [form for form in FORMS if form in shown + told()] == []


def test_the_test_itself_would_notice(url, told):
    statement = f"SELECT '{SECRET}' FROM no_such_table"
    with (
        connect_store(rendered(url)) as store,
        store.engine.connect() as connection,
        pytest.raises(SQLAlchemyError) as caught,
    ):
        connection.exec_driver_sql(statement)
    assert SECRET in told(caught.value)
