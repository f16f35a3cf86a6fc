# %% move_decoder: wrong, takes the parameters before the move | the decoder is what it was
# => trained = parameters(modules)
# => modules[2].to("worker2")
# => return DistributedOptimizer(torch.optim.Adam, trained, lr=0.02)
# %% move_decoder: wrong, trains the decoder alone | the embedding is what it was
# parameters(modules) => modules[2].remote_parameters()
# %% move_decoder: wrong, does not move it | they are on
# => return DistributedOptimizer(torch.optim.Adam, parameters(modules), lr=0.02)
# %% move_decoder: wrong, makes a new one | they are on
# => moved = (*modules[:2], RemoteModule("worker2", nn.Linear, (48, 10)))
# => return DistributedOptimizer(torch.optim.Adam, parameters(moved), lr=0.02)
# %% move_decoder: wrong, moves the embedding | they are on
# modules[2] => modules[0]
# %% move_decoder: wrong, SGD | moves each weight by 0.02
# optim.Adam => optim.SGD
# %% move_decoder: wrong, another learning rate | moves each weight by 0.02
# , lr=0.02 => , lr=0.2
# %% move_decoder: wrong, an optimizer of this process | Return a DistributedOptimizer
# => modules[2].to("worker2")
# => return torch.optim.Adam([each.to_here() for each in parameters(modules)], lr=0.02)
# %% move_decoder: wrong, the first parameter of each module | a parameter of the embedding is what it was
# parameters(modules) => [module.remote_parameters()[0] for module in modules]
# %% short_way: wrong, only the first half of the way | 2 messages with activations
def half_way(modules, numbers):
    return modules[1](modules[0](numbers))


def short_way(modules, numbers):
    return modules[2](rpc.rpc_sync("worker1", half_way, (modules, numbers)))


# %%% short_way: wrong, leaves out the decoder | not the scores
# def half_way => def on_worker1
# -     return modules[2](rpc.rpc_sync("worker1", half_way, (modules, numbers)))
# +     return rpc.rpc_sync("worker1", on_worker1, (modules, numbers))
# %% short_way: wrong, cuts the graph | No graph leads back
# -     embedding, reader, decoder = modules
# -     vectors = embedding.get_module_rref().local_value()(numbers)
# -     return decoder.get_module_rref().local_value()(reader(vectors))
# +     return forward(modules, numbers).detach()
# %% short_way: wrong, through the notebook | 3 messages with activations
def short_way(modules, numbers):
    return forward(modules, numbers)


# %%% short_way: wrong, returns the future | should be the scores
# forward(modules, numbers) => rpc.rpc_async("worker1", forward, (modules, numbers))
# %%% short_way: wrong, an RRef of the scores | should be the scores
# forward(modules, numbers) => rpc.remote("worker1", forward, (modules, numbers))
# %% short_way: wrong, another order of the modules | not the scores
# -     vectors = embedding.get_module_rref().local_value()(numbers)
# -     return decoder.get_module_rref().local_value()(reader(vectors))
# +     return reader(decoder(embedding(numbers)))
# %% short_way: wrong, cuts the graph behind the embedding | No gradient comes back to the embedding
# (numbers) => (numbers).detach()
# %% short_way: wrong, cuts the graph in the notebook | No graph leads back
# def on_worker1 => def whole_way
# ("worker1", on_worker1, (modules, numbers)) => ("worker1", whole_way, (modules, numbers)).detach()
# %% at_once: wrong, one after the other | it took 16 units of time
# => return torch.cat([forward(modules, part) for part in numbers.chunk(parts)])
# %% at_once: wrong, waits at once | it took 16 units of time
# => found = []
# => for part in numbers.chunk(parts):
# =>     for module in modules:
# =>         part = module.forward_async(part).wait()
# =>     found.append(part)
# => return torch.cat(found)
# %% at_once: wrong, module by module | it took 16 units of time
# => parts = numbers.chunk(parts)
# => for module in modules:
# =>     futures = [module.forward_async(part) for part in parts]
# =>     parts = [future.wait() for future in futures]
# => return torch.cat(parts)
# %% at_once: wrong, only the embedding ahead | it took 14 units of time
# => embedding, reader, decoder = modules
# => begun = [embedding.forward_async(part) for part in numbers.chunk(parts)]
# => return torch.cat([decoder(reader(part.wait())) for part in begun])
# %% at_once: wrong, in one piece | called [1, 1, 1] times
# => for module in modules:
# =>     numbers = module.forward_async(numbers).wait()
# => return numbers
# %% at_once: wrong, two halves always | called [2, 2, 2] times
# chunk(parts) => chunk(2)
# %% at_once: wrong, mixes up the order | in the same order
# (part) for part in numbers.chunk => (numbers[part::parts]) for part in range
# %% at_once: wrong, hands on futures | A future was handed to a module
# => embedding, reader, decoder = modules
# => begun = [decoder.forward_async(reader.forward_async(embedding.forward_async(p))) for p in numbers.chunk(parts)]
# => return torch.cat([part.wait() for part in begun])
# %% at_once: wrong, a list of the parts | should be the scores
# torch.cat([part.wait() for part in begun]) => [part.wait() for part in begun]
# %% at_once: wrong, cuts the graph | no graph behind them
# reader.forward_async(part.wait()) => reader.forward_async(part.wait().detach())
# ([part.wait() for part in begun]) => ([part.wait() for part in begun]).detach()
# %% at_once: wrong, cuts the graph behind the embedding | no gradient comes back to the embedding
# reader.forward_async(part.wait()) => reader.forward_async(part.wait().detach())
# %% at_once: wrong, as many parts as were asked for | IndexError
# -     begun = [embedding.forward_async(part) for part in numbers.chunk(parts)]
# +     pieces = numbers.chunk(parts)
# +     begun = [embedding.forward_async(pieces[place]) for place in range(parts)]
# %% at_once: wrong, two parts under way at a time | it took 12 units of time
# => embedding, reader, decoder = modules
# => pieces, found = numbers.chunk(parts), []
# => for place in range(0, len(pieces), 2):
# =>     begun = [embedding.forward_async(part) for part in pieces[place : place + 2]]
# =>     begun = [reader.forward_async(part.wait()) for part in begun]
# =>     begun = [decoder.forward_async(part.wait()) for part in begun]
# =>     found += [part.wait() for part in begun]
# => return torch.cat(found)
# %% at_once: right, the decoder begins in the reader's loop
# -     begun = [reader.forward_async(part.wait()) for part in begun]
# -     begun = [decoder.forward_async(part.wait()) for part in begun]
# +     begun = [decoder.forward_async(reader(part.wait())) for part in begun]
# %% along_time: wrong, one layer, then the other | it took 8 units of time
def along_time(lower, upper, vectors, pieces):
    state, hidden, found = None, [], []
    for piece in vectors.chunk(pieces, 1):
        one, state = lower.forward_async(piece, state).wait()
        hidden.append(one)
    state = None
    for piece in hidden:
        one, state = upper.forward_async(piece, state).wait()
        found.append(one)
    return torch.cat(found, 1)


# %% along_time: wrong, as many pieces as were asked for | IndexError
def along_time(lower, upper, vectors, pieces):
    parts, low, high, above, found = vectors.chunk(pieces, 1), None, None, None, []
    for place in range(pieces):
        below = lower.forward_async(parts[place], low)
        if above is not None:
            hidden, high = above.wait()
            found.append(hidden)
        hidden, low = below.wait()
        above = upper.forward_async(hidden, high)
    return torch.cat([*found, above.wait()[0]], 1)


# %%% along_time: wrong, forgets the upper layer's state | a later one is not
# parts, low, high, above, found = vectors.chunk(pieces, 1), None, => low, above, found =
# place in range(pieces) => piece in vectors.chunk(pieces, 1)
# parts[place] => piece
# -             hidden, high = above.wait()
# -             found.append(hidden)
# +             found.append(above.wait()[0])
# hidden, high => hidden
# %% along_time: wrong, cuts along the batch | called
# => begun = [lower.forward_async(part) for part in vectors.chunk(pieces)]
# => begun = [upper.forward_async(part.wait()[0]) for part in begun]
# => return torch.cat([part.wait()[0] for part in begun])
# %% along_time: wrong, forgets the states | a later one is not
# => begun = [lower.forward_async(piece) for piece in vectors.chunk(pieces, 1)]
# => begun = [upper.forward_async(piece.wait()[0]) for piece in begun]
# => return torch.cat([piece.wait()[0] for piece in begun], 1)
# %% along_time: wrong, the last piece is missing | the shape should be
# -     found.append(above.wait()[0])
# %% along_time: wrong, in one piece | called [1, 1] times
# => hidden, _ = lower.forward_async(vectors).wait()
# => return upper.forward_async(hidden).wait()[0]
# %% along_time: wrong, the lower layer's hidden vectors | the shape should be
# => state, found = None, []
# => for piece in vectors.chunk(pieces, 1):
# =>     hidden, state = lower.forward_async(piece, state).wait()
# =>     found.append(hidden)
# => return torch.cat(found, 1)
# %%% along_time: wrong, the lower layer's state for both | raised RuntimeError
# -         hidden, state = lower.forward_async(piece, state).wait()
# +         hidden, state = lower.forward_async(piece, state).wait()
# +         hidden, state = upper.forward_async(hidden, state).wait()
# %%% along_time: wrong, layer after layer in each piece | it took 8 units of time
# -     state, found = None, []
# +     low = high = None
# +     found = []
# -         hidden, state = lower.forward_async(piece, state).wait()
# +         hidden, low = lower.forward_async(piece, low).wait()
# +         hidden, high = upper.forward_async(hidden, high).wait()
# %% along_time: wrong, cuts the graph between pieces | the graph is cut
# -             found.append(hidden)
# +             high = tuple(each.detach() for each in high)
# +             found.append(hidden)
# -         above = upper.forward_async(hidden, high)
# +         low = tuple(each.detach() for each in low)
# +         above = upper.forward_async(hidden, high)
