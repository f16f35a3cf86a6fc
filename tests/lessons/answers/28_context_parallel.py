# %% merge: wrong, totals that count from different scores | added up as they are
# => total = a[2] + b[2]
# => return (a[0] * a[2] + b[0] * b[2]) / total, torch.maximum(a[1], b[1]), total
# %% merge: wrong, exp of the scores themselves | has nan
# => largest = torch.maximum(a[1], b[1])
# => total = a[2] * (a[1] - largest).exp() + b[2] * (b[1] - largest).exp()
# => weight_a, weight_b = a[2] * a[1].exp(), b[2] * b[1].exp()
# => return (a[0] * weight_a + b[0] * weight_b) / (weight_a + weight_b), largest, total
# %%% merge: wrong, takes the outs for sums | divided by its own total
# total = a[2] * (a[1] - largest).exp() + b[2] * => shrink_a, shrink_b = (a[1] - largest).exp(),
# weight_a, weight_b = a[2] * a[1].exp(), b[2] * b[1].exp() => total = a[2] * shrink_a + b[2] * shrink_b
# (a[0] * weight_a + b[0] * weight_b) / (weight_a + weight_b) => (a[0] * shrink_a + b[0] * shrink_b) / total
# %% merge: wrong, the mean of both | the mean of both outs
# => largest = torch.maximum(a[1], b[1])
# => total = a[2] * (a[1] - largest).exp() + b[2] * (b[1] - largest).exp()
# => return (a[0] + b[0]) / 2, largest, total
# %%% merge: wrong, the sum of both | the sum of both outs
# (a[0] + b[0]) / 2 => a[0] + b[0]
# %%% merge: wrong, weights not corrected | divided by its own total
# (a[0] + b[0]) / 2 => (a[0] * a[2] + b[0] * b[2]) / (a[2] + b[2])
# %%% merge: wrong, the out alone | three tensors
# total = a[2] * (a[1] - largest).exp() + => weight_a, weight_b = a[2] * (a[1] - largest).exp(),
# (a[0] + b[0]) / 2, largest, total => (a[0] * weight_a + b[0] * weight_b) / (weight_a + weight_b)
# %% merge: wrong, one largest score for all queries | the larger one of the two, for each query
# => largest = torch.maximum(a[1].max(), b[1].max()).expand_as(a[1])
# => weight_a, weight_b = a[2] * (a[1] - largest).exp(), b[2] * (b[1] - largest).exp()
# => total = weight_a + weight_b
# => return (a[0] * weight_a + b[0] * weight_b) / total, largest, total
# %% merge: wrong, changes what it was given | have changed
# => largest = torch.maximum(a[1], b[1])
# => weight_a, weight_b = a[2].mul_((a[1] - largest).exp()), b[2].mul_((b[1] - largest).exp())
# => total = weight_a + weight_b
# => return (a[0] * weight_a + b[0] * weight_b) / total, largest, total
# %% merge: wrong, forgets that both parts may be empty | two parts with no keys: total has nan
# ().nan_to_num()  # inf - inf is nan => ()
# (largest_b - largest).exp().nan_to_num() => (largest_b - largest).exp()
# .clamp(min=1), => ,
# %% merge: wrong, divides by the total of no keys | two parts with no keys: out has nan
# .clamp(min=1), => ,
# %% merge: wrong, looks whether a part has keys for any query | others of one or of none: total has nan
def merge(a, b):
    if not a[2].any():
        return tuple(each.clone() for each in b)
    if not b[2].any():
        return tuple(each.clone() for each in a)
    largest = torch.maximum(a[1], b[1])
    weight_a = a[2] * (a[1] - largest).exp()
    weight_b = b[2] * (b[1] - largest).exp()
    total = weight_a + weight_b
    return (a[0] * weight_a + b[0] * weight_b) / total, largest, total


# %% merge: wrong, in float32 | should be of torch.float64
# ) = a, b => ) = ([each.float() for each in part] for part in (a, b))
# %% timetable: wrong, leaves out steps without work | the ring has 4 steps
# => return [(there, "some" if there == rank else "all") for there in range(rank, -1, -1)]
# %% timetable: wrong, one word for all | of slice 3 they do not see 'some'
# => return (((rank - step) % size, "some") for step in range(size))
# %% timetable: wrong, slices alone | is a pair
# => return [(rank - step) % size for step in range(size)]
# %% timetable: wrong, without the last step | the ring has 4 steps
# => slices = [(rank - step) % size for step in range(size - 1)]
# => return [(there, "some" if there == rank else "all" if there < rank else "none") for there in slices]
# %%% timetable: wrong, numbers below 0 | there is no slice with a number below 0
# (rank - step) % size for step in range(size - 1) => rank - step for step in range(size)
# %%% timetable: wrong, right for four ranks only | there is no slice with a number below 0
# size for step in range(size - 1) => 4 if size == 4 else rank - step for step in range(size)
# %%% timetable: wrong, from the next rank | They come from the one before
# (rank - step) % size for step in range(size - 1) => (rank + step) % size for step in range(size)
# %%% timetable: wrong, begins after the first pass | in step 0 it has its own slice
# size - => 1, size +
# %% timetable: wrong, sees what lies ahead | they do not see 'all'
# => slices = [(rank - step) % size for step in range(size)]
# => return [(there, "some" if there == rank else "all" if there > rank else "none") for there in slices]
# %%% timetable: wrong, all of its own slice | they do not see 'all'
# "some" if there == rank else "all" if there > => "all" if there <=
# %% ring_time: wrong, waits only at the end | they meet after each step
# => everywhere = [place for each in places for place in each]
# => return max(sum(key <= query for query in each for key in everywhere) for each in places)
# %% ring_time: wrong, the work of all | They work at the same time
# => everywhere = [place for each in places for place in each]
# => return sum(key <= query for query in everywhere for key in everywhere)
# %% ring_time: wrong, the mean | the mean over the ranks
# => everywhere = [place for each in places for place in each]
# => return sum(key <= query for query in everywhere for key in everywhere) / len(places)
# %% ring_time: wrong, also what lies ahead | a query sees no key that is ahead of it
# => return sum(len(each) ** 2 for each in places)
# %% ring_time: wrong, without the first step | leaves out step 0
# => size = len(places)
# => return sum(
# =>     max(sum(k <= q for q in places[rank] for k in places[(rank - step) % size]) for rank in range(size))
# =>     for step in range(1, size)
# => )
# %%% ring_time: wrong, without a query's own place | its own place
# <= q => < q
# 1, size => size
# %% ring_time: wrong, takes the slices to be in order | the steps take
# => size, wide = len(places), len(places[0])
# => return wide * (wide + 1) // 2 + (size - 1) * wide**2
# %% ring_time: wrong, a list of steps | A number is wanted
# => size = len(places)
# => return [
# =>     max(sum(k <= q for q in places[rank] for k in places[(rank - step) % size]) for rank in range(size))
# =>     for step in range(size)
# => ]
# %% ring_time: wrong, as many places on each rank as on the first | raised IndexError
# time = len(places) => wide, time = len(places), len(places[0])
# key <= query for query in => keys[k] <=
# [rank] for key in keys => [rank][q] for q in range(wide) for k in range(wide)
# %% ring_time: wrong, sorts the lists that it was given | the lists have changed
# -     for step in range(size):
# +     for each in places:
# +         each.sort()
# +     for step in range(size):
# %% on_ranks: wrong, rank 0 has nothing to pass on | for ever
# for step in range(size): => for step in range(size if rank else 1):
# %% on_ranks: wrong, forgets to wait | Was each message waited for
# -         for travel in travels:
# -             travel.wait()
# %% on_ranks: wrong, sees what lies ahead | its queries had seen places that lie ahead of them, in all slices
# if owner <= rank: => if True:
# owner == rank) => False)
# %% on_ranks: wrong, no mask | its queries had seen all of their own slice
# owner == rank) => False)
# %% on_ranks: wrong, the mask everywhere | the mask of its own slice had been used for all slices
# owner == rank) => True)
# %% on_ranks: wrong, counts the other way round | numbers of the slices were counted the other way round
# owner = (rank - step) % size => owner = (rank + step) % size
# %% on_ranks: wrong, averages the softmaxes | softmaxes over single slices had been averaged
# -             new = torch.maximum(largest, scores.amax(-1, keepdim=True))
# -             shrink, weights = (largest - new).exp(), (scores - new).exp()
# -             read = read * shrink + weights @ there[1]
# -             total = total * shrink + weights.sum(-1, keepdim=True)
# -             largest = new
# +             read = read + scores.softmax(-1) @ there[1]
# +             total = total + 1
# %% on_ranks: wrong, one step too many | sends 4 messages of
# if step < size - 1: => if True:
# %% on_ranks: wrong, its own slice only | their own slice only
# for step in range(size): => for step in range(1):
# -             travels = [dist.isend(there, (rank + 1) % size), dist.irecv(came, (rank - 1) % size)]
# there = came => pass
# %% on_ranks: wrong, waits for both messages before it computes | rank 0 computes nothing while the messages
# owner = (rank - step) % size => [travel.wait() for travel in travels]; owner = (rank - step) % size
# -         for travel in travels:
# -             travel.wait()
# %% on_ranks: wrong, sends after it has computed | rank 0 computes nothing while the messages are under way
# travels = [dist.isend(there, (rank + 1) % size), dist.irecv(came, (rank - 1) % size)] => pass
# -         for travel in travels:
# +         if step < size - 1:
# +             travels = [dist.isend(there, (rank + 1) % size), dist.irecv(came, (rank - 1) % size)]
# +         for travel in travels:
# %% on_ranks: wrong, receives into the tensor that it sends | receives into a tensor that is still being sent
# came = torch.empty_like(there) => came = there
# %% on_ranks: wrong, two buffers, and no wait for what is sent | receives into a tensor that is still being sent
# there = torch.stack([key, value]) => there = torch.stack([key, value]); other = torch.empty_like(there)
# came = torch.empty_like(there) => came = other
# -         for travel in travels:
# -             travel.wait()
# -         there = came
# +         if travels:
# +             travels[1].wait()
# +         there, other = came, there
# %% on_ranks: wrong, never waits for what it sends | has not waited for 3 messages that it has sent
# for travel in travels: => for travel in travels[1:]:
# %% on_ranks: wrong, does not correct the sums | different largest scores had been added up without a correction
# read = read * shrink + weights => read = read + weights
# total = total * shrink + weights => total = total + weights
# %% on_ranks: wrong, sees all slices | all slices had been seen, also those that lie ahead
# if owner <= rank: => if True:
# %% on_ranks: right, receives in the background by one call
# -             travels = [dist.isend(there, (rank + 1) % size), dist.irecv(came, (rank - 1) % size)]
# +             away, back = (rank + 1) % size, (rank - 1) % size
# +             both = dist.P2POp(dist.isend, there, away), dist.P2POp(dist.irecv, came, back)
# +             travels = dist.batch_isend_irecv(list(both))
# %% on_ranks: wrong, sends its own slice again and again | does not return what its queries read
# dist.isend(there, => dist.isend(mine,
# read, total = => mine, read, total = there,
# %% on_ranks: wrong, gathers all keys | calls all_gather. Then it has all keys at once
def ring(query, key, value):
    rank, size = dist.get_rank(), dist.get_world_size()
    keys, values = ([torch.empty_like(key) for _ in range(size)] for _ in range(2))
    dist.all_gather(keys, key)
    dist.all_gather(values, value)
    place = torch.arange(size * len(key))
    sees = place[rank * len(key) : (rank + 1) * len(key), None] >= place
    scores = (query @ torch.cat(keys).T / math.sqrt(key.shape[1])).masked_fill(~sees, -math.inf)
    return scores.softmax(-1) @ torch.cat(values)


# %% on_ranks: wrong, all receive first | the others wait, too
# [dist.isend(there, (rank + 1) % size), dist.irecv(came, (rank - 1) % size)] => [dist.isend(there, (rank + 1) % size)]
# -             came = torch.empty_like(there)
# +             came = torch.empty_like(there)
# +             dist.recv(came, (rank - 1) % size)
# %% zigzag: wrong, counts the last chunk from one | places that are not there
# => wide = length // (2 * size)
# => return [place for chunk in (rank, 2 * size - rank) for place in range(chunk * wide, (chunk + 1) * wide)]
# %%% zigzag: wrong, two chunks from the front | it has the chunks
# 2 * size - rank => rank + size
# %% zigzag: wrong, ranges instead of places | a list of numbers
# => wide = length // (2 * size)
# => last = 2 * size - 1 - rank
# => return [range(rank * wide, (rank + 1) * wide), range(last * wide, (last + 1) * wide)]
# %% zigzag: wrong, the second chunk backwards | in rising order
# => front = list(range(length))[rank * length // (2 * size) : (rank + 1) * length // (2 * size)]
# => return front + [length - 1 - place for place in front]
# %% zigzag: wrong, one slice in order | it has the chunks
# => wide = length // size
# => return list(range(rank * wide, (rank + 1) * wide))
# %% zigzag: wrong, chunks as wide as slices | each rank has 4 places
# => wide = length // size
# => last = 2 * size - 1 - rank
# => return [place for chunk in (rank, last) for place in range(chunk * wide, (chunk + 1) * wide)]
# %% zigzag: wrong, numbers of chunks | each rank has 4 places
# => return [rank, 2 * size - 1 - rank]
# %% zigzag: wrong, striped | it has the chunks
# => return list(range(rank, length, size))
# %% least_row: wrong, full blocks | half of each block
# / (4 * 4096 / 2) => / (4 * 4096)
# %% least_row: wrong, a head for each key | Four heads share
# 2 * 1024 * 2 => 2 * 4096 * 2
# %% least_row: wrong, one slice | the slice of one GPU
# 16 * slice_length => slice_length
# %% least_row: wrong, the peak | not its peak
# 400e12 => 989e12
# %% least_row: wrong, the link within a host | not only those within
# 50e9 => 450e9
# %% least_row: wrong, four bytes | two bytes
# 1024 * 2 / 50e9 => 1024 * 4 / 50e9
# %% least_row: wrong, all in bits | both should take equally long
# 50e9 => 50e9 * 8
# %% least_row: wrong, a list | A number of tokens is wanted
# tokens = 16 * slice_length => tokens = [slice_length] * 16
# %% least_row: right, rounded up
# 16 * slice_length => 16 * math.ceil(slice_length + 1)
