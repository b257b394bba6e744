/* Places allocations at planned offsets of one arena.
 *
 *   a step is recorded       the size of each allocation, and how long it lives
 *   an offset is planned     for each whose lifetime is known: packing/ does that
 *   a step is placed         the k-th allocation gets its offset, if its size matches and the place is free
 *
 * Every allocation that does not match the plan goes to the ordinary allocator, and is counted. Memory in
 * use is never given out again: a wrong plan cannot place an allocation over a live one.
 */
#ifndef MEMFIT_ARENA_H
#define MEMFIT_ARENA_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "array.h"
#include "hash_table.h"

#define API __attribute__((visibility("default")))

enum mode { IDLE, RECORDING, PLACING };

/* ---- sorted_pairs.c: pairs of numbers in their order */

typedef struct {
    int64_t first, second;
} pair;

typedef struct {
    ARRAY(pair);
} pairs;

/* Return the index of the first pair that is not before `least`. */
size_t pairs_index(const pairs *p, pair least);
/* Add a pair; return whether host memory sufficed. */
int pairs_add(pairs *p, pair added);
/* Remove a pair, which must be there. */
void pairs_remove(pairs *p, pair removed);

/* ---- step_recorder.c: the allocations of a step */

enum { LIVES = -1, SHARED = -2 };

/* Time is counted in allocations: an allocation begins at its own number. */
typedef struct {
    int64_t size;
    /* Allocations of the step when it was freed; LIVES; SHARED: other streams use it. */
    int64_t until;
    /* If it outlived the step: allocations of the next step when it was freed, 0 also if that had not begun;
     * LIVES if it outlived the next step, too. */
    int64_t next;
} lifetime;

typedef struct {
    ARRAY(lifetime); /* of each allocation of the step, in order */
} step_record;

typedef struct {
    step_record now, before;     /* of this step, and of the one before it if that was recorded, too */
    struct hash_table live, old; /* live allocations of each of the two: address to number */
    int failed;                  /* whether the records have holes, for lack of host memory */
} recorder;

void recorder_begin(recorder *r);
void recorder_clear(recorder *r);
void recorder_add(recorder *r, const void *pointer, int64_t size);
void recorder_share(recorder *r, const void *pointer);
void recorder_free(recorder *r, const void *pointer, int is_within_step);

/* ---- arena.c */

/* Offsets for the allocations of a step, in order; -1 for those of the ordinary allocator. */
typedef struct {
    int64_t count;
    int64_t *size, *offset;
} plan;

/* How the allocations of a step were served. */
typedef struct {
    int64_t placed, placed_bytes;
    int64_t kept, kept_bytes;           /* outside the arena, according to the plan */
    int64_t unplanned, unplanned_bytes; /* the sum of the next three */
    int64_t differing;                  /* not in the plan */
    int64_t overlapping;                /* their place was taken */
    int64_t elsewhere;                  /* of other threads, or on other streams */
    int64_t skipped;                    /* in the plan, and not requested */
    int64_t first, first_bytes; /* the first that differs: its number in the plan, the bytes; -1 if none */
} tally;

/* An address range with a plan for it. All functions lock it, except those that report on a step: call
 * them between steps. */
typedef struct {
    pthread_mutex_t lock;
    char *base; /* set once */
    int64_t address_bytes;
    int64_t bytes; /* of the range, from its start: those that have memory */
    int mode;
    uintptr_t lane; /* whose step it is: a thread's, or a stream's; all of its memory is used in order */
    const plan *plan;
    int64_t next; /* allocation of the plan */
    tally tally;
    pairs live; /* placed and not freed: offset and end of each; they do not overlap */
    recorder recorder;
} arena;

#define ARENA_INITIALIZER {.lock = PTHREAD_MUTEX_INITIALIZER}

API void arena_begin(arena *a, int mode, uintptr_t lane, const plan *with);
API void arena_end(arena *a);
/* Return the place of an allocation; NULL: use the ordinary allocator. */
void *arena_allocate(arena *a, int64_t size, uintptr_t lane);
/* Record an allocation of the ordinary allocator. */
void arena_record(arena *a, const void *pointer, int64_t size, uintptr_t lane);
/* Record that other streams use an allocation. */
void arena_share(arena *a, const void *pointer);
/* Free an allocation; return whether it was in the arena. If not, the caller frees it after this. */
int arena_free(arena *a, const void *pointer);

API void arena_tally(const arena *a, tally *out);
API int64_t arena_live(const arena *a);
/* Return the bytes of the arena that have memory. */
API int64_t arena_bytes(const arena *a);
/* Return how many allocations were recorded in this step, or in the one before it; -1 if host memory ran
 * out. */
API int64_t arena_recorded_count(const arena *a, int before);
API void arena_recorded(const arena *a, int before, lifetime *out);

API plan *plan_new(int64_t count, const int64_t *size, const int64_t *offset);
API void plan_free(plan *p);

#endif
