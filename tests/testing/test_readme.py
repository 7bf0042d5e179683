"""The READMEs' examples for testers pass, on both databases, as files of a tests' folder of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.tools.readmes import blocks_run_by

FILE = re.compile(r"^# (\w+\.py)\n(.*?)(?=^# \w+\.py$|\Z)", re.DOTALL | re.MULTILINE)
EXAMPLES = [dict(FILE.findall(block.text)) for block in blocks_run_by(__file__)]


@pytest.mark.slow
@pytest.mark.parametrize("files", EXAMPLES, ids=max)
def test_the_example_passes_on_both_databases(tmp_path, txnstore_postgres_server, files):
    assert len(files) == 2
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    server = txnstore_postgres_server.url(txnstore_postgres_server.maintenance_database)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "."],
        cwd=tmp_path,
        env=os.environ | {"TXNSTORE_TEST_POSTGRES_URL": server},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
