"""Values are split into parts of almost equal size, and the parts of all workers become one value again."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpcbench import named
from rpcbench.cells.partition import combine_values, split


class Table:
    """Like a pandas DataFrame: `[]` selects columns, `iloc` rows."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> Any:
        raise KeyError(column)

    @property
    def iloc(self) -> Any:
        class Rows:
            def __getitem__(_, rows: slice) -> Table:  # noqa: N805
                return Table(self.rows[rows])

        return Rows()


def by_worker(*values: Any) -> dict[str, Any]:
    return {f"worker{number}": value for number, value in enumerate(values, 1)}


@given(total=st.integers(1, 60), count=st.integers(1, 12))
def test_parts_follow_one_another_and_differ_by_at_most_one(total: int, count: int) -> None:
    if total < count:
        with pytest.raises(ValueError, match=f"x has {total} row.*, and there are {count} workers: name fewer workers"):
            split("x", range(total), count)
        return
    parts = split("x", range(total), count)
    assert [number for part in parts.values for number in part] == [*range(total)]
    assert parts.sizes == [len(part) for part in parts.values] == sorted(parts.sizes, reverse=True)
    assert parts.sizes[0] - parts.sizes[-1] <= 1 and len(parts.sizes) == count
    assert bool(parts.size_report("x")) == (total % count != 0)


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3), count=st.integers(1, 4), data=st.data())
def test_tensors_and_arrays_are_whole_again_after_cat(sizes: list[int], count: int, data: Any) -> None:
    dim = data.draw(st.integers(-len(sizes), len(sizes) - 1))
    whole = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    if sizes[dim] < count:
        return
    assert torch.equal(combine_values("x", by_worker(*split("x", whole, count, dim).values), "cat", dim), whole)
    array = combine_values("x", by_worker(*split("x", whole.numpy(), count, dim).values), "cat", dim)
    assert numpy.array_equal(array, whole.numpy())


@pytest.mark.parametrize("whole", [[1, 2, 3], (1, 2, 3), "abc", b"abc"])
def test_sequences_keep_their_type(whole: Any) -> None:
    parts = split("x", whole, 2)
    assert parts.values == [whole[:2], whole[2:]] and parts.size_report("x") == "x: 3 rows as 2, 1"
    assert combine_values("x", by_worker(*parts.values)) == whole


def test_rows_of_tables_are_split_by_position() -> None:
    first, second = split("t", Table([1, 2, 3]), 2).values
    assert (first.rows, second.rows) == ([1, 2], [3])


def test_a_part_of_a_tensor_is_a_view_with_its_names() -> None:
    whole = named.rand(4, 6, names=("N", "C"))
    parts = split("x", whole, 4, "C")
    assert [part.names for part in parts.values] == [("N", "C")] * 4
    assert parts.size_report("x") == "x: 6 along dimension C as 2, 2, 1, 1"
    assert parts.values[1].data_ptr() == whole[:, 2:].data_ptr()
    again = combine_values("x", by_worker(*parts.values), "cat", "C")
    assert again.names == ("N", "C") and torch.equal(again.rename(None), whole.rename(None))
    assert split("x", whole, 2).values[0].names == ("N", "C")
    assert combine_values("x", by_worker(*split("x", whole, 2).values)).names == ("N", "C")


def test_values_are_stacked_listed_and_added_up() -> None:
    tensors = by_worker(torch.ones(2), torch.full((2,), 2.0))
    assert torch.equal(combine_values("y", tensors, "stack", 1), torch.tensor([[1.0, 2.0], [1.0, 2.0]]))
    assert torch.equal(combine_values("y", tensors, "sum"), torch.tensor([3.0, 3.0]))
    assert combine_values("y", tensors, "list") == [*tensors.values()]
    assert torch.equal(combine_values("y", by_worker(0.5, 2), "stack"), torch.tensor([0.5, 2.0]))
    assert combine_values("y", by_worker(1, 2.5), "sum") == 3.5
    assert numpy.array_equal(combine_values("y", by_worker(numpy.float32(1), numpy.float32(2)), "stack"), [1, 2])
    assert numpy.array_equal(combine_values("y", by_worker(numpy.ones(2), numpy.ones(2)), "sum"), [2, 2])
    assert combine_values("y", by_worker([1], [2, 3]), "list") == [[1], [2, 3]]


def test_one_worker_is_enough() -> None:
    assert split("x", [1, 2], 1).values == [[1, 2]]
    alone = by_worker(torch.ones(2))
    assert (
        torch.equal(combine_values("y", alone), torch.ones(2))
        and combine_values("y", alone, "list")[0] is alone["worker1"]
    )
    assert combine_values("y", alone, "stack").shape == (1, 2) and torch.equal(
        combine_values("y", alone, "sum"), torch.ones(2)
    )


@pytest.mark.parametrize(
    ("value", "dim", "error", "told"),
    [
        (torch.ones(2, 3), 2, ValueError, r"x is float32\[2, 3\], which has no dimension 2 to split along"),
        (torch.ones(()), 0, ValueError, r"x is float32\[\], which has no dimension 0"),
        (torch.ones(2), "N", ValueError, "no dimension 'N'"),
        (named.rand(2, names=("N",)), "C", ValueError, "no dimension 'C'"),
        (numpy.ones((2, 3)), 5, ValueError, r"x is float64\[2, 3\], which has no dimension 5"),
        (numpy.ones(2), "N", ValueError, "no dimension 'N'"),
        (torch.ones(1, 3), 0, ValueError, "x has 1 row, and there are 2 workers: name fewer workers"),
        (torch.ones(3, 1), 1, ValueError, "x has size 1 along dimension 1, and there are 2 workers"),
        ([1, 2], 1, ValueError, "x has type list, without a dimension 1: leave the dimension out"),
        ({"a": 1, "b": 2}, 0, TypeError, "x has type dict: only a tensor, an array or a sequence can be split"),
        ({1, 2}, 0, TypeError, "x has type set: only"),
        (7, 0, TypeError, "x has type int: only"),
        (torch.nn.Linear(2, 2), 0, TypeError, "x has type Linear: only"),
    ],
)
def test_a_value_that_cannot_be_split_is_refused(value: Any, dim: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        split("x", value, 2, dim)


class Columns(list[int]):
    """A sequence whose slices are something else, as those of datasets are."""

    def __getitem__(self, at: Any) -> Any:
        return {"column": super().__getitem__(at)} if isinstance(at, slice) else super().__getitem__(at)


def test_a_sequence_with_slices_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="x has type Columns, whose slices are no sequences of the items"):
        split("x", Columns([1, 2, 3, 4]), 2)


@pytest.mark.parametrize(
    ("values", "how", "told"),
    [
        ((torch.ones(2, 3), torch.ones(2, 4)), "cat", "y cannot be concatenated along dimension 0: worker1 has"),
        ((torch.ones(2), torch.ones(1)), "sum", r"added up: worker1 has float32\[2\], worker2 has float32\[1\]. Bring"),
        ((torch.ones(2), torch.ones(3)), "stack", "y cannot be stacked along dimension 0"),
        ((torch.tensor(1.0), torch.tensor(2.0)), "cat", r"concatenated along dimension 0: worker1 has float32\[\]"),
        ((numpy.ones(2), numpy.ones((2, 2))), "cat", r"worker1 has float64\[2\], worker2 has float64\[2, 2\]"),
        ((torch.ones(2), numpy.ones(2)), "cat", r"worker1 has float32\[2\], worker2 has float64\[2\]"),
        (([1], (2,)), "cat", "y cannot be concatenated: worker1 has list, worker2 has tuple. Bring it back as a list"),
        ((1.0, 2.0), "cat", "y cannot be concatenated: worker1 has float"),
        (({"a": 1}, {"a": 2}), "sum", "y cannot be added up: worker1 has dict"),
        ((1, 2), "concat", "values cannot be combined by 'concat': .*cat, stack, list, sum"),
    ],
)
def test_values_that_do_not_fit_are_refused_with_their_layouts(values: Any, how: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        combine_values("y", by_worker(*values), how)


def test_a_dimension_by_name_needs_named_tensors() -> None:
    with pytest.raises(ValueError, match="concatenated along dimension N: worker1 has float32"):
        combine_values("y", by_worker(torch.ones(2), torch.ones(2)), "cat", "N")
    with pytest.raises(ValueError, match="stacked along dimension N"):
        combine_values("y", by_worker(torch.ones(2), torch.ones(2)), "stack", "N")
