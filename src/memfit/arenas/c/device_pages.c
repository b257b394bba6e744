/* Pages of device memory: created, mapped into address ranges, spare, and released. */

#include <stdlib.h>

#include "cuda_heaps.h"

enum {
    PINNED = 1,
    ON_DEVICE = 1,
    READ_WRITE = 3,
    MINIMUM = 0
}; /* CU_MEM_...: of allocations, locations, access */

static gpu *gpus[GPUS];
static range *ranges; /* all that are open */

static void grant_access(const range *r, int64_t first, int64_t last, int device)
{
    access described = {ON_DEVICE, device, READ_WRITE};
    int64_t size = r->gpu->page_bytes;
    cuda_driver()->MemSetAccess(r->base + (uint64_t)(first * size), (size_t)((last - first) * size),
                                &described, 1);
}

/* PyTorch lets GPUs access each other's memory without informing the allocator, so each gets all the
 * access it can. */
static void grant_access_to_all(int device)
{
    for (const range *r = ranges; r; r = r->next)
        for (int64_t i = 0; i < r->bytes / r->gpu->page_bytes; i++)
            if (r->pages[i].is_mapped)
                grant_access(r, i, i + 1, device);
}

gpu *gpu_known(int device) { return device >= 0 && device < GPUS ? gpus[device] : NULL; }

gpu *gpu_of(int device)
{
    if (gpu_known(device) || device < 0 || device >= GPUS)
        return gpu_known(device);
    const cuda_functions *cuda = cuda_driver();
    allocation_properties described = {.type = PINNED, .location_type = ON_DEVICE, .location = device};
    size_t granularity, left, total;
    gpu *made = calloc(1, sizeof *made);
    if (!made || cuda->MemGetInfo(&left, &total) ||
        cuda->MemGetAllocationGranularity(&granularity, &described, MINIMUM)) {
        free(made);
        return NULL;
    }
    *made = (gpu){.device = device,
                  .page_bytes = (int64_t)granularity,
                  .total_bytes = (int64_t)total,
                  .allowed_pages = INT64_MAX};
    grant_access_to_all(device);
    return gpus[device] = made;
}

static int create(gpu *g, uint64_t *handle)
{
    if (g->spare.count) {
        *handle = g->spare.items[--g->spare.count];
        return 1;
    }
    if (g->pages >= g->allowed_pages)
        return 0;
    allocation_properties described = {.type = PINNED, .location_type = ON_DEVICE, .location = g->device};
    /* Reserve its place among the spare pages now, so that unmapping never fails. */
    if (!array_reserve(&g->spare, (size_t)g->pages + 1) ||
        cuda_driver()->MemCreate(handle, (size_t)g->page_bytes, &described, 0))
        return 0;
    if (++g->pages > g->most_pages)
        g->most_pages = g->pages;
    return 1;
}

static void make_spare(gpu *g, uint64_t handle) { g->spare.items[g->spare.count++] = handle; }

void gpu_release(gpu *g)
{
    while (g->spare.count) {
        cuda_driver()->MemRelease(g->spare.items[--g->spare.count]);
        g->pages--;
    }
}

void gpus_synchronize(void)
{
    const cuda_functions *cuda = cuda_driver();
    int before = 0;
    cuda->GetDevice(&before);
    for (int device = 0; device < GPUS; device++)
        if (gpus[device] && !cuda->SetDevice(device))
            cuda->DeviceSynchronize();
    cuda->SetDevice(before);
}

int range_open(range *r, gpu *g)
{
    int64_t bytes =
        (g->total_bytes / 8 * 9 / g->page_bytes + 1) * g->page_bytes; /* more than there can be memory for */
    *r = (range){.gpu = g, .bytes = bytes};
    r->pages = calloc((size_t)(bytes / g->page_bytes), sizeof *r->pages);
    if (!r->pages || cuda_driver()->MemAddressReserve(&r->base, (size_t)bytes, 0, 0, 0)) {
        free(r->pages);
        *r = (range){0};
        return 0;
    }
    r->next = ranges;
    ranges = r;
    return 1;
}

void range_close(range *r)
{
    range_unmap(r, 0, r->bytes);
    cuda_driver()->MemAddressFree(r->base, (size_t)r->bytes);
    free(r->pages);
    range **at = &ranges;
    while (*at != r)
        at = &(*at)->next;
    *at = r->next;
}

static void unmap(range *r, int64_t i)
{
    cuda_driver()->MemUnmap(r->base + (uint64_t)(i * r->gpu->page_bytes), (size_t)r->gpu->page_bytes);
    make_spare(r->gpu, r->pages[i].handle);
    r->pages[i].is_mapped = 0;
    r->mapped--;
}

/* Map a page, without access yet. */
static int map(range *r, int64_t i)
{
    int64_t size = r->gpu->page_bytes;
    uint64_t handle;
    if (!create(r->gpu, &handle))
        return 0;
    if (cuda_driver()->MemMap(r->base + (uint64_t)(i * size), (size_t)size, 0, handle, 0)) {
        make_spare(r->gpu, handle);
        return 0;
    }
    r->pages[i] = (page){handle, 1};
    r->mapped++;
    return 1;
}

static int grant_own_access(range *r, int64_t first, int64_t last)
{
    int64_t size = r->gpu->page_bytes;
    access described = {ON_DEVICE, r->gpu->device, READ_WRITE};
    uint64_t address = r->base + (uint64_t)(first * size);
    if (first == last)
        return 1;
    if (cuda_driver()->MemSetAccess(address, (size_t)((last - first) * size), &described, 1)) {
        for (int64_t i = first; i < last; i++)
            unmap(r, i);
        return 0;
    }
    for (int device = 0; device < GPUS; device++)
        if (gpus[device] && gpus[device] != r->gpu)
            grant_access(r, first, last, device);
    return 1;
}

int range_map(range *r, int64_t from, int64_t to)
{
    int64_t size = r->gpu->page_bytes, last = (to + size - 1) / size, i = from / size;
    if (from < 0 || to > r->bytes)
        return 0;
    while (i < last) {
        while (i < last && r->pages[i].is_mapped)
            i++;
        int64_t first = i;
        int is_made = 1;
        while (i < last && !r->pages[i].is_mapped && (is_made = map(r, i)))
            i++;
        if (!grant_own_access(r, first, i) || !is_made)
            return 0;
    }
    return 1;
}

void range_unmap(range *r, int64_t from, int64_t to)
{
    int64_t size = r->gpu->page_bytes;
    for (int64_t i = (from + size - 1) / size; i < to / size; i++)
        if (r->pages[i].is_mapped)
            unmap(r, i);
}

int range_holds(const range *r, const void *pointer)
{
    return (uint64_t)pointer >= r->base && (uint64_t)pointer - r->base < (uint64_t)r->bytes;
}
