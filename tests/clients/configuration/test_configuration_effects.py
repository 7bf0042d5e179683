"""Configurations: what follows from a key, callbacks, keys without an effect, and the database's URL."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tests.clients.configuration.configured import SECRET, TRANSACTIONAL, URL, consumer, producer, refusal_of
from tests.tools.log_records import records_of_this_thread
from txnstore import Producer
from txnstore.clients.configuration.configuration import (
    admin_configuration,
    producer_configuration,
)
from txnstore.clients.configuration.keys import KEYS, shown
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.db.cluster.membership import addresses_of, split_urls
from txnstore.testing.manual_clock import ManualClock


@pytest.mark.parametrize(
    ("settings", "idempotent"),
    [
        ({}, True),
        ({"acks": "all"}, True),
        ({"acks": 1}, False),
        ({"acks": 0}, False),
        ({"retries": 0}, False),
        ({"retries": 1}, True),
        ({"max.in.flight": 5}, True),
        ({"max.in.flight.requests.per.connection": 6}, False),
        ({"queuing.strategy": "lifo"}, False),
        ({"enable.idempotence": False}, False),
        ({"enable.idempotence": True}, True),
        ({"transactional.id": "x"}, True),
        ({"transactional.id": ""}, True),
        ({"transactional.id": "", "acks": 1}, False),
    ],
    ids=ascii,
)
def test_idempotence_is_on_unless_something_given_speaks_against_it(settings, idempotent):
    assert producer(**settings)["enable.idempotence"] is idempotent


def test_in_flight_requests_are_as_many_as_idempotence_allows():
    assert producer()["max.in.flight"] == 5
    assert producer(**{"max.in.flight": 2})["max.in.flight"] == 2
    assert producer(acks=1)["max.in.flight"] == 1_000_000


def test_a_message_waits_no_longer_than_its_transaction():
    assert producer(**TRANSACTIONAL)["message.timeout.ms"] == 60_000
    assert producer(**TRANSACTIONAL, **{"transaction.timeout.ms": 5000})["message.timeout.ms"] == 5000
    assert producer(**TRANSACTIONAL, **{"message.timeout.ms": 100})["message.timeout.ms"] == 100
    assert producer(**TRANSACTIONAL, **{"message.timeout.ms": 0})["message.timeout.ms"] == 0
    assert producer()["message.timeout.ms"] == 300_000


def test_a_message_lingers_shorter_than_it_may_wait():
    assert producer(**{"message.timeout.ms": 3})["linger.ms"] == 2.9
    assert producer(**{"message.timeout.ms": 0})["linger.ms"] == 5
    assert producer(**{"message.timeout.ms": 10})["linger.ms"] == 5


def test_a_message_lingers_shorter_than_the_transaction_that_bounds_its_wait(caplog):
    """Else it would be given up before it has been sent once."""
    assert producer(**TRANSACTIONAL, **{"transaction.timeout.ms": 1001, "linger.ms": 1000})["linger.ms"] == 1000
    assert not records_of_this_thread(caplog)
    with caplog.at_level(logging.WARNING):
        lingering = producer(**TRANSACTIONAL, **{"transaction.timeout.ms": 1000, "linger.ms": 1000})
    assert lingering["message.timeout.ms"] == 1000
    assert lingering["linger.ms"] == 500
    assert "records linger for 500 ms" in caplog.text
    assert producer(**TRANSACTIONAL, **{"linger.ms": 90_000})["linger.ms"] == 30_000
    # Of messages that wait for ever, and of none that belong to a transaction.
    assert producer(**TRANSACTIONAL, **{"message.timeout.ms": 0, "linger.ms": 90_000})["linger.ms"] == 90_000
    assert producer(**{"transaction.timeout.ms": 1000, "linger.ms": 1000})["linger.ms"] == 1000


def test_a_heartbeat_is_never_longer_than_the_session(caplog):
    assert consumer(**{"session.timeout.ms": 1000})["heartbeat.interval.ms"] == 333
    assert consumer(**{"session.timeout.ms": 1})["heartbeat.interval.ms"] == 1
    assert not records_of_this_thread(caplog)
    with caplog.at_level(logging.WARNING):
        assert consumer(**{"session.timeout.ms": 3000, "heartbeat.interval.ms": 3000})["heartbeat.interval.ms"] == 1000
    assert "heartbeats are sent every 1000 ms" in caplog.text
    assert consumer(**{"session.timeout.ms": 3001})["heartbeat.interval.ms"] == 3000


def test_a_fetch_holds_at_least_one_message_of_the_largest_size():
    assert consumer(**{"message.max.bytes": 100_000_000})["fetch.max.bytes"] == 100_000_000
    assert consumer(**{"message.max.bytes": 1000, "fetch.max.bytes": 1000})["fetch.max.bytes"] == 1000


def test_who_creates_topics():
    assert producer()["allow.auto.create.topics"] is True
    assert consumer()["allow.auto.create.topics"] is False
    assert admin_configuration(({"bootstrap.servers": URL},), {})["allow.auto.create.topics"] is False
    assert producer(**{"allow.auto.create.topics": "false"})["allow.auto.create.topics"] is False


# --- callbacks --------------------------------------------------------------------------------------------------------


def test_callbacks_are_kept_as_they_are():
    names = ("error_cb", "stats_cb", "throttle_cb", "oauth_cb")
    functions = {name: (lambda *_: None) for name in names}
    for make, own in ((producer, "on_delivery"), (consumer, "on_commit")):
        configuration = make(**functions, **{own: print})
        assert configuration[own] is print
        assert all(configuration[name] is functions[name] for name in names)


@pytest.mark.parametrize(
    ("name", "error"), [("error_cb", TypeError), ("stats_cb", TypeError), ("oauth_cb", TypeError),
                        ("throttle_cb", ValueError)],
    ids=ascii,
)  # fmt: skip
@pytest.mark.parametrize("value", [5, None, "print"], ids=ascii)
def test_what_cannot_be_called_is_no_callback(name, error, value):
    with pytest.raises(error, match=f"^expected {name} property as a callable function$"):
        producer(**{name: value})


def test_logger_and_clock_are_objects():
    logger, clock = logging.getLogger("mine"), ManualClock()
    configuration = producer(**{"logger": logger, "txnstore.clock": clock})
    assert configuration.logger is configuration["logger"] is logger
    assert configuration["txnstore.clock"] is clock
    assert producer(logger=None).logger is logging.getLogger("txnstore")
    with pytest.raises(TypeError, match=r"logger takes a logging\.Logger, not int"):
        producer(logger=5)
    with pytest.raises(TypeError, match=r"txnstore\.clock takes a txnstore\.clock\.Clock, not int"):
        producer(**{"txnstore.clock": 5})


# --- keys without an effect -------------------------------------------------------------------------------------------


def test_keys_of_brokers_are_accepted_dropped_and_logged_in_one_line(caplog):
    settings = {"socket.keepalive.enable": True, "ssl.ca.location": "/ca.pem", "sasl.password": SECRET,
                "api.version.request": "true", "sasl.mechanisms": "PLAIN", "client.rack": "a"}  # fmt: skip
    with caplog.at_level(logging.DEBUG):
        configuration = producer(**settings)
    (record,) = records_of_this_thread(caplog)
    assert record.levelno == logging.DEBUG
    assert record.getMessage().endswith(
        ": api.version.request, client.rack, sasl.mechanism, sasl.password, socket.keepalive.enable, ssl.ca.location"
    )
    with pytest.raises(KeyError):
        configuration["sasl.password"]


@pytest.mark.parametrize(
    ("make", "name", "value", "text"),
    [
        (producer, "group.id", "g", "group.id is a consumer property and is ignored by this producer"),
        (consumer, "transactional.id", "t", "transactional.id is a producer property and is ignored by this consumer"),
    ],
)
def test_a_key_of_the_other_client_is_accepted_with_a_warning(make, name, value, text, caplog):
    make(**{name: value})
    (record,) = [record for record in records_of_this_thread(caplog) if record.levelno == logging.WARNING]
    assert text in record.getMessage()


def test_the_users_logger_gets_what_there_is_to_log(caplog):
    logger = logging.getLogger("the.users")
    producer(**{"logger": logger, "group.id": "g"})
    assert [record.name for record in records_of_this_thread(caplog)] == ["the.users"]


def test_an_admin_client_takes_keys_of_both(caplog):
    settings = {"bootstrap.servers": URL, "group.id": "g", "linger.ms": 3}
    assert admin_configuration((settings,), {})["linger.ms"] == 3
    assert not records_of_this_thread(caplog)


# --- the database's URL -----------------------------------------------------------------------------------------------


def test_the_database_has_three_names_for_its_url():
    for name in ("bootstrap.servers", "metadata.broker.list", "database.url"):
        configuration = producer_configuration(({name: URL},), {})
        assert configuration["bootstrap.servers"] == f"sqlite:///{Path('log.db').absolute()}"
        assert configuration.url.kind == "sqlite"


NAMES_IN_URLS = {"log.db": "log.db", "a b.db": "a b.db", "50%25.db": "50%.db", "50%2525.db": "50%25.db"}


@pytest.mark.parametrize(("written", "name"), NAMES_IN_URLS.items(), ids=NAMES_IN_URLS)
def test_a_relative_path_is_one_in_the_folder_of_the_moment(tmp_path, monkeypatch, written, name):
    """A client opens its database when it first needs it; a server may have gone to the folder / by then."""
    monkeypatch.chdir(tmp_path)
    configuration = producer_configuration(({"bootstrap.servers": f"sqlite:///{written}"},), {})
    cluster = producer_configuration(({"bootstrap.servers": f"sqlite:////x/1.db, sqlite:///{written}"},), {})
    monkeypatch.chdir("/")
    assert configuration.url.url.database == str(tmp_path / name)
    (address,) = addresses_of(split_urls(configuration["bootstrap.servers"]))
    assert (address.url, address.label) == (configuration.url, name)
    first, second = addresses_of(split_urls(cluster["bootstrap.servers"]))
    assert (first.text, second.url) == ("sqlite:////x/1.db", configuration.url)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("folder", [b"caf\xe9", b"line\nbreak", b"a?b=c%41@d, x:"], ids=ascii)
def test_a_relative_path_leads_to_its_file_in_a_folder_whatever_that_is_called(tmp_path, monkeypatch, folder):
    """Also where the folder's own name can stand in no URL."""
    path = tmp_path / os.fsdecode(folder)
    path.mkdir()
    monkeypatch.chdir(path)
    with Producer({"bootstrap.servers": "sqlite:///log.db"}) as producer:
        producer.produce("t", b"1")
        assert producer.flush(60.0) == 0
    assert (path / "log.db").exists()


def test_a_relative_path_in_a_folder_that_is_gone_is_refused(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        with pytest.raises(KafkaException, match="the current folder is not there any more"):
            producer_configuration(({"bootstrap.servers": URL},), {})
        assert producer_configuration(({"bootstrap.servers": "sqlite:////x/log.db"},), {}).url.kind == "sqlite"
    finally:
        # Where it would go back to, monkeypatch asks for where it is.
        os.chdir(tmp_path)


@pytest.mark.parametrize("text", ["sqlite://", "sqlite://:memory:", "sqlite:///:memory:"], ids=ascii)
def test_a_store_in_memory_has_three_spellings(text):
    configuration = producer_configuration(({"bootstrap.servers": text},), {})
    assert configuration["bootstrap.servers"] == "sqlite://"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "bootstrap.servers is not set"),
        ("", "bootstrap.servers is not set"),
        ("localhost:9092", "not the address of a Kafka broker"),
        ("one:9092,two:9092", "not the address of a Kafka broker"),
        (5, "not the address of a Kafka broker"),
        ("postgresql://u:p@h/a, postgresql://u:p@h/a", "two URLs of the list are the same"),
        ("postgresql://u:p@h/a,postgresql://h", "URL 2 of the list: the PostgreSQL URL names no database"),
        ("sqlite:///a.db,sqlite://", "cannot be one of several"),
        ("sqlite:///", "bootstrap.servers: the SQLite URL names no file"),
        (" sqlite:/// ", "bootstrap.servers: the SQLite URL names no file"),
        ("sqlite:///?x", "takes no options|names no file"),
        ("sqlite:///a.db,sqlite:///", "URL 2 of the list: the SQLite URL names no file"),
        ("mysql://u:p@h/d", "no support for this kind of database"),
        ("sqlite://relative.db", "three slashes"),
    ],
    ids=ascii,
)
def test_a_url_that_names_no_database_is_refused(text, expected):
    with pytest.raises(KafkaException, match=expected) as raised:
        producer_configuration(({"bootstrap.servers": text},), {})
    assert raised.value.args[0].code() == KafkaError._INVALID_ARG


def test_no_url_at_all_is_refused_and_the_text_has_an_example():
    for make in (producer_configuration, admin_configuration):
        with pytest.raises(KafkaException, match=r"bootstrap\.servers is not set.*sqlite:///path/to/file\.db"):
            make(({},), {})


@pytest.mark.parametrize("schema", ["pg_catalog", 'public"; DROP', "1x", "x" * 64, "a.b"], ids=ascii)
def test_a_schema_that_cannot_be_one_is_refused(schema):
    assert "schema" in refusal_of(producer, {"txnstore.schema": schema})
    assert producer(**{"txnstore.schema": "mine"})["txnstore.schema"] == "mine"


MALFORMED_URLS = [
    f"postgresql:/u:{SECRET}@h/d", f"postgresql//u:{SECRET}@h/d", f"postgresql://u:{SECRET}@h",
    f"postgresql://u:{SECRET}@h:99999/d", f"postgresql://u:{SECRET}@h:port/d", f"postgresql://u:{SECRET}@@h/d",
    f"postgresql://u:{SECRET}@h/d?nonsense=1", f"postgresql://u:{SECRET}@h//d", f"postgresql://u:{SECRET}\0@h/d",
    f"postgresql://u:{SECRET}%00@h/d", f"postgresql://u:{SECRET}\n@h/d", f"postgres:///{SECRET}@h/d",
    f"mysql://u:{SECRET}@h/d", f"sqlite://u:{SECRET}@h/d", f"sqlite:///x?password={SECRET}", SECRET,
    f"postgresql://u:{SECRET}@h/d,postgresql://u:{SECRET}@h/d", f"sqlite:///d,u://{SECRET}@h/d",
    f"host=h password={SECRET}", f"u:{SECRET}@h",
    f"postgresql://u:p@h/d?password={SECRET}&password={SECRET}", f"postgresql://u:p@h/d?password={SECRET}",
    f"postgresql+asyncpg://u:{SECRET}@h/d", f"postgresql://u:{SECRET}@[::1/d", f"{SECRET}://h/d",
]  # fmt: skip


@pytest.mark.parametrize("text", MALFORMED_URLS, ids=ascii)
def test_no_malformed_url_shows_its_password(text):
    with pytest.raises(KafkaException) as raised:
        producer_configuration(({"bootstrap.servers": text},), {})
    error: BaseException | None = raised.value
    assert error is not None
    assert error.__cause__ is None
    assert error.__suppress_context__
    assert SECRET not in f"{error}{error!r}{error.args}"


def test_no_text_of_a_configuration_shows_a_secret(caplog):
    secrets = {key.name: SECRET for key in KEYS.values() if key.secret and "ssl_key" not in key.name}
    secrets["bootstrap.servers"] = f"postgresql://user:{SECRET}@host/database?sslpassword={SECRET}"
    assert {"sasl.password", "ssl.key.password", "ssl.keystore.password", "ssl.key.pem"} <= secrets.keys()
    with caplog.at_level(logging.DEBUG):
        configuration = producer_configuration((secrets,), {"linger.ms": 3})
    assert SECRET not in f"{configuration}{configuration!r}{configuration.url}{caplog.text}"
    assert "linger.ms" in repr(configuration)
    with pytest.raises(KafkaException) as raised:
        producer_configuration((secrets,), {"linger.ms": SECRET})
    assert SECRET not in str(raised.value)


def test_what_a_message_repeats_is_short_and_on_one_line():
    text = refusal_of(producer, {"security.protocol": "x\n\x1b[31m" + "y" * 500})
    assert text.isprintable()
    assert len(text) < 200
    assert refusal_of(producer, {"a\nb" + "c" * 500: 1}).isprintable()
    assert shown("%s {} \u202e") == "%s {} \\u202e"
