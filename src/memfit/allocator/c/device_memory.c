/* The device's memory: bytes used, and addresses as the ghost gives them out
 * (ghost/runtime/core/addresses.c). */
#include "allocator.h"

static int slot_of(int64_t size)
{
    int slot = 9; /* DEVICE_ALIGNMENT */
    while ((INT64_C(1) << slot) < size)
        slot++;
    return slot;
}

static int64_t arena_take(struct allocator *a, struct arena *arena, int64_t size)
{
    int slot = slot_of(size);
    number_array *free = &arena->free_addresses[slot];
    if (free->count > 0)
        return free->items[--free->count];
    int64_t bytes = INT64_C(1) << slot;
    if (arena->next > INT64_MAX - 2 * bytes)
        longjmp(a->give_up, BEYOND_64_BITS);
    int64_t address = (arena->next + bytes - 1) / bytes * bytes;
    arena->next = address + bytes;
    return address;
}

static void arena_release(struct allocator *a, struct arena *arena, int64_t address, int64_t size)
{
    number_array *free = &arena->free_addresses[slot_of(size)];
    APPEND(a, free, address);
}

static int64_t bytes_taken(int64_t size)
{
    int64_t granule = size >= DEVICE_GRANULE_FROM ? DEVICE_GRANULE : DEVICE_ALIGNMENT;
    return round_up(size, granule);
}

static void take(struct device *device, int64_t size)
{
    device->used += size;
    if (device->used > device->peak)
        device->peak = device->used;
}

void device_init(struct device *device, int64_t total, int64_t taken)
{
    device->total = total;
    device->used = taken;
    device->memory.next = 32 * TIB;
    device->virtual.next = 48 * TIB;
}

/* Return an address; 0 if fewer bytes are left. */
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
    arena_release(a, &a->device.memory, address, size);
}

int64_t device_reserve(struct allocator *a, int64_t size) { return arena_take(a, &a->device.virtual, size); }

void device_unreserve(struct allocator *a, int64_t address, int64_t size)
{
    arena_release(a, &a->device.virtual, address, size);
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
