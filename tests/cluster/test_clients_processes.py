"""Workers over a cluster that are killed and stopped at any moment: each record comes out exactly once."""

from __future__ import annotations

import pytest

from tests.processes import test_client_workers as workers
from tests.processes.conftest import lives, processes, wait_for  # noqa: F401 - fixtures
from tests.tools.workload import Job
from txnstore.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

#: Short: what befalls one database is shown elsewhere at length.
RECORDS = 200
TROUBLE_SECONDS = 2.5
PATIENCE_SECONDS = 30.0
#: Longer than a transaction over two databases takes on a machine that has other things to do.
TRANSACTION_TIMEOUT_MS = 10_000


@pytest.fixture
def url(site, monkeypatch):
    """The URLs of two databases between which all topics are divided."""
    monkeypatch.setattr(workers, "RECORDS", RECORDS)
    monkeypatch.setattr(workers, "TROUBLE_SECONDS", TROUBLE_SECONDS)
    # One stop and one kill at least, whatever chance says.
    monkeypatch.setattr(workers, "STOPPED_INSTEAD", 0.5)
    monkeypatch.setattr(workers, "PATIENCE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(workers, "Job", _job)
    urls = ", ".join(site.urls[:2])
    placement = ConfigEntry("txnstore.placement", "roundrobin", incremental_operation=AlterConfigOpType.SET)
    with AdminClient({"bootstrap.servers": urls}) as admin:
        resource = ConfigResource(ResourceType.BROKER, "0", incremental_configs=[placement])
        for future in admin.incremental_alter_configs([resource]).values():
            future.result(60)
    return urls


def _job(*arguments, **named):
    return Job(*arguments, **(named | {"timeout_ms": TRANSACTION_TIMEOUT_MS}))


@pytest.mark.slow
def test_each_record_comes_out_exactly_once_whoever_is_killed(
    url,
    tmp_path,
    processes,  # noqa: F811 - a fixture
    lives,  # noqa: F811 - a fixture
    wait_for,  # noqa: F811 - fixtures
):
    workers.test_each_record_comes_out_exactly_once_whoever_is_killed(
        url, tmp_path, processes, lives, wait_for, "assigned"
    )
