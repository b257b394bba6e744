"""Keep models that are built on the CPU from using host memory."""
