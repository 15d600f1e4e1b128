"""What only a notebook needs: magics, the live view of a run, controls."""
