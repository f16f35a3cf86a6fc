"""Bodies: the value that arrives, the values that are refused, and the part that the error names."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import gc
import operator
import pickle
import re
import sys
import threading
import time
import types
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rpcbench.base import rebuild
from rpcbench.base.errors import ProtocolError, RpcError, SerializationError, ShutdownError
from rpcbench.serialization import closures, diagnostics, fast_path, pickler
from rpcbench.serialization.closures import MissingCodeError
from rpcbench.serialization.pickler import Codec, Encoded
from rpcbench.serialization.tensors import INLINE
from rpcbench.wire.messages import Body


class Colour(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Order:
    items: list[Any]
    lock: Any = None

    @classmethod
    def empty(cls) -> Order:
        return cls([])


class Reference:
    """Stands for an RRef: an object of a higher layer."""


class Table:
    """Externals that take any Reference."""

    def __init__(self) -> None:
        self.given: list[object] = []

    def name_of_external(self, value: object) -> tuple[int | str, ...] | None:
        if not isinstance(value, Reference):
            return None
        self.given.append(value)
        return (len(self.given) - 1,)

    def find_external(self, *name: Any) -> object:
        return f"reference {'/'.join(map(str, name))}"


class Tagged(torch.Tensor):
    pass


def send(value: Any, **options: Any) -> Any:
    return Codec().decode_value(received(Codec().encode_value(value)), **options)


def received(encoded: Encoded) -> Body:
    """The body as a peer has it: large buffers in its own writable memory."""
    payload, table, buffers = encoded[0]
    return Body(payload, table, [bytearray(buffer) for buffer in buffers])


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": [1, 2.5, "x"], ("b",): {3}},
        (divmod, (7, 2), {}),
        Colour.RED,
        Point(1, Point(2, 3)),
        Order([Colour.RED]),
        torch.float64,
        torch.Size([2, 3]),
        np.float32(1.5),
        range(3),
        int,
        type(None),
        functools.partial(divmod, 7),
        Order,
        dict.fromkeys,
    ],
    ids=lambda value: getattr(value, "__qualname__", None) or repr(value),  # a repr may hold an address
)
def test_a_value_arrives_equal(value: Any) -> None:
    arrived = send(value)
    assert type(arrived) is type(value) and repr(arrived) == repr(value)


def test_modules_and_views_of_dicts_can_be_sent() -> None:
    assert send(types) is types
    assert list(send({"a": 1}.keys())) == ["a"]


def test_a_method_of_a_class_is_sent_by_name() -> None:
    assert send(torch.Tensor.add_) is torch.Tensor.add_
    assert send(Order.__init__) is Order.__init__
    assert send(Order.empty).__func__ is Order.empty.__func__


def test_a_tensor_that_occurs_twice_arrives_as_one_tensor() -> None:
    tensor = torch.zeros(3)
    encoded = Codec().encode_value(([tensor, tensor], {"again": tensor}))
    assert len(encoded[1]) == 1 and encoded[1][0] is tensor
    (one, two), rest = Codec().decode_value(received(encoded))
    assert one is two is rest["again"]


def test_the_encoder_returns_the_tensors_of_the_sender_in_table_order() -> None:
    inside = torch.ones(2, requires_grad=True) * 2
    parameter = torch.nn.Parameter(torch.ones(1))
    tagged = torch.ones(1).as_subclass(Tagged)
    sparse = torch.eye(2).to_sparse()
    encoded = Codec().encode_value([inside, {"p": parameter}, tagged, sparse, inside])
    assert [id(t) for t in encoded[1]] == [id(t) for t in (inside, parameter, tagged, sparse)]


def test_adopt_replaces_received_tensors_before_the_value_is_built() -> None:
    seen: list[list[torch.Tensor]] = []

    def adopt(arrived: list[torch.Tensor]) -> list[torch.Tensor]:
        seen.append(arrived)
        return [tensor * 2 for tensor in arrived]

    one = torch.ones(2, requires_grad=True)
    (a, b), tagged = send(([one, one], one.as_subclass(Tagged)), adopt=adopt)
    assert a is b and a.tolist() == [2, 2] and a.grad_fn is not None
    assert type(tagged) is Tagged and tagged.grad_fn is not None and tagged.tolist() == [2, 2]
    assert len(seen) == 1 and len(seen[0]) == 2
    assert send("no tensors", adopt=adopt) == "no tensors" and seen[1:] == [[]]


def test_tensors_keep_their_class_and_attributes() -> None:
    tagged = torch.ones(2, requires_grad=True).as_subclass(Tagged).detach().requires_grad_()
    tagged.note = {"more": torch.zeros(1)}
    plain = torch.ones(1)
    plain.note = "plain"
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.sharded = True
    arrived = send([tagged, plain, parameter])
    assert [type(t) for t in arrived] == [Tagged, torch.Tensor, torch.nn.Parameter]
    assert arrived[0].is_leaf and arrived[0].requires_grad
    assert arrived[0].note == {"more": torch.zeros(1)}
    assert arrived[1].note == "plain" and arrived[2].sharded


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_quantized_nested_and_uninitialized_tensors_can_be_sent() -> None:
    quantized = torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.5, 1, torch.qint8)
    assert torch.equal(send(quantized), quantized)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    assert [part.tolist() for part in send(nested).unbind()] == [[1, 1], [0, 0, 0]]
    assert isinstance(send(torch.nn.UninitializedParameter()), torch.nn.UninitializedParameter)


def test_a_module_arrives_with_its_parameters_and_behaviour() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
    arrived = send(model)
    x = torch.ones(3)
    assert torch.equal(arrived(x), model(x))
    assert all(isinstance(p, torch.nn.Parameter) and p.requires_grad for p in arrived.parameters())


@pytest.mark.parametrize("count", [3, INLINE])
def test_arrays_arrive_writable_and_large_ones_are_not_copied(count: int) -> None:
    array = np.zeros(count)
    encoded = Codec().encode_value({"array": array, "tensor": torch.ones(count)})
    assert len(encoded[0].buffers) == (2 if count == INLINE else 0)
    array[1] = 7
    arrived = Codec().decode_value(encoded[0])  # the sender's own views, as within one process
    arrived["array"][0] = 1
    assert array[0] == 0 and arrived["array"][1] == (7 if count == INLINE else 0)
    assert arrived["tensor"].sum() == count


class Meter:
    def __init__(self, reads: float) -> None:
        self.reads = reads
        self.port = threading.Lock()  # cannot be pickled


class Weighed(torch.Tensor):
    pass


@pytest.fixture
def reducers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickler, "_REDUCERS", {**pickler._REDUCERS})


@pytest.mark.usefixtures("reducers")
def test_a_registered_reducer_is_used_for_instances_of_exactly_its_class() -> None:
    pickler.register_reducer(Meter, lambda meter: (Meter, (meter.reads,)))
    arrived = send({"all": [Meter(2.5), Meter(3.5)]})["all"]
    assert [(type(meter), meter.reads) for meter in arrived] == [(Meter, 2.5), (Meter, 3.5)]
    pickler.register_reducer(Weighed, lambda tensor: (float, (tensor.sum().item(),)))
    assert send(torch.ones(3).as_subclass(Weighed)) == 3.0  # the reducer comes before the table of tensors
    with pytest.raises(SerializationError, match="lock"):
        send(type("SubMeter", (Meter,), {})(1))  # the reducer is for exactly this class


@pytest.mark.usefixtures("reducers")
def test_register_reducer_replaces_a_reducer_and_the_function_of_torch_keeps_the_first() -> None:
    pickler._register_reducer(Meter, lambda meter: (str, ("one",)))
    pickler._register_reducer(Meter, lambda meter: (str, ("two",)))
    assert send(Meter(1)) == "one"
    pickler.register_reducer(Meter, lambda meter: (str, ("three",)))
    assert send(Meter(1)) == "three"
    with pytest.raises(TypeError, match="takes a class and a function"):
        pickler.register_reducer("Meter", len)  # type: ignore[arg-type]


@pytest.mark.usefixtures("reducers")
def test_an_error_in_a_reducer_names_the_value() -> None:
    pickler.register_reducer(Meter, lambda meter: 1 // 0)
    with pytest.raises(SerializationError, match=r"^value\[0\]: ZeroDivisionError"):
        send([Meter(1)])


def test_externals_are_sent_by_number() -> None:
    one, two = Reference(), Reference()
    table = Table()
    encoded = Codec().encode_value(([one, two], {"again": one}, lambda: two), table)
    assert table.given == [one, two]
    (a, b), again, function = Codec().decode_value(encoded[0], table)
    assert (a, b, again["again"], function()) == ("reference 0", "reference 1", "reference 0", "reference 1")


def test_a_codec_keeps_no_value_until_the_next_garbage_collection() -> None:
    """A value with RRefs must release them as soon as its last reference is dropped."""
    body = Codec().encode_value([Reference(), torch.ones(1), np.zeros(INLINE), lambda: 1], Table())[0]
    gc.disable()
    try:
        kept = [weakref.ref(part) for part in Codec().decode_value(body, Fresh())[:3]]
        sent = Reference()
        kept.append(weakref.ref(sent))
        Codec().encode_value([sent, torch.ones(1)], Table())
        del sent
        assert [ref() for ref in kept] == [None] * 4
    finally:
        gc.enable()


class Fresh(Table):
    def find_external(self, *name: Any) -> object:
        return Reference()


def test_a_payload_that_refers_to_missing_tensors_or_externals_is_refused() -> None:
    codec = Codec()
    tensors = codec.encode_value([torch.ones(1), torch.ones(1)])[0]
    fewer = codec.encode_value([torch.ones(1)])[0]
    with pytest.raises(ProtocolError, match="mentions tensor 1, but has 1"):
        codec.decode_value(tensors._replace(tensors=fewer.tensors))
    with pytest.raises(ProtocolError, match="mentions tensor 0, but has 0"):
        codec.decode_value(tensors._replace(tensors=b""))
    with pytest.raises(ProtocolError, match=r"external \(0,\)"):
        codec.decode_value(codec.encode_value(Reference(), Table())[0])
    with pytest.raises(ProtocolError, match="mentions tensor -1"):
        codec.decode_value(Body(tensors.payload.replace(b"K\x00\x85", b"J\xff\xff\xff\xff\x85"), tensors.tensors, []))
    with pytest.raises(ProtocolError, match="broken payload"):
        codec.decode_value(codec.encode_value(np.zeros(INLINE))[0]._replace(buffers=[]))


@pytest.mark.parametrize("length", range(0, 60, 3))
def test_a_cut_payload_is_refused(length: int) -> None:
    body = Codec().encode_value(("some text", [1, 2, 3], {"key": 1.5, "other": b"bytes" * 5}))[0]
    assert length < len(body.payload)
    with pytest.raises(ProtocolError, match="broken payload"):
        Codec().decode_value(body._replace(payload=body.payload[:length]))


def test_a_payload_cannot_be_unpickled_without_its_message() -> None:
    body = Codec().encode_value(torch.ones(1))[0]
    with pytest.raises(SerializationError, match="part of an rpcbench message"):
        pickle.loads(body.payload)


def test_a_slot_that_this_version_lacks_is_named_in_the_error() -> None:
    payload = f"c{closures.__name__}\nnewer_slot\n.".encode()
    with pytest.raises(MissingCodeError, match="newer_slot"):
        Codec().decode_value(Body(payload, b"", []))


LOCK = threading.Lock()


class Slotted:
    __slots__ = ("__weakref__", "held")


def slotted() -> Slotted:
    value = Slotted()
    value.held = LOCK
    return value


class Refusing:
    def __reduce__(self) -> Any:
        raise KeyError("no")


@dataclasses.dataclass(slots=True, frozen=True)
class Frozen:
    number: int
    held: Any


class Spiteful:
    """Fails in its own `__reduce__`, and also holds a lock, which would fail."""

    def __init__(self) -> None:
        self.lock = LOCK

    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


def local_class() -> type:
    class Local:
        lock = LOCK

    return Local


def decorated() -> Any:
    @functools.wraps(needs)
    def outer() -> None:
        pass

    outer.__wrapped__ = lambda: LOCK
    return outer


def with_attribute(error: Exception, held: Any) -> Exception:
    error.held = held  # type: ignore[attr-defined]
    return error


def test_the_result_of_an_async_function_is_refused_with_the_remedy() -> None:
    coroutine = later()
    words = "result[0]: cannot pickle 'coroutine' object: a call does not await an async function. Send a function that"
    with pytest.raises(SerializationError, match=re.escape(words) + r".* lambda: asyncio.run\(later\(...\)\)"):
        Codec().encode_value([coroutine], label="result")
    coroutine.close()


def counting() -> Any:
    yield 1


async def later() -> None: ...


async def items() -> Any:
    yield 1


def needs(lock: Any = None) -> Any:
    return lambda: lock


PARTS = ("function", "args", "kwargs")


@pytest.mark.parametrize(
    ("value", "label", "message"),
    [
        (LOCK, "result", "result: cannot pickle '_thread.lock' object"),
        ((print, (Order([], LOCK),), {}), PARTS, "args[0].lock: cannot pickle '_thread.lock' object"),
        ((print, (), {"x": [1, {"y": LOCK}]}), PARTS, "kwargs['x'][1]['y']: cannot pickle '_thread.lock' object"),
        ((print, (slotted(),), {}), PARTS, "args[0].held: cannot pickle"),
        ((needs(LOCK), (), {}), PARTS, "function (its closure's 'lock'): cannot pickle"),
        ((lambda: LOCK, (), {}), PARTS, "function (its global 'LOCK'): cannot pickle"),
        ((lambda a, b=LOCK: a, (), {}), PARTS, "function (its default 'b'): cannot pickle"),
        ((functools.partial(print, LOCK), (), {}), PARTS, "function.args[0]: cannot pickle"),
        ((Order([LOCK]).__eq__, (), {}), PARTS, "function.__self__.items[0]: cannot pickle"),
        ({(1, LOCK): 1}, "value", "value (a key)[1]: cannot pickle"),
        ({LOCK}, "value", "value (an element): cannot pickle"),
        ([Refusing()], "value", "value[0]: KeyError: 'no'"),
        (counting(), "result", "result: cannot pickle 'generator' object: a generator cannot leave its process"),
        (items(), "result", "result: cannot pickle 'async_generator' object: a call does not iterate over"),
        (collections.deque([1, LOCK]), "result", "result[1]: cannot pickle"),
        (Frozen(1, {"deep": [[LOCK]]}), "result", "result.held['deep'][0][0]: cannot pickle"),
        (types.SimpleNamespace(lock=LOCK), "result", "result.lock: cannot pickle"),
        (ValueError("text", LOCK), "value", "value.args[1]: cannot pickle"),
        (with_attribute(OSError(2, "no"), LOCK), "value", "value.held: cannot pickle"),
        (functools.partial(print, end=LOCK), "result", "result.keywords['end']: cannot pickle"),
        (functools.partial(Order([LOCK]).__eq__, 1), "result", "result.func.__self__.items[0]: cannot pickle"),
        ((lambda: lambda: LOCK), "result", "result (its global 'LOCK'): cannot pickle"),
        ((lambda: [(lambda: LOCK) for _ in ()]), "result", "result (its global 'LOCK'): cannot pickle"),
        ([local_class()], "value", "value[0] (its 'lock'): cannot pickle"),
        ([local_class()()], "value", "value[0] (its class) (its 'lock'): cannot pickle"),
        (decorated(), "function", "function.__wrapped__ (its global 'LOCK'): cannot pickle"),
        (Spiteful(), "value", "value: RuntimeError: not me"),
        ((print, (torch.ones(1), torch.ones(1, 1).to_mkldnn()), {}), PARTS, "args[1]: a tensor of layout torch"),
        ([1, sys._getframe()], "value", "value[1]: cannot pickle"),
    ],
)
def test_the_part_that_cannot_be_pickled_is_named_with_its_path(value: Any, label: Any, message: str) -> None:
    with pytest.raises(SerializationError) as caught:
        Codec().encode_value(value, label=label)
    assert str(caught.value).startswith(message)
    assert caught.value.__cause__ is not None


def test_the_search_for_the_part_at_fault_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def problem(part: object) -> Exception | None:
        nonlocal asked
        asked += 1
        return None

    wide = [[] for _ in range(10**5)]
    assert (
        diagnostics.find_fault(wide, "value", TypeError("x"), problem)[0] == "value"
        and asked == diagnostics._MOST_PROBES
    )
    monkeypatch.setattr(diagnostics, "_MOST_SECONDS", 0)
    asked = 0
    assert diagnostics.find_fault(wide, "value", TypeError("x"), problem)[0] == "value" and asked == 0


def test_the_search_for_the_part_at_fault_ends_in_cycles_and_deep_values() -> None:
    around: list[Any] = []
    around.append([around, LOCK])
    with pytest.raises(SerializationError, match=r"^value\[0\]\[1\]: cannot pickle"):
        Codec().encode_value(around)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(SerializationError, match=r"^value: nested too deeply"):
        Codec().encode_value(deep)
    while deep:
        deep = deep.pop()


def test_an_error_of_the_runtime_passes_unchanged() -> None:
    class Closed(Table):
        def name_of_external(self, value: object) -> tuple[int | str, ...] | None:
            raise ShutdownError("stopped")

    with pytest.raises(ShutdownError, match="stopped"):
        Codec().encode_value([Reference()], Closed())


def test_a_function_or_module_that_the_receiver_lacks_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("only_there")
    exec("def work(): return 1", vars(module))
    monkeypatch.setitem(sys.modules, "only_there", module)
    body = Codec().encode_value((module.work, (), {}))[0]
    assert Codec().decode_value(body)[0] is module.work
    del module.work
    for missing in (r"Can't get attribute 'work'", r"No module named 'only_there'"):
        with pytest.raises(MissingCodeError, match=f"{missing}.*RPC pickler does not serialize") as caught:
            Codec().decode_value(body)
        assert isinstance(caught.value, RpcError) and isinstance(caught.value, AttributeError)
        assert send(caught.value).args == caught.value.args
        monkeypatch.delitem(sys.modules, "only_there", raising=False)


def test_the_error_about_a_module_that_the_receiver_lacks_has_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("only_there")
    exec("def work(): return 1", vars(module))
    monkeypatch.setitem(sys.modules, "only_there", module)
    bodies = [Codec().encode_value(value)[0] for value in ((module.work, (), {}), module, lambda: module.work())]
    assert Codec().decode_value(bodies[1]) is module
    monkeypatch.delitem(sys.modules, "only_there")
    for body in bodies:
        with pytest.raises(MissingCodeError, match=r"sys\.path later, cluster\.reload\('only_there'\) loads"):
            Codec().decode_value(body)


def test_an_error_of_a_user_class_passes_unchanged() -> None:
    body = Codec().encode_value(Brittle())[0]
    with pytest.raises(AttributeError, match=r"^just so$") as caught:
        Codec().decode_value(body)
    assert not isinstance(caught.value, RpcError)


class KeywordsOnly(Exception):
    def __init__(self, *, code: int, holds: object = None) -> None:
        super().__init__(f"code {code}", holds)
        self.code, self.holds = code, holds


def test_an_exception_can_be_sent_as_a_value() -> None:
    error = KeywordsOnly(code=7)
    error.holds = [error]
    arrived = send([error, KeyError(Colour.RED)])
    assert type(arrived[0]) is KeywordsOnly and arrived[0].code == 7 and arrived[0].holds[0] is arrived[0]
    assert arrived[1].args == (Colour.RED,)
    with pytest.raises(SerializationError, match=r"^value\.args\[1\]: cannot pickle '_thread.lock'"):
        Codec().encode_value(KeywordsOnly(code=7, holds=threading.Lock()))


def raised(error: BaseException) -> Any:
    return Codec().decode_value(Codec().encode_error(error))


def test_an_error_with_an_unpicklable_attribute_keeps_its_type() -> None:
    lock = threading.Lock()
    error = KeywordsOnly(code=7, holds=lock)
    error.add_note("a note")
    arrived = raised(error)
    assert type(arrived) is KeywordsOnly and arrived.args == ("code 7", repr(lock))
    assert (arrived.code, arrived.holds, arrived.__notes__) == (7, repr(lock), ["a note"])
    group = raised(ExceptionGroup("several", [error, ValueError(1)]))
    assert [inner.args for inner in group.exceptions] == [("code 7", repr(lock)), (1,)]


def test_an_error_of_an_unpicklable_class_is_an_empty_body() -> None:
    class Local(Exception):
        lock = threading.Lock()

    assert Codec().encode_error(Local()) == Body(b"", b"", [])


def test_a_long_error_is_cut_and_keeps_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickler, "_MOST_ERROR", 2000)
    monkeypatch.setattr(rebuild, "MOST_TEXT", 100)
    error = KeywordsOnly(code=7, holds=[0] * 10_000)
    error.add_note("note " * 1000)
    arrived = raised(error)
    assert type(arrived) is KeywordsOnly and arrived.args[0] == "code 7"
    assert arrived.holds.startswith("[0, 0, ") and "29900 characters are left out" in arrived.holds
    assert "4900 characters are left out" in arrived.__notes__[0]
    arrived = raised(UnicodeDecodeError("utf-8", b"\xff" * 5000, 4000, 4001, "broken"))
    assert arrived.object == b"\xff" * 100 and "broken" in str(arrived)
    assert raised(ValueError("x" * 1000)).args == ("x" * 1000,)


class Brittle:
    def __init__(self) -> None:
        self.text = "x"

    def __setstate__(self, state: Any) -> None:
        raise AttributeError("just so")


def test_a_reused_codec_writes_the_bytes_of_a_new_one() -> None:
    codec, shared = Codec(), [1]
    local = eval("lambda: shared", {"shared": shared, "__name__": "__main__"})
    array, ones = np.zeros(INLINE), torch.ones(2)
    short: list[Any] = [[shared, shared], [array], [array], [shared], [ones, 1], [ones, 1], [shared, ones]]
    for value in (*short, list(range(9999)), *short, [local], *short):
        body, found = codec.encode_value(value)
        assert (body, found) == Codec().encode_value(value)
        assert bool(codec._idle) == any(value is one for one in short), (
            "a pickler is not reused after a large value or code"
        )


def test_a_codec_serves_many_threads() -> None:
    codec, failures = Codec(), []

    class Local:
        def __init__(self, n: int) -> None:
            self.n = n

    def work(n: int) -> None:
        for i in range(50):
            sent = [Local(n), torch.full((4,), float(i)), lambda: n]
            arrived, tensor, function = codec.decode_value(codec.encode_value(sent)[0])
            if type(arrived) is not Local or arrived.n != n or tensor[0] != i or function() != n:
                failures.append((n, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_two_threads_can_import_modules_of_one_package_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "slowly" / "package"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("import time\ntime.sleep(0.3)\n")
    (package / "__init__.py").write_text("from slowly.package import left, right\n")
    for name in ("left", "right"):
        (package / f"{name}.py").write_text(f"def where(): return {name!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    bodies = [Body(f"cslowly.package.{name}\nwhere\n.".encode(), b"", []) for name in ("left", "right")]
    found: list[Any] = []
    threads = [threading.Thread(target=lambda b=body: found.append(Codec().decode_value(b)())) for body in bodies]
    for thread in threads:
        thread.start()
        time.sleep(0.1)  # the second import begins during the first one
    for thread in threads:
        thread.join(20)
    assert sorted(found) == ["left", "right"]


def _with_note() -> torch.Tensor:
    noted = torch.ones(2)
    noted.note = "kept"  # type: ignore[attr-defined]
    return noted


ALONE: dict[str, Any] = {
    "a tensor": torch.ones(2, 3),
    "one in a list": [torch.ones(2)],
    "one that wants gradients": torch.ones(2, requires_grad=True),
    "a large one": torch.ones(INLINE),
    "a part of another": torch.ones(8)[2:],
    "with an attribute": _with_note(),
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "two in a list": [torch.ones(2), torch.zeros(2)],
    "one that is none": [None],
    "an empty list": [],
}


@pytest.mark.parametrize("name", ALONE)
def test_a_single_tensor_takes_the_fast_path_with_the_body_of_the_general_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = ALONE[name]
    quick, sent = Codec().encode_value(value)
    arrived = Codec().decode_value(quick)
    monkeypatch.setattr(pickler, "_encode_one_tensor", lambda value: None)
    assert Codec().encode_value(value)[0] == quick, "the bodies are equal"
    monkeypatch.setattr(pickler, "_ALONE", b"")
    monkeypatch.setattr(pickler, "_LISTED", b"")
    again = Codec().decode_value(quick)
    assert type(arrived) is type(again) and repr(arrived) == repr(again) == repr(value)
    assert not isinstance(value, torch.Tensor) or (sent == [value] and vars(arrived) == vars(value))


def test_a_registered_reducer_for_tensors_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pickler._REDUCERS, torch.Tensor, lambda tensor: (tuple, (("reduced",),)))
    assert Codec().decode_value(Codec().encode_value(torch.ones(2))[0]) == ("reduced",)


def test_a_module_with_a_name_of_python_2_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "commands.py").write_text("def run(x):\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "commands", raising=False)
    function, args = Codec().decode_value(Body(pickle.dumps(("commands", "run", (1,)), 3), b"", []))[:2]
    assert function.__module__ == "commands" and function(*args) == 1
    del sys.modules["commands"]


def test_what_is_too_large_for_a_protocol_is_sent_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    dumps = pickle.dumps

    def refuses(value: Any, protocol: int) -> bytes:
        if protocol == 3:
            raise OverflowError("serializing a bytes object larger than 4 GiB requires pickle protocol 4 or higher")
        return dumps(value, protocol)

    monkeypatch.setattr(fast_path, "pickle", types.SimpleNamespace(dumps=refuses))
    for value in (b"x", (operator.neg, (3,), {})):
        assert Codec().decode_value(Codec().encode_value(value)[0]) == value
