"""The table of operators and their rules for names: the rows of torch's documentation, and further ones for layers.

Rule: one row for each operator, for all its forms: function, method, operator sign and in place. An operator without a
row takes no names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rpcbench.named import rules
from rpcbench.named.rules import NameRule, Row

# Positions of dimensions: argument 0 is the tensor.
DIM = ((1, "dim"),)
SECOND = ((2, "dim"),)
DIMS = ((1, "dims"),)
BOTH = ((1, "dim0"), (2, "dim1"))

_KEEPS = """
    abs abs_ acos acos_ asin asin_ atan atan_ bernoulli bfloat16 bitwise_not bool byte ceil char clamp cos cosh cpu cuda
    deg2rad detach digamma double erf erfc erfinv exp expm1 float floor frac half int log log10 log1p log2 logical_not
    long masked_fill neg normal rad2deg reciprocal round rsqrt short sigmoid sign sin sinh sqrt tan tanh to trunc
    type_as
"""
_KEEPS_ALONG = {"cumprod": DIM, "cumsum": DIM, "index_fill": DIM, "narrow": DIM, "chunk": SECOND, "split": SECOND}
_UNIFIES = "add add_ atan2 atan2_ div div_ eq ge gt le lt mul mul_ ne pow sub sub_"
_CONTRACTS = {
    "mm": rules.matrix_product_names, "mv": rules.matrix_vector_names, "bmm": rules.batched_product_names,
    "matmul": rules.batched_product_names,
    "addmm": rules.added_product_names, "addmm_": rules.added_product_names,
    "addmv": rules.added_vector_names, "addmv_": rules.added_vector_names,
}  # fmt: skip
_REMOVES = {  # operator -> position of keepdim
    "sum": 2, "mean": 2, "prod": 2, "median": 2, "logsumexp": 2, "std": 3, "var": 3, "std_mean": 3, "var_mean": 3,
}  # fmt: skip
_FACTORY = "empty ones zeros rand randn tensor"
_NONE = """
    bernoulli_ bitwise_not_ cauchy_ ceil_ clamp_ cos_ cosh_ data_ptr deg2rad_ detach_ device digamma_ dim dot
    element_size erf_ erfc_ erfinv_ exp_ expm1_ exponential_ fill_ floor_ frac_ get_device is_contiguous is_cuda
    is_floating_point is_leaf is_pinned is_shared is_signed is_sparse is_tensor item log10_ log1p_ log2_ log_
    log_normal_ logical_not_ manual_seed masked_fill_ ndim ndimension neg_ normal_ numel random_ reciprocal_
    requires_grad requires_grad_ round_ rsqrt_ sigmoid_ sign_ sin_ sinh_ sqrt_ tan_ tanh_ trunc_ uniform_ zero_
"""
_OWN = "align_as align_to flatten grad has_names names refine_names register_hook rename rename_ unflatten"
OWN_BUT_NONE = {"grad", "register_hook"}
"""Without names in torch's documentation; here gradients have the names of their tensor."""


def _documented_rows() -> Iterator[Row]:
    """Yield the rows of torch's documentation."""
    for name in _KEEPS.split():
        yield Row(name, NameRule.KEEPS, rules.input_names)
    for name, dims in _KEEPS_ALONG.items():
        yield Row(name, NameRule.KEEPS, rules.input_names, dims)
    yield Row("expand", NameRule.KEEPS, rules.expanded_names)
    for name in _UNIFIES.split():
        yield Row(name, NameRule.UNIFIES, rules.unified_names)
    yield Row("cat", NameRule.UNIFIES, rules.concatenated_names, DIM)
    for name, infer in _CONTRACTS.items():
        yield Row(name, NameRule.CONTRACTS, infer)
    for name, keepdim in _REMOVES.items():
        yield Row(name, NameRule.REMOVES, rules.reduction_names, DIM, keepdim)
    yield Row("mode", NameRule.REMOVES, rules.reduction_names, DIM, 2, default=-1)
    yield Row("kthvalue", NameRule.REMOVES, rules.reduction_names, SECOND, 3, default=-1)
    yield Row("select", NameRule.REMOVES, rules.reduction_names, DIM)
    yield Row("unbind", NameRule.REMOVES, rules.reduction_names, DIM, default=0)
    yield Row("squeeze", NameRule.REMOVES, rules.squeezed_names, DIM)
    yield Row("topk", NameRule.REMOVES, rules.input_names, SECOND)  # torch lists it here, but it keeps all dimensions
    yield Row("transpose", NameRule.PERMUTES, rules.transposed_names, BOTH)
    for name in _FACTORY.split():
        yield Row(name, NameRule.FACTORY, None)
    yield Row("empty_like", NameRule.FACTORY, rules.input_names)
    for name in _NONE.split():
        yield Row(name, NameRule.NONE, None)
    yield Row("index_fill_", NameRule.NONE, None, DIM)
    yield Row("size", NameRule.NONE, None, DIM)
    yield Row("stride", NameRule.NONE, None, DIM)
    yield Row("type", NameRule.NONE, rules.input_names)  # a text, or with a dtype a tensor
    yield Row("pow_", NameRule.NONE, rules.unified_names)
    for name in ("all", "any"):  # without a dimension; with one, dropping the names of the others would be silent
        yield Row(name, NameRule.NONE, rules.reduction_names, DIM, 2)
    for name in _OWN.split():
        yield Row(name, NameRule.NONE if name in OWN_BUT_NONE else NameRule.OWN, None)
    yield Row("masked_select", NameRule.OWN, rules.masked_select_names)
    yield Row("copy_", NameRule.OWN, rules.unified_names)
    yield Row("resize_", NameRule.OWN, rules.same_shape_names)
    yield Row("resize_as_", NameRule.OWN, rules.same_shape_names)


# From here on: operators that torch's documentation does not list, but that layers and programs use.
_MORE_KEEPS = """
    clone contiguous conj positive resolve_conj resolve_neg zeros_like ones_like rand_like randn_like full_like data
    real imag relu relu_ gelu silu elu leaky_relu tanhshrink softplus logsigmoid hardtanh relu6 selu mish softsign celu
    hardswish hardsigmoid threshold dropout alpha_dropout isnan isinf isfinite clamp_min clamp_max exp2 square absolute
    negative sgn sinc nan_to_num lgamma acosh asinh atanh pin_memory __neg__ __pos__ __abs__ __invert__ max_pool1d
    max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d dropout1d dropout2d
"""
_MORE_ALONG = {
    "softmax": DIM, "log_softmax": DIM, "softmin": DIM, "normalize": SECOND, "flip": DIMS, "roll": ((2, "dims"),),
    "logcumsumexp": DIM, "sort": DIM, "argsort": DIM, "cummax": DIM, "cummin": DIM,
}  # fmt: skip
_MORE_UNIFIES = """
    subtract multiply divide true_divide floor_divide remainder fmod maximum minimum fmax fmin rsub lerp lerp_ addcmul
    addcmul_ addcdiv addcdiv_ logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor greater
    greater_equal less less_equal not_equal isclose hypot logaddexp true_divide_ floor_divide_ remainder_ expand_as
    __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __rdiv__
    __itruediv__ __floordiv__ __rfloordiv__ __ifloordiv__ __mod__ __rmod__ __imod__ __pow__ __rpow__ __ipow__ __and__
    __rand__ __iand__ __or__ __ror__ __ior__ __xor__ __rxor__ __ixor__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
"""
_MORE_REMOVES = "amax amin argmax argmin nansum nanmean count_nonzero"
_MORE_NONE = """
    shape dtype layout itemsize nbytes is_nested is_quantized is_sparse_csr is_complex is_inference is_conj is_neg
    is_meta is_mkldnn is_mps is_xpu is_xla is_ipu is_maia is_mtia is_cpu output_nr _version _base grad_fn retains_grad
    retain_grad storage_offset untyped_storage storage tolist numpy __len__ __float__ __int__ __bool__ __index__
    __complex__ __hash__ __format__ __contains__ __array__ __dir__ __dlpack__ __dlpack_device__ equal allclose
    is_set_to is_same_size _is_view _backward_hooks _post_accumulate_grad_hooks is_nonzero is_coalesced
    register_post_accumulate_grad_hook share_memory_ dense_dim sparse_dim _foreach_norm _foreach_mul_ is_vulkan name
    _has_compatible_shallow_copy_type _is_zerotensor
"""
_LAYERS = {
    "linear": rules.linear_names, "conv1d": rules.convolution_names, "conv2d": rules.convolution_names,
    "conv3d": rules.convolution_names,
    "layer_norm": rules.layer_norm_names, "rms_norm": rules.layer_norm_names, "batch_norm": rules.channel_norm_names,
    "group_norm": rules.channel_norm_names, "instance_norm": rules.channel_norm_names, "einsum": rules.einsum_names,
    "embedding": rules.embedding_names,
    "scaled_dot_product_attention": rules.attention_names, "mse_loss": rules.loss_names, "l1_loss": rules.loss_names,
    "smooth_l1_loss": rules.loss_names, "huber_loss": rules.loss_names, "binary_cross_entropy": rules.loss_names,
    "binary_cross_entropy_with_logits": rules.loss_names, "cross_entropy": rules.class_loss_names,
    "nll_loss": rules.class_loss_names,
}  # fmt: skip


def _additional_rows() -> Iterator[Row]:
    """Yield the rows that torch's documentation does not have."""
    for name in _MORE_KEEPS.split():
        yield Row(name, NameRule.KEEPS, rules.input_names)
    for name, dims in _MORE_ALONG.items():
        yield Row(name, NameRule.KEEPS, rules.input_names, dims)
    for name in _MORE_UNIFIES.split():
        yield Row(name, NameRule.UNIFIES, rules.unified_names)
    for name in _MORE_REMOVES.split():
        yield Row(name, NameRule.REMOVES, rules.reduction_names, DIM, 2)
    for name in _MORE_NONE.split():
        yield Row(name, NameRule.NONE, None)
    yield Row("__matmul__", NameRule.CONTRACTS, rules.batched_product_names)
    yield Row("__rmatmul__", NameRule.CONTRACTS, rules.reversed_product_names)
    yield from (Row(name, NameRule.REMOVES, rules.extremum_names, DIM, 2) for name in ("max", "min"))
    yield Row("vector_norm", NameRule.REMOVES, rules.reduction_names, SECOND, 3)
    yield from (Row(name, NameRule.PERMUTES, rules.reversed_names) for name in ("t", "T"))
    yield from (Row(name, NameRule.PERMUTES, rules.matrix_transpose_names) for name in ("mT", "mH"))
    yield from (Row(name, NameRule.PERMUTES, rules.transposed_names, BOTH) for name in ("swapaxes", "swapdims"))
    yield Row("permute", NameRule.PERMUTES, rules.permuted_names, DIMS)
    yield Row("where", NameRule.UNIFIES, rules.where_names)
    yield Row("stack", NameRule.UNIFIES, rules.stacked_names)
    yield Row("unsqueeze", NameRule.OWN, rules.unsqueezed_names)
    yield Row("view_as", NameRule.OWN, rules.same_shape_names)
    yield Row("data=", NameRule.OWN, rules.replaced_data_names)
    yield Row("__getitem__", NameRule.OWN, rules.indexed_names)
    yield Row("__setitem__", NameRule.OWN, rules.assigned_names)
    for name, infer in _LAYERS.items():
        yield Row(name, NameRule.OWN, infer)


def operator_rows() -> dict[str, Row]:
    """Return all rows by name; where both lists have an operator, the documented row counts."""
    found = {row.name: row for row in _documented_rows()}
    for row in _additional_rows():
        if row.name not in found:
            found[row.name] = replace(row, documented=False)
    return found


ROWS = operator_rows()
