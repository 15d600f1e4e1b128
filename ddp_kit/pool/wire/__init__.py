"""What travels between the notebook's process and a rank; both sides import it."""
