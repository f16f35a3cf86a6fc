# %% critical: wrong, all operations | where one does not wait for the one before
# => return list(ops)
# %% critical: wrong, the longest operations, in order | where one does not wait for the one before
# => return sorted(ops, key=lambda name: ops[name][0])[-2:]
# %% critical: wrong, from its end to its beginning | from its end to its beginning
# [path[0]] is => [path[-1]] is
# insert(0, last[path[0]]) => append(last[path[-1]])
# %% critical: wrong, always the longest of those that can follow | short operations may follow it
# => after = [name for name, (time, needs) in ops.items() if not needs]
# => path = []
# => while after:
# =>     path.append(max(after, key=lambda name: ops[name][0]))
# =>     after = [name for name, (time, needs) in ops.items() if path[-1] in needs]
# => return path
# %% critical: wrong, back from the end to the longest need | need not lie on the longest way
# ends, last = {}, => ends =
# -         last[name] = max(needs, key=ends.get, default=None)
# last[path[0]] is not None => ops[path[0]][1]
# , last[path[0]] => , max(ops[path[0]][1], key=lambda need: ops[need][0])
# %% critical: wrong, ends with the last operation in the list | which takes
# path = [max(ends, key=ends.get)] => path = [list(ops)[-1]]
# %% critical: wrong, the chain with the most operations | which takes
# => chains = {}
# => for name in ops:
# =>     chains[name] = [*max((chains[need] for need in ops[name][1]), key=len, default=[]), name]
# => return max(chains.values(), key=len)
# %% critical: wrong, the first need alone | which takes
# => chains = {}
# => for name, (time, needs) in ops.items():
# =>     before = chains[needs[0]] if needs else (0, [])
# =>     chains[name] = (before[0] + time, before[1] + [name])
# => return max(chains.values())[1]
# %% critical: wrong, its length | A list of names is wanted
# => ends = {}
# => for name, (time, needs) in ops.items():
# =>     ends[name] = time + max((ends[need] for need in needs), default=0)
# => return max(ends.values())
# %% straggler: wrong, the one that came last most often | median lateness rank 0: 0
# => last = [collective.index(max(collective)) for collective in arrivals]
# => return max(set(last), key=last.count)
# %% straggler: wrong, lists are those of ranks | Each list is that of a collective, not of a rank
# for collective in arrivals] => for collective in zip(*arrivals)]
# %% straggler: wrong, the median of the times as they are | It is rank
# -     late = [[at - min(collective) for at in collective] for collective in arrivals]
# -     medians = [median(ranks) for ranks in zip(*late)]
# +     medians = [median(ranks) for ranks in zip(*arrivals)]
# %% straggler: wrong, the median of each collective | It is rank
# -     late = [[at - min(collective) for at in collective] for collective in arrivals]
# -     medians = [median(ranks) for ranks in zip(*late)]
# +     medians = [median(collective) for collective in arrivals]
# %% straggler: wrong, the largest sum | It is rank 1
# => late = [[at - min(collective) for at in collective] for collective in arrivals]
# => sums = [sum(ranks) for ranks in zip(*late)]
# => return sums.index(max(sums))
# %%% straggler: wrong, the largest delay | It is rank 1
# sums = [sum(ranks) for ranks in zip(*late)] => worst = [max(ranks) for ranks in zip(*late)]
# sums.index(max(sums)) => worst.index(max(worst))
# %%% straggler: wrong, the smallest delay | It is rank
# sums = [sum(ranks) for ranks in zip(*late)] => least = [min(ranks) for ranks in zip(*late)]
# sums.index(max(sums)) => least.index(max(least))
# %% straggler: wrong, the last of the last collective | It is rank
# => return arrivals[-1].index(max(arrivals[-1]))
# %% straggler: wrong, how late, not which rank | There is no rank 5: each list has 3 times
# -     medians = [median(ranks) for ranks in zip(*late)]
# -     return medians.index(max(medians))
# +     return max(median(ranks) for ranks in zip(*late))
# %% straggler: wrong, lateness against the mean of the ranks | It is rank
# from statistics import median => import statistics
# min(collective) for at in collective => statistics.mean(step) for at in step
# collective in => step in
# median(ranks) for ranks => statistics.median(rank) for rank
# %% straggler: wrong, the lower one of the two in the middle | It is rank 0
# => late = [sorted(at - min(step) for at, step in zip(rank, arrivals)) for rank in zip(*arrivals)]
# => middle = [each[(len(each) - 1) // 2] for each in late]
# => return middle.index(max(middle))
# %%% straggler: wrong, the upper one of the two in the middle | It is rank 1
# (len(each) - 1) => len(each)
# %% straggler: right, by numpy
# => import numpy as np
# => late = np.array(arrivals) - np.array(arrivals).min(1, keepdims=True)
# => return np.median(late, 0).argmax()
# %% causes: right, a tuple
# [mean, equal - mean, real - equal, step - real] => mean, equal - mean, real - equal, step - real
# %% causes: wrong, the largest minus the mean | as if all m micro-batches waited for the slowest stage
# real - equal => max(busy) - mean
# step - real => step - equal - max(busy) + mean
# %% causes: wrong, the sum for the mean | computing takes 45, not 180
# (busy) / len(busy) => (busy)
# %% causes: wrong, the slowest for the mean | computing takes
# sum(busy) / len => max
# %% causes: wrong, the share of the step for that of computing | Here it is added to computing
# -     return [mean, equal - mean, real - equal, step - real]
# +     bubble = mean * (workers - 1) / (microbatches + workers - 1)
# +     return [mean, bubble, real - mean - bubble, step - real]
# %% causes: wrong, times and not differences | the bubble takes
# equal - mean, real - equal, step - real => equal, real, step
# %% causes: wrong, a bubble of p stages | the bubble takes
# workers - 1 => workers
# %% causes: wrong, the slowest stage runs all but is not passed once more | the imbalance takes
# (microbatches - 1) / microbatches * max => max
# %% causes: wrong, right for four workers alone | the bubble takes
# workers, mean = len(busy), => mean =
# workers - 1 => 3
# %% causes: wrong, shares for times | computing takes
# -     return [mean, equal - mean, real - equal, step - real]
# +     return [part / step for part in (mean, equal - mean, real - equal, step - real)]
# %% causes: wrong, a rest below zero is none | the rest takes -0.5, not 0
# equal = mean * (microbatches + workers - 1) => bubble = mean * (workers - 1)
# equal - mean, real - equal, step - real => bubble, real - mean - bubble, max(0, step - real)
# %% gain: wrong, the operation alone | times as fast, not 2
# => return factor
# %% gain: wrong, Amdahl over all the work | times as fast, not
# => share = ops[name][0] / sum(time for time, needs in ops.values())
# => return 1 / (1 - share + share / factor)
# %% gain: wrong, as if no other chain were left | another chain is the longest after the repair
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
# -     time, needs = ops[name]
# -     return length(ops) / length({**ops, name: (time / factor, needs)})
# +     before = length(ops)
# +     ops[name] = (ops[name][0] / factor, ops[name][1])
# +     return before / length(ops)
# %% gain: wrong, after by before | times as fast, not
# (ops) / length({**ops, name: (time / factor, needs)}) => ({**ops, name: (time / factor, needs)}) / length(ops)
# %% gain: wrong, the time that is saved | times as fast, not
# / length => - length
# %% gain: wrong, times the factor | times as fast, not
# / factor => * factor
# %% mystery1: wrong, a rank that waits | worker3 waits in an all-reduce for another rank
mystery1 = ("worker3", "straggler")
# %% mystery1: wrong, no operator takes longer there | The others call every operator that worker1 calls
mystery1 = ("worker1", "straggler")
# %% mystery1: wrong, it has as much data | The worker is right, the kind is not. In a step worker1 runs forward
mystery1 = ("worker1", "uneven data")
# %% mystery1: wrong, it comes late but it comes | worker1 comes to each all-reduce
mystery1 = ("worker1", "hang")
# %% mystery1: wrong, one all-reduce for a step | A step has one all-reduce, with all gradients in it
mystery1 = ("all", "small messages")
# %% mystery1: wrong, a fault of pipelines | This is a training job, and 'bubble' is no fault of such a job
mystery1 = ("all", "bubble")
# %% mystery1: wrong, all workers for one | 'slow loader' is a fault of one worker: name it
mystery1 = ("all", "slow loader")
# %% mystery1: wrong, a rank for a worker | The worker is one of 'worker1'
mystery1 = ("rank 0", "slow loader")
# %% mystery1: wrong, the kind alone | A worker and a kind are wanted
mystery1 = "slow loader"
# %% mystery1: right, a list
mystery1 = ["worker1", "slow loader"]
# %% mystery2: wrong, the idle share is not that of the schedule | The schedule alone leaves less than a third
mystery2 = ("all", "bubble")
# %% mystery2: wrong, a worker that waits for the slow one | The operations of worker3 take as long
mystery2 = ("worker3", "imbalance")
# %% mystery2: wrong, its messages are quick | The worker is right, the kind is not. What worker2 sends arrives at once
mystery2 = ("worker2", "slow link")
# %% mystery2: wrong, the link before it | What worker1 sends arrives at once
mystery2 = ("worker1", "slow link")
# %% mystery2: wrong, a kind for one worker | 'bubble' is a fault of the whole program
mystery2 = ("worker2", "bubble")
# %% mystery2: wrong, no such kind | 'slow stage' is none
mystery2 = ("worker2", "slow stage")
# %% mystery3: wrong, its calls are under way at the same time | worker2 begins all its calls before it waits
mystery3 = ("worker2", "serial calls")
# %% mystery3: wrong, it makes no calls | worker4 makes no calls. It answers
mystery3 = ("worker4", "serial calls")
# %% mystery3: wrong, it computes as little as the others | the kind is not. No answer takes worker4
mystery3 = ("worker4", "straggler")
# %% mystery3: wrong, another end of the link | What worker2 sends arrives at once
mystery3 = ("worker2", "slow link")
# %% mystery3: wrong, another link | What worker1 sends arrives at once
mystery3 = ("worker1", "slow link")
# %% mystery3: wrong, a fault of training | This is a lookup job, and 'slow loader' is no fault of such a job
mystery3 = ("worker4", "slow loader")
