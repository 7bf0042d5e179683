"""The calls of confluent-kafka's admin client that a database has no use for, and the values that they take.

Arguments are checked as there, no database is opened, and every answer is `_UNSUPPORTED_FEATURE`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from txnstore.clients.admin.configs import ResourceType
from txnstore.clients.admin.groups import member_of
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.model.metadata import ElectionType
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.model import OrderedEnum

Item = TypeVar("Item")

ACLS: Final = (
    "there are no ACLs: the database decides who may do what; use its roles and GRANT, or a file's permissions"
)
CREDENTIALS: Final = "there are no SCRAM credentials: users and their passwords are the database's own"
ELECTIONS: Final = "there are no elections: the database is the leader of every partition"


class ResourcePatternType(OrderedEnum):
    """How the name of a resource in an ACL is meant."""

    UNKNOWN = 0
    ANY = 1
    MATCH = 2
    LITERAL = 3
    PREFIXED = 4


class AclOperation(OrderedEnum):
    """What an ACL is about."""

    UNKNOWN = 0
    ANY = 1
    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


class AclPermissionType(OrderedEnum):
    """What an ACL says about it."""

    UNKNOWN = 0
    ANY = 1
    DENY = 2
    ALLOW = 3


class AclBinding:
    """An ACL; equal to others by all of its fields.

    Args:
        restype: the type of resource, its name or its number; so are the other enumerations.
        name: the resource's name.
        resource_pattern_type: how the name is meant.
        principal: who.
        host: from where.
        operation: may do what, or may not.
        permission_type: which of the two.

    Raises:
        TypeError, ValueError: there is no such member of an enumeration.
    """

    def __init__(  # noqa: PLR0917 - confluent-kafka's signature
        self,
        restype: ResourceType | str | int,
        name: str,
        resource_pattern_type: ResourcePatternType | str | int,
        principal: str,
        host: str,
        operation: AclOperation | str | int,
        permission_type: AclPermissionType | str | int,
    ) -> None:
        self.restype = member_of(ResourceType, restype)
        self.name = name
        self.resource_pattern_type = member_of(ResourcePatternType, resource_pattern_type)
        self.principal = principal
        self.host = host
        self.operation = member_of(AclOperation, operation)
        self.permission_type = member_of(AclPermissionType, permission_type)
        self.restype_int: int = self.restype.value
        self.resource_pattern_type_int: int = self.resource_pattern_type.value
        self.operation_int: int = self.operation.value
        self.permission_type_int: int = self.permission_type.value

    def _fields(self) -> tuple[Any, ...]:
        return (
            self.restype,
            self.name,
            self.resource_pattern_type,
            self.principal,
            self.host,
            self.operation,
            self.permission_type,
        )

    def _order(self) -> tuple[str, ...]:
        return tuple(
            f"{field.value:03}" if isinstance(field, enum.Enum) else str(field or "") for field in self._fields()
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({','.join(map(str, self._fields()))})"

    def __hash__(self) -> int:
        return hash(self._fields())

    def __eq__(self, other: object) -> bool:
        return self._fields() == other._fields() if isinstance(other, AclBinding) else NotImplemented

    def __lt__(self, other: object) -> bool:
        return self._order() < other._order() if isinstance(other, AclBinding) else NotImplemented


class AclBindingFilter(AclBinding):
    """Which ACLs are meant: a field that is None or ANY means all."""


class ScramMechanism(OrderedEnum):
    """How a SCRAM password is hashed."""

    UNKNOWN = 0
    SCRAM_SHA_256 = 1
    SCRAM_SHA_512 = 2


class ScramCredentialInfo:
    """What is known of a SCRAM credential: its mechanism and its number of iterations."""

    def __init__(self, mechanism: ScramMechanism, iterations: int) -> None:
        self.mechanism = mechanism
        self.iterations = iterations


class UserScramCredentialsDescription:
    """A user's SCRAM credentials."""

    def __init__(self, user: str, scram_credential_infos: list[ScramCredentialInfo]) -> None:
        self.user = user
        self.scram_credential_infos = scram_credential_infos


class UserScramCredentialAlteration:
    """A change of a user's SCRAM credentials; the base of the two kinds of it."""

    def __init__(self, user: str) -> None:
        self.user = user


class UserScramCredentialUpsertion(UserScramCredentialAlteration):
    """A SCRAM credential that the user is to have."""

    def __init__(
        self, user: str, scram_credential_info: ScramCredentialInfo, password: bytes, salt: bytes | None = None
    ) -> None:
        super().__init__(user)
        self.scram_credential_info = scram_credential_info
        self.password = password
        self.salt = salt


class UserScramCredentialDeletion(UserScramCredentialAlteration):
    """A SCRAM credential that the user is to have no longer."""

    def __init__(self, user: str, mechanism: ScramMechanism) -> None:
        super().__init__(user)
        self.mechanism = mechanism


# --- arguments, in confluent-kafka's words ----------------------------------------------------------------------------


def check_list(items: object, kind: type[Item]) -> list[Item]:
    """Return a list that is not empty and holds this kind of object only."""
    if not isinstance(items, list):
        raise TypeError(f"Expected a list of {kind.__name__} objects, not {type(items).__name__}")
    if not items:
        raise ValueError(f"Expected non-empty list of {kind.__name__} objects")
    if not all(isinstance(item, kind) for item in items):
        raise ValueError(f"Expected list of {kind.__name__} objects")
    return items


def check_users(users: object) -> list[str]:
    """Return the names of the users."""
    if not isinstance(users, list):
        raise TypeError("Expected input to be list of String")
    if not all(isinstance(user, str) for user in users):
        raise TypeError("Each value should be a string")
    return users


def check_alterations(alterations: object) -> list[str]:
    """Return the users of the alterations."""
    if not isinstance(alterations, list):
        raise TypeError("Expected input to be list")
    if not alterations:
        raise ValueError("Expected at least one alteration")
    if not all(isinstance(alteration, UserScramCredentialAlteration) for alteration in alterations):
        raise TypeError("Expected each element of list to be subclass of UserScramCredentialAlteration")
    return [alteration.user for alteration in alterations]


def check_election(election_type: object, partitions: object) -> None:
    """Refuse what does not describe an election of leaders."""
    if not isinstance(election_type, ElectionType):
        raise TypeError("Expected 'election_type' to be of type 'ElectionType'")
    if partitions is not None and not isinstance(partitions, list):
        raise TypeError(f"Expected 'partitions' to be a list, got '{type(partitions).__name__}'")
    for partition in partitions or ():
        if not isinstance(partition, TopicPartition):
            raise TypeError(
                f"Element of the 'partitions' list must be of type 'TopicPartition' got '{type(partition).__name__}'"
            )


# --- the answers ------------------------------------------------------------------------------------------------------


def refusal(reason: str) -> KafkaException:
    """Return the error of a call that is not supported."""
    return KafkaException(KafkaError(KafkaError._UNSUPPORTED_FEATURE, reason))


def failed(reason: str) -> Future[Any]:
    """Return a future that has failed with the error."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    future.set_exception(refusal(reason))
    return future


def refused(items: Iterable[Item], reason: str) -> dict[Item, Future[Any]]:
    """Return such a future for each item."""
    return {item: failed(reason) for item in items}
