"""The choice of databases for tests that need not run on each."""

from __future__ import annotations

import pytest

#: For what does not depend on the database: refusals that never reach it, plans of Spark. In front of tests with `url`,
#: `store`, or whatever else takes a fresh store.
on_sqlite_alone = pytest.mark.parametrize("txnstore_url", ["sqlite"], indirect=True)
