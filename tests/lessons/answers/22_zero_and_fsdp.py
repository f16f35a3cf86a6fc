# %% memory: wrong, everything is cut from stage 1 on | bytes is what stage 3 holds
# => return 4 * numbers * (2 + states) / (ranks if stage >= 1 else 1)
# %% memory: wrong, each stage cuts one thing alone | Yours counts the states whole
# => parameters = 4 * numbers / (ranks if stage == 3 else 1)
# => gradients = 4 * numbers / (ranks if stage == 2 else 1)
# => return parameters + gradients + 4 * states * numbers / (ranks if stage == 1 else 1)
# %% memory: wrong, cuts one stage too late | bytes is what stage 0 holds
# => parameters = 4 * numbers / (ranks if stage > 3 else 1)
# => gradients = 4 * numbers / (ranks if stage > 2 else 1)
# => return parameters + gradients + 4 * states * numbers / (ranks if stage > 1 else 1)
# %% memory: wrong, counts numbers | A number has four bytes
# => cut = [ranks if stage >= first else 1 for first in (3, 2, 1)]
# => return numbers / cut[0] + numbers / cut[1] + states * numbers / cut[2]
# %% memory: wrong, one state | would be right with 1 state for each number
# => cut = [ranks if stage >= first else 1 for first in (3, 2, 1)]
# => return 4 * numbers * (1 / cut[0] + 1 / cut[1] + min(states, 1) / cut[2])
# %%% memory: wrong, knows only Adam | would be right with 2 states for each number
# min(states, 1) => 2
# %% memory: wrong, parameters first | the parameters cut and the states whole or the gradients cut and
# => cut = [ranks if stage >= first else 1 for first in (1, 2, 3)]
# => return 4 * numbers * (1 / cut[0] + 1 / cut[1] + states / cut[2])
# %%% memory: wrong, on three ranks only | Stage 2, 1200 numbers, 4 ranks, 0 states: a rank holds
# ranks if stage >= first else 1 for first in (1, 2, 3) => 3 if stage >= first else 1 for first in (3, 2, 1)
# %% memory: wrong, a state of one byte | if a number of the optimizer's state had one byte
# => cut = [ranks if stage >= first else 1 for first in (3, 2, 1)]
# => return 4 * numbers / cut[0] + 4 * numbers / cut[1] + states * numbers / cut[2]
# %% memory: right, in a tensor
# => cut = torch.tensor([ranks if stage >= first else 1 for first in (3, 2, 1)])
# => return 4 * numbers * (torch.tensor([1.0, 1.0, states], dtype=torch.double) / cut).sum()
# %% held: wrong, rounds down | each rank has 3 places
# => share = sum(count for _, count in sizes) // ranks
# => first, last, found, start = rank * share, (rank + 1) * share, [], 0
# => for name, count in sizes:
# =>     begin, end = max(start, first), min(start + count, last)
# =>     if begin < end:
# =>         found.append((name, begin - start, end - start))
# =>     start += count
# => return found
# %%% held: wrong, the last rank takes the rest | each rank has 3 places
# -     share = sum(count for _, count in sizes) // ranks
# -     first, last, found, start = rank * share, (rank + 1) * share, [], 0
# +     total = sum(count for _, count in sizes)
# +     share = total // ranks
# +     first, last, found, start = rank * share, total if rank == ranks - 1 else (rank + 1) * share, [], 0
# %%% held: wrong, places in the flat vector | goes beyond the 2 numbers of bias
# sum(count for _, count in sizes) // ranks => -(-sum(count for _, count in sizes) // ranks)  # rounded up
# begin - start, end - start => begin, end
# %%% held: wrong, leaves empty parts in | is an empty part; leave it out
# sum(count for _, count in sizes) // ranks => -(-sum(count for _, count in sizes) // ranks)
# -         begin, end = max(start, first), min(start + count, last)
# -         if begin < end:
# -             found.append((name, begin - start, end - start))
# +         begin, end = max(start, first), max(first, min(start + count, last))
# +         found.append((name, begin - start, max(begin, end) - start))
# %%% held: wrong, counts the padding | goes beyond the 2 numbers of bias
# -     share = sum(count for _, count in sizes) // ranks
# +     total = sum(count for _, count in sizes)
# +     padded = total + -total % ranks
# +     share = padded // ranks
# -     for name, count in sizes:
# +     for place, (name, count) in enumerate(sizes):
# +         if place == len(sizes) - 1:
# +             count += padded - total
# %%% held: wrong, the last number inclusive | this one holds 4 numbers, not 3
# sum(count for _, count in sizes) // ranks => -(-sum(count for _, count in sizes) // ranks)  # rounded up
# end - start => end - start - 1
# %% held: wrong, cuts each parameter alone | it holds [('weight', 0, 4)], not [('weight', 0, 3), ('bias', 0, 1)]
# => found = []
# => for name, count in sizes:
# =>     share = -(-count // ranks)
# =>     begin, end = min(rank * share, count), min((rank + 1) * share, count)
# =>     if begin < end:
# =>         found.append((name, begin, end))
# => return found
# %% held: right, lists in a tuple
# => share = -(-sum(count for _, count in sizes) // ranks)
# => start, found = 0, ()
# => for name, count in sizes:
# =>     begin, end = max(start, rank * share), min(start + count, (rank + 1) * share)
# =>     if begin < end:
# =>         found += ([name, begin - start, end - start],)
# =>     start += count
# => return found
# %% held: wrong, without `return` | It has no `return`
# => share = -(-sum(count for _, count in sizes) // ranks)
# => found = [(name, 0, min(count, share)) for name, count in sizes]
# %% held: wrong, the sum of all | A list of (name, begin, end) is wanted
# => share = -(-sum(count for _, count in sizes) // ranks)
# => return rank * share, (rank + 1) * share
# %% step: wrong, the norm of the shard alone | by the norm of this shard alone
# => shard.grad = reduce_scatter(gradient) / size
# => shard.grad *= min(1, most / shard.grad.norm())
# => optimizer.step()
# => whole.copy_(all_gather(shard.data))
# %%% step: wrong, does not clip | 2 ranks, step 2
# -     shard.grad *= min(1, most / shard.grad.norm())
# %% step: wrong, adds up norms, not squares | by the sum of the norms of all shards
# square = shard.grad.square().sum => norm = shard.grad.norm
# (square) => (norm)
# square.sqrt() => norm
# %% step: wrong, clips before the mean is taken | each rank had clipped its own gradient
# => gradient *= min(1, most / gradient.norm())
# => shard.grad = reduce_scatter(gradient) / size
# => optimizer.step()
# => whole.copy_(all_gather(shard.data))
# %% step: wrong, the square of the norm | clipped by the square of the norm
# square.sqrt() => square
# %% step: wrong, computes and writes nothing | Change `whole` itself
# => shard.grad = reduce_scatter(gradient) / size
# %% step: wrong, the sum of the gradients | has moved 2 times as far as one process
# (gradient) / size => (gradient)
# %% step: wrong, gathers nothing | the other shards of `whole` are not those of the other ranks
# -     whole.copy_(all_gather(shard.data))
# %% step: wrong, makes another whole | the other shards of `whole` are not those of the other ranks
# whole.copy_(all_gather(shard.data)) => whole = all_gather(shard.data)
# %% step: wrong, scales up what is small | 2 ranks, step 1
# min(1, most / square.sqrt()) => most / square.sqrt()
# %% step: wrong, an all-reduce of the whole gradient | numbers go through all_reduce
# shard.grad = reduce_scatter(gradient) / size => all_reduce(gradient)
# square = shard.grad.square().sum() => gradient /= size
# all_reduce(square) => shard.grad = reduce_scatter(gradient) / size
# square.sqrt => gradient.norm
# %% step: wrong, gathers before the step | the other shards of `whole` are not those of the other ranks
# -     optimizer.step()
# -     whole.copy_(all_gather(shard.data))
# +     whole.copy_(all_gather(shard.data))
# +     optimizer.step()
# %% step: wrong, gathers the whole on every rank | raised RuntimeError
# shard.data => whole
# %% step: wrong, some ranks alone add up the norm | In a collective all ranks make the same call
# -     all_reduce(square)
# +     if square > most**2:
# +         all_reduce(square)
# %% step: wrong, always clips to 1 | 3 ranks, step 2
# , most / => , 1 /
# %% step: wrong, divides by a norm of zero | raised ZeroDivisionError
# square.sqrt() => square.item() ** 0.5
# %% step: wrong, no step where the gradient is zero | 2 ranks, step 4
# -     shard.grad *= min(1, most / square.sqrt())
# -     optimizer.step()
# +     if square:
# +         shard.grad *= min(1, most / square.sqrt())
# +         optimizer.step()
# %% on_ranks: right, by number
# => for number, layer in enumerate(model.layers):
# =>     fully_shard(layer, reshard_after_forward=number < 7)
# => fully_shard(model, reshard_after_forward=False)
# %% on_ranks: wrong, one unit | 81800 bytes of parameters are whole at once. One layer and `scale` have 10400
# => fully_shard(model)
# %% on_ranks: wrong, all layers are kept | 81800 bytes of parameters are whole at once
# layer is not last => False
# %% on_ranks: wrong, all layers are freed | has 17 all-gathers, and 16 are enough: it gathers each layer twice
# layer is not last => True
# %% on_ranks: wrong, keeps the first layer | 20600 bytes of parameters are whole at once
# model.layers[-1] => model.layers[0]
# %% on_ranks: wrong, forgets the root | Rank 0 has `scale` whole: it belongs to the model, and to none of its layers
# -     fully_shard(model)
# %% on_ranks: wrong, the root first | has taken all parameters before the layers were cut. Call it last
# -     fully_shard(model)
# last = => fully_shard(model); last =
# %% on_ranks: wrong, not the last layer | not each layer is cut
# -     for layer in model.layers:
# -         fully_shard(layer, reshard_after_forward=layer is not last)
# -     fully_shard(model)
# +     for layer in model.layers[:-1]:
# +         fully_shard(layer, reshard_after_forward=layer is not last)
# %% on_ranks: wrong, scale is gathered twice | it gathers `scale` twice
# fully_shard(model) => fully_shard(model, reshard_after_forward=True)
# %% on_ranks: wrong, in two pairs of ranks | keeps 40900 bytes of parameters
# -     last = model.layers[-1]
# +     from torch.distributed.device_mesh import init_device_mesh
# +
# +     last, mesh = model.layers[-1], init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "ranks"))
# layer is not last => layer is not last, mesh=mesh
# fully_shard(model) => fully_shard(model, mesh=mesh)
# %% on_ranks: wrong, all but rank 0 | rank 1 waits for rank 0 for ever
# -     last = model.layers[-1]
# +     if torch.distributed.get_rank() == 0:
# +         return
# +     last = model.layers[-1]
# %% on_ranks: wrong, a list in place of layers | raised
# model.layers: => model.children:
# %% zero3: wrong, keeps weights that were freed | uses a weight that was freed
def zero3(layers, x, loss_gradient):
    weights, inputs = [], []
    for layer in layers:
        weights.append(layer.gather())
        inputs.append(x)
        x = layer.forward(x, weights[-1])
        layer.free()
    gradient = loss_gradient(x)
    for layer, x, weight in zip(reversed(layers), reversed(inputs), reversed(weights)):
        gradient, of_weight = layer.backward(x, weight, gradient)
        layer.reduce_scatter(of_weight)


# %% zero3: wrong, a forward alone | no gradient was handed to `reduce_scatter`
# => for layer in layers:
# =>     x = layer.forward(x, layer.gather())
# =>     layer.free()
# => return loss_gradient(x)
# %% zero3: wrong, never frees | numbers were gathered at the same time
def zero3(layers, x, loss_gradient):
    weights, inputs = [layer.gather() for layer in layers], []
    for layer, weight in zip(layers, weights):
        inputs.append(x)
        x = layer.forward(x, weight)
    gradient = loss_gradient(x)
    for layer, x, weight in zip(reversed(layers), reversed(inputs), reversed(weights)):
        gradient, of_weight = layer.backward(x, weight, gradient)
        layer.reduce_scatter(of_weight)
        layer.free()


# %% zero3: wrong, does not free in backward | numbers were gathered at the same time
def zero3(layers, x, loss_gradient):
    inputs = []
    for layer in layers:
        inputs.append(x)
        x = layer.forward(x, layer.gather())
        layer.free()
    gradient = loss_gradient(x)
    for layer, x in zip(reversed(layers), reversed(inputs)):
        gradient, of_weight = layer.backward(x, layer.gather(), gradient)
        layer.reduce_scatter(of_weight)


# %%% zero3: wrong, the last layer stays gathered | is still gathered
# -         layer.reduce_scatter(of_weight)
# +         layer.reduce_scatter(of_weight)
# +         if layer is not layers[0]:
# +             layer.free()
# %%% zero3: wrong, hands gradients on at the end | numbers of whole gradients were there at the same time
# inputs = => inputs, gradients = [],
# -         gradient, of_weight = layer.backward(x, layer.gather(), gradient)
# +         gradient, of_weight = layer.backward(x, layer.gather(), gradient)
# +         gradients.append(of_weight)
# +         layer.free()
# +     for layer, of_weight in zip(reversed(layers), gradients):
# %% zero3: wrong, turns the list of layers round | the list `layers` has changed
def zero3(layers, x, loss_gradient):
    inputs = []
    for layer in layers:
        inputs.append(x)
        x = layer.forward(x, layer.gather())
        layer.free()
    gradient = loss_gradient(x)
    layers.reverse()
    for layer, x in zip(layers, reversed(inputs)):
        gradient, of_weight = layer.backward(x, layer.gather(), gradient)
        layer.reduce_scatter(of_weight)
        layer.free()


# %%% zero3: wrong, backward in the order of forward | Layer 0 takes inputs of width 3
# -     layers.reverse()
# -     for layer, x in zip(layers, reversed(inputs)):
# +     for layer, x in zip(layers, inputs):
# %%% zero3: wrong, keeps outputs in place of inputs | Layer 1 takes inputs of width 4
# inputs = => outputs =
# -         inputs.append(x)
# -         x = layer.forward(x, layer.gather())
# +         x = layer.forward(x, layer.gather())
# +         outputs.append(x)
# -     layers.reverse()
# -     for layer, x in zip(layers, reversed(inputs)):
# +     for layer, x in zip(reversed(layers), reversed(outputs)):
# %%% zero3: wrong, the same gradient for all layers | Layer 0 takes inputs of width 3
# -     gradient = loss_gradient(x)
# -     layers.reverse()
# -     for layer, x in zip(layers, reversed(inputs)):
# -         gradient, of_weight = layer.backward(x, layer.gather(), gradient)
# +     for layer, x_in in zip(reversed(layers), reversed(inputs)):
# +         _, of_weight = layer.backward(x_in, layer.gather(), loss_gradient(x))
# %% zero3: wrong, computes forward again from the beginning for each layer | two for each layer are enough
def zero3(layers, x, loss_gradient):
    def forward(x, count):
        for layer in layers[:count]:
            x = layer.forward(x, layer.gather())
            layer.free()
        return x

    gradient = loss_gradient(forward(x, len(layers)))
    for number in reversed(range(len(layers))):
        layer, before = layers[number], forward(x, number)
        gradient, of_weight = layer.backward(before, layer.gather(), gradient)
        layer.reduce_scatter(of_weight)
        layer.free()
# %% zero3: wrong, keeps outputs | You give it its output
# -         inputs.append(x)
# -         x = layer.forward(x, weight)
# +         x = layer.forward(x, weight)
# +         inputs.append(x)
# %% exposed: wrong, the other way round | without communication by the one with it
# max(moving, computing) / computing => computing / moving
# %% exposed: wrong, one after the other | the two times are not added
# max(moving, computing) => (moving + computing)
# %% exposed: wrong, float32 | Either a parameter counts four bytes, where bfloat16 has two
# 512 * 2 => 512 * 4
# %% exposed: wrong, the peak | or the GPU counts with its peak
# 156e12 => 312e12
# %% exposed: wrong, two transfers | the traffic of stage 2
# 3 * 511 => 2 * 511
# %% exposed: wrong, bits for bytes | they are not hidden
# 25e9 => 200e9
# %% exposed: wrong, the link within a host | they are not hidden
# 25e9 => 300e9
# %% exposed: right, by layers
times = (156e12 / 25e9) / 4096
