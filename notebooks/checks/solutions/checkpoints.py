# %% snapshot
def snapshot(training):
    import copy

    return copy.deepcopy({
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": training.scheduler.state_dict(),
        "random": training.random.get_state(),
        "position": training.position,
    })  # fmt: skip


# %% pieces
def pieces(rank, ranks, old, length):
    def bounds(rank, ranks):
        wide = -(-length // ranks)
        return min(rank * wide, length), min((rank + 1) * wide, length)

    first, last = bounds(rank, ranks)
    found = []
    for number in range(old):
        begin, end = bounds(number, old)
        low, high = max(first, begin), min(last, end)
        if low < high:
            found.append((number, low - begin, high - begin))
    return found


# %% on_ranks
def as_table(piece, rows):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    width = piece.shape[1]
    return DTensor.from_local(piece, mesh, [Shard(0)], shape=(rows, width), stride=(width, 1))


def save(piece, rows, folder):
    dcp.save({"table": as_table(piece, rows)}, checkpoint_id=folder)


def load(rows, width, folder):
    begin, end = resume.bounds(dist.get_rank(), dist.get_world_size(), rows)
    state = {"table": as_table(torch.empty(end - begin, width), rows)}
    dcp.load(state, checkpoint_id=folder)
    return state["table"].to_local()


# %% how_often
def how_often(cost, node_mtbf, nodes):
    mtbf = node_mtbf / nodes
    interval = (2 * cost * mtbf) ** 0.5
    return interval, cost / interval + interval / (2 * mtbf)


# %% total_time
def total_time(work, interval, cost, restart, failures):
    def needed(left):
        return left + (-(-left // interval) - 1) * cost

    time = done = 0
    for up in failures:
        if needed(work - done) <= up:
            break
        done += up // (interval + cost) * interval
        time += up + restart
    return time + needed(work - done)


# %% suspects
def suspects(waiting, groups):
    busy = {group for group in waiting.values() if group is not None}
    held = {rank for group in busy for rank in groups[group]}
    return sorted(rank for rank in held if waiting[rank] is None)
