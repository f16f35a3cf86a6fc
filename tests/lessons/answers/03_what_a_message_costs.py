# %% fit: wrong, seconds per byte | beta is bytes per second
# -     alpha, per_byte = torch.linalg.lstsq(rows, ones).solution.flatten().tolist()
# -     return alpha, 1 / per_byte
# +     return tuple(torch.linalg.lstsq(rows, ones).solution.flatten().tolist())
# %% fit: wrong, beta first | The order is (alpha, beta)
# => t = torch.tensor(times, dtype=torch.float64)
# => n = torch.tensor(sizes, dtype=torch.float64)
# => rows = torch.stack([n / t, 1 / t], dim=1)
# => per_byte, alpha = torch.linalg.lstsq(rows, torch.ones(len(t), 1, dtype=torch.float64)).solution.flatten().tolist()
# => return 1 / per_byte, alpha
# %% fit: wrong, a line through the first and the last point | least squares of relative errors
# => beta = (sizes[-1] - sizes[0]) / (times[-1] - times[0])
# => return times[0] - sizes[0] / beta, beta
# %% fit: wrong, a line through the logarithms | Points that lie on the line
# => x, y = torch.tensor(sizes).double().log(), torch.tensor(times).double().log()
# => slope, offset = torch.linalg.lstsq(torch.stack([x, torch.ones_like(x)], 1), y[:, None]).solution.flatten().tolist()
# => return math.exp(offset), 1 / slope
# %% fit: wrong, absolute errors | Yours are those of plain least squares
# => t = torch.tensor(times, dtype=torch.float64)
# => n = torch.tensor(sizes, dtype=torch.float64)
# => rows = torch.stack([torch.ones_like(n), n], dim=1)
# => alpha, per_byte = torch.linalg.lstsq(rows, t[:, None]).solution.flatten().tolist()
# => return alpha, 1 / per_byte
# %%% fit: wrong, divides one side only | Points that lie on the line
# -     rows = torch.stack([torch.ones_like(n), n], dim=1)
# -     alpha, per_byte = torch.linalg.lstsq(rows, t[:, None]).solution.flatten().tolist()
# +     alpha, per_byte = torch.linalg.lstsq(torch.stack([1 / t, n / t], 1), t[:, None]).solution.flatten().tolist()
# %% fit: wrong, alpha alone | (alpha, beta) is wanted
# => return min(times)
# %% fit: wrong, the largest message has no latency | Points that lie on the line
# => return min(times), max(sizes) / max(times)
# %% fit: wrong, absolute errors in float32 | In float32 it is lost beside the large messages
# => t, n = torch.tensor(times), torch.tensor(sizes)
# => rows = torch.stack([torch.ones(len(t)), n.float()], dim=1)
# => alpha, per_byte = torch.linalg.lstsq(rows, t[:, None]).solution.flatten().tolist()
# => return alpha, 1 / per_byte
# %% relay: right, a tensor
# => return torch.tensor(k + hops - 1) * (alpha + n / k / beta)
# %% relay: wrong, whole bytes only | 10 bytes in 3 pieces
# => return (k + hops - 1) * (alpha + n // k / beta)
# %% relay: wrong, one piece after another over all hops | the hops never work at the same time
# => return k * hops * (alpha + n / k / beta)
# %% relay: wrong, one step too many | arrives one piece too late
# => return (k + hops) * (alpha + n / k / beta)
# %% relay: wrong, each piece has all bytes | each piece has all the bytes
# => return (k + hops - 1) * (alpha + n / beta)
# %% relay: wrong, latency once | alpha is paid once
# => return alpha + (k + hops - 1) * n / k / beta
# %% relay: wrong, all pieces at once | all pieces leave at once
# => return hops * (alpha + n / k / beta)
# %% relay: wrong, the hops do not overlap | the hops never work at the same time
# => return hops * (k * alpha + n / beta)
# %% relay: wrong, multiplies by beta | bytes are divided by it
# => return (k + hops - 1) * (alpha + n / k * beta)
# %% relay: wrong, one hop fewer | arrives one piece too early
# => return (k + 1 if hops > 1 else k) * (alpha + n / k / beta)
# %% best_pieces: wrong, no piece for one hop | there is at least one
# => ideal = math.sqrt((hops - 1) * n / (alpha * beta))
# => return min(math.floor(ideal), math.ceil(ideal), key=lambda k: (k + hops - 1) * (alpha + n / max(k, 1) / beta))
# %% best_pieces: wrong, always two hops | over 4 hops
# (hops - 1) * n => n
# %% best_pieces: wrong, tries no more than a hundred thousand | you say 99999
# => return min(range(1, 100_000), key=lambda k: (k + hops - 1) * (alpha + n / k / beta))
# %% best_pieces: wrong, tries too few | over 2 hops, alpha = 0.0001 s
# => return min(range(1, 100), key=lambda k: (k + hops - 1) * (alpha + n / k / beta))
# %% best_pieces: wrong, begins at no piece | raised ZeroDivisionError
# => return min(range(2000), key=lambda k: (k + hops - 1) * (alpha + n / k / beta))
# %% best_pieces: wrong, tries no more than a thousand | you say 1000
# => return min(range(1, 1001), key=lambda k: (k + hops - 1) * (alpha + n / k / beta))
# %% best_pieces: wrong, always rounds down | the nearer need not be the better one
# => return max(1, math.floor(math.sqrt((hops - 1) * n / (alpha * beta))))
# %% best_pieces: wrong, rounds to the nearest | the nearer need not be the better one
# => return max(1, round(math.sqrt((hops - 1) * n / (alpha * beta))))
# %% best_pieces: right, by numpy
# => import numpy as np
# => ideal = math.sqrt((hops - 1) * n / (alpha * beta))
# => near = np.array([max(1, math.floor(ideal)), max(1, math.ceil(ideal))])
# => return near[np.argmin((near + hops - 1) * (alpha + n / near / beta))]
# %% best_pieces: wrong, not whole | a whole number is wanted
# => return max(1.0, math.sqrt((hops - 1) * n / (alpha * beta)))
# %% best_pieces: wrong, forgets the root | Yours is without the root
# => return max(1, math.ceil((hops - 1) * n / (alpha * beta)))
# %% best_pieces: wrong, one hop too many | Yours would be right for one hop more
# => return max(1, round(math.sqrt(hops * n / (alpha * beta))))
# %% best_pieces: wrong, rounds up | over 3 hops
# => return max(1, math.ceil(math.sqrt((hops - 1) * n / (alpha * beta))))
# %% schedule: wrong, adds up all messages | Messages between other ranks are on their way
# => return sum(alpha + size / beta for messages in rounds for _, _, size in messages)
# %% schedule: wrong, the longest message | A rank sends its messages one after another
# => return sum(max((alpha + size / beta for _, _, size in messages), default=0) for messages in rounds)
# %% schedule: wrong, counts senders only | A rank receives its messages one after another
# => total = 0
# => for messages in rounds:
# =>     busy = {}
# =>     for sender, _, size in messages:
# =>         busy[sender] = busy.get(sender, 0) + alpha + size / beta
# =>     total += max(busy.values(), default=0)
# => return total
# %%% schedule: wrong, counts receivers only | A rank sends its messages one after another
# sender, _ => _, receiver
# [sender] = busy.get(sender, 0) => [receiver] = busy.get(receiver, 0)
# %%% schedule: wrong, a rank that sends cannot receive | may send and receive at the same time
# -         for sender, _, size in messages:
# -             busy[sender] = busy.get(sender, 0) + alpha + size / beta
# +         for sender, receiver, size in messages:
# +             for rank in (sender, receiver):
# +                 busy[rank] = busy.get(rank, 0) + alpha + size / beta
# %%% schedule: wrong, empties the rounds of the caller | have changed
# -         for sender, _, size in messages:
# -             busy[sender] = busy.get(sender, 0) + alpha + size / beta
# +         while messages:
# +             sender, receiver, size = messages.pop()
# +             for place in (("sends", sender), ("receives", receiver)):
# +                 busy[place] = busy.get(place, 0) + alpha + size / beta
# %% schedule: wrong, stumbles over an empty round | One of these rounds has no message
# => total = 0
# => for messages in rounds:
# =>     sends, receives = {}, {}
# =>     for sender, receiver, size in messages:
# =>         sends[sender] = sends.get(sender, 0) + alpha + size / beta
# =>         receives[receiver] = receives.get(receiver, 0) + alpha + size / beta
# =>     total += max([*sends.values(), *receives.values()])
# => return total
# %%% schedule: wrong, latency once in a round | has an alpha of its own
# -             sends[sender] = sends.get(sender, 0) + alpha + size / beta
# -             receives[receiver] = receives.get(receiver, 0) + alpha + size / beta
# -         total += max([*sends.values(), *receives.values()])
# +             sends[sender] = sends.get(sender, 0) + size / beta
# +             receives[receiver] = receives.get(receiver, 0) + size / beta
# +         total += alpha * bool(messages) + max([*sends.values(), *receives.values()], default=0)
# %%% schedule: wrong, room for eight ranks | raised IndexError
# receives = {}, {} => receives = [0] * 8, [0] * 8
# = sends.get(sender, 0) + => +=
# = receives.get(receiver, 0) + => +=
# [*sends.values(), *receives.values()] => sends + receives
# %%% schedule: wrong, the rounds at once | A round begins when the one before has ended
# total = => longest =
# total += max([*sends.values(), *receives.values()]) => longest = max([longest, *sends.values(), *receives.values()])
# total => longest
