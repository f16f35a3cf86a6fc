# %% states
def states(parameters, ranks):
    piece = parameters / ranks
    return 4 * piece, 4 * piece, 8 * piece


# %% kept
def kept(tokens, width, hidden):
    norm = 4 * width + 2 * width + 2 * width
    attention = 4 * 2 * width
    feed = 4 * 2 * hidden
    return tokens * (2 * norm + attention + feed)


# %% choice
choice = {"dp": 64, "tp": 4, "rows": 1, "recompute": True}
