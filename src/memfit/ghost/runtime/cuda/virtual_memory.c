/* Virtual memory management: what PyTorch's expandable segments are made of.
 *
 *   cuMemAddressReserve   a range of addresses           (costs nothing)
 *   cuMemCreate           a piece of physical memory     (taken from the capacity)
 *   cuMemMap              the piece at an address
 *   cuMemUnmap, cuMemRelease   the piece is returned once it is both unmapped and released
 */
#include "cuda/stream_marks.h"
#include "core/ghost.h"

#include "hash_table.h"

/* Source: cuda.h 13.0, CUmemAllocationProp_v1 (unchanged since CUDA 10.2). */
struct allocation_properties {
    int type; /* CU_MEM_ALLOCATION_TYPE_PINNED */
    int requested_handle_types;
    int location_type; /* CU_MEM_LOCATION_TYPE_DEVICE */
    int location_id;
    void *win32_meta_data;
    unsigned char flags[8];
};
_Static_assert(sizeof(struct allocation_properties) == 32, "CUmemAllocationProp_v1");

struct physical {
    uint64_t size;
    int references; /* cuMemCreate's own and one per mapping */
    int device;
    struct allocation_properties properties;
};

struct mapping {
    uint64_t address, size;
    struct physical *memory;
};

static struct hash_table reservations; /* address to its size, cast to a pointer */
static struct hash_table mappings;     /* address to struct mapping */

static bool aligned(uint64_t value) { return value % DEVICE_GRANULE == 0; }

ENTRY(cuMemGetAllocationGranularity(size_t *granularity, const void *properties, int option),
      *granularity = DEVICE_GRANULE)

API status cuMemAddressReserve(uint64_t *address, size_t size, size_t alignment, uint64_t wanted,
                               unsigned long long flags)
{
    if (size == 0 || !aligned(size))
        return INVALID_VALUE;
    HOLD_LOCK;
    uint64_t made = address_take(ARENA_VIRTUAL, size);
    if (made && hash_table_put(&reservations, made, (void *)size)) {
        *address = made;
        return SUCCESS;
    }
    if (made)
        address_release(ARENA_VIRTUAL, made, size);
    return OUT_OF_MEMORY;
}

API status cuMemAddressFree(uint64_t address, size_t size)
{
    HOLD_LOCK;
    if (size == 0 || (size_t)hash_table_get(&reservations, address) != size)
        return INVALID_VALUE;
    hash_table_remove(&reservations, address);
    address_release(ARENA_VIRTUAL, address, size);
    return SUCCESS;
}

API status cuMemCreate(struct physical **handle, size_t size, const struct allocation_properties *properties,
                       unsigned long long flags)
{
    int device = properties->location_id;
    if (size == 0 || !aligned(size) || device < 0 || device >= ghost_device_count)
        return INVALID_VALUE;
    struct physical *made = malloc(sizeof *made);
    if (!made)
        return OUT_OF_MEMORY;
    *made = (struct physical){size, 1, device, *properties};
    HOLD_LOCK;
    if (!capacity_take(device, size)) {
        free(made);
        return OUT_OF_MEMORY;
    }
    *handle = made;
    return SUCCESS;
}

static void drop(struct physical *memory)
{
    if (--memory->references > 0)
        return;
    capacity_release(memory->device, memory->size);
    free(memory);
}

API status cuMemRelease(struct physical *handle)
{
    HOLD_LOCK;
    drop(handle);
    return SUCCESS;
}

API status cuMemMap(uint64_t address, size_t size, size_t offset, struct physical *handle,
                    unsigned long long flags)
{
    mark("map");
    if (!aligned(address) || size == 0 || size > handle->size || offset > handle->size - size)
        return INVALID_VALUE;
    struct mapping *made = malloc(sizeof *made);
    if (!made)
        return OUT_OF_MEMORY;
    *made = (struct mapping){address, size, handle};
    HOLD_LOCK;
    bool free_there = is_device_address((void *)address) && !hash_table_get(&mappings, address);
    if (!free_there || !hash_table_put(&mappings, address, made)) {
        free(made);
        return INVALID_VALUE;
    }
    handle->references++;
    COUNT(maps);
    return SUCCESS;
}

API status cuMemUnmap(uint64_t address, size_t size)
{
    mark("unmap");
    synchronize_everything();
    status result = SUCCESS;
    ghost_lock();
    for (uint64_t at = address; at < address + size;) {
        struct mapping *gone = hash_table_remove(&mappings, at);
        if (!gone) {
            result = INVALID_VALUE;
            break;
        }
        at += gone->size;
        drop(gone->memory);
        free(gone);
    }
    ghost_unlock();
    forget(address, size);
    return result;
}

CALL(cuMemSetAccess(uint64_t address, size_t size, const void *descriptions, size_t count), SUCCESS)

API status cuMemRetainAllocationHandle(struct physical **handle, void *address)
{
    HOLD_LOCK;
    const struct mapping *found = hash_table_get(&mappings, (uint64_t)address);
    if (!found)
        return INVALID_VALUE;
    found->memory->references++;
    *handle = found->memory;
    return SUCCESS;
}

ENTRY(cuMemGetAllocationPropertiesFromHandle(struct allocation_properties *properties,
                                             const struct physical *handle),
      *properties = handle->properties)

/* ---- Which mapping contains an address ------------------------------------------------------- */

/* PyTorch maps pieces of one granule, or of a few if it is configured to, so the piece starts at most a
 * few granules back. */
bool mapping_around(uint64_t address, struct address_range *range)
{
    uint64_t start = address & ~(DEVICE_GRANULE - 1);
    HOLD_LOCK;
    for (int granules = 0; granules < 1024; granules++, start -= DEVICE_GRANULE) {
        const struct mapping *found = hash_table_get(&mappings, start);
        if (found) {
            *range = (struct address_range){found->address, found->size, found->memory->device};
            return address - start < found->size;
        }
    }
    return false;
}
