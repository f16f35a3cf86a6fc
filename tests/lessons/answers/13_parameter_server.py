# %% staleness: wrong, counts the push itself | and yours gave
def staleness(log):
    steps, pulled, found = 0, {}, []
    for what, who in log:
        if what == "pull":
            pulled[who] = steps
        else:
            steps += 1
            found.append(steps - pulled[who])
    return found


# %% staleness: wrong, takes a push for a pull too | and yours gave
def staleness(log):
    steps, pulled, found = 0, {}, []
    for what, who in log:
        if what == "push":
            found.append(steps - pulled[who])
            steps += 1
        pulled[who] = steps
    return found


# %% staleness: wrong, counts entries of the log | and yours gave
def staleness(log):
    pulled, found = {}, []
    for place, (what, who) in enumerate(log):
        if what == "pull":
            pulled[who] = place
        else:
            found.append(place - pulled[who] - 1)
    return found


# %% staleness: wrong, one for each entry | pushes, not
def staleness(log):
    return [0 for _ in log]


# %% big_step: wrong, the sum of the losses | 3 times as long
def big_step(weights, optimizer, batches):
    with dist_autograd.context() as context_id:
        _, pulled = weights.rpc_sync().pull()
        losses = [F.cross_entropy(predict(images, pulled), labels) for images, labels in batches]
        dist_autograd.backward(context_id, losses)
        optimizer.step(context_id)
    return torch.stack(losses).mean().item()


# %% big_step: wrong, a step for each batch | taken at one point
def big_step(weights, optimizer, batches):
    losses = []
    for images, labels in batches:
        with dist_autograd.context() as context_id:
            _, pulled = weights.rpc_sync().pull()
            loss = F.cross_entropy(predict(images, pulled), labels)
            dist_autograd.backward(context_id, [loss / len(batches)])
            optimizer.step(context_id)
        losses.append(loss.item())
    return sum(losses) / len(losses)


# %% big_step: wrong, pulls for each batch | pulled 3 times
def big_step(weights, optimizer, batches):
    with dist_autograd.context() as context_id:
        losses = []
        for images, labels in batches:
            _, pulled = weights.rpc_sync().pull()
            losses.append(F.cross_entropy(predict(images, pulled), labels))
        loss = torch.stack(losses).mean()
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    return loss.item()


# %% big_step: wrong, makes no step | have not moved
def big_step(weights, optimizer, batches):
    with dist_autograd.context() as context_id:
        _, pulled = weights.rpc_sync().pull()
        losses = [F.cross_entropy(predict(images, pulled), labels) for images, labels in batches]
        loss = torch.stack(losses).mean()
        dist_autograd.backward(context_id, [loss])
    return loss.item()


# %% big_step: wrong, pulls before the context begins | have not moved
def big_step(weights, optimizer, batches):
    _, pulled = weights.rpc_sync().pull()
    with dist_autograd.context() as context_id:
        losses = [F.cross_entropy(predict(images, pulled), labels) for images, labels in batches]
        loss = torch.stack(losses).mean()
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    return loss.item()


# %% Average: wrong, a thread waits | stands and waits
class Average:
    def __init__(self, n):
        self.barrier, self.numbers = threading.Barrier(n, self.finish), []

    def finish(self):
        self.average, self.numbers = sum(self.numbers) / len(self.numbers), []

    def push(self, number):
        self.numbers.append(number)
        self.barrier.wait(3)
        return self.average


# %% Average: wrong, one round only | RuntimeError
class Average:
    def __init__(self, n):
        self.n, self.numbers, self.answer = n, [], rpc.Future()

    @rpc.functions.async_execution
    def push(self, number):
        self.numbers.append(number)
        if len(self.numbers) % self.n == 0:
            self.answer.set_result(sum(self.numbers) / self.n)
        return self.answer


# %% Average: wrong, a future for each caller | got no answer
class Average:
    def __init__(self, n):
        self.n, self.numbers = n, []

    @rpc.functions.async_execution
    def push(self, number):
        self.numbers.append(number)
        answer = rpc.Future()
        if len(self.numbers) == self.n:
            answer.set_result(sum(self.numbers) / self.n)
            self.numbers = []
        return answer


# %% Average: wrong, the average so far | their answers were
class Average:
    def __init__(self, n):
        self.n, self.numbers = n, []

    def push(self, number):
        self.numbers.append(number)
        return sum(self.numbers) / len(self.numbers)
