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


# %% on_workers
def make_pipe(stages, microbatches, most):
    def ops(workers, microbatches, chunks=1):
        lists = []
        for worker in range(workers):
            ahead = min(workers - worker, most, microbatches)
            words = [f"{worker}F{number}" for number in range(ahead)]
            for number in range(microbatches):
                words.append(f"{worker}B{number}")
                if ahead + number < microbatches:
                    words.append(f"{worker}F{ahead + number}")
            lists.append(words)
        return lists

    return Pipeline(stages, ops, microbatches, loss_fn=F.mse_loss)


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
