/* NCCL: communicators that know their size and rank, and collectives that move nothing.
 *
 * As a rule there is one process. What the other ranks send is then taken to be what this rank sends, as start-up
 * checks and gathered sizes need it: exact for a communicator of one rank and a broadcast from this rank, and
 * otherwise assumed. Where each rank is a process (rank_exchange.c), short buffers are really exchanged, and so a
 * collective on one waits for all ranks, as a barrier must. What is reduced over several ranks is unknown. A short
 * buffer that one rank sends another is fetched when the receiving host reads it: as on a GPU, the call itself
 * returns at once, so an order of sends and receives that works there does not block here.
 *
 * NCCL's own buffers are outside PyTorch's allocator. The function set with ghost_set_communicator_sizes returns
 * their size, when a communicator is made and when it is first used in a way that makes NCCL connect ranks; the
 * ghost takes them from the device.
 */
#ifndef MEMFIT_NCCL_H
#define MEMFIT_NCCL_H

#include "core/ghost.h"

#define REMOTE_ERROR 6 /* nccl.h, ncclRemoteError */

/* Source: nccl.h 2.27 and 2.30. At 128 bytes it is passed on the stack. */
struct unique_id {
    char bytes[128];
};

struct communicator {
    int ranks, rank;
    struct unique_id id;
    uint64_t exchanges; /* so far */
    struct communicator_memory *memory;
    uint64_t messages[][2]; /* from and to each rank, so far */
};

#endif
