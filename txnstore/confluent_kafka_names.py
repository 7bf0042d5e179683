"""txnstore under the name of confluent_kafka, for programs whose frameworks import that themselves."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

import txnstore

_NAME: Final = "confluent_kafka"
#: The modules that are ours; others below the name are taken from an installed confluent-kafka.
_OURS: Final = (
    "_model",
    "admin",
    "aio",
    "cimpl",
    "deserializing_consumer",
    "error",
    "serialization",
    "serializing_producer",
)
#: Modules within its packages that programs import from all the same, for type hints say; here each is its package.
_WITHIN: Final = {
    "admin": (
        "_acl",
        "_cluster",
        "_config",
        "_group",
        "_listoffsets",
        "_metadata",
        "_records",
        "_resource",
        "_scram",
        "_topic",
    ),
    "aio": ("_AIOConsumer", "producer"),
}
#: The release whose names and behaviour these are.
_VERSION: Final = "2.16.1"


class _ConfluentKafka(ModuleType):
    """What `import confluent_kafka` finds."""

    __version__ = _VERSION
    __all__ = tuple(txnstore.__all__)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        try:
            return getattr(txnstore, name)
        except AttributeError:
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}") from None

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *txnstore.__all__})

    @staticmethod
    def version() -> str:
        """Return the release of confluent-kafka that this stands for."""
        return _VERSION


def install_as_confluent_kafka() -> None:
    """Let every `import confluent_kafka` of this process find txnstore, from now on.

    So a framework that imports confluent_kafka itself works on a database: call this before it is imported.  The
    modules `admin`, `aio`, `cimpl`, `error` and `serialization` are txnstore's, and so are the classes in them.  Of a
    confluent-kafka that is installed, the parts in pure Python come along, the schema registry above all; its C
    extension is never loaded.  A second call changes nothing.

    Raises:
        RuntimeError: the real confluent_kafka has been imported already; nothing was changed.
    """
    present = sys.modules.get(_NAME)
    if isinstance(present, _ConfluentKafka):
        return
    real = sorted(
        name
        for name, module in sys.modules.items()
        if name.partition(".")[0] == _NAME and getattr(module, "__name__", "").partition(".")[0] != "txnstore"
    )
    if real:
        raise RuntimeError(
            f"{real[0]} has been imported already: call txnstore.install_as_confluent_kafka() before anything imports"
            " confluent_kafka"
        )
    modules = {f"{_NAME}.{name}": importlib.import_module(f"txnstore.{name}") for name in _OURS}
    for package, names in _WITHIN.items():
        module = modules[f"{_NAME}.{package}"]
        for name in names:
            modules[f"{_NAME}.{package}.{name}"] = module
            setattr(module, name, module)
    # Finding it is not importing it: what it does when it is imported is never done.
    installed = PathFinder.find_spec(_NAME)
    locations = list(installed.submodule_search_locations or ()) if installed is not None else []
    stand_in = _ConfluentKafka(_NAME, txnstore.__doc__)
    stand_in.__path__ = locations
    stand_in.__spec__ = ModuleSpec(_NAME, None, origin=txnstore.__file__, is_package=True)
    stand_in.__spec__.submodule_search_locations = locations
    sys.modules.update(modules)
    sys.modules[_NAME] = stand_in
