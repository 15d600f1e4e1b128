"""Pictures of results and traces. They know no processes."""
