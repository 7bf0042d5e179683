"""The stores that a Python process of Spark has open, the addresses that travel to it, and tries of what it asks them.

Spark starts many Python processes and uses each for many tasks.  What travels to them is an address; a connection is
opened where it is used, never before a fork, and used again by the next task of the process: one store for each
address, kept as long as the process.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from sqlalchemy.engine import make_url

from txnstore.backoff import Backoff
from txnstore.clients.configuration.configuration import admin_configuration
from txnstore.clients.model.errors import KafkaException
from txnstore.db.backend import Limits
from txnstore.db.cluster.membership import read_databases, split_urls
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.opening import open_store
from txnstore.db.store import ONLY_DATABASE_ID, Store
from txnstore.db.url import parse_url
from txnstore.errors import InvalidConfiguration, OutcomeUnknown
from txnstore.log.topics import Topic
from txnstore.spark.worker_process import spare_what_is_loaded

_SEVERAL: Final = (
    "Spark reads and writes a log in one database; one that is spread over several is read with Consumer and written"
    " with Producer"
)
#: A process of Spark runs one task at a time.
_POOL_SIZE: Final = 2
_lock: Final = threading.Lock()
Result = TypeVar("Result")
#: Between two tries of a step whose outcome is not known.
_PAUSE_FIRST_SECONDS: Final = 0.1
_PAUSE_LAST_SECONDS: Final = 0.5
_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where a store is; picklable, and no text made of it shows a password."""

    url: str = field(repr=False)
    schema: str = DEFAULT_SCHEMA

    def __str__(self) -> str:
        """Return the URL without its password."""
        return str(parse_url(self.url))


_stores: Final[dict[tuple[int, StoreAddress], Store]] = {}


def store_address(values: Mapping[str, str]) -> StoreAddress:
    """Return the address that the options name (see `options.read_options`).

    A relative path of an SQLite file is taken from the driver's folder, also by executors.

    Raises:
        InvalidConfiguration: there is no URL, it cannot be understood, or other processes could not open it.
    """
    text = values.get("url")
    if text is None:
        raise InvalidConfiguration(
            "no database is named: the option url (or kafka.bootstrap.servers) takes its URL, for example"
            " sqlite:////path/to/file.db or postgresql://user@host/database"
        )
    if len(split_urls(text)) > 1:
        raise InvalidConfiguration(f"url names several databases: {_SEVERAL}")
    schema = values.get("txnstore.schema", DEFAULT_SCHEMA)
    try:
        url = admin_configuration(({"bootstrap.servers": text, "txnstore.schema": schema},), {}).url
    except KafkaException as error:
        message = error.args[0].str().replace("bootstrap.servers", "url (or kafka.bootstrap.servers)")
        # What led to it may hold the password: it is not chained.
        raise InvalidConfiguration(message) from None
    if url.kind == "sqlite":
        if url.is_in_memory:
            raise InvalidConfiguration("url names a database in memory, which Spark's other processes cannot open")
        if "password" in values:
            raise InvalidConfiguration("password is for a database server; an SQLite file has none")
        return StoreAddress(f"sqlite:///{os.path.abspath(str(url.url.database))}", schema)  # noqa: PTH100 - `..` stays
    if "password" in values:
        password = values["password"]
        named = make_url(text).difference_update_query(["password"])
        # Without a user before the host, SQLAlchemy would leave the password out there.
        if named.username is None:
            named = named.update_query_dict({"password": password})
        text = named.set(password=password).render_as_string(hide_password=False)
    return StoreAddress(text, schema)


def store_at(address: StoreAddress, *, create: bool = False, retry_timeout_ms: int | None = None) -> Store:
    """Return the store at the address, open in this process; with `create`, an empty database gets its tables.

    To open it is tried for `retry_timeout_ms`.

    Raises:
        TxnStoreError: there is no store, or it cannot be reached.
    """
    key = (os.getpid(), address)
    with _lock:
        store = _stores.get(key)
        if store is None:
            # A reader with a typing error in its URL is told so; it does not make an empty store.
            limits = _LIMITS if retry_timeout_ms is None else replace(_LIMITS, retry_timeout_ms=retry_timeout_ms)
            store = open_store(address.url, schema=address.schema, pool_size=_POOL_SIZE, create=create, limits=limits)
            try:
                _refuse_several(store)
                # Others of the process take it for what they do.
                store.limits = _LIMITS
            except BaseException:
                store.close()
                raise
            _stores[key] = store
            spare_what_is_loaded()
        return store


def repeat_while_unknown(step: Callable[[int], Result], timeout_ms: int) -> Result:
    """Return what `step` returns, repeated while its outcome is not known; it recognises what it has done.

    It is given how many milliseconds it may try the database.

    Raises:
        OutcomeUnknown: it was still not known after `timeout_ms`.
        TxnStoreError: what else the step raises.
    """
    deadline = time.monotonic() + timeout_ms / 1000
    backoff = Backoff(_PAUSE_FIRST_SECONDS, _PAUSE_LAST_SECONDS)
    while True:
        left_ms = max(0, int((deadline - time.monotonic()) * 1000))
        try:
            return step(left_ms)
        except OutcomeUnknown:
            pause_seconds = backoff.back_off()
            if time.monotonic() + pause_seconds >= deadline:
                raise
        time.sleep(pause_seconds)


def check_are_here(topics: Iterable[Topic]) -> None:
    """Refuse a topic that is not all in this database: since it was opened another one has joined it.

    Raises:
        InvalidConfiguration: it is not.
    """
    for topic in topics:
        elsewhere = [number for number, leader in enumerate(topic.leaders) if leader != ONLY_DATABASE_ID]
        if elsewhere:
            raise InvalidConfiguration(
                f"{topic.name}-{elsewhere[0]} is in another database, which has joined this one since the query began:"
                f" {_SEVERAL}"
            )


def check_store_uuid(store: Store, store_uuid: str, what: str) -> None:
    """Refuse a store that is not the one of this identity, which `what` was done with.

    Raises:
        InvalidConfiguration: it is not.
    """
    if store.store_uuid != store_uuid:
        raise InvalidConfiguration(
            f"{what} in another store than the one that {store.url} leads to here. An SQLite file serves one host: on"
            " others its path leads to other files, so a cluster takes PostgreSQL; or was the file replaced meanwhile?"
        )


def _refuse_several(store: Store) -> None:
    """Refuse a store that is one of several databases."""
    if len(store.read(read_databases)) > 1:
        raise InvalidConfiguration(f"{store.url} is one of several databases: {_SEVERAL}")
