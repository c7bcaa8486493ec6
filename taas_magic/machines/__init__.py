"""The machines of a pool: which they are, and how a runner gets onto them."""
