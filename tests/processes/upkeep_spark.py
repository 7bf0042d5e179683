"""A Spark on the same store: a streaming query whose driver is killed at any moment and started again."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Final

import txnstore
from tests.spark.sink_pipeline import check, fill, make_topics
from tests.spark.test_sink_kills import Driver
from txnstore.spark.local_spark import local_environment

#: How long a driver goes on once it has begun a batch, and how long it has until then: on an idle machine ten seconds.
LIFE_SECONDS: Final = (0.0, 8.0)
START_SECONDS: Final = 300.0
#: How often, and when, it does not get that far.
DIES_YOUNG, YOUNG_SECONDS = 0.2, (0.0, 15.0)
#: How often it is run for what is left.
TRIES: Final = 3
QUERY: Final = "upkeep"
RECORDS_A_ROUND, RECORDS_A_BATCH, RECORDS_AT_THE_END = 600, 100, 60


class SparkRounds:
    """Rounds of a query, in a thread: some records more, a driver, its end or its death."""

    def __init__(self, url: str, folder: Path, seed: int) -> None:
        self.told: Counter[str] = Counter()
        self._url = url
        self._chance = random.Random(f"{seed}/spark")
        # Each start of the driver empties its folder: what its environment names stays outside of it.
        driver_folder, spark_folder = folder / "driver", folder / "spark"
        driver_folder.mkdir()
        spark_folder.mkdir()
        self._driver = Driver(driver_folder, {**os.environ, **local_environment(spark_folder)})
        self._begun = driver_folder / f"checkpoint-{QUERY}" / "offsets"
        make_topics(url)
        self._driver.add(QUERY, url, per_batch=RECORDS_A_BATCH)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark")
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                fill(self._url, self.told["Spark: records"], RECORDS_A_ROUND)
            except txnstore.KafkaException:
                # The server was away. Whatever is there of these records is to come out once.
                self.told["Spark: fillings cut short"] += 1
            self.told["Spark: records"] += RECORDS_A_ROUND
            with self._driver.running() as process:
                self._live(process)
            self.told["Spark: batches"] = self._batches()

    def _live(self, process: subprocess.Popen[bytes]) -> None:
        is_young = self._chance.random() < DIES_YOUNG
        before, deadline = self._batches(), time.monotonic() + START_SECONDS
        while not is_young and process.poll() is None and self._batches() == before and not self._is_over.is_set():
            if time.monotonic() >= deadline:
                self.told["Spark: starts that took too long"] += 1
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        try:
            code = process.wait(self._chance.uniform(*(YOUNG_SECONDS if is_young else LIFE_SECONDS)))
        except subprocess.TimeoutExpired:
            self.told["kill: Spark"] += 1
        else:
            self.told["Spark: runs to the end" if code == 0 else "Spark: runs that failed"] += 1

    def _batches(self) -> int:
        return sum(1 for each in self._begun.glob("*") if each.name.isdigit())

    def finish(self) -> list[str]:
        """Let it come to its end, with nobody killed any more; return what is wrong."""
        self.stop()
        # What a filling that was cut short has left open is aborted by the next one.
        fill(self._url, self.told["Spark: records"], RECORDS_AT_THE_END)
        self.told["Spark: records"] += RECORDS_AT_THE_END
        problems = []
        try:
            if not any(self._is_finished() for _ in range(TRIES)):
                problems.append(f"Spark does not come to its end: {self._driver.log_tail()}")
            check(self._url)
        except AssertionError as error:
            problems.append(f"Spark: {error}")
        self.told["Spark: batches"] = self._batches()
        return problems

    def _is_finished(self) -> bool:
        """Run the query, for as long as it goes on, and return whether it came to its end."""
        with self._driver.running() as process:
            before, deadline = -1, 0.0
            while process.poll() is None:
                if (batches := self._batches()) != before:
                    before, deadline = batches, time.monotonic() + START_SECONDS
                if time.monotonic() >= deadline:
                    return False
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
            return process.returncode == 0

    def stop(self) -> None:
        """Begin no further round, and wait for the end of this one."""
        self._is_over.set()
        self._thread.join()
