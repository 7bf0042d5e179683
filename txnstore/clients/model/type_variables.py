"""This file is the types of a message's key and value, where a serializer makes objects of them; by default any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Key = TypeVar("Key", default=Any)
    Value = TypeVar("Value", default=Any)
else:
    # Python 3.13 has defaults (PEP 696); before, only type checkers know them.
    from typing import TypeVar

    Key = TypeVar("Key")
    Value = TypeVar("Value")
