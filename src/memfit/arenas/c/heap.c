// Heaps: one for each stream of a GPU, and one for each graph that is captured on it.

#include <stdlib.h>
#include <string.h>

#include "heap.h"

static const int64_t ALIGNMENT = 512; // as PyTorch's own allocator: kMinBlockSize, CUDACachingAllocator.cpp, 2.14.1

static heap **heaps;
static int64_t heap_count, heap_room;

heap *heap_at(int64_t i) { return i < heap_count ? heaps[i] : NULL; }

static heap *make(gpu *g, const void *stream, pool_id pool) {
  heap *made = calloc(1, sizeof *made);
  if (!made || !grow((void **)&heaps, heap_count, &heap_room, sizeof *heaps) || !range_open(&made->range, g)) {
    free(made);
    return NULL;
  }
  if (!blocks_begin(&made->blocks, made->range.bytes)) {
    range_close(&made->range);
    free(made);
    return NULL;
  }
  made->stream = stream;
  made->pool = pool;
  return heaps[heap_count++] = made;
}

heap *heap_for(gpu *g, const void *stream, pool_id pool) {
  for (int64_t i = 0; i < heap_count; i++) {
    heap *h = heaps[i];
    if (h->stream == stream && h->range.gpu == g && h->pool.high == pool.high && h->pool.low == pool.low)
      return h;
  }
  return make(g, stream, pool);
}

heap *heap_of(const void *pointer) {
  for (int64_t i = 0; i < heap_count; i++)
    if (range_holds(&heaps[i]->range, pointer)) return heaps[i];
  return NULL;
}

void *heap_take(heap *h, int64_t size) {
  if (size <= 0 || size > h->range.bytes) return NULL;
  int64_t whole = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, offset = blocks_take(&h->blocks, whole);
  if (offset < 0) return NULL;
  if (!range_map(&h->range, offset, offset + whole)) {
    blocks_give(&h->blocks, offset);
    return NULL;
  }
  h->live += whole;
  return (void *)(h->range.base + (uint64_t)offset);
}

int heap_give(heap *h, const void *pointer) {
  int64_t given = blocks_give(&h->blocks, (int64_t)((uint64_t)pointer - h->range.base));
  h->live -= given;
  return given > 0;
}

void heap_trim(heap *h) {
  int64_t size, offset = 0;
  while ((offset = blocks_next_free(&h->blocks, offset, &size)) >= 0) {
    range_unmap(&h->range, offset, offset + size);
    offset += size;
  }
}

void heap_end(heap *h) {
  int64_t i = 0;
  while (heaps[i] != h) i++;
  heaps[i] = heaps[--heap_count];
  range_close(&h->range);
  blocks_end(&h->blocks);
  free(h);
}
