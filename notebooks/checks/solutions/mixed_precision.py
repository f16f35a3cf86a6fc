# %% rounded
def rounded(value, bits):
    import math

    _, exponent = math.frexp(value)
    spacing = 2.0 ** (exponent - 1 - bits)
    return round(value / spacing) * spacing  # round takes the even one of a tie


# %% least_update
def least_update(weight, bits):
    import math

    _, exponent = math.frexp(weight)
    return 2.0 ** (exponent - 1 - bits) / 2


# %% scaled_step
def scaled_step(gradients, scale, clean, interval, all_reduce):
    finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
    flag = torch.tensor([0.0 if finite else 1.0])
    all_reduce(flag, "max")
    if flag.item():
        return False, scale / 2, 0
    for gradient in gradients:
        gradient /= scale
    if clean + 1 == interval:
        return True, scale * 2, 0
    return True, scale, clean + 1


# %% on_ranks
def unscale(gradients, scale, most):
    square = torch.zeros(())
    for gradient in gradients:
        square += (gradient / scale).square().sum()
    dist.all_reduce(square)
    if not square.isfinite():
        return False
    norm = square.sqrt().item()
    for gradient in gradients:
        gradient *= min(1.0, most / norm) / scale
    return True


# %% compensated
def compensated(total, lost, update):
    wanted = update + lost
    new = total + wanted
    return new, wanted - (new - total)
