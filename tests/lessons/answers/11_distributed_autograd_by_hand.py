# %% carry_back: wrong, two passes that keep the graph | ran 2 times
# => for tensor, gradient in zip(returned, gradients):
# =>     if gradient is not None:
# =>         tensor.backward(gradient, retain_graph=True)
# => return [tensor.grad for tensor in received]
# %%% carry_back: wrong, one pass for each tensor | was gone when the second pass
# gradient, retain_graph=True => gradient
# %% carry_back: wrong, forgets the gradients that came | yours gave tensor([5., 7.])
# (tensor, gradient) => tensor.sum()
# autograd.backward([tensor for tensor, _ in used], [gradient for _, gradient in used]) => stack(used).sum().backward()
# %% carry_back: wrong, asks for each gradient, also where there is none | The function raised RuntimeError
# => used = [(tensor, gradient) for tensor, gradient in zip(returned, gradients) if gradient is not None]
# => return list(torch.autograd.grad([t for t, _ in used], received, [g for _, g in used]))
# %% carry_back: wrong, only those that have a gradient | entries, not 2
# in received => in received if tensor.grad is not None
# %% carry_back: wrong, only the first returned tensor | yours gave tensor([1., 1.])
# => torch.autograd.backward([received[0] * 1.0], [gradients[0]])
# => return [tensor.grad for tensor in received]
# %%% carry_back: wrong, passes None on to torch | belongs to a tensor that was not needed
# [received[0] * 1.0], [gradients[0]] => returned, gradients
# %% carry_back: wrong, zeros for what was not needed | its gradient is None
# => gradients = [torch.zeros_like(t) if g is None else g for t, g in zip(returned, gradients)]
# => torch.autograd.backward(returned, gradients)
# => return [tensor.grad for tensor in received]
# %% carry_back: wrong, sends the gradients on as they came | entries, not 2
# => return gradients
# %% carry_back: wrong, leaves the weights of the worker without gradients | `weight.grad` should be
# => used = [place for place, gradient in enumerate(gradients) if gradient is not None]
# => outputs, theirs = [returned[place] for place in used], [gradients[place] for place in used]
# => return list(torch.autograd.grad(outputs, received, theirs, allow_unused=True))
# %% carry_back: right, pairs by place
# => used = [place for place, gradient in enumerate(gradients) if gradient is not None]
# => torch.autograd.backward([returned[place] for place in used], [gradients[place] for place in used])
# => return [each.grad for each in received]
# %% carry_back: wrong, stops at the first tensor that was not needed | The gradient of the first tensor should be
# -     used = [(tensor, gradient) for tensor, gradient in zip(returned, gradients) if gradient is not None]
# +     used = []
# +     for tensor, gradient in zip(returned, gradients):
# +         if gradient is None:
# +             break
# +         used.append((tensor, gradient))
# %% carry_back: wrong, cannot do with nothing | no gradient came at all
# -     torch.autograd.backward([tensor for tensor, _ in used], [gradient for _, gradient in used])
# +     tensors, theirs = zip(*used)
# +     torch.autograd.backward(tensors, theirs)
# %% carry_back: wrong, the gradient of the first tensor for all that have one | The gradient of the second tensor
# tensor.grad => None if tensor.grad is None else received[0].grad
# %% discover: wrong, two steps | is missing
# => return set(found) | {far for message in found for far in nearest[message]}
# %% discover: wrong, only the first step | is missing
# => return set(found)
# %% discover: wrong, all that was recorded | no gradient will ever come
# => return set(nearest)
# %% discover: wrong, forgets the beginning | a is missing
# => known, todo = set(), list(found)
# => while todo:
# =>     for message in nearest[todo.pop()]:
# =>         if message not in known:
# =>             known.add(message)
# =>             todo.append(message)
# => return known
# %% discover: wrong, empties the list that it was given | It should stay as it was
# known, todo = set(), list(found) => known = set()
# while todo => while found
# todo.pop => found.pop
# todo += nearest => found += nearest
# %% discover: right, a list
# => known = list(found)
# => for message in known:
# =>     known += [other for other in nearest[message] if other not in known]
# => return known
# %%% discover: wrong, walks every way anew | asked twice
# list => set
# known: => found:
# known += [other for other in nearest[message] if other not in known] => known |= discover(nearest[message], nearest)
# %% discover: right, recursive
def discover(found, nearest):
    known = set()

    def visit(message):
        if message not in known:
            known.add(message)
            for other in nearest[message]:
                visit(other)

    for message in found:
        visit(message)
    return known


# %% discover: wrong, looks at what is known only where it is found | asked twice about the message c
# -         if message not in known:
# -             known.add(message)
# -             todo += nearest[message]
# +         known.add(message)
# +         todo += [other for other in nearest[message] if other not in known]
# %% discover: wrong, goes through the whole table until nothing is new | asked twice about the message a
# => known, before = set(found), -1
# => while len(known) > before:
# =>     before = len(known)
# =>     for message, others in nearest.items():
# =>         if message in known:
# =>             known.update(others)
# => return known
# %% step: wrong, still copies | weight1 is still without
# -         loss = rpc.rpc_sync("worker2", run, (second_half, hidden, weight2))
# +         safe = torch.tensor(hidden.tolist(), dtype=torch.double)
# +         loss = rpc.rpc_sync("worker2", run, (second_half, safe, weight2))
# %% step: wrong, the first call is still outside | weight1 is still without
# => hidden = rpc.rpc_sync("worker1", run, (first_half, x, weight1))
# => with dist_autograd.context() as context_id:
# =>     loss = rpc.rpc_sync("worker2", run, (second_half, hidden, weight2))
# =>     dist_autograd.backward(context_id, [loss])
# =>     return gradients(context_id)
# %%% step: wrong, a context for each call | another autograd context
# -     hidden = rpc.rpc_sync("worker1", run, (first_half, x, weight1))
# +     with dist_autograd.context():
# +         hidden = rpc.rpc_sync("worker1", run, (first_half, x, weight1))
# %%% step: wrong, zeros where nothing was found | not that of the whole loss
# ("worker1", run, (first_half, x, weight1)) => ("worker1", run, (first_half, x, weight1)).detach()
# -         return gradients(context_id)
# +         far = rpc.rpc_sync("worker2", gradient_of, (context_id, weight2))
# +         return [torch.zeros(4, 5, dtype=torch.double), far]
# %% step: wrong, reads the gradients after the context has ended | after the context had ended
# -         return gradients(context_id)
# +     return gradients(context_id)
# %% step: wrong, backward after the context has ended | after the context had ended
# -         dist_autograd.backward(context_id, [loss])
# -         return gradients(context_id)
# +     dist_autograd.backward(context_id, [loss])
# +     return gradients(context_id)
# %% step: wrong, asks one owner after the other | before the other was asked
# -         return gradients(context_id)
# +         return [rpc.rpc_sync(weight.owner(), gradient_of, (context_id, weight)) for weight in (weight1, weight2)]
# %% step: wrong, no backward | weight1 is still without
# -         loss = rpc.rpc_sync("worker2", run, (second_half, hidden, weight2))
# -         dist_autograd.backward(context_id, [loss])
# +         rpc.rpc_sync("worker2", run, (second_half, hidden, weight2))
# %% step: wrong, local backward | weight1 is still without
# => hidden = first_half(x, weight1.to_here())
# => second_half(hidden, weight2.to_here()).backward()
# => return [weight1.to_here().grad, weight2.to_here().grad]
# %% step: right, worker1 calls worker2
# => with dist_autograd.context() as context_id:
# =>     loss = rpc.rpc_sync("worker1", both_halves, (x, weight1, weight2))
# =>     dist_autograd.backward(context_id, [loss])
# =>     futures = [rpc.rpc_async(w.owner(), gradient_of, (context_id, w)) for w in (weight1, weight2)]
# =>     return tuple(future.wait() for future in futures)
# %% step: wrong, fetches the weights and computes here | none has travelled
# => near = [leaf(weight.to_here().detach()) for weight in (weight1, weight2)]
# => with dist_autograd.context():
# =>     loss = second_half(first_half(x, near[0]), near[1])
# =>     return list(torch.autograd.grad(loss, near))
# %% parts: wrong, counts what does not take part | yours gave 2. Yours counts messages that do not take part
def parts(found, nearest):
    counts = {}
    for message in discover_all(found, nearest):
        counts[message] = (message in found) + sum(message in others for others in nearest.values())
    return counts


def discover_all(found, nearest):
    known, todo = set(), list(found)
    while todo:
        message = todo.pop()
        if message not in known:
            known.add(message)
            todo += nearest[message]
    return known


# %% parts: wrong, all messages are in the dict | unused does not take part
# => known = discover_all(found, nearest)
# => return {m: (m in found) + sum(m in nearest[other] for other in known) for m in nearest}
# %% parts: wrong, forgets the loss | yours gave 0. In yours the loss itself gives no part
# => known = discover_all(found, nearest)
# => return {message: sum(message in nearest[other] for other in known) for message in known}
# %% parts: wrong, counts all that have it behind them, however far | that have it further behind them
# => known = discover_all(found, nearest)
# => return {m: (m in found) + sum(m in discover_all(nearest[other], nearest) for other in known) for m in known}
# %% parts: wrong, counts ways from the loss | yours gave 2. Yours counts each way from the loss
# => counts, todo = {}, list(found)
# => while todo:
# =>     message = todo.pop()
# =>     counts[message] = counts.get(message, 0) + 1
# =>     todo += nearest[message]
# => return counts
# %% parts: wrong, a set | should be a dict
# => return discover_all(found, nearest)
# %% parts: wrong, one part for each | yours gave 1. Yours counts one part for each
# => return dict.fromkeys(discover_all(found, nearest), 1)
# %% parts: wrong, counts what it sends on | yours gave 2. Yours counts the messages nearest behind it
# => return {message: len(nearest[message]) for message in discover_all(found, nearest)}
