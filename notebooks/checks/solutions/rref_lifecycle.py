# %% entry
def entry(loss):
    return loss.to_here().item()


# %% bad_order
bad_order = ["UserDelete", "Call"]


# %% may_say_goodbye
def may_say_goodbye(released, confirmed, children):
    return released and confirmed and not children
