"""Who may commit offsets for a group, the pure rules: each row of Kafka's table, plain and transactional."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from txnstore.errors import (
    FencedInstance,
    IllegalGeneration,
    InvalidGroupId,
    OffsetMetadataTooLarge,
    Recovery,
    TxnStoreError,
    UnknownMember,
)
from txnstore.groups.commit_rules import (
    CommittingMember,
    GroupView,
    check_commit,
    check_group_id,
    check_member_commit,
    check_offsets,
)
from txnstore.model import NO_GENERATION, GroupMembership, OffsetAndMetadata

EMPTY = GroupView(generation=4)
MEMBERS = GroupView(generation=4, members=[CommittingMember("member-1", None), CommittingMember("member-2", "static")])


@dataclass
class Case:
    """One row: the group, who commits, and what a transactional and a plain commit are told. None is accepted."""

    group: GroupView | None
    generation: int
    transactional: type[TxnStoreError] | None
    plain: type[TxnStoreError] | None
    member_id: str = ""
    group_instance_id: str | None = None


CASES = {
    "group missing, generation < 0": Case(None, -1, None, None),
    "group missing, generation < 0, a member": Case(None, -1, None, None, "member-1"),
    "group missing, generation 0": Case(None, 0, IllegalGeneration, IllegalGeneration, "member-1"),
    "group missing, generation > 0": Case(None, 4, IllegalGeneration, IllegalGeneration, "member-1"),
    "group empty, generation < 0": Case(EMPTY, -1, None, None),
    "group empty, generation < 0, a member": Case(EMPTY, -1, None, None, "member-1"),
    "group empty, a generation, a member": Case(EMPTY, 4, UnknownMember, UnknownMember, "member-1"),
    "no member, no generation, group not empty": Case(MEMBERS, -1, None, UnknownMember),
    "member and generation": Case(MEMBERS, 4, None, None, "member-1"),
    "static member and generation": Case(MEMBERS, 4, None, None, "member-2", "static"),
    "unknown member": Case(MEMBERS, 4, UnknownMember, UnknownMember, "member-9"),
    "unknown member of an old generation": Case(MEMBERS, 3, UnknownMember, UnknownMember, "member-9"),
    "a generation without a member": Case(MEMBERS, 4, UnknownMember, UnknownMember),
    "unknown instance": Case(MEMBERS, 4, UnknownMember, UnknownMember, "member-2", "other"),
    "instance taken over by another member": Case(MEMBERS, 4, FencedInstance, FencedInstance, "member-1", "static"),
    "instance without its member": Case(MEMBERS, 4, FencedInstance, FencedInstance, "", "static"),
    "older generation": Case(MEMBERS, 3, IllegalGeneration, IllegalGeneration, "member-1"),
    "newer generation": Case(MEMBERS, 5, IllegalGeneration, IllegalGeneration, "member-1"),
    "a member without its generation": Case(MEMBERS, -1, IllegalGeneration, IllegalGeneration, "member-1"),
}


@pytest.mark.parametrize("is_transactional", [True, False], ids=["transactional", "plain"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_row_of_kafkas_table(case: Case, is_transactional: bool) -> None:
    committer = GroupMembership("readers", case.generation, case.member_id, case.group_instance_id)
    error = case.transactional if is_transactional else case.plain
    if error is None:
        check_commit(case.group, committer, is_transactional=is_transactional)
        return
    with pytest.raises(error) as raised:
        check_commit(case.group, committer, is_transactional=is_transactional)
    assert type(raised.value) is error


@pytest.mark.parametrize("generation", [3, 4])
@pytest.mark.parametrize("commits_unowned", [True, False])
def test_a_member_that_is_behind_its_group_commits_nothing_that_it_does_not_own(
    generation: int, commits_unowned: bool
) -> None:
    """Also where it may commit what others own: in a former generation nobody has asked it to give that back yet."""
    group = GroupView(4, [CommittingMember("member-1", None, 3, '{"owned_ids": [1, 2]}')])
    committer = GroupMembership("readers", generation, "member-1", commits_unowned=commits_unowned)
    check_member_commit(group, committer, [1, 2], is_transactional=False)
    if commits_unowned and generation == group.generation:
        check_member_commit(group, committer, [2, 3], is_transactional=False)
    else:
        with pytest.raises(IllegalGeneration):
            check_member_commit(group, committer, [2, 3], is_transactional=False)


@pytest.mark.parametrize(("generation", "is_accepted"), [(3, False), (4, False), (5, True), (6, True)])
def test_what_was_granted_is_committed_only_from_that_generation_on(generation: int, is_accepted: bool) -> None:
    member = '{"owned_ids": [1], "granted_ids": [2], "granted_in": 5}'
    group = GroupView(6, [CommittingMember("member-1", None, 3, member)])
    committer = GroupMembership("readers", generation, "member-1")
    check_member_commit(group, committer, [1], is_transactional=False)
    if is_accepted:
        check_member_commit(group, committer, [1, 2], is_transactional=False)
        return
    with pytest.raises(IllegalGeneration):
        check_member_commit(group, committer, [1, 2], is_transactional=False)


def test_a_member_that_has_confirmed_nothing_commits_in_no_generation_at_all() -> None:
    group = GroupView(4, [CommittingMember("member-1", None, NO_GENERATION, '{"owned_ids": [1]}')])
    committer = GroupMembership("readers", NO_GENERATION, "member-1")
    with pytest.raises(IllegalGeneration):
        check_member_commit(group, committer, [1], is_transactional=False)


@pytest.mark.parametrize("error", [IllegalGeneration, UnknownMember, FencedInstance])
def test_a_producer_that_is_told_so_aborts_and_is_not_finished(error: type[TxnStoreError]) -> None:
    assert error.recovery is Recovery.ABORT


@pytest.mark.parametrize(
    "group_id",
    [
        pytest.param("", id="empty"),
        pytest.param(None, id="null"),
        pytest.param(7, id="a number"),
        pytest.param(b"readers", id="bytes"),
        pytest.param("a\0b", id="with NUL"),
        pytest.param("a\ud800", id="half a surrogate pair"),
        pytest.param("x" * 1001, id="1001 characters"),
    ],
)
def test_what_is_no_group_id_is_refused(group_id: object) -> None:
    with pytest.raises(InvalidGroupId):
        check_group_id(group_id)


@pytest.mark.parametrize(
    "group_id", [" ", "x", "x" * 1000, "ä", "😀", "';--", "a\nb", "%s"], ids=lambda name: ascii(name)[:9]
)
def test_any_other_text_is_a_group_id(group_id: str) -> None:
    check_group_id(group_id)


@pytest.mark.parametrize(
    ("metadata", "fits"),
    [("x" * 9, True), ("x" * 10, True), ("x" * 11, False), ("ä" * 5, True), ("ä" * 6, False), ("", True)],
    ids=ascii,
)
def test_metadata_is_measured_in_bytes_of_utf_8(metadata: str, fits: bool) -> None:
    offsets = [OffsetAndMetadata(1), OffsetAndMetadata(2, metadata=metadata)]
    if fits:
        check_offsets(offsets, metadata_bytes_max=10)
        return
    with pytest.raises(OffsetMetadataTooLarge):
        check_offsets(offsets, metadata_bytes_max=10)
