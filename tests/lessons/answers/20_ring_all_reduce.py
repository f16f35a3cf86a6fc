# %% reduce_scatter: wrong, one step too few | which is its own chunk 0: nothing was added to it
# size - 1 => size - 2
# %% reduce_scatter: wrong, the numbering in which rank r ends with chunk r + 1 | That is a whole sum, but of chunk 1
# => sums = [chunk.clone() for chunk in x.chunk(size)]
# => for step in range(size - 1):
# =>     sums[(rank - step - 1) % size] += shift(sums[(rank - step) % size])
# => return sums[(rank + 1) % size]
# %% reduce_scatter: wrong, adds into the tensor that it was given | has changed; work on a copy
# [chunk.clone() for chunk in x.chunk(size)] => list(x.chunk(size))
# %% reduce_scatter: wrong, replaces instead of adding | the sum of chunk 0 over the ranks is
# [(rank - step - 2) % size] += => [(rank - step - 2) % size] =
# %% reduce_scatter: wrong, adds to the chunk that it has sent | which is its own chunk 0: nothing was added to it
# step - 2 => step - 1
# %% reduce_scatter: wrong, sends all of the vector in each step | has sent 2 numbers where 1 do
# => total, passed = x.clone(), x
# => for _ in range(size - 1):
# =>     passed = shift(passed)
# =>     total += passed
# => return total.chunk(size)[rank]
# %% reduce_scatter: wrong, right for two ranks only | 3 ranks: rank 0 returns
# => chunks = x.chunk(size)
# => return chunks[rank] + shift(chunks[1 - rank])
# %% reduce_scatter: wrong, forgets the modulo | raised IndexError
# (rank - step - 2) % size => rank + step + 2
# (rank - step - 1) % size => rank + step + 1
# %% reduce_scatter: wrong, returns all chunks | not the whole vector of 2
# return sums[rank] => return torch.cat(sums)
# %% reduce_scatter: wrong, rank 0 does not take part | waits for a message from rank 0 for ever
# size - 1 => size - 1 if rank else 0
# %% reduce_scatter: wrong, adds up in float32 | of torch.float32; `x` is of torch.int64
# -     sums = [chunk.clone() for chunk in x.chunk(size)]
# +     sums = torch.zeros(size, len(x) // size)
# +     sums += x.reshape(size, -1)
# %% reduce_scatter: wrong, by way of float32 | the sum of chunk 0 over the ranks is
# clone() for chunk in x => float() for chunk in x.clone()
# sums[rank] => sums[rank].to(x.dtype)
# %% reduce_scatter: wrong, right for up to four ranks | 5 ranks: rank 0 returns
# size - 1 => min(size, 4) - 1
# %% all_gather: wrong, sends its own chunk again and again | the chunks of all ranks are
# chunks[(rank - step) % size] => chunk
# %% all_gather: wrong, one step too many | has sent 2 numbers where 1 do
# => chunks = [None] * size
# => for step in range(size):
# =>     chunk = shift(chunk)
# =>     chunks[(rank - step - 1) % size] = chunk
# => return torch.cat(chunks)
# %% all_gather: wrong, returns a list | , not a tensor
# torch.cat(chunks) => chunks
# %% all_gather: wrong, counts the other way round | not in the order of the ranks
# rank - step - => rank + step +
# (rank - step) => (rank + step)
# %% all_gather: wrong, a matrix | it should be one vector of 2 chunks of 1
# torch.cat => torch.stack
# %% all_gather: wrong, adds what comes | it should be one vector of 2 chunks of 1
# => total = chunk.clone()
# => for _ in range(size - 1):
# =>     total += shift(chunk)
# => return total
# %%% all_gather: wrong, in the order in which they come | not in the order of the ranks
# total = chunk.clone() => chunks = [chunk]
# total += shift(chunk) => chunks.append(shift(chunks[-1]))
# total => torch.cat(chunks)
# %% all_gather: wrong, by way of float32 | the chunks of all ranks are
# => whole = torch.zeros(size, len(chunk))
# => whole[rank] = chunk
# => for step in range(size - 1):
# =>     whole[(rank - step - 1) % size] = shift(whole[(rank - step) % size])
# => return whole.flatten().to(chunk.dtype)
# %%% all_gather: wrong, collects into float32 | of torch.float32; the chunks are of torch.int64
# ().to(chunk.dtype) => ()
# %% all_reduce: wrong, does not pad | got 7 numbers, which are not 3 equal chunks
# => return all_gather(reduce_scatter(x.flatten())).reshape(x.shape)
# %% all_reduce: wrong, always pads | has sent 6 numbers where 4 do
# => flat = x.flatten()
# => missing = size - len(flat) % size
# => total = all_gather(reduce_scatter(torch.cat([flat, flat.new_zeros(missing)])))
# => return total[: len(flat)].reshape(x.shape)
# %% all_reduce: wrong, gathers all and adds up | has sent 14 numbers where 12 do
# => everything = all_gather(x.flatten())
# => return everything.reshape(size, -1).sum(0).reshape(x.shape)
# %% all_reduce: wrong, forgets the shape | the vector that you send has shape (4, 2)
# => missing = -len(x) % size
# => padded = torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
# => return all_gather(reduce_scatter(padded))[: len(x)]
# %% all_reduce: wrong, leaves the zeros | of shape (9,); that of `x` is wanted
# => flat = x.flatten()
# => padded = torch.cat([flat, flat.new_zeros(-len(flat) % size)])
# => return all_gather(reduce_scatter(padded))
# %%% all_reduce: wrong, flat at the end | of shape (6,); that of `x` is wanted
# (reduce_scatter(padded)) => (reduce_scatter(padded))[: len(flat)]
# %%% all_reduce: wrong, writes into x | `x` itself was changed
# -     return all_gather(reduce_scatter(padded))
# +     x.copy_(all_gather(reduce_scatter(padded))[: len(flat)].reshape(x.shape))
# +     return x
# %%% all_reduce: wrong, by way of float32 | you send is of torch.float32; `x` is of torch.int64
# flatten() => flatten().float()
# (reduce_scatter(padded)) => (reduce_scatter(padded))[: len(flat)].reshape(x.shape).to(x.dtype)
# %%% all_reduce: wrong, a view of what may be transposed | raised RuntimeError
# flatten() => view(-1)
# (reduce_scatter(padded)) => (reduce_scatter(padded))[: len(flat)].view(x.shape)
# %% all_reduce: wrong, pads the front and cuts the end | the sum over the ranks is
# => flat = x.flatten()
# => padded = torch.cat([flat.new_zeros(-len(flat) % size), flat])
# => return all_gather(reduce_scatter(padded))[: len(flat)].reshape(x.shape)
# %%% all_reduce: wrong, zeros of float32 behind whole numbers | you send is of torch.float32; `x` is of torch.int64
# .new_zeros(-len(flat) % size), flat => , torch.zeros(-len(flat) % size)
# %% on_ranks: right, of one's own exercises
def ring_all_reduce(x):
    rank, size = dist.get_rank(), dist.get_world_size()

    def shift(tensor):
        came = torch.empty_like(tensor)
        for work in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, tensor, (rank + 1) % size), dist.P2POp(dist.irecv, came, (rank - 1) % size)
        ]):
            work.wait()
        return came

    return all_reduce(
        x, size, lambda vector: reduce_scatter(vector, rank, size, shift),
        lambda chunk: all_gather(chunk, rank, size, shift),
    )
# %% on_ranks: wrong, by way of float32 | rounded to float32 on its way: `x` is of torch.int64
# rings.all_reduce(x, rank, size, shift) => rings.all_reduce(x.float(), rank, size, shift).to(x.dtype)
# %% on_ranks: wrong, torch's own collective | calls all_reduce. Use messages only
# => total = x.clone()
# => dist.all_reduce(total)
# => return total
# %% on_ranks: wrong, gathers by a collective | calls all_gather. Use messages only
# => parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
# => dist.all_gather(parts, x)
# => return sum(parts)
# %% on_ranks: wrong, all receive first | for rank 3 for ever; the others wait, too
# -         sending = dist.isend(tensor, (rank + 1) % size)
# -         dist.recv(came, (rank - 1) % size)
# -         sending.wait()
# +         dist.recv(came, (rank - 1) % size)
# +         dist.send(tensor, (rank + 1) % size)
# %% on_ranks: wrong, rank 0 has nothing to do | rank 0 has returned already
# -     return rings.all_reduce(x, rank, size, shift)
# +     return x if rank == 0 else rings.all_reduce(x, rank, size, shift)
# %% on_ranks: wrong, the whole tensor goes round | rank 0 sends 6 messages, of 648 bytes
# -     return rings.all_reduce(x, rank, size, shift)
# +     total, passed = x.clone(), x
# +     for _ in range(size - 1):
# +         passed = shift(passed)
# +         total += passed
# +     return total
# %% on_ranks: wrong, straight to each rank | sends to rank 2 and 3, too
# => rank, size = dist.get_rank(), dist.get_world_size()
# => total = x.clone()
# => for step in range(1, size):
# =>     came = torch.empty_like(x)
# =>     sending = dist.isend(x, (rank + step) % size)
# =>     dist.recv(came, (rank - step) % size)
# =>     sending.wait()
# =>     total += came
# => return total
# %% on_ranks: wrong, the mean | torch's `all_reduce` gives
# size, shift) => size, shift) // size
# %% on_ranks: wrong, forgets the modulo | rank 4 is not in the group of ranks [0, 1, 2, 3], in your line
# (rank + 1) % size => rank + 1
# %% on_ranks: wrong, adds up in float32 | of torch.float32; `x` is of torch.int64
# all_reduce(x, rank => all_reduce(x.float(), rank
# %% on_ranks: wrong, in place | was changed; return a new tensor
# return rings.all_reduce(x, rank, size, shift) => return x.copy_(rings.all_reduce(x, rank, size, shift))
# %% on_ranks: wrong, without return | It has no `return`
# return rings. => rings.
# %% on_ranks: wrong, only the first half | of shape (3,); that of `x` is wanted
# rings.all_reduce(x, rank => rings.reduce_scatter(x.flatten()[: x.numel() // size * size], rank
# %% doubling: wrong, its neighbour on a ring is no partner | waits for a message from rank
# rank ^ distance => (rank + distance) % size
# %% doubling: wrong, sends its own tensor in each round | the sum over the ranks is
# distance, total => distance, x
# %% doubling: wrong, one round only | 4 ranks: rank 0 returns
# => return x + exchange(rank ^ 1, x)
# %% doubling: wrong, one round too many | as its partner
# distance < => distance <=
# %% doubling: wrong, exchanges with all ranks | has sent 3 messages where 2 do
# => total = x.clone()
# => for distance in range(1, size):
# =>     total = total + exchange(rank ^ distance, x)
# => return total
# %%% doubling: wrong, the distance grows by one | the sum over the ranks is
# , x => , total
# %% doubling: wrong, adds into x | `x` was changed
# -     total = x.clone()
# total = total + exchange(rank ^ distance, total) => x += exchange(rank ^ distance, x)
# return total => return x
# %% doubling: wrong, adds up in float32 | of torch.float32; `x` is of torch.int64
# x.clone() => torch.zeros(x.shape) + x.float()
# %% doubling: wrong, three rounds at most | 16 ranks: rank 0 returns
# => total = x.clone()
# => for distance in (1, 2, 4):
# =>     if distance < size:
# =>         total = total + exchange(rank ^ distance, total)
# => return total
