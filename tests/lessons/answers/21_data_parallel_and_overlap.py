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
# %% buckets: wrong, names alone | it should return a list of lists
# => return [name for name, _ in reversed(parameters)]
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
# %% on_ranks: wrong, forgets to wait | of this rank alone, divided by 2. Did the step wait for the sum
# -         sending.wait()
# %% on_ranks: wrong, the sum | is the sum over the ranks, not the mean
# piece.view_as(parameter) / dist.get_world_size() => piece.view_as(parameter)
# %% on_ranks: wrong, divides twice | is the mean, divided by 2 once more
# torch.cat([parameter.grad.flatten() for parameter in group]) => torch.cat([p.grad.flatten() for p in group]) / 2
# %% on_ranks: wrong, an all-reduce for each parameter | has 16 all-reduces, and 4 are allowed
# each = -(-len(backwards) // most) => each = 1
# %% on_ranks: wrong, when backward is over | begins its first all-reduce when backward is over
# => backwards = list(model.parameters())
# => loss.backward()
# => flat = torch.cat([parameter.grad.flatten() for parameter in backwards])
# => dist.all_reduce(flat)
# => for parameter, piece in zip(backwards, flat.split([each.numel() for each in backwards])):
# =>     parameter.grad.copy_(piece.view_as(parameter) / dist.get_world_size())
# %% on_ranks: wrong, one bucket | begins its first all-reduce when backward is over
# each = -(-len(backwards) // most) => each = len(backwards)
# %% on_ranks: wrong, no handle | raised AttributeError
# flat, async_op=True => flat
# %% on_ranks: wrong, rank 0 averages alone | waits in your line
# if all( => if dist.get_rank() == 0 and all(
# %% on_ranks: wrong, averages its own gradients only | is that of this rank alone. Was it averaged
# => loss.backward()
# %% on_ranks: wrong, the vector is not put back | is that of this rank alone. Was it averaged
# -             parameter.grad.copy_(piece.view_as(parameter) / dist.get_world_size())
# +             parameter.grad.copy_(parameter.grad)
# %% on_ranks: wrong, by an all_gather | calls all_gather
# => for parameter in model.parameters():
# =>     def ready(parameter):
# =>         parts = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
# =>         dist.all_gather(parts, parameter.grad)
# =>         parameter.grad.copy_(sum(parts) / len(parts))
# =>     parameter.register_post_accumulate_grad_hook(ready)
# => loss.backward()
# %% accumulate: wrong, adds up the micro-batches | is 2 times that of one process
# -     rows = sum(len(x) for x, _ in parts)
# (loss_of(model(x), y) * len(x) / rows) => loss_of(model(x), y)
# %% accumulate: wrong, every micro-batch counts alike | This is the mean of the micro-batches' means
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
# %% hidden: wrong, sends all | 63/64 of the gradients, not all
# * 63 / 64 * => *
# %% hidden: wrong, a ring of hosts | 7/8 would be a ring of one GPU in each host
# 63 / 64 => 7 / 8
# %% hidden: wrong, one half | An all-reduce has two halves
# sent = 2 * 63 => sent = 63
# %% hidden: wrong, float32 | counts 4 bytes, where bfloat16 has 2, or
# 64 * 2 => 64 * 4
# %% hidden: wrong, forward, too | 4 operations for each parameter are left
# 400e12 / 4 => 400e12 / 6
# %% hidden: wrong, the peak | That is with the peak
# 400e12 => 989.4e12
# %% hidden: wrong, the link within a host | That is with NVLink
# 50e9 => 450e9
# %% hidden: wrong, bits for bytes | the link has 400 Gbit/s
# 50e9 => 400e9
# %% hidden: wrong, all GPUs | the tokens of all GPUs
# 400e12 / 4 => 400e12 / 4 * 64
# %% hidden: right, rounded
tokens = 7900
# %% rows_of: right, pieces that follow each other
# order[rank::size] => order[rank * wanted // size : (rank + 1) * wanted // size]
# %% rows_of: right, a seed of its own
# (length, epoch) => (length, 21 + 7 * epoch)
# %% rows_of: wrong, the same order in each epoch | two epochs have the same order
# (length, epoch) => (length, 0)
# %% rows_of: wrong, another order on each rank | the ranks shuffle with different seeds
# (length, epoch) => (length, epoch * size + rank)
# %% rows_of: wrong, some ranks read more | the last all-reduce waits for ever
# => return shuffled(length, epoch)[rank::size]
# %% rows_of: wrong, the last rows are left out | nobody reads row
# wanted = -(-length // size) * size => wanted = length // size * size
# order[rank::size] => order[:wanted][rank::size]
# %% rows_of: wrong, all rows on all ranks | where 3 are enough
# => return shuffled(length, epoch)
# %% rows_of: wrong, not shuffled | nobody has called `shuffled`
# shuffled(length, epoch) => list(range(length))
# %% rows_of: wrong, the order begins anew only once | the last all-reduce waits for ever
# -     while len(order) < wanted:
# +     if len(order) < wanted:
# %% rows_of: wrong, filled with rows that are not there | which is not there
# -     while len(order) < wanted:
# -         order = order + order[: wanted - len(order)]
# +     order = order + list(range(length, wanted))
