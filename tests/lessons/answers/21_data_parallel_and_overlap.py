# %% weigh: wrong, for a sum over the ranks | is 0.5 times that of one process
# * size / => /
# %% weigh: wrong, takes equal shares for granted | is 0.5 times that of one process
# => return loss * rows / (rows * size)
# %% weigh: wrong, the plain mean | every rank counts alike, whatever its rows
# => return loss
# %% weigh: wrong, the sum over rows | is 4 times that of one process
# => return loss * rows
# %% weigh: wrong, uses what all_reduce returns | raised TypeError
# => total = all_reduce(torch.tensor(float(rows)))
# => return loss * rows * size / total
# %% weigh: wrong, gives all_reduce a number | `all_reduce` takes a tensor, not 4
# torch.tensor(float(rows)) => rows
# %% weigh: wrong, loses the graph | has lost its graph
# loss * rows * size / total => torch.tensor(loss.item() * rows * size / total.item())
# %% weigh: wrong, the weight upside down | not that of one process; the ranks have the wrong weights
# rows * size / total => total / (rows * size)
# %% weigh: wrong, only for two ranks | is 0.6667 times that of one process
# * size / => * 2 /
# %% weigh: wrong, a whole mean number of rows | Ranks with [4, 3] rows
# float(rows) => rows
# * size / total => / (total // size)
# %% weigh: wrong, adds up the losses of all ranks, too | Its own loss times the factor is
# -     return loss * rows * size / total
# +     weighted = loss * rows
# +     all_reduce(weighted)
# +     return weighted * size / total
# %% buckets: wrong, in the order of the model | your first bucket begins with a
# reversed(parameters) => parameters
# %% buckets: wrong, does not fill up to the cap | has more buckets than it must
# or size > => or size >=
# %% buckets: wrong, closes a bucket when it is over the cap | has 9 bytes
# => found, full = [[]], 0
# => for name, size in reversed(parameters):
# =>     if full >= cap:
# =>         found.append([])
# =>         full = 0
# =>     found[-1].append(name)
# =>     full += size
# => return found
# %%% buckets: wrong, forgets the last one | should be in exactly one bucket
# full = [[]] => bucket, full = [], []
# full >= => bucket and full + size >
# append([]) => append(bucket)
# full = 0 => bucket, full = [], 0
# found[-1] => bucket
# %%% buckets: wrong, an empty bucket before a large parameter | has an empty bucket
# >= cap => + size > cap
# %%% buckets: wrong, the size is not begun anew | has more buckets than it must
# [[]], 0 => [], 0
# full >= => not found or full + size >
# -             full = 0
# %% buckets: wrong, reverses the list that it was given | The list `parameters` has changed
# -     found, room = [], 0
# +     parameters.reverse()
# +     found, room = [], 0
# reversed(parameters) => parameters
# %% buckets: wrong, each bucket in the order of the model | your first bucket begins with c
# append(name) => insert(0, name)
# %% buckets: wrong, a generator | it should return a list of lists
# => return ([name] for name, _ in reversed(parameters))
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


# %% exposed: wrong, when the last message arrives | How long has backward been over by then?
# free - ready => free
# %% exposed: wrong, messages travel at the same time | The link carries one after another
# ready = free = 0 => ready, ends = 0, []
# free = max(free, ready) + send => ends.append(ready + send)
# return free => return max(ends)
# %% exposed: wrong, empties the lists | The lists have changed
# for compute, send in zip(backward, reduce) => while backward
# ready += compute => ready += backward.pop(0)
# (free, ready) + send => (free, ready) + reduce.pop(0)
# %% exposed: wrong, the link rests before the first and the last bucket only | A slow bucket in the middle
# => return max(reduce[-1], backward[0] + sum(reduce) - sum(backward))
# %% exposed: wrong, nothing hides | is all that is sent; some of it hides
# => return sum(reduce)
# %% exposed: wrong, only the last bucket | A link that is slower than backward
# => return reduce[-1]
# %% exposed: wrong, the link never waits for gradients | One bucket
# => return max(0, sum(reduce) - sum(backward))
# %% exposed: wrong, the link rests only before the first bucket | A link that is faster than backward
# => return max(0, backward[0] + sum(reduce) - sum(backward))
# %% exposed: wrong, looks at all messages and at the last two only | A long message before two short ones
# => if len(reduce) == 1:
# =>     return reduce[0]
# => waits = max(reduce[-1], reduce[-2] + reduce[-1] - backward[-1])
# => return max(waits, sum(reduce) - sum(backward[1:]))
# %% exposed: wrong, looks at the first message, the second and the last two only | A long message in the middle of six
# => places = {0, min(1, len(reduce) - 1), max(0, len(reduce) - 2), len(reduce) - 1}
# => return max(sum(reduce[place:]) - sum(backward[place + 1 :]) for place in places)
# %% exposed: wrong, whole units of time only | Times with fractions
# free - ready => int(free - ready)
# %% accumulate: wrong, adds up the micro-batches | is 2 times that of one process
# -     rows = sum(len(x) for x, _ in parts)
# (loss_of(model(x), y) * len(x) / rows) => loss_of(model(x), y)
# %% accumulate: wrong, every micro-batch counts alike | with micro-batches of [4, 1] rows: the gradient of 0.weight
# -     rows = sum(len(x) for x, _ in parts)
# * len(x) / rows => / len(parts)
# %% accumulate: wrong, the sum over the ranks | on rank 0 is 2 times that of one process
# (parameter) / size => (parameter)
# %% accumulate: wrong, an all-reduce for each parameter | after 4 all-reduces where one is enough
# => rows = sum(len(x) for x, _ in parts)
# => for x, y in parts:
# =>     (loss_of(model(x), y) * len(x) / rows).backward()
# => for parameter in model.parameters():
# =>     all_reduce(parameter.grad)
# =>     parameter.grad /= size
# %% accumulate: wrong, adds up over the ranks after each micro-batch | after 8 all-reduces where one is enough
# => rows = sum(len(x) for x, _ in parts)
# => for x, y in parts:
# =>     (loss_of(model(x), y) * len(x) / rows).backward()
# =>     for parameter in model.parameters():
# =>         all_reduce(parameter.grad)
# =>         parameter.grad /= size
# %% accumulate: wrong, does not put the sum back | on rank 0 is not that of one process
# -     pieces = flat.split([parameter.numel() for parameter in model.parameters()])
# -     for parameter, piece in zip(model.parameters(), pieces):
# -         parameter.grad = piece.view_as(parameter) / size
# +     flat /= size
# %% accumulate: wrong, puts flat pieces back | raised RuntimeError
# piece.view_as(parameter) => piece
# %% accumulate: wrong, clears the gradients between micro-batches | not that of one process
# -         (loss_of(model(x), y) * len(x) / rows).backward()
# +         model.zero_grad()
# +         (loss_of(model(x), y) * len(x) / rows).backward()
# %% accumulate: wrong, one forward for all micro-batches | goes through the model by itself
# -     rows = sum(len(x) for x, _ in parts)
# -     for x, y in parts:
# -         (loss_of(model(x), y) * len(x) / rows).backward()
# +     x, y = (torch.cat(each) for each in zip(*parts))
# +     loss_of(model(x), y).backward()
# %% accumulate: wrong, all forwards before the first backward | micro-batches waited for their backward
# -     for x, y in parts:
# -         (loss_of(model(x), y) * len(x) / rows).backward()
# +     sum(loss_of(model(x), y) * len(x) / rows for x, y in parts).backward()
# %% accumulate: wrong, a loss of its own | and l1_loss as `loss_of`
# loss_of(model(x), y) => (model(x) - y).square().mean()
