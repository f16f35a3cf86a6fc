# %% ring
def ring_all_reduce(x, rank, size, shift):
    chunks = x.chunk(size)
    for step in range(size - 1):
        chunks[(rank - step - 1) % size].add_(shift(chunks[(rank - step) % size]))
    for step in range(size - 1):
        chunks[(rank - step) % size].copy_(shift(chunks[(rank - step + 1) % size]))


# %% average
def average_gradients(model, size, all_reduce):
    for parameter in model.parameters():
        if parameter.grad is not None:
            all_reduce(parameter.grad)
            parameter.grad /= size
