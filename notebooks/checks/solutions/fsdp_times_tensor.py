# %% rows_held
def rows_held(rows, dp, tp, rank):
    d, t = divmod(rank, tp)
    each = rows // (dp * tp)
    begin = t * (rows // tp) + d * each
    return list(range(begin, begin + each))


# %% bytes_held
def bytes_held(parameters, dp, tp):
    return sum(16 * count / (dp * tp if by_tp else dp) for count, by_tp in parameters)


# %% gathers
def gathers(blocks, keep):
    return (1 if keep else 2) * blocks + 1


# %% on_ranks
def step(model, inputs, targets):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks.values():
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])

    loss = loss_of(model(rows_here(inputs, mesh["dp"])), rows_here(targets, mesh["dp"]))
    loss.backward()
    mean = loss.detach()
    dist.all_reduce(mean, group=mesh["dp"].get_group())
    return mean / 2


# %% sent
def sent(numbers, sums, tokens, width, dp, tp):
    along_tp = sums * 2 * (tp - 1) / tp * tokens * width * 4
    along_dp = 3 * (dp - 1) / dp * numbers / tp * 4
    return along_dp, along_tp
