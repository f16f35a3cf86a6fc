# %% ring: wrong, sends all of it round | a rank of 3 has sent 12 numbers where 8 do
def ring_all_reduce(x, rank, size, shift):
    passed = x.clone()
    for _ in range(size - 1):
        passed = shift(passed)
        x += passed


# %% ring: wrong, stops after the first half | 2 are the sum over all ranks
def ring_all_reduce(x, rank, size, shift):
    chunks = x.chunk(size)
    for step in range(size - 1):
        chunks[(rank - step - 1) % size].add_(shift(chunks[(rank - step) % size]))


# %% ring: wrong, makes a new tensor | change `x` itself
def ring_all_reduce(x, rank, size, shift):
    total = x.clone()
    for _ in range(size - 1):
        total = x + shift(total)
    return total


# %% ring: wrong, a rank that does not take part | raised IndexError
def ring_all_reduce(x, rank, size, shift):
    x.chunk(size)[size].add_(1)


# %% average: wrong, leaves the sum | What is the mean
def average_gradients(model, size, all_reduce):
    for parameter in model.parameters():
        if parameter.grad is not None:
            all_reduce(parameter.grad)


# %% average: wrong, takes every parameter for one with a gradient | raised AttributeError
def average_gradients(model, size, all_reduce):
    for parameter in model.parameters():
        all_reduce(parameter.grad)
        parameter.grad /= size


# %% average: wrong, averages parameters | It is the gradients
def average_gradients(model, size, all_reduce):
    for parameter in model.parameters():
        all_reduce(parameter.data)
        parameter.data /= size


# %% average: wrong, the first only | Not each gradient
def average_gradients(model, size, all_reduce):
    all_reduce(model.weight.grad)
    model.weight.grad /= size
