# %% hang
hang = (1, "save_checkpoint")


# %% straggler
straggler = (3, "a")


# %% second
second = (2, "b")
