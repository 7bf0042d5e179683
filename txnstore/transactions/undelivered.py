"""This file is what a decided transaction still has to do in other databases than its coordinator's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from txnstore.log.markers import Marker
from txnstore.transactions.metadata import TransactionMetadata
from txnstore.transactions.states import TransactionState


@dataclass(frozen=True, slots=True)
class PendingDelivery:
    """The rest of a decision."""

    decided: TransactionMetadata
    """The coordinator's row with the decision."""

    markers: Sequence[Marker]
    """Those that are missing from their partitions."""

    group_ids: Sequence[str]
    """The groups whose offsets are not finished."""

    @property
    def commits(self) -> bool:
        """Whether the transaction was decided to commit."""
        return self.decided.state is TransactionState.PREPARE_COMMIT
