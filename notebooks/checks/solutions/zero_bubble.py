# %% in_halves
def in_halves(words):
    halves = []
    for word in words:
        halves += [word.replace("B", "I"), word.replace("B", "W")] if "B" in word else [word]
    return halves


# %% mine
mine = """
0F0 0F1 0F2 0I0 0W0 0I1 0F3 0W1 0I2 0W2 0I3 0W3
1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3
"""


# %% zero_bubble
def zero_bubble(worker, workers, microbatches):
    words, saved = [], []
    for word in str(schedule("1f1b", workers, microbatches)).splitlines()[worker].split():
        if "B" not in word:
            words.append(word)
            continue
        words.append(word.replace("B", "I"))
        saved.append(word.replace("B", "W"))
        if len(saved) > worker:
            words.append(saved.pop(0))
    return words + saved
