# %% descend: wrong, makes a new tensor | has not changed. The step made a new tensor
# => values = weight.local_value()
# => gradient = dist_autograd.get_gradients(context_id).get(values, 0)
# => return values - lr * gradient
# %% descend: wrong, uphill | it goes to
# => values = weight.local_value()
# => gradient = dist_autograd.get_gradients(context_id).get(values, torch.zeros(3))
# => with torch.no_grad():
# =>     values += lr * gradient
# => return values
# %%% descend: wrong, records the step in the graph | leaf Variable
# -     with torch.no_grad():
# -         values += lr * gradient
# +     values -= lr * gradient
# %%% descend: wrong, every weight has a gradient | took no part has no entry
# -     gradient = dist_autograd.get_gradients(context_id).get(values, torch.zeros(3))
# values += lr * gradient => values -= lr * dist_autograd.get_gradients(context_id)[values]
# %%% descend: wrong, takes .grad | which is None here: backward has put the gradients into the context
# -     gradient = dist_autograd.get_gradients(context_id).get(values, torch.zeros(3))
# values += lr * gradient => values -= lr * values.grad
# %%% descend: wrong, returns zeros where there is no gradient | Return its parameter, (5, 6, 7)
# -     gradient = dist_autograd.get_gradients(context_id).get(values, torch.zeros(3))
# +     gradient = dist_autograd.get_gradients(context_id).get(values)
# +     if gradient is None:
# +         return torch.zeros_like(values)
# values + => values -
# %% descend: wrong, steps with all gradients that the owner has | should stay as it is
# => values = weight.local_value()
# => with torch.no_grad():
# =>     for gradient in dist_autograd.get_gradients(context_id).values():
# =>         values -= lr * gradient
# => return values
# %% descend: wrong, takes .grad where there is one | The weight itself has not changed. It reads `.grad`
# => parameter = weight.local_value()
# => if parameter.grad is not None:
# =>     with torch.no_grad():
# =>         parameter -= lr * parameter.grad
# => return parameter
# %% descend: wrong, changes a copy | Did the step change another tensor
# => values = weight.local_value()
# => gradient = dist_autograd.get_gradients(context_id).get(values, 0)
# => step = values.detach().clone()
# => step -= lr * gradient
# => return values
# %% descend: wrong, forgets the learning rate | it goes to
# lr * gradient => gradient
# %% descend: wrong, no weight where there was no gradient | took no part too
# -     return values
# +         return values
# +     return None
# %% descend: right, by `add_`
# => values = weight.to_here()
# => gradients = dist_autograd.get_gradients(context_id)
# => if values in gradients:
# =>     values.data.add_(gradients[values], alpha=-lr)
# => return values
# %% descend: wrong, changes the gradient in the context | Leave it as it is
# values -= lr * gradient => values -= gradient.mul_(lr)
# %% descend: wrong, returns the RRef | Return the parameter itself
# return values => return weight
# %% global_norm: wrong, adds up norms | Norms of weights do not add up
def own_norm(context_id, weight):
    return dist_autograd.get_gradients(context_id)[weight.local_value()].norm().item()


def global_norm(context_id, weights):
    return sum(rpc.rpc_sync(weight.owner(), own_norm, (context_id, weight)) for weight in weights)


# %%% global_norm: wrong, every weight has a gradient | raised KeyError
# def own_norm => def must_have
# .norm => .square().sum
# -     return sum(rpc.rpc_sync(weight.owner(), own_norm, (context_id, weight)) for weight in weights)
# +     futures = [rpc.rpc_async(weight.owner(), must_have, (context_id, weight)) for weight in weights]
# +     return sum(future.wait() for future in futures) ** 0.5
# %% global_norm: wrong, the largest of the norms | That is the largest of the norms
def global_norm(context_id, weights):
    return max(rpc.rpc_sync(weight.owner(), own_norm, (context_id, weight)) for weight in weights)


# %% global_norm: wrong, looks for the gradients here | the function raised
def global_norm(context_id, weights):
    found = dist_autograd.get_gradients(context_id)
    return sum(found[weight.local_value()].square().sum().item() for weight in weights) ** 0.5


# %% global_norm: wrong, forgets the root | without the root
# def square_sum => def own_squares
# square_sum, => own_squares,
# ) ** 0.5 => )
# %% global_norm: wrong, one owner after the other | before the other one was asked
def global_norm(context_id, weights):
    return sum(rpc.rpc_sync(weight.owner(), own_squares, (context_id, weight)) for weight in weights) ** 0.5


# %%% global_norm: wrong, the norm of the weights | not of their gradients
# rpc.rpc_sync(weight.owner(), own_squares, (context_id, weight)) => weight.to_here().square().sum().item()
# %% global_norm: wrong, waits inside the loop | before the other one was asked
def global_norm(context_id, weights):
    total = 0.0
    for weight in weights:
        total += rpc.rpc_async(weight.owner(), own_squares, (context_id, weight)).wait()
    return total**0.5


# %% global_norm: wrong, the gradients travel | a gradient of 1000 numbers
# def square_sum => def own_gradient
# -     return 0.0 if gradient is None else gradient.square().sum().item()
# +     return torch.zeros(1) if gradient is None else gradient
# square_sum, => own_gradient,
# sum(future.wait() for future in futures) ** 0.5 => torch.cat([future.wait() for future in futures]).norm().item()
# %% global_norm: right, a tensor
def global_norm(context_id, weights):
    futures = [rpc.rpc_async(weight.owner(), own_squares, (context_id, weight)) for weight in weights]
    return torch.tensor([future.wait() for future in futures]).sum().sqrt()


# %% global_norm: wrong, all gradients of the context, whatever the weights are | that is not asked for
def all_squares(context_id):
    return sum(gradient.square().sum().item() for gradient in dist_autograd.get_gradients(context_id).values())


def global_norm(context_id, weights):
    owners = {weight.owner_name() for weight in weights}
    futures = [rpc.rpc_async(owner, all_squares, (context_id,)) for owner in owners]
    return sum(future.wait() for future in futures) ** 0.5


# %% global_norm: wrong, squares the gradients in place | a gradient in the context is another one
# def square_sum => def squared_in_place
# square() => square_()
# square_sum, => squared_in_place,
# %% global_norm: wrong, every owner has a gradient | and one on worker2 without a gradient, the function raised
def one_vector(context_id, weights):
    gradients = dist_autograd.get_gradients(context_id)
    mine = [gradients[w.local_value()].flatten() for w in weights if w.local_value() in gradients]
    return torch.cat(mine).square().sum().item()


def global_norm(context_id, weights):
    owners = {}
    for weight in weights:
        owners.setdefault(weight.owner_name(), []).append(weight)
    futures = [rpc.rpc_async(owner, one_vector, (context_id, own)) for owner, own in owners.items()]
    return sum(future.wait() for future in futures) ** 0.5


# %%% global_norm: right, one call for each owner
# def one_vector => def square_sums
# -     mine = [gradients[w.local_value()].flatten() for w in weights if w.local_value() in gradients]
# -     return torch.cat(mine).square().sum().item()
# +     return sum(float(gradients[w.local_value()].norm()) ** 2 for w in weights if w.local_value() in gradients)
# one_vector => square_sums
# %% restore: wrong, only the optimizer | 2 are not those that were saved. None has changed.
def restore(directory, optimizer, weights):
    optimizer.load(directory)


# %% restore: wrong, only the weights | lost its momentum
# -     optimizer.load(directory)
# %% restore: wrong, makes other weights | The list now has references to new weights
def restore(directory, optimizer, weights):
    values = torch.load(Path(directory) / "weights.pt")
    weights[:] = [rpc.remote(weight.owner(), nn.Parameter, (v,)) for weight, v in zip(weights, values)]
    optimizer.load(directory)


# %% restore: wrong, changes copies | gives this notebook a copy
def restore(directory, optimizer, weights):
    with torch.no_grad():
        for weight, values in zip(weights, torch.load(Path(directory) / "weights.pt")):
            weight.to_here().copy_(values)
    optimizer.load(directory)


# %% restore: wrong, makes other weights in a list of its own | new weights were made beside them
def restore(directory, optimizer, weights):
    values = torch.load(Path(directory) / "weights.pt")
    weights = [rpc.remote(weight.owner(), nn.Parameter, (v,)) for weight, v in zip(weights, values)]
    optimizer.load(directory)


# %% restore: wrong, gives each worker the weight of another | Each was put into another weight
def restore(directory, optimizer, weights):
    for weight, values in zip(weights[::-1], torch.load(Path(directory) / "weights.pt")):
        rpc.rpc_sync(weight.owner(), put, (weight, values))
    optimizer.load(directory)


# %%% restore: wrong, makes another optimizer | lost its momentum
# [::-1], => ,
# -         rpc.rpc_sync(weight.owner(), put, (weight, values))
# +         rpc.rpc_sync(weight.owner(), put, (weight, values))
# +     optimizer = DistributedOptimizer(torch.optim.SGD, weights, lr=0.1, momentum=0.9)
# %% restore: right, all owners at once, the optimizer first
def set_data(weight, values):
    weight.local_value().data[:] = values


def restore(directory, optimizer, weights):
    optimizer.load(directory)
    saved = torch.load(Path(directory) / "weights.pt")
    for future in [rpc.rpc_async(w.owner(), set_data, (w, values)) for w, values in zip(weights, saved)]:
        future.wait()


# %% restore: wrong, weights where they were when they were saved | With weights that now live on worker2 and worker1
# put(weight, values) => put_back(weight, values)
# -     for weight, values in zip(weights, torch.load(Path(directory) / "weights.pt")):
# -         rpc.rpc_sync(weight.owner(), put, (weight, values))
# +     saved = torch.load(Path(directory) / "weights.pt")
# +     rpc.rpc_sync("worker1", put_back, (weights[0], saved[0]))
# +     rpc.rpc_sync("worker2", put_back, (weights[1], saved[1]))
# %% restore: wrong, two weights always | Of 3 weights on the workers 1 are not
def restore(directory, optimizer, weights):
    saved = torch.load(Path(directory) / "weights.pt")
    for place in (0, 1):
        rpc.rpc_sync(weights[place].owner(), put, (weights[place], saved[place]))
    optimizer.load(directory)


# %%% restore: wrong, the last weight only | Of 2 weights on the workers 1 are not
# -     for place in (0, 1):
# -         rpc.rpc_sync(weights[place].owner(), put, (weights[place], saved[place]))
# +     rpc.rpc_sync(weights[-1].owner(), put, (weights[-1], saved[-1]))
# %% momentum_step: wrong, no momentum | steps with the gradient alone
# => with torch.no_grad():
# =>     for weight, gradient in zip(weights, gradients):
# =>         if gradient is not None:
# =>             weight -= lr * gradient
# %%% momentum_step: right, in place
# weight, gradient in zip(weights, gradients) => place, (weight, gradient) in enumerate(zip(weights, gradients))
# -                 weight -= lr * gradient
# +                 if velocities[place] is None:
# +                     velocities[place] = torch.zeros_like(weight)
# +                 velocities[place].mul_(momentum).add_(gradient)
# +                 weight.add_(velocities[place], alpha=-lr)
# %% momentum_step: wrong, moves on without a gradient | no gradient is not a gradient of zero
# -         if gradient is None:
# -             continue
# +         gradient = torch.zeros_like(weights[place]) if gradient is None else gradient
# %% momentum_step: wrong, an average of gradients | counts with 1 - momentum only
# => for place, gradient in enumerate(gradients):
# =>     if gradient is not None:
# =>         old = 0 if velocities[place] is None else velocities[place]
# =>         velocities[place] = momentum * old + (1 - momentum) * gradient
# =>         with torch.no_grad():
# =>             weights[place] -= lr * velocities[place]
# %%% momentum_step: wrong, an average of gradients after the first | counts with 1 - momentum only
# momentum * old + => gradient if velocities[place] is None else momentum * old +
# %%% momentum_step: wrong, keeps the velocities to itself | as if no velocity were kept
# - def momentum_step(weights, gradients, velocities, lr, momentum):
# + def momentum_step(weights, gradients, velocities, lr, momentum):
# +     velocities = list(velocities)
# 0 if velocities[place] is None else velocities => velocities
# momentum * old + (1 - momentum) * => gradient.clone() if old is None else momentum * old +
# %%% momentum_step: wrong, the velocity is the gradient itself, which then changes | the gradients are
# 0 if velocities[place] is None else velocities => velocities
# momentum * old + (1 - momentum) * gradient => gradient if old is None else gradient.add_(old, alpha=momentum)
# %%% momentum_step: wrong, the learning rate is in the velocity | The learning rate is in your velocity
# (1 - momentum) => lr
# lr * velocities => velocities
# %% momentum_step: wrong, records the step in the graph | leaf Variable
# => for place, gradient in enumerate(gradients):
# =>     if gradient is not None:
# =>         old = velocities[place]
# =>         velocities[place] = gradient.clone() if old is None else momentum * old + gradient
# =>         weights[place] -= lr * velocities[place]
# %%% momentum_step: wrong, makes new weights | another object
# [place] -= lr * velocities[place] => [place] = nn.Parameter(weights[place] - lr * velocities[place])
# %% momentum_step: wrong, steps before the velocity changes | velocity of the step before
# => for place, gradient in enumerate(gradients):
# =>     if gradient is not None:
# =>         velocity = gradient if velocities[place] is None else velocities[place]
# =>         with torch.no_grad():
# =>             weights[place] -= lr * velocity
# =>         velocities[place] = momentum * velocity + gradient
# %% momentum_step: wrong, the first velocity is the gradient's own tensor | It begins as a copy
# => for place, gradient in enumerate(gradients):
# =>     if gradient is None:
# =>         continue
# =>     if velocities[place] is None:
# =>         velocities[place] = gradient
# =>     else:
# =>         velocities[place].mul_(momentum).add_(gradient)
# =>     weights[place].data -= lr * velocities[place]
# %% momentum_step: wrong, all velocities begin at the first step | The function raised
def momentum_step(weights, gradients, velocities, lr, momentum):
    if all(velocity is None for velocity in velocities):
        velocities[:] = [gradient.clone() for gradient in gradients]
    else:
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                velocities[place] = momentum * velocities[place] + gradient
    with torch.no_grad():
        for weight, gradient, velocity in zip(weights, gradients, velocities):
            if gradient is not None:
                weight -= lr * velocity


# %% momentum_step: wrong, keeps the velocities in a list of its own | The owner keeps this list
own_velocities = {}


def momentum_step(weights, gradients, velocities, lr, momentum):
    for place, gradient in enumerate(gradients):
        if gradient is not None:
            old = own_velocities.get(place)
            own_velocities[place] = gradient.clone() if old is None else momentum * old + gradient
            with torch.no_grad():
                weights[place] -= lr * own_velocities[place]
