# %% step_flops
def step_flops(layers, width, hidden, vocabulary, rows, length):
    weights = layers * (4 * width * width + 2 * width * hidden) + width * vocabulary
    attention = layers * 4 * length * width
    forward = rows * length * (2 * weights + attention)
    return 3 * forward


# %% intensity
def intensity(m, k, n, number_bytes):
    flops = 2 * m * k * n
    numbers = m * k + k * n + m * n
    return flops / (numbers * number_bytes)


# %% bound_time
def bound_time(flops, moved, peak, bandwidth):
    computing = flops / peak
    moving = moved / bandwidth
    return max(computing, moving), "compute-bound" if computing > moving else "memory-bound"


# %% utilization
def utilization(parameters, layers, width, length, tokens_per_second, peak):
    for_a_token = 6 * parameters + 12 * layers * length * width
    return for_a_token * tokens_per_second / peak


# %% least_tokens
def least_tokens(inputs, outputs, number_bytes, peak, bandwidth):
    ridge = number_bytes * peak / bandwidth
    gain = 2 * inputs * outputs - ridge * (inputs + outputs)
    if gain <= 0:
        return None
    return math.ceil(ridge * inputs * outputs / gain)
