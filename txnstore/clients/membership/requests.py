"""This file is what a member asks of its group: each request is one database transaction, on a thread of its own."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from txnstore.clients.backoff import write_repeatable
from txnstore.clients.connection import StoreConnection
from txnstore.clients.consumer.arguments import ConsumerOptions
from txnstore.clients.membership.topics import SubscribedTopics, read_subscribed_topics
from txnstore.clients.topic_directory import TopicDirectory
from txnstore.db.store import Store
from txnstore.groups import coordinator
from txnstore.groups.commit_rules import is_storable_text
from txnstore.groups.group import MemberAnswer, MemberDetails, Report
from txnstore.model import NO_GENERATION, GroupMembership

Answered = TypeVar("Answered")

#: How long a request to the group may take; the next one comes anyway.
REQUEST_TIMEOUT_SECONDS: Final = 10.0
#: A look for news is one of many.
LOOK_TIMEOUT_MS: Final = 200


class GroupRequests:
    """The requests of one consumer; all of them may raise TxnStoreError, and repeating one does no harm."""

    def __init__(self, connection: StoreConnection, directory: TopicDirectory, options: ConsumerOptions) -> None:
        """Ask with these settings."""
        self._connection = connection
        self._directory = directory
        self._options = options
        self._found: tuple[tuple[str, int], ...] = ()

    def new_seat(self) -> GroupMembership:
        """Return a membership that nobody had before, to join with."""
        member_id = f"{self._options.client_id}-{uuid.uuid4()}"
        return GroupMembership(
            self._options.group_id,
            NO_GENERATION,
            member_id,
            self._options.group_instance_id,
            self._options.commits_unowned,
        )

    def find(self, topics: Sequence[str]) -> SubscribedTopics:
        """Return the partitions that the subscription comes to now."""
        found = read_subscribed_topics(self._directory, topics, creates_topics=self._options.creates_topics)
        if found.partitions != self._found:
            self._bring_copies()
            self._found = found.partitions
        return found

    def _bring_copies(self) -> None:
        """See to it that the group deals out what the controller knows: its database may not have heard of it yet."""
        cluster = self._connection.cluster()
        if not cluster.is_alone:
            cluster.reconcile(cluster.coordinator_of(self._options.group_id).database_id)

    def join(self, topics: Sequence[str], found: SubscribedTopics, report: Report) -> MemberAnswer:
        """Enter the group, or tell it of another subscription."""
        details = MemberDetails(
            client_id=self._options.client_id,
            session_timeout_ms=self._options.session_timeout_ms,
            # What no database stores is no topic's name and matches none.
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
        """Say what the member owns and hear what it may have; with `wakes_readers` the other members hear of it.

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
            store.announce()
        return answer

    def renew(self, membership: GroupMembership) -> bool:
        """Say that the member is alive; False, and nothing was said: there is news."""
        return write_repeatable(
            self._store(),
            lambda connection: coordinator.renew(connection, membership),
            timeout_seconds=REQUEST_TIMEOUT_SECONDS,
        )

    def has_news(self, membership: GroupMembership) -> bool:
        """Return whether the group has rebalanced since the member was told its generation."""
        return self._store().read(
            lambda connection: coordinator.has_news(connection, membership), retry_timeout_ms=LOOK_TIMEOUT_MS
        )

    def leave(self, membership: GroupMembership) -> None:
        """Be the group's member no more."""
        write_repeatable(
            self._store(),
            lambda connection: coordinator.leave(connection, membership),
            timeout_seconds=REQUEST_TIMEOUT_SECONDS,
            wakes_readers=True,
        )

    def _store(self) -> Store:
        return self._connection.cluster().coordinator_of(self._options.group_id)

    def _at_group(self, call: Callable[[Store], Answered]) -> Answered:
        return self._connection.cluster().at_coordinator(self._options.group_id, call)
