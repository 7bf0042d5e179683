"""The requests of a member to its group, each one database transaction, and what its subscription matches."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from sqlalchemy import Connection

from txnstore.clients.connection import StoreConnection, repeat, write_repeatable
from txnstore.clients.consumer.arguments import ConsumerOptions
from txnstore.clients.consumer.events import refused_topic, unknown_topic
from txnstore.clients.model.errors import KafkaError
from txnstore.clients.topic_directory import TopicDirectory
from txnstore.db.backend import Subjects
from txnstore.db.store import Store, chunks
from txnstore.errors import TxnStoreError
from txnstore.groups import coordinator
from txnstore.groups.group import MemberAnswer, MemberDetails, Report
from txnstore.log.topics import Topic, find_topics
from txnstore.model import NO_GENERATION, GroupMembership, is_storable_text

Answered = TypeVar("Answered")

#: How long a request to the group may take; the next one comes in any case.
REQUEST_TIMEOUT_SECONDS: Final = 10.0
#: How long a look for news may take: it is one of many.
LOOK_TIMEOUT_MS: Final = 200


@dataclass(frozen=True, slots=True)
class SubscribedTopics:
    """What a subscription matches: existing partitions, in order, and topics that do not exist."""

    partitions: tuple[tuple[str, int], ...]
    missing: Mapping[str, KafkaError]
    """By name, with what the application is told."""

    names: frozenset[str]
    """All topics, including those that do not exist: their partitions count as soon as there are any."""


class GroupRequests:
    """The requests of one consumer; each may raise TxnStoreError, and repeating one does no harm."""

    def __init__(self, connection: StoreConnection, directory: TopicDirectory, options: ConsumerOptions) -> None:
        """Make requests for the consumer with these options."""
        self._connection = connection
        self._directory = directory
        self._options = options
        self._found: tuple[tuple[str, int], ...] = ()

    def new_identity(self) -> GroupMembership:
        """Return a membership that no consumer had before, to join with."""
        member_id = f"{self._options.client_id}-{uuid.uuid4()}"
        return GroupMembership(
            self._options.group_id,
            NO_GENERATION,
            member_id,
            self._options.group_instance_id,
            self._options.commits_unowned,
        )

    def find(self, topics: Sequence[str]) -> SubscribedTopics:
        """Return what the topics and patterns (`^...`) of a subscription match now."""
        names = {name for name in topics if not name.startswith("^")}
        matched: set[str] = set()
        for pattern in topics:
            if pattern.startswith("^"):
                matched.update(self._directory.match(pattern))
        existing = self._directory.refresh(names | matched)
        refused: dict[str, TxnStoreError] = {}
        if self._options.creates_topics:
            created, refused = self._directory.ensure_all(names - existing.keys())
            existing |= created
        partitions = tuple(
            (name, number) for name in sorted(existing) for number in range(len(existing[name].partition_ids))
        )
        if partitions != self._found:
            self._bring_copies(existing)
            self._found = partitions
        missing = {
            name: refused_topic(name, refused[name]) if name in refused else unknown_topic(name)
            for name in names - existing.keys()
        }
        return SubscribedTopics(partitions, missing, frozenset(names | existing.keys()))

    def _bring_copies(self, existing: Mapping[str, Topic]) -> None:
        """Let the group assign what the controller knows: the group's database may not have heard of it yet."""
        cluster = self._connection.cluster()
        store = cluster.coordinator_of(self._options.group_id)
        if store is cluster.controller:
            return

        def copied(connection: Connection) -> dict[str, tuple[int, ...]]:
            copies = (topic for some in chunks(list(existing)) for topic in find_topics(connection, some))
            return {topic.name: topic.partition_ids for topic in copies}

        # Mostly it has: the whole catalogue need not be read for that, at each start of each consumer.
        if store.read(copied) != {name: topic.partition_ids for name, topic in existing.items()}:
            cluster.reconcile(store.database_id)

    def join(self, topics: Sequence[str], found: SubscribedTopics, report: Report) -> MemberAnswer:
        """Enter the group, or tell it of a changed subscription."""
        details = MemberDetails(
            client_id=self._options.client_id,
            session_timeout_ms=self._options.session_timeout_ms,
            # Text that no database stores names no topic.
            subscription=tuple(filter(is_storable_text, topics)),
            topics=frozenset(filter(is_storable_text, found.names)),
            assignors=self._options.assignors,
        )
        return self._at_group(
            lambda store: write_repeatable(
                store,
                lambda connection: coordinator.join(connection, report, details),
                timeout_seconds=REQUEST_TIMEOUT_SECONDS,
                wakes_readers=True,
            )
        )

    def heartbeat(self, report: Report, *, wakes_readers: bool) -> MemberAnswer:
        """Report what the member owns and return what it may own; with `wakes_readers` the other members hear of it.

        They hear of a new generation in any case: this member may have found another one expired.
        """
        store = self._store()
        answer = write_repeatable(
            store,
            lambda connection: coordinator.heartbeat(connection, report),
            timeout_seconds=REQUEST_TIMEOUT_SECONDS,
            wakes_readers=wakes_readers,
        )
        if not wakes_readers and answer.membership.generation != report.membership.generation:
            store.announce(Subjects(group_ids=frozenset([report.membership.group_id])))
        return answer

    def renew(self, membership: GroupMembership) -> bool:
        """Tell the group that the member is alive; False if nothing was told because there is news."""
        return write_repeatable(
            self._store(),
            lambda connection: coordinator.renew(connection, membership),
            timeout_seconds=REQUEST_TIMEOUT_SECONDS,
        )

    def has_news(self, membership: GroupMembership) -> bool:
        """Return whether the group has rebalanced since the member was told its generation."""
        store = self._store()
        # One that only looks has the time, and its closing does not wait for this.
        coordinator.make_ready_to_leave(store)
        return store.read(
            lambda connection: coordinator.has_news(connection, membership), retry_timeout_ms=LOOK_TIMEOUT_MS
        )

    def leave(self, membership: GroupMembership) -> None:
        """Leave the group."""
        store = self._store()
        repeat(
            lambda retry_timeout_ms: coordinator.leave(store, membership, retry_timeout_ms=retry_timeout_ms),
            timeout_seconds=REQUEST_TIMEOUT_SECONDS,
        )

    def _store(self) -> Store:
        return self._connection.cluster().coordinator_of(self._options.group_id)

    def _at_group(self, call: Callable[[Store], Answered]) -> Answered:
        return self._connection.cluster().at_coordinator(self._options.group_id, call)
