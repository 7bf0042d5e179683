"""A shop with roles: tables of the superuser, topics, transactions, and every role with its rights."""

from __future__ import annotations

import itertools
import os

import pytest

from tests.db.roles.shop import Shop

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def shop(txnstore_postgres_server):
    """One for the tests of a file, none of which changes what is there for others."""
    name = f"txnstore_shop_{os.getpid()}_{next(_NUMBERS)}"
    txnstore_postgres_server.create_database(name)
    shop = Shop(txnstore_postgres_server, name)
    try:
        shop.furnish()
        yield shop
    finally:
        shop.close()


@pytest.fixture
def bare(txnstore_postgres_server):
    """Another one for one test, with the roles and nothing granted."""
    name = f"txnstore_shop_{os.getpid()}_{next(_NUMBERS)}"
    txnstore_postgres_server.create_database(name)
    shop = Shop(txnstore_postgres_server, name)
    try:
        yield shop
    finally:
        shop.close()
