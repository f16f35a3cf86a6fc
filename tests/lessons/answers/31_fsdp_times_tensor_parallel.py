# %% feed_forward: wrong, adds nothing up | Who adds them up
def feed_forward(x, cut, all_reduce):
    return torch.relu(x @ cut("up", 1)) @ cut("down", 0)


# %% feed_forward: wrong, cuts the second by columns too | The function raised RuntimeError
def feed_forward(x, cut, all_reduce):
    y = torch.relu(x @ cut("up", 1)) @ cut("down", 1)
    all_reduce(y)
    return y


# %% feed_forward: wrong, relu of parts of a sum | relu must see whole sums
def feed_forward(x, cut, all_reduce):
    rows = cut("up", 0)
    y = torch.relu(x[:, : len(rows)] @ rows)
    all_reduce(y)
    hidden = cut("down", 0)
    y = y[:, : len(hidden)] @ hidden
    all_reduce(y)
    return y


# %% feed_forward: wrong, a second sum that changes nothing | with 2 sums where one is enough
def feed_forward(x, cut, all_reduce):
    y = torch.relu(x @ cut("up", 1)) @ cut("down", 0)
    all_reduce(y)
    all_reduce(y / 2)
    return y


# %% bytes_held: wrong, parameters alone | two numbers of Adam
def bytes_held(parameters, dp, tp):
    return sum(4 * count / (dp * tp if by_tp else dp) for count, by_tp in parameters)


# %% bytes_held: wrong, all cut both ways | cut by FSDP alone
def bytes_held(parameters, dp, tp):
    return sum(16 * count / (dp * tp) for count, by_tp in parameters)


# %% bytes_held: wrong, the others whole | FSDP cuts the others, too
def bytes_held(parameters, dp, tp):
    return sum(16 * count / (dp * tp if by_tp else 1) for count, by_tp in parameters)


# %% bytes_held: wrong, the wrong dimension | a rank holds other than
def bytes_held(parameters, dp, tp):
    return sum(16 * count / (tp if by_tp else dp) for count, by_tp in parameters)


# %% gathers: wrong, without the model itself | parameters outside of its blocks
def gathers(blocks, keep):
    return (1 if keep else 2) * blocks


# %% gathers: wrong, the model itself twice | stays whole until its backward
def gathers(blocks, keep):
    return (1 if keep else 2) * blocks + 2


# %% gathers: wrong, forward alone | who is gathered, and when
def gathers(blocks, keep):
    return blocks + 1
