"""Several consumers of one group in one process, polled by the test in turns, and what each was told.

Whatever a test does, one thing is checked all the time: nobody is given a partition that another has not given back,
and nobody is handed a record of a partition that is another's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from tests.clients.consumer.log_writer import PATIENCE_SECONDS
from txnstore import OFFSET_INVALID, Consumer, KafkaError, KafkaException, Message, TopicPartition
from txnstore.clients.membership.metadata import parse_group_metadata
from txnstore.model import NO_GENERATION

TP = TopicPartition
#: How long each has in his turn.
TURN_SECONDS = 0.01
#: So rare that no heartbeat comes within a test: who hears of news hears of it by a wake-up.
RARE_HEARTBEATS = {"heartbeat.interval.ms": 100_000, "session.timeout.ms": 300_000}
COOPERATIVE = {"partition.assignment.strategy": "cooperative-sticky"}
ROUND_ROBIN = {"partition.assignment.strategy": "roundrobin"}
EAGER_AND_COOPERATIVE: tuple[dict[str, str], ...] = ({}, COOPERATIVE)
STRATEGY_NAMES = ("eager", "cooperative")
#: A member whose place is looked after often, and soon lost, but not by the pauses of a busy machine.
SHORT_SESSION = {"session.timeout.ms": 2_000, "heartbeat.interval.ms": 100}
#: A member that finds soon who has expired, and does not expire itself where a clock is moved on by a short session.
LOOKS_OFTEN = {"session.timeout.ms": 300_000, "heartbeat.interval.ms": 100}

Call = tuple[str, tuple[object, ...]]


class Member:
    """One consumer of the group. What its callbacks were told stands in `calls`, what it was handed in `records`."""

    def __init__(self, crew: Crew, name: str, consumer: Consumer) -> None:
        self.crew = crew
        self.name = name
        self.consumer = consumer
        self.calls: list[Call] = []
        self.records: list[Message] = []
        self.errors: list[KafkaError] = []
        self.actions: dict[str, Callable[[Consumer, list[TopicPartition]], object]] = {}
        """What the application does in its callbacks, by `assign`, `revoke` and `lost`."""
        self._assigned_generation = NO_GENERATION

    def __repr__(self) -> str:
        return f"<{self.name}: {self.calls}, {self.errors}>"

    def subscribe(self, *topics: str, **callbacks: Any) -> Member:
        usual = {f"on_{kind}": self._callback(kind) for kind in ("assign", "revoke", "lost")}
        self.consumer.subscribe(list(topics or ("t",)), **{**usual, **callbacks})
        return self

    def _callback(self, kind: str) -> Callable[[Consumer, list[TopicPartition]], None]:
        def callback(consumer: Consumer, partitions: list[TopicPartition]) -> None:
            assert consumer is self.consumer
            assert {partition.offset for partition in partitions} <= {OFFSET_INVALID}
            call = told(kind, *((partition.topic, partition.partition) for partition in partitions))
            self.calls.append(call)
            self.crew.calls.append((self.name, *call))
            if kind == "assign":
                self._assigned_generation = self.generation
                self.crew.give(self, partitions)
            try:
                action = self.actions.get(kind)
                if action is not None:
                    action(consumer, partitions)
            finally:
                if kind != "assign":
                    self.crew.take_back(self, partitions)

        return callback

    def poll(self, timeout: float = TURN_SECONDS) -> Message | None:
        """Take one turn."""
        message = self.consumer.poll(timeout)
        if message is None:
            return None
        error = message.error()
        if error is not None:
            self.errors.append(error)
        else:
            self.records.append(message)
            self.crew.note_record(self, message)
        return message

    @property
    def partitions(self) -> list[object]:
        """The assigned partitions, in order: those of topic t as numbers, others as pairs."""
        return in_order(_short(partition.topic, partition.partition) for partition in self.consumer.assignment())

    @property
    def moves(self) -> list[Call]:
        """What it was told, without the rounds in which nothing came or went."""
        return [call for call in self.calls if call[1]]

    @property
    def generation(self) -> int:
        return parse_group_metadata(self.consumer.consumer_group_metadata()).generation

    @property
    def is_at_rest(self) -> bool:
        """Whether it was told of its newest generation: who keeps a part hears of that last, and of nothing new."""
        return self._assigned_generation == self.generation

    @property
    def values(self) -> list[bytes | str | None]:
        return [message.value() for message in self.records]

    @property
    def error_codes(self) -> list[int]:
        return [error.code() for error in self.errors]

    def places(self) -> list[tuple[str | None, int | None, int | None]]:
        """Where the records stood that it was handed, in order."""
        return [(message.topic(), message.partition(), message.offset()) for message in self.records]

    def refused(self, name: str, *arguments: object, **keywords: object) -> KafkaError | None:
        """Return the error of a call that is to be refused; None if it is not."""
        try:
            getattr(self.consumer, name)(*arguments, **keywords)
        except KafkaException as exception:
            error: KafkaError = exception.args[0]
            return error
        return None

    def taken(self) -> list[Call]:
        """Return what it was told since this was asked last."""
        calls, self.calls = self.calls, []
        return calls

    def close(self) -> None:
        self.consumer.close()
        self.crew.disown(self)


class Crew:
    """The members of one group."""

    def __init__(self, make_consumer: Callable[[dict[str, Any]], Consumer]) -> None:
        self._make_consumer = make_consumer
        self.calls: list[tuple[object, ...]] = []
        """What all were told, in the order in which they were."""
        self.may_be_late = False
        """Whether a member may have lost its place and not know of it yet: it may own what it is not handed."""
        self._owners: dict[tuple[str, int], Member] = {}

    def member(self, name: str, configuration: dict[str, Any] | None = None) -> Member:
        """Make a member; members stand in the group in the order of their names."""
        usual: dict[str, Any] = {"client.id": name, **RARE_HEARTBEATS}
        return Member(self, name, self._make_consumer({**usual, **(configuration or {})}))

    def members(self, names: str, *topics: str, **configuration: Any) -> list[Member]:
        """Make a member for each letter and subscribe it; keys have underscores for dots."""
        settings = {key.replace("_", "."): value for key, value in configuration.items()}
        return [self.member(name, settings).subscribe(*topics) for name in names]

    def until(self, members: list[Member], found: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
        """Let the members poll in turns until `found()` is true; fail if it never is."""
        deadline = time.monotonic() + seconds
        while not found():
            assert time.monotonic() < deadline, f"it did not happen: {members}"
            for member in members:
                member.poll()

    def until_at_rest(
        self, members: list[Member], found: Callable[[], object], seconds: float = PATIENCE_SECONDS
    ) -> None:
        """Let the members poll in turns until `found()` is true and nobody has yet to be told of the rebalance."""
        self.until(members, lambda: found() and all(member.is_at_rest for member in members), seconds)

    def until_shared(self, members: list[Member], *shares: list[object], seconds: float = PATIENCE_SECONDS) -> None:
        """Let the members poll in turns until these are their partitions, and they were told of it."""
        self.until_at_rest(members, lambda: [member.partitions for member in members] == list(shares), seconds)

    def until_all_have_some(self, members: list[Member], count: int) -> None:
        """Let the members poll in turns until everybody has a part of `count` partitions."""
        self.until(
            members,
            lambda: (
                all(member.partitions for member in members)
                and sum(len(member.partitions) for member in members) == count
            ),
        )

    def give(self, member: Member, partitions: list[TopicPartition]) -> None:
        for partition in partitions:
            key = (partition.topic, partition.partition)
            owner = self._owners.get(key)
            if not self.may_be_late:
                assert owner in (None, member), f"{key} is given to {member} while {owner} has it"
            self._owners[key] = member

    def take_back(self, member: Member, partitions: list[TopicPartition]) -> None:
        for partition in partitions:
            key = (partition.topic, partition.partition)
            if self._owners.get(key) is member:
                del self._owners[key]

    def disown(self, member: Member) -> None:
        """Forget what a member owned: it has lost it, and need not know."""
        for key in [key for key, owner in self._owners.items() if owner is member]:
            del self._owners[key]

    def note_record(self, member: Member, message: Message) -> None:
        topic, partition = message.topic(), message.partition()
        assert topic is not None
        assert partition is not None
        owner = self._owners.get((topic, partition))
        assert owner is member, f"{topic} [{partition}] is handed to {member} while it is {owner}'s"


def gate_of(member: Member) -> threading.RLock:
    """Return a lock under which the member says nothing to its group, nor is anything that it says under way.

    Without it, whoever lets a session run out may be overtaken by a heartbeat that has been due since before.
    """
    gate = threading.RLock()
    requests = member.consumer._core.group._requests
    for name in ("join", "heartbeat", "renew"):
        setattr(requests, name, _behind(gate, getattr(requests, name)))
    return gate


def _behind(gate: threading.RLock, ask: Callable[..., Any]) -> Callable[..., Any]:
    def asked(*arguments: Any, **keywords: Any) -> Any:
        with gate:
            return ask(*arguments, **keywords)

    return asked


def in_order(partitions: Iterable[object]) -> list[object]:
    """Return partitions in order: the numbers of topic t, then the pairs."""
    return sorted(partitions, key=lambda partition: (isinstance(partition, tuple), partition))


def _short(topic: str, number: int) -> object:
    return number if topic == "t" else (topic, number)


def told(kind: str, *partitions: object) -> Call:
    """Return what a callback is told: partitions of topic t as numbers, others as pairs."""
    pairs = (partition if isinstance(partition, tuple) else ("t", partition) for partition in partitions)
    return (kind, tuple(_short(*pair) for pair in pairs))


def assigned(*partitions: object) -> Call:
    return told("assign", *partitions)


def revoked(*partitions: object) -> Call:
    return told("revoke", *partitions)


def lost(*partitions: object) -> Call:
    return told("lost", *partitions)
