"""The runner: the daemon between a notebook and its ranks. It imports no torch and unpickles nothing."""
