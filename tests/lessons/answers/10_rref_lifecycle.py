# %% entry: wrong, keeps the reference | still holds the reference
# loss.to_here().item() => loss
# %% entry: wrong, hides the reference in a function | still holds the reference
# return loss => return lambda: loss
# %% entry: wrong, keeps a method of the reference | still holds the reference
# to_here().item() => to_here
# %% entry: wrong, keeps the reference beside the number | still holds the reference
# loss.to_here().item() => {"loss": loss.to_here().item(), "from": loss}
# %% entry: wrong, keeps a tensor | That is a tensor
# ().item() => ()
# %% entry: wrong, wants the value itself where only the owner has it | On worker2 it raised RuntimeError
# .to_here => .local_value
# %% entry: wrong, takes the whole part only | The loss was 0.25; in the list stands 0
# loss.to_here().item() => int(loss.to_here())
# %% entry: wrong, a text | in the list stands '0.25'
# loss.to_here().item() => str(loss.to_here().item())
# %% entry: right, as a float
# loss.to_here().item() => float(loss.to_here())
# %% entry: wrong, a list where the loss has a shape | The loss was [0.1328125]; in the list stands [0.1328125]
# ().item() => ().tolist()
# %% entry: wrong, the first of a list | On worker2 it raised
# ().item() => ()[0].item()
# %% entry: wrong, rounds | The loss was [0.1328125]; in the list stands 0.1328
# loss.to_here().item() => round(loss.to_here().item(), 4)
# %% bad_order: wrong, the owner hears of the child in time | Nothing goes wrong in this order
# "UserDelete", "Call" => "Call", "ForkRequest", "UserDelete"
# %% bad_order: wrong, the owner answers the child, too | Nothing goes wrong in this order
# "UserDelete", "Call" => "Call", "ForkRequest", "ForkAccept", "UserDelete"
# %% bad_order: wrong, the order of the protocol | Nothing goes wrong in this order
# return ["UserDelete", "Call"] => return ["Call", "ForkRequest", "ForkAccept", "ChildAccept", "UserDelete"]
# %% bad_order: wrong, delivers too little | Nothing goes wrong in this order
# "UserDelete", "Call" => "Call"
# %% bad_order: wrong, begins with what has not been sent yet | no ForkRequest is in flight
# "UserDelete", "Call" => "ForkRequest", "Call", "UserDelete"
# %% bad_order: wrong, a kind that does not exist | no Delete is in flight
# "UserDelete" => "Delete"
# %% bad_order: wrong, a text | should be a list
# ["UserDelete", "Call"] => "UserDelete, Call"
# %% bad_order: wrong, a set, which has no order | should be a list
# ["UserDelete", "Call"] => {"UserDelete", "Call"}
# %% bad_order: right, the call arrives in between
# "UserDelete", "Call" => "Call", "UserDelete", "ForkRequest"
# %% may_delete: wrong, forgets the children | a Call brings it to worker2
# confirmed and not children => confirmed
# %% may_delete: wrong, forgets that the owner may not know it yet | still kept
# confirmed and not => not
# %% may_delete: wrong, forgets its own object | notebook still uses it
# released and confirmed => confirmed
# %% may_delete: wrong, never | still kept
# not children => children
# %% may_delete: wrong, always | still uses it
# released and confirmed and not children => True
# %% may_delete: wrong, one of two is enough | still
# released and confirmed => (released or confirmed)
# %% may_delete: wrong, waits for the last but one child only | a Call brings it to worker2
# not children => children <= 1
# %% may_delete: wrong, right for one child | With 2 children
# not children => children != 1
# %% may_delete: right, nothing where it may not
def may_delete(released, confirmed, children):
    if released and confirmed and children == 0:
        return True
    return None


# %%% may_delete: right, in three steps
# released and confirmed and children == 0 => not released or not confirmed
# True => False
# None => children == 0
# %%% may_delete: wrong, forgets its own object while there are children | For released = False
# released and confirmed and children == 0 => children > 1
# True => not released
# None => released and confirmed and not children
# %%% may_delete: wrong, ignores `released` | notebook still uses it
# released and confirmed and children == 0 => not confirmed
# True => False
# None => children == 0
# %% freed_after: wrong, a set that forgets | For +a +b -b +b -a
# requested, deleted = set(), => users =
# requested. => users.
# deleted.add => users.discard
# requested == deleted => not users
# %% freed_after: wrong, an error at the second delete | raised KeyError
# requested, deleted = set(), => users =
# requested. => users.
# deleted.add => users.remove
# requested == deleted => not users
# %% freed_after: wrong, counts from 0 | For +a -a
def freed_after(messages):
    requested, deleted = set(), set()
    for number, (kind, fork) in enumerate(messages):
        (requested if kind == "ForkRequest" else deleted).add(fork)
        if requested == deleted:
            return number
    return None


# %%% freed_after: wrong, counts users | For +a +b +b -a -b
# requested, deleted = set(), set() => count = 0
# (kind, fork) in enumerate(messages) => (kind, _) in enumerate(messages, 1)
# (requested if kind == "ForkRequest" else deleted).add(fork) => count += 1 if kind == "ForkRequest" else -1
# requested == deleted => count == 0
# %% freed_after: wrong, the first delete frees | For +a +b -a -b
def freed_after(messages):
    for number, (kind, _) in enumerate(messages, 1):
        if kind == "UserDelete":
            return number
    return None


# %% freed_after: wrong, whether it is freed | For +a -a
def freed_after(messages):
    requested = {fork for kind, fork in messages if kind == "ForkRequest"}
    deleted = {fork for kind, fork in messages if kind == "UserDelete"}
    return requested == deleted


# %%% freed_after: wrong, looks at the end only | For +a -a +a -a
# requested == deleted => len(messages) if requested == deleted else None
# %% freed_after: wrong, counts different messages only | For +a +b +b -a -b
def freed_after(messages):
    seen, count = [], 0
    for message in messages:
        if message not in seen:
            seen.append(message)
            count += 1 if message[0] == "ForkRequest" else -1
            if count == 0:
                return len(seen)
    return None


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
