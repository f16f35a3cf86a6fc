# %% between: wrong, sums where a piece of the sum is enough | rows, then rows: after the first layer
# "reduce_scatter" if second == "rows" else "all_reduce" => "all_reduce"
# "all_reduce"  # parts of sums => "all_reduce"
# %% between: wrong, gathers parts of sums | rows, then columns: after the first layer each rank has a part of a sum
# "reduce_scatter" => "all_gather"
# "rows" else "all_reduce"  # parts of sums => "columns" else "reduce_scatter"
# %% between: wrong, the cuts in the wrong order | all_gather brings a rank more than it needs
# => if second == "columns":
# =>     return "nothing" if first == "rows" else "all_gather"
# => return "all_gather" if first == "columns" else "all_reduce"
# %% between: wrong, gathers what is already there | columns, then rows: after the first layer
# "nothing" if second == "rows" else "all_gather" => "all_gather"
# %% between: wrong, a word of its own | The answer is one of
# => return "copy"
# %% between: wrong, never anything | nothing does not bring a rank what it needs
# => return "nothing"
# %% between: wrong, always a sum | columns, then columns: after the first layer each rank has some hidden units
# => return "nothing" if (first, second) == ("columns", "rows") else "all_reduce"
# %% between: wrong, takes equal cuts for the free ones | columns, then columns
# => return "nothing" if first == second else "all_reduce"
# %% attention_pieces: wrong, the input cut as well | its piece of `qkv`
# => rows = torch.cat([part.chunk(size)[rank] for part in qkv.chunk(3)])
# => return rows.chunk(size, dim=1)[rank], out.chunk(size, dim=1)[rank]
# %% attention_pieces: wrong, the columns of another rank | are not those of its heads
# => return torch.cat([part.chunk(size)[rank] for part in qkv.chunk(3)]), out.chunk(size, dim=1)[size - 1 - rank]
# %% attention_pieces: wrong, rows of out | its piece of `out`
# => return torch.cat([part.chunk(size)[rank] for part in qkv.chunk(3)]), out.chunk(size)[rank]
# %% attention_pieces: wrong, out whole | its piece of `out`
# => return torch.cat([part.chunk(size)[rank] for part in qkv.chunk(3)]), out
# %% attention_pieces: wrong, every size-th row tears heads apart | do not add up
# => return torch.cat([part[rank::size] for part in qkv.chunk(3)]), out[:, rank::size]
# %% attention_pieces: wrong, all ranks have the first heads | is on 2 ranks, not on one
# => return torch.cat([part.chunk(size)[0] for part in qkv.chunk(3)]), out.chunk(size, dim=1)[0]
# %% attention_pieces: wrong, for two ranks only | its piece of
# => return torch.cat([part.chunk(2)[rank] for part in qkv.chunk(3)]), out.chunk(2, dim=1)[rank]
# %% attention_pieces: wrong, three pieces of qkv | It should return two tensors
# => return [part.chunk(size)[rank] for part in qkv.chunk(3)], out.chunk(size, dim=1)[rank]
# %% attention_pieces: wrong, cuts qkv as one | rows of `qkv` that follow each other
# => return qkv.chunk(size)[rank], out.chunk(size, dim=1)[rank]
# %% attention_pieces: wrong, queries only | its piece of `qkv`
# => return qkv.chunk(3)[0].chunk(size)[rank], out.chunk(size, dim=1)[rank]
# %% copy_and_add: wrong, the other way round | the first function sends something in forward
# Copy.apply, Add => Add.apply, Copy
# %% copy_and_add: wrong, adds up both ways | Each part counts once in the sum
# -             return gradient
# +             total = gradient.clone()
# +             all_reduce(total)
# +             return total
# %% copy_and_add: wrong, writes into its argument | the second function has changed its argument
# -             total = x.clone()
# -             all_reduce(total)
# -             return total
# +             ctx.mark_dirty(x)
# +             all_reduce(x)
# +             return x
# %% copy_and_add: wrong, writes into the gradient | changes the gradient that it is given
# -             total = gradient.clone()
# -             all_reduce(total)
# -             return total
# +             all_reduce(gradient)
# +             return gradient
# %% copy_and_add: wrong, classes and no functions | `Copy` is a class, and two functions are wanted
def copy_and_add(all_reduce):
    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

    return Copy, Copy


# %% copy_and_add: wrong, only one of them | It should return two functions
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

    return Copy.apply


# %%% copy_and_add: wrong, the gradient of one rank | is that of one rank alone
# class Copy => class Add
# -             return x.view_as(x)
# +             total = x.clone()
# +             all_reduce(total)
# +             return total
# -             total = gradient.clone()
# -             all_reduce(total)
# -             return total
# +             return gradient
# Copy => lambda x: x * 1, Add
# %%% copy_and_add: wrong, hidden from autograd | autograd has not seen it
# -     return Copy.apply
# +     def add(x):
# +         total = x.detach().clone()
# +         all_reduce(total)
# +         return total
# +
# +     return Copy.apply, add
# %% copy_and_add: wrong, the mean | is the mean over the ranks
# -             return total
# -
# -     class Add(torch.autograd.Function):
# +             return total / 2 if total[0] == 3 else total / 3
# +
# +     class Add(torch.autograd.Function):
# %% copy_and_add: wrong, adds up in float32 | has the type torch.float32
# -             total = x.clone()
# +             total = torch.zeros(x.shape)
# +             total.copy_(x)
# %% copy_and_add: wrong, flattens | has the shape (6,), and its argument (2, 3)
# view_as(x) => view(-1)
# x.clone() => x.clone().view(-1)
# %% copy_and_add: wrong, all results in one tensor | has changed when it was called once more
# - def copy_and_add(all_reduce):
# + def copy_and_add(all_reduce):
# +     sums = {}
# +
# -             total = x.clone()
# +             total = sums.setdefault(x.shape, torch.empty_like(x))
# +             total.copy_(x)
# %% copy_and_add: wrong, sends in the backward of the second function for nothing | has called `all_reduce` 3 times
# -             return gradient
# +             all_reduce(gradient.clone())
# +             return gradient
# %% vocabulary_loss: wrong, does not take away the first word | `targets` count in the whole vocabulary
# mine = (targets >= first) & (targets < first + words) => mine = targets < words
# place = (targets - first) => place = targets
# %% vocabulary_loss: wrong, the softmax of one rank | in one process
# => mine = (targets >= first) & (targets < first + scores.shape[1])
# => place = (targets - first).clamp(0, scores.shape[1] - 1)
# => rows = torch.arange(len(targets))
# => loss = ((scores.logsumexp(1) - scores[rows, place]) * mine).sum()
# => all_reduce(loss)
# => gradient = scores.softmax(1)
# => gradient[rows, place] -= mine.to(gradient.dtype)
# => return loss / len(targets), gradient / len(targets)
# %% vocabulary_loss: wrong, sends all scores | Three for each token are enough
def vocabulary_loss(scores, targets, first, all_reduce):
    words = torch.tensor([first + scores.shape[1]])
    all_reduce(words, "max")
    whole = torch.zeros(len(scores), int(words), dtype=scores.dtype)
    whole[:, first : first + scores.shape[1]] = scores
    all_reduce(whole)
    whole.requires_grad_()
    loss = torch.nn.functional.cross_entropy(whole, targets)
    loss.backward()
    return loss.detach(), whole.grad[:, first : first + scores.shape[1]]


# %% vocabulary_loss: wrong, one is taken away on all ranks | right loss, but the gradient
def vocabulary_loss(scores, targets, first, all_reduce):
    rows = torch.arange(len(targets))
    largest = scores.amax(1)
    all_reduce(largest, "max")
    exps = (scores - largest[:, None]).exp()
    sums = exps.sum(1)
    all_reduce(sums)
    mine = (targets >= first) & (targets < first + scores.shape[1])
    place = (targets - first).clamp(0, scores.shape[1] - 1)
    aimed = scores[rows, place] * mine
    all_reduce(aimed)
    gradient = exps / sums[:, None]
    gradient[rows, place] -= 1
    return (sums.log() + largest - aimed).mean(), gradient / len(targets)


# %%% vocabulary_loss: wrong, the largest score is never below zero | all scores near -1000
# amax(1) => amax(1).clamp(min=0)
# = 1 => = mine.to(gradient.dtype)
# %%% vocabulary_loss: wrong, one token loses its dimension | one token
# = 1 => = mine.to(gradient.dtype)
# gradient / len(targets) => (gradient / len(targets)).squeeze(0)
# %%% vocabulary_loss: wrong, without the largest score | exp of a large score is infinite
# -     largest = scores.amax(1)
# -     all_reduce(largest, "max")
# -     exps = (scores - largest[:, None]).exp()
# +     exps = scores.exp()
# = 1 => = mine.to(gradient.dtype)
# () + largest - => () -
# %%% vocabulary_loss: wrong, each rank takes away its own largest | each rank has taken away its own largest score
# -     all_reduce(largest, "max")
# = 1 => = mine.to(gradient.dtype)
# %%% vocabulary_loss: wrong, the sum over tokens | is the sum over tokens, not the mean
# = 1 => = mine.to(gradient.dtype)
# mean(), gradient / len(targets) => sum(), gradient
# %%% vocabulary_loss: wrong, every rank believes the target is its own | in one process
# -     mine = (targets >= first) & (targets < first + scores.shape[1])
# [rows, place] * mine => [rows, place]
# %%% vocabulary_loss: wrong, changes the scores | have changed
# -     exps = (scores - largest[:, None]).exp()
# +     scores -= largest[:, None]
# +     exps = scores.exp()
# = 1 => = mine.to(gradient.dtype)
# () + largest - => () -
# %%% vocabulary_loss: wrong, only ranks with a target take part | for ever; others have returned already
# -     all_reduce(aimed)
# +     if first == 0:
# +         all_reduce(aimed)
# = 1 => = mine.to(gradient.dtype)
# %%% vocabulary_loss: wrong, a fourth message tells how many tokens there are | Three for each token are enough
# - def vocabulary_loss(scores, targets, first, all_reduce):
# + def vocabulary_loss(scores, targets, first, all_reduce):
# +     tokens = torch.tensor([float(len(targets))])
# +     all_reduce(tokens, "max")
# = 1 => = mine.to(gradient.dtype)
# mean(), gradient / len(targets) => sum() / tokens, gradient / tokens
# %% on_ranks: wrong, the last matrix of attention by columns | The plan cuts attention.out by columns
# "attention.out": RowwiseParallel() => "attention.out": ColwiseParallel()
# %% on_ranks: wrong, the plan of the lesson | the trace has 6 all-reduces in a step, not 4
# "attention": whole, => # no f for the whole attention
# %% on_ranks: wrong, the attention stays whole | Rank 0 has all of attention.query, attention.key
# => return {"feed.up": ColwiseParallel(), "feed.down": RowwiseParallel()}
# %% on_ranks: wrong, one name is misspelt | Rank 0 has all of attention.query
# "attention.query" => "attention.queries"
# %% on_ranks: wrong, no return | It has no `return`
# return { => plan = {
# %% on_ranks: wrong, a list | A plan is a dict of names and styles, not a list
# => return [ColwiseParallel(), RowwiseParallel()]
# %% on_ranks: wrong, gathers the hidden units | also calls all_gather
# "feed.up": ColwiseParallel() => "feed.up": ColwiseParallel(output_layouts=Replicate())
# "feed.down": RowwiseParallel() => "feed.down": RowwiseParallel(input_layouts=Replicate())
# %% on_ranks: wrong, the last matrix not cut | Rank 0 has all of feed.down
# -         "feed.down": RowwiseParallel(),
# %% on_ranks: wrong, a style that is not there | raised NameError
# "feed.down": RowwiseParallel() => "feed.down": RowParallel()
# %% two_hosts: wrong, the other way round | on 8 GPUs by the one on 16
# two / one => one / two
# %% two_hosts: wrong, the fast link between hosts | passes the links between the hosts
# 2 / 50e9 => 2 / 450e9
# %% two_hosts: wrong, the slow link within a host | have the fast links
# 2 / 450e9 => 2 / 50e9
# %% two_hosts: wrong, computing alone | That is computing alone
times = 8 / 16
# %% two_hosts: wrong, the sums alone | Those are the sums alone
times = (15 / 16 / 50e9) / (7 / 8 / 450e9)
# %% two_hosts: wrong, hidden sums | No computing hides the sums
one = max(6 * 856e6 / 8 / 400e12, 4 * 2 * 7 / 8 * 8192 * 2 / 450e9)
two = max(6 * 856e6 / 16 / 400e12, 4 * 2 * 15 / 16 * 8192 * 2 / 50e9)
times = two / one
# %% two_hosts: wrong, two sums | four all-reduces
# 4 * 2 * 7 => 2 * 2 * 7
# 4 * 2 * 15 => 2 * 2 * 15
# %% two_hosts: wrong, the operations of forward | backward 4
# 6 * 856e6 / 8 => 2 * 856e6 / 8
# 6 * 856e6 / 16 => 2 * 856e6 / 16
# %% two_hosts: wrong, four bytes | has two bytes
# 8192 * 2 / 450e9 => 8192 * 4 / 450e9
# 8192 * 2 / 50e9 => 8192 * 4 / 50e9
# %% two_hosts: wrong, whole matrices | a part of the matrices only
# 856e6 / 8 => 856e6
# 856e6 / 16 => 856e6
# %% two_hosts: wrong, a word | A number is wanted
times = "slower"
# %% two_hosts: right, in a tensor
# two / one => torch.tensor(two) / one
