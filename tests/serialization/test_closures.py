"""Code by value: the object that a function or class of `__main__` becomes in another process, and back."""

from __future__ import annotations

import abc
import collections
import contextlib
import functools
import gc
import os
import subprocess
import sys
import textwrap
import threading
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rpcbench.base import errors
from rpcbench.base.errors import SerializationError
from rpcbench.serialization import closures
from rpcbench.serialization.importable import content_fingerprint
from rpcbench.serialization.pickler import Codec
from rpcbench.wire.messages import Body


class Process:
    """A process with its own `__main__`, and two codecs."""

    def __init__(self, source: str = "") -> None:
        self.main = types.ModuleType("__main__")
        code = closures.CodeCache()
        self.codec, self.other = Codec(code), Codec(code)
        self.run(source)

    def run(self, source: str) -> None:
        """Run a cell, as a notebook does."""
        with self.inside():
            exec(compile(textwrap.dedent(source), "cell", "exec", dont_inherit=True), vars(self.main))

    @contextlib.contextmanager
    def inside(self) -> Iterator[types.ModuleType]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "__main__", self.main)
            yield self.main

    def send(self, name: str) -> Body:
        """Encode the value of an expression."""
        with self.inside():
            return self.codec.encode_value(eval(name, vars(self.main)))[0]

    def take(self, body: Body, name: str = "_") -> Any:
        """Decode a body and bind the value to a name here."""
        with self.inside():
            value = self.codec.decode_value(body)
        setattr(self.main, name, value)
        return value


def test_a_class_is_one_class_whichever_codec_of_the_process_has_received_it() -> None:
    here, there = Process("import enum\nMode = enum.Enum('Mode', 'TRAIN EVAL')\nclass Stat: pass"), Process()
    mode = there.take(here.send("Mode.TRAIN"))
    stat = there.take(here.send("Stat()"))
    there.codec = there.other
    assert there.take(here.send("Mode.TRAIN")) is mode
    assert type(there.take(here.send("Stat()"))) is type(stat)
    assert here.take(there.send("_.__class__")) is here.main.Stat
    assert Codec()._code is Codec()._code


def test_a_function_is_sent_with_its_globals_and_closure() -> None:
    here = Process(
        """
        import math
        scale = 3
        def double(x): return helper(x) * 2
        def helper(x): return x + scale
        def fact(n): return 1 if n < 2 else n * fact(n - 1)
        def adder(n):
            total = [0]
            def add(x):
                total[0] += x + n
                return total[0]
            return add
        add = adder(10)
        area = lambda r: math.pi * r * r
        """
    )
    there = Process()
    assert there.take(here.send("double"))(1) == 8
    assert there.take(here.send("fact"))(5) == 120
    assert there.take(here.send("area"))(0) == 0
    add = there.take(here.send("add"))
    assert (add(1), add(1), here.main.add(5)) == (11, 22, 15)


def test_a_function_that_is_sent_again_has_its_new_globals_and_code() -> None:
    here, there = Process("k = 1\ndef f(): return k"), Process()
    assert there.take(here.send("f"))() == 1
    here.run("k = 2")
    assert there.take(here.send("f"))() == 2
    here.run("def f(): return -k")
    assert there.take(here.send("f"))() == -2


def test_the_receiver_uses_its_own_function_if_the_code_is_equal() -> None:
    source = "def f(): return where"
    here, there = Process(f"where = 'here'\n{source}"), Process(f"where = 'there'\n\n\n{source}")
    assert there.take(here.send("f")) is there.main.f
    assert there.main.f() == "there"
    here.run("def f(): return where * 2")
    assert there.take(here.send("f"))() == "herehere"
    assert there.main.where == "there"


def test_decorated_functions_are_distinguished_by_the_wrapped_function() -> None:
    deco = """
        import functools
        def twice(f):
            @functools.wraps(f)
            def wrapper(x): return f(f(x))
            return wrapper
        @twice
        def g(x): return x + {}
        """
    here, same, other = Process(deco.format(1)), Process(deco.format(1)), Process(deco.format(5))
    assert same.take(here.send("g")) is same.main.g
    assert other.take(here.send("g")) is not other.main.g
    assert other.main._(0) == 2


def test_a_function_that_returns_to_its_process_is_the_original() -> None:
    here, there = Process("def f(): return 1"), Process()
    there.take(here.send("f"), "g")
    assert here.take(there.send("g")) is here.main.f
    assert here.take(here.send("f")) is here.main.f


CLASSES = """
import abc, collections, dataclasses, enum, functools, typing
import torch

class Plain:
    count = 0
    def __init__(self, x): self.x = x
    def again(self): return Plain(self.x)
    def mine(self): return isinstance(self, Plain)

class Child(Plain):
    @classmethod
    def of(cls, x): return cls(x)
    @staticmethod
    def plus(a, b): return a + b
    @property
    def twice(self): return self.x * 2
    def mine(self): return super().mine()

class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...

class Square(Shape):
    def area(self): return 4

class Colour(enum.Enum):
    RED = 1
    BLUE = "b"

@dataclasses.dataclass(frozen=True)
class Setting:
    lr: float = 0.1
    names: list = dataclasses.field(default_factory=list)

Pair = collections.namedtuple("Pair", "a b")

class Slots:
    __slots__ = ("a",)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
    def forward(self, x): return self.layer(x).relu()

class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3
    @staticmethod
    def backward(ctx, g): return g * 3 * ctx.saved_tensors[0] ** 2

class Oops(ValueError):
    pass

class Tagged(torch.Tensor):
    pass

@dataclasses.dataclass(slots=True)
class Lean:
    a: int

class Point(typing.NamedTuple):
    x: int
    y: int = 2
    def sum(self): return self.x + self.y

T = typing.TypeVar("T")

class Box(typing.NamedTuple, typing.Generic[T]):
    inside: T

class Far(Point):
    def far(self): return self.sum() > 10

class Late:
    @functools.cached_property
    def made(self): return [1]

class Kinds:
    @functools.singledispatchmethod
    def name(self, x): return "?"
    @name.register
    def _(self, x: int): return "int"

class Proto(typing.Protocol):
    def f(self) -> int: ...

class Real(Proto):
    def f(self): return 1

class Holds(typing.Generic[T]):
    def __init__(self, value): self.value = value

class Bits(enum.Flag):
    A = 1
    B = 2

class Level(enum.IntEnum):
    LOW = 1

class Word(enum.StrEnum):
    YES = "yes"

@dataclasses.dataclass(kw_only=True)
class Named:
    a: int

@functools.total_ordering
class Ordered:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return self.x == other.x
    def __lt__(self, other): return self.x < other.x

class Outer:
    class Inner(typing.NamedTuple):
        x: int = 1

class Table(typing.TypedDict):
    a: int

Metres = typing.NewType("Metres", float)

@functools.singledispatch
def depth(x): return 0
@depth.register
def _(x: list): return 1 + max(map(depth, x))

slots = Slots()
slots.a = 5
"""
INSTANCES = {
    "Plain": "Plain(1)",
    "Child": "Child(2)",
    "Square": "Square()",
    "Colour": "Colour.BLUE",
    "Setting": "Setting(names=[1])",
    "Pair": "Pair(1, 2)",
    "Slots": "slots",
    "Lean": "Lean(1)",
    "Net": "Net()",
    "Oops": "Oops('x')",
    "Tagged": "torch.ones(2).as_subclass(Tagged)",
    "Point": "Point(1)",
    "Box": "Box([1])",
    "Far": "Far(1)",
    "Late": "Late()",
    "Kinds": "Kinds()",
    "Real": "Real()",
    "Holds": "Holds[int](1)",
    "Bits": "Bits.A | Bits.B",
    "Level": "Level.LOW",
    "Word": "Word.YES",
    "Named": "Named(a=1)",
    "Ordered": "Ordered(1)",
}


@pytest.mark.parametrize(("kind", "made"), INSTANCES.items(), ids=list(INSTANCES))
def test_a_class_arrives_as_one_copy_and_returns_as_the_original(kind: str, made: str) -> None:
    here, there = Process(CLASSES), Process()
    first = there.take(here.send(made), "first")
    assert type(first) is not getattr(here.main, kind)
    assert type(there.take(here.send(made))) is type(first)
    assert there.take(here.send(kind)) is type(first)
    assert there.take(here.send(f"lambda: {kind}"))() is type(first)
    back = here.take(there.send("first"))
    assert type(back) is getattr(here.main, kind)
    assert here.take(there.send("type(first)")) is getattr(here.main, kind)


@pytest.mark.parametrize("kind", INSTANCES)
def test_the_receiver_uses_its_own_class_if_the_code_is_equal(kind: str) -> None:
    here, there = Process(CLASSES), Process("# the same, further down\n" + CLASSES)
    before = dict(vars(getattr(there.main, kind)))
    assert type(there.take(here.send(INSTANCES[kind]))) is getattr(there.main, kind)
    assert there.take(here.send(kind)) is getattr(there.main, kind)
    before.pop("__slotnames__", None)
    assert dict(vars(getattr(there.main, kind))) == before


def test_copies_of_classes_behave_as_their_originals() -> None:
    here, there = Process(CLASSES), Process()
    child = there.take(here.send("Child(2)"))
    assert child.mine() and child.again().mine() and child.of(3).x == 3 and child.plus(1, 2) == 3 and child.twice == 4
    assert there.take(here.send("Square()")).area() == 4
    with pytest.raises(TypeError, match="abstract"):
        there.take(here.send("Shape"))()
    assert there.take(here.send("Colour"))("b") is there.take(here.send("Colour.BLUE"))
    assert there.take(here.send("Setting()")) == there.take(here.send("Setting(0.1)"))
    net = there.take(here.send("Net()"))
    assert net(torch.ones(2)).shape == (2,) and len(list(net.parameters())) == 2
    x = torch.tensor(2.0, requires_grad=True)
    there.take(here.send("Cube")).apply(x).backward()
    assert x.grad == 12


def test_copies_of_typing_and_functools_objects_behave_as_their_originals() -> None:
    here, there = Process(CLASSES), Process()
    point = there.take(here.send("Point(1)"))
    assert point == (1, 2) and point.sum() == 3 and point._replace(x=5).sum() == 7 and point._fields == ("x", "y")
    assert repr(point) == "Point(x=1, y=2)" and not there.take(here.send("Far(1)")).far()
    assert there.take(here.send("Box"))(1).inside == 1 and there.take(here.send("Outer.Inner()")).x == 1
    late = there.take(here.send("Late()"))
    assert late.made is late.made == [1]
    kinds = there.take(here.send("Kinds()"))
    assert (kinds.name(1), kinds.name("a")) == ("int", "?")
    depth = there.take(here.send("depth"), "depth")
    assert depth([[[1]]]) == 3 and depth.__name__ == "depth"
    assert here.take(there.send("depth"))([[2]]) == 2
    metres = there.take(here.send("Metres"), "Metres")
    assert metres(1.5) == 1.5 and metres.__name__ == "Metres" and here.take(there.send("Metres")) is here.main.Metres
    assert there.take(here.send("Table"))(a=1) == {"a": 1} and there.take(here.send("Proto")).__name__ == "Proto"


def test_a_third_process_gets_one_class_directly_and_indirectly() -> None:
    here, one, two = Process(CLASSES), Process(), Process()
    one.take(here.send("Plain(1)"), "x")
    direct, through = two.take(here.send("Plain(2)")), two.take(one.send("x"))
    assert type(direct) is type(through)


def test_a_changed_class_is_a_new_class_and_old_instances_keep_theirs() -> None:
    here, there = Process("class A:\n    def f(self): return 1"), Process()
    old = there.take(here.send("A()"), "old")
    here.run("keep = A\nclass A:\n    def f(self): return 2")
    new = there.take(here.send("A()"))
    assert (old.f(), new.f()) == (1, 2) and type(old) is not type(new)
    assert type(here.take(there.send("old"))) is here.main.keep
    assert type(here.take(there.send("_"))) is here.main.A


def test_a_cell_that_runs_again_keeps_the_copy_of_its_class() -> None:
    source = "class A:\n    n = 1"
    here, there = Process(source), Process()
    old = there.take(here.send("A()"), "old")
    here.run("keep = A\n" + source)
    assert type(there.take(here.send("A()"))) is type(old)
    assert type(here.take(there.send("old"))) is here.main.A


def test_a_copy_of_a_class_is_updated_and_its_original_is_never_written() -> None:
    here, there = Process(CLASSES), Process()
    copy = type(there.take(here.send("Plain(1)"), "first"))
    here.run("Plain.count = 5\nPlain.again = lambda self: 'patched'")
    there.take(here.send("Plain(2)"))
    assert copy.count == 5 and there.main.first.again() == "patched"
    copy.count = 7
    again = here.main.Plain.again
    here.take(there.send("first"))
    assert here.main.Plain.count == 5 and here.main.Plain.again is again


def test_local_classes_are_distinguished_by_identity() -> None:
    here = Process(
        """
        import torch
        def make(weight):
            class Local:
                def get(self): return weight.item()
            return Local
        One, Two = make(torch.tensor(1)), make(torch.tensor(2))
        """
    )
    there = Process()
    one, two = there.take(here.send("(One(), Two())"))
    assert (one.get(), two.get()) == (1, 2) and type(one) is not type(two)
    assert type(there.take(here.send("One()"))) is type(one)
    assert type(here.take(there.send("_"))) is here.main.One


def test_a_known_class_is_not_created_again() -> None:
    here = Process(
        """
        class Base:
            made = []
            def __init_subclass__(cls): Base.made.append(cls.__name__)
        class Child(Base): pass
        """
    )
    there = Process()
    there.take(here.send("Child()"), "first")
    assert there.take(here.send("Child()")).made == ["Child"]


def test_a_class_that_keeps_its_own_bound_methods_is_sent() -> None:
    here = Process(
        """
        class Field:
            @classmethod
            def positive(cls, x): return x > 0
            def add(self, x): return self.start + x
            start = 2
        Field.checks = [Field.positive]
        Field.default = Field().add
        """
    )
    there = Process()
    field = there.take(here.send("Field"))
    assert field.checks[0](1) and not field.checks[0](-1) and field.checks[0].__self__ is field
    assert field.default(3) == 5 and type(field.default.__self__) is field
    returned = here.take(there.send("_.checks[0]"))
    assert returned.__self__ is here.main.Field and returned.__func__ is here.main.Field.positive.__func__


def test_a_function_with_a_module_that_only_an_attribute_finds_is_sent() -> None:
    here = Process(
        """
        import torch
        from torch.autograd.function import once_differentiable
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * x
            @staticmethod
            @once_differentiable
            def backward(ctx, grad): return 2 * ctx.saved_tensors[0] * grad
        """
    )
    x = torch.tensor(3.0, requires_grad=True)
    Process().take(here.send("Square")).apply(x).backward()
    assert x.grad == 6.0
    assert Process().take(here.send("torch._C._functions")) is torch._C._functions


def test_a_second_codec_of_a_process_has_the_original_class_and_does_not_change_it() -> None:
    class Local:
        def get(self) -> int:
            return 1

    method = Local.get
    other = Codec()
    arrived = other.decode_value(Codec().encode_value(Local())[0])
    assert type(arrived) is Local and Local.get is method


def test_unused_classes_are_released() -> None:
    codec, other = Codec(closures.CodeCache()), Codec(closures.CodeCache())

    class Local:
        pass

    copy = weakref.ref(type(codec.decode_value(other.encode_value(Local())[0])))
    original = weakref.ref(Local)
    codec.encode_value(Local)
    del Local
    gc.collect()
    assert copy() is None and original() is None


def test_tensors_in_closures_are_sent_in_the_table() -> None:
    weight = torch.ones(3)
    encoded = Codec().encode_value(lambda x: x * weight)
    assert [id(t) for t in encoded[1]] == [id(weight)]
    assert Codec().decode_value(encoded[0])(2).tolist() == [2, 2, 2]


def test_a_cached_function_is_sent_by_value_or_by_name() -> None:
    here = Process(
        """
        import functools
        @functools.lru_cache(maxsize=3)
        def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
        """
    )
    fib = Process().take(here.send("fib"))
    assert fib(30) == 832040 and fib.cache_info().maxsize == 3
    assert Codec().decode_value(Codec().encode_value(importable_and_cached)[0]) is importable_and_cached


@functools.lru_cache
def importable_and_cached() -> None:
    pass


def test_importable_code_is_sent_by_name() -> None:
    for value in (
        content_fingerprint,
        Codec,
        Codec.encode_value,
        errors.RpcError,
        torch.nn.Linear,
        collections.deque,
        abc.ABC,
    ):
        body = Codec().encode_value(value)[0]
        assert Codec().decode_value(body) is value
        assert len(body.payload) < 150


def test_a_function_that_its_module_has_replaced_is_sent_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("wrapped")
    exec("def f(): return 1", vars(module))
    monkeypatch.setitem(sys.modules, "wrapped", module)
    original, module.f = module.f, lambda: 2
    assert Codec().decode_value(Codec().encode_value(original)[0])() == 1


BASE = "def f(x, y=1, *, z=2):\n    return x in {1, 'a', 'b'}, [x for _ in ()]"


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ("\n\n# moved\n" + BASE, True),
        (BASE.replace("y=1", "y=2"), False),
        (BASE.replace("z=2", "z=3"), False),
        (BASE.replace("'b'", "'c'"), False),
        (BASE.replace("for _", "for x"), False),
        (BASE.replace("return x", "return y"), False),
        (BASE.replace("(x,", "(x: int,"), False),
        (BASE + "\nf.mark = 1", False),
        ("import functools\n" + BASE + "\nf = functools.wraps(f)(lambda *a: 1)", False),
    ],
)
def test_fingerprints_of_functions_are_equal_exactly_for_equal_code(other: str, same: bool) -> None:
    assert (content_fingerprint(Process(BASE).main.f) == content_fingerprint(Process(other).main.f)) is same


def test_fingerprints_distinguish_closures() -> None:
    def make(n: int) -> Any:
        return lambda: n

    assert content_fingerprint(make(1)) == content_fingerprint(make(1)) != content_fingerprint(make(2))


CLASS = """
class A(list):
    n = {'a': [1.5, None]}
    @property
    def p(self): return 1
    @classmethod
    def c(cls): return A
"""


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ("# moved\n" + CLASS, True),
        (CLASS.replace("1.5", "1.6"), False),
        (CLASS.replace("(list)", "(dict)"), False),
        (CLASS.replace("return 1", "return 2"), False),
        (CLASS.replace("return A", "return cls"), False),
        (CLASS.replace("classmethod", "staticmethod"), False),
        (CLASS + "\n    more = 1", False),
    ],
)
def test_fingerprints_of_classes_are_equal_exactly_for_equal_code(other: str, same: bool) -> None:
    assert (content_fingerprint(Process(CLASS).main.A) == content_fingerprint(Process(other).main.A)) is same


def run(script: Path, *arguments: str, **environment: str) -> str:
    """Run a program in its own process and directory, and return its output."""
    done = subprocess.run(
        [sys.executable, script.name, *arguments],
        cwd=script.parent,
        env=dict(os.environ) | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout


def test_fingerprints_are_equal_in_all_processes(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    show = (
        "from rpcbench.serialization.importable import content_fingerprint as fingerprint\n"
        "print(fingerprint(f), fingerprint(A))"
    )
    script.write_text("\n".join([BASE, CLASS, show]))
    outputs = {run(script, PYTHONHASHSEED=seed) for seed in ("1", "2")}
    assert len(outputs) == 1
    assert (
        outputs.pop() == f"{content_fingerprint(Process(BASE).main.f)} {content_fingerprint(Process(CLASS).main.A)}\n"
    )


SENDER = """
import pathlib, sys
from rpcbench.serialization.pickler import Codec
class Job:
    def __init__(self, n): self.n = n
    def run(self): return {factor} * self.n
def work(job): return job.run(), isinstance(job, Job), __name__
if __name__ == "__main__":
    body = Codec().encode_value((work, (Job(4),)))[0]
    pathlib.Path(sys.argv[1]).write_bytes(body.payload)
"""
RECEIVER = """
import pathlib, sys
from rpcbench.wire.messages import Body
from rpcbench.serialization.pickler import Codec
function, args = Codec().decode_value(Body(pathlib.Path(sys.argv[1]).read_bytes(), b"", []))
print(*function(*args), type(args[0]) is globals().get("Job"))
"""


@pytest.mark.parametrize("has_it", [False, pytest.param(True, marks=pytest.mark.long)])
def test_code_of_main_is_sent_between_two_programs(tmp_path: Path, has_it: bool) -> None:
    """The receiver has no such class, or has the same code in its own `__main__`."""
    (tmp_path / "sender.py").write_text(SENDER.format(factor=10))
    own = SENDER.format(factor=10).partition("if __name__")[0] if has_it else ""
    (tmp_path / "receiver.py").write_text(own + RECEIVER)
    assert run(tmp_path / "sender.py", "body") == ""
    assert run(tmp_path / "receiver.py", "body") == f"40 True __main__ {has_it}\n"


def test_a_global_that_cannot_be_pickled_is_named_with_its_function() -> None:
    here = Process("stream = (x for x in [])\ndef f(): return g()\ndef g(): return stream")
    with pytest.raises(SerializationError, match=r"^value \(its global 'g'\) \(its global 'stream'\): cannot pickle"):
        here.send("f")


GUARDED = """
import threading
lock, made = threading.Lock(), []
def get():
    with lock:
        made.append(1)
        return lock, made
"""


def test_a_lock_of_main_is_not_sent_and_the_receiver_uses_its_own() -> None:
    here, there, elsewhere = Process(GUARDED), Process(GUARDED), Process("import threading\nlock = threading.RLock()")
    got = there.take(here.send("get"))
    assert got is there.main.get and got() == (there.main.lock, there.main.made)
    copy = elsewhere.take(here.send("get"))
    assert copy()[0] is elsewhere.main.lock and copy()[1] is not here.main.made
    for kind in ("Lock", "RLock", "Barrier", "BoundedSemaphore", "local"):
        here.run(f"lock = threading.{kind}({2 if kind == 'Barrier' else ''})")
        told = f"a threading.{kind.removeprefix('Bounded')}, .* here has no 'lock': define it on this worker, too"
        with pytest.raises(errors.RpcError, match=told):
            Process().take(here.send("get"))


def test_a_class_that_two_threads_send_first_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local:
        pass

    sender, receiver = Codec(), Codec(closures.CodeCache())
    bodies: list[Any] = []

    def other_first(count: int) -> bytes:
        monkeypatch.setattr(closures, "os", os)
        other = threading.Thread(target=lambda: bodies.append(sender.encode_value(Local())))
        other.start()
        other.join()
        return os.urandom(count)

    monkeypatch.setattr(closures, "os", types.SimpleNamespace(urandom=other_first))
    bodies.append(sender.encode_value(Local()))
    one, two = (receiver.decode_value(body) for body, _ in bodies)
    assert type(one) is type(two)
