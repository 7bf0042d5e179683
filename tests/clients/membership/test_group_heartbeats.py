"""What a member that has nothing to do asks its group: one request does for the lease and for news, never two."""

from __future__ import annotations

import math

import pytest

from tests.clients.consumer.log_writer import eventually
from txnstore.clients.membership import member as membership
from txnstore.clients.membership.member import ConsumerMember
from txnstore.clients.membership.requests import GroupRequests
from txnstore.clients.outlet import lease_seconds
from txnstore.groups import rows

#: Nothing comes of itself while a test runs.
SETTINGS = {
    "session.timeout.ms": 600_000,
    "max.poll.interval.ms": 6_000_000,
    "heartbeat.interval.ms": 100_000,
    "enable.auto.commit": False,
}
RENEWED_AFTER_SECONDS = 200

look_for_news = ConsumerMember.look_for_news


@pytest.fixture
def asked(monkeypatch):
    """What the group was asked, in order."""
    asked = []

    def noting(name):
        ask = getattr(GroupRequests, name)

        def note(requests, *arguments, **named):
            answer = ask(requests, *arguments, **named)
            asked.append(name)
            return answer

        monkeypatch.setattr(GroupRequests, name, note)

    for name in ("has_news", "renew", "heartbeat"):
        noting(name)
    # Called by the test alone.
    monkeypatch.setattr(ConsumerMember, "look_for_news", lambda member: None)
    return asked


@pytest.fixture
def later(monkeypatch):
    """Let time pass for the members, in seconds."""
    passed = [0.0]
    monkeypatch.setattr(membership, "lease_seconds", lambda: lease_seconds() + passed[0])

    def later(seconds):
        passed[0] += seconds

    return later


@pytest.fixture
def settled(log, crew, asked):
    """Return a member that has all it is to have, and of whose requests none is under way."""
    log.topic()
    (a,) = crew.members("a", **SETTINGS)
    crew.until_shared([a], [0])
    group = a.consumer._core.group
    eventually(lambda: group._protocol.may_renew)
    asked.clear()
    return group


def due_in(group):
    with group._lock:
        work, seconds = group.next_work()
    return 0 if work is not None else seconds


def test_a_look_at_a_wake_up_puts_the_next_one_off(settled, asked, later):
    later(60)
    assert due_in(settled) <= 40.1
    look_for_news(settled)
    assert asked == ["has_news"]
    assert 90 < due_in(settled) <= 100.1


def test_who_looks_has_rendered_beforehand_what_leaving_takes(settled, monkeypatch):
    statements = [statement for statement, _ in rows.removal("", "")]
    for statement in statements:
        monkeypatch.setattr(statement, "_renderings", {})
    look_for_news(settled)
    assert all(statement._renderings for statement in statements)


def test_a_wake_up_shortly_before_a_renewal_is_the_renewal(settled, asked, later):
    # Before that, its own heartbeat would have come.
    look_for_news(settled)
    with settled._lock:
        settled._next_request_at = math.inf
    asked.clear()
    later(RENEWED_AFTER_SECONDS - 40)
    look_for_news(settled)
    eventually(lambda: asked == ["renew"])
    eventually(lambda: due_in(settled) > 90)
    assert asked == ["renew"]


def test_a_renewal_that_was_under_way_when_there_was_news_is_followed_by_a_look(settled, asked, later, monkeypatch):
    renew = GroupRequests.renew

    def renew_while_woken(requests, identity):
        monkeypatch.setattr(GroupRequests, "renew", renew)
        answer = renew(requests, identity)
        # Of what this is about, that answer knew nothing.
        look_for_news(settled)
        return answer

    with settled._lock:
        settled._next_request_at = math.inf
    monkeypatch.setattr(GroupRequests, "renew", renew_while_woken)
    later(RENEWED_AFTER_SECONDS - 40)
    look_for_news(settled)
    eventually(lambda: asked == ["renew", "has_news"])
