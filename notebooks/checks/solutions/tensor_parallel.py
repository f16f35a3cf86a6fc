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
