# %% splits
def splits(counts, rank):
    ranks = len(counts)
    share = len(counts[0]) // ranks

    def between(sender, receiver):
        return sum(counts[sender][receiver * share : (receiver + 1) * share])

    return [between(rank, other) for other in range(ranks)], [between(other, rank) for other in range(ranks)]


# %% order_of
def order_of(chosen):
    order = chosen.argsort(stable=True)
    return order, order.argsort()


# %% capacity
def capacity(chosen, experts, capacity):
    taken, kept = [0] * experts, []
    for expert in chosen:
        kept.append(taken[expert] < capacity)
        taken[expert] += kept[-1]
    return kept


# %% on_ranks
def layer_of_experts(tokens, chosen, expert):
    order, inverse = sorted_by_expert(chosen)
    counts = chosen.bincount(minlength=dist.get_world_size())
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts)
    sent, received = counts.tolist(), coming.tolist()

    came = tokens.new_empty(sum(received), tokens.shape[1])
    dist.all_to_all_single(came, tokens[order], received, sent)
    answers = torch.empty_like(tokens)
    dist.all_to_all_single(answers, expert(came), sent, received)
    return answers[inverse]


# %% combine
def combine(answers, token, weight, count):
    sums = weight.new_zeros(count).index_add(0, token, weight)
    parts = (weight / sums[token])[:, None] * answers
    return answers.new_zeros(count, answers.shape[1]).index_add(0, token, parts)


# %% wide_enough
sent = 2 * 2 * 63 / 64  # bytes for each number of a vector: there and back, in bfloat16
computed = 2 * 3  # operations for each number of a vector and each hidden number
h = sent / 50e9 * 400e12 / computed
