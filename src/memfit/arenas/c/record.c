// What a step asks for, and how long it lives:
//
//   step n        0  1  2  3  4        step n + 1    0  1
//   a  until 3    ├────────┤           a' until ...
//   b  LIVES            ├──────────────────────────────┤    next 1
//   c  LIVES               ├─────────────────────────────   next LIVES

#include <stdlib.h>
#include <string.h>

#include "placing.h"

static size_t slot_of(const recorder *r, const void *pointer) {
  uint64_t mixed = (uint64_t)(uintptr_t)pointer * 0x9E3779B97F4A7C15u;
  size_t mask = (size_t)r->room - 1, slot = (size_t)(mixed >> 32) & mask;
  while (r->entries[slot].pointer && r->entries[slot].pointer != pointer) slot = (slot + 1) & mask;
  return slot;
}

static entry *find(const recorder *r, const void *pointer) {
  if (!r->count) return NULL;
  entry *found = r->entries + slot_of(r, pointer);
  return found->pointer ? found : NULL;
}

// Put the entries into a table of another size, those of the step before as told; whether there was memory for it.
static int rehash(recorder *r, int64_t room, int keep_old) {
  entry *before = r->entries, *after = calloc((size_t)room, sizeof *after);
  int64_t before_room = r->room;
  if (!after) return 0;
  r->entries = after;
  r->room = room;
  r->count = 0;
  for (int64_t i = 0; i < before_room; i++) {
    if (!before[i].pointer || (before[i].is_old && !keep_old)) continue;
    r->entries[slot_of(r, before[i].pointer)] = before[i];
    r->count++;
  }
  free(before);
  return 1;
}

static void drop(recorder *r, entry *gone) {
  size_t mask = (size_t)r->room - 1, slot = (size_t)(gone - r->entries);
  gone->pointer = NULL;
  r->count--;
  for (size_t next = (slot + 1) & mask; r->entries[next].pointer; next = (next + 1) & mask) {
    entry moved = r->entries[next];  // what stood behind it may have been pushed on by it
    r->entries[next].pointer = NULL;
    r->entries[slot_of(r, moved.pointer)] = moved;
  }
}

static int add(record *to, int64_t size) {
  if (!grow((void **)&to->rows, to->count, &to->room, sizeof *to->rows)) return 0;
  to->rows[to->count++] = (lived){size, LIVES, LIVES};
  return 1;
}

// Begin a step; the one before it becomes the old one.
void recorder_begin(recorder *r) {
  record emptied = r->before;
  emptied.count = 0;
  r->before = r->now;
  r->now = emptied;
  r->failed = r->room && !rehash(r, r->room, 0);
  if (r->failed) recorder_forget(r);
  for (int64_t i = 0; i < r->room; i++) r->entries[i].is_old = 1;
}

void recorder_forget(recorder *r) {
  r->now.count = r->before.count = r->count = 0;
  if (r->room) memset(r->entries, 0, (size_t)r->room * sizeof *r->entries);
}

void recorder_note(recorder *r, const void *pointer, int64_t size) {
  if (2 * r->count >= r->room && !rehash(r, r->room ? 2 * r->room : 1024, 1)) r->failed = 1;
  else if (!add(&r->now, size)) r->failed = 1;
  if (r->failed) return;
  r->entries[slot_of(r, pointer)] = (entry){pointer, r->now.count - 1, 0};
  r->count++;
}

void recorder_share(recorder *r, const void *pointer) {
  entry *found = find(r, pointer);
  if (!found) return;
  (found->is_old ? &r->before : &r->now)->rows[found->allocation].until = SHARED;
  drop(r, found);
}

void recorder_leave(recorder *r, const void *pointer, int is_within_step) {
  entry *found = find(r, pointer);
  if (!found) return;
  if (found->is_old) r->before.rows[found->allocation].next = r->now.count;
  else if (is_within_step) r->now.rows[found->allocation].until = r->now.count;
  else r->now.rows[found->allocation].next = 0;
  drop(r, found);
}
