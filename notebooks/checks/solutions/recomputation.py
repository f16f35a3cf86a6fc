# %% peak
def peak(kept, inputs, segments):
    waiting, begin, most = 0, 0, 0
    for length in segments:
        most = max(most, waiting + sum(kept[begin : begin + length]))
        waiting += inputs[begin]
        begin += length
    return most


# %% best_segments
def best_segments(kept, inputs):
    import itertools

    def peak(segments):
        waiting, begin, most = 0, 0, 0
        for length in segments:
            most = max(most, waiting + sum(kept[begin : begin + length]))
            waiting += inputs[begin]
            begin += length
        return most

    ways = []
    for cuts in itertools.product((False, True), repeat=len(kept) - 1):
        places = [0, *(place for place, cut in enumerate(cuts, 1) if cut), len(kept)]
        ways.append([end - begin for begin, end in itertools.pairwise(places)])
    return min(ways, key=peak)


# %% recomputed
def recomputed(run, x):
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.state = torch.get_rng_state()
            return run(x)  # within a Function autograd is off

        @staticmethod
        def backward(ctx, gradient):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                torch.set_rng_state(ctx.state)
                y = run(x)
            y.backward(gradient)
            return x.grad

    return Again.apply(x)


# %% on_ranks
def run(parts, x):
    for part in parts:
        x = x + add(checkpoint(part, copy(x), use_reentrant=False))
    return x


# %% plan
def plan(layers, budget):
    import itertools

    def most(again):
        held, largest = 0, 0
        for number, (kept, given, _) in enumerate(layers):
            largest = max(largest, held + kept)
            held += given if number in again else kept
        return largest

    sizes = range(len(layers) + 1)
    subsets = [set(each) for size in sizes for each in itertools.combinations(range(len(layers)), size)]
    fitting = [each for each in subsets if most(each) <= budget]
    return min(fitting, key=lambda again: sum(layers[number][2] for number in again), default=None)
