# %% move_decoder: wrong, takes the parameters before the move | the decoder is what it was
def move_decoder(modules):
    trained = parameters(modules)
    modules[2].to("worker2")
    return DistributedOptimizer(torch.optim.Adam, trained, lr=0.02)


# %% move_decoder: wrong, trains the decoder alone | the embedding is what it was
def move_decoder(modules):
    modules[2].to("worker2")
    return DistributedOptimizer(torch.optim.Adam, modules[2].remote_parameters(), lr=0.02)


# %% move_decoder: wrong, does not move it | they are on
def move_decoder(modules):
    return DistributedOptimizer(torch.optim.Adam, parameters(modules), lr=0.02)


# %% move_decoder: wrong, makes a new one | they are on
def move_decoder(modules):
    moved = (*modules[:2], RemoteModule("worker2", nn.Linear, (48, 10)))
    return DistributedOptimizer(torch.optim.Adam, parameters(moved), lr=0.02)


# %% short_way: wrong, through the notebook | 3 messages with activations
def short_way(modules, numbers):
    return forward(modules, numbers)


# %% short_way: wrong, only the first half of the way | 2 messages with activations
def half_way(modules, numbers):
    return modules[1](modules[0](numbers))


def short_way(modules, numbers):
    return modules[2](rpc.rpc_sync("worker1", half_way, (modules, numbers)))


# %% short_way: wrong, cuts the graph | No graph leads back
def on_worker1(modules, numbers):
    return forward(modules, numbers).detach()


def short_way(modules, numbers):
    return rpc.rpc_sync("worker1", on_worker1, (modules, numbers))


# %% short_way: wrong, leaves out the decoder | not the scores
def on_worker1(modules, numbers):
    return modules[1](modules[0](numbers))


def short_way(modules, numbers):
    return rpc.rpc_sync("worker1", on_worker1, (modules, numbers))


# %% two_halves: wrong, one after the other | took turns
def two_halves(modules, numbers):
    return torch.cat([forward(modules, half) for half in numbers.chunk(2)])


# %% two_halves: wrong, waits at once | took turns
def two_halves(modules, numbers):
    halves = []
    for half in numbers.chunk(2):
        for module in modules:
            half = module.forward_async(half).wait()
        halves.append(half)
    return torch.cat(halves)


# %% two_halves: wrong, in one piece | in one piece
def two_halves(modules, numbers):
    for module in modules:
        numbers = module.forward_async(numbers).wait()
    return numbers


# %% two_halves: wrong, mixes up the order | in the same order
def two_halves(modules, numbers):
    parts = [numbers[0::2], numbers[1::2]]
    for module in modules:
        futures = [module.forward_async(part) for part in parts]
        parts = [future.wait() for future in futures]
    return torch.cat(parts)
