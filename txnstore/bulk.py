"""The choice between the bulk paths of the clients in C, where they were built, and the same in Python.

`_bulk.c`, with the files in C beside it, is compiled by an installation where there is a C compiler
(`scripts/build_bulk.py`).  A process, or an installation, that has TXNSTORE_PURE_PYTHON=1 in its environment goes
without; so does a checkout whose sources are others by now than what was compiled, and an installation in which that
was left by another version.
"""

from __future__ import annotations

import os
import warnings
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from txnstore import _bulk
else:
    _bulk = None
    if os.environ.get("TXNSTORE_PURE_PYTHON", "0") in {"", "0"}:
        # Another Python's, or another machine's, is as good as none.
        with suppress(ImportError):
            from txnstore import _bulk
    # Sources lie beside it in a checkout alone; their interface does in what was installed as well.
    for _name, _files in (("SOURCES", "_bulk*.[ch]"), ("INTERFACE", "_bulk.pyi")):
        _texts = [path.read_bytes() for path in sorted(Path(__file__).parent.glob(_files))]
        if _bulk is not None and _texts and getattr(_bulk, _name, 0) != zlib.crc32(b"".join(_texts)):
            warnings.warn(
                "txnstore runs without its bulk paths in C, which were compiled from other sources than what is beside"
                " them: install it again (a checkout by pip install --editable)",
                RuntimeWarning,
                stacklevel=1,
            )
            _bulk = None

#: The module in C, or None.
core: Final = _bulk
IN_C: Final[bool] = core is not None
