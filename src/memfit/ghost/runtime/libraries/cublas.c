/* cuBLAS and cuBLASLt: handles that remember their modes, and results where the caller reads one.
 *
 * The matrix products themselves are generated stubs. PyTorch gives cuBLAS its workspace from its
 * own allocator (c10/cuda, CUDABlasWorkspace), so nothing is allocated here; the handle's own
 * memory, allocated outside PyTorch, is part of the CUDA context's.
 */
#include "core/ghost.h"
#include "cuda/stream_marks.h"

#include <string.h>

struct blas_handle {
    void *stream;
    int math_mode, pointer_mode;
};

HANDLE(cublasCreate_v2, cublasDestroy_v2, struct blas_handle)
ENTRY(cublasSetStream_v2(struct blas_handle *handle, void *stream), mark_stream(handle->stream = stream))
ENTRY(cublasGetStream_v2(struct blas_handle *handle, void **stream), *stream = handle->stream)
ENTRY(cublasGetMathMode(struct blas_handle *handle, int *mode), *mode = handle->math_mode)
ENTRY(cublasSetMathMode(struct blas_handle *handle, int mode), handle->math_mode = mode)
ENTRY(cublasGetPointerMode_v2(struct blas_handle *handle, int *mode), *mode = handle->pointer_mode)
ENTRY(cublasSetPointerMode_v2(struct blas_handle *handle, int mode), handle->pointer_mode = mode)

API status cublasSetWorkspace_v2(void *handle, void *workspace, size_t size) { return SUCCESS; }

/* ---- Results that may be on the host --------------------------------------------------------- */

/* Dot products, norms, sums and extreme indices write one number where `result` points: to the
 * device, or, in host pointer mode, to the host. */
#define DOT(name, type)                                                                                      \
    ENTRY(name(void *handle, int n, const void *x, int x_step, const void *y, int y_step, type *result),     \
          write_result(result, sizeof *result))

#define REDUCTION(name, type)                                                                                \
    ENTRY(name(void *handle, int n, const void *x, int x_step, type *result),                                \
          write_result(result, sizeof *result))

typedef struct {
    float re, im;
} complex64;
typedef struct {
    double re, im;
} complex128;

DOT(cublasSdot_v2, float)
DOT(cublasDdot_v2, double)
DOT(cublasCdotu_v2, complex64)
DOT(cublasCdotc_v2, complex64)
DOT(cublasZdotu_v2, complex128)
DOT(cublasZdotc_v2, complex128)
REDUCTION(cublasSnrm2_v2, float)
REDUCTION(cublasDnrm2_v2, double)
REDUCTION(cublasScnrm2_v2, float)
REDUCTION(cublasDznrm2_v2, double)
REDUCTION(cublasSasum_v2, float)
REDUCTION(cublasDasum_v2, double)
REDUCTION(cublasScasum_v2, float)
REDUCTION(cublasDzasum_v2, double)
REDUCTION(cublasIsamax_v2, int)
REDUCTION(cublasIdamax_v2, int)
REDUCTION(cublasIcamax_v2, int)
REDUCTION(cublasIzamax_v2, int)
REDUCTION(cublasIsamin_v2, int)
REDUCTION(cublasIdamin_v2, int)
REDUCTION(cublasIcamin_v2, int)
REDUCTION(cublasIzamin_v2, int)

ENTRY(cublasDotEx(void *handle, int n, const void *x, int x_type, int x_step, const void *y, int y_type,
                  int y_step, void *result, int result_type, int execution_type),
      write_result(result, data_type_width(result_type)))

/* Batched factorizations report a bad argument through `info`, on the host; the arrays of matrices
 * and of singular pivots are on the device. */
#define BATCHED_QR(name)                                                                                     \
    ENTRY(name(void *handle, int m, int n, void *a, int a_step, void *tau, int *info, int batch),            \
          write_result(info, sizeof *info))

#define BATCHED_LEAST_SQUARES(name)                                                                          \
    ENTRY(name(void *handle, int trans, int m, int n, int columns, void *a, int a_step, void *c, int c_step, \
               int *info, int *device_info, int batch),                                                      \
          write_result(info, sizeof *info))

#define BATCHED_SOLVE(name)                                                                                  \
    ENTRY(name(void *handle, int trans, int n, int columns, const void *a, int a_step, const int *pivots,    \
               void *b, int b_step, int *info, int batch),                                                   \
          write_result(info, sizeof *info))

BATCHED_QR(cublasSgeqrfBatched)
BATCHED_QR(cublasDgeqrfBatched)
BATCHED_QR(cublasCgeqrfBatched)
BATCHED_QR(cublasZgeqrfBatched)
BATCHED_LEAST_SQUARES(cublasSgelsBatched)
BATCHED_LEAST_SQUARES(cublasDgelsBatched)
BATCHED_LEAST_SQUARES(cublasCgelsBatched)
BATCHED_LEAST_SQUARES(cublasZgelsBatched)
BATCHED_SOLVE(cublasSgetrsBatched)
BATCHED_SOLVE(cublasDgetrsBatched)
BATCHED_SOLVE(cublasCgetrsBatched)
BATCHED_SOLVE(cublasZgetrsBatched)

/* Copies to the host with a stride (MAGMA uses them): zeros, as for any copy off the record. */
API status cublasGetMatrixAsync(int rows, int columns, int element, const void *from, int from_step, void *to,
                                int to_step, void *stream)
{
    for (int column = 0; column < columns; column++)
        memset((char *)to + (size_t)column * (size_t)to_step * (size_t)element, 0,
               (size_t)rows * (size_t)element);
    return SUCCESS;
}

CALL(cublasGetVectorAsync(int n, int element, const void *from, int from_step, void *to, int to_step,
                          void *stream),
     cublasGetMatrixAsync(1, n, element, from, from_step, to, to_step, stream))

/* ---- cuBLASLt -------------------------------------------------------------------------------- */

API size_t cublasLtGetVersion(void)
{
    return CUDA_VERSION >= 13000 ? 130101 : 120804; /* those of CUDA 13.0 and 12.8 */
}

HANDLE(cublasLtCreate, cublasLtDestroy, struct blas_handle)
OPAQUE(cublasLtMatmulPreferenceCreate, cublasLtMatmulPreferenceDestroy)

CALL(cublasLtMatmulDescCreate(void **description, int compute_type, int scale_type),
     ghost_new_handle(description, 64))
ENTRY(cublasLtMatmulDescDestroy(void *description), free(description))
CALL(cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns, int64_t step),
     ghost_new_handle(layout, 64))
ENTRY(cublasLtMatrixLayoutDestroy(void *layout), free(layout))
CALL(cublasLtMatmulDescSetAttribute(void *description, int attribute, const void *value, size_t size),
     SUCCESS)
ALSO(cublasLtMatrixLayoutSetAttribute, cublasLtMatmulDescSetAttribute)
ALSO(cublasLtMatmulPreferenceSetAttribute, cublasLtMatmulDescSetAttribute)

/* Source: cublasLt.h 12.8 and 13.0, cublasLtMatmulHeuristicResult_t. */
struct heuristic_result {
    uint64_t algorithm[8];
    size_t workspace_size;
    int state;
    float waves;
    int reserved[4];
};
_Static_assert(sizeof(struct heuristic_result) == 96, "cublasLtMatmulHeuristicResult_t");

static const struct heuristic_result ANY_ALGORITHM = {.waves = 1.0f};

/* One algorithm without a workspace of its own: PyTorch allocates the workspace it offered
 * whichever algorithm is chosen (aten/src/ATen/cuda/CUDABlas.cpp). */
API status cublasLtMatmulAlgoGetHeuristic(void *handle, void *description, void *a, void *b, void *c, void *d,
                                          void *preference, int wanted, struct heuristic_result *results,
                                          int *found)
{
    *found = wanted > 0;
    if (wanted > 0)
        results[0] = ANY_ALGORITHM;
    return SUCCESS;
}

ENTRY(cublasLtMatmulAlgoCheck(void *handle, void *description, void *a, void *b, void *c, void *d,
                              const void *algorithm, struct heuristic_result *result),
      *result = ANY_ALGORITHM)
ENTRY(cublasLtMatmulAlgoInit(void *handle, int compute_type, int scale_type, int a_type, int b_type,
                             int c_type, int d_type, int algorithm_id, uint64_t *algorithm),
      memset(algorithm, 0, sizeof ANY_ALGORITHM.algorithm))

API status cublasLtMatmulAlgoConfigGetAttribute(const void *algorithm, int attribute, void *value,
                                                size_t size, size_t *written)
{
    memset(value, 0, size);
    if (written)
        *written = size;
    return SUCCESS;
}
