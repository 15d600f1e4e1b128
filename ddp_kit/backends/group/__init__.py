"""What process groups that are written in Python have in common: those of `mpi` and of `shm`."""
