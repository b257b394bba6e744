/* CUDA tensors: the functions that CUDAPluggableAllocator calls, over one arena and the heaps.
 *
 * The arena belongs to one GPU, and is used in the order of one stream, the step's. The heaps serve other
 * streams, and allocations made while a graph is captured: the graph's kernels will write there whenever
 * it is replayed. */

#include <sys/types.h>

#include "cuda_heaps.h"

enum { LOOK_AMONG = 4 }; /* deferred frees that an allocation checks */
enum { PART = 128 };     /* free pages below this part of the memory in use are not searched for */

static arena placed = ARENA_INITIALIZER;
static range place; /* of the arena */
static int arena_device = -1;
static uintptr_t last_lane; /* whose order the arena's memory is used in */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* held before the arena's */
static int is_forked;
static int64_t live_bytes, most_live_bytes;

/* ---- freeing -------------------------------------------------------------------------------- */

static void release(const void *pointer, int64_t size)
{
    live_bytes -= size;
    if (arena_free(&placed, pointer))
        return;
    heap *h = heap_of(pointer);
    if (h)
        heap_free(h, pointer);
}

static void release_done(int64_t among)
{
    int64_t size;
    const void *pointer;
    while (free_deferred_count() && (pointer = free_finished(among, &size)))
        release(pointer, size);
}

/* Count the bytes that are mapped for heaps, and free. */
static int64_t idle_bytes(const gpu *g)
{
    int64_t idle = 0;
    const heap *h;
    for (int64_t i = 0; (h = heap_at(i)); i++)
        if (h->range.gpu == g)
            idle += h->range.mapped * g->page_bytes - h->live;
    return idle;
}

/* Wait for the GPUs, and unmap all pages of one that hold no live block. */
static void trim(gpu *g)
{
    gpus_synchronize();
    release_done(INT64_MAX);
    heap *h;
    for (int64_t i = 0; (h = heap_at(i));) {
        int is_idle = h->range.gpu == g && !capture_uses(g->device, h->pool);
        if (is_idle)
            heap_trim(h);
        if (is_idle && !h->live && is_pool(h->pool))
            heap_end(h); /* another heap takes its index */
        else
            i++;
    }
    g->idle = idle_bytes(g);
}

static void set_bytes(int64_t bytes)
{
    pthread_mutex_lock(&placed.lock);
    placed.bytes = bytes;
    pthread_mutex_unlock(&placed.lock);
}

/* Unmap the arena's pages that hold no live block; the GPUs must be idle. Nothing is placed until the
 * arena is reserved again. */
static void lend(const gpu *g)
{
    if (place.gpu != g)
        return;
    set_bytes(0);
    int64_t from = 0;
    for (size_t i = 0; i < placed.live.count; i++) {
        range_unmap(&place, from, placed.live.items[i].first);
        from = placed.live.items[i].second;
    }
    range_unmap(&place, from, place.bytes);
}

/* ---- allocating ----------------------------------------------------------------------------- */

/* Recorded steps are few, so they get no new page before the free ones are used, except for a part that
 * would take too long to search for again and again. */
static void *without_new_pages(gpu *g, heap *h, int64_t size)
{
    int64_t allowed = g->allowed_pages;
    g->allowed_pages = g->pages;
    void *found = heap_take(h, size);
    if (!found && idle_bytes(g) - g->idle > g->pages * g->page_bytes / PART) {
        trim(g);
        found = heap_take(h, size);
    }
    if (!found && place.gpu == g && placed.bytes) {
        gpus_synchronize();
        lend(g);
        found = heap_take(h, size);
    }
    g->allowed_pages = allowed;
    return found;
}

static void *ordinary(gpu *g, int64_t size, void *stream, pool_id pool)
{
    heap *h = heap_for(g, stream, pool);
    void *thrifty = h && placed.mode == RECORDING && !captures_open() ? without_new_pages(g, h, size) : NULL;
    if (thrifty)
        return thrifty;
    int mode = capture_relax(RELAXED); /* mapping pages does not disturb a capture */
    void *found = h ? heap_take(h, size) : NULL;
    capture_relax(mode);
    if (found || !h || captures_open())
        return found; /* a capture cannot be waited for */
    trim(g);
    if (!(found = heap_take(h, size))) {
        lend(g);
        found = heap_take(h, size);
    }
    if (!found) {
        heap_trim(h); /* of pages that were mapped in vain */
        gpu_release(g);
    }
    return found;
}

/* Return whether a stream may use the arena's memory. If another stream used it before, that work must
 * have ended. */
static int may_follow(uintptr_t lane)
{
    if (placed.mode != PLACING || lane != placed.lane || lane == last_lane)
        return 1;
    if (captures_open())
        return 0;
    gpus_synchronize();
    last_lane = lane;
    return 1;
}

static void *take(int64_t size, int device, void *stream)
{
    gpu *g = gpu_of(device);
    if (!g || size < 0)
        return NULL;
    if (!captures_open())
        release_done(LOOK_AMONG);
    pool_id pool = capture_pool(device, stream);
    int is_captured = is_pool(pool);
    uintptr_t lane = (uintptr_t)stream;
    int may_place = device == arena_device && !is_captured && may_follow(lane);
    void *found = may_place ? arena_allocate(&placed, size, lane) : NULL;
    if (!found && (found = ordinary(g, size, stream, pool)) && device == arena_device)
        arena_record(&placed, found, size, is_captured ? (uintptr_t)heap_of(found) : lane);
    if (found && (live_bytes += size) > most_live_bytes)
        most_live_bytes = live_bytes;
    return found;
}

API void *placing_malloc(ssize_t size, int device, void *stream)
{
    char message[512];
    if (size == 0)
        return NULL;
    if (is_forked)
        throw_error("Cannot allocate on the GPU in a forked process: CUDA does not survive a fork.");
    pthread_mutex_lock(&lock);
    void *found = take(size, device, stream);
    if (!found)
        describe_out_of_memory(message, sizeof message, size, device, &place);
    pthread_mutex_unlock(&lock);
    if (!found)
        throw_out_of_memory(message);
    return found;
}

API void placing_free(void *pointer, size_t size, int device, void *stream)
{
    if (!pointer || is_forked)
        return;
    pthread_mutex_lock(&lock);
    /* Memory of the arena may be used next in the order of another stream. */
    int is_next = !range_holds(&place, pointer) || (uintptr_t)stream == last_lane;
    int is_deferred = free_defer(pointer, (int64_t)size, device, stream, is_next);
    if (!is_deferred)
        release(pointer, (int64_t)size);
    else if (!captures_open())
        free_record_events();
    pthread_mutex_unlock(&lock);
}

API void placing_record_stream(void *pointer, void *stream)
{
    if (!pointer || is_forked)
        return;
    pthread_mutex_lock(&lock);
    const heap *h = heap_of(pointer);
    int is_own = h && h->stream == stream; /* memory of the arena may be used next by any stream */
    int is_recorded = is_own || stream_use_add(pointer, stream);
    if (!is_own)
        arena_share(&placed, pointer);
    pthread_mutex_unlock(&lock);
    if (!is_recorded)
        throw_error("Cannot record that a stream uses memory: the host is out of memory.");
}

API void cuda_trim(void)
{
    if (is_forked)
        return;
    pthread_mutex_lock(&lock);
    for (int device = 0; device < GPUS && !captures_open(); device++) {
        gpu *g = gpu_known(device);
        if (g)
            trim(g);
        if (g)
            gpu_release(g);
    }
    pthread_mutex_unlock(&lock);
}

/* torch.cuda.set_per_process_memory_fraction */
API void placing_set_fraction(double fraction, int device)
{
    const cuda_functions *cuda = cuda_driver();
    int before = device;
    if (is_forked)
        return;
    pthread_mutex_lock(&lock);
    cuda->GetDevice(&before);
    cuda->SetDevice(device);
    gpu *g = gpu_of(device);
    if (g)
        g->allowed_pages = (int64_t)(fraction * (double)g->total_bytes) / g->page_bytes;
    cuda->SetDevice(before);
    pthread_mutex_unlock(&lock);
}

/* ---- captured graphs: CUDAPluggableAllocator's begin, end and release of pools -------------- */

API void placing_begin_pool(int device, pool_id id, void *filter)
{
    pthread_mutex_lock(&lock);
    const char *error = capture_begin(device, id);
    pthread_mutex_unlock(&lock);
    if (error)
        throw_error(error);
}

API void placing_end_pool(int device, pool_id id)
{
    pthread_mutex_lock(&lock);
    capture_end(device, id);
    pthread_mutex_unlock(&lock);
}

/* Its live blocks stay; no graph will write to the rest any more. */
API void placing_release_pool(int device, pool_id id)
{
    pthread_mutex_lock(&lock);
    capture_release(device, id);
    pthread_mutex_unlock(&lock);
}

/* ---- for Python ----------------------------------------------------------------------------- */

/* A child has no GPU: CUDA does not survive a fork. */
static void in_child(void)
{
    pthread_mutex_init(&lock, NULL);
    pthread_mutex_init(&placed.lock, NULL);
    placed.mode = IDLE;
    is_forked = 1;
}

/* Assign the arena to a device and return it; NULL without CUDA, or if it has memory of another device. */
API arena *cuda_attach(int device)
{
    if (!cuda_driver() || is_forked || (place.base && arena_device != device))
        return NULL;
    if (arena_device < 0 && pthread_atfork(NULL, NULL, in_child))
        return NULL;
    pthread_mutex_lock(&lock);
    arena_device = device;
    pthread_mutex_unlock(&lock);
    return &placed;
}

static int64_t end_of_live(void)
{
    return placed.live.count ? placed.live.items[placed.live.count - 1].second : 0;
}

static int reserve(int64_t bytes)
{
    gpu *g = gpu_of(arena_device);
    if (!g || captures_open() || (!place.base && !range_open(&place, g)))
        return 0;
    placed.base = (char *)place.base;
    placed.address_bytes = place.bytes;
    if (bytes < 0 || bytes > place.bytes)
        return 0;
    int64_t whole = (bytes + g->page_bytes - 1) / g->page_bytes * g->page_bytes, before = placed.bytes;
    trim(g);
    if (whole < before && whole < end_of_live())
        return 0;
    if (whole < before)
        set_bytes(whole);
    int is_there = range_map(&place, 0, whole);
    int64_t kept = is_there ? whole : before,
            used = end_of_live(); /* there may be live blocks beyond, since the arena was lent */
    range_unmap(&place, kept > used ? kept : used, place.bytes);
    if (is_there)
        set_bytes(whole);
    return is_there;
}

/* Resize the arena; return whether it succeeded. Not between the begin and the end of a step, nor in a
 * capture. */
API int cuda_reserve(int64_t bytes)
{
    const cuda_functions *cuda = cuda_driver();
    int before = arena_device;
    if (is_forked || arena_device < 0)
        return 0;
    pthread_mutex_lock(&lock);
    cuda->GetDevice(&before);
    int is_there = !cuda->SetDevice(arena_device) && reserve(bytes);
    cuda->SetDevice(before);
    pthread_mutex_unlock(&lock);
    return is_there;
}

/* Release the arena's memory without live blocks; nothing is placed until the arena is reserved again. */
API void cuda_lend(void)
{
    if (is_forked)
        return;
    pthread_mutex_lock(&lock);
    gpu *g = place.gpu;
    if (g && !captures_open()) {
        trim(g);
        lend(g);
        gpu_release(g);
    }
    pthread_mutex_unlock(&lock);
}

API void cuda_count(int device, gpu_usage *out)
{
    pthread_mutex_lock(&lock);
    *out = (gpu_usage){.live = live_bytes, .most_live = most_live_bytes};
    gpu_usage_count(device, &place, out);
    pthread_mutex_unlock(&lock);
}
