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


# %% at_once
def at_once(modules, numbers, parts):
    embedding, reader, decoder = modules
    begun = [embedding.forward_async(part) for part in numbers.chunk(parts)]
    begun = [reader.forward_async(part.wait()) for part in begun]
    begun = [decoder.forward_async(part.wait()) for part in begun]
    return torch.cat([part.wait() for part in begun])


# %% along_time
def along_time(lower, upper, vectors, pieces):
    low = high = above = None
    found = []
    for piece in vectors.chunk(pieces, 1):
        below = lower.forward_async(piece, low)
        if above is not None:
            hidden, high = above.wait()
            found.append(hidden)
        hidden, low = below.wait()
        above = upper.forward_async(hidden, high)
    found.append(above.wait()[0])
    return torch.cat(found, 1)
