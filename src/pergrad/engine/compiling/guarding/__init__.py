"""Guards compiled steps: what Python reads, draws and shares must be as it was when a step was traced."""
