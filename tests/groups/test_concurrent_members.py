"""Members in threads of their own join, leave and poll at once: the rows' locks let no partition have two owners."""

from __future__ import annotations

import random
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.groups.group_servers import StoreServer
from tests.groups.protocol_member import ProtocolMember
from txnstore.groups.group import GroupState

MEMBERS, ROUNDS, PARTITIONS = 4, 25, 6


class Owners:
    """Who works on what, as the applications were told."""

    def __init__(self):
        self._lock = threading.Lock()
        self._owner_of: dict[str, object] = {}

    def enter(self, member, partitions):
        with self._lock:
            for partition in partitions:
                assert partition not in self._owner_of, f"{partition} has two owners"
                self._owner_of[partition] = member

    def go(self, member, partitions):
        with self._lock:
            for partition in partitions:
                assert self._owner_of.pop(partition) is member


class WatchedMember(ProtocolMember):
    def __init__(self, owners, *arguments, **options):
        self.owners = owners
        super().__init__(*arguments, **options)

    def _tell(self, what, partitions):
        names = [str(partition) for partition in partitions]
        (self.owners.enter if what == "assign" else self.owners.go)(self, names)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])
def test_members_that_come_and_go_at_once_never_share_a_partition(shared_store, shared_clock, assignor):
    server = StoreServer(shared_store, shared_clock, f"group-{uuid.uuid4().hex[:8]}")
    topic = f"topic-{uuid.uuid4().hex[:8]}"
    server.create_topic(topic, PARTITIONS)
    owners = Owners()
    at_once = threading.Barrier(MEMBERS)

    def live(seed):
        chance = random.Random(seed)

        def start():
            return WatchedMember(owners, server, server.group_id, [topic], assignors=(assignor,))

        at_once.wait(timeout=60)
        member = start()
        for _ in range(ROUNDS):
            if chance.random() < 0.1:
                member.leave()
                member = start()
            chance.choice([member.poll, member.poll, member.poll, member.beat, member.send])()
        return member

    with ThreadPoolExecutor(MEMBERS) as threads:
        members = [future.result(timeout=120) for future in [threads.submit(live, seed) for seed in range(MEMBERS)]]
    for _ in range(4):
        for member in members:
            member.poll()
    assert server.state() is GroupState.STABLE
    assert sorted(p.partition for member in members for p in member.owned) == list(range(PARTITIONS))
