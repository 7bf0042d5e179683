"""This file is how the serializing clients take their serializers out of a configuration and tell them of the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: A serializer, or any callable like one.
Converter = Callable[[Any, Any], Any]

#: A serializer that looks schemas up by cluster asks for the cluster's id; it is not to wait for ever for an answer.
_CLUSTER_ID_TIMEOUT_SECONDS = 60.0


def take_converters(
    configuration: Mapping[str, Any], *names: str
) -> tuple[dict[str, Any], tuple[Converter | None, ...]]:
    """Return the configuration without these keys, and what they hold; the mapping given is left as it is.

    Raises:
        TypeError: the configuration is no mapping, or a value is neither callable nor None.
    """
    if not isinstance(configuration, Mapping):
        raise TypeError("expected configuration dict")
    rest = dict(configuration)
    converters = tuple(rest.pop(name, None) for name in names)
    for name, converter in zip(names, converters, strict=True):
        if converter is not None and not callable(converter):
            raise TypeError(f"{name} must be callable, not {type(converter).__name__}")
    return rest, converters


def offer_cluster_id(cluster_id: Callable[[float], str], *converters: Converter | None) -> None:
    """Give the converters that want it a function that returns the cluster's id."""
    for converter in converters:
        offer = getattr(converter, "set_cluster_id_resolver", None)
        if offer is not None:
            offer(lambda: cluster_id(_CLUSTER_ID_TIMEOUT_SECONDS))
