"""A message is the same whether what it holds is in C or in Python: its class, its texts, its copies, its errors."""

from __future__ import annotations

import copy
import gc
import inspect
import operator
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clients.bulk_paths import everything, made_of, message_module, needs_c, outcome
from tests.tools.memory import called_as_garbage_is_collected
from txnstore import bulk
from txnstore.clients.model.errors import KafkaError
from txnstore.clients.model.message import Message, MessageFields

pytestmark = needs_c

MODULES = [message_module(in_c=in_c) for in_c in (True, False) if bulk.IN_C]


def both(work: Callable[[Any], Any]) -> Any:
    """Return what comes of it for the module in C and for that in Python, which is the same."""
    in_c, in_python = (outcome(lambda module=module: work(module)) for module in MODULES)
    assert in_c == in_python
    return in_c


def test_one_is_in_c_and_the_other_one_is_not():
    assert [module.Message.__mro__[1] is bulk.core.MessageFields for module in MODULES] == [True, False]
    assert Message.__mro__[1] is bulk.core.MessageFields


class Odd(int):
    """A number of a kind of its own."""


numbers = st.integers(-3, 3) | st.integers() | st.booleans() | st.builds(Odd, st.integers(-2, 2))
error = KafkaError(KafkaError._PARTITION_EOF, "the end")
things = st.none() | st.binary(max_size=3) | st.text(max_size=3) | st.lists(st.integers(), max_size=2) | st.integers()
header_lists = st.lists(st.tuples(st.text(max_size=2), st.none() | st.binary(max_size=2)), max_size=2)
headers: st.SearchStrategy[Any] = st.none() | header_lists | header_lists.map(tuple) | st.just(()) | st.just({})
sources = st.tuples(st.none() | st.text(max_size=3), numbers, st.integers(0, 2)) | st.tuples(
    st.text(max_size=3), numbers, st.integers(0, 2), st.none() | st.integers(-1, 9)
)
records = st.tuples(numbers, numbers, things, things, headers)
details = st.tuples(st.none() | st.just(error), st.floats(-2, 2), numbers, numbers)
changes = st.lists(
    st.tuples(st.just("set_topic"), things)
    | st.tuples(st.sampled_from(["set_key", "set_value"]), things)
    | st.tuples(st.just("set_headers"), headers)
    | st.tuples(st.just("set_error"), st.none() | st.just(error)),
    max_size=4,
)


@given(sources, records, details, changes)
def test_whatever_it_is_made_of_and_changed_to(source: Any, record: Any, detail: Any, steps: Any) -> None:
    def work(module: Any) -> Any:
        message = made_of(module.Message, source, record, detail)
        found = [outcome(lambda: everything(message))]
        for name, given_ in steps:
            getattr(message, name)(given_)
            found.append(outcome(lambda: everything(message)))
        again = copy.copy(message)
        deep = copy.deepcopy(message)
        found += [outcome(lambda each=each: everything(each)) for each in (again, deep)]
        return [*found, again == message, message == deep, message != again, message == 5, message.__reduce__()[1:]]

    both(work)


@given(sources, records)
def test_the_message_of_a_record(source: Any, record: Any) -> None:
    both(lambda module: everything(module.message_of(source, record)))


arguments = {
    "topic": things,
    "partition": numbers | st.just("a"),
    "offset": numbers | st.none(),
    "key": things,
    "value": things,
    "headers": headers,
    "error": st.none() | st.just(error),
    "timestamp": st.none() | st.tuples(numbers, numbers) | st.just((1,)),
    "latency": st.floats(allow_nan=False) | st.just("x"),
    "leader_epoch": numbers,
    "delivery_count": numbers,
    "nonsense": numbers,
}


@given(st.fixed_dictionaries({}, optional=arguments))
def test_the_constructor_takes_and_refuses_the_same(given_: dict[str, Any]) -> None:
    def work(module: Any) -> Any:
        message = module.Message(**given_)
        return everything(message), everything(pickle.loads(pickle.dumps(Message(**given_))))

    both(work)


def test_a_message_that_was_never_set_says_so():
    def work(module: Any) -> Any:
        message = module.Message.__new__(module.Message)
        names = ["topic", "partition", "offset", "key", "value", "headers", "error", "timestamp", "__len__", "latency"]
        raised = [outcome(getattr(message, name))[0] for name in [*names, "__repr__", "__reduce__"]]
        return [
            *raised,
            *(outcome(lambda name=name: getattr(message, name))[0] for name in module.MessageFields.__slots__),
        ]

    assert set(both(work)) == {AttributeError}


@pytest.mark.parametrize("name", [name for name in vars(MessageFields) if not name.startswith("_")])
def test_the_texts_and_arguments_are_the_same(name):
    in_c, in_python = getattr(bulk.core.MessageFields, name), getattr(MessageFields, name)
    assert inspect.getdoc(in_c) == inspect.getdoc(in_python)
    assert list(inspect.signature(in_c).parameters) == list(inspect.signature(in_python).parameters) == ["self"]
    with pytest.raises(TypeError):
        in_c(Message(), 5)
    with pytest.raises(TypeError):
        in_c(5)


def test_methods_in_c_are_the_class_s_own():
    """As such they are called in less time."""
    names = [name for name in vars(MessageFields) if not name.startswith("_")]
    assert {vars(Message)[name].__objclass__ for name in names} == {Message}
    assert {getattr(Message, name).__qualname__ for name in names} == {f"Message.{name}" for name in names}


@pytest.mark.parametrize(
    "given_",
    [(), (Message,), (Message, 5), (5, dict.get), (int, dict.get), (MessageFields, bulk.IN_C and vars(Message)["key"])],
    ids=str,
)
def test_no_class_gets_methods_of_another_one(given_):
    with pytest.raises(TypeError):
        bulk.core.own_method(*given_)


def test_nothing_is_missing_in_c():
    own = {name for name in vars(MessageFields) if not name.startswith("__") or name == "__len__"}
    assert own - set(vars(bulk.core.MessageFields)) == set()


FORBIDDEN: dict[str, Callable[[Any], Any]] = {
    "another attribute": lambda message: setattr(message, "colour", 1),
    "a hash": hash,
    "a weak reference": weakref.ref,
    "its attributes": vars,
    "an item": lambda message: message[0],
    "items": iter,
    "an order": lambda message: message < message,  # noqa: PLR0124 - there is none
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_it_does_not_have(name):
    assert both(lambda module: outcome(lambda: FORBIDDEN[name](module.Message()))[0]) in (TypeError, AttributeError)


@pytest.mark.slow
def test_subclasses_have_what_they_add():
    def work(module: Any) -> Any:
        class Own(module.Message):
            """Knows its colour."""

            def __init__(self, *args: Any, colour: str = "red") -> None:
                super().__init__(*args)
                self.colour = colour

            def value(self) -> Any:
                return (self.colour, super().value())

        message = Own("t", 1, 2, b"k", b"v", colour="blue")
        kept = weakref.ref(message)
        found = (everything(message), message == module.Message("t", 1, 2, b"k", ("blue", b"v")), kept() is message)
        message.colour = message
        del message
        gc.collect()
        return found, kept()

    both(work)


@pytest.mark.slow
def test_circles_through_a_message_are_collected():
    def work(module: Any) -> Any:
        class Owner:
            """Holds a message that holds it."""

            message: Any

        owner = Owner()
        owner.message = module.Message(key=owner, value=[owner], headers=[owner], error=owner, topic=owner)
        gone = weakref.ref(owner)
        del owner
        gc.collect()
        return gone()

    assert both(work) is None


@pytest.mark.parametrize(
    ("name", "given_"),
    [
        ("_source", ("t", 1)),
        ("_source", ["t", 1, 1]),
        ("_source", None),
        ("_record", (1, 2, 3, 4)),
        ("_record", [1, 2, 3, 4, 5]),
        ("_details", (None, -1.0, -1)),
        ("_details", (None, -1.0, -1, -1, -1)),
    ],
    ids=str,
)
def test_in_c_a_part_is_whole_or_refused(name, given_):
    message = Message("t", 1, 2, b"k", b"v")
    before = everything(message)
    with pytest.raises(TypeError, match=name):
        setattr(message, name, given_)
    with pytest.raises(TypeError, match=name):
        delattr(message, name)
    assert everything(message) == before


@pytest.mark.parametrize("name", ["headers", "timestamp", "_record"])
def test_a_message_that_is_changed_as_garbage_is_collected_tells_what_it_held_before_or_holds_now(name):
    """Before Python 3.12 garbage is collected where C asks for memory: a finalizer may run then, or another thread."""
    numbers = iter(range(2**70, 2**71))

    spare: list[Any] = []

    def use_up(count: int) -> None:
        """Let Python have none of the small tuples left that it keeps for later: it asks for memory again."""
        for index in range(count):
            spare.extend([(spare, index), (spare, index, 0, 0, 0)])

    use_up(4_000)

    def change() -> None:
        number = next(numbers)
        message._source = ("t", 1, number)
        message._record = (number, number, number, number, tuple([(number, b"%d" % number)] * 3))
        use_up(8)

    message = Message("t")
    change()
    asked = operator.attrgetter(name) if name == "_record" else operator.methodcaller(name)
    with called_as_garbage_is_collected(change):
        told: list[Any] = [asked(message) for _ in range(500)]
    for found in told:
        cells = {cell for pair in found for cell in (pair[0], int(pair[1]))} if name == "headers" else set(found[:4])
        assert len(cells) == 1, found
        assert 2**70 <= cells.pop() < 2**71


class Treacherous(int):
    """A number that takes itself out of the message that it stands in, as it is compared."""

    message: Any
    gone: list[int]

    def __ge__(self, other: object) -> bool:
        self.message._record = (0, 0, None, None, ())
        self.message._source = ("t", 1, 0)
        return True

    def __del__(self) -> None:
        self.gone.append(int(self))


@pytest.mark.parametrize("name", ["offset", "partition"])
def test_a_number_that_takes_itself_out_of_its_message_is_held_until_it_is_told(name):
    message: Any = Message("t")
    number: Any = Treacherous(5)
    number.message, number.gone = message, []
    gone = number.gone
    message._record, message._source = (number, 0, None, None, ()), ("t", number, 0)
    del number
    found = getattr(message, name)()
    assert (gone, int(found)) == ([], 5)
    del found
    assert gone == [5]


def test_a_value_that_takes_itself_out_of_its_message_is_held_until_its_length_is_known():
    class Value:
        """Is not there any more once its length is asked for."""

        def __len__(self) -> int:
            message.set_value(None)
            return 7

    message = Message(value=Value())
    assert (len(message), len(message)) == (7, 0)
