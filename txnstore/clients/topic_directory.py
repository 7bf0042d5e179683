"""The topics that a client knows: read when they are needed, kept for a while, created if that is allowed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from sqlalchemy import Connection

from txnstore.clients.brokers import BROKER_ID, broker_id_of, brokers_metadata
from txnstore.clients.connection import StoreConnection
from txnstore.clients.model.errors import kafka_error_of
from txnstore.clients.model.metadata import ClusterMetadata, PartitionMetadata, TopicMetadata
from txnstore.db.cluster.catalogue import read_store_settings
from txnstore.db.cluster.membership import CONTROLLER_ID
from txnstore.db.identity import check_same_store, same_store_check
from txnstore.db.store import Store
from txnstore.errors import (
    InvalidRequest,
    InvalidTopic,
    PermissionDenied,
    StoreReadOnly,
    TxnStoreError,
    UnknownTopicOrPartition,
)
from txnstore.log.topics import Topic, check_topic_name, ensure_topic, find_topics, list_topics

Result = TypeVar("Result")

#: How many names one statement asks for; databases limit its parameters.
_NAMES_MAX: Final = 1_000
#: How long a topic that was read long ago still counts where the controller cannot be asked.
_KEEP_SECONDS: Final = 5.0
#: How long it is asked where others wait that can do without.
_TRY_MS: Final = 1_000


@dataclass(frozen=True, slots=True)
class _Entry:
    topic: Topic
    read_seconds: float


class TopicDirectory:
    """The topics that a client has to do with; safe to share between its threads.

    All methods but `cached`, `known` and `forget` ask the database: run them on a worker.  They raise TxnStoreError if
    it cannot be reached or refuses.
    """

    def __init__(
        self,
        connection: StoreConnection,
        *,
        refresh_ms: int,
        allow_create: bool,
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        """Remember topics for `refresh_ms` (a negative number: for ever); create them if `allow_create`."""
        self._connection = connection
        self._refresh_seconds = refresh_ms / 1000 if refresh_ms >= 0 else float("inf")
        self._allow_create = allow_create
        self._monotonic_seconds = monotonic_seconds
        self.entries: dict[str, _Entry] = {}
        """What was read, by name; one that is read again is another one."""

        self._away: TxnStoreError | None = None
        """Why the controller of a cluster could not be asked a moment ago."""
        self._away_until = 0.0
        self.may_write = True
        """Whether a topic can be created at the moment: not while an enlisted connection holds SQLite's write lock."""

    def cached(self, name: str, number: int = -1) -> Topic | None:
        """Return the topic as it was last read, however long ago; asks no database.

        None if it lacked the partition of this number, and was read so long ago that it may have more by now.
        """
        entry = self.entries.get(name)
        if entry is None or (number >= len(entry.topic.partition_ids) and entry.read_seconds <= self._oldest_seconds()):
            return None
        return entry.topic

    def forget(self, name: str) -> None:
        """Read the topic again when it is next needed: something said that it is no longer as it was."""
        self.entries.pop(name, None)

    def forget_all(self) -> None:
        """Read every topic again when it is next needed."""
        self.entries.clear()

    def again_if_unknown(self, names: Iterable[str], call: Callable[[], Result]) -> Result:
        """Make a call; once more, with the topics read again, if the store says that a partition is not there.

        One that was deleted and recreated has other partitions than those remembered under its name.
        """
        try:
            return call()
        except UnknownTopicOrPartition:
            for name in names:
                self.forget(name)
            return call()

    def known(self, names: Iterable[str]) -> dict[str, Topic] | None:
        """Return the topics if `find` would return them all without asking the database."""
        oldest_seconds = self._oldest_seconds()
        found: dict[str, Topic] = {}
        for name in names:
            entry = self.entries.get(name)
            if entry is None or entry.read_seconds <= oldest_seconds:
                return None
            found[name] = entry.topic
        return found

    def find(self, names: Iterable[str]) -> dict[str, Topic]:
        """Return those of the topics that there are; the database is asked for what is unknown or was read long ago."""
        wanted = list(dict.fromkeys(names))
        oldest_seconds = self._oldest_seconds()
        # Taken once: another thread may forget a topic in between.
        entries = {name: self.entries.get(name) for name in wanted}
        found = {
            name: entry.topic
            for name, entry in entries.items()
            if entry is not None and entry.read_seconds > oldest_seconds
        }
        missing = [name for name in wanted if name not in found]
        if not missing:
            return found
        try:
            return found | self.refresh(missing)
        except TxnStoreError as error:
            old = {name: entry.topic for name, entry in entries.items() if entry is not None}
            if self._connection.is_alone or not error.retriable or not all(name in old for name in missing):
                raise
            # The controller is away; what lives in other databases goes on meanwhile.
            self._keep_for_now(missing)
            return found | {name: old[name] for name in missing}

    def look_up(self, numbers: Mapping[str, int]) -> tuple[dict[str, Topic], dict[str, TxnStoreError]]:
        """Return those of the topics that there are, as far as each has the partition of this number read anew.

        And of which of them the controller of a cluster could not tell, because it is away: it is tried for a moment
        and then not for some seconds, so that what lives in other databases goes on meanwhile.
        """
        oldest_seconds = self._oldest_seconds()
        entries = {name: entry for name in numbers if (entry := self.entries.get(name)) is not None}
        known = {name: entry.topic for name, entry in entries.items()}
        missing = [
            name
            for name, number in numbers.items()
            if name not in entries
            or entries[name].read_seconds <= oldest_seconds
            or number >= len(known[name].partition_ids)
        ]
        if not missing:
            return known, {}
        if self._away is None or self._monotonic_seconds() >= self._away_until:
            try:
                found = self.refresh(missing, retry_timeout_ms=_TRY_MS)
            except TxnStoreError as error:
                if self._connection.is_alone or not error.retriable:
                    raise
                self._away, self._away_until = error.with_traceback(None), self._monotonic_seconds() + _KEEP_SECONDS
            else:
                self._away = None
                return {name: topic for name, topic in known.items() if name not in missing} | found, {}
        self._keep_for_now(missing)
        return known, dict.fromkeys(missing, self._away)

    def _oldest_seconds(self) -> float:
        """Return since when a topic must have been read to count without another look."""
        return self._monotonic_seconds() - self._refresh_seconds

    def _keep_for_now(self, names: Iterable[str]) -> None:
        """Let the old entries count for a moment, so that the controller is not asked all the time."""
        read_seconds = self._monotonic_seconds() - max(0.0, self._refresh_seconds - _KEEP_SECONDS)
        for name in names:
            entry = self.entries.get(name)
            if entry is not None:
                self.entries[name] = _Entry(entry.topic, read_seconds)

    def refresh(self, names: Iterable[str], *, retry_timeout_ms: int | None = None) -> dict[str, Topic]:
        """Return those of the topics that there are, as they are now."""
        wanted = list(dict.fromkeys(names))
        if not wanted:
            return {}
        read_seconds = self._monotonic_seconds()
        store = self._connection.store()
        found = store.read(
            lambda connection: _find(connection, wanted, same_store_check(store, connection)),
            retry_timeout_ms=retry_timeout_ms,
        )
        self._remember(wanted, found, read_seconds)
        return found

    def _remember(self, names: Iterable[str], found: Mapping[str, Topic], read_seconds: float) -> None:
        """Keep these topics as they were found at this moment, or forget those that were not."""
        for name in names:
            topic = found.get(name)
            if topic is None:
                self.entries.pop(name, None)
            else:
                self._learn(topic)
                self.entries[name] = _Entry(topic, read_seconds)

    def _read(self, work: Callable[[Connection], Result]) -> Result:
        """Ask the controller, if it is still the store that was opened: another one's topics are not this client's."""
        store = self._connection.store()

        def checked(connection: Connection) -> Result:
            check_same_store(store, connection)
            return work(connection)

        return store.read(checked)

    def _learn(self, topic: Topic) -> None:
        """Let the cluster know where the partitions live; look at it again if it has grown meanwhile."""
        cluster = self._connection.cluster()
        if not cluster.is_alone or any(leader != CONTROLLER_ID for leader in topic.leaders):
            known = {member.database_id for member in cluster.databases}
            if not known.issuperset(topic.leaders):
                cluster.refresh()
            cluster.learn(topic)

    def ensure(self, name: str) -> Topic:
        """Return the topic; it is created if it is not there, this client may, and the store allows it.

        Raises:
            InvalidTopic: Kafka does not allow the name.
            UnknownTopicOrPartition: there is no such topic, and nobody may create it by using it.
        """
        if name not in self.entries:
            check_topic_name(name)
        found = self.find([name])
        if found:
            return found[name]
        read_seconds = self._monotonic_seconds()
        topic = create_used_topic(self._connection.store(), name, allow_create=self._allow_create and self.may_write)
        self._learn(topic)
        self._connection.cluster().publish()
        self.entries[name] = _Entry(topic, read_seconds)
        return topic

    def ensure_all(self, names: Iterable[str]) -> tuple[dict[str, Topic], dict[str, TxnStoreError]]:
        """Return those of the topics that there are now, as `ensure`; and why the store refused to create others."""
        found: dict[str, Topic] = {}
        refused: dict[str, TxnStoreError] = {}
        for name in names:
            try:
                found[name] = self.ensure(name)
            except (UnknownTopicOrPartition, InvalidTopic):
                continue
            except (PermissionDenied, StoreReadOnly) as error:
                refused[name] = error
        return found, refused

    def create_within(self, connection: Connection, names: Iterable[str]) -> list[str]:
        """Create those of the topics that are not there and may be created, and return which.

        They stand once the owner of `connection` commits; if that fails, forget them.
        """
        created: list[str] = []
        for name in names if self._allow_create else ():
            with suppress(InvalidTopic, UnknownTopicOrPartition):
                check_topic_name(name)
                if not self.find([name]):
                    topic = create_used_topic_within(connection, name)
                    self.entries[name] = _Entry(topic, self._monotonic_seconds())
                    created.append(name)
        return created

    def match(self, pattern: str) -> list[str]:
        """Return the names of all topics in which the regular expression is found, sorted.

        Raises:
            InvalidRequest: it is not a regular expression.
        """
        try:
            expression = re.compile(pattern)
        except re.error as error:
            raise InvalidRequest(f"{pattern[:80]!r} is not a regular expression: {error}") from None
        names = self._read(list_topics)
        return [name for name in names if expression.search(name)]

    def cluster_metadata(self, topic: str | None = None) -> ClusterMetadata:
        """Return the cluster with this topic, or with all topics.

        A topic that is named and unknown is created if this client may and the store allows it; otherwise its entry
        holds the error.
        """
        cluster = self._connection.cluster()
        store = cluster.controller
        metadata = ClusterMetadata()
        metadata.cluster_id = store.store_uuid
        metadata.controller_id = metadata.orig_broker_id = BROKER_ID
        metadata.brokers = {broker.id: broker for broker in brokers_metadata(cluster)}
        broker = metadata.brokers[BROKER_ID]
        metadata.orig_broker_name = f"{broker.host}:{broker.port}/{BROKER_ID}"
        if topic is None:
            # Those alone that are remembered already: of all the others nothing may ever be wanted.
            names, read_seconds = list(self.entries), self._monotonic_seconds()
            topics = self._read(lambda connection: _find(connection, list_topics(connection)))
            self._remember(names, topics, read_seconds)
            metadata.topics = {name: _topic_metadata(found) for name, found in topics.items()}
        else:
            metadata.topics = {topic: self._named(topic)}
        return metadata

    def _named(self, name: str) -> TopicMetadata:
        self.forget(name)
        try:
            return _topic_metadata(self.ensure(name))
        except TxnStoreError as error:
            if not isinstance(error, _ERRORS_OF_TOPICS):
                raise
            metadata = TopicMetadata()
            metadata.topic = name
            metadata.error = kafka_error_of(error)
            return metadata


def create_used_topic(store: Store, name: str, *, allow_create: bool) -> Topic:
    """Return a topic that is not there yet, created because somebody uses it.

    Raises:
        InvalidTopic: Kafka does not allow the name.
        UnknownTopicOrPartition: this client may not create it (`allow_create`), or the store does not allow it.
    """
    check_topic_name(name)
    if not allow_create:
        raise _unknown(name)
    return store.write(lambda connection: create_used_topic_within(connection, name))


def create_used_topic_within(connection: Connection, name: str) -> Topic:
    """Return the topic, created if the store allows it.

    Raises:
        UnknownTopicOrPartition: the store does not allow it.
    """
    settings = read_store_settings(connection)
    if not settings["auto.create.topics.enable"]:
        raise _unknown(name)
    return ensure_topic(connection, name, partition_count=settings["num.partitions"])


def _unknown(name: str) -> UnknownTopicOrPartition:
    return UnknownTopicOrPartition(f"there is no topic {name!r}")


_ERRORS_OF_TOPICS: Final = (UnknownTopicOrPartition, InvalidTopic)


def _find(
    connection: Connection, names: list[str], check: Callable[[str | None, int, int], None] | None = None
) -> dict[str, Topic]:
    found: dict[str, Topic] = {}
    for start in range(0, len(names), _NAMES_MAX):
        for topic in find_topics(connection, names[start : start + _NAMES_MAX], check=check):
            found[topic.name] = topic
    return found


def _topic_metadata(topic: Topic) -> TopicMetadata:
    metadata = TopicMetadata()
    metadata.topic = topic.name
    for number, leader in enumerate(topic.leaders):
        partition = PartitionMetadata()
        partition.id = number
        partition.leader = broker_id_of(leader)
        partition.replicas, partition.isrs = [partition.leader], [partition.leader]
        metadata.partitions[number] = partition
    return metadata
