"""Training on several ranks: what they agree on, how they differ, and which are lost."""
