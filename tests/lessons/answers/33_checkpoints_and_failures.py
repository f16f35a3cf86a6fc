# %% snapshot: wrong, a copy of the model only | has changed while the training went on
# => states = {name: getattr(training, name).state_dict() for name in ("model", "optimizer", "scheduler")}
# => states["model"] = {name: each.clone() for name, each in states["model"].items()}
# => return {**states, "random": training.random.get_state(), "position": training.position}
# %%% snapshot: wrong, no copies | has changed while the training went on
# -     states["model"] = {name: each.clone() for name, each in states["model"].items()}
# %% snapshot: wrong, the seed of the generator | TypeError
def snapshot(training):
    import copy

    states = {name: getattr(training, name).state_dict() for name in ("model", "optimizer", "scheduler")}
    return copy.deepcopy({**states, "random": training.random.initial_seed(), "position": training.position})


# %%% snapshot: wrong, a shallow copy | has changed while the training went on
# -     return copy.deepcopy({**states, "random": training.random.initial_seed(), "position": training.position})
# +     return copy.copy({**states, "random": training.random.get_state(), "position": training.position})
# %%% snapshot: wrong, names of its own | knows the names
# "random": training.random.initial_seed => "rng": training.random.get_state
# %%% snapshot: wrong, the model alone | begins again with row 0
# -     states = {name: getattr(training, name).state_dict() for name in ("model", "optimizer", "scheduler")}
# -     return copy.deepcopy({**states, "random": training.random.initial_seed(), "position": training.position})
# +     return {"model": copy.deepcopy(training.model.state_dict())}
# %%% snapshot: wrong, not where the data stand | begins again with row 0
# initial_seed(), "position": training.position => get_state()
# %%% snapshot: wrong, without the model | its weights are other ones
# "model", "optimizer" => "optimizer"
# initial_seed => get_state
# %%% snapshot: wrong, without the optimizer | Adam remembers
# "optimizer", "scheduler" => "scheduler"
# initial_seed => get_state
# %%% snapshot: wrong, without the scheduler | learning rate
# "optimizer", "scheduler" => "optimizer"
# initial_seed => get_state
# %%% snapshot: wrong, without the generator | other noise
# "random": training.random.initial_seed(), "position" => "position"
# %%% snapshot: wrong, the whole object | a dict
# -     states = {name: getattr(training, name).state_dict() for name in ("model", "optimizer", "scheduler")}
# -     return copy.deepcopy({**states, "random": training.random.initial_seed(), "position": training.position})
# +     return copy.deepcopy(training)
# %%% snapshot: wrong, takes it that Adam has made a step | raised KeyError
# -     return copy.deepcopy({**states, "random": training.random.initial_seed(), "position": training.position})
# +     states["optimizer"]["state"][0]["step"].item()
# +     return copy.deepcopy({**states, "random": training.random.get_state(), "position": training.position})
# %% snapshot: wrong, one dict for all snapshots | A second snapshot has changed the first one
snapshots = {}


def snapshot(training):
    import copy

    for name in ("model", "optimizer", "scheduler"):
        snapshots[name] = copy.deepcopy(getattr(training, name).state_dict())
    snapshots.update(random=training.random.get_state(), position=training.position)
    return snapshots


# %% pieces: wrong, rows of the whole tensor | from the beginning of the file
def pieces(rank, ranks, old, length):
    def bounds(rank, ranks):
        wide = -(-length // ranks)
        return min(rank * wide, length), min((rank + 1) * wide, length)

    first, last = bounds(rank, ranks)
    both = [(number, max(first, bounds(number, old)[0]), min(last, bounds(number, old)[1])) for number in range(old)]
    return [each for each in both if each[1] < each[2]]


# %% pieces: wrong, takes all to divide evenly | it reads
# => new_wide, old_wide = length // ranks, length // old
# => found = []
# => for number in range(old):
# =>     low = max(rank * new_wide, number * old_wide)
# =>     high = min((rank + 1) * new_wide, (number + 1) * old_wide)
# =>     if low < high:
# =>         found.append((number, low - number * old_wide, high - number * old_wide))
# => return found
# %% pieces: wrong, a piece without rows | without rows
# if low < => if low <=
# %% pieces: wrong, the file of its own number | it has the rows
# => wide = -(-length // old)
# => return [(rank, 0, min(wide, length - rank * wide))] if rank < old and rank * wide < length else []
# %% pieces: wrong, reads everything | it has the rows
# => wide = -(-length // old)
# => spans = [(number, 0, min(wide, length - number * wide)) for number in range(old)]
# => return [each for each in spans if each[2] > 0]
# %% pieces: wrong, whole files | it has the rows
def pieces(rank, ranks, old, length):
    def bounds(rank, ranks):
        wide = -(-length // ranks)
        return min(rank * wide, length), min((rank + 1) * wide, length)

    first, last = bounds(rank, ranks)
    spans = [(number, *bounds(number, old)) for number in range(old)]
    return [(number, 0, end - begin) for number, begin, end in spans if max(first, begin) < min(last, end)]


# %% pieces: wrong, the last row left out | as in a slice
# (last, end) => (last, end) - 1
# %% pieces: wrong, old and new mixed up | an old rank that is not there
# = bounds(rank, ranks) => = bounds(rank, old)
# range(old) => range(ranks)
# number, old => number, ranks
# number, low => number + old, low
# %% pieces: wrong, the first that it finds | it has the rows
# => wide, old_wide = -(-length // ranks), -(-length // old)
# => first, last = min(rank * wide, length), min((rank + 1) * wide, length)
# => if first == last:
# =>     return []
# => number = first // old_wide
# => return [(number, first - number * old_wide, min(last - number * old_wide, old_wide))]
# %% pieces: wrong, without the old ranks | triples
# => wide = -(-length // ranks)
# => return [(min(rank * wide, length), min((rank + 1) * wide, length))]
# %% pieces: wrong, fractions | triples of whole numbers are wanted
# = -(-length // ranks) => = float(-(-length // ranks))
# %% on_ranks: wrong, dots left in load | this rank's rows. Replace the three dots
def as_table(piece, rows):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    width = piece.shape[1]
    return DTensor.from_local(piece, mesh, [Shard(0)], shape=(rows, width), stride=(width, 1))


def save(piece, rows, folder):
    dcp.save({"table": as_table(piece, rows)}, checkpoint_id=folder)


def load(rows, width, folder): ...
# %% on_ranks: right, loads into a table of zeros
def save(piece, rows, folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shape = torch.Size([rows, piece.shape[1]])
    table = DTensor.from_local(piece, mesh, [Shard(0)], shape=shape, stride=(shape[1], 1))
    dcp.save({"rows": table}, checkpoint_id=folder)


def load(rows, width, folder):
    from torch.distributed.tensor import zeros

    table = zeros(rows, width, device_mesh=init_device_mesh("cpu", (dist.get_world_size(),)), placements=[Shard(0)])
    dcp.load({"rows": table}, checkpoint_id=folder)
    return table.to_local()
# %% on_ranks: wrong, saves plain pieces | that is the piece of one rank, and those of the others are missing
# {"table": as_table(piece, rows)} => {"table": piece}
# %% on_ranks: wrong, the local shape for the global one | The global shape does not fit the pieces, of 4, 4 and 2 rows
# [Shard(0)], shape=(rows, width), stride=(width, 1) => [Shard(0)]
# %% on_ranks: wrong, a name for each rank | The checkpoint has 3 tensors: table0, table1, table2
# {"table": as_table(piece, rows)} => {f"table{dist.get_rank()}": piece}
# %% on_ranks: wrong, rank 0 gathers all | of its rows the files have 10
# {"table": as_table(piece, rows)} => {"table": as_table(piece, rows).full_tensor()}
# %% on_ranks: wrong, rank 0 alone saves | waits in your line
# -     dcp.save({"table": as_table(piece, rows)}, checkpoint_id=folder)
# +     table = as_table(piece, rows)
# +     if dist.get_rank() == 0:
# +         dcp.save({"table": table}, checkpoint_id=folder)
# %% on_ranks: wrong, returns what dcp.load returns | rank 0 gets None from `load`
# -     dcp.load(state, checkpoint_id=folder)
# -     return state["table"].to_local()
# +     return dcp.load(state, checkpoint_id=folder)
# %% on_ranks: wrong, a DTensor | returns a DTensor. Its own piece is wanted
# ["table"].to_local() => ["table"]
# %% on_ranks: wrong, the whole table | rank 0 returns the whole table. Its own 5 rows are wanted
# ["table"].to_local() => ["table"].full_tensor()
# %% on_ranks: wrong, nothing is loaded | returns rows with other numbers than those that were saved
# torch.empty => torch.zeros
# -     dcp.load(state, checkpoint_id=folder)
# %% on_ranks: wrong, the rows of three ranks | DCP reports of rank 0 a RuntimeError
# dist.get_rank(), dist.get_world_size(), rows) => dist.get_rank(), 3, rows)
# %% on_ranks: wrong, copies cut by hand | the files have
# [Shard(0)] => [Replicate()]
# -     width = piece.shape[1]
# +     from torch.distributed.tensor import Replicate
# +     width = piece.shape[1]
# %% on_ranks: wrong, another name in load | asks for a tensor by the name 'rows', and `save` has written none
# state = {"table" => state = {"rows"
# state["table"] => state["rows"]
# %% on_ranks: wrong, reads the whole table and cuts it | for the 5 rows of rank 0 DCP has read 10
# as_table(torch.empty(end - begin, width), rows) => torch.empty(rows, width)
# ["table"].to_local() => ["table"][begin:end]
# %% on_ranks: wrong, another dtype | returns rows of torch.float64; the table is of torch.float32
# torch.empty(end - begin, width) => torch.empty(end - begin, width, dtype=torch.double)
# %% on_ranks: wrong, torch.save for each rank | the folder has no complete checkpoint
# -     dcp.save({"table": as_table(piece, rows)}, checkpoint_id=folder)
# +     torch.save(piece, f"{folder}/{dist.get_rank()}.pt")
# %% on_ranks: wrong, rows in the order of another rank | its own begin with
# -     return state["table"].to_local()
# +     whole = state["table"].full_tensor()
# +     return whole.chunk(dist.get_world_size())[1 - dist.get_rank()]
# %% how_often: wrong, more nodes fail less often | More nodes fail more often
# node_mtbf / => node_mtbf *
# %% how_often: wrong, without the 2 | lacks the 2
# 2 * cost => cost
# %% how_often: wrong, without the root | lacks the root
# (2 * cost * mtbf) ** 0.5 => 2 * cost * mtbf
# %% how_often: wrong, saves for nothing | only one half
# cost / interval + interval => interval
# %% how_often: wrong, a whole interval for each failure | in the middle of one
# (2 * mtbf) => mtbf
# %% how_often: wrong, the share by one node | of the time is lost, not
# => interval = (2 * cost * node_mtbf / nodes) ** 0.5
# => return interval, cost / interval + interval / (2 * node_mtbf)
# %%% how_often: wrong, without the nodes | would be right for one node
# node_mtbf / nodes => node_mtbf
# %%% how_often: wrong, loses no work | only one half
# interval + interval / (2 * node_mtbf) => interval
# %% how_often: wrong, the interval alone | two numbers
# => return (2 * cost * node_mtbf / nodes) ** 0.5
# %% how_often: wrong, whole minutes between failures | 3 nodes, each with 1000 minutes
# node_mtbf / => node_mtbf //
# %% total_time: wrong, saves take no time | the work alone
# -     def needed(left):
# -         return left + (-(-left // interval) - 1) * cost
# -
# needed(work - done) <= => work - done <=
# (interval + cost) => interval
# time + needed(work - done) => time + work - done
# %% total_time: wrong, a save at the end | a save after the last piece
# (-(-left // interval) - 1) => -(-left // interval)
# %% total_time: wrong, counts whole intervals of the work | a save after the last piece
# (-(-left // interval) - 1) => left // interval
# %% total_time: wrong, no time for restarts | the time of a restart
# up + restart => up
# %% total_time: wrong, loses no work | loses no work
# => return work + (-(-work // interval) - 1) * cost + restart * len(failures)
# %% total_time: wrong, begins anew | begins anew after each failure
# => needed, time = work + (-(-work // interval) - 1) * cost, 0
# => for up in failures:
# =>     if needed <= up:
# =>         break
# =>     time += up + restart
# => return time + needed
# %% total_time: wrong, counts a save that is not complete | that is not complete
# (interval + cost) => interval
# %% total_time: wrong, forgets earlier saves | What earlier starts have saved
# done += up => done = up
# %% total_time: wrong, all failures come | the run ends there
# -         if needed(work - done) <= up:
# -             break
# -         done += up // (interval + cost) * interval
# +         done = min(work, done + up // (interval + cost) * interval)
# time + needed(work - done) => time + max(0, needed(work - done))
# %% total_time: wrong, does not stop when the work is done | the run ends there
# => time = done = 0
# => for up in failures:
# =>     done += up // (interval + cost) * interval
# =>     time += up + restart
# => left = work - done
# => return time + left + (-(-left // interval) - 1) * cost
# %% total_time: wrong, a failure at the moment of the end counts | it takes 68, not 98
# (work - done) <= => (work - done) <
# %% suspects: wrong, all that are in no collective | but nobody waits for it
# => return sorted(rank for rank, group in waiting.items() if group is None)
# %% suspects: wrong, those that wait | waits itself
# => return sorted(rank for rank, group in waiting.items() if group is not None)
# %% suspects: wrong, all of the groups | waits itself
# held if waiting[rank] is None => held
# %% suspects: wrong, the first alone | each once and in order
# -     return sorted(rank for rank in held if waiting[rank] is None)
# +     return sorted(rank for rank in held if waiting[rank] is None)[:1]
# %% suspects: wrong, once for each group | each once and in order
# => found = []
# => for rank, group in waiting.items():
# =>     found += [other for other in groups.get(group, []) if waiting[other] is None]
# => return sorted(found)
# %% suspects: wrong, in the order of the groups | each once and in order
# => found = []
# => for group in groups:
# =>     if group in waiting.values():
# =>         found += [rank for rank in groups[group] if waiting[rank] is None and rank not in found]
# => return found[::-1]
# %% suspects: wrong, the rank itself and not a list | A list of ranks is wanted
# => return next((rank for rank, group in waiting.items() if group is None), 0)
# %% suspects: right, a set in order
# -     return sorted(rank for rank in held if waiting[rank] is None)
# +     return tuple(rank for rank in sorted(held) if waiting[rank] is None)
