# %% share: wrong, in blocks | should get
def share(microbatches, replicas, replica):
    each = microbatches // replicas
    return list(range(replica * each, (replica + 1) * each))


# %% share: wrong, everything to everybody | should get
def share(microbatches, replicas, replica):
    return list(range(microbatches))


# %% share: wrong, some that are not there | are not there
def share(microbatches, replicas, replica):
    each = -(-microbatches // replicas)
    return [replica + number * replicas for number in range(each)]


# %% combined: wrong, a mean of means | away from the gradient
def combined(gradients, samples):
    return sum(gradients) / len(gradients)


# %% combined: wrong, a sum | away from the gradient
def combined(gradients, samples):
    return sum(gradients)


# %% combined: wrong, one for each | should have the shape
def combined(gradients, samples):
    import torch

    return torch.stack([gradient * count / sum(samples) for gradient, count in zip(gradients, samples)])


# %% step_time: wrong, no all-reduce | a step takes
def step_time(workers, microbatches, replicas, reduce):
    stages = workers // replicas
    return 3 / stages * (microbatches / replicas + stages - 1)


# %% step_time: wrong, all micro-batches for each replica | a step takes
def step_time(workers, microbatches, replicas, reduce):
    stages = workers // replicas
    return 3 / stages * (microbatches + stages - 1) + 2 * (replicas - 1) / replicas * reduce / stages


# %% step_time: wrong, as if each worker sent the whole model | a step takes
def step_time(workers, microbatches, replicas, reduce):
    stages = workers // replicas
    return 3 / stages * (microbatches / replicas + stages - 1) + 2 * (replicas - 1) / replicas * reduce
