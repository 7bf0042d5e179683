"""Processes that take over a prepared transaction (KIP-939), in every order: one that was not replaced ends it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import pytest
from sqlalchemy import update

from tests.databases import where_it_writes
from tests.tools.elsewhere import Elsewhere
from tests.tools.interleaving import Scenario, explore
from tests.transactions.bench import Producer
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.schema import transactions
from txnstore.db.store import Store
from txnstore.errors import InvalidProducerIdMapping, ProducerFenced
from txnstore.log.fetch import fetch
from txnstore.model import ProducerIdentity
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.coordinator import TransactionCoordinator

pytestmark = pytest.mark.slow_on_postgresql

TWO_PHASE = {"enable_two_phase_commit": True}
REPLACED = (ProducerFenced, InvalidProducerIdMapping)


@dataclass
class Prepared:
    """A transaction that was prepared at an epoch, and what became of it."""

    transactional_id: str
    partition_id: int
    writes_elsewhere: bool
    #: Who came, in order; who they were over the open transaction.
    came: list[Producer] = field(default_factory=list)
    identities: list[ProducerIdentity] = field(default_factory=list)
    #: How it was ended.
    ended: list[bool] = field(default_factory=list)

    def process(self, store: Store) -> Producer:
        cluster = Elsewhere(store) if self.writes_elsewhere else None
        return Producer(TransactionCoordinator(store, cluster), self.transactional_id)

    def prepare(self, store: Store, epoch: int) -> Producer:
        producer = self.process(store)
        producer.start(**TWO_PHASE)
        row = update(transactions).where(transactions.c.transactional_id == self.transactional_id)
        store.write(lambda connection: connection.execute(row.values(producer_epoch=epoch)))
        producer.become(ProducerIdentity(producer.identity.producer_id, epoch))
        producer.send(self.partition_id, b"a")
        self.identities.append(producer.identity)
        return producer

    def take_over(self, store: Store, *, commit: bool) -> None:
        producer = self.process(store)
        is_open = producer.start(keep_prepared=True, **TWO_PHASE).ongoing is not None
        self.came.append(producer)
        if not is_open:
            return
        self.identities.append(producer.identity)
        try:
            producer.end(commit=commit)
        except REPLACED:
            assert self.came[-1] is not producer
        else:
            self.ended.append(commit)

    def check(self, store: Store) -> None:
        assert len(set(self.identities)) == len(self.identities)
        (is_committed,) = self.ended
        *zombies, last = self.came
        for zombie in zombies:
            for late in (zombie.commit, zombie.abort, partial(zombie.send, self.partition_id, b"late")):
                with pytest.raises(REPLACED):
                    late()
        last.commit(appends=[last.batch(self.partition_id, b"next")])
        pages = store.read(lambda connection: fetch(connection, {self.partition_id: 0}))
        found = [record.value for batch in pages[self.partition_id].batches for record in batch.records()]
        assert found == ([b"a", b"next"] if is_committed else [b"next"])
        assert_sound(store, at_rest=True, partition_ids=[self.partition_id])


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [5, 32766], ids=["an epoch", "the last epoch"])
@where_it_writes("writes_elsewhere")
def test_of_those_who_take_it_over_one_ends_it(world, epoch: int, writes_elsewhere: bool):
    allowed = {"transaction.two.phase.commit.enable": "true"}
    world.observer.write(lambda connection: change_store_settings(connection, allowed))

    def make() -> Scenario:
        setting = world.setting()
        prepared = Prepared(setting.transactional_id, setting.partitions["p0"], writes_elsewhere)
        prepared.came.append(prepared.prepare(world.observer, epoch))
        dead = prepared.process(world.observer)
        dead.start(keep_prepared=True, **TWO_PHASE)
        prepared.came.append(dead)
        prepared.identities.append(dead.identity)

        def at_end(finished) -> None:
            for each in finished.values():
                each.result()
            prepared.check(world.observer)
            endings.append(prepared.ended[0])

        actors = {
            "commits": partial(prepared.take_over, world.first, commit=True),
            "aborts": partial(prepared.take_over, world.second, commit=False),
        }
        return Scenario(actors, at_end=at_end)

    endings: list[bool] = []
    orders = explore(make).orders
    # Whoever comes first ends it before the other one comes, or is replaced.
    assert orders >= 6
    assert set(endings) == {True, False}
