"""What all tests share: the project's own plugin, under shorter names."""

from __future__ import annotations

import gc
import hashlib
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings
from sqlalchemy.engine import make_url

from tests.tools import least_privilege
from tests.tools.campaigns import times
from tests.tools.living_sessions import sessions_living_on
from txnstore.clients.upkeep import Upkeep
from txnstore.db import opening
from txnstore.db.opening import open_store
from txnstore.db.store import Store
from txnstore.log import partition_rows
from txnstore.testing.manual_clock import ManualClock
from txnstore.testing.postgres_server import connection_string
from txnstore.testing.private_cluster import (
    MEMORY_FOLDER,
    NoServerProgramsError,
    ServerFolder,
    find_programs,
    has_room,
)

pytest_plugins = ("txnstore.testing.plugin",)

# Here, as tests of several folders import it: whichever comes first.
pytest.register_assert_rewrite("tests.crash.worlds")

# How long an example takes says how busy the machine is.
settings.register_profile(
    "txnstore", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=times(100)
)
settings.load_profile("txnstore")

#: So many objects are made, and so many of such rounds, before the garbage collector looks at them: by Python's own
#: figures it took a ninth of the time in which tests are collected, and a fiftieth of that in which they run.
GARBAGE_THRESHOLDS = (50_000, 20, 10)
#: What stores have that are not made by tests.
FIRST_PARTITION_ID_MAX = opening.FIRST_PARTITION_ID_MAX
#: What all tests leave is a fifth of it.
MEMORY_BYTES_MIN = 8 * 1024**3
#: The files that take longest, those that take most first: with several processes, the last one to end is soon. Here
#: belongs each that takes more than half a minute of the whole suite.
LONG_FILES = (
    "spark/test_sink_kills.py",
    "processes/test_commit_order_history.py",
    "crash/test_transactions.py",
    "processes/test_stopped_members.py",
    "crash/test_housekeeping.py",
    "processes/test_upkeep_kills.py",
    "interleavings/test_reaper.py",
    "demo/test_demo.py",
    "moving/test_move_crashes.py",
    "processes/test_commit_order_memory.py",
    "processes/test_commit_order_rebalances.py",
    "interleavings/test_compaction.py",
    "maintenance/test_year.py",
    "processes/test_group_workers.py",
    "plans/test_plans.py",
    "consumer/test_consumer_faults.py",
    "relay/test_real_kafka.py",
    "house/test_comparison.py",
    "participants/test_crashes.py",
    "cluster/test_crashes.py",
    "cluster/test_clients_records.py",
    "interleavings/test_retention.py",
    "moving/test_move.py",
    "membership/test_group_outages.py",
    "faults/test_producer.py",
    "crash/test_second_crashes.py",
    "house/test_growth.py",
    "transactions/test_whole_group.py",
    "models/test_client_model.py",
    "crash/test_writer_kills.py",
    "clients/test_interrupts.py",
    "membership/test_group_subscriptions.py",
    "consumer/test_consumer_reading.py",
    "membership/test_group_losses.py",
    "transactions/test_whole.py",
    "cluster/test_clients_outages.py",
    "moving/test_archives.py",
    "log/test_commit_order.py",
)
#: All that take `spark`. One process has them all: another one would start a Spark, too, and take ten seconds for it.
FILES_WITH_SPARK = frozenset(
    {
        "tests/spark/test_local_spark.py",
        "tests/spark/test_readme.py",
        "tests/spark/test_sink_jobs.py",
        "tests/spark/test_sink_kills.py",
        "tests/spark/test_sink_streams.py",
        "tests/spark/test_source_spark.py",
    }
)
#: Until when slow tests are begun, in seconds since 1970: for a build that has to end in time on whatever machine.
SLOW_TESTS_UNTIL = float(os.environ.get("TXNSTORE_SLOW_TESTS_UNTIL", "inf"))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Keep the tests' files in memory where there is room: SQLite waits for a disk at each commit, for minutes in all.

    Take interrupts also where a shell has begun the run in the background: what tests start inherits that. Stores that
    are made here number their partitions from 1 on and their producers in turn: rows of two can be compared, and a test
    may name one.
    """
    config.pluginmanager.register(least_privilege)
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    opening.FIRST_PARTITION_ID_MAX = 1
    partition_rows.PRODUCER_ID_MS = 1 << 62
    if config.option.basetemp is None and has_room(MEMORY_FOLDER, MEMORY_BYTES_MIN):
        folder = ServerFolder(None, in_memory=True)
        config.add_cleanup(folder.remove)
        config.option.basetemp = str(folder.path / "pytest")
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark what is slow in part before tests are chosen; begin with the long files, the rest as it comes.

    Where slow tests have their time, each build begins with others.
    """
    tried, left_out = set[tuple[object, ...]](), []
    begun = set[tuple[str, bool]]()
    for item in items:
        # What only PostgreSQL has, a function that commits, everybody runs.
        function, _, parameters = item.nodeid.partition("[")
        on_postgresql = parameters.startswith(("postgresql", "statements on postgresql"))
        variants = item.get_closest_marker("variants_on_sqlite")
        if on_postgresql and variants is not None:
            case = function, *(variants.args and _parameters_but(item, variants.args))
            if case in tried:
                left_out.append(item)
            tried.add(case)
        if on_postgresql and item.get_closest_marker("slow_on_postgresql") is not None:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow_but_first") is not None:
            if (function, on_postgresql) in begun:
                item.add_marker(pytest.mark.slow)
            begun.add((function, on_postgresql))
        if "spark" in getattr(item, "fixturenames", ()) and file_of(item.nodeid) not in FILES_WITH_SPARK:
            raise pytest.UsageError(f"FILES_WITH_SPARK in tests/conftest.py lacks {file_of(item.nodeid)}")
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        those = set(left_out)
        items[:] = (item for item in items if item not in those)
    yield
    if math.isfinite(SLOW_TESTS_UNTIL):
        items.sort(key=lambda item: hashlib.sha256(f"{SLOW_TESTS_UNTIL} {file_of(item.nodeid)}".encode()).digest())
        return
    rank = {name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: rank.get("/".join(item.path.parts[-2:]), len(rank)))


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what stays to the end, half a million objects of 12,000 tests."""
    gc.collect()
    gc.freeze()


def _parameters_but(item: pytest.Item, names: Collection[str]) -> list[tuple[str, str]]:
    """Return which parameters a test has, but for those of these names."""
    parameters: dict[str, object] = vars(item)["callspec"].params
    return sorted((name, repr(value)) for name, value in parameters.items() if name not in names)


def file_of(nodeid: str) -> str:
    """Return the file of a test, from the top of the checkout."""
    return nodeid.partition("::")[0]


def is_slow(item: pytest.Item) -> bool:
    """Return whether a test is marked slow."""
    return item.get_closest_marker("slow") is not None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out a slow test that comes too late; the report of what was skipped says so."""
    if time.time() > SLOW_TESTS_UNTIL and is_slow(item):
        pytest.skip("the time for slow tests was over: scripts/test --all runs all of them")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Share the files among processes; those that need the same Spark, or the same big store, are as one file."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class SomeTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = file_of(nodeid)
            if file in FILES_WITH_SPARK:
                return "with Spark"
            return "plans" if file.startswith("tests/plans/") else file

    return SomeTogether(config, log)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Tell the process that shares the files of a test's call, and of what went wrong or was left out, once it is over.

    Else it is told five times of a test that passes, each time for as long as a small test takes.
    """
    option = item.config.option
    if not hasattr(item.config, "workerinput") or option.maxfail or option.durations is not None or option.xmlpath:
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Let sessions of PostgreSQL live on in tests of crashes, not while fixtures make and drop databases."""
    with nullcontext() if item.get_closest_marker("crashes") is None else sessions_living_on():
        yield


@pytest.fixture(autouse=True)
def clients_leave_the_maintenance_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No client of a test does its part, unless the test's module imports `upkeep`, which is that part.

    Clients of one test may go by several clocks: by a real one, all that others have begun by a manual one is overdue.
    """
    if not hasattr(request.module, "upkeep"):
        monkeypatch.setattr(Upkeep, "run", lambda _: None)
        monkeypatch.setattr(Upkeep, "part", lambda _: None)


@pytest.fixture
def url(txnstore_url: str) -> str:
    """The URL of a fresh store, on each database."""
    return txnstore_url


@pytest.fixture
def clock(txnstore_clock: ManualClock) -> ManualClock:
    """The clock that `store` goes by."""
    return txnstore_clock


@pytest.fixture
def store(txnstore_store: Store) -> Store:
    """A fresh store, on each database."""
    return txnstore_store


@pytest.fixture(scope="session")
def make_sqlite_store(_txnstore_sqlite_template: Path) -> Callable[[Path], str]:
    """Make a store in a new file, with an identity of its own, and return its URL.

    It is a copy: the tables are there in a twentieth of the time in which migrations make them.
    """

    def make(path: Path) -> str:
        shutil.copyfile(_txnstore_sqlite_template, path)
        store_uuid, now_ms = str(uuid.uuid4()), time.time_ns() // 1_000_000
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE txnstore_stores SET store_uuid = ?, created_ms = ?", [store_uuid, now_ms])
            connection.execute("UPDATE txnstore_databases SET store_uuid = ?", [store_uuid])
        return f"sqlite:///{path}"

    return make


@pytest.fixture(scope="session")
def shared_clock() -> ManualClock:
    """The clock that `shared_store` goes by; it is only ever moved on."""
    return ManualClock()


@pytest.fixture(scope="session")
def _shared_sqlite_store(tmp_path_factory: pytest.TempPathFactory, shared_clock: ManualClock) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path_factory.mktemp('shared') / 'store.db'}", clock=shared_clock) as store:
        yield store


@pytest.fixture(scope="session")
def _shared_postgresql_store(
    lent_postgresql: Callable[[], AbstractContextManager[str]], shared_clock: ManualClock
) -> Iterator[Store]:
    with lent_postgresql() as url, open_store(url, clock=shared_clock) as store:
        yield store


@pytest.fixture(params=("sqlite", "postgresql"))
def shared_store(request: pytest.FixtureRequest) -> Store:
    """One store of each database for the whole run, for tests that keep to topics and ids of their own."""
    store: Store = request.getfixturevalue(f"_shared_{request.param}_store")
    return store


@pytest.fixture
def code_of_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make the code that runs the test that of another version of the tables."""
    from tests.tools import later_versions  # brings the commands along, which few tests need

    return lambda version: later_versions.become(version, tmp_path, monkeypatch.setattr)


@pytest.fixture
def sql_program() -> Callable[[str, str], str]:
    """Run SQL on a database with its own program, `sqlite3` or `psql`: return what it prints, as CSV."""

    def run(url: str, statements: str) -> str:
        parsed = make_url(url)
        if parsed.drivername.startswith("sqlite"):
            command = [_program("sqlite3"), "-batch", "-bail", "-csv", "-nullvalue", "NULL", parsed.database or ""]
        else:
            options = ["-X", "-q", "-t", "--csv", "-P", "null=NULL", "-v", "ON_ERROR_STOP=1"]
            command = [_program("psql"), *options, "-d", connection_string(url)]
        done = subprocess.run(command, input=statements, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None and name == "psql":
        try:
            found = str(find_programs() / "bin" / "psql")
        except NoServerProgramsError as error:
            pytest.skip(f"needs the program psql: {error}")
    if found is None:
        pytest.skip(f"needs the program {name}")
    return found
