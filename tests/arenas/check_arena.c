/* Runs random steps of several threads on one arena. Every block is filled with its own pattern, which is
 * checked before the block is freed. Build it with the address sanitizer, and with the thread sanitizer.
 *
 *     check FIRST_SEED COUNT
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arena.h"

enum { THREADS = 3, HELD = 24, STEPS = 12, REQUESTS = 40, BYTES = 1 << 14, GRAIN = 64 };

static arena shared = ARENA_INITIALIZER;

static void check(int holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "%s\n", what);
    exit(1);
}

typedef struct {
    unsigned char *at;
    size_t size;
    unsigned char pattern;
} block;

typedef struct {
    uint64_t state;
    uintptr_t lane;
    block held[HELD];
} worker;

static int64_t draw(worker *w, int64_t below)
{
    w->state = w->state * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((w->state >> 33) % (uint64_t)below);
}

static void take(worker *w, block *into, size_t size)
{
    into->at = arena_allocate(&shared, (int64_t)size, w->lane);
    if (into->at) {
        check(into->at >= (unsigned char *)shared.base &&
                  into->at + size <= (unsigned char *)shared.base + BYTES,
              "outside");
    } else {
        into->at = malloc(size);
        check(into->at != NULL, "no memory");
        arena_record(&shared, into->at, (int64_t)size, w->lane);
        if (!draw(w, 16))
            arena_share(&shared, into->at);
    }
    into->size = size;
    into->pattern = (unsigned char)draw(w, 256);
    memset(into->at, into->pattern, size);
}

static void release(worker *w, block *from)
{
    for (size_t i = 0; i < from->size; i++)
        check(from->at[i] == from->pattern, "overwritten");
    if (!arena_free(&shared, from->at))
        free(from->at);
    from->at = NULL;
}

static void *run_requests(void *argument)
{
    worker *w = argument;
    for (int i = 0; i < REQUESTS; i++) {
        block *chosen = &w->held[draw(w, HELD)];
        if (chosen->at)
            release(w, chosen);
        else
            take(w, chosen, 1 + (size_t)draw(w, 4) * GRAIN);
    }
    return NULL;
}

/* A plan with the requested sizes and random offsets, valid and invalid ones. */
static plan *any_plan(worker *w)
{
    int64_t size[REQUESTS], offset[REQUESTS];
    for (int i = 0; i < REQUESTS; i++) {
        size[i] = 1 + draw(w, 4) * GRAIN;
        offset[i] = (draw(w, BYTES / GRAIN + 4) - 2) * GRAIN;
    }
    return plan_new(REQUESTS, size, offset);
}

int main(int argc, char **argv)
{
    (void)argc;
    shared.base = malloc(BYTES);
    shared.bytes = shared.address_bytes = BYTES;
    int64_t placed = 0, overlapping = 0, recorded = 0;
    for (long seed = atol(argv[1]), end = seed + atol(argv[2]); seed < end; seed++) {
        worker workers[THREADS];
        memset(workers, 0, sizeof workers);
        for (int i = 0; i < THREADS; i++) {
            workers[i].state = (uint64_t)(seed * THREADS + i);
            workers[i].lane = (uintptr_t)(i / 2); /* two threads share a lane */
        }
        for (int step = 0; step < STEPS; step++) {
            int mode = (int)draw(&workers[0], 3);
            plan *with = mode == PLACING ? any_plan(&workers[0]) : NULL;
            arena_begin(&shared, mode, 0, with);
            pthread_t threads[THREADS];
            for (int i = 1; i < THREADS; i++)
                check(!pthread_create(&threads[i], NULL, run_requests, &workers[i]), "no thread");
            run_requests(&workers[0]);
            for (int i = 1; i < THREADS; i++)
                pthread_join(threads[i], NULL);
            arena_end(&shared);
            tally counts;
            arena_tally(&shared, &counts);
            check(counts.unplanned == counts.differing + counts.overlapping + counts.elsewhere,
                  "the tally does not add up");
            placed += counts.placed;
            overlapping += counts.overlapping;
            int64_t count = arena_recorded_count(&shared, 0);
            check(count >= 0, "not recorded");
            recorded += count;
            lifetime *rows = malloc((size_t)count * sizeof *rows + 1);
            arena_recorded(&shared, 0, rows);
            for (int64_t i = 0; i < count; i++)
                check(
                    rows[i].size > 0 && (rows[i].until < 0 || (rows[i].until > i && rows[i].until <= count)),
                    "invalid lifetime");
            free(rows);
            plan_free(with);
        }
        for (int i = 0; i < THREADS; i++)
            for (int j = 0; j < HELD; j++)
                if (workers[i].held[j].at)
                    release(&workers[i], &workers[i].held[j]);
        check(arena_live(&shared) == 0, "something is still live");
    }
    printf("%ld placed, %ld overlapping, %ld recorded\n", (long)placed, (long)overlapping, (long)recorded);
    free(shared.base);
    free(shared.live.items);
    free(shared.recorder.live.slots);
    free(shared.recorder.old.slots);
    free(shared.recorder.now.items);
    free(shared.recorder.before.items);
    return 0;
}
