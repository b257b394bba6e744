"""Write a job for a script: what it trains, read from a run of it on the ghost."""
