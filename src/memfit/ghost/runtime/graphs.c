/* CUDA graphs: which streams are being captured, and handles for what comes of it.
 *
 * PyTorch asks three things of a capture that decide memory: whether a stream takes part in one,
 * its id (allocations with that id go to the graph's private pool), and whether the graph that
 * came of it has nodes. Nodes are counted; launching a graph does what a kernel does: nothing, but
 * it may have written anywhere.
 */
#include "ghost.h"
#include "streams.h"

#include <stdlib.h>

#define MOST_CAPTURES 64

/* An object whose destructor runs when the last graph that holds it is gone. */
struct user_object {
    void *data;
    void (*destroy)(void *);
    unsigned references;
};

struct held_object {
    struct user_object *object;
    unsigned count;
    struct held_object *next;
};

/* A graph and the executables made from it share what they hold. */
struct graph {
    int references;
    size_t nodes;
    struct held_object *held;
};

struct capture {
    uint64_t id;
    void *origin;
    struct graph *graph;
};

static struct capture captures[MOST_CAPTURES];
static size_t capture_count; /* written with the lock, read without on every copy */
static uint64_t last_capture;

enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1 }; /* driver_types.h, cudaStreamCaptureStatus */

/* ---- Letting graphs go ----------------------------------------------------------------------- */

/* With the lock held. Whether those were the last references. */
static bool object_release(struct user_object *object, unsigned count)
{
    object->references -= count < object->references ? count : object->references;
    return object->references == 0;
}

static status graph_release(struct graph *graph)
{
    ghost_lock();
    bool last = --graph->references == 0;
    ghost_unlock();
    if (!last)
        return SUCCESS;
    for (struct held_object *held = graph->held; held;) {
        struct held_object *next = held->next;
        ghost_lock();
        bool gone = object_release(held->object, held->count);
        ghost_unlock();
        if (gone) {
            held->object->destroy(held->object->data); /* may call back: not with the lock held */
            free(held->object);
        }
        free(held);
        held = next;
    }
    free(graph);
    return SUCCESS;
}

/* ---- Captures -------------------------------------------------------------------------------- */

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
    ghost_lock();
    bool active = find_capture(id) != NULL;
    ghost_unlock();
    return active;
}

void note_captured_node(const void *stream)
{
    uint64_t id = any_capture() ? stream_capture(stream) : 0;
    if (id == 0)
        return;
    ghost_lock();
    struct capture *capture = find_capture(id);
    if (capture)
        capture->graph->nodes++;
    ghost_unlock();
}

/* Takes over one reference to the graph, also when it fails. */
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
    status result = CAPTURE_UNMATCHED;
    ghost_lock();
    struct capture *ended = find_capture(id);
    if (ended && ended->origin == stream) {
        *graph = ended->graph;
        *ended = captures[capture_count - 1];
        __atomic_store_n(&capture_count, capture_count - 1, __ATOMIC_RELEASE);
        result = SUCCESS;
    }
    ghost_unlock();
    return result ? ghost_fail(result) : SUCCESS;
}

API status cudaStreamIsCapturing(void *stream, int *capturing)
{
    *capturing = stream_capture(stream) ? CAPTURE_ACTIVE : CAPTURE_NONE;
    return SUCCESS;
}

static status capture_info(void *stream, int *capturing, unsigned long long *id, struct graph **graph,
                           const void **dependencies, size_t *count)
{
    uint64_t active = stream_capture(stream);
    *capturing = active ? CAPTURE_ACTIVE : CAPTURE_NONE;
    if (!active)
        return SUCCESS;
    ghost_lock();
    const struct capture *capture = find_capture(active);
    if (id)
        *id = active;
    if (graph)
        *graph = capture ? capture->graph : NULL;
    if (dependencies)
        *dependencies = NULL;
    if (count)
        *count = 0;
    ghost_unlock();
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

API status cudaStreamGetCaptureInfo_v2(void *stream, int *capturing, unsigned long long *id,
                                       struct graph **graph, const void **dependencies, size_t *count)
{
    return capture_info(stream, capturing, id, graph, dependencies, count);
}

#if CUDA_VERSION >= 13000
API status cudaStreamGetCaptureInfo(void *stream, int *capturing, unsigned long long *id,
                                    struct graph **graph, const void **dependencies, const void **edges,
                                    size_t *count)
{
    return cudaStreamGetCaptureInfo_v3(stream, capturing, id, graph, dependencies, edges, count);
}
#else
API status cudaStreamGetCaptureInfo(void *stream, int *capturing, unsigned long long *id)
{
    return capture_info(stream, capturing, id, NULL, NULL, NULL);
}
#endif

API status cudaThreadExchangeStreamCaptureMode(int *mode)
{
    static _Thread_local int current;
    int previous = current;
    current = *mode;
    *mode = previous;
    return SUCCESS;
}

/* ---- Graphs ---------------------------------------------------------------------------------- */

API status cudaGraphInstantiateWithFlags(struct graph **executable, struct graph *graph,
                                         unsigned long long flags)
{
    ghost_lock();
    graph->references++;
    ghost_unlock();
    *executable = graph;
    return SUCCESS;
}

API status cudaGraphInstantiate(struct graph **executable, struct graph *graph, unsigned long long flags)
{
    return cudaGraphInstantiateWithFlags(executable, graph, flags);
}

API status cudaGraphDestroy(struct graph *graph) { return graph_release(graph); }
API status cudaGraphExecDestroy(struct graph *executable) { return graph_release(executable); }

API status cudaGraphLaunch(struct graph *executable, void *stream)
{
    COUNT(launches);
    forget_everything();
    return SUCCESS;
}

/* Nodes have no handles of their own: asked for them, the graph's serves. */
API status cudaGraphGetNodes(struct graph *graph, void **nodes, size_t *count)
{
    for (size_t i = 0; nodes && i < *count; i++)
        nodes[i] = i < graph->nodes ? graph : NULL;
    *count = graph->nodes;
    return SUCCESS;
}

#if CUDA_VERSION >= 13000
API status cudaGraphNodeGetDependencies(void *node, void **dependencies, void *edges, size_t *count)
#else
API status cudaGraphNodeGetDependencies(void *node, void **dependencies, size_t *count)
#endif
{
    *count = 0;
    return SUCCESS;
}

/* ---- Objects that graphs keep alive ---------------------------------------------------------- */

API status cudaUserObjectCreate(struct user_object **object, void *data, void (*destroy)(void *),
                                unsigned references, unsigned flags)
{
    void *made;
    status result = ghost_new_handle(&made, sizeof **object);
    if (result != SUCCESS)
        return ghost_fail(result);
    *object = made;
    **object = (struct user_object){data, destroy, references};
    return SUCCESS;
}

API status cudaUserObjectRelease(struct user_object *object, unsigned count)
{
    ghost_lock();
    bool gone = object_release(object, count);
    ghost_unlock();
    if (gone) {
        object->destroy(object->data);
        free(object);
    }
    return SUCCESS;
}

#define OBJECT_MOVE 1 /* driver_types.h, cudaGraphUserObjectMove: the caller's references pass over */

API status cudaGraphRetainUserObject(struct graph *graph, struct user_object *object, unsigned count,
                                     unsigned flags)
{
    struct held_object *held = malloc(sizeof *held);
    if (!held)
        return ghost_fail(OUT_OF_MEMORY);
    ghost_lock();
    if (!(flags & OBJECT_MOVE))
        object->references += count;
    *held = (struct held_object){object, count, graph->held};
    graph->held = held;
    ghost_unlock();
    return SUCCESS;
}
