"""How the processes of ranks are started: one module a launcher, and `base` for all."""
