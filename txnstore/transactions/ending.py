"""This file is the markers that a decision asks for: its producer's, and each further writer's by its own outcome."""

from __future__ import annotations

from collections.abc import Collection

from txnstore.log.markers import Marker
from txnstore.transactions.metadata import TransactionMetadata
from txnstore.transactions.pending_markers import marker_of, marker_of_writer
from txnstore.transactions.writer_rows import Participants


def markers_of(decided: TransactionMetadata, participants: Participants, counted: Collection[int]) -> list[Marker]:
    """Return the markers of a decided transaction; of its further writers, only those that are `counted` commit."""
    return [
        *(marker_of(decided, partition_id) for partition_id in participants.partition_ids),
        *(
            marker_of_writer(decided, partition_id, writer_id, counts=writer_id in counted)
            for writer_id, partition_ids in participants.writers.items()
            for partition_id in partition_ids
        ),
    ]
