/* Shared by the checks of the ghost runtime. A check is a function that returns if it passes; otherwise it
 * prints the condition that failed and ends the process. */
#ifndef MEMFIT_GHOST_CHECKS_H
#define MEMFIT_GHOST_CHECKS_H

#include "core/ghost.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);                          \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

/* The functions called here, with the prototypes that PyTorch sees. */
status cudaMalloc(void **, size_t), cudaFree(void *), cudaMallocAsync(void **, size_t, void *);
status cudaFreeAsync(void *, void *), cudaMemGetInfo(size_t *, size_t *), cudaGetLastError(void);
status cudaMemcpy(void *, const void *, size_t, int), cudaMemset(void *, int, size_t);
status cudaMemcpy2DAsync(void *, size_t, const void *, size_t, size_t, size_t, int, void *);
status cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, void *);
status cudaDeviceGetDefaultMemPool(void **, int), cudaMemPoolGetAttribute(void *, int, void *);
status cudaMemPoolSetAttribute(void *, int, void *), cudaMemPoolTrimTo(void *, size_t);
status cudaDeviceSynchronize(void), cudaSetDevice(int), cudaGetDevice(int *);
status cudaHostAlloc(void **, size_t, unsigned), cudaFreeHost(void *),
    cudaHostRegister(void *, size_t, unsigned);
status cudaHostUnregister(void *), cudaMallocManaged(void **, size_t, unsigned);
status cudaStreamCreateWithFlags(void **, unsigned), cudaStreamDestroy(void *),
    cudaStreamWaitEvent(void *, void *, unsigned);
status cudaStreamSynchronize(void *), cudaEventCreateWithFlags(void **, unsigned),
    cudaEventRecord(void *, void *), cudaEventQuery(void *);
status cudaEventDestroy(void *), cudaEventSynchronize(void *), cudaEventElapsedTime(float *, void *, void *);
status cudaStreamBeginCapture(void *, int), cudaStreamEndCapture(void *, void **);
status cudaStreamIsCapturing(void *, int *), cudaGraphGetNodes(void *, void **, size_t *);
status cudaStreamGetCaptureInfo_v3(void *, int *, unsigned long long *, void **, const void **, const void **,
                                   size_t *);
status cudaGraphInstantiateWithFlags(void **, void *, unsigned long long), cudaGraphDestroy(void *);
status cudaGraphExecDestroy(void *), cudaGraphLaunch(void *, void *);
status cudaUserObjectCreate(void **, void *, void (*)(void *), unsigned, unsigned);
status cudaGraphRetainUserObject(void *, void *, unsigned, unsigned);
status cuMemAddressReserve(uint64_t *, size_t, size_t, uint64_t, unsigned long long),
    cuMemAddressFree(uint64_t, size_t);
status cuMemCreate(void **, size_t, const void *, unsigned long long), cuMemRelease(void *);
status cuMemMap(uint64_t, size_t, size_t, void *, unsigned long long), cuMemUnmap(uint64_t, size_t);
status cuMemGetAddressRange_v2(uint64_t *, size_t *, uint64_t);
status cudaDeviceGetAttribute(int *, int, int), cuDeviceGetPCIBusId(char *, int, int);
struct process {
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
};
status nvmlDeviceGetHandleByPciBusId_v2(const char *, void **);
status nvmlDeviceGetComputeRunningProcesses_v3(void *, unsigned *, struct process *);
status cublasSdot_v2(void *, int, const void *, int, const void *, int, float *);
struct nccl_id {
    char bytes[128];
};
status ncclGetUniqueId(struct nccl_id *), ncclCommInitRank(void **, int, struct nccl_id, int),
    ncclCommDestroy(void *);
status ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
status ncclAllGather(const void *, void *, size_t, int, void *, void *);
status ncclCommSplit(void *, int, int, void **, const void *), ncclCommCount(const void *, int *),
    ncclCommUserRank(const void *, int *);
void ghost_expect_split(int, int);
status ncclGroupStart(void), ncclGroupEnd(void);
status ncclBroadcast(const void *, void *, size_t, int, int, void *, void *);
status ncclSend(const void *, size_t, int, int, void *, void *),
    ncclRecv(void *, size_t, int, int, void *, void *);

status cusolverDnSgeqrf_bufferSize(void *, int, int, void *, int, int *);
status cusolverDnDgeqrf_bufferSize(void *, int, int, void *, int, int *);
status cusolverDnSorgqr_bufferSize(void *, int, int, int, const void *, int, const void *, int *);
status cusolverDnDorgqr_bufferSize(void *, int, int, int, const void *, int, const void *, int *);
status cusolverDnSgesvdj_bufferSize(void *, int, int, int, int, const void *, int, const void *, const void *,
                                    int, const void *, int, int *, void *);
status cusolverDnXsyevBatched_bufferSize(void *, void *, int, int, int64_t, int, const void *, int64_t, int,
                                         const void *, int, size_t *, size_t *, int64_t);
status cusolverDnSsyevd_bufferSize(void *, int, int, int, const void *, int, const void *, int *);
status cusolverDnXsyevd_bufferSize(void *, void *, int, int, int64_t, int, const void *, int64_t, int,
                                   const void *, int, size_t *, size_t *);
status cusolverDnSgesvdjBatched_bufferSize(void *, int, int, int, const void *, int, const void *,
                                           const void *, int, const void *, int, int *, void *, int);
status cufftXtMakePlanMany(int, int, long long *, long long *, long long, long long, int, long long *,
                           long long, long long, int, long long, size_t *, int);
status cusparseCreateCsr(void **, int64_t, int64_t, int64_t, void *, void *, void *, int, int, int, int);
status cusparseDestroySpMat(void *), cusparseSpMatGetSize(const void *, int64_t *, int64_t *, int64_t *);
status cusparseSpGEMM_compute(void *, int, int, const void *, const void *, const void *, const void *,
                              void *, int, int, void *, size_t *, void *);
status cusparseXcsrgeam2Nnz(void *, int, int, void *, int, const int *, const int *, void *, int, const int *,
                            const int *, void *, int *, int *, void *);

struct pointer_attributes {
    int type, device;
    void *device_pointer, *host_pointer;
    long reserved[8];
};
status cudaPointerGetAttributes(struct pointer_attributes *, const void *);

static inline struct ghost_device device(uint64_t total)
{
    struct ghost_device made = ghost_spec;
    strcpy(made.name, "test device");
    made.total_bytes = total;
    return made;
}

static inline void configure(uint64_t total)
{
    struct ghost_device made = device(total);
    CHECK(ghost_configure(&made, 2, 0) == 0);
}

static inline void *allocated(size_t size)
{
    void *pointer;
    CHECK(cudaMalloc(&pointer, size) == SUCCESS);
    return pointer;
}

static inline void launch(void)
{
    CHECK(cudaLaunchKernel("k", (dim3){1, 1, 1}, (dim3){1, 1, 1}, NULL, 0, NULL) == SUCCESS);
}

/* The bytes of the last copy back. read_back returns whether the ghost knew them. */
static unsigned char host[256 * 1024];

static inline int read_back(void *from, size_t size)
{
    memset(host, 0xee, sizeof host);
    CHECK(cudaMemcpy(host, from, size, 2) == SUCCESS);
    return ghost_last_read_known();
}

/* Every check, in order. */
#define EACH_CHECK(each)                                                                                     \
    each(device_capacity) each(allocation_rounding) each(many_allocations) each(configuring)                 \
        each(memory_pools) each(virtual_memory) each(stray_dereference) each(remembered_copies)              \
            each(launches_forget) each(address_reuse) each(random_copies_match_a_model)                      \
                each(record_is_bounded) each(strided_copies) each(answered_counts)                           \
                    each(host_and_device_pointers) each(pinned_memory_takes_no_pages) each(held_events)      \
                        each(elapsed_time) each(marked_streams) each(events_until_awaited)                   \
                            each(capturing_streams) each(collectives) each(collectives_of_ranks_that_exist)  \
                                each(messages_between_ranks_that_exist) each(descriptors)                    \
                                    each(question_bounds) each(graph_questions) each(graph_choices)          \
                                        each(workspace_log) each(recurrent_weights) each(gaps_are_recorded)  \
                                            each(running_processes) each(solver_workspaces)                  \
                                                each(measured_solver_workspaces) each(transform_work_areas)  \
                                                    each(sparse_products) each(allocation_log) each(threads) \
                                                        each(forks) each(kernel_architectures)

#define DECLARED(name) void name(void);
EACH_CHECK(DECLARED)

#endif
