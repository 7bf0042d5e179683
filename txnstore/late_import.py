"""The import of a module at the first use of one of its names, as PEP 562 allows it."""

from __future__ import annotations

import gc
import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Final

#: The threads that let the collector go on in a moment.
_putting_off: Final[set[int]] = set()


def import_late(name: str) -> ModuleType:
    """Return the module, imported if that was not done yet."""
    with collecting_later():
        return importlib.import_module(name)


@contextmanager
def collecting_later() -> Iterator[None]:
    """Look for no garbage meanwhile: what an import makes stays, and looking through it takes a tenth of the time."""
    was_enabled = gc.isenabled()
    if was_enabled:
        _putting_off.add(threading.get_ident())
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
            _putting_off.discard(threading.get_ident())


def _after_fork_in_child() -> None:
    if _putting_off and threading.get_ident() not in _putting_off:
        # The one that was to do so is not there.
        gc.enable()
    _putting_off.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
