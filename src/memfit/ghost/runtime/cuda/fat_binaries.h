/* What kernels.c needs of fat_binaries.c. */
#ifndef MEMFIT_GHOST_FAT_BINARIES_H
#define MEMFIT_GHOST_FAT_BINARIES_H

/* The architecture that the device runs a kernel in: 86 for compute capability 8.6. The kernel is named by its
 * host function. */
int kernel_architecture(const void *function);

#endif
