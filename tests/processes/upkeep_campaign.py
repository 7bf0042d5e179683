"""A fault campaign over the maintenance: all expires all the time, everybody is killed, and nothing may get lost by it.

`scripts/soak-maintenance` runs it for as long as it is told; `test_upkeep.py` for some seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg
from sqlalchemy import func, select

from tests.processes.conftest import Processes
from tests.processes.group_transforming import GroupPlan
from tests.processes.lost_answers import LOST, RECOGNISED, work_without_answers
from tests.processes.upkeep_ledger import Account
from tests.processes.upkeep_programs import (
    CHURN,
    GROUP,
    ORDERS,
    PLAIN,
    TOPICS,
    TOTALS,
    Times,
    delete_old_records,
    maintain,
    make_and_delete_topics,
    run_query,
    transform,
    verified,
    verify,
    visit,
    write_idempotently,
    write_in_transactions,
)
from tests.tools.workload import Job
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.opening import open_store
from txnstore.db.schema import group_offsets, producer_states, transaction_log, transactions
from txnstore.db.store import Store
from txnstore.groups.offsets import read_offsets
from txnstore.log.bounds import read_bounds
from txnstore.log.fetch import fetch
from txnstore.log.topics import change_topic_configs, create_topic, find_topics, list_topics, lock_topic_configs
from txnstore.maintenance.loop import Maintenance
from txnstore.testing.invariants import Invariant, find_violations
from txnstore.testing.postgres_server import PostgresServer, connection_string
from txnstore.testing.private_cluster import PrivateCluster
from txnstore.transactions.protocol import TransactionState

TIMES: Final = Times(producer_ms=1_000, transactional_id_ms=4_000, journal_ms=2_000, transaction_timeout_ms=2_500)
SESSION_TIMEOUT_MS: Final = 3_000
#: How many times as long as those of others transactions of the group's members may be open.
MEMBERS_PATIENCE: Final = 6
#: When transactional ids expire while what is left comes to its end.
SETTLING_MS: Final = 600_000
SETTINGS: Final = {
    "auto.create.topics.enable": "false",
    "offsets.retention.minutes": "1",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "50",
    "transaction.remove.expired.transaction.cleanup.interval.ms": "30",
    "producer.id.expiration.check.interval.ms": "30",
    "offsets.retention.check.interval.ms": "200",
}
#: How long until the next trouble, how long who was sent away is away, how long who is stopped stands still.
CALM_SECONDS, AWAY_SECONDS, STOPPED_SECONDS = (0.2, 1.2), (0.0, 0.6), (0.1, 4.0)
ACTIONS: Final = ("kill", "kill", "stop", "replace")
#: How long who was replaced while it was stopped goes on once it wakes.
ZOMBIE_SECONDS: Final = (0.2, 2.0)
#: How often somebody is chosen who has not done anything yet.
DIES_YOUNG: Final = 0.15
#: About how often sessions of the server are ended, one is killed (and all of them with it), the server is.
SESSION_SECONDS, BACKEND_SECONDS, SERVER_SECONDS = 1.0, 25.0, 60.0
SAMPLE_SECONDS: Final = 2.0
#: How long what is left may take once nobody is killed any more, as long as it goes on.
PATIENCE_SECONDS: Final = 60.0
#: How many rows there may be at any time, though the maintenance is killed again and again.
ROWS_MAX: Final = {"producer_states": 4_000, "transactions": 2_000, "transaction_log": 40_000, "group_offsets": 4_000}
#: How much of a violation is shown.
SHOWN_CHARACTERS: Final = 3_000
#: A campaign in which not all of this was done shows nothing: what everybody does, and what the maintenance does.
MUST_BE_SEEN: Final = (
    "committed",
    "topics deleted",
    "deletions of records",
    "batches",
    "renewed",
    RECOGNISED,
    "expired transactional ids forgotten",
    "silent producers forgotten",
    "journal entries deleted",
    "timed out transactions aborted",
)
#: What else is told.
COUNTED: Final = (
    "topics deleted",
    "deletions of records",
    "deletions that failed",
    "visits",
    "batches",
    "renewed",
    LOST,
    RECOGNISED,
)
#: Offsets stay for a minute at least.
OFFSETS_GO: Final = ("groups cleared of expired offsets",)
OFFSETS_GO_SECONDS: Final = 150


_OPEN_TRANSACTIONS: Final = select(transactions.c.transactional_id).where(
    transactions.c.state.in_(
        [TransactionState.ONGOING, TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT]
    )
)


@dataclass
class Campaign:
    """One store, who works on it, and what befalls them."""

    url: str
    folder: Path
    processes: Any
    seed: int
    _: KW_ONLY
    server: PostgresServer | None = None
    """The server, if sessions of it may be ended; None for SQLite."""

    kills_server: bool = False
    """Whether the server may be killed too."""

    longer_max: float = 2.0
    """How many times as long it may run until everything was seen."""

    has_spark: bool = False
    """Whether there is a Spark too."""

    is_small: bool = False
    """Whether one of a kind is enough."""

    must_be_seen: Sequence[str] = MUST_BE_SEEN
    """What has to be seen at least; otherwise the campaign shows nothing."""

    times: Times = TIMES
    told: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    """The largest numbers of rows."""

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._lives: Counter[str] = Counter()
        self._at_work: dict[str, Any] = {}
        self._away_until: dict[str, float] = {}
        self._stopped_until: list[tuple[float, Any]] = []
        self._zombies_until: list[tuple[float, Any]] = []
        self._store: Store = open_store(self.url)
        self._store.write(self._set_up)
        self._spark = self._start_spark() if self.has_spark else None
        self._programs = programs(self.times, is_small=self.is_small)

    def _start_spark(self) -> Any:
        # Needs pyspark and a Java.
        from tests.processes.upkeep_spark import SparkRounds

        return SparkRounds(self.url, self.folder, self.seed)

    def _set_up(self, connection: Any) -> None:
        expiries = {
            "producer.id.expiration.ms": self.times.producer_ms,
            "transactional.id.expiration.ms": self.times.transactional_id_ms,
            "txnstore.transaction.log.retention.ms": self.times.journal_ms,
        }
        change_store_settings(connection, {**SETTINGS, **{name: str(ms) for name, ms in expiries.items()}})
        for name, count in TOPICS.items():
            create_topic(connection, name, partition_count=count)
        # Of what is repeated after its producer was forgotten the store's clock tells that it was.
        change_topic_configs(
            connection, lock_topic_configs(connection, PLAIN), {"message.timestamp.type": "LogAppendTime"}
        )

    # --- trouble

    def run(self, seconds: float) -> None:
        """Let them work and make trouble."""
        for name in self._programs:
            self._start(name)
        began = time.monotonic()
        next_sample = 0.0
        # What did not get to see everything shows nothing: a slow machine gets more time for it.
        while not self._errors() and (
            (elapsed := (now := time.monotonic()) - began) < seconds
            or (elapsed < self.longer_max * seconds and self._has_to_wait(seconds))
        ):
            self._look()
            if now >= next_sample:
                next_sample = now + SAMPLE_SECONDS
                self._sample()
            time.sleep(calm := self._chance.uniform(*CALM_SECONDS))
            if elapsed >= seconds:
                # What is waited for comes sooner or later where nobody is killed before.
                continue
            self._trouble()
            if self.server is not None:
                self._trouble_server(calm)
        self._calm()

    def _has_to_wait(self, seconds: float) -> bool:
        account = Account.of(self.folder)
        return not account.violations and bool(self.what_was_not_done(account, seconds))

    def _start(self, name: str) -> None:
        self._lives[name] += 1
        # A member that is too slow for its own timeout, as on a slow machine, would never come to its end.
        timeout_ms = self.times.transaction_timeout_ms * (MEMBERS_PATIENCE if name.startswith("member") else 1)
        job = Job(self.url, self.folder, name, self._lives[name], {}, self.seed, timeout_ms=timeout_ms)
        program, *arguments = self._programs[name]
        self._at_work[name] = self.processes.start(program, job, *arguments)

    def _look(self) -> None:
        """Wake who has stood still for long enough; start who was away, and who has ended."""
        now = time.monotonic()
        for until, process in list(self._stopped_until):
            if now >= until:
                self.processes.go_on(process)
                self._stopped_until.remove((until, process))
        for until, process in list(self._zombies_until):
            # Not everybody is fenced by a next life.
            if now >= until:
                self.processes.kill(process)
                self._zombies_until.remove((until, process))
        for name, process in list(self._at_work.items()):
            if process.exitcode is not None:
                self._send_away(name)
        for name, until in list(self._away_until.items()):
            if now >= until:
                del self._away_until[name]
                self._start(name)

    def _send_away(self, name: str) -> None:
        del self._at_work[name]
        self._away_until[name] = time.monotonic() + self._chance.uniform(*AWAY_SECONDS)

    def _trouble(self) -> None:
        stopped = [process for _, process in self._stopped_until]
        names = sorted(name for name, process in self._at_work.items() if process not in stopped)
        if self._chance.random() >= DIES_YOUNG:
            names = [name for name in names if self._has_begun(name)]
        if not names:
            return
        name, action = self._chance.choice(names), self._chance.choice(ACTIONS)
        process = self._at_work[name]
        if action == "kill" and name.startswith("member") and self._chance.random() < 0.5:
            action = "leave"
        self.told[f"{action}: {name.split('-')[0]}"] += 1
        if action == "kill":
            self.processes.kill(process)
            self._send_away(name)
        elif action == "leave":
            self.processes.ask_to_end(process)
            self._send_away(name)
        else:
            self.processes.stop(process)
            until = time.monotonic() + self._chance.uniform(*STOPPED_SECONDS)
            self._stopped_until.append((until, process))
            if action == "replace" and name != "verifier":
                # Its next life takes over, and it finds out once it wakes.
                self._zombies_until.append((until + self._chance.uniform(*ZOMBIE_SECONDS), process))
                self._send_away(name)

    def _has_begun(self, name: str) -> bool:
        life = f"{name}#{self._lives[name]}"
        return any((self.folder / f"{life}.{kind}").exists() for kind in ("ledger", "count"))

    def _trouble_server(self, seconds: float) -> None:
        assert self.server is not None
        if self._chance.random() < seconds / SESSION_SECONDS:
            self._end_session(signal.SIGTERM)
        if not self.kills_server:
            return
        if self._chance.random() < seconds / BACKEND_SECONDS:
            self._end_session(signal.SIGKILL)
        if self._chance.random() < seconds / SERVER_SECONDS:
            self.told["kill: server"] += 1
            self.server.kill()
            time.sleep(self._chance.uniform(0.0, 1.0))
            self.server.start()

    def _end_session(self, number: signal.Signals) -> None:
        with contextlib.suppress(psycopg.Error), psycopg.connect(connection_string(self.url), autocommit=True) as own:
            sessions = own.execute(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
                " AND backend_type = 'client backend'"
            ).fetchall()
            if not sessions:
                return
            (pid,) = self._chance.choice(sorted(sessions))
            self.told[f"{number.name}: session"] += 1
            if number is signal.SIGKILL:
                # The session may have ended by itself.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            else:
                own.execute("SELECT pg_terminate_backend(%s)", [pid])

    def _sample(self) -> None:
        for name, count in self._count_rows().items():
            self.rows[name] = max(self.rows[name], count)

    def _count_rows(self) -> dict[str, int]:
        tables = (producer_states, transactions, transaction_log, group_offsets)
        return self._store.read(
            lambda connection: {
                table.name: connection.execute(select(func.count()).select_from(table)).scalar_one() for table in tables
            }
        )

    def _errors(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.folder.glob("*.error")}

    # --- the end

    def _calm(self) -> None:
        """Wake everybody; let those go on only who bring to an end what the others have left."""
        for _, process in self._stopped_until:
            self.processes.go_on(process)
        self._stopped_until.clear()
        for _, process in self._zombies_until:
            self.processes.kill(process)
        # On a slow machine the members would else be forgotten before their first commit, again and again. Only now:
        # who was stopped may have held the write lock.
        self._set_expiry_of_ids(SETTLING_MS)
        helpers = [name for name in self._programs if name.split("-")[0] in {"verifier", "maintenance", "member"}]
        for name, process in self._at_work.items():
            if name not in helpers:
                self.processes.kill(process)
        self._programs = {name: self._programs[name] for name in helpers}
        self._at_work = {name: process for name, process in self._at_work.items() if name in helpers}
        self._away_until = dict.fromkeys(helpers - self._at_work.keys(), 0.0)

    def _set_expiry_of_ids(self, expiry_ms: int) -> None:
        changes = {"transactional.id.expiration.ms": str(expiry_ms)}
        self._store.write(lambda connection: change_store_settings(connection, changes))

    def settle(self) -> list[str]:
        """Let what is left come to its end, then look at everything; return what is wrong."""
        # While the maintenance still runs.
        problems: list[str] = [] if self._spark is None else self._spark.finish()
        before: object = None
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (left := self._left_over()) and time.monotonic() < deadline and not self._errors():
            self._look()
            if left != before:
                before, deadline = left, time.monotonic() + PATIENCE_SECONDS
            time.sleep(0.2)
        if left and not self._errors():
            problems.append(f"held back: {left}")
        for name, process in self._at_work.items():
            if name.startswith("member") and process.exitcode is None:
                self.processes.ask_to_end(process)
                process.join(PATIENCE_SECONDS)
        self.processes.kill_all()
        problems += [f"{name}:\n{text}" for name, text in self._errors().items()]
        account = Account.of(self.folder)
        live = dict(account.seen)
        self._read_all(account)
        if not left:
            problems += [
                f"hidden from who read all the while: {account.seen[position][0]} at {position}"
                for position in sorted(account.seen.keys() - live.keys())
                if position[0] in TOPICS
            ]
        checked = account.check(outputs=TOTALS, source=ORDERS, producer_expiry_ms=self.times.producer_ms)
        problems += account.violations
        is_repeated = checked["repeated after expiry, as documented"] > 0
        problems += [
            str(violation)
            for violation in find_violations(self._store, at_rest=not self._errors(), producers_expire=True)
            if not (is_repeated and violation.invariant is Invariant.SEQUENCES_FOLLOW)
        ]
        problems += self._last_pass()
        self._tell(account, checked)
        return problems

    def _left_over(self) -> dict[str, Any]:
        """Return what is not at rest: transactions that are open, partitions that are held back, what was not read."""
        read = verified(self.folder)

        def work(connection: Any) -> dict[str, Any]:
            topics = {topic.name: topic for topic in find_topics(connection, list(TOPICS))}
            # One that has not written anything yet holds no partition back.
            left: dict[str, Any] = {
                f"transaction {transactional_id}": "open"
                for transactional_id in connection.execute(_OPEN_TRANSACTIONS).scalars()
            }
            committed = read_offsets(connection, GROUP, topics[ORDERS].partition_ids).offsets
            for name, topic in topics.items():
                bounds = read_bounds(connection, topic.partition_ids)
                for number, partition_id in enumerate(topic.partition_ids):
                    end = bounds[partition_id]
                    if end.last_stable_offset < end.high_watermark:
                        left[f"{name}/{number}"] = f"open at {end.last_stable_offset}"
                        continue
                    at = read.get((name, number), 0)
                    if self._has_records(connection, partition_id, max(at, end.log_start_offset)):
                        left[f"{name}/{number}"] = f"read up to {at}"
                    if name == ORDERS:
                        group_at = committed[partition_id].offset if partition_id in committed else 0
                        if self._has_records(connection, partition_id, max(group_at, end.log_start_offset)):
                            left[f"{name}/{number} by {GROUP}"] = f"read up to {group_at}"
            return left

        return self._store.read(work)

    @staticmethod
    def _has_records(connection: Any, partition_id: int, offset: int) -> bool:
        while True:
            page = fetch(connection, {partition_id: offset})[partition_id]
            if any(True for batch in page.batches for _ in batch.records(offset)):
                return True
            if page.next_offset <= offset or page.next_offset >= page.bounds.last_stable_offset:
                return False
            offset = page.next_offset

    def _read_all(self, account: Account) -> None:
        """Read what is committed of everything that is there, with no client in between."""
        topics = self._store.read(lambda connection: find_topics(connection, list_topics(connection)))
        for topic in topics:
            if topic.name not in TOPICS and not topic.name.startswith(CHURN):
                continue
            for number, partition_id in enumerate(topic.partition_ids):
                bounds = self._store.read(lambda connection, of=partition_id: read_bounds(connection, [of])[of])
                offset = bounds.log_start_offset
                while offset < bounds.last_stable_offset:
                    page = self._store.read(
                        lambda connection, of=partition_id, at=offset: fetch(connection, {of: at})[of]
                    )
                    for batch in page.batches:
                        for record in batch.records(offset):
                            value = (record.value or b"").decode()
                            text = f"{(record.key or b'').decode()}={value}" if topic.name == TOTALS else value
                            account.see((topic.name, number, record.offset), text, record.timestamp_ms)
                    offset = page.next_offset

    def _last_pass(self) -> Iterator[str]:
        """Let everything expire, and yield of what is still there."""
        self._set_expiry_of_ids(self.times.transactional_id_ms)
        time.sleep(max(self.times.transactional_id_ms, self.times.producer_ms, self.times.journal_ms) / 1000 + 0.1)
        for _ in range(2):
            # The journal of what expires is written at that moment, and trimmed a while later.
            Maintenance(self._store).run_once()
            time.sleep(self.times.journal_ms / 1000 + 0.1)
        rows = self._count_rows()
        for name in ("producer_states", "transactions", "transaction_log"):
            if rows[name]:
                yield f"{rows[name]} rows of {name} are never forgotten"
        for name, count in self.rows.items():
            if count > ROWS_MAX[name]:
                yield f"{name} grew to {count} rows"

    def what_was_not_done(self, account: Account, seconds: float) -> list[str]:
        """Return what ought to have been seen in so long a campaign, and was not."""
        wanted = [*self.must_be_seen, *(OFFSETS_GO if seconds >= OFFSETS_GO_SECONDS else ())]
        return [name for name in wanted if not account.duties[name] and not account.counts[name]]

    def _tell(self, account: Account, checked: dict[str, int]) -> None:
        self.told.update(account.duties)
        self.told.update(checked)
        self.told.update(self._spark.told if self._spark is not None else {})
        for what in COUNTED:
            self.told[what] += account.counts[what]
        for name, count in self.rows.items():
            self.told[f"largest {name}"] = count

    def close(self) -> None:
        """End all that is left of it."""
        if self._spark is not None:
            self._spark.stop()
        self.processes.kill_all()
        self._store.close()


def programs(times: Times, *, is_small: bool) -> dict[str, tuple[Any, ...]]:
    """Return who is at work, with which program; some do not hear of what they have committed."""
    count, plain_count = (5, 3) if is_small else (10, 6)
    of_all: dict[str, tuple[Any, ...]] = {
        "verifier": (verify,),
        "maintenance-1": (maintain,),
        "transactions-2": (work_without_answers, write_in_transactions, times, count),
        "idempotent-1": (work_without_answers, write_idempotently, times, plain_count),
        "member-1": (transform, plan_of("member-1")),
        "churn-1": (make_and_delete_topics, times),
        "deleter-1": (delete_old_records,),
        "sink-1": (work_without_answers, run_query, times),
    }
    if is_small:
        return of_all
    return of_all | {
        "maintenance-2": (maintain,),
        "transactions-1": (write_in_transactions, times, count),
        "member-2": (work_without_answers, transform, plan_of("member-2")),
        "visitor-1": (visit,),
    }


def plan_of(member: str) -> GroupPlan:
    """Return what a member of the group is to do."""
    return GroupPlan(ORDERS, TOTALS, GROUP, "cooperative-sticky", SESSION_TIMEOUT_MS, member)


def run_campaign(campaign: Campaign, seconds: float) -> list[str]:
    """Run it to its end, and return what is wrong."""
    try:
        campaign.run(seconds)
        problems = campaign.settle()
        undone = campaign.what_was_not_done(Account.of(campaign.folder), seconds)
        return problems + [f"not seen at all, so that nothing is shown: {name}" for name in undone]
    finally:
        campaign.close()


@contextlib.contextmanager
def _database(kind: str, folder: Path) -> Iterator[tuple[str, PostgresServer | None]]:
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'store.db'}", None
        return
    with PrivateCluster(fsync=False, settings={"max_connections": "300"}) as cluster:
        cluster.create_database("campaign")
        yield cluster.url("campaign"), cluster


def main() -> int:
    """Run a campaign on each database that is asked for."""
    parser = argparse.ArgumentParser(prog="scripts/soak-maintenance", description=__doc__)
    parser.add_argument("seconds", type=float, help="for how long, on each database")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), action="append")
    parser.add_argument(
        "--seed", type=int, default=None, help="repeats what happens to which process, not at which instruction"
    )
    parser.add_argument("--spark", action="store_true", help="with a small Spark on the same store")
    arguments = parser.parse_args()
    failed = False
    for kind in arguments.database or ("sqlite", "postgresql"):
        seed = random.randrange(2**32) if arguments.seed is None else arguments.seed
        folder = Path(tempfile.mkdtemp(prefix=f"maintenance-{kind}-"))
        print(f"{kind}: seed {seed}, files in {folder}", flush=True)  # noqa: T201 - for people
        with _database(kind, folder) as (url, server):
            kills_server = server is not None
            campaign = Campaign(
                url, folder, Processes(), seed, server=server, kills_server=kills_server, has_spark=arguments.spark
            )
            problems = run_campaign(campaign, arguments.seconds)
        print(json.dumps(dict(sorted(campaign.told.items())), indent=2), flush=True)  # noqa: T201 - for people
        if problems:
            failed = True
            print(f"{kind}: {len(problems)} violations; seed {seed}, files kept in {folder}")  # noqa: T201 - for people
            print("\n".join(problem[:SHOWN_CHARACTERS] for problem in problems), flush=True)  # noqa: T201 - for people
        else:
            shutil.rmtree(folder)
            print(f"{kind}: nothing lost, doubled or hidden", flush=True)  # noqa: T201 - for people
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
