"""Producers, connections and a table of the application's, for tests of connections that a producer enlists."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from sqlalchemy import text

from tests.clients.callers import KINDS, calling, ledger_of, make_ledger, open_driver
from tests.clients.steps import PATIENCE_SECONDS, create_topic, read_to_end, values
from txnstore import Producer
from txnstore.db.opening import open_store

numbers = itertools.count(1)


@pytest.fixture(scope="module")
def url(module_url):
    """One store of each database for all tests: they keep to topics, ids and entries of their own."""
    open_store(module_url).close()
    make_ledger(module_url)
    with contextlib.closing(open_driver(module_url)) as driver:
        driver.execute("CREATE UNIQUE INDEX ledger_of_one ON ledger (entry)")
        driver.commit()
    return module_url


@pytest.fixture
def make_producer(url):
    """Make transactional producers, ready to begin; they are closed after the test."""
    made = []

    def make(transactional_id=None, **configuration):
        settings = {key.replace("_", "."): value for key, value in configuration.items()}
        transactional_id = transactional_id or f"producer-{next(numbers)}"
        producer = Producer({"bootstrap.servers": url, "transactional.id": transactional_id, **settings})
        made.append(producer)
        producer.init_transactions(PATIENCE_SECONDS)
        return producer

    yield make
    for producer in made:
        producer.close()


@pytest.fixture
def producer(make_producer):
    return make_producer()


@pytest.fixture
def topic(url):
    return create_topic(url, f"topic-{next(numbers)}")


@pytest.fixture
def entry():
    return f"entry-{next(numbers)}"


@pytest.fixture
def caller(url):
    with calling(url, "core") as caller:
        yield caller


@pytest.fixture(params=KINDS)
def any_caller(url, request):
    with calling(url, request.param) as caller:
        yield caller


def committed_values(url, topic):
    return values(read_to_end(url, topic))


def is_there(url, entry):
    return entry in ledger_of(url)


def rows_of(caller, statement):
    given = caller.given
    if caller.kind.endswith("driver"):
        return given.execute(statement).fetchall()
    return given.execute(text(statement)).all()
