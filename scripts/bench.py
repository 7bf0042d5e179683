"""Measure txnstore against loops over the raw driver, both in the same run, and print the ratios.

Absolute figures say little on a shared machine; each ratio comes from rounds that take turns, and is their median.
`scripts/bench --help` lists the options.  PostgreSQL comes from where the tests get it.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

from scripts import (
    bench_branches,
    bench_clients,
    bench_cluster,
    bench_enlist,
    bench_groups,
    bench_hanging,
    bench_log,
    bench_outbox,
)
from scripts.bench_support import Bench, Raw, Result, number, print_table
from txnstore.db.opening import open_store
from txnstore.testing.servers import choose_server

BENCHES = (
    *bench_log.BENCHES,
    *bench_clients.BENCHES,
    *bench_groups.BENCHES,
    *bench_outbox.BENCHES,
    *bench_enlist.BENCHES,
    *bench_branches.BENCHES,
    *bench_cluster.BENCHES,
    *bench_hanging.BENCHES,
)


@contextmanager
def databases(names: list[str], *, connections_max: int = 100) -> Iterator[list[tuple[str, str]]]:
    """Give the URL of an empty database for each name; servers and files are gone afterwards."""
    settings = {"max_connections": str(connections_max)}
    with ExitStack() as stack:
        urls = []
        for name in names:
            if name == "sqlite":
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="txnstore-bench-"))
                urls.append((name, f"sqlite:///{folder}/bench.db"))
            else:
                server = stack.enter_context(choose_server().start(fsync=True, settings=settings))
                server.create_database("txnstore_bench")
                stack.callback(server.drop_database, "txnstore_bench")
                urls.append((name, server.url("txnstore_bench")))
        yield urls


def show(results: list[Result]) -> None:
    """Print the results as a table."""
    print_table(
        f"txnstore against the raw driver ({platform.machine()}, Python {platform.python_version()})",
        ("database", "what", "against", "ours", "other", "unit", "ratio", "reach"),
        [
            (
                result.database,
                result.name,
                result.against,
                *(number(figure) for figure in (result.ours, result.other)),
                result.unit,
                f"{result.ratio:.2f}{'' if result.reached else ' !'}",
                result.reach,
            )
            for result in results
        ],
        numbers={"ours", "other", "ratio"},
    )


def main() -> None:
    """Run the benchmarks that the command line asks for."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], action="append", help="only this one")
    parser.add_argument("--only", help="only benchmarks with this in their name, such as fetch")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each measurement (7)")
    parser.add_argument("--batches", type=int, default=30, help="batches of 1,000 records a round (30)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    results: list[Result] = []
    with databases(options.database or ["sqlite", "postgresql"]) as urls:
        for database, url in urls:
            raw = Raw(url)
            with open_store(url) as store:
                bench = Bench(database, url, store, raw, options.rounds, options.batches)
                for measure in BENCHES:
                    if options.only is None or options.only in measure.__name__:
                        results.extend(measure(bench))
            raw.close()
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        show(results)


if __name__ == "__main__":
    main()
