"""Beside clients at work, and a maintenance that deletes and compacts, a verification finds nothing wrong."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
from sqlalchemy import insert

from tests.tools.campaigns import times
from txnstore import Consumer, Producer, TopicPartition
from txnstore.db.cluster.cluster import open_cluster
from txnstore.db.opening import open_store
from txnstore.db.schema import outbox
from txnstore.log.topics import create_topic
from txnstore.maintenance.duties import DUTIES
from txnstore.maintenance.turns import do_unleased
from txnstore.verification.verify import WatchState, verify

#: Looks at the least, by somebody who watches; every fourth time somebody else looks at everything.
LOOKS = times(16)
#: What everybody does at the least meanwhile, and how long that may take.
STEPS = 12
PATIENCE_SECONDS = 120.0
#: How far each of them may get ahead of whoever looks and whoever maintains: with more in the log both take longer, and
#: on a slow machine they would never come to an end.
STEPS_OF_A_LOOK = 40
ORDERS = {"retention.bytes": "4000"}
STATES = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0", "delete.retention.ms": "50"}


class AtWork:
    """Clients that do one step after the other, each in a thread of its own, until they are stopped."""

    def __init__(self, url, seed):
        self.url, self.seed = url, seed
        self.stop = threading.Event()
        self.looks = 0
        self.steps = dict.fromkeys((self.send, self.transact, self.read, self.put_in_outbox, self.maintain), 0)
        self.failures = []
        self.threads = [threading.Thread(target=self.run, args=(work,)) for work in self.steps]

    def run(self, work):
        try:
            for _ in work(random.Random(self.seed)):
                self.steps[work] += 1
                while self.is_ahead(work) and not self.stop.wait(0.01):
                    pass
                if self.stop.is_set():
                    break
        except BaseException as error:
            self.failures.append(error)
            raise

    def is_ahead(self, work):
        return self.steps[work] >= STEPS_OF_A_LOOK * (min(self.looks, self.steps[self.maintain]) + 1)

    def client(self, **more):
        return {"bootstrap.servers": self.url, **more}

    def send(self, chance):
        with Producer(self.client()) as producer:
            while True:
                for number in range(chance.randrange(1, 6)):
                    producer.produce("orders", b"x" * 100, partition=number % 2)
                producer.flush(PATIENCE_SECONDS)
                yield

    def transact(self, chance):
        with Producer(self.client(**{"transactional.id": "worker"})) as producer:
            producer.init_transactions(PATIENCE_SECONDS)
            for number in itertools.count():
                producer.begin_transaction()
                for _ in range(chance.randrange(1, 5)):
                    value = b"%d" % number if chance.random() < 0.8 else None
                    producer.produce("states", value, key=b"%d" % chance.randrange(7))
                    producer.produce("orders", b"y" * 50, partition=chance.randrange(2))
                    if chance.random() < 0.5:
                        producer.flush(PATIENCE_SECONDS)
                offsets = [TopicPartition("orders", 0, number)]
                with Consumer(self.client(**{"group.id": "copies"})) as consumer:
                    producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), PATIENCE_SECONDS)
                if chance.random() < 0.7:
                    producer.commit_transaction(PATIENCE_SECONDS)
                else:
                    producer.abort_transaction(PATIENCE_SECONDS)
                yield

    def read(self, chance):
        of_group = self.client(**{"group.id": "readers", "auto.offset.reset": "earliest"})
        with Consumer(of_group) as stays:
            stays.subscribe(["orders", "states"])
            while True:
                with Consumer(of_group) as comes:
                    comes.subscribe(["orders"])
                    for _ in range(chance.randrange(1, 8)):
                        stays.consume(10, 0.05)
                        comes.consume(10, 0.05)
                        yield

    def put_in_outbox(self, chance):
        with open_store(self.url) as store:
            while True:
                rows = [{"topic": "orders", "value": b"z"}] * chance.randrange(1, 4)
                store.write(lambda connection, rows=rows: connection.execute(insert(outbox), rows))
                yield self.stop.wait(0.01)

    def maintain(self, _):
        with open_store(self.url) as store:
            while True:
                for duty in DUTIES:
                    assert not do_unleased(store, None, duty).failed
                yield self.stop.wait(0.01)


@pytest.mark.slow
@pytest.mark.campaign
def test_beside_clients_at_work_nothing_is_wrong(txnstore_url):
    seed = random.randrange(2**32)
    with open_cluster(txnstore_url, create=False) as cluster:
        store = cluster.controller
        store.write(lambda connection: create_topic(connection, "orders", partition_count=2, config=ORDERS))
        store.write(lambda connection: create_topic(connection, "states", config=STATES))
        clients, watch = AtWork(txnstore_url, seed), WatchState()
        for thread in clients.threads:
            thread.start()
        try:
            while clients.looks < LOOKS or min(clients.steps.values()) < STEPS:
                assert not clients.failures, f"seed {seed}"
                found = verify(cluster, watch=watch if clients.looks % 4 else None)
                assert not found, "\n".join([f"seed {seed}, look {clients.looks}", *map(str, found)])
                clients.looks += 1
        finally:
            clients.stop.set()
            for thread in clients.threads:
                thread.join(PATIENCE_SECONDS)
        assert not clients.failures, f"seed {seed}"
        assert verify(cluster) == []
