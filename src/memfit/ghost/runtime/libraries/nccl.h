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

/* ---- NCCL's buffers (libraries/communicator_memory.c) ---------------------------------------- */

struct communicator_memory;
/* Return the account of a new communicator; NULL without memory, which the others accept. */
struct communicator_memory *communicator_memory(const struct ghost_communicator *use);
void communicator_memory_end(struct communicator_memory *memory);
/* Note that an all-reduce or another collective runs, or that this rank sends to `count` ranks from `first` on,
 * or receives from them. */
void communicator_reduces(struct communicator_memory *memory);
void communicator_collects(struct communicator_memory *memory);
void communicator_sends(struct communicator_memory *memory, int first, int count);
void communicator_receives(struct communicator_memory *memory, int first, int count);

/* ---- What ranks send each other (libraries/rank_exchange.c) ---------------------------------- */

struct exchanged {
    uint64_t each; /* bytes of each rank */
    unsigned char *bytes, *known;
};
bool ranks_exist(void);
/* Send bytes to every rank, and receive theirs, until exchange_end. False if a rank could not be reached. The
 * arguments are those of ghost_exchange; `from` is a device address, or 0 for bytes that are not known. */
bool exchange(const char *group, uint64_t call, int ranks, int rank, const void *sent, uint64_t bytes,
              struct exchanged *received);
bool exchange_device_bytes(const char *group, uint64_t call, int ranks, int rank, uint64_t from,
                           uint64_t bytes, struct exchanged *received);
/* Put the bytes from `at` on that a rank has sent into device memory. */
void receive_exchanged(uint64_t to, const struct exchanged *received, int source, uint64_t at,
                       uint64_t bytes);
void exchange_end(struct exchanged *received);
bool send_message(const struct message *message, uint64_t from, uint64_t bytes);

#endif
