"""Where a partition is read from: a table."""

from __future__ import annotations

import pytest

from txnstore.clients.consumer.positions import start_position
from txnstore.log.bounds import Bounds

BOUNDS = Bounds(1, log_start_offset=5, high_watermark=20, last_stable_offset=15)

TABLE = [
    # wanted, committed, earliest, latest, error
    (5, None, 5, 5, 5),
    (20, None, 20, 20, 20),
    (4, None, 5, 15, None),
    (21, None, 5, 15, None),
    (2**63 - 1, None, 5, 15, None),
    (-2, None, 5, 5, 5),
    (-1, None, 15, 15, 15),
    (-1000, 7, 7, 7, 7),
    (-1000, 20, 20, 20, 20),
    (-1000, 3, 5, 15, None),
    (-1000, 21, 5, 15, None),
    (-1000, None, 5, 15, None),
    (-1001, 7, 5, 15, None),
    (-5, None, 5, 15, None),
    (-2000, None, 15, 15, 15),
    (-2003, None, 12, 12, 12),
    (-2100, None, 5, 5, 5),
]


@pytest.mark.parametrize(("wanted", "committed", "earliest", "latest", "error"), TABLE)
def test_the_start_is_the_one_of_the_table(wanted, committed, earliest, latest, error):
    for reset, expected in (("earliest", earliest), ("latest", latest), ("error", error)):
        start = start_position(wanted, BOUNDS, BOUNDS.last_stable_offset, committed, reset)
        assert start.position == expected
        assert start.position is not None or start.why
