"""The data source with places where a test can step in: tasks and driver look there for an instruction.

    steps = Steps(folder)
    steps.at("mid-write", 2, "raise")           # the first task of batch 2 that comes by raises
    steps.at("before-decision", 3, "wait")      # the driver waits there until it is killed, or told to go on

Each instruction is followed by one process, once.  The names are those of `PLACES`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter

from txnstore.spark.data_source import TxnStoreDataSource

PLACES: Final = ("before-write", "mid-write", "after-write", "before-decision", "after-decision")
#: A chunk of a task, so that there is a middle.
_ROWS: Final = 5
_WAIT_SECONDS: Final = 240.0
_POLL_SECONDS: Final = 0.02


class Steps:
    """A folder of instructions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def at(self, place: str, batch_id: int, action: str) -> None:
        """Have the first process that comes by do something: raise, kill (itself) or wait."""
        assert place in PLACES
        assert action in {"raise", "kill", "wait"}
        (self.folder / f"{place}-{batch_id}").write_text(action)

    def taken(self) -> dict[str, int]:
        """The places where an instruction was followed, with the process."""
        return {path.stem: int(path.suffix[1:]) for path in self.folder.glob("*-*.*")}

    def wait_until_taken(
        self, count: int, seconds: float, *, alive: subprocess.Popen[bytes] | None = None
    ) -> dict[str, int]:
        """Wait until so many were followed, by a process that is `alive`."""

        def taken() -> bool:
            assert alive is None or alive.poll() is None, "the process has ended"
            return len(self.taken()) >= count

        _wait(taken, seconds)
        return self.taken()

    def go(self, place: str, batch_id: int) -> None:
        """Let the process go on that waits there."""
        (self.folder / f"go-{place}-{batch_id}").touch()

    def come_by(self, place: str, batch_id: int) -> None:
        """Follow the instruction for this place, if there is one."""
        instruction = self.folder / f"{place}-{batch_id}"
        taken = instruction.with_suffix(f".{os.getpid()}")
        try:
            instruction.rename(taken)
        except FileNotFoundError:
            return
        action = taken.read_text()
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "raise":
            raise RuntimeError(f"told to fail {place}")
        _wait((self.folder / f"go-{instruction.name}").exists, _WAIT_SECONDS)


def _wait(happened, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it has not happened in time"
        time.sleep(_POLL_SECONDS)


class SteppedDataSource(TxnStoreDataSource):
    """`txnstore` under the name `txnstore_stepped`, with the option `test.folder`."""

    @classmethod
    def name(cls) -> str:
        return "txnstore_stepped"

    def writer(self, schema, overwrite):
        from txnstore.spark.sink_writer import batch_writer

        return _SteppedBatchWriter(batch_writer(self._own_options(), schema, overwrite=overwrite), self._folder)

    def streamWriter(self, schema, overwrite):  # noqa: N802 - Spark's name
        from txnstore.spark.sink_writer import stream_writer

        return _SteppedStreamWriter(stream_writer(self._own_options(), schema, overwrite=overwrite), self._folder)

    @property
    def _folder(self) -> Path:
        return Path(self.options["test.folder"])

    def _own_options(self) -> dict[str, str]:
        return {name: text for name, text in self.options.items() if not name.startswith("test.")}


class _Stepped:
    def __init__(self, inner, folder: Path) -> None:
        self._inner = inner
        self._folder = folder

    def write(self, iterator):
        steps = Steps(self._folder)
        context = TaskContext.get()
        batch_id = int(context.getLocalProperty("streaming.sql.batchId") or 0) if context else 0
        steps.come_by("before-write", batch_id)
        from txnstore.spark import sink_task  # as late as the sink itself imports it

        sink_task.APPEND_ROWS = _ROWS
        message = self._inner.write(_interrupted(iterator, steps, batch_id))
        steps.come_by("after-write", batch_id)
        return message


class _SteppedStreamWriter(_Stepped, DataSourceStreamArrowWriter):
    def commit(self, messages, batchId):  # noqa: N803 - Spark's name
        steps = Steps(self._folder)
        steps.come_by("before-decision", batchId)
        self._inner.commit(messages, batchId)
        steps.come_by("after-decision", batchId)

    def abort(self, messages, batchId):  # noqa: N803 - Spark's name
        self._inner.abort(messages, batchId)


class _SteppedBatchWriter(_Stepped, DataSourceArrowWriter):
    def commit(self, messages):
        Steps(self._folder).come_by("before-decision", 0)
        self._inner.commit(messages)
        Steps(self._folder).come_by("after-decision", 0)

    def abort(self, messages):
        self._inner.abort(messages)


def _interrupted(rows: Iterator[pa.RecordBatch], steps: Steps, batch_id: int) -> Iterator[pa.RecordBatch]:
    """Come by in the middle: something is written by then, though the sink pulls ahead."""
    count = 0
    for batch in rows:
        for start in range(0, batch.num_rows, _ROWS):
            yield batch.slice(start, _ROWS)
            count += 1
            if count == 3:
                steps.come_by("mid-write", batch_id)
