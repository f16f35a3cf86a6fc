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
# %% timetable: wrong, a generator | A list is wanted
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
