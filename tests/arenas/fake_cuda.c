/* A fake CUDA for check_cuda.c that ends the program when its rules are broken. Pages are small, so that page
 * boundaries matter.
 *
 * Work takes time: a stream has `issued` pieces of work and has completed `done` of them.
 */
#include "fake_cuda.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { PAGES = TOTAL / PAGE, SLOTS = RANGES * RANGE / PAGE, NOT_READY = 600, OUT_OF_MEMORY = 2 };

typedef struct {
    int stream;
    long at;
} event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int created[PAGES + 1], mapped[PAGES + 1]; /* by handle */
static int page_at[SLOTS], reachable[SLOTS];      /* handle and access, by page of all addresses */
static int pages_in_use, ranges_made, last_error;
static long issued[STREAMS], done[STREAMS];
static int capturing = -1;
static _Thread_local int is_relaxed;
int is_alone;

void must(int holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "%s\n", what);
    abort();
}

static int slot(uint64_t address)
{
    must(address >= BASE && address < BASE + (uint64_t)RANGES * RANGE && address % PAGE == 0,
         "not the address of a page");
    return (int)((address - BASE) / PAGE);
}

/* ---- for the check */

long work(int stream)
{
    pthread_mutex_lock(&lock);
    long number = ++issued[stream];
    pthread_mutex_unlock(&lock);
    return number;
}

void advance(int stream)
{
    pthread_mutex_lock(&lock);
    done[stream] += done[stream] < issued[stream];
    pthread_mutex_unlock(&lock);
}

int is_done(int stream, long number)
{
    pthread_mutex_lock(&lock);
    int is = done[stream] >= number;
    pthread_mutex_unlock(&lock);
    return is;
}

int is_usable(const void *pointer, int64_t size)
{
    int is = 1;
    uint64_t from = (uint64_t)pointer / PAGE * PAGE;
    pthread_mutex_lock(&lock);
    for (uint64_t at = from; at < (uint64_t)pointer + (uint64_t)size; at += PAGE)
        is &= page_at[slot(at)] && reachable[slot(at)];
    pthread_mutex_unlock(&lock);
    return is;
}

int device_pages(void) { return pages_in_use; }

void capture(int stream) { capturing = stream; }

/* ---- the runtime */

API int cudaGetDevice(int *device) { return *device = 0; }
API int cudaSetDevice(int device) { return device != 0; }

API int cudaGetLastError(void)
{
    pthread_mutex_lock(&lock);
    int error = last_error;
    last_error = 0;
    pthread_mutex_unlock(&lock);
    return error;
}

API int cudaDeviceSynchronize(void)
{
    pthread_mutex_lock(&lock);
    must(capturing < 0, "waited for the device during a capture");
    for (int i = 0; i < STREAMS; i++)
        done[i] = issued[i];
    pthread_mutex_unlock(&lock);
    return 0;
}

API int cudaMemGetInfo(size_t *left, size_t *total)
{
    *total = TOTAL;
    *left = (size_t)(PAGES - pages_in_use) * PAGE;
    return 0;
}

API int cudaStreamIsCapturing(void *stream, int *is)
{
    *is = capturing >= 0 && (int)(uintptr_t)stream == capturing;
    return 0;
}

API int cudaThreadExchangeStreamCaptureMode(int *mode)
{
    static _Thread_local int now;
    int before = now;
    now = *mode;
    *mode = before;
    is_relaxed = now == 2;
    return 0;
}

API int cudaEventCreateWithFlags(void **made, unsigned flags)
{
    *made = calloc(1, sizeof(event));
    return !*made;
}

API int cudaEventRecord(event *e, void *stream)
{
    pthread_mutex_lock(&lock);
    must(capturing < 0, "recorded an event during a capture");
    *e = (event){(int)(uintptr_t)stream, issued[(uintptr_t)stream]};
    pthread_mutex_unlock(&lock);
    return 0;
}

API int cudaEventQuery(event *e)
{
    pthread_mutex_lock(&lock);
    must(capturing < 0, "queried an event during a capture");
    int is_ready = done[e->stream] >= e->at;
    if (!is_ready)
        last_error = NOT_READY;
    pthread_mutex_unlock(&lock);
    return is_ready ? 0 : NOT_READY;
}

/* ---- the driver */

static int granularity(size_t *out, const void *properties, int option)
{
    *out = PAGE;
    return 0;
}

static int reserve(uint64_t *address, size_t size, size_t alignment, uint64_t wanted,
                   unsigned long long flags)
{
    must(size <= RANGE && ranges_made < RANGES, "more addresses than the check has");
    *address = BASE + (uint64_t)ranges_made++ * RANGE;
    return 0;
}

static int address_free(uint64_t address, size_t size)
{
    for (uint64_t at = address; at < address + size; at += PAGE)
        must(!page_at[slot(at)], "released addresses that are mapped");
    return 0;
}

static int create(uint64_t *handle, size_t size, const void *properties, unsigned long long flags)
{
    int made = 1;
    pthread_mutex_lock(&lock);
    must(capturing < 0 || is_relaxed, "created a page during a capture that forbids it");
    while (made <= PAGES && created[made])
        made++;
    if (made <= PAGES) {
        created[made] = 1;
        pages_in_use++;
        *handle = (uint64_t)made;
    }
    pthread_mutex_unlock(&lock);
    return made <= PAGES ? 0 : OUT_OF_MEMORY;
}

static int release(uint64_t handle)
{
    pthread_mutex_lock(&lock);
    must(handle && handle <= PAGES && created[handle] && !mapped[handle],
         "released an invalid or mapped page");
    created[handle] = 0;
    pages_in_use--;
    pthread_mutex_unlock(&lock);
    return 0;
}

static int map(uint64_t address, size_t size, size_t offset, uint64_t handle, unsigned long long flags)
{
    pthread_mutex_lock(&lock);
    must(size == PAGE && handle && handle <= PAGES && created[handle], "mapped an invalid page");
    must(!mapped[handle] && !page_at[slot(address)], "mapped a page twice, or over another");
    mapped[handle] = 1;
    page_at[slot(address)] = (int)handle;
    pthread_mutex_unlock(&lock);
    return 0;
}

static int set_access(uint64_t address, size_t size, const void *descriptions, size_t count)
{
    pthread_mutex_lock(&lock);
    for (uint64_t at = address; at < address + size; at += PAGE) {
        must(page_at[slot(at)], "gave access to an unmapped page");
        reachable[slot(at)] = 1;
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

static int unmap(uint64_t address, size_t size)
{
    pthread_mutex_lock(&lock);
    must(capturing < 0, "unmapped during a capture");
    must(size == PAGE && page_at[slot(address)], "unmapped an unmapped page");
    for (int i = 0; is_alone && i < STREAMS; i++)
        must(done[i] == issued[i], "unmapped while work is running");
    mapped[page_at[slot(address)]] = 0;
    page_at[slot(address)] = reachable[slot(address)] = 0;
    pthread_mutex_unlock(&lock);
    return 0;
}

API int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                         unsigned long long flags, int *found)
{
    static const struct {
        const char *name;
        void *function;
    } all[] = {
        {"cuMemGetAllocationGranularity", (void *)granularity},
        {"cuMemAddressReserve", (void *)reserve},
        {"cuMemAddressFree", (void *)address_free},
        {"cuMemCreate", (void *)create},
        {"cuMemRelease", (void *)release},
        {"cuMemMap", (void *)map},
        {"cuMemSetAccess", (void *)set_access},
        {"cuMemUnmap", (void *)unmap},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!strcmp(all[i].name, name))
            *function = all[i].function;
    return !*function;
}
