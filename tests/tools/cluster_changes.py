"""Single changes of topics and settings in a cluster, as an administrator makes them at the controller."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from txnstore.db.cluster import catalogue
from txnstore.db.cluster.cluster import Cluster
from txnstore.log import topics
from txnstore.log.cluster_topics import change, delete_topics
from txnstore.log.topics import Topic


def ensure_topic(cluster: Cluster, name: str, *, partition_count: int = 1) -> Topic:
    """Return the topic, created if it is not there."""
    topic = change(cluster, partial(topics.ensure_topic, name=name, partition_count=partition_count))
    cluster.learn(topic)
    return topic


def grow_topic(cluster: Cluster, name: str, *, partition_count: int) -> Topic:
    """Give the topic more partitions."""
    topic = change(cluster, partial(topics.grow_topic, name=name, partition_count=partition_count))
    cluster.learn(topic)
    return topic


def delete_topic(cluster: Cluster, name: str) -> None:
    """Delete the topic."""
    delete_topics(cluster, [name])


def change_topic_configs(cluster: Cluster, name: str, changes: Mapping[str, str | None]) -> None:
    """Change settings of a topic."""
    change(cluster, lambda c: topics.change_topic_configs(c, topics.lock_topic_configs(c, name), changes))


def change_store_settings(cluster: Cluster, changes: Mapping[str, str | None]) -> None:
    """Change settings of the whole cluster."""
    change(cluster, partial(catalogue.change_store_settings, changes=changes))
