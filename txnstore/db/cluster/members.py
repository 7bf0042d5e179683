"""The members of a cluster: found in the list, opened when needed, left alone while away, and taken in.

A member is known by the identity of its store.  The name in its URL only tells where to look first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from sqlalchemy import Connection

from txnstore.db.cluster.catalogue import apply_catalogue, read_catalogue
from txnstore.db.cluster.database_list import Address, check_not_listed, open_address
from txnstore.db.cluster.membership import (
    CLAIMED_ID,
    CONTROLLER_ID,
    Database,
    claim,
    give_up,
    read_databases,
    register,
    reserve,
)
from txnstore.db.identity import check_original_once
from txnstore.db.store import Store
from txnstore.errors import MissingMember, StoreClosed, StoreUnavailable, TxnStoreError, WrongCluster

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

#: After a member could not be reached nobody tries it for so long: at first, and at most.
PAUSE_FIRST_SECONDS: Final = 0.25
PAUSE_LAST_SECONDS: Final = 8.0


@dataclass(slots=True)
class _Pause:
    """How long a member is left alone that could not be reached."""

    seconds: float
    until: float
    why: str


class Members:
    """The databases of a cluster, and those of their stores that are open; safe to share between threads."""

    def __init__(
        self,
        controller: Store,
        addresses: Sequence[Address],
        open_: Callable[[str, bool], Store],
        *,
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with the controller."""
        self.controller = controller
        self.stores: dict[int, Store] = {CONTROLLER_ID: controller}
        """Those that are open."""
        self.databases: dict[int, Database] = {}
        """Those that there are."""
        self._addresses = list(addresses)
        self._open = open_
        self._monotonic_seconds = monotonic_seconds
        self._pauses: dict[int, _Pause] = {}
        self._closed = False
        controller.has_learned_of_others = self._has_learned_of_others
        self.make_locks()

    def refresh(self) -> None:
        """Look again which databases the cluster has.

        Raises:
            WrongCluster: the first database of the list is not the controller.
            TxnStoreError: the controller cannot be reached.
        """
        found = self.controller.read(read_databases)
        own = next(member for member in found if member.is_own)
        if own.database_id != CONTROLLER_ID:
            other = next((member.label for member in found if member.database_id == CONTROLLER_ID), "")
            joining = "; it was about to join" if own.database_id == CLAIMED_ID else ""
            raise WrongCluster(
                f"the first database of the list is {own.label!r}, a member of the cluster whose controller is"
                f" {other!r}{joining}: the controller comes first"
            )
        self.databases = {member.database_id: member for member in found}
        if len(self.databases) > 1:
            for database_id, store in list(self.stores.items()):
                store.label = self.databases[database_id].label

    @property
    def is_alone(self) -> bool:
        """Whether there is one database, as far as anybody has looked."""
        return len(self.databases) == 1

    def own(self, database_id: int) -> Store:
        """Return the store of a member, opened if it was not.

        Raises:
            StoreUnavailable: it cannot be reached, or could not a moment ago.
            MissingMember: no URL of the list leads to it.
            WrongCluster: its URL leads to another database.
        """
        store = self.stores.get(database_id)
        if store is not None:
            return store
        self.refuse_if_closed()
        if database_id not in self.databases:
            self.refresh()
        if database_id not in self.databases:
            raise WrongCluster(f"the cluster has no database with the number {database_id}")
        with self._state:
            opening = self._opening.setdefault(database_id, threading.Lock())
        with opening:
            store = self.stores.get(database_id)
            return store if store is not None else self._find(database_id)

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
        self.refuse_while_paused(database_id)
        store = self.own(database_id)
        try:
            result = store.write(work, wakes_readers=wakes_readers, retry_timeout_ms=retry_timeout_ms)
        except StoreUnavailable as error:
            self._pause(database_id, str(error))
            raise
        self._pauses.pop(database_id, None)
        return result

    def add(self, address: Address) -> Database:
        """Let a fresh database join; one that is a member already stays one."""
        store = open_address(self._open, address, create=True)
        try:
            self.join([(address, store)])
        except BaseException:
            store.close()
            raise
        member = self._member_of(store)
        assert member is not None, "it has just been registered"
        if self.stores.get(member.database_id) is not store:
            store.close()
        return member

    def take_in(self, *, create: bool) -> bool:
        """Look at the databases of the list whose names tell nothing, and let fresh ones join; whether any did."""
        self.refresh()
        if len(self.databases) > 1:
            # Its members may be the original's.
            check_original_once(self.controller)
        labels = {member.label: member for member in self.databases.values()}
        rest = self._addresses[1:]
        for address in rest:
            hinted = labels.get(address.label)
            if hinted is not None and hinted.database_id != CONTROLLER_ID:
                address.database_id = hinted.database_id
                # Two of one name: only a look inside tells which is which.
                del labels[address.label]
        newcomers: list[tuple[Address, Store]] = []
        try:
            for address in rest:
                if address.database_id is None:
                    self._look_at(address, newcomers, create=create)
            if newcomers:
                self.join(newcomers)
        except BaseException:
            for _, store in newcomers:
                store.close()
            raise
        return bool(newcomers)

    def _look_at(self, address: Address, newcomers: list[tuple[Address, Store]], *, create: bool) -> None:
        try:
            store = open_address(self._open, address, create=create)
        except StoreUnavailable as error:
            _log.warning("%s; it is looked for again when something that lives there is needed", error)
            return
        member = self._member_of(store)
        if member is None:
            check_not_listed([store.store_uuid for _, store in newcomers], store.store_uuid, address.label)
            newcomers.append((address, store))
            return
        try:
            self._enter(address, store, member)
        except BaseException:
            store.close()
            raise

    def join(self, newcomers: Sequence[tuple[Address, Store]]) -> None:
        """Let databases join that are not members; those that are fresh can.

        The controller is reserved; they are laid claim to, registered, given their copies: whoever dies in between is
        followed by whoever comes next.
        """
        controller = next(member for member in self.databases.values() if member.database_id == CONTROLLER_ID)
        label = self._addresses[0].label
        self.controller.write(lambda connection: reserve(connection, label))
        for address, store in newcomers:
            try:
                store.write(lambda connection: claim(connection, controller))
            except WrongCluster as error:
                self.controller.write(give_up)
                raise WrongCluster(f"the database {address.label!r} cannot join the cluster: {error}") from None
        entries = [(address.label, store.store_uuid) for address, store in newcomers]
        self.controller.write(lambda connection: register(connection, label, entries))
        self.refresh()
        for address, store in newcomers:
            member = self._member_of(store)
            assert member is not None, "it has just been registered"
            if self.stores.get(member.database_id) is None:
                self._enter(address, store, member)

    def _has_learned_of_others(self) -> bool:
        if not self.is_alone:
            return False
        self.refresh()
        return not self.is_alone

    def _member_of(self, store: Store) -> Database | None:
        return next((member for member in self.databases.values() if member.store_uuid == store.store_uuid), None)

    def _enter(self, address: Address, store: Store, member: Database) -> None:
        """Let the store be the member's; its copies are made if it has none.

        Raises:
            StoreCopied: it is a copy of the member.
            WrongCluster: another URL of the list leads to the same database, or it belongs to another cluster.
        """
        claimant = next((other for other in self._addresses if other.database_id == member.database_id), None)
        present = self.stores.get(member.database_id)
        if present is not None:
            raise WrongCluster(f"two URLs of the list lead to the database {member.label!r}, or to a copy of it")
        if claimant is not None and claimant is not address:
            # It was taken for the member by its name only.
            claimant.database_id = None
        check_original_once(store)
        store.database_id, store.label = member.database_id, member.label
        found = store.read(read_databases)
        if not any(entry.is_own and entry.database_id == member.database_id for entry in found):
            catalogue = self.controller.read(read_catalogue)
            try:
                store.write(lambda connection: apply_catalogue(connection, catalogue, member.database_id))
            except WrongCluster as error:
                raise WrongCluster(f"the database {member.label!r} is registered, but {error}") from None
        address.database_id = member.database_id
        self.stores[member.database_id] = store

    def _find(self, database_id: int) -> Store:
        """Open what may be the member, until it is found."""
        self.refuse_while_paused(database_id)
        label = self.databases[database_id].label
        candidates = sorted(
            (address for address in self._addresses[1:] if address.database_id in (None, database_id)),
            key=lambda address: address.database_id is None,
        )
        failure: TxnStoreError | None = None
        for address in candidates:
            try:
                self._open_member(address)
            except TxnStoreError as error:
                failure = failure or error
            if database_id in self.stores:
                break
        store = self.stores.get(database_id)
        if store is not None:
            self._pauses.pop(database_id, None)
            return store
        if failure is None:
            raise MissingMember(
                f"what was asked for lives in the database {label!r} of the cluster, but no URL of the list leads"
                " there:"
                " add its URL to bootstrap.servers"
            )
        if isinstance(failure, StoreUnavailable):
            self._pause(database_id, f"the database {label!r} cannot be reached; nothing was changed")
            raise StoreUnavailable(f"the database {label!r} cannot be reached; nothing was changed") from failure
        raise failure

    def _open_member(self, address: Address) -> None:
        """Open whatever is behind the address, and let it be the member that it is."""
        store = open_address(self._open, address, create=False)
        try:
            member = self._registered(store, address)
            with self._entering:
                if member.database_id in self.stores:
                    # Somebody who looked for another one was quicker.
                    store.close()
                else:
                    self._enter(address, store, member)
        except BaseException:
            store.close()
            raise

    def _registered(self, store: Store, address: Address) -> Database:
        member = self._member_of(store)
        if member is not None:
            return member
        if address.database_id is None:
            raise WrongCluster(f"the database {address.label!r} is not registered in the cluster")
        raise WrongCluster(f"the database at the address of {address.label!r} is not the one that is registered")

    def _pause(self, database_id: int, why: str) -> None:
        before = self._pauses.get(database_id)
        seconds = PAUSE_FIRST_SECONDS if before is None else min(2 * before.seconds, PAUSE_LAST_SECONDS)
        self._pauses[database_id] = _Pause(seconds, self._monotonic_seconds() + seconds, why)

    def refuse_while_paused(self, database_id: int) -> None:
        """Refuse at once what could not be reached a moment ago.

        Raises:
            StoreUnavailable: its pause is not over.
        """
        pause = self._pauses.get(database_id)
        if pause is not None and self._monotonic_seconds() < pause.until:
            raise StoreUnavailable(pause.why)

    def refuse_if_closed(self) -> None:
        """Refuse to open anything once the cluster is closed.

        Raises:
            StoreClosed: it is.
        """
        if self._closed:
            raise StoreClosed("the cluster has been closed")

    def close(self) -> list[Store]:
        """Open nothing any more; return what is open."""
        with self._state:
            self._closed = True
            return list(self.stores.values())

    def make_locks(self) -> None:
        """Begin with free locks, as in a forked child: the threads that held them are not there."""
        self._state = threading.Lock()
        self._entering = threading.Lock()
        self._opening: dict[int, threading.Lock] = {}
