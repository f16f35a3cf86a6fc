# %% idle_share
def idle_share(workers, microbatches):
    return (workers - 1) / (microbatches + workers - 1)


# %% enough
def enough(workers, share):
    microbatches = 1
    while (workers - 1) / (microbatches + workers - 1) > share + 1e-9:
        microbatches += 1
    return microbatches


# %% most_kept
def most_kept(ops):
    kept = most = 0
    for op in ops:
        kept += 1 if "F" in op else -1
        most = max(most, kept)
    return most
