# %% early
def early(rank):
    (microbatch,) = rank.microbatches
    for layer in rank.layers:
        rank.forward(layer, microbatch)
    for layer in reversed(rank.layers):
        rank.backward(layer, microbatch)
        rank.all_reduce("gradients", layer)
        if layer + 1 in rank.layers:
            rank.update(layer + 1)
    rank.update(0)


# %% zero1
def zero1(rank):
    for microbatch in rank.microbatches:
        for layer in rank.layers:
            rank.forward(layer, microbatch)
        for layer in reversed(rank.layers):
            rank.backward(layer, microbatch)
            if microbatch == rank.microbatches[-1]:
                rank.reduce_scatter("gradients", layer)
    for layer in reversed(rank.layers):
        rank.update(layer)
        rank.all_gather("weights", layer)


# %% zero2
def zero2(rank):
    for microbatch in rank.microbatches:
        for layer in rank.layers:
            rank.forward(layer, microbatch)
        for layer in reversed(rank.layers):
            rank.backward(layer, microbatch)
            rank.reduce_scatter("gradients", layer)
    for layer in reversed(rank.layers):
        rank.update(layer)
        rank.all_gather("weights", layer)


# %% zero3
def zero3(rank):
    (microbatch,) = rank.microbatches
    last = rank.layers[-1]
    rank.all_gather("weights", 0)
    for layer in rank.layers:
        if layer < last:
            rank.all_gather("weights", layer + 1)
        rank.forward(layer, microbatch)
        if layer < last:
            rank.free("weights", layer)
    for layer in reversed(rank.layers):
        if layer > 0:
            rank.all_gather("weights", layer - 1)
        rank.backward(layer, microbatch)
        rank.free("weights", layer)
        rank.reduce_scatter("gradients", layer)
    for layer in reversed(rank.layers):
        rank.update(layer)


# %% pipeline
def pipeline(rank):
    ahead = rank.stages - rank.stage - 1
    for microbatch in rank.microbatches[:ahead]:
        forward_stage(rank, microbatch)
    for microbatch in rank.microbatches:
        if microbatch + ahead in rank.microbatches:
            forward_stage(rank, microbatch + ahead)
        backward_stage(rank, microbatch)
    for layer in rank.layers:
        rank.update(layer)


# %% both
def both(rank):
    ahead = rank.stages - rank.stage - 1
    for microbatch in rank.microbatches[:ahead]:
        forward_stage(rank, microbatch)
    for microbatch in rank.microbatches:
        if microbatch + ahead in rank.microbatches:
            forward_stage(rank, microbatch + ahead)
        backward_stage(rank, microbatch)
    for layer in rank.layers:
        rank.reduce_scatter("gradients", layer)
    for layer in rank.layers:
        rank.update(layer)
        rank.all_gather("weights", layer)


# %% order
def order(rank):
    for microbatch in rank.microbatches:
        for layer in rank.layers:
            rank.forward(layer, microbatch)
    for layer in reversed(rank.layers):
        for microbatch in rank.microbatches:
            rank.backward(layer, microbatch)
        rank.reduce_scatter("gradients", layer)
    for layer in reversed(rank.layers):
        rank.update(layer)
        rank.all_gather("weights", layer)
