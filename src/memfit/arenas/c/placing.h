// Places allocations at planned offsets of one arena.
//
//   a step is recorded       how much each allocation asks for, and how long it lives
//   an offset is planned     for each whose life is known: packing/ does that
//   a step is placed         the k-th allocation lies at its offset, if its size is the k-th and the place is free
//
// Whatever does not go by the plan is the ordinary allocator's, and counted. Nothing that lives is ever given away
// again: a place is taken only if nothing that lives overlaps it, whatever the plan says.
#pragma once

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))

enum mode { IDLE, RECORDING, PLACING };

// ---- live.c: what lives in an arena

typedef struct {
  int64_t offset, end;
} extent;

typedef struct {
  extent *extents;  // by offset; none overlaps another
  int64_t count, room;
} live;

// Whether there was room in [offset, offset + size), and it is taken now.
int live_occupy(live *l, int64_t offset, int64_t size);
void live_vacate(live *l, int64_t offset);

// ---- record.c: what a step asked for

enum { LIVES = -1, SHARED = -2 };

// Time is counted in allocations: one is born at its own number.
typedef struct {
  int64_t size;
  int64_t until;  // how many of the step had been made when it was freed; LIVES; SHARED: other streams use it
  int64_t next;   // if it lived on: how many of the next step had been made, 0 also if that had not begun; LIVES if it
                  // outlived that, too
} lived;

typedef struct {
  lived *rows;  // of each allocation of the step, in order
  int64_t count, room;
} record;

typedef struct {
  const void *pointer;  // NULL: an empty slot
  int64_t allocation;
  int is_old;  // of the step before
} entry;

typedef struct {
  record now, before;  // of this step, and of the one before it if that was recorded, too
  entry *entries;      // allocations that live, of both: a hash table with open addressing
  int64_t count, room;
  int failed;  // whether they have holes, for want of memory
} recorder;

void recorder_begin(recorder *r);
void recorder_forget(recorder *r);
void recorder_note(recorder *r, const void *pointer, int64_t size);
void recorder_share(recorder *r, const void *pointer);
void recorder_leave(recorder *r, const void *pointer, int is_within_step);

// ---- log.c: everything that was asked, for a trace

enum { FREED = -1 };

typedef struct {
  uint64_t address;
  int64_t size;    // FREED, or what was asked for
  int64_t time;    // microseconds since the Unix epoch
  uint64_t lane;
} logged;

typedef struct {
  logged *entries;
  int64_t count, room, most;  // 0 at most: nothing is logged
} history;

void history_add(history *h, const void *pointer, int64_t size, uintptr_t lane);

// ---- arena.c

// Offsets for the allocations of a step, in their order; -1 for what is to be the ordinary allocator's.
typedef struct {
  int64_t count;
  int64_t *size, *offset;
} plan;

// What came of a step's allocations.
typedef struct {
  int64_t placed, placed_bytes;
  int64_t kept, kept_bytes;            // by plan not in the arena
  int64_t unplanned, unplanned_bytes;  // the three that follow
  int64_t differing;                   // the plan does not know them
  int64_t overlapping;                 // their place was taken
  int64_t elsewhere;                   // of other threads, or on other streams
  int64_t skipped;                     // in the plan, and not asked for
  int64_t first, first_bytes;          // the first that differs: its place in the plan, what was asked; -1 if none
} tally;

// An address range with a plan for it. All functions lock it, but those that answer what came of a step: ask them between steps.
typedef struct {
  pthread_mutex_t lock;
  char *base;       // is set once
  int64_t address_bytes;
  int64_t bytes;    // of them, those that there is memory for
  int mode;
  uintptr_t lane;   // whose step it is: a thread's, or a stream's; all of its memory is used in order
  const plan *plan;
  int64_t next;     // allocation of the plan
  tally tally;
  live live;        // placed and not freed
  recorder recorder;
  history history;
} arena;

#define ARENA_INITIALIZER {.lock = PTHREAD_MUTEX_INITIALIZER}

API void arena_begin(arena *a, int mode, uintptr_t lane, const plan *with);
API void arena_end(arena *a);
// Return the place of an allocation, or NULL: the ordinary allocator's.
void *arena_take(arena *a, int64_t size, uintptr_t lane);
// Note an allocation of the ordinary allocator.
void arena_note(arena *a, const void *pointer, int64_t size, uintptr_t lane);
// Note that other streams use one.
void arena_share(arena *a, const void *pointer);
// Take back a pointer; say whether it is of the arena. If not, the ordinary allocator frees it, after this.
int arena_leave(arena *a, const void *pointer, uintptr_t lane);

API void arena_tally(const arena *a, tally *out);
API int64_t arena_live(const arena *a);
// Return how much there is memory for.
API int64_t arena_bytes(const arena *a);
// How many allocations were recorded in this step, or in the one before it; -1 if there was no memory to record them.
API int64_t arena_recorded_count(const arena *a, int before);
API void arena_recorded(const arena *a, int before, lived *out);
// Begin a new log, of so many requests at most.
API void arena_log(arena *a, int64_t most);
API int64_t arena_logged_count(const arena *a);
// Copy the first of them, as many as there is room for; how many. What is being asked for meanwhile may be missing.
API int64_t arena_logged(arena *a, logged *out, int64_t room);

API plan *plan_new(int64_t count, const int64_t *size, const int64_t *offset);
API void plan_free(plan *p);

// ---- grow.c

// Make room for one more element; whether there is.
int grow(void **elements, int64_t count, int64_t *room, size_t element_size);
