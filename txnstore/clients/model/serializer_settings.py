"""This file is how the serializing clients take their serializers out of a configuration and tell them of the store.

A serializer is given ready-made, or as a builder, which makes it of the configuration and takes its own keys out of
that.  What a builder has made belongs to the client, which closes it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

#: A serializer, or any callable like one.
Converter = Callable[[Any, Any], Any]

#: A serializer that looks schemas up by cluster asks for the cluster's id; it is not to wait for ever for an answer.
_CLUSTER_ID_TIMEOUT_SECONDS = 60.0

_log = logging.getLogger(__name__)


class TakenConverters(NamedTuple):
    """What a configuration said about serializers."""

    rest: dict[str, Any]
    """The configuration without them, and without what builders took for theirs."""

    converters: tuple[Converter | None, ...]
    owned: list[Converter]
    """Those that builders have made."""


def take_converters(configuration: Mapping[str, Any], *names: str) -> TakenConverters:
    """Return the configuration without these keys, and what they hold; the mapping given is left as it is.

    Raises:
        TypeError: the configuration is no mapping, or a value is neither callable nor None.
        ValueError: both a serializer and its builder are given, or a builder returns no serializer and configuration.
    """
    owned: list[Converter] = []
    building = _building(configuration, names, owned)
    built: Any = None
    try:
        while True:
            built = building.send(built)
    except StopIteration as done:
        taken: TakenConverters = done.value
        return taken
    except BaseException:
        close_converters(owned)
        raise


async def take_converters_async(configuration: Mapping[str, Any], *names: str) -> TakenConverters:
    """Do the same where builders may be asynchronous, too.

    Raises:
        TypeError, ValueError: as `take_converters`.
    """
    owned: list[Converter] = []
    building = _building(configuration, names, owned)
    built: Any = None
    try:
        while True:
            built = await result_of(building.send(built))
    except StopIteration as done:
        taken: TakenConverters = done.value
        return taken
    except BaseException:
        await close_converters_async(owned)
        raise


def close_converters(converters: Iterable[Converter]) -> None:
    """Close those that can be closed; one that fails keeps no other one open."""
    for converter in converters:
        try:
            getattr(converter, "close", lambda: None)()
        except Exception:  # noqa: BLE001 - it is somebody else's
            _log.exception("a serializer could not be closed")


async def close_converters_async(converters: Iterable[Converter]) -> None:
    """Do the same with some that are closed asynchronously."""
    for converter in converters:
        try:
            await result_of(getattr(converter, "close", lambda: None)())
        except Exception:  # noqa: BLE001 - it is somebody else's
            _log.exception("a serializer could not be closed")


async def result_of(answer: Any) -> Any:
    """Return an answer, or what an asynchronous one comes to."""
    return await answer if inspect.isawaitable(answer) else answer


def offer_cluster_id(cluster_id: Callable[[float], str], *converters: Converter | None) -> None:
    """Give the converters that want it a function that returns the cluster's id."""
    for converter in converters:
        offer = getattr(converter, "set_cluster_id_resolver", None)
        if offer is not None:
            offer(lambda: cluster_id(_CLUSTER_ID_TIMEOUT_SECONDS))


def offer_cluster_id_async(cluster_id: Callable[[float], Awaitable[str]], *converters: Converter | None) -> None:
    """Give the asynchronous converters that want it a coroutine function that returns the cluster's id."""
    for converter in converters:
        offer = getattr(converter, "set_async_cluster_id_resolver", None)
        if offer is not None:
            offer(lambda: cluster_id(_CLUSTER_ID_TIMEOUT_SECONDS))


def _building(
    configuration: Mapping[str, Any], names: Sequence[str], owned: list[Converter]
) -> Generator[Any, Any, TakenConverters]:
    """Yield what each builder returns, to be sent back once it is there."""
    if not isinstance(configuration, Mapping):
        raise TypeError("expected configuration dict")
    rest = dict(configuration)
    given = [(name, rest.pop(name, None), rest.pop(f"{name}.builder", None)) for name in names]
    for name, converter, builder in given:
        if converter is not None and builder is not None:
            raise ValueError(f"Cannot configure both {name} and {name}.builder; use one or the other")
        if converter is not None and not callable(converter):
            raise TypeError(f"{name} must be callable, not {type(converter).__name__}")
    converters: list[Converter | None] = []
    left = [rest]
    for name, given_converter, builder in given:
        converter = given_converter
        if builder is not None:
            # Each sees all keys, so that two may share some.
            built = yield builder.build(dict(rest), name.startswith("key."))
            converter, leftover = _checked(name, built)
            owned.append(converter)
            left.append(leftover)
        converters.append(converter)
    # A key that one of them has taken is none of the client's.
    remaining = {key: value for key, value in left[-1].items() if all(key in leftover for leftover in left[1:])}
    return TakenConverters(remaining, tuple(converters), owned)


def _checked(name: str, built: Any) -> tuple[Converter, dict[str, Any]]:
    try:
        converter, leftover = built
    except (TypeError, ValueError):
        raise ValueError(
            f"{name}.builder must return a (serde, configuration) tuple from build(), got {type(built).__name__}"
        ) from None
    if not isinstance(leftover, dict):
        raise ValueError(  # noqa: TRY004 - confluent-kafka's
            f"{name}.builder returned {type(leftover).__name__} as the leftover configuration from build(), expected a"
            " dict"
        )
    return converter, leftover
