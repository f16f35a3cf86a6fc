# %% peak: wrong, the largest segment alone | is what the largest segment keeps
# waiting, begin, most = 0, => most, begin =
# -         most = max(most, waiting + sum(kept[begin : begin + length]))
# -         waiting += inputs[begin]
# +         most = max(most, sum(kept[begin : begin + length]))
# %% peak: wrong, all layers | is what all layers keep together
# => return sum(kept)
# %% peak: wrong, the segment's own input twice | counts a segment's own input twice
# -         most = max(most, waiting + sum(kept[begin : begin + length]))
# -         waiting += inputs[begin]
# +         waiting += inputs[begin]
# +         most = max(most, waiting + sum(kept[begin : begin + length]))
# %% peak: wrong, later segments instead of earlier ones | counts the inputs of later segments
# => begins = [sum(segments[:i]) for i in range(len(segments))]
# => return max(
# =>     sum(inputs[b] for b in begins[i + 1 :]) + sum(kept[begins[i] : begins[i] + n]) for i, n in enumerate(segments)
# => )
# %% peak: wrong, inputs by number of the segment | the most held at once is
# length in segments => number, length in enumerate(segments)
# inputs[begin] => inputs[number]
# %% peak: wrong, eats its arguments | the lists have changed
# begin, most = 0, => most =
# most = max(most, waiting + sum(kept[begin : begin + length])) => part = [kept.pop(0) for _ in range(length)]
# waiting += inputs[begin] => most = max(most, waiting + sum(part))
# begin += length => waiting += sum([inputs.pop(0) for _ in range(length)][:1])
# %% peak: wrong, a list of all sums | It should return a number
# => begins = [sum(segments[:i]) for i in range(len(segments))]
# => return [sum(inputs[x] for x in begins[:i]) + sum(kept[b : b + segments[i]]) for i, b in enumerate(begins)]
# %% peak: wrong, inputs of all segments | counts the inputs of all segments
# => begins = [sum(segments[:i]) for i in range(len(segments))]
# => return sum(inputs[b] for b in begins) + max(sum(kept[b : b + n]) for b, n in zip(begins, segments))
# %% peak: wrong, only the last segment | the most held at once is
# => begins = [sum(segments[:i]) for i in range(len(segments))]
# => return sum(inputs[b] for b in begins[:-1]) + sum(kept[begins[-1] :])
# %% peak: wrong, the first segment does not count where there are others | kept [50, 10, 10]
# => begins = [sum(segments[:i]) for i in range(len(segments))]
# => sums = [sum(inputs[x] for x in begins[:i]) + sum(kept[b : b + segments[i]]) for i, b in enumerate(begins)]
# => return max(sums[1:] or sums)
# %% best_segments: wrong, always the square root | is possible
# => n = len(kept)
# => length = max(1, round(n**0.5))
# => return [length] * (n // length) + ([n % length] if n % length else [])
# %% best_segments: wrong, halves | is possible
# => return [len(kept) // 2 or 1] * 2
# %% best_segments: wrong, every layer by itself | is possible
# => return [1] * len(kept)
# %% best_segments: wrong, all in one | is possible
# => return [len(kept)]
# %% best_segments: wrong, a number | It should return a list of lengths
# => return round(len(kept) ** 0.5)
# %% best_segments: wrong, places of cuts | no list of such lengths
# => return [0, len(kept) // 2]
# %% best_segments: wrong, only equal segments | is possible
def best_segments(kept, inputs):
    def peak(segments):
        waiting, begin, most = 0, 0, 0
        for length in segments:
            most = max(most, waiting + sum(kept[begin : begin + length]))
            waiting += inputs[begin]
            begin += length
        return most

    n = len(kept)
    return min(([d] * (n // d) for d in range(1, n + 1) if n % d == 0), key=peak)


# %% best_segments: wrong, forgets the inputs | is possible
# def peak => def largest
# waiting, begin, most = 0, => begin, most =
# -             most = max(most, waiting + sum(kept[begin : begin + length]))
# -             waiting += inputs[begin]
# +             most = max(most, sum(kept[begin : begin + length]))
# ways = => n, ways = len(kept),
# (False, True), repeat=len(kept) => (True, False), repeat=n
# , len(kept) => , n
# end - begin for begin, end => b - a for a, b
# peak => largest
# %% best_segments: wrong, no segment longer than the one before | with segments [2, 2, 1] the most held at once is 31
# -         ways.append([end - begin for begin, end in itertools.pairwise(places)])
# +         lengths = [end - begin for begin, end in itertools.pairwise(places)]
# +         if all(one >= other for one, other in itertools.pairwise(lengths)):
# +             ways.append(lengths)
# %% recomputed: wrong, by torch's checkpoint | Here you should do without it
# => return checkpoint(run, x, use_reentrant=False)
# %% recomputed: wrong, keeps everything | are still alive
# => return run(x)
# %% recomputed: wrong, by torch's older checkpoint, from its module | Here you should do without it
def recomputed(run, x):
    import torch.utils.checkpoint

    return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=True)


# %% recomputed: wrong, without a graph | autograd cannot go back
# => with torch.no_grad():
# =>     return run(x)
# %% recomputed: wrong, autograd is off in backward | does not require grad
# -             ctx.state = torch.get_rng_state()
# -             return run(x)  # within a Function autograd is off
# +             return run(x)
# -             with torch.random.fork_rng(devices=[]), torch.enable_grad():
# -                 torch.set_rng_state(ctx.state)
# -                 y = run(x)
# +             y = run(x)
# %% recomputed: wrong, another mask | the second run draws another mask
# -             ctx.state = torch.get_rng_state()
# -             return run(x)  # within a Function autograd is off
# +             return run(x)
# -             with torch.random.fork_rng(devices=[]), torch.enable_grad():
# -                 torch.set_rng_state(ctx.state)
# +             with torch.enable_grad():
# %% recomputed: wrong, leaves the old random state behind | put the state back
# -             with torch.random.fork_rng(devices=[]), torch.enable_grad():
# -                 torch.set_rng_state(ctx.state)
# +             torch.set_rng_state(ctx.state)
# +             with torch.enable_grad():
# %% recomputed: wrong, forgets the gradient that comes | The gradients differ
# y = run(x) => total = run(x).sum()
# y.backward(gradient) => total.backward()
# %% recomputed: wrong, only the gradient of x | The parameters have no gradients
# -             y.backward(gradient)
# -             return x.grad
# +             return torch.autograd.grad(y, x, gradient)[0]
# %% recomputed: wrong, keeps the graph all the same | are still alive
def recomputed(run, x):
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.x = x.detach().requires_grad_()
            with torch.enable_grad():
                ctx.y = run(ctx.x)
            return ctx.y.detach()

        @staticmethod
        def backward(ctx, gradient):
            ctx.y.backward(gradient)
            return ctx.x.grad

    return Again.apply(x)


# %% recomputed: wrong, does not detach x | raised
# x = ctx.saved_tensors[0].detach().requires_grad_() => (x,) = ctx.saved_tensors
# %% recomputed: wrong, runs twice in forward | once for each is enough
# -             return run(x)  # within a Function autograd is off
# +             run(x)
# +             torch.set_rng_state(ctx.state)
# +             return run(x)  # within a Function autograd is off
# %% on_ranks: right, f is computed again, and sends nothing in forward
# x + add(checkpoint(part, copy(x), use_reentrant=False)) => x + add(checkpoint(one, part, x, use_reentrant=False))
# - def run(parts, x):
# + def run(parts, x):
# +     def one(part, x):
# +         return part(copy(x))
# +
# %% on_ranks: wrong, in backward the lambda sees the last part of the loop | the gradient of
# checkpoint(part, copy(x), use_reentrant=False) => checkpoint(lambda x: part(copy(x)), x, use_reentrant=False)
# %% on_ranks: wrong, nothing is computed again | bytes for backward besides `x`
# checkpoint(part, copy(x), use_reentrant=False) => part(copy(x))
# %% on_ranks: wrong, everything in one checkpoint | has 8 all-reduces, and 6 without recomputation: 2 run again
# -     for part in parts:
# -         x = x + add(checkpoint(part, copy(x), use_reentrant=False))
# -     return x
# +     def whole(x):
# +         for part in parts:
# +             x = x + add(part(copy(x)))
# +         return x
# +
# +     return checkpoint(whole, x, use_reentrant=False)
# %% on_ranks: wrong, the sum is computed again, too | has 9 all-reduces, and 6 without recomputation: 3 run again
# x + add(checkpoint(part, copy(x), use_reentrant=False)) => x + checkpoint(one, part, x, use_reentrant=True)
# - def run(parts, x):
# + def run(parts, x):
# +     def one(part, x):
# +         return add(part(copy(x)))
# +
# %% on_ranks: wrong, without f | the gradient of x is not that without recomputation
# copy(x) => x
# %% on_ranks: wrong, without g | returns other numbers than without recomputation
# add(checkpoint(part, copy(x), use_reentrant=False)) => checkpoint(part, copy(x), use_reentrant=False)
# %% on_ranks: wrong, without the residual stream | returns other numbers than without recomputation
# x = x + add => x = add
# %% on_ranks: wrong, only the last part is computed again | bytes for backward besides `x`
# -         x = x + add(checkpoint(part, copy(x), use_reentrant=False))
# +         last = part is parts[-1]
# +         x = x + add(checkpoint(part, copy(x), use_reentrant=False) if last else part(copy(x)))
# %% on_ranks: wrong, no graph at all | raised RuntimeError
# -     for part in parts:
# -         x = x + add(checkpoint(part, copy(x), use_reentrant=False))
# -     return x
# +     with torch.no_grad():
# +         for part in parts:
# +             x = x + add(part(copy(x)))
# +     return x
# %% on_ranks: wrong, the list of parts | returns
# return x => return [x]
# %% on_ranks: wrong, rank 1 skips a part | for ever
# in parts: => in list(parts)[: 3 - torch.distributed.get_rank()]:
# %% plan: wrong, the most bytes for a second first | are enough
def plan(layers, budget):
    def most(again):
        held, largest = 0, 0
        for number, (kept, given, _) in enumerate(layers):
            largest = max(largest, held + kept)
            held += given if number in again else kept
        return largest

    again = set()
    for number in sorted(range(len(layers)), key=lambda i: (layers[i][1] - layers[i][0]) / (layers[i][2] or 1e-9)):
        if most(again) <= budget:
            return again
        again.add(number)
    return again if most(again) <= budget else None


# %%% plan: wrong, the cheapest first until it fits | are enough
# (layers[i][1] - layers[i][0]) / (layers[i][2] or 1e-9) => layers[i][2]
# %% plan: wrong, only the end of forward counts | so the answer is None
def plan(layers, budget):
    import itertools

    best = None
    for size in range(len(layers) + 1):
        for again in itertools.combinations(range(len(layers)), size):
            held = sum(given if i in again else kept for i, (kept, given, _) in enumerate(layers))
            seconds = sum(layers[i][2] for i in again)
            if held <= budget and (best is None or seconds < best[0]):
                best = seconds, set(again)
    return best and best[1]


# %% plan: wrong, as few layers as possible | are enough
# -     sizes = range(len(layers) + 1)
# -     subsets = [set(each) for size in sizes for each in itertools.combinations(range(len(layers)), size)]
# -     fitting = [each for each in subsets if most(each) <= budget]
# -     return min(fitting, key=lambda again: sum(layers[number][2] for number in again), default=None)
# +     for size in range(len(layers) + 1):
# +         for again in itertools.combinations(range(len(layers)), size):
# +             if most(again) <= budget:
# +                 return set(again)
# +     return None
# %% plan: wrong, a number | It should return a set of layer numbers
# => return len(layers)
# %% plan: wrong, everything again | are enough
# => return set(range(len(layers)))
# %% plan: wrong, nothing again | is held at one moment
# => return set()
# %% plan: wrong, an empty set where nothing fits | so the answer is None
# -     sizes = range(len(layers) + 1)
# -     subsets = [set(each) for size in sizes for each in itertools.combinations(range(len(layers)), size)]
# -     fitting = [each for each in subsets if most(each) <= budget]
# -     return min(fitting, key=lambda again: sum(layers[number][2] for number in again), default=None)
# +     subsets = [set(e) for s in range(len(layers) + 1) for e in itertools.combinations(range(len(layers)), s)]
# +     fitting = [e for e in subsets if most(e) <= budget]
# +     return min(fitting, key=lambda again: sum(layers[i][2] for i in again), default=set())
# %% plan: wrong, first as few layers as possible, then as few seconds | takes 9 seconds; 8 are enough
# sum(layers[number][2] for number in again) => (len(again), sum(layers[i][2] for i in again))
# %% plan: wrong, three layers at most | you say None, but there is a choice that fits
# -     sizes = range(len(layers) + 1)
# -     subsets = [set(each) for size in sizes for each in itertools.combinations(range(len(layers)), size)]
# +     subsets = [set(each) for size in range(4) for each in itertools.combinations(range(len(layers)), size)]
# [number][2] for number => [i][2] for i
