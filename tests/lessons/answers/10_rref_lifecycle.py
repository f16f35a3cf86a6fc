# %% entry: wrong, keeps the reference | still holds the reference
# => return loss
# %% entry: wrong, hides the reference in a function | still holds the reference
# => return lambda: loss.to_here().item()
# %% entry: wrong, keeps a method of the reference | still holds the reference
# => return loss.to_here
# %% entry: wrong, keeps the reference beside the number | still holds the reference
# => return {"loss": loss.to_here().item(), "from": loss}
# %% entry: wrong, keeps a tensor | That is a tensor
# => return loss.to_here()
# %% entry: wrong, wants the value itself where only the owner has it | On worker2 it raised RuntimeError
# => return loss.local_value().item()
# %% entry: wrong, takes the whole part only | The loss was 0.25; in the list stands 0
# => return int(loss.to_here())
# %% entry: wrong, a text | in the list stands '0.25'
# => return str(loss.to_here().item())
# %% entry: right, as a float
# => return float(loss.to_here())
# %% entry: wrong, a list where the loss has a shape | The loss was [0.1328125]; in the list stands [0.1328125]
# => return loss.to_here().tolist()
# %% entry: wrong, the first of a list | On worker2 it raised
# => return loss.to_here()[0].item()
# %% entry: wrong, rounds | The loss was [0.1328125]; in the list stands 0.1328
# => return round(loss.to_here().item(), 4)
# %% bad_order: wrong, the owner hears of the child in time | Nothing goes wrong in this order
# => return ["Call", "ForkRequest", "UserDelete"]
# %% bad_order: wrong, the owner answers the child, too | Nothing goes wrong in this order
# => return ["Call", "ForkRequest", "ForkAccept", "UserDelete"]
# %% bad_order: wrong, the order of the protocol | Nothing goes wrong in this order
# => return ["Call", "ForkRequest", "ForkAccept", "ChildAccept", "UserDelete"]
# %% bad_order: wrong, delivers too little | Nothing goes wrong in this order
# => return ["Call"]
# %% bad_order: wrong, begins with what has not been sent yet | no ForkRequest is in flight
# => return ["ForkRequest", "Call", "UserDelete"]
# %% bad_order: wrong, a kind that does not exist | no Delete is in flight
# => return ["Delete", "Call"]
# %% bad_order: wrong, a text | should be a list
# => return "UserDelete, Call"
# %% bad_order: wrong, a set, which has no order | should be a list
# => return {"UserDelete", "Call"}
# %% bad_order: right, the call arrives in between
# => return ["Call", "UserDelete", "ForkRequest"]
# %% may_delete: wrong, forgets the children | a Call brings it to worker2
# => return released and confirmed
# %% may_delete: wrong, forgets that the owner may not know it yet | still kept
# => return released and not children
# %% may_delete: wrong, forgets its own object | notebook still uses it
# => return confirmed and not children
# %% may_delete: wrong, never | still kept
# => return released and confirmed and children
# %% may_delete: wrong, always | still uses it
# => return True
# %% may_delete: wrong, one of two is enough | still
# => return (released or confirmed) and not children
# %% may_delete: wrong, waits for the last but one child only | a Call brings it to worker2
# => return released and confirmed and children <= 1
# %% may_delete: wrong, right for one child | With 2 children
# => return released and confirmed and children != 1
# %% may_delete: right, nothing where it may not
# => if released and confirmed and children == 0:
# =>     return True
# => return None
# %% may_delete: wrong, forgets its own object while there are children | For released = False
# => if children > 1:
# =>     return not released
# => return released and confirmed and not children
# %% may_delete: right, in three steps
# => if not released or not confirmed:
# =>     return False
# => return children == 0
# %%% may_delete: wrong, ignores `released` | notebook still uses it
# released or not confirmed => confirmed
# %% freed_after: wrong, a set that forgets | arrives again after its delete, and b is gone for good
# requested, deleted = set(), => users =
# requested. => users.
# deleted.add => users.discard
# requested == deleted => not users
# %% freed_after: wrong, an error at the second delete | raised KeyError
# requested, deleted = set(), => users =
# requested. => users.
# deleted.add => users.remove
# requested == deleted => not users
# %% freed_after: wrong, counts from 0 | The second message removes the only user
# => requested, deleted = set(), set()
# => for number, (kind, fork) in enumerate(messages):
# =>     (requested if kind == "ForkRequest" else deleted).add(fork)
# =>     if requested == deleted:
# =>         return number
# => return None
# %%% freed_after: wrong, counts users | and b is one user
# requested, deleted = set(), set() => count = 0
# (kind, fork) in enumerate(messages) => (kind, _) in enumerate(messages, 1)
# (requested if kind == "ForkRequest" else deleted).add(fork) => count += 1 if kind == "ForkRequest" else -1
# requested == deleted => count == 0
# %% freed_after: wrong, the first delete frees | After three messages b is still a user
# => for number, (kind, _) in enumerate(messages, 1):
# =>     if kind == "UserDelete":
# =>         return number
# => return None
# %% freed_after: wrong, whether it is freed | For +a -a
# => requested = {fork for kind, fork in messages if kind == "ForkRequest"}
# => deleted = {fork for kind, fork in messages if kind == "UserDelete"}
# => return requested == deleted
# %%% freed_after: wrong, looks at the end only | after the value was freed changes nothing
# requested == deleted => len(messages) if requested == deleted else None
# %% freed_after: wrong, counts different messages only | For +a +b +b -a -b
# => seen, count = [], 0
# => for message in messages:
# =>     if message not in seen:
# =>         seen.append(message)
# =>         count += 1 if message[0] == "ForkRequest" else -1
# =>         if count == 0:
# =>             return len(seen)
# => return None
# %% freed_after: right, with the state of each fork
# requested, deleted = set(), set() => state = {}
# "ForkRequest" => "UserDelete"
# requested.add(fork) => state[fork] = "gone"
# deleted.add(fork) => state.setdefault(fork, "user")
# requested == deleted => "user" not in state.values()
# %% freed_after: wrong, remembers the latest only of those that are gone | For +a +b +c -b -c +b -a
def freed_after(messages):
    users, gone = set(), None
    for number, (kind, fork) in enumerate(messages, 1):
        if kind == "UserDelete":
            users.discard(fork)
            gone = fork
        elif fork != gone:
            users.add(fork)
        if not users:
            return number
    return None
