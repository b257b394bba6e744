/* NCCL: communicators, which know their size and rank. */
#include "libraries/nccl.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

status cudaMalloc(void **pointer, size_t size);
status cudaFree(void *pointer);

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

ENTRY(ncclGetVersion(int *version), *version = NCCL_VERSION)

API const char *ncclGetErrorString(int error)
{
    if (error == REMOTE_ERROR)
        return "another rank has ended, or did not call the same collective in time";
    return error == SUCCESS ? "no error" : "not supported by memfit's ghost";
}

API const char *ncclGetLastError(void *communicator) { return ""; }

API status ncclGetUniqueId(struct unique_id *id)
{
    uint64_t random[2] = {0};
    if (getrandom(random, sizeof random, 0) != sizeof random)
        random[0] = (uint64_t)(uintptr_t)id;
    *id = (struct unique_id){0};
    snprintf(id->bytes, sizeof id->bytes, "memfit-%016lx%016lx", random[0], random[1]);
    return SUCCESS;
}

API status ncclCommGetUniqueId(void *communicator, struct unique_id *id) { return ncclGetUniqueId(id); }

/* ---- Communicators --------------------------------------------------------------------------- */

static status make(struct communicator **communicator, int ranks, int rank, const struct unique_id *id,
                   const struct config *config, bool split)
{
    void *made;
    status result =
        ghost_new_handle(&made, sizeof **communicator + (size_t)ranks * sizeof *(*communicator)->messages);
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
    **communicator = (struct communicator){ranks, rank, *id, 0, communicator_memory(&use)};
    return SUCCESS;
}

CALL(ncclCommInitRank(struct communicator **communicator, int ranks, struct unique_id id, int rank),
     make(communicator, ranks, rank, &id, NULL, false))
CALL(ncclCommInitRankConfig(struct communicator **communicator, int ranks, struct unique_id id, int rank,
                            const struct config *config),
     make(communicator, ranks, rank, &id, config, false))
CALL(ncclCommInitRankScalable(struct communicator **communicator, int ranks, int rank, int id_count,
                              struct unique_id *ids, const struct config *config),
     make(communicator, ranks, rank, ids, config, false))

API status ncclCommInitAll(struct communicator **communicators, int devices, const int *device_list)
{
    struct unique_id id;
    status result = ncclGetUniqueId(&id);
    for (int rank = 0; rank < devices && result == SUCCESS; rank++)
        result = make(&communicators[rank], devices, rank, &id, NULL, false);
    return result;
}

#define NO_COLOR (-1) /* nccl.h, NCCL_SPLIT_NOCOLOR: this rank is in no new communicator */

/* An id that the ranks of a new communicator agree on, and no other communicator has: FNV-1a. */
static struct unique_id id_after(const struct communicator *parent, int color)
{
    uint64_t hash = 14695981039346656037u;
    for (const char *at = parent->id.bytes; *at; at++)
        hash = (hash ^ (unsigned char)*at) * 1099511628211u;
    hash = (hash ^ parent->exchanges) * 1099511628211u;
    struct unique_id id = {0};
    snprintf(id.bytes, sizeof id.bytes, "memfit-%016lx-%x", hash, (unsigned)color);
    return id;
}

struct split {
    int color, key;
};

/* Ranks that choose one color are a communicator, in the order of their keys. */
static bool is_before(const struct split *one, int one_rank, const struct split *other, int other_rank)
{
    return one->key < other->key || (one->key == other->key && one_rank < other_rank);
}

static int split_ranks, split_rank; /* 0 ranks if Python has not said */

API void ghost_expect_split(int ranks, int rank) { split_ranks = ranks, split_rank = rank; }

/* Only the other ranks know which of them chose this color. If they do not exist, PyTorch may have said how many
 * the group has; else they are assumed to be all. */
API status ncclCommSplit(struct communicator *parent, int color, int key, struct communicator **communicator,
                         const struct config *config)
{
    *communicator = NULL;
    struct split own = {color, key};
    int ranks = parent->ranks, rank = parent->rank;
    if (ranks_exist() && ranks > 1) {
        struct exchanged received;
        if (!exchange(parent->id.bytes, parent->exchanges++, parent->ranks, parent->rank, &own, sizeof own,
                      &received))
            return REMOTE_ERROR;
        ranks = rank = 0;
        for (int each = 0; each < parent->ranks; each++) {
            struct split other;
            memcpy(&other, received.bytes + (size_t)each * sizeof other, sizeof other);
            ranks += other.color == color;
            rank += other.color == color && is_before(&other, each, &own, parent->rank);
        }
        exchange_end(&received);
    } else if (split_ranks)
        ranks = split_ranks, rank = split_rank;
    else if (color != NO_COLOR)
        ghost_assumed("ncclCommSplit");
    if (color == NO_COLOR)
        return SUCCESS;
    struct unique_id id = id_after(parent, color);
    return make(communicator, ranks, rank, &id, config, true);
}

API status ncclCommShrink(const struct communicator *parent, int *excluded, int count,
                          struct communicator **communicator, const struct config *config, int flags)
{
    int rank = parent->rank;
    for (int i = 0; i < count; i++)
        rank -= excluded[i] < parent->rank;
    struct unique_id id = id_after(parent, parent->ranks - count);
    return make(communicator, parent->ranks - count, rank, &id, config, false);
}

API status ncclCommDestroy(struct communicator *communicator)
{
    if (communicator)
        communicator_memory_end(communicator->memory);
    free(communicator);
    return SUCCESS;
}

ALSO(ncclCommAbort, ncclCommDestroy)
ENTRY(ncclCommCount(const struct communicator *communicator, int *ranks), *ranks = communicator->ranks)
ENTRY(ncclCommUserRank(const struct communicator *communicator, int *rank), *rank = communicator->rank)
ENTRY(ncclCommCuDevice(const struct communicator *communicator, int *device), *device = ghost_current_device)
ENTRY(ncclCommGetAsyncError(const struct communicator *communicator, int *error), *error = SUCCESS)
ENTRY(ncclCommMemStats(const struct communicator *communicator, int which, uint64_t *value),
      ghost_assumed("ncclCommMemStats");
      *value = 0)
ENTRY(ncclCommRegister(const struct communicator *communicator, void *buffer, size_t size, void **handle),
      *handle = buffer)
ENTRY(ncclCommWindowRegister(struct communicator *communicator, void *buffer, size_t size, void **window,
                             int flags),
      *window = buffer)

API status ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int residence,
                                    struct communicator *communicator)
{
    static int last = 15; /* above every operation nccl.h names */
    *operation = __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
    return SUCCESS;
}

API status ncclMemAlloc(void **pointer, size_t size) { return cudaMalloc(pointer, size); }
API status ncclMemFree(void *pointer) { return cudaFree(pointer); }
