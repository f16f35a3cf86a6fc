# %% fit
def fit(sizes, times):
    t = torch.tensor(times, dtype=torch.float64)
    n = torch.tensor(sizes, dtype=torch.float64)
    rows = torch.stack([1 / t, n / t], dim=1)
    ones = torch.ones(len(t), 1, dtype=torch.float64)
    alpha, per_byte = torch.linalg.lstsq(rows, ones).solution.flatten().tolist()
    return alpha, 1 / per_byte


# %% relay
def relay_time(n, k, hops, alpha, beta):
    each = alpha + n / k / beta
    return (k + hops - 1) * each


# %% best_pieces
def best_pieces(n, hops, alpha, beta):
    ideal = math.sqrt((hops - 1) * n / (alpha * beta))
    beside = [max(1, math.floor(ideal)), max(1, math.ceil(ideal))]
    return min(beside, key=lambda k: (k + hops - 1) * (alpha + n / k / beta))


# %% schedule
def schedule_time(rounds, alpha, beta):
    total = 0.0
    for messages in rounds:
        sends, receives = {}, {}
        for sender, receiver, size in messages:
            seconds = alpha + size / beta
            sends[sender] = sends.get(sender, 0) + seconds
            receives[receiver] = receives.get(receiver, 0) + seconds
        total += max([*sends.values(), *receives.values()], default=0)
    return total
