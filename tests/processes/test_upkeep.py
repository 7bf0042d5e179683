"""Everything expires, is trimmed and deleted while everybody is killed: nothing is lost, twice or hidden by it."""

from __future__ import annotations

import random

import pytest

from tests.processes.lost_answers import RECOGNISED
from tests.processes.upkeep_campaign import Campaign, run_campaign
from tests.processes.upkeep_programs import Times
from tests.tools.campaigns import times

SECONDS = times(4)
#: A slow machine gets so many times as long until everything was seen.
LONGER_MAX = 30
TIMES = Times(producer_ms=400, transactional_id_ms=1_500, journal_ms=500, transaction_timeout_ms=1_500)
#: What comes quickly, whatever happens to any process.
MUST_BE_SEEN = ("committed", "batches", RECOGNISED, "silent producers forgotten", "journal entries deleted")


@pytest.mark.slow
@pytest.mark.campaign
def test_while_the_maintenance_forgets_and_deletes_nothing_is_lost_twice_or_hidden(url, request, tmp_path, processes):
    seed = random.randrange(2**32)
    is_server = url.startswith("postgresql")
    server = request.getfixturevalue("txnstore_postgres_server") if is_server else None
    campaign = Campaign(
        url,
        tmp_path,
        processes,
        seed,
        server=server,
        longer_max=LONGER_MAX,
        is_small=True,
        must_be_seen=MUST_BE_SEEN,
        times=TIMES,
    )
    problems = run_campaign(campaign, SECONDS)
    assert not problems, "\n".join([f"seed {seed}: {dict(campaign.told)}", *problems])
