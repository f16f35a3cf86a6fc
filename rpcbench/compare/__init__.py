"""Is a parallel program the same computation as one process, and where does it differ first?

`capture` keeps the values of a run, `placements` puts the values of ranks together, `allowances` says how far round-off
may move them, `verdicts` judges each tensor, `causes` explains the first wrong one, `report` shows it.
"""
