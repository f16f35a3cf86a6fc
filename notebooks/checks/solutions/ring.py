# %% reduce_scatter
def reduce_scatter(x, rank, size, shift):
    sums = [chunk.clone() for chunk in x.chunk(size)]
    for step in range(size - 1):
        sums[(rank - step - 2) % size] += shift(sums[(rank - step - 1) % size])
    return sums[rank]


# %% all_gather
def all_gather(chunk, rank, size, shift):
    chunks = [None] * size
    chunks[rank] = chunk
    for step in range(size - 1):
        chunks[(rank - step - 1) % size] = shift(chunks[(rank - step) % size])
    return torch.cat(chunks)


# %% all_reduce
def all_reduce(x, size, reduce_scatter, all_gather):
    flat = x.flatten()
    missing = -len(flat) % size
    padded = torch.cat([flat, flat.new_zeros(missing)])
    total = all_gather(reduce_scatter(padded))
    return total[: len(flat)].reshape(x.shape)


# %% on_ranks
def ring_all_reduce(x):
    rank, size = dist.get_rank(), dist.get_world_size()

    def shift(tensor):
        came = torch.empty_like(tensor)
        sending = dist.isend(tensor, (rank + 1) % size)
        dist.recv(came, (rank - 1) % size)
        sending.wait()
        return came

    return rings.all_reduce(x, rank, size, shift)


# %% doubling
def all_reduce_by_doubling(x, rank, size, exchange):
    total = x.clone()
    distance = 1
    while distance < size:
        total = total + exchange(rank ^ distance, total)
        distance *= 2
    return total
