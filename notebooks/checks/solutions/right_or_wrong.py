# %% layouts
layouts = {
    "enter.weight": "Shard(0)",
    "enter": "Shard(1)",
    "up.weight": "Shard(1)",
    "up.bias": "Replicate",
    "up": "Replicate",
    "down": "Replicate",
}


# %% in_forward
in_forward = ("forward", "down", "b")


# %% in_backward
in_backward = ("gradient", "enter.weight", "a")


# %% in_loss
in_loss = ("loss", "", [32 / 40, 8 / 40])


# %% program1
program1 = ("forward", "blocks.1.down", "too often")


# %% program2
program2 = ("forward", "positions", "own part")


# %% program3
program3 = ("gradient", "enter.weight", "scale")


# %% program4
program4 = ("gradient", "enter.weight", "own part")


# %% program5
program5 = ("step", "enter.weight", "apart")


# %% mend
def mend(cut, whole, limit, all_reduce):
    square = sum(gradient.square().sum() for gradient in cut)
    all_reduce(square)
    norm = (square + sum(gradient.square().sum() for gradient in whole)).sqrt()
    for gradient in cut + whole:
        gradient *= (limit / norm).clamp(max=1)
