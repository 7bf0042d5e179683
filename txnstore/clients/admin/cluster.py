"""This file is what the admin client tells of the cluster as a whole."""

from __future__ import annotations

from typing import Any

from txnstore.clients.admin.calls import Call
from txnstore.clients.brokers import broker_nodes
from txnstore.clients.model.metadata import Node
from txnstore.db.store import Store


class DescribeClusterResult:
    """The cluster, from `describe_cluster()`: a node for each database, the controller first.

    `authorized_operations` is None: the database decides who may do what.
    """

    def __init__(
        self,
        controller: Node,
        nodes: list[Node],
        cluster_id: str | None = None,
        authorized_operations: list[Any] | None = None,
    ) -> None:
        self.cluster_id = cluster_id
        self.controller = controller
        self.nodes = nodes
        self.authorized_operations = authorized_operations


def describe(store: Store, call: Call[str, DescribeClusterResult], item: str) -> DescribeClusterResult:
    """Return the cluster's description."""
    nodes = broker_nodes(store)
    return DescribeClusterResult(nodes[0], nodes, store.store_uuid)
