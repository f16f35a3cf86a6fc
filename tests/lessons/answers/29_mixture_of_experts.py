# %% splits: wrong, a number for each expert | one number for each of 2 ranks
def splits(counts, rank):
    return counts[rank], [row[rank] for row in counts]


# %% splits: wrong, tensors | takes lists of numbers
def splits(counts, rank):
    table = torch.tensor(counts).view(len(counts), len(counts), -1).sum(2)
    return table[rank], table[:, rank]


# %% splits: wrong, what it sends alone | a pair of lists
def splits(counts, rank):
    ranks = len(counts)
    share = len(counts[0]) // ranks
    return [sum(counts[rank][to * share : (to + 1) * share]) for to in range(ranks)]


# %%% splits: wrong, the wrong way round | the wrong way round
# -     return [sum(counts[rank][to * share : (to + 1) * share]) for to in range(ranks)]
# +     table = [[sum(row[to * share : (to + 1) * share]) for to in range(ranks)] for row in counts]
# +     return [row[rank] for row in table], table[rank]
# %%% splits: wrong, gets what it sends | it gets
# -     return [sum(counts[rank][to * share : (to + 1) * share]) for to in range(ranks)]
# +     sent = [sum(counts[rank][to * share : (to + 1) * share]) for to in range(ranks)]
# +     return sent, list(sent)
# %%% splits: wrong, experts dealt like cards | deals the experts like cards
# share = len(counts[0]) // ranks => table = [[sum(row[to::ranks]) for to in range(ranks)] for row in counts]
# [sum(counts[rank][to * share : (to + 1) * share]) for to in range(ranks)] => table[rank], [row[rank] for row in table]
# %%% splits: wrong, nothing to itself | also goes through the all-to-all
# -     return [sum(counts[rank][to * share : (to + 1) * share]) for to in range(ranks)]
# +     table = [[sum(row[to * share : (to + 1) * share]) for to in range(ranks)] for row in counts]
# +     for number in range(ranks):
# +         table[number][number] = 0
# +     return table[rank], [row[rank] for row in table]
# %%% splits: wrong, one expert of each rank | each has 2
# -     return [sum(counts[rank][to * share : (to + 1) * share]) for to in range(ranks)]
# +     return [counts[rank][to * share] for to in range(ranks)], [row[rank * share] for row in counts]
# %%% splits: wrong, all in one sum | lists of numbers
# -     return [sum(counts[rank][to * share : (to + 1) * share]) for to in range(ranks)]
# +     return sum(counts[rank]), sum(sum(row[rank * share : (rank + 1) * share]) for row in counts)
# %%% splits: wrong, for one or two experts of each rank | it sends [5, 10], not [4, 7]
# -     return [sum(counts[rank][to * share : (to + 1) * share]) for to in range(ranks)]
# +     table = [[row[to * share] + (row[to * share + 1] if share > 1 else 0) for to in range(ranks)] for row in counts]
# +     return table[rank], [row[rank] for row in table]
# %% order_of: wrong, the order once more | It is `order` once more
# order.argsort() => order
# %% order_of: wrong, backwards | are the tokens
# argsort() => flip(0)
# %% order_of: wrong, mixes the tokens of an expert | should stay in their order
# order = chosen.argsort(stable=True) => order = (chosen * len(chosen) - torch.arange(len(chosen))).argsort()
# %% order_of: wrong, the last expert first | in the order
# stable=True => stable=True, descending=True
# %% order_of: wrong, experts instead of places | has each place of a token once
# argsort(stable=True) => sort().values
# %% order_of: wrong, the wrong way round | in the order
# , order.argsort() => .argsort(), order
# %% order_of: wrong, sorts twice by expert | are the tokens
# order.argsort() => chosen[order].argsort(stable=True)
# %% order_of: wrong, the order alone | a pair of tensors
def order_of(chosen):
    return chosen.argsort(stable=True)


# %% order_of: wrong, lists | a pair of tensors
# order = chosen.argsort(stable=True) => order = sorted(range(len(chosen)), key=lambda place: chosen[place].item())
# return order, order.argsort() => return order, sorted(order, key=lambda place: order[place])
# %% order_of: wrong, a sort that may mix equal numbers | turns equal numbers round
# (stable=True) => ()
# %% order_of: wrong, the other sort that may mix equal numbers | should stay in their order
# order = chosen.argsort(stable=True) => order = torch.sort(chosen).indices
# %% order_of: wrong, an inverse of floats | `inverse` is a tensor of float32
def order_of(chosen):
    order = chosen.argsort(stable=True)
    inverse = torch.zeros(len(order))
    for place, token in enumerate(order.tolist()):
        inverse[token] = place
    return order, inverse


# %% order_of: wrong, columns | should have the shape (8,), and has (8, 1)
# (stable=True) => (stable=True)[:, None]
# argsort() => argsort(0)
# %% order_of: wrong, no dimension where there is one token | should have the shape (1,), and has ()
# , order.argsort => .squeeze(), order.argsort().squeeze
# %% capacity: wrong, one too many | takes 3 tokens
# < capacity => <= capacity
# %% capacity: wrong, says which are dropped | not for one that is dropped
def capacity(chosen, experts, capacity):
    return [chosen[:at].count(expert) >= capacity for at, expert in enumerate(chosen)]


# %%% capacity: wrong, the last ones | not the last
# [:at].count(expert) >= => [at + 1 :].count(expert) <
# %%% capacity: wrong, drops all tokens of a full expert | still keeps the first
# [:at].count(expert) >= capacity for at, expert in enumerate(chosen) => .count(expert) <= capacity for expert in chosen
# %%% capacity: wrong, an even share of the tokens | takes 3 tokens
# >= capacity => < len(chosen) / experts
# %% capacity: wrong, numbers of tokens | a list of True and False
def capacity(chosen, experts, capacity):
    return [at for at, expert in enumerate(chosen) if chosen[:at].count(expert) < capacity]


# %%% capacity: wrong, places of all experts together | not all experts together
# for at, expert in enumerate(chosen) if chosen[:at].count(expert) < capacity => < capacity for at in range(len(chosen))
# %%% capacity: wrong, leaves out the dropped ones | one for each of the 8 tokens
# at for => True for
# %% capacity: wrong, a tensor | a list of True and False
def capacity(chosen, experts, capacity):
    return torch.tensor([chosen[:at].count(expert) < capacity for at, expert in enumerate(chosen)])


# %% capacity: wrong, for four experts | raised IndexError
# * experts => * 4
# %% capacity: wrong, empties the list | `chosen` itself has changed
# -     for expert in chosen:
# +     while chosen:
# +         expert = chosen.pop(0)
# %% capacity: wrong, begins with the first token in any case | raised IndexError
# [0] * experts => {chosen[0]: 0}
# -         kept.append(taken[expert] < capacity)
# +         taken.setdefault(expert, 0)
# +         kept.append(taken[expert] < capacity)
# kept[-1] => 1
# %% combine: wrong, the second replaces the first | has replaced the first
def combine(answers, token, weight, count):
    sums = weight.new_zeros(count).index_add(0, token, weight)
    result = answers.new_zeros(count, answers.shape[1])
    for row, number in enumerate(token.tolist()):
        result[number] = weight[row] / sums[number] * answers[row]
    return result


# %% combine: wrong, the plain mean | count alike
def combine(answers, token, weight, count):
    return answers.new_zeros(count, answers.shape[1]).index_add(0, token, answers / 2)


# %%% combine: wrong, weights as they are | do not add up to 1 yet
# answers / 2 => weight[:, None] * answers
# %%% combine: wrong, all weights together are 1 | not those of each token
# answers / 2 => (weight / weight.sum())[:, None] * answers
# %%% combine: wrong, without weights | without their weights
# answers / 2 => answers
# %% combine: wrong, a token without rows is nan | its result is 0
# parts = (weight / sums[token]) => total = answers.new_zeros(count, answers.shape[1])
# [:, None] * answers => .index_add(0, token, weight[:, None] * answers)
# return answers.new_zeros(count, answers.shape[1]).index_add(0, token, parts) => return total / sums[:, None]
# %% combine: wrong, takes the rows of a token to be neighbours | should get
def combine(answers, token, weight, count):
    pairs, weights = answers.view(-1, 2, answers.shape[1]), weight.view(-1, 2)
    mean = (pairs * (weights / weights.sum(1, keepdim=True))[:, :, None]).sum(1)
    result = answers.new_zeros(count, answers.shape[1])
    result[: len(mean)] = mean
    return result


# %% combine: wrong, changes the weights | has changed
# parts = (weight / sums[token])[:, None] * answers => weight /= sums[token]
# token, parts => token, weight[:, None] * answers
# %% combine: wrong, no results for tokens behind the last one with a row | the shape (4, 3), and has (2, 3)
# sums = weight.new_zeros(count).index_add(0, token, weight) => count = int(token.max()) + 1
# parts = (weight / sums[token])[:, None] * answers => sums = weight.new_zeros(count).index_add(0, token, weight)
# parts => (weight / sums[token])[:, None] * answers
# %% combine: wrong, rows of width 3 | 2 tokens of width 5 in float32, it raised
def combine(answers, token, weight, count):
    sums = weight.new_zeros(count).index_add(0, token, weight)
    return answers.new_zeros(count, 3).index_add(0, token, (weight / sums[token])[:, None] * answers)


# %%% combine: wrong, a result for each row | the shape
# -     return answers.new_zeros(count, 3).index_add(0, token, (weight / sums[token])[:, None] * answers)
# +     return (weight / sums[token])[:, None] * answers
# %% combine: wrong, for float64 alone | in float32, it raised
# weight.new_zeros(count) => torch.zeros(count, dtype=torch.double)
# answers.new_zeros(count, answers.shape[1]) => torch.zeros(count, answers.shape[1], dtype=torch.double)
# %% combine: wrong, two rows at most | should get
def combine(answers, token, weight, count):
    result = answers.new_zeros(count, answers.shape[1])
    for number in range(count):
        rows = (token == number).nonzero().flatten()[:2]
        if len(rows):
            result[number] = (weight[rows, None] * answers[rows]).sum(0) / weight[rows].sum()
    return result


# %% combine: wrong, stops where there are no rows | raised
# sums = weight.new_zeros(count).index_add(0, token, weight) => assert int(token.max()) < count
# parts = (weight / sums[token])[:, None] * answers => sums = weight.new_zeros(count).index_add(0, token, weight)
# parts => (weight / sums[token])[:, None] * answers
