"""Partitions of a relay to Kafka that Kafka does not answer, or refuses, beside others; a store is in its place."""

from __future__ import annotations

import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest

import txnstore
from tests.relay.running import beside, wait_until
from tests.relay.stand_in import CALLS
from tests.relay.store_side import make_topic, numbered, put
from txnstore.model import PartitionName
from txnstore.relay.errors import RelayFailed
from txnstore.relay.options import RelayOptions
from txnstore.relay.to_kafka import ToKafka
from txnstore.relay.turns import RUNNING_MAX, SIDE_BY_SIDE_MAX, SLOW_MAX, Turns


class _SickLibrary:
    """confluent-kafka's names: once a partition is sick, Kafka does not answer its commits until it is well again."""

    def __init__(self, *numbers: int, refused: int | None = None) -> None:
        """Let these partitions be sick as soon as somebody asks, and then another one be refused for good."""
        self.sick = {f"-{number}" for number in numbers}
        self.refused = f"-{refused}"
        self.asked: set[str] = set()
        self.is_well = threading.Event()

    def __getattr__(self, name):
        return getattr(txnstore, name)

    def Producer(self, settings):  # noqa: N802 - it stands for a class
        producer = txnstore.Producer(settings)
        name = settings["transactional.id"]
        calls = {call: getattr(producer, call) for call in (*CALLS, "poll", "close")}
        if name.endswith(self.refused):
            return SimpleNamespace(**calls | {"begin_transaction": self._refuse})
        if not any(name.endswith(number) for number in self.sick):
            return producer

        def commit_transaction(timeout):
            self.asked.add(name)
            if not self.is_well.wait(0.01):
                raise txnstore.KafkaException(txnstore.KafkaError(txnstore.KafkaError._TIMED_OUT, retriable=True))
            producer.commit_transaction(timeout)

        return SimpleNamespace(**calls | {"commit_transaction": commit_transaction})

    def _refuse(self) -> None:
        wait_until(lambda: self.asked)
        raise txnstore.KafkaException(txnstore.KafkaError(txnstore.KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED))


@pytest.mark.slow
@pytest.mark.parametrize("gives_up", [False, True], ids=["waits", "tries again"])
def test_partitions_that_kafka_does_not_answer_are_in_the_way_of_no_other(store, stand_in, monkeypatch, gives_up):
    """Though there are more of them than partitions that take their turns at once."""
    sick = range(SIDE_BY_SIDE_MAX + 2)
    well = len(sick)
    monkeypatch.setattr("txnstore.relay.turns.SLOW_SECONDS", 0.05)
    if gives_up:
        monkeypatch.setattr("txnstore.relay.to_kafka._TRANSACTION_SECONDS", 0.1)
    make_topic(store, "shop", len(sick) + 1)
    for partition in range(len(sick) + 1):
        put(store, "shop", numbered(2), partition=partition)
    library = _SickLibrary(*sick)
    relay = ToKafka(store, stand_in.cluster(library), RelayOptions())
    begin_turn, in_trouble = Turns.begin, set()

    def begin_noted(turns, partition, turn, *, is_in_trouble):
        if is_in_trouble:
            in_trouble.add(partition.partition)
        return begin_turn(turns, partition, turn, is_in_trouble=is_in_trouble)

    monkeypatch.setattr(Turns, "begin", begin_noted)
    with beside(relay.run):
        wait_until(lambda: len(library.asked) == len(sick))
        if gives_up:
            wait_until(lambda: len(in_trouble) == len(sick))
        for count in range(3, 8):
            put(store, "shop", numbered(1, count - 1), partition=well)
            wait_until(lambda count=count: relay.shipped_count == count)
        library.is_well.set()
        wait_until(lambda: relay.shipped_count == 7 + 2 * len(sick))
        put(store, "shop", numbered(1, 2), partition=0)
        wait_until(lambda: relay.shipped_count == 8 + 2 * len(sick))
    assert in_trouble <= set(sick)
    expected = {partition: numbered(2) for partition in sick} | {0: numbered(3), well: numbered(7)}
    assert stand_in.side.read("shop") == expected


def test_a_single_run_waits_for_partitions_that_kafka_does_not_answer(store, stand_in, monkeypatch):
    monkeypatch.setattr("txnstore.relay.turns.SLOW_SECONDS", 0.05)
    make_topic(store, "shop", 2)
    for partition in range(2):
        put(store, "shop", numbered(2), partition=partition)
    library = _SickLibrary(0)
    relay = ToKafka(store, stand_in.cluster(library), RelayOptions(once=True))
    with beside(relay.run) as (run,):
        wait_until(lambda: library.asked and relay.shipped_count == 2)
        assert not run.done()
        library.is_well.set()
        assert run.result(60) == 4
    assert stand_in.side.read("shop") == {0: numbered(2), 1: numbered(2)}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("number", [0, 1])
def test_an_error_of_one_partition_ends_the_relay_while_another_one_waits_for_kafka(store, stand_in, number):
    make_topic(store, "shop", 2)
    told: list[tuple[Exception, int]] = []
    relay = ToKafka(store, stand_in.cluster(_SickLibrary(1 - number, refused=number)), RelayOptions())
    begun_seconds = time.monotonic()
    with pytest.raises(RelayFailed, match=f"shop-{number}, up to offset 0") as raised:
        relay.run(threading.Event(), lambda error: told.append((error, len(relay._turns))))
    # The other one was waiting, and would have done so for a minute.
    assert told == [(raised.value, 1)]
    assert time.monotonic() - begun_seconds < 45


def test_turns_in_trouble_and_slow_ones_take_no_place_of_the_others(monkeypatch):
    monkeypatch.setattr("txnstore.relay.turns.SLOW_SECONDS", 3_600.0)
    go_on = threading.Event()
    turns = Turns()

    def begin(count, first, *, is_in_trouble):
        names = [PartitionName("shop", number) for number in range(first, first + count)]
        return [turns.begin(name, lambda: int(go_on.wait(60)), is_in_trouble=is_in_trouble) for name in names]

    try:
        assert begin(SLOW_MAX + 1, 0, is_in_trouble=True) == [True] * SLOW_MAX + [False]
        assert turns.brisk() == []
        assert begin(SIDE_BY_SIDE_MAX + 1, 100, is_in_trouble=False) == [True] * SIDE_BY_SIDE_MAX + [False]
        assert len(turns.brisk()) == SIDE_BY_SIDE_MAX
        assert turns.finish() == 0
        # A broker has fallen silent: many become slow in the same moment, before one is known to be in trouble.
        monkeypatch.setattr("txnstore.relay.turns.SLOW_SECONDS", 0.0)
        for first in range(200, 300, SIDE_BY_SIDE_MAX):
            turns._running = {name: (future, 0.0) for name, (future, _) in turns._running.items()}
            assert all(begin(SIDE_BY_SIDE_MAX, first, is_in_trouble=False)) == (len(turns) <= RUNNING_MAX)
            if len(turns) == RUNNING_MAX:
                break
    finally:
        go_on.set()
        turns.close()
    assert turns.finish() == RUNNING_MAX
    assert len(turns) == 0


def test_of_several_errors_of_turns_one_that_stays_is_raised():
    turns = Turns()

    def fail(*, may_pass):
        raise RelayFailed("for a while" if may_pass else "for good", may_pass=may_pass)

    for number, passes in enumerate((True, False, True)):
        turns.begin(PartitionName("shop", number), partial(fail, may_pass=passes), is_in_trouble=False)
    turns.close()
    with pytest.raises(RelayFailed, match="for good"):
        turns.finish()
