// Everything that was asked for, in order: a trace is made of it.

#include <time.h>

#include "placing.h"

void history_add(history *h, const void *pointer, int64_t size, uintptr_t lane) {
  if (h->count >= h->most || !grow((void **)&h->entries, h->count, &h->room, sizeof *h->entries)) return;
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  int64_t time = (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
  h->entries[h->count++] = (logged){(uint64_t)(uintptr_t)pointer, size, time, lane};
}
