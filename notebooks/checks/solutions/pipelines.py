# %% idle_share
def idle_share(ratio):
    return ratio / (1 + ratio)


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


# %% one_f_one_b
def one_f_one_b(worker, workers, microbatches):
    first = min(workers - worker, microbatches)
    ops = [f"{worker}F{i}" for i in range(first)]
    for i in range(microbatches):
        ops.append(f"{worker}B{i}")
        if first + i < microbatches:
            ops.append(f"{worker}F{first + i}")
    return ops
