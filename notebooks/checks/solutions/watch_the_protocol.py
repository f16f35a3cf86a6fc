# %% unconfirmed
def unconfirmed(view):
    return sorted({fork["rref"] for fork in view["forks"].values() if fork["state"] == "pending"})
