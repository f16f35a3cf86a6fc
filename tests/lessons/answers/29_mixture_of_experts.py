# %% splits: wrong, a number for each expert | one number for each of 2 ranks
# => return counts[rank], [row[rank] for row in counts]
# %% splits: right, tensors
# => table = torch.tensor(counts).view(len(counts), len(counts), -1).sum(2)
# => return table[rank], table[:, rank]
# %% splits: wrong, what it sends alone | a pair of lists
# => ranks = len(counts)
# => share = len(counts[0]) // ranks
# => return [sum(counts[rank][to * share : (to + 1) * share]) for to in range(ranks)]
# %%% splits: wrong, experts dealt like cards | deals the experts like cards
# share = len(counts[0]) // ranks => table = [[sum(row[to::ranks]) for to in range(ranks)] for row in counts]
# [sum(counts[rank][to * share : (to + 1) * share]) for to in range(ranks)] => table[rank], [row[rank] for row in table]
# %%% splits: wrong, all in one sum | lists of numbers
# -     return [sum(counts[rank][to * share : (to + 1) * share]) for to in range(ranks)]
# +     return sum(counts[rank]), sum(sum(row[rank * share : (rank + 1) * share]) for row in counts)
# %%% splits: wrong, gets what it sends | it gets
# -     return [sum(counts[rank][to * share : (to + 1) * share]) for to in range(ranks)]
# +     sent = [sum(counts[rank][to * share : (to + 1) * share]) for to in range(ranks)]
# +     return sent, list(sent)
# %%% splits: wrong, one expert of each rank | each has 2
# -     return [sum(counts[rank][to * share : (to + 1) * share]) for to in range(ranks)]
# +     return [counts[rank][to * share] for to in range(ranks)], [row[rank * share] for row in counts]
# %% splits: wrong, the wrong way round | the wrong way round
# => ranks = len(counts)
# => share = len(counts[0]) // ranks
# => table = [[sum(row[to * share : (to + 1) * share]) for to in range(ranks)] for row in counts]
# => return [row[rank] for row in table], table[rank]
# %%% splits: wrong, for one or two experts of each rank | it sends [5, 10], not [4, 7]
# sum(row[to * share : (to + 1) * share]) => row[to * share] + (row[to * share + 1] if share > 1 else 0)
# [row[rank] for row in table], table[rank] => table[rank], [row[rank] for row in table]
# %%% splits: wrong, nothing to itself | also goes through the all-to-all
# -     return [row[rank] for row in table], table[rank]
# +     for number in range(ranks):
# +         table[number][number] = 0
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
# => return chosen.argsort(stable=True)
# %% order_of: wrong, lists | a pair of tensors
# => order = sorted(range(len(chosen)), key=lambda place: chosen[place].item())
# => return order, sorted(order, key=lambda place: order[place])
# %% order_of: wrong, a sort that may mix equal numbers | turns equal numbers round
# (stable=True) => ()
# %% order_of: wrong, the other sort that may mix equal numbers | should stay in their order
# order = chosen.argsort(stable=True) => order = torch.sort(chosen).indices
# %% order_of: wrong, an inverse of floats | `inverse` is a tensor of float32
# => order = chosen.argsort(stable=True)
# => inverse = torch.zeros(len(order))
# => for place, token in enumerate(order.tolist()):
# =>     inverse[token] = place
# => return order, inverse
# %% order_of: wrong, columns | should have the shape (8,), and has (8, 1)
# => order = chosen.argsort(stable=True)[:, None]
# => return order, order.argsort(0)
# %% order_of: wrong, no dimension where there is one token | should have the shape (1,), and has ()
# , order.argsort => .squeeze(), order.argsort().squeeze
# %% capacity: wrong, one too many | takes 3 tokens
# < capacity => <= capacity
# %% capacity: wrong, says which are dropped | not for one that is dropped
# => return [chosen[:at].count(expert) >= capacity for at, expert in enumerate(chosen)]
# %% capacity: wrong, the last ones | not the last
# => return [chosen[at + 1 :].count(expert) < capacity for at, expert in enumerate(chosen)]
# %% capacity: wrong, drops all tokens of a full expert | still keeps the first
# => return [chosen.count(expert) <= capacity for expert in chosen]
# %% capacity: wrong, an even share of the tokens | takes 3 tokens
# => return [chosen[:at].count(expert) < len(chosen) / experts for at, expert in enumerate(chosen)]
# %% capacity: wrong, numbers of tokens | a list of True and False
# => return [at for at, expert in enumerate(chosen) if chosen[:at].count(expert) < capacity]
# %% capacity: wrong, places of all experts together | not all experts together
# => return [at < capacity for at in range(len(chosen))]
# %% capacity: wrong, leaves out the dropped ones | one for each of the 8 tokens
# => return [True for at, expert in enumerate(chosen) if chosen[:at].count(expert) < capacity]
# %% capacity: right, a tensor
# => return torch.tensor([chosen[:at].count(expert) < capacity for at, expert in enumerate(chosen)])
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
# %% on_ranks: right, counts by an all_gather
# -     coming = torch.empty_like(counts)
# -     dist.all_to_all_single(coming, counts)
# -     sent, received = counts.tolist(), coming.tolist()
# +     table = torch.empty(dist.get_world_size(), len(counts), dtype=torch.long)
# +     dist.all_gather(list(table), counts)
# +     sent, received = counts.tolist(), table[:, dist.get_rank()].tolist()
# %% on_ranks: wrong, not put back in order | sorted by expert, not in the order of the tokens
# answers[inverse] => answers
# %% on_ranks: wrong, order in place of its inverse | `order` sorts, and `inverse` undoes it
# answers[inverse] => answers[order]
# %% on_ranks: wrong, not sorted before | They are answers of other experts, or of other tokens
# tokens[order] => tokens
# %% on_ranks: wrong, the sizes are swapped on the way back | raised
# expert(came), sent, received => expert(came), received, sent
# %% on_ranks: wrong, equal parts | raised
# came, tokens[order], received, sent => came, tokens[order]
# %% on_ranks: wrong, a rank without tokens leaves | for rank 1 for ever; rank 1 has returned already
# -     order, inverse = sorted_by_expert(chosen)
# +     if len(tokens) == 0:
# +         return tokens
# +     order, inverse = sorted_by_expert(chosen)
# %% on_ranks: wrong, asks its own expert | Its own expert has answered all of them
# => return expert(tokens)
# %% on_ranks: wrong, the expert is not asked | They are the tokens themselves: no expert has computed
# expert(came), sent => came, sent
# %% on_ranks: wrong, everything to everybody | send each to its expert alone
def layer_of_experts(tokens, chosen, expert):
    size, rank = dist.get_world_size(), dist.get_rank()
    padded = torch.full((10, tokens.shape[1] + 1), -1.0)
    padded[: len(tokens)] = torch.cat([tokens, chosen[:, None]], 1)
    everything = torch.empty(size, *padded.shape)
    dist.all_gather(list(everything), padded)
    back = expert(everything[..., :-1].flatten(0, 1)).reshape(size, 10, -1) * (everything[..., -1:] == rank)
    dist.all_reduce(back)
    return back[rank][: len(tokens)]


# %% on_ranks: wrong, an exchange for each expert | Three are enough
# -     dist.all_to_all_single(coming, counts)
# +     dist.all_to_all_single(coming, counts)
# +     dist.all_to_all_single(coming, counts)
# %% on_ranks: wrong, returns nothing | It has no `return`
# return answers => answers
# %% combine: wrong, the second replaces the first | has replaced the first
# => sums = weight.new_zeros(count).index_add(0, token, weight)
# => result = answers.new_zeros(count, answers.shape[1])
# => for row, number in enumerate(token.tolist()):
# =>     result[number] = weight[row] / sums[number] * answers[row]
# => return result
# %% combine: wrong, the plain mean | count alike
# => return answers.new_zeros(count, answers.shape[1]).index_add(0, token, answers / 2)
# %% combine: wrong, weights as they are | do not add up to 1 yet
# => return answers.new_zeros(count, answers.shape[1]).index_add(0, token, weight[:, None] * answers)
# %% combine: wrong, all weights together are 1 | not those of each token
# => return answers.new_zeros(count, answers.shape[1]).index_add(0, token, (weight / weight.sum())[:, None] * answers)
# %% combine: wrong, without weights | without their weights
# => return answers.new_zeros(count, answers.shape[1]).index_add(0, token, answers)
# %% combine: wrong, a token without rows is nan | its result is 0
# => sums = weight.new_zeros(count).index_add(0, token, weight)
# => total = answers.new_zeros(count, answers.shape[1]).index_add(0, token, weight[:, None] * answers)
# => return total / sums[:, None]
# %% combine: wrong, takes the rows of a token to be neighbours | should get
# => pairs, weights = answers.view(-1, 2, answers.shape[1]), weight.view(-1, 2)
# => mean = (pairs * (weights / weights.sum(1, keepdim=True))[:, :, None]).sum(1)
# => result = answers.new_zeros(count, answers.shape[1])
# => result[: len(mean)] = mean
# => return result
# %% combine: wrong, changes the weights | has changed
# parts = (weight / sums[token])[:, None] * answers => weight /= sums[token]
# token, parts => token, weight[:, None] * answers
# %% combine: wrong, no results for tokens behind the last one with a row | the shape (4, 3), and has (2, 3)
# => count = int(token.max()) + 1
# => sums = weight.new_zeros(count).index_add(0, token, weight)
# => return answers.new_zeros(count, answers.shape[1]).index_add(0, token, (weight / sums[token])[:, None] * answers)
# %%% combine: wrong, stops where there are no rows | raised
# count = int(token.max()) + 1 => assert int(token.max()) < count
# %% combine: wrong, rows of width 3 | 2 tokens of width 5 in float32, it raised
# => sums = weight.new_zeros(count).index_add(0, token, weight)
# => return answers.new_zeros(count, 3).index_add(0, token, (weight / sums[token])[:, None] * answers)
# %% combine: wrong, a result for each row | the shape
# => sums = weight.new_zeros(count).index_add(0, token, weight)
# => return (weight / sums[token])[:, None] * answers
# %% combine: wrong, for float64 alone | in float32, it raised
# weight.new_zeros(count) => torch.zeros(count, dtype=torch.double)
# answers.new_zeros(count, answers.shape[1]) => torch.zeros(count, answers.shape[1], dtype=torch.double)
# %% combine: wrong, two rows at most | should get
# => result = answers.new_zeros(count, answers.shape[1])
# => for number in range(count):
# =>     rows = (token == number).nonzero().flatten()[:2]
# =>     if len(rows):
# =>         result[number] = (weight[rows, None] * answers[rows]).sum(0) / weight[rows].sum()
# => return result
# %% combine: wrong, adds up in float32 | digits; yours is float32, and float64 is wanted
# => sums = torch.zeros(count).index_add(0, token, weight.float())
# => rows = (weight / sums[token])[:, None] * answers
# => return torch.zeros(count, answers.shape[1]).index_add(0, token, rows.float())
# %% combine: wrong, without `return` | It has no `return`
# => sums = weight.new_zeros(count).index_add(0, token, weight)
# => answers = answers * (weight / sums[token])[:, None]
# %% wide_enough: wrong, all that a GPU has is sent | One part in 64 stays on its GPU
# 63 / 64 => 1
# %% wide_enough: wrong, one all-to-all | and an answer back
# 2 * 2 * 63 / 64 => 2 * 63 / 64
# %% wide_enough: wrong, multiplications alone | are two operations
# computed = 2 * 3 => computed = 3
# %% wide_enough: wrong, two matrices | has three matrices here
# 2 * 3 => 2 * 2
# %% wide_enough: wrong, one matrix | each number of them is used once
# 2 * 3 => 2
# %% wide_enough: wrong, the peak | not its peak
# 400e12 => 989e12
# %% wide_enough: wrong, the link within a host | behind 50 GB/s
# 50e9 => 450e9
# %% wide_enough: wrong, the operations of a step | Only forward
# 2 * 3 => 6 * 3
# %% wide_enough: wrong, a word | A number is wanted
h = "large"
# %% wide_enough: right, without the share that stays
# 2 * 2 * 63 / 64 => 2 * 2 * 127 / 128
