# %% idle_share: wrong, the bubble over the ideal time | are idle for
def idle_share(workers, microbatches):
    return (workers - 1) / microbatches


# %% idle_share: wrong, fails for one worker | raised ZeroDivisionError
def idle_share(workers, microbatches):
    return 1 / (1 + microbatches / (workers - 1))


# %% idle_share: wrong, as if all workers were one | are idle for
def idle_share(workers, microbatches):
    return workers / (microbatches + workers)


# %% enough: wrong, rounds down | is idle
def enough(workers, share):
    return max(1, int((workers - 1) / share - workers + 1 - 1e-6))


# %% enough: wrong, takes many | would do
def enough(workers, share):
    return 1000


# %% enough: wrong, a fraction | whole number
def enough(workers, share):
    return (workers - 1) / share - workers + 1


# %% enough: wrong, none for one worker | has to be one
def enough(workers, share):
    return round((workers - 1) * (1 - share) / share + 0.4999)


# %% most_kept: wrong, counts forwards | keeps 2 at most; you say 4
def most_kept(ops):
    return sum("F" in op for op in ops)


# %% most_kept: wrong, tells what is left at the end | keeps 2 at most; you say 0
def most_kept(ops):
    return sum(1 if "F" in op else -1 for op in ops)


# %% most_kept: wrong, only those before the first backward | keeps 2 at most; you say 1
def most_kept(ops):
    return next(index for index, op in enumerate(ops) if "B" in op)
