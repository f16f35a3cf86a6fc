# %% rows_held: wrong, in the order of the ranks | rank 1 is dp 0, tp 1
def rows_held(rows, dp, tp, rank):
    each = rows // (dp * tp)
    return list(range(rank * each, (rank + 1) * each))


# %% rows_held: wrong, FSDP's cut first | Tensor parallel cuts first
def rows_held(rows, dp, tp, rank):
    d, t = divmod(rank, tp)
    each = rows // (dp * tp)
    begin = d * (rows // dp) + t * each
    return list(range(begin, begin + each))


# %% rows_held: wrong, ranks counted along dp first | or ranks are counted along dp first
def rows_held(rows, dp, tp, rank):
    t, d = divmod(rank, dp)
    each = rows // (dp * tp)
    begin = t * (rows // tp) + d * each
    return list(range(begin, begin + each))


# %% rows_held: wrong, tensor parallel alone | holds 2 rows, not 4
def rows_held(rows, dp, tp, rank):
    each = rows // tp
    return list(range(rank % tp * each, (rank % tp + 1) * each))


# %% rows_held: wrong, a range for a list | should get a list, not range
def rows_held(rows, dp, tp, rank):
    d, t = divmod(rank, tp)
    each = rows // (dp * tp)
    begin = t * (rows // tp) + d * each
    return range(begin, begin + each)


# %% rows_held: wrong, right for square meshes alone | 24 rows, dp=2, tp=3
def rows_held(rows, dp, tp, rank):
    d, t = divmod(rank, dp)
    each = rows // (dp * tp)
    begin = t * (rows // tp) + d * each
    return list(range(begin, begin + each))


# %% rows_held: wrong, dealt like cards | rank 0 holds [0, 1], not [0, 4]
def rows_held(rows, dp, tp, rank):
    return list(range(rank, rows, dp * tp))


# %% rows_held: wrong, one row too many | holds 2 rows, not 3
def rows_held(rows, dp, tp, rank):
    d, t = divmod(rank, tp)
    each = rows // (dp * tp)
    begin = t * (rows // tp) + d * each
    return list(range(begin, begin + each + 1))


# %% rows_held: wrong, ranks from 1 | holds [0, 1], not
def rows_held(rows, dp, tp, rank):
    d, t = divmod(rank - 1, tp)
    each = rows // (dp * tp)
    begin = t * (rows // tp) + d * each
    return list(range(begin, begin + each))


# %% bytes_held: wrong, parameters alone | two numbers of Adam
def bytes_held(parameters, dp, tp):
    return sum(4 * count / (dp * tp if by_tp else dp) for count, by_tp in parameters)


# %% bytes_held: wrong, one number of Adam | two numbers of Adam
def bytes_held(parameters, dp, tp):
    return sum(12 * count / (dp * tp if by_tp else dp) for count, by_tp in parameters)


# %% bytes_held: wrong, all cut both ways | cut by FSDP alone
def bytes_held(parameters, dp, tp):
    return sum(16 * count / (dp * tp) for count, by_tp in parameters)


# %% bytes_held: wrong, the others whole | FSDP cuts the others, too
def bytes_held(parameters, dp, tp):
    return sum(16 * count / (dp * tp if by_tp else 1) for count, by_tp in parameters)


# %% bytes_held: wrong, the wrong dimension | a rank holds
def bytes_held(parameters, dp, tp):
    return sum(16 * count / (tp if by_tp else dp) for count, by_tp in parameters)


# %% bytes_held: wrong, of all ranks together | a rank holds
def bytes_held(parameters, dp, tp):
    return sum(16 * count for count, by_tp in parameters)


# %% bytes_held: wrong, each parameter, not the sum | should return a number
def bytes_held(parameters, dp, tp):
    return [16 * count / (dp * tp if by_tp else dp) for count, by_tp in parameters]


# %% gathers: wrong, without the model itself | parameters outside of its blocks
def gathers(blocks, keep):
    return (1 if keep else 2) * blocks


# %% gathers: wrong, the model itself twice | stays whole until its backward
def gathers(blocks, keep):
    return (1 if keep else 2) * blocks + 2


# %% gathers: wrong, forward alone | which groups are gathered, and when
def gathers(blocks, keep):
    return blocks + 1


# %% gathers: wrong, keep the other way round | 7 blocks, not kept
def gathers(blocks, keep):
    return (2 if keep else 1) * blocks + 1


# %% gathers: wrong, always twice | 7 blocks, kept
def gathers(blocks, keep):
    return 2 * blocks + 1


# %% gathers: wrong, the count of the lesson | 7 blocks, not kept
def gathers(blocks, keep):
    return 3 if keep else 5


# %% gathers: wrong, with the reduce-scatters | 7 blocks, not kept
def gathers(blocks, keep):
    return (1 if keep else 2) * blocks + 1 + blocks + 1


# %% sent: wrong, along tp first | the one along dp comes first
def sent(numbers, sums, tokens, width, dp, tp):
    along_tp = sums * 2 * (tp - 1) / tp * tokens * width * 4
    along_dp = 3 * (dp - 1) / dp * numbers / tp * 4
    return along_tp, along_dp


# %% sent: wrong, numbers for bytes | along dp a rank sends 14400 bytes, not 3600
def sent(numbers, sums, tokens, width, dp, tp):
    return 3 * (dp - 1) / dp * numbers / tp, sums * 2 * (tp - 1) / tp * tokens * width


# %% sent: wrong, an all-reduce sent once | along tp a rank sends
def sent(numbers, sums, tokens, width, dp, tp):
    return 3 * (dp - 1) / dp * numbers / tp * 4, sums * (tp - 1) / tp * tokens * width * 4


# %% sent: wrong, the whole model along dp | along dp a rank sends
def sent(numbers, sums, tokens, width, dp, tp):
    return 3 * (dp - 1) / dp * numbers * 4, sums * 2 * (tp - 1) / tp * tokens * width * 4


# %% sent: wrong, one gather | along dp a rank sends
def sent(numbers, sums, tokens, width, dp, tp):
    return 2 * (dp - 1) / dp * numbers / tp * 4, sums * 2 * (tp - 1) / tp * tokens * width * 4


# %% sent: wrong, a rank's piece counted as the whole | along dp a rank sends
def sent(numbers, sums, tokens, width, dp, tp):
    return 3 * (dp - 1) / dp * numbers / tp / dp * 4, sums * 2 * (tp - 1) / tp * tokens * width * 4


# %% sent: wrong, one vector for all tokens | along tp a rank sends
def sent(numbers, sums, tokens, width, dp, tp):
    return 3 * (dp - 1) / dp * numbers / tp * 4, sums * 2 * (tp - 1) / tp * width * 4


# %% sent: wrong, the sum of both | A pair is wanted
def sent(numbers, sums, tokens, width, dp, tp):
    return sums * 2 * (tp - 1) / tp * tokens * width * 4 + 3 * (dp - 1) / dp * numbers / tp * 4


# %% rows_held: wrong, tensors for numbers | a list of whole numbers, not [tensor(0)
def rows_held(rows, dp, tp, rank):
    import torch

    d, t = divmod(rank, tp)
    return list(torch.arange(rows).chunk(tp)[t].chunk(dp)[d])


# %% rows_held: wrong, at least two ranks along tp | 12 rows, dp=4, tp=1
def rows_held(rows, dp, tp, rank):
    d, t = divmod(rank, max(tp, 2))
    each = rows // (dp * tp)
    begin = t * (rows // tp) + d * each
    return list(range(begin, begin + each))
