"""What runs in ranks that torchrun or mpiexec has started."""
