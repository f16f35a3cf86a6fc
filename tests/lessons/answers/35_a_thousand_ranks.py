# %% states: wrong, one number of state | bytes of optimizer; you say 131,072. AdamW keeps two numbers for each
# 8 * piece => 4 * piece
# %% states: wrong, gradients in two bytes | bytes of gradients; you say 65,536
# return 4 * piece, 4 * piece => return 4 * piece, 2 * piece
# %% states: wrong, only the optimizer is sharded, as in ZeRO 1 | bytes of parameters; you say 524,288
# return 4 * piece, 4 * piece => return 4 * parameters, 4 * parameters
# %% states: wrong, parameters are whole between steps | bytes of parameters; you say 524,288
# return 4 * piece => return 4 * parameters
# %% states: wrong, gradients are whole after backward, as in ZeRO 1 | bytes of gradients; you say 524,288
# return 4 * piece, 4 * piece => return 4 * piece, 4 * parameters
# %% states: wrong, the sum | three numbers are wanted
# return 4 * piece, 4 * piece, 8 * piece => return 16 * piece
# %% states: wrong, numbers and not bytes | bytes of parameters; you say 32,768
# return 4 * piece, 4 * piece, 8 * piece => return piece, piece, 2 * piece
# %% states: wrong, optimizer first | bytes of parameters; you say 262,144
# return 4 * piece, 4 * piece, 8 * piece => return 8 * piece, 4 * piece, 4 * piece
# %% kept: wrong, one norm | that grow with `width` are too few, the others are right: look at norms and attention
# 2 * norm => norm
# %% kept: wrong, a norm in two bytes | which are 9,216 for each token
# 4 * width + 2 * width => 2 * width + 2 * width
# %% kept: wrong, attention without what it has read | which are 9,728 for each token
# attention = 4 => attention = 3
# %% kept: wrong, feed keeps its product alone | which are 7,168 for each token
# feed = 4 => feed = 1
# %% kept: wrong, silu is not kept | that grow with `hidden` are too few, the others are right
# feed = 4 => feed = 3
# %% kept: wrong, all in four bytes | in a simulation a layer more keeps
# attention = 4 * 2 => attention = 4 * 4
# feed = 4 * 2 => feed = 4 * 4
# %% kept: wrong, of one token | you say 10,240, which are 20 for each token
# tokens * (2 => (2
# %% kept: wrong, scores of attention are kept | 512 tokens, width 256, hidden 512
# attention = 4 * 2 * width => attention = 4 * 2 * width + 2 * tokens
# %% kept: wrong, text | a number is wanted
# => return "24 width + 8 hidden"
# %% choice: wrong, FSDP alone | dp 256 · rows 1 are a batch of 256 rows, and it has 64
choice = {"dp": 256, "tp": 1, "rows": 1, "recompute": True}
# %% choice: wrong, a row for two ranks | dp 128 · rows 1 are a batch of 128 rows
choice = {"dp": 128, "tp": 2, "rows": 1, "recompute": True}
# %% choice: wrong, half a row | whole numbers
choice = {"dp": 128, "tp": 2, "rows": 0.5, "recompute": True}
# %% choice: wrong, nothing is run again | It does not fit:
# True => False
# %% choice: wrong, more tensor parallel does not help | It does not fit:
choice = {"dp": 32, "tp": 8, "rows": 2, "recompute": False}
# %% choice: wrong, a whole host for tensor parallel | It fits, with
choice = {"dp": 32, "tp": 8, "rows": 2, "recompute": True}
# %% choice: wrong, tensor parallel over two hosts | a group lies on 2 hosts
choice = {"dp": 16, "tp": 16, "rows": 4, "recompute": False}
# %% choice: wrong, half of the GPUs | are 128 GPUs, and there are 256
choice = {"dp": 16, "tp": 8, "rows": 4, "recompute": True}
# %% choice: wrong, a tuple | A dict with dp, tp, rows, recompute is wanted
choice = (64, 4, 1, True)
# %% choice: wrong, a word for recompute | recompute is True or False
# True => "all layers"
