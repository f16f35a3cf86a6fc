# %% factors: wrong, forgets the mean over trainers | too small
def factors(samples):
    return [each / sum(samples) for each in samples]


# %% factors: wrong, all alike | not that of the mean over all samples
def factors(samples):
    return [1.0 for _ in samples]


# %% factors: wrong, upside down | not that of the mean over all samples
def factors(samples):
    return [sum(samples) / (len(samples) * each) for each in samples]


# %% factors: wrong, one too few | need as many factors
def factors(samples):
    return [len(samples) * each / sum(samples) for each in samples[1:]]


# %% lookup: wrong, table by table | in another order than `ids`
def lookup(tables, ids):
    n = len(tables)
    asked = [table.rpc_async().forward(ids[ids % n == k] // n) for k, table in enumerate(tables)]
    return torch.cat([rows.wait() for rows in asked])


# %% lookup: wrong, number and place mixed up | are not those that were asked for
def lookup(tables, ids):
    n = len(tables)
    places = [(ids % n == k).nonzero().flatten() for k in range(n)]
    asked = [table.rpc_async().forward(ids[where] % n) for table, where in zip(tables, places, strict=True)]
    return torch.cat([rows.wait() for rows in asked])[torch.cat(places).argsort()]


# %% lookup: wrong, a call for each row | a table is asked 3 times
def lookup(tables, ids):
    n = len(tables)
    return torch.stack([tables[i % n].rpc_sync().forward(torch.tensor([i // n]))[0] for i in ids.tolist()])


# %% lookup: wrong, row numbers of the whole | raised IndexError
def lookup(tables, ids):
    n = len(tables)
    places = [(ids % n == k).nonzero().flatten() for k in range(n)]
    asked = [table.rpc_async().forward(ids[where]) for table, where in zip(tables, places, strict=True)]
    return torch.cat([rows.wait() for rows in asked])[torch.cat(places).argsort()]


# %% lookup: wrong, cuts the graph | gradients would not go back
def lookup(tables, ids):
    n = len(tables)
    rows = torch.zeros(len(ids), 3)
    for k, table in enumerate(tables):
        rows[ids % n == k] = table.rpc_sync().forward(ids[ids % n == k] // n).detach()
    return rows
