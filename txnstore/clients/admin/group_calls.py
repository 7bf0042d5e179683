"""This file is the admin client's calls about consumer groups and their offsets."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from txnstore.clients.admin import groups as admin_groups
from txnstore.clients.admin.calls import check_flag
from txnstore.clients.admin.group_arguments import check_group_ids, check_requests, check_states, check_types
from txnstore.clients.admin.group_results import ConsumerGroupDescription, ListConsumerGroupsResult
from txnstore.clients.admin.handle import AdminHandle, check_wait
from txnstore.clients.model.kafka_error import HANDLE_CLOSED_TEXT, KafkaError, KafkaException
from txnstore.clients.model.metadata import (
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    ConsumerGroupType,
    GroupMetadata,
)
from txnstore.db.store import Store

_ALL: Final = "all"

_Work = Callable[[Store, Any, ConsumerGroupTopicPartitions], ConsumerGroupTopicPartitions]


class GroupCalls(AdminHandle):
    """The calls of `AdminClient` about groups."""

    def list_consumer_groups(
        self,
        *,
        states: set[ConsumerGroupState] | None = None,
        types: set[ConsumerGroupType] | None = None,
        request_timeout: float | None = None,
    ) -> Future[ListConsumerGroupsResult]:
        """List the groups that are in one of these states and of one of these types; none given: of any.

        Every group is of type CLASSIC.

        Raises:
            TypeError, ValueError: an argument is wrong.
        """
        self._check_call(None, request_timeout)
        wanted_states, wanted_types = check_states(states), check_types(types)
        return self._calls.for_each(
            self,
            "list_consumer_groups",
            [_ALL],
            lambda store, call, _: admin_groups.find(store, call.retry_ms(store), wanted_states, wanted_types),
            request_timeout,
        )[_ALL]

    def describe_consumer_groups(
        self,
        group_ids: list[str],
        *,
        include_authorized_operations: bool = False,
        request_timeout: float | None = None,
    ) -> dict[str, Future[ConsumerGroupDescription]]:
        """Describe groups; one that nobody has used is DEAD.

        A future fails with INVALID_GROUP_ID, and all of them with `_INVALID_ARG` if a group was given twice.

        Raises:
            TypeError, ValueError: an argument is wrong.
        """
        self._check_call(None, request_timeout)
        check_flag("include_authorized_operations", include_authorized_operations)
        wanted = check_group_ids(group_ids, "described")
        return self._calls.for_each(
            self,
            "describe_consumer_groups",
            wanted,
            _unless_twice(admin_groups.describe, len(set(wanted)) < len(wanted), "groups"),
            request_timeout,
        )

    def delete_consumer_groups(
        self, group_ids: list[str], *, request_timeout: float | None = None
    ) -> dict[str, Future[None]]:
        """Delete groups without members, and their offsets.

        A future fails with GROUP_ID_NOT_FOUND, INVALID_GROUP_ID, or NON_EMPTY_GROUP if the group has members or an
        open transaction holds offsets of it; and all of them with `_INVALID_ARG` if a group was given twice.

        Raises:
            TypeError, ValueError: an argument is wrong; nothing was deleted.
        """
        self._check_call(None, request_timeout)
        wanted = check_group_ids(group_ids, "deleted")
        return self._calls.for_each(
            self,
            "delete_consumer_groups",
            wanted,
            _unless_twice(admin_groups.delete, len(set(wanted)) < len(wanted), "groups"),
            request_timeout,
        )

    def list_groups(self, group: str | None = None, timeout: float = -1) -> list[GroupMetadata]:
        """Return all groups, or the one of this id; deprecated.  A negative timeout (seconds) waits for ever.

        `metadata` and `assignment` of a member are in the format of Kafka's consumer protocol.

        Raises:
            KafkaException: `_TIMED_OUT`, INVALID_GROUP_ID, or the database cannot be reached or refuses.
        """
        warnings.warn(
            "list_groups() is deprecated, use list_consumer_groups() and describe_consumer_groups() instead.",
            DeprecationWarning,
            stacklevel=2,
        )
        self._refuse_if_closed(HANDLE_CLOSED_TEXT)
        if group is not None and not isinstance(group, str):
            raise TypeError(f"argument 1 must be str or None, not {type(group).__name__}")
        check_wait(timeout)
        return self._calls.run(self, "list_groups", lambda store: admin_groups.list_metadata(store, group), timeout)

    def list_consumer_group_offsets(
        self,
        list_consumer_group_offsets_request: list[ConsumerGroupTopicPartitions],
        *,
        require_stable: bool = False,
        request_timeout: float | None = None,
    ) -> dict[str, Future[ConsumerGroupTopicPartitions]]:
        """Return what groups have committed in these partitions; without partitions, all that each has committed.

        A partition without a committed offset has OFFSET_INVALID, one that there is not has the error
        UNKNOWN_TOPIC_OR_PART.  With `require_stable`, one whose offset an open transaction may still change has
        UNSTABLE_OFFSET_COMMIT: ask again.

        A future fails with INVALID_GROUP_ID, and all of them with `_INVALID_ARG` if something was given twice.

        Raises:
            TypeError, ValueError: an argument is wrong.
        """
        self._check_call(None, request_timeout)
        check_flag("require_stable", require_stable)
        return self._for_each_group(
            "list_consumer_group_offsets",
            check_requests(list_consumer_group_offsets_request, with_offsets=False, may_be_all=True),
            functools.partial(admin_groups.list_offsets, require_stable=require_stable),
            request_timeout,
        )

    def alter_consumer_group_offsets(
        self,
        alter_consumer_group_offsets_request: list[ConsumerGroupTopicPartitions],
        *,
        request_timeout: float | None = None,
    ) -> dict[str, Future[ConsumerGroupTopicPartitions]]:
        """Commit offsets for groups without members; a group that there is not is made.

        Look at the `error` of each partition: UNKNOWN_TOPIC_OR_PART, or UNKNOWN_MEMBER_ID in all of them if the group
        has members, and nothing was changed then.

        A future fails with INVALID_GROUP_ID or OFFSET_METADATA_TOO_LARGE, and all of them with `_INVALID_ARG` if
        something was given twice.

        Raises:
            TypeError, ValueError: an argument is wrong; nothing was changed.
        """
        self._check_call(None, request_timeout)
        return self._for_each_group(
            "alter_consumer_group_offsets",
            check_requests(alter_consumer_group_offsets_request, with_offsets=True),
            admin_groups.alter_offsets,
            request_timeout,
        )

    def delete_consumer_group_offsets(
        self,
        delete_consumer_group_offsets_request: list[ConsumerGroupTopicPartitions],
        *,
        request_timeout: float | None = None,
    ) -> dict[str, Future[ConsumerGroupTopicPartitions]]:
        """Delete what groups have committed in these partitions; confluent-kafka has no such call, Java's Admin has.

        What open transactions would commit there is dropped too.  Look at the `error` of each partition:
        GROUP_SUBSCRIBED_TO_TOPIC if members of the group use the topic, UNKNOWN_TOPIC_OR_PART.

        A future fails with GROUP_ID_NOT_FOUND or INVALID_GROUP_ID, and all of them with `_INVALID_ARG` if something
        was given twice.

        Raises:
            TypeError, ValueError: an argument is wrong; nothing was deleted.
        """
        self._check_call(None, request_timeout)
        return self._for_each_group(
            "delete_consumer_group_offsets",
            check_requests(delete_consumer_group_offsets_request, with_offsets=None),
            admin_groups.delete_offsets,
            request_timeout,
        )

    def _for_each_group(
        self,
        name: str,
        checked: tuple[list[ConsumerGroupTopicPartitions], bool],
        work: _Work,
        request_timeout: float | None,
    ) -> dict[str, Future[ConsumerGroupTopicPartitions]]:
        requests, twice = checked
        of_group = {request.group_id: request for request in requests}

        def work_on(store: Store, call: Any, group_id: str) -> ConsumerGroupTopicPartitions:
            return work(store, call, of_group[group_id])

        return self._calls.for_each(self, name, of_group, _unless_twice(work_on, twice, "partitions"), request_timeout)


def _unless_twice(work: Callable[[Store, Any, str], Any], twice: bool, what: str) -> Callable[[Store, Any, str], Any]:
    """Return `work`, or what refuses every item because one was given twice."""
    if not twice:
        return work

    def refuse(store: Store, call: Any, item: str) -> Any:
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, f"Duplicate {what} not allowed"))

    return refuse
