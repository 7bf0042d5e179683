"""This file is the consumer's calls that choose what is read: subscriptions, assignments and positions."""

from __future__ import annotations

from typing import Final

from txnstore.clients.callbacks import Callbacks
from txnstore.clients.consumer.arguments import (
    check_callback,
    check_distinct,
    check_partition,
    check_partitions,
    check_topics,
    failure,
)
from txnstore.clients.consumer.assigned_partition import AssignedPartition
from txnstore.clients.consumer.base import ConsumerBase
from txnstore.clients.consumer.events import (
    Listener,
    RebalanceCallback,
)
from txnstore.clients.membership.metadata import format_group_metadata
from txnstore.clients.model.constants import OFFSET_INVALID, OFFSET_STORED
from txnstore.clients.model.kafka_error import KafkaError, KafkaException
from txnstore.clients.model.topic_partition import TopicPartition

_EAGER_TEXT: Final = (
    "Changes to the current assignment must be made using assign() when rebalance protocol type is EAGER"
)


class AssigningCalls(ConsumerBase):
    """Chooses partitions and the places in them."""

    def subscribe(
        self,
        topics: list[str],
        on_assign: RebalanceCallback | None = None,
        on_revoke: RebalanceCallback | None = None,
        on_lost: RebalanceCallback | None = None,
    ) -> None:
        """Join the group for these topics, instead of those before; a name that begins with `^` is a pattern.

        The partitions come with a later `poll()`, which calls `on_assign(consumer, partitions)`; when they go it calls
        `on_revoke`, or `on_lost` if they are another consumer's already.

        Raises:
            TypeError: the topics are no list, or a callback is none.
            KafkaException: `_INVALID_ARG`: the list is empty, names a topic twice, or holds no regular expression.
        """
        self._check()
        names = check_topics(topics)
        callbacks = Callbacks(
            on_assign=check_callback(on_assign, "on_assign"),
            on_revoke=check_callback(on_revoke, "on_revoke"),
            on_lost=check_callback(on_lost, "on_lost"),
        )
        # Those of earlier subscriptions may still be called, for what is taken away because of this one.
        self._subscription_callbacks.append(callbacks)
        listener = Listener(*map(callbacks.weakly, ("on_assign", "on_revoke", "on_lost")))
        with self._parts.arrived:
            self._parts.group.subscribe(names, listener)
            self._parts.group_thread.start()
            self._parts.fetcher.start()

    def unsubscribe(self) -> None:
        """Leave the group; the next `poll()` calls `on_revoke` and gives the partitions back."""
        self._check()
        self._parts.group.unsubscribe()

    def memberid(self) -> str | None:
        """Return the consumer's id in its group, or None as long as it is not in it."""
        self._check()
        return self._parts.group.member_id

    def consumer_group_metadata(self) -> bytes:
        """Return who the consumer is to its group, for `Producer.send_offsets_to_transaction`, in any process."""
        self._check()
        return format_group_metadata(self._parts.group.membership)

    def assign(self, partitions: list[TopicPartition]) -> None:
        """Read these partitions, instead of those before, from their offsets on.

        Without an offset a partition is read from the group's committed one on, or from where `auto.offset.reset`
        says.

        Raises:
            TypeError: they are no list of partitions.
            KafkaException: `_INVALID_ARG`: one of them is named twice.
        """
        self._check()
        chosen = check_partitions(partitions)
        check_distinct(chosen, "Failed to set assignment")
        parts = self._parts
        with parts.arrived:
            self._assignment_changed = True
            self._drop(parts.subscription.clear())
            for partition in chosen:
                parts.subscription.add(partition.topic, partition.partition, partition.offset)
            parts.read_on()

    def unassign(self) -> None:
        """Read no partition any more."""
        self._check()
        with self._parts.arrived:
            self._assignment_changed = True
            self._drop(self._parts.subscription.clear())

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        """Read these partitions as well.

        Raises:
            KafkaException: `_STATE`: the group's assignor is an eager one; `_CONFLICT`: a partition is assigned
                already; `_INVALID_ARG`: one is named twice.
        """
        self._check()
        chosen = check_partitions(partitions)
        check_distinct(chosen, "Failed to set assignment")
        parts = self._parts
        with parts.arrived:
            self._refuse_if_eager()
            for partition in chosen:
                if parts.subscription.find(partition.topic, partition.partition) is not None:
                    text = f"{partition.topic} [{partition.partition}] is already part of the current assignment"
                    raise KafkaException(KafkaError(KafkaError._CONFLICT, text))
            self._assignment_changed = True
            for partition in chosen:
                parts.subscription.add(partition.topic, partition.partition, partition.offset)
            parts.read_on()

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        """Read these partitions no more.

        Raises:
            KafkaException: `_STATE`: the group's assignor is an eager one; `_INVALID_ARG`: a partition is not
                assigned.
        """
        self._check()
        chosen = check_partitions(partitions)
        check_distinct(chosen, "Failed to set assignment")
        parts = self._parts
        with parts.arrived:
            self._refuse_if_eager()
            for partition in chosen:
                if parts.subscription.find(partition.topic, partition.partition) is None:
                    text = (
                        f"{partition.topic} [{partition.partition}] can't be unassigned since it is not in the current"
                        " assignment"
                    )
                    raise KafkaException(KafkaError(KafkaError._INVALID_ARG, text))
            self._assignment_changed = True
            removed = (parts.subscription.remove(partition.topic, partition.partition) for partition in chosen)
            self._drop([partition for partition in removed if partition is not None])

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that are read, each with the offset it was assigned with."""
        self._check()
        with self._parts.arrived:
            return [
                TopicPartition(partition.topic, partition.number, partition.assigned_offset)
                for partition in self._parts.subscription
            ]

    def _refuse_if_eager(self) -> None:
        if self._parts.group.is_subscribed and not self._parts.options.is_cooperative:
            raise KafkaException(KafkaError(KafkaError._STATE, _EAGER_TEXT))

    def seek(self, partition: TopicPartition) -> None:
        """Go on reading the partition at its `offset`; what was read ahead is dropped.

        Raises:
            TypeError: it is no partition.
            KafkaException: `_STATE`: it is not assigned; `_UNKNOWN_PARTITION`: nor has the consumer ever heard of its
                topic; `_INVALID_ARG`: OFFSET_STORED is no place to seek to.
        """
        self._check()
        wanted = check_partition(partition)
        parts = self._parts
        with parts.arrived:
            assigned = parts.subscription.find(wanted.topic, wanted.partition)
            prefix = f"Failed to seek to offset {wanted.offset}"
            if assigned is None:
                is_known = parts.directory.cached(wanted.topic) is not None or any(
                    partition.topic == wanted.topic for partition in parts.subscription
                )
                raise failure(KafkaError._STATE if is_known else KafkaError._UNKNOWN_PARTITION, prefix)
            if wanted.offset == OFFSET_STORED:
                raise failure(KafkaError._INVALID_ARG, prefix)
            parts.subscription.seek(assigned, wanted.offset)
            parts.read_on()

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Return for each partition the next offset to be handed out, or OFFSET_INVALID if there was none yet.

        Markers and aborted records that follow the last record are stepped over.
        """
        self._check()
        answer = []
        with self._parts.arrived:
            for partition in check_partitions(partitions):
                assigned = self._parts.subscription.find(partition.topic, partition.partition)
                offset = OFFSET_INVALID if assigned is None else assigned.position
                answer.append(TopicPartition(partition.topic, partition.partition, offset))
        return answer

    def pause(self, partitions: list[TopicPartition]) -> None:
        """Hand out no records of these partitions; those that are not assigned are left alone."""
        self._check()
        with self._parts.arrived:
            for assigned in self._assigned(partitions):
                self._parts.subscription.pause(assigned)

    def resume(self, partitions: list[TopicPartition]) -> None:
        """Hand out records of these partitions again; those that are not assigned are left alone."""
        self._check()
        with self._parts.arrived:
            for assigned in self._assigned(partitions):
                self._parts.subscription.resume(assigned)
            self._parts.arrived.notify_all()
            self._parts.read_on()

    def _assigned(self, partitions: list[TopicPartition]) -> list[AssignedPartition]:
        found = (
            self._parts.subscription.find(partition.topic, partition.partition)
            for partition in check_partitions(partitions)
        )
        return [partition for partition in found if partition is not None]
