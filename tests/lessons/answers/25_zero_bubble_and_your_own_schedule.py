# %% in_halves: wrong, all weights at the end | should become
def in_halves(words):
    weights = [word.replace("B", "W") for word in words if "B" in word]
    return [word.replace("B", "I") for word in words] + weights


# %% in_halves: wrong, weights first | should become
def in_halves(words):
    halves = []
    for word in words:
        halves += [word.replace("B", "W"), word.replace("B", "I")] if "B" in word else [word]
    return halves


# %% in_halves: wrong, leaves the backward in | should become
def in_halves(words):
    halves = []
    for word in words:
        halves += [word, word.replace("B", "W")] if "B" in word else [word]
    return halves


# %% mine: wrong, the schedule above | leaves 14.3% idle
mine = """
0F0 0F1 0I0 0F2 0I1 0W0 0F3 0I2 0W1 0I3 0W2 0W3
1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3
"""


# %% mine: wrong, keeps all | 4 micro-batches, and 3 are allowed
mine = """
0F0 0F1 0F2 0I0 0F3 0I1 0W0 0W1 0I2 0W2 0I3 0W3
1F0 1I0 1F1 1I1 1F2 1I2 1F3 1I3 1W0 1W1 1W2 1W3
"""


# %% mine: wrong, waits for ever | never ends
mine = """
0F0 0I0 0F1 0F2 0W0 0I1 0F3 0W1 0I2 0W2 0I3 0W3
1F0 1F1 1I0 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3
"""


# %% mine: wrong, forgets a half | 0W3 is missing
mine = """
0F0 0F1 0F2 0I0 0W0 0I1 0F3 0W1 0I2 0W2 0I3
1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3
"""


# %% mine: wrong, no schedule | is not an operation
mine = "forward forward backward backward"


# %% mine: wrong, one line | Two workers need two lines
mine = "0F0 0B0"
