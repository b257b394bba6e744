#include "allocator.h"

#include <stdlib.h>

/* ---- Sizes ------------------------------------------------------------------------------------------ */

static int64_t up_to(int64_t size, int64_t step)
{
    return (size + step - 1) / step * step;
}

static int bit_length(int64_t size)
{
    int length = 0;
    for (; size > 0; size >>= 1)
        length++;
    return length;
}

static int64_t round_size(const struct settings *settings, int64_t size)
{
    if (size < MIN_BLOCK)
        return MIN_BLOCK;
    int length = bit_length(size), interval = length - bit_length(MIB);
    interval = interval < 0 ? 0 : interval < INTERVALS ? interval : INTERVALS - 1;
    int64_t divisions = settings->divisions[interval], step = MIN_BLOCK;
    if (divisions > 1) {
        int64_t division = (INT64_C(1) << (length - 1)) / divisions;
        step = division > step ? division : step;
    }
    return up_to(size, step);
}

static int64_t segment_size(const struct settings *settings, int64_t size)
{
    int64_t rounded = round_size(settings, size);
    if (rounded <= SMALL_SIZE)
        return SMALL_SEGMENT;
    return rounded < 10 * MIB ? settings->large_segment_size : up_to(rounded, 2 * MIB);
}

/* ---- Giving back ------------------------------------------------------------------------------------ */

static void forget(struct allocator *a, struct block *block)
{
    if (block->mapped)
        pool_remove(a, block);
    else
        pool_remove_unmapped(a, block);
}

/* Merge a block that no pool has with free neighbours that are mapped, or not, as it is. */
struct block *merged(struct allocator *a, struct block *block)
{
    struct block *before = block->prev, *after = block->next;
    if (after != NULL && after->free && after->mapped == block->mapped) {
        forget(a, after);
        block_swallow(a, block, after);
    }
    if (before != NULL && before->free && before->mapped == block->mapped) {
        forget(a, before);
        block_swallow(a, before, block);
        return before;
    }
    return block;
}

/* Make a block free. */
void free_block(struct allocator *a, struct block *block, enum kind kind)
{
    int64_t size = block->size, requested = block->requested, splits = 0, split_bytes = 0;
    struct block *neighbours[] = {block->next, block->prev};
    for (size_t i = 0; i < 2; i++) {
        struct block *other = neighbours[i];
        if (other != NULL && other->free && other->mapped) {
            splits--;
            split_bytes -= other->size;
        }
    }
    block->free = true;
    block = merged(a, block);
    pool_add(a, block);
    if (block->expandable != NULL) {
        splits = split_bytes = 0;
    } else if (block_is_split(block)) {
        splits++;
        split_bytes += block->size;
    }
    count(a, block->pool, kind, size, requested, splits, split_bytes);
}

/* Give a whole segment back; return its bytes. */
static int64_t release_block(struct allocator *a, struct block *block)
{
    int64_t size = block->size;
    pool_remove(a, block);
    head_remove(a, block);
    device_free(a, block->address, size);
    everything_is_over(a);
    a->counters.device_free++;
    a->reserved -= size;
    if (block->pool->owner != NULL)
        block->pool->owner->pieces--;
    count(a, block->pool, SEGMENT_FREE, size, 0, 0, 0);
    block_delete(a, block);
    return size;
}

static void release_blocks(struct allocator *a, struct pool *pool)
{
    size_t found, grown = 0;
    struct block **blocks = pool_blocks(a, pool, &found);
    for (size_t i = 0; i < found; i++) {
        if (blocks[i]->expandable != NULL)
            blocks[grown++] = blocks[i];
        else if (!block_is_split(blocks[i]))
            release_block(a, blocks[i]);
    }
    for (size_t i = 0; i < grown; i++)
        expandable_unmap(a, blocks[i]);
    free(blocks);
}

/* Give back what is free: of one private pool only, or, if that is 0, of all. */
void caching_empty_cache(struct allocator *a, size_t only)
{
    if (!a->captures) {
        synchronize_and_free_events(a);
        if (only == 0) {
            release_blocks(a, &a->large);
            release_blocks(a, &a->small);
        }
    }
    size_t kept = 0;
    struct private_pool **freeable = a->freeable.at;
    for (size_t i = 0; i < a->freeable.count; i++) {
        struct private_pool *pool = freeable[i];
        if (only == 0 || only == pool->index) {
            release_blocks(a, &pool->small);
            release_blocks(a, &pool->large);
            if (pool->pieces == 0) {
                a->private_pools[pool->index] = NULL;
                continue;
            }
        }
        freeable[kept++] = pool;
    }
    a->freeable.count = kept;
}

/* Give back one oversize block that is large enough, or several from the largest down. */
static bool release_available_cached_blocks(struct allocator *a, struct pool *pool, int64_t stream,
                                            int64_t size)
{
    int64_t limit = a->settings.max_split_size, wanted = size > limit ? size : limit, released = 0;
    if (limit == NEVER)
        return false;
    struct list *list = list_of(a, &pool->cached, stream);
    size_t index = list_first_of(list, wanted);
    if (index < list->blocks.count && list_at(list, index)->expandable == NULL) {
        release_block(a, list_at(list, index));
        return true;
    }
    while (index-- > 0 && released < wanted) {
        struct block *block = list_at(list, index);
        if (block->size < limit)
            break;
        if (block->expandable == NULL)
            released += release_block(a, block);
    }
    return released >= wanted;
}

/* Give back whole segments of the large pool that were not used for long, once much is reserved. */
static void garbage_collect_cached_blocks(struct allocator *a)
{
    if (a->reserved <= a->settings.collect_above)
        return;
    int64_t target = a->reserved - a->settings.collect_above, reclaimed = 0, age = 0;
    struct pool *pool = &a->large;
    size_t found, whole = 0;
    struct block **blocks = pool_blocks(a, pool, &found);
    for (size_t i = 0; i < found; i++)
        if (!block_is_split(blocks[i])) {
            age += pool->calls - blocks[i]->gc_base;
            blocks[whole++] = blocks[i];
        }
    for (bool freed = true; reclaimed < target && freed && whole > 0;) {
        double oldest = (double)age / (double)whole;
        size_t kept = 0;
        freed = false;
        for (size_t i = 0; i < whole; i++) {
            int64_t unused_for = pool->calls - blocks[i]->gc_base;
            if (blocks[i]->expandable != NULL || (double)unused_for < oldest) {
                blocks[kept++] = blocks[i];
                continue;
            }
            freed = true;
            age -= unused_for;
            reclaimed += release_block(a, blocks[i]);
        }
        whole = kept;
    }
    free(blocks);
}

/* ---- Finding a block -------------------------------------------------------------------------------- */

static int64_t size_to_grow_to(const struct block *block)
{
    const struct block *following = block->next;
    return block->size + (following != NULL && !following->mapped ? following->size : 0);
}

static size_t best_expandable(const struct allocator *a, const struct list *list, size_t index)
{
    if (!a->settings.expandable) {
        while (index < list->blocks.count && list_at(list, index)->expandable != NULL)
            index++;
        return index;
    }
    struct block *block = list_at(list, index);
    while (block->expandable != NULL && index + 1 < list->blocks.count) {
        struct block *following = list_at(list, index + 1);
        if (size_to_grow_to(following) >= size_to_grow_to(block))
            break;
        block = following;
        index++;
    }
    return index;
}

/* Return the index of the block to take, from the first that is large enough on. */
static size_t choose(const struct allocator *a, struct pool *pool, const struct list *list, size_t index,
                     int64_t size)
{
    size_t none = list->blocks.count;
    int64_t limit = a->settings.max_split_size;
    pool->calls += a->collects;
    if (index < none && list_at(list, index)->expandable != NULL)
        index = best_expandable(a, list, index);
    if (index == none)
        return none;
    int64_t has = list_at(list, index)->size;
    if (size < limit && limit <= has)
        return none;
    if (size >= limit && has >= size + a->settings.max_non_split_rounding)
        return none;
    return index;
}

static void fail(struct allocator *a, int64_t size)
{
    a->failed = true;
    a->failed_size = size;
    a->failed_free = a->device.total - a->device.used;
}

static struct block *alloc_block(struct allocator *a, struct pool *pool, int64_t stream, int64_t size)
{
    int64_t wanted = segment_size(&a->settings, size);
    if (wanted > a->settings.allowed - a->reserved)
        return NULL;
    if (a->settings.throw_on_oom && wanted > a->device.total - a->device.used) {
        a->counters.oom_rejections++;
        fail(a, size);
        return NULL;
    }
    struct block *block;
    if (a->settings.expandable) {
        block = expandable_allocate(a, pool, stream, size);
    } else {
        int64_t address = device_malloc(a, wanted);
        if (!address)
            return NULL;
        a->counters.device_alloc++;
        a->reserved += wanted;
        count(a, pool, SEGMENT_ALLOC, wanted, 0, 0, 0);
        a->made += a->settings.numbered;
        block = block_new(a, stream, wanted, pool, address);
        block->number = a->made;
        head_add(a, block);
    }
    if (block != NULL && pool->owner != NULL)
        pool->owner->pieces++;
    return block;
}

/* Get memory from the device, whatever it takes; NULL if it fails. */
static struct block *new_block(struct allocator *a, struct pool *pool, int64_t stream, int64_t size,
                               int64_t requested)
{
    if (a->collects)
        garbage_collect_cached_blocks(a);
    struct block *block = alloc_block(a, pool, stream, size);
    if (block == NULL && !a->failed && release_available_cached_blocks(a, pool, stream, size))
        block = alloc_block(a, pool, stream, size);
    if (block == NULL && !a->failed && !a->captures) {
        caching_empty_cache(a, 0);
        a->counters.retries++;
        block = alloc_block(a, pool, stream, size);
    }
    if (block == NULL && !a->failed) {
        a->counters.ooms++;
        fail(a, requested);
    }
    return block;
}

/* ---- Private pools ---------------------------------------------------------------------------------- */

void pool_init(struct allocator *a, struct pool *pool, struct private_pool *owner, bool small)
{
    pool->owner = owner;
    pool->small = small;
    pool->least = small || a->settings.expandable ? MIN_BLOCK : SMALL_SIZE + 1;
}

/* Take what is allocated from now on from a private pool, which is made if need be; 0 is the default pool. */
void caching_allocate_to(struct allocator *a, size_t index)
{
    a->allocates_to = index;
    if (index == 0)
        return;
    if (a->private_pools[index] == NULL) {
        struct private_pool **place = vector_insert(a, &a->every_pool, a->every_pool.count, sizeof *place);
        struct private_pool *pool = *place = calloc(1, sizeof *pool);
        if (pool == NULL)
            longjmp(a->give_up, HOST_HAS_NO_MEMORY);
        pool->index = index;
        pool_init(a, &pool->small, pool, true);
        pool_init(a, &pool->large, pool, false);
        a->private_pools[index] = pool;
    }
    struct private_pool *pool = a->private_pools[index], **freeable = a->freeable.at;
    for (size_t i = 0; i < a->freeable.count && !pool->used; i++)
        if (freeable[i] == pool)
            vector_remove(&a->freeable, i, sizeof *freeable);
    pool->used = true;
}

/* Note that a private pool's graphs or MemPool are gone: its memory may be given back. */
void caching_release_pool(struct allocator *a, size_t index)
{
    struct private_pool *pool = a->private_pools[index];
    caching_allocate_to(a, 0);
    if (pool == NULL || !pool->used)
        return;
    pool->used = false;
    struct private_pool **place = vector_insert(a, &a->freeable, a->freeable.count, sizeof *place);
    *place = pool;
}

static struct pool *pool_for(struct allocator *a, int64_t rounded)
{
    bool small = rounded <= SMALL_SIZE;
    struct private_pool *pool = a->private_pools[a->allocates_to];
    if (pool == NULL)
        return small ? &a->small : &a->large;
    return small ? &pool->small : &pool->large;
}

/* Return a block; NULL if the device does not have it. */
struct block *caching_malloc(struct allocator *a, int64_t size, int64_t stream)
{
    a->failed = false;
    if (a->outstanding || a->deferred.count)
        process_events(a);
    int64_t rounded = round_size(&a->settings, size), splits = 0, split_bytes = 0;
    struct pool *pool = pool_for(a, rounded);
    struct list *list = list_of(a, &pool->cached, stream);
    size_t index = list_first_of(list, rounded);
    if (a->choosy)
        index = choose(a, pool, list, index, rounded);
    struct block *block;
    if (index < list->blocks.count) {
        block = list_at(list, index);
        vector_remove(&list->blocks, index, sizeof block);
    } else {
        block = new_block(a, pool, stream, rounded, size);
        if (block == NULL)
            return NULL;
    }
    int64_t remainder = block->size - rounded;
    bool split = block_is_split(block);
    if (remainder >= pool->least && rounded < a->unsplit) {
        splits = split ? 0 : 1;
        split_bytes = split ? -rounded : remainder;
        pool_add(a, block_split(a, block, rounded));
    } else if (split) {
        splits = -1;
        split_bytes = -block->size;
    }
    if (block->expandable != NULL)
        splits = split_bytes = 0;
    block->free = false;
    block->requested = size;
    count(a, pool, ALLOC, block->size, size, splits, split_bytes);
    return block;
}

void caching_free(struct allocator *a, struct block *block)
{
    if (block->uses.count == 0) {
        free_block(a, block, FREE);
        return;
    }
    block->waits = true;
    count(a, block->pool, FREE_REQUESTED, block->size, 0, 0, 0);
    if (a->captures) {
        struct block **place = vector_insert(a, &a->deferred, a->deferred.count, sizeof *place);
        *place = block;
    } else {
        insert_events(a, block);
    }
}
