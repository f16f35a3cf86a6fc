# %% staleness
def staleness(log):
    steps, pulled, found = 0, {}, []
    for what, who in log:
        if what == "pull":
            pulled[who] = steps
        else:
            found.append(steps - pulled[who])
            steps += 1
    return found


# %% big_step
def big_step(weights, optimizer, batches):
    with dist_autograd.context() as context_id:
        _, pulled = weights.rpc_sync().pull()
        losses = [F.cross_entropy(predict(images, pulled), labels) for images, labels in batches]
        loss = torch.stack(losses).mean()
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    return loss.item()


# %% bounded
class Bounded:
    def __init__(self, trainers, bound):
        self.bound, self.lock = bound, threading.Lock()
        self.finished_steps = dict.fromkeys(trainers, 0)
        self.waiting = {}

    @rpc.functions.async_execution
    def finished(self, name):
        answer = rpc.Future()
        with self.lock:
            self.finished_steps[name] += 1
            self.waiting[name] = answer
            most = min(self.finished_steps.values()) + self.bound
            free = [each for each in self.waiting if self.finished_steps[each] <= most]
            answers = [(self.waiting.pop(each), self.finished_steps[each]) for each in free]
        for future, steps in answers:
            future.set_result(steps)
        return answer
