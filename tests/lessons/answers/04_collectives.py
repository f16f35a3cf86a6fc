# %% gathered: wrong, the source does not take part | In a collective all ranks make the same call
# => places = [mine.clone() for _ in range(size)]
# => for source in range(size):
# =>     if source != rank:
# =>         broadcast(places[source], source)
# => return places
# %% gathered: wrong, right for two ranks only | 3 ranks: rank 0 returns
# => places = [mine.clone(), mine.clone()]
# => broadcast(places[0], 0)
# => broadcast(places[1], 1)
# => return places
# %% gathered: wrong, from the last rank to the first | the tensors of all ranks are
# => places = []
# => for source in reversed(range(size)):
# =>     places.append(mine.clone())
# =>     broadcast(places[-1], source)
# => return places
# %%% gathered: wrong, leaves out the last rank | of length 1; each rank has one place
# reversed(range(size)) => range(size - 1)
# %%% gathered: wrong, one place for all | All places are one tensor
# places = => place, places = mine.clone(),
# reversed(range(size)) => range(size)
# places.append(mine.clone()) => broadcast(place, source)
# broadcast(places[-1], source) => places.append(place)
# %%% gathered: wrong, broadcasts into its own tensor | A broadcast fills the tensor that it is given
# reversed(range(size)) => range(size)
# places.append(mine.clone()) => broadcast(mine, source)
# broadcast(places[-1], source) => places.append(mine.clone())
# %% gathered: wrong, places of float32 whatever `mine` is | `mine` is of torch.int64
# empty_like(mine) => zeros(mine.shape)
# %% gathered: wrong, a vector whatever `mine` is | `mine` has shape (2, 3)
# empty_like(mine) => zeros(mine.numel(), dtype=mine.dtype)
# copy_(mine) => copy_(mine.flatten())
# %% gathered: wrong, places by the length | raised TypeError
# empty_like(mine) => zeros(len(mine), *mine.shape[1:], dtype=mine.dtype)
# %% gathered: wrong, no more than four ranks | 8 ranks: rank 0 returns
# => places = [mine.clone() for _ in range(size)]
# => for source in range(min(size, 4)):
# =>     broadcast(places[source], source)
# => return places
# %%% gathered: wrong, one tensor | a list of tensors is wanted
# min(size, 4) => size
# return places => return torch.cat(places)
# %%% gathered: wrong, each rank names itself as the source | In a collective all ranks make the same call
# source in range(min(size, 4)) => place in places
# places[source], source => place, rank
# %%% gathered: wrong, forgets its own | the tensors of all ranks are
# mine.clone() => torch.zeros_like(mine)
# min(size, 4) => size
# %% scattered: wrong, adds up before it sends | the sum of chunk 0 over the ranks is
# => total = torch.stack(x.chunk(size)).sum(0)
# => return all_to_all([total] * size)[rank]
# %% scattered: wrong, keeps its own chunk only | the sum of chunk 0 over the ranks is
# => return all_to_all(list(x.chunk(size)))[rank]
# %% scattered: wrong, does not add up | one chunk is wanted, not 2
# => return torch.cat(all_to_all(list(x.chunk(size))))
# %% scattered: wrong, the mean | the sum of chunk 0 over the ranks is
# => return torch.stack(all_to_all(list(x.chunk(size)))).mean(0)
# %% scattered: wrong, adds up along the chunk | one chunk is wanted, not 2
# => return torch.stack(all_to_all(list(x.chunk(size)))).sum(1)
# %% scattered: wrong, adds up everything | one number without a dimension
# => return torch.stack(all_to_all(list(x.chunk(size)))).sum()
# %% scattered: wrong, sends all of it to all | numbers to others where 1 do
# => return sum(all_to_all([x] * size)).chunk(size)[rank]
# %% scattered: wrong, sends a tensor | `all_to_all` takes a list of tensors
# => return torch.stack(all_to_all(x)).sum(0)
# %% scattered: wrong, every size-th number | the sum of chunk 0 over the ranks is
# => return torch.stack(all_to_all([x[to::size] for to in range(size)])).sum(0)
# %% scattered: wrong, adds into its own | `x` of rank 0 has changed
# => came = all_to_all(list(x.chunk(size)))
# => mine = x.chunk(size)[rank]
# => for source in range(size):
# =>     if source != rank:
# =>         mine += came[source]
# => return mine
# %% scattered: wrong, adds up in float32 | of torch.float32; `x` is of torch.int64
# => total = torch.zeros(len(x) // size)
# => for piece in all_to_all(list(x.chunk(size))):
# =>     total += piece
# => return total
# %% scattered: wrong, adds up as Python numbers | of torch.int64; `x` is of torch.float32
# stack(came).sum(0) => tensor([sum(int(number) for number in numbers) for numbers in zip(*came)])
# %% average: wrong, leaves the sum | What is the mean
# -             parameter.grad /= size
# %% average: wrong, averages parameters | It is the gradients
# => for parameter in model.parameters():
# =>     all_reduce(parameter.data)
# =>     parameter.data /= size
# %%% average: wrong, takes every parameter for one with a gradient | `all_reduce` takes a tensor, not None
# (parameter.data) => (parameter.grad)
# data => grad
# %% average: wrong, the first only | the gradient of bias is 1
# => all_reduce(model.weight.grad)
# => model.weight.grad /= size
# %% average: wrong, always for two ranks | the gradient of weight is 6; the mean is 4
# grad /= size => grad /= 2
# %% average: wrong, takes what all_reduce returns | raised TypeError
# => for parameter in model.parameters():
# =>     if parameter.grad is not None:
# =>         parameter.grad = all_reduce(parameter.grad) / size
# %% average: wrong, on a copy | it must get the gradient itself, no copy
# => for parameter in model.parameters():
# =>     if parameter.grad is not None:
# =>         grad = parameter.grad.clone()
# =>         all_reduce(grad)
# =>         grad /= size
# %% average: wrong, parameters that are trained, whether they have a gradient or not | raised TypeError
# => for parameter in model.parameters():
# =>     if parameter.requires_grad:
# =>         parameter.grad /= size
# =>         all_reduce(parameter.grad)
# %% average: wrong, divides twice | the gradient of weight is 1.25; the mean is 2.5
# -             all_reduce(parameter.grad)
# +             parameter.grad /= size
# +             all_reduce(parameter.grad)
# %% average: wrong, divides to whole numbers | `//` drops the rest
# .grad /= => .grad = parameter.grad //
# %% average: wrong, the parameters of each module, so some of them twice | the gradient of bias is 6.25
# => for module in model.modules():
# =>     for parameter in module.parameters():
# =>         if parameter.grad is not None:
# =>             all_reduce(parameter.grad)
# =>             parameter.grad /= size
# %% average: wrong, the model's own parameters only | the gradient of bias is 1; the mean is 2.5
# parameters() => parameters(recurse=False)
# %% average: wrong, the first number for all | you leave [[2.5, 2.5]]
# parameter.grad /= size => parameter.grad.fill_(parameter.grad.flatten()[0] / size)
# %% average: wrong, makes the gradients that are missing | and there is one now
# => for parameter in model.parameters():
# =>     if parameter.grad is None:
# =>         parameter.grad = torch.zeros_like(parameter)
# =>     all_reduce(parameter.grad)
# =>     parameter.grad /= size
# %%% average: wrong, ends at the first parameter without a gradient | the gradient of bias is 1
# parameter.grad = torch.zeros_like(parameter) => break
# %%% average: wrong, a rank whose gradient is all zero does not take part | was not reduced
# None => None or not parameter.grad.any()
# parameter.grad = torch.zeros_like(parameter) => continue  # nothing to add up
# %% which: wrong, looks at lengths only | That is broadcast; you say
# => size, given = len(before), max(map(len, before))
# => if [] in after:
# =>     return "gather" if max(map(len, after)) > given else "reduce"
# => if [] in before:
# =>     return "scatter"
# => return {given * size: "all_gather", given: "all_reduce"}.get(len(after[0]), "reduce_scatter")
# %%% which: wrong, a sum is the largest of all numbers | That is all_reduce; you say 'broadcast'
# size, given = len(before), max(map(len, before)) => largest = max(number for row in before for number in row)
# > given => > max(map(len, before))
# -     return {given * size: "all_gather", given: "all_reduce"}.get(len(after[0]), "reduce_scatter")
# +     if all(row == after[0] for row in after):
# +         longer = len(after[0]) > len(before[0])
# +         return "all_gather" if longer else "all_reduce" if max(after[0]) > largest else "broadcast"
# +     return "reduce_scatter" if len(after[0]) < len(before[0]) else "all_to_all"
# %% which: wrong, expects the root to be rank 0 | That is gather; you say
def which(before, after):
    everything = [number for row in before for number in row]
    sums = [sum(numbers) for numbers in zip(*before)]
    if after[1:] == [[]] * (len(after) - 1):
        return "gather" if after[0] == everything else "reduce"
    if [] in before:
        return "scatter"
    if all(row == after[0] for row in after):
        return "all_gather" if after[0] == everything else "all_reduce" if after[0] == sums else "broadcast"
    return "reduce_scatter" if len(after[0]) < len(before[0]) else "all_to_all"


# %% which: wrong, no difference between reduce and all_reduce | That is reduce; you say 'all_reduce'
def which(before, after):
    sums = [sum(numbers) for numbers in zip(*before)]
    everything = [number for row in before for number in row]
    if [] in before:
        return "scatter"
    if sums in after:
        return "all_reduce"
    if everything in after:
        return "gather" if [] in after else "all_gather"
    if all(row == after[0] for row in after):
        return "broadcast"
    return "reduce_scatter" if len(after[0]) < len(before[0]) else "all_to_all"


# %% which: wrong, a list of all that might be | is none of the eight names
# => return ["broadcast", "all_reduce", "all_gather"]
# %% which: wrong, always the most famous | you say 'all_reduce'
# => return "all_reduce"
# %% which: wrong, chunks of one number | That is reduce_scatter; you say 'all_to_all'
def which(before, after):
    sums = [sum(numbers) for numbers in zip(*before)]
    everything = [number for row in before for number in row]
    if [] in after:
        return "gather" if everything in after else "reduce"
    if [] in before:
        return "scatter"
    if all(row == after[0] for row in after):
        return "all_gather" if after[0] == everything else "all_reduce" if after[0] == sums else "broadcast"
    return "reduce_scatter" if all(row == [sums[rank]] for rank, row in enumerate(after)) else "all_to_all"


# %%% which: wrong, torch's older names | 'allgather' is none of the eight names
# "all_gather" if after[0] == everything else "all_reduce" => "allgather" if after[0] == everything else "allreduce"
# all(row == [sums[rank]] for rank, row in enumerate(after)) => len(after[0]) < len(before[0])
# %%% which: wrong, empties the lists as it looks | have changed
# -         return "all_gather" if after[0] == everything else "all_reduce" if after[0] == sums else "broadcast"
# -     return "reduce_scatter" if all(row == [sums[rank]] for rank, row in enumerate(after)) else "all_to_all"
# +         return {tuple(everything): "all_gather", tuple(sums): "all_reduce"}.get(tuple(after.pop()), "broadcast")
# +     return "reduce_scatter" if len(after[0]) < len(before[0]) else "all_to_all"
# %% which: wrong, cuts every list | raised ValueError
def which(before, after):
    size = len(before)
    chunks = [[row[at : at + len(row) // size] for at in range(0, len(row), len(row) // size)] for row in before if row]
    sums = [sum(numbers) for numbers in zip(*before)]
    everything = [number for row in before for number in row]
    if [] in after:
        return "gather" if everything in after else "reduce"
    if [] in before:
        return "scatter"
    if all(row == after[0] for row in after):
        return "all_gather" if after[0] == everything else "all_reduce" if after[0] == sums else "broadcast"
    return "all_to_all" if chunks[0][0] == after[0][: len(chunks[0][0])] else "reduce_scatter"
