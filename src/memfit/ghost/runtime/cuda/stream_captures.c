/* Stream captures: which streams are being captured, and into which graph.
 *
 * PyTorch asks three things of a capture that decide memory: whether a stream takes part in one, its id
 * (allocations with that id go to the graph's private pool), and whether the captured graph has nodes.
 */
#include "cuda/stream_captures.h"
#include "cuda/stream_marks.h"

#define MOST_CAPTURES 64

struct capture {
    uint64_t id;
    void *origin;
    struct graph *graph;
};

static struct capture captures[MOST_CAPTURES];
static size_t capture_count; /* written with the lock, read without it on every copy */
static uint64_t last_capture;

enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1 }; /* driver_types.h, cudaStreamCaptureStatus */

/* ---- Which streams take part ----------------------------------------------------------------- */

bool any_capture(void) { return __atomic_load_n(&capture_count, __ATOMIC_ACQUIRE) != 0; }

/* With the lock held. */
static struct capture *find_capture(uint64_t id)
{
    for (size_t i = 0; i < capture_count; i++)
        if (captures[i].id == id)
            return &captures[i];
    return NULL;
}

bool capture_is_active(uint64_t id)
{
    if (id == 0 || !any_capture())
        return false;
    HOLD_LOCK;
    return find_capture(id) != NULL;
}

uint64_t stream_capture(const void *handle)
{
    const struct stream *stream = created_stream(handle);
    return stream && capture_is_active(stream->capture) ? stream->capture : 0;
}

void stream_join_capture(void *handle, uint64_t capture)
{
    struct stream *stream = created_stream(handle);
    if (stream)
        stream->capture = capture;
}

void note_stream_work(const void *stream)
{
    mark_stream(stream);
    uint64_t id = any_capture() ? stream_capture(stream) : 0;
    if (id == 0)
        return;
    HOLD_LOCK;
    struct capture *capture = find_capture(id);
    if (capture)
        capture->graph->nodes++;
}

/* ---- Beginning and ending -------------------------------------------------------------------- */

/* Takes over one reference to the graph, even if it fails. */
static status begin_capture(void *stream, struct graph *graph)
{
    uint64_t id = 0;
    ghost_lock();
    if (capture_count < MOST_CAPTURES) {
        id = ++last_capture;
        captures[capture_count] = (struct capture){id, stream, graph};
        __atomic_store_n(&capture_count, capture_count + 1, __ATOMIC_RELEASE);
    }
    ghost_unlock();
    if (id == 0) {
        graph_release(graph);
        return ghost_fail(NOT_SUPPORTED);
    }
    stream_join_capture(stream, id);
    return SUCCESS;
}

API status cudaStreamBeginCapture(void *stream, int mode)
{
    void *graph;
    if ((uint64_t)stream <= 1)
        return ghost_fail(NOT_SUPPORTED); /* the default stream cannot be captured */
    status result = ghost_new_handle(&graph, sizeof(struct graph));
    if (result != SUCCESS)
        return ghost_fail(result);
    ((struct graph *)graph)->references = 1;
    return begin_capture(stream, graph);
}

API status cudaStreamBeginCaptureToGraph(void *stream, struct graph *graph, const void *dependencies,
                                         const void *dependency_data, size_t count, int mode)
{
    ghost_lock();
    graph->references++;
    ghost_unlock();
    return begin_capture(stream, graph);
}

API status cudaStreamEndCapture(void *stream, struct graph **graph)
{
    uint64_t id = stream_capture(stream);
    HOLD_LOCK;
    struct capture *ended = find_capture(id);
    if (!ended || ended->origin != stream)
        return ghost_fail(CAPTURE_UNMATCHED);
    *graph = ended->graph;
    *ended = captures[capture_count - 1];
    __atomic_store_n(&capture_count, capture_count - 1, __ATOMIC_RELEASE);
    return SUCCESS;
}

ENTRY(cudaStreamIsCapturing(void *stream, int *capturing),
      *capturing = stream_capture(stream) ? CAPTURE_ACTIVE : CAPTURE_NONE)
ALSO(cuStreamIsCapturing, cudaStreamIsCapturing)

static status capture_info(void *stream, int *capturing, unsigned long long *id, struct graph **graph,
                           const void **dependencies, size_t *count)
{
    uint64_t active = stream_capture(stream);
    *capturing = active ? CAPTURE_ACTIVE : CAPTURE_NONE;
    if (!active)
        return SUCCESS;
    HOLD_LOCK;
    const struct capture *capture = find_capture(active);
    if (id)
        *id = active;
    if (graph)
        *graph = capture ? capture->graph : NULL;
    if (dependencies)
        *dependencies = NULL;
    if (count)
        *count = 0;
    return SUCCESS;
}

/* Edge data came between the dependencies and their number with CUDA 12.3 as _v3, and took over
 * the plain name with CUDA 13. */
API status cudaStreamGetCaptureInfo_v3(void *stream, int *capturing, unsigned long long *id,
                                       struct graph **graph, const void **dependencies, const void **edges,
                                       size_t *count)
{
    if (edges)
        *edges = NULL;
    return capture_info(stream, capturing, id, graph, dependencies, count);
}

CALL(cudaStreamGetCaptureInfo_v2(void *stream, int *capturing, unsigned long long *id, struct graph **graph,
                                 const void **dependencies, size_t *count),
     capture_info(stream, capturing, id, graph, dependencies, count))

#if CUDA_VERSION >= 13000
ALSO(cudaStreamGetCaptureInfo, cudaStreamGetCaptureInfo_v3)
#else
CALL(cudaStreamGetCaptureInfo(void *stream, int *capturing, unsigned long long *id),
     capture_info(stream, capturing, id, NULL, NULL, NULL))
#endif

API status cudaThreadExchangeStreamCaptureMode(int *mode)
{
    static _Thread_local int current;
    int previous = current;
    current = *mode;
    *mode = previous;
    return SUCCESS;
}
