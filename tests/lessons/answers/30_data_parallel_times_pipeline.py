# %% share: wrong, everything to everybody | should get
# => return list(range(microbatches))
# %% share: wrong, some that are not there | are not there
# => each = -(-microbatches // replicas)
# => return [replica + number * replicas for number in range(each)]
# %% share: wrong, in blocks | should get [0, 2, 4, 6]
# => each = microbatches // replicas
# => return list(range(replica * each, (replica + 1) * each))
# %% share: right, a range
# => return range(replica, microbatches, replicas)
# %% share: wrong, a set, which has no order | a list of whole numbers, not {0, 2, 4, 6}
# => return set(range(replica, microbatches, replicas))
# %% share: wrong, whole rounds only | Of 5 micro-batches and 2 replicas, replica 0 should get [0, 2, 4]
# => return [replica + number * replicas for number in range(microbatches // replicas)]
# %% share: wrong, replicas counted from 1 | should get
# => return list(range(replica - 1, microbatches, replicas)) if replica else []
# %% share: wrong, right for two replicas alone | Of 6 micro-batches and 3 replicas
# => return list(range(replica, microbatches, 2))
# %% share: right, tensors for numbers
def share(microbatches, replicas, replica):
    import torch

    return list(torch.arange(microbatches)[replica::replicas])


# %% combined: wrong, a mean of means | in which each replica counts alike
# => return sum(gradients) / len(gradients)
# %% combined: wrong, a sum | It is the sum of the replicas' means
# => return sum(gradients)
# %% combined: wrong, a sum over samples | It is a sum over the samples, not a mean
# => return sum(gradient * count for gradient, count in zip(gradients, samples))
# %% combined: wrong, a weighted sum divided by the replicas | It is divided by the number of replicas
# => return sum(gradient * count for gradient, count in zip(gradients, samples)) / len(samples)
# %% combined: wrong, weights the other way round | With [7, 6] samples
# => return sum(gradient * count for gradient, count in zip(gradients, reversed(samples))) / sum(samples)
# %% combined: wrong, a number for a tensor | A tensor is wanted
# => return float(sum(gradient.sum() * count for gradient, count in zip(gradients, samples)) / sum(samples))
# %% combined: wrong, changes what it was given | have changed
# => total = gradients[0].mul_(samples[0])
# => for gradient, count in zip(gradients[1:], samples[1:]):
# =>     total = total + gradient * count
# => return total / sum(samples)
# %% combined: wrong, for vectors alone | Here a gradient has the shape (2, 3)
def combined(gradients, samples):
    import torch

    weights = torch.tensor([count / sum(samples) for count in samples], dtype=gradients[0].dtype)
    return weights @ torch.stack(gradients)


# %%% combined: wrong, weights along another dimension of a matrix | Here a gradient has the shape (2, 3)
# weights @ torch.stack(gradients) => (torch.stack(gradients) * weights[:, None]).sum(0)
# %%% combined: wrong, for float64 alone | gradients of float32 in the shape (2, 2), it raised
# gradients[0].dtype => torch.double
# weights @ torch.stack(gradients) => torch.einsum("r,r...->...", weights, torch.stack(gradients))
# %%% combined: wrong, one for each | should have the shape
# -     weights = torch.tensor([count / sum(samples) for count in samples], dtype=gradients[0].dtype)
# -     return weights @ torch.stack(gradients)
# +     return torch.stack([gradient * count / sum(samples) for gradient, count in zip(gradients, samples)])
# %% combined: wrong, takes the gradients out of the list | have changed
# => total, number = 0, sum(samples)
# => for count in samples:
# =>     total = total + gradients.pop(0) * count
# => return total / number
# %% step_time: wrong, no all-reduce | a step takes
# ) + 2 * (replicas - 1) / replicas * reduce / stages => )
# %% step_time: wrong, all micro-batches for each replica | counts all 8 micro-batches for each replica
# / replicas + => +
# %% step_time: wrong, as if each worker sent the whole model | of its own stage alone
# reduce / stages => reduce
# %% step_time: wrong, a stage as slow as the whole model | 4 workers as 1 times 4
# / stages * => *
# %% step_time: wrong, half of the all-reduce | half of the rounds
# 2 * (replicas - 1) => (replicas - 1)
# %% step_time: wrong, no bubble | That has no bubble
# (microbatches / replicas + stages - 1) => microbatches / replicas
# %% step_time: wrong, stages and replicas exchanged | Stages and replicas have changed places
# => stages = workers // replicas
# => return 3 / replicas * (microbatches / stages + replicas - 1) + 2 * (stages - 1) / stages * reduce / replicas
# %% on_ranks: right, groups by hand
# -     mesh = init_device_mesh("cpu", (replicas, stages), mesh_dim_names=("dp", "pp"))
# +     groups = [dist.new_group([stage + stages * one for one in range(replicas)]) for stage in range(stages)]
# mesh["dp"].get_group() => groups[dist.get_rank() % stages]
# %% on_ranks: wrong, the other dimension | It is that of both stages of one replica
# mesh["dp"] => mesh["pp"]
# %% on_ranks: wrong, two replicas with two stages alone | which have the same stage of two, not of 1
# (replicas, stages) => (2, 2)
# %% on_ranks: wrong, over all ranks | two stages, which have different parameters, were added up
# , group=mesh["dp"].get_group()) => )
# %% on_ranks: wrong, the samples of all ranks | The samples of all ranks were counted
# -     total = torch.cat([gradient.flatten() * samples, gradient.new_tensor([samples])])
# -     dist.all_reduce(total, group=mesh["dp"].get_group())
# -     return (total[:-1] / total[-1]).view_as(gradient)
# +     count = torch.tensor(float(samples))
# +     dist.all_reduce(count)
# +     total = gradient * samples
# +     dist.all_reduce(total, group=mesh["dp"].get_group())
# +     return total / count
# %% on_ranks: wrong, the plain mean | they have 7 and 3 samples
# gradient.flatten() * samples, gradient.new_tensor([samples]) => gradient.flatten(), gradient.new_ones(1)
# %% on_ranks: wrong, the sum over the replicas | It is a sum over the replicas, not a mean
# gradient.flatten() * samples, gradient => gradient.flatten(), gradient
# total[:-1] / total[-1] => total[:-1]
# %% on_ranks: wrong, the sum over the samples | It is a sum over the samples, not a mean
# total[:-1] / total[-1] => total[:-1]
# %% on_ranks: wrong, nothing is added | It is its own gradient: nothing was added
# => return gradient.clone()
# %% on_ranks: wrong, the mesh the other way round | It is that of both stages of one replica
# ("dp", "pp") => ("pp", "dp")
# %% on_ranks: wrong, in place | `gradient` was changed; return a new tensor
# -     return (total[:-1] / total[-1]).view_as(gradient)
# +     return gradient.copy_((total[:-1] / total[-1]).view_as(gradient))
# %% on_ranks: wrong, the first replica alone makes the mesh | for ever
# -     mesh = init_device_mesh("cpu", (replicas, stages), mesh_dim_names=("dp", "pp"))
# +     if dist.get_rank() >= stages:
# +         return gradient
# +     mesh = init_device_mesh("cpu", (replicas, stages), mesh_dim_names=("dp", "pp"))
# %% on_ranks: wrong, gathers everything | calls all_gather
# => everybody = torch.empty(dist.get_world_size(), 4, dtype=torch.double)
# => dist.all_gather(list(everybody), torch.cat([gradient * samples, gradient.new_tensor([samples])]))
# => mine = everybody[dist.get_rank() % stages :: stages].sum(0)
# => return mine[:-1] / mine[-1]
# %% best: wrong, does not look at the budget | room for 10
# [r for r in possible if held(r) <= budget], key=time, default=None => possible, key=time
# %% best: wrong, takes the fastest, and then looks whether it fits | layout of all, 4 replicas, does not fit
# => possible = [r for r in range(1, workers + 1) if workers % r == 0 and microbatches % r == 0]
# => found = min(possible, key=time)
# => return found if held(found) <= budget else None
# %% best: wrong, the most replicas that fit | 8 workers, 16 micro-batches, room for 100
# => possible = [r for r in range(1, workers + 1) if workers % r == 0 and microbatches % r == 0]
# => return max([r for r in possible if held(r) <= budget], default=None)
# %% best: wrong, the time and not the layout | the best has 2 replicas, not 200
# [r for r in possible if held(r) <= budget], key=time => [time(r) for r in possible if held(r) <= budget]
# %% best: wrong, less than the budget alone | room for 9
# <= budget => < budget
# %% best: wrong, powers of two alone | 6 workers, 12 micro-batches
# range(1, workers + 1) => (1, 2, 4, 8)
# %% best: wrong, without one replica for each worker | room for 3
# workers + 1 => workers
# %% best: wrong, forgets that micro-batches must divide | that layout is not possible
# 0 and microbatches % r == 0 => 0
# %% best: wrong, fails where nothing fits | raised ValueError
# time, default=None => time
# %% best: wrong, the number of stages | 8 workers, 16 micro-batches, room for 100
# => possible = [r for r in range(1, workers + 1) if workers % r == 0 and microbatches % r == 0]
# => fits = [r for r in possible if held(r) <= budget]
# => return workers // min(fits, key=time) if fits else None
# %% best: wrong, stops at the first layout that does not fit | 8 workers, 8 micro-batches, room for 8
# => found = None
# => for r in range(1, workers + 1):
# =>     if workers % r == 0 and microbatches % r == 0:
# =>         if held(r) > budget:
# =>             break
# =>         if found is None or time(r) < time(found):
# =>             found = r
# => return found
# %% best: wrong, stops where a step takes longer than the one before | 8 workers, 8 micro-batches, room for 8
# => possible = [r for r in range(1, workers + 1) if workers % r == 0 and microbatches % r == 0 and held(r) <= budget]
# => found = possible[0] if possible else None
# => for r in possible[1:]:
# =>     if time(r) > time(found):
# =>         break
# =>     found = r
# => return found
# %% best: wrong, nothing takes longer than a billion | the best has 1 replicas, not None
# => found, least = None, 1e9
# => for r in range(1, workers + 1):
# =>     if workers % r == 0 and microbatches % r == 0 and held(r) <= budget and time(r) < least:
# =>         found, least = r, time(r)
# => return found
