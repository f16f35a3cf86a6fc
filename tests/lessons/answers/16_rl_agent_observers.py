# %% returns: wrong, forgets to turn the list around | yours gave [1.0, 0.5, 0.25]
def returns(rewards, gamma):
    found, later = [], 0.0
    for reward in reversed(rewards):
        later = reward + gamma * later
        found.append(later)
    return found


# %% returns: wrong, sums up what came before | yours gave [0.0, 0.0, 1.0]
def returns(rewards, gamma):
    found, before = [], 0.0
    for reward in rewards:
        before = reward + gamma * before
        found.append(before)
    return found


# %% returns: wrong, does not discount | yours gave [1.0, 1.0, 1.0]
def returns(rewards, gamma):
    return [sum(rewards[step:]) for step in range(len(rewards))]


# %% returns: wrong, works in place | changes the list
def returns(rewards, gamma):
    for step in reversed(range(len(rewards) - 1)):
        rewards[step] += gamma * rewards[step + 1]
    return rewards


# %% batched: wrong, answers each observer at once | before all observers have asked
class BatchedAgent(Agent):
    @rpc.functions.async_execution
    def act(self, observer, state):
        future = rpcbench.Future()
        future.set_result(self.choose([observer], state.unsqueeze(0))[0])
        return future


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
            self.waiting[observer] = state, rpcbench.Future()
            if len(self.waiting) == self.size:
                moves = self.choose(list(self.waiting), torch.stack([state for state, _ in self.waiting.values()]))
                for (_, future), move in zip(self.waiting.values(), moves):
                    future.set_result(move)
                self.waiting = {}
            return rpcbench.Future()


# %% batched: wrong, gives everybody the first move | meant for another one
class BatchedAgent(Agent):
    def __init__(self, observers):
        super().__init__(observers)
        self.size = len(observers)
        self.lock = threading.Lock()
        self.waiting = {}

    @rpc.functions.async_execution
    def act(self, observer, state):
        future = rpcbench.Future()
        with self.lock:
            self.waiting[observer] = state, future
            if len(self.waiting) < self.size:
                return future
            ready, self.waiting = self.waiting, {}
        moves = self.choose(list(ready), torch.stack([state for state, _ in ready.values()]))
        for _, waiting in ready.values():
            waiting.set_result(moves[0])
        return future


# %% batched: wrong, does not empty the list of those who wait | before all observers have asked
class BatchedAgent(Agent):
    def __init__(self, observers):
        super().__init__(observers)
        self.size = len(observers)
        self.lock = threading.Lock()
        self.waiting = {}

    @rpc.functions.async_execution
    def act(self, observer, state):
        future = rpcbench.Future()
        with self.lock:
            self.waiting[observer] = state, future
            if len(self.waiting) < self.size:
                return future
        moves = self.choose(list(self.waiting), torch.stack([state for state, _ in self.waiting.values()]))
        for (_, waiting), move in zip(self.waiting.values(), moves):
            if not waiting.done():
                waiting.set_result(move)
        return future


# %% batched: wrong, one pass for each observer | batches of [1, 1, 1]
class BatchedAgent(Agent):
    def __init__(self, observers):
        super().__init__(observers)
        self.size = len(observers)
        self.lock = threading.Lock()
        self.waiting = {}

    @rpc.functions.async_execution
    def act(self, observer, state):
        future = rpcbench.Future()
        with self.lock:
            self.waiting[observer] = state, future
            if len(self.waiting) < self.size:
                return future
            ready, self.waiting = self.waiting, {}
        for name, (state, waiting) in ready.items():
            waiting.set_result(self.choose([name], state.unsqueeze(0))[0])
        return future
