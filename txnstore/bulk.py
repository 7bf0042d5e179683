"""The choice between the bulk paths of the clients in C, where they were built, and the same in Python.

`_bulk.c`, with the files in C beside it, is compiled by an installation where there is a C compiler
(`scripts/build_bulk.py`).  A process, or an installation, that has TXNSTORE_PURE_PYTHON=1 in its environment goes
without.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from txnstore import _bulk
else:
    _bulk = None
    if os.environ.get("TXNSTORE_PURE_PYTHON", "0") in {"", "0"}:
        # Another Python's, or another machine's, is as good as none.
        with suppress(ImportError):
            from txnstore import _bulk

#: The module in C, or None.
core: Final = _bulk
IN_C: Final[bool] = core is not None
