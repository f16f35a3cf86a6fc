# %% early: wrong, all gradients are complete first | Memory: rank 0 has 131 MB at 20 ms, and the limit is 120
# -         rank.all_reduce("gradients", layer)
# -         if layer + 1 in rank.layers:
# -             rank.update(layer + 1)
# -     rank.update(0)
# +     for layer in reversed(rank.layers):
# +         rank.all_reduce("gradients", layer)
# +     for layer in reversed(rank.layers):
# +         rank.update(layer)
# %% early: wrong, waits for each all-reduce | Time: the step takes 40 ms, and the limit is 30
# -         if layer + 1 in rank.layers:
# -             rank.update(layer + 1)
# -     rank.update(0)
# +         rank.update(layer)
# %% early: wrong, nothing is reduced | the gradient of layer 3 is partial. In its sum: micro-batch 0; not in it: micro
# -         rank.all_reduce("gradients", layer)
# %% early: wrong, updates first | It was not summed over the ranks
# -         rank.all_reduce("gradients", layer)
# -         if layer + 1 in rank.layers:
# -             rank.update(layer + 1)
# -     rank.update(0)
# +         rank.update(layer)
# +         rank.all_reduce("gradients", layer)
# %% early: wrong, the last update is missing | does not have the new weights of layer 0: they are the old ones
# -     rank.update(0)
# %% early: wrong, reduced twice | this sum counts micro-batches 0, 1, 2, 3 more than once
# -         rank.all_reduce("gradients", layer)
# +         rank.all_reduce("gradients", layer)
# +         rank.all_reduce("gradients", layer)
# %% early: wrong, backward from the first layer | the input gradient of layer 1 for micro-batch 0 is not there:
# for layer in reversed(rank.layers) => for layer in rank.layers
# %% early: wrong, ranks take layers in different orders | the ranks call different collectives. Number 1 of this rank
# -         rank.all_reduce("gradients", layer)
# -         if layer + 1 in rank.layers:
# -             rank.update(layer + 1)
# -     rank.update(0)
# +     for layer in rank.layers if rank.number % 2 else reversed(rank.layers):
# +         rank.all_reduce("gradients", layer)
# +     for layer in reversed(rank.layers):
# +         rank.update(layer)
# %% early: wrong, a gradient is kept too long | Memory: rank 0 has 126 MB
# layer + 1 in rank.layers => layer + 2 in rank.layers
# rank.update(layer + 1) => rank.update(layer + 2)
# -     rank.update(0)
# +     rank.update(1)
# +     rank.update(0)
# %% early: wrong, rank 0 reduces alone | It was not summed over the ranks
# -         rank.all_reduce("gradients", layer)
# +         if rank.number == 0:
# +             rank.all_reduce("gradients", layer)
# %% early: wrong, updates the layer that is not there yet | the gradients of layer 2 are not there: backward of layer 2
# layer + 1 in rank.layers => layer - 1 in rank.layers
# rank.update(layer + 1) => rank.update(layer - 1)
# %% early: wrong, a name is misspelt | all_reduce takes 'gradients', not 'gradient'
# "gradients" => "gradient"
# %% early: wrong, an error of Python | NameError: name 'microbatches' is not defined, in your line
# rank.forward(layer, microbatch) => rank.forward(layer, microbatches[0])
# %% early: wrong, a number | A function `step(rank)` is wanted, not 30
early = 30


# %% early: right, updates when the next all-reduce is under way
def early(rank):
    (microbatch,) = rank.microbatches
    for layer in rank.layers:
        rank.forward(layer, microbatch)
    before = None
    for layer in reversed(rank.layers):
        rank.backward(layer, microbatch)
        if before is not None:
            rank.update(before)
        rank.all_reduce("gradients", layer)
        before = layer
    rank.update(before)


# %% zero1: wrong, a whole all-reduce | Messages: rank 0 sends 72 MB, and the limit is 48: all_reduce 48, all_gather 24
# rank.reduce_scatter => rank.all_reduce
# %% zero1: wrong, reduces for each micro-batch | Messages: rank 0 sends 72 MB, and the limit is 48: reduce_scatter 48
# -             if microbatch == rank.microbatches[-1]:
# -                 rank.reduce_scatter("gradients", layer)
# +             rank.reduce_scatter("gradients", layer)
# %% zero1: wrong, reduces after all backwards | Time: the step takes 62.4 ms, and the limit is 58
# -             if microbatch == rank.microbatches[-1]:
# -                 rank.reduce_scatter("gradients", layer)
# +     for layer in reversed(rank.layers):
# +         rank.reduce_scatter("gradients", layer)
# %% zero1: wrong, new parts stay where they are | does not have the new weights of layer 0: of 4 parts only 0 is new
# -         rank.all_gather("weights", layer)
# %% zero1: wrong, gathers before it updates | came too early, when no rank had updated its part
# -         rank.update(layer)
# -         rank.all_gather("weights", layer)
# +         rank.all_gather("weights", layer)
# +         rank.update(layer)
# %% zero1: wrong, reduces after the first micro-batch | Backward has not added micro-batch 1, which this rank has
# rank.microbatches[-1] => rank.microbatches[0]
# %% zero1: wrong, one micro-batch alone | Backward has not added micro-batch 1, which this rank has itself
# for microbatch in rank.microbatches => for microbatch in rank.microbatches[:1]
# rank.microbatches[-1] => rank.microbatches[0]
# %% zero1: wrong, frees the weights | the weights of layer 3 are not there: freed in line
# -         rank.all_gather("weights", layer)
# +         rank.free("weights", layer)
# +         rank.all_gather("weights", layer)
# %% zero1: wrong, another micro-batch | 4 is no micro-batch of this rank; it has 0, 1
# for microbatch in rank.microbatches => for microbatch in range(8)
# rank.backward(layer, microbatch) => rank.backward(layer, microbatch + 0)
# rank.forward(layer, microbatch) => rank.forward(layer, microbatch + 4)
# %% zero1: right, updates within the last backward
def zero1(rank):
    *firsts, last = rank.microbatches
    for microbatch in firsts:
        for layer in rank.layers:
            rank.forward(layer, microbatch)
        for layer in reversed(rank.layers):
            rank.backward(layer, microbatch)
    for layer in rank.layers:
        rank.forward(layer, last)
    for layer in reversed(rank.layers):
        rank.backward(layer, last)
        rank.reduce_scatter("gradients", layer)
        if layer + 1 in rank.layers:
            rank.update(layer + 1)
            rank.all_gather("weights", layer + 1)
    rank.update(0)
    rank.all_gather("weights", 0)


# %% zero2: wrong, whole gradients until the end | Memory: rank 0 has 90 MB at 36 ms, and the limit is 80
# -             rank.reduce_scatter("gradients", layer)
# +             if microbatch == rank.microbatches[-1]:
# +                 rank.reduce_scatter("gradients", layer)
# %% zero2: wrong, reduces after each whole backward | Memory: rank 0 has
# -             rank.reduce_scatter("gradients", layer)
# +         for layer in reversed(rank.layers):
# +             rank.reduce_scatter("gradients", layer)
# %% zero2: wrong, all-reduces sums again | this sum counts micro-batches 0, 2, 4, 6 more than once
# rank.reduce_scatter => rank.all_reduce
# %% zero2: wrong, updates after the first micro-batch | the gradient of layer 3 is partial
# -     for layer in reversed(rank.layers):
# -         rank.update(layer)
# -         rank.all_gather("weights", layer)
# +         for layer in reversed(rank.layers):
# +             rank.update(layer)
# +             rank.all_gather("weights", layer)
# %% zero2: wrong, new parts stay where they are | does not have the new weights of layer 0: of 4 parts only 0 is new
# -         rank.all_gather("weights", layer)
# %% zero2: wrong, gathers before it updates | came too early, when no rank had updated its part
# -         rank.update(layer)
# -         rank.all_gather("weights", layer)
# +         rank.all_gather("weights", layer)
# +         rank.update(layer)
# %% zero2: wrong, gathers old weights, too | Messages: rank 0 sends
# -             rank.reduce_scatter("gradients", layer)
# +             rank.reduce_scatter("gradients", layer)
# +             rank.all_gather("weights", layer)
# %% zero2: wrong, drops the gradients of the first micro-batch | the gradient of layer 3 is partial
# -             rank.reduce_scatter("gradients", layer)
# +             if microbatch == rank.microbatches[-1]:
# +                 rank.reduce_scatter("gradients", layer)
# +             else:
# +                 rank.free("gradients", layer)
# %% zero3: wrong, nothing is gathered | the weights of layer 0 are not there. The rank has a shard of them;
# -     rank.all_gather("weights", 0)
# %% zero3: wrong, gathers when it needs them | Messages: rank 0 sends 72 MB, and the limit is 66: all_gather 48
def zero3(rank):
    (microbatch,) = rank.microbatches
    for layer in rank.layers:
        rank.all_gather("weights", layer)
        rank.forward(layer, microbatch)
        rank.free("weights", layer)
    for layer in reversed(rank.layers):
        rank.all_gather("weights", layer)
        rank.backward(layer, microbatch)
        rank.free("weights", layer)
        rank.reduce_scatter("gradients", layer)
    for layer in reversed(rank.layers):
        rank.update(layer)


# %%% zero3: wrong, waits for each gather | Time: the step takes
# -         rank.forward(layer, microbatch)
# -         rank.free("weights", layer)
# +         rank.forward(layer, microbatch)
# +         if layer < 3:
# +             rank.free("weights", layer)
# -         rank.all_gather("weights", layer)
# -         rank.backward(layer, microbatch)
# +         if layer < 3:
# +             rank.all_gather("weights", layer)
# +         rank.backward(layer, microbatch)
# %% zero3: wrong, weights stay for backward | Memory: rank 0 has 74 MB
def zero3(rank):
    (microbatch,) = rank.microbatches
    for layer in rank.layers:
        rank.all_gather("weights", layer)
    for layer in rank.layers:
        rank.forward(layer, microbatch)
    for layer in reversed(rank.layers):
        rank.backward(layer, microbatch)
        rank.free("weights", layer)
        rank.reduce_scatter("gradients", layer)
    for layer in reversed(rank.layers):
        rank.update(layer)


# %% zero3: wrong, the last layer is gathered again | the weights of layer 3 are there already, gathered before
# -     for layer in reversed(rank.layers):
# -         if layer > 0:
# +     rank.all_gather("weights", last)
# +     for layer in reversed(rank.layers):
# +         if layer > 0:
# %% zero3: wrong, frees twice | the weights of layer 3 are not there: freed in line
# -         rank.reduce_scatter("gradients", layer)
# +         rank.free("weights", layer)
# +         rank.reduce_scatter("gradients", layer)
# %% zero3: wrong, nothing is freed after backward | holds the weights of layer 3, whole; between steps there is room
# -         rank.backward(layer, microbatch)
# -         rank.free("weights", layer)
# +         rank.backward(layer, microbatch)
# %% zero3: wrong, gathers after the update | holds the weights of layer 3, whole; between steps there is room for
# -         rank.update(layer)
# +         rank.update(layer)
# +         rank.all_gather("weights", layer)
# %% zero3: wrong, whole gradients are reduced | Messages: rank 0 sends 90 MB
# rank.reduce_scatter => rank.all_reduce
# %% zero3: wrong, one layer too many | layer 4 is not one of this rank; it has 0, 1, 2, 3
# -         if layer < last:
# -             rank.all_gather("weights", layer + 1)
# +         rank.all_gather("weights", layer + 1)
# %% zero3: right, two layers stay whole
def zero3(rank):
    (microbatch,) = rank.microbatches
    rank.all_gather("weights", 0)
    for layer in rank.layers:
        if layer < 3:
            rank.all_gather("weights", layer + 1)
        rank.forward(layer, microbatch)
        if layer < 2:
            rank.free("weights", layer)
    for layer in reversed(rank.layers):
        if 0 < layer < 3:
            rank.all_gather("weights", layer - 1)
        rank.backward(layer, microbatch)
        rank.free("weights", layer)
        rank.reduce_scatter("gradients", layer)
    for layer in reversed(rank.layers):
        rank.update(layer)


# %% zero3: right, updates within backward
# -         rank.reduce_scatter("gradients", layer)
# -     for layer in reversed(rank.layers):
# -         rank.update(layer)
# +         rank.reduce_scatter("gradients", layer)
# +         if layer < last:
# +             rank.update(layer + 1)
# +     rank.update(0)
# %% pipeline: wrong, all forwards first | Memory: rank 1 has 66 MB at 31.75 ms, and the limit is 50
# rank.stages - rank.stage - 1 => len(rank.microbatches)
# %% pipeline: wrong, one micro-batch after the other | Time: the step takes
# rank.stages - rank.stage - 1 => 0
# %% pipeline: wrong, one too many | Memory: rank 0 has 54 MB
# rank.stages - rank.stage - 1 => rank.stages - rank.stage
# %% pipeline: wrong, all ranks as far ahead as rank 0 | Time: the step takes 148.9 ms
# rank.stages - rank.stage - 1 => rank.stages - 1
# %% pipeline: wrong, the ends are exchanged | Deadlock: rank 0 waits at line 12
# rank.stages - rank.stage - 1 => rank.stage
# %% pipeline: wrong, one too few | Time: the step takes
# rank.stages - rank.stage - 1 => max(0, rank.stages - rank.stage - 2)
# %% pipeline: wrong, updates for each micro-batch | the gradient of layer 3 is partial. In its sum: micro-batch 0; not
# -     for layer in rank.layers:
# -         rank.update(layer)
# +         for layer in rank.layers:
# +             rank.update(layer)
# %% pipeline: wrong, the last forwards are missing | what layer 3 has kept for micro-batch 7 is not there: forward of
# microbatch + ahead in rank.microbatches => microbatch + ahead < 7
# %% pipeline: wrong, computes what was not received | layer 1 for micro-batch 0 is not there: it was not received from
def pipeline(rank):
    for microbatch in rank.microbatches:
        for layer in rank.layers:
            rank.forward(layer, microbatch)
    for microbatch in rank.microbatches:
        backward_stage(rank, microbatch)
    for layer in rank.layers:
        rank.update(layer)


# %% pipeline: wrong, backward first | what layer 3 has kept for micro-batch 0 is not there: forward of layer 3
# -         if microbatch + ahead in rank.microbatches:
# -             forward_stage(rank, microbatch + ahead)
# -         backward_stage(rank, microbatch)
# +         backward_stage(rank, microbatch)
# +         if microbatch + ahead in rank.microbatches:
# +             forward_stage(rank, microbatch + ahead)
# %% pipeline: wrong, nothing is updated | does not have the new weights of layer 0: they are the old ones
# rank.update(layer) => pass
# %% pipeline: right, with places in the list
def pipeline(rank):
    todo = list(rank.microbatches)
    for _ in range(rank.stages - 1 - rank.stage):
        forward_stage(rank, todo.pop(0))
    for microbatch in rank.microbatches:
        if todo:
            forward_stage(rank, todo.pop(0))
        backward_stage(rank, microbatch)
    for layer in reversed(rank.layers):
        rank.update(layer)


# %% both: wrong, all forwards first | Memory: rank 2 has 110 MB
# rank.stages - rank.stage - 1 => len(rank.microbatches)
# %% both: wrong, replicas alone | the gradient of layer 2 is partial. In its sum: micro-batches 0, 1, 2, 3, 4, 5, 6, 7;
# -         rank.reduce_scatter("gradients", layer)
# -     for layer in rank.layers:
# -         rank.update(layer)
# +         rank.update(layer)
# %% both: wrong, a whole all-reduce | Messages: rank 0 sends 32 MB, and the limit is 24
# rank.reduce_scatter => rank.all_reduce
# %% both: wrong, reduces for each micro-batch | Messages: rank 0 sends 80 MB, and the limit is 24
# -         backward_stage(rank, microbatch)
# -     for layer in rank.layers:
# -         rank.reduce_scatter("gradients", layer)
# +         backward_stage(rank, microbatch)
# +         for layer in rank.layers:
# +             rank.reduce_scatter("gradients", layer)
# %% both: wrong, new parts stay where they are | does not have the new weights of layer 0: of 2 parts only 0 is new
# -         rank.all_gather("weights", layer)
# %% both: wrong, all layers and not the stage's | layer 0 is not one of this rank; it has 2, 3
# -     for layer in rank.layers:
# -         rank.reduce_scatter("gradients", layer)
# +     for layer in range(4):
# +         rank.reduce_scatter("gradients", layer)
# %% both: wrong, one micro-batch after the other | Time: the step takes
# rank.stages - rank.stage - 1 => 0
# %% both: wrong, replicas reduce layers in different orders | the ranks call different collectives
# -     for layer in rank.layers:
# -         rank.reduce_scatter("gradients", layer)
# +     for layer in rank.layers if rank.number % 2 else reversed(rank.layers):
# +         rank.reduce_scatter("gradients", layer)
# %% both: wrong, sends to the replica | send names rank 1; the neighbours are 2
# -         backward_stage(rank, microbatch)
# +         if rank.number == 0:
# +             rank.forward(0, microbatch)
# +             rank.forward(1, microbatch)
# +             rank.send("input", 2, microbatch, rank.number + 1)
# rank.stages - rank.stage - 1 => 0
# -         if microbatch + ahead in rank.microbatches:
# -             forward_stage(rank, microbatch + ahead)
# %% order: wrong, the messages of ZeRO-2 | Messages: rank 0 sends 72 MB, and the limit is 48
# -         for microbatch in rank.microbatches:
# -             rank.backward(layer, microbatch)
# -         rank.reduce_scatter("gradients", layer)
# +         for microbatch in rank.microbatches:
# +             rank.backward(layer, microbatch)
# +             rank.reduce_scatter("gradients", layer)
# %% order: wrong, the memory of ZeRO-1 | Memory: rank 0 has 90 MB at 36 ms, and the limit is 82
def order(rank):
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


# %% order: wrong, a layer is reduced after its first micro-batch | Backward has not added micro-batch 1, which this
# -         for microbatch in rank.microbatches:
# -             rank.backward(layer, microbatch)
# -         rank.reduce_scatter("gradients", layer)
# +         for microbatch in rank.microbatches:
# +             rank.backward(layer, microbatch)
# +             if microbatch == rank.microbatches[0]:
# +                 rank.reduce_scatter("gradients", layer)
# %% order: wrong, reduces at the end | Memory: rank 0 has
# -         rank.reduce_scatter("gradients", layer)
# -     for layer in reversed(rank.layers):
# -         rank.update(layer)
# +     for layer in reversed(rank.layers):
# +         rank.reduce_scatter("gradients", layer)
# +     for layer in reversed(rank.layers):
# +         rank.update(layer)
# %% order: right, updates at once
# -         rank.reduce_scatter("gradients", layer)
# -     for layer in reversed(rank.layers):
# -         rank.update(layer)
# +         rank.reduce_scatter("gradients", layer)
# +         rank.update(layer)
# %% order: wrong, forward of one micro-batch | what layer 3 has kept for micro-batch 1 is not there: forward of layer 3
# -     for microbatch in rank.microbatches:
# -         for layer in rank.layers:
# +     for microbatch in rank.microbatches[:1]:
# +         for layer in rank.layers:
# %% order: wrong, new parts stay where they are | does not have the new weights of layer 0: of 4 parts only 0 is new
# -         rank.all_gather("weights", layer)
# %% order: wrong, frees gradients | the gradients of layer 3 are not there: freed in line
# -         rank.reduce_scatter("gradients", layer)
# +         rank.free("gradients", layer)
# +         rank.reduce_scatter("gradients", layer)
# %% order: right, the second micro-batch first
# -         for microbatch in rank.microbatches:
# -             rank.backward(layer, microbatch)
# +         for microbatch in reversed(rank.microbatches):
# +             rank.backward(layer, microbatch)
