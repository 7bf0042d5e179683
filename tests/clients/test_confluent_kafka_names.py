"""txnstore under the name of confluent_kafka: in processes of their own, for what was imported stays imported."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import txnstore

CHECKOUT = Path(txnstore.__file__).resolve().parents[1]
INSTALL = "import txnstore; txnstore.install_as_confluent_kafka()\n"


def run(program, *paths):
    """Run a program, with these folders before all others on its path; return what it printed."""
    code = f"import sys; sys.path[:0] = {[str(path) for path in (*paths, CHECKOUT)]}\n{program}"
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture
def installed(tmp_path):
    """A folder with a confluent_kafka as it is installed, which says so when its own parts are imported."""
    package = tmp_path / "confluent_kafka"
    registry = package / "schema_registry"
    registry.mkdir(parents=True)
    (package / "__init__.py").write_text("print('REAL'); from .cimpl import Producer")
    (package / "cimpl.py").write_text("raise ImportError('the C extension was loaded')")
    (package / "error.py").write_text("raise ImportError('not ours')")
    (package / "_types.py").write_text("from .cimpl import KafkaError\nNAME = 'types'")
    (registry / "__init__.py").write_text(
        "from ..serialization import Serializer, SerializationContext, SerializerBuilder\n"
        "from confluent_kafka.error import SerializationError\n"
        "from confluent_kafka._types import NAME\n"
        "class RegistrySerializer(Serializer):\n"
        "    def __call__(self, obj, ctx=None):\n"
        "        return f'{NAME} {obj}'.encode()\n"
    )
    return tmp_path


@pytest.mark.slow
def test_every_module_is_found_under_the_other_name():
    printed = run(
        INSTALL + "import confluent_kafka, confluent_kafka.admin, confluent_kafka.aio, confluent_kafka.cimpl\n"
        "from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition\n"
        "from confluent_kafka.admin import AdminClient, NewTopic\n"
        "from confluent_kafka.cimpl import KafkaException\n"
        "from confluent_kafka.error import KeySerializationError\n"
        "from confluent_kafka.serialization import SerializerBuilder, StringSerializer\n"
        "from confluent_kafka.serializing_producer import SerializingProducer\n"
        "from confluent_kafka.deserializing_consumer import DeserializingConsumer\n"
        "from confluent_kafka._model import IsolationLevel\n"
        "from confluent_kafka.admin._metadata import TopicMetadata\n"
        "from confluent_kafka.admin._config import ConfigEntry\n"
        "import confluent_kafka.aio.producer\n"
        "assert TopicMetadata is txnstore.admin.TopicMetadata and ConfigEntry is confluent_kafka.admin.ConfigEntry\n"
        "assert confluent_kafka.aio.producer.AIOProducer is txnstore.aio.AIOProducer\n"
        "assert Producer is txnstore.Producer and KafkaException is txnstore.KafkaException\n"
        "assert confluent_kafka.admin.AdminClient is txnstore.admin.AdminClient is AdminClient\n"
        "assert set(txnstore.__all__) <= set(dir(confluent_kafka))\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('confluent_kafka') is not None\n"
        "names = {}; exec('from confluent_kafka import *', names); assert names['Consumer'] is Consumer\n"
        "print(confluent_kafka.version(), confluent_kafka.__version__, confluent_kafka.libversion()[0])\n"
        "try: confluent_kafka.ShareConsumer\n"
        "except AttributeError as error: print(error)\n"
    )
    assert printed == "2.16.1 2.16.1 2.16.0\nmodule 'confluent_kafka' has no attribute 'ShareConsumer'\n"


@pytest.mark.slow
def test_a_second_call_changes_nothing():
    printed = run(
        INSTALL + "import confluent_kafka\n"
        "txnstore.install_as_confluent_kafka()\n"
        "import sys; print(sys.modules['confluent_kafka'] is confluent_kafka)"
    )
    assert printed == "True\n"


@pytest.mark.slow
def test_an_installed_ones_pure_python_comes_along_and_nothing_else_of_it(installed):
    printed = run(
        INSTALL + "from confluent_kafka.schema_registry import RegistrySerializer\n"
        "from confluent_kafka.serialization import Serializer\n"
        "assert issubclass(RegistrySerializer, txnstore.serialization.Serializer)\n"
        "print(RegistrySerializer()('x'))",
        installed,
    )
    assert printed == "b'types x'\n"


@pytest.mark.slow
def test_without_an_installed_one_there_is_no_schema_registry(tmp_path):
    printed = run(
        "import importlib.machinery as machinery\n"
        "find = machinery.PathFinder.find_spec\n"
        "none = lambda name, *rest: None if name == 'confluent_kafka' else find(name, *rest)\n"
        "machinery.PathFinder.find_spec = none\n" + INSTALL + "try: import confluent_kafka.schema_registry\n"
        "except ModuleNotFoundError as error: print(error)\n"
    )
    assert printed == "No module named 'confluent_kafka.schema_registry'\n"


@pytest.mark.parametrize("imported", ["confluent_kafka", "confluent_kafka.schema_registry"])
def test_where_the_real_one_was_imported_already_it_is_refused(installed, imported):
    (installed / "confluent_kafka" / "__init__.py").write_text("")
    (installed / "confluent_kafka" / "schema_registry" / "__init__.py").write_text("")
    printed = run(
        f"import {imported}, sys\nbefore = sys.modules['confluent_kafka']\nimport txnstore\n"
        "try: txnstore.install_as_confluent_kafka()\n"
        "except RuntimeError as error: print(error)\n"
        "assert sys.modules['confluent_kafka'] is before and 'confluent_kafka.admin' not in sys.modules",
        installed,
    )
    assert printed.startswith("confluent_kafka has been imported already: call txnstore.install_as_confluent_kafka()")


@pytest.mark.slow
def test_the_module_itself_under_that_name_was_not_the_real_one():
    """What programs did before there was this function."""
    run(
        "import sys, txnstore; sys.modules['confluent_kafka'] = txnstore\n"
        "txnstore.install_as_confluent_kafka()\n"
        "from confluent_kafka.admin import AdminClient"
    )


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("confluent_kafka") is None, reason="confluent-kafka is not installed")
def test_the_parts_of_the_real_one_work():
    printed = run(
        INSTALL + "import sys\n"
        "from confluent_kafka import _types, _serde_builder\n"
        "print(any(name.endswith('cimpl') and 'site-packages/confluent' in str(module)"
        " for name, module in sys.modules.items()))"
    )
    assert printed == "False\n"


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("confluent_kafka", "httpx", "authlib", "cachetools")),
    reason="confluent-kafka is not installed with its schema registry",
)
def test_the_schema_registry_of_the_real_one_works():
    run(INSTALL + "from confluent_kafka.schema_registry import SchemaRegistryClient, Schema; Schema('{}', 'JSON')")
