"""Query the installed cuDNN, without a GPU, for the engines it would choose and their workspace sizes.

    ghost ──question──> client ──> cache     answers of earlier runs, in the user's cache folder
                          │
                          └─socket──> server     a Python process of its own: the real libcudnn, and a
                                                 libcuda.so.1 that reports no device (no_device.c)

cuDNN plans for a device that is described to it ("deviceless", documented since cuDNN 9.8): its heuristics
return engine configurations in order of preference, each with the workspace it needs. Nothing is compiled
or run.
"""
