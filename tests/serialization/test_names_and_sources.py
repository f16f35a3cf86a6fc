"""What goes with code by value: its name in `__main__`, what its annotations name, and its source."""

from __future__ import annotations

import gc
import linecache
import pickle
import sys
import threading
import typing
import weakref

import cloudpickle
import pytest
import torch
from test_closures import Process

from rpcbench.base.errors import SerializationError
from rpcbench.serialization.tensor_types import CPU_ONLY, Route


def test_code_that_came_by_value_is_found_by_name_on_the_receiver() -> None:
    here = Process(
        """
        import multiprocessing, pickle
        class Net:
            class Part: pass
        def double(x): return 2 * x
        def work(): return pickle.loads(pickle.dumps((Net(), Net.Part(), double)))
        """
    )
    there = Process("def other(): return Net")
    work = there.take(here.send("work"))
    with there.inside() as main:
        net, part, double = work()
        kind = work.__globals__["Net"]
        assert type(net) is kind and type(part) is kind.Part and double is work.__globals__["double"]
        assert main.Net is kind and "Net" not in vars(main)  # type: ignore[attr-defined]
        with pytest.raises(NameError, match="'Net' is not defined"):
            main.other()  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match="module '__main__' has no attribute 'Missing'"):
            main.Missing  # type: ignore[attr-defined]
    assert there.codec.decode_value(there.send("__import__('__main__')")) is sys.modules["__main__"]


def test_every_pickler_sends_a_main_module_that_has_copies_by_its_name() -> None:
    here, there = Process("class Net: pass"), Process()
    net = there.take(here.send("Net"))
    with there.inside() as main:
        assert main.Net is net  # type: ignore[attr-defined]
        for pickler in (pickle, cloudpickle):
            assert pickler.loads(pickler.dumps(main)) is main


def test_what_main_defines_itself_comes_before_a_copy_and_the_latest_copy_before_an_older_one() -> None:
    here, there = Process("class Net: version = 1"), Process()
    first = there.take(here.send("Net"))
    here.run("class Net: version = 2")
    second = there.take(here.send("Net"), "second")
    assert (first.version, second.version, there.main.Net) == (1, 2, second)
    there.run("class Net: version = 0")
    here.run("class Net: version = 3")
    third = there.take(here.send("Net"), "third")
    assert (third.version, there.main.Net.version) == (3, 0)
    with there.inside(), pytest.raises(Exception, match="not the same object"):
        pickle.dumps(third)


def test_the_name_of_a_copy_keeps_nothing_alive() -> None:
    here, there = Process("class Net: pass\ndef make(): return Net()"), Process()
    copy = weakref.ref(type(there.take(here.send("make"))()))
    assert there.main.Net is copy()
    there.main._ = None
    gc.collect()
    assert copy() is None and not hasattr(there.main, "Net")


def test_annotations_that_are_text_arrive_with_what_they_name() -> None:
    here = Process(
        """
        from __future__ import annotations
        import dataclasses, typing, torch
        from typing import Optional
        data = torch.ones(3)
        @dataclasses.dataclass
        class Inner:
            width: int = 1
        @dataclasses.dataclass
        class Args:
            kind: typing.ClassVar[str] = "args"
            rate: float = 1.0
            inner: Optional[Inner] = None
            more: list["Args"] = dataclasses.field(default_factory=list)
            words: data = None
            missing: Nowhere = None
        def train(args: Args, x: "torch.Tensor", n: "a number of steps" = 1, on: "data" = None) -> Inner | None: pass
        """
    )
    there = Process()
    args = there.take(here.send("Args"))
    hints = args.__annotations__
    assert hints["rate"] is float and hints["more"] == list[args] and hints["kind"] == typing.ClassVar[str]
    assert hints["inner"].__args__[0].__name__ == "Inner" and (hints["words"], hints["missing"]) == ("data", "Nowhere")
    assert here.main.Args.__annotations__["rate"] == "float"
    assert args(rate=2.0) == args(rate=2.0) and here.take(there.send("_(2.0)")) == here.main.Args(2.0)
    train = there.take(here.send("train"))
    known = {name for name in train.__globals__ if not name.startswith("__")}
    assert known == {"Args", "Inner", "Optional", "torch"} and train.__globals__["Args"] is args


def test_the_source_of_a_cell_is_sent_once_to_each_worker_that_gets_its_code() -> None:
    here = Process()
    text, file = "def f(): return 1\ndef g(): return 2\n# END\n", "/nowhere/cell.py"
    exec(compile(text, file, "exec", dont_inherit=True), vars(here.main))
    with here.inside(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(linecache.cache, file, (len(text), None, text.splitlines(True), file))
        first, second = Route({}, "", files=set()), Route({}, "", files=set())
        with pytest.raises(SerializationError):
            here.codec.encode_value((here.main.f, threading.Lock()), route=first)  # nothing has been sent
        freed = torch.ones(1)
        freed.untyped_storage().resize_(0)
        with pytest.raises(SerializationError, match="was freed"):
            here.codec.encode_value((here.main.f, freed), route=first)  # nor here

        def has_source(value: object, route: Route) -> bool:
            return b"# END" in here.codec.encode_value(value, route=route)[0].payload

        assert [has_source(value, first) for value in (here.main.f, here.main.f, here.main.g)] == [True, False, False]
        assert has_source([here.main.f, here.main.g], second) and not has_source(here.main.f, CPU_ONLY)
        body = here.codec.encode_value(here.main.f, route=Route({}, "", files=set()))[0]
        patch.delitem(linecache.cache, file)
        assert Process().take(body)() == 1 and linecache.getlines(file)[-1] == "# END\n"
        del linecache.cache[file]
