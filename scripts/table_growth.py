"""The growth of the tables: what keeps each of them from growing for ever, for the reference of the tables."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_WITH_TOPIC: Final = "Goes with its topic."
_WITH_TRANSACTION: Final = "Goes as its transaction ends."

#: By table: when its rows go.  Every new table says so here.
GROWTH: Final[Mapping[str, str]] = MappingProxyType(
    {
        "stores": "One row.",
        "store_configs": "One row a setting.",
        "databases": "One row a database.",
        "topics": "As many as there are topics.",
        "topic_configs": _WITH_TOPIC,
        "partitions": _WITH_TOPIC,
        "deleted_numbers": "About the newest 1,000,000; none in a database alone.",
        "deleted_partitions": "Goes once nothing of the partition is left.",
        "partition_heads": _WITH_TOPIC,
        "record_batches": "By the topic's `retention.ms`, `retention.bytes` and `cleanup.policy`, or `delete_records`;"
        " with its topic. On PostgreSQL the room goes with the segment.",
        "producer_states": "Once the producer has been silent for `producer.id.expiration.ms`; with its topic. Never"
        " while it has a transaction open there.",
        "finished_transactions": "Goes with its marker, which goes after its records.",
        "partition_storage": _WITH_TOPIC,
        "transactions": "Once the id has been unused for `transactional.id.expiration.ms`. Never while a transaction of"
        " it is open, prepared or decided.",
        "transaction_partitions": _WITH_TRANSACTION,
        "transaction_writers": _WITH_TRANSACTION,
        "transaction_writer_partitions": _WITH_TRANSACTION,
        "transaction_groups": _WITH_TRANSACTION,
        "transaction_branches": "Goes once the branch has ended in its database, a commit as was decided.",
        "transaction_log": "After `txnstore.transaction.log.retention.ms`, once its transaction is complete.",
        "pending_markers": "Goes as the marker is written.",
        "groups": "Once it has no members and no offsets.",
        "group_members": "As it leaves, or has been silent for its session timeout.",
        "group_offsets": "Once its group has been unused for `offsets.retention.minutes`; with its topic. Never while"
        " an open transaction holds offsets of the group, or a query stands in that partition as the group"
        " (`sink_positions`), nor sooner than `txnstore.retention.unread.ms` of the topic says; if that is -1, never;"
        " those of our own groups, which say how much of an archive was loaded, only with their topic.",
        "pending_group_offsets": _WITH_TRANSACTION,
        "offset_producers": "Once the producer has been silent for `producer.id.expiration.ms`. Never while it holds"
        " offsets.",
        "outbox": "As the row becomes a record; one that is refused after `txnstore.outbox.refused.retention.ms`.",
        "outbox_sequencers": "One row.",
        "relay_positions": "One row a relay from Kafka and partition, two of one to Kafka. Of a relay to Kafka they go"
        " with their topic, of one from Kafka once neither Kafka nor the store has the topic; of one that is given up"
        " by `txnstore relay --forget`.",
        "sink_batches": "The newest hundred of each query, until it has been silent for `txnstore.sink.retention.ms`."
        " Those of a batch job go with its transactional id; of many, some may be gone if it is used again just then.",
        "sink_runs": "The newest hundred of each transactional id, as long as `sink_batches`.",
        "sink_inputs": "As the batch is decided or the next one begins, and what the last one read as the next one is"
        " decided, or with `sink_batches`; else after `transactional.id.expiration.ms` and"
        " `transaction.max.timeout.ms`; with its topic.",
        "sink_positions": "As long as `sink_batches`; with its topic.",
        "maintenance_duties": "One row a duty; after 30 days that of a participant which nobody names any more.",
    }
)
