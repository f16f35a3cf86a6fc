# %% returns
def returns(rewards, gamma):
    found, later = [], 0.0
    for reward in reversed(rewards):
        later = reward + gamma * later
        found.append(later)
    return found[::-1]


# %% batched
class BatchedAgent(Agent):
    def __init__(self, observers):
        super().__init__(observers)
        self.size = len(observers)
        self.lock = threading.Lock()
        self.waiting = {}

    @rpc.functions.async_execution
    def act(self, observer, state):
        future = rpc.Future()
        with self.lock:
            self.waiting[observer] = state, future
            if len(self.waiting) < self.size:
                return future
            ready, self.waiting = self.waiting, {}
        moves = self.choose(list(ready), torch.stack([state for state, _ in ready.values()]))
        for (_, waiting), move in zip(ready.values(), moves):
            waiting.set_result(move)
        return future


# %% lagged_loss
def lagged_loss(now, then, worth, most):
    weight = (now.detach() - then).exp().clamp(max=most)
    return -(weight * now * (worth - worth.mean())).mean()
