"""What a group costs the database in which nothing happens: a few small statements a second."""

from __future__ import annotations

import json
import time
from collections import Counter
from contextlib import closing

import psycopg
import pytest

from tests.processes.idle_member import idle
from tests.processes.remote_members import PATIENCE_SECONDS, make_topic
from tests.tools.workload import Job
from txnstore.testing.postgres_server import connection_string

MEMBERS = 10
#: Some heartbeats of each member.
MEASURED_SECONDS = 9.2
LOOKS_MAX = 4
STATEMENTS_A_SECOND_MAX = 20.0
#: What goes around statements, and how SQLite notices commits: a look at memory that processes share.
NOT_COUNTED = ("BEGIN", "COMMIT", "ROLLBACK", "SET LOCAL", "PRAGMA data_version")


def transactions_of(url):
    """Return how many transactions the server has counted in the database."""
    with closing(psycopg.connect(connection_string(url), autocommit=True)) as connection:
        row = connection.execute(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
    assert row is not None
    return row[0]


@pytest.mark.slow
def test_an_idle_group_of_ten_members_costs_fewer_than_twenty_statements_a_second(url, tmp_path, processes, wait_for):
    make_topic(url, MEMBERS, "idle")
    started = [
        processes.start_with_pipe(idle, Job(url, tmp_path, f"member-{number}", 1, {}), "idle")
        for number in range(MEMBERS)
    ]
    pipes = [pipe for _, pipe in started]

    def ask(what):
        for pipe in pipes:
            pipe.send(what)
        return [pipe.recv() for pipe in pipes if pipe.poll(PATIENCE_SECONDS)]

    deadline = time.monotonic() + 3 * PATIENCE_SECONDS
    while ask("owned") != [1] * MEMBERS:
        assert time.monotonic() < deadline, ask("owned")
        assert wait_for([process for process, _ in started], 0.5) == [], [
            path.read_text() for path in tmp_path.glob("*.error")
        ]
    # Everybody has heard of the last one's partition.
    assert wait_for([process for process, _ in started], 3.5) == []
    rates: list[float] = []
    # On a busy machine it takes a while until everybody is at rest.
    while not rates or (rates[-1] >= STATEMENTS_A_SECOND_MAX and len(rates) < LOOKS_MAX):
        before = transactions_of(url) if not url.startswith("sqlite") else None
        ask("statements")
        began = time.monotonic()
        assert wait_for([process for process, _ in started], MEASURED_SECONDS) == []
        counted: Counter[str] = Counter()
        for counts in ask("statements"):
            counted.update(counts)
        seconds = time.monotonic() - began
        total = sum(count for statement, count in counted.items() if not statement.startswith(NOT_COUNTED))
        rates.append(total / seconds)
        told = {"statements a second": round(rates[-1], 1), "of which": dict(counted.most_common())}
        if before is not None:
            told["transactions a second, by the server"] = round((transactions_of(url) - before) / seconds, 1)
        print(json.dumps(told))  # noqa: T201 - the figure is for people
        # Each member looks for records and for news of the group, from time to time.
        assert total >= MEMBERS
    assert rates[-1] < STATEMENTS_A_SECOND_MAX, told
