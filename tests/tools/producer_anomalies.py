"""This file is what can be wrong with producers in a history: sequence numbers, fencing, epochs, markers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from tests.tools.histories import Batch, History, Kind, Operation
from txnstore.transactions.states import EPOCH_EXHAUSTED


def _sequence_gap(history: History) -> Iterator[str]:
    """The sequence numbers of a producer in a partition are not 0, 1, 2, ..."""
    for partition, batches in history.batches().items():
        expected: dict[tuple[int, int], int] = defaultdict(int)
        for batch in batches:
            if batch.marker is not None or batch.producer_id < 0:
                continue
            producer = (batch.producer_id, batch.producer_epoch)
            if batch.base_sequence != expected[producer]:
                yield f"{partition}@{batch.base_offset}: {producer} at {batch.base_sequence}, not {expected[producer]}"
            expected[producer] = batch.base_sequence + batch.last_offset - batch.base_offset + 1


def _moved_by_retry(history: History) -> Iterator[str]:
    """A batch that was sent again got another offset."""
    first: dict[tuple[str, str], tuple[int, str]] = {}
    for operation in history.of_function("append", "end"):
        if operation.kind is not Kind.OK:
            continue
        for partition, base_offset in operation.details.get("base_offsets", {}).items():
            value = operation.details["values"][partition][0]
            before = first.setdefault((partition, value), (base_offset, operation.process))
            if before[0] != base_offset:
                yield f"{value} in {partition}: {before[1]} was told {before[0]}, {operation.process} {base_offset}"


def _zombie_accepted(history: History) -> Iterator[str]:
    """Something of an older epoch took effect after a newer producer had been initialised."""
    newest: dict[str, list[Operation]] = defaultdict(list)
    for operation in history.of_function("init"):
        if operation.kind is Kind.OK:
            newest[operation.details["transactional_id"]].append(operation)
    for operation in history.of_function("append", "end"):
        for init in newest.get(operation.details.get("transactional_id") or "", ()):
            if init.completed_ns < operation.invoked_ns and operation.producer < init.producer:
                if operation.kind is Kind.OK:
                    yield f"{operation.process}: {operation.function} of {operation.producer} after {init.producer}"
                break


def _epoch_reused(history: History) -> Iterator[str]:
    """Two producers are the same one, or a later one is not newer."""
    last: dict[str, Operation] = {}
    given: dict[tuple[int, int], str] = {}
    for operation in _by_answer(history.of_function("init", "end")):
        transactional_id = operation.details["transactional_id"]
        if transactional_id is None:
            continue
        identity = _given_by(operation)
        # An end that is repeated has the same answer again, and that alone.
        is_end = operation.function == "end"
        source = f"the end of {operation.details['transaction']}" if is_end else f"the start of {operation.process}"
        if given.setdefault(identity, source) != source:
            yield f"{identity} was given by {given[identity]} and by {source}"
        if operation.function == "init":
            before = last.get(transactional_id)
            if before is not None and before.completed_ns < operation.invoked_ns and before.producer >= identity:
                yield f"{transactional_id}: {identity} follows {before.producer}"
            last[transactional_id] = operation


def _epoch_exhausted(history: History) -> Iterator[str]:
    """An epoch that is none, or a new producer id that does not begin at 0."""
    for operation in _by_answer(history.of_function("init", "end")):
        producer_id, epoch = _given_by(operation)
        if not 0 <= epoch <= EPOCH_EXHAUSTED:
            yield f"{operation.process} was given epoch {epoch}"
        if operation.function == "end" and producer_id != operation.producer[0] and epoch != 0:
            yield f"{operation.process}: {(producer_id, epoch)} follows {operation.producer}"


def _offset_gap(history: History) -> Iterator[str]:
    """An offset that belongs to no batch, or to two."""
    for partition, batches in history.batches().items():
        next_offset = 0
        for batch in batches:
            if batch.base_offset != next_offset:
                yield f"{partition}: a batch begins at {batch.base_offset}, not at {next_offset}"
            next_offset = batch.last_offset + 1


def _divided_decision(history: History) -> Iterator[str]:
    """A transaction has other markers in one partition than in another, or none in one."""
    markers: dict[tuple[int, int], dict[str, str]] = defaultdict(dict)
    for partition, batches in history.batches().items():
        open_: dict[int, tuple[int, int]] = {}
        for batch in batches:
            producer = (batch.producer_id, batch.producer_epoch)
            if batch.marker is None and batch.is_transactional:
                if open_.setdefault(batch.producer_id, producer) != producer:
                    yield f"{partition}@{batch.base_offset}: {producer} within {open_[batch.producer_id]}"
            elif batch.marker is not None and batch.producer_id in open_:
                markers[open_.pop(batch.producer_id)][partition] = batch.marker
        for producer in open_.values():
            markers[producer][partition] = "none"
    for producer, of in markers.items():
        if len(set(of.values())) > 1:
            yield f"{producer}: {of}"


def _marker_twice(history: History) -> Iterator[str]:
    """A marker that ends nothing follows another one of the same producer and epoch."""
    for partition, batches in history.batches().items():
        seen: set[tuple[int, int]] = set()
        for batch in batches:
            if batch.marker is not None:
                if _of(batch) in seen:
                    yield f"{partition}@{batch.base_offset}: {_of(batch)} {batch.marker}"
                seen.add(_of(batch))


def _by_answer(operations: list[Operation]) -> list[Operation]:
    """Return those that succeeded, in the order of their answers."""
    succeeded = [operation for operation in operations if operation.kind is Kind.OK]
    return sorted(succeeded, key=lambda operation: operation.completed_ns)


def _given_by(operation: Operation) -> tuple[int, int]:
    """Return who the producer is from now on."""
    producer_id, epoch = operation.details.get("next_producer", operation.details["producer"])
    return producer_id, epoch


def _of(batch: Batch) -> tuple[int, int]:
    return batch.producer_id, batch.producer_epoch


#: The checks by the name of what they find; part of `anomalies.CHECKS`.
PRODUCER_CHECKS: Final[Mapping[str, Callable[[History], Iterator[str]]]] = MappingProxyType(
    {
        "I1 sequence-gap": _sequence_gap,
        "I2 moved-by-retry": _moved_by_retry,
        "F1 zombie-accepted": _zombie_accepted,
        "F2 epoch-reused": _epoch_reused,
        "F3 epoch-exhausted": _epoch_exhausted,
        "G3 offset-gap": _offset_gap,
        "G6 divided-decision": _divided_decision,
        "G6 marker-twice": _marker_twice,
    }
)
