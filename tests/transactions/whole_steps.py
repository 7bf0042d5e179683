"""The steps of random histories of transactions: what a producer asks for, usual or not, and what others change."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.log.histories import SETTINGS
from txnstore.model import GroupMembership

#: Who commits offsets, by number; "readers" has two members in generation 3.
COMMITTERS = [
    GroupMembership("readers"),
    GroupMembership("nobody"),
    GroupMembership("readers", 3, "member"),
    GroupMembership("readers", 2, "member"),
    GroupMembership("readers", 9, "member"),
    GroupMembership("readers", 3, "stranger"),
    GroupMembership("readers", 3, "lasting member", "lasting"),
    GroupMembership("readers", 3, "member", "lasting"),
    GroupMembership("readers", 3, "member", commits_unowned=True),
    GroupMembership("readers", 3, ""),
    GroupMembership("readers", -1, "", "lasting"),
    GroupMembership("readers\0", -1),
    GroupMembership("readers", 1, "member"),
    # Last, and in no history.
    GroupMembership("newcomers"),
]
KNOWN_COUNT = len(COMMITTERS) - 1

PRODUCERS = st.sampled_from([0, 1])
CELLS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([0, 0, 0, 5_000, -5_000]), st.integers(0, 3)), min_size=0, max_size=4
)
COMMITS = st.lists(
    st.tuples(
        st.sampled_from([0, 2, 2, *range(KNOWN_COUNT)]),
        st.lists(st.integers(0, 2), min_size=0, max_size=3, unique=True),
        st.sampled_from([None, None, "", "text"]),
    ),
    max_size=2,
)
#: What goes the short way, if nothing that happened before is in its way; most of the others are a little unusual.
USUAL_COMMIT = st.tuples(
    st.just("commit"),
    PRODUCERS,
    st.lists(st.tuples(st.integers(0, 2), st.just(0), st.integers(0, 2)), max_size=3),
    st.just(0),
    st.lists(
        st.tuples(st.sampled_from([0, 2]), st.lists(st.integers(0, 2), max_size=2, unique=True), st.none()), max_size=1
    ),
    st.just(0),
    st.none(),
)
#: Those that stand here more than once come as much more often; Hypothesis by itself takes equal ones for one.
STEPS = st.sampled_from(
    [
        *[USUAL_COMMIT] * 10,
        *[
            st.tuples(
                st.just("commit"),
                PRODUCERS,
                CELLS,
                st.sampled_from([0, 0, 0, 0, 1]),
                COMMITS,
                st.sampled_from([0, 0, 0, 1]),
                st.sampled_from([None, None, "readers", "nobody"]),
            )
        ]
        * 4,
        *[
            st.tuples(
                st.just("send"),
                PRODUCERS,
                st.tuples(
                    st.sampled_from([0, 0, 0, *range(KNOWN_COUNT)]),
                    st.lists(st.integers(0, 2), min_size=0, max_size=3, unique=True),
                    st.sampled_from([None, None, "text", "within"]),
                ),
                st.sampled_from([0, 0, 0, 1]),
            )
        ]
        * 2,
        *[
            st.tuples(
                st.just("commit_offsets"),
                st.tuples(
                    st.sampled_from([0, 0, 1, 2, 2, *range(KNOWN_COUNT)]),
                    st.lists(st.integers(0, 2), min_size=0, max_size=3, unique=True),
                    st.sampled_from([None, None, None, "", "text", "within"]),
                ),
            )
        ]
        * 2,
        st.tuples(st.just("start"), PRODUCERS),
        st.tuples(st.just("append"), PRODUCERS, CELLS),
        st.tuples(st.just("abort"), PRODUCERS),
        st.tuples(st.just("repeat"), PRODUCERS),
        st.tuples(st.just("configure"), st.integers(0, len(SETTINGS) - 1)),
        st.tuples(st.just("give_members")),
        st.tuples(st.just("exhaust"), PRODUCERS, st.sampled_from([32_764, 32_765])),
        st.tuples(st.just("delete_topic")),
        st.tuples(st.just("advance"), st.sampled_from([1, 500, 61_000])),
    ]
).flatmap(lambda step: step)
