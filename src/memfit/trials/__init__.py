"""Run a script again with a change: from its forks where it can, and on the ranks that need most."""
