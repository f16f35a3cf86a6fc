# %% critical
def critical(ops):
    ends, last = {}, {}
    for name, (time, needs) in ops.items():
        last[name] = max(needs, key=ends.get, default=None)
        ends[name] = time + max((ends[need] for need in needs), default=0)
    path = [max(ends, key=ends.get)]
    while last[path[0]] is not None:
        path.insert(0, last[path[0]])
    return path


# %% straggler
def straggler(arrivals):
    from statistics import median

    late = [[at - min(collective) for at in collective] for collective in arrivals]
    medians = [median(ranks) for ranks in zip(*late)]
    return medians.index(max(medians))


# %% causes
def causes(step, busy, microbatches):
    workers, mean = len(busy), sum(busy) / len(busy)
    equal = mean * (microbatches + workers - 1) / microbatches
    real = sum(busy) / microbatches + (microbatches - 1) / microbatches * max(busy)
    return [mean, equal - mean, real - equal, step - real]


# %% gain
def gain(ops, name, factor):
    def length(ops):
        ends = {}
        for each, (time, needs) in ops.items():
            ends[each] = time + max((ends[need] for need in needs), default=0)
        return max(ends.values())

    time, needs = ops[name]
    return length(ops) / length({**ops, name: (time / factor, needs)})


# %% mystery1
mystery1 = ("worker1", "slow loader")


# %% mystery2
mystery2 = ("worker2", "imbalance")


# %% mystery3
mystery3 = ("worker4", "slow link")
