# %% step_flops: wrong, forward alone | Yours are those of forward alone
# return 3 * forward => return forward
# %% step_flops: wrong, backward as forward | Backward counts as much as forward
# return 3 * forward => return 2 * forward
# %% step_flops: wrong, multiplications alone | counts one
# (2 * weights + attention) => (weights + attention / 2)
# %% step_flops: wrong, no attention | this is 6ND
# (2 * weights + attention) => (2 * weights)
# %% step_flops: wrong, counts the table of vectors | only copies a row
# + width * vocabulary => + 2 * width * vocabulary
# %% step_flops: wrong, no head | The head is missing
# + width * vocabulary => + 0
# %% step_flops: wrong, a token reads all rows | not the rows beside it
# 4 * length * width => 4 * rows * length * width
# %% step_flops: wrong, one product in attention, or half of a row | Attention has two products, and a token reads
# 4 * length * width => 2 * length * width
# %% step_flops: wrong, backward without forward | or forward is missing
# return 3 * forward => return 2 * forward
# %% step_flops: wrong, no matrices in attention | The four matrices of attention are missing
# 4 * width * width + 2 => 2
# %% step_flops: wrong, one matrix in the network | has two matrices
# 2 * width * hidden => width * hidden
# %% step_flops: wrong, the network is four times as wide | width 8, hidden 24
# 2 * width * hidden => 8 * width * width
# %% step_flops: wrong, one row | of one row
# = rows * length * => = length *
# %% step_flops: right, attention by the row
# => dense = 6 * rows * length * (layers * width * (4 * width + 2 * hidden) + width * vocabulary)
# => return float(dense + 3 * rows * layers * 2 * 2 * length**2 * width)
# %% intensity: wrong, bytes per operation | bytes per operation
# return flops / (numbers * number_bytes) => return numbers * number_bytes / flops
# %% intensity: wrong, multiplications alone | counts one
# flops = 2 * => flops =
# %% intensity: wrong, no result | The result is written, too
# n + m * n => n
# %% intensity: wrong, float32 always | takes 4 bytes
# numbers * number_bytes => numbers * 4
# %% intensity: wrong, per number | not for each byte
# (numbers * number_bytes) => numbers
# %% intensity: wrong, the weights alone | the weights alone
# numbers = m * k + k * n + m * n => numbers = k * n
# %% intensity: wrong, squares | you say
# => return m / (number_bytes * 1.5)
# %% bound_time: wrong, one after the other | computes while it moves
# max(computing, moving) => computing + moving
# %% bound_time: wrong, the shorter | hides behind the longer
# max(computing, moving) => min(computing, moving)
# %% bound_time: wrong, names swapped | so it is memory-bound
# computing > moving => computing < moving
# %% bound_time: wrong, seconds alone | (seconds, bound) is wanted
# max(computing, moving), "compute-bound" if computing > moving else "memory-bound" => max(computing, moving)
# %% bound_time: wrong, a rate | operations per second
# max(computing, moving) => flops / max(computing, moving)
# %% bound_time: wrong, other words | not 'memory'
# "memory-bound" => "memory"
# %% bound_time: wrong, divides by operations | raised ZeroDivisionError
# moving = moved / bandwidth => moving = computing * (peak / bandwidth) / (flops / moved)
# %% bound_time: wrong, more operations than bytes | so it is memory-bound
# computing > moving else => flops > moved else
# %% utilization: wrong, per cent | in per cent
# return for_a_token => return 100 * for_a_token
# %% utilization: wrong, forward alone | forward alone
# 6 * parameters + 12 * layers => 2 * parameters + 4 * layers
# %% utilization: wrong, no attention | Attention is missing
# 6 * parameters + 12 * layers * length * width => 6 * parameters
# %% utilization: wrong, recomputation | not of the model
# 6 * parameters + 12 * layers => 8 * parameters + 16 * layers
# %% utilization: wrong, recomputation of the weights alone | not of the model
# 6 * parameters => 8 * parameters
# %% utilization: wrong, attention without backward | Attention has a backward, too
# 12 * layers => 4 * layers
# %% utilization: wrong, the square of the length | not with its square
# * length * => * length**2 *
# %% utilization: wrong, the other way round | times slower
# return for_a_token * tokens_per_second / peak => return peak / (for_a_token * tokens_per_second)
# %% least_tokens: wrong, the weights alone | Yours has the weights alone
# return math.ceil(ridge * inputs * outputs / gain) => return math.ceil(ridge / 2)
# %% least_tokens: wrong, rounds down | still memory-bound
# math.ceil( => math.floor(
# %% least_tokens: wrong, not whole | a whole number of tokens is wanted
# math.ceil(ridge * inputs * outputs / gain) => ridge * inputs * outputs / gain
# %% least_tokens: wrong, no None | below the ridge
# -     if gain <= 0:
# -         return None
# %% least_tokens: wrong, one more | one token fewer
# / gain) => / gain) + 1
# %% least_tokens: wrong, forgets the bytes | you say
# number_bytes * peak => peak
# %% least_tokens: wrong, no outputs | you say
# (inputs + outputs) => inputs
# %% least_tokens: right, tries one after another
# => for tokens in range(1, 100_000):
# =>     moved = number_bytes * (tokens * inputs + inputs * outputs + tokens * outputs)
# =>     if 2 * tokens * inputs * outputs / moved >= peak / bandwidth:
# =>         return tokens
