"""How long a group takes to assign its partitions anew: after a member died, came or left, while all poll.

The bounds are generous, for machines that are busy; scripts/bench prints how long it takes on one that is not.
"""

from __future__ import annotations

import json
import statistics

import pytest

from tests.databases import an_assignor_on_each_database
from tests.processes.remote_members import PATIENCE_SECONDS, Member, make_topic

PARTITIONS = 6
SESSION_TIMEOUT_MS, HEARTBEAT_INTERVAL_MS = 1_500, 400
#: What processes may need beside that to be let run and to ask the database.
SLACK_SECONDS = 1.5
#: A machine that was busy with something else at the wrong moment gets another chance.
ATTEMPTS_MAX = 5
ROUNDS = 5
#: Nobody is told by a heartbeat here, and nobody is given up: without a wake-up, patience would end long before it.
PATIENT_SESSION_MS, PATIENT_HEARTBEAT_MS = 300_000, 100_000
#: How long the quickest round may take: a machine may be busy with something else, but not in all of them.
CLEAN_SECONDS_MAX = 3.0

pytestmark = pytest.mark.slow


@pytest.fixture
def start(url, tmp_path, processes):
    make_topic(url, PARTITIONS)

    def start(name):
        return Member(processes, url, tmp_path, name)

    yield start
    errors = {path.name: path.read_text() for path in tmp_path.glob("*.error")}
    assert not errors, "\n".join(errors.values())


def settle(*members):
    """Let the members poll until each has its share; return when the last of them was told of partitions."""
    for member in members:
        member.ask("poll_until_owned", PARTITIONS // len(members), PATIENCE_SECONDS)
    answers = [member.answer(PATIENCE_SECONDS) for member in members]
    assert all(answers), answers
    owned = [number for member in members for number in member.call("owned")]
    assert sorted(owned) == list(range(PARTITIONS))
    return max(each.at for member in members for each in member.told() if each.what == "assign" and each.partitions)


@an_assignor_on_each_database
def test_what_a_dead_member_had_is_the_others_within_a_session_and_a_heartbeat(start, assignor):
    # Not at once: nobody can tell a dead member from a slow one.
    at_least = SESSION_TIMEOUT_MS / 1000 / 2
    at_most = (SESSION_TIMEOUT_MS + HEARTBEAT_INTERVAL_MS) / 1000 + SLACK_SECONDS
    second, third = start("second"), start("third")
    for member in (second, third):
        member.join(assignor, SESSION_TIMEOUT_MS, HEARTBEAT_INTERVAL_MS)
    seconds: list[float] = []
    while len(seconds) < ATTEMPTS_MAX and not any(at_least < each < at_most for each in seconds):
        first = start(f"first-{len(seconds)}")
        first.join(assignor, SESSION_TIMEOUT_MS, HEARTBEAT_INTERVAL_MS)
        settle(first, second, third)
        killed_at = first.kill()
        seconds.append(settle(second, third) - killed_at)
    print(json.dumps({"assignor": assignor, "seconds_after_death": seconds}))  # noqa: T201 - for people
    assert at_least < seconds[-1] < at_most, seconds


@an_assignor_on_each_database
def test_after_a_member_came_or_left_in_good_order_the_others_know_at_once(start, assignor):
    first, second = start("first"), start("second")
    first.join(assignor, PATIENT_SESSION_MS, PATIENT_HEARTBEAT_MS)
    settle(first)
    seconds: dict[str, list[float]] = {"join": [], "leave": []}
    for _ in range(ROUNDS):
        # It polls all the while.
        first.ask("poll_until_owned", PARTITIONS // 2, PATIENCE_SECONDS)
        joined_at = second.join(assignor, PATIENT_SESSION_MS, PATIENT_HEARTBEAT_MS)
        second.ask("poll_until_owned", PARTITIONS // 2, PATIENCE_SECONDS)
        assert first.answer(PATIENCE_SECONDS)
        assert second.answer(PATIENCE_SECONDS)
        seconds["join"].append(settle(first, second) - joined_at)
        first.ask("poll_until_owned", PARTITIONS, PATIENCE_SECONDS)
        left_at = second.call("close")
        assert first.answer(PATIENCE_SECONDS)
        seconds["leave"].append(settle(first) - left_at)
    for what, times in seconds.items():
        told = {"assignor": assignor, "what": what, "median": statistics.median(times), "max": max(times)}
        print(json.dumps(told))  # noqa: T201 - for people
    assert max(min(times) for times in seconds.values()) < CLEAN_SECONDS_MAX, seconds
