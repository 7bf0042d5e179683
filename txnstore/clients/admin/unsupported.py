"""This file is the calls of confluent-kafka's admin client that a database has no use for: they say so, and why.

Arguments are checked as there, nothing is opened, and every answer is `_UNSUPPORTED_FEATURE`.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from txnstore.clients.admin.handle import AdminHandle
from txnstore.clients.admin.security import AclBinding, AclBindingFilter, UserScramCredentialAlteration
from txnstore.clients.model.kafka_error import HANDLE_CLOSED_TEXT, KafkaError, KafkaException
from txnstore.clients.model.metadata import ElectionType
from txnstore.clients.model.topic_partition import TopicPartition

Item = TypeVar("Item")

_ACLS: Final = (
    "there are no ACLs: the database decides who may do what; use its roles and GRANT, or a file's permissions"
)
_CREDENTIALS: Final = "there are no SCRAM credentials: users and their passwords are the database's own"
_SASL: Final = "there is no SASL: user and password are in the URL of the database, or where its driver looks for them"
_ELECTIONS: Final = "there are no elections: the database is the leader of every partition"


class RefusedCalls(AdminHandle):
    """The calls of `AdminClient` that are not supported."""

    def create_acls(
        self, acls: list[AclBinding], *, request_timeout: float | None = None
    ) -> dict[AclBinding, Future[None]]:
        """Refuse: each future fails with `_UNSUPPORTED_FEATURE`.

        Raises:
            TypeError, ValueError: an argument is wrong.
        """
        self._check_call(None, request_timeout)
        return _refused(_check_list(acls, AclBinding), _ACLS)

    def describe_acls(
        self, acl_binding_filter: AclBindingFilter, *, request_timeout: float | None = None
    ) -> Future[list[AclBinding]]:
        """Refuse: the future fails with `_UNSUPPORTED_FEATURE`.

        Raises:
            TypeError: an argument is wrong.
        """
        self._check_call(None, request_timeout)
        if not isinstance(acl_binding_filter, AclBindingFilter):
            raise TypeError("Expected an AclBindingFilter object")
        return _failed(_ACLS)

    def delete_acls(
        self, acl_binding_filters: list[AclBindingFilter], *, request_timeout: float | None = None
    ) -> dict[AclBindingFilter, Future[list[AclBinding]]]:
        """Refuse: each future fails with `_UNSUPPORTED_FEATURE`.

        Raises:
            TypeError, ValueError: an argument is wrong.
        """
        self._check_call(None, request_timeout)
        return _refused(_check_list(acl_binding_filters, AclBindingFilter), _ACLS)

    def describe_user_scram_credentials(
        self, users: list[str] | None = None, *, request_timeout: float | None = None
    ) -> Future[Any] | dict[str, Future[Any]]:
        """Refuse: the future, or each user's, fails with `_UNSUPPORTED_FEATURE`.

        Raises:
            TypeError: an argument is wrong.
        """
        self._check_call(None, request_timeout)
        if users is None:
            return _failed(_CREDENTIALS)
        if not isinstance(users, list):
            raise TypeError("Expected input to be list of String")
        if not all(isinstance(user, str) for user in users):
            raise TypeError("Each value should be a string")
        return _refused(users, _CREDENTIALS)

    def alter_user_scram_credentials(
        self, alterations: list[UserScramCredentialAlteration], *, request_timeout: float | None = None
    ) -> dict[str, Future[None]]:
        """Refuse: each user's future fails with `_UNSUPPORTED_FEATURE`.

        Raises:
            TypeError, ValueError: an argument is wrong.
        """
        self._check_call(None, request_timeout)
        if not isinstance(alterations, list):
            raise TypeError("Expected input to be list")
        if not alterations:
            raise ValueError("Expected at least one alteration")
        if not all(isinstance(alteration, UserScramCredentialAlteration) for alteration in alterations):
            raise TypeError("Expected each element of list to be subclass of UserScramCredentialAlteration")
        return _refused([alteration.user for alteration in alterations], _CREDENTIALS)

    def set_sasl_credentials(self, username: str, password: str) -> None:
        """Refuse.

        Raises:
            TypeError: an argument is no text.
            KafkaException: `_UNSUPPORTED_FEATURE`.
        """
        self._refuse_if_closed(HANDLE_CLOSED_TEXT)
        for position, text in enumerate((username, password), start=1):
            if not isinstance(text, str):
                raise TypeError(f"argument {position} must be str, not {type(text).__name__}")
        raise _refusal(_SASL)

    def elect_leaders(
        self,
        election_type: ElectionType,
        partitions: list[TopicPartition] | None = None,
        *,
        operation_timeout: float | None = None,
        request_timeout: float | None = None,
    ) -> Future[dict[TopicPartition, KafkaException | None]]:
        """Refuse: the future fails with `_UNSUPPORTED_FEATURE`.

        Raises:
            TypeError, ValueError: an argument is wrong.
        """
        self._check_call(operation_timeout, request_timeout)
        if not isinstance(election_type, ElectionType):
            raise TypeError("Expected 'election_type' to be of type 'ElectionType'")
        if partitions is not None and not isinstance(partitions, list):
            raise TypeError(f"Expected 'partitions' to be a list, got '{type(partitions).__name__}'")
        for partition in partitions or ():
            if not isinstance(partition, TopicPartition):
                raise TypeError(
                    "Element of the 'partitions' list must be of type 'TopicPartition' got"
                    f" '{type(partition).__name__}'"
                )
        return _failed(_ELECTIONS)


def _check_list(items: object, kind: type[Item]) -> list[Item]:
    if not isinstance(items, list):
        raise TypeError(f"Expected a list of {kind.__name__} objects, not {type(items).__name__}")
    if not items:
        raise ValueError(f"Expected non-empty list of {kind.__name__} objects")
    if not all(isinstance(item, kind) for item in items):
        raise ValueError(f"Expected list of {kind.__name__} objects")
    return items


def _refusal(reason: str) -> KafkaException:
    return KafkaException(KafkaError(KafkaError._UNSUPPORTED_FEATURE, reason))


def _failed(reason: str) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    future.set_exception(_refusal(reason))
    return future


def _refused(items: Iterable[Item], reason: str) -> dict[Item, Future[Any]]:
    return {item: _failed(reason) for item in items}
