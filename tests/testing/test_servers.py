"""Tests of where the tests' PostgreSQL comes from, and of what is said about it."""

from __future__ import annotations

import errno
import os
import pwd

import pytest

from txnstore.testing import private_cluster, servers
from txnstore.testing.postgres_server import ExistingServer, ServerCannotBeKilledError
from txnstore.testing.private_cluster import (
    NoServerProgramsError,
    PrivateCluster,
    ServerFolder,
    ServerUser,
    find_programs,
    version_of,
)
from txnstore.testing.servers import NoServerError, ServerSource, choose_server, told_programs

URL = "postgresql+psycopg://tester:secret@db.invalid:6432/maintenance?application_name=suite"


@pytest.fixture(params=["no engine", "engine"])
def engine(request, monkeypatch):
    """Whether a container engine would answer, without asking one."""
    why_not = None if request.param == "engine" else "no container engine answers"
    monkeypatch.setattr(servers, "why_no_container", lambda _: why_not)
    return request.param == "engine"


def test_a_url_comes_first(engine):
    choice = choose_server({"TXNSTORE_TEST_POSTGRES_URL": URL})
    assert choice.source is ServerSource.URL
    assert isinstance(choice.start(), ExistingServer)


def test_a_container_comes_next_and_a_private_cluster_last(engine):
    choice = choose_server({})
    assert choice.source is (ServerSource.TESTCONTAINERS if engine else ServerSource.PRIVATE)


@pytest.mark.slow
def test_falling_back_says_why_in_one_line(monkeypatch):
    monkeypatch.setattr(servers, "why_no_container", lambda image: f"the container engine does not have {image}")
    choice = choose_server({"TXNSTORE_TEST_POSTGRES_IMAGE": "mine:1"})
    assert choice.source is ServerSource.PRIVATE
    expected = "no TXNSTORE_TEST_POSTGRES_URL, and no testcontainers: the container engine does not have mine:1"
    assert choice.reason == expected
    with choice.start(fsync=False) as server:
        assert isinstance(server, PrivateCluster)
        assert server.description == f"a private cluster of PostgreSQL 18 on port {server.port} ({expected})"


@pytest.mark.parametrize("source", list(ServerSource))
def test_one_source_can_be_forced(source, monkeypatch):
    monkeypatch.setattr(servers, "why_no_container", lambda _: None)
    environment = {"TXNSTORE_TEST_POSTGRES": source.value, "TXNSTORE_TEST_POSTGRES_URL": URL}
    assert choose_server(environment).source is source


def test_programs_that_are_told_come_before_a_container_and_behind_a_url(engine, tmp_path):
    programs = find_programs(16)
    told = {"TXNSTORE_TEST_POSTGRES_PROGRAMS": str(programs)}
    choice = choose_server(told)
    assert (choice.source, choice.programs) == (ServerSource.PRIVATE, programs)
    assert choice.reason == "TXNSTORE_TEST_POSTGRES_PROGRAMS is set"
    assert choose_server({**told, "TXNSTORE_TEST_POSTGRES": "private"}).programs == programs
    assert choose_server({**told, "TXNSTORE_TEST_POSTGRES_URL": URL}).source is ServerSource.URL
    assert told_programs(told) == programs
    assert told_programs({}) is None
    with pytest.raises(NoServerError, match="holds no bin/initdb"):
        choose_server({"TXNSTORE_TEST_POSTGRES_PROGRAMS": str(tmp_path)})


@pytest.mark.slow
def test_a_cluster_of_other_programs_is_of_their_version():
    with choose_server({"TXNSTORE_TEST_POSTGRES_PROGRAMS": str(find_programs(16))}).start(fsync=False) as server:
        assert server.version // 10_000 == 16
        assert "a private cluster of PostgreSQL 16 on port" in server.description


def test_programs_that_do_not_run_are_told(tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("initdb", "postgres"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
    with pytest.raises(NoServerProgramsError, match="does not run"):
        version_of(tmp_path)
    (tmp_path / "bin" / "postgres").chmod(0o755)
    with pytest.raises(NoServerProgramsError, match="does not say its version"):
        version_of(tmp_path)


def test_a_forced_source_that_does_not_work_is_an_error(monkeypatch):
    monkeypatch.setattr(servers, "why_no_container", lambda _: "no container engine answers")
    with pytest.raises(NoServerError, match="testcontainers, but no container engine answers"):
        choose_server({"TXNSTORE_TEST_POSTGRES": "testcontainers"})
    with pytest.raises(NoServerError, match="needs TXNSTORE_TEST_POSTGRES_URL"):
        choose_server({"TXNSTORE_TEST_POSTGRES": "url"})
    with pytest.raises(NoServerError, match="'docker' is not one of url, testcontainers, private, none"):
        choose_server({"TXNSTORE_TEST_POSTGRES": "docker"})


def test_a_machine_without_any_postgresql_is_told_what_was_looked_for(monkeypatch):
    def find_nothing():
        raise NoServerProgramsError("PostgreSQL 18 is not installed")

    monkeypatch.setattr(servers, "why_no_container", lambda _: "testcontainers is not installed")
    monkeypatch.setattr(servers, "find_programs", find_nothing)
    with pytest.raises(NoServerError, match="testcontainers is not installed; PostgreSQL 18 is not installed"):
        choose_server({})


def test_no_password_is_shown():
    choice = choose_server({"TXNSTORE_TEST_POSTGRES_URL": URL})
    assert "secret" not in repr(choice) + choice.start().description
    with pytest.raises(ValueError, match="not the URL of a PostgreSQL server") as failure:
        ExistingServer("sqlite://me:secret@/file")
    assert "secret" not in str(failure.value)


def test_an_existing_server_keeps_the_rest_of_its_url():
    server = ExistingServer(URL)
    assert server.maintenance_database == "maintenance"
    assert server.url("shop") == "postgresql+psycopg://tester:secret@db.invalid:6432/shop?application_name=suite"
    other = "postgresql+psycopg://clerk:pw@db.invalid:6432/shop?application_name=suite"
    assert server.url("shop", "clerk", "pw") == other


@pytest.mark.slow
def test_an_existing_server_makes_databases_and_is_not_killed():
    with PrivateCluster(fsync=False) as cluster:
        with ExistingServer(cluster.url("postgres")) as server:
            server.create_database("shop")
            assert server.version == cluster.version
            assert not server.can_be_killed
            for forbidden in (server.kill, server.stop, server.start):
                with pytest.raises(ServerCannotBeKilledError, match="PostgreSQL at"):
                    forbidden()
        with cluster.connect("shop") as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize("user_id", [0, 12_345])
def test_a_user_whom_the_machine_does_not_know_is_told_what_to_do(monkeypatch, user_id):
    def unknown(_):
        raise KeyError

    monkeypatch.setattr(os, "geteuid", lambda: user_id)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(pwd, "getpwnam", unknown)
    with pytest.raises(NoServerError, match=r"in /etc/passwd; name a server that runs already instead"):
        choose_server({"TXNSTORE_TEST_POSTGRES": "private"})


def test_a_folder_that_cannot_be_given_away_is_told_and_removed(monkeypatch, tmp_path):
    def refuse(*_):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "chown", refuse)
    monkeypatch.setattr(private_cluster, "_TEMPORARY_FOLDER", tmp_path)
    with pytest.raises(NoServerProgramsError, match=r"without a range of user ids"):
        ServerFolder(ServerUser(12_345, 12_345))
    assert list(tmp_path.iterdir()) == []
