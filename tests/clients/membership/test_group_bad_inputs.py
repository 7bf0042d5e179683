"""What members of a group make of bad arguments and of calls at the wrong time: a clear error, and nothing changed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.clients.consumer.log_writer import PATIENCE_SECONDS, eventually
from tests.clients.membership.steps import COOPERATIVE, RARE_HEARTBEATS, TP, gate_of
from txnstore import Consumer, KafkaError, KafkaException
from txnstore.testing.manual_clock import ManualClock

RECORDS = 3


@pytest.fixture
def four(log):
    log.topic(partition_count=4)
    for number in range(4):
        log.write("t", number, *(b"%d-%d" % (number, offset) for offset in range(RECORDS)))


# --- configuration ------------------------------------------------------------------------------------------------

NUMBERS_REFUSED = ("", "x", "5s", "5.5", "-1", "1e3", -1, 2**63, math.nan, math.inf, -math.inf, b"5", [5])
NUMBER_KEYS = {
    "session.timeout.ms": (0, 3_600_001, *NUMBERS_REFUSED),
    "heartbeat.interval.ms": (0, 3_600_001, *NUMBERS_REFUSED),
    "max.poll.interval.ms": (0, 86_400_001, *NUMBERS_REFUSED),
    "topic.metadata.refresh.interval.ms": (-2, 3_600_001, *NUMBERS_REFUSED[:4], math.nan, b"5"),
}
TEXTS_REFUSED = ("a\0b", "\ud800", "x" * 10_240)
ASSIGNORS_REFUSED = (
    "Range", "sticky", "range;roundrobin", "range roundrobin", "uniform",
    "range,cooperative-sticky", "range,range-", "'; DROP TABLE groups; --", "r\0ange", 5, None, b"range", ["sticky"],
)  # fmt: skip


def refused(configuration):
    """Make a consumer that cannot be; return what the error says."""
    with pytest.raises((KafkaException, ValueError, TypeError)) as caught:
        Consumer({"bootstrap.servers": "sqlite:////nowhere/log.db", "group.id": "readers", **configuration})
    error = caught.value.args[0]
    if isinstance(error, KafkaError):
        assert error.code() == KafkaError._INVALID_ARG
        return error.str()
    return str(error)


@pytest.mark.parametrize(
    ("key", "position"), [(key, n) for key, values in NUMBER_KEYS.items() for n in range(len(values))]
)
def test_an_invalid_time_is_refused_by_its_name(key, position):
    value = NUMBER_KEYS[key][position]
    assert key in refused({key: value}), value


@pytest.mark.parametrize("key", ["group.id", "group.instance.id", "client.id"])
@pytest.mark.parametrize("position", range(len(TEXTS_REFUSED)))
def test_a_name_that_no_database_keeps_is_refused_by_its_key(key, position):
    text = refused({key: TEXTS_REFUSED[position]})
    assert key in text
    assert len(text) < 500
    assert text.isprintable()


@pytest.mark.parametrize("value", ["", None])
def test_a_group_is_needed(value):
    assert refused({"group.id": value}) == "Failed to create consumer: group.id must be set"


@pytest.mark.parametrize("position", [n for n, value in enumerate(ASSIGNORS_REFUSED) if value is not None])
def test_an_unknown_assignor_is_refused(position):
    text = refused({"partition.assignment.strategy": ASSIGNORS_REFUSED[position]})
    assert "partition.assignment.strategy" in text
    assert text.isprintable()


def test_the_poll_interval_is_not_shorter_than_the_session():
    text = refused({"max.poll.interval.ms": 5_999, "session.timeout.ms": 6_000})
    assert "max.poll.interval.ms" in text
    assert "session.timeout.ms" in text


UNUSUAL_NAMES = (
    "'; DROP TABLE groups;--",
    "%_",
    "a b ",
    "\u00e9",
    "e\u0301",
    "\u202e\U0001f600",
    "$1 :name ?",
    "x" * 255,
)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("position", range(len(UNUSUAL_NAMES)))
def test_names_that_are_unusual_are_names(four, url, log, position):
    name = UNUSUAL_NAMES[position]
    settings = {"bootstrap.servers": url, "group.id": name, "auto.offset.reset": "earliest", "client.id": name}
    with Consumer({**settings, "group.instance.id": name}) as a, Consumer({**settings, "group.instance.id": "2"}) as b:
        for consumer in (a, b):
            consumer.subscribe(["t"])
        eventually(
            lambda: [consumer.poll(0.01) for consumer in (a, b)] and len(a.assignment()) == len(b.assignment()) == 2
        )
        assert [member.group_instance_id for member in log.members(name)].count(name) == 1
        assert {member.client_id for member in log.members(name)} == {name}


# --- calls of a member --------------------------------------------------------------------------------------------

INVALID = KafkaError._INVALID_ARG
#: Calls of a member of a cooperative group that owns t-0 and t-1 or other two: what is raised.
BAD_CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], type[Exception] | int]] = {
    "no list": ("subscribe", ("t",), {}, TypeError),
    "tuple": ("subscribe", (("t",),), {}, TypeError),
    "none": ("subscribe", (None,), {}, TypeError),
    "empty": ("subscribe", ([],), {}, INVALID),
    "no name": ("subscribe", ([""],), {}, INVALID),
    "twice": ("subscribe", (["t", "t"],), {}, INVALID),
    "no expression": ("subscribe", (["^("],), {}, INVALID),
    "one bad among good": ("subscribe", (["t", "^*["],), {}, INVALID),
    "on_assign": ("subscribe", (["u"],), {"on_assign": 5}, TypeError),
    "on_revoke": ("subscribe", (["u"],), {"on_revoke": "x"}, TypeError),
    "on_lost": ("subscribe", (["u"],), {"on_lost": []}, TypeError),
    "unknown keyword": ("subscribe", (["u"],), {"listener": None}, TypeError),
    "assign text": ("assign", ("t",), {}, TypeError),
    "assign names": ("assign", (["t"],), {}, TypeError),
    "assign twice": ("assign", ([TP("t", 0), TP("t", 0)],), {}, INVALID),
    "incremental_assign none": ("incremental_assign", (None,), {}, TypeError),
    "incremental_unassign names": ("incremental_unassign", (["t"],), {}, TypeError),
    "seek elsewhere": ("seek", (TP("u", 0, 0),), {}, KafkaError._UNKNOWN_PARTITION),
    "seek none": ("seek", (None,), {}, TypeError),
    "commit both": ("commit", (), {"message": object(), "offsets": []}, ValueError),
    "commit text": ("commit", (), {"offsets": "t", "asynchronous": False}, TypeError),
    "commit elsewhere": (
        "commit", (), {"offsets": [TP("nowhere", 0, 1)], "asynchronous": False}, KafkaError.UNKNOWN_TOPIC_OR_PART
    ),
    "commit past the topic": (
        "commit", (), {"offsets": [TP("t", 99, 1)], "asynchronous": False}, KafkaError.UNKNOWN_TOPIC_OR_PART
    ),
    "commit no offset": (
        "commit", (), {"offsets": [TP("t", 0, -5)], "asynchronous": False}, KafkaError._NO_OFFSET
    ),
    "poll text": ("poll", ("5",), {}, TypeError),
    "poll nan": ("poll", (math.nan,), {}, ValueError),
    "consume too many": ("consume", (1_000_001, 0), {}, ValueError),
    "consume less than nothing": ("consume", (-1, 0), {}, ValueError),
}  # fmt: skip


def test_bad_arguments_change_nothing_in_the_group(four, crew, log):
    a, b = crew.members("ab", **COOPERATIVE, enable_auto_commit=False)
    crew.until_at_rest([a, b], lambda: len(a.partitions) == len(b.partitions) == 2)
    share, generation, calls = a.partitions, a.generation, list(a.calls)
    before = {(member.member_id, member.owned, member.subscribed) for member in log.members()}
    for case, (name, arguments, keywords, expected) in BAD_CALLS.items():
        if isinstance(expected, int):
            error = a.refused(name, *arguments, **keywords)
            assert error is not None, case
            assert error.code() == expected, case
            assert not error.fatal(), case
        else:
            with pytest.raises(expected):
                getattr(a.consumer, name)(*arguments, **keywords)
        assert a.partitions == share, case
    for _ in range(20):
        a.poll()
        b.poll()
    assert (a.partitions, a.generation, a.calls, a.errors, b.errors) == (share, generation, calls, [], [])
    assert {(member.member_id, member.owned, member.subscribed) for member in log.members()} == before
    a.consumer.commit(offsets=[TP("t", share[0], 1)], asynchronous=False)


# --- calls at the wrong time --------------------------------------------------------------------------------------

#: Calls that are made one after the other.
CALLS: dict[str, list[tuple[str, tuple[Any, ...]]]] = {
    "ask": [
        ("poll", (0,)),
        ("consume", (1, 0)),
        ("assignment", ()),
        ("memberid", ()),
        ("consumer_group_metadata", ()),
        ("position", ([TP("t", 0)],)),
        ("committed", ([TP("t", 0)], PATIENCE_SECONDS)),
        ("pause", ([TP("t", 0)],)),
        ("resume", ([TP("t", 0)],)),
        ("seek", (TP("t", 0, 0),)),
        ("commit", (None, [TP("t", 0, 1)], False)),
        ("store_offsets", (None, [TP("t", 0, 1)])),
        ("incremental_assign", ([TP("t", 0)],)),
        ("incremental_unassign", ([TP("t", 0)],)),
        ("assign", ([TP("t", 0)],)),
        ("unassign", ()),
    ],
    "subscribe": [("subscribe", (["t"],)), ("poll", (0,)), ("unsubscribe", ()), ("subscribe", (["t"],))],
    "unsubscribe": [("unsubscribe", ()), ("poll", (0,)), ("unsubscribe", ())],
    "close": [("close", ()), ("close", ())],
}
#: What a call may answer that cannot be done now; everything else is a fault.
ANSWERS = {
    KafkaError._STATE,
    KafkaError._CONFLICT,
    KafkaError._INVALID_ARG,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError._FATAL,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.FENCED_INSTANCE_ID,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "fenced": {"group.instance.id": "1"},
    "lapsed": {"max.poll.interval.ms": 500, "session.timeout.ms": 500, "heartbeat.interval.ms": 20},
    "refused": {"partition.assignment.strategy": "roundrobin"},
}
#: Where there are others before the member comes.
COMES_SECOND = ("joining", "refused")
#: Where the member has read everything first: it hands out nothing more before it knows that it is another's.
IS_MEMBER_FIRST = ("member", "revoking", "lost", "fenced", "left")


def revoking(crew, a, settings):
    other = crew.member("b", settings).subscribe()
    other.poll(0.3)
    return [other]


def fenced(crew, a, settings):
    crew.may_be_late = True
    other = crew.member("b", settings).subscribe()
    crew.until([a, other], lambda: a.errors)
    return [other]


def lost(crew, a, settings):
    crew.may_be_late = True
    with settings["gate"]:
        settings["txnstore.clock"].advance(RARE_HEARTBEATS["session.timeout.ms"])
        other = crew.member("b", {key: value for key, value in settings.items() if key != "gate"}).subscribe()
        crew.until([other], lambda: other.partitions)
    return [other]


def lapsed(crew, a, settings):
    crew.until([a], lambda: a.partitions)
    eventually(lambda: a.refused("commit", offsets=[TP("t", 0, 1)], asynchronous=False) is not None)


def refused_by_others(crew, a, settings):
    crew.until([a], lambda: a.errors)


def left(crew, a, settings):
    a.consumer.unsubscribe()
    crew.until([a], lambda: not a.partitions)


WAYS = {
    "unsubscribed": None,
    "subscribed": None,
    "joining": None,
    "member": None,
    "revoking": revoking,
    "lost": lost,
    "lapsed": lapsed,
    "fenced": fenced,
    "refused": refused_by_others,
    "left": left,
}


def bring(crew, state):
    """Return a member in that state, and the others of its group."""
    settings: dict[str, Any] = {"enable.auto.commit": False, **SETTINGS.get(state, {})}
    if state == "lost":
        settings["txnstore.clock"] = ManualClock()
    others = []
    if state in COMES_SECOND:
        others = crew.members("b", **{"partition.assignment.strategy": "range"})
        crew.until(others, lambda: others[0].partitions)
    a = crew.member("a", settings)
    if state == "lost":
        settings["gate"] = gate_of(a)
    if state == "unsubscribed":
        return a, others
    a.subscribe()
    if state in IS_MEMBER_FIRST:
        crew.until([a], lambda: len(a.records) == 4 * RECORDS)
    way = WAYS[state]
    return a, others or (way and way(crew, a, settings)) or []


@pytest.mark.slow_but_first
@pytest.mark.slow_on_postgresql
@pytest.mark.variants_on_sqlite("kind")
@pytest.mark.parametrize("state", WAYS)
@pytest.mark.parametrize("kind", CALLS)
def test_calls_in_each_state_answer_and_leave_the_group_usable(four, crew, state, kind):
    a, others = bring(crew, state)
    for name, arguments in CALLS[kind]:
        try:
            getattr(a.consumer, name)(*arguments)
        except KafkaException as exception:
            assert exception.args[0].code() in ANSWERS, (name, exception)  # noqa: PT017 - it may be refused
            assert exception.args[0].str(), name  # noqa: PT017
    a.close()
    with pytest.raises(RuntimeError, match="Consumer closed"):
        a.consumer.poll(0)
    # Whoever is left, or comes, has everything.
    last = others[0] if others else crew.member("z").subscribe()
    crew.until([last], lambda: last.partitions == [0, 1, 2, 3])
