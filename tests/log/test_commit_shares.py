"""The shares of committed transactions: where else they were committed, among the partitions that are asked for."""

from __future__ import annotations

from tests.log.histories import Log
from txnstore.db.store import Store
from txnstore.log.commit_shares import CommittedShares, read_shares


def test_a_transaction_tells_where_else_it_was_committed_and_an_aborted_one_tells_nothing(shared_store: Store) -> None:
    log = Log(shared_store)
    one, two, three = log.partition_ids
    for partition_id in (one, two, three):
        log.plain(b"plain", partition_id=partition_id)
    for name, partition_ids in (("A", (one, two, three)), ("B", (one, two)), ("C", (one,))):
        for partition_id in partition_ids:
            log.write(name, b"x", partition_id=partition_id)
    log.abort("B", one, two)
    log.commit("C", one)
    log.commit("A", one, two, three)

    def shares(*among: int, first_place: int = 0, last_place: int = 100) -> dict[int, CommittedShares]:
        return log.store.read(
            lambda connection: read_shares(connection, one, among, first_place=first_place, last_place=last_place)
        )

    # A record outside, one of each of the three, and the markers of B, C and A.
    found = shares(one, two, -1)
    assert sorted(found) == [5, 6]
    assert (found[5].places, found[5].first_offsets) == ({one: 5}, {one: 3})
    assert (found[6].places, found[6].first_offsets) == ({one: 6, two: 4}, {one: 1, two: 1})
    assert found[5].producer.producer_id != found[6].producer.producer_id
    assert shares(one, two, three)[6].places == {one: 6, two: 4, three: 2}
    assert sorted(shares(one, last_place=5)) == [5]
    assert sorted(shares(one, first_place=6)) == [6]
    assert shares(two)[6].places == {two: 4}
