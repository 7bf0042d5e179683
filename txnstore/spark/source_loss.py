"""This file is what happens when records that a query has to read are gone: an error, or a warning."""

from __future__ import annotations

import logging
from typing import Final

from txnstore.errors import OffsetOutOfRange
from txnstore.log.bounds import Bounds
from txnstore.model import TopicPartition

_logger: Final = logging.getLogger("txnstore")


class DataLoss:
    """Reports what is lost in the way that the query chose: `failOnDataLoss`."""

    def __init__(self, *, fails: bool) -> None:
        """Raise if `fails`, else warn."""
        self._fails = fails

    def report(self, what: str, instead: str) -> None:
        """Say what is lost, and what a query that can live with it does instead.

        Raises:
            OffsetOutOfRange: the query cannot.
        """
        if self._fails:
            raise OffsetOutOfRange(f"{what}. With failOnDataLoss=false the query {instead}, and loses what is gone")
        _logger.warning("%s; the query %s (failOnDataLoss=false)", what, instead)

    def begin_within(self, partition: TopicPartition, offset: int, bounds: Bounds) -> int:
        """Return where reading from `offset` on can begin: there, or where the log starts.

        Raises:
            OffsetOutOfRange: what lies there is gone, or never was, and the query fails on it.
        """
        if offset < bounds.log_start_offset:
            self.report(
                f"the records of {partition} from offset {offset} to {bounds.log_start_offset - 1} are gone: retention"
                " or delete_records took them before they were read",
                f"goes on at offset {bounds.log_start_offset}",
            )
            return bounds.log_start_offset
        if offset > bounds.high_watermark:
            self.report(
                f"{partition} was to be read from offset {offset} on, but its log ends at {bounds.high_watermark}: was"
                " its topic deleted and made anew, or the database restored?",
                f"begins at offset {bounds.log_start_offset}",
            )
            return bounds.log_start_offset
        return offset
