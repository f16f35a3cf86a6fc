# %% in_halves: wrong, all weights at the end | should become
# => weights = [word.replace("B", "W") for word in words if "B" in word]
# => return [word.replace("B", "I") for word in words] + weights
# %% in_halves: wrong, weights first | should become
# ("B", "I"), word.replace("B", "W") => ("B", "W"), word.replace("B", "I")
# %% in_halves: wrong, leaves the backward in | should become
# .replace("B", "I"), => ,
# %% in_halves: wrong, one text | A list of texts is wanted
# => return " ".join(words).replace("B", "I")
# %% in_halves: wrong, input gradients alone | should become
# => return [word.replace("B", "I") for word in words]
# %% in_halves: wrong, both halves in one word | should become
# => return [word.replace("B", "I") + " " + word.replace("B", "W") if "B" in word else word for word in words]
# %% in_halves: wrong, pairs in the list | A list of texts is wanted
# => return [[word.replace("B", "I"), word.replace("B", "W")] if "B" in word else word for word in words]
# %% in_halves: wrong, numbers of one digit | should become
# -         halves += [word.replace("B", "I"), word.replace("B", "W")] if "B" in word else [word]
# +         halves += [f"{word[0]}I{word[2]}", f"{word[0]}W{word[2]}"] if word[1] == "B" else [word]
# %% in_halves: wrong, changes the list | has changed the list
# => place = 0
# => while place < len(words):
# =>     if "B" in words[place]:
# =>         words.insert(place + 1, words[place].replace("B", "W"))
# =>         words[place] = words[place].replace("B", "I")
# =>     place += 1
# => return words
# %% in_halves: right, a generator
# => return (word.replace("B", half) for word in words for half in ("IW" if "B" in word else "F"))
# %% in_halves: wrong, takes the first stage for all | should become
# halves = => stage, halves = words[0].split("F")[0],
# -         halves += [word.replace("B", "I"), word.replace("B", "W")] if "B" in word else [word]
# +         number = word.split("B")[-1]
# +         halves += [f"{stage}I{number}", f"{stage}W{number}"] if "B" in word else [word]
# %% in_halves: wrong, all that is no forward becomes two | '0F0 0F1 0I0 0W0 0B1' should become
# -         halves += [word.replace("B", "I"), word.replace("B", "W")] if "B" in word else [word]
# +         halves += [word] if "F" in word else [word.replace("B", "I"), word.replace("B", "W")]
# %% mine: wrong, the schedule above | leaves 14.3% idle
# 0F2 0I0 0W0 0I1 0F3 0W1 0I2 0W2 0I3 => 0I0 0F2 0I1 0W0 0F3 0I2 0W1 0I3 0W2
# %% mine: wrong, keeps all | 4 micro-batches, and 3 are allowed
# 0W0 0I1 0F3 => 0F3 0I1 0W0
# 1W0 1F2 1I2 1W1 1F3 1I3 => 1F2 1I2 1F3 1I3 1W0 1W1
# %% mine: wrong, waits for ever | never ends
# 0F1 0F2 0I0 => 0I0 0F1 0F2
# 1I0 1F1 1I1 => 1F1 1I0 1I1
# %% mine: wrong, forgets a half | 0W3 is missing
# 0W2 0I3 0W3 => 0W2 0I3
# %% mine: wrong, no schedule | is not an operation
mine = "forward forward backward backward"


# %% mine: wrong, one line | Two workers need two lines
mine = "0F0 0B0"


# %% mine: wrong, 1F1B | leaves 20.0% idle
# 0F0 0F1 0F2 0I0 0W0 0I1 0F3 0W1 0I2 0W2 0I3 0W3 => 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
# 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3 => 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
# %% mine: wrong, three micro-batches | It was refused
# 0F3 0W1 0I2 0W2 0I3 0W3 => 0W1 0I2 0W2
# 1F3 1I3 1W2 1W3 => 1W2
# %% mine: wrong, a list of parts of lines | 0B0 is missing
mine = ["0F0 0F1", "1F0 1F1"]


# %% mine: wrong, the last backward is whole | It runs, and has 0B3
# 0W2 0I3 0W3 => 0W2 0B3
# %% mine: right, a plan
mine = schedule("""0F0 0F1 0F2 0I0 0W0 0I1 0F3 0W1 0I2 0W2 0I3 0W3
1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3""")


# %% mine: right, lists of words
mine = [
    "0F0 0F1 0F2 0I0 0W0 0I1 0F3 0W1 0I2 0W2 0I3 0W3".split(),
    "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3".split(),
]


# %% on_workers: right, a text that counts what is kept
def make_pipe(stages, microbatches, most):
    lines = []
    for worker in range(3):
        words, begun, done = [], 0, 0
        while done < microbatches:
            if begun < microbatches and begun - done < min(most, 3 - worker):
                words.append(f"{worker}F{begun}")
                begun += 1
            else:
                words.append(f"{worker}B{done}")
                done += 1
        lines.append(" ".join(words))
    return Pipeline(stages, schedule("\n".join(lines)), microbatches, loss_fn=F.mse_loss)


# %% on_workers: wrong, 1F1B as it is | worker1 has kept 3 at once: F0 F1 F2 B0
# => return Pipeline(stages, "1f1b", microbatches, loss_fn=F.mse_loss)
# %% on_workers: wrong, GPipe | has kept 6 at once
# => return Pipeline(stages, "gpipe", microbatches, loss_fn=F.mse_loss)
# %% on_workers: wrong, one at a time | on paper 66.7% are idle
# => return Pipeline(stages, "sequential", microbatches, loss_fn=F.mse_loss)
# %% on_workers: wrong, the sum of squares | times that of one process. Is `loss_fn` the mean squared error
# F.mse_loss => lambda out, y: F.mse_loss(out, y, reduction="sum")
# %% on_workers: wrong, one more than the limit | at once
# most, microbatches) => most + 1, microbatches)
# %% on_workers: wrong, all micro-batches in one | the step
# microbatches, loss_fn => 1, loss_fn
# %% on_workers: wrong, the last backwards are missing | raised PipelineError
# for number in range(microbatches): => for number in range(microbatches - ahead):
# %% on_workers: wrong, no pipeline | it should return a Pipeline, not
# return Pipeline(stages, ops, microbatches, loss_fn=F.mse_loss) => return ops
# %% on_workers: wrong, the loss is forgotten | raised
# microbatches, loss_fn=F.mse_loss) => microbatches)
# %% on_workers: wrong, as many ahead on each worker | on paper
# workers - worker, most, microbatches => most, microbatches
# %% zero_bubble: wrong, all weights at the end | are allowed
# => words = str(schedule("1f1b", workers, microbatches)).splitlines()[worker].split()
# => return [word.replace("B", "I") for word in words] + [word.replace("B", "W") for word in words if "B" in word]
# %% zero_bubble: wrong, always the first worker | it was refused
# => words = []
# => for word in str(schedule("1f1b", workers, microbatches)).splitlines()[0].split():
# =>     words += [word.replace("B", "I"), word.replace("B", "W")] if "B" in word else [word]
# => return words
# %%% zero_bubble: wrong, 1F1B in halves | takes 14 units; 13 are enough
# 0 => worker
# %% zero_bubble: wrong, the schedule of two workers and four micro-batches | it was refused
# => return ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3"][
# =>     worker % 2
# => ].split()
# %% zero_bubble: wrong, one text | A list of texts is wanted
# => return str(schedule("1f1b", workers, microbatches)).splitlines()[worker]
# %% zero_bubble: wrong, 1F1B | takes 15 units; 13 are enough
# => return str(schedule("1f1b", workers, microbatches)).splitlines()[worker].split()
# %% zero_bubble: wrong, one micro-batch later on each worker | are allowed
# => words, saved = [], []
# => for word in str(schedule("1f1b", workers, microbatches)).splitlines()[worker].split():
# =>     words.append(word.replace("B", "I"))
# =>     if "B" in word:
# =>         saved.append(word.replace("B", "W"))
# =>         if len(saved) > 1:
# =>             words.append(saved.pop(0))
# => return words + saved
# %%% zero_bubble: wrong, forgets the weights that are left | is missing
# 1: => worker:
# words + saved => words
# %%% zero_bubble: wrong, one delay too many | are allowed
# 1: => worker + 1:
# %%% zero_bubble: wrong, the first worker delays most | are allowed
# -             if len(saved) > 1:
# -                 words.append(saved.pop(0))
# +         if len(saved) > workers - 1 - worker:
# +             words.append(saved.pop(0))
# %% zero_bubble: wrong, numbers of one digit | For 2 workers and 12 micro-batches
# word.replace("B", "I") => f"{word[0]}I{word[2]}"
# word.replace("B", "W") => f"{word[0]}W{word[2]}"
