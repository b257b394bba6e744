"""Models built on the CPU take no host memory."""
