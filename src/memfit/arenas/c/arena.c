/* One address range, its plan, and its live allocations. */

#include <stdlib.h>
#include <string.h>

#include "arena.h"

enum { AHEAD = 8 }; /* how far ahead the plan is searched when the script skipped allocations */

void arena_begin(arena *a, int mode, uintptr_t lane, const plan *with)
{
    pthread_mutex_lock(&a->lock);
    a->lane = lane;
    a->plan = with;
    a->next = 0;
    a->tally = (tally){.first = -1};
    if (mode == RECORDING)
        recorder_begin(&a->recorder);
    else
        recorder_clear(&a->recorder);
    a->mode = mode;
    pthread_mutex_unlock(&a->lock);
}

void arena_end(arena *a)
{
    pthread_mutex_lock(&a->lock);
    if (a->mode == PLACING)
        a->tally.skipped += a->plan->count - a->next;
    a->mode = IDLE;
    a->plan = NULL;
    pthread_mutex_unlock(&a->lock);
}

/* Find an allocation in the plan, near the expected number; -1 if it is not there. */
static int64_t find(const arena *a, int64_t size)
{
    for (int64_t i = a->next; i < a->plan->count && i <= a->next + AHEAD; i++)
        if (a->plan->size[i] == size)
            return i;
    return -1;
}

/* Take the place from an offset to an end if it is free; return whether it was. */
static int occupy(pairs *live, int64_t offset, int64_t end)
{
    size_t at = pairs_index(live, (pair){end, 0}); /* those before begin before the end */
    int is_free = !at || live->items[at - 1].second <= offset;
    return is_free && pairs_add(live, (pair){offset, end});
}

static void vacate(pairs *live, int64_t offset)
{
    size_t at = pairs_index(live, (pair){offset, 0});
    if (at < live->count && live->items[at].first == offset)
        array_remove(live, at);
}

static int64_t offset_for(arena *a, int64_t size, uintptr_t lane)
{
    tally *t = &a->tally;
    int64_t found = lane == a->lane ? find(a, size) : -1;
    if (found >= 0) {
        t->skipped += found - a->next;
        a->next = found + 1;
        int64_t offset = a->plan->offset[found];
        if (offset < 0) {
            t->kept++;
            t->kept_bytes += size;
            return -1;
        }
        if (size <= a->bytes - offset && occupy(&a->live, offset, offset + size)) {
            t->placed++;
            t->placed_bytes += size;
            return offset;
        }
        t->overlapping++;
    } else if (lane == a->lane) {
        if (!t->differing++) {
            t->first = a->next;
            t->first_bytes = size;
        }
    } else {
        t->elsewhere++;
    }
    t->unplanned++;
    t->unplanned_bytes += size;
    return -1;
}

void *arena_allocate(arena *a, int64_t size, uintptr_t lane)
{
    if (size <= 0)
        return NULL;
    pthread_mutex_lock(&a->lock);
    int64_t offset = a->mode == PLACING ? offset_for(a, size, lane) : -1;
    void *place = offset < 0 ? NULL : a->base + offset;
    pthread_mutex_unlock(&a->lock);
    return place;
}

void arena_record(arena *a, const void *pointer, int64_t size, uintptr_t lane)
{
    if (size <= 0)
        return;
    pthread_mutex_lock(&a->lock);
    if (a->mode == RECORDING && lane == a->lane)
        recorder_add(&a->recorder, pointer, size);
    pthread_mutex_unlock(&a->lock);
}

void arena_share(arena *a, const void *pointer)
{
    pthread_mutex_lock(&a->lock);
    recorder_share(&a->recorder, pointer);
    pthread_mutex_unlock(&a->lock);
}

int arena_free(arena *a, const void *pointer)
{
    const char *at = pointer;
    int is_here = a->base && at >= a->base && at < a->base + a->address_bytes;
    pthread_mutex_lock(&a->lock);
    if (is_here)
        vacate(&a->live, at - a->base);
    else
        recorder_free(&a->recorder, pointer, a->mode == RECORDING);
    pthread_mutex_unlock(&a->lock);
    return is_here;
}

void arena_tally(const arena *a, tally *out) { *out = a->tally; }

int64_t arena_live(const arena *a) { return (int64_t)a->live.count; }

int64_t arena_bytes(const arena *a) { return a->bytes; }

static const step_record *recorded(const arena *a, int before)
{
    return before ? &a->recorder.before : &a->recorder.now;
}

int64_t arena_recorded_count(const arena *a, int before)
{
    return a->recorder.failed ? -1 : (int64_t)recorded(a, before)->count;
}

void arena_recorded(const arena *a, int before, lifetime *out)
{
    const step_record *r = recorded(a, before);
    if (r->count)
        memcpy(out, r->items, r->count * sizeof *out);
}

plan *plan_new(int64_t count, const int64_t *size, const int64_t *offset)
{
    plan *made = malloc(sizeof *made);
    size_t bytes = (size_t)count * sizeof *size;
    if (!made)
        return NULL;
    *made = (plan){count, malloc(bytes + 1), malloc(bytes + 1)};
    if (made->size && made->offset) {
        memcpy(made->size, size, bytes);
        memcpy(made->offset, offset, bytes);
        return made;
    }
    plan_free(made);
    return NULL;
}

void plan_free(plan *p)
{
    if (!p)
        return;
    free(p->size);
    free(p->offset);
    free(p);
}
