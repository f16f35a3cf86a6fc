# %% unconfirmed: wrong, all that have forks | its owner has confirmed it
def unconfirmed(view):
    return sorted({fork["rref"] for fork in view["forks"].values()})


# %% unconfirmed: wrong, all that are not confirmed | is being deleted
def unconfirmed(view):
    return sorted({fork["rref"] for fork in view["forks"].values() if fork["state"] != "confirmed"})


# %% unconfirmed: wrong, each fork | is in the answer twice
def unconfirmed(view):
    return sorted(fork["rref"] for fork in view["forks"].values() if fork["state"] == "pending")


# %% unconfirmed: wrong, in the order of the forks | is it sorted
def unconfirmed(view):
    return list(dict.fromkeys(fork["rref"] for fork in view["forks"].values() if fork["state"] == "pending"))


# %% unconfirmed: wrong, keys of forks | 1.4 has one fork, which is pending
def unconfirmed(view):
    return sorted(key for key, fork in view["forks"].items() if fork["state"] == "pending")
