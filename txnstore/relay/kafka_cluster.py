"""The Kafka cluster as a relay sees it: confluent-kafka's clients, their settings, and their errors in three kinds.

An error means that another relay has taken over, or that the cluster will never do what it was asked for, or trouble
that may pass: then the relay drops the client and starts over from the position that it reads back.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from txnstore.relay.errors import KafkaUnavailable, RelayFailed, RelayFenced

#: A Kafka transaction that its relay has left open is aborted by Kafka after this long.
TRANSACTION_TIMEOUT_MS: Final = 60_000

#: What exactly-once depends on; the operator cannot set it.
_OWN: Final = frozenset(
    {
        "acks",
        "auto.offset.reset",
        "bootstrap.servers",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.idempotence",
        "enable.partition.eof",
        "group.id",
        "group.instance.id",
        "isolation.level",
        "metadata.broker.list",
        "transaction.timeout.ms",
        "transactional.id",
    }
)
#: librdkafka waits this long before it asks the coordinator, which is busy after each transaction, again.
_RETRY_BACKOFF_MS: Final = 10
#: The relay says what goes wrong; librdkafka itself logs only what is critical.
_LOG_LEVEL: Final = 2


def check_settings(settings: Mapping[str, str]) -> None:
    """Refuse settings on which exactly-once depends: the relay makes them itself."""
    own = sorted(settings.keys() & _OWN)
    if own:
        raise RelayFailed(f"the relay sets {', '.join(own)} itself")


def client_settings(bootstrap: str, settings: Mapping[str, str]) -> dict[str, object]:
    """Return what all clients of one Kafka cluster have in common."""
    return {"log_level": _LOG_LEVEL, "retry.backoff.ms": _RETRY_BACKOFF_MS, **settings, "bootstrap.servers": bootstrap}


def producer_settings(bootstrap: str, settings: Mapping[str, str], transactional_id: str) -> dict[str, object]:
    """Return the settings of the producer of one partition."""
    return {
        # The broker and its topic say what is too large.
        "message.max.bytes": 1_000_000_000,
        **client_settings(bootstrap, settings),
        "transactional.id": transactional_id,
        "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
    }


def consumer_settings(bootstrap: str, settings: Mapping[str, str], group: str) -> dict[str, object]:
    """Return the settings of a consumer that belongs to no generation and commits nothing by itself."""
    return {
        # At most one turn's records are in memory twice.
        "queued.max.messages.kbytes": 16_384,
        **client_settings(bootstrap, settings),
        "group.id": group,
        "auto.offset.reset": "error",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "isolation.level": "read_committed",
    }


Result = TypeVar("Result")

#: How long one question to the cluster may take.
ANSWER_SECONDS: Final = 10.0
#: A call that takes long is made in slices, between which the relay may be stopped.
_SLICE_SECONDS: Final = 1.0

_FENCED: Final = ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH")
#: What stays wrong until somebody changes something.
_PERMANENT: Final = (
    "CLUSTER_AUTHORIZATION_FAILED",
    "GROUP_AUTHORIZATION_FAILED",
    "INVALID_RECORD",
    "INVALID_TIMESTAMP",
    "INVALID_TRANSACTION_TIMEOUT",
    "MSG_SIZE_TOO_LARGE",
    "POLICY_VIOLATION",
    "RECORD_LIST_TOO_LARGE",
    "TOPIC_AUTHORIZATION_FAILED",
    "TOPIC_EXCEPTION",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
    "UNSUPPORTED_VERSION",
    "_INVALID_ARG",
    "_UNKNOWN_PARTITION",
    "_UNKNOWN_TOPIC",
    "_UNSUPPORTED_FEATURE",
)

#: What wrong settings lead to; for a moment also a broker that has just started, for it may not know its users yet.
_REFUSED: Final = ("_AUTHENTICATION", "_SSL")
#: What librdkafka says of a connection that breaks off on the way there: nobody has refused anything.
_BROKEN_OFF: Final = "Disconnected"

#: What the operator may not know of an error.
_HINTS: Final = {
    "INVALID_RECORD": "; a topic that is compacted, for example, takes no record without a key",
    "MSG_SIZE_TOO_LARGE": "; where no single record is too large, -X batch.size=BYTES makes the batches smaller",
}


@dataclass(frozen=True, slots=True)
class KafkaTopic:
    """A topic of the cluster."""

    topic_uuid: str
    partition_count: int
    leaderless: frozenset[int] = frozenset()
    """The numbers of the partitions that have no leader, if that was asked: nothing of them can be read or written."""


def load_confluent_kafka() -> Any:
    """Return the package confluent-kafka."""
    try:
        library = importlib.import_module("confluent_kafka")
        importlib.import_module("confluent_kafka.admin")
    except ImportError:
        raise RelayFailed(
            "a relay to or from Kafka needs the package confluent-kafka: pip install 'txnstore[kafka]'"
        ) from None
    return library


def is_own(topic: str) -> bool:
    """Return whether the topic has the name of one that is Kafka's own, and is relayed only if it is asked for."""
    return topic.startswith("__")


def _leaderless(topic: Any) -> frozenset[int]:
    return frozenset(number for number, partition in topic.partitions.items() if partition.leader < 0)


class KafkaCluster:
    """One Kafka cluster; safe to share between threads."""

    def __init__(self, bootstrap: str, settings: Mapping[str, str], *, library: Any = None) -> None:
        """Connect to nothing yet. `library` has confluent-kafka's names.

        Raises:
            RelayFailed: confluent-kafka is not installed, or a setting is refused.
        """
        check_settings(settings)
        self.bootstrap = bootstrap
        self.library = load_confluent_kafka() if library is None else library
        self._settings = settings
        #: Why there is no connection, for example: librdkafka's calls only say that there is none.
        self._trouble: Any = None
        self._has_answered = False
        self._admin: Any = None
        with self.translated("the settings of the Kafka clients"):
            common = client_settings(bootstrap, settings)
            self._admin = self.library.admin.AdminClient(common | {"error_cb": self._note_trouble})

    @contextmanager
    def translated(self, what: str) -> Iterator[None]:
        """Raise errors of the clients as those of a relay; `what` is what was done.

        Raises:
            RelayFenced, RelayFailed, KafkaUnavailable: the three kinds of errors.
        """
        try:
            yield
        except self.library.KafkaException as exception:
            raise self.error(exception.args[0], what) from None
        except TimeoutError:
            raise KafkaUnavailable(f"{what}: no answer in time") from None

    def error(self, error: Any, what: str) -> Exception:
        """Return a KafkaError as the error of a relay."""
        kinds = self.library.KafkaError
        text = f"{what}: {error.str()}"
        if error.code() in [getattr(kinds, name) for name in _FENCED]:
            return RelayFenced(f"{what}: another relay of this name has taken over; this one ends")
        text += _HINTS.get(error.name(), "")
        if self._is_one_of(error, _PERMANENT):
            return RelayFailed(text)
        trouble = self._last_trouble()
        # A broker says by itself why it came to an error; librdkafka does not.
        if trouble is None or error.code() >= 0:
            return KafkaUnavailable(text)
        text += f" ({trouble.str()})"
        is_refused = self._is_refusal(trouble) and not self._has_answered
        return RelayFailed(text) if is_refused else KafkaUnavailable(text)

    def _is_refusal(self, trouble: Any) -> bool:
        return self._is_one_of(trouble, _REFUSED) and _BROKEN_OFF not in trouble.str()

    def _is_one_of(self, error: Any, names: Sequence[str]) -> bool:
        # Older versions of the package do not know all of them.
        return error.code() in [getattr(self.library.KafkaError, name, None) for name in names]

    def _last_trouble(self) -> Any:
        if self._admin is not None:
            # Calls error_cb.
            self._admin.poll(0)
        trouble, self._trouble = self._trouble, None
        return trouble

    def _note_trouble(self, error: Any) -> None:
        # That all brokers are down comes after why each of them is; and of several, one that is down says least.
        if error.code() == self.library.KafkaError._ALL_BROKERS_DOWN:
            return
        if self._trouble is None or self._is_refusal(error) or not self._is_refusal(self._trouble):
            self._trouble = error

    def in_slices(
        self, call: Callable[[float], Result], timeout_seconds: float, is_stopped: Callable[[], bool]
    ) -> Result:
        """Return what `call`, which takes a timeout and may be resumed after it, returns in the end.

        Raises:
            KafkaException: its error; the last one after `timeout_seconds`, or once `is_stopped`.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                return call(_SLICE_SECONDS)
            except self.library.KafkaException as exception:
                resumable = exception.args[0] == self.library.KafkaError._TIMED_OUT and exception.args[0].retriable()
                if not resumable or is_stopped() or time.monotonic() > deadline:
                    raise

    def cluster_id(self) -> str:
        """Return the identity of the cluster; this is what a relay asks first.

        Raises:
            RelayFailed: it refuses the credentials, or there is no TLS with it.
            KafkaUnavailable: it cannot be reached.
        """
        with self.translated(f"the Kafka cluster at {self.bootstrap}"):
            cluster_id = str(self._admin.list_topics(timeout=ANSWER_SECONDS).cluster_id)
        self._has_answered = True
        return cluster_id

    def topics(self, names: Sequence[str] | None = None) -> dict[str, KafkaTopic]:
        """Return those of the topics that exist, by name; by default all but Kafka's own.

        Raises:
            KafkaUnavailable: the cluster cannot be reached, or a topic has no leader yet.
        """
        with self.translated(f"the Kafka cluster at {self.bootstrap}"):
            listed = self._admin.list_topics(timeout=ANSWER_SECONDS).topics
            wanted = [name for name in listed if not is_own(name)] if names is None else names
            there = [name for name in dict.fromkeys(wanted) if name in listed]
        described = self.described(there) if there else {}
        return {name: replace(topic, leaderless=_leaderless(listed[name])) for name, topic in described.items()}

    def described(self, names: Sequence[str]) -> dict[str, KafkaTopic]:
        """Return these topics, at least one, by name.

        Raises:
            KafkaUnavailable: the cluster cannot be reached, or a topic is gone or has no leader yet.
        """
        with self.translated(f"the Kafka cluster at {self.bootstrap}"):
            asked = self.library.TopicCollection(names)
            futures = self._admin.describe_topics(asked, request_timeout=ANSWER_SECONDS)
            described = {name: future.result(timeout=ANSWER_SECONDS * 2) for name, future in futures.items()}
        return {
            name: KafkaTopic(str(description.topic_id), len(description.partitions))
            for name, description in described.items()
        }

    def partition_counts(self, names: Sequence[str]) -> tuple[dict[str, int], dict[str, Exception]]:
        """Return how many partitions those of the topics have that exist, and why that is not known of others.

        Raises:
            KafkaUnavailable: the cluster cannot be reached.
        """
        with self.translated(f"the Kafka cluster at {self.bootstrap}"):
            listed = self._admin.list_topics(timeout=ANSWER_SECONDS).topics
        there = {name: listed[name] for name in names if name in listed}
        counts = {name: len(topic.partitions) for name, topic in there.items() if topic.error is None}
        errors = {
            name: self.error(topic.error, f"topic {name} in Kafka")
            for name, topic in there.items()
            if topic.error is not None
        }
        return counts, errors

    def create_topics(self, partition_counts: Mapping[str, int], wait_seconds: float) -> dict[str, Exception]:
        """Create topics with the cluster's own defaults; return what is in the way of which.

        Those that somebody else has created meanwhile are there; others may be there later than they are waited for.

        Raises:
            RelayFailed, KafkaUnavailable: nothing can be asked for.
        """
        create = partial(self.library.admin.NewTopic, replication_factor=-1)
        new = [create(name, num_partitions=count) for name, count in partition_counts.items()]
        with self.translated("creating topics in Kafka"):
            futures = self._admin.create_topics(new, operation_timeout=ANSWER_SECONDS, request_timeout=ANSWER_SECONDS)
        done, _ = wait(futures.values(), wait_seconds)
        errors: dict[str, Exception] = {}
        for name, future in futures.items():
            what = f"creating topic {name} in Kafka"
            if future not in done:
                errors[name] = KafkaUnavailable(f"{what}: no answer in time")
            elif isinstance(error := future.exception(), self.library.KafkaException):
                if error.args[0] != self.library.KafkaError.TOPIC_ALREADY_EXISTS:
                    errors[name] = self.error(error.args[0], what)
            else:
                future.result()
        return errors

    def producer(self, transactional_id: str) -> Any:
        """Return a producer of transactions."""
        with self.translated("the settings of the Kafka producer"):
            return self.library.Producer(producer_settings(self.bootstrap, self._settings, transactional_id))

    def consumer(self, group: str, *, isolation: str = "read_committed") -> Any:
        """Return a consumer, by default of committed records; it joins no group."""
        with self.translated("the settings of the Kafka consumer"):
            settings = consumer_settings(self.bootstrap, self._settings, group) | {"isolation.level": isolation}
            return self.library.Consumer(settings | {"error_cb": self._note_trouble})

    def committed(self, consumer: Any, partitions: Sequence[tuple[str, int]]) -> list[Any]:
        """Return the positions that the consumer's group has committed in some partitions, at least one.

        Raises:
            RelayFailed, KafkaUnavailable: the cluster does not tell.
        """
        topic, number = partitions[0]
        asked = [self.library.TopicPartition(*partition) for partition in partitions]
        with self.translated(f"the position of {topic}-{number} in Kafka"):
            try:
                answers: list[Any] = consumer.committed(asked, timeout=ANSWER_SECONDS)
            except self.library.KafkaException:
                # A consumer that its group refuses says so only when it is polled.
                event = consumer.poll(0)
                if event is not None and event.error() is not None:
                    raise self.library.KafkaException(event.error()) from None
                raise
            for answer in answers:
                if answer.error is not None:
                    raise self.library.KafkaException(answer.error)
        return answers
