# %% memory
def memory(stage, numbers, ranks, states):
    parameters = 4 * numbers / (ranks if stage >= 3 else 1)
    gradients = 4 * numbers / (ranks if stage >= 2 else 1)
    of_optimizer = 4 * states * numbers / (ranks if stage >= 1 else 1)
    return parameters + gradients + of_optimizer


# %% held
def held(sizes, ranks, rank):
    share = -(-sum(count for _, count in sizes) // ranks)  # rounded up
    first, last = rank * share, (rank + 1) * share
    found, start = [], 0
    for name, count in sizes:
        begin, end = max(start, first), min(start + count, last)
        if begin < end:
            found.append((name, begin - start, end - start))
        start += count
    return found


# %% step
def step(whole, gradient, shard, optimizer, most, size, reduce_scatter, all_gather, all_reduce):
    shard.grad = reduce_scatter(gradient) / size
    square = shard.grad.square().sum()
    all_reduce(square)
    shard.grad *= min(1, most / square.sqrt())
    optimizer.step()
    whole.copy_(all_gather(shard.data))


# %% on_ranks
def shard(model):
    last = model.layers[-1]
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=layer is not last)
    fully_shard(model)


# %% zero3
def zero3(layers, x, loss_gradient):
    inputs = []
    for layer in layers:
        weight = layer.gather()
        inputs.append(x)
        x = layer.forward(x, weight)
        layer.free()
    gradient = loss_gradient(x)
    for layer, x in zip(reversed(layers), reversed(inputs)):
        weight = layer.gather()
        gradient, of_weight = layer.backward(x, weight, gradient)
        layer.reduce_scatter(of_weight)
        layer.free()


# %% exposed
moving = 3 * 511 / 512 * 2 / 25e9  # seconds for each parameter: two all-gathers, a reduce-scatter
computing = 6 * 4096 / 156e12
times = max(moving, computing) / computing
