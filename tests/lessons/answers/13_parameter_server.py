# %% staleness: wrong, counts the push itself | and yours gave
# -             found.append(steps - pulled[who])
# -             steps += 1
# +             steps += 1
# +             found.append(steps - pulled[who])
# %% staleness: wrong, takes a push for a pull too | and yours gave
# => steps, pulled, found = 0, {}, []
# => for what, who in log:
# =>     if what == "push":
# =>         found.append(steps - pulled[who])
# =>         steps += 1
# =>     pulled[who] = steps
# => return found
# %% staleness: wrong, counts entries of the log | and yours gave
# steps, pulled, found = 0, => pulled, found =
# what, who in log => place, (what, who) in enumerate(log)
# [who] = steps => [who] = place
# -             found.append(steps - pulled[who])
# -             steps += 1
# +             found.append(place - pulled[who] - 1)
# %% staleness: wrong, one pull for all trainers | and yours gave
# , {}, [] => , 0, []
# , who in => , _ in
# pulled[who] = => pulled =
# steps - pulled[who] => steps - pulled
# %% staleness: wrong, counts the steps of other trainers only | and yours gave
# steps, pulled, found = 0, {}, [] => found, since = [], {}
# pulled[who] = steps => since[who] = 0
# -             found.append(steps - pulled[who])
# -             steps += 1
# +             found.append(since[who])
# +             for other in since:
# +                 since[other] += other != who
# %% staleness: wrong, a set | should be a list
# => return {sum(what == "push" for what, _ in log)}
# %% staleness: wrong, one for each entry | pushes, not
# => return [0 for _ in log]
# %% staleness: wrong, uses up the log | changes the log
# -     for what, who in log:
# +     while log:
# +         what, who = log.pop(0)
# %% staleness: wrong, keeps the first pull until the push | For “pull a, pull b, push b, pull a, push a” it is
# found = 0, {} => pushed, found = 0, {}, set()
# -             pulled[who] = steps
# +             if who not in pulled or who in pushed:
# +                 pulled[who] = steps
# +                 pushed.discard(who)
# -             found.append(steps - pulled[who])
# +             found.append(steps - pulled[who])
# +             pushed.add(who)
# %% big_step: wrong, the sum of the losses | 3 times as long
# -         loss = torch.stack(losses).mean()
# -         dist_autograd.backward(context_id, [loss])
# +         dist_autograd.backward(context_id, losses)
# return loss.item() => return torch.stack(losses).mean().item()
# %% big_step: wrong, a backward for each batch | there were 3 pushes
def big_step(weights, optimizer, batches):
    total = 0.0
    with dist_autograd.context() as context_id:
        _, pulled = weights.rpc_sync().pull()
        for images, labels in batches:
            loss = F.cross_entropy(predict(images, pulled), labels) / len(batches)
            dist_autograd.backward(context_id, [loss], retain_graph=True)
            total += loss.item()
        optimizer.step(context_id)
    return total


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
# -         _, pulled = weights.rpc_sync().pull()
# -         losses = [F.cross_entropy(predict(images, pulled), labels) for images, labels in batches]
# +         losses = []
# +         for images, labels in batches:
# +             _, pulled = weights.rpc_sync().pull()
# +             losses.append(F.cross_entropy(predict(images, pulled), labels))
# %% big_step: wrong, makes no step | have not moved
# -         optimizer.step(context_id)
# %% big_step: wrong, pulls before the context begins | have not moved
# -     with dist_autograd.context() as context_id:
# +     _, pulled = weights.rpc_sync().pull()
# +     with dist_autograd.context() as context_id:
# -         _, pulled = weights.rpc_sync().pull()
# %% big_step: wrong, the last batch only | along the gradient of the mean loss
# -         losses = [F.cross_entropy(predict(images, pulled), labels) for images, labels in batches]
# -         loss = torch.stack(losses).mean()
# +         for images, labels in batches:
# +             loss = F.cross_entropy(predict(images, pulled), labels)
# %% big_step: wrong, divides by three always | 0.667 times as long
# -         losses = [F.cross_entropy(predict(images, pulled), labels) for images, labels in batches]
# -         loss = torch.stack(losses).mean()
# +         loss = sum(F.cross_entropy(predict(images, pulled), labels) for images, labels in batches) / 3
# %% big_step: right, a tensor
# loss.item => loss.detach
# %% big_step: wrong, tells of a step twice | was told of 2 steps
# -     return loss.item()
# +     weights.rpc_sync().pushed(0)
# +     weights.rpc_sync().pushed(0)
# +     return loss.item()
# %% big_step: right, tells the server
# _, pulled => steps_at_pull, pulled
# -     return loss.item()
# +         weights.rpc_sync().pushed(steps_at_pull)
# +     return loss.item()
# %% big_step: wrong, three batches at most | along the gradient of the mean loss
# in batches => in batches[:3]
# %% bounded: wrong, forgets those that wait | still has no answer
class Bounded:
    def __init__(self, trainers, bound):
        self.bound, self.clocks = bound, dict.fromkeys(trainers, 0)

    @rpc.functions.async_execution
    def finished(self, name):
        self.clocks[name] += 1
        answer = rpc.Future()
        if self.clocks[name] - min(self.clocks.values()) <= self.bound:
            answer.set_result(self.clocks[name])
        return answer


# %%% bounded: wrong, answers every call at once | has its answer already
# bound, self.clocks = bound, => clocks =
# -         if self.clocks[name] - min(self.clocks.values()) <= self.bound:
# -             answer.set_result(self.clocks[name])
# +         answer.set_result(self.clocks[name])
# %%% bounded: wrong, a thread waits | its thread waits
# -         self.bound, self.clocks = bound, dict.fromkeys(trainers, 0)
# +         self.bound, self.clocks, self.changed = bound, dict.fromkeys(trainers, 0), threading.Condition()
# -         self.clocks[name] += 1
# +         with self.changed:
# +             self.clocks[name] += 1
# +             self.changed.notify_all()
# +             self.changed.wait_for(lambda: self.clocks[name] - min(self.clocks.values()) <= self.bound)
# -         if self.clocks[name] - min(self.clocks.values()) <= self.bound:
# -             answer.set_result(self.clocks[name])
# +         answer.set_result(self.clocks[name])
# %% bounded: wrong, not marked | should be marked
class Bounded:
    def __init__(self, trainers, bound):
        self.bound, self.clocks = bound, dict.fromkeys(trainers, 0)

    def finished(self, name):
        self.clocks[name] += 1
        return self.clocks[name]


# %% bounded: wrong, one step too generous | has its answer already
class Bounded:
    def __init__(self, trainers, bound):
        self.bound, self.clocks, self.waiting = bound, dict.fromkeys(trainers, 0), {}

    @rpc.functions.async_execution
    def finished(self, name):
        self.clocks[name] += 1
        self.waiting[name] = answer = rpc.Future()
        for each in list(self.waiting):
            if self.clocks[each] - min(self.clocks.values()) <= self.bound + 1:
                self.waiting.pop(each).set_result(self.clocks[each])
        return answer


# %%% bounded: wrong, frees one trainer with each call | still has no answer
# bound + 1 => bound
# -                 self.waiting.pop(each).set_result(self.clocks[each])
# +                 self.waiting.pop(each).set_result(self.clocks[each])
# +                 break
# %%% bounded: wrong, answers with the clock of the slowest | the answer to
# -         self.waiting[name] = answer = rpc.Future()
# +         self.waiting[name] = answer = rpc.Future()
# +         least = min(self.clocks.values())
# min(self.clocks.values()) <= self.bound + 1 => least <= self.bound
# (self.clocks[each]) => (least)
# %%% bounded: wrong, no lock | Two calls came at the same time
# bound + 1 => bound
# %%% bounded: wrong, one step too strict | still has no answer
# <= self.bound + 1 => < max(self.bound, 1)
# %% bounded: wrong, the lock for the count alone | Two calls came at the same time
class Bounded:
    def __init__(self, trainers, bound):
        self.bound, self.clocks, self.waiting = bound, dict.fromkeys(trainers, 0), {}
        self.lock = threading.Lock()

    @rpc.functions.async_execution
    def finished(self, name):
        with self.lock:
            self.clocks[name] += 1
            self.waiting[name] = answer = rpc.Future()
        free = [each for each in self.waiting if self.clocks[each] - min(self.clocks.values()) <= self.bound]
        for each in free:
            self.waiting.pop(each).set_result(self.clocks[each])
        return answer


# %% bounded: wrong, all servers share the counters | the servers share what they know
class Bounded:
    clocks, waiting, lock = {}, {}, threading.RLock()

    def __init__(self, trainers, bound):
        self.bound = bound
        self.clocks.clear()
        self.waiting.clear()
        self.clocks.update(dict.fromkeys(trainers, 0))

    @rpc.functions.async_execution
    def finished(self, name):
        with self.lock:
            self.clocks[name] += 1
            self.waiting[name] = answer = rpc.Future()
            for each in list(self.waiting):
                if self.clocks[each] - min(self.clocks.values()) <= self.bound:
                    self.waiting.pop(each).set_result(self.clocks[each])
        return answer
