"""The length of campaigns: tests that do the same random thing again and again, mark `campaign`.

In the suite each is long enough to find the faults that were put into the code on purpose. TXNSTORE_CAMPAIGN_LENGTH
makes all of them so many times as long, or shorter; scripts/campaigns sets it, and scripts/test without --all.
"""

from __future__ import annotations

import os
from typing import Final

LENGTH: Final = float(os.environ.get("TXNSTORE_CAMPAIGN_LENGTH", "1"))


def times(count: int) -> int:
    """Return how often a campaign does what it does `count` times in the suite; at least once."""
    return max(1, round(count * LENGTH))
