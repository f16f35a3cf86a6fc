# %% standardise: wrong, loses the dimension | from the right
# (x - x.mean(over, keepdim=True)) / x.std(over, keepdim=True) => (x - x.mean(over)) / x.std(over)
# %% standardise: wrong, always the last one | Over 'N'
def standardise(x, over):
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)


# %% standardise: wrong, drops the names | names are gone
def standardise(x, over):
    return ((x - x.mean(over, keepdim=True)) / x.std(over, keepdim=True)).rename(None)


# %% standardise: wrong, subtracts alone | Over 'C' the mean
# (x - x.mean(over, keepdim=True)) / x.std => x - x.mean
# %% standardise: wrong, divides by the variance | you divide by the variance
# std(over, keepdim=True) => std(over, keepdim=True) ** 2
# %% standardise: wrong, divides first | Over 'C' the mean
# (x - x.mean(over, keepdim=True)) / x.std => x / x.std(over, keepdim=True) - x.mean
# %% standardise: wrong, over everything | Over 'C' the mean
# (x - x.mean(over, keepdim=True)) / x.std(over, keepdim=True) => (x - x.mean()) / x.std()
# %% standardise: wrong, divides by n | and yours by n
def standardise(x, over):
    centred = x - x.mean(over, keepdim=True)
    return centred / (centred * centred).mean(over, keepdim=True) ** 0.5


# %%% standardise: wrong, changes the tensor | has changed the tensor (N, T, C)
# centred = x - => x -=
# centred / (centred * centred).mean(over, keepdim=True) ** 0.5 => x / x.std(over, keepdim=True)
# %% standardise: wrong, for the names N, T and C alone | a tensor (row, N) raised
def standardise(x, over):
    x = x.align_to("N", "T", "C")
    return (x - x.mean(over, keepdim=True)) / x.std(over, keepdim=True)


# %%% standardise: wrong, in another order | should be (N, T, C), not
# "N", "T", "C" => ..., over
# %% scale_channels: wrong, channels must be last | For images (N, C, H, W) it raised NamesError
# scale.align_as(images) => scale
# %% scale_channels: wrong, without names at a fixed place | another dimension than C
# align_as(images) => rename(None).view(3, 1, 1)
# %% scale_channels: wrong, turns the images | should be (N, C, H, W), not
# return images * scale.align_as(images) => return images.align_to(..., "C") * scale
# %% scale_channels: wrong, adds | another dimension than C
# * scale. => + scale.
# %% scale_channels: wrong, aligns the other one | For images (N, H, W, C) it raised
# images * scale.align_as(images) => images.align_as(scale) * scale
# %% scale_channels: wrong, sums the channels | should be (N, H, W, C), not
# images * scale.align_as(images) => contract(images, scale, to=tuple(name for name in images.names if name != "C"))
# %% scale_channels: wrong, changes the images | has changed the tensor
def scale_channels(images, scale):
    images *= scale.align_as(images)
    return images


# %% scale_channels: wrong, one number for all | another dimension than C
# align_as(images) => sum()
# %% attention: wrong, over the queries | should add up to 1
# ("S"), value => ("T"), value
# %% attention: wrong, no scaling | divide them by its root
# ) / query.size("E") ** 0.5 => )
# %% attention: wrong, in another order | should be (N, T, V)
# "N", "T", "V" => "T", "N", "V"
# %% attention: wrong, divides by the size | square root of the size of E, not by the size
# ("E") ** 0.5 => ("E")
# %% attention: wrong, no softmax | the numbers are not those of attention
# .softmax("S"), => ,
# %% attention: wrong, a transpose by number | For a key (E, S, N) it raised
# contract(query, key, to=("N", "T", "S")) => query @ key.transpose(1, 2)
# return contract(scores.softmax("S"), value, to=("N", "T", "V")) => return scores.softmax(-1) @ value
# %% attention: wrong, the size of another dimension | the numbers are not those of attention
# query.size("E") => key.size("S")
# %% attention: wrong, sums over the batch | should be (N, T, V), not
# "N", "T", "S" => "T", "S"
# "N", "T", "V" => "T", "V"
# %% attention: wrong, the root of the size of the values | not those of attention
# query.size("E") => value.size("V")
# %% attention: wrong, the root of 4 | of size 9 in E: the names are right
# query.size("E") ** 0.5 => 2
# %% attention: wrong, divides by the size of the batch | of size 9 in E: the names are right
# ("E") ** 0.5 => ("N")
# %% attention: wrong, half the size for its root | of size 9 in E: the names are right
# query.size("E") ** 0.5 => (query.size("E") / 2)
# %% with_heads: wrong, one head | the numbers are not right
def with_heads(query, key, value, heads):
    scores = contract(query, key, to=("N", "T", "S")) / query.size("E") ** 0.5
    return contract(scores.softmax("S"), value, to=("N", "T", "E"))


# %% with_heads: wrong, the root of the whole size | not of that of one head
# size = query.size("E") // heads => whole = query.size("E")
# "D", size => "D", whole // heads
# size**0. => whole**0.
# %% with_heads: wrong, heads take every second number | does not have the first numbers
# ("head", heads), ("D", size) => ("D", size), ("head", heads)
# %% with_heads: wrong, heads are mixed when they are put together | put together in another order
# , "head", "D" => , "D", "head"
# ["head", "D"] => ["D", "head"]
# %% with_heads: wrong, adds up the heads | should be (N, T, E), not
# ("N", "T", "head", "D")).flatten(["head", "D"], "E" => ("N", "T", "D")
# %% with_heads: wrong, leaves the heads apart | should be (N, T, E), not
# ).flatten(["head", "D"], "E") => )
# %% with_heads: wrong, adds up the scores of all heads | have the same weights
# "head", "T" => "T"
# %% with_heads: wrong, for two heads only | raised
# "head", heads => "head", 2
# %% with_heads: wrong, over the queries | the numbers are not right
# ("S"), value => ("T"), value
