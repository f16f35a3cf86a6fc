# %% share
def share(microbatches, replicas, replica):
    return list(range(replica, microbatches, replicas))


# %% combined
def combined(gradients, samples):
    return sum(gradient * count for gradient, count in zip(gradients, samples)) / sum(samples)


# %% step_time
def step_time(workers, microbatches, replicas, reduce):
    stages = workers // replicas
    return 3 / stages * (microbatches / replicas + stages - 1) + 2 * (replicas - 1) / replicas * reduce / stages


# %% on_ranks
def of_all(gradient, samples, stages):
    replicas = dist.get_world_size() // stages
    mesh = init_device_mesh("cpu", (replicas, stages), mesh_dim_names=("dp", "pp"))
    total = torch.cat([gradient.flatten() * samples, gradient.new_tensor([samples])])
    dist.all_reduce(total, group=mesh["dp"].get_group())
    return (total[:-1] / total[-1]).view_as(gradient)


# %% best
def best(workers, microbatches, time, held, budget):
    possible = [r for r in range(1, workers + 1) if workers % r == 0 and microbatches % r == 0]
    return min([r for r in possible if held(r) <= budget], key=time, default=None)
