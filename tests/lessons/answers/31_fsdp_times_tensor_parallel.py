# %% rows_held: wrong, FSDP's cut first | Tensor parallel cuts first
# t * (rows // tp) + d => d * (rows // dp) + t
# %% rows_held: wrong, ranks counted along dp first | or ranks are counted along dp first
# d, t = divmod(rank, tp) => t, d = divmod(rank, dp)
# %% rows_held: wrong, tensor parallel alone | holds 2 rows, not 4
# => each = rows // tp
# => return list(range(rank % tp * each, (rank % tp + 1) * each))
# %% rows_held: wrong, in the order of the ranks | rank 1 is dp 0, tp 1
# => each = rows // (dp * tp)
# => return list(range(rank * each, (rank + 1) * each))
# %% rows_held: right, a range
# list(range(begin, begin + each)) => range(begin, begin + each)
# %% rows_held: wrong, right for square meshes alone | 24 rows, dp=2, tp=3
# rank, tp => rank, dp
# %% rows_held: wrong, dealt like cards | rank 0 holds [0, 1], not [0, 4]
# => return list(range(rank, rows, dp * tp))
# %% rows_held: wrong, one row too many | holds 2 rows, not 3
# begin + each => begin + each + 1
# %% rows_held: wrong, ranks from 1 | holds [0, 1], not
# rank, tp => rank - 1, tp
# %% rows_held: right, tensors for numbers
def rows_held(rows, dp, tp, rank):
    import torch

    d, t = divmod(rank, tp)
    return list(torch.arange(rows).chunk(tp)[t].chunk(dp)[d])


# %% rows_held: wrong, at least two ranks along tp | 12 rows, dp=4, tp=1
# rank, tp => rank, max(tp, 2)
# %% bytes_held: wrong, parameters alone | two numbers of Adam
# => return sum(4 * count / (dp * tp if by_tp else dp) for count, by_tp in parameters)
# %% bytes_held: wrong, one number of Adam | two numbers of Adam
# => return sum(12 * count / (dp * tp if by_tp else dp) for count, by_tp in parameters)
# %% bytes_held: wrong, all cut both ways | cut by FSDP alone
# => return sum(16 * count / (dp * tp) for count, by_tp in parameters)
# %% bytes_held: wrong, the others whole | FSDP cuts the others, too
# => return sum(16 * count / (dp * tp if by_tp else 1) for count, by_tp in parameters)
# %% bytes_held: wrong, the wrong dimension | a rank holds
# => return sum(16 * count / (tp if by_tp else dp) for count, by_tp in parameters)
# %% bytes_held: wrong, of all ranks together | a rank holds
# => return sum(16 * count for count, by_tp in parameters)
# %% bytes_held: wrong, each parameter, not the sum | should return a number
# => return [16 * count / (dp * tp if by_tp else dp) for count, by_tp in parameters]
# %% gathers: wrong, without the model itself | parameters outside of its blocks
# => return (1 if keep else 2) * blocks
# %% gathers: wrong, the model itself twice | stays whole until its backward
# => return (1 if keep else 2) * blocks + 2
# %% gathers: wrong, forward alone | which groups are gathered, and when
# => return blocks + 1
# %% gathers: wrong, keep the other way round | 7 blocks, not kept
# => return (2 if keep else 1) * blocks + 1
# %% gathers: wrong, always twice | 7 blocks, kept
# => return 2 * blocks + 1
# %% gathers: wrong, the count of the lesson | 7 blocks, not kept
# => return 3 if keep else 5
# %% gathers: wrong, with the reduce-scatters | 7 blocks, not kept
# => return (1 if keep else 2) * blocks + 1 + blocks + 1
# %% on_ranks: right, the mean by an operation
# -     dist.all_reduce(mean, group=mesh["dp"].get_group())
# -     return mean / 2
# +     dist.all_reduce(mean, dist.ReduceOp.AVG)
# +     return mean.item()
# %% on_ranks: wrong, rows by the number of the rank | has computed with 2 rows of 8
# -     loss = loss_of(model(rows_here(inputs, mesh["dp"])), rows_here(targets, mesh["dp"]))
# +     rank = dist.get_rank()
# +     loss = loss_of(model(inputs.chunk(4)[rank]), targets.chunk(4)[rank])
# %% on_ranks: wrong, rows along the other dimension | the gradient of
# -     loss = loss_of(model(rows_here(inputs, mesh["dp"])), rows_here(targets, mesh["dp"]))
# +     loss = loss_of(model(rows_here(inputs, mesh["tp"])), rows_here(targets, mesh["tp"]))
# %% on_ranks: wrong, all rows on all ranks | has computed with 8 rows of 8
# -     loss = loss_of(model(rows_here(inputs, mesh["dp"])), rows_here(targets, mesh["dp"]))
# +     loss = loss_of(model(inputs), targets)
# %% on_ranks: wrong, forgets the model itself | no block has it, so the model itself takes it
# -     fully_shard(model, mesh=mesh["dp"])
# %% on_ranks: wrong, the model is the only group | the blocks are no groups of their own
# -         fully_shard(block, mesh=mesh["dp"])
# %% on_ranks: wrong, the names the other way round | Rank 1 has computed with the rows of dp 1
# ("dp", "tp") => ("tp", "dp")
# %% on_ranks: wrong, no tensor parallel | Tensor parallel cuts it in two, and FSDP each half again
# -         parallelize_module(block, mesh["tp"], plan)
# %% on_ranks: wrong, the storage first | raised
# -         parallelize_module(block, mesh["tp"], plan)
# -         fully_shard(block, mesh=mesh["dp"])
# +         fully_shard(block, mesh=mesh["dp"])
# +         parallelize_module(block, mesh["tp"], plan)
# %% on_ranks: wrong, the loss of this rank's rows | as the loss of all rows is wanted
# -     dist.all_reduce(mean, group=mesh["dp"].get_group())
# -     return mean / 2
# +     return mean
# %% on_ranks: wrong, the sum of the losses | as the loss of all rows is wanted
# return mean / 2 => return mean
# %% on_ranks: wrong, adds up along tp | as the loss of all rows is wanted
# dist.all_reduce(mean, group=mesh["dp"].get_group()) => dist.all_reduce(mean, group=mesh["tp"].get_group())
# %% on_ranks: wrong, no backward | there are no gradients. Has backward run
# -     loss.backward()
# %% on_ranks: wrong, returns nothing | It has no `return`
# return mean / 2 => mean / 2
# %% sent: wrong, along tp first | the one along dp comes first
# along_dp, along_tp => along_tp, along_dp
# %% sent: wrong, a rank's piece counted as the whole | What is gathered is dp pieces
# => return 3 * (dp - 1) / dp * numbers / tp / dp * 4, sums * 2 * (tp - 1) / tp * tokens * width * 4
# %% sent: wrong, numbers for bytes | along dp a rank sends 14400 bytes, not 3600
# => return 3 * (dp - 1) / dp * numbers / tp, sums * 2 * (tp - 1) / tp * tokens * width
# %% sent: wrong, an all-reduce sent once | sends twice (n - 1) / n
# => return 3 * (dp - 1) / dp * numbers / tp * 4, sums * (tp - 1) / tp * tokens * width * 4
# %% sent: wrong, the whole model along dp | tensor parallel has left a rank a part of it
# => return 3 * (dp - 1) / dp * numbers * 4, sums * 2 * (tp - 1) / tp * tokens * width * 4
# %% sent: wrong, one gather | A parameter travels three times
# => return 2 * (dp - 1) / dp * numbers / tp * 4, sums * 2 * (tp - 1) / tp * tokens * width * 4
# %% sent: wrong, one vector for all tokens | along tp a rank sends
# => return 3 * (dp - 1) / dp * numbers / tp * 4, sums * 2 * (tp - 1) / tp * width * 4
# %% sent: wrong, the sum of both | A pair of numbers is wanted
# => return sums * 2 * (tp - 1) / tp * tokens * width * 4 + 3 * (dp - 1) / dp * numbers / tp * 4
