"""Floor 4: one agent per member: feeds the machines, carries out their effects, runs users' functions."""
