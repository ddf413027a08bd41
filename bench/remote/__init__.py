"""Key tiers against the clients that they are made of."""
