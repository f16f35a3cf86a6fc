# %% standardise: wrong, loses the dimension | from the right
def standardise(x, over):
    return (x - x.mean(over)) / x.std(over)


# %% standardise: wrong, always the last one | Over 'N'
def standardise(x, over):
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)


# %% standardise: wrong, drops the names | names are gone
def standardise(x, over):
    return ((x - x.mean(over, keepdim=True)) / x.std(over, keepdim=True)).rename(None)


# %% scale_channels: wrong, channels must be last | For images (N, C, H, W) it raised NamesError
def scale_channels(images, scale):
    return images * scale


# %% scale_channels: wrong, without names at a fixed place | another dimension than C
def scale_channels(images, scale):
    return images * scale.rename(None).view(3, 1, 1)


# %% scale_channels: wrong, turns the images | should be (N, C, H, W), not
def scale_channels(images, scale):
    return images.align_to(..., "C") * scale


# %% attention: wrong, over the queries | should add up to 1
def attention(query, key, value):
    scores = contract(query, key, to=("N", "T", "S")) / query.size("E") ** 0.5
    return contract(scores.softmax("T"), value, to=("N", "T", "V"))


# %% attention: wrong, no scaling | divide them by its root
def attention(query, key, value):
    scores = contract(query, key, to=("N", "T", "S"))
    return contract(scores.softmax("S"), value, to=("N", "T", "V"))


# %% attention: wrong, in another order | should be (N, T, V)
def attention(query, key, value):
    scores = contract(query, key, to=("N", "T", "S")) / query.size("E") ** 0.5
    return contract(scores.softmax("S"), value, to=("T", "N", "V"))
