# %% weigh: wrong, the plain mean | every rank counts alike, whatever its rows
def weigh(loss, rows, size, all_reduce):
    return loss


# %% weigh: wrong, for a sum over the ranks | is 0.5 times that of one process
def weigh(loss, rows, size, all_reduce):
    total = torch.tensor(float(rows))
    all_reduce(total)
    return loss * rows / total


# %% weigh: wrong, the sum over rows | is 4 times that of one process
def weigh(loss, rows, size, all_reduce):
    return loss * rows


# %% weigh: wrong, takes equal shares for granted | is 0.5 times that of one process
def weigh(loss, rows, size, all_reduce):
    return loss * rows / (rows * size)


# %% weigh: wrong, uses what all_reduce returns | raised TypeError
def weigh(loss, rows, size, all_reduce):
    total = all_reduce(torch.tensor(float(rows)))
    return loss * rows * size / total


# %% weigh: wrong, gives all_reduce a number | `all_reduce` takes a tensor, not 4
def weigh(loss, rows, size, all_reduce):
    total = rows
    all_reduce(total)
    return loss * rows * size / total


# %% weigh: wrong, loses the graph | has lost its graph
def weigh(loss, rows, size, all_reduce):
    total = torch.tensor(float(rows))
    all_reduce(total)
    return torch.tensor(loss.item() * rows * size / total.item())


# %% weigh: wrong, the weight upside down | not that of one process; the ranks have the wrong weights
def weigh(loss, rows, size, all_reduce):
    total = torch.tensor(float(rows))
    all_reduce(total)
    return loss * total / (rows * size)


# %% weigh: wrong, only for two ranks | is 0.6667 times that of one process
def weigh(loss, rows, size, all_reduce):
    total = torch.tensor(float(rows))
    all_reduce(total)
    return loss * rows * 2 / total


# %% buckets: wrong, in the order of the model | your first bucket begins with a
def buckets(parameters, cap):
    found, room = [], 0
    for name, size in parameters:
        if not found or size > room:
            found.append([])
            room = cap
        found[-1].append(name)
        room -= size
    return found


# %% buckets: wrong, does not fill up to the cap | has more buckets than it must
def buckets(parameters, cap):
    found, room = [], 0
    for name, size in reversed(parameters):
        if not found or size >= room:
            found.append([])
            room = cap
        found[-1].append(name)
        room -= size
    return found


# %% buckets: wrong, forgets the last one | should be in exactly one bucket
def buckets(parameters, cap):
    found, bucket, full = [], [], 0
    for name, size in reversed(parameters):
        if bucket and full + size > cap:
            found.append(bucket)
            bucket, full = [], 0
        bucket.append(name)
        full += size
    return found


# %% buckets: wrong, closes a bucket when it is over the cap | has 9 bytes
def buckets(parameters, cap):
    found, full = [[]], 0
    for name, size in reversed(parameters):
        if full >= cap:
            found.append([])
            full = 0
        found[-1].append(name)
        full += size
    return found


# %% buckets: wrong, an empty bucket before a large parameter | has an empty bucket
def buckets(parameters, cap):
    found, full = [[]], 0
    for name, size in reversed(parameters):
        if full + size > cap:
            found.append([])
            full = 0
        found[-1].append(name)
        full += size
    return found


# %% buckets: wrong, reverses the list that it was given | The list `parameters` has changed
def buckets(parameters, cap):
    parameters.reverse()
    found, room = [], 0
    for name, size in parameters:
        if not found or size > room:
            found.append([])
            room = cap
        found[-1].append(name)
        room -= size
    return found


# %% buckets: wrong, each bucket in the order of the model | your first bucket begins with c
def buckets(parameters, cap):
    found, room = [], 0
    for name, size in reversed(parameters):
        if not found or size > room:
            found.append([])
            room = cap
        found[-1].insert(0, name)
        room -= size
    return found


# %% buckets: wrong, the size is not begun anew | has more buckets than it must
def buckets(parameters, cap):
    found, full = [], 0
    for name, size in reversed(parameters):
        if not found or full + size > cap:
            found.append([])
        found[-1].append(name)
        full += size
    return found


# %% buckets: wrong, a generator | it should return a list of lists
def buckets(parameters, cap):
    return ([name] for name, _ in reversed(parameters))


# %% exposed: wrong, nothing hides | is all that is sent; some of it hides
def exposed(backward, reduce):
    return sum(reduce)


# %% exposed: wrong, only the last bucket | A link that is slower than backward
def exposed(backward, reduce):
    return reduce[-1]


# %% exposed: wrong, when the last message arrives | How long has backward been over by then?
def exposed(backward, reduce):
    ready = free = 0
    for compute, send in zip(backward, reduce):
        ready += compute
        free = max(free, ready) + send
    return free


# %% exposed: wrong, messages travel at the same time | The link carries one after another
def exposed(backward, reduce):
    ready, ends = 0, []
    for compute, send in zip(backward, reduce):
        ready += compute
        ends.append(ready + send)
    return max(ends) - ready


# %% exposed: wrong, the link never waits for gradients | One bucket
def exposed(backward, reduce):
    return max(0, sum(reduce) - sum(backward))


# %% exposed: wrong, the link rests only before the first bucket | A link that is faster than backward
def exposed(backward, reduce):
    return max(0, backward[0] + sum(reduce) - sum(backward))


# %% exposed: wrong, empties the lists | The lists have changed
def exposed(backward, reduce):
    ready = free = 0
    while backward:
        ready += backward.pop(0)
        free = max(free, ready) + reduce.pop(0)
    return free - ready


# %% accumulate: wrong, adds up the micro-batches | is 2 times that of one process
def accumulate(model, loss_of, parts, size, all_reduce):
    for x, y in parts:
        loss_of(model(x), y).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    all_reduce(flat)
    pieces = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces):
        parameter.grad = piece.view_as(parameter) / size


# %% accumulate: wrong, every micro-batch counts alike | with micro-batches of [4, 1] rows: the gradient of 0.weight
def accumulate(model, loss_of, parts, size, all_reduce):
    for x, y in parts:
        (loss_of(model(x), y) / len(parts)).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    all_reduce(flat)
    pieces = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces):
        parameter.grad = piece.view_as(parameter) / size


# %% accumulate: wrong, the sum over the ranks | on rank 0 is 2 times that of one process
def accumulate(model, loss_of, parts, size, all_reduce):
    rows = sum(len(x) for x, _ in parts)
    for x, y in parts:
        (loss_of(model(x), y) * len(x) / rows).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    all_reduce(flat)
    pieces = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces):
        parameter.grad = piece.view_as(parameter)


# %% accumulate: wrong, an all-reduce for each parameter | after 4 all-reduces where one is enough
def accumulate(model, loss_of, parts, size, all_reduce):
    rows = sum(len(x) for x, _ in parts)
    for x, y in parts:
        (loss_of(model(x), y) * len(x) / rows).backward()
    for parameter in model.parameters():
        all_reduce(parameter.grad)
        parameter.grad /= size


# %% accumulate: wrong, adds up over the ranks after each micro-batch | after 8 all-reduces where one is enough
def accumulate(model, loss_of, parts, size, all_reduce):
    rows = sum(len(x) for x, _ in parts)
    for x, y in parts:
        (loss_of(model(x), y) * len(x) / rows).backward()
        for parameter in model.parameters():
            all_reduce(parameter.grad)
            parameter.grad /= size


# %% accumulate: wrong, does not put the sum back | on rank 0 is not that of one process
def accumulate(model, loss_of, parts, size, all_reduce):
    rows = sum(len(x) for x, _ in parts)
    for x, y in parts:
        (loss_of(model(x), y) * len(x) / rows).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    all_reduce(flat)
    flat /= size


# %% accumulate: wrong, puts flat pieces back | raised RuntimeError
def accumulate(model, loss_of, parts, size, all_reduce):
    rows = sum(len(x) for x, _ in parts)
    for x, y in parts:
        (loss_of(model(x), y) * len(x) / rows).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    all_reduce(flat)
    pieces = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces):
        parameter.grad = piece / size


# %% accumulate: wrong, clears the gradients between micro-batches | not that of one process
def accumulate(model, loss_of, parts, size, all_reduce):
    rows = sum(len(x) for x, _ in parts)
    for x, y in parts:
        model.zero_grad()
        (loss_of(model(x), y) * len(x) / rows).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    all_reduce(flat)
    pieces = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces):
        parameter.grad = piece.view_as(parameter) / size


# %% exposed: wrong, the link rests before the first and the last bucket only | A slow bucket in the middle
def exposed(backward, reduce):
    return max(reduce[-1], backward[0] + sum(reduce) - sum(backward))


# %% weigh: wrong, a whole mean number of rows | Ranks with [4, 3] rows
def weigh(loss, rows, size, all_reduce):
    total = torch.tensor(rows)
    all_reduce(total)
    return loss * rows / (total // size)


# %% exposed: wrong, looks at all messages and at the last two only | A long message before two short ones
def exposed(backward, reduce):
    if len(reduce) == 1:
        return reduce[0]
    waits = max(reduce[-1], reduce[-2] + reduce[-1] - backward[-1])
    return max(waits, sum(reduce) - sum(backward[1:]))


# %% accumulate: wrong, one forward for all micro-batches | goes through the model by itself
def accumulate(model, loss_of, parts, size, all_reduce):
    x, y = (torch.cat(each) for each in zip(*parts))
    loss_of(model(x), y).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    all_reduce(flat)
    pieces = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces):
        parameter.grad = piece.view_as(parameter) / size


# %% weigh: wrong, adds up the losses of all ranks, too | Its own loss times the factor is
def weigh(loss, rows, size, all_reduce):
    total = torch.tensor(float(rows))
    all_reduce(total)
    weighted = loss * rows
    all_reduce(weighted)
    return weighted * size / total


# %% buckets: wrong, two large ones share a bucket | the bucket ['c', 'b'] has 50 bytes
def buckets(parameters, cap):
    found, full = [], 0
    for name, size in reversed(parameters):
        if found and (full + size <= cap or min(full, size) > cap):
            found[-1].append(name)
            full += size
        else:
            found.append([name])
            full = size
    return found


# %% exposed: wrong, looks at the first message, the second and the last two only | A long message in the middle of six
def exposed(backward, reduce):
    places = {0, min(1, len(reduce) - 1), max(0, len(reduce) - 2), len(reduce) - 1}
    return max(sum(reduce[place:]) - sum(backward[place + 1 :]) for place in places)


# %% exposed: wrong, whole units of time only | Times with fractions
def exposed(backward, reduce):
    ready = free = 0
    for compute, send in zip(backward, reduce):
        ready += compute
        free = max(free, ready) + send
    return int(free - ready)


# %% accumulate: wrong, all forwards before the first backward | micro-batches waited for their backward
def accumulate(model, loss_of, parts, size, all_reduce):
    rows = sum(len(x) for x, _ in parts)
    sum(loss_of(model(x), y) * len(x) / rows for x, y in parts).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    all_reduce(flat)
    pieces = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces):
        parameter.grad = piece.view_as(parameter) / size


# %% accumulate: wrong, a loss of its own | and l1_loss as `loss_of`
def accumulate(model, loss_of, parts, size, all_reduce):
    rows = sum(len(x) for x, _ in parts)
    for x, y in parts:
        ((model(x) - y).square().mean() * len(x) / rows).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    all_reduce(flat)
    pieces = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces):
        parameter.grad = piece.view_as(parameter) / size
