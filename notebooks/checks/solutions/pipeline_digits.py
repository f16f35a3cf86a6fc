# %% busy
def busy(rows, worker):
    lasted = max(row["end"] for row in rows) - min(row["begin"] for row in rows)
    return sum(row["end"] - row["begin"] for row in rows if row["worker"] == worker) / lasted


# %% longest_wait
def longest_wait(rows, worker):
    from itertools import pairwise

    own = sorted((row for row in rows if row["worker"] == worker), key=lambda row: row["begin"])
    longest = None
    for before, after in pairwise(own):
        wait = after["begin"] - before["end"]
        if longest is None or wait > longest[0]:
            longest = (wait, f"{before['op']}{before['microbatch']}", f"{after['op']}{after['microbatch']}")
    return longest
