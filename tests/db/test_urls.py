"""Database URLs: understood, or refused in plain words that repeat nothing of them."""

from __future__ import annotations

import contextlib
import re
import traceback
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from psycopg.pq import Conninfo
from sqlalchemy.engine import make_url

from txnstore.db.backend import Limits
from txnstore.db.opening import open_store
from txnstore.db.url import DatabaseUrl, parse_url, secret_option_names
from txnstore.errors import InvalidUrl
from txnstore.testing.private_cluster import PrivateCluster

SECRET = "Hunter2SecretWord"
MALFORMED = [
    "",
    " ",
    SECRET,
    f"alice:{SECRET}",
    f"alice:{SECRET}@host/shop",
    f"://alice:{SECRET}@host/shop",
    f"//alice:{SECRET}@host/shop",
    f"postgresql:/alice:{SECRET}@host/shop",
    f"postgresql:alice:{SECRET}@host/shop",
    f"postgresql//alice:{SECRET}@host/shop",
    f"postgresql ://alice:{SECRET}@host/shop",
    f"postgresql:///alice:{SECRET}@host/shop",
    f"postgresql:////alice:{SECRET}@host/shop",
    f"postgresql:// alice@{SECRET}@host/shop",
    f"postgresql://alice:{SECRET}@more@host/shop",
    f"postgresql://alice:x@{SECRET}@host/shop",
    f"postgresql://alice@{SECRET}@host/shop",
    f"postgresql://@{SECRET}@/shop",
    f"postgresql://alice:{SECRET}@host",
    f"postgresql://alice:{SECRET}@host/",
    f"postgresql://alice:{SECRET}@host?sslmode=require",
    f"postgresql://alice:{SECRET}@host:port/shop",
    f"postgresql://alice:{SECRET}@host:54 32/shop",
    f"postgresql://alice:{SECRET}@host:5432.0/shop",
    f"postgresql://alice:{SECRET}@host:0/shop",
    f"postgresql://alice:{SECRET}@host:65536/shop",
    f"postgresql://alice:{SECRET}@host:-5432/shop",
    f"postgresql://alice:{SECRET}@host:{'9' * 5000}/shop",
    f"postgresql://alice:{SECRET}@one:1,two:2/shop",
    f"postgresql://alice:{SECRET}@[::1/shop",
    f"postgresql://alice:{SECRET}@[::1]5432/shop",
    f"postgresql://alice:{SECRET}@host/shop/more",
    f"postgresql://alice:{SECRET}@host/shop%2Fmore",
    f"postgresql://alice:{SECRET}@host/sh%00op",
    f"postgresql://alice:{SECRET}@host/sh%0Aop",
    f"postgresql://al%00ice:{SECRET}@host/shop",
    f"postgresql://al%1B[31mice:{SECRET}@host/shop",
    f"postgresql://alice:{SECRET}%00@host/shop",
    f"postgresql://alice:{SECRET}\0@host/shop",
    f"postgresql://alice:{SECRET}\n@host/shop",
    f"postgresql://alice:{SECRET}\ud800@host/shop",
    f"postgresql://alice:{SECRET}@host/shop?sslmod=require",
    f"postgresql://alice:{SECRET}@host/shop?{SECRET}=1",
    f"postgresql://alice:{SECRET}@host/shop?autocommit=1",
    f"postgresql://alice:{SECRET}@host/shop?prepare_threshold=1",
    f"postgresql://alice:{SECRET}@host/shop?=1",
    f"postgresql://alice:{SECRET}@host/shop?sslmode=require&sslmode=disable",
    f"postgresql://alice@host/shop?password={SECRET}&password={SECRET}",
    f"postgresql://alice:x@host/shop?password={SECRET}",
    f"postgresql://alice:{SECRET}@host/shop?user=bob",
    f"postgresql://alice:{SECRET}@host/shop?dbname=other",
    f"postgresql://alice:{SECRET}@host/shop?host=a%0Ab",
    f"postgresql://alice:{SECRET}@%2Frun%0A/shop",
    f"postgresql://alice:{SECRET}@%2Frun/shop?host=/run",
    f"postgresql+asyncpg://alice:{SECRET}@host/shop",
    f"postgresql+psycopg2://alice:{SECRET}@host/shop",
    f"POSTGRESQL://alice:{SECRET}@host/shop",
    f"mysql://alice:{SECRET}@host/shop",
    f"kafka://alice:{SECRET}@host/shop",
    f"sqlite://alice:{SECRET}@host/shop.db",
    f"sqlite://{SECRET}.db",
    f"sqlite:shop.db?{SECRET}",
    f"sqlite:///shop.db?password={SECRET}",
    f"sqlite:///file:shop.db?password={SECRET}",
    f"sqlite+aiosqlite:///{SECRET}.db",
    f"host=localhost password={SECRET} dbname=shop",
    f"jdbc:postgresql://host/shop?password={SECRET}",
]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_url_is_refused_before_anything_happens_and_not_repeated(text, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level("DEBUG")
    with pytest.raises(InvalidUrl) as caught:
        open_store(text)
    told = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + caplog.text
    assert "\n" not in str(caught.value)
    # pytest's own frames do not count: format_exception shows lines of code, which hold no URL.
    assert SECRET not in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow_but_first
@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
@pytest.mark.parametrize("hosts", ["one:1,two:2", "one:1,two", "one:1,10.0.0.1:2,three.example:3"])
@pytest.mark.parametrize("user", ["", "alice@", f"alice:{SECRET}@", f"alice:a,{SECRET}@"])
@pytest.mark.parametrize("rest", ["/shop", "/shop?sslmode=require", "?dbname=shop"])
def test_a_url_with_several_ports_as_libpq_has_it_is_told_how_to_write_it_here(scheme, hosts, user, rest):
    with pytest.raises(InvalidUrl, match=re.escape("/database?host=HOST1:PORT1&host=HOST2:PORT2")) as caught:
        parse_url(f"{scheme}://{user}{hosts}{rest}")
    assert SECRET not in str(caught.value)
    first, *others = hosts.split(",")
    parse_url(f"{scheme}://{user}/shop?host={first}" + "".join(f"&host={other}" for other in others))


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql://alice:1,{SECRET}@host:port/shop",
        f"postgresql://alice:{SECRET}@host:port,two/shop",
        f"sqlite://{SECRET}:1,two:2/shop",
    ],
)
def test_another_url_that_cannot_be_understood_is_not_taken_for_several_hosts(text):
    with pytest.raises(InvalidUrl, match=r"cannot be understood|three slashes"):
        parse_url(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            f"postgresql+asyncpg://alice:{SECRET}@host/shop",
            r"leave \+asyncpg out of the URL, or make an Outbox from",
        ),
        (f"postgresql+psycopg2://alice:{SECRET}@host/shop", r"leave \+psycopg2 out of the URL"),
        ("sqlite+aiosqlite:///orders.db", r"leave \+aiosqlite out of the URL"),
        (f"postgresql+{SECRET}://host/shop", "no support for this kind of database"),
        ("postgresql://host/shop?sslmod=require", r"client library does not know; did you mean sslmode\?"),
        (f"postgresql://host/shop?{SECRET}=require", r"client library does not know$"),
        ("localhost:9092", "not the address of a Kafka broker"),
        ("one,two:9092", "not the address of a Kafka broker"),
        ("/tmp/orders.db", "not a path; sqlite:/// before it"),
        ("data/orders", "not a path; sqlite:/// before it"),
        ("orders.db", "not a path; sqlite:/// before it"),
        ("C:\\orders.db", "not a path; sqlite:/// before it"),
        ("['sqlite:///orders.db']", "one text, with commas between them"),
        ("one two", "cannot be understood"),
    ],
)
def test_what_is_often_taken_for_a_url_is_told_as_such(text, said):
    with pytest.raises(InvalidUrl, match=said):
        parse_url(text)


@pytest.mark.parametrize("text", ["sqlite:///", "sqlite+pysqlite:///"])
def test_a_url_whose_path_is_empty_is_not_taken_for_a_store_in_memory(text):
    """As of f"sqlite:///{unset}": what is written there nobody else would ever read."""
    with pytest.raises(InvalidUrl, match=r"names no file.*write sqlite:///path/to/file\.db, or sqlite:// for"):
        parse_url(text)
    for more in ("?", "?x", "?x=1", "#"):
        with contextlib.suppress(InvalidUrl):
            assert not parse_url(text + more).is_in_memory
    assert parse_url(text[:-1]).is_in_memory
    assert parse_url(f"{text}:memory:").is_in_memory


@pytest.mark.parametrize("text", ["SQLITE:///", "Sqlite://", "sqlite:///\n"])
def test_a_url_in_other_letters_is_none_in_memory_either(text):
    with pytest.raises(InvalidUrl):
        parse_url(text)


@pytest.mark.parametrize(
    "thing", [None, 7, True, b"sqlite:///x.db", b"sqlite:///", ["sqlite:///x.db"], object(), make_url("sqlite://")]
)
def test_what_is_no_text_is_refused(thing):
    with pytest.raises(InvalidUrl, match=f"not {type(thing).__name__}"):
        open_store(thing)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("sslmode=bogus", "option"),
        ("port=abc", "option"),
        ("port=99999", "option"),
        ("connect_timeout=soon", "option"),
        ("target_session_attrs=best", "option"),
        ("channel_binding=maybe", "option"),
        ("gssencmode=maybe", "option"),
        ("service=no-such-service", "option"),
        ("sslmode=verify-full&sslrootcert=/no/such/file", "option|TLS"),
        ("host=127.0.0.1:1&host=127.0.0.1:2&port=3&port=4&port=5", "do not fit"),
        ("load_balance_hosts=perhaps", "option"),
    ],
)
def test_an_option_with_an_impossible_value_is_refused_and_not_tried_again(options, told, txnstore_postgres_server):
    base = txnstore_postgres_server.url("postgres")
    with pytest.raises(InvalidUrl, match=told) as caught:
        open_store(f"{base}?{options}")
    assert str(make_url(base).password) not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://alice:pa%40ss%2Fw%3Aord@host:5433/shop", "postgresql://alice:***@host:5433/shop"),
        ("postgres://alice@host/shop", "postgres://alice@host/shop"),
        ("postgresql+psycopg://alice:x@[::1]:5432/shop", "postgresql+psycopg://alice:***@[::1]:5432/shop"),
        ("postgresql://host/shop?user=alice&password=x", "postgresql://alice:***@host/shop"),
        ("postgresql:///shop?host=/run/postgresql", "postgresql:///shop"),
        ("postgresql://alice:x@%2Frun%2Fpostgresql:5433/shop", "postgresql://alice:***@/shop"),
        ("postgresql://alice:x@/shop?host=one:1&host=two:2", "postgresql://alice:***@/shop"),
        (
            "postgresql://alice:x@one,two:5432/shop?target_session_attrs=primary",
            "postgresql://alice:***@one,two:5432/shop",
        ),
        ("postgresql://host?dbname=shop", "postgresql://host/shop"),
        ("postgresql://alice:x@host/shop?sslmode=verify-full&sslpassword=y", "postgresql://alice:***@host/shop"),
        ("sqlite:////srv/shop.db", "sqlite:////srv/shop.db"),
        ("sqlite+pysqlite:///shop.db", "sqlite+pysqlite:///shop.db"),
        ("sqlite:///:memory:", "sqlite:///:memory:"),
        ("sqlite://", "sqlite://"),
    ],
)
def test_a_url_is_understood_and_shown_without_its_secrets(text, shown):
    url = parse_url(text)
    assert str(url) == shown
    assert repr(url) == f"DatabaseUrl({shown!r})"
    assert "***" in repr(url.url) or "x@" not in text


def test_parts_are_decoded():
    url = parse_url("postgresql://al%40ice:p%40s%25s%2F%3A%3F%23w%20%C3%A9@host/sh%20op").url
    assert (url.username, url.password, url.database) == ("al@ice", "p@s%s/:?#w é", "sh op")


def test_secrets_among_the_options_are_in_no_text_of_the_url():
    url = parse_url("postgresql://alice@host/shop?password=SecretOne&sslpassword=SecretTwo")
    texts = f"{url} {url!r} {url.url} {url.url!r}"
    assert "Secret" not in texts
    assert url.secret_options == {"sslpassword": "SecretTwo"}
    assert url.url.password == "SecretOne"


def test_every_option_that_libpq_asks_to_hide_is_in_no_text_of_the_url():
    known = {option.keyword.decode(): option.dispchar for option in Conninfo.get_defaults()}
    hidden = {name for name, shown_as in known.items() if shown_as == b"*"}
    # Not those, for programs do not show them at all; but they are as good as the password.
    hidden |= known.keys() & {"scram_client_key", "scram_server_key"}
    assert "sslpassword" in hidden
    for name in hidden - {"password"}:
        url = parse_url(f"postgresql://alice@host/shop?{name}=Secret")
        assert "Secret" not in f"{url} {url!r} {url.url} {url.url!r}"
        assert url.secret_options == {name: "Secret"}


def test_an_option_is_known_to_be_secret_whichever_libpq_this_is(monkeypatch):
    newer = [SimpleNamespace(keyword=b"new_secret", dispchar=b"*"), SimpleNamespace(keyword=b"new", dispchar=b"")]
    for found, extra in (([], set()), (newer, {"new_secret"})):
        monkeypatch.setattr(Conninfo, "get_defaults", lambda found=found: found)
        names = secret_option_names()
        assert {"oauth_client_secret", "password", "sslpassword"} | extra <= names
        assert "new" not in names


@given(st.text(max_size=60))
@example("postgresql://[::1]:99999/x")
def test_any_text_is_a_url_or_refused(text):
    with contextlib.suppress(InvalidUrl):
        assert isinstance(parse_url(text), DatabaseUrl)


@given(
    prefix=st.sampled_from(["postgresql://", "postgresql:///", "sqlite:///", "postgresql:"]), rest=st.text(max_size=40)
)
def test_any_text_behind_a_known_beginning_is_a_url_or_refused(prefix, rest):
    with contextlib.suppress(InvalidUrl):
        assert isinstance(parse_url(prefix + rest), DatabaseUrl)


PARTS = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12)


@given(
    user=PARTS,
    password=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=6),
    name=PARTS,
)
def test_whatever_is_percent_encoded_comes_back_and_is_not_shown(user, password, name):
    assume(not set(name) & set("@/"))
    url = parse_url(f"postgresql://{quote(user, safe='')}:{quote(password, safe='')}@host/{quote(name, safe='')}")
    assert (url.url.username, url.url.password, url.url.database) == (user, password, name)
    assert str(url).startswith("postgresql://")
    assert ":***@host/" in str(url)


@pytest.mark.slow
def test_a_password_of_any_characters_opens_the_store(
    txnstore_postgres_server, new_database, new_role, granted, client_path
):
    password = "p@ss/w:o?r#d %41\\ '\" é"
    name, role = new_database(), new_role()
    literal = password.replace("'", "''")
    granted(name, role, f"ALTER ROLE {{role}} PASSWORD '{literal}'", f"GRANT CREATE ON DATABASE {name} TO {{role}}")
    with open_store(txnstore_postgres_server.url(name, role, password)) as store:
        client_path(store)


# The second is how libpq writes it, and who hands out URLs for it.
@pytest.mark.slow
@pytest.mark.parametrize("form", ["@/{name}?host={folder}&port={port}", "@{folder}:{port}/{name}"])
def test_a_unix_socket_is_reached_by_its_folder(txnstore_postgres_server, new_database, client_path, form):
    server = txnstore_postgres_server
    if not isinstance(server, PrivateCluster):
        pytest.skip("needs a server whose Unix socket is on this machine")
    place = form.format(name=new_database(), folder=quote(str(server.folder), safe=""), port=server.port)
    with open_store(f"postgresql://postgres{place}") as store:
        client_path(store)
        waiter = store.waiter()
        client_path(store, "more")
        assert waiter.wait(60_000)
        waiter.close()


@pytest.mark.slow
def test_the_second_of_several_hosts_answers_for_the_first(txnstore_postgres_server, new_database, client_path):
    parsed = make_url(txnstore_postgres_server.url(new_database()))
    host = f"{parsed.host}:{parsed.port}"
    url = (
        parsed._replace(host=None, port=None)
        .set(query={"host": ["127.0.0.1:1", host]})
        .render_as_string(hide_password=False)
    )
    with open_store(url, limits=Limits(retry_timeout_ms=2000)) as store:
        client_path(store)
