# %% descend
def descend(weight, context_id, lr):
    values = weight.local_value()
    gradient = dist_autograd.get_gradients(context_id).get(values)
    if gradient is not None:
        with torch.no_grad():
            values -= lr * gradient
    return values


# %% global_norm
def square_sum(context_id, weight):
    gradient = dist_autograd.get_gradients(context_id).get(weight.local_value())
    return 0.0 if gradient is None else gradient.square().sum().item()


def global_norm(context_id, weights):
    futures = [rpc.rpc_async(weight.owner(), square_sum, (context_id, weight)) for weight in weights]
    return sum(future.wait() for future in futures) ** 0.5


# %% restore
def put(weight, values):
    with torch.no_grad():
        weight.local_value().copy_(values)


def restore(directory, optimizer, weights):
    for weight, values in zip(weights, torch.load(Path(directory) / "weights.pt")):
        rpc.rpc_sync(weight.owner(), put, (weight, values))
    optimizer.load(directory)


# %% momentum_step
def momentum_step(weights, gradients, velocities, lr, momentum):
    for place, gradient in enumerate(gradients):
        if gradient is None:
            continue
        old = velocities[place]
        velocities[place] = gradient.clone() if old is None else momentum * old + gradient
        with torch.no_grad():
            weights[place] -= lr * velocities[place]
