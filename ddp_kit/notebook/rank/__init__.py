"""What runs in a rank for the cells of a notebook."""
