"""The refunds processor as a process of its own: started, watched for how far it has come, and killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from scripts.demo_produce import SETTLEMENTS
from scripts.demo_totals import NoAnswerError
from txnstore import Consumer, TopicPartition

GROUP: Final = "refunds"
#: The query reads its input in at least so many micro-batches, so that there is a half to be killed at.
BATCHES: Final = 4
BATCH_OFFSETS_MAX: Final = 100_000

_JOB: Final = Path(__file__).with_name("refunds.py")
_LOOK_SECONDS: Final = 0.02
#: How long the query may take for one micro-batch; the first includes the start of Spark.
_SILENCE_SECONDS: Final = 300.0
#: How long the processes of a killed driver take to be gone.
_END_SECONDS: Final = 30.0
_SHOWN_LINES: Final = 20
_ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Progress:
    """How far a query's group has come in `settlements`; one consumer that only asks."""

    def __init__(self, url: str) -> None:
        """Ask for the partitions and their ends, which are not to move any more."""
        self._consumer = Consumer({"bootstrap.servers": url, "group.id": GROUP, "enable.auto.commit": False})
        numbers = self._consumer.list_topics(SETTLEMENTS).topics[SETTLEMENTS].partitions
        self._partitions = [TopicPartition(SETTLEMENTS, number) for number in numbers]
        self.end = sum(self._consumer.get_watermark_offsets(partition)[1] for partition in self._partitions)

    def offsets(self) -> int:
        """Return how many offsets the group has behind it, of all partitions together."""
        return sum(max(0, partition.offset) for partition in self._consumer.committed(self._partitions))

    def close(self) -> None:
        """Give the connection back."""
        self._consumer.close()


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Let whoever wants an end wait until the block is over; a process that is half started would outlive us."""
    wanted: list[int] = []
    before = {number: signal.signal(number, lambda number, _: wanted.append(number)) for number in _ENDING_SIGNALS}
    try:
        yield
    finally:
        for ending, handler in before.items():
            signal.signal(ending, handler)
        for number in wanted:
            signal.raise_signal(number)


class Driver:
    """A running refunds processor: Spark's driver, with its JVM in the same process group."""

    def __init__(self, url: str, checkpoint: Path, batch: int, *, environment: Mapping[str, str], log: Path) -> None:
        """Start it; what it prints is added to the file `log`."""
        self._log = log
        command = [sys.executable, str(_JOB), str(checkpoint), "--batch", str(batch)]
        process: subprocess.Popen[bytes] | None = None
        try:
            with log.open("ab") as output, _signals_wait():
                # The URL may hold a password: others see the command line, and not the environment.
                process = subprocess.Popen(
                    command,
                    env={**os.environ, **environment, "TXNSTORE_URL": url},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except BaseException:
            if process is not None:
                _kill(process)
            raise
        self._process = process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL the driver and its JVM; returns when none of their group is left. Spark's workers then end alone."""
        _kill(self._process)

    def run(self, progress: Progress, until: int | None, on_offsets: Callable[[int], None]) -> bool:
        """Wait until the query has committed `until` offsets, or has ended; True if it runs on.

        Raises:
            NoAnswerError: it failed, or did nothing for a long time.
        """
        reached, deadline = progress.offsets(), time.monotonic() + _SILENCE_SECONDS
        while True:
            # An exception in the middle of poll() could leave the Popen locked, and kill() would wait in vain.
            with _signals_wait():
                has_ended = self._process.poll() is not None
            offsets = progress.offsets()
            if offsets != reached:
                reached, deadline = offsets, time.monotonic() + _SILENCE_SECONDS
                on_offsets(offsets)
            if has_ended:
                if self._process.returncode:
                    raise NoAnswerError(f"the query ended with {self._process.returncode}:\n{self._last_words()}")
                return False
            if until is not None and offsets >= until:
                return True
            if time.monotonic() > deadline:
                raise NoAnswerError(f"the query did nothing for {_SILENCE_SECONDS:.0f} s:\n{self._last_words()}")
            time.sleep(_LOOK_SECONDS)

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([*lines[-_SHOWN_LINES:], f"(all of it is in {self._log})"])


def batches_in(checkpoint: Path, what: str) -> int:
    """Return the number of Spark's last batch that it planned (`offsets`) or finished (`commits`); -1: none."""
    folder = checkpoint / what
    names = [entry.name for entry in folder.iterdir()] if folder.exists() else []
    return max((int(name) for name in names if name.isdigit()), default=-1)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL the process and its group, and wait until none of it is left."""
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            break
        # It is ours to bury; until it is, the group is there.
        process.poll()
        time.sleep(_LOOK_SECONDS)
    process.wait(_END_SECONDS)
