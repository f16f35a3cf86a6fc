# %% which: wrong, an all_gather between two shards | all_gather brings a rank more than it wants
# "all_to_all" => "all_gather"
# %% which: wrong, gathers summands | all_gather adds nothing
# "all_reduce" if before == "Partial" else "all_gather" => "all_gather"
# %% which: wrong, an all_reduce for a piece | all_reduce brings a rank more than it wants
# return "reduce_scatter" => return "all_reduce"
# %% which: wrong, adds up shards | There are no summands to add up
# else "all_to_all" => else "reduce_scatter"
# %% which: wrong, a piece where the whole is wanted | all_to_all brings a rank a piece of that only
# else "all_gather" => else "all_to_all"
# %% which: wrong, an all_gather for the same placement | Shard(0) to Shard(0)
# if before == after or before => if before
# else "all_to_all" => else "all_gather"
# %% which: wrong, Replicate is sent | Each rank can make that of its own numbers
# -     if before == after or before == "Replicate" or after == "Partial":
# +     if before == "Replicate" and after.startswith("Shard"):
# +         return "all_to_all"
# +     if before == after or before == "Replicate" or after == "Partial":
# %% which: wrong, forgets that rows are not columns | No rank can make that of its own numbers
# if before == after or => if before[:5] == after[:5] or
# %% which: wrong, names of torch | not 'reduce_scatter_tensor'
# "reduce_scatter" => "reduce_scatter_tensor"
# %% which: wrong, to Partial by a sum | Shard(0) to Partial
# -     if before == after or before == "Replicate" or after == "Partial":
# +     if after == "Partial" != before:
# +         return "all_reduce"
# +     if before == after or before == "Replicate" or after == "Partial":
# %% which: right, as a table
# => kinds = {"P": {"P": 0, "R": "all_reduce", "S": "reduce_scatter"}, "R": {}}
# => kinds["S"] = {"P": 0, "R": "all_gather", "S": 0 if before == after else "all_to_all"}
# => return kinds[before[0]].get(after[0]) or "nothing"
# %% sent: wrong, a rank sends to itself, too | A rank sends nothing to itself
# (ranks - 1) / ranks => 1
# %% sent: wrong, all ranks together | for all ranks together
# (ranks - 1) / ranks => (ranks - 1)
# %% sent: wrong, an all_reduce as one half | one half of an all_reduce
# "all_reduce": 2 => "all_reduce": 1
# %% sent: wrong, an all_to_all as an all_gather | in which a rank sends its whole piece
# "all_to_all": 1 / ranks => "all_to_all": 1
# %% sent: wrong, whole summands | sends its whole summand to each other rank
# "all_reduce": 2 => "all_reduce": ranks
# %% sent: wrong, the piece once | each other rank needs it
# "all_gather": 1, => "all_gather": 1 / (ranks - 1) if ranks > 1 else 0,
# %% sent: wrong, size of a piece | if `size` is the bytes of a piece
# "all_gather": 1, => "all_gather": ranks,
# %% sent: wrong, a reduce_scatter as an all_reduce | its second half
# "reduce_scatter": 1 => "reduce_scatter": 2
# %% sent: wrong, the whole piece in an all_to_all | keeps a part of its piece
# "all_to_all": 1 / ranks => "all_to_all": 1 / (ranks - 1) if ranks > 1 else 0
# %% sent: wrong, a sentence | a number of bytes is wanted
# return once * times[collective] => return str(once)
# %% sent: wrong, knows four ranks only | 1000 bytes, 2 ranks: a rank sends
# once = size * (ranks - 1) / ranks => once = size * 3 / 4
# %% sent: right, piece by piece
# => piece = size // ranks
# => if collective == "all_to_all":
# =>     return piece / ranks * (ranks - 1)
# => if collective == "nothing":
# =>     return 0
# => return piece * (ranks - 1) * (2 if collective == "all_reduce" else 1)
# %% product: wrong, Partial forgotten | so a summand, so it is Partial, not None
# return "Partial" => return None
# %% product: wrong, both cut are cut | one block
# -     whole = "Replicate"
# +     whole = "Replicate"
# +     if left == "Shard(0)" and right == "Shard(1)":
# +         return left
# %% product: wrong, takes a part first | do not fit the rows
# and left != "Shard(1)" => and left
# %% product: wrong, a whole left with rows | do not fit the rows
# and right != "Shard(0)" => and right
# %% product: wrong, summands times summands | multiplied with those of all ranks
# -     whole = "Replicate"
# +     whole = "Replicate"
# +     if left == right == "Partial":
# +         return left
# %% product: wrong, a sum does not wait | the product of the sum
# -     whole = "Replicate"
# +     whole = "Replicate"
# +     if "Partial" in (left, right):
# +         return None
# %% product: wrong, rows become columns | each rank computes its rows, so it is Shard(0)
# =>     order = ("Replicate", "Partial", "Shard(1)", "Shard(0)")
# =>     return "Shard(1)" if (left, right) == ("Shard(0)", "Replicate") else None
# %% product: wrong, everything is whole | all of it
# return left => return None if left == whole else left
# return right => return None if right == whole else right
# %% product: wrong, rows with a summand | its part of the result needs the sum
# -     return None
# +     return left if right == "Partial" and left == "Shard(0)" else None
# %% product: wrong, a list | or None, not ['Partial']
# return "Partial" => return ["Partial"]
# %% product: right, as a table
# => table = {"Shard(0)Replicate": left, "ReplicateShard(1)": right, "Shard(1)Shard(0)": "Partial"}
# => table |= {"ReplicateReplicate": left, "PartialReplicate": left, "ReplicatePartial": right}
# => return table.get(left + right)
# %% plan: wrong, rows, then columns | rank 0 calls
# "up": Shard(1), => "up": Shard(0),
# "down": Shard(0), => "down": Shard(1),
# %% plan: wrong, columns twice | rank 0 calls 2 all_gather, and one
# "down": Shard(0), => "down": Shard(1),
# %% plan: wrong, rows twice | rank 0 calls
# "up": Shard(1), => "up": Shard(0),
# %% plan: wrong, up is whole | Rank 0 has all of up.
# "up": Shard(1), => "up": Replicate(),
# %% plan: wrong, nothing is cut | Rank 0 has all of up and down.
# => return dict.fromkeys(("up", "up_bias", "down", "down_bias"), Replicate())
# %% plan: wrong, the last bias is cut | rank 0 calls 1 all_gather and 1 reduce_scatter
# "down_bias": Replicate() => "down_bias": Shard(0)
# %% plan: wrong, a bias has one dimension | up_bias has no dimension 1
# "up_bias": Shard(0) => "up_bias": Shard(1)
# %% plan: wrong, a bias is forgotten | no placement of up_bias
# -         "up_bias": Shard(0),
# %% plan: wrong, words | Replicate() or Shard(dimension) is wanted, not 'Shard(1)'
# "up": Shard(1) => "up": "Shard(1)"
# %% plan: wrong, a class | is wanted, not <class
# Replicate() => Replicate
# %% plan: wrong, a list | not a list
# => return [Shard(1), Shard(0), Shard(0), Replicate()]
# %% plan: wrong, no return | It has no `return`
# return { => plan = {
# %% plan: wrong, a name that is not there | raised NameError
# Replicate() => Partial()
# %% plan: right, torch cuts the bias for nothing
# "up_bias": Shard(0) => "up_bias": Replicate()
# %% plan: right, counted from the end
# "up": Shard(1) => "up": Shard(-1)
# %% needs: wrong, all are free | by numbers: nothing is not what is needed
# "all_reduce" => "nothing"
# %% needs: wrong, half of a sum | by numbers: reduce_scatter is not
# "all_reduce" => "reduce_scatter"
# %% needs: wrong, heads are gathered | of a head are all on one rank
# "nothing" => "all_gather"
# %% needs: wrong, tokens are free | meets the keys of all tokens
# "all_gather" => "nothing"
# %% needs: wrong, tokens are added up | by tokens: all_reduce is not
# "all_gather" => "all_reduce"
# %% needs: wrong, tokens become heads | by tokens: all_to_all is not
# "all_gather" => "all_to_all"
# %% needs: wrong, numbers are gathered | so the scores are Partial
# "all_reduce" => "all_gather"
# %% needs: wrong, one is missing | Nothing is said of by tokens
# -     "by tokens": "all_gather",
# %% needs: wrong, another word | is wanted, not 'softmax'
# "all_reduce" => "softmax"
# %% needs: wrong, a list | A dict is wanted
needs = ["all_reduce", "nothing", "all_gather"]
