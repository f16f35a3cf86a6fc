# %% weigh
def weigh(loss, rows, size, all_reduce):
    total = torch.tensor(float(rows))
    all_reduce(total)
    return loss * rows * size / total


# %% buckets
def buckets(parameters, cap):
    found, room = [], 0
    for name, size in reversed(parameters):
        if not found or size > room:
            found.append([])
            room = cap
        found[-1].append(name)
        room -= size
    return found


# %% exposed
def exposed(backward, reduce):
    ready = free = 0
    for compute, send in zip(backward, reduce):
        ready += compute
        free = max(free, ready) + send
    return free - ready


# %% on_ranks
def average(model, loss, most):
    backwards = list(model.parameters())[::-1]
    each = -(-len(backwards) // most)
    on_the_way = []

    def watch(group):
        def ready(_):
            if all(parameter.grad is not None for parameter in group):
                flat = torch.cat([parameter.grad.flatten() for parameter in group])
                on_the_way.append((group, flat, dist.all_reduce(flat, async_op=True)))

        for parameter in group:
            parameter.register_post_accumulate_grad_hook(ready)

    for first in range(0, len(backwards), each):
        watch(backwards[first : first + each])
    loss.backward()
    for group, flat, sending in on_the_way:
        sending.wait()
        pieces = flat.split([parameter.numel() for parameter in group])
        for parameter, piece in zip(group, pieces):
            parameter.grad.copy_(piece.view_as(parameter) / dist.get_world_size())


# %% accumulate
def accumulate(model, loss_of, parts, size, all_reduce):
    rows = sum(len(x) for x, _ in parts)
    for x, y in parts:
        (loss_of(model(x), y) * len(x) / rows).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    all_reduce(flat)
    pieces = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces):
        parameter.grad = piece.view_as(parameter) / size


# %% hidden
sent = 2 * 63 / 64 * 2 / 50e9  # seconds for each parameter
tokens = sent * 400e12 / 4


# %% rows_of
def rows_of(rank, size, length, epoch, shuffled):
    order = shuffled(length, epoch)
    wanted = -(-length // size) * size
    while len(order) < wanted:
        order = order + order[: wanted - len(order)]
    return order[rank::size]
