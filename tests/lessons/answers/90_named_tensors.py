# %% standardise: wrong, loses the dimension | from the right
# => return (x - x.mean(over)) / x.std(over)
# %% standardise: wrong, always the last one | Over 'N'
# => return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)
# %% standardise: wrong, drops the names | names are gone
# => return ((x - x.mean(over, keepdim=True)) / x.std(over, keepdim=True)).rename(None)
# %% standardise: wrong, subtracts alone | Over 'C' the mean
# => return x - x.mean(over, keepdim=True)
# %% standardise: wrong, divides by the variance | you divide by the variance
# => return (x - x.mean(over, keepdim=True)) / x.std(over, keepdim=True) ** 2
# %% standardise: wrong, divides first | Over 'C' the mean
# => return x / x.std(over, keepdim=True) - x.mean(over, keepdim=True)
# %% standardise: wrong, over everything | Over 'C' the mean
# => return (x - x.mean()) / x.std()
# %% standardise: wrong, divides by n | and yours by n
# => centred = x - x.mean(over, keepdim=True)
# => return centred / (centred * centred).mean(over, keepdim=True) ** 0.5
# %% standardise: wrong, changes the tensor | has changed the tensor (N, T, C)
# => x -= x.mean(over, keepdim=True)
# => return x / x.std(over, keepdim=True)
# %% standardise: wrong, for the names N, T and C alone | a tensor (row, N) raised
# => x = x.align_to("N", "T", "C")
# => return (x - x.mean(over, keepdim=True)) / x.std(over, keepdim=True)
# %%% standardise: wrong, in another order | should be (N, T, C), not
# "N", "T", "C" => ..., over
# %% scale_channels: wrong, channels must be last | For images (N, C, H, W) it raised NamesError
# => return images * scale
# %% scale_channels: wrong, without names at a fixed place | another dimension than C
# => return images * scale.rename(None).view(3, 1, 1)
# %% scale_channels: wrong, turns the images | should be (N, C, H, W), not
# => return images.align_to(..., "C") * scale
# %% scale_channels: wrong, adds | another dimension than C
# => return images + scale.align_as(images)
# %% scale_channels: wrong, aligns the other one | For images (N, H, W, C) it raised
# => return images.align_as(scale) * scale
# %% scale_channels: wrong, sums the channels | should be (N, H, W, C), not
# => return contract(images, scale, to=tuple(name for name in images.names if name != "C"))
# %% scale_channels: wrong, changes the images | has changed the tensor
# => images *= scale.align_as(images)
# => return images
# %% scale_channels: wrong, one number for all | another dimension than C
# => return images * scale.sum()
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
# => scores = query @ key.transpose(1, 2) / query.size("E") ** 0.5
# => return scores.softmax(-1) @ value
# %% attention: wrong, the size of another dimension | the numbers are not those of attention
# query.size("E") => key.size("S")
# %% attention: wrong, sums over the batch | should be (N, T, V), not
# => scores = contract(query, key, to=("T", "S")) / query.size("E") ** 0.5
# => return contract(scores.softmax("S"), value, to=("T", "V"))
# %% attention: wrong, the root of the size of the values | not those of attention
# query.size("E") => value.size("V")
# %% attention: wrong, the root of 4 | of size 9 in E: the names are right
# query.size("E") ** 0.5 => 2
# %% attention: wrong, divides by the size of the batch | of size 9 in E: the names are right
# ("E") ** 0.5 => ("N")
# %% attention: wrong, half the size for its root | of size 9 in E: the names are right
# query.size("E") ** 0.5 => (query.size("E") / 2)
# %% with_heads: wrong, one head | the numbers are not right
# => scores = contract(query, key, to=("N", "T", "S")) / query.size("E") ** 0.5
# => return contract(scores.softmax("S"), value, to=("N", "T", "E"))
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
