# %% carry_back: wrong, one pass for each tensor | was gone when the second pass
def carry_back(received, returned, gradients):
    for tensor, gradient in zip(returned, gradients):
        if gradient is not None:
            tensor.backward(gradient)
    return [tensor.grad for tensor in received]


# %% carry_back: wrong, two passes that keep the graph | ran 2 times
def carry_back(received, returned, gradients):
    for tensor, gradient in zip(returned, gradients):
        if gradient is not None:
            tensor.backward(gradient, retain_graph=True)
    return [tensor.grad for tensor in received]


# %% carry_back: wrong, forgets the gradients that came | gradient of the first tensor should be
def carry_back(received, returned, gradients):
    used = [tensor.sum() for tensor, gradient in zip(returned, gradients) if gradient is not None]
    torch.stack(used).sum().backward()
    return [tensor.grad for tensor in received]


# %% carry_back: wrong, passes None on to torch | torch says
def carry_back(received, returned, gradients):
    torch.autograd.backward(returned, gradients)
    return [tensor.grad for tensor in received]


# %% carry_back: wrong, zeros for what nobody needed | its gradient is None
def carry_back(received, returned, gradients):
    gradients = [torch.zeros_like(t) if g is None else g for t, g in zip(returned, gradients)]
    torch.autograd.backward(returned, gradients)
    return [tensor.grad for tensor in received]


# %% discover: wrong, only the first step | is missing
def discover(found, behind):
    return set(found)


# %% discover: wrong, all that was recorded | no gradient will ever come
def discover(found, behind):
    return set(behind)


# %% discover: wrong, walks every way anew | asked twice
def discover(found, behind):
    known = set(found)
    for message in found:
        known |= discover(behind[message], behind)
    return known


# %% discover: wrong, two steps | is missing
def discover(found, behind):
    return set(found) | {far for message in found for far in behind[message]}


# %% step: wrong, still copies | weight1 is still without
def step(x, weight1, weight2):
    with dist_autograd.context() as context_id:
        hidden = rpc.rpc_sync("worker1", run, (first_half, x, weight1))
        safe = torch.tensor(hidden.tolist(), dtype=torch.double)
        loss = rpc.rpc_sync("worker2", run, (second_half, safe, weight2))
        dist_autograd.backward(context_id, [loss])
        return gradients(context_id)


# %% step: wrong, the first call is still outside | weight1 is still without
def step(x, weight1, weight2):
    hidden = rpc.rpc_sync("worker1", run, (first_half, x, weight1))
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker2", run, (second_half, hidden, weight2))
        dist_autograd.backward(context_id, [loss])
        return gradients(context_id)


# %% step: wrong, a context for each call | another autograd context
def step(x, weight1, weight2):
    with dist_autograd.context():
        hidden = rpc.rpc_sync("worker1", run, (first_half, x, weight1))
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker2", run, (second_half, hidden, weight2))
        dist_autograd.backward(context_id, [loss])
        return gradients(context_id)


# %% step: wrong, zeros where nothing was found | not that of the whole loss
def step(x, weight1, weight2):
    hidden = rpc.rpc_sync("worker1", run, (first_half, x, weight1)).detach()
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker2", run, (second_half, hidden, weight2))
        dist_autograd.backward(context_id, [loss])
        far = rpc.rpc_sync("worker2", gradient_of, (context_id, weight2))
        return [torch.zeros(4, 5, dtype=torch.double), far]
