/* cuSOLVER: handles, and the sizes of workspace.
 *
 * The factorizations themselves are generated stubs: they write on the device, `devInfo` included, which
 * PyTorch reads as 0, success. PyTorch allocates the workspace that these functions report.
 *
 * NVIDIA documents no sizes. The ones here were measured on one H100, or are what LAPACK documents for the
 * routine of the same name; both are recorded as assumed. They are all in the functions under "Workspace".
 */
#include "core/ghost.h"

OPAQUE(cusolverDnCreate, cusolverDnDestroy)
OPAQUE(cusolverDnCreateParams, cusolverDnDestroyParams)
OPAQUE(cusolverDnCreateGesvdjInfo, cusolverDnDestroyGesvdjInfo)
OPAQUE(cusolverDnCreateSyevjInfo, cusolverDnDestroySyevjInfo)

/* ---- Workspace, in elements of the matrix ---------------------------------------------------- */

/* Source, of geqrf, orgqr, syevd, and of gesvdj of tall matrices: formulas through sizes measured on an H100
 * with CUDA 13.0, for 256 and 1024 columns in float32 and float64 (benchmarks/gpu/results, decision 65). A
 * geqrf of 5 columns takes as much as one of 256. Up to 64 columns orgqr takes one block, and syevBatched one
 * matrix each. That syevd fails beyond 25,000 columns (NVIDIA/CUDALibrarySamples issue 246), where 3.4 n^2
 * elements reach 2^31, gives its third coefficient. The Jacobi methods were as given here.
 *
 * Of the others: the LWORK of the routine's reference documentation, LAPACK 3.12 (netlib.org/lapack), for
 * its best performance, with blocks of BLOCK columns. LAPACK factorizes in place where a GPU's
 * blocked code keeps a panel (getrf, potrf), which is counted as one block of columns; its Jacobi
 * methods work in place where a parallel one keeps a copy of the matrix and its rotations. */
#define BLOCK 32

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t panel(int64_t columns) { return BLOCK * columns; } /* sytrf; getrf potrf */
static int64_t geqrf(int64_t m, int64_t n, int64_t width)
{
    return most(most(3 << 18, panel(n)), 1536 * least(m, n)) + 128 / width; /* wide ones were not measured */
}
static int64_t orgqr(int64_t n) { return n <= 64 ? panel(n) : 384 * n + 16640; }
static int64_t apply_q(int side, int64_t m, int64_t n) { return panel(side == 0 ? n : m); } /* 0: left */
static int64_t gesvd(int64_t m, int64_t n) { return 3 * least(m, n) + panel(m + n); }
static int64_t syevd(int64_t n) { return 17 * n * n / 5 + 724 * n + 50600; }
static int64_t syev_batched(int64_t n, int64_t batch) { return batch * (n <= 64 ? n * n : syevd(n)); }
static int64_t geev(int64_t n) { return (2 + BLOCK) * n + n * n; } /* including a copy of the matrix */
static int64_t jacobi(int64_t m, int64_t n, int64_t batch)
{
    return batch * (m * n + least(m, n) * n + m + n);
}

static int64_t gesvdj(int64_t m, int64_t n) { return most(jacobi(m, n, 1), m > n ? (3 << 18) + 3 * n : 0); }

/* ---- The answers ------------------------------------------------------------------------------ */

enum { INVALID_SIZE = 3 }; /* cusolver_common.h, CUSOLVER_STATUS_INVALID_VALUE */

static void assumed(void)
{
    ghost_assumed("cuSOLVER workspace, as large as on an H100, or as LAPACK documents");
}

/* In elements, as an int; a larger size is refused, as the library does. */
#define IN_ELEMENTS(prototype, elements)                                                                     \
    API status prototype { return in_elements(size, elements); }

static status in_elements(int *out, int64_t elements)
{
    assumed();
    if (elements > INT32_MAX)
        return INVALID_SIZE;
    *out = (int)most(1, elements);
    return SUCCESS;
}

/* In bytes; nothing on the host. */
#define IN_BYTES(prototype, elements)                                                                        \
    API status prototype                                                                                     \
    {                                                                                                        \
        assumed();                                                                                           \
        *on_device = (size_t)most(1, elements) * data_type_width(a_type);                                    \
        *on_host = 0;                                                                                        \
        return SUCCESS;                                                                                      \
    }

/* The routines that exist once per type: S, D, C and Z. LAPACK names them or and sy for
 * real matrices, un and he for complex ones. */
#define ROUTINES(T, q, sy, width)                                                                            \
    IN_ELEMENTS(cusolverDn##T##potrf_bufferSize(void *handle, int uplo, int n, void *a, int lda, int *size), \
                panel(n))                                                                                    \
    IN_ELEMENTS(cusolverDn##T##getrf_bufferSize(void *handle, int m, int n, void *a, int lda, int *size),    \
                panel(n))                                                                                    \
    IN_ELEMENTS(cusolverDn##T##geqrf_bufferSize(void *handle, int m, int n, void *a, int lda, int *size),    \
                geqrf(m, n, width))                                                                          \
    IN_ELEMENTS(cusolverDn##T##q##gqr_bufferSize(void *handle, int m, int n, int k, const void *a, int lda,  \
                                                 const void *tau, int *size),                                \
                orgqr(n))                                                                                    \
    IN_ELEMENTS(cusolverDn##T##q##mqr_bufferSize(void *handle, int side, int operation, int m, int n, int k, \
                                                 const void *a, int lda, const void *tau, const void *c,     \
                                                 int ldc, int *size),                                        \
                apply_q(side, m, n))                                                                         \
    IN_ELEMENTS(cusolverDn##T##sytrf_bufferSize(void *handle, int n, void *a, int lda, int *size), panel(n)) \
    IN_ELEMENTS(cusolverDn##T##gesvd_bufferSize(void *handle, int m, int n, int *size), gesvd(m, n))         \
    IN_ELEMENTS(                                                                                             \
        cusolverDn##T##gesvdj_bufferSize(void *handle, int vectors, int economy, int m, int n,               \
                                         const void *a, int lda, const void *s, const void *u, int ldu,      \
                                         const void *v, int ldv, int *size, void *settings),                 \
        gesvdj(m, n))                                                                                        \
    IN_ELEMENTS(cusolverDn##T##gesvdjBatched_bufferSize(                                                     \
                    void *handle, int vectors, int m, int n, const void *a, int lda, const void *s,          \
                    const void *u, int ldu, const void *v, int ldv, int *size, void *settings, int batch),   \
                jacobi(m, n, batch))                                                                         \
    IN_ELEMENTS(cusolverDn##T##gesvdaStridedBatched_bufferSize(                                              \
                    void *handle, int vectors, int rank, int m, int n, const void *a, int lda,               \
                    long long a_step, const void *s, long long s_step, const void *u, int ldu,               \
                    long long u_step, const void *v, int ldv, long long v_step, int *size, int batch),       \
                jacobi(m, n, batch))                                                                         \
    IN_ELEMENTS(cusolverDn##T##sy##evd_bufferSize(void *handle, int vectors, int uplo, int n, const void *a, \
                                                  int lda, const void *w, int *size),                        \
                syevd(n))                                                                                    \
    IN_ELEMENTS(cusolverDn##T##sy##evj_bufferSize(void *handle, int vectors, int uplo, int n, const void *a, \
                                                  int lda, const void *w, int *size, void *settings),        \
                jacobi(n, n, 1))                                                                             \
    IN_ELEMENTS(cusolverDn##T##sy##evjBatched_bufferSize(void *handle, int vectors, int uplo, int n,         \
                                                         const void *a, int lda, const void *w, int *size,   \
                                                         void *settings, int batch),                         \
                jacobi(n, n, batch))

ROUTINES(S, or, sy, 4)
ROUTINES(D, or, sy, 8)
ROUTINES(C, un, he, 8)
ROUTINES(Z, un, he, 16)

/* The routines that take the type as an argument. */

IN_BYTES(cusolverDnXpotrf_bufferSize(void *handle, void *settings, int uplo, int64_t n, int a_type,
                                     const void *a, int64_t lda, int compute_type, size_t *on_device,
                                     size_t *on_host),
         panel(n))
IN_BYTES(cusolverDnXgeqrf_bufferSize(void *handle, void *settings, int64_t m, int64_t n, int a_type,
                                     const void *a, int64_t lda, int tau_type, const void *tau,
                                     int compute_type, size_t *on_device, size_t *on_host),
         geqrf(m, n, (int64_t)data_type_width(a_type)))
IN_BYTES(cusolverDnXsytrs_bufferSize(void *handle, int uplo, int64_t n, int64_t columns, int a_type,
                                     const void *a, int64_t lda, const int64_t *pivots, int b_type, void *b,
                                     int64_t ldb, size_t *on_device, size_t *on_host),
         panel(columns))
IN_BYTES(cusolverDnXsyevd_bufferSize(void *handle, void *settings, int vectors, int uplo, int64_t n,
                                     int a_type, const void *a, int64_t lda, int w_type, const void *w,
                                     int compute_type, size_t *on_device, size_t *on_host),
         syevd(n))
IN_BYTES(cusolverDnXsyevBatched_bufferSize(void *handle, void *settings, int vectors, int uplo, int64_t n,
                                           int a_type, const void *a, int64_t lda, int w_type, const void *w,
                                           int compute_type, size_t *on_device, size_t *on_host,
                                           int64_t batch),
         syev_batched(n, batch))
IN_BYTES(cusolverDnXgeev_bufferSize(void *handle, void *settings, int left, int right, int64_t n, int a_type,
                                    const void *a, int64_t lda, int w_type, const void *w, int left_type,
                                    const void *left_vectors, int64_t left_step, int right_type,
                                    const void *right_vectors, int64_t right_step, int compute_type,
                                    size_t *on_device, size_t *on_host),
         geev(n))
