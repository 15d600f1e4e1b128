"""What runs in the process of a rank, and nowhere else."""
