"""The driver, the executors' Python, the cluster's tasks and the database are killed; the sink equals the source."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark.sink_pipeline import SECONDS, check, fill, finish, make_topics, read, start
from tests.spark.sink_steps import SteppedDataSource, Steps
from txnstore.db.opening import open_store
from txnstore.model import IsolationLevel
from txnstore.spark.local_spark import LOCAL_SETTINGS
from txnstore.testing.private_cluster import NoServerProgramsError, PrivateCluster, free_port

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[2]
#: As short a life as the session's, for each Java of a cluster.
JAVA_OPTIONS = LOCAL_SETTINGS["spark.driver.extraJavaOptions"]
#: Where a query is killed in its first two batches: before its tasks write, while they do, when they have, and when the
#: driver has decided and Spark does not know yet. `tests/crash` shows what is kept after a kill at any statement.
KILLS = {"sqlite": ("before-write", "before-decision"), "postgresql": ("mid-write", "after-decision")}


class Driver:
    """A process that runs queries on a Spark of its own."""

    def __init__(self, folder: Path, environment: dict[str, str], **settings: str) -> None:
        self.folder = folder
        self._environment = environment
        self._settings = settings
        self.queries: list[dict[str, str | int]] = []

    def add(self, name: str, url: str, per_batch: int) -> Steps:
        steps = Steps(self.folder / f"steps-{name}")
        self.queries.append(
            {
                "url": url,
                "checkpoint": str(self.checkpoint(name)),
                "steps": str(steps.folder),
                "per_batch": per_batch,
            }
        )
        return steps

    def checkpoint(self, name: str) -> Path:
        return self.folder / f"checkpoint-{name}"

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run it; at the end nothing of it is left."""
        spark_folder = self.folder / "spark"
        shutil.rmtree(spark_folder, ignore_errors=True)
        spark_folder.mkdir()
        description = self.folder / "description.json"
        description.write_text(
            json.dumps({"folder": str(spark_folder), "settings": self._settings, "queries": self.queries})
        )
        with (self.folder / "driver.log").open("wb") as log:
            driver = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.sink_driver", str(description)],
                cwd=CHECKOUT,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                yield driver
            finally:
                # The driver and its JVM; Python workers are their own group, and end with their pipes.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(driver.pid, signal.SIGKILL)
                driver.wait(SECONDS)

    def finish(self) -> None:
        """Run it to its end."""
        with self.running() as driver:
            assert driver.wait(SECONDS) == 0, self.log_tail()

    def kill_at(self, waiting: list[tuple[Steps, str]]) -> None:
        """Kill it when each of its queries waits at its step.

        They come there one after the other.  Spark 4.3 sometimes serializes a task of one query while another one
        changes what both share ("Illegal size of collection"), and ends both.
        """
        for query, (_, key) in zip(self.queries, waiting, strict=True):
            query["waits_at"] = key
        with self.running() as process:
            while process.poll() is None and not all(key in steps.taken() for steps, key in waiting):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.05)
            assert process.poll() is None, self.log_tail()
            os.killpg(process.pid, signal.SIGKILL)
            for steps, key in waiting:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(steps.taken()[key], signal.SIGKILL)

    def log_tail(self) -> str:
        return (self.folder / "driver.log").read_text(errors="replace")[-4000:]


def test_a_driver_that_is_killed_at_every_step_of_a_batch_writes_each_record_once(
    txnstore_sqlite_url, txnstore_postgresql_url, spark, spark_environment, forking_python, tmp_path
):
    """One driver serves both, and the last one is this process: a Spark takes its time to start.

    So do its Pythons: those of the cluster are started as everybody has it.
    """
    # Tasks that wait hold a core each.
    environment = {**spark_environment, "PYSPARK_PYTHON": forking_python}
    driver = Driver(tmp_path, environment, **{"spark.master": "local[4,4]"})
    queries = []
    for name, url in (("sqlite", txnstore_sqlite_url), ("postgresql", txnstore_postgresql_url)):
        make_topics(url)
        fill(url, 0, 120)
        queries.append((KILLS[name], url, name, driver.add(name, url, per_batch=100)))
    for batch_id in range(2):
        for places, _, _, steps in queries:
            steps.at(places[batch_id], batch_id, "wait")
        driver.kill_at([(steps, f"{places[batch_id]}-{batch_id}") for places, _, _, steps in queries])
    for _, url, name, _ in queries:
        finish(start(spark, url, driver.checkpoint(name)))
        check(url)
        assert wasted(url) > 0, "nothing was killed in the middle of its work"


def test_a_server_that_is_killed_under_a_running_query_only_delays_it(spark, tmp_path):
    try:
        cluster = PrivateCluster(settings={})
    except NoServerProgramsError as error:
        pytest.skip(str(error))
    spark.dataSource.register(SteppedDataSource)
    with cluster:
        cluster.create_database("pipeline")
        url = cluster.url("pipeline")
        make_topics(url)
        fill(url, 0, 160)
        steps = Steps(tmp_path / "steps")
        places = (("mid-write", 0), ("before-decision", 1), ("after-decision", 1))
        for place, batch_id in places:
            steps.at(place, batch_id, "wait")
        query = start(spark, url, tmp_path / "checkpoint", steps=steps, per_batch=100)
        for count, (place, batch_id) in enumerate(places, 1):
            steps.wait_until_taken(count, SECONDS)
            cluster.kill()
            # While it is away they try; the last time it comes back before anybody asks.
            if count < len(places):
                steps.go(place, batch_id)
            cluster.start()
            steps.go(place, batch_id)
        finish(query)
        assert query.exception() is None
        check(url)


def java_options(environment: dict[str, str]) -> str:
    """Return those of each Java of a cluster: it finds the classes where drivers do."""
    return f"{JAVA_OPTIONS} {environment.get('SPARK_SUBMIT_OPTS', '')}"


@contextlib.contextmanager
def standalone(environment: dict[str, str], folder: Path) -> Iterator[str]:
    """A cluster of a master and two workers, on hosts of their own as far as Spark can see: its URL."""
    port = free_port()
    url = f"spark://127.0.0.1:{port}"
    master = ["org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
    worker = ["org.apache.spark.deploy.worker.Worker", "--webui-port", "0", "-c", "1", "-m", "1G"]
    commands = [
        master,
        *([*worker, "--host", host, "-d", str(folder / host), url] for host in ("127.0.0.1", "127.0.0.2")),
    ]
    program = Path(environment["SPARK_HOME"], "bin", "spark-class")
    daemons = {
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": java_options(environment),
        "SPARK_LAUNCHER_OPTS": JAVA_OPTIONS,
        "SPARK_LOCAL_DIRS": str(folder),
    }
    with contextlib.ExitStack() as stack:
        for number, command in enumerate(commands):
            log = stack.enter_context((folder / f"cluster-{number}.log").open("wb"))
            process = subprocess.Popen(
                [program, *command],
                env=environment | daemons,
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(process.wait, SECONDS)
            stack.callback(os.killpg, process.pid, signal.SIGKILL)
        yield url


def test_on_a_cluster_a_slow_attempt_and_its_speculative_twin_write_each_record_once(
    txnstore_postgresql_url, spark_environment, tmp_path
):
    url = txnstore_postgresql_url
    make_topics(url)
    fill(url, 0, 160)
    with standalone(spark_environment, tmp_path) as master:
        driver = Driver(
            tmp_path,
            spark_environment,
            **{
                "spark.master": master,
                "spark.executor.memory": "512m",
                "spark.executor.cores": "1",
                "spark.executor.extraJavaOptions": java_options(spark_environment),
                "spark.speculation": "true",
                "spark.speculation.interval": "100ms",
                "spark.speculation.quantile": "0.5",
                "spark.speculation.multiplier": "1.1",
                "spark.task.maxFailures": "4",
                "spark.executorEnv.PYTHONPATH": str(CHECKOUT),
            },
        )
        steps = driver.add("cluster", url, per_batch=100)
        # Nobody lets it go: only a twin can finish the batch.
        steps.at("mid-write", 0, "wait")
        steps.at("after-write", 1, "kill")
        driver.finish()
    assert set(steps.taken()) == {"mid-write-0", "after-write-1"}
    assert wasted(url) > 0
    check(url)


def wasted(url: str) -> int:
    """How many records were written in vain."""
    with open_store(url) as store:
        every, committed = (
            sum(map(len, read(store, "out", isolation).values()))
            for isolation in (IsolationLevel.READ_UNCOMMITTED, IsolationLevel.READ_COMMITTED)
        )
    return every - committed
