"""This file is what a member asks of its group: each request is a database transaction on the consumer's worker."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Final

from txnstore.clients.connection import StoreConnection
from txnstore.clients.consumer_options import ConsumerOptions
from txnstore.clients.group_topics import SubscribedTopics, read_subscribed_topics
from txnstore.clients.repeating import write_repeatable
from txnstore.clients.topic_directory import TopicDirectory
from txnstore.groups import membership as members
from txnstore.model import GroupMembership

#: How long a request to the group may take; the next one comes anyway.
REQUEST_TIMEOUT_SECONDS: Final = 10.0


class GroupRequests:
    """The requests of one consumer; all of them may raise TxnStoreError."""

    def __init__(self, connection: StoreConnection, directory: TopicDirectory, options: ConsumerOptions) -> None:
        """Ask with these settings."""
        self._connection = connection
        self._directory = directory
        self._options = options

    def find(self, topics: Sequence[str]) -> SubscribedTopics:
        """Return the partitions that the subscription comes to now."""
        return read_subscribed_topics(self._directory, topics, creates_topics=self._options.creates_topics)

    def join(self, topics: Sequence[str], found: SubscribedTopics, member_id: str) -> GroupMembership:
        """Become the group's member, by a name of its own if it has none yet."""
        assignment: dict[str, list[int]] = {}
        for topic, number in found.partitions:
            assignment.setdefault(topic, []).append(number)
        request = members.JoinRequest(
            group_id=self._options.group_id,
            member_id=member_id or f"{self._options.client_id}-{uuid.uuid4()}",
            group_instance_id=self._options.group_instance_id,
            client_id=self._options.client_id,
            session_timeout_ms=self._options.session_timeout_ms,
            assignor=self._options.assignors[0],
            subscription=topics,
            assignment=assignment,
        )
        joined = write_repeatable(
            self._connection.store(),
            lambda connection: members.join(connection, request),
            timeout_seconds=REQUEST_TIMEOUT_SECONDS,
        )
        return joined.membership

    def heartbeat(self, membership: GroupMembership) -> None:
        """Say that the member is alive."""
        write_repeatable(
            self._connection.store(),
            lambda connection: members.heartbeat(connection, membership),
            timeout_seconds=REQUEST_TIMEOUT_SECONDS,
        )

    def leave(self, membership: GroupMembership) -> None:
        """Be the group's member no more."""
        write_repeatable(
            self._connection.store(),
            lambda connection: members.leave(connection, membership),
            timeout_seconds=REQUEST_TIMEOUT_SECONDS,
        )
