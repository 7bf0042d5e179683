"""The cost of several databases: throughput with 1 to 3 PostgreSQL servers, and what a transaction takes.

The servers run on the same cores, so this shows what the spreading costs and what it gains while one of them waits for
its disk; it cannot show what further machines would give.  Run it as a section of the bench, or by itself:

    python -m scripts.bench_cluster
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

from sqlalchemy import event

from scripts.bench_support import Bench, Result
from txnstore import Producer
from txnstore.admin import AdminClient, NewTopic
from txnstore.testing.private_cluster import PrivateCluster

SERVERS = (1, 2, 3)
PARTITIONS = 6
RECORDS_PER_TRANSACTION = 1_000
VALUE = b"v" * 100
SECONDS = 5.0
#: Partitions are made known, the decision is taken, the rest is told that it is complete: however many databases.
COMMITS_MAX = 3
PATIENCE_SECONDS = 60.0


@contextlib.contextmanager
def servers(count: int) -> Iterator[str]:
    """Start so many private servers, and return the URLs of a database in each."""
    with ExitStack() as stack:
        started = [stack.enter_context(PrivateCluster()) for _ in range(count)]
        for server in started:
            server.create_database("bench")
        yield ", ".join(server.url("bench") for server in started)


def make_topic(urls: str) -> None:
    """Make the topic, with its partitions spread evenly."""
    with AdminClient({"bootstrap.servers": urls}) as admin:
        new = NewTopic("bench", PARTITIONS, config={"txnstore.placement": "roundrobin"})
        admin.create_topics([new])["bench"].result(PATIENCE_SECONDS)


def transact(producer: Producer, records: int) -> None:
    """Commit one transaction with records in every partition."""
    producer.begin_transaction()
    for number in range(records):
        producer.produce("bench", VALUE, partition=number % PARTITIONS)
    producer.commit_transaction(PATIENCE_SECONDS)


def throughput(urls: str, seconds: float = SECONDS) -> float:
    """Return the records a second of one producer with transactions of 1,000."""
    with Producer({"bootstrap.servers": urls, "transactional.id": "bench"}) as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        transact(producer, RECORDS_PER_TRANSACTION)
        began, count = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            transact(producer, RECORDS_PER_TRANSACTION)
            count += RECORDS_PER_TRANSACTION
        return count / (time.monotonic() - began)


def database_transactions(urls: str) -> dict[str, int]:
    """Return how many database transactions one txnstore transaction takes in each database, the coordinator first."""
    commits: Counter[int] = Counter()
    with Producer({"bootstrap.servers": urls, "transactional.id": "count"}) as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        transact(producer, PARTITIONS)
        cluster = producer._connection.cluster()  # noqa: SLF001 - what it has opened is counted
        coordinator = cluster.coordinator_id_of("count")
        for store in cluster.opened():
            database_id = store.database_id

            def began(*_: object, database_id: int = database_id) -> None:
                commits[database_id] += 1

            event.listen(store.engine, "checkout", began)
        transact(producer, PARTITIONS)
    others = [count for database_id, count in sorted(commits.items()) if database_id != coordinator]
    return {"coordinator": commits[coordinator], "others": sum(others), "databases": 1 + len(others)}


def bench_cluster(bench: Bench) -> Iterator[Result]:
    """One producer over 2 and 3 servers against the same over one, and its database transactions against one."""
    if bench.raw.is_sqlite:
        return
    rates: dict[int, float] = {}
    for count in SERVERS:
        with servers(count) as urls:
            make_topic(urls)
            cost = database_transactions(urls)
            rates[count] = throughput(urls)
        if count > 1:
            name, against = f"transactional produce over {count} servers", "over one server, same cores"
            ratio = rates[count] / rates[1]
            yield Result("postgresql", name, against, "records/s", rates[count], rates[1], ratio, "-", reached=True)
            name, against = f"database transactions at the coordinator, {count} databases", "one database"
            number = float(cost["coordinator"])
            yield Result(
                "postgresql", name, against, "commits", number, 1.0, number, f"<= {COMMITS_MAX}", number <= COMMITS_MAX
            )


def main() -> None:
    """Print both for each number of servers."""
    print("servers  records/s  of one  database transactions: coordinator  others", flush=True)
    first = None
    for count in SERVERS:
        with servers(count) as urls:
            make_topic(urls)
            cost = database_transactions(urls)
            rate = throughput(urls)
        first = first or rate
        print(f"{count:7}  {rate:9,.0f}  {rate / first:6.2f}  {cost['coordinator']:35}  {cost['others']:6}", flush=True)


BENCHES = (bench_cluster,)

if __name__ == "__main__":
    main()
