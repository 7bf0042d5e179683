"""A process that Spark uses again and again does not have all that is loaded looked at after every task."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from txnstore.db.opening import open_store
from txnstore.spark.worker_process import spare_what_is_loaded


@pytest.fixture(autouse=True)
def _thawed():
    yield
    gc.unfreeze()


def test_only_a_process_that_is_reused_is_spared(monkeypatch):
    monkeypatch.delenv("SPARK_REUSE_WORKER", raising=False)
    before = gc.get_freeze_count()
    spare_what_is_loaded()
    assert gc.get_freeze_count() == before
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    spare_what_is_loaded()
    assert gc.get_freeze_count() > before + 10_000


PROGRAM = """
import gc, sys
from txnstore.spark import data_source
planned = gc.get_freeze_count()
from txnstore.spark.stores import StoreAddress, store_at
from txnstore.spark import source_readers
store_at(StoreAddress(sys.argv[1]))
print(planned, gc.get_freeze_count(), len(gc.get_objects()))
"""


@pytest.mark.slow
def test_what_the_data_source_loads_and_opens_is_spared(url):
    open_store(url).close()
    environment = {**os.environ, "SPARK_REUSE_WORKER": "1"}
    command = [sys.executable, "-c", PROGRAM, url]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    planned, spared, left = map(int, done.stdout.split())
    assert planned > 10_000
    assert spared > planned
    assert left * 20 < spared
