/* Heaps: one for each stream of a GPU, and one for each graph that is captured on it. */

#include <stdlib.h>
#include <string.h>

#include "cuda_heaps.h"

static const int64_t ALIGNMENT =
    512; /* as PyTorch's own allocator: kMinBlockSize, CUDACachingAllocator.cpp, 2.14.1 */

static struct {
    ARRAY(heap *);
} heaps;

heap *heap_at(int64_t i) { return i < (int64_t)heaps.count ? heaps.items[i] : NULL; }

static heap *make(gpu *g, const void *stream, pool_id pool)
{
    heap *made = calloc(1, sizeof *made);
    if (!made || !array_reserve(&heaps, heaps.count + 1) || !range_open(&made->range, g)) {
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
    return *array_append(&heaps) = made;
}

heap *heap_for(gpu *g, const void *stream, pool_id pool)
{
    for (size_t i = 0; i < heaps.count; i++) {
        heap *h = heaps.items[i];
        if (h->stream == stream && h->range.gpu == g && h->pool.high == pool.high && h->pool.low == pool.low)
            return h;
    }
    return make(g, stream, pool);
}

heap *heap_of(const void *pointer)
{
    for (size_t i = 0; i < heaps.count; i++)
        if (range_holds(&heaps.items[i]->range, pointer))
            return heaps.items[i];
    return NULL;
}

void *heap_take(heap *h, int64_t size)
{
    if (size <= 0 || size > h->range.bytes)
        return NULL;
    int64_t whole = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, offset = blocks_take(&h->blocks, whole);
    if (offset < 0)
        return NULL;
    if (!range_map(&h->range, offset, offset + whole)) {
        blocks_free(&h->blocks, offset);
        return NULL;
    }
    h->live += whole;
    return (void *)(h->range.base + (uint64_t)offset);
}

int heap_free(heap *h, const void *pointer)
{
    int64_t given = blocks_free(&h->blocks, (int64_t)((uint64_t)pointer - h->range.base));
    h->live -= given;
    return given > 0;
}

void heap_trim(heap *h)
{
    int64_t size, offset = 0;
    while ((offset = blocks_next_free(&h->blocks, offset, &size)) >= 0) {
        range_unmap(&h->range, offset, offset + size);
        offset += size;
    }
}

void heap_end(heap *h)
{
    size_t i = 0;
    while (heaps.items[i] != h)
        i++;
    heaps.items[i] = heaps.items[--heaps.count];
    range_close(&h->range);
    blocks_end(&h->blocks);
    free(h);
}
