/* PyTorch's caching allocator once more, compiled: the rules of caching.py and of the files that it names.
 *
 *     replay.c      requests, one after another; what Python calls
 *     caching.c     malloc, free and all that they lead to
 *     expandable.c  expandable segments
 *     events.c      streams, and the blocks that wait for them
 *     blocks.c      blocks, and the free ones in the order of best fit
 *     device.c      the device's memory: a count of bytes, and addresses
 *     statistics.c  torch.cuda.memory_stats()
 *
 * Those say why each rule is as it is, and where it is from; a comment here says only what is different.
 */
#ifndef MEMFIT_ALLOCATOR_H
#define MEMFIT_ALLOCATOR_H

#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MIB (INT64_C(1) << 20)
#define MIN_BLOCK 512
#define SMALL_SIZE MIB
#define SMALL_SEGMENT (2 * MIB)
#define NEVER (INT64_C(1) << 62) /* bytes that no block has */
#define INTERVALS 16

/* All of them int64_t: native.py fills them in as one array. */
struct settings {
    int64_t total;
    int64_t taken;   /* of the device, before anything is asked for */
    int64_t allowed; /* bytes that may be reserved, or NEVER */
    int64_t collect_above;
    int64_t max_split_size;
    int64_t max_non_split_rounding;
    int64_t large_segment_size;
    int64_t expandable;
    int64_t throw_on_oom;
    int64_t numbered; /* whether blocks of equal size go by the age of their segment */
    int64_t empties_each_step;
    int64_t divisions[INTERVALS];
};

struct calls {
    int64_t malloc, free, map, unmap, synchronize;
};

struct vector {
    void *at;
    size_t count, room;
};

enum { SLOTS = 64 };
struct arena {
    int64_t next;
    struct vector given_back[SLOTS]; /* addresses, by the logarithm of their slot's size */
};

struct device {
    int64_t total, used, most;
    struct calls calls;
    struct arena memory, virtual;
};

struct pool;

struct reservation {
    int64_t address, size, handle;
};

struct block {
    int64_t address, size, requested, stream;
    int64_t number;  /* of its segment, in the order in which they were made */
    int64_t gc_base; /* the pool's searches when it became free */
    struct pool *pool;
    struct reservation *expandable;
    struct block *prev, *next;
    struct vector uses; /* int64_t: other streams that use it */
    int64_t events;
    size_t head; /* of the first of a segment: its place among the heads */
    bool free, mapped, waits;
};

/* Blocks of one stream: free ones by size, number and address; those with no memory behind them by address. */
struct list {
    int64_t stream;
    struct vector blocks; /* struct block * */
};

struct pool {
    bool small;
    struct private_pool *owner;
    int64_t least; /* bytes that a remainder must have to become a block */
    int64_t calls; /* searches so far */
    struct vector cached, unmapped; /* struct list *, by stream */
};

struct private_pool {
    struct pool small, large;
    size_t index;
    int64_t pieces; /* segments and mappings that were made for it and not yet given back */
    bool used;      /* by a graph or a MemPool, until it is released */
};

struct event {
    struct block *block;
    struct event *next;
    bool done;
};

struct queue {
    int64_t stream;
    struct event *first, *last;
    struct queue *before, *after; /* in the order in which they were made */
};

enum { ALLOCATION, ALLOCATED, ACTIVE, ACTIVE_BYTES, REQUESTED, SPLITS, SPLIT_BYTES, SEGMENT, RESERVED, FIGURES };
enum { ALL, SMALL_POOL, LARGE_POOL, POOLS };
enum { OVERSIZE_ALLOCATIONS, OVERSIZE_SEGMENTS, OVERSIZE };

struct figure {
    int64_t current, peak, allocated, freed;
};

struct statistics {
    struct figure figures[POOLS][FIGURES];
    struct figure oversize[OVERSIZE];
};

struct counters {
    int64_t retries, ooms, sync_all_streams, device_alloc, device_free, oom_rejections;
};

struct allocator {
    struct settings settings;
    struct device device;
    struct pool small, large;
    struct private_pool **private_pools; /* by index; 0 stands for the default pool, and is NULL */
    size_t pool_count;
    size_t allocates_to;    /* a private pool's index, or 0 */
    struct vector every_pool; /* struct private_pool *: private ones, also those that are no more */
    struct vector freeable; /* struct private_pool *: released ones */
    struct vector heads;    /* struct block *: the first of every segment and reservation */
    struct vector deferred; /* struct block *: freed during a capture, and used by other streams */
    struct queue *queues, *last_queue;
    struct vector by_stream; /* struct queue *, by stream */
    size_t outstanding, ended; /* events, and those of them that are over */
    int64_t captures;
    int64_t reserved, made;
    bool collects, choosy;
    int64_t unsplit;
    bool failed; /* whether the malloc under way is out of memory */
    int64_t failed_size, failed_free;
    struct statistics statistics;
    struct counters counters;

    struct block *unused; /* by next */
    struct vector pages;  /* struct block *: where blocks live */
    jmp_buf give_up;      /* where to go when the host has no memory left, or addresses end */

    struct block **held; /* by number */
    size_t held_count;
    size_t position;
    int64_t steps;
    struct calls at_step[2]; /* up to the end of the last but one training step, and of the last */
};

/* blocks.c */
void *vector_insert(struct allocator *a, struct vector *vector, size_t index, size_t item);
void vector_remove(struct vector *vector, size_t index, size_t item);
struct block *block_new(struct allocator *a, int64_t stream, int64_t size, struct pool *pool, int64_t address);
void page_delete(struct block *page);
void block_delete(struct allocator *a, struct block *block);
struct block *block_split(struct allocator *a, struct block *block, int64_t size);
void block_swallow(struct allocator *a, struct block *block, struct block *following);
bool block_is_split(const struct block *block);
struct list *list_of(struct allocator *a, struct vector *lists, int64_t stream);
struct block *list_at(const struct list *list, size_t index);
size_t list_first_of(const struct list *list, int64_t size);
void pool_add(struct allocator *a, struct block *block);
void pool_remove(struct allocator *a, struct block *block);
void pool_add_unmapped(struct allocator *a, struct block *block);
void pool_remove_unmapped(struct allocator *a, struct block *block);
struct block **pool_blocks(struct allocator *a, const struct pool *pool, size_t *count);
void head_add(struct allocator *a, struct block *block);
void head_remove(struct allocator *a, struct block *block);

/* device.c */
void device_init(struct device *device, int64_t total, int64_t taken);
int64_t device_malloc(struct allocator *a, int64_t size);
void device_free(struct allocator *a, int64_t address, int64_t size);
int64_t device_reserve(struct allocator *a, int64_t size);
void device_unreserve(struct allocator *a, int64_t address, int64_t size);
bool device_map(struct device *device, int64_t pieces, int64_t size);
void device_unmap(struct device *device, int64_t pieces, int64_t size);

/* statistics.c */
enum kind { ALLOC, FREE, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP };
void count(struct allocator *a, const struct pool *pool, enum kind kind, int64_t size, int64_t requested,
           int64_t splits, int64_t split_bytes);

/* caching.c */
struct block *caching_malloc(struct allocator *a, int64_t size, int64_t stream);
void caching_free(struct allocator *a, struct block *block);
void caching_empty_cache(struct allocator *a, size_t only);
void caching_allocate_to(struct allocator *a, size_t index);
void caching_release_pool(struct allocator *a, size_t index);
void pool_init(struct allocator *a, struct pool *pool, struct private_pool *owner, bool small);
struct block *merged(struct allocator *a, struct block *block);
void free_block(struct allocator *a, struct block *block, enum kind kind);

/* events.c */
void record_stream(struct allocator *a, struct block *block, int64_t stream);
void stream_gone_on(struct allocator *a, int64_t stream);
void everything_is_over(struct allocator *a);
void insert_events(struct allocator *a, struct block *block);
void process_events(struct allocator *a);
void synchronize_and_free_events(struct allocator *a);

/* expandable.c */
struct block *expandable_allocate(struct allocator *a, struct pool *pool, int64_t stream, int64_t size);
void expandable_unmap(struct allocator *a, struct block *block);

/* replay.c: what Python calls */
#define API __attribute__((visibility("default")))
enum { COLUMNS = 10 }; /* of a block */
API struct allocator *allocator_new(const struct settings *settings, int64_t blocks, int64_t pools);
API void allocator_delete(struct allocator *a);
API int allocator_serve(struct allocator *a, int64_t count, const int64_t *ask, const int64_t *block,
                        const int64_t *size, const int64_t *stream, const int64_t *pool);
API int64_t allocator_address(const struct allocator *a, int64_t number);
API int64_t allocator_block_count(const struct allocator *a);
API void allocator_blocks(struct allocator *a, int64_t (*rows)[COLUMNS]);
API void allocator_statistics(const struct allocator *a, int64_t *figures);
API int64_t allocator_outcome(const struct allocator *a, int64_t *figures);

/* How serving ended. */
enum status { SERVED, OUT_OF_MEMORY, IMPOSSIBLE, HOST_HAS_NO_MEMORY, BEYOND_64_BITS };

#endif
