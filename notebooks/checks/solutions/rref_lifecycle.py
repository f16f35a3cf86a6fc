# %% entry
def entry(loss):
    return loss.to_here().item()


# %% bad_order
def bad_order():
    return ["UserDelete", "Call"]


# %% may_delete
def may_delete(released, confirmed, children):
    return released and confirmed and not children


# %% freed_after
def freed_after(messages):
    requested, deleted = set(), set()
    for number, (kind, fork) in enumerate(messages, 1):
        if kind == "ForkRequest":
            requested.add(fork)
        else:
            deleted.add(fork)
        if requested == deleted:
            return number
    return None
