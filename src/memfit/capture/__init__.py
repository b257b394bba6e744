"""One training run, watched: a script goes in, a Trace comes out."""
