"""Spark works on one database: several, and one of several, are refused before anything is done."""

from __future__ import annotations

import pytest

from txnstore.errors import InvalidConfiguration
from txnstore.spark.stores import store_address, store_at


def test_several_databases_are_refused_by_spark(site):
    with pytest.raises(InvalidConfiguration, match="several databases"):
        store_address({"url": ",".join(site.urls[:2])})
    site.open(*site.urls[:2]).close()
    for url in site.urls[:2]:
        with pytest.raises(InvalidConfiguration, match="one of several databases"):
            store_at(store_address({"url": url}))
