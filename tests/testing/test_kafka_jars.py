"""Kafka's jars: fetched once for several processes, checked, and refused with a reason."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.tools import kafka_jars
from tests.tools.kafka_jars import Jar, NoKafkaError, fetch_jars
from tests.tools.silent_port import silent_port

CONTENTS = {f"part{number}": b"jar %d" % number * 1_000 for number in range(4)}
JARS = [Jar("org.example", name, "1.0", hashlib.sha256(content).hexdigest()) for name, content in CONTENTS.items()]


class Repository(ThreadingHTTPServer):
    """Answers with the contents, unless it has something else to say of a jar."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.instead: dict[str, list] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/maven2"


class Handler(BaseHTTPRequestHandler):
    server: Repository

    def do_GET(self):
        name = self.path.split("/")[-3]
        self.server.asked.append(name)
        content = CONTENTS[name]
        instead = self.server.instead.get(name)
        answer = instead.pop(0) if instead else 200
        self.send_response(answer if isinstance(answer, int) else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if answer == "cut":
            self.wfile.write(content[:100])
        else:
            self.wfile.write(bytes(len(content)) if answer == "other" else content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def repository(monkeypatch):
    monkeypatch.setattr(kafka_jars, "listed_jars", lambda: JARS)
    monkeypatch.setattr(kafka_jars, "_PAUSE_FIRST_SECONDS", 0.01)
    with Repository() as server:
        monkeypatch.setenv(kafka_jars.REPOSITORY_VARIABLE, server.url)
        thread = threading.Thread(target=server.serve_forever, args=[0.02])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_of_several_at_once_one_fetches(repository, tmp_path):
    folder = tmp_path / "cache" / "kafka"
    with ThreadPoolExecutor(4) as pool:
        (paths, *others) = pool.map(lambda _: fetch_jars(folder), range(4))
    assert others == [paths] * 3
    assert [path.read_bytes() for path in paths] == list(CONTENTS.values())
    assert sorted(repository.asked) == sorted(CONTENTS)


def test_a_broken_jar_is_fetched_again(repository, tmp_path):
    fetch_jars(tmp_path)[2].write_bytes(b"half")
    fetch_jars(tmp_path)
    assert repository.asked.count("part2") == 2
    assert len(repository.asked) == 5


@pytest.mark.parametrize("answer", [429, 503, "cut"])
def test_a_busy_repository_is_asked_again(repository, tmp_path, answer):
    repository.instead["part3"] = [answer, answer]
    fetch_jars(tmp_path)
    assert repository.asked.count("part3") == 3


@pytest.mark.parametrize(
    ("answers", "said", "asked_count"),
    [
        ([404], "does not give part2-1.0.jar: HTTP 404; 3 of 4 jars are here", 1),
        ([429] * 9, "does not give part2-1.0.jar: HTTP 429; 3 of 4 jars are here", 4),
        (["other"], "part2-1.0.jar of Maven Central is not the one that is listed", 1),
    ],
)
def test_what_stays_wrong_is_said(repository, tmp_path, answers, said, asked_count):
    repository.instead["part2"] = answers
    with pytest.raises(NoKafkaError, match=said):
        fetch_jars(tmp_path)
    assert repository.asked.count("part2") == asked_count
    assert not list(tmp_path.glob("part2*"))


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "user:Secret1@127.0.0.1:{}"])
def test_a_repository_that_is_away_is_asked_once_and_not_named(repository, tmp_path, monkeypatch, address):
    pauses: list[float] = []
    monkeypatch.setattr("tests.tools.kafka_jars.sleep", pauses.append)
    with silent_port() as port:
        monkeypatch.setenv(kafka_jars.REPOSITORY_VARIABLE, f"http://{address.format(port)}")
        with pytest.raises(NoKafkaError, match="0 of 4 jars are here") as raised:
            fetch_jars(tmp_path)
    assert not pauses
    assert "Secret1" not in str(raised.value)
    assert "\n" not in str(raised.value)
