# %% gathered
def all_gather(mine, rank, size, broadcast):
    places = [torch.empty_like(mine) for _ in range(size)]
    places[rank].copy_(mine)
    for source in range(size):
        broadcast(places[source], source)
    return places


# %% scattered
def reduce_scatter(x, rank, size, all_to_all):
    came = all_to_all(list(x.chunk(size)))
    return torch.stack(came).sum(0)


# %% average
def average_gradients(model, size, all_reduce):
    for parameter in model.parameters():
        if parameter.grad is not None:
            all_reduce(parameter.grad)
            parameter.grad /= size


# %% which
def which(before, after):
    ranks = range(len(before))

    def chunk(numbers, rank):
        each = len(numbers) // len(before)
        return numbers[rank * each : (rank + 1) * each]

    sums = [sum(numbers) for numbers in zip(*before)]
    everything = [number for row in before for number in row]
    if sum(map(bool, after)) == 1:  # one rank alone has a result
        return "gather" if everything in after else "reduce"
    if sum(map(bool, before)) == 1:
        return "scatter"
    if all(row == after[0] for row in after):
        return {tuple(sums): "all_reduce", tuple(everything): "all_gather"}.get(tuple(after[0]), "broadcast")
    return "reduce_scatter" if all(after[rank] == chunk(sums, rank) for rank in ranks) else "all_to_all"
