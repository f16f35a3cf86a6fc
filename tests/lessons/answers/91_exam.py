# %% in_window: right
def in_window(begin, parts, limit):
    results, under_way = [], []
    for part in parts:
        if len(under_way) == limit:
            results.append(under_way.pop(0).wait())
        under_way.append(begin(part))
    return results + [call.wait() for call in under_way]


# %% in_window: wrong, one after another | you wait for call 1 while 1 of 2 calls are under way
# => return [begin(part).wait() for part in parts]
# %% in_window: wrong, all at once | you begin call 3, and 2 are under way already
# => calls = [begin(part) for part in parts]
# => return [call.wait() for call in calls]
# %% in_window: wrong, waits as soon as the window is full | begin the next one first
# => results, under_way = [], []
# => for part in parts:
# =>     under_way.append(begin(part))
# =>     if len(under_way) == limit:
# =>         results.append(under_way.pop(0).wait())
# =>         results += [call.wait() for call in under_way]
# =>         under_way = []
# => return results + [call.wait() for call in under_way]
# %%% in_window: wrong, one too many | you begin call 3, and 2 are under way already
# == limit => > limit
# -             results += [call.wait() for call in under_way]
# -             under_way = []
# %% in_window: wrong, block after block | you wait for call 2 while 1 of 2 calls are under way
# => results = []
# => for start in range(0, len(parts), limit):
# =>     calls = [begin(part) for part in parts[start : start + limit]]
# =>     results += [call.wait() for call in calls]
# => return results
# %% in_window: wrong, waits for the newest | you wait for call 2; the oldest one under way is 1
# (0).wait => ().wait
# %% in_window: wrong, forgets those that are left | you return [40, 10, 40]
# results + [call.wait() for call in under_way] => results
# %% in_window: wrong, futures in place of results | the results are [40, 10, 40, 20, 80]; you return [<
# => calls = []
# => for number, part in enumerate(parts):
# =>     if number >= limit:
# =>         calls[number - limit].wait()
# =>     calls.append(begin(part))
# => return calls
# %% in_window: wrong, kept by part | 5 parts, at most 2 under way: the results are
# => results, under_way = {}, []
# => for part in parts:
# =>     if len(under_way) == limit:
# =>         done, call = under_way.pop(0)
# =>         results[done] = call.wait()
# =>     under_way.append((part, begin(part)))
# => results.update((part, call.wait()) for part, call in under_way)
# => return list(results.values())
# %% in_window: wrong, empties the list of parts | `parts` itself has changed
# => results, under_way = [], []
# => while parts or under_way:
# =>     if parts and len(under_way) < limit:
# =>         under_way.append(begin(parts.pop(0)))
# =>     else:
# =>         results.append(under_way.pop(0).wait())
# => return results
# %% in_window: wrong, takes it that there are more parts than places | raised IndexError
# => under_way = [begin(parts[number]) for number in range(limit)]
# => results = []
# => for part in parts[limit:]:
# =>     results.append(under_way.pop(0).wait())
# =>     under_way.append(begin(part))
# => return results + [call.wait() for call in under_way]
# %% in_window: right, a generator
# results, under_way = [], => under_way =
# results.append(under_way.pop(0).wait()) => yield under_way.pop(0).wait()
# -     return results + [call.wait() for call in under_way]
# +     for call in under_way:
# +         yield call.wait()
# %% in_window: wrong, stops at a part that is zero | you wait for call 1 while 1 of 4 calls are under way
# under_way = [], [] => under_way, left = [], [], iter(parts)
# for part in parts: => while part := next(left, None):
# %% gather_uneven: right
def gather_uneven(mine, size, all_gather):
    lengths = [int(length) for length in all_gather(torch.tensor([len(mine)]))]
    padded = torch.zeros(max(lengths))
    padded[: len(mine)] = mine
    return [vector[:length] for vector, length in zip(all_gather(padded), lengths)]


# %% gather_uneven: wrong, as they are | In a collective all ranks make the same call
# => return all_gather(mine)
# %% gather_uneven: wrong, does not cut | in place 0 a tensor of shape (5,); the vector of rank 0 has length 3
# => longest = max(int(length) for length in all_gather(torch.tensor([len(mine)])))
# => return all_gather(torch.nn.functional.pad(mine, (0, longest - len(mine))))
# %% gather_uneven: wrong, cuts to its own length | in place 1 a tensor of shape (3,); the vector of rank 1 has length 5
# => longest = max(int(length) for length in all_gather(torch.tensor([len(mine)])))
# => padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
# => return [vector[: len(mine)] for vector in all_gather(padded)]
# %%% gather_uneven: wrong, takes -1 for padding | in place 1 a tensor of shape (4,); the vector of rank 1 has length 5
# (0, longest - len(mine)) => (0, longest - len(mine)), value=-1.0
# : len(mine) => vector != -1
# %%% gather_uneven: wrong, takes nan for padding | the vector of rank 1 has length 37
# (0, longest - len(mine)) => (0, longest - len(mine)), value=torch.nan
# : len(mine) => ~vector.isnan()
# %% gather_uneven: wrong, takes zeros for padding | in place 1 a tensor of shape (3,)
# => longest = max(int(length) for length in all_gather(torch.tensor([len(mine)])))
# => padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
# => return [vector[vector != 0] if place else vector[: len(mine)] for place, vector in enumerate(all_gather(padded))]
# %% gather_uneven: wrong, strips zeros at the end | shape (1,); the vector of rank 1 has length 2
# => longest = max(int(length) for length in all_gather(torch.tensor([len(mine)])))
# => found = []
# => for vector in all_gather(torch.nn.functional.pad(mine, (0, longest - len(mine)))):
# =>     values = vector.tolist()
# =>     while values and values[-1] == 0:
# =>         values.pop()
# =>     found.append(torch.tensor(values))
# => return found
# %% gather_uneven: wrong, changes its vector | `mine` of rank 0 has changed
# => lengths = [int(length) for length in all_gather(torch.tensor([len(mine)]))]
# => mine.resize_(max(lengths))
# => return [vector[:length].clone() for vector, length in zip(all_gather(mine), lengths)]
# %% gather_uneven: wrong, leaves out the empty ones | a list of 2; there are 3 ranks
# => lengths = [int(length) for length in all_gather(torch.tensor([len(mine)]))]
# => padded = torch.nn.functional.pad(mine, (0, max(lengths) - len(mine)))
# => return [vector[:length] for vector, length in zip(all_gather(padded), lengths) if length]
# %%% gather_uneven: wrong, one vector | a list with a tensor of each rank is wanted
# -     return [vector[:length] for vector, length in zip(all_gather(padded), lengths) if length]
# +     return torch.cat([vector[:length] for vector, length in zip(all_gather(padded), lengths)])
# %%% gather_uneven: wrong, one number after another | calls; two are enough
# -     return [vector[:length] for vector, length in zip(all_gather(padded), lengths) if length]
# +     columns = [all_gather(padded[place]) for place in range(max(lengths))]
# +     found = [torch.tensor([float(column[rank]) for column in columns]) for rank in range(size)]
# +     return [vector[:length] for vector, length in zip(found, lengths)]
# %% gather_uneven: wrong, pads to a length that is enough here | numbers to all_gather, where
# => lengths = [int(length) for length in all_gather(torch.tensor([len(mine)]))]
# => padded = torch.nn.functional.pad(mine, (0, 64 - len(mine)))
# => return [vector[:length] for vector, length in zip(all_gather(padded), lengths)]
# %%% gather_uneven: wrong, padding of twice the longest | numbers to all_gather, where
# nn.functional.pad(mine, (0, 64 - len(mine))) => cat([mine, torch.zeros(2 * max(lengths) - len(mine))])
# %%% gather_uneven: wrong, padding in front | rank 0 has [1, 0, 3]
# nn.functional.pad(mine, (0, 64 - len(mine))) => cat([torch.zeros(max(lengths) - len(mine)), mine])
# %% gather_uneven: wrong, who has nothing stays away | for ever; others have returned already
# => lengths = [int(length) for length in all_gather(torch.tensor([len(mine)]))]
# => if len(mine) == 0:
# =>     return [torch.zeros(length) for length in lengths]
# => padded = torch.nn.functional.pad(mine, (0, max(lengths) - len(mine)))
# => return [vector[:length] for vector, length in zip(all_gather(padded), lengths)]
# %%% gather_uneven: wrong, one call where all are empty | right, but with 1 call on a rank; two are wanted
# len(mine) = => max(lengths) =
# (length) for length in lengths => (0) for _ in range(size)
# %% gather_uneven: wrong, no calls where there is one rank | right, but with 0 calls on a rank; two are wanted
# => if size == 1:
# =>     return [mine]
# => lengths = [int(length) for length in all_gather(torch.tensor([len(mine)]))]
# => padded = torch.nn.functional.pad(mine, (0, max(lengths) - len(mine)))
# => return [vector[:length] for vector, length in zip(all_gather(padded), lengths)]
# %% fan_out: right
def fan_out(first, branches, x):
    received = x.detach().clone().requires_grad_()
    hidden = first(received)
    total = torch.zeros_like(hidden)
    for branch in branches:
        copy = hidden.detach().clone().requires_grad_()
        branch(copy).backward()
        total += copy.grad
    hidden.backward(total)
    return received.grad


# %% fan_out: right, one backward for all copies
# => leaf = x.detach().requires_grad_()
# => hidden = first(leaf)
# => copies = [hidden.detach().requires_grad_() for _ in branches]
# => torch.stack([branch(copy) for branch, copy in zip(branches, copies)]).sum().backward()
# => (gradient,) = torch.autograd.grad(hidden, leaf, sum(copy.grad for copy in copies))
# => return gradient
# %% fan_out: wrong, the graph travels | a tensor with a graph behind it
# => received = x.clone().requires_grad_()
# => hidden = first(received)
# => sum(branch(hidden) for branch in branches).backward()
# => return received.grad
# %%% fan_out: wrong, the copy needs no gradient | a tensor that needs no gradient
# -     sum(branch(hidden) for branch in branches).backward()
# +     copies = [hidden.detach() for _ in branches]
# +     sum(branch(copy) for branch, copy in zip(branches, copies)).backward()
# +     hidden.backward(sum(copy.grad for copy in copies))
# %%% fan_out: wrong, begins again with ones | the gradient of `x` is
# -     sum(branch(hidden) for branch in branches).backward()
# +     for branch in branches:
# +         branch(hidden.detach().requires_grad_()).backward()
# +     hidden.sum().backward()
# %% fan_out: wrong, backward once for each branch | 2 times through the graph of `first`, not once
# => received = x.clone().requires_grad_()
# => hidden = first(received)
# => for branch in branches:
# =>     copy = hidden.detach().requires_grad_()
# =>     branch(copy).backward()
# =>     hidden.backward(copy.grad, retain_graph=True)
# => return received.grad
# %%% fan_out: wrong, the last part alone | 2 branches: the gradient of `x` is
# -         hidden.backward(copy.grad, retain_graph=True)
# +     hidden.backward(copy.grad)
# %%% fan_out: wrong, first runs for each branch | `first` runs 2 times; once is enough
# -     hidden = first(received)
# -     for branch in branches:
# +     for branch in branches:
# +         hidden = first(received)
# grad, retain_graph=True => grad
# %% fan_out: wrong, a clone keeps the graph | a tensor with a graph behind it
# x.detach(). => x.
# -         copy = hidden.detach().clone().requires_grad_()
# -         branch(copy).backward()
# +         copy = hidden.clone()
# +         copy.retain_grad()
# +         branch(copy).backward(retain_graph=True)
# %% fan_out: wrong, the mean of the parts | 2 branches: the gradient of `x` is
# => received = x.clone().requires_grad_()
# => hidden = first(received)
# => copies = [hidden.detach().requires_grad_() for _ in branches]
# => for branch, copy in zip(branches, copies):
# =>     branch(copy).backward()
# => hidden.backward(torch.stack([copy.grad for copy in copies]).mean(0))
# => return received.grad
# %%% fan_out: wrong, one copy for all | the same tensor as a branch before
# copies = [hidden.detach().requires_grad_() for _ in branches] => copy = hidden.detach().requires_grad_()
# branch, copy in zip(branches, copies) => branch in branches
# torch.stack([copy.grad for copy in copies]).mean(0) => copy.grad
# %%% fan_out: wrong, stops at hidden | the gradient of `x` is [4, 8]; yours is [1, 1]
# -     hidden.backward(torch.stack([copy.grad for copy in copies]).mean(0))
# -     return received.grad
# +     total = sum(copy.grad for copy in copies)
# +     hidden.backward(total)
# +     return total
# %% fan_out: wrong, x needs no gradient | raised RuntimeError
# => hidden = first(x)
# => copies = [hidden.detach().requires_grad_() for _ in branches]
# => for branch, copy in zip(branches, copies):
# =>     branch(copy).backward()
# => hidden.backward(sum(copy.grad for copy in copies))
# => return x.grad
# %%% fan_out: wrong, changes x | `x` itself has changed
# - def fan_out(first, branches, x):
# + def fan_out(first, branches, x):
# +     x.requires_grad_()
# %% fan_out: wrong, takes `hidden` to have the shape of `x` | raised RuntimeError
# x.detach(). => x.
# (hidden) => (x)
# %% fan_out: wrong, empties the list of branches | the list `branches` itself has changed
# x.detach(). => x.
# for branch in => while
# branch(copy) => branches.pop(0)(copy)
# %% fan_out: wrong, the gradient takes the place of x | `x` itself is
# x.detach(). => x.
# received.grad => x.copy_(received.grad)
# %% accepted: right
def accepted(log, most):
    steps, pulled, answers = 0, {}, []
    for kind, trainer in log:
        if kind == "pull":
            pulled[trainer] = steps
        else:
            answers.append(steps - pulled[trainer] <= most)
            steps += answers[-1]
    return answers


# %% accepted: wrong, what is thrown away counts | so it is accepted; you say False
# answers[-1] => 1
# %% accepted: wrong, less than | so it is accepted; you say False
# [trainer] <= => [trainer] <
# %% accepted: wrong, own steps do not count | so it is thrown away; you say True
# steps, pulled, answers = 0, => others, answers =
# pulled[trainer] = steps => others[trainer] = 0
# -             answers.append(steps - pulled[trainer] <= most)
# -             steps += answers[-1]
# +             answers.append(others[trainer] <= most)
# +             if answers[-1]:
# +                 for other in others:
# +                     others[other] += other != trainer
# %% accepted: wrong, a push is a pull | so it is thrown away; you say True
# -     return answers
# +             pulled[trainer] = steps
# +     return answers
# %% accepted: wrong, one pull for all | so it is thrown away; you say True
# , {}, [] => , 0, []
# , trainer => , _
# pulled[trainer] = => pulled =
# pulled[trainer] <= => pulled <=
# %% accepted: wrong, counts pulls as well | so it is accepted; you say False
# steps, pulled, answers = 0, => pulled, answers =
# kind, trainer in log => place, (kind, trainer) in enumerate(log)
# [trainer] = steps => [trainer] = place
# -             answers.append(steps - pulled[trainer] <= most)
# -             steps += answers[-1]
# +             answers.append(place - pulled[trainer] - 1 <= most)
# %% accepted: wrong, names | a list of True and False is wanted
# answers = => names =
# else => elif steps - pulled[trainer] <= most
# answers.append(steps - pulled[trainer] <= most) => steps += 1
# steps += answers[-1] => names.append(trainer)
# answers => names
# %% accepted: wrong, the staleness | a list of True and False is wanted
# [trainer] <= most => [trainer]
# answers[-1] => answers[-1] <= most
# %% accepted: wrong, only the first pull counts | so it is accepted; you say False
# pulled[trainer] = steps => pulled.setdefault(trainer, steps)
# %% accepted: wrong, an answer for each call | returns 6 answers; there are 3 pushes
# -         else:
# -             answers.append(steps - pulled[trainer] <= most)
# -             steps += answers[-1]
# +         answers.append(steps - pulled[trainer] <= most)
# +         steps += kind == "push" and answers[-1]
# %% two_level: right
def two_level(n, nodes, per_node, fast, slow):
    def rounds(size, ranks, alpha, beta):
        return (ranks - 1) * (alpha + size / ranks / beta)

    return 2 * rounds(n, per_node, *fast) + 2 * rounds(n / per_node, nodes, *slow)


# %% two_level: wrong, all bytes go between nodes | two_level(800, 2, 4, (1.0, 100.0), (5.0, 10.0)) is 48
# n / per_node => n
# %% two_level: wrong, whole vectors in each round | 18 within the nodes
# ranks / beta => beta
# %% two_level: wrong, as many rounds as ranks | 18 within the nodes and 0 between them; you say
# (ranks - 1) => ranks
# %% two_level: wrong, one latency for each part | you say 14
# (ranks - 1) * (alpha + size / ranks / beta) => alpha + (ranks - 1) * size / ranks / beta if ranks > 1 else 0
# %% two_level: wrong, the links exchanged | 18 within the nodes and 0 between them; you say
# per_node, *fast => per_node, *slow
# nodes, *slow => nodes, *fast
# %% two_level: wrong, no all-gather | you say 9
# return 2 * rounds => return rounds
# %% two_level: wrong, half an all-reduce between nodes | 0 within the nodes and 90 between them; you say 45
# (n, per_node, *fast) + 2 * rounds => (n, per_node, *fast) + rounds
# %% two_level: wrong, multiplies by the bandwidth | you say
# / ranks / => / ranks *
# %% two_level: wrong, one ring of all ranks | you say
# => ranks = nodes * per_node
# => alpha, beta = slow if nodes > 1 else fast
# => return 2 * (ranks - 1) * (alpha + n / ranks / beta)
# %% zero1_step: right
def zero1_step(whole, gradient, velocity, lr, momentum, rank, size, reduce_scatter, all_gather):
    padding = (0, -len(whole) % size)
    mean = reduce_scatter(torch.nn.functional.pad(gradient, padding)) / size
    velocity.mul_(momentum).add_(mean)
    shard = torch.nn.functional.pad(whole, padding).chunk(size)[rank] - lr * velocity
    whole.copy_(all_gather(shard)[: len(whole)])


# %% zero1_step: wrong, changes the gradient | `gradient` of rank 0 has changed
# mean = reduce_scatter(torch.nn.functional.pad(gradient, padding)) / => gradient /=
# mean => reduce_scatter(torch.nn.functional.pad(gradient, padding))
# %% zero1_step: right, gathers velocities
# => mean = reduce_scatter(torch.nn.functional.pad(gradient, (0, -len(gradient) % size))) / size
# => velocity.copy_(momentum * velocity + mean)
# => whole -= lr * all_gather(velocity)[: len(whole)]
# %% zero1_step: wrong, no padding | cuts a vector into 2 equal shards; it was given the shape (5,)
# => velocity.mul_(momentum).add_(reduce_scatter(gradient) / size)
# => whole.copy_(all_gather(whole.chunk(size)[rank] - lr * velocity))
# %% zero1_step: wrong, another velocity under the same name | `velocity` of rank 0 is [0, 0]
# -     mean = reduce_scatter(torch.nn.functional.pad(gradient, padding)) / size
# -     velocity.mul_(momentum).add_(mean)
# +     velocity = momentum * velocity + reduce_scatter(torch.nn.functional.pad(gradient, padding)) / size
# %% zero1_step: wrong, steps without the velocity | step 2: `whole` of rank 0 is
# * velocity => * mean
# %% zero1_step: wrong, the gradient weighs the rest | `velocity` of rank 0 is
# add_(mean) => add_((1 - momentum) * mean)
# %% zero1_step: wrong, gathers twice | calls reduce_scatter, all_gather, all_gather; each once is enough
# => padding = (0, -len(whole) % size)
# => mean = reduce_scatter(torch.nn.functional.pad(gradient, padding)) / size
# => shard = momentum * velocity + mean
# => velocity.copy_(all_gather(shard).chunk(size)[rank])
# => whole.sub_(lr * all_gather(shard)[: len(whole)])
# %% zero1_step: wrong, every rank takes the first shard | step 1: `whole` of rank 0 is
# => padding = (0, -len(whole) % size)
# => velocity.mul_(momentum).add_(reduce_scatter(torch.nn.functional.pad(gradient, padding)) / size)
# => shard = torch.nn.functional.pad(whole, padding)[: len(velocity)] - lr * velocity
# => whole.copy_(all_gather(shard)[: len(whole)])
# %%% zero1_step: wrong, other parameters under the same name | step 1: `whole` of rank 0 is [1, 2, 3, 4]
# [: len(velocity)] => .chunk(size)[rank]
# whole.copy_(all_gather(shard)[: len(whole)]) => whole = all_gather(shard)[: len(whole)]
# %%% zero1_step: wrong, the sum in place of the mean | `velocity` of rank 0 is
# (torch.nn.functional.pad(gradient, padding)) / size => (torch.nn.functional.pad(gradient, padding))
# [: len(velocity)] => .chunk(size)[rank]
# %%% zero1_step: wrong, no momentum | step 2: `velocity` of rank 0 is
# mul_(momentum).add_ => copy_
# [: len(velocity)] => .chunk(size)[rank]
# %% zero1_step: wrong, a shard more of padding than needed | gives all_gather 3 numbers; a shard has 2
# => padding = (0, size - len(whole) % size)
# => mean = reduce_scatter(torch.nn.functional.pad(gradient, padding)) / size
# => velocity.mul_(momentum).add_(mean[: len(velocity)])
# => shard = torch.nn.functional.pad(whole, padding).chunk(size)[rank]
# => shard[: len(velocity)] -= lr * velocity
# => whole.copy_(all_gather(shard)[: len(whole)])
# %% embed: right
def embed(ids, piece, first, all_reduce):
    here = (ids >= first) & (ids < first + len(piece))
    rows = piece[(ids - first).clamp(0, len(piece) - 1)]
    rows = torch.where(here.unsqueeze(-1), rows, 0.0)
    all_reduce(rows)
    return rows


# %% embed: wrong, no all-reduce | rank 0 returns [0, 0
# => here = (ids >= first) & (ids < first + len(piece))
# => return piece[(ids - first).clamp(0, len(piece) - 1)] * here.unsqueeze(-1)
# %% embed: wrong, returns the result of all_reduce | It returned None here
# => here = (ids >= first) & (ids < first + len(piece))
# => rows = piece[(ids - first).clamp(0, len(piece) - 1)] * here.unsqueeze(-1)
# => return all_reduce(rows)
# %% embed: wrong, who has all rows stays away | right, but a rank makes no all-reduce; one is wanted
# => here = (ids >= first) & (ids < first + len(piece))
# => rows = piece[(ids - first).clamp(0, len(piece) - 1)] * here.unsqueeze(-1)
# => if not here.all():
# =>     all_reduce(rows)
# => return rows
# %%% embed: wrong, who has no row stays away | waits
# not here.all => here.any
# %% embed: wrong, numbers of the whole table | raised IndexError
# => rows = piece[ids]
# => all_reduce(rows)
# => return rows
# %%% embed: wrong, no mask | rank 0 returns
# [ids] => [(ids - first).clamp(0, len(piece) - 1)]
# %%% embed: right, zeros put in afterwards
# -     rows = piece[ids]
# +     places = ids - first
# +     there = (places >= 0) & (places < len(piece))
# +     rows = piece[places.clamp(0, len(piece) - 1)]
# +     rows[~there] = 0
# %%% embed: wrong, one vector of ids alone | raised
# -     rows = piece[ids]
# +     rows = torch.zeros(len(ids), piece.shape[1])
# +     for place, number in enumerate(ids.tolist()):
# +         if first <= number < first + len(piece):
# +             rows[place] = piece[number - first]
# %% embed: wrong, one row too many | rank 0 returns
# => here = (ids >= first) & (ids <= first + len(piece))
# => rows = piece[(ids - first).clamp(0, len(piece) - 1)] * here.unsqueeze(-1)
# => all_reduce(rows)
# => return rows
# %%% embed: wrong, numbers below wrap around | rank 0 returns
# (ids >= first) & (ids <= first + len(piece)) => ids < first + len(piece)
# (ids - first).clamp(0, len(piece) - 1) => (ids - first) % len(piece)
# %%% embed: wrong, forgets where its piece begins | rank 0 returns
# ids <= => ids <
# (ids - first).clamp(0, len(piece) - 1) => ids % len(piece)
# %%% embed: wrong, rows that are not there left out | rank 0 returns a tensor of shape (3, 2); (6, 2) is wanted
# ids <= => ids <
# [(ids - first).clamp(0, len(piece) - 1)] * here.unsqueeze(-1) => [ids[here] - first]
# %% embed: wrong, all pieces as long as its own | rank 0 returns
# here = (ids >= first) & (ids < first + len(piece)) => rank = first // len(piece)
# rows = piece[(ids - first).clamp(0, len(piece) - 1)] => here = ids // len(piece) == rank
# torch.where(here.unsqueeze(-1), rows, 0.0) => piece[ids % len(piece)] * here.unsqueeze(-1)
# %% embed: wrong, an all-reduce for each id | all-reduces; one is enough
# => rows = []
# => for number in ids.flatten().tolist():
# =>     row = piece[number - first].clone() if 0 <= number - first < len(piece) else torch.zeros(piece.shape[1])
# =>     all_reduce(row)
# =>     rows.append(row)
# => return torch.stack(rows).reshape(*ids.shape, -1)
# %% embed: wrong, changes the ids | `ids` of rank 1 has changed
# here = (ids >= first) & (ids < first + len(piece)) => ids -= first
# rows = piece[(ids - first).clamp(0, len(piece) - 1)] => here = (ids >= 0) & (ids < len(piece))
# torch.where(here.unsqueeze(-1), rows, 0.0) => piece[ids.clamp(0, len(piece) - 1)] * here.unsqueeze(-1)
# %% embed: wrong, two numbers in a row | raised RuntimeError
# rows = piece[(ids - first).clamp(0, len(piece) - 1)] => rows = torch.zeros(*ids.shape, 2)
# rows = torch.where(here.unsqueeze(-1), rows, 0.0) => rows[here] = piece[ids[here] - first].float()
# %% embed: wrong, always float32 | a tensor of torch.float32; the table is of torch.float64
# rows = piece[(ids - first).clamp(0, len(piece) - 1)] => rows = torch.zeros(*ids.shape, piece.shape[1])
# rows = torch.where(here.unsqueeze(-1), rows, 0.0) => rows[here] = piece[ids[here] - first].float()
# %% idle: right
def idle(times):
    ends = [0] * len(times)
    for microbatch in range(len(times[0])):
        before = 0
        for stage in range(len(times)):
            ends[stage] = before = max(before, ends[stage]) + times[stage][microbatch]
    return [ends[-1] - sum(row) for row in times]


# %% idle: wrong, the formula of equal stages | the last forward ends at 5
# => stages, microbatches = len(times), len(times[0])
# => turn = max(times[0])
# => return [(microbatches + stages - 1) * turn - sum(row) for row in times]
# %% idle: wrong, waits for the stage before alone | the stages are idle for
# => ends = [0] * len(times[0])
# => for row in times:
# =>     ends = [end + time for end, time in zip(ends, row)]
# => return [max(sum(times[0]), ends[-1]) - sum(row) for row in times]
# %% idle: wrong, a stage begins when the one before is through | the last forward ends at 5
# => total = sum(sum(row) for row in times)
# => return [total - sum(row) for row in times]
# %% idle: wrong, the slowest forward sets all turns | the stages are idle for
# => turn = max(max(row) for row in times)
# => return [(len(times[0]) + len(times) - 1) * turn - sum(row) for row in times]
# %% idle: wrong, does not wait for the stage before | the stages are idle for [3, 1]; you say
# => last = max(sum(row) for row in times)
# => return [last - sum(row) for row in times]
# %% idle: wrong, the share | the stages are idle for [3, 1]; you say [0.6, 0.2]
# ends[-1] - sum(row) => 1 - sum(row) / ends[-1]
# %% idle: wrong, until its own last forward | the stages are idle for [3, 1]; you say [0, 1]
# ends[-1] - sum(row) for row in times => end - sum(row) for end, row in zip(ends, times)
# %% idle: wrong, rows and columns exchanged | the stages are idle for [3, 1]; you say
# -     ends = [0] * len(times)
# +     times = [list(row) for row in zip(*times)]
# +     ends = [0] * len(times)
# %% idle: wrong, only the wait at the beginning | the stages are idle for [3, 1]; you say [0, 1]
# => return [sum(times[before][0] for before in range(stage)) for stage in range(len(times))]
# %% idle: wrong, no stage takes more than one ahead | the stages are idle for
# => stages, turns = len(times), len(times) + len(times[0]) - 1
# => last = 0
# => for turn in range(turns):
# =>     running = [times[s][turn - s] for s in range(stages) if 0 <= turn - s < len(times[0])]
# =>     last += max(running)
# => return [last - sum(row) for row in times]
# %% idle: wrong, the sum over all stages | a list with a number for each of 2 stages is wanted
# [ends[-1] - sum(row) for row in times] => sum(ends[-1] - sum(row) for row in times)
# %% idle: wrong, counts whole units of time | the stages are idle for [1, 0.5]
# max(before, ends[stage]) + times[stage][microbatch] => int(max(before, ends[stage]) + times[stage][microbatch])
# %% recompute: right
def recompute(layers, x, gradient, every):
    segments = [layers[start : start + every] for start in range(0, len(layers), every)]
    inputs = []
    with torch.no_grad():
        for segment in segments:
            inputs.append(x)
            for layer in segment:
                x = layer(x)
    for segment in reversed(segments):
        start = y = inputs.pop().detach().clone().requires_grad_()
        for layer in segment:
            y = layer(y)
        y.backward(gradient)
        gradient = start.grad
    return gradient


# %% recompute: right, counts layers
def recompute(layers, x, gradient, every):
    inputs = {}
    with torch.no_grad():
        for number, layer in enumerate(layers):
            if number % every == 0:
                inputs[number] = x
            x = layer(x)
    for number in sorted(inputs, reverse=True):
        start = inputs[number].detach().requires_grad_()
        with torch.enable_grad():
            y = start
            for layer in layers[number : number + every]:
                y = layer(y)
        torch.autograd.backward(y, gradient)
        gradient = start.grad
    return gradient


# %% recompute: wrong, one graph for all | the graphs of 4 layers are held at once; 2 are allowed
# => start = y = x.clone().requires_grad_()
# => for layer in layers:
# =>     y = layer(y)
# => y.backward(gradient)
# => return start.grad
# %% recompute: wrong, keeps the input of every layer | 4 outputs of layers are kept until backward
def recompute(layers, x, gradient, every):
    inputs = [x]
    with torch.no_grad():
        for layer in layers:
            inputs.append(layer(inputs[-1]))
    for begin in reversed(range(0, len(layers), every)):
        start = y = inputs[begin].detach().clone().requires_grad_()
        for layer in layers[begin : begin + every]:
            y = layer(y)
        y.backward(gradient)
        gradient = start.grad
    return gradient


# %% recompute: wrong, every segment from x | 3 times; twice is enough
def recompute(layers, x, gradient, every):
    for begin in reversed(range(0, len(layers), every)):
        kept = x
        with torch.no_grad():
            for layer in layers[:begin]:
                kept = layer(kept)
        start = y = kept.detach().clone().requires_grad_()
        for layer in layers[begin : begin + every]:
            y = layer(y)
        y.backward(gradient)
        gradient = start.grad
    return gradient


# %% recompute: wrong, from the first segment to the last | the gradient of `x` is
# segment in reversed(segments) => segment, kept in zip(segments, inputs)
# inputs.pop() => kept
# %% recompute: wrong, the same gradient for each segment | the gradient of `x` is
# -         gradient = start.grad
# -     return gradient
# +     return start.grad
# %% recompute: wrong, the last segment first, without gradient | the gradient of `x` is
# -     for segment in reversed(segments):
# +     gradient = torch.ones_like(gradient)
# +     for segment in reversed(segments):
# %% recompute: wrong, the rest is left out | layer 4 does not run
# [start : start + every] for start => [every * number : every * (number + 1)] for number
# 0, len(layers), => len(layers) //
# %% recompute: wrong, so many segments | the graphs of 3 layers are held at once; 2 are allowed
# -     segments = [layers[start : start + every] for start in range(0, len(layers), every)]
# +     length = -(-len(layers) // every)
# +     segments = [layers[start : start + length] for start in range(0, len(layers), length)]
# %% recompute: wrong, no gradients of weights | the weight of layer 0 has no gradient
# -         y.backward(gradient)
# -         gradient = start.grad
# +         (gradient,) = torch.autograd.grad(y, start, gradient)
# %% recompute: wrong, changes x | `x` itself has changed
# .detach().clone(). => .
# %% recompute: wrong, recomputes without a graph | raised RuntimeError
# -     for segment in reversed(segments):
# -         start = y = inputs.pop().detach().clone().requires_grad_()
# -         for layer in segment:
# -             y = layer(y)
# -         y.backward(gradient)
# -         gradient = start.grad
# +         for segment in reversed(segments):
# +             start = y = inputs.pop().detach().clone().requires_grad_()
# +             for layer in segment:
# +                 y = layer(y)
# +             y.backward(gradient)
# +             gradient = start.grad
# %% recompute: wrong, the first pass has graphs too | layers are held at once
# -     with torch.no_grad():
# -         for segment in segments:
# -             inputs.append(x)
# -             for layer in segment:
# -                 x = layer(x)
# +     for segment in segments:
# +         inputs.append(x)
# +         for layer in segment:
# +             x = layer(x)
# %% recompute: wrong, takes the layers out of their list | the list `layers` itself has changed
def recompute(layers, x, gradient, every):
    inputs = []
    with torch.no_grad():
        for number, layer in enumerate(layers):
            if number % every == 0:
                inputs.append(x)
            x = layer(x)
    while layers:
        begin = (len(layers) - 1) // every * every
        start = y = inputs.pop().detach().clone().requires_grad_()
        for layer in layers[begin:]:
            y = layer(y)
        y.backward(gradient)
        gradient = start.grad
        del layers[begin:]
    return gradient


# %% experts: right
def experts(tokens, chosen, expert, size, all_to_all):
    came = all_to_all([tokens[chosen == rank] for rank in range(size)])
    done = expert(torch.cat(came))
    back = all_to_all(list(done.split([len(part) for part in came])))
    answers = torch.empty_like(tokens)
    for rank in range(size):
        answers[chosen == rank] = back[rank]
    return answers


# %% experts: right, by an order and its inverse
# => order = chosen.argsort(stable=True)
# => sent = torch.bincount(chosen, minlength=size).tolist()
# => came = all_to_all(tokens[order].split(sent))
# => done = expert(torch.cat(came))
# => return torch.cat(all_to_all(done.split([len(part) for part in came])))[order.argsort()]
# %% experts: wrong, the order in place of its inverse | the answers to its tokens are
# => order = chosen.argsort(stable=True)
# => came = all_to_all([tokens[chosen == rank] for rank in range(size)])
# => done = expert(torch.cat(came))
# => return torch.cat(all_to_all(list(done.split([len(part) for part in came]))))[order]
# %% experts: wrong, its own expert for all | is given a token that chose expert 1
# => return expert(tokens)
# %% experts: wrong, equal pieces | is given a token that chose expert
# => came = all_to_all(list(tokens.tensor_split(size)))
# => done = expert(torch.cat(came))
# => return torch.cat(all_to_all(list(done.split([len(part) for part in came]))))
# %%% experts: wrong, answers in the order of the experts | the answers to its tokens are
# list(tokens.tensor_split(size)) => [tokens[chosen == rank] for rank in range(size)]
# %% experts: wrong, computes before it sends | is given a token that chose expert 1
# => done = expert(tokens)
# => back = all_to_all([done[chosen == rank] for rank in range(size)])
# => return torch.cat(back)
# %% experts: wrong, no way back | rank 0 returns
# => came = all_to_all([tokens[chosen == rank] for rank in range(size)])
# => return expert(torch.cat(came))
# %% experts: wrong, cuts by what it has sent | in your line `back = all_to_all(list(done.split
# came = all_to_all => parts = all_to_all
# all_to_all([tokens[chosen == rank] for rank in range(size)]) => [tokens[chosen == rank] for rank in range(size)]
# cat(came) => cat(all_to_all(parts))
# part in came => part in parts
# %% experts: wrong, the expert is called for each part | is called 2 times; once is enough
# => came = all_to_all([tokens[chosen == rank] for rank in range(size)])
# => back = all_to_all([expert(part) for part in came])
# => answers = torch.empty_like(tokens)
# => for rank in range(size):
# =>     answers[chosen == rank] = back[rank]
# => return answers
# %%% experts: wrong, who gets nothing stays away | for ever; others have returned already
# -     back = all_to_all([expert(part) for part in came])
# +     rows = torch.cat(came)
# +     if len(rows) == 0:
# +         return tokens
# +     back = all_to_all(list(expert(rows).split([len(part) for part in came])))
# %%% experts: wrong, who has nothing sends nothing | for ever
# - def experts(tokens, chosen, expert, size, all_to_all):
# + def experts(tokens, chosen, expert, size, all_to_all):
# +     if len(tokens) == 0:
# +         return tokens
# [expert(part) for part in came] => list(expert(torch.cat(came)).split([len(part) for part in came]))
# %%% experts: wrong, nothing is sent where there is one rank | right, but with 0 all-to-alls on a rank; two are wanted
# - def experts(tokens, chosen, expert, size, all_to_all):
# + def experts(tokens, chosen, expert, size, all_to_all):
# +     if size == 1:
# +         return expert(tokens)
# [expert(part) for part in came] => list(expert(torch.cat(came)).split([len(part) for part in came]))
# %%% experts: wrong, an all-to-all too many | all-to-alls; two are enough
# - def experts(tokens, chosen, expert, size, all_to_all):
# + def experts(tokens, chosen, expert, size, all_to_all):
# +     lengths = all_to_all([torch.tensor([int((chosen == rank).sum())]) for rank in range(size)])
# [expert(part) for part in came] => list(expert(torch.cat(came)).split([int(length) for length in lengths]))
# %%% experts: wrong, answers of two numbers | raised RuntimeError
# [expert(part) for part in came] => list(expert(torch.cat(came)).split([len(part) for part in came]))
# empty_like(tokens) => empty(len(tokens), 2)
# [rank] => [rank].float()
# %%% experts: wrong, always float32 | a tensor of torch.float32; its tokens are of torch.float64
# [expert(part) for part in came] => list(expert(torch.cat(came)).split([len(part) for part in came]))
# empty_like(tokens) => empty(tokens.shape)
# [rank] => [rank].float()
# %%% experts: wrong, numbers of experts change | `chosen` of rank 0 has changed
# [expert(part) for part in came] => list(expert(torch.cat(came)).split([len(part) for part in came]))
# -         answers[chosen == rank] = back[rank]
# +         answers[chosen == rank] = back[rank]
# +         chosen[chosen == rank] = size
# %% experts: wrong, an expert without tokens is not called | is not called; once is wanted
# -     done = expert(torch.cat(came))
# +     rows = torch.cat(came)
# +     done = expert(rows) if len(rows) else rows
# %% experts: wrong, answers in place of tokens | `tokens` of rank 0 have changed
# => came = all_to_all([tokens[chosen == rank] for rank in range(size)])
# => back = all_to_all(list(expert(torch.cat(came)).split([len(part) for part in came])))
# => for rank in range(size):
# =>     tokens[chosen == rank] = back[rank]
# => return tokens


# %% normalize: right
def normalize(x, weight, all_reduce):
    total = torch.cat([x.square().sum(-1), x.new_tensor([x.shape[-1]])])
    all_reduce(total)
    mean = total[:-1] / total[-1]
    return x / mean.sqrt().unsqueeze(-1) * weight


# %% normalize: right, in one row
# => total = x.new_full((1, len(x) + 1), float(len(weight)))
# => total[0, 1:] = (x * x).sum(1)
# => all_reduce(total)
# => return x * (total[0, 0] / total[0, 1:, None]).sqrt() * weight
# %% normalize: wrong, as it was | one process has
# => return x / x.square().mean(-1, keepdim=True).sqrt() * weight
# %% normalize: wrong, the mean of means | one process has
# => total = x.square().mean(-1)
# => all_reduce(total)
# => return x / total.sqrt().unsqueeze(-1) * weight
# %%% normalize: wrong, the sum for the mean | one process has
# mean(-1) => sum(-1)
# %%% normalize: wrong, all ranks as wide as this one | one process has
# -     total = x.square().mean(-1)
# -     all_reduce(total)
# -     return x / total.sqrt().unsqueeze(-1) * weight
# +     total = torch.cat([x.square().mean(-1), x.new_ones(1)])
# +     all_reduce(total)
# +     return x / (total[:-1] / total[-1]).sqrt().unsqueeze(-1) * weight
# %% normalize: wrong, roots are added up | one process has
# x.square().sum(-1), => x.square().sum(-1).sqrt(),
# mean.sqrt() => mean
# %% normalize: wrong, divided by the mean square | one process has
# mean.sqrt().unsqueeze => mean.unsqueeze
# %% normalize: wrong, without the weight | one process has
# .unsqueeze(-1) * weight => .unsqueeze(-1)
# %% normalize: wrong, two all-reduces | right, but with 2 all-reduces; one is enough
# => total, columns = x.square().sum(-1), x.new_tensor([x.shape[-1]])
# => all_reduce(total)
# => all_reduce(columns)
# => return x / (total / columns).sqrt().unsqueeze(-1) * weight
# %% normalize: wrong, a count for each row | numbers, where 3 are enough
# => total = torch.stack([x.square().sum(-1), x.new_full((len(x),), x.shape[-1])])
# => all_reduce(total)
# => return x / (total[0] / total[1]).sqrt().unsqueeze(-1) * weight
# %% normalize: wrong, who has no columns stays away | for ever; others have returned already
# - def normalize(x, weight, all_reduce):
# + def normalize(x, weight, all_reduce):
# +     if not len(weight):
# +         return x
# %% normalize: wrong, all columns on each rank | raised
# -     all_reduce(total)
# +     total = x * weight
# +     all_reduce(total)
# %% normalize: wrong, in place | `x` of rank 0 has changed
# return x / mean.sqrt().unsqueeze(-1) * weight => return x.div_(mean.sqrt().unsqueeze(-1)) * weight
# %% normalize: wrong, always float32 | a tensor of torch.float32; `x` is of torch.float64
# unsqueeze(-1) * weight => unsqueeze(-1).float() * weight.float()
# x / mean => x.float() / mean
# %% normalize: wrong, waits for a result that is none | in your line `mean = total[:-1] / total[-1]
# -     all_reduce(total)
# +     total = all_reduce(total)
# %% sharded_step: right
def sharded_step(rank):
    last = rank.layers[-1]
    rank.all_gather("weights", 0)
    for layer in rank.layers:
        if layer < last:
            rank.all_gather("weights", layer + 1)
        for microbatch in rank.microbatches:
            rank.forward(layer, microbatch)
        if layer < last:
            rank.free("weights", layer)
    for layer in reversed(rank.layers):
        if layer > 0:
            rank.all_gather("weights", layer - 1)
        for microbatch in rank.microbatches:
            rank.backward(layer, microbatch)
        rank.free("weights", layer)
        rank.reduce_scatter("gradients", layer)
    for layer in rank.layers:
        rank.update(layer)
# %% sharded_step: right, micro-batches the other way round
# -         for microbatch in rank.microbatches:
# -             rank.backward(layer, microbatch)
# +         for microbatch in reversed(rank.microbatches):
# +             rank.backward(layer, microbatch)
# %% sharded_step: wrong, gathers when it needs them | Time: the step takes
# -     rank.all_gather("weights", 0)
# -     for layer in rank.layers:
# -         if layer < last:
# -             rank.all_gather("weights", layer + 1)
# +     for layer in rank.layers:
# +         rank.all_gather("weights", layer)
# -         if layer > 0:
# -             rank.all_gather("weights", layer - 1)
# +         if layer < last:
# +             rank.all_gather("weights", layer)
# %% sharded_step: wrong, all weights are whole for the step | Memory: rank 0 has
def sharded_step(rank):
    for layer in rank.layers:
        rank.all_gather("weights", layer)
    for layer in rank.layers:
        for microbatch in rank.microbatches:
            rank.forward(layer, microbatch)
    for layer in reversed(rank.layers):
        for microbatch in rank.microbatches:
            rank.backward(layer, microbatch)
        rank.free("weights", layer)
        rank.reduce_scatter("gradients", layer)
    for layer in rank.layers:
        rank.update(layer)
# %% sharded_step: wrong, reduces for each micro-batch | Messages: rank 0 sends 90 MB, and the limit is 66
# -             rank.backward(layer, microbatch)
# -         rank.free("weights", layer)
# -         rank.reduce_scatter("gradients", layer)
# +             rank.backward(layer, microbatch)
# +             rank.reduce_scatter("gradients", layer)
# +         rank.free("weights", layer)
# %% sharded_step: wrong, whole gradients are reduced | Messages: rank 0 sends 90 MB, and the limit is 66
# reduce_scatter => all_reduce
# %% sharded_step: wrong, the last layer is freed in between | the weights of layer 3 are not there: freed in line
# -         if layer < last:
# -             rank.free("weights", layer)
# +         rank.free("weights", layer)
# %% sharded_step: wrong, one micro-batch alone | Backward has not added micro-batch 1, which this rank has itself
# -         for microbatch in rank.microbatches:
# -             rank.backward(layer, microbatch)
# +         rank.backward(layer, rank.microbatches[0])
# %% sharded_step: wrong, nothing is reduced | It was not summed over the ranks
# -         rank.reduce_scatter("gradients", layer)
# %% sharded_step: wrong, one micro-batch after the other | Messages: rank 0 sends 132 MB, and the limit is 66
def sharded_step(rank):
    for microbatch in rank.microbatches:
        rank.all_gather("weights", 0)
        for layer in rank.layers:
            if layer < 3:
                rank.all_gather("weights", layer + 1)
            rank.forward(layer, microbatch)
            if layer < 3:
                rank.free("weights", layer)
        for layer in reversed(rank.layers):
            if layer > 0:
                rank.all_gather("weights", layer - 1)
            rank.backward(layer, microbatch)
            rank.free("weights", layer)
            rank.reduce_scatter("gradients", layer)
    for layer in rank.layers:
        rank.update(layer)
# %% suspect1: right
suspect1 = ("worker3", "uneven data")
# %% suspect1: right, a list
suspect1 = ["worker3", "uneven data"]
# %% suspect1: wrong, a rank that waits | worker1 waits in an all-reduce for another rank
suspect1 = ("worker1", "uneven data")
# %% suspect1: wrong, it calls no other operators | The others call every operator that worker3 calls
suspect1 = ("worker3", "straggler")
# %% suspect1: wrong, it does not wait for data | No stack of worker3 shows a line that waits for a disk
suspect1 = ("worker3", "slow loader")
# %% suspect1: wrong, one all-reduce for a step | A step has one all-reduce
suspect1 = ("all", "small messages")
# %% suspect1: wrong, it comes | worker3 comes to each all-reduce
suspect1 = ("worker3", "hang")
# %% suspect1: wrong, a fault of pipelines | 'imbalance' is no fault of such a job
suspect1 = ("worker3", "imbalance")
# %% suspect2: right
suspect2 = ("worker2", "hang")
# %% suspect2: wrong, a rank that is there | worker1 waits in an all-reduce for another rank
suspect2 = ("worker1", "hang")
# %% suspect2: wrong, it is not slow | The worker is right, the kind is not. No stack of worker2
suspect2 = ("worker2", "slow loader")
# %% suspect2: wrong, it calls no other operators | The others call every operator that worker2 calls
suspect2 = ("worker2", "straggler")
# %% suspect2: wrong, one all-reduce for a step | A step has one all-reduce
suspect2 = ("all", "small messages")
# %% suspect2: wrong, the worker alone | A worker and a kind are wanted
suspect2 = "worker2"
# %% suspect2: wrong, no such worker | The worker is one of
suspect2 = ("worker5", "hang")


# %% smooth: right
def smooth(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    beside = [other for other in (rank - 1, rank + 1) if 0 <= other < size]
    sending = [dist.isend(x[0 if other < rank else -1].clone(), other) for other in beside]
    whole = x
    for other in beside:
        row = torch.empty_like(x[:1])
        dist.recv(row, other)
        whole = torch.cat([row, whole] if other < rank else [whole, row])
    for each in sending:
        each.wait()
    first = int(rank > 0)
    return torch.stack([whole[max(n - 1, 0) : n + 2].mean(0) for n in range(first, first + len(x))])


# %% smooth: wrong, all receive first | for ever; the others wait, too
# -     sending = [dist.isend(x[0 if other < rank else -1].clone(), other) for other in beside]
# -     whole = x
# +     whole, sending = x, []
# -     for each in sending:
# -         each.wait()
# +     for other in beside:
# +         dist.send(x[0 if other < rank else -1].clone(), other)
# %% smooth: wrong, its own rows alone | No row of another rank is in it
# beside = [other for other in (rank - 1, rank + 1) if 0 <= other < size] => beside = []
# %% smooth: wrong, forgets to wait | is wanted
# dist.recv(row, other) => dist.irecv(row, other)
# %% smooth: wrong, round a ring | The first row and the last are no neighbours
def smooth(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    before, after = torch.empty_like(x[:1]), torch.empty_like(x[:1])
    sending = [dist.isend(x[0].clone(), (rank - 1) % size), dist.isend(x[-1].clone(), (rank + 1) % size)]
    dist.recv(before, (rank - 1) % size)
    dist.recv(after, (rank + 1) % size)
    for each in sending:
        each.wait()
    return torch.cat([before, x, after]).unfold(0, 3, 1).mean(-1)


# %% smooth: wrong, the other end of the rank | is wanted
# x[0 if other < rank else -1] => x[-1 if other < rank else 0]
# %% smooth: wrong, the whole block | sends
# -     sending = [dist.isend(x[0 if other < rank else -1].clone(), other) for other in beside]
# +     sending = [dist.isend(row.clone(), other) for other in beside for row in (x if other > rank else x.flip(0))]
# row = torch.empty_like(x[:1]) => heights = [3, 1, 4, 2]
# -         dist.recv(row, other)
# +         for _ in range(heights[other]):
# +             row = torch.empty_like(x[:1])
# +             dist.recv(row, other)
# %% smooth: wrong, an all_gather | calls all_gather
def smooth(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    ends = torch.empty(size, 2, x.shape[1])
    dist.all_gather(list(ends), torch.stack([x[0], x[-1]]))
    rows = [*([ends[rank - 1, 1]] if rank else []), *x, *([ends[rank + 1, 0]] if rank < size - 1 else [])]
    first = int(rank > 0)
    whole = torch.stack(rows)
    return torch.stack([whole[max(n - 1, 0) : n + 2].mean(0) for n in range(first, first + len(x))])


# %% smooth: wrong, always divides by three | is wanted
# .mean(0) => .sum(0) / 3
# %% smooth: wrong, in place | has changed
# -     return torch.stack([whole[max(n - 1, 0) : n + 2].mean(0) for n in range(first, first + len(x))])
# +     return x.copy_(torch.stack([whole[max(n - 1, 0) : n + 2].mean(0) for n in range(first, first + len(x))]))
