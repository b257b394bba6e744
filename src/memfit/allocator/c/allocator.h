/* PyTorch's caching allocator, compiled: the same rules in the same order as in the reference in Python,
 * tests/support/reference_allocator/caching_allocator.py and its modules.
 *
 *     replay.c               requests, served one after another; what Python calls
 *     caching_allocator.c    malloc and free
 *     reclaim.c              free memory that goes back to the device
 *     private_pools.c        pools of captured graphs and of MemPool
 *     expandable_segments.c  expandable segments
 *     stream_events.c        streams, and the blocks that wait for them
 *     blocks.c               blocks, the free ones in the order of best fit, and merging
 *     rounding.c             sizes of blocks and segments
 *     device_memory.c        the device's memory: a count of bytes, and addresses
 *     memory_stats.c         torch.cuda.memory_stats()
 *
 * They give the reason and the source of each rule; a comment here states only what is
 * different.
 */
#ifndef MEMFIT_ALLOCATOR_H
#define MEMFIT_ALLOCATOR_H

#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "array.h"
#include "units.h"

#define MIN_BLOCK 512
#define SMALL_SIZE MIB
#define SMALL_SEGMENT (2 * MIB)   /* kSmallBuffer */
#define MIN_LARGE_SIZE (10 * MIB) /* kMinLargeAlloc */
#define ROUND_LARGE (2 * MIB)     /* kRoundLarge */
#define NEVER (INT64_C(1) << 62)  /* more bytes than any block has */
#define INTERVALS 16

/* Only int64_t: compiled_allocator.py passes them as one array. */
struct settings {
    int64_t total;
    int64_t taken;   /* of the device, before the first request */
    int64_t allowed; /* bytes that may be reserved, or NEVER */
    int64_t collect_above;
    int64_t max_split_size;
    int64_t max_non_split_rounding;
    int64_t large_segment_size;
    int64_t expandable;
    int64_t throw_on_oom;
    int64_t numbered; /* whether blocks of equal size are ordered by the age of their segment */
    int64_t empties_each_step;
    int64_t divisions[INTERVALS];
};

struct calls {
    int64_t malloc, free, map, unmap, synchronize;
};

struct block;
struct list;
struct queue;
struct private_pool;
typedef struct {
    ARRAY(int64_t);
} number_array;
typedef struct {
    ARRAY(struct block *);
} block_array;
typedef struct {
    ARRAY(struct list *);
} list_array;
typedef struct {
    ARRAY(struct queue *);
} queue_array;
typedef struct {
    ARRAY(struct private_pool *);
} private_pool_array;

enum { SLOTS = 64 };
struct arena {
    int64_t next;
    number_array free_addresses[SLOTS]; /* by the logarithm of their slot's size */
};

struct device {
    int64_t total, used, peak;
    struct calls calls;
    struct arena memory, virtual;
};

struct pool;

struct reservation {
    int64_t address, size, handle;
};

struct block {
    int64_t address, size, requested, stream;
    int64_t number;  /* of its segment, in the order of creation */
    int64_t gc_base; /* the pool's searches when it became free */
    struct pool *pool;
    struct reservation *expandable;
    struct block *prev, *next;
    number_array uses; /* other streams that use it */
    int64_t events;
    size_t head; /* of the first block of a segment: its index among the heads */
    bool free, mapped, waits;
};

/* Blocks of one stream: free ones by size, number and address; unmapped ones by address. */
struct list {
    int64_t stream;
    block_array blocks;
};

struct pool {
    bool small;
    struct private_pool *owner;
    int64_t least;               /* bytes that a remainder must have to become a block */
    int64_t calls;               /* searches so far */
    list_array cached, unmapped; /* by stream */
};

struct private_pool {
    struct pool small, large;
    size_t index;
    int64_t pieces; /* its segments and mappings that are not released yet */
    bool used;      /* by a graph or a MemPool, until it is released */
};

/* The events of a stream, in the order in which they complete: one for each block that waits for it. */
struct queue {
    int64_t stream;
    block_array blocks;
    size_t first, done;           /* the first block that waits; how many events are complete from there on */
    struct queue *before, *after; /* in the order of creation */
};

enum {
    ALLOCATION,
    ALLOCATED,
    ACTIVE,
    ACTIVE_BYTES,
    REQUESTED,
    SPLITS,
    SPLIT_BYTES,
    SEGMENT,
    RESERVED,
    FIGURES
};
enum { ALL, SMALL_POOL, LARGE_POOL, POOLS };
enum { OVERSIZE_ALLOCATIONS, OVERSIZE_SEGMENTS, OVERSIZE };

struct figure {
    int64_t current, peak, allocated, freed;
};

struct statistics {
    struct figure figures[POOLS][FIGURES];
    struct figure oversize[OVERSIZE];
};

struct counters { /* in the order of compiled_allocator.py's COUNTERS */
    int64_t retries, ooms, sync_all_streams, device_alloc, device_free, oom_rejections;
};

struct allocator {
    struct settings settings;
    struct device device;
    struct pool small, large;
    struct private_pool **private_pools; /* by index; 0 stands for the default pool, and is NULL */
    size_t pool_count;
    size_t allocates_to;           /* a private pool's index, or 0 */
    private_pool_array every_pool; /* every private pool that was created */
    private_pool_array freeable;   /* released ones */
    block_array heads;             /* the first block of every segment and reservation */
    block_array deferred;          /* freed during a capture, and used by other streams */
    struct queue *queues, *last_queue;
    queue_array by_stream;
    size_t outstanding, ended; /* events, and how many of them are complete */
    int64_t captures;
    int64_t reserved, segments_made;
    bool collects, has_conditions; /* has_conditions: the best fit may be refused */
    int64_t unsplit_from;          /* blocks of so many bytes are not split */
    bool failed;                   /* whether the current malloc is out of memory */
    int64_t failed_size, failed_free;
    struct statistics statistics;
    struct counters counters;

    struct block *unused; /* linked by next */
    block_array pages;    /* memory of blocks */
    jmp_buf give_up;      /* taken when the host is out of memory, or addresses exceed 64 bits */

    struct block **held; /* by number */
    size_t held_count;
    size_t position;
    int64_t steps;
    struct calls at_step[2]; /* at the end of the last training step but one, and of the last */
};

/* How serving ended. */
enum status { SERVED, OUT_OF_MEMORY, IMPOSSIBLE, HOST_HAS_NO_MEMORY, BEYOND_64_BITS };

/* Return memory that was allocated; end serving if it is NULL. */
static inline void *or_give_up(struct allocator *a, void *memory)
{
    if (memory == NULL)
        longjmp(a->give_up, HOST_HAS_NO_MEMORY);
    return memory;
}

/* Add an item at the end, or before the one at an index. */
#define APPEND(a, array, item)                                                                               \
    (or_give_up((a), array_append(array)), (array)->items[(array)->count - 1] = (item))
#define INSERT(a, array, index, item)                                                                        \
    (or_give_up((a), array_insert(array, index)), (array)->items[index] = (item))

/* Set `index` to that of the first of `count` sorted items for which `before`, a condition on `middle`, fails. */
#define BISECT(index, count, before)                                                                         \
    do {                                                                                                     \
        size_t low = 0, high = (count);                                                                      \
        while (low < high) {                                                                                 \
            size_t middle = (low + high) / 2;                                                                \
            if (before)                                                                                      \
                low = middle + 1;                                                                            \
            else                                                                                             \
                high = middle;                                                                               \
        }                                                                                                    \
        index = low;                                                                                         \
    } while (0)

/* rounding.c */
int64_t round_up(int64_t size, int64_t step);
int64_t round_size(const struct settings *settings, int64_t size);
int64_t segment_size(const struct settings *settings, int64_t size);

/* blocks.c */
struct block *block_new(struct allocator *a, int64_t stream, int64_t size, struct pool *pool,
                        int64_t address);
void page_delete(struct block *page);
void block_delete(struct allocator *a, struct block *block);
struct block *block_split(struct allocator *a, struct block *block, int64_t size);
void block_swallow(struct allocator *a, struct block *block, struct block *following);
bool block_is_split(const struct block *block);
struct list *list_of(struct allocator *a, list_array *lists, int64_t stream);
struct block *list_at(const struct list *list, size_t index);
size_t list_first_of(const struct list *list, int64_t size);
void pool_add(struct allocator *a, struct block *block);
void pool_remove(struct allocator *a, struct block *block);
struct block **pool_blocks(struct allocator *a, const struct pool *pool, size_t *count);
void head_add(struct allocator *a, struct block *block);
void head_remove(struct allocator *a, struct block *block);

/* device_memory.c */
void device_init(struct device *device, int64_t total, int64_t taken);
int64_t device_malloc(struct allocator *a, int64_t size);
void device_free(struct allocator *a, int64_t address, int64_t size);
int64_t device_reserve(struct allocator *a, int64_t size);
void device_unreserve(struct allocator *a, int64_t address, int64_t size);
bool device_map(struct device *device, int64_t pieces, int64_t size);
void device_unmap(struct device *device, int64_t pieces, int64_t size);

/* memory_stats.c */
enum kind {
    ALLOC,
    FREE,
    FREE_REQUESTED,
    FREE_COMPLETED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP
};
void count(struct allocator *a, const struct pool *pool, enum kind kind, int64_t size, int64_t requested,
           int64_t splits, int64_t split_bytes);

/* caching_allocator.c */
struct block *caching_malloc(struct allocator *a, int64_t size, int64_t stream);
void caching_free(struct allocator *a, struct block *block);

/* blocks.c, which counts what becomes free */
struct block *merged(struct allocator *a, struct block *block);
void free_block(struct allocator *a, struct block *block, enum kind kind);

/* reclaim.c */
void caching_empty_cache(struct allocator *a, size_t only);
bool release_available_cached_blocks(struct allocator *a, struct pool *pool, int64_t stream, int64_t size);
void garbage_collect_cached_blocks(struct allocator *a);

/* private_pools.c */
void caching_allocate_to(struct allocator *a, size_t index);
void caching_release_pool(struct allocator *a, size_t index);
void pool_init(struct allocator *a, struct pool *pool, struct private_pool *owner, bool small);

/* stream_events.c */
void record_stream(struct allocator *a, struct block *block, int64_t stream);
void complete_stream(struct allocator *a, int64_t stream);
void complete_all_events(struct allocator *a);
void insert_events(struct allocator *a, struct block *block);
void process_events(struct allocator *a);
void synchronize_and_free_events(struct allocator *a);

/* expandable_segments.c */
struct block *expandable_allocate(struct allocator *a, struct pool *pool, int64_t stream, int64_t size);
void expandable_unmap(struct allocator *a, struct block *block);

/* replay.c: what Python calls */
#define API __attribute__((visibility("default")))
enum { COLUMNS = 10 }; /* of a block */

/* How serving ended. Only int64_t: compiled_allocator.py reads it as one array. */
struct outcome {
    int64_t position, failed_size, failed_free, peak;
    struct calls calls, last_but_one, last; /* of all, and at the end of the last two training steps */
};
API struct allocator *allocator_new(const struct settings *settings, int64_t blocks, int64_t pools);
API void allocator_delete(struct allocator *a);
API int allocator_serve(struct allocator *a, int64_t count, const int64_t *ask, const int64_t *block,
                        const int64_t *size, const int64_t *stream, const int64_t *pool);
API int64_t allocator_address(const struct allocator *a, int64_t number);
API int64_t allocator_block_count(const struct allocator *a);
API void allocator_blocks(struct allocator *a, int64_t (*rows)[COLUMNS]);
API void allocator_statistics(const struct allocator *a, int64_t *figures);
API int64_t allocator_outcome(const struct allocator *a, struct outcome *outcome);

#endif
