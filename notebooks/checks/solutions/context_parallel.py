# %% merge
def merge(a, b):
    (out_a, largest_a, total_a), (out_b, largest_b, total_b) = a, b
    largest = torch.maximum(largest_a, largest_b)
    weight_a = total_a * (largest_a - largest).exp().nan_to_num()  # inf - inf is nan
    weight_b = total_b * (largest_b - largest).exp().nan_to_num()
    total = weight_a + weight_b  # 1 or more, unless there is no key
    return (out_a * weight_a + out_b * weight_b) / total.clamp(min=1), largest, total


# %% timetable
def timetable(rank, size):
    steps = []
    for step in range(size):
        there = (rank - step) % size
        steps.append((there, "some" if there == rank else "all" if there < rank else "none"))
    return steps


# %% ring_time
def ring_time(places):
    size, time = len(places), 0
    for step in range(size):
        work = []
        for rank in range(size):
            keys = places[(rank - step) % size]
            work.append(sum(key <= query for query in places[rank] for key in keys))
        time += max(work)
    return time


# %% on_ranks
def ring(query, key, value):
    rank, size = dist.get_rank(), dist.get_world_size()
    there = torch.stack([key, value])
    read, total = torch.zeros_like(query), query.new_zeros(len(query), 1)
    largest = query.new_full((len(query), 1), -math.inf)
    for step in range(size):
        travels = []
        if step < size - 1:
            came = torch.empty_like(there)
            travels = [dist.isend(there, (rank + 1) % size), dist.irecv(came, (rank - 1) % size)]
        owner = (rank - step) % size
        if owner <= rank:
            scores = scores_of(query, there[0], owner == rank)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            shrink, weights = (largest - new).exp(), (scores - new).exp()
            read = read * shrink + weights @ there[1]
            total = total * shrink + weights.sum(-1, keepdim=True)
            largest = new
        for travel in travels:
            travel.wait()
        there = came
    return read / total


# %% zigzag
def zigzag(rank, size, length):
    wide = length // (2 * size)
    places = list(range(length))
    last = 2 * size - 1 - rank
    return places[rank * wide : (rank + 1) * wide] + places[last * wide : (last + 1) * wide]


# %% least_row
# 4 L² · 4096 / 2 / F = 2 L · 1024 · 2 / B
slice_length = 2 * 1024 * 2 / 50e9 * 400e12 / (4 * 4096 / 2)
tokens = 16 * slice_length
