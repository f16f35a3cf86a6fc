# %% which
def which(before, after):
    if before == after or before == "Replicate" or after == "Partial":
        return "nothing"
    if after == "Replicate":
        return "all_reduce" if before == "Partial" else "all_gather"
    return "reduce_scatter" if before == "Partial" else "all_to_all"


# %% sent
def sent(collective, size, ranks):
    once = size * (ranks - 1) / ranks
    times = {"nothing": 0, "all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1 / ranks}
    return once * times[collective]


# %% product
def product(left, right):
    whole = "Replicate"
    if left == "Shard(1)" and right == "Shard(0)":
        return "Partial"
    if right == whole and left != "Shard(1)":
        return left
    if left == whole and right != "Shard(0)":
        return right
    return None


# %% plan
def make_plan():
    return {
        "up": Shard(1),
        "up_bias": Shard(0),
        "down": Shard(0),
        "down_bias": Replicate(),
    }


# %% needs
needs = {
    "by numbers": "all_reduce",
    "by heads": "nothing",
    "by tokens": "all_gather",
}
