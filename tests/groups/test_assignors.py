"""The assignors assign every partition once, to subscribers only, as evenly and as steadily as each promises."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from txnstore.groups.assignors import (
    ASSIGNORS,
    Subscriber,
    assign_cooperative_sticky,
    assign_range,
    assign_round_robin,
    in_order,
    subscribed_partitions,
)
from txnstore.model import PartitionName

TOPICS = ("a", "b", "c", "d")
COUNTS = st.fixed_dictionaries({}, optional=dict.fromkeys(TOPICS, st.integers(0, 7)))
SUBSCRIPTIONS = st.frozensets(st.sampled_from([*TOPICS, "unknown"]))
NAMES = st.sampled_from([f"m{number}" for number in range(7)])
# Made once: strategies that are made anew for each example take longer than the examples.
MEMBERS = st.lists(NAMES, unique=True, max_size=6)
EQUAL_MEMBERS = st.lists(NAMES, unique=True, min_size=1, max_size=6)
SOME_TOPICS = st.frozensets(st.sampled_from(TOPICS), min_size=1)
ANYTHING = st.frozensets(st.builds(PartitionName, st.sampled_from([*TOPICS, "gone"]), st.integers(0, 8)))
COUNT = st.integers(0, 7)


def partitions(topic, *numbers):
    return frozenset(PartitionName(topic, number) for number in numbers)


@st.composite
def groups(draw):
    """Members with subscriptions of their own, some static, who hold anything: also what is not there or not theirs."""
    return [
        Subscriber(name, draw(SUBSCRIPTIONS), f"i-{name}" if draw(st.booleans()) else None, draw(ANYTHING))
        for name in draw(MEMBERS)
    ]


@st.composite
def equal_groups(draw):
    """Members who all want the same topics, and each partition is held by one at most."""
    topics = draw(SOME_TOPICS)
    counts = {topic: draw(COUNT) for topic in topics}
    members = [Subscriber(name, topics) for name in draw(EQUAL_MEMBERS)]
    held: dict[str, set[PartitionName]] = {member.member_id: set() for member in members}
    owners = st.sampled_from([None, *held])
    for partition in subscribed_partitions(members, counts):
        owner = draw(owners)
        if owner is not None:
            held[owner].add(partition)
    return [Subscriber(m.member_id, topics, None, frozenset(held[m.member_id])) for m in members], counts


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ASSIGNORS)
@given(members=groups(), counts=COUNTS)
def test_every_partition_goes_to_one_subscriber(name, members, counts):
    assigned = ASSIGNORS[name].assign(members, counts)
    assert assigned.keys() == {member.member_id for member in members}
    given = [partition for mine in assigned.values() for partition in mine]
    assert sorted(given) == subscribed_partitions(members, counts)
    for member in members:
        assert {partition.topic for partition in assigned[member.member_id]} <= member.topics


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ASSIGNORS)
@given(members=groups(), counts=COUNTS, seed=st.integers())
def test_the_order_of_the_input_does_not_matter(name, members, counts, seed):
    shuffler = random.Random(seed)
    other_members, other_counts = list(members), list(counts.items())
    shuffler.shuffle(other_members)
    shuffler.shuffle(other_counts)
    assign = ASSIGNORS[name].assign
    assert assign(members, counts) == assign(other_members, dict(other_counts))


@given(members=groups(), counts=COUNTS)
def test_range_assigns_each_topic_in_runs_and_the_first_members_get_more(members, counts):
    assigned = assign_range(members, counts)
    for topic in counts:
        runs = [
            sorted(p.partition for p in assigned[member.member_id] if p.topic == topic)
            for member in in_order(members)
            if topic in member.topics
        ]
        lengths = [len(run) for run in runs]
        assert lengths == sorted(lengths, reverse=True)
        assert max(lengths, default=0) - min(lengths, default=0) <= 1
        assert list(itertools.chain(*runs)) == list(range(counts[topic] if runs else 0))


@given(group=equal_groups())
def test_round_robin_and_sticky_differ_by_one_at_most(group):
    members, counts = group
    for assign in (assign_round_robin, assign_cooperative_sticky):
        loads = [len(mine) for mine in assign(members, counts).values()]
        assert max(loads) - min(loads) <= 1


def fewest_losses(members, counts):
    """How many partitions holders must lose so that the loads can differ by one at most."""
    share, left_over = divmod(sum(counts.values()), len(members))
    surpluses = [len(member.held) - share for member in members]
    # Each of the members that may have one more spares one holder one loss.
    spared = min(left_over, sum(surplus > 0 for surplus in surpluses))
    return sum(surplus for surplus in surpluses if surplus > 0) - spared


@given(group=equal_groups())
def test_sticky_takes_no_more_away_than_it_must(group):
    members, counts = group
    assigned = assign_cooperative_sticky(members, counts)
    lost = sum(len(member.held - assigned[member.member_id]) for member in members)
    assert lost == fewest_losses(members, counts)


def after(members, assigned):
    return [Subscriber(m.member_id, m.topics, m.group_instance_id, assigned[m.member_id]) for m in members]


@pytest.mark.slow
@given(members=groups(), counts=COUNTS)
def test_sticky_leaves_a_balanced_group_alone(members, counts):
    assigned = assign_cooperative_sticky(members, counts)
    assert assign_cooperative_sticky(after(members, assigned), counts) == assigned


@given(group=equal_groups(), gone=st.integers(0, 5), seed=st.integers(0, 9))
def test_sticky_takes_nothing_away_when_a_member_goes_or_a_topic_grows(group, gone, seed):
    members, counts = group
    settled = after(members, assign_cooperative_sticky(members, counts))
    left = [member for place, member in enumerate(settled) if place != gone % len(settled)]
    grown = {topic: count + seed for topic, count in counts.items()}
    for now, counts_now in ((left, counts), (settled, grown)):
        assigned = assign_cooperative_sticky(now, counts_now)
        assert all(member.held <= assigned[member.member_id] for member in now)


@given(group=equal_groups())
def test_with_sticky_only_the_newcomer_gets_what_others_had(group):
    members, counts = group
    settled = after(members, assign_cooperative_sticky(members, counts))
    newcomer = Subscriber("newcomer", members[0].topics)
    assigned = assign_cooperative_sticky([*settled, newcomer], counts)
    assert all(assigned[member.member_id] <= member.held for member in settled)


@given(members=groups(), counts=COUNTS)
@example(
    # Only over the second member does the third come to anything.
    members=[
        Subscriber("m0", frozenset("a"), None, partitions("a", 0, 1, 2)),
        Subscriber("m1", frozenset("ab"), None, partitions("b", 0, 1)),
        Subscriber("m2", frozenset("b"), None, frozenset()),
    ],
    counts={"a": 3, "b": 2},
)
def test_sticky_leaves_no_chain_of_moves_that_would_make_it_more_equal(members, counts):
    assigned = assign_cooperative_sticky(members, counts)
    names = [member.member_id for member in members]
    topics_of = {member.member_id: member.topics for member in members}
    reachable = {
        (giver, taker)
        for giver, taker in itertools.product(names, repeat=2)
        if any(partition.topic in topics_of[taker] for partition in assigned[giver])
    }
    for middle, giver, taker in itertools.product(names, repeat=3):
        if (giver, middle) in reachable and (middle, taker) in reachable:
            reachable.add((giver, taker))
    for giver, taker in reachable:
        assert len(assigned[giver]) - len(assigned[taker]) <= 1


def test_a_partition_that_two_claim_stays_with_the_first():
    claimed = partitions("a", 0)
    members = [Subscriber(name, frozenset("a"), None, claimed) for name in ("m1", "m0")]
    assert assign_cooperative_sticky(members, {"a": 2}) == {"m0": claimed, "m1": partitions("a", 1)}


def test_static_members_come_first_and_in_the_order_of_their_lasting_names():
    members = [
        Subscriber("zoe", frozenset("a"), None),
        Subscriber("new", frozenset("a"), "1"),
        Subscriber("adam", frozenset("a"), None),
        Subscriber("bob", frozenset("a"), "2"),
    ]
    assert [member.member_id for member in in_order(members)] == ["new", "bob", "adam", "zoe"]


def test_a_restarted_static_member_gets_what_it_had():
    def assigned_with(assign, second_id):
        members = [Subscriber(n, frozenset("a"), i) for n, i in (("x", "one"), (second_id, "two"), ("y", "three"))]
        return assign(members, {"a": 8})[second_id]

    for assign in (assign_range, assign_round_robin):
        assert assigned_with(assign, "b") == assigned_with(assign, "q")


#: What librdkafka 2.16.1 assigns in its mock cluster: topics a, b and c of four partitions, by member id.
OBSERVED = {
    "range": {
        "0x7f4bf40096f0": (("a", "b", "c"), {"a": {0, 1}, "b": {0, 1}, "c": {0, 1, 2, 3}}),
        "0x7f4bf4009790": (("a",), {"a": {2}}),
        "0x7f4bf400ab80": (("a", "b"), {"a": {3}, "b": {2, 3}}),
    },
    "roundrobin": {
        "0x7f58d0009e70": (("a", "b", "c"), {"a": {1}, "b": {0, 2}, "c": {0, 1, 2, 3}}),
        "0x7f58d00086c0": (("a",), {"a": {0, 3}}),
        "0x7f58d000a9c0": (("a", "b"), {"a": {2}, "b": {1, 3}}),
    },
    "cooperative-sticky": {
        "0x7fe8fc0089a0": (("a", "b", "c"), {"c": {0, 1, 2, 3}}),
        "0x7fe8fc00a3b0": (("a",), {"a": {0, 1, 2, 3}}),
        "0x7fe8fc0097f0": (("a", "b"), {"b": {0, 1, 2, 3}}),
    },
}


@pytest.mark.parametrize("name", OBSERVED)
def test_members_with_different_topics_get_what_librdkafka_gives_them(name):
    observed = OBSERVED[name]
    members = [Subscriber(member_id, frozenset(topics)) for member_id, (topics, _) in observed.items()]
    assert ASSIGNORS[name].assign(members, {"a": 4, "b": 4, "c": 4}) == {
        member_id: frozenset().union(*(partitions(topic, *numbers) for topic, numbers in mine.items()))
        for member_id, (_, mine) in observed.items()
    }


def test_the_partitions_of_a_large_group_are_assigned_evenly():
    topics = {f"t{number}": 50 for number in range(40)}
    members = [Subscriber(f"m{number}", frozenset(topics)) for number in range(60)]
    held = assign_range(members, topics)
    assigned = assign_cooperative_sticky(after(members, held), topics)
    assert set(Counter(len(mine) for mine in assigned.values())) == {33, 34}
