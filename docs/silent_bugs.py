"""The kinds of silent bugs: the list of which `docs/make_gallery.py` makes the pages of docs/silent-bugs.

Each program of the corpus in tests/compare is of one kind. The page of a kind has a short program of its own, in
docs/silent-bugs/programs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of mistakes.

    Args:
        name: Of its page, its program, its picture and its record.
        title: Of the page.
        line: On the page of all kinds.
        words: The mistake, and why nobody sees it.
        curves: What the reader sees in the two curves.
        mesh: The ranks that run the program.
        first: Phase and name of the first difference.
        cause: Words of the cause that the report gives.
        corpus: The programs of the corpus that are of this kind.
        optimizer: Of the curves, with its rate; None where the program has its own.
    """

    name: str
    title: str
    line: str
    words: str
    curves: str
    mesh: dict[str, int]
    first: tuple[str, str]
    cause: str
    corpus: tuple[str, ...]
    optimizer: tuple[str, float] | None = ("Adam", 0.01)


DP4, TP2 = {"dp": 4}, {"tp": 2}
KINDS = (
    # -- rows, parameters and random numbers
    Kind(
        "same-rows",
        "The same rows on every rank",
        "Nothing cuts the batch, so four ranks do the work of one.",
        "No sampler cuts the data, so each rank reads the same rows. Equal gradients have the right mean, and no "
        "number in the log is odd. Three quarters of the rows are never read.",
        "The wrong curve is the lower one, as its model has fewer rows to learn.",
        DP4, ("forward", "0"), "work on the same rows",
        ("same_rows_on_all_ranks", "rows_of_shard_alone", "dealt_rows_of_rank_0"),
    ),
    Kind(
        "other-start",
        "Other parameters at the start",
        "Each rank makes its model with a seed of its own.",
        "Each rank sets a seed of its own, as it should for rows and dropout, but before it makes the model. The "
        "loop averages gradients, and never parameters, so four different models take the same steps. DDP sends the "
        "parameters of rank 0 to all ranks at the start; FSDP, and a loop by hand, do not.",
        "The four models learn from each other's gradients, and the mean of their losses even ends below the right "
        "one.",
        DP4, ("initial", "0.weight"), "different initial values",
        (
            "seed_of_each_rank", "head_of_each_rank", "stale_weight_on_rank_2", "gpipe_stage_seeded_by_rank",
            "row_of_layers_seeded_by_rank", "blocks_swapped", "weight_transposed", "weight_of_wide_piece",
            "piece_of_first_rank", "pieces_of_one_seed",
        ),
    ),
    Kind(
        "one-rank-differs",
        "One rank computes another function",
        "One host has another version of a library, or an older configuration.",
        "One of four hosts has another version of a library, in which GELU is an approximation. Its results differ "
        "in the fourth digit. Averages mix its gradients with those of the others, so that no rank looks special "
        "afterwards.",
        "The curves lie on each other.",
        DP4, ("forward", "1"), "on rank 3 alone",
        ("other_eps_on_rank_3",),
    ),
    Kind(
        "other-option",
        "An option that only one program has",
        "The loss on the ranks has no label smoothing.",
        "The loop in one process smooths its labels. The loop for many ranks was written later, and calls the loss "
        "with its default options. Outputs are right, all shapes are right, and the loss is a good one: of another "
        "task. The same happens to the momentum of a norm, to padding that one loss ignores, to weights of classes, "
        "and to a model that an evaluation has left in eval().",
        "The wrong curve is the lower one, as a loss without smoothing can go to zero.",
        DP4, ("loss", ""), "label smoothing of 0, the reference one of 0.1",
        (
            "label_smoothing_left_out", "padding_not_ignored", "class_weights_left_out", "temperature_left_out",
            "criterion_of_other_option", "balance_left_out", "momentum_of_batch_norm", "batch_norm_in_eval",
            "experts_of_less_capacity", "optimizer_made_in_each_step", "residual_of_norm", "norm_without_weight",
        ),
    ),
    Kind(
        "dropout-masks",
        "The same dropout mask on every rank",
        "One seed for all ranks is right for the model, and wrong for dropout.",
        "All ranks set the same seed, so that their models are equal, and then dropout draws the same mask on each "
        "of them, for other rows. The batch has a quarter of the masks that it should have. All shapes are right, "
        "and each mask alone is a good one.",
        "Both curves are random, and neither looks better.",
        DP4, ("forward", "2"), "same random dropout mask",
        (
            "dropout_same_on_rows", "dropout_differs_in_tensor_parallel", "dropout_of_other_rate", "dropout_in_eval",
            "dropout_in_train", "dropout_same_on_pieces", "noise_of_one_seed", "noise_of_checkpoint",
        ),
    ),
    # -- forward
    Kind(
        "sum-left-out",
        "A sum left out of the forward pass",
        "Each rank takes its summand for the whole.",
        "A layer is cut along its inputs, so each rank computes a summand, and nothing adds the summands up. All "
        "shapes are right, and each rank has a smaller network, which learns on its own. The ranks save their pieces "
        "as one model, which never ran.",
        "The wrong curve falls more slowly. Without the right one beside it, it is the curve of a good run.",
        TP2, ("forward", "2"), "a reduction is left out",
        (
            "row_parallel_without_reduce", "rowwise_left_partial", "vocabulary_embedding_without_reduce",
            "local_embedding", "autocast_row_parallel_without_reduce", "penalty_of_each_rank",
        ),
    ),
    Kind(
        "bias-on-each-rank",
        "A bias added on each rank",
        "The sum over the ranks has the bias once for each of them.",
        "A layer is cut along its inputs, and each rank adds the bias before the sum over the ranks: it counts twice "
        "on two ranks. Training makes up for it, with a smaller bias. The saved model is right on two ranks, and "
        "wrong on four or on one.",
        "The curves almost lie on each other. The wrong one is a little lower, as its bias learns at twice the rate.",
        TP2, ("forward", "2"), "added 2 times",
        ("row_parallel_bias_on_each_rank", "residual_on_each_rank", "residual_before_sum"),
    ),
    Kind(
        "cut-in-the-wrong-place",
        "A weight cut in the wrong place",
        "Queries, keys and values are one weight, and each rank takes a block of it.",
        "One weight holds queries, keys and values, and each rank takes one block of its rows: rank 0 has all "
        "queries and half of the keys, and takes the first third of that for queries. A model that is trained so "
        "from the start is as good as another. A model that comes from a file, or goes to another number of ranks, "
        "is scrambled.",
        "From random parameters both are good models, so the curves stay close.",
        TP2, ("forward", "out"), "three matrices",
        (
            "fused_weight_cut_as_block", "heads_in_other_order", "targets_not_folded", "expert_rows_in_other_order",
            "shards_in_reversed_order", "vocabulary_pieces_overlap", "gate_and_value_cut_as_one",
            "places_come_back_in_turn", "time_cut_for_rows", "halo_of_the_wrong_side",
            "vocabulary_not_divisible", "gpipe_targets_in_other_order", "zero_bubble_targets_in_other_order",
        ),
    ),
    Kind(
        "positions-not-moved",
        "Positions that stay at the start of a cut sequence",
        "Each rank counts the places of its slice from 0.",
        "A sequence is cut over the ranks, and each rank counts its places from 0, so that places 0, 4, 8 and 12 "
        "have one vector. The mask of the attention does move, so no place reads the future, and the model learns "
        "all that it can without knowing where it is.",
        "Here the curves do differ: a model that cannot tell its places apart learns more slowly. The wrong curve "
        "alone still looks like that of a harder task.",
        {"cp": 4}, ("forward", "positions"), "positions",
        (
            "positions_not_moved", "mask_not_moved", "given_positions_not_moved", "rows_overlap_by_one",
            "targets_shifted_after_cut", "state_not_passed", "positions_left_out",
        ),
    ),
    Kind(
        "statistics-of-a-rank",
        "Statistics of one rank's rows",
        "BatchNorm takes the mean over the rows that a rank has.",
        "BatchNorm subtracts the mean of the rows that it sees, and a rank sees a share of the batch. DDP averages "
        "gradients, and leaves this mean as it is. The model that is trained on more ranks is another one, with "
        "noisier statistics. Advantages, norms over a cut width and losses that balance experts have the same trap.",
        "The curves stay close: a rank has 64 rows, and their mean is near the mean of all.",
        DP4, ("forward", "1"), "of its own rows",
        (
            "batch_norm_of_rank", "groups_not_divided", "layer_norm_of_pieces", "running_variance_of_own_count",
            "blocks_not_rescaled", "mean_over_own_count",
            "norm_of_own_width", "advantages_of_each_rank", "balance_loss_of_each_rank",
            "vocabulary_loss_smoothing", "norm_of_own_rows", "variance_of_own_rows",
        ),
    ),
    # -- loss
    Kind(
        "mean-of-means",
        "A mean of means",
        "Each rank divides by its own number of labels.",
        "Some rows have no label, as padding has none, and each rank divides its loss by its own number of labels. "
        "DDP takes the mean of these means, in which a label counts more where there are few. The loss in the log is "
        "such a mean, too, so that it fits.",
        "The curves cross. The wrong one falls faster at first and ends higher, by an amount that any change of the "
        "data would explain.",
        DP4, ("loss", ""), "A mean of means",
        ("mean_of_means", "accumulation_mean_of_means", "mean_of_means_of_times"),
    ),
    # -- backward
    Kind(
        "no-backward",
        "A collective without a backward",
        "`dist.all_gather` brings rows of other ranks, and takes no gradient back.",
        "A contrastive loss compares each row with the rows of all ranks, which `dist.all_gather` brings. It has no "
        "backward: for autograd the rows of other ranks are constants, and a part of each gradient is missing. The "
        "loss itself is right in all digits.",
        "The wrong curve lies a little higher. It falls as a right one does.",
        DP4, ("backward", "2"), "backward of the collectives",
        (
            "gather_without_backward", "output_of_norm_detached", "halo_without_way_back",
            "keys_gathered_without_backward", "norm_of_cut_width_plain_reduce",
        ),
    ),
    Kind(
        "gradient-left-in-parts",
        "A gradient left in parts",
        "Layers before a cut layer train with the gradient of one rank's outputs.",
        "Each rank has some outputs of a layer, so it has a part of the gradient of the layer's input, and the "
        "layers before need the sum of the parts. Without it each rank trains its copy of these layers with another "
        "part. The forward pass is right.",
        "The wrong curve is the lower one. Its first layer, of which all ranks should have one copy, has become two "
        "layers, so the model has more parameters to fit with.",
        TP2, ("gradient", "0.weight"), "a reduction is left out",
        (
            "column_parallel_without_copy", "value_without_copy", "shared_key_without_copy",
            "shared_key_taken_for_whole", "bfloat16_column_parallel_without_copy",
            "pipeline_of_cut_stages_without_copy", "one_f_one_b_of_cut_layers_without_copy",
        ),
    ),
    Kind(
        "summed-twice",
        "Summed once too often",
        "The backward pass adds up gradients of which each rank has the whole.",
        "The sum over the ranks adds up in its backward as well, where each rank has the whole gradient already. All "
        "layers before it get gradients that are too large by the number of ranks. Adam divides a gradient by its "
        "size, so it takes the same steps. The norm in the log, clipping and any other optimizer take the wrong "
        "gradient.",
        "With Adam the curves lie on each other.",
        TP2, ("backward", "1"), "2 times too large",
        (
            "row_parallel_summed_in_backward", "gradients_reduced_twice", "gradients_reduced_after_each_part",
            "optimizer_steps_after_each_part", "average_after_each_part", "sequence_parallel_gather_counts_twice",
            "vocabulary_loss_of_whole_scores", "balance_by_each_rank",
        ),
    ),
    # -- gradients of parameters
    Kind(
        "not-averaged",
        "Gradients that nothing averages",
        "The step calls `model.module`, and so goes around DDP.",
        "The step calls `model.module` in place of `model`. DDP reduces the gradients of its own forward passes, and "
        "here there are none, so each rank trains alone with its share of the rows. `no_sync` around the last "
        "micro-batch, and a parameter that DDP does not know, do the same.",
        "The wrong curve falls faster, as each model has only a quarter of the rows to fit.",
        DP4, ("gradient", "0.weight"), "a reduction is left out",
        (
            "gradients_not_reduced", "gradients_not_reduced_by_ddp", "gradients_not_reduced_over_places",
            "sequence_parallel_norms_not_reduced", "sequence_parallel_bias_not_reduced",
            "sequence_parallel_norm_not_in_plan", "accumulation_without_sync", "accumulation_without_sync_in_fsdp",
            "unused_branch_skipped", "first_stage_not_reduced", "head_replaced_after_ddp", "root_not_sharded",
            "head_without_rows_not_reduced", "towers_not_added", "head_of_first_rank_not_added", "packed_not_averaged",
            "cell_of_own_times",
        ),
    ),
    Kind(
        "sum-for-mean",
        "A sum in place of a mean",
        "Gradients of four micro-batches add up, and nothing divides them by four.",
        "Four micro-batches add up their gradients, and the loss of each is a mean over its rows, so the sum must be "
        "divided by four. It is not, which is a learning rate four times as large. The loss is computed apart, and "
        "is right.",
        "The wrong curve looks better, as the rate was a careful one. With Adam nothing would be seen at all.",
        DP4, ("gradient", "0.weight"), "4 times too large",
        (
            "scale_of_loss_left_in", "loss_of_rows_summed", "gradients_summed", "gates_applied_twice",
            "gates_not_applied", "flat_sum_with_decay",
            "accumulation_not_divided", "pipeline_loss_not_divided", "expert_gradients_not_divided",
            "row_parallel_with_mean", "rate_scaled_by_ranks", "weight_decay_twice", "flat_gradient_divided_twice",
            "decay_lost_on_flat_shards", "gradients_not_zeroed",
            "one_f_one_b_not_scaled", "traced_pipeline_not_scaled", "interleaved_1f1b_not_scaled",
        ),
        ("SGD", 0.2),
    ),
    Kind(
        "wrong-group",
        "A collective over the wrong group",
        "Gradients are averaged over all ranks, and not over those with copies.",
        "`dist.all_reduce` without a group takes all ranks. Here ranks of `tp` have different rows of a weight, so "
        "the average mixes gradients of different parameters. They have the same shape, so nothing complains.",
        "The wrong curve falls more slowly, as with a rate that is a little too small.",
        {"dp": 2, "tp": 2}, ("gradient", "0.weight"), "over the wrong group",
        (
            "gradients_over_world", "gradients_divided_by_world_size", "gradients_divided_by_world_size_in_fsdp",
            "loss_metric_over_world", "row_parallel_wrong_group", "tensor_parallel_over_rows", "rows_of_rank_in_world",
            "expert_gradients_averaged", "gradients_over_halves", "gradients_of_first_rank",
            "gradients_of_first_two_ranks", "largest_gradients_of_ranks", "gradients_without_last_rank",
            "gradients_over_shard_only", "sum_of_halves",
        ),
    ),
    Kind(
        "tied-weights",
        "Tied weights on two stages",
        "The first and the last stage of a pipeline each train their copy of one weight.",
        "The table of words and the last layer are one weight. In a pipeline the first stage has one copy and the "
        "last stage another, and each has a part of the gradient. If nothing adds the parts up, the copies drift "
        "apart, and the file that is saved has one of the two.",
        "The wrong curve is the lower one, as two weights fit more than one does.",
        {"pp": 2}, ("gradient", "embed.weight"), "are one parameter in the reference",
        ("tied_weights_of_two_stages", "layer_of_both_stages_not_added"),
        ("Adam", 0.003),
    ),
    Kind(
        "norm-of-a-shard",
        "Gradients clipped by the norm of a shard",
        "Each rank divides its shard by another norm.",
        "FSDP gives each rank a shard of each gradient, and this loop clips by the norm of these shards alone. That "
        "norm is too small, and another one on each rank, so that parts of one weight are scaled by different "
        "factors.",
        "Adam hides most of it. The wrong curve ends higher.",
        DP4, ("gradient", "0.weight"), "clipped by a norm",
        (
            "clip_over_local_shards", "clip_over_local_pieces", "lamb_of_shards", "norm_without_a_cut_parameter",
            "clip_before_unscale", "gradients_clipped_before_average", "gradients_clipped_by_value",
            "stages_clipped_alone", "flat_pieces_clipped_alone",
        ),
    ),
    Kind(
        "low-precision",
        "Gradients that add up in bfloat16",
        "An option for speed, and gradients with two or three digits.",
        "Gradients travel as bfloat16, in half as many bytes, and add up with two or three digits. The error grows "
        "with the number of ranks, and a small gradient is lost beside a large one. Some want it so; others get it "
        "from an old configuration.",
        "On four ranks the curves lie on each other.",
        DP4, ("gradient", "0.weight"), "bfloat16",
        ("gradients_reduced_in_bfloat16", "gradients_reduced_in_bfloat16_by_fsdp", "parameters_stepped_in_bfloat16",
         "model_in_bfloat16"),
    ),
    # -- the step
    Kind(
        "replicas-drift",
        "Replicas that drift apart",
        "One rank updates a parameter, and never sends it to the others.",
        "Each rank updates some of the parameters and sends them to all ranks, as ZeRO does, and the loop that sends "
        "ends one too early. One rank has the new bias, and the others keep the first one. DDP compares parameters "
        "once, at the start, so from then on the ranks average gradients of different models.",
        "The curves lie close together: a model can do without one bias.",
        DP4, ("step", "2.bias"), "has not moved in the step on ranks 0, 1 and 2",
        (
            "optimizer_step_skipped_on_rank_0", "other_rate_on_rank_1", "parameters_sent_by_the_first_rank",
            "optimizer_before_fully_shard", "last_parameters_not_broadcast",
            "balance_of_each_rank",
        ),
        None,
    ),
)  # fmt: skip
