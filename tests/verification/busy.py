"""A store in which all sorts of things go on: what the checker of invariants finds sound, until somebody breaks it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from sqlalchemy import Connection

from tests.crash.scenarios import FIRST, SECOND, SENT, all_of, decides, ends
from tests.crash.worlds import Place as Worlds
from tests.crash.worlds import World
from txnstore.db.store import Store
from txnstore.log.append import append
from txnstore.testing.invariants import Place
from txnstore.testing.manual_clock import ManualClock
from txnstore.transactions.coordinator import TransactionCoordinator


@dataclass(frozen=True)
class Busy:
    """A store in which all sorts of things go on, and all is well."""

    store: Store
    over: World
    aborted: World
    opened: World
    decided: World
    plain: World

    def name_of(self, place: Place) -> str:
        """Return which world it is in, and there which partition, from which offset on."""
        for name in ("over", "aborted", "opened", "decided", "plain"):
            world: World = getattr(self, name)
            if place.partition_id in world.partition_ids:
                partition = f"{name}/{world.partition_ids.index(place.partition_id)}"
                return partition if place.offset is None else f"{partition}@{place.offset}"
            if place.partition_id is None and world.transactional_id == place.transactional_id:
                return name
        return str(place)


def make_busy(store: Store) -> Busy:
    place = Worlds(str(store.url), ManualClock(), worlds_per_topic=5)
    return Busy(
        store,
        over=place.make(store, ends(FIRST, SECOND, commit=True, offsets=True)),
        aborted=place.make(store, all_of(SENT, ends(commit=False))),
        opened=place.make(store, SENT),
        decided=place.make(store, all_of(SENT, decides(commit=True))),
        plain=place.make(store, writes_plainly),
    )


def writes_plainly(world: World, store: Store) -> World:
    moved = replace(world, producer=TransactionCoordinator(store).init_producer_id(None).identity)
    for flush, epoch in ((FIRST, 0), (SECOND, 0), (FIRST, 1)):
        store.write(partial(append_plainly, moved, flush, epoch=epoch))
    return moved


def append_plainly(world: World, flush: str, connection: Connection, *, epoch: int) -> None:
    who = replace(world.producer, epoch=epoch)
    append(connection, world.batches(flush, producer=who, is_transactional=False))
