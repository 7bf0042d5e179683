"""The bulk paths both ways, whichever of them this Python has chosen: in C and in Python alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from txnstore import bulk
from txnstore.clients.consumer import opening
from txnstore.clients.model import message
from txnstore.log import columns

needs_c = pytest.mark.skipif(not bulk.IN_C, reason="the bulk paths are not in C here")


def message_module(*, in_c: bool) -> ModuleType:
    """Return the module of messages as it is with this choice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk, "IN_C", in_c)
        specification = importlib.util.spec_from_file_location(message.__name__, message.__file__)
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
    return module


def all_spare_messages() -> list[Any]:
    """Return messages in the memory of all that are gone: while they are held, the next ones ask for some."""
    count = 1_000
    return list(
        bulk.core.Messages(
            message_type=message.Message,
            source=("t", 0, 1),
            details=message.NO_DETAILS,
            index=0,
            count=count,
            first_offset=0,
            offsets=None,
            timestamp_ms=0,
            timestamps_ms=None,
            keys=None,
            values=None,
            headers=None,
        )
    )


def outcome(work: Callable[[], Any]) -> Any:
    """Return what the work returns, or what it raises: its kind and its text."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        return type(error), str(error)


def opened_both_ways(*arguments: Any) -> tuple[Any, Any]:
    """Open a batch in C and in Python, each with messages of its own; return what comes of it, all that is in it."""
    found = []
    for in_c, open_batch, ascending in (
        (True, opening.open_in_c, columns._ascending_in_c),
        (False, opening.open_in_python, columns._ascending_in_python),
    ):
        own = message_module(in_c=in_c)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(opening, "Message", own.Message)
            patch.setattr(opening, "message_of", own.message_of)
            patch.setattr(columns, "_ascending", ascending)
            found.append(outcome(lambda: [everything(each) for each in open_batch(*arguments)]))  # noqa: B023 - called at once
    return found[0], found[1]


def made_of(message_type: Any, source: Any, record: Any, details: Any) -> Any:
    """Return a message of these parts, as that of a delivery report is."""
    made = message_type.__new__(message_type)
    made._source, made._record, made._details = source, record, details
    return made


def everything(of: Any) -> tuple[Any, ...]:
    """Return all that a message tells, with its types."""
    told = (
        of.topic(),
        of.partition(),
        of.offset(),
        of.key(),
        of.value(),
        of.headers(),
        of.error(),
        of.timestamp(),
        of.latency(),
        of.leader_epoch(),
        of.delivery_count(),
        of.marker_offset,
        of.deserialized_key(),
        of.deserialized_value(),
        len(of) if of.value() is None or hasattr(of.value(), "__len__") else None,
        repr(of),
        of._source,
        of._record,
        of._details,
    )
    return (*told, [type(each) for each in told])
