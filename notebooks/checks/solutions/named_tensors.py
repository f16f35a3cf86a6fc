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
