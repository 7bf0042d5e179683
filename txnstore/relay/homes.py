"""This file is what a relay cannot do yet: partitions that live in another database of a cluster of several."""

from __future__ import annotations

from txnstore.log.topics import Topic
from txnstore.relay.errors import RelayFailed


def check_homes(topic: Topic, database_id: int) -> None:
    """Refuse a topic with a partition that is not in this database.

    Raises:
        RelayFailed: there is one.
    """
    elsewhere = [number for number, home in enumerate(topic.leaders) if home != database_id]
    if elsewhere:
        raise RelayFailed(
            f"{topic.name}-{elsewhere[0]} lives in another database of the cluster; a relay copies only topics that"
            " live in one database, whose URL it is given"
        )
