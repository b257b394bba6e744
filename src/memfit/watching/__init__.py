"""``memfit.watch``: measured memory beside the prediction, and a post-mortem when memory runs out."""
