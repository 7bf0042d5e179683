"""This file is the numbers that stand for special offsets, for the kinds of timestamps and of resources."""

from __future__ import annotations

from typing import Final

#: Logical offsets, in `TopicPartition.offset`: the end of the log, its beginning, the committed one, none.
OFFSET_END: Final = -1
OFFSET_BEGINNING: Final = -2
OFFSET_STORED: Final = -1000
OFFSET_INVALID: Final = -1001

#: The first item of `Message.timestamp()`: no timestamp, the producer's clock, the store's clock at the append.
TIMESTAMP_NOT_AVAILABLE: Final = 0
TIMESTAMP_CREATE_TIME: Final = 1
TIMESTAMP_LOG_APPEND_TIME: Final = 2

#: What an offset is asked for by: `OffsetSpec` of the admin client has classes for them.
OFFSET_SPEC_LATEST: Final = -1
OFFSET_SPEC_EARLIEST: Final = -2
OFFSET_SPEC_MAX_TIMESTAMP: Final = -3

#: The kinds of things that have a configuration: `ResourceType` of the admin client.
RESOURCE_UNKNOWN: Final = 0
RESOURCE_ANY: Final = 1
RESOURCE_TOPIC: Final = 2
RESOURCE_GROUP: Final = 3
RESOURCE_BROKER: Final = 4
RESOURCE_TRANSACTIONAL_ID: Final = 5

#: What a reader may see: `IsolationLevel`.
ISOLATION_LEVEL_READ_UNCOMMITTED: Final = 0
ISOLATION_LEVEL_READ_COMMITTED: Final = 1
