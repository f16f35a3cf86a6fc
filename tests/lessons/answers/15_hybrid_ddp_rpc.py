# %% factors: wrong, forgets the mean over trainers | too small
# => return [each / sum(samples) for each in samples]
# %% factors: wrong, all alike | not that of the mean over all samples
# => return [1.0 for _ in samples]
# %% factors: wrong, upside down | not that of the mean over all samples
# => return [sum(samples) / (len(samples) * each) for each in samples]
# %% factors: wrong, one too few | need as many factors
# => return [len(samples) * each / sum(samples) for each in samples[1:]]
# %% factors: right, a generator
# => return (len(samples) * each / sum(samples) for each in samples)
# %% factors: right, a tensor
# => return torch.tensor(samples) * len(samples) / sum(samples)
# %% factors: wrong, right for two trainers only | not that of the mean over all samples
# => return [2 * each / sum(samples) for each in samples]
# %% factors: wrong, compared with the largest | not that of the mean over all samples
# => return [each / max(samples) for each in samples]
# %% factors: wrong, rounds | not that of the mean over all samples
# => return [len(samples) * each // sum(samples) for each in samples]
# %% factors: wrong, rounds to three digits | not that of the mean over all samples
# => return [round(len(samples) * each / sum(samples), 3) for each in samples]
# %% lookup: wrong, number and place mixed up | are not those that were asked for
# [where] // => [where] %
# %% lookup: wrong, a call for each row | a table is asked 3 times
# => n = len(tables)
# => return torch.stack([tables[i % n].rpc_sync().forward(torch.tensor([i // n]))[0] for i in ids.tolist()])
# %% lookup: wrong, table by table | in another order than `ids`
# => n = len(tables)
# => asked = [table.rpc_async().forward(ids[ids % n == k] // n) for k, table in enumerate(tables)]
# => return torch.cat([rows.wait() for rows in asked])
# %%% lookup: wrong, collects into float32 | With 2 tables of float64 with 2 numbers in a row and ids [1, 4, 1, 6] it
# -     return torch.cat([rows.wait() for rows in asked])
# +     coming = [future.wait() for future in asked]
# +     rows = torch.zeros(len(ids), coming[0].shape[1])
# +     for k, part in enumerate(coming):
# +         rows[ids % n == k] = part
# +     return rows
# %%% lookup: wrong, cuts the graph | gradients would not go back
# -     return torch.cat([rows.wait() for rows in asked])
# +     rows = torch.zeros(len(ids), 3)
# +     for k, future in enumerate(asked):
# +         rows[ids % n == k] = future.wait().detach()
# +     return rows
# %% lookup: wrong, row numbers of the whole | raised IndexError
# [where] // n => [where]
# %% lookup: wrong, one table after the other | they work one after the other
# => n = len(tables)
# => rows = torch.zeros(len(ids), 3)
# => for k, table in enumerate(tables):
# =>     rows[ids % n == k] = table.rpc_sync().forward(ids[ids % n == k] // n)
# => return rows
# %% lookup: wrong, waits for each call at once | they work one after the other
# asked = [table.rpc_async().forward(ids[where] // n) => rows = [table.rpc_async().forward(ids[where] // n).wait()
# [rows.wait() for rows in asked] => rows
# %% lookup: wrong, a lazy generator of calls | they work one after the other
# -     asked = [table.rpc_async().forward(ids[where] // n) for table, where in zip(tables, places, strict=True)]
# +     asked = (table.rpc_async().forward(ids[where] // n) for table, where in zip(tables, places, strict=True))
# %% lookup: wrong, asks every table for every row | rows are sent, where
# => n = len(tables)
# => last = [(8 - k) // n for k in range(n)]
# => asked = [table.rpc_async().forward((ids // n).clamp(max=most)) for table, most in zip(tables, last, strict=True)]
# => rows = [future.wait() for future in asked]
# => return torch.stack([rows[i % n][place] for place, i in enumerate(ids.tolist())])
# %% lookup: wrong, sorts the ids in place | the ids have changed
# => n = len(tables)
# => before = ids.clone()
# => ids.copy_(ids.sort().values)
# => places = [(before % n == k).nonzero().flatten() for k in range(n)]
# => asked = [table.rpc_async().forward(before[where] // n) for table, where in zip(tables, places, strict=True)]
# => return torch.cat([rows.wait() for rows in asked])[torch.cat(places).argsort()]
# %% lookup: wrong, rows of float32 whatever the table has | the rows are of float32, not float64
# wait() for => wait().float() for
# %% lookup: wrong, looks up each different row once, and forgets where | the shape should be
# => n = len(tables)
# => different = ids.unique()
# => places = [(different % n == k).nonzero().flatten() for k in range(n)]
# => asked = [table.rpc_async().forward(different[where] // n) for table, where in zip(tables, places, strict=True)]
# => return torch.cat([rows.wait() for rows in asked])[torch.cat(places).argsort()]
# %% lookup_once: wrong, each row as often as it is read | rows are sent, where
# => n = len(tables)
# => places = [(ids % n == k).nonzero().flatten() for k in range(n)]
# => asked = [table.rpc_async().forward(ids[where] // n) for table, where in zip(tables, places, strict=True)]
# => return torch.cat([rows.wait() for rows in asked])[torch.cat(places).argsort()]
# %% lookup_once: wrong, the different rows only | the shape should be
# different, where = ids.unique(return_inverse=True) => different = ids.unique()
# (different[place] // n) for table, place => (different[where] // n) for table, where
# ][where] => ]
# %% lookup_once: wrong, cuts the graph | gradients would not go back
# wait() for => wait().detach() for
# %% lookup_once: wrong, the gradient of the first reader only | the gradients of the tables are wrong
# -     return torch.cat([rows.wait() for rows in asked])[torch.cat(places).argsort()][where]
# +     rows = torch.cat([rows.wait() for rows in asked])[torch.cat(places).argsort()]
# +     first = [where.tolist().index(place) for place in range(len(different))]
# +     found = rows.detach()[where]
# +     found[first] = rows
# +     return found
# %% lookup_once: wrong, a call for each different row | a table is asked
# => n = len(tables)
# => different, where = ids.unique(return_inverse=True)
# => asked = [tables[i % n].rpc_async().forward(torch.tensor([i // n])) for i in different.tolist()]
# => return torch.cat([rows.wait() for rows in asked])[where]
# %%% lookup_once: wrong, forgets that rows come table by table | Rows come table by table
# -     asked = [tables[i % n].rpc_async().forward(torch.tensor([i // n])) for i in different.tolist()]
# +     asked = [table.rpc_async().forward(different[different % n == k] // n) for k, table in enumerate(tables)]
# %% lookup_once: wrong, one table after the other | they work one after the other
# => n = len(tables)
# => different, where = ids.unique(return_inverse=True)
# => rows = torch.zeros(len(different), 3)
# => for k, table in enumerate(tables):
# =>     rows[different % n == k] = table.rpc_sync().forward(different[different % n == k] // n)
# => return rows[where]
# %%% lookup_once: wrong, always three numbers in a row | With 2 tables of float64 with 2 numbers in a row
# -     different, where = ids.unique(return_inverse=True)
# +     different, where = ids.unique(return_inverse=True)
# +     asked = [table.rpc_async().forward(different[different % n == k] // n) for k, table in enumerate(tables)]
# table in enumerate(tables): => future in enumerate(asked):
# table.rpc_sync().forward(different[different % n == k] // n) => future.wait()
# %% lookup_once: wrong, rows of float32 whatever the table has | the rows are of float32, not float64
# wait() for => wait().float() for
