# %% hang: right, as a text
hang = ("rank 1", "save_checkpoint()")
# %% hang: wrong, a rank that waits | Rank 0 waits in a collective itself
hang = (0, "save_checkpoint")
# %% hang: wrong, the last rank | Rank 3 waits in a collective itself
hang = (3, "all_reduce")
# %% hang: wrong, the outermost function | Rank 1 is in `main`, but that has called
hang = (1, "main")
# %% hang: wrong, the caller | Rank 1 is in `train`, but that has called
hang = (1, "train")
# %% hang: wrong, Python's function | `sleep` is Python's
hang = (1, "sleep")
# %% hang: wrong, a function that it is not in | No line of rank 1 is in `load_batch`
hang = (1, "load_batch")
# %% hang: wrong, no rank | The ranks are 0 to 3, not 4
hang = (4, "save_checkpoint")
# %% hang: wrong, a rank alone | The number of a rank and the name of a function are wanted
hang = 1
# %% straggler: wrong, the rank with most communication | Rank 0 spends its time in collectives
straggler = (0, "a")
# %% straggler: wrong, another one | Rank 1 spends its time in collectives
straggler = (1, "c")
# %% straggler: wrong, one that computes less | Rank 2 spends its time in collectives
straggler = (2, "b")
# %% straggler: wrong, its collectives | No: a collective is long where a rank waits in it
straggler = (3, "c")
# %% straggler: wrong, outside of operators | The rank is right, the cause is not. Compare its column `compute`
straggler = (3, "b")
# %% straggler: wrong, a word | The letters are 'a', 'b', 'c', not 'compute'
straggler = (3, "compute")
# %% straggler: wrong, a number alone | The number of a rank and a letter are wanted
straggler = 3
# %% second: wrong, as in the first job | Rank 3 spends its time in collectives
second = (3, "b")
# %% second: wrong, the first rank | Rank 0 spends its time in collectives
second = (0, "b")
# %% second: wrong, the next one | Rank 1 spends its time in collectives
second = (1, "a")
# %% second: wrong, operators | The rank is right, the cause is not. Its column `compute` is not larger
second = (2, "a")
# %% second: wrong, its collectives | No: a collective is long where a rank waits in it
second = (2, "c")
# %% second: wrong, a letter in capitals | The letters are 'a', 'b', 'c', not 'B'
second = (2, "B")
# %% second: wrong, no tuple | The number of a rank and a letter are wanted
second = "b"
