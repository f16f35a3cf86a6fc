# %% standardise: wrong, loses the dimension | from the right
def standardise(x, over):
    return (x - x.mean(over)) / x.std(over)


# %% standardise: wrong, always the last one | Over 'N'
def standardise(x, over):
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)


# %% standardise: wrong, drops the names | names are gone
def standardise(x, over):
    return ((x - x.mean(over, keepdim=True)) / x.std(over, keepdim=True)).rename(None)


# %% standardise: wrong, subtracts alone | Over 'C' the mean
def standardise(x, over):
    return x - x.mean(over, keepdim=True)


# %% standardise: wrong, divides by the variance | you divide by the variance
def standardise(x, over):
    return (x - x.mean(over, keepdim=True)) / x.std(over, keepdim=True) ** 2


# %% standardise: wrong, divides first | Over 'C' the mean
def standardise(x, over):
    return x / x.std(over, keepdim=True) - x.mean(over, keepdim=True)


# %% standardise: wrong, over everything | Over 'C' the mean
def standardise(x, over):
    return (x - x.mean()) / x.std()


# %% standardise: wrong, changes the tensor | has changed the tensor (N, T, C)
def standardise(x, over):
    x -= x.mean(over, keepdim=True)
    return x / x.std(over, keepdim=True)


# %% standardise: wrong, in another order | should be (N, T, C), not
def standardise(x, over):
    x = x.align_to(..., over)
    return (x - x.mean(over, keepdim=True)) / x.std(over, keepdim=True)


# %% scale_channels: wrong, channels must be last | For images (N, C, H, W) it raised NamesError
def scale_channels(images, scale):
    return images * scale


# %% scale_channels: wrong, without names at a fixed place | another dimension than C
def scale_channels(images, scale):
    return images * scale.rename(None).view(3, 1, 1)


# %% scale_channels: wrong, turns the images | should be (N, C, H, W), not
def scale_channels(images, scale):
    return images.align_to(..., "C") * scale


# %% scale_channels: wrong, adds | another dimension than C
def scale_channels(images, scale):
    return images + scale.align_as(images)


# %% scale_channels: wrong, aligns the other one | For images (N, H, W, C) it raised
def scale_channels(images, scale):
    return images.align_as(scale) * scale


# %% scale_channels: wrong, sums the channels | should be (N, H, W, C), not
def scale_channels(images, scale):
    return contract(images, scale, to=tuple(name for name in images.names if name != "C"))


# %% scale_channels: wrong, changes the images | has changed the tensor
def scale_channels(images, scale):
    images *= scale.align_as(images)
    return images


# %% scale_channels: wrong, one number for all | another dimension than C
def scale_channels(images, scale):
    return images * scale.sum()


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


# %% attention: wrong, divides by the size | square root of the size of E, not by the size
def attention(query, key, value):
    scores = contract(query, key, to=("N", "T", "S")) / query.size("E")
    return contract(scores.softmax("S"), value, to=("N", "T", "V"))


# %% attention: wrong, no softmax | the numbers are not those of attention
def attention(query, key, value):
    scores = contract(query, key, to=("N", "T", "S")) / query.size("E") ** 0.5
    return contract(scores, value, to=("N", "T", "V"))


# %% attention: wrong, a transpose by number | For a key (E, S, N) it raised
def attention(query, key, value):
    scores = query @ key.transpose(1, 2) / query.size("E") ** 0.5
    return scores.softmax(-1) @ value


# %% attention: wrong, the size of another dimension | the numbers are not those of attention
def attention(query, key, value):
    scores = contract(query, key, to=("N", "T", "S")) / key.size("S") ** 0.5
    return contract(scores.softmax("S"), value, to=("N", "T", "V"))


# %% attention: wrong, sums over the batch | should be (N, T, V), not
def attention(query, key, value):
    scores = contract(query, key, to=("T", "S")) / query.size("E") ** 0.5
    return contract(scores.softmax("S"), value, to=("T", "V"))


# %% with_heads: wrong, one head | the numbers are not right
def with_heads(query, key, value, heads):
    scores = contract(query, key, to=("N", "T", "S")) / query.size("E") ** 0.5
    return contract(scores.softmax("S"), value, to=("N", "T", "E"))


# %% with_heads: wrong, the root of the whole size | not of that of one head
def with_heads(query, key, value, heads):
    whole = query.size("E")
    query, key, value = (each.unflatten("E", [("head", heads), ("D", whole // heads)]) for each in (query, key, value))
    scores = contract(query, key, to=("N", "head", "T", "S")) / whole**0.5
    return contract(scores.softmax("S"), value, to=("N", "T", "head", "D")).flatten(["head", "D"], "E")


# %% with_heads: wrong, heads take every second number | does not have the first numbers
def with_heads(query, key, value, heads):
    size = query.size("E") // heads
    query, key, value = (each.unflatten("E", [("D", size), ("head", heads)]) for each in (query, key, value))
    scores = contract(query, key, to=("N", "head", "T", "S")) / size**0.5
    return contract(scores.softmax("S"), value, to=("N", "T", "head", "D")).flatten(["head", "D"], "E")


# %% with_heads: wrong, heads are mixed when they are put together | put together in another order
def with_heads(query, key, value, heads):
    size = query.size("E") // heads
    query, key, value = (each.unflatten("E", [("head", heads), ("D", size)]) for each in (query, key, value))
    scores = contract(query, key, to=("N", "head", "T", "S")) / size**0.5
    return contract(scores.softmax("S"), value, to=("N", "T", "D", "head")).flatten(["D", "head"], "E")


# %% with_heads: wrong, adds up the heads | should be (N, T, E), not
def with_heads(query, key, value, heads):
    size = query.size("E") // heads
    query, key, value = (each.unflatten("E", [("head", heads), ("D", size)]) for each in (query, key, value))
    scores = contract(query, key, to=("N", "head", "T", "S")) / size**0.5
    return contract(scores.softmax("S"), value, to=("N", "T", "D"))


# %% with_heads: wrong, leaves the heads apart | should be (N, T, E), not
def with_heads(query, key, value, heads):
    size = query.size("E") // heads
    query, key, value = (each.unflatten("E", [("head", heads), ("D", size)]) for each in (query, key, value))
    scores = contract(query, key, to=("N", "head", "T", "S")) / size**0.5
    return contract(scores.softmax("S"), value, to=("N", "T", "head", "D"))


# %% with_heads: wrong, adds up the scores of all heads | have the same weights
def with_heads(query, key, value, heads):
    size = query.size("E") // heads
    query, key, value = (each.unflatten("E", [("head", heads), ("D", size)]) for each in (query, key, value))
    scores = contract(query, key, to=("N", "T", "S")) / size**0.5
    return contract(scores.softmax("S"), value, to=("N", "T", "head", "D")).flatten(["head", "D"], "E")


# %% with_heads: wrong, for two heads only | raised
def with_heads(query, key, value, heads):
    size = query.size("E") // heads
    query, key, value = (each.unflatten("E", [("head", 2), ("D", size)]) for each in (query, key, value))
    scores = contract(query, key, to=("N", "head", "T", "S")) / size**0.5
    return contract(scores.softmax("S"), value, to=("N", "T", "head", "D")).flatten(["head", "D"], "E")


# %% with_heads: wrong, over the queries | the numbers are not right
def with_heads(query, key, value, heads):
    size = query.size("E") // heads
    query, key, value = (each.unflatten("E", [("head", heads), ("D", size)]) for each in (query, key, value))
    scores = contract(query, key, to=("N", "head", "T", "S")) / size**0.5
    return contract(scores.softmax("T"), value, to=("N", "T", "head", "D")).flatten(["head", "D"], "E")


# %% attention: wrong, the root of the size of the values | not those of attention
def attention(query, key, value):
    scores = contract(query, key, to=("N", "T", "S")) / value.size("V") ** 0.5
    return contract(scores.softmax("S"), value, to=("N", "T", "V"))


# %% standardise: wrong, divides by n | and yours by n
def standardise(x, over):
    centred = x - x.mean(over, keepdim=True)
    return centred / (centred * centred).mean(over, keepdim=True) ** 0.5


# %% standardise: wrong, for the names N, T and C alone | a tensor (row, N) raised
def standardise(x, over):
    x = x.align_to("N", "T", "C")
    return (x - x.mean(over, keepdim=True)) / x.std(over, keepdim=True)


# %% attention: wrong, the root of 4 | of size 9 in E: the names are right
def attention(query, key, value):
    scores = contract(query, key, to=("N", "T", "S")) / 2
    return contract(scores.softmax("S"), value, to=("N", "T", "V"))


# %% attention: wrong, divides by the size of the batch | of size 9 in E: the names are right
def attention(query, key, value):
    scores = contract(query, key, to=("N", "T", "S")) / query.size("N")
    return contract(scores.softmax("S"), value, to=("N", "T", "V"))


# %% attention: wrong, half the size for its root | of size 9 in E: the names are right
def attention(query, key, value):
    scores = contract(query, key, to=("N", "T", "S")) / (query.size("E") / 2)
    return contract(scores.softmax("S"), value, to=("N", "T", "V"))
