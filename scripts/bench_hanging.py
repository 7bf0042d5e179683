"""The time in which transactions that nobody ends are aborted, many of them at the same moment.

They are planted, as clients leave them that die, and all time out together.  Measured is when the last of them lets its
readers go on, from its deadline, by who helps: `txnstore maintain`, a reader that waits for them, or a producer that
writes to the same partition.  Run it as a section of the bench, or by itself:

    python -m scripts.bench_hanging --count 10000
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count

from sqlalchemy import Connection, update

from scripts.bench_support import Bench, Result, number, print_table
from tests.tools.hanging import plant
from txnstore import Consumer, Producer, TopicPartition
from txnstore.admin import AdminClient, NewTopic
from txnstore.db.cluster.cluster import Cluster, open_cluster
from txnstore.db.schema import transactions
from txnstore.log.append import Append, append
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import encode
from txnstore.log.topics import get_topic
from txnstore.maintenance.loop import Maintenance
from txnstore.model import Record
from txnstore.testing.servers import choose_server
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.rows import read_now_ms

COUNT = 10_000
TIMEOUT_MS = 900_000
#: From when all is planted to the moment when their time is up.
LEFT_MS = 1_500
#: How long readers may wait beyond the timeout.
LATE_MS_MAX = 1_000.0
LOOK_SECONDS = 0.02
WRITE_SECONDS = 0.02
PATIENCE_SECONDS = 300.0
TOPIC = "hanging"
HELPERS = ("maintain", "reader", "producer")
KINDS = ("sqlite", "postgresql", "cluster")
_numbers = count()


@dataclass(frozen=True)
class Freed:
    """One measurement."""

    kind: str
    partitions: int
    helper: str
    first_ms: float
    """When the first was let go, after its time was up."""

    last_ms: float
    waits_ms: Sequence[float]
    """How long writes took meanwhile."""

    load: float


def free(url: str, kind: str, *, transactions_count: int, partitions: int, helper: str) -> Freed:
    """Plant transactions in so many partitions each, coordinated by all databases alike; return what came of them."""
    topic = f"{TOPIC}-{next(_numbers)}"
    with AdminClient({"bootstrap.servers": url}) as admin:
        new = NewTopic(topic, partitions, config={"txnstore.placement": "roundrobin"})
        admin.create_topics([new])[topic].result(PATIENCE_SECONDS)
    with open_cluster(url) as cluster:
        stores = list(cluster.stores())
        partition_ids = cluster.controller.read(partial(get_topic, name=topic)).partition_ids
        for store in stores:
            alone = None if cluster.is_alone else cluster
            plant(store, partition_ids, transactions_count // len(stores), timeout_ms=TIMEOUT_MS, cluster=alone)
        deadline_ms = cluster.controller.read(read_now_ms) + LEFT_MS
        for store in stores:
            store.write(partial(_let_all_time_out, deadline_ms))
        lag_ms = time.time() * 1000 - cluster.controller.read(read_now_ms)
        deadline_seconds = time.monotonic() + (deadline_ms + lag_ms) / 1000 - time.time()
        with _helping(helper, url, cluster, topic):
            return _watch(cluster, partition_ids, deadline_seconds, kind, helper)


def _let_all_time_out(deadline_ms: int, connection: Connection) -> None:
    start_ms = deadline_ms - TIMEOUT_MS
    late = update(transactions).where(transactions.c.state == int(TransactionState.ONGOING))
    connection.execute(late.values(start_ms=start_ms, deadline_ms=deadline_ms))


def _watch(cluster: Cluster, partition_ids: Sequence[int], deadline_seconds: float, kind: str, helper: str) -> Freed:
    """Look until nothing holds readers back, and write beside it."""
    stop, waits_ms = threading.Event(), list[float]()
    writer = threading.Thread(target=_write_on, args=(cluster, partition_ids[0], stop, waits_ms))
    writer.start()
    began = _stable(cluster, partition_ids)
    first = last = 0.0
    try:
        while not last:
            now = time.monotonic()
            assert now < deadline_seconds + PATIENCE_SECONDS, "nobody aborts them"
            stable = _stable(cluster, partition_ids)
            first = first or (now if stable != began else 0.0)
            last = now if all(is_free for _, is_free in stable.values()) else 0.0
            time.sleep(LOOK_SECONDS)
    finally:
        stop.set()
        writer.join()
    first_ms, last_ms = ((moment - deadline_seconds) * 1000 for moment in (first, last))
    return Freed(kind, len(partition_ids), helper, first_ms, last_ms, waits_ms, os.getloadavg()[0])


def _stable(cluster: Cluster, partition_ids: Collection[int]) -> dict[int, tuple[int, bool]]:
    """Return of each partition the last stable offset, and whether nothing is open in it."""
    found: dict[int, tuple[int, bool]] = {}
    for database_id, own in cluster.by_leader(partition_ids).items():
        for partition_id, of in cluster.own(database_id).read(partial(read_bounds, partition_ids=own)).items():
            found[partition_id] = (of.last_stable_offset, of.last_stable_offset == of.high_watermark)
    return found


def _write_on(cluster: Cluster, partition_id: int, stop: threading.Event, waits_ms: list[float]) -> None:
    store = cluster.own(cluster.leader_of_partition(partition_id))
    while not stop.wait(WRITE_SECONDS):
        began = time.monotonic()
        store.write(lambda connection: append(connection, [Append(partition_id, encode([Record(b"beside")]))]))
        waits_ms.append((time.monotonic() - began) * 1000)


@contextlib.contextmanager
def _helping(helper: str, url: str, cluster: Cluster, topic: str) -> Iterator[None]:
    """Let somebody help, who knows of nothing before."""
    stop = threading.Event()
    work: list[Callable[[], object]]
    if helper == "maintain":
        work = [partial(Maintenance(store, cluster).run, stop) for store in cluster.stores()]
    else:
        work = [partial({"reader": _read_on, "producer": _produce_on}[helper], url, topic, stop)]
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _read_on(url: str, topic: str, stop: threading.Event) -> None:
    settings = {"bootstrap.servers": url, "group.id": "waiting", "auto.offset.reset": "earliest"}
    with Consumer({**settings, "txnstore.maintenance": False}) as consumer:
        consumer.assign([TopicPartition(topic, partition) for partition in _partitions_of(consumer, topic)])
        while not stop.is_set():
            consumer.poll(0.1)


def _produce_on(url: str, topic: str, stop: threading.Event) -> None:
    with Producer({"bootstrap.servers": url, "txnstore.maintenance": False}) as producer:
        partitions = _partitions_of(producer, topic)
        for partition in partitions:
            producer.produce(topic, b"once", partition=partition)
        producer.flush(PATIENCE_SECONDS)
        stop.wait()


def _partitions_of(client: Consumer | Producer, topic: str) -> list[int]:
    return sorted(client.list_topics(topic, PATIENCE_SECONDS).topics[topic].partitions)


def bench_hanging(bench: Bench) -> Iterator[Result]:
    """The time in which `txnstore maintain` has freed the readers of many, against that which it may take."""
    found = free(bench.url, bench.database, transactions_count=COUNT, partitions=1, helper="maintain")
    name, against = f"{COUNT} that time out at once are aborted", "what readers may wait"
    ratio = found.last_ms / LATE_MS_MAX
    yield Result(bench.database, name, against, "ms", found.last_ms, LATE_MS_MAX, ratio, "<= 1", reached=ratio <= 1)


BENCHES = (bench_hanging,)


def show(found: Sequence[Freed], transactions_count: int) -> None:
    """Print when readers were let go, and how long a writer waited."""
    print_table(
        f"{transactions_count} transactions that time out at once: when they are aborted, after that; ms",
        ("databases", "partitions", "who helps", "first", "last", "writes", "median", "99 of 100", "longest", "load"),
        [
            (
                each.kind,
                number(each.partitions),
                each.helper,
                number(each.first_ms),
                number(each.last_ms),
                number(len(each.waits_ms)),
                *(number(sorted(each.waits_ms)[int(len(each.waits_ms) * share)]) for share in (0.5, 0.99)),
                number(max(each.waits_ms)),
                f"{each.load:.1f}",
            )
            for each in found
        ],
        numbers={"partitions", "first", "last", "writes", "median", "99 of 100", "longest", "load"},
    )


@contextlib.contextmanager
def _databases(kind: str) -> Iterator[str]:
    with ExitStack() as stack:
        if kind == "sqlite":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="txnstore-bench-"))
            yield f"sqlite:///{folder}/bench.db"
            return
        server = stack.enter_context(choose_server().start(fsync=True))
        names = ["bench_1", "bench_2"][: 2 if kind == "cluster" else 1]
        for name in names:
            server.create_database(name)
            stack.callback(server.drop_database, name)
        yield ",".join(map(server.url, names))


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench_hanging", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help=f"how many transactions ({COUNT})")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only on these databases")
    parser.add_argument("--helper", choices=HELPERS, action="append", help="only with this help (txnstore maintain)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each measurement (2)")
    options = parser.parse_args()
    found = []
    for kind in options.kind or KINDS:
        with _databases(kind) as url:
            for _ in range(options.rounds):
                for helper in options.helper or ["maintain"]:
                    for partitions in (1, 2):
                        what = {"partitions": partitions, "helper": helper}
                        found.append(free(url, kind, transactions_count=options.count, **what))
    show(found, options.count)


if __name__ == "__main__":
    main()
