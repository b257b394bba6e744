// Memory that other streams use: when it is freed, an event is recorded on each of them, and waited for.

#include <stdlib.h>
#include <string.h>

#include "heap.h"

enum { STREAMS = 4, DISABLE_TIMING = 2 }; // cudaEventDisableTiming

typedef struct {
  const void *pointer;
  const void *streams[STREAMS];
  int count; // more than STREAMS: some are not known
} use;

typedef struct kept {
  struct kept *next; // younger
  const void *pointer, *stream;
  int64_t size;
  int device;
  use of;
  void *events[STREAMS]; // those that are not over
  int event_count;
} kept;

static use *used; // by pointer
static int64_t used_count, used_room;
static kept *oldest, **after_youngest = &oldest;
static kept *unrecorded; // from this one on
static int64_t kept_count;

typedef struct {
  void *event;
  int device;
} idle_event;

static idle_event *idle; // events to record again
static int64_t idle_count, idle_room;

static int64_t position(const void *pointer) {
  int64_t from = 0, to = used_count;
  while (from < to) {
    int64_t middle = from + (to - from) / 2;
    if (used[middle].pointer < pointer) from = middle + 1;
    else to = middle;
  }
  return from;
}

static void add(use *u, const void *stream) {
  for (int i = 0; i < u->count && i < STREAMS; i++)
    if (u->streams[i] == stream) return;
  if (u->count < STREAMS) u->streams[u->count] = stream;
  if (u->count <= STREAMS) u->count++;
}

int uses_add(const void *pointer, const void *stream) {
  int64_t at = position(pointer);
  if (at == used_count || used[at].pointer != pointer) {
    if (!grow((void **)&used, used_count, &used_room, sizeof *used)) return 0;
    memmove(used + at + 1, used + at, (size_t)(used_count - at) * sizeof *used);
    used[at] = (use){.pointer = pointer};
    used_count++;
  }
  add(used + at, stream);
  return 1;
}

int uses_keep(const void *pointer, int64_t size, int device, const void *stream, int is_next) {
  int64_t at = position(pointer);
  int is_used = at < used_count && used[at].pointer == pointer;
  if (!is_used && is_next) return 0;
  kept *k = malloc(sizeof *k);
  if (!k) return -1;
  *k = (kept){.pointer = pointer, .stream = stream, .size = size, .device = device};
  if (is_used) {
    k->of = used[at];
    used_count--;
    memmove(used + at, used + at + 1, (size_t)(used_count - at) * sizeof *used);
  }
  if (!is_next) add(&k->of, stream);
  *after_youngest = k;
  after_youngest = &k->next;
  if (!unrecorded) unrecorded = k;
  kept_count++;
  return 1;
}

// ---- events; the GPU whose they are is the current one

static void *event_for(int device) {
  for (int64_t i = idle_count; i-- > 0;) {
    if (idle[i].device != device) continue;
    void *event = idle[i].event;
    idle[i] = idle[--idle_count];
    return event;
  }
  void *made = NULL;
  return cuda_driver()->EventCreateWithFlags(&made, DISABLE_TIMING) ? NULL : made;
}

static void record_events(kept *k) {
  const cuda_functions *cuda = cuda_driver();
  int before = k->device, is_known = k->of.count <= STREAMS;
  cuda->GetDevice(&before);
  cuda->SetDevice(k->device);
  for (int i = 0; is_known && i < k->of.count; i++) {
    void *event = event_for(k->device);
    if (event) k->events[k->event_count++] = event;
    is_known = event && !cuda->EventRecord(event, (void *)k->of.streams[i]);
  }
  cuda->SetDevice(before);
  if (!is_known) { // many streams, or one of another GPU
    cuda->GetLastError();
    gpus_synchronize();
  }
}

void uses_record(void) {
  for (; unrecorded; unrecorded = unrecorded->next) record_events(unrecorded);
}

static int is_over(kept *k) {
  const cuda_functions *cuda = cuda_driver();
  while (k->event_count) {
    void *event = k->events[k->event_count - 1];
    if (cuda->EventQuery(event)) {
      cuda->GetLastError(); // not an error: it is not over
      return 0;
    }
    if (!grow((void **)&idle, idle_count, &idle_room, sizeof *idle)) return 0;
    idle[idle_count++] = (idle_event){event, k->device};
    k->event_count--;
  }
  return 1;
}

const void *uses_done(int64_t among, int64_t *size, const void **stream) {
  uses_record();
  kept **at = &oldest;
  for (int64_t i = 0; *at && i < among; i++, at = &(*at)->next) {
    kept *k = *at;
    if (!is_over(k)) continue;
    const void *pointer = k->pointer;
    *size = k->size;
    *stream = k->stream;
    *at = k->next;
    if (after_youngest == &k->next) after_youngest = at;
    free(k);
    kept_count--;
    return pointer;
  }
  return NULL;
}

int64_t uses_kept(void) { return kept_count; }
