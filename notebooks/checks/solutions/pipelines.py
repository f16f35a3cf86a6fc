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


# %% on_ranks
def step(stage, microbatches, shape, inputs, targets):
    rank, size = dist.get_rank(), dist.get_world_size()
    kept, sent = [], []

    def send(tensor, to):
        sent.append((tensor, dist.isend(tensor, to)))

    def forward(n):
        x = inputs[n] if rank == 0 else torch.empty(shape)
        if rank > 0:
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        if rank == size - 1:
            y = F.mse_loss(y, targets[n]) / microbatches
        else:
            send(y.detach(), rank + 1)
        kept.append((x, y))

    def backward():
        x, y = kept.pop(0)
        gradient = None
        if rank < size - 1:
            gradient = torch.empty(shape)
            dist.recv(gradient, rank + 1)
        y.backward(gradient)
        if rank > 0:
            send(x.grad, rank - 1)

    ahead = min(size - rank, microbatches)
    for n in range(ahead):
        forward(n)
    for n in range(microbatches):
        backward()
        if ahead + n < microbatches:
            forward(ahead + n)
    for _, sending in sent:
        sending.wait()


# %% one_f_one_b
def one_f_one_b(worker, workers, microbatches):
    first = min(workers - worker, microbatches)
    ops = [f"{worker}F{i}" for i in range(first)]
    for i in range(microbatches):
        ops.append(f"{worker}B{i}")
        if first + i < microbatches:
            ops.append(f"{worker}F{first + i}")
    return ops
