# %% layouts
def layouts(workers, layers, heads, microbatches):
    found = []
    for dp in range(1, workers + 1):
        for tp in range(1, workers + 1):
            if workers % (dp * tp):
                continue
            pp = workers // (dp * tp)
            if layers % pp == 0 and heads % tp == 0 and microbatches % dp == 0:
                found.append((dp, tp, pp))
    return found


# %% held
def held(parameters, activations, dp, tp, pp, microbatches):
    under_way = min(pp, microbatches // dp)
    return (parameters * (4 + 12 / dp) + under_way * activations) / (tp * pp)


# %% step_time
def step_time(dp, tp, pp, microbatches, work, layers, vector, gradient, all_reduce):
    turn = work / (tp * pp) + layers / pp * 4 * all_reduce(vector, tp)
    return (microbatches / dp + pp - 1) * turn + all_reduce(gradient / (tp * pp), dp)


# %% on_ranks
def norm(gradients, dp, pp, tp):
    square = torch.zeros(())
    for gradient, is_cut in gradients:
        copies = dp if is_cut else dp * tp
        square += gradient.square().sum() / copies
    dist.all_reduce(square)
    return square.sqrt().item()


# %% choose
def choose(workers, per_host, layers, heads, microbatches, time, held, budget):
    possible = [
        (dp, tp, workers // (dp * tp))
        for dp in range(1, workers + 1)
        for tp in range(1, per_host + 1)
        if workers % (dp * tp) == 0 and per_host % tp == 0 and heads % tp == 0 and microbatches % dp == 0
    ]
    possible = [layout for layout in possible if layers % layout[2] == 0]
    return min([layout for layout in possible if held(layout) <= budget], key=time, default=None)
