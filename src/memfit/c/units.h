/* Sizes that all of memfit's C shares. Signed, so that they compare with int64_t and, being positive, with
 * uint64_t. */
#ifndef MEMFIT_UNITS_H
#define MEMFIT_UNITS_H

#include <stdint.h>

#define KIB (INT64_C(1) << 10)
#define MIB (INT64_C(1) << 20)
#define GIB (INT64_C(1) << 30)
#define TIB (INT64_C(1) << 40)

/* Device memory is handed out in granules of this size: what cuMemGetAllocationGranularity reports on
 * every card so far. cudaMalloc takes whole granules from DEVICE_GRANULE_FROM bytes upwards (assumed:
 * NVIDIA does not document it). The same in Python: memfit/allocator/device_memory.py. */
#define DEVICE_GRANULE (2 * MIB)
#define DEVICE_GRANULE_FROM MIB
#define DEVICE_ALIGNMENT INT64_C(512) /* of a smaller cudaMalloc: its address and its size */

#endif
