/* Frees of memory that other streams use: an event is recorded on each of these streams, and the free
 * waits for them. */

#include <stdlib.h>

#include "cuda_heaps.h"

enum { STREAMS = 4, DISABLE_TIMING = 2 }; /* cudaEventDisableTiming */

typedef struct {
    const void *streams[STREAMS];
    int count; /* more than STREAMS: some are not recorded */
} stream_use;

typedef struct deferred {
    struct deferred *next; /* younger */
    const void *pointer;
    int64_t size;
    int device;
    stream_use use;
    void *events[STREAMS]; /* those that are not complete */
    int event_count;
} deferred;

static struct hash_table uses; /* of pointers to a stream_use each */
static deferred *oldest, **after_youngest = &oldest;
static deferred *unrecorded; /* the first one without events; those after it have none either */
static int64_t deferred_count;

typedef struct {
    void *event;
    int device;
} idle_event;

static struct {
    ARRAY(idle_event); /* to be recorded again */
} idle;

static uint64_t key_of(const void *pointer) { return (uint64_t)(uintptr_t)pointer; }

static void add(stream_use *u, const void *stream)
{
    for (int i = 0; i < u->count && i < STREAMS; i++)
        if (u->streams[i] == stream)
            return;
    if (u->count < STREAMS)
        u->streams[u->count] = stream;
    if (u->count <= STREAMS)
        u->count++;
}

int stream_use_add(const void *pointer, const void *stream)
{
    stream_use *u = hash_table_get(&uses, key_of(pointer));
    if (!u && (!(u = calloc(1, sizeof *u)) || !hash_table_put(&uses, key_of(pointer), u))) {
        free(u);
        return 0;
    }
    add(u, stream);
    return 1;
}

int free_defer(const void *pointer, int64_t size, int device, const void *stream, int is_next)
{
    stream_use *u = hash_table_get(&uses, key_of(pointer));
    if (!u && is_next)
        return 0;
    deferred *k = malloc(sizeof *k);
    if (!k)
        return -1;
    *k = (deferred){.pointer = pointer, .size = size, .device = device};
    if (u) {
        k->use = *u;
        free(hash_table_remove(&uses, key_of(pointer)));
    }
    if (!is_next)
        add(&k->use, stream);
    *after_youngest = k;
    after_youngest = &k->next;
    if (!unrecorded)
        unrecorded = k;
    deferred_count++;
    return 1;
}

/* ---- events; their GPU is the current one --------------------------------------------------- */

static void *event_for(int device)
{
    for (size_t i = idle.count; i-- > 0;) {
        if (idle.items[i].device != device)
            continue;
        void *event = idle.items[i].event;
        idle.items[i] = idle.items[--idle.count];
        return event;
    }
    void *made = NULL;
    return cuda_driver()->EventCreateWithFlags(&made, DISABLE_TIMING) ? NULL : made;
}

static void record_events(deferred *k)
{
    const cuda_functions *cuda = cuda_driver();
    int before = k->device, is_known = k->use.count <= STREAMS;
    cuda->GetDevice(&before);
    cuda->SetDevice(k->device);
    for (int i = 0; is_known && i < k->use.count; i++) {
        void *event = event_for(k->device);
        if (event)
            k->events[k->event_count++] = event;
        is_known = event && !cuda->EventRecord(event, (void *)k->use.streams[i]);
    }
    cuda->SetDevice(before);
    if (!is_known) { /* too many streams, or a stream of another GPU */
        cuda->GetLastError();
        gpus_synchronize();
    }
}

void free_record_events(void)
{
    for (; unrecorded; unrecorded = unrecorded->next)
        record_events(unrecorded);
}

static int is_finished(deferred *k)
{
    const cuda_functions *cuda = cuda_driver();
    while (k->event_count) {
        void *event = k->events[k->event_count - 1];
        if (cuda->EventQuery(event)) {
            cuda->GetLastError(); /* "not ready" is not an error */
            return 0;
        }
        idle_event *place = array_append(&idle);
        if (!place)
            return 0;
        *place = (idle_event){event, k->device};
        k->event_count--;
    }
    return 1;
}

const void *free_finished(int64_t among, int64_t *size)
{
    free_record_events();
    deferred **at = &oldest;
    for (int64_t i = 0; *at && i < among; i++, at = &(*at)->next) {
        deferred *k = *at;
        if (!is_finished(k))
            continue;
        const void *pointer = k->pointer;
        *size = k->size;
        *at = k->next;
        if (after_youngest == &k->next)
            after_youngest = at;
        free(k);
        deferred_count--;
        return pointer;
    }
    return NULL;
}

int64_t free_deferred_count(void) { return deferred_count; }
