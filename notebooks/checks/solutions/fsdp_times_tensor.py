# %% rows_held
def rows_held(rows, dp, tp, rank):
    d, t = divmod(rank, tp)
    each = rows // (dp * tp)
    begin = t * (rows // tp) + d * each
    return list(range(begin, begin + each))


# %% bytes_held
def bytes_held(parameters, dp, tp):
    return sum(16 * count / (dp * tp if by_tp else dp) for count, by_tp in parameters)


# %% gathers
def gathers(blocks, keep):
    return (1 if keep else 2) * blocks + 1


# %% sent
def sent(numbers, sums, tokens, width, dp, tp):
    along_tp = sums * 2 * (tp - 1) / tp * tokens * width * 4
    along_dp = 3 * (dp - 1) / dp * numbers / tp * 4
    return along_dp, along_tp
