"""The Python processes of Spark: what each pays for having much loaded, and what spares it that."""

from __future__ import annotations

import gc
import os
from typing import Final

#: Spark sets it for the processes that it uses for task after task.
_IS_REUSED: Final = "SPARK_REUSE_WORKER"


def spare_what_is_loaded() -> None:
    """Leave all that is there now out of Python's garbage collections, if Spark uses this process again and again.

    After every task Spark has such a process collect everything, before it takes the next one.  The modules and the
    open store, which stay as long as the process, are 100,000 objects to look at: 60 ms, more than the rest of a small
    task.
    """
    if _IS_REUSED in os.environ:
        gc.freeze()
