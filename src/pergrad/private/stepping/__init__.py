"""Makes the steps of a plan: clips, adds up, writes the ledger, adds noise and updates."""
