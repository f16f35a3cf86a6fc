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


# %% zigzag
def zigzag(rank, size, length):
    wide = length // (2 * size)
    places = list(range(length))
    last = 2 * size - 1 - rank
    return places[rank * wide : (rank + 1) * wide] + places[last * wide : (last + 1) * wide]
