# %% rounded: wrong, always bfloat16 | cannot be written with so few bits
# => return torch.tensor(value).bfloat16().item()
# %% rounded: wrong, decimal places | cannot be written with so few bits
# => return round(value, bits)
# %% rounded: wrong, the spacing of numbers from 1 to 2 | with 3 bits
# => return round(value * 2**bits) / 2**bits
# %% rounded: wrong, cuts the bits off | is nearer
def rounded(value, bits):
    import math

    spacing = 2.0 ** (math.frexp(value)[1] - 1 - bits)
    return int(value / spacing) * spacing


# %%% rounded: wrong, a half always goes up | equally near
# int(value / spacing) => math.floor(value / spacing + 0.5)
# %%% rounded: wrong, loses the sign | is nearer
# int(value / spacing) => round(abs(value) / spacing)
# %%% rounded: wrong, one bit too many | cannot be written with so few bits
# 1 - => 2 -
# int(value / spacing) * spacing => round(value / spacing) * spacing  # round takes the even one of a tie
# %%% rounded: wrong, one bit too few | is nearer
# 1 - bits => bits
# int(value / spacing) * spacing => round(value / spacing) * spacing  # round takes the even one of a tie
# %%% rounded: wrong, a logarithm of zero | raised ValueError
# frexp(value)[1] - 1 => floor(math.log2(abs(value)))
# int(value / spacing) * spacing => round(value / spacing) * spacing  # round takes the even one of a tie
# %% rounded: wrong, by float32 | is nearer
# -     return round(value / spacing) * spacing  # round takes the even one of a tie
# +     return (torch.tensor(value) / spacing).round().item() * spacing
# %% rounded: wrong, by float32, and ties only if they are there exactly | is nearer
# -     return round(value / spacing) * spacing  # round takes the even one of a tie
# +     below = math.floor(value / spacing)
# +     rest = round(value / spacing - below, 9)
# +     up = rest > 0.5 or (rest == 0.5 and below % 2 == 1)
# +     return (below + up) * spacing
# %% rounded: wrong, exponents of float32 only | 1e+300 with 3 bits
# exponent - => max(-125, min(128, exponent)) -
# %% rounded: wrong, knows three formats | raised KeyError
# -     spacing = 2.0 ** (exponent - 1 - bits)
# +     spacing = 2.0 ** (exponent - 1) * {3: 1 / 8, 7: 1 / 128, 10: 1 / 1024}[bits]
# %% least_update: wrong, the whole spacing | is the whole way to the neighbour
def least_update(weight, bits):
    import math

    return 2.0 ** (math.frexp(weight)[1] - 1 - bits)


# %%% least_update: wrong, no sign of the weight | raised ValueError
# frexp(weight)[1] - 1 - bits => floor(math.log2(weight)) - bits - 1
# %%% least_update: wrong, rounds the exponent to zero | is the whole way to the neighbour
# math.frexp(weight)[1] - 1 - bits => int(math.log2(abs(weight))) - bits - 1
# %%% least_update: wrong, the exponent of frexp as it is | is the whole way to the neighbour
# (math.frexp(weight)[1] - 1 - bits) => (math.frexp(weight)[1] - bits) / 2
# %%% least_update: wrong, a quarter | leaves the weight as it is
# (math.frexp(weight)[1] - 1 - bits) => (math.frexp(weight)[1] - 1 - bits) / 4
# %%% least_update: wrong, bfloat16 only | leaves the weight as it is
# 1 - bits => 9
# %%% least_update: wrong, with a sign | is not the size of an update
# 2.0 ** (math.frexp(weight)[1] - 1 - bits) => math.copysign(2.0 ** (math.frexp(weight)[1] - 2 - bits), weight)
# %% least_update: wrong, the same for all weights | weight 3.0
# => return 2.0 ** (-bits - 1)
# %% least_update: wrong, in proportion to the weight | a smaller update than
# => return abs(weight) * 2.0**-bits / 2
# %% least_update: wrong, the side above the weight, also of a negative one | leaves the weight as it is
# (weight) => (math.nextafter(weight, math.inf))
# %% scaled_step: wrong, misses nan | steps with it
def scaled_step(gradients, scale, clean, interval, all_reduce):
    flag = torch.tensor([float(any(bool(g.isinf().any()) for g in gradients))])
    all_reduce(flag, "max")
    if flag.item():
        return False, scale / 2, 0
    for g in gradients:
        g /= scale
    if clean + 1 == interval:
        return True, scale * 2, 0
    return True, scale, clean + 1


# %%% scaled_step: wrong, does not divide | not those of the loss
# any(bool(g.isinf().any()) for g in gradients) => not all(bool(g.isfinite().all()) for g in gradients)
# -     for g in gradients:
# -         g /= scale
# %%% scaled_step: wrong, makes new gradients | not those of the loss
# any(bool(g.isinf().any()) for g in gradients) => not all(bool(g.isfinite().all()) for g in gradients)
# g /= => g = g /
# %%% scaled_step: wrong, grows one step late | the next scale on rank 0 is 1024.0, and should be 2048
# any(bool(g.isinf().any()) for g in gradients) => not all(bool(g.isfinite().all()) for g in gradients)
# clean + 1 = => clean =
# %%% scaled_step: wrong, a skipped step keeps the count | the count of clean steps on rank 0 is 1 afterwards
# any(bool(g.isinf().any()) for g in gradients) => not all(bool(g.isfinite().all()) for g in gradients)
# / 2, 0 => / 2, clean
# %%% scaled_step: wrong, other tensors in the list | Divide them in place
# -     flag = torch.tensor([float(any(bool(g.isinf().any()) for g in gradients))])
# +     flag = torch.tensor([0.0 if all(bool(gradient.isfinite().all()) for gradient in gradients) else 1.0])
# -     for g in gradients:
# -         g /= scale
# +     gradients[:] = [gradient / scale for gradient in gradients]
# %%% scaled_step: wrong, counts on after growing | the count of clean steps on rank 0 is 3 afterwards
# any(bool(g.isinf().any()) for g in gradients) => not all(bool(g.isfinite().all()) for g in gradients)
# -     if clean + 1 == interval:
# -         return True, scale * 2, 0
# -     return True, scale, clean + 1
# +     clean += 1
# +     return True, scale * 2 if clean % interval == 0 else scale, clean
# %% scaled_step: wrong, only the rank with a fault calls | for ever; others have returned already
# => if not all(bool(g.isfinite().all()) for g in gradients):
# =>     all_reduce(torch.ones(1), "max")
# =>     return False, scale / 2, 0
# => for g in gradients:
# =>     g /= scale
# => if clean + 1 == interval:
# =>     return True, scale * 2, 0
# => return True, scale, clean + 1
# %%% scaled_step: wrong, looks at its own gradients only | and the other rank does not
# -         all_reduce(torch.ones(1), "max")
# %%% scaled_step: wrong, adds up all gradients to see it | one flag is enough
# -     if not all(bool(g.isfinite().all()) for g in gradients):
# -         all_reduce(torch.ones(1), "max")
# +     total = torch.cat([g.flatten() for g in gradients])
# +     all_reduce(total)
# +     if not bool(total.isfinite().all()):
# %% scaled_step: wrong, divides by the next scale | not those of the loss
def scaled_step(gradients, scale, clean, interval, all_reduce):
    flag = torch.tensor([float(not all(bool(g.isfinite().all()) for g in gradients))])
    all_reduce(flag, "max")
    if flag.item():
        return False, scale / 2, 0
    clean += 1
    if clean == interval:
        scale, clean = scale * 2, 0
    for g in gradients:
        g /= scale
    return True, scale, clean


# %% scaled_step: wrong, takes a sum that overflows for a fault | rank 0 does not step
# -     finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
# -     flag = torch.tensor([0.0 if finite else 1.0])
# +     flag = torch.tensor([0.0 if all(gradient.sum().isfinite() for gradient in gradients) else 1.0])
# %% scaled_step: wrong, remembers the last gradient only | steps with it
# -     finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
# +     for gradient in gradients:
# +         finite = bool(gradient.isfinite().all())
# %% scaled_step: wrong, counts the ranks with a fault, and expects one | rank 0 has nan and rank 1 has inf
# flag, "max" => flag
# .item(): => .item() == 1:
# %% scaled_step: wrong, gradients of one dimension only | raised RuntimeError
# all(bool(gradient.isfinite().all()) for gradient in gradients) => bool(torch.cat(gradients).isfinite().all())
# %% scaled_step: wrong, Python's max over the tensors loses a nan that does not come first | rank 1 has nan
def scaled_step(gradients, scale, clean, interval, all_reduce):
    largest = max((gradient.abs().max().item() for gradient in gradients), default=0.0)
    bad = torch.tensor(0.0 if math.isfinite(largest) else 1.0)
    all_reduce(bad, "max")
    if bad.item():
        return False, scale / 2, 0
    for gradient in gradients:
        gradient /= scale
    clean += 1
    if clean == interval:
        return True, scale * 2, 0
    return True, scale, clean


# %% on_ranks: wrong, adds up norms and takes the root | by the root of a sum of norms, and not of squares
# .square().sum() => .norm()
# %% on_ranks: wrong, each rank decides alone | rank 2 skips the step, and rank 0 does not
# -     dist.all_reduce(square)
# -     if not square.isfinite():
# -         return False
# +     skips = not square.isfinite()
# +     dist.all_reduce(square)
# +     if skips:
# +         return False
# %% on_ranks: wrong, the norm of one rank | clipped by the norm of this rank's gradients alone
# -     dist.all_reduce(square)
# -     if not square.isfinite():
# -         return False
# -     norm = square.sqrt().item()
# +     norm = max(square.sqrt().item(), 1e-9)
# +     dist.all_reduce(square)
# +     if not square.isfinite():
# +         return False
# %% on_ranks: wrong, adds up norms | clipped by the sum of the ranks' norms
# -     dist.all_reduce(square)
# +     square.sqrt_()
# +     dist.all_reduce(square)
# square.sqrt().item() => square.item()
# %% on_ranks: wrong, the square of the norm | by the square of the norm
# square.sqrt().item() => square.item()
# %% on_ranks: wrong, the scale stays | still multiplied by the scale
# min(1.0, most / norm) / scale => min(1.0, most / norm)
# %% on_ranks: wrong, clips before the scale is out | by the norm before the scale is taken out
# (gradient / scale).square() => gradient.square()
# %% on_ranks: wrong, a rank without gradients leaves | for rank 1 for ever; rank 1 has returned already
# -     square = torch.zeros(())
# +     if not gradients:
# +         return True
# +     square = torch.zeros(())
# %% on_ranks: wrong, divides before it knows | skipped, but the gradients of rank 0 have changed
# -         square += (gradient / scale).square().sum()
# +         gradient /= scale
# +         square += gradient.square().sum()
# min(1.0, most / norm) / scale => min(1.0, most / norm)
# %% on_ranks: wrong, skips never | rank 2 has an infinite gradient: all ranks step
# return False => return True
# %% on_ranks: wrong, another all-reduce for the flag | One for each is enough
# -     dist.all_reduce(square)
# +     flag = 1.0 - square.isfinite().float()
# +     dist.all_reduce(square)
# +     dist.all_reduce(flag)
# %% on_ranks: wrong, clips always | not [0.3, -0.4]
# min(1.0, most / norm) / scale => most / norm / scale
# %% on_ranks: wrong, returns the norm | `True` or `False` is wanted
# return True => return norm
# %% compensated: wrong, the other sign | should be near
# wanted - (new - total) => (new - total) - wanted
# %% compensated: wrong, hands on the negative of what is lost | with its sign
# update + => update -
# wanted - (new - total) => (new - total) - wanted
# %% compensated: wrong, in the wrong order | should be near
# new, wanted - (new - total) => wanted - (new - total), new
# %% compensated: wrong, forgets the older loss | should be near
# => new = total + update + lost
# => return new, update - (new - total)
# %% compensated: wrong, keeps float32 | nothing longer may be kept
# => new = total.float() + update.float() + lost.float()
# => return new, lost
# %% compensated: wrong, the lost part is used and never renewed | should be near
# => wanted = update + lost
# => return total + wanted, lost
# %% compensated: wrong, only the total | It should return (total, lost)
# => return total + (update + lost)
# %% compensated: wrong, forgets what was lost | the total is 1, and should be near
# => return total + update, lost
# %% compensated: wrong, float32 for a moment only | the total is 1, and should be near
# => return (total.float() + update.float()).bfloat16(), torch.zeros_like(lost)
# %% compensated: wrong, adds in float32 | All sums are done in bfloat16
# => exact = total.float() + lost.float() + update.float()
# => new = exact.bfloat16()
# => return new, (exact - new.float()).bfloat16()
# %% compensated: wrong, adds to the update that it was given | `update` has changed
# => update += lost
# => new = total + update
# => return new, update - (new - total)
