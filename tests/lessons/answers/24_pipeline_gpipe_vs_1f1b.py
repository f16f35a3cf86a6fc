# %% idle_share: wrong, takes both for the same | the ratio is 0.25, and 0.2 of the step
# => return ratio
# %% idle_share: wrong, fails without a bubble | raised ZeroDivisionError
# => return 1 / (1 + 1 / ratio)
# %% idle_share: wrong, the share that is busy | That is the share that is busy
# => return 1 / (1 + ratio)
# %% idle_share: wrong, the way back | it makes a ratio of a share
# => return ratio / (1 - ratio) if ratio != 1 else 1.0
# %% idle_share: wrong, per cent | of the step is idle
# => return 100 * ratio / (1 + ratio)
# %% idle_share: wrong, right for 25 % only | With 1 worker and
# => return 0.2
# %% idle_share: wrong, rounds | of the step is idle
# => return round(ratio / (1 + ratio), 2)
# %% idle_share: wrong, nearly right while it is small | of the step is idle
# => return ratio - ratio**2 + ratio**3
# %% enough: wrong, the other measure | for the ratio to the ideal time
# (microbatches + workers - 1) => microbatches
# %% enough: wrong, one too many where it fits exactly | but 27 would do
# > share + 1e-9 => >= share
# %% enough: wrong, a formula that rounding makes too large | may lie a little above a whole one
# => return max(1, -int(-(workers - 1) * (1 - share) / share // 1))
# %% enough: wrong, four times the workers | is idle
# => return 4 * workers
# %% enough: wrong, rounds down | is idle
# => return max(1, int((workers - 1) / share - workers + 1 - 1e-6))
# %% enough: wrong, takes many | would do
# => return 1000
# %% enough: wrong, a fraction | whole number
# => return (workers - 1) / share - workers + 1
# %% enough: wrong, none for one worker | has to be one
# => return round((workers - 1) * (1 - share) / share + 0.4999)
# %% enough: wrong, p in place of p - 1 | would do
# (workers - 1) => workers
# (microbatches + workers - 1) > share + 1e-9 => (microbatches + workers) > share
# %% enough: wrong, tries some hundred only | 0.25% is idle
# => for microbatches in range(1, 400):
# =>     if (workers - 1) / (microbatches + workers - 1) <= share + 1e-9:
# =>         return microbatches
# => return 400
# %% most_kept: wrong, the letter is always the second | keeps 3 at most; you say 0
# "F" in op => op[1] == "F"
# %% most_kept: wrong, forwards in a row | keeps
# kept = most => row = most
# kept += 1 if "F" in op else -1 => row = row + 1 if "F" in op else 0
# most, kept => most, row
# %% most_kept: wrong, counts before the operation | keeps 2 at most; you say 3
# most = 0 => most = 1
# %% most_kept: wrong, the highest number of a micro-batch | keeps 2 at most; you say 4
# => return 1 + max(int(op.split("F")[1]) for op in ops if "F" in op)
# %% most_kept: wrong, counts forwards | keeps 2 at most; you say 4
# => return sum("F" in op for op in ops)
# %% most_kept: wrong, tells what is left at the end | keeps 2 at most; you say 0
# => return sum(1 if "F" in op else -1 for op in ops)
# %% most_kept: wrong, only those before the first backward | keeps 2 at most; you say 1
# => return next(index for index, op in enumerate(ops) if "B" in op)
# %% most_kept: wrong, the number of workers | keeps 3 at most; you say 2
# => return 2
# %% most_kept: wrong, takes micro-batches to be in order | 3B0 3B1 keeps 3 at most; you say
# => forward = backward = most = 0
# => for op in ops:
# =>     if "F" in op:
# =>         forward = int(op.split("F")[1]) + 1
# =>     else:
# =>         backward = int(op.split("B")[1]) + 1
# =>     most = max(most, forward - backward)
# => return most
# %% most_kept: wrong, empties the list | The list `ops` has changed
# for op in => while
# op else - => ops.pop(0) else -
# %% on_ranks: wrong, GPipe | rank 0 has kept the activations of 6 micro-batches at once. In 1F1B it keeps 3
# ahead = min(size - rank, microbatches) => ahead = microbatches
# %% on_ranks: wrong, as many forwards first as there are ranks | With 2 micro-batches: On rank 0 of 3
# min(size - rank, microbatches) => size - rank
# %% on_ranks: wrong, never waits for what it sends | rank 0 has not waited for 6 messages that it has sent
# -     for _, sending in sent:
# -         sending.wait()
# %% on_ranks: wrong, sends wait | waits in your line
# sent.append((tensor, dist.isend(tensor, to))) => dist.send(tensor, to)
# -     for _, sending in sent:
# -         sending.wait()
# %% on_ranks: wrong, the sum over the micro-batches | is 6 times that of one process
# targets[n]) / microbatches => targets[n])
# %% on_ranks: wrong, the last one in is the first one out | Does each gradient meet the activations
# kept.pop(0) => kept.pop()
# %% on_ranks: wrong, no gradient of what has come | unless it required one before the forward
# -             x.requires_grad_()
# %% on_ranks: wrong, a stage without backward sends ones | is not that of one process
# gradient = torch.empty(shape) => gradient = torch.ones(shape)
# -             dist.recv(gradient, rank + 1)
# +             dist.recv(torch.empty(shape), rank + 1)
# %% on_ranks: wrong, rank 0 sends a gradient, too | there is no rank before it
# -         if rank > 0:
# -             send(x.grad, rank - 1)
# +         send(x.grad, rank - 1)
# %% on_ranks: wrong, a forward is left out | raised IndexError: pop from empty list
# ahead + n < microbatches => ahead + n < microbatches - (rank == 1)
# %% on_ranks: wrong, one ahead too few | raised IndexError: pop from empty list
# min(size - rank, microbatches) => min(size - 1 - rank, microbatches)
# %% on_ranks: wrong, loss on all ranks | raised
# if rank == size - 1: => if True:
# else: => if rank < size - 1:
# %% on_ranks: wrong, an activation twice | sends 12 messages
# send(y.detach(), rank + 1) => [send(y.detach(), rank + 1) for _ in range(2)]
# -             dist.recv(x, rank - 1)
# +             dist.recv(x, rank - 1)
# +             dist.recv(x, rank - 1)
# %% one_f_one_b: wrong, strictly in turn | the list is 0F0 0F1 0B0
# => return [f"{worker}{letter}{i}" for i in range(microbatches) for letter in "FB"]
# %% one_f_one_b: wrong, GPipe | the list is
# => return [f"{worker}{letter}{i}" for letter in "FB" for i in range(microbatches)]
# %% one_f_one_b: wrong, every worker begins like the first | worker 1 of 2
# workers - worker => workers
# %% one_f_one_b: wrong, micro-batches that do not exist | with 2 micro-batches the list is 0F0 0F1 0B0 0B1
# min(workers - worker, microbatches) => workers - worker
# %% one_f_one_b: wrong, forgets to drain | the list is
# => first = min(workers - worker, microbatches)
# => ops = [f"{worker}F{i}" for i in range(first)]
# => for i in range(microbatches - first):
# =>     ops += [f"{worker}B{i}", f"{worker}F{first + i}"]
# => return ops
# %% one_f_one_b: wrong, one forward too few at the beginning | the list is
# workers - worker => workers - worker - 1
# %% one_f_one_b: wrong, the last micro-batch first on the way back | the list is
def one_f_one_b(worker, workers, microbatches):
    first = min(workers - worker, microbatches)
    kept = [*range(first)]
    ops = [f"{worker}F{i}" for i in kept]
    for i in range(first, microbatches + first):
        ops.append(f"{worker}B{kept.pop()}")
        if i < microbatches:
            kept.append(i)
            ops.append(f"{worker}F{i}")
    return ops


# %% one_f_one_b: wrong, one text | A list of texts is wanted
# => return " ".join(f"{worker}F{i} {worker}B{i}" for i in range(microbatches))
# %% one_f_one_b: wrong, always stage 0 | worker 1 of 2
# "{worker}F{i}" => "0F{i}"
# "{worker}B{i}" => "0B{i}"
# "{worker}F{first + i}" => "0F{first + i}"
# %% one_f_one_b: wrong, for two workers only | worker 0 of 1
# workers - => 2 -
