"""spmd_types: functions of ranks whose types are checked, placements as annotations, and what each instrument finds."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import corpus_data
import corpus_ranks
import corpus_tensor
import parts
import pytest
import spmd_types
import torch
import torch.distributed as dist
from corpus_tensor import RowLinearBiased, net_with_last, step_net_on_ranks
from parts import NET, make_net, step_net
from spmd_types import I, P, R, S, V, rules
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

pytestmark = pytest.mark.process

PAGE = Path(__file__).parents[2] / "docs" / "types.md"
TWO = ["worker1", "worker2"]


# -- a function of ranks
def product_of_pieces(reduced):
    """A layer whose inputs are cut: each rank has a summand of the product."""
    x, weight = torch.randn(4, 2), torch.randn(2, 4)
    spmd_types.assert_type(x, {"rank": V})
    spmd_types.assert_type(weight, {"rank": V})
    product = spmd_types.assert_type(x @ weight, {"rank": P})
    if reduced:
        product = spmd_types.all_reduce(product, "rank", src=P, dst=R)
    return functional.gelu(product)


def test_a_function_of_a_partial_sum_that_is_not_linear_is_an_error(four):
    with pytest.raises(spmd_types.SpmdTypeError, match="non-linear of a partial sum"):
        four.spmd(product_of_pieces, False, typecheck=True, workers=TWO)
    one, other = four.spmd(product_of_pieces, True, typecheck=True, workers=TWO)
    assert torch.equal(one, other) and one.shape == (4, 4)
    assert four.spmd(spmd_types.is_type_checking, typecheck=True, workers=TWO) == [True, True]
    assert four.spmd(spmd_types.is_type_checking, workers=TWO) == [False, False]


def rank_of_all():
    x = torch.ones(2)
    spmd_types.assert_type(x, {"rank": R})
    return dist.get_rank()


def test_ranks_of_another_number_are_a_mesh_of_their_own(four):
    assert four.spmd(rank_of_all, typecheck=True, workers=TWO) == [0, 1]
    assert four.spmd(rank_of_all, typecheck=True) == [0, 1, 2, 3]


def test_a_package_that_is_not_there_is_named_with_its_extra(four, monkeypatch):
    hide = "import sys; sys.modules['spmd_types.checker'] = None"
    show = "del sys.modules['spmd_types.checker']"
    four.run("worker2", hide)
    try:
        with pytest.raises(ModuleNotFoundError, match="pip install spmd_types"):
            four.spmd(rank_of_all, typecheck=True, workers=TWO)
    finally:
        four.run("worker2", show)
    report = four.compare(reference=NET, parallel=(corpus_tensor.cut_net, step_net_on_ranks), mesh={"tp": 4})
    monkeypatch.setitem(sys.modules, "spmd_types.checker", None)
    for deed in (report.annotations, lambda: four.spmd(rank_of_all, typecheck=True)):
        with pytest.raises(ModuleNotFoundError, match="types of ranks need the package spmd_types here"):
            deed()


# -- both instruments on programs of the corpus
def zero_bias(model):
    """A bias that is zero at first does not show that it is added on each rank."""
    nn.init.zeros_(model.blocks[1].down.bias)
    return model


def make_zero():
    return zero_bias(make_net())


def net_with_zero_bias(mesh):
    return zero_bias(parts.cut_net(mesh))


def net_with_zero_bias_on_each(mesh):
    return zero_bias(net_with_last(RowLinearBiased, mesh))


PROGRAMS = {
    program.name: (program.reference, program.parallel, program.wrong, program.mesh)
    for program in (*corpus_tensor.PROGRAMS, *corpus_ranks.PROGRAMS, *corpus_data.PROGRAMS)
}
PROGRAMS["zero_bias_on_each_rank"] = (
    (make_zero, step_net), (net_with_zero_bias, step_net_on_ranks),
    (net_with_zero_bias_on_each, step_net_on_ranks), {"tp": 4},
)  # fmt: skip
ROWS = re.findall(r"^\| `(\w+)` \|.*\| (yes|no) \| (yes|no) \|$", PAGE.read_text(), re.MULTILINE)


def declare_collectives():
    """Say the types of the corpus' own collectives, as spmd_types asks of an autograd function."""
    parts.CopyTo.spmd_typecheck = staticmethod(lambda *, x, group: rules.reinterpret(x, group, src=I, dst=R))
    parts.SumOver.spmd_typecheck = staticmethod(lambda *, x, group: rules.all_reduce(x, group, src=P, dst=I))
    parts.SumBothWays.spmd_typecheck = staticmethod(lambda *, x, group: rules.all_reduce(x, group, src=P, dst=R))


def typed(function, types):
    """The function, whose results get types: those that its operations do not show."""

    def call(*args, **kwargs):
        with spmd_types.no_typecheck():
            found = function(*args, **kwargs)
        return spmd_types.assert_type(found, types)

    return call


def average_of_summands(average):
    """The function that averages gradients, which have types before: parameters of type R leave summands."""

    def call(model, group):
        for parameter in model.parameters():
            spmd_types.assert_type(parameter.grad, {group: P})
        average(model, group)

    return call


def run_typed(pair, sizes, types):
    """Run a program of the corpus in the global mode, where S(dim) follows the pieces through all operations."""
    make, step = pair
    (dim,) = sizes
    with spmd_types.no_typecheck():
        declare_collectives()
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=(dim,))
        model = make(mesh)
    with pytest.MonkeyPatch.context() as patch, spmd_types.set_current_mesh(mesh):
        patch.setattr(parts, "rows_of", typed(parts.rows_of, {dim: R}))
        patch.setattr(parts, "share", typed(parts.share, {dim: S(0)}))
        patch.setattr(parts, "average_gradients", average_of_summands(parts.average_gradients))
        if dim == "dp":  # the loss of a rank is a summand of the loss
            patch.setattr(parts, "loss_of", typed(parts.loss_of, {dim: P}))
        for name, parameter in model.named_parameters():
            spmd_types.assert_type(parameter, types[name])
        with spmd_types.checker.typecheck(local=False):
            step(model, mesh)


def finds_wrong_types(cluster, pair, sizes, types):
    try:
        cluster.spmd(run_typed, pair, sizes, types, typecheck=True)
    except spmd_types.SpmdTypeError:
        return True
    return False


@pytest.mark.parametrize(("name", "by_compare", "by_types"), ROWS)
def test_the_page_says_what_each_instrument_finds(four, name, by_compare, by_types):
    reference, right, wrong, sizes = PROGRAMS[name]
    report = four.compare(reference=reference, parallel=right, mesh=sizes)
    types = report.annotations()
    assert report.ok and not finds_wrong_types(four, right, sizes, types)
    assert four.compare(reference=reference, parallel=wrong, mesh=sizes).ok == (by_compare == "no")
    assert finds_wrong_types(four, wrong, sizes, types) == (by_types == "yes")


def test_the_page_has_programs_that_either_instrument_misses():
    assert len(ROWS) >= 7 and {row[1:] for row in ROWS} == {("yes", "yes"), ("yes", "no"), ("no", "yes")}


# -- annotations
def test_layouts_of_two_dimensions_are_types(four):
    program = (parts.cut_net, parts.step_by_hand)
    types = four.compare(reference=NET, parallel=program, mesh={"dp": 2, "tp": 2}).annotations()
    assert types["blocks.0.up"] == {"dp": S(0), "tp": S(1)} and types["blocks.0.down"] == {"dp": S(0), "tp": I}
    assert types["blocks.0.up.weight"] == {"dp": R, "tp": S(0)} and types["blocks.0.down.weight"]["tp"] == S(1)
    assert types["head.bias"] == {"dp": R, "tp": I}


def test_cuts_that_one_letter_cannot_say_are_varying(four):
    program = next(each for each in corpus_tensor.PROGRAMS if each.name == "fused_weight_cut_as_block")
    types = four.compare(reference=program.reference, parallel=program.parallel, mesh=program.mesh, workers=TWO)
    assert types.annotations()["blocks.0.attention.qkv.weight"] == {"tp": V}
