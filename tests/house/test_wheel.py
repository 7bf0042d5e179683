"""What users install: the package, its types and its migrations, and nothing of the checkout besides."""

from __future__ import annotations

import email
import subprocess
import sys
import zipfile

import pytest

from scripts.build_bulk import BUILT
from txnstore import bulk


@pytest.fixture(scope="module")
def wheel(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    built = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        yield archive


@pytest.fixture(scope="module")
def about(wheel):
    """The folder with the wheel's metadata."""
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return metadata.removesuffix("METADATA")


@pytest.fixture(scope="module")
def metadata(wheel, about):
    return email.message_from_bytes(wheel.read(f"{about}METADATA"))


def test_the_wheel_holds_every_file_of_the_package(root, wheel):
    package = {
        file.relative_to(root).as_posix()
        for file in (root / "txnstore").rglob("*")
        if file.is_file()
        and not {"__pycache__", "registration", "README.md"} & set(file.parts)
        # What is compiled from C is that of this Python, and its source stays in the checkout.
        and file.suffix not in {".c", ".h", ".so"}
    }
    assert "txnstore/py.typed" in package
    assert "txnstore/_bulk.pyi" in package
    assert package - set(wheel.namelist()) == set()


def test_the_wheel_holds_the_bulk_paths_in_c_of_this_python_where_it_has_them(wheel, about):
    compiled = [name for name in wheel.namelist() if name.endswith((".c", ".h", ".so"))]
    is_pure = "Root-Is-Purelib: true" in wheel.read(f"{about}WHEEL").decode()
    assert (compiled, is_pure) == (([f"txnstore/{BUILT}"], False) if bulk.IN_C else ([], True))


def test_the_wheel_holds_the_migrations(root, wheel):
    migrations = {
        f"txnstore/{file.relative_to(root).as_posix()}"
        for file in (root / "migrations").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert "txnstore/migrations/env.py" in migrations
    assert any(name.startswith("txnstore/migrations/versions/") for name in migrations)
    assert migrations - set(wheel.namelist()) == set()


def test_the_wheel_holds_one_module_beside_the_package_for_spark_to_find(wheel, about):
    elsewhere = [name for name in wheel.namelist() if not name.startswith(("txnstore/", about))]
    assert elsewhere == ["pyspark_txnstore.py"]
    assert "txnstore.spark.data_source" in wheel.read("pyspark_txnstore.py").decode()
    assert [name for name in wheel.namelist() if "/registration/" in name] == []


def test_the_wheel_holds_nothing_that_a_run_leaves_behind(wheel):
    assert [name for name in wheel.namelist() if "__pycache__" in name or "/tests/" in name] == []


def test_the_wheel_holds_no_readme_whose_links_would_lead_out_of_it(wheel):
    assert [name for name in wheel.namelist() if name.endswith("README.md")] == []


def test_the_wheel_says_what_it_is(wheel, about, metadata):
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra")) == {
        *("compression", "kafka", "metrics", "opentelemetry", "parquet", "spark", "spark-java", "testing")
    }
    assert f"{about}licenses/LICENSE" in wheel.namelist()


@pytest.mark.slow
def test_a_plain_install_needs_five_packages(metadata):
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert [line.split(">")[0] for line in required] == ["alembic", "psycopg[binary]", "rich", "sqlalchemy", "typer"]
