"""The public names and parameters are those of confluent-kafka 2.16.1, as `confluent_surface.txt` lists them.

A class of the list begins a line, with the file it is in; below it stand its methods with their parameters, its
overloads one by one, and the names of its attributes.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import txnstore

CHECKOUT = Path(__file__).resolve().parents[2]
REFERENCE = Path(os.environ.get("TXNSTORE_REFERENCE", CHECKOUT.parent / "shared" / "reference"))
SURFACE = Path(__file__).with_name("confluent_surface.txt")
#: What the list was made from; not every machine has it.
FULL_SURFACE = REFERENCE / "confluent-kafka-2.16.1-surface.json"

#: Where our classes are; the key of a class in the list is its file and its name.
MODULES = {
    "cimpl.pyi": "txnstore.cimpl",
    "__init__.py": "txnstore",
    "error.py": "txnstore.error",
    "serializing_producer.py": "txnstore",
    "deserializing_consumer.py": "txnstore",
    "_model/__init__.py": "txnstore",
    "admin/": "txnstore.admin",
    "aio/": "txnstore.aio",
    "serialization/__init__.py": "txnstore.serialization",
}

#: Of the classes of `cimpl`, those that users import from elsewhere.
ELSEWHERE = {"NewTopic": "txnstore.admin", "NewPartitions": "txnstore.admin"}

SHARE_GROUPS = "share groups (KIP-932) are not there yet"
LEFT_OUT = {
    "cimpl.pyi:ShareConsumer": SHARE_GROUPS,
    "cimpl.pyi:IllegalStateException": SHARE_GROUPS,
    "cimpl.pyi:ConcurrentModificationException": SHARE_GROUPS,
    "_model/__init__.py:AcknowledgeType": SHARE_GROUPS,
    "_model/__init__.py:Messages": SHARE_GROUPS,
    "cimpl.pyi:_AdminClientImpl": "it is the inside of AdminClient",
    "error.py:_KafkaClientError": "it is the inside of the errors",
}

#: Methods of which we follow what confluent-kafka does and not what its list says, or that we leave out.
OTHERWISE = {
    "cimpl.pyi:Consumer.commit": "the list has overloads by keyword; at run time the arguments are positional, too",
    "cimpl.pyi:Producer.__init__": "the list has overloads; one dictionary, keywords, or both",
    "cimpl.pyi:Consumer.__init__": "(as above)",
    "cimpl.pyi:KafkaError.__init__": "the list calls the first parameter code; at run time it is error alone",
}

#: What confluent-kafka has at run time and its list has not.
FORGOTTEN = {
    "txnstore:Message": ["set_topic"],
    "txnstore:KafkaError": ["TRANSACTIONAL_ID_NOT_FOUND"],
}

#: `confluent_kafka.__all__`, without what is left out and with ThrottleEvent, which it forgets.
ALL_NAMES = (
    "Consumer",
    "KafkaError",
    "KafkaException",
    "libversion",
    "version",
    "murmur2",
    "consistent",
    "fnv1a",
    "Message",
    "OFFSET_BEGINNING",
    "OFFSET_END",
    "OFFSET_INVALID",
    "OFFSET_STORED",
    "Producer",
    "DeserializingConsumer",
    "SerializingProducer",
    "TIMESTAMP_CREATE_TIME",
    "TIMESTAMP_LOG_APPEND_TIME",
    "TIMESTAMP_NOT_AVAILABLE",
    "TopicPartition",
    "Node",
    "ConsumerGroupTopicPartitions",
    "ConsumerGroupState",
    "ConsumerGroupType",
    "Uuid",
    "IsolationLevel",
    "TopicCollection",
    "TopicPartitionInfo",
    "ElectionType",
    "ThrottleEvent",
    "admin",
    "aio",
)
#: What confluent-kafka does not have: KIP-939, the outbox, and standing in for it.
OWN_NAMES = {"Outbox", "Outcome", "PreparedTxnState", "install_as_confluent_kafka", "outcome"}

CIMPL_CONSTANTS = {
    "OFFSET_BEGINNING": -2,
    "OFFSET_END": -1,
    "OFFSET_STORED": -1000,
    "OFFSET_INVALID": -1001,
    "TIMESTAMP_NOT_AVAILABLE": 0,
    "TIMESTAMP_CREATE_TIME": 1,
    "TIMESTAMP_LOG_APPEND_TIME": 2,
    "OFFSET_SPEC_EARLIEST": -2,
    "OFFSET_SPEC_LATEST": -1,
    "OFFSET_SPEC_MAX_TIMESTAMP": -3,
    "RESOURCE_UNKNOWN": 0,
    "RESOURCE_ANY": 1,
    "RESOURCE_TOPIC": 2,
    "RESOURCE_GROUP": 3,
    "RESOURCE_BROKER": 4,
    "RESOURCE_TRANSACTIONAL_ID": 5,
    "ISOLATION_LEVEL_READ_UNCOMMITTED": 0,
    "ISOLATION_LEVEL_READ_COMMITTED": 1,
}

#: Imported with `import txnstore`, these would make every program wait.
HEAVY = {"sqlalchemy", "psycopg", "asyncio", "alembic", "typer", "rich", "pyspark", "testcontainers", "pytest"}


@dataclass
class Listed:
    """A class of the list."""

    methods: dict[str, list[str]] = field(default_factory=dict)
    """The parameters of each, as many times as it is overloaded, behind `async` where it is a coroutine."""

    attributes: list[str] = field(default_factory=list)


@functools.cache
def listing() -> tuple[dict[str, Listed], dict[str, str]]:
    """Return the classes of the list, and its functions with their parameters."""
    classes: dict[str, Listed] = {}
    functions: dict[str, str] = {}
    listed = Listed()
    for line in SURFACE.read_text(encoding="utf-8").splitlines():
        if line.startswith("  ."):
            listed.attributes.append(line.removeprefix("  ."))
        elif line.startswith("  "):
            name, parenthesis, parameters = line.strip().removeprefix("async ").partition("(")
            prefix = "async " if line.startswith("  async ") else ""
            listed.methods.setdefault(name, []).append(prefix + parenthesis + parameters)
        elif line.startswith("def "):
            name, parenthesis, parameters = line.removeprefix("def ").partition("(")
            functions[name] = parenthesis + parameters
        else:
            listed = classes[line] = Listed()
    return classes, functions


def surface() -> dict[str, Listed]:
    return listing()[0]


def compact(entries: dict[str, Any]) -> str:
    """Return the list that the full one comes to: names, parameters and their defaults, without types."""
    lines = []
    for key, entry in entries.items():
        if isinstance(entry, str):
            lines.append(f"def {key.rpartition(' ')[2]}{untyped(entry)}")
            continue
        lines.append(key)
        for name, texts in entry["methods"].items():
            asynchronous = ["async " if text.startswith("async ") else "" for text in texts]
            lines += [f"  {word}{name}{untyped(text)}" for word, text in zip(asynchronous, texts, strict=True)]
        lines += [f"  .{attribute.split(':')[0].split('=')[0].strip()}" for attribute in entry["attrs"]]
    return "\n".join(lines) + "\n"


def untyped(text: str) -> str:
    arguments = expected_signature(text)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"({ast.unparse(arguments)})"


def our_class(key: str) -> type:
    """Return our class of this key of the list; skips what is not there for a reason."""
    file, name = key.split(":")
    module = ELSEWHERE.get(name) or next(ours for begin, ours in MODULES.items() if file.startswith(begin))
    found = getattr(importlib.import_module(module), name, None)
    assert found is not None, f"{module} has no {name}"
    assert isinstance(found, type)
    return found


def expected_signature(text: str) -> ast.arguments:
    (function,) = ast.parse(f"def function{text.removeprefix('async ')}: ...").body
    assert isinstance(function, ast.FunctionDef)
    return function.args


def differences(expected: ast.arguments, ours: inspect.Signature) -> list[str]:
    """Return what a caller who relies on the expected parameters would run into."""
    found = list(ours.parameters.values())
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in found):
        return []
    positional = [*expected.posonlyargs, *expected.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(expected.defaults)) + list(expected.defaults)
    wrong = []
    for index, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
        if index >= len(found) or found[index].name != argument.arg:
            wrong.append(f"parameter {index} is {found[index].name if index < len(found) else 'missing'}")
            wrong.append(f"and not {argument.arg}")
            break
        # Nobody hands over `self` by name; a method written in C does not even take it so.
        if argument.arg != "self" and found[index].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            wrong.append(f"{argument.arg} is {found[index].kind.description}")
        if default is None:
            if argument.arg != "self" and found[index].default is not inspect.Parameter.empty:
                continue  # ours may be left out: nobody is hurt
        elif not is_default(default, found[index].default):
            wrong.append(f"{argument.arg} is {found[index].default!r} and not {ast.unparse(default)} by default")
    has_all_others = expected.vararg is not None or expected.kwarg is not None
    for parameter in found[len(positional) :]:
        optional = parameter.default is not parameter.empty or parameter.kind is parameter.VAR_KEYWORD
        if not optional and not has_all_others:
            wrong.append(f"{parameter.name} has to be given")
    return wrong


def is_default(expected: ast.expr, ours: object) -> bool:
    if isinstance(expected, ast.Constant) and expected.value is ...:
        return ours is not inspect.Parameter.empty
    try:
        value = ast.literal_eval(expected)
    except ValueError:
        return str(ours) == ast.unparse(expected)
    # A dictionary of a default is shared by all calls: None is what is meant.
    return ours == value or (value == {} and ours is None)


def classes() -> list[str]:
    return [key for key in surface() if key not in LEFT_OUT]


def public_methods() -> list[tuple[str, str]]:
    return [
        (key, name)
        for key in classes()
        for name in surface()[key].methods
        if not name.startswith("_") or name in {"__init__", "__call__"}
    ]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("key", "name"), public_methods(), ids=lambda item: item)
def test_a_method_takes_what_confluents_takes(key, name):
    ours = getattr(our_class(key), name, None)
    if f"{key}.{name}" in OTHERWISE:
        return
    assert ours is not None, f"{key} has no {name}"
    if isinstance(inspect.getattr_static(our_class(key), name), property):
        return
    signature = inspect.signature(ours)
    for text in surface()[key].methods[name]:
        expected = expected_signature(text)
        if inspect.ismethod(ours):
            expected.args = expected.args[1:]
        assert differences(expected, signature) == []


@pytest.mark.parametrize(("name", "text"), listing()[1].items())
def test_a_function_takes_what_confluents_takes(name, text):
    assert differences(expected_signature(text), inspect.signature(getattr(txnstore, name))) == []


@pytest.mark.parametrize("key", classes())
def test_a_class_has_confluents_attributes(key):
    ours = our_class(key)
    for name in surface()[key].attributes:
        if not name.startswith("_") or key.endswith(":KafkaError"):
            # What only objects have is set by their constructor.
            assert hasattr(ours, name) or name in inspect.signature(ours).parameters, f"{key} has no {name}"


@pytest.mark.parametrize("key", classes())
def test_a_class_has_confluents_special_methods(key):
    ours = our_class(key)
    for name in surface()[key].methods:
        if name.startswith("__") and name not in {"__class_getitem__", "__del__", "__init_impl"}:
            assert hasattr(ours, name), f"{key} has no {name}"


@pytest.mark.parametrize(
    "key", [key for key in surface() if key.startswith("aio/") and key not in LEFT_OUT], ids=lambda key: key
)
def test_what_is_a_coroutine_there_is_one_here(key):
    for name, texts in surface()[key].methods.items():
        if name.startswith("__"):
            continue
        expected = any(text.startswith("async ") for text in texts)
        assert inspect.iscoroutinefunction(getattr(our_class(key), name)) is expected, name


@pytest.mark.skipif(not FULL_SURFACE.exists(), reason="what the list was made from is not on this machine")
def test_the_list_is_what_it_was_made_from():
    assert compact(json.loads(FULL_SURFACE.read_text(encoding="utf-8"))) == SURFACE.read_text(encoding="utf-8")


def test_what_is_left_out_is_in_the_list():
    methods = {f"{key}.{name}" for key, listed in surface().items() for name in listed.methods}
    assert set(LEFT_OUT) <= set(surface())
    assert set(OTHERWISE) <= methods


@pytest.mark.parametrize("key", LEFT_OUT)
def test_what_is_left_out_is_not_there(key):
    file, name = key.split(":")
    module = next(ours for begin, ours in MODULES.items() if file.startswith(begin))
    assert name not in getattr(importlib.import_module(module), "__all__", ())


@pytest.mark.parametrize(("key", "names"), FORGOTTEN.items())
def test_what_the_list_forgets_is_there(key, names):
    module, name = key.split(":")
    ours = getattr(importlib.import_module(module), name)
    assert [name for name in names if not hasattr(ours, name)] == []


def test_a_difference_is_seen():
    """The comparison itself: it must fail on what a caller would stumble over."""

    def ours(topic, key=None, *, partition=0, timeout):
        """Stand for a method of ours."""

    def compare(text):
        return differences(expected_signature(text), inspect.signature(ours))

    assert compare("(topic, value=None)")
    assert compare("(topic, key=5)")
    assert compare("(topic, key=None, partition=0)")
    assert compare("(topic, key=None)") == ["timeout has to be given"]
    assert compare("(topic, key=None, **others)") == []
    assert compare("(topic, key=..., **others)") == []
    assert compare("(topic=..., **others)")


@pytest.mark.parametrize("name", ALL_NAMES)
def test_a_name_of_the_package_can_be_imported(name):
    assert name in txnstore.__all__
    assert getattr(txnstore, name) is not None


def test_the_package_exports_nothing_else():
    assert set(txnstore.__all__) == set(ALL_NAMES) | OWN_NAMES
    assert set(txnstore.__all__) <= set(dir(txnstore))


def test_everything_comes_with_a_star():
    names: dict[str, Any] = {}
    exec("from txnstore import *", names)
    assert names["Producer"] is txnstore.Producer
    assert set(txnstore.__all__) <= set(names)


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="module 'txnstore' has no attribute 'ShareConsumer'"):
        _ = txnstore.ShareConsumer
    with pytest.raises(ImportError):
        exec("from txnstore import nonsense")


@pytest.mark.parametrize("module", ["txnstore.error", "txnstore.serialization", "txnstore.aio", "txnstore.cimpl"])
def test_the_public_modules_export_what_they_have(module):
    found = importlib.import_module(module)
    assert [name for name in found.__all__ if not hasattr(found, name)] == []


def test_the_classes_are_the_same_wherever_they_are_imported_from():
    from txnstore import cimpl, error, serialization

    for name in ("Producer", "Consumer", "KafkaError", "KafkaException", "Message", "TopicPartition", "Uuid"):
        assert getattr(cimpl, name) is getattr(txnstore, name)
    assert error.KafkaException is txnstore.KafkaException
    assert error.SerializationError is serialization.SerializationError


def test_the_numbers_of_enumerations_are_those_of_2_16_1():
    from txnstore import admin, cimpl

    numbers = {name: value for name, value in vars(cimpl).items() if type(value) is int and not name.startswith("_")}
    assert len(numbers) == 65
    some = {
        "ACL_OPERATION_IDEMPOTENT_WRITE": 12,
        "ACL_PERMISSION_TYPE_ALLOW": 3,
        "ALTER_CONFIG_OP_TYPE_SUBTRACT": 3,
        "CONFIG_SOURCE_GROUP_CONFIG": 8,
        "CONSUMER_GROUP_STATE_COMPLETING_REBALANCE": 2,
        "CONSUMER_GROUP_STATE_UNKNOWN": 0,
        "CONSUMER_GROUP_TYPE_CLASSIC": 2,
        "ELECTION_TYPE_UNCLEAN": 1,
        "RESOURCE_PATTERN_PREFIXED": 4,
        "SCRAM_MECHANISM_SHA_512": 2,
    }
    assert some.items() <= numbers.items()
    assert admin.CONFIG_SOURCE_DYNAMIC_TOPIC_CONFIG == 1


def test_an_isolation_level_is_no_number():
    assert not isinstance(txnstore.IsolationLevel.READ_COMMITTED, int)


def test_names_that_programs_import_from_where_they_are_used():
    from txnstore import error, serialization

    assert error.Message is txnstore.Message
    assert serialization.KafkaException is txnstore.KafkaException


@pytest.mark.parametrize(("name", "value"), CIMPL_CONSTANTS.items())
def test_a_constant_has_librdkafkas_number(name, value):
    from txnstore import cimpl

    assert getattr(cimpl, name) == value


def test_the_versions_are_told():
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert txnstore.version() == txnstore.__version__ == project["version"]
    text, number = txnstore.libversion()
    assert tuple(int(part) for part in text.split(".")) == (number >> 24, number >> 16 & 255, number >> 8 & 255)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("statement", ["import txnstore", "import txnstore.error", "from txnstore import KafkaError"])
def test_importing_the_package_imports_nothing_heavy(statement):
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert HEAVY & set(answer.stdout.split()) == set()


@pytest.mark.slow
def test_a_client_says_of_the_first_use_that_it_made_a_store_and_imports_no_orm(tmp_path):
    """Also where the program shows INFO: the steps of the migrations are debug lines."""
    program = """
import logging, sys
logging.basicConfig(level=logging.INFO)
import txnstore, txnstore.admin
conf = {"bootstrap.servers": sys.argv[1]}
with txnstore.Producer(conf) as producer:
    producer.produce("t", "v")
    assert producer.flush(30) == 0
txnstore.Consumer({**conf, "group.id": "g"}).close()
txnstore.admin.AdminClient(conf).list_topics(timeout=30)
txnstore.Outbox(conf["bootstrap.servers"]).close()
print("sqlalchemy.orm" in sys.modules)
"""
    url = f"sqlite:///{tmp_path}/fresh.db"
    command = [sys.executable, "-c", program, url]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    told = f"INFO:txnstore.db.opening:made a new store in {url}\n"
    assert (ended.stdout, ended.stderr) == ("False\n", told)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["txnstore.db.url", "txnstore.clients.consumer.consumer", "txnstore.clock", "txnstore.aio"]
)
def test_every_module_can_be_the_first_to_be_imported(module):
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True, timeout=300)
