"""What records in a rank: its calls and waits go onto the board."""
