"""This file is who may do what, as confluent-kafka's users write it down: plain holders, for nothing here acts on them.

The database decides who may do what: see the calls of `AdminClient` that refuse these.
"""

from __future__ import annotations

import enum
from typing import Any

from txnstore.clients.admin.group_results import member_of
from txnstore.clients.admin.resources import ResourceType


class _Ordered(enum.Enum):
    """An enumeration whose members are ordered by their numbers, which are Kafka's."""

    def __lt__(self, other: object) -> bool:
        return bool(self.value < other.value) if isinstance(other, type(self)) else NotImplemented


class ResourcePatternType(_Ordered):
    """How the name of a resource in an ACL is meant."""

    UNKNOWN = 0
    ANY = 1
    MATCH = 2
    LITERAL = 3
    PREFIXED = 4


class AclOperation(_Ordered):
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


class AclPermissionType(_Ordered):
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


class ScramMechanism(_Ordered):
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
