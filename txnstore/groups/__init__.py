"""Consumer groups: their members and rebalances, and the offsets they have committed, alone or in a transaction."""

from __future__ import annotations
