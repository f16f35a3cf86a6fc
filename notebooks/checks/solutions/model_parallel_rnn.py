# %% move_decoder
def move_decoder(modules):
    modules[2].to("worker2")
    return DistributedOptimizer(torch.optim.Adam, parameters(modules), lr=0.02)


# %% short_way
def on_worker1(modules, numbers):
    embedding, reader, decoder = modules
    vectors = embedding.get_module_rref().local_value()(numbers)
    return decoder.get_module_rref().local_value()(reader(vectors))


def short_way(modules, numbers):
    return rpc.rpc_sync("worker1", on_worker1, (modules, numbers))


# %% two_halves
def two_halves(modules, numbers):
    parts = numbers.chunk(2)
    for module in modules:
        futures = [module.forward_async(part) for part in parts]
        parts = [future.wait() for future in futures]
    return torch.cat(parts)
