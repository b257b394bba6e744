/* NCCL: communicators that know their size and rank, and collectives that move nothing.
 *
 * There is one process. What the other ranks send is taken to be what this rank sends, as start-up checks and
 * gathered sizes need it: exact for a communicator of one rank and a broadcast from this rank, and otherwise
 * assumed. What is reduced over several ranks is unknown.
 *
 * NCCL's own buffers are outside PyTorch's allocator. The function set with ghost_set_communicator_sizes returns
 * their size, when a communicator is made and when it is first used in a way that makes NCCL connect ranks; the
 * ghost takes them from the device.
 */
#include "core/ghost.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

status cudaMalloc(void **pointer, size_t size);
status cudaFree(void *pointer);

/* Source: nccl.h 2.27 and 2.30. At 128 bytes it is passed on the stack. */
struct unique_id {
    char bytes[128];
};

struct communicator {
    int ranks, rank;
    struct communicator_memory *memory;
};

/* Source: nccl.h 2.27 and 2.30, ncclConfig_t up to the last member used here. */
struct config {
    size_t size;
    unsigned magic, version;
    int blocking, cluster_size;
    int min_ctas, max_ctas;
    const char *network;
    int split_share;
};
#define UNDEFINED INT_MIN /* nccl.h, NCCL_CONFIG_UNDEF_INT */

API status ncclGetVersion(int *version)
{
    *version = NCCL_VERSION;
    return SUCCESS;
}

API const char *ncclGetErrorString(int error)
{
    return error == SUCCESS ? "no error" : "not supported by memfit's ghost";
}

API const char *ncclGetLastError(void *communicator) { return ""; }

API status ncclGetUniqueId(struct unique_id *id)
{
    *id = (struct unique_id){"memfit ghost"};
    return SUCCESS;
}

API status ncclCommGetUniqueId(void *communicator, struct unique_id *id) { return ncclGetUniqueId(id); }

/* ---- Communicators --------------------------------------------------------------------------- */

static status make(struct communicator **communicator, int ranks, int rank, const struct config *config,
                   bool split)
{
    void *made;
    status result = ghost_new_handle(&made, sizeof **communicator);
    if (result != SUCCESS)
        return result;
    bool says = config && config->size >= sizeof *config;
    struct ghost_communicator use = {
        .ranks = ranks,
        .rank = rank,
        .min_ctas = says && config->min_ctas != UNDEFINED ? config->min_ctas : 0,
        .max_ctas = says && config->max_ctas != UNDEFINED ? config->max_ctas : 0,
        .shares = split && says && config->split_share == 1,
    };
    *communicator = made;
    **communicator = (struct communicator){ranks, rank, communicator_memory(&use)};
    return SUCCESS;
}

API status ncclCommInitRank(struct communicator **communicator, int ranks, struct unique_id id, int rank)
{
    return make(communicator, ranks, rank, NULL, false);
}

API status ncclCommInitRankConfig(struct communicator **communicator, int ranks, struct unique_id id,
                                  int rank, const struct config *config)
{
    return make(communicator, ranks, rank, config, false);
}

API status ncclCommInitRankScalable(struct communicator **communicator, int ranks, int rank, int id_count,
                                    struct unique_id *ids, const struct config *config)
{
    return make(communicator, ranks, rank, config, false);
}

API status ncclCommInitAll(struct communicator **communicators, int devices, const int *device_list)
{
    status result = SUCCESS;
    for (int rank = 0; rank < devices && result == SUCCESS; rank++)
        result = make(&communicators[rank], devices, rank, NULL, false);
    return result;
}

#define NO_COLOR (-1) /* nccl.h, NCCL_SPLIT_NOCOLOR: this rank is in no new communicator */

/* Only the other ranks know which of them chose this color: assumed to be all. */
API status ncclCommSplit(const struct communicator *parent, int color, int key,
                         struct communicator **communicator, const struct config *config)
{
    *communicator = NULL;
    if (color == NO_COLOR)
        return SUCCESS;
    ghost_assumed("ncclCommSplit");
    return make(communicator, parent->ranks, parent->rank, config, true);
}

API status ncclCommShrink(const struct communicator *parent, int *excluded, int count,
                          struct communicator **communicator, const struct config *config, int flags)
{
    int rank = parent->rank;
    for (int i = 0; i < count; i++)
        rank -= excluded[i] < parent->rank;
    return make(communicator, parent->ranks - count, rank, config, false);
}

API status ncclCommDestroy(struct communicator *communicator)
{
    if (communicator)
        communicator_memory_end(communicator->memory);
    free(communicator);
    return SUCCESS;
}

API status ncclCommAbort(struct communicator *communicator) { return ncclCommDestroy(communicator); }

API status ncclCommCount(const struct communicator *communicator, int *ranks)
{
    *ranks = communicator->ranks;
    return SUCCESS;
}

API status ncclCommUserRank(const struct communicator *communicator, int *rank)
{
    *rank = communicator->rank;
    return SUCCESS;
}

API status ncclCommCuDevice(const struct communicator *communicator, int *device)
{
    *device = ghost_current_device;
    return SUCCESS;
}

API status ncclCommGetAsyncError(const struct communicator *communicator, int *error)
{
    *error = SUCCESS;
    return SUCCESS;
}

API status ncclCommMemStats(const struct communicator *communicator, int which, uint64_t *value)
{
    ghost_assumed("ncclCommMemStats");
    *value = 0;
    return SUCCESS;
}

API status ncclCommRegister(const struct communicator *communicator, void *buffer, size_t size, void **handle)
{
    *handle = buffer;
    return SUCCESS;
}

API status ncclCommWindowRegister(struct communicator *communicator, void *buffer, size_t size, void **window,
                                  int flags)
{
    *window = buffer;
    return SUCCESS;
}

API status ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int residence,
                                    struct communicator *communicator)
{
    static int last = 15; /* above every operation nccl.h names */
    *operation = __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
    return SUCCESS;
}

API status ncclMemAlloc(void **pointer, size_t size) { return cudaMalloc(pointer, size); }
API status ncclMemFree(void *pointer) { return cudaFree(pointer); }

/* ---- Collectives ----------------------------------------------------------------------------- */

/* Source: nccl.h, ncclDataType_t, from ncclInt8 to ncclFloat8e5m2. */
static uint64_t bytes_of(uint64_t count, int type)
{
    static const unsigned char widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return count * (type >= 0 && (size_t)type < sizeof widths ? widths[type] : 8);
}

static status move(void *to, const void *from, uint64_t bytes, bool exact, const void *stream)
{
    COUNT(library_calls);
    note_captured_node(stream);
    if (exact)
        copy_on_device((uint64_t)to, (uint64_t)from, bytes);
    else
        forget((uint64_t)to, bytes);
    return SUCCESS;
}

static bool alone(const struct communicator *communicator) { return communicator->ranks == 1; }

/* Each rank sends as many bytes to this one. The ranks run one program, so what the others send is taken to be
 * what this rank sends. */
static status receive_from_all(void *to, const void *from, uint64_t bytes,
                               const struct communicator *communicator, const void *stream)
{
    uint64_t total = bytes * (uint64_t)communicator->ranks;
    if (alone(communicator) || total > LONGEST_REMEMBERED)
        return move(to, from, total, alone(communicator), stream);
    COUNT(library_calls);
    note_captured_node(stream);
    for (uint64_t at = 0; at < total; at += bytes)
        if ((uint64_t)to + at != (uint64_t)from) /* in place: this rank's part is there already */
            copy_on_device((uint64_t)to + at, (uint64_t)from, bytes);
    return SUCCESS;
}

#define PLAIN_OPERATIONS 5 /* sum, product, maximum, minimum, average: each of one value is that value */

static status reduce(const void *send, void *receive, uint64_t bytes, int operation,
                     const struct communicator *communicator, const void *stream)
{
    return move(receive, send, bytes, alone(communicator) && operation < PLAIN_OPERATIONS, stream);
}

API status ncclAllReduce(const void *send, void *receive, size_t count, int type, int operation,
                         struct communicator *communicator, void *stream)
{
    communicator_reduces(communicator->memory);
    return reduce(send, receive, bytes_of(count, type), operation, communicator, stream);
}

API status ncclReduce(const void *send, void *receive, size_t count, int type, int operation, int root,
                      struct communicator *communicator, void *stream)
{
    communicator_collects(communicator->memory);
    if (communicator->rank != root)
        return SUCCESS; /* only the root receives */
    return reduce(send, receive, bytes_of(count, type), operation, communicator, stream);
}

API status ncclReduceScatter(const void *send, void *receive, size_t receive_count, int type, int operation,
                             struct communicator *communicator, void *stream)
{
    communicator_collects(communicator->memory);
    return reduce(send, receive, bytes_of(receive_count, type), operation, communicator, stream);
}

API status ncclBroadcast(const void *send, void *receive, size_t count, int type, int root,
                         struct communicator *communicator, void *stream)
{
    communicator_collects(communicator->memory);
    return move(receive, send, bytes_of(count, type), true, stream); /* the root sends what this rank has */
}

API status ncclBcast(void *buffer, size_t count, int type, int root, struct communicator *communicator,
                     void *stream)
{
    return ncclBroadcast(buffer, buffer, count, type, root, communicator, stream);
}

API status ncclAllGather(const void *send, void *receive, size_t send_count, int type,
                         struct communicator *communicator, void *stream)
{
    communicator_collects(communicator->memory);
    return receive_from_all(receive, send, bytes_of(send_count, type), communicator, stream);
}

API status ncclAlltoAll(const void *send, void *receive, size_t count, int type,
                        struct communicator *communicator, void *stream)
{
    communicator_sends(communicator->memory, 0, communicator->ranks);
    communicator_receives(communicator->memory, 0, communicator->ranks);
    return receive_from_all(receive, send, bytes_of(count, type), communicator, stream);
}

API status ncclGather(const void *send, void *receive, size_t count, int type, int root,
                      struct communicator *communicator, void *stream)
{
    if (communicator->rank != root) {
        communicator_sends(communicator->memory, root, 1);
        return SUCCESS;
    }
    communicator_receives(communicator->memory, 0, communicator->ranks);
    return receive_from_all(receive, send, bytes_of(count, type), communicator, stream);
}

API status ncclSend(const void *send, size_t count, int type, int peer, struct communicator *communicator,
                    void *stream)
{
    communicator_sends(communicator->memory, peer, 1);
    note_captured_node(stream);
    return SUCCESS;
}

API status ncclRecv(void *receive, size_t count, int type, int peer, struct communicator *communicator,
                    void *stream)
{
    communicator_receives(communicator->memory, peer, 1);
    return move(receive, NULL, bytes_of(count, type), false, stream);
}
