/* What captures.c needs of graphs.c. */
#ifndef MEMFIT_GHOST_GRAPHS_H
#define MEMFIT_GHOST_GRAPHS_H

#include "core/ghost.h"

struct held_object;

/* A graph and the executables made from it share what they hold. */
struct graph {
    int references;
    size_t nodes;
    struct held_object *held;
};

status graph_release(struct graph *graph);

#endif
