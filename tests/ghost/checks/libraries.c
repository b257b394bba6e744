/* Libraries, gaps, the log; threads and forks. */
#include "checks.h"

/* ---- Libraries ------------------------------------------------------------------------------- */

void collectives(void)
{
    enum { INT8 = 0, SUM = 0 };
    configure(GIB);
    void *alone, *second_of_four;
    struct nccl_id id;
    char *send = allocated(4096), *receive = allocated(4096);
    ncclGetUniqueId(&id);
    CHECK(ncclCommInitRank(&alone, 1, id, 0) == SUCCESS &&
          ncclCommInitRank(&second_of_four, 4, id, 1) == SUCCESS);
    cudaMemset(send, 6, 64), cudaMemset(receive, 1, 64);
    ncclAllReduce(send, receive, 64, INT8, SUM, alone, NULL);
    CHECK(read_back(receive, 64) && host[0] == 6);
    ncclAllReduce(send, receive, 64, INT8, SUM, second_of_four, NULL);
    CHECK(!read_back(receive, 64) && read_back(send, 64)); /* it forgets only the bytes that it writes */
    ncclBroadcast(send, receive, 64, INT8, 1, second_of_four, NULL);
    CHECK(read_back(receive, 64) && host[0] == 6);
    cudaMemset(receive, 1, 64); /* another rank is taken to send what this one has */
    ncclBroadcast(send, receive, 64, INT8, 0, second_of_four, NULL);
    CHECK(read_back(receive, 64) && host[0] == 6);
    cudaMemset(receive, 1, 64); /* so in a group of broadcasts by all ranks, in whatever order */
    ncclGroupStart();
    for (int root = 0; root < 4; root++)
        ncclBroadcast(root == 1 ? send : receive + 16 * root, receive + 16 * root, 16, INT8, root,
                      second_of_four, NULL);
    CHECK(read_back(receive, 64) && host[0] == 1 && host[16] == 6);
    ncclGroupEnd();
    for (int root = 0; root < 4; root++)
        CHECK(read_back(receive + 16 * root, 16) && host[0] == 6 && host[15] == 6);
    cudaMemset(receive, 1, 64); /* but not where this rank sends two of that size, nor in the next group */
    ncclGroupStart();
    ncclBroadcast(send, receive, 16, INT8, 1, second_of_four, NULL);
    ncclBroadcast(send + 16, receive + 16, 16, INT8, 1, second_of_four, NULL);
    ncclBroadcast(receive + 32, receive + 32, 16, INT8, 0, second_of_four, NULL);
    ncclGroupEnd();
    ncclGroupStart();
    ncclBroadcast(receive + 48, receive + 48, 16, INT8, 0, second_of_four, NULL);
    ncclGroupEnd();
    CHECK(read_back(receive, 64) && host[0] == 6 && host[32] == 1 && host[48] == 1);
    void *half;
    int ranks, rank;
    ghost_expect_split(2, 1);
    CHECK(ncclCommSplit(second_of_four, 7, 1, &half, NULL) == SUCCESS);
    CHECK(ncclCommCount(half, &ranks) == SUCCESS && ranks == 2);
    CHECK(ncclCommUserRank(half, &rank) == SUCCESS && rank == 1);
    ncclCommDestroy(half), ghost_expect_split(0, 0);
    CHECK(ncclCommSplit(second_of_four, -1, 1, &half, NULL) == SUCCESS && !half);
    CHECK(ncclCommSplit(second_of_four, 7, 1, &half, NULL) == SUCCESS);
    CHECK(ncclCommCount(half, &ranks) == SUCCESS &&
          ranks == 4); /* Python has not said how many ranks choose the color */
    ncclCommDestroy(half);
    ncclCommDestroy(alone), ncclCommDestroy(second_of_four), cudaFree(send), cudaFree(receive);
}

static int exchanges, refuses;

/* Every rank sends its number plus 10, but the last does not know what it sends. */
static int carried(const char *group, uint64_t call, int ranks, int rank, const void *sent, uint64_t bytes,
                   void *received, unsigned char *known)
{
    CHECK(strncmp(group, "memfit-", 7) == 0 && call == (uint64_t)exchanges && ranks == 4 && rank == 1);
    exchanges++;
    for (int each = 0; each < ranks; each++) {
        memset((char *)received + (size_t)each * bytes, 10 + each, bytes);
        known[each] = each < ranks - 1;
    }
    return refuses;
}

static int sent_messages, fetched_messages;

/* A message carries its number; the second is not known. */
static int keep(const char *group, uint64_t call, int from, int to, void *sent, uint64_t bytes)
{
    CHECK(from == 1 && to == 2 && call == (uint64_t)sent_messages && bytes == 64);
    CHECK(sent_messages == 1 ? !sent : *(const char *)sent == 5);
    sent_messages++;
    return refuses;
}

static int fetch(const char *group, uint64_t call, int from, int to, void *received, uint64_t bytes)
{
    CHECK(from == 2 && to == 1 && bytes == 64);
    fetched_messages++;
    memset(received, 20 + (int)call, bytes);
    return call != 1;
}

void messages_between_ranks_that_exist(void)
{
    enum { INT8 = 0, REMOTE_ERROR = 6 };
    configure(GIB);
    void *second_of_four;
    struct nccl_id id;
    char *send = allocated(MIB), *receive = allocated(MIB);
    ghost_set_exchange(carried), ghost_set_messages(keep, fetch);
    ncclGetUniqueId(&id);
    CHECK(ncclCommInitRank(&second_of_four, 4, id, 1) == SUCCESS);
    cudaMemset(send, 5, 64);
    CHECK(ncclSend(send, 64, INT8, 2, second_of_four, NULL) == SUCCESS);
    CHECK(ncclSend(send + 512, 64, INT8, 2, second_of_four, NULL) == SUCCESS && sent_messages == 2);
    for (int call = 0; call < 5; call++) /* the last two into one place */
        CHECK(ncclRecv(receive + 64 * (call < 4 ? call : 3), 64, INT8, 2, second_of_four, NULL) == SUCCESS);
    CHECK(fetched_messages == 0); /* the call itself waits for nothing */
    CHECK(read_back(receive, 64) && host[0] == 20 && host[63] == 20 && fetched_messages == 1);
    CHECK(read_back(receive, 64) && fetched_messages == 1);
    CHECK(!read_back(receive + 64, 64) && fetched_messages == 2);
    CHECK(read_back(receive + 128, 128) && host[0] == 22 && host[64] == 24 && fetched_messages == 4);
    ncclRecv(receive, 64, INT8, 2, second_of_four, NULL);
    cudaMemset(receive + 32, 7, 32);
    CHECK(!read_back(receive, 32) && read_back(receive + 32, 32) && fetched_messages == 4);
    ncclRecv(receive, 64 << 10 | 1, INT8, 2, second_of_four, NULL);
    CHECK(!read_back(receive, 64) && fetched_messages == 4); /* too long to be sent */
    refuses = 1;
    CHECK(ncclSend(send, 64, INT8, 2, second_of_four, NULL) == REMOTE_ERROR);
    ncclRecv(receive, 64, INT8, 2, second_of_four, NULL); /* never read */
    ghost_set_exchange(NULL), ghost_set_messages(NULL, NULL);
    refuses = 0;
    ncclCommDestroy(second_of_four), cudaFree(send), cudaFree(receive);
}

void collectives_of_ranks_that_exist(void)
{
    enum { INT8 = 0, SUM = 0, REMOTE_ERROR = 6 };
    configure(GIB);
    void *second_of_four, *half;
    struct nccl_id id;
    char *send = allocated(MIB), *receive = allocated(4 * MIB);
    ghost_set_exchange(carried);
    ncclGetUniqueId(&id);
    CHECK(ncclCommInitRank(&second_of_four, 4, id, 1) == SUCCESS);
    CHECK(ncclAllGather(send, receive, 64, INT8, second_of_four, NULL) == SUCCESS);
    for (int rank = 0; rank < 3; rank++)
        CHECK(read_back(receive + 64 * rank, 64) && host[0] == 10 + rank && host[63] == 10 + rank);
    CHECK(!read_back(receive + 64 * 3, 64));
    CHECK(ncclBroadcast(send, receive, 64, INT8, 2, second_of_four, NULL) == SUCCESS);
    CHECK(read_back(receive, 64) && host[0] == 12);
    CHECK(ncclBroadcast(send, receive, 64, INT8, 3, second_of_four, NULL) == SUCCESS);
    CHECK(!read_back(receive, 64));
    cudaMemset(receive, 1, 64);
    ncclAllReduce(send, receive, 64, INT8, SUM, second_of_four, NULL);
    CHECK(!read_back(receive, 64) && exchanges == 4); /* it waits for the ranks, and its result is unknown */
    cudaMemset(receive, 1, 64), cudaMemset(send, 1, 64);
    ncclAllGather(send, receive, 64 << 10, INT8, second_of_four, NULL);
    CHECK(!read_back(receive, 64) && exchanges == 4); /* too long to be sent */
    refuses = 1;
    CHECK(ncclAllGather(send, receive, 64, INT8, second_of_four, NULL) == REMOTE_ERROR);
    CHECK(ncclCommSplit(second_of_four, 0, 0, &half, NULL) == REMOTE_ERROR && !half);
    ghost_set_exchange(NULL);
    ncclCommDestroy(second_of_four), cudaFree(send), cudaFree(receive);
}

/* NVML reports this process's context and allocations, once it has allocated. */
void running_processes(void)
{
    enum { INSUFFICIENT = 7 };
    char bus_id[16];
    void *card;
    struct process found[2] = {{0}};
    unsigned count = 2, none = 0;
    struct ghost_device device = {.name = "small", .total_bytes = GIB};
    CHECK(ghost_configure(&device, 1, 300 * MIB) == 0);
    ghost_set_context_bytes(100 * MIB);
    CHECK(cuDeviceGetPCIBusId(bus_id, 4, 0) != SUCCESS && cuDeviceGetPCIBusId(bus_id, 16, 1) != SUCCESS);
    CHECK(cuDeviceGetPCIBusId(bus_id, 16, 0) == SUCCESS);
    CHECK(nvmlDeviceGetHandleByPciBusId_v2(bus_id, &card) == SUCCESS);
    CHECK(nvmlDeviceGetComputeRunningProcesses_v3(card, &count, found) == SUCCESS && count == 0);
    void *kept = allocated(4 * MIB);
    CHECK(nvmlDeviceGetComputeRunningProcesses_v3(card, &none, NULL) == INSUFFICIENT && none == 1);
    count = 2;
    CHECK(nvmlDeviceGetComputeRunningProcesses_v3(card, &count, found) == SUCCESS && count == 1);
    CHECK(found[0].pid == (unsigned)getpid() && found[0].used_bytes == 104 * MIB && found[1].pid == 0);
    cudaFree(kept);
}

void gaps_are_recorded(void)
{
    char text[64], small[8] = "xxxxxxx";
    CHECK(ghost_gaps_reached(NULL, 0) == 1);
    CHECK(ghost_gap_called("first", 801) == 801);
    ghost_gap_called("second", 7), ghost_gap_called("first", 801);
    CHECK(ghost_gaps_reached(text, sizeof text) == 14 && strcmp(text, "first\nsecond\n") == 0);
    CHECK(ghost_gaps_reached(small, sizeof small) == 14 && strcmp(small, "first\n") == 0);
}

enum { REAL_32 = 0, REAL_64 = 1, COMPLEX_32 = 4, COMPLEX_64 = 5 };

/* Sizes are in elements or bytes, at least 1, and refused if an int cannot hold them. */
void solver_workspaces(void)
{
    enum { REFUSED = 3 };
    int elements = -1;
    size_t on_device, on_host = 1;
    char text[256];
    CHECK(cusolverDnSsyevd_bufferSize(NULL, 1, 0, 40000, NULL, 40000, NULL, &elements) == REFUSED);
    CHECK(cusolverDnXsyevd_bufferSize(NULL, NULL, 1, 0, 40000, COMPLEX_64, NULL, 40000, 1, NULL, COMPLEX_64,
                                      &on_device, &on_host) == SUCCESS);
    CHECK(on_device == (34ul * 40000 * 4000 + 724 * 40000 + 50600) * 16 && on_host == 0);
    CHECK(cusolverDnSgesvdjBatched_bufferSize(NULL, 1, 0, 0, NULL, 1, NULL, NULL, 1, NULL, 1, &elements, NULL,
                                              5) == SUCCESS);
    CHECK(elements == 1);
    ghost_gaps_reached(text, sizeof text);
    CHECK(strstr(text, "cuSOLVER workspace"));
}

/* As measured on an H100 (benchmarks/gpu/results). */
void measured_solver_workspaces(void)
{
    int elements;
    size_t on_device, on_host;
    CHECK(cusolverDnSgeqrf_bufferSize(NULL, 5, 5, NULL, 5, &elements) == SUCCESS && elements == 786464);
    CHECK(cusolverDnDgeqrf_bufferSize(NULL, 1024, 256, NULL, 1024, &elements) == SUCCESS);
    CHECK(elements == 786448);
    CHECK(cusolverDnSgeqrf_bufferSize(NULL, 1024, 1024, NULL, 1024, &elements) == SUCCESS);
    CHECK(elements == 1572896);
    CHECK(cusolverDnSorgqr_bufferSize(NULL, 64, 64, 64, NULL, 64, NULL, &elements) == SUCCESS);
    CHECK(elements == 2048);
    CHECK(cusolverDnDorgqr_bufferSize(NULL, 1024, 1024, 1024, NULL, 1024, NULL, &elements) == SUCCESS);
    CHECK(elements == 409856);
    CHECK(cusolverDnSgesvdj_bufferSize(NULL, 1, 1, 1024, 256, NULL, 1024, NULL, NULL, 1024, NULL, 256,
                                       &elements, NULL) == SUCCESS);
    CHECK(elements == 787200);
    CHECK(cusolverDnXsyevBatched_bufferSize(NULL, NULL, 1, 0, 1024, REAL_32, NULL, 1024, REAL_32, NULL,
                                            REAL_32, &on_device, &on_host, 1) == SUCCESS);
    CHECK(on_device > 4357347ul * 4 - 1024 && on_device < 4357347ul * 4 && on_host == 0);
}

/* A plan's work area in bytes; real data have half as many complex values. */
static size_t work_area(int rank, long long n, long long batch, int from, int to)
{
    size_t found = 1;
    long long sizes[3] = {n, n, n};
    int complex = from == REAL_64 || to == REAL_64 || from == COMPLEX_64 ? COMPLEX_64 : COMPLEX_32;
    CHECK(cufftXtMakePlanMany(1, rank, sizes, NULL, 1, 0, from, NULL, 1, 0, to, batch, &found, complex) ==
          SUCCESS);
    return found;
}

/* Within 2 KiB of what was measured on an H100 (benchmarks/gpu/results). */
void transform_work_areas(void)
{
    char text[256];
    CHECK(work_area(2, 243, 32, COMPLEX_32, COMPLEX_32) == 0);
    CHECK(work_area(2, 251, 32, COMPLEX_32, COMPLEX_32) == 0);
    CHECK(work_area(2, 62, 32, COMPLEX_32, COMPLEX_32) == 32 * 62 * 62 * 8);
    CHECK(work_area(2, 256, 32, REAL_32, COMPLEX_32) == 0);
    CHECK(work_area(2, 251, 32, REAL_32, COMPLEX_32) == 32 * 251 * 251 * 8);
    CHECK(work_area(2, 484, 32, COMPLEX_32, REAL_32) == 32 * 484 * 243 * 8);
    CHECK(work_area(1, 65536, 8, REAL_32, COMPLEX_32) == 8 * 32769 * 8);
    CHECK(work_area(1, 59049, 8, REAL_64, COMPLEX_64) == 8 * 59049 * 16);
    CHECK(work_area(1, 65537, 8, REAL_32, COMPLEX_32) == 8 * (32769 + 131220) * 8);
    CHECK(work_area(1, 131070, 8, COMPLEX_64, REAL_64) == 8 * (65536 + 262144) * 16);
    CHECK(work_area(1, 199998, 8, COMPLEX_32, REAL_32) == 8 * (100000 + 400000) * 8);
    CHECK(work_area(1, 3281, 1, COMPLEX_32, COMPLEX_32) ==
          (3281 + 6561) * 8); /* 2 n - 1 itself; not measured */
    CHECK(work_area(1, 0, 8, REAL_32, COMPLEX_32) == 0);
    work_area(3, (long long)1 << 62, 8, COMPLEX_32, REAL_32); /* ends, with whatever answer */
    ghost_gaps_reached(text, sizeof text);
    CHECK(strstr(text, "cuFFT work area"));
}

/* The largest possible number of entries: each entry of A times a row of B, at most the whole matrix. */
void sparse_products(void)
{
    const int64_t huge = (int64_t)1 << 40;
    void *a, *b, *c, *wide;
    int64_t rows, columns, entries;
    size_t size;
    int count;
    cusparseCreateCsr(&a, 4, 5, 6, NULL, NULL, NULL, 0, 0, 0, 0);
    cusparseCreateCsr(&b, 5, 30, 2, NULL, NULL, NULL, 0, 0, 0, 0);
    cusparseCreateCsr(&c, 4, 30, 0, NULL, NULL, NULL, 0, 0, 0, 0);
    cusparseCreateCsr(&wide, huge, huge, huge, NULL, NULL, NULL, 0, 0, 0, 0);
    CHECK(cusparseSpGEMM_compute(NULL, 0, 0, NULL, a, b, NULL, c, 0, 0, NULL, &size, NULL) == SUCCESS);
    CHECK(size == (4 + 12) * 4);
    CHECK(cusparseSpMatGetSize(c, &rows, &columns, &entries) == SUCCESS);
    CHECK(rows == 4 && columns == 30 && entries == 6 * 2);
    cusparseSpGEMM_compute(NULL, 0, 0, NULL, wide, wide, NULL, c, 0, 0, NULL, &size, NULL);
    CHECK(size > 100 * TIB);
    cusparseSpMatGetSize(c, &rows, &columns, &entries);
    CHECK(entries == INT64_MAX);
    cusparseXcsrgeam2Nnz(NULL, 3, 3, NULL, 4, NULL, NULL, NULL, 2, NULL, NULL, NULL, NULL, &count, NULL);
    CHECK(count == 6);
    cusparseXcsrgeam2Nnz(NULL, 3, 3, NULL, 8, NULL, NULL, NULL, 7, NULL, NULL, NULL, NULL, &count, NULL);
    CHECK(count == 9);
    cusparseDestroySpMat(a), cusparseDestroySpMat(b), cusparseDestroySpMat(c), cusparseDestroySpMat(wide);
}

void allocation_log(void)
{
    struct ghost_event events[8];
    configure(GIB);
    void *before = allocated(100), *first, *second, *refused;
    size_t left, total;
    ghost_log_allocations(1);
    ghost_set_label(42);
    first = allocated(1000);
    ghost_set_label(0);
    cudaMallocAsync(&second, 2000, (void *)0x77);
    cudaMemGetInfo(&left, &total);
    cudaMalloc(&refused, 2 * GIB);
    cudaFreeAsync(second, (void *)0x77), cudaFree(first), cudaFree(before);
    CHECK(ghost_allocation_log(NULL, 0) == 6);
    CHECK(ghost_allocation_log(events, 2) == 6 && ghost_allocation_log(events, 8) == 6);
    CHECK(events[0].action == GHOST_MALLOC && events[0].size == 1024 && events[0].label == 42);
    CHECK(events[1].action == GHOST_MALLOC_ASYNC && events[1].stream == 0x77 && events[1].label == 0);
    CHECK(events[2].action == GHOST_OUT_OF_MEMORY && events[2].size == 2 * GIB);
    CHECK(events[2].address == left && left < GIB);
    CHECK(events[3].action == GHOST_FREE_ASYNC && events[3].size == 2048 &&
          events[3].address == events[1].address);
    CHECK(events[4].action == GHOST_FREE && events[4].address == (uint64_t)first);
    CHECK(events[5].size == 512 && events[5].time_us >= events[0].time_us);
    ghost_log_allocations(0);
}

/* ---- Threads and forks ----------------------------------------------------------------------- */

static volatile bool stop;

static void *churn(void *ignored)
{
    unsigned char bytes[64] = {1};
    for (int i = 0; i < 20000 && !stop; i++) {
        char *memory = allocated(1000);
        cudaMemcpy(memory, bytes, sizeof bytes, 1);
        cudaMemcpy(bytes, memory, sizeof bytes, 2);
        if (i % 10 == 0)
            launch();
        void *pinned;
        cudaHostAlloc(&pinned, 10, 0);
        cudaFreeHost(pinned);
        cudaFree(memory);
    }
    return NULL;
}

void threads(void)
{
    pthread_t workers[4];
    configure(GIB);
    for (int i = 0; i < 4; i++)
        pthread_create(&workers[i], NULL, churn, NULL);
    for (int i = 0; i < 4; i++)
        pthread_join(workers[i], NULL);
    CHECK(ghost_counter("used") == 0 && ghost_counter("mallocs") == 80000);
}

/* A child forked while other threads hold the ghost's lock most of the time must not hang. */
void forks(void)
{
    pthread_t workers[2];
    configure(GIB);
    for (int i = 0; i < 2; i++)
        pthread_create(&workers[i], NULL, churn, NULL);
    for (int i = 0; i < 50; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(10);
            cudaFree(allocated(1000));
            _exit(0);
        }
        int how;
        waitpid(child, &how, 0);
        CHECK(WIFEXITED(how) && WEXITSTATUS(how) == 0);
    }
    stop = true;
    for (int i = 0; i < 2; i++)
        pthread_join(workers[i], NULL);
}
