# %% returns: wrong, forgets to turn the list around | yours gave [1.0, 0.5, 0.25]
# found[::-1] => found
# %% returns: wrong, sums up what came before | yours gave [0.0, 0.0, 1.0]
# => found, before = [], 0.0
# => for reward in rewards:
# =>     before = reward + gamma * before
# =>     found.append(before)
# => return found
# %% returns: wrong, works in place | changes the list
# => for step in reversed(range(len(rewards) - 1)):
# =>     rewards[step] += gamma * rewards[step + 1]
# => return rewards
# %% returns: right, an iterator
# return found[::-1] => return reversed(found)
# %% returns: wrong, discounts the own reward too | yours gave [0.125, 0.25, 0.5]
# reward + gamma * later => gamma * (reward + later)
# %% returns: wrong, only the last reward counts | For rewards [1.0, 2.0, 3.0]
# => return [gamma ** (len(rewards) - 1 - step) * rewards[-1] for step in range(len(rewards))]
# %% returns: wrong, does not discount | yours gave [1.0, 1.0, 1.0]
# => return [sum(rewards[step:]) for step in range(len(rewards))]
# %% returns: wrong, looks one step ahead only | yours gave [0.0, 0.5, 1.0]
# => return [reward + gamma * later for reward, later in zip(rewards, [*rewards[1:], 0.0])]
# %% returns: wrong, whole numbers for whole rewards | For rewards [0, 0, 1] and gamma=0.5
# => found, later = np.zeros_like(rewards), 0.0
# => for step in reversed(range(len(rewards))):
# =>     later = rewards[step] + gamma * later
# =>     found[step] = later
# => return found.tolist()
# %% returns: right, a list of tensors
# (rewards) => (torch.tensor(rewards, dtype=torch.double))
# %% returns: wrong, begins anew at each reward | For rewards [1.0, 2.0, 3.0]
# reward + => reward if reward else
# %% batched: wrong, answers each observer at once | before all observers have asked
class BatchedAgent(Agent):
    @rpc.functions.async_execution
    def act(self, observer, state):
        future = rpc.Future()
        future.set_result(self.choose([observer], state.unsqueeze(0))[0])
        return future


# %% batched: wrong, gives everybody the first move | meant for another one
# (_, waiting), move in zip(ready.values(), moves) => _, waiting in ready.values()
# set_result(move) => set_result(moves[0])
# %% batched: wrong, does not empty the list of those who wait | before all observers have asked
# -             ready, self.waiting = self.waiting, {}
# -         moves = self.choose(list(ready), torch.stack([state for state, _ in ready.values()]))
# -         for (_, waiting), move in zip(ready.values(), moves):
# -             waiting.set_result(move)
# +             moves = self.choose(list(self.waiting), torch.stack([state for state, _ in self.waiting.values()]))
# +             for (_, waiting), move in zip(self.waiting.values(), moves):
# +                 if not waiting.done():
# +                     waiting.set_result(move)
# %% batched: wrong, one pass for each observer | batches of [1, 1, 1]
# -         moves = self.choose(list(ready), torch.stack([state for state, _ in ready.values()]))
# -         for (_, waiting), move in zip(ready.values(), moves):
# -             waiting.set_result(move)
# +         for name, (state, waiting) in ready.items():
# +             waiting.set_result(self.choose([name], state.unsqueeze(0))[0])
# %% batched: wrong, looks at those that wait without the lock | without the lock
# -         with self.lock:
# -             self.waiting[observer] = state, future
# -             if len(self.waiting) < self.size:
# -                 return future
# +         self.waiting[observer] = state, future
# +         if len(self.waiting) == self.size:
# -         moves = self.choose(list(ready), torch.stack([state for state, _ in ready.values()]))
# -         for (_, waiting), move in zip(ready.values(), moves):
# -             waiting.set_result(move)
# +             moves = self.choose(list(ready), torch.stack([state for state, _ in ready.values()]))
# +             for (_, waiting), move in zip(ready.values(), moves):
# +                 waiting.set_result(move)
# %% batched: wrong, never answers the one that came last | still has no answer
class BatchedAgent(Agent):
    def __init__(self, observers):
        super().__init__(observers)
        self.size = len(observers)
        self.lock = threading.Lock()
        self.waiting = {}

    @rpc.functions.async_execution
    def act(self, observer, state):
        with self.lock:
            self.waiting[observer] = state, rpc.Future()
            if len(self.waiting) == self.size:
                moves = self.choose(list(self.waiting), torch.stack([state for state, _ in self.waiting.values()]))
                for (_, future), move in zip(self.waiting.values(), moves):
                    future.set_result(move)
                self.waiting = {}
            return rpc.Future()


# %%% batched: wrong, a thread waits | its thread waits
# -         self.waiting = {}
# +         self.waiting = {}
# +         self.all_there = threading.Event()
# state, rpc.Future() => state
# -                 moves = self.choose(list(self.waiting), torch.stack([state for state, _ in self.waiting.values()]))
# -                 for (_, future), move in zip(self.waiting.values(), moves):
# -                     future.set_result(move)
# -                 self.waiting = {}
# -             return rpc.Future()
# +                 self.all_there.set()
# +         self.all_there.wait()
# +         future = rpc.Future()
# +         future.set_result(self.choose([observer], state.unsqueeze(0))[0])
# +         return future
# %% batched: wrong, moves in the order of the names | meant for another one
# (_, waiting), move in zip(ready.values(), moves) => name, move in zip(sorted(ready), moves)
# waiting. => ready[name][1].
# %% batched: wrong, names in order, states as they came | names and states are in different orders
# list(ready) => sorted(ready)
# %% batched: wrong, forgets those who wait after they have their answers | Two calls came at the same time
# -             if len(self.waiting) < self.size:
# -                 return future
# -             ready, self.waiting = self.waiting, {}
# -         moves = self.choose(list(ready), torch.stack([state for state, _ in ready.values()]))
# -         for (_, waiting), move in zip(ready.values(), moves):
# -             waiting.set_result(move)
# +             ready = dict(self.waiting)
# +         if len(ready) == self.size:
# +             moves = self.choose(list(ready), torch.stack([state for state, _ in ready.values()]))
# +             for (_, waiting), move in zip(ready.values(), moves):
# +                 waiting.set_result(move)
# +             with self.lock:
# +                 self.waiting.clear()
# %% batched: right, answers with the lock
# -             if len(self.waiting) < self.size:
# -                 return future
# -             ready, self.waiting = self.waiting, {}
# -         moves = self.choose(list(ready), torch.stack([state for state, _ in ready.values()]))
# -         for (_, waiting), move in zip(ready.values(), moves):
# -             waiting.set_result(move)
# +             if len(self.waiting) == self.size:
# +                 names = sorted(self.waiting)
# +                 moves = self.choose(names, torch.stack([self.waiting[name][0] for name in names]))
# +                 for name, move in zip(names, moves):
# +                     self.waiting[name][1].set_result(move)
# +                 self.waiting.clear()
# %% lagged_loss: wrong, no weights | With weights of at most
# => return -(now * (worth - worth.mean())).mean()
# %% lagged_loss: wrong, the ratio upside down | With weights of at most 10
# now.detach() - then => then - now.detach()
# %% lagged_loss: wrong, no bound | With weights of at most 1,
# ().clamp(max=most) => ()
# %% lagged_loss: wrong, a bound from below too | With weights of at most 1,
# max=most => 1 / most, most
# %% lagged_loss: wrong, bounds the logarithm | With weights of at most 1,
# exp().clamp(max=most) => clamp(max=most).exp()
# %% lagged_loss: wrong, a gradient through the weights | a gradient goes through the weights
# now.detach() => now
# %% lagged_loss: wrong, the sum | 4 times as much
# ).mean() => ).sum()
# %% lagged_loss: wrong, no baseline | the loss should be
# (worth - worth.mean()) => worth
# %% lagged_loss: wrong, the sign | with the other sign
# return -( => return (
# %% lagged_loss: wrong, a number | A tensor of one number
# ).mean() => ).mean().item()
# %% lagged_loss: wrong, cuts the graph | no graph leads back
# => weight = (now - then).exp().clamp(max=most)
# => return -(weight * now * (worth - worth.mean())).mean().detach()
# %% lagged_loss: right, with torch.minimum
# => with torch.no_grad():
# =>     weight = torch.minimum(now.exp() / then.exp(), torch.tensor(float(most)))
# => return (weight * now * (worth.mean() - worth)).sum() / len(now)
