# %% between
def between(first, second):
    if first == "columns":  # complete hidden units
        return "nothing" if second == "rows" else "all_gather"
    return "reduce_scatter" if second == "rows" else "all_reduce"  # parts of sums


# %% attention_pieces
def attention_pieces(qkv, out, rank, size):
    rows = [part.chunk(size)[rank] for part in qkv.chunk(3)]
    return torch.cat(rows), out.chunk(size, dim=1)[rank]


# %% copy_and_add
def copy_and_add(all_reduce):
    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            total = gradient.clone()
            all_reduce(total)
            return total

    class Add(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            total = x.clone()
            all_reduce(total)
            return total

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return Copy.apply, Add.apply


# %% on_ranks
def make_plan():
    whole = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    return {
        "attention": whole,
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "feed.up": ColwiseParallel(),
        "feed.down": RowwiseParallel(),
    }


# %% vocabulary_loss
def vocabulary_loss(scores, targets, first, all_reduce):
    tokens, words = scores.shape
    largest = scores.amax(1)
    all_reduce(largest, "max")
    exps = (scores - largest[:, None]).exp()
    sums = exps.sum(1)
    all_reduce(sums)

    mine = (targets >= first) & (targets < first + words)
    place = (targets - first).clamp(0, words - 1)
    aimed = scores[torch.arange(tokens), place] * mine
    all_reduce(aimed)

    loss = (sums.log() + largest - aimed).mean()
    gradient = exps / sums[:, None]
    gradient[torch.arange(tokens), place] -= mine.to(gradient.dtype)
    return loss, gradient / tokens


# %% two_hosts
one = 6 * 856e6 / 8 / 400e12 + 4 * 2 * 7 / 8 * 8192 * 2 / 450e9  # seconds for each token
two = 6 * 856e6 / 16 / 400e12 + 4 * 2 * 15 / 16 * 8192 * 2 / 50e9
times = two / one
