"""`txnstore doctor`: what would bite, with what comes of it and what to do, and nothing that is secret."""

from __future__ import annotations

import json
import re

import pytest
from sqlalchemy.engine import make_url


@pytest.fixture
def checked(txnstore, url):
    """Run the doctor on a fresh store, and return how it ended."""
    return lambda *arguments: txnstore("doctor", url, *arguments)


def test_a_healthy_store_is_no_problem(checked, url):
    ended = checked()
    assert (ended.code, "problem" in ended.out) == ((0, False) if url.startswith("sqlite") else (1, True)), ended
    # The tests' server does without fsync, which is what bites there.
    assert url.startswith("sqlite") or ended.out.count("problem:") == ended.out.count("is off (fsync)")
    assert ", a store: " in ended.err


def test_a_problem_is_told_with_what_comes_of_it_and_what_to_do(txnstore, tmp_path, monkeypatch):
    monkeypatch.setenv("TXNSTORE_URL", f"sqlite:///{tmp_path}/missing/store.db")
    ended = txnstore("doctor")
    assert ended.code == 1
    lines = ended.out.splitlines()
    at = lines.index("problem: there is no such folder (folder)")
    assert lines[at + 1].startswith("  consequence: The file cannot be made")
    assert lines[at + 2].startswith("  remedy: Make the folder")
    assert "no store yet: 1 problem" in ended.err
    (problem,) = [each for each in json.loads(txnstore("doctor", "--json").out) if each["grade"] == "problem"]
    assert problem["check"] == "folder"
    assert problem["remedy"].startswith("Make the folder")


def test_several_databases_are_looked_at_though_one_is_away_and_no_password_is_shown(txnstore, url, tmp_path):
    away, other = "postgresql://app:geheim@127.0.0.1:1/shop", f"sqlite:///{tmp_path}/store.db"
    for arguments in ((url, away, other), ("--url", f"{url},{away},{other}")):
        ended = txnstore("doctor", *arguments)
        assert ended.code == 1
        assert len(ended.err.splitlines()) == 3
        assert "(connection)" in ended.out
        answer = txnstore("doctor", "--json", *arguments).out
        assert {each["database"] for each in json.loads(answer)} >= {"postgresql://app:***@127.0.0.1:1/shop"}
        for secret in ("geheim", make_url(url).password):
            assert secret is None or secret not in ended.out + ended.err + answer


@pytest.mark.parametrize("wrong", ["", "mysql://app:geheim@db/shop", "postgresql://app:geheim@/"])
def test_what_is_no_url_is_refused_without_its_secrets(txnstore, wrong):
    ended = txnstore("doctor", wrong)
    assert ended.code in (1, 2)
    assert "geheim" not in ended.out + ended.err


def test_what_could_not_be_looked_at_is_said(txnstore, txnstore_postgres_server, txnstore_postgresql_url):
    role = "txnstore_doctor_stranger"
    txnstore_postgres_server.create_role(role, "geheim")
    try:
        parsed = make_url(txnstore_postgresql_url)._replace(username=role, password="geheim")
        ended = txnstore("doctor", parsed.render_as_string(hide_password=False))
        assert re.search("unknown: .*snapshots.* could not look: this role does not see", ended.out)
        assert "could not look" in ended.err
        assert "geheim" not in ended.out + ended.err
    finally:
        txnstore_postgres_server.drop_role(role)
