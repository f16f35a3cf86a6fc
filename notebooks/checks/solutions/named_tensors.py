# %% standardise
def standardise(x, over):
    return (x - x.mean(over, keepdim=True)) / x.std(over, keepdim=True)


# %% scale_channels
def scale_channels(images, scale):
    return images * scale.align_as(images)


# %% attention
def attention(query, key, value):
    scores = contract(query, key, to=("N", "T", "S")) / query.size("E") ** 0.5
    return contract(scores.softmax("S"), value, to=("N", "T", "V"))


# %% with_heads
def with_heads(query, key, value, heads):
    size = query.size("E") // heads
    query, key, value = (each.unflatten("E", [("head", heads), ("D", size)]) for each in (query, key, value))
    scores = contract(query, key, to=("N", "head", "T", "S")) / size**0.5
    return contract(scores.softmax("S"), value, to=("N", "T", "head", "D")).flatten(["head", "D"], "E")
