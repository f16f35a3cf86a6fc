# %% feed_forward
def feed_forward(x, cut, all_reduce):
    y = torch.relu(x @ cut("up", 1)) @ cut("down", 0)
    all_reduce(y)
    return y


# %% bytes_held
def bytes_held(parameters, dp, tp):
    return sum(16 * count / (dp * tp if by_tp else dp) for count, by_tp in parameters)


# %% gathers
def gathers(blocks, keep):
    return (1 if keep else 2) * blocks + 1
