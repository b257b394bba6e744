/* What an address is: device, host or managed memory, and the allocation around it. */
#include "core/ghost.h"

/* Source: driver_types.h 13.0; in CUDA 12 the record ends after the two pointers. */
struct pointer_attributes {
    int type;
    int device;
    void *device_pointer;
    void *host_pointer;
#if CUDA_VERSION >= 13000
    long reserved[8];
#endif
};

static bool memory_around(uint64_t address, struct address_range *range)
{
    return allocation_around(address, range) || mapping_around(address, range);
}

API status cudaPointerGetAttributes(struct pointer_attributes *attributes, const void *pointer)
{
    *attributes = (struct pointer_attributes){.type = UNREGISTERED, .device = -2};
    if (is_device_address(pointer)) {
        struct address_range range;
        if (!memory_around((uint64_t)pointer, &range))
            return SUCCESS; /* freed, or never allocated */
        attributes->type = DEVICE;
        attributes->device = range.device;
        attributes->device_pointer = (void *)pointer;
        return SUCCESS;
    }

    attributes->host_pointer = (void *)pointer;
    attributes->type = host_memory_type(pointer, &attributes->device);
    if (attributes->type != UNREGISTERED)
        attributes->device_pointer = (void *)pointer;
    return SUCCESS;
}

/* Source: cuda.h, CUpointer_attribute; those that PyTorch and Triton request. */
enum {
    ATTRIBUTE_MEMORY_TYPE = 2, /* unsigned: CU_MEMORYTYPE_HOST 1, CU_MEMORYTYPE_DEVICE 2 */
    ATTRIBUTE_DEVICE_POINTER = 3,
    ATTRIBUTE_HOST_POINTER = 4,
    ATTRIBUTE_BUFFER_ID = 7,
    ATTRIBUTE_IS_MANAGED = 8,
    ATTRIBUTE_DEVICE_ORDINAL = 9,
    ATTRIBUTE_RANGE_START = 11,
    ATTRIBUTE_RANGE_SIZE = 12,
};

API status cuMemGetAddressRange_v2(uint64_t *start, size_t *size, uint64_t address)
{
    struct address_range range;
    if (!memory_around(address, &range))
        return NOT_FOUND;
    if (start)
        *start = range.start;
    if (size)
        *size = range.size;
    return SUCCESS;
}

API status cuPointerGetAttribute(void *value, int attribute, uint64_t address)
{
    struct pointer_attributes known;
    cudaPointerGetAttributes(&known, (void *)address);
    if (known.type == UNREGISTERED)
        return INVALID_VALUE; /* as for any host address that CUDA did not allocate */
    uint64_t start = 0, size = 0;
    switch (attribute) {
    case ATTRIBUTE_MEMORY_TYPE: *(unsigned *)value = known.type == DEVICE ? 2 : 1; return SUCCESS;
    case ATTRIBUTE_DEVICE_POINTER: *(uint64_t *)value = address; return SUCCESS;
    case ATTRIBUTE_HOST_POINTER: *(void **)value = known.host_pointer; return SUCCESS;
    case ATTRIBUTE_IS_MANAGED: *(int *)value = known.type == MANAGED; return SUCCESS;
    case ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = known.device; return SUCCESS;
    case ATTRIBUTE_BUFFER_ID:
    case ATTRIBUTE_RANGE_START:
        cuMemGetAddressRange_v2(&start, NULL, address);
        *(uint64_t *)value = start; /* unique per buffer, so it serves as the id */
        return SUCCESS;
    case ATTRIBUTE_RANGE_SIZE:
        cuMemGetAddressRange_v2(NULL, &size, address);
        *(size_t *)value = size;
        return SUCCESS;
    default: return NOT_SUPPORTED;
    }
}
