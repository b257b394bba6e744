/* Makes random allocations in several threads on several streams, from the arena and the heaps, and captures
 * graphs. Build it with the address sanitizer, and with the thread sanitizer.
 *
 *     check_cuda THREADS FIRST_SEED COUNT
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>

#include "fake_cuda.h"
#include "cuda_heaps.h"

enum { HELD = 48, OPERATIONS = 120, GRAIN = 512, UNITS = RANGES * (RANGE / GRAIN), PLANNED = 60, KINDS = 6 };

void *placing_malloc(ssize_t size, int device, void *stream);
void placing_free(void *pointer, size_t size, int device, void *stream);
void placing_record_stream(void *pointer, void *stream);
void placing_begin_pool(int device, pool_id id, void *filter);
void placing_end_pool(int device, pool_id id);
void placing_release_pool(int device, pool_id id);
arena *cuda_attach(int device);
int cuda_reserve(int64_t bytes);
void cuda_trim(void);

/* The last streams that used a unit of memory, and the work after which they no longer do. */
typedef struct {
    int is_live, stream;
    long number;
    int other; /* another stream that uses it, or -1 */
    long other_number;
} unit;

typedef struct {
    char *at;
    int64_t size;
    int stream, other;
} block;

typedef struct {
    uint64_t state;
    block held[HELD];
} worker;

static unit units[UNITS];
static pthread_mutex_t shadow = PTHREAD_MUTEX_INITIALIZER;
static arena *placed;
static long count[KINDS]; /* how often each case occurred */
enum { PLACED, FULL, USED_ELSEWHERE, REUSED, TRIMMED, CAPTURED };
static int64_t sizes[PLANNED], next_planned;
static _Thread_local jmp_buf short_of_memory;

_Noreturn void throw_out_of_memory(const char *message) { longjmp(short_of_memory, 1); }
_Noreturn void throw_error(const char *message)
{
    must(0, message);
    abort();
}

static int64_t draw(worker *w, int64_t below)
{
    w->state = w->state * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((w->state >> 33) % (uint64_t)below);
}

static void count_event(int kind) { __atomic_add_fetch(count + kind, 1, __ATOMIC_RELAXED); }

static unit *unit_at(const void *pointer)
{
    must((uint64_t)pointer % GRAIN == 0, "not aligned");
    return units + ((uint64_t)pointer - BASE) / GRAIN;
}

static int64_t units_of(const block *b) { return (b->size + GRAIN - 1) / GRAIN; }

static void check_taken(const block *b)
{
    unit *first = unit_at(b->at);
    must(is_usable(b->at, b->size), "not on mapped pages");
    pthread_mutex_lock(&shadow);
    for (unit *u = first; u < first + units_of(b); u++) {
        must(!u->is_live, "overlaps a live block");
        must(u->stream == b->stream || is_done(u->stream, u->number), "in use by its last stream");
        must(u->other < 0 || u->other == b->stream || is_done(u->other, u->other_number),
             "in use by another stream");
        if (u->number)
            count_event(REUSED);
        *u = (unit){.is_live = 1, .stream = b->stream, .other = -1};
    }
    pthread_mutex_unlock(&shadow);
    char *base = placed->base;
    if (base && b->at >= base && b->at < base + RANGE)
        count_event(PLACED);
}

static void check_held(const block *b)
{
    must(!b->at || is_usable(b->at, b->size), "a live block has lost its pages");
}

static void take(worker *w, block *into, int64_t size, int stream)
{
    *into = (block){NULL, size, stream, -1};
    if (setjmp(short_of_memory)) {
        count_event(FULL);
        return;
    }
    into->at = placing_malloc(size, 0, (void *)(uintptr_t)stream);
    check_taken(into);
    if (!draw(w, 5)) {
        into->other = (int)draw(w, STREAMS);
        placing_record_stream(into->at, (void *)(uintptr_t)into->other);
        count_event(USED_ELSEWHERE);
    }
}

static void release(block *from)
{
    long number = work(from->stream), other_number = from->other < 0 ? 0 : work(from->other);
    unit *first = unit_at(from->at);
    pthread_mutex_lock(&shadow);
    for (unit *u = first; u < first + units_of(from); u++)
        *u = (unit){0, from->stream, number, from->other, other_number};
    pthread_mutex_unlock(&shadow);
    placing_free(from->at, (size_t)from->size, 0, (void *)(uintptr_t)from->stream);
    from->at = NULL;
}

static int64_t next_size(void)
{
    return sizes[__atomic_fetch_add(&next_planned, 1, __ATOMIC_RELAXED) % PLANNED];
}

static int64_t mapped_for(uint64_t id)
{
    int64_t mapped = 0;
    for (int64_t i = 0; heap_at(i); i++)
        if (heap_at(i)->pool.low == id)
            mapped += heap_at(i)->range.mapped;
    return mapped;
}

/* Memory of a captured graph belongs to it alone until the pool is released. */
static void capture_one(worker *w, uint64_t id)
{
    enum { GRAPHS_BLOCKS = 6 };
    int stream = placed->lane && draw(w, 2) ? (int)placed->lane : 1 + (int)draw(w, STREAMS - 1);
    block held[GRAPHS_BLOCKS] = {{0}};
    placing_begin_pool(0, (pool_id){0, id}, NULL);
    capture(stream);
    for (int i = 0; i < 4 * GRAPHS_BLOCKS; i++) {
        block *b = held + draw(w, GRAPHS_BLOCKS), *other = w->held + draw(w, HELD);
        if (b->at)
            release(b);
        else
            take(w, b, next_size(), stream);
        if (other->at)
            release(other);
        else
            take(w, other, next_size(), stream != (int)placed->lane ? (int)placed->lane : 0);
        const heap *own = b->at ? heap_of(b->at) : NULL, *ordinary = other->at ? heap_of(other->at) : NULL;
        must(!b->at || (own && own->pool.low == id), "a captured graph's memory is outside its pool");
        must(!ordinary || !ordinary->pool.low, "memory of a captured graph was used by others");
    }
    capture(-1);
    placing_end_pool(0, (pool_id){0, id});
    for (int i = 0; i < GRAPHS_BLOCKS; i++)
        if (held[i].at)
            release(held + i);
    int64_t mapped = mapped_for(id);
    cuda_trim();
    must(mapped_for(id) == mapped, "a graph that may be replayed has lost its memory");
    placing_release_pool(0, (pool_id){0, id});
    count_event(CAPTURED);
}

static void *run(void *argument)
{
    worker *w = argument;
    for (int i = 0; i < OPERATIONS; i++) {
        block *b = w->held + draw(w, HELD);
        if (b->at)
            release(b);
        else if (!draw(w, 3))
            take(w, b, 1 + draw(w, draw(w, 20) ? 100000 : TOTAL), (int)draw(w, STREAMS));
        else
            take(w, b, next_size(), (int)placed->lane);
        if (!draw(w, 3))
            advance((int)draw(w, STREAMS));
        if (!draw(w, 200)) {
            cuda_trim();
            count_event(TRIMMED);
        }
    }
    return NULL;
}

static plan *planned(worker *w)
{
    int64_t offset[PLANNED];
    next_planned = 0;
    for (int64_t i = 0; i < PLANNED; i++) {
        sizes[i] = 700 + draw(w, 40000);
        offset[i] = draw(w, 8) ? draw(w, TOTAL / 4 / GRAIN) * GRAIN : -1;
    }
    return plan_new(PLANNED, sizes, offset);
}

int main(int argc, char **argv)
{
    int threads = argc > 3 ? atoi(argv[1]) : 1;
    worker *workers = calloc((size_t)threads, sizeof *workers);
    pthread_t *ids = calloc((size_t)threads, sizeof *ids);
    placed = cuda_attach(0);
    must(placed && workers && ids && argc > 3, "check_cuda THREADS FIRST_SEED COUNT");
    for (int i = 0; i < UNITS; i++)
        units[i].other = -1;
    worker main_worker = {.state = (uint64_t)atoi(argv[2])};
    is_alone = threads == 1;
    for (int round = 0; round < atoi(argv[3]); round++) {
        plan *with = planned(&main_worker);
        if (draw(&main_worker, 2)) {
            cuda_reserve(draw(&main_worker, TOTAL / 3));
            for (int i = 0; i < threads * HELD; i++)
                check_held(workers[i / HELD].held + i % HELD);
        }
        arena_begin(placed, 1 + (int)draw(&main_worker, 2), (uintptr_t)draw(&main_worker, STREAMS), with);
        if (round < RANGES / 4)
            capture_one(workers, (uint64_t)round + 1);
        for (int i = 0; i < threads; i++) {
            workers[i].state = (uint64_t)(atoi(argv[2]) + 1000 * round + i + 1);
            pthread_create(ids + i, NULL, run, workers + i);
        }
        for (int i = 0; i < threads; i++)
            pthread_join(ids[i], NULL);
        if (round >= RANGES / 4 && round < RANGES / 2)
            capture_one(workers, (uint64_t)round + 1);
        arena_end(placed);
        plan_free(with);
    }
    for (int i = 0; i < threads; i++)
        for (int j = 0; j < HELD; j++)
            if (workers[i].held[j].at)
                release(workers[i].held + j);
    must(!cuda_reserve(INT64_MAX) && !cuda_reserve(-1), "more than there are addresses");
    must(cuda_reserve(0), "nothing is live, but the arena cannot be emptied");
    cuda_trim();
    must(!device_pages(), "nothing is live, but pages are in use");
    for (int i = 0; i < KINDS; i++)
        printf("%ld ", count[i]);
    free(workers);
    free(ids);
    return 0;
}
