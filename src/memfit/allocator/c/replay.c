/* Requests, served one after another: what Python calls. */
#include "allocator.h"

#include <stdlib.h>

/* The kinds of request, as requests.py numbers them. */
enum ask {
    MALLOC_IT,
    FREE_IT,
    FREE_LATER,
    STREAM_DONE,
    EMPTY_CACHE,
    FAILED,
    STEP,
    USE,
    ALL_STREAMS_DONE,
    CAPTURE_BEGIN,
    CAPTURE_END,
    RELEASE_POOL,
    EMPTY_POOL
};

/* Stream numbers from here on stand for the other streams that use a block, one number per block. */
#define OTHERS (INT64_C(1) << 40)
#define LARGEST (INT64_C(1) << 48) /* bytes of a request */

/* Return an allocator for numbers of blocks and pools below these limits; NULL if the host is out of
 * memory. */
struct allocator *allocator_new(const struct settings *settings, int64_t blocks, int64_t pools)
{
    struct allocator *a = calloc(1, sizeof *a);
    if (a == NULL)
        return NULL;
    a->held_count = (size_t)blocks;
    a->pool_count = (size_t)pools;
    a->held = calloc(a->held_count + 1, sizeof *a->held);
    a->private_pools = calloc(a->pool_count + 1, sizeof *a->private_pools);
    if (a->held == NULL || a->private_pools == NULL) {
        allocator_delete(a);
        return NULL;
    }
    a->settings = *settings;
    a->collects = settings->collect_above != NEVER;
    a->has_conditions = a->collects || settings->max_split_size != NEVER || settings->expandable;
    a->unsplit_from = settings->expandable ? NEVER : settings->max_split_size;
    device_init(&a->device, settings->total, settings->taken);
    pool_init(a, &a->small, NULL, true);
    pool_init(a, &a->large, NULL, false);
    return a;
}

static void pool_clear(struct pool *pool)
{
    list_array *both[] = {&pool->cached, &pool->unmapped};
    for (size_t i = 0; i < 2; i++) {
        struct list **lists = both[i]->items;
        for (size_t j = 0; j < both[i]->count; j++) {
            free(lists[j]->blocks.items);
            free(lists[j]);
        }
        free(lists);
    }
}

static void arena_clear(struct arena *arena)
{
    for (size_t i = 0; i < SLOTS; i++)
        free(arena->free_addresses[i].items);
}

void allocator_delete(struct allocator *a)
{
    struct block **heads = a->heads.items, **pages = a->pages.items;
    for (size_t i = 0; i < a->heads.count; i++)
        free(heads[i]->expandable);
    for (struct queue *queue = a->queues, *after; queue != NULL; queue = after) {
        after = queue->after;
        free(queue->blocks.items);
        free(queue);
    }
    pool_clear(&a->small);
    pool_clear(&a->large);
    struct private_pool **every = a->every_pool.items;
    for (size_t i = 0; i < a->every_pool.count; i++)
        if (every[i] != NULL) {
            pool_clear(&every[i]->small);
            pool_clear(&every[i]->large);
            free(every[i]);
        }
    arena_clear(&a->device.memory);
    arena_clear(&a->device.virtual);
    for (size_t i = 0; i < a->pages.count; i++)
        page_delete(pages[i]);
    free(heads);
    free(pages);
    free(a->by_stream.items);
    free(a->deferred.items);
    free(every);
    free(a->freeable.items);
    free(a->private_pools);
    free(a->held);
    free(a);
}

static struct block *held(const struct allocator *a, int64_t number)
{
    return number >= 0 && (size_t)number < a->held_count ? a->held[number] : NULL;
}

static enum status serve_malloc(struct allocator *a, int64_t number, int64_t size, int64_t stream)
{
    if (number < 0 || (size_t)number >= a->held_count || a->held[number] != NULL)
        return IMPOSSIBLE;
    a->held[number] = caching_malloc(a, size, stream);
    return a->held[number] == NULL ? OUT_OF_MEMORY : SERVED;
}

static enum status serve(struct allocator *a, int64_t ask, int64_t number, int64_t size, int64_t stream,
                         int64_t pool)
{
    bool allocates = ask == MALLOC_IT || ask == FAILED;
    struct block *block = held(a, number);
    if (pool < 0 || (size_t)pool >= a->pool_count || (allocates && (size < 1 || size > LARGEST)))
        return IMPOSSIBLE;
    if (allocates && (size_t)pool != a->allocates_to)
        caching_allocate_to(a, (size_t)pool);
    if ((ask == FREE_IT || ask == FREE_LATER || ask == USE) && block == NULL)
        return IMPOSSIBLE;
    switch (ask) {
    case MALLOC_IT: return serve_malloc(a, number, size, stream);
    case FREE_LATER:
        record_stream(a, block, OTHERS + number);
        /* fall through */
    case FREE_IT:
        a->held[number] = NULL;
        caching_free(a, block);
        return SERVED;
    case USE: record_stream(a, block, stream); return SERVED;
    case STREAM_DONE: complete_stream(a, OTHERS + number); return SERVED;
    case ALL_STREAMS_DONE: complete_all_events(a); return SERVED;
    case EMPTY_CACHE: caching_empty_cache(a, 0); return SERVED;
    case FAILED: /* before it failed the cache was released; the script continued without the memory */
        block = caching_malloc(a, size, stream);
        if (block != NULL)
            caching_free(a, block);
        return SERVED;
    case STEP:
        if (a->settings.empties_each_step)
            caching_empty_cache(a, 0);
        a->steps++;
        a->at_step[0] = a->at_step[1];
        a->at_step[1] = a->device.calls;
        return SERVED;
    case CAPTURE_BEGIN: a->captures++; return SERVED;
    case CAPTURE_END:
        if (a->captures == 0)
            return IMPOSSIBLE;
        a->captures--;
        return SERVED;
    case RELEASE_POOL: caching_release_pool(a, (size_t)pool); return SERVED;
    case EMPTY_POOL: caching_empty_cache(a, (size_t)pool); return SERVED;
    default: return IMPOSSIBLE;
    }
}

/* Serve requests; if serving ends before the last, allocator_outcome reports at which. */
int allocator_serve(struct allocator *a, int64_t count, const int64_t *ask, const int64_t *block,
                    const int64_t *size, const int64_t *stream, const int64_t *pool)
{
    switch (setjmp(a->give_up)) {
    case 0: break;
    case HOST_HAS_NO_MEMORY: return HOST_HAS_NO_MEMORY;
    default: return BEYOND_64_BITS;
    }
    for (a->position = 0; a->position < (size_t)count; a->position++) {
        size_t i = a->position;
        enum status status = serve(a, ask[i], block[i], size[i], stream[i], pool[i]);
        if (status != SERVED)
            return status;
    }
    return SERVED;
}

static int by_address(const void *a, const void *b)
{
    int64_t left = (*(struct block *const *)a)->address, right = (*(struct block *const *)b)->address;
    return (left > right) - (left < right);
}

/* Return the address of a block; 0 if no block has that number. */
int64_t allocator_address(const struct allocator *a, int64_t number)
{
    const struct block *block = held(a, number);
    return block == NULL ? 0 : block->address;
}

/* Return the number of blocks, free or not, mapped or not. */
int64_t allocator_block_count(const struct allocator *a)
{
    struct block **heads = a->heads.items;
    int64_t found = 0;
    for (size_t i = 0; i < a->heads.count; i++)
        for (const struct block *block = heads[i]; block != NULL; block = block->next)
            found++;
    return found;
}

/* Write a row for each block, by address. */
void allocator_blocks(struct allocator *a, int64_t (*rows)[COLUMNS])
{
    struct block **heads = a->heads.items;
    if (a->heads.count > 0)
        qsort(heads, a->heads.count, sizeof *heads, by_address);
    for (size_t i = 0; i < a->heads.count; i++) {
        heads[i]->head = i;
        for (const struct block *block = heads[i]; block != NULL; block = block->next, rows++) {
            (*rows)[0] = block->address;
            (*rows)[1] = block->size;
            (*rows)[2] = block->free ? 0 : block->requested;
            (*rows)[3] = block->free ? 0 : block->waits ? 2 : 1;
            (*rows)[4] = block->stream;
            (*rows)[5] = block->mapped;
            (*rows)[6] = block->prev == NULL || !block->prev->mapped; /* the first of a segment */
            (*rows)[7] = block->pool->small;
            (*rows)[8] = block->expandable != NULL;
            (*rows)[9] = block->pool->owner ? (int64_t)block->pool->owner->index : 0;
        }
    }
}

/* Write torch.cuda.memory_stats(), in the order of memory_stats.NAMES and COUNTERS. */
void allocator_statistics(const struct allocator *a, int64_t *figures)
{
    enum { EACH = POOLS * FIGURES, FIELDS = 4 };
    const struct figure *each = a->statistics.figures[0];
    for (size_t i = 0; i < EACH + OVERSIZE; i++) {
        const struct figure *figure = i < EACH ? &each[i] : &a->statistics.oversize[i - EACH];
        const int64_t fields[FIELDS] = {figure->current, figure->peak, figure->allocated, figure->freed};
        for (size_t field = 0; field < FIELDS; field++)
            figures[field * (EACH + OVERSIZE) + i] = fields[field];
    }
    memcpy(figures + FIELDS * (EACH + OVERSIZE), &a->counters, sizeof a->counters);
}

/* Write how serving ended. Return the number of training steps. */
int64_t allocator_outcome(const struct allocator *a, struct outcome *outcome)
{
    *outcome = (struct outcome){(int64_t)a->position, a->failed_size, a->failed_free, a->device.peak,
                                a->device.calls,      a->at_step[0],  a->at_step[1]};
    return a->steps;
}
