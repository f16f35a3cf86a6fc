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
