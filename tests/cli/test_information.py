"""`txnstore info`: what a store is."""

from __future__ import annotations

from txnstore.config import STORE_SETTINGS
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.opening import open_store
from txnstore.db.schema import SCHEMA_VERSION


def test_info_tells_identity_versions_counts_sizes_and_settings(url, done, answer):
    done("topics", "create", "orders", "-p", "3")
    with open_store(url) as store:
        store.write(lambda connection: change_store_settings(connection, {"num.partitions": "7"}))
    told = answer("info")
    assert told["store_uuid"] == store.store_uuid
    assert told["schema_version"] == SCHEMA_VERSION
    assert told["kind"] == store.backend.name
    assert told["server"].startswith(("SQLite 3.", "PostgreSQL "))
    assert (told["counts"]["topics"], told["counts"]["partitions"], told["counts"]["offsets"]) == (1, 3, 0)
    assert all(size >= 0 for size in told["sizes_bytes"].values())
    assert max(told["sizes_bytes"].values()) > 10_000
    settings = {setting["name"]: setting for setting in told["settings"]}
    assert list(settings) == list(STORE_SETTINGS)
    assert settings["num.partitions"] == {"name": "num.partitions", "value": "7", "is_default": False}
    assert settings["auto.create.topics.enable"]["value"] == "true"
    lines = done("info").splitlines()
    assert lines[0].split() == ["store:", store.store_uuid]
    assert ["num.partitions", "7", "no"] in [line.split() for line in lines]


def test_info_shows_no_password(txnstore, txnstore_postgresql_url):
    from sqlalchemy.engine import make_url

    password = make_url(txnstore_postgresql_url).password
    assert password
    for option in ([], ["--json"]):
        ended = txnstore("info", "--url", txnstore_postgresql_url, *option)
        assert ended.code == 0
        assert password not in ended.out + ended.err


def test_the_database_may_stand_behind_the_command(txnstore, url, answer):
    ended = txnstore("info", url, "--json")
    assert ended.code == 0
    assert answer("info")["store_uuid"] in ended.out
    ended = txnstore("info", url, "--url", url)
    assert (ended.code, "given twice" in ended.err) == (2, True)
