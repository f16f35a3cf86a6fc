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


# %% combine
def combine(answers, token, weight, count):
    sums = weight.new_zeros(count).index_add(0, token, weight)
    parts = (weight / sums[token])[:, None] * answers
    return answers.new_zeros(count, answers.shape[1]).index_add(0, token, parts)
