#include "allocator.h"

#define TIB (INT64_C(1) << 40)
#define GRANULE (2 * MIB)
#define ALIGNMENT 512

static int slot_of(int64_t size)
{
    int slot = 9; /* ALIGNMENT */
    while ((INT64_C(1) << slot) < size)
        slot++;
    return slot;
}

static int64_t arena_take(struct allocator *a, struct arena *arena, int64_t size)
{
    int slot = slot_of(size);
    struct vector *free = &arena->given_back[slot];
    if (free->count > 0)
        return ((int64_t *)free->at)[--free->count];
    int64_t bytes = INT64_C(1) << slot;
    if (arena->next > INT64_MAX - 2 * bytes)
        longjmp(a->give_up, BEYOND_64_BITS);
    int64_t address = (arena->next + bytes - 1) / bytes * bytes;
    arena->next = address + bytes;
    return address;
}

static void arena_give(struct allocator *a, struct arena *arena, int64_t address, int64_t size)
{
    struct vector *free = &arena->given_back[slot_of(size)];
    *(int64_t *)vector_insert(a, free, free->count, sizeof(int64_t)) = address;
}

static int64_t bytes_taken(int64_t size)
{
    int64_t granule = size >= MIB ? GRANULE : ALIGNMENT;
    return (size + granule - 1) / granule * granule;
}

static void take(struct device *device, int64_t size)
{
    device->used += size;
    if (device->used > device->most)
        device->most = device->used;
}

void device_init(struct device *device, int64_t total, int64_t taken)
{
    device->total = total;
    device->used = taken;
    device->memory.next = 32 * TIB;
    device->virtual.next = 48 * TIB;
}

/* Return an address; 0 if there are not so many bytes left. */
int64_t device_malloc(struct allocator *a, int64_t size)
{
    struct device *device = &a->device;
    device->calls.malloc++;
    int64_t bytes = bytes_taken(size);
    if (bytes > device->total - device->used)
        return 0;
    take(device, bytes);
    return arena_take(a, &device->memory, size);
}

void device_free(struct allocator *a, int64_t address, int64_t size)
{
    a->device.calls.free++;
    a->device.used -= bytes_taken(size);
    arena_give(a, &a->device.memory, address, size);
}

int64_t device_reserve(struct allocator *a, int64_t size)
{
    return arena_take(a, &a->device.virtual, size);
}

void device_unreserve(struct allocator *a, int64_t address, int64_t size)
{
    arena_give(a, &a->device.virtual, address, size);
}

bool device_map(struct device *device, int64_t pieces, int64_t size)
{
    if (pieces * size > device->total - device->used)
        return false;
    device->calls.map += pieces;
    take(device, pieces * size);
    return true;
}

void device_unmap(struct device *device, int64_t pieces, int64_t size)
{
    device->calls.synchronize++;
    device->calls.unmap += pieces;
    device->used -= pieces * size;
}
