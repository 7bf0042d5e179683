"""The sides that are compared: a client and where it connects to, and the processes in which clients run."""

from __future__ import annotations

import importlib
import multiprocessing
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

KAFKA: Final = "Kafka"
SQLITE: Final = "SQLite"
POSTGRESQL: Final = "PostgreSQL"
OURS: Final = "txnstore"
ANSWER_TIMEOUT_SECONDS: Final = 120.0
#: Longer than the first look of a client at the maintenance is away, which is not what it costs from then on.
SETTLING_SECONDS: Final = 3.0

#: Each process is a fork of one that has imported the clients and started nothing: a hundred of them start in seconds.
processes: Final = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    [
        "confluent_kafka.admin",
        "txnstore.admin",
        *(f"scripts.comparison.{name}" for name in ("bulk", "groups", "waiting")),
    ]
)


@dataclass(frozen=True)
class Side:
    """One of those that are compared: which client, and where it connects to."""

    name: str
    module: str
    url: str
    configuration: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        """Whether it is a database, so that there is a floor: what the raw driver does on it."""
        return self.module == OURS

    def of_client(self, name: str) -> Any:
        """Return a name of the client's package."""
        return getattr(importlib.import_module(self.module), name)

    def producer(self, **more: Any) -> Any:
        """Return a producer; underscores in names of properties stand for dots."""
        return self.of_client("Producer")({**self._common, "linger.ms": 5, **_dotted(more)})

    def transactional_producer(self) -> Any:
        """Return a producer that is ready to begin a transaction, and waits for no further records."""
        producer = self.producer(transactional_id=new_name(), linger_ms=0)
        producer.init_transactions(ANSWER_TIMEOUT_SECONDS)
        return producer

    def consumer(self, **more: Any) -> Any:
        """Return a consumer, of a group of its own unless told."""
        return self.of_client("Consumer")(
            {**self._common, "group.id": new_name(), "enable.auto.commit": False, **_dotted(more)}
        )

    def partition(self, topic: str, *offset: int, number: int = 0) -> Any:
        """Return a partition of a topic."""
        return self.of_client("TopicPartition")(topic, number, *offset)

    def new_topic(self, partitions: int = 1) -> str:
        """Make a topic."""
        admin = importlib.import_module(f"{self.module}.admin")
        name = new_name()
        # Kept until the answer is there: confluent_kafka's ends with its last reference.
        client = admin.AdminClient(self._common)
        client.create_topics([admin.NewTopic(name, partitions, 1)])[name].result(ANSWER_TIMEOUT_SECONDS)
        return name

    @property
    def _common(self) -> dict[str, Any]:
        return {"bootstrap.servers": self.url, **self.configuration}


def _dotted(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "."): value for name, value in properties.items()}


def new_name() -> str:
    """Return a name that nothing has yet."""
    return f"bench-{uuid.uuid4().hex[:12]}"


def checked(message: Any) -> bytes:
    """Return the value of a message that came and is no error."""
    assert message is not None, "no record came"
    assert message.error() is None, message.error()
    value: bytes = message.value()
    return value


@contextmanager
def running(workers: list[Any]) -> Iterator[None]:
    """Start these processes; afterwards all of them are gone."""
    try:
        for worker in workers:
            worker.start()
        yield
    except BaseException:
        for worker in workers:
            if worker.pid is not None:
                worker.terminate()
        raise
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.join(ANSWER_TIMEOUT_SECONDS)
