/* Expandable segments: ranges of addresses whose memory is mapped piece by piece. expandable_blocks.py
 * gives the reasons. */
#include "allocator.h"

#include <stdlib.h>

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Return the lowest block from which at least `size` bytes are free or unmapped, or NULL. */
static struct block *find(struct allocator *a, struct pool *pool, int64_t stream, int64_t size)
{
    struct list *unmapped = list_of(a, &pool->unmapped, stream);
    for (size_t i = 0; i < unmapped->blocks.count; i++) {
        struct block *first = list_at(unmapped, i);
        if (first->prev != NULL && first->prev->free)
            first = first->prev;
        int64_t room = 0;
        for (struct block *block = first; room < size && block != NULL && block->free; block = block->next)
            room += block->size;
        if (room >= size)
            return first;
    }
    return NULL;
}

static struct block *reserve(struct allocator *a, struct pool *pool, int64_t stream)
{
    int64_t handle = pool->small ? SMALL_SEGMENT : a->settings.large_segment_size;
    int64_t least = a->device.total + a->device.total / 8, size = round_up(least, handle);
    struct block *block = block_new(a, stream, size, pool, device_reserve(a, size));
    head_add(a, block);
    block->mapped = false;
    block->expandable = or_give_up(a, malloc(sizeof *block->expandable));
    *block->expandable = (struct reservation){.address = block->address, .size = size, .handle = handle};
    pool_add(a, block);
    return block;
}

/* Map memory at the beginning of a block; return it, or the free block before it that absorbs it, or NULL. */
static struct block *map(struct allocator *a, struct block *block, int64_t size)
{
    struct pool *pool = block->pool;
    int64_t handle = block->expandable->handle, pieces = (size + handle - 1) / handle;
    if (!device_map(&a->device, pieces, handle))
        return NULL;
    int64_t mapped = pieces * handle;
    pool_remove(a, block);
    if (mapped < block->size)
        pool_add(a, block_split(a, block, mapped));
    block->mapped = true;
    block = merged(a, block);
    pool_add(a, block);
    a->counters.device_alloc++;
    a->reserved += mapped;
    count(a, pool, SEGMENT_MAP, mapped, 0, 0, 0);
    return block;
}

/* Return a block of at least `size` bytes that is in no pool; NULL if the device has not enough memory. */
struct block *expandable_allocate(struct allocator *a, struct pool *pool, int64_t stream, int64_t size)
{
    struct block *block = find(a, pool, stream, size);
    if (block == NULL)
        block = reserve(a, pool, stream);
    if (!block->mapped)
        block = map(a, block, smaller(block->size, size));
    while (block != NULL && block->size < size) /* the next block is unmapped, and large enough: see find */
        block = map(a, block->next, smaller(size - block->size, block->next->size));
    if (block != NULL)
        pool_remove(a, block);
    return block;
}

/* Release the handles that are entirely within a free block. */
void expandable_unmap(struct allocator *a, struct block *block)
{
    struct reservation *range = block->expandable;
    struct pool *pool = block->pool;
    int64_t begin = (block->address - range->address + range->handle - 1) / range->handle;
    int64_t end = (block->address + block->size - range->address) / range->handle;
    if (begin >= end)
        return;
    int64_t address = range->address + begin * range->handle, size = (end - begin) * range->handle;
    device_unmap(&a->device, end - begin, range->handle);
    complete_all_events(a);
    pool_remove(a, block);
    if (address > block->address) {
        struct block *kept = block;
        block = block_split(a, kept, address - kept->address);
        pool_add(a, kept);
    }
    if (block->size > size)
        pool_add(a, block_split(a, block, size));
    block->mapped = false;
    block = merged(a, block);
    pool_add(a, block);
    a->counters.device_free++;
    a->reserved -= size;
    count(a, pool, SEGMENT_UNMAP, size, 0, 0, 0);
    if (pool->owner != NULL)
        pool->owner->pieces--;
    if (!block_is_split(block)) {
        pool_remove(a, block);
        head_remove(a, block);
        device_unreserve(a, range->address, range->size);
        block_delete(a, block);
        free(range);
    }
}
