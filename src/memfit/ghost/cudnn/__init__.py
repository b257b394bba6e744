"""The installed cuDNN, asked without a card what it would choose and how much it would work in.

    ghost ──question──> client ──> kept      answers of earlier runs, in the user's cache folder
                          │
                          └─socket──> process    a python of its own: the real libcudnn, and a
                                                 libcuda.so.1 that knows of no device (no_device.c)

cuDNN plans for a device that is described to it ("deviceless", documented since cuDNN 9.8): heuristics
name engine configurations in order, each with the workspace it needs. Nothing is compiled or run.
"""
