"""A driver that is killed at any moment, again and again: for scripts/soak-spark, which says for how long."""

from __future__ import annotations

import os
import random
import subprocess
import time

import pytest

from tests.spark.sink_pipeline import check, fill, make_topics
from tests.spark.test_sink_kills import Driver

pytestmark = pytest.mark.slow

SOAK_SECONDS = float(os.environ.get("TXNSTORE_SOAK_SECONDS", "0"))
#: A driver reaches its first batch in about ten seconds.
LIFE_SECONDS = (5.0, 30.0)
RECORDS_A_ROUND = 3_000


@pytest.mark.skipif(not SOAK_SECONDS, reason="each life of a Spark takes half a minute: scripts/soak-spark SECONDS")
def test_a_driver_that_is_killed_at_any_moment_writes_each_record_once(url, spark_environment, tmp_path):
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201 - for whoever wants it again
    random_ = random.Random(seed)
    driver = Driver(tmp_path, spark_environment)
    make_topics(url)
    driver.add("soak", url, per_batch=200)
    until = time.monotonic() + SOAK_SECONDS
    filled = kills = 0
    while time.monotonic() < until:
        fill(url, filled, RECORDS_A_ROUND)
        filled += RECORDS_A_ROUND
        with driver.running() as process:
            try:
                assert process.wait(random_.uniform(*LIFE_SECONDS)) == 0, driver.log_tail()
            except subprocess.TimeoutExpired:
                kills += 1
    driver.finish()
    check(url)
    print(f"{filled} records, {kills} kills")  # noqa: T201 - what the run went through
