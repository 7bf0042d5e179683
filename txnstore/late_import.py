"""The import of a module at the first use of one of its names, as PEP 562 allows it."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


def import_late(name: str) -> ModuleType:
    """Return the module, imported if that was not done yet."""
    with collecting_later():
        return importlib.import_module(name)


@contextmanager
def collecting_later() -> Iterator[None]:
    """Look for no garbage meanwhile: what an import makes stays, and looking through it takes a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
