# %% insist
def insist(call):
    while True:
        try:
            return call()
        except rpcbench.ConnectionLostError as error:
            if error.maybe_executed:
                raise


# %% lamport
def lamport(events):
    counters, carried, found = {}, {}, []
    for what, member, message in events:
        seen = carried[message] if what == "receive" else 0
        counters[member] = max(counters.get(member, 0), seen) + 1
        if what == "send":
            carried[message] = counters[member]
        found.append(counters[member])
    return found


# %% once
class Once:
    def __init__(self, function):
        self.function, self.answers, self.lock = function, {}, threading.Lock()

    def call(self, ticket, *args):
        with self.lock:
            first = ticket not in self.answers
            answer = self.answers.setdefault(ticket, rpc.Future())
        if first:
            try:
                answer.set_result(self.function(*args))
            except Exception as error:
                answer.set_exception(error)
        return answer.wait()
