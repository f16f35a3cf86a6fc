# %% entry: wrong, keeps the reference | still holds the reference
def entry(loss):
    return loss


# %% entry: wrong, hides the reference in a function | still holds the reference
def entry(loss):
    return lambda: loss.to_here().item()


# %% entry: wrong, keeps the reference beside the number | still holds the reference
def entry(loss):
    return {"loss": loss.to_here().item(), "from": loss}


# %% entry: wrong, keeps a tensor | That is a tensor
def entry(loss):
    return loss.to_here()


# %% bad_order: wrong, the owner hears of the child in time | Nothing goes wrong in this order
bad_order = ["Call", "ForkRequest", "UserDelete"]


# %% bad_order: wrong, the owner answers the child, too | Nothing goes wrong in this order
bad_order = ["Call", "ForkRequest", "ForkAccept", "UserDelete"]


# %% bad_order: wrong, begins with what has not been sent yet | no ForkRequest is on its way
bad_order = ["ForkRequest", "Call", "UserDelete"]


# %% may_say_goodbye: wrong, forgets the children | a Call brings it to worker2
def may_say_goodbye(released, confirmed, children):
    return released and confirmed


# %% may_say_goodbye: wrong, forgets that the owner may not know it yet | still kept
def may_say_goodbye(released, confirmed, children):
    return released and not children


# %% may_say_goodbye: wrong, forgets its own object | notebook still uses it
def may_say_goodbye(released, confirmed, children):
    return confirmed and not children


# %% may_say_goodbye: wrong, never | still kept
def may_say_goodbye(released, confirmed, children):
    return released and confirmed and children
