"""Tests of PostgreSQL in a container; they need an engine that has the image."""

from __future__ import annotations

import os

import psycopg
import pytest

from txnstore.testing.containers import ContainerServer, why_no_container
from txnstore.testing.postgres_server import connection_string

IMAGE = os.environ.get("TXNSTORE_TEST_POSTGRES_IMAGE", "postgres:18")


@pytest.fixture(scope="module")
def cluster():
    why_not = why_no_container(IMAGE)
    if why_not is not None:
        pytest.skip(why_not)
    with ContainerServer(IMAGE, fsync=False, settings={"statement_timeout": "50s"}) as cluster:
        yield cluster


def test_without_an_engine_the_reason_is_told_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-engine.sock")
    assert why_no_container(IMAGE) == "no container engine answers"


@pytest.mark.testcontainers
def test_an_image_that_is_not_there_is_not_pulled(cluster):
    image = "txnstore-test-no-such-image:0"
    assert why_no_container(image) == f"the container engine does not have the image {image}"


@pytest.mark.testcontainers
def test_a_container_takes_settings_and_keeps_prepared_transactions(cluster):
    assert cluster.keeps_prepared_transactions
    with cluster.connect() as connection:
        assert connection.execute("SHOW statement_timeout").fetchone() == ("50s",)
        assert connection.execute("SHOW fsync").fetchone() == ("off",)


@pytest.mark.testcontainers
def test_a_prepared_transaction_survives_the_kill_of_its_container(cluster):
    cluster.create_database("shop")
    with cluster.connect("shop") as connection:
        connection.execute("CREATE TABLE orders (name text)")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO orders VALUES ('prepared')")
        connection.execute("PREPARE TRANSACTION 'a-branch'")
    cluster.kill()
    with pytest.raises(psycopg.OperationalError):
        cluster.connect("shop")
    cluster.start()
    with cluster.connect("shop") as connection:
        connection.execute("COMMIT PREPARED 'a-branch'")
        assert connection.execute("SELECT name FROM orders").fetchall() == [("prepared",)]
    cluster.drop_database("shop")


@pytest.mark.testcontainers
def test_a_stopped_container_comes_back(cluster):
    cluster.stop()
    cluster.start()
    assert cluster.version >= 140_000


@pytest.mark.testcontainers
def test_a_role_of_a_container_needs_its_password(cluster):
    cluster.create_role("clerk", "pass word/@:")
    url = cluster.url("postgres", "clerk", "pass word/@:")
    with psycopg.connect(connection_string(url)) as connection:
        assert connection.execute("SELECT current_user").fetchone() == ("clerk",)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(connection_string(cluster.url("postgres", "clerk", "wrong")))
    cluster.drop_role("clerk")
