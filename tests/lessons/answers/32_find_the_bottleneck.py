# %% critical: wrong, the longest operations, in order | where one does not wait for the one before
def critical(ops):
    return sorted(ops, key=lambda name: ops[name][0])[-2:]


# %% critical: wrong, all operations | where one does not wait for the one before
def critical(ops):
    return list(ops)


# %% critical: wrong, from its end to its beginning | from its end to its beginning
def critical(ops):
    ends, last = {}, {}
    for name, (time, needs) in ops.items():
        last[name] = max(needs, key=ends.get, default=None)
        ends[name] = time + max((ends[need] for need in needs), default=0)
    path = [max(ends, key=ends.get)]
    while last[path[-1]] is not None:
        path.append(last[path[-1]])
    return path


# %% critical: wrong, always the longest of those that can follow | which takes
def critical(ops):
    after = [name for name, (time, needs) in ops.items() if not needs]
    path = []
    while after:
        path.append(max(after, key=lambda name: ops[name][0]))
        after = [name for name, (time, needs) in ops.items() if path[-1] in needs]
    return path


# %% critical: wrong, back from the end to the longest need | which takes
def critical(ops):
    ends = {}
    for name, (time, needs) in ops.items():
        ends[name] = time + max((ends[need] for need in needs), default=0)
    path = [max(ends, key=ends.get)]
    while ops[path[0]][1]:
        path.insert(0, max(ops[path[0]][1], key=lambda need: ops[need][0]))
    return path


# %% critical: wrong, ends with the last operation in the list | which takes
def critical(ops):
    ends, last = {}, {}
    for name, (time, needs) in ops.items():
        last[name] = max(needs, key=ends.get, default=None)
        ends[name] = time + max((ends[need] for need in needs), default=0)
    path = [list(ops)[-1]]
    while last[path[0]] is not None:
        path.insert(0, last[path[0]])
    return path


# %% critical: wrong, the chain with the most operations | which takes
def critical(ops):
    chains = {}
    for name in ops:
        chains[name] = [*max((chains[need] for need in ops[name][1]), key=len, default=[]), name]
    return max(chains.values(), key=len)


# %% critical: wrong, the first need alone | which takes
def critical(ops):
    chains = {}
    for name, (time, needs) in ops.items():
        before = chains[needs[0]] if needs else (0, [])
        chains[name] = (before[0] + time, before[1] + [name])
    return max(chains.values())[1]


# %% critical: wrong, its length | A list of names is wanted
def critical(ops):
    ends = {}
    for name, (time, needs) in ops.items():
        ends[name] = time + max((ends[need] for need in needs), default=0)
    return max(ends.values())


# %% straggler: wrong, the largest sum | It is rank 1
def straggler(arrivals):
    late = [[at - min(collective) for at in collective] for collective in arrivals]
    sums = [sum(ranks) for ranks in zip(*late)]
    return sums.index(max(sums))


# %% straggler: wrong, the largest delay | It is rank 1
def straggler(arrivals):
    late = [[at - min(collective) for at in collective] for collective in arrivals]
    worst = [max(ranks) for ranks in zip(*late)]
    return worst.index(max(worst))


# %% straggler: wrong, the one that came last most often | median lateness rank 0: 0
def straggler(arrivals):
    last = [collective.index(max(collective)) for collective in arrivals]
    return max(set(last), key=last.count)


# %% straggler: wrong, the median of the times as they are | It is rank
def straggler(arrivals):
    from statistics import median

    medians = [median(ranks) for ranks in zip(*arrivals)]
    return medians.index(max(medians))


# %% straggler: wrong, the median of each collective | It is rank
def straggler(arrivals):
    from statistics import median

    medians = [median(collective) for collective in arrivals]
    return medians.index(max(medians))


# %% straggler: wrong, the smallest delay | It is rank
def straggler(arrivals):
    late = [[at - min(collective) for at in collective] for collective in arrivals]
    least = [min(ranks) for ranks in zip(*late)]
    return least.index(max(least))


# %% straggler: wrong, the last of the last collective | It is rank
def straggler(arrivals):
    return arrivals[-1].index(max(arrivals[-1]))


# %% straggler: wrong, how late, not which rank | not 5
def straggler(arrivals):
    from statistics import median

    late = [[at - min(collective) for at in collective] for collective in arrivals]
    return max(median(ranks) for ranks in zip(*late))


# %% causes: wrong, a tuple | A list of four numbers
def causes(step, busy, microbatches):
    workers, mean = len(busy), sum(busy) / len(busy)
    equal = mean * (microbatches + workers - 1) / microbatches
    real = sum(busy) / microbatches + (microbatches - 1) / microbatches * max(busy)
    return mean, equal - mean, real - equal, step - real


# %% causes: wrong, the sum for the mean | computing takes 45, not 180
def causes(step, busy, microbatches):
    workers, mean = len(busy), sum(busy)
    equal = mean * (microbatches + workers - 1) / microbatches
    real = sum(busy) / microbatches + (microbatches - 1) / microbatches * max(busy)
    return [mean, equal - mean, real - equal, step - real]


# %% causes: wrong, the slowest for the mean | computing takes
def causes(step, busy, microbatches):
    workers, mean = len(busy), max(busy)
    equal = mean * (microbatches + workers - 1) / microbatches
    real = sum(busy) / microbatches + (microbatches - 1) / microbatches * max(busy)
    return [mean, equal - mean, real - equal, step - real]


# %% causes: wrong, times and not differences | the bubble takes
def causes(step, busy, microbatches):
    workers, mean = len(busy), sum(busy) / len(busy)
    equal = mean * (microbatches + workers - 1) / microbatches
    real = sum(busy) / microbatches + (microbatches - 1) / microbatches * max(busy)
    return [mean, equal, real, step]


# %% causes: wrong, a bubble of p stages | the bubble takes
def causes(step, busy, microbatches):
    workers, mean = len(busy), sum(busy) / len(busy)
    equal = mean * (microbatches + workers) / microbatches
    real = sum(busy) / microbatches + (microbatches - 1) / microbatches * max(busy)
    return [mean, equal - mean, real - equal, step - real]


# %% causes: wrong, the slowest stage runs all but is not passed once more | the imbalance takes
def causes(step, busy, microbatches):
    workers, mean = len(busy), sum(busy) / len(busy)
    equal = mean * (microbatches + workers - 1) / microbatches
    real = sum(busy) / microbatches + max(busy)
    return [mean, equal - mean, real - equal, step - real]


# %% causes: wrong, right for four workers alone | the bubble takes
def causes(step, busy, microbatches):
    mean = sum(busy) / len(busy)
    equal = mean * (microbatches + 3) / microbatches
    real = sum(busy) / microbatches + (microbatches - 1) / microbatches * max(busy)
    return [mean, equal - mean, real - equal, step - real]


# %% causes: wrong, shares for times | computing takes
def causes(step, busy, microbatches):
    workers, mean = len(busy), sum(busy) / len(busy)
    equal = mean * (microbatches + workers - 1) / microbatches
    real = sum(busy) / microbatches + (microbatches - 1) / microbatches * max(busy)
    return [part / step for part in (mean, equal - mean, real - equal, step - real)]


# %% gain: wrong, the operation alone | times as fast, not 2
def gain(ops, name, factor):
    return factor


# %% gain: wrong, Amdahl over all the work | times as fast, not
def gain(ops, name, factor):
    share = ops[name][0] / sum(time for time, needs in ops.values())
    return 1 / (1 - share + share / factor)


# %% gain: wrong, as if no other chain were left | times as fast, not
def gain(ops, name, factor):
    ends, chains = {}, {}
    for each, (time, needs) in ops.items():
        before = max(needs, key=ends.get, default=None)
        ends[each] = time + (ends[before] if before else 0)
        chains[each] = (chains[before] if before else []) + [each]
    last = max(ends, key=ends.get)
    if name not in chains[last]:
        return 1
    share = ops[name][0] / ends[last]
    return 1 / (1 - share + share / factor)


# %% gain: wrong, changes what it was given | `ops` has changed
def gain(ops, name, factor):
    def length(ops):
        ends = {}
        for each, (time, needs) in ops.items():
            ends[each] = time + max((ends[need] for need in needs), default=0)
        return max(ends.values())

    before = length(ops)
    ops[name] = (ops[name][0] / factor, ops[name][1])
    return before / length(ops)


# %% gain: wrong, after by before | times as fast, not
def gain(ops, name, factor):
    def length(ops):
        ends = {}
        for each, (time, needs) in ops.items():
            ends[each] = time + max((ends[need] for need in needs), default=0)
        return max(ends.values())

    time, needs = ops[name]
    return length({**ops, name: (time / factor, needs)}) / length(ops)


# %% gain: wrong, the time that is saved | times as fast, not
def gain(ops, name, factor):
    def length(ops):
        ends = {}
        for each, (time, needs) in ops.items():
            ends[each] = time + max((ends[need] for need in needs), default=0)
        return max(ends.values())

    time, needs = ops[name]
    return length(ops) - length({**ops, name: (time / factor, needs)})


# %% gain: wrong, times the factor | times as fast, not
def gain(ops, name, factor):
    def length(ops):
        ends = {}
        for each, (time, needs) in ops.items():
            ends[each] = time + max((ends[need] for need in needs), default=0)
        return max(ends.values())

    time, needs = ops[name]
    return length(ops) / length({**ops, name: (time * factor, needs)})


# %% causes: wrong, a rest below zero is none | the rest takes -0.5, not 0
def causes(step, busy, microbatches):
    workers, mean = len(busy), sum(busy) / len(busy)
    bubble = mean * (workers - 1) / microbatches
    real = sum(busy) / microbatches + (microbatches - 1) / microbatches * max(busy)
    return [mean, bubble, real - mean - bubble, max(0, step - real)]


# %% straggler: wrong, the upper one of the two in the middle | It is rank 1
def straggler(arrivals):
    late = [sorted(at - min(step) for at, step in zip(rank, arrivals)) for rank in zip(*arrivals)]
    middle = [each[len(each) // 2] for each in late]
    return middle.index(max(middle))


# %% straggler: wrong, lateness against the mean of the ranks | It is rank
def straggler(arrivals):
    import statistics

    late = [[at - statistics.mean(step) for at in step] for step in arrivals]
    medians = [statistics.median(rank) for rank in zip(*late)]
    return medians.index(max(medians))


# %% straggler: wrong, the lower one of the two in the middle | It is rank 0
def straggler(arrivals):
    late = [sorted(at - min(step) for at, step in zip(rank, arrivals)) for rank in zip(*arrivals)]
    middle = [each[(len(each) - 1) // 2] for each in late]
    return middle.index(max(middle))
