# %% descend: wrong, makes a new tensor | a new tensor
def descend(weight, context_id, lr):
    values = weight.local_value()
    gradient = dist_autograd.get_gradients(context_id).get(values, 0)
    return values - lr * gradient


# %% descend: wrong, takes .grad | TypeError
def descend(weight, context_id, lr):
    values = weight.local_value()
    with torch.no_grad():
        values -= lr * values.grad
    return values


# %% descend: wrong, records the step in the graph | leaf Variable
def descend(weight, context_id, lr):
    values = weight.local_value()
    gradient = dist_autograd.get_gradients(context_id).get(values, torch.zeros(3))
    values -= lr * gradient
    return values


# %% descend: wrong, uphill | it goes to
def descend(weight, context_id, lr):
    values = weight.local_value()
    gradient = dist_autograd.get_gradients(context_id).get(values, torch.zeros(3))
    with torch.no_grad():
        values += lr * gradient
    return values


# %% descend: wrong, every weight has a gradient | took no part has no entry
def descend(weight, context_id, lr):
    values = weight.local_value()
    with torch.no_grad():
        values -= lr * dist_autograd.get_gradients(context_id)[values]
    return values


# %% global_norm: wrong, adds up norms | and yours gave
def own_norm(context_id, weight):
    return dist_autograd.get_gradients(context_id)[weight.local_value()].norm().item()


def global_norm(context_id, weights):
    return sum(rpc.rpc_sync(weight.owner(), own_norm, (context_id, weight)) for weight in weights)


# %% global_norm: wrong, the largest of the norms | and yours gave
def own_norm(context_id, weight):
    return dist_autograd.get_gradients(context_id)[weight.local_value()].norm().item()


def global_norm(context_id, weights):
    return max(rpc.rpc_sync(weight.owner(), own_norm, (context_id, weight)) for weight in weights)


# %% global_norm: wrong, looks for the gradients here | It raised
def global_norm(context_id, weights):
    found = dist_autograd.get_gradients(context_id)
    return sum(found[weight.local_value()].square().sum().item() for weight in weights) ** 0.5


# %% global_norm: wrong, the norm of the weights | and yours gave
def global_norm(context_id, weights):
    return sum(weight.to_here().square().sum().item() for weight in weights) ** 0.5


# %% restore: wrong, only the optimizer | weights on the workers are not those
def restore(directory, optimizer, weights):
    optimizer.load(directory)


# %% restore: wrong, only the weights | lost its memory
def put(weight, values):
    with torch.no_grad():
        weight.local_value().copy_(values)


def restore(directory, optimizer, weights):
    for weight, values in zip(weights, torch.load(Path(directory) / "weights.pt")):
        rpc.rpc_sync(weight.owner(), put, (weight, values))


# %% restore: wrong, makes other weights | weights on the workers are not those
def restore(directory, optimizer, weights):
    values = torch.load(Path(directory) / "weights.pt")
    weights[:] = [rpc.remote(weight.owner(), nn.Parameter, (v,)) for weight, v in zip(weights, values)]
    optimizer.load(directory)


# %% restore: wrong, changes copies | weights on the workers are not those
def restore(directory, optimizer, weights):
    with torch.no_grad():
        for weight, values in zip(weights, torch.load(Path(directory) / "weights.pt")):
            weight.to_here().copy_(values)
    optimizer.load(directory)
