"""The bytes in which a consumer tells a producer who it is, as confluent-kafka 2.16.1 was seen to make them."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from txnstore.clients.membership.metadata import format_group_metadata, parse_group_metadata
from txnstore.model import GroupMembership

OBSERVED = {
    b"CGMDv2:\xff\xff\xff\xffg\x00\x00\x01": GroupMembership("g"),
    b"CGMDv2:\xff\xff\xff\xffinst\x00\x00\x00i1\x00": GroupMembership("inst", group_instance_id="i1"),
    b"CGMDv2:\x02\x00\x00\x00inst\x000x7f\x00\x00i1\x00": GroupMembership("inst", 2, "0x7f", "i1"),
    b"CGMDv2:\x01\x02\x00\x00g\x00m\x00\x01": GroupMembership("g", 513, "m"),
}


@pytest.mark.parametrize(("metadata", "membership"), OBSERVED.items())
def test_the_layout_is_the_one_that_was_observed(metadata, membership):
    assert format_group_metadata(membership) == metadata
    assert parse_group_metadata(metadata) == membership


def test_names_may_hold_any_text_that_databases_store():
    membership = GroupMembership("группа 'x'; --", 7, "\U0001f600", "")
    assert parse_group_metadata(pickle.loads(pickle.dumps(format_group_metadata(membership)))) == membership


def test_whether_a_member_commits_what_it_does_not_own_is_behind_all_that_was_observed():
    for metadata, membership in OBSERVED.items():
        unowned = replace(membership, commits_unowned=True)
        assert format_group_metadata(unowned) == metadata + b"\x01"
        assert parse_group_metadata(metadata + b"\x01") == unowned


@pytest.mark.parametrize("name", ["with\0nul", "half\ud800"])
@pytest.mark.parametrize("column", ["group_id", "member_id", "group_instance_id"])
def test_a_name_that_cannot_be_stored_is_refused(name, column):
    with pytest.raises(ValueError, match="NUL"):
        format_group_metadata(GroupMembership(**{"group_id": "g", column: name}))


@pytest.mark.parametrize("length", range(len(b"CGMDv2:\x01\x00\x00\x00group\x00member\x00\x00instance\x00")))
def test_what_is_cut_short_is_refused(length):
    whole = format_group_metadata(GroupMembership("group", 1, "member", "instance"))
    with pytest.raises(ValueError, match="consumer group metadata"):
        parse_group_metadata(whole[:length])


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"CGMDv1:\x01\x00\x00\x00g\x00m\x00\x01",
        b"CGMDv2:\x01\x00\x00\x00g\x00m\x00\x02",
        b"CGMDv2:\x01\x00\x00\x00g\x00m\x00\x01rest",
        b"CGMDv2:\x01\x00\x00\x00g\x00m\x00\x01\x02",
        b"CGMDv2:\x01\x00\x00\x00g\x00m\x00\x01\x01\x01",
        b"CGMDv2:\x01\x00\x00\x00\x00m\x00\x01",
        b"CGMDv2:\x01\x00\x00\x00\xff\x00m\x00\x01",
    ],
)
def test_what_is_damaged_is_refused_without_showing_it(damaged):
    with pytest.raises(ValueError, match="consumer group metadata") as caught:
        parse_group_metadata(damaged)
    assert "rest" not in str(caught.value)
