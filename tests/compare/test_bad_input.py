"""Names that do not match, NaN, meshes that do not fit, errors and Ctrl-C: each is told, and workers stay usable."""

from __future__ import annotations

import os
import re
import signal
import threading
from functools import partial

import pytest
import torch.distributed as dist
from test_compare import RIGHT, draw_rows, fail_on_rank, make_copy, make_model, step, step_on_rows
from torch import nn
from worlds import until

import rpcbench
from rpcbench.compare.capture import Catalog, ModuleFacts
from rpcbench.compare.compare_runs import Runs
from rpcbench.compare.names import describe_unmatched

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def usable(four):
    """After each test the workers keep nothing, and the right program is right."""
    yield
    count = "from rpcbench.launch import compare_programs\nlen(compare_programs.captures)"
    assert set(four.run("all", count).values()) == {0}
    assert four.compare(**RIGHT).ok


# -- names
class Named(nn.Module):
    """The layers of the model under other names."""

    def __init__(self, *names):
        super().__init__()
        self.names = names
        for name, layer in zip(names, make_model(), strict=True):
            self.add_module(name, layer)

    def forward(self, x):
        for name in self.names:
            x = getattr(self, name)(x)
        return x


def make_named():
    return Named("encoder", "act", "head")


def make_misnamed(mesh):
    return Named("encodr", "act", "output")


class Parts(nn.Module):
    """Layers without a forward of the whole."""

    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


def make_part(mesh):
    return Parts(encoder=make_model()[0])


def make_all_misnamed(mesh):
    return Parts(encodr=make_model()[0])


def step_part(model, mesh):
    (layer,) = model.children()
    loss = layer(draw_rows()).square().mean()
    loss.backward()
    return loss


def test_names_that_do_not_match_are_named_with_the_nearest_one(four):
    report = four.compare(reference=(make_named, step), parallel=(make_misnamed, step_on_rows))
    assert report.unmatched == (
        "Not compared, as no rank has anything of this name: encoder (did you mean encodr, which the ranks have?), head"
    )
    headline = str(report).splitlines()[0]
    assert headline.startswith("Right in what was compared: ") and headline.endswith(f" {report.unmatched}.")
    wrong = four.compare(reference=(make_named, step), parallel=(make_part, step_part))
    assert wrong.unmatched.endswith("name: act, head") and wrong.unmatched in str(wrong).splitlines()[0]
    assert four.compare(**RIGHT).unmatched == ""


def test_a_list_of_modules_is_there_if_a_member_is():
    def catalog(*names):
        return Catalog({}, {name: ModuleFacts("Linear", ()) for name in names}, {}, {})

    whole = catalog("", "layers", "layers.0", "layers.1", "head", "head.norm", "tail")
    ranks = [catalog("", "layers.0"), catalog("", "layers.1", "haed", "haed.norm")]
    said = "Not compared, as no rank has anything of this name: head (did you mean haed, which the ranks have?), tail"
    assert describe_unmatched(whole, ranks) == said
    assert describe_unmatched(whole, [*ranks, catalog("head", "head.norm", "tail")]) == ""


def test_two_models_without_a_name_in_common_are_refused(four):
    text = r"must have the same names\. Not compared, .* act, encoder \(did you mean encodr, .*, head"
    with pytest.raises(rpcbench.CompareError, match=text):
        four.compare(reference=(make_named, step), parallel=(make_all_misnamed, step_part))


# -- numbers that are not finite
def spoil(model, place, change):
    model[place].register_forward_hook(lambda module, args, output: change(output))
    return model


def make_nan_on_rank(mesh):
    return spoil(make_model(), 1, lambda x: x / 0 * 0) if mesh.get_local_rank() == 2 else make_model()


def make_infinite_on_rank(mesh):
    return spoil(make_model(), 2, lambda x: x / 0) if mesh.get_local_rank() == 1 else make_model()


def step_with_nan_loss(model, mesh):
    loss = model(draw_rows()).square().mean() * (float("nan") if mesh.get_local_rank() == 3 else 1)
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("parallel", "phase", "name", "text"),
    [
        ((make_nan_on_rank, step_on_rows), "forward", "1", "NaN is born here, on rank 2: the reference has none here"),
        ((make_infinite_on_rank, step_on_rows), "forward", "2", "infinity is born here, on rank 1: the reference has "),
        ((make_copy, step_with_nan_loss), "loss", "", "NaN is born here, on rank 3: the reference has none here"),
    ],
)
def test_a_number_that_is_not_finite_is_named_where_it_is_born(four, parallel, phase, name, text):
    first = four.compare(reference=(make_model, step), parallel=parallel).first
    assert (first.phase, first.name) == (phase, name) and first.cause.startswith(text)


def step_on_nan(model):
    loss = model(draw_rows() * float("nan")).square().mean()
    loss.backward()
    return loss


def make_nan():
    return spoil(make_model(), 1, lambda x: x / 0 * 0)


def make_masked(mesh=None):
    """The first row of a result is NaN, and the next module does not use it."""
    def replace_row(value, x):
        return nn.functional.pad(x[1:], (0, 0, 1, 0), value=value)

    return spoil(spoil(make_model(), 0, partial(replace_row, float("nan"))), 1, partial(replace_row, 0.0))


@pytest.mark.parametrize("parallel", [RIGHT["parallel"], (make_copy, step)])
@pytest.mark.parametrize(
    ("reference", "place"), [((make_model, step_on_nan), "input"), ((make_nan, step), "forward 1")]
)
def test_a_reference_that_is_nan_is_refused(four, reference, parallel, place):
    with pytest.raises(rpcbench.CompareError, match=f"the reference itself has NaN, first at {place}.*in one process"):
        four.compare(reference=reference, parallel=parallel)


def test_numbers_that_are_nan_in_the_reference_and_used_by_nothing(four):
    assert four.compare(reference=(make_masked, step), parallel=(make_masked, step)).ok
    first = four.compare(reference=(make_masked, step), parallel=(make_copy, step)).first
    assert (first.phase, first.name) == ("forward", "0") and first.cause.startswith("the reference itself has NaN here")


# -- meshes
@pytest.mark.parametrize(
    ("mesh", "kind", "text"),
    [
        (4, TypeError, r"mesh gives each dimension a name and a size, as mesh=\{'dp': 2, 'tp': 2\}, and not 4"),
        ([2, 2], TypeError, r"and not \[2, 2\]"),
        ({1: 4}, ValueError, "1 cannot be a name in a mesh"),
        ({"dp": "4"}, TypeError, "dp='4': the size of a dimension is a whole number"),
        ({"dp": 0, "tp": 4}, ValueError, "dp=0: each dimension of a mesh has at least one worker"),
        ({"dp": 2, "tp": 3}, ValueError, "has 6 places, and this cluster has 4 workers"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(four, mesh, kind, text):
    with pytest.raises(kind, match=text):
        four.compare(**RIGHT, mesh=mesh)


# -- errors and Ctrl-C
def fail_to_make(mesh):
    if mesh.get_local_rank() == 1:
        raise LookupError("no such checkpoint")
    return make_model()


@pytest.mark.parametrize(
    ("parallel", "kind", "place"),
    [
        ((fail_to_make, step_on_rows), LookupError, r"rank 1 \(worker2\) failed in step_on_rows: LookupError: no such"),
        ((make_copy, fail_on_rank), ArithmeticError, r"rank 2 \(worker3\) failed in fail_on_rank: ArithmeticError"),
    ],
)
def test_the_error_of_a_rank_is_told_as_by_spmd(four, parallel, kind, place):
    with pytest.raises(kind) as caught:
        four.compare(**{**RIGHT, "parallel": parallel})
    assert len(caught.value.__notes__) == 3 and all(re.search(place, note) for note in caught.value.__notes__)


def interrupt_in_reference(model):
    signal.raise_signal(signal.SIGINT)
    return step(model)


def test_ctrl_c_while_the_ranks_run(four, tmp_path):
    def wait_for_nobody(model, mesh):
        (tmp_path / str(dist.get_rank())).touch()
        dist.recv(draw_rows(), (dist.get_rank() + 1) % 4)  # no rank sends

    def press():
        until(lambda: len([*tmp_path.iterdir()]) == 4)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        four.compare(**{**RIGHT, "parallel": (make_copy, wait_for_nobody)})
    presser.join()


def test_ctrl_c_while_the_reference_runs(four):
    with pytest.raises(KeyboardInterrupt):
        four.compare(**{**RIGHT, "reference": (make_model, interrupt_in_reference)})


def test_ctrl_c_while_values_are_compared(four, monkeypatch):
    read_values, calls = Runs.read_values, []

    def read(runs, key, call):
        calls.append(key)
        if len(calls) == 7:
            signal.raise_signal(signal.SIGINT)
        return read_values(runs, key, call)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Runs, "read_values", read)
        four.compare(**RIGHT)
    assert len(calls) == 7
