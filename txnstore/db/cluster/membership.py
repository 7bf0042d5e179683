"""The databases of a cluster, as its tables and the list of a client name them, and which of them coordinates what.

The controller's table is the truth; each member has a copy.  Transactional ids and groups live where the hash of
their name selects one of the databases that coordinate.  These are fixed once, when the second database comes, and
only if nothing is coordinated yet: later ones hold partitions, because no name may ever move.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from sqlalchemy import Connection, bindparam, delete, exists, insert, select, update

from txnstore.db.ddl import Int64
from txnstore.db.identity import going_back
from txnstore.db.schema import databases, groups, stores, topics, transactions
from txnstore.db.statements import HotStatement
from txnstore.db.store import Store
from txnstore.db.url import DatabaseUrl, at_its_place, parse_url
from txnstore.errors import InvalidUrl, NotCoordinator, StoreUnavailable, TxnStoreError, WrongCluster

#: The first database of every cluster; it keeps topics and settings.
CONTROLLER_ID: Final = 1
#: Of a database that a controller has laid claim to and not yet registered.
CLAIMED_ID: Final = 0
#: What a database alone is called; a cluster of several has the address instead.
ALONE_LABEL: Final = "main"
#: Each database gives out producer ids of a range of its own: all are unique in the cluster, and tell who gave them.
PRODUCER_ID_BITS: Final = 40
#: A change's number is above the one before by this much at least, and at random up to twice as much: a controller that
#: has lost changes comes to no number that somebody has from before.  What a database alone has made is below them all.
STEP_MIN: Final = 1 << 32

# A URL may contain commas (several hosts, a file's name): the list is cut only where a scheme follows.
_BETWEEN: Final = re.compile(r",\s*(?=[A-Za-z][A-Za-z0-9+]*://)")

_POSTGRESQL_PORT: Final = 5432
_NOT_CONTROLLER: Final = "only the controller registers databases; it is the first of the list"

_READ: Final = HotStatement(
    select(databases, select(stores.c.store_uuid).scalar_subquery().label("own_uuid")).order_by(databases.c.database_id)
)
# Registration and topics, and the first transactional ids and groups, wait for each other here: FOR KEY SHARE lets new
# producer ids through, which only update the row.
_LOCK: Final = select(stores.c.store_uuid).with_for_update()
_SHARE: Final = select(stores.c.store_uuid).with_for_update(read=True, key_share=True)
_TOUCH: Final = (
    update(databases)
    .where(databases.c.database_id == CONTROLLER_ID)
    .values(catalogue_version=databases.c.catalogue_version + bindparam("step", type_=Int64))
    .returning(databases.c.catalogue_version)
)
_IS_USED: Final = select(
    exists(select(topics.c.topic_id)).label("has_topics"),
    (exists(select(transactions.c.transactional_id)) | exists(select(groups.c.group_id))).label("coordinates"),
)


@dataclass(frozen=True, slots=True)
class Database:
    """One database of a cluster."""

    database_id: int
    label: str
    store_uuid: str
    coordinates: bool
    """Whether transactional ids and groups live in it."""

    catalogue_version: int = 0
    is_own: bool = False
    """Whether it is the one that was asked."""


def read_databases(connection: Connection) -> list[Database]:
    """Return the databases of the cluster that this one is in, by number."""
    return [
        Database(
            row.database_id,
            row.label,
            row.store_uuid,
            row.coordinates,
            row.catalogue_version,
            row.store_uuid == row.own_uuid,
        )
        for row in _READ.rows(connection)
    ]


def read_from_controller(
    controller: Store, known: Mapping[int, Database], *, retry_timeout_ms: int | None = None
) -> dict[int, Database]:
    """Return the databases of the cluster, by number, as the first database of the list knows them.

    `known` are those that it knew before: members are never removed.

    Raises:
        WrongCluster: that is not the controller.
        StoreCopied: one that was known is missing: the controller is an older state of itself.
        TxnStoreError: it cannot be reached.
    """
    found = controller.read(read_databases, retry_timeout_ms=retry_timeout_ms)
    own = next((member for member in found if member.is_own), None)
    if own is None:
        raise WrongCluster(
            f"the table databases in {controller.url} has no row for the store {controller.store_uuid} itself: somebody"
            " else has changed it"
        )
    if own.database_id != CONTROLLER_ID:
        other = next((member.label for member in found if member.database_id == CONTROLLER_ID), "")
        joining = "; it was about to join" if own.database_id == CLAIMED_ID else ""
        raise WrongCluster(
            f"the first database of the list is {own.label!r}, a member of the cluster whose controller is"
            f" {other!r}{joining}: the controller comes first"
        )
    members = {member.database_id: member for member in found}
    lost = [member.label for database_id, member in known.items() if database_id not in members]
    if lost:
        is_standby = controller.read(controller.backend.is_standby)
        raise going_back(controller, f"the database {lost[0]!r} was in its cluster", is_standby=is_standby)
    return members


def coordinator_of_name(name: str, members: Iterable[Database]) -> int:
    """Return the database that coordinates the transactional id or group of this name."""
    numbers = sorted(member.database_id for member in members if member.coordinates)
    return numbers[hash_of_name(name) % len(numbers)]


def coordinator_of_producer(producer_id: int) -> int:
    """Return the database that gave out the producer id: it coordinates the transactions of its producer."""
    return (producer_id >> PRODUCER_ID_BITS) + 1


def hash_of_name(name: str) -> int:
    """Return a number that is the same for the name in every process, for ever."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def check_lives_here(connection: Connection, name: str, *, is_locked: bool = False) -> None:
    """Refuse a new transactional id or group that another database coordinates, whatever the client believes.

    With `is_locked` the caller has changed the row of `stores` already, and so waits for nobody else here.

    Raises:
        NotCoordinator: it is; the client does not know of a database that the cluster has by now.
    """
    if not is_locked:
        connection.execute(_SHARE)
    members = read_databases(connection)
    if len(members) == 1:
        return
    coordinator_id = coordinator_of_name(name, members)
    if not any(member.is_own and member.database_id == coordinator_id for member in members):
        label = next(member.label for member in members if member.database_id == coordinator_id)
        raise NotCoordinator(
            f"{name[:80]!r} lives in the database {label!r}, which has joined the cluster in the meantime; nothing"
            " was changed: repeat the call"
        )


@dataclass(slots=True, eq=False)
class Address:
    """One URL of the list."""

    text: str
    url: DatabaseUrl
    label: str
    database_id: int | None = None
    """The member that it leads to; None: nobody has looked."""

    def __repr__(self) -> str:
        """Return the label: the text may hold a password."""
        return f"Address({self.label!r})"

    def lasting(self) -> Address:
        """Return the same for whoever opens it later: by then the process may have changed its folder.

        Raises:
            InvalidUrl: the path of the SQLite file is relative to a folder that is not there any more.
        """
        url = at_its_place(self.url)
        return self if url is self.url else Address(url.url.render_as_string(), url, self.label)

    def open(self, open_: Callable[[str, bool], Store], *, create: bool) -> Store:
        """Open the database at it, whatever it is.

        Raises:
            TxnStoreError: it cannot be reached or refuses; the text has its label, and nothing else of its URL.
        """
        try:
            return open_(self.text, create)
        except StoreUnavailable:
            raise StoreUnavailable(f"the database {self.label!r} cannot be reached; nothing was changed") from None
        except TxnStoreError as error:
            told = str(error).replace(str(self.url), repr(self.label))
            raise type(error)(f"the database {self.label!r}: {told}") from None


def split_urls(text: str) -> list[str]:
    """Return the URLs of a comma-separated list; a comma within a URL parts nothing."""
    return [url.strip() for url in _BETWEEN.split(text)]


def addresses_of(urls: Iterable[str]) -> list[Address]:
    """Return the URLs with their labels.

    Raises:
        InvalidUrl: one cannot be understood, or there is none.
        WrongCluster: two are the same.
    """
    addresses: list[Address] = []
    for number, text in enumerate(urls, 1):
        try:
            url = parse_url(text)
        except InvalidUrl as error:
            raise (error if number == 1 else InvalidUrl(f"URL {number} of the list: {error}")) from None
        label = label_of_address(url)
        if any(other.url.url == url.url for other in addresses):
            raise WrongCluster(f"two URLs of the list are the same: that of the database {label!r}")
        addresses.append(Address(text, url, label))
    if not addresses:
        raise InvalidUrl("the list of database URLs is empty")
    return addresses


def label_of_address(url: DatabaseUrl) -> str:
    """Return what a database is called unless another one has that name: host:port/name, or the name of the file."""
    if url.kind == "sqlite":
        return (url.url.database or ":memory:").rstrip("/").rpartition("/")[2]
    host = url.url.host or url.option("host") or "localhost"
    port = url.url.port or url.option("port") or _POSTGRESQL_PORT
    if host.startswith(("/", "@")):
        host = "localhost"
    return f"{host}:{port}/{url.url.database}"


def unused_label(wanted: str, used: Iterable[str]) -> str:
    """Return the label, with a number after it if another database has it."""
    taken, label, number = set(used), wanted, 1
    while label in taken:
        number += 1
        label = f"{wanted}-{number}"
    return label


def join(controller: Store, own: Database, label: str, newcomers: Sequence[tuple[Address, Store]]) -> None:
    """Let databases join that are not members; those that are fresh can.

    The controller, whose own entry and label these are, is reserved; they are laid claim to and registered, and get
    their copies when they are entered: if one dies in between, the next one goes on.

    Raises:
        WrongCluster: one of them is not fresh, or belongs to another cluster; or see `register`.
    """
    controller.write(lambda connection: reserve(connection, label))
    entries: list[tuple[str, str, Database | None]] = []
    try:
        for address, store in newcomers:
            try:
                former = store.write(lambda connection: claim(connection, own))
            except WrongCluster as error:
                raise WrongCluster(f"the database {address.label!r} cannot join the cluster: {error}") from None
            entries.append((address.label, store.store_uuid, former))
        controller.write(lambda connection: register(connection, label, entries))
    except WrongCluster:
        controller.write(_give_up)
        raise


def reserve(connection: Connection, label: str) -> None:
    """Let a database alone be the controller of those that it is about to claim: nobody else can claim it then."""
    connection.execute(_LOCK)
    if not any(member.is_own and member.database_id == CONTROLLER_ID for member in read_databases(connection)):
        raise WrongCluster(_NOT_CONTROLLER)
    connection.execute(update(databases).where(databases.c.label == ALONE_LABEL).values(label=label))


def _give_up(connection: Connection) -> None:
    """Let a reserved database be alone again if nobody has joined it."""
    connection.execute(_LOCK)
    if len(read_databases(connection)) == 1:
        connection.execute(update(databases).values(label=ALONE_LABEL))


def claim(connection: Connection, controller: Database) -> Database | None:
    """Let a fresh database be the controller's, so that no other cluster takes it; safe to repeat.

    Return its entry, as it has it, if it has been a member: the controller may have lost that with its last changes.

    Raises:
        WrongCluster: it is not fresh, or belongs to another cluster.
    """
    connection.execute(_LOCK)
    members = read_databases(connection)
    if len(members) > 1:
        if not any(member.store_uuid == controller.store_uuid for member in members):
            raise WrongCluster("it belongs to another cluster")
        return next((member for member in members if member.is_own and member.database_id != CLAIMED_ID), None)
    if members[0].label != ALONE_LABEL:
        raise WrongCluster("it is about to be the controller of another cluster, by a list with another order")
    used = connection.execute(_IS_USED).one()
    if used.has_topics or used.coordinates:
        what = "topics" if used.has_topics else "transactional ids or groups"
        raise WrongCluster(f"it has {what} of its own; only a fresh database can join")
    connection.execute(delete(databases))
    own = members[0]
    connection.execute(
        insert(databases),
        [
            _row(CLAIMED_ID, "claimed", own.store_uuid, coordinates=False),
            _row(CONTROLLER_ID, controller.label, controller.store_uuid, coordinates=True),
        ],
    )
    return None


def register(
    connection: Connection, label: str, newcomers: Sequence[tuple[str, str, Database | None]]
) -> list[Database]:
    """Enter claimed databases at the controller, whose own label is `label`; each with label, uuid and former entry.

    Those that are registered by now stay as they are.  They share in coordinating if they are the first to come and
    nothing is coordinated yet.  One whose registration the controller has lost gets its number back.

    Raises:
        WrongCluster: this is not the controller; or another one has the number, or names got coordinators without it.
    """
    connection.execute(_LOCK)
    members = read_databases(connection)
    if not any(member.is_own and member.database_id == CONTROLLER_ID for member in members):
        raise WrongCluster(_NOT_CONTROLLER)
    known = {member.store_uuid for member in members}
    coordinates = len(members) == 1 and not connection.execute(_IS_USED).one().coordinates
    labels = [member.label for member in members]
    if members[0].label == ALONE_LABEL:
        labels[0] = unused_label(label, labels[1:])
        connection.execute(update(databases).where(databases.c.database_id == CONTROLLER_ID).values(label=labels[0]))
    used = {member.database_id for member in members}
    # Returning members first, so that newcomers do not take their numbers.
    for wanted, store_uuid, former in sorted(newcomers, key=lambda newcomer: newcomer[2] is None):
        if store_uuid in known:
            continue
        if former is not None and (former.database_id in used or (former.coordinates and not coordinates)):
            raise WrongCluster(
                f"the database {wanted!r} was number {former.database_id} of this cluster, but the controller no longer"
                " knows it, and the number cannot be reused: the controller was restored from an older backup, or a"
                " failover has lost its last changes. Nothing was changed: restore the controller's last state"
            )
        labels.append(unused_label(wanted, labels))
        number = max(used) + 1 if former is None else former.database_id
        is_coordinator = coordinates if former is None else former.coordinates
        connection.execute(insert(databases), _row(number, labels[-1], store_uuid, coordinates=is_coordinator))
        used.add(number)
    if len(labels) > len(members):
        touch_catalogue(connection)
    return read_databases(connection)


def touch_catalogue(connection: Connection) -> int:
    """Number one more change of what members copy; the changes of a cluster follow each other from here on."""
    number: int = connection.execute(_TOUCH, {"step": STEP_MIN + secrets.randbelow(STEP_MIN)}).scalar_one()
    return number


def draw_numbers(members: Sequence[Database], count: int) -> list[int] | None:
    """Return numbers for new topics and partitions that nothing in the cluster has ever had; None: it is one database.

    They are those of the change for which `lock_catalogue` has returned the databases, up to its own: once for each.  A
    controller that was restored from an older backup gives none out again, as its tables would.
    """
    if len(members) == 1:
        return None
    last = next(member.catalogue_version for member in members if member.is_own)
    return list(range(last - count + 1, last + 1))


def lock_catalogue(connection: Connection) -> list[Database]:
    """Return the databases of the cluster; if there are several, changes of topics and settings follow each other.

    Raises:
        WrongCluster: this is not the controller, which alone makes such changes.
    """
    # Nor does this database join another one's cluster meanwhile: it would lose what it has of its own.
    connection.execute(_SHARE)
    members = read_databases(connection)
    if not any(member.is_own and member.database_id == CONTROLLER_ID for member in members):
        controller = next((member.label for member in members if member.database_id == CONTROLLER_ID), "")
        raise WrongCluster(
            f"topics and settings are changed in the controller of the cluster, the database {controller!r}"
        )
    if len(members) > 1:
        number = touch_catalogue(connection)
        members = [replace(member, catalogue_version=number) if member.is_own else member for member in members]
    return members


def _row(database_id: int, label: str, store_uuid: str, *, coordinates: bool) -> dict[str, object]:
    return {
        "database_id": database_id,
        "label": label,
        "store_uuid": store_uuid,
        "coordinates": coordinates,
        "catalogue_version": 0,
    }
