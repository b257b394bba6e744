/* CUDA graphs: handles that count their nodes. Launching one does what a kernel does: nothing, but it may
 * have written anywhere. */
#include "cuda/stream_captures.h"

/* An object whose destructor runs when the last graph that holds it is released. */
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

/* ---- Releasing graphs ------------------------------------------------------------------------ */

static void object_release(struct user_object *object, unsigned count)
{
    ghost_lock();
    object->references -= count < object->references ? count : object->references;
    bool gone = object->references == 0;
    ghost_unlock();
    if (gone) {
        object->destroy(object->data); /* may call back: not with the lock held */
        free(object);
    }
}

status graph_release(struct graph *graph)
{
    ghost_lock();
    bool last = --graph->references == 0;
    ghost_unlock();
    if (!last)
        return SUCCESS;
    for (struct held_object *held = graph->held; held;) {
        struct held_object *next = held->next;
        object_release(held->object, held->count);
        free(held);
        held = next;
    }
    free(graph);
    return SUCCESS;
}

/* ---- Graphs ---------------------------------------------------------------------------------- */

API status cudaGraphInstantiateWithFlags(struct graph **executable, struct graph *graph,
                                         unsigned long long flags)
{
    HOLD_LOCK;
    graph->references++;
    *executable = graph;
    return SUCCESS;
}

ALSO(cudaGraphInstantiate, cudaGraphInstantiateWithFlags)

API status cudaGraphDestroy(struct graph *graph) { return graph_release(graph); }
ALSO(cudaGraphExecDestroy, cudaGraphDestroy)

API status cudaGraphLaunch(struct graph *executable, void *stream)
{
    COUNT(launches);
    COUNT(replays);
    forget_everything();
    return SUCCESS;
}

/* Nodes have no handles of their own: each is reported as the graph's. */
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

ENTRY(cudaUserObjectRelease(struct user_object *object, unsigned count), object_release(object, count))

#define OBJECT_MOVE 1 /* driver_types.h, cudaGraphUserObjectMove: the caller's references pass over */

API status cudaGraphRetainUserObject(struct graph *graph, struct user_object *object, unsigned count,
                                     unsigned flags)
{
    struct held_object *held = malloc(sizeof *held);
    if (!held)
        return ghost_fail(OUT_OF_MEMORY);
    HOLD_LOCK;
    if (!(flags & OBJECT_MOVE))
        object->references += count;
    *held = (struct held_object){object, count, graph->held};
    graph->held = held;
    return SUCCESS;
}
