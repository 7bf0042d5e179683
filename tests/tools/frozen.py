"""What the fork server imports last: no child's garbage collector looks at, and so copies, what came before."""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
