"""A real Kafka of the tests' own: one broker in KRaft mode, killed at will, gone at the end."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from tests.tools.kafka_jars import NoKafkaError, fetch_jars
from txnstore.spark.local_spark import NoJavaError, find_java
from txnstore.testing.private_cluster import LOCALHOST, free_port

_LAUNCHER: Final = Path(__file__).with_name("kafka_launcher.py")
_START_TIMEOUT_SECONDS: Final = 180.0
_STOP_TIMEOUT_SECONDS: Final = 20.0
_ATTEMPTS: Final = 3
_LOG_TAIL_BYTES: Final = 2_000

#: A small, quick Java.
_JAVA_OPTIONS: Final = ("-Xms64m", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
#: What Kafka's own start script gives it, and HotSpot's choice of compilers: for comparisons of speed.
_JAVA_OPTIONS_OF_USERS: Final = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC")
_LOG_OPTIONS: Final = ("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",)
#: Everything once, for there is one broker, and nothing waits for more. After a kill the broker comes back only when
#: its old session has ended. Records of long ago stay.
_SETTINGS: Final = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller_port}
listeners=PLAINTEXT://{host}:{port},CONTROLLER://{host}:{controller_port}
advertised.listeners=PLAINTEXT://{host}:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={folder}/data
log.retention.ms=-1
auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
num.network.threads=2
num.io.threads=2
log.cleaner.dedupe.buffer.size=8388608
"""


class KafkaStartError(RuntimeError):
    """There is a broker, but it does not start; the text holds the end of its log."""


class KafkaBroker:
    """A broker on 127.0.0.1, running when the constructor returns; for one thread.

    It ends with the thread that started it, however that ends (on Linux; elsewhere `close` is needed).
    """

    def __init__(self, java_options: Sequence[str] = _JAVA_OPTIONS) -> None:
        """Fetch what is missing, make the folder and start.

        Raises:
            NoKafkaError: there is no Java, or no jars.
            KafkaStartError: the broker does not start.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="txnstore-kafka-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._java_options = java_options
        try:
            try:
                self._java = find_java(self._folder) / "bin" / "java"
            except NoJavaError as error:
                raise NoKafkaError(str(error)) from None
            self._class_path = os.pathsep.join(map(str, fetch_jars()))
            self._start_on_free_ports()
        except BaseException:
            self.close()
            raise

    @classmethod
    def as_users_run_it(cls) -> Self:
        """Start one that is as fast as those of production; it takes more memory, and longer to start.

        Raises:
            NoKafkaError, KafkaStartError: see the constructor.
        """
        return cls(_JAVA_OPTIONS_OF_USERS)

    @property
    def bootstrap(self) -> str:
        """The address, the same after every start."""
        return f"{LOCALHOST}:{self._port}"

    def kill(self) -> None:
        """SIGKILL; returns when the broker is gone."""
        self._end(signal.SIGKILL)

    def start(self) -> None:
        """Start again, on the same port; returns when the broker takes connections.

        Raises:
            KafkaStartError: it does not start.
        """
        self._process = self._launch("kafka.Kafka", str(self._settings))
        self._wait_until_ready(self._process)

    def close(self) -> None:
        """End the broker and remove its folder; a second call does nothing."""
        self._end(signal.SIGTERM)
        shutil.rmtree(self._folder, ignore_errors=True)

    def wait(self, timeout_seconds: float) -> int | None:
        """Return the exit code once the broker has ended by itself, None if it still runs."""
        if self._process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_seconds)
        return None

    @property
    def _settings(self) -> Path:
        return self._folder / "server.properties"

    def _start_on_free_ports(self) -> None:
        for attempt in range(_ATTEMPTS):
            self._port, controller_port = free_port(), free_port()
            self._settings.write_text(
                _SETTINGS.format(host=LOCALHOST, port=self._port, controller_port=controller_port, folder=self._folder),
                encoding="utf-8",
            )
            self._format()
            try:
                self.start()
            except KafkaStartError as error:
                # Somebody was quicker with one of the ports.
                if "Address already in use" not in str(error) or attempt == _ATTEMPTS - 1:
                    raise
                shutil.rmtree(self._folder / "data", ignore_errors=True)
            else:
                return

    def _format(self) -> None:
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        # In one word: an id may begin with a dash.
        of_cluster = f"--cluster-id={cluster_id}"
        process = self._launch("kafka.tools.StorageTool", "format", of_cluster, "-c", str(self._settings))
        try:
            code = process.wait(_START_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = -1
        if code != 0:
            raise KafkaStartError(f"Kafka's storage cannot be formatted:\n{self._log_tail()}")

    def _launch(self, main_class: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [str(self._java), *self._java_options, *_LOG_OPTIONS, "-cp", self._class_path, main_class, *arguments]
        with (self._folder / "log").open("ab") as log:
            # A session of its own: Ctrl-C goes to the tests, which then close the broker.
            return subprocess.Popen(
                [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), *command],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        while True:
            # It listens once it is unfenced: what it is asked then it answers.
            with contextlib.suppress(OSError), socket.create_connection((LOCALHOST, self._port), timeout=1):
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
                raise KafkaStartError(f"the Kafka broker ended with {process.returncode}:\n{self._log_tail()}")
            if time.monotonic() > deadline:
                self._end(signal.SIGKILL)
                raise KafkaStartError(f"the Kafka broker was not ready in time:\n{self._log_tail()}")

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(how)
        try:
            process.wait(_STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_TIMEOUT_SECONDS)

    def _log_tail(self) -> str:
        return (self._folder / "log").read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
