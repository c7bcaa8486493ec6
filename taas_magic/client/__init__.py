"""The kernel's side of a run: it keeps a runner at hand, submits, shows what comes and raises what went wrong."""
