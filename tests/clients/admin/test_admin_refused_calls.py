"""The admin calls that a database has no use for: they say so, and open nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.admin.help import error_of
from txnstore import ElectionType, KafkaError, TopicPartition
from txnstore.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ConsumerGroupDescription,
    ConsumerGroupListing,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)

FIELDS = ("topic", "t", "literal", "User:x", "*", "read", "allow")
ACL, FILTER = AclBinding(*FIELDS), AclBindingFilter(*FIELDS)
UPSERTION = UserScramCredentialUpsertion("u", ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096), b"secret")
DELETION = UserScramCredentialDeletion("v", ScramMechanism.SCRAM_SHA_512)


@pytest.fixture
def admin(tmp_path):
    with AdminClient({"bootstrap.servers": f"sqlite:///{tmp_path}/log.db"}) as admin:
        yield admin
        assert admin._connection.opened is None


@pytest.mark.parametrize(
    ("call", "arguments", "items", "reason"),
    [
        ("create_acls", [[ACL]], [ACL], "GRANT"),
        ("delete_acls", [[FILTER]], [FILTER], "GRANT"),
        ("describe_acls", [FILTER], None, "GRANT"),
        ("describe_user_scram_credentials", [], None, "SCRAM"),
        ("describe_user_scram_credentials", [["u", "v"]], ["u", "v"], "SCRAM"),
        ("describe_user_scram_credentials", [[]], [], "SCRAM"),
        ("alter_user_scram_credentials", [[UPSERTION, DELETION]], ["u", "v"], "SCRAM"),
        ("elect_leaders", [ElectionType.PREFERRED], None, "elections"),
        ("elect_leaders", [ElectionType.UNCLEAN, [TopicPartition("t", 0)]], None, "elections"),
    ],
)
def test_a_call_that_is_not_supported_says_why(admin, call, arguments, items, reason):
    answer = getattr(admin, call)(*arguments, request_timeout=60)
    futures = [answer] if items is None else [answer[item] for item in items]
    assert items is None or list(answer) == items
    for future in futures:
        error = error_of(future)
        assert error == KafkaError._UNSUPPORTED_FEATURE
        assert reason in error.str()
        assert "secret" not in error.str()


def test_credentials_are_taken_and_mean_nothing(admin):
    assert admin.set_sasl_credentials("scott", "tiger") is None


@pytest.mark.parametrize(
    ("call", "arguments", "error"),
    [
        ("create_acls", [None], TypeError),
        ("create_acls", [[]], ValueError),
        ("create_acls", [[5]], ValueError),
        ("delete_acls", [[]], ValueError),
        ("delete_acls", [[ACL]], ValueError),
        ("describe_acls", [ACL], TypeError),
        ("describe_user_scram_credentials", ["u"], TypeError),
        ("describe_user_scram_credentials", [[5]], TypeError),
        ("alter_user_scram_credentials", [None], TypeError),
        ("alter_user_scram_credentials", [[]], ValueError),
        ("alter_user_scram_credentials", [["u"]], TypeError),
        ("set_sasl_credentials", [5, "p"], TypeError),
        ("set_sasl_credentials", ["u", None], TypeError),
        ("elect_leaders", [5], TypeError),
        ("elect_leaders", [ElectionType.PREFERRED, 5], TypeError),
        ("elect_leaders", [ElectionType.PREFERRED, [5]], TypeError),
    ],
)
def test_wrong_arguments_are_refused_first(admin, call, arguments, error):
    with pytest.raises(error):
        getattr(admin, call)(*arguments)


def test_a_closed_client_says_so_first(tmp_path):
    with AdminClient({"bootstrap.servers": f"sqlite:///{tmp_path}/log.db"}) as admin:
        pass
    for call in (
        lambda: admin.create_acls([ACL]),
        admin.list_transactions,
        admin.list_consumer_groups,
        lambda: admin.delete_records([TopicPartition("t", 0, 1)]),
    ):
        with pytest.raises(RuntimeError, match=r"^AdminClient has been closed$"):
            call()


def test_an_acl_is_what_its_fields_are():
    same = AclBinding(
        ResourceType.TOPIC, "t", ResourcePatternType.LITERAL, "User:x", "*", AclOperation.READ, AclPermissionType.ALLOW
    )
    other = AclBinding("topic", "u", "literal", "User:x", "*", 3, 3)
    assert ACL == same != other
    assert hash(ACL) == hash(same)
    assert sorted([other, ACL]) == [ACL, other]
    assert (ACL.restype_int, ACL.resource_pattern_type_int, ACL.operation_int, ACL.permission_type_int) == (2, 3, 3, 3)
    assert repr(ACL).startswith("AclBinding(ResourceType.TOPIC,t,ResourcePatternType.LITERAL,User:x,*,")
    assert AclOperation.READ < AclOperation.WRITE


@pytest.mark.parametrize("field", [0, 2, 5, 6])
@pytest.mark.parametrize(("value", "error"), [("nonsense", ValueError), (99, ValueError), (5.5, TypeError)])
def test_what_no_enumeration_has_is_refused(field, value, error):
    fields: list[Any] = list(FIELDS)
    fields[field] = value
    with pytest.raises(error, match="Unknown value"):
        AclBinding(*fields)


def test_groups_take_states_by_name_and_number():
    assert ConsumerGroupListing("g", True, "stable", 2).state.name == "STABLE"
    assert not hasattr(ConsumerGroupListing("g", True), "state")
    description = ConsumerGroupDescription("g", False, [], "", 5, None, type="classic")  # type: ignore[arg-type]
    assert (description.state.name, description.type.name) == ("EMPTY", "CLASSIC")
    with pytest.raises(ValueError, match="should be a ConsumerGroupState"):
        ConsumerGroupListing("g", True, "nonsense")
