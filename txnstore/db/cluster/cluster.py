"""The cluster: several databases under one roof, each opened when it is first needed.

The first database of the list is the controller: it keeps topics, settings and the list of members.  A partition
lives in one database, its leader; a transactional id or a group in the one that its name's hash selects.  A database
that is away holds up only what lives there: a caller that asks for it is told so, by its label.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Self, TypeVar

from sqlalchemy import Connection, bindparam, select

from txnstore.backoff import Backoff
from txnstore.clock import Clock
from txnstore.db.backend import Limits
from txnstore.db.cluster.catalogue import Catalogue, check_history, copy_catalogue, is_current, look, read_version
from txnstore.db.cluster.membership import (
    CONTROLLER_ID,
    Address,
    Database,
    addresses_of,
    coordinator_of_name,
    coordinator_of_producer,
    join,
    read_databases,
    read_from_controller,
    split_urls,
)
from txnstore.db.identity import check_original_once
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.opening import open_store
from txnstore.db.schema import partitions
from txnstore.db.store import ANNOUNCE_TIMEOUT_SECONDS, Store, chunks
from txnstore.db.url import CurrentOptions
from txnstore.errors import (
    MissingMember,
    NotCoordinator,
    PermissionDenied,
    StoreClosed,
    StoreUnavailable,
    TxnStoreError,
    UnknownTopicOrPartition,
    WrongCluster,
)

_log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")
#: Members that could not be asked, by number, and why; each who asks has one of its own.
LeftOut = dict[int, TxnStoreError]

#: How long the opening of a member is tried.
OPENING_MS: Final = 500
#: After a member could not be reached, or refused, nobody tries it for so long: at first, and at most.
PAUSE_FIRST_SECONDS: Final = 0.25
PAUSE_LAST_SECONDS: Final = 8.0
#: How many members are written to at once.
THREADS_MAX: Final = 8

_LEADERS: Final = select(partitions.c.partition_id, partitions.c.leader_database_id).where(
    partitions.c.partition_id.in_(bindparam("partition_ids", expanding=True))
)
_LISTED_TWICE: Final = "two URLs of the list lead to the database {!r}, or to a copy of it"

_opened: Final[weakref.WeakSet[Cluster]] = weakref.WeakSet()


@dataclass(slots=True)
class _Pause:
    """How long a member is left alone that could not be reached, or refused to be opened."""

    backoff: Backoff
    until: float
    error: Callable[[], TxnStoreError]


class Cluster:
    """The databases that hold logs, coordinators and groups together; safe to share between threads."""

    def __init__(self, controller: Store, addresses: Sequence[Address], open_: Callable[[str, bool], Store]) -> None:
        """Use `open_cluster` instead: it checks what it opens."""
        self.controller = controller
        self.parallel = True
        """Whether several members are written to at once, in threads."""
        self._databases: dict[int, Database] = {}
        self._stores: dict[int, Store] = {CONTROLLER_ID: controller}
        """Those that are open."""
        self._addresses = list(addresses)
        self._open = open_
        self._monotonic_seconds = time.monotonic
        self._pauses: dict[int, _Pause] = {}
        self._leaders: dict[int, int] = {}
        self._closed = False
        self._executor: ThreadPoolExecutor | None = None
        self._opening: dict[int, threading.Lock] = {}
        self.forget_threads_after_fork()
        controller.has_learned_of_others = self.has_learned_of_others
        _opened.add(self)

    def __repr__(self) -> str:
        """Return the labels of its databases."""
        return f"Cluster({', '.join(member.label for member in self.databases)})"

    def __enter__(self) -> Self:
        """Return the cluster."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    # --- who there is ------------------------------------------------------------------------------------------------

    @property
    def databases(self) -> tuple[Database, ...]:
        """The databases of the cluster, by number, as they were when last looked at."""
        return tuple(self._databases.values())

    @property
    def is_alone(self) -> bool:
        """Whether there is one database, as far as anybody has looked."""
        return len(self._databases) == 1

    def label_of(self, database_id: int) -> str:
        """Return what people call the database."""
        member = self._databases.get(database_id)
        return f"number {database_id}" if member is None else member.label

    def refresh(self, *, retry_timeout_ms: int | None = None) -> None:
        """Look again which databases the cluster has; a controller that is away is waited for so long.

        Raises:
            WrongCluster: the first database of the list is not the controller.
            StoreCopied: the controller does not know a database any more: it is an older state of itself.
            TxnStoreError: the controller cannot be reached.
        """
        self._databases = read_from_controller(self.controller, self._databases, retry_timeout_ms=retry_timeout_ms)
        if len(self._databases) > 1:
            for database_id, store in list(self._stores.items()):
                store.label = self._databases[database_id].label

    def add_database(self, url: str) -> Database:
        """Let a fresh database join; one that is a member already stays one.

        Raises:
            InvalidUrl: the URL cannot be understood.
            WrongCluster: the database is in use, or in another cluster.
            TxnStoreError: it, or the controller, cannot be reached or refuses.
        """
        (address,) = addresses_of([url])
        store = address.open(self._open, create=True)
        try:
            self._join([(address, store)])
        except BaseException:
            store.close()
            raise
        member = self._member_of(store)
        assert member is not None, "it has just been registered"
        if self._stores.get(member.database_id) is not store:
            store.close()
        self.publish()
        return member

    def take_in(self, *, create: bool) -> bool:
        """Look at the databases of the list whose names tell nothing, and let fresh ones join; whether any did."""
        self.refresh()
        if len(self._databases) > 1:
            # Its members may be the original's.
            check_original_once(self.controller)
        labels = {member.label: member for member in self._databases.values()}
        rest = self._addresses[1:]
        for address in rest:
            hinted = labels.get(address.label)
            if hinted is not None and hinted.database_id != CONTROLLER_ID:
                address.database_id = hinted.database_id
                # If two have the same name, only a look inside tells which is which.
                del labels[address.label]
        newcomers: list[tuple[Address, Store]] = []
        try:
            for address in rest:
                if address.database_id is None:
                    self._look_at(address, newcomers, create=create)
            if newcomers:
                self._join(newcomers)
        except BaseException:
            for _, store in newcomers:
                store.close()
            raise
        return bool(newcomers)

    def _look_at(self, address: Address, newcomers: list[tuple[Address, Store]], *, create: bool) -> None:
        try:
            store = address.open(self._open, create=create)
        except StoreUnavailable as error:
            fields = {"event": "database_unavailable", "database": address.label}
            text = "%s; if it is no member yet, it joins when a client opens this list while it can be reached"
            _log.warning(text, error, extra=fields)
            return
        member = self._member_of(store)
        if member is None:
            if any(store.store_uuid == other.store_uuid for _, other in newcomers):
                store.close()
                raise WrongCluster(_LISTED_TWICE.format(address.label))
            newcomers.append((address, store))
            return
        try:
            self._enter(address, store, member)
        except BaseException:
            store.close()
            raise

    def _join(self, newcomers: Sequence[tuple[Address, Store]]) -> None:
        join(self.controller, self._databases[CONTROLLER_ID], self._addresses[0].label, newcomers)
        self.refresh()
        for address, store in newcomers:
            member = self._member_of(store)
            assert member is not None, "it has just been registered"
            if self._stores.get(member.database_id) is None:
                self._enter(address, store, member)

    def has_learned_of_others(self, *, retry_timeout_ms: int | None = None) -> bool:
        """Look again if there is one database as far as anybody has looked; return whether there are more by now.

        Groups and transactional ids have their databases for ever once there are two: others need not be looked for.

        Raises:
            TxnStoreError: as `refresh`.
        """
        if not self.is_alone:
            return False
        self.refresh(retry_timeout_ms=retry_timeout_ms)
        return not self.is_alone

    def _member_of(self, store: Store) -> Database | None:
        return next((member for member in self._databases.values() if member.store_uuid == store.store_uuid), None)

    def _enter(self, address: Address, store: Store, member: Database) -> None:
        """Let the store be the member's, unless it is a copy of that; its own copies are made if it has none."""
        claimant = next((other for other in self._addresses if other.database_id == member.database_id), None)
        if member.database_id in self._stores:
            raise WrongCluster(_LISTED_TWICE.format(member.label))
        if claimant is not None and claimant is not address:
            # It was taken for the member because of its name alone.
            claimant.database_id = None
        check_original_once(store)
        store.database_id, store.label = member.database_id, member.label
        entries = store.read(read_databases)
        if any(entry.is_own and entry.database_id == member.database_id for entry in entries):
            check_history(store, self.controller, retry_timeout_ms=OPENING_MS)
        else:
            try:
                copy_catalogue(self.controller, look(self.controller), member.database_id, store.write)
            except WrongCluster as error:
                raise WrongCluster(f"the database {member.label!r} is registered, but {error}") from None
        address.database_id = member.database_id
        self._stores[member.database_id] = store

    # --- their stores ------------------------------------------------------------------------------------------------

    def own(self, database_id: int) -> Store:
        """Return the store of a member, opened if it was not.

        Raises:
            StoreUnavailable: it cannot be reached; each of these also if that was so a moment ago.
            MissingMember: no URL of the list leads to it.
            WrongCluster: its URL leads to another database, or its copies are not of this controller.
        """
        if (store := self._stores.get(database_id)) is not None:
            return store
        if database_id not in self._databases:
            self.refresh()
        if database_id not in self._databases:
            raise WrongCluster(f"the cluster has no database with the number {database_id}")
        with self._state:
            opening = self._opening.setdefault(database_id, threading.Lock())
        with opening:
            return self._stores.get(database_id) or self._find(database_id)

    def opened(self) -> list[Store]:
        """Return the stores that have been opened; asks nobody."""
        return [self._stores[database_id] for database_id in sorted(self._stores)]

    def stores(self, left_out: LeftOut | None = None) -> Iterator[Store]:
        """Return the stores of all members but of those that are left out, or are away, or refuse; see `leaving_out`.

        Raises:
            StoreClosed: the cluster has been closed.
        """
        for database_id in (number for number in list(self._databases) if number not in (left_out or ())):
            with self.leaving_out(database_id, {} if left_out is None else left_out):
                self._refuse_while_paused(database_id)
                yield self.own(database_id)

    def read_all(
        self, work: Callable[[Connection], Result], left_out: LeftOut, *, retry_timeout_ms: int | None = None
    ) -> list[tuple[Store, Result]]:
        """Run `work` on one snapshot of each member but of those that are away, or refuse; see `leaving_out`.

        Raises:
            StoreClosed: the cluster has been closed.
            TxnStoreError: its only database is away, or refuses.
        """
        found: list[tuple[Store, Result]] = []
        for store in self.stores(left_out):
            with self.leaving_out(store.database_id, left_out):
                found.append((store, store.read(work, retry_timeout_ms=retry_timeout_ms)))
        return found

    @contextlib.contextmanager
    def leaving_out(self, database_id: int, left_out: LeftOut) -> Iterator[None]:
        """Go on without a member that is away, or refuses, and put into the caller's own `left_out` why.

        Raises:
            StoreClosed: the cluster has been closed.
            TxnStoreError: the member is the only database.
        """
        try:
            yield
        except TxnStoreError as error:
            if isinstance(error, StoreClosed) or self._databases.keys() == {database_id}:
                raise
            left_out[database_id] = error

    def warn_of(self, left_out: LeftOut) -> None:
        """Log which members were left out, where nobody is told otherwise.

        Raises:
            TxnStoreError: all were; or one was only busy, and would answer if it were asked again.
        """
        errors = list(left_out.values())
        busy = [error for error in errors if error.retriable and not isinstance(error, StoreUnavailable)]
        if busy or (self._databases and left_out.keys() >= self._databases.keys()):
            raise [*busy, *errors][0]
        for database_id, error in left_out.items():
            label = self.label_of(database_id)
            if isinstance(error, StoreUnavailable | MissingMember):
                _log.warning("left out: %s", error, extra={"event": "database_unavailable", "database": label})
            else:
                _log.warning("left out: %s", error, extra={"event": "database_refuses", "database": label})

    def write_at(
        self,
        database_id: int,
        work: Callable[[Connection], Result],
        *,
        wakes_readers: bool = False,
        retry_timeout_ms: int | None = None,
    ) -> Result:
        """Run `work` in one database transaction of a member, as `Store.write`; one that was away is left alone.

        Raises:
            StoreUnavailable: it cannot be reached, or could not a moment ago.
            TxnStoreError: see `own` and `Store.write`.
        """
        return self._at(
            database_id,
            lambda store: store.write(work, wakes_readers=wakes_readers, retry_timeout_ms=retry_timeout_ms),
        )

    def _at(self, database_id: int, call: Callable[[Store], Result]) -> Result:
        """Make a call on a member's store; one that was away is left alone for a while."""
        self._refuse_while_paused(database_id)
        store = self.own(database_id)
        try:
            result = call(store)
        except StoreUnavailable as error:
            self._pause(database_id, error)
            raise
        self._pauses.pop(database_id, None)
        return result

    def each(self, calls: Mapping[int, Callable[[], Result]]) -> dict[int, Result | TxnStoreError]:
        """Make a call for each of some members, at once where that helps; return what came of each."""
        if len(calls) < 2 or not self.parallel:  # noqa: PLR2004 - one needs no thread
            return {database_id: _outcome_of(call) for database_id, call in calls.items()}
        _, *others = calls.items()
        futures: dict[int, Future[Result | TxnStoreError]] = {}
        for database_id, call in others:
            # When the interpreter ends, no new threads can be started: then the calls are made one after the other.
            with contextlib.suppress(RuntimeError):
                futures[database_id] = self._threads().submit(_outcome_of, call)
        outcomes = {database_id: _outcome_of(call) for database_id, call in calls.items() if database_id not in futures}
        return outcomes | {database_id: _result_of(future) for database_id, future in futures.items()}

    def _threads(self) -> ThreadPoolExecutor:
        with self._state:
            if self._closed:
                raise StoreClosed("the cluster has been closed")
            if self._executor is None:
                self._executor = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="txnstore-cluster")
            return self._executor

    def _find(self, database_id: int) -> Store:
        """Open what may be the member, until it is found; who refuses is not away, whatever else is."""
        self._refuse_while_paused(database_id)
        label = self._databases[database_id].label
        left = self._addresses[1:]
        failure: TxnStoreError | None = None
        while database_id not in self._stores:
            # Asked each time: a look inside may show that others were taken for the wrong member, by their names.
            candidates = [address for address in left if address.database_id in (None, database_id)]
            if not candidates:
                break
            address = min(candidates, key=lambda address: address.database_id is None)
            left.remove(address)
            try:
                self._open_member(address)
            except TxnStoreError as error:
                failure = error if failure is None or isinstance(failure, StoreUnavailable) else failure
        if (store := self._stores.get(database_id)) is not None:
            self._pauses.pop(database_id, None)
            return store
        if failure is None:
            raise MissingMember(
                f"what was asked for lives in the database {label!r} of the cluster, but no URL of the list leads"
                " there: add its URL to bootstrap.servers"
            )
        cause, is_away = failure.__cause__, isinstance(failure, StoreUnavailable)
        if is_away:
            failure, cause = StoreUnavailable(f"the database {label!r} cannot be reached; nothing was changed"), failure
        if is_away or not (failure.retriable or failure.outcome_unknown):
            self._pause(database_id, failure)  # what was busy, or may have been done, is no answer to anybody else
        raise failure from cause

    def _open_member(self, address: Address) -> None:
        """Open whatever is at the address, and let it be the member that it is."""
        store = address.open(self._open, create=False)
        try:
            member = self._registered(store, address)
            with self._entering:
                if member.database_id in self._stores:
                    # Somebody who looked for another one was quicker.
                    store.close()
                else:
                    self._enter(address, store, member)
        except BaseException:
            store.close()
            raise

    def _registered(self, store: Store, address: Address) -> Database:
        if (member := self._member_of(store)) is not None:
            return member
        if address.database_id is None:
            raise WrongCluster(f"the database {address.label!r} is not registered in the cluster")
        raise WrongCluster(
            f"the database at the address of {address.label!r} is not the one that is registered, and nothing was"
            " changed: bring that one back, or change the URL of the list to where it is now"
        )

    def _pause(self, database_id: int, error: TxnStoreError) -> None:
        before = self._pauses.get(database_id)
        backoff = Backoff(PAUSE_FIRST_SECONDS, PAUSE_LAST_SECONDS) if before is None else before.backoff
        until = self._monotonic_seconds() + backoff.back_off()
        # Another one each time: an error that is raised holds what it was raised in.
        self._pauses[database_id] = _Pause(backoff, until, partial(type(error), str(error)))

    def _refuse_while_paused(self, database_id: int) -> None:
        """Refuse at once what could not be reached, or refused, a moment ago."""
        if self._closed:
            raise StoreClosed("the cluster has been closed")
        pause = self._pauses.get(database_id)
        if pause is not None and self._monotonic_seconds() < pause.until:
            raise pause.error()

    # --- what lives where --------------------------------------------------------------------------------------------

    def learn(self, topic: Any) -> None:
        """Remember where a topic's partitions live; they never move."""
        if not self._databases.keys() >= set(topic.leaders):
            # A database has joined since.
            self.refresh()
        self._leaders.update(zip(topic.partition_ids, topic.leaders, strict=True))

    def known_leaders(self, partition_ids: Collection[int], connection: Connection | None = None) -> dict[int, int]:
        """Return the leaders of those of the partitions that are remembered, or that stand in the tables there."""
        leaders = self._leaders
        missing = [number for number in partition_ids if number not in leaders]
        if missing and connection is not None:
            leaders.update(self.read_leaders(missing, connection))
        return {number: leaders[number] for number in partition_ids if number in leaders}

    def read_leaders(self, partition_ids: Collection[int], connection: Connection) -> dict[int, int]:
        """Return the leaders of those of the partitions that stand in the tables there."""
        return {
            row.partition_id: row.leader_database_id
            for some in chunks(list(partition_ids))
            for row in connection.execute(_LEADERS, {"partition_ids": some})
        }

    def leaders_of(self, partition_ids: Collection[int]) -> dict[int, int]:
        """Return the leaders of those of the partitions that the controller knows; it is asked for what is new."""
        if self.is_alone:
            return dict.fromkeys(partition_ids, CONTROLLER_ID)
        known = self.known_leaders(partition_ids)
        missing = [number for number in partition_ids if number not in known]
        if missing:
            known |= self.controller.read(lambda connection: self.known_leaders(missing, connection))
        return known

    def leader_of_partition(self, partition_id: int) -> int:
        """Return the number of the database that holds the partition.

        Raises:
            UnknownTopicOrPartition: the controller does not know it.
        """
        leader_id = self.leaders_of([partition_id]).get(partition_id)
        if leader_id is None:
            raise UnknownTopicOrPartition(f"there is no partition with id {partition_id}; was its topic deleted?")
        return leader_id

    def by_leader(
        self, items: Iterable[Item], partition_id_of: Callable[[Item], int] | None = None
    ) -> dict[int, list[Item]]:
        """Return the items by the database that holds their partition, in the order given.

        Raises:
            UnknownTopicOrPartition: the controller does not know one of the partitions.
        """
        items = list(items)
        if self.is_alone:
            return {CONTROLLER_ID: items} if items else {}
        numbers = [(partition_id_of or _partition_id_of)(item) for item in items]
        leaders = self.leaders_of(set(numbers))
        found: dict[int, list[Item]] = {}
        for number, item in zip(numbers, items, strict=True):
            found.setdefault(leaders.get(number) or self.leader_of_partition(number), []).append(item)
        return found

    def coordinator_id_of(self, name: str | None) -> int:
        """Return the number of the database that coordinates the transactional id or group; of None, the controller."""
        if name is None or self.is_alone:
            return CONTROLLER_ID
        return coordinator_of_name(name, self._databases.values())

    def coordinator_of(self, name: str | None) -> Store:
        """Return the store that coordinates the transactional id or group; of None, the controller."""
        return self.own(self.coordinator_id_of(name))

    def at_partition(self, partition_id: int, call: Callable[[Store], Result]) -> Result:
        """Make a call on the store that holds the partition; again if that had not heard of it."""
        return repaired(self, self.leader_of_partition(partition_id), call)

    def at_coordinator(self, name: str | None, call: Callable[[Store], Result]) -> Result:
        """Make a call on the store that coordinates a transactional id or group; of None, on the controller.

        It is made again, elsewhere, if there is a database by now that this client had not heard of; and if the store
        had not heard of a partition that the controller has.
        """
        try:
            return call(self.coordinator_of(name))
        except NotCoordinator:
            self.refresh()
            return call(self.coordinator_of(name))
        except UnknownTopicOrPartition:
            if self.is_alone or not self.reconcile(self.coordinator_id_of(name)):
                raise
            return call(self.coordinator_of(name))

    def ask_coordinator(
        self, name: str, call: Callable[[Store], Result], *, retry_timeout_ms: int | None = None
    ) -> Result:
        """Make a call as `at_coordinator` which nobody refuses, as it reads: it finds nothing in the wrong database.

        Who that is may be tried to be found out for so long.
        """
        self.has_learned_of_others(retry_timeout_ms=retry_timeout_ms)
        return self.at_coordinator(name, call)

    def coordinator_of_producer(self, producer_id: int) -> Store:
        """Return the store that gave out the producer id: it coordinates its transactions."""
        return self.controller if self.is_alone else self.own(coordinator_of_producer(producer_id))

    # --- copies ------------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Copy to the members what has changed at the controller; one that is away is left to `reconcile`."""
        others = [database_id for database_id in self._databases if database_id != CONTROLLER_ID]
        if not others:
            return
        try:
            catalogue = look(self.controller)
        except TxnStoreError as error:
            fields = {"event": "topics_not_copied"}
            _log.warning("topics are not copied to the other databases yet: %s", error, extra=fields)
            return
        outcomes = self.each({database_id: partial(self._copy, database_id, catalogue) for database_id in others})
        for database_id, outcome in outcomes.items():
            if isinstance(outcome, TxnStoreError):
                fields = {"event": "topics_not_copied", "database": self.label_of(database_id)}
                _log.warning("topics are not copied to one of the databases yet: %s", outcome, extra=fields)

    def reconcile(self, database_id: int) -> bool:
        """Bring a member's copies to the controller's state; False if they were, which takes no right to change them.

        Raises:
            StoreUnavailable: this client's role may not do it: somebody else's has to.
            TxnStoreError: it, or the controller, cannot be reached or refuses.
        """
        if database_id == CONTROLLER_ID:
            return False
        # Before the controller: what a member has, that had before.
        version = self._at(database_id, lambda store: store.read(read_version))
        catalogue = look(self.controller, version)
        held = partial(is_current, catalogue=catalogue, database_id=database_id)
        if self._at(database_id, lambda store: store.read(held)):
            return False
        try:
            return self._copy(database_id, catalogue)
        except PermissionDenied as error:
            raise StoreUnavailable(
                f"the database {self.label_of(database_id)!r} does not have the newest topics yet, and this role may"
                f" not copy them: `txnstore maintain` does, as a coordinator ({error})"
            ) from error

    def _copy(self, database_id: int, catalogue: Catalogue) -> bool:
        return copy_catalogue(self.controller, catalogue, database_id, partial(self.write_at, database_id))

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self, *, timeout_seconds: float = ANNOUNCE_TIMEOUT_SECONDS) -> None:
        """Close every store; a second call does nothing."""
        with self._state:
            closed, self._closed = self._closed, True
            executor, self._executor = self._executor, None
        if closed:
            return
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)
        end = time.monotonic() + timeout_seconds
        for store in list(self._stores.values()):
            store.close(timeout_seconds=max(0.0, end - time.monotonic()))
        _opened.discard(self)

    def forget_threads_after_fork(self) -> None:
        """Begin with free locks, as in a forked child: the parent's threads, and what they held, are not there."""
        self._state = threading.Lock()
        self._entering = threading.Lock()
        self._opening, self._executor = {}, None


def open_cluster(
    urls: str | Sequence[str],
    *,
    schema: str = DEFAULT_SCHEMA,
    clock: Clock | None = None,
    limits: Limits | None = None,
    pool_size: int = 5,
    create: bool = True,
    takes_in: bool = True,
    current_options: CurrentOptions | None = None,
) -> Cluster:
    """Open the cluster whose databases the list names, the controller first; arguments as in `open_store`.

    Members are opened when they are needed.  A database of the list that is fresh joins the cluster, unless nothing is
    to change (`takes_in`); those that come together with the second one share in coordinating transactions and groups,
    if there are none yet.

    Raises:
        InvalidUrl: a URL cannot be understood or names no database.
        WrongCluster: a database is not one of this cluster, is named twice, or the first is not the controller.
        StoreCopied: of several databases one is a copy of a member.
        TxnStoreError: the controller cannot be reached or refuses.
    """
    addresses = addresses_of(split_urls(urls) if isinstance(urls, str) else urls)
    own_limits = limits or Limits()
    # Not for long: a caller that needs another member does not wait for this one.
    short_limits = replace(own_limits, retry_timeout_ms=min(OPENING_MS, own_limits.retry_timeout_ms))
    open_ = partial(open_store, schema=schema, clock=clock, pool_size=pool_size)

    def open_member(url: str, create: bool) -> Store:
        store = open_(url, limits=short_limits, create=create)
        store.limits = own_limits
        return store

    controller = open_(addresses[0].text, limits=own_limits, create=create, current_options=current_options)
    cluster = Cluster(controller, addresses, open_member)
    try:
        if not takes_in:
            cluster.refresh()
        elif cluster.take_in(create=create):
            cluster.publish()
    except BaseException:
        cluster.close()
        raise
    return cluster


def several(cluster: Cluster | None) -> Cluster | None:
    """Return the cluster if other databases are known to be in it; None: what is not here is nowhere."""
    return None if cluster is None or cluster.is_alone else cluster


def repaired(cluster: Cluster, database_id: int, call: Callable[[Store], Result]) -> Result:
    """Make a call on a member's store; if it does not know a partition, bring its copies up to date and repeat it.

    Raises:
        UnknownTopicOrPartition: it still does not know it: the controller does not either.
        TxnStoreError: see `Cluster.own`, and what the call raises.
    """
    store = cluster.own(database_id)
    try:
        return call(store)
    except UnknownTopicOrPartition:
        if cluster.is_alone:
            raise
        cluster.reconcile(database_id)
        return call(store)


def _outcome_of(call: Callable[[], Result]) -> Result | TxnStoreError:
    try:
        return call()
    except TxnStoreError as error:
        return error


def _result_of(future: Future[Result | TxnStoreError]) -> Result | TxnStoreError:
    try:
        return future.result()
    except CancelledError:
        return StoreClosed("the cluster has been closed")


def _partition_id_of(item: Any) -> int:
    return item if isinstance(item, int) else int(item.partition_id)


def _after_fork_in_child() -> None:
    for cluster in list(_opened):
        cluster.forget_threads_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
